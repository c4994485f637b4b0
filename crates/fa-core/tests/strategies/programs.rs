//! Random programs as texts.

use std::fmt::Write;

/// A generator of random numbers (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// One of `from`.
    pub(crate) fn one<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A number in `-1..1`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

const DECLARATIONS: &str = "array x: f32[_] grad;\narray y: f16[_, _];\narray z: bf16[_, _, _, _] grad;\n\
                            array id: i32[_];\narray level: u8[_, _];\narray valid: bool[_, _];\n\
                            array tree: bits[_, _, _];\narray w: f32[_, _] grad;\nscalar n: i32;\n\
                            scalar cap: f32;\n";

/// A program with a mask, a score or both, and arrays of every element type. The same for the same seed.
pub(crate) fn random_program(seed: u64) -> String {
    let mut random = Random(seed.wrapping_mul(0x1234_5678_9abc_def1) ^ 77);
    let mut text = DECLARATIONS.to_owned();
    let depth = 2 + random.below(4);
    let what = random.below(3);
    let distance = ["q + off - k", "q - k", "k - q", "q // 4 - k // 4"][random.below(4)];
    let _ = writeln!(text, "let d = {distance};");
    if what != 0 {
        let _ = writeln!(text, "mask = {};", boolean(&mut random, depth));
    }
    if what != 1 {
        let score = if random.below(3) == 0 {
            format!("s + {}", float(&mut random, depth, false))
        } else {
            float(&mut random, depth, true)
        };
        let _ = writeln!(text, "score = {score};");
    }
    text
}

fn float(random: &mut Random, depth: usize, score: bool) -> String {
    if depth == 0 {
        return match random.below(8) {
            0..=2 if score => "s".to_owned(),
            0 | 1 => format!("{:?}", (random.unit() * 8.0) as f32),
            2 => "cap".to_owned(),
            3 => format!("x[{}]", integer(random, 1)),
            4 => format!("y[h, {}]", integer(random, 1)),
            5 => "z[b, h, q, k]".to_owned(),
            6 => format!("w[h, {}]", integer(random, 1)),
            _ => format!("f32({})", integer(random, 1)),
        };
    }
    let one = |random: &mut Random| float(random, depth - 1, score);
    match random.below(16) {
        0..=3 => format!("({} {} {})", one(random), random.one(&["+", "-"]), one(random)),
        4 | 5 => format!("({} * {})", one(random), float(random, 0, false)),
        6 => format!("({} / (1.5 + abs({})))", one(random), one(random)),
        7 => format!("{}({}, {})", random.one(&["min", "max"]), one(random), one(random)),
        8 => format!("{}({})", random.one(&["tanh", "sigmoid", "sin", "cos", "abs", "floor"]), one(random)),
        9 => format!("{}(clamp({}, -6.0, 6.0))", random.one(&["exp", "exp2"]), one(random)),
        10 => {
            let function = random.one(&["log", "log2", "sqrt", "rsqrt"]);
            format!("{function}(0.25 + abs({}))", one(random))
        }
        11 => format!("cap * tanh({} / cap)", one(random)),
        12 => format!("(0.5 + abs({})) ** {}", one(random), random.one(&["2", "3", "-1", "0.5", "1.75"])),
        13 => format!("-{}", one(random)),
        _ => format!("select({}, {}, {})", boolean(random, depth - 1), one(random), one(random)),
    }
}

fn integer(random: &mut Random, depth: usize) -> String {
    if depth == 0 {
        return match random.below(14) {
            0..=2 => "q".to_owned(),
            3..=5 => "k".to_owned(),
            6 | 7 => "d".to_owned(),
            8 => random.one(&["b", "h", "hk", "sq", "sk", "off"]).to_owned(),
            9 => "n".to_owned(),
            10 => format!("id[{}]", random.one(&["q", "k", "d"])),
            11 => format!("level[b, {}]", random.one(&["q", "k", "d"])),
            _ => (random.below(65) as i64 - 16).to_string(),
        };
    }
    let one = |random: &mut Random| integer(random, depth - 1);
    match random.below(12) {
        0..=3 => format!("({} {} {})", one(random), random.one(&["+", "-", "*"]), one(random)),
        4 => format!("({} // {})", one(random), random.one(&["3", "8", "n", "max(hk, 1)"])),
        5 => format!("({} % {})", one(random), random.one(&["5", "16", "n"])),
        6 => format!("({} {} {})", one(random), random.one(&["<<", ">>"]), random.one(&["1", "3", "h", "q"])),
        7 => format!("({} {} {})", one(random), random.one(&["&", "|", "^"]), one(random)),
        8 => format!("{}({}, {})", random.one(&["min", "max"]), one(random), one(random)),
        9 => format!("{}{}", random.one(&["-", "~"]), one(random)),
        10 => format!("abs({})", one(random)),
        _ => format!("i32({} * 1.7)", one(random)),
    }
}

fn boolean(random: &mut Random, depth: usize) -> String {
    if depth == 0 {
        return match random.below(6) {
            0 => "valid[b, k]".to_owned(),
            1 => format!("tree[b, q, {}]", integer(random, 1)),
            2 => "(id[q] == id[k])".to_owned(),
            _ => format!(
                "({} {} {})",
                integer(random, 1),
                random.one(&["<", "<=", ">", ">="]),
                integer(random, 1)
            ),
        };
    }
    let one = |random: &mut Random| boolean(random, depth - 1);
    match random.below(8) {
        0..=2 => format!("({} {} {})", one(random), random.one(&["and", "or", "^"]), one(random)),
        3 => format!("not ({})", one(random)),
        4 => format!("(0 <= d < {})", integer(random, 1)),
        5 => format!("({} < {})", float(random, 1, false), float(random, 0, false)),
        6 => format!("select({}, {}, {})", one(random), one(random), one(random)),
        _ => format!("({} {} {})", integer(random, 1), random.one(&["==", "!=", "<"]), integer(random, 1)),
    }
}
