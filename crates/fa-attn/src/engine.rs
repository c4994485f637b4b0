//! The engine: computes attention on this machine, and binds problems into calls.

use std::num::NonZeroUsize;
use std::sync::Arc;

use fa_core::program::DirectGradients;
use fa_core::{Append, Dtype, Lengths, Mask, Pass, Problem, Types};
use fa_cpu::check::{check_backward, check_shape, k_shape, q_shape, v_shape};
use fa_cpu::simd::Isa;
use fa_cpu::{AppendExtras, AppendTensors, Extras, TensorRef};
use fa_kernels::driver;

use crate::call::{Call, Implementation};
use crate::cpu::Cpu;
use crate::device::{BindOptions, Gpu, Half};
use crate::element::Element;
use crate::error::Error;
use crate::host;
use crate::tensors::{BackwardTensors, ForwardTensors, Gradients, Output, Tensor};
use crate::tuning::{Tuning, TuningOutcome};

/// Which implementation computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// The first GPU where there is one that computes the problem, else the CPU.
    #[default]
    Auto,
    /// The tiled kernels of the CPU.
    Cpu(CpuOptions),
    /// The CPU's naive formulas in f64, the reference that others are compared with.
    #[cfg(feature = "reference")]
    Reference {
        /// Threads; `None` for those of the current rayon pool.
        threads: Option<NonZeroUsize>,
    },
    /// The first GPU.
    Gpu,
}

/// How the CPU computes; by default with its best instruction set and all threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuOptions {
    /// Instruction set; `None` for the best that the CPU has.
    pub isa: Option<Isa>,
    /// Threads; `None` for those of the current rayon pool.
    pub threads: Option<NonZeroUsize>,
}

impl CpuOptions {
    fa_core::with_methods! {
        with_isa(isa: Option<Isa>),
        with_threads(threads: Option<NonZeroUsize>),
    }
}

/// Computes attention on this machine. Made once, shared by threads.
#[derive(Debug)]
pub struct Engine {
    backend: Backend,
    cpu: Cpu,
    gpu: Option<Arc<Gpu>>,
    /// Why `Auto` has no GPU though there is a driver.
    no_gpu: Option<String>,
}

impl Engine {
    /// The GPU where there is one, else the CPU. Needs no GPU and no driver.
    ///
    /// # Errors
    /// Those of `FA_TUNE` ([`Tuning::from_environment`]) and of the table of winners; what a GPU refuses
    /// sends the engine to the CPU, as a call's report says.
    pub fn new() -> Result<Engine, Error> {
        Engine::with(Backend::Auto)
    }

    /// An engine on a backend of the caller's choice.
    ///
    /// # Errors
    /// [`Error::Isa`] for an instruction set that the CPU lacks, [`Error::Threads`], what opening the GPU
    /// reports, and those of `FA_TUNE` and the table of winners, as [`Engine::new`].
    pub fn with(backend: Backend) -> Result<Engine, Error> {
        let best = Isa::detect();
        let (isa, threads) = match backend {
            Backend::Cpu(CpuOptions { isa, threads }) => (isa.unwrap_or(best), threads),
            #[cfg(feature = "reference")]
            Backend::Reference { threads } => (best, threads),
            Backend::Auto | Backend::Gpu => (best, None),
        };
        if !isa.is_available() {
            let have = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
            return Err(Error::Isa { wanted: isa, have });
        }
        let cpu = Cpu::new(isa, threads);
        let mut engine = Engine { backend, cpu, gpu: None, no_gpu: None };
        let tuning = Tuning::from_environment()?;
        match backend {
            Backend::Gpu => engine.gpu = Some(Arc::new(Gpu::open()?)),
            Backend::Auto if driver::probe().is_ok() => match Gpu::open() {
                Ok(gpu) => engine.gpu = Some(Arc::new(gpu)),
                Err(error) => {
                    tracing::warn!(%error, "the GPU is passed over");
                    engine.no_gpu = Some(error.to_string());
                }
            },
            Backend::Auto | Backend::Cpu(_) => {}
            #[cfg(feature = "reference")]
            Backend::Reference { .. } => {}
        }
        if let Some(gpu) = &engine.gpu
            && tuning != Tuning::Off
        {
            gpu.set_tuning(tuning)?;
        }
        Ok(engine)
    }

    /// The GPU, if the engine has one: for tensors that stay in its memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_deref()
    }

    /// Switches tuning on or off: kernels measured in the background of the first calls, the winners used
    /// from the next bind on. [`Tuning`] says what happens when.
    ///
    /// # Errors
    /// [`Error::NothingToTune`] for an engine without a GPU, unless tuning is switched off; else as
    /// [`Gpu::set_tuning`].
    pub fn set_tuning(&self, tuning: Tuning) -> Result<(), Error> {
        match &self.gpu {
            Some(gpu) => gpu.set_tuning(tuning),
            None if tuning == Tuning::Off => Ok(()),
            None => Err(Error::NothingToTune {
                backend: match self.backend {
                    #[cfg(feature = "reference")]
                    Backend::Reference { .. } => "reference backend",
                    Backend::Auto | Backend::Cpu(_) | Backend::Gpu => "CPU",
                },
            }),
        }
    }

    /// Waits for the measurements of tuning: see [`Gpu::finish_tuning`]. Returns an empty list on the CPU.
    pub fn finish_tuning(&self) -> Vec<TuningOutcome> {
        self.gpu.as_ref().map_or_else(Vec::new, |gpu| gpu.finish_tuning())
    }

    /// A pass of `problem`, ready to run: planned, compiled, checked and bound once. `Auto` takes the CPU
    /// where the GPU does not compute the problem, and [`crate::Report::gpu_passed_over`] says why. Bands and
    /// soft caps of the problem's program are computed as built-in ones; where scalars decide, bind
    /// [`Problem::with_mods_built_in`] of their values.
    ///
    /// # Errors
    /// [`Error::Problem`]; [`Error::Cpu`] for gradients of keys in pages and of latent problems, which
    /// nothing computes; on [`Backend::Gpu`] those of planning, compiling and loading.
    pub fn bind(&self, problem: &Problem, pass: Pass) -> Result<Call, Error> {
        problem.check_pass(pass)?;
        self.bind_as(problem, pass, &BindOptions::default())
    }

    fn bind_as(&self, problem: &Problem, pass: Pass, options: &BindOptions) -> Result<Call, Error> {
        match self.on_gpu(problem, pass, options) {
            Some(Ok(implementation)) => Ok(Call::new(problem, pass, implementation, None)),
            Some(Err(error)) if self.backend == Backend::Gpu => Err(error),
            Some(Err(error)) => self.on_cpu(problem, pass, Some(passed_over(&error))),
            None => self.on_cpu(problem, pass, self.no_gpu.clone()),
        }
    }

    /// The forward and the backward of `problem`, both on the GPU or both on the CPU. Where they are to be
    /// deterministic, no measurement of tuning changes the kernel of either.
    ///
    /// # Errors
    /// As [`Engine::bind`].
    pub fn bind_both(&self, problem: &Problem, deterministic: bool) -> Result<(Call, Call), Error> {
        let backward = Pass::Backward { deterministic };
        problem.check_pass(backward)?;
        let options = BindOptions::default().with_pinned(deterministic);
        let bind = |pass| self.bind_as(problem, pass, &options);
        let calls = (bind(Pass::Forward)?, bind(backward)?);
        match (calls.0.gpu_passed_over(), calls.1.gpu_passed_over()) {
            (None, Some(reason)) if calls.0.is_on_gpu() => {
                let reason = reason.to_owned();
                Ok((self.on_cpu(problem, Pass::Forward, Some(reason))?, calls.1))
            }
            (Some(reason), None) if calls.1.is_on_gpu() => {
                let reason = reason.to_owned();
                Ok((calls.0, self.on_cpu(problem, backward, Some(reason))?))
            }
            _ => Ok(calls),
        }
    }

    fn on_gpu(
        &self,
        problem: &Problem,
        pass: Pass,
        options: &BindOptions,
    ) -> Option<Result<Implementation, Error>> {
        let gpu = self.gpu.as_ref()?;
        let computed = problem.with_mods_built_in(&[]);
        let (computed, direct) = match DirectGradients::of(&computed, pass) {
            Some((posed, direct)) => (posed, Some(Box::new(direct))),
            None => (computed, None),
        };
        let bound = gpu.bind(&computed, pass, options);
        Some(bound.map(|bound| Implementation::Gpu(gpu.clone(), Box::new(bound), direct)))
    }

    fn on_cpu(&self, problem: &Problem, pass: Pass, passed_over: Option<String>) -> Result<Call, Error> {
        if pass.is_backward() {
            check_backward(problem)?;
        }
        let implementation = match self.backend {
            #[cfg(feature = "reference")]
            Backend::Reference { .. } => Implementation::Reference(self.cpu.clone()),
            Backend::Auto | Backend::Cpu(_) | Backend::Gpu => Implementation::Tiled(self.cpu.clone()),
        };
        Ok(Call::new(problem, pass, implementation, passed_over))
    }

    /// Attention of `q` on `k` and `v` under `mask`, with the default scale and no soft cap. Allocates the
    /// output, in the layout of `q`. For anything else, [`Engine::bind`] a [`Problem`].
    ///
    /// # Errors
    /// Shapes that contradict each other, and those of [`Engine::bind`].
    pub fn attention<T: Element>(
        &self,
        q: &Tensor<T>,
        k: &Tensor<T>,
        v: &Tensor<T>,
        mask: Mask,
    ) -> Result<Output<T>, Error> {
        self.forward(&problem_of(q, k, v, mask)?, [q, k, v], &Extras::NONE)
    }

    /// The forward of `problem` on `q`, `k` and `v`, with the extras that the problem names: starts of packed
    /// sequences, lengths in use, page table, slopes, sinks. Allocates the output, in the layout of `q`; rows
    /// that belong to no sequence hold NaN.
    ///
    /// # Errors
    /// Tensors and extras that are not the problem's, [`Error::Memory`], and those of [`Engine::bind`].
    pub fn forward<T: Element>(
        &self,
        problem: &Problem,
        [q, k, v]: [&Tensor<T>; 3],
        extras: &Extras<'_>,
    ) -> Result<Output<T>, Error> {
        let call = self.bind(problem, Pass::Forward)?;
        let (queries, [k, v]) = inputs_of(problem, q, [k, v])?;
        let mut output = Output::new(problem, q.layout)?;
        call.run(ForwardTensors::of([queries, k, v], &mut output, *extras)?)?;
        Ok(output)
    }

    /// [`Engine::forward`] on K and V in codes: the bytes of the codes that `problem` names, with the
    /// descales among the extras.
    ///
    /// ```
    /// use fa_attn::quantize::{Codes, Scales};
    /// use fa_attn::{DescaleForm, Descales, Dtype, Engine, Extras, Lengths, Problem, Tensor, Types, bf16};
    ///
    /// // One query of 4 heads on 100 keys of 2 heads, which are e4m3 with a descale per head.
    /// let types = Types::same(Dtype::Bf16).with_kv(Dtype::E4m3);
    /// let problem = Problem::new(Lengths::uniform(1, 1, 100), (4, 2), (64, 64), types)
    ///     .with_descales(Descales::both(DescaleForm::Head));
    /// let (shape, values) = ([1, 100, 2, 64], vec![0.5; 100 * 2 * 64]);
    /// let made = Codes::E4m3.quantize(&values, shape, Scales::Head);
    /// let (k, v) = (Tensor::new(shape, made.codes.clone())?, Tensor::new(shape, made.codes)?);
    /// let q = Tensor::new([1, 1, 4, 64], vec![bf16::ONE; 4 * 64])?;
    /// let descales = Some(&made.descales[..]);
    /// let extras = Extras { k_descale: descales, v_descale: descales, ..Extras::NONE };
    /// let output = Engine::new()?.forward_codes(&problem, &q, [&k, &v], &extras)?;
    /// assert!(output.out.data.iter().all(|&value| value == bf16::from_f32(0.5)));
    /// # Ok::<(), fa_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_codes<T: Element>(
        &self,
        problem: &Problem,
        q: &Tensor<T>,
        [k, v]: [&Tensor<u8>; 2],
        extras: &Extras<'_>,
    ) -> Result<Output<T>, Error> {
        let call = self.bind(problem, Pass::Forward)?;
        let (queries, kv) = inputs_of(problem, q, [k, v])?;
        let mut output = Output::new(problem, q.layout)?;
        let (out, lse) = (output.out.view_mut("out")?, &mut output.lse[..]);
        call.run(ForwardTensors::with_codes(queries, kv, out, lse).with_extras(*extras))?;
        Ok(output)
    }

    /// [`Engine::forward`] on Q, K and V in e4m3 ([`Types::fp8`]): the bits of the codes, with the descales
    /// among the extras. T is the type of O.
    ///
    /// ```
    /// use fa_attn::quantize::{Codes, Scales};
    /// use fa_attn::{DescaleForm, Descales, Dtype, Engine, Extras, Mask, Problem, Tensor, Types, bf16};
    ///
    /// // 100 tokens of 2 heads, quantised with a descale per sequence and head.
    /// let problem = Problem::square(1, 100, 2, 64, Mask::CAUSAL, Dtype::Bf16)
    ///     .with_types(Types::fp8(Dtype::Bf16))
    ///     .with_descales(Descales::all(DescaleForm::SequenceHead));
    /// let (shape, values) = ([1, 100, 2, 64], vec![0.5; 100 * 2 * 64]);
    /// let made = Codes::E4m3.quantize(&values, shape, Scales::SequenceHead);
    /// let codes = Tensor::new(shape, made.codes)?;
    /// let of = Some(&made.descales[..]);
    /// let extras = Extras { q_descale: of, k_descale: of, v_descale: of, ..Extras::NONE };
    /// let output = Engine::new()?.forward_fp8::<bf16>(&problem, [&codes; 3], &extras)?;
    /// assert!(output.out.data.iter().all(|&value| value == bf16::from_f32(0.5)));
    /// # Ok::<(), fa_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_fp8<T: Element>(
        &self,
        problem: &Problem,
        [q, k, v]: [&Tensor<u8>; 3],
        extras: &Extras<'_>,
    ) -> Result<Output<T>, Error> {
        let call = self.bind(problem, Pass::Forward)?;
        let (queries, [k, v]) = inputs_of(problem, q, [k, v])?;
        let mut output = Output::new(problem, q.layout)?;
        let (out, lse) = (output.out.view_mut("out")?, &mut output.lse[..]);
        call.run(ForwardTensors::fp8([queries, k, v], out, lse).with_extras(*extras))?;
        Ok(output)
    }

    /// The gradients of `q`, `k` and `v`, and of the sinks where there are some, from that of the output,
    /// `dout`, for an `output` of [`Engine::forward`]. Allocates them, in the layout of `q`.
    ///
    /// # Errors
    /// As [`Engine::forward`]; keys in pages and latent problems have no gradients.
    pub fn backward<T: Element>(
        &self,
        problem: &Problem,
        [q, k, v]: [&Tensor<T>; 3],
        extras: &Extras<'_>,
        output: &Output<T>,
        dout: &Tensor<T>,
    ) -> Result<Gradients<T>, Error> {
        let call = self.bind(problem, Pass::BACKWARD)?;
        let (queries, [k, v]) = inputs_of(problem, q, [k, v])?;
        let mut gradients = Gradients::new(problem, q.layout)?;
        call.run(BackwardTensors::of([queries, k, v], output, dout, &mut gradients, *extras)?)?;
        Ok(gradients)
    }

    /// The gradients of `q`, `k` and `v` from that of the output, `dout`, for an `output` of
    /// [`Engine::attention`] on the same tensors and mask. Allocates them, in the layout of `q`.
    ///
    /// # Errors
    /// As [`Engine::attention`].
    pub fn gradients<T: Element>(
        &self,
        [q, k, v]: [&Tensor<T>; 3],
        mask: Mask,
        output: &Output<T>,
        dout: &Tensor<T>,
    ) -> Result<Gradients<T>, Error> {
        self.backward(&problem_of(q, k, v, mask)?, [q, k, v], &Extras::NONE, output, dout)
    }

    /// Appends new keys and values to a cache, with rotary embedding of keys and queries (see
    /// [`fa_core::Append`]): tensors in host memory, changed in place. Returns how many rows of keys and
    /// queries were skipped for want of a slot. GPU and CPU give equal bits. The GPU gets a copy of the whole
    /// cache; for a cache that stays in its memory, see [`Gpu::append`].
    ///
    /// # Errors [`Error::Cpu`] for an append that contradicts itself, and shapes, types and lengths that are
    /// not what it says; nothing has been written in that case. On the GPU also those of compiling, loading
    /// and the driver.
    pub fn append<T: Half>(
        &self,
        append: &Append,
        extras: &mut AppendExtras<'_>,
        tensors: &mut AppendTensors<'_, T>,
    ) -> Result<usize, Error> {
        let bound = match &self.gpu {
            Some(gpu) => {
                fa_cpu::append::check(append, extras, tensors)?;
                gpu.append(append).map(|bound| (gpu, bound))
            }
            None => return Ok(fa_cpu::append::append(append, extras, tensors)?),
        };
        match bound {
            Ok((gpu, bound)) => host::append(gpu, &bound, extras, tensors),
            Err(error) if self.backend == Backend::Gpu => Err(error),
            Err(error) => {
                passed_over(&error);
                Ok(fa_cpu::append::append(append, extras, tensors)?)
            }
        }
    }

    /// The CPU's rate in operations per second of the products that tensors of `dtype` take, all threads
    /// together ([`fa_cpu::peak::measure`]): the peak that rates are held against. `None` where no kernel of
    /// the CPU computes. Takes about a tenth of a second.
    pub fn peak(&self, dtype: Dtype) -> Option<f64> {
        if self.backend == Backend::Gpu {
            return None;
        }
        fa_cpu::peak::measure(self.cpu.isa, dtype, self.cpu.threads())
    }
}

/// The problem that Q, K and V pose under `mask`, with the default scale and no soft cap.
///
/// # Errors
/// [`Error::Shape`] for shapes that contradict each other, [`Error::Problem`] for those of no problem.
pub fn problem_of<T: Element>(
    q: &Tensor<T>,
    k: &Tensor<T>,
    v: &Tensor<T>,
    mask: Mask,
) -> Result<Problem, Error> {
    let [batch, seqlen_q, heads_q, head_dim] = q.shape;
    let [_, seqlen_k, heads_kv, _] = k.shape;
    let head_dim_v = v.shape[3];
    let agree = |tensor, got: [usize; 4], need: [usize; 4], why: &str| {
        let refused = || Error::Shape { tensor, got, need: format!("{why}, so {need:?}") };
        if got == need { Ok(()) } else { Err(refused()) }
    };
    agree("k", k.shape, [batch, seqlen_k, heads_kv, head_dim], "batch and head dim are those of q")?;
    agree("v", v.shape, [batch, seqlen_k, heads_kv, head_dim_v], "batch, seqlen and heads are those of k")?;
    let problem = Problem::new(
        Lengths::uniform(batch, seqlen_q, seqlen_k),
        (heads_q, heads_kv),
        (head_dim, head_dim_v),
        Types::same(T::dtype()),
    )
    .with_mask(mask);
    problem.check()?;
    Ok(problem)
}

/// Q, K and V of `problem`, checked before there is memory for its output: a problem that is not theirs may
/// ask for any amount.
/// Views of Q, and of K and V, whose shapes are the problem's.
fn inputs_of<'a, Q: Clone, K: Clone>(
    problem: &Problem,
    q: &'a Tensor<Q>,
    [k, v]: [&'a Tensor<K>; 2],
) -> Result<(TensorRef<'a, Q>, [TensorRef<'a, K>; 2]), Error> {
    check_shape("q", q.shape, q_shape(problem))?;
    check_shape("k", k.shape, k_shape(problem))?;
    check_shape("v", v.shape, v_shape(problem))?;
    Ok((q.view("q")?, [k.view("k")?, v.view("v")?]))
}

fn passed_over(error: &Error) -> String {
    let reason = error.to_string();
    tracing::warn!(reason, "the GPU is passed over");
    reason
}
