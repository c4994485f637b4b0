//! Backwards in which one tile of keys stores its sums of dQ, without zeros to add to: under full masks the
//! first, under causal ones the last that the queries see. The others add theirs once it has.

use fa_core::{Arch, KernelSpec, Lengths, Mask, Problem};
use fa_emu::{Options, Placement, Trial};
use fa_kernels::Headers;

use crate::emulator;

/// Bytes of dQ's sums of 64 queries at head dim 64.
const TILE: usize = 64 * 64 * 4;

fn spec(mask: &str, order: &str, deterministic: bool) -> KernelSpec {
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: false, kernel: Sm90Bwd((\
         tile_m: 64, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, \
         atom_layout_n_dkv: 2, atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: true, \
         dq_slices: 1, tile_order: {order}, deterministic: {deterministic})))"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
#[ignore = "emulation"]
fn the_first_keys_sums_of_dq_are_stored() {
    let emulator = emulator();
    // Keys of one tile, whole and not, those of two and three, and a mask that hides some queries from all
    // keys.
    let cases =
        [(77, Mask::FULL), (128, Mask::FULL), (129, Mask::FULL), (300, Mask::FULL), (77, Mask::CAUSAL)];
    for (keys, mask) in cases {
        for deterministic in [false, true] {
            let spec = spec(if mask.is_full() { "full" } else { "causal" }, "Natural", deterministic);
            let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
            for heads_kv in [1, 3] {
                let problem = Problem::square(1, 1, 3, 64, mask, spec.types.q)
                    .with_lengths(Lengths::uniform(2, 150, keys))
                    .with_heads_kv(heads_kv);
                let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
                for seed in 0..2 {
                    let options = Options { sms: 4, resident: 2, ..Options::seed(seed) };
                    let proof = trial.run(&unit, &options).unwrap();
                    assert!(proof.passed(), "{spec} {problem:?}:\n{}", proof.faults().join("\n"));
                    // What is added: dK and dV of parts, and dQ.
                    let adds = proof.outcome.counters().red_bytes > 0;
                    let parts = heads_kv == 1;
                    assert_eq!(adds, parts || keys > 128 || !mask.is_full(), "{spec} {problem:?}");
                    if mask.is_full() && heads_kv == 3 {
                        // All but the first tile of keys add to 3 tiles of 64 queries of 6 heads.
                        let added = (keys.div_ceil(128) - 1) * 18 * TILE;
                        assert_eq!(proof.outcome.counters().red_bytes, added as u64, "{spec} {problem:?}");
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "emulation"]
fn causal_sums_of_dq_are_stored_but_in_the_last_section_of_heads() {
    let emulator = emulator();
    for deterministic in [false, true] {
        let spec = spec("causal", "LongestFirst", deterministic);
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        // Two tiles of keys; as many queries, and more, of which the first see no key.
        for (queries, heads) in if deterministic { vec![(150, 24)] } else { vec![(150, 96), (190, 8)] } {
            let problem = Problem::square(1, 1, heads, 64, Mask::CAUSAL, spec.types.q)
                .with_lengths(Lengths::uniform(1, queries, 150));
            let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
            let options = Options { sms: 8, resident: 4, ..Options::seed(1) };
            let proof = trial.run(&unit, &options).unwrap();
            assert!(proof.passed(), "{spec} {problem:?}:\n{}", proof.faults().join("\n"));
            // Steps of a head: each adds a tile of dQ, but for the tiles of dQ that are stored.
            let steps = (steps_of_head(queries) * heads * TILE) as u64;
            let added = proof.outcome.counters().red_bytes;
            assert_eq!(added < steps, queries <= 150, "{spec} {problem:?}: {added} of {steps}");
        }
    }
}

/// Tiles of 64 queries that see the first and the second tile of 128 of 150 keys, the last query the last
/// key.
fn steps_of_head(queries: usize) -> usize {
    let hidden = queries.saturating_sub(150) / 64;
    let second = (queries + 128).saturating_sub(150) / 64;
    2 * queries.div_ceil(64) - hidden - second
}
