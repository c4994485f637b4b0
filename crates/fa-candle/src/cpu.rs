//! Both passes on tensors in host memory, by fa-cpu's tiled kernels: inputs are read where they lie.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, StorageRef, Tensor, WithDType};
use fa_core::program::{ArrayData, ArrayView, Element as ArrayElement, Inputs};
use fa_core::{Dtype, Problem, TensorLayout};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::tiled::{BackwardInputs, Options, backward_program, forward_extras};
use fa_cpu::{Arguments, Element, KvRef, OwnedExtras, TensorMut, TensorRef};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::codes::bits;
use crate::error::{Error, refused};
use crate::problem::{Beside, Gradients, Posed, strides};
use crate::programs;

/// An input: storage and layout.
type Input<'a> = (&'a CpuStorage, &'a Layout);

/// An element type of both candle and fa-cpu.
trait Value: WithDType + Element + Default {}

impl Value for f32 {}
impl Value for f16 {}
impl Value for bf16 {}

/// O, and LSE where `with_lse`.
pub(crate) fn forward(
    posed: &Posed,
    inputs: [Input<'_>; 3],
    with_lse: bool,
) -> Result<(CpuStorage, Shape, Option<Tensor>)> {
    let q = inputs[0].1.dims();
    let mut lse = with_lse.then(|| vec![0f32; lse_len(&posed.problem)]);
    let to = lse.as_deref_mut();
    let storage = match posed.problem.types.wide() {
        Dtype::F32 => CpuStorage::F32(output(posed, inputs, to)?),
        Dtype::F16 => CpuStorage::F16(output(posed, inputs, to)?),
        Dtype::Bf16 => CpuStorage::BF16(output(posed, inputs, to)?),
        Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => return Err(unknown(inputs[0].0.dtype())),
    };
    let lse = lse.map(|lse| Tensor::from_vec(lse, posed.lse_shape(q), &Device::Cpu)).transpose()?;
    Ok((storage, Shape::from(posed.out_shape(q)), lse))
}

fn output<T: Value>(posed: &Posed, [q, k, v]: [Input<'_>; 3], lse: Option<&mut [f32]>) -> Result<Vec<T>> {
    let problem = &posed.problem;
    let beside = on_host(&posed.beside)?;
    let types = problem.types;
    let q = input::<T>("q", q, q_shape(problem), types.q)?;
    let k = input::<T>("k", k, k_shape(problem), types.kv)?;
    let v = input::<T>("v", v, v_shape(problem), types.kv)?;
    let mut out: Vec<T> = zeros(out_shape(problem));
    let mut to = written("out", &mut out, out_shape(problem))?;
    let locked = posed.program.as_ref().map(lock);
    let program = posed.program.as_ref().zip(locked.as_deref());
    let program = program.map(|(own, locked)| program_inputs(own, locked)).transpose()?;
    let arguments = Arguments { program: program.as_ref(), ..Arguments::from(&beside.view()) };
    forward_extras(Options::default(), problem, arguments, q, k, v, &mut to, lse)
        .map_err(|error| posed.refused(error))?;
    Ok(out)
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
        Dtype::F32 => gradients::<f32>(posed, all, dlse),
        Dtype::F16 => gradients::<f16>(posed, all, dlse),
        Dtype::Bf16 => gradients::<bf16>(posed, all, dlse),
        Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => Err(unknown(inputs[0].dtype())),
    }
}

fn gradients<T: Value>(posed: &Posed, tensors: [&Tensor; 6], dlse: Option<&Tensor>) -> Result<Gradients> {
    let problem: &Problem = &posed.problem;
    let mut beside = on_host(&posed.beside)?;
    beside.dlse = dlse.map(host_floats).transpose()?;
    let locked = tensors.map(Tensor::storage_and_layout);
    let input = |at: usize| match &*locked[at].0 {
        Storage::Cpu(storage) => Ok((storage, locked[at].1)),
        Storage::Cuda(_) | Storage::Metal(_) => Err(candle_core::Error::from(Error::NoForward)),
    };
    let (lse, lse_layout) = input(5)?;
    let lse = elements::<f32>(lse, lse_layout)?;
    let inputs = BackwardInputs {
        q: view::<T>("q", input(0)?, q_shape(problem))?,
        k: view("k", input(1)?, k_shape(problem))?,
        v: view("v", input(2)?, v_shape(problem))?,
        out: view("out", input(3)?, out_shape(problem))?,
        lse: lse.get(..lse_len(problem)).unwrap_or(lse),
        dout: view("the gradient of out", input(4)?, out_shape(problem))?,
    };
    let shapes = [q_shape(problem), k_shape(problem), v_shape(problem)];
    let [mut dq, mut dk, mut dv] = shapes.map(zeros::<T>);
    let locked_arrays = posed.program.as_ref().map(lock);
    let program = posed.program.as_ref().zip(locked_arrays.as_deref());
    let program = program.map(|(own, locked)| program_inputs(own, locked)).transpose()?;
    let wanted: Vec<usize> = posed.program.iter().flat_map(programs::ProgramCall::tracked).collect();
    let mut darrays = (!wanted.is_empty()).then(Vec::new);
    let mut dsinks = problem.score.sinks.then(|| vec![0f32; problem.heads_q]);
    backward_program(
        Options::default(),
        problem,
        Arguments { program: program.as_ref(), ..Arguments::from(&beside.view()) },
        &inputs,
        &mut written("dq", &mut dq, shapes[0])?,
        &mut written("dk", &mut dk, shapes[1])?,
        &mut written("dv", &mut dv, shapes[2])?,
        dsinks.as_deref_mut(),
        darrays.as_mut(),
    )
    .map_err(|error| posed.refused(error))?;
    let tensor = |data: Vec<T>, like: &Tensor| Tensor::from_vec(data, like.shape(), &Device::Cpu);
    let inputs = [tensor(dq, tensors[0])?, tensor(dk, tensors[1])?, tensor(dv, tensors[2])?];
    let sinks = dsinks.map(|data| Tensor::from_vec(data, problem.heads_q, &Device::Cpu)).transpose()?;
    let mut arrays = Vec::new();
    if let (Some(own), Some(mut darrays)) = (&posed.program, darrays) {
        for slot in wanted {
            let made = darrays.get_mut(slot).map(std::mem::take).unwrap_or_default();
            arrays.push(Tensor::from_vec(made, own.arrays[slot].shape(), &Device::Cpu)?);
        }
    }
    Ok(Gradients { inputs, sinks, arrays })
}

/// The tensors of a program, while a call reads them.
pub(crate) type Locked<'a> = Vec<(StorageRef<'a>, &'a Layout)>;

pub(crate) fn lock(program: &programs::ProgramCall) -> Locked<'_> {
    program.arrays.iter().map(Tensor::storage_and_layout).collect()
}

/// What the program reads, where it lies.
pub(crate) fn program_inputs<'a>(
    own: &programs::ProgramCall,
    locked: &'a [(StorageRef<'_>, &Layout)],
) -> Result<Inputs<'a>> {
    let mut arrays = Vec::with_capacity(locked.len());
    for ((decl, tensor), (storage, layout)) in own.program.arrays().iter().zip(&own.arrays).zip(locked) {
        let Storage::Cpu(storage) = &**storage else { return Err(Error::NoForward.into()) };
        let data = match decl.element {
            ArrayElement::F32 => ArrayData::F32(elements(storage, layout)?),
            ArrayElement::F16 => ArrayData::F16(elements::<f16>(storage, layout)?.reinterpret_cast()),
            ArrayElement::Bf16 => ArrayData::Bf16(elements::<bf16>(storage, layout)?.reinterpret_cast()),
            ArrayElement::I32 => ArrayData::I32(elements(storage, layout)?),
            ArrayElement::U8 => ArrayData::U8(elements(storage, layout)?),
            ArrayElement::Bool => ArrayData::Bool(elements(storage, layout)?),
            ArrayElement::Bits => ArrayData::Bits(elements(storage, layout)?),
        };
        let (strides, extents) = programs::axes(decl.element, tensor)?;
        arrays.push(ArrayView { data, strides, extents });
    }
    Inputs::new(&own.program, arrays, own.scalars.clone())
        .map_err(|error| refused(fa_cpu::CpuError::from(error)))
}

/// The small tensors as fa-cpu takes them.
pub(crate) fn on_host(beside: &Beside) -> Result<OwnedExtras> {
    beside.as_ref().try_map(|_, tensor| host_integers(tensor), |_, tensor| host_floats(tensor))
}

fn host_floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.detach().flatten_all()?.to_vec1::<f32>()
}

fn host_integers(tensor: &Tensor) -> Result<Vec<i32>> {
    let flat = tensor.flatten_all()?;
    if tensor.dtype() == DType::I32 {
        return flat.to_vec1::<i32>();
    }
    // What no i32 holds is beyond every tensor, and refused as that.
    let values = flat.to_vec1::<u32>()?;
    Ok(values.into_iter().map(|value| i32::try_from(value).unwrap_or(i32::MAX)).collect())
}

fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    Ok(storage.as_slice::<T>()?.get(layout.start_offset()..).unwrap_or_default())
}

fn view<'a, T: Value>(
    name: &'static str,
    (storage, layout): Input<'a>,
    shape: [usize; 4],
) -> Result<TensorRef<'a, T>> {
    TensorRef::new(name, elements(storage, layout)?, shape, strides(layout)).map_err(refused)
}

/// Q, K or V: of O's type, or codes.
fn input<'a, T: Value>(
    name: &'static str,
    input: Input<'a>,
    shape: [usize; 4],
    dtype: Dtype,
) -> Result<KvRef<'a, T>> {
    if !dtype.is_code() {
        return Ok(KvRef::Same(view::<T>(name, input, shape)?));
    }
    let (storage, layout) = input;
    let bits = TensorRef::new(name, bits(name, storage, layout)?, shape, strides(layout)).map_err(refused)?;
    Ok(KvRef::Codes(bits))
}

fn zeros<T: Value>(shape: [usize; 4]) -> Vec<T> {
    vec![T::default(); shape.iter().product()]
}

fn written<'a, T: Value>(
    name: &'static str,
    data: &'a mut [T],
    shape: [usize; 4],
) -> Result<TensorMut<'a, T>> {
    TensorMut::packed(name, data, shape, TensorLayout::Bshd).map_err(refused)
}

fn unknown(got: DType) -> candle_core::Error {
    Error::Dtype { tensor: "q", got, need: "f32, f16 or bf16".to_owned() }.into()
}
