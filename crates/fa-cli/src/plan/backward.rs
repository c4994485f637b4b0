//! The backward's plans, beside what the SM90 block size guide's model says of its candidates.

use std::fmt::Write;

use fa_core::{Arch, Family, Pass, Problem};
use fa_planner::guide::candidates::BwdSpec;
use fa_planner::guide::reject::{Explain, Rejected};
use fa_planner::guide::search::{self, Tiles};
use fa_planner::guide::why::{self, Constraint};
use fa_planner::why::{Ranked, why as why_planned};
use fa_planner::{HeadDims, Mode};
use serde::Serialize;

use crate::flags::PlanFamily;
use crate::plan::tried::{Tried, TriedReport};
use crate::plan::why::why_lines;
use crate::term::failure::InputError;

/// What was tried for a backward.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Kernels, by predicted time.
    pub tried: Tried,
    /// What became of the guide's candidates, where SM90 kernels were tried.
    pub guide: Option<Explain<BwdSpec>>,
}

/// For JSON and RON.
#[derive(Debug, Serialize)]
pub struct BackwardReport<'a> {
    #[serde(flatten)]
    kernels: TriedReport<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guide: Option<&'a Explain<BwdSpec>>,
}

/// The answer to `--why`.
#[derive(Debug, Serialize)]
pub struct BackwardWhy {
    query: String,
    feasible: Vec<Ranked>,
    rejected: Vec<Rejected<BwdSpec>>,
}

impl Backward {
    /// Tries everything for the gradients of `problem`.
    ///
    /// # Errors
    /// [`InputError::Usage`] where no candidate can be formed.
    pub fn explore(
        problem: &Problem,
        arch: Arch,
        family: Option<PlanFamily>,
        pass: Pass,
    ) -> Result<Backward, InputError> {
        let tried = Tried::explore(problem, arch, family, pass)?;
        let native = PlanFamily::Kernels(Family::native(arch));
        let guide = if family.unwrap_or(native) == PlanFamily::Kernels(Family::Sm90) {
            let found = search::search(head_dims(problem)?, Mode::Bwd, &Tiles::default());
            found.map_err(|e| InputError::Usage(e.to_string()))?.explain.and_then(|explain| explain.bwd)
        } else {
            None
        };
        Ok(Backward { tried, guide })
    }

    /// For JSON and RON, at most `limit` plans.
    pub fn report(&self, limit: usize) -> BackwardReport<'_> {
        BackwardReport { kernels: self.tried.report(limit), guide: self.guide.as_ref() }
    }

    /// For people.
    pub fn text(&self, problem: &Problem, arch: Arch, limit: usize) -> String {
        let mut text = self.tried.text(problem, Pass::BACKWARD, arch, limit);
        let Some(guide) = &self.guide else { return text };
        let mut line = |name: &str, value: String| {
            writeln!(text, "{name:<10}{value}").expect("writing to a string cannot fail");
        };
        line("guide", format!("{} of {} candidates fit by its model", guide.feasible, guide.candidates));
        for (name, limit) in guide.limits() {
            if let Some(Rejected { spec, reason }) = &limit.nearest {
                line("", format!("{} rejected by {name}, nearest {spec}: {reason}", limit.rejected));
            }
        }
        text
    }

    /// Looks at the candidates that meet every condition of `query`.
    ///
    /// # Errors
    /// [`InputError::Usage`] for a query that cannot be read or selects nothing.
    pub fn why(&self, problem: &Problem, query: &str) -> Result<BackwardWhy, InputError> {
        let Tried::Kernels(set) = &self.tried else {
            return Err(InputError::Usage("--why looks at kernels with a spec".to_owned()));
        };
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
            Err(error) if answer.rejected.is_empty() => return Err(InputError::Usage(error.to_string())),
            Err(_) => {}
        }
        Ok(answer)
    }
}

impl BackwardWhy {
    /// For people.
    pub fn text(&self) -> String {
        let mut text = why_lines(&self.query, &self.feasible, self.rejected.len());
        for Rejected { spec, reason } in &self.rejected {
            writeln!(text, "rejected  {spec}: {reason}").expect("writing to a string cannot fail");
        }
        text
    }
}

fn head_dims(problem: &Problem) -> Result<HeadDims, InputError> {
    let dim =
        |n: usize| u32::try_from(n).map_err(|_| InputError::Usage(format!("head dim {n} is out of range")));
    Ok(HeadDims { head_dim: dim(problem.head_dim)?, head_dim_v: dim(problem.head_dim_v)? })
}
