//! The planner's first choices for packed, paged and split problems: they have to compile as planned.

use fa_core::{
    Alibi, Arch, DescaleForm, Descales, Dtype, Family, KernelSpec, Lengths, Mask, Pass, Problem, ScoreMod,
    Side, Types,
};
use fa_planner::plan::{PlanOptions, plan};

use crate::error::Result;

/// Kinds of calls that engines make, with a head dim.
fn problems(head_dim: usize) -> Vec<Problem> {
    let base = Problem::square(1, 1, 1, head_dim, Mask::CAUSAL, Dtype::Bf16).with_heads(32, 8);
    let of = |lengths, mask, score| base.with_lengths(lengths).with_mask(mask).with_score(score);
    let decode = Lengths::of(64, Side::packed(64, 1), Side::paged(16, 32 << 10, 8 << 10));
    let few = Lengths::of(4, Side::padded(8), Side::padded(8 << 10).with_used());
    let packed = Lengths::packed(24, 16 << 10, 16 << 10, 8 << 10, 8 << 10);
    let chunk = Lengths::of(8, Side::packed(4096, 512), Side::paged(64, 4096, 16 << 10));
    let alibi = ScoreMod::NONE.with_alibi(Some(Alibi::PerHead));
    let sinks = ScoreMod::NONE.with_sinks(true);
    vec![
        of(Lengths::uniform(1, 1, 8 << 10), Mask::FULL, ScoreMod::NONE),
        of(Lengths::uniform(1, 4, 8 << 10), Mask::causal_window(4095), sinks),
        of(decode, Mask::CAUSAL, ScoreMod::NONE),
        of(decode, Mask::CAUSAL, alibi),
        of(few, Mask::CAUSAL, ScoreMod::softcap(30.0)),
        of(packed, Mask::CAUSAL, ScoreMod::NONE),
        of(packed, Mask::causal_window(127), sinks),
        of(packed, Mask::FULL, ScoreMod::NONE),
        of(chunk, Mask::CAUSAL, ScoreMod::NONE),
    ]
}

/// Where the account once had room and the compiler did not: ALiBi near the limit, lengths on the device
/// beside large tiles, gradients at head dim 256, keys divided among CTAs.
fn near_the_register_limit() -> Vec<(Problem, Family, Pass)> {
    let alibi = ScoreMod::NONE.with_alibi(Some(Alibi::PerHead));
    let of = |head_dim, mask| Problem::square(2, 8192, 32, head_dim, mask, Dtype::Bf16).with_heads_kv(8);
    let packed =
        |problem: Problem| problem.with_lengths(Lengths::packed(24, 16 << 10, 16 << 10, 8 << 10, 8 << 10));
    let few = of(128, Mask::FULL).with_lengths(Lengths::uniform(1, 4, 8 << 10));
    let with_alibi = |problem: Problem| problem.with_score(alibi);
    vec![
        (with_alibi(of(128, Mask::FULL)), Family::Sm80, Pass::Forward),
        (with_alibi(of(128, Mask::FULL)), Family::Sm90, Pass::Forward),
        (packed(of(128, Mask::FULL)), Family::Sm80, Pass::Forward),
        (packed(of(256, Mask::CAUSAL)), Family::Sm90, Pass::BACKWARD),
        (packed(of(256, Mask::CAUSAL)), Family::Sm80, Pass::BACKWARD),
        (few, Family::Sm90, Pass::Forward),
    ]
}

/// Latents and wide heads: tokens of a server's step, pages of any size, and whole sequences.
fn wide() -> Vec<Problem> {
    let latent = Problem::square(1, 1, 128, 576, Mask::CAUSAL, Dtype::Bf16)
        .with_heads_kv(1)
        .with_head_dim_v(512)
        .with_latent(true)
        .with_softmax_scale(Some(1.0 / 192f64.sqrt()));
    let paged = |page: usize| {
        let cache = Side::paged(page, (512 << 10) / page, 8 << 10);
        latent.with_heads(16, 1).with_lengths(Lengths::of(64, Side::padded(2), cache))
    };
    let square = Problem::square(1, 8 << 10, 8, 512, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(4);
    let dense = latent.with_lengths(Lengths::uniform(8, 1, 8 << 10));
    let in_codes = |problem: Problem, kv| {
        let types = Types::same(Dtype::Bf16).with_kv(kv);
        problem.with_types(types).with_descales(Descales::both(DescaleForm::Head))
    };
    vec![
        dense,
        paged(64),
        paged(1),
        square,
        square.with_head_dims(320, 256),
        in_codes(dense, Dtype::E4m3),
        in_codes(paged(64), Dtype::E4m3),
        in_codes(square, Dtype::E4m3),
        in_codes(square.with_head_dims(320, 256), Dtype::Int8),
    ]
}

/// The first choices, each once.
///
/// # Errors
/// A problem without a kernel.
pub(super) fn choices() -> Result<Vec<KernelSpec>> {
    let mut wanted: Vec<KernelSpec> = Vec::new();
    let mut add = |problem: &Problem, options: &PlanOptions| -> Result<()> {
        let spec = plan(problem, Arch::Sm90, options)?.swap_remove(0).spec;
        if !wanted.contains(&spec) {
            wanted.push(spec);
        }
        Ok(())
    };
    for head_dim in [64, 96, 128, 256] {
        for problem in problems(head_dim) {
            add(&problem, &PlanOptions::default())?;
        }
    }
    for problem in wide() {
        add(&problem, &PlanOptions::default())?;
    }
    for (problem, family, pass) in near_the_register_limit() {
        add(&problem, &PlanOptions::default().with_family(Some(family)).with_pass(pass))?;
    }
    Ok(wanted)
}
