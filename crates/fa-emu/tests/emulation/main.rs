//! The emulation, proven: kernels against the oracle, injected faults, and every shipped spec at awkward
//! shapes.
//!
//! They take minutes and are ignored: `cargo xtask ci` runs them where what they depend on has changed since
//! `fa prove --tier suite`, and `cargo test -p fa-emu --test emulation -- --ignored` at any time.

mod append;
mod codes;
mod deterministic;
mod drawn;
mod dropout;
mod faults;
mod fp8;
mod listed;
mod merge;
mod mods;
mod packed;
mod plan;
mod programs;
mod sample;
mod softcap;
mod stored_sums;
mod subjects;
mod values;
mod varied;
mod varied_faults;
mod varied_sm80;
mod whole_keys;
mod wide;
mod wide_programs;

use std::path::Path;
use std::sync::OnceLock;

use fa_core::{Family, KernelSpec, Problem};
use fa_emu::{Emulator, Options, Placement, Trial, Unit};

/// Of the faults of `faults.rs`, only those whose name contains this.
const ONLY: &str = "FA_EMU_ONLY";

/// The emulator of this test run.
fn emulator() -> &'static Emulator {
    static EMULATOR: OnceLock<Emulator> = OnceLock::new();
    EMULATOR.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        Emulator::at(&folder).unwrap_or_else(|error| panic!("{error}"))
    })
}

/// Checks a problem on two and on three SMs, one CTA each: a CTA that takes several tiles keeps its places in
/// the rings from one to the next.
fn check_on_few_sms(unit: &Unit, spec: &KernelSpec, problem: &Problem) {
    let trial = Trial::new(problem, spec.kernel.pass(), Placement::PACKED);
    for (seed, sms) in [(0, 2), (1, 3)] {
        let options = Options { sms, resident: sms, ..Options::seed(seed) };
        let proof = trial.run(unit, &options).unwrap();
        assert!(proof.passed(), "{spec} {problem:?}:\n{}", proof.faults().join("\n"));
    }
}

/// The families of [`backward`].
const BACKWARDS: [Family; 2] = [Family::Sm80, Family::Sm90];

/// A backward of head dim 64 with two buffers of everything, as RON.
fn backward(family: Family, tile_order: &str, deterministic: bool) -> String {
    match family {
        Family::Sm80 => format!(
            "Sm80Bwd((tile_m: 64, tile_n: 64, num_warps: 8, q_stages: 2, do_stages: 2, atom_layout_m_sdp: 2, \
             atom_layout_n_dkv: 2, atom_layout_m_dq: 2, dq_first: 32, blocks_per_sm: 1, \
             tile_order: {tile_order}, deterministic: {deterministic}))"
        ),
        Family::Sm90 => format!(
            "Sm90Bwd((tile_m: 64, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, \
             sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, \
             atom_layout_n_dkv: 2, atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: true, \
             dq_slices: 1, tile_order: {tile_order}, deterministic: {deterministic}))"
        ),
        Family::Sm100 => panic!("SM100 has no backward"),
    }
}
