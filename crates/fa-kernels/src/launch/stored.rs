//! The tensor map by which a main kernel stores the scores' gradients.

use fa_core::program::Axis;

use crate::jit::array_gradients::ArrayGradient;
use crate::launch::raw_program::{RawProgram, Scores, Stored};
use crate::launch::tma::{MapShape, TensorMap};

/// The map by which it does: `{keys, queries, heads, sequences}` of a room, or of the part of a packed array
/// that has a score for each element, whose axes have any order but for the keys, and a box of one panel of a
/// tile.
pub(super) fn map(
    given: &RawProgram,
    (stored, gradient): (Stored, &ArrayGradient),
    scores: Scores,
    (panel, rows): (u32, u32),
) -> TensorMap {
    let tile = [panel, rows, 1, 1, 1];
    if stored == Stored::Room {
        let Scores { batch, heads, queries, .. } = scores;
        let (row, head) = (scores.pitch() as u64, (queries * scores.pitch()) as u64);
        // The sums read the ends of rows too.
        let dims = [row, queries as u64, heads as u64, batch as u64, 1];
        let shape = MapShape { rank: 4, dims, strides: [1, row, head, head * heads as u64, 0], tile };
        return TensorMap { tensor: "the room of a call", address: given.room, shape };
    }
    let of = |all: &[Axis]| {
        let axis = given.reached(gradient).enumerate().find(|(_, (axis, _))| all.contains(axis));
        let extents = &given.arrays[gradient.slot].extents[..gradient.axes.len()];
        axis.map_or((1, 0), |(at, (_, len))| {
            (len as u64, extents[at + 1..].iter().map(|&own| own as u64).product())
        })
    };
    let axes = [&[Axis::Key][..], &[Axis::Query], &[Axis::Head, Axis::HeadKv], &[Axis::Batch]].map(of);
    let [mut dims, mut strides] = [[1; 5], [0; 5]];
    for (at, (len, stride)) in axes.into_iter().enumerate() {
        (dims[at], strides[at]) = (len, stride);
    }
    let shape = MapShape { rank: 4, dims, strides, tile };
    TensorMap { tensor: "the gradient of an array", address: given.gradients[gradient.slot], shape }
}
