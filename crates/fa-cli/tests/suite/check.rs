//! `fa check`: verdicts and their exit codes.

use fa_core::{Dtype, Lengths, Mask, Problem, TensorLayout};
use fa_cpu::compare::compare;
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{Extras, TensorRef};
use half::bf16;

use crate::common::{Dir, Tensor, fa, noise, refused, repository, text};

const SHAPE: &[usize] = &[1, 3, 2, 4];

fn out(dtype: &'static str, values: Vec<f64>) -> Tensor<'static> {
    ("out", dtype, SHAPE, values)
}

#[test]
fn differences_are_judged_by_the_rounding_of_the_type() {
    let files = Dir::new();
    let base = noise(3, 24);
    let shifted = |by: f64| {
        let mut values = base.clone();
        values[13] += by;
        values
    };
    // (type of A, type of B, difference of one element, equal)
    for (index, (a, b, by, equal)) in [
        ("F32", "F32", 0.0, true),
        ("F32", "F32", 1e-6, true),
        ("F32", "F32", 1e-4, false),
        ("F64", "F32", 1e-6, true),
        ("BF16", "BF16", 0.004, true),
        ("BF16", "BF16", 0.1, false),
        ("F16", "BF16", 0.004, true),
        ("F16", "F16", 0.02, false),
    ]
    .into_iter()
    .enumerate()
    {
        let a = files.write(&format!("{index}a"), &[out(a, shifted(by))]);
        let b = files.write(&format!("{index}b"), &[out(b, base.clone())]);
        let outcome = fa(&format!("check {a} {b} --json"));
        assert_eq!(outcome.code, i32::from(!equal), "case {index}: {}", outcome.stdout);
        let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(report["passed"], equal);
        assert_eq!(report["rule"], "rounding_of_type");
        if !equal {
            // Element 13 of [1, 3, 2, 4].
            assert_eq!(report["rows"][0]["worst"], serde_json::json!([0, 1, 1, 1]), "case {index}");
        }
    }
}

#[test]
fn tolerances_given_replace_the_rule() {
    let files = Dir::new();
    let a = files.write("a", &[out("F32", vec![100.5; 24])]);
    let b = files.write("b", &[out("F32", vec![100.0; 24])]);
    for (flags, code) in [
        ("--atol 0.4", 1),
        ("--atol 0.5", 0),
        ("--rtol 0.004", 1),
        ("--rtol 0.005", 0),
        ("--atol 0.1 --rtol 0.004", 0),
        ("--atol 0", 1),
    ] {
        let outcome = fa(&format!("check {a} {b} {flags}"));
        assert_eq!(outcome.code, code, "{flags}: {}", outcome.stdout);
        let verdict = if code == 0 { "equal within tolerance" } else { "DIFFERENT" };
        assert!(outcome.stdout.contains(verdict), "{flags}: {}", outcome.stdout);
    }
}

/// The largest difference is within its tolerance, a smaller one is not.
#[test]
fn the_element_that_is_beyond_its_tolerance_is_shown() {
    let files = Dir::new();
    let (mut large, mut base) = (vec![1.0; 24], vec![1.0; 24]);
    (base[3], large[3]) = (1000.0, 1000.5);
    (base[13], large[13]) = (1.0, 1.01);
    for (name, layout) in [("out", [0, 1, 1, 1]), ("lse", [0, 1, 1, 0])] {
        let shape: &[usize] = if name == "lse" { &[1, 2, 12] } else { &[1, 3, 2, 4] };
        let a = files.write(&format!("{name}-a"), &[(name, "F32", shape, large.clone())]);
        let b = files.write(&format!("{name}-b"), &[(name, "F32", shape, base.clone())]);
        let outcome = fa(&format!("check {a} {b} --rtol 0.001 --json"));
        let report: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
        let row = &report["rows"][0];
        assert_eq!((outcome.code, &row["worst"]), (1, &serde_json::json!(layout)), "{row}");
        assert!(row["max_abs"].as_f64() > row["tolerance"].as_f64(), "{row}");
        assert_eq!(fa(&format!("check {a} {b} --rtol 0.02")).code, 0, "{name}");
    }
}

#[test]
fn infinities_and_nan_must_be_at_the_same_places() {
    let files = Dir::new();
    let with = |at: usize, value: f64| {
        let mut values = noise(5, 24);
        values[at] = value;
        values
    };
    let nan = files.write("nan", &[out("F32", with(5, f64::NAN))]);
    let nan_too = files.write("nan-too", &[out("F32", with(5, f64::NAN))]);
    let elsewhere = files.write("elsewhere", &[out("F32", with(6, f64::NAN))]);
    let infinite = files.write("infinite", &[out("F32", with(5, f64::INFINITY))]);
    fa(&format!("check {nan} {nan_too}")).good();
    for other in [&elsewhere, &infinite] {
        for flags in ["", "--atol 1000"] {
            let outcome = fa(&format!("check {nan} {other} {flags}"));
            assert_eq!(outcome.code, 1, "{other} {flags}: {}", outcome.stdout);
            assert!(outcome.stdout.contains("NaN/inf differ"), "{}", outcome.stdout);
        }
    }
}

#[test]
fn inputs_show_which_of_two_outputs_is_wrong() {
    let files = Dir::new();
    let input: Vec<Tensor> = vec![
        ("q", "BF16", &[1, 9, 2, 16], noise(1, 9 * 32)),
        ("k", "BF16", &[1, 9, 1, 16], noise(2, 9 * 16)),
        ("v", "BF16", &[1, 9, 1, 16], noise(3, 9 * 16)),
    ];
    let input = files.write("in", &input);
    let (good, causal) = (files.path("good"), files.path("causal"));
    fa(&format!("run {input} -o {}", text(&good))).good();
    fa(&format!("run {input} --causal -o {}", text(&causal))).good();
    let check = |flags: &str| {
        let outcome = fa(&format!("check {} {} --inputs {input} {flags} --json", text(&good), text(&causal)));
        assert_eq!(outcome.code, 1, "{}", outcome.stderr);
        let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        let verdict = |row: usize| report["rows"][row]["verdict"].as_str().unwrap().to_owned();
        (report["rows"][0]["compared"].as_str().unwrap().to_owned(), verdict(0), verdict(1))
    };
    assert_eq!(check(""), ("A to f64".into(), "pass".into(), "too_far".into()));
    assert_eq!(check("--causal"), ("A to f64".into(), "too_far".into(), "pass".into()));
    // Which of the two is off is said.
    let (good_path, causal_path) = (text(&good), text(&causal));
    for (line, said, off) in [
        (format!("{good_path} {causal_path}"), "B is off", serde_json::json!(["b"])),
        (format!("{causal_path} {good_path}"), "A is off", serde_json::json!(["a"])),
        (format!("{causal_path} {causal_path}"), "both are off", serde_json::json!(["a", "b"])),
    ] {
        let verdict = fa(&format!("check {line} --inputs {input}"));
        assert!(verdict.stdout.contains(said), "{line}: {}", verdict.stdout);
        let report = fa(&format!("check {line} --inputs {input} --json"));
        let report: serde_json::Value = serde_json::from_str(&report.stdout).unwrap();
        assert_eq!(report["off"], off, "{line}");
    }
    // Named alone, the inputs' flags come with a note when the output's metadata says otherwise.
    fa(&format!("check {0} {0} --inputs {input}", text(&good))).good();
}

#[test]
fn one_output_is_judged_by_its_inputs_alone() {
    let files = Dir::new();
    let input = write_inputs(&files, "in", 9);
    let output = files.file("out");
    fa(&format!("run {input} -o {output}")).good();
    let right = fa(&format!("check {output} --inputs {input} --json")).json();
    assert_eq!((&right["passed"], right.get("b")), (&true.into(), None), "{right}");
    let compared: Vec<_> = right["rows"].as_array().unwrap().iter().map(|row| &row["compared"]).collect();
    assert_eq!(compared, ["A to f64", "A to f64"]);
    let wrong = fa(&format!("check {output} --inputs {input} --causal"));
    assert!(wrong.code == 1 && wrong.stdout.ends_with(&format!("A is off, {output}\n")), "{wrong:?}");
    // A file that holds q, k and v beside its output needs no other.
    let own = text(&repository("examples/minilm-layer0.safetensors")).to_owned();
    assert!(fa(&format!("check {own}")).good().contains("equal within tolerance"));
}

/// Gradients are held to the worst of three low-precision computations, as everywhere: dQ of a forward that
/// rounded its probabilities elsewhere is right, though it is beyond the tolerance of the first.
#[test]
fn gradients_are_judged_by_the_worst_of_three() {
    let lengths = Lengths::uniform(1, 5, 40);
    let square = Problem::square(1, 5, 2, 8, Mask::FULL, Dtype::Bf16);
    let problem = square.with_lengths(lengths).with_softmax_scale(Some(8.0));
    let shapes: [[usize; 4]; 4] = [[1, 5, 2, 8], [1, 40, 2, 8], [1, 40, 2, 8], [1, 5, 2, 8]];
    let names = ["q", "k", "v", "dout"];
    let (inputs, dq) = (0..400)
        .find_map(|seed| {
            let values: Vec<Vec<bf16>> = (0..4)
                .map(|i| {
                    let noise = noise(4 * seed + i, shapes[i as usize].iter().product());
                    noise.into_iter().map(|value| bf16::from_f64(2.0 * value)).collect()
                })
                .collect();
            let view = |i: usize| {
                TensorRef::packed(names[i], &values[i], shapes[i], TensorLayout::Bshd).expect("the shape's")
            };
            let (q, k, v, dout) = (view(0), view(1), view(2), view(3));
            let exact = reference::backward(&problem, &q, &k, &v, &dout).unwrap();
            let first = low_precision::backward(&problem, &q, &k, &v, &dout).unwrap();
            let held = low_precision::HELD_AT[1];
            let other = low_precision::backward_held_at(&problem, &q, &k, &v, &dout, held).unwrap();
            let worst =
                low_precision::backward_worst(&problem, &Extras::NONE, &q, &k, &v, &dout, &exact).unwrap();
            let passes = |low: &[bf16]| {
                let found = compare(shapes[0], Dtype::Bf16, &other.dq, &exact.dq, Some(low)).unwrap();
                found.allowing(exact.dq_noise).passed()
            };
            assert!(passes(&worst.dq), "of itself, three times the error");
            (!passes(&first.dq)).then(|| (values.clone(), other.dq))
        })
        .expect("one in ten of steep problems is such a one");
    let widen = |values: &[bf16]| values.iter().map(|value| value.to_f64()).collect::<Vec<f64>>();
    let files = Dir::new();
    let tensor = |i: usize| -> Tensor { (names[i], "BF16", &shapes[i], widen(&inputs[i])) };
    let input = files.write("in", &[tensor(0), tensor(1), tensor(2), tensor(3)]);
    let mut dq = widen(&dq);
    let right = files.write("right", &[("dq", "BF16", &shapes[0], dq.clone())]);
    let report = fa(&format!("check {right} {right} --inputs {input} --scale 8 --json")).json();
    assert_eq!(report["passed"], true, "{report}");
    dq[7] += 4.0;
    let wrong = files.write("wrong", &[("dq", "BF16", &shapes[0], dq)]);
    let verdict = fa(&format!("check {wrong} {right} --inputs {input} --scale 8"));
    assert!(verdict.code == 1 && verdict.stdout.contains("A is off"), "{}", verdict.stdout);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let files = Dir::new();
    let a = files.write("a", &[out("F32", noise(1, 24))]);
    let other_shape = files.write("b", &[("out", "F32", &[1, 2, 3, 4], noise(1, 24))]);
    let lse = files.write("c", &[("lse", "F32", &[24], noise(1, 24))]);
    let integers = files.write("d", &[("out", "I64", SHAPE, noise(1, 24))]);
    let named = files.write("e", &[("weights", "F32", SHAPE, noise(1, 24))]);
    let empty = files.write("g", &[]);
    let given = files.write("f", &["q", "k", "v"].map(|name| (name, "F32", SHAPE, noise(1, 24))));
    for (line, part) in [
        (format!("{a} {other_shape}"), "'out' has shape [1, 3, 2, 4]"),
        (format!("{a} {lse}"), "in common"),
        (format!("{lse} {lse}"), "lse must be [batch, heads, seqlen_q]"),
        (format!("{a} {integers}"), "holds I64"),
        (format!("{a} {named}"), "--tensor"),
        (format!("{a} {given}"), "and no B"),
        (format!("{empty} {a}"), "A has none; B has out"),
        (format!("{a} {named} --tensor weights"), "no tensor 'weights'"),
        (format!("{a} {a} --inputs {a}"), "no tensor 'q'"),
        (format!("{a} {a} --causal"), "give --inputs"),
        (format!("{a} {a} --atol 1 --scale 2"), "give --inputs"),
        (format!("{a} {a} --rotary-interleaved"), "give --inputs"),
        (format!("{a} {a} --out-dtype f16"), "give --inputs"),
        (a.clone(), "give --inputs FILE with q, k and v, or a second output"),
        (format!("{a} --atol 1"), "give --inputs FILE with q, k and v, or a second output"),
        (format!("{named} --inputs {given}"), "it has weights"),
    ] {
        refused(&fa(&format!("check {line}")), &[part], &line);
    }
    fa(&format!("check {named} {named} --tensor weights")).good();
}

/// q, k and v of a problem with so many queries and keys.
fn inputs(seqlen: usize) -> Vec<(String, Vec<usize>, Vec<f64>)> {
    let tensor = |name: &str, seed| (name.to_owned(), vec![1, seqlen, 2, 8], noise(seed, seqlen * 16));
    vec![tensor("q", 1), tensor("k", 2), tensor("v", 3)]
}

fn write_inputs(files: &Dir, name: &str, seqlen: usize) -> String {
    let tensors = inputs(seqlen);
    let tensors: Vec<Tensor> = tensors
        .iter()
        .map(|(name, shape, values)| (name.as_str(), "F32", &shape[..], values.clone()))
        .collect();
    files.write(name, &tensors)
}

#[test]
fn what_an_output_was_computed_with_is_named_where_flags_say_otherwise() {
    let files = Dir::new();
    let input = write_inputs(&files, "in", 9);
    // (flags of the run, what a check without them notes)
    for (flags, notes) in [
        ("--causal", "causal = true (--causal)"),
        ("--window 2,1", "window_left = 2 (--window), window_right = 1 (--window)"),
        ("--window 2,0", "causal = true (--causal), window_left = 2 (--window)"),
        ("--scale 0.5", "scale = 0.5 (--scale)"),
        ("--softcap 3", "softcap = 3 (--softcap)"),
        ("--layout bhsd", "layout = bhsd (--layout)"),
    ] {
        let output = files.file("out");
        fa(&format!("run {input} {flags} -o {output}")).good();
        // An output's own layout is taken where no flag speaks.
        let input =
            if flags.starts_with("--layout") { format!("{input} --layout bshd") } else { input.clone() };
        for pair in [
            format!("{output} {output} --inputs {input}"),
            format!("{output} {output} --inputs {input} --json"),
        ] {
            let forgotten = fa(&format!("check {pair}"));
            // With its axes in another order the output has another shape.
            let code = if flags.starts_with("--layout") { 2 } else { 1 };
            assert_eq!(forgotten.code, code, "{flags}: {forgotten:?}");
            let said = format!("the metadata of {output} says {notes}; only flags decide");
            assert_eq!(forgotten.stderr.matches(&said).count(), 1, "{flags}: {}", forgotten.stderr);
            let right = fa(&format!("check {} {flags}", pair.replace(" --layout bshd", "")));
            assert_eq!((right.code, right.stderr.as_str()), (0, ""), "{flags}");
        }
    }
    // And the other way round: flags that the output was not computed with.
    let output = files.file("plain");
    fa(&format!("run {input} -o {output}")).good();
    for (flags, notes) in [
        ("--causal", "causal = false (--causal)"),
        ("--window 2,1", "window_left = none (--window), window_right = none (--window)"),
        ("--softcap 3", "softcap = none (--softcap)"),
    ] {
        let wrong = fa(&format!("check {output} {output} --inputs {input} {flags}"));
        assert!(wrong.code == 1 && wrong.stderr.contains(notes), "{flags}: {wrong:?}");
    }
}

#[test]
fn inputs_of_another_shape_are_named_with_the_tensor_and_the_shapes() {
    let files = Dir::new();
    let (input, other) = (write_inputs(&files, "in", 9), write_inputs(&files, "other", 7));
    let output = files.file("out");
    fa(&format!("run {input} -o {output}")).good();
    for (tensor, shapes) in [
        ("out", ["tensor 'out' has shape [1, 9, 2, 8]", "give [1, 7, 2, 8]"]),
        ("lse", ["tensor 'lse' has shape [1, 2, 9]", "give [1, 2, 7]"]),
    ] {
        let refused = fa(&format!("check {output} {output} --inputs {other} --tensor {tensor}"));
        assert_eq!(refused.code, 2, "{refused:?}");
        for part in shapes.into_iter().chain([output.as_str(), other.as_str()]) {
            assert!(refused.stderr.contains(part), "'{part}' is not in {}", refused.stderr);
        }
    }
}

/// A file of holes claims more than there is memory; the system would end the program, not tell it.
#[cfg(target_os = "linux")]
#[test]
fn tensors_beyond_memory_are_refused() {
    let files = Dir::new();
    let path = files.path("holes");
    let bytes = 1u64 << 42;
    let header = format!(r#"{{"out":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{bytes}]}}}}"#, bytes / 4);
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    std::fs::write(&path, &start).unwrap();
    // Not every file system makes files so long.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    if file.set_len(start.len() as u64 + bytes).is_err() {
        return;
    }
    let file = files.file("holes");
    refused(&fa(&format!("check {file} {file}")), &["the tensors as f64 take 17.6 TB"], "holes");
}
