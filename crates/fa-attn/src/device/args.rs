//! Arguments of launches on device memory that is not in a [`DeviceTensor`](super::DeviceTensor): borrowed
//! from cudarc, or addresses alone.

pub use fa_core::Extras as ExtrasOf;
pub use fa_kernels::{
    AppendArgs, AppendQueries, AppendTable, BackwardArgs, Element, Extras, ForwardArgs, Input, KvElement,
    MergeArgs, Output, PartialResult, RawAppendArgs, RawBackwardArgs, RawExtras, RawForwardArgs,
    RawMergeArgs, RawPartialResult, RawTensor,
};
