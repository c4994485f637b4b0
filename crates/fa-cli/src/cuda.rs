//! The GPU at hand: tensors on it, a forward run on them, and its time.
#![allow(unsafe_code)]

mod backward;

use std::sync::Arc;

use fa_attn::device::Gpu;
use fa_core::{Arch, KernelSpec, Problem, Strides, TensorLayout};
use fa_kernels::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use fa_kernels::cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError, ValidAsZeroBits,
    result,
};
use fa_kernels::{
    Backward, Element, Error, Forward, ForwardArgs, Input, Output, RawForwardArgs, RawTensor, driver,
};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use serde::Serialize;

use crate::random::Random;

pub use backward::{Bound, GradientCall, Gradients, PassCall, random_dout};

/// An element type that the GPU kernels compute in: f16 or bf16.
pub trait Half:
    Element + fa_cpu::Element + DeviceRepr + ValidAsZeroBits + PartialEq + Default + std::fmt::Debug
{
    /// The bits of each value: equal bits are equal results, which equal values (0 and -0, NaN) are not.
    fn bits(values: &[Self]) -> &[u16];
}

impl Half for half::f16 {
    fn bits(values: &[Self]) -> &[u16] {
        values.reinterpret_cast()
    }
}

impl Half for half::bf16 {
    fn bits(values: &[Self]) -> &[u16] {
        values.reinterpret_cast()
    }
}

/// Evaluates an expression with `$T` standing for the Rust type of a 16-bit [`fa_core::Dtype`]; `$other` for the rest.
macro_rules! with_half {
    ($dtype:expr, $T:ident => $body:expr, else $other:expr) => {
        match $dtype {
            fa_core::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            fa_core::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            _ => $other,
        }
    };
}
pub(crate) use with_half;

/// A GPU with its kernels and the stream that everything here runs on.
pub struct Device {
    gpu: Gpu,
}

impl std::ops::Deref for Device {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.gpu
    }
}

/// What a GPU is, for records of measurements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// The product's name.
    pub gpu: String,
    /// The architecture whose kernels it runs.
    pub arch: Arch,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Bytes of device memory.
    pub memory_bytes: usize,
    /// Version of the kernel module, where it says so.
    pub driver: Option<String>,
    /// CUDA version that the driver supports, such as `13.0`.
    pub cuda: String,
}

fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { doing, source }
}

impl Device {
    /// The first GPU.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::OldDriver`], [`Error::Driver`] where there is no GPU, [`Error::Device`] where it is
    /// too old: each says what to do.
    pub fn open() -> Result<Device, fa_attn::Error> {
        Ok(Device::of(Gpu::open()?))
    }

    /// That of `gpu`.
    pub fn of(gpu: Gpu) -> Device {
        Device { gpu }
    }

    /// The GPU itself.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// What the GPU is.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn info(&self) -> Result<DeviceInfo, Error> {
        use fa_kernels::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let asked = doing("asking about the GPU");
        let sms = self.context().attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map_err(&asked)?;
        let cuda = driver::version()?;
        Ok(DeviceInfo {
            gpu: self.context().name().map_err(&asked)?,
            arch: self.kernels.arch(),
            sms: sms.max(0) as u32,
            memory_bytes: self.context().total_mem().map_err(&asked)?,
            driver: crate::gpu::driver().version,
            cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
        })
    }

    /// The forward of `problem`: by the kernel of `spec`, or else by the library's own choice.
    ///
    /// # Errors
    /// What planning, compiling and loading report.
    pub fn forward(&self, problem: &Problem, spec: Option<&KernelSpec>) -> Result<Forward, fa_attn::Error> {
        match spec {
            Some(spec) => Ok(self.kernels.forward_with(problem, spec)?),
            None => self.gpu.forward(problem, None),
        }
    }

    /// `inputs` on the GPU with room for the outputs, which hold NaN.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn call<T: Half>(&self, forward: &Forward, inputs: &Inputs<T>) -> Result<Call<T>, Error> {
        Call::new(&self.stream, forward, inputs)
    }

    /// Copies of one call, and of that of its backward with a dO, so many that together they exceed the L2 twice: timed in turn, none finds its inputs there.
    ///
    /// # Errors
    /// As [`Device::call`].
    pub fn calls<T: Half>(
        &self,
        forward: &Forward,
        backward: Option<(&Backward, &[T])>,
        inputs: &Inputs<T>,
    ) -> Result<Vec<PassCall<T>>, Error> {
        const MOST: usize = 32;
        let l2 = self.kernels.arch().limits().l2_bytes as f64;
        let copies = (2.0 * l2 / inputs.problem.bytes_forward().max(1.0)).ceil();
        let call = |_| PassCall::new(&self.stream, forward, backward, inputs);
        (0..(copies as usize).clamp(1, MOST)).map(call).collect()
    }

    /// Milliseconds of a launch by CUDA events, one figure per sample, in ascending order.
    ///
    /// # Errors
    /// What a launch reports.
    pub fn time<T: Half>(
        &self,
        pass: &Bound,
        calls: &mut [PassCall<T>],
        timing: Timing,
    ) -> Result<Vec<f64>, Error> {
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            self.context().new_event(flags).map_err(doing("making an event"))
        };
        let recorded = doing("recording an event");
        let mut turn = 0;
        let mut run = |launches: usize| -> Result<(), Error> {
            for _ in 0..launches {
                calls[turn].run(pass, &self.stream)?;
                turn = (turn + 1) % calls.len();
            }
            Ok(())
        };
        let mut measure = |launches: usize| -> Result<_, Error> {
            let (start, end) = (event()?, event()?);
            start.record(&self.stream).map_err(&recorded)?;
            run(launches)?;
            end.record(&self.stream).map_err(&recorded)?;
            Ok((start, end))
        };
        let elapsed = |(start, end): &(_, _), launches: usize| -> Result<f64, Error> {
            let event: &fa_kernels::cudarc::driver::CudaEvent = start;
            let ms = event.elapsed_ms(end).map_err(doing("timing a kernel"))?;
            Ok(f64::from(ms) / launches as f64)
        };
        let first = elapsed(&measure(1)?, 1)?;
        let warm_up = ((timing.warm_up_ms / first.max(1e-3)).ceil() as usize).clamp(2, 2000);
        let one = elapsed(&measure(warm_up)?, warm_up)?;
        let launches = ((timing.sample_ms / one.max(1e-4)).ceil() as usize).clamp(1, 200);
        // All samples are enqueued before the first is read: the host stays ahead of the GPU.
        let samples =
            (0..timing.samples.max(1)).map(|_| measure(launches)).collect::<Result<Vec<_>, Error>>()?;
        let mut times =
            samples.iter().map(|sample| elapsed(sample, launches)).collect::<Result<Vec<f64>, Error>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times)
    }

    /// Waits until the stream is idle.
    ///
    /// # Errors
    /// What went wrong on the GPU meanwhile.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(doing("waiting for the GPU"))
    }
}

/// How [`Device::time`] measures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Milliseconds of launches before anything counts.
    pub warm_up_ms: f64,
    /// Samples, each between two events.
    pub samples: usize,
    /// Milliseconds that a sample lasts at least: short kernels are launched several times within one.
    pub sample_ms: f64,
}

impl Default for Timing {
    fn default() -> Self {
        Timing { warm_up_ms: 20.0, samples: 30, sample_ms: 0.2 }
    }
}

/// The median of values in ascending order; 0 of none.
pub fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// Where a tensor lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// `[batch, seqlen, heads, dim]`.
    pub shape: [usize; 4],
    /// In elements; those of axes that are broadcast are 0.
    pub strides: Strides,
}

impl Place {
    /// A packed tensor.
    pub fn packed(shape: [usize; 4], layout: TensorLayout) -> Place {
        Place::padded(shape, layout, 0)
    }

    /// A tensor with `gap` elements (a multiple of 8) behind every row of `dim`.
    pub fn padded(shape: [usize; 4], layout: TensorLayout, gap: usize) -> Place {
        let [_, seqlen, heads, dim] = shape;
        Place { shape, strides: layout.strides(seqlen, heads, dim + gap) }
    }

    /// Elements from the first to behind the last, at least 1.
    pub fn len(&self) -> usize {
        self.reach(self.shape)
    }

    fn reach(&self, shape: [usize; 4]) -> usize {
        if shape.contains(&0) {
            return 1;
        }
        let [b, s, h, d] = shape;
        self.strides.offset(b - 1, s - 1, h - 1, d - 1) as usize + 1
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn is_packed_bshd(&self) -> bool {
        *self == Place::packed(self.shape, TensorLayout::Bshd)
    }

    /// Calls `row(offset within the place, first element of the packed row)` for every row of one batch entry.
    fn rows(&self, batch: usize, mut row: impl FnMut(usize, usize)) {
        let [_, seqlen, heads, dim] = self.shape;
        for s in 0..seqlen {
            for h in 0..heads {
                row(self.strides.offset(0, s, h, 0) as usize, ((batch * seqlen + s) * heads + h) * dim);
            }
        }
    }
}

/// Q, K and V of a problem: values packed `[batch, seqlen, heads, dim]` on the host, and where they are to lie.
#[derive(Clone, Debug)]
pub struct Inputs<T> {
    /// The problem.
    pub problem: Problem,
    /// Q, K and V, packed BSHD.
    pub values: [Vec<T>; 3],
    /// Where Q, K, V and O lie on the GPU.
    pub places: [Place; 4],
}

impl<T: Half> Inputs<T> {
    /// Values as a layer has them (independent, unit variance), the same for the same seed, all packed in `layout`.
    pub fn random(problem: &Problem, layout: TensorLayout, seed: u64) -> Inputs<T> {
        Inputs::placed(problem, shapes(problem).map(|shape| Place::packed(shape, layout)), seed)
    }

    /// Values as of [`Inputs::random`] for tensors that lie anywhere; along broadcast axes they repeat.
    pub fn placed(problem: &Problem, places: [Place; 4], seed: u64) -> Inputs<T> {
        let values = [0usize, 1, 2].map(|i| {
            let mut values = normal(places[i].elements(), seed.wrapping_mul(3).wrapping_add(i as u64));
            repeat_broadcast(&mut values, &places[i]);
            values
        });
        Inputs { problem: *problem, values, places }
    }
}

/// Shapes of Q, K, V and O.
pub fn shapes(problem: &Problem) -> [[usize; 4]; 4] {
    use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
    [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)]
}

fn normal<T: Half>(len: usize, seed: u64) -> Vec<T> {
    const CHUNK: usize = 1 << 14;
    let mut values = vec![T::default(); len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        let mut random = Random::new(seed ^ (chunk as u64).wrapping_mul(0xd134_2543_de82_ef95));
        values.iter_mut().for_each(|value| *value = <T as fa_cpu::Element>::from_f32(random.normal()));
    });
    values
}

/// Copies index 0 along the axes of stride 0 to the other indices: what a kernel reads there.
fn repeat_broadcast<T: Copy>(values: &mut [T], place: &Place) {
    let [batch, seqlen, heads, dim] = place.shape;
    let Strides { batch: sb, seq: ss, head: sh, .. } = place.strides;
    if sb != 0 && ss != 0 && sh != 0 || values.is_empty() {
        return;
    }
    let first = |index: usize, stride: i64| if stride == 0 { 0 } else { index };
    for b in 0..batch {
        for s in 0..seqlen {
            for h in 0..heads {
                let row = |b, s, h| ((b * seqlen + s) * heads + h) * dim;
                let from = row(first(b, sb), first(s, ss), first(h, sh));
                values.copy_within(from..from + dim, row(b, s, h));
            }
        }
    }
}

/// The tensors of one call on the GPU.
pub struct Call<T> {
    inputs: [CudaSlice<T>; 3],
    out: CudaSlice<T>,
    lse: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
    places: [Place; 4],
    rows: usize,
}

/// What a call wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs<T> {
    /// O, packed BSHD.
    pub out: Vec<T>,
    /// LSE, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
    /// Elements between the rows of O that are no longer NaN: written, though they are no part of it.
    pub strays: usize,
}

impl<T: Half> Outputs<T> {
    /// Whether every bit is the same.
    pub fn same_bits(&self, other: &Outputs<T>) -> bool {
        let lse = |outputs: &Outputs<T>| outputs.lse.iter().map(|lse| lse.to_bits()).collect::<Vec<_>>();
        T::bits(&self.out) == T::bits(&other.out) && lse(self) == lse(other)
    }
}

/// Places above this are filled and read batch entry by batch entry (inputs whose entries are above it row by row), and
/// what lies between entries is not looked at.
const WHOLE_LIMIT: usize = 1 << 28;

impl<T: Half> Call<T> {
    /// `inputs` on the GPU, gaps between rows filled with NaN, and outputs that hold NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(stream: &Arc<CudaStream>, forward: &Forward, inputs: &Inputs<T>) -> Result<Call<T>, Error> {
        let rows = fa_cpu::check::lse_len(&inputs.problem);
        let [q, k, v] = [0, 1, 2].map(|i| upload(stream, &inputs.values[i], &inputs.places[i]));
        let made = doing("allocating device memory");
        let mut call = Call {
            inputs: [q?, k?, v?],
            out: stream.alloc_zeros(inputs.places[3].len()).map_err(&made)?,
            lse: stream.alloc_zeros(rows.max(1)).map_err(&made)?,
            workspace: stream.alloc_zeros(forward.workspace_bytes().max(16)).map_err(&made)?,
            places: inputs.places,
            rows,
        };
        call.poison(stream)?;
        Ok(call)
    }

    /// Fills O, gaps included, and LSE with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        fill_with_nan(stream, &mut self.out)?;
        fill_with_nan(stream, &mut self.lse)
    }

    /// Launches `forward` on `stream`.
    ///
    /// # Errors
    /// What [`Forward::run`] refuses.
    pub fn run(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        let [q, k, v] = &self.inputs;
        let [at_q, at_k, at_v, at_out] = self.places.map(|place| place.strides);
        forward.run(
            stream,
            ForwardArgs {
                q: Input { data: q, strides: at_q },
                k: Input { data: k, strides: at_k },
                v: Input { data: v, strides: at_v },
                out: Output { data: &mut self.out, strides: at_out },
                lse: Some(&mut self.lse),
                workspace: Some(&mut self.workspace),
            },
        )
    }

    /// A launch on `stream` (not the default one) captured as a CUDA graph, which must not outlive this call's tensors.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn capture(&mut self, forward: &Forward, stream: &Arc<CudaStream>) -> Result<CudaGraph, Error> {
        let at = self.places.map(|place| place.strides);
        let input = |i: usize| RawTensor { address: self.inputs[i].device_ptr(stream).0, strides: at[i] };
        let (q, k, v) = (input(0), input(1), input(2));
        let args = RawForwardArgs {
            q,
            k,
            v,
            out: RawTensor { address: self.out.device_ptr_mut(stream).0, strides: at[3] },
            lse: Some(self.lse.device_ptr_mut(stream).0),
            workspace: Some(self.workspace.device_ptr_mut(stream).0),
        };
        // SAFETY: the addresses are those of tensors with these places, which the caller keeps for the graph.
        capture(stream, || unsafe { forward.run_raw(stream, &args) })
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn outputs(&self, stream: &Arc<CudaStream>) -> Result<Outputs<T>, Error> {
        let read = doing("reading results");
        let mut lse = stream.clone_dtoh(&self.lse).map_err(&read)?;
        lse.truncate(self.rows);
        let (out, strays) = download(stream, &self.out, &self.places[3])?;
        Ok(Outputs { out, lse, strays })
    }
}

/// What `launch` puts on `stream` as a CUDA graph.
fn capture(stream: &Arc<CudaStream>, launch: impl FnOnce() -> Result<(), Error>) -> Result<CudaGraph, Error> {
    stream.synchronize().map_err(doing("waiting for the GPU"))?;
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(doing("beginning a capture"))?;
    let launched = launch();
    // A capture has to end whatever happened in it.
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(doing("ending a capture"))?;
    launched?;
    graph.ok_or(Error::Driver {
        doing: "capturing a launch",
        source: DriverError(fa_kernels::cudarc::driver::sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
    })
}

fn fill_with_nan<U: DeviceRepr>(stream: &CudaStream, slice: &mut CudaSlice<U>) -> Result<(), Error> {
    let bytes = slice.num_bytes();
    let (address, _guard) = slice.device_ptr_mut(stream);
    // SAFETY: the slice is that long and borrowed mutably; all ones is a NaN of every type used here.
    unsafe { result::memset_d8_async(address, 0xff, bytes, stream.cu_stream()) }
        .map_err(doing("poisoning an output"))
}

fn upload<T: Half>(stream: &Arc<CudaStream>, values: &[T], place: &Place) -> Result<CudaSlice<T>, Error> {
    let sent = doing("copying inputs to the GPU");
    if place.is_packed_bshd() && !values.is_empty() {
        return stream.clone_htod(values).map_err(sent);
    }
    let [batch, seqlen, heads, dim] = place.shape;
    let mut slice = stream.alloc_zeros::<T>(place.len()).map_err(doing("allocating device memory"))?;
    fill_with_nan(stream, &mut slice)?;
    if values.is_empty() {
        return Ok(slice);
    }
    let nan = <T as fa_cpu::Element>::from_f32(f32::NAN);
    if place.len() <= WHOLE_LIMIT {
        let mut whole = vec![nan; place.len()];
        for b in 0..batch {
            let base = place.strides.offset(b, 0, 0, 0) as usize;
            place.rows(b, |at, from| {
                whole[base + at..][..dim].copy_from_slice(&values[from..from + dim]);
            });
        }
        stream.memcpy_htod(&whole, &mut slice).map_err(sent)?;
        return Ok(slice);
    }
    let entry_len = place.reach([1, seqlen, heads, dim]);
    if entry_len > WHOLE_LIMIT {
        let mut rows = Vec::new();
        for b in 0..batch {
            let base = place.strides.offset(b, 0, 0, 0) as usize;
            place.rows(b, |at, from| rows.push((base + at, from)));
        }
        for (at, from) in rows {
            stream
                .memcpy_htod(&values[from..from + dim], &mut slice.slice_mut(at..at + dim))
                .map_err(&sent)?;
        }
        return Ok(slice);
    }
    for b in 0..batch {
        let mut entry = vec![nan; entry_len];
        place.rows(b, |at, from| entry[at..][..dim].copy_from_slice(&values[from..from + dim]));
        let base = place.strides.offset(b, 0, 0, 0) as usize;
        stream.memcpy_htod(&entry, &mut slice.slice_mut(base..base + entry_len)).map_err(&sent)?;
    }
    Ok(slice)
}

/// The tensor, packed BSHD, and how many elements between its rows are no NaN.
fn download<T: Half>(
    stream: &Arc<CudaStream>,
    slice: &CudaSlice<T>,
    place: &Place,
) -> Result<(Vec<T>, usize), Error> {
    let read = doing("reading results");
    let elements = place.elements();
    if place.is_packed_bshd() && elements > 0 {
        return Ok((stream.clone_dtoh(slice).map_err(read)?, 0));
    }
    let written = |values: &[T]| values.iter().filter(|value| !value.to_f32().is_nan()).count();
    if elements == 0 {
        return Ok((Vec::new(), written(&stream.clone_dtoh(slice).map_err(read)?)));
    }
    let [batch, seqlen, heads, dim] = place.shape;
    let nan = <T as fa_cpu::Element>::from_f32(f32::NAN);
    let mut values = vec![T::default(); elements];
    let mut strays = 0;
    let mut take = |block: &mut [T], base: usize, b: usize| {
        place.rows(b, |at, to| {
            let row = &mut block[base + at..][..dim];
            values[to..to + dim].copy_from_slice(row);
            row.fill(nan);
        });
    };
    if place.len() <= WHOLE_LIMIT {
        let mut whole = stream.clone_dtoh(slice).map_err(read)?;
        for b in 0..batch {
            take(&mut whole, place.strides.offset(b, 0, 0, 0) as usize, b);
        }
        strays += written(&whole);
    } else {
        let entry_len = place.reach([1, seqlen, heads, dim]);
        for b in 0..batch {
            let base = place.strides.offset(b, 0, 0, 0) as usize;
            let mut entry = stream.clone_dtoh(&slice.slice(base..base + entry_len)).map_err(&read)?;
            take(&mut entry, 0, b);
            strays += written(&entry);
        }
    }
    Ok((values, strays))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn broadcast_axes_repeat_their_first_index() {
        let shape = [2, 3, 2, 8];
        let place = Place { shape, strides: Strides { batch: 0, seq: 16, head: 0, dim: 1 } };
        let mut values: Vec<usize> = (0..96).collect();
        repeat_broadcast(&mut values, &place);
        let at = |b: usize, s: usize, h: usize| values[((b * 3 + s) * 2 + h) * 8];
        for b in 0..2 {
            for s in 0..3 {
                assert_eq!((at(b, s, 0), at(b, s, 1)), (s * 16, s * 16));
            }
        }
        assert_eq!(place.len(), 40);
    }

    #[test]
    fn random_inputs_repeat_and_have_unit_variance() {
        let problem = Problem::square(2, 100, 3, 64, fa_core::Mask::FULL, fa_core::Dtype::Bf16);
        let one = Inputs::<bf16>::random(&problem, TensorLayout::Bhsd, 7);
        let two = Inputs::<bf16>::random(&problem, TensorLayout::Bhsd, 7);
        assert!(one.values == two.values && one.values[0] != one.values[1]);
        let values: Vec<f64> = one.values[2].iter().map(|value| value.to_f64()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 3.0]), 2.0);
    }
}
