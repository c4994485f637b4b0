//! The GPU kernels: from a kernel spec to a launch.
//!
//! ```no_run
//! use fa_core::{Dtype, LaunchPlan, Mask, Problem, ShippedSpec, TensorLayout};
//! use fa_kernels::{Extras, ForwardArgs, Input, Kernels, Output, driver};
//! use half::bf16;
//!
//! let context = driver::context(0)?;
//! let stream = context.default_stream();
//! let kernels = Kernels::new(&context)?;
//!
//! // Compiles (below a second and a half; milliseconds from the cache) and loads.
//! let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
//! let spec = ShippedSpec::from_ron(&std::fs::read_to_string("forward.ron")?)?.spec;
//! // A CTA for each tile; `fa_planner::divide` gives as many as take the least time.
//! let forward = kernels.forward(&problem, &LaunchPlan::whole(spec))?;
//!
//! let len = 2 * 4096 * 16 * 128;
//! let strides = TensorLayout::Bshd.strides(4096, 16, 128);
//! let zeros = || stream.alloc_zeros::<bf16>(len);
//! let (q, k, v) = (zeros()?, zeros()?, zeros()?);
//! let mut out = stream.alloc_zeros::<bf16>(len)?;
//! let mut lse = stream.alloc_zeros::<f32>(2 * 16 * 4096)?;
//! let mut workspace = stream.alloc_zeros::<u8>(forward.workspace_bytes().max(1))?;
//!
//! // Launches, and nothing else: no allocation, no synchronisation.
//! let args = ForwardArgs {
//!     q: Input { data: &q, strides },
//!     k: Input { data: &k, strides },
//!     v: Input { data: &v, strides },
//!     out: Output { data: &mut out, strides },
//!     lse: Some(&mut lse),
//!     workspace: Some(&mut workspace),
//!     extras: Extras::default(),
//! };
//! // SAFETY: nothing is packed, and the workspace is zero.
//! unsafe { forward.run(&stream, args) }?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Gradients from that output and LSE, in the same way:
//!
//! ```no_run
//! # use fa_core::{Dtype, LaunchPlan, Mask, Problem, ShippedSpec, TensorLayout};
//! # use fa_kernels::{BackwardArgs, Extras, Input, Kernels, Output, driver};
//! # use half::bf16;
//! # let context = driver::context(0)?;
//! # let stream = context.default_stream();
//! # let kernels = Kernels::new(&context)?;
//! # let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
//! # let len = 2 * 4096 * 16 * 128;
//! # let strides = TensorLayout::Bshd.strides(4096, 16, 128);
//! # let make = || stream.alloc_zeros::<bf16>(len);
//! # let (q, k, v, out, dout) = (make()?, make()?, make()?, make()?, make()?);
//! # let (mut dq, mut dk, mut dv) = (make()?, make()?, make()?);
//! # let lse = stream.alloc_zeros::<f32>(2 * 16 * 4096)?;
//! let spec = ShippedSpec::from_ron(&std::fs::read_to_string("backward.ron")?)?.spec;
//! let backward = kernels.backward(&problem, &LaunchPlan::whole(spec))?;
//! // Needs no initialisation; its size depends on the problem, the kernel and the GPU.
//! let mut workspace = stream.alloc_zeros::<u8>(backward.workspace_bytes().max(1))?;
//! let args = BackwardArgs {
//!     q: Input { data: &q, strides },
//!     k: Input { data: &k, strides },
//!     v: Input { data: &v, strides },
//!     out: Input { data: &out, strides },
//!     lse: &lse,
//!     dout: Input { data: &dout, strides },
//!     dq: Output { data: &mut dq, strides },
//!     dk: Output { data: &mut dk, strides },
//!     dv: Output { data: &mut dv, strides },
//!     workspace: &mut workspace,
//!     extras: Extras::default(),
//! };
//! // SAFETY: nothing is packed.
//! unsafe { backward.run(&stream, args) }?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The steps: a [`Source`] is written from a `KernelSpec`, a [`Compiler`] compiles it to a cubin, the
//! [`Cache`] keeps the cubin, a [`LoadedKernel`] is the cubin in a context, and a [`Forward`] or [`Backward`]
//! binds it to a problem. [`Kernels`] does all of it for a launch plan of the caller's choice; `fa-attn`
//! chooses the plan for a problem. Without a GPU the steps go as far as the cubin ([`ship`]); without a
//! compiler the kernels of a [`bundle`] run.
//!
//! What this crate does not know: how kernels are ranked (fa-planner), what a result should be (fa-cpu), and
//! any CUDA library but the driver and NVRTC, both loaded at run time.

pub mod atomic_file;
pub mod driver;
mod error;
mod jit;
mod kernels;
pub mod launch;
#[cfg(feature = "ron")]
pub mod specs;

pub use cudarc;
pub use error::Error;
pub use jit::codegen::{Generated, generated};
pub use jit::compile::{CompileFailure, Compiled, Compiler, CompilerKind};
pub use jit::cubin::entry_codes;
pub use jit::entries::{APPEND, APPEND_CODES, APPEND_INT4, DROPOUT, ENTRY, MERGE, append_entry};
pub use jit::headers::{HEADERS_VARIABLE, Headers};
pub use jit::program_params::MAX_ARRAYS;
pub use jit::report::{Fault, Report};
pub use jit::source::Source;
pub use jit::{bundle, cache, cache::Cache, params, program_params, ship, toolchain};
pub use kernels::Kernels;
pub use launch::append::{AppendLaunch, BoundAppend, RawAppendArgs};
pub use launch::append_call::{AppendArgs, AppendQueries, AppendTable};
pub use launch::args::{
    BackwardArgs, Element, ForwardArgs, Input, KvElement, Output, RawBackwardArgs, RawForwardArgs, RawTensor,
};
pub use launch::call::{Backward, BackwardPass, Bound, Forward, ForwardPass};
pub use launch::dropout::{BoundDropout, DropoutLaunch, RawKept};
pub use launch::extras::{Extras, RawExtras};
pub use launch::merge::{BoundMerge, MergeArgs, MergeLaunch, PartialResult, RawMergeArgs, RawPartialResult};
pub use launch::module::LoadedKernel;

/// Bytes of dynamic shared memory that a spec's kernel is launched with, by the planner's account.
pub fn smem_bytes(spec: &fa_core::KernelSpec) -> u32 {
    fa_planner::account::smem(spec).total
}
