//! Today's first choices over records of earlier runs, as tables and as Markdown.

use fa_lab::shape::{head_dims, pair};
use fa_lab::tune::judge::{Group, Judged, Judgement};
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

const MISSES: [&str; 7] = ["record", "problem", "chosen", "ms (predicted)", "best", "ms (predicted)", "rate"];

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
fn of_misses(judgement: &Judgement) -> Vec<[String; 7]> {
    let is_missed = |judged: &&Judged| judged.over_best > NEAR || !judged.is_measured;
    let row = |judged: &Judged| {
        let Judged { problem, judged: tried, best, .. } = judged;
        let lengths = &problem.lengths;
        let record = match judged.seed {
            Some(seed) => format!("seed {seed} #{}", judged.number),
            None => format!("{} #{}", judged.record, judged.number),
        };
        let stands_in = if judged.is_measured {
            String::new()
        } else {
            format!("{} was never measured; ", judged.first_choice)
        };
        [
            record,
            format!(
                "{} {}x{}x{} hd {} {}",
                judged.kernels,
                lengths.sequences(),
                pair(problem.heads_q, problem.heads_kv, ':'),
                pair(lengths.max_q(), lengths.max_k(), ','),
                head_dims(problem),
                problem.mask
            ),
            format!("{stands_in}{}", tried.name),
            format!("{:.4} ({:.4})", tried.ms, tried.predicted_ms),
            best.name.clone(),
            format!("{:.4} ({:.4})", best.ms, best.predicted_ms),
            format!("{:.3}", judged.over_best.recip()),
        ]
    };
    judgement.problems.iter().filter(is_missed).map(row).collect()
}

/// For a terminal: the problems that are not known to be within 3 %, then the shares.
pub(crate) fn table(judgement: &Judgement) -> String {
    let mut text = String::new();
    let misses = of_misses(judgement);
    if !misses.is_empty() {
        let mut table = output::table(&MISSES);
        misses.into_iter().for_each(|row| {
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
    let misses = of_misses(judgement).into_iter().map(Vec::from).collect();
    format!("{}\n{}", table(&GROUPS, groups), table(&MISSES, misses))
}
