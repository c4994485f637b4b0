//! The planner's first choices for packed, paged and split problems compile as planned.

use std::path::Path;

use fa_core::{Alibi, Arch, Dtype, Family, Lengths, Mask, Pass, Problem, ScoreMod, ShippedSpec, Side};
use fa_kernels::{Cache, Headers, ship};
use fa_planner::plan::{PlanOptions, plan};

use crate::compiled::{List, Wanted};
use crate::nvrtc;

/// Kinds of calls that engines make, with a head dim.
fn problems(head_dim: usize) -> Vec<(&'static str, Problem)> {
    let base =
        Problem { heads_q: 32, heads_kv: 8, ..Problem::square(1, 1, 1, head_dim, Mask::CAUSAL, Dtype::Bf16) };
    let of = |lengths, mask, score| Problem { lengths, mask, score, ..base };
    let decode = Lengths::of(64, Side::packed(64, 1), Side::paged(16, 32 << 10, 8 << 10));
    let few = Lengths::of(4, Side::padded(8), Side::padded(8 << 10).with_used());
    let packed = Lengths::packed(24, 16 << 10, 16 << 10, 8 << 10, 8 << 10);
    let chunk = Lengths::of(8, Side::packed(4096, 512), Side::paged(64, 4096, 16 << 10));
    let alibi = ScoreMod { alibi: Some(Alibi::PerHead), ..ScoreMod::NONE };
    let sinks = ScoreMod { sinks: true, ..ScoreMod::NONE };
    vec![
        ("split", of(Lengths::uniform(1, 1, 8 << 10), Mask::FULL, ScoreMod::NONE)),
        ("split window, sinks", of(Lengths::uniform(1, 4, 8 << 10), Mask::causal_window(4095), sinks)),
        ("paged decode", of(decode, Mask::CAUSAL, ScoreMod::NONE)),
        ("paged decode with ALiBi", of(decode, Mask::CAUSAL, alibi)),
        ("cached tokens, soft cap", of(few, Mask::CAUSAL, ScoreMod::softcap(30.0))),
        ("packed", of(packed, Mask::CAUSAL, ScoreMod::NONE)),
        ("packed window, sinks", of(packed, Mask::causal_window(127), sinks)),
        ("packed, full", of(packed, Mask::FULL, ScoreMod::NONE)),
        ("chunked prefill", of(chunk, Mask::CAUSAL, ScoreMod::NONE)),
    ]
}

/// Where the account once had room and the compiler did not: ALiBi near the limit, lengths on the device
/// beside large tiles, gradients at head dim 256, keys divided among CTAs.
fn near_the_register_limit() -> Vec<(Problem, Family, Pass)> {
    let alibi = ScoreMod { alibi: Some(Alibi::PerHead), ..ScoreMod::NONE };
    let of =
        |head_dim, mask| Problem { heads_kv: 8, ..Problem::square(2, 8192, 32, head_dim, mask, Dtype::Bf16) };
    let packed = |problem: Problem| Problem {
        lengths: Lengths::packed(24, 16 << 10, 16 << 10, 8 << 10, 8 << 10),
        ..problem
    };
    let few = Problem { lengths: Lengths::uniform(1, 4, 8 << 10), ..of(128, Mask::FULL) };
    let with_alibi = |problem: Problem| Problem { score: alibi, ..problem };
    vec![
        (with_alibi(of(128, Mask::FULL)), Family::Sm80, Pass::Forward),
        (with_alibi(of(128, Mask::FULL)), Family::Sm90, Pass::Forward),
        (packed(of(128, Mask::FULL)), Family::Sm80, Pass::Forward),
        (packed(of(256, Mask::CAUSAL)), Family::Sm90, Pass::BACKWARD),
        (packed(of(256, Mask::CAUSAL)), Family::Sm80, Pass::BACKWARD),
        (few, Family::Sm90, Pass::Forward),
    ]
}

/// First choices that are known to compile.
pub(crate) const LIST: List = List { path: "docs/results/compiled-choices.ron", of: "First choices" };

/// The first choices, each once, by the names of their specs.
pub(crate) fn kernels() -> Vec<Wanted> {
    let mut wanted: Vec<Wanted> = Vec::new();
    let mut add = |name: &str, problem: &Problem, options: &PlanOptions| {
        let plans = plan(problem, Arch::Sm90, options).unwrap_or_else(|error| panic!("{name}: {error}"));
        let spec = plans[0].spec.clone();
        let name = spec.to_string();
        if wanted.iter().all(|other| other.name != name) {
            wanted.push(Wanted { name, shipped: ShippedSpec { archs: vec![Arch::Sm90], spec } });
        }
    };
    for head_dim in [64, 96, 128, 256] {
        for (name, problem) in problems(head_dim) {
            add(name, &problem, &PlanOptions::default());
        }
    }
    for (problem, family, pass) in near_the_register_limit() {
        let options = PlanOptions { family: Some(family), pass, ..PlanOptions::default() };
        add("near the limit", &problem, &options);
    }
    wanted
}

/// Compiles the first choices that [`List::today`] names.
#[test]
fn first_choices_compile_within_their_plans() {
    let compiler = nvrtc();
    let cache = Cache::open(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")), 1 << 30);
    let kernels = kernels();
    let wanted = LIST.today(&compiler, &kernels);
    let built = ship::build(&wanted, &[], &compiler, &cache, &Headers::embedded(), &|_, _| ()).unwrap();
    let failures: Vec<String> =
        built.failures.iter().map(|failure| format!("{}: {}", failure.name, failure.reason)).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    LIST.write(&compiler, &kernels, &built.rows);
}
