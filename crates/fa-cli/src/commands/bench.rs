//! `fa bench`: attention's rate on this machine.

mod append;
pub(crate) mod args;
pub(crate) mod draw;
mod gpu;
mod table;

use std::time::{Duration, Instant};

use anyhow::Context;
use fa_attn::machine;
use fa_attn::{Element, Engine, Tensor};
use fa_core::program::OwnedInputs;
use fa_core::quantize::Codes;
use fa_core::{Dtype, Pass, Problem, TensorLayout, counted};
use fa_lab::random::Random;
use fa_lab::shape::Shape;
use fa_planner::Mode;
use half::{bf16, f16};
use serde::Serialize;

use crate::attention::{self, Inputs};
use crate::compute::{self, Calls, Outputs};
use crate::draw::chart::{Chart, Series};
use crate::draw::record;
use crate::flags::Backend;
use crate::kv_tensor::KvTensor;
use crate::safetensors::Stored;
use crate::sequences::{Sequences, SideTensors};
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::output::si;
use crate::term::progress::Steps;
use args::BenchArgs;

/// The least number of runs of a row, whatever they take.
const LEAST_RUNS: usize = 3;

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    machine: Machine,
    commit: &'static str,
    rows: Vec<Row>,
}

impl Report {
    /// The rows of `timings`, on `machine`.
    fn of(machine: &Machine, timings: &[(&Problem, Timing)]) -> Report {
        let rows = timings.iter().map(|(problem, timing)| row(problem, timing, machine)).collect();
        Report { machine: machine.clone(), commit: fa_lab::record::COMMIT, rows }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Machine {
    cpu: String,
    backend: &'static str,
    isa: Option<&'static str>,
    threads: Option<usize>,
    /// f32 products on these threads, an addition and a multiplication each.
    fma_peak_gflops: Option<f64>,
    /// Of the products that the rows' type takes.
    dtype: Dtype,
    /// The same of them: what `of peak` refers to.
    peak_gflops: Option<f64>,
}

/// One measurement.
#[derive(Debug, Serialize)]
struct Row {
    /// `fwd` or `bwd`.
    kind: &'static str,
    #[serde(flatten)]
    shape: Shape,
    /// What computed it.
    spec: String,
    runs: usize,
    ms_median: f64,
    ms_min: f64,
    tflops: f64,
    /// Share of the machine's peak.
    peak_share: f64,
}

/// Least time for a row where the caller does not say.
const SECONDS: f64 = 0.5;

/// Runs the command.
///
/// # Errors
/// Bad input or an unwritable target; both are found before anything is measured.
pub(crate) fn command(args: &BenchArgs) -> anyhow::Result<Verdict> {
    if let Some(record) = &args.draw {
        return record::redraw("fa bench", record, args.plot.as_deref(), draw::Record::draw);
    }
    args.gpu.headers.choose()?;
    if args.append {
        return append::command(args);
    }
    if on_gpu(args) {
        return gpu::command(args);
    }
    if let Some(flag) = args.gpu.given() {
        return Err(InputError::Usage(format!("{flag} is for GPUs: use --backend cuda")).into());
    }
    let problems = args.in_pages(args.shapes.problems(Dtype::F32)?)?;
    problems.iter().try_for_each(|problem| attention::check_memory(problem, args.mode != Mode::Fwd))?;
    let destinations = Destinations::probe(args.json.as_deref(), args.plot.as_deref(), &[])?;
    let backend = if args.backend == Backend::Auto { Backend::Cpu } else { args.backend };
    let first = problems.first().context("there is no shape to measure")?;
    let engine = compute::engine(backend, &args.cpu)?;
    let about = engine.bind(first, Pass::Forward)?.report();
    let gigaflops = |dtype: Dtype| engine.peak(dtype).map(|rate| rate / 1e9);
    let mut machine = Machine {
        cpu: machine::cpu().name,
        backend: about.backend,
        isa: about.isa,
        threads: about.threads,
        fma_peak_gflops: gigaflops(Dtype::F32),
        dtype: first.types.wide(),
        peak_gflops: gigaflops(first.types.wide()),
    };
    let mut timings = Vec::new();
    let mut steps = Steps::new(problems.len());
    for problem in &problems {
        let name = format!("N {} hd {}", problem.lengths.max_k(), problem.head_dim);
        if let Some(note) =
            machine.peak_gflops.and_then(|peak| note_of_a_long_row(&name, problem, args.mode, peak))
        {
            eprintln!("{note}");
        }
        steps.begin(name);
        let measured = match problem.types.wide() {
            Dtype::F32 => measure::<f32>(args, &engine, problem),
            Dtype::F16 => measure::<f16>(args, &engine, problem),
            Dtype::Bf16 => measure::<bf16>(args, &engine, problem),
            Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                unreachable!("the shapes' flags refuse it")
            }
        }?;
        timings.extend(measured.into_iter().map(|timing| (problem, timing)));
        destinations.keep(&Report::of(&machine, &timings))?;
        steps.advance();
    }
    drop(steps);
    // Measured at another time, on a machine that is busy then, the peak could be lower than a rate.
    let higher = |before: Option<f64>, dtype| before.zip(gigaflops(dtype)).map(|(a, b)| a.max(b));
    machine.fma_peak_gflops = higher(machine.fma_peak_gflops, Dtype::F32);
    machine.peak_gflops = higher(machine.peak_gflops, machine.dtype);
    let report = Report::of(&machine, &timings);
    destinations.write(&report, || draw(&report, args), || table(&report))?;
    Ok(Verdict::Good)
}

/// Whether the GPU is measured: asked for, or there and suited to what is asked.
fn on_gpu(args: &BenchArgs) -> bool {
    match args.backend {
        Backend::Cuda => true,
        Backend::Cpu | Backend::Reference => false,
        Backend::Auto => {
            let halves = matches!(args.shapes.dtype, Some(Dtype::F16 | Dtype::Bf16 | Dtype::E4m3));
            let of_the_cpu = args.cpu.isa.is_some() || args.cpu.threads.is_some() || args.seconds.is_some();
            let suited = args.mode != Mode::Both && (halves || args.gpu.given().is_some()) && !of_the_cpu;
            suited && fa_kernels::driver::probe().is_ok()
        }
    }
}

impl Machine {
    /// The peak that rates are compared with.
    fn peak_gflops(&self) -> f64 {
        self.peak_gflops.unwrap_or(f64::NAN)
    }

    fn text(&self) -> String {
        let threads = self.threads.map(|threads| counted(threads, "thread"));
        let backend = self.isa.unwrap_or(self.backend).to_owned();
        let peak = format!("{} multiply-add peak {}", self.dtype, si(self.peak_gflops() * 1e9, "FLOP/s"));
        let parts = [Some(self.cpu.clone()), Some(backend), threads, Some(peak)];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

struct Timing {
    kind: &'static str,
    flops: f64,
    times: Vec<Duration>,
    /// What computed.
    spec: String,
}

fn measure<T: Element + Stored>(
    args: &BenchArgs,
    engine: &Engine,
    problem: &Problem,
) -> anyhow::Result<Vec<Timing>> {
    let inputs = random_inputs::<T>(problem, args.mode != Mode::Fwd);
    let least = Duration::from_secs_f64(args.seconds.unwrap_or(SECONDS));
    let backward = (args.mode != Mode::Fwd).then_some(Pass::Backward { deterministic: false });
    let calls = Calls::bind(engine, problem, backward)?;
    let about = calls.forward.report();
    let spec = about.isa.map_or(about.backend.to_owned(), |isa| format!("{}-{isa}", about.backend));
    let mut outputs = Outputs::new(&inputs)?;
    let mut measured = Vec::new();
    // The forward runs once in any case: the backward needs its results.
    let warm_up = calls.forward(&inputs, &mut outputs)?;
    tracing::debug!(?problem, ?warm_up, "warm");
    if args.mode != Mode::Bwd {
        let times = repeat(least, || calls.forward(&inputs, &mut outputs))?;
        measured.push(Timing { kind: "fwd", flops: problem.flops_forward(), times, spec: spec.clone() });
    }
    if args.mode != Mode::Fwd {
        calls.backward(&inputs, &mut outputs)?;
        let times = repeat(least, || {
            calls.backward(&inputs, &mut outputs)?.context("a backward was asked for without a gradient")
        })?;
        measured.push(Timing { kind: "bwd", flops: problem.flops_backward(), times, spec });
    }
    Ok(measured)
}

/// That a row takes over a minute on a CPU of `peak` GFLOP/s, where it does: nothing is shown until it ends.
fn note_of_a_long_row(name: &str, problem: &Problem, mode: Mode, peak: f64) -> Option<String> {
    let calls = (LEAST_RUNS + 1) as f64;
    let forward = if mode == Mode::Bwd { 1.0 } else { calls };
    let backward = if mode == Mode::Fwd { 0.0 } else { calls };
    let flops = forward * problem.flops_forward() + backward * problem.flops_backward();
    let seconds = flops / (peak * 1e9);
    let at_least = match seconds {
        ..60.0 => return None,
        60.0..7200.0 => format!("{:.0} minutes", seconds / 60.0),
        _ => format!("{:.0} hours", seconds / 3600.0),
    };
    Some(format!(
        "note: {name}: {}, of which this CPU computes {} at best, takes {at_least} or more; shorter \
         sequences or fewer heads take less",
        si(flops, "FLOP"),
        si(peak * 1e9, "FLOP/s"),
    ))
}

/// Runs until `least` time has passed, but a few times at least.
fn repeat(
    least: Duration,
    mut run: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<Vec<Duration>> {
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < LEAST_RUNS || start.elapsed() < least {
        times.push(run()?);
    }
    Ok(times)
}

/// Inputs like those of a layer: independent, of about unit variance, the same on every run.
fn random_inputs<T: Element + Stored>(problem: &Problem, with_dout: bool) -> Inputs<T> {
    use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
    let mut random = Random::new(1);
    // Heads before positions, as the libraries that this is compared with have it.
    let layout = TensorLayout::Bhsd;
    let mut tensor = |shape: [usize; 4]| {
        let data = (0..shape.iter().product()).map(|_| T::from_f32(random.normal())).collect();
        Tensor { data, shape, layout }
    };
    let types = problem.types;
    let shapes = [(q_shape(problem), types.q), (k_shape(problem), types.kv), (v_shape(problem), types.kv)];
    let [q, k, v] = shapes.map(|(shape, dtype)| match Codes::of(dtype) {
        Some(codes) => {
            let [batch, seqlen, heads, elements] = shape;
            let drawn = tensor([batch, seqlen, heads, elements * codes.per_byte()]);
            let values: Vec<f32> = drawn.data.iter().map(|value| value.to_f32()).collect();
            // As with a descale of amax / largest, for an amax of some five.
            let data = codes.pack(&values, codes.largest() / 5.0).collect();
            KvTensor::Codes(Tensor { data, shape, layout }, codes)
        }
        None => KvTensor::Same(tensor(shape)),
    });
    Inputs {
        problem: *problem,
        computed: *problem,
        layout,
        q,
        k,
        v,
        dout: with_dout.then(|| tensor(out_shape(problem))),
        sides: SideTensors::even(problem),
        program: OwnedInputs::drawn(problem, 0),
        sequences: Sequences::default(),
        new: None,
        grown: false,
    }
}

fn row(problem: &Problem, timing: &Timing, machine: &Machine) -> Row {
    let (kind, flops) = (timing.kind, timing.flops);
    let mut times = timing.times.clone();
    times.sort();
    let middle = times.len() / 2;
    let median = if times.len() % 2 == 1 { times[middle] } else { (times[middle - 1] + times[middle]) / 2 };
    let tflops = if median.is_zero() { 0.0 } else { flops / median.as_secs_f64() / 1e12 };
    Row {
        kind,
        shape: Shape::from(problem),
        spec: timing.spec.clone(),
        runs: times.len(),
        ms_median: median.as_secs_f64() * 1e3,
        ms_min: times[0].as_secs_f64() * 1e3,
        tflops,
        peak_share: tflops * 1e3 / machine.peak_gflops(),
    }
}

fn table(report: &Report) -> String {
    let mut table = output::table(&[
        "kind", "dtype", "batch", "heads", "seqlen", "head dim", "mask", "ms", "rate", "of peak", "runs",
    ]);
    for row in &report.rows {
        table.add_row([
            row.kind.to_owned(),
            row.shape.types(),
            row.shape.batch.to_string(),
            row.shape.heads(),
            row.shape.rows(),
            row.shape.head_dims(),
            row.shape.mask_and_scores(),
            format!("{:.3}", row.ms_median),
            si(row.tflops * 1e12, "FLOP/s"),
            format!("{:.0} %", row.peak_share * 100.0),
            row.runs.to_string(),
        ]);
    }
    format!("{}\n{}", report.machine.text(), output::table_text(&table))
}

fn draw(report: &Report, args: &BenchArgs) -> anyhow::Result<String> {
    let mut series: Vec<Series> = Vec::new();
    let mut shapes: Vec<String> = Vec::new();
    for row in &report.rows {
        let pages = row.shape.page.map_or_else(String::new, |page| format!(", pages of {page}"));
        let shape = format!("hd {} {}{pages}", row.shape.head_dims(), row.shape.mask_and_scores());
        let color = shapes.iter().position(|known| *known == shape).unwrap_or_else(|| {
            shapes.push(shape.clone());
            shapes.len() - 1
        });
        let label = format!("{} {shape}", row.kind);
        let point = (row.shape.seqlen_k as f64, row.tflops * 1e3);
        match series.iter_mut().find(|line| line.label == label) {
            Some(line) => line.points.push(point),
            None => series.push(Series { label, points: vec![point], color, dashed: row.kind == "bwd" }),
        }
    }
    for line in &mut series {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    let batch = args.shapes.batch.map_or_else(String::new, |batch| format!("batch {batch}, "));
    let dtype = report.rows.first().map_or(Dtype::F32, |row| row.shape.dtype);
    let title = format!("Attention, {dtype}, {batch}{} heads: {}", args.shapes.heads.q, report.machine.cpu);
    let peak = report.machine.peak_gflops;
    let ceiling = peak.map(|peak| (peak, format!("{dtype} multiply-add peak {peak:.0} GFLOP/s")));
    Chart { title, x_label: "keys per sequence", y_label: "GFLOP/s", ceiling, series, shared: None }
        .into_svg()
}

#[cfg(test)]
mod tests {
    use fa_core::Mask;

    use super::*;

    #[test]
    fn a_row_that_takes_long_says_so_before() {
        // 4 * 64 * (2 * 10^5)^2 operations, four times: 41 TFLOP at 100 GFLOP/s.
        let long = Problem::square(1, 200_000, 1, 64, Mask::FULL, Dtype::F32);
        let note = |problem: &Problem, mode| note_of_a_long_row("N", problem, mode, 100.0);
        let text = note(&long, Mode::Fwd).expect("seven minutes");
        assert!(text.contains("41.0 TFLOP") && text.contains("takes 7 minutes or more"), "{text}");
        let text =
            note(&Problem::square(1, 10_000_000, 8, 64, Mask::FULL, Dtype::F32), Mode::Fwd).expect("days");
        assert!(text.contains("hours"), "{text}");
        // One forward and four backwards of 2.5 forwards.
        assert!(note(&long, Mode::Bwd).is_some_and(|text| text.contains("19 minutes")));
        assert_eq!(note(&Problem::square(1, 4096, 8, 64, Mask::FULL, Dtype::F32), Mode::Both), None);
    }
}
