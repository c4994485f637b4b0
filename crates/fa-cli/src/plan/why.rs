//! Answers to `fa plan --why`, for people.

use std::fmt::Write;

use fa_planner::why::{Ranked, Why};

use crate::term::output::plain;

fn line(text: &mut String, name: &str, value: &str) {
    writeln!(text, "{name:<10}{value}").expect("writing to a string cannot fail");
}

/// Answers to `--why` in lines.
pub(crate) fn why_text(why: &Why) -> String {
    let mut text = why_lines(&why.query, &why.feasible, why.rejected.len());
    for miss in &why.rejected {
        line(&mut text, "rejected", &format!("{}: {}", miss.spec, miss.reason));
    }
    text
}

/// How many fit and how many do not, and the place of each that does.
pub(crate) fn why_lines(query: &str, feasible: &[Ranked], rejected: usize) -> String {
    let mut text = String::new();
    line(&mut text, "why", &format!("{query}: {} fit, {rejected} do not", feasible.len()));
    for ranked in feasible {
        let cost = &ranked.plan.cost;
        let place = if ranked.rank == 1 {
            "the best".to_owned()
        } else {
            format!("rank {}, {:.2} times the best's time", ranked.rank, ranked.slowdown)
        };
        let about = format!("{place}, {} TFLOP/s, bound by {}", plain(cost.tflops), cost.bottleneck.name());
        line(&mut text, "fits", &format!("{}: {about}", ranked.plan.spec));
    }
    text
}
