//! `fa run`, `fa check`, `fa plan` and `fa bench` on K and V in codes.

use std::path::PathBuf;

use fa_core::quantize::Codes;

use crate::common::{Dir, Tensor, fa, noise, read, refused};

const Q: [usize; 4] = [2, 3, 4, 16];
const K: [usize; 4] = [2, 40, 2, 16];

/// Codes as a file has them, bytes or numbers of int8, and the numbers that they are.
fn codes(kind: Codes, seed: u64) -> (Vec<f64>, Vec<f64>) {
    let values = noise(seed, K.iter().product()).into_iter().map(|value| value as f32);
    let bytes: Vec<u8> = kind.pack(&values.collect::<Vec<_>>(), kind.largest()).collect();
    let of_file = |&bits: &u8| if kind == Codes::Int8 { f64::from(bits as i8) } else { f64::from(bits) };
    (bytes.iter().map(of_file).collect(), kind.numbers(&bytes).map(f64::from).collect())
}

#[test]
fn codes_of_a_file_are_decoded_and_multiplied() {
    let folder = Dir::new();
    for (kind, stored) in [(Codes::E4m3, "F8_E4M3"), (Codes::Int8, "I8"), (Codes::Int4, "U8")] {
        let of_kv = [K[0], K[1], K[2], K[3] / kind.per_byte()];
        for shape in [&[2][..], &[2, 2], &[2, 40, 2]] {
            let ((k, of_k), (v, of_v)) = (codes(kind, 1), codes(kind, 2));
            let count = shape.iter().product();
            let descale: Vec<f64> = (0..count).map(|i| (0.01 + i as f64 / 4096.0) as f32 as f64).collect();
            let decoded = |numbers: &[f64]| -> Vec<f64> {
                let one = |(at, &number): (usize, &f64)| {
                    let (sequence, row, head) = (at / 16 / 2 / 40, at / 16 / 2, at / 16 % 2);
                    let slot = [head, sequence * 2 + head, row * 2 + head][shape.len() - 1];
                    number * descale[slot]
                };
                numbers.iter().enumerate().map(one).collect()
            };
            let q: Tensor = ("q", "F32", &Q, noise(3, Q.iter().product()));
            let scales =
                [("k_descale", "F32", shape, descale.clone()), ("v_descale", "F32", shape, descale.clone())];
            let plain = [q.clone(), ("k", "F32", &K, decoded(&of_k)), ("v", "F32", &K, decoded(&of_v))];
            let [of_k, of_v] = scales;
            let given = [q, ("k", stored, &of_kv, k), ("v", stored, &of_kv, v), of_k, of_v];
            let (given, plain) = (folder.write("given", &given), folder.write("plain", &plain));
            for backend in ["cpu", "reference"] {
                let outputs = [&given, &plain].map(|input| {
                    let output = folder.file("out");
                    fa(&format!("run {input} --causal --backend {backend} -o {output}")).good();
                    read(&PathBuf::from(output))
                });
                for name in ["out", "lse"] {
                    let values = outputs.each_ref().map(|file| &file[name].2);
                    let far = values[0].iter().zip(values[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                    assert!(far < 1e-5, "{name} of {stored} with descales {shape:?} by {backend}: {far}");
                }
            }
            let output = folder.file("out");
            fa(&format!("check {output} {output} --inputs {given} --causal")).good();
            let text = fa(&format!("run {given} --backend cpu")).good();
            assert!(text.contains(&format!("f32 with K and V in {}", kind.dtype())), "{text}");
        }
    }
}

/// Appending writes codes and, where they are per row, descales of the new rows, and nothing else.
#[test]
fn new_rows_of_a_file_are_quantised() {
    let folder = Dir::new();
    let new = [2, 1, 2, 16];
    let rows = noise(7, 64);
    let tensors: [Tensor; 8] = [
        ("q", "F32", &[2, 1, 4, 16], noise(3, 128)),
        ("k", "I8", &K, vec![5.0; 2560]),
        ("v", "I8", &K, vec![6.0; 2560]),
        ("cache_seqlens", "I32", &[2], vec![7.0, 0.0]),
        ("k_new", "F32", &new, rows.clone()),
        ("v_new", "F32", &new, rows.clone()),
        ("k_descale", "F32", &[2, 40, 2], vec![0.5; 160]),
        ("v_descale", "F32", &[2], vec![0.0078125; 2]),
    ];
    let (input, output) = (folder.write("cache", &tensors), folder.file("out"));
    fa(&format!("run {input} --causal --backend cpu -o {output}")).good();
    let file = read(&PathBuf::from(output));
    let (k, v, scales) = (&file["k"], &file["v"], &file["k_descale"]);
    assert_eq!((k.0.as_str(), k.1.as_slice(), scales.1.as_slice()), ("I8", &K[..], &[2, 40, 2][..]));
    for row in 0..80 {
        let is_new = row == 7 || row == 40;
        for head in 0..2 {
            let at = row * 2 + head;
            let (own_k, own_v) = (&k.2[at * 16..][..16], &v.2[at * 16..][..16]);
            if !is_new {
                assert!(own_k.iter().all(|&code| code == 5.0) && own_v.iter().all(|&code| code == 6.0));
                assert_eq!(scales.2[at], 0.5);
                continue;
            }
            let from = &rows[(row / 40 * 2 + head) * 16..][..16];
            let from: Vec<f32> = from.iter().map(|&value| value as f32).collect();
            let amax = from.iter().fold(0f32, |most, value| most.max(value.abs()));
            assert_eq!(scales.2[at], f64::from(amax / 127.0));
            for (dim, &value) in from.iter().enumerate() {
                let wanted = (value * (1.0 / (amax / 127.0))).round_ties_even();
                assert_eq!(own_k[dim], f64::from(wanted));
                assert_eq!(own_v[dim], f64::from((value * 128.0).clamp(-127.0, 127.0).round_ties_even()));
            }
        }
    }
}

/// Q, K and V in e4m3: what the decoded tensors give, O in bf16 or as asked.
#[test]
fn fp8_tensors_of_a_file_are_decoded_and_multiplied() {
    let folder = Dir::new();
    let (q, numbers_q) = codes(Codes::E4m3, 5);
    let ((k, numbers_k), (v, numbers_v)) = (codes(Codes::E4m3, 1), codes(Codes::E4m3, 2));
    let (of_q, of_kv) = ([0.01, 0.02, 0.005, 0.0025], [0.01, 0.004]);
    let decoded = |numbers: &[f64], descale: &dyn Fn(usize) -> f64| -> Vec<f64> {
        numbers.iter().enumerate().map(|(at, &number)| number * descale(at)).collect()
    };
    // Four query heads of 16 elements, of which two read a K/V head; three rows of a sequence.
    let q_of = |at: usize| f64::from(of_q[at / (3 * 4 * 16) * 2 + at / 32 % 2] as f32);
    let kv_of = |at: usize| f64::from(of_kv[at / 16 % 2] as f32);
    let given = folder.write(
        "given",
        &[
            ("q", "F8_E4M3", &Q, q[..384].to_vec()),
            ("k", "F8_E4M3", &K, k),
            ("v", "F8_E4M3", &K, v),
            ("q_descale", "F32", &[2, 2], of_q.to_vec()),
            ("k_descale", "F32", &[2], of_kv.to_vec()),
            ("v_descale", "F32", &[2], of_kv.to_vec()),
        ],
    );
    let plain = folder.write(
        "plain",
        &[
            ("q", "F32", &Q, decoded(&numbers_q[..384], &q_of)),
            ("k", "F32", &K, decoded(&numbers_k, &kv_of)),
            ("v", "F32", &K, decoded(&numbers_v, &kv_of)),
        ],
    );
    for backend in ["cpu", "reference"] {
        let run = |input: &str, flags: &str| {
            let output = folder.file("out");
            let text = fa(&format!("run {input} --causal --backend {backend} {flags} -o {output}")).good();
            (text, read(&PathBuf::from(output)))
        };
        let (text, wide) = run(&given, "--out-dtype f32");
        assert!(text.contains("e4m3 with O in f32, Q's descale per sequence and head"), "{text}");
        let (_, expected) = run(&plain, "");
        for name in ["out", "lse"] {
            let pairs = wide[name].2.iter().zip(&expected[name].2);
            let far = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far < 1e-5, "{name} by {backend}: {far}");
        }
        let (_, narrow) = run(&given, "");
        assert_eq!(narrow["out"].0, "BF16");
    }
    let output = folder.file("out");
    fa(&format!("run {given} --causal -o {output}")).good();
    fa(&format!("check {output} {output} --inputs {given} --causal")).good();
}

#[test]
fn refusals_name_the_tensor_or_the_flag() {
    let folder = Dir::new();
    let q = || ("q", "F32", &Q[..], noise(3, Q.iter().product()));
    let k = |name, stored| (name, stored, &K[..], vec![1.0; 2560]);
    let one = |len: usize| vec![1.0; len];
    for (tensors, flags, parts) in [
        (vec![q(), k("k", "I32"), k("v", "I32")], "", vec!["tensor 'k'", "F8_E4M3, I8, or U8 (int4"]),
        // Two codes to a byte: 16 bytes are 32 columns.
        (
            vec![q(), k("k", "U8"), k("v", "U8")],
            "",
            vec!["tensor 'k'", "head_dim must be q's", "[2, 40, 2, 8]"],
        ),
        (
            vec![("q", "F8_E4M3", &Q, one(384)), k("k", "F8_E4M3"), k("v", "I8")],
            "",
            vec!["tensor 'v'", "q holds F8_E4M3: k and v must hold it as well"],
        ),
        (
            vec![("q", "F8_E4M3", &Q, one(384)), k("k", "F8_E4M3"), k("v", "F8_E4M3")],
            "--backward",
            vec!["fp8 Q, K and V have no gradients", "leave --backward out"],
        ),
        (
            vec![("q", "F8_E5M2", &Q, one(384)), k("k", "F8_E4M3"), k("v", "F8_E4M3")],
            "",
            vec!["tensor 'q'", "F8_E5M2", "F16, BF16 and F8_E4M3"],
        ),
        (vec![q(), k("k", "I8"), k("v", "F32")], "", vec!["tensor 'v'", "k and v must be of one type"]),
        (
            vec![q(), k("k", "F32"), k("v", "F32"), ("k_descale", "F32", &[2], one(2))],
            "",
            vec!["k_descale with K and V in f32"],
        ),
        (
            vec![q(), k("k", "I8"), k("v", "I8"), ("v_descale", "F32", &[3], one(3))],
            "",
            vec!["v_descale", "[2]", "heads_kv"],
        ),
        (
            vec![q(), k("k", "I8"), k("v", "I8"), ("dout", "F32", &Q, one(384))],
            "--backward",
            vec!["K and V in codes have no gradients", "leave --backward out"],
        ),
    ] {
        let input = folder.write("given", &tensors);
        refused(&fa(&format!("run {input} {flags} --backend cpu")), &parts, "run");
    }
    refused(&fa("plan --kv-descale head"), &["--kv-descale", "add --kv-dtype"], "plan");
    let other = fa("plan --kv-dtype f16");
    assert!(
        other.code == 2 && other.stderr.contains("no type of codes: use e4m3, int8, int4 or e5m2"),
        "{other:?}"
    );
    refused(&fa("bench --dtype int8 --backend cpu"), &["int8 is of K and V alone", "--kv-dtype"], "bench");
    let odd = fa("bench --dtype f16 --out-dtype f32 --backend cpu");
    refused(&odd, &["out_dtype is f32 and dtype is f16"], "bench");
    let fp8 = "bench --backend cpu --headdim 16 --seqlen 1x64 --heads 2 --seconds 0.001 --dtype e4m3";
    assert!(fa(fp8).good().contains("e4m3"));
    let flags = |kv: &str| format!("--headdim 16 --seqlen 1x64 --heads 2 --seconds 0.001 --kv-dtype {kv}");
    for kv in ["int8", "int4"] {
        let text = fa(&format!("bench --backend cpu {} --kv-descale token_head", flags(kv))).good();
        assert!(text.contains(&format!("f32/{kv}")), "{text}");
    }
    let flags = flags("int8");
    let both = fa(&format!("bench --backend cpu {flags} --mode both"));
    refused(&both, &["K and V in codes have no gradients"], "bench");
}

#[test]
fn plans_show_the_peak_of_8_bits_and_the_bytes_of_codes() {
    let fp8 = fa("plan --dtype e4m3 --batch 2 --seqlen 8192 -n 1");
    assert_eq!(fp8.code, 0, "{fp8:?}");
    assert!(fp8.stdout.contains("of 8-bit peak"), "{}", fp8.stdout);
    // 2 products of 2 operations for 2 x 16 heads x 8192^2 pairs of 128 columns; 1,979 TFLOP/s in 8 bits.
    let row = fp8.stdout.lines().find(|line| line.starts_with(" 1 ")).expect("a plan");
    let percent = row.split(" %").next().and_then(|text| text.rsplit(' ').next()).expect("a share");
    let rate = row.split_whitespace().rev().nth(3).and_then(|text| text.parse::<f64>().ok()).expect(row);
    let expected = 100.0 * rate / 1979.0;
    assert!((percent.parse::<f64>().expect(row) - expected).abs() < 0.7, "{row}: {expected}");
    let half = fa("plan --batch 2 --seqlen 8192 -n 1");
    assert!(half.stdout.contains("  of peak") && !half.stdout.contains("8-bit"), "{}", half.stdout);
    assert!(!half.stdout.contains("codes"), "{}", half.stdout);

    let decode = "plan --batch 64 --heads 32:8 --seqlen 1x4096 --page 16 --kv-dtype int8 -n 1";
    let shown = |form: &str| fa(&format!("{decode} --kv-descale {form}")).stdout;
    // 64 x 4096 keys of 8 heads: 128 bytes of K and of V, and two descales of 4 bytes.
    let of_rows = shown("token_head");
    assert!(of_rows.contains("(537 MB of codes of K and V, 16.8 MB of descales)"), "{of_rows}");
    assert!(shown("head").contains("(537 MB of codes of K and V, 64.0 B of descales)"));
    assert!(shown("none").contains("(537 MB of codes of K and V)"));
    let half = fa(&decode.replace("int8", "int4")).stdout;
    assert!(half.contains("(268 MB of codes of K and V, 64.0 B of descales)"), "{half}");
}

#[test]
fn validation_refuses_kinds_that_it_does_not_choose_by() {
    for (line, part) in [
        ("validate --kv-dtype f16", "no type of codes"),
        ("validate --kv-descale row", "use none, head, sequence_head or token_head"),
        ("validate --dtype e3m4", "unknown dtype"),
        ("validate --soak 3 --kv-dtype e4m3", "--kv-dtype"),
        ("validate --all-configs --latent", "--latent"),
        ("validate --sanitize --dtype e4m3", "--dtype"),
    ] {
        let outcome = fa(line);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""), "{line}: {outcome:?}");
        assert!(outcome.stderr.contains(part), "{line}: {}", outcome.stderr);
    }
}
