//! The emulation, proven: kernels against the oracle, injected faults, and every shipped spec at awkward
//! shapes.

mod append;
mod deterministic;
mod drawn;
mod faults;
mod known;
mod merge;
mod mods;
mod packed;
mod plan;
mod shipped;
mod softcap;
mod stored_sums;
mod subjects;
mod values;
mod varied;
mod varied_faults;
mod varied_sm80;

use std::path::Path;
use std::sync::OnceLock;

use fa_core::Family;
use fa_emu::{Emulator, Error};

/// The emulator of this test run; `None`, said by name, where there is no C++ compiler.
fn emulator(test: &str) -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    let found = EMULATOR.get_or_init(|| {
        match Emulator::at(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator")) {
            Ok(emulator) => Some(emulator),
            Err(error @ (Error::NoCompiler { .. } | Error::Host { .. })) => {
                eprintln!("{error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    });
    if found.is_none() {
        eprintln!("skipped: {test}: kernels cannot be emulated here");
    }
    found.as_ref()
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
