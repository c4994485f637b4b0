//! What `fa check` found, and its text.

use std::path::PathBuf;

use fa_core::Problem;
use fa_cpu::compare::{self, Comparison};
use serde::Serialize;

use crate::term::output;

/// What [`Row::compared`] says of A and of B where inputs tell what they should be.
pub(super) const TO_EXACT: [&str; 2] = ["A to f64", "B to f64"];

/// What is printed.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub a: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<PathBuf>,
    pub rule: RuleName,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inputs: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    pub rows: Vec<Row>,
    pub passed: bool,
    /// The outputs, `a` or `b`, that are too far from the f64 result; none where no inputs tell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub off: Vec<&'static str>,
}

/// By which rule outputs are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RuleName {
    /// A and B each by the f64 result on the inputs.
    F64OfInputs,
    /// A by B, with the tolerance that the type's rounding gives.
    RoundingOfType,
    /// A by B, with the tolerances given.
    Given,
}

/// One comparison of a tensor.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub tensor: String,
    /// `A to f64`, `B to f64` or `A to B`.
    pub compared: &'static str,
    #[serde(flatten)]
    pub found: Comparison,
}

/// The report as a table, the rule and the verdict.
pub(super) fn text(report: &Report) -> String {
    let header = [
        "tensor",
        "compared",
        "max abs",
        "tolerance",
        "mean abs",
        "rms",
        "cosine",
        "least of a row",
        "worst [b,s,h,d]",
        "values",
        "verdict",
    ];
    let mut table = output::table(&header);
    for Row { tensor, compared, found } in &report.rows {
        let worst = found.worst.map_or("-".to_owned(), |position| format!("{position:?}"));
        let verdict = match (found.verdict, found.first_mismatch) {
            (compare::Verdict::Pass, _) => "pass".to_owned(),
            (compare::Verdict::TooFar, _) => "TOO FAR".to_owned(),
            (compare::Verdict::NonFiniteMismatch, at) => {
                format!("NaN/inf differ at {}, first {:?}", found.mismatches, at.unwrap_or_default())
            }
        };
        table.add_row([
            tensor.clone(),
            (*compared).to_owned(),
            format!("{:.3e}", found.max_abs),
            format!("{:.3e}", found.tolerance),
            format!("{:.3e}", found.mean_abs),
            format!("{:.3e}", found.rms),
            format!("{:.9}", found.cosine),
            format!("{:.9}", found.least_cosine),
            worst,
            format!("{:.6e} {:.6e}", found.worst_out, found.worst_reference),
            verdict,
        ]);
    }
    let rule = match report.rule {
        RuleName::F64OfInputs => {
            let file = report.inputs.as_ref().map_or(String::new(), |path| format!(" of {}", path.display()));
            format!("each against f64 on the inputs{file}, by twice the inputs' precision")
        }
        RuleName::RoundingOfType => "A against B by the rounding of their type (inputs unknown)".to_owned(),
        RuleName::Given => "A against B by the tolerances given".to_owned(),
    };
    let a = report.a.display();
    let verdict = match (report.off.as_slice(), &report.b) {
        _ if report.passed => "equal within tolerance".to_owned(),
        (["a"], None) => format!("DIFFERENT: A is off, {a}"),
        (["a"], Some(_)) => format!("DIFFERENT: A is off, {a}; B is right"),
        (["b"], Some(b)) => format!("DIFFERENT: B is off, {}; A is right", b.display()),
        (["a", "b"], _) => "DIFFERENT: both are off".to_owned(),
        _ => "DIFFERENT".to_owned(),
    };
    format!("{}rule     {rule}\nverdict  {verdict}\n", output::table_text(&table))
}
