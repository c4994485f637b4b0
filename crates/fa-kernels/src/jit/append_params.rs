//! The parameters of the append kernel (`cuda/append/append.cuh`).

use crate::jit::declare::{
    ConstF32Ptr, ConstI32Ptr, ConstPtr, DeviceType, MutF32Ptr, MutI32Ptr, MutU32Ptr, ParamField, ParamStruct,
    param_struct,
};
use crate::jit::params::{ConstTensor, MutTensor};

param_struct! {
    /// The arguments of the append kernel. Pointers are null for what a call does not have.
    pub struct AppendParams {
        /// New keys, `[batch, rows_new, heads_kv, head_dim]`, or packed `[rows_new, ...]`.
        pub k_new: ConstTensor,
        /// New values, `[.., heads_kv, head_dim_v]`.
        pub v_new: ConstTensor,
        /// The cache of keys, `[batch, capacity, heads_kv, head_dim]` or `[pages, page, heads_kv, head_dim]`.
        pub k_cache: MutTensor,
        /// The cache of values.
        pub v_cache: MutTensor,
        /// Queries, `[batch, rows_q, heads_q, head_dim]`, or packed `[rows_q, ...]`.
        pub q: ConstTensor,
        /// Where rotated queries go; may be `q`.
        pub q_out: MutTensor,
        /// Cosines, `[positions, rotary_dim / 2]`.
        pub cos: ConstPtr,
        /// Sines, as cosines.
        pub sin: ConstPtr,
        /// `[batch + 1]`: the first new key of each sequence.
        pub cu_new: ConstI32Ptr,
        /// `[batch]`: new keys in use.
        pub used_new: ConstI32Ptr,
        /// `[batch]`: keys in the cache before.
        pub used_k: ConstI32Ptr,
        /// `[batch, table_stride]`: the pages of each sequence.
        pub page_table: ConstI32Ptr,
        /// `[batch + 1]`: the first query of each sequence.
        pub cu_q: ConstI32Ptr,
        /// `[batch]`: queries in use.
        pub used_q: ConstI32Ptr,
        /// `[batch]`: keys in the cache afterwards.
        pub used_out: MutI32Ptr,
        /// Counts rows that are skipped for want of a slot.
        pub dropped: MutU32Ptr,
        /// Sequences.
        pub batch: i32,
        /// Query heads.
        pub heads_q: i32,
        /// Heads of K and V.
        pub heads_kv: i32,
        /// Elements of a key or query.
        pub head_dim: i32,
        /// Elements of a value.
        pub head_dim_v: i32,
        /// New keys of each sequence, or of all where they are packed.
        pub rows_new: i32,
        /// Queries of each sequence, or of all where they are packed.
        pub rows_q: i32,
        /// Most keys that a sequence can have in the cache.
        pub capacity: i32,
        /// Keys of a page.
        pub page: i32,
        /// Pages of the cache.
        pub pages: i32,
        /// Entries of a row of the page table.
        pub table_stride: i32,
        /// Elements of a row that are rotated; 0 for none.
        pub rotary_dim: i32,
        /// Rows of the tables.
        pub positions: i32,
        /// Elements of a query that are written: the rotated ones where `q_out` is `q`, else all.
        pub q_columns: i32,
        /// Whether neighbours are rotated together, not halves.
        pub interleaved: i32,
        /// Whether the tables are f32, not in the tensors' type.
        pub table_f32: i32,
        /// Whether the tensors are f16, not bf16.
        pub is_f16: i32,
        /// Whether all queries of a sequence are at its first new position.
        pub q_fixed: i32,
        /// Rows per CTA.
        pub rows_per_cta: i32,
        /// CTAs that process new keys; those after them process queries.
        pub ctas_new: i32,
    }
}

param_struct! {
    /// The descales of K, or of V. Without both pointers they are 1.
    pub struct AppendDescales {
        /// `[heads_kv]` or `[batch, heads_kv]`, read; null for none, and where each row has its own.
        pub of_head: ConstF32Ptr,
        /// `[rows of the cache, heads_kv]`, written for new rows; null unless each row has its own.
        pub of_rows: MutF32Ptr,
        /// Distance between the descales of two sequences; 0 for descales per head.
        pub sequence_stride: i64,
    }
}

param_struct! {
    /// The codes of a cache, and their descales.
    pub struct AppendCodes {
        /// Descales of K.
        pub k: AppendDescales,
        /// Descales of V.
        pub v: AppendDescales,
        /// Rows of a sequence, or of a page, of the cache.
        pub block_rows: i32,
        /// Which codes of 8 bits: 0 e4m3, 1 int8, 2 e5m2.
        pub kind: i32,
    }
}

/// The arguments of the append kernel of caches of codes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct AppendCodesParams {
    /// Those of the other kernel; the caches are of codes.
    pub append: AppendParams,
    /// Which codes.
    pub codes: AppendCodes,
}

/// The structs in the order in which `append_codes_params.cuh` declares them.
pub(crate) fn codes_declarations() -> Vec<ParamStruct> {
    vec![AppendDescales::declaration(), AppendCodes::declaration()]
}
