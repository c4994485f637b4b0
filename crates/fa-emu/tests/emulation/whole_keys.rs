//! SM90 backwards whose tiles have all keys: dQ leaves registers in 16 bits, and nothing else writes it.

use fa_core::{Arch, Dtype, Kernel, KernelSpec, Lengths, Mask, Pass, Problem, ScoreMod};
use fa_cpu::OwnedExtras;
use fa_emu::{Options, Placement, Trial};
use fa_kernels::Headers;
use fa_planner::plan::{PlanOptions, best};

use crate::{check_on_few_sms, emulator};

/// The planner's choice for many sequences like the first of `problem`.
fn chosen(problem: &Problem) -> KernelSpec {
    let (queries, keys) = (problem.lengths.max_q(), problem.lengths.max_k());
    let many = problem.with_lengths(Lengths::uniform(512, queries, keys));
    let spec =
        best(&many, Arch::Sm90, &PlanOptions::default().with_pass(Pass::BACKWARD)).expect("a plan").spec;
    let Kernel::Sm90Bwd(kernel) = &spec.kernel else { panic!("{spec}") };
    assert!(kernel.whole_keys, "{spec}");
    spec
}

#[test]
#[ignore = "emulation"]
fn every_row_of_dq_is_stored_once() {
    let emulator = emulator();
    for (head_dim, narrow, seqlen, mask) in [
        (64, 64, 77, Mask::FULL),
        (64, 40, 77, Mask::CAUSAL),
        (128, 128, 77, Mask::CAUSAL),
        (128, 104, 77, Mask::FULL),
        (32, 32, 77, Mask::FULL),
        (32, 24, 77, Mask::CAUSAL),
        (32, 32, 64, Mask::CAUSAL),
    ] {
        let square = |dim| Problem::square(2, seqlen, 2, dim, mask, Dtype::Bf16);
        let spec = chosen(&square(head_dim));
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::current().unwrap()).unwrap();
        for (turn, (queries, keys, heads, heads_kv)) in
            [(64, 64, 2, 2), (77, 77, 4, 1), (128, 128, 2, 1), (1, 1, 2, 2), (50, 128, 3, 3), (1, 77, 2, 2)]
                .into_iter()
                .chain(mask.is_full().then_some((128, 65, 2, 2)))
                .chain(mask.is_full().then_some((200, 9, 2, 1)))
                .enumerate()
        {
            let dim = if turn % 2 == 0 { head_dim } else { narrow };
            let problem =
                square(dim).with_lengths(Lengths::uniform(3, queries, keys)).with_heads(heads, heads_kv);
            check_on_few_sms(&unit, &spec, &problem);
        }
    }
}

/// dPsum less the gradient of LSE.
#[test]
#[ignore = "emulation"]
fn rows_have_gradients_of_lse() {
    let emulator = emulator();
    for (head_dim, mask) in [(64, Mask::CAUSAL), (32, Mask::FULL)] {
        let square = Problem::square(2, 90, 2, head_dim, mask, Dtype::F16);
        let spec = chosen(&square);
        let unit = emulator.unit(&spec, Arch::Sm90, &Headers::current().unwrap()).unwrap();
        for (queries, keys) in [(90, 90), (70, 128)] {
            let problem = square.with_lengths(Lengths::uniform(3, queries, keys)).with_heads(4, 2);
            let rows = fa_cpu::check::lse_len(&problem);
            let dlse = Some((0..rows).map(|row| (row % 13) as f32 / 4.0 - 1.5).collect());
            let extras = OwnedExtras { dlse, ..OwnedExtras::default() };
            let trial = Trial::with(&problem, spec.kernel.pass(), Placement::PACKED, &extras);
            let proof = trial.run(&unit, &Options { sms: 2, resident: 2, ..Options::seed(3) }).unwrap();
            assert!(proof.passed(), "{spec} {problem:?}:\n{}", proof.faults().join("\n"));
        }
    }
}

/// Changes of scores that a spec may have, though the planner does not choose it for them.
#[test]
#[ignore = "emulation"]
fn scores_with_slopes_sinks_and_a_cap_have_the_same_stores() {
    let emulator = emulator();
    let plain = Problem::square(2, 100, 2, 64, Mask::CAUSAL, Dtype::F16);
    let slopes = ScoreMod::NONE.with_alibi(Some(fa_core::Alibi::PerHead)).with_sinks(true);
    for score in [slopes, ScoreMod::softcap(7.0)] {
        for persistent in [true, false] {
            let problem = plain.with_score(score);
            let mut spec = KernelSpec { score: score.kind(), ..chosen(&plain) };
            let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
            kernel.persistent = persistent;
            let unit = emulator.unit(&spec, Arch::Sm90, &Headers::current().unwrap()).unwrap();
            check_on_few_sms(&unit, &spec, &problem);
        }
    }
}
