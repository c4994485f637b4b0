//! The problem that a kernel is tried on where only lengths and heads are given.

use fa_core::{Alibi, DescaleForm, Descales, KernelSpec, Lengths, Mask, MaskKind, Problem, ScoreMod};

/// A problem that a kernel of `spec` computes: its head dims and types, a mask of its kind (a window of 40
/// keys before the diagonal and 7 after it), its score modifiers (a soft cap of 15, a slope per head), and
/// descales of codes (per sequence and head). There are at most as many K/V heads as query heads.
pub fn problem_of(spec: &KernelSpec, lengths: Lengths, (heads_q, heads_kv): (usize, usize)) -> Problem {
    let mask = match spec.mask {
        MaskKind::Full => Mask::FULL,
        MaskKind::Causal => Mask::CAUSAL,
        MaskKind::Window => Mask::window(40, 7),
    };
    let traits = spec.traits();
    let scale = traits.is_latent.then(|| 1.0 / f64::from(spec.head_dim).sqrt());
    Problem::new(
        lengths,
        (heads_q * traits.head_parts as usize, heads_kv.min(heads_q)),
        (spec.head_dim as usize, spec.head_dim_v as usize),
        spec.types,
    )
    .with_latent(traits.is_latent)
    .with_softmax_scale(scale)
    .with_mask(mask)
    .with_descales(descales(spec, 0))
    .with_score(
        ScoreMod::NONE
            .with_softcap(spec.score.softcap.then_some(15.0))
            .with_alibi(spec.score.alibi.then_some(Alibi::PerHead))
            .with_sinks(spec.score.sinks)
            .with_program(spec.score.program),
    )
}

/// Forms of the descales of a K and V of codes, of which kernels read any.
const OF_CACHES: [(DescaleForm, DescaleForm); 6] = [
    (DescaleForm::SequenceHead, DescaleForm::SequenceHead),
    (DescaleForm::TokenHead, DescaleForm::TokenHead),
    (DescaleForm::Head, DescaleForm::TokenHead),
    (DescaleForm::None, DescaleForm::None),
    (DescaleForm::TokenHead, DescaleForm::SequenceHead),
    (DescaleForm::Head, DescaleForm::Head),
];

/// Descales of a cache, in turns.
pub(super) fn of_caches(turn: usize) -> Descales {
    let (k, v) = OF_CACHES[turn % OF_CACHES.len()];
    Descales::new(k, v)
}

/// Those of fp8.
pub(super) const OF_FP8: [DescaleForm; 3] = [DescaleForm::SequenceHead, DescaleForm::Head, DescaleForm::None];

/// Descales that a kernel of `spec` reads, in turns of every form; none beside tensors of 16 bits.
pub(super) fn descales(spec: &KernelSpec, turn: usize) -> Descales {
    match (spec.types.is_fp8(), spec.reads_codes()) {
        (true, _) => Descales::all(OF_FP8[turn % OF_FP8.len()]),
        (false, true) => of_caches(turn),
        (false, false) => Descales::NONE,
    }
}

/// Columns by which a head dim is narrower than a kernel's, where rows stay aligned: of codes these are
/// 16 bytes, too.
pub(super) fn narrower(spec: &KernelSpec) -> usize {
    if spec.types.kv.is_code() { 16 * spec.types.kv.per_element() } else { 8 }
}
