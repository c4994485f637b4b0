//! `fa run` on files with new keys for their cache: the committed examples, whose outputs a script computed
//! by the formula, and files made here.

use std::path::PathBuf;

use crate::common::{Dir, Tensor, fa, noise, read, refused, repository, text};

const EXAMPLES: [(&str, &str); 2] =
    [("append-paged", "--causal"), ("append-interleaved", "--causal --rotary-interleaved")];

fn example(name: &str) -> String {
    text(&repository(&format!("examples/{name}.safetensors"))).to_owned()
}

#[test]
fn the_examples_grow_and_come_out_as_their_script_computed_them() {
    let folder = Dir::new();
    for (name, flags) in EXAMPLES {
        for backend in ["cpu", "reference"] {
            let output = folder.file(format!("{name}-{backend}"));
            let line = format!("run {} {flags} --backend {backend} -o {output} --json", example(name));
            let report = fa(&line).json();
            assert_eq!(report["appended"]["rotary_dim"], 16, "{name}");
            assert!(report["difference_from_own_out"]["max_abs"].as_f64().unwrap() < 0.01, "{report}");
            let verdict = fa(&format!("check {output} {} {flags}", example(name)));
            assert_eq!((verdict.code, verdict.stderr.as_str()), (0, ""), "{name}: {}", verdict.stdout);
            let (before, after) = (read(&PathBuf::from(example(name))), read(&PathBuf::from(&output)));
            let grown = before["cache_seqlens"].2.iter().map(|len| len + 2.0).collect::<Vec<_>>();
            assert_eq!(after["cache_seqlens"].2, grown, "{name}");
            assert_eq!(after.contains_key("page_table"), name == "append-paged");
            // Of the values, the new rows are in the cache as they were, and nothing else has changed.
            let new = before["v_new"].2.iter().filter(|value| after["v"].2.contains(value)).count();
            assert_eq!(new, before["v_new"].2.len(), "{name}");
            let changed = before["v"].2.iter().zip(&after["v"].2).filter(|(a, b)| a != b).count();
            assert_eq!(changed, new, "{name}");
            assert!(before["q"].2 != after["q"].2, "{name}: queries are turned");
            // What was written is a cache, on which attention is the same.
            let again = folder.file("again");
            let rest = flags.replace("--rotary-interleaved", "");
            fa(&format!("run {output} {rest} --backend {backend} -o {again}")).good();
            assert!(read(&PathBuf::from(&again))["out"] == after["out"], "{name}");
        }
    }
}

/// Elements that are paired otherwise than the file says give a plausible wrong answer: `fa` says so.
#[test]
fn another_pairing_than_the_files_is_noted() {
    let said = |name: &str, pairing: bool| {
        let says = format!("the metadata of {} says rotary_interleaved = {pairing}", example(name));
        format!("{says} (--rotary-interleaved); only flags decide")
    };
    for (name, flag, pairs) in [
        ("append-paged", " --rotary-interleaved", "of neighbours"),
        ("append-interleaved", "", "from two halves"),
    ] {
        let wrong = fa(&format!("run {} --causal{flag} --backend cpu", example(name)));
        assert!(wrong.stdout.contains(&format!("turned by position as pairs {pairs}")), "{}", wrong.stdout);
        assert!(wrong.stderr.contains(&said(name, flag.is_empty())), "{name}: {}", wrong.stderr);
    }
    for (name, flags) in EXAMPLES {
        assert_eq!(fa(&format!("run {} {flags} --backend cpu", example(name))).stderr, "", "{name}");
    }
}

/// One-piece and packed new keys without tables: the same as a cache that holds them already.
#[test]
fn appended_keys_are_keys() {
    let folder = Dir::new();
    let (batch, room, heads, dim) = (3, 12, 2, 8);
    let lens = [4usize, 0, 9];
    let counts = [3usize, 5, 0];
    let row = heads * dim;
    let [q, k, v, k_new, v_new] = [(1, batch * 2), (2, batch * room), (3, batch * room), (4, 8), (5, 8)]
        .map(|(seed, n)| noise(seed, n * row));
    let integers = |list: &[usize]| list.iter().map(|&n| n as f64).collect::<Vec<_>>();
    let grow = |cache: &[f64], new: &[f64]| {
        let (mut cache, mut first) = (cache.to_vec(), 0);
        for sequence in 0..batch {
            let to = (sequence * room + lens[sequence]) * row;
            let rows = counts[sequence] * row;
            cache[to..to + rows].copy_from_slice(&new[first..first + rows]);
            first += rows;
        }
        cache
    };
    let after: Vec<usize> = lens.iter().zip(counts).map(|(len, count)| len + count).collect();
    let (q_shape, k_shape, new_shape) = ([batch, 2, heads, dim], [batch, room, heads, dim], [8, heads, dim]);
    let given: Vec<Tensor> = vec![
        ("q", "F32", &q_shape, q.clone()),
        ("k", "F32", &k_shape, k.clone()),
        ("v", "F32", &k_shape, v.clone()),
        ("k_new", "F32", &new_shape, k_new.clone()),
        ("v_new", "F32", &new_shape, v_new.clone()),
        ("cu_seqlens_k_new", "I32", &[4], vec![0.0, 3.0, 8.0, 8.0]),
        ("cache_seqlens", "I32", &[3], integers(&lens)),
    ];
    let held: Vec<Tensor> = vec![
        ("q", "F32", &q_shape, q),
        ("k", "F32", &k_shape, grow(&k, &k_new)),
        ("v", "F32", &k_shape, grow(&v, &v_new)),
        ("cache_seqlens", "I32", &[3], integers(&after)),
    ];
    let out = |name: &str, tensors: &[Tensor]| {
        let (input, output) = (folder.write(name, tensors), folder.file(format!("{name}-out")));
        fa(&format!("run {input} --causal --backend cpu -o {output}")).good();
        read(&PathBuf::from(&output))
    };
    let (given, held) = (out("given", &given), out("held", &held));
    assert!(given["out"] == held["out"] && given["lse"] == held["lse"]);
    let stored: Vec<f64> = grow(&k, &k_new).into_iter().map(|value| (value as f32).into()).collect();
    assert!(given["k"].2 == stored, "the cache that is written has the new keys in their places");
}

/// An example's tensors with some replaced (or, of no type, left out).
fn with(folder: &Dir, name: &str, changes: Vec<Tensor>) -> String {
    let own: Vec<_> = read(&PathBuf::from(example(name))).into_iter().collect();
    let kept = own.iter().filter(|(name, _)| changes.iter().all(|change| change.0 != name));
    let mut tensors: Vec<Tensor> = kept
        .map(|(name, (dtype, shape, values))| (name.as_str(), dtype.as_str(), &shape[..], values.clone()))
        .collect();
    tensors.extend(changes.into_iter().filter(|change| !change.1.is_empty()));
    folder.write("changed", &tensors)
}

#[test]
fn appends_that_do_not_fit_are_refused_by_name_limit_and_value() {
    let folder = Dir::new();
    let none = |name| (name, "", &[0usize; 0][..], vec![]);
    let lens = |values: [f64; 3]| ("cache_seqlens", "I32", &[3usize][..], values.to_vec());
    let new = |name, shape: &'static [usize]| (name, "BF16", shape, vec![0.0; shape.iter().product()]);
    let table = |name, shape: &'static [usize]| (name, "F32", shape, vec![0.0; shape.iter().product()]);
    let cases: Vec<(Vec<Tensor>, &str, &[&str])> = vec![
        (vec![none("v_new")], "", &["has k_new, but no v_new"]),
        (vec![none("rotary_sin")], "", &["has rotary_cos, but no rotary_sin"]),
        (vec![none("k_new"), none("v_new")], "", &["has rotary_cos, but no k_new and v_new"]),
        (vec![lens([30.0, 0.0, 47.0])], "", &["sequence 2 has 47 keys", "2 new ones", "room for 48"]),
        (vec![new("k_new", &[3, 2, 1, 32])], "", &["'k_new' has shape [3, 2, 1, 32]", "2 heads"]),
        (vec![new("v_new", &[3, 1, 2, 32])], "", &["'v_new' has shape", "2 rows"]),
        (vec![("v_new", "F32", &[3, 2, 2, 32], vec![0.0; 384])], "", &["'v_new' holds F32", "q holds BF16"]),
        (vec![table("rotary_cos", &[48]), table("rotary_sin", &[48])], "", &["[positions, rotary_dim / 2]"]),
        (vec![table("rotary_sin", &[48, 4])], "", &["'rotary_sin' has shape [48, 4]", "[48, 8]"]),
        (
            vec![table("rotary_cos", &[20, 8]), table("rotary_sin", &[20, 8])],
            "",
            &["sequence 0 has rows up to position 31", "20 positions"],
        ),
        (
            vec![table("rotary_cos", &[48, 17]), table("rotary_sin", &[48, 17])],
            "",
            &["'rotary_cos' has shape [48, 17]", "at most 16, half of head_dim"],
        ),
        (
            vec![
                lens([16.0, 16.0, 0.0]),
                ("page_table", "I32", &[3, 3], vec![0.0, 1.0, 2.0, 3.0, 1.0, 4.0, 5.0, 6.0, 7.0]),
            ],
            "",
            &["sequences 0 and 1 both append to row 0 of page 1"],
        ),
        (
            vec![("page_table", "I32", &[3, 3], vec![4.0, 99.0, 3.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0])],
            "",
            &["tensor 'page_table': entry 1 of sequence 0", "99"],
        ),
        (
            vec![("cu_seqlens_k_new", "I32", &[4], vec![0.0, 2.0, 1.0, 3.0])],
            "",
            &["with cu_seqlens_k_new it must be 3"],
        ),
        (
            vec![
                new("k_new", &[6, 2, 32]),
                new("v_new", &[6, 2, 32]),
                ("cu_seqlens_k_new", "I32", &[4], vec![0.0, 2.0, 1.0, 3.0]),
            ],
            "",
            &["'cu_seqlens_k_new': entry 2 is 1, less than the 2 before it"],
        ),
        (
            vec![
                new("k_new", &[6, 2, 32]),
                new("v_new", &[6, 2, 32]),
                ("cu_seqlens_k_new", "I32", &[4], vec![0.0, 2.0, 4.0, 7.0]),
            ],
            "",
            &["'cu_seqlens_k_new': it ends with 7, k_new has 6 rows"],
        ),
        (vec![none("rotary_cos"), none("rotary_sin")], "--rotary-interleaved", &["--rotary-interleaved"]),
    ];
    for (changes, flags, parts) in cases {
        let input = with(&folder, "append-paged", changes);
        let output = folder.file("refused");
        let outcome = fa(&format!("run {input} --causal {flags} -o {output}"));
        refused(&outcome, parts, &format!("{parts:?}"));
        assert!(!PathBuf::from(&output).exists(), "{parts:?}");
    }
    let lost = with(&folder, "append-interleaved", vec![none("cache_seqlens")]);
    let outcome = fa(&format!("run {lost} --causal --rotary-interleaved"));
    refused(&outcome, &["has k_new, but no cache_seqlens"], "no lengths");
    // Without tables nothing is turned, and the mask does not matter to the rows.
    let plain = with(&folder, "append-paged", vec![none("rotary_cos"), none("rotary_sin")]);
    let report = fa(&format!("run {plain} --json")).json();
    assert!(report["appended"]["rows"] == 6 && report["appended"]["rotary_dim"].is_null(), "{report}");
}

#[test]
fn what_is_appended_has_no_gradients() {
    let input = example("append-interleaved");
    let outcome = fa(&format!("run {input} --causal --rotary-interleaved --backward"));
    refused(&outcome, &["no gradients: leave --backward out"], "--backward");
}
