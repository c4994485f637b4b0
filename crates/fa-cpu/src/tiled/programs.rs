//! A program in the tiles of a pass: what the scores of a tile become, which keys it hides, and what a tile
//! adds to the gradients of arrays. Tiles that the program leaves empty are found without evaluating it.

use std::ops::Range;

use fa_core::Problem;
use fa_core::program::{Deps, Gradient, Node, NodeId, Point, Program, Tile, TileState};

use super::lanes::{Lanes, Steps};
use super::scores::exponent;
use crate::batch::Batch;

/// The program of a thread's tiles, which have so many queries across.
pub(super) struct OwnTiles<'a> {
    batch: &'a Batch<'a>,
    /// The mask's.
    offset: i64,
    group: usize,
    differentiates: bool,
    program: &'static Program,
    lanes: Lanes<'a>,
    /// What tiles need that the mask hides in part, and those that it does not.
    partial: Steps,
    full: Steps,
    /// What the gradients of arrays need.
    gradients: Steps,
    width: usize,
    /// `[keys][width]`: the keys that are hidden.
    pub hidden: Vec<bool>,
    /// Likewise, of a backward: the derivatives of the scores by what the program takes.
    pub slopes: Vec<f32>,
    /// Likewise, where there are weights: what probabilities are multiplied by.
    weights: Vec<f32>,
    /// Likewise, with gradients of arrays: what the program takes.
    taken: Vec<f32>,
}

/// A tile of a head.
#[derive(Clone, Copy)]
pub(super) struct OwnTile<'r> {
    pub sequence: usize,
    pub head: usize,
    pub queries: &'r Range<usize>,
    pub keys: &'r Range<usize>,
}

impl<'a> OwnTiles<'a> {
    /// For tiles of `width` queries; of a backward too where `differentiates`. `None` without a program.
    pub(super) fn new(
        problem: &Problem,
        batch: &'a Batch<'a>,
        width: usize,
        differentiates: bool,
    ) -> Option<OwnTiles<'a>> {
        let (program, inputs) = batch.program()?;
        let program = program.get();
        let slope = program.slope().filter(|_| differentiates);
        let weight = program.weight();
        let gradients = if differentiates { program.gradients() } else { &[] };
        let indices = |gradient: &Gradient| program.nodes()[gradient.load.index()].operands();
        Some(OwnTiles {
            batch,
            offset: problem.mask.offset,
            group: problem.group_size(),
            differentiates,
            program,
            lanes: Lanes::new(program, inputs, width),
            partial: Steps::of(
                program,
                [program.mask(), program.score(), slope, weight].into_iter().flatten(),
            ),
            full: Steps::of(program, [program.score(), slope, weight].into_iter().flatten()),
            gradients: Steps::of(
                program,
                gradients.iter().flat_map(|gradient| indices(gradient).chain([gradient.slope])),
            ),
            width,
            hidden: vec![],
            slopes: vec![],
            weights: vec![],
            taken: vec![],
        })
    }

    /// Whether the program changes scores. They are then in natural units before it.
    pub(super) fn changes(&self) -> bool {
        self.program.score().is_some()
    }

    fn point(&self, tile: &OwnTile<'_>) -> Point {
        self.batch.point(tile.sequence, [tile.head, tile.head / self.group], self.offset)
    }

    /// What of a tile is seen.
    pub(super) fn state(&self, tile: &OwnTile<'_>) -> TileState {
        if self.program.mask().is_none() {
            return TileState::Full;
        }
        let Point { b, h, hk, q, sq, sk, off, .. } = self.point(tile);
        let [queries, keys] = [tile.queries, tile.keys].map(|range| range.start as i32..range.end as i32);
        let queries = q.saturating_add(queries.start)..q.saturating_add(queries.end);
        self.program.tile_state(self.lanes.inputs, &Tile { b, h, hk, q: queries, k: keys, sq, sk, off })
    }

    /// Whether the program is evaluated in a tile.
    pub(super) fn evaluates(&self, state: TileState) -> bool {
        state == TileState::Partial || self.changes() || self.weighs()
    }

    /// Whether probabilities have weights.
    fn weighs(&self) -> bool {
        self.program.weight().is_some()
    }

    /// Multiplies the probabilities of the tile, or their gradients, by the weights.
    pub(super) fn weigh(&self, tile: &OwnTile<'_>, of: &mut [f32]) {
        if self.weighs() {
            let weights = self.weights.iter().take(tile.keys.len() * self.width);
            of.iter_mut().zip(weights).for_each(|(value, weight)| *value *= weight);
        }
    }

    /// What the tile's scores, keys down and queries across, become in base 2; and `hidden`, `slopes` and
    /// weights of it.
    pub(super) fn apply(&mut self, tile: &OwnTile<'_>, state: TileState, s: &mut [f32]) {
        let (queries, width) = (tile.queries.len(), self.width);
        let mask = self.program.mask().filter(|_| state == TileState::Partial);
        let (score, slope) = (self.program.score(), self.program.slope());
        let steps = if mask.is_some() { &self.partial } else { &self.full };
        let len = tile.keys.len() * width;
        self.hidden.clear();
        self.hidden.resize(len, false);
        if !self.gradients.is_empty() {
            self.taken.clear();
            self.taken.extend_from_slice(&s[..len]);
        }
        self.slopes.resize(self.slopes.len().max(len), 1.0);
        if self.weighs() {
            self.weights.clear();
            self.weights.resize(len, 1.0);
        }
        let mut at = self.point(tile);
        at.q = at.q.wrapping_add(tile.queries.start as i32);
        self.lanes.enter(steps, at);
        for (row, key) in tile.keys.clone().enumerate() {
            let place = row * width..row * width + queries;
            self.lanes.go(steps, key as i32, &s[place.clone()]);
            let (s, hidden) = (&mut s[place.clone()], &mut self.hidden[place.clone()]);
            if let Some(mask) = mask {
                let seen = self.lanes.integers(mask);
                hidden.iter_mut().zip(seen).for_each(|(hidden, &seen)| *hidden = seen == 0);
            }
            if let Some(score) = score {
                let scores = self.lanes.numbers(score);
                for ((s, hidden), &score) in s.iter_mut().zip(hidden).zip(scores) {
                    *s = exponent(score);
                    *hidden |= score == f32::NEG_INFINITY;
                }
            }
            if let Some(weight) = self.program.weight() {
                self.weights[place.clone()].copy_from_slice(&self.lanes.numbers(weight)[..queries]);
            }
            if let Some(slope) = slope.filter(|_| self.differentiates) {
                self.slopes[place].copy_from_slice(&self.lanes.numbers(slope)[..queries]);
            }
        }
    }

    /// Makes of `ds`, the gradients of what the scores of the tile have become, those of the scores, and adds
    /// to the gradients of arrays what the tile gives them. Where a key is hidden they are 0, whatever the
    /// derivative is.
    pub(super) fn differentiate(&mut self, tile: &OwnTile<'_>, ds: &mut [f32], sums: &mut ArraySums) {
        if !self.gradients.is_empty() {
            self.add(tile, ds, sums);
        }
        if self.changes() {
            for (ds, slope) in ds.iter_mut().zip(&self.slopes).take(tile.keys.len() * self.width) {
                *ds = if *ds == 0.0 { 0.0 } else { *ds * slope };
            }
        }
    }

    fn add(&mut self, tile: &OwnTile<'_>, ds: &[f32], sums: &mut ArraySums) {
        let (queries, width) = (tile.queries.len(), self.width);
        let mut at = self.point(tile);
        at.q = at.q.wrapping_add(tile.queries.start as i32);
        self.lanes.enter(&self.gradients, at);
        let mut rows = vec![0f64; self.program.gradients().len() * width];
        for (row, key) in tile.keys.clone().enumerate() {
            let place = row * width..row * width + queries;
            self.lanes.go(&self.gradients, key as i32, &self.taken[place.clone()]);
            let ds = &ds[place];
            for (gradient, rows) in self.program.gradients().iter().zip(rows.chunks_mut(width)) {
                let slopes = self.lanes.numbers(gradient.slope);
                let deps = self.program.deps(gradient.load);
                let terms = ds.iter().zip(slopes).map(|(&ds, &slope)| term(ds, slope));
                if deps.has(Deps::SCORE) || deps.has(Deps::QUERY) && deps.has(Deps::KEY) {
                    for (lane, term) in terms.enumerate().filter(|(_, term)| *term != 0.0) {
                        sums.add(gradient.array, self.element(gradient.load, lane), term);
                    }
                } else if deps.has(Deps::QUERY) {
                    rows.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
                } else {
                    sums.add(gradient.array, self.element(gradient.load, 0), terms.sum());
                }
            }
        }
        for (gradient, rows) in self.program.gradients().iter().zip(rows.chunks(width)) {
            for (lane, &sum) in rows[..queries].iter().enumerate().filter(|(_, sum)| **sum != 0.0) {
                sums.add(gradient.array, self.element(gradient.load, lane), sum);
            }
        }
    }

    /// The place of a loaded element in its array, packed.
    fn element(&self, load: NodeId, lane: usize) -> usize {
        let Node::Load(array, indices) = self.program.nodes()[load.index()] else { return 0 };
        let extents = self.lanes.inputs.arrays()[usize::from(array)].extents;
        let indices = indices.into_iter().flatten().zip(extents);
        indices.fold(0, |place, (index, extent)| {
            let index = self.lanes.integers(index)[lane].min(extent - 1).max(0);
            place * extent as usize + index as usize
        })
    }
}

/// A score without a gradient adds nothing, whatever its derivative is.
fn term(ds: f32, slope: f32) -> f64 {
    if ds == 0.0 { 0.0 } else { f64::from(ds) * f64::from(slope) }
}

/// Elements of a page of sums.
const PAGE: usize = 256;

/// Sums of the gradients of arrays, in pages, of which only those exist that something is added to.
#[derive(Default)]
pub(super) struct ArraySums {
    arrays: Vec<Vec<Option<Box<[f64; PAGE]>>>>,
}

impl ArraySums {
    fn add(&mut self, array: usize, element: usize, value: f64) {
        if self.arrays.len() <= array {
            self.arrays.resize_with(array + 1, Vec::new);
        }
        let (pages, page) = (&mut self.arrays[array], element / PAGE);
        if pages.len() <= page {
            pages.resize_with(page + 1, || None);
        }
        pages[page].get_or_insert_with(|| Box::new([0.0; PAGE]))[element % PAGE] += value;
    }
}

/// The sums of all, in order, each array packed; empty for arrays without gradients.
pub(super) fn gathered<'s>(batch: &Batch<'_>, all: impl Iterator<Item = &'s ArraySums>) -> Vec<Vec<f32>> {
    let Some((program, inputs)) = batch.program() else { return vec![] };
    let extents = program.arrays().iter().zip(inputs.arrays());
    let mut sums: Vec<Vec<f32>> = extents
        .map(|(decl, array)| {
            let len = array.extents[..decl.rank].iter().map(|&extent| extent as usize).product();
            if decl.gradient { vec![0.0; len] } else { vec![] }
        })
        .collect();
    for own in all {
        for (sum, pages) in sums.iter_mut().zip(&own.arrays) {
            for (sum, page) in sum.chunks_mut(PAGE).zip(pages) {
                for (sum, value) in sum.iter_mut().zip(page.iter().flat_map(|page| page.iter())) {
                    *sum = (f64::from(*sum) + value) as f32;
                }
            }
        }
    }
    sums
}
