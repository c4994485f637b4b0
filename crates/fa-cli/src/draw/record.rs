//! Records that are drawn: those that `--json` wrote before, and what a run has just found.

use std::path::Path;

use anyhow::Context;
use fa_lab::summary;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::term::destinations::target;
use crate::term::failure::{InputError, Verdict};

/// What a run has just found, as its record will have it.
///
/// # Errors
/// A report that lacks what is drawn: none does.
pub(crate) fn of<R: DeserializeOwned>(report: &impl Serialize) -> anyhow::Result<R> {
    Ok(serde_json::from_value(serde_json::to_value(report)?)?)
}

/// Draws a record of `command` again, to the file that its `--plot` names. Nothing is measured.
///
/// # Errors
/// [`InputError`] for a target that cannot be written and a file that is no such record; what `draw` reports.
pub(crate) fn redraw<R: DeserializeOwned>(
    command: &str,
    record: &Path,
    plot: Option<&Path>,
    draw: impl FnOnce(&R) -> anyhow::Result<String>,
) -> anyhow::Result<Verdict> {
    let target = target(plot.context("--draw needs --plot")?, &[record.to_owned()])?;
    let drawn = draw(&summary::read(record, command)?)?;
    target.write(|writer| writer.write_all(drawn.as_bytes())).map_err(InputError::from)?;
    Ok(Verdict::Good)
}
