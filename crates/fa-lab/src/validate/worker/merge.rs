//! Cases of the merge kernel, against the CPU's merge of the same parts.

use std::sync::Arc;

use fa_core::{Dtype, Merge, TensorLayout};
use fa_cpu::merge::{add_sink_to_row, merge_row};
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use fa_kernels::{BoundMerge, Element, Input, MERGE, MergeArgs, Output, PartialResult};
use half::{bf16, f16};

use super::session::{Found, Session};
use crate::error::{Error, Result};
use crate::grid::Case;
use crate::random::Random;

/// An element of parts or results.
trait Value: Element + DeviceRepr + ValidAsZeroBits + Copy {
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

impl Value for f32 {
    fn of(value: f32) -> f32 {
        value
    }
    fn value(self) -> f32 {
        self
    }
}

macro_rules! halves {
    ($($half:ty),+) => {
        $(impl Value for $half {
            fn of(value: f32) -> $half {
                <$half>::from_f32(value)
            }
            fn value(self) -> f32 {
                self.to_f32()
            }
        })+
    };
}

halves!(f16, bf16);

/// Parts in the order `[batch, seqlen, heads, dim]`, their LSEs `[batch, heads, seqlen]`.
struct Parts {
    parts: Vec<(Vec<f32>, Vec<f32>)>,
    sinks: Option<Vec<f32>>,
}

/// Random parts, whose rows see no key now and then: those hold NaN.
fn random(merge: &Merge, seed: u64) -> Parts {
    let mut random = Random::new(seed);
    let [_, seqlen, heads, dim] = merge.shape();
    let parts = (0..merge.parts)
        .map(|_| {
            let lse: Vec<f32> = (0..merge.rows())
                .map(|row| match random.below(6) {
                    0 if row.is_multiple_of(2) => f32::INFINITY,
                    0 => f32::NEG_INFINITY,
                    _ if row % 11 == 5 => f32::NEG_INFINITY,
                    _ => 4.0 * random.normal() + 3.0,
                })
                .collect();
            let mut out = vec![f32::NAN; merge.rows() * dim];
            for (row, values) in out.chunks_mut(dim).enumerate() {
                let (b, s, h) = (row / (seqlen * heads), row / heads % seqlen, row % heads);
                if lse[(b * heads + h) * seqlen + s].is_finite() {
                    values.iter_mut().for_each(|value| *value = random.normal());
                }
            }
            (out, lse)
        })
        .collect();
    let sinks = merge.sinks.then(|| (0..heads).map(|_| 2.0 * random.normal()).collect());
    Parts { parts, sinks }
}

/// Runs and judges a case.
///
/// # Errors
/// What the GPU reports.
pub(super) fn examine(session: &Session, case: &Case, merge: &Merge) -> Result<Found> {
    match merge.part {
        Dtype::F32 => into::<f32>(session, case, merge),
        Dtype::F16 => into::<f16>(session, case, merge),
        Dtype::Bf16 => into::<bf16>(session, case, merge),
        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
            Err(Error::NotTried(format!("nothing is merged in {dtype}")))
        }
    }
}

fn into<P: Value>(session: &Session, case: &Case, merge: &Merge) -> Result<Found> {
    match merge.out {
        Dtype::F32 => judged::<P, f32>(session, case, merge),
        Dtype::F16 => judged::<P, f16>(session, case, merge),
        Dtype::Bf16 => judged::<P, bf16>(session, case, merge),
        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
            Err(Error::NotTried(format!("nothing is merged into {dtype}")))
        }
    }
}

fn judged<P: Value, O: Value>(session: &Session, case: &Case, merge: &Merge) -> Result<Found> {
    let bound = session.gpu.kernels.merge(merge)?;
    let mut given = random(merge, case.seed());
    // The CPU merges the same parts as the GPU.
    for (out, _) in &mut given.parts {
        out.iter_mut().for_each(|value| *value = P::of(*value).value());
    }
    let (out, lse) = {
        let _gpu = session.begin(case);
        on_gpu::<P, O>(&session.gpu.stream, &bound, &given)?
    };
    let [_, seqlen, heads, dim] = merge.shape();
    let (mut worst, mut detail) = (0.0f64, String::new());
    let mut row_of = vec![0.0f32; dim];
    for (row, found) in out.chunks(dim).enumerate() {
        let (b, s, h) = (row / (seqlen * heads), row / heads % seqlen, row % heads);
        let at = (b * heads + h) * seqlen + s;
        let mut need = f32::NEG_INFINITY;
        row_of.fill(0.0);
        for (part, of_part) in &given.parts {
            merge_row(&mut row_of, &mut need, &part[row * dim..][..dim], of_part[at]);
        }
        if let Some(sinks) = &given.sinks {
            add_sink_to_row(&mut row_of, &mut need, sinks[h]);
        }
        let tolerance = |value: f32| match merge.out {
            Dtype::F32 => 1e-5 * (1.0 + f64::from(value).abs()),
            Dtype::F16 => 1e-3 * (0.1 + f64::from(value).abs()),
            Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                8e-3 * (0.1 + f64::from(value).abs())
            }
        };
        let of_lse = if need == lse[at] { 0.0 } else { (f64::from(need) - f64::from(lse[at])).abs() / 1e-5 };
        let errors = found
            .iter()
            .zip(&row_of)
            .map(|(have, need)| (f64::from(have.value()) - f64::from(*need)).abs() / tolerance(*need));
        for ratio in errors.chain([of_lse]) {
            // NaN counts as the largest error.
            if ratio.is_nan() || ratio > worst {
                worst = if ratio.is_nan() { f64::INFINITY } else { ratio };
                detail = format!("row {row}: {worst:.2} of the tolerance, LSE {} for {need}", lse[at]);
            }
        }
    }
    Ok(Found { passed: worst <= 1.0, ratio: worst, detail, ..Found::by(MERGE) })
}

/// Merges on the GPU, into memory that holds NaN.
fn on_gpu<P: Value, O: Value>(
    stream: &Arc<CudaStream>,
    bound: &BoundMerge,
    given: &Parts,
) -> Result<(Vec<O>, Vec<f32>)> {
    let merge = bound.launch().merge();
    let [_, seqlen, heads, dim] = merge.shape();
    let strides = TensorLayout::Bshd.strides(seqlen, heads, dim);
    let upload = |values: &[f32]| -> Result<CudaSlice<P>> {
        Ok(stream.clone_htod(&values.iter().map(|value| P::of(*value)).collect::<Vec<P>>())?)
    };
    let parts = given
        .parts
        .iter()
        .map(|(out, lse)| Ok((upload(out)?, stream.clone_htod(lse)?)))
        .collect::<Result<Vec<_>>>()?;
    let parts: Vec<PartialResult<'_, P>> =
        parts.iter().map(|(out, lse)| PartialResult { out: Input { data: out, strides }, lse }).collect();
    let sinks = given.sinks.as_ref().map(|sinks| stream.clone_htod(sinks)).transpose()?;
    let mut out = stream.clone_htod(&vec![O::of(f32::NAN); merge.rows() * dim])?;
    let mut lse = stream.clone_htod(&vec![f32::NAN; merge.rows()])?;
    bound.run(
        stream,
        MergeArgs {
            parts: &parts,
            out: Output { data: &mut out, strides },
            lse: Some(&mut lse),
            sinks: sinks.as_ref().map(|sinks| sinks as _),
        },
    )?;
    Ok((stream.clone_dtoh(&out)?, stream.clone_dtoh(&lse)?))
}
