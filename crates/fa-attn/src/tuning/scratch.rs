//! Candidates compiled and timed on a GPU, on a stream and tensors of the thread that measures.
#![allow(unsafe_code)]

use std::num::NonZero;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fa_core::{KernelSpec, Pass, Problem};
use fa_cpu::OwnedExtras;
use fa_kernels::cudarc::driver::sys::{self, CUevent_flags, CUstreamCaptureMode};
use fa_kernels::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use fa_kernels::{Kernels, driver};
use fa_planner::divide;

use crate::device::{
    Bound, DeviceBackward, DeviceExtras, DeviceForward, DeviceTensor, Half, Placement, shapes,
};
use crate::error::Error;

use super::search::Bench;

/// Random values that inputs are made of, again and again.
const BLOCK: usize = 1 << 20;

/// Milliseconds that a sample lasts at least: short kernels are launched several times within one.
const SAMPLE_MS: f64 = 0.5;

/// Milliseconds of a launch from which on it does not matter what the caches held before.
const LONG_MS: f64 = 5.0;

/// Launches of a sample at the most.
const MOST_LAUNCHES: usize = 50;

/// A stream next to the caller's, and kernels for it.
pub(crate) struct Scratch {
    kernels: Kernels,
    stream: Arc<CudaStream>,
}

impl Scratch {
    /// A handle of the primary context on GPU `ordinal`, for the thread that calls.
    ///
    /// # Errors
    /// What the driver reports.
    pub(crate) fn open(like: &Kernels) -> Result<Scratch, Error> {
        let context: Arc<CudaContext> = driver::context(like.context().ordinal())?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the argument points at a local. It is this thread's mode: allocations here would otherwise
        // invalidate a capture of another thread.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode).result() }
            .map_err(Error::driver("setting the capture mode"))?;
        // SAFETY: all that is allocated by this handle is used on the one stream. With tracking, making the
        // stream would wait for the default one.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(Error::driver("making a stream"))?;
        Ok(Scratch { kernels: like.on(&context)?, stream })
    }

    /// Waits for the stream, so that the memory that a search has freed goes back to the driver.
    pub(crate) fn settle(&self) {
        if let Err(error) = self.stream.synchronize() {
            tracing::warn!(%error, "after tuning");
        }
    }

    /// A search on `problem`, whose clock starts now.
    ///
    /// # Errors
    /// [`Error::TuningMemory`], and what the driver reports.
    pub(crate) fn bench<T: Half>(&self, problem: &Problem, pass: Pass) -> Result<OnGpu<'_, T>, Error> {
        let begun = Instant::now();
        let (free, _) =
            self.stream.context().mem_get_info().map_err(Error::driver("asking for free memory"))?;
        let need = problem.bytes_held(pass) + problem.rows() * 4.0;
        let limit = free / 2;
        if need > limit as f64 {
            return Err(Error::TuningMemory { need: need as usize, limit });
        }
        let tensors = Tensors::new(&self.stream, problem, pass)?;
        let room = limit - need as usize;
        Ok(OnGpu { scratch: self, problem: *problem, tensors, begun, room })
    }
}

/// A pass's tensors; the gradients' are there for a backward.
struct Tensors<T> {
    forward: DeviceForward<T>,
    backward: Option<DeviceBackward<T>>,
}

impl<T: Half> Tensors<T> {
    fn new(stream: &Arc<CudaStream>, problem: &Problem, pass: Pass) -> Result<Tensors<T>, Error> {
        let made = Error::driver("allocating device memory");
        let block: Vec<T> = (0..BLOCK as u64).map(|at| T::from_f64(normal(at))).collect();
        // Copied on the GPU from there on: gigabytes take too long from the host.
        let block = stream.clone_htod(&block).map_err(Error::driver("copying to the GPU"))?;
        let tensor = |shape| -> Result<DeviceTensor<T>, Error> {
            let placement = Placement::packed(shape, fa_core::TensorLayout::Bshd);
            let mut data = stream.alloc_zeros(placement.span()).map_err(&made)?;
            fill(stream, &mut data, &block)?;
            Ok(DeviceTensor { data, placement })
        };
        let [q, k, v, out] = shapes(problem);
        let rows = fa_cpu::check::lse_len(problem);
        // Probabilities of a size as they are where scores are normally distributed.
        let lse = (problem.lengths.max_k().max(1) as f64).ln() + 0.5;
        let lse =
            stream.clone_htod(&vec![lse as f32; rows.max(1)]).map_err(Error::driver("copying to the GPU"))?;
        let empty = || stream.alloc_zeros::<u8>(16).map_err(&made);
        let forward = DeviceForward {
            q: tensor(q)?,
            k: tensor(k)?,
            v: tensor(v)?,
            out: tensor(out)?,
            lse,
            workspace: empty()?,
            rows,
            extras: DeviceExtras::upload(stream, &OwnedExtras::even(problem).view())?,
            page_faults: None,
        };
        let backward = match pass {
            Pass::Forward => None,
            Pass::Backward { .. } => Some(DeviceBackward {
                dout: tensor(out)?,
                dq: tensor(q)?,
                dk: tensor(k)?,
                dv: tensor(v)?,
                dsinks: problem
                    .score
                    .sinks
                    .then(|| stream.alloc_zeros(problem.heads_q))
                    .transpose()
                    .map_err(&made)?,
                workspace: empty()?,
                room: None,
            }),
        };
        Ok(Tensors { forward, backward })
    }
}

/// Fills `to` with copies of `block`.
fn fill<T: Half>(stream: &Arc<CudaStream>, to: &mut CudaSlice<T>, block: &CudaSlice<T>) -> Result<(), Error> {
    let sent = Error::driver("copying on the GPU");
    let len = to.len();
    for from in (0..len).step_by(BLOCK) {
        let count = (len - from).min(BLOCK);
        let mut part = to.slice_mut(from..from + count);
        stream.memcpy_dtod(&block.slice(..count), &mut part).map_err(&sent)?;
    }
    Ok(())
}

/// Of variance 1 and nearly normal, by number: four uniform numbers of SplitMix64 (Steele, Lea and Flood,
/// 2014).
fn normal(at: u64) -> f64 {
    let mut z = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let sum: u64 = (0..4).map(|i| z >> (16 * i) & 0xffff).sum();
    (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt()
}

/// A search on a GPU.
pub(crate) struct OnGpu<'s, T> {
    scratch: &'s Scratch,
    problem: Problem,
    tensors: Tensors<T>,
    begun: Instant,
    /// Bytes that workspaces may take.
    room: usize,
}

/// A candidate, its workspace and how often it is launched in a sample.
pub(crate) struct Candidate {
    bound: Bound,
    workspace: CudaSlice<u8>,
    launches: usize,
    /// Milliseconds of a launch, about.
    ms: f64,
}

impl<T: Half> OnGpu<'_, T> {
    /// Milliseconds of `launches` launches.
    fn time(&mut self, candidate: &mut Candidate, launches: usize) -> Result<f64, Error> {
        let Tensors { forward, backward } = &mut self.tensors;
        let stream = &self.scratch.stream;
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            stream.record_event(flags).map_err(Error::driver("recording an event"))
        };
        let own = backward.as_mut().map_or(&mut forward.workspace, |backward| &mut backward.workspace);
        std::mem::swap(own, &mut candidate.workspace);
        let begin = event()?;
        for _ in 0..launches {
            match (&candidate.bound, &mut *backward) {
                (Bound::Backward(bound), Some(backward)) => backward.run(forward, bound, stream)?,
                (Bound::Forward(bound), _) => forward.run(bound, stream)?,
                (Bound::Backward(_), None) => {
                    return Err(Error::Pass {
                        bound: Pass::Forward,
                        given: Pass::Backward { deterministic: false },
                    });
                }
            }
        }
        let end = event()?;
        stream.synchronize().map_err(Error::driver("waiting for the GPU"))?;
        let own = backward.as_mut().map_or(&mut forward.workspace, |backward| &mut backward.workspace);
        std::mem::swap(own, &mut candidate.workspace);
        Ok(f64::from(begin.elapsed_ms(&end).map_err(Error::driver("reading the time"))?))
    }
}

impl<T: Half> Bench for OnGpu<'_, T> {
    type Ready = Candidate;

    fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    fn compile(&mut self, specs: &[KernelSpec], budget: Duration, stop: &AtomicBool) {
        let (kernels, begun, next) = (&self.scratch.kernels, self.begun, AtomicUsize::new(0));
        let work = || {
            while !stop.load(Ordering::Relaxed) && begun.elapsed() < budget {
                let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                // Remembered with the kernel, and said where it is loaded.
                let _ = kernels.compile(spec);
            }
        };
        // Half of the cores are left to the caller.
        let threads = thread::available_parallelism().map_or(1, NonZero::get).div_ceil(2).min(specs.len());
        thread::scope(|scope| {
            let others = (1..threads).map(|_| thread::Builder::new().spawn_scoped(scope, work));
            // Where a thread cannot be made, fewer compile.
            let _others: Vec<_> = others.collect();
            work();
        });
    }

    fn ready(&mut self, spec: &KernelSpec) -> Result<Candidate, Error> {
        let Scratch { kernels, stream } = self.scratch;
        let plan = divide(&self.problem, spec, kernels.arch(), kernels.sms(), None);
        let bound = Bound::of(kernels, &self.problem, &plan)?;
        let bytes = bound.workspace_bytes().max(16);
        self.room =
            self.room.checked_sub(bytes).ok_or(Error::TuningMemory { need: bytes, limit: self.room })?;
        // Zero before its first use, as kernels ask; kernels cut it up in different ways.
        let workspace = stream.alloc_zeros(bytes).map_err(Error::driver("allocating device memory"))?;
        let mut candidate = Candidate { bound, workspace, launches: 1, ms: 0.0 };
        // The first launch loads code.
        self.time(&mut candidate, 1)?;
        let ms = self.time(&mut candidate, 1)?;
        candidate.ms = ms;
        candidate.launches = ((SAMPLE_MS / ms.max(1e-3)).ceil() as usize).clamp(1, MOST_LAUNCHES);
        Ok(candidate)
    }

    fn sample(&mut self, candidate: &mut Candidate) -> Result<f64, Error> {
        let launches = candidate.launches;
        if candidate.ms < LONG_MS {
            // One that does not count: the caches hold what the kernel before left.
            self.time(candidate, 1)?;
        }
        Ok(self.time(candidate, launches)? / launches as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_about_normal() {
        let values: Vec<f64> = (0..100_000).map(normal).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }
}
