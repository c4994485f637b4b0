//! The direction to plan.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Forward, backward, or both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Only the forward.
    Fwd,
    /// Only the backward.
    Bwd,
    /// Both.
    #[default]
    Both,
}

/// Not the name of a [`Mode`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown mode '{0}': use fwd, bwd or both")]
pub struct ParseModeError(pub String);

impl Mode {
    /// Whether it includes the forward.
    pub const fn has_fwd(self) -> bool {
        matches!(self, Mode::Fwd | Mode::Both)
    }

    /// Whether it includes the backward.
    pub const fn has_bwd(self) -> bool {
        matches!(self, Mode::Bwd | Mode::Both)
    }
}

impl FromStr for Mode {
    type Err = ParseModeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "fwd" => Ok(Mode::Fwd),
            "bwd" => Ok(Mode::Bwd),
            "both" => Ok(Mode::Both),
            _ => Err(ParseModeError(text.to_owned())),
        }
    }
}
