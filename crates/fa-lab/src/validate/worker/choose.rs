//! Which kernels cases are tried with.

use std::collections::{HashMap, HashSet};

use fa_core::{Arch, Family, KernelSpec, Pass, Problem, Reads};
use fa_planner::account::account;
use fa_planner::plan::{PlanOptions, plan};

use crate::grid::{Action, Case, is_serving};
use crate::kernels;

/// Kernels chosen for many cases together: the planner's first choices differ from problem to problem for a
/// few percent of time, and each takes seconds to compile.
#[derive(Default)]
pub(super) struct Chosen {
    forward: HashMap<String, KernelSpec>,
    backward: HashMap<String, KernelSpec>,
}

/// Number of the planner's best kernels among which one that another case uses is preferred.
const AMONG: usize = 40;

impl Chosen {
    /// Kernels for the serving cases, as few as [`AMONG`] allows.
    pub(super) fn few(cases: &[Case], arch: Arch, family: Family) -> Chosen {
        let mut chosen = Chosen::default();
        let (mut forwards, mut backwards) = (HashSet::new(), HashSet::new());
        let own = |case: &&Case| is_serving(case.group) && case.kernel.is_none();
        for case in cases.iter().filter(own) {
            let of = |pass| listed(&case.problem, pass, arch, family, case.split);
            let forward = one_of(of(Pass::Forward), &mut forwards);
            chosen.forward.extend(forward.map(|spec| (case.name(), spec)));
            if case.pass.is_backward() {
                let backward = one_of(of(case.pass), &mut backwards);
                chosen.backward.extend(backward.map(|spec| (case.name(), spec)));
            }
        }
        chosen
    }

    /// The forward's kernel for a case.
    pub(super) fn forward(&self, case: &Case) -> Option<&KernelSpec> {
        self.forward.get(&case.name())
    }

    /// The backward's.
    pub(super) fn backward(&self, case: &Case) -> Option<&KernelSpec> {
        self.backward.get(&case.name())
    }
}

/// One of the best that is used already, or else the best.
fn one_of(listed: Vec<KernelSpec>, known: &mut HashSet<String>) -> Option<KernelSpec> {
    let found = listed.iter().take(AMONG).find(|spec| known.contains(&spec.to_ron()));
    let found = found.or(listed.first())?.clone();
    known.insert(found.to_ron());
    Some(found)
}

/// The planner's kernels for a case, best first: `chosen` before the others. Where keys are to be divided,
/// those that the planner lists so come first, then the others with it: of short problems the few that gain
/// by it may all spill.
pub(super) fn ranked(
    case: &Case,
    pass: Pass,
    arch: Arch,
    family: Family,
    chosen: &KernelSpec,
) -> impl Iterator<Item = KernelSpec> {
    let others = move || listed(&case.problem, pass, arch, family, case.split);
    let forced = move || {
        let plain = if case.split { listed(&case.problem, pass, arch, family, false) } else { Vec::new() };
        dividing(plain, arch)
    };
    let others = std::iter::once_with(others).flatten().chain(std::iter::once_with(forced).flatten());
    std::iter::once(chosen.clone()).chain(others)
}

/// The planner's kernels, best first; where `split`, those whose CTAs share a row's keys.
fn listed(problem: &Problem, pass: Pass, arch: Arch, family: Family, split: bool) -> Vec<KernelSpec> {
    let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
    let specs: Vec<KernelSpec> = match plan(problem, arch, &options) {
        Ok(plans) => plans.into_iter().map(|plan| plan.spec).collect(),
        Err(_) => Vec::new(),
    };
    if !split {
        return specs;
    }
    let own: Vec<KernelSpec> = specs.iter().filter(|spec| spec.split).cloned().collect();
    if !own.is_empty() {
        return own;
    }
    // For short problems the planner lists none with splits: then the others, with splits turned on.
    dividing(specs, arch)
}

/// The kernels with splits turned on, where they fit.
fn dividing(specs: Vec<KernelSpec>, arch: Arch) -> Vec<KernelSpec> {
    let fits = |spec: &KernelSpec| spec.check().is_ok() && account(spec, arch).is_ok();
    specs.into_iter().map(|spec| KernelSpec { split: true, ..spec }).filter(fits).collect()
}

/// The planner's best kernel for a case.
pub(super) fn first(case: &Case, arch: Arch, family: Family) -> Option<KernelSpec> {
    listed(&case.problem, case.pass, arch, family, case.split).into_iter().next()
}

/// The planner's best kernel whose CTAs share a row's keys.
///
/// # Errors
/// What the planner says where it has none at all, and [`fa_kernels::Error::Mismatch`] where none splits.
pub(super) fn splitting(case: &Case, arch: Arch, family: Family) -> Result<KernelSpec, fa_attn::Error> {
    let options = PlanOptions::default().with_family(Some(family)).with_pass(case.pass);
    plan(&case.problem, arch, &options)?;
    let none = || {
        let kernel = "kernels that do not split keys".to_owned();
        fa_kernels::Error::Mismatch { what: "split", kernel, problem: "splits".to_owned() }
    };
    Ok(first(case, arch, family).ok_or_else(none)?)
}

/// The same kernel for rows that are read in another way; without the code for pages where there are none.
pub(super) fn with_reads(of: &KernelSpec, reads: Reads) -> KernelSpec {
    let without = if reads.paged { None } else { kernels::of(&of.kernel).without_pages() };
    KernelSpec { reads, kernel: without.unwrap_or_else(|| of.kernel.clone()), ..of.clone() }
}

/// How the kernel of a case's twin finds rows; `None` where the case has none.
pub(super) fn twin_reads(case: &Case) -> Option<Reads> {
    match case.action {
        Action::AsDense => Some(Reads::UNIFORM),
        Action::AsContiguous => Some(Reads { varied: true, paged: false }),
        Action::Once
        | Action::Repeat(_)
        | Action::Graph
        | Action::OwnStream
        | Action::Threads
        | Action::Relength
        | Action::BadPages
        | Action::Measure => None,
    }
}

#[cfg(test)]
mod tests {
    use fa_attn::device::first_clean;
    use fa_core::{Dtype, Lengths, Mask};

    use super::*;
    use crate::grid::{Extent, case, serving, serving_gradients};

    /// Windows over short caches: few tiles gain from splits, and the large ones spill.
    #[test]
    fn kernels_that_divide_keys_by_force_follow_those_that_gain_by_it() {
        let base = Problem::square(2, 1, 8, 64, Mask::window(40, 11), Dtype::Bf16);
        let wide = base.with_head_dims(192, 128).with_heads_kv(1);
        let narrow = base.with_heads(6, 1);
        for problem in [
            wide.with_lengths(Lengths::uniform(2, 1, 2000)),
            narrow.with_lengths(Lengths::uniform(2, 15, 2042)),
        ] {
            let case = Case { split: true, ..case("split", problem) };
            let own = listed(&problem, Pass::Forward, Arch::Sm90, Family::Sm80, true);
            let all: Vec<KernelSpec> =
                ranked(&case, Pass::Forward, Arch::Sm90, Family::Sm80, &own[0]).collect();
            assert!(all.iter().all(|spec| spec.split) && all[1..].starts_with(&own));
            assert!(all.len() > 1 + own.len(), "none divides keys by force");
            let spills = |spec: &KernelSpec| spec.tile().0 >= 256;
            let bind = |spec: &KernelSpec| match spills(spec) {
                true => Err(fa_kernels::Error::Refused {
                    name: spec.to_string(),
                    target: "sm_90".to_owned(),
                    fault: fa_kernels::Fault::Spills { stores: 8, loads: 8 },
                    log_file: None,
                }),
                false => Ok(()),
            };
            let found = first_clean(all, bind).expect("another tile").expect("there are kernels");
            assert!(found.spec.split && found.spec.tile().0 < 256, "{}", found.spec);
        }
    }

    #[test]
    fn cases_share_kernels_that_compute_them() {
        // Gathered pages need other kernels.
        for (cases, most) in [(serving(Extent::Quick, 2), 195), (serving_gradients(Extent::Quick, 2), 190)] {
            let chosen = Chosen::few(&cases, Arch::Sm90, Family::Sm90);
            let mut kernels = HashSet::new();
            for case in &cases {
                for spec in [chosen.forward(case), chosen.backward(case)].into_iter().flatten() {
                    spec.serves(&case.problem).unwrap_or_else(|error| panic!("{}: {error}", case.name()));
                    kernels.insert(spec.to_ron());
                }
                let split = chosen.forward(case).is_none_or(|spec| spec.split || !case.split);
                assert!(split, "{}", case.name());
            }
            assert!(kernels.len() < most, "{} kernels for {} cases", kernels.len(), cases.len());
        }
    }
}
