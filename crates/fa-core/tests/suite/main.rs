//! The laws of layouts, swizzles and programs.

mod layout_laws;
mod programs;
mod swizzle_laws;

#[path = "../strategies/programs.rs"]
mod random;
