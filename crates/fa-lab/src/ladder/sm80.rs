//! The three published ladders, step by step with the mma.sync kernel's switches.

use fa_core::{Arch, Dtype, Family, KernelSpec, Mask, Pass, Problem, Sm80Fwd};
use fa_planner::plan::PlanError;

use super::figures::{ARITHMETIC, MEMORY, SDPA, SDPA_PUBLISHED, TILES};
use super::rungs::{Ladder, Rung};
use crate::tune::candidates;

/// Tiles that the last step chooses from, by the planner's order.
const TUNED_TILES: usize = 6;

/// All three; tiles for every one of `seqlens` (1k to 16k if there are none).
///
/// # Errors
/// Where the planner has no kernel for a length.
pub(super) fn ladders(arch: Arch, seqlens: &[usize]) -> Result<Vec<Ladder>, PlanError> {
    let mut ladders = vec![memory(), arithmetic()];
    let known = TILES.map(|(seqlen, _)| seqlen);
    for &seqlen in if seqlens.is_empty() { &known[..] } else { seqlens } {
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
pub(super) fn memory() -> Ladder {
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
        exact_div: false,
        divide_keys: false,
    };
    let swizzle = Sm80Fwd { swizzle: true, ..naive.clone() };
    let pipelined = Sm80Fwd { stages: 2, ..swizzle.clone() };
    let ldmatrix = Sm80Fwd { ldmatrix: true, ..swizzle.clone() };
    let pipeline = Sm80Fwd { stages: 2, ..ldmatrix.clone() };
    Ladder {
        name: "memory".to_owned(),
        steps: vec![
            step("naive", "plain rows, 32-bit fragment loads, one stage", &problem, &naive),
            step("+ swizzle and pipeline", "two stages and no ldmatrix: a step back", &problem, &pipelined),
            step("+ swizzle", "no bank conflicts", &problem, &swizzle),
            step("+ ldmatrix", "four matrices by one load", &problem, &ldmatrix),
            step("+ pipeline", "the next tile is copied under this one's products", &problem, &pipeline),
        ],
        problem,
        published: MEMORY.to_vec(),
        peer: Some((SDPA, SDPA_PUBLISHED)),
    }
}

/// Switches of arithmetic, loads and occupancy, with the same tile.
pub(super) fn arithmetic() -> Ladder {
    let problem = Problem::square(4, 2048, 32, 128, Mask::CAUSAL, Dtype::F16);
    let basic = Sm80Fwd {
        tile_m: 64,
        tile_n: 64,
        num_warps: 4,
        stages: 1,
        q_in_regs: false,
        blocks_per_sm: 1,
        swizzle: true,
        ldmatrix: true,
        exp2: false,
        fast_math: false,
        loop_split: true,
        reverse_blocks: false,
        pack_gqa: false,
        exact_div: false,
        divide_keys: false,
    };
    let exp2 = Sm80Fwd { exp2: true, fast_math: true, exact_div: true, ..basic.clone() };
    let plain = Sm80Fwd { ldmatrix: false, ..exp2.clone() };
    let hints = Sm80Fwd { stages: 2, ..exp2.clone() };
    let occupied = Sm80Fwd { blocks_per_sm: 2, ..hints.clone() };
    let divided = Sm80Fwd { exact_div: false, ..occupied.clone() };
    Ladder {
        name: "arithmetic".to_owned(),
        steps: vec![
            step("basic", "exp of scaled scores, one stage", &problem, &basic),
            step("+ exp2", "the scale folded in, denormals flushed to zero", &problem, &exp2),
            // K is read transposed in every form; what can be turned is which instruction reads it.
            step("without load order", "K and V gathered by 32-bit loads, not ldmatrix", &problem, &plain),
            step("+ load order", "K and V transposed by the load itself: as + exp2", &problem, &exp2),
            step("+ latency hints", "the next tile is copied under this one's products", &problem, &hints),
            step("+ occupancy 2", "registers for two CTAs on an SM", &problem, &occupied),
            step("+ approximate division", "at the end of a row", &problem, &divided),
        ],
        problem,
        published: ARITHMETIC.to_vec(),
        peer: None,
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
        exact_div: false,
        divide_keys: false,
    };
    let large = Sm80Fwd { tile_m: 128, tile_n: 128, num_warps: 8, blocks_per_sm: 1, ..small.clone() };
    let fast = Sm80Fwd { fast_math: true, ..large.clone() };
    let split = Sm80Fwd { loop_split: true, ..fast.clone() };
    let order = Sm80Fwd { reverse_blocks: true, ..split.clone() };
    let tuned = candidates::of(&problem, arch, Family::Sm80, Pass::Forward, TUNED_TILES)?;
    let tuned = tuned.into_iter().map(|candidate| candidate.spec).collect();
    let published = TILES.iter().find(|(known, _)| *known == seqlen);
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
        peer: None,
    })
}

#[cfg(test)]
mod tests {
    use fa_planner::account::account;

    use super::*;

    /// Rows of a kept record.
    fn record(path: &std::path::Path) -> Vec<serde_json::Value> {
        let json: serde_json::Value = crate::summary::read(path, "fa ladder").expect("a record");
        json["rows"].as_array().expect("rows").clone()
    }

    #[test]
    fn records_have_the_steps_of_today() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/ladder");
        let today = ladders(Arch::Sm90, &[]).expect("plans");
        let mut found = 0;
        for entry in std::fs::read_dir(folder).expect("records") {
            let path = entry.expect("a file").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if !name.starts_with("sm80-") || !name.ends_with(".json") {
                continue;
            }
            found += 1;
            let rows = record(&path);
            let is_complete = rows.iter().any(|row| row["ladder"] == "arithmetic");
            for ladder in &today {
                for step in &ladder.steps {
                    let own = rows.iter().find(|row| {
                        row["ladder"] == *ladder.name
                            && row["step"] == *step.name
                            && row["seqlen_k"] == ladder.problem.lengths.max_k()
                    });
                    assert!(
                        own.is_some() || !is_complete,
                        "{name}: no row of {}, {}",
                        ladder.name,
                        step.name
                    );
                    let specs = step.specs.as_ref().expect("specs");
                    if let (Some(spec), 1) = (own.and_then(|row| row["spec"].as_str()), specs.len()) {
                        assert_eq!(spec, specs[0].to_string(), "{name}: {}, {}", ladder.name, step.name);
                    }
                }
            }
        }
        assert!(found > 0, "no record in {folder}");
    }

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
