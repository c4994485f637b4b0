//! Kernels of one context: compiled and loaded on first use, kept afterwards. Which kernel to use is the
//! caller's choice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::CudaContext;
use fa_core::quantize::Codes;
use fa_core::{Append, Arch, ArchLimits, KernelSpec, LaunchPlan, Merge, Problem};

use crate::jit::bundle::Bundle;
use crate::jit::cache::Cache;
use crate::jit::compile::{Compiler, CompilerKind};
use crate::jit::entries::{DROPOUT, MERGE, append_entry};
use crate::jit::source::Source;
use crate::launch::Launches;
use crate::launch::append::{AppendLaunch, BoundAppend};
use crate::launch::call::{Backward, Forward};
use crate::launch::dropout::{BoundDropout, DropoutLaunch};
use crate::launch::merge::{BoundMerge, MergeLaunch};
use crate::launch::module::{LoadedKernel, SharedModules};
use crate::launch::single::Single;
use crate::{Error, Headers, driver, smem_bytes};

/// Compiled kernels for one context. Shared by threads.
pub struct Kernels {
    context: Arc<CudaContext>,
    arch: Arch,
    sms: u32,
    board: ArchLimits,
    headers: Headers,
    cache: Arc<Cache>,
    compiler: Mutex<Option<Arc<Compiler>>>,
    loaded: Mutex<HashMap<KernelSpec, Arc<OnceLock<Arc<LoadedKernel>>>>>,
    shared: SharedModules,
    append: OnceLock<Arc<Single>>,
    append_codes: OnceLock<Arc<Single>>,
    append_int4: OnceLock<Arc<Single>>,
    merge: OnceLock<Arc<Single>>,
    dropout: OnceLock<Arc<Single>>,
}

impl Kernels {
    /// Kernels for the GPU of `context`, with the default cache and [`Headers::current`]; nothing is compiled
    /// yet.
    ///
    /// # Errors
    /// [`Error::Device`] for a GPU older than compute capability 8.0, [`Error::Io`] for headers.
    pub fn new(context: &Arc<CudaContext>) -> Result<Kernels, Error> {
        Kernels::with(context, Cache::open_default(), Headers::current()?)
    }

    /// [`Kernels::new`] with a cache and headers of the caller's choice.
    ///
    /// # Errors
    /// As [`Kernels::new`].
    pub fn with(context: &Arc<CudaContext>, cache: Cache, headers: Headers) -> Result<Kernels, Error> {
        Kernels::of(context, Arc::new(cache), headers, None)
    }

    /// The same headers, cache and compiler for another handle of the GPU's context, such as one whose
    /// streams are not synchronised with those of this one. Kernels are loaded again, and not compiled again.
    ///
    /// # Errors
    /// As [`Kernels::new`].
    pub fn on(&self, context: &Arc<CudaContext>) -> Result<Kernels, Error> {
        let compiler = lock(&self.compiler).clone();
        Kernels::of(context, self.cache.clone(), self.headers.clone(), compiler)
    }

    fn of(
        context: &Arc<CudaContext>,
        cache: Arc<Cache>,
        headers: Headers,
        compiler: Option<Arc<Compiler>>,
    ) -> Result<Kernels, Error> {
        let (arch, board) = driver::board(context)?;
        Ok(Kernels {
            context: context.clone(),
            arch,
            sms: board.sms,
            board,
            headers,
            cache,
            compiler: Mutex::new(compiler),
            loaded: Mutex::default(),
            shared: SharedModules::default(),
            append: OnceLock::new(),
            append_codes: OnceLock::new(),
            append_int4: OnceLock::new(),
            merge: OnceLock::new(),
            dropout: OnceLock::new(),
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

    /// SMs of the GPU.
    pub fn sms(&self) -> u32 {
        self.sms
    }

    /// The limits and rates of the GPU's board.
    pub fn board(&self) -> &ArchLimits {
        &self.board
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The backward pass of `problem` by a plan of the caller's choice.
    ///
    /// # Errors
    /// Those of [`Launches::backward`], and those of compiling and loading.
    pub fn backward(&self, problem: &Problem, plan: &LaunchPlan) -> Result<Backward, Error> {
        let launches = Launches::backward(plan, problem, self.arch, self.sms)?;
        Ok(Backward::of(self.load(&plan.spec)?, problem, plan, launches))
    }

    /// The forward pass of `problem` by a plan of the caller's choice.
    ///
    /// # Errors
    /// Those of [`Launches::forward`], and those of compiling and loading.
    pub fn forward(&self, problem: &Problem, plan: &LaunchPlan) -> Result<Forward, Error> {
        let launches = Launches::forward(plan, problem, self.arch, self.sms)?;
        Ok(Forward::of(self.load(&plan.spec)?, problem, plan, launches))
    }

    /// The kernel that appends keys and values to a cache, with rotary embedding: one for all problems,
    /// compiled and loaded on first use.
    ///
    /// # Errors
    /// [`Error::Append`], and those of compiling and loading.
    pub fn append(&self, append: &Append) -> Result<BoundAppend, Error> {
        append.check_on_gpu()?;
        let codes = append.codes.map(|codes| codes.kind);
        let slot = match codes {
            None => &self.append,
            Some(Codes::E4m3 | Codes::Int8 | Codes::E5m2) => &self.append_codes,
            Some(Codes::Int4) => &self.append_int4,
        };
        let source = |arch: Arch, headers: &Headers| Source::append(codes, arch, headers);
        let kernel = self.single(slot, append_entry(codes), source)?;
        Ok(BoundAppend::new(kernel, AppendLaunch::new(append, self.sms)?))
    }

    /// The kernel that merges partial results over different keys of the same queries: one for all problems,
    /// compiled and loaded on first use.
    ///
    /// # Errors
    /// [`Error::Merge`], and those of compiling and loading.
    pub fn merge(&self, merge: &Merge) -> Result<BoundMerge, Error> {
        merge.check()?;
        let kernel = self.single(&self.merge, MERGE, Source::merge)?;
        Ok(BoundMerge::new(kernel, MergeLaunch::new(merge, self.sms)?))
    }

    /// The kernel that writes which probabilities dropout keeps, as bits `[heads, queries, words]`: one for
    /// all problems, compiled and loaded on first use.
    ///
    /// # Errors
    /// Those of [`DropoutLaunch::new`], and those of compiling and loading.
    pub fn dropout(&self, heads: usize, queries: usize, words: usize) -> Result<BoundDropout, Error> {
        let launch = DropoutLaunch::new(heads, queries, words, self.sms)?;
        Ok(BoundDropout::new(self.single(&self.dropout, DROPOUT, Source::dropout)?, launch))
    }

    /// The kernel of a unit without a spec, whose one entry is `name`: from `slot`, or compiled and loaded
    /// now.
    fn single(
        &self,
        slot: &OnceLock<Arc<Single>>,
        name: &str,
        source: impl FnOnce(Arch, &Headers) -> Result<Source, Error>,
    ) -> Result<Arc<Single>, Error> {
        if let Some(kernel) = slot.get() {
            return Ok(kernel.clone());
        }
        let source = source(self.arch, &self.headers)?;
        let kernel = match Bundle::embedded().find(&source) {
            Some(cubin) => Single::load(&self.context, name, cubin)?,
            None => {
                let compiled = self.cache.get_named(&*self.compiler()?, name, None, &source)?;
                Single::load(&self.context, name, &compiled.cubin)?
            }
        };
        // If two threads load it, the first one wins; both loads are valid.
        Ok(slot.get_or_init(|| Arc::new(kernel)).clone())
    }

    /// The kernel of `spec`, from memory, the built-in bundle, the cache, or compiled now.
    ///
    /// # Errors
    /// [`Error::Spec`] for an invalid spec or one that is not for this GPU, [`Error::SharedMemory`] for one
    /// that takes more than a CTA has here, and those of compiling and loading.
    pub fn load(&self, spec: &KernelSpec) -> Result<Arc<LoadedKernel>, Error> {
        let slot = lock(&self.loaded).entry(spec.clone()).or_default().clone();
        if let Some(kernel) = slot.get() {
            return Ok(kernel.clone());
        }
        let programs = self.programs(spec)?;
        let device = (self.arch, self.sms);
        let load = |cubins: &[&[u8]]| LoadedKernel::load(&self.context, spec, device, cubins, &self.shared);
        let kernel = match Bundle::embedded().find_all(&programs) {
            Some(cubins) => load(&cubins)?,
            None => {
                let compiled = self.cache.get_all(&*self.compiler()?, spec, &programs)?;
                let cubins: Vec<&[u8]> = compiled.iter().map(|own| own.cubin.as_slice()).collect();
                load(&cubins)?
            }
        };
        // If two threads load the same kernel, the first one wins; both loads are valid.
        Ok(slot.get_or_init(|| Arc::new(kernel)).clone())
    }

    /// Compiles the kernel of `spec` where neither bundle nor cache have it, and does not load it.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    pub fn compile(&self, spec: &KernelSpec) -> Result<(), Error> {
        let programs = self.programs(spec)?;
        if Bundle::embedded().find_all(&programs).is_none() {
            self.cache.get_all(&*self.compiler()?, spec, &programs)?;
        }
        Ok(())
    }

    /// The compiler's name and version, and a hash of compiler, flags and sources of the kernel of `spec`.
    ///
    /// # Errors
    /// As [`Kernels::load`], without compiling.
    pub fn identity(&self, spec: &KernelSpec) -> Result<(String, String), Error> {
        self.cache.identity_of_all(&*self.compiler()?, &self.programs(spec)?)
    }

    fn programs(&self, spec: &KernelSpec) -> Result<Vec<Source>, Error> {
        check_fit(spec, self.arch)?;
        Source::programs(spec, self.arch, Some(smem_bytes(spec)), &self.headers)
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

/// Checks limits that the compiler does not check. It checks registers itself.
fn check_fit(spec: &KernelSpec, arch: Arch) -> Result<(), Error> {
    spec.check()?;
    spec.check_arch(arch)?;
    let (need, have) = (smem_bytes(spec), arch.limits().smem_per_block);
    if need <= have {
        return Ok(());
    }
    Err(Error::SharedMemory { name: spec.to_string(), arch, need, have })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The maps are valid even if another thread panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask, Pass};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    #[test]
    fn specs_that_no_launch_could_use_are_refused_with_numbers() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let options = PlanOptions::default().with_pass(Pass::BACKWARD);
        let spec = plan(&problem, Arch::Sm80, &options).expect("there are plans").swap_remove(0).spec;
        assert!(check_fit(&spec, Arch::Sm80).is_ok());
        let error = check_fit(&spec, Arch::Sm86).expect_err("it is for 163 KiB").to_string();
        assert!(error.contains("shared memory: needs"), "{error}");
        let broken = KernelSpec { head_dim: u32::MAX, ..spec };
        assert!(matches!(check_fit(&broken, Arch::Sm80), Err(Error::Spec(_))));
    }
}
