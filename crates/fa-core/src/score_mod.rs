//! What is done to scaled scores before the mask and the softmax.
//!
//! With `d = |i + seqlen_k - seqlen_q + offset - j|` (the mask's offset), the score of query `i` and key `j`
//! is `softcap(scale * q.k) - slope * d`. A sink is one more logit of each row, in natural units, neither
//! scaled nor capped nor masked: it joins the denominator and has no value. **LSE includes the sink**; a row
//! that sees no key has `O = 0` and `LSE = sink` (`-inf` without one). Its gradient is `dsink[h] = -sum over
//! the head's rows of exp(sink[h] - lse) * dPsum`. Partial results (splits of the keys, merges) leave the
//! sink out; it is combined once.
//!
//! Sinks and slopes may be as large as f32 holds. A row whose sink is above every score has `O = 0` and
//! `LSE = sink`, to the last bit; with a slope that large a query sees the key at distance 0 alone. Softmaxes
//! are computed in f32 as powers of 2: the exponent of a key that is to be seen, its score times log2(e), has
//! to be within f32 (3.4e38 in magnitude). Where a row's every key lies beyond, as with such a slope and no
//! key at distance 0, its results are finite and otherwise unspecified.
//!
//! GPU kernels scale a score and subtract the row's largest exponent, which is rounded to f32, in one
//! multiply-add. For exponents of 2^31 and more (2^28 where P is f16) that rounding exceeds the range of P:
//! such rows are right where the scaled scores are exact in f32, and may be empty or not finite otherwise.
//! Kernels with natural exponentials and the CPU round both alike.

use serde::{Deserialize, Serialize};

use crate::program::{Interned, ScoreClass};
use crate::{Dropout, with_methods};

/// Changes of the scaled scores of a problem, with their run-time values. Slopes and sinks are tensors of the
/// call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ScoreMod {
    /// `cap * tanh(s / cap)`; `None` for no cap.
    pub softcap: Option<f64>,
    /// ALiBi: a penalty that grows with the distance from the diagonal; `None` for none.
    pub alibi: Option<Alibi>,
    /// A logit per query head, f32 `[heads_q]`, in the denominator of the softmax.
    pub sinks: bool,
    /// A mask, a change of scores and weights of probabilities of the caller's own, or some of these. The
    /// mask hides keys that [`crate::Mask`] leaves visible. The change takes the scaled score; a cap and
    /// ALiBi are then a part of it. A weight is a factor of the probability, which has been normalised, and
    /// the LSE made, without it: `O = (P * weight) V`.
    pub program: Option<Interned>,
    /// The values of the program's dropout ([`Dropout::of`]): what draws a program's inputs makes its bits
    /// from them. Calls read the bits that they are given, so that another seed is no other problem.
    pub dropout: Option<Dropout>,
}

/// The shape of the tensor of slopes of ALiBi.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alibi {
    /// f32 `[heads_q]`.
    PerHead,
    /// f32 `[batch, heads_q]`.
    PerSequenceHead,
}

/// The changes of scores that a kernel has code for; their values are run-time parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScoreKind {
    /// Scores pass through `cap * tanh(s / cap)`.
    pub softcap: bool,
    /// `slope * |i + seqlen_k - seqlen_q - j|` is subtracted from scores.
    pub alibi: bool,
    /// A logit per query head joins the denominator.
    pub sinks: bool,
    /// The caller's own mask, change of scores and weights.
    pub program: Option<Interned>,
}

impl ScoreMod {
    /// Scores as they are.
    pub const NONE: ScoreMod =
        ScoreMod { softcap: None, alibi: None, sinks: false, program: None, dropout: None };

    /// A soft cap and nothing else.
    pub const fn softcap(cap: f64) -> ScoreMod {
        ScoreMod::NONE.with_softcap(Some(cap))
    }

    with_methods! {
        with_softcap(softcap: Option<f64>),
        with_alibi(alibi: Option<Alibi>),
        with_sinks(sinks: bool),
        with_program(program: Option<Interned>),
        with_dropout(dropout: Option<Dropout>),
    }

    /// What a kernel needs code for.
    pub const fn kind(&self) -> ScoreKind {
        ScoreKind {
            softcap: self.softcap.is_some(),
            alibi: self.alibi.is_some(),
            sinks: self.sinks,
            program: self.program,
        }
    }
}

impl Alibi {
    /// The name in RON and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Alibi::PerHead => "per_head",
            Alibi::PerSequenceHead => "per_sequence_head",
        }
    }

    /// Slopes for a batch of `sequences` with `heads_q` query heads; at most `usize::MAX`.
    pub const fn count(self, sequences: usize, heads_q: usize) -> usize {
        match self {
            Alibi::PerHead => heads_q,
            Alibi::PerSequenceHead => sequences.saturating_mul(heads_q),
        }
    }
}

impl ScoreKind {
    /// Scores as they are.
    pub const NONE: ScoreKind = ScoreKind { softcap: false, alibi: false, sinks: false, program: None };

    /// Whether a program masks keys.
    pub fn masks(&self) -> bool {
        self.program.is_some_and(|program| program.mask().is_some())
    }

    /// Whether a program changes scores.
    pub fn changes(&self) -> bool {
        self.program.is_some_and(|program| program.score().is_some())
    }

    /// Whether a program has weights of probabilities.
    pub fn weighs(&self) -> bool {
        self.program.is_some_and(|program| program.weight().is_some())
    }

    /// Whether that program's derivative by the score is other than 1.
    pub fn has_slope(&self) -> bool {
        self.changes()
            && !self.program.is_some_and(|own| matches!(own.class(), Some(ScoreClass::Additive { .. })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_is_what_is_on() {
        assert_eq!(ScoreMod::NONE.kind(), ScoreKind::NONE);
        assert_eq!(ScoreMod::NONE, ScoreMod::default());
        assert_eq!(ScoreMod::softcap(1.0).kind(), ScoreKind { softcap: true, ..ScoreKind::NONE });
        let all = ScoreMod::softcap(1.0).with_alibi(Some(Alibi::PerHead)).with_sinks(true);
        assert_eq!(all.kind(), ScoreKind { softcap: true, alibi: true, sinks: true, ..ScoreKind::NONE });
        assert_eq!(Alibi::PerHead.count(3, 8), 8);
        assert_eq!(Alibi::PerSequenceHead.count(3, 8), 24);
    }
}
