//! Which of the two passes.

use fa_planner::plan::BackwardOptions;
use serde::{Deserialize, Serialize};

/// The forward, or the backward with its choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// O and LSE.
    Forward,
    /// dQ, dK and dV.
    Backward {
        /// The same bits in every run.
        deterministic: bool,
    },
}

impl Pass {
    /// `forward` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward { .. } => "backward",
        }
    }

    pub(crate) const fn options(self) -> Option<BackwardOptions> {
        match self {
            Pass::Forward => None,
            Pass::Backward { deterministic } => Some(BackwardOptions { deterministic }),
        }
    }
}
