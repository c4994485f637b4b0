//! A GPU: its kernels, a stream, and the choice among kernels.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fa_core::{Append, Arch, KernelSpec, LaunchPlan, Merge, Pass, Problem};
use fa_kernels::cudarc::driver::sys::{CUevent_flags, CUstreamCaptureStatus};
use fa_kernels::cudarc::driver::{CudaContext, CudaStream};
use fa_kernels::{BoundAppend, BoundDropout, BoundMerge, Kernels, driver};
use fa_planner::divide;

use crate::choose::{Asked, Chooser};
use crate::error::Error;
use crate::tune::user_table;
use crate::tuning::{Tuning, TuningOutcome};

use super::bind::BindOptions;
use super::bound::Bound;
use super::rounded::rounded;

/// A GPU with its kernels and a stream. Shared by threads.
pub struct Gpu {
    /// Compiles and loads kernels, and keeps them.
    pub kernels: Kernels,
    /// The stream of copies, launches and timings.
    pub stream: Arc<CudaStream>,
    chooser: Chooser,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("arch", &self.arch()).finish_non_exhaustive()
    }
}

impl Gpu {
    /// The first GPU.
    ///
    /// # Errors
    /// Without a driver, a GPU, or one that kernels run on: each says what to do.
    pub fn open() -> Result<Gpu, Error> {
        Gpu::nth(0)
    }

    /// GPU `ordinal`, in the driver's order from 0.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn nth(ordinal: usize) -> Result<Gpu, Error> {
        let context = driver::context(ordinal)?;
        Ok(Gpu::with(Kernels::new(&context)?))
    }

    /// The GPU of `kernels`, with the default stream of their context.
    pub fn with(kernels: Kernels) -> Gpu {
        Gpu { stream: kernels.context().default_stream(), kernels, chooser: Chooser::default() }
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.kernels.context()
    }

    /// The architecture.
    pub fn arch(&self) -> Arch {
        self.kernels.arch()
    }

    /// The product's name, with its architecture.
    pub fn name(&self) -> String {
        let name = self.context().name().unwrap_or_else(|_| "unnamed GPU".to_owned());
        format!("{name} ({})", self.arch())
    }

    /// The kernel for a pass of `problem`, bound to it: that of the options, or else the one preferred for it
    /// ([`Gpu::prefer`]), or else the one that won when such problems were measured on this GPU
    /// ([`crate::tune`]), or else the planner's best that compiles cleanly, or else, where there is no
    /// compiler, the best of the built-in bundle. The first call for a kernel compiles it, in a second or so,
    /// or reads it from the cache; a choice is remembered.
    ///
    /// # Errors
    /// [`Error::Plan`] with what would work when no kernel computes the problem as the options say,
    /// [`fa_kernels::Error::Mismatch`] when the options' kernel does not, [`Error::BindOption`] for options
    /// that contradict each other, and those of compiling and loading.
    pub fn bind(&self, problem: &Problem, pass: Pass, options: &BindOptions) -> Result<Bound, Error> {
        options.check(problem, pass)?;
        let BindOptions { family, division, rounded: is_rounded, pinned, spec } = options;
        if let Some(spec) = spec {
            let plan = self.launch_plan(problem, spec, division.splits);
            return Ok(Bound::of(&self.kernels, problem, &plan)?);
        }
        let own = Asked::of(problem, pass);
        let asked = Asked { family: *family, division: *division, pinned: *pinned, ..own };
        let like = is_rounded.then(|| rounded(problem));
        // What kernels of rounded lengths refuse is chosen for as it is.
        if let Some(like) = like.filter(|like| like != problem && like.check().is_ok())
            && let Ok(bound) = self.choose(&Asked { like: &like, ..asked })
        {
            return Ok(bound);
        }
        self.choose(&asked)
    }

    /// What a call of the kernel of `spec` for `problem` launches on this GPU, with the keys of a forward's
    /// tile in `splits` parts, or in as many as the planner takes.
    pub fn launch_plan(&self, problem: &Problem, spec: &KernelSpec, splits: Option<usize>) -> LaunchPlan {
        divide(problem, spec, self.kernels.arch(), self.kernels.sms(), splits)
    }

    /// The kernel that appends new keys and values to a cache in this GPU's memory and applies rotary
    /// embedding to keys and queries: one launch, which a CUDA graph can capture, by
    /// [`super::DeviceAppend::run`] or [`BoundAppend::run`].
    ///
    /// # Errors
    /// An append that contradicts itself, and the errors of compiling and loading.
    pub fn append(&self, append: &Append) -> Result<BoundAppend, Error> {
        Ok(self.kernels.append(append)?)
    }

    /// The kernel that merges partial results in this GPU's memory, O and LSE over different keys of the same
    /// queries: a shared prefix and each request's suffix, a speculative tree and the cache before it, parts
    /// of a long cache. One launch, which a CUDA graph can capture, by [`BoundMerge::run`]; tensors in host
    /// memory are merged by [`crate::merge`].
    ///
    /// # Errors
    /// A merge that contradicts itself, and the errors of compiling and loading.
    pub fn merge(&self, merge: &Merge) -> Result<BoundMerge, Error> {
        Ok(self.kernels.merge(merge)?)
    }

    /// The kernel that writes which probabilities dropout keeps in this GPU's memory, as the bits that the
    /// program of [`fa_core::program::Standard::Dropout`] reads: `[heads, queries, words]`, of the query
    /// heads of all sequences, 32 keys a word. One launch, by [`BoundDropout::run`].
    ///
    /// # Errors
    /// Counts beyond an i32, and the errors of compiling and loading.
    pub fn dropout(&self, heads: usize, queries: usize, words: usize) -> Result<BoundDropout, Error> {
        Ok(self.kernels.dropout(heads, queries, words)?)
    }

    fn choose(&self, asked: &Asked<'_>) -> Result<Bound, Error> {
        // The default stream gives an error where another one that waits for it is being captured.
        let is_capturing = || {
            let status = self.stream.capture_status();
            !matches!(status, Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE))
        };
        self.chooser.choose(&self.kernels, asked, is_capturing)
    }

    /// Switches tuning on or off, for binds from now on: see [`Tuning`]. Winners go into the user's table
    /// ([`crate::tune::user_table`]). A search that is running is ended first, and the candidate that is
    /// being compiled or timed is waited for, as when the GPU is dropped.
    ///
    /// # Errors [`Error::TuningOption`], [`Error::NoTunedTable`] where winners have no file,
    /// [`Error::BadTuned`] and [`Error::Read`] for a table that cannot be read, [`Error::Threads`].
    pub fn set_tuning(&self, tuning: Tuning) -> Result<(), Error> {
        let table = match tuning {
            Tuning::Off => PathBuf::new(),
            Tuning::OnFirstUse { .. } => user_table().ok_or(Error::NoTunedTable)?,
        };
        self.set_tuning_in(tuning, table)
    }

    /// [`Gpu::set_tuning`] with a table of the caller's choice, which is used in place of the user's.
    ///
    /// # Errors
    /// As [`Gpu::set_tuning`].
    pub fn set_tuning_in(&self, tuning: Tuning, table: PathBuf) -> Result<(), Error> {
        self.chooser.set_tuning(&self.kernels, tuning, table)
    }

    /// Waits until every queued problem is measured; returns the outcomes since the last call, the newest
    /// thousand at most. Returns an empty list at once where tuning is off.
    pub fn finish_tuning(&self) -> Vec<TuningOutcome> {
        self.chooser.finish_tuning()
    }

    /// Winners that tuning has kept since the GPU was opened. Callers that keep bound kernels should bind
    /// again when it grows.
    pub fn tuned_winners(&self) -> u64 {
        self.chooser.winners()
    }

    /// Makes [`Gpu::bind`] choose `spec` for its pass of exactly this problem from now on.
    ///
    /// # Errors
    /// [`Error::Problem`] for a problem that contradicts itself, [`fa_kernels::Error::Mismatch`] when the
    /// kernel does not compute it.
    pub fn prefer(&self, problem: &Problem, spec: KernelSpec) -> Result<(), Error> {
        self.chooser.prefer(problem, spec)
    }

    /// The time on the GPU of what `launch` enqueues, waited for.
    ///
    /// # Errors
    /// What `launch` and the driver report.
    pub fn time(
        &self,
        launch: impl FnOnce(&Arc<CudaStream>) -> Result<(), fa_kernels::Error>,
    ) -> Result<Duration, Error> {
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            self.stream.record_event(flags).map_err(Error::driver("recording an event"))
        };
        let begin = event()?;
        launch(&self.stream)?;
        let end = event()?;
        self.synchronize()?;
        let ms = begin.elapsed_ms(&end).map_err(Error::driver("reading the time"))?;
        Ok(Duration::from_secs_f64(f64::from(ms) * 1e-3))
    }

    /// Waits until the stream is idle.
    ///
    /// # Errors
    /// Asynchronous errors of the work before.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(Error::driver("waiting for the GPU"))
    }
}
