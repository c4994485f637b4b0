//! Boards: what GPUs of one architecture differ in, as their datasheets publish it.
//!
//! A board is its architecture's limits with its own number of SMs, clock, matrix rate, L2 and memory.
//! Datasheets give the dense f16/bf16 rate with f32 accumulation of the whole board (half of what they call
//! sparse); per SM and clock it is that rate over SMs and boost clock. The rate of the L2, which no datasheet
//! has, is that of the architecture's own board per SM.

use std::fmt;
use std::str::FromStr;

use crate::arch::{Arch, ArchLimits};

/// A GPU as it is sold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Board {
    /// The name on the command line.
    pub name: &'static str,
    /// Words that its name has as the driver reports it.
    words: &'static [&'static str],
    /// Its architecture.
    pub arch: Arch,
    /// Its limits and rates.
    pub limits: ArchLimits,
    /// Dense f16/bf16 TFLOP/s with f32 accumulation as published.
    pub tflops: f64,
    /// Where the figures come from.
    pub source: &'static str,
}

/// What the driver reports of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reported {
    /// SMs.
    pub sms: u32,
    /// Highest SM clock in GHz.
    pub clock_ghz: f64,
    /// Bytes of the L2.
    pub l2_bytes: u64,
    /// Memory bandwidth in bytes per second.
    pub hbm_bytes_per_s: f64,
}

/// A board of `arch` by name on the command line, words, marketing name, SMs, GHz, FLOP per SM and clock, L2
/// in MiB, GB/s, published TFLOP/s and source.
macro_rules! board {
    ($arch:ident, $name:literal, [$($word:literal),*], $board:literal, $sms:literal, $ghz:literal,
        $flops:literal,
     $l2:literal, $gbs:literal, $tflops:literal, $source:literal) => {{
        let own = Arch::$arch.limits();
        Board {
            name: $name,
            words: &[$($word),*],
            arch: Arch::$arch,
            limits: ArchLimits {
                board: $board,
                sms: $sms,
                clock_ghz: $ghz,
                tensor_flops: $flops,
                l2_bytes: $l2 << 20,
                l2_bytes_per_clock: own.l2_bytes_per_clock * $sms as f64 / own.sms as f64,
                hbm_bytes_per_s: $gbs * 1e9,
                ..*own
            },
            tflops: $tflops,
            source: $source,
        }
    }};
}

/// Every board, by architecture; the first of each is the one that [`Arch::limits`] describes.
#[rustfmt::skip]
pub const BOARDS: [Board; 25] = [
    board!(Sm80, "a100", ["a100"], "A100 80GB SXM", 108, 1.41, 2048.0, 40, 2039.0, 312.0,
        "A100 80GB datasheet"),
    board!(Sm80, "a30", ["a30"], "A30", 56, 1.44, 2048.0, 24, 933.0, 165.0, "A30 datasheet"),
    board!(Sm86, "a10", ["a10"], "A10", 72, 1.695, 1024.0, 6, 600.0, 125.0, "A10 datasheet"),
    board!(Sm86, "a10g", ["a10g"], "A10G", 80, 1.71, 512.0, 6, 600.0, 70.0, "A10G datasheet (AWS G5)"),
    board!(Sm86, "a40", ["a40"], "A40", 84, 1.74, 1024.0, 6, 696.0, 149.7, "A40 datasheet"),
    board!(Sm86, "a6000", ["a6000"], "RTX A6000", 84, 1.8, 1024.0, 6, 768.0, 154.8, "RTX A6000 datasheet"),
    board!(Sm86, "rtx3090", ["3090"], "GeForce RTX 3090", 82, 1.695, 512.0, 6, 936.0, 71.0,
        "GA102 whitepaper"),
    board!(Sm89, "rtx4090", ["4090"], "GeForce RTX 4090", 128, 2.52, 512.0, 72, 1008.0, 165.2,
        "Ada whitepaper"),
    board!(Sm89, "l4", ["l4"], "L4", 58, 2.04, 1024.0, 48, 300.0, 121.0, "L4 datasheet"),
    board!(Sm89, "l40", ["l40"], "L40", 142, 2.49, 512.0, 96, 864.0, 181.05, "L40 datasheet"),
    board!(Sm89, "l40s", ["l40s"], "L40S", 142, 2.49, 1024.0, 96, 864.0, 362.05, "L40S datasheet"),
    board!(Sm89, "rtx6000ada", ["6000", "ada"], "RTX 6000 Ada", 142, 2.505, 1024.0, 96, 960.0, 364.2,
        "Ada whitepaper, professional"),
    board!(Sm90, "h100", ["h100"], "H100 SXM5", 132, 1.83, 4096.0, 50, 3350.0, 989.4, "H100 datasheet"),
    board!(Sm90, "h100-pcie", ["h100", "pcie"], "H100 PCIe", 114, 1.62, 4096.0, 50, 2000.0, 756.0,
        "H100 datasheet"),
    board!(Sm90, "h100-nvl", ["h100", "nvl"], "H100 NVL", 132, 1.545, 4096.0, 50, 3900.0, 835.0,
        "H100 NVL datasheet"),
    board!(Sm90, "h200", ["h200"], "H200 SXM", 132, 1.83, 4096.0, 50, 4800.0, 989.4, "H200 datasheet"),
    board!(Sm90, "gh200", ["gh200"], "GH200", 132, 1.83, 4096.0, 50, 4000.0, 989.4, "GH200 datasheet, HBM3"),
    board!(Sm100, "b200", ["b200"], "B200", 148, 1.85, 8192.0, 126, 8000.0, 2250.0, "B200 datasheet"),
    board!(Sm103, "b300", ["b300"], "B300", 148, 1.85, 8192.0, 126, 8000.0, 2250.0,
        "HGX B300 datasheet: the f16 rate of B200"),
    board!(Sm110, "thor", ["thor"], "Jetson AGX Thor", 20, 1.575, 8192.0, 32, 273.0, 258.75,
        "Jetson Thor datasheet: 2,070 TFLOP/s of sparse fp4 are 8 times its dense f16"),
    board!(Sm120, "rtx5090", ["5090"], "GeForce RTX 5090", 170, 2.407, 512.0, 96, 1792.0, 209.5,
        "RTX Blackwell whitepaper"),
    board!(Sm120, "rtx5080", ["5080"], "GeForce RTX 5080", 84, 2.617, 512.0, 64, 960.0, 112.6,
        "RTX Blackwell whitepaper"),
    board!(Sm120, "rtx5070ti", ["5070", "ti"], "GeForce RTX 5070 Ti", 70, 2.452, 512.0, 48, 896.0, 87.9,
        "RTX Blackwell whitepaper"),
    board!(Sm120, "rtxpro6000", ["pro", "6000", "blackwell"], "RTX PRO 6000 Blackwell", 188, 2.617, 1024.0,
        128,
        1792.0, 503.8, "RTX Blackwell PRO whitepaper"),
    board!(Sm121, "spark", ["gb10"], "GB10", 48, 2.418, 1024.0, 24, 273.0, 125.0,
        "DGX Spark datasheet: 1 PFLOP/s of sparse fp4 is 8 times its dense f16"),
];

impl Board {
    /// The board that an architecture's limits and rates describe.
    pub fn of_arch(arch: Arch) -> Board {
        BOARDS.into_iter().find(|board| board.arch == arch).expect("a test finds one of each")
    }

    /// The board whose name as the driver reports it is `text`: of several the one with the most words.
    pub fn of_name(text: &str) -> Option<Board> {
        let lower = text.to_ascii_lowercase();
        let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        let has_all = |board: &&Board| board.words.iter().all(|word| words.contains(word));
        BOARDS.iter().filter(has_all).max_by_key(|board| board.words.len()).copied()
    }

    /// The limits and rates of a GPU of `arch`: of the board of this name where it has as many SMs, else the
    /// architecture's with what the driver reports.
    pub fn limits_of_device(arch: Arch, name: &str, reported: Reported) -> ArchLimits {
        let known = Board::of_name(name).filter(|board| board.arch == arch);
        if let Some(board) = known.filter(|board| board.limits.sms == reported.sms) {
            return board.limits;
        }
        let own = known.map_or(*arch.limits(), |board| board.limits);
        let Reported { sms, clock_ghz, l2_bytes, hbm_bytes_per_s } = reported;
        // Some drivers report no clock and no bus: those rates stay the board's.
        let or = |value: f64, own: f64| if value > 0.0 { value } else { own };
        ArchLimits {
            board: "the GPU at hand",
            sms: sms.max(1),
            clock_ghz: or(clock_ghz, own.clock_ghz),
            l2_bytes: if l2_bytes > 0 { l2_bytes } else { own.l2_bytes },
            l2_bytes_per_clock: own.l2_bytes_per_clock * f64::from(sms.max(1)) / f64::from(own.sms),
            hbm_bytes_per_s: or(hbm_bytes_per_s, own.hbm_bytes_per_s),
            ..own
        }
    }
}

impl fmt::Display for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

/// A text that is not the name of a [`Board`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown board '{0}': use one of {names}, or plan for its architecture with --arch", names = names())]
pub struct ParseBoardError(pub String);

fn names() -> String {
    BOARDS.map(|board| board.name).join(", ")
}

impl FromStr for Board {
    type Err = ParseBoardError;

    /// Accepts the name on the command line, with or without dashes, and the driver's.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let short = |text: &str| text.to_ascii_lowercase().replace(['-', '_', ' '], "");
        let wanted = short(text);
        let by_name = BOARDS.into_iter().find(|board| short(board.name) == wanted);
        by_name.or_else(|| Board::of_name(text)).ok_or_else(|| ParseBoardError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_reproduce_the_datasheets() {
        for Board { name, limits, tflops, .. } in BOARDS {
            let peak = limits.peak_tensor_flops() / 1e12;
            // "1 PFLOP/s" is all that is published of the Spark.
            let rounded = if name == "spark" { 0.06 } else { 0.01 };
            assert!((peak / tflops - 1.0).abs() < rounded, "{name}: {peak} is not {tflops}");
        }
    }

    #[test]
    fn the_first_board_of_an_architecture_is_its_own() {
        for arch in Arch::ALL {
            assert_eq!(Board::of_arch(arch).limits, *arch.limits(), "{arch}");
        }
    }

    #[test]
    fn names_parse_back() {
        for board in BOARDS {
            assert_eq!(board.name.parse(), Ok(board));
        }
        for (text, name) in [
            ("NVIDIA A10G", "a10g"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("H100-PCIE", "h100-pcie"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
            ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
            ("NVIDIA GB10", "spark"),
            ("NVIDIA Thor", "thor"),
        ] {
            assert_eq!(text.parse::<Board>().map(|board| board.name), Ok(name), "{text}");
        }
        let error = "v100".parse::<Board>().expect_err("no such board").to_string();
        assert!(error.contains("unknown board 'v100'") && error.contains("a10g"), "{error}");
    }

    #[test]
    fn a_device_has_its_own_sms_and_rates() {
        let reported = Reported { sms: 132, clock_ghz: 1.98, l2_bytes: 50 << 20, hbm_bytes_per_s: 3.3e12 };
        let h100 = Board::limits_of_device(Arch::Sm90, "NVIDIA H100 80GB HBM3", reported);
        assert_eq!(h100, *Arch::Sm90.limits());
        let h200 = Board::limits_of_device(Arch::Sm90, "NVIDIA H200", reported);
        assert_eq!((h200.board, h200.hbm_bytes_per_s), ("H200 SXM", 4.8e12));
        let few = Reported { sms: 46, clock_ghz: 0.0, l2_bytes: 0, hbm_bytes_per_s: 0.0 };
        let unknown = Board::limits_of_device(Arch::Sm89, "NVIDIA GeForce RTX 4070", few);
        let own = Arch::Sm89.limits();
        assert_eq!((unknown.sms, unknown.clock_ghz, unknown.l2_bytes), (46, own.clock_ghz, own.l2_bytes));
        let laptop = Board::limits_of_device(Arch::Sm120, "NVIDIA GeForce RTX 5090 Laptop GPU", few);
        assert_eq!((laptop.sms, laptop.board), (46, "the GPU at hand"));
    }
}
