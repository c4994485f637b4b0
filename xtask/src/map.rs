//! ARCHITECTURE.md's list of folders names what is there: of sources each file and folder, and nothing else.

use std::collections::BTreeSet;
use std::path::Path;

/// A row of the list: a folder as it is written, and the names in it.
fn rows(page: &str) -> Vec<(String, BTreeSet<String>)> {
    let list = page.split("\n## Folders\n\n").nth(1).expect("a list of folders");
    let mut rows: Vec<(String, String)> = Vec::new();
    for line in list.lines().take_while(|line| !line.is_empty()) {
        let line = line.strip_prefix("    ").expect("an indented row");
        match (line.split_once(' '), rows.last_mut()) {
            (Some(("", more)), Some((_, names))) => *names += &format!(" {more}"),
            (Some((folder, names)), _) => rows.push((folder.to_owned(), names.to_owned())),
            (None, _) => panic!("'{line}' names nothing"),
        }
    }
    rows.into_iter().map(|(folder, names)| (folder, words(&names))).collect()
}

/// The words outside parentheses.
fn words(text: &str) -> BTreeSet<String> {
    let mut depth = 0usize;
    let outside = text.chars().filter(|c| {
        depth += usize::from(*c == '(');
        let is_outside = depth == 0;
        depth -= usize::from(*c == ')');
        is_outside
    });
    outside.collect::<String>().split_whitespace().map(str::to_owned).collect()
}

/// What `folder` holds, by the kind that its row lists: folders with a slash, sources and pages without
/// their extensions. A module that is a file and a folder is the folder.
fn listing(folder: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let (mut files, mut folders) = (BTreeSet::new(), BTreeSet::new());
    for entry in std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            folders.insert(stem);
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "md") {
            files.insert(stem);
        }
    }
    let unnamed = ["lib", "main", "mod", "README", "ARCHITECTURE", "CHANGELOG"];
    names.extend(
        files.into_iter().filter(|file| !folders.contains(file) && !unnamed.contains(&file.as_str())),
    );
    let passed_over = |name: &str| name.starts_with('.') || name == "target" || name == "__pycache__";
    names.extend(folders.into_iter().filter(|name| !passed_over(name)).map(|name| name + "/"));
    names
}

#[test]
fn the_list_of_folders_is_the_tree() {
    let root = crate::workspace::root();
    let page = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let rows = rows(&page);
    assert!(rows.len() > 12, "{rows:?}");
    for (folder, named) in rows {
        let path =
            if folder.starts_with("fa-") { root.join("crates").join(&folder) } else { root.join(&folder) };
        let there = listing(&path);
        // Elsewhere builds and users leave folders of their own.
        let missing: Vec<_> = there.difference(&named).filter(|_| folder.contains("/src")).collect();
        let gone: Vec<_> = named.difference(&there).collect();
        assert!(
            missing.is_empty() && gone.is_empty(),
            "{folder}: not listed {missing:?}, not there {gone:?}"
        );
    }
}

#[test]
fn rows_go_on_where_they_are_indented() {
    let rows =
        rows("# x\n\n## Folders\n\n    a/src  one (two\n           three) four/\n    b      five\n\nsix\n");
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(rows, [("a/src".to_owned(), set(&["one", "four/"])), ("b".to_owned(), set(&["five"]))]);
}
