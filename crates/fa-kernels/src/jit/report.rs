//! The compiler's report on a kernel: registers, spills, stack, shared memory and warnings.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The resources that ptxas reports, and the warnings of front end and ptxas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// 32-bit registers per thread, as allocated at launch (setmaxnreg then changes each warpgroup's count).
    pub registers: u32,
    /// Bytes of stack per thread.
    pub stack: u32,
    /// Bytes stored by spills, all functions together.
    pub spill_stores: u32,
    /// Bytes loaded by spills, all functions together.
    pub spill_loads: u32,
    /// Bytes stored or loaded by spills of an entry that sums an array's gradient, which are not among the
    /// others, as its registers are not: its tile is the same beside every kernel, so that no other kernel
    /// relieves it.
    #[serde(default)]
    pub spills_of_sums: u32,
    /// Bytes of static shared memory.
    pub static_smem: u32,
    /// Named barriers.
    pub barriers: u32,
    /// Warnings, and notes on lost performance, one line each.
    pub warnings: Vec<String>,
}

/// Faults with which no kernel may ship.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Registers spill to local memory.
    Spills {
        /// Bytes stored.
        stores: u32,
        /// Bytes loaded.
        loads: u32,
    },
    /// ptxas serialises wgmma or ignores setmaxnreg.
    Forbidden {
        /// ptxas's line.
        warning: String,
    },
    /// The log lacks the resource lines: the compiler's format is not the expected one.
    NoResources,
}

/// The first part of the names of entries that sum an array's gradient.
const SUMS: &str = "fa_array_gradient";

/// Bytes that such an entry may store, and load, by spills. At head dims whose sum is 320 and more it loads
/// up to 460.
const MOST_OF_SUMS: u32 = 1024;

/// ptxas codes for lost wgmma performance: wgmma serialised across function boundaries (C7510), for want of
/// registers (C7511, C7512), for operands or accumulators touched inside a stage (C7513 to C7515); setmaxnreg
/// ignored (C7508).
const FORBIDDEN: [&str; 7] = ["C7508", "C7510", "C7511", "C7512", "C7513", "C7514", "C7515"];

impl Report {
    /// Reads a log of NVRTC or nvcc made with `--ptxas-options=-v`; `None` when it holds no resource lines.
    pub fn parse(log: &str) -> Option<Report> {
        let mut report = Report::default();
        let (mut seen, mut is_sum) = (false, false);
        for line in log.lines() {
            if let Some((_, name)) = line.split_once("Compiling entry function '") {
                is_sum = name.starts_with(SUMS);
            } else if line.contains("bytes stack frame") {
                report.stack = report.stack.max(number_before(line, " bytes stack frame").unwrap_or(0));
                let [stores, loads] = [" bytes spill stores", " bytes spill loads"]
                    .map(|suffix| number_before(line, suffix).unwrap_or(0));
                if is_sum {
                    report.spills_of_sums = report.spills_of_sums.max(stores).max(loads);
                } else {
                    report.spill_stores += stores;
                    report.spill_loads += loads;
                }
            } else if let Some(registers) = number_before(line, " registers") {
                seen = true;
                if !is_sum {
                    report.registers = report.registers.max(registers);
                }
                report.barriers = number_before(line, " barriers").unwrap_or(0);
                report.static_smem = number_before(line, " bytes smem").unwrap_or(0);
            } else if is_warning(line) {
                report.warnings.push(line.trim().to_owned());
            }
        }
        seen.then_some(report)
    }

    /// The report on a kernel whose programs have these: what is the most, and all that is lost.
    pub(crate) fn of_all<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Report {
        let mut all = Report::default();
        for own in reports {
            let Report {
                registers,
                stack,
                spill_stores,
                spill_loads,
                spills_of_sums,
                static_smem,
                barriers,
                warnings,
            } = own;
            all.spills_of_sums = all.spills_of_sums.max(*spills_of_sums);
            all.registers = all.registers.max(*registers);
            all.stack = all.stack.max(*stack);
            all.spill_stores += spill_stores;
            all.spill_loads += spill_loads;
            all.static_smem = all.static_smem.max(*static_smem);
            all.barriers = all.barriers.max(*barriers);
            all.warnings.extend_from_slice(warnings);
        }
        all
    }

    /// The first fault, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.fault_beyond(0)
    }

    /// The first fault, if any, of a kernel that may store and load as many bytes by spills.
    pub(crate) fn fault_beyond(&self, spilled: u32) -> Option<Fault> {
        let forbidden = |line: &&String| FORBIDDEN.iter().any(|code| line.contains(code));
        if let Some(warning) = self.warnings.iter().find(forbidden) {
            return Some(Fault::Forbidden { warning: warning.clone() });
        }
        if self.spills_of_sums > MOST_OF_SUMS {
            return Some(Fault::Spills { stores: self.spills_of_sums, loads: self.spills_of_sums });
        }
        (self.spill_stores > spilled || self.spill_loads > spilled)
            .then_some(Fault::Spills { stores: self.spill_stores, loads: self.spill_loads })
    }
}

/// A warning, or one of ptxas's coded notes such as `(C7519)`, which it prints as "info".
fn is_warning(line: &str) -> bool {
    line.contains("warning") && !line.starts_with("Remark") || line.contains(" (C7")
}

/// The number that ends right before `suffix`.
fn number_before(line: &str, suffix: &str) -> Option<u32> {
    let head = &line[..line.find(suffix)?];
    let digits = head.len() - head.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    head[head.len() - digits..].parse().ok()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { registers, stack, spill_stores, spill_loads, static_smem, barriers, warnings, .. } =
            self;
        write!(
            f,
            "{registers} registers, {barriers} barriers, {stack} B stack, {spill_stores} B spill stores, "
        )?;
        write!(
            f,
            "{spill_loads} B spill loads, {static_smem} B static shared memory, {} warnings",
            warnings.len()
        )
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Spills { stores, loads } => write!(
                f,
                "registers spill ({stores} B stored, {loads} B loaded): use smaller tiles, fewer stages or \
                 more warps"
            ),
            Fault::Forbidden { warning } => write!(f, "{warning}"),
            Fault::NoResources => write!(f, "its compile log has no ptxas resource lines"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_from_a_log_of_nvrtc() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n\
                   ptxas         .     616 bytes stack frame, 720 bytes spill stores, 724 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 616 bytes cumulative stack size, 1024 \
                   bytes smem\n\
                   ptxas info    : Compile time = 64.580 ms\n";
        let report = Report::parse(log).unwrap();
        let expected = Report {
            registers: 32,
            stack: 616,
            spill_stores: 720,
            spill_loads: 724,
            spills_of_sums: 0,
            static_smem: 1024,
            barriers: 1,
            warnings: vec![],
        };
        assert_eq!(report, expected);
        assert_eq!(report.fault(), Some(Fault::Spills { stores: 720, loads: 724 }));
    }

    #[test]
    fn lost_performance_is_a_fault_though_ptxas_calls_it_info() {
        let log = "k.cu(5): warning #177-D: variable \"x\" was declared but never referenced\n\
                   Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"\n\
                   ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\n\
                   ptxas info    : Used 8 registers, used 0 barriers\n";
        let report = Report::parse(log).unwrap();
        assert_eq!(report.warnings.len(), 2);
        assert!(matches!(report.fault(), Some(Fault::Forbidden { warning }) if warning.contains("C7508")));
    }

    #[test]
    fn what_sums_an_arrays_gradient_may_spill_more_than_the_kernel_beside_it() {
        let log = |of_sums: u32, of_kernel: u32| {
            let entry = |name: &str, registers: u32, spilled: u32| {
                format!(
                    "ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n\
                     ptxas         .     40 bytes stack frame, 48 bytes spill stores, \
                     {spilled} bytes spill loads\n\
                     ptxas info    : Used {registers} registers, used 1 barriers\n"
                )
            };
            let all = [entry("fa_array_gradient_0", 255, of_sums), entry("fa_kernel", 168, of_kernel)];
            Report::parse(&all.concat()).unwrap()
        };
        let report = log(332, 60);
        assert_eq!((report.registers, report.spill_loads, report.spills_of_sums), (168, 60, 332));
        assert_eq!(report.fault_beyond(64), None);
        assert_eq!(log(332, 72).fault_beyond(64), Some(Fault::Spills { stores: 48, loads: 72 }));
        assert!(matches!(log(1028, 60).fault_beyond(64), Some(Fault::Spills { .. })));
    }

    #[test]
    fn a_log_without_resources_is_no_report() {
        assert_eq!(Report::parse("1 error detected in the compilation of \"k.cu\"."), None);
    }
}
