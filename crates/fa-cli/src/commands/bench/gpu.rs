//! `fa bench` on the GPU: our kernels' rates, and those of other libraries in the same run.

use std::path::{Path, PathBuf};

use fa_core::{Pass, PinnedSpec, Problem};
use fa_lab::bench::{self, Options};
use fa_lab::marks::{Marks, Wanted};
use fa_lab::spec_file;
use fa_lab::tune::draw::Drawing;
use fa_planner::Mode;
use fa_planner::report::PlanFamily;

use super::args::BenchArgs;
use super::{draw, table};
use crate::draw::record;
use crate::flags::pass_of;
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::progress;

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU; all are found before anything is measured.
pub(crate) fn command(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let options = options(args)?;
    let destinations = Destinations::probe(args.json.as_deref(), args.plot.as_deref(), &args.gpu.specs)?;
    let mut keep = |report: &bench::report::Report| destinations.keep(report);
    let report = bench::run(&options, &mut progress::steps(), &mut keep)?;
    destinations.write(&report, || record::of::<draw::Record>(&report)?.draw(), || table::table(&report))?;
    Ok(if report.rows.iter().all(|row| row.error.is_none()) { Verdict::Good } else { Verdict::Bad })
}

fn options(args: &BenchArgs) -> anyhow::Result<Options> {
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
        marks.check_pass(pass).map_err(InputError::Usage)?;
        if args.gpu.peers && !marks.has_peers() {
            let why = format!("no peer has anything beside the marks {}: leave out --peers", marks.name());
            return Err(InputError::Usage(why).into());
        }
        let shapes = filtered(marks, args.gpu.filter.as_deref())?;
        let problems: Vec<Problem> = shapes.iter().map(|shape| shape.problem).collect();
        let spec = |path: &PathBuf| spec_for(path, pass, &problems);
        return Ok(Options {
            shapes,
            specs: args.gpu.specs.iter().map(spec).collect::<anyhow::Result<_>>()?,
            beside_choice: args.gpu.beside_choice,
            changes: args.gpu.changes.clone(),
            family: marks.family(),
            pass,
            tune: args.gpu.tune,
            peers: args.gpu.peers,
            peer_names: peer_names(marks.peers(), &args.gpu.peer_names),
            turns: args.gpu.turns(),
        });
    }
    let family = args.gpu.family.map(PlanFamily::kernels);
    let seed = args.gpu.seed.unwrap_or(0);
    let (shapes, specs) = match (args.gpu.random, args.gpu.random_packed) {
        (Some(count), _) => {
            let (count, families) = (usize::from(count), family.into_iter().collect());
            (bench::drawn(Drawing { count, seed, passes: vec![pass], families })?, Vec::new())
        }
        (None, Some(count)) => (bench::packed::batches(usize::from(count), seed), Vec::new()),
        (None, None) => {
            let problems = args.in_pages(args.shapes.problems_of_halves()?)?;
            let spec = |path: &PathBuf| spec_for(path, pass, &problems);
            let specs = args.gpu.specs.iter().map(spec).collect::<anyhow::Result<_>>()?;
            let of = if pass.is_backward() { Wanted::new } else { bench::row_of };
            (problems.into_iter().map(|problem| of(problem, "all")).collect(), specs)
        }
    };
    let (peers, turns) = (args.gpu.peers, args.gpu.turns());
    let peer_names = args.gpu.peer_names.clone();
    let (beside_choice, changes) = (args.gpu.beside_choice, args.gpu.changes.clone());
    let tune = args.gpu.tune;
    Ok(Options { shapes, specs, beside_choice, changes, family, pass, tune, peers, peer_names, turns })
}

/// The rows of `marks` that contain `text`.
fn filtered(marks: Marks, text: Option<&str>) -> anyhow::Result<Vec<Wanted>> {
    let mut shapes = marks.shapes();
    let labels: Vec<String> = shapes.iter().map(Wanted::label).collect();
    shapes.retain(|shape| text.is_none_or(|text| shape.label().contains(text)));
    if shapes.is_empty() {
        let (name, text, labels) = (marks.name(), text.unwrap_or_default(), labels.join("\n  "));
        let why =
            format!("--filter {text}: no row of the marks {name} contains it; its rows are\n  {labels}");
        return Err(InputError::Usage(why).into());
    }
    Ok(shapes)
}

/// Of the peers that marks are measured beside those that are asked for, or all of these.
fn peer_names(of_marks: Vec<String>, asked: &[String]) -> Vec<String> {
    match asked {
        [] => of_marks,
        asked => asked.to_vec(),
    }
}

/// The kernel of a file, which has to compute at least one of the shapes: it would silently be in no row
/// otherwise.
fn spec_for(path: &Path, pass: Pass, shapes: &[Problem]) -> anyhow::Result<PinnedSpec> {
    let pinned = spec_file::read_pinned_of(path, pass)?;
    let mut reasons = shapes.iter().map(|problem| pinned.spec.serves(problem).err());
    match reasons.next().flatten() {
        Some(reason) if reasons.all(|reason| reason.is_some()) => {
            let message = format!("{} computes none of the shapes: {reason}", path.display());
            Err(InputError::Usage(message).into())
        }
        _ => Ok(pinned),
    }
}
