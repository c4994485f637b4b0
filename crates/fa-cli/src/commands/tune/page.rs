//! How well predictions rank kernels, as a table and as Markdown.

use fa_lab::record::Provenance;
use fa_lab::shape::{head_dims, pair};
use fa_lab::tune::report::{Distribution, Halves, OfProblem, Report};

use crate::term::output;

fn rows(report: &Report) -> Vec<[String; 11]> {
    let number = |value: Option<f64>, digits: usize| value.map_or("-".into(), |x| format!("{x:.digits$}"));
    let row = |p: &OfProblem| {
        let problem = &p.problem;
        let bad = p.kernels.iter().filter(|kernel| kernel.error.is_some()).count();
        let family = p.family.map_or("-", |family| family.name());
        [
            format!("{} {} {family}", p.number, p.kind),
            head_dims(problem),
            problem.mask.to_string(),
            problem.types.q.to_string(),
            format!(
                "{}x{}x{}",
                problem.lengths.sequences(),
                pair(problem.heads_q, problem.heads_kv, ':'),
                pair(problem.lengths.max_q(), problem.lengths.max_k(), ',')
            ),
            p.winner.clone().unwrap_or_else(|| "-".into()),
            number(p.tflops, 0),
            p.first_choice.clone().unwrap_or_else(|| "-".into()),
            number(p.first_choice_over_best, 3),
            number(p.rank_correlation, 2),
            format!("{} ({bad})", p.kernels.len()),
        ]
    };
    report.problems.iter().map(row).collect()
}

const HEADER: [&str; 11] = [
    "problem",
    "hd",
    "mask",
    "dtype",
    "B x H x N",
    "winner",
    "TFLOP/s",
    "first choice",
    "its time over best",
    "rank corr.",
    "tried (bad)",
];

fn summary(report: &Report) -> String {
    let number = |value: Option<f64>| value.map_or("-".into(), |x| format!("{x:.3}"));
    let mut text = format!(
        "Rank correlation of prediction and measurement: {} in the mean over problems, {} over everything. \
         The planner's first choice is within 3 % of the best for {} of {} problems.\n",
        number(report.mean_rank_correlation),
        number(report.overall_rank_correlation),
        report.first_choice_near,
        report.problems.len()
    );
    if let (Some(seed), Some(Halves { even, odd })) = (report.seed, &report.halves) {
        text +=
            &format!("\nProblems drawn by seed {seed}; the first choice's rate over that of the best:\n\n");
        for (name, half) in [("all", &report.distribution), ("even-numbered", even), ("odd-numbered", odd)] {
            text += &format!("- {name}: {}\n", distribution(half));
        }
    }
    text
}

fn distribution(of: &Distribution) -> String {
    let share = |value: Option<f64>| value.map_or("-".into(), |x| format!("{:.0} %", 100.0 * x));
    let number = |value: Option<f64>| value.map_or("-".into(), |x| format!("{x:.3}"));
    format!(
        "{} problems, within 3 % for {}, within 8 % for {}, lowest {}, geometric mean {}, rank correlation \
         {} in the mean",
        of.problems,
        share(of.within_3_percent),
        share(of.within_8_percent),
        number(of.worst),
        number(of.geometric_mean),
        number(of.mean_rank_correlation)
    )
}

/// For a terminal.
pub(crate) fn table(report: &Report) -> String {
    let mut table = output::table(&HEADER);
    rows(report).into_iter().for_each(|row| {
        table.add_row(row);
    });
    format!("{}{}", output::table_text(&table), summary(report))
}

/// For a document.
pub(crate) fn markdown(report: &Report) -> String {
    let Provenance { device, compiler, commit, command, date, .. } = &report.provenance;
    let driver = device.driver.as_deref().unwrap_or("unknown");
    let mut text = format!(
        "# Tuning on {}\n\n`{command}`, {date}, commit {commit}, driver {driver}, {compiler}; medians of {} \
         launches, kernels of a problem in turns; the fastest and the planner's first choice again, three \
         times as often, and compared by that alone.\n\n{}\n",
        device.gpu,
        report.reps,
        summary(report)
    );
    text += &format!("| {} |\n|{}\n", HEADER.join(" | "), "---|".repeat(HEADER.len()));
    for row in rows(report) {
        text += &format!("| {} |\n", row.join(" | "));
    }
    text
}
