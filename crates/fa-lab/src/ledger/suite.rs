//! What the tests of the emulation depend on.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The machine, the kernels, who launches them, the oracle, the cases and their inputs.
const SOURCES: [&str; 13] = [
    "crates/fa-core/src",
    "crates/fa-cpu/src",
    "crates/fa-emu",
    "crates/fa-kernels/cuda",
    "crates/fa-kernels/specs",
    "crates/fa-kernels/src",
    "crates/fa-lab/src/grid.rs",
    "crates/fa-lab/src/grid",
    "crates/fa-lab/src/mods.rs",
    "crates/fa-lab/src/random.rs",
    "crates/fa-lab/src/sequences",
    "crates/fa-lab/src/sequences.rs",
    "crates/fa-planner/src/account",
];

/// What of those they do not depend on: other CPU code and its tests, what is said of a run.
const APART: [&str; 4] = [
    "crates/fa-cpu/src/simd/tests.rs",
    "crates/fa-cpu/src/tiled",
    "crates/fa-emu/src/timeline.rs",
    "crates/fa-kernels/src/jit/cubin.rs",
];

/// Files whose names, of functions and variables, do not count.
const NAMELESS: [&str; 4] = ["cuh", "cu", "cpp", "h"];

/// Words of C++ and CUDA; those of two underscores and more are not listed.
const WORDS: &str = "alignas alignof asm auto bool break case char class const consteval constexpr continue \
    decltype default define delete do double elif else endif enum extern false float for \
    friend goto if ifdef ifndef include inline int long mutable namespace new noexcept nullptr \
    operator pragma private protected public register return short signed sizeof static \
    static_assert struct switch template this throw true try typedef typename union unsigned \
    using virtual void volatile while std";

/// A hash of the sources of the workspace at `root` that the tests of the emulation depend on, without
/// comments. Names of C++ and CUDA count only where they are not changed throughout: whether what a GPU
/// executes is the same is for the units' own entries to say.
///
/// # Errors
/// A folder without them.
pub fn inputs(root: &Path) -> Result<String> {
    let mut texts = BTreeMap::new();
    for path in SOURCES {
        gather(root, path, &mut texts)?;
    }
    without_names(&mut texts);
    let mut hash = Sha256::new();
    for (name, text) in &texts {
        hash.update(format!("{name} {}\n{text}", text.len()));
    }
    Ok(hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect())
}

/// Puts a number in the place of each name of the C++ files, in the order in which names first appear, and of
/// the same words in Rust's, which name parts of kernels.
fn without_names(texts: &mut BTreeMap<String, String>) {
    let is_of = |file: &str, kinds: &[&str]| {
        Path::new(file).extension().is_some_and(|own| kinds.iter().any(|kind| own == *kind))
    };
    let mut names = HashMap::new();
    for (_, text) in texts.iter_mut().filter(|(file, _)| is_of(file, &NAMELESS)) {
        *text = numbered(text, true, &mut |word| {
            let counts = word.starts_with("__") || WORDS.split_whitespace().any(|own| own == word);
            let next = names.len();
            (!counts).then(|| *names.entry(word.to_owned()).or_insert(next))
        });
    }
    for (_, text) in texts.iter_mut().filter(|(file, _)| is_of(file, &["rs"])) {
        *text = numbered(text, false, &mut |word| names.get(word).copied());
    }
}

/// `text` with numbers for words; of C++ without comments at the ends of lines, with literals as they are.
fn numbered(text: &str, is_cpp: bool, number: &mut dyn FnMut(&str) -> Option<usize>) -> String {
    let is_word = |byte: u8| byte == b'_' || byte.is_ascii_alphanumeric();
    let (bytes, mut found, mut at) = (text.as_bytes(), String::with_capacity(text.len()), 0);
    while at < bytes.len() {
        let begin = at;
        let end = |goes_on: &dyn Fn(u8) -> bool| {
            begin + 1 + bytes[begin + 1..].iter().take_while(|byte| goes_on(**byte)).count()
        };
        match bytes[at] {
            b'/' if is_cpp && bytes.get(at + 1) == Some(&b'/') => {
                at = end(&|byte| byte != b'\n');
                continue;
            }
            quote @ (b'"' | b'\'') if is_cpp => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote && bytes[at] != b'\n' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(bytes.len());
            }
            b'0'..=b'9' => at = end(&|byte| is_word(byte) || is_cpp && byte == b'\''),
            first if is_word(first) => {
                at = end(&is_word);
                if let Some(number) = number(&text[begin..at]) {
                    found += &format!("n{number}");
                    continue;
                }
            }
            _ => at = end(&|byte| byte >= 0x80),
        }
        found += &text[begin..at];
    }
    found
}

/// The code of a file, or of all files in a folder, by their paths from `root`.
fn gather(root: &Path, name: &str, texts: &mut BTreeMap<String, String>) -> Result<()> {
    let place = root.join(name);
    if APART.contains(&name) {
        return Ok(());
    }
    if place.is_dir() {
        for entry in std::fs::read_dir(&place).map_err(Error::read(&place))? {
            let file = entry?.file_name();
            gather(root, &format!("{name}/{}", file.to_string_lossy()), texts)?;
        }
        return Ok(());
    }
    let text = std::fs::read(&place).map_err(Error::read(&place))?;
    let text = String::from_utf8_lossy(&text);
    let code = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
    texts.insert(name.to_owned(), code.collect::<Vec<_>>().join("\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_count_where_they_are_changed_throughout() {
        let of = |texts: [&str; 3]| {
            let files = ["a.cuh", "b.cpp", "c.rs"].map(str::to_owned);
            let mut texts = files.into_iter().zip(texts.map(str::to_owned)).collect();
            without_names(&mut texts);
            texts.into_values().collect::<Vec<_>>()
        };
        let rust = "replace(\"lanes(2)\", text)";
        let known = of(["int lanes(int a) { return a; }  // twice", "f(lanes(2), \"lanes\");", rust]);
        let numbers =
            ["int n0(int n1) { return n1; }  ", "n2(n0(2), \"lanes\");", "replace(\"n0(2)\", text)"];
        assert_eq!(known, numbers);
        let own = rust.replace("lanes", "own");
        assert_eq!(known, of(["int own(int b) { return b; }  // once", "f(own(2), \"lanes\");", &own]));
        for others in [
            // In one file alone, another function, another text, number, type and intrinsic.
            ["int own(int b) { return b; }  ", "f(lanes(2), \"lanes\");", rust],
            ["int own(int b) { return b; }  ", "f(own(2), \"lanes\");", rust],
            ["int lanes(int a) { return a; }  ", "lanes(f(2), \"lanes\");", rust],
            ["int own(int b) { return b; }  ", "f(own(2), \"own\");", &own],
            ["int lanes(int a) { return a; }  ", "f(lanes(3), \"lanes\");", rust],
            ["long lanes(int a) { return a; }  ", "f(lanes(2), \"lanes\");", rust],
            ["int __lanes(int a) { return a; }  ", "f(__lanes(2), \"lanes\");", rust],
        ] {
            assert_ne!(known, of(others), "{others:?}");
        }
        let text = "0x1p-3f + 1'000 + '\\'' + \"\\\"µ\" /* µ */";
        assert_eq!(numbered(text, true, &mut |_| Some(7)), text);
    }

    #[test]
    fn sources_are_there_and_comments_do_not_count() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        assert_eq!(inputs(&root).unwrap().len(), 16);
        assert!(APART.iter().all(|own| root.join(own).exists()));
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::create_dir_all(folder.path().join("a/b")).unwrap();
            std::fs::write(folder.path().join("a/b/c.rs"), text).unwrap();
            let mut texts = BTreeMap::new();
            gather(folder.path(), "a", &mut texts).unwrap();
            texts
        };
        let first = read("fn a() {}\n");
        assert_eq!(first.keys().collect::<Vec<_>>(), ["a/b/c.rs"]);
        assert_eq!(first, read("// What it does.\n\n    fn a() {}\n"));
        assert_ne!(first, read("fn a() { b() }\n"));
        assert!(inputs(folder.path()).is_err(), "no workspace");
    }
}
