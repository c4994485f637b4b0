//! Both passes on tensors in a GPU's memory, on candle's stream: inputs are read where they lie, outputs
//! allocated by candle, nothing is waited for.
#![allow(unsafe_code)]

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, StorageRef, Tensor};
use fa_attn::device::Bound;
use fa_core::program::Element as ArrayElement;
use fa_core::{Dtype, Pass, TensorLayout};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_kernels::cudarc::driver::sys::CUstreamCaptureStatus;
use fa_kernels::cudarc::driver::{
    CudaSlice, CudaStream, CudaView, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, ValidAsZeroBits,
};
use fa_kernels::launch::{RawArray, RawProgram};
use fa_kernels::{BackwardArgs, Element, Extras, ForwardArgs, Input, KvElement, Output};
use half::{bf16, f16};

use crate::error::{Error, refused};
use crate::kernels::Device;
use crate::problem::{Gradients, Posed, strides};
use crate::programs;

/// An input: storage and layout.
type Given<'a> = (&'a CudaStorage, &'a Layout);

/// An element type of both candle and the kernels.
trait Value: CudaDType + DeviceRepr + ValidAsZeroBits + Element {}

impl Value for f16 {}
impl Value for bf16 {}

/// O, and LSE where `with_lse`.
pub(crate) fn forward(
    posed: &Posed,
    inputs: [Given<'_>; 3],
    with_lse: bool,
) -> Result<(CudaStorage, Shape, Option<Tensor>)> {
    let q = inputs[0].1.dims();
    let (storage, lse) = match posed.problem.types.wide() {
        Dtype::F16 => output::<f16>(posed, inputs, with_lse)?,
        Dtype::Bf16 => output::<bf16>(posed, inputs, with_lse)?,
        Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
            return Err(unknown(inputs[0].0.dtype()));
        }
    };
    let device = inputs[0].0.device();
    let lse = lse.map(|lse| tensor(lse, posed.lse_shape(q), device));
    Ok((storage, Shape::from(posed.out_shape(q)), lse))
}

/// O, and LSE where it is asked for.
type Made = (CudaStorage, Option<CudaSlice<f32>>);

/// An input's elements, and its strides.
type Located<'a, T> = (CudaView<'a, T>, fa_core::Strides);

fn output<T: Value>(posed: &Posed, [q, k, v]: [Given<'_>; 3], with_lse: bool) -> Result<Made> {
    let (types, device) = (posed.problem.types, q.0.device());
    match (types.q.is_code(), types.kv.is_code()) {
        (false, false) => launch::<T, T, T>(posed, device, view(q)?, [view(k)?, view(v)?], with_lse),
        (false, true) => launch::<T, u8, T>(posed, device, view(q)?, [codes(k)?, codes(v)?], with_lse),
        (true, _) => launch::<T, u8, u8>(posed, device, codes(q)?, [codes(k)?, codes(v)?], with_lse),
    }
}

fn launch<T: Value, K: KvElement, Q: KvElement>(
    posed: &Posed,
    device: &CudaDevice,
    (q, q_strides): Located<'_, Q>,
    [(k, k_strides), (v, v_strides)]: [Located<'_, K>; 2],
    with_lse: bool,
) -> Result<Made> {
    let stream = device.cuda_stream();
    let arrays = posed.program.as_ref().map(lock_arrays);
    let arrays = posed.program.as_ref().zip(arrays.as_deref());
    let program = arrays.map(|(own, arrays)| raw_program(own, arrays, &stream)).transpose()?;
    let problem = &program.as_ref().map_or(posed.problem, |(raw, _)| raw.with_aligned_rows(posed.problem));
    let kernels = Device::of(stream.context())?;
    let bound = kernels.bind(problem, Pass::Forward)?;
    let Bound::Forward(forward) = &*bound else { return Err(Error::NoForward.into()) };
    let mut out = room::<T>(posed, device, out_shape(problem).iter().product())?;
    let mut lse = match with_lse {
        true => Some(room::<f32>(posed, device, lse_len(problem))?),
        false => None,
    };
    let beside = lock(posed.beside.as_ref());
    let views = views(&beside)?;
    kernels.with_workspace(&stream, forward.workspace_bytes(), |workspace| {
        let args = ForwardArgs {
            q: Input { data: &q, strides: q_strides },
            k: Input { data: &k, strides: k_strides },
            v: Input { data: &v, strides: v_strides },
            out: written(&mut out, out_shape(problem)),
            lse: lse.as_mut().map(|lse| lse as &mut dyn DevicePtrMut<f32>),
            workspace: workspace.map(|workspace| workspace as &mut dyn DevicePtrMut<u8>),
            extras: Extras { program: program.as_ref().map(|(raw, _)| *raw), ..extras(&views) },
        };
        // SAFETY: the workspace is zero and no plan is shared. Starts of packed sequences are the caller's
        // word, as they are for candle-flash-attn: `flash_attn_varlen` documents them.
        unsafe { forward.run(&stream, args) }.map_err(refused)
    })?;
    Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), lse))
}

/// The gradients, from that of the output.
pub(crate) fn backward(
    posed: &Posed,
    inputs: [&Tensor; 3],
    [out, lse, dout]: [&Tensor; 3],
    dlse: Option<&Tensor>,
) -> Result<Gradients> {
    let all = [inputs[0], inputs[1], inputs[2], out, dout, lse];
    match posed.problem.types.q {
        Dtype::F16 => gradients::<f16>(posed, all, dlse),
        Dtype::Bf16 => gradients::<bf16>(posed, all, dlse),
        Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => Err(unknown(inputs[0].dtype())),
    }
}

fn gradients<T: Value>(posed: &Posed, tensors: [&Tensor; 6], dlse: Option<&Tensor>) -> Result<Gradients> {
    let problem = &posed.problem;
    let locked = tensors.map(Tensor::storage_and_layout);
    let given = |at: usize| on_gpu(&locked[at]);
    let device = given(0)?.0.device();
    let stream = device.cuda_stream();
    let pass = Pass::Backward { deterministic: posed.deterministic };
    let bound = Device::of(stream.context())?.bind(problem, pass)?;
    let Bound::Backward(backward) = &*bound else { return Err(Error::NoForward.into()) };
    let shapes = [q_shape(problem), k_shape(problem), v_shape(problem)];
    let made = shapes.map(|shape| room::<T>(posed, device, shape.iter().product()));
    let [dq, dk, dv] = made;
    let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
    let mut dsinks = match problem.score.sinks {
        true => Some(room::<f32>(posed, device, problem.heads_q)?),
        false => None,
    };
    // SAFETY: the kernels write every byte of it that they read.
    let mut workspace = unsafe { device.alloc::<u8>(backward.workspace_bytes().max(16))? };
    let beside = lock(fa_core::Extras { dlse, ..posed.beside.as_ref() });
    let views = views(&beside)?;
    let arrays = posed.program.as_ref().map(lock_arrays);
    let arrays = posed.program.as_ref().zip(arrays.as_deref());
    let mut program = arrays.map(|(own, arrays)| raw_program(own, arrays, &stream)).transpose()?;
    let mut darrays = Vec::new();
    for (own, slot) in posed.program.iter().flat_map(|own| own.tracked().map(move |slot| (own, slot))) {
        let shape = own.arrays[slot].shape();
        // SAFETY: a backward writes every element.
        let mut to = unsafe { device.alloc::<f32>(shape.elem_count().max(1))? };
        if let Some((raw, _)) = &mut program {
            raw.gradients[slot] = to.device_ptr_mut(&stream).0;
        }
        darrays.push((to, shape));
    }
    let mut inputs = [None, None, None, None, None];
    for (at, input) in inputs.iter_mut().enumerate() {
        *input = Some(view::<T>(given(at)?)?);
    }
    let input = |at: usize| {
        let (data, strides) = inputs[at].as_ref().ok_or(Error::NoForward)?;
        Ok::<_, candle_core::Error>(Input { data, strides: *strides })
    };
    let (lse, _) = view::<f32>(given(5)?)?;
    let args = BackwardArgs {
        q: input(0)?,
        k: input(1)?,
        v: input(2)?,
        out: input(3)?,
        lse: &lse,
        dout: input(4)?,
        dq: written(&mut dq, shapes[0]),
        dk: written(&mut dk, shapes[1]),
        dv: written(&mut dv, shapes[2]),
        workspace: &mut workspace,
        extras: Extras {
            dsinks: dsinks.as_mut().map(|dsinks| dsinks as &mut dyn DevicePtrMut<f32>),
            program: program.as_ref().map(|(raw, _)| *raw),
            ..extras(&views)
        },
    };
    // SAFETY: as for the forward, whose starts these are.
    unsafe { backward.run(&stream, args) }.map_err(refused)?;
    let like = |data: CudaSlice<T>, like: &Tensor| tensor(data, like.shape(), device);
    let inputs = [like(dq, tensors[0]), like(dk, tensors[1]), like(dv, tensors[2])];
    let sinks = dsinks.map(|dsinks| tensor(dsinks, problem.heads_q, device));
    let arrays = darrays.into_iter().map(|(data, shape)| tensor(data, shape, device)).collect();
    Ok(Gradients { inputs, sinks, arrays })
}

/// Refuses a captured stream, which does not wait for the host.
pub(crate) fn check_not_captured(device: &candle_core::Device) -> Result<()> {
    let candle_core::Device::Cuda(device) = device else { return Ok(()) };
    let status = device.cuda_stream().capture_status().map_err(candle_core::Error::wrap)?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        | CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => {
            Err(refused(fa_attn::Error::Captured))
        }
    }
}

/// A tensor of one element, for the graph alone.
pub(crate) fn token(like: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    let device = like.device();
    let made = device.alloc_zeros::<f32>(1)?;
    Ok((CudaStorage::wrap_cuda_slice(made, device.clone()), Shape::from(1)))
}

/// The tensors beside Q, K and V, held while a launch is enqueued.
type Locked<'a> = fa_core::Extras<(StorageRef<'a>, &'a Layout)>;

fn lock(beside: fa_core::Extras<&Tensor>) -> Locked<'_> {
    beside.map(|_, tensor| tensor.storage_and_layout(), |_, tensor| tensor.storage_and_layout())
}

/// Where they lie.
type Views<'a> = fa_core::Extras<CudaView<'a, i32>, CudaView<'a, f32>>;

fn views<'a>(locked: &'a Locked<'_>) -> Result<Views<'a>> {
    locked.as_ref().try_map(|_, tensor| words(on_gpu(tensor)?), |_, tensor| floats(on_gpu(tensor)?))
}

fn extras<'a>(views: &'a Views<'_>) -> Extras<'a> {
    let inputs = views.as_ref();
    let inputs = inputs.map(|_, view| view as &dyn DevicePtr<i32>, |_, view| view as &dyn DevicePtr<f32>);
    Extras { inputs, ..Extras::default() }
}

/// The arrays of a program, held while a launch is enqueued.
type LockedArrays<'a> = Vec<(StorageRef<'a>, &'a Layout)>;

fn lock_arrays(program: &programs::ProgramCall) -> LockedArrays<'_> {
    program.arrays.iter().map(Tensor::storage_and_layout).collect()
}

/// What a program reads, by addresses, and what orders other streams after the launch that reads there.
fn raw_program<'a>(
    own: &programs::ProgramCall,
    locked: &'a [(StorageRef<'_>, &Layout)],
    stream: &'a CudaStream,
) -> Result<(RawProgram, Vec<SyncOnDrop<'a>>)> {
    let mut raw = RawProgram { scalars: own.scalar_bits(), ..RawProgram::default() };
    let mut guards = Vec::with_capacity(locked.len());
    let arrays = own.program.get().arrays().iter().zip(&own.arrays);
    for (((decl, tensor), place), to) in arrays.zip(locked).zip(&mut raw.arrays) {
        let given = on_gpu(place)?;
        let (address, guard) = match decl.element {
            ArrayElement::F32 => address::<f32>(given, stream)?,
            ArrayElement::F16 => address::<f16>(given, stream)?,
            ArrayElement::Bf16 => address::<bf16>(given, stream)?,
            ArrayElement::I32 if tensor.dtype() == DType::I32 => address::<i32>(given, stream)?,
            ArrayElement::I32 | ArrayElement::Bits => address::<u32>(given, stream)?,
            ArrayElement::U8 | ArrayElement::Bool => address::<u8>(given, stream)?,
        };
        let (strides, extents) = programs::axes(decl.element, tensor)?;
        *to = RawArray { address, strides, extents };
        guards.push(guard);
    }
    Ok((raw, guards))
}

/// Where a tensor's first element lies.
fn address<'a, T: CudaDType + 'a>(
    (storage, layout): Given<'a>,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    let (start, guard) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    Ok((start + (layout.start_offset() * size_of::<T>()) as u64, guard))
}

fn on_gpu<'a>((storage, layout): &'a (StorageRef<'_>, &Layout)) -> Result<Given<'a>> {
    match &**storage {
        Storage::Cuda(storage) => Ok((storage, layout)),
        Storage::Cpu(_) | Storage::Metal(_) => Err(Error::NoForward.into()),
    }
}

/// The elements from the layout's first on, with their strides.
fn view<'a, T: CudaDType>((storage, layout): Given<'a>) -> Result<Located<'a, T>> {
    let slice = storage.as_cuda_slice::<T>()?;
    let offset = layout.start_offset().min(slice.len());
    Ok((slice.slice(offset..), strides(layout)))
}

/// The bytes of codes from the layout's first on, with their strides.
fn codes<'a>((storage, layout): Given<'a>) -> Result<Located<'a, u8>> {
    if matches!(storage.slice, CudaStorageSlice::U8(_)) {
        return view::<u8>((storage, layout));
    }
    let CudaStorageSlice::F8E4M3(slice) = &storage.slice else {
        return Err(unknown(storage.dtype()));
    };
    // SAFETY: an F8E4M3 is a byte by its representation, of which every pattern is valid.
    let whole = unsafe { slice.transmute::<u8>(slice.len()) };
    let offset = layout.start_offset().min(slice.len());
    Ok((whole.ok_or(Error::NoForward)?.slice(offset..), strides(layout)))
}

fn floats<'a>(given: Given<'a>) -> Result<CudaView<'a, f32>> {
    Ok(view(given)?.0)
}

/// Starts, lengths or pages, whose type was checked.
fn words<'a>((storage, layout): Given<'a>) -> Result<CudaView<'a, i32>> {
    if let CudaStorageSlice::U32(slice) = &storage.slice {
        // SAFETY: both have 4 bytes, of which every pattern is a value.
        let whole = unsafe { slice.transmute::<i32>(slice.len()) };
        let offset = layout.start_offset().min(slice.len());
        return Ok(whole.ok_or(Error::NoForward)?.slice(offset..));
    }
    Ok(view::<i32>((storage, layout))?.0)
}

/// Memory for an output: zero where not every row belongs to a sequence. CUDA rejects allocations of nothing.
fn room<T: DeviceRepr + ValidAsZeroBits>(
    posed: &Posed,
    device: &CudaDevice,
    len: usize,
) -> Result<CudaSlice<T>> {
    if posed.problem.lengths.is_uniform() {
        // SAFETY: the kernels write every element.
        return unsafe { device.alloc(len.max(1)) };
    }
    device.alloc_zeros(len.max(1))
}

fn written<T>(data: &mut CudaSlice<T>, [_, seqlen, heads, dim]: [usize; 4]) -> Output<'_, T> {
    Output { data, strides: TensorLayout::Bshd.strides(seqlen, heads, dim) }
}

fn tensor<T: CudaDType>(data: CudaSlice<T>, shape: impl Into<Shape>, device: &CudaDevice) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(data, device.clone()));
    Tensor::from_storage(storage, shape, BackpropOp::none(), false)
}

fn unknown(got: DType) -> candle_core::Error {
    Error::Dtype { tensor: "q", got, need: "f16 or bf16 on a GPU: convert by `to_dtype`".to_owned() }.into()
}
