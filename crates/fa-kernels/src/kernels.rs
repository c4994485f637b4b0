//! The library's door: plan, compile and load on first use, remembered afterwards.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::CudaContext;
use fa_core::{Arch, Family, KernelSpec, Pass, Problem};
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanError, PlanOptions, Reason, RejectedSpec, plan};

use crate::choices::Choices;
use crate::jit::bundle::Bundle;
use crate::jit::cache::Cache;
use crate::jit::compile::{Compiler, CompilerKind};
use crate::jit::source::Source;
use crate::launch::Launches;
use crate::launch::backward::Backward;
use crate::launch::forward::{Forward, check_match};
use crate::launch::module::LoadedKernel;
use crate::{Error, Headers, driver, smem_bytes, tune};

/// Compiled kernels for one context. Shared by threads.
pub struct Kernels {
    context: Arc<CudaContext>,
    arch: Arch,
    sms: u32,
    headers: Headers,
    cache: Cache,
    compiler: Mutex<Option<Arc<Compiler>>>,
    // By the spec's and the problem's RON text: both are plain data, and neither is looked up in a call.
    loaded: Mutex<HashMap<String, Arc<OnceLock<Arc<LoadedKernel>>>>>,
    choices: Mutex<Choices>,
}

/// How many of the planner's best tiles are tried when one does not compile cleanly.
const TRIES: usize = 8;

impl Kernels {
    /// Kernels for the GPU of `context`, with the default cache; nothing is compiled yet.
    ///
    /// # Errors
    /// [`Error::Device`] for a GPU older than compute capability 8.0.
    pub fn new(context: &Arc<CudaContext>) -> Result<Kernels, Error> {
        Kernels::with(context, Cache::open_default(), Headers::embedded())
    }

    /// [`Kernels::new`] with a cache and headers of the caller's choice.
    ///
    /// # Errors
    /// As [`Kernels::new`].
    pub fn with(context: &Arc<CudaContext>, cache: Cache, headers: Headers) -> Result<Kernels, Error> {
        let (arch, sms) = driver::device(context)?;
        Ok(Kernels {
            context: context.clone(),
            arch,
            sms,
            headers,
            cache,
            compiler: Mutex::default(),
            loaded: Mutex::default(),
            choices: Mutex::default(),
        })
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The GPU's architecture.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The forward pass of `problem` by the kernel preferred for it ([`Kernels::prefer`]), or else by the one that won when
    /// such problems were measured on this GPU ([`tune`]), or else by the planner's best that compiles cleanly, or else,
    /// where there is no compiler, by the best of the built-in bundle. The first call for a kernel compiles it, in a second
    /// or so, or reads it from the cache.
    ///
    /// # Errors
    /// [`Error::Plan`] with what would work when no kernel computes the problem, and those of compiling and loading.
    pub fn forward(&self, problem: &Problem) -> Result<Forward, Error> {
        self.choose(problem, None, Pass::Forward, |spec| self.forward_with(problem, spec))
    }

    /// [`Kernels::forward`] with a kernel of `family`, be it the fastest here or not.
    ///
    /// # Errors
    /// As [`Kernels::forward`]; a family that does not run here has no plan.
    pub fn forward_of(&self, problem: &Problem, family: Family) -> Result<Forward, Error> {
        self.choose(problem, Some(family), Pass::Forward, |spec| self.forward_with(problem, spec))
    }

    /// The backward pass of `problem` by the kernel that is chosen as for [`Kernels::forward`]; with `deterministic`, equal inputs
    /// give equal bits.
    ///
    /// # Errors
    /// As [`Kernels::forward`].
    pub fn backward(&self, problem: &Problem, deterministic: bool) -> Result<Backward, Error> {
        self.choose(problem, None, Pass::Backward { deterministic }, |spec| self.backward_with(problem, spec))
    }

    /// [`Kernels::backward`] with a kernel of `family`, be it the fastest here or not.
    ///
    /// # Errors
    /// As [`Kernels::backward`]; a family that does not run here has no plan.
    pub fn backward_of(
        &self,
        problem: &Problem,
        deterministic: bool,
        family: Family,
    ) -> Result<Backward, Error> {
        self.choose(problem, Some(family), Pass::Backward { deterministic }, |spec| {
            self.backward_with(problem, spec)
        })
    }

    /// The backward pass of `problem` by a kernel of the caller's choice.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when the kernel does not compute the problem's gradients, and those of compiling and loading.
    pub fn backward_with(&self, problem: &Problem, spec: &KernelSpec) -> Result<Backward, Error> {
        let launches = Launches::backward(spec, problem, self.arch, self.sms)?;
        Ok(Backward::of(self.load(spec)?, problem, launches))
    }

    /// The first kernel that `bind` takes: remembered, tuned, planned or built in.
    fn choose<P>(
        &self,
        problem: &Problem,
        family: Option<Family>,
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, Error>,
    ) -> Result<P, Error> {
        let key = problem_key(problem, family, pass);
        let chosen = lock(&self.choices).get(&key).cloned();
        if let Some(spec) = chosen {
            return bind(&spec);
        }
        let native = Family::native(self.arch);
        // Kernels by mma.sync run everywhere: what is left when none of the architecture's own compiles cleanly.
        let families = match family {
            Some(family) => vec![family],
            None if native == Family::Sm80 => vec![native],
            None => vec![native, Family::Sm80],
        };
        let tuned = self.tuned(problem, family.unwrap_or(native), pass, &bind);
        let (bound, spec) = match tuned.map_or_else(|| self.planned(problem, &families, pass, &bind), Ok) {
            // Without a compiler there is what was compiled ahead.
            Err(error @ Error::NoCompiler { .. }) => {
                self.bundled(problem, &families, pass, &bind).ok_or(error)??
            }
            planned => planned?,
        };
        lock(&self.choices).remember(key, spec);
        Ok(bound)
    }

    /// The forward pass of `problem` by a kernel of the caller's choice.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when the kernel does not compute the problem, and those of compiling and loading.
    pub fn forward_with(&self, problem: &Problem, spec: &KernelSpec) -> Result<Forward, Error> {
        let launches = Launches::forward(spec, problem, self.arch, self.sms)?;
        Ok(Forward::of(self.load(spec)?, problem, launches))
    }

    /// Makes [`Kernels::forward`], or [`Kernels::backward`] with the kernel's options, use `spec` for exactly this problem from
    /// now on: how tuning results are put to use.
    ///
    /// # Errors
    /// [`Error::Problem`] for a problem that is none, [`Error::Mismatch`] when the kernel does not compute it.
    pub fn prefer(&self, problem: &Problem, spec: KernelSpec) -> Result<(), Error> {
        problem.check()?;
        check_match(&spec, problem)?;
        lock(&self.choices).prefer(problem_key(problem, None, spec.kernel.pass()), spec);
        Ok(())
    }

    /// Compiles with `compiler` from now on, instead of the NVRTC that is found: nvcc, say, or another version.
    pub fn set_compiler(&self, compiler: Compiler) {
        *lock(&self.compiler) = Some(Arc::new(compiler));
    }

    /// The kernel of `spec`, from memory, the built-in bundle, the cache, or compiled now.
    ///
    /// # Errors
    /// [`Error::Spec`] for a spec that is none or not for this GPU, [`Error::Plan`] for one that takes more shared memory than a block
    /// has here, and those of compiling and loading.
    pub fn load(&self, spec: &KernelSpec) -> Result<Arc<LoadedKernel>, Error> {
        let slot = lock(&self.loaded).entry(key_of(spec)).or_default().clone();
        if let Some(kernel) = slot.get() {
            return Ok(kernel.clone());
        }
        check_fit(spec, self.arch)?;
        let source = Source::new(spec, self.arch, Some(smem_bytes(spec)), &self.headers)?;
        let device = (self.arch, self.sms);
        let kernel = match Bundle::embedded().find(&source) {
            Some(cubin) => LoadedKernel::load(&self.context, spec, device, cubin)?,
            None => {
                let compiler = self.compiler()?;
                let compiled = self.cache.get(&compiler, spec, &source)?;
                LoadedKernel::load(&self.context, spec, device, &compiled.cubin)?
            }
        };
        // Of two threads that loaded the same kernel, the first to be here wins; both loads were good.
        Ok(slot.get_or_init(|| Arc::new(kernel)).clone())
    }

    /// The kernel that won by measurement, where one did and it still compiles.
    fn tuned<P>(
        &self,
        problem: &Problem,
        family: Family,
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, Error>,
    ) -> Option<(P, KernelSpec)> {
        let gpu = self.context.name().ok()?;
        let spec = tune::choice(&gpu, problem, family, pass)?;
        match bind(&spec) {
            Ok(bound) => Some((bound, spec)),
            Err(error) => {
                tracing::warn!(%spec, %error, "the tuned kernel is passed over: tune again");
                None
            }
        }
    }

    /// The best of the planner's kernels that compiles cleanly, of the first family that has one.
    fn planned<P>(
        &self,
        problem: &Problem,
        families: &[Family],
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, Error>,
    ) -> Result<(P, KernelSpec), Error> {
        let mut first_error = None;
        for &family in families {
            let options = PlanOptions { family: Some(family), pass, ..PlanOptions::default() };
            let plans = match plan(problem, self.arch, &options) {
                Ok(plans) => plans,
                Err(error) => {
                    first_error.get_or_insert(error.into());
                    continue;
                }
            };
            let mut refused: Vec<(u32, u32)> = Vec::new();
            for spec in plans.into_iter().map(|plan| plan.spec) {
                if refused.len() == TRIES {
                    break;
                }
                // What has a refused kernel's tile mostly spills as well.
                if refused.contains(&spec.tile()) {
                    continue;
                }
                match bind(&spec) {
                    Ok(bound) => return Ok((bound, spec)),
                    // A plan's registers are a prediction; the next tile takes the place of one that spills.
                    Err(error @ Error::Refused { .. }) => {
                        tracing::warn!(%error, "the planner's choice is passed over");
                        refused.push(spec.tile());
                        first_error.get_or_insert(error);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Err(first_error.unwrap_or(Error::Plan(PlanError::NoneFits {
            arch: self.arch,
            tried: 0,
            nearest: Vec::new(),
        })))
    }

    /// The built-in kernel that is predicted to be fastest; `None` when none computes the problem.
    fn bundled<P>(
        &self,
        problem: &Problem,
        families: &[Family],
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, Error>,
    ) -> Option<Result<(P, KernelSpec), Error>> {
        let constants = CostConstants::of(self.arch);
        let suits = |spec: &&KernelSpec| {
            families.contains(&spec.kernel.family())
                && spec.kernel.pass() == pass
                && check_match(spec, problem).is_ok()
        };
        let spec = Bundle::embedded()
            .specs(self.arch)
            .filter(suits)
            .map(|spec| (predict(problem, spec, self.arch, &constants).seconds, spec))
            .min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.to_string().cmp(&b.1.to_string())))?
            .1;
        Some(bind(spec).map(|bound| (bound, spec.clone())))
    }

    fn compiler(&self) -> Result<Arc<Compiler>, Error> {
        let mut found = lock(&self.compiler);
        if let Some(compiler) = &*found {
            return Ok(compiler.clone());
        }
        let compiler = Arc::new(Compiler::find(CompilerKind::Nvrtc)?);
        *found = Some(compiler.clone());
        Ok(compiler)
    }
}

/// Checks what the compiler would not notice. Registers are the compiler's to say.
fn check_fit(spec: &KernelSpec, arch: Arch) -> Result<(), Error> {
    spec.check()?;
    spec.check_arch(arch)?;
    let (need, have) = (smem_bytes(spec), arch.limits().smem_per_block);
    if need <= have {
        return Ok(());
    }
    let nearest = vec![RejectedSpec { spec: spec.clone(), reason: Reason::Smem { need, have } }];
    Err(Error::Plan(PlanError::NoneFits { arch, tried: 1, nearest }))
}

fn problem_key(problem: &Problem, family: Option<Family>, pass: Pass) -> String {
    key_of(&(problem, family, pass))
}

fn key_of(value: &impl serde::Serialize) -> String {
    ron::to_string(value).expect("plain structs of numbers and names always serialise")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The maps are whole whatever a panicking thread was doing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn specs_that_no_launch_could_use_are_refused_with_numbers() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let options = PlanOptions { pass: Pass::BACKWARD, ..PlanOptions::default() };
        let spec = plan(&problem, Arch::Sm80, &options).expect("there are plans").swap_remove(0).spec;
        assert!(check_fit(&spec, Arch::Sm80).is_ok());
        let error = check_fit(&spec, Arch::Sm86).expect_err("it is for 163 KiB").to_string();
        assert!(error.contains("shared memory: needs"), "{error}");
        let broken = KernelSpec { head_dim: u32::MAX, ..spec };
        assert!(matches!(check_fit(&broken, Arch::Sm80), Err(Error::Spec(_))));
    }
}
