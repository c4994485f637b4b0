//! Packed sequences over ranks.

use fa_core::{Lengths, Mask, Problem};
use fa_cpu::Extras;
use fa_dist::{Layout, MemoryOptions, MemoryTransport, Order, Scheme, ShardPlan};

use crate::cases::{plans, problem};
use crate::oracle::{check_plan, inputs, rank};

#[test]
fn ulysses_takes_packed_sequences() {
    let starts = [0, 5, 5, 30, 41];
    let square = problem(1, (41, 41), (4, 2), Mask::CAUSAL);
    let packed = square.with_lengths(Lengths::packed(4, 41, 41, 25, 25));
    let extras = Extras { cu_seqlens_q: Some(&starts), cu_seqlens_k: Some(&starts), ..Extras::NONE };
    for world in [1, 2, 4] {
        for plan in plans(&packed, world) {
            assert_eq!(plan.scheme(), Scheme::Ulysses);
            check_plan::<f32>(&plan, &extras, Order::Listed);
        }
    }
    let latent = problem(1, (1, 9), (4, 1), Mask::FULL).with_head_dim(24).with_latent(true);
    let latent = latent.with_softmax_scale(Some(0.2));
    let refused = ShardPlan::new(&latent, 2, Scheme::Decode, Layout::Contiguous).unwrap_err().to_string();
    assert!(refused.contains("does not compute latent problems"), "{refused}");
    for (scheme, part) in [
        (Scheme::Ring, "packed sequences of unknown starts: use ShardPlan::packed, or ulysses"),
        (
            Scheme::Decode,
            "decode over 2 ranks does not compute packed sequences: use gather, ulysses or ring",
        ),
        (Scheme::Gather, "packed sequences of unknown starts: use ShardPlan::packed, or ulysses"),
    ] {
        let refused = ShardPlan::new(&packed, 2, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn packed_sequences_are_dealt_as_one() {
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    for starts in [&[0, 5, 5, 30, 41][..], &[0, 41], &[0, 1, 2, 41], &[0, 20, 41, 41], &[0, 0, 0]] {
        let total = starts[starts.len() - 1] as usize;
        let longest = starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap();
        let extras = Extras { cu_seqlens_q: Some(starts), cu_seqlens_k: Some(starts), ..Extras::NONE };
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::causal_window(7)] {
            let one = problem(1, (total, total), (4, 2), mask);
            let lengths = Lengths::packed(starts.len() - 1, total, total, longest, longest);
            let packed = one.with_lengths(lengths);
            let alibi = packed.with_score(one.score.with_alibi(Some(fa_core::Alibi::PerHead)));
            let sinks = packed.with_score(one.score.with_sinks(true));
            let of_slopes = Extras { alibi_slopes: Some(&slopes), ..extras };
            let of_sinks = Extras { sinks: Some(&slopes), ..extras };
            for (problem, extras) in [(packed, extras), (alibi, of_slopes), (sinks, of_sinks)] {
                for (scheme, layout) in [
                    (Scheme::Gather, Layout::Zigzag),
                    (Scheme::Gather, Layout::Contiguous),
                    (Scheme::Ring, Layout::Zigzag),
                    (Scheme::Ring, Layout::Contiguous),
                    (Scheme::Ulysses, Layout::Contiguous),
                ] {
                    for world in [1, 2, 3, 4] {
                        let is_refused = scheme == Scheme::Ulysses && world == 3;
                        match ShardPlan::packed(&problem, starts, world, scheme, layout) {
                            Ok(plan) => {
                                assert!(!is_refused);
                                check_plan::<f32>(&plan.with_tiles(1, 4), &extras, Order::Seeded(3));
                            }
                            Err(error) => assert!(is_refused, "{error}"),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn packed_sequences_that_contradict_themselves_are_refused() {
    let square = problem(1, (41, 41), (4, 2), Mask::CAUSAL);
    let packed = square.with_lengths(Lengths::packed(3, 41, 41, 25, 25));
    let plan = |problem: &Problem, starts: &[i32], scheme| {
        ShardPlan::packed(problem, starts, 2, scheme, Layout::Zigzag).map(drop).unwrap_err().to_string()
    };
    for starts in [&[0, 5, 30][..], &[0, 5, 30, 40], &[0, 30, 5, 41], &[1, 5, 30, 41], &[0, 5, 35, 41]] {
        let refused = plan(&packed, starts, Scheme::Gather);
        let part = "the plan needs 4 values that ascend from 0 to the 41 rows, by at most 25";
        assert!(refused.contains(&format!("starts is {starts:?}, {part}")), "{refused}");
    }
    let starts = [0, 5, 30, 41];
    assert!(plan(&square, &starts, Scheme::Gather).contains("packed queries and keys"));
    assert!(plan(&packed, &starts, Scheme::Decode).contains("packed sequences: use gather, ulysses or ring"));
    let window = packed.with_mask(Mask::window(3, 3));
    assert!(plan(&window, &starts, Scheme::Gather).contains("use ulysses, or a causal or full mask"));
    let given = Extras { cu_seqlens_q: Some(&starts), cu_seqlens_k: Some(&starts), ..Extras::NONE };
    let known = ShardPlan::packed(&packed, &starts, 1, Scheme::Gather, Layout::Zigzag).unwrap();
    let inputs = inputs::<f32>(&packed);
    let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
    let refused = rank(&known, alone, Order::Listed, &inputs, &given).unwrap_err().to_string();
    assert!(refused.contains("cu_seqlens of a call: leave them out"), "{refused}");
}
