//! What is done to scaled scores before the mask and the softmax.

/// Changes of the scaled scores of a problem, with their run-time values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScoreMod {
    /// `cap * tanh(s / cap)`; `None` for no cap.
    pub softcap: Option<f64>,
}

/// The changes of scores that a kernel has code for; their values are run-time parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScoreKind {
    /// Scores pass through `cap * tanh(s / cap)`.
    pub softcap: bool,
}

impl ScoreMod {
    /// Scores as they are.
    pub const NONE: ScoreMod = ScoreMod { softcap: None };

    /// A soft cap and nothing else.
    pub const fn softcap(cap: f64) -> ScoreMod {
        ScoreMod { softcap: Some(cap) }
    }

    /// What a kernel needs code for.
    pub const fn kind(&self) -> ScoreKind {
        ScoreKind { softcap: self.softcap.is_some() }
    }
}

impl ScoreKind {
    /// Scores as they are.
    pub const NONE: ScoreKind = ScoreKind { softcap: false };
}
