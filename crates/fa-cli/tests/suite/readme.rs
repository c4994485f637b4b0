//! What README says of the program.

use crate::common::{fa_args, repository, text};

fn readme() -> String {
    std::fs::read_to_string(repository("README.md")).expect("a README")
}

#[test]
fn commands_of_the_readme_have_the_flags_that_it_gives_them() {
    let mut flags = 0;
    for line in readme().lines() {
        let Some(line) = line.strip_prefix("fa ").or(line.strip_prefix("cargo run --release -- ")) else {
            continue;
        };
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(name) = words.next().filter(|name| *name != "help") else { continue };
        let help = fa_args(&[name, "--help"]).good();
        for flag in words.filter_map(|word| word.starts_with("--").then(|| word.split('=').next()).flatten())
        {
            assert!(help.contains(flag), "README gives fa {name} the flag {flag}, which is not in\n{help}");
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
