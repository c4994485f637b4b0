//! candle-flash-attn's functions, with gradients, for GPU and CPU: no nvcc, kernels are compiled where they
//! run.
//!
//! A program changes the dependency in its Cargo.toml and `candle_flash_attn` to `fa_candle`:
//!
//! ```
//! use candle_core::{Device, Result, Tensor, Var};
//!
//! # fn main() -> Result<()> {
//! let device = Device::Cpu; // or Device::new_cuda(0)?, with the feature `cuda` and tensors of f16 or bf16
//! let shape = (1, 128, 4, 64); // (batch, seqlen, heads, head_dim)
//! let q = Var::randn(0f32, 1.0, shape, &device)?;
//! let k = Tensor::randn(0f32, 1.0, shape, &device)?;
//! let v = Tensor::randn(0f32, 1.0, shape, &device)?;
//! let out = fa_candle::flash_attn(&q, &k, &v, 0.125, true)?;
//! let gradients = out.sqr()?.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok(())
//! # }
//! ```
//!
//! [`attention`] takes what candle-flash-attn's functions do not: sinks (with their gradient), lengths in use
//! of a cache that fills up, slopes for each sequence, masks and biases of any broadcast shape, programs
//! ([`Program`]), deterministic gradients. [`attention_with_lse`] returns LSE too:
//!
//! ```
//! use candle_core::{Device, Result, Tensor};
//! use fa_candle::{Options, Rows, attention_with_lse};
//!
//! # fn main() -> Result<()> {
//! # let device = Device::Cpu;
//! // One query for each of 2 sequences; caches of 16 keys hold 9 and 5 of them.
//! let q = Tensor::randn(0f32, 1.0, (2, 1, 8, 64), &device)?;
//! let cache = Tensor::randn(0f32, 1.0, (2, 16, 2, 64), &device)?;
//! let used = Tensor::new(&[9u32, 5], &device)?;
//! let sinks = Tensor::zeros(8, candle_core::DType::F32, &device)?;
//! let rows = Rows::Padded { used_q: None, used_k: Some(&used) };
//! let options = Options::causal(0.125).with_sinks(Some(&sinks)).with_rows(rows);
//! let (out, lse) = attention_with_lse(&q, &cache, &cache, &options)?;
//! assert_eq!((out.dims(), lse.dims()), (&[2, 1, 8, 64][..], &[2, 8, 1][..]));
//! # Ok(())
//! # }
//! ```
//!
//! Tensors are read as they lie: any strides on the CPU; on a GPU rows are contiguous and the other strides
//! multiples of 8 elements. Outputs are allocated by candle, launches go to its stream, nothing is waited for
//! or read on the host. On a GPU head dims are multiples of 8 up to 256; the first call for a kernel compiles
//! it, in a second or so, or reads it from the cache on disk.
//!
//! - `functions`: candle-flash-attn's functions; [`v3`]: candle-flash-attn-v3's.
//! - `attention`, `options`: attention with the options that those functions lack.
//! - `program`: a text of the caller's own, with what it reads.
//! - `programs`: masks, biases and programs as one program with the tensors that it reads.
//! - `problem`: makes a checked problem of tensors and options.
//! - `op`: operations of candle's graph, with gradients.
//! - `cpu`, `cuda`: forward and backward on each device; `kernels`: a GPU's kernels and workspaces.

mod attention;
mod codes;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
mod direct;
mod error;
mod functions;
#[cfg(feature = "cuda")]
mod kernels;
mod op;
mod options;
mod problem;
mod program;
mod programs;
pub mod v3;

pub use attention::{attention, attention_with_lse};
pub use error::Error;
#[cfg(feature = "cuda")]
pub use fa_attn::{Tried, Tuning, TuningOutcome};
pub use fa_core::Dropout;
pub use fa_core::quantize::Codes;
pub use functions::*;
#[cfg(feature = "cuda")]
pub use kernels::{finish_tuning, set_tuning};
pub use options::{Options, Rows};
pub use program::Program;

/// The programs of the workspace's README, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
