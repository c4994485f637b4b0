//! Computing attention: which implementation, on how many threads, and what comes out.

use std::time::{Duration, Instant};

use anyhow::Context;
use fa_core::TensorLayout;
use fa_cpu::simd::{Isa, Kernels};
use fa_cpu::tiled::{self, BackwardInputs};
use fa_cpu::{CpuError, TensorMut, TensorRef, check, reference};
use serde::Serialize;

use crate::args::{Backend, CpuArgs};
use crate::attention::{Inputs, swap_middle_axes};
use crate::failure::InputError;
use crate::safetensors::{NewTensor, Stored};

/// An implementation, ready to run.
#[derive(Debug)]
pub struct Engine {
    reference: bool,
    isa: Isa,
    pool: rayon::ThreadPool,
}

/// What an [`Engine`] runs, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct EngineReport {
    /// `cpu` or `reference`.
    pub backend: &'static str,
    /// Instruction set of the tiled implementation's kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isa: Option<&'static str>,
    /// Threads.
    pub threads: usize,
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
    /// Resolves what was asked for against what this machine has.
    ///
    /// # Errors
    /// [`InputError::Usage`] for an instruction set that the CPU lacks; when the system gives no threads.
    pub fn new(backend: Backend, cpu: &CpuArgs) -> anyhow::Result<Engine> {
        let isa = cpu.isa.unwrap_or_else(Isa::detect);
        if !isa.is_available() {
            let have: Vec<&str> =
                Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
            let message = format!("this CPU has no {isa}: use --isa {}", have.join(" or --isa "));
            return Err(InputError::Usage(message).into());
        }
        let reference = backend == Backend::Reference;
        if reference && cpu.isa.is_some() {
            let message =
                "--isa chooses the cpu backend's kernels; the reference backend has none".to_owned();
            return Err(InputError::Usage(message).into());
        }
        let threads = cpu.threads.map_or(0, usize::from);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.with_context(|| format!("cannot start {threads} threads"))?;
        Ok(Engine { reference, isa, pool })
    }

    /// What runs.
    pub fn report(&self) -> EngineReport {
        EngineReport {
            backend: if self.reference { "reference" } else { "cpu" },
            isa: (!self.reference).then_some(self.isa.name()),
            threads: self.pool.current_num_threads(),
        }
    }

    fn options(&self) -> tiled::Options {
        tiled::Options { isa: Some(self.isa), threads: None }
    }

    /// Computes `out` and `lse`; the time is that of the computation alone.
    ///
    /// # Errors
    /// Tensors that do not fit the problem.
    pub fn forward<T: Stored>(
        &self,
        inputs: &Inputs<T>,
        outputs: &mut Outputs<T>,
    ) -> Result<Duration, CpuError> {
        let problem = &inputs.problem;
        let [q, k, v] = inputs.views()?;
        if self.reference {
            let start = Instant::now();
            let exact = self.pool.install(|| reference::forward(problem, &q, &k, &v))?;
            let time = start.elapsed();
            from_bshd(&exact.out, check::out_shape(problem), inputs.layout, &mut outputs.out);
            outputs.lse = exact.lse.iter().map(|&lse| lse as f32).collect();
            return Ok(time);
        }
        let shape = check::out_shape(problem);
        let mut out = TensorMut::packed("out", &mut outputs.out, shape, inputs.layout)?;
        let lse = &mut outputs.lse;
        let start = Instant::now();
        self.pool
            .install(|| tiled::forward_with(self.options(), problem, &q, &k, &v, &mut out, Some(lse)))?;
        Ok(start.elapsed())
    }

    /// Computes the gradients from a finished forward; `None` without a dO. The time is that of the computation alone.
    ///
    /// # Errors
    /// Tensors that do not fit the problem.
    pub fn backward<T: Stored>(
        &self,
        inputs: &Inputs<T>,
        outputs: &mut Outputs<T>,
    ) -> Result<Option<Duration>, CpuError> {
        let problem = &inputs.problem;
        let [q, k, v] = inputs.views()?;
        let shapes = [check::q_shape(problem), check::k_shape(problem), check::v_shape(problem)];
        let (Some(dout), Some([dq, dk, dv])) = (inputs.dout_view()?, &mut outputs.gradients) else {
            return Ok(None);
        };
        if self.reference {
            let start = Instant::now();
            let exact = self.pool.install(|| reference::backward(problem, &q, &k, &v, &dout))?;
            let time = start.elapsed();
            for ((exact, shape), to) in [exact.dq, exact.dk, exact.dv].iter().zip(shapes).zip([dq, dk, dv]) {
                from_bshd(exact, shape, inputs.layout, to);
            }
            return Ok(Some(time));
        }
        let out = TensorRef::packed("out", &outputs.out, check::out_shape(problem), inputs.layout)?;
        let from = BackwardInputs { q, k, v, out, lse: &outputs.lse, dout };
        let mut dq = TensorMut::packed("dq", dq, shapes[0], inputs.layout)?;
        let mut dk = TensorMut::packed("dk", dk, shapes[1], inputs.layout)?;
        let mut dv = TensorMut::packed("dv", dv, shapes[2], inputs.layout)?;
        let start = Instant::now();
        self.pool
            .install(|| tiled::backward_with(self.options(), problem, &from, &mut dq, &mut dk, &mut dv))?;
        Ok(Some(start.elapsed()))
    }

    /// f32 operations per second that multiply-adds in registers reach on all threads together: the peak that rates are
    /// held against. Takes about a tenth of a second.
    pub fn fma_peak(&self) -> f64 {
        const ROUNDS: usize = 20_000;
        const TIME: Duration = Duration::from_millis(100);
        let Some(kernels) = Kernels::for_isa(self.isa) else { return 0.0 };
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
        rates.into_iter().sum()
    }
}

/// Rounds a packed BSHD tensor to `T` and packs it in `layout`.
fn from_bshd<T: Stored>(values: &[f64], shape: [usize; 4], layout: TensorLayout, to: &mut Vec<T>) {
    to.clear();
    match layout {
        TensorLayout::Bshd => to.extend(values.iter().map(|&value| T::from_f64(value))),
        TensorLayout::Bhsd => to.extend(swap_middle_axes(values, shape).into_iter().map(T::from_f64)),
    }
}
