//! The parameters of 8-bit tensors, which follow all others of a forward.

use crate::jit::declare::{ConstF32Ptr, DeviceType, ParamField, ParamStruct, param_struct};

param_struct! {
    /// What the codes of a tensor are multiplied by. Without both pointers that is 1.
    pub struct CodeDescales {
        /// `[heads_kv]` or `[batch, heads_kv]`; null for none, and where each row has its own.
        pub of_head: ConstF32Ptr,
        /// `[rows, heads_kv]`, in the layout of the cache; null unless each row has its own.
        pub of_rows: ConstF32Ptr,
        /// Distance between the descales of two sequences; 0 for descales per head.
        pub sequence_stride: i64,
    }
}

param_struct! {
    /// The descales of 8-bit tensors.
    pub struct CacheParams {
        /// Of K.
        pub k: CodeDescales,
        /// Of V.
        pub v: CodeDescales,
        /// Of an e4m3 Q, by its K/V head.
        pub q: CodeDescales,
    }
}

/// The structs in the order in which `cache_params.cuh` declares them.
pub(crate) fn declarations() -> Vec<ParamStruct> {
    vec![CodeDescales::declaration(), CacheParams::declaration()]
}
