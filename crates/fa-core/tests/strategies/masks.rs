//! Masks that users write, as texts, with the arrays that they read.

use fa_core::program::{ArrayData, ArrayView, Inputs, Program, Value};

/// A mask, and the values of its scalars in the order of their names.
pub(crate) struct UsersMask {
    /// What it is called.
    pub(crate) name: &'static str,
    /// Its text; arrays are those of [`Arrays`].
    pub(crate) text: &'static str,
    /// The values of its scalars, by name.
    pub(crate) scalars: &'static [i32],
    /// Whether a row's visible keys are at most two intervals.
    pub(crate) intervals: bool,
}

const fn mask(name: &'static str, text: &'static str, scalars: &'static [i32], intervals: bool) -> UsersMask {
    UsersMask { name, text, scalars, intervals }
}

/// The masks.
pub(crate) const MASKS: [UsersMask; 27] = [
    mask("causal", "k <= q + off", &[], true),
    mask("window", "scalar w: i32; 0 <= q + off - k < w", &[17], true),
    mask("bidirectional window", "scalar w: i32; abs(q + off - k) <= w", &[11], true),
    mask("window and sinks", "scalar w: i32; k <= q + off and (q + off - k < w or k < 4)", &[9], true),
    mask("chunked", "scalar c: i32; k // c == q // c and k <= q", &[16], true),
    mask(
        "chunked with padding",
        "array pad: i32[_]; (q - pad[b]) // 8 == (k - pad[b]) // 8 and k <= q",
        &[],
        true,
    ),
    mask("prefix", "array prefix: i32[_]; k < prefix[b] or k <= q + off", &[], true),
    mask("documents", "array doc: i32[_, _]; doc[b, q] == doc[b, k] and k <= q", &[], true),
    mask("documents by starts", "array start: i32[_, _]; start[b, q] <= k <= q", &[], true),
    mask("padding", "array lengths: i32[_]; k < lengths[b]", &[], true),
    mask("padding as booleans", "array valid: bool[_, _]; valid[b, k]", &[], false),
    mask("left padding", "array pad: i32[_]; k >= pad[b] and k <= q + off", &[], true),
    mask(
        "image spans",
        "array span: i32[_, _]; k <= q or (span[b, q] >= 0 and span[b, q] == span[b, k])",
        &[],
        true,
    ),
    mask("dilated window", "abs(q - k) <= 24 and (q - k) % 4 == 0", &[], false),
    mask("strided", "k <= q and (q - k) % 4 == 0", &[], false),
    mask(
        "global tokens",
        "array valid: bool[_, _]; valid[0, q] or valid[0, k] or abs(q - k) <= 5",
        &[],
        false,
    ),
    mask(
        "shared prefix",
        "let i = max(k - 20, 0); k < 20 or (q // 12 == i // 12 and k <= q + 20)",
        &[],
        true,
    ),
    mask("scales", "array level: u8[_]; level[k] <= level[q]", &[], true),
    mask(
        "block diffusion",
        "scalar n: i32; let bq = (q % n) // 4; let bk = (k % n) // 4; let xq = q < n; let xk = k < n;
         (bq == bk and xq == xk) or (bq > bk and xq and not xk) or (bq >= bk and not xq and not xk)",
        &[60],
        true,
    ),
    mask(
        "cross attention to images",
        "array lo: i32[_]; array hi: i32[_]; lo[k // 8] <= q < hi[k // 8]",
        &[],
        true,
    ),
    mask(
        "neighbourhood",
        "let qx = q % 10; let qy = q // 10; let kx = k % 10; let ky = k // 10;
         abs(clamp(qx, 2, 7) - kx) <= 2 and abs(clamp(qy, 2, 5) - ky) <= 2",
        &[],
        false,
    ),
    mask(
        "Morton order",
        "let qx = (q & 1) | (q >> 1 & 2) | (q >> 2 & 4); let kx = (k & 1) | (k >> 1 & 2) | (k >> 2 & 4);
         abs(qx - kx) <= 1",
        &[],
        false,
    ),
    mask("tree", "array anc: bits[_, _]; k < 32 or anc[q, k - 32]", &[], false),
    mask("heads", "array valid: bool[_, _]; select(h % 2 == 0, k <= q, valid[b, h]) or k == 0", &[], true),
    mask(
        "selected blocks",
        "array sel: bits[_, _, _, _]; sel[b, h, q // 8, k // 8] and k <= q + off",
        &[],
        false,
    ),
    mask(
        "random",
        "scalar seed: i32; let x = (q * 7919 ^ k * 104729 ^ seed) * 668265263; (x ^ x >> 15) & 7 < 3",
        &[5],
        false,
    ),
    mask("scores of places", "array t: f32[_]; exp(t[q]) * 0.5 < t[k] + 1.0", &[], false),
];

/// The arrays of [`MASKS`], for sequences of up to 128.
pub(crate) struct Arrays {
    i32s: [(&'static str, Vec<i32>, Vec<usize>); 8],
    valid: Vec<u8>,
    level: Vec<u8>,
    words: Vec<u32>,
    t: Vec<f32>,
}

impl Arrays {
    pub(crate) fn new() -> Arrays {
        let two = |f: fn(usize) -> i32, second: fn(usize) -> i32| {
            (0..128).map(f).chain((0..128).map(second)).collect()
        };
        Arrays {
            i32s: [
                ("doc", two(|i| (i / 23) as i32, |i| (i * i / 900) as i32), vec![2, 128]),
                ("start", two(|i| (i / 23 * 23) as i32, |i| i as i32 / 2), vec![2, 128]),
                ("span", two(|i| if i % 31 > 20 { (i / 31) as i32 } else { -1 }, |_| -1), vec![2, 128]),
                ("pad", vec![3, 10], vec![2]),
                ("prefix", vec![30, 7], vec![2]),
                ("lengths", vec![61, 40], vec![2]),
                ("lo", (0..16).map(|i| i * 5).collect(), vec![16]),
                ("hi", (0..16).map(|i| i * 9 + 3).collect(), vec![16]),
            ],
            valid: (0..256).map(|i| u8::from(i % 37 > 3 || i % 5 == 0)).collect(),
            level: (0..128i32).map(|i| i.checked_ilog2().unwrap_or(0) as u8).collect(),
            words: (0..4096u32).map(|i| i.wrapping_mul(0x9e37_79b9).rotate_left(i)).collect(),
            t: (0..128).map(|i| ((i * 37 % 64) as f32) / 32.0 - 1.0).collect(),
        }
    }

    fn view(&self, name: &str) -> ArrayView<'_> {
        if let Some((_, data, extents)) = self.i32s.iter().find(|(own, ..)| *own == name) {
            return ArrayView::contiguous(ArrayData::I32(data), extents);
        }
        match name {
            "valid" => ArrayView::contiguous(ArrayData::Bool(&self.valid), &[2, 128]),
            "level" => ArrayView::contiguous(ArrayData::U8(&self.level), &[128]),
            "anc" => ArrayView::contiguous(ArrayData::Bits(&self.words), &[128, 96]),
            "sel" => ArrayView::contiguous(ArrayData::Bits(&self.words), &[2, 4, 16, 16]),
            _ => ArrayView::contiguous(ArrayData::F32(&self.t), &[128]),
        }
    }

    pub(crate) fn inputs(&self, program: &Program, scalars: &[i32]) -> Inputs<'_> {
        let arrays = program.arrays().iter().map(|array| self.view(&array.name)).collect();
        Inputs::new(program, arrays, scalars.iter().map(|&x| Value::I32(x)).collect()).expect("inputs fit")
    }
}
