//! Bad input: one line that names the fault, exit code 2, and no file left behind.

use std::io::Read;
use std::path::Path;
use std::process::Stdio;

use crate::common::{
    Dir, Tensor, command, fa, fa_args, fa_with, noise, refused, refuses, repository, text, write,
};

const Q: &[usize] = &[1, 4, 2, 8];
const KV: &[usize] = &[1, 6, 2, 8];

fn tensor<'a>(name: &'a str, dtype: &'a str, shape: &'a [usize]) -> Tensor<'a> {
    (name, dtype, shape, noise(7, shape.iter().product()))
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let good = || vec![tensor("q", "F32", Q), tensor("k", "F32", KV), tensor("v", "F32", KV)];
    let with = |other: Tensor<'static>| -> Vec<Tensor<'static>> {
        let mut tensors = good();
        match tensors.iter_mut().find(|tensor| tensor.0 == other.0) {
            Some(tensor) => *tensor = other,
            None => tensors.push(other),
        }
        tensors
    };
    let without = |name: &str| good().into_iter().filter(|tensor| tensor.0 != name).collect::<Vec<_>>();
    let cases: Vec<(Vec<Tensor>, &str, &[&str])> = vec![
        (without("q"), "", &["no tensor 'q'", "it has k, v"]),
        (without("v"), "", &["no tensor 'v'"]),
        (vec![], "", &["no tensor 'q'", "it has none"]),
        (good(), "--backward", &["no tensor 'dout'"]),
        (with(tensor("q", "F32", &[4, 2, 8])), "", &["'q'", "[4, 2, 8]", "rank is 3"]),
        (with(tensor("k", "F32", &[1, 1, 6, 2, 8])), "", &["'k'", "rank is 5"]),
        (with(tensor("v", "F32", &[])), "", &["'v'", "rank is 0"]),
        (with(tensor("k", "F32", &[2, 6, 2, 8])), "", &["'k'", "batch and head_dim must be q's"]),
        (with(tensor("k", "F32", &[1, 6, 2, 16])), "", &["'k'", "[1, 6, 2, 16]"]),
        (with(tensor("v", "F32", &[1, 5, 2, 8])), "", &["'v'", "seqlen and heads must be k's"]),
        (with(tensor("dout", "F32", KV)), "--backward", &["'dout'", "shape of the output"]),
        (with(tensor("k", "F16", KV)), "", &["'k' holds F16", "q holds F32"]),
        (with(tensor("v", "BF16", KV)), "", &["'v' holds BF16"]),
        (with(tensor("dout", "F64", Q)), "--backward", &["'dout' holds F64"]),
        (with(tensor("q", "F64", Q)), "", &["'q' holds F64", "F32, F16, BF16 and F8_E4M3"]),
        (with(tensor("q", "I64", Q)), "", &["'q' holds I64"]),
        (with(tensor("q", "F32", &[1, 4, 3, 8])), "", &["heads_q = 3", "heads_kv = 2"]),
        (with(tensor("q", "F32", &[1, 4, 0, 8])), "", &["heads_q is 0"]),
        (
            vec![
                tensor("q", "F32", &[1, 4, 2, 0]),
                tensor("k", "F32", &[1, 6, 2, 0]),
                tensor("v", "F32", KV),
            ],
            "",
            &["head_dim is 0"],
        ),
        (with(tensor("v", "F32", &[1, 6, 2, 0])), "", &["head_dim_v is 0"]),
        (
            // No bytes at all.
            vec![
                tensor("q", "F32", Q),
                tensor("k", "F32", &[1, 0, 1, 8]),
                tensor("v", "F32", &[1, 0, 1, 1 << 44]),
            ],
            "",
            &["head_dim_v = 17592186044416", "at most 65536"],
        ),
        (
            // Few bytes, and an output beyond any memory.
            vec![
                tensor("q", "F32", &[1, 1 << 22, 1, 1]),
                tensor("k", "F32", &[1, 0, 1, 1]),
                tensor("v", "F32", &[1, 0, 1, 1 << 16]),
            ],
            "",
            &["memory are free"],
        ),
        (good(), "--scale NaN", &["softmax_scale is NaN", "finite"]),
        (good(), "--scale=-inf", &["softmax_scale is -inf"]),
        (
            good(),
            "--scale 1e20 --softcap 1e-18",
            &["softmax_scale = 1e20", "softcap = 1e-18", "at most 1e30"],
        ),
        (good(), "--softcap 0", &["softcap is 0"]),
        (good(), "--softcap=-3", &["softcap is -3"]),
        (good(), "--backend reference --isa portable", &["--isa"]),
        (good(), "--backend cuda --threads 2", &["--threads", "--backend cuda"]),
        (good(), "--backend cpu --tune", &["--tune", "the CPU has nothing to tune"]),
        (good(), "--backend reference --tune", &["--tune", "nothing to tune"]),
    ];
    let folder = Dir::new();
    let (input, output) = (folder.path("in"), folder.path("out"));
    for (tensors, flags, parts) in &cases {
        write(&input, tensors, &[]);
        let outcome = fa(&format!("run {} -o {} {flags}", text(&input), text(&output)));
        let shapes: Vec<_> = tensors.iter().map(|(name, dtype, shape, _)| (name, dtype, shape)).collect();
        refused(&outcome, parts, &format!("{shapes:?} {flags}"));
        assert_eq!(folder.listing(), ["in"]);
    }
    write(&input, &good(), &[("layout", "sbhd")]);
    refused(&fa(&format!("run {}", text(&input))), &["unknown layout 'sbhd'", "--layout"], "layout");
}

/// A file with this header text and so many bytes of data.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

#[test]
fn damaged_and_hostile_files_are_refused_without_harm() {
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"q":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |a: &str, b: &str| {
        let entry = |name: &str, offsets: &str| {
            format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#)
        };
        format!("{{{},{}}}", entry("q", a), entry("k", b))
    };
    let max = u64::MAX;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "0 bytes are too few"),
        ("short", vec![1, 2, 3], "3 bytes are too few"),
        ("huge header", max.to_le_bytes().to_vec(), "over the limit"),
        ("long header", (1u64 << 26).to_le_bytes().to_vec(), "truncated: a header of 67108864 bytes"),
        ("no UTF-8", [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat(), "not UTF-8"),
        ("no JSON", raw("hello", 0), "not a JSON object"),
        ("a list", raw("[]", 0), "not a JSON object"),
        ("deep", raw(&"[".repeat(100_000), 0), "not a JSON object"),
        ("no entry", raw(r#"{"q":1}"#, 0), "tensor 'q'"),
        ("bad metadata", raw(r#"{"__metadata__":{"a":1}}"#, 0), "__metadata__"),
        (
            "unknown field",
            raw(r#"{"q":{"dtype":"F32","shape":[],"data_offsets":[0,4],"x":1}}"#, 4),
            "unknown field",
        ),
        ("unknown dtype", raw(&one("F33", "[1]", "[0,4]"), 4), "unknown dtype 'F33'"),
        ("negative", raw(&one("F32", "[-1]", "[0,4]"), 4), "tensor 'q'"),
        ("giant product", raw(&one("F32", &format!("[{max},{max}]"), "[0,4]"), 4), "more than 2^64"),
        ("giant bits", raw(&one("F64", "[288230376151711744]", "[0,4]"), 4), "more than 2^64"),
        (
            "giant offset",
            raw(&one("U8", &format!("[{}]", max / 8), &format!("[0,{}]", max / 8)), 4),
            "truncated",
        ),
        ("wrapping offset", raw(&one("U8", "[8]", &format!("[{},{}]", max - 8, max)), 8), "no tensor covers"),
        ("backwards", raw(&one("F32", "[1]", "[4,0]"), 4), "run backwards"),
        ("size", raw(&one("F32", "[2]", "[0,4]"), 4), "needs 8 bytes, data offsets 0..4 hold 4 bytes"),
        ("half a byte", raw(&one("F4", "[3]", "[0,2]"), 2), "needs 12 bits"),
        ("overlap", raw(&two("[0,8]", "[4,12]"), 12), "overlaps"),
        ("gap", raw(&two("[0,8]", "[12,20]"), 20), "no tensor covers the bytes 8..12"),
        (
            "truncated data",
            raw(&two("[0,8]", "[8,16]"), 15),
            "truncated: the tensors need 16 bytes, the file holds 15",
        ),
        ("excess data", raw(&two("[0,8]", "[8,16]"), 17), "1 bytes follow"),
    ];
    let folder = Dir::new();
    let (input, output) = (folder.path("in"), folder.path("out"));
    for (what, bytes, part) in cases {
        std::fs::write(&input, bytes).unwrap();
        let outcome = fa(&format!("run {} -o {}", text(&input), text(&output)));
        refused(&outcome, &["not a valid safetensors file", part], what);
        refused(&fa(&format!("check {0} {0}", text(&input))), &[part], what);
        assert_eq!(folder.listing(), ["in"], "{what}");
    }
}

#[test]
fn every_truncation_of_a_real_file_is_refused() {
    let whole = std::fs::read(repository("crates/fa-cpu/tests/golden/one_by_one_f32.safetensors")).unwrap();
    let folder = Dir::new();
    let input = folder.path("in");
    for len in (0..whole.len()).step_by(whole.len() / 20) {
        std::fs::write(&input, &whole[..len]).unwrap();
        refused(&fa(&format!("run {}", text(&input))), &["safetensors"], &format!("{len} bytes"));
    }
}

#[test]
fn no_damaged_byte_crashes() {
    let whole = std::fs::read(repository("crates/fa-cpu/tests/golden/one_by_one_f32.safetensors")).unwrap();
    let folder = Dir::new();
    let (input, output) = (folder.path("in"), folder.path("out"));
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let places = noise(11, 400);
    for (index, place) in places.iter().enumerate() {
        let at = ((place + 1.0) / 2.0 * header as f64) as usize;
        let mut damaged = whole.clone();
        damaged[at] = [b'9', b'"', b'{', 0xff, b'0', b'-'][index % 6];
        std::fs::write(&input, &damaged).unwrap();
        let _ = std::fs::remove_file(&output);
        let outcome = fa(&format!("run {} -o {}", text(&input), text(&output)));
        // The byte may have been the same, or in a name or text that nobody reads.
        assert!(outcome.code == 0 || outcome.code == 2, "byte {at}: {outcome:?}");
        assert_eq!(output.exists(), outcome.code == 0, "byte {at}: {outcome:?}");
    }
}

#[test]
fn targets_that_cannot_be_written_are_found_before_the_work() {
    let folder = Dir::new();
    let input = folder.path("in");
    write(&input, &[tensor("q", "F32", Q), tensor("k", "F32", KV), tensor("v", "F32", KV)], &[]);
    let missing = folder.path("no/such/out");
    let inside_file = input.join("out");
    let mut cases = vec![
        (text(folder.root()), "it is a directory"),
        (text(&missing), "there is no folder"),
        (text(&inside_file), "there is no folder"),
        (text(&input), "it is an input file"),
        ("..", "it is a directory"),
    ];
    if cfg!(target_os = "linux") {
        // Not writable even for the superuser.
        cases.push(("/proc/out", "cannot write /proc/out"));
        cases.push(("/dev/null", "not a regular file"));
    }
    for (target, part) in &cases {
        refused(&fa_args(&["run", text(&input), "-o", target]), &["cannot write", part], target);
        assert_eq!(folder.listing(), ["in"], "{target}");
    }
    refused(
        &fa("bench --seqlen 16 --json same --plot same"),
        &["it is the file of --json"],
        "one file twice",
    );
    refused(&fa("bench --seqlen 16 --plot -"), &["name a file"], "--plot -");
    for line in ["plan --report", "emulate x.ron --report", "bench --seqlen 16 --plot"] {
        for (name, part) in [("-", "name a file"), ("x.txt", "is written as .")] {
            refuses(&format!("{line} {name}"), part);
        }
    }
    let specs = text(folder.root());
    refused(&fa_args(&["build", "--specs", specs]), &["none of the 0 specs", specs], "an empty folder");
    let spec = folder.path("one.ron");
    std::fs::write(&spec, "()").expect("a spec");
    let line = ["build", "--specs", text(&spec)];
    refused(&fa_args(&line), &["one.ron", "a file; name the folder"], "a file for a folder");
    std::fs::remove_file(&spec).expect("it is there");
    if cfg!(target_os = "linux") {
        refused(&fa("build --out /proc/x --arch sm90"), &["cannot write /proc/x"], "build --out");
    }
    // Without a compiler no folder is left behind, nor are its parents; a folder that was there stays.
    std::fs::create_dir(folder.path("there")).expect("a folder");
    for out in ["bundle", "new/bundle", "there", "there/bundle"] {
        let outcome = fa_with(&["build", "--out", &folder.file(out)], &[("FA_NVRTC", "none")]);
        assert!(outcome.code == 1 && outcome.stderr.contains("no NVRTC found"), "{out}: {outcome:?}");
        assert_eq!(folder.listing(), ["in", "there"], "{out}");
        assert_eq!(std::fs::read_dir(folder.path("there")).expect("a folder").count(), 0, "{out}");
    }
    for line in ["plan --report", "bench --seqlen 16 --plot", "bench --seqlen 16 --json"] {
        let outcome = fa(&format!("{line} {}", text(&missing)));
        refused(&outcome, &["cannot write", "there is no folder"], line);
    }
}

#[test]
fn no_command_writes_over_what_it_reads() {
    let folder = Dir::new();
    let spec = std::fs::read_to_string(repository("crates/fa-kernels/specs/sm80/hd64-causal-bf16.ron"));
    let spec = spec.expect("a shipped kernel");
    for (name, line) in [
        ("record.json", "tune --judge record.json --json record.json"),
        ("record.md", "tune --judge record.md --report record.md"),
        ("p.html", "plan --problem p.html --report p.html"),
        ("s.html", "plan --spec s.html --report s.html"),
        ("e.html", "emulate e.html --report e.html"),
        ("b.svg", "bench --draw b.svg --plot b.svg"),
        ("l.svg", "ladder --draw l.svg --plot l.svg"),
    ] {
        let (path, line) = (folder.path(name), line.replace(name, &folder.file(name)));
        let text = if name.starts_with(['s', 'e']) { &spec } else { "what was measured" };
        std::fs::write(&path, text).expect("written");
        refused(&fa(&line), &["cannot write", "it is an input file"], &line);
        assert_eq!(std::fs::read_to_string(&path).expect("it is there"), text, "{line}");
    }
}

#[test]
fn records_with_damaged_numbers_are_named() {
    let folder = Dir::new();
    let record = repository("docs/results/tune/random-8-nvidia-h100-80gb-hbm3.json");
    let record: serde_json::Value = fa_lab::summary::read(&record, "fa tune").expect("a record");
    let whole = serde_json::to_string_pretty(&record).expect("text");
    let path = folder.path("record.json");
    for field in
        ["tile_m", "tile_n", "num_warps", "atom_layout_m_dq", "atom_layout_n_dkv", "atom_layout_m_sdp"]
    {
        let at = whole.find(&format!("\"{field}\": ")).expect(field) + field.len() + 4;
        let digits = whole[at..].find(|c: char| !c.is_ascii_digit()).expect("a number ends");
        std::fs::write(&path, format!("{}0{}", &whole[..at], &whole[at + digits..])).expect("written");
        let outcome = fa_args(&["tune", "--judge", text(&path)]);
        refused(&outcome, &["record.json is not a record", &format!("{field} = 0: must be")], field);
    }
}

#[cfg(unix)]
#[test]
fn a_read_only_folder_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Dir::new();
    let (input, closed) = (folder.path("in"), folder.path("closed"));
    write(&input, &[tensor("q", "F32", Q), tensor("k", "F32", KV), tensor("v", "F32", KV)], &[]);
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o555)).unwrap();
    // The superuser may write there all the same.
    let writable = tempfile::tempfile_in(&closed).is_ok();
    let outcome = fa_args(&["run", text(&input), "-o", text(&closed.join("out"))]);
    std::fs::set_permissions(&closed, PermissionsExt::from_mode(0o755)).unwrap();
    if writable {
        outcome.good();
    } else {
        refused(&outcome, &["cannot write"], "read-only folder");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    for line in [
        "run no-such-file",
        "check no-such-file no-such-file",
        "plan --problem no-such-file",
        "plan --spec no-such-file",
    ] {
        refused(&fa(line), &["cannot read", "no-such-file"], line);
    }
    refused(&fa_args(&["run", text(&repository("examples"))]), &["it is a directory"], "a folder");
}

#[test]
fn problems_and_specs_with_unknown_or_bad_fields_are_refused() {
    let folder = Dir::new();
    let path = folder.path("x.ron");
    let problem = "(batch: 1, seqlen_q: 64, seqlen_k: 64, heads_q: 2, heads_kv: 2, head_dim: 64, head_dim_v: \
                   64, mask: (left: None, right: Some(0)), dtype: bf16)";
    std::fs::write(&path, problem).unwrap();
    fa(&format!("plan --problem {}", text(&path))).good();
    for (from, to, part) in [
        ("batch", "batches", "batches"),
        ("dtype: bf16", "dtype: bf16, bias: 3", "bias"),
        ("bf16", "bf17", "bf17"),
        ("bf16", "bf17", "`f32`, `f16`, `bf16`, `e4m3`, `int8`, `int4`, or `e5m2`"),
        ("heads_kv: 2", "heads_kv: 3", "heads_kv = 3"),
        ("seqlen_k: 64", "seqlen_k: 18446744073709551615", "k has"),
        ("seqlen_k: 64", "seqlen_k: 18446744073709551616", "problem"),
        ("batch: 1", "batch: -1", "problem"),
        ("(batch", "batch", "problem"),
    ] {
        std::fs::write(&path, problem.replace(from, to)).unwrap();
        refused(&fa(&format!("plan --problem {}", text(&path))), &[part], to);
    }

    let spec = "(dtype: bf16, head_dim: 128, head_dim_v: 128, mask: full, kernel: Sm80Fwd((tile_m: 128, \
                tile_n: 64, num_warps: 4, stages: 2, q_in_regs: false, blocks_per_sm: 1, swizzle: true, \
                ldmatrix: true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: false)))";
    std::fs::write(&path, spec).unwrap();
    fa(&format!("plan --arch sm80 --spec {}", text(&path))).good();
    std::fs::write(&path, format!("(archs: [sm80], spec: {spec})")).unwrap();
    fa(&format!("plan --arch sm80 --spec {}", text(&path))).good();
    for mode in ["bwd", "both"] {
        let line = format!("plan --arch sm80 --mode {mode} --spec {}", text(&path));
        refused(&fa(&line), &["leave out --mode"], mode);
    }
    for line in ["validate --mode bwd", "bench --backend cuda --mode bwd"] {
        let outcome = fa(&format!("{line} --spec {}", text(&path)));
        refused(&outcome, &["a kernel of the forward", "--mode fwd"], line);
    }
    let bench = format!("bench --backend cuda --headdim 64,128 --causal --spec {}", text(&path));
    refused(&fa(&bench), &["computes none of the shapes", "mask"], "bench --spec");
    #[cfg(unix)]
    refused(&fa("plan --spec /dev/zero"), &["/dev/zero", "longer than"], "a file without end");
    for (from, to, part) in [
        ("stages", "stagez", "stagez"),
        ("mask: full", "mask: full, bias: true", "bias"),
        ("tile_n: 64", "tile_n: 60", "tile_n = 60"),
        ("bf16", "e4m3", "e4m3"),
        ("bf16", "half", "`f32`, `f16`, `bf16`, `e4m3`, `int8`, `int4`, or `e5m2`"),
        ("Sm80Fwd", "Sm70Fwd", "Sm70Fwd"),
    ] {
        std::fs::write(&path, spec.replace(from, to)).unwrap();
        refused(&fa(&format!("plan --arch sm80 --spec {}", text(&path))), &[part], to);
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let input = repository("examples/minilm-layer0.safetensors");
    let lines: Vec<Vec<&str>> = vec![
        vec!["plan", "--json"],
        vec!["plan"],
        vec!["run", text(&input)],
        vec!["completions", "zsh"],
        vec!["man"],
        vec!["doctor"],
        vec!["--help"],
    ];
    for line in lines {
        let mut child = command(&line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let code = child.wait().unwrap().code();
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{line:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_failure_that_leaves_nothing() {
    // /dev/full takes no byte; as standard output it stands for a full disk.
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let done = command(&["plan"]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    let stderr = String::from_utf8(done.stderr).unwrap();
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
    assert!(Path::new("/dev/full").exists());
}
