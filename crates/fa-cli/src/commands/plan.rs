//! `fa plan`: which kernels fit a problem on a GPU, which is best, and why the others are not.

use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;

use fa_attn::atomic_file::AtomicFile;
use fa_core::arch::ParseArchError;
use fa_core::board::ParseBoardError;
use fa_core::{Arch, ArchLimits, Board, KernelSpec, Pass, Problem};
use fa_kernels::driver;
use fa_lab::read_record;
use fa_lab::shape::whole;
use fa_lab::spec_file::read_spec;
use fa_planner::cost;
use fa_planner::plan::{self, PlanOptions, PlanSet, RejectedSpec};
use fa_planner::report::{Backward, PlanFamily, Planned, Tried, WhyReport};
use fa_planner::{Mode, guide};
use serde::{Deserialize, Serialize};

use crate::attention;
use crate::flags::{self, ProblemArgs, flags_of, passes};
use crate::page::{self, Beside, Emulated, Records};
use crate::plan::backward;
use crate::plan::guide::GuideArgs;
use crate::plan::tried::{Shape, Shown};
use crate::plan::why::why_text as answer;
use crate::term::destinations::target;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// How a result is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// One JSON object
    Json,
    /// Rusty object notation
    Ron,
    /// The first choice alone, as the commands that take a kernel's file read it
    Spec,
}

/// `fa plan`.
#[derive(Debug, Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub problem: ProblemArgs,
    /// Read the problem from a RON file instead: a problem, or a plan as --format ron prints it
    #[arg(long = "problem", value_name = "FILE", conflicts_with_all = flags_of::<ProblemArgs>())]
    pub problem_file: Option<PathBuf>,
    /// GPU architecture: sm80, sm86, sm89, sm90, sm100, sm103, sm110, sm120, sm121, or a board, as --board
    #[arg(long, default_value = "sm90")]
    pub arch: ArchArg,
    /// Plan by the SMs, clock and memory rate of a board, as in a10g, l40s, h200 or spark; `device` is the
    /// GPU at hand [default: the board that --arch stands for]
    #[arg(long, value_name = "BOARD", conflicts_with_all = ["arch", "guide"])]
    pub board: Option<BoardArg>,
    /// Kernels to choose from [default: the fastest that the architecture runs]
    #[arg(long, value_parser = flags::plan_family())]
    pub family: Option<PlanFamily>,
    /// Judge the one kernel in this file (RON, or JSON as in the kernel cache) instead of searching
    #[arg(long, value_name = "FILE", conflicts_with_all = ["family", "why", "deterministic"])]
    pub spec: Option<PathBuf>,
    /// Which pass to plan [default: fwd; with --guide both]
    #[arg(long, value_parser = passes())]
    pub mode: Option<Mode>,
    /// Plan a deterministic backward, whose gradients have the same bits in every run
    #[arg(long)]
    pub deterministic: bool,
    /// List at most this many plans (tables default to 10, JSON and RON to all)
    #[arg(short = 'n', long = "num-results", value_name = "N", value_parser = whole::<usize>)]
    pub limit: Option<usize>,
    /// Show why the candidates with these fields fit or do not, as in tile_n=192,num_wg=2
    #[arg(long, value_name = "FIELD=VALUE,..", conflicts_with_all = ["limit"])]
    pub why: Option<String>,
    /// Write one self-contained HTML page about the plan
    #[arg(long, value_name = "FILE.html", value_parser = flags::page_file)]
    pub report: Option<PathBuf>,
    /// Records of `fa bench --marks` to compare with on the page [default: docs/results, where there is one]
    #[arg(long, value_name = "DIR", requires = "report")]
    pub records: Option<PathBuf>,
    /// Emulate the first choice and show the events of its loop on the page, too (needs a C++ compiler and
    /// some seconds)
    #[arg(long, requires = "report", conflicts_with_all = ["guide", "tile_m", "tile_n", "explain"])]
    pub emulate: bool,
    /// How to print
    #[arg(long, value_enum, default_value = "table")]
    pub format: Format,
    /// Short for --format json
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
    #[command(flatten)]
    pub guide: GuideArgs,
}

/// The architecture of `--arch`, and the board where one was named.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ArchArg {
    arch: Arch,
    board: Option<ArchLimits>,
}

impl FromStr for ArchArg {
    type Err = ParseArchError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse::<Board>() {
            Ok(board) => Ok(ArchArg { arch: board.arch, board: Some(board.limits) }),
            Err(_) => Ok(ArchArg { arch: text.parse()?, board: None }),
        }
    }
}

/// The board of `--board`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BoardArg {
    /// The first GPU of this machine.
    Device,
    /// One that is known by name.
    Known(Box<Board>),
}

impl FromStr for BoardArg {
    type Err = ParseBoardError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = |text: &str| text.parse().map(|board| BoardArg::Known(Box::new(board)));
        if text.eq_ignore_ascii_case("device") { Ok(BoardArg::Device) } else { known(text) }
    }
}

impl PlanArgs {
    /// What is planned for: an architecture, and a board where one is named.
    ///
    /// # Errors
    /// Without a GPU where that of this machine is asked for.
    fn target(&self) -> anyhow::Result<(Arch, Option<ArchLimits>)> {
        match &self.board {
            None => Ok((self.arch.arch, self.arch.board)),
            Some(BoardArg::Known(board)) => Ok((board.arch, Some(board.limits))),
            Some(BoardArg::Device) => {
                let context = driver::context(0)?;
                let (arch, limits) = driver::board(&context)?;
                Ok((arch, Some(limits)))
            }
        }
    }

    /// The passes to plan of a problem.
    fn mode(&self) -> Mode {
        self.mode.unwrap_or(Mode::Fwd)
    }
}

const PLAN_EXAMPLES: &str = "\
Examples:
  fa plan --headdim 128 --seqlen 8192 --heads 16 --causal
  fa plan --headdim 192-128 --mode bwd -n 5 --json
  fa plan --batch 2 --seqlen 1024 --heads 8 --board a10g
  fa plan --headdim 128 --why tile_n=192
  fa plan --headdim 64 --seqlen 1x65536 --heads 32:8 --arch sm80 --report plan.html
  fa plan --headdim 128 --causal --report plan.html --emulate
  fa plan --headdim 128 --causal --format spec > my.ron       for fa emulate, fa bench --spec
  fa plan --batch 32 --heads 32:8 --seqlen 8192 --packed 65536 --causal --sinks
  fa plan --batch 64 --heads 32:8 --seqlen 1x8192 --packed 64 --page 16
  fa plan --headdim 576-512 --latent --heads 128:1 --seqlen 1x4096
  fa plan --guide --headdim 192-128 --mode bwd --explain";

/// Plans that a table shows by default.
const TABLE_ROWS: usize = 10;

/// Runs the command: a bad verdict when nothing fits.
///
/// # Errors
/// Bad input or an unwritable report.
pub(crate) fn command(args: &PlanArgs) -> anyhow::Result<Verdict> {
    let format = if args.json { Format::Json } else { args.format };
    let other = [("--guide", args.guide.guide), ("--why", args.why.is_some()), ("-n", args.limit.is_some())];
    if let (Format::Spec, Some((flag, _))) = (format, other.iter().find(|(_, given)| *given)) {
        let why = format!("--format spec prints the first choice alone: leave out {flag}");
        return Err(InputError::Usage(why).into());
    }
    if args.guide.guide {
        return list_tiles(args, format);
    }
    let inputs: Vec<PathBuf> = [&args.problem_file, &args.spec].into_iter().flatten().cloned().collect();
    let target = args.report.as_deref().map(|path| target(path, &inputs)).transpose()?;
    let problem = problem(args)?;
    let planned = plan_for(args, problem)?;
    let why = args.why.as_ref().map(|query| planned.why(query)).transpose()?;
    if let Some(target) = &target {
        let emulated = args.emulate.then(|| Emulated::of(&planned)).transpose()?;
        let beside = Beside { records: records(args)?, why: why.as_ref().map(why_text), emulated };
        let page = page::page(&planned, &beside)?;
        target.write(|writer| writer.write_all(page.as_bytes())).map_err(InputError::from)?;
    }
    if format == Format::Spec {
        output::print(&(best_spec(&planned)?.to_ron() + "\n"))?;
        return Ok(Verdict::Good);
    }
    if let Some(report) = why {
        print(format, &report, |report| why_text(report) + &report_line(target.as_ref()))?;
        return Ok(Verdict::Good);
    }
    let limit = args.limit.unwrap_or(if format == Format::Table { TABLE_ROWS } else { usize::MAX });
    print(format, &planned.report(limit), |_| text(&planned, limit, target.as_ref()))?;
    let nothing = planned.forward.as_ref().is_some_and(|f| f.fits().is_empty())
        || planned.backward.as_ref().is_some_and(|b| b.tried.fits().is_empty());
    Ok(if nothing { Verdict::Bad } else { Verdict::Good })
}

/// The kernel that `--format spec` prints.
fn best_spec(planned: &Planned) -> anyhow::Result<KernelSpec> {
    let refused = |why: String| InputError::Usage(format!("--format spec prints one kernel: {why}"));
    let tried = match (&planned.forward, &planned.backward) {
        (Some(_), Some(_)) => return Err(refused("use --mode fwd or bwd".to_owned()).into()),
        (Some(forward), None) => forward,
        (None, Some(backward)) => &backward.tried,
        (None, None) => return Err(refused("nothing was planned".to_owned()).into()),
    };
    match tried.best().map(|best| (best.shape, best.name)) {
        Some((Shape::Kernel(spec), _)) => Ok(spec.clone()),
        Some((Shape::Sm100(plan), _)) => Ok(plan.spec.clone()),
        None => Err(refused("none fits, see the table".to_owned()).into()),
    }
}

/// The records of `--records`, or of the repository that this runs in.
fn records(args: &PlanArgs) -> Result<Option<Records>, InputError> {
    const OWN: &str = "docs/results";
    match &args.records {
        Some(folder) => Records::read(folder).map(Some),
        None if Path::new(OWN).is_dir() => Records::read(Path::new(OWN)).map(Some),
        None => Ok(None),
    }
}

fn report_line(report: Option<&AtomicFile>) -> String {
    report.map_or(String::new(), |report| format!("report    {}\n", report.path().display()))
}

/// `--guide`. Finding nothing is an answer.
fn list_tiles(args: &PlanArgs, format: Format) -> anyhow::Result<Verdict> {
    let mode = args.mode.unwrap_or(Mode::Both);
    let report = args.guide.search(args.problem.headdim, mode, args.arch.arch, args.limit)?;
    if format != Format::Table {
        eprint!("{}", report.nothing_found());
    }
    print(format, &report, guide::report::Report::text)?;
    Ok(Verdict::Good)
}

fn print<T: Serialize>(format: Format, value: &T, text: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
    match format {
        Format::Table => output::print(&text(value)),
        Format::Json => output::print_json(value),
        Format::Ron | Format::Spec => {
            output::print(&(ron::ser::to_string_pretty(value, ron::ser::PrettyConfig::default())? + "\n"))
        }
    }
}

/// The problem of a plan as `--format ron` prints it.
#[derive(Deserialize)]
struct PlanFile {
    problem: Problem,
}

fn problem(args: &PlanArgs) -> anyhow::Result<Problem> {
    let Some(path) = &args.problem_file else { return args.problem.problem() };
    // A plan lists all that fits.
    let text = read_record(path)?;
    let problem = ron::from_str(&text)
        .or_else(|error| ron::from_str(&text).map(|PlanFile { problem }| problem).map_err(|_| error))
        .map_err(|e| InputError::Usage(format!("{} holds no problem: {e}", path.display())))?;
    problem.check()?;
    Ok(problem)
}

fn plan_for(args: &PlanArgs, problem: Problem) -> anyhow::Result<Planned> {
    let (arch, board) = args.target()?;
    let mut planned = Planned { arch, board, problem, forward: None, backward: None };
    if let Some(path) = &args.spec {
        let (judged, backward) = judge_spec(path, &problem, (arch, board))?;
        let other = match (args.mode(), backward) {
            (Mode::Both, _) => Some("one kernel"),
            (Mode::Bwd, false) => Some("a forward kernel"),
            (Mode::Fwd, true) if args.mode.is_some() => Some("a backward kernel"),
            (Mode::Bwd, true) | (Mode::Fwd, true | false) => None,
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
    if args.deterministic && args.mode() == Mode::Fwd {
        let message = "--deterministic is about gradients: use it with --mode bwd or both".to_owned();
        return Err(InputError::Usage(message).into());
    }
    let backward = (args.mode() != Mode::Fwd).then_some(Pass::Backward { deterministic: args.deterministic });
    let forward = args.mode() != Mode::Bwd;
    Ok(Planned::explore(&problem, (arch, board), args.family, forward, backward)?)
}

/// A kernel from a file instead of a search, and whether it computes gradients.
fn judge_spec(
    path: &Path,
    problem: &Problem,
    (arch, board): (Arch, Option<ArchLimits>),
) -> anyhow::Result<(Tried, bool)> {
    let spec = read_spec(path)?;
    let backward = spec.kernel.is_backward();
    let set = match plan::plan_spec(problem, &spec, arch, &PlanOptions::default().with_board(board)) {
        Ok(plan) => PlanSet { plans: vec![plan], rejected: Vec::new() },
        Err(reason) => PlanSet { plans: Vec::new(), rejected: vec![RejectedSpec { spec, reason }] },
    };
    Ok((Tried::Kernels(set), backward))
}

fn text(planned: &Planned, limit: usize, report: Option<&AtomicFile>) -> String {
    let mut text = heading(planned.arch, planned.limits().board, &planned.problem);
    if let Some(never_run) = planned.never_run() {
        writeln!(text, "note      {never_run}").expect("writing to a string cannot fail");
    }
    if let (Some(_), Some([chunks, others])) = (&planned.forward, cost::phases(&planned.problem).as_deref()) {
        let of = |phase: &Problem| (phase.lengths.sequences(), phase.lengths.max_q());
        let ((chunks, most), (others, queries)) = (of(chunks), of(others));
        let keys = planned.problem.lengths.mean_k();
        writeln!(
            text,
            "note      planned as a server's step on {keys} keys per sequence: {chunks} of {most} queries, \
             then {others} of {queries}"
        )
        .expect("writing to a string cannot fail");
    }
    if let Some(forward) = &planned.forward {
        text += &forward.text(&planned.problem, Pass::Forward, (planned.arch, &planned.limits()), limit);
    }
    if let Some(backward) = &planned.backward {
        text += &backward::text(backward, &planned.problem, (planned.arch, &planned.limits()), limit);
    }
    text + &report_line(report)
}

fn heading(arch: Arch, board: &str, problem: &Problem) -> String {
    format!("problem   {}\ngpu       {arch} ({board})\n", attention::describe(problem))
}

fn why_text(report: &WhyReport) -> String {
    let mut text = heading(report.arch, report.board, &report.problem);
    if let Some(why) = &report.forward {
        text += &answer(why);
    }
    if let Some(why) = &report.backward {
        text += &backward::why_text(why);
    }
    text
}
