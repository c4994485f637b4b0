//! Rows of the cache that each query names (sparse attention, as DeepSeek's): `indices` of a file.

use fa_core::TensorLayout;

use crate::names::{KV, USED_K};
use crate::safetensors::TensorFile;
use crate::term::failure::InputError;

/// `[total_q, most]`: rows of the cache, counted over its pages; those outside of it name none.
pub(crate) const INDICES: &str = "indices";

/// `[total_q]`: how many of a query's entries count; all where the file has none.
const LENGTHS: &str = "topk_length";

/// Each query as a sequence of its own, whose keys lie in pages of one row.
#[derive(Debug)]
pub(crate) struct NamedRows {
    /// `[total_q, most]`, the rows that count first.
    pub table: Vec<i32>,
    /// Entries of the table for a query.
    pub most: usize,
    /// `[total_q]`: those that count.
    pub used: Vec<i32>,
    /// `[total_q + 1]`.
    pub starts: Vec<i32>,
}

impl NamedRows {
    /// Those of the file.
    ///
    /// # Errors
    /// Tensors that do not go together with them, of another shape or type.
    pub(crate) fn read(file: &TensorFile, layout: TensorLayout) -> Result<Option<NamedRows>, InputError> {
        let usage = |message: String| Err(InputError::Usage(message));
        if !file.has(INDICES) {
            if file.has(LENGTHS) {
                return usage(format!("the file has {LENGTHS}, but no {INDICES}, whose entries it counts"));
            }
            return Ok(None);
        }
        let others =
            ["cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_q", USED_K[0], USED_K[1], "k_new"];
        if let Some(name) = others.into_iter().find(|name| file.has(name)) {
            return usage(format!(
                "the file has {INDICES}, which say all keys of each query, and {name}: leave {name} out"
            ));
        }
        if layout != TensorLayout::Bshd {
            return usage(format!(
                "the file has {INDICES}, which count rows of a cache [pages, page, heads, dim]: its layout \
                 must be bshd, not {layout}"
            ));
        }
        let shape = |name: &str| Ok::<_, InputError>(file.entry(name)?.shape.as_slice());
        let wrong = |name: &str, got: &[usize], need: String| {
            Err(InputError::Shape { name: name.to_owned(), got: got.to_vec(), need })
        };
        let &[tokens, _, _] = shape("q")? else {
            return wrong("q", shape("q")?, format!("with {INDICES} it must be [total_q, heads, head_dim]"));
        };
        let &[of, most] = shape(INDICES)? else {
            return wrong(
                INDICES,
                shape(INDICES)?,
                format!("it must be [{tokens}, most]: rows of each query"),
            );
        };
        if of != tokens {
            return wrong(INDICES, &[of, most], format!("its first axis must be {tokens}, the queries of q"));
        }
        if file.has(LENGTHS) && shape(LENGTHS)? != [tokens] {
            return wrong(LENGTHS, shape(LENGTHS)?, format!("it must be [{tokens}], for each query of q"));
        }
        let cache = if file.has(KV) { KV } else { "k" };
        let &[pages, page, _, _] = shape(cache)? else {
            return wrong(
                cache,
                shape(cache)?,
                format!("with {INDICES} it must be [pages, page, heads, dim]"),
            );
        };
        let rows = pages.saturating_mul(page);
        let indices = file.read::<i32>(INDICES)?;
        let lengths = if file.has(LENGTHS) { Some(file.read::<i32>(LENGTHS)?) } else { None };
        let mut named = NamedRows {
            table: vec![0; indices.len()],
            most,
            used: vec![0; tokens],
            starts: (0..=tokens).map(|start| i32::try_from(start).unwrap_or(i32::MAX)).collect(),
        };
        for token in 0..tokens {
            let counted =
                lengths.as_ref().map_or(most, |lengths| usize::try_from(lengths[token]).unwrap_or(0));
            let own = token * most..(token + 1) * most;
            let seen = indices[own.clone()].iter().take(counted);
            let seen = seen.filter(|&&row| usize::try_from(row).is_ok_and(|row| row < rows));
            let mut used = 0;
            for (to, &row) in named.table[own].iter_mut().zip(seen) {
                *to = row;
                used += 1;
            }
            named.used[token] = used;
        }
        Ok(Some(named))
    }
}
