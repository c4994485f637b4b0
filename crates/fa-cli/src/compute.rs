//! Computing attention on a file's tensors: the engine that the flags ask for, its calls, and what comes out.

use std::num::NonZeroUsize;
use std::time::Duration;

use fa_attn::{
    BackwardTensors, Call, CpuOptions, Element, Engine, ForwardTensors, Gradients, Isa, Output, Pass, Tensor,
};
use fa_core::{Problem, Side, SideRows, TensorLayout};

use crate::attention::Inputs;
use crate::flags::{Backend, CpuArgs};
use crate::safetensors::{NewTensor, Stored};
use crate::sequences::{Sequences, blank};
use crate::term::failure::InputError;

/// The engine that the flags ask for. `auto` with a flag of the CPU is the CPU.
///
/// # Errors
/// [`InputError::Usage`] for an instruction set that the CPU lacks and for flags that the backend does not
/// know; what the GPU reports; when the system gives no threads.
pub(crate) fn engine(backend: Backend, cpu: &CpuArgs) -> anyhow::Result<Engine> {
    let usage = |message: &str| anyhow::Error::from(InputError::Usage(message.to_owned()));
    let threads = cpu.threads.and_then(|threads| NonZeroUsize::new(threads.into()));
    let of_the_cpu = cpu.isa.is_some() || threads.is_some();
    let backend = match backend {
        Backend::Reference if cpu.isa.is_some() => {
            return Err(usage("--isa chooses the cpu backend's kernels; the reference backend has none"));
        }
        Backend::Cuda if of_the_cpu => {
            return Err(usage(
                "--isa and --threads are the cpu backend's; leave them out with --backend cuda",
            ));
        }
        Backend::Auto if !of_the_cpu => fa_attn::Backend::Auto,
        Backend::Auto | Backend::Cpu => {
            check_isa(cpu.isa)?;
            fa_attn::Backend::Cpu(CpuOptions::default().with_isa(cpu.isa).with_threads(threads))
        }
        Backend::Reference => fa_attn::Backend::Reference { threads },
        Backend::Cuda => fa_attn::Backend::Gpu,
    };
    Ok(Engine::with(backend)?)
}

fn check_isa(isa: Option<Isa>) -> Result<(), InputError> {
    let Some(isa) = isa.filter(|isa| !isa.is_available()) else { return Ok(()) };
    let have: Vec<&str> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).map(Isa::name).collect();
    Err(InputError::Usage(format!("this CPU has no {isa}: use --isa {}", have.join(" or --isa "))))
}

/// The bound passes of a problem.
#[derive(Debug)]
pub(crate) struct Calls {
    /// O and LSE.
    pub forward: Call,
    /// dQ, dK and dV.
    pub backward: Option<Call>,
}

impl Calls {
    /// Binds the forward of `problem`, and the `backward` if there is one; both to the same backend.
    ///
    /// # Errors
    /// As [`Engine::bind`].
    pub(crate) fn bind(engine: &Engine, problem: &Problem, backward: Option<Pass>) -> anyhow::Result<Calls> {
        Ok(match backward {
            None => Calls { forward: engine.bind(problem, Pass::Forward)?, backward: None },
            Some(pass) => {
                let deterministic = pass == Pass::Backward { deterministic: true };
                let (forward, backward) = engine.bind_both(problem, deterministic)?;
                Calls { forward, backward: Some(backward) }
            }
        })
    }

    /// Computes `out` and `lse`; the time is that of the computation alone.
    ///
    /// # Errors
    /// What the backend reports.
    pub(crate) fn forward<T: Element + Stored>(
        &self,
        inputs: &Inputs<T>,
        outputs: &mut Outputs<T>,
    ) -> anyhow::Result<Duration> {
        let program = inputs.program().filter(|_| inputs.computed.score.program.is_some());
        let [q, k, v] = inputs.views()?;
        let Output { out, lse } = &mut outputs.output;
        let mut tensors =
            ForwardTensors::with_kv(q, [k, v], out.view_mut("out")?, lse).with_extras(inputs.sides.extras());
        tensors.program = program.as_ref();
        Ok(self.forward.time(tensors)?)
    }

    /// Computes the gradients from a finished forward; `None` where no backward is bound. The time is that of
    /// the computation alone.
    ///
    /// # Errors
    /// What the backend reports.
    pub(crate) fn backward<T: Element + Stored>(
        &self,
        inputs: &Inputs<T>,
        outputs: &mut Outputs<T>,
    ) -> anyhow::Result<Option<Duration>> {
        let Outputs { output, gradients, darrays } = outputs;
        let (Some(call), Some(dout), Some(gradients)) = (&self.backward, &inputs.dout, gradients) else {
            return Ok(None);
        };
        let extras = inputs.sides.extras();
        let program = inputs.program().filter(|_| inputs.computed.score.program.is_some());
        let mut tensors = BackwardTensors::of(inputs.differentiable()?, output, dout, gradients, extras)?;
        tensors.program = program.as_ref();
        tensors.darrays = program.is_some().then_some(darrays);
        Ok(Some(call.time(tensors)?))
    }
}

/// The results, packed in the inputs' layout; NaN until they are computed.
#[derive(Debug)]
pub(crate) struct Outputs<T> {
    /// O and LSE.
    pub output: Output<T>,
    /// dQ, dK and dV; `None` without a dO.
    pub gradients: Option<Gradients<T>>,
    /// Of the program's arrays, each packed; empty for those without a gradient.
    pub darrays: Vec<Vec<f32>>,
}

impl<T: Element + Stored> Outputs<T> {
    /// Allocates the results.
    pub(crate) fn new(inputs: &Inputs<T>) -> anyhow::Result<Outputs<T>> {
        let (problem, layout) = (&inputs.problem, inputs.layout);
        let gradients = inputs.dout.is_some().then(|| Gradients::new(problem, layout)).transpose()?;
        Ok(Outputs { output: Output::new(problem, layout)?, gradients, darrays: Vec::new() })
    }

    /// Sets rows that belong to no sequence, which nothing computes, to the values of rows that see no key.
    pub(crate) fn settle(&mut self, inputs: &Inputs<T>) {
        let Sequences { q_rows, k_rows, .. } = &inputs.sequences;
        let Output { out, lse } = &mut self.output;
        let zero = T::from_f32(0.0);
        // LSE is [batch, heads, seqlen]: BHSD with rows of one element.
        let [batch, seqlen, heads, _] = out.shape;
        blank(lse, [batch, seqlen, heads, 1], TensorLayout::Bhsd, q_rows.as_deref(), f32::NEG_INFINITY);
        let settle = |tensor: &mut Tensor<T>, rows: &Option<Vec<bool>>| {
            blank(&mut tensor.data, tensor.shape, tensor.layout, rows.as_deref(), zero);
        };
        settle(out, q_rows);
        if let Some(Gradients { dq, dk, dv, .. }) = &mut self.gradients {
            settle(dq, q_rows);
            settle(dk, k_rows);
            settle(dv, k_rows);
        }
    }

    /// The tensors to write to a file.
    pub(crate) fn tensors(&self, inputs: &Inputs<T>) -> Vec<NewTensor> {
        let problem = &inputs.problem;
        let Output { out, lse } = &self.output;
        let packed = |side: Side| matches!(side.rows, SideRows::Packed { .. });
        let [q, k] = [packed(problem.lengths.q()), packed(problem.lengths.k())];
        let [batch, seqlen, heads, _] = out.shape;
        let rows = [batch, heads, seqlen];
        let mut tensors =
            vec![NewTensor::of("out", out, q), NewTensor::new("lse", &rows[usize::from(q)..], lse)];
        if let Some(Gradients { dq, dk, dv, dsinks }) = &self.gradients {
            let gradients = [("dq", dq, q), ("dk", dk, k), ("dv", dv, k)];
            tensors.extend(gradients.map(|(name, tensor, packed)| NewTensor::of(name, tensor, packed)));
            tensors.extend(dsinks.as_ref().map(|dsinks| NewTensor::new("dsinks", &[dsinks.len()], dsinks)));
        }
        if let (Some(program), Some(given)) = (problem.score.program, &inputs.program) {
            let arrays = program.arrays().iter().zip(&given.arrays).zip(&self.darrays);
            for ((decl, array), gradient) in arrays.filter(|((decl, _), _)| decl.gradient) {
                let shape: Vec<usize> = array.extents[..decl.rank].iter().map(|&n| n as usize).collect();
                tensors.push(NewTensor::new(format!("d{}", decl.name), &shape, gradient));
            }
        }
        tensors
    }
}
