//! Attention on the CPU.
//!
//! - `reference`: naive and in f64, made to be read; the oracle that everything else is checked against.
//! - `tiled`: online softmax over tiles, all cores, SIMD chosen at run time; the default where no GPU is.
//! - `compare`: how far an output is from the oracle, and whether that is near enough.
//! - `grid`: the shapes, head dims and heads that an implementation is to be tried on.
//! - `softmax`, `merge`: the online softmax of one row, and results over parts of the keys made into one.
//!
//! All of them take [`fa_core::Problem`] and strided [`TensorRef`]s.

pub mod check;
pub mod compare;
pub mod element;
pub mod error;
pub mod grid;
pub mod merge;
pub mod peak;
pub mod real;
pub mod reference;
pub mod simd;
pub mod softmax;
pub mod tiled;
pub mod view;

pub use element::Element;
pub use error::CpuError;
pub use real::Real;
pub use view::{TensorMut, TensorRef};
