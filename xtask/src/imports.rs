//! No import cycles: the files of a crate import each other in one direction, and crates import as
//! ARCHITECTURE.md draws.
//!
//! A file imports another where it names something that the other defines, by `use` or by a path in its code.
//! A re-export (`pub use`) is an address, no import: whoever uses the name imports the file that defines it,
//! and the file that holds the re-export does so only if its own code uses the name. `mod name;` is no import
//! either: a parent may list its children and speak for them, and a child may use what its parent defines,
//! but not both for the same two files. Tests (`#[cfg(test)]`) may import everything.

mod reader;

use std::collections::{BTreeMap, BTreeSet};

use crate::rust_tokens::tokens;
use reader::{File, Reader, join, parent};

/// A crate's files by module path: `""` for the root, `"a::b"` for `src/a/b.rs` and `src/a/b/mod.rs`.
struct Crate {
    files: BTreeMap<String, File>,
}

impl Crate {
    /// From the texts of a crate's files by their paths below `src/`.
    fn new<'a>(texts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Crate {
        let mut files = BTreeMap::new();
        let mut tests = BTreeSet::new();
        for (path, text) in texts {
            let module = module_of(path);
            let mut file = File { name: path.to_owned(), ..File::default() };
            Reader { tokens: &tokens(text), at: 0, file: &mut file, tests: &mut tests }.read(&module);
            files.insert(module, file);
        }
        for (module, file) in &mut files {
            file.test = tests.iter().any(|test| module == test || module.starts_with(&format!("{test}::")));
        }
        Crate { files }
    }

    fn is_module(&self, module: &str) -> bool {
        self.files.contains_key(module) || self.files.values().any(|file| file.inline.contains(module))
    }

    /// The file of a module, which may be inline.
    fn file_of(&self, module: &str) -> &str {
        let mut module = module;
        loop {
            if let Some((key, _)) = self.files.get_key_value(module) {
                return key;
            }
            module = parent(module);
        }
    }

    /// The file that defines what `path` in `module` names; `None` for other crates and for names of the
    /// language.
    fn resolve(&self, module: &str, path: &[String], depth: u32) -> Option<&str> {
        let (first, rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => String::new(),
            "self" => module.to_owned(),
            "super" => parent(module).to_owned(),
            name if self.is_module(&join(module, name)) => join(module, name),
            name => return self.resolve_import(module, name, rest, depth),
        };
        for (i, name) in rest.iter().enumerate() {
            let below = join(&at, name);
            if name == "super" {
                at = parent(&at).to_owned();
            } else if self.is_module(&below) {
                at = below;
            } else {
                return self
                    .resolve_import(&at, name, &rest[i + 1..], depth)
                    .or_else(|| Some(self.file_of(&at)));
            }
        }
        Some(self.file_of(&at))
    }

    /// What `name::rest` is if `module` imports `name`.
    fn resolve_import(&self, module: &str, name: &str, rest: &[String], depth: u32) -> Option<&str> {
        let imports = &self.files[self.file_of(module)].imports;
        let import = imports.iter().find(|import| import.module == module && import.name == name)?;
        // An import of itself (`use x::x`) ends here.
        if depth == 0 {
            return None;
        }
        let path: Vec<String> = import.path.iter().chain(rest).cloned().collect();
        self.resolve(module, &path, depth - 1)
    }

    /// Which files each file imports, with one path that says so.
    fn edges(&self) -> BTreeMap<&str, BTreeMap<&str, String>> {
        let mut edges: BTreeMap<&str, BTreeMap<&str, String>> = BTreeMap::new();
        for (module, file) in self.files.iter().filter(|(_, file)| !file.test) {
            let used = file
                .imports
                .iter()
                .filter(|import| !import.public || file.words.contains(&import.name))
                .map(|import| (&import.module, &import.path));
            let paths = file.paths.iter().map(|(module, path)| (module, path));
            for (within, path) in used.chain(paths) {
                if let Some(target) = self.resolve(within, path, 8)
                    && target != module
                {
                    edges.entry(module).or_default().entry(target).or_insert_with(|| path.join("::"));
                }
            }
        }
        edges
    }

    /// The shortest cycle of each group of files that reach each other, as a line of text.
    fn cycles(&self) -> Vec<String> {
        let edges = self.edges();
        let reach = |from: &str| -> BTreeMap<String, String> {
            // Each file reached, and the file before it on a shortest way.
            let mut before = BTreeMap::new();
            let mut wave = vec![from.to_owned()];
            while !wave.is_empty() {
                let mut next = Vec::new();
                for file in wave {
                    for to in edges.get(file.as_str()).into_iter().flat_map(BTreeMap::keys) {
                        if !before.contains_key(*to) {
                            before.insert((*to).to_owned(), file.clone());
                            next.push((*to).to_owned());
                        }
                    }
                }
                wave = next;
            }
            before
        };
        let reached: BTreeMap<&str, BTreeMap<String, String>> =
            edges.keys().map(|file| (*file, reach(file))).collect();
        let mut seen = BTreeSet::new();
        let mut found = Vec::new();
        for (file, before) in &reached {
            if seen.contains(*file) || !before.contains_key(*file) {
                continue;
            }
            let group: Vec<&str> = reached
                .keys()
                .copied()
                .filter(|other| before.contains_key(*other) && reached[other].contains_key(*file))
                .collect();
            seen.extend(group.iter().copied());
            let way = |start: &str| {
                let mut way = vec![start.to_owned()];
                while way.len() == 1 || way[way.len() - 1] != start {
                    way.push(reached[start][&way[way.len() - 1]].clone());
                }
                way.reverse();
                way
            };
            let shortest = group.iter().map(|start| way(start)).min_by_key(Vec::len).expect("not empty");
            let mut text = self.files[&shortest[0]].name.clone();
            for pair in shortest.windows(2) {
                let path = &edges[pair[0].as_str()][pair[1].as_str()];
                text += &format!(" -> {} ({path})", self.files[&pair[1]].name);
            }
            if group.len() > shortest.len() - 1 {
                text += &format!(", in a group of {} files", group.len());
            }
            found.push(text);
        }
        found
    }
}

/// `a::b` for `a/b.rs` and `a/b/mod.rs`, nothing for `lib.rs` and `main.rs`.
fn module_of(path: &str) -> String {
    let path = path.strip_suffix(".rs").unwrap_or(path);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if matches!(path, "lib" | "main") { String::new() } else { path.replace('/', "::") }
}

/// What `ARCHITECTURE.md` lets each crate depend on: its indented lines `crate uses other, other` or
/// `crate uses nothing`.
fn layers(text: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    text.lines()
        .filter_map(|line| line.strip_prefix("    ")?.split_once(" uses "))
        .map(|(name, used)| {
            (name.trim(), used.split(',').map(str::trim).filter(|used| *used != "nothing").collect())
        })
        .collect()
}

/// The workspace's crates that a manifest names among its dependencies, those of its tests not counted.
fn dependencies<'a>(manifest: &'a str, crates: &BTreeSet<&str>) -> BTreeSet<&'a str> {
    let mut section = "";
    let mut found = BTreeSet::new();
    for line in manifest.lines() {
        if let Some(head) = line.trim().strip_prefix('[') {
            section = head.trim_end_matches(']');
        }
        let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
        if matches!(section, "dependencies" | "build-dependencies") && crates.contains(name) {
            found.insert(name);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::workspace::{self, sources};

    fn crates() -> Vec<(String, PathBuf)> {
        let folders = std::fs::read_dir(workspace::root().join("crates")).unwrap();
        let mut paths: Vec<PathBuf> = folders.map(|entry| entry.unwrap().path()).collect();
        paths.extend(["python", "xtask"].map(|name| workspace::root().join(name)));
        paths.retain(|path| path.join("Cargo.toml").is_file());
        paths.sort();
        assert!(paths.len() > 5, "{paths:?}");
        paths
            .into_iter()
            .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path))
            .collect()
    }

    #[test]
    fn files_import_each_other_in_one_direction() {
        let mut wrong = Vec::new();
        for (name, path) in crates() {
            let files = sources(&path.join("src"), "rs");
            assert!(!files.is_empty(), "{name} has no sources");
            let files = files.iter().map(|(path, text)| (path.as_str(), text.as_str()));
            wrong.extend(Crate::new(files).cycles().into_iter().map(|cycle| format!("{name}: {cycle}")));
        }
        assert!(
            wrong.is_empty(),
            "files that import each other (move what both need to a file of its own):\n{}",
            wrong.join("\n")
        );
    }

    #[test]
    fn crates_depend_on_each_other_as_the_architecture_draws() {
        let crates = crates();
        let names: BTreeSet<&str> = crates.iter().map(|(name, _)| name.as_str()).collect();
        let text = std::fs::read_to_string(workspace::root().join("ARCHITECTURE.md")).unwrap();
        let drawn = layers(&text);
        for (name, path) in &crates {
            let drawn = drawn.get(name.as_str()).unwrap_or_else(|| {
                panic!("ARCHITECTURE.md does not say what {name} uses: `    {name} uses ...`")
            });
            let manifest = std::fs::read_to_string(path.join("Cargo.toml")).unwrap();
            let used = dependencies(&manifest, &names);
            let wrong: Vec<_> = used.difference(drawn).collect();
            assert!(wrong.is_empty(), "{name} depends on {wrong:?}, against the layers of ARCHITECTURE.md");
        }
    }

    /// What the planner decides is in a launch plan; what it decides by is not known where kernels launch.
    #[test]
    fn launches_know_nothing_of_predicted_time() {
        let of = |name: &str| {
            let files = sources(&workspace::root().join("crates").join(name).join("src"), "rs");
            assert!(!files.is_empty(), "{name} has no sources");
            Crate::new(files.iter().map(|(path, text)| (path.as_str(), text.as_str())))
        };
        let (kernels, planner) = (of("fa-kernels"), of("fa-planner"));
        let mut used = BTreeSet::new();
        for file in kernels.files.values().filter(|file| !file.test) {
            let imports = file.imports.iter().map(|import| &import.path);
            let paths = imports.chain(file.paths.iter().map(|(_, path)| path));
            used.extend(paths.filter(|path| path[0] == "fa_planner").map(|path| path[1].as_str()));
        }
        assert_eq!(used, BTreeSet::from(["account"]), "what fa-kernels uses of fa-planner");
        let folder = |file: &str| file.split("::").next().map(str::to_owned).unwrap_or_default();
        let edges = planner.edges();
        let account: Vec<_> = edges.iter().filter(|(file, _)| folder(file) == "account").collect();
        assert!(account.len() >= 5, "{account:?}");
        for (file, targets) in account {
            let decides = |target: &&&str| ["cost", "divide", "plan"].contains(&folder(target).as_str());
            let wrong: Vec<_> = targets.keys().filter(decides).collect();
            assert!(wrong.is_empty(), "{file} of fa-planner imports {wrong:?}, and launches use {file}");
        }
    }

    fn cycles(files: &[(&str, &str)]) -> Vec<String> {
        Crate::new(files.iter().copied()).cycles()
    }

    #[test]
    fn a_cycle_is_found_whichever_way_a_name_is_written() {
        let back = ("b.rs", "use crate::a::A; pub struct B;");
        for a in [
            "use crate::b::B; pub struct A;",
            "use super::b::{B}; pub struct A;",
            "use crate::{c::C, b::{self, B as Other}}; pub struct A;",
            "pub struct A; fn f() -> crate::b::B { todo!() }",
            "pub struct A; fn f() { println!(\"{}\", crate::b::f()) }",
            "pub struct A; mod inner { use super::super::b::B; }",
            // By way of re-exports.
            "use crate::B; pub struct A;",
            "use crate::c::B; pub struct A;",
        ] {
            let root = ("lib.rs", "mod a; mod b; mod c; pub use b::B;");
            let found = cycles(&[root, ("a.rs", a), back, ("c.rs", "pub use crate::B; pub struct C;")]);
            assert_eq!(found.len(), 1, "{a}: {found:?}");
            assert!(
                found[0].starts_with("a.rs -> b.rs (") && found[0].ends_with("-> a.rs (crate::a::A)"),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_parent_and_its_child_are_a_cycle_if_both_use_the_other() {
        let child = ("a/child.rs", "use super::A; pub struct Child(A); pub fn run() {}");
        let listed = "mod child; pub use child::Child; pub struct A;";
        assert_eq!(cycles(&[("lib.rs", "mod a;"), ("a/mod.rs", listed), child]), [""; 0]);
        for used in ["fn f() { child::run() }", "fn f(x: Child) {}", "use child::run; fn f() { run() }"] {
            let parent = format!("{listed} {used}");
            let found = cycles(&[("lib.rs", "mod a;"), ("a.rs", &parent), child]);
            assert_eq!(found.len(), 1, "{used}");
        }
    }

    #[test]
    fn tests_comments_and_strings_import_nothing() {
        let a = "pub struct A;
            // use crate::b::B;
            const TEXT: &str = \"crate::b::B\";
            #[cfg(test)]
            mod more;
            #[cfg(test)]
            use crate::b::B;
            #[cfg(test)]
            mod tests { use crate::b::B; fn f() { let x = [1; 2]; } }
            fn after() {}";
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", a),
            ("a/more.rs", "use crate::b::B;"),
            ("b.rs", "use crate::a::A; use crate::a::after; pub struct B;"),
        ];
        assert_eq!(cycles(&files), [""; 0]);
    }

    #[test]
    fn a_long_cycle_is_named_with_the_size_of_its_group() {
        let files = [
            ("main.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::b; pub fn a() {}"),
            ("b.rs", "use crate::c::c; pub fn b() {}"),
            ("c.rs", "use crate::{a::a, b::b}; pub fn c() {}"),
        ];
        assert_eq!(
            cycles(&files),
            ["b.rs -> c.rs (crate::c::c) -> b.rs (crate::b::b), in a group of 3 files"]
        );
    }

    #[test]
    fn layers_and_manifests_are_read() {
        let drawn = layers(
            "# Map\n\n    base   uses nothing\n    top    uses base, middle\n\nA sentence uses words.\n",
        );
        assert_eq!(
            drawn,
            BTreeMap::from([("base", BTreeSet::new()), ("top", BTreeSet::from(["base", "middle"]))])
        );
        let manifest = "[dependencies]\nbase.workspace = true\nmiddle = { path = \"x\" }\nother = \"1\"\n\
            [dev-dependencies]\ntop.workspace = true\n";
        let crates = BTreeSet::from(["base", "middle", "top"]);
        assert_eq!(dependencies(manifest, &crates), BTreeSet::from(["base", "middle"]));
    }
}
