//! The two published ladders, step by step with the mma.sync kernel's switches.

use fa_core::{Arch, Dtype, Family, KernelSpec, Mask, Pass, Problem, Sm80Fwd};
use fa_planner::plan::PlanError;

use super::rungs::{Ladder, Rung};
use crate::tune::candidates;

/// Shared-memory access step by step, B = 2, 8 heads, N = 1024, f16, no mask: a CuTe DSL kernel on an A10G,
/// in TFLOP/s. Its pipelined version has no ldmatrix and is no step beyond it.
const MEMORY_PUBLISHED: [Option<f64>; 4] = [Some(20.61), Some(27.93), Some(32.01), None];

/// Tiles and arithmetic, B = 4, 32 heads, f16, causal: cuTile on a B200, in TFLOP/s by sequence length and
/// step.
const TILES_PUBLISHED: [(usize, [f64; 6]); 5] = [
    (1024, [330.0, 187.0, 322.0, 373.0, 377.0, 548.0]),
    (2048, [441.0, 268.0, 436.0, 552.0, 560.0, 708.0]),
    (4096, [511.0, 347.0, 524.0, 684.0, 696.0, 817.0]),
    (8192, [546.0, 415.0, 585.0, 770.0, 781.0, 887.0]),
    (16384, [566.0, 463.0, 620.0, 813.0, 835.0, 918.0]),
];

/// Tiles that the last step chooses from, by the planner's order.
const TUNED_TILES: usize = 6;

/// Both ladders; the second for every one of `seqlens` (1k to 16k if there are none).
///
/// # Errors
/// Where the planner has no kernel for a length.
pub(super) fn ladders(arch: Arch, seqlens: &[usize]) -> Result<Vec<Ladder>, PlanError> {
    let mut ladders = vec![memory()];
    let published: Vec<usize> = TILES_PUBLISHED.iter().map(|(seqlen, _)| *seqlen).collect();
    for &seqlen in if seqlens.is_empty() { &published } else { seqlens } {
        ladders.push(tiles(arch, seqlen)?);
    }
    Ok(ladders)
}

fn spec(problem: &Problem, kernel: &Sm80Fwd) -> KernelSpec {
    KernelSpec::for_problem(problem, [problem.head_dim as u32, problem.head_dim_v as u32], kernel.clone())
}

fn step(name: &str, change: &'static str, problem: &Problem, kernel: &Sm80Fwd) -> Rung {
    Rung { name: name.to_owned(), change, specs: Ok(vec![spec(problem, kernel)]) }
}

/// Ways of loading operands from shared memory, with the same arithmetic and tile.
fn memory() -> Ladder {
    let problem = Problem::square(2, 1024, 8, 128, Mask::FULL, Dtype::F16);
    let naive = Sm80Fwd {
        tile_m: 64,
        tile_n: 64,
        num_warps: 4,
        stages: 1,
        q_in_regs: false,
        blocks_per_sm: 2,
        swizzle: false,
        ldmatrix: false,
        exp2: true,
        fast_math: true,
        loop_split: true,
        reverse_blocks: false,
        pack_gqa: false,
    };
    let swizzle = Sm80Fwd { swizzle: true, ..naive.clone() };
    let ldmatrix = Sm80Fwd { ldmatrix: true, ..swizzle.clone() };
    let pipeline = Sm80Fwd { stages: 2, ..ldmatrix.clone() };
    Ladder {
        name: "memory".to_owned(),
        steps: vec![
            step("naive", "plain rows, 32-bit fragment loads, one stage", &problem, &naive),
            step("+ swizzle", "no bank conflicts", &problem, &swizzle),
            step("+ ldmatrix", "four matrices by one load", &problem, &ldmatrix),
            step("+ pipeline", "the next tile is copied under this one's products", &problem, &pipeline),
        ],
        problem,
        published: MEMORY_PUBLISHED.to_vec(),
    }
}

/// The effect of tiles.
///
/// The published large tile is 256 x 128, which tensor memory holds. 128 x 128 over eight warps is the
/// largest that mma.sync holds in registers with every step off: 256 x 64 spills until the loop is split.
fn tiles(arch: Arch, seqlen: usize) -> Result<Ladder, PlanError> {
    let problem = Problem::square(4, seqlen, 32, 128, Mask::CAUSAL, Dtype::F16);
    let small = Sm80Fwd {
        tile_m: 64,
        tile_n: 64,
        num_warps: 4,
        stages: 2,
        q_in_regs: false,
        blocks_per_sm: 2,
        swizzle: true,
        ldmatrix: true,
        exp2: true,
        fast_math: false,
        loop_split: false,
        reverse_blocks: false,
        pack_gqa: false,
    };
    let large = Sm80Fwd { tile_m: 128, tile_n: 128, num_warps: 8, blocks_per_sm: 1, ..small.clone() };
    let fast = Sm80Fwd { fast_math: true, ..large.clone() };
    let split = Sm80Fwd { loop_split: true, ..fast.clone() };
    let order = Sm80Fwd { reverse_blocks: true, ..split.clone() };
    let tuned = candidates::of(&problem, arch, Family::Sm80, Pass::Forward, TUNED_TILES)?;
    let tuned = tuned.into_iter().map(|candidate| candidate.spec).collect();
    let published = TILES_PUBLISHED.iter().find(|(known, _)| *known == seqlen);
    Ok(Ladder {
        name: "tiles".to_owned(),
        steps: vec![
            step("small tiles", "64 x 64, exact division, a mask on every tile", &problem, &small),
            step("large tiles", "128 x 128: the trap", &problem, &large),
            step("+ fast math", "flush to zero, approximate division: the rescue", &problem, &fast),
            step("+ loop split", "a mask only where the diagonal is", &problem, &split),
            step("+ block order", "longest tiles first", &problem, &order),
            Rung { name: "tuned tiles".to_owned(), change: "the fastest measured tile", specs: Ok(tuned) },
        ],
        problem,
        published: published.map_or(vec![None; 6], |(_, rates)| rates.map(Some).to_vec()),
    })
}

#[cfg(test)]
mod tests {
    use fa_planner::account::account;

    use super::*;

    #[test]
    fn every_step_fits_where_the_ladder_is_measured() {
        for arch in [Arch::Sm80, Arch::Sm90] {
            for ladder in ladders(arch, &[]).expect("there are plans") {
                assert_eq!(ladder.steps.len(), ladder.published.len());
                for step in &ladder.steps {
                    for spec in step.specs.as_ref().expect("specs") {
                        account(spec, arch).unwrap_or_else(|why| panic!("{arch}, {}: {why}", step.name));
                    }
                }
            }
        }
    }
}
