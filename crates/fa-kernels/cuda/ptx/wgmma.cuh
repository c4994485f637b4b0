// Warpgroup matrix multiply-accumulate, m64 nN k16, f32 += 16-bit x 16-bit (PTX ISA, "wgmma.mma_async").
//
// D is 64 x N in registers; B is in shared memory, A in shared memory (ss) or in registers (rs). All four
// warps of a warpgroup execute it; results may be read after commit() and wait<>().
#pragma once
#include "config.cuh"
#include "types.cuh"

namespace fa::wgmma {

// Orders this warp's earlier register accesses before those of the wgmma that follow. For writes to shared
// memory, fence_async_shared() does so.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the wgmma issued since the last commit as one group.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the newest `Pending` groups are still in flight.
template <int Pending>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving accesses to the accumulators across this point.
template <int N>
__device__ __forceinline__ void pin(float (&regs)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(regs[i])::"memory");
}

template <Dtype T, int N>
struct Mma;

// Operand lists by the number of accumulators: FA_Rk is "%0, ..., %(k-1)", FA_Dk the constraints of d[0..k].
#define FA_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FA_R16 FA_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FA_R20 FA_R16 ",%16,%17,%18,%19"
#define FA_R24 FA_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define FA_R28 FA_R24 ",%24,%25,%26,%27"
#define FA_R32 FA_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define FA_R40 FA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FA_R48 FA_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FA_R56 FA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FA_R64 FA_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FA_R72 FA_R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define FA_R80 FA_R72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define FA_R88 FA_R80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define FA_R96 FA_R88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FA_R104 FA_R96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define FA_R112 FA_R104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define FA_R120 FA_R112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define FA_R128 FA_R120 ",%120,%121,%122,%123,%124,%125,%126,%127"

#define FA_DX(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_DX4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FA_D8 FA_DX(0)
#define FA_D16 FA_D8, FA_DX(8)
#define FA_D20 FA_D16, FA_DX4(16)
#define FA_D24 FA_D16, FA_DX(16)
#define FA_D28 FA_D24, FA_DX4(24)
#define FA_D32 FA_D24, FA_DX(24)
#define FA_D40 FA_D32, FA_DX(32)
#define FA_D48 FA_D40, FA_DX(40)
#define FA_D56 FA_D48, FA_DX(48)
#define FA_D64 FA_D56, FA_DX(56)
#define FA_D72 FA_D64, FA_DX(64)
#define FA_D80 FA_D72, FA_DX(72)
#define FA_D88 FA_D80, FA_DX(80)
#define FA_D96 FA_D88, FA_DX(88)
#define FA_D104 FA_D96, FA_DX(96)
#define FA_D112 FA_D104, FA_DX(104)
#define FA_D120 FA_D112, FA_DX(112)
#define FA_D128 FA_D120, FA_DX(120)

// One shape: N columns, R accumulators, then the numbers of the operands that follow them.
#define FA_WGMMA(TYPE, NAME, N, R, O0, O1, O2, O3, O4, O5, O6)                                              \
    template <>                                                                                             \
    struct Mma<Dtype::TYPE, N> {                                                                            \
        /* A and B by shared-memory descriptors; d = a b + (accumulate ? d : 0). */                         \
        template <int TransA, int TransB>                                                                   \
        __device__ __forceinline__ static void ss(float (&d)[R], u64 a, u64 b, int accumulate) {            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O2                                           \
                         ", 0;\n"                                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FA_R##R       \
                         "}, %" #O0 ", %" #O1 ", p, 1, 1, %" #O3 ", %" #O4 ";\n}\n"                         \
                         : FA_D##R                                                                          \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB)                        \
                         : "memory");                                                                       \
        }                                                                                                   \
        /* A as four registers of 16-bit pairs. */                                                          \
        template <int TransB>                                                                               \
        __device__ __forceinline__ static void rs(float (&d)[R], const u32* a, u64 b, int accumulate) {     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #O5                                           \
                         ", 0;\n"                                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" FA_R##R       \
                         "}, {%" #O0 ", %" #O1 ", %" #O2 ", %" #O3 "}, %" #O4 ", p, 1, 1, %" #O6 ";\n}\n"   \
                         : FA_D##R                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransB) \
                         : "memory");                                                                       \
        }                                                                                                   \
    };

#define FA_WGMMA_ALL(TYPE, NAME)                                      \
    FA_WGMMA(TYPE, NAME, 16, 8, 8, 9, 10, 11, 12, 13, 14)             \
    FA_WGMMA(TYPE, NAME, 32, 16, 16, 17, 18, 19, 20, 21, 22)          \
    FA_WGMMA(TYPE, NAME, 40, 20, 20, 21, 22, 23, 24, 25, 26)          \
    FA_WGMMA(TYPE, NAME, 48, 24, 24, 25, 26, 27, 28, 29, 30)          \
    FA_WGMMA(TYPE, NAME, 56, 28, 28, 29, 30, 31, 32, 33, 34)          \
    FA_WGMMA(TYPE, NAME, 64, 32, 32, 33, 34, 35, 36, 37, 38)          \
    FA_WGMMA(TYPE, NAME, 80, 40, 40, 41, 42, 43, 44, 45, 46)          \
    FA_WGMMA(TYPE, NAME, 96, 48, 48, 49, 50, 51, 52, 53, 54)          \
    FA_WGMMA(TYPE, NAME, 112, 56, 56, 57, 58, 59, 60, 61, 62)         \
    FA_WGMMA(TYPE, NAME, 128, 64, 64, 65, 66, 67, 68, 69, 70)         \
    FA_WGMMA(TYPE, NAME, 144, 72, 72, 73, 74, 75, 76, 77, 78)         \
    FA_WGMMA(TYPE, NAME, 160, 80, 80, 81, 82, 83, 84, 85, 86)         \
    FA_WGMMA(TYPE, NAME, 176, 88, 88, 89, 90, 91, 92, 93, 94)         \
    FA_WGMMA(TYPE, NAME, 192, 96, 96, 97, 98, 99, 100, 101, 102)      \
    FA_WGMMA(TYPE, NAME, 208, 104, 104, 105, 106, 107, 108, 109, 110) \
    FA_WGMMA(TYPE, NAME, 224, 112, 112, 113, 114, 115, 116, 117, 118) \
    FA_WGMMA(TYPE, NAME, 240, 120, 120, 121, 122, 123, 124, 125, 126) \
    FA_WGMMA(TYPE, NAME, 256, 128, 128, 129, 130, 131, 132, 133, 134)

FA_WGMMA_ALL(F16, "f16")
FA_WGMMA_ALL(Bf16, "bf16")

}  // namespace fa::wgmma
