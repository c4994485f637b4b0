//! Random problems that an emulation runs in seconds: every feature, with short rows.

use fa_core::spec::WHOLE_ROW_HEAD_DIM;
use fa_core::{
    Alibi, Descales, Dtype, Family, KernelSpec, Lengths, Mask, MaskKind, Pass, Problem, ScoreMod, Types,
};
use fa_planner::plan::head_dims;

use super::case::{self, Arrangement, Case, NamedSpec, Values, case_of};
use super::problem::{OF_FP8, descales, of_caches};
use crate::random::Random;
use crate::sequences::{Ragged, Sequences, Store};

/// The most operations of whole 64 x 64 tiles over all heads, the backward's five products counted; and of
/// over a thousand sequences, each of which has a tile.
const MOST_FLOPS: [f64; 2] = [3e8, 2e9];

/// Drawn until one is within the bounds and the kernel's.
const ATTEMPTS: usize = 400;

/// Rows of a page that are drawn more often: fewer than, as many as and more than TMA boxes and tiles have.
const PAGES: [usize; 16] = [1, 2, 3, 5, 7, 8, 16, 17, 24, 40, 48, 64, 100, 128, 200, 256];

/// Query heads of a K/V head.
const GROUPS: [usize; 16] = [1, 1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 12, 16, 24, 32, 64];

/// What kernels are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Tensors of 16 bits, some with K and V of 8.
    Half,
    /// Q, K and V in e4m3.
    Fp8,
    /// Heads wider than most, and keys that begin with their values.
    Wide,
}

impl Form {
    /// That of a kernel.
    pub fn of(spec: &KernelSpec) -> Form {
        match spec.types.is_fp8() {
            true => Form::Fp8,
            false if spec.head_dim.max(spec.head_dim_v) > WHOLE_ROW_HEAD_DIM => Form::Wide,
            false if spec.traits().is_latent => Form::Wide,
            false => Form::Half,
        }
    }
}

/// A random problem of `form` for kernels of `family` that compute `pass`; with `spec` one that this kernel
/// serves. `None` where none was found, as for a kernel of a form that problems seldom have.
pub fn small(
    random: &mut Random,
    (family, form): (Family, Form),
    pass: Pass,
    spec: Option<&KernelSpec>,
) -> Option<Case> {
    let serves = |case: &Case| {
        let problem = &case.problem;
        problem.check().is_ok()
            && problem.check_gpu().is_ok()
            && spec.is_none_or(|spec| spec.serves(problem).is_ok())
            && flops(case) <= most_flops(case)
    };
    let named = |spec: &KernelSpec| NamedSpec { name: spec.to_string(), spec: spec.clone() };
    (0..ATTEMPTS)
        .map(|_| Case { pass, kernel: spec.map(named), ..draw(random, (family, form), pass, spec) })
        .find(serves)
}

fn most_flops(case: &Case) -> f64 {
    MOST_FLOPS[usize::from(case.problem.lengths.sequences() > 1000)]
}

/// Operations of whole tiles, which determine the emulation's time.
fn flops(case: &Case) -> f64 {
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = case.problem;
    let sequences = case.sequences();
    let rows = |len: usize| len.next_multiple_of(64) as f64;
    let pairs: f64 = (0..sequences.count())
        .map(|b| {
            let (q, k) = (sequences.q.len(b), sequences.k.len(b));
            // A group's heads share the rows of a tile where a tile has few queries.
            let packed = rows(q * heads_q / heads_kv) * heads_kv as f64;
            let apart = rows(q) * heads_q as f64;
            rows(k) * if q <= 16 && !case.pass.is_backward() { packed } else { apart }
        })
        .sum();
    let products = if case.pass.is_backward() { 5.0 } else { 2.0 };
    products * pairs * (head_dim + head_dim_v) as f64
}

fn draw(random: &mut Random, (family, form): (Family, Form), pass: Pass, spec: Option<&KernelSpec>) -> Case {
    let types = types(random, (family, form), pass, spec);
    let is_latent = match spec {
        Some(spec) => spec.traits().is_latent,
        None => form == Form::Wide && random.below(3) > 0,
    };
    let (head_dim, head_dim_v) = match form {
        Form::Half | Form::Fp8 => dims(random, family, spec),
        Form::Wide => wide_dims(random, is_latent, spec),
    };
    // Rows of codes are whole 16 bytes.
    let step = if types.kv.is_code() { 16 * types.kv.per_element() } else { 8 };
    let [head_dim, head_dim_v] = [head_dim, head_dim_v].map(|dim| dim.next_multiple_of(step));
    let heads_kv = if is_latent { 1 } else { random.of(&[1, 1, 1, 2, 3]) };
    let packs = spec.is_some_and(|spec| spec.traits().packs_gqa);
    let parts = spec.map_or(1, |spec| spec.traits().head_parts as usize);
    let group = random.of(if packs { &GROUPS[4..] } else { &GROUPS }) * parts;
    let score = match spec.map(|spec| spec.score) {
        Some(own) => [own.softcap, own.alibi, own.sinks],
        None => [random.below(7) == 0, random.below(6) == 0, random.below(5) == 0],
    };
    // In e4m3 errors are those of ordinary numbers.
    let values = random.of(match form {
        Form::Fp8 => &[Values::Normal, Values::Equal][..],
        Form::Half | Form::Wide => &[
            Values::Normal,
            Values::Normal,
            Values::Rising,
            Values::Falling,
            Values::Spikes,
            Values::Equal,
            Values::Sharp,
        ],
    });
    // LSEs are compared within 1e-3: a few roundings of scores in the thousands exceed that.
    let is_large = matches!(values, Values::Rising | Values::Falling | Values::Spikes | Values::Sharp);
    let scales: &[f64] = if is_large { &[0.01, 0.05] } else { &[0.01, 0.2, 1.0, 2.0] };
    let has_scale = is_latent || random.below(6) == 0;
    let turn = random.below(6);
    let problem = case::BASE
        .with_heads(heads_kv * group, heads_kv)
        .with_head_dims(head_dim, head_dim_v)
        .with_latent(is_latent)
        .with_mask(mask(random, spec))
        .with_types(types)
        .with_descales(match (spec, types.is_fp8(), types.kv.is_code()) {
            (Some(spec), ..) => descales(spec, turn),
            (None, true, _) => Descales::all(OF_FP8[turn % OF_FP8.len()]),
            (None, false, true) => of_caches(turn),
            (None, false, false) => Descales::NONE,
        })
        .with_softmax_scale(has_scale.then(|| random.of(if is_latent { &[0.01, 0.05] } else { scales })))
        .with_score(
            ScoreMod::NONE
                .with_softcap(score[0].then(|| random.of(&[1.0, 10.0, 50.0])))
                .with_alibi(score[1].then(|| random.of(&[Alibi::PerHead, Alibi::PerSequenceHead])))
                .with_sinks(score[2]),
        );
    let is_plain = form == Form::Half && !types.kv.is_code();
    let arrangement = random.of(match is_plain {
        true => &[
            Arrangement::Bshd,
            Arrangement::Bshd,
            Arrangement::Bhsd,
            Arrangement::Gap(8),
            Arrangement::Gap(56),
            Arrangement::BhsdGap(24),
        ][..],
        false => &[Arrangement::Bshd, Arrangement::Bhsd, Arrangement::Gap(8)],
    });
    let is_varied = spec.map_or_else(|| random.below(5) < 3, |spec| spec.reads.varied);
    if is_varied {
        let paged = match spec {
            Some(spec) => spec.reads.paged,
            None => !pass.is_backward() && random.below(2) == 0,
        };
        let sequences = sequences(random, pass, paged);
        return Case { arrangement, values, ..case_of("small", "", problem, sequences) };
    }
    let (q, k) = lengths(random, pass);
    let lengths = Lengths::uniform(random.of(&[1, 1, 1, 2, 3]), q, k);
    let (arrangement, values) = match random.below(12) {
        _ if !is_plain => (arrangement, values),
        0 => (Arrangement::SharedBatch, Values::Normal),
        1 => (Arrangement::SharedHeads, Values::Normal),
        2 => (Arrangement::SharedRows, Values::Normal),
        _ => (arrangement, values),
    };
    Case { arrangement, values, ..case::case("small", problem.with_lengths(lengths)) }
}

/// Types of the tensors: of a kernel its own.
fn types(
    random: &mut Random,
    (family, form): (Family, Form),
    pass: Pass,
    spec: Option<&KernelSpec>,
) -> Types {
    let half = Types::same(random.of(&[Dtype::Bf16, Dtype::F16]));
    let has_codes = !pass.is_backward() && family != Family::Sm100 && random.below(5) == 0;
    match (spec, form) {
        (Some(spec), _) => spec.types,
        (None, Form::Fp8) => Types::fp8(Dtype::Bf16),
        (None, Form::Half | Form::Wide) if has_codes => half.with_kv(random.of(&Dtype::CODES)),
        (None, Form::Half | Form::Wide) => half,
    }
}

/// Head dims of wide kernels: of latent keys those of values and of what is behind them.
fn wide_dims(random: &mut Random, is_latent: bool, spec: Option<&KernelSpec>) -> (usize, usize) {
    let (most, most_v) = spec.map_or((576, 512), |spec| (spec.head_dim as usize, spec.head_dim_v as usize));
    let narrower = |random: &mut Random, most: usize| match random.below(3) {
        0 => most.saturating_sub(8 * random.below(8)).max(8),
        _ => most,
    };
    match (is_latent, spec) {
        (true, _) => {
            let most_v = if spec.is_some() { most_v } else { random.of(&[512, 256]) };
            let values = narrower(random, most_v);
            (values + random.of(&[0, 8, 64]).min(most - most_v), values)
        }
        (false, Some(_)) => (narrower(random, most), narrower(random, most_v)),
        (false, None) => {
            let dim = 264 + 8 * random.below(32);
            (dim, if random.below(3) == 0 { 8 * (1 + random.below(64)) } else { dim })
        }
    }
}

/// Head dims: those of models, any multiples of 8, different ones for values; for a given kernel, as wide as
/// its tiles and narrower.
fn dims(random: &mut Random, family: Family, spec: Option<&KernelSpec>) -> (usize, usize) {
    let any = |random: &mut Random, most: u32| 8 * (1 + random.below(most as usize / 8));
    if let Some(spec) = spec {
        let mut of = |extent: u32| match random.below(6) {
            0 => any(random, extent),
            1 if extent > 8 => extent as usize - 8,
            _ => extent as usize,
        };
        return (of(spec.head_dim), of(spec.head_dim_v));
    }
    let most = *head_dims(family).last().expect("a family has head dims");
    let common = [64, 64, 96, 128, 128, 192, 256];
    let head_dim = if random.below(3) > 0 { random.of(&common) } else { any(random, most) };
    let head_dim_v = match random.below(6) {
        0 => random.of(&common),
        1 => any(random, most),
        _ => head_dim,
    };
    (head_dim, head_dim_v)
}

fn mask(random: &mut Random, spec: Option<&KernelSpec>) -> Mask {
    let side = |random: &mut Random| match random.below(6) {
        0 => None,
        1 => Some(0),
        2 => Some(random.below(9) as u32),
        3 => Some((64 * (1 + random.below(4)) - 1 + random.below(3)) as u32),
        4 => Some(random.below(300) as u32),
        _ => Some(u32::MAX - random.below(3) as u32),
    };
    let kind = spec.map_or_else(
        || random.of(&[MaskKind::Full, MaskKind::Causal, MaskKind::Causal, MaskKind::Window]),
        |spec| spec.mask,
    );
    match kind {
        MaskKind::Full => Mask::FULL,
        MaskKind::Causal => Mask::CAUSAL,
        MaskKind::Window => Mask::band(side(random), side(random)),
    }
}

/// Queries and keys of sequences of one length.
fn lengths(random: &mut Random, pass: Pass) -> (usize, usize) {
    let length = |random: &mut Random| match random.below(9) {
        0 => random.below(4),
        1 => 1 + random.below(16),
        2 => 16 * (1 + random.below(20)),
        3 | 4 => 64 * (1 + random.below(5)) - 1 + random.below(3),
        _ => 1 + random.below(500),
    };
    if !pass.is_backward() && random.below(3) == 0 {
        return (1 + random.below(16), 1 + random.below(2000));
    }
    let k = length(random);
    (if random.below(3) == 0 { k } else { length(random) }, k)
}

/// Sequences of different lengths: few or over a thousand, similar or one much longer than the others, some
/// of them empty.
fn sequences(random: &mut Random, pass: Pass, paged: bool) -> Sequences {
    let is_crowd = random.below(30) == 0;
    let batch = if is_crowd { 1001 + random.below(300) } else { random.of(&[1, 2, 3, 5, 9, 17, 40]) };
    let most = if is_crowd { 4 } else { random.of(&[20, 150, 400]) };
    let skew = (!is_crowd && random.below(4) == 0).then(|| random.below(batch));
    let lens = |random: &mut Random| -> Vec<usize> {
        let of = |random: &mut Random, b: usize| match random.below(8) {
            _ if skew == Some(b) => 500 + random.below(500),
            _ if skew.is_some() => random.below(6),
            0 => 0,
            1 => 1,
            2 => 64 * random.below(most / 64 + 1),
            _ => random.below(most + 1),
        };
        (0..batch).map(|b| of(random, b)).collect()
    };
    let slots = |lens: &[usize], random: &mut Random| -> Vec<usize> {
        lens.iter().map(|len| len + random.below(3) * random.below(30)).collect()
    };
    let k_lens = lens(random);
    let q_lens = if random.below(3) == 0 { k_lens.clone() } else { lens(random) };
    let longest = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0);
    let decodes = !pass.is_backward() && random.below(3) == 0;
    let q = match (decodes, random.below(4)) {
        (true, 0) => {
            let tokens: Vec<usize> = (0..batch).map(|_| random.below(17)).collect();
            Ragged::packed(&tokens, random.below(9))
        }
        (true, 1) => Ragged::padded(&vec![random.below(5); batch], 5 + random.below(12)),
        (true, _) => Ragged::uniform(batch, 1 + random.below(16)),
        (false, 0) => Ragged::padded(&q_lens, longest(&q_lens) + random.below(9)),
        (false, 1) => Ragged::packed_in(&q_lens, &slots(&q_lens, random), random.below(40)),
        (false, _) => Ragged::packed(&q_lens, random.below(40)),
    };
    let k = match random.below(4) {
        _ if paged => {
            let page = if random.below(3) == 0 { 1 + random.below(256) } else { random.of(&PAGES) };
            let (run, spare) = (random.of(&[1, 1, 4, 64]), random.below(5));
            Ragged::paged_in_runs(&k_lens, page, run, spare, random)
        }
        0 => Ragged::padded(&k_lens, longest(&k_lens) + random.below(9)),
        1 => Ragged::packed_in(&k_lens, &slots(&k_lens, random), random.below(40)),
        _ => Ragged::packed(&k_lens, random.below(40)),
    };
    let looser = |rows: Ragged, random: &mut Random| match rows.store() {
        Store::Padded { .. } => rows,
        Store::Packed { .. } | Store::Paged { .. } => {
            let max = rows.side().max();
            rows.bounded(max + random.below(3) * random.below(200))
        }
    };
    Sequences { q: looser(q, random), k: looser(k, random) }
}

#[cfg(test)]
mod tests {
    use fa_core::Arch;
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    fn drawn(family: Family, pass: Pass, count: u64) -> Vec<Case> {
        let form = (family, Form::Half);
        let one = |turn| small(&mut Random::new(turn), form, pass, None).expect("within the bounds");
        (0..count).map(one).collect()
    }

    #[test]
    fn problems_have_everything_that_a_caller_may_ask_for() {
        let cases = drawn(Family::Sm90, Pass::Forward, 400);
        let of = |what: &str, is: &dyn Fn(&Case) -> bool| {
            let found = cases.iter().filter(|case| is(case)).count();
            assert!(found >= 2, "{what}: {found}");
        };
        of("pages of an odd size", &|c| c.problem.lengths.page().is_some_and(|page| page % 8 != 0));
        of("over a thousand sequences", &|c| c.problem.lengths.sequences() > 1000);
        of("no query", &|c| (0..c.sequences().count()).any(|b| c.sequences().q.len(b) == 0));
        of("groups of 64", &|c| c.problem.group_size() == 64);
        of("head dims of their own", &|c| c.problem.head_dim != c.problem.head_dim_v);
        of("odd multiples of 8", &|c| c.problem.head_dim % 16 == 8);
        of("a row for all", &|c| c.arrangement == Arrangement::SharedRows);
        of("sinks in pages", &|c| c.problem.score.sinks && c.problem.lengths.page().is_some());
        of("slopes of sequences", &|c| c.problem.score.alibi == Some(Alibi::PerSequenceHead));
        of("a window without a left end", &|c| {
            c.problem.mask.left.is_none() && c.problem.mask.right.is_some_and(|right| right > 0)
        });
        of("a token", &|c| c.problem.lengths.max_q() == 1 && c.problem.lengths.max_k() > 500);
        of("codes", &|c| c.problem.types.kv.is_code());
        of("a descale of each row", &|c| c.problem.descales.v == fa_core::DescaleForm::TokenHead);
        of("large scores", &|c| c.values == Values::Sharp && c.problem.types.q == Dtype::F16);
        assert!(cases.iter().all(|case| flops(case) <= most_flops(case)));
    }

    #[test]
    fn gradients_are_of_keys_in_one_piece() {
        let cases = drawn(Family::Sm80, Pass::BACKWARD, 200);
        assert!(cases.iter().all(|case| case.problem.lengths.page().is_none() && case.pass.is_backward()));
        assert!(cases.iter().filter(|case| !case.problem.lengths.is_uniform()).count() > 50);
    }

    #[test]
    fn problems_in_8_bits_and_of_wide_heads_have_kernels() {
        let options = PlanOptions::default().with_family(Some(Family::Sm90));
        for form in [Form::Fp8, Form::Wide] {
            let (mut planned, mut served) = (0, 0);
            for turn in 0..40 {
                let random = &mut Random::new(turn);
                let of = (Family::Sm90, form);
                let Some(case) = small(random, of, Pass::Forward, None) else { continue };
                assert_eq!(case.problem.types.is_fp8(), form == Form::Fp8, "{}", case.name());
                let Ok(plans) = plan(&case.problem, Arch::Sm90, &options) else { continue };
                let spec = &plans[turn as usize % plans.len()].spec;
                assert_eq!(Form::of(spec), form, "{spec}");
                planned += 1;
                served += usize::from(small(random, of, Pass::Forward, Some(spec)).is_some());
            }
            assert!(planned > 25 && served > planned * 3 / 4, "{form:?}: {served} of {planned}");
        }
    }

    #[test]
    fn problems_of_a_kernel_are_served_by_it() {
        let mut served = 0;
        for (turn, case) in drawn(Family::Sm90, Pass::Forward, 40).into_iter().enumerate() {
            let options = PlanOptions::default().with_family(Some(Family::Sm90));
            let Ok(plans) = plan(&case.problem, Arch::Sm90, &options) else { continue };
            let spec = &plans[turn % plans.len()].spec;
            let random = &mut Random::new(turn as u64);
            let form = (Family::Sm90, Form::of(spec));
            for own in (0..3).filter_map(|_| small(random, form, Pass::Forward, Some(spec))) {
                assert!(spec.serves(&own.problem).is_ok(), "{}", own.name());
                served += 1;
            }
        }
        assert!(served > 60, "{served}");
    }
}
