//! The lab notebook's entries: headings `### NB-001 · 2026-11-21 · Title` on the pages under docs/, listed in
//! docs/lab-notebook.md and cited by number from anywhere in the repository.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What an entry's number begins with; three digits follow.
const PREFIX: &str = "NB-";

/// The page with the index of all entries.
const INDEX: &str = "docs/lab-notebook.md";

/// Files that may define or cite entries, under the workspace's root.
const TREES: [&str; 7] =
    ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "crates", "docs", "examples", "xtask"];

const EXTENSIONS: [&str; 6] = ["md", "rs", "cuh", "cu", "ron", "toml"];

/// All numbers `NB-ddd` in a text, in order, with repeats.
fn citations(text: &str) -> Vec<&str> {
    let is_number = |at: usize| {
        let digits = text.get(at + PREFIX.len()..at + PREFIX.len() + 3)?;
        let follows = text[at + PREFIX.len() + 3..].chars().next();
        let whole =
            digits.bytes().all(|b| b.is_ascii_digit()) && !follows.is_some_and(|c| c.is_ascii_digit());
        whole.then(|| &text[at..at + PREFIX.len() + 3])
    };
    text.match_indices(PREFIX).filter_map(|(at, _)| is_number(at)).collect()
}

/// An entry as its heading gives it.
#[derive(Debug, PartialEq)]
struct Entry<'a> {
    number: &'a str,
    date: &'a str,
    title: &'a str,
}

/// The entries that a page defines, or the first heading that is not `### NB-ddd · YYYY-MM-DD · Title`.
fn entries(page: &str) -> Result<Vec<Entry<'_>>, String> {
    let headings =
        page.lines().filter_map(|line| line.strip_prefix("### ")).filter(|line| line.starts_with(PREFIX));
    headings
        .map(|heading| {
            let parts: Vec<&str> = heading.splitn(3, " · ").collect();
            let &[number, date, title] = parts.as_slice() else {
                return Err(format!("{heading}: not three parts"));
            };
            if citations(number) != [number] {
                return Err(format!("{heading}: not a number"));
            }
            let digits: Vec<bool> = date.bytes().map(|b| b.is_ascii_digit()).collect();
            let is_date = date.len() == 10
                && digits.iter().enumerate().all(|(i, &digit)| digit != (i == 4 || i == 7))
                && date.matches('-').count() == 2;
            if !is_date || title.trim().is_empty() {
                return Err(format!("{heading}: no date or no title"));
            }
            Ok(Entry { number, date, title })
        })
        .collect()
}

/// The readable files below `path`, or `path` itself.
fn files(path: &Path, into: &mut Vec<PathBuf>) {
    if path.is_dir() {
        if path.file_name().is_some_and(|name| name == "target" || name.to_string_lossy().starts_with('.')) {
            return;
        }
        for entry in std::fs::read_dir(path).expect("a folder of the repository").flatten() {
            files(&entry.path(), into);
        }
    } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| EXTENSIONS.contains(&e)) {
        into.push(path.to_owned());
    }
}

/// What is wrong with a set of files: numbers defined twice, cited but not defined, defined but not in the
/// index.
fn problems(texts: &[(String, String)]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut defined: BTreeMap<&str, (&str, &str, &str)> = BTreeMap::new();
    for (path, text) in texts.iter().filter(|(path, _)| path.ends_with(".md")) {
        match entries(text) {
            Ok(found) => {
                for Entry { number, date, title } in found {
                    if let Some((first, ..)) = defined.insert(number, (path, date, title)) {
                        wrong.push(format!("{number} is defined twice: {first} and {path}"));
                    }
                }
            }
            Err(error) => wrong.push(format!("{path}: {error}")),
        }
    }
    for (path, text) in texts {
        for number in citations(text) {
            if !defined.contains_key(number) {
                wrong.push(format!("{path} cites {number}, which no page defines"));
            }
        }
    }
    let index = texts.iter().find(|(path, _)| path == INDEX).map_or("", |(_, text)| text);
    for (number, (_, date, title)) in &defined {
        let row = format!("| {number} | {date} | {title} |");
        if !index.lines().any(|line| line.starts_with(&row)) {
            wrong.push(format!("{INDEX} has no row \"{row}\""));
        }
    }
    wrong
}

/// Every entry is defined once, dated and in the index; every citation has its entry.
#[test]
fn numbers_are_unique_and_exist() {
    let root = crate::workspace::root();
    let mut paths = Vec::new();
    for tree in TREES {
        files(&root.join(tree), &mut paths);
    }
    let own = root.join("xtask/src/notebook.rs");
    let texts: Vec<(String, String)> = paths
        .iter()
        .filter(|path| **path != own)
        .map(|path| {
            let name = path.strip_prefix(root).expect("below the root").to_string_lossy().replace('\\', "/");
            (name, std::fs::read_to_string(path).expect("text"))
        })
        .collect();
    assert!(
        texts.iter().any(|(path, text)| path == INDEX && citations(text).len() > 50),
        "the notebook is found"
    );
    assert_eq!(problems(&texts), Vec::<String>::new());
}

#[test]
fn what_is_wrong_is_said() {
    let page = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let index = "| NB-001 | 2026-11-21 | First | here |\n";
    let entry = "### NB-001 · 2026-11-21 · First\n";
    let good = [page(INDEX, index), page("docs/a.md", entry), page("crates/a.rs", "// 3 % (NB-001)")];
    assert_eq!(problems(&good), Vec::<String>::new());

    let twice = [page(INDEX, index), page("docs/a.md", entry), page("docs/b.md", entry)];
    assert_eq!(problems(&twice), ["NB-001 is defined twice: docs/a.md and docs/b.md"]);

    let missing =
        [page(INDEX, index), page("docs/a.md", entry), page("crates/a.rs", "// NB-002 and NB-0011")];
    assert_eq!(problems(&missing), ["crates/a.rs cites NB-002, which no page defines"]);

    let unlisted = [page(INDEX, ""), page("docs/a.md", entry)];
    assert_eq!(problems(&unlisted), [format!("{INDEX} has no row \"| NB-001 | 2026-11-21 | First |\"")]);

    for heading in
        ["### NB-001 · First\n", "### NB-001 · 21.11.2026 · First\n", "### NB-1 · 2026-11-21 · First\n"]
    {
        assert!(entries(heading).is_err(), "{heading}");
    }
}
