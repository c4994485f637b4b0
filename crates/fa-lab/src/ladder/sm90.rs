//! The wgmma kernel's knobs, each turned alone.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Arch, Dtype, Family, Kernel, KernelSpec, Lengths, Mask, Problem, Sm90Fwd};
use fa_planner::account::account;
use fa_planner::plan::{PlanError, PlanOptions, plan};

use super::rungs::{Ladder, Rung};
use crate::error::{Error, Result};
use crate::marks::TOKENS;
use crate::shape::HeadDim;

/// A length with enough tiles, long enough, for every knob to matter.
const SEQLEN: usize = 4096;

/// A ladder for each head dim, mask and length, and one with grouped heads for packing.
///
/// # Errors
/// On an architecture without wgmma, and for head dims that no kernel has.
pub(super) fn ladders(arch: Arch, head_dims: &[HeadDim], seqlens: &[usize]) -> Result<Vec<Ladder>> {
    if !arch.has_wgmma() {
        return Err(PlanError::Family { family: Family::Sm90, arch }.into());
    }
    let default = [HeadDim { qk: 128, v: 128 }];
    let head_dims = if head_dims.is_empty() { &default } else { head_dims };
    let seqlens = if seqlens.is_empty() { &[SEQLEN] } else { seqlens };
    let mut ladders = Vec::new();
    for &HeadDim { qk, v } in head_dims {
        let heads = (2048 / qk.max(1)).max(1);
        for mask in [Mask::FULL, Mask::CAUSAL] {
            for &seqlen in seqlens {
                let batch = (TOKENS / seqlen).max(1);
                let square = Problem::square(batch, seqlen, heads, qk, mask, Dtype::Bf16);
                ladders.push(knobs(arch, square.with_head_dim_v(v))?);
            }
        }
        ladders.push(grouped(arch, qk, v)?);
    }
    Ok(ladders)
}

/// The planner's choice.
fn base(arch: Arch, problem: &Problem) -> Result<(KernelSpec, Sm90Fwd)> {
    let options = PlanOptions::default().with_family(Some(Family::Sm90));
    let best = plan(problem, arch, &options)?.into_iter().next();
    let spec = best.ok_or_else(|| Error::Request("no SM90 kernel fits".to_owned()))?.spec;
    let Kernel::Sm90Fwd(own) = &spec.kernel else {
        unreachable!("{} among SM90 forward plans", spec.kernel.name())
    };
    let own = own.clone();
    Ok((spec, own))
}

fn step(arch: Arch, name: &str, change: &'static str, spec: KernelSpec) -> Rung {
    let specs = account(&spec, arch).map(|_| vec![spec]).map_err(|why| why.to_string());
    Rung { name: name.to_owned(), change, specs }
}

fn knobs(arch: Arch, problem: Problem) -> Result<Ladder> {
    let (spec, own) = base(arch, &problem)?;
    let mut steps = vec![step(arch, "base", "the planner's choice", spec.clone())];
    let mut turn = |name: &str, change: &'static str, with: &dyn Fn(&mut Sm90Fwd)| {
        let mut kernel = own.clone();
        with(&mut kernel);
        if kernel != own {
            steps.push(step(
                arch,
                name,
                change,
                KernelSpec { kernel: Kernel::Sm90Fwd(kernel), ..spec.clone() },
            ));
        }
    };
    let on_off = |on: bool| if on { "off" } else { "on" };
    turn(
        &format!("overlap_wg {}", on_off(own.overlap_wg)),
        "S of the next step issued before P V of this one",
        &|k| k.overlap_wg = !k.overlap_wg,
    );
    turn(&format!("ping_pong {}", on_off(own.ping_pong)), "warpgroups take turns", &|k| {
        k.ping_pong = !k.ping_pong;
    });
    let p = if own.pv_is_rs { "P through shared memory" } else { "P in registers" };
    turn(p, "pv_is_rs", &|k| k.pv_is_rs = !k.pv_is_rs);
    turn(&format!("q_stages {}", 3 - own.q_stages), "Q buffers", &|k| k.q_stages = 3 - k.q_stages);
    for stages in 1..=4 {
        turn(&format!("kv_stages {stages}"), "K and V buffers", &|k| k.kv_stages = stages);
    }
    for scheduler in [Scheduler::PerTile, Scheduler::Static, Scheduler::Dynamic] {
        turn(&format!("scheduler {scheduler:?}"), "how tiles are handed to blocks", &|k| {
            k.scheduler = scheduler
        });
    }
    for order in [TileOrder::Natural, TileOrder::LongestFirst] {
        turn(&format!("tile_order {order:?}"), "the order of tiles", &|k| k.tile_order = order);
    }
    turn(&format!("cluster_m {}", 3 - own.cluster_m), "K and V by multicast", &|k| {
        k.cluster_m = 3 - k.cluster_m
    });
    for share in [0, 2, 4, 8] {
        turn(&format!("exp_poly_of_16 {share}"), "exponentials by polynomial", &|k| k.exp_poly_of_16 = share);
    }
    for threshold in [0, 4, 8] {
        turn(&format!("rescale_threshold {threshold}"), "rescaling of O put off", &|k| {
            k.rescale_threshold = threshold;
        });
    }
    let published = vec![None; steps.len()];
    Ok(Ladder { name: "knobs".to_owned(), problem, steps, published, peer: None })
}

/// Sixteen queries, eight heads per K/V head: without packing they fill an eighth of a tile.
fn grouped(arch: Arch, head_dim: usize, head_dim_v: usize) -> Result<Ladder> {
    let square = Problem::square(16, 16, 64, head_dim, Mask::CAUSAL, Dtype::Bf16);
    let problem = square
        .with_lengths(Lengths::uniform(square.lengths.sequences(), square.lengths.max_q(), 8192))
        .with_heads_kv(8)
        .with_head_dim_v(head_dim_v);
    let (spec, own) = base(arch, &problem)?;
    // A group of eight has to divide the rows of a tile: all do.
    let with = |pack_gqa| KernelSpec {
        kernel: Kernel::Sm90Fwd(Sm90Fwd { pack_gqa, ..own.clone() }),
        ..spec.clone()
    };
    let steps = vec![
        step(arch, "base: pack_gqa off", "a tile holds one head's rows", with(false)),
        step(arch, "pack_gqa on", "a tile holds the rows of all heads of a group", with(true)),
    ];
    Ok(Ladder { name: "grouped heads".to_owned(), problem, steps, published: vec![None; 2], peer: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_knob_of_the_kernel_is_turned() {
        let all = ladders(Arch::Sm90, &[], &[]).expect("ladders");
        assert_eq!(all.len(), 3);
        let base = |ladder: &Ladder| ladder.steps[0].specs.clone().expect("the base fits")[0].clone();
        for field in [
            "overlap_wg",
            "ping_pong",
            "pv_is_rs",
            "q_stages",
            "kv_stages",
            "scheduler",
            "tile_order",
            "cluster_m",
            "exp_poly_of_16",
            "rescale_threshold",
            "pack_gqa",
        ] {
            let line = |spec: &KernelSpec| {
                let text = spec.to_ron();
                text.lines()
                    .find(|line| line.contains(field))
                    .map(str::to_owned)
                    .expect("every field is written")
            };
            let turned = all.iter().any(|ladder| {
                let base = line(&base(ladder));
                let specs = ladder.steps.iter().filter_map(|step| step.specs.as_ref().ok());
                specs.flatten().any(|spec| line(spec) != base)
            });
            assert!(turned, "{field}");
        }
        let refused = ladders(Arch::Sm80, &[], &[]).err().map(|error| error.to_string());
        assert!(refused.is_some_and(|error| error.contains("sm90 kernels do not run on sm80")));
    }
}
