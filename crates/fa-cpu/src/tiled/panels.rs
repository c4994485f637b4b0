//! Panels of queries, in both forwards: where they lie, when their stretches of keys end, how their results
//! are put together and written.

use std::ops::Range;

use super::band::Band;
use super::buffer::Buffer;
use super::long::{Accumulated, Stretches};
use super::overflow::normaliser_of;
use super::parts::Parts;
use super::schedule;
use super::scores::finish;
use super::work::{Forward, Item, Items, Unit};
use crate::element::Element;
use crate::simd::Kernels;
use crate::simd::scatter::Scatter;

/// A panel of queries and what has been accumulated for it.
pub(super) struct Panel<Q: Copy + Default + 'static> {
    /// Query head.
    pub head: usize,
    pub queries: Range<usize>,
    /// Qt, as the products read it.
    pub q: Buffer<Q>,
    /// Ot `[head_dim_v][panel]`, not normalised.
    pub o: Buffer,
    pub max: Buffer,
    pub sum: Buffer,
    /// Whether `o` holds anything yet.
    pub started: bool,
    /// Sums over earlier stretches, for many keys.
    before: Stretches,
}

impl<Q: Copy + Default> Panel<Q> {
    /// A panel of `width` queries, with so many elements of Q and dims of O for each.
    pub(super) fn new(width: usize, [q, o]: [usize; 2]) -> Panel<Q> {
        Panel {
            head: 0,
            queries: 0..0,
            q: Buffer::new(q * width),
            o: Buffer::new(o * width),
            max: Buffer::new(width),
            sum: Buffer::new(width),
            started: false,
            before: Stretches::default(),
        }
    }

    fn parts(&mut self) -> (&mut Stretches, Accumulated<'_>) {
        let Panel { o, max, sum, started, before, .. } = self;
        (before, Accumulated { o, max, sum, started })
    }

    /// Nothing, before the first key. An item that was given up may have left values.
    pub(super) fn reset(&mut self) {
        let (before, mut sums) = self.parts();
        before.clear();
        sums.reset();
    }
}

/// The panels of a forward.
pub(super) struct Panels<'a, T> {
    pub call: &'a Forward<'a, T>,
    pub units: &'a [Unit],
    pub cut: &'a Items,
    pub parts: &'a Parts<'a>,
    /// Queries of each panel of a sequence of so many.
    pub queries: fn(Kernels, usize) -> usize,
    /// Columns of Qt and Ot.
    pub width: usize,
    /// Dims of Ot.
    pub dims_v: usize,
    /// Stride of rows of O that are written.
    pub ld: usize,
    pub out: Scatter<'a, T>,
    pub lse: Option<Scatter<'a, f32>>,
}

impl<T: Element> Panels<'_, T> {
    /// A panel with so many elements of Q for each query.
    pub(super) fn panel<Q: Copy + Default>(&self, q: usize) -> Panel<Q> {
        Panel::new(self.width, [q, self.dims_v])
    }

    /// Makes it panel number `index` of a unit; returns the batch and row where the sequence begins.
    pub(super) fn place<Q: Copy + Default>(
        &self,
        panel: &mut Panel<Q>,
        unit: usize,
        index: usize,
    ) -> [usize; 2] {
        let Forward { kernels, problem, batch, .. } = *self.call;
        let Unit { sequence, kv_head } = self.units[unit];
        let span = batch.sequences[sequence].q;
        let queries = (self.queries)(kernels, span.len);
        let panels = span.len.div_ceil(queries);
        let first = index % panels * queries;
        panel.head = kv_head * problem.group_size() + index / panels;
        panel.queries = first..span.len.min(first + queries);
        [span.batch, span.first]
    }

    /// The keys of an item that one of its panels sees.
    pub(super) fn seen<Q: Copy + Default>(
        &self,
        item: &Item,
        band: &Band,
        panels: &[Panel<Q>],
    ) -> Range<usize> {
        let seen = panels.iter().map(|panel| band.visible_keys(&panel.queries));
        let seen = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        self.cut.keys(item, seen)
    }

    /// Ends the stretch of an item's panels that has ended before the tile at `key`, if one has.
    pub(super) fn before_tile<Q: Copy + Default>(
        &self,
        item: &Item,
        seen: &Range<usize>,
        key: usize,
        panels: &mut [Panel<Q>],
    ) {
        if let Some(stretch) = self.cut.ended(item, seen, key) {
            self.end(item, panels, stretch, false);
        }
    }

    /// Ends the last stretch of an item's panels.
    pub(super) fn after_tiles<Q: Copy + Default>(
        &self,
        item: &Item,
        seen: &Range<usize>,
        panels: &mut [Panel<Q>],
    ) {
        self.end(item, panels, self.cut.stretch_of(item, seen.end.saturating_sub(1)), true);
    }

    fn end<Q: Copy + Default>(&self, item: &Item, panels: &mut [Panel<Q>], stretch: usize, is_last: bool) {
        let divided = self.cut.divided(item);
        for (index, panel) in panels.iter_mut().enumerate() {
            let slot = divided.map(|divided| divided.slot(stretch, index));
            let (before, sums) = panel.parts();
            self.parts.end(slot, before, sums, is_last);
        }
    }

    /// Writes the panels of an item, unless others have a part of its keys. `rows` has room for rows of O.
    pub(super) fn write_item<Q: Copy + Default>(
        &self,
        item: &Item,
        panels: &mut [Panel<Q>],
        rows: &mut [f32],
    ) {
        if item.stretches.is_none() {
            panels.iter_mut().for_each(|panel| self.write(item.unit, panel, rows));
        }
    }

    /// Puts together and writes the panels of units whose keys were divided, but for those in `left`.
    pub(super) fn merge(&self, left: &[usize]) {
        let mut merges = self.cut.merges();
        merges.retain(|(divided, _)| left.binary_search(&divided.unit).is_err());
        schedule::run(
            merges.len(),
            self.call.threads,
            || (self.panel::<f32>(0), Buffer::new(self.width * self.ld)),
            |(panel, rows), merge| {
                let (divided, index) = merges[merge];
                self.place(panel, divided.unit, index);
                let slots = divided.stretches.clone().map(|stretch| divided.slot(stretch, index));
                let (sums, to) = panel.parts();
                self.parts.merge(slots, to, sums);
                self.write(divided.unit, panel, rows);
            },
        );
    }

    /// Writes a panel's O and LSE.
    fn write<Q: Copy + Default>(&self, unit: usize, panel: &mut Panel<Q>, rows: &mut [f32]) {
        let Panels { call, width, ld, .. } = *self;
        let Forward { kernels, problem, batch, .. } = *call;
        let sequence = self.units[unit].sequence;
        if !panel.started {
            panel.o.fill(0.0);
        }
        let tile = panel.queries.start / (self.queries)(kernels, batch.sequences[sequence].q.len);
        let mut out_rows = self.out.take(sequence, panel.head, tile);
        let mut lse_rows = self.lse.as_ref().map(|lse| lse.take(sequence, panel.head, tile));
        kernels.transpose([problem.head_dim_v, panel.queries.len()], &panel.o, width, rows, ld);
        for (i, row) in panel.queries.clone().enumerate() {
            let (normaliser, lse) = finish(panel.max[i], panel.sum[i], batch.sink(panel.head));
            let sums = &mut rows[i * ld..][..problem.head_dim_v];
            let normaliser = normaliser_of(call, [sequence, panel.head, row], (normaliser, lse), sums);
            out_rows.write(kernels, row, sums, normaliser);
            if let Some(lse_rows) = &mut lse_rows {
                lse_rows.write(kernels, row, &[lse], 1.0);
            }
        }
    }
}
