//! The cost model of the SM90 backward against the measured rates of this project's own kernels (`data/sm90-bwd-h100.txt`).
//! `cargo test -p fa-planner --test bwd_rates -- --nocapture` prints the whole table.

use fa_core::{Arch, Dtype, Mask, Problem};
use fa_planner::plan::{BackwardOptions, Plan, PlanOptions, explore};

struct Rate {
    spec: String,
    predicted: f64,
    measured: f64,
}

/// The measured configurations of one head line, best first, each with its prediction.
fn rates(head: &str, lines: &[&str]) -> Vec<Rate> {
    let words: Vec<&str> = head.split(' ').collect();
    let number = |at: usize| words[at].parse::<usize>().expect("head_dim A B heads H");
    let problem = Problem {
        head_dim_v: number(2),
        ..Problem::square(2, 8192, number(4), number(1), Mask::FULL, Dtype::Bf16)
    };
    let options = PlanOptions { backward: Some(BackwardOptions::default()), ..PlanOptions::default() };
    let plans = explore(&problem, Arch::Sm90, &options).expect("candidates").plans;
    let rate = |line: &&str| {
        let (spec, measured) = line.split_once(' ').expect("a name and a rate");
        let is_it =
            |plan: &&Plan| plan.spec.to_string().split_once("-full-").is_some_and(|(_, name)| name == spec);
        let plan = plans.iter().find(is_it).unwrap_or_else(|| panic!("{head}: no plan {spec}"));
        let measured = measured.parse().expect("TFLOP/s");
        Rate { spec: spec.into(), predicted: plan.cost.tflops, measured }
    };
    lines.iter().map(rate).collect()
}

/// Spearman's rank correlation of predicted and measured rates.
fn rank_correlation(rates: &[Rate]) -> f64 {
    let ranks = |rate: fn(&Rate) -> f64| -> Vec<f64> {
        let above = |one: &Rate| rates.iter().filter(|other| rate(other) > rate(one)).count();
        let equal = |one: &Rate| rates.iter().filter(|other| rate(other) == rate(one)).count();
        rates.iter().map(|one| above(one) as f64 + (equal(one) as f64 - 1.0) / 2.0).collect()
    };
    let (a, b) = (ranks(|rate| rate.predicted), ranks(|rate| rate.measured));
    let mean = (rates.len() as f64 - 1.0) / 2.0;
    let moment =
        |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum() };
    moment(&a, &b) / (moment(&a, &a) * moment(&b, &b)).sqrt()
}

fn groups() -> Vec<(&'static str, Vec<Rate>)> {
    let text = include_str!("data/sm90-bwd-h100.txt");
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match groups.last_mut() {
            Some((_, lines)) if !line.starts_with("head_dim") => lines.push(line),
            _ => groups.push((line, Vec::new())),
        }
    }
    groups.into_iter().map(|(head, lines)| (head, rates(head, &lines))).collect()
}

#[test]
fn measured_rates_are_predicted() {
    let (mut squares, mut count) = (0.0, 0);
    for (head, rates) in groups() {
        println!("{head}: rank correlation {:.3}", rank_correlation(&rates));
        for Rate { spec, predicted, measured } in &rates {
            println!(
                "  {spec:44} predicted {predicted:3.0}, measured {measured:3.0}, ratio {:.2}",
                predicted / measured
            );
            assert!(
                (0.8..1.25).contains(&(predicted / measured)),
                "{head} {spec}: {predicted:.0} for {measured}"
            );
            squares += (predicted / measured).ln().powi(2);
        }
        count += rates.len();
        assert!(rank_correlation(&rates) > 0.65, "{head}: rank correlation {}", rank_correlation(&rates));
    }
    let error = (squares / count as f64).sqrt();
    println!("{count} configurations, typical error {:.1} %", 100.0 * error);
    assert_eq!(count, 332);
    assert!(error < 0.055, "typical error {error}");
}

#[test]
fn the_first_choice_is_within_3_percent_of_the_best() {
    for (head, rates) in groups() {
        let first = rates.iter().max_by(|a, b| a.predicted.total_cmp(&b.predicted)).expect("rates");
        let best = rates.iter().map(|rate| rate.measured).fold(0.0, f64::max);
        assert!(first.measured > 0.97 * best, "{head}: {} reaches {} of {best}", first.spec, first.measured);
    }
}
