//! Deterministic backwards whose tiles run in sections of heads and whose query heads are in parts: right,
//! the same bits under every schedule, and no CTA waits for one that may never run.

use fa_core::{Arch, KernelSpec, Lengths, Mask, Problem, TensorLayout};
use fa_emu::{Options, Placement, Trial};
use fa_kernels::launch::{Addresses, Launches, Params};
use fa_kernels::{Headers, RawTensor};
use fa_planner::divide;

use crate::emulator;
use crate::{BACKWARDS, backward};

fn spec(kernel: &str, mask: Mask) -> KernelSpec {
    let mask = match mask {
        Mask::FULL => "full",
        Mask::CAUSAL => "causal",
        _ => "window",
    };
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: false, kernel: {kernel})"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Lengths, heads, mask, SMs, CTAs at a time, and whether there are to be several sections and several parts.
struct Case {
    lengths: Lengths,
    heads: (usize, usize),
    mask: Mask,
    sms: u32,
    resident: u32,
    sections: bool,
    parts: bool,
}

#[test]
#[ignore = "emulation"]
fn sections_and_parts_give_the_same_bits_under_every_schedule() {
    let emulator = emulator();
    let case = |lengths: (usize, usize, usize), heads, mask, sms, resident, sections, parts| Case {
        lengths: Lengths::uniform(lengths.0, lengths.1, lengths.2),
        heads,
        mask,
        sms,
        resident,
        sections,
        parts,
    };
    let cases = [
        case((1, 260, 260), (4, 4), Mask::CAUSAL, 2, 2, true, false),
        case((1, 260, 260), (4, 4), Mask::CAUSAL, 2, 1, true, false),
        case((1, 200, 330), (4, 1), Mask::CAUSAL, 64, 5, false, true),
        case((2, 330, 200), (4, 2), Mask::CAUSAL, 64, 3, false, true),
        case((1, 260, 260), (3, 3), Mask::FULL, 2, 2, true, false),
        case((1, 260, 260), (3, 3), Mask::FULL, 64, 4, false, false),
        case((1, 130, 260), (6, 1), Mask::FULL, 64, 4, false, true),
        case((1, 400, 400), (4, 2), Mask::window(100, 0), 2, 2, true, false),
        case((1, 300, 300), (3, 1), Mask::window(70, 40), 64, 3, false, true),
    ];
    for family in BACKWARDS {
        for case in &cases {
            let spec = spec(&backward(family, "Natural", true), case.mask);
            let unit = emulator.unit(&spec, Arch::Sm90, &Headers::embedded()).unwrap();
            let problem = Problem::square(1, 1, 1, 64, case.mask, spec.types.q)
                .with_lengths(case.lengths)
                .with_heads(case.heads.0, case.heads.1);
            let plan = divide(&problem, &spec, Arch::Sm90, case.sms, None);
            let launches = Launches::of(&plan, &problem, Arch::Sm90, case.sms).unwrap();
            let nowhere = RawTensor { address: 0, strides: TensorLayout::Bshd.strides(1, 1, 64) };
            let at =
                Addresses { tensors: &[nowhere; 8], lse: None, workspace: None, extras: Default::default() };
            let Params::Backward(params) = launches.params(&at) else { panic!("a backward") };
            let is = (params.sections > 0, params.head_splits > 1);
            assert_eq!(is, (case.sections, case.parts), "{problem:?}: {params:?}");
            let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
            let mut bits = None;
            for seed in fa_emu::sweep::SEEDS {
                let options = Options { sms: case.sms, resident: case.resident, ..Options::seed(seed) };
                let proof = trial.run(&unit, &options).unwrap();
                assert!(proof.passed(), "{spec} {problem:?} seed {seed}:\n{}", proof.faults().join("\n"));
                let first = bits.get_or_insert_with(|| proof.bits.clone());
                assert_eq!(*first, proof.bits, "{spec} {problem:?} seed {seed}");
            }
        }
    }
}
