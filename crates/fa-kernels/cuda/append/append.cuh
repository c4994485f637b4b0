// The append kernel: writes new rows of K and V to a cache, contiguous or in pages, and applies rotary
// embedding to the new K and to Q. Positions start at the cache's lengths, which are read on the device.
#pragma once
#include "append/append_params.cuh"
#include "attn/store_rows.cuh"
#include "attn/tensor_view.cuh"
#include "config.cuh"
#include "ptx/address.cuh"
#include "ptx/atomic.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/thread.cuh"
#include "types.cuh"

namespace fa {

// The most rows per CTA.
constexpr int kAppendRows = 32;

// ---- Which row goes where -----------------------------------------------------------------------

// The rows of one side, new keys or queries: `[batch, rows]`, or packed with starts in `cu`; `used` limits
// them.
struct AppendSide {
    const int* cu;
    const int* used;
    int rows;  // per sequence, or of all sequences if packed

    __device__ __forceinline__ int begin(int sequence) const { return cu == nullptr ? 0 : cu[sequence]; }
    __device__ __forceinline__ int count(int sequence) const {
        const int all = cu == nullptr ? rows : cu[sequence + 1] - cu[sequence];
        return max(0, used == nullptr ? all : min(all, used[sequence]));
    }
    // The sequence of row `index` of all rows: the last one that begins at or before it.
    __device__ __forceinline__ int sequence(int index, int batch) const {
        if (cu == nullptr) return index / rows;
        int low = 0, high = batch;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (cu[middle] <= index) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// One row to process: row `from` of sequence `sequence` of its tensor (0 if packed) goes to row `to` of
// `block`, a sequence or a page. A row with a negative `position` is skipped.
struct AppendRow {
    int sequence, from, block, to, position;
};

struct AppendRows {
    AppendRow rows[kAppendRows];
};

constexpr int append_smem_bytes = sizeof(AppendRows);

__device__ __forceinline__ int cached_keys(const AppendParams& params, int sequence) {
    return params.used_k == nullptr ? 0 : max(0, params.used_k[sequence]);
}

// Resolves row `index` of the queries, or of the new keys if not `queries`.
__device__ __forceinline__ AppendRow append_row(const AppendParams& params, bool queries, int index) {
    const AppendSide side = queries ? AppendSide{params.cu_q, params.used_q, params.rows_q}
                                    : AppendSide{params.cu_new, params.used_new, params.rows_new};
    const int sequence = side.sequence(index, params.batch);
    const bool packed = side.cu != nullptr;
    const int from = packed ? index : index - sequence * side.rows;
    const int within = from - side.begin(sequence);
    AppendRow row{packed ? 0 : sequence, from, packed ? 0 : sequence, from, -1};
    if (within < 0 || within >= side.count(sequence)) return row;

    // Rows beyond the cache's capacity, or beyond the rotary tables, are skipped and counted.
    const i64 position = i64(cached_keys(params, sequence)) + (queries && params.q_fixed ? 0 : within);
    bool fits = params.rotary_dim == 0 || position < params.positions;
    if (!queries) {
        fits = fits && position < params.capacity;
        row.block = sequence;
        row.to = int(position);
        if (fits && params.page_table != nullptr) {
            row.block = params.page_table[i64(sequence) * params.table_stride + row.to / params.page];
            row.to %= params.page;
            fits = row.block >= 0 && row.block < params.pages;
        }
    }
    if (fits) {
        row.position = int(position);
    } else if (params.dropped != nullptr) {
        atomic_add(params.dropped, 1u);
    }
    return row;
}

// ---- Rotation -----------------------------------------------------------------------------------

// Rotates the pair (a, b). Every operation is rounded separately, as in the CPU's reference.
__device__ __forceinline__ void rotate(float& a, float& b, float cos, float sin) {
    const float turned = subtract_rounded(multiply_rounded(a, cos), multiply_rounded(b, sin));
    b = subtract_rounded(multiply_rounded(b, cos), -multiply_rounded(a, sin));
    a = turned;
}

// Loads `Count` (4 or 8) consecutive entries of a rotary table, in f32 or in the tensors' type.
template <Dtype T, int Count>
__device__ __forceinline__ void read_table(const void* table, i64 at, bool is_f32, float (&of)[Count]) {
    if (is_f32) {
        const float* from = static_cast<const float*>(table) + at;
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            of[i] = four.x, of[i + 1] = four.y, of[i + 2] = four.z, of[i + 3] = four.w;
        }
    } else {
        const u32* words = reinterpret_cast<const u32*>(static_cast<const u16*>(table) + at);
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            of[2 * i] = unpack_low<T>(words[i]);
            of[2 * i + 1] = unpack_high<T>(words[i]);
        }
    }
}

// Number of work items in a row of `columns` elements, of which the first `rotary` are rotated. An item has 8
// elements, or 16 where halves are rotated: 8 of each half.
__device__ __forceinline__ int items_of(const AppendParams& params, int columns, int rotary) {
    return columns / 8 - (params.interleaved ? 0 : rotary / 16);
}

// Stores eight elements of a row from `column` on.
__device__ __forceinline__ void store_item(u16* to, int column, const Vec16& vec) {
    *reinterpret_cast<Vec16*>(to + column) = vec;
}

// Copies item `item` of a row, rotated where it belongs to the rotary part, by store_item().
template <Dtype T, class To>
__device__ __forceinline__ void move_item(const AppendParams& params, const u16* from, To to, int item,
                                          int position, int rotary) {
    auto read = [&](int column) { return *reinterpret_cast<const Vec16*>(from + column); };
    auto write = [&](int column, const Vec16& vec) { store_item(to, column, vec); };
    const i64 row = i64(position) * (rotary / 2);
    if (!params.interleaved && item < rotary / 16) {
        const int column = 8 * item, other = column + rotary / 2;
        Vec16 first = read(column), second = read(other);
        float cos[8], sin[8];
        read_table<T>(params.cos, row + column, params.table_f32, cos);
        read_table<T>(params.sin, row + column, params.table_f32, sin);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a[2] = {unpack_low<T>(first.words[i]), unpack_high<T>(first.words[i])};
            float b[2] = {unpack_low<T>(second.words[i]), unpack_high<T>(second.words[i])};
#pragma unroll
            for (int n = 0; n < 2; ++n) rotate(a[n], b[n], cos[2 * i + n], sin[2 * i + n]);
            first.words[i] = pack<T>(a[0], a[1]);
            second.words[i] = pack<T>(b[0], b[1]);
        }
        write(column, first);
        write(other, second);
    } else if (params.interleaved && 8 * item < rotary) {
        const int column = 8 * item;
        Vec16 vec = read(column);
        float cos[4], sin[4];
        read_table<T>(params.cos, row + column / 2, params.table_f32, cos);
        read_table<T>(params.sin, row + column / 2, params.table_f32, sin);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a = unpack_low<T>(vec.words[i]), b = unpack_high<T>(vec.words[i]);
            rotate(a, b, cos[i], sin[i]);
            vec.words[i] = pack<T>(a, b);
        }
        write(column, vec);
    } else {
        const int column = 8 * (params.interleaved ? item : item + rotary / 16);
        write(column, read(column));
    }
}

// ---- Kernel -------------------------------------------------------------------------------------

// Processes the CTA's rows, listed in shared memory, head by head.
template <Dtype T>
__device__ __forceinline__ void move_rows(const AppendParams& params, const AppendRows& smem, int rows,
                                          bool queries) {
    const int rotary = params.rotary_dim;
    auto move = [&](const ConstTensor& source, const MutTensor& target, int heads, int columns, int turned) {
        const int items = items_of(params, columns, turned), row_items = heads * items;
        const int all = rows * row_items;
        for (int i = thread_index(); i < all; i += cta_threads()) {
            const AppendRow& row = smem.rows[i / row_items];
            if (row.position < 0) continue;
            const int head = i % row_items / items;
            move_item<T>(params, view(source).row(row.sequence, row.from, head),
                         view(target).row(row.block, row.to, head), i % items, row.position, turned);
        }
    };
    if (queries) {
        move(params.q, params.q_out, params.heads_q, params.q_columns, rotary);
    } else {
        move(params.k_new, params.k_cache, params.heads_kv, params.head_dim, rotary);
        move(params.v_new, params.v_cache, params.heads_kv, params.head_dim_v, 0);
    }
}

// The kernel's body. The first `ctas_new` CTAs process `rows_per_cta` new keys each, the others as many
// queries, by move_rows() of these parameters. The cache's new lengths are written too.
template <class Params>
__device__ __forceinline__ void append(const Params& params) {
    auto& smem = shared_memory<AppendRows>();
    const int cta = cta_index(), thread = thread_index();
    const bool queries = cta >= params.ctas_new;
    const bool packed = queries ? params.cu_q != nullptr : params.cu_new != nullptr;
    const int all = (queries ? params.rows_q : params.rows_new) * (packed ? 1 : params.batch);
    const int first = (queries ? cta - params.ctas_new : cta) * params.rows_per_cta;
    const int rows = min(params.rows_per_cta, all - first);
    if (thread < rows) smem.rows[thread] = append_row(params, queries, first + thread);
    if (params.used_out != nullptr) {
        const AppendSide side{params.cu_new, params.used_new, params.rows_new};
        const int threads = cta_count() * cta_threads();
        for (int sequence = cta * cta_threads() + thread; sequence < params.batch; sequence += threads)
            params.used_out[sequence] = cached_keys(params, sequence) + side.count(sequence);
    }
    cta_sync();
    if (params.is_f16) {
        move_rows<Dtype::F16>(params, smem, rows, queries);
    } else {
        move_rows<Dtype::Bf16>(params, smem, rows, queries);
    }
}

}  // namespace fa
