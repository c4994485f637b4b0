//! The cost model of the SM80-class forward against the measured rates of this project's own kernels
//! (`data/sm80-fwd-h100.txt`).

use fa_core::{Arch, Dtype, Mask, Problem};
use fa_planner::cost::rank_correlation;
use fa_planner::plan::{Family, PlanOptions, explore};

/// Name, predicted and measured rate.
type Rate = (String, f64, f64);

/// The measured configurations of each problem that the planner lists, in its order.
fn groups() -> Vec<(&'static str, Vec<Rate>, f64)> {
    let text = include_str!("data/sm80-fwd-h100.txt");
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
            let [_, head_dim, _, heads, mask] = words[..] else { panic!("head_dim D heads H mask: {head}") };
            let number = |text: &str| text.parse().expect("a number");
            let mask = if mask == "causal" { Mask::CAUSAL } else { Mask::FULL };
            let problem = Problem::square(2, 8192, number(heads), number(head_dim), mask, Dtype::Bf16);
            let options = PlanOptions { family: Some(Family::Sm80), ..PlanOptions::default() };
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

#[test]
fn measured_rates_are_predicted() {
    for (head, rates, _) in groups() {
        assert!(rates.len() > 80, "{head}: {} configurations", rates.len());
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
        assert!(rho > 0.85, "{head}: rank correlation {rho}");
        assert!(error < 0.06, "{head}: typical error {error}");
    }
}

#[test]
fn the_first_choice_is_within_3_percent_of_the_best() {
    for (head, rates, best) in groups() {
        let (name, _, measured) = &rates[0];
        println!("{head}: {name} {measured} of {best}");
        assert!(*measured > 0.97 * best, "{head}: {name} reaches {measured} of {best}");
    }
}
