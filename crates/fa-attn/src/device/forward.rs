//! The device tensors of a forward.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::Problem;
use fa_cpu::TensorRef;
use fa_kernels::cudarc::driver::sys::{CUgraphInstantiate_flags, CUresult, CUstreamCaptureMode};
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtrMut, DriverError};
use fa_kernels::{Error, Extras, Forward, ForwardArgs, KvElement, RawExtras, RawForwardArgs};

use super::extras::DeviceExtras;
use super::half::{Half, Stored};
use super::tensor::{DeviceTensor, Placement, doing, fill_with_nan};

/// Q, K, V, O, LSE and workspace of one forward. K and V are of `K`, and Q of `Q`: the type of O, or the bits
/// of codes.
#[derive(Debug)]
pub struct DeviceForward<T, K = T, Q = T> {
    /// Q, `[batch, seqlen_q, heads_q, head_dim]`.
    pub q: DeviceTensor<Q>,
    /// K, `[batch, seqlen_k, heads_kv, head_dim]`.
    pub k: DeviceTensor<K>,
    /// V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
    pub v: DeviceTensor<K>,
    /// O, `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub out: DeviceTensor<T>,
    /// LSE, `[batch, heads_q, seqlen_q]`; one element where there is no row.
    pub lse: CudaSlice<f32>,
    /// The kernel's workspace.
    pub workspace: CudaSlice<u8>,
    /// Elements of LSE.
    pub rows: usize,
    /// Starts and lengths of sequences, page table, slopes and sinks: those that the problem names.
    pub extras: DeviceExtras,
    /// `[1]`, and optional, for keys in pages: launches add the entries of the page table that name no page,
    /// whose keys read as zeros. [`DeviceForward::count_page_faults`] starts the count,
    /// [`DeviceForward::page_faults`] reads it.
    pub page_faults: Option<CudaSlice<u32>>,
}

/// What a forward wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceOutput<T> {
    /// O, packed `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub out: Vec<T>,
    /// LSE, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
    /// Elements in the gaps between rows of O that are not NaN any more: stray writes.
    pub strays: usize,
}

impl<T: Half> DeviceOutput<T> {
    /// Whether both are equal bit by bit.
    pub fn same_bits(&self, other: &DeviceOutput<T>) -> bool {
        let lse = |output: &DeviceOutput<T>| output.lse.iter().map(|lse| lse.to_bits()).collect::<Vec<_>>();
        T::bits(&self.out) == T::bits(&other.out) && lse(self) == lse(other)
    }
}

impl<T: Half> DeviceForward<T> {
    /// Copies of host tensors, and outputs that hold NaN; O has the layout of Q.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn upload(
        stream: &Arc<CudaStream>,
        problem: &Problem,
        workspace_bytes: usize,
        [q, k, v]: [&TensorRef<'_, T>; 3],
        out: Placement,
    ) -> Result<DeviceForward<T>, Error> {
        DeviceForward::upload_with(stream, problem, workspace_bytes, q, [k, v], out)
    }

    /// Q, K and V from `values`, packed `[batch, seqlen, heads, dim]`, and O, with the strides of
    /// `placements`; the gaps, O and LSE hold NaN.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn place(
        stream: &Arc<CudaStream>,
        problem: &Problem,
        workspace_bytes: usize,
        values: [&[T]; 3],
        placements: &[Placement; 4],
    ) -> Result<DeviceForward<T>, Error> {
        let [q, k, v] = [0, 1, 2].map(|i| DeviceTensor::place(stream, values[i], placements[i]));
        let out = DeviceTensor::nan(stream, placements[3])?;
        DeviceForward::of(stream, problem, workspace_bytes, q?, [k?, v?], out)
    }
}

impl<T: Half, K: Stored + KvElement, Q: Stored + KvElement> DeviceForward<T, K, Q> {
    /// [`DeviceForward::upload`] with K and V, and Q, of types of their own.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn upload_with(
        stream: &Arc<CudaStream>,
        problem: &Problem,
        workspace_bytes: usize,
        q: &TensorRef<'_, Q>,
        [k, v]: [&TensorRef<'_, K>; 2],
        out: Placement,
    ) -> Result<DeviceForward<T, K, Q>, Error> {
        let (q, k) = (DeviceTensor::upload(stream, q)?, DeviceTensor::upload(stream, k)?);
        let (kv, out) = ([k, DeviceTensor::upload(stream, v)?], DeviceTensor::nan(stream, out)?);
        DeviceForward::of(stream, problem, workspace_bytes, q, kv, out)
    }

    fn of(
        stream: &Arc<CudaStream>,
        problem: &Problem,
        workspace_bytes: usize,
        q: DeviceTensor<Q>,
        [k, v]: [DeviceTensor<K>; 2],
        out: DeviceTensor<T>,
    ) -> Result<DeviceForward<T, K, Q>, Error> {
        let made = doing("allocating device memory");
        let rows = fa_cpu::check::lse_len(problem);
        let mut lse = stream.alloc_zeros(rows.max(1)).map_err(&made)?;
        fill_with_nan(stream, &mut lse)?;
        // Zero before its first use, as kernels ask.
        let workspace = stream.alloc_zeros(workspace_bytes.max(16)).map_err(&made)?;
        let extras = DeviceExtras::default();
        Ok(DeviceForward { q, k, v, out, lse, workspace, rows, extras, page_faults: None })
    }

    /// Shapes and strides of Q, K, V and O.
    pub fn placements(&self) -> [Placement; 4] {
        [self.q.placement, self.k.placement, self.v.placement, self.out.placement]
    }

    /// Fills O, gaps included, and LSE with NaN.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        self.out.poison(stream)?;
        fill_with_nan(stream, &mut self.lse)
    }

    /// Launches `forward` on `stream`: allocates nothing, waits for nothing.
    ///
    /// # Errors
    /// What [`Forward::run`] refuses.
    pub fn run(&mut self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        // Taken and put back: the other tensors are borrowed beside it.
        let extras = std::mem::take(&mut self.extras);
        let run = self.run_with(forward, &extras, stream);
        self.extras = extras;
        run
    }

    /// [`DeviceForward::run`] with extras that layers share, and perhaps a plan in them.
    ///
    /// # Errors
    /// What [`Forward::run`] refuses.
    pub fn run_with(
        &mut self,
        forward: &Forward,
        extras: &DeviceExtras,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        let call = ForwardCall {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            out: &mut self.out,
            lse: Some(&mut self.lse),
            workspace: &mut self.workspace,
            extras,
            page_faults: self.page_faults.as_mut(),
        };
        call.run(forward, stream)
    }

    /// Starts counting page faults at 0: see [`DeviceForward::page_faults`].
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn count_page_faults(&mut self, stream: &Arc<CudaStream>) -> Result<(), Error> {
        self.page_faults = Some(stream.alloc_zeros(1).map_err(doing("allocating device memory"))?);
        Ok(())
    }

    /// Entries of the page table that named no page, summed over all launches since counting started; 0 if
    /// it has not. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn page_faults(&self, stream: &Arc<CudaStream>) -> Result<u32, Error> {
        let Some(faults) = &self.page_faults else { return Ok(0) };
        let faults = stream.clone_dtoh(faults).map_err(doing("copying from the GPU"))?;
        Ok(faults.into_iter().sum())
    }

    /// The addresses.
    pub fn raw(&mut self, stream: &CudaStream) -> RawForwardArgs {
        let extras = self.extras.raw(stream);
        self.raw_with(extras, stream)
    }

    fn raw_with(&mut self, extras: RawExtras, stream: &CudaStream) -> RawForwardArgs {
        let page_faults = self.page_faults.as_mut().map(|faults| faults.device_ptr_mut(stream).0);
        RawForwardArgs {
            q: self.q.raw(stream),
            k: self.k.raw(stream),
            v: self.v.raw(stream),
            out: self.out.raw(stream),
            lse: Some(self.lse.device_ptr_mut(stream).0),
            workspace: Some(self.workspace.device_ptr_mut(stream).0),
            extras: RawExtras { page_faults, ..extras },
        }
    }

    /// A launch on `stream` (not the default one) captured as a CUDA graph.
    ///
    /// # Safety
    /// As for [`capture()`]: these tensors stay while the graph is launched.
    ///
    /// # Errors
    /// [`Error::Beyond`] and [`Error::Driver`].
    pub unsafe fn capture(
        &mut self,
        forward: &Forward,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaGraph, Error> {
        self.extras.check_rows(forward.problem())?;
        let args = self.raw(stream);
        // SAFETY: the addresses are those of tensors with these placements, which the caller keeps for the
        // graph.
        unsafe { capture(stream, || forward.run_raw(stream, &args)) }
    }

    /// [`DeviceForward::capture`] with extras that layers share. Replays read the lengths, and the plan if
    /// there is one, that the memory holds then: [`DeviceExtras::update`], plan again, replay.
    ///
    /// # Safety
    /// As for [`capture()`]: these tensors and the extras stay while the graph is launched.
    ///
    /// # Errors
    /// [`Error::Beyond`] and [`Error::Driver`].
    pub unsafe fn capture_with(
        &mut self,
        forward: &Forward,
        extras: &DeviceExtras,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaGraph, Error> {
        extras.check_rows(forward.problem())?;
        let args = self.raw_with(extras.raw(stream), stream);
        // SAFETY: as above; the caller keeps the extras too.
        unsafe { capture(stream, || forward.run_raw(stream, &args)) }
    }

    /// Waits for the stream and reads what was written.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<DeviceOutput<T>, Error> {
        let mut lse = stream.clone_dtoh(&self.lse).map_err(doing("copying from the GPU"))?;
        lse.truncate(self.rows);
        let (out, strays) = self.out.read(stream)?;
        Ok(DeviceOutput { out, lse, strays })
    }
}

/// A forward on tensors that lie where the caller keeps them, such as a cache that layers share or that is
/// appended to.
#[derive(Debug)]
pub struct ForwardCall<'a, T, K = T, Q = T> {
    /// Q, `[batch, seqlen_q, heads_q, head_dim]`.
    pub q: &'a DeviceTensor<Q>,
    /// K, `[batch, seqlen_k, heads_kv, head_dim]`, or `[pages, page, heads_kv, head_dim]`.
    pub k: &'a DeviceTensor<K>,
    /// V, in the same shape with `head_dim_v`.
    pub v: &'a DeviceTensor<K>,
    /// O, `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub out: &'a mut DeviceTensor<T>,
    /// LSE, `[batch, heads_q, seqlen_q]`, or `[heads_q, total_q]` of packed queries.
    pub lse: Option<&'a mut CudaSlice<f32>>,
    /// [`Forward::workspace_bytes`] bytes, zero before the first call; calls of a stream may share it.
    pub workspace: &'a mut CudaSlice<u8>,
    /// Starts and lengths of sequences, page table, slopes and sinks.
    pub extras: &'a DeviceExtras,
    /// As [`DeviceForward::page_faults`].
    pub page_faults: Option<&'a mut CudaSlice<u32>>,
}

impl<T: Half, K: Stored + KvElement, Q: Stored + KvElement> ForwardCall<'_, T, K, Q> {
    /// Launches `forward` on `stream`: allocates nothing, waits for nothing, and can be captured
    /// ([`capture()`]).
    ///
    /// # Errors
    /// A stride, an alignment or a length that does not fit, [`Error::Beyond`] for packed sequences that have
    /// more rows than the problem, a stream or a tensor of another context, [`Error::Driver`].
    pub fn run(self, forward: &Forward, stream: &CudaStream) -> Result<(), Error> {
        self.extras.check_rows(forward.problem())?;
        let page_faults = self.page_faults.map(|faults| faults as &mut dyn DevicePtrMut<u32>);
        let args = ForwardArgs {
            q: self.q.input(),
            k: self.k.input(),
            v: self.v.input(),
            out: self.out.output(),
            lse: self.lse.map(|lse| lse as &mut dyn DevicePtrMut<f32>),
            workspace: Some(self.workspace),
            extras: Extras { page_faults, ..self.extras.args() },
        };
        // SAFETY: starts were checked when they were copied to the GPU, and against the problem now.
        unsafe { forward.run(stream, args) }
    }
}

/// What `launch` puts on `stream` (not the default one), as a CUDA graph.
///
/// # Safety
/// A graph holds addresses: all memory that `launch` uses stays where it is while the graph is launched and
/// runs, and nothing else uses it then in a way that `launch` itself would not allow.
///
/// # Errors
/// What `launch` refuses, and [`Error::Driver`].
pub unsafe fn capture(
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
        source: DriverError(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
    })
}
