//! Files that are read and written: what is there already, what is no file, and disks that are full.

use crate::common::{Dir, fa, fa_args, noise, refused, text, write};

/// q, k and v of a small problem.
fn inputs(path: &std::path::Path) {
    let tensor = |name, seed| -> crate::common::Tensor { (name, "F32", &[1, 4, 2, 8], noise(seed, 64)) };
    write(path, &[tensor("q", 1), tensor("k", 2), tensor("v", 3)], &[]);
}

#[cfg(unix)]
#[test]
fn an_output_keeps_the_permissions_and_the_links_that_are_there() {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = Dir::new();
    let at = |name: &str| folder.path(name);
    inputs(&at("in"));
    fs::write(at("private"), "old").unwrap();
    fs::set_permissions(at("private"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("private", at("link")).unwrap();
    for output in ["private", "link"] {
        fa_args(&["run", text(&at("in")), "-o", text(&at(output))]).good();
        assert!(fs::read(at("private")).unwrap().len() > 100, "{output}");
        assert_eq!(fs::metadata(at("private")).unwrap().permissions().mode() & 0o777, 0o600, "{output}");
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink(), "{output}");
    }
    assert_eq!(fs::read_link(at("link")).unwrap(), std::path::Path::new("private"));
    // The input by another name is the input.
    symlink("in", at("alias")).unwrap();
    let onto_itself = fa_args(&["run", text(&at("in")), "-o", text(&at("alias"))]);
    refused(&onto_itself, &["it is an input file"], "alias");
    assert_eq!(folder.listing(), ["alias", "in", "link", "private"]);
}

/// A limit on the length of files stands for a full disk: the write fails, some bytes in.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_with_the_name_of_the_target() {
    let folder = Dir::new();
    let at = |name: &str| folder.path(name);
    let tensor = |name, seed| -> crate::common::Tensor { (name, "F32", &[1, 64, 2, 8], noise(seed, 1024)) };
    write(&at("in"), &[tensor("q", 1), tensor("k", 2), tensor("v", 3)], &[]);
    let target = text(&at("target")).to_owned();
    for line in [
        format!("plan --report {target}"),
        format!("bench --seqlen 8,16,24,32 --seconds 0.001 --json {target}"),
        format!("run {} -o {target}", text(&at("in"))),
    ] {
        // With the signal ignored, a write beyond the limit of 1 KiB is an error.
        let script = format!("trap '' XFSZ; ulimit -f 1; exec {} {line}", env!("CARGO_BIN_EXE_fa"));
        let done = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
        let stderr = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(2), "{line}: {stderr}");
        assert!(stderr.contains(&format!("error: cannot write {target}: ")), "{line}: {stderr}");
        assert!(!stderr.contains(".fa-"), "{line}: {stderr}");
        // A benchmark's rows up to the one that the disk has no room for are there, whole.
        if line.starts_with("bench") {
            let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(&target).unwrap()).unwrap();
            assert_eq!(kept["rows"][0]["seqlen_k"], 8, "{kept}");
            std::fs::remove_file(&target).unwrap();
        }
        assert_eq!(folder.listing(), ["in"], "{line}");
    }
}

/// Nobody writes to the pipe: opening it would wait for ever.
#[cfg(unix)]
#[test]
fn a_named_pipe_is_refused_at_once() {
    let folder = Dir::new();
    let pipe = folder.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for line in [format!("run {}", text(&pipe)), format!("check {0} {0}", text(&pipe))] {
        refused(&fa(&line), &["it is not a regular file"], &line);
    }
}

/// Two entries of one name that agree in all: the format forbids them, and readers differ in which one they
/// take.
#[test]
fn names_that_are_there_twice_are_refused() {
    let folder = Dir::new();
    let path = folder.path("in");
    let entry = r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    for (header, part) in [
        (format!(r#"{{"q":{entry},"q":{entry}}}"#), "tensor 'q' is there twice"),
        (format!(r#"{{"q":{entry},"k":{entry},"q":{entry}}}"#), "tensor 'q' is there twice"),
        (r#"{"out":"text"}"#.to_owned(), "expected dtype, shape and data_offsets"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned(), "__metadata__ is there twice"),
        (r#"{"__metadata__":{"layout":"bshd","layout":"bhsd"}}"#.to_owned(), "'layout' is there twice"),
        (
            r#"{"q":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.to_owned(),
            "tensor 'q': duplicate field `dtype`",
        ),
    ] {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(&[0; 8]);
        std::fs::write(&path, bytes).unwrap();
        let outcome = fa_args(&["run", text(&path)]);
        refused(&outcome, &[part, "is not a valid safetensors file"], &header);
    }
}
