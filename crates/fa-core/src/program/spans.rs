//! Ranges of values, and what each operation makes of them: never too narrow.
//!
//! Integers are exact until a result leaves i32, where it wraps and may be anything. Numbers are widened
//! after each operation by more than kernels round, so that what holds for a range holds for what a kernel
//! computes.

use super::node::{Binary, Const, Unary};
use super::ops::to_i32;

/// The values that an expression may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Span {
    /// Integers from the first to the last.
    Int(i64, i64),
    /// Numbers from the first to the last, and NaN if true.
    Float(f64, f64, bool),
    /// Whether it may be true, and whether it may be false.
    Truth(bool, bool),
}

/// Anything that an i32 may be.
pub(super) const ANY_INT: Span = Span::Int(i32::MIN as i64, i32::MAX as i64);

/// Anything that an f32 may be.
pub(super) const ANY_FLOAT: Span = Span::Float(f64::NEG_INFINITY, f64::INFINITY, true);

/// True or false.
pub(super) const ANY_TRUTH: Span = Span::Truth(true, true);

/// More than the relative error of a kernel's operation: of f32 and its approximations.
const RELATIVE: f64 = 1e-5;

/// More than the absolute error near 0, and than the numbers that kernels flush to 0.
const ABSOLUTE: f64 = 1e-6;

impl Span {
    pub(super) fn of(constant: Const) -> Span {
        match constant {
            Const::I32(value) => Span::Int(value.into(), value.into()),
            Const::F32(bits) => Span::number(f32::from_bits(bits).into()),
            Const::Bool(value) => Span::Truth(value, !value),
        }
    }

    pub(super) fn number(value: f64) -> Span {
        if value.is_nan() { ANY_FLOAT } else { Span::Float(value, value, false) }
    }

    /// Both ranges in one.
    pub(super) fn or(self, other: Span) -> Span {
        match (self, other) {
            (Span::Int(a, b), Span::Int(c, d)) => Span::Int(a.min(c), b.max(d)),
            (Span::Float(a, b, x), Span::Float(c, d, y)) => Span::Float(a.min(c), b.max(d), x || y),
            (Span::Truth(a, b), Span::Truth(c, d)) => Span::Truth(a || c, b || d),
            (_, other) => other,
        }
    }

    fn exact(self) -> Option<i64> {
        match self {
            Span::Int(low, high) if low == high => Some(low),
            Span::Int(..) | Span::Float(..) | Span::Truth(..) => None,
        }
    }
}

/// Integers, or any if they leave i32.
fn ints(low: i64, high: i64) -> Span {
    let fits = |x: i64| i32::try_from(x).is_ok();
    if fits(low) && fits(high) { Span::Int(low, high) } else { ANY_INT }
}

/// The range of candidates.
fn around(candidates: [i64; 4]) -> Span {
    let [mut low, mut high] = [candidates[0]; 2];
    for x in candidates {
        (low, high) = (low.min(x), high.max(x));
    }
    ints(low, high)
}

/// Numbers, widened by more than a kernel rounds; any if an end is not a number.
fn floats(low: f64, high: f64, nan: bool) -> Span {
    if low.is_nan() || high.is_nan() {
        return ANY_FLOAT;
    }
    let most = f64::from(f32::MAX);
    // What rounds beyond f32 is infinite, which is beyond, too.
    let low = if low.abs() <= most { low - low.abs() * RELATIVE - ABSOLUTE } else { low };
    let high = if high.abs() <= most { high + high.abs() * RELATIVE + ABSOLUTE } else { high };
    let low = if low < -most { f64::NEG_INFINITY } else { low.min(most) };
    let high = if high > most { f64::INFINITY } else { high.max(-most) };
    Span::Float(low, high, nan)
}

pub(super) fn unary(op: Unary, x: Span) -> Span {
    match x {
        Span::Truth(yes, no) => match op {
            Unary::Not => Span::Truth(no, yes),
            Unary::ToI32 => Span::Int(i64::from(!no), i64::from(yes)),
            Unary::ToF32 => Span::Float(f64::from(u8::from(!no)), f64::from(u8::from(yes)), false),
            Unary::Neg
            | Unary::Abs
            | Unary::Floor
            | Unary::Exp
            | Unary::Exp2
            | Unary::Log
            | Unary::Log2
            | Unary::Tanh
            | Unary::Sigmoid
            | Unary::Sqrt
            | Unary::Rsqrt
            | Unary::Sin
            | Unary::Cos => ANY_TRUTH,
        },
        Span::Int(low, high) => match op {
            Unary::Neg => ints(-high, -low),
            Unary::Abs if low >= 0 => x,
            Unary::Abs if high <= 0 => ints(-high, -low),
            Unary::Abs => ints(0, high.max(-low)),
            Unary::Not => Span::Int(!high, !low),
            // Within 2^24 integers are numbers; beyond, they are rounded.
            Unary::ToF32 if low >= -(1 << 24) && high <= 1 << 24 => {
                Span::Float(low as f64, high as f64, false)
            }
            Unary::ToF32 => floats(low as f64, high as f64, false),
            Unary::ToI32
            | Unary::Floor
            | Unary::Exp
            | Unary::Exp2
            | Unary::Log
            | Unary::Log2
            | Unary::Tanh
            | Unary::Sigmoid
            | Unary::Sqrt
            | Unary::Rsqrt
            | Unary::Sin
            | Unary::Cos => x,
        },
        Span::Float(low, high, nan) => number(op, low, high, nan),
    }
}

fn number(op: Unary, low: f64, high: f64, nan: bool) -> Span {
    let rises = |f: fn(f64) -> f64| floats(f(low), f(high), nan);
    match op {
        Unary::Neg => Span::Float(-high, -low, nan),
        Unary::Abs if low >= 0.0 => Span::Float(low, high, nan),
        Unary::Abs if high <= 0.0 => Span::Float(-high, -low, nan),
        Unary::Abs => Span::Float(0.0, high.max(-low), nan),
        Unary::Floor => Span::Float(low.floor(), high.floor(), nan),
        Unary::ToI32 => {
            let (low, high) = (i64::from(to_i32(low)), i64::from(to_i32(high)));
            if nan { Span::Int(low.min(0), high.max(0)) } else { Span::Int(low, high) }
        }
        Unary::Exp => at_least(rises(f64::exp), 0.0),
        Unary::Exp2 => at_least(rises(f64::exp2), 0.0),
        Unary::Tanh => rises(f64::tanh),
        Unary::Sigmoid => at_least(rises(|x| 1.0 / (1.0 + (-x).exp())), 0.0),
        Unary::Log | Unary::Log2 if low <= 0.0 => {
            // Subnormal numbers are flushed to 0.
            let high = if high > ABSOLUTE { high } else { ABSOLUTE };
            let high = if op == Unary::Log { high.ln() } else { high.log2() };
            floats(f64::NEG_INFINITY, high, nan || low < 0.0)
        }
        Unary::Log => floats(if low < 1e-37 { f64::NEG_INFINITY } else { low.ln() }, high.ln(), nan),
        Unary::Log2 => floats(if low < 1e-37 { f64::NEG_INFINITY } else { low.log2() }, high.log2(), nan),
        Unary::Sqrt => at_least(floats(low.max(0.0).sqrt(), high.max(0.0).sqrt(), nan || low < 0.0), 0.0),
        Unary::Rsqrt => {
            let highest = if low < 1e-37 { f64::INFINITY } else { 1.0 / low.sqrt() };
            let lowest = if high <= 0.0 { f64::INFINITY } else { 1.0 / high.sqrt() };
            at_least(floats(lowest, highest, nan || low < 0.0), 0.0)
        }
        // Beyond some turns, a kernel's argument is rounded by more than the result may be off.
        Unary::Sin | Unary::Cos if low.abs().max(high.abs()) < 64.0 && low == high => {
            let value = if op == Unary::Sin { low.sin() } else { low.cos() };
            Span::Float(value - 1e-4, value + 1e-4, nan)
        }
        Unary::Sin | Unary::Cos => Span::Float(-1.001, 1.001, nan || !low.is_finite() || !high.is_finite()),
        Unary::Not | Unary::ToF32 => Span::Float(low, high, nan),
    }
}

/// A range without what no rounding leads to.
fn at_least(span: Span, least: f64) -> Span {
    let Span::Float(low, high, nan) = span else { return span };
    if nan && low < least { span } else { Span::Float(low.max(least), high.max(least), nan) }
}

pub(super) fn binary(op: Binary, a: Span, b: Span) -> Span {
    match (a, b) {
        (Span::Truth(a, not_a), Span::Truth(b, not_b)) => match op {
            Binary::And => Span::Truth(a && b, not_a || not_b),
            Binary::Or => Span::Truth(a || b, not_a && not_b),
            Binary::Xor | Binary::Ne => Span::Truth(a && not_b || not_a && b, a && b || not_a && not_b),
            Binary::Eq => Span::Truth(a && b || not_a && not_b, a && not_b || not_a && b),
            Binary::Add
            | Binary::Sub
            | Binary::Mul
            | Binary::Div
            | Binary::FloorDiv
            | Binary::FloorMod
            | Binary::Shl
            | Binary::Shr
            | Binary::Min
            | Binary::Max
            | Binary::Lt
            | Binary::Le => ANY_TRUTH,
        },
        (Span::Int(a, b), Span::Int(c, d)) => integers(op, (a, b), (c, d)),
        (Span::Float(a, b, x), Span::Float(c, d, y)) => numbers(op, (a, b), (c, d), x || y),
        _ => ANY_TRUTH,
    }
}

fn integers(op: Binary, (a, b): (i64, i64), (c, d): (i64, i64)) -> Span {
    let (left, right) = (Span::Int(a, b), Span::Int(c, d));
    match op {
        Binary::Add => ints(a + c, b + d),
        Binary::Sub => ints(a - d, b - c),
        Binary::Mul => around([a * c, a * d, b * c, b * d]),
        Binary::Div | Binary::FloorDiv => {
            let (c, d) = (c.max(1), d.max(1));
            around([a.div_euclid(c), a.div_euclid(d), b.div_euclid(c), b.div_euclid(d)])
        }
        Binary::FloorMod => match right.exact() {
            Some(divisor) => modulo(a, b, divisor.max(1)),
            None => Span::Int(0, d.max(1) - 1),
        },
        Binary::Shl => match right.exact() {
            Some(by) if (0..32).contains(&by) => ints(a << by, b << by),
            Some(_) => Span::Int(0, 0),
            None => ANY_INT,
        },
        Binary::Shr => {
            let by = |x: i64| if (0..32).contains(&x) { x } else { 31 };
            match right.exact() {
                Some(x) => Span::Int(a >> by(x), b >> by(x)),
                None => Span::Int(a.min(0), b.max(-1).max(if a < 0 { -1 } else { 0 })),
            }
        }
        Binary::And => match (left.exact(), right.exact()) {
            (Some(x), Some(y)) => Span::Int(x & y, x & y),
            (Some(mask), None) if mask >= 0 && mask & (mask + 1) == 0 => modulo(c, d, mask + 1),
            (None, Some(mask)) if mask >= 0 && mask & (mask + 1) == 0 => modulo(a, b, mask + 1),
            _ if a >= 0 && c >= 0 => Span::Int(0, b.min(d)),
            _ if a >= 0 => Span::Int(0, b),
            _ if c >= 0 => Span::Int(0, d),
            _ => ANY_INT,
        },
        Binary::Or | Binary::Xor => match (left.exact(), right.exact()) {
            (Some(x), Some(y)) => {
                let value = if op == Binary::Or { x | y } else { x ^ y };
                Span::Int(value, value)
            }
            _ if a >= 0 && c >= 0 => Span::Int(0, ((b.max(d) + 1) as u64).next_power_of_two() as i64 - 1),
            _ => ANY_INT,
        },
        Binary::Min => Span::Int(a.min(c), b.min(d)),
        Binary::Max => Span::Int(a.max(c), b.max(d)),
        Binary::Lt => Span::Truth(a < d, b >= c),
        Binary::Le => Span::Truth(a <= d, b > c),
        Binary::Eq => Span::Truth(a <= d && c <= b, !(a == b && c == d && a == c)),
        Binary::Ne => Span::Truth(!(a == b && c == d && a == c), a <= d && c <= b),
    }
}

/// Exact within one period.
fn modulo(low: i64, high: i64, divisor: i64) -> Span {
    if low.div_euclid(divisor) == high.div_euclid(divisor) {
        Span::Int(low.rem_euclid(divisor), high.rem_euclid(divisor))
    } else {
        Span::Int(0, divisor - 1)
    }
}

fn numbers(op: Binary, (a, b): (f64, f64), (c, d): (f64, f64), nan: bool) -> Span {
    let corners = |f: fn(f64, f64) -> f64| {
        let all = [f(a, c), f(a, d), f(b, c), f(b, d)];
        if all.iter().any(|x| x.is_nan()) {
            return ANY_FLOAT;
        }
        let (low, high) = all.iter().fold((all[0], all[0]), |(low, high), &x| (low.min(x), high.max(x)));
        floats(low, high, nan)
    };
    let infinite = |x: f64| x.is_infinite();
    match op {
        Binary::Add => corners(|x, y| x + y),
        Binary::Sub => corners(|x, y| x - y),
        // 0 within one range and an infinity of the other make NaN.
        Binary::Mul if (infinite(c) || infinite(d)) && a <= 0.0 && b >= 0.0 => ANY_FLOAT,
        Binary::Mul if (infinite(a) || infinite(b)) && c <= 0.0 && d >= 0.0 => ANY_FLOAT,
        Binary::Mul => corners(|x, y| x * y),
        // Numbers that kernels flush to 0 divide as 0 does.
        Binary::Div if c <= 1e-37 && d >= -1e-37 => ANY_FLOAT,
        Binary::Div => corners(|x, y| x / y),
        Binary::Min => Span::Float(a.min(c), b.min(d), nan),
        Binary::Max => Span::Float(a.max(c), b.max(d), nan),
        // With NaN, comparisons are false, and != is true.
        Binary::Lt => Span::Truth(a < d, nan || b >= c),
        Binary::Le => Span::Truth(a <= d, nan || b > c),
        Binary::Eq => Span::Truth(a <= d && c <= b, nan || !(a == b && c == d && a == c)),
        Binary::Ne => Span::Truth(nan || !(a == b && c == d && a == c), a <= d && c <= b),
        Binary::FloorDiv
        | Binary::FloorMod
        | Binary::Shl
        | Binary::Shr
        | Binary::And
        | Binary::Or
        | Binary::Xor => ANY_FLOAT,
    }
}
