// Operands of matrix products in shared memory: what a matrix descriptor says, and the 16 bytes that it leads
// to.
#pragma once
#include <cstring>

#include "machine.h"

namespace emu {

// A matrix descriptor (PTX ISA, "Matrix descriptor"), in bytes.
struct MatrixDescriptor {
    u32 start, leading, stride, swizzle;

    static MatrixDescriptor of(u64 bits, u32 swizzle) {
        auto field = [&](int shift) { return u32(bits >> shift & 0x3fff) << 4; };
        return {field(0), field(16), field(32), swizzle};
    }
};

// Where in shared memory each 16 bytes of rows [first, first + rows) x 16 of an operand lie. `each(offset,
// row, k)`: eight elements along k, or along the rows when those are contiguous.
template <class F>
void for_chunks(const MatrixDescriptor& d, bool mn_major, int first, int rows, F each) {
    const u32 mask = d.swizzle / 16 - 1;
    auto emit = [&](u32 at, int row, int k) {
        each((at ^ (at >> 7 & mask) << 4) - kSharedBase, row - first, k);
    };
    if (mn_major) {
        const int panel = int(d.swizzle) / 2;
        for (int row = first; row < first + rows; row += 8) {
            for (int k = 0; k < 16; ++k) {
                emit(d.start + u32(row / panel) * d.leading + u32(k / 8) * d.stride + u32(k % 8) * d.swizzle +
                         u32(row % panel) * 2,
                     row, k);
            }
        }
    } else {
        for (int row = first; row < first + rows; ++row) {
            for (int k = 0; k < 16; k += 8)
                emit(d.start + u32(row / 8) * d.stride + u32(row % 8) * d.swizzle + u32(k) * 2, row, k);
        }
    }
}

inline void read_operand(const Cta& cta, bool bf16, const MatrixDescriptor& d, bool mn_major, int first,
                         int rows, float* out, int row_stride, int k_stride) {
    const u32 limit = machine->launch.smem_bytes;
    for_chunks(d, mn_major, first, rows, [&](u32 offset, int row, int k) {
        if (offset + 16 > limit) return;  // reported when it was issued
        u16 bits[8];
        memcpy(bits, cta.memory + offset, 16);
        float* to = out + row * row_stride + k * k_stride;
        const int step = mn_major ? row_stride : k_stride;
        for (int i = 0; i < 8; ++i) to[i * step] = from16(bf16, bits[i]);
    });
}

// The same of e4m3 numbers, K-major: 32 along k.
inline void read_bytes(const Cta& cta, const MatrixDescriptor& d, int first, int rows, float* out,
                       int row_stride, int k_stride) {
    const u32 limit = machine->launch.smem_bytes;
    for_chunks(d, false, first, rows, [&](u32 offset, int row, int k) {
        if (offset + 16 > limit) return;  // reported when it was issued
        float* to = out + row * row_stride + 2 * k * k_stride;
        for (int i = 0; i < 16; ++i) to[i * k_stride] = from_e4m3(cta.memory[offset + u32(i)]);
    });
}

// Notes that `actor` reads the operand, by an instruction of this name.
inline void access_operand(Cta& cta, const char* instruction, const MatrixDescriptor& d, bool mn_major,
                           int first, int rows, const Actor& actor) {
    if (d.swizzle == 16) {
        report("bad descriptor", me() + " issues a " + instruction +
                                     " by a descriptor without swizzle, which no tile here is laid out for");
    }
    const u32 limit = machine->launch.smem_bytes;
    bool beyond = false;
    for_chunks(d, mn_major, first, rows, [&](u32 offset, int, int) {
        if (offset + 16 > limit) {
            if (!beyond)
                report("bad descriptor", me() + " issues a " + instruction +
                                             " whose operand reaches shared memory +" +
                                             std::to_string(int(offset)) + " of " + std::to_string(limit));
            beyond = true;
        } else if (machine->options.order) {
            cta.shadow.access(cta, offset, 16, false, actor);
        }
    });
}

}  // namespace emu
