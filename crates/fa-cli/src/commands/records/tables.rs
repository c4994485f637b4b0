//! `fa records --tables`: the tables of README.md, docs/performance.md and docs/sources.md, written between
//! markers from the summaries of records.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, bail};
use fa_attn::atomic_file;

use super::blocks::{self, Records};
use crate::term::failure::Verdict;
use crate::term::output;

/// The documents with tables, below the folder of the repository.
const DOCUMENTS: [&str; 3] = ["README.md", "docs/performance.md", "docs/sources.md"];

/// Writes the tables of the documents above the folder of the results, or only compares them: a bad verdict
/// where one of them is out of date.
///
/// # Errors
/// Documents and records that cannot be read, and tables without markers.
pub(super) fn command(results: &Path, check: bool) -> anyhow::Result<Verdict> {
    let records = Records { folder: results.to_owned() };
    let mut stale = Vec::new();
    let mut placed = BTreeSet::new();
    for document in DOCUMENTS {
        let path = results.join("../..").join(document);
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!(
                "cannot read {}: --results names the folder docs/results of the repository",
                path.display()
            )
        })?;
        let block = |name: &str| {
            placed.insert(name.to_owned());
            blocks::block(&records, name)
        };
        let (filled, changed) = filled(&text, block).context(document)?;
        if !changed.is_empty() && !check {
            atomic_file::write(&path, filled.as_bytes())?;
        }
        stale.extend(changed.into_iter().map(|name| format!("{document}: {name}\n")));
    }
    if let Some(name) = blocks::names().find(|name| !placed.contains(*name)) {
        bail!("no document has the markers `<!-- begin: {name} -->` and `<!-- end: {name} -->`");
    }
    let of = if check { "out of date; write them by `fa records --tables`" } else { "written" };
    output::print(&format!("{}{} {of}\n", stale.concat(), fa_core::counted(stale.len(), "table")))?;
    Ok(if check && !stale.is_empty() { Verdict::Bad } else { Verdict::Good })
}

/// The text with what `block` makes between the markers of each name, and the names whose text has changed.
/// What `block` knows nothing of stays as it is.
fn filled(
    text: &str,
    mut block: impl FnMut(&str) -> anyhow::Result<Option<String>>,
) -> anyhow::Result<(String, Vec<String>)> {
    const BEGIN: &str = "<!-- begin: ";
    let (mut out, mut changed) = (String::new(), Vec::new());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) =
            after.split_once(" -->\n").context("a marker `<!-- begin: NAME -->` has no end")?;
        let end = format!("<!-- end: {name} -->");
        let Some((old, after)) = after.split_once(&end) else { bail!("{name}: there is no {end}") };
        let new = block(name)?.map_or_else(|| old.to_owned(), |text| format!("\n{}\n\n", text.trim_end()));
        out += &format!("{before}{BEGIN}{name} -->\n{new}{end}");
        if old != new {
            changed.push(name.to_owned());
        }
        rest = after;
    }
    Ok((out + rest, changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_between_markers_is_replaced_and_the_rest_kept() {
        let text = "# A\n<!-- begin: one -->\n\n1\n\n<!-- end: one -->\nb\n<!-- begin: two -->\nold\n\
                    <!-- end: two -->\n";
        let make = |name: &str| {
            let text = ["1\n", "| 2 |\n"][usize::from(name == "two")];
            Ok((name != "three").then(|| text.to_owned()))
        };
        let (once, changed) = filled(text, make).expect("filled");
        assert_eq!(once, text.replace("\nold\n", "\n\n| 2 |\n\n"));
        assert_eq!(changed, ["two"]);
        assert_eq!(filled(&once, make).expect("filled"), (once.clone(), Vec::new()));
        let others = "<!-- begin: three -->\n3<!-- end: three -->\n";
        assert_eq!(filled(others, make).expect("filled"), (others.to_owned(), Vec::new()));
        let open = filled("<!-- begin: one -->\n1\n", make).expect_err("no end").to_string();
        assert!(open.contains("there is no <!-- end: one -->"), "{open}");
    }
}
