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
