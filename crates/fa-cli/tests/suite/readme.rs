//! What README and docs/cli.md say of the program.

use crate::common::{fa_args, repository, text};

fn pages() -> String {
    let read =
        |path| std::fs::read_to_string(repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    read("README.md") + &read("docs/cli.md")
}

#[test]
fn commands_of_the_pages_have_the_flags_that_they_give_them() {
    let mut flags = 0;
    for line in pages().lines() {
        let Some(line) = line.strip_prefix("fa ").or(line.strip_prefix("cargo run --release -- ")) else {
            continue;
        };
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(name) = words.next().filter(|name| *name != "help") else { continue };
        let help = fa_args(&[name, "--help"]).good();
        for flag in words.filter_map(|word| word.starts_with("--").then(|| word.split('=').next()).flatten())
        {
            assert!(help.contains(flag), "a page gives fa {name} the flag {flag}, which is not in\n{help}");
            flags += 1;
        }
    }
    assert!(flags > 20, "{flags}");
}

/// Those between markers, from records and from what `fa plan` prints.
#[test]
fn tables_of_the_documents_are_up_to_date() {
    let results = repository("docs/results");
    let done = fa_args(&["records", "--tables", "--check", "--results", text(&results)]);
    assert!(done.code == 0 && done.stdout.starts_with("0 tables"), "{}{}", done.stdout, done.stderr);
}
