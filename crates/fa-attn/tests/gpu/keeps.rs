//! What fp8 and 8-bit caches keep where kernels of other libraries do not: needles and sinks among many keys,
//! rows of any number of keys, every code, descales of any size, the bits of any split.

use fa_attn::device::{BindOptions, DeviceExtras, DeviceForward, DeviceOutput, Gpu, Placement, shapes};
use fa_attn::{
    DescaleForm, Descales, Division, Dtype, Family, Lengths, Mask, OwnedExtras, Pass, Problem, Side,
    TensorLayout, Types, bf16,
};
use fa_core::quantize::e4m3;
use fa_cpu::TensorRef;
use fa_cpu::reference::fp8::{Accumulation, as_kernel};
use fa_kernels::Forward;

use crate::codes::run;
use crate::fp8::{Inputs, problem};
use crate::gpu;

/// Who computes on codes of K and V.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Q is in e4m3, too.
    Fp8,
    /// Q is in bf16.
    Cache(Family),
}

const KINDS: [Kind; 3] = [Kind::Fp8, Kind::Cache(Family::Sm90), Kind::Cache(Family::Sm80)];

impl Kind {
    fn problem(self, fp8: &Problem) -> Problem {
        match self {
            Kind::Fp8 => *fp8,
            Kind::Cache(_) => fp8
                .with_types(Types::same(Dtype::Bf16).with_kv(Dtype::E4m3))
                .with_descales(Descales::both(DescaleForm::SequenceHead)),
        }
    }

    fn bind(self, gpu: &Gpu, fp8: &Problem, splits: Option<usize>) -> Forward {
        let family = match self {
            Kind::Fp8 => None,
            Kind::Cache(family) => Some(family),
        };
        let division = Division { splits, ..Division::PLANNED };
        let options = BindOptions::default().with_family(family).with_division(division);
        let bound = gpu.bind(&self.problem(fp8), Pass::Forward, &options).and_then(|own| own.forward());
        bound.unwrap_or_else(|error| panic!("{self:?}, {splits:?} splits: {error}"))
    }

    fn run(self, gpu: &Gpu, forward: &Forward, inputs: &Inputs, more: &OwnedExtras) -> DeviceOutput<bf16> {
        let [q_descale, k_descale, v_descale] = inputs.descales.each_ref().map(|own| Some(own.clone()));
        let extras = OwnedExtras { k_descale, v_descale, ..more.clone() };
        let kv = [inputs.codes[1].as_slice(), inputs.codes[2].as_slice()];
        match self {
            Kind::Fp8 => run!(gpu, forward, OwnedExtras { q_descale, ..extras }, inputs.codes[0], kv),
            Kind::Cache(_) => {
                let q: Vec<bf16> =
                    inputs.codes[0].iter().map(|&code| bf16::from_f32(e4m3::decode(code))).collect();
                run!(gpu, forward, extras, q, kv)
            }
        }
    }

    /// O and LSE by the library's choice of those that keep a row's keys together.
    fn of(self, gpu: &Gpu, fp8: &Problem, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
        let found = self.run(gpu, &self.bind(gpu, fp8, Some(1)), inputs, &OwnedExtras::NONE);
        (found.out.iter().map(|own| f64::from(own.to_f32())).collect(), to_f64(&found.lse))
    }
}

fn to_f64(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Those that the GPU runs.
fn kinds(gpu: &Gpu) -> impl Iterator<Item = Kind> {
    let has_sm90 = Family::Sm90.runs_on(gpu.arch());
    KINDS.into_iter().filter(move |kind| has_sm90 || *kind == Kind::Cache(Family::Sm80))
}

/// Rows of `columns` codes of a tensor of one sequence and head.
fn rows(codes: &mut [u8], columns: usize) -> impl Iterator<Item = &mut [u8]> {
    codes.chunks_exact_mut(columns)
}

/// One query on many keys, whose scores are about normal: the query as numbers, and the scores.
fn one_row(problem: &Problem, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let numbers =
        |codes: &[u8]| -> Vec<f64> { codes.iter().map(|&code| f64::from(e4m3::decode(code))).collect() };
    let q = numbers(&inputs.codes[0]);
    let score = |key: &[u8]| problem.scale() * numbers(key).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>();
    let scores = inputs.codes[1].chunks_exact(problem.head_dim).map(score).collect();
    (q, scores)
}

/// Makes a key one whose score is about `score`; the score that it has.
fn raise(problem: &Problem, q: &[f64], key: &mut [u8], score: f64) -> f64 {
    let factor = score / problem.scale() / q.iter().map(|q| q * q).sum::<f64>();
    let mut sum = 0.0;
    for (code, q) in key.iter_mut().zip(q) {
        *code = e4m3::encode((q * factor) as f32);
        sum += f64::from(e4m3::decode(*code)) * q;
    }
    sum * problem.scale()
}

/// A key of nearly half of the probability among 128k, wherever it is: its value arrives, and so do the
/// others'.
#[test]
#[ignore = "needs a GPU"]
fn a_needle_among_many_keys_is_found() {
    const KEYS: usize = 131_072;
    let gpu = gpu();
    for head_dim in [64, 128, 256] {
        let problem = problem(1, (1, KEYS), (1, 1), head_dim, Mask::FULL);
        let mut base = Inputs::of(&problem, [1.0; 3], |_| 0.0);
        let one = e4m3::encode(1.0);
        rows(&mut base.codes[2], head_dim).for_each(|row| row[1] = one);
        let (q, scores) = one_row(&problem, &base);
        for kind in kinds(&gpu) {
            // The needle's score is a sum that the fp8 tensor core truncates after every 32 products: over
            // 256 of them 0.012 of 12, and as much of the needle's share.
            let most = if kind == Kind::Fp8 && head_dim == 256 { 1.0 / 64.0 } else { 1.0 / 128.0 };
            let forward = kind.bind(&gpu, &problem, None);
            for place in 0..10 {
                let at = place * (KEYS - 1) / 9;
                let mut inputs = base.clone();
                let key = &mut inputs.codes[1][at * head_dim..(at + 1) * head_dim];
                let score = raise(&problem, &q, key, 12.0);
                (inputs.codes[2][at * head_dim], inputs.codes[2][at * head_dim + 1]) = (one, 0);
                let others: f64 = scores.iter().map(|own| own.exp()).sum::<f64>() - scores[at].exp();
                let share = score.exp() / (score.exp() + others);
                assert!((0.2..0.8).contains(&share), "{share}");
                let found = kind.run(&gpu, &forward, &inputs, &OwnedExtras::NONE);
                for (column, need) in [(0, share), (1, 1.0 - share)] {
                    let got = f64::from(found.out[column].to_f32());
                    assert!(
                        (got - need).abs() <= need * most,
                        "{kind:?}, head dim {head_dim}, key {at}, column {column}: {got}, not {need}"
                    );
                }
            }
        }
    }
}

/// Keys in pages of `page` rows in another order, which `extras` give.
fn in_pages(problem: &Problem, inputs: &Inputs, page: usize) -> (Problem, Inputs, OwnedExtras) {
    let keys = problem.lengths.max_k();
    let pages = keys / page;
    assert_eq!(pages * page, keys);
    // A stride that shares no factor with the pages.
    let table: Vec<usize> = (0..pages).map(|i| (i * 7919 + 3) % pages).collect();
    let mut inputs = inputs.clone();
    for tensor in [1, 2] {
        let from = inputs.codes[tensor].clone();
        let bytes = from.len() / pages;
        for (logical, &own) in table.iter().enumerate() {
            inputs.codes[tensor][own * bytes..(own + 1) * bytes]
                .copy_from_slice(&from[logical * bytes..(logical + 1) * bytes]);
        }
    }
    let lengths = Lengths::of(1, Side::padded(problem.lengths.max_q()), Side::paged(page, pages, keys));
    let extras = OwnedExtras {
        seqused_k: Some(vec![keys as i32]),
        page_table: Some(table.into_iter().map(|own| own as i32).collect()),
        ..OwnedExtras::default()
    };
    (problem.with_lengths(lengths), inputs, extras)
}

/// A first key far above all others takes nothing of the sum of the rest, in one piece, in pages, or in
/// parts.
#[test]
#[ignore = "needs a GPU"]
fn a_sink_leaves_the_sum_whole() {
    const KEYS: usize = 32_768;
    let gpu = gpu();
    let problem = problem(1, (1, KEYS), (1, 1), 128, Mask::FULL);
    let base = Inputs::of(&problem, [1.0; 3], |_| 1.0);
    let (q, scores) = one_row(&problem, &base);
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for above in [6.0, 8.0, 10.0, 12.0, 14.0] {
        let mut inputs = base.clone();
        raise(&problem, &q, &mut inputs.codes[1][..128], most + above);
        let (paged, shuffled, extras) = in_pages(&problem, &inputs, 64);
        for kind in kinds(&gpu) {
            for (what, problem, inputs, extras) in [
                ("in one piece", &problem, &inputs, &OwnedExtras::NONE),
                ("in pages", &paged, &shuffled, &extras),
            ] {
                let found = kind.run(&gpu, &kind.bind(&gpu, problem, Some(8)), inputs, extras);
                let far = found.out.iter().map(|own| (own.to_f32() - 1.0).abs()).fold(0.0, f32::max);
                assert!(far <= 1.0 / 256.0, "{kind:?} {what}, {above} above: {far} from 1");
            }
        }
    }
}

/// Keys that are visited after a dominant one in their middle may be too small for P in e4m3: as the
/// reference that rounds so has it.
#[test]
#[ignore = "needs a GPU"]
fn a_dominant_key_in_the_middle_costs_what_the_reference_says() {
    let gpu = gpu();
    if !Family::Sm90.runs_on(gpu.arch()) {
        return;
    }
    for above in [6.0, 10.0, 14.0] {
        let problem = problem(1, (1, 4096), (1, 1), 128, Mask::FULL);
        let mut inputs = Inputs::of(&problem, [1.0; 3], |_| 1.0);
        let (q, scores) = one_row(&problem, &inputs);
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        raise(&problem, &q, &mut inputs.codes[1][2048 * 128..2049 * 128], most + above);
        let forward = Kind::Fp8.bind(&gpu, &problem, None);
        let how = Accumulation::exact(forward.kernel().spec.tile().1 as usize);
        let names = ["q", "k", "v"];
        let [q_shape, k_shape, v_shape, _] = shapes(&problem);
        let given = [q_shape, k_shape, v_shape];
        let [q, k, v] = [0, 1, 2].map(|i| {
            TensorRef::packed(names[i], &inputs.codes[i], given[i], TensorLayout::Bshd).expect("its shape")
        });
        let [q_descale, k_descale, v_descale] = inputs.descales.each_ref().map(|own| Some(own.clone()));
        let extras = OwnedExtras { q_descale, k_descale, v_descale, ..OwnedExtras::NONE };
        let like = as_kernel(&problem, &extras.view(), &q, &k, &v, how).expect("a reference");
        let found = Kind::Fp8.run(&gpu, &forward, &inputs, &OwnedExtras::NONE);
        for (got, need) in found.out.iter().zip(&like.out) {
            let far = (got.to_f32() - need).abs();
            assert!(far <= 1.0 / 128.0, "{above} above: {got}, and {need} by the reference");
        }
    }
}

/// Where a tile of keys begins or ends nothing jumps.
#[test]
#[ignore = "needs a GPU"]
fn any_number_of_keys_is_computed_alike() {
    let gpu = gpu();
    for kind in kinds(&gpu) {
        let most = if kind == Kind::Fp8 { 0.05 } else { 0.01 };
        for keys in [1, 2, 3, 31, 33, 63, 64, 65, 95, 97, 127, 128, 129, 130, 191, 193, 255, 256, 257, 385] {
            let problem = problem(1, (3, keys), (4, 2), 128, Mask::FULL);
            let mut inputs = Inputs::of(&problem, [1.0, 0.7, 1.5], |x| x);
            if kind != Kind::Fp8 {
                // Queries in 16 bits have no descale.
                inputs.descales[0].fill(1.0);
            }
            let (out, lse) = kind.of(&gpu, &problem, &inputs);
            let (mut errors, mut squares) = (0.0, 0.0);
            for head in 0..4 {
                for query in 0..3 {
                    let (truth, of_row) = inputs.row(&problem, [0, query, head]);
                    let found = lse[head * 3 + query];
                    assert!((found - of_row).abs() < 4e-3 * (1.0 + of_row.abs()), "{kind:?}, {keys} keys");
                    for (column, truth) in truth.into_iter().enumerate() {
                        let found = out[(query * 4 + head) * 128 + column];
                        errors += (found - truth).powi(2);
                        squares += truth.powi(2);
                    }
                }
            }
            let relative = f64::sqrt(errors / squares);
            assert!(relative < most, "{kind:?}, {keys} keys: RMS error {relative} of O's");
        }
    }
}

/// Each descale is a factor, to the bit: of K's, and Q's, of the softmax scale, V's of O.
#[test]
#[ignore = "needs a GPU"]
fn descales_are_factors_to_the_bit() {
    let gpu = gpu();
    for kind in kinds(&gpu) {
        let problem = problem(2, (5, 200), (4, 2), 64, Mask::CAUSAL);
        let base = Inputs::of(&problem, [1.0; 3], |x| x);
        let twice = |tensor: usize| {
            let mut inputs = base.clone();
            inputs.descales[tensor].iter_mut().for_each(|own| *own *= 2.0);
            inputs
        };
        let (out, lse) = kind.of(&gpu, &problem, &base);
        let scaled = problem.with_softmax_scale(Some(2.0 * problem.scale()));
        let steep = kind.of(&gpu, &scaled, &base);
        assert_ne!(steep, (out.clone(), lse.clone()), "{kind:?}: the scale is applied");
        assert_eq!(kind.of(&gpu, &problem, &twice(1)), steep, "{kind:?}: K's");
        if kind == Kind::Fp8 {
            assert_eq!(kind.of(&gpu, &problem, &twice(0)), steep, "Q's");
        }
        let doubled: Vec<f64> = out.iter().map(|own| 2.0 * own).collect();
        assert_eq!(kind.of(&gpu, &problem, &twice(2)), (doubled, lse), "{kind:?}: V's, of which LSE is free");
    }
}

/// Descales of 0 and far below 1 give uniform weights, or an O of 0, and no NaN.
#[test]
#[ignore = "needs a GPU"]
fn small_descales_give_numbers() {
    let gpu = gpu();
    for kind in kinds(&gpu) {
        let problem = problem(1, (2, 300), (2, 1), 128, Mask::FULL);
        let base = Inputs::of(&problem, [1.0; 3], |x| x);
        let mut uniform = base.clone();
        uniform.codes[0].fill(0);
        let (means, _) = uniform.row(&problem, [0, 0, 0]);
        for small in [0.0, 1e-23, 2f32.powi(-20)] {
            let mut of_k = base.clone();
            of_k.descales[1].fill(small);
            let (out, lse) = kind.of(&gpu, &problem, &of_k);
            for (i, got) in out.iter().enumerate() {
                let need = means[i % 128];
                assert!((got - need).abs() <= 0.02, "{kind:?}, K's {small}: {got}, not {need}");
            }
            assert!(lse.iter().all(|own| (own - 300f64.ln()).abs() < 1e-4), "{kind:?}, K's {small}: {lse:?}");
            let mut of_v = base.clone();
            of_v.descales[2].fill(small);
            let (out, _) = kind.of(&gpu, &problem, &of_v);
            assert!(out.iter().all(|own| own.abs() <= 10.0 * f64::from(small)), "{kind:?}, V's {small}");
        }
    }
}

/// Every code of V arrives; a NaN of K reaches the rows that see it and no other, one of V its column alone.
#[test]
#[ignore = "needs a GPU"]
fn every_code_is_read_and_nan_reaches_those_who_see_it() {
    const ROWS: usize = 256;
    const DIM: usize = 64;
    let gpu = gpu();
    for kind in kinds(&gpu) {
        let problem = problem(1, (ROWS, ROWS), (1, 1), DIM, Mask::CAUSAL);
        let mut base = Inputs::of(&problem, [1.0; 3], |x| x);
        for (key, row) in rows(&mut base.codes[2], DIM).enumerate() {
            // Of each key one code, but for the two of NaN.
            row[0] = if key & 0x7f == 0x7f { 0 } else { key as u8 };
        }
        let (out, _) = kind.of(&gpu, &problem, &base);
        for query in (0..ROWS).step_by(5) {
            let (truth, _) = base.row(&problem, [0, query, 0]);
            let far = (out[query * DIM] - truth[0]).abs();
            assert!(far <= 448.0 * 0.01, "{kind:?}, query {query}: {far} from {}", truth[0]);
        }
        let (key, column) = (77, 9);
        for tensor in [1, 2] {
            let mut inputs = base.clone();
            inputs.codes[tensor][key * DIM + column] = 0xff;
            let (out, lse) = kind.of(&gpu, &problem, &inputs);
            for query in 0..ROWS {
                assert_eq!(lse[query].is_nan(), tensor == 1 && query >= key, "{kind:?}, LSE of {query}");
                for at in 0..DIM {
                    // Of a hidden value in the same tile 0 times NaN joins the sum.
                    if tensor == 2 && at == column && query < key {
                        continue;
                    }
                    let is_nan = query >= key && (tensor == 1 || at == column);
                    let got = out[query * DIM + at];
                    assert_eq!(got.is_nan(), is_nan, "{kind:?}, query {query}, column {at}: {got}");
                }
            }
        }
    }
}

/// Any number of splits gives the same bits from run to run, and the result, also of very many keys.
#[test]
#[ignore = "needs a GPU"]
fn any_number_of_splits_keeps_its_bits() {
    let gpu = gpu();
    for kind in kinds(&gpu) {
        // Of P in e4m3 and Q as well the errors of 20,000 keys average out less.
        let most = if kind == Kind::Fp8 { 5e-3 } else { 2e-3 };
        for (keys, splits) in [(20_000, 1..=32), (200_000, 8..=8)] {
            let problem = problem(1, (1, keys), (8, 1), 128, Mask::FULL);
            let inputs = Inputs::of(&problem, [1.0, 0.6, 1.3], |x| x);
            let truth: Vec<Vec<f64>> =
                [0, 5].map(|head| inputs.row(&problem, [0, 0, head]).0).into_iter().collect();
            for splits in splits {
                let forward = kind.bind(&gpu, &problem, Some(splits));
                let first = kind.run(&gpu, &forward, &inputs, &OwnedExtras::NONE);
                for run in 0..if splits == 8 { 100 } else { 3 } {
                    let again = kind.run(&gpu, &forward, &inputs, &OwnedExtras::NONE);
                    assert!(again.same_bits(&first), "{kind:?}, {splits} splits: run {run}");
                }
                for (truth, head) in truth.iter().zip([0, 5]) {
                    for (column, need) in truth.iter().enumerate() {
                        let got = f64::from(first.out[head * 128 + column].to_f32());
                        assert!((got - need).abs() < most, "{kind:?}, {splits} splits: {got}, not {need}");
                    }
                }
            }
        }
    }
}
