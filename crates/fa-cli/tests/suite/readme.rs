//! What README and the other pages say of the program.

use std::collections::BTreeMap;

use crate::common::{Dir, command, fa_args, repository, text};

/// The pages of the repository, but for the notebook, whose commands were of their day.
fn pages() -> Vec<(String, String)> {
    let mut paths: Vec<String> =
        ["README.md", "CONTRIBUTING.md", "python/README.md", "crates/fa-cli/README.md"]
            .map(str::to_owned)
            .into();
    for entry in std::fs::read_dir(repository("docs")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with(".md") {
            paths.push(format!("docs/{name}"));
        }
    }
    let read = |path: &str| {
        std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    paths.into_iter().map(|path| (path.clone(), read(&path))).collect()
}

/// Commands of the program in a page: lines of code blocks, and code within sentences.
fn commands(page: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for line in page.lines() {
        let line = line.trim_start();
        if let Some(block) = line.strip_prefix("fa ").or(line.strip_prefix("cargo run --release -- ")) {
            found.push(block.split('#').next().unwrap_or_default());
        }
    }
    let spans = page.split('`').skip(1).step_by(2);
    found.extend(spans.filter(|code| code.len() < 200).filter_map(|code| code.strip_prefix("fa ")));
    found
}

#[test]
fn commands_of_the_pages_have_the_flags_that_they_give_them() {
    let (mut flags, mut helps) = (0, BTreeMap::<Vec<String>, String>::new());
    for (path, page) in pages() {
        for command in commands(&page) {
            let words: Vec<&str> = command.split_whitespace().collect();
            let length = if words.first() == Some(&"dist") { 2 } else { 1 };
            let is_name = |word: &&&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
            let name: Vec<String> =
                words.iter().take(length).take_while(is_name).map(|word| (*word).to_owned()).collect();
            if name.is_empty() || name[0] == "help" || name[0].starts_with('-') {
                continue;
            }
            let help = helps.entry(name.clone()).or_insert_with(|| {
                let name: Vec<&str> = name.iter().map(String::as_str).chain(["--help"]).collect();
                fa_args(&name).good()
            });
            for word in words.iter().filter(|word| word.starts_with("--")) {
                let flag = word.split(['=', ',', '[', ']', ':']).next().unwrap_or_default();
                let is_there =
                    help.split(|c: char| c != '-' && !c.is_ascii_alphanumeric()).any(|w| w == flag);
                assert!(is_there, "{path} gives fa {name:?} the flag {flag}, which is not in\n{help}");
                flags += 1;
            }
        }
    }
    assert!(flags > 100, "{flags}");
}

/// In a folder that has the repository's files, in the order of each page.
#[test]
fn commands_of_the_pages_run_as_they_stand() {
    let mut ran = 0;
    for (path, page) in pages() {
        let folder = Dir::new();
        for part in ["examples", "crates", "docs"] {
            let to = std::fs::canonicalize(repository(part)).unwrap();
            std::os::unix::fs::symlink(to, folder.path(part)).unwrap();
        }
        for line in page.lines().filter_map(|line| line.trim_start().strip_prefix("fa ")) {
            let words: Vec<&str> = line
                .split('#')
                .next()
                .unwrap_or_default()
                .split("    ")
                .next()
                .unwrap_or_default()
                .split_whitespace()
                .collect();
            let is_own =
                |word: &&str| word.starts_with("IN.") || word.starts_with("in.") || word.contains('\'');
            if !matches!(words.first(), Some(&("run" | "check" | "plan"))) || words.iter().any(is_own) {
                continue;
            }
            let done = command(&words).current_dir(folder.root()).output().unwrap();
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success(), "{path}: fa {words:?}: {said}");
            ran += 1;
        }
    }
    assert!(ran >= 12, "{ran}");
}

/// Those between markers, from records and from what `fa plan` prints.
#[test]
fn tables_of_the_documents_are_up_to_date() {
    let results = repository("docs/results");
    let done = fa_args(&["records", "--tables", "--check", "--results", text(&results)]);
    assert!(done.code == 0 && done.stdout.starts_with("0 tables"), "{}{}", done.stdout, done.stderr);
}
