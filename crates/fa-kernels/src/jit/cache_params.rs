//! The parameters of an 8-bit cache, which follow all others of a forward.

use crate::jit::declare::{ConstF32Ptr, DeviceType, ParamField, ParamStruct, param_struct};

param_struct! {
    /// What the codes of K, or of V, are multiplied by. Without both pointers that is 1.
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
    /// The descales of an 8-bit cache.
    pub struct CacheParams {
        /// Of K.
        pub k: CodeDescales,
        /// Of V.
        pub v: CodeDescales,
    }
}

/// The structs in the order in which `cache_params.cuh` declares them.
pub(crate) fn declarations() -> Vec<ParamStruct> {
    vec![CodeDescales::declaration(), CacheParams::declaration()]
}
