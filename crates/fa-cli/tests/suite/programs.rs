//! Masks and changes of scores of the user's own, whose arrays are tensors of the file.

use std::collections::HashMap;

use crate::common::{Dir, Tensor, fa_args, metadata, noise, read, refused, text, write};

/// q, k, v and dout of 2 sequences of 5 queries and 7 keys, 4 heads on 2, and what programs read.
fn tensors() -> Vec<Tensor<'static>> {
    let keep = (0..35).map(|at| f64::from(at % 3 != 1 || at % 7 == 0)).collect();
    vec![
        ("q", "F32", &[2, 5, 4, 16], noise(1, 2 * 5 * 4 * 16)),
        ("k", "F32", &[2, 7, 2, 16], noise(2, 2 * 7 * 2 * 16)),
        ("v", "F32", &[2, 7, 2, 8], noise(3, 2 * 7 * 2 * 8)),
        ("dout", "F32", &[2, 5, 4, 8], noise(4, 2 * 5 * 4 * 8)),
        ("bias", "F32", &[5, 7], noise(5, 35)),
        ("table", "BF16", &[4, 7], noise(6, 28)),
        ("keep", "BOOL", &[5, 7], keep),
        ("words", "U32", &[5, 1], vec![f64::from(0b101_0111); 5]),
        ("last", "I32", &[5], vec![3.0, 4.0, 5.0, 6.0, 7.0]),
        ("cap", "F32", &[1], vec![2.0]),
        ("width", "I32", &[], vec![2.0]),
    ]
}

type Found = HashMap<String, (String, Vec<usize>, Vec<f64>)>;

/// What `fa run --backward` writes, after `fa check` has agreed.
fn run(folder: &Dir, backend: &str, flags: &[&str]) -> Found {
    let (input, output) = (folder.path("in.safetensors"), folder.path("out.safetensors"));
    write(&input, &tensors(), &[]);
    let mut line = vec!["run", text(&input), "-o", text(&output), "--backward", "--backend", backend];
    line.extend(flags);
    fa_args(&line).good();
    let mut check = vec!["check", text(&output), "--inputs", text(&input)];
    check.extend(flags);
    fa_args(&check).good();
    assert_eq!(metadata(&output).contains_key("program"), flags.iter().any(|flag| flag.ends_with("-mod")));
    read(&output)
}

fn close(what: &str, a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len(), "{what}");
    let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(far < 2e-6, "{what}: {far}");
}

#[test]
fn programs_are_the_flags_that_say_the_same() {
    let folder = Dir::new();
    for (is_built_in, own, named) in [
        (true, vec!["--mask-mod", "k <= q + off"], vec!["--causal"]),
        (false, vec!["--mask-mod", "array last: i32[_]; k < last[q]"], vec!["--causal"]),
        (
            false,
            vec!["--mask-mod", "scalar width: i32; q + off - k <= width", "--causal"],
            vec!["--window", "2,0"],
        ),
        (true, vec!["--mask-mod", "scalar width: i32; 0 <= q + off - k <= width"], vec!["--window", "2,0"]),
        (
            true,
            vec!["--mask-mod", "k <= q + off", "--query-offset", "-1"],
            vec!["--causal", "--query-offset", "-1"],
        ),
        (true, vec!["--score-mod", "scalar cap: f32; cap * tanh(s / cap)"], vec!["--softcap", "2"]),
        (
            false,
            vec!["--score-mod", "array words: bits[_, _]; select(words[q, k], s, -inf)"],
            vec!["--mask-mod", "k != 3 and k != 5"],
        ),
    ] {
        let (own, named) = (run(&folder, "cpu", &own), run(&folder, "cpu", &named));
        for name in ["out", "lse", "dq", "dk", "dv"] {
            close(name, &own[name].2, &named[name].2);
            assert!(!is_built_in || own[name] == named[name], "{name} is that of another computation");
        }
    }
}

#[test]
fn gradients_of_arrays_are_tensors_of_the_output() {
    let folder = Dir::new();
    let flags = [
        "--mask-mod",
        "array keep: bool[_, _]; keep[q, k]",
        "--score-mod",
        "array bias: f32[_, _] grad; array table: bf16[_, _] grad; s + bias[q, k] + table[h, k]",
    ];
    let (found, exact) = (run(&folder, "cpu", &flags), run(&folder, "reference", &flags));
    for (name, shape) in [("dbias", vec![5, 7]), ("dtable", vec![4, 7])] {
        let (dtype, own, values) = &found[name];
        assert_eq!((dtype.as_str(), own), ("F32", &shape), "{name}");
        close(name, values, &exact[name].2);
        assert!(values.iter().any(|value| value.abs() > 0.01), "{name}");
    }
    // A softmax does not change with a row's mean, nor with what is hidden.
    for (row, values) in found["dbias"].2.chunks(7).enumerate() {
        assert!(values.iter().sum::<f64>().abs() < 1e-5, "row {row}");
        for (key, value) in values.iter().enumerate() {
            let at = row * 7 + key;
            assert_eq!(at % 3 == 1 && at % 7 != 0, *value == 0.0, "row {row}, key {key}");
        }
    }
    let total = |name: &str| found[name].2.iter().sum::<f64>();
    assert!((total("dbias") - total("dtable")).abs() < 1e-5);
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    let folder = Dir::new();
    let input = folder.path("in.safetensors");
    write(&input, &tensors(), &[]);
    for (flag, program, parts) in [
        ("--score-mod", "array other: f32[_]; s + other[q]", ["no tensor 'other'", "bias"]),
        ("--score-mod", "array bias: f32[_]; s + bias[q]", ["tensor 'bias' has shape [5, 7]", "1 axes"]),
        ("--score-mod", "array bias: f16[_, _]; s + bias[q, k]", ["tensor 'bias'", "it must hold F16"]),
        ("--score-mod", "scalar bias: f32; s + bias", ["tensor 'bias'", "one element"]),
        ("--score-mod", "array v: f32[_]; s + v[k]", ["`v`", "rename it"]),
        ("--mask-mod", "k <=", ["--mask-mod", "expected"]),
    ] {
        let outcome = fa_args(&["run", text(&input), flag, program]);
        assert_eq!(outcome.code, 2, "{program}: {outcome:?}");
        for part in parts {
            assert!(outcome.stderr.contains(part), "{program}: '{part}' is not in {}", outcome.stderr);
        }
    }
    let both = ["run", text(&input), "--softcap", "2", "--score-mod", "2 * s"];
    refused(&fa_args(&both), &["softcap and a program that changes scores"], "both");
}
