//! The program as its users run it: every test starts the real binary.

mod append;
mod bad_flags;
mod bad_input;
mod bench;
mod check;
mod check_mod;
mod codes;
mod common;
mod dist;
mod emulate;
mod files;
mod forms;
mod latent;
mod manual;
mod no_gpu;
#[cfg(target_os = "linux")]
mod no_threads;
mod packed;
mod page;
mod plan;
mod programs;
mod prove;
mod readme;
mod records;
mod run;
mod sources;
