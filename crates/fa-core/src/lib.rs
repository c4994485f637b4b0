//! The nouns of the workspace: what is to be computed ([`Problem`], [`Mask`], [`Dtype`]), on what ([`Arch`]),
//! where elements lie ([`TensorLayout`], [`layout`], [`swizzle`]) and by which kernel ([`KernelSpec`]).
//!
//! Plain data without I/O and without CUDA. Conventions that hold everywhere:
//!
//! - tensors are named by the order of their axes, `BSHD` or `BHSD`; the head dim is contiguous;
//! - masks are bottom-right aligned: query `i` sits on key `i + seqlen_k - seqlen_q`;
//! - LSE is the natural logarithm of the sum of exponentials, f32, `[batch, heads_q, seqlen_q]`;
//! - a row that sees no key gives `O = 0` and `LSE = -inf`.

pub mod arch;
pub mod dtype;
pub mod family;
pub mod layout;
pub mod lengths;
pub mod mask;
pub mod pass;
pub mod problem;
pub mod score_mod;
pub mod spec;
pub mod swizzle;
pub mod tensor;

pub use arch::{Arch, ArchLimits};
pub use dtype::{Dtype, Types};
pub use family::Family;
pub use layout::Layout;
pub use lengths::Lengths;
pub use mask::{BlockRange, Mask};
pub use pass::Pass;
pub use problem::{Problem, ProblemError};
pub use score_mod::{ScoreKind, ScoreMod};
pub use spec::{
    Kernel, KernelSpec, MaskKind, Mismatch, ShippedSpec, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, SpecError,
    Traits,
};
pub use swizzle::{Swizzle, SwizzleMode};
pub use tensor::{Strides, TensorLayout};
