//! Checks of a call's extras.

use fa_core::Problem;
use fa_cpu::{CpuError, check};

/// Checks that a buffer for the gradient of the sinks belongs to a problem with sinks, and is `[heads_q]`.
pub(crate) fn check_dsinks(problem: &Problem, dsinks: Option<&[f32]>) -> Result<(), CpuError> {
    match dsinks {
        Some(_) if !problem.score.sinks => Err(CpuError::Extra { name: "dsinks", asked: false }),
        Some(dsinks) => check::check_len("dsinks", dsinks.len(), problem.heads_q),
        None => Ok(()),
    }
}
