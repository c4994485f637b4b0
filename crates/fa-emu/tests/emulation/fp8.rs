//! Forwards of e4m3 tensors: O and LSE against f64, within a few times the error of a reference that rounds P
//! as the kernel does.

use fa_core::quantize::e4m3;
use fa_core::{
    Alibi, Arch, DescaleForm, Descales, Dtype, Extra, KernelSpec, Lengths, Mask, MaskKind, Pass, Problem,
    ScoreMod, Side, TensorLayout, Types,
};
use fa_cpu::OwnedExtras;
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_emu::{Batch, Call, Given, Lie, Options, with_mods};
use fa_kernels::Headers;
use fa_lab::random::Random;
use half::bf16;

use crate::codes::own_rows;
use crate::emulator;

/// A kernel and a problem.
#[derive(Clone, Copy)]
struct Own {
    /// Fields of the kernel that are not those of [`BASE`].
    kernel: &'static [(&'static str, &'static str)],
    head_dims: (usize, usize),
    mask: Mask,
    heads: (usize, usize),
    rows: Rows,
    descales: Descales,
    values: Values,
    /// Those of the spec that change scores.
    flags: &'static str,
}

#[derive(Clone, Copy)]
enum Rows {
    Uniform(usize, usize),
    /// Keys as they lie.
    Varied(Lie),
}

#[derive(Clone, Copy, PartialEq)]
enum Values {
    Normal,
    /// Scores are equal and V small integers: O is exact.
    Even,
    /// A key of one K/V head is NaN, and every code occurs.
    AllCodes,
    /// Descales are 0, 2^-20, 1e-23 and 2.
    Extreme,
}

/// Scores of a few are well within it, and others beyond.
const SOFTCAP: f64 = 3.0;

const BASE: [(&str, &str); 13] = [
    ("tile_m", "128"),
    ("tile_n", "128"),
    ("num_wg", "2"),
    ("overlap_wg", "false"),
    ("two_level", "true"),
    ("q_stages", "1"),
    ("kv_stages", "2"),
    ("v_stages", "1"),
    ("ping_pong", "false"),
    ("scheduler", "PerTile"),
    ("tile_order", "Natural"),
    ("exp_poly_of_16", "0"),
    ("pack_gqa", "false"),
];

const fn of(kernel: &'static [(&'static str, &'static str)], head_dim: usize, rows: Rows) -> Own {
    let descales = Descales::all(DescaleForm::SequenceHead);
    let (head_dims, heads, values) = ((head_dim, head_dim), (2, 1), Values::Normal);
    Own { kernel, head_dims, mask: Mask::FULL, heads, rows, descales, values, flags: "" }
}

impl Own {
    const fn masked(self, mask: Mask) -> Own {
        Own { mask, ..self }
    }

    const fn with(self, values: Values) -> Own {
        Own { values, ..self }
    }

    fn batch(&self) -> Option<Batch> {
        let Rows::Varied(k) = self.rows else { return None };
        let sequences = vec![(70, 150), (33, 33), (0, 40), (20, 0), (1, 210)];
        Some(Batch { sequences, q: Lie::Packed, k, slack: 5 })
    }

    fn spec(&self) -> KernelSpec {
        let fields: Vec<String> = BASE
            .iter()
            .map(|&(name, value)| {
                let own = self.kernel.iter().find(|(own, _)| *own == name);
                format!("{name}: {}", own.map_or(value, |(_, value)| value))
            })
            .collect();
        let [hd, hdv] = [self.head_dims.0, self.head_dims.1].map(|dim| dim.next_multiple_of(32).max(64));
        let reads = match self.rows {
            Rows::Uniform(..) => "",
            Rows::Varied(Lie::Paged(_)) => "varied: true, paged: true,",
            Rows::Varied(_) => "varied: true,",
        };
        let text = format!(
            "(dtype: e4m3, out_dtype: Some(bf16), head_dim: {hd}, head_dim_v: {hdv}, mask: {}, {reads} {} \
             kernel: Sm90FwdFp8(({})))",
            MaskKind::of(&self.mask).name(),
            self.flags,
            fields.join(", ")
        );
        KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn problem(&self) -> Problem {
        let lengths = match (self.rows, self.batch()) {
            (Rows::Uniform(q, k), _) => Lengths::of(2, Side::padded(q), Side::padded(k)),
            (Rows::Varied(_), batch) => batch.expect("of its own lengths").lengths(),
        };
        let score = ScoreMod::NONE
            .with_softcap(self.flags.contains("softcap").then_some(SOFTCAP))
            .with_alibi(self.flags.contains("alibi").then_some(Alibi::PerHead))
            .with_sinks(self.flags.contains("sinks"));
        Problem::square(1, 1, self.heads.0, self.head_dims.0, self.mask, Dtype::Bf16)
            .with_heads_kv(self.heads.1)
            .with_head_dim_v(self.head_dims.1)
            .with_lengths(lengths)
            .with_types(Types::fp8(Dtype::Bf16))
            .with_score(score)
            .with_descales(self.descales)
    }

    /// The code of an element.
    fn code(&self, tensor: usize, column: usize, random: &mut Random) -> u8 {
        match self.values {
            Values::Even if tensor == 0 => 0,
            Values::Even => e4m3::encode(random.below(5) as f32 - 2.0),
            // Beside numbers of about 1 a few of any size.
            Values::AllCodes if column % 16 == 3 => match random.below(256) as u8 {
                code if code & 0x7f == 0x7f => 8,
                code => code,
            },
            Values::Normal | Values::AllCodes | Values::Extreme => e4m3::encode(random.normal()),
        }
    }
}

/// Codes of a tensor of `shape`; those of rows of no sequence are NaN.
fn drawn(own: &Own, tensor: usize, shape: [usize; 4], rows: &[bool], random: &mut Random) -> Vec<u8> {
    let [_, len, heads, dim] = shape;
    let mut codes = vec![0x7f; shape.iter().product()];
    let nan_row = rows.iter().position(|&own| own).unwrap_or(0) + 3;
    for (index, code) in codes.iter_mut().enumerate() {
        let (row, head, column) = (index / dim / heads, index / dim % heads, index % dim);
        debug_assert!(row < shape[0] * len);
        let is_nan =
            own.values == Values::AllCodes && tensor > 0 && head == 0 && row == nan_row && column == 5;
        if (rows.is_empty() || rows[row]) && !is_nan {
            *code = own.code(tensor, column, random);
        }
    }
    codes
}

/// O and LSE of one row.
struct Row {
    out: Vec<f64>,
    lse: f64,
}

/// A row of attention over `scores`, a sink and rows of values, with P rounded as the kernel does if `tiles`
/// gives its tiles of keys.
fn row(
    scores: &[f64],
    sink: f64,
    value: &dyn Fn(usize, usize) -> f64,
    columns: usize,
    tiles: Option<usize>,
) -> Row {
    if scores.is_empty() {
        return Row { out: vec![0.0; columns], lse: sink };
    }
    let (mut max, mut sum, mut out) = (f64::NEG_INFINITY, 0.0, vec![0.0; columns]);
    let tile = tiles.unwrap_or(scores.len());
    for block in (0..scores.len().div_ceil(tile)).rev() {
        let keys = block * tile..((block + 1) * tile).min(scores.len());
        let grown = scores[keys.clone()].iter().copied().fold(max, f64::max);
        let rescale = if max == f64::NEG_INFINITY { 0.0 } else { (max - grown).exp() };
        max = if scores[keys.clone()].iter().any(|score| score.is_nan()) { f64::NAN } else { grown };
        sum *= rescale;
        out.iter_mut().for_each(|own| *own *= rescale);
        for key in keys {
            let p = (scores[key] - max).exp();
            sum += p;
            let rounded = f64::from(e4m3::decode(e4m3::encode((p * 256.0) as f32))) / 256.0;
            let p = if tiles.is_some() { rounded } else { p };
            out.iter_mut().enumerate().for_each(|(column, own)| *own += p * value(key, column));
        }
    }
    sum += (sink - max).exp();
    out.iter_mut().for_each(|own| *own /= sum);
    Row { out, lse: max + sum.ln() }
}

fn check(own: &Own, seed: u64) {
    let (problem, spec) = (own.problem(), own.spec());
    let plain = problem.with_types(Types::same(Dtype::Bf16)).with_descales(Descales::NONE);
    let mut extras =
        own.batch().map_or_else(|| with_mods(OwnedExtras::NONE, &plain), |batch| batch.extras(&plain));
    let rows = own_rows(&plain, &extras);
    let mut random = Random::new(seed + 7);
    let shapes = [q_shape(&problem), k_shape(&problem), v_shape(&problem)];
    let codes: Vec<Vec<u8>> =
        (0..3).map(|i| drawn(own, i, shapes[i], &rows[usize::from(i > 0)], &mut random)).collect();
    let kinds = [Extra::QDescale, Extra::KDescale, Extra::VDescale];
    let descales = kinds.map(|extra| {
        let need = extra.need(&problem, Pass::Forward).map_or(0, |need| need.len);
        let of = |i: usize| match own.values {
            Values::Extreme => [0.0, 2f32.powi(-20), 1e-23, 2.0][(i + extra as usize) % 4],
            Values::Even => 0.5,
            Values::Normal | Values::AllCodes => 0.4 + random.normal().abs(),
        };
        (0..need).map(of).collect::<Vec<f32>>()
    });
    let given = |i: usize| (!descales[i].is_empty()).then(|| descales[i].clone());
    (extras.q_descale, extras.k_descale, extras.v_descale) = (given(0), given(1), given(2));
    let strides = |shape: [usize; 4]| TensorLayout::Bshd.strides(shape[1], shape[2], shape[3]);
    let out = out_shape(&problem);
    let mut tensors: Vec<Given<'_>> =
        codes.iter().zip(shapes).map(|(codes, shape)| Given::Codes(codes, strides(shape))).collect();
    tensors.push(Given::Output(out.iter().product(), strides(out)));
    let headers = Headers::current().expect("the headers");
    let unit = emulator().unit(&spec, Arch::Sm90, &headers).unwrap_or_else(|e| panic!("{spec}: {e}"));
    let call = Call { tensors, lse: None, extras: &extras, program: None, rows: [&rows[0], &rows[1]] };
    let outcome =
        unit.run(&problem, &call, &Options::of(&spec, seed)).unwrap_or_else(|e| panic!("{spec}: {e}"));
    let faults: Vec<String> = outcome.findings.iter().map(ToString::to_string).collect();
    assert!(faults.is_empty(), "{spec} {problem:?} seed {seed}:\n{}", faults.join("\n"));
    assert!(outcome.launches.iter().all(|launch| launch.finished) && outcome.page_faults == 0, "{spec}");

    let sequences: Vec<_> = {
        let lengths = OwnedExtras { q_descale: None, k_descale: None, v_descale: None, ..extras.clone() };
        let batch =
            fa_cpu::batch::Batch::new(&plain, &lengths.view()).expect("the lengths are the problem's");
        let places = |i: usize, len: usize| (0..len).map(|key| batch.key(i, key)).collect::<Vec<_>>();
        batch.sequences.iter().enumerate().map(|(i, own)| (own.q, places(i, own.k.len))).collect()
    };
    let (mut worst, mut errors, mut computed) = (0f64, [0f64; 2], 0);
    for (index, (q, keys)) in sequences.iter().enumerate() {
        for head in 0..problem.heads_q {
            let kv_head = head / problem.group_size();
            let descale = |i: usize| match own.descales.q {
                DescaleForm::SequenceHead => f64::from(descales[i][index * problem.heads_kv + kv_head]),
                DescaleForm::Head => f64::from(descales[i][kv_head]),
                DescaleForm::None | DescaleForm::TokenHead => 1.0,
            };
            let code = |i: usize, entry: usize, row: usize, head: usize, column: usize| {
                let [_, len, heads, dim] = shapes[i];
                f64::from(e4m3::decode(codes[i][((entry * len + row) * heads + head) * dim + column]))
            };
            let factor = problem.scale() * descale(0) * descale(1);
            for query in 0..q.len {
                let visible = own.mask.keys(query, q.len, keys.len());
                let scores: Vec<f64> = visible
                    .clone()
                    .map(|key| {
                        let (entry, row) = keys[key];
                        let product = |column| {
                            code(0, q.batch, q.first + query, head, column)
                                * code(1, entry, row, kv_head, column)
                        };
                        let diagonal = (query + keys.len()) as f64 - q.len as f64;
                        let slope = extras.alibi_slopes.as_ref().map_or(0.0, |own| f64::from(own[head]));
                        let score = factor * (0..problem.head_dim).map(product).sum::<f64>();
                        problem.score.softcap.map_or(score, |cap| cap * (score / cap).tanh())
                            - slope * (diagonal - key as f64).abs()
                    })
                    .collect();
                let first = visible.start;
                let value = |key: usize, column: usize| {
                    let (entry, row) = keys[first + key];
                    code(2, entry, row, kv_head, column) * descale(2)
                };
                let sink = extras.sinks.as_ref().map_or(f64::NEG_INFINITY, |own| f64::from(own[head]));
                let exact = row(&scores, sink, &value, problem.head_dim_v, None);
                let rounded = row(&scores, sink, &value, problem.head_dim_v, Some(spec.tile().1 as usize));
                let largest = (0..scores.len())
                    .flat_map(|key| (0..problem.head_dim_v).map(move |column| (key, column)))
                    .map(|(key, column)| value(key, column).abs())
                    .fold(0.0, f64::max);
                let at = ((q.batch * out[1] + q.first + query) * out[2] + head) * out[3];
                let lse = f64::from(outcome.lse[(q.batch * out[2] + head) * out[1] + q.first + query]);
                let place =
                    format!("{spec} {problem:?} seed {seed}: sequence {index}, head {head}, query {query}");
                if exact.lse.is_nan() {
                    assert!(lse.is_nan(), "{place}: LSE {lse}");
                } else if exact.lse.is_finite() {
                    // The error of polynomial exponentials (`exp2_polynomial`).
                    let allowed = 2e-6 * (1.0 + exact.lse.abs()) + 8e-5;
                    assert!((lse - exact.lse).abs() <= allowed, "{place}: LSE {lse}, not {}", exact.lse);
                } else {
                    assert_eq!(lse, exact.lse, "{place}");
                }
                let error = (0..problem.head_dim_v)
                    .map(|column| (rounded.out[column] - exact.out[column]).abs())
                    .fold(0.0, f64::max);
                for column in 0..problem.head_dim_v {
                    let found = f64::from(bf16::from_bits(outcome.outputs[0][at + column]).to_f32());
                    let (truth, like) = (exact.out[column], rounded.out[column]);
                    if truth.is_nan() {
                        assert!(found.is_nan(), "{place}, column {column}: {found}, not NaN");
                        continue;
                    }
                    let exactly = own.values == Values::Even;
                    let allowed = match exactly {
                        true => truth.abs() / 256.0,
                        false => 3.0 * error + largest / 256.0,
                    };
                    assert!(
                        (found - truth).abs() <= allowed,
                        "{place}, column {column}: {found}, not {truth}, by rounding {like}"
                    );
                    worst = worst.max((found - truth).abs() / (largest + 1e-300));
                    errors[0] += (found - truth).powi(2);
                    errors[1] += truth.powi(2);
                    computed += usize::from(found != 0.0);
                }
            }
        }
    }
    assert!(computed > 0, "{spec}: nothing was computed");
    let relative = (errors[0] / errors[1]).sqrt();
    println!("{spec}: worst {worst:.4} of the largest value, RMS {relative:.4} of O's");
    assert!(relative < 0.04 || own.values != Values::Normal, "{spec}: RMS error {relative} of O's");
}

const DRAWN: [(&str, &str); 2] = [("scheduler", "Dynamic"), ("tile_order", "LongestFirst")];
const SMALL: &[(&str, &str)] = &[("tile_m", "64"), ("num_wg", "1"), ("tile_n", "64")];
const OVERLAP: &[(&str, &str)] = &[
    ("tile_n", "96"),
    ("overlap_wg", "true"),
    ("ping_pong", "true"),
    ("v_stages", "2"),
    ("exp_poly_of_16", "4"),
];
const TURNS: &[(&str, &str)] =
    &[("tile_n", "192"), ("ping_pong", "true"), ("q_stages", "2"), DRAWN[0], DRAWN[1]];
const ONE_LEVEL: &[(&str, &str)] = &[("two_level", "false"), ("tile_n", "160"), ("kv_stages", "1")];
const ONE_LEVEL_OVERLAP: &[(&str, &str)] =
    &[("two_level", "false"), ("overlap_wg", "true"), ("kv_stages", "3")];
const WIDE: &[(&str, &str)] =
    &[("tile_n", "64"), ("ping_pong", "true"), ("v_stages", "2"), DRAWN[0], DRAWN[1]];
const THREE: &[(&str, &str)] =
    &[("tile_m", "192"), ("num_wg", "3"), ("tile_n", "128"), ("scheduler", "Static"), ("ping_pong", "true")];
const PACKED: &[(&str, &str)] =
    &[("tile_m", "64"), ("num_wg", "1"), ("tile_n", "128"), ("pack_gqa", "true"), DRAWN[0], DRAWN[1]];

#[test]
fn e4m3_tensors_give_o_and_lse() {
    check(&of(SMALL, 64, Rows::Uniform(40, 100)), 0);
    check(&of(OVERLAP, 128, Rows::Uniform(40, 200)).masked(Mask::CAUSAL), 1);
}

#[test]
#[ignore = "emulation"]
fn e4m3_tensors_of_equal_lengths_give_o_and_lse() {
    let window = Mask::window(40, 7);
    for (own, seed) in [
        (of(&[], 128, Rows::Uniform(150, 300)), 0),
        (of(&[], 64, Rows::Uniform(140, 129)).masked(Mask::CAUSAL), 1),
        (of(TURNS, 128, Rows::Uniform(300, 500)).masked(Mask::CAUSAL), 2),
        (of(TURNS, 64, Rows::Uniform(130, 400)).masked(window), 0),
        (of(OVERLAP, 128, Rows::Uniform(130, 290)), 1),
        (of(OVERLAP, 96, Rows::Uniform(70, 200)).masked(window), 2),
        (of(ONE_LEVEL, 128, Rows::Uniform(130, 330)).masked(Mask::CAUSAL), 0),
        (of(ONE_LEVEL_OVERLAP, 64, Rows::Uniform(130, 520)), 1),
        (of(WIDE, 256, Rows::Uniform(130, 200)).masked(Mask::CAUSAL), 2),
        (of(WIDE, 192, Rows::Uniform(70, 150)), 0),
        (of(THREE, 64, Rows::Uniform(200, 270)), 1),
        (of(SMALL, 80, Rows::Uniform(64, 127)), 2),
        (Own { head_dims: (192, 128), ..of(&[], 128, Rows::Uniform(20, 257)) }, 0),
        (Own { heads: (6, 2), ..of(PACKED, 128, Rows::Uniform(3, 300)).masked(Mask::CAUSAL) }, 1),
        (Own { heads: (4, 2), descales: Descales::NONE, ..of(&[], 64, Rows::Uniform(1, 1)) }, 2),
    ] {
        check(&own, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn e4m3_tensors_of_other_lengths_give_o_and_lse() {
    let window = Mask::window(40, 7);
    let head = Descales::all(DescaleForm::Head);
    for (own, seed) in [
        (of(TURNS, 128, Rows::Varied(Lie::Packed)).masked(Mask::CAUSAL), 0),
        (of(OVERLAP, 128, Rows::Varied(Lie::Padded)), 1),
        (Own { descales: head, ..of(WIDE, 64, Rows::Varied(Lie::PackedUsed)).masked(window) }, 2),
        (Own { heads: (6, 2), ..of(PACKED, 64, Rows::Varied(Lie::Padded)).masked(Mask::CAUSAL) }, 0),
        (of(TURNS, 128, Rows::Varied(Lie::Paged(16))).masked(Mask::CAUSAL), 1),
        (Own { heads: (6, 2), ..of(PACKED, 64, Rows::Varied(Lie::Paged(24))).masked(window) }, 2),
        (of(WIDE, 256, Rows::Varied(Lie::Paged(64))).with(Values::AllCodes), 0),
    ] {
        check(&own, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn e4m3_keys_are_divided_among_ctas() {
    let window = Mask::window(40, 7);
    const SPLIT: &str = "split: true,";
    const SUNK: &str = "split: true, sinks: true,";
    for (own, seed) in [
        (Own { flags: SPLIT, ..of(SMALL, 64, Rows::Uniform(3, 500)) }, 0),
        (Own { flags: SUNK, ..of(OVERLAP, 128, Rows::Uniform(70, 400)).masked(Mask::CAUSAL) }, 1),
        (Own { flags: SPLIT, ..of(WIDE, 256, Rows::Uniform(10, 300)).masked(window) }, 2),
        (Own { flags: SPLIT, ..of(TURNS, 96, Rows::Varied(Lie::Packed)).masked(Mask::CAUSAL) }, 0),
        (Own { flags: SUNK, heads: (6, 2), ..of(PACKED, 64, Rows::Varied(Lie::Paged(24))) }, 1),
        (
            Own {
                flags: SPLIT,
                heads: (6, 2),
                ..of(PACKED, 80, Rows::Varied(Lie::Padded)).masked(Mask::CAUSAL)
            },
            2,
        ),
    ] {
        check(&own, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn special_codes_and_descales_are_honoured() {
    for (own, seed) in [
        (of(TURNS, 128, Rows::Uniform(70, 400)).with(Values::Even), 0),
        (of(OVERLAP, 64, Rows::Uniform(70, 333)).with(Values::Even), 1),
        (of(TURNS, 64, Rows::Uniform(70, 300)).with(Values::AllCodes), 2),
        (of(&[], 128, Rows::Varied(Lie::Padded)).with(Values::AllCodes).masked(Mask::CAUSAL), 0),
        (Own { heads: (4, 4), ..of(&[], 64, Rows::Uniform(40, 150)).with(Values::Extreme) }, 1),
    ] {
        check(&own, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn e4m3_scores_are_changed() {
    let window = Mask::window(40, 7);
    for (own, seed) in [
        (Own { flags: "alibi: true,", ..of(OVERLAP, 64, Rows::Uniform(70, 200)).masked(Mask::CAUSAL) }, 0),
        (
            Own {
                flags: "sinks: true,",
                heads: (6, 2),
                ..of(PACKED, 64, Rows::Uniform(30, 200)).masked(window)
            },
            1,
        ),
        (of(TURNS, 128, Rows::Uniform(130, 330)).masked(Mask::CAUSAL), 2),
        (Own { flags: "softcap: true,", ..of(TURNS, 128, Rows::Uniform(70, 200)).masked(Mask::CAUSAL) }, 0),
        (
            Own {
                flags: "softcap: true, alibi: true, sinks: true,",
                ..of(OVERLAP, 64, Rows::Uniform(70, 150))
            },
            1,
        ),
        (
            Own {
                flags: "softcap: true,",
                heads: (6, 2),
                ..of(PACKED, 64, Rows::Varied(Lie::Paged(24))).with(Values::Extreme).masked(window)
            },
            2,
        ),
    ] {
        check(&own, seed);
    }
}
