//! A sample, different each day, of the planner's configurations that no spec ships with.

use std::collections::BTreeMap;

use fa_core::{Arch, Dtype, Family, Mask, Pass, Problem, ScoreMod};
use fa_planner::plan::{PlanOptions, plan};

use crate::compiler::hash;
use crate::prove::Candidate;

/// `count` of the planner's configurations, from as many kernels in turn, drawn by `day`: each text gives a
/// different sample.
pub fn sample(day: &str, count: usize) -> Vec<Candidate> {
    let mut pools: Vec<Vec<(String, Candidate)>> = Vec::new();
    for (family, arch) in
        [(Family::Sm90, Arch::Sm90), (Family::Sm80, Arch::Sm80), (Family::Sm100, Arch::Sm100)]
    {
        for pass in
            [Pass::Forward, Pass::Backward { deterministic: false }, Pass::Backward { deterministic: true }]
        {
            let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
            let mut own: BTreeMap<String, Candidate> = BTreeMap::new();
            for problem in problems() {
                for planned in plan(&problem, arch, &options).unwrap_or_default() {
                    let name = planned.spec.to_string();
                    own.entry(name.clone()).or_insert(Candidate { name, spec: planned.spec, arch });
                }
            }
            let mut drawn: Vec<(String, Candidate)> =
                own.into_iter().map(|(name, candidate)| (hash(&[day, &name]), candidate)).collect();
            drawn.sort_by(|a, b| b.0.cmp(&a.0));
            pools.push(drawn);
        }
    }
    // Days start with different kernels, so that small samples reach all of them over time.
    let first = usize::from_str_radix(&hash(&[day])[..4], 16).unwrap_or(0);
    let mut sample = Vec::new();
    let mut turn = 0;
    while sample.len() < count && pools.iter().any(|pool| !pool.is_empty()) {
        let kernels = pools.len();
        sample.extend(pools[(first + turn) % kernels].pop().map(|(_, candidate)| candidate));
        turn += 1;
    }
    sample
}

/// The problems to plan for: head dims with every mask, groups of heads, a soft cap.
fn problems() -> Vec<Problem> {
    let mut problems = Vec::new();
    for (turn, (head_dim, head_dim_v)) in
        [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (80, 80), (32, 32)].into_iter().enumerate()
    {
        for mask in [Mask::FULL, Mask::CAUSAL, Mask::window(40, 7)] {
            let dtype = if turn % 2 == 0 { Dtype::Bf16 } else { Dtype::F16 };
            let problem = Problem::square(1, 2048, 8, head_dim, mask, dtype).with_head_dim_v(head_dim_v);
            problems.push(problem);
            problems.push(problem.with_heads_kv(2));
            problems.push(problem.with_score(ScoreMod::softcap(15.0)));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_of_its_day_and_of_all_kernels() {
        let names = |day: &str| -> Vec<String> { sample(day, 12).into_iter().map(|own| own.name).collect() };
        let (first, second) = (names("2026-11-22"), names("2026-11-23"));
        assert_eq!(first.len(), 12);
        assert_eq!(first, names("2026-11-22"));
        assert!(first.iter().all(|name| !second.contains(name)), "{first:?} {second:?}");
        for kernel in ["sm80_fwd", "sm90_fwd", "sm80_bwd", "sm90_bwd", "sm100_fwd"] {
            assert!(first.iter().any(|name| name.starts_with(kernel)), "{kernel}: {first:?}");
        }
    }
}
