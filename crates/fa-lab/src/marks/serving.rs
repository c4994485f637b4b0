//! Attention in serving: packed batches, decoding, keys in pages, sinks, and a step of a served model.

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod};

use super::wanted::{DECODE_CALLS, Unit, Wanted};
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};

/// 32 query heads on 8 K/V heads, as an 8B model has them.
const GROUPED: Problem = Problem::square(1, 1, 32, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);

/// Layers of a step.
pub(super) const LAYERS: usize = 32;

fn skewed() -> Vec<usize> {
    let times = [(8192, 1), (4096, 2), (2048, 2), (1024, 2), (512, 3), (256, 3), (128, 2), (77, 1)];
    times.into_iter().flat_map(|(len, count)| vec![len; count]).collect()
}

/// Packed batches of one long and many short sequences, of equal ones, and of short ones; and the dense batch
/// of the equal ones.
pub(super) fn packed() -> Vec<Wanted> {
    let of = |name, lens: &[usize]| Wanted {
        name: Some(name),
        ..Wanted::of(GROUPED, Sequences::packed(lens), "packed, bf16")
    };
    let short: Vec<usize> = (0..60).map(|i| 100 + 7 * i).collect();
    let dense = GROUPED.with_lengths(Lengths::uniform(24, 1024, 1024));
    let dense = Wanted { name: Some("24 x 1024, dense"), ..Wanted::new(dense, "dense, bf16") };
    let comparison = Some("equal lengths, packed and dense");
    vec![
        of("skewed, 77 to 8192", &skewed()),
        Wanted { comparison, ..of("24 x 1024", &[1024; 24]) },
        of("60 of 100 to 513", &short),
        Wanted { comparison, ..dense },
    ]
}

/// Batch, query and K/V heads, keys.
const DECODE: [(usize, (usize, usize), usize); 8] = [
    (1, (32, 8), 8 << 10),
    (1, (32, 8), 64 << 10),
    (8, (32, 8), 8 << 10),
    (64, (32, 8), 4 << 10),
    (8, (32, 8), 32 << 10),
    (1, (64, 8), 128 << 10),
    (1, (32, 1), 32 << 10),
    (128, (64, 8), 1 << 10),
];

/// One query token, as replays of a CUDA graph.
pub(super) fn decode() -> Vec<Wanted> {
    let of = |(batch, (heads_q, heads_kv), keys)| {
        let lengths = Lengths::uniform(batch, 1, keys);
        let problem = GROUPED.with_lengths(lengths).with_heads(heads_q, heads_kv).with_mask(Mask::FULL);
        Wanted::decoding(problem, "decode, bf16")
    };
    DECODE.into_iter().map(of).collect()
}

/// Batch and keys of the rows of pages.
const CACHE: (usize, usize) = (64, 4096);

/// A cache of 64 x 4k keys, contiguous, in shuffled pages and in pages in order: one query token, and 512.
pub(super) fn paged() -> Vec<Wanted> {
    let (batch, keys) = CACHE;
    let lens = vec![keys; batch];
    let mut wanted = Vec::new();
    for (tokens, unit, graph) in [(1, Unit::KvBytes, DECODE_CALLS), (512, Unit::Flops, 0)] {
        let group = if tokens == 1 { "paged decode, bf16" } else { "paged prefill, bf16" };
        let mut row = |name, k| {
            let sequences = Sequences { q: Ragged::uniform(batch, tokens), k };
            let comparison = Some(group);
            let found = Wanted::of(GROUPED, sequences, group);
            wanted.push(Wanted { name: Some(name), unit, graph, comparison, ..found });
        };
        row("in one piece", Ragged::padded(&lens, keys));
        for (name, page) in
            [("pages of 16", 16), ("pages of 64", 64), ("pages of 128", 128), ("pages of 1", 1)]
        {
            row(name, Ragged::paged(&lens, page, 0, &mut Random::new(page as u64)));
        }
        // As an unfragmented allocator gives them.
        for (name, page) in [("pages of 16 in order", 16), ("pages of 1 in order", 1)] {
            row(name, Ragged::paged_in_runs(&lens, page, usize::MAX, 0, &mut Random::new(1)));
        }
    }
    wanted
}

/// A step of a served model: name, query and K/V heads, head dim, and of each sequence its new tokens and its
/// keys.
struct ServedStep {
    name: &'static str,
    heads: (usize, usize),
    head_dim: usize,
    lens: Vec<(usize, usize)>,
}

/// The most keys that a sequence may have: what a server is set to.
const MOST_KEYS: usize = 32 << 10;

/// The page of mixed steps, the smallest that FlashAttention 3 takes.
const STEP_PAGE: usize = 128;

/// Steps that mix chunks of prompts with decoding of 500 to 8,000 keys, packed queries on keys in pages; and
/// decoding by a GPU that has few of a model's heads, on a cache of fixed room.
pub(super) fn mixed() -> Vec<Wanted> {
    let mut random = Random::new(31);
    let mut decoded = |count: usize, tokens: usize| -> Vec<(usize, usize)> {
        (0..count).map(|_| (tokens, 500 + random.below(7501))).collect()
    };
    let mut after = |chunks: &[(usize, usize)], count: usize| -> Vec<(usize, usize)> {
        chunks.iter().copied().chain(decoded(count, 1)).collect()
    };
    let (llama, shared) = ((32, 8), (8, 1));
    let four = [(512, 512), (512, 1024), (512, 1536), (512, 2048)];
    let of = |name, heads, lens| ServedStep { name, heads, head_dim: 128, lens };
    let steps = [
        of("Llama 3 8B, 512 on 16k and 31 decoded", llama, after(&[(512, 16384)], 31)),
        of("Llama 3 8B, 2,048 new and 31 decoded", llama, after(&[(2048, 2048)], 31)),
        of("Llama 3 8B, 4 x 512 on up to 2,048", llama, after(&four, 0)),
        of("Llama 3 70B, 1 of 8, 512 on 16k and 31 decoded", shared, after(&[(512, 16384)], 31)),
        of("Llama 3 70B, 1 of 8, 4 x 512 on up to 2,048", shared, after(&four, 0)),
        of("Llama 3 70B, 1 of 8, 512 on 16k", shared, after(&[(512, 16384)], 0)),
        of("Llama 3 70B, 1 of 8, 2 x 1,024 on 16k", shared, after(&[(1024, 16384); 2], 0)),
        of("Qwen2.5 14B, 300 on 5,000 and 60 decoded", (40, 8), after(&[(300, 5000)], 60)),
        of("Qwen3 30B, 1 of 2, 1,500 new and 20 decoded", (16, 2), after(&[(1500, 1500)], 20)),
        ServedStep {
            head_dim: 64,
            ..of("gpt-oss 120B, 512 on 8k and 31 decoded", (64, 8), after(&[(512, 8192)], 31))
        },
    ];
    let decoding = [
        of("Llama 3 70B, 1 of 8, decoding 1 x 8k", shared, vec![(1, 8192)]),
        of("Llama 3 70B, 1 of 8, decoding 16", shared, decoded(16, 1)),
        of("Llama 3 70B, 1 of 8, 5 tokens guessed of 16", shared, decoded(16, 5)),
        of("Qwen2.5 72B, 1 of 4, decoding 40", (16, 2), decoded(40, 1)),
    ];
    let wanted = |step: ServedStep, packed: bool| {
        let (new, keys): (Vec<usize>, Vec<usize>) = step.lens.iter().copied().unzip();
        let (group, unit, q, k) = if packed {
            let pages = Ragged::paged(&keys, STEP_PAGE, 0, &mut Random::new(1));
            ("mixed steps, bf16", Unit::Flops, Ragged::packed(&new, 0), pages.bounded(MOST_KEYS))
        } else {
            let (q, k) = (Ragged::uniform(new.len(), new[0]), Ragged::padded(&keys, 8192));
            ("decoding on few heads, bf16", Unit::KvBytes, q, k)
        };
        let (heads_q, heads_kv) = step.heads;
        let (head_dim, head_dim_v) = (step.head_dim, step.head_dim);
        let problem = GROUPED.with_heads(heads_q, heads_kv).with_head_dims(head_dim, head_dim_v);
        let found = Wanted::of(problem, Sequences { q, k }, group);
        Wanted { name: Some(step.name), unit, graph: DECODE_CALLS, ..found }
    };
    let (steps, decoding) = (steps.into_iter(), decoding.into_iter());
    steps.map(|step| wanted(step, true)).chain(decoding.map(|step| wanted(step, false))).collect()
}

/// The layers of gpt-oss: a logit per head in the denominator, with and without a window; and without.
pub(super) fn sinks() -> Vec<Wanted> {
    let square = Problem::square(2, 8192, 64, 64, Mask::CAUSAL, Dtype::Bf16);
    let mut wanted = Vec::new();
    for (name, plain, mask) in [
        ("sinks", "no sinks", Mask::CAUSAL),
        ("sinks, window 128", "no sinks, window 128", Mask::causal_window(127)),
    ] {
        for (name, sinks) in [(name, true), (plain, false)] {
            let score = ScoreMod::NONE.with_sinks(sinks);
            let problem = square.with_heads_kv(8).with_mask(mask).with_score(score);
            let comparison = Some(plain);
            wanted.push(Wanted { name: Some(name), comparison, ..Wanted::new(problem, "sinks, bf16") });
        }
    }
    wanted
}

/// The attention of one step of a served 8B model: 32 layers of decoding for 32 sequences of 500 to 8,000
/// tokens in pages of 16, one CUDA graph.
pub(super) fn step() -> Vec<Wanted> {
    let mut random = Random::new(32);
    let lens: Vec<usize> = (0..32).map(|_| 500 + random.below(7501)).collect();
    let k = Ragged::paged(&lens, 16, 0, &mut random).bounded(8000);
    let sequences = Sequences { q: Ragged::uniform(32, 1), k };
    let name = Some("32 layers, B 32, 500 to 8000 keys");
    vec![Wanted { name, unit: Unit::StepMs, graph: LAYERS, ..Wanted::of(GROUPED, sequences, "a step, bf16") }]
}

/// Sequences of the decoding batches that are planned, up to the size of an embedding batch.
const PLANNED: [(&str, usize); 5] = [
    ("1 decode", 1),
    ("32 decodes", 32),
    ("256 decodes", 256),
    ("1024 decodes", 1024),
    ("8300 decodes", 8300),
];

/// The plan kernel alone: for decoding batches in pages of 16, few sequences with long caches and many with
/// short ones, and for packed batches.
pub(super) fn plan() -> Vec<Wanted> {
    let of = |name, sequences| Wanted {
        name: Some(name),
        unit: Unit::PlanUs,
        graph: LAYERS,
        ..Wanted::of(GROUPED, sequences, "work plan")
    };
    let decodes = PLANNED.into_iter().map(|(name, batch)| {
        let mut random = Random::new(batch as u64);
        let most = (200_000 / batch).clamp(32, 8000);
        let lens: Vec<usize> = (0..batch).map(|_| 1 + random.below(most)).collect();
        let k = Ragged::paged(&lens, 16, 0, &mut random).bounded(8000);
        of(name, Sequences { q: Ragged::uniform(batch, 1), k })
    });
    let many: Vec<usize> = (0..8300).map(|i| i * 7 % 16).collect();
    let packed = [
        ("16 packed, 77 to 8192", skewed()),
        ("24 packed of 1024", vec![1024; 24]),
        ("8300 packed of 0 to 15", many),
    ];
    decodes.chain(packed.map(|(name, lens)| of(name, Sequences::packed(&lens)))).collect()
}

#[cfg(test)]
mod tests {
    use fa_core::Pass;

    use super::*;

    #[test]
    fn the_packed_rows_are_those_of_the_issue() {
        let rows = packed();
        let total = |i: usize| rows[i].sequences().q.total();
        assert_eq!(total(0), 8192 + 2 * (4096 + 2048 + 1024) + 3 * (512 + 256) + 2 * 128 + 77);
        assert_eq!((rows[0].sequences().count(), total(1)), (16, 24 * 1024));
        let short = rows[2].sequences();
        assert_eq!((short.count(), short.q.len(0), short.q.len(59)), (60, 100, 513));
        // Equal lengths are as much work packed as dense; only visible pairs count.
        assert_eq!(rows[1].flops(Pass::Forward), rows[3].flops(Pass::Forward));
        assert_eq!(rows[3].flops(Pass::BACKWARD), rows[3].problem.flops_backward());
        let pairs: f64 = skewed().iter().map(|&n| (n * (n + 1) / 2) as f64).sum();
        assert_eq!(rows[0].flops(Pass::Forward), 4.0 * 128.0 * 32.0 * pairs);
    }

    #[test]
    fn decoding_counts_the_bytes_of_keys_and_values() {
        let rows = decode();
        assert_eq!(rows.len(), 8);
        assert!(rows.iter().all(|row| row.graph == DECODE_CALLS && row.unit == Unit::KvBytes));
        assert_eq!(rows[0].kv_bytes(), (8192 * 8 * 256 * 2) as f64);
        // 33.5 MB in 10 us.
        assert!((rows[0].rate(0.01, Pass::Forward) - 3.3554432).abs() < 1e-9);
    }

    #[test]
    fn pages_hold_what_one_piece_holds() {
        let rows = paged();
        assert_eq!(rows.len(), 14);
        for row in &rows {
            assert_eq!(row.kv_bytes(), rows[0].kv_bytes());
            assert!(!row.problem.lengths.is_uniform());
            row.problem.check().expect("a valid problem");
        }
        let pages: Vec<_> = rows.iter().map(|row| row.problem.lengths.page()).collect();
        let each = [None, Some(16), Some(64), Some(128), Some(1), Some(16), Some(1)];
        assert_eq!(pages, [each, each].concat());
        assert_eq!(rows[0].flops(Pass::Forward) * 512.0 / 4096.0 * 4096.0, {
            // One token sees all keys.
            512.0 * 4.0 * 128.0 * 32.0 * 64.0 * 4096.0
        });
    }

    #[test]
    fn a_step_is_the_time_of_all_layers() {
        let rows = step();
        let lens = rows[0].sequences().k;
        assert!((0..32).all(|b| (500..=8000).contains(&lens.len(b))));
        assert_eq!(rows[0].rate(0.5, Pass::Forward), 16.0);
        assert_eq!(Unit::StepMs.ratio(10.0, 15.0), 1.5);
        assert_eq!(Unit::StepMs.better(10.0, 15.0), 10.0);
    }

    #[test]
    fn plans_are_of_batches_whose_lengths_are_on_the_device() {
        let rows = plan();
        let batches: Vec<usize> = rows.iter().map(|row| row.problem.lengths.sequences()).collect();
        assert_eq!(batches, [1, 32, 256, 1024, 8300, 16, 24, 8300]);
        for row in &rows {
            row.problem.check().expect("a valid problem");
            assert!(row.unit == Unit::PlanUs && row.graph == LAYERS && !row.problem.lengths.is_uniform());
            // Both caches together.
            assert!(row.kv_bytes() < 2e9, "{:?}: {}", row.name, row.kv_bytes());
        }
        assert_eq!(rows[0].rate(0.004, Pass::Forward), 4.0);
        assert_eq!(Unit::PlanUs.ratio(4.0, 5.0), 1.25);
        assert_eq!(Unit::PlanUs.better(4.0, 5.0), 4.0);
    }

    #[test]
    fn rows_whose_ratio_counts_are_one_comparison() {
        assert_eq!(Wanted::comparisons(&packed()), [vec![0], vec![1, 3], vec![2]]);
        assert_eq!(Wanted::comparisons(&paged()), [(0..7).collect::<Vec<_>>(), (7..14).collect()]);
        assert_eq!(Wanted::comparisons(&sinks()), [[0, 1], [2, 3]]);
        assert_eq!(Wanted::comparisons(&decode()).len(), 8);
        let mut halves = sinks();
        halves[1].problem.types = fa_core::Types::same(Dtype::F16);
        assert_eq!(Wanted::comparisons(&halves), [vec![0], vec![1], vec![2, 3]]);
    }

    #[test]
    fn sinks_stand_beside_the_same_without() {
        let rows = sinks();
        assert_eq!(rows.len(), 4);
        for pair in rows.chunks(2) {
            assert!(pair[0].problem.score.sinks && !pair[1].problem.score.sinks);
            assert_eq!(pair[0].problem.with_score(ScoreMod::NONE), pair[1].problem);
        }
    }
}
