//! What README says of the program.

use crate::common::{fa, fa_args, repository};

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

/// The figures of the example change with the cost model.
#[test]
fn the_readme_shows_what_its_plan_prints() {
    let readme = readme();
    let line = readme.lines().find(|line| line.starts_with("fa plan --headdim 128 --seqlen 8192 --heads 16"));
    let line = line.and_then(|line| line.split('#').next()).expect("the example's command");
    let printed = fa(line.trim_start_matches("fa ")).good();
    let block = readme.split("```text\n").find(|block| block.contains("gpu       sm90")).expect("its output");
    let shown = block.split("```").next().unwrap_or_default();
    assert!(shown.lines().count() > 8, "{shown}");
    assert!(printed.starts_with(shown), "README shows\n{shown}\nand the program prints\n{printed}");
}

/// To the field "ragged" means packed batches, which a README of kernels for uniform lengths called
/// supported.
#[test]
fn the_support_matrix_names_packed_batches_and_other_lengths_apart() {
    let readme = readme();
    let row = |start: &str| readme.lines().find(|line| line.starts_with(start)).unwrap_or_default();
    assert!(row("| packed batches (`cu_seqlens`)").contains("forward and backward"));
    assert!(row("| lengths |").contains("not only multiples of the tile"));
    assert!(!readme.contains("ragged"), "say packed batches, or lengths that are no multiples of the tile");
}
