//! What a profiler would show of a ladder's steps: registers and occupancy from the compiler and the plan,
//! and where Nsight Compute is on the machine its counters beside what the plan predicts of the same.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use fa_core::{Arch, Family, KernelSpec, Problem};
use fa_kernels::{Cache, Compiler, CompilerKind, ENTRY, Headers, Source, smem_bytes};
use fa_planner::plan::{PlanOptions, plan_spec};
use serde::Serialize;

use crate::device::{self, DeviceInfo};
use crate::error::{Context, Error, Result};
use crate::progress::{Progress, Step};
use crate::record::{COMMIT, KernelRecord, command_line, utc_now, without_logs};
use crate::shape::{HeadDim, Shape};

use super::families;
use super::rungs::Ladder;

/// Nsight Compute's metrics, by the names of the record.
const METRICS: [(&str, &str); 14] = [
    ("registers", "launch__registers_per_thread"),
    ("theoretical_occupancy_pct", "sm__maximum_warps_per_active_cycle_pct"),
    ("achieved_occupancy_pct", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    ("compute_pct", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    ("memory_pct", "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"),
    ("tensor_pipe_pct", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"),
    ("fma_pipe_pct", "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"),
    ("alu_pipe_pct", "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active"),
    ("xu_pipe_pct", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"),
    ("issue_active_pct", "smsp__issue_active.avg.pct_of_peak_sustained_active"),
    ("eligible_warps", "smsp__warps_eligible.avg.per_cycle_active"),
    ("shared_load_wavefronts", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"),
    ("shared_load_conflicts", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"),
    ("shared_store_conflicts", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum"),
];

/// What is profiled.
#[derive(Clone, Debug)]
pub struct Options {
    /// The kernels whose steps are profiled.
    pub family: Family,
    /// The architecture that they are compiled for.
    pub arch: Arch,
    /// Sequence lengths, as of [`super::Options`].
    pub seqlens: Vec<usize>,
    /// Head dims, as of [`super::Options`].
    pub head_dims: Vec<HeadDim>,
    /// This program, which the profiler runs.
    pub program: PathBuf,
    /// Nsight Compute; `None` where it is not to run.
    pub ncu: Option<PathBuf>,
}

/// Counters by the names of the record.
type Counters = BTreeMap<&'static str, f64>;

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The architecture.
    pub arch: Arch,
    /// The compiler.
    pub compiler: String,
    /// The GPU and its driver, where one of the architecture is at hand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceInfo>,
    /// The command line, without the folders of this machine.
    pub command: String,
    /// Commit that the program was built from.
    pub commit: &'static str,
    /// When, in UTC.
    pub date: String,
    /// The profiler's version; `not asked` without one.
    pub profiler: String,
    /// The kernels.
    pub kernels: Vec<KernelRecord>,
    /// A step each.
    pub rows: Vec<Row>,
}

/// One kernel of a step on one shape.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The ladder.
    pub ladder: String,
    /// The step.
    pub step: String,
    /// The problem's shape.
    #[serde(flatten)]
    pub shape: Shape,
    /// The kernel.
    pub spec: String,
    /// Registers that the plan accounts for.
    pub planned_registers: Option<u32>,
    /// Registers that the compiler gives it.
    pub registers: Option<u32>,
    /// CTAs on an SM.
    pub blocks_per_sm: Option<u32>,
    /// CTAs on an SM by the driver's account, where a GPU of the architecture is at hand.
    pub driver_blocks_per_sm: Option<u32>,
    /// Warps of these over those that an SM holds, in percent.
    pub occupancy_pct: Option<f64>,
    /// Shares of a step's clocks by resource as the plan has them, in percent.
    pub planned: BTreeMap<&'static str, f64>,
    /// What Nsight Compute counted.
    pub measured: BTreeMap<&'static str, f64>,
    /// What kept this row from being complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Compiles, plans and, with a profiler, runs every step of the ladders once.
///
/// # Errors
/// No compiler, and a family that has no ladder there; of counters no profiler, no permission, and a GPU of
/// another architecture.
pub fn run(options: &Options, progress: &mut Progress<'_>) -> Result<Report> {
    let arch = options.arch;
    let ladders = families::ladders(options.family, arch, &options.head_dims, &options.seqlens)?;
    let profiler = options.ncu.as_deref().map(|ncu| Profiler::find(ncu, &options.program)).transpose()?;
    let gpu = if profiler.is_some() { Some(device::open()?) } else { device::open().ok() };
    let gpu = match gpu {
        Some(gpu) if gpu.arch() != arch && profiler.is_some() => {
            let own = gpu.arch();
            let why =
                format!("--target {arch}: counters are those of this machine's GPU: use --target {own}");
            return Err(Error::Request(why));
        }
        other => other.filter(|gpu| gpu.arch() == arch),
    };
    let compiler = Compiler::find(CompilerKind::Nvrtc)?;
    let (cache, headers) = (Cache::open_default(), Headers::embedded());
    let mut report = Report {
        arch,
        compiler: compiler.version()?,
        device: gpu.as_ref().map(DeviceInfo::of).transpose()?,
        command: command_line(),
        commit: COMMIT,
        date: utc_now(),
        profiler: profiler.as_ref().map_or("not asked".to_owned(), |own| own.version.clone()),
        kernels: Vec::new(),
        rows: Vec::new(),
    };
    progress(Step::Total(ladders.iter().map(|ladder| ladder.steps.len()).sum()));
    for ladder in &ladders {
        for step in &ladder.steps {
            progress(Step::Begin(format!("{}, {}", ladder.name, step.name)));
            for spec in step.specs.iter().flatten() {
                let programs = Source::programs(spec, arch, Some(smem_bytes(spec)), &headers)?;
                let built = cache.get_all(&compiler, spec, &programs);
                let registers = built.as_ref().map(|built| built[0].report.registers);
                let mut row = row(ladder, &step.name, spec, arch);
                match registers {
                    Ok(registers) => {
                        row.registers = Some(registers);
                        KernelRecord::add(&mut report.kernels, spec, arch)?;
                        if let Some(gpu) = &gpu {
                            row.driver_blocks_per_sm = Some(gpu.kernels.load(spec)?.blocks_per_sm()?);
                        }
                        if let Some(profiler) = &profiler {
                            match profiler.count(&ladder.problem, spec)? {
                                Ok(measured) => row.measured = measured,
                                Err(why) => row.error = Some(format!("ncu: {why}")),
                            }
                        }
                    }
                    Err(error) => row.error = Some(without_logs(&error.to_string())),
                }
                report.rows.push(row);
            }
            progress(Step::Done);
        }
    }
    Ok(report)
}

/// A step's row with what the plan says.
fn row(ladder: &Ladder, step: &str, spec: &KernelSpec, arch: Arch) -> Row {
    let mut row = Row {
        ladder: ladder.name.clone(),
        step: step.to_owned(),
        shape: Shape::from(&ladder.problem),
        spec: spec.to_string(),
        planned_registers: None,
        registers: None,
        blocks_per_sm: None,
        driver_blocks_per_sm: None,
        occupancy_pct: None,
        planned: BTreeMap::new(),
        measured: BTreeMap::new(),
        error: None,
    };
    match plan_spec(&ladder.problem, spec, arch, &PlanOptions::default()) {
        Ok(plan) => {
            let threads = f64::from(plan.blocks_per_sm * plan.threads);
            row.planned_registers = Some(plan.regs.total);
            row.blocks_per_sm = Some(plan.blocks_per_sm);
            row.occupancy_pct = Some(100.0 * threads / f64::from(arch.limits().threads_per_sm));
            let clocks = &plan.cost.step;
            let share = |part: f64| 100.0 * part / clocks.total;
            row.planned =
                [("tensor_pct", clocks.tensor), ("softmax_pct", clocks.exp), ("smem_pct", clocks.smem)]
                    .into_iter()
                    .map(|(name, part)| (name, share(part)))
                    .collect();
        }
        Err(why) => row.error = Some(why.to_string()),
    }
    row
}

/// Nsight Compute, and what it runs.
struct Profiler<'a> {
    ncu: &'a Path,
    program: &'a Path,
    version: String,
}

impl<'a> Profiler<'a> {
    fn find(ncu: &'a Path, program: &'a Path) -> Result<Profiler<'a>> {
        let bad = |why: &str| Error::Request(format!("--ncu {}: {why}", ncu.display()));
        let output = Command::new(ncu).arg("--version").output().map_err(|error| {
            if error.kind() != ErrorKind::NotFound {
                return bad(&error.to_string());
            }
            bad("no such program: install Nsight Compute, which CUDA's toolkit has as \
                 /usr/local/cuda/bin/ncu, and give its path")
        })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().find(|line| line.starts_with("Version"));
        let line = line.ok_or_else(|| bad("not Nsight Compute: --version names no version"))?;
        Ok(Profiler { ncu, program, version: format!("ncu {line}") })
    }

    /// The counters of one launch of the kernel, or why there are none of it.
    ///
    /// # Errors
    /// What no other kernel would escape.
    fn count(&self, problem: &Problem, spec: &KernelSpec) -> Result<Result<Counters, String>> {
        let file = tempfile::Builder::new().suffix(".ron").tempfile().context("a file for the spec")?;
        std::fs::write(file.path(), spec.to_ron()).context("a file for the spec")?;
        let metrics: Vec<&str> = METRICS.iter().map(|(_, metric)| *metric).collect();
        let mut command = Command::new(self.ncu);
        // Numbers and units that do not depend on the user's language or on their size.
        command.env("LC_ALL", "C").args(["--csv", "--page", "raw", "--print-units", "base"]);
        // The first launches warm up.
        command.args(["--kernel-name", ENTRY, "--launch-skip", "2", "--launch-count", "1"]);
        command.args(["--metrics", &metrics.join(",")]);
        command.arg(self.program).args(["bench", "--backend", "cuda", "--reps", "1", "--spec"]);
        command.arg(file.path()).args(flags(problem));
        let output = command.output().context(self.ncu.display().to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let found = parse(&text);
        if !found.is_empty() {
            return Ok(Ok(found));
        }
        let said = format!("{text}\n{}", String::from_utf8_lossy(&output.stderr));
        if said.contains("ERR_NVGPUCTRPERM") {
            let why = "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): run this as root, in a \
                       container started with --cap-add SYS_ADMIN, or load the driver's module with \
                       NVreg_RestrictProfilingToAdminUsers=0";
            return Err(Error::Worker(why.to_owned()));
        }
        Ok(Err(why(&said)))
    }
}

/// Of what the profiler and the program printed, the line that says why there are no counters.
fn why(said: &str) -> String {
    // What the program says of itself explains what the profiler says of it.
    let prefixes = ["error: ", "==ERROR== ", "==WARNING== "];
    let of = |prefix: &&str| said.lines().find_map(|line| line.trim().strip_prefix(*prefix));
    prefixes.iter().find_map(of).unwrap_or("no counters").to_owned()
}

/// The flags by which `fa bench` has this problem.
fn flags(problem: &Problem) -> Vec<String> {
    let (q, k) = (problem.lengths.max_q(), problem.lengths.max_k());
    let (heads_q, heads_kv) = (problem.heads_q, problem.heads_kv);
    let mut flags: Vec<String> = [
        ("--batch", problem.lengths.sequences().to_string()),
        ("--seqlen", if q == k { q.to_string() } else { format!("{q}x{k}") }),
        ("--heads", if heads_q == heads_kv { heads_q.to_string() } else { format!("{heads_q}:{heads_kv}") }),
        ("--headdim", format!("{}-{}", problem.head_dim, problem.head_dim_v)),
        ("--dtype", problem.types.q.to_string()),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect();
    if !problem.mask.is_full() {
        flags.push("--causal".to_owned());
    }
    flags
}

/// The metrics of the first kernel in the profiler's raw page as CSV: a line of names, one of units, one of
/// values for each launch; other lines are the program's and the profiler's own.
fn parse(text: &str) -> Counters {
    let mut lines = text.lines().skip_while(|line| !line.starts_with("\"ID\"")).map(cells);
    let (Some(names), Some(_), Some(values)) = (lines.next(), lines.next(), lines.next()) else {
        return BTreeMap::new();
    };
    let value = |metric: &str| {
        let at = names.iter().position(|name| name == metric)?;
        values.get(at)?.replace(',', "").parse::<f64>().ok()
    };
    METRICS.into_iter().filter_map(|(name, metric)| Some((name, value(metric)?))).collect()
}

/// The cells of a line of CSV in which every cell is quoted.
fn cells(line: &str) -> Vec<String> {
    line.trim_matches('"').split("\",\"").map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::super::sm80;
    use super::*;

    /// Answers as Nsight Compute does, by the name of the program that it is to profile.
    #[cfg(unix)]
    fn ask(program: &str) -> Result<Result<Counters, String>> {
        let ncu = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/ncu.sh");
        let problem = Problem::square(2, 1024, 8, 128, Mask::CAUSAL, Dtype::F16);
        let ladders = sm80::ladders(Arch::Sm90, &[1024]).expect("plans");
        let spec = &ladders[0].steps[0].specs.as_ref().expect("a kernel")[0];
        let profiler = Profiler::find(&ncu, Path::new(program)).expect("it says its version");
        assert_eq!(profiler.version, "ncu Version 2025.3.1.0 (build 36398880) (public-release)");
        profiler.count(&problem, spec)
    }

    #[cfg(unix)]
    #[test]
    fn counters_are_read_from_the_profilers_csv() {
        let found = ask("counted").expect("it runs").expect("counters");
        let known = [
            ("registers", 168.0),
            ("theoretical_occupancy_pct", 18.75),
            ("tensor_pipe_pct", 61.42),
            ("shared_load_conflicts", 1_183_744.0),
        ];
        // A counter that the GPU does not have is not there.
        assert_eq!(found, Counters::from(known));
    }

    #[cfg(unix)]
    #[test]
    fn what_the_profiler_lacks_is_said() {
        let refused = ask("refused").expect_err("no permission").to_string();
        for part in ["ERR_NVGPUCTRPERM", "root", "SYS_ADMIN", "NVreg_RestrictProfilingToAdminUsers=0"] {
            assert!(refused.contains(part), "{part}: {refused}");
        }
        let cases = [
            ("unknown", "Failed to find metric regex:^sm__pipe_none"),
            ("failing", "no CUDA driver"),
            ("idle", "No kernels were profiled."),
            ("silent", "no counters"),
        ];
        for (program, part) in cases {
            let why = ask(program).expect("it runs").expect_err("no counters");
            assert!(why.contains(part), "{program}: {why}");
        }
        for (ncu, part) in [("/no/such/ncu", "/usr/local/cuda/bin/ncu"), ("true", "not Nsight Compute")] {
            let error = Profiler::find(Path::new(ncu), Path::new("fa")).err().expect("no profiler");
            assert!(error.is_request() && error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn rows_have_what_the_plan_says() {
        let ladders = sm80::ladders(Arch::Sm90, &[1024]).expect("plans");
        let step = &ladders[0].steps[0];
        let spec = &step.specs.as_ref().expect("a kernel")[0];
        let row = row(&ladders[0], &step.name, spec, Arch::Sm90);
        // Two CTAs of four warps on an SM of 64 warps.
        assert_eq!((row.blocks_per_sm, row.occupancy_pct), (Some(2), Some(12.5)));
        assert!(row.planned["smem_pct"] > row.planned["tensor_pct"], "{row:?}");
        assert_eq!(row.error, None);
    }

    #[test]
    fn the_profiled_problem_is_the_ladders() {
        let square = Problem::square(2, 1024, 8, 128, Mask::CAUSAL, Dtype::F16);
        let grouped = square.with_heads_kv(2);
        assert_eq!(
            flags(&grouped).join(" "),
            "--batch 2 --seqlen 1024 --heads 8:2 --headdim 128-128 --dtype f16 --causal"
        );
    }
}
