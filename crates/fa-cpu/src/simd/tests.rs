//! Every kernel on every instruction set that this CPU has, against plain loops.

use super::*;

use crate::simd::ahead::Ahead;
use crate::simd::bf16::{GRAIN, Gradient16, LANES, Product16};
use crate::simd::row_set::RowSet;

fn every_isa(check: impl Fn(Kernels)) {
    for isa in Isa::ALL {
        if let Some(kernels) = Kernels::for_isa(isa) {
            check(kernels);
        }
    }
}

/// Numbers in [-1, 1) that look random.
fn noise(seed: u32, len: usize) -> Vec<f32> {
    let mut state = u64::from(seed) * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn names_parse_back_and_the_best_is_available() {
    for isa in Isa::ALL {
        assert_eq!(isa.name().parse(), Ok(isa));
    }
    assert_eq!("sse9".parse::<Isa>(), Err(ParseIsaError("sse9".into())));
    assert!(Isa::detect().is_available() && Isa::Portable.is_available());
}

#[test]
fn products_of_every_shape_and_order() {
    every_isa(|kernels| {
        for m in [1, 2, 3, 7, 8, 9, 15, 21] {
            for registers in 1..=7 {
                for k in [0, 1, 5, 33] {
                    for order in [Order::Rows, Order::Columns] {
                        check_product(kernels, m, registers * kernels.lanes(), k, order);
                    }
                }
            }
        }
    });
}

fn check_product(kernels: Kernels, m: usize, n: usize, k: usize, order: Order) {
    let (lda, ldb, ldc) = (m.max(k) + 3, n + 5, n + 2);
    let a = noise(1, lda * (m.max(k) + 1));
    let b = noise(2, ldb * (k + 1));
    let start = noise(3, ldc * m);
    let scale = noise(4, n);
    for init in [Init::Zero, Init::Add, Init::Scale(&scale)] {
        let mut c = start.clone();
        let call = Product { m, n, k, a: &a, lda, order, b: &b, ldb, c: &mut c, ldc, init };
        kernels.product(call);
        for i in 0..m {
            for j in 0..ldc {
                let old = f64::from(start[i * ldc + j]);
                if j >= n {
                    assert_eq!(f64::from(c[i * ldc + j]), old, "wrote past column {n}");
                    continue;
                }
                let mut want = match init {
                    Init::Zero => 0.0,
                    Init::Add => old,
                    Init::Scale(scale) => old * f64::from(scale[j]),
                };
                for t in 0..k {
                    let at = if order == Order::Rows { i * lda + t } else { t * lda + i };
                    want += f64::from(a[at]) * f64::from(b[t * ldb + j]);
                }
                let got = f64::from(c[i * ldc + j]);
                let isa = kernels.isa();
                assert!(
                    (got - want).abs() < 1e-5,
                    "{isa} {m}x{n}x{k} {order:?} ({i}, {j}): {got} for {want}"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "B is too short")]
fn a_product_past_the_end_is_refused() {
    let kernels = Kernels::for_isa(Isa::Portable).unwrap();
    let (a, b, mut c) = ([0.0; 8], [0.0; 7], [0.0; 8]);
    let (lda, ldb, ldc) = (2, 4, 4);
    kernels.product(Product {
        m: 2,
        n: 4,
        k: 2,
        a: &a,
        lda,
        order: Order::Rows,
        b: &b,
        ldb,
        c: &mut c,
        ldc,
        init: Init::Zero,
    });
}

#[test]
fn exp2_is_within_two_units_in_the_last_place() {
    every_isa(|kernels| {
        let mut values: Vec<f32> =
            (0..1 << 18).map(|i| i as f32 * (252.0 / (1 << 18) as f32) - 126.0).collect();
        let arguments = values.clone();
        kernels.exp2(&mut values);
        for (x, got) in arguments.into_iter().zip(values) {
            let want = f64::from(x).exp2();
            let error = (f64::from(got) / want - 1.0).abs();
            assert!(error < 1.8e-7, "{}: 2^{x} = {got}, error {error:e}", kernels.isa());
        }
        let mut special = [f32::NEG_INFINITY, -1e30, -150.0, 0.0, f32::NAN, -0.0, 1.0, -126.0].repeat(2);
        kernels.exp2(&mut special);
        assert_eq!(special[..4], [0.0, 0.0, 0.0, 1.0]);
        assert!(special[4].is_nan());
        assert_eq!(special[5..8], [1.0, 2.0, f32::MIN_POSITIVE]);
    });
}

#[test]
fn softcap_is_a_tanh() {
    every_isa(|kernels| {
        let mut values: Vec<f32> = (0..1 << 12).map(|i| (i as f32 - 2048.0) / 160.0).collect();
        values.extend([1e-20, f32::INFINITY, f32::NEG_INFINITY, f32::NAN].repeat(4));
        let arguments = values.clone();
        kernels.softcap(&mut values, 3.0);
        for (x, got) in arguments.into_iter().zip(values) {
            let want = 3.0 * f64::from(x).tanh();
            let error = (f64::from(got) - want).abs();
            assert!(error <= 6e-7 * want.abs() || want.is_nan() && got.is_nan(), "{x}: {got} for {want}");
        }
    });
}

#[test]
fn online_softmax_over_pieces_is_the_softmax() {
    every_isa(|kernels| {
        let (lanes, keys) = (kernels.lanes(), 37);
        let (queries, ld) = (2 * lanes, 2 * lanes + 3);
        let mut scores = noise(5, keys * ld);
        for (i, score) in scores.iter_mut().enumerate() {
            // Rising, so that the maximum is raised again and again; query 1 sees nothing, query 2 sees
            // little.
            *score = *score * 3.0 + (i / ld) as f32;
            if i % ld == 1 || i % ld == 2 && i / ld != 20 {
                *score = f32::NEG_INFINITY;
            }
        }
        let original = scores.clone();
        let (mut max, mut sum) = (vec![f32::NEG_INFINITY; queries], vec![0.0; queries]);
        let (mut factor, mut total) = (vec![f32::NAN; queries], vec![0f32; queries]);
        for piece in scores.chunks_mut(5 * ld) {
            let shape = TileShape { keys: piece.len() / ld, queries, ld };
            let rescaled = kernels.online_softmax(shape, piece, &mut max, &mut sum, &mut factor);
            assert_eq!(rescaled, factor.iter().any(|&factor| factor != 1.0));
            for (query, total) in total.iter_mut().enumerate() {
                *total = *total * factor[query] + piece[query..].iter().step_by(ld).sum::<f32>();
            }
        }
        for query in 0..queries {
            let p = original[query..].iter().step_by(ld).map(|&score| f64::from(score).exp2());
            let want = p.sum::<f64>();
            if query == 1 {
                assert_eq!((max[query], sum[query], total[query]), (f32::NEG_INFINITY, 0.0, 0.0));
                continue;
            }
            let scale = f64::from(max[query]).exp2();
            for (what, got) in [("sum", sum[query]), ("accumulated", total[query])] {
                let got = f64::from(got) * scale;
                assert!(
                    (got / want - 1.0).abs() < 1e-6,
                    "{} {what} of {query}: {got} for {want}",
                    kernels.isa()
                );
            }
        }
    });
}

#[test]
fn rows_of_keys_are_multiplied_and_added_as_they_lie() {
    every_isa(|kernels| {
        for (keys, queries, dims) in
            [(1, 1, 1), (16, 1, 64), (33, 2, 40), (15, 3, 72), (128, 5, 128), (9, 7, 21)]
        {
            let (step, q) = (dims + 2, noise(2, queries * dims));
            // The last row ends with the storage.
            let data = noise(1, (keys - 1) * step + dims);
            let rows: Vec<&[f32]> = data.chunks(step).map(|row| &row[..dims]).collect();
            let strided = RowSet::Strided { data: &data, step, count: keys };
            let (mut s, lds) = (vec![f32::NAN; queries * (keys + 3)], keys + 3);
            // What is fetched may be more or less than what is computed, and end anywhere.
            let ahead = match keys % 3 {
                0 => Ahead::Nothing,
                1 => Ahead::Follow,
                _ => Ahead::Rows(&rows[keys / 3..], 3 * dims),
            };
            let listed = RowSet::Listed(&rows);
            kernels.dots(listed, ahead, dims, queries, &q, dims, &mut s, lds);
            let mut o = noise(3, queries * dims);
            let before = o.clone();
            kernels.accumulate(listed, ahead, dims, queries, &s, lds, &mut o, dims);
            let (mut other_s, mut other_o) = (vec![f32::NAN; s.len()], before.clone());
            kernels.dots(strided, ahead, dims, queries, &q, dims, &mut other_s, lds);
            kernels.accumulate(strided, ahead, dims, queries, &s, lds, &mut other_o, dims);
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!([bits(&s), bits(&o)], [bits(&other_s), bits(&other_o)]);
            let short = RowSet::Strided { data: &data[1..], step, count: keys };
            assert!(strided.reach(dims) && !short.reach(dims) && strided.part(keys - 1..keys).reach(dims));
            for query in 0..queries {
                let dot = |key: usize| -> f64 {
                    let terms = rows[key].iter().zip(&q[query * dims..]);
                    terms.map(|(&k, &q)| f64::from(k) * f64::from(q)).sum()
                };
                for key in 0..keys {
                    let (got, want) = (f64::from(s[query * lds + key]), dot(key));
                    assert!((got - want).abs() < 1e-5, "{}: {got} for {want}", kernels.isa());
                }
                assert!(s[query * lds + keys..][..3].iter().all(|behind| behind.is_nan()));
                for (dim, got) in o[query * dims..][..dims].iter().enumerate() {
                    let terms = s[query * lds..].iter().zip(&rows);
                    let added: f64 = terms.map(|(&p, row)| f64::from(p) * f64::from(row[dim])).sum();
                    let want = f64::from(before[query * dims + dim]) + added;
                    assert!((f64::from(*got) - want).abs() < 1e-4, "{}: {got} for {want}", kernels.isa());
                }
            }
        }
    });
}

#[test]
fn softmax_gradient_follows_its_formula() {
    every_isa(|kernels| {
        let (lanes, keys) = (kernels.lanes(), 5);
        let (queries, ld) = (lanes, lanes + 1);
        for cap in [None, Some(2.5f32)] {
            let (mut scores, mut dp) = (noise(6, keys * ld), noise(7, keys * ld));
            scores[ld] = f32::NEG_INFINITY;
            let (mut lse, delta) = (noise(8, queries), noise(9, queries));
            lse[1] = f32::INFINITY;
            let (before, dbefore) = (scores.clone(), dp.clone());
            let shape = TileShape { keys, queries, ld };
            kernels.softmax_gradient(shape, &mut scores, &mut dp, &lse, &delta, cap, None);
            for i in (0..keys * ld).filter(|i| i % ld < queries) {
                let (query, score) = (i % ld, f64::from(before[i]));
                let capped = cap.map_or(score, |cap| f64::from(cap) * score.tanh());
                let slope = cap.map_or(1.0, |_| 1.0 - score.tanh().powi(2));
                // An LSE below the score is rounding: no P is above 1.
                let p = (capped - f64::from(lse[query])).min(0.0).exp2();
                let gradient = p * (f64::from(dbefore[i]) - f64::from(delta[query])) * slope;
                assert!((f64::from(scores[i]) - p).abs() < 1e-5, "P {i}: {} for {p}", scores[i]);
                assert!((f64::from(dp[i]) - gradient).abs() < 1e-5, "gradient {i} with {cap:?}");
            }
        }
    });
}

#[test]
fn transposing_twice_is_nothing_and_once_is_the_definition() {
    every_isa(|kernels| {
        for (rows, columns) in [(1, 1), (16, 16), (17, 33), (48, 31), (5, 64)] {
            let (ld_from, ld_to) = (columns + 2, rows + 1);
            let from = noise(10, rows * ld_from);
            let mut to = vec![f32::NAN; columns * ld_to];
            kernels.transpose([rows, columns], &from, ld_from, &mut to, ld_to);
            for r in 0..rows {
                for c in 0..columns {
                    assert_eq!(
                        to[c * ld_to + r],
                        from[r * ld_from + c],
                        "{} {rows}x{columns}",
                        kernels.isa()
                    );
                }
            }
            assert!((0..columns).all(|c| to[c * ld_to + rows].is_nan()), "wrote past the end");
            let words: Vec<u32> = from.iter().map(|value| value.to_bits()).collect();
            let mut to_words = vec![f32::NAN.to_bits(); columns * ld_to];
            kernels.transpose_words([rows, columns], &words, ld_from, &mut to_words, ld_to);
            assert!(to.iter().zip(to_words).all(|(value, word)| value.to_bits() == word));
        }
    });
}

fn rounded(values: Vec<f32>) -> Vec<half::bf16> {
    values.into_iter().map(half::bf16::from_f32).collect()
}

/// The pairs that B is read in, from a row-major matrix of `n` columns.
fn pairs(matrix: &[half::bf16], n: usize) -> Vec<u32> {
    let word =
        |two: &[half::bf16], j: usize| u32::from(two[j].to_bits()) | u32::from(two[n + j].to_bits()) << 16;
    matrix.chunks(2 * n).flat_map(|two| (0..n).map(move |j| word(two, j))).collect()
}

#[test]
fn products_of_bf16_tiles() {
    every_isa(|kernels| {
        let Some(tiles) = kernels.bf16() else { return };
        for [m, n, k] in [[32, 32, 32], [64, 32, 96], [32, 96, 64], [96, 64, 128]] {
            let (a, b) = (rounded(noise(1, m * k)), rounded(noise(2, k * n)));
            let bits: Vec<u16> = a.iter().map(|value| value.to_bits()).collect();
            let start = noise(3, m * n);
            for add in [false, true] {
                let mut c = start.clone();
                let b_pairs = pairs(&b, n);
                let call = Product16 {
                    shape: [m, n, k],
                    a: &bits,
                    lda: k,
                    b: &b_pairs,
                    ldb: n,
                    c: &mut c,
                    ldc: n,
                    add,
                };
                tiles.product(call);
                for (at, got) in c.into_iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    let sum: f64 = (0..k).map(|t| a[i * k + t].to_f64() * b[t * n + j].to_f64()).sum();
                    let want = sum + if add { f64::from(start[at]) } else { 0.0 };
                    assert!(
                        (f64::from(got) - want).abs() < 1e-5,
                        "{} ({i}, {j}): {got} for {want}",
                        kernels.isa()
                    );
                }
            }
        }
    });
}

#[test]
fn softmax_with_bf16_probabilities_agrees_with_f32() {
    every_isa(|kernels| {
        let Some(tiles) = kernels.bf16() else { return };
        let (keys, queries) = (2 * GRAIN, GRAIN);
        let shape = TileShape { keys, queries, ld: queries };
        let mut scores = noise(5, keys * queries);
        let scale = 0.7;
        for (i, score) in scores.iter_mut().enumerate() {
            *score = if i % queries == 3 { f32::NEG_INFINITY } else { *score * 4.0 + (i / queries) as f32 };
        }
        let [mut max, mut max16] = [vec![f32::NEG_INFINITY; queries], vec![f32::NEG_INFINITY; queries]];
        let [mut sum, mut sum16, mut factor, mut factor16] = [0; 4].map(|_| vec![0f32; queries]);
        let mut p = vec![0u32; keys / 2 * queries];
        for _ in 0..2 {
            let mut scaled: Vec<f32> = scores.iter().map(|score| score * scale).collect();
            kernels.online_softmax(shape, &mut scaled, &mut max, &mut sum, &mut factor);
            // The first half of the columns alone.
            let [mut max_half, mut sum_half, mut factor_half] = [&max16, &sum16, &factor16].map(Vec::clone);
            let mut p_half = vec![7; p.len()];
            let half = TileShape { queries: LANES, ..shape };
            let state = (&mut max_half, &mut sum_half, &mut factor_half);
            tiles.online_softmax(half, &scores, scale, &mut p_half, queries, state.0, state.1, state.2);
            tiles.online_softmax(
                shape,
                &scores,
                scale,
                &mut p,
                queries,
                &mut max16,
                &mut sum16,
                &mut factor16,
            );
            for (row, whole) in p_half.chunks(queries).zip(p.chunks(queries)) {
                assert_eq!((&row[..LANES], &row[LANES..]), (&whole[..LANES], &[7; GRAIN - LANES][..]));
            }
            assert_eq!((&max_half[..LANES], &sum_half[..LANES]), (&max16[..LANES], &sum16[..LANES]));
            for (i, want) in scaled.into_iter().enumerate() {
                let (key, query) = (i / queries, i % queries);
                let word = p[key / 2 * queries + query];
                let got = f32::from_bits(if key % 2 == 0 { word << 16 } else { word & 0xffff_0000 });
                assert!((got - want).abs() <= want / 250.0, "P ({key}, {query}): {got} for {want}");
            }
            for query in 0..queries {
                assert!((sum[query] - sum16[query]).abs() <= sum[query] * 2e-5);
                assert!(max[query] == max16[query] || (max[query] - max16[query]).abs() < 1e-4);
                assert!((factor[query] - factor16[query]).abs() < 1e-5);
            }
        }
    });
}

#[test]
fn softmax_gradient_with_bf16_results_agrees_with_f32() {
    every_isa(|kernels| {
        let Some(tiles) = kernels.bf16() else { return };
        let (keys, queries) = (GRAIN, 2 * GRAIN);
        let shape = TileShape { keys, queries, ld: queries };
        let (scale, mut scores, dp) = (0.6, noise(1, keys * queries), noise(2, keys * queries));
        let (mut lse, delta) = (noise(3, queries), noise(4, queries));
        lse[7] = f32::INFINITY;
        scores[2 * queries + 1] = f32::NEG_INFINITY;
        for cap in [None, Some(1.7)] {
            let [mut p, mut dscores_rows] = [0; 2].map(|_| vec![0u16; keys * queries]);
            let mut dscores_pairs = vec![0u32; keys / 2 * queries];
            tiles.softmax_gradient(Gradient16 {
                shape,
                scores: &scores,
                dp: &dp,
                scale,
                cap,
                lse: &lse,
                delta: &delta,
                p: &mut p,
                dscores_rows: &mut dscores_rows,
                dscores_pairs: &mut dscores_pairs,
                ldw: queries,
            });
            let mut want: Vec<f32> = scores.iter().map(|score| score * scale).collect();
            let mut dwant = dp.clone();
            kernels.softmax_gradient(shape, &mut want, &mut dwant, &lse, &delta, cap, None);
            let value = |bits: u16| half::bf16::from_bits(bits).to_f32();
            for i in 0..keys * queries {
                let (key, query) = (i / queries, i % queries);
                let word = dscores_pairs[key / 2 * queries + query];
                let pair = value(if key % 2 == 0 { word as u16 } else { (word >> 16) as u16 });
                let near = |got: f32, want: f32| (got - want).abs() <= want.abs() / 250.0;
                // Scores of -inf are hidden here, below a cap too.
                let hidden = scores[i] == f32::NEG_INFINITY;
                let [want, dwant] = [want[i], dwant[i]].map(|want| if hidden { 0.0 } else { want });
                assert!(near(value(p[i]), want), "P {i}: {} for {want}", value(p[i]));
                assert!(near(value(dscores_rows[i]), dwant) && near(pair, dwant), "gradient {i}");
            }
        }
    });
}
