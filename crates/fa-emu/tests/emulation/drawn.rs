//! SM90 backwards whose CTAs draw tiles from a counter until there are none: with fewer SMs than tiles, so
//! that a CTA keeps its places in the rings from tile to tile, and with tiles of keys that no query sees.

use fa_core::{Arch, KernelSpec, Lengths, Mask, Problem};
use fa_emu::Options;
use fa_emu::sweep::{Trials, cases};
use fa_kernels::Headers;

use crate::{check_on_few_sms, emulator};

fn spec(head_dim: u32, mask: &str, switches: &str, varied: bool) -> KernelSpec {
    let order = if mask == "full" { "Natural" } else { "LongestFirst" };
    // 80 columns cannot be divided: of dQ the rows are.
    let (tile_m, do_stages, atoms) = if head_dim == 80 { (128, 1, 2) } else { (64, 2, 1) };
    let text = format!(
        "(dtype: bf16, head_dim: {head_dim}, head_dim_v: {head_dim}, mask: {mask}, softcap: false, \
         varied: {varied}, kernel: Sm90Bwd((tile_m: {tile_m}, tile_n: 128, num_wg: 2, q_stages: 2, \
         do_stages: {do_stages}, pds_stages: 2, sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, \
         atom_layout_m_sdp: 1, atom_layout_n_dkv: 2, atom_layout_m_dq: {atoms}, mma_dkv_is_rs: true, \
         dq_via_smem: true, dq_slices: 1, tile_order: {order}, {switches})))"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
#[ignore = "emulation"]
fn tiles_are_drawn_by_ctas_that_persist() {
    let emulator = emulator();
    let window = Mask::window(90, 0);
    for (head_dim, mask, switches) in [
        (64, Mask::FULL, "deterministic: false, persistent: true"),
        (64, Mask::CAUSAL, "deterministic: false, persistent: true"),
        (64, Mask::CAUSAL, "deterministic: true, persistent: true"),
        (64, window, "deterministic: false, persistent: true"),
        (80, Mask::CAUSAL, "deterministic: false, persistent: true"),
        (96, Mask::FULL, "deterministic: true, persistent: true"),
    ] {
        let name = if mask.is_full() {
            "full"
        } else if mask == Mask::CAUSAL {
            "causal"
        } else {
            "window"
        };
        let spec = spec(head_dim, name, switches, false);
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        // Fewer queries than keys; and more, so that the first see no key.
        for (queries, keys, heads_kv) in [(150, 290, 2), (290, 150, 1)] {
            let problem = Problem::square(1, 1, 2, head_dim as usize, mask, spec.types.q)
                .with_lengths(Lengths::uniform(2, queries, keys))
                .with_heads_kv(heads_kv);
            check_on_few_sms(&unit, &spec, &problem);
        }
    }
}

#[test]
#[ignore = "emulation"]
fn tiles_of_packed_sequences_are_drawn() {
    let emulator = emulator();
    let trials = Trials::default();
    for (mask, switches) in [
        ("causal", "deterministic: false, persistent: true"),
        ("full", "deterministic: true, persistent: true"),
    ] {
        let spec = spec(64, mask, switches, true);
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
        for case in cases(&spec).into_iter().take(2) {
            let trial = trials.get(&case, &spec);
            let proof = trial.run(&unit, &Options { sms: 3, resident: 3, ..Options::seed(1) }).unwrap();
            assert!(proof.passed(), "{spec} {:?}:\n{}", case.problem, proof.faults().join("\n"));
        }
    }
}
