//! The cases that an attention implementation must get right, on the tiled one.
//!
//! The lists cross every shape with every type and causal or not; head dims, head counts and batches rotate
//! through the shapes, then stand in lists of their own.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::grid::{BATCHES, HEAD_DIMS, HEADS, PADDED_HEAD_DIMS, SHAPES};

use crate::tiled::{Case, check_all};

const DTYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];
const CAUSAL: [Mask; 2] = [Mask::FULL, Mask::CAUSAL];

/// Multiply-adds of a forward above which a case is cut down to fewer sequences and heads, then to a smaller
/// head dim: the oracle takes about a second for 2^28 of them, gradients included.
const BUDGET: f64 = 3e7;

/// Those of the grid, and some that no GPU kernel takes.
fn head_dims() -> impl Iterator<Item = (usize, usize)> + Clone {
    HEAD_DIMS.into_iter().chain(PADDED_HEAD_DIMS).chain([(13, 7), (1, 1), (3, 5)])
}

fn problem(
    lengths: (usize, usize),
    heads: (usize, usize),
    dims: (usize, usize),
    mask: Mask,
    dtype: Dtype,
) -> Problem {
    Problem::new(
        Lengths::uniform(1, lengths.0, lengths.1),
        (heads.0, heads.1),
        (dims.0, dims.1),
        Types::same(dtype),
    )
    .with_mask(mask)
}

fn within_budget(problem: Problem) -> Problem {
    let smaller = [
        problem,
        problem.with_lengths(Lengths::uniform(1, problem.lengths.max_q(), problem.lengths.max_k())),
        problem
            .with_lengths(Lengths::uniform(1, problem.lengths.max_q(), problem.lengths.max_k()))
            .with_heads(6.min(problem.heads_q), 1),
        problem
            .with_lengths(Lengths::uniform(1, problem.lengths.max_q(), problem.lengths.max_k()))
            .with_heads(2, 1),
        problem
            .with_lengths(Lengths::uniform(1, problem.lengths.max_q(), problem.lengths.max_k()))
            .with_heads(1, 1),
    ];
    let fits = |problem: &Problem| problem.flops_forward() <= 2.0 * BUDGET;
    let least = smaller[4].with_head_dims(64, 64);
    smaller.into_iter().find(fits).unwrap_or(least)
}

/// Both masks and every type; the other axes move on from case to case.
fn shapes(shapes: &[(usize, usize)]) -> impl Iterator<Item = Case> {
    let cases = shapes.iter().flat_map(|&lengths| {
        CAUSAL.into_iter().flat_map(move |mask| DTYPES.into_iter().map(move |dtype| (lengths, mask, dtype)))
    });
    cases.zip(head_dims().cycle()).enumerate().map(|(turn, ((lengths, mask, dtype), dims))| {
        let batch = BATCHES[(turn / 2) % BATCHES.len()];
        let problem = problem(lengths, HEADS[turn % HEADS.len()], dims, mask, dtype);
        let problem = within_budget(problem.with_lengths(Lengths::uniform(
            batch,
            problem.lengths.max_q(),
            problem.lengths.max_k(),
        )));
        Case { problem, with_backward: true, all_isas: false }
    })
}

#[test]
fn short_shapes() {
    check_all(shapes(&SHAPES[..15]));
}

#[test]
fn longer_shapes() {
    check_all(shapes(&SHAPES[15..23]));
}

/// One type and head each: the oracle is quadratic.
#[test]
fn long_shapes() {
    let long = |lengths, dims, mask, dtype, with_backward| {
        let problem = problem(lengths, (2, 1), dims, mask, dtype).with_heads_q(2);
        Case { problem, with_backward, all_isas: false }
    };
    check_all([
        long(SHAPES[23], (64, 64), Mask::FULL, Dtype::Bf16, false),
        long(SHAPES[23], (64, 64), Mask::CAUSAL, Dtype::F16, true),
        long(SHAPES[24], (16, 16), Mask::CAUSAL, Dtype::Bf16, true),
        long(SHAPES[25], (32, 32), Mask::FULL, Dtype::F16, false),
        long(SHAPES[25], (8, 8), Mask::CAUSAL, Dtype::F32, true),
    ]);
}

#[test]
fn every_head_dim_with_every_instruction_set() {
    check_all(head_dims().flat_map(|dims| {
        CAUSAL.into_iter().zip([(113, 203), (73, 37)]).flat_map(move |(mask, lengths)| {
            DTYPES.map(|dtype| {
                let problem = problem(lengths, (2, 1), dims, mask, dtype);
                Case { problem, with_backward: true, all_isas: true }
            })
        })
    }));
}

#[test]
fn every_head_count_and_batch() {
    check_all(HEADS.into_iter().flat_map(|heads| {
        BATCHES.into_iter().flat_map(move |batch| {
            CAUSAL.into_iter().flat_map(move |mask| {
                DTYPES.map(|dtype| {
                    let problem = problem((33, 48), heads, (16, 24), mask, dtype);
                    let problem = problem.with_lengths(Lengths::uniform(batch, 33, 48));
                    Case { problem, with_backward: true, all_isas: false }
                })
            })
        })
    }));
}

#[test]
fn windows_caps_and_scales() {
    let masks = [
        Mask::window(0, 0),
        Mask::window(7, 3),
        Mask::window(100, 0),
        Mask::window(0, 200),
        Mask::causal_window(16),
        Mask::band(Some(40), None),
        Mask::band(None, Some(25)),
    ];
    let lengths = [(1, 77), (113, 203), (203, 113), (150, 9), (9, 150), (257, 257)];
    let turns = masks.into_iter().flat_map(|mask| lengths.map(|lengths| (mask, lengths)));
    check_all(turns.enumerate().map(|(turn, (mask, lengths))| {
        let problem = problem(lengths, (4, 2), (48, 32), mask, DTYPES[turn % 3]);
        let softmax_scale = [None, Some(0.5), Some(-0.25), Some(0.0)][turn % 4];
        let softcap = [None, Some(2.0), Some(30.0)][turn / 2 % 3];
        let problem =
            problem.with_softmax_scale(softmax_scale).with_score(ScoreMod::NONE.with_softcap(softcap));
        Case { problem, with_backward: true, all_isas: true }
    }));
}

/// Thousands of sequences, and more keys than 16 or 22 bits count.
#[test]
fn large_batch_and_millions_of_keys() {
    let many = problem((2, 3), (2, 1), (4, 4), Mask::CAUSAL, Dtype::Bf16);
    let many = many.with_lengths(Lengths::uniform(8300, 2, 3));
    let long = problem((1, (1 << 22) + 3), (1, 1), (2, 1), Mask::CAUSAL, Dtype::F16);
    check_all([many, long].map(|problem| Case { problem, with_backward: true, all_isas: false }));
}
