//! A call on host tensors: copies to the GPU, launches, copies back.

use std::sync::Arc;
use std::time::Duration;

use fa_core::program::Inputs;
use fa_core::{Pass, Problem, Strides, TensorLayout};
use fa_cpu::batch::Batch;
use fa_cpu::{AppendExtras, AppendTensors, Arguments, KvRef, TensorMut, TensorRef};
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::{BoundAppend, Error as KernelError, KvElement};

use crate::device::{
    Bound, DeviceAppend, DeviceBackward, DeviceExtras, DeviceForward, DeviceTensor, Gpu, Half, Placement,
    Stored, doing, layout_of,
};
use crate::error::Error;
use crate::extras::check_dsinks;
use crate::tensors::{BackwardTensors, ForwardTensors, Tensors};

/// Runs a bound kernel on host tensors; the time of the last of `launches` launches, on the GPU alone.
///
/// # Errors
/// [`Error::Pass`] for the tensors of the other pass, and what the kernel and the driver refuse.
pub(crate) fn run<T: Half>(
    gpu: &Gpu,
    bound: &Bound,
    tensors: Tensors<'_, T>,
    launches: usize,
) -> Result<Duration, Error> {
    match (bound, tensors) {
        (Bound::Forward(bound), Tensors::Forward(tensors)) => forward(gpu, bound, tensors, launches),
        (Bound::Backward(bound), Tensors::Backward(tensors)) => backward(gpu, bound, tensors, launches),
        (Bound::Forward(_), tensors) => Err(Error::Pass { bound: Pass::Forward, given: tensors.pass() }),
        (Bound::Backward(_), tensors) => {
            Err(Error::Pass { bound: Pass::Backward { deterministic: false }, given: tensors.pass() })
        }
    }
}

/// O's placement: the host's if it is packed, so that one copy moves it.
fn out_placement(shape: [usize; 4], strides: Strides) -> Placement {
    let given = Placement { shape, strides };
    if given.is_packed() { given } else { Placement::packed(shape, TensorLayout::Bshd) }
}

/// Checks the extras and copies Q, K, V and them to the GPU, with room for O and a workspace of `bytes`.
fn uploaded<T: Half, K: Stored + KvElement, Q: Stored + KvElement>(
    stream: &Arc<CudaStream>,
    problem: &Problem,
    bytes: usize,
    (q, kv): (&TensorRef<'_, Q>, [&TensorRef<'_, K>; 2]),
    out: Placement,
    arguments: &Arguments<'_>,
) -> Result<DeviceForward<T, K, Q>, Error> {
    // Kernels trust starts, lengths and pages: those that point outside the tensors are found here.
    Batch::new(problem, arguments)?;
    let mut device = DeviceForward::upload_with(stream, problem, bytes, q, kv, out)?;
    device.extras = DeviceExtras::upload(stream, arguments)?;
    Ok(device)
}

fn forward<T: Half>(
    gpu: &Gpu,
    bound: &fa_kernels::Forward,
    tensors: ForwardTensors<'_, T>,
    launches: usize,
) -> Result<Duration, Error> {
    let arguments = tensors.arguments();
    let ForwardTensors { q, k, v, mut out, lse, extras, .. } = tensors;
    let problem: &Problem = bound.problem();
    fa_cpu::check::check_forward(problem, q, k, v)?;
    fa_cpu::check::check_out(problem, "out", out.shape())?;
    fa_cpu::check::check_lse(problem, lse.len())?;
    fa_cpu::extras::check_extras(problem, Pass::Forward, &extras)?;
    let to = (gpu, bound, launches);
    match (&q, &k, &v) {
        (KvRef::Same(q), KvRef::Same(k), KvRef::Same(v)) => {
            forward_of(to, q, [k, v], &mut out, lse, &arguments)
        }
        (KvRef::Same(q), KvRef::Codes(k), KvRef::Codes(v)) => {
            forward_of(to, q, [k, v], &mut out, lse, &arguments)
        }
        (KvRef::Codes(q), KvRef::Codes(k), KvRef::Codes(v)) => {
            forward_of(to, q, [k, v], &mut out, lse, &arguments)
        }
        (_, KvRef::Same(_), _) | (_, _, KvRef::Same(_)) => {
            let (kernel, problem) = (problem.types.kv.to_string(), "K and V of two types".to_owned());
            Err(KernelError::Mismatch { what: "kv_dtype", kernel, problem }.into())
        }
    }
}

/// The kernel of `bound` for rows that are aligned, where those of the program's array are; `None` where they
/// are not, or it does not compile so.
fn aligned(gpu: &Gpu, bound: &fa_kernels::Forward, inputs: &Inputs<'_>) -> Option<fa_kernels::Forward> {
    let problem = layout_of(inputs).with_aligned_rows(*bound.problem());
    if problem == *bound.problem() {
        return None;
    }
    let mut plan = bound.launch_plan().clone();
    plan.spec.score.program = problem.score.program;
    gpu.kernels.forward(&problem, &plan).ok()
}

/// [`forward`] on K and V of one type.
fn forward_of<T: Half, K: Stored + KvElement, Q: Stored + KvElement>(
    (gpu, bound, launches): (&Gpu, &fa_kernels::Forward, usize),
    q: &TensorRef<'_, Q>,
    kv: [&TensorRef<'_, K>; 2],
    out: &mut TensorMut<'_, T>,
    lse: &mut [f32],
    arguments: &Arguments<'_>,
) -> Result<Duration, Error> {
    let problem: &Problem = bound.problem();
    let stream = &gpu.stream;
    let placement = out_placement(out.shape(), out.strides());
    let aligned = arguments.program.and_then(|inputs| aligned(gpu, bound, inputs));
    let bound = aligned.as_ref().unwrap_or(bound);
    let bytes = bound.workspace_bytes();
    let mut device = uploaded(stream, problem, bytes, (q, kv), placement, arguments)?;
    if !problem.lengths.is_uniform() {
        // Rows that no sequence has are not written, here as on the CPU.
        device.out = DeviceTensor::upload(stream, &out.as_ref())?;
        if !lse.is_empty() {
            device.lse = stream.clone_htod(&*lse).map_err(doing("copying to the GPU"))?;
        }
    }
    let mut time = Duration::ZERO;
    for _ in 0..launches {
        time = gpu.time(|stream| device.run(bound, stream))?;
    }
    if !lse.is_empty() {
        stream.memcpy_dtoh(&device.lse.slice(..lse.len()), lse).map_err(doing("copying from the GPU"))?;
    }
    device.out.download(stream, out)?;
    gpu.synchronize()?;
    Ok(time)
}

fn backward<T: Half>(
    gpu: &Gpu,
    bound: &fa_kernels::Backward,
    tensors: BackwardTensors<'_, T>,
    launches: usize,
) -> Result<Duration, Error> {
    let arguments = tensors.arguments();
    let BackwardTensors { q, k, v, out, lse, dout, mut dq, mut dk, mut dv, dsinks, darrays, .. } = tensors;
    let problem: &Problem = bound.problem();
    fa_cpu::check::check_forward(problem, &q, &k, &v)?;
    fa_cpu::check::check_out(problem, "out", out.shape())?;
    fa_cpu::check::check_out(problem, "dout", dout.shape())?;
    fa_cpu::check::check_lse(problem, lse.len())?;
    fa_cpu::check::check_gradients(problem, dq.shape(), dk.shape(), dv.shape())?;
    check_dsinks(problem, dsinks.as_deref())?;
    let stream = &gpu.stream;
    let placement = out_placement(out.shape(), out.strides());
    let mut forward = uploaded(stream, problem, 0, (&q, [&k, &v]), placement, &arguments)?;
    forward.out = DeviceTensor::upload(stream, &out)?;
    if let (Some(_), Some(own), Some(program)) =
        (&darrays, &mut forward.extras.program, problem.score.program)
    {
        own.want_gradients(stream, &program)?;
    }
    if !lse.is_empty() {
        forward.lse = stream.clone_htod(lse).map_err(doing("copying to the GPU"))?;
    }
    let dout = DeviceTensor::upload(stream, &dout)?;
    let mut device = DeviceBackward::new(stream, bound, &forward, dout)?;
    if !problem.lengths.is_uniform() {
        device.dq = DeviceTensor::upload(stream, &dq.as_ref())?;
        device.dk = DeviceTensor::upload(stream, &dk.as_ref())?;
        device.dv = DeviceTensor::upload(stream, &dv.as_ref())?;
    }
    let mut time = Duration::ZERO;
    for _ in 0..launches {
        time = gpu.time(|stream| -> Result<(), KernelError> { device.run(&forward, bound, stream) })?;
    }
    device.dq.download(stream, &mut dq)?;
    device.dk.download(stream, &mut dk)?;
    device.dv.download(stream, &mut dv)?;
    if let (Some(dsinks), Some(found)) = (dsinks, &device.dsinks) {
        stream.memcpy_dtoh(found, dsinks).map_err(doing("copying from the GPU"))?;
    }
    if let (Some(darrays), Some(own)) = (darrays, &forward.extras.program) {
        darrays.clear();
        for gradient in &own.gradients {
            let found = gradient.as_ref().map(|gradient| gradient.read(stream)).transpose()?;
            darrays.push(found.unwrap_or_default());
        }
    }
    gpu.synchronize()?;
    Ok(time)
}

/// Runs an append on host tensors, whose shapes and lengths have been checked.
///
/// # Errors
/// What the kernel and the driver refuse.
pub(crate) fn append<T: Half>(
    gpu: &Gpu,
    bound: &BoundAppend,
    extras: &mut AppendExtras<'_>,
    tensors: &mut AppendTensors<'_, T>,
) -> Result<usize, Error> {
    let mut device = DeviceAppend::upload(&gpu.stream, extras, tensors)?;
    device.run(bound, &gpu.stream)?;
    Ok(device.download(&gpu.stream, extras, tensors)?)
}
