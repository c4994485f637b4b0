//! How often kernels make values, and the names of operations, types and numbers in the header.

use super::node::{Binary, Const, Unary};
use super::types::{Deps, Element, Type, Var};

/// How often a value is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rate {
    /// Once per tile.
    Tile,
    /// Once per query.
    Row,
    /// Once per key.
    Column,
    /// For each query and key, before their score is there.
    Pair,
    /// For each score.
    Score,
}

impl Rate {
    pub(super) fn of(deps: Deps) -> Rate {
        match (deps.has(Deps::SCORE), deps.has(Deps::QUERY), deps.has(Deps::KEY)) {
            (true, ..) => Rate::Score,
            (_, true, true) => Rate::Pair,
            (_, true, false) => Rate::Row,
            (_, false, true) => Rate::Column,
            (_, false, false) => Rate::Tile,
        }
    }

    pub(super) const fn is_kept(self) -> bool {
        matches!(self, Rate::Tile | Rate::Row | Rate::Column)
    }
}

pub(super) const fn cuda_type(ty: Type) -> &'static str {
    match ty {
        Type::I32 => "int",
        Type::F32 => "float",
        Type::Bool => "bool",
    }
}

pub(super) const fn element(element: Element) -> &'static str {
    match element {
        Element::F32 => "f32",
        Element::F16 => "f16",
        Element::Bf16 => "bf16",
        Element::I32 => "i32",
        Element::U8 => "u8",
        Element::Bool => "bool",
        Element::Bits => "bit",
    }
}

pub(super) fn variable(var: Var, at: Rate) -> String {
    match (var, at) {
        (Var::Q, Rate::Pair | Rate::Score) => "row.q".to_owned(),
        (Var::K, Rate::Pair | Rate::Score) => "column.k".to_owned(),
        _ => var.name().to_owned(),
    }
}

/// A run-time scalar.
pub(super) fn scalar_of(scalar: u8, ty: Type) -> String {
    let cast = if ty == Type::F32 { "float_of_bits" } else { "int" };
    format!("{cast}(params.scalars[{scalar}])")
}

pub(super) fn literal(value: Const) -> String {
    match value {
        Const::I32(i32::MIN) => "(-2147483647 - 1)".to_owned(),
        Const::I32(value) if value < 0 => format!("({value})"),
        Const::I32(value) => value.to_string(),
        Const::F32(bits) => format!("float_of_bits({bits:#010x}u)"),
        Const::Bool(value) => value.to_string(),
    }
}

pub(super) fn unary(op: Unary, ty: Type, x: &str) -> String {
    let function = match (op, ty) {
        (Unary::Neg, Type::I32) => "mods_negate",
        (Unary::Neg, _) => return format!("-{x}"),
        (Unary::Not, Type::Bool) => return format!("!{x}"),
        (Unary::Not, _) => return format!("~{x}"),
        (Unary::ToI32, Type::Bool) => return format!("{x} ? 1 : 0"),
        (Unary::ToF32, Type::Bool) => return format!("{x} ? 1.f : 0.f"),
        (Unary::ToF32, _) => return format!("static_cast<float>({x})"),
        (Unary::ToI32, _) => "int_of_float",
        (Unary::Abs, Type::I32) => "mods_abs",
        (Unary::Abs, _) => "abs_of",
        (Unary::Floor, _) => "floor_of",
        (Unary::Exp, _) => "mods_exp",
        (Unary::Exp2, _) => "exp2_approx",
        (Unary::Log, _) => "mods_log",
        (Unary::Log2, _) => "log2_approx",
        (Unary::Tanh, _) => "mods_tanh",
        (Unary::Sigmoid, _) => "mods_sigmoid",
        (Unary::Sqrt, _) => "sqrt_approx",
        (Unary::Rsqrt, _) => "rsqrt_approx",
        (Unary::Sin, _) => "mods_sin",
        (Unary::Cos, _) => "mods_cos",
    };
    format!("{function}({x})")
}

pub(super) fn binary(op: Binary, ty: Type, a: &str, b: &str, divisor: Option<i32>) -> String {
    let power = divisor.filter(|&divisor| divisor > 0 && divisor & (divisor - 1) == 0);
    let function = match (op, ty) {
        (Binary::Add, Type::I32) => "mods_add",
        (Binary::Sub, Type::I32) => "mods_subtract",
        (Binary::Mul, Type::I32) => "mods_multiply",
        (Binary::FloorDiv, _) => match power {
            Some(divisor) => return format!("{a} >> {}", divisor.trailing_zeros()),
            None => "floor_divide",
        },
        (Binary::FloorMod, _) => match power {
            Some(divisor) => return format!("{a} & {}", divisor - 1),
            None => "floor_modulo",
        },
        (Binary::Shl, _) => "shift_left",
        (Binary::Shr, _) => "shift_right",
        (Binary::Min, Type::I32) => "min_of",
        (Binary::Max, Type::I32) => "max_of",
        (Binary::Min, _) => "min_or_nan",
        (Binary::Max, _) => "max_or_nan",
        (Binary::Div, _) => "divide",
        (
            Binary::Add
            | Binary::Sub
            | Binary::Mul
            | Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::Lt
            | Binary::Le
            | Binary::Eq
            | Binary::Ne,
            _,
        ) => return format!("{a} {} {b}", op.name()),
    };
    format!("{function}({a}, {b})")
}
