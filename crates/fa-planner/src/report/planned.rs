//! Everything that was planned for a problem.

use fa_core::{Arch, ArchLimits, Pass, Problem};
use serde::Serialize;

use crate::report::backward::{Backward, BackwardReport, BackwardWhy};
use crate::report::tried::{PlanFamily, ReportError, Tried, TriedReport};
use crate::why::{self, Why};

/// Everything that was planned for a problem.
#[derive(Debug)]
pub struct Planned {
    /// The architecture.
    pub arch: Arch,
    /// The board whose limits and rates were taken; `None` for the architecture's own.
    pub board: Option<ArchLimits>,
    /// The problem.
    pub problem: Problem,
    /// The forward, when asked for.
    pub forward: Option<Tried>,
    /// The backward, when asked for.
    pub backward: Option<Backward>,
}

/// What is printed as JSON or RON.
#[derive(Debug, Serialize)]
pub struct Report<'a> {
    /// The architecture.
    pub arch: Arch,
    /// The GPU whose limits and rates are taken.
    pub board: &'static str,
    /// The problem.
    pub problem: &'a Problem,
    /// A note where no kernel computes the forward's plans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub never_run: Option<String>,
    /// The forward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward: Option<TriedReport<'a>>,
    /// The backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<BackwardReport<'a>>,
}

/// Answers to a question about candidates.
#[derive(Debug, Serialize)]
pub struct WhyReport {
    /// The architecture.
    pub arch: Arch,
    /// The GPU whose limits and rates are taken.
    pub board: &'static str,
    /// The problem.
    pub problem: Problem,
    /// The forward's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward: Option<Why>,
    /// The backward's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<BackwardWhy>,
}

impl Planned {
    /// Tries everything for the passes `forward` and `backward` over `problem` on `arch`, by the rates of
    /// `board` or of the architecture's own.
    ///
    /// # Errors
    /// [`ReportError`] where no candidate can be formed.
    pub fn explore(
        problem: &Problem,
        (arch, board): (Arch, Option<ArchLimits>),
        family: Option<PlanFamily>,
        forward: bool,
        backward: Option<Pass>,
    ) -> Result<Planned, ReportError> {
        let explore = || Tried::explore(problem, (arch, board), family, Pass::Forward);
        let forward = forward.then(explore).transpose()?;
        let explore = |pass| Backward::explore(problem, (arch, board), family, pass);
        let backward = backward.map(explore).transpose()?;
        Ok(Planned { arch, board, problem: *problem, forward, backward })
    }

    /// The limits and rates that were taken.
    pub fn limits(&self) -> ArchLimits {
        self.board.unwrap_or(*self.arch.limits())
    }

    /// That the forward's kernels were never run on a GPU, where that is so, and what is chosen instead.
    pub fn never_run(&self) -> Option<String> {
        let arch = self.arch;
        matches!(self.forward, Some(Tried::Sm100(_))).then(|| {
            format!(
                "these forwards by tcgen05 were assembled and emulated, never run on a GPU: their rates are \
                 predicted by assumptions, and they run where a spec names them (--format spec); --family \
                 sm80 plans the kernels that are chosen on {arch}"
            )
        })
    }

    /// For JSON and RON, at most `limit` plans of each pass.
    pub fn report(&self, limit: usize) -> Report<'_> {
        Report {
            arch: self.arch,
            board: self.limits().board,
            problem: &self.problem,
            never_run: self.never_run(),
            forward: self.forward.as_ref().map(|forward| forward.report(limit)),
            backward: self.backward.as_ref().map(|backward| backward.report(limit)),
        }
    }

    /// What became of the candidates that meet every condition of `query`, as in `tile_n=192,num_wg=2`.
    ///
    /// # Errors
    /// [`ReportError`] for a query that cannot be read or selects nothing, and for shapes without a spec.
    pub fn why(&self, query: &str) -> Result<WhyReport, ReportError> {
        let forward = match &self.forward {
            None => None,
            Some(Tried::Kernels(set)) => Some(why::why(set, query)?),
            Some(Tried::Sm100(_)) => return Err(ReportError::Sm100Why),
        };
        let backward = self.backward.as_ref().map(|b| b.why(&self.problem, query)).transpose()?;
        Ok(WhyReport {
            arch: self.arch,
            board: self.limits().board,
            problem: self.problem,
            forward,
            backward,
        })
    }
}
