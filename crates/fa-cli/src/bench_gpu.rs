//! `fa bench` on the GPU: our kernels' rates, and those of others in the same run.

mod draw;
pub mod marks;
mod report;

use fa_planner::Mode;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fa_core::{Arch, Family, KernelSpec, Pass, Problem};
use fa_kernels::{Headers, Source, smem_bytes};
use rayon::prelude::*;

use crate::commands::bench::args::BenchArgs;
use crate::contest::{Arena, Outcome, Turns};
use crate::cuda::{Bound, Device, with_half};
use crate::flags::{PlanFamily, pass_of};
use crate::peers::Peers;
use crate::record::Provenance;
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::progress::Steps;

pub use marks::{Marks, TOKENS, Wanted};
pub use report::KernelRecord;
use report::{PeersRecord, Report, Row};

/// What to measure.
struct Job {
    shapes: Vec<Wanted>,
    specs: Vec<KernelSpec>,
    family: Option<Family>,
    pass: Pass,
    /// Names of the peers that are asked; all, if empty.
    wanted_peers: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU; all are found before anything is measured.
pub fn command(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let job = job(args)?;
    let destinations = Destinations::probe(args.json.as_deref(), args.plot.as_deref())?;
    let device = Device::open()?;
    let mut peers = if args.gpu.peers { Some(Peers::start()?) } else { None };
    let report = measure(&device, &job, peers.as_mut(), args.gpu.turns())?;
    drop(peers);
    destinations.write(&report, || draw::panels(&report), || report.table())?;
    Ok(if report.rows.iter().all(|row| row.error.is_none()) { Verdict::Good } else { Verdict::Bad })
}

fn job(args: &BenchArgs) -> anyhow::Result<Job> {
    let usage = |message: &str| anyhow::Error::from(InputError::Usage(message.to_owned()));
    let mode = match args.mode {
        Mode::Fwd => Pass::Forward,
        Mode::Bwd => Pass::BACKWARD,
        Mode::Both => {
            return Err(usage("on the GPU one pass is measured at a time: use --mode fwd or --mode bwd"));
        }
    };
    let pass = pass_of(mode, args.gpu.deterministic)?;
    if args.cpu.isa.is_some() || args.cpu.threads.is_some() {
        return Err(usage("--isa and --threads are the cpu backend's; leave them out with --backend cuda"));
    }
    if args.seconds.is_some() {
        return Err(usage("--seconds is the CPU's; on the GPU give --reps"));
    }
    if let Some(marks) = args.gpu.marks {
        if marks.backward() != pass.is_backward() {
            return Err(usage(
                "the marks sm80 and sm90 go with --mode fwd, sm80-bwd and sm90-bwd with --mode bwd",
            ));
        }
        let (shapes, family, wanted_peers) = (marks.shapes(), Some(marks.family()), marks.peers());
        return Ok(Job { shapes, specs: Vec::new(), family, pass, wanted_peers });
    }
    let family = args.gpu.family.map(PlanFamily::kernels).transpose()?;
    let shapes = args.shapes.problems_of_halves()?;
    let spec = |path: &PathBuf| spec_for(path, pass, &shapes);
    let specs = args.gpu.specs.iter().map(spec).collect::<Result<_, _>>()?;
    let shapes = shapes.into_iter().map(|problem| Wanted::new(problem, "all")).collect();
    Ok(Job { shapes, specs, family, pass, wanted_peers: Vec::new() })
}

/// The kernel of a file, which has to compute one of the shapes at least: it would be in no row otherwise, and nothing would say so.
fn spec_for(path: &Path, pass: Pass, shapes: &[Problem]) -> Result<KernelSpec, InputError> {
    let spec = crate::spec_file::read_spec_of(path, pass)?;
    let mut reasons = shapes.iter().map(|problem| spec.serves(problem).err());
    match reasons.next().flatten() {
        Some(reason) if reasons.all(|reason| reason.is_some()) => {
            Err(InputError::Usage(format!("{} computes none of the shapes: {reason}", path.display())))
        }
        _ => Ok(spec),
    }
}

fn measure(
    device: &Device,
    job: &Job,
    mut peers: Option<&mut Peers>,
    turns: Turns,
) -> anyhow::Result<Report> {
    let mut report = Report {
        provenance: Provenance::new(device)?,
        reps: turns.rounds * turns.reps,
        rounds: turns.rounds,
        peers: peers.as_deref_mut().map(PeersRecord::of).transpose()?,
        kernels: Vec::new(),
        rows: Vec::new(),
        summary: Vec::new(),
    };
    // Compiling takes a second a kernel and all cores can do it; what goes wrong shows again below.
    job.shapes.par_iter().for_each(|wanted| drop(passes(device, &wanted.problem, job)));
    let mut steps = Steps::new(job.shapes.len());
    for wanted in &job.shapes {
        let problem = &wanted.problem;
        steps.begin(format!("N {} hd {} {}", problem.lengths.max_k(), problem.head_dim, problem.mask));
        let peers = peers.as_deref_mut().map(|peers| (peers, job.wanted_peers.as_slice()));
        let rows = match passes(device, problem, job) {
            Ok(passes) => with_half!(
                problem.types.qkv,
                T => measure_shape::<T>(device, wanted, passes, peers, turns, &mut report.kernels),
                else unreachable!("no kernel is found for other types")
            )?,
            Err(error) if error_is_fatal(&error) => return Err(error.into()),
            Err(error) => vec![Row::failed(wanted, "none", job.pass, error.to_string())],
        };
        report.rows.extend(rows);
        steps.advance();
    }
    report.sum_up();
    Ok(report)
}

/// Where no shape can be measured, as against one that no kernel computes.
fn error_is_fatal(error: &fa_attn::Error) -> bool {
    use fa_attn::Error::{Kernels, Plan};
    use fa_kernels::Error::{Mismatch, Refused, SharedMemory};
    !matches!(error, Plan(_) | Kernels(Mismatch { .. } | Refused { .. } | SharedMemory { .. }))
}

/// The kernel of `spec` for its own pass.
///
/// # Errors
/// [`fa_kernels::Error::Mismatch`] when it does not compute the problem or is for the other pass, and those of compiling and loading.
pub fn bind(
    device: &Device,
    problem: &Problem,
    spec: &KernelSpec,
    pass: Pass,
) -> Result<Bound, fa_kernels::Error> {
    let own = spec.kernel.pass();
    if own.is_backward() != pass.is_backward() {
        let text = |pass: Pass| format!("the {}", pass.name());
        return Err(fa_kernels::Error::Mismatch { what: "pass", kernel: text(own), problem: text(pass) });
    }
    match pass {
        Pass::Forward => device.kernels.forward_with(problem, spec).map(Bound::Forward),
        Pass::Backward { .. } => device.kernels.backward_with(problem, spec).map(Bound::Backward),
    }
}

/// The kernels that run a shape: those given that compute it, or the library's choice.
fn passes(device: &Device, problem: &Problem, job: &Job) -> Result<Vec<Bound>, fa_attn::Error> {
    if job.specs.is_empty() {
        let gpu = device.gpu();
        let pass = match job.pass {
            Pass::Forward => Bound::Forward(gpu.forward(problem, job.family)?),
            Pass::Backward { deterministic } => {
                Bound::Backward(gpu.backward(problem, deterministic, job.family)?)
            }
        };
        return Ok(vec![pass]);
    }
    let mut found = Vec::new();
    let mut mismatch = None;
    for spec in &job.specs {
        match bind(device, problem, spec, job.pass) {
            Ok(pass) => found.push(pass),
            Err(error @ fa_kernels::Error::Mismatch { .. }) => mismatch = Some(error),
            Err(error) => return Err(error.into()),
        }
    }
    match mismatch {
        Some(error) if found.is_empty() => Err(error.into()),
        _ => Ok(found),
    }
}

fn measure_shape<T: crate::cuda::Half>(
    device: &Device,
    wanted: &Wanted,
    passes: Vec<Bound>,
    peers: Option<(&mut Peers, &[String])>,
    turns: Turns,
    kernels: &mut Vec<KernelRecord>,
) -> anyhow::Result<Vec<Row>> {
    let problem = &wanted.problem;
    let pass = passes[0].spec().kernel.pass();
    let mut arena = Arena::<T>::new(device, problem, &passes[0])?;
    let judged = passes.iter().map(|pass| arena.check(pass)).collect::<anyhow::Result<Vec<_>>>()?;
    let specs: Vec<KernelSpec> = passes.iter().map(|pass| pass.spec().clone()).collect();
    let right = passes.into_iter().zip(&judged).filter(|(_, judged)| judged.passed);
    let right: Vec<Bound> = right.map(|(pass, _)| pass).collect();
    let Outcome { ours, peers, peer_errors } = arena.contest(&right, problem, peers, turns)?;
    let peers: BTreeMap<String, f64> =
        peers.into_iter().map(|(name, times)| (name, times.tflops(problem, pass))).collect();
    let mut times = ours.into_iter();
    let mut rows = Vec::new();
    for (spec, judged) in specs.iter().zip(judged) {
        KernelRecord::add(kernels, spec, device.kernels.arch())?;
        if judged.passed {
            let times = times.next().unwrap_or_default();
            rows.push(Row::new(wanted, spec, judged, &times, peers.clone(), peer_errors.clone()));
        } else {
            let error = format!(
                "wrong on sampled rows: off by {:.3e} (tolerance {:.3e}), or not all written",
                judged.max_abs, judged.tolerance
            );
            rows.push(Row::failed(wanted, &spec.to_string(), pass, error));
        }
    }
    Ok(rows)
}

/// SHA-256 over a kernel's translation unit, which holds the spec, and every header that it reaches.
///
/// # Errors
/// A spec that is none, or not for `arch`.
pub fn fingerprint(spec: &KernelSpec, arch: Arch) -> Result<String, fa_kernels::Error> {
    Ok(Source::new(spec, arch, Some(smem_bytes(spec)), &Headers::embedded())?.fingerprint())
}
