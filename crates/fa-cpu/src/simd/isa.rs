//! Instruction sets, and which of them the CPU at hand has.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// An instruction set that the kernels can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, on every CPU.
    Portable,
    /// AArch64 Advanced SIMD.
    Neon,
    /// x86-64 AVX2 with FMA and F16C.
    Avx2,
    /// x86-64 AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with dot products of bf16 pairs; f32 and f16 as AVX-512.
    Avx512Bf16,
    /// AVX-512 with AMX tiles for bf16; f32 and f16 as AVX-512.
    Amx,
}

impl Isa {
    /// Every instruction set, from the plainest.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The name that users see and give.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx-bf16",
        }
    }

    /// Whether this CPU and its operating system have it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512Bf16.is_available() && super::amx::is_available(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => false,
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon => false,
        }
    }

    /// The best one that this CPU has.
    ///
    /// Not always the last in [`Isa::ALL`]: Intel's cores take a dot product of pairs every other cycle,
    /// which makes AVX512-BF16 slower than the f32 kernels there, so only AMD's are given it.
    pub fn detect() -> Isa {
        // CPUID takes longer than a short problem where a hypervisor answers it.
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let best = |isa: &Isa| isa.is_available() && (*isa != Isa::Avx512Bf16 || fast_pairs());
            Isa::ALL.into_iter().rev().find(best).unwrap_or(Isa::Portable)
        })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whether the CPU starts a 512-bit dot product of bf16 pairs every cycle: AMD's do.
#[cfg(target_arch = "x86_64")]
fn fast_pairs() -> bool {
    let vendor = core::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn fast_pairs() -> bool {
    false
}

/// A name that is no [`Isa`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set '{0}': use one of portable, neon, avx2, avx512, avx512-bf16, amx-bf16")]
pub struct ParseIsaError(pub String);

impl FromStr for Isa {
    type Err = ParseIsaError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wanted = text.to_ascii_lowercase();
        Isa::ALL.into_iter().find(|isa| isa.name() == wanted).ok_or_else(|| ParseIsaError(text.to_owned()))
    }
}
