//! Kernels that a caller's division of the work asks for, which the planner would not choose.

use std::collections::BTreeMap;
use std::path::Path;

use fa_core::{Arch, Division, Dtype, KernelSpec, Lengths, Mask, Problem, Side};
use fa_kernels::{Cache, Compiler, Error, Headers, Source, smem_bytes};
use fa_planner::plan::{PlanOptions, plan};

/// As many as fa-attn's `first_clean` tries.
const MOST: usize = 8;

/// The best kernel of `division` that compiles cleanly, of as many tiles as are tried for a call.
fn first(
    problem: &Problem,
    division: Division,
    compiler: &Compiler,
    cache: &Cache,
    known: &mut BTreeMap<String, bool>,
) -> KernelSpec {
    let options = PlanOptions::default().with_division(division);
    let plans = plan(problem, Arch::Sm90, &options).expect("there are plans");
    let mut tiles = Vec::new();
    for spec in plans.into_iter().map(|plan| plan.spec) {
        assert!(division.admits(&spec, problem), "{spec} for {division:?}");
        if tiles.contains(&spec.tile()) {
            continue;
        }
        let clean = *known.entry(spec.to_string()).or_insert_with(|| {
            let source =
                Source::new(&spec, Arch::Sm90, Some(smem_bytes(&spec)), &Headers::embedded()).unwrap();
            match cache.get(compiler, &spec, &source) {
                Ok(_) => true,
                Err(Error::Refused { .. }) => false,
                Err(error) => panic!("{spec}: {error}"),
            }
        });
        if clean {
            return spec;
        }
        tiles.push(spec.tile());
        assert!(tiles.len() < MOST, "{division:?} of {problem:?}: none of {MOST} tiles compiles cleanly");
    }
    panic!("{division:?} of {problem:?}: no plan compiles cleanly");
}

#[test]
fn what_callers_divide_has_a_kernel_that_compiles() {
    let compiler = crate::nvrtc();
    let cache = Cache::open(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")), 1 << 30);
    let mut known = BTreeMap::new();
    let base = Problem::square(2, 2048, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(2);
    let paged = Lengths::of(4, Side::packed(4, 1), Side::paged(16, 4096, 4096));
    for lengths in [base.lengths, Lengths::uniform(2, 1, 4096), paged] {
        for (splits, pack_gqa) in [(Some(3), Some(true)), (Some(3), Some(false)), (Some(1), Some(false))] {
            let (problem, division) = (base.with_lengths(lengths), Division { splits, pack_gqa });
            let spec = first(&problem, division, &compiler, &cache, &mut known);
            assert_eq!((spec.split, Some(spec.traits().packs_gqa)), (splits != Some(1), pack_gqa), "{spec}");
        }
    }
}
