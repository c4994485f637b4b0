//! Runs the CUDA attention kernels on the host, without a GPU.
//!
//! The kernels' own sources are compiled by the host's C++ compiler, unchanged except for `cuda/ptx`:
//! `host/ptx` implements each of its headers by calls into a machine (`machine/`). Threads are fibers, a
//! warp-wide instruction is a rendezvous of the warp's lanes, and asynchronous operations (TMA, cp.async,
//! wgmma) are executed by a seeded scheduler some time between their issue and the wait that needs them.
//! Vector clocks and a shadow of shared and global memory find unordered accesses, whatever the schedule was.
//!
//! ```no_run
//! use fa_core::{Arch, Dtype, KernelSpec, Mask, Problem};
//! use fa_emu::{Emulator, Options};
//!
//! let emulator = Emulator::new()?;
//! let spec = KernelSpec::from_ron(&std::fs::read_to_string("specs/sm90/hd64-causal-bf16.ron")?)?;
//! let unit = emulator.unit(&spec, Arch::Sm90, &fa_kernels::Headers::embedded())?;
//! let problem = Problem::square(1, 300, 2, 64, Mask::CAUSAL, Dtype::Bf16);
//! let values = vec![0x3f80; 300 * 2 * 64];
//! let outcome = unit.forward(&problem, [&values, &values, &values], &Options::seed(7))?;
//! for finding in &outcome.findings {
//!     println!("{finding}");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It cannot show speed, spills, the rounding within a tensor core, or what another reading of the PTX ISA's
//! memory model would allow.

pub mod append;
mod call;
mod case;
mod compiler;
pub mod dropout;
mod emulator;
mod error;
mod extras;
mod kernels;
mod machine;
mod memory;
pub mod merge;
pub mod mutate;
mod options;
mod outcome;
mod pass;
mod placement;
mod planned;
#[cfg(test)]
mod program;
mod proof;
pub mod prove;
pub mod random;
pub mod removals;
mod ron_file;
pub mod sample;
mod single;
pub mod steady;
pub mod subjects;
pub mod sweep;
mod symbols;
#[cfg(test)]
mod tensor_memory;
pub mod timeline;
mod unit;

pub use call::{Call, Given};
pub use case::Case;
pub use compiler::{CACHE_VARIABLE, COMPILER_VARIABLE, Compiler};
pub use emulator::{Emulator, source};
pub use error::Error;
pub use extras::{Batch, Lie, with_mods};
pub use machine::version;
pub use options::{Options, Pace, Progress};
pub use outcome::{Counters, Finding, Frame, LaunchOutcome, Outcome, Party, Span};
pub use placement::{Placement, Shared};
pub use planned::Planned;
pub use proof::{Proof, Trial};
pub use unit::Unit;
