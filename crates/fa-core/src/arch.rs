//! GPU architectures: one table of limits and rates.
//!
//! Limits are those of the CUDA C++ Programming Guide's table of technical specifications per compute
//! capability; rates are those of the named board's datasheet or architecture whitepaper, per SM and clock
//! where the datasheet gives a total (total / SMs / boost clock). They rank candidates. Other boards of an
//! architecture are those of [`crate::board`].

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Dtype;

/// A compute capability that the planner knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// A100.
    Sm80,
    /// GeForce RTX 30, A10, A40.
    Sm86,
    /// GeForce RTX 40, L4, L40.
    Sm89,
    /// H100, H200, GH200.
    Sm90,
    /// B200, GB200.
    Sm100,
    /// B300, GB300.
    Sm103,
    /// Jetson AGX Thor.
    Sm110,
    /// GeForce RTX 50, RTX PRO Blackwell.
    Sm120,
    /// GB10 (DGX Spark).
    Sm121,
}

/// Limits and rates of an [`Arch`]. Sizes are in bytes, rates per SM and clock unless stated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArchLimits {
    /// The board that the rates describe.
    pub board: &'static str,
    /// Streaming multiprocessors of that board.
    pub sms: u32,
    /// Boost clock in GHz of that board.
    pub clock_ghz: f64,
    /// Shared memory of an SM.
    pub smem_per_sm: u32,
    /// Shared memory that one CTA may use (opt-in, dynamic).
    pub smem_per_block: u32,
    /// Shared memory that the driver reserves for each resident CTA.
    pub smem_reserved_per_block: u32,
    /// 32-bit registers of an SM.
    pub regs_per_sm: u32,
    /// Registers that one thread may use.
    pub regs_per_thread: u32,
    /// Granularity in which a warp is allocated registers.
    pub reg_alloc_unit: u32,
    /// Resident threads of an SM.
    pub threads_per_sm: u32,
    /// Resident CTAs of an SM.
    pub blocks_per_sm: u32,
    /// Tensor memory columns of an SM (32-bit, 128 lanes) for kernels that use them; 0 on SMs without.
    pub tmem_columns: u32,
    /// Dense f16/bf16 matrix operations with f32 accumulation; a multiply-add counts 2.
    pub tensor_flops: f64,
    /// Special-function results (exp2).
    pub mufu: f64,
    /// f32 operations; a multiply-add counts 2.
    pub fp32_flops: f64,
    /// Shared-memory bytes.
    pub smem_bytes: f64,
    /// L2 size of the board.
    pub l2_bytes: u64,
    /// L2 to SM bytes per clock for the whole board (measured figures from public microbenchmarks, rounded).
    pub l2_bytes_per_clock: f64,
    /// Device-memory bandwidth of the board in bytes per second.
    pub hbm_bytes_per_s: f64,
}

/// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0; rates: H100 SXM5
/// datasheet and the Hopper whitepaper (989.4 TFLOP/s dense bf16 at 1.83 GHz on 132 SMs = 4096 per SM and
/// clock, 3.35 TB/s, 50 MB L2).
const SM90: ArchLimits = ArchLimits {
    board: "H100 SXM5",
    sms: 132,
    clock_ghz: 1.83,
    smem_per_sm: 228 * 1024,
    smem_per_block: 227 * 1024,
    smem_reserved_per_block: 1024,
    regs_per_sm: 65536,
    regs_per_thread: 255,
    reg_alloc_unit: 256,
    threads_per_sm: 2048,
    blocks_per_sm: 32,
    tmem_columns: 0,
    tensor_flops: 4096.0,
    mufu: 16.0,
    fp32_flops: 256.0,
    smem_bytes: 128.0,
    l2_bytes: 50 << 20,
    l2_bytes_per_clock: 5120.0,
    hbm_bytes_per_s: 3.35e12,
};

/// Same guide, 8.0; rates: A100 80GB SXM datasheet (312 TFLOP/s at 1.41 GHz on 108 SMs, 2.04 TB/s, 40 MB L2).
const SM80: ArchLimits = ArchLimits {
    board: "A100 80GB SXM",
    sms: 108,
    clock_ghz: 1.41,
    smem_per_sm: 164 * 1024,
    smem_per_block: 163 * 1024,
    tensor_flops: 2048.0,
    fp32_flops: 128.0,
    l2_bytes: 40 << 20,
    hbm_bytes_per_s: 2.039e12,
    ..SM90
};

/// Same guide, 8.6; rates: NVIDIA A10 datasheet and the GA102 whitepaper (125 TFLOP/s at 1.695 GHz on 72 SMs,
/// 600 GB/s).
const SM86: ArchLimits = ArchLimits {
    board: "A10",
    sms: 72,
    clock_ghz: 1.695,
    smem_per_sm: 100 * 1024,
    smem_per_block: 99 * 1024,
    threads_per_sm: 1536,
    blocks_per_sm: 16,
    tensor_flops: 1024.0,
    fp32_flops: 256.0,
    l2_bytes: 6 << 20,
    l2_bytes_per_clock: 1536.0,
    hbm_bytes_per_s: 600e9,
    ..SM90
};

/// Same guide, 8.9; rates: Ada whitepaper, GeForce RTX 4090 (165.2 TFLOP/s with f32 accumulation at 2.52 GHz
/// on 128 SMs, 1008 GB/s, 72 MB L2).
const SM89: ArchLimits = ArchLimits {
    board: "GeForce RTX 4090",
    sms: 128,
    clock_ghz: 2.52,
    blocks_per_sm: 24,
    tensor_flops: 512.0,
    l2_bytes: 72 << 20,
    l2_bytes_per_clock: 2048.0,
    hbm_bytes_per_s: 1.008e12,
    ..SM86
};

/// Same guide, 10.0; tensor memory: PTX ISA, "Tensor Memory" (512 columns); rates: B200 datasheet (2.25
/// PFLOP/s dense bf16 = 8192 per SM and clock on 148 SMs at 1.85 GHz, 8 TB/s) and public microbenchmarks (126
/// MB L2).
const SM100: ArchLimits = ArchLimits {
    board: "B200",
    sms: 148,
    clock_ghz: 1.85,
    tmem_columns: 512,
    tensor_flops: 8192.0,
    l2_bytes: 126 << 20,
    l2_bytes_per_clock: 10240.0,
    hbm_bytes_per_s: 8.0e12,
    ..SM90
};

/// As 10.0; Blackwell Ultra doubles the special-function rate (B300 architecture overview).
const SM103: ArchLimits = ArchLimits { board: "B300", mufu: 32.0, ..SM100 };

/// Same guide, 11.0 (as 10.0 with 1,536 threads and 24 CTAs of an SM); rates: Jetson Thor datasheet (2,070
/// TFLOP/s of sparse fp4, 258.75 of dense bf16, at 1.575 GHz on 20 SMs, 273 GB/s) and what the driver reports
/// (32 MB L2). It has tensor memory, too: the kernels that use it are compiled for 10.x alone.
const SM110: ArchLimits = ArchLimits {
    board: "Jetson AGX Thor",
    sms: 20,
    clock_ghz: 1.575,
    threads_per_sm: 1536,
    blocks_per_sm: 24,
    tmem_columns: 0,
    l2_bytes: 32 << 20,
    l2_bytes_per_clock: 10240.0 * 20.0 / 148.0,
    hbm_bytes_per_s: 273e9,
    ..SM100
};

/// Same guide, 12.0; rates: RTX Blackwell whitepaper, GeForce RTX 5090 (209.5 TFLOP/s with f32 accumulation
/// at 2.407 GHz on 170 SMs, 1792 GB/s, 96 MB L2).
const SM120: ArchLimits = ArchLimits {
    board: "GeForce RTX 5090",
    sms: 170,
    clock_ghz: 2.407,
    blocks_per_sm: 24,
    tensor_flops: 512.0,
    l2_bytes: 96 << 20,
    l2_bytes_per_clock: 4096.0,
    hbm_bytes_per_s: 1.792e12,
    ..SM86
};

/// Same guide, 12.1; rates: DGX Spark datasheet (48 SMs, 273 GB/s LPDDR5X; 1 PFLOP/s of sparse fp4, so 125
/// TFLOP/s of dense f16: accumulation in f32 does not halve the rate, as it does on GeForce boards).
const SM121: ArchLimits = ArchLimits {
    board: "GB10",
    sms: 48,
    clock_ghz: 2.418,
    tensor_flops: 1024.0,
    l2_bytes: 24 << 20,
    l2_bytes_per_clock: 1024.0,
    hbm_bytes_per_s: 273e9,
    ..SM120
};

impl Arch {
    /// Every architecture, oldest first.
    pub const ALL: [Arch; 9] = [
        Arch::Sm80,
        Arch::Sm86,
        Arch::Sm89,
        Arch::Sm90,
        Arch::Sm100,
        Arch::Sm103,
        Arch::Sm110,
        Arch::Sm120,
        Arch::Sm121,
    ];

    /// Limits and rates.
    pub const fn limits(self) -> &'static ArchLimits {
        match self {
            Arch::Sm80 => &SM80,
            Arch::Sm86 => &SM86,
            Arch::Sm89 => &SM89,
            Arch::Sm90 => &SM90,
            Arch::Sm100 => &SM100,
            Arch::Sm103 => &SM103,
            Arch::Sm110 => &SM110,
            Arch::Sm120 => &SM120,
            Arch::Sm121 => &SM121,
        }
    }

    /// The name used on the command line, in RON and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm80",
            Arch::Sm86 => "sm86",
            Arch::Sm89 => "sm89",
            Arch::Sm90 => "sm90",
            Arch::Sm100 => "sm100",
            Arch::Sm103 => "sm103",
            Arch::Sm110 => "sm110",
            Arch::Sm120 => "sm120",
            Arch::Sm121 => "sm121",
        }
    }

    /// Compute capability (major, minor).
    pub const fn compute_capability(self) -> (u32, u32) {
        match self {
            Arch::Sm80 => (8, 0),
            Arch::Sm86 => (8, 6),
            Arch::Sm89 => (8, 9),
            Arch::Sm90 => (9, 0),
            Arch::Sm100 => (10, 0),
            Arch::Sm103 => (10, 3),
            Arch::Sm110 => (11, 0),
            Arch::Sm120 => (12, 0),
            Arch::Sm121 => (12, 1),
        }
    }

    /// The architecture whose code runs on a device of this compute capability; `None` where no code does.
    pub fn of_compute_capability(major: u32, minor: u32) -> Option<Arch> {
        Arch::ALL.into_iter().rev().find(|arch| {
            let (own_major, own_minor) = arch.compute_capability();
            own_major == major && own_minor <= minor
        })
    }

    /// Whether wgmma, TMA and setmaxnreg (the sm_90a target) exist.
    pub const fn has_wgmma(self) -> bool {
        matches!(self, Arch::Sm90)
    }

    /// Whether kernels by tcgen05 and tensor memory run.
    pub const fn has_tcgen05(self) -> bool {
        self.limits().tmem_columns > 0
    }
}

impl ArchLimits {
    /// Peak dense f16/bf16 rate of the board in operations per second.
    pub fn peak_tensor_flops(&self) -> f64 {
        self.tensor_flops * f64::from(self.sms) * self.clock_ghz * 1e9
    }

    /// The same of products of numbers of `dtype`: those of 8 bits at twice the rate, on boards whose tensor
    /// cores take them (from 8.9 on).
    pub fn peak_tensor_flops_of(&self, dtype: Dtype) -> f64 {
        match dtype {
            Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => 2.0 * self.peak_tensor_flops(),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => self.peak_tensor_flops(),
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that is not the name of an [`Arch`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown architecture '{0}': use one of sm80, sm86, sm89, sm90, sm100, sm103, sm110, sm120, sm121, or \
     the name of a GPU, as in h100"
)]
pub struct ParseArchError(pub String);

impl FromStr for Arch {
    type Err = ParseArchError;

    /// Accepts `sm90`, `sm_90`, `sm_90a`, and a GPU's name in short (`h100`) or as the driver has it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let lower = text.to_ascii_lowercase();
        let wanted = lower.replace('_', "");
        let wanted = wanted.trim_end_matches('a');
        let by_name = Arch::ALL.into_iter().find(|a| a.name() == wanted);
        let of_gpu = || {
            let mut words = lower.split(|c: char| !c.is_ascii_alphanumeric());
            words.find_map(|word| {
                GPUS.into_iter().find(|(_, names)| names.contains(&word)).map(|(arch, _)| arch)
            })
        };
        by_name.or_else(of_gpu).ok_or_else(|| ParseArchError(text.to_owned()))
    }
}

/// The word of a GPU's name that tells its architecture.
const GPUS: [(Arch, &[&str]); 9] = [
    (Arch::Sm80, &["a100", "a800", "a30"]),
    (
        Arch::Sm86,
        &[
            "a10", "a10g", "a16", "a2", "a40", "a2000", "a4000", "a4500", "a5000", "a5500", "a6000", "3050",
            "3060", "3070", "3080", "3090",
        ],
    ),
    (Arch::Sm89, &["ada", "l4", "l40", "l40s", "4050", "4060", "4070", "4080", "4090"]),
    (Arch::Sm90, &["hopper", "h100", "h200", "h20", "h800", "gh200"]),
    (Arch::Sm100, &["b200", "gb200"]),
    (Arch::Sm103, &["b300", "gb300"]),
    (Arch::Sm110, &["thor"]),
    (Arch::Sm120, &["5050", "5060", "5070", "5080", "5090", "pro"]),
    (Arch::Sm121, &["gb10", "spark"]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for arch in Arch::ALL {
            assert_eq!(arch.name().parse(), Ok(arch));
            assert_eq!(arch.name().replace("sm", "sm_").parse(), Ok(arch));
        }
        assert_eq!("sm_90a".parse(), Ok(Arch::Sm90));
        for (text, arch) in [
            ("h100", Arch::Sm90),
            ("H200", Arch::Sm90),
            ("NVIDIA H100 80GB HBM3", Arch::Sm90),
            ("NVIDIA A100-SXM4-80GB", Arch::Sm80),
            ("a10", Arch::Sm86),
            ("NVIDIA GeForce RTX 4090", Arch::Sm89),
            ("NVIDIA RTX 6000 Ada Generation", Arch::Sm89),
            ("B200", Arch::Sm100),
            ("GB300", Arch::Sm103),
            ("rtx_5090", Arch::Sm120),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", Arch::Sm120),
            ("NVIDIA GB10", Arch::Sm121),
            ("NVIDIA Thor", Arch::Sm110),
        ] {
            assert_eq!(text.parse(), Ok(arch), "{text}");
        }
        for text in ["sm75", "v100", "Quadro RTX 6000", "", "a", "90"] {
            assert!(text.parse::<Arch>().is_err(), "{text}");
        }
    }

    #[test]
    fn devices_find_the_newest_code_that_runs_on_them() {
        assert_eq!(Arch::of_compute_capability(8, 7), Some(Arch::Sm86));
        assert_eq!(Arch::of_compute_capability(9, 0), Some(Arch::Sm90));
        assert_eq!(Arch::of_compute_capability(10, 3), Some(Arch::Sm103));
        assert_eq!(Arch::of_compute_capability(11, 0), Some(Arch::Sm110));
        assert_eq!(Arch::of_compute_capability(12, 1), Some(Arch::Sm121));
        assert_eq!(Arch::of_compute_capability(7, 5), None);
    }
}
