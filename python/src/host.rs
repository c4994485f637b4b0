//! Calls on arrays in the CPU's memory.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::OnceLock;

use fa_attn::{
    Append, AppendExtras, AppendTensors, Backend, BackwardTensors, CpuOptions, DescaleForm, Dtype, Engine,
    Error, Extras, ForwardTensors, Pass, Problem, Table, bf16, f16,
};
use fa_core::Strides;
use fa_cpu::append::CacheMut;
use fa_cpu::{KvRef, TensorMut, TensorRef};
use pyo3::prelude::*;

use crate::dlpack::{Type, View};
use crate::error::{InputError, raised};
use crate::given::{Beside, Given};
use crate::slices::{elements, floats, floats_mut, slice_mut, slice_mut_of};
use crate::threads;

/// The CPU's engine, made at the first call.
pub(crate) fn engine() -> PyResult<&'static Engine> {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    if let Some(engine) = ENGINE.get() {
        return Ok(engine);
    }
    let engine = Engine::with(Backend::Cpu(CpuOptions::default())).map_err(raised)?;
    Ok(ENGINE.get_or_init(|| engine))
}

/// The arrays that a pass writes.
pub(crate) enum Written<'a, 'py> {
    Forward { out: &'a View<'py>, lse: Option<&'a View<'py>> },
    Backward(Backward<'a, 'py>),
}

/// The arrays of a backward other than Q, K and V.
pub(crate) struct Backward<'a, 'py> {
    pub dout: &'a View<'py>,
    pub out: &'a View<'py>,
    pub lse: &'a View<'py>,
    pub dq: &'a View<'py>,
    pub dk: &'a View<'py>,
    pub dv: &'a View<'py>,
    pub dsinks: Option<&'a View<'py>>,
}

/// Computes a pass of `problem`, on all cores, without the interpreter's lock.
///
/// # Errors
/// What the engine refuses, and arrays that cannot be written.
pub(crate) fn run(
    py: Python<'_>,
    given: &Given<'_>,
    problem: &Problem,
    pass: Pass,
    to: &Written<'_, '_>,
) -> PyResult<()> {
    let call = engine()?.bind(problem, pass).map_err(raised)?;
    match problem.types.wide() {
        Dtype::F32 => run_in::<f32>(py, given, problem, &call, to),
        Dtype::F16 => run_in::<f16>(py, given, problem, &call, to),
        Dtype::Bf16 => run_in::<bf16>(py, given, problem, &call, to),
        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
            Err(InputError::new_err(format!("nothing computes in {dtype}")))
        }
    }
}

fn run_in<T: fa_attn::Element>(
    py: Python<'_>,
    given: &Given<'_>,
    problem: &Problem,
    call: &fa_attn::Call,
    to: &Written<'_, '_>,
) -> PyResult<()> {
    let Given { q, k, v, beside, program, .. } = given;
    let extras = extras(beside);
    let of_problem = program.as_ref().zip(problem.score.program);
    let inputs = of_problem.map(|(own, program)| own.inputs(program)).transpose()?;
    match to {
        Written::Forward { out, lse } => {
            let tensors = ForwardTensors {
                q: kv::<T>("q", q)?,
                k: kv("k", k)?,
                v: kv("v", v)?,
                out: tensor_mut("out", out)?,
                lse: floats_mut("softmax_lse", lse.ok_or_else(no_lse)?)?,
                extras,
                program: inputs.as_ref(),
            };
            threads::detached(py, || call.run(tensors))?.map_err(raised)
        }
        Written::Backward(Backward { dout, out, lse, dq, dk, dv, dsinks }) => {
            let own = program.as_ref().filter(|own| own.wants_gradients());
            let mut darrays = Vec::new();
            let tensors = BackwardTensors {
                q: tensor::<T>("q", q)?,
                k: tensor("k", k)?,
                v: tensor("v", v)?,
                out: tensor("out", out)?,
                lse: floats("softmax_lse", lse)?,
                dout: tensor("dout", dout)?,
                dq: tensor_mut("dq", dq)?,
                dk: tensor_mut("dk", dk)?,
                dv: tensor_mut("dv", dv)?,
                dsinks: dsinks.map(|dsinks| floats_mut("dsinks", dsinks)).transpose()?,
                darrays: own.is_some().then_some(&mut darrays),
                extras,
                program: inputs.as_ref(),
            };
            threads::detached(py, || call.run(tensors))?.map_err(raised)?;
            own.map_or(Ok(()), |own| own.write_gradients(&darrays))
        }
    }
}

fn no_lse() -> PyErr {
    InputError::new_err("softmax_lse is missing: on the CPU it is always computed")
}

/// The arrays of an append, in the order of [`fa_attn::AppendTensors`] and [`fa_attn::AppendExtras`].
pub(crate) struct Appended<'py> {
    pub k_new: View<'py>,
    pub v_new: View<'py>,
    pub k_cache: View<'py>,
    pub v_cache: View<'py>,
    pub q: Option<View<'py>>,
    /// Where rotated queries go; `None` for in place.
    pub q_out: Option<View<'py>>,
    pub tables: Option<[View<'py>; 2]>,
    pub cu_new: Option<View<'py>>,
    pub seqused_k: Option<View<'py>>,
    pub page_table: Option<View<'py>>,
    pub cu_seqlens_q: Option<View<'py>>,
    pub used_out: Option<View<'py>>,
    pub k_descale: Option<View<'py>>,
    pub v_descale: Option<View<'py>>,
}

/// Whether a page of K that sequences use is one of V, which lies so many pages behind it.
pub(crate) fn pages_meet(arrays: &Appended<'_>, apart: i64) -> bool {
    let (Some(table), Some(used)) = (&arrays.page_table, &arrays.seqused_k) else { return false };
    let [page, columns] = [arrays.k_cache.shape()[1].max(1), table.shape()[1].max(1)];
    let starts = arrays.cu_new.as_ref().map(ints);
    let new = |at: usize| match starts {
        Some(starts) => {
            starts.get(at + 1).zip(starts.get(at)).map_or(0, |(end, begin)| end.saturating_sub(*begin))
        }
        None => i32::try_from(arrays.k_new.shape()[1]).unwrap_or(i32::MAX),
    };
    let rows = ints(table).chunks(columns).zip(ints(used)).enumerate();
    let named: HashSet<i64> = rows
        .flat_map(|(at, (pages, used))| {
            let rows = usize::try_from(used.saturating_add(new(at))).unwrap_or(0);
            pages.iter().take(rows.div_ceil(page)).map(|page| i64::from(*page))
        })
        .collect();
    named.iter().any(|page| named.contains(&(page + apart)))
}

/// Appends; returns how many rows had no slot.
///
/// # Errors
/// What [`fa_attn::append`] refuses, and arrays that cannot be written.
pub(crate) fn append(py: Python<'_>, append: &Append, arrays: &Appended<'_>) -> PyResult<usize> {
    match append.dtype {
        Dtype::F32 => append_in::<f32>(py, append, arrays),
        Dtype::F16 => append_in::<f16>(py, append, arrays),
        // The append itself refuses the other.
        Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
            append_in::<bf16>(py, append, arrays)
        }
    }
}

fn append_in<T: fa_attn::Element>(py: Python<'_>, append: &Append, arrays: &Appended<'_>) -> PyResult<usize> {
    append.check().map_err(|error| raised(Error::Kernels(error.into())))?;
    let tables = match &arrays.tables {
        Some([cos, sin]) => Some([table("rotary_cos", cos)?, table("rotary_sin", sin)?]),
        None => None,
    };
    let queries = arrays.q_out.as_ref().or(arrays.q.as_ref());
    let mut tensors: AppendTensors<'_, T> = AppendTensors {
        k_new: tensor("k", &arrays.k_new)?,
        v_new: tensor("v", &arrays.v_new)?,
        k_cache: cache("k_cache", &arrays.k_cache, append)?,
        v_cache: cache("v_cache", &arrays.v_cache, append)?,
        q: queries.map(|q| tensor_mut("q", q)).transpose()?,
        tables,
    };
    let (descales, [k_descale, v_descale]) = (append.descales(), [&arrays.k_descale, &arrays.v_descale]);
    let (mut k_own, k_written) = descale("k_descale", k_descale, descales.k)?;
    let (mut v_own, v_written) = descale("v_descale", v_descale, descales.v)?;
    let mut extras = AppendExtras {
        cu_new: arrays.cu_new.as_ref().map(ints),
        used_new: None,
        seqused_k: arrays.seqused_k.as_ref().map(ints),
        page_table: arrays.page_table.as_ref().map(ints),
        cu_seqlens_q: arrays.cu_seqlens_q.as_ref().map(ints),
        seqused_q: None,
        used_out: arrays.used_out.as_ref().map(|view| slice_mut("cache_seqlens", view)).transpose()?,
        k_descale: k_own.as_deref_mut().or(k_written),
        v_descale: v_own.as_deref_mut().or(v_written),
    };
    threads::detached(py, || fa_attn::append(append, &mut extras, &mut tensors))?
        .map_err(|error| raised(error.into()))
}

/// Descales of a cache: copied where they are read, since arrays may be read-only, or the array that is
/// written.
type OwnOrWritten<'a> = (Option<Vec<f32>>, Option<&'a mut [f32]>);

fn descale<'a>(name: &str, view: &'a Option<View<'_>>, form: DescaleForm) -> PyResult<OwnOrWritten<'a>> {
    Ok(match view {
        None => (None, None),
        Some(view) if form == DescaleForm::TokenHead => (None, Some(floats_mut(name, view)?)),
        Some(view) => (Some(floats(name, view)?.to_vec()), None),
    })
}

/// The arrays of a merge: each part's O and LSE, the result, and sinks.
pub(crate) struct Merged<'py> {
    pub outs: Vec<View<'py>>,
    pub lses: Vec<View<'py>>,
    pub out: View<'py>,
    pub lse: View<'py>,
    pub sinks: Option<View<'py>>,
}

fn table<'a, T>(name: &str, view: &'a View<'_>) -> PyResult<Table<'a, T>> {
    if !view.is_contiguous() {
        return Err(InputError::new_err(format!("{name}: its rows must lie end to end, make it contiguous")));
    }
    // SAFETY: the array is that long, and holds what the append's check says: f32 or the tensors' type.
    Ok(unsafe {
        if view.dtype == Type::F32 {
            Table::F32(elements(view.data.cast(), view.elements()))
        } else {
            Table::Same(elements(view.data.cast(), view.elements()))
        }
    })
}

/// `[batch, rows, heads, dim]` of an array of three axes (packed, a batch of 1) or four, with its strides.
pub(crate) fn placement(view: &View<'_>) -> Option<([usize; 4], Strides)> {
    match (view.shape(), view.strides()) {
        (&[s, h, d], &[seq, head, dim]) => Some(([1, s, h, d], Strides { batch: 0, seq, head, dim })),
        (&[b, s, h, d], &[batch, seq, head, dim]) => Some(([b, s, h, d], Strides { batch, seq, head, dim })),
        _ => None,
    }
}

fn shape_error(name: &str, view: &View<'_>) -> PyErr {
    InputError::new_err(format!(
        "{name} has the shape {:?}: it must be (batch, seqlen, heads, head_dim) or (total, heads, head_dim)",
        view.shape()
    ))
}

/// Elements up to the last that the strides reach.
fn span(name: &str, view: &View<'_>) -> PyResult<usize> {
    view.span().ok_or_else(|| {
        InputError::new_err(format!(
            "{name} has the strides {:?}: none may be negative, copy the array",
            view.strides()
        ))
    })
}

pub(crate) fn tensor<'a, T>(name: &'static str, view: &'a View<'_>) -> PyResult<TensorRef<'a, T>> {
    let (shape, strides) = placement(view).ok_or_else(|| shape_error(name, view))?;
    // SAFETY: the array has that many elements of the type, which the caller has checked; it is borrowed.
    let data = unsafe { elements(view.data.cast::<T>(), span(name, view)?) };
    TensorRef::new(name, data, shape, strides).map_err(|error| raised(error.into()))
}

/// Q, K or V, whose type has been checked to be the call's or one of codes.
fn kv<'a, T: fa_attn::Element>(name: &'static str, view: &'a View<'_>) -> PyResult<KvRef<'a, T>> {
    match view.dtype {
        Type::E4m3 | Type::I8 => Ok(KvRef::Codes(tensor(name, view)?)),
        Type::F32 | Type::F16 | Type::Bf16 | Type::I32 | Type::Other => Ok(KvRef::Same(tensor(name, view)?)),
    }
}

/// A cache of the append's type.
fn cache<'a, T>(name: &'static str, view: &'a View<'_>, append: &Append) -> PyResult<CacheMut<'a, T>> {
    Ok(match append.codes {
        Some(_) => CacheMut::Codes(tensor_mut(name, view)?),
        None => CacheMut::Same(tensor_mut(name, view)?),
    })
}

pub(crate) fn tensor_mut<'a, T>(name: &'static str, view: &'a View<'_>) -> PyResult<TensorMut<'a, T>> {
    let (shape, strides) = placement(view).ok_or_else(|| shape_error(name, view))?;
    let data = slice_mut_of(name, view, span(name, view)?)?;
    TensorMut::new(name, data, shape, strides).map_err(|error| raised(error.into()))
}

fn ints<'a>(view: &'a View<'_>) -> &'a [i32] {
    // SAFETY: `words` has checked type and order.
    unsafe { elements(view.data.cast(), view.elements()) }
}

fn extras<'a>(beside: &'a Beside<'_>) -> Extras<'a> {
    // SAFETY: `words` has checked type and order.
    let floats = |view: &'a View<'_>| unsafe { elements(view.data.cast::<f32>(), view.elements()) };
    beside.extras.as_ref().map(|_, view| ints(view), |_, view| floats(view))
}
