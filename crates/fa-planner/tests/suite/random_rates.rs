//! The cost models beside the rates of `fa tune --random` (docs/results/tune).
//! `cargo test -p fa-planner random_rates -- --nocapture` prints the table, and for each problem whose
//! first choice is behind by more than 3 % the chosen and the best kernel.

use fa_core::{Arch, Dtype, Family, KernelSpec, Lengths, Mask, Pass, Problem, ScoreMod};
use fa_planner::cost::{CostConstants, predict, rank_correlation};
use fa_planner::kernels::unbound;
use fa_planner::plan::{PlanOptions, explore};
use serde_json::Value;

use crate::records;

/// What "within 3 %" and "within 8 %" of the best mean, as `fa tune` counts it: times over the best's.
const NEAR: f64 = 1.03;
const FAR: f64 = 1.08;

/// A problem and its kernels.
struct Measured {
    number: usize,
    title: String,
    kernels: Vec<Rate>,
}

/// A kernel with its predicted and measured milliseconds.
struct Rate {
    name: String,
    predicted: f64,
    measured: f64,
    /// Measured again, where it was among the fastest or the first choice of its day.
    again: Option<f64>,
    /// Its place in the planner's order, or that of one that differs in launch bounds alone where the planner
    /// does not list it: some were measured as variants of what it lists.
    rank: Option<usize>,
}

impl Measured {
    /// The first of the planner's order; where it lists none of them any more, the one predicted to be the
    /// fastest.
    fn first(&self) -> &Rate {
        let place = |kernel: &Rate| (kernel.rank.unwrap_or(usize::MAX), kernel.predicted);
        let by_place = |a: &&Rate, b: &&Rate| place(a).partial_cmp(&place(b)).expect("times");
        self.kernels.iter().min_by(by_place).expect("kernels")
    }

    /// The kernel that was the fastest.
    fn best(&self) -> &Rate {
        self.kernels.iter().min_by(|a, b| a.measured.total_cmp(&b.measured)).expect("kernels")
    }

    /// The rate of the first choice over that of the fastest: by what was measured again, where it was, for
    /// the least of a first measurement is the least by luck as well.
    fn first_choice(&self) -> f64 {
        let again = self.kernels.iter().filter_map(|kernel| kernel.again).min_by(f64::total_cmp);
        match (again, self.first().again) {
            (Some(best), Some(first)) => best / first,
            _ => self.best().measured / self.first().measured,
        }
    }

    fn rank_correlation(&self) -> f64 {
        let pairs: Vec<(f64, f64)> =
            self.kernels.iter().map(|kernel| (kernel.predicted, kernel.measured)).collect();
        rank_correlation(&pairs).unwrap_or(0.0)
    }
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Rate { name, predicted, measured, .. } = self;
        write!(f, "{name}: predicted {predicted:.4} ms, measured {measured:.4}")
    }
}

fn problem_of(of: &Value) -> Problem {
    let number = |name: &str| of[name].as_u64().unwrap_or_else(|| panic!("{name} in {of}")) as usize;
    let side = |name: &str| of["mask"][name].as_u64().map(|keys| keys as u32);
    let mask = match (side("left"), side("right")) {
        (None, None) => Mask::FULL,
        (None, Some(0)) => Mask::CAUSAL,
        (Some(left), Some(right)) => Mask::window(left, right),
        other => panic!("{other:?}"),
    };
    let dtype = if of["dtype"] == "f16" { Dtype::F16 } else { Dtype::Bf16 };
    let square = Problem::square(1, 1, number("heads_q"), number("head_dim"), mask, dtype);
    Problem {
        lengths: Lengths::uniform(number("batch"), number("seqlen_q"), number("seqlen_k")),
        heads_kv: number("heads_kv"),
        head_dim_v: number("head_dim_v"),
        score: of["softcap"].as_f64().map_or(square.score, ScoreMod::softcap),
        ..square
    }
}

/// `B x Hq:Hk x Nq,Nk`, head dims and mask.
fn shape(problem: &Problem) -> String {
    let Problem { lengths, heads_q, heads_kv, head_dim, head_dim_v, mask, .. } = problem;
    let (batch, queries, keys) = (lengths.sequences(), lengths.max_q(), lengths.max_k());
    format!("{batch}x{heads_q}:{heads_kv}x{queries},{keys} hd {head_dim}-{head_dim_v} {mask}")
}

fn measured(record: &str) -> Vec<Measured> {
    let record = records::read(&format!("tune/{record}"));
    let list = |of: &Value, name: &str| of[name].as_array().expect("a list").clone();
    let constants = CostConstants::of(Arch::Sm90);
    let of_problem = |entry: &Value| {
        let problem = problem_of(&entry["problem"]);
        let text = |name: &str| entry[name].as_str().expect("a name");
        let family = Family::ALL.into_iter().find(|family| family.name() == text("family"));
        let pass = if text("kind") == "fwd" { Pass::Forward } else { Pass::BACKWARD };
        let options = PlanOptions { family, pass, ..PlanOptions::default() };
        let plans = explore(&problem, Arch::Sm90, &options).expect("a supported problem").plans;
        let spec_of =
            |of: &Value| -> KernelSpec { serde_json::from_value(of["spec"].clone()).expect("a spec") };
        // Tiles of the head dim of today's choice were not tried before there were any.
        let first = &plans.first()?.spec;
        if !list(entry, "kernels").iter().any(|own| spec_of(own).head_dim == first.head_dim) {
            return None;
        }
        let kernel = |of: &Value| {
            let spec = spec_of(of);
            let cost = predict(&problem, &spec, Arch::Sm90, &constants);
            let measured = of["ms"].as_f64()?;
            let exact = plans.iter().position(|plan| plan.spec == spec);
            let alike = || plans.iter().position(|plan| unbound(&plan.spec) == unbound(&spec));
            let rank = exact.or_else(alike);
            let (name, again) = (spec.to_string(), of["again_ms"].as_f64());
            Some(Rate { name, predicted: 1e3 * cost.seconds, measured, again, rank })
        };
        Some(Measured {
            number: entry["number"].as_u64().expect("a number") as usize,
            title: format!("{} {} {}", text("kind"), text("family"), shape(&problem)),
            kernels: list(entry, "kernels").iter().filter_map(kernel).collect(),
        })
    };
    list(&record, "problems").iter().filter_map(of_problem).collect()
}

/// Prints a line, and returns the share of first choices within 3 % of the best.
fn distribution(name: &str, all: &[&Measured]) -> f64 {
    let rates: Vec<f64> = all.iter().map(|problem| problem.first_choice()).collect();
    let count = rates.len() as f64;
    let within = |most: f64| rates.iter().filter(|&&rate| rate >= 1.0 / most).count() as f64 / count;
    println!(
        "{name}: {count} problems, within 3 % for {:.0} %, within 8 % for {:.0} %, lowest {:.3}, geometric \
         mean {:.3}, rank correlation {:.3} in the mean",
        100.0 * within(NEAR),
        100.0 * within(FAR),
        rates.iter().copied().fold(f64::MAX, f64::min),
        (rates.iter().map(|rate| rate.ln()).sum::<f64>() / count).exp(),
        all.iter().map(|problem| problem.rank_correlation()).sum::<f64>() / count,
    );
    within(NEAR)
}

#[test]
fn first_choices_hold_on_problems_drawn_at_random() {
    // The share within 3 %, and the lowest. Seeds 1 and 2: NB-054, NB-060; NB-065, NB-067; both: NB-075.
    // Seeds 3 and 4, held out: NB-084, NB-086; these four: NB-097.
    // Seed 6, held out: NB-098; all five: NB-107. Held out: 5 in NB-113, 8 in NB-116, 9 in NB-120.
    // All eight: NB-126. Seed 10, held out: NB-126; all nine: NB-132. Seed 11, held out: NB-132; all ten:
    // NB-138. Seed 12, held out: NB-143. The SM80 class of all twelve: NB-148.
    // Seed 14, held out: NB-152. Seeds 15 and 16, held out: NB-156, the former measured again there. Seed 17,
    // held out: NB-158. The SM90 backward of all seeds: NB-171.
    for (record, least_near, lowest) in [
        ("random-nvidia-h100-80gb-hbm3.json", 0.87, 0.92),
        ("random-2-nvidia-h100-80gb-hbm3.json", 0.95, 0.94),
        ("random-3-nvidia-h100-80gb-hbm3.json", 0.89, 0.95),
        ("random-4-nvidia-h100-80gb-hbm3.json", 0.94, 0.95),
        ("random-5-nvidia-h100-80gb-hbm3.json", 0.90, 0.95),
        ("random-6-nvidia-h100-80gb-hbm3.json", 0.95, 0.94),
        ("random-8-nvidia-h100-80gb-hbm3.json", 0.99, 0.97),
        ("random-9-nvidia-h100-80gb-hbm3.json", 0.94, 0.93),
        ("random-10-nvidia-h100-80gb-hbm3.json", 0.94, 0.93),
        ("random-11-nvidia-h100-80gb-hbm3.json", 0.94, 0.93),
        ("random-12-nvidia-h100-80gb-hbm3.json", 0.86, 0.92),
        ("random-14-nvidia-h100-80gb-hbm3.json", 0.87, 0.91),
        ("random-15-nvidia-h100-80gb-hbm3.json", 0.91, 0.93),
        ("random-16-nvidia-h100-80gb-hbm3.json", 0.77, 0.89),
        ("random-17-nvidia-h100-80gb-hbm3.json", 0.82, 0.89),
        ("random-18-nvidia-h100-80gb-hbm3.json", 0.78, 0.89),
        ("random-19-nvidia-h100-80gb-hbm3.json", 0.80, 0.89),
        ("random-20-nvidia-h100-80gb-hbm3.json", 0.79, 0.88),
    ] {
        let all = measured(record);
        for problem in &all {
            let (rate, rho) = (problem.first_choice(), problem.rank_correlation());
            println!(
                "#{} {}: {rate:.3} of the best, rank correlation {rho:.2}",
                problem.number, problem.title
            );
            if rate < 1.0 / NEAR {
                println!("    chosen {}\n    best   {}", problem.first(), problem.best());
            }
            assert!(rate > lowest, "#{} {}: {rate:.3}", problem.number, problem.title);
        }
        for (name, remainder) in [("even", 0), ("odd", 1)] {
            let half: Vec<&Measured> = all.iter().filter(|problem| problem.number % 2 == remainder).collect();
            distribution(name, &half);
        }
        let near = distribution(record, &all.iter().collect::<Vec<_>>());
        assert!(near > least_near, "{record}: {near}");
    }
}
