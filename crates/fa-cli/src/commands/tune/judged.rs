//! Today's first choices over records of earlier runs, as tables and as Markdown.

use fa_lab::shape::{head_dims, pair};
use fa_lab::tune::judge::{Group, Judged, Judgement, Tried};
use fa_lab::tune::report::{Distribution, NEAR};

use crate::term::output;

const GROUPS: [&str; 10] = [
    "kernels",
    "problems",
    "never measured",
    "measured: within 3 %",
    "within 8 %",
    "lowest",
    "with stand-ins: within 3 %",
    "within 8 %",
    "lowest",
    "within 3 % among 1, 2, 3, 4 tiles",
];

/// Columns of misses in a document, a line each.
const MISSES: [&str; 7] = ["record", "problem", "chosen", "ms (predicted)", "best", "ms (predicted)", "rate"];

/// Columns of misses on a terminal, a line for each kernel.
const KERNELS: [&str; 7] = ["record", "problem", "rate", "", "kernel", "ms", "predicted"];

fn of_groups(judgement: &Judgement) -> Vec<[String; 10]> {
    let row = |group: &Group| {
        let share = |of: &Distribution, value: Option<f64>| match value {
            Some(share) => {
                format!("{:.0} of {} ({:.0} %)", share * of.problems as f64, of.problems, 100.0 * share)
            }
            None => "-".to_owned(),
        };
        let worst = |of: &Distribution| of.worst.map_or("-".to_owned(), |worst| format!("{worst:.3}"));
        let Group { name, problems, unmeasured, measured, with_stand_ins, near_among_first_tiles } = group;
        [
            name.clone(),
            problems.to_string(),
            unmeasured.to_string(),
            share(measured, measured.within_3_percent),
            share(measured, measured.within_8_percent),
            worst(measured),
            share(with_stand_ins, with_stand_ins.within_3_percent),
            share(with_stand_ins, with_stand_ins.within_8_percent),
            worst(with_stand_ins),
            format!("{} %", near_among_first_tiles.map(|share| format!("{:.0}", 100.0 * share)).join(", ")),
        ]
    };
    judgement.groups.iter().map(row).collect()
}

/// First choices behind the best by more than 3 %, and those that were never measured.
fn misses(judgement: &Judgement) -> impl Iterator<Item = &Judged> {
    judgement.problems.iter().filter(|judged| judged.over_best > NEAR || !judged.is_measured)
}

fn record_of(judged: &Judged) -> String {
    match judged.seed {
        Some(seed) => format!("seed {seed} #{}", judged.number),
        None => format!("{} #{}", judged.record, judged.number),
    }
}

fn problem_of(judged: &Judged) -> String {
    let (problem, lengths) = (&judged.problem, &judged.problem.lengths);
    format!(
        "{} {}x{}x{} hd {} {}",
        judged.kernels,
        lengths.sequences(),
        pair(problem.heads_q, problem.heads_kv, ':'),
        pair(lengths.max_q(), lengths.max_k(), ','),
        head_dims(problem),
        problem.mask
    )
}

fn rate_of(judged: &Judged) -> String {
    format!("{:.3}", judged.over_best.recip())
}

/// A line for each kernel of a miss: what the planner chooses, what stands in for it where that was never
/// measured, and the fastest.
fn kernels_of(judged: &Judged) -> Vec<[String; 7]> {
    let Judged { judged: tried, best, .. } = judged;
    let times = |kernel: &Tried| [format!("{:.4}", kernel.ms), format!("{:.4}", kernel.predicted_ms)];
    let mut lines = Vec::new();
    if !judged.is_measured {
        let predicted = format!("{:.4}", judged.first_choice_predicted_ms);
        lines.push(("never measured", judged.first_choice.clone(), ["-".to_owned(), predicted]));
    }
    lines.push((if judged.is_measured { "chosen" } else { "stands in" }, tried.name.clone(), times(tried)));
    lines.push(("best", best.name.clone(), times(best)));
    let mut first = Some([record_of(judged), problem_of(judged), rate_of(judged)]);
    lines
        .into_iter()
        .map(|(role, kernel, [ms, predicted])| {
            let [record, problem, rate] = first.take().unwrap_or_default();
            [record, problem, rate, role.to_owned(), kernel, ms, predicted]
        })
        .collect()
}

/// A miss as one line of a document.
fn line_of(judged: &Judged) -> Vec<String> {
    let Judged { judged: tried, best, .. } = judged;
    let stands_in = if judged.is_measured {
        String::new()
    } else {
        format!("{} was never measured; ", judged.first_choice)
    };
    vec![
        record_of(judged),
        problem_of(judged),
        format!("{stands_in}{}", tried.name),
        format!("{:.4} ({:.4})", tried.ms, tried.predicted_ms),
        best.name.clone(),
        format!("{:.4} ({:.4})", best.ms, best.predicted_ms),
        rate_of(judged),
    ]
}

/// For a terminal: the problems that are not known to be within 3 %, then the shares.
pub(crate) fn table(judgement: &Judgement) -> String {
    let mut text = String::new();
    let kernels: Vec<_> = misses(judgement).flat_map(kernels_of).collect();
    if !kernels.is_empty() {
        let mut table = output::table(&KERNELS);
        kernels.into_iter().for_each(|row| {
            table.add_row(row);
        });
        text += &format!("{}\n", output::table_text(&table));
    }
    let mut table = output::table(&GROUPS);
    of_groups(judgement).into_iter().for_each(|row| {
        table.add_row(row);
    });
    text + &output::table_text(&table)
}

/// For a document: the same.
pub(crate) fn markdown(judgement: &Judgement) -> String {
    let table = |header: &[&str], rows: Vec<Vec<String>>| {
        let lines = rows.into_iter().map(|row| format!("| {} |\n", row.join(" | "))).collect::<String>();
        format!("| {} |\n|{}\n{lines}", header.join(" | "), "---|".repeat(header.len()))
    };
    let groups = of_groups(judgement).into_iter().map(Vec::from).collect();
    let misses = misses(judgement).map(line_of).collect();
    format!("{}\n{}", table(&GROUPS, groups), table(&MISSES, misses))
}
