//! The words of the language, and how tightly its operators bind.

use super::node::Unary;
use super::types::Var;

/// Names that the language has, beside variables, functions and types.
const KEYWORDS: [&str; 15] = [
    "let", "array", "scalar", "grad", "mask", "score", "true", "false", "inf", "nan", "and", "or", "not",
    "_", "bool",
];

/// The functions, for messages.
pub(super) const FUNCTIONS: &str = "abs, min, max, clamp, floor, exp, exp2, log, log2, tanh, sigmoid, \
                                    sqrt, rsqrt, sin, cos, pow, select (or where), i32, f32";

/// The functions of one operand.
pub(super) const UNARY: [Unary; 14] = [
    Unary::Abs,
    Unary::Floor,
    Unary::Exp,
    Unary::Exp2,
    Unary::Log,
    Unary::Log2,
    Unary::Tanh,
    Unary::Sigmoid,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Sin,
    Unary::Cos,
    Unary::ToF32,
    Unary::ToI32,
];

/// Whether the language itself uses a name.
pub(super) fn is_reserved(name: &str) -> bool {
    KEYWORDS.contains(&name)
        || Var::ALL.iter().any(|var| var.name() == name)
        || UNARY.iter().any(|op| op.name() == name)
        || ["min", "max", "clamp", "pow", "select", "where"].contains(&name)
}

/// How tightly a binary operator binds: `or` least. Comparisons chain, as in `0 <= x < w`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Or,
    And,
    Not,
    Comparison,
    BitOr,
    BitXor,
    BitAnd,
    Shift,
    Sum,
    Product,
    Sign,
    Power,
}

/// The level above.
pub(super) fn above(level: Level) -> Level {
    match level {
        Level::Or => Level::And,
        Level::And => Level::Not,
        Level::Not => Level::Comparison,
        Level::Comparison => Level::BitOr,
        Level::BitOr => Level::BitXor,
        Level::BitXor => Level::BitAnd,
        Level::BitAnd => Level::Shift,
        Level::Shift => Level::Sum,
        Level::Sum => Level::Product,
        Level::Product => Level::Sign,
        Level::Sign | Level::Power => Level::Power,
    }
}
