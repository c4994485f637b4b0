//! Random problems of 16-bit types for the tests of planner and launch, which include this file.

#![allow(dead_code)] // Each test takes what it needs.

use fa_core::{Alibi, Dtype, Lengths, Mask, Problem, ScoreMod, Side, Types};
use proptest::prelude::*;

fn masks() -> impl Strategy<Value = Mask> {
    prop_oneof![
        Just(Mask::FULL),
        Just(Mask::CAUSAL),
        (0u32..5000, 0u32..5000).prop_map(|(left, right)| Mask::window(left, right)),
        (0u32..5000).prop_map(Mask::causal_window),
    ]
}

fn scores(softcap: impl Strategy<Value = Option<f64>>) -> impl Strategy<Value = ScoreMod> {
    let alibi = prop_oneof![Just(None), Just(Some(Alibi::PerHead)), Just(Some(Alibi::PerSequenceHead))];
    (softcap, alibi, any::<bool>()).prop_map(|(softcap, alibi, sinks)| {
        ScoreMod::NONE.with_softcap(softcap).with_alibi(alibi).with_sinks(sinks)
    })
}

/// Queries and keys: padded, packed or, for keys, in pages, with lengths in use or without.
fn sides(
    len: impl Strategy<Value = usize> + Clone,
    total: impl Strategy<Value = usize> + Clone,
    page: impl Strategy<Value = usize>,
) -> impl Strategy<Value = (Side, Side)> {
    let with_used = |side: Side, is_used: bool| if is_used { side.with_used() } else { side };
    let side =
        (total, len.clone(), any::<bool>(), any::<bool>()).prop_map(move |(total, max, used, packed)| {
            with_used(if packed { Side::packed(total, max) } else { Side::padded(max) }, used)
        });
    let paged = (page, 1usize..5000, len).prop_map(|(page, pages, max)| Side::paged(page, pages, max));
    (side.clone(), prop_oneof![side, paged])
}

/// Problems of these lengths and changes of scores: any group of heads, head dims and mask.
fn of(
    lengths: impl Strategy<Value = Lengths>,
    group: impl Strategy<Value = usize>,
    score: impl Strategy<Value = ScoreMod>,
) -> impl Strategy<Value = Problem> {
    let dtype = prop_oneof![Just(Dtype::F16), Just(Dtype::Bf16)];
    (lengths, 1usize..5, group, (1usize..33, 1usize..33), masks(), dtype, score).prop_map(
        |(lengths, heads_kv, group, (hd, hdv), mask, dtype, score)| {
            Problem::new(lengths, (heads_kv * group, heads_kv), (8 * hd, 8 * hdv), Types::same(dtype))
                .with_mask(mask)
                .with_score(score)
        },
    )
}

/// Problems of uniform lengths, with a soft cap or without.
pub(crate) fn uniform() -> impl Strategy<Value = Problem> {
    let lengths =
        (0usize..5, 0usize..20_000, 0usize..20_000).prop_map(|(batch, q, k)| Lengths::uniform(batch, q, k));
    let cap = prop_oneof![Just(None), Just(Some(30.0))];
    of(lengths, 1usize..9, cap.prop_map(|cap| ScoreMod::NONE.with_softcap(cap)))
}

/// Problems of every kind that a launch holds.
pub(crate) fn every_kind() -> impl Strategy<Value = Problem> {
    let len = prop_oneof![0usize..3, 0usize..300, 0usize..200_000];
    let batch = prop_oneof![0usize..5, 1usize..9000];
    let lengths =
        (batch, sides(len.clone(), len, 1usize..600)).prop_map(|(batch, (q, k))| Lengths::of(batch, q, k));
    let cap = prop_oneof![Just(None), Just(Some(30.0))];
    of(lengths, prop_oneof![1usize..9, Just(32usize)], scores(cap))
}

/// The same, and now and then a length, page, count of heads, soft cap or scale that no launch holds.
pub(crate) fn beyond_launches() -> impl Strategy<Value = Problem> {
    let len = prop_oneof![
        6 => 0usize..5,
        10 => 1usize..20_000,
        1 => (1usize << 29)..(1 << 31),
        1 => Just(1usize << 32),
    ];
    let page = prop_oneof![4 => 1usize..40, 2 => 40usize..600, 1 => Just(1usize << 31)];
    let batch = prop_oneof![12 => 0usize..9000, 1 => Just(1usize << 21)];
    let lengths =
        (batch, sides(len, 0usize..300_000, page)).prop_map(|(batch, (q, k))| Lengths::of(batch, q, k));
    let cap = prop_oneof![
        4 => Just(None),
        4 => (0.1f64..1024.0).prop_map(Some),
        1 => prop_oneof![Just(1024.5), Just(1e9), Just(1e-39), Just(1e-300)].prop_map(Some),
    ];
    let scale = prop_oneof![
        6 => Just(None),
        1 => (0.001f64..9.0).prop_map(Some),
        1 => prop_oneof![Just(0.0), Just(-1.0), Just(1e-39), Just(1e39)].prop_map(Some),
    ];
    let group = prop_oneof![8 => 1usize..9, 2 => Just(32usize), 1 => Just(1usize << 21)];
    (of(lengths, group, scores(cap)), scale)
        .prop_map(|(problem, softmax_scale)| problem.with_softmax_scale(softmax_scale))
}
