//! Rules of the device sources that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};

/// Every header under `cuda`, with its path from there and its code: comments and strings are left out.
fn headers() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let (mut folders, mut headers): (Vec<PathBuf>, Vec<(String, String)>) = (vec![root.clone()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
            headers.push((name, code(&fs::read_to_string(&path).unwrap())));
        }
    }
    assert!(headers.len() > 30, "{} headers", headers.len());
    headers
}

fn code(text: &str) -> String {
    let line = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        // Strings hold no escaped quotes here.
        code.split('"').step_by(2).collect::<Vec<_>>().join("\"\"") + "\n"
    };
    text.lines().map(line).collect()
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Whether only `ptx/` may say `word`: inline PTX, CUDA's built-in variables and its intrinsics, of which the
/// host emulation has twins only as functions of `ptx/`.
fn is_machine_word(word: &str) -> bool {
    const MARKS: [&str; 3] = ["__device__", "__host__", "__forceinline__"];
    const WORDS: [&str; 10] = [
        "asm",
        "threadIdx",
        "blockIdx",
        "blockDim",
        "gridDim",
        "warpSize",
        "atomicAdd",
        "atomicMax",
        "atomicCAS",
        "atomicExch",
    ];
    WORDS.contains(&word) || (word.starts_with("__") && !MARKS.contains(&word))
}

#[test]
fn inline_ptx_and_intrinsics_stand_only_in_ptx() {
    let mut found = Vec::new();
    for (name, code) in headers() {
        // Generated, and its assertions need an operator of each compiler's own.
        if name.starts_with("ptx/") || name.ends_with("params.cuh") {
            continue;
        }
        found.extend(words(&code).filter(|word| is_machine_word(word)).map(|word| format!("{name}: {word}")));
    }
    assert!(found.is_empty(), "give these a name in cuda/ptx:\n{}", found.join("\n"));
}

#[test]
fn machine_words_are_told_from_others() {
    for word in ["asm", "threadIdx", "__shfl_xor_sync", "__threadfence", "__CUDA_ARCH__", "atomicAdd"] {
        assert!(is_machine_word(word), "{word}");
    }
    for word in ["__device__", "thread_index", "atomic_add", "asmx"] {
        assert!(!is_machine_word(word), "{word}");
    }
    assert_eq!(code("a = \"__x\"; // asm\n"), "a = \"\"; \n");
}
