//! The planner's choice, and that among kernels that were compiled ahead.

use std::iter::{once, once_with};

use fa_core::{Arch, Family, KernelSpec};
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanError, PlanOptions, best, plan};

use super::asked::Asked;
use super::seat::Seat;
use crate::clean::{Clean, first_clean};
use crate::error::Error;

/// The best of the planner's kernels that compiles cleanly; where there is no compiler that works, the best
/// of those that were compiled `ahead`.
pub(super) fn planned_or_ahead<'a, S: Seat, A: Iterator<Item = &'a KernelSpec>>(
    kernels: &S,
    asked: &Asked<'_>,
    families: &[Family],
    ahead: impl Fn() -> A,
) -> Result<(S::Bound, KernelSpec), Error> {
    use fa_kernels::Error::{BadCompiler, NoCompiler};
    match planned(kernels, asked, families) {
        Err(Error::Kernels(error @ (NoCompiler { .. } | BadCompiler { .. }))) => {
            tracing::warn!(%error, "only kernels that were compiled ahead run");
            let (arch, pass) = (kernels.arch(), asked.pass);
            let Some(spec) = best_ahead(arch, asked, families, ahead()) else {
                return Err(match ahead().count() {
                    0 => Error::Kernels(error),
                    have => Error::NoneAhead { arch, pass, have, compiler: Box::new(error) },
                });
            };
            Ok((kernels.bind(asked.problem, spec, asked.division.splits)?, spec.clone()))
        }
        planned => planned,
    }
}

/// The best of the planner's kernels that compiles cleanly, of the first family that has one.
fn planned<S: Seat>(
    kernels: &S,
    asked: &Asked<'_>,
    families: &[Family],
) -> Result<(S::Bound, KernelSpec), Error> {
    let Asked { problem, like, pass, division, .. } = *asked;
    let arch = kernels.arch();
    let mut first_error = None;
    for &family in families {
        let options = PlanOptions::default()
            .with_family(Some(family))
            .with_pass(pass)
            .with_division(division)
            .with_board(kernels.board());
        let best = match best(like, arch, &options) {
            Ok(best) => best.spec,
            Err(error) => {
                first_error.get_or_insert(Error::Plan(error));
                continue;
            }
        };
        // All are ranked only where the first does not compile cleanly.
        let ranked = || plan(like, arch, &options).unwrap_or_default().into_iter().map(|plan| plan.spec);
        let specs = once(best).chain(once_with(ranked).flatten());
        match first_clean(specs, |spec| kernels.bind(problem, spec, division.splits)) {
            Ok(Some(Clean { bound, spec, .. })) => return Ok((bound, spec)),
            Ok(None) => {}
            // A plan's registers are a prediction: those of another family may be enough.
            Err(error) if error.is_of_kernel() => {
                first_error.get_or_insert(error.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(first_error.unwrap_or(Error::Plan(PlanError::NoneFits { arch, tried: 0, nearest: Vec::new() })))
}

/// The kernel that is predicted to be fastest of those compiled `ahead`, of the first family that has one;
/// `None` when none computes the problem.
fn best_ahead<'a>(
    arch: Arch,
    asked: &Asked<'_>,
    families: &[Family],
    ahead: impl Iterator<Item = &'a KernelSpec>,
) -> Option<&'a KernelSpec> {
    let Asked { like, pass, division, .. } = *asked;
    let constants = CostConstants::of(arch);
    let suits = |spec: &&KernelSpec| {
        let serves = spec.serves(like).is_ok() && division.admits(spec, like);
        spec.kernel.pass() == pass && serves
    };
    let place = |spec: &KernelSpec| families.iter().position(|family| *family == spec.kernel.family());
    ahead
        .filter(suits)
        .filter_map(|spec| Some((place(spec)?, predict(like, spec, arch, &constants).seconds, spec)))
        .min_by(|a, b| {
            let by_time = a.0.cmp(&b.0).then(a.1.total_cmp(&b.1));
            by_time.then_with(|| a.2.to_string().cmp(&b.2.to_string()))
        })
        .map(|(.., spec)| spec)
}
