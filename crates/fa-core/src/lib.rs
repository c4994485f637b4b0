//! The workspace's vocabulary: what is to be computed ([`Problem`], [`Mask`], [`Dtype`]), on what ([`Arch`]),
//! how tensors are laid out ([`TensorLayout`], [`layout`], [`swizzle`]) and by which kernel ([`KernelSpec`]).
//!
//! Plain data without I/O and without CUDA. Conventions that hold everywhere:
//!
//! - tensors are named by the order of their axes, `BSHD` or `BHSD`; the head dim is contiguous;
//! - masks are bottom-right aligned: query `i` sits on key `i + seqlen_k - seqlen_q`;
//! - LSE is the natural logarithm of the sum of exponentials, f32, `[batch, heads_q, seqlen_q]`, or
//!   `[heads_q, total_q]` where queries are packed; it includes the sink, where there is one;
//! - a row that sees no key gives `O = 0` and `LSE = -inf`, or the sink.
//!
//! ```
//! use fa_core::{Dtype, KernelSpec, Mask, Problem, ShippedSpec};
//!
//! // Batch 2, 4096 queries and keys, 16 heads of 128 on 2 K/V heads, causal, bf16.
//! let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(2);
//! problem.check()?;
//! assert_eq!(problem.lengths.total_q(), 8192);
//! // Bottom-right aligned: with 5 queries and 8 keys, query 2 sits on key 2 + 8 - 5.
//! assert_eq!(Mask::CAUSAL.keys(2, 5, 8), 0..6);
//!
//! // A kernel is plain data, RON on disk.
//! let spec: KernelSpec = ShippedSpec::from_ron(
//!     "(archs: [sm90], spec: (dtype: bf16, head_dim: 128, head_dim_v: 128, mask: causal, kernel: Sm80Fwd((
//!         tile_m: 128, tile_n: 64, num_warps: 4, stages: 2, q_in_regs: false, blocks_per_sm: 1,
//!         swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true,
//!         reverse_blocks: true,
//!     ))))",
//! )?.spec;
//! assert_eq!(spec.serves(&problem), Ok(()));
//! let full = problem.with_mask(Mask::FULL);
//! println!("{}", spec.serves(&full).unwrap_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod append;
pub mod arch;
pub mod board;
pub mod descales;
pub mod division;
pub mod dropout;
pub mod dtype;
pub mod extras;
pub mod family;
pub mod key;
pub mod latent_rows;
pub mod launch_plan;
pub mod layout;
pub mod lengths;
pub mod mask;
pub mod merge;
pub mod pass;
pub mod problem;
pub mod program;
pub mod quantize;
pub mod score_mod;
pub mod spec;
pub mod swizzle;
pub mod tensor;
mod with;
pub mod words;

pub use append::{Append, AppendError, CacheCodes, QueryPositions, Rotary, RotaryPairs, RotaryQueries};
pub use arch::{Arch, ArchLimits};
pub use board::Board;
pub use descales::{DescaleForm, Descales};
pub use division::Division;
pub use dropout::{Dropout, DropoutError, Kept};
pub use dtype::{Dtype, Types};
pub use extras::{Extra, Extras};
pub use family::Family;
pub use key::ProblemKey;
pub use launch_plan::LaunchPlan;
pub use layout::Layout;
pub use lengths::{Lengths, Side, SideRows};
pub use mask::{BlockRange, Mask};
pub use merge::{Merge, MergeError};
pub use pass::Pass;
pub use problem::{Problem, ProblemError};
pub use score_mod::{Alibi, ScoreKind, ScoreMod};
pub use spec::{
    Kernel, KernelSpec, MaskKind, Mismatch, PinnedSpec, Reads, ShippedSpec, Sm80Bwd, Sm80Fwd, Sm90Bwd,
    Sm90Fwd, Sm90FwdFp8, Sm90Wide, Sm100Fwd, SpecError, Traits, Unserved,
};
pub use swizzle::{Swizzle, SwizzleMode};
pub use tensor::{Strides, TensorLayout};
pub use words::counted;
