//! Backwards whose keys fit one tile: dQ's sums are stored, without zeros to add to.

use fa_core::{Arch, KernelSpec, Lengths, Mask, Problem};
use fa_emu::{Options, Placing, Trial};
use fa_kernels::Headers;

use crate::emulator;

fn spec(mask: &str, deterministic: bool) -> KernelSpec {
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: false, kernel: Sm90Bwd((\
         tile_m: 64, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, \
         atom_layout_n_dkv: 2, atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: true, \
         dq_slices: 1, tile_order: Natural, deterministic: {deterministic})))"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn sums_of_dq_are_stored_where_one_tile_holds_all_keys() {
    let Some(emulator) = emulator("sums_of_dq_are_stored_where_one_tile_holds_all_keys") else {
        return;
    };
    // Keys of one tile, whole and not, those of two, and a mask that hides some queries from all keys.
    let cases = [(77, Mask::FULL), (128, Mask::FULL), (129, Mask::FULL), (77, Mask::CAUSAL)];
    for (keys, mask) in cases {
        for deterministic in [false, true] {
            let spec = spec(if mask.is_full() { "full" } else { "causal" }, deterministic);
            let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
            for heads_kv in [1, 3] {
                let problem = Problem {
                    lengths: Lengths::uniform(2, 150, keys),
                    heads_kv,
                    ..Problem::square(1, 1, 3, 64, mask, spec.types.qkv)
                };
                let trial = Trial::new(&problem, spec.kernel.pass(), Placing::PACKED);
                for seed in 0..2 {
                    let options = Options { sms: 8, resident: 2, ..Options::seed(seed) };
                    let proof = trial.run(&unit, &options).unwrap();
                    assert!(proof.passed(), "{spec} {problem:?}:\n{}", proof.faults().join("\n"));
                    // What is added: dK and dV of parts, and dQ.
                    let adds = proof.outcome.counters().red_bytes > 0;
                    let parts = heads_kv == 1;
                    assert_eq!(adds, parts || keys > 128 || !mask.is_full(), "{spec} {problem:?}");
                }
            }
        }
    }
}
