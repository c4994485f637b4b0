//! Random shapes, options and layouts, beside the definition in f64: outputs, LSE and gradients.

use candle_core::{DType, Device, Result, Tensor, Var};
use fa_candle::{Options, Rows, attention_with_lse};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn value(&mut self) -> f64 {
        (0..4).map(|_| (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0).sum::<f64>() * 0.87
    }

    /// Values of a shape, as a tensor of this type would hold them.
    fn tensor(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.value() as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
    }

    /// The same values, lying otherwise.
    fn laid(&mut self, x: &Tensor) -> Result<Tensor> {
        let rank = x.rank();
        match self.below(5) {
            0 => {
                // Inside of a larger tensor.
                let padded = (0..rank).try_fold(x.clone(), |x, axis| x.pad_with_zeros(axis, axis % 2, 2))?;
                (0..rank).try_fold(padded, |padded, axis| padded.narrow(axis, axis % 2, x.dim(axis)?))
            }
            1 => x.transpose(0, 1)?.contiguous()?.transpose(0, 1),
            2 => x.transpose(rank - 1, 0)?.contiguous()?.transpose(rank - 1, 0),
            3 => x.transpose(rank - 1, rank - 2)?.contiguous()?.transpose(rank - 1, rank - 2),
            _ => Ok(x.clone()),
        }
    }
}

/// What changes scores.
#[derive(Clone, Debug)]
struct Scores {
    scale: f64,
    left: Option<usize>,
    right: Option<usize>,
    softcap: Option<f64>,
    slopes: Option<Vec<f64>>,
    sinks: Option<Vec<f64>>,
}

/// Rows of one sequence, `[rows][head][dim]`.
type Rows3 = Vec<Vec<Vec<f64>>>;

/// One sequence by the definition: out, LSE `[head][row]`, and gradients of `sum(out dout) + sum(lse dlse)`
/// (the latter where LSE is finite).
struct Defined {
    out: Rows3,
    lse: Vec<Vec<f64>>,
    gradients: [Rows3; 3],
    dsinks: Vec<f64>,
}

fn zeros(rows: usize, heads: usize, dim: usize) -> Rows3 {
    vec![vec![vec![0.0; dim]; heads]; rows]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn defined(
    [q, k, v, dout]: [&Rows3; 4],
    dlse: &[Vec<f64>],
    [heads, heads_kv]: [usize; 2],
    [dim, dim_v]: [usize; 2],
    scores: &Scores,
) -> Defined {
    let (m, n) = (q.len(), k.len());
    let mut made = Defined {
        out: zeros(m, heads, dim_v),
        lse: vec![vec![f64::NEG_INFINITY; m]; heads],
        gradients: [zeros(m, heads, dim), zeros(n, heads_kv, dim), zeros(n, heads_kv, dim_v)],
        dsinks: vec![0.0; heads],
    };
    for (i, h) in (0..m).flat_map(|i| (0..heads).map(move |h| (i, h))) {
        let of = h / (heads / heads_kv);
        let sees = |j: usize| {
            let distance = j as i64 - (i as i64 + n as i64 - m as i64);
            scores.left.is_none_or(|left| distance >= -(left as i64))
                && scores.right.is_none_or(|right| distance <= right as i64)
        };
        let seen: Vec<usize> = (0..n).filter(|j| sees(*j)).collect();
        let score = |j: usize| {
            let product = dot(&q[i][h], &k[j][of]) * scores.scale;
            let (capped, slope) = match scores.softcap {
                Some(cap) => ((product / cap).tanh() * cap, 1.0 - (product / cap).tanh().powi(2)),
                None => (product, 1.0),
            };
            let distance = (j as f64 - (i as f64 + n as f64 - m as f64)).abs();
            (capped - scores.slopes.as_ref().map_or(0.0, |slopes| slopes[h] * distance), slope)
        };
        let all: Vec<(f64, f64)> = seen.iter().map(|j| score(*j)).collect();
        let sink = scores.sinks.as_ref().map(|sinks| sinks[h]);
        let top = all.iter().map(|s| s.0).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        if top == f64::NEG_INFINITY {
            continue;
        }
        let sum: f64 = all.iter().map(|s| s.0).chain(sink).map(|s| (s - top).exp()).sum();
        let lse = top + sum.ln();
        made.lse[h][i] = lse;
        let p: Vec<f64> = all.iter().map(|s| (s.0 - lse).exp()).collect();
        for (j, p) in seen.iter().zip(&p) {
            (0..dim_v).for_each(|d| made.out[i][h][d] += p * v[*j][of][d]);
        }
        let delta = dot(&made.out[i][h], &dout[i][h]) - dlse[h][i];
        if let Some(sink) = sink {
            made.dsinks[h] -= (sink - lse).exp() * delta;
        }
        let [dq, dk, dv] = &mut made.gradients;
        for ((j, p), (_, slope)) in seen.iter().zip(&p).zip(&all) {
            let ds = p * (dot(&v[*j][of], &dout[i][h]) - delta) * slope * scores.scale;
            (0..dim).for_each(|d| dq[i][h][d] += ds * k[*j][of][d]);
            (0..dim).for_each(|d| dk[*j][of][d] += ds * q[i][h][d]);
            (0..dim_v).for_each(|d| dv[*j][of][d] += p * dout[i][h][d]);
        }
    }
    made
}

/// `[rows][heads][dim]` of rows of a packed tensor.
fn rows_of(x: &Tensor, begin: usize, count: usize) -> Result<Rows3> {
    x.narrow(0, begin, count)?.to_dtype(DType::F64)?.to_vec3::<f64>()
}

fn close(what: &str, got: &Rows3, want: &Rows3, bound: f64) {
    let flat = |x: &Rows3| x.iter().flatten().flatten().copied().collect::<Vec<f64>>();
    let (got, want) = (flat(got), flat(want));
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() <= bound * largest, "{what}: {got} instead of {want}");
    }
}

/// A random call, padded or packed.
struct Drawn {
    what: String,
    /// How far results may be from the definition, of the largest value.
    bound: f64,
    heads: [usize; 2],
    dims: [usize; 2],
    is_packed: bool,
    /// Rows of each sequence, of queries and of keys.
    lens: [Vec<usize>; 2],
    /// Of packed sequences, the first row of each, then the end of the last.
    starts: [Vec<usize>; 2],
    max: [usize; 2],
    used_k: Option<Vec<usize>>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    slopes: Option<Tensor>,
    sinks: Option<Tensor>,
    window: [Option<usize>; 2],
    softcap: Option<f32>,
    scale: f32,
}

impl Drawn {
    fn new(random: &mut Random, seed: u64) -> Result<Drawn> {
        let of_f32 = (DType::F32, 4e-6);
        let (dtype, bound) = random.one_of(&[of_f32, of_f32, (DType::F16, 2e-3), (DType::BF16, 1.6e-2)]);
        let heads_kv = random.one_of(&[1, 2, 3]);
        let heads = heads_kv * random.one_of(&[1, 1, 2, 3]);
        let dim = random.one_of(&[1, 3, 8, 16, 24, 40]);
        let dim_v = if random.chance(60) { dim } else { random.one_of(&[1, 8, 20]) };
        let lengths = [0, 1, 2, 3, 7, 15, 16, 17, 33];
        let batch = random.one_of(&[1, 2, 3]);
        let is_packed = random.chance(50);
        let mut side = |even: usize| -> Vec<usize> {
            (0..batch).map(|_| if is_packed { random.one_of(&lengths) } else { even }).collect()
        };
        let (len_q, len_k) = (side(random_length(seed)), side(random_length(seed ^ 1)));
        // Rows before the first sequence and behind the last.
        let (before, after) = if is_packed { (random.below(3), random.below(3)) } else { (0, 0) };
        let starts = |lens: &[usize]| -> Vec<usize> {
            (0..=batch).map(|b| before + lens[..b].iter().sum::<usize>()).collect()
        };
        let used_k = (!is_packed && random.chance(40))
            .then(|| len_k.iter().map(|len| random.below(len + 1)).collect::<Vec<_>>());
        let shape = |lens: &[usize], heads: usize, dim: usize| {
            let rows = before + lens.iter().sum::<usize>() + after;
            if is_packed { vec![rows, heads, dim] } else { vec![batch, lens[0], heads, dim] }
        };
        let q = random.tensor(&shape(&len_q, heads, dim), dtype)?;
        let k = random.tensor(&shape(&len_k, heads_kv, dim), dtype)?;
        let v = random.tensor(&shape(&len_k, heads_kv, dim_v), dtype)?;
        let dout = random.tensor(&shape(&len_q, heads, dim_v), dtype)?;
        let slopes = random.chance(30).then(|| random.tensor(&[heads], DType::F32)).transpose()?;
        let slopes = slopes.map(|slopes| slopes.abs()).transpose()?;
        let sinks = random.chance(30).then(|| random.tensor(&[heads], DType::F32)).transpose()?;
        let left = random.one_of(&[None, None, Some(0), Some(2), Some(9)]);
        let window = [left, random.one_of(&[None, Some(0), Some(3)])];
        let softcap = random.one_of(&[None, None, Some(0.0f32), Some(2.0)]);
        let scale = random.one_of(&[0.1f32, 0.3, 1.0]);
        let slack = random.one_of(&[0, 0, 5]);
        let longest = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0) + slack;
        let what = format!(
            "seed {seed}: {dtype:?} packed {is_packed} q {len_q:?} k {len_k:?} used {used_k:?} heads \
             {heads}:{heads_kv} dims {dim} {dim_v} window {window:?} softcap {softcap:?} scale {scale} \
             slopes {} sinks {}",
            slopes.is_some(),
            sinks.is_some()
        );
        Ok(Drawn {
            what,
            bound,
            heads: [heads, heads_kv],
            dims: [dim, dim_v],
            is_packed,
            starts: [starts(&len_q), starts(&len_k)],
            max: [longest(&len_q), longest(&len_k)],
            lens: [len_q, len_k],
            used_k,
            q,
            k,
            v,
            dout,
            slopes,
            sinks,
            window,
            softcap,
            scale,
        })
    }

    /// As candle-flash-attn: a window as wide as the sequence, or the bound on it, hides nothing.
    fn scores(&self) -> Result<Scores> {
        let [bound_q, bound_k] = if self.is_packed { self.max } else { [self.lens[0][0], self.lens[1][0]] };
        let values = |x: &Option<Tensor>| -> Result<Option<Vec<f64>>> {
            x.as_ref().map(|x| x.to_dtype(DType::F64)?.to_vec1()).transpose()
        };
        Ok(Scores {
            scale: f64::from(self.scale),
            left: self.window[0].filter(|left| *left < bound_k),
            right: self.window[1].filter(|right| *right <= bound_k && *right < bound_q.max(1)),
            softcap: self.softcap.filter(|cap| *cap != 0.0).map(f64::from),
            slopes: values(&self.slopes)?,
            sinks: values(&self.sinks)?,
        })
    }

    /// The rows of all sequences as those of one.
    fn flat(&self, x: &Tensor) -> Result<Tensor> {
        if self.is_packed { Ok(x.clone()) } else { x.flatten(0, 1) }
    }

    /// The first row of sequence `b` among those of [`Drawn::flat`], of queries (0) or of keys (1).
    fn begin(&self, side: usize, b: usize) -> usize {
        if self.is_packed { self.starts[side][b] } else { b * self.lens[side][0] }
    }
}

/// What the crate computed of a call.
struct Computed {
    out: Tensor,
    lse: Tensor,
    /// The gradient of LSE, where the loss has one.
    dlse: Option<Tensor>,
    /// dQ, dK and dV.
    gradients: [Tensor; 3],
    dsinks: Option<Tensor>,
}

fn computed(drawn: &Drawn, random: &mut Random) -> Result<Computed> {
    let (var_q, var_k) = (Var::from_tensor(&drawn.q)?, Var::from_tensor(&drawn.k)?);
    let var_v = Var::from_tensor(&drawn.v)?;
    let var_sinks = drawn.sinks.as_ref().map(Var::from_tensor).transpose()?;
    let [q, k, v] = [random.laid(&var_q)?, random.laid(&var_k)?, random.laid(&var_v)?];
    let words = |values: &[usize]| {
        let values: Vec<u32> = values.iter().map(|value| *value as u32).collect();
        let count = values.len();
        Tensor::from_vec(values, count, &Device::Cpu)
    };
    let (seqlens_q, seqlens_k) = (words(&drawn.starts[0])?, words(&drawn.starts[1])?);
    let used = drawn.used_k.as_deref().map(words).transpose()?;
    let rows = if drawn.is_packed {
        let [max_seqlen_q, max_seqlen_k] = drawn.max;
        Rows::Packed { seqlens_q: &seqlens_q, seqlens_k: &seqlens_k, max_seqlen_q, max_seqlen_k }
    } else {
        Rows::Padded { used_q: None, used_k: used.as_ref() }
    };
    let options = Options::full(drawn.scale)
        .with_window_size_left(drawn.window[0])
        .with_window_size_right(drawn.window[1])
        .with_softcap(drawn.softcap)
        .with_alibi_slopes(drawn.slopes.as_ref())
        .with_sinks(var_sinks.as_deref())
        .with_rows(rows);
    let (out, lse) = attention_with_lse(&q, &k, &v, &options)?;
    let mut loss = (&out * &random.laid(&drawn.dout)?)?.to_dtype(DType::F32)?.sum_all()?;
    let dlse = random.chance(40).then(|| random.tensor(lse.dims(), DType::F32)).transpose()?;
    if let Some(dlse) = &dlse {
        // LSE of rows that see nothing is -inf, which has no gradient.
        let finite = lse.ge(f64::from(f32::MIN))?;
        loss = (loss + finite.where_cond(&(&lse * dlse)?, &lse.zeros_like()?)?.sum_all()?)?;
    }
    let store = loss.backward()?;
    let gradient = |var: &Var| store.get(var).expect("a gradient").clone();
    let gradients = [gradient(&var_q), gradient(&var_k), gradient(&var_v)];
    Ok(Computed { out, lse, dlse, gradients, dsinks: var_sinks.as_ref().map(gradient) })
}

/// One random call beside the definition.
fn check(seed: u64) -> Result<()> {
    let random = &mut Random(seed);
    let drawn = Drawn::new(random, seed)?;
    let got = computed(&drawn, random)?;
    let Drawn { what, bound, heads, dims, lens, .. } = &drawn;
    let scores = drawn.scores()?;
    let (out, dout) = (drawn.flat(&got.out)?, drawn.flat(&drawn.dout)?);
    let (q, k, v) = (drawn.flat(&drawn.q)?, drawn.flat(&drawn.k)?, drawn.flat(&drawn.v)?);
    let mut dsinks = vec![0.0; heads[0]];
    for (b, &m) in lens[0].iter().enumerate() {
        let n = drawn.used_k.as_ref().map_or(lens[1][b], |used| used[b]);
        let (begin_q, begin_k) = (drawn.begin(0, b), drawn.begin(1, b));
        let lse_rows = |lse: &Tensor| -> Result<Vec<Vec<f64>>> {
            let own = if drawn.is_packed { lse.narrow(1, begin_q, m)? } else { lse.get(b)? };
            own.to_dtype(DType::F64)?.to_vec2::<f64>()
        };
        let dlse = got.dlse.as_ref().map_or_else(|| Ok(vec![vec![0.0; m]; heads[0]]), lse_rows)?;
        let inputs = [rows_of(&q, begin_q, m)?, rows_of(&k, begin_k, n)?, rows_of(&v, begin_k, n)?];
        let of_out = rows_of(&dout, begin_q, m)?;
        let [own_q, own_k, own_v] = &inputs;
        let want = defined([own_q, own_k, own_v, &of_out], &dlse, *heads, *dims, &scores);
        close(&format!("out, {what}"), &rows_of(&out, begin_q, m)?, &want.out, *bound);
        for (got, want) in lse_rows(&got.lse)?.iter().flatten().zip(want.lse.iter().flatten()) {
            let near = got == want || (got - want).abs() <= 2e-5 * want.abs().max(1.0);
            assert!(near, "lse {got}, {want}, {what}");
        }
        let names = [("dq", begin_q, m), ("dk", begin_k, n), ("dv", begin_k, n)];
        for ((name, begin, count), (got, want)) in
            names.into_iter().zip(got.gradients.iter().zip(&want.gradients))
        {
            let own = rows_of(&drawn.flat(got)?, begin, count)?;
            close(&format!("{name}, {what}"), &own, want, 6.0 * bound);
        }
        dsinks.iter_mut().zip(&want.dsinks).for_each(|(sum, one)| *sum += one);
    }
    if let Some(got) = got.dsinks {
        let got = got.to_dtype(DType::F64)?.to_vec1::<f64>()?;
        close(&format!("dsinks, {what}"), &vec![vec![got]], &vec![vec![dsinks]], 6.0 * bound);
    }
    Ok(())
}

/// The rows of padded sequences of a case.
fn random_length(seed: u64) -> usize {
    Random(seed ^ 0x5eed).one_of(&[0, 1, 1, 2, 5, 16, 17, 31, 33])
}

#[test]
fn calls_follow_the_definition() -> Result<()> {
    let count = std::env::var("FA_CANDLE_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(150);
    (0..count).try_for_each(check)
}
