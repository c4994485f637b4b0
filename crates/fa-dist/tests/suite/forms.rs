//! Slopes, sinks, programs and gradients of LSE over ranks.

use fa_core::program::{ArrayData, ArrayView, Element, Inputs, OwnedInputs, Program};
use fa_core::{Lengths, Mask, Pass, Problem};
use fa_cpu::{Arguments, Extras};
use fa_dist::{Layout, MemoryOptions, MemoryTransport, Order, Scheme, ShardPlan};

use crate::cases::{plans, problem};
use crate::oracle::{check_plan, inputs, rank, values};

#[test]
fn slopes_and_sinks_go_with_their_heads() {
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    let square = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let score = square.score.with_alibi(Some(fa_core::Alibi::PerHead));
    let extras = Extras { alibi_slopes: Some(&slopes), ..Extras::NONE };
    for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(9, 5), Mask::CAUSAL.with_offset(-2)] {
        for score in [score, score.with_softcap(Some(2.0))] {
            let alibi = square.with_score(score).with_mask(mask);
            assert_eq!(plans(&alibi, 2).len(), 6);
            for plan in [plans(&alibi, 2), plans(&alibi, 3)].concat() {
                check_plan::<f32>(&plan, &extras, Order::Listed);
            }
        }
    }
    let sinks = square.with_score(square.score.with_sinks(true));
    let extras = Extras { sinks: Some(&slopes), ..Extras::NONE };
    plans(&sinks, 2).iter().for_each(|plan| drop(check_plan::<f32>(plan, &extras, Order::Listed)));
    for world in [1, 3, 4] {
        for mask in [Mask::FULL, Mask::causal_window(3), Mask::CAUSAL] {
            let sinks = sinks.with_mask(mask);
            plans(&sinks, world)
                .iter()
                .for_each(|plan| drop(check_plan::<f32>(plan, &extras, Order::Listed)));
        }
        let decode = sinks.with_lengths(Lengths::uniform(1, 2, 40));
        let decode = ShardPlan::new(&decode, world, Scheme::Decode, Layout::Contiguous).unwrap();
        check_plan::<f32>(&decode, &extras, Order::Listed);
    }
    let unseen = sinks.with_mask(Mask::CAUSAL.with_offset(-2));
    for scheme in [Scheme::Gather, Scheme::Ring] {
        let refused = ShardPlan::new(&unseen, 2, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(refused.contains("sinks where queries see no key: use ulysses"), "{refused}");
    }
    plans(&unseen, 2).iter().for_each(|plan| drop(check_plan::<f32>(plan, &extras, Order::Listed)));
}

#[test]
fn programs_see_the_numbers_of_the_whole() {
    let texts = [
        "mask = (q - k) % 3 == 0;",
        "array slope: f32[_]; scalar c: f32; score = s - slope[h] * f32(q + off - k) + c * f32(hk * k);",
        "array bias: f32[_, _, _, _]; score = s + bias[b, h, q, k];",
        "array bias: f32[_, _, _, _] grad; score = s + bias[b, h, q, k];",
        "array gain: f32[_] grad; array of: f32[_, _] grad; score = s * gain[hk] + of[h, (q + k) % 5];",
        "scalar w: i32; let d = q + off - k; mask = 0 <= d < w; score = s + 0.01 * f32(sk - sq + q);",
    ];
    for text in texts {
        let program = Program::parse(text).unwrap().intern().unwrap();
        for (lengths, heads, mask) in [
            ((40, 40), (4, 2), Mask::FULL),
            ((40, 40), (4, 4), Mask::CAUSAL),
            ((24, 33), (4, 2), Mask::causal_window(9)),
        ] {
            let plain = problem(2, lengths, heads, mask);
            let score = plain.score.with_program(Some(program));
            let dropout = fa_core::Dropout::new(0.3, 7, 11).unwrap();
            for score in [score, dropout.of(score).unwrap(), dropout.of(plain.score).unwrap()] {
                let problem = plain.with_score(score);
                let drawn = OwnedInputs::drawn(&problem, 5).unwrap();
                let inputs = drawn.view(&score.program.unwrap()).unwrap();
                let given = Arguments { program: Some(&inputs), ..Arguments::default() };
                for world in [1, 2, 3, 4] {
                    let all = plans(&problem, world);
                    assert!(all.iter().any(|plan| plan.scheme() == Scheme::Gather));
                    assert!(all.iter().any(|plan| plan.scheme() == Scheme::Ring));
                    assert!(all.iter().all(|plan| !plan.same_bits()));
                    for plan in all {
                        check_plan::<f32>(&plan.with_tiles(8, 8), given, Order::Listed);
                    }
                }
            }
        }
    }
}

/// Elements of rows, of keys and of pairs, shared by sequences, heads or queries, and those that no part has
/// alone: every rank has the gradients of the whole, in every order and with the same bits.
#[test]
fn gradients_of_arrays_are_those_of_the_whole_on_every_rank() {
    // Of each array its extents, in the order of declarations.
    let cases: [(&str, &[[usize; 4]]); 7] = [
        ("array row: f32[_, _] grad; score = s * row[h, q];", &[[4, 29, 1, 1]]),
        ("array key: f32[_, _] grad; score = s * key[k, b];", &[[29, 2, 1, 1]]),
        ("array bias: f32[_, _, _, _] grad; score = s + bias[b, h, q, k];", &[[1, 4, 29, 29]]),
        ("array bias: f32[_, _, _, _] grad; score = s + bias[b, hk, q, k];", &[[2, 1, 1, 29]]),
        ("array bias: bf16[_, _, _] grad; score = s + 2.0 * bias[k, h, q];", &[[29, 4, 29, 1]]),
        (
            "array gain: f32[_] grad; array table: f32[_, _] grad; array one: f32[_, _] grad;\
             score = s * gain[hk] + table[h, min(abs(q - k), 5)] + one[q, k];",
            &[[2, 1, 1, 1], [4, 6, 1, 1], [29, 29, 1, 1]],
        ),
        // Longer and shorter than the rows that there are.
        (
            "array row: f32[_] grad; array key: f32[_] grad; score = s + row[q] * key[k];",
            &[[31, 1, 1, 1], [20, 1, 1, 1]],
        ),
    ];
    for (text, extents) in cases {
        let program = Program::parse(text).unwrap().intern().unwrap();
        let data: Vec<Vec<f32>> =
            extents.iter().map(|own| values(own.iter().product(), 3 + own[0] as u64)).collect();
        let bits: Vec<Vec<u16>> = data
            .iter()
            .map(|own| own.iter().map(|value| half::bf16::from_f32(*value).to_bits()).collect())
            .collect();
        let views = program.arrays().iter().enumerate().map(|(at, array)| {
            let data = match array.element == Element::F32 {
                true => ArrayData::F32(&data[at]),
                false => ArrayData::Bf16(&bits[at]),
            };
            ArrayView::contiguous(data, &extents[at])
        });
        let inputs = Inputs::new(&program, views.collect(), Vec::new()).unwrap();
        let given = Arguments { program: Some(&inputs), ..Arguments::default() };
        for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(5, 3)] {
            let plain = problem(2, (29, 29), (4, 2), mask);
            let problem = plain.with_score(plain.score.with_program(Some(program)));
            for world in [1, 2, 3, 4] {
                for plan in plans(&problem, world) {
                    let plan = plan.with_tiles(4, 4);
                    let listed = check_plan::<f32>(&plan, given, Order::Listed);
                    let seeded = check_plan::<f32>(&plan, given, Order::Seeded(7));
                    assert!(listed == seeded, "{text} {}", plan.scheme().name());
                }
            }
        }
    }
}

/// Sums of more ranks than a kernel adds up at once.
#[test]
fn gradients_of_arrays_over_many_ranks_are_sums_of_sums() {
    let program = Program::parse("array key: f32[_, _] grad; score = s + key[h, k];").unwrap();
    let program = program.intern().unwrap();
    let plain = problem(1, (80, 80), (2, 1), Mask::CAUSAL);
    let problem = plain.with_score(plain.score.with_program(Some(program)));
    let drawn = OwnedInputs::drawn(&problem, 5).unwrap();
    let inputs = drawn.view(&program).unwrap();
    let given = Arguments { program: Some(&inputs), ..Arguments::default() };
    let plan = ShardPlan::new(&problem, 20, Scheme::Gather, Layout::Zigzag).unwrap();
    check_plan::<f32>(&plan, given, Order::Listed);
}

#[test]
fn arrays_that_a_plan_does_not_know_are_refused_by_name() {
    let text = "array bias: f32[_, _] grad; score = s + bias[h, k];";
    let program = Program::parse(text).unwrap().intern().unwrap();
    let plain = problem(1, (16, 16), (2, 2), Mask::FULL);
    let problem = plain.with_score(plain.score.with_program(Some(program)));
    let drawn = OwnedInputs::drawn(&problem, 5).unwrap();
    let program = drawn.view(&program).unwrap();
    let given = Arguments { program: Some(&program), ..Arguments::default() };
    for plan in plans(&problem, 1) {
        for (plan, part) in [
            (plan.clone(), "the array bias of a program whose extents it does not know: give them by"),
            (
                plan.clone().with_arrays(&[[2, 15, 1, 1]]).unwrap(),
                "[2, 16, 1, 1] of bias, the plan needs [2, 15,",
            ),
        ] {
            let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
            let inputs = inputs::<f32>(&problem);
            let refused = rank(&plan, alone, Order::Listed, &inputs, given).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
        for extents in [&[][..], &[[2, 0, 1, 1]], &[[2, 16, 1, 1]; 2]] {
            let refused = plan.clone().with_arrays(extents).unwrap_err().to_string();
            assert!(refused.contains("positive extents of the 1 arrays"), "{refused}");
        }
    }
}

#[test]
fn the_gradient_of_the_lse_is_that_of_each_rows_rank() {
    for (lengths, heads, mask) in [
        ((40, 40), (4, 2), Mask::CAUSAL),
        ((37, 37), (4, 4), Mask::window(5, 3)),
        ((24, 33), (4, 2), Mask::FULL),
    ] {
        let problem = problem(2, lengths, heads, mask);
        let dlse = values::<f32>(2 * heads.0 * lengths.0, 9);
        let extras = Extras { dlse: Some(&dlse), ..Extras::NONE };
        for world in [1, 2, 3, 4] {
            for plan in plans(&problem, world) {
                check_plan::<f32>(&plan.with_dlse(true), &extras, Order::Seeded(1));
            }
        }
        let plan = ShardPlan::new(&problem, 1, Scheme::Ring, Layout::Zigzag).unwrap();
        for (plan, extras, part) in [
            (plan.clone(), &extras, "dlse) in this call: use ShardPlan::with_dlse"),
            (plan.with_dlse(true), &Extras::NONE, "a backward without dlse: give it"),
        ] {
            let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
            let inputs = inputs::<f32>(&problem);
            let refused = rank(&plan, alone, Order::Listed, &inputs, extras).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }
}

#[test]
fn programs_that_ranks_do_not_compute_are_refused() {
    let square = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let of = |text: &str| {
        let program = Program::parse(text).unwrap().intern().unwrap();
        square.with_score(square.score.with_program(Some(program)))
    };
    let own = of("mask = (q - k) % 4 == 0;");
    let dropped = fa_core::Dropout::new(0.5, 1, 0).unwrap().of(square.score).unwrap();
    let refused = |problem: &Problem, scheme| {
        ShardPlan::new(problem, 2, scheme, Layout::Zigzag).unwrap_err().to_string()
    };
    let decode =
        |problem: Problem| refused(&problem.with_lengths(Lengths::uniform(1, 1, 40)), Scheme::Decode);
    assert!(decode(own).contains("a program of masks or scores: use gather, ulysses or ring"));
    assert!(decode(square.with_score(dropped)).contains("dropout: use gather, ulysses or ring"));
    // What does not fit the program of the whole is said of that, not of a part's.
    let plan =
        ShardPlan::new(&of("scalar c: f32; score = s + c;"), 1, Scheme::Gather, Layout::Zigzag).unwrap();
    let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
    let inputs = inputs::<f32>(&square);
    let refused = rank(&plan, alone, Order::Listed, &inputs, &Extras::NONE).unwrap_err().to_string();
    assert!(refused.contains("1") && !refused.contains("fa_part"), "{refused}");
}

#[test]
fn what_a_call_leaves_out_is_named() {
    let square = problem(1, (40, 40), (4, 2), Mask::CAUSAL);
    let inputs = inputs::<f32>(&square);
    let score = square.score;
    for (score, part) in [
        (score.with_sinks(true), "sinks is not given, the plan needs 4 elements"),
        (
            score.with_alibi(Some(fa_core::Alibi::PerHead)),
            "alibi_slopes is not given, the plan needs 4 elements",
        ),
    ] {
        for plan in plans(&square.with_score(score), 1) {
            let alone = MemoryTransport::connect(1, &MemoryOptions::default()).remove(0);
            let refused = rank(&plan, alone, Order::Listed, &inputs, &Extras::NONE).unwrap_err().to_string();
            assert!(refused.contains(part), "{refused}");
        }
    }
}

/// Keys at both ends that a program hides from a rank's rows are left out, and rows that see nothing have
/// their sink.
#[test]
fn keys_that_a_program_hides_are_left_out() {
    let causal = problem(1, (48, 48), (4, 2), Mask::CAUSAL);
    let texts = [
        "mask = q // 9 == k // 9;",
        "mask = k >= 13 and k < 40;",
        "mask = q - k < 5 or k < 3;",
        "mask = (q + h) // 8 == k // 8;",
        "mask = k > 100;",
    ];
    let sinks = [0.5, -0.5, 0.25, 1.0];
    let mut fewer = 0;
    for (text, mask) in texts.iter().flat_map(|text| [Mask::CAUSAL, Mask::FULL].map(|mask| (text, mask))) {
        let program = Program::parse(text).unwrap().intern().unwrap();
        let inputs = Inputs::new(&program, Vec::new(), Vec::new()).unwrap();
        for has_sinks in [false, true] {
            let score = causal.score.with_program(Some(program)).with_sinks(has_sinks);
            let own = causal.with_mask(mask).with_score(score);
            for plan in [plans(&own, 2), plans(&own, 3)].concat() {
                let plan = plan.with_tiles(4, 4);
                let extras = Extras { sinks: has_sinks.then_some(&sinks[..]), ..Extras::NONE };
                let given = Arguments { extras, program: Some(&inputs), ..Arguments::default() };
                check_plan::<f32>(&plan, given, Order::Listed);
                let without = own.with_score(causal.score);
                let layout = plan.queries().layout();
                let whole = ShardPlan::new(&without, plan.world(), plan.scheme(), layout).unwrap();
                let whole = whole.with_tiles(4, 4).with_stages(plan.stages()).unwrap();
                let received = |plan: &ShardPlan| plan.program(0, Pass::Forward).unwrap().received();
                assert!(received(&plan) <= received(&whole), "{text} {mask} {}", plan.scheme().name());
                fewer += usize::from(received(&plan) < received(&whole));
            }
        }
    }
    assert!(fewer > 60, "{fewer}");
}

/// Programs count rows and keys in each sequence, of which a rank may have the end of one and the beginning
/// of another.
#[test]
fn programs_of_packed_sequences_see_the_numbers_of_the_whole() {
    let texts = [
        "mask = (q - k) % 3 == 0;",
        "array slope: f32[_] grad; score = s - slope[h] * f32(abs(q + off - k));",
        "array table: f32[_, _] grad; score = s + table[h, q % 3];",
        "score = s + 0.05 * f32(b) + 0.01 * f32(q - k) + 0.02 * f32(sq - 2 * sk + k);",
        "mask = q // 6 == k // 6 or k < b;",
    ];
    let starts_of = [&[0, 5, 5, 30, 41][..], &[0, 41], &[0, 1, 2, 41], &[0, 20, 41, 41], &[0, 0, 17, 17, 41]];
    for (text, starts) in texts.iter().flat_map(|text| starts_of.map(|starts| (text, starts))) {
        let longest = starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap();
        let lengths = Lengths::packed(starts.len() - 1, 41, 41, longest, longest);
        let program = Program::parse(text).unwrap().intern().unwrap();
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::causal_window(9)] {
            let plain = problem(1, (41, 41), (4, 2), mask).with_lengths(lengths);
            let score = plain.score.with_program(Some(program));
            let dropout = fa_core::Dropout::new(0.3, 7, 11).unwrap();
            for score in [score, dropout.of(score).unwrap()] {
                let own = plain.with_score(score);
                let drawn = OwnedInputs::drawn(&own, 5).unwrap();
                let inputs = drawn.view(&score.program.unwrap()).unwrap();
                let cu_seqlens = Some(starts);
                let extras = Extras { cu_seqlens_q: cu_seqlens, cu_seqlens_k: cu_seqlens, ..Extras::NONE };
                let given = Arguments { extras, program: Some(&inputs), ..Arguments::default() };
                for world in [1, 2, 3] {
                    for (scheme, layout) in [
                        (Scheme::Gather, Layout::Zigzag),
                        (Scheme::Gather, Layout::Contiguous),
                        (Scheme::Ring, Layout::Zigzag),
                    ] {
                        let plan = ShardPlan::packed(&own, starts, world, scheme, layout).unwrap();
                        check_plan::<f32>(&plan.with_tiles(1, 4), given, Order::Listed);
                    }
                }
            }
        }
    }
}
