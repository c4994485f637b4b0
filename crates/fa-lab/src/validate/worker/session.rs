//! A worker's GPU, and what its cases share.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fa_core::{Family, TensorLayout};
use fa_kernels::Forward;
use half::bf16;

use crate::device::{Bound, Device, PassCall, Timing, median};
use crate::error::{Error, Result};
use crate::grid::{Case, Placing};
use crate::tensors::{Inputs, random_dout};
use crate::validate::event::{Event, tell};

pub(super) struct Session {
    pub device: Device,
    pub family: Family,
    /// One case at a time is on the GPU. Whoever holds it must not start work in rayon: that could take up another case,
    /// which would wait for the same lock.
    gpu: Mutex<Timed>,
    /// Inputs and oracles of problems that several cases have, by [`Case::problem_name`].
    shared: HashMap<String, Box<dyn Any + Send + Sync>>,
}

/// Tensors of problems that several kernels are timed on.
type Timed = HashMap<String, Vec<PassCall<bf16>>>;

/// What came of a case.
pub(super) struct Found {
    pub kernel: String,
    pub passed: bool,
    pub ratio: f64,
    pub detail: String,
    pub ms: Option<f64>,
}

impl Found {
    /// Of a kernel that nothing is wrong with yet.
    pub fn of(kernel: &fa_core::KernelSpec) -> Found {
        Found { kernel: kernel.to_string(), passed: true, ratio: 0.0, detail: String::new(), ms: None }
    }
}

impl Session {
    /// Opens the GPU for kernels of `family`, or of the fastest family that it runs.
    ///
    /// # Errors
    /// Where there is no GPU, or it does not run the family.
    pub fn open(family: Option<Family>) -> Result<Session> {
        let device = Device::open()?;
        let family = family.unwrap_or(Family::native(device.kernels.arch()));
        if !family.runs_on(device.kernels.arch()) {
            let arch = device.kernels.arch();
            let message = format!("{arch} has no wgmma: use --arch sm80, whose kernels run there");
            return Err(Error::Request(message));
        }
        Ok(Session { device, family, gpu: Mutex::default(), shared: HashMap::new() })
    }

    /// Keeps what several cases share, by [`Case::problem_name`].
    pub fn share(&mut self, shared: HashMap<String, Box<dyn Any + Send + Sync>>) {
        self.shared = shared;
    }

    /// What was shared of a case's problem.
    pub fn shared<M: 'static>(&self, case: &Case) -> Option<&M> {
        self.shared.get(&case.problem_name())?.downcast_ref()
    }

    /// Puts a case on the GPU: the only one until the guard is dropped.
    pub fn begin(&self, case: &Case) -> impl Drop + '_ {
        let guard: MutexGuard<'_, Timed> = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&Event::Begin(case.name()));
        guard
    }

    pub fn forward(&self, case: &Case) -> Result<Forward, fa_kernels::Error> {
        // The forward before a backward is the library's own.
        let own = case.kernel.as_ref().filter(|_| !case.pass.is_backward()).map(|named| &named.spec);
        if own.is_some() || case.pass.is_backward() || self.is_native() {
            return self.device.forward(&case.problem, own);
        }
        self.device.kernels.forward_of(&case.problem, self.family)
    }

    /// Whether the library's own choice is of the family that is validated.
    pub fn is_native(&self) -> bool {
        self.family == Family::native(self.device.kernels.arch())
    }

    /// Times the kernel on tensors that stay on the GPU for the next one.
    pub fn measure(&self, case: &Case, pass: &Bound, forward: Option<&Forward>) -> Result<Found> {
        // A thousand and more are measured one after the other: launches of milliseconds need no more samples than this.
        const TIMING: Timing = Timing { warm_up_ms: 3.0, samples: 5, sample_ms: 0.5 };
        let key = case.problem_name();
        let inputs = {
            let timed = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
            (!timed.contains_key(&key)).then_some(())
        }
        .map(|()| Inputs::<bf16>::random(&case.problem, TensorLayout::Bshd, case.seed()));
        let mut timed = self.gpu.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&Event::Begin(case.name()));
        if let Some(inputs) = inputs
            && !timed.contains_key(&key)
        {
            let calls = match (pass, forward) {
                (Bound::Backward(backward), Some(forward)) => {
                    let dout = random_dout(&inputs, case.seed());
                    self.device.calls(forward, Some((backward, &dout)), &inputs)?
                }
                (Bound::Forward(forward), _) => self.device.calls(forward, None, &inputs)?,
                (Bound::Backward(_), None) => unreachable!("gradients are measured after a forward"),
            };
            timed.insert(key.clone(), calls);
        }
        let calls = timed.get_mut(&key).expect("inserted above, by this thread or another");
        // Kernels differ in their workspaces.
        calls.iter_mut().try_for_each(|call| call.ready(pass, &self.device.stream))?;
        let times = self.device.time(pass, calls, TIMING)?;
        let ms = median(&times);
        let kernel = pass.spec().to_string();
        let rate = case.problem.flops(case.pass) / ms / 1e9;
        let detail = format!("{ms:.4} ms, {rate:.0} TFLOP/s");
        Ok(Found { kernel, passed: true, ratio: 0.0, detail, ms: Some(ms) })
    }

    pub fn check_memory(&self, case: &Case) -> Result<()> {
        let (need, have) = (case.device_bytes(), self.device.context().total_mem()? as u64);
        if need > have / 10 * 8 {
            return Err(Error::NotTried(format!("needs {need} B of device memory, the GPU has {have} B")));
        }
        if case.placing == Placing::SharedRows && case.problem.seqlen_k == 0 {
            return Err(Error::NotTried("there are no keys to share".to_owned()));
        }
        Ok(())
    }
}
