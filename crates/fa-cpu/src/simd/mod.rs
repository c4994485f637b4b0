//! Vector kernels, chosen at run time: with `tiled/gate.rs` the only files of
//! this crate with `unsafe` code.
//!
//! [`Isa`] names what a CPU can do, [`Kernels`] is the table of what runs on it.
#![allow(unsafe_code)]

pub(crate) mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512bf16;
pub mod bf16;
pub(crate) mod cast;
mod isa;
mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;
mod peak;
mod portable;
mod product;
mod row_kernels;
pub(crate) mod row_products;
pub(crate) mod row_set;
pub(crate) mod rows;
pub(crate) mod scatter;
mod softmax;
mod table;
mod tile;
mod transpose;
mod vector;
mod widest;

pub use isa::{Isa, ParseIsaError};
pub use kernels::{Bias, Kernels, Product};
pub use product::{Init, Order};
pub use tile::TileShape;
pub(crate) use vector::{EXP2, ROUND, TANH};
pub(crate) use widest::{Work, widest};

#[cfg(test)]
mod tests;
