//! Which kernel computes a problem: remembered, tuned, planned, or of the built-in bundle.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use fa_core::{Family, KernelSpec, Pass, Problem};
use fa_kernels::Kernels;
use fa_kernels::bundle::Bundle;
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanError, PlanOptions, plan};

use crate::error::Error;
use crate::tune::Tables;

/// Choices that are remembered at the most, some 4 MB: lengths that never come again must not fill the memory
/// of a server.
const REMEMBERED: usize = 4096;

/// How many of the planner's best tiles are tried when one does not compile cleanly.
const TRIES: usize = 8;

/// Chooses kernels for one GPU, and remembers what it chose.
#[derive(Default)]
pub(crate) struct Chooser {
    choices: Mutex<Choices>,
    /// The tables of tuned kernels, read when the first choice is made.
    tables: OnceLock<Tables>,
}

impl Chooser {
    /// The first kernel that `bind` takes.
    pub(crate) fn choose<P>(
        &self,
        kernels: &Kernels,
        problem: &Problem,
        family: Option<Family>,
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Result<P, Error> {
        let key = key(problem, family, pass);
        let remembered = self.choices().get(&key).cloned();
        if let Some(spec) = remembered {
            return Ok(bind(&spec)?);
        }
        let native = Family::native(kernels.arch());
        // Kernels by mma.sync run everywhere: what is left when none of the architecture's own compiles
        // cleanly.
        let families = match family {
            Some(family) => vec![family],
            None if native == Family::Sm80 => vec![native],
            None => vec![native, Family::Sm80],
        };
        let tuned = self.tuned(kernels, problem, family.unwrap_or(native), pass, &bind);
        let (bound, spec) = match tuned.map_or_else(|| planned(kernels, problem, &families, pass, &bind), Ok)
        {
            // Without a compiler there is what was compiled ahead.
            Err(Error::Kernels(error @ fa_kernels::Error::NoCompiler { .. })) => {
                bundled(kernels, problem, &families, pass, &bind).ok_or(error)??
            }
            planned => planned?,
        };
        self.choices().remember(key, spec);
        Ok(bound)
    }

    /// Uses `spec` for its pass of exactly this problem from now on.
    pub(crate) fn prefer(&self, problem: &Problem, spec: KernelSpec) -> Result<(), Error> {
        problem.check()?;
        spec.serves(problem).map_err(fa_kernels::Error::from)?;
        let pass = spec.kernel.pass();
        self.choices().prefer(key(problem, None, pass), spec);
        Ok(())
    }

    /// The kernel that won by measurement, where one did and it still compiles.
    fn tuned<P>(
        &self,
        kernels: &Kernels,
        problem: &Problem,
        family: Family,
        pass: Pass,
        bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
    ) -> Option<(P, KernelSpec)> {
        let gpu = kernels.context().name().ok()?;
        let spec = self.tables.get_or_init(Tables::read).find(&gpu, problem, family, pass)?;
        match bind(&spec) {
            Ok(bound) => Some((bound, spec)),
            Err(error) => {
                tracing::warn!(%spec, %error, "the tuned kernel is passed over: tune again");
                None
            }
        }
    }

    fn choices(&self) -> MutexGuard<'_, Choices> {
        // The maps are whole whatever a panicking thread was doing.
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The best of the planner's kernels that compiles cleanly, of the first family that has one.
fn planned<P>(
    kernels: &Kernels,
    problem: &Problem,
    families: &[Family],
    pass: Pass,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Result<(P, KernelSpec), Error> {
    let mut first_error = None;
    for &family in families {
        let options = PlanOptions { family: Some(family), pass, ..PlanOptions::default() };
        let plans = match plan(problem, kernels.arch(), &options) {
            Ok(plans) => plans,
            Err(error) => {
                first_error.get_or_insert(Error::Plan(error));
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
                Err(error @ fa_kernels::Error::Refused { .. }) => {
                    tracing::warn!(%error, "the planner's choice is passed over");
                    refused.push(spec.tile());
                    first_error.get_or_insert(error.into());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Err(first_error.unwrap_or(Error::Plan(PlanError::NoneFits {
        arch: kernels.arch(),
        tried: 0,
        nearest: Vec::new(),
    })))
}

/// The built-in kernel that is predicted to be fastest; `None` when none computes the problem.
fn bundled<P>(
    kernels: &Kernels,
    problem: &Problem,
    families: &[Family],
    pass: Pass,
    bind: impl Fn(&KernelSpec) -> Result<P, fa_kernels::Error>,
) -> Option<Result<(P, KernelSpec), fa_kernels::Error>> {
    let arch = kernels.arch();
    let constants = CostConstants::of(arch);
    let suits = |spec: &&KernelSpec| {
        families.contains(&spec.kernel.family()) && spec.kernel.pass() == pass && spec.serves(problem).is_ok()
    };
    let spec = Bundle::embedded()
        .specs(arch)
        .filter(suits)
        .map(|spec| (predict(problem, spec, arch, &constants).seconds, spec))
        .min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.to_string().cmp(&b.1.to_string())))?
        .1;
    Some(bind(spec).map(|bound| (bound, spec.clone())))
}

/// All that a choice depends on, as RON text: plain data, looked up when a problem is bound and not in a
/// launch.
fn key(problem: &Problem, family: Option<Family>, pass: Pass) -> String {
    ron::to_string(&(problem, family, pass)).expect("plain structs of numbers and names always serialise")
}

/// Kernels by the key of a problem: what a caller prefers for good, what was chosen as long as there is room.
#[derive(Debug, Default)]
struct Choices {
    preferred: HashMap<String, KernelSpec>,
    chosen: HashMap<String, KernelSpec>,
}

impl Choices {
    /// The kernel for the problem of `key`.
    fn get(&self, key: &str) -> Option<&KernelSpec> {
        self.preferred.get(key).or_else(|| self.chosen.get(key))
    }

    /// Keeps `spec`, which may be forgotten: it is chosen again at the cost of planning, a millisecond or
    /// two.
    fn remember(&mut self, key: String, spec: KernelSpec) {
        if self.chosen.len() >= REMEMBERED {
            self.chosen.clear();
        }
        self.chosen.insert(key, spec);
    }

    /// Keeps `spec` for good.
    fn prefer(&mut self, key: String, spec: KernelSpec) {
        self.preferred.insert(key, spec);
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask, Problem};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    #[test]
    fn what_is_preferred_stays_and_what_is_chosen_takes_bounded_room() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let mut plans = plan(&problem, Arch::Sm80, &PlanOptions::default()).expect("there are plans");
        let (first, second) = (plans.swap_remove(0).spec, plans.swap_remove(0).spec);
        let mut choices = Choices::default();
        choices.remember("a".to_owned(), first.clone());
        choices.prefer("a".to_owned(), second.clone());
        for i in 0..2 * REMEMBERED {
            choices.remember(i.to_string(), first.clone());
            assert_eq!(choices.get(&i.to_string()), Some(&first));
            assert!(choices.chosen.len() <= REMEMBERED);
        }
        assert_eq!(choices.get("a"), Some(&second));
        assert_eq!(choices.get("0"), None);
    }
}
