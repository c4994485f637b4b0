//! Soft caps of the SM90 forward: scores all small beside the cap, some not, and all beyond.

use fa_core::{Arch, KernelSpec, Mask, Problem, ScoreMod};
use fa_emu::{Options, Placement, Trial};
use fa_kernels::Headers;

use crate::emulator;

fn spec(dtype: &str, mask: &str, tiles: &str) -> KernelSpec {
    let text = format!(
        "(dtype: {dtype}, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: true, kernel: \
         Sm90Fwd(({tiles}, pv_is_rs: true, overlap_wg: true, q_stages: 1, kv_stages: 2, tile_order: \
         LongestFirst, cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: false)))"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
#[ignore = "emulation"]
fn soft_caps_are_right_for_scores_of_any_size() {
    let emulator = emulator();
    let kernels = [
        (
            "f16",
            "causal",
            Mask::CAUSAL,
            "tile_m: 128, tile_n: 64, num_wg: 2, ping_pong: true, scheduler: Dynamic",
        ),
        (
            "bf16",
            "window",
            Mask::window(90, 7),
            "tile_m: 64, tile_n: 96, num_wg: 1, ping_pong: false, scheduler: PerTile",
        ),
        (
            "f16",
            "full",
            Mask::FULL,
            "tile_m: 128, tile_n: 128, num_wg: 2, ping_pong: true, scheduler: Static",
        ),
    ];
    for (dtype, kind, mask, tiles) in kernels {
        let spec = spec(dtype, kind, tiles);
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        // Scores are some tenths to some units: all near, some not, hardly any, and terms that f32 doesn't
        // hold.
        for (cap, softmax_scale) in [(50.0, None), (5.0, None), (0.5, None), (50.0, Some(1e-7))] {
            let problem = Problem::square(1, 400, 2, 64, mask, spec.types.q)
                .with_score(ScoreMod::softcap(cap))
                .with_softmax_scale(softmax_scale)
                .with_heads_kv(1);
            let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
            let proof = trial.run(&unit, &Options::seed(1)).unwrap();
            assert!(proof.passed(), "{spec} {problem:?}:\n{}", proof.faults().join("\n"));
        }
    }
}
