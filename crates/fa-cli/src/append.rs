//! New keys and values that a file has beside its cache: appended, and rotated by their positions where it
//! has rotary tables, before attention is computed on the grown cache.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fa_attn::{
    Append, AppendExtras, AppendTensors, Element, QueryPositions, Rotary, RotaryPairs, Table, Tensor,
};
use fa_core::append::RotaryQueries;
use fa_core::extras::OwnedExtras;
use fa_core::quantize::Codes;
use fa_core::{CacheCodes, Dtype, Problem, Side, SideRows, TensorLayout, counted};

use crate::kv_tensor::KvTensor;
use crate::safetensors::{Stored, TensorFile};
use crate::sequences::{SideTensors, shape_of};
use crate::term::failure::InputError;

/// The tensors of [`NewRows`], which go together.
const NEW: [&str; 2] = ["k_new", "v_new"];

/// Their starts, where they are packed.
const CU_NEW: &str = "cu_seqlens_k_new";

/// Cosines and sines of rotary embedding.
const TABLES: [&str; 2] = ["rotary_cos", "rotary_sin"];

/// Cosines or sines, in f32 or the tensors' type.
#[derive(Debug)]
enum Values<T> {
    F32(Vec<f32>),
    Same(Vec<T>),
}

/// The rotary embedding and its tables.
type Tables<T> = (Rotary, [Values<T>; 2]);

/// What is appended.
#[derive(Debug)]
pub(crate) struct NewRows<T> {
    append: Append,
    /// `[batch, rows, heads_kv, head_dim]`, or `[1, total, ...]` where they are packed.
    k: Tensor<T>,
    v: Tensor<T>,
    tables: Option<[Values<T>; 2]>,
    /// `[batch + 1]`.
    cu: Option<Vec<i32>>,
    /// Keys in the cache before, `[batch]`.
    before: Vec<i32>,
    /// New keys of each sequence.
    counts: Vec<usize>,
}

/// What an append did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Appended {
    /// New keys of all sequences.
    pub rows: usize,
    /// How rows were rotated; `None` without rotary tables.
    pub rotary: Option<Rotary>,
    /// Time taken, including the copies of the cache on a GPU.
    pub time: Duration,
}

impl NewRows<()> {
    /// Whether the file has new keys.
    ///
    /// # Errors
    /// [`InputError`] for parts of an append without the others.
    pub(crate) fn are_in(file: &TensorFile, is_interleaved: bool) -> Result<bool, InputError> {
        let usage = |message: String| Err(InputError::Usage(message));
        let has = |names: [&'static str; 2]| names.map(|name| file.has(name));
        let lone = |names: [&'static str; 2]| match has(names) {
            [true, false] => Some((names[0], names[1])),
            [false, true] => Some((names[1], names[0])),
            _ => None,
        };
        for names in [NEW, TABLES] {
            if let Some((there, absent)) = lone(names) {
                return usage(format!("the file has {there}, but no {absent}: give both or neither"));
            }
        }
        let is_there = file.has(NEW[0]);
        for name in [TABLES[0], CU_NEW] {
            if file.has(name) && !is_there {
                return usage(format!("the file has {name}, but no k_new and v_new, which it is about"));
            }
        }
        if is_interleaved && !file.has(TABLES[0]) {
            return usage(
                "--rotary-interleaved says how rotary_cos and rotary_sin are used: the file has none"
                    .to_owned(),
            );
        }
        Ok(is_there)
    }

    /// Whether the file has the tables that new keys are rotated by.
    pub(crate) fn are_rotated(file: &TensorFile) -> bool {
        file.has(TABLES[0])
    }
}

/// The shapes of k_new and v_new, checked to be rows of the cache in q's type.
///
/// # Errors
/// [`InputError`] for other types and shapes.
fn new_shapes(
    file: &TensorFile,
    problem: &Problem,
    layout: TensorLayout,
    is_packed: bool,
) -> anyhow::Result<[[usize; 4]; 2]> {
    let shape = |name| shape_of(file, name, layout, CU_NEW);
    let shapes = [shape("k_new")?, shape("v_new")?];
    let of_q = file.entry("q")?.dtype;
    let (first, rows) = (if is_packed { 1 } else { problem.lengths.sequences() }, shapes[0][1]);
    let dims = [problem.head_dim_k(), problem.head_dim_v];
    for ((name, got), dim) in ["k_new", "v_new"].into_iter().zip(shapes).zip(dims) {
        let entry = file.entry(name)?;
        if entry.dtype != of_q {
            let need = format!("q holds {of_q}, and all tensors must be of one type");
            let got = entry.dtype.to_string();
            return Err(InputError::Dtype { name: name.to_owned(), got, need }.into());
        }
        if got != [first, rows, problem.heads_kv, dim] {
            let whose = if name == "k_new" { "k has" } else { "k_new and v have" };
            let need = format!(
                "it must have {}, {}, {} and {}, as {whose}",
                counted(first, "sequence"),
                counted(rows, "row"),
                counted(problem.heads_kv, "head"),
                counted(dim, "element")
            );
            let got = entry.shape.clone();
            return Err(InputError::Shape { name: name.to_owned(), got, need }.into());
        }
    }
    Ok(shapes)
}

impl<T: Element + Stored> NewRows<T> {
    /// Reads what the file appends to the cache of `problem`; `sides` holds afterwards the lengths with the
    /// new keys.
    ///
    /// # Errors
    /// [`InputError`] for tensors of wrong types and shapes, for rows that the cache has no room for, and for
    /// positions that the rotary tables do not have.
    pub(crate) fn read(
        file: &TensorFile,
        problem: &Problem,
        sides: &mut SideTensors,
        layout: TensorLayout,
        is_interleaved: bool,
    ) -> anyhow::Result<NewRows<T>> {
        let usage = |message: &str| Err(InputError::Usage(message.to_owned()).into());
        let Some(before) = sides.values.seqused_k.clone() else {
            return usage(
                "the file has k_new, but no cache_seqlens (or seqused_k), i32 [batch]: new keys go behind \
                 those that a cache holds",
            );
        };
        if sides.values.cu_seqlens_k.is_some() {
            return usage(
                "the file has k_new and cu_seqlens_k: packed keys have no room for new ones; give k and v \
                 padded, or in pages",
            );
        }
        let batch = problem.lengths.sequences();
        let cu = match file.has(CU_NEW) {
            true => Some(file.read::<i32>(CU_NEW)?),
            false => None,
        };
        let [k, v] = new_shapes(file, problem, layout, cu.is_some())?;
        let rows = k[1];
        let counts = counts(cu.as_deref(), batch, rows)?;
        let new = match &cu {
            Some(_) => Side::packed(rows, counts.iter().copied().max().unwrap_or(0)),
            None => Side::padded(rows),
        };
        if problem.latent && NewRows::are_rotated(file) {
            return usage(
                "the file has rotary_cos and --latent: q begins with latents, which are not rotated; rotate \
                 q's last columns and k_new before",
            );
        }
        let (rotary, tables) = rotary(file, problem, is_interleaved)?.unzip();
        let append = Append {
            sequences: batch,
            new,
            cache: Side { rows: problem.lengths.k().rows, used: false },
            heads_kv: problem.heads_kv,
            head_dim: problem.head_dim_k(),
            head_dim_v: problem.head_dim_v,
            dtype: problem.types.q,
            codes: Codes::of(problem.types.kv).map(|kind| CacheCodes { kind, descales: problem.descales }),
            rotary,
        };
        append.check().map_err(|error| InputError::Usage(format!("appending k_new and v_new: {error}")))?;
        check_room(&append, &before, &counts, &queries(problem, sides))?;
        check_places(&append, sides, &before, &counts)?;
        let lengths = before.iter().zip(&counts).map(|(&before, &count)| before + count as i32);
        sides.values.seqused_k = Some(lengths.collect());
        let tensor = |name: &str, shape| -> anyhow::Result<Tensor<T>> {
            Ok(Tensor::with_layout(shape, layout, file.read(name)?)?)
        };
        Ok(NewRows { append, k: tensor("k_new", k)?, v: tensor("v_new", v)?, tables, cu, before, counts })
    }

    /// What is appended, as data.
    pub(crate) fn append(&self) -> Append {
        self.append
    }

    /// Appends to the cache `k` and `v` by `act`, and rotates the queries `q`.
    ///
    /// # Errors
    /// Those of `act`.
    pub(crate) fn apply(
        &self,
        (q, [k, v]): (&mut Tensor<T>, [&mut KvTensor<T>; 2]),
        sides: &mut SideTensors,
        act: impl FnOnce(&mut AppendExtras<'_>, &mut AppendTensors<'_, T>) -> Result<usize, fa_attn::Error>,
    ) -> anyhow::Result<Appended> {
        let of_q = self.append.queries().map(|queries| queries.rows);
        let is_packed = |side: Side| matches!(side.rows, SideRows::Packed { .. });
        let OwnedExtras { page_table, cu_seqlens_q, seqused_q, k_descale, v_descale, .. } = &mut sides.values;
        let mut extras = AppendExtras {
            cu_new: self.cu.as_deref(),
            used_new: None,
            seqused_k: Some(&self.before),
            page_table: page_table.as_deref(),
            cu_seqlens_q: cu_seqlens_q.as_deref().filter(|_| of_q.is_some_and(is_packed)),
            seqused_q: seqused_q.as_deref().filter(|_| of_q.is_some()),
            used_out: None,
            k_descale: k_descale.as_deref_mut(),
            v_descale: v_descale.as_deref_mut(),
        };
        let tables = self.tables.as_ref().map(|tables| {
            [0, 1].map(|i: usize| match &tables[i] {
                Values::F32(values) => Table::F32(values),
                Values::Same(values) => Table::Same(values),
            })
        });
        let mut tensors = AppendTensors {
            k_new: self.k.view("k_new")?,
            v_new: self.v.view("v_new")?,
            k_cache: k.view_mut("k")?,
            v_cache: v.view_mut("v")?,
            q: of_q.map(|_| q.view_mut("q")).transpose()?,
            tables,
        };
        let start = Instant::now();
        let left_out = act(&mut extras, &mut tensors)?;
        anyhow::ensure!(left_out == 0, "{left_out} rows had no place though each was checked to have one");
        let rotary = self.append.rotary;
        Ok(Appended { rows: self.counts.iter().sum(), rotary, time: start.elapsed() })
    }
}

/// New keys of each sequence.
fn counts(cu: Option<&[i32]>, batch: usize, rows: usize) -> Result<Vec<usize>, InputError> {
    let Some(starts) = cu else { return Ok(vec![rows; batch]) };
    let refuse = |why: String| Err(InputError::Usage(format!("tensor '{CU_NEW}': {why}")));
    if starts.len() != batch + 1 {
        return refuse(format!("it has {} entries, a batch of {batch} needs {}", starts.len(), batch + 1));
    }
    if starts[0] != 0 {
        return refuse(format!("it begins with {}, it must begin with 0", starts[0]));
    }
    let last = starts[batch];
    let mut counts = Vec::with_capacity(batch);
    for (index, pair) in starts.windows(2).enumerate() {
        match usize::try_from(i64::from(pair[1]) - i64::from(pair[0])) {
            Ok(count) => counts.push(count),
            Err(_) => {
                return refuse(format!(
                    "entry {} is {}, less than the {} before it",
                    index + 1,
                    pair[1],
                    pair[0]
                ));
            }
        }
    }
    if last as usize > rows {
        return refuse(format!("it ends with {last}, k_new has {rows} rows"));
    }
    Ok(counts)
}

/// Queries of each sequence.
fn queries(problem: &Problem, sides: &SideTensors) -> Vec<usize> {
    let max = problem.lengths.max_q();
    (0..problem.lengths.sequences())
        .map(|sequence| {
            let all = match sides.values.cu_seqlens_q.as_deref() {
                Some(starts) => usize::try_from(starts[sequence + 1] - starts[sequence]).unwrap_or(0),
                None => max,
            };
            let used =
                sides.values.seqused_q.as_deref().map(|used| usize::try_from(used[sequence]).unwrap_or(0));
            used.map_or(all, |used| used.min(all))
        })
        .collect()
}

/// The rotary embedding of the file's tables, which also rotates the queries: each by the position of its new
/// key under a causal mask or window, all by the first new position otherwise.
fn rotary<T: Stored>(
    file: &TensorFile,
    problem: &Problem,
    is_interleaved: bool,
) -> anyhow::Result<Option<Tables<T>>> {
    if !file.has(TABLES[0]) {
        return Ok(None);
    }
    let (cos, sin) = (file.entry(TABLES[0])?, file.entry(TABLES[1])?);
    let of_q = file.entry("q")?.dtype;
    for (name, entry) in TABLES.into_iter().zip([cos, sin]) {
        let refuse =
            |need: String| InputError::Shape { name: name.to_owned(), got: entry.shape.clone(), need };
        if entry.shape.len() != 2 {
            return Err(refuse("it must be [positions, rotary_dim / 2]".to_owned()).into());
        }
        if entry.shape != cos.shape {
            return Err(refuse(format!("it must have the shape of rotary_cos, {:?}", cos.shape)).into());
        }
        if 2 * entry.shape[1] > problem.head_dim {
            let most = problem.head_dim / 2;
            let need = format!(
                "its columns, half of the rotated elements, must be at most {most}, half of head_dim"
            );
            return Err(refuse(need).into());
        }
        if entry.dtype != cos.dtype || (entry.dtype != safetensors::Dtype::F32 && entry.dtype != of_q) {
            let need = if of_q == safetensors::Dtype::F32 {
                "both tables must hold F32, as q does".to_owned()
            } else {
                format!("both tables must hold F32, or both {of_q} as q does")
            };
            return Err(
                InputError::Dtype { name: name.to_owned(), got: entry.dtype.to_string(), need }.into()
            );
        }
    }
    let is_f32 = cos.dtype == safetensors::Dtype::F32;
    let read = |name| -> Result<Values<T>, InputError> {
        Ok(if is_f32 { Values::F32(file.read(name)?) } else { Values::Same(file.read(name)?) })
    };
    let Problem { lengths, heads_q, mask, .. } = problem;
    let positions = if mask.is_full() { QueryPositions::Same } else { QueryPositions::Following };
    let rotary = Rotary {
        dim: cos.shape[1].saturating_mul(2),
        pairs: if is_interleaved { RotaryPairs::Neighbours } else { RotaryPairs::Halves },
        positions: cos.shape[0],
        table: if is_f32 { Dtype::F32 } else { problem.types.q },
        queries: Some(RotaryQueries { rows: lengths.q(), heads: *heads_q, positions }),
    };
    Ok(Some((rotary, [read(TABLES[0])?, read(TABLES[1])?])))
}

/// Checks that no two sequences append to the same place of a page, where the last would be all that is left.
fn check_places(
    append: &Append,
    sides: &SideTensors,
    before: &[i32],
    counts: &[usize],
) -> Result<(), InputError> {
    let (SideRows::Paged { page, .. }, Some(table)) = (append.cache.rows, &sides.values.page_table) else {
        return Ok(());
    };
    let columns = table.len() / before.len().max(1);
    let mut places = HashMap::new();
    for (sequence, (&before, &count)) in before.iter().zip(counts).enumerate() {
        let before = usize::try_from(before).unwrap_or(0);
        for key in before..before + count {
            let Some(&entry) = table.get(sequence * columns + key / page) else { continue };
            let slot = key % page;
            if let Some(other) = places.insert((entry, slot), sequence) {
                return Err(InputError::Usage(format!(
                    "tensor 'page_table': sequences {other} and {sequence} both append to row {slot} of page \
                     {entry}, where one key would be lost: give each a page of its own for new keys"
                )));
            }
        }
    }
    Ok(())
}

/// Checks that the cache has room for every new key, and the tables a position for every rotated row.
fn check_room(
    append: &Append,
    before: &[i32],
    counts: &[usize],
    queries: &[usize],
) -> Result<(), InputError> {
    let room = append.cache.max();
    for (sequence, (&before, &count)) in before.iter().zip(counts).enumerate() {
        // Lengths of the cache have been checked to be 0 or more.
        let before = usize::try_from(before).unwrap_or(0);
        if count > 0 && before + count > room {
            return Err(InputError::Usage(format!(
                "tensor 'k_new': sequence {sequence} has {before} keys in the cache and {count} new ones, \
                 the cache has room for {room} of a sequence"
            )));
        }
        let Some(rotary) = append.rotary else { continue };
        let follows = rotary.queries.is_some_and(|queries| queries.positions == QueryPositions::Following);
        let of_queries = if follows { queries[sequence] } else { queries[sequence].min(1) };
        let need = before + count.max(of_queries);
        if need > rotary.positions && count.max(of_queries) > 0 {
            return Err(InputError::Usage(format!(
                "tensor 'rotary_cos': sequence {sequence} has rows up to position {}, the tables have {} \
                 positions",
                need - 1,
                rotary.positions
            )));
        }
    }
    Ok(())
}
