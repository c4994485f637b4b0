//! A problem's slopes, sinks and descales.

use fa_core::{Alibi, DescaleForm, Extra, Pass, Problem};

use crate::random::Random;
use crate::sequences::Sequences;
use crate::tensors::{kinds, spread};

/// The slopes, sinks and descales of a problem; empty where it has none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mods {
    /// ALiBi's slopes, `[heads_q]` or `[batch, heads_q]`.
    pub slopes: Vec<f32>,
    /// A logit for each query head, `[heads_q]`.
    pub sinks: Vec<f32>,
    /// What codes of Q, K and V are multiplied by: `[heads_kv]`, `[batch, heads_kv]`, or `[rows, heads_kv]` of
    /// the sequences' keys end to end.
    pub descales: [Vec<f32>; 3],
}

const DESCALES: [Extra; 3] = [Extra::QDescale, Extra::KDescale, Extra::VDescale];

impl Mods {
    /// ALiBi's slopes, halved from head to head, different for each sequence where the problem has slopes per
    /// sequence; sinks of the magnitude of scores; descales about those that suit the codes. The same for the
    /// same seed.
    pub fn random(problem: &Problem, sequences: &Sequences, seed: u64) -> Mods {
        let mut random = Random::new(seed ^ 0x2545_f491_4f6c_dd1d);
        random.bits();
        let heads = problem.heads_q;
        let entries = match problem.score.alibi {
            None => 0,
            Some(Alibi::PerHead) => 1,
            Some(Alibi::PerSequenceHead) => problem.lengths.sequences(),
        };
        let slope = |head: usize| (-8.0 * (head + 1) as f32 / heads as f32).exp2();
        let slopes = (0..entries)
            .flat_map(|_| (0..heads).map(slope).collect::<Vec<f32>>())
            .map(|slope| slope * (1.0 + random.below(4) as f32 / 4.0))
            .collect();
        let sinks = if problem.score.sinks { heads } else { 0 };
        let sinks = (0..sinks).map(|_| 2.0 * random.normal()).collect();
        let kinds = kinds(problem);
        let mut descale = |of: usize| {
            let len = match forms(problem)[of] {
                DescaleForm::TokenHead => sequences.k.total() * problem.heads_kv,
                DescaleForm::None | DescaleForm::Head | DescaleForm::SequenceHead => {
                    DESCALES[of].need(problem, Pass::Forward).map_or(0, |need| need.len)
                }
            };
            let one = 1.0 / kinds[of].map_or(1.0, spread);
            (0..len).map(|_| one * (0.5 + random.below(17) as f32 / 16.0)).collect()
        };
        Mods { slopes, sinks, descales: [0, 1, 2].map(&mut descale) }
    }

    /// As many slopes and sinks up to the largest number of f32, among ordinary ones: in turns by head.
    #[must_use]
    pub fn at_the_edges(&self) -> Mods {
        let turns = |of: &[f32], values: [f32; 5]| values.into_iter().cycle().take(of.len()).collect();
        Mods {
            slopes: turns(&self.slopes, [3e38, 0.5, 1e10, f32::MAX, 1e30]),
            sinks: turns(&self.sinks, [3e38, -3e38, 0.5, f32::MAX, 1e10]),
            descales: self.descales.clone(),
        }
    }

    /// Slopes of `heads` of a sequence; none where there are none.
    pub fn slopes_of(
        &self,
        problem: &Problem,
        sequence: usize,
        heads: std::ops::Range<usize>,
    ) -> Option<&[f32]> {
        let first = match problem.score.alibi {
            None => return None,
            Some(Alibi::PerHead) => 0,
            Some(Alibi::PerSequenceHead) => sequence * problem.heads_q,
        };
        self.slopes.get(first + heads.start..first + heads.end)
    }

    /// Sinks of `heads`; none where there are none.
    pub fn sinks_of(&self, problem: &Problem, heads: std::ops::Range<usize>) -> Option<&[f32]> {
        if problem.score.sinks { self.sinks.get(heads) } else { None }
    }

    /// The descales of Q, K and V of a K/V head of a sequence with keys at `rows`: one, or one for each of
    /// the rows; none where there are none.
    pub fn descales_of(
        &self,
        problem: &Problem,
        sequence: usize,
        kv_head: usize,
        rows: std::ops::Range<usize>,
    ) -> [Option<Vec<f32>>; 3] {
        let heads = problem.heads_kv;
        [0, 1, 2].map(|of| {
            let at = |row: usize| self.descales[of][row * heads + kv_head];
            match forms(problem)[of] {
                DescaleForm::None => None,
                DescaleForm::Head => Some(vec![at(0)]),
                DescaleForm::SequenceHead => Some(vec![at(sequence)]),
                DescaleForm::TokenHead => Some(rows.clone().map(at).collect()),
            }
        })
    }

    /// The LSE of a row of `head` that sees no key.
    pub fn lse_of_nothing(&self, head: usize) -> f32 {
        self.sinks.get(head).copied().unwrap_or(f32::NEG_INFINITY)
    }
}

/// The forms of the descales of Q, K and V.
pub(crate) fn forms(problem: &Problem) -> [DescaleForm; 3] {
    [problem.descales.q, problem.descales.k, problem.descales.v]
}
