//! Computing on the GPU: the kernels' library with a file's tensors around it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fa_core::{Pass, Problem, Strides};
use fa_kernels::cudarc::driver::sys::CUevent_flags;
use fa_kernels::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use fa_kernels::{BackwardArgs, ForwardArgs, Input, Kernels, Output, driver};
use fa_planner::plan::PlanError;
use half::{bf16, f16};

use crate::attention::Inputs;
use crate::compute::Outputs;
use crate::safetensors::Stored;

/// The first GPU, with its kernels.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: Kernels,
}

/// Tensors on the GPU and the kernel bound to them.
pub trait Session<T> {
    /// Launches the kernel and waits; the time is the GPU's own.
    ///
    /// # Errors
    /// What the driver reports.
    fn run(&mut self) -> anyhow::Result<Duration>;

    /// Copies `out` and `lse` back.
    ///
    /// # Errors
    /// What the driver reports.
    fn download(&self, outputs: &mut Outputs<T>) -> anyhow::Result<()>;
}

/// An element type that files hold and attention is computed in: on the CPU all of them, on the GPU the 16-bit ones.
pub trait Computed: Stored {
    /// Copies the inputs to the GPU and readies the planner's best kernel for them.
    ///
    /// # Errors
    /// Where no kernel computes the problem, and what compiling, loading and the driver report.
    fn open<'a>(gpu: &'a Gpu, inputs: &Inputs<Self>) -> anyhow::Result<Box<dyn Session<Self> + 'a>>;

    /// Computes the gradients from a finished forward by the planner's best kernel; `None` without a dO. The time is the
    /// GPU's own.
    ///
    /// # Errors
    /// As [`Computed::open`].
    fn gradients(
        gpu: &Gpu,
        deterministic: bool,
        inputs: &Inputs<Self>,
        outputs: &mut Outputs<Self>,
    ) -> anyhow::Result<Option<Duration>>;
}

impl Computed for f32 {
    fn open<'a>(_: &'a Gpu, inputs: &Inputs<f32>) -> anyhow::Result<Box<dyn Session<f32> + 'a>> {
        Err(fa_kernels::Error::Plan(PlanError::Dtype(inputs.problem.dtype)).into())
    }

    fn gradients(
        _: &Gpu,
        _: bool,
        inputs: &Inputs<f32>,
        _: &mut Outputs<f32>,
    ) -> anyhow::Result<Option<Duration>> {
        Err(fa_kernels::Error::Plan(PlanError::Dtype(inputs.problem.dtype)).into())
    }
}

impl Computed for f16 {
    fn open<'a>(gpu: &'a Gpu, inputs: &Inputs<f16>) -> anyhow::Result<Box<dyn Session<f16> + 'a>> {
        Ok(Box::new(Resident::new(gpu, inputs)?))
    }

    fn gradients(
        gpu: &Gpu,
        deterministic: bool,
        inputs: &Inputs<f16>,
        outputs: &mut Outputs<f16>,
    ) -> anyhow::Result<Option<Duration>> {
        gradients(gpu, deterministic, inputs, outputs)
    }
}

impl Computed for bf16 {
    fn open<'a>(gpu: &'a Gpu, inputs: &Inputs<bf16>) -> anyhow::Result<Box<dyn Session<bf16> + 'a>> {
        Ok(Box::new(Resident::new(gpu, inputs)?))
    }

    fn gradients(
        gpu: &Gpu,
        deterministic: bool,
        inputs: &Inputs<bf16>,
        outputs: &mut Outputs<bf16>,
    ) -> anyhow::Result<Option<Duration>> {
        gradients(gpu, deterministic, inputs, outputs)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("arch", &self.kernels.arch()).finish_non_exhaustive()
    }
}

impl Gpu {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// Without a driver, a GPU, or one that kernels run on.
    pub fn open() -> Result<Gpu, fa_kernels::Error> {
        let context = driver::context(0)?;
        let kernels = Kernels::new(&context)?;
        Ok(Gpu { stream: context.default_stream(), context, kernels })
    }

    /// Compiles (or reads from the cache) the kernels for `problem`, so that a failure shows before any work.
    ///
    /// # Errors
    /// Where no kernel computes the problem, and what compiling and loading report.
    pub fn ready(&self, problem: &Problem, pass: Pass) -> Result<(), fa_kernels::Error> {
        self.kernels.forward(problem)?;
        match pass {
            Pass::Forward => Ok(()),
            Pass::Backward { deterministic } => self.kernels.backward(problem, deterministic).map(|_| ()),
        }
    }

    /// A copy on the GPU. An allocation of nothing is an error, so it has an element at least.
    fn upload<U: DeviceRepr + Copy>(&self, values: &[U], nothing: U) -> anyhow::Result<CudaSlice<U>> {
        let values = if values.is_empty() { &[nothing][..] } else { values };
        self.stream.clone_htod(values).context("copying to the GPU")
    }

    /// Copies back; what is asked for may be less than there is.
    fn download<U: DeviceRepr>(&self, from: &CudaSlice<U>, to: &mut [U]) -> anyhow::Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.stream.memcpy_dtoh(&from.slice(..to.len()), to).context("copying from the GPU")
    }

    fn workspace(&self, bytes: usize) -> anyhow::Result<CudaSlice<u8>> {
        self.stream.alloc_zeros(bytes.max(1)).context("allocating the workspace")
    }

    /// The time on the GPU of what `launch` enqueues, waited for.
    fn timed(
        &self,
        launch: impl FnOnce(&Arc<CudaStream>) -> Result<(), fa_kernels::Error>,
    ) -> anyhow::Result<Duration> {
        let event =
            || self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("recording an event");
        let begin = event()?;
        launch(&self.stream)?;
        let end = event()?;
        self.stream.synchronize().context("waiting for the kernel")?;
        let ms = begin.elapsed_ms(&end).context("reading the time")?;
        Ok(Duration::from_secs_f64(f64::from(ms) * 1e-3))
    }

    /// The product's name, with its architecture.
    pub fn name(&self) -> String {
        let name = self.context.name().unwrap_or_else(|_| "unnamed GPU".to_owned());
        format!("{name} ({})", self.kernels.arch())
    }
}

struct Resident<'a, T> {
    gpu: &'a Gpu,
    forward: fa_kernels::Forward,
    q: CudaSlice<T>,
    k: CudaSlice<T>,
    v: CudaSlice<T>,
    out: CudaSlice<T>,
    lse: CudaSlice<f32>,
    workspace: CudaSlice<u8>,
    /// Of q, of k, of v and of out.
    strides: [Strides; 4],
}

/// Strides of q (and dq), k, v and out (and dout), packed.
fn strides<T>(inputs: &Inputs<T>) -> [Strides; 4] {
    let p = &inputs.problem;
    let strides = |seqlen, heads, dim| inputs.layout.strides(seqlen, heads, dim);
    [
        strides(p.seqlen_q, p.heads_q, p.head_dim),
        strides(p.seqlen_k, p.heads_kv, p.head_dim),
        strides(p.seqlen_k, p.heads_kv, p.head_dim_v),
        strides(p.seqlen_q, p.heads_q, p.head_dim_v),
    ]
}

impl<'a, T: Stored + DeviceRepr + ValidAsZeroBits> Resident<'a, T> {
    fn new(gpu: &'a Gpu, inputs: &Inputs<T>) -> anyhow::Result<Self> {
        let p = &inputs.problem;
        let forward = gpu.kernels.forward(p)?;
        // NaN shows what a kernel forgets to write.
        let nan = T::from_f64(f64::NAN);
        Ok(Resident {
            gpu,
            q: gpu.upload(&inputs.q, nan)?,
            k: gpu.upload(&inputs.k, nan)?,
            v: gpu.upload(&inputs.v, nan)?,
            out: gpu.upload(&vec![nan; inputs.out_len()], nan)?,
            lse: gpu.upload(&vec![f32::NAN; fa_cpu::check::lse_len(p)], f32::NAN)?,
            workspace: gpu.workspace(forward.workspace_bytes())?,
            strides: strides(inputs),
            forward,
        })
    }
}

impl<T: Stored + DeviceRepr + ValidAsZeroBits + fa_kernels::Element> Session<T> for Resident<'_, T> {
    fn run(&mut self) -> anyhow::Result<Duration> {
        let [q, k, v, out] = self.strides;
        self.gpu.timed(|stream| {
            self.forward.run(
                stream,
                ForwardArgs {
                    q: Input { data: &self.q, strides: q },
                    k: Input { data: &self.k, strides: k },
                    v: Input { data: &self.v, strides: v },
                    out: Output { data: &mut self.out, strides: out },
                    lse: Some(&mut self.lse),
                    workspace: Some(&mut self.workspace),
                },
            )
        })
    }

    fn download(&self, outputs: &mut Outputs<T>) -> anyhow::Result<()> {
        self.gpu.download(&self.out, &mut outputs.out)?;
        self.gpu.download(&self.lse, &mut outputs.lse)?;
        self.gpu.stream.synchronize().context("copying from the GPU")
    }
}

/// The gradients from a finished forward; `None` without a dO.
fn gradients<T: Stored + DeviceRepr + ValidAsZeroBits + fa_kernels::Element>(
    gpu: &Gpu,
    deterministic: bool,
    inputs: &Inputs<T>,
    outputs: &mut Outputs<T>,
) -> anyhow::Result<Option<Duration>> {
    let Outputs { out, lse, gradients } = outputs;
    let (Some(dout), Some(gradients)) = (&inputs.dout, gradients) else { return Ok(None) };
    let backward = gpu.kernels.backward(&inputs.problem, deterministic)?;
    let nan = T::from_f64(f64::NAN);
    let upload = |values: &[T]| gpu.upload(values, nan);
    let (q, k, v) = (upload(&inputs.q)?, upload(&inputs.k)?, upload(&inputs.v)?);
    let (out, dout, lse) = (upload(out)?, upload(dout)?, gpu.upload(lse, f32::NAN)?);
    // They hold NaN still, which shows what a kernel forgets to write.
    let [to_dq, to_dk, to_dv] = gradients;
    let (mut dq, mut dk, mut dv) = (upload(to_dq)?, upload(to_dk)?, upload(to_dv)?);
    let mut workspace = gpu.workspace(backward.workspace_bytes())?;
    let [at_q, at_k, at_v, at_out] = strides(inputs);
    let mut run = || {
        gpu.timed(|stream| {
            backward.run(
                stream,
                BackwardArgs {
                    q: Input { data: &q, strides: at_q },
                    k: Input { data: &k, strides: at_k },
                    v: Input { data: &v, strides: at_v },
                    out: Input { data: &out, strides: at_out },
                    lse: &lse,
                    dout: Input { data: &dout, strides: at_out },
                    dq: Output { data: &mut dq, strides: at_q },
                    dk: Output { data: &mut dk, strides: at_k },
                    dv: Output { data: &mut dv, strides: at_v },
                    workspace: &mut workspace,
                },
            )
        })
    };
    // The first launch loads code; the second is the one that counts.
    run()?;
    let time = run()?;
    for (from, to) in [(&dq, to_dq), (&dk, to_dk), (&dv, to_dv)] {
        gpu.download(from, to)?;
    }
    gpu.stream.synchronize().context("copying from the GPU")?;
    Ok(Some(time))
}
