// Where the rows of K or V lie, whether padded, packed or in pages, for copies row by row: those of an 8-bit
// cache, or of 16-bit elements whose rows begin on 16 bytes.
#pragma once
#include "attn/descales.cuh"
#include "attn/paged_keys.cuh"
#include "attn/seqlen.cuh"
#include "fwd_params.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cp_async.cuh"
#include "tile/codes.cuh"
#include "types.cuh"

namespace fa {

// The rows of one sequence and head of K or V, whose elements have `Bytes` bytes.
template <bool Paged, int Bytes = 1>
struct CodeRows {
    const VarlenParams& varlen;
    const u8* first;            // the head's row 0, of the sequence or of page 0
    const float* descales;      // of that row; null unless each row has its own
    const int* table;           // the sequence's row of the page table
    u32 row_units, page_units;  // from row to row, and from page to page, in units of 16 bytes
    int heads, keys;

    // Those of K/V head `head`, of a launch that counts `parts` of each as heads.
    template <bool Varied>
    __device__ __forceinline__ static CodeRows of(const FwdParams& params, const ConstTensor& tensor,
                                                  const CodeDescales& descales, const Seqlen<Varied>& seqlen,
                                                  int batch, int head, int parts = 1) {
        const RowStrides& strides = tensor.strides;
        const int heads = params.shape.heads_kv / parts;
        i64 bytes = head * strides.head, row = 0;
        if constexpr (!Paged) {
            // Packed rows are one entry: its stride is 0.
            bytes += batch * strides.batch + seqlen.k_offset() * strides.seq;
            row = seqlen.k_offset() + (params.varlen.total_k > 0 ? 0 : i64(batch) * params.shape.seqlen_k);
        }
        return {params.varlen,
                static_cast<const u8*>(tensor.data) + bytes * Bytes,
                descales.of_rows == nullptr ? nullptr : descales.of_rows + row * heads + head,
                Paged ? params.varlen.page_table + i64(batch) * params.varlen.table_stride : nullptr,
                u32(u64(strides.seq) * Bytes / 16),
                Paged ? u32(u64(strides.batch) * Bytes / 16) : 0,
                heads,
                seqlen.k()};
    }

    // The entry of the page table for a key, unchecked; past the end, that of the last key. There is a key.
    __device__ __forceinline__ int entry_of(int key) const {
        if constexpr (!Paged) return 0;
        return table[page_slot(varlen, min(key, keys - 1))];
    }

    // A row's place relative to `first`, and its number among the rows with descales.
    struct Place {
        u32 at;
        i64 row;
    };

    // The place of a key, given its entry: kNowhere past the end, and where the entry is not a page of the
    // cache, which is counted in page_faults if `counts`.
    __device__ __forceinline__ Place place_of(int key, int entry, bool counts) const {
        if (key >= keys) return {kNowhere, 0};
        if constexpr (Paged) {
            if (u32(entry) >= u32(varlen.pages)) {
                if (counts && varlen.page_faults != nullptr) atomic_add(varlen.page_faults, 1u);
                return {kNowhere, 0};
            }
            const int within = key - page_slot(varlen, key) * varlen.page;
            return {u32(entry) * page_units + u32(within) * row_units, i64(entry) * varlen.page + within};
        } else {
            return {u32(key) * row_units, key};
        }
    }

    // Starts to copy the descale of the row at `place` to shared memory at `to`.
    __device__ __forceinline__ void copy_descale(u32 to, const Place& place) const {
        cp_async_4(to, descales + place.row * heads, place.at == kNowhere ? 0 : 4);
    }
};

}  // namespace fa
