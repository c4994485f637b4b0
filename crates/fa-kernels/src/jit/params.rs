//! The parameters of a launch, declared once: these structs are the host's side, and `params.cuh`,
//! `fwd_params.cuh` and `bwd_params.cuh` are written from their field tables, with sizes and offsets asserted
//! there and here.

use crate::jit::declare::{DeviceType, ParamField, ParamStruct, param_struct};

pub use crate::jit::declare::{ConstF32Ptr, ConstI32Ptr, ConstPtr, MutF32Ptr, MutI32Ptr, MutPtr, MutU32Ptr};

param_struct! {
    /// Distances in elements between neighbours of a `[batch, seqlen, heads, head_dim]` tensor; the head dim
    /// is contiguous.
    pub struct RowStrides {
        /// Between batch entries.
        pub batch: i64,
        /// Between positions of the sequence.
        pub seq: i64,
        /// Between heads.
        pub head: i64,
    }
}

param_struct! {
    /// A tensor that a kernel reads: its element `[0, 0, 0, 0]` and its strides.
    pub struct ConstTensor {
        /// The first element, on a multiple of 16 bytes.
        pub data: ConstPtr,
        /// In elements.
        pub strides: RowStrides,
    }
}

param_struct! {
    /// A tensor that a kernel writes.
    pub struct MutTensor {
        /// The first element, on a multiple of 16 bytes.
        pub data: MutPtr,
        /// In elements.
        pub strides: RowStrides,
    }
}

param_struct! {
    /// The problem's lengths, counts and window.
    pub struct ShapeParams {
        /// Independent sequences.
        pub batch: i32,
        /// Query heads.
        pub heads_q: i32,
        /// Key and value heads.
        pub heads_kv: i32,
        /// Query heads per K/V head: `heads_q / heads_kv`.
        pub group_size: i32,
        /// Queries per sequence.
        pub seqlen_q: i32,
        /// Keys per sequence.
        pub seqlen_k: i32,
        /// Elements of a query or key: a multiple of 8 up to the config's `head_dim`.
        pub head_dim: i32,
        /// Elements of a value or output row: a multiple of 8 up to the config's `head_dim_v`.
        pub head_dim_v: i32,
        /// Visible keys left of the diagonal (key = query + seqlen_k - seqlen_q); -1 for all. Window kernels
        /// only.
        pub window_left: i32,
        /// Visible keys right of the diagonal; -1 for all. Window kernels only.
        pub window_right: i32,
    }
}

param_struct! {
    /// How products Q K^T become scores.
    pub struct ScoreParams {
        /// Factor on Q K^T.
        pub scale: f32,
        /// `scale * log2(e)`: from scores to exponents of 2.
        pub scale_log2: f32,
        /// `cap` of `cap * tanh(scale * s / cap)`; kernels with `softcap` only.
        pub softcap: f32,
        /// `2 * log2(e) * scale / softcap`: from products to the exponent of 2 in the cap's tanh.
        pub softcap_exponent: f32,
        /// `log2(e) * softcap`: from shares of the cap to exponents of 2.
        pub softcap_log2: f32,
        /// `ln(2) / softcap`: from exponents of 2 to shares of the cap.
        pub softcap_share: f32,
        /// The square of the product whose score is half the cap; -1 where the terms below don't fit f32.
        pub softcap_near: f32,
        /// Constant term of the polynomial in `softcap_near - product^2` by which a product below that bound
        /// is multiplied to give its capped score as an exponent of 2.
        pub softcap_term_0: f32,
        /// Its linear term.
        pub softcap_term_1: f32,
        /// Its quadratic term.
        pub softcap_term_2: f32,
        /// Its cubic term.
        pub softcap_term_3: f32,
    }
}

param_struct! {
    /// Strides of a tensor in units of its ragged map's last axis: see `attn/ragged.cuh`.
    pub struct TmaStrides {
        /// Between positions.
        pub row: u32,
        /// Between heads; between groups with `pack_gqa`.
        pub head: u32,
        /// Between batch entries, or pages; 0 for packed sequences.
        pub entry: u32,
    }
}

param_struct! {
    /// Starts and lengths of sequences, which only the device knows. A pointer is null where the problem has
    /// no such tensor: the lengths are then those of `ShapeParams`.
    pub struct VarlenParams {
        /// `[batch + 1]`: the sequences' first rows in packed Q.
        pub cu_q: ConstI32Ptr,
        /// `[batch + 1]`: the sequences' first rows in packed K and V.
        pub cu_k: ConstI32Ptr,
        /// `[batch]`: queries in use of each sequence.
        pub used_q: ConstI32Ptr,
        /// `[batch]`: keys in use of each sequence.
        pub used_k: ConstI32Ptr,
        /// `[batch, table_stride]`: the pages of each sequence's keys.
        pub page_table: ConstI32Ptr,
        /// Counts page table entries that are not a page of the cache; their keys read as zeros. May be null.
        pub page_faults: MutU32Ptr,
        /// Keys of a page.
        pub page: i32,
        /// Pages of the cache.
        pub pages: i32,
        /// Entries of a row of the page table.
        pub table_stride: i32,
        /// Keys of a page that one TMA box loads: the largest that divides both page and `tile_n`.
        pub page_part: i32,
        /// Index of a key's page in its sequence: the upper half of `2 key page_factor`, shifted right by
        /// `page_shift`.
        pub page_factor: u32,
        /// See `page_factor`.
        pub page_shift: i32,
        /// Rows of packed Q; 0 where sequences are padded.
        pub total_q: i32,
        /// Rows of packed K and V; 0 where sequences are padded or paged.
        pub total_k: i32,
        /// Strides of Q's map.
        pub tma_q: TmaStrides,
        /// Strides of K's map.
        pub tma_k: TmaStrides,
        /// Strides of V's map.
        pub tma_v: TmaStrides,
        /// Strides of dO's map; backward only.
        pub tma_do: TmaStrides,
    }
}

param_struct! {
    /// Tensors that change the scores. A pointer is null where the problem has no such tensor.
    pub struct ModParams {
        /// ALiBi slopes, `[heads_q]` or `[batch, heads_q]`.
        pub alibi_slopes: ConstF32Ptr,
        /// Distance between the slopes of two sequences; 0 for slopes per head.
        pub alibi_stride: i64,
        /// Sinks, `[heads_q]`: one more logit per head that joins the softmax denominator.
        pub sinks: ConstF32Ptr,
        /// Gradients of the sinks, `[heads_q]`; backward only.
        pub dsinks: MutF32Ptr,
    }
}

param_struct! {
    /// Split keys: the partial results, and the number of splits.
    pub struct SplitParams {
        /// Workspace `[slots, heads, slot_rows, head_dim_v]`: O of a part of the keys, normalised.
        pub out_partial: MutF32Ptr,
        /// Workspace `[slots, heads, slot_rows]`: LSE of a part of the keys without the sink, natural
        /// logarithm.
        pub lse_partial: MutF32Ptr,
        /// Partial results of every tile in the workspace: its splits, or the clusters of CTAs that share
        /// them; with a work plan an upper bound on the splits, since the plan decides.
        pub splits: i32,
        /// Rows per slot: the most that a tile can have.
        pub slot_rows: i32,
    }
}

param_struct! {
    /// The work plan of sequences of different lengths: header and lists of `attn/plan.cuh`, in one buffer.
    pub struct PlanParams {
        /// The buffer, on a multiple of 16 bytes; null without a plan.
        pub buffer: MutI32Ptr,
        /// Capacity of the list of tiles of queries with their parts of the keys, longest first.
        pub items: i32,
        /// Capacity of the list of tiles whose keys are split.
        pub split_items: i32,
        /// Capacity of the list of tiles of queries; 0 for no such list.
        pub m_tiles: i32,
        /// Capacity of the list of tiles of keys; 0 for no such list.
        pub n_tiles: i32,
        /// Tiles that an entry stands for: one per head.
        pub heads: i32,
        /// CTAs that are resident at once.
        pub slots: i32,
        /// Bits by which lengths in tiles are shifted right before they are sorted.
        pub shift: i32,
        /// Ints from the plan of a CTA to the next one's, where the CTAs of a forward, at most `slots`, plan
        /// for themselves; 0 where all read one plan.
        pub own_ints: i32,
    }
}

param_struct! {
    /// The arguments of every forward kernel.
    pub struct FwdParams {
        /// Q, `[batch, seqlen_q, heads_q, head_dim]`.
        pub q: ConstTensor,
        /// K, `[batch, seqlen_k, heads_kv, head_dim]`.
        pub k: ConstTensor,
        /// V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
        pub v: ConstTensor,
        /// O, `[batch, seqlen_q, heads_q, head_dim_v]`; written in full.
        pub out: MutTensor,
        /// LSE, `[batch, heads_q, seqlen_q]` packed, natural logarithm; null for none.
        pub lse: MutF32Ptr,
        /// The next tile to be drawn, 0 at launch; null unless the scheduler is dynamic.
        pub tile_counter: MutU32Ptr,
        /// Lengths and counts.
        pub shape: ShapeParams,
        /// From products to scores.
        pub score: ScoreParams,
        /// Tiles of `tile_queries` queries of a head (of a group's heads with `pack_gqa`), rounded up to
        /// `cluster_m`.
        pub m_blocks: i32,
        /// Queries of a tile: `tile_m`, or with `pack_gqa` as many as fit with all heads of a group.
        pub tile_queries: i32,
        /// Tiles in all: `m_blocks * heads * batch`, with `heads_kv` for heads under `pack_gqa`.
        pub num_tiles: i32,
        /// Heads, counted over all sequences, whose K and V fit in L2 together: the size of the sections of
        /// `LongestFirst`.
        pub heads_per_section: i32,
        /// Number of whole sections; the last section has the heads after them.
        pub sections: i32,
        /// Sequences of different lengths; kernels with `varied` only.
        pub varlen: VarlenParams,
        /// Kernels with `alibi` or `sinks` only.
        pub mods: ModParams,
        /// Kernels with `split` only.
        pub split: SplitParams,
        /// Kernels with `varied` only.
        pub plan: PlanParams,
    }
}

param_struct! {
    /// The arguments of every backward kernel.
    pub struct BwdParams {
        /// Q, `[batch, seqlen_q, heads_q, head_dim]`.
        pub q: ConstTensor,
        /// K, `[batch, seqlen_k, heads_kv, head_dim]`.
        pub k: ConstTensor,
        /// V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
        pub v: ConstTensor,
        /// O of the forward, `[batch, seqlen_q, heads_q, head_dim_v]`.
        pub out: ConstTensor,
        /// dO, the gradient of O, in its shape.
        pub dout: ConstTensor,
        /// dQ, in the shape of Q; written in full.
        pub dq: MutTensor,
        /// dK, in the shape of K; written in full.
        pub dk: MutTensor,
        /// dV, in the shape of V; written in full.
        pub dv: MutTensor,
        /// LSE of the forward, `[batch, heads_q, seqlen_q]` packed, natural logarithm.
        pub lse: ConstF32Ptr,
        /// Workspace `[batch, heads_q, m_blocks * tile_m]`: LSE in base 2; 0 for rows that saw no key, +inf
        /// beyond the end.
        pub lse_log2: MutF32Ptr,
        /// Workspace of the same shape: the rows' sums of O * dO less dLSE; 0 beyond the end.
        pub dpsum: MutF32Ptr,
        /// Workspace `[batch, heads_q, m_blocks, tile_m * head_dim]` with the config's head dim: dQ before
        /// its scale, each tile in the register order of the kernel that adds to it. Null where a tile has
        /// all keys.
        pub dq_accum: MutF32Ptr,
        /// Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim]`, as dq_accum; null unless head_splits >
        /// 1.
        pub dk_accum: MutF32Ptr,
        /// Workspace `[batch, heads_kv, n_blocks, tile_n * head_dim_v]`, as dk_accum.
        pub dv_accum: MutF32Ptr,
        /// Workspace `[batch, heads_q, m_blocks, turns]`: the additions made so far to each tile of dQ, or to
        /// each of the two parts that warps add independently. Where the first to arrive stores its sums: for
        /// each warpgroup's part how many have claimed it, and whether the sums are stored. Null unless the
        /// kernel is deterministic or, with several tiles of keys, first sums are stored.
        pub dq_semaphores: MutU32Ptr,
        /// Workspace: the next tile to be drawn; null unless the kernel is deterministic or persistent.
        pub tile_counter: MutU32Ptr,
        /// Lengths and counts.
        pub shape: ShapeParams,
        /// From products to scores.
        pub score: ScoreParams,
        /// Tiles of `tile_m` queries of a head.
        pub m_blocks: i32,
        /// Tiles of `tile_n` keys of a head.
        pub n_blocks: i32,
        /// Parts into which the query heads of a K/V head are divided, each a tile of its own: 1 to
        /// `group_size`.
        pub head_splits: i32,
        /// Tiles in all: `n_blocks * heads_kv * head_splits * batch`.
        pub num_tiles: i32,
        /// K/V heads (times `head_splits`), counted over all sequences, whose Q, dO and dQ fit in L2
        /// together: the size of the sections of `LongestFirst`.
        pub heads_per_section: i32,
        /// Number of whole sections; the last section has the heads after them.
        pub sections: i32,
        /// 1 where the first sums of a tile of dQ are stored and the others added to them (with equal lengths
        /// every query then sees a key); 0 where all are added to zeros.
        pub stores_dq: i32,
        /// Sequences of different lengths; kernels with `varied` only.
        pub varlen: VarlenParams,
        /// Kernels with `alibi` or `sinks` only.
        pub mods: ModParams,
        /// Kernels with `varied` only.
        pub plan: PlanParams,
        /// Workspace `[batch, heads_kv, n_blocks, 2]`: the head splits that have added to each tile of dV and
        /// of dK so far; null unless deterministic with head_splits > 1.
        pub dkv_semaphores: MutU32Ptr,
        /// The gradient of the LSE, in its shape; null for none.
        pub dlse: ConstF32Ptr,
    }
}

/// Sizes that the headers assert as well: a change here is a change of every kernel.
const _: () = assert!(size_of::<RowStrides>() == 24 && size_of::<FwdParams>() == 472);
const _: () = assert!(size_of::<BwdParams>() == 648);
const _: () = assert!(size_of::<VarlenParams>() == 128 && size_of::<PlanParams>() == 40);
const _: () = assert!(size_of::<ShapeParams>() == 40 && size_of::<ScoreParams>() == 44);

/// The structs that launch parameters are made of, in the order in which `params.cuh` declares it.
pub(crate) fn declarations() -> Vec<ParamStruct> {
    vec![
        RowStrides::declaration(),
        ConstTensor::declaration(),
        MutTensor::declaration(),
        ShapeParams::declaration(),
        ScoreParams::declaration(),
        TmaStrides::declaration(),
        VarlenParams::declaration(),
        ModParams::declaration(),
        SplitParams::declaration(),
        PlanParams::declaration(),
    ]
}
