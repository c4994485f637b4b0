//! The kernels of each GPU, bound to the problems that came, and the workspaces of its streams.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use candle_core::Result;
use fa_attn::device::{BindOptions, Bound, Gpu};
use fa_attn::{Tuning, TuningOutcome};
use fa_core::{Pass, Problem, ProblemKey};
use fa_kernels::Kernels;
use fa_kernels::cudarc::driver::sys::CUstreamCaptureStatus;
use fa_kernels::cudarc::driver::{CudaContext, CudaSlice, CudaStream};

use crate::error::refused;

/// Problems that are remembered at the most: lengths that never come again must not fill the memory.
const REMEMBERED: usize = 4096;

/// A GPU's kernels, for all of candle's devices on it.
pub(crate) struct Device {
    gpu: Gpu,
    bound: Mutex<Kept>,
    workspaces: Mutex<HashMap<Turns, CudaSlice<u8>>>,
}

/// Bound kernels, and how many winners of tuning there were when the first of them was bound.
#[derive(Default)]
struct Kept {
    bound: HashMap<(ProblemKey, Pass), Arc<Bound>>,
    winners: u64,
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
        let gpu = Gpu::with(Kernels::new(context).map_err(refused)?);
        let tuning = Tuning::from_environment().map_err(refused)?;
        if tuning != Tuning::Off {
            gpu.set_tuning(tuning).map_err(refused)?;
        }
        let made = Device { gpu, bound: Mutex::default(), workspaces: Mutex::default() };
        let device = Arc::new(made);
        devices.push(device.clone());
        Ok(device)
    }

    /// The kernel for a pass of `problem`: chosen, compiled and checked when it first comes.
    pub(crate) fn bind(&self, problem: &Problem, pass: Pass) -> Result<Arc<Bound>> {
        let key = (ProblemKey::from(problem), pass);
        let winners = self.gpu.tuned_winners();
        {
            let mut kept = lock(&self.bound);
            if kept.winners != winners {
                *kept = Kept { winners, ..Kept::default() };
            } else if let Some(bound) = kept.bound.get(&key) {
                return Ok(bound.clone());
            }
        }
        let options = BindOptions::default().with_rounded(true);
        let bound = Arc::new(self.gpu.bind(problem, pass, &options).map_err(refused)?);
        let known = &mut lock(&self.bound).bound;
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(key, bound.clone());
        Ok(bound)
    }

    fn set_tuning(&self, tuning: Tuning) -> Result<()> {
        self.gpu.set_tuning(tuning).map_err(refused)?;
        // What is bound again is measured.
        lock(&self.bound).bound.clear();
        Ok(())
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

/// Switches tuning on or off for the GPU of `device`: kernels are measured in the background of the first
/// calls, the winners used from the next call on. [`Tuning`] says what happens when; captured graphs keep
/// their kernels. Without a call, `FA_TUNE=auto` switches it on for every GPU of the process.
///
/// ```no_run
/// let device = candle_core::Device::new_cuda(0)?;
/// fa_candle::set_tuning(&device, fa_candle::Tuning::ON_FIRST_USE)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// [`fa_attn::Error::NothingToTune`] for a device that is no CUDA GPU, unless tuning is switched off; else
/// those of [`Gpu::set_tuning`].
pub fn set_tuning(device: &candle_core::Device, tuning: Tuning) -> Result<()> {
    match device {
        candle_core::Device::Cuda(cuda) => Device::of(cuda.cuda_stream().context())?.set_tuning(tuning),
        candle_core::Device::Cpu | candle_core::Device::Metal(_) if tuning == Tuning::Off => Ok(()),
        candle_core::Device::Cpu => Err(refused(fa_attn::Error::NothingToTune { backend: "CPU" })),
        candle_core::Device::Metal(_) => Err(refused(fa_attn::Error::NothingToTune { backend: "Metal" })),
    }
}

/// Waits until no problem is left to be measured on the GPU of `device`; what came of those since the last
/// call. Nothing on other devices.
///
/// # Errors
/// A GPU that kernels do not run on.
pub fn finish_tuning(device: &candle_core::Device) -> Result<Vec<TuningOutcome>> {
    match device {
        candle_core::Device::Cuda(cuda) => Ok(Device::of(cuda.cuda_stream().context())?.gpu.finish_tuning()),
        candle_core::Device::Cpu | candle_core::Device::Metal(_) => Ok(Vec::new()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind them is whole whatever a panicking thread was doing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_nothing_to_tune() {
        let cpu = candle_core::Device::Cpu;
        let error = set_tuning(&cpu, Tuning::ON_FIRST_USE).expect_err("no GPU").to_string();
        assert!(error.contains("the CPU has nothing to tune"), "{error}");
        set_tuning(&cpu, Tuning::Off).expect("it is off");
        assert!(finish_tuning(&cpu).expect("nothing to wait for").is_empty());
    }
}
