//! Merging: results over different keys of the same queries into the result over all of them.

use fa_cpu::check::check_len;
use fa_cpu::merge::{add_sink_to_row, merge_row};

use crate::element::Element;
use crate::error::Error;
use crate::tensors::{Output, Tensor, elements};

/// Merges results over different keys of the same queries: a shared prefix and each request's own suffix
/// (cascade), the tokens of a speculative tree and the cache before them, or parts of a long cache.
///
/// Computed in f32, rounded once. A part whose row sees no key (`O = 0`, `LSE = -inf`, or +inf as
/// FlashAttention-2 and FlashMLA write it) does not change the result. Parts leave sinks out; `sinks`,
/// `[heads_q]`, joins the merged result once. The layout is the first part's.
///
/// # Errors
/// [`Error::NothingToMerge`] without a part, [`Error::Shape`] and [`Error::Cpu`] for parts, LSEs and sinks
/// that do not fit each other.
pub fn merge<T: Element>(parts: &[&Output<T>], sinks: Option<&[f32]>) -> Result<Output<T>, Error> {
    let Some(&first) = parts.first() else { return Err(Error::NothingToMerge) };
    let shape @ [batch, seqlen, heads, dim] = first.out.shape;
    // Without rows the other lengths may be any.
    let rows = elements([batch, seqlen, heads, 1]);
    let dim = if rows == 0 { 0 } else { dim };
    for part in parts {
        if part.out.shape != shape {
            let need = format!("every part has the shape of the first, {shape:?}");
            return Err(Error::Shape { tensor: "out", got: part.out.shape, need });
        }
        part.out.view("out")?;
        check_len("lse", part.lse.len(), rows)?;
    }
    if let Some(sinks) = sinks {
        check_len("sinks", sinks.len(), heads)?;
    }
    let mut merged = Output {
        out: Tensor::filled(shape, first.out.layout, T::default()),
        lse: vec![f32::NEG_INFINITY; rows],
    };
    let (mut row, mut other) = (vec![0.0f32; dim], vec![0.0f32; dim]);
    // Rows in the order of the LSE: [batch, heads, seqlen].
    for (index, lse) in merged.lse.iter_mut().enumerate() {
        let (b, h, s) = (index / (heads * seqlen), index / seqlen % heads, index % seqlen);
        let at = |tensor: &Tensor<T>| tensor.layout.strides(seqlen, heads, dim).offset(b, s, h, 0) as usize;
        row.fill(0.0);
        for part in parts {
            let values = &part.out.data[at(&part.out)..][..dim];
            other.iter_mut().zip(values).for_each(|(to, value)| *to = value.to_f32());
            merge_row(&mut row, lse, &other, part.lse[index]);
        }
        if let Some(sinks) = sinks {
            add_sink_to_row(&mut row, lse, sinks[h]);
        }
        let begin = at(&merged.out);
        let out = &mut merged.out.data[begin..][..dim];
        out.iter_mut().zip(&row).for_each(|(to, &value)| *to = T::from_f32(value));
    }
    Ok(merged)
}
