//! Where a command's results go: JSON to a file or standard output, a drawing or a page to a file, else a
//! table.

use std::path::{Path, PathBuf};

use fa_attn::atomic_file::AtomicFile;
use serde::Serialize;

use crate::term::failure::InputError;
use crate::term::output;

/// The file at `path`, probed before any work is done, unless it is one of the `inputs`.
///
/// # Errors
/// [`InputError::Target`] for a file that cannot be written, or whose old content is an input.
pub(crate) fn target(path: &Path, inputs: &[PathBuf]) -> Result<AtomicFile, InputError> {
    let target = AtomicFile::probe(path)?;
    let own = path.canonicalize().ok();
    let is_own = |input: &PathBuf| own.is_some() && input.canonicalize().ok() == own;
    if inputs.iter().any(is_own) {
        let reason = "it is an input file, whose content would be lost: name another".to_owned();
        return Err(InputError::Target { path: path.to_owned(), reason });
    }
    Ok(target)
}

/// The files that `--json` and its companion name, probed before any work is done.
#[derive(Debug)]
pub(crate) struct Destinations {
    json: Option<AtomicFile>,
    page: Option<AtomicFile>,
    /// JSON takes the place of the table.
    json_to_stdout: bool,
}

impl Destinations {
    /// `json` may be `-`, standard output; `page` is another file. Neither may be one of the `inputs`.
    ///
    /// # Errors
    /// [`InputError::Target`] for what cannot be written.
    pub(crate) fn probe(
        json: Option<&Path>,
        page: Option<&Path>,
        inputs: &[PathBuf],
    ) -> Result<Destinations, InputError> {
        let stdout = Path::new("-");
        let refuse = |path: &Path, reason: &str| {
            Err(InputError::Target { path: path.to_owned(), reason: reason.to_owned() })
        };
        match page {
            Some(page) if page == stdout => return refuse(page, "standard output is for JSON: name a file"),
            Some(page) if json == Some(page) => {
                return refuse(page, "it is the file of --json: name another");
            }
            _ => {}
        }
        let json_to_stdout = json == Some(stdout);
        Ok(Destinations {
            json: json.filter(|_| !json_to_stdout).map(|path| target(path, inputs)).transpose()?,
            page: page.map(|path| target(path, inputs)).transpose()?,
            json_to_stdout,
        })
    }

    /// Writes what there is of `report` to the file of `--json`, if one is named, so that a run that is
    /// stopped loses no more than what it was at.
    ///
    /// # Errors
    /// What the file system reports, and a value without a JSON form.
    pub(crate) fn keep(&self, report: &impl Serialize) -> fa_lab::Result<()> {
        let Some(json) = &self.json else { return Ok(()) };
        let text = output::json_text(report)?;
        Ok(json.write(|writer| writer.write_all(text.as_bytes()))?)
    }

    /// Writes `report` where it was asked for, and prints the table unless JSON takes its place.
    ///
    /// # Errors
    /// What the page, the file system and standard output report.
    pub(crate) fn write(
        self,
        report: &impl Serialize,
        page: impl FnOnce() -> anyhow::Result<String>,
        table: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        self.keep(report)?;
        if let Some(target) = self.page {
            let page = page()?;
            target.write(|writer| writer.write_all(page.as_bytes())).map_err(InputError::from)?;
        }
        output::print(&if self.json_to_stdout { output::json_text(report)? } else { table() })
    }
}
