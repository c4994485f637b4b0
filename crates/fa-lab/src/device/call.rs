//! A forward's tensors on the GPU.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_kernels::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use fa_kernels::cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError, result,
};
use fa_kernels::{Error, Forward, ForwardArgs, Input, Output, RawForwardArgs, RawTensor};

use crate::tensors::{Half, Inputs, Outputs, Place};

pub(super) fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { doing, source }
}

/// The tensors of one call on the GPU.
pub struct Call<T> {
    pub(super) inputs: [CudaSlice<T>; 3],
    pub(super) out: CudaSlice<T>,
    pub(super) lse: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
    pub(super) places: [Place; 4],
    rows: usize,
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
pub(super) fn capture(
    stream: &Arc<CudaStream>,
    launch: impl FnOnce() -> Result<(), Error>,
) -> Result<CudaGraph, Error> {
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

pub(super) fn fill_with_nan<U: DeviceRepr>(
    stream: &CudaStream,
    slice: &mut CudaSlice<U>,
) -> Result<(), Error> {
    let bytes = slice.num_bytes();
    let (address, _guard) = slice.device_ptr_mut(stream);
    // SAFETY: the slice is that long and borrowed mutably; all ones is a NaN of every type used here.
    unsafe { result::memset_d8_async(address, 0xff, bytes, stream.cu_stream()) }
        .map_err(doing("poisoning an output"))
}

pub(super) fn upload<T: Half>(
    stream: &Arc<CudaStream>,
    values: &[T],
    place: &Place,
) -> Result<CudaSlice<T>, Error> {
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
pub(super) fn download<T: Half>(
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
