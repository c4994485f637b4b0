// ldmatrix, stmatrix and mma.sync: fragments of one warp (PTX ISA, "Warp-level matrix instructions").
#include <cstring>

#include "machine.h"

namespace emu {

namespace {

// A phase serves eight lanes of 16 bytes; lanes in the same four banks take turns.
void count_wavefronts(const u32* addresses, int lanes, u64& phases, u64& wavefronts) {
    for (int first = 0; first < lanes; first += 8) {
        int lanes_of[8] = {}, most = 0;
        for (int lane = first; lane < first + 8; ++lane)
            most = std::max(most, ++lanes_of[addresses[lane] / 16 % 8]);
        ++phases;
        wavefronts += u64(most);
    }
}

struct Fragments {
    u32* m;
    u32 address;
};

}  // namespace

void ldmatrix(u32* m, u32 address, bool transposed) {
    ENTER();
    Fragments own{m, address};
    shared(address, 16, 16);
    generic_access(address - kSharedBase, 16, false);
    rendezvous("ldmatrix", &own, [transposed](Warp& warp) {
        u32 addresses[32];
        for (int lane = 0; lane < 32; ++lane)
            addresses[lane] = static_cast<Fragments*>(warp.payload[lane])->address;
        Counters& counters = machine->counters;
        count_wavefronts(addresses, 32, counters.load_phases, counters.load_wavefronts);
        for (int i = 0; i < 4; ++i) {
            u16 e[8][8];
            for (int row = 0; row < 8; ++row)
                memcpy(e[row], warp.cta->memory + (addresses[8 * i + row] - kSharedBase), 16);
            for (int lane = 0; lane < 32; ++lane) {
                const int row = lane / 4, column = lane % 4 * 2;
                const u16 low = transposed ? e[column][row] : e[row][column];
                const u16 high = transposed ? e[column + 1][row] : e[row][column + 1];
                static_cast<Fragments*>(warp.payload[lane])->m[i] = low | u32(high) << 16;
            }
        }
    });
}

void stmatrix(u32 address, const u32* m, int count, bool transposed) {
    ENTER();
    Fragments own{const_cast<u32*>(m), address};
    if (current->view.lane < 8 * count) {
        shared(address, 16, 16);
        generic_access(address - kSharedBase, 16, true);
    }
    rendezvous("stmatrix", &own, [transposed, count](Warp& warp) {
        u32 addresses[32];
        for (int lane = 0; lane < 32; ++lane)
            addresses[lane] = static_cast<Fragments*>(warp.payload[lane])->address;
        Counters& counters = machine->counters;
        count_wavefronts(addresses, 8 * count, counters.store_phases, counters.store_wavefronts);
        for (int i = 0; i < count; ++i) {
            u16 e[8][8];
            for (int lane = 0; lane < 32; ++lane) {
                const int row = lane / 4, column = lane % 4 * 2;
                const u32 pair = static_cast<Fragments*>(warp.payload[lane])->m[i];
                (transposed ? e[column][row] : e[row][column]) = u16(pair);
                (transposed ? e[column + 1][row] : e[row][column + 1]) = u16(pair >> 16);
            }
            for (int row = 0; row < 8; ++row)
                memcpy(warp.cta->memory + (addresses[8 * i + row] - kSharedBase), e[row], 16);
        }
    });
}

void mma_m16n8k16(bool bf16, float* d, const u32* a, u32 b0, u32 b1) {
    ENTER();
    struct Lane {
        float* d;
        const u32* a;
        u32 b[2];
    } own{d, a, {b0, b1}};
    rendezvous("mma.sync", &own, [bf16](Warp& warp) {
        alignas(64) float a[16][16], b[16][8], d[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const Lane& from = *static_cast<Lane*>(warp.payload[lane]);
            const int group = lane / 4, pair = lane % 4 * 2;
            for (int half = 0; half < 2; ++half) {
                for (int i = 0; i < 4; ++i)
                    a[group + i % 2 * 8][pair + half + i / 2 * 8] = from16(bf16, u16(from.a[i] >> 16 * half));
                for (int i = 0; i < 2; ++i)
                    b[pair + half + i * 8][group] = from16(bf16, u16(from.b[i] >> 16 * half));
            }
            for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][pair + i % 2] = from.d[i];
        }
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
            }
        }
        for (int lane = 0; lane < 32; ++lane) {
            float* to = static_cast<Lane*>(warp.payload[lane])->d;
            const int group = lane / 4, pair = lane % 4 * 2;
            for (int i = 0; i < 4; ++i) to[i] = d[group + i / 2 * 8][pair + i % 2];
        }
        ++machine->counters.mma_sync;
        machine->counters.flops += 2 * 16 * 8 * 16;
    });
}

}  // namespace emu
