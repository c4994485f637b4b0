//! Latent problems (MLA) by the program: files of latents beside files of whole keys, and what is refused.

use crate::common::{Dir, Tensor, fa, noise, read, refuses};

const HEADS: usize = 6;
const LATENT: usize = 16;
const ROTARY: usize = 8;
const PAGE: usize = 4;
const PAGES: usize = 5;

/// Q, whose columns are those of the latents and then K's, and rows of a cache.
fn tensors() -> (Vec<f64>, Vec<f64>) {
    (noise(1, 2 * HEADS * (LATENT + ROTARY)), noise(2, PAGES * PAGE * (LATENT + ROTARY)))
}

/// Some columns of each row.
fn columns(rows: &[f64], range: std::ops::Range<usize>) -> Vec<f64> {
    rows.chunks(LATENT + ROTARY).flat_map(|row| row[range.clone()].to_vec()).collect()
}

fn file(folder: &Dir, name: &str, k: std::ops::Range<usize>) -> String {
    let (q, rows) = tensors();
    let shape = [PAGES, PAGE, 1, k.len()];
    let tensors: Vec<Tensor> = vec![
        ("q", "F32", &[2, 1, HEADS, LATENT + ROTARY], q),
        ("k", "F32", &shape, columns(&rows, k)),
        ("v", "F32", &[PAGES, PAGE, 1, LATENT], columns(&rows, 0..LATENT)),
        ("page_table", "I32", &[2, 3], vec![4.0, 0.0, 3.0, 2.0, -1.0, -1.0]),
        ("cache_seqlens", "I32", &[2], vec![11.0, 3.0]),
    ];
    folder.write(name, &tensors)
}

#[test]
fn latents_give_what_whole_keys_give() {
    let folder = Dir::new();
    let latent = file(&folder, "latent", LATENT..LATENT + ROTARY);
    let whole = file(&folder, "whole", 0..LATENT + ROTARY);
    for backend in ["cpu", "reference"] {
        let run = |input: &str, flags: &str| {
            let output = folder.path("out");
            fa(&format!(
                "run {input} --causal --scale 0.2 {flags} --backend {backend} -o {}",
                output.display()
            ))
            .good();
            read(&output)
        };
        let (found, expected) = (run(&latent, "--latent"), run(&whole, ""));
        for name in ["out", "lse"] {
            let (found, expected) = (&found[name], &expected[name]);
            assert_eq!(found.1, expected.1, "{name}");
            let far = found.2.iter().zip(&expected.2).any(|(a, b)| (a - b).abs() > 1e-6);
            assert!(!far, "{backend} {name}");
        }
        assert_eq!(found["out"].1, [2, 1, HEADS, LATENT]);
    }
    let report = fa(&format!("run {latent} --latent --scale 0.2")).good();
    assert!(report.contains("head dim 24-16 latent"), "{report}");
}

#[test]
fn plans_of_latents_and_wide_heads_have_their_kernel() {
    for (line, parts) in [
        ("plan --headdim 576-512 --latent --heads 128:1 --seqlen 1x8192 --batch 8", ["latent", "parts2"]),
        ("plan --headdim 512 --heads 8:4 --seqlen 4096 --causal", ["sm90_wide", "hd512"]),
    ] {
        let report = fa(line).good();
        for part in parts {
            assert!(report.contains(part), "{line}: no {part} in\n{report}");
        }
    }
}

#[test]
fn what_latents_do_not_have_is_refused_by_name() {
    let folder = Dir::new();
    let latent = file(&folder, "latent", LATENT..LATENT + ROTARY);
    for (line, part) in [
        (format!("run {latent} --latent"), "softmax_scale is not given"),
        (format!("run {latent} --scale 0.2"), "add --latent"),
        (format!("run {latent} --latent --scale 0.2 --backward"), "absorbed heads have no gradients"),
        ("plan --headdim 576-512 --latent --heads 128:1 --arch sm80".into(), "a latent problem (576-512"),
        (
            "plan --headdim 512 --latent --mode bwd".into(),
            "no sm90 kernel for the backward of a latent problem",
        ),
        (
            "plan --headdim 512 --arch sm80".into(),
            "head_dim = 512: GPU kernels take multiples of 8 from 8 to 256",
        ),
        ("plan --headdim 128-512 --latent".into(), "head_dim = 128 and head_dim_v = 512"),
        (
            "bench --backend cpu --headdim 24-16 --latent --mode bwd".into(),
            "a latent problem has no backward",
        ),
        ("plan --guide --latent".into(), "--latent"),
    ] {
        refuses(&line, part);
    }
    let rows =
        fa("bench --backend cpu --headdim 24-16 --latent --heads 16:1 --seqlen 2x64 --mode fwd --json");
    let rows = rows.json();
    assert_eq!((&rows["rows"][0]["latent"], &rows["rows"][0]["head_dim"]), (&true.into(), &24.into()));
}
