//! The backward's plans, beside what the SM90 block size guide's model says of its candidates, for people.

use std::fmt::Write;

use fa_core::{Arch, ArchLimits, Pass, Problem};
use fa_planner::guide::reject::Rejected;
use fa_planner::report::{Backward, BackwardWhy};

use crate::plan::tried::Shown;
use crate::plan::why::why_lines;

/// A backward's plans, for people.
pub(crate) fn text(backward: &Backward, problem: &Problem, on: (Arch, &ArchLimits), limit: usize) -> String {
    let mut text = backward.tried.text(problem, Pass::BACKWARD, on, limit);
    let Some(guide) = &backward.guide else { return text };
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

/// The answer to `--why`, for people.
pub(crate) fn why_text(why: &BackwardWhy) -> String {
    let mut text = why_lines(&why.query, &why.feasible, why.rejected.len());
    for Rejected { spec, reason } in &why.rejected {
        writeln!(text, "rejected  {spec}: {reason}").expect("writing to a string cannot fail");
    }
    text
}
