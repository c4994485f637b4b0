//! Appends new keys and values to a cache in place, and rotates keys and queries (rotary embedding):
//! [`fa_core::Append`] says what that means. The bits are those of the GPU's kernel.

mod codes;
mod rows;

use fa_core::{Append, DescaleForm, QueryPositions, Side, SideRows};

pub use rows::Table;
use rows::{Row, Scratch, Turns, copy, write};

use crate::element::Element;
use crate::error::CpuError;
use crate::view::{TensorMut, TensorRef};
use codes::{Descaling, Quantiser};

/// A cache of K or V, written where rows are appended. Made from a tensor of the new rows' type or of bytes,
/// which hold codes.
#[derive(Debug)]
pub enum CacheMut<'a, T> {
    /// Elements of the type of the new rows.
    Same(TensorMut<'a, T>),
    /// The bytes of codes.
    Codes(TensorMut<'a, u8>),
}

impl<'a, T: Element> From<TensorMut<'a, T>> for CacheMut<'a, T> {
    fn from(tensor: TensorMut<'a, T>) -> CacheMut<'a, T> {
        CacheMut::Same(tensor)
    }
}

impl<'a, T: Element> From<TensorMut<'a, u8>> for CacheMut<'a, T> {
    fn from(tensor: TensorMut<'a, u8>) -> CacheMut<'a, T> {
        CacheMut::Codes(tensor)
    }
}

impl<'a, T> CacheMut<'a, T> {
    /// The tensor, where its elements are of the new rows' type.
    pub fn same(&mut self) -> Option<&mut TensorMut<'a, T>> {
        match self {
            CacheMut::Same(tensor) => Some(tensor),
            CacheMut::Codes(_) => None,
        }
    }

    fn shape(&self) -> [usize; 4] {
        match self {
            CacheMut::Same(tensor) => tensor.shape(),
            CacheMut::Codes(tensor) => tensor.shape(),
        }
    }
}

/// The tensors of an append; shapes as [`Append`]'s methods say.
#[derive(Debug)]
pub struct AppendTensors<'a, T> {
    /// New keys.
    pub k_new: TensorRef<'a, T>,
    /// New values.
    pub v_new: TensorRef<'a, T>,
    /// The cache of keys.
    pub k_cache: CacheMut<'a, T>,
    /// The cache of values.
    pub v_cache: CacheMut<'a, T>,
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
    /// Descales of a K of codes, in the shape of [`Append::descale_shape`]: read, or written where they are
    /// per row and head.
    pub k_descale: Option<&'a mut [f32]>,
    /// The same of V.
    pub v_descale: Option<&'a mut [f32]>,
}

fn check_shape(tensor: &'static str, got: [usize; 4], need: [usize; 4]) -> Result<(), CpuError> {
    if got == need { Ok(()) } else { Err(CpuError::Shape { tensor, got, need }) }
}

/// Checks that exactly the arrays that the append names are given, with the right lengths.
fn check_words<N>(
    name: &'static str,
    given: Option<&[N]>,
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
    check_shape("k_new", tensors.k_new.shape(), append.new_shape(append.head_dim))?;
    check_shape("v_new", tensors.v_new.shape(), append.new_shape(append.head_dim_v))?;
    check_shape("k_cache", tensors.k_cache.shape(), append.cache_shape(append.head_dim))?;
    check_shape("v_cache", tensors.v_cache.shape(), append.cache_shape(append.head_dim_v))?;
    for cache in [&tensors.k_cache, &tensors.v_cache] {
        let need = append.cache_dtype();
        match (cache, append.codes) {
            (CacheMut::Same(_), None) | (CacheMut::Codes(_), Some(_)) => {}
            (CacheMut::Same(_), Some(_)) => return Err(CpuError::Dtype { got: T::DTYPE, need }),
            (CacheMut::Codes(_), None) => return Err(CpuError::Codes { need }),
        }
    }
    let queries = append.queries();
    match (&tensors.q, queries) {
        (Some(q), Some(_)) => check_shape("q", q.shape(), append.query_shape())?,
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
    let descales = append.descales();
    for (name, form, given) in
        [("k_descale", descales.k, &extras.k_descale), ("v_descale", descales.v, &extras.v_descale)]
    {
        let need = append.descale_shape(form).map(|shape| shape.iter().product());
        check_words(name, given.as_deref(), need.is_some(), false, need.unwrap_or(0))?;
        // Those of each row are written.
        if form != DescaleForm::TokenHead {
            crate::batch::check_descales(name, given.as_deref().unwrap_or_default(), 0)?;
        }
    }
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
                Some(to) => of_new.push(Row { from: (entry, begin + t), to, position, sequence }),
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
                of_q.push(Row { from: at, to: at, position, sequence });
            } else {
                dropped += 1;
            }
        }
    }
    let AppendTensors { k_new, v_new, k_cache, v_cache, q, tables } = tensors;
    let turns = tables.as_ref().zip(append.rotary).map(|(tables, rotary)| Turns::new(rotary, tables));
    let k_row = |row: &Row, head: usize, own: &mut [T], scratch: &mut Scratch| {
        copy(k_new, row.from, head, own);
        if let Some(turns) = &turns {
            turns.apply(own, row.position, scratch);
        }
    };
    let v_row = |row: &Row, head: usize, own: &mut [T], _: &mut Scratch| copy(v_new, row.from, head, own);
    let descales = append.descales();
    let of_k = Descaling::new(append, descales.k, extras.k_descale.as_deref_mut());
    let of_v = Descaling::new(append, descales.v, extras.v_descale.as_deref_mut());
    match k_cache {
        CacheMut::Same(cache) => write(cache, &of_new, k_row),
        CacheMut::Codes(cache) => Quantiser::new(append, of_k).write(cache, &of_new, k_row),
    }
    match v_cache {
        CacheMut::Same(cache) => write(cache, &of_new, v_row),
        CacheMut::Codes(cache) => Quantiser::new(append, of_v).write(cache, &of_new, v_row),
    }
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
