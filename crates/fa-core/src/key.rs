//! Problems as keys of maps.

use crate::program::Interned;
use crate::{Alibi, Descales, Lengths, Mask, Problem, Types};

/// A [`Problem`] as the key of a map: two are equal where all fields are, floats by their bits, but for the
/// values of dropout, which no kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProblemKey {
    lengths: Lengths,
    heads: [usize; 2],
    head_dims: [usize; 2],
    latent: bool,
    mask: Mask,
    types: Types,
    descales: Descales,
    softmax_scale: Option<u64>,
    softcap: Option<u64>,
    alibi: Option<Alibi>,
    sinks: bool,
    program: Option<Interned>,
}

impl From<&Problem> for ProblemKey {
    fn from(problem: &Problem) -> ProblemKey {
        let Problem { lengths, heads_q, heads_kv, head_dim, head_dim_v, latent, mask, types, .. } = *problem;
        let Problem { descales, softmax_scale, score, .. } = *problem;
        ProblemKey {
            lengths,
            heads: [heads_q, heads_kv],
            head_dims: [head_dim, head_dim_v],
            latent,
            mask,
            types,
            descales,
            softmax_scale: softmax_scale.map(f64::to_bits),
            softcap: score.softcap.map(f64::to_bits),
            alibi: score.alibi,
            sinks: score.sinks,
            program: score.program,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DescaleForm, Dtype};

    #[test]
    fn keys_tell_problems_apart() {
        let problem = Problem::square(1, 128, 4, 64, Mask::CAUSAL, Dtype::Bf16);
        assert_eq!(ProblemKey::from(&problem), ProblemKey::from(&problem));
        let others = [
            problem.with_heads_kv(2),
            problem.with_head_dim_v(32),
            problem.with_latent(true),
            problem.with_mask(Mask::FULL),
            problem.with_softmax_scale(Some(0.5)),
            problem.with_lengths(Lengths::uniform(1, 128, 64)),
            problem.with_score(problem.score.with_softcap(Some(30.0))),
            problem.with_score(problem.score.with_sinks(true)),
            problem.with_types(problem.types.with_kv(Dtype::E4m3)),
            problem.with_descales(Descales::NONE.with_v(DescaleForm::Head)),
            problem.with_descales(Descales::NONE.with_q(DescaleForm::Head)),
        ];
        for other in others {
            assert_ne!(ProblemKey::from(&problem), ProblemKey::from(&other), "{other:?}");
        }
    }
}
