//! The planner's choice, and that among kernels that were compiled ahead.

use std::iter::{once, once_with};

use fa_core::{Arch, Family, KernelSpec};
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanError, PlanOptions, best, plan};

use super::asked::Asked;
use crate::clean::{Clean, first_clean};
use crate::error::Error;

/// The best of the planner's kernels that compiles cleanly; where there is no compiler that works, the best
/// of those that were compiled `ahead`.
pub(super) fn planned_or_ahead<'a, P, A: Iterator<Item = &'a KernelSpec>>(
    asked: (Asked<'_>, Arch),
    families: &[Family],
    ahead: impl Fn() -> A,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    use fa_kernels::Error::{BadCompiler, NoCompiler};
    match planned(asked, families, &bind) {
        Err(Error::Kernels(error @ (NoCompiler { .. } | BadCompiler { .. }))) => {
            let (Asked { pass, .. }, arch) = asked;
            tracing::warn!(%error, "only kernels that were compiled ahead run");
            compiled_ahead(asked, families, ahead(), bind).ok_or_else(|| match ahead().count() {
                0 => Error::Kernels(error),
                have => Error::NoneAhead { arch, pass, have, compiler: Box::new(error) },
            })?
        }
        planned => planned,
    }
}

/// The best of the planner's kernels that compiles cleanly, of the first family that has one.
fn planned<P>(
    (Asked { problem, pass, division, .. }, arch): (Asked<'_>, Arch),
    families: &[Family],
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    let mut first_error = None;
    for &family in families {
        let options = PlanOptions { family: Some(family), pass, division, ..PlanOptions::default() };
        let best = match best(problem, arch, &options) {
            Ok(best) => best.spec,
            Err(error) => {
                first_error.get_or_insert(Error::Plan(error));
                continue;
            }
        };
        // All are ranked only where the first does not compile cleanly.
        let ranked = || plan(problem, arch, &options).unwrap_or_default().into_iter().map(|plan| plan.spec);
        let specs = once(best).chain(once_with(ranked).flatten());
        match first_clean(specs, &bind) {
            Ok(Some(Clean { bound, spec, .. })) => return Ok((bound, spec)),
            Ok(None) => {}
            // A plan's registers are a prediction: those of another family may be enough.
            Err(error @ fa_kernels::Error::Refused { .. }) => {
                first_error.get_or_insert(error.into());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(first_error.unwrap_or(Error::Plan(PlanError::NoneFits { arch, tried: 0, nearest: Vec::new() })))
}

/// The kernel that is predicted to be fastest of those compiled `ahead`; `None` when none computes the
/// problem.
fn compiled_ahead<'a, P>(
    (Asked { problem, pass, division, .. }, arch): (Asked<'_>, Arch),
    families: &[Family],
    ahead: impl Iterator<Item = &'a KernelSpec>,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Option<Result<(P, KernelSpec), Error>> {
    let constants = CostConstants::of(arch);
    let suits = |spec: &&KernelSpec| {
        let serves = spec.serves(problem).is_ok() && division.admits(spec, problem);
        families.contains(&spec.kernel.family()) && spec.kernel.pass() == pass && serves
    };
    let spec = ahead
        .filter(suits)
        .map(|spec| (predict(problem, spec, arch, &constants).seconds, spec))
        .min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.to_string().cmp(&b.1.to_string())))?
        .1;
    Some(bind(spec).map(|bound| (bound, spec.clone())).map_err(Error::from))
}
