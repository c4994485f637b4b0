//! `fa prove --check`: the ledger next to the sources, and what a change of them asks for.

use std::path::Path;

use serde_json::Value;

use crate::common::{Dir, fa_args, refused, repository, text};

/// The repository's ledger next to its sources, or to the device sources in a folder.
fn check(only: &str, headers: Option<&Path>, code: i32) -> Value {
    let results = repository("docs/results");
    // Kept between runs, by content.
    let kernels = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let mut arguments = vec!["prove", "--check", "--json", "--results", text(&results)];
    arguments.extend(["--kernels", text(&kernels)]);
    if !only.is_empty() {
        arguments.extend(["--only", only]);
    }
    if let Some(headers) = headers {
        arguments.extend(["--headers", text(headers)]);
    }
    let done = fa_args(&arguments);
    assert_eq!(done.code, code, "{}{}", done.stdout, done.stderr);
    serde_json::from_str(&done.stdout).expect("JSON")
}

fn list<'a>(found: &'a Value, name: &str) -> Vec<&'a str> {
    found[name].as_array().expect(name).iter().map(|own| own.as_str().expect("a name")).collect()
}

#[test]
fn every_unit_is_proven_as_it_is() {
    let found = check("", None, 0);
    assert_eq!(list(&found, "open"), [""; 0]);
    assert_eq!(list(&found, "broken"), [""; 0]);
    assert!(found["entries"].as_u64().is_some_and(|entries| entries > 200), "{}", found["entries"]);
    assert!(found["judged"]["emulated"].as_u64().is_some_and(|entries| entries > 200), "{}", found["judged"]);
}

/// The device sources with `from` as `to` in the files below `part`, in a folder.
fn changed(part: &str, from: &str, to: &str) -> Dir {
    let (folder, mut found) = (Dir::new(), false);
    let mut left = vec![repository("crates/fa-kernels/cuda")];
    let root = left[0].clone();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let name = path.strip_prefix(&root).unwrap();
        let mut source = std::fs::read_to_string(&path).unwrap();
        if name.starts_with(part) || part.is_empty() {
            found |= source.contains(from);
            source = source.replace(from, to);
        }
        let copy = folder.path(text(name));
        std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
        std::fs::write(copy, source).unwrap();
    }
    assert!(found, "nothing has {from}");
    folder
}

#[test]
fn a_rename_asks_for_nothing_and_a_line_for_its_entry() {
    let units = "sm90/hd64-causal-bf16.ron,sm80/hd64-causal-bf16.ron";
    // A function of ptx/warp.cuh and of all who call it.
    let renamed = changed("", "shuffle_xor", "exchanged");
    let found = check(units, Some(renamed.root()), 0);
    assert!(list(&found, "moved").len() > 6, "{found}");
    assert_eq!(list(&found, "open"), [""; 0]);
    let line = changed("attn/plan.cuh", "length, params.shift)", "length, params.shift + 1)");
    let found = check(units, Some(line.root()), 1);
    let open = list(&found, "open");
    assert!(open.len() == 3 && open.iter().all(|own| own.starts_with("fa_plan of ")), "{open:?}");
    assert!(open.iter().all(|own| own.ends_with("not judged by emulation and a GPU")), "{open:?}");
}

/// Before hours of work, not behind them.
#[test]
fn what_is_no_ledger_or_cannot_be_written_is_refused() {
    let folder = Dir::new();
    let prove = |results: &str, more: &[&str]| fa_args(&[&["prove", "--results", results], more].concat());
    refused(
        &prove("/proc", &["--tier", "emulated"]),
        &["cannot write /proc"],
        "a folder that takes no files",
    );
    let none = prove(text(folder.root()), &["--check"]);
    refused(&none, &["no ledger is there", "--results"], "a folder without one");
    std::fs::write(folder.path("proof.ron"), "(units: [").unwrap();
    let done = prove(text(folder.root()), &["--check"]);
    assert!(done.code != 0 && done.stderr.contains("proof.ron"), "{done:?}");
    assert_eq!(std::fs::read_to_string(folder.path("proof.ron")).unwrap(), "(units: [");
}
