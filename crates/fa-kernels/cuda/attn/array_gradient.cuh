// The gradient of an array that a score program reads at the indices of the sequence, the head, the query and
// the key, or at some of them: dS times the score's derivative by the element, summed over what is not an
// index. A CTA owns 64 queries by 64 keys of the array, recomputes S and dP for each tile that reads them,
// and sums in registers, always in the same order: no atomics.
#pragma once
#include "attn/block_map.cuh"
#include "attn/block_range.cuh"
#include "attn/bwd_tile.cuh"
#include "attn/programs.cuh"
#include "attn/seqlen.cuh"
#include "attn/tensor_view.cuh"
#include "attn/visibility.cuh"
#include "bwd_params.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "sm80/bwd_layout.cuh"
#include "tile/copy_tile.cuh"
#include "tile/warp_product.cuh"

namespace fa {

enum class ArrayElement { F32, F16, Bf16 };

// An array's slot among the program's, the type of its elements, and its axes by what indexes them; -1 for
// none.
struct ArrayRules {
    int slot;
    ArrayElement element;
    int batch, head, kv_head, query, key;
};

constexpr int kArrayTile = 64, kArrayThreads = 256;

template <auto C>
struct ArrayGradientStorage {
    using Q = SmemTile<kArrayTile, C.head_dim, true>;
    using V = SmemTile<kArrayTile, C.head_dim_v, true>;
    alignas(128) u8 q[Q::kBytes];
    alignas(128) u8 k[Q::kBytes];
    alignas(128) u8 dout[V::kBytes];
    alignas(128) u8 v[V::kBytes];
    // Sums of a tile, where they are summed further.
    alignas(128) float sums[kArrayTile][kArrayTile];
};

template <auto C>
constexpr int array_gradient_smem_bytes = sizeof(ArrayGradientStorage<C>);

// The indices [begin, end) that share an element, of `count`: all of them unless they have elements of their
// own.
struct Shared {
    int begin, end;

    __device__ __forceinline__ static Shared of(bool own, int index, int count) {
        return own ? Shared{index, index + 1} : Shared{0, count};
    }
};

// Whether the program's mask hides every pair of a tile, by the states of the main kernel's tiles that it
// lies in.
template <auto C, class Params>
__device__ __forceinline__ bool hides_tile(const Params& params, int batch, int head, int first_query,
                                           int first_key) {
    const BlockMapParams& map = map_of(params);
    const int own_batch = map.batches == 1 ? 0 : batch, own_head = map.heads == 1 ? 0 : head / map.head_group;
    const u32* const states = map.tiles + (i64(own_batch) * map.heads + own_head) * map.rows * map.columns;
    const int last_row = min((first_query + kArrayTile - 1) / C.tile_m, map.rows - 1);
    const int last_column = min((first_key + kArrayTile - 1) / C.tile_n, map.columns - 1);
#pragma unroll 1
    for (int row = first_query / C.tile_m; row <= last_row; ++row) {
#pragma unroll 1
        for (int column = first_key / C.tile_n; column <= last_column; ++column) {
            if ((states[i64(row) * map.columns + column] & kTileSeen) != 0) return false;
        }
    }
    return true;
}

// Slope: the score's derivative by the element.
template <auto C, ArrayRules R, class Slope>
__device__ __forceinline__ void array_gradient(const BwdParams& params) {
    using Smem = ArrayGradientStorage<C>;
    using Q = typename Smem::Q;
    using V = typename Smem::V;
    using Cut = sm80::WarpCut<kArrayTile, kArrayTile, kArrayThreads / 32, 4>;
    const ProgramParams& programs = programs_of(params);
    const ProgramArray& array = programs.arrays[R.slot];
    void* const to = gradients_of(params).to[R.slot];
    if (to == nullptr) return;
    const bool is_narrow = (stored_of(params).narrow >> R.slot & 1) != 0;
    Smem& smem = shared_memory<Smem>();
    const ShapeParams& shape = params.shape;

    auto extent = [&](int axis) { return axis < 0 ? 1 : array.extents[axis < 0 ? 0 : axis]; };
    const bool by_batch = extent(R.batch) > 1, by_head = extent(R.head) > 1, by_kv = extent(R.kv_head) > 1;
    const bool by_query = extent(R.query) > 1, by_key = extent(R.key) > 1;
    const int m_tiles = ceil_div(shape.seqlen_q, kArrayTile), n_tiles = ceil_div(shape.seqlen_k, kArrayTile);
    const int own_m = by_query ? m_tiles : 1, own_n = by_key ? n_tiles : 1;
    const int own_heads = by_head ? shape.heads_q : by_kv ? shape.heads_kv : 1;
    int index = cta_index();
    const int n_index = index % own_n;
    index /= own_n;
    const int m_index = index % own_m;
    index /= own_m;
    const int head_index = index % own_heads, batch_index = index / own_heads;
    if (batch_index >= (by_batch ? shape.batch : 1)) return;

    const Shared batches = Shared::of(by_batch, batch_index, shape.batch);
    Shared heads = Shared::of(by_head, head_index, shape.heads_q);
    if (by_kv) heads = {head_index * shape.group_size, (head_index + 1) * shape.group_size};
    const Shared m_blocks = Shared::of(by_query, m_index, m_tiles);
    const Shared n_blocks = Shared::of(by_key, n_index, n_tiles);

    const int warp = thread_index() / 32, lane = lane_index();
    const int own_row = Cut::first_m(warp) + lane / 4, own_column = Cut::first_n(warp) + 2 * (lane % 4);
    typename Cut::Accumulators sums;
    Cut::clear(sums);
#pragma unroll 1
    for (int batch = batches.begin; batch < batches.end; ++batch) {
        const auto seqlen = Seqlen<C.varied>::of(params, batch);
        const Visibility<C.mask, C.varied> visible{shape, seqlen};
#pragma unroll 1
        for (int head = heads.begin; head < heads.end; ++head) {
            const int kv_head = head / shape.group_size;
            i64 first_stat = (i64(batch) * shape.heads_q + head) * params.m_blocks * C.tile_m;
            if constexpr (C.varied) {
                const auto at = WorkspacePlace::of_queries<C.tile_m>(params, seqlen, batch);
                first_stat = ((i64(at.entry) * shape.heads_q + head) * params.m_blocks + at.first) * C.tile_m;
            }
#pragma unroll 1
            for (int m_block = m_blocks.begin; m_block < m_blocks.end; ++m_block) {
                const int first_query = m_block * kArrayTile;
                if (first_query >= seqlen.q()) break;
                const BlockRange range = key_blocks<kArrayTile>(
                    visible, first_query, min(first_query + kArrayTile, seqlen.q()) - 1);
#pragma unroll 1
                for (int n_block = max(n_blocks.begin, range.begin); n_block < min(n_blocks.end, range.end);
                     ++n_block) {
                    const int first_key = n_block * kArrayTile;
                    if constexpr (kMaskProgram) {
                        if (hides_tile<C>(params, batch, head, first_query, first_key)) continue;
                    }
                    auto copy = [&](auto tile, const u8* buffer, const ConstTensor& tensor, int of_head,
                                    int offset, int first, int count, int columns) {
                        using Tile = decltype(tile);
                        const u16* from = view(tensor).row(batch, offset, of_head);
                        TileCopy<Tile, kArrayThreads>{from, tensor.strides.seq, columns}.template start<true>(
                            smem_address(buffer), first, count);
                    };
                    copy(Q{}, smem.q, params.q, head, seqlen.q_offset(), first_query, seqlen.q(),
                         shape.head_dim);
                    copy(Q{}, smem.k, params.k, kv_head, seqlen.k_offset(), first_key, seqlen.k(),
                         shape.head_dim);
                    copy(V{}, smem.dout, params.dout, head, seqlen.q_offset(), first_query, seqlen.q(),
                         shape.head_dim_v);
                    copy(V{}, smem.v, params.v, kv_head, seqlen.k_offset(), first_key, seqlen.k(),
                         shape.head_dim_v);
                    cp_async_commit();
                    cp_async_wait<0>();
                    cta_sync();
                    typename Cut::Accumulators s, dp;
                    Cut::clear(s);
                    Cut::clear(dp);
                    warp_multiply<C.dtype, C.head_dim / 16, 1, 1>(
                        s, WarpOperand<Q, Operand::A, Cut::kM>(Cut::first_m(warp), lane),
                        smem_address(smem.q),
                        WarpOperand<Q, Operand::BStoredNK, Cut::kN>(Cut::first_n(warp), lane),
                        smem_address(smem.k));
                    warp_multiply<C.dtype, C.head_dim_v / 16, 1, 1>(
                        dp, WarpOperand<V, Operand::A, Cut::kM>(Cut::first_m(warp), lane),
                        smem_address(smem.dout),
                        WarpOperand<V, Operand::BStoredNK, Cut::kN>(Cut::first_n(warp), lane),
                        smem_address(smem.v));
#pragma unroll
                    for (int f = 0; f < Cut::kFragments; ++f) {
                        const int query = first_query + own_row + 16 * f;
                        float lse[2], dpsum[2];
                        int begin[2], end[2];
#pragma unroll
                        for (int r = 0; r < 2; ++r) {
                            const bool inside = query + 8 * r < seqlen.q();
                            lse[r] = inside ? params.lse_log2[first_stat + query + 8 * r] : -minus_infinity();
                            dpsum[r] = inside ? params.dpsum[first_stat + query + 8 * r] : 0.f;
                            begin[r] = visible.keys_begin(query + 8 * r);
                            end[r] = visible.keys_end(query + 8 * r);
                        }
                        const ScorePlace<false> place{batch,
                                                      seqlen.q(),
                                                      seqlen.k(),
                                                      seqlen.k() - seqlen.q(),
                                                      shape.group_size,
                                                      {head, head},
                                                      {query, query + 8},
                                                      first_key + own_column};
                        // What is added to the scores is read side by side, as the main kernel does.
                        constexpr bool kIsAdded = kScoreProgram && !kScoreSlope;
                        if constexpr (kIsAdded) to_exponents(s[f], params, params.score, place);
                        place.template for_each<Cut::kRegisters>(programs, [&](int i, const auto& mods,
                                                                               const auto& row,
                                                                               const auto& column) {
                            const int r = (i >> 1) & 1, key = first_key + own_column + 8 * (i / 4) + i % 2;
                            // An added array's slope depends on no score.
                            const float product = kIsAdded ? 0.f : s[f][i] * params.score.scale;
                            bool sees = key >= begin[r] && key < end[r];
                            if constexpr (kMaskProgram) sees = sees && mods.mask(row, column);
                            float exponent = s[f][i];
                            if constexpr (!kIsAdded) {
                                exponent = multiply_towards_zero(mods.score(product, row, column), kLog2e);
                            }
                            const float p = sees ? probability(exponent, lse[r]) : 0.f;
                            float of_p = dp[f][i];
                            if constexpr (weighs()) of_p *= mods.weight(row, column);
                            const float ds = p * (of_p - dpsum[r]) * Slope::of(mods, product, row, column);
                            sums[f][i] += p == 0.f ? 0.f : ds;
                        });
                    }
                    cta_sync();
                }
            }
        }
    }

    // Where an element is in the packed gradient.
    auto place = [&](int query, int key) {
        i64 at = 0;
#pragma unroll
        for (int axis = 0; axis < 4; ++axis) {
            int own = -1;
            if (axis == R.batch) own = by_batch ? batch_index : 0;
            if (axis == R.head) own = by_head ? head_index : 0;
            if (axis == R.kv_head) own = by_kv ? head_index : 0;
            if (axis == R.query) own = by_query ? query : 0;
            if (axis == R.key) own = by_key ? key : 0;
            if (own >= 0) at = at * array.extents[axis] + own;
        }
        return at;
    };
    auto store = [&](i64 at, float value) {
        if constexpr (R.element != ArrayElement::F32) {
            if (is_narrow) {
                constexpr Dtype kDtype = R.element == ArrayElement::F16 ? Dtype::F16 : Dtype::Bf16;
                static_cast<u16*>(to)[at] = static_cast<u16>(pack<kDtype>(value, 0.f));
                return;
            }
        }
        static_cast<float*>(to)[at] = value;
    };
    const int first_query = m_index * kArrayTile, first_key = n_index * kArrayTile;
    const bool is_summed = !by_query || !by_key;
#pragma unroll
    for (int f = 0; f < Cut::kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < Cut::kRegisters; ++i) {
            const int row = own_row + 16 * f + 8 * ((i >> 1) & 1), column = own_column + 8 * (i / 4) + i % 2;
            if (is_summed) {
                smem.sums[row][column] = sums[f][i];
            } else if (first_query + row < array.extents[R.query < 0 ? 0 : R.query] &&
                       first_key + column < array.extents[R.key < 0 ? 0 : R.key]) {
                store(place(first_query + row, first_key + column), sums[f][i]);
            }
        }
    }
    if (!is_summed) return;
    cta_sync();
    const int thread = thread_index();
    float sum = 0.f;
    if (by_query || by_key) {
        if (thread >= kArrayTile) return;
        for (int i = 0; i < kArrayTile; ++i) sum += by_query ? smem.sums[thread][i] : smem.sums[i][thread];
        const int query = first_query + thread, key = first_key + thread;
        if (by_query ? query < extent(R.query) : key < extent(R.key)) store(place(query, key), sum);
        return;
    }
    if (thread > 0) return;
    for (int i = 0; i < kArrayTile * kArrayTile; ++i) sum += smem.sums[i / kArrayTile][i % kArrayTile];
    store(place(0, 0), sum);
}

}  // namespace fa
