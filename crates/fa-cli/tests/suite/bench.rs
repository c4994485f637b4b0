//! `fa bench`: the record's shape, files, and what it measures.

use std::time::{Duration, Instant};

use crate::common::{Dir, command, fa, refuses, repository, text};

#[test]
fn json_has_a_row_per_shape_and_pass() {
    let line = "bench --backend cpu --headdim 32,64-32 --seqlen 64,1x128 --heads 4:2 --batch 2 --dtype bf16 \
                --causal --mode both --threads 1 --seconds 0.001 --json -";
    let report = fa(line).json();
    let machine = &report["machine"];
    assert!(machine["fma_peak_gflops"].as_f64().unwrap() > 0.0);
    let peak = machine["peak_gflops"].as_f64().unwrap();
    assert_eq!(machine["dtype"], "bf16");
    assert_eq!(machine["threads"], 1);
    let isa: fa_cpu::simd::Isa = machine["isa"].as_str().unwrap().parse().unwrap();
    assert!(isa.is_available());
    assert!(!report["commit"].as_str().unwrap().is_empty());
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2 * 2);
    let expected = [
        ("fwd", 64, 64, 32, 32),
        ("bwd", 64, 64, 32, 32),
        ("fwd", 1, 128, 32, 32),
        ("bwd", 1, 128, 32, 32),
        ("fwd", 64, 64, 64, 32),
        ("bwd", 64, 64, 64, 32),
        ("fwd", 1, 128, 64, 32),
        ("bwd", 1, 128, 64, 32),
    ];
    for (row, (kind, seqlen_q, seqlen_k, head_dim, head_dim_v)) in rows.iter().zip(expected) {
        assert_eq!(row["kind"], kind);
        let fields = ["seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "batch", "heads_q", "heads_kv"];
        let values = [seqlen_q, seqlen_k, head_dim, head_dim_v, 2, 4, 2];
        for (field, value) in fields.into_iter().zip(values) {
            assert_eq!(row[field], value, "{field}");
        }
        assert_eq!((&row["causal"], &row["dtype"]), (&true.into(), &"bf16".into()));
        assert!(row["spec"].as_str().unwrap().starts_with("cpu-"));
        assert!(row["runs"].as_u64().unwrap() >= 3);
        let (ms, tflops) = (row["ms_median"].as_f64().unwrap(), row["tflops"].as_f64().unwrap());
        let pairs = if seqlen_q == 1 { 128.0 } else { 64.0 * 65.0 / 2.0 };
        let flops = 2.0
            * 2.0
            * 4.0
            * pairs
            * f64::from(head_dim + head_dim_v)
            * if kind == "bwd" { 2.5 } else { 1.0 };
        assert!((tflops - flops / ms / 1e9).abs() <= 1e-6 * tflops, "{kind} {seqlen_q}x{seqlen_k}: {tflops}");
        let share = row["peak_share"].as_f64().unwrap();
        assert!((share - tflops * 1e3 / peak).abs() <= 1e-6 * share, "{share} of {peak}");
    }
}

/// The peak is of the products that attention is made of, by whatever instructions.
#[test]
fn nothing_is_faster_than_the_peak() {
    for isa in fa_cpu::simd::Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for dtype in ["f32", "bf16"] {
            let line = format!(
                "bench --backend cpu --isa {isa} --dtype {dtype} --headdim 64 --seqlen 256 --heads 2 \
                 --batch 1 --mode both --threads 1 --seconds 0.02 --json -"
            );
            for row in fa(&line).json()["rows"].as_array().unwrap() {
                let share = row["peak_share"].as_f64().unwrap();
                assert!(share > 0.0 && share < 1.05, "{isa} {dtype} {}: {share} of the peak", row["kind"]);
            }
        }
    }
}

#[test]
fn a_soft_cap_is_measured_and_said() {
    let line =
        "bench --backend cpu --headdim 16 --seqlen 32 --heads 2 --mode both --threads 1 --seconds 0.001";
    let rows = |line: &str| fa(line).json()["rows"].as_array().unwrap().clone();
    let capped = rows(&format!("{line} --softcap 30 --json -"));
    assert!(capped.len() == 2 && capped.iter().all(|row| row["softcap"] == 30.0), "{capped:?}");
    assert!(rows(&format!("{line} --json -")).iter().all(|row| row["softcap"].is_null()));
    assert!(fa(&format!("{line} --softcap 30")).good().contains(" full, cap 30 "));
    assert!(fa(&format!("{line} --causal --mask-mod k%3!=1")).good().contains(" causal, program "));
    let refused = fa(&format!("{line} --softcap 0"));
    assert_eq!(refused.code, 2, "{}", refused.stderr);
    assert!(refused.stderr.contains("softcap"), "{}", refused.stderr);
    assert_eq!(fa("bench --backend cuda --marks models --softcap 30").code, 2);
    assert_eq!(fa("tune --random 3 --softcap 30").code, 2);
}

#[test]
fn appending_is_measured_by_the_bytes_that_it_moves() {
    let report = fa("bench --append --backend cpu --seconds 0.001 --json -").json();
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    for row in rows {
        let (ms, rate) = (row["ms_median"].as_f64().unwrap(), row["gb_per_s"].as_f64().unwrap());
        // 8 heads of keys and values, and with rotary embedding 32 of queries, 128 elements of 2 bytes.
        let heads = if row["rotary_dim"].is_null() { 16.0 } else { 48.0 };
        let bytes = 2.0 * row["rows"].as_f64().unwrap() * heads * 256.0;
        assert!((rate - bytes / ms / 1e6).abs() < 1e-6 * rate, "{row}");
        assert!(row["runs"].as_u64().unwrap() >= 1 && row.get("error").is_none(), "{row}");
    }
    for (line, part) in [
        ("--marks sm90", "cannot be used with"),
        ("--headdim 64", "cannot be used with"),
        ("--threads 2", "cannot be used with"),
        ("--mode bwd", "cannot be used with"),
        ("--backend reference", "use --backend cpu or cuda"),
        ("--backend cpu --reps 3", "--reps is for GPUs"),
        ("--backend cuda --seconds 1", "--seconds is the CPU's"),
        ("--dtype f16", "leave out --dtype"),
    ] {
        refuses(&format!("bench --append {line}"), part);
    }
}

/// Before a GPU is looked for.
#[test]
fn marks_that_do_not_go_with_a_flag_are_refused_by_name() {
    for (line, part) in [
        (
            "--backend cuda --marks plan --peers",
            "no peer has anything beside the marks plan: leave out --peers",
        ),
        ("--backend cuda --marks plan --mode bwd", "paged, step and plan go with --mode fwd"),
        ("--backend cpu --marks plan", "--marks is for GPUs: use --backend cuda"),
        ("--backend cuda --filter prefill", "--marks"),
        (
            "--backend cuda --marks paged --filter Gemma",
            "pages of 16, paged prefill, bf16: 64 x 512x4096, 32:8",
        ),
    ] {
        refuses(&format!("bench {line}"), part);
    }
    assert!(fa("bench --help").good().contains("- plan:"));
}

#[test]
fn files_are_written_and_the_table_shown() {
    let folder = Dir::new();
    let (json, plot) = (folder.path("b.json"), folder.path("b.svg"));
    let shown = fa(&format!(
        "bench --headdim 16 --seqlen 32,64 --heads 2 --mode both --backend reference --seconds 0.001 --json \
         {} --plot {}",
        text(&json),
        text(&plot)
    ))
    .good();
    assert!(shown.contains("of peak") && shown.contains(" 64 "), "{shown}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["machine"]["backend"], "reference");
    assert_eq!(report["rows"].as_array().unwrap().len(), 4);
    let drawing = std::fs::read_to_string(&plot).unwrap();
    let drawing = roxmltree::Document::parse(&drawing).unwrap();
    let texts: Vec<&str> = drawing
        .descendants()
        .filter(|node| node.tag_name().name() == "text")
        .filter_map(|node| node.text().map(str::trim))
        .collect();
    for text in ["GFLOP/s", "keys per sequence", "fwd hd 16 full", "bwd hd 16 full", "32", "64"] {
        assert!(texts.contains(&text), "'{text}' is not in {texts:?}");
    }
    // Two lines, forward and backward, of two points each: dots are circles with an outline of their own.
    let circles = drawing.descendants().filter(|node| node.tag_name().name() == "circle");
    assert_eq!(circles.filter(|circle| circle.attribute("fill") == Some("none")).count(), 4);
    assert!(texts.iter().any(|text| text.starts_with("f32 multiply-add peak")), "{texts:?}");
}

/// A run that is stopped leaves the rows that it had measured.
#[test]
fn rows_are_kept_as_they_are_measured() {
    let folder = Dir::new();
    let json = folder.path("rows.json");
    let line = "bench --backend cpu --headdim 32 --seqlen 32,48 --heads 1 --seconds 1 --json";
    let arguments: Vec<&str> = line.split_whitespace().chain([text(&json)]).collect();
    let mut program = command(&arguments).spawn().unwrap();
    let started = Instant::now();
    while !json.exists() {
        assert!(started.elapsed() < Duration::from_secs(60), "no row is written");
        std::thread::sleep(Duration::from_millis(20));
    }
    program.kill().unwrap();
    program.wait().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(report["rows"][0]["seqlen_k"], 32);
    assert!(report["machine"]["peak_gflops"].as_f64().unwrap() > 0.0);
}

/// No text is smaller than 10 pixels where the plot is as wide as a README's text.
#[track_caller]
fn can_be_read_on_a_page(name: &str, drawn: &str) {
    const PAGE: f64 = 830.0;
    let drawn = roxmltree::Document::parse(drawn).unwrap();
    let number = |node: roxmltree::Node, name: &str| node.attribute(name).unwrap().parse::<f64>().unwrap();
    let scale = (PAGE / number(drawn.root_element(), "width")).min(1.0);
    for one in drawn.descendants().filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "text"))) {
        let size = scale * number(one, "font-size");
        assert!(size >= 10.0, "{name}: {size} pixels for {:?}", one.text());
    }
}

/// Documents show some of the plots; what is kept of those is what is drawn.
#[track_caller]
fn is_kept(path: &std::path::Path, drawn: &str) {
    if let Ok(kept) = std::fs::read_to_string(path) {
        assert!(drawn == kept, "{}: --draw draws another plot than is kept", path.display());
    }
}

#[test]
fn plots_of_records_are_drawn_again_from_them() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("again.svg");
    for name in ["sm90", "sm90-bwd", "sm80", "sm80-bwd"] {
        let stored = repository(&format!("docs/results/marks-{name}-h100"));
        let record = stored.with_extension("json");
        fa(&format!("bench --draw {} --plot {}", text(&record), text(&plot))).good();
        let drawn = std::fs::read_to_string(&plot).unwrap();
        is_kept(&stored.with_extension("svg"), &drawn);
        // One legend: every library that was measured is named once.
        let record: serde_json::Value = fa_lab::summary::read(&record, "fa bench").unwrap();
        let rows = record["rows"].as_array().unwrap();
        let was_measured = |peer: &str| rows.iter().any(|row| row["peers"].get(peer).is_some());
        let libraries = [("cuDNN", "cudnn"), ("FlashAttention-2", "fa2"), ("FlashAttention-4", "fa4")];
        let libraries = libraries.map(|(library, peer)| (library, was_measured(peer)));
        for (library, is_there) in [("fa (this project)", true)].into_iter().chain(libraries) {
            let count = drawn.lines().filter(|line| line.trim() == library).count();
            assert_eq!(count, usize::from(is_there), "{name}: {library}");
        }
        can_be_read_on_a_page(name, &drawn);
    }
    for name in ["sm90-h100", "sm80-h100", "sm80-h200"] {
        let stored = repository(&format!("docs/results/ladder/{name}"));
        fa(&format!("ladder --draw {} --plot {}", text(&stored.with_extension("json")), text(&plot))).good();
        let drawn = std::fs::read_to_string(&plot).unwrap();
        is_kept(&stored.with_extension("svg"), &drawn);
        can_be_read_on_a_page(name, &drawn);
    }
    // Shapes that are no series are bars, each with its name, in the record's own unit.
    for (name, parts, without) in [
        ("models-bwd", ["Phi-3 mini", "TFLOP/s", "fa (this project)"], "sm90_bwd-"),
        ("decode", ["8 x 1x8192, 32:8, hd 128 full", "TB/s", "fa (this project)"], "TFLOP/s"),
        ("plan", ["256 decodes", "us per plan", "fa (this project)"], "TFLOP/s"),
        ("step", ["ms per step", "a step, bf16", "fa (this project)"], "TFLOP/s"),
    ] {
        let record = repository(&format!("docs/results/marks-{name}-h100.json"));
        fa(&format!("bench --draw {} --plot {}", text(&record), text(&plot))).good();
        let drawn = std::fs::read_to_string(&plot).unwrap();
        let drawn = roxmltree::Document::parse(&drawn).unwrap();
        let texts = drawn.descendants().filter(|node| node.tag_name().name() == "text");
        let texts: Vec<&str> = texts.filter_map(|node| node.text().map(str::trim)).collect();
        for part in parts {
            assert!(texts.contains(&part), "{name}: '{part}' is not in {texts:?}");
        }
        assert!(!texts.iter().any(|text| text.contains(without)), "{name}: {without} in {texts:?}");
    }
    // A record of the CPU, and a file that is no record.
    let json = folder.path().join("cpu.json");
    let line = "bench --headdim 16 --seqlen 32,64 --heads 2 --backend reference --seconds 0.001 --json";
    fa(&format!("{line} {}", text(&json))).good();
    fa(&format!("bench --draw {} --plot {}", text(&json), text(&plot))).good();
    assert!(std::fs::read_to_string(&plot).unwrap().to_lowercase().contains("head dim 16"));
    std::fs::write(&json, "{}").unwrap();
    let none = fa(&format!("bench --draw {} --plot {}", text(&json), text(&plot)));
    assert!(none.code == 2 && none.stderr.contains("is not a record of `fa bench`"), "{none:?}");
    assert_eq!(fa(&format!("bench --draw {}", text(&json))).code, 2);
    let none = fa(&format!("ladder --draw {} --plot {}", text(&json), text(&plot)));
    assert!(none.code == 2 && none.stderr.contains("is not a record of `fa ladder`"), "{none:?}");
    assert_eq!(fa(&format!("ladder --draw {}", text(&json))).code, 2);
}
