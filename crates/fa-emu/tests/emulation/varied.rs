//! The SM90 forward on lengths that the device knows, on pages, and with keys divided among CTAs: the batches
//! and shapes of the sweep, with all checks on.

use fa_core::{Arch, KernelSpec};
use fa_emu::sweep::{SEEDS, cases};
use fa_emu::{Options, Trial};
use fa_kernels::Headers;

use crate::emulator;

/// Two warpgroups that take turns, tiles drawn from a counter.
const PREFILL: &str = "tile_m: 128, tile_n: 128, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, \
                       kv_stages: 2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, \
                       cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: false";

/// Tiles of keys that some warpgroups skip, P through shared memory.
const NARROW: &str = "tile_m: 128, tile_n: 64, num_wg: 2, pv_is_rs: false, overlap_wg: false, q_stages: 2, \
                      kv_stages: 2, ping_pong: false, scheduler: PerTile, tile_order: LongestFirst, \
                      cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 0, pack_gqa: true";

/// One warpgroup, the heads of a group in its rows.
const DECODE: &str = "tile_m: 64, tile_n: 64, num_wg: 1, pv_is_rs: true, overlap_wg: true, q_stages: 1, \
                      kv_stages: 4, ping_pong: false, scheduler: Static, tile_order: Natural, cluster_m: 1, \
                      exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: true";

/// CTAs of one warpgroup, three of which share an SM and its registers.
const SHARING: &str = "tile_m: 64, tile_n: 64, num_wg: 1, pv_is_rs: true, overlap_wg: true, q_stages: 2, \
                       kv_stages: 2, ping_pong: false, scheduler: Dynamic, tile_order: LongestFirst, \
                       cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: false, \
                       blocks_per_sm: 3";

/// CTAs of two warpgroups, two of which share an SM.
const SHARING_IN_PAIRS: &str = "tile_m: 128, tile_n: 64, num_wg: 2, pv_is_rs: true, overlap_wg: true, \
                                q_stages: 2, kv_stages: 2, ping_pong: true, scheduler: Static, tile_order: \
                                Natural, cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: \
                                false, blocks_per_sm: 2";

/// Rows of pages copied by threads: three warpgroups, tiles drawn from a counter.
const GATHERED: &str = "tile_m: 192, tile_n: 80, num_wg: 3, pv_is_rs: true, overlap_wg: true, q_stages: 2, \
                        kv_stages: 2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, \
                        cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: false, gather: true";

/// The same with one buffer of each kind, and more rows of a tile than a warp has lanes for.
const GATHERED_IN_TURN: &str = "tile_m: 64, tile_n: 144, num_wg: 1, pv_is_rs: false, overlap_wg: false, \
                                q_stages: 1, kv_stages: 1, ping_pong: false, scheduler: Static, \
                                tile_order: Natural, cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 0, \
                                pack_gqa: true, gather: true";

/// All cases of a kernel on so many SMs, the first `count` of them under every seed, the others under one.
fn check(mask: &str, flags: &str, kernel: &str, runs: (u32, usize)) {
    check_of_dims((64, 64), mask, flags, kernel, runs);
}

/// The same of a kernel for these head dims.
fn check_of_dims(
    (head_dim, head_dim_v): (u32, u32),
    mask: &str,
    flags: &str,
    kernel: &str,
    (sms, count): (u32, usize),
) {
    let emulator = emulator();
    let text = format!(
        "(dtype: bf16, head_dim: {head_dim}, head_dim_v: {head_dim_v}, mask: {mask}, {flags}, kernel: \
         Sm90Fwd(({kernel})))"
    );
    let spec = KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let unit =
        emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap_or_else(|error| panic!("{error}"));
    let mut launched = Vec::new();
    for (number, case) in cases(&spec).iter().enumerate() {
        let trial = Trial::with(&case.problem, spec.kernel.pass(), case.placement, &case.extras);
        let seeds = if number < count { &SEEDS[..] } else { &SEEDS[2..] };
        for &seed in seeds {
            let proof = trial.run(&unit, &Options { sms, ..Options::seed(seed) }).unwrap();
            let faults = proof.faults();
            assert!(faults.is_empty(), "{:?}, seed {seed}:\n{}", case.problem, faults.join("\n"));
            launched.extend(proof.outcome.launches.iter().map(|launch| launch.entry.clone()));
        }
    }
    // Clusters, for equal lengths and no wide rows of O, combine without a kernel.
    let combines = spec.split && (spec.reads.varied || spec.head_dim_v > 128);
    // CTAs list so few tiles themselves.
    let plans = spec.reads.varied && !spec.plans_for_itself();
    for (entry, is_expected) in [("fa_plan", plans), ("fa_combine", combines)] {
        assert_eq!(launched.iter().any(|own| own == entry), is_expected, "{entry}");
    }
}

#[test]
#[ignore = "emulation"]
fn packed_sequences() {
    check("causal", "softcap: false, varied: true", PREFILL, (2, 1));
}

#[test]
#[ignore = "emulation"]
fn ctas_share_an_sm_and_its_registers() {
    check("causal", "softcap: false", SHARING, (1, 1));
    check("full", "softcap: false", SHARING_IN_PAIRS, (1, 1));
    check("causal", "softcap: false, varied: true", SHARING, (1, 1));
    check("causal", "softcap: false, varied: true, paged: true, alibi: true", SHARING, (1, 0));
}

#[test]
#[ignore = "emulation"]
fn packed_sequences_with_packed_heads_and_skipped_tiles() {
    check("causal", "softcap: false, varied: true, alibi: true, sinks: true", NARROW, (2, 0));
}

#[test]
#[ignore = "emulation"]
fn pages() {
    check("causal", "softcap: false, varied: true, paged: true", PREFILL, (2, 1));
}

/// K has one panel: the second of its warps, which are as many as V's, loads nothing.
#[test]
#[ignore = "emulation"]
fn pages_with_one_panel_of_k() {
    let flags = "softcap: false, varied: true, paged: true";
    check_of_dims((64, 128), "causal", flags, PREFILL, (2, 0));
}

#[test]
#[ignore = "emulation"]
fn pages_with_one_panel_of_v() {
    let flags = "softcap: false, varied: true, paged: true";
    check_of_dims((128, 64), "full", flags, PREFILL, (2, 0));
}

/// Rows of 80 columns end in half a panel.
#[test]
#[ignore = "emulation"]
fn half_panels_of_packed_sequences() {
    let flags = "softcap: false, varied: true";
    check_of_dims((80, 80), "causal", flags, PREFILL, (2, 0));
}

#[test]
#[ignore = "emulation"]
fn half_panels_of_pages() {
    let flags = "softcap: false, varied: true, paged: true";
    check_of_dims((80, 80), "full", flags, PREFILL, (2, 0));
}

#[test]
#[ignore = "emulation"]
fn half_panels_of_gathered_pages() {
    let flags = "softcap: false, varied: true, paged: true, split: true";
    check_of_dims((80, 80), "causal", flags, GATHERED_IN_TURN, (8, 0));
}

#[test]
#[ignore = "emulation"]
fn gathered_pages() {
    check("causal", "softcap: false, varied: true, paged: true", GATHERED, (2, 1));
}

#[test]
#[ignore = "emulation"]
fn gathered_pages_with_more_stages() {
    let kernel = GATHERED.replace("kv_stages: 2", "kv_stages: 3").replace("tile_n: 80", "tile_n: 64");
    check("full", "softcap: false, varied: true, paged: true", &kernel, (2, 0));
}

#[test]
#[ignore = "emulation"]
fn gathered_pages_one_stage_after_another() {
    check("window", "softcap: false, varied: true, paged: true, split: true", GATHERED_IN_TURN, (8, 0));
}

#[test]
#[ignore = "emulation"]
fn divided_keys_of_equal_lengths() {
    check_of_dims((64, 192), "full", "softcap: false, sinks: true, split: true", DECODE, (32, 0));
}

#[test]
#[ignore = "emulation"]
fn divided_keys_in_clusters() {
    check("full", "softcap: false, sinks: true, split: true", DECODE, (32, 1));
}

#[test]
#[ignore = "emulation"]
fn divided_keys_of_packed_sequences() {
    check("causal", "softcap: false, varied: true, sinks: true, split: true", DECODE, (8, 1));
}

#[test]
#[ignore = "emulation"]
fn divided_keys_in_pages_behind_a_window() {
    check("window", "softcap: true, varied: true, paged: true, split: true", DECODE, (8, 0));
}
