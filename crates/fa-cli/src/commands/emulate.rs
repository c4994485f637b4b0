//! `fa emulate`: kernels run on the host, without a GPU, and what is found in them.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use clap::Args;
use fa_attn::atomic_file;
use fa_attn::device::Half;
use fa_core::{Alibi, Arch, Dtype, KernelSpec, Lengths, Mask, MaskKind, Problem, ScoreMod, TensorLayout};
use fa_emu::mutate::{self, Statement};
use fa_emu::record::{Attempt, Candidate, Record, prove, today};
use fa_emu::sample::sample;
use fa_emu::sweep::{SEEDS, Trials};
use fa_emu::{
    Batch, Counters, Emulator, Extras, Finding, Lie, Options, Pace, Placing, Planned, Proof, Trial, Unit,
    timeline,
};
use fa_kernels::Headers;
use fa_lab::grid::{Arrangement, Case, Extent};
use fa_lab::sequences::{Ragged, Sequences};
use fa_lab::shape::HeadDim;
use fa_lab::tensors::Inputs;
use serde::{Deserialize, Serialize};

use crate::flags::{Heads, MaskArgs, Seqlen};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::{self, Steps};

/// `fa emulate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct EmulateArgs {
    /// The kernel: a spec as `fa plan --format ron` prints it, or a shipped one
    #[arg(required_unless_present_any = ["shipped", "sample", "mutate"])]
    pub spec: Option<PathBuf>,
    /// Architecture to compile for [default: the first that the file names, else the kernel's own]
    #[arg(long)]
    pub arch: Option<Arch>,
    /// Sequence length, or queries x keys as in 1x4096
    #[arg(long, value_name = "N[xM]", default_value = "300")]
    pub seqlen: Seqlen,
    /// Independent sequences
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Sequences of these lengths in place of equal ones, by the kernel's form that reads lengths
    /// [default for kernels that do: 300,77,0,129,1x300,40x0,200x513]
    #[arg(long, value_name = "N[xM],...", value_delimiter = ',', conflicts_with_all = ["seqlen", "batch"])]
    pub lengths: Vec<Seqlen>,
    /// How the queries of sequences of different lengths lie
    #[arg(long, value_name = "ROWS", default_value = "packed")]
    pub rows_q: Rows,
    /// How their keys lie, unless in pages
    #[arg(long, value_name = "ROWS", default_value = "packed")]
    pub rows_k: Rows,
    /// Keys in pages of so many, by the kernel's form that reads pages [default for kernels that do: 16]
    #[arg(long, value_name = "N", conflicts_with = "rows_k")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub page: Option<u32>,
    /// By how many rows tensors and bounds exceed the sequences; a kernel must not touch those rows
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub slack: usize,
    /// Several CTAs share a row's keys: the kernel's split form
    #[arg(long)]
    pub split: bool,
    /// ALiBi slopes, per_head or per_sequence_head: the kernel's form that has them
    #[arg(long, value_name = "SLOPES", value_parser = parse_alibi)]
    pub alibi: Option<Alibi>,
    /// A sink for each head: the kernel's form that has them
    #[arg(long)]
    pub sinks: bool,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "2")]
    pub heads: Heads,
    /// Head dim, and the values' if different, as in 192-128 [default: the kernel's]
    #[arg(long, value_name = "D[-DV]")]
    pub headdim: Option<HeadDim>,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Factor on Q K^T [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub scale: Option<f64>,
    /// Soft cap [default for kernels that have one: 15]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub softcap: Option<f64>,
    /// Order of the tensors' axes
    #[arg(long, default_value = "bshd", value_parser = crate::flags::parse_layout)]
    pub layout: TensorLayout,
    /// Elements between rows, a multiple of 8
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gap: usize,
    /// Seed of the schedule: 0 finishes operations at once, 1 as late as it can, others by chance (may be
    /// repeated) [default: 0, 1, 2]
    #[arg(long = "seed", value_name = "N")]
    pub seeds: Vec<u64>,
    /// SMs of the emulated GPU [default: 2, or 64 for split kernels, which divide keys where SMs idle]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub sms: Option<u32>,
    /// Give up after this many steps of the scheduler
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub steps: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write a page with the timeline of one CTA
    #[arg(long, value_name = "FILE.html", conflicts_with_all = ["shipped", "mutate"])]
    pub report: Option<PathBuf>,
    /// The CTA of the timeline
    #[arg(long, value_name = "N", default_value_t = 0, requires = "report")]
    pub cta: u32,
    /// The cases that `fa validate` tries a configuration on, in place of one problem
    #[arg(long, conflicts_with_all = ["report", "shipped", "sample", "mutate", "seqlen", "heads", "batch"])]
    pub grid: bool,
    /// Every shipped kernel and forms of some (packed, paged, split, slopes, sinks) at awkward shapes,
    /// but those that the record knows; it is written
    #[arg(long, conflicts_with_all = ["spec", "mutate"])]
    pub shipped: bool,
    /// So many of the planner's other configurations at awkward shapes: others each day
    #[arg(long, value_name = "N", conflicts_with_all = ["spec", "mutate", "shipped"])]
    pub sample: Option<usize>,
    /// The day of the sample [default: today]
    #[arg(long, value_name = "YYYY-MM-DD", requires = "sample")]
    pub day: Option<String>,
    /// The record of proven kernels
    #[arg(long, value_name = "FILE", default_value = "docs/results/emulated.ron")]
    pub record: PathBuf,
    /// Remove every synchronising statement of the four kernels (or of SPEC), one at a time, and list those
    /// that nothing misses
    #[arg(long)]
    pub mutate: bool,
    /// Of --mutate: only statements whose place contains this, as in sm90/fwd.cuh:120
    #[arg(long, value_name = "TEXT", requires = "mutate")]
    pub statement: Option<String>,
    /// Removals that nothing misses, with the reasons: others make a negative verdict
    #[arg(long, value_name = "FILE", default_value = "docs/results/emulation-survivors.ron")]
    pub survivors: PathBuf,
    /// Threads for --shipped and --mutate [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub threads: Option<u16>,
}

const EXAMPLES: &str = "\
Examples:
  fa emulate crates/fa-kernels/specs/sm90/hd128-causal-bf16.ron --seqlen 300
  fa emulate my.ron --seqlen 113x203 --heads 4:2 --seed 7 --json
  fa emulate my.ron --grid                                 the cases of fa validate --all-configs
  fa emulate my.ron --seqlen 600 --report timeline.html    one CTA's loads, products and waits
  fa emulate my.ron --lengths 300,1x77,0x40 --page 16 --sinks     packed queries, keys in pages, sinks
  fa emulate --shipped                                     all shipped kernels that have changed
  fa emulate --mutate                                      is every barrier missed when it is gone?

Needs a C++ compiler (g++ 11 or clang++ 14 and later; CXX names another), and no GPU. Finds data races, \
missing fences,
reads of what nobody wrote, accesses out of bounds, deadlocks and wrong values, with the line of the kernel. \
It says
nothing about speed, spills, and the rounding within a tensor core.
Exit code 1 when anything is found.";

/// How the rows of one side lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Rows {
    /// End to end
    Packed,
    /// End to end, in rooms of which a part is used
    PackedUsed,
    /// In a room of equal size for each sequence, of which a part is used
    Padded,
}

impl Rows {
    fn lie(self) -> Lie {
        match self {
            Rows::Packed => Lie::Packed,
            Rows::PackedUsed => Lie::PackedUsed,
            Rows::Padded => Lie::Padded,
        }
    }
}

fn parse_alibi(text: &str) -> Result<Alibi, String> {
    let all = [Alibi::PerHead, Alibi::PerSequenceHead];
    all.into_iter().find(|own| own.name() == text).ok_or_else(|| {
        let names = all.map(Alibi::name).join(" or ");
        format!("slopes are {names}")
    })
}

/// One run.
#[derive(Debug, Serialize)]
struct Run {
    seed: u64,
    passed: bool,
    findings: Vec<Finding>,
    faults: Vec<String>,
    values: Vec<Value>,
    counters: Counters,
    touched: Vec<(u32, u32)>,
}

#[derive(Debug, Serialize)]
struct Value {
    tensor: &'static str,
    #[serde(flatten)]
    found: fa_cpu::compare::Comparison,
}

/// What is printed of a kernel.
#[derive(Debug, Serialize)]
struct Report {
    kernel: String,
    arch: Arch,
    fingerprint: String,
    machine: String,
    problem: Problem,
    runs: Vec<Run>,
    passed: bool,
}

/// Runs the command.
///
/// # Errors
/// Bad input, and a machine that cannot emulate; findings are a verdict, not an error.
pub fn command(args: &EmulateArgs) -> anyhow::Result<Verdict> {
    let emulator = progress::spinner("compiling the machine", Emulator::new)?;
    match &args.spec {
        _ if args.shipped => shipped(args, &emulator),
        _ if args.sample.is_some() => sampled(args, &emulator),
        None => mutations(args, &emulator, fa_emu::subjects::subjects()),
        Some(path) => {
            let (spec, arch) = read(args, path)?;
            if args.mutate {
                let case = case(args, &spec)?;
                let subject = mutate::Subject { spec, arch, case };
                return mutations(args, &emulator, vec![("the kernel", vec![subject])]);
            }
            if args.grid { grid(args, &emulator, &spec, arch) } else { one(args, &emulator, &spec, arch) }
        }
    }
}

fn read(args: &EmulateArgs, path: &Path) -> anyhow::Result<(KernelSpec, Arch)> {
    let mut spec = fa_lab::spec_file::read_spec(path)?;
    spec.reads.paged |= args.page.is_some();
    spec.reads.varied |= spec.reads.paged || !args.lengths.is_empty();
    spec.score.alibi |= args.alibi.is_some();
    spec.score.sinks |= args.sinks;
    spec.split |= args.split;
    spec.check()?;
    let shipped =
        std::fs::read_to_string(path).ok().and_then(|text| fa_core::ShippedSpec::from_ron(&text).ok());
    let named = shipped.and_then(|shipped| shipped.archs.first().copied());
    let own = match spec.kernel.family() {
        fa_core::Family::Sm80 => Arch::Sm80,
        fa_core::Family::Sm90 => Arch::Sm90,
    };
    let arch = args.arch.or(named).unwrap_or(own);
    Ok((spec, arch))
}

/// The problem that was asked for, its layout, and lengths, slopes and sinks where it has them.
fn case(args: &EmulateArgs, spec: &KernelSpec) -> anyhow::Result<fa_emu::sweep::Case> {
    let batch = batch(args, spec);
    let lengths = match &batch {
        Some(batch) => batch.lengths(),
        None => Lengths::uniform(args.batch, args.seqlen.q, args.seqlen.k),
    };
    let problem = problem(args, spec, lengths)?;
    let placing = Placing { layout: args.layout, gap: args.gap };
    let extras = batch.map_or_else(|| Extras::NONE.with_mods(&problem), |batch| batch.extras(&problem));
    Ok(fa_emu::sweep::Case { problem, placing, extras })
}

/// The sequences that were asked for, for a kernel that reads their lengths.
fn batch(args: &EmulateArgs, spec: &KernelSpec) -> Option<Batch> {
    if !spec.reads.varied {
        return None;
    }
    let sequences = if args.lengths.is_empty() {
        fa_emu::batches::LENGTHS.to_vec()
    } else {
        args.lengths.iter().map(|own| (own.q, own.k)).collect()
    };
    let k = if spec.reads.paged { Lie::Paged(args.page.unwrap_or(16) as usize) } else { args.rows_k.lie() };
    Some(Batch { sequences, q: args.rows_q.lie(), k, slack: args.slack })
}

fn problem(args: &EmulateArgs, spec: &KernelSpec, lengths: Lengths) -> anyhow::Result<Problem> {
    let given = args.mask.mask();
    let mask = match spec.mask {
        _ if !given.is_full() => given,
        MaskKind::Full => Mask::FULL,
        MaskKind::Causal => Mask::CAUSAL,
        MaskKind::Window => Mask::window(40, 7),
    };
    let (head_dim, head_dim_v) =
        args.headdim.map_or((spec.head_dim as usize, spec.head_dim_v as usize), |dims| (dims.qk, dims.v));
    let problem = Problem {
        lengths,
        heads_q: args.heads.q,
        heads_kv: args.heads.kv,
        head_dim,
        head_dim_v,
        mask,
        types: spec.types,
        softmax_scale: args.scale,
        score: ScoreMod {
            softcap: args.softcap.or_else(|| spec.score.softcap.then_some(15.0)),
            alibi: spec.score.alibi.then(|| args.alibi.unwrap_or(Alibi::PerHead)),
            sinks: spec.score.sinks,
        },
    };
    problem.check()?;
    // What takes seconds of emulation takes a GPU microseconds.
    const LIMIT: f64 = 4e11;
    if problem.flops_forward() > LIMIT {
        let message = format!(
            "{:.1e} operations would be emulated for hours, the limit is {LIMIT:.0e}: use shorter sequences \
             or fewer heads",
            problem.flops_forward()
        );
        return Err(InputError::Usage(message).into());
    }
    if !args.gap.is_multiple_of(8) {
        return Err(InputError::Usage(format!("--gap {} is no multiple of 8", args.gap)).into());
    }
    Ok(problem)
}

fn one(args: &EmulateArgs, emulator: &Emulator, spec: &KernelSpec, arch: Arch) -> anyhow::Result<Verdict> {
    let case = case(args, spec)?;
    let problem = case.problem;
    let unit = progress::spinner("compiling the kernel", || emulator.unit(spec, arch, &Headers::embedded()))?;
    let trial = progress::spinner("computing in f64", || {
        Trial::with(&problem, spec.kernel.pass(), case.placing, &case.extras)
    });
    let seeds = if args.seeds.is_empty() { &SEEDS[..] } else { &args.seeds };
    let mut runs = Vec::new();
    for &seed in seeds {
        let proof = run(args, &unit, &trial, &Options::seed(seed))?;
        runs.push(summary(&unit, &problem, sms(args, spec), seed, proof));
    }
    if let Some(path) = &args.report {
        // A schedule in which operations take as long as their size asks for.
        let seed = seeds[0];
        let pace = if args.seeds.is_empty() { Pace::Paced } else { Options::seed(seed).pace };
        let options = Options { pace, trace_cta: Some(args.cta), ..Options::seed(seed) };
        let proof = run(args, &unit, &trial, &options)?;
        let lead = crate::attention::describe(&problem);
        let page = timeline::page(&format!("{spec} on {arch}"), &lead, args.cta, &proof.outcome);
        atomic_file::write(path, page.as_bytes())?;
    }
    let passed = runs.iter().all(|run| run.passed);
    let report = Report {
        kernel: spec.to_string(),
        arch,
        fingerprint: unit.fingerprint().to_owned(),
        machine: fa_emu::version(),
        problem,
        runs,
        passed,
    };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report, sms(args, spec), spec))?
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

/// The cases of the GPU's grid for this kernel, each under every seed.
fn grid(args: &EmulateArgs, emulator: &Emulator, spec: &KernelSpec, arch: Arch) -> anyhow::Result<Verdict> {
    let unit = progress::spinner("compiling the kernel", || emulator.unit(spec, arch, &Headers::embedded()))?;
    let cases = fa_lab::grid::of_spec("emulated", &spec.to_string(), spec, Extent::Quick);
    let seeds = if args.seeds.is_empty() { &SEEDS[..] } else { &args.seeds };
    let mut steps = Steps::new(cases.len());
    let mut runs = Vec::new();
    for case in &cases {
        steps.begin(case.problem_name());
        let trial = trial_of(case)?;
        for &seed in seeds {
            let options = Options { sms: sms(args, spec), step_limit: args.steps, ..Options::seed(seed) };
            let proof = trial.run(&unit, &options)?;
            runs.push((case.name(), summary(&unit, &case.problem, sms(args, spec), seed, proof)));
        }
        steps.advance();
    }
    drop(steps);
    let passed = runs.iter().all(|(_, run)| run.passed);
    if args.json {
        let report: Vec<_> = runs.iter().map(|(case, run)| CaseRun { case, run }).collect();
        output::print_json(&report)?;
    } else {
        let mut out = format!("kernel   {spec} on {arch}\n");
        for (case, run) in &runs {
            out += &format!(
                "{case}, seed {}: {}\n",
                run.seed,
                if run.passed { "nothing found" } else { "FOUND" }
            );
            for fault in &run.faults {
                out += &format!("  {}\n", fault.replace('\n', "\n  "));
            }
        }
        output::print(&out)?;
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

#[derive(Debug, Serialize)]
struct CaseRun<'a> {
    case: &'a str,
    #[serde(flatten)]
    run: &'a Run,
}

/// A case of the GPU's grid for the emulation: the same values in the same places.
fn trial_of(case: &Case) -> anyhow::Result<Trial> {
    let (layout, gap) = match case.arrangement {
        Arrangement::Bshd => (TensorLayout::Bshd, 0),
        Arrangement::Bhsd => (TensorLayout::Bhsd, 0),
        Arrangement::Gap(gap) => (TensorLayout::Bshd, gap),
        Arrangement::BhsdGap(gap) => (TensorLayout::Bhsd, gap),
        Arrangement::SharedBatch
        | Arrangement::SharedHeads
        | Arrangement::SharedRows
        | Arrangement::FarBatch
        | Arrangement::FarKeys => {
            let message = format!("{} lies as no case of a configuration does", case.name());
            return Err(InputError::Usage(message).into());
        }
    };
    let (values, extras) = match case.problem.types.qkv {
        Dtype::F16 => values_of::<half::f16>(case),
        _ => values_of::<half::bf16>(case),
    };
    Ok(Trial::of_values(&case.problem, case.pass, Placing { layout, gap }, &extras, &values))
}

/// Q, K, V and dO as they lie in their tensors, rows of no sequence zero, and what comes beside them.
fn values_of<T: Half>(case: &Case) -> ([Vec<u16>; 4], Extras) {
    let inputs = case.inputs::<T>();
    let dout = fa_lab::tensors::random_dout(&inputs, case.seed());
    let Inputs { values: [q, k, v], sequences: Sequences { q: of_q, k: of_k }, mods, .. } = inputs;
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = case.problem;
    let spread = |values: &[T], rows: &Ragged, heads: usize, dim: usize| {
        let [outer, inner, ..] = rows.shape(heads, dim);
        let (bits, row) = (T::bits(values), heads * dim);
        let mut all = vec![0u16; outer * inner * row];
        for sequence in 0..rows.sequences() {
            for at in 0..rows.len(sequence) {
                let [n, s] = rows.place(sequence, at);
                let from = (rows.start(sequence) + at) * row;
                all[(n * inner + s) * row..][..row].copy_from_slice(&bits[from..from + row]);
            }
        }
        all
    };
    let values = [
        spread(&q, &of_q, heads_q, head_dim),
        spread(&k, &of_k, heads_kv, head_dim),
        spread(&v, &of_k, heads_kv, head_dim_v),
        spread(&dout, &of_q, heads_q, head_dim_v),
    ];
    let some = |values: Vec<f32>| (!values.is_empty()).then_some(values);
    let extras = Extras {
        cu_q: of_q.cu().map(<[i32]>::to_vec),
        cu_k: of_k.cu().map(<[i32]>::to_vec),
        used_q: of_q.used(),
        used_k: of_k.used(),
        page_table: of_k.table().map(<[i32]>::to_vec),
        alibi_slopes: some(mods.slopes),
        sinks: some(mods.sinks),
    };
    (values, extras)
}

fn sms(args: &EmulateArgs, spec: &KernelSpec) -> u32 {
    args.sms.unwrap_or_else(|| Options::sms_of(spec))
}

fn run(args: &EmulateArgs, unit: &Unit, trial: &Trial, options: &Options) -> anyhow::Result<Proof> {
    let steps = Mutex::new(Steps::new(0));
    let told = |done: u32, all: u32| {
        if let Ok(mut steps) = steps.lock() {
            steps.begin(format!("CTA {done} of {all}"));
        }
    };
    let options = Options {
        sms: sms(args, unit.spec()),
        resident: 2,
        step_limit: args.steps,
        progress: Some(&told),
        ..*options
    };
    Ok(trial.run(unit, &options)?)
}

fn summary(unit: &Unit, problem: &Problem, sms: u32, seed: u64, proof: Proof) -> Run {
    let mut faults = proof.faults();
    let main = proof.outcome.launches.iter().find(|launch| launch.entry == fa_kernels::ENTRY);
    if faults.is_empty()
        && let (Some(planned), Some(main)) = (Planned::of(unit.spec(), problem, unit.arch(), sms), main)
    {
        faults.extend(planned.faults(unit.spec(), &main.counters));
    }
    Run {
        seed,
        passed: faults.is_empty(),
        touched: main.map_or_else(Vec::new, |main| main.touched.clone()),
        counters: proof.outcome.counters(),
        findings: proof.outcome.findings,
        faults,
        values: proof.values.into_iter().map(|(tensor, found)| Value { tensor, found }).collect(),
    }
}

fn text(report: &Report, sms: u32, spec: &KernelSpec) -> String {
    let mut out = format!("kernel   {} on {}\n", report.kernel, report.arch);
    out += &format!("problem  {}\n", crate::attention::describe(&report.problem));
    for run in &report.runs {
        let verdict = if run.passed { "nothing found" } else { "FOUND" };
        out += &format!("seed {:<4}{verdict}\n", run.seed);
        for fault in &run.faults {
            out += &format!("  {}\n", fault.replace('\n', "\n  "));
        }
        for Value { tensor, found } in run.values.iter().filter(|_| run.passed) {
            out += &format!("  {tensor:<7}{found}\n");
        }
    }
    if let Some(run) = report.runs.iter().find(|run| run.passed) {
        let c = &run.counters;
        out += &format!(
            "work     {} in products, {} by TMA and bulk copies, {} by cp.async, {} added to global memory\n",
            output::si(c.flops as f64, "FLOP"),
            output::si((c.tma_bytes + c.bulk_bytes) as f64, "B"),
            output::si(c.cp_async_bytes as f64, "B"),
            output::si(c.red_bytes as f64, "B")
        );
        if let Some(planned) = Planned::of(spec, &report.problem, report.arch, sms) {
            out += &format!(
                "planner  {} in whole tiles ({} that the mask leaves), {} of tiles\n",
                output::si(planned.tile_flops, "FLOP"),
                output::si(planned.problem_flops, "FLOP"),
                output::si(planned.tile_bytes + planned.stat_bytes, "B")
            );
        }
        let phases = c.load_phases + c.store_phases;
        out += &format!(
            "banks    {} wavefronts for {phases} phases of ldmatrix and stmatrix\n",
            c.load_wavefronts + c.store_wavefronts
        );
    }
    out
}

fn workers(args: &EmulateArgs) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, |count| count.get());
    args.threads.map_or_else(cores, usize::from)
}

fn shipped(args: &EmulateArgs, emulator: &Emulator) -> anyhow::Result<Verdict> {
    let candidates =
        fa_emu::shipped::shipped().map_err(|(path, error)| anyhow::anyhow!("{path}: {error}"))?;
    let record = Record::read(&args.record);
    let attempts = attempts(args, emulator, candidates, std::slice::from_ref(&record))?;
    let proven: Vec<_> = attempts.iter().filter_map(|attempt| attempt.proven.clone()).collect();
    if !proven.is_empty() {
        record.write(&args.record, &proven)?;
    }
    verdict(&attempts, &format!(" and written to {}", args.record.display()))
}

fn sampled(args: &EmulateArgs, emulator: &Emulator) -> anyhow::Result<Verdict> {
    let day = args.day.clone().unwrap_or_else(today);
    let candidates = sample(&day, args.sample.unwrap_or(1));
    let attempts = attempts(args, emulator, candidates, &[])?;
    verdict(&attempts, &format!(" of the sample of {day}"))
}

fn attempts(
    args: &EmulateArgs,
    emulator: &Emulator,
    candidates: Vec<Candidate>,
    records: &[Record],
) -> anyhow::Result<Vec<Attempt>> {
    let steps = Mutex::new(Steps::new(candidates.len()));
    let told = |attempt: &Attempt| {
        if let Ok(mut steps) = steps.lock() {
            steps.begin(format!("{} {}", attempt.candidate.name, attempt.candidate.arch));
            steps.advance();
        }
    };
    Ok(prove(emulator, candidates, records, workers(args), &told)?)
}

/// Says what was found in each kernel, and how many there were.
fn verdict(attempts: &[Attempt], proven_where: &str) -> anyhow::Result<Verdict> {
    let mut out = String::new();
    let faulty: Vec<_> = attempts.iter().filter(|attempt| !attempt.faults.is_empty()).collect();
    for attempt in &faulty {
        out += &format!("{} on {}\n", attempt.candidate.name, attempt.candidate.arch);
        for fault in &attempt.faults {
            out += &format!("  {}\n", fault.replace('\n', "\n  "));
        }
    }
    let proven = attempts.iter().filter(|attempt| attempt.proven.is_some()).count();
    let known = attempts.iter().filter(|attempt| attempt.known).count();
    out += &format!(
        "{} kernels: {proven} proven now{proven_where}, {known} known before, {} with findings\n",
        attempts.len(),
        faulty.len()
    );
    output::print(&out)?;
    Ok(if faulty.is_empty() { Verdict::Good } else { Verdict::Bad })
}

/// A removal that nothing notices, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Survivor {
    /// The header.
    file: String,
    /// The statement.
    text: String,
    /// Which of those of this text in the header, from 1.
    occurrence: usize,
    /// Why nothing notices its removal.
    reason: String,
}

impl Survivor {
    fn is(&self, statement: &Statement) -> bool {
        self.file == statement.file && self.text == statement.text && self.occurrence == statement.occurrence
    }
}

fn mutations(
    args: &EmulateArgs,
    emulator: &Emulator,
    kernels: Vec<(&'static str, Vec<mutate::Subject>)>,
) -> anyhow::Result<Verdict> {
    let known: Vec<Survivor> = match std::fs::read_to_string(&args.survivors) {
        Ok(text) => ron::from_str(&text).with_context(|| args.survivors.display().to_string())?,
        Err(_) => Vec::new(),
    };
    let trials = Trials::default();
    let mut jobs = Vec::new();
    for (index, (_, subjects)) in kernels.iter().enumerate() {
        // A header that two kernels share is that of the first.
        let asked = |statement: &Statement| {
            let place = format!("{}:{}", statement.file, statement.line);
            args.statement.as_ref().is_none_or(|text| place.contains(text))
        };
        for subject in subjects {
            let source = fa_emu::source(&subject.spec, subject.arch, &Headers::embedded())?;
            for statement in mutate::statements(&source).into_iter().filter(asked) {
                if !jobs.iter().any(|(_, other): &(usize, Statement)| *other == statement) {
                    jobs.push((index, statement));
                }
            }
        }
    }
    let all = jobs.len();
    let (jobs, done) = (Mutex::new(jobs.into_iter().rev().collect::<Vec<_>>()), Mutex::new(Vec::new()));
    let steps = Mutex::new(Steps::new(all));
    let work = || -> anyhow::Result<()> {
        loop {
            let Some((kernel, statement)) = jobs.lock().map_or(None, |mut jobs| jobs.pop()) else {
                return Ok(());
            };
            let noticed = mutate::noticed(emulator, &kernels[kernel].1, &statement, &trials)?;
            if let Ok(mut steps) = steps.lock() {
                steps.begin(format!("{}:{}", statement.file, statement.line));
                steps.advance();
            }
            if let Ok(mut done) = done.lock() {
                done.push((statement, noticed));
            }
        }
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers(args)).map(|_| scope.spawn(work)).collect();
        handles
            .into_iter()
            .try_for_each(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    drop(steps);
    let mut done = done.into_inner().unwrap_or_default();
    done.sort();
    let mut out = String::new();
    let (mut survivors, mut unexplained) = (0, 0);
    for (statement, noticed) in &done {
        let place = format!("{}:{}", statement.file, statement.line);
        let said = match noticed {
            Some(by) => by.clone(),
            None => {
                survivors += 1;
                let reason = known.iter().find(|own| own.is(statement)).map(|own| own.reason.as_str());
                unexplained += usize::from(reason.is_none());
                format!("NOT NOTICED: {}", reason.unwrap_or("no reason is listed"))
            }
        };
        out += &format!("{place:<24} {}  {said}\n", statement.text);
    }
    let of_list: Vec<_> = known
        .iter()
        .filter(|own| done.iter().any(|(statement, noticed)| own.is(statement) && noticed.is_some()))
        .collect();
    for own in &of_list {
        out += &format!("listed in {} but noticed: {} {}\n", args.survivors.display(), own.file, own.text);
    }
    out += &format!(
        "{} of {all} removals noticed, {unexplained} of the other {survivors} without a listed reason\n",
        all - survivors
    );
    output::print(&out)?;
    Ok(if unexplained == 0 && of_list.is_empty() { Verdict::Good } else { Verdict::Bad })
}
