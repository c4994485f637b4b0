// Twin of cuda/ptx/ldmatrix.cuh.
#pragma once
#include "ptx/math.cuh"
#include "types.cuh"

namespace fa {

EMU_INLINE void ldmatrix_x4(u32 (&m)[4], u32 address) { emu::ldmatrix(m, address, false); }
EMU_INLINE void ldmatrix_x4_trans(u32 (&m)[4], u32 address) { emu::ldmatrix(m, address, true); }

EMU_INLINE u32 load_shared_u16(u32 address) {
    u16 value;
    emu::load_shared(&value, address, 2);
    return value;
}
EMU_INLINE u32 load_shared_u32(u32 address) {
    u32 value;
    emu::load_shared(&value, address, 4);
    return value;
}
EMU_INLINE void load_shared_u32x2(u32& first, u32& second, u32 address) {
    u32 values[2];
    emu::load_shared(values, address, 8);
    first = values[0];
    second = values[1];
}
EMU_INLINE float load_shared_f32(u32 address) { return float_of_bits(load_shared_u32(address)); }
EMU_INLINE void store_shared_u16(u32 address, u16 value) { emu::store_shared(address, &value, 2); }
EMU_INLINE void store_shared_u32(u32 address, u32 value) { emu::store_shared(address, &value, 4); }

}  // namespace fa
