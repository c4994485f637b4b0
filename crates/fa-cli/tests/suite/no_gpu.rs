//! What needs a GPU, on a machine without one.

use std::io::Write;
use std::process::Stdio;

use crate::common::{command, fa, fa_args, refused, repository, text};

#[test]
fn a_gpu_that_is_not_there_is_a_failure_and_not_a_crash() {
    let doctor = fa("doctor --json").json();
    let has = |name: &str| {
        doctor["checks"]
            .as_array()
            .unwrap()
            .iter()
            .any(|check| check["name"] == name && check["status"] == "ok")
    };
    let input = repository("examples/minilm-layer0-bf16.safetensors");
    let outcome = fa_args(&["run", text(&input), "--backend", "cuda"]);
    if has("driver") && has("gpu") && has("nvrtc") {
        outcome.good();
    } else {
        assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""));
        let part = if has("driver") { "error: " } else { "use the CPU backend" };
        assert!(outcome.stderr.contains(part), "{}", outcome.stderr);
    }
}

#[test]
fn what_only_a_gpu_can_measure_says_so() {
    let driver = fa("doctor --json").json()["checks"]
        .as_array()
        .unwrap()
        .iter()
        .any(|check| check["name"] == "driver" && check["status"] == "ok");
    for (line, has_a_cpu_backend) in [
        ("ladder", false),
        ("ladder --family sm90", false),
        ("tune --headdim 128", false),
        ("validate", false),
        ("validate --sanitize", false),
        ("validate --all-configs", false),
        ("doctor --time", false),
        ("bench --backend cuda", true),
    ] {
        if !driver {
            let outcome = fa(line);
            assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""), "{line}");
            assert!(outcome.stderr.contains("no CUDA driver"), "{line}: {}", outcome.stderr);
            assert_eq!(
                outcome.stderr.contains("CPU backend"),
                has_a_cpu_backend,
                "{line}: {}",
                outcome.stderr
            );
        }
    }
    if !driver {
        let tune = fa("tune --headdim 128").stderr;
        assert!(tune.contains("fa plan") && tune.contains("fa tune --judge"), "{tune}");
    }
    let mut worker = command(&["worker"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    worker.stdin.take().unwrap().write_all(b"{\"paint\": 1}\n").unwrap();
    let done = worker.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(1) && said.contains("no job of a worker"), "{said}");
    refused(&fa("ladder --headdim 64"), &["head dim 128", "leave --headdim out"], "ladder --headdim");
    refused(&fa("tune --dtype f32"), &["use bf16 or f16"], "tune --dtype f32");
    refused(&fa("ladder --plot no/such/folder.svg"), &["no folder"], "ladder --plot");
}
