//! The first kernel of a list that compiles cleanly.

use fa_core::KernelSpec;
use fa_kernels::Error;

/// Kernels that are tried when they do not compile cleanly.
const TRIES: usize = 8;

/// A kernel that compiles cleanly, and those before it in its list that do not.
#[derive(Debug)]
pub struct Clean<P> {
    /// What `bind` returned for it.
    pub bound: P,
    /// The kernel.
    pub spec: KernelSpec,
    /// Why those before it were refused, in the order of trying: each is an [`Error::is_of_kernel`].
    pub refused: Vec<Error>,
}

/// The first of `specs` (best first) that `bind` accepts; `None` where `specs` is empty. A kernel that does
/// not compile cleanly is skipped together with the others of its tile, most of which spill as well: these
/// are tried once no other tile is left. The search ends after eight kernels. [`crate::device::Gpu::bind`]
/// uses it on the planner's kernels.
///
/// # Errors
/// The first refusal if no kernel is accepted; an error of `bind` that is not one kernel's ends the search.
pub fn first_clean<P>(
    specs: impl IntoIterator<Item = KernelSpec>,
    bind: impl Fn(&KernelSpec) -> Result<P, Error>,
) -> Result<Option<Clean<P>>, Error> {
    let mut refused = Vec::new();
    let mut tried: Vec<KernelSpec> = Vec::new();
    let mut skipped = Vec::new();
    let mut specs = specs.into_iter();
    let mut others = Vec::new().into_iter();
    while tried.len() < TRIES {
        let spec = match specs.next() {
            Some(spec) if tried.iter().any(|own| own.tile() == spec.tile()) => {
                skipped.push(spec);
                continue;
            }
            Some(spec) => spec,
            None => {
                others = if skipped.is_empty() { others } else { std::mem::take(&mut skipped).into_iter() };
                let Some(spec) = others.next() else { break };
                spec
            }
        };
        // The list of all begins with the best, which was tried before there was one.
        if tried.contains(&spec) {
            continue;
        }
        match bind(&spec) {
            Ok(bound) => return Ok(Some(Clean { bound, spec, refused })),
            Err(error) if error.is_of_kernel() => {
                tracing::warn!(%error, "the planner's choice is passed over");
                tried.push(spec);
                refused.push(error);
            }
            Err(error) => return Err(error),
        }
    }
    refused.into_iter().next().map_or(Ok(None), Err)
}

#[cfg(test)]
mod tests {
    use fa_core::{Arch, Dtype, Mask, Problem};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    fn spills(spec: &KernelSpec) -> Error {
        let fault = fa_kernels::Fault::Spills { stores: 4, loads: 4 };
        Error::Refused { name: spec.to_string(), target: "sm_80".to_owned(), fault, log_file: None }
    }

    fn fails(spec: &KernelSpec) -> Error {
        Error::Compile {
            name: spec.to_string(),
            target: "sm_80".to_owned(),
            log: String::new(),
            log_file: None,
        }
    }

    #[test]
    fn tiles_that_spill_are_passed_over_in_the_planners_order() {
        let problem = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
        let plans = plan(&problem, Arch::Sm80, &PlanOptions::default()).expect("there are plans");
        let specs: Vec<KernelSpec> = plans.into_iter().map(|plan| plan.spec).collect();
        let mut tiles: Vec<(u32, u32)> = Vec::new();
        for spec in &specs {
            if !tiles.contains(&spec.tile()) {
                tiles.push(spec.tile());
            }
        }
        assert!(tiles.len() > 3, "{tiles:?}");

        let all = first_clean(specs.clone(), |spec| Ok(spec.tile())).expect("nothing fails").expect("one");
        assert!(all.spec == specs[0] && all.refused.is_empty());

        let bad = &tiles[..2];
        let bind = |spec: &KernelSpec| if bad.contains(&spec.tile()) { Err(spills(spec)) } else { Ok(()) };
        let third = first_clean(specs.clone(), bind).expect("the third is clean").expect("one");
        assert_eq!(third.spec.tile(), tiles[2]);
        // Once for each tile.
        assert_eq!(third.refused.len(), 2);

        // Where no other tile is left, the others of those that were tried are.
        let of_first: Vec<KernelSpec> =
            specs.iter().filter(|spec| spec.tile() == tiles[0]).cloned().collect();
        assert!(of_first.len() > 2, "{of_first:?}");
        for clean in [1, 2] {
            let listed = [&specs[..1], &of_first].concat();
            let bind = |spec: &KernelSpec| if *spec == of_first[clean] { Ok(()) } else { Err(fails(spec)) };
            let found = first_clean(listed, bind).expect("another of the tile is clean").expect("one");
            assert_eq!((&found.spec, found.refused.len()), (&of_first[clean], clean));
        }

        let none = first_clean(specs.clone(), |spec| Err::<(), _>(spills(spec))).expect_err("all spill");
        assert!(matches!(&none, Error::Refused { name, .. } if *name == specs[0].to_string()), "{none}");
        let lost = || Error::Device { major: 7, minor: 5 };
        let other = first_clean(specs.clone(), |_| Err::<(), _>(lost())).expect_err("no refusal");
        assert!(matches!(other, Error::Device { .. }), "{other}");
        assert!(first_clean(Vec::new(), |_| Ok(())).expect("nothing to refuse").is_none());
    }
}
