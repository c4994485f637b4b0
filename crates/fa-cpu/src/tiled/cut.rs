//! How the backward is cut: sizes of tiles, and the items of each K/V head.

use std::ops::Range;
use std::sync::OnceLock;

use fa_core::Problem;

use super::band::Band;
use super::buffer::Buffer;
use super::pack::row_stride;
use super::work::Unit;
use crate::batch::Batch;
use crate::simd::Kernels;

/// Keys of a tile.
pub(super) const TILE_N: usize = 128;
/// Panels of queries in a tile.
const PANELS: usize = 2;

/// Sizes that follow from the problem and the kernels.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub tile_m: usize,
    /// Padded head dims: whole registers, so that they can be columns of a product.
    pub ldq: usize,
    pub ldo: usize,
    pub columns_q: usize,
    pub columns_o: usize,
}

/// How one unit is cut: as all of its sequence.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    pub unit: Unit,
    pub band: Band,
    pub m_tiles: usize,
    /// Keys of an item.
    pub keys: usize,
    /// Items of a head.
    pub parts: usize,
    /// Values of one head's dQt.
    pub dq_len: usize,
    /// First partial dQt, where there are several items.
    pub partial: usize,
}

impl Sizes {
    pub(super) fn new(problem: &Problem, kernels: Kernels) -> Sizes {
        Sizes {
            tile_m: PANELS * kernels.panel(),
            ldq: row_stride(problem.head_dim),
            ldo: row_stride(problem.head_dim_v),
            columns_q: problem.head_dim.next_multiple_of(kernels.lanes()),
            columns_o: problem.head_dim_v.next_multiple_of(kernels.lanes()),
        }
    }
}

impl Cut {
    /// Keys of one of its items.
    pub(super) fn keys_of(&self, part: usize) -> Range<usize> {
        part * self.keys..self.band.k.min((part + 1) * self.keys)
    }
}

/// Cuts all units. A head of long sequences is cut over its keys, which costs a dQ for each part, only as far
/// as every worker has something to do.
pub(super) fn cuts(problem: &Problem, batch: &Batch<'_>, tile_m: usize, workers: usize) -> Vec<Cut> {
    let uniform = batch.is_even();
    let band = |sequence| Band::new(problem.mask, sequence);
    let cost = |band: &Band| band.pairs() + (band.q + band.k) as f64;
    let total = match uniform {
        true => {
            batch.sequences.first().map_or(0.0, |first| cost(&band(first))) * batch.sequences.len() as f64
        }
        false => batch.sequences.iter().map(|sequence| cost(&band(sequence))).sum(),
    };
    let heads = batch.sequences.len() * problem.heads_kv;
    let even = workers == 1 || uniform && (heads.is_multiple_of(workers) || heads >= 4 * workers);
    let (mut cuts, mut partial) = (Vec::with_capacity(heads), 0);
    for (index, sequence) in batch.sequences.iter().enumerate() {
        let band = band(sequence);
        if band.q + band.k == 0 {
            continue;
        }
        let n_tiles = band.k.div_ceil(TILE_N);
        let share = (2 * workers) as f64 * cost(&band) / (total * problem.heads_kv as f64);
        let parts = if even { 1 } else { (share.ceil() as usize).clamp(1, n_tiles.max(1)) };
        let keys = n_tiles.div_ceil(parts).max(1) * TILE_N;
        let parts = band.k.div_ceil(keys).max(1);
        let m_tiles = band.q.div_ceil(tile_m);
        for kv_head in 0..problem.heads_kv {
            let unit = Unit { sequence: index, kv_head };
            let dq_len = m_tiles * problem.head_dim * tile_m;
            cuts.push(Cut { unit, band, m_tiles, keys, parts, dq_len, partial });
            partial += if parts > 1 { parts * problem.group_size() } else { 0 };
        }
    }
    cuts
}

/// Items `(cut, part)` of the cuts whose numbers are `chosen`; most work first where sequences differ.
pub(super) fn items(cuts: &[Cut], batch: &Batch<'_>, chosen: impl Fn(usize) -> bool) -> Vec<(usize, usize)> {
    let mut items = Vec::with_capacity(cuts.len());
    for (index, cut) in cuts.iter().enumerate().filter(|&(index, _)| chosen(index)) {
        items.extend((0..cut.parts).map(|part| (index, part)));
    }
    if !batch.is_even() {
        let weight = |&(cut, _): &(usize, usize)| (cuts[cut].band.pairs() / cuts[cut].parts as f64) as u64;
        items.sort_by_cached_key(|item| std::cmp::Reverse(weight(item)));
    }
    items
}

/// Room for dQt of every (item, head of its group), where items of one head have to be added up.
pub(super) fn partials(cuts: &[Cut], group: usize) -> Vec<OnceLock<Buffer>> {
    let count =
        cuts.last().map_or(0, |last| last.partial + if last.parts > 1 { last.parts * group } else { 0 });
    (0..count).map(|_| OnceLock::new()).collect()
}
