//! Attention by candle's operations, with the whole matrix of scores in memory: what the functions are
//! compared with, gradients included.

use candle_core::{D, DType, Device, Result, Tensor, Var};

/// What changes scores, beside the scale.
#[derive(Clone, Copy, Default)]
pub(crate) struct Scores<'a> {
    pub left: Option<usize>,
    pub right: Option<usize>,
    pub softcap: Option<f32>,
    pub slopes: Option<&'a Tensor>,
    pub sinks: Option<&'a Tensor>,
    /// Finite, added to scores.
    pub bias: Option<&'a Tensor>,
    /// f32, 0 where a key is hidden and 1 elsewhere.
    pub visible: Option<&'a Tensor>,
}

impl Scores<'_> {
    pub(crate) const CAUSAL: Scores<'static> = Scores {
        left: None,
        right: Some(0),
        softcap: None,
        slopes: None,
        sinks: None,
        bias: None,
        visible: None,
    };
}

/// O `(batch, seqlen_q, heads, dim)` and LSE `(batch, heads, seqlen_q)` of f32 tensors.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    scores: Scores<'_>,
) -> Result<(Tensor, Tensor)> {
    let (_, seqlen_q, heads, _) = q.dims4()?;
    let (_, seqlen_k, heads_kv, _) = k.dims4()?;
    let group = heads / heads_kv;
    let repeated = |x: &Tensor| -> Result<Tensor> {
        let (b, s, h, d) = x.dims4()?;
        x.unsqueeze(3)?
            .broadcast_as((b, s, h, group, d))?
            .reshape((b, s, h * group, d))?
            .transpose(1, 2)?
            .contiguous()
    };
    let q = q.transpose(1, 2)?.contiguous()?;
    let (k, v) = (repeated(k)?, repeated(v)?);
    let mut s = (q.matmul(&k.t()?.contiguous()?)? * f64::from(scale))?;
    if let Some(cap) = scores.softcap {
        s = ((s / f64::from(cap))?.tanh()? * f64::from(cap))?;
    }
    let at = |i: usize, j: usize| j as i64 - (i as i64 + seqlen_k as i64 - seqlen_q as i64);
    let each = |f: &dyn Fn(i64) -> f32| -> Result<Tensor> {
        let values = (0..seqlen_q * seqlen_k).map(|n| f(at(n / seqlen_k, n % seqlen_k))).collect::<Vec<_>>();
        Tensor::from_vec(values, (1, 1, seqlen_q, seqlen_k), &Device::Cpu)
    };
    if let Some(slopes) = scores.slopes {
        let slopes = if slopes.rank() == 2 { slopes.clone() } else { slopes.unsqueeze(0)? };
        let (b, h) = slopes.dims2()?;
        let distance = each(&|distance| distance.abs() as f32)?;
        s = s.broadcast_sub(&slopes.reshape((b, h, 1, 1))?.broadcast_mul(&distance)?)?;
    }
    let sees = |distance: i64| {
        scores.left.is_none_or(|left| distance >= -(left as i64))
            && scores.right.is_none_or(|right| distance <= right as i64)
    };
    if let Some(bias) = scores.bias {
        s = s.broadcast_add(bias)?;
    }
    let mut visible = each(&|distance| f32::from(u8::from(sees(distance))))?;
    if let Some(own) = scores.visible {
        visible = visible.broadcast_mul(own)?;
    }
    let hidden = ((&visible - 1.0)? * 1e30)?;
    let s = s.broadcast_mul(&visible)?.broadcast_add(&hidden)?;
    let sinks = match scores.sinks {
        Some(sinks) => Some(sinks.reshape((1, heads, 1, 1))?),
        None => None,
    };
    let mut max = s.max_keepdim(D::Minus1)?.detach();
    if let Some(sinks) = &sinks {
        max = max.broadcast_maximum(&sinks.detach())?;
    }
    let p = s.broadcast_sub(&max)?.exp()?.broadcast_mul(&visible)?;
    let mut sum = p.sum_keepdim(D::Minus1)?;
    if let Some(sinks) = &sinks {
        sum = sum.add(&sinks.broadcast_sub(&max)?.exp()?)?;
    }
    let lse = (&max + sum.log()?)?.squeeze(D::Minus1)?;
    // Rows that see nothing are 0 / 1.
    let nothing = sum.eq(0.0)?.to_dtype(DType::F32)?;
    let out = p.broadcast_div(&(sum + nothing)?)?.matmul(&v)?.transpose(1, 2)?.contiguous()?;
    Ok((out, lse))
}

/// Values between -1 and 1 that depend on `seed`.
pub(crate) fn values(shape: impl Into<candle_core::Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let data = std::iter::repeat_with(next).take(shape.elem_count()).collect::<Vec<_>>();
    Tensor::from_vec(data, shape, &Device::Cpu).unwrap()
}

/// Q, K and V of these shapes, with gradients.
pub(crate) fn vars(shapes: [(usize, usize, usize, usize); 3]) -> [Var; 3] {
    let mut seed = 10;
    shapes.map(|shape| {
        seed += 1;
        Var::from_tensor(&values(shape, seed)).unwrap()
    })
}

/// The largest difference, which is NaN where either has a NaN.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let flat = |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let pairs = flat(a).into_iter().zip(flat(b));
    // Infinities of the same sign do not differ.
    pairs
        .map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() })
        .fold(0.0, |most: f32, d| if d > most || d.is_nan() { d } else { most })
}

/// The tensors differ by no more than `bound`.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &Tensor, need: &Tensor, bound: f32) {
    let difference = difference(got, need);
    assert!(difference <= bound, "{what}: differs by {difference}, at most {bound} is expected");
}

/// The gradients of Q, K, V and, where given, of the sinks differ by no more than `bound`.
#[track_caller]
pub(crate) fn assert_gradients(what: &str, got: &[Tensor], need: &[Tensor], bound: f32) {
    for (name, (got, need)) in ["dq", "dk", "dv", "dsinks"].iter().zip(got.iter().zip(need)) {
        assert_close(&format!("{what}: {name}"), got, need, bound);
    }
}
