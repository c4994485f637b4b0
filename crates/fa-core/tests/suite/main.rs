//! The laws of layouts, swizzles and programs.

mod layout_laws;
mod program_derivatives;
mod program_tiles;
mod programs;
mod swizzle_laws;

#[path = "../strategies/masks.rs"]
mod masks;
#[path = "../strategies/programs.rs"]
mod random;
#[path = "../strategies/program_values.rs"]
mod values;
