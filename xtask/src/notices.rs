//! `cargo xtask notices`: the third-party crates in the program `fa` and in the Python wheel, with their
//! licences and copyright notices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace;

/// Write THIRD-PARTY.txt of the program and of the Python package anew
#[derive(clap::Args)]
pub(crate) struct Args {}

/// What is shipped as machine code, and where its notices lie.
const SHIPPED: [(&str, &str); 2] =
    [("fa-cli", "crates/fa-cli/THIRD-PARTY.txt"), ("fa-python", "python/THIRD-PARTY.txt")];

/// Licences that a crate may have, the first that it offers taken; `deny.toml` has the same.
const ALLOWED: [&str; 9] = [
    "MIT",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Zlib",
    "Unicode-3.0",
    "Unlicense",
    "BSL-1.0",
];

pub(crate) fn run(_: &Args) -> Result<()> {
    let metadata = metadata()?;
    for (package, file) in SHIPPED {
        std::fs::write(workspace::root().join(file), text(&metadata, package)?)?;
        println!("{file}");
    }
    Ok(())
}

/// All packages and what each uses, on every system.
fn metadata() -> Result<Value> {
    let mut command =
        workspace::cargo_command(&["metadata", "--quiet", "--format-version", "1", "--offline"]);
    // The systems for which something is shipped.
    command.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = command.output().context("cargo does not start")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn list<'a>(of: &'a Value, path: &str) -> &'a [Value] {
    of.pointer(path).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The third-party packages that are compiled into `root`, without those that run in its build alone.
fn shipped<'a>(metadata: &'a Value, root: &str) -> Result<Vec<&'a Value>> {
    let packages: HashMap<&str, &Value> =
        list(metadata, "/packages").iter().filter_map(|one| Some((one["id"].as_str()?, one))).collect();
    let nodes: HashMap<&str, &Value> =
        list(metadata, "/resolve/nodes").iter().filter_map(|one| Some((one["id"].as_str()?, one))).collect();
    let first = packages.iter().find(|(_, one)| one["name"] == root && one["source"].is_null());
    let mut waiting = vec![*first.with_context(|| format!("no package {root}"))?.0];
    let mut seen: BTreeSet<&str> = waiting.iter().copied().collect();
    while let Some(id) = waiting.pop() {
        for dependency in list(nodes[id], "/deps") {
            let is_shipped = list(dependency, "/dep_kinds").iter().any(|kind| kind["kind"].is_null());
            let to = dependency["pkg"].as_str().context("a dependency without a package")?;
            let is_macro =
                list(packages[to], "/targets").iter().any(|target| target["kind"][0] == "proc-macro");
            if is_shipped && !is_macro && seen.insert(to) {
                waiting.push(to);
            }
        }
    }
    let mut found: Vec<&Value> = seen.into_iter().map(|id| packages[id]).collect();
    found.retain(|one| !one["source"].is_null());
    found.sort_by_key(|one| (one["name"].as_str(), one["version"].as_str()));
    Ok(found)
}

/// The licences that are taken of an expression such as `(MIT OR Apache-2.0) AND Unicode-3.0`; `None` where
/// one is not among those allowed.
fn taken(expression: &str) -> Option<Vec<&'static str>> {
    let plain = expression.replace(['(', ')'], "").replace(" WITH LLVM-exception", "").replace('/', " OR ");
    let choose = |offers: &str| {
        let offered: Vec<&str> = offers.split(" OR ").map(str::trim).collect();
        ALLOWED.into_iter().find(|licence| offered.contains(licence))
    };
    plain.split(" AND ").map(choose).collect()
}

/// Files of a package that hold a licence.
fn licence_files(folder: &Path) -> Result<Vec<String>> {
    let mut texts = BTreeMap::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let is_licence =
            ["license", "licence", "copyright", "copying", "notice"].iter().any(|word| name.contains(word));
        if is_licence
            && path.is_file()
            && let Ok(text) = std::fs::read_to_string(&path)
        {
            texts.insert(name, text);
        }
    }
    Ok(texts.into_values().collect())
}

/// The lines that name who holds the rights.
fn copyright(texts: &[String]) -> BTreeSet<String> {
    let is_notice = |line: &&str| {
        let lower = line.to_lowercase();
        let named = lower.starts_with("copyright (c)")
            || lower.starts_with("copyright ©")
            || lower.starts_with("copyright 2")
            || lower.starts_with("copyright 1");
        named && !lower.contains("[yyyy]") && !lower.contains("{yyyy}")
    };
    texts.iter().flat_map(|text| text.lines()).map(str::trim).filter(is_notice).map(str::to_owned).collect()
}

/// The notices of what `root` is compiled from.
fn text(metadata: &Value, root: &str) -> Result<String> {
    let mut text = format!(
        "Third-party crates compiled into {root}, each with the licence that it offers, those that are \
         taken of it,\n\
         and its copyright notices. Written by `cargo xtask notices`. The licences' texts are at the end.\n"
    );
    let mut texts: BTreeMap<&str, String> = BTreeMap::new();
    for package in shipped(metadata, root)? {
        let [name, version] = ["name", "version"].map(|field| package[field].as_str().unwrap_or_default());
        let expression =
            package["license"].as_str().with_context(|| format!("{name} {version} names no licence"))?;
        let licences = taken(expression)
            .with_context(|| format!("{name} {version} is under {expression}, of which none is allowed"))?;
        text += &format!("\n{name} {version}: {expression}; taken: {}\n", licences.join(" and "));
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let files = licence_files(manifest.parent().context("a package without a folder")?)?;
        for line in copyright(&files) {
            text += &format!("  {line}\n");
        }
        for licence in licences {
            let mark = mark(licence);
            // One file may hold several licences.
            let of_it = files.iter().filter(|file| file.contains(mark));
            if let Some(found) = of_it.min_by_key(|file| file.len()) {
                texts.entry(licence).or_insert_with(|| found.trim().to_owned());
            }
        }
    }
    for (licence, found) in texts {
        text += &format!("\n---- {licence} ----\n\n{}\n", found.replace("\r\n", "\n"));
    }
    Ok(text)
}

/// Words that only the text of this licence has.
fn mark(licence: &str) -> &'static str {
    match licence {
        "MIT" => "Permission is hereby granted, free of charge",
        "Apache-2.0" => "Apache License",
        "BSD-2-Clause" | "BSD-3-Clause" => "Redistribution and use in source and binary forms",
        "ISC" => "Permission to use, copy, modify, and",
        "Zlib" => "This software is provided 'as-is'",
        "Unicode-3.0" => "UNICODE LICENSE V3",
        "Unlicense" => "This is free and unencumbered software",
        _ => "Boost Software License",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_the_licences_on_offer_is_taken() {
        let cases: [(&str, Option<&[&str]>); 8] = [
            ("MIT", Some(&["MIT"])),
            ("Apache-2.0 OR MIT", Some(&["MIT"])),
            ("MIT/Apache-2.0", Some(&["MIT"])),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", Some(&["MIT"])),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", Some(&["MIT", "Unicode-3.0"])),
            ("Unlicense OR MIT", Some(&["MIT"])),
            ("GPL-3.0", None),
            ("MIT AND GPL-3.0", None),
        ];
        for (expression, want) in cases {
            assert_eq!(taken(expression).as_deref(), want, "{expression}");
        }
    }

    /// What is compiled into the tests alone is no concern of users; its licences are checked all the same.
    #[test]
    fn every_crate_has_a_licence_that_is_allowed() {
        let metadata = metadata().unwrap();
        let packages = list(&metadata, "/packages");
        assert!(packages.len() > 100, "{}", packages.len());
        for package in packages.iter().filter(|one| !one["source"].is_null()) {
            let licence = package["license"].as_str().unwrap_or_default();
            assert!(taken(licence).is_some(), "{} is under {licence:?}: not allowed", package["name"]);
        }
        let deny = std::fs::read_to_string(workspace::root().join("deny.toml")).unwrap();
        for licence in ALLOWED {
            assert!(deny.contains(&format!("\"{licence}\"")), "deny.toml does not allow {licence}");
        }
    }

    #[test]
    fn notices_are_of_the_crates_that_are_shipped() {
        let metadata = metadata().unwrap();
        for (package, file) in SHIPPED {
            let want = text(&metadata, package).unwrap();
            let found = std::fs::read_to_string(workspace::root().join(file)).unwrap_or_default();
            assert!(found == want, "{file} is stale: run `cargo xtask notices`");
        }
    }
}
