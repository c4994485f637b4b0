//! Decodes over ranks: keys, caches and codes of each.

use fa_core::lengths::Side;
use fa_core::{DescaleForm, Descales, Dtype, Lengths, Mask, Types};
use fa_cpu::{Extras, check, reference};
use fa_dist::{Error, HostAttention, Layout, MemoryOptions, MemoryTransport, Order, Scheme, ShardPlan};

use crate::cases::problem;
use crate::oracle::{check_plan, values, view, view_mut};

#[test]
fn decode_merges_what_ranks_hold() {
    for world in [1, 2, 5, 16] {
        for (queries, mask) in [(1, Mask::CAUSAL), (3, Mask::CAUSAL), (2, Mask::FULL)] {
            for keys in [100, 7] {
                let problem = problem(2, (queries, keys), (8, 2), mask);
                for layout in [Layout::Contiguous, Layout::Zigzag] {
                    if let Ok(plan) = ShardPlan::new(&problem, world, Scheme::Decode, layout) {
                        check_plan::<f32>(&plan, &Extras::NONE, Order::Listed);
                    }
                }
            }
        }
    }
}

#[test]
fn decode_takes_the_cache_of_each_rank() {
    // Pages of a rank, and keys in use of each sequence on each.
    let (page, pages, most) = (4, 7, 12);
    let used = [[12, 3], [5, 0], [0, 0], [9, 1]];
    for (queries, mask) in [(1, Mask::CAUSAL), (3, Mask::FULL)] {
        for is_paged in [true, false] {
            let side = if is_paged { Side::paged(page, pages, most) } else { Side::padded(most).with_used() };
            let score = fa_core::ScoreMod::NONE.with_sinks(true);
            let local = problem(2, (queries, most), (4, 2), mask)
                .with_lengths(Lengths::of(2, Side::padded(queries), side))
                .with_score(score);
            let sinks = [0.5, -0.25, 0.125, 0.0625];
            let plan = ShardPlan::new(&local, used.len(), Scheme::Decode, Layout::Contiguous).unwrap();
            let q = values::<f32>(2 * queries * 4 * 8, 1);
            let q_shape = [2, queries, 4, 8];
            let kv_shape = check::k_shape(&local);
            let table = [6, 0, 3, 1, 5, 2];
            let caches: Vec<[Vec<f32>; 2]> = (0..used.len() as u64)
                .map(|rank| [10, 20].map(|seed| values(kv_shape.iter().product(), seed + rank)))
                .collect();
            let found = MemoryTransport::run(used.len(), &MemoryOptions::default(), |transport| {
                let mut own = HostAttention::new(&plan, transport)?;
                let rank = own.rank();
                let extras = Extras {
                    seqused_k: Some(&used[rank]),
                    page_table: is_paged.then_some(&table),
                    sinks: Some(&sinks),
                    ..Extras::NONE
                };
                let [k, v] = caches[rank].each_ref().map(|cache| view(cache, kv_shape));
                let (mut out, mut lse) = (vec![0.0f32; q.len()], vec![0.0; 2 * 4 * queries]);
                own.forward([view(&q, q_shape), k, v], &mut view_mut(&mut out, q_shape), &mut lse, &extras)?;
                Ok::<_, Error>((out, lse))
            });
            // All keys of all ranks, sequence by sequence.
            for b in 0..2 {
                let count: usize = used.iter().map(|own| own[b] as usize).sum();
                let whole = [0, 1].map(|which| {
                    let mut all = Vec::new();
                    for (rank, own) in used.iter().enumerate() {
                        for row in 0..own[b] as usize {
                            let (at, within) = match is_paged {
                                true => (table[b * 3 + row / page] as usize, row % page),
                                false => (b, row),
                            };
                            let first = (at * kv_shape[1] + within) * 2 * 8;
                            all.extend_from_slice(&caches[rank][which][first..first + 2 * 8]);
                        }
                    }
                    all
                });
                let one = problem(1, (queries, count), (4, 2), Mask::FULL).with_score(score);
                let [k, v] = whole.each_ref().map(|all| view(all, [1, count, 2, 8]));
                let own_q = view(&q[b * queries * 32..][..queries * 32], [1, queries, 4, 8]);
                let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
                let exact = reference::forward_extras(&one, &extras, &own_q, &k, &v).unwrap();
                for result in &found {
                    let (out, lse) = result.as_ref().unwrap();
                    let near = |own: &[f32], exact: &[f64]| {
                        own.iter().zip(exact).all(|(own, exact)| (f64::from(*own) - exact).abs() < 1e-5)
                    };
                    assert!(near(&out[b * queries * 32..][..queries * 32], &exact.out));
                    assert!(near(&lse[b * queries * 4..][..queries * 4], &exact.lse));
                }
            }
        }
    }
    let cache = Lengths::of(1, Side::padded(3), Side::paged(4, 8, 16));
    let local = problem(1, (3, 16), (4, 2), Mask::CAUSAL).with_lengths(cache);
    let refused = |scheme| ShardPlan::new(&local, 2, scheme, Layout::Contiguous).unwrap_err().to_string();
    assert!(refused(Scheme::Decode).contains("3 queries under the mask causal on caches: decode one query"));
    assert!(refused(Scheme::Gather).contains("keys in pages of 4 rows: use decode, or pack"));
}

/// Caches of codes: each rank's beside one process that has all of them in a row.
#[test]
fn decode_takes_caches_of_codes() {
    let (most, used) = (12, [[12, 3], [5, 0], [9, 1]]);
    for codes in [Dtype::E4m3, Dtype::Int8, Dtype::Int4] {
        let types = Types::same(Dtype::Bf16).with_kv(codes);
        let form = DescaleForm::SequenceHead;
        let of = |keys: usize| {
            let lengths = Lengths::of(2, Side::padded(1), Side::padded(keys).with_used());
            let plain = problem(2, (1, keys), (4, 2), Mask::CAUSAL).with_head_dim(32).with_head_dim_v(32);
            plain.with_types(types).with_descales(Descales::new(form, form)).with_lengths(lengths)
        };
        let (local, whole) = (of(most), of(most * used.len()));
        let plan = ShardPlan::new(&local, used.len(), Scheme::Decode, Layout::Contiguous).unwrap();
        let q = values::<half::bf16>(2 * 4 * 32, 1);
        let shape = check::k_shape(&local);
        // Bytes that are numbers of every type.
        let bytes = |seed: u64| -> Vec<u8> {
            let count = shape.iter().product();
            values::<f32>(count, seed).into_iter().map(|x| (x.abs() * 64.0) as u8 + 16).collect()
        };
        let caches: Vec<[Vec<u8>; 2]> =
            (0..used.len() as u64).map(|rank| [bytes(10 + rank), bytes(20 + rank)]).collect();
        let descales = [0.25, 0.5, 0.125, 0.0625];
        let given = |used| Extras {
            seqused_k: Some(used),
            k_descale: Some(&descales),
            v_descale: Some(&descales),
            ..Extras::NONE
        };
        let found = MemoryTransport::run(used.len(), &MemoryOptions::default(), |transport| {
            let mut own = HostAttention::new(&plan, transport)?;
            let rank = own.rank();
            let [k, v] = caches[rank].each_ref().map(|cache| view(cache, shape));
            let (mut out, mut lse) = (vec![half::bf16::ZERO; q.len()], vec![0.0; 8]);
            let (q, to) = (view(&q, [2, 1, 4, 32]), &mut view_mut(&mut out, [2, 1, 4, 32]));
            own.forward_on_codes(q, [k, v], to, &mut lse, &given(&used[rank]))?;
            let found = (out.clone(), lse.clone());
            let to = &mut view_mut(&mut out, [2, 1, 4, 32]);
            let refused = own.forward([q, q, q], to, &mut lse, &given(&used[rank])).unwrap_err().to_string();
            assert!(refused.contains("k is no codes, the plan needs"), "{refused}");
            Ok::<_, Error>(found)
        });
        let width = shape[2] * shape[3];
        let all = [0, 1].map(|which| {
            let mut all = vec![0; 2 * most * used.len() * width];
            for b in 0..2 {
                let mut row = b * most * used.len();
                for (rank, own) in used.iter().enumerate() {
                    let count = own[b] as usize;
                    let from = &caches[rank][which][b * most * width..][..count * width];
                    all[row * width..][..from.len()].copy_from_slice(from);
                    row += count;
                }
            }
            all
        });
        let [k, v] = all.each_ref().map(|all| view(all, check::k_shape(&whole)));
        let lengths = [0, 1].map(|b| used.iter().map(|own| own[b]).sum());
        let q = view(&q, [2, 1, 4, 32]);
        let exact = reference::forward_extras(&whole, &given(&lengths), &q, &k, &v).unwrap();
        for (out, lse) in found.into_iter().map(Result::unwrap) {
            let near = |own: f64, exact: &f64| (own - exact).abs() < 0.02 * (1.0 + exact.abs());
            assert!(out.iter().zip(&exact.out).all(|(own, exact)| near(own.to_f64(), exact)), "{codes}");
            assert!(lse.iter().zip(&exact.lse).all(|(own, exact)| near(f64::from(*own), exact)), "{codes}");
        }
        let refused = ShardPlan::new(
            &problem(1, (1, 40), (4, 2), Mask::CAUSAL).with_types(types),
            2,
            Scheme::Decode,
            Layout::Contiguous,
        )
        .unwrap_err()
        .to_string();
        assert!(refused.contains("decode on caches of codes with lengths in use"), "{refused}");
    }
}

#[test]
fn more_parts_than_a_launch_merges_are_merged_in_groups() {
    for (world, scheme, lengths, mask) in [
        (7, Scheme::Ring, (90, 90), Mask::window(40, 30)),
        (18, Scheme::Ring, (80, 80), Mask::CAUSAL),
        (40, Scheme::Decode, (2, 300), Mask::CAUSAL),
    ] {
        let score = fa_core::ScoreMod::NONE.with_sinks(true);
        let sinks = [0.5, 0.25, -0.125, 0.0625];
        let extras = Extras { sinks: Some(&sinks), ..Extras::NONE };
        let problem = problem(1, lengths, (4, 2), mask).with_score(score);
        let plan = ShardPlan::new(&problem, world, scheme, Layout::Zigzag).unwrap();
        check_plan::<f32>(&plan, &extras, Order::Listed);
        let refused = ShardPlan::new(&problem, 65, scheme, Layout::Zigzag).unwrap_err().to_string();
        assert!(refused.contains("up to 260 partial results: use gather, or at most 64 ranks"), "{refused}");
    }
}
