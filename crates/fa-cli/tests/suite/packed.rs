//! `fa run` and `fa check` on packed sequences, keys in pages, slopes and sinks: the committed examples,
//! whose outputs a script computed by the formula, and files made here.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::common::{Dir, Tensor, fa, metadata, noise, read, refused, repository, text, write};

const BACKENDS: [&str; 2] = ["cpu", "reference"];

fn example(name: &str) -> String {
    text(&repository(&format!("examples/{name}.safetensors"))).to_owned()
}

/// Runs an example on a backend; the output's path.
fn run(folder: &Dir, name: &str, flags: &str, backend: &str) -> String {
    let output = folder.file(format!("{name}-{backend}"));
    let input = example(name);
    fa(&format!("run {input} {flags} --backend {backend} -o {output}")).good();
    output
}

/// (example, flags, mask flags, tensors with their shapes)
type Expected = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static [usize])]);

const EXAMPLES: [Expected; 4] = [
    (
        "packed-causal",
        "--causal --backward",
        "--causal",
        &[
            ("out", &[105, 4, 32]),
            ("lse", &[4, 105]),
            ("dq", &[105, 4, 32]),
            ("dk", &[105, 2, 32]),
            ("dv", &[105, 2, 32]),
        ],
    ),
    ("decode-paged", "--causal", "--causal", &[("out", &[3, 1, 8, 32]), ("lse", &[3, 8, 1])]),
    ("alibi", "--causal --backward", "--causal", &[("out", &[1, 64, 8, 32]), ("dk", &[1, 64, 2, 32])]),
    (
        "sinks-window",
        "--window 15,0 --backward",
        "--window 15,0",
        &[("out", &[1, 64, 8, 32]), ("lse", &[1, 8, 64]), ("dsinks", &[8])],
    ),
];

#[test]
fn the_examples_come_out_as_their_script_computed_them() {
    let folder = Dir::new();
    for (name, flags, mask, shapes) in EXAMPLES {
        for backend in BACKENDS {
            let output = run(&folder, name, flags, backend);
            let written = read(&PathBuf::from(&output));
            for &(tensor, shape) in shapes {
                assert_eq!(written[tensor].1, shape, "{name} {tensor}");
            }
            // The example holds inputs and outputs: both are judged by f64, and neither is off.
            let verdict = fa(&format!("check {output} {} {mask}", example(name)));
            assert_eq!((verdict.code, verdict.stderr.as_str()), (0, ""), "{name}: {}", verdict.stdout);
            for (tensor, _) in shapes {
                assert!(verdict.stdout.contains(tensor), "{name}: {}", verdict.stdout);
            }
        }
    }
}

#[test]
fn a_wrong_output_of_packed_sequences_is_off() {
    let folder = Dir::new();
    let output = run(&folder, "packed-causal", "--causal", "cpu");
    let full = folder.file("full");
    fa(&format!("run {} -o {full}", example("packed-causal"))).good();
    let verdict = fa(&format!("check {output} {full} --inputs {} --causal", example("packed-causal")));
    assert!(verdict.code == 1 && verdict.stdout.contains("B is off"), "{verdict:?}");
    assert_eq!(metadata(&PathBuf::from(&output))["causal"], "true");
}

#[test]
fn rows_of_no_sequence_see_nothing() {
    let folder = Dir::new();
    let output = run(&folder, "packed-causal", "--causal --backward", "cpu");
    let written = read(&PathBuf::from(&output));
    let last = |name: &str, per_row: usize| {
        let values = &written[name].2;
        values[102 * per_row..].to_vec()
    };
    for (name, per_row) in [("out", 128), ("dq", 128), ("dk", 64), ("dv", 64)] {
        assert_eq!(last(name, per_row), vec![0.0; 3 * per_row], "{name}");
    }
    let lse = &written["lse"].2;
    for head in 0..4 {
        assert!(lse[head * 105..][..102].iter().all(|lse| lse.is_finite()), "head {head}");
        assert!(lse[head * 105 + 102..][..3].iter().all(|lse| *lse == f64::NEG_INFINITY), "head {head}");
    }
}

#[test]
fn the_report_says_how_sequences_lie_and_counts_their_work() {
    let report = fa(&format!("run {} --causal", example("packed-causal"))).good();
    assert!(
        report.contains("batch 4, queries x keys 60x60 at most (queries packed in 105, keys packed in 105)"),
        "{report}"
    );
    let report = fa(&format!("run {} --causal", example("decode-paged"))).good();
    assert!(
        report.contains("batch 3, queries x keys 1x64 at most (keys in 10 pages of 16 in use)"),
        "{report}"
    );
    assert!(report.contains("out differs from the input file's 'out' by at most"), "{report}");
    let json = fa(&format!("run {} --causal --json", example("sinks-window"))).json();
    assert_eq!((&json["problem"]["sinks"], &json["problem"]["batch"]), (&true.into(), &1.into()));
}

/// A batch of sequences as one file of packed tensors, and one file for each sequence.
#[test]
fn packed_sequences_are_the_sequences_one_by_one() {
    let folder = Dir::new();
    let path = |name: &str| folder.path(name);
    let (starts_q, starts_k) = ([0usize, 5, 5, 6, 13], [0usize, 9, 12, 12, 19]);
    let (total_q, total_k, heads, heads_kv, dim) = (14, 20, 4, 2, 8);
    let [q, k, v, dout] =
        [(1, total_q, heads), (2, total_k, heads_kv), (3, total_k, heads_kv), (4, total_q, heads)]
            .map(|(seed, rows, heads)| noise(seed, rows * heads * dim));
    let integers = |starts: &[usize]| starts.iter().map(|&start| start as f64).collect::<Vec<_>>();
    let (q_shape, k_shape) = ([total_q, heads, dim], [total_k, heads_kv, dim]);
    let tensors: Vec<Tensor> = vec![
        ("q", "F32", &q_shape, q.clone()),
        ("k", "F32", &k_shape, k.clone()),
        ("v", "F32", &k_shape, v.clone()),
        ("dout", "F32", &q_shape, dout.clone()),
        ("cu_seqlens_q", "I32", &[5], integers(&starts_q)),
        ("cu_seqlens_k", "I32", &[5], integers(&starts_k)),
    ];
    write(&path("packed"), &tensors, &[]);
    for backend in BACKENDS {
        let flags = format!("--causal --backward --backend {backend}");
        let run = |name: &str| -> HashMap<String, (String, Vec<usize>, Vec<f64>)> {
            let (input, output) = (path(name), path("out"));
            fa(&format!("run {} {flags} -o {}", text(&input), text(&output))).good();
            read(&output)
        };
        let packed = run("packed");
        for sequence in 0..4 {
            let rows = |starts: &[usize]| starts[sequence]..starts[sequence + 1];
            let (queries, keys) = (rows(&starts_q), rows(&starts_k));
            let part = |values: &[f64], rows: &std::ops::Range<usize>, heads: usize| {
                values[rows.start * heads * dim..rows.end * heads * dim].to_vec()
            };
            let q_shape = [1, queries.len(), heads, dim];
            let k_shape = [1, keys.len(), heads_kv, dim];
            let tensors: Vec<Tensor> = vec![
                ("q", "F32", &q_shape, part(&q, &queries, heads)),
                ("k", "F32", &k_shape, part(&k, &keys, heads_kv)),
                ("v", "F32", &k_shape, part(&v, &keys, heads_kv)),
                ("dout", "F32", &q_shape, part(&dout, &queries, heads)),
            ];
            write(&path("one"), &tensors, &[]);
            let one = run("one");
            for (name, rows, heads) in [
                ("out", &queries, heads),
                ("dq", &queries, heads),
                ("dk", &keys, heads_kv),
                ("dv", &keys, heads_kv),
            ] {
                let found = part(&packed[name].2, rows, heads);
                let far = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-6;
                assert!(!found.iter().zip(&one[name].2).any(far), "{backend} {name} of sequence {sequence}");
                assert_eq!(found.len(), one[name].2.len());
            }
        }
    }
}

/// A file of an example's tensors, one of them replaced.
fn with(folder: &Dir, name: &str, tensor: Option<Tensor>) -> String {
    let shapes: Vec<(String, String, Vec<usize>, Vec<f64>)> =
        read(&PathBuf::from(example(name))).into_iter().map(|(name, (d, s, v))| (name, d, s, v)).collect();
    let dropped = tensor.as_ref().map_or("", |tensor| tensor.0);
    let kept = shapes.iter().filter(|(name, ..)| name != dropped && name != "out" && name != "lse");
    let mut tensors: Vec<Tensor> = kept
        .map(|(name, dtype, shape, values)| (name.as_str(), dtype.as_str(), &shape[..], values.clone()))
        .collect();
    tensors.extend(tensor.filter(|tensor| !tensor.1.is_empty()));
    folder.write(name, &tensors)
}

#[test]
fn what_contradicts_itself_is_refused_by_the_tensors_name() {
    // (example, tensor in place of its own, parts of the message)
    let cases: [(&str, Tensor, &[&str]); 16] = [
        (
            "packed-causal",
            ("cu_seqlens_q", "I64", &[5], vec![0.0; 5]),
            &["'cu_seqlens_q' holds I64", "must hold I32"],
        ),
        ("packed-causal", ("cu_seqlens_q", "I32", &[1, 5], vec![0.0; 5]), &["[1, 5]", "[batch + 1]"]),
        ("packed-causal", ("cu_seqlens_q", "I32", &[0], vec![]), &["'cu_seqlens_q'", "batch + 1 entries"]),
        (
            "packed-causal",
            ("cu_seqlens_q", "I32", &[4], vec![0.0, 37.0, 42.0, 102.0]),
            &["'cu_seqlens_k' has shape [5]", "must be 4", "cu_seqlens_q gives a batch of 3"],
        ),
        (
            "packed-causal",
            ("cu_seqlens_k", "I32", &[5], vec![0.0, 37.0, 36.0, 42.0, 102.0]),
            &["'cu_seqlens_k'", "must not descend"],
        ),
        (
            "packed-causal",
            ("cu_seqlens_k", "I32", &[5], vec![0.0, 37.0, 37.0, 42.0, 106.0]),
            &["'cu_seqlens_k'", "106", "105"],
        ),
        (
            "packed-causal",
            ("cu_seqlens_k", "", &[], vec![]),
            &["'k' has shape", "rank is 3", "needs cu_seqlens_k"],
        ),
        (
            "packed-causal",
            ("q", "BF16", &[1, 2, 4, 32], vec![0.0; 256]),
            &["'q'", "with cu_seqlens_q it must be 3"],
        ),
        (
            "packed-causal",
            ("seqused_q", "I32", &[4], vec![38.0, 0.0, 0.0, 0.0]),
            &["'seqused_q'", "38", "37"],
        ),
        (
            "packed-causal",
            ("seqused_k", "I32", &[3], vec![0.0; 3]),
            &["'seqused_k' has shape [3]", "must be 4"],
        ),
        ("packed-causal", ("page_table", "I32", &[4, 1], vec![0.0; 4]), &["page_table and cu_seqlens_k"]),
        ("decode-paged", ("cache_seqlens", "", &[], vec![]), &["page_table", "no cache_seqlens"]),
        (
            "decode-paged",
            ("cache_seqlens", "I32", &[3], vec![50.0, 17.0, 33.0]),
            &["'page_table'", "-1", "10 pages"],
        ),
        (
            "decode-paged",
            ("cache_seqlens", "I32", &[3], vec![50.0, 7.0, 65.0]),
            &["'cache_seqlens'", "65", "64"],
        ),
        ("decode-paged", ("seqused_k", "I32", &[3], vec![1.0; 3]), &["seqused_k and cache_seqlens"]),
        ("sinks-window", ("sinks", "F32", &[4], vec![0.0; 4]), &["'sinks' has shape [4]", "must be 8"]),
    ];
    let folder = Dir::new();
    for (name, tensor, parts) in cases {
        let what = format!("{name} with {}", tensor.0);
        let path = with(&folder, name, Some(tensor));
        for backend in BACKENDS {
            refused(&fa(&format!("run {path} --causal --backend {backend}")), parts, &what);
        }
    }
    let backward = fa(&format!("run {} --causal --backward", example("decode-paged")));
    refused(&backward, &["keys lie in pages"], "a backward of pages");
}
