//! The kernels of each GPU, bound to the problems that came, and the workspaces of its streams.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use candle_core::Result;
use fa_attn::device::{Bound, Gpu};
use fa_core::{Lengths, Pass, Problem, ProblemKey, Side, SideRows};
use fa_kernels::Kernels;
use fa_kernels::cudarc::driver::sys::CUstreamCaptureStatus;
use fa_kernels::cudarc::driver::{CudaContext, CudaSlice, CudaStream};

use crate::error::refused;

/// Problems that are remembered at the most: lengths that never come again must not fill the memory.
const REMEMBERED: usize = 4096;

/// Up to so many queries of a sequence are a step of decoding, whose keys grow from step to step.
const DECODE: usize = 16;

/// Kernels are chosen for lengths rounded up to these, so that a new length is not a new choice.
const KEYS: usize = 128;
const ROWS: usize = 1024;

/// A GPU's kernels, for all of candle's devices on it.
pub(crate) struct Device {
    gpu: Gpu,
    bound: Mutex<HashMap<(ProblemKey, Pass), Arc<Bound>>>,
    workspaces: Mutex<HashMap<Turns, CudaSlice<u8>>>,
}

/// A stream, on which launches take turns: by its handle and the thread, since each thread has a stream of
/// its own behind the handle that candle's devices have.
type Turns = (usize, ThreadId);

/// Workspaces that are kept at the most: threads come and go.
const WORKSPACES: usize = 64;

impl Device {
    /// That of a context; made when it is first asked for, and kept.
    pub(crate) fn of(context: &Arc<CudaContext>) -> Result<Arc<Device>> {
        static DEVICES: Mutex<Vec<Arc<Device>>> = Mutex::new(Vec::new());
        let mut devices = lock(&DEVICES);
        if let Some(device) = devices.iter().find(|device| **device.gpu.context() == **context) {
            return Ok(device.clone());
        }
        let kernels = Kernels::new(context).map_err(refused)?;
        let made = Device { gpu: Gpu::with(kernels), bound: Mutex::default(), workspaces: Mutex::default() };
        let device = Arc::new(made);
        devices.push(device.clone());
        Ok(device)
    }

    /// The kernel for a pass of `problem`: chosen, compiled and checked when it first comes.
    pub(crate) fn bind(&self, problem: &Problem, pass: Pass) -> Result<Arc<Bound>> {
        let key = (ProblemKey::from(problem), pass);
        if let Some(bound) = lock(&self.bound).get(&key) {
            return Ok(bound.clone());
        }
        let bound = Arc::new(self.choose(problem, pass).map_err(refused)?);
        let mut known = lock(&self.bound);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(key, bound.clone());
        Ok(bound)
    }

    fn choose(&self, problem: &Problem, pass: Pass) -> std::result::Result<Bound, fa_attn::Error> {
        let like = rounded(problem);
        if like == *problem || like.check().is_err() {
            return self.gpu.bind(problem, pass);
        }
        let chosen = self.gpu.bind(&like, pass)?;
        // A kernel for the rounded lengths serves others; what it should refuse is chosen for as it is.
        self.gpu.bind_spec(problem, chosen.spec()).or_else(|_| self.gpu.bind(problem, pass))
    }

    /// Runs `launch` with a workspace of at least `bytes` bytes, which is zero and left so; `None` for 0.
    pub(crate) fn with_workspace<R>(
        &self,
        stream: &Arc<CudaStream>,
        bytes: usize,
        launch: impl FnOnce(Option<&mut CudaSlice<u8>>) -> Result<R>,
    ) -> Result<R> {
        if bytes == 0 {
            return launch(None);
        }
        let room = |bytes| {
            let made = stream.alloc_zeros::<u8>(bytes);
            let doing = "allocating device memory";
            made.map_err(|source| refused(fa_kernels::Error::Driver { doing, source }))
        };
        let status = stream.capture_status();
        if !matches!(status, Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)) {
            // Memory of a graph is the graph's alone.
            return launch(Some(&mut room(bytes)?));
        }
        let mut workspaces = lock(&self.workspaces);
        let at: Turns = (stream.cu_stream() as usize, std::thread::current().id());
        if workspaces.len() >= WORKSPACES && !workspaces.contains_key(&at) {
            drop(workspaces);
            return launch(Some(&mut room(bytes)?));
        }
        if workspaces.get(&at).is_none_or(|have| have.num_bytes() < bytes) {
            workspaces.insert(at, room(bytes.next_power_of_two())?);
        }
        launch(workspaces.get_mut(&at))
    }
}

/// A problem like this one, whose kernel is as good for this.
fn rounded(problem: &Problem) -> Problem {
    let lengths = &problem.lengths;
    let side = |side: Side, grows: bool| {
        let up = |len: usize| if grows { len.next_multiple_of(KEYS) } else { len };
        let rows = match side.rows {
            SideRows::Padded { len } => SideRows::Padded { len: up(len) },
            SideRows::Packed { total, max } => {
                SideRows::Packed { total: total.next_multiple_of(ROWS), max: up(max) }
            }
            SideRows::Paged { page, pages, max } => SideRows::Paged { page, pages, max: up(max) },
        };
        Side { rows, used: side.used }
    };
    let keys = side(lengths.k(), lengths.max_q() <= DECODE);
    Problem { lengths: Lengths::of(lengths.sequences(), side(lengths.q(), false), keys), ..*problem }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind them is whole whatever a panicking thread was doing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn steps_of_decoding_and_packed_batches_share_a_choice() {
        let square = Problem::square(2, 1, 8, 64, Mask::FULL, Dtype::F16);
        let of = |lengths| rounded(&Problem { lengths, ..square }).lengths;
        assert_eq!(of(Lengths::uniform(2, 1, 129)), Lengths::uniform(2, 1, 256));
        assert_eq!(of(Lengths::uniform(2, 1, 256)), Lengths::uniform(2, 1, 256));
        assert_eq!(of(Lengths::uniform(2, 100, 129)), Lengths::uniform(2, 100, 129));
        let packed = of(Lengths::packed(3, 1000, 1025, 500, 500));
        assert_eq!(packed, Lengths::packed(3, 1024, 2048, 500, 500));
    }
}
