//! `fa emulate`: every flag is heeded or refused.

use crate::common::{Dir, fa_args, refused, refuses, repository, text};

const SPEC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fa-kernels/specs/sm80/hd64-causal-bf16.ron");

#[test]
fn flags_of_one_kernel_and_of_many_do_not_mix() {
    for (line, part) in [
        ("emulate --sample 1 --seqlen 3", "--seqlen"),
        ("emulate --sample 1 --heads 4", "--heads"),
        ("emulate --sample 1 --json", "--json"),
        ("emulate --sample 1 --page 16", "--page"),
        ("emulate --sample 1 --arch sm80", "--arch"),
        ("emulate --sample 1 --statement x", "--statement"),
        ("emulate --sample 1 --cta 1", "--cta"),
        ("emulate --day 2026-01-01 x.ron", "--day"),
        ("emulate --survivors x.ron y.ron", "--mutate"),
        ("emulate --sample 1 --survivors x.ron", "--survivors"),
        ("emulate --threads 3 y.ron", "--threads"),
        ("emulate --random 2 --sample 1", "--sample"),
        ("emulate --random 2 --heads 4", "--heads"),
        ("emulate --random 2 --kernels sm70_fwd", "sm90_bwd"),
        ("emulate --sample 1 --log x.jsonl", "--random"),
        ("emulate --sample 1 --from 3", "--random"),
        ("emulate --sample 1 --kv-dtype e4m3", "--kv-dtype"),
        ("emulate --random 2 --dtype e4m3", "--dtype"),
        ("emulate --mutate --kv-dtype int8", "leave out --kv-dtype"),
        ("emulate --grid --kv-descale head y.ron", "--kv-descale"),
    ] {
        refuses(line, part);
    }
}

#[test]
fn what_a_kernel_does_not_heed_is_refused() {
    let folder = Dir::new();
    let page = folder.path("page.html");
    for (flags, part) in [
        (vec!["--rows-q", "padded"], "--rows-q is for sequences of different lengths"),
        (vec!["--rows-k", "packed"], "--rows-k is for sequences of different lengths"),
        (vec!["--slack", "3"], "--slack is for sequences of different lengths"),
        (vec!["--headdim", "72"], "multiples of 8 up to 64"),
        (vec!["--window", "3,3"], "the kernel computes causal"),
        (vec!["--latent"], "sm80_fwd has no form for latents"),
        (vec!["--dtype", "e4m3"], "dtype e4m3 is not supported by sm80_fwd"),
        (vec!["--kv-descale", "head"], "add --kv-dtype"),
        (vec!["--kv-dtype", "f16"], "no type of codes"),
        (vec!["--scale", "0"], "softmax_scale"),
        (vec!["--gap", "18446744073709551608"], "of at most 65536"),
        (vec!["--gap", "12"], "a multiple of 8"),
        (vec!["--lengths", "18446744073709551615"], "of at most 2147483647"),
        (vec!["--lengths", "3", "--slack", "18446744073709551615"], "of at most 2147483647"),
        (vec!["--inputs", text(&page)], "the kernel has no program that reads it"),
        (vec!["--mask-mod", "k <= qq"], "unknown name `qq`"),
        (vec!["--mask-mod", "array x: i32[_]; k <= x[q]", "--inputs", text(&page)], "page.html"),
        (vec!["--page", "16", "--seqlen", "1x18446744073709551615"], "2147483647"),
        (vec!["--page", "16", "--batch", "18446744073709551615"], "at most 1048576 sequences"),
        (vec!["--seqlen", "0x99999999999"], "memory are free"),
        (vec!["--headers", "no/such/folder"], "there is no such folder"),
        (vec!["--seqlen", "20", "--report", text(&page), "--cta", "99"], "--cta 99"),
        (vec!["--report", "no/such/folder/t.html"], "there is no folder"),
        (vec!["--mutate", "--statement", "nosuch.cuh"], "--statement nosuch.cuh"),
        (vec!["--mutate", "--survivors", "no/such.ron"], "cannot read no/such.ron"),
        (vec!["--mutate", "--survivors", SPEC], "hd64-causal-bf16.ron is no record"),
        (vec!["--mutate", "--tried", SPEC], "hd64-causal-bf16.ron is no record"),
    ] {
        let outcome = fa_args(&[&["emulate", SPEC][..], &flags].concat());
        if outcome.stderr.contains("no C++ compiler") || outcome.stderr.contains("runs on x86-64 Linux") {
            eprintln!("skipped: {}", outcome.stderr);
            return;
        }
        assert_eq!(outcome.code, 2, "{flags:?}: {outcome:?}");
        assert!(outcome.stderr.contains(part), "{flags:?}: {outcome:?}");
    }
}

#[test]
fn a_file_that_is_no_log_is_refused_and_left_as_it_is() {
    let folder = Dir::new();
    let path = folder.path("own");
    std::fs::write(&path, "(proven: [").unwrap();
    let part = "own: it has 1 line, none of such a log";
    let outcome = fa_args(&["emulate", "--random", "1", "--log", text(&path)]);
    if outcome.stderr.contains("no C++ compiler") || outcome.stderr.contains("runs on x86-64 Linux") {
        eprintln!("skipped: {}", outcome.stderr);
        return;
    }
    refused(&outcome, &[part], part);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "(proven: [");
}

#[test]
fn sequences_of_one_length_are_as_many_as_asked_for() {
    let flags = ["--page", "16", "--seqlen", "1x20", "--batch", "3", "--seed", "0", "--json"];
    let outcome = fa_args(&[&["emulate", SPEC][..], &flags].concat());
    if outcome.code != 0 && outcome.stderr.contains("no C++ compiler") {
        return;
    }
    let problem = &outcome.json()["problem"];
    let of = |name: &str| problem[name].as_u64();
    assert_eq!([of("batch"), of("total_q"), of("page")], [Some(3), Some(8), Some(16)], "{problem}");
}

/// The page counts bank conflicts of what a kernel issues, and the emulation runs it.
#[test]
fn the_page_lists_stores_of_matrices_where_the_emulation_counts_them() {
    for (name, is_stored) in [("hd128-causal-bf16", false), ("hd192-128-causal-bf16-bwd", true)] {
        let spec = repository(&format!("crates/fa-kernels/specs/sm90/{name}.ron"));
        let outcome = fa_args(&["emulate", text(&spec), "--seqlen", "64", "--heads", "1", "--seed", "0"]);
        if outcome.code != 0 && outcome.stderr.contains("no C++ compiler") {
            return;
        }
        let emulated = outcome.good();
        assert_eq!(emulated.contains("no ldmatrix or stmatrix"), !is_stored, "{emulated}");
        let dir = Dir::new();
        let page = dir.path("page.html");
        let head_dim = if is_stored { "192-128" } else { "128" };
        let flags =
            ["plan", "--causal", "--headdim", head_dim, "--spec", text(&spec), "--report", text(&page)];
        let mode: &[&str] = if is_stored { &["--mode", "bwd"] } else { &[] };
        fa_args(&[&flags[..], mode].concat()).good();
        let page = std::fs::read_to_string(&page).expect("a page");
        assert_eq!(page.contains("stmatrix of"), is_stored, "{name}");
    }
}
