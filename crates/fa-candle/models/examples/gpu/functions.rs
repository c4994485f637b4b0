//! Every function and gradient on the GPU against the same in f32 on the CPU.

use candle_core::{DType, Device, Result, Tensor, Var};
use fa_candle::*;

use fa_candle_models::Random;

const SCALE: f32 = 0.125;

/// What a case computes from Q, K, V and the tensors beside them, which are on the device of Q.
type Case = (&'static str, fn(&Given) -> Result<Vec<Tensor>>);

struct Given {
    q: Var,
    k: Var,
    v: Var,
    slopes: Tensor,
    sinks: Var,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    weights: Tensor,
    /// u8 `(2, 1, 192, 192)`, with a row that sees no key.
    mask: Tensor,
    /// `(1, 8, 192, 192)`, of the type of Q.
    bias: Var,
}

/// Sequences of the packed cases, and rows of each.
const STARTS: [u32; 5] = [0, 100, 100, 117, 384];
const LONGEST: usize = 267;
const PAGE: usize = 32;

impl Given {
    fn new(heads_kv: usize, dim: usize, dtype: DType) -> Result<Given> {
        let mut random = Random::new(dim as u64 + 1);
        let mut of = |shape: &[usize]| -> Result<Tensor> {
            let made = random.weights(vec![("x".to_owned(), shape.to_vec())])?.remove("x");
            // Rows of unit variance, rounded as the GPU gets them.
            let x = (made.expect("made above") * (*shape.last().unwrap_or(&1) as f64 / 3.0).sqrt())?;
            x.to_dtype(dtype)?.to_dtype(DType::F32)
        };
        let var = |x: Tensor| Var::from_tensor(&x);
        let cpu = &Device::Cpu;
        let pages: Vec<u32> = (0..4 * 9).map(|i| (i * 7 + 3) % 40).collect();
        let sees = |at: usize| u8::from(at / 192 % 192 != 5 && !(at * at / 7).is_multiple_of(5));
        let seen: Vec<u8> = (0..2 * 192 * 192).map(sees).collect();
        Ok(Given {
            q: var(of(&[2, 192, 8, dim])?)?,
            k: var(of(&[2, 192, heads_kv, dim])?)?,
            v: var(of(&[2, 192, heads_kv, dim])?)?,
            slopes: Tensor::new(&[0.5f32, 0.35, 0.25, 0.18, 0.125, 0.09, 0.0625, 0.0], cpu)?,
            sinks: var((of(&[1, 8])?.squeeze(0)? * 2.0)?)?,
            starts: Tensor::new(&STARTS, cpu)?,
            lengths: Tensor::new(&[150u32, 33], cpu)?,
            table: Tensor::from_vec(pages, (4, 9), cpu)?,
            weights: of(&[2, 192, 8, dim])?,
            mask: Tensor::from_vec(seen, (2, 1, 192, 192), cpu)?,
            bias: var(of(&[1, 8, 192, 192])?)?,
        })
    }

    fn to(&self, device: &Device, dtype: DType) -> Result<Given> {
        let there = |x: &Tensor| x.detach().to_dtype(dtype)?.to_device(device);
        let var = |x: &Tensor| Var::from_tensor(&there(x)?);
        Ok(Given {
            q: var(&self.q)?,
            k: var(&self.k)?,
            v: var(&self.v)?,
            slopes: self.slopes.to_device(device)?,
            sinks: Var::from_tensor(&self.sinks.detach().to_device(device)?)?,
            starts: self.starts.to_device(device)?,
            lengths: self.lengths.to_device(device)?,
            table: self.table.to_device(device)?,
            weights: there(&self.weights)?,
            mask: self.mask.to_device(device)?,
            bias: var(&self.bias)?,
        })
    }

    fn padded(&self) -> [&Tensor; 3] {
        [&self.q, &self.k, &self.v]
    }

    /// `(total, heads, dim)`.
    fn packed(&self) -> Result<[Tensor; 3]> {
        let [q, k, v] = self.padded().map(|x| x.flatten(0, 1));
        Ok([q?, k?, v?])
    }

    /// O and the gradients of a weighed sum of it.
    fn with_gradients(&self, out: Tensor, sinks: bool) -> Result<Vec<Tensor>> {
        let weights = self.weights.reshape(out.shape())?;
        let loss = (&out * weights)?.to_dtype(DType::F32)?.sum_all()?;
        self.gradients(&loss, vec![out], sinks)
    }

    /// The gradients of `loss`, behind what there is already.
    fn gradients(&self, loss: &Tensor, mut all: Vec<Tensor>, sinks: bool) -> Result<Vec<Tensor>> {
        let store = loss.backward()?;
        for input in [&self.q, &self.k, &self.v].into_iter().chain(sinks.then_some(&self.sinks)) {
            all.push(store.get(input).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))?);
        }
        Ok(all)
    }

    fn options(&self, options: Options<'_>) -> Result<Vec<Tensor>> {
        let out = attention(&self.q, &self.k, &self.v, &options)?;
        self.with_gradients(out, options.sinks.is_some())
    }
}

const CASES: [Case; 22] = [
    ("flash_attn", |x| {
        let [q, k, v] = x.padded();
        x.with_gradients(flash_attn(q, k, v, SCALE, false)?, false)
    }),
    ("flash_attn, causal", |x| {
        let [q, k, v] = x.padded();
        x.with_gradients(flash_attn(q, k, v, SCALE, true)?, false)
    }),
    ("windowed", |x| {
        let [q, k, v] = x.padded();
        x.with_gradients(flash_attn_windowed(q, k, v, SCALE, Some(40), Some(10))?, false)
    }),
    ("alibi", |x| {
        let [q, k, v] = x.padded();
        x.with_gradients(flash_attn_alibi(q, k, v, &x.slopes, SCALE, true)?, false)
    }),
    ("alibi_windowed", |x| {
        let [q, k, v] = x.padded();
        let out = flash_attn_alibi_windowed(q, k, v, &x.slopes, SCALE, Some(40), Some(10))?;
        x.with_gradients(out, false)
    }),
    ("alibi_windowed_softcap", |x| {
        let [q, k, v] = x.padded();
        let slopes = Some(&x.slopes);
        let out = flash_attn_alibi_windowed_softcap(q, k, v, slopes, SCALE, Some(40), Some(0), 3.0)?;
        x.with_gradients(out, false)
    }),
    ("varlen", |x| {
        let [q, k, v] = &x.packed()?;
        let (s, n) = (&x.starts, LONGEST);
        x.with_gradients(flash_attn_varlen(q, k, v, s, s, n, n, SCALE, true)?, false)
    }),
    ("varlen_windowed", |x| {
        let [q, k, v] = &x.packed()?;
        let (s, n) = (&x.starts, LONGEST);
        let out = flash_attn_varlen_windowed(q, k, v, s, s, n, n, SCALE, Some(64), Some(0))?;
        x.with_gradients(out, false)
    }),
    ("varlen_paged_windowed", |x| {
        let [q, k, v] = x.packed()?.map(|x| x.detach());
        // 40 pages, of which the first 12 are filled.
        let pool = |x: &Tensor| -> Result<Tensor> {
            let (_, heads, dim) = x.dims3()?;
            let pages = x.reshape((12, PAGE, heads, dim))?;
            Tensor::cat(&[&pages, &pages, &pages, &pages.narrow(0, 0, 4)?], 0)
        };
        let (k, v, s, n) = (pool(&k)?, pool(&v)?, &x.starts, LONGEST);
        let out = flash_attn_varlen_paged_windowed(
            &q,
            &k,
            &v,
            s,
            s,
            &x.table,
            None,
            n,
            n,
            SCALE,
            Some(1024),
            Some(0),
            PAGE,
            Some(20.0),
        )?;
        Ok(vec![out])
    }),
    ("varlen_alibi", |x| {
        let [q, k, v] = &x.packed()?;
        let (s, n) = (&x.starts, LONGEST);
        let out = flash_attn_varlen_alibi(q, k, v, &x.slopes, s, s, n, n, SCALE, true)?;
        x.with_gradients(out, false)
    }),
    ("varlen_alibi_windowed", |x| {
        let [q, k, v] = &x.packed()?;
        let (s, n, slopes) = (&x.starts, LONGEST, &x.slopes);
        let out = flash_attn_varlen_alibi_windowed(q, k, v, slopes, s, s, n, n, SCALE, Some(64), Some(8))?;
        x.with_gradients(out, false)
    }),
    ("varlen_alibi_windowed_softcap", |x| {
        let [q, k, v] = &x.packed()?;
        let (s, n, slopes) = (&x.starts, LONGEST, Some(&x.slopes));
        let (left, right) = (Some(64), Some(0));
        let out =
            flash_attn_varlen_alibi_windowed_softcap(q, k, v, slopes, s, s, n, n, SCALE, left, right, 3.0)?;
        x.with_gradients(out, false)
    }),
    ("sinks", |x| x.options(Options::causal(SCALE).with_sinks(Some(&x.sinks)))),
    ("deterministic", |x| x.options(Options::causal(SCALE).with_deterministic(true))),
    ("lse", |x| {
        let [q, k, v] = x.padded();
        let (out, lse) = attention_with_lse(q, k, v, &Options::causal(SCALE))?;
        Ok(vec![out.detach(), lse])
    }),
    ("lse's gradients", |x| {
        let [q, k, v] = x.padded();
        let options = Options::causal(SCALE).with_sinks(Some(&x.sinks));
        let (out, lse) = attention_with_lse(q, k, v, &options)?;
        let loss = ((&out * &x.weights)?.to_dtype(DType::F32)?.sum_all()? + lse.sqr()?.sum_all()?)?;
        x.gradients(&loss, vec![out, lse], true)
    }),
    ("lengths in use, one query", |x| {
        let [q, k, v] = x.padded();
        let q = q.narrow(1, 191, 1)?;
        let rows = Rows::Padded { used_q: None, used_k: Some(&x.lengths) };
        let (out, lse) = attention_with_lse(&q, k, v, &Options::causal(SCALE).with_rows(rows))?;
        Ok(vec![out.detach(), lse])
    }),
    ("mask", |x| x.options(Options::full(SCALE).with_mask(Some(&x.mask)))),
    ("mask that is added", |x| {
        let mask = (x.mask.to_dtype(DType::F32)?.log()?.narrow(0, 0, 1)?).broadcast_as((2, 8, 192, 192))?;
        x.options(Options::causal(SCALE).with_mask(Some(&mask)).with_sinks(Some(&x.sinks)))
    }),
    ("bias", |x| {
        x.options(Options::causal(SCALE).with_mask(Some(&x.mask)).with_bias(Some(&x.bias.detach())))
    }),
    ("bias' gradient", |x| {
        let out = attention(&x.q, &x.k, &x.v, &Options::full(SCALE).with_bias(Some(&x.bias)))?;
        let loss = (&out * &x.weights)?.to_dtype(DType::F32)?.sum_all()?;
        let dbias = loss.backward()?.get(&x.bias).cloned();
        Ok(vec![out, dbias.ok_or_else(|| candle_core::Error::msg("no gradient"))?])
    }),
    ("program", |x| {
        let text = "array slope: f32[_]; scalar w: i32; let distance = q + off - k;
                    mask = 0 <= distance < w; score = s - slope[h] * distance;";
        let program = Program::new(text)?.with_array("slope", &x.slopes).with_scalar("w", 70);
        x.options(Options::full(SCALE).with_program(Some(&program)))
    }),
];

/// Runs all cases; how many failed.
pub(crate) fn check(device: &Device) -> Result<usize> {
    let mut failed = 0;
    for (heads_kv, dim, dtype) in [(8, 64, DType::F16), (2, 128, DType::BF16), (1, 256, DType::BF16)] {
        let given = Given::new(heads_kv, dim, dtype)?;
        let there = given.to(device, dtype)?;
        for (name, case) in CASES {
            let need = case(&given)?;
            let bound = if dtype == DType::F16 { 2e-3 } else { 1.6e-2 };
            let result = case(&there).and_then(|got| worst(&got, &need));
            let what = format!("{name}, heads 8:{heads_kv}, head dim {dim}, {dtype:?}");
            match result {
                Ok(apart) if apart <= bound => println!("ok      {what}: {apart:.1e}"),
                Ok(apart) => {
                    failed += 1;
                    println!("FAILED  {what}: {apart:.1e}, at most {bound:.1e}");
                }
                Err(error) => {
                    failed += 1;
                    println!("FAILED  {what}: {error}");
                }
            }
        }
    }
    Ok(failed + refusals(device)?)
}

/// The largest difference of the tensors, by the largest value of each.
fn worst(got: &[Tensor], need: &[Tensor]) -> Result<f32> {
    let mut worst = 0f32;
    for (got, need) in got.iter().zip(need) {
        let flat =
            |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let (got, need) = (flat(got)?, flat(need)?);
        let largest = need.iter().fold(1f32, |most, value| most.max(value.abs()));
        for (got, need) in got.iter().zip(&need).filter(|(got, need)| got != need) {
            let apart = (got - need).abs() / largest;
            if apart > worst || apart.is_nan() {
                worst = if apart.is_nan() { f32::INFINITY } else { apart };
            }
        }
    }
    Ok(worst)
}

/// What the GPU refuses says what would work; how many do not.
fn refusals(device: &Device) -> Result<usize> {
    let zeros = |dim, dtype| Tensor::zeros((1, 16, 2, dim), dtype, device);
    let (wide, odd, whole) = (zeros(264, DType::F16)?, zeros(68, DType::F16)?, zeros(64, DType::F32)?);
    let shifted = zeros(72, DType::F16)?.narrow(3, 4, 64)?;
    let on_cpu = Tensor::zeros((1, 16, 2, 64), DType::F16, &Device::Cpu)?;
    let good = zeros(64, DType::F16)?;
    let mut failed = 0;
    for (what, result, part) in [
        ("head dim 264", flash_attn(&wide, &wide, &wide, 1.0, false), "256"),
        ("head dim 68", flash_attn(&odd, &odd, &odd, 1.0, false), "multiple"),
        ("f32", flash_attn(&whole, &whole, &whole, 1.0, false), "bf16"),
        ("rows off 16 bytes", flash_attn(&shifted, &shifted, &shifted, 1.0, false), "16 bytes"),
        ("keys on the CPU", flash_attn(&good, &on_cpu, &on_cpu, 1.0, false), "to_device"),
    ] {
        // A backtrace may follow.
        match result.map_err(|error| error.to_string().lines().next().unwrap_or_default().to_owned()) {
            Err(error) if error.contains(part) => println!("ok      {what}: '{error}'"),
            Err(error) => {
                failed += 1;
                println!("FAILED  {what} is refused without '{part}': '{error}'");
            }
            Ok(_) => {
                failed += 1;
                println!("FAILED  {what} is not refused");
            }
        }
    }
    Ok(failed)
}
