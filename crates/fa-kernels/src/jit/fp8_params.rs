//! The descales of e4m3 tensors, which follow the parameters of a launch and of its program.

use crate::jit::declare::{ConstF32Ptr, DeviceType, ParamField, ParamStruct, param_struct};

param_struct! {
    /// What a tensor is multiplied by, for each K/V head.
    pub struct HeadDescale {
        /// Of the heads of the first sequence; null where every descale is 1.
        pub data: ConstF32Ptr,
        /// Between sequences; 0 where all have the same.
        pub stride: i64,
    }
}

param_struct! {
    /// The descales of a forward of e4m3 tensors.
    pub struct Fp8Params {
        /// Of Q.
        pub q: HeadDescale,
        /// Of K.
        pub k: HeadDescale,
        /// Of V.
        pub v: HeadDescale,
    }
}

/// The structs in the order in which `fp8_params.cuh` declares them.
pub(crate) fn declarations() -> Vec<ParamStruct> {
    vec![HeadDescale::declaration(), Fp8Params::declaration()]
}
