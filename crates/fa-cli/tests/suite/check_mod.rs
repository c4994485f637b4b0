//! `fa check-mod`: what a program is, as text, as JSON and as a header.

use crate::common::{Dir, fa_args, text, write};

#[test]
fn masks_and_scores_are_described() {
    let text = fa_args(&["check-mod", "k <= q + off and q + off - k < 512", "--seqlen", "1000x2048"]).good();
    for line in [
        "depends on  b, q, k",
        "tiles       81 empty, 30 partial, 17 full (128x128 of 1000x2048)",
        "query 0     537..1049",
        "query 999   1536..2048",
    ] {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
    let program = "array t: bf16[_, _] grad; scalar c: f32; score = c * tanh(s / c) + t[h, q - k]";
    let json = fa_args(&["check-mod", program, "--json"]).json();
    assert_eq!(json["score"]["class"], "general");
    assert_eq!(json["score"]["slope"], "1.0 - tanh(s / c) * tanh(s / c)");
    assert_eq!(json["score"]["gradients"][0]["form"], "diagonal");
    assert_eq!(json["score"]["gradients"][0]["slope"], "1.0");
    assert!(json.get("mask").is_none());
    let header = fa_args(&["check-mod", program, "--header"]).good();
    assert!(header.contains("struct Mods {") && header.contains("load_bf16(params.arrays[0]"), "{header}");
    // Whatever a scalar is, and as it is given.
    let unknown = fa_args(&["check-mod", "scalar w: i32; abs(q - k) <= w", "--json"]).json();
    assert_eq!(unknown["mask"]["tiles"]["partial"], 32 * 32);
    let known = ["check-mod", "scalar w: i32; abs(q - k) <= w", "--scalar", "w=127", "--json"];
    let known = fa_args(&known).json();
    assert_eq!(known["mask"]["tiles"]["empty"], 32 * 32 - 32 - 2 * 31);
    assert_eq!(known["mask"]["intervals"][1]["keys"][0][0], 2048 - 127);
}

#[test]
fn a_program_may_begin_with_a_sign() {
    let says = |line: &[&str], part: &str| {
        let said = fa_args(line).good();
        assert!(said.contains(part), "{line:?}: {said}");
    };
    says(&["check-mod", "-k <= q", "--seqlen", "64"], "mask = -k <= q;");
    says(&["check-mod", "--seqlen", "64", "-s * 0.5"], "score = -s * 0.5;");
    says(&["plan", "--seqlen", "128", "--mask-mod", "-k <= q", "--score-mod", "-s + h", "-n", "1"], "best ");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/sinks-window.safetensors");
    says(&["run", file, "--score-mod", "-s", "--mask-mod", "-k <= -q", "--backend", "cpu"], "backend   cpu");
}

#[test]
fn arrays_are_tensors_of_a_file_or_drawn_and_what_is_built_in_is_said() {
    let folder = Dir::new();
    let file = folder.path("documents.safetensors");
    let ids = (0..300).map(|at| f64::from(u8::from(at >= 100) + u8::from(at >= 160))).collect();
    write(&file, &[("id", "I32", &[300], ids), ("w", "I32", &[1], vec![40.0])], &[]);
    let program = "array id: i32[_]; scalar w: i32; mask = id[q] == id[k] and q - k < w;";
    let line = ["check-mod", program, "--seqlen", "300", "--tile", "50", "--json"];
    let with = |more: &[&str]| fa_args(&[&line, more].concat()).json();
    let given = with(&["--inputs", text(&file)]);
    assert_eq!(given["mask"]["intervals"][1]["keys"][0], serde_json::json!([111, 160]));
    let wide = with(&["--inputs", text(&file), "--scalar", "w=300"]);
    assert_eq!(wide["mask"]["intervals"][1]["keys"][0], serde_json::json!([100, 160]));
    assert_eq!([&wide["mask"]["tiles"]["empty"], &wide["mask"]["tiles"]["full"]], [20, 9]);
    assert_eq!(with(&[])["mask"]["tiles"]["partial"], 36);
    assert_eq!(with(&["--draw", "1"])["mask"]["tiles"]["full"], 0);
    let line = ["check-mod", "mask = k <= q; score = 20 * tanh(s / 20.0);", "--seqlen", "40x30"];
    let shown = fa_args(&line).good();
    assert!(shown.contains("built in    causal") && shown.contains("built in    soft cap of 20"), "{shown}");
    let outcome = fa_args(&["check-mod", "array x: i32[_]; x[q] == k", "--inputs", text(&file)]);
    assert_eq!(outcome.code, 2);
    assert!(outcome.stderr.contains("'x'"), "{}", outcome.stderr);
    for flags in [["--inputs", text(&file)], ["--draw", "1"]] {
        let outcome = fa_args(&[&["check-mod", "k <= q"], &flags[..]].concat());
        let says = format!("{}: the program reads no arrays", flags[0]);
        assert!(outcome.code == 2 && outcome.stderr.contains(&says), "{}", outcome.stderr);
    }
}

#[test]
fn what_is_no_program_is_refused() {
    for (program, rest, part) in [
        ("k <= qq", vec![], "unknown name `qq`"),
        ("k <= q", vec!["--scalar", "w=1"], "the program has no such scalar; it has none"),
        ("scalar w: i32; k // w == 0", vec!["--scalar", "w=0"], "it divides, and has to be positive"),
        ("scalar w: i32; k == w", vec!["--scalar", "w=x"], "this is no i32"),
        ("scalar w: i32; k == w", vec!["--scalar", "w=1", "--scalar", "w=2"], "w has a value already"),
        ("k <= q", vec!["--seqlen", "100000000", "--tile", "1"], "use a larger --tile"),
        ("k <= q", vec!["--tile", "0"], "lengths are 1 to 2^31 - 1"),
        ("k <= q", vec!["--header", "--json"], "cannot be used with"),
    ] {
        let args: Vec<_> = ["check-mod", program].into_iter().chain(rest).collect();
        let outcome = fa_args(&args);
        assert_eq!(outcome.code, 2, "{program}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(part), "{program}: {}", outcome.stderr);
    }
}
