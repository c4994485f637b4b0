//! One pass of a plan as the page shows it: what fits, what does not, and the unit that counts.

use fa_core::{ArchLimits, Pass, Problem};
use fa_planner::cost::Cost;
use fa_planner::guide::reject::Reason as GuideReason;
use fa_planner::guide::why;
use fa_planner::report::{Planned, Tried};
use fa_planner::{HeadDims, Mode};

use crate::draw::diagram::escape;
use crate::plan::kernels::Group;
use crate::plan::splits;
use crate::plan::tried::{Fit, Shown};

/// One pass of a plan.
pub(crate) struct View<'a> {
    /// All that was planned.
    pub planned: &'a Planned,
    /// The pass.
    pub pass: Pass,
    /// What was tried for it.
    pub tried: &'a Tried,
    /// What fits, best first.
    pub fits: Vec<Fit<'a>>,
    /// What does not.
    pub missed: Vec<Missed>,
    /// The rate that counts.
    pub unit: Unit,
}

/// The rate that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Operations.
    Tflops,
    /// Bytes: few operations are done for each, as in decode.
    Bytes,
}

/// A candidate that does not fit.
pub(crate) struct Missed {
    pub name: String,
    pub group: Group,
    pub tile_n: u32,
    /// The limit's short name.
    pub kind: &'static str,
    /// For a cell: `R +40`.
    pub short: String,
    /// In a sentence.
    pub reason: String,
    /// By which share the limit is missed.
    pub excess: f64,
}

impl<'a> View<'a> {
    /// A pass of `planned`.
    ///
    /// # Errors
    /// Head dims out of the guide's range, which the plan before has refused already.
    pub(crate) fn new(
        planned: &'a Planned,
        pass: Pass,
        tried: &'a Tried,
        with_guide: bool,
    ) -> anyhow::Result<View<'a>> {
        let misses = tried.misses().into_iter().map(|miss| Missed {
            name: miss.name,
            tile_n: miss.tile_n,
            kind: miss.reason.kind(),
            short: short(miss.reason),
            reason: miss.reason.to_string(),
            excess: miss.reason.excess(),
            group: miss.group,
        });
        let mut view = View {
            planned,
            pass,
            tried,
            fits: tried.fits(),
            missed: misses.collect(),
            unit: if pass == Pass::Forward && splits::moves_bytes(&planned.problem) {
                Unit::Bytes
            } else {
                Unit::Tflops
            },
        };
        if with_guide {
            view.missed.extend(guide_misses(&planned.problem)?);
        }
        Ok(view)
    }

    /// Makes an id that a page has once for each pass unique.
    pub(crate) const fn id(&self) -> &'static str {
        if self.backward() { "b" } else { "f" }
    }

    pub(crate) const fn backward(&self) -> bool {
        self.pass.is_backward()
    }

    pub(crate) fn limits(&self) -> ArchLimits {
        self.planned.limits()
    }

    pub(crate) fn problem(&self) -> &'a Problem {
        &self.planned.problem
    }

    /// The rate in the unit that counts.
    pub(crate) fn rate(&self, cost: &Cost) -> f64 {
        match self.unit {
            Unit::Tflops => cost.tflops,
            Unit::Bytes => cost.bytes_per_s / 1e9,
        }
    }

    pub(crate) const fn unit_name(&self) -> &'static str {
        match self.unit {
            Unit::Tflops => "TFLOP/s",
            Unit::Bytes => "GB/s",
        }
    }

    /// What the rate cannot exceed.
    pub(crate) fn peak(&self) -> f64 {
        match self.unit {
            Unit::Tflops => self.limits().peak_tensor_flops_of(self.problem().types.q) / 1e12,
            Unit::Bytes => self.limits().hbm_bytes_per_s / 1e9,
        }
    }
}

/// A rounded number for people, with the exact one for programs.
pub(crate) fn data(exact: impl std::fmt::Display, text: &str) -> String {
    format!("<data value=\"{exact}\">{}</data>", escape(text))
}

/// What the SM90 block size guide rejects.
fn guide_misses(problem: &Problem) -> anyhow::Result<Vec<Missed>> {
    let dims = HeadDims {
        head_dim: u32::try_from(problem.head_dim)?,
        head_dim_v: u32::try_from(problem.head_dim_v)?,
    };
    let Some(found) = why::why(dims, Mode::Bwd, &[])?.bwd else { return Ok(Vec::new()) };
    let missed = found.rejected.iter().map(|miss| {
        let share = |need: u32, have: u32| f64::from(need) / f64::from(have.max(1)) - 1.0;
        let (kind, short, excess) = match miss.reason {
            GuideReason::RegOverflow { need, have } => {
                ("registers", format!("R +{}", need - have), share(need, have))
            }
            GuideReason::SmemOverflow { need, have } => {
                ("smem", format!("S +{}K", (need - have).div_ceil(1024)), share(need, have))
            }
            GuideReason::MmaShape { .. } => ("other", "shape".to_owned(), f64::INFINITY),
        };
        Missed {
            name: miss.spec.to_string(),
            group: Group::of_backward(miss.spec.tile_m, miss.spec.num_wg),
            tile_n: miss.spec.tile_n,
            kind,
            short,
            reason: format!("{} (by the block size guide)", miss.reason),
            excess,
        }
    });
    Ok(missed.collect())
}

/// `R +40`: the limit's letter and the amount by which it is missed.
fn short(reason: &fa_planner::account::Reason) -> String {
    use fa_planner::account::Reason;
    match reason {
        Reason::Registers { need, have } => format!("R +{}", need - have),
        Reason::Code { .. } => "code".to_owned(),
        Reason::Spills { .. } => "spills".to_owned(),
        Reason::Smem { need, have } => format!("S +{}K", (need - have).div_ceil(1024)),
        Reason::Occupancy { need, have, .. } => format!("O {have}/{need}"),
        Reason::Tmem { need, have } => format!("T +{}", need - have),
        Reason::Launch(unserved) => unserved.what().to_owned(),
        Reason::Rule(_) | Reason::Problem { .. } => "rule".to_owned(),
    }
}
