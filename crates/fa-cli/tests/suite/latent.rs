//! Latent problems (MLA) by the program: files of latents beside files of whole keys, and what is refused.

use std::collections::HashMap;

use fa_core::latent_rows::{LATENTS, LatentRows};

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

/// A latent run of a file: its results.
fn run(folder: &Dir, input: &str) -> HashMap<String, (String, Vec<usize>, Vec<f64>)> {
    let output = folder.path("out");
    fa(&format!("run {input} --latent --scale 0.05 --backend cpu -o {}", output.display())).good();
    read(&output)
}

fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let far = found.iter().zip(expected).position(|(a, b)| a != b && (a - b).abs() > 1e-5);
    assert_eq!(far.map(|at| (at, found[at], expected[at])), None, "{what}");
}

/// Bytes of pages of packed rows: any codes but NaN, scales about 1, some bf16 behind them.
fn packed(form: LatentRows, pages: usize, page: usize) -> Vec<f64> {
    let codes = |seed: u64, len: usize| {
        noise(seed, len).into_iter().map(|x| f64::from(fa_core::quantize::e4m3::encode(x as f32)))
    };
    let bf16 = |seed: u64, len: usize| {
        noise(seed, len).into_iter().flat_map(|x| {
            (x as f32).to_bits().to_be_bytes()[..2].iter().rev().copied().map(f64::from).collect::<Vec<_>>()
        })
    };
    let mut bytes = Vec::new();
    for number in 0..pages as u64 {
        for row in 0..page as u64 {
            let seed = 100 * number + 2 * row;
            match form {
                LatentRows::Scales128 => {
                    bytes.extend(codes(seed, 512));
                    let scales =
                        (0..4).flat_map(|at| (0.5 + at as f32 * 0.3 + row as f32 * 0.1).to_le_bytes());
                    bytes.extend(scales.map(f64::from));
                    bytes.extend(bf16(seed + 1, 64));
                }
                LatentRows::Scales64 => {
                    bytes.extend(codes(seed, 448));
                    bytes.extend(bf16(seed + 1, 64));
                }
                LatentRows::Codes => bytes.extend(codes(seed, 576)),
            }
        }
        if form == LatentRows::Scales64 {
            bytes.extend((0..8 * page).map(|at| (124 + (at + number as usize) % 5) as f64));
        }
    }
    assert_eq!(bytes.len(), pages * page * form.bytes());
    bytes
}

#[test]
fn packed_rows_give_what_their_numbers_give() {
    let folder = Dir::new();
    for form in LatentRows::ALL {
        let bytes = packed(form, 3, 4);
        let columns = form.columns();
        let q = noise(7, 2 * 3 * columns);
        let page_bytes: Vec<u8> = bytes.iter().map(|byte| *byte as u8).collect();
        let scale = if form.has_scales() { 1.0 } else { 0.25 };
        let [mut k, mut v] = [Vec::new(), Vec::new()];
        for page in page_bytes.chunks(4 * form.bytes()) {
            let mut values = Vec::new();
            form.decode(page, scale, |value| values.push(f64::from(value)));
            for row in values.chunks(columns) {
                v.extend(&row[..LATENTS]);
                k.extend(&row[LATENTS..]);
            }
        }
        let of_kv: [usize; 4] = [3, 4, 1, form.bytes()];
        let (of_q, of_k) = ([2, 1, 3, columns], [3, 4, 1, columns - LATENTS]);
        let common = || -> Vec<Tensor> {
            vec![
                ("q", "F32", &of_q, q.clone()),
                ("page_table", "I32", &[2, 2], vec![2.0, 0.0, 1.0, -1.0]),
                ("cache_seqlens", "I32", &[2], vec![7.0, 3.0]),
            ]
        };
        let mut of_numbers = common();
        of_numbers.extend::<[Tensor; 2]>([("k", "F32", &of_k, k), ("v", "F32", &[3, 4, 1, LATENTS], v)]);
        let mut of_rows = common();
        of_rows.push(("kv", if form.has_scales() { "U8" } else { "F8_E4M3" }, &of_kv, bytes.clone()));
        if !form.has_scales() {
            of_rows.push(("k_descale", "F32", &[1], vec![0.25]));
        }
        let [found, expected] = [("rows", of_rows), ("numbers", of_numbers)]
            .map(|(name, tensors)| run(&folder, &folder.write(name, &tensors)));
        for name in ["out", "lse"] {
            assert_near(&format!("{form:?} {name}"), &found[name].2, &expected[name].2);
        }
        assert_eq!(found["out"].1, [2, 1, 3, LATENTS]);
    }
}

/// Rows that queries name are those of a dense mask; entries outside of the cache, and behind the count, name
/// none.
#[test]
fn named_rows_give_what_their_pages_give() {
    let folder = Dir::new();
    let (q, rows) = tensors();
    let of_k = [PAGES, PAGE, 1, ROTARY];
    let keys = || -> Vec<Tensor> {
        vec![
            ("k", "F32", &of_k, columns(&rows, LATENT..LATENT + ROTARY)),
            ("v", "F32", &[PAGES, PAGE, 1, LATENT], columns(&rows, 0..LATENT)),
        ]
    };
    let mut named = keys();
    named.extend::<[Tensor; 3]>([
        ("q", "F32", &[2, HEADS, LATENT + ROTARY], q.clone()),
        ("indices", "I32", &[2, 5], vec![7.0, -1.0, 19.0, 20.0, 3.0, 4.0, 4.0, 1e9, 0.0, 2.0]),
        ("topk_length", "I32", &[2], vec![5.0, 4.0]),
    ]);
    let mut paged: Vec<Tensor> = vec![
        ("k", "F32", &[PAGES * PAGE, 1, 1, ROTARY], keys()[0].3.clone()),
        ("v", "F32", &[PAGES * PAGE, 1, 1, LATENT], keys()[1].3.clone()),
    ];
    paged.extend::<[Tensor; 3]>([
        ("q", "F32", &[2, 1, HEADS, LATENT + ROTARY], q.clone()),
        ("page_table", "I32", &[2, 3], vec![7.0, 19.0, 3.0, 4.0, 4.0, 0.0]),
        ("cache_seqlens", "I32", &[2], vec![3.0, 3.0]),
    ]);
    let named_file = folder.write("named", &named);
    let [found, expected] = [run(&folder, &named_file), run(&folder, &folder.write("paged", &paged))];
    assert_near("out", &found["out"].2, &expected["out"].2);
    assert_eq!(found["out"].1, [2, HEADS, LATENT]);
    // [heads, total_q] beside [batch, heads, 1].
    assert_eq!(found["lse"].1, [HEADS, 2]);
    for head in 0..HEADS {
        let of = [0, 1].map(|query| found["lse"].2[2 * head + query]);
        assert_near("lse", &of, &[0, 1].map(|query| expected["lse"].2[query * HEADS + head]));
    }
    // Without a row: O = 0, LSE = -inf; without entries, too.
    for (most, entries) in [(2, vec![-1.0, 20.0, 5.0, -7.0]), (0, vec![])] {
        let of_indices = [2, most];
        let mut none = keys();
        none.extend::<[Tensor; 2]>([
            ("q", "F32", &[2, HEADS, LATENT + ROTARY], q.clone()),
            ("indices", "I32", &of_indices, entries),
        ]);
        let found = run(&folder, &folder.write("none", &none));
        assert!(found["out"].2[..HEADS * LATENT].iter().all(|x| *x == 0.0), "{most}");
        assert_eq!(found["lse"].2[0], f64::NEG_INFINITY, "{most}");
        assert_eq!(found["lse"].2[1].is_finite(), most > 0);
    }
}

#[test]
fn what_rows_do_not_go_with_is_refused_by_name() {
    let folder = Dir::new();
    let bytes = || packed(LatentRows::Scales128, 1, 2);
    let q: Tensor = ("q", "BF16", &[1, 1, 2, 576], noise(1, 2 * 576));
    let token: Tensor = ("q", "BF16", &[1, 2, 576], noise(1, 2 * 576));
    let kv: Tensor = ("kv", "U8", &[1, 2, 1, 656], bytes());
    let indices: Tensor = ("indices", "I32", &[1, 2], vec![0.0, 1.0]);
    let cases: Vec<(Vec<Tensor>, &str, &str)> = vec![
        (vec![q.clone(), kv.clone()], "", "add --latent"),
        (vec![q.clone(), kv.clone()], "--latent", "softmax_scale is not given"),
        (vec![q.clone(), kv.clone()], "--latent --scale 0.1 --backward", "absorbed heads have no gradients"),
        (
            vec![q.clone(), kv.clone(), ("k", "BF16", &[1, 2, 1, 64], noise(2, 128))],
            "--latent --scale 0.1",
            "leave k out",
        ),
        (
            vec![q.clone(), ("kv", "U8", &[1, 2, 1, 600], vec![0.0; 1200])],
            "--latent --scale 0.1",
            "656, 584, 576",
        ),
        (
            vec![q.clone(), ("kv", "I32", &[1, 2, 1, 656], vec![0.0; 1312])],
            "--latent --scale 0.1",
            "U8 or F8_E4M3",
        ),
        (
            vec![q.clone(), ("kv", "U8", &[1, 2, 1, 584], vec![0.0; 1168])],
            "--latent --scale 0.1",
            "its last axis must be 512",
        ),
        (
            vec![q.clone(), kv.clone(), ("k_descale", "F32", &[1], vec![1.0])],
            "--latent --scale 0.1",
            "leave k_descale out",
        ),
        (
            vec![
                q.clone(),
                ("kv", "U8", &[1, 2, 1, 576], vec![0.0; 1152]),
                ("k_descale", "F32", &[1], vec![f64::INFINITY]),
            ],
            "--latent --scale 0.1",
            "finite and not negative",
        ),
        (
            vec![("q", "F8_E4M3", &[1, 1, 2, 576], vec![0.0; 1152]), kv.clone()],
            "--latent --scale 0.1",
            "BF16, F16 or F32",
        ),
        (vec![q.clone(), kv.clone(), indices.clone()], "--latent --scale 0.1", "[total_q, heads, head_dim]"),
        (
            vec![token.clone(), kv.clone(), ("indices", "I32", &[2, 1], vec![0.0, 1.0])],
            "--latent --scale 0.1",
            "its first axis must be 1",
        ),
        (
            vec![token.clone(), kv.clone(), indices.clone(), ("cache_seqlens", "I32", &[1], vec![1.0])],
            "--latent --scale 0.1",
            "leave cache_seqlens out",
        ),
        (
            vec![token.clone(), kv.clone(), indices.clone(), ("topk_length", "I32", &[2], vec![1.0, 1.0])],
            "--latent --scale 0.1",
            "topk_length",
        ),
        (
            vec![token.clone(), kv.clone(), indices.clone()],
            "--latent --scale 0.1 --layout bhsd",
            "must be bshd",
        ),
        (
            vec![q.clone(), kv.clone(), ("topk_length", "I32", &[1], vec![1.0])],
            "--latent --scale 0.1",
            "but no indices",
        ),
    ];
    for (tensors, flags, part) in cases {
        refuses(&format!("run {} {flags}", folder.write("case", &tensors)), part);
    }
    // Both at once.
    let found = run(&folder, &folder.write("both", &[token, kv, indices]));
    assert_eq!(found["out"].1, [1, 2, LATENTS]);
}
