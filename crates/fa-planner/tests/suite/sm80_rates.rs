//! The cost models of the SM80-class kernels against the measured rates of this project's own kernels
//! (`data/sm80-fwd-h100.txt`, `data/sm80-bwd-h100.txt`).

use fa_core::{Arch, Dtype, Family, Mask, Pass, Problem};
use fa_planner::cost::rank_correlation;
use fa_planner::plan::{PlanOptions, explore};

const FORWARD: &str = include_str!("../data/sm80-fwd-h100.txt");
const BACKWARD: &str = include_str!("../data/sm80-bwd-h100.txt");

/// Name, predicted and measured rate.
type Rate = (String, f64, f64);

/// The measured configurations of each problem that the planner lists, in its order. A head line without a
/// length is of N = 8192.
fn groups(text: &'static str, pass: Pass) -> Vec<(&'static str, Vec<Rate>, f64)> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let heads = lines.iter().enumerate().filter(|(_, line)| line.starts_with("head_dim"));
    heads
        .map(|(at, head)| {
            let own = lines[at + 1..].iter().take_while(|line| !line.starts_with("head_dim"));
            let measured: Vec<(&str, f64)> = own
                .map(|line| line.split_once(' ').expect("a name and a rate"))
                .map(|(name, rate)| (name, rate.parse().expect("TFLOP/s")))
                .collect();
            let words: Vec<&str> = head.split(' ').collect();
            let [_, head_dim, _, heads, mask, ref length @ ..] = words[..] else {
                panic!("head_dim D heads H mask [seqlen N]: {head}")
            };
            let number = |text: &str| text.parse::<usize>().expect("a number");
            let mask = if mask == "causal" { Mask::CAUSAL } else { Mask::FULL };
            let seqlen = length.get(1).map_or(8192, |text| number(text));
            let problem =
                Problem::square(16384 / seqlen, seqlen, number(heads), number(head_dim), mask, Dtype::Bf16);
            let options = PlanOptions::default().with_family(Some(Family::Sm80)).with_pass(pass);
            let plans = explore(&problem, Arch::Sm90, &options).expect("candidates").plans;
            let rates = plans.iter().filter_map(|plan| {
                let name = plan.spec.to_string();
                let (_, rate) = measured.iter().find(|(own, _)| name.ends_with(&format!("-{own}")))?;
                Some((name, plan.cost.tflops, *rate))
            });
            let best = measured.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
            (*head, rates.collect(), best)
        })
        .collect()
}

/// Every group has `count` configurations at least, a rank correlation above `rho` and a typical error below
/// `error`.
fn check(groups: &[(&str, Vec<Rate>, f64)], count: usize, least_rho: f64, most_error: f64) {
    for (head, rates, _) in groups {
        assert!(rates.len() >= count, "{head}: {} configurations", rates.len());
        let pairs: Vec<(f64, f64)> =
            rates.iter().map(|(_, predicted, measured)| (*predicted, *measured)).collect();
        let rho = rank_correlation(&pairs).expect("many");
        let squares: f64 =
            pairs.iter().map(|(predicted, measured)| (predicted / measured).ln().powi(2)).sum();
        let error = (squares / pairs.len() as f64).sqrt();
        println!(
            "{head}: {} configurations, rank correlation {rho:.3}, typical error {:.1} %",
            pairs.len(),
            100.0 * error
        );
        assert!(rho > least_rho, "{head}: rank correlation {rho}");
        assert!(error < most_error, "{head}: typical error {error}");
    }
}

#[test]
fn measured_rates_are_predicted() {
    check(&groups(FORWARD, Pass::Forward), 81, 0.85, 0.06);
}

#[test]
fn measured_rates_of_the_backward_are_predicted() {
    // Two that were measured at head dim 128 spill today (NB-138).
    check(&groups(BACKWARD, Pass::BACKWARD), 33, 0.95, 0.06);
}

#[test]
fn the_first_choice_is_within_3_percent_of_the_best() {
    for groups in [groups(FORWARD, Pass::Forward), groups(BACKWARD, Pass::BACKWARD)] {
        for (head, rates, best) in groups {
            let (name, _, measured) = &rates[0];
            println!("{head}: {name} {measured} of {best}");
            assert!(*measured > 0.97 * best, "{head}: {name} reaches {measured} of {best}");
        }
    }
}
