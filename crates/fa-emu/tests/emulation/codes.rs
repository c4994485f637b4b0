//! Forwards that read K and V as codes: the bits of O and LSE are those of the same kernel on the
//! numbers that the codes stand for, with descales that are powers of two; with descales of each row, on the
//! numbers times these, rounded.

use fa_core::quantize::Codes;
use fa_core::{
    Arch, DescaleForm, Descales, Dtype, Extra, KernelSpec, Lengths, Mask, MaskKind, Pass, Problem, ScoreMod,
    Side, TensorLayout, Types,
};
use fa_cpu::OwnedExtras;
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_emu::{Batch, Call, Given, Lie, Options, Outcome, with_mods};
use fa_kernels::Headers;
use fa_lab::random::Random;
use half::{bf16, f16};

use crate::emulator;

/// A kernel and a problem.
#[derive(Clone, Copy)]
struct Own {
    kernel: &'static str,
    arch: Arch,
    /// Of Q and O, and of the codes.
    types: (Dtype, Dtype),
    head_dim: usize,
    /// The latents that K's rows begin with; 0 for values of their own.
    latents: usize,
    mask: Mask,
    /// Those of the spec.
    flags: &'static str,
    rows: Rows,
    descales: Descales,
    /// Whether a key in use, and a value, is NaN.
    nan: bool,
    /// Whether the columns of values are all codes.
    every_code: bool,
}

#[derive(Clone, Copy)]
enum Rows {
    Uniform(usize, usize),
    /// Keys as they lie; single queries, or several.
    Varied(Lie, bool),
}

const NONE: Descales = Descales::NONE;
const TOKENS: Descales = Descales::both(DescaleForm::TokenHead);
const MIXED: Descales = Descales::new(DescaleForm::SequenceHead, DescaleForm::Head);

const SMALL: &str = "Sm80Fwd((tile_m: 64, tile_n: 64, num_warps: 4, stages: 2, q_in_regs: false, \
                     blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: true, fast_math: true, \
                     loop_split: true, reverse_blocks: true))";
const IN_REGISTERS: &str = "Sm80Fwd((tile_m: 128, tile_n: 48, num_warps: 4, stages: 1, q_in_regs: true, \
                            blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: false, fast_math: false, \
                            loop_split: false, reverse_blocks: false))";
const PACKED: &str = "Sm80Fwd((tile_m: 64, tile_n: 32, num_warps: 4, stages: 3, q_in_regs: true, \
                      blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: true, fast_math: true, \
                      loop_split: true, reverse_blocks: true, pack_gqa: true))";
const DIVIDED: &str = "Sm80Fwd((tile_m: 16, tile_n: 128, num_warps: 4, stages: 2, q_in_regs: true, \
                       blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: true, fast_math: true, \
                       loop_split: true, reverse_blocks: true, pack_gqa: true, divide_keys: true))";
const DIVIDED_ROWS: &str = "Sm80Fwd((tile_m: 32, tile_n: 32, num_warps: 2, stages: 3, q_in_regs: false, \
                            blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: false, fast_math: false, \
                            loop_split: false, reverse_blocks: false, divide_keys: true))";
const DECODE: &str = "Sm90Fwd((tile_m: 64, tile_n: 64, num_wg: 1, pv_is_rs: true, overlap_wg: true, \
                      q_stages: 2, kv_stages: 2, ping_pong: false, scheduler: Dynamic, tile_order: \
                      LongestFirst, cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: true))";
const PREFILL: &str = "Sm90Fwd((tile_m: 128, tile_n: 128, num_wg: 2, pv_is_rs: true, overlap_wg: true, \
                       q_stages: 1, kv_stages: 2, ping_pong: true, scheduler: Dynamic, tile_order: \
                       LongestFirst, cluster_m: 1, exp_poly_of_16: 4, rescale_threshold: 0, pack_gqa: \
                       false))";
const STATIC: &str = "Sm90Fwd((tile_m: 192, tile_n: 96, num_wg: 3, pv_is_rs: false, overlap_wg: false, \
                      q_stages: 1, kv_stages: 1, ping_pong: false, scheduler: Static, tile_order: Natural, \
                      cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 0, pack_gqa: false))";
const SIMPLE: &str = "Sm90Fwd((tile_m: 64, tile_n: 64, num_wg: 1, pv_is_rs: true, overlap_wg: true, \
                      q_stages: 1, kv_stages: 1, ping_pong: false, scheduler: PerTile, tile_order: Natural, \
                      cluster_m: 1, exp_poly_of_16: 0, rescale_threshold: 0, pack_gqa: false))";

/// A kernel for wide heads: keys of a step, buffers of them, and how tiles are assigned to CTAs.
macro_rules! wide {
    ($keys:literal, $stages:literal, $tiles:literal, latent: $latent:literal, overlap: $overlap:literal) => {
        concat!(
            "Sm90Wide((tile_m: 64, tile_n: ",
            $keys,
            ", latent: ",
            $latent,
            ", overlap: ",
            $overlap,
            ", kv_stages: ",
            $stages,
            ", scheduler: ",
            $tiles,
            ", tile_order: Natural, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: true, head_parts: 1))"
        )
    };
}
const LATENTS: &str = wide!(64, 2, "PerTile", latent: true, overlap: false);
const LATENTS_ONE: &str = wide!(64, 1, "Static", latent: true, overlap: false);
const LATENTS_THREE: &str = wide!(64, 3, "PerTile", latent: true, overlap: false);
const LATENTS_UNDER: &str = wide!(64, 2, "Static", latent: true, overlap: true);
const LATENTS_SHORT: &str = wide!(32, 4, "Static", latent: true, overlap: false);
const WIDE: &str = wide!(64, 1, "PerTile", latent: false, overlap: true);
const WIDE_AFTER: &str = wide!(64, 2, "PerTile", latent: false, overlap: false);
const WIDE_SHORT: &str = wide!(32, 3, "PerTile", latent: false, overlap: true);

impl Own {
    const fn of(kernel: &'static str, arch: Arch, types: (Dtype, Dtype), rows: Rows) -> Own {
        let (mask, flags) = (Mask::CAUSAL, "");
        let (head_dim, latents, descales) = (64, 0, MIXED);
        let (nan, every_code) = (false, false);
        Own { kernel, arch, types, head_dim, latents, mask, flags, rows, descales, nan, every_code }
    }

    const fn with(self, head_dim: usize, mask: Mask, flags: &'static str, descales: Descales) -> Own {
        Own { head_dim, mask, flags, descales, ..self }
    }

    /// The same of `latents` columns of values, with which K's rows begin.
    const fn of_latents(self, latents: usize) -> Own {
        Own { latents, ..self }
    }

    /// The spec of the kernel for the tile's head dim, with codes or the type of Q.
    fn spec(&self, codes: bool) -> KernelSpec {
        let Own { types: (q, kv), head_dim, latents, mask, flags, .. } = *self;
        let hd = head_dim.next_multiple_of(16).max(32);
        let hdv = if latents > 0 { latents } else { hd };
        let kv = if codes { format!("kv_dtype: Some({kv}),") } else { String::new() };
        // Pages of any size.
        let gathers = !codes && flags.contains("paged") && self.kernel.starts_with("Sm90");
        let kernel = match gathers {
            true => self.kernel.replace("pack_gqa", "gather: true, pack_gqa"),
            false => self.kernel.to_owned(),
        };
        let mask = MaskKind::of(&mask).name();
        let text = format!(
            "(dtype: {q}, {kv} head_dim: {hd}, head_dim_v: {hdv}, mask: {mask}, {flags} kernel: {kernel})"
        );
        KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn batch(&self) -> Option<Batch> {
        let Rows::Varied(k, single) = self.rows else { return None };
        let many = vec![(70, 150), (33, 33), (0, 40), (20, 0), (1, 210)];
        let one = vec![(1, 150), (1, 33), (1, 1), (1, 0), (1, 330)];
        Some(Batch { sequences: if single { one } else { many }, q: Lie::Packed, k, slack: 5 })
    }

    fn problem(&self) -> Problem {
        let types = Types::same(self.types.0).with_kv(self.types.1);
        let lengths = match (self.rows, self.batch()) {
            (Rows::Uniform(q, k), _) => Lengths::of(2, Side::padded(q), Side::padded(k)),
            (Rows::Varied(..), batch) => batch.expect("of its own lengths").lengths(),
        };
        let score = ScoreMod::NONE
            .with_softcap(self.flags.contains("softcap").then_some(20.0))
            .with_alibi(self.flags.contains("alibi").then_some(fa_core::Alibi::PerHead))
            .with_sinks(self.flags.contains("sinks"));
        let own = Problem::square(1, 1, 4, self.head_dim, self.mask, self.types.0)
            .with_heads_kv(2)
            .with_lengths(lengths)
            .with_types(types)
            .with_score(score)
            .with_descales(self.descales);
        match self.latents {
            0 => own,
            latents => own.with_head_dim_v(latents).with_latent(true).with_softmax_scale(Some(0.05)),
        }
    }
}

/// 16 bits of a number, rounded.
fn half_bits(dtype: Dtype, value: f32) -> u16 {
    if dtype == Dtype::F16 { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
}

fn is_nan(dtype: Dtype, bits: u16) -> bool {
    if dtype == Dtype::F16 { f16::from_bits(bits).is_nan() } else { bf16::from_bits(bits).is_nan() }
}

/// Rows of keys that belong to a sequence: `[entry, row]`; all for an empty list.
pub(crate) fn own_rows(problem: &Problem, extras: &OwnedExtras) -> [Vec<bool>; 2] {
    if problem.lengths.is_uniform() {
        return [Vec::new(), Vec::new()];
    }
    let batch = fa_cpu::batch::Batch::new(problem, &extras.view()).expect("the extras are the problem's");
    let [q, k] = [q_shape(problem), k_shape(problem)];
    let mut rows = [vec![false; q[0] * q[1]], vec![false; k[0] * k[1]]];
    for (index, sequence) in batch.sequences.iter().enumerate() {
        for row in 0..sequence.q.len {
            rows[0][sequence.q.batch * q[1] + sequence.q.first + row] = true;
        }
        for row in 0..sequence.k.len {
            let (entry, at) = batch.key(index, row);
            rows[1][entry * k[1] + at] = true;
        }
    }
    rows
}

/// K or V in both types: bytes of codes whose rows are padded to 16 bytes, and numbers, packed.
struct SideOfCodes {
    codes: Vec<u8>,
    numbers: Vec<u16>,
}

/// Codes and numbers of a tensor of `shape`. `descale(entry, row, head)` is in the numbers.
fn drawn(
    own: &Own,
    shape: [usize; 4],
    rows: &[bool],
    random: &mut Random,
    every_code: bool,
    descale: impl Fn(usize, usize, usize) -> f32,
) -> SideOfCodes {
    let [entries, len, heads, dim] = shape;
    let codes_of = Codes::of(own.types.1).expect("codes");
    let width = dim.next_multiple_of(16);
    let (mut codes, mut numbers) = (vec![0x7f; entries * len * heads * width], Vec::new());
    let nan_row = rows.iter().position(|&own| own).unwrap_or(0) + 3;
    for index in 0..entries * len * heads {
        let (entry, row, head) = (index / heads / len, index / heads % len, index % heads);
        let is_own = rows.is_empty() || rows[entry * len + row];
        for column in 0..dim {
            // All codes but NaN; about normal, as far as codes go.
            let is_nan = own.nan && head == 1 && entry * len + row == nan_row && column == 5;
            let code = match own.types.1 {
                _ if !is_own || is_nan => 0x7f,
                _ if every_code => (37 * column) as u8,
                Dtype::Int8 if column % 7 == 0 => random.below(256) as u8,
                Dtype::Int8 => codes_of.encode(random.normal() * 40.0),
                Dtype::Int4 => random.below(256) as u8,
                float if column % 31 == 0 => {
                    let finite = if float == Dtype::E5m2 { 0x7b } else { 0x7e };
                    [random.below(256) as u8].map(|c| if c & 0x7f > finite { 8 } else { c })[0]
                }
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::E5m2 => {
                    codes_of.encode(random.normal())
                }
            };
            codes[index * width + column] = code;
            for number in codes_of.numbers(&[code]) {
                numbers.push(half_bits(own.types.0, number * descale(entry, row, head)));
            }
        }
    }
    SideOfCodes { codes, numbers }
}

/// Runs both kernels and compares their bits.
fn check(own: &Own, seed: u64) {
    let problem = own.problem();
    let plain = problem.with_types(Types::same(own.types.0)).with_descales(NONE);
    let extras =
        own.batch().map_or_else(|| with_mods(OwnedExtras::NONE, &plain), |batch| batch.extras(&plain));
    let rows = own_rows(&plain, &extras);
    let mut random = Random::new(seed + 5);
    let [q, k, v, out] = [q_shape(&problem), k_shape(&problem), v_shape(&problem), out_shape(&problem)];
    let queries: Vec<u16> =
        (0..q.iter().product()).map(|_| half_bits(own.types.0, random.normal())).collect();
    let mut coded = extras.clone();
    let mut sides = Vec::new();
    for (extra, form, shape) in
        [(Extra::KDescale, problem.descales.k, k), (Extra::VDescale, problem.descales.v, v)]
    {
        let [_, len, heads, _] = shape;
        let need = extra.need(&problem, Pass::Forward).map_or(0, |need| need.len);
        let small = match own.types.1 {
            Dtype::Int8 => 1.0 / 64.0,
            Dtype::Int4 => 1.0 / 8.0,
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::E5m2 => 1.0,
        };
        // Kernels that divide keys apply those of rows to scores and probabilities: to the bits where these
        // are powers of two.
        let divides = own.kernel.contains("divide_keys: true");
        let values: Vec<f32> = (0..need)
            .map(|i| match form {
                DescaleForm::TokenHead if divides => small * [1.0, 0.5, 2.0, 0.25][random.below(4)],
                DescaleForm::TokenHead => small * (0.3 + random.normal().abs()),
                DescaleForm::None | DescaleForm::Head | DescaleForm::SequenceHead => {
                    small * [1.0, 0.5, 2.0, 0.25][i % 4]
                }
            })
            .collect();
        // The sequence of a row of packed or paged keys is found by its page or its start.
        let sequence_of = |entry: usize, row: usize| sequence_of(&plain, &extras, entry, row);
        let every_code = own.every_code && extra == Extra::VDescale;
        let side = drawn(own, shape, &rows[1], &mut random, every_code, |entry, row, head| match form {
            DescaleForm::None => 1.0,
            DescaleForm::Head => values[head],
            DescaleForm::SequenceHead => values[sequence_of(entry, row) * heads + head],
            DescaleForm::TokenHead => values[(entry * len + row) * heads + head],
        });
        sides.push(side);
        let values = (form != DescaleForm::None).then_some(values);
        if extra == Extra::KDescale { coded.k_descale = values } else { coded.v_descale = values }
    }
    let strides = |shape: [usize; 4], width: usize| TensorLayout::Bshd.strides(shape[1], shape[2], width);
    let output = Given::Output(out.iter().product(), strides(out, out[3]));
    let query = Given::Input(&queries, strides(q, q[3]));
    let codes = |side: usize, shape: [usize; 4]| {
        Given::Codes(&sides[side].codes, strides(shape, shape[3].next_multiple_of(16)))
    };
    let numbers =
        |side: usize, shape: [usize; 4]| Given::Input(&sides[side].numbers, strides(shape, shape[3]));
    let run = |problem: &Problem,
               spec: &KernelSpec,
               tensors: Vec<Given<'_>>,
               extras: &OwnedExtras|
     -> Outcome {
        let unit = emulator()
            .unit(spec, own.arch, &Headers::current().unwrap())
            .unwrap_or_else(|e| panic!("{spec}: {e}"));
        let rows = [&rows[0][..], &rows[1][..]];
        let call = Call { tensors, lse: None, extras, program: None, rows };
        let outcome = unit
            .run(problem, &call, &Options { splits: spec.split.then_some(3), ..Options::of(spec, seed) })
            .unwrap_or_else(|e| panic!("{spec}: {e}"));
        let faults: Vec<String> = outcome.findings.iter().map(ToString::to_string).collect();
        assert!(faults.is_empty(), "{spec} {problem:?} seed {seed}:\n{}", faults.join("\n"));
        assert!(outcome.launches.iter().all(|launch| launch.finished) && outcome.page_faults == 0, "{spec}");
        outcome
    };
    let (spec, like) = (own.spec(true), own.spec(false));
    let found = run(&problem, &spec, vec![query, codes(0, k), codes(1, v), output], &coded);
    let (of_k, of_v) = (numbers(0, k_shape(&plain)), numbers(1, v_shape(&plain)));
    let expected = run(&plain, &like, vec![query, of_k, of_v, output], &extras);
    let may_be_nan = own.nan || own.every_code;
    let same = |a: u16, b: u16| a == b || (may_be_nan && is_nan(own.types.0, a) && is_nan(own.types.0, b));
    let (o, of) = (&found.outputs[0], &expected.outputs[0]);
    let wrong = o.iter().zip(of).position(|(&a, &b)| !same(a, b));
    assert_eq!(wrong.map(|at| (at, o[at], of[at])), None, "{spec} {problem:?} seed {seed}: O of {}", o.len());
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (own.nan && a.is_nan() && b.is_nan());
    let wrong = found.lse.iter().zip(&expected.lse).position(|(&a, &b)| !same(a, b));
    assert_eq!(wrong.map(|at| (at, found.lse[at], expected.lse[at])), None, "{spec} {problem:?}: LSE");
    assert!(o.iter().any(|&bits| bits != 0 && !is_nan(own.types.0, bits)), "{spec}: nothing was computed");
    if own.nan {
        let count = o.iter().filter(|&&bits| is_nan(own.types.0, bits)).count();
        assert!(count > 0 && count < o.len(), "{spec}: {count} of {} are NaN", o.len());
        let rows = found.lse.iter().filter(|lse| lse.is_nan()).count();
        assert!(rows > 0 && rows < found.lse.len(), "{spec}: LSE of {rows} of {} is NaN", found.lse.len());
    }
}

/// The sequence that a row of keys belongs to; 0 for none.
fn sequence_of(problem: &Problem, extras: &OwnedExtras, entry: usize, row: usize) -> usize {
    if problem.lengths.is_uniform() {
        return entry;
    }
    let batch = fa_cpu::batch::Batch::new(problem, &extras.view()).expect("the extras are the problem's");
    let has = |(index, len): (usize, usize)| (0..len).any(|key| batch.key(index, key) == (entry, row));
    let lens = batch.sequences.iter().map(|sequence| sequence.k.len).enumerate();
    lens.into_iter().find(|&own| has(own)).map_or(0, |(index, _)| index)
}

const BF16: (Dtype, Dtype) = (Dtype::Bf16, Dtype::E4m3);
const F16: (Dtype, Dtype) = (Dtype::F16, Dtype::E4m3);
const BF16_INT8: (Dtype, Dtype) = (Dtype::Bf16, Dtype::Int8);
const F16_INT8: (Dtype, Dtype) = (Dtype::F16, Dtype::Int8);
const BF16_INT4: (Dtype, Dtype) = (Dtype::Bf16, Dtype::Int4);
const F16_INT4: (Dtype, Dtype) = (Dtype::F16, Dtype::Int4);
const BF16_E5M2: (Dtype, Dtype) = (Dtype::Bf16, Dtype::E5m2);
const F16_E5M2: (Dtype, Dtype) = (Dtype::F16, Dtype::E5m2);
const PAGED: &str = "varied: true, paged: true,";
const VARIED: &str = "varied: true,";

#[test]
fn codes_give_the_bits_of_their_numbers() {
    check(&Own::of(SMALL, Arch::Sm80, BF16, Rows::Uniform(40, 100)), 0);
    check(&Own::of(SIMPLE, Arch::Sm90, F16, Rows::Uniform(40, 100)), 1);
    let paged = Own::of(DECODE, Arch::Sm90, BF16_INT8, Rows::Varied(Lie::Paged(17), true));
    check(&paged.with(64, Mask::CAUSAL, "varied: true, paged: true, split: true,", TOKENS), 2);
}

#[test]
#[ignore = "emulation"]
fn divided_codes_give_the_bits_of_their_numbers() {
    let of = |kernel, types, rows| Own::of(kernel, Arch::Sm80, types, rows);
    let window = Mask::window(40, 7);
    let nan = |own: Own| Own { nan: true, ..own };
    let cases = [
        of(DIVIDED, BF16, Rows::Uniform(1, 700)).with(128, Mask::CAUSAL, "split: true,", MIXED),
        of(DIVIDED, F16, Rows::Uniform(3, 330)).with(64, Mask::CAUSAL, "softcap: true, sinks: true,", NONE),
        of(DIVIDED_ROWS, BF16_INT8, Rows::Uniform(40, 150)).with(96, window, "", MIXED),
        of(DIVIDED_ROWS, F16_INT8, Rows::Uniform(70, 70)).with(32, Mask::FULL, "alibi: true,", TOKENS),
        of(DIVIDED, BF16, Rows::Varied(Lie::Paged(1), true)).with(128, Mask::CAUSAL, PAGED, TOKENS),
        of(DIVIDED, F16_INT8, Rows::Varied(Lie::Paged(17), true)).with(
            256,
            Mask::CAUSAL,
            "varied: true, paged: true, split: true, sinks: true,",
            MIXED,
        ),
        of(DIVIDED_ROWS, F16, Rows::Varied(Lie::Packed, false)).with(64, window, VARIED, MIXED),
        of(DIVIDED, BF16_INT8, Rows::Varied(Lie::PackedUsed, true)).with(64, Mask::FULL, VARIED, TOKENS),
        of(DIVIDED_ROWS, BF16, Rows::Varied(Lie::Padded, false)).with(128, Mask::CAUSAL, VARIED, TOKENS),
        nan(of(DIVIDED, BF16, Rows::Uniform(1, 200)).with(128, Mask::FULL, "", NONE)),
        nan(of(DIVIDED_ROWS, F16, Rows::Uniform(20, 60)).with(64, Mask::CAUSAL, "", MIXED)),
    ];
    for (case, seed) in cases.iter().zip([0, 1, 2].into_iter().cycle()) {
        check(case, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn sm80_codes_give_the_bits_of_their_numbers() {
    let of = |kernel, types, rows| Own::of(kernel, Arch::Sm80, types, rows);
    let window = Mask::window(40, 7);
    let cases = [
        of(SMALL, F16, Rows::Uniform(150, 150)).with(128, Mask::FULL, "", NONE),
        of(SMALL, BF16_INT8, Rows::Uniform(70, 330)).with(72, window, "", MIXED),
        of(IN_REGISTERS, F16_INT8, Rows::Uniform(140, 200)).with(80, Mask::CAUSAL, "softcap: true,", MIXED),
        of(IN_REGISTERS, BF16, Rows::Uniform(1, 70)).with(256, Mask::CAUSAL, "alibi: true,", TOKENS),
        // Parts without keys, of the first rows.
        of(SMALL, F16, Rows::Uniform(200, 200)).with(64, Mask::CAUSAL, "split: true,", MIXED),
        of(SMALL, BF16, Rows::Varied(Lie::Packed, false)).with(64, Mask::CAUSAL, VARIED, MIXED),
        of(SMALL, F16, Rows::Varied(Lie::Padded, false)).with(128, window, VARIED, TOKENS),
        of(PACKED, F16, Rows::Varied(Lie::PackedUsed, true)).with(64, Mask::FULL, VARIED, TOKENS),
        of(PACKED, BF16_INT8, Rows::Varied(Lie::Paged(1), true)).with(128, Mask::CAUSAL, PAGED, MIXED),
        of(SMALL, F16_INT8, Rows::Varied(Lie::Paged(16), false)).with(64, window, PAGED, TOKENS),
        of(PACKED, BF16, Rows::Varied(Lie::Paged(17), false)).with(
            64,
            Mask::CAUSAL,
            "varied: true, paged: true, split: true, sinks: true,",
            MIXED,
        ),
        of(SMALL, BF16, Rows::Varied(Lie::Paged(256), true)).with(256, Mask::CAUSAL, PAGED, NONE),
        of(PACKED, F16, Rows::Uniform(2, 700)).with(64, Mask::CAUSAL, "split: true,", MIXED),
    ];
    for (case, seed) in cases.iter().zip([0, 1, 2].into_iter().cycle()) {
        check(case, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn sm90_codes_give_the_bits_of_their_numbers() {
    let of = |kernel, types, rows| Own::of(kernel, Arch::Sm90, types, rows);
    let window = Mask::window(40, 7);
    let split = "varied: true, paged: true, split: true, sinks: true,";
    let cases = [
        of(PREFILL, BF16, Rows::Uniform(300, 300)).with(128, Mask::CAUSAL, "", MIXED),
        // Parts without keys, of the first rows.
        of(PREFILL, BF16, Rows::Uniform(200, 200)).with(128, Mask::CAUSAL, "split: true,", MIXED),
        of(PREFILL, F16_INT8, Rows::Varied(Lie::Packed, false)).with(64, Mask::CAUSAL, VARIED, TOKENS),
        of(PREFILL, BF16, Rows::Varied(Lie::Paged(16), false)).with(128, window, PAGED, NONE),
        of(STATIC, F16, Rows::Uniform(200, 330)).with(80, Mask::FULL, "softcap: true,", MIXED),
        of(STATIC, BF16_INT8, Rows::Uniform(500, 100)).with(72, Mask::CAUSAL, "alibi: true,", TOKENS),
        of(SIMPLE, BF16_INT8, Rows::Uniform(130, 330)).with(256, Mask::CAUSAL, "sinks: true,", MIXED),
        of(DECODE, F16, Rows::Uniform(1, 1300)).with(128, Mask::FULL, "split: true,", MIXED),
        of(DECODE, BF16, Rows::Varied(Lie::Paged(1), true)).with(128, Mask::CAUSAL, split, MIXED),
        of(DECODE, F16, Rows::Varied(Lie::Paged(16), false)).with(64, window, split, TOKENS),
        of(DECODE, BF16_INT8, Rows::Varied(Lie::Paged(256), false)).with(64, Mask::CAUSAL, PAGED, NONE),
        of(DECODE, BF16, Rows::Varied(Lie::Padded, true)).with(256, Mask::CAUSAL, VARIED, TOKENS),
        of(DECODE, F16_INT8, Rows::Varied(Lie::PackedUsed, false)).with(96, Mask::FULL, VARIED, MIXED),
    ];
    for (case, seed) in cases.iter().zip([0, 1, 2].into_iter().cycle()) {
        check(case, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn int4_codes_give_the_bits_of_their_numbers() {
    let of = |kernel, arch, types, rows| Own::of(kernel, arch, types, rows);
    let window = Mask::window(40, 7);
    let split = "varied: true, paged: true, split: true, sinks: true,";
    let divided = |kernel, types, rows| of(kernel, Arch::Sm80, types, rows);
    let cases = [
        divided(DIVIDED, BF16_INT4, Rows::Uniform(1, 700)).with(128, Mask::CAUSAL, "split: true,", MIXED),
        divided(DIVIDED, F16_INT4, Rows::Varied(Lie::Paged(17), true)).with(256, Mask::CAUSAL, split, TOKENS),
        divided(DIVIDED_ROWS, BF16_INT4, Rows::Uniform(40, 150)).with(64, window, "", MIXED),
        divided(DIVIDED_ROWS, F16_INT4, Rows::Varied(Lie::Packed, false)).with(192, window, VARIED, TOKENS),
        divided(SMALL, BF16_INT4, Rows::Uniform(70, 330)).with(96, window, "", MIXED),
        divided(IN_REGISTERS, F16_INT4, Rows::Uniform(140, 200)).with(
            32,
            Mask::CAUSAL,
            "softcap: true,",
            NONE,
        ),
        divided(SMALL, F16_INT4, Rows::Varied(Lie::Paged(16), false)).with(64, window, PAGED, TOKENS),
        divided(PACKED, BF16_INT4, Rows::Varied(Lie::Paged(1), true)).with(128, Mask::CAUSAL, PAGED, MIXED),
        divided(SMALL, BF16_INT4, Rows::Varied(Lie::Padded, false)).with(256, window, VARIED, TOKENS),
        of(PREFILL, Arch::Sm90, BF16_INT4, Rows::Uniform(300, 300)).with(128, Mask::CAUSAL, "", MIXED),
        of(PREFILL, Arch::Sm90, F16_INT4, Rows::Varied(Lie::Packed, false)).with(
            64,
            Mask::CAUSAL,
            VARIED,
            TOKENS,
        ),
        of(STATIC, Arch::Sm90, F16_INT4, Rows::Uniform(200, 330)).with(
            96,
            Mask::FULL,
            "softcap: true,",
            MIXED,
        ),
        of(SIMPLE, Arch::Sm90, BF16_INT4, Rows::Uniform(130, 330)).with(
            256,
            Mask::CAUSAL,
            "sinks: true,",
            MIXED,
        ),
        of(DECODE, Arch::Sm90, BF16_INT4, Rows::Varied(Lie::Paged(1), true)).with(
            128,
            Mask::CAUSAL,
            split,
            TOKENS,
        ),
        of(DECODE, Arch::Sm90, F16_INT4, Rows::Varied(Lie::PackedUsed, false)).with(
            32,
            Mask::FULL,
            VARIED,
            MIXED,
        ),
    ];
    for (case, seed) in cases.iter().zip([0, 1, 2].into_iter().cycle()) {
        check(case, seed);
    }
}

#[test]
#[ignore = "emulation"]
fn wide_codes_give_the_bits_of_their_numbers() {
    let of = |kernel, types, rows| Own::of(kernel, Arch::Sm90, types, rows);
    let latent = |kernel, types, rows| of(kernel, types, rows).of_latents(256);
    let window = Mask::window(40, 7);
    let split = "varied: true, paged: true, split: true, sinks: true,";
    let pages = |page| Rows::Varied(Lie::Paged(page), true);
    let cases = [
        latent(LATENTS, BF16, Rows::Uniform(1, 300)).with(320, Mask::CAUSAL, "", NONE),
        latent(LATENTS, F16, pages(64)).with(320, Mask::CAUSAL, PAGED, NONE),
        latent(LATENTS, BF16_INT8, pages(1)).with(320, Mask::CAUSAL, split, TOKENS),
        latent(LATENTS, F16_INT8, pages(16)).with(320, Mask::CAUSAL, split, MIXED),
        latent(LATENTS, BF16_E5M2, Rows::Varied(Lie::PackedUsed, false)).with(320, window, VARIED, NONE),
        latent(LATENTS, F16_E5M2, Rows::Varied(Lie::Padded, true)).with(384, Mask::CAUSAL, VARIED, TOKENS),
        latent(LATENTS, BF16_INT4, pages(16)).with(320, Mask::CAUSAL, split, NONE),
        latent(LATENTS, F16_INT4, Rows::Varied(Lie::Packed, false)).with(256, Mask::FULL, VARIED, MIXED),
        latent(LATENTS_ONE, BF16, Rows::Uniform(40, 200)).with(320, Mask::CAUSAL, "", MIXED),
        latent(LATENTS_THREE, BF16_INT4, pages(17)).with(320, Mask::CAUSAL, PAGED, TOKENS),
        latent(LATENTS_THREE, BF16, Rows::Varied(Lie::Packed, false)).with(320, window, VARIED, NONE),
        latent(LATENTS_UNDER, F16, Rows::Uniform(3, 500)).with(320, Mask::CAUSAL, "split: true,", NONE),
        latent(LATENTS_SHORT, F16_INT4, Rows::Uniform(70, 130)).with(320, Mask::CAUSAL, "", NONE),
        of(LATENTS, BF16, pages(64)).of_latents(512).with(576, Mask::CAUSAL, split, NONE),
        of(LATENTS, F16_INT4, Rows::Uniform(2, 150)).of_latents(512).with(576, Mask::FULL, "", TOKENS),
        of(WIDE, BF16_INT8, pages(16)).with(512, Mask::CAUSAL, split, TOKENS),
        of(WIDE, F16_INT4, Rows::Uniform(130, 200)).with(512, window, "softcap: true,", NONE),
        of(WIDE_AFTER, BF16, Rows::Varied(Lie::Packed, false)).with(256, Mask::CAUSAL, VARIED, TOKENS),
        of(WIDE_AFTER, BF16_INT4, pages(1)).with(128, Mask::CAUSAL, PAGED, MIXED),
        of(WIDE_SHORT, F16, Rows::Uniform(100, 270)).with(256, Mask::CAUSAL, "alibi: true,", MIXED),
        of(WIDE_SHORT, BF16_E5M2, Rows::Varied(Lie::Padded, false)).with(384, Mask::FULL, VARIED, TOKENS),
    ];
    for (case, seed) in cases.iter().zip([0, 1, 2].into_iter().cycle()) {
        check(case, seed);
    }
}

/// Of a single key the values are the result: all codes, infinities and NaN among them, as in 16 bits.
#[test]
#[ignore = "emulation"]
fn every_code_is_its_number_in_wide_tiles() {
    for types in [BF16, F16, BF16_E5M2, F16_E5M2, BF16_INT8, F16_INT8, BF16_INT4, F16_INT4] {
        let own = Own::of(WIDE, Arch::Sm90, types, Rows::Uniform(1, 1)).with(256, Mask::FULL, "", NONE);
        check(&Own { every_code: true, ..own }, 0);
    }
}

/// A key that is NaN shows in the rows that see it, as in 16 bits; with split keys, too, whose parts are
/// combined.
#[test]
#[ignore = "emulation"]
fn codes_that_are_nan_stay_so() {
    for (kernel, arch, types) in [
        (SMALL, Arch::Sm80, BF16),
        (SMALL, Arch::Sm89, F16),
        (SIMPLE, Arch::Sm90, F16),
        (PREFILL, Arch::Sm90, BF16),
    ] {
        check(&Own { nan: true, ..Own::of(kernel, arch, types, Rows::Uniform(200, 200)) }, 2);
    }
    for (types, descales) in [(BF16, NONE), (BF16_E5M2, NONE), (F16, TOKENS), (BF16, MIXED)] {
        let own = Own::of(LATENTS, Arch::Sm90, types, Rows::Uniform(70, 200)).of_latents(256);
        check(&Own { nan: true, ..own.with(320, Mask::CAUSAL, "", descales) }, 2);
        let own = Own::of(WIDE, Arch::Sm90, types, Rows::Uniform(70, 200));
        check(&Own { nan: true, ..own.with(256, Mask::CAUSAL, "", descales) }, 2);
    }
    for (kernel, arch, types) in [(SMALL, Arch::Sm80, BF16), (SIMPLE, Arch::Sm90, F16)] {
        let own = Own { nan: true, ..Own::of(kernel, arch, types, Rows::Uniform(70, 200)) };
        check(&own.with(64, Mask::FULL, "split: true,", MIXED), 2);
    }
}
