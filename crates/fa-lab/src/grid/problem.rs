//! The problem that a kernel is tried on where only lengths and heads are given.

use fa_core::{Alibi, DescaleForm, Descales, KernelSpec, Lengths, Mask, MaskKind, Problem, ScoreMod};

/// A problem that a kernel of `spec` computes: its head dims and types, a mask of its kind (a window of 40
/// keys before the diagonal and 7 after it), its score modifiers (a soft cap of 15, a slope per head), and
/// the descales of fp8 (per sequence and head). There are at most as many K/V heads as query heads.
pub fn problem_of(spec: &KernelSpec, lengths: Lengths, (heads_q, heads_kv): (usize, usize)) -> Problem {
    let mask = match spec.mask {
        MaskKind::Full => Mask::FULL,
        MaskKind::Causal => Mask::CAUSAL,
        MaskKind::Window => Mask::window(40, 7),
    };
    let traits = spec.traits();
    let scale = traits.is_latent.then(|| 1.0 / f64::from(spec.head_dim).sqrt());
    let of_fp8 = Descales::all(DescaleForm::SequenceHead);
    let descales = if spec.types.is_fp8() { of_fp8 } else { Descales::NONE };
    Problem::new(
        lengths,
        (heads_q * traits.head_parts as usize, heads_kv.min(heads_q)),
        (spec.head_dim as usize, spec.head_dim_v as usize),
        spec.types,
    )
    .with_latent(traits.is_latent)
    .with_softmax_scale(scale)
    .with_mask(mask)
    .with_descales(descales)
    .with_score(
        ScoreMod::NONE
            .with_softcap(spec.score.softcap.then_some(15.0))
            .with_alibi(spec.score.alibi.then_some(Alibi::PerHead))
            .with_sinks(spec.score.sinks)
            .with_program(spec.score.program),
    )
}
