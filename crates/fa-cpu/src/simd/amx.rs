//! AMX: products of bf16 tiles in the tile registers, 16 x 16 sums of 32 terms by one instruction.
//!
//! The tile registers are reached by inline assembly (the intrinsics are not stable). Linux grants their use
//! per process, on request; every thread then configures them before use.
#![allow(unsafe_code)]

use core::arch::asm;
use core::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::bf16::RawProduct16;

/// Whether the CPU has AMX with bf16, the operating system saves its registers, and this process may use
/// them.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| cpu_has_tiles() && request_permission())
}

fn cpu_has_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const OSXSAVE: u32 = 1 << 27;
    /// Tile configuration and tile data, bits 17 and 18 of XCR0.
    const TILE_STATE: u32 = 0b11 << 17;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    // Leaf 0x1d, which describes the palettes, is left blank by some hypervisors whose CPUs do have the one
    // palette there is, so it is not asked.
    let features = __cpuid_count(7, 0).edx;
    let enabled: u32;
    // SAFETY: OSXSAVE says that xgetbv may be executed; it only writes eax and edx.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack)) };
    features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE && enabled & TILE_STATE == TILE_STATE
}

#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: the system call takes two numbers, touches no memory of ours, and clobbers what is listed.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Other systems grant it in another way, which has not been tried: AMX is not used there.
#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// What `ldtilecfg` reads: palette 1 and the shape of each of the eight registers.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight registers 16 rows of 64 bytes.
static WHOLE_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Configures this thread's tile registers.
///
/// # Safety
/// [`is_available`] must have said yes.
pub(super) unsafe fn enter() {
    // SAFETY: AMX is available; the configuration is 64 valid bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, readonly)) };
}

/// Returns this thread's tile registers to their initial state, which makes context switches cheap again.
///
/// # Safety
/// [`is_available`] must have said yes.
pub(super) unsafe fn leave() {
    // SAFETY: AMX is available.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// The product, in blocks of 32 x 32: four tiles of sums, two of A and two of B.
///
/// # Safety
/// `RawProduct16`'s contract, and [`enter`] was called on this thread.
pub(super) unsafe fn product(p: &RawProduct16) {
    for row in (0..p.m).step_by(32) {
        for column in (0..p.n).step_by(32) {
            // SAFETY: m, n and k are multiples of 32, so the block lies within A, B and C.
            unsafe {
                block(
                    p.k / 32,
                    p.a.add(row * p.lda),
                    2 * p.lda,
                    p.b.add(column),
                    4 * p.ldb,
                    p.c.add(row * p.ldc + column),
                    4 * p.ldc,
                    p.add,
                );
            }
        }
    }
}

/// One block over all of k; strides in bytes, `steps` of 32 terms.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn block(
    steps: usize,
    a: *const u16,
    lda: usize,
    b: *const u32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
    add: bool,
) {
    // SAFETY: the caller vouches for 32 rows of A, 16 rows of B a step and 32 rows of C; only tile registers
    // that are listed and the operands are changed.
    unsafe {
        asm!(
            "test {add}, {add}",
            "jnz 3f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 4f",
            "3:",
            "tileloadd tmm0, [{c} + {ldc}*1]",
            "tileloadd tmm1, [{c} + {ldc}*1 + 64]",
            "tileloadd tmm2, [{c2} + {ldc}*1]",
            "tileloadd tmm3, [{c2} + {ldc}*1 + 64]",
            "4:",
            "test {steps}, {steps}",
            "jz 5f",
            "2:",
            "tileloadd tmm4, [{a} + {lda}*1]",
            "tileloadd tmm6, [{b} + {ldb}*1]",
            "tileloadd tmm7, [{b} + {ldb}*1 + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{a2} + {lda}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 64",
            "add {a2}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "5:",
            "tilestored [{c} + {ldc}*1], tmm0",
            "tilestored [{c} + {ldc}*1 + 64], tmm1",
            "tilestored [{c2} + {ldc}*1], tmm2",
            "tilestored [{c2} + {ldc}*1 + 64], tmm3",
            add = in(reg) usize::from(add),
            steps = inout(reg) steps => _,
            a = inout(reg) a => _,
            a2 = inout(reg) a.byte_add(16 * lda) => _,
            b = inout(reg) b => _,
            lda = in(reg) lda,
            ldb = in(reg) ldb,
            b_step = in(reg) 16 * ldb,
            c = in(reg) c,
            c2 = in(reg) c.byte_add(16 * ldc),
            ldc = in(reg) ldc,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
