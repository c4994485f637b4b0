//! A worker's GPU, and what cases share.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fa_attn::device::{BindOptions, Bound, Clean, Gpu, first_clean};
use fa_core::{Family, KernelSpec, Pass, TensorLayout};
use fa_kernels::{Backward, Forward};
use fa_planner::plan::PlanError;
use half::bf16;

use super::choose::{self, Chosen};
use crate::device::{self, Calls, Timing, median, time};
use crate::error::{Error, Result};
use crate::grid::{Arrangement, Case};
use crate::tensors::{Inputs, random_dout};
use crate::validate::event::{Event, PassedOver, tell};

pub(super) struct Session {
    pub gpu: Gpu,
    pub family: Family,
    /// One case at a time is on the GPU. The holder must not start work in rayon: that could run another
    /// case, which would wait for the same lock.
    timed: Mutex<Timed>,
    /// Kernels that were chosen for cases together, by [`Case::name`].
    chosen: Chosen,
    /// Inputs and oracles of problems that several cases share, by [`Case::problem_name`].
    shared: HashMap<String, Arc<dyn Any + Send + Sync>>,
}

/// Tensors of problems that several kernels are timed on.
type Timed = HashMap<String, Calls<bf16>>;

/// The result of a case.
pub(super) struct Found {
    pub kernel: String,
    pub passed: bool,
    pub ratio: f64,
    pub detail: String,
    pub ms: Option<f64>,
    pub passed_over: Vec<PassedOver>,
}

impl Found {
    /// The result of a kernel without an error so far.
    pub(super) fn of(kernel: &fa_core::KernelSpec) -> Found {
        Found::by(&kernel.to_string())
    }

    /// The same of a kernel by its name.
    pub(super) fn by(kernel: &str) -> Found {
        Found {
            kernel: kernel.to_owned(),
            passed: true,
            ratio: 0.0,
            detail: String::new(),
            ms: None,
            passed_over: Vec::new(),
        }
    }
}

impl Session {
    /// Opens the GPU for kernels of `family`, or of the fastest family that it runs.
    ///
    /// # Errors
    /// Where there is no GPU, or it does not run the family.
    pub(super) fn open(family: Option<Family>) -> Result<Session> {
        let gpu = device::open()?;
        let family = family.unwrap_or(Family::native(gpu.arch()));
        if !family.runs_on(gpu.arch()) {
            return Err(PlanError::Family { family, arch: gpu.arch() }.into());
        }
        Ok(Session {
            gpu,
            family,
            timed: Mutex::default(),
            chosen: Chosen::default(),
            shared: HashMap::new(),
        })
    }

    /// Keeps inputs and oracles that several cases share, by [`Case::problem_name`].
    pub(super) fn share(&mut self, shared: HashMap<String, Arc<dyn Any + Send + Sync>>) {
        self.shared = shared;
    }

    /// Inputs and oracles of a case: those that are shared for its problem, or those that `prepare` computes.
    ///
    /// # Errors
    /// Those of `prepare`.
    pub(super) fn prepared<P: Any + Send + Sync>(
        &self,
        case: &Case,
        prepare: impl FnOnce(&Case) -> Result<P>,
    ) -> Result<Arc<P>> {
        let shared = self.shared.get(&case.problem_name()).cloned();
        match shared.and_then(|shared| shared.downcast().ok()) {
            Some(shared) => Ok(shared),
            None => Ok(Arc::new(prepare(case)?)),
        }
    }

    /// Starts a case on the GPU, the only one until the guard is dropped.
    pub(super) fn begin(&self, case: &Case) -> impl Drop + '_ {
        let guard: MutexGuard<'_, Timed> = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&Event::Begin(case.name()));
        guard
    }

    /// The forward of a case, and the kernels that were skipped for it.
    ///
    /// # Errors
    /// Those of planning, compiling and loading.
    pub(super) fn forward(&self, case: &Case) -> Result<(Forward, Vec<PassedOver>), fa_attn::Error> {
        let named = case.kernel.as_ref().filter(|_| !case.pass.is_backward());
        let bind = |spec: &KernelSpec| self.forward_by(case, spec);
        match (named, self.chosen.forward(case)) {
            (Some(named), _) => Ok((bind(&named.spec)?, Vec::new())),
            (None, Some(spec)) => Ok(self.first_clean(case, Pass::Forward, spec, bind)?),
            (None, None) if case.split => match choose::splitting(case, self.gpu.arch(), self.family) {
                Ok(spec) => Ok(self.first_clean(case, Pass::Forward, &spec, bind)?),
                // No kernel of the family loads these pages: the library goes on to the next family.
                Err(fa_attn::Error::Plan(PlanError::NoneFits { .. })) => self.own_forward(case),
                Err(error) => Err(error),
            },
            (None, None) => self.own_forward(case),
        }
    }

    fn forward_by(&self, case: &Case, spec: &KernelSpec) -> Result<Forward, fa_kernels::Error> {
        self.gpu.kernels.forward(&case.problem, &self.gpu.launch_plan(&case.problem, spec, None))
    }

    /// The library's own choice, also of the forward before a backward. Where the case compares it with its
    /// twin, both have to compile cleanly.
    fn own_forward(&self, case: &Case) -> Result<(Forward, Vec<PassedOver>), fa_attn::Error> {
        let family = self.other_family().filter(|_| !case.pass.is_backward());
        let options = BindOptions::default().with_family(family);
        let own = self.gpu.bind(&case.problem, Pass::Forward, &options)?.forward()?;
        if choose::twin_reads(case).is_none() {
            return Ok((own, Vec::new()));
        }
        let bind = |spec: &KernelSpec| self.forward_by(case, spec);
        Ok(self.first_clean(case, Pass::Forward, &own.kernel().spec, bind)?)
    }

    /// `chosen`, or the next of the planner's kernels that compiles cleanly, by the library's own rule. Where
    /// the case compares a kernel with its twin, both have to.
    fn first_clean<P>(
        &self,
        case: &Case,
        pass: Pass,
        chosen: &KernelSpec,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Result<(P, Vec<PassedOver>), fa_kernels::Error> {
        let specs = choose::ranked(case, pass, self.gpu.arch(), self.family, chosen);
        let found = first_clean(specs, |spec| {
            if let Some(reads) = choose::twin_reads(case) {
                self.gpu.kernels.load(&choose::with_reads(spec, reads))?;
            }
            bind(spec)
        })?;
        let Clean { bound, refused, .. } = found.expect("the list begins with the chosen kernel");
        Ok((bound, refused.iter().filter_map(PassedOver::of).collect()))
    }

    /// Uses these kernels from now on.
    pub(super) fn choose(&mut self, chosen: Chosen) {
        self.chosen = chosen;
    }

    /// The backward of a case, and the kernels that were skipped for it.
    ///
    /// # Errors
    /// Those of planning, compiling and loading.
    pub(super) fn backward(
        &self,
        case: &Case,
        deterministic: bool,
    ) -> Result<(Backward, Vec<PassedOver>), fa_attn::Error> {
        let bind = |spec: &KernelSpec| {
            self.gpu.kernels.backward(&case.problem, &self.gpu.launch_plan(&case.problem, spec, None))
        };
        match (&case.kernel, self.chosen.backward(case)) {
            (Some(named), _) => Ok((bind(&named.spec)?, Vec::new())),
            (None, Some(spec)) => Ok(self.first_clean(case, case.pass, spec, bind)?),
            (None, None) => {
                let options = BindOptions::default().with_family(self.other_family());
                let bound = self.gpu.bind(&case.problem, Pass::Backward { deterministic }, &options)?;
                Ok((bound.backward()?, Vec::new()))
            }
        }
    }

    /// The kernel to compile for a case ahead of time, if it is known.
    pub(super) fn first_choice(&self, case: &Case) -> Option<KernelSpec> {
        let chosen =
            if case.pass.is_backward() { self.chosen.backward(case) } else { self.chosen.forward(case) };
        match (&case.kernel, chosen) {
            (Some(named), _) => Some(named.spec.clone()),
            (None, Some(spec)) => Some(spec.clone()),
            (None, None) => choose::first(case, self.gpu.arch(), self.family),
        }
    }

    /// The family that is validated where the library's own choice is of another.
    pub(super) fn other_family(&self) -> Option<Family> {
        (self.family != Family::native(self.gpu.arch())).then_some(self.family)
    }

    /// Times the kernel on tensors that stay on the GPU for the next one.
    pub(super) fn measure(&self, case: &Case, pass: &Bound, forward: Option<&Forward>) -> Result<Found> {
        // Over a thousand kernels are measured, with launches of milliseconds: few samples are enough.
        const TIMING: Timing = Timing { warm_up_ms: 3.0, samples: 5, sample_ms: 0.5 };
        let key = case.problem_name();
        let inputs = {
            let timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
            (!timed.contains_key(&key)).then_some(())
        }
        .map(|()| Inputs::<bf16>::random(&case.problem, TensorLayout::Bshd, case.seed()));
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        tell(&Event::Begin(case.name()));
        if let Some(inputs) = inputs
            && !timed.contains_key(&key)
        {
            let calls = match (pass, forward) {
                (Bound::Backward(backward), Some(forward)) => {
                    let dout = random_dout(&inputs, case.seed());
                    Calls::new(&self.gpu, forward, Some((backward, &dout)), &inputs)?
                }
                (Bound::Forward(forward), _) => Calls::new(&self.gpu, forward, None, &inputs)?,
                (Bound::Backward(_), None) => unreachable!("gradients are measured after a forward"),
            };
            timed.insert(key.clone(), calls);
        }
        let calls = timed.get_mut(&key).expect("inserted above, by this thread or another");
        // Kernels differ in their workspaces.
        calls.ready(pass, &self.gpu.stream)?;
        let times = time(&self.gpu, pass, calls, TIMING)?;
        let ms = median(&times);
        let rate = case.problem.flops(case.pass) / ms / 1e9;
        let detail = format!("{ms:.4} ms, {rate:.0} TFLOP/s");
        Ok(Found { detail, ms: Some(ms), ..Found::of(pass.spec()) })
    }

    pub(super) fn check_memory(&self, case: &Case) -> Result<()> {
        let (need, have) = (case.device_bytes(), self.gpu.context().total_mem()? as u64);
        if need > have / 10 * 8 {
            return Err(Error::NotTried(format!("needs {need} B of device memory, the GPU has {have} B")));
        }
        if case.arrangement == Arrangement::SharedRows && case.problem.lengths.max_k() == 0 {
            return Err(Error::NotTried("there are no keys to share".to_owned()));
        }
        Ok(())
    }
}
