//! `fa run`: golden files, layouts, backends, what is written and how.

use std::path::Path;

use crate::common::{
    Dir, Tensor, fa, fa_args, fa_with, listing, metadata, noise, read, repository, text, write,
};

/// The flags that a golden file's metadata stand for.
fn flags(path: &Path) -> Vec<String> {
    let about = metadata(path);
    let entry = |key: &str| about.get(key).map(String::as_str).filter(|value| *value != "none");
    let mut flags = Vec::new();
    if entry("causal") == Some("true") {
        flags.push("--causal".to_owned());
    }
    let (left, right) = (entry("window_left"), entry("window_right"));
    if left.is_some() || right.is_some() {
        flags.push(format!("--window={},{}", left.unwrap_or("inf"), right.unwrap_or("inf")));
    }
    flags.extend(entry("scale").map(|scale| format!("--scale={scale}")));
    flags.extend(entry("softcap").map(|cap| format!("--softcap={cap}")));
    flags
}

#[test]
fn golden_files_come_out_right_forward_and_backward() {
    let folder = Dir::new();
    let golden = repository("crates/fa-cpu/tests/golden");
    let mut files = 0;
    for name in listing(&golden).iter().filter(|name| name.ends_with(".safetensors")) {
        let input = golden.join(name);
        let flags = flags(&input);
        for backend in ["cpu", "reference"] {
            let output = folder.path(format!("{backend}-{name}"));
            let mut run = vec!["run", text(&input), "-o", text(&output), "--backward", "--backend", backend];
            run.extend(flags.iter().map(String::as_str));
            let ran = fa_args(&run);
            // Flags that say what the metadata says leave nothing to note.
            assert_eq!(ran.stderr, "", "{name}");
            ran.good();
            let mut check = vec!["check", text(&output), text(&input), "--json"];
            check.extend(flags.iter().map(String::as_str));
            let report = fa_args(&check).json();
            assert_eq!(report["rule"], "f64_of_inputs", "{name}");
            assert_eq!(report["rows"].as_array().unwrap().len(), 10, "{name}: five tensors of two files");
        }
        files += 1;
    }
    assert!(files >= 30, "only {files} golden files");
}

#[test]
fn real_layers_agree_with_the_model() {
    for (name, limit) in [("minilm-layer0", 1e-5), ("minilm-layer5", 1e-5), ("minilm-layer0-bf16", 0.07)] {
        let input = repository(&format!("examples/{name}.safetensors"));
        let report = fa_args(&["run", text(&input), "--json"]).json();
        let difference = report["difference_from_own_out"]["max_abs"].as_f64().unwrap();
        assert!(difference < limit, "{name}: {difference}");
        assert_eq!(report["problem"]["seqlen_k"], 169);
        assert_eq!(report["output"], serde_json::Value::Null);
        assert!(report["forward"]["ms"].as_f64().unwrap() > 0.0);
        // What is little work is timed warm too.
        assert!(report["forward_warm"]["ms"].as_f64().unwrap() > 0.0);
    }
}

/// An `out` in the file whose values are not finite is nothing that a result agrees with.
#[test]
fn a_comparison_with_nan_says_so() {
    let folder = Dir::new();
    let shape: &[usize] = &[1, 3, 2, 8];
    let of = |seed| noise(seed, 48);
    let mut some = of(4);
    some[5] = f64::NAN;
    for (out, said) in [
        (vec![f64::NAN; 48], "are nowhere both finite; NaN or infinity in one alone at 48 positions"),
        (some, "NaN or infinity in one alone at 1 position\n"),
    ] {
        let input = folder.path("in.safetensors");
        let tensors = [
            ("q", "F32", shape, of(1)),
            ("k", "F32", shape, of(2)),
            ("v", "F32", shape, of(3)),
            ("out", "F32", shape, out),
        ];
        write(&input, &tensors, &[]);
        let ran = fa_args(&["run", text(&input)]);
        assert!(ran.stdout.contains(said), "{}", ran.stdout);
        assert!(!said.contains("nowhere") || !ran.stdout.contains("cosine"), "{}", ran.stdout);
    }
}

/// q, k, v, dout of a small problem with grouped heads and unequal head dims, as BSHD.
fn small(dtype: &'static str) -> Vec<Tensor<'static>> {
    vec![
        ("q", dtype, &[2, 5, 4, 16], noise(1, 2 * 5 * 4 * 16)),
        ("k", dtype, &[2, 7, 2, 16], noise(2, 2 * 7 * 2 * 16)),
        ("v", dtype, &[2, 7, 2, 8], noise(3, 2 * 7 * 2 * 8)),
        ("dout", dtype, &[2, 5, 4, 8], noise(4, 2 * 5 * 4 * 8)),
    ]
}

/// `[a, b, c, d]` to `[a, c, b, d]`.
fn swapped(values: &[f64], [a, b, c, d]: [usize; 4]) -> Vec<f64> {
    let mut to = Vec::with_capacity(values.len());
    for i in 0..a {
        for k in 0..c {
            for j in 0..b {
                let at = ((i * b + j) * c + k) * d;
                to.extend_from_slice(&values[at..at + d]);
            }
        }
    }
    to
}

#[test]
fn layouts_differ_in_the_order_of_axes_alone() {
    let folder = Dir::new();
    let path = |name: &str| folder.path(name);
    write(&path("bshd"), &small("F32"), &[]);
    let shape = |s: &[usize]| -> [usize; 4] { s.try_into().unwrap() };
    let swapped_shapes: Vec<[usize; 4]> =
        small("F32").iter().map(|(_, _, s, _)| [s[0], s[2], s[1], s[3]]).collect();
    let bhsd: Vec<Tensor> = small("F32")
        .into_iter()
        .zip(&swapped_shapes)
        .map(|((name, dtype, s, values), to)| (name, dtype, to.as_slice(), swapped(&values, shape(s))))
        .collect();
    write(&path("bhsd"), &bhsd, &[]);
    write(&path("bhsd-by-metadata"), &bhsd, &[("layout", "bhsd")]);
    let run = |input: &str, flags: &str| {
        let output = format!("{}-out", text(&path(input)));
        fa(&format!(
            "run {} -o {output} --causal --backward --backend reference {flags}",
            text(&path(input))
        ))
        .good();
        read(Path::new(&output))
    };
    let expected = run("bshd", "");
    for (input, flags) in [("bhsd", "--layout bhsd"), ("bhsd-by-metadata", "")] {
        let got = run(input, flags);
        assert_eq!(got["lse"], expected["lse"], "{input}");
        for name in ["out", "dq", "dk", "dv"] {
            let (dtype, s, values) = &expected[name];
            let want = (dtype.clone(), vec![s[0], s[2], s[1], s[3]], swapped(values, shape(s)));
            assert_eq!(got[name], want, "{input} {name}");
        }
    }
    // The flag has the last word: read as BSHD, the heads of k and v fit no more.
    let wrong = fa(&format!("run {} --layout bshd", text(&path("bhsd-by-metadata"))));
    assert_eq!(wrong.code, 2, "{}", wrong.stderr);
}

#[test]
fn every_dtype_backend_and_instruction_set_agrees() {
    let folder = Dir::new();
    for dtype in ["F32", "F16", "BF16"] {
        let input = folder.path(dtype);
        write(&input, &small(dtype), &[]);
        for flags in ["--backend cpu", "--backend cpu --threads 1", "--threads 3", "--isa portable", ""] {
            let output = folder.path("out");
            let line = format!("run {} --backward --window 2,1 {flags} -o {}", text(&input), text(&output));
            fa(&line).good();
            let got = read(&output);
            assert_eq!(got["out"].0, dtype, "{line}");
            assert_eq!((got["lse"].0.as_str(), &got["lse"].1), ("F32", &vec![2, 4, 5]), "{line}");
            assert_eq!(got.len(), 5, "{line}");
            let check =
                format!("check {} {1} --inputs {1} --window 2,1 --tensor out", text(&output), text(&input));
            // The input has no output of its own to compare with.
            assert_eq!(fa(&check).code, 2);
            let check = format!("check {0} {0} --inputs {1} --window 2,1", text(&output), text(&input));
            fa(&check).good();
        }
    }
}

#[test]
fn equal_runs_write_equal_files_and_nothing_else() {
    let folder = Dir::new();
    let (input, output) = (folder.path("in"), folder.path("out"));
    write(&input, &small("BF16"), &[]);
    let run = || {
        fa(&format!("run {} --causal --backward --threads 2 -o {}", text(&input), text(&output))).good();
        std::fs::read(&output).unwrap()
    };
    let first = run();
    assert_eq!(first, run());
    assert_eq!(folder.listing(), ["in", "out"]);
    let about = metadata(&output);
    for (key, value) in [("layout", "bshd"), ("causal", "true"), ("window_right", "0"), ("softcap", "none")] {
        assert_eq!(about[key], value, "{key}");
    }
}

#[test]
fn rows_that_see_nothing_are_zero_and_empty_problems_are_fine() {
    let folder = Dir::new();
    let (input, output) = (folder.path("in"), folder.path("out"));
    let tensors: Vec<Tensor> = vec![
        ("q", "F16", &[1, 6, 1, 8], noise(1, 48)),
        ("k", "F16", &[1, 2, 1, 8], noise(2, 16)),
        ("v", "F16", &[1, 2, 1, 8], noise(3, 16)),
    ];
    write(&input, &tensors, &[]);
    fa(&format!("run {} --causal -o {}", text(&input), text(&output))).good();
    let got = read(&output);
    assert!(got["out"].2[..32].iter().all(|&value| value == 0.0));
    assert!(got["lse"].2[..4].iter().all(|&value| value == f64::NEG_INFINITY));
    assert!(got["lse"].2[4..].iter().all(|value| value.is_finite()));

    let empty: Vec<Tensor> = vec![
        ("q", "F32", &[0, 6, 1, 8], vec![]),
        ("k", "F32", &[0, 2, 1, 8], vec![]),
        ("v", "F32", &[0, 2, 1, 8], vec![]),
    ];
    write(&input, &empty, &[]);
    fa(&format!("run {} -o {}", text(&input), text(&output))).good();
    assert_eq!(read(&output)["out"].1, [0, 6, 1, 8]);
}

#[test]
fn a_forgotten_flag_is_noted() {
    let input = repository("crates/fa-cpu/tests/golden/causal_f32.safetensors");
    let ran = fa_args(&["run", text(&input)]);
    assert!(ran.stderr.contains("causal = true (--causal)"), "{}", ran.stderr);
    ran.good();
}

/// A name that is nearly right, or of what other libraries take, would give a plausible wrong answer.
#[test]
fn tensors_that_are_not_read_are_noted() {
    let folder = Dir::new();
    let of = |name: &'static str, shape: &'static [usize]| -> Tensor<'static> {
        (name, "F32", shape, noise(3, shape.iter().product()))
    };
    let qkv = || [of("q", &[1, 4, 2, 8]), of("k", &[1, 6, 2, 8]), of("v", &[1, 6, 2, 8])];
    let run = |name: &str, more: &[Tensor<'static>]| {
        let tensors: Vec<Tensor> = qkv().into_iter().chain(more.iter().cloned()).collect();
        let ran = fa_args(&["run", &folder.write(name, &tensors), "--json"]);
        let stderr = ran.stderr.clone();
        ran.json();
        stderr
    };
    assert_eq!(run("plain", &[]), "");
    let results = ["lse", "dout", "dq", "dk", "dv", "dsinks"].map(|name| of(name, &[2]));
    assert_eq!(run("results", &results), "");
    let said = run("others", &[of("bias", &[4, 6]), of("cu_seqlen_q", &[2]), of("sinks", &[2])]);
    assert!(said.contains("not read: bias, cu_seqlen_q (") && said.lines().count() == 1, "{said}");
    let said = run("other out", &[of("out", &[1, 4, 2, 9])]);
    assert!(said.contains("'out' has shape [1, 4, 2, 9], the output [1, 4, 2, 8]"), "{said}");
    assert_eq!(run("own out", &[of("out", &[1, 4, 2, 8])]), "");
}

#[test]
fn verbose_traces_go_to_standard_error() {
    let input = repository("examples/minilm-layer0.safetensors");
    let quiet = fa_args(&["run", text(&input), "--json"]);
    assert_eq!(quiet.stderr, "");
    let loud = fa_args(&["-vv", "run", text(&input), "--json"]);
    assert!(!loud.stderr.contains('\u{1b}'), "colours where no terminal is: {}", loud.stderr);
    assert!(loud.stderr.contains("opened") && loud.stderr.contains("tiled forward"), "{}", loud.stderr);
    loud.json();
}

/// The program is there at once: of some runs, since the machine may be busy, the fastest.
#[test]
fn a_small_problem_is_done_within_the_blink_of_an_eye() {
    let limit = std::time::Duration::from_millis(if cfg!(debug_assertions) { 40 } else { 20 });
    let input = repository("examples/minilm-layer0.safetensors");
    let mut fastest = std::time::Duration::MAX;
    // On a busy machine most runs wait for a core, and one of many does not.
    let began = std::time::Instant::now();
    while began.elapsed() < std::time::Duration::from_secs(60) {
        let start = std::time::Instant::now();
        fa_args(&["run", text(&input)]).good();
        fastest = fastest.min(start.elapsed());
        if fastest < limit {
            return;
        }
    }
    panic!("the fastest run of a minute took {fastest:?}");
}

/// A pool of thousands of threads takes half a minute to start; no more are made than are of use.
#[test]
fn thousands_of_threads_are_not_made() {
    let folder = Dir::new();
    let input = folder.path("in");
    write(&input, &small("F32"), &[]);
    let cores = std::thread::available_parallelism().unwrap().get();
    for backend in ["cpu", "reference"] {
        let args = ["run", text(&input), "--backend", backend, "--json"];
        let asked = fa_args(&[&args[..], &["--threads", "4096"]].concat());
        assert!(asked.code == 2 && asked.stderr.contains("use 1 to "), "{backend}: {asked:?}");
        let report = fa_with(&args, &[("RAYON_NUM_THREADS", "5000")]).json();
        let threads = report["threads"].as_u64().unwrap() as usize;
        assert!(threads <= 64.max(4 * cores), "{backend}: {threads} threads");
    }
}

#[test]
fn what_ran_is_named_and_no_plan_for_another_machine() {
    let folder = Dir::new();
    let input = folder.path("in");
    write(&input, &small("F32"), &[]);
    for (flags, line) in [
        ("--backend cpu --isa portable --threads 2", "cpu, portable, 2 threads, tiles of "),
        ("--backend reference --threads 1", "reference, 1 thread\n"),
        // f32 is computed on the CPU whether or not there is a GPU.
        ("--threads 1 --backward", "cpu, "),
    ] {
        let report = fa(&format!("run {} --json {flags}", text(&input))).json();
        let fields: Vec<&String> = report.as_object().unwrap().keys().collect();
        assert!(!fields.iter().any(|field| field.contains("gpu") || field.contains("kernel")), "{fields:?}");
        assert_eq!(report["backend"], line.split(',').next().unwrap(), "{flags}");
        assert_eq!(report["cpu_plan"].is_object(), line.starts_with("cpu"), "{flags}");
        assert_eq!(report["backward"].is_object(), flags.contains("--backward"), "{flags}");
        let said = fa(&format!("run {} {flags}", text(&input))).good();
        assert!(said.contains(&format!("backend   {line}")), "{flags}: {said}");
        assert!(!said.contains("gpu plan") && !said.contains("sm90"), "{flags}: {said}");
    }
}

/// A program that is told to stop ends by that signal and leaves nothing behind; what is ignored, as under
/// `nohup`, stays ignored.
#[cfg(unix)]
#[test]
fn a_stopped_program_ends_by_its_signal() {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};
    let files = Dir::new();
    let report = files.file("bench.json");
    let line = format!("bench --backend cpu --headdim 32 --seqlen 64 --heads 1 --seconds 60 --json {report}");
    let arguments: Vec<&str> = line.split(' ').collect();
    let tell = |program: &Child, signal: &str| {
        let kill = format!("kill -{signal} {}", program.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    };
    let mut program = crate::common::command(&arguments).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(program.try_wait().unwrap().is_none(), "it runs");
    let told = Instant::now();
    tell(&program, "TERM");
    assert_eq!(program.wait().unwrap().signal(), Some(15));
    assert!(told.elapsed() < Duration::from_secs(20), "{:?}", told.elapsed());
    assert!(files.listing().is_empty(), "{:?}", files.listing());
    let program = crate::common::command(&arguments);
    let ignoring = format!("trap '' HUP; exec {} {line}", text(Path::new(program.get_program())));
    let mut program = Command::new("sh").args(["-c", &ignoring]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    tell(&program, "HUP");
    std::thread::sleep(Duration::from_millis(200));
    assert!(program.try_wait().unwrap().is_none(), "who ignores HUP goes on");
    program.kill().unwrap();
    program.wait().unwrap();
}
