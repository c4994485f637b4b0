//! A pass bound to a problem, to be run any number of times on host tensors.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fa_core::program::DirectGradients;
use fa_core::{Dtype, Family, KernelSpec, Pass, Problem, counted};
use fa_cpu::tiled::{self, BackwardInputs};
use serde::Serialize;

use crate::cpu::Cpu;
use crate::device::{Bound, Gpu};
use crate::direct;
use crate::element::Element;
use crate::error::Error;
#[cfg(feature = "reference")]
use crate::reference;
use crate::tensors::{BackwardTensors, ForwardTensors, Tensors};

/// One pass of a problem, planned, checked and bound by [`crate::Engine::bind`]. Shared by threads.
#[derive(Debug)]
pub struct Call {
    problem: Problem,
    /// What is computed: [`Problem::with_mods_built_in`].
    computed: Problem,
    pass: Pass,
    implementation: Implementation,
    passed_over: Option<String>,
}

/// What runs a call.
#[derive(Debug)]
pub(crate) enum Implementation {
    #[cfg(feature = "reference")]
    Reference(Cpu),
    Tiled(Cpu),
    /// With what the host gathers and adds up, if anything.
    Gpu(Arc<Gpu>, Box<Bound>, Option<Box<DirectGradients>>),
}

/// What a [`Call`] runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `cpu`, `reference` or `cuda`.
    pub backend: &'static str,
    /// The name of the GPU kernel's spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The GPU kernel's family.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub family: Option<Family>,
    /// Instruction set of the CPU's tiled kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isa: Option<&'static str>,
    /// CPU threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// The GPU's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Why `Auto` does not use the GPU, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_passed_over: Option<String>,
}

impl Report {
    /// The backend and its hardware in one line, without the kernel and the reason for not using the GPU.
    pub fn text(&self) -> String {
        let threads = self.threads.map(|threads| counted(threads, "thread"));
        let parts = [Some(self.backend.to_owned()), self.gpu.clone(), self.isa.map(str::to_owned), threads];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

impl Call {
    pub(crate) fn new(
        problem: &Problem,
        pass: Pass,
        implementation: Implementation,
        passed_over: Option<String>,
    ) -> Call {
        let computed = problem.with_mods_built_in(&[]);
        Call { problem: *problem, computed, pass, implementation, passed_over }
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The pass.
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// The GPU kernel that runs; `None` on the CPU.
    pub fn spec(&self) -> Option<&KernelSpec> {
        self.bound().map(Bound::spec)
    }

    /// The bound GPU kernel, for launches on tensors that stay on the GPU ([`crate::device`]); `None` on the
    /// CPU. Where the host gathers a program's arrays it is that of the posed problem, which
    /// [`Gpu::bind_gathered`] binds for such tensors.
    pub fn bound(&self) -> Option<&Bound> {
        match &self.implementation {
            Implementation::Gpu(_, bound, _) => Some(bound),
            #[cfg(feature = "reference")]
            Implementation::Reference(_) => None,
            Implementation::Tiled(_) => None,
        }
    }

    /// How the CPU's tiled kernels compute a forward; `None` where another implementation or pass runs.
    ///
    /// # Errors
    /// As [`tiled::plan`].
    pub fn cpu_plan(&self) -> Result<Option<tiled::Plan>, Error> {
        let cpu = match &self.implementation {
            Implementation::Tiled(cpu) => cpu,
            Implementation::Gpu(..) => return Ok(None),
            #[cfg(feature = "reference")]
            Implementation::Reference(_) => return Ok(None),
        };
        match self.pass {
            Pass::Forward => Ok(Some(cpu.install_tiled(|| tiled::plan(cpu.options(), &self.computed))?)),
            Pass::Backward { .. } => Ok(None),
        }
    }

    /// What runs.
    pub fn report(&self) -> Report {
        let spec = self.spec();
        let (backend, isa, threads, gpu) = match &self.implementation {
            #[cfg(feature = "reference")]
            Implementation::Reference(cpu) => ("reference", None, Some(cpu.threads()), None),
            Implementation::Tiled(cpu) => ("cpu", Some(cpu.isa.name()), Some(cpu.threads()), None),
            Implementation::Gpu(gpu, ..) => ("cuda", None, None, Some(gpu.name())),
        };
        Report {
            backend,
            kernel: spec.map(KernelSpec::to_string),
            family: spec.map(|spec| spec.kernel.family()),
            isa,
            threads,
            gpu,
            gpu_passed_over: self.passed_over.clone(),
        }
    }

    pub(crate) fn gpu_passed_over(&self) -> Option<&str> {
        self.passed_over.as_deref()
    }

    /// Whether the GPU runs it.
    pub fn is_on_gpu(&self) -> bool {
        self.bound().is_some()
    }

    /// Computes the pass on host tensors, [`ForwardTensors`] or [`BackwardTensors`]. On the GPU they are
    /// copied there and back; for tensors that stay there, see [`crate::device`].
    ///
    /// # Errors
    /// [`Error::Pass`] and [`Error::Dtype`] for tensors of another pass or type, errors for shapes that are
    /// not the problem's, and what the GPU reports. The outputs are then unchanged.
    pub fn run<'a, T: Element>(&self, tensors: impl Into<Tensors<'a, T>>) -> Result<(), Error> {
        self.execute(tensors.into(), 1).map(drop)
    }

    /// [`Call::run`], and the time of the computation without copies. On the GPU it is the time of a second
    /// launch, because the first one loads code.
    ///
    /// # Errors
    /// As [`Call::run`].
    pub fn time<'a, T: Element>(&self, tensors: impl Into<Tensors<'a, T>>) -> Result<Duration, Error> {
        self.execute(tensors.into(), 2)
    }

    fn execute<T: Element>(&self, tensors: Tensors<'_, T>, launches: usize) -> Result<Duration, Error> {
        let dtype: Dtype = self.problem.types.wide();
        if T::dtype() != dtype {
            return Err(Error::Dtype { got: T::dtype(), need: dtype });
        }
        if std::mem::discriminant(&tensors.pass()) != std::mem::discriminant(&self.pass) {
            return Err(Error::Pass { bound: self.pass, given: tensors.pass() });
        }
        // A program that is built in reads nothing.
        let is_built_in = self.computed.score.program.is_none() && self.problem.score.program.is_some();
        fn left<T>(tensors: Tensors<'_, T>, is_built_in: bool) -> Tensors<'_, T> {
            if is_built_in { tensors.without_program() } else { tensors }
        }
        match (&self.implementation, tensors) {
            (Implementation::Gpu(gpu, bound, Some(direct)), Tensors::Backward(tensors)) => {
                direct::run(direct, tensors, |tensors| T::run(gpu, bound, tensors, launches))
            }
            (Implementation::Gpu(gpu, bound, _), tensors) => {
                T::run(gpu, bound, left(tensors, is_built_in), launches)
            }
            (Implementation::Tiled(cpu), tensors) => match left(tensors, is_built_in) {
                Tensors::Forward(tensors) => self.tiled_forward(cpu, tensors),
                Tensors::Backward(tensors) => self.tiled_backward(cpu, tensors),
            },
            #[cfg(feature = "reference")]
            (Implementation::Reference(cpu), tensors) => reference::run(&self.problem, cpu, tensors),
        }
    }

    fn tiled_forward<T: Element>(
        &self,
        cpu: &Cpu,
        tensors: ForwardTensors<'_, T>,
    ) -> Result<Duration, Error> {
        let arguments = tensors.arguments();
        let ForwardTensors { q, k, v, mut out, lse, .. } = tensors;
        let (options, problem) = (cpu.options(), &self.computed);
        let start = Instant::now();
        cpu.install_tiled(|| {
            tiled::forward_extras(options, problem, arguments, q, k, v, &mut out, Some(lse))
        })?;
        Ok(start.elapsed())
    }

    fn tiled_backward<T: Element>(
        &self,
        cpu: &Cpu,
        tensors: BackwardTensors<'_, T>,
    ) -> Result<Duration, Error> {
        let arguments = tensors.arguments();
        let BackwardTensors { q, k, v, out, lse, dout, mut dq, mut dk, mut dv, dsinks, darrays, .. } =
            tensors;
        let inputs = BackwardInputs { q, k, v, out, lse, dout };
        let (options, problem) = (cpu.options(), &self.computed);
        let start = Instant::now();
        cpu.install_tiled(|| {
            let (dq, dk, dv) = (&mut dq, &mut dk, &mut dv);
            tiled::backward_program(options, problem, arguments, &inputs, dq, dk, dv, dsinks, darrays)
        })?;
        Ok(start.elapsed())
    }
}
