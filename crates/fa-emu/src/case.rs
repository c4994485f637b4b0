//! A problem that a kernel is tried on: its layout, lengths, slopes and sinks.

use fa_core::{Alibi, KernelSpec, Lengths, Mask, MaskKind, Problem, ScoreMod};
use fa_cpu::OwnedExtras;

use crate::extras::with_mods;
use crate::proof::Placing;

/// A problem in a layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The problem.
    pub problem: Problem,
    /// How its tensors lie.
    pub placing: Placing,
    /// What it asks for beside them.
    pub extras: OwnedExtras,
}

impl Case {
    /// Of sequences of equal lengths.
    pub fn of(problem: &Problem, placing: Placing) -> Case {
        Case { problem: *problem, placing, extras: with_mods(OwnedExtras::NONE, problem) }
    }
}

/// What a kernel of `spec` computes, with these heads.
pub(crate) fn problem(spec: &KernelSpec, lengths: Lengths, (heads_q, heads_kv): (usize, usize)) -> Problem {
    let mask = match spec.mask {
        MaskKind::Full => Mask::FULL,
        MaskKind::Causal => Mask::CAUSAL,
        MaskKind::Window => Mask::window(40, 7),
    };
    let (head_dim, head_dim_v) = (spec.head_dim as usize, spec.head_dim_v as usize);
    // Two heads of wide rows take as long as four of narrow ones.
    let heads_q = if head_dim > 128 { heads_q.min(2) } else { heads_q };
    let score = ScoreMod {
        softcap: spec.score.softcap.then_some(15.0),
        alibi: spec.score.alibi.then_some(Alibi::PerHead),
        sinks: spec.score.sinks,
    };
    Problem {
        lengths,
        heads_q,
        heads_kv: heads_kv.min(heads_q),
        head_dim,
        head_dim_v,
        mask,
        types: spec.types,
        softmax_scale: None,
        score,
    }
}
