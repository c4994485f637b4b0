//! `fa plan`: which kernels fit a problem on a GPU, which is best, and why the others are not.

pub mod backward;
pub mod tried;

use fa_planner::Mode;
use std::fmt::Write;
use std::path::Path;

use fa_core::{Arch, KernelSpec, Pass, Problem, ShippedSpec};
use fa_planner::plan::{self, PlanOptions, PlanSet, RejectedSpec, Why};
use serde::Serialize;

use crate::args::{Format, PlanArgs};
use crate::attention;
use crate::failure::{InputError, Verdict, read_text};
use crate::output;
use crate::report;
use crate::target::Target;

use backward::{Backward, BackwardReport};
use tried::{Tried, TriedReport};

/// Plans that a table shows unless told otherwise.
const TABLE_ROWS: usize = 10;

/// What is printed as JSON or RON.
#[derive(Debug, Serialize)]
struct Report<'a> {
    arch: Arch,
    board: &'static str,
    problem: &'a Problem,
    #[serde(skip_serializing_if = "Option::is_none")]
    forward: Option<TriedReport<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<BackwardReport<'a>>,
}

/// Answers to `--why`.
#[derive(Debug, Serialize)]
struct WhyReport {
    arch: Arch,
    problem: Problem,
    #[serde(skip_serializing_if = "Option::is_none")]
    forward: Option<Why>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<backward::BackwardWhy>,
}

/// Everything that was planned for a command line.
#[derive(Debug)]
pub struct Planned {
    /// The architecture.
    pub arch: Arch,
    /// The problem.
    pub problem: Problem,
    /// The forward, when asked for.
    pub forward: Option<Tried>,
    /// The backward, when asked for.
    pub backward: Option<Backward>,
}

/// Runs the command: a bad verdict when nothing fits.
///
/// # Errors
/// Bad input or an unwritable report.
pub fn command(args: &PlanArgs) -> anyhow::Result<Verdict> {
    let problem = problem(args)?;
    let target = args.report.as_deref().map(Target::probe).transpose()?;
    let format = if args.json { Format::Json } else { args.format };
    let planned = plan_for(args, problem)?;
    if let Some(query) = &args.why {
        let report = explain(&planned, query)?;
        print(format, &report, why_text)?;
        return Ok(Verdict::Good);
    }
    if let Some(target) = &target {
        let page = report::page(&planned)?;
        target.write(|writer| Ok(writer.write_all(page.as_bytes())?))?;
    }
    let limit = args.limit.unwrap_or(if format == Format::Table { TABLE_ROWS } else { usize::MAX });
    let report = Report {
        arch: planned.arch,
        board: planned.arch.limits().board,
        problem: &planned.problem,
        forward: planned.forward.as_ref().map(|forward| forward.report(limit)),
        backward: planned.backward.as_ref().map(|backward| backward.report(limit)),
    };
    print(format, &report, |_| text(&planned, limit, target.as_ref()))?;
    let nothing = planned.forward.as_ref().is_some_and(|f| f.fits().is_empty())
        || planned.backward.as_ref().is_some_and(|b| b.tried.fits().is_empty());
    Ok(if nothing { Verdict::Bad } else { Verdict::Good })
}

fn print<T: Serialize>(format: Format, value: &T, text: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    match format {
        Format::Table => output::print(&text(value)),
        Format::Json => output::print_json(value),
        Format::Ron => {
            output::print(&(ron::ser::to_string_pretty(value, ron::ser::PrettyConfig::default())? + "\n"))
        }
    }
}

fn problem(args: &PlanArgs) -> anyhow::Result<Problem> {
    let Some(path) = &args.problem_file else { return Ok(args.problem.problem()?) };
    let text = read_text(path)?;
    let problem: Problem = ron::from_str(&text)
        .map_err(|e| InputError::Usage(format!("{} holds no problem: {e}", path.display())))?;
    problem.check()?;
    Ok(problem)
}

fn plan_for(args: &PlanArgs, problem: Problem) -> anyhow::Result<Planned> {
    let arch = args.arch;
    let mut planned = Planned { arch, problem, forward: None, backward: None };
    if let Some(path) = &args.spec {
        let (judged, backward) = judge_spec(path, &problem, arch)?;
        let other = match (args.mode, backward) {
            (Mode::Both, _) => Some("one kernel"),
            (Mode::Bwd, false) => Some("a forward kernel"),
            _ => None,
        };
        if let Some(what) = other {
            return Err(InputError::Usage(format!("{} is {what}: leave out --mode", path.display())).into());
        }
        if backward {
            planned.backward = Some(Backward { tried: judged, guide: None });
        } else {
            planned.forward = Some(judged);
        }
        return Ok(planned);
    }
    if args.deterministic && args.mode == Mode::Fwd {
        let message = "--deterministic is about gradients: use it with --mode bwd or both".to_owned();
        return Err(InputError::Usage(message).into());
    }
    if args.mode != Mode::Bwd {
        planned.forward = Some(Tried::explore(&problem, arch, args.family, Pass::Forward)?);
    }
    if args.mode != Mode::Fwd {
        let pass = Pass::Backward { deterministic: args.deterministic };
        planned.backward = Some(Backward::explore(&problem, arch, args.family, pass)?);
    }
    Ok(planned)
}

/// Reads a kernel's spec from a file.
///
/// # Errors
/// [`InputError`] when it cannot be read or is none.
pub fn read_spec(path: &Path) -> Result<KernelSpec, InputError> {
    let text = read_text(path)?;
    // Files under specs/ name their architectures beside the spec; `fa plan --format ron` gives the bare spec.
    let spec = ShippedSpec::from_ron(&text).map(|shipped| shipped.spec).or_else(|shipped_error| {
        KernelSpec::from_ron(&text).map_err(|e| if text.contains("archs") { shipped_error } else { e })
    });
    spec.map_err(|e| InputError::Usage(format!("{}: {e}", path.display())))
}

/// [`read_spec`] for a kernel that has to compute `pass`, deterministic or not.
///
/// # Errors
/// As [`read_spec`], and for a kernel of the other pass.
pub fn read_spec_of(path: &Path, pass: Pass) -> Result<KernelSpec, InputError> {
    let spec = read_spec(path)?;
    let own = spec.kernel.pass();
    if own.is_backward() != pass.is_backward() {
        let (path, is, mode) = (path.display(), own.name(), own.short_name());
        return Err(InputError::Usage(format!("{path} is a kernel of the {is}: use --mode {mode}")));
    }
    Ok(spec)
}

/// A kernel from a file instead of a search, and whether it computes gradients.
fn judge_spec(path: &Path, problem: &Problem, arch: Arch) -> anyhow::Result<(Tried, bool)> {
    let spec = read_spec(path)?;
    let backward = spec.kernel.is_backward();
    let set = match plan::plan_spec(problem, &spec, arch, &PlanOptions::default()) {
        Ok(plan) => PlanSet { plans: vec![plan], rejected: Vec::new() },
        Err(reason) => PlanSet { plans: Vec::new(), rejected: vec![RejectedSpec { spec, reason }] },
    };
    Ok((Tried::Kernels(set), backward))
}

fn explain(planned: &Planned, query: &str) -> anyhow::Result<WhyReport> {
    let usage = |message: String| InputError::Usage(message);
    let forward = match &planned.forward {
        None => None,
        Some(Tried::Kernels(set)) => Some(plan::why(set, query).map_err(|e| usage(e.to_string()))?),
        Some(Tried::Sm100(_)) => {
            let message = "--why looks at kernels with a spec, which sm100 shapes do not have yet: \
                           the JSON lists them all; --family sm80 has specs";
            return Err(usage(message.to_owned()).into());
        }
    };
    let backward = planned.backward.as_ref().map(|b| b.why(&planned.problem, query)).transpose()?;
    Ok(WhyReport { arch: planned.arch, problem: planned.problem, forward, backward })
}

fn text(planned: &Planned, limit: usize, report: Option<&Target>) -> String {
    let mut text = heading(planned.arch, &planned.problem);
    if let Some(forward) = &planned.forward {
        text += &forward.text(&planned.problem, Pass::Forward, planned.arch, limit);
    }
    if let Some(backward) = &planned.backward {
        text += &backward.text(&planned.problem, planned.arch, limit);
    }
    if let Some(report) = report {
        writeln!(text, "report    {}", report.path().display()).expect("writing to a string cannot fail");
    }
    text
}

fn heading(arch: Arch, problem: &Problem) -> String {
    format!("problem   {}\ngpu       {arch} ({})\n", attention::describe(problem), arch.limits().board)
}

fn why_text(report: &WhyReport) -> String {
    let mut text = heading(report.arch, &report.problem);
    if let Some(why) = &report.forward {
        text += &tried::why_text(why);
    }
    if let Some(why) = &report.backward {
        text += &why.text();
    }
    text
}
