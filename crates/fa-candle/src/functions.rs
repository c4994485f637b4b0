//! The functions of candle-flash-attn, under the same names, with the same arguments.
//!
//! Q, K and V are `(batch, seqlen, heads, head_dim)`, in the `varlen` functions `(total, heads, head_dim)`
//! with u32 starts `seqlens_q` and `seqlens_k` `(batch + 1)`; K and V may have fewer heads than Q. A window
//! of `None`, or wider than the sequence, has no limit; `causal` is `window_size_right = Some(0)`. Masks end
//! in the bottom right corner. The output is contiguous, in Q's shape and type. Gradients of Q, K and V are
//! candle's `backward`'s.
//!
//! What each of them refuses is a [`crate::Error`], as a candle error.
#![allow(clippy::too_many_arguments)]

use candle_core::{Result, Tensor};

use crate::attention::attention;
use crate::error::Error;
use crate::options::{Options, Rows};
use crate::program::Program;

/// Attention with every key visible, or, where `causal`, none right of the diagonal.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    attention(q, k, v, &Options::full(softmax_scale).with_window_size_right(right(causal)))
}

/// Attention in a window around the diagonal.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    attention(
        q,
        k,
        v,
        &Options::full(softmax_scale)
            .with_window_size_left(window_size_left)
            .with_window_size_right(window_size_right),
    )
}

/// [`flash_attn`] with ALiBi's slopes, `(heads)`.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, right(causal))
}

/// [`flash_attn_windowed`] with ALiBi's slopes, `(heads)`.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let windows = [window_size_left, window_size_right];
    attention(q, k, v, &mixed(softmax_scale, windows, Some(alibi_slopes), None))
}

/// [`flash_attn_windowed`] with ALiBi's slopes, if any, and a soft cap on the scores, 0 for none.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let windows = [window_size_left, window_size_right];
    attention(q, k, v, &mixed(softmax_scale, windows, alibi_slopes, Some(softcap)))
}

/// [`flash_attn`] of packed sequences.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let rows = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k };
    attention(q, k, v, &Options::full(softmax_scale).with_window_size_right(right(causal)).with_rows(rows))
}

/// [`flash_attn_windowed`] of packed sequences.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let rows = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k };
    attention(
        q,
        k,
        v,
        &Options::full(softmax_scale)
            .with_window_size_left(window_size_left)
            .with_window_size_right(window_size_right)
            .with_rows(rows),
    )
}

/// [`flash_attn_varlen_windowed`] of keys and values in pages, `(pages, page_block_size, heads, head_dim)`,
/// which `block_table` `(batch, columns)`, u32 or i32, gives to the sequences. `seqlens_k` has sums of their
/// lengths. Pages may be of any size. There are no gradients. `mm_prefix_ranges`, i32 `(batch, ranges, 2)`,
/// has starts and ends of positions that see each other beside the window, as those of an image do: at most
/// 30 of a sequence, of which a program is made.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if let Some(&page) = k.dims().get(1).filter(|page| **page != page_block_size) {
        return Err(Error::PageSize { got: page_block_size, need: page }.into());
    }
    let windows = [window_size_left, window_size_right];
    let rows = Rows::Paged { seqlens_q, seqlens_k, block_table, max_seqlen_q, max_seqlen_k };
    let ranges = mm_prefix_ranges.map(|ranges| beside_window(ranges, block_table, windows)).transpose()?;
    let ranges = ranges.flatten();
    let windows = if ranges.is_some() { [None; 2] } else { windows };
    let options = mixed(softmax_scale, windows, None, softcap).with_rows(rows);
    attention(q, k, v, &options.with_program(ranges.as_ref()))
}

/// As many as a program has room for.
const MOST_RANGES: usize = 30;

/// The mask of a window and of ranges whose positions see each other; `None` where all keys are seen.
fn beside_window(
    ranges: &Tensor,
    block_table: &Tensor,
    [left, right]: [Option<usize>; 2],
) -> Result<Option<Program>> {
    let batch = block_table.dim(0)?;
    let count = match *ranges.dims() {
        [first, count, 2] if first == batch && count <= MOST_RANGES => count,
        _ => {
            let need = format!("(batch {batch}, ranges, 2), at most {MOST_RANGES} of them");
            let shape = ranges.dims().to_vec();
            return Err(Error::Shape { tensor: "mm_prefix_ranges", shape, need }.into());
        }
    };
    let sides = [("left", left, "k >= at - left"), ("right", right, "k <= at + right")];
    let sides: Vec<_> =
        sides.into_iter().filter_map(|(name, side, term)| Some((name, side?, term))).collect();
    if count == 0 || sides.is_empty() {
        return Ok(None);
    }
    let mut text = String::from("array mm_prefix_ranges: i32[_, _, _];");
    for (name, ..) in &sides {
        text += &format!(" scalar {name}: i32;");
    }
    text += " let at = q + off; let first = min(at, k); let last = max(at, k); mask = ";
    text += &sides.iter().map(|(.., term)| *term).collect::<Vec<_>>().join(" and ");
    let own = "mm_prefix_ranges";
    for place in 0..count {
        text += &format!(" or {own}[b, {place}, 0] <= first and last < {own}[b, {place}, 1]");
    }
    let program = Program::new(&format!("{text};"))?.with_array(own, ranges);
    // Of a wider side than i32 holds no key is hidden.
    let most = |side: usize| i32::try_from(side).unwrap_or(i32::MAX).min(1 << 30);
    Ok(Some(sides.iter().fold(program, |program, (name, side, _)| program.with_scalar(name, most(*side)))))
}

/// [`flash_attn_alibi`] of packed sequences.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let rows = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k };
    attention(q, k, v, &mixed(softmax_scale, [None, right(causal)], Some(alibi_slopes), None).with_rows(rows))
}

/// [`flash_attn_alibi_windowed`] of packed sequences.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let windows = [window_size_left, window_size_right];
    let rows = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k };
    attention(q, k, v, &mixed(softmax_scale, windows, Some(alibi_slopes), None).with_rows(rows))
}

/// [`flash_attn_alibi_windowed_softcap`] of packed sequences.
///
/// # Errors
/// [`crate::Error`].
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let windows = [window_size_left, window_size_right];
    let rows = Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k };
    attention(q, k, v, &mixed(softmax_scale, windows, alibi_slopes, Some(softcap)).with_rows(rows))
}

fn right(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

fn mixed(
    softmax_scale: f32,
    [window_size_left, window_size_right]: [Option<usize>; 2],
    alibi_slopes: Option<&Tensor>,
    softcap: Option<f32>,
) -> Options<'_> {
    Options::full(softmax_scale)
        .with_window_size_left(window_size_left)
        .with_window_size_right(window_size_right)
        .with_alibi_slopes(alibi_slopes)
        .with_softcap(softcap)
}
