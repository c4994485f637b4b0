//! Attention on this machine: the GPU where there is one, else the CPU.
//!
//! ```
//! use fa_attn::{Engine, Mask, Tensor};
//!
//! // Two sequences of 64 positions, 4 heads of 32: [batch, seqlen, heads, dim].
//! let shape = [2, 64, 4, 32];
//! let values = |seed: f32| (0..2 * 64 * 4 * 32).map(|i| (i as f32 * seed).sin()).collect::<Vec<f32>>();
//! let (q, k, v) = (
//!     Tensor::new(shape, values(0.1))?,
//!     Tensor::new(shape, values(0.2))?,
//!     Tensor::new(shape, values(0.3))?,
//! );
//! let engine = Engine::new()?;
//! let output = engine.attention(&q, &k, &v, Mask::CAUSAL)?;
//! // The first query sees the first key alone.
//! assert!((output.out.data[0] - v.data[0]).abs() < 1e-6);
//!
//! let gradients = engine.gradients([&q, &k, &v], Mask::CAUSAL, &output, &output.out)?;
//! assert_eq!(gradients.dq.shape, shape);
//! # Ok::<(), fa_attn::Error>(())
//! ```
//!
//! A problem that recurs is bound once and run any number of times:
//!
//! ```
//! use fa_attn::{Dtype, Engine, Extras, ForwardTensors, Mask, Output, Pass, Problem, Tensor, TensorLayout};
//!
//! let problem = Problem::square(1, 100, 2, 64, Mask::causal_window(32), Dtype::F32);
//! let engine = Engine::new()?;
//! let call = engine.bind(&problem, Pass::Forward)?;
//! println!("{} computes", call.report().text());
//!
//! let q = Tensor::filled([1, 100, 2, 64], TensorLayout::Bshd, 1.0f32);
//! let mut output = Output::new(&problem, TensorLayout::Bshd)?;
//! for _ in 0..3 {
//!     call.run(ForwardTensors {
//!         q: (&q.view("q")?).into(),
//!         k: (&q.view("k")?).into(),
//!         v: (&q.view("v")?).into(),
//!         out: output.out.view_mut("out")?,
//!         lse: &mut output.lse,
//!         extras: Extras::NONE,
//!         program: None,
//!     })?;
//! }
//! # Ok::<(), fa_attn::Error>(())
//! ```
//!
//! Sequences of different lengths are packed end to end, and [`Extras`] says where each starts. Lengths in
//! use, a paged cache, ALiBi slopes and sinks are passed in the same way:
//!
//! ```
//! use fa_attn::{Dtype, Engine, Extras, Lengths, Mask, Problem, Tensor, TensorLayout};
//!
//! // Sequences of 5, 0 and 7 positions: 12 rows, none longer than 7. Packed tensors have a batch of 1.
//! let square = Problem::square(1, 12, 4, 32, Mask::CAUSAL, Dtype::F32);
//! let problem = square.with_lengths(Lengths::packed(3, 12, 12, 7, 7));
//! let q = Tensor::filled([1, 12, 4, 32], TensorLayout::Bshd, 0.5f32);
//! let starts = [0, 5, 5, 12];
//! let extras = Extras { cu_seqlens_q: Some(&starts), cu_seqlens_k: Some(&starts), ..Extras::NONE };
//!
//! let engine = Engine::new()?;
//! let output = engine.forward(&problem, [&q, &q, &q], &extras)?;
//! // [heads, total]: the sixth row is the third sequence's first, which sees itself alone.
//! assert!((output.lse[5] - 0.25 * 32f32.sqrt()).abs() < 1e-5);
//! let gradients = engine.backward(&problem, [&q, &q, &q], &extras, &output, &output.out)?;
//! assert_eq!(gradients.dk.shape, [1, 12, 4, 32]);
//! # Ok::<(), fa_attn::Error>(())
//! ```
//!
//! A mask or a change of scores of the caller's own is a [`program`], and the arrays that it reads are given
//! to each call:
//!
//! ```
//! use fa_attn::program::{ArrayData, ArrayView, Inputs, Program};
//! use fa_attn::{Dtype, Engine, ForwardTensors, Mask, Output, Pass, Problem, ScoreMod, Tensor, TensorLayout};
//!
//! // Four tokens of two documents.
//! let own = Program::parse("array document: i32[_]; mask = document[q] == document[k];")?.intern()?;
//! let problem = Problem::square(1, 4, 2, 8, Mask::CAUSAL, Dtype::F32)
//!     .with_score(ScoreMod::NONE.with_program(Some(own)));
//! let documents = ArrayView::contiguous(ArrayData::I32(&[0, 0, 1, 1]), &[4]);
//! let inputs = Inputs::new(&own, vec![documents], vec![])?;
//!
//! let q = Tensor::filled([1, 4, 2, 8], TensorLayout::Bshd, 1.0f32);
//! let v = Tensor::new([1, 4, 2, 8], (0..64).map(|i| (i / 16) as f32).collect())?;
//! let mut output = Output::new(&problem, TensorLayout::Bshd)?;
//! let tensors = [q.view("q")?, q.view("k")?, v.view("v")?];
//! let (out, lse) = (output.out.view_mut("out")?, &mut output.lse[..]);
//! let call = Engine::new()?.bind(&problem, Pass::Forward)?;
//! call.run(ForwardTensors::new(tensors, out, lse).with_program(&inputs))?;
//! // The third token begins a document, the fourth sees both of its tokens.
//! assert!((output.out.data[2 * 16] - 2.0).abs() < 1e-6 && (output.out.data[3 * 16] - 2.5).abs() < 1e-6);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A backward takes them by [`BackwardTensors::with_program`], with a place for the gradients of the arrays
//! that are declared with `grad`.
//!
//! Results over different keys of the same queries are combined by [`merge`].
//!
//! A cache grows in place, with rotary embedding of keys and queries ([`Append`], [`Rotary`]):
//!
//! ```
//! use fa_attn::{Append, AppendExtras, AppendTensors, Dtype, Engine, Side, Tensor, TensorLayout, bf16};
//!
//! // One new token for each of 2 sequences, into a cache in 4 pages of 16 rows.
//! let append = Append {
//!     sequences: 2,
//!     new: Side::padded(1),
//!     cache: Side::paged(16, 4, 32),
//!     heads_kv: 2,
//!     head_dim: 64,
//!     head_dim_v: 64,
//!     dtype: Dtype::Bf16,
//!     codes: None,
//!     rotary: None,
//! };
//! let new = Tensor::filled(append.new_shape(64), TensorLayout::Bshd, bf16::ONE);
//! let mut k = Tensor::filled(append.cache_shape(64), TensorLayout::Bshd, bf16::ZERO);
//! let mut v = k.clone();
//! let (lengths, mut after) = ([17, 0], [0, 0]);
//! let mut extras = AppendExtras {
//!     seqused_k: Some(&lengths),
//!     page_table: Some(&[3, 1, 0, 2]),
//!     used_out: Some(&mut after),
//!     ..AppendExtras::default()
//! };
//! let left_out = Engine::new()?.append(&append, &mut extras, &mut AppendTensors {
//!     k_new: new.view("k_new")?,
//!     v_new: new.view("v_new")?,
//!     k_cache: k.view_mut("k_cache")?.into(),
//!     v_cache: v.view_mut("v_cache")?.into(),
//!     q: None,
//!     tables: None,
//! })?;
//! // Position 17 of the first sequence is row 1 of its second page.
//! assert_eq!((left_out, k.data[(16 + 1) * 2 * 64]), (0, bf16::ONE));
//! assert_eq!(after, [18, 1]);
//! # Ok::<(), fa_attn::Error>(())
//! ```
//!
//! For tensors that stay on the GPU see [`device`]: a [`device::Gpu`] binds a kernel, whose launches neither
//! allocate nor wait.
//!
//! - `engine`, `call`, `tensors`, `extras`: what the examples above use. A call runs on fa-cpu's tiles;
//!   `host` takes its tensors to the GPU and back, and `reference` computes it by the formula in f64.
//! - `merge`: combines partial results in host memory; [`device::Gpu::merge`] those in a GPU's memory.
//! - [`program`]: masks and changes of scores of the caller's own.
//! - [`Engine::append`]: appends keys and values to a cache in host memory, with rotary embedding;
//!   [`device::Gpu::append`] and [`device::DeviceAppend`] do so in a GPU's memory.
//! - `device`: a GPU, its tensors, launches and their time; `cuda`: the types of cudarc that it takes.
//! - `errors`: what an [`Error`] holds.
//! - `choose`, `clean`, `tune`: which kernel computes a problem; `tuning`: measures candidates in the
//!   background and keeps the winners.
//! - `atomic_file`: files that appear whole or not at all.
//!
//! What this crate does not know: how kernels are written (fa-kernels), accounted for and ranked
//! (fa-planner), and what a result should be (fa-cpu).

mod call;
mod choose;
mod clean;
mod cpu;
pub mod cuda;
pub mod device;
mod direct;
#[cfg(feature = "reference")]
pub mod doctor;
mod element;
mod engine;
mod error;
pub mod errors;
mod extras;
mod host;
pub mod machine;
mod merge;
#[cfg(feature = "reference")]
mod reference;
mod tensors;
pub mod tune;
mod tuning;

pub use call::{Call, Report};
pub use element::Element;
pub use engine::{Backend, CpuOptions, Engine, problem_of};
pub use error::Error;
pub use fa_core::{
    Alibi, Append, Arch, CacheCodes, DescaleForm, Descales, Division, Dropout, Dtype, Extra, Family,
    KernelSpec, LaunchPlan, Lengths, Mask, MaskKind, Merge, Pass, Problem, ProblemKey, QueryPositions,
    Rotary, RotaryPairs, RotaryQueries, ScoreMod, ShippedSpec, Side, SideRows, Strides, TensorLayout, Types,
};
pub use fa_core::{program, quantize};
#[doc(hidden)]
pub use fa_cpu::Element as CpuElement;
pub use fa_cpu::append::{CacheMut, append};
pub use fa_cpu::simd::Isa;
pub use fa_cpu::tiled::Plan as CpuPlan;
pub use fa_cpu::{AppendExtras, AppendTensors, Extras, OwnedExtras, Table, TensorMut, TensorRef};
pub use fa_cpu::{KvRef, bits_of};
pub use fa_kernels::atomic_file;
pub use half::{bf16, f16};
pub use merge::merge;
pub use tensors::{BackwardTensors, ForwardTensors, Gradients, Output, Tensor, Tensors};
pub use tuning::{TUNE_VARIABLE, Tried, Tuning, TuningOutcome};
