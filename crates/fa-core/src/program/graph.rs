//! The graph of a program's expressions: equal expressions are one node, constants are folded.

use std::collections::HashMap;

use super::error::ProgramProblem;
use super::limits::{MAX_NODES, MAX_RANK};
use super::node::{Binary, Const, Node, NodeId, Unary};
use super::ops::{self, Value};
use super::types::{ArrayDecl, Deps, ScalarDecl, Type, Var};

/// Nodes while a program is made.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub(super) arrays: Vec<ArrayDecl>,
    pub(super) scalars: Vec<ScalarDecl>,
    pub(super) nodes: Vec<Node>,
    pub(super) types: Vec<Type>,
    pub(super) deps: Vec<Deps>,
    /// Hashes of the expressions, which order operands that commute.
    keys: Vec<u64>,
    index: HashMap<Node, NodeId>,
}

/// The most nodes while a program is made, before those that nothing uses are left out.
const MOST_NODES: usize = 1 << 14;

type Made = Result<NodeId, ProgramProblem>;

impl Graph {
    pub(super) fn new(arrays: Vec<ArrayDecl>, scalars: Vec<ScalarDecl>) -> Graph {
        Graph { arrays, scalars, ..Graph::default() }
    }

    /// Frees what only new nodes need.
    pub(super) fn finish(&mut self) {
        self.keys = Vec::new();
        self.index = HashMap::new();
        self.nodes.shrink_to_fit();
        self.types.shrink_to_fit();
        self.deps.shrink_to_fit();
    }

    pub(super) fn ty(&self, node: NodeId) -> Type {
        self.types[node.index()]
    }

    pub(super) fn constant(&self, node: NodeId) -> Option<Const> {
        if let Node::Const(value) = self.nodes[node.index()] { Some(value) } else { None }
    }

    fn is(&self, node: NodeId, value: Const) -> bool {
        self.constant(node) == Some(value)
    }

    pub(super) fn int(&mut self, value: i32) -> Made {
        self.push(Node::Const(Const::I32(value)))
    }

    pub(super) fn float(&mut self, value: f32) -> Made {
        // One NaN: its bits are part of the canonical text's identity.
        let value = if value.is_nan() { f32::NAN } else { value };
        self.push(Node::Const(Const::F32(value.to_bits())))
    }

    pub(super) fn boolean(&mut self, value: bool) -> Made {
        self.push(Node::Const(Const::Bool(value)))
    }

    pub(super) fn var(&mut self, var: Var) -> Made {
        self.push(Node::Var(var))
    }

    pub(super) fn scalar(&mut self, scalar: usize) -> Made {
        self.push(Node::Scalar(scalar as u8))
    }

    pub(super) fn load(&mut self, array: usize, indices: &[NodeId]) -> Made {
        let decl = &self.arrays[array];
        if indices.len() != decl.rank {
            let (array, rank) = (decl.name.clone(), decl.rank);
            return Err(ProgramProblem::Rank { array, rank, given: indices.len() });
        }
        let mut all = [None; MAX_RANK];
        for (slot, &index) in all.iter_mut().zip(indices) {
            if self.ty(index) != Type::I32 {
                return Err(operand("[]", "indices of i32", &[self.ty(index)]));
            }
            *slot = Some(index);
        }
        self.push(Node::Load(array as u8, all))
    }

    pub(super) fn unary(&mut self, op: Unary, x: NodeId) -> Made {
        let ty = self.ty(x);
        if let Err(takes) = op.result(ty) {
            return Err(operand(op.name(), takes, &[ty]));
        }
        if let Some(value) = self.constant(x) {
            let value = ops::unary(op, Value::of(value), ops::Precision::F32);
            return self.value(value);
        }
        match (op, self.nodes[x.index()]) {
            (Unary::Neg, Node::Unary(Unary::Neg, y)) | (Unary::Not, Node::Unary(Unary::Not, y)) => Ok(y),
            (Unary::Abs, Node::Unary(Unary::Neg | Unary::Abs, y)) => self.unary(Unary::Abs, y),
            (Unary::ToF32, _) if ty == Type::F32 => Ok(x),
            (Unary::ToI32, _) if ty == Type::I32 => Ok(x),
            (Unary::Not, Node::Binary(Binary::Lt, a, b)) if self.ty(a) == Type::I32 => {
                self.binary(Binary::Le, b, a)
            }
            (Unary::Not, Node::Binary(Binary::Le, a, b)) if self.ty(a) == Type::I32 => {
                self.binary(Binary::Lt, b, a)
            }
            (Unary::Not, Node::Binary(Binary::Eq, a, b)) => self.binary(Binary::Ne, a, b),
            (Unary::Not, Node::Binary(Binary::Ne, a, b)) => self.binary(Binary::Eq, a, b),
            _ => self.push(Node::Unary(op, x)),
        }
    }

    pub(super) fn binary(&mut self, op: Binary, a: NodeId, b: NodeId) -> Made {
        let (ty, second) = (self.ty(a), self.ty(b));
        match op.result(ty) {
            Ok(_) if ty == second => {}
            Ok(_) => return Err(operand(op.name(), "two of one type", &[ty, second])),
            Err(takes) => return Err(operand(op.name(), takes, &[ty, second])),
        }
        if matches!(op, Binary::FloorDiv | Binary::FloorMod) {
            self.check_divisor(b)?;
        }
        if let (Some(x), Some(y)) = (self.constant(a), self.constant(b)) {
            let value = ops::binary(op, Value::of(x), Value::of(y), ops::Precision::F32);
            return self.value(value);
        }
        if let Some(same) = self.identity(op, ty, a, b)? {
            return Ok(same);
        }
        let (a, b) = if op.commutes(ty) && self.order(b) < self.order(a) { (b, a) } else { (a, b) };
        self.push(Node::Binary(op, a, b))
    }

    pub(super) fn select(&mut self, condition: NodeId, yes: NodeId, no: NodeId) -> Made {
        let types = [self.ty(condition), self.ty(yes), self.ty(no)];
        if types[0] != Type::Bool || types[1] != types[2] {
            return Err(operand("select", "a bool and two of one type", &types));
        }
        if yes == no {
            return Ok(yes);
        }
        if let Some(Const::Bool(value)) = self.constant(condition) {
            return Ok(if value { yes } else { no });
        }
        if let Node::Unary(Unary::Not, opposite) = self.nodes[condition.index()] {
            return self.select(opposite, no, yes);
        }
        self.push(Node::Select(condition, yes, no))
    }

    /// `x` to the constant power `exponent`.
    pub(super) fn power(&mut self, x: NodeId, exponent: f32) -> Made {
        if self.ty(x) != Type::F32 {
            return Err(operand("**", "f32 and a constant", &[self.ty(x)]));
        }
        if exponent == 0.5 {
            return self.unary(Unary::Sqrt, x);
        }
        if exponent == -0.5 {
            return self.unary(Unary::Rsqrt, x);
        }
        let times = exponent.abs();
        if times <= 32.0 && times.fract() == 0.0 {
            let mut power = self.float(1.0)?;
            let (mut square, mut left) = (x, times as u32);
            while left > 0 {
                if left & 1 == 1 {
                    power = self.binary(Binary::Mul, power, square)?;
                }
                left >>= 1;
                if left > 0 {
                    square = self.binary(Binary::Mul, square, square)?;
                }
            }
            if exponent >= 0.0 {
                return Ok(power);
            }
            let one = self.float(1.0)?;
            return self.binary(Binary::Div, one, power);
        }
        let (log, exponent) = (self.unary(Unary::Log2, x)?, self.float(exponent)?);
        let product = self.binary(Binary::Mul, log, exponent)?;
        self.unary(Unary::Exp2, product)
    }

    /// The node of a value.
    pub(super) fn value(&mut self, value: Value) -> Made {
        match value {
            Value::I32(value) => self.int(value),
            Value::F32(value) => self.float(value as f32),
            Value::Bool(value) => self.boolean(value),
        }
    }

    /// Constants last, then by the hash of the expression: the same for every order in which a graph is made.
    fn order(&self, node: NodeId) -> (bool, u64) {
        (self.constant(node).is_some(), self.keys[node.index()])
    }

    fn check_divisor(&mut self, divisor: NodeId) -> Result<(), ProgramProblem> {
        let positive = match self.nodes[divisor.index()] {
            Node::Const(Const::I32(value)) => value > 0,
            Node::Scalar(scalar) => {
                self.scalars[usize::from(scalar)].positive = true;
                true
            }
            Node::Binary(Binary::Max, a, b) => {
                [a, b].iter().any(|&x| matches!(self.constant(x), Some(Const::I32(value)) if value > 0))
            }
            Node::Const(_)
            | Node::Var(_)
            | Node::Load(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => false,
        };
        if positive { Ok(()) } else { Err(ProgramProblem::Divisor) }
    }

    /// What an operation is where an operand makes it trivial.
    fn identity(
        &mut self,
        op: Binary,
        ty: Type,
        a: NodeId,
        b: NodeId,
    ) -> Result<Option<NodeId>, ProgramProblem> {
        let (zero, one) = match ty {
            Type::I32 => (Const::I32(0), Const::I32(1)),
            Type::F32 => (Const::F32(0f32.to_bits()), Const::F32(1f32.to_bits())),
            Type::Bool => (Const::Bool(false), Const::Bool(true)),
        };
        let integer = ty != Type::F32;
        let all = Const::I32(-1);
        Ok(match op {
            Binary::Add if self.is(a, zero) => Some(b),
            Binary::Add | Binary::Sub if self.is(b, zero) => Some(a),
            Binary::Sub if integer && a == b => Some(self.int(0)?),
            Binary::Sub if self.is(a, zero) => Some(self.unary(Unary::Neg, b)?),
            Binary::Mul if self.is(a, one) => Some(b),
            Binary::Mul | Binary::Div | Binary::FloorDiv if self.is(b, one) => Some(a),
            Binary::Mul if integer && (self.is(a, zero) || self.is(b, zero)) => Some(self.int(0)?),
            Binary::FloorMod if self.is(b, one) => Some(self.int(0)?),
            Binary::Shl | Binary::Shr if self.is(b, zero) => Some(a),
            Binary::Min | Binary::Max | Binary::And | Binary::Or if a == b => Some(a),
            Binary::And if self.is(a, zero) || self.is(b, zero) => Some(self.value(Value::of(zero))?),
            Binary::Or | Binary::Xor if self.is(a, zero) => Some(b),
            Binary::Or | Binary::Xor if self.is(b, zero) => Some(a),
            Binary::Xor if a == b => Some(self.value(Value::of(zero))?),
            Binary::And if ty == Type::Bool && self.is(a, one) || self.is(a, all) && op == Binary::And => {
                Some(b)
            }
            Binary::And if ty == Type::Bool && self.is(b, one) || self.is(b, all) && op == Binary::And => {
                Some(a)
            }
            Binary::Or if ty == Type::Bool && (self.is(a, one) || self.is(b, one)) => {
                Some(self.boolean(true)?)
            }
            Binary::Xor if ty == Type::Bool && self.is(a, one) => Some(self.unary(Unary::Not, b)?),
            Binary::Xor if ty == Type::Bool && self.is(b, one) => Some(self.unary(Unary::Not, a)?),
            Binary::Le | Binary::Eq if integer && a == b => Some(self.boolean(true)?),
            Binary::Lt | Binary::Ne if integer && a == b => Some(self.boolean(false)?),
            Binary::Eq if ty == Type::Bool && self.is(b, one) => Some(a),
            Binary::Eq if ty == Type::Bool && self.is(a, one) => Some(b),
            Binary::Eq if ty == Type::Bool && self.is(b, zero) => Some(self.unary(Unary::Not, a)?),
            Binary::Eq if ty == Type::Bool && self.is(a, zero) => Some(self.unary(Unary::Not, b)?),
            Binary::Ne if ty == Type::Bool => Some(self.binary(Binary::Xor, a, b)?),
            Binary::Add
            | Binary::Sub
            | Binary::Mul
            | Binary::Div
            | Binary::FloorDiv
            | Binary::FloorMod
            | Binary::Shl
            | Binary::Shr
            | Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::Min
            | Binary::Max
            | Binary::Lt
            | Binary::Le
            | Binary::Eq
            | Binary::Ne => None,
        })
    }

    /// A node of another graph of the same names, whose operands are at `places` here.
    pub(super) fn moved(&mut self, from: &Graph, node: Node, places: &[Option<NodeId>]) -> Made {
        let at = |x: NodeId| places[x.index()].unwrap_or(x);
        let node = match node {
            Node::Const(_) | Node::Var(_) => node,
            Node::Scalar(scalar) => {
                let name = &from.scalars[usize::from(scalar)].name;
                let place = self.scalars.iter().position(|own| own.name == *name);
                Node::Scalar(place.map_or(scalar, |place| place as u8))
            }
            Node::Load(array, indices) => {
                let name = &from.arrays[usize::from(array)].name;
                let place = self.arrays.iter().position(|own| own.name == *name);
                Node::Load(place.map_or(array, |place| place as u8), indices.map(|x| x.map(at)))
            }
            Node::Unary(op, x) => Node::Unary(op, at(x)),
            Node::Binary(op, a, b) => {
                if matches!(op, Binary::FloorDiv | Binary::FloorMod) {
                    self.check_divisor(at(b))?;
                }
                Node::Binary(op, at(a), at(b))
            }
            Node::Select(c, a, b) => Node::Select(at(c), at(a), at(b)),
        };
        self.push(node)
    }

    /// The node, new or as it is there already.
    fn push(&mut self, node: Node) -> Made {
        if let Some(&there) = self.index.get(&node) {
            return Ok(there);
        }
        if self.nodes.len() == MOST_NODES {
            return Err(ProgramProblem::Limit { what: "operations", most: MAX_NODES, given: MOST_NODES });
        }
        let id = NodeId(self.nodes.len() as u16);
        let deps = if let Node::Var(var) = node { Deps::of_var(var) } else { Deps::NONE };
        self.deps.push(node.operands().fold(deps, |all, x| all.with(self.deps[x.index()])));
        let (key, ty) = (self.key(node), self.result(node));
        self.keys.push(key);
        self.types.push(ty);
        self.nodes.push(node);
        self.index.insert(node, id);
        Ok(id)
    }

    fn result(&self, node: Node) -> Type {
        match node {
            Node::Const(Const::I32(_)) => Type::I32,
            Node::Const(Const::F32(_)) => Type::F32,
            Node::Const(Const::Bool(_)) => Type::Bool,
            Node::Var(var) => var.ty(),
            Node::Scalar(scalar) => self.scalars[usize::from(scalar)].ty,
            Node::Load(array, _) => self.arrays[usize::from(array)].element.loaded(),
            Node::Unary(op, x) => op.result(self.ty(x)).unwrap_or(Type::F32),
            Node::Binary(op, a, _) => op.result(self.ty(a)).unwrap_or(Type::F32),
            Node::Select(_, yes, _) => self.ty(yes),
        }
    }

    fn key(&self, node: Node) -> u64 {
        let text = match node {
            Node::Const(value) => format!("{value:?}"),
            Node::Var(var) => format!("v{}", var.name()),
            Node::Scalar(scalar) => format!("n{}", self.scalars[usize::from(scalar)].name),
            Node::Load(array, _) => format!("a{}", self.arrays[usize::from(array)].name),
            Node::Unary(op, _) => format!("u{}", op.name()),
            Node::Binary(op, ..) => format!("b{}", op.name()),
            Node::Select(..) => "select".to_owned(),
        };
        let operands = node.operands().map(|x| self.keys[x.index()]);
        operands.fold(fnv(text.as_bytes()), |key, x| {
            (key ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_add(x)
        })
    }
}

/// FNV-1a: the same on every machine and in every version.
pub(super) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

pub(super) fn operand(operation: &'static str, takes: &'static str, given: &[Type]) -> ProgramProblem {
    let given: Vec<_> = given.iter().map(|ty| ty.name()).collect();
    ProgramProblem::Operand { operation, takes, given: given.join(" and ") }
}
