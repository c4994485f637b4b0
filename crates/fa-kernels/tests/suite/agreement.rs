//! Planner and launch agree: what the planner ranks, the host's checks of a launch take; what it refuses
//! because no launch holds it, they refuse in the same words.

use fa_core::{
    Arch, Dtype, Extra, Extras, Family, Lengths, Mask, Pass, Problem, ScoreMod, Side, TensorLayout, Unserved,
};
use fa_kernels::launch::{Addresses, Launches};
use fa_kernels::{Error, RawExtras, RawTensor};
use fa_planner::account::Reason;
use fa_planner::plan::{PlanError, PlanOptions, explore, plan_spec};
use proptest::prelude::*;

use crate::launches_of;
use crate::problems::beyond_launches;

const TARGETS: [(Arch, Family, u32); 5] = [
    (Arch::Sm100, Family::Sm100, 148),
    (Arch::Sm90, Family::Sm90, 132),
    (Arch::Sm90, Family::Sm80, 114),
    (Arch::Sm86, Family::Sm80, 84),
    (Arch::Sm80, Family::Sm80, 1),
];

const PASSES: [Pass; 3] = [Pass::Forward, Pass::BACKWARD, Pass::DETERMINISTIC_BACKWARD];

/// The checks of a call whose tensors lie packed, each at an address of its own.
fn check_call(launches: &Launches) -> Result<(), Error> {
    let packed = launches.tensors.iter().enumerate().map(|(i, tensor)| {
        let shape = &tensor.shape;
        let strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim);
        RawTensor { address: (i as u64 + 1) << 50, strides }
    });
    let tensors: Vec<RawTensor> = packed.collect();
    let given = |extra: Extra| launches.extras.iter().find(|need| need.name == extra.name()).map(|_| 1 << 49);
    let extras = RawExtras { inputs: Extras::of(given, given), ..RawExtras::default() };
    launches.check(&Addresses { tensors: &tensors, lse: Some(1 << 48), workspace: Some(1 << 47), extras })
}

/// Whether packed strides are within what a call's checks take: coordinates of TMA reach 2^31 rows of all
/// heads where lengths are on the device, and strides 2^39 elements.
fn strides_fit(problem: &Problem) -> bool {
    let Problem { lengths, heads_q, head_dim, head_dim_v, .. } = problem;
    let rows = lengths.total_q().max(lengths.total_k()).max(1).saturating_mul(*heads_q);
    rows < 1 << 31 && rows.saturating_mul(*head_dim.max(head_dim_v)) < 1 << 39
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn what_is_planned_can_be_launched(problem in beyond_launches(), target in 0usize..5, pass in 0usize..3) {
        prop_assume!(problem.check().is_ok());
        let ((arch, family, sms), pass) = (TARGETS[target], PASSES[pass]);
        let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
        let set = match explore(&problem, arch, &options) {
            Ok(set) => set,
            Err(PlanError::Unserved(unserved)) => {
                prop_assert_eq!(problem.check_gpu(), Err(unserved));
                return Ok(());
            }
            Err(PlanError::PagedBackward { .. } | PlanError::NoKernel { .. }) => return Ok(()),
            Err(error) => panic!("{error}"),
        };
        for planned in &set.plans {
            let launches = match launches_of(&planned.spec, &problem, arch, sms) {
                Ok(launches) => launches,
                Err(error) => panic!("{}: {error}", planned.spec),
            };
            if strides_fit(&problem) {
                check_call(&launches).unwrap_or_else(|error| panic!("{}: {error}", planned.spec));
            }
        }
        for rejected in &set.rejected {
            if let Reason::Launch(reason) = &rejected.reason {
                let refused = launches_of(&rejected.spec, &problem, arch, sms).map(|_| ());
                let text = refused.expect_err("a launch refuses what no launch holds").to_string();
                prop_assert_eq!(text, reason.to_string());
            }
        }
    }
}

/// A page of one key takes a gather, which takes panels of equal width: here K's have 64 columns and V's 32.
#[test]
fn pages_that_no_box_loads_are_planned_as_they_are_launched() {
    let problem = Problem::square(3, 300, 5, 192, Mask::FULL, Dtype::Bf16)
        .with_lengths(Lengths::of(3, Side::padded(300), Side::paged(1, 900, 300)))
        .with_heads(5, 1)
        .with_head_dims(192, 96);
    let of = |family| explore(&problem, Arch::Sm90, &PlanOptions::default().with_family(family));
    let own = of(Some(Family::Sm90)).expect("there are candidates");
    assert!(own.plans.is_empty() && !own.rejected.is_empty());
    let by_page = own.rejected.iter().find(|r| matches!(r.reason, Reason::Launch(Unserved::Page { .. })));
    let by_page = by_page.expect("pages are the reason");
    assert_eq!(by_page.reason.kind(), "pages");
    let judged = plan_spec(&problem, &by_page.spec, Arch::Sm90, &PlanOptions::default());
    assert_eq!(judged.expect_err("the same of a file"), by_page.reason);
    // Without a family those of the SM80 class are there, which the library takes.
    let any = of(None).expect("there are candidates");
    let first = &any.plans.first().expect("the sm80 family loads pages of any size").spec;
    assert_eq!(first.kernel.family(), Family::Sm80);
    launches_of(first, &problem, Arch::Sm90, 132).expect("as planned");
}

#[test]
fn what_no_launch_holds_is_no_plan() {
    let base = Problem::square(1, 1024, 4, 128, Mask::FULL, Dtype::Bf16);
    let capped = |cap| base.with_score(ScoreMod::softcap(cap));
    let long = base.with_lengths(Lengths::uniform(1, 1 << 32, 1 << 32)).with_heads(1, 1);
    for (problem, said) in [
        (capped(5000.0), "softcap = 5000.0"),
        (capped(1e-300), "softcap = 1e-300"),
        (base.with_softmax_scale(Some(0.0)), "softmax_scale = 0.0"),
        (long, "seqlen_q = 4294967296 is above 1073741824: split the problem"),
    ] {
        let error = explore(&problem, Arch::Sm90, &PlanOptions::default()).expect_err("no launch");
        assert!(matches!(error, PlanError::Unserved(_)) && error.to_string().starts_with(said), "{error}");
    }
}
