//! Why specs are invalid, and why a kernel does not compute a problem.

use serde::Serialize;

use crate::{Arch, Dtype};

/// Why a [`super::KernelSpec`] is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A number is outside its range or not a multiple of what it must be.
    #[error("{field} = {value}: must be {need}")]
    BadValue {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// What it must be.
        need: String,
    },
    /// The kernel does not compute in this type.
    #[error("dtype {dtype} is not supported by {kernel}: use {need}")]
    Dtype {
        /// The type.
        dtype: Dtype,
        /// The kernel.
        kernel: &'static str,
        /// Types that are.
        need: &'static str,
    },
    /// The kernel does not read K and V of this type.
    #[error(
        "kv_dtype {dtype} is not supported by {kernel}: dequantise K and V into Q's type, or use the CPU \
         backend"
    )]
    KvDtype {
        /// The type of K and V.
        dtype: Dtype,
        /// The kernel.
        kernel: &'static str,
    },
    /// Two options exclude each other.
    #[error("{0}")]
    Conflict(String),
    /// The kernel does not run on this architecture.
    #[error("{kernel} does not run on {arch}: it needs {need}")]
    Arch {
        /// The kernel.
        kernel: &'static str,
        /// The architecture.
        arch: Arch,
        /// What its family needs.
        need: &'static str,
    },
    /// The text is not RON, or has unknown or missing fields.
    #[error("not a kernel spec: {0}")]
    Ron(String),
}

/// Why a kernel does not compute a problem: the first thing in which they differ, or that a launch cannot
/// hold.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unserved {
    /// The kernel is compiled for other problems.
    #[error(transparent)]
    Differs(#[from] Mismatch),
    /// Pages that the kernel cannot load.
    #[error(
        "pages of {page} keys: TMA loads tiles of {tile_n} keys at head dim {head_dim} in boxes of a \
         multiple of {multiple} keys; use pages of a multiple of {multiple}, a kernel with gather = true \
         (where K and V have panels of equal width), or one of the sm80 family"
    )]
    Page {
        /// Keys of a page.
        page: usize,
        /// Keys of the kernel's tiles.
        tile_n: u32,
        /// The kernel's head dim.
        head_dim: u32,
        /// What parts of a page are multiples of.
        multiple: usize,
    },
    /// A length or a count exceeds the kernels' 32-bit counters.
    #[error("{name} = {value} is above {limit}: split the problem")]
    TooLong {
        /// What is counted.
        name: &'static str,
        /// Its value; `usize::MAX` where it overflows.
        value: usize,
        /// The largest.
        limit: usize,
    },
    /// Something of a problem of codes that GPU kernels do not compute.
    #[error("{what} = {value} with K and V in {dtype}: GPU kernels need {need} (the CPU backend takes any)")]
    Codes {
        /// Type of K and V.
        dtype: Dtype,
        /// The field.
        what: &'static str,
        /// Its value.
        value: String,
        /// What works.
        need: &'static str,
    },
    /// The softmax scale is outside the GPU kernels' range.
    #[error("softmax_scale = {scale:?}: GPU kernels need a normal f32 above 0 (the CPU backend takes any)")]
    Scale {
        /// The scale.
        scale: f64,
    },
    /// The soft cap is outside the GPU kernels' range.
    #[error(
        "softcap = {softcap:?} with a softmax_scale of {scale:?}: GPU kernels take soft caps up to {limit}, \
         and scale / softcap a normal f32 (the CPU backend takes more; a cap far above the scores can be \
         left out)"
    )]
    Softcap {
        /// The soft cap.
        softcap: f64,
        /// The softmax scale.
        scale: f64,
        /// The largest soft cap.
        limit: f64,
    },
}

impl Unserved {
    /// What is not served, in a word, mostly a field's name.
    pub const fn what(&self) -> &'static str {
        match self {
            Unserved::Differs(Mismatch { what, .. }) => what,
            Unserved::Page { .. } => "pages",
            Unserved::TooLong { name, .. } => name,
            Unserved::Codes { what, .. } => what,
            Unserved::Scale { .. } => "softmax_scale",
            Unserved::Softcap { .. } => "softcap",
        }
    }
}

/// A kernel and a problem differ in a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize)]
#[error("{what}: the kernel computes {kernel}; the problem has {problem}")]
pub struct Mismatch {
    /// What differs, mostly a field.
    pub what: &'static str,
    /// What the kernel computes.
    pub kernel: String,
    /// What the problem asks for.
    pub problem: String,
}
