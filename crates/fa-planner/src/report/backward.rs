//! The backward's plans, next to the verdict of the SM90 block size guide's model on its candidates.

use fa_core::{Arch, ArchLimits, Family, Pass, Problem};
use serde::Serialize;

use crate::guide::candidates::BwdSpec;
use crate::guide::mode::Mode;
use crate::guide::reject::{Explain, Rejected};
use crate::guide::search::{self, Tiles};
use crate::guide::why::{self, Constraint};
use crate::head_dims::HeadDims;
use crate::report::tried::{PlanFamily, ReportError, Tried, TriedReport};
use crate::why::{Ranked, why as why_planned};

/// What was tried for a backward.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Kernels, by predicted time.
    pub tried: Tried,
    /// The verdict on the guide's candidates, where SM90 kernels were tried.
    pub guide: Option<Explain<BwdSpec>>,
}

/// The report as JSON and RON.
#[derive(Debug, Serialize)]
pub struct BackwardReport<'a> {
    /// The kernels.
    #[serde(flatten)]
    pub kernels: TriedReport<'a>,
    /// The guide's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guide: Option<&'a Explain<BwdSpec>>,
}

/// The answer to a question about candidates.
#[derive(Debug, Serialize)]
pub struct BackwardWhy {
    /// The question.
    pub query: String,
    /// Those that fit.
    pub feasible: Vec<Ranked>,
    /// Those of the guide that do not.
    pub rejected: Vec<Rejected<BwdSpec>>,
}

impl Backward {
    /// Tries everything for the gradients of `problem`.
    ///
    /// # Errors
    /// [`ReportError`] where no candidate can be formed.
    pub fn explore(
        problem: &Problem,
        (arch, board): (Arch, Option<ArchLimits>),
        family: Option<PlanFamily>,
        pass: Pass,
    ) -> Result<Backward, ReportError> {
        let tried = Tried::explore(problem, (arch, board), family, pass)?;
        let native = PlanFamily::Kernels(Family::native(arch));
        let guide = if family.unwrap_or(native) == PlanFamily::Kernels(Family::Sm90) {
            let found = search::search(head_dims(problem)?, Mode::Bwd, &Tiles::default())?;
            found.explain.and_then(|explain| explain.bwd)
        } else {
            None
        };
        Ok(Backward { tried, guide })
    }

    /// For JSON and RON, at most `limit` plans.
    pub fn report(&self, limit: usize) -> BackwardReport<'_> {
        BackwardReport { kernels: self.tried.report(limit), guide: self.guide.as_ref() }
    }

    /// Looks at the candidates that meet every condition of `query`.
    ///
    /// # Errors
    /// [`ReportError::Why`] for a query that cannot be read or selects nothing.
    pub fn why(&self, problem: &Problem, query: &str) -> Result<BackwardWhy, ReportError> {
        let Tried::Kernels(set) = &self.tried else { return Err(ReportError::NoSpec) };
        let mut answer = BackwardWhy { query: query.to_owned(), feasible: Vec::new(), rejected: Vec::new() };
        let planned = why_planned(set, query);
        if self.guide.is_some()
            && let Ok(constraints) =
                query.split(',').map(|part| part.trim().parse()).collect::<Result<Vec<Constraint>, _>>()
            && let Ok(why::Why { bwd: Some(found), .. }) =
                why::why(head_dims(problem)?, Mode::Bwd, &constraints)
        {
            answer.rejected = found.rejected;
        }
        match planned {
            Ok(found) => answer.feasible = found.feasible,
            Err(error) if answer.rejected.is_empty() => return Err(error.into()),
            Err(_) => {}
        }
        Ok(answer)
    }
}

fn head_dims(problem: &Problem) -> Result<HeadDims, ReportError> {
    let dim = |n: usize| u32::try_from(n).map_err(|_| ReportError::HeadDim(n));
    Ok(HeadDims { head_dim: dim(problem.head_dim)?, head_dim_v: dim(problem.head_dim_v)? })
}
