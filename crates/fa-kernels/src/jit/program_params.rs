//! The parameters of masks and changes of scores of the caller's own, which follow those of a launch.

use std::ops::{Deref, DerefMut};

use crate::jit::cache_params::CacheParams;
use crate::jit::declare::{
    ConstPtr, DeviceType, MutF32Ptr, MutU32Ptr, ParamField, ParamStruct, param_struct,
};

/// Arrays, and scalars, that the programs of a kernel may read together.
pub const MAX_ARRAYS: usize = 8;

param_struct! {
    /// An array that a program reads.
    pub struct ProgramArray {
        /// Its first element.
        pub data: ConstPtr,
        /// Between neighbours of each axis, in elements (in words for bits); 0 where all are the same.
        pub strides: [i64; 4],
        /// Elements of each axis: indices are clamped to them.
        pub extents: [i32; 4],
    }
}

param_struct! {
    /// The tiles that a mask's program leaves to be visited, which `attn/block_map.cuh` finds.
    pub struct BlockMapParams {
        /// Workspace. Forward `[batches, heads, rows, 1 + columns]`: the tiles of keys of each tile of
        /// queries, after their number. Backward `[batches, heads, columns, 1 + rows]`: the tiles of queries
        /// of each tile of keys.
        pub lists: MutU32Ptr,
        /// Workspace `[batches, heads, rows, columns]`: states of tiles; backward only.
        pub tiles: MutU32Ptr,
        /// Tiles of queries, at most.
        pub rows: i32,
        /// Tiles of keys, at most.
        pub columns: i32,
        /// Sequences, or 1 where all have the same tiles.
        pub batches: i32,
        /// Heads that have tiles of their own: all query heads, all K/V heads, or 1.
        pub heads: i32,
        /// Query heads that share the tiles of one of these.
        pub head_group: i32,
        /// Tiles of each list, at most, whose visible pairs are kept as bits behind the lists; 0 for none.
        pub kept: i32,
    }
}

param_struct! {
    /// The gradients of a program's arrays; backward only.
    pub struct ArrayGradientParams {
        /// Of each array, packed in f32; null for none.
        pub to: [MutF32Ptr; 8],
    }
}

param_struct! {
    /// The arrays and scalars of a kernel's program.
    pub struct ProgramParams {
        /// In the order of the program's declarations.
        pub arrays: [ProgramArray; 8],
        /// The scalars, by their bits.
        pub scalars: [u32; 8],
        /// The mask's offset, which `off` counts in.
        pub offset: i32,
    }
}

/// The parameters of a launch, with those of its program and of its cache behind them. Kernels without a
/// program read the first only, kernels of codes of 8 bits all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct WithPrograms<P> {
    /// Of the launch.
    pub params: P,
    /// Of its program.
    pub program: ProgramParams,
    /// Of the map of the program's mask.
    pub map: BlockMapParams,
    /// Of its arrays' gradients.
    pub gradients: ArrayGradientParams,
    /// Of 8-bit tensors; forward only.
    pub cache: CacheParams,
}

impl<P> Deref for WithPrograms<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.params
    }
}

impl<P> DerefMut for WithPrograms<P> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.params
    }
}

/// The structs in the order in which `program_params.cuh` declares them.
pub(crate) fn declarations() -> Vec<ParamStruct> {
    vec![
        ProgramArray::declaration(),
        BlockMapParams::declaration(),
        ArrayGradientParams::declaration(),
        ProgramParams::declaration(),
    ]
}
