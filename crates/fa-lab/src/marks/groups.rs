//! Sizes of groups, head dims and masks, all combined, at lengths and numbers of positions that take turns.

use fa_core::{Dtype, Mask, Problem};

use super::wanted::Wanted;

/// Query heads of every row.
const HEADS: usize = 32;

/// Query heads of a K/V head; in the last all heads share one.
const GROUPS: [usize; 6] = [1, 2, 4, 8, 16, HEADS];

/// Head dims of queries and keys, and of values.
const HEAD_DIMS: [(usize, usize); 5] = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];

/// The shortest and the longest sequence.
const LENGTHS: (usize, usize) = (512, 16384);

/// Positions of all sequences together.
const POSITIONS: [usize; 4] = [4096, 8192, 16384, 32768];

/// The place of a row's length and positions, by its head dim, group and mask, so that any two values of two
/// of these factors meet.
const TURNS: [usize; 3] = [1, 3, 8];

/// Lengths and positions with whole sequences.
fn extents() -> Vec<(usize, usize)> {
    let mut extents = Vec::new();
    for positions in POSITIONS {
        let mut seqlen = LENGTHS.0;
        while seqlen <= positions.min(LENGTHS.1) {
            extents.push((seqlen, positions));
            seqlen *= 2;
        }
    }
    extents
}

/// The rows, for either pass: without a mask, with a causal one and with a window of a quarter of the length.
pub(super) fn shapes() -> Vec<Wanted> {
    let extents = extents();
    let mut shapes = Vec::new();
    for (i, (head_dim, head_dim_v)) in HEAD_DIMS.into_iter().enumerate() {
        for (j, group) in GROUPS.into_iter().enumerate() {
            for kind in 0..3 {
                let turn = i * TURNS[0] + j * TURNS[1] + kind * TURNS[2];
                let (seqlen, positions) = extents[turn % extents.len()];
                let window = Mask::causal_window(seqlen as u32 / 4 - 1);
                let (mask, summary) = [
                    (Mask::FULL, "groups, full"),
                    (Mask::CAUSAL, "groups, causal"),
                    (window, "groups, window"),
                ][kind];
                let dtype = if (i + j + kind) % 3 == 2 { Dtype::F16 } else { Dtype::Bf16 };
                let square = Problem::square(positions / seqlen, seqlen, HEADS, head_dim, mask, dtype);
                let problem = square.with_heads_kv(HEADS / group).with_head_dim_v(head_dim_v);
                shapes.push(Wanted::new(problem, summary));
            }
        }
    }
    shapes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn any_two_values_of_two_factors_meet() {
        let rows: Vec<[usize; 6]> = shapes()
            .iter()
            .map(|Wanted { problem, .. }| {
                let seqlen = problem.lengths.max_q();
                let mask = [problem.mask.right.is_some(), problem.mask.left.is_some()];
                [
                    problem.head_dim,
                    problem.group_size(),
                    mask.into_iter().map(usize::from).sum(),
                    seqlen,
                    seqlen * problem.lengths.sequences(),
                    problem.types.q as usize,
                ]
            })
            .collect();
        for a in 0..5 {
            for b in a + 1..6 {
                let of = |factor: usize| rows.iter().map(|row| row[factor]).collect::<BTreeSet<_>>();
                let pairs: BTreeSet<_> = rows.iter().map(|row| (row[a], row[b])).collect();
                let missing: Vec<_> = of(a)
                    .into_iter()
                    .flat_map(|x| of(b).into_iter().map(move |y| (x, y)))
                    .filter(|pair| !pairs.contains(pair))
                    .collect();
                // A sequence is not longer than all positions together.
                assert!(missing.iter().all(|(x, y)| (a, b) == (3, 4) && x > y), "{a} {b}: {missing:?}");
            }
        }
    }
}
