//! Which half of attention a kernel computes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One pass over an attention problem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Pass {
    /// O and LSE from Q, K and V.
    #[default]
    Forward,
    /// dQ, dK and dV from Q, K, V, O, dO and LSE.
    Backward {
        /// Equal inputs give equal bits, at some cost in speed.
        deterministic: bool,
    },
}

impl Pass {
    /// The backward in which the order of additions to dQ may vary from run to run.
    pub const BACKWARD: Pass = Pass::Backward { deterministic: false };

    /// The backward in which equal inputs give equal bits.
    pub const DETERMINISTIC_BACKWARD: Pass = Pass::Backward { deterministic: true };

    /// Whether this is a backward, deterministic or not.
    pub const fn is_backward(self) -> bool {
        match self {
            Pass::Forward => false,
            Pass::Backward { .. } => true,
        }
    }

    /// Whether equal inputs must give equal bits by request; forwards always do.
    pub const fn deterministic(self) -> bool {
        match self {
            Pass::Forward => false,
            Pass::Backward { deterministic } => deterministic,
        }
    }

    /// `forward` or `backward`.
    pub const fn name(self) -> &'static str {
        match self {
            Pass::Forward => "forward",
            Pass::Backward { .. } => "backward",
        }
    }

    /// The short name on the command line and in file names: `fwd` or `bwd`.
    pub const fn short_name(self) -> &'static str {
        match self {
            Pass::Forward => "fwd",
            Pass::Backward { .. } => "bwd",
        }
    }
}

/// `forward`, `backward` or `deterministic backward`.
impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if self.deterministic() { "deterministic backward" } else { self.name() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_deterministic_backward_says_so() {
        let all = [Pass::Forward, Pass::BACKWARD, Pass::DETERMINISTIC_BACKWARD];
        assert_eq!(all.map(|pass| pass.to_string()), ["forward", "backward", "deterministic backward"]);
        assert_eq!(all.map(Pass::short_name), ["fwd", "bwd", "bwd"]);
        assert_eq!(all.map(Pass::is_backward), [false, true, true]);
    }
}
