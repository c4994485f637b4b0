// Written by `cargo xtask codegen` from the Rust types; do not edit.
// The parameters of programs.
#pragma once
#include "params.cuh"

#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif

namespace fa {

// An array that a program reads.
struct ProgramArray {
    // Its first element.
    const void* data;
    // Between neighbours of each axis, in elements (in words for bits); 0 where all are the same.
    long long strides[4];
    // Elements of each axis: indices are clamped to them.
    int extents[4];
};
static_assert(sizeof(ProgramArray) == 56 && alignof(ProgramArray) == 8);
static_assert(FA_OFFSETOF(ProgramArray, data) == 0);
static_assert(FA_OFFSETOF(ProgramArray, strides) == 8);
static_assert(FA_OFFSETOF(ProgramArray, extents) == 40);

// The tiles that a mask's program leaves to be visited, which `attn/block_map.cuh` finds.
struct BlockMapParams {
    // Workspace. Forward `[batches, heads, rows, 1 + columns]`: the tiles of keys of each tile of
    // queries, after their number. Backward `[batches, heads, columns, 1 + rows]`: the tiles of queries
    // of each tile of keys.
    unsigned* lists;
    // Workspace `[batches, heads, rows, columns]`: states of tiles; backward only. Behind them the order
    // of the tiles of keys (`attn/block_order.cuh`).
    unsigned* tiles;
    // Tiles of queries, at most.
    int rows;
    // Tiles of keys, at most.
    int columns;
    // Sequences, or 1 where all have the same tiles.
    int batches;
    // Heads that have tiles of their own: all query heads, all K/V heads, or 1.
    int heads;
    // Query heads that share the tiles of one of these.
    int head_group;
    // Tiles of each list, at most, whose visible pairs are kept as bits behind the lists; 0 for none.
    int kept;
};
static_assert(sizeof(BlockMapParams) == 40 && alignof(BlockMapParams) == 8);
static_assert(FA_OFFSETOF(BlockMapParams, lists) == 0);
static_assert(FA_OFFSETOF(BlockMapParams, tiles) == 8);
static_assert(FA_OFFSETOF(BlockMapParams, rows) == 16);
static_assert(FA_OFFSETOF(BlockMapParams, columns) == 20);
static_assert(FA_OFFSETOF(BlockMapParams, batches) == 24);
static_assert(FA_OFFSETOF(BlockMapParams, heads) == 28);
static_assert(FA_OFFSETOF(BlockMapParams, head_group) == 32);
static_assert(FA_OFFSETOF(BlockMapParams, kept) == 36);

// The gradients of a program's arrays; backward only.
struct ArrayGradientParams {
    // Of each array, packed; null for none.
    void* to[8];
};
static_assert(sizeof(ArrayGradientParams) == 64 && alignof(ArrayGradientParams) == 8);
static_assert(FA_OFFSETOF(ArrayGradientParams, to) == 0);

// The arrays and scalars of a kernel's program.
struct ProgramParams {
    // In the order of the program's declarations.
    ProgramArray arrays[8];
    // The scalars, by their bits.
    unsigned scalars[8];
    // The mask's offset, which `off` counts in.
    int offset;
};
static_assert(sizeof(ProgramParams) == 488 && alignof(ProgramParams) == 8);
static_assert(FA_OFFSETOF(ProgramParams, arrays) == 0);
static_assert(FA_OFFSETOF(ProgramParams, scalars) == 448);
static_assert(FA_OFFSETOF(ProgramParams, offset) == 480);

// What the gradients of arrays are stored by; backward only.
struct StoredParams {
    // dS in 16 bits, `[batch, heads_q, seqlen_q, pitch]`, whose sums are a gradient; null for none.
    const void* room;
    // Elements of a row of it.
    int pitch;
    // 1 where the main kernel stores dS: as a gradient, or in the room.
    int is_stored;
    // A bit for each array whose gradient is of its own 16 bits, and not f32.
    unsigned narrow;
};
static_assert(sizeof(StoredParams) == 24 && alignof(StoredParams) == 8);
static_assert(FA_OFFSETOF(StoredParams, room) == 0);
static_assert(FA_OFFSETOF(StoredParams, pitch) == 8);
static_assert(FA_OFFSETOF(StoredParams, is_stored) == 12);
static_assert(FA_OFFSETOF(StoredParams, narrow) == 16);

}  // namespace fa

#undef FA_OFFSETOF
