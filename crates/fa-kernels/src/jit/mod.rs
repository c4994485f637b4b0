//! From a spec to a cubin: the translation unit and its headers, the compiler, the cache, and the bundle of
//! kernels compiled ahead.

pub(crate) mod append_params;
pub(crate) mod array_gradients;
pub mod bundle;
pub mod cache;
pub(crate) mod cache_params;
mod code;
pub(crate) mod codegen;
pub(crate) mod compile;
pub(crate) mod config;
pub(crate) mod cubin;
pub(crate) mod declare;
pub(crate) mod dropout_params;
pub(crate) mod entries;
pub(crate) mod hash;
pub(crate) mod headers;
pub(crate) mod merge_params;
mod nvrtc;
pub mod params;
pub mod program_params;
pub(crate) mod report;
pub mod ship;
pub(crate) mod source;
pub mod toolchain;
mod trust;
