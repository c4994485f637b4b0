//! The parameters of masks and changes of scores of the caller's own, which follow those of a launch.

use std::ops::{Deref, DerefMut};

use crate::jit::cache_params::CacheParams;
use crate::jit::declare::{ConstPtr, DeviceType, MutPtr, MutU32Ptr, ParamField, ParamStruct, param_struct};
use crate::jit::params::{BwdParams, FwdParams};

/// Arrays that the programs of a kernel may read together.
pub const MAX_ARRAYS: usize = fa_core::program::MAX_ARRAYS;

/// Arrays of the programs of most kernels. Those of more have parameters of their own, [`ManyArrays`].
pub const FEW_ARRAYS: usize = 8;

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
        /// Workspace `[batches, heads, rows, columns]`: states of tiles; backward only. Behind them the order
        /// of the tiles of keys (`attn/block_order.cuh`).
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
        /// Of each array, packed; null for none.
        pub to: [MutPtr; 8],
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

param_struct! {
    /// [`ArrayGradientParams`] of a program of more than [`FEW_ARRAYS`] arrays.
    pub struct ManyGradientParams {
        /// Of each array, packed; null for none.
        pub to: [MutPtr; 16],
    }
}

param_struct! {
    /// [`ProgramParams`] of a program of more than [`FEW_ARRAYS`] arrays.
    pub struct ManyProgramParams {
        /// In the order of the program's declarations.
        pub arrays: [ProgramArray; 16],
        /// The scalars, by their bits.
        pub scalars: [u32; 8],
        /// The mask's offset, which `off` counts in.
        pub offset: i32,
    }
}

param_struct! {
    /// What the gradients of arrays are stored by; backward only.
    pub struct StoredParams {
        /// dS in 16 bits, `[batch, heads_q, seqlen_q, pitch]`, whose sums are a gradient; null for none.
        pub room: ConstPtr,
        /// Elements of a row of it.
        pub pitch: i32,
        /// 1 where the main kernel stores dS: as a gradient, or in the room.
        pub is_stored: i32,
        /// A bit for each array whose gradient is of its own 16 bits, and not f32.
        pub narrow: u32,
    }
}

/// The parameters of a launch, with those of its program and of its pass behind them. Kernels without a
/// program read the first only, kernels of codes of 8 bits all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct WithPrograms<P, T, A = ProgramParams, G = ArrayGradientParams> {
    /// Of the launch.
    pub params: P,
    /// Of its program.
    pub program: A,
    /// Of the map of the program's mask.
    pub map: BlockMapParams,
    /// Of its arrays' gradients.
    pub gradients: G,
    /// Of its pass: of a forward those of 8-bit tensors, of a backward those of stored gradients.
    pub pass: T,
}

/// Those of a forward.
pub type ForwardParams = WithPrograms<FwdParams, CacheParams>;

/// Those of a backward.
pub type BackwardParams = WithPrograms<BwdParams, StoredParams>;

/// The same of a kernel whose program reads more than [`FEW_ARRAYS`] arrays.
pub type ManyArrays<P, T> = WithPrograms<P, T, ManyProgramParams, ManyGradientParams>;

impl<P, T, A, G> Deref for WithPrograms<P, T, A, G> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.params
    }
}

impl<P, T, A, G> DerefMut for WithPrograms<P, T, A, G> {
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
        StoredParams::declaration(),
    ]
}

/// The same for kernels whose programs read more than [`FEW_ARRAYS`] arrays.
pub(crate) fn declarations_of_many() -> Vec<ParamStruct> {
    let few = declarations();
    let many = [
        ProgramArray::declaration(),
        BlockMapParams::declaration(),
        ManyGradientParams::declaration(),
        ManyProgramParams::declaration(),
        StoredParams::declaration(),
    ];
    // By the names and with the comments that the kernels' sources have.
    let named =
        |(few, many): (ParamStruct, ParamStruct)| ParamStruct { name: few.name, doc: few.doc, ..many };
    few.into_iter().zip(many).map(named).collect()
}
