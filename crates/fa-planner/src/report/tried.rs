//! What was tried for a pass, of kernels that exist and of SM100 shapes, seen alike.

use fa_core::{Arch, ArchLimits, Family, Pass, Problem};
use serde::Serialize;

use crate::account::Reason;
use crate::guide::search::SearchError;
use crate::head_dims::HeadDimsError;
use crate::kernels::sm100_fwd::{self as sm100, Sm100Plan, Sm100Set};
use crate::plan::{self, Plan, PlanError, PlanOptions, PlanSet};
use crate::tally::{Tally, tally};
use crate::why::WhyError;

/// What was tried for a pass.
#[derive(Clone, Debug)]
pub enum Tried {
    /// Kernels with a spec.
    Kernels(PlanSet),
    /// Kernels for tcgen05 by their shapes, with tensor memory and warps by role. Assembled and emulated,
    /// never run on a GPU.
    Sm100(Sm100Set),
}

/// What can be planned with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanFamily {
    /// Kernels that have been run on a GPU.
    Kernels(Family),
    /// Kernels for tcgen05 and tensor memory: assembled and emulated, never run on a GPU.
    Sm100,
}

/// What was tried for a pass, as JSON or RON.
#[derive(Debug, Serialize)]
pub struct TriedReport<'a> {
    /// Candidates tried.
    pub tried: usize,
    /// Of these, how many fit.
    pub fit: usize,
    /// Those, best first.
    pub plans: Plans<'a>,
    /// What each limit rejected.
    pub rejected: Vec<LimitReport>,
}

/// Plans of either kind.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Plans<'a> {
    /// Of kernels.
    Kernels(&'a [Plan]),
    /// Of SM100 shapes.
    Sm100(&'a [Sm100Plan]),
}

/// What one limit rejected.
#[derive(Debug, Serialize)]
pub struct LimitReport {
    /// The limit.
    pub limit: &'static str,
    /// How many it rejected.
    pub count: usize,
    /// The candidate that breaks it least.
    pub nearest: String,
    /// By how much.
    pub reason: Reason,
}

/// Why nothing can be reported.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ReportError {
    /// No candidate can be formed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// SM100 shapes for gradients.
    #[error("there is no tcgen05 kernel for the backward: leave out --family sm100")]
    Sm100Backward,
    /// A question about SM100 shapes.
    #[error(
        "--why does not look at sm100 kernels, which are planned by their shapes: the JSON lists them all; \
         --family sm80 plans what is chosen there"
    )]
    Sm100Why,
    /// A question about gradients' shapes without a spec.
    #[error("--why looks at kernels with a spec")]
    NoSpec,
    /// A question that cannot be read or selects nothing.
    #[error(transparent)]
    Why(#[from] WhyError),
    /// Head dims that the guide does not know.
    #[error(transparent)]
    HeadDims(#[from] HeadDimsError),
    /// A head dim beyond what is counted.
    #[error("head dim {0} is out of range")]
    HeadDim(usize),
    /// The guide's search refuses.
    #[error(transparent)]
    Search(#[from] SearchError),
}

impl PlanFamily {
    /// What plans the kernels of `family`.
    pub const fn of(family: Family) -> PlanFamily {
        match family {
            Family::Sm100 => PlanFamily::Sm100,
            Family::Sm80 | Family::Sm90 => PlanFamily::Kernels(family),
        }
    }

    /// The family of kernels.
    pub const fn kernels(self) -> Family {
        match self {
            PlanFamily::Kernels(family) => family,
            PlanFamily::Sm100 => Family::Sm100,
        }
    }
}

impl Tried {
    /// Tries everything for `pass` over `problem` on `arch`, by the rates of `board` or of the architecture's
    /// own, with what the architecture has where no family is named.
    ///
    /// # Errors
    /// [`ReportError`] where no candidate can be formed.
    pub fn explore(
        problem: &Problem,
        (arch, board): (Arch, Option<ArchLimits>),
        family: Option<PlanFamily>,
        pass: Pass,
    ) -> Result<Tried, ReportError> {
        let tcgen05 = arch.has_tcgen05() && pass == Pass::Forward;
        let native = if tcgen05 { PlanFamily::Sm100 } else { PlanFamily::Kernels(Family::native(arch)) };
        let kernels = |family| {
            let options = PlanOptions::default().with_family(family).with_board(board).with_pass(pass);
            Ok(Tried::Kernels(plan::explore(problem, arch, &options)?))
        };
        let is_named = family.is_some();
        match family.unwrap_or(native) {
            // None named: the families in the library's order.
            PlanFamily::Kernels(family) => kernels(is_named.then_some(family)),
            PlanFamily::Sm100 if pass.is_backward() => Err(ReportError::Sm100Backward),
            PlanFamily::Sm100 => match sm100::explore(problem, arch, None, board) {
                // What is chosen there in any case has the code.
                Err(PlanError::NoCode { .. }) if !is_named => kernels(None),
                set => Ok(Tried::Sm100(set?)),
            },
        }
    }

    /// How many each limit rejected, and the nearest miss of each.
    pub fn limits(&self) -> Vec<LimitReport> {
        match self {
            Tried::Kernels(set) => {
                limits(set.rejected.iter().map(|miss| (miss.spec.to_string(), &miss.reason)))
            }
            Tried::Sm100(set) => limits(set.rejected.iter().map(|miss| (miss.tile.name(), &miss.reason))),
        }
    }

    /// For JSON and RON, at most `limit` plans.
    pub fn report(&self, limit: usize) -> TriedReport<'_> {
        let (fit, missed, plans) = match self {
            Tried::Kernels(set) => {
                let shown = set.plans.len().min(limit);
                (set.plans.len(), set.rejected.len(), Plans::Kernels(&set.plans[..shown]))
            }
            Tried::Sm100(set) => {
                let shown = set.plans.len().min(limit);
                (set.plans.len(), set.rejected.len(), Plans::Sm100(&set.plans[..shown]))
            }
        };
        TriedReport { tried: fit + missed, fit, plans, rejected: self.limits() }
    }
}

fn limits<'a>(misses: impl Iterator<Item = (String, &'a Reason)>) -> Vec<LimitReport> {
    let found = tally(misses.map(|(name, reason)| (reason.kind(), reason.excess(), (name, reason))));
    let report = |Tally { limit, rejected, nearest: (nearest, reason) }: Tally<_, (String, &Reason)>| {
        LimitReport { limit, count: rejected, nearest, reason: reason.clone() }
    };
    found.into_iter().map(report).collect()
}
