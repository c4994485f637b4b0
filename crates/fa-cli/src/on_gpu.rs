//! Computing on the GPU: the kernels' library with a file's tensors around it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use fa_core::{Problem, Strides};
use fa_kernels::cudarc::driver::sys::CUevent_flags;
use fa_kernels::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits,
};
use fa_kernels::{ForwardArgs, Input, Kernels, Output, driver};
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
}

impl Computed for f32 {
    fn open<'a>(_: &'a Gpu, inputs: &Inputs<f32>) -> anyhow::Result<Box<dyn Session<f32> + 'a>> {
        Err(fa_kernels::Error::Plan(PlanError::Dtype(inputs.problem.dtype)).into())
    }
}

impl Computed for f16 {
    fn open<'a>(gpu: &'a Gpu, inputs: &Inputs<f16>) -> anyhow::Result<Box<dyn Session<f16> + 'a>> {
        Ok(Box::new(Resident::new(gpu, inputs)?))
    }
}

impl Computed for bf16 {
    fn open<'a>(gpu: &'a Gpu, inputs: &Inputs<bf16>) -> anyhow::Result<Box<dyn Session<bf16> + 'a>> {
        Ok(Box::new(Resident::new(gpu, inputs)?))
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

    /// Compiles (or reads from the cache) the kernel for `problem`, so that a failure shows before any work.
    ///
    /// # Errors
    /// Where no kernel computes the problem, and what compiling and loading report.
    pub fn ready(&self, problem: &Problem) -> Result<(), fa_kernels::Error> {
        self.kernels.forward(problem).map(|_| ())
    }

    /// The product's name, with its architecture.
    pub fn name(&self) -> String {
        let name = self.context.name().unwrap_or_else(|_| "unnamed GPU".to_owned());
        format!("{name} ({})", self.kernels.arch())
    }
}

struct Resident<'a, T> {
    stream: &'a Arc<CudaStream>,
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

impl<'a, T: Stored + DeviceRepr + ValidAsZeroBits> Resident<'a, T> {
    fn new(gpu: &'a Gpu, inputs: &Inputs<T>) -> anyhow::Result<Self> {
        let (stream, p) = (&gpu.stream, &inputs.problem);
        let forward = gpu.kernels.forward(p)?;
        // An allocation of nothing is an error, so every buffer has an element at least.
        let upload = |values: &[T]| {
            let nothing = [T::from_f64(0.0)];
            stream
                .clone_htod(if values.is_empty() { &nothing[..] } else { values })
                .context("copying to the GPU")
        };
        // NaN shows what a kernel forgets to write.
        let poison = vec![T::from_f64(f64::NAN); inputs.out_len()];
        let lse = vec![f32::NAN; fa_cpu::check::lse_len(p).max(1)];
        let strides = |seqlen, heads, dim| inputs.layout.strides(seqlen, heads, dim);
        Ok(Resident {
            stream,
            q: upload(&inputs.q)?,
            k: upload(&inputs.k)?,
            v: upload(&inputs.v)?,
            out: upload(&poison)?,
            lse: stream.clone_htod(&lse).context("copying to the GPU")?,
            workspace: stream
                .alloc_zeros(forward.workspace_bytes().max(1))
                .context("allocating the workspace")?,
            strides: [
                strides(p.seqlen_q, p.heads_q, p.head_dim),
                strides(p.seqlen_k, p.heads_kv, p.head_dim),
                strides(p.seqlen_k, p.heads_kv, p.head_dim_v),
                strides(p.seqlen_q, p.heads_q, p.head_dim_v),
            ],
            forward,
        })
    }

    fn event(&self) -> anyhow::Result<CudaEvent> {
        self.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).context("recording an event")
    }
}

impl<T: Stored + DeviceRepr + ValidAsZeroBits + fa_kernels::Element> Session<T> for Resident<'_, T> {
    fn run(&mut self) -> anyhow::Result<Duration> {
        let begin = self.event()?;
        let [q, k, v, out] = self.strides;
        self.forward.run(
            self.stream,
            ForwardArgs {
                q: Input { data: &self.q, strides: q },
                k: Input { data: &self.k, strides: k },
                v: Input { data: &self.v, strides: v },
                out: Output { data: &mut self.out, strides: out },
                lse: Some(&mut self.lse),
                workspace: Some(&mut self.workspace),
            },
        )?;
        let end = self.event()?;
        self.stream.synchronize().context("waiting for the kernel")?;
        let ms = begin.elapsed_ms(&end).context("reading the time")?;
        Ok(Duration::from_secs_f64(f64::from(ms) * 1e-3))
    }

    fn download(&self, outputs: &mut Outputs<T>) -> anyhow::Result<()> {
        fn copy<U: DeviceRepr>(
            stream: &Arc<CudaStream>,
            from: &CudaSlice<U>,
            to: &mut [U],
        ) -> anyhow::Result<()> {
            if to.is_empty() {
                return Ok(());
            }
            stream.memcpy_dtoh(&from.slice(..to.len()), to).context("copying from the GPU")
        }
        copy(self.stream, &self.out, &mut outputs.out)?;
        copy(self.stream, &self.lse, &mut outputs.lse)?;
        self.stream.synchronize().context("copying from the GPU")
    }
}
