//! What each operation computes: integers as 32-bit GPUs do, numbers in f64 or rounded to f32 after each
//! operation.

use super::node::{Binary, Const, Unary};

/// The value of an expression.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// An integer.
    I32(i32),
    /// A number; f32 is a subset.
    F32(f64),
    /// A truth value.
    Bool(bool),
}

/// How numbers are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Not at all: the oracle.
    F64,
    /// To f32 after each operation, by the formulas of kernels.
    F32,
}

impl Value {
    pub(super) fn of(constant: Const) -> Value {
        match constant {
            Const::I32(value) => Value::I32(value),
            Const::F32(bits) => Value::F32(f32::from_bits(bits).into()),
            Const::Bool(value) => Value::Bool(value),
        }
    }

    /// The integer; 0 for other types, which a checked program does not ask for.
    pub(super) fn int(self) -> i32 {
        match self {
            Value::I32(value) => value,
            Value::F32(_) | Value::Bool(_) => 0,
        }
    }

    pub(super) fn float(self) -> f64 {
        match self {
            Value::F32(value) => value,
            Value::I32(_) | Value::Bool(_) => f64::NAN,
        }
    }

    pub(super) fn truth(self) -> bool {
        match self {
            Value::Bool(value) => value,
            Value::I32(_) | Value::F32(_) => false,
        }
    }
}

/// As kernels convert: towards 0, saturating; NaN is 0.
pub(super) fn to_i32(x: f64) -> i32 {
    x as i32
}

fn rounded(x: f64, precision: Precision) -> f64 {
    match precision {
        Precision::F64 => x,
        Precision::F32 => f64::from(x as f32),
    }
}

pub(super) fn unary(op: Unary, x: Value, precision: Precision) -> Value {
    match x {
        Value::I32(x) => match op {
            Unary::Neg => Value::I32(x.wrapping_neg()),
            Unary::Abs => Value::I32(x.wrapping_abs()),
            Unary::Not => Value::I32(!x),
            Unary::ToF32 => Value::F32(rounded(x.into(), precision)),
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
            | Unary::Cos => Value::I32(x),
        },
        Value::Bool(x) => match op {
            Unary::Not => Value::Bool(!x),
            Unary::ToF32 => Value::F32(f64::from(u8::from(x))),
            Unary::ToI32 => Value::I32(x.into()),
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
            | Unary::Cos => Value::Bool(x),
        },
        Value::F32(x) => {
            let y = match op {
                Unary::ToI32 => return Value::I32(to_i32(x)),
                Unary::Neg => -x,
                Unary::Not | Unary::ToF32 => x,
                Unary::Abs => x.abs(),
                Unary::Floor => x.floor(),
                Unary::Exp => x.exp(),
                Unary::Exp2 => x.exp2(),
                Unary::Log => x.ln(),
                Unary::Log2 => x.log2(),
                Unary::Tanh => x.tanh(),
                Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                Unary::Sqrt => x.sqrt(),
                Unary::Rsqrt => 1.0 / x.sqrt(),
                Unary::Sin => x.sin(),
                Unary::Cos => x.cos(),
            };
            Value::F32(rounded(y, precision))
        }
    }
}

pub(super) fn binary(op: Binary, a: Value, b: Value, precision: Precision) -> Value {
    match (a, b) {
        (Value::Bool(a), Value::Bool(b)) => Value::Bool(match op {
            Binary::And | Binary::Mul | Binary::Min => a & b,
            Binary::Or | Binary::Max | Binary::Add => a | b,
            Binary::Xor | Binary::Ne | Binary::Sub => a ^ b,
            Binary::Eq => a == b,
            Binary::Lt => !a & b,
            Binary::Le => !a | b,
            Binary::Div | Binary::FloorDiv | Binary::FloorMod | Binary::Shl | Binary::Shr => a,
        }),
        (Value::I32(a), Value::I32(b)) => integers(op, a, b),
        (a, b) => {
            let (a, b) = (a.float(), b.float());
            let number = |x| Value::F32(rounded(x, precision));
            match op {
                Binary::Add => number(a + b),
                Binary::Sub => number(a - b),
                Binary::Mul => number(a * b),
                Binary::Div => number(a / b),
                Binary::Min => number(if a.is_nan() || a <= b { a } else { b }),
                Binary::Max => number(if a.is_nan() || a >= b { a } else { b }),
                Binary::Lt => Value::Bool(a < b),
                Binary::Le => Value::Bool(a <= b),
                Binary::Eq => Value::Bool(a == b),
                Binary::Ne => Value::Bool(a != b),
                Binary::FloorDiv
                | Binary::FloorMod
                | Binary::Shl
                | Binary::Shr
                | Binary::And
                | Binary::Or
                | Binary::Xor => number(a),
            }
        }
    }
}

fn integers(op: Binary, a: i32, b: i32) -> Value {
    Value::I32(match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        // Divisors are positive: constants when a program is made, scalars when it is called.
        Binary::Div | Binary::FloorDiv => a.div_euclid(b.max(1)),
        Binary::FloorMod => a.rem_euclid(b.max(1)),
        Binary::Shl => {
            if (0..32).contains(&b) {
                a.wrapping_shl(b as u32)
            } else {
                0
            }
        }
        Binary::Shr => a >> (if (0..32).contains(&b) { b } else { 31 }),
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::Min => a.min(b),
        Binary::Max => a.max(b),
        Binary::Lt => return Value::Bool(a < b),
        Binary::Le => return Value::Bool(a <= b),
        Binary::Eq => return Value::Bool(a == b),
        Binary::Ne => return Value::Bool(a != b),
    })
}
