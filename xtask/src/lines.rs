//! Lines end at 110 columns, in comments and strings too. rustfmt keeps to it where code can be broken, and
//! to nothing else.

use crate::workspace;

const COLUMNS: usize = 110;

/// `file:line` of the lines of `text` that are longer.
fn long_lines(file: &str, text: &str) -> Vec<String> {
    let long = |(i, line): (usize, &str)| {
        let columns = line.chars().count();
        (columns > COLUMNS).then(|| format!("{file}:{}: {columns} columns", i + 1))
    };
    text.lines().enumerate().filter_map(long).collect()
}

#[test]
fn rust_lines_end_at_110_columns() {
    let files = workspace::sources(workspace::root(), "rs");
    assert!(files.len() > 100, "{} files", files.len());
    let long: Vec<String> = files.iter().flat_map(|(file, text)| long_lines(file, text)).collect();
    assert!(long.is_empty(), "{} lines of more than {COLUMNS} columns:\n{}", long.len(), long.join("\n"));
}

#[test]
fn columns_are_characters() {
    assert_eq!(long_lines("a.rs", &"µ".repeat(110)), [""; 0]);
    let text = format!("short\n// {}\n", "x".repeat(108));
    assert_eq!(long_lines("a.rs", &text), ["a.rs:2: 111 columns"]);
}
