//! Computing attention: which implementation, on how many threads, and what comes out.

use std::time::{Duration, Instant};

use anyhow::Context;
use fa_core::{Pass, Problem, TensorLayout};
use fa_cpu::simd::{Isa, Kernels};
use fa_cpu::tiled::{self, BackwardInputs};
use fa_cpu::{CpuError, TensorMut, TensorRef, check, reference};
use serde::Serialize;

use crate::attention::{Inputs, swap_middle_axes};
use crate::flags::{Backend, CpuArgs};
use crate::on_gpu::{Computed, Gpu};
use crate::safetensors::{NewTensor, Stored};
use crate::term::failure::InputError;

/// An implementation, ready to run.
#[derive(Debug)]
pub struct Engine {
    implementation: Implementation,
    pool: rayon::ThreadPool,
    /// Why `auto` passed the GPU over, where there is one.
    passed_over: Option<String>,
}

#[derive(Debug)]
enum Implementation {
    Reference,
    Tiled(Isa),
    /// With whether gradients must have the same bits in every run.
    Cuda(Box<Gpu>, bool),
}

/// What an [`Engine`] runs, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct EngineReport {
    /// `cpu`, `reference` or `cuda`.
    pub backend: &'static str,
    /// Instruction set of the tiled implementation's kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isa: Option<&'static str>,
    /// CPU threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// The GPU's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Why `auto` passed the GPU over, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_passed_over: Option<String>,
}

impl EngineReport {
    /// In a line.
    pub fn text(&self) -> String {
        let threads = self.threads.map(|threads| format!("{threads} threads"));
        let parts = [Some(self.backend.to_owned()), self.gpu.clone(), self.isa.map(str::to_owned), threads];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// What an implementation gave, packed in the inputs' layout; NaN until it is computed.
#[derive(Debug)]
pub struct Outputs<T> {
    /// `[batch, seqlen_q, heads_q, head_dim_v]` in BSHD terms.
    pub out: Vec<T>,
    /// `[batch, heads_q, seqlen_q]`, natural logarithm.
    pub lse: Vec<f32>,
    /// dQ, dK and dV with the shapes of Q, K and V; `None` without a dO.
    pub gradients: Option<[Vec<T>; 3]>,
}

impl<T: Stored> Outputs<T> {
    /// Room for the results.
    pub fn new(inputs: &Inputs<T>) -> Outputs<T> {
        // NaN shows what an implementation forgets to write, and touching the pages keeps that out of the timing.
        let poison = |[b, s, h, d]: [usize; 4]| vec![T::from_f64(f64::NAN); b * s * h * d];
        let p = &inputs.problem;
        Outputs {
            out: poison(check::out_shape(p)),
            lse: vec![f32::NAN; check::lse_len(p)],
            gradients: inputs
                .dout
                .is_some()
                .then(|| [check::q_shape(p), check::k_shape(p), check::v_shape(p)].map(poison)),
        }
    }

    /// The tensors to write to a file.
    pub fn tensors(&self, inputs: &Inputs<T>) -> Vec<NewTensor> {
        let p = &inputs.problem;
        let shape = |[b, s, h, d]: [usize; 4]| inputs.layout.shape(b, s, h, d);
        let mut tensors = vec![
            NewTensor::new("out", &shape(check::out_shape(p)), &self.out),
            NewTensor::new("lse", &[p.batch, p.heads_q, p.seqlen_q], &self.lse),
        ];
        if let Some([dq, dk, dv]) = &self.gradients {
            tensors.push(NewTensor::new("dq", &shape(check::q_shape(p)), dq));
            tensors.push(NewTensor::new("dk", &shape(check::k_shape(p)), dk));
            tensors.push(NewTensor::new("dv", &shape(check::v_shape(p)), dv));
        }
        tensors
    }
}

impl Engine {
    /// Resolves what was asked for against what this machine has. `auto` takes the GPU where it computes `problem`, for a
    /// backward its gradients too.
    ///
    /// # Errors
    /// [`InputError::Usage`] for an instruction set that the CPU lacks and for flags that the backend does not know; what
    /// the GPU reports; when the system gives no threads.
    pub fn new(backend: Backend, cpu: &CpuArgs, problem: &Problem, pass: Pass) -> anyhow::Result<Engine> {
        let usage = |message: &str| anyhow::Error::from(InputError::Usage(message.to_owned()));
        let mut passed_over = None;
        let cuda = |gpu: Gpu| Implementation::Cuda(Box::new(gpu), pass.deterministic());
        let implementation = match backend {
            Backend::Cpu => Implementation::Tiled(instruction_set(cpu)?),
            Backend::Reference if cpu.isa.is_some() => {
                return Err(usage("--isa chooses the cpu backend's kernels; the reference backend has none"));
            }
            Backend::Reference => Implementation::Reference,
            Backend::Cuda if cpu.isa.is_some() || cpu.threads.is_some() => {
                return Err(usage(
                    "--isa and --threads are the cpu backend's; leave them out with --backend cuda",
                ));
            }
            Backend::Cuda => cuda(ready_gpu(problem, pass)?),
            Backend::Auto => match gpu_for(cpu, problem, pass) {
                Some(Ok(gpu)) => cuda(gpu),
                Some(Err(reason)) => {
                    tracing::warn!(reason, "the GPU is passed over");
                    passed_over = Some(reason);
                    Implementation::Tiled(instruction_set(cpu)?)
                }
                None => Implementation::Tiled(instruction_set(cpu)?),
            },
        };
        let threads = cpu.threads.map_or(0, usize::from);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.with_context(|| format!("cannot start {threads} threads"))?;
        Ok(Engine { implementation, pool, passed_over })
    }

    /// What runs.
    pub fn report(&self) -> EngineReport {
        let threads = Some(self.pool.current_num_threads());
        let (backend, isa, threads, gpu) = match &self.implementation {
            Implementation::Reference => ("reference", None, threads, None),
            Implementation::Tiled(isa) => ("cpu", Some(isa.name()), threads, None),
            Implementation::Cuda(gpu, _) => ("cuda", None, None, Some(gpu.name())),
        };
        EngineReport { backend, isa, threads, gpu, gpu_passed_over: self.passed_over.clone() }
    }

    /// How the tiled implementation computes a forward of `problem`; `None` where another computes.
    ///
    /// # Errors
    /// As [`tiled::plan`], which [`Engine::new`] has ruled out.
    pub fn cpu_plan(&self, problem: &Problem) -> Result<Option<tiled::Plan>, CpuError> {
        match &self.implementation {
            Implementation::Tiled(isa) => self.pool.install(|| tiled::plan(options(*isa), problem)).map(Some),
            Implementation::Reference | Implementation::Cuda(..) => Ok(None),
        }
    }

    /// Computes `out` and `lse`; the time is that of the computation alone.
    ///
    /// # Errors
    /// Tensors that do not fit the problem.
    pub fn forward<T: Computed>(
        &self,
        inputs: &Inputs<T>,
        outputs: &mut Outputs<T>,
    ) -> anyhow::Result<Duration> {
        let problem = &inputs.problem;
        let [q, k, v] = inputs.views()?;
        let shape = check::out_shape(problem);
        match &self.implementation {
            Implementation::Reference => {
                let start = Instant::now();
                let exact = self.pool.install(|| reference::forward(problem, &q, &k, &v))?;
                let time = start.elapsed();
                from_bshd(&exact.out, shape, inputs.layout, &mut outputs.out);
                outputs.lse = exact.lse.iter().map(|&lse| lse as f32).collect();
                Ok(time)
            }
            Implementation::Tiled(isa) => {
                let mut out = TensorMut::packed("out", &mut outputs.out, shape, inputs.layout)?;
                let lse = &mut outputs.lse;
                let start = Instant::now();
                self.pool.install(|| {
                    tiled::forward_with(options(*isa), problem, &q, &k, &v, &mut out, Some(lse))
                })?;
                Ok(start.elapsed())
            }
            Implementation::Cuda(gpu, _) => {
                let mut session = T::open(gpu, inputs)?;
                // The first launch loads code; the second is the one that counts.
                session.run()?;
                let time = session.run()?;
                session.download(outputs)?;
                Ok(time)
            }
        }
    }

    /// Computes the gradients from a finished forward; `None` without a dO. The time is that of the computation alone.
    ///
    /// # Errors
    /// Tensors that do not fit the problem, and what the GPU reports.
    pub fn backward<T: Computed>(
        &self,
        inputs: &Inputs<T>,
        outputs: &mut Outputs<T>,
    ) -> anyhow::Result<Option<Duration>> {
        let problem = &inputs.problem;
        if let Implementation::Cuda(gpu, options) = &self.implementation {
            return T::gradients(gpu, *options, inputs, outputs);
        }
        let [q, k, v] = inputs.views()?;
        let shapes = [check::q_shape(problem), check::k_shape(problem), check::v_shape(problem)];
        let (Some(dout), Some([dq, dk, dv])) = (inputs.dout_view()?, &mut outputs.gradients) else {
            return Ok(None);
        };
        let isa = match &self.implementation {
            Implementation::Tiled(isa) => Some(*isa),
            Implementation::Reference | Implementation::Cuda(..) => None,
        };
        let Some(isa) = isa else {
            let start = Instant::now();
            let exact = self.pool.install(|| reference::backward(problem, &q, &k, &v, &dout))?;
            let time = start.elapsed();
            for ((exact, shape), to) in [exact.dq, exact.dk, exact.dv].iter().zip(shapes).zip([dq, dk, dv]) {
                from_bshd(exact, shape, inputs.layout, to);
            }
            return Ok(Some(time));
        };
        let out = TensorRef::packed("out", &outputs.out, check::out_shape(problem), inputs.layout)?;
        let from = BackwardInputs { q, k, v, out, lse: &outputs.lse, dout };
        let mut dq = TensorMut::packed("dq", dq, shapes[0], inputs.layout)?;
        let mut dk = TensorMut::packed("dk", dk, shapes[1], inputs.layout)?;
        let mut dv = TensorMut::packed("dv", dv, shapes[2], inputs.layout)?;
        let start = Instant::now();
        self.pool
            .install(|| tiled::backward_with(options(isa), problem, &from, &mut dq, &mut dk, &mut dv))?;
        Ok(Some(start.elapsed()))
    }

    /// f32 operations per second that multiply-adds in registers reach on all threads together: the peak that rates are
    /// held against; `None` where the CPU's kernels do not compute. Takes about a tenth of a second.
    pub fn fma_peak(&self) -> Option<f64> {
        const ROUNDS: usize = 20_000;
        const TIME: Duration = Duration::from_millis(100);
        let isa = match &self.implementation {
            Implementation::Tiled(isa) => *isa,
            Implementation::Reference => Isa::detect(),
            Implementation::Cuda(..) => return None,
        };
        let kernels = Kernels::for_isa(isa)?;
        let rates = self.pool.broadcast(|_| {
            let start = Instant::now();
            let mut operations = 0.0;
            let mut elapsed = Duration::ZERO;
            while elapsed < TIME {
                operations += kernels.multiply_adds(ROUNDS);
                elapsed = start.elapsed();
            }
            operations / elapsed.as_secs_f64()
        });
        Some(rates.into_iter().sum())
    }
}

fn options(isa: Isa) -> tiled::Options {
    tiled::Options { isa: Some(isa), threads: None }
}

fn instruction_set(cpu: &CpuArgs) -> Result<Isa, InputError> {
    let isa = cpu.isa.unwrap_or_else(Isa::detect);
    if isa.is_available() {
        return Ok(isa);
    }
    let have: Vec<&str> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    Err(InputError::Usage(format!("this CPU has no {isa}: use --isa {}", have.join(" or --isa "))))
}

fn ready_gpu(problem: &Problem, pass: Pass) -> Result<Gpu, fa_kernels::Error> {
    let gpu = Gpu::open()?;
    gpu.ready(problem, pass)?;
    Ok(gpu)
}

/// The GPU for `auto`: `None` where there is none or the CPU was asked for by its flags, the reason where it cannot serve.
fn gpu_for(cpu: &CpuArgs, problem: &Problem, pass: Pass) -> Option<Result<Gpu, String>> {
    if cpu.isa.is_some() || cpu.threads.is_some() || fa_kernels::driver::probe().is_err() {
        return None;
    }
    Some(ready_gpu(problem, pass).map_err(|error| error.to_string()))
}

/// Rounds a packed BSHD tensor to `T` and packs it in `layout`.
fn from_bshd<T: Stored>(values: &[f64], shape: [usize; 4], layout: TensorLayout, to: &mut Vec<T>) {
    to.clear();
    match layout {
        TensorLayout::Bshd => to.extend(values.iter().map(|&value| T::from_f64(value))),
        TensorLayout::Bhsd => to.extend(swap_middle_axes(values, shape).into_iter().map(T::from_f64)),
    }
}
