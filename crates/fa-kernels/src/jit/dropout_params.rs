//! The parameters of the dropout kernel (`cuda/dropout/dropout.cuh`), in a header of their own.

use crate::jit::declare::{ConstPtr, DeviceType, MutU32Ptr, ParamField, ParamStruct, param_struct};

param_struct! {
    /// The arguments of the dropout kernel.
    pub struct DropoutParams {
        /// `[heads, queries, words]`; written in full.
        pub bits: MutU32Ptr,
        /// Seed, offset and threshold, 64 bits each, in place of those below; null for none.
        pub state: ConstPtr,
        /// The key of the generator, its lower half first.
        pub seed: [u32; 2],
        /// What the counters begin with, likewise.
        pub offset: [u32; 2],
        /// The largest byte that keeps.
        pub threshold: u32,
        /// Query heads of all sequences.
        pub heads: i32,
        /// Queries of a head.
        pub queries: i32,
        /// Words of a query, of 32 keys each.
        pub words: i32,
    }
}
