//! What was planned for a problem, as data: what `fa plan --json` prints and the Python package gives.
//!
//! - `tried`: what was tried for a pass, of kernels that exist and of SM100 shapes, seen alike.
//! - `backward`: the backward's kernels, beside what the SM90 guide's model says of its candidates.
//! - `planned`: all passes that were asked for.

mod backward;
mod planned;
mod tried;

pub use backward::{Backward, BackwardReport, BackwardWhy};
pub use planned::{Planned, Report, WhyReport};
pub use tried::{LimitReport, PlanFamily, Plans, ReportError, Tried, TriedReport};
