//! Attention on the CPU.
//!
//! - [`tiled`]: online softmax over tiles, all cores, SIMD chosen at run time; the default where there is no
//!   GPU.
//! - [`reference`](mod@reference): the formula in f64, written to be read; the oracle for everything else.
//! - [`compare`]: how far an output is from the oracle, and whether that is within tolerance.
//! - [`grid`]: the shapes, head dims and heads of test problems.
//! - [`mod@append`]: new keys and values for a cache, with rotary embedding.
//! - [`threads`]: how many are useful.
//! - [`softmax`], [`merge`]: the online softmax of one row; results over parts of the keys combined into one.
//!
//! Sequences of different lengths, keys in pages, ALiBi slopes and sinks come with a call's [`Extras`];
//! [`batch`] says where the rows of each sequence lie.
//!
//! All of them take a [`fa_core::Problem`] and strided [`TensorRef`]s of f32, f16 or bf16. K and V may be
//! codes ([`KvRef`]), which the forward decodes tile by tile, and beside them Q.
//!
//! ```
//! use fa_core::{Dtype, Mask, Problem, TensorLayout};
//! use fa_cpu::{TensorMut, TensorRef, compare, reference, tiled};
//!
//! // Batch 1, 100 queries and keys, 2 heads of 64, causal: [batch, seqlen, heads, head_dim].
//! let problem = Problem::square(1, 100, 2, 64, Mask::CAUSAL, Dtype::F32);
//! let shape = [1, 100, 2, 64];
//! let x: Vec<f32> = (0..100 * 2 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
//! let q = TensorRef::packed("q", &x, shape, TensorLayout::Bshd)?;
//! let (k, v) = (q, q);
//!
//! let mut out = vec![0.0f32; x.len()];
//! let mut lse = vec![0.0f32; 2 * 100]; // [batch, heads, seqlen_q]
//! tiled::forward(
//!     &problem, &q, &k, &v,
//!     &mut TensorMut::packed("out", &mut out, shape, TensorLayout::Bshd)?,
//!     Some(&mut lse),
//! )?;
//!
//! let exact = reference::forward(&problem, &q, &k, &v)?;
//! let verdict = compare::compare::<f32, f32>(shape, Dtype::F32, &out, &exact.out, None)?;
//! assert!(verdict.passed(), "{verdict}");
//! # Ok::<(), fa_cpu::CpuError>(())
//! ```

pub mod append;
pub mod batch;
pub mod check;
mod codes;
#[cfg(feature = "reference")]
pub mod compare;
pub mod element;
pub mod error;
pub mod extras;
mod fp8;
pub mod grid;
mod keys;
mod kv_ref;
pub mod merge;
pub mod peak;
pub mod real;
#[cfg(feature = "reference")]
pub mod reference;
/// What is left without the feature: the formula in f32, for gradients beside biases of -1e9.
#[cfg(not(feature = "reference"))]
#[allow(dead_code, unreachable_pub)]
mod reference;
pub mod simd;
pub mod softmax;
pub mod threads;
pub mod tiled;
pub mod view;

pub use append::{AppendExtras, AppendTensors, Table};
pub use element::Element;
pub use error::CpuError;
pub use extras::{Arguments, Extras, OwnedExtras, Within};
pub use kv_ref::{KvRef, bits_of};
pub use real::Real;
pub use view::{TensorMut, TensorRef};
