//! The nodes of a program: constants, variables, loads and operations.

use super::limits::MAX_RANK;
use super::types::{Type, Var};

/// A node of a graph. Operands come before the nodes that use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(super) u16);

impl NodeId {
    /// Its place in [`Program::nodes`](super::Program::nodes).
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// A constant; a float by its bits.
    Const(Const),
    /// A variable.
    Var(Var),
    /// A run-time scalar, by its place in the program's.
    Scalar(u8),
    /// An element of an array, by its place in the program's; each index is clamped to the array.
    Load(u8, [Option<NodeId>; MAX_RANK]),
    /// An operation on one operand.
    Unary(Unary, NodeId),
    /// An operation on two operands.
    Binary(Binary, NodeId, NodeId),
    /// The second operand where the first is true, else the third.
    Select(NodeId, NodeId, NodeId),
}

/// A constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Const {
    /// An integer.
    I32(i32),
    /// The bits of a binary32 number.
    F32(u32),
    /// A truth value.
    Bool(bool),
}

/// Operations on one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unary {
    /// `-x`, of i32 or f32.
    Neg,
    /// `~x` of i32, `!x` of bool.
    Not,
    /// Magnitude, of i32 (wraps) or f32.
    Abs,
    /// The largest integer that is not larger.
    Floor,
    /// `e^x`.
    Exp,
    /// `2^x`.
    Exp2,
    /// Natural logarithm.
    Log,
    /// Logarithm to base 2.
    Log2,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// Square root.
    Sqrt,
    /// `1 / sqrt(x)`.
    Rsqrt,
    /// Sine, in radians.
    Sin,
    /// Cosine, in radians.
    Cos,
    /// i32 or bool to f32.
    ToF32,
    /// f32 (towards 0, saturating, NaN is 0) or bool to i32.
    ToI32,
}

/// Operations on two operands of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Binary {
    /// `+`
    Add,
    /// `-`
    Sub,
    /// `*`
    Mul,
    /// `/` of f32.
    Div,
    /// `//` of i32: rounded to minus infinity; the divisor is positive.
    FloorDiv,
    /// `%` of i32: never negative; the divisor is positive.
    FloorMod,
    /// `<<`; 0 for amounts outside 0..32.
    Shl,
    /// `>>`, with the sign; amounts outside 0..32 count as 31.
    Shr,
    /// `&`, of i32 or bool.
    And,
    /// `|`, of i32 or bool.
    Or,
    /// `^`, of i32 or bool.
    Xor,
    /// The smaller; NaN if either is.
    Min,
    /// The larger; NaN if either is.
    Max,
    /// `<`
    Lt,
    /// `<=`
    Le,
    /// `==`
    Eq,
    /// `!=`
    Ne,
}

impl Unary {
    /// The name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Unary::Neg => "-",
            Unary::Not => "~",
            Unary::Abs => "abs",
            Unary::Floor => "floor",
            Unary::Exp => "exp",
            Unary::Exp2 => "exp2",
            Unary::Log => "log",
            Unary::Log2 => "log2",
            Unary::Tanh => "tanh",
            Unary::Sigmoid => "sigmoid",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::ToF32 => "f32",
            Unary::ToI32 => "i32",
        }
    }

    /// The type of its result, or what it takes.
    pub(super) fn result(self, operand: Type) -> Result<Type, &'static str> {
        match (self, operand) {
            (Unary::Neg | Unary::Abs, Type::I32 | Type::F32) => Ok(operand),
            (Unary::Neg | Unary::Abs, Type::Bool) => Err("i32 or f32"),
            (Unary::Not, Type::I32 | Type::Bool) => Ok(operand),
            (Unary::Not, Type::F32) => Err("i32 or bool"),
            (Unary::ToF32, _) => Ok(Type::F32),
            (Unary::ToI32, _) => Ok(Type::I32),
            (
                Unary::Floor
                | Unary::Exp
                | Unary::Exp2
                | Unary::Log
                | Unary::Log2
                | Unary::Tanh
                | Unary::Sigmoid
                | Unary::Sqrt
                | Unary::Rsqrt
                | Unary::Sin
                | Unary::Cos,
                _,
            ) => {
                if operand == Type::F32 {
                    Ok(Type::F32)
                } else {
                    Err("f32")
                }
            }
        }
    }
}

impl Binary {
    /// The name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Binary::Add => "+",
            Binary::Sub => "-",
            Binary::Mul => "*",
            Binary::Div => "/",
            Binary::FloorDiv => "//",
            Binary::FloorMod => "%",
            Binary::Shl => "<<",
            Binary::Shr => ">>",
            Binary::And => "&",
            Binary::Or => "|",
            Binary::Xor => "^",
            Binary::Min => "min",
            Binary::Max => "max",
            Binary::Lt => "<",
            Binary::Le => "<=",
            Binary::Eq => "==",
            Binary::Ne => "!=",
        }
    }

    /// The type of its result, or what it takes.
    pub(super) fn result(self, operand: Type) -> Result<Type, &'static str> {
        match self {
            Binary::Add | Binary::Sub | Binary::Mul | Binary::Min | Binary::Max => {
                if operand == Type::Bool {
                    Err("two of i32 or f32")
                } else {
                    Ok(operand)
                }
            }
            Binary::Div => {
                if operand == Type::F32 {
                    Ok(operand)
                } else {
                    Err("two of f32")
                }
            }
            Binary::FloorDiv | Binary::FloorMod | Binary::Shl | Binary::Shr => {
                if operand == Type::I32 {
                    Ok(operand)
                } else {
                    Err("two of i32")
                }
            }
            Binary::And | Binary::Or | Binary::Xor => {
                if operand == Type::F32 {
                    Err("two of i32 or bool")
                } else {
                    Ok(operand)
                }
            }
            Binary::Lt | Binary::Le => {
                if operand == Type::Bool {
                    Err("two of i32 or f32")
                } else {
                    Ok(Type::Bool)
                }
            }
            Binary::Eq | Binary::Ne => Ok(Type::Bool),
        }
    }

    /// Whether operands may change places. For f32, the first of equal operands of min and max has the
    /// gradient.
    pub(super) fn commutes(self, operand: Type) -> bool {
        match self {
            Binary::Add | Binary::Mul | Binary::And | Binary::Or | Binary::Xor | Binary::Eq | Binary::Ne => {
                true
            }
            Binary::Min | Binary::Max => operand == Type::I32,
            Binary::Sub
            | Binary::Div
            | Binary::FloorDiv
            | Binary::FloorMod
            | Binary::Shl
            | Binary::Shr
            | Binary::Lt
            | Binary::Le => false,
        }
    }
}

impl Node {
    /// The nodes that a node uses.
    pub fn operands(self) -> impl Iterator<Item = NodeId> {
        let operands = match self {
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) => [None; 4],
            Node::Load(_, indices) => indices,
            Node::Unary(_, x) => [Some(x), None, None, None],
            Node::Binary(_, a, b) => [Some(a), Some(b), None, None],
            Node::Select(c, a, b) => [Some(c), Some(a), Some(b), None],
        };
        operands.into_iter().flatten()
    }
}
