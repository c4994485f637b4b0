//! docs/sources.md: every item of the documents is there, and what a line names exists.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Items of each document.
const ITEMS: [(char, usize); 4] = [('A', 48), ('B', 33), ('C', 20), ('D', 33)];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn document() -> String {
    std::fs::read_to_string(root().join("docs/sources.md")).expect("docs/sources.md")
}

/// The cells of the rows of items.
fn items(text: &str) -> Vec<Vec<String>> {
    let cells = |line: &str| line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
    let is_item = |cells: &Vec<String>| {
        let mut chars = cells[0].chars();
        chars.next().is_some_and(|first| "ABCD".contains(first)) && chars.as_str().parse::<u32>().is_ok()
    };
    text.lines().filter(|line| line.starts_with("| ")).map(cells).filter(is_item).collect()
}

/// The texts between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn every_item_is_there_once_with_a_place_and_a_reason() {
    let items = items(&document());
    let expected: Vec<String> =
        ITEMS.into_iter().flat_map(|(name, count)| (1..=count).map(move |n| format!("{name}{n}"))).collect();
    assert_eq!(items.iter().map(|cells| cells[0].clone()).collect::<Vec<_>>(), expected);
    for cells in &items {
        assert_eq!(cells.len(), 4, "{cells:?}");
        assert!(quoted(&cells[2]).next().is_some() && !cells[3].is_empty(), "{cells:?}");
    }
}

#[test]
fn files_and_commands_that_are_named_exist() {
    let text = document();
    let help = |command: &str| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_fa")).args([command, "--help"]).output().expect("fa runs");
        assert!(output.status.success(), "fa {command} is no command");
        String::from_utf8(output.stdout).expect("help is text")
    };
    let (mut files, mut commands) = (0, BTreeSet::new());
    for named in quoted(&text) {
        let path = named.split(' ').next().unwrap_or_default();
        if ["crates/", "docs/", "python/", "xtask/"].iter().any(|folder| path.starts_with(folder)) {
            assert!(root().join(path).exists(), "{path} does not exist");
            files += 1;
        }
        if named.starts_with("fa ") {
            commands.insert(named.to_owned());
        }
    }
    assert!(files > 80 && commands.len() > 15, "{files} files, {} commands", commands.len());
    for named in commands {
        let words: Vec<&str> = named.split(' ').collect();
        let help = help(words[1]);
        for flag in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(flag), "`{named}`: fa {} has no {flag}", words[1]);
        }
        if let Some(at) = words.iter().position(|word| *word == "--board").filter(|at| at + 1 < words.len()) {
            assert!(words[at + 1].parse::<fa_core::Board>().is_ok(), "`{named}` names no board");
        }
    }
}

#[test]
fn links_within_the_page_lead_somewhere() {
    let text = document();
    let anchor = |title: &str| {
        let kept = title.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, ' ' | '-'));
        kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect::<String>()
    };
    let titles: Vec<String> = text.lines().filter_map(|line| line.strip_prefix("## ")).map(anchor).collect();
    let links: Vec<&str> = text.split("](#").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    assert!(links.len() >= 6, "{links:?}");
    for link in links {
        assert!(titles.iter().any(|title| title == link), "#{link} is no title of {titles:?}");
    }
}
