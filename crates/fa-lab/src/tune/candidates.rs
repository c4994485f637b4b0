//! The candidates for a problem: the planner's best tiles, and variants of the best of them.

use fa_core::{Arch, Family, KernelSpec, Pass, Problem};
use fa_planner::account::account;
use fa_planner::plan::{PlanError, PlanOptions, plan, plan_spec};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kernels;

/// A kernel to measure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The kernel.
    pub spec: KernelSpec,
    /// Predicted milliseconds.
    pub predicted_ms: f64,
    /// Its position in the planner's order, from 0; `None` for kernels that the planner does not list.
    pub rank: Option<usize>,
}

/// The tiles whose knobs are varied.
const VARIED: usize = 3;

/// Kernels for `pass`: the planner's best kernel of each of the `tiles` best tiles (the best of all first),
/// and as many variants of the first few with other knobs.
///
/// # Errors
/// Where no kernel of the family computes the problem.
pub fn of(
    problem: &Problem,
    arch: Arch,
    family: Family,
    pass: Pass,
    tiles: usize,
) -> std::result::Result<Vec<Candidate>, PlanError> {
    let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
    let plans = plan(problem, arch, &options)?;
    let mut found: Vec<Candidate> = Vec::new();
    for (rank, plan) in plans.iter().enumerate() {
        let known = found.iter().any(|known| block(&known.spec) == block(&plan.spec));
        if !known && found.len() < tiles {
            let predicted_ms = plan.cost.seconds * 1e3;
            found.push(Candidate { spec: plan.spec.clone(), predicted_ms, rank: Some(rank) });
        }
    }
    let best: Vec<KernelSpec> = found.iter().take(VARIED).map(|known| known.spec.clone()).collect();
    let most = 2 * found.len();
    // One variant of each tile in turn, so that a small number of variants is spread over the tiles.
    let lists: Vec<Vec<KernelSpec>> = best.iter().map(variants).collect();
    for knob in 0..lists.iter().map(Vec::len).max().unwrap_or(0) {
        for spec in lists.iter().filter_map(|list| list.get(knob)) {
            let known = found.iter().any(|known| known.spec == *spec);
            if known || found.len() >= most || account(spec, arch).is_err() {
                continue;
            }
            if let Ok(plan) = plan_spec(problem, spec, arch, &options) {
                let rank = plans.iter().position(|known| known.spec == *spec);
                found.push(Candidate { spec: spec.clone(), predicted_ms: plan.cost.seconds * 1e3, rank });
            }
        }
    }
    Ok(found)
}

/// The kernels of a caller's own search space, in their order. They are of one family, by which the table of
/// winners is asked.
///
/// # Errors
/// A kernel that does not compute the problem or does not fit, and kernels of several families.
pub fn given(problem: &Problem, arch: Arch, specs: &[KernelSpec]) -> Result<Vec<Candidate>> {
    if let Some(other) = specs.iter().find(|spec| spec.kernel.family() != specs[0].kernel.family()) {
        let text = format!("{} and {other} are of two families: tune each on its own", specs[0]);
        return Err(Error::Request(text));
    }
    let mut found: Vec<Candidate> = Vec::new();
    for spec in specs {
        let planned = plan_spec(problem, spec, arch, &PlanOptions::default());
        let plan = planned.map_err(|why| Error::Request(format!("{spec}: {why}")))?;
        if !found.iter().any(|known| known.spec == *spec) {
            found.push(Candidate { spec: spec.clone(), predicted_ms: plan.cost.seconds * 1e3, rank: None });
        }
    }
    Ok(found)
}

/// A tile: its extents and number of warps.
fn block(spec: &KernelSpec) -> (u32, u32, u32) {
    let (tile_m, tile_n) = spec.tile();
    (tile_m, tile_n, spec.threads())
}

/// `spec` with one knob changed, the most influential first; some may break a rule.
fn variants(spec: &KernelSpec) -> Vec<KernelSpec> {
    let variants = kernels::of(&spec.kernel).variants();
    variants.into_iter().map(|kernel| KernelSpec { kernel, ..spec.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn a_callers_search_space_is_taken_as_it_is() {
        let problem = Problem::square(4, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
        let of = |family| of(&problem, Arch::Sm90, family, Pass::Forward, 3).expect("there are plans");
        let own: Vec<KernelSpec> = of(Family::Sm80).into_iter().rev().map(|one| one.spec).collect();
        let twice: Vec<KernelSpec> = own.iter().chain(&own).cloned().collect();
        let found = given(&problem, Arch::Sm90, &twice).expect("they fit");
        assert_eq!(found.iter().map(|one| &one.spec).collect::<Vec<_>>(), own.iter().collect::<Vec<_>>());
        let refused =
            |specs: &[KernelSpec]| given(&problem, Arch::Sm90, specs).expect_err("refused").to_string();
        let mixed = [own[0].clone(), of(Family::Sm90)[0].spec.clone()];
        assert!(refused(&mixed).contains("two families"), "{}", refused(&mixed));
        let narrow = KernelSpec { head_dim: 64, head_dim_v: 64, ..own[0].clone() };
        assert!(refused(&[narrow]).contains("head"), "an error names what differs");
    }

    #[test]
    fn candidates_are_distinct_fit_and_start_with_the_planners_choice() {
        for (arch, family) in
            [(Arch::Sm90, Family::Sm90), (Arch::Sm90, Family::Sm80), (Arch::Sm80, Family::Sm80)]
        {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                let backward = |deterministic| Pass::Backward { deterministic };
                for pass in [Pass::Forward, backward(false), backward(true)] {
                    let problem = Problem::square(4, 4096, 16, 128, mask, Dtype::Bf16);
                    let found = of(&problem, arch, family, pass, 3).expect("there are plans");
                    let count = found.len();
                    assert!(count > 3 && count <= 6, "{arch} {family:?} {mask} {pass:?}: {count}");
                    assert_eq!(found[0].rank, Some(0));
                    for (index, one) in found.iter().enumerate() {
                        account(&one.spec, arch).unwrap_or_else(|why| panic!("{}: {why}", one.spec));
                        assert_eq!(one.spec.kernel.pass(), pass, "{}", one.spec);
                        let twice = found[..index].iter().any(|other| other.spec == one.spec);
                        assert!(!twice, "{} twice", one.spec);
                    }
                }
            }
        }
    }

    #[test]
    fn every_kernel_has_variants_that_keep_its_rules() {
        for family in [Family::Sm80, Family::Sm90] {
            for pass in [Pass::Forward, Pass::BACKWARD] {
                let problem = Problem::square(4, 4096, 16, 64, Mask::CAUSAL, Dtype::Bf16);
                let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
                let spec = plan(&problem, Arch::Sm90, &options).expect("there are plans").swap_remove(0).spec;
                let all = variants(&spec);
                let kept = all.iter().filter(|variant| variant.check().is_ok()).count();
                assert!(2 * kept > all.len(), "{spec}: {kept} of {}", all.len());
            }
        }
    }
}
