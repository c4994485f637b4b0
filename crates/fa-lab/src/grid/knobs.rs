//! Kernels that differ in one field each: every switch must be right alone, whether or not the planner uses
//! it.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{
    Arch, Dtype, Family, Kernel, KernelSpec, MaskKind, Reads, ScoreKind, Sm80Fwd, Sm90Fwd, Sm100Fwd, Types,
};
use fa_planner::account::account;

use super::case::NamedSpec;

/// Kernels of `family` that fit `arch`, each named by what is changed.
pub fn specs(family: Family, arch: Arch) -> Vec<NamedSpec> {
    let mut all = match family {
        Family::Sm80 => sm80(),
        Family::Sm90 => sm90(),
        Family::Sm100 => sm100(),
    };
    all.extend(serving(&all));
    all.into_iter().filter(|named| account(&named.spec, arch).is_ok()).collect()
}

/// Changes that are combined with varied lengths, pages and splits: those of tile order, of loads and of
/// stores.
const SERVED: [&str; 17] = [
    "the base",
    "num_wg 1",
    "num_wg 3",
    "ping-pong",
    "pack_gqa",
    "gather",
    "gather kv_stages 1",
    "gather num_wg 3",
    "no overlap",
    "P in shared memory",
    "tile_n 80",
    "tile_n 176",
    "kv_stages 1",
    "q_stages 2",
    "static natural",
    "tile_m 128 warps 4",
    "Q in registers",
];

/// Some of the kernels, each once for every way to read rows and every change of scores. Invalid combinations
/// are left out.
fn serving(all: &[NamedSpec]) -> Vec<NamedSpec> {
    let varied = Reads { varied: true, paged: false };
    let paged = Reads { varied: true, paged: true };
    let none = ScoreKind::NONE;
    let all_scores = ScoreKind { softcap: true, alibi: true, sinks: true, ..ScoreKind::NONE };
    let forms = [
        ("varlen", varied, false, none),
        ("paged", paged, false, none),
        ("split", Reads::UNIFORM, true, none),
        ("paged split", paged, true, none),
        ("all scores", Reads::UNIFORM, false, all_scores),
        ("paged split, all scores", paged, true, all_scores),
    ];
    let mut specs = Vec::new();
    for named in all.iter().filter(|named| SERVED.contains(&named.name.as_str())) {
        for (form, reads, split, score) in forms {
            let spec = KernelSpec { reads, split, score, ..named.spec.clone() };
            if spec.check().is_ok() {
                specs.push(NamedSpec { name: format!("{} {form}", named.name), spec });
            }
        }
    }
    specs
}

fn spec(head_dim: u32, mask: MaskKind, kernel: Kernel) -> KernelSpec {
    KernelSpec {
        types: Types::same(Dtype::Bf16),
        head_dim,
        head_dim_v: head_dim,
        mask,
        score: ScoreKind::NONE,
        reads: Reads::UNIFORM,
        split: false,
        kernel,
    }
}

fn sm100() -> Vec<NamedSpec> {
    let base = Sm100Fwd::default();
    let mut changed: Vec<(String, Sm100Fwd)> = vec![("the base".into(), base.clone())];
    let mut change = |name: &str, kernel: Sm100Fwd| changed.push((name.to_owned(), kernel));
    change("q_tiles 1", Sm100Fwd { q_tiles: 1, tile_m: 128, ..base.clone() });
    for tile_n in [32, 64, 96] {
        change(&format!("tile_n {tile_n}"), Sm100Fwd { tile_n, ..base.clone() });
    }
    for kv_stages in [2, 5] {
        change(&format!("kv_stages {kv_stages}"), Sm100Fwd { kv_stages, ..base.clone() });
    }
    for (scheduler, tile_order) in [
        (Scheduler::PerTile, TileOrder::LongestFirst),
        (Scheduler::Static, TileOrder::Natural),
        (Scheduler::Static, TileOrder::LongestFirst),
    ] {
        let name = format!("{scheduler:?} {tile_order:?}");
        change(&name, Sm100Fwd { scheduler, tile_order, ..base.clone() });
    }
    for exp_poly_of_16 in [2, 16] {
        change(&format!("exp_poly_of_16 {exp_poly_of_16}"), Sm100Fwd { exp_poly_of_16, ..base.clone() });
    }
    change("rescale_threshold 0", Sm100Fwd { rescale_threshold: 0, ..base.clone() });
    let named = |(name, kernel)| {
        let spec = spec(128, MaskKind::Causal, Kernel::Sm100Fwd(kernel));
        NamedSpec { name, spec }
    };
    changed.into_iter().map(named).collect()
}

fn sm90() -> Vec<NamedSpec> {
    let base = Sm90Fwd::default();
    let mut changed: Vec<(String, Sm90Fwd)> = vec![("the base".into(), base.clone())];
    let mut change = |name: &str, kernel: Sm90Fwd| changed.push((name.to_owned(), kernel));
    change("num_wg 1", Sm90Fwd { num_wg: 1, tile_m: 64, ..base.clone() });
    change("num_wg 3", Sm90Fwd { num_wg: 3, tile_m: 192, tile_n: 64, ..base.clone() });
    change(
        "num_wg 3 ping-pong",
        Sm90Fwd { num_wg: 3, tile_m: 192, tile_n: 64, ping_pong: true, ..base.clone() },
    );
    for tile_n in [16, 32, 48, 80, 112, 144, 176, 192, 256] {
        change(&format!("tile_n {tile_n}"), Sm90Fwd { tile_n, ..base.clone() });
    }
    change("P in shared memory", Sm90Fwd { pv_is_rs: false, ..base.clone() });
    change("no overlap", Sm90Fwd { overlap_wg: false, ..base.clone() });
    change("neither", Sm90Fwd { overlap_wg: false, pv_is_rs: false, ping_pong: true, ..base.clone() });
    change("ping-pong", Sm90Fwd { ping_pong: true, ..base.clone() });
    for kv_stages in [1, 3, 4] {
        change(&format!("kv_stages {kv_stages}"), Sm90Fwd { kv_stages, tile_n: 64, ..base.clone() });
    }
    change("q_stages 2", Sm90Fwd { q_stages: 2, scheduler: Scheduler::Static, tile_n: 64, ..base.clone() });
    for scheduler in [Scheduler::Static, Scheduler::Dynamic] {
        for tile_order in [TileOrder::Natural, TileOrder::LongestFirst] {
            let name = format!("{scheduler:?} {tile_order:?}").to_lowercase();
            change(&name, Sm90Fwd { scheduler, tile_order, ping_pong: true, ..base.clone() });
        }
    }
    for exp_poly_of_16 in [1, 4, 8, 16] {
        change(&format!("exp_poly_of_16 {exp_poly_of_16}"), Sm90Fwd { exp_poly_of_16, ..base.clone() });
    }
    for rescale_threshold in [1, 8] {
        let name = format!("rescale_threshold {rescale_threshold}");
        change(&name, Sm90Fwd { rescale_threshold, ..base.clone() });
    }
    change("pack_gqa", Sm90Fwd { pack_gqa: true, ..base.clone() });
    let short = Sm90Fwd { num_wg: 1, tile_m: 64, tile_n: 64, kv_stages: 1, ..base.clone() };
    for (blocks_per_sm, scheduler) in [(2, Scheduler::Static), (2, Scheduler::Dynamic)] {
        let name = format!("{blocks_per_sm} blocks per SM, {scheduler:?}").to_lowercase();
        change(&name, Sm90Fwd { blocks_per_sm, scheduler, ..short.clone() });
    }
    // For keys in pages only.
    change("gather", Sm90Fwd { gather: true, ..base.clone() });
    change("gather kv_stages 1", Sm90Fwd { gather: true, kv_stages: 1, ..base.clone() });
    let three = Sm90Fwd { num_wg: 3, tile_m: 192, tile_n: 64, ping_pong: true, ..base.clone() };
    change("gather num_wg 3", Sm90Fwd { gather: true, scheduler: Scheduler::Dynamic, ..three });
    let mut specs: Vec<NamedSpec> = changed
        .into_iter()
        .map(|(name, kernel)| {
            let paged = kernel.gather;
            let spec = spec(128, MaskKind::Causal, Kernel::Sm90Fwd(kernel));
            NamedSpec { name, spec: KernelSpec { reads: Reads { varied: paged, paged }, ..spec } }
        })
        .collect();
    // The CTAs of a cluster read the same keys at the same time, so they are for the full mask and tiles that
    // are not drawn.
    for scheduler in [Scheduler::PerTile, Scheduler::Static] {
        let kernel = Sm90Fwd { cluster_m: 2, scheduler, ..base.clone() };
        let name = format!("cluster_m 2 {scheduler:?}").to_lowercase();
        specs.push(NamedSpec { name, spec: spec(128, MaskKind::Full, Kernel::Sm90Fwd(kernel)) });
    }
    specs
}

fn sm80() -> Vec<NamedSpec> {
    let base = Sm80Fwd::default();
    let mut changed: Vec<(String, Sm80Fwd)> = vec![("the base".into(), base.clone())];
    let mut change = |name: &str, kernel: Sm80Fwd| changed.push((name.to_owned(), kernel));
    for stages in [1, 3, 4] {
        change(&format!("stages {stages}"), Sm80Fwd { stages, ..base.clone() });
    }
    for (tile_m, num_warps) in [(16, 1), (32, 2), (128, 4), (128, 8), (192, 12)] {
        change(&format!("tile_m {tile_m} warps {num_warps}"), Sm80Fwd { tile_m, num_warps, ..base.clone() });
    }
    for tile_n in [16, 32, 80, 128] {
        change(&format!("tile_n {tile_n}"), Sm80Fwd { tile_n, ..base.clone() });
    }
    change("Q in registers", Sm80Fwd { q_in_regs: true, ..base.clone() });
    change("two blocks per SM", Sm80Fwd { blocks_per_sm: 2, ..base.clone() });
    change("no swizzle", Sm80Fwd { swizzle: false, ..base.clone() });
    change("plain loads", Sm80Fwd { ldmatrix: false, ..base.clone() });
    change("naive", Sm80Fwd { swizzle: false, ldmatrix: false, stages: 1, ..base.clone() });
    change("exp", Sm80Fwd { exp2: false, ..base.clone() });
    change("exact arithmetic", Sm80Fwd { exp2: false, fast_math: false, ..base.clone() });
    change("exact division", Sm80Fwd { exact_div: true, ..base.clone() });
    change("one loop", Sm80Fwd { loop_split: false, ..base.clone() });
    change("natural order", Sm80Fwd { reverse_blocks: false, ..base.clone() });
    for (tile_m, num_warps, tile_n, stages) in [(16, 4, 128, 3), (32, 2, 32, 2), (16, 8, 128, 4)] {
        let divided = Sm80Fwd { tile_m, num_warps, tile_n, stages, divide_keys: true, ..base.clone() };
        change(&format!("keys divided by {num_warps} warps, tile_m {tile_m}"), divided);
    }
    changed
        .into_iter()
        .map(|(name, kernel)| NamedSpec { name, spec: spec(128, MaskKind::Causal, Kernel::Sm80Fwd(kernel)) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_valid_and_most_fit() {
        for (family, arch, all) in [(Family::Sm80, Arch::Sm80, sm80()), (Family::Sm90, Arch::Sm90, sm90())] {
            for named in &all {
                named.spec.check().unwrap_or_else(|error| panic!("{}: {error}", named.name));
            }
            let fit = all.iter().filter(|named| account(&named.spec, arch).is_ok()).count();
            assert!(fit * 10 >= all.len() * 8, "{fit} of {}", all.len());
            let served = serving(&all);
            assert!(served.len() >= 15, "{family}: {}", served.len());
            let names: std::collections::HashSet<_> = served.iter().map(|named| &named.name).collect();
            assert_eq!(names.len(), served.len());
        }
    }
}
