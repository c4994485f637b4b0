// Transposes a tile of 8-bit elements on chip: rows of wgmma's 8-bit operands run along the contraction, and
// V comes with a key a row.
//
// A matrix load takes pairs of columns for elements. Transposed, it gives a thread keys 2t and 2t + 1 of
// columns 2g and 2g + 1 (t = lane % 4, g = lane / 4). The bytes of two such matrices, keys 0 to 7 and 8 to
// 15, are four keys of column 2g, and four of column 2g + 1, in the order in which a thread packs P without
// shuffles: of 16 keys 0, 1, 8, 9, 2, 3, 10, 11, .. Columns are stored in another order too, so that no banks
// conflict: of 16 columns the even ones first. The store of O restores their order (attn/store_permuted.cuh).
#pragma once
#include "ptx/packed.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/thread.cuh"
#include "tile/byte_panel.cuh"
#include "tile/fragment.cuh"
#include "tile/smem_tile.cuh"
#include "types.cuh"

namespace fa {

// The transposition of tiles [Keys][Columns] by four warps. A step of a warp is 16 keys of 32 columns.
template <int Keys, int Columns>
struct ByteTransposer {
    using From = SmemTile<Keys, Columns / 2, true>;
    using To = SmemTile<Columns, Keys / 2, true>;
    static_assert(Keys % 32 == 0 && Columns % 32 == 0);

    static constexpr int kGroups = Columns / 32;
    // Warps that share the columns; the others divide the keys.
    static constexpr int kAcross = kGroups % 4 == 0 ? 4 : kGroups % 2 == 0 ? 2 : 1;
    static constexpr int kDown = 4 / kAcross;
    static constexpr int kGroupsOfWarp = kGroups / kAcross;
    static constexpr int kKeySteps = ceil_div(Keys / 16, kDown);

    // Transposes the share of warp `warp`, 0 to 3.
    __device__ __forceinline__ static void run(u32 from, u32 to, int warp) {
        const FragmentReader<From, Operand::BStoredKN, true> reader;
        const int lane = lane_index();
#pragma unroll
        for (int i = 0; i < kGroupsOfWarp; ++i) {
            const int group = warp % kAcross + i * kAcross;
            // The lane's row of the transposed tile.
            const u32 row = to + (32 * group + lane) * To::kRowBytes + (To::twist(lane) << 4);
#pragma unroll 2
            for (int step = 0; step < kKeySteps; ++step) {
                const int keys = warp / kAcross + step * kDown;
                if (Keys / 16 % kDown != 0 && keys >= Keys / 16) break;
                u32 m[4];
                reader.read(m, from, 16 * keys, 16 * group);
                const u32 at = (row ^ To::chunk(8 * keys) << 4) + To::panel_offset(8 * keys);
                stmatrix_x4(at, bytes_of<0x6420>(m[0], m[1]), bytes_of<0x7531>(m[0], m[1]),
                            bytes_of<0x6420>(m[2], m[3]), bytes_of<0x7531>(m[2], m[3]));
            }
        }
    }
};

}  // namespace fa
