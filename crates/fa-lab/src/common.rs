//! The kernels that the commonest problems run: what a program is built with so that their first calls wait
//! for no compiler.

use std::collections::BTreeMap;

use fa_core::board::{BOARDS, Board};
use fa_core::{Arch, Dtype, KernelSpec, Lengths, Mask, Pass, Problem, ShippedSpec, Side};
use fa_planner::plan::{PlanOptions, best};
use rayon::prelude::*;

/// Query heads and K/V heads of encoders and decoders of 0.1 to 70 billion parameters, whole and on one of
/// several GPUs.
const HEADS: [(usize, usize); 6] = [(12, 12), (16, 16), (32, 32), (32, 8), (28, 4), (8, 1)];

const HEAD_DIMS: [usize; 3] = [64, 128, 256];

/// Sequences and the tokens of each: of encoders, trainers and prompts.
const SQUARES: [(usize, usize); 11] = [
    (1, 512),
    (1, 1024),
    (1, 2048),
    (1, 4096),
    (1, 8192),
    (1, 32_768),
    (4, 1024),
    (4, 4096),
    (16, 2048),
    (64, 512),
    (256, 128),
];

/// Sequences of a server's step.
const STEPS: [usize; 5] = [1, 8, 32, 64, 256];

/// Bounds on their keys.
const BOUNDS: [usize; 4] = [1024, 4096, 8192, 32_768];

/// Queries of a step in which prompts are prefilled in chunks.
const CHUNK: usize = 2048;

/// How many problems in f16 count as one in bf16.
const F16_SHARE: f64 = 0.5;

/// Problems of one form, which count as one together.
fn forms(problem: &Problem) -> Vec<(Pass, Vec<Problem>)> {
    let of = |lengths| problem.with_lengths(lengths);
    let dense = SQUARES.map(|(batch, len)| of(Lengths::uniform(batch, len, len))).to_vec();
    // Of mixed lengths, three quarters of the longest in the mean.
    let packed = SQUARES.map(|(batch, len)| {
        let (batch, total) = (batch.max(2), batch.max(2) * len * 3 / 4);
        of(Lengths::packed(batch, total, total, len, len))
    });
    let steps = |of_step: &dyn Fn(usize, usize) -> Lengths| -> Vec<Problem> {
        let all = STEPS.iter().flat_map(|&batch| BOUNDS.map(|bound| (batch, bound)));
        all.map(|(batch, bound)| of(of_step(batch, bound))).collect()
    };
    let pages = |batch: usize, bound: usize| Side::paged(16, batch * bound / 16, bound);
    vec![
        (Pass::Forward, dense.clone()),
        (Pass::BACKWARD, dense),
        (Pass::Forward, packed.to_vec()),
        (Pass::BACKWARD, packed.to_vec()),
        (Pass::Forward, steps(&|batch, bound| Lengths::of(batch, Side::padded(1), pages(batch, bound)))),
        (
            Pass::Forward,
            steps(&|batch, bound| Lengths::of(batch, Side::packed(batch, 1), pages(batch, bound))),
        ),
        (
            Pass::Forward,
            steps(&|batch, bound| {
                Lengths::of(batch, Side::packed(CHUNK.max(batch), CHUNK.min(bound)), pages(batch, bound))
            }),
        ),
        (
            Pass::Forward,
            steps(&|batch, bound| Lengths::of(batch, Side::padded(1), Side::padded(bound).with_used())),
        ),
    ]
}

/// A form of problems whose kernels are counted, for one board.
struct Form {
    board: Board,
    pass: Pass,
    problems: Vec<Problem>,
    /// What it counts.
    share: f64,
}

/// The planner's first choices for common problems: head dims of 64, 128 and 256 in bf16 and f16, causal and
/// full, dense, packed, decoding and chunks of prompts on pages, decoding on contiguous caches, and the
/// gradients of those that have any, on every board. For each of `archs` the `count` that are chosen for
/// most of them.
pub fn kernels(archs: &[Arch], count: usize) -> Vec<ShippedSpec> {
    let of = |&arch: &Arch| {
        let boards: Vec<Board> = BOARDS.into_iter().filter(|board| board.arch == arch).collect();
        let specs = most_chosen(&boards, &HEAD_DIMS, count).into_iter();
        specs.map(move |spec| ShippedSpec { archs: vec![arch], spec })
    };
    archs.iter().flat_map(of).collect()
}

/// The `count` kernels that are chosen for most problems with these head dims on boards of one architecture.
fn most_chosen(boards: &[Board], head_dims: &[usize], count: usize) -> Vec<KernelSpec> {
    let mut all = Vec::new();
    for &board in boards {
        for &head_dim in head_dims {
            for mask in [Mask::CAUSAL, Mask::FULL] {
                for (dtype, share) in [(Dtype::Bf16, 1.0), (Dtype::F16, F16_SHARE)] {
                    for (heads, heads_kv) in HEADS {
                        let base = Problem::square(1, 1, heads, head_dim, mask, dtype);
                        let forms = forms(&base.with_heads_kv(heads_kv)).into_iter();
                        all.extend(forms.map(|(pass, problems)| Form { board, pass, problems, share }));
                    }
                }
            }
        }
    }
    let chosen: Vec<Vec<(KernelSpec, f64)>> = all.par_iter().map(Form::chosen).collect();
    let mut shares: BTreeMap<String, (f64, KernelSpec)> = BTreeMap::new();
    for (spec, share) in chosen.into_iter().flatten() {
        shares.entry(spec.to_string()).or_insert((0.0, spec)).0 += share;
    }
    let mut most: Vec<(f64, KernelSpec)> = shares.into_values().collect();
    // The sort keeps the order by name among equals.
    most.sort_by(|a, b| b.0.total_cmp(&a.0));
    most.into_iter().take(count).map(|(_, spec)| spec).collect()
}

impl Form {
    /// The planner's choice for each problem, and what it counts.
    fn chosen(&self) -> Vec<(KernelSpec, f64)> {
        let arch = self.board.arch;
        let options = PlanOptions::default().with_pass(self.pass).with_board(Some(self.board.limits));
        let share = self.share / self.problems.len() as f64;
        let own = self.problems.iter().filter_map(|problem| best(problem, arch, &options).ok());
        own.map(|plan| (plan.spec, share)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call that a server and one that a trainer makes find their kernels among the first.
    #[test]
    fn the_first_serve_decoding_on_pages_and_long_causal_sequences() {
        let kernels = most_chosen(&[Board::of_arch(Arch::Sm90)], &[128], 70);
        assert_eq!(kernels.len(), 70);
        let base = Problem::square(1, 4096, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
        let pages = Side::paged(16, 16 * 256, 4096);
        let decoding = base.with_lengths(Lengths::of(16, Side::padded(1), pages));
        for (problem, pass) in [(base, Pass::Forward), (base, Pass::BACKWARD), (decoding, Pass::Forward)] {
            let options = PlanOptions::default().with_pass(pass);
            let chosen = best(&problem, Arch::Sm90, &options).expect("a kernel").spec;
            assert!(kernels.contains(&chosen), "{chosen}");
        }
    }
}
