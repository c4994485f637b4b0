//! Appends new keys and values to a cache in place, and rotates keys and queries (rotary embedding):
//! [`fa_core::Append`] says what that means. The bits are those of the GPU's kernel.

mod rows;

use fa_core::{Append, QueryPositions, Side, SideRows};

pub use rows::Table;
use rows::{Row, Turns, copy, write};

use crate::element::Element;
use crate::error::CpuError;
use crate::view::{TensorMut, TensorRef};

/// The tensors of an append; shapes as [`Append`]'s methods say.
#[derive(Debug)]
pub struct AppendTensors<'a, T> {
    /// New keys.
    pub k_new: TensorRef<'a, T>,
    /// New values.
    pub v_new: TensorRef<'a, T>,
    /// The cache of keys, written where rows are appended.
    pub k_cache: TensorMut<'a, T>,
    /// The cache of values.
    pub v_cache: TensorMut<'a, T>,
    /// Queries, rotated in place; `None` where none are.
    pub q: Option<TensorMut<'a, T>>,
    /// Cosines and sines; `None` without rotary embedding.
    pub tables: Option<[Table<'a, T>; 2]>,
}

/// Lengths, starts and pages of an append.
#[derive(Debug, Default)]
pub struct AppendExtras<'a> {
    /// `[batch + 1]`: the first row of each sequence's new keys, where they are packed.
    pub cu_new: Option<&'a [i32]>,
    /// `[batch]`: new keys in use, where they are used in part.
    pub used_new: Option<&'a [i32]>,
    /// `[batch]`: keys in the cache before; `None` for none.
    pub seqused_k: Option<&'a [i32]>,
    /// `[batch, table_columns]`: pages of each sequence.
    pub page_table: Option<&'a [i32]>,
    /// `[batch + 1]`: the first query of each sequence, where they are packed.
    pub cu_seqlens_q: Option<&'a [i32]>,
    /// `[batch]`: queries in use, where they are used in part.
    pub seqused_q: Option<&'a [i32]>,
    /// `[batch]`, written: keys in the cache afterwards.
    pub used_out: Option<&'a mut [i32]>,
}

fn check_shape<T: Copy>(
    tensor: &'static str,
    view: &TensorRef<'_, T>,
    need: [usize; 4],
) -> Result<(), CpuError> {
    let got = view.shape();
    if got == need { Ok(()) } else { Err(CpuError::Shape { tensor, got, need }) }
}

/// Checks that exactly the arrays that the append names are given, with the right lengths.
fn check_words(
    name: &'static str,
    given: Option<&[i32]>,
    asked: bool,
    is_optional: bool,
    need: usize,
) -> Result<(), CpuError> {
    match given {
        None if asked && !is_optional => Err(CpuError::Extra { name, asked: true }),
        Some(_) if !asked => Err(CpuError::Extra { name, asked: false }),
        Some(words) if words.len() < need => Err(CpuError::Length { buffer: name, got: words.len(), need }),
        _ => Ok(()),
    }
}

/// Checks shapes, types, lengths and starts against what the append says.
///
/// # Errors
/// Those of [`append`].
pub fn check<T: Element>(
    append: &Append,
    extras: &AppendExtras<'_>,
    tensors: &AppendTensors<'_, T>,
) -> Result<(), CpuError> {
    append.check()?;
    if T::DTYPE != Some(append.dtype) {
        return Err(CpuError::Dtype { got: T::DTYPE, need: append.dtype });
    }
    check_shape("k_new", &tensors.k_new, append.new_shape(append.head_dim))?;
    check_shape("v_new", &tensors.v_new, append.new_shape(append.head_dim_v))?;
    check_shape("k_cache", &tensors.k_cache.as_ref(), append.cache_shape(append.head_dim))?;
    check_shape("v_cache", &tensors.v_cache.as_ref(), append.cache_shape(append.head_dim_v))?;
    let queries = append.queries();
    match (&tensors.q, queries) {
        (Some(q), Some(_)) => check_shape("q", &q.as_ref(), append.query_shape())?,
        (None, None) => {}
        (given, _) => return Err(CpuError::Extra { name: "q", asked: given.is_none() }),
    }
    match (&tensors.tables, append.rotary) {
        (Some(tables), Some(rotary)) => {
            let need = rotary.positions * rotary.dim / 2;
            for (buffer, table) in ["cos", "sin"].into_iter().zip(tables) {
                if table.len() < need {
                    return Err(CpuError::Length { buffer, got: table.len(), need });
                }
                let dtype = match table {
                    Table::F32(_) => fa_core::Dtype::F32,
                    Table::Same(_) => append.dtype,
                };
                if dtype != rotary.table {
                    return Err(CpuError::Dtype { got: Some(dtype), need: rotary.table });
                }
            }
        }
        (None, None) => {}
        (given, _) => return Err(CpuError::Extra { name: "tables", asked: given.is_none() }),
    }
    let (batch, none) = (append.sequences, Side::padded(0));
    let of_q = queries.map_or(none, |queries| queries.rows);
    let is_packed = |side: Side| matches!(side.rows, SideRows::Packed { .. });
    let entries = batch * append.table_columns();
    check_words("cu_new", extras.cu_new, is_packed(append.new), false, batch + 1)?;
    check_words("used_new", extras.used_new, append.new.used, false, batch)?;
    check_words("seqused_k", extras.seqused_k, true, true, batch)?;
    let is_paged = matches!(append.cache.rows, SideRows::Paged { .. });
    check_words("page_table", extras.page_table, is_paged, false, entries)?;
    check_words("cu_seqlens_q", extras.cu_seqlens_q, is_packed(of_q), false, batch + 1)?;
    check_words("seqused_q", extras.seqused_q, of_q.used, false, batch)?;
    check_words("used_out", extras.used_out.as_deref(), true, true, batch)?;
    for (name, starts) in [("cu_new", extras.cu_new), ("cu_seqlens_q", extras.cu_seqlens_q)] {
        let Some(starts) = starts else { continue };
        for index in 0..batch {
            let (before, after) = (starts[index], starts[index + 1]);
            if before > after {
                return Err(CpuError::Descending { name, index, before, after });
            }
        }
    }
    Ok(())
}

/// The rows of a side for sequence `sequence`: its first row (entry and row of its tensor) and the number of
/// rows in use.
fn rows_of(side: Side, cu: Option<&[i32]>, used: Option<&[i32]>, sequence: usize) -> (usize, usize, usize) {
    let (entry, begin, all) = match (side.rows, cu) {
        (SideRows::Packed { total, .. }, Some(cu)) => {
            let begin = usize::try_from(cu[sequence]).unwrap_or(0).min(total);
            let end = usize::try_from(cu[sequence + 1]).unwrap_or(0).min(total);
            (0, begin, end.saturating_sub(begin))
        }
        (rows, _) => (sequence, 0, Side { rows, used: false }.max()),
    };
    let used = used.map_or(all, |used| usize::try_from(used[sequence]).unwrap_or(0));
    (entry, begin, all.min(used))
}

/// Appends; returns how many rows of keys and queries the cache had no room for.
///
/// # Errors
/// [`CpuError::Append`], and shapes, types and lengths that are not what the append says; nothing has been
/// written then.
pub fn append<T: Element>(
    append: &Append,
    extras: &mut AppendExtras<'_>,
    tensors: &mut AppendTensors<'_, T>,
) -> Result<usize, CpuError> {
    check(append, extras, tensors)?;
    let mut dropped = 0;
    let positions = append.rotary.map(|rotary| rotary.positions);
    let has_row = |position: usize| positions.is_none_or(|positions| position < positions);
    let (mut of_new, mut of_q) = (Vec::new(), Vec::new());
    for sequence in 0..append.sequences {
        let cached = extras.seqused_k.map_or(0, |used| usize::try_from(used[sequence]).unwrap_or(0));
        let (entry, begin, count) = rows_of(append.new, extras.cu_new, extras.used_new, sequence);
        for t in 0..count {
            let position = cached + t;
            match place(append, extras.page_table, sequence, position).filter(|_| has_row(position)) {
                Some(to) => of_new.push(Row { from: (entry, begin + t), to, position }),
                None => dropped += 1,
            }
        }
        if let Some(out) = extras.used_out.as_deref_mut() {
            out[sequence] = (cached + count) as i32;
        }
        let Some(queries) = append.queries() else { continue };
        let (entry, begin, count) = rows_of(queries.rows, extras.cu_seqlens_q, extras.seqused_q, sequence);
        for t in 0..count {
            let position = match queries.positions {
                QueryPositions::Following => cached + t,
                QueryPositions::Same => cached,
            };
            let at = (entry, begin + t);
            if has_row(position) {
                of_q.push(Row { from: at, to: at, position });
            } else {
                dropped += 1;
            }
        }
    }
    let AppendTensors { k_new, v_new, k_cache, v_cache, q, tables } = tensors;
    let turns = tables.as_ref().zip(append.rotary).map(|(tables, rotary)| Turns::new(rotary, tables));
    write(k_cache, &of_new, |row, head, own, scratch| {
        copy(k_new, row.from, head, own);
        if let Some(turns) = &turns {
            turns.apply(own, row.position, scratch);
        }
    });
    write(v_cache, &of_new, |row, head, own, _| copy(v_new, row.from, head, own));
    if let (Some(q), Some(turns)) = (q, &turns) {
        write(q, &of_q, |row, _, own, scratch| turns.apply(own, row.position, scratch));
    }
    Ok(dropped)
}

/// The location of a position of the cache: sequence or page, and row; `None` where there is no room.
fn place(append: &Append, table: Option<&[i32]>, sequence: usize, position: usize) -> Option<(usize, usize)> {
    if position >= append.cache.max() {
        return None;
    }
    match (append.cache.rows, table) {
        (SideRows::Paged { page, pages, .. }, Some(table)) => {
            let block = usize::try_from(table[sequence * append.table_columns() + position / page]).ok()?;
            (block < pages).then_some((block, position % page))
        }
        _ => Some((sequence, position)),
    }
}
