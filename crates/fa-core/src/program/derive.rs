//! Derivatives of the score: by `s`, and by the loads of arrays that want a gradient.
//!
//! Where the score does not depend smoothly on something, the derivative is that of the branch taken: of
//! equal operands of min and max, the first one's; of abs at 0, 0; of floor, comparisons and integers, 0.
//! What a select does not take has the derivative 0, whatever it is.

use std::collections::BTreeMap;

use super::error::{ProgramProblem, limit};
use super::graph::Graph;
use super::node::{Binary, Const, Node, NodeId, Unary};
use super::types::{Type, Var};

/// The derivative of the score by one load of an array that wants a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gradient {
    /// The array, by its place in [`Program::arrays`](super::Program::arrays).
    pub array: usize,
    /// The load.
    pub load: NodeId,
    /// d score / d load.
    pub slope: NodeId,
}

/// The most nodes with derivatives.
const MOST: usize = 2048;

/// d score / d s, and the gradients.
pub(super) fn derivatives(
    graph: &mut Graph,
    score: NodeId,
) -> Result<(NodeId, Vec<Gradient>), ProgramProblem> {
    let zero = graph.float(0.0)?;
    let one = graph.float(1.0)?;
    let mut adjoint = Adjoint { graph, zero, by_node: vec![None; score.index() + 1] };
    adjoint.add(score, one)?;
    let (mut slope, mut gradients) = (zero, Vec::new());
    for index in (0..=score.index()).rev() {
        let id = NodeId(index as u16);
        let Some(by) = adjoint.by_node[index] else { continue };
        let node = adjoint.graph.nodes[index];
        if node == Node::Var(Var::S) {
            slope = by;
        } else if let Node::Load(array, _) = node {
            if adjoint.graph.arrays[usize::from(array)].gradient {
                gradients.push(Gradient { array: array.into(), load: id, slope: by });
            }
        } else {
            adjoint.pass(id, node, by)?;
        }
        limit("nodes with its derivatives", MOST, adjoint.graph.nodes.len())?;
    }
    gradients.reverse();
    Ok((slope, gradients))
}

struct Adjoint<'a> {
    graph: &'a mut Graph,
    zero: NodeId,
    /// d score / d node, where something depends on it smoothly.
    by_node: Vec<Option<NodeId>>,
}

impl Adjoint<'_> {
    fn pass(&mut self, id: NodeId, node: Node, by: NodeId) -> Result<(), ProgramProblem> {
        match node {
            Node::Unary(op, x) => self.unary(op, x, id, by),
            Node::Binary(op, a, b) => self.binary(op, a, b, id, by),
            Node::Select(condition, yes, no) => {
                let (first, second) = (
                    self.graph.select(condition, by, self.zero)?,
                    self.graph.select(condition, self.zero, by)?,
                );
                self.add(yes, first)?;
                self.add(no, second)
            }
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) | Node::Load(..) => Ok(()),
        }
    }

    fn unary(&mut self, op: Unary, x: NodeId, y: NodeId, by: NodeId) -> Result<(), ProgramProblem> {
        if self.graph.ty(x) != Type::F32 || self.graph.ty(y) != Type::F32 {
            return Ok(());
        }
        let graph = &mut *self.graph;
        let local = match op {
            Unary::Neg => graph.float(-1.0)?,
            Unary::Abs => {
                let (minus, one) = (graph.float(-1.0)?, graph.float(1.0)?);
                let (positive, negative) =
                    (graph.binary(Binary::Lt, self.zero, x)?, graph.binary(Binary::Lt, x, self.zero)?);
                let otherwise = graph.select(negative, minus, self.zero)?;
                graph.select(positive, one, otherwise)?
            }
            Unary::Exp => y,
            Unary::Exp2 => {
                let factor = graph.float(std::f32::consts::LN_2)?;
                graph.binary(Binary::Mul, y, factor)?
            }
            Unary::Log | Unary::Log2 => {
                let factor = graph.float(if op == Unary::Log { 1.0 } else { std::f32::consts::LOG2_E })?;
                graph.binary(Binary::Div, factor, x)?
            }
            Unary::Tanh => {
                let (square, one) = (graph.binary(Binary::Mul, y, y)?, graph.float(1.0)?);
                graph.binary(Binary::Sub, one, square)?
            }
            Unary::Sigmoid => {
                let one = graph.float(1.0)?;
                let other = graph.binary(Binary::Sub, one, y)?;
                graph.binary(Binary::Mul, y, other)?
            }
            Unary::Sqrt => {
                let half = graph.float(0.5)?;
                graph.binary(Binary::Div, half, y)?
            }
            Unary::Rsqrt => {
                let (square, factor) = (graph.binary(Binary::Mul, y, y)?, graph.float(-0.5)?);
                let cube = graph.binary(Binary::Mul, square, y)?;
                graph.binary(Binary::Mul, cube, factor)?
            }
            Unary::Sin => graph.unary(Unary::Cos, x)?,
            Unary::Cos => {
                let sine = graph.unary(Unary::Sin, x)?;
                graph.unary(Unary::Neg, sine)?
            }
            Unary::Floor | Unary::Not | Unary::ToF32 | Unary::ToI32 => return Ok(()),
        };
        let scaled = self.scaled(by, local)?;
        self.add(x, scaled)
    }

    fn binary(
        &mut self,
        op: Binary,
        a: NodeId,
        b: NodeId,
        y: NodeId,
        by: NodeId,
    ) -> Result<(), ProgramProblem> {
        if self.graph.ty(y) != Type::F32 {
            return Ok(());
        }
        match op {
            Binary::Add => {
                self.add(a, by)?;
                self.add(b, by)
            }
            Binary::Sub => {
                self.add(a, by)?;
                let minus = self.graph.float(-1.0)?;
                let negative = self.scaled(by, minus)?;
                self.add(b, negative)
            }
            Binary::Mul => {
                let (first, second) = (self.scaled(by, b)?, self.scaled(by, a)?);
                self.add(a, first)?;
                self.add(b, second)
            }
            Binary::Div => {
                let one = self.graph.float(1.0)?;
                let inverse = self.graph.binary(Binary::Div, one, b)?;
                let first = self.scaled(by, inverse)?;
                self.add(a, first)?;
                if !self.is_smooth(b) {
                    return Ok(());
                }
                let ratio = self.graph.binary(Binary::Div, y, b)?;
                let local = self.graph.unary(Unary::Neg, ratio)?;
                let second = self.scaled(by, local)?;
                self.add(b, second)
            }
            Binary::Min | Binary::Max => {
                let (low, high) = if op == Binary::Min { (a, b) } else { (b, a) };
                let first = self.graph.binary(Binary::Le, low, high)?;
                let (to_a, to_b) =
                    (self.graph.select(first, by, self.zero)?, self.graph.select(first, self.zero, by)?);
                self.add(a, to_a)?;
                self.add(b, to_b)
            }
            Binary::FloorDiv
            | Binary::FloorMod
            | Binary::Shl
            | Binary::Shr
            | Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::Lt
            | Binary::Le
            | Binary::Eq
            | Binary::Ne => Ok(()),
        }
    }

    /// Whether a node depends on the score or on an array with a gradient.
    fn is_smooth(&self, node: NodeId) -> bool {
        let mut needed = vec![false; node.index() + 1];
        needed[node.index()] = true;
        for index in (0..=node.index()).rev().filter(|&i| self.graph.types[i] == Type::F32) {
            if needed[index] {
                match self.graph.nodes[index] {
                    Node::Var(Var::S) => return true,
                    Node::Load(array, _) if self.graph.arrays[usize::from(array)].gradient => return true,
                    Node::Load(..) => {}
                    own @ (Node::Const(_)
                    | Node::Var(_)
                    | Node::Scalar(_)
                    | Node::Unary(..)
                    | Node::Binary(..)
                    | Node::Select(..)) => {
                        own.operands().for_each(|x| needed[x.index()] = true);
                    }
                }
            }
        }
        false
    }

    /// `by * local`. Selects that are 0 in a branch stay outside, also within others and in sums, so that 0
    /// is 0 there, even times infinity.
    fn scaled(&mut self, by: NodeId, local: NodeId) -> Result<NodeId, ProgramProblem> {
        let mut vanishing = BTreeMap::new();
        self.vanishes(by, &mut vanishing);
        self.scaled_within(by, local, &vanishing, &mut BTreeMap::new())
    }

    /// Whether a derivative is 0 where a select says so; noted for all nodes that were asked.
    fn vanishes(&self, by: NodeId, known: &mut BTreeMap<NodeId, bool>) -> bool {
        if let Some(&found) = known.get(&by) {
            return found;
        }
        let found = by == self.zero
            || match self.graph.nodes[by.index()] {
                Node::Select(_, a, b) | Node::Binary(Binary::Add, a, b) => {
                    let first = self.vanishes(a, known);
                    self.vanishes(b, known) || first
                }
                Node::Const(_)
                | Node::Var(_)
                | Node::Scalar(_)
                | Node::Load(..)
                | Node::Unary(..)
                | Node::Binary(..) => false,
            };
        known.insert(by, found);
        found
    }

    fn scaled_within(
        &mut self,
        by: NodeId,
        local: NodeId,
        vanishing: &BTreeMap<NodeId, bool>,
        done: &mut BTreeMap<NodeId, NodeId>,
    ) -> Result<NodeId, ProgramProblem> {
        if by == self.zero {
            return Ok(self.zero);
        }
        if let Some(&made) = done.get(&by) {
            return Ok(made);
        }
        let made = if !vanishing.get(&by).is_some_and(|&vanishes| vanishes) {
            self.product(by, local)?
        } else if let Node::Select(condition, yes, no) = self.graph.nodes[by.index()] {
            let yes = self.scaled_within(yes, local, vanishing, done)?;
            let no = self.scaled_within(no, local, vanishing, done)?;
            self.graph.select(condition, yes, no)?
        } else if let Node::Binary(Binary::Add, a, b) = self.graph.nodes[by.index()] {
            let a = self.scaled_within(a, local, vanishing, done)?;
            let b = self.scaled_within(b, local, vanishing, done)?;
            self.sum(a, b)?
        } else {
            self.product(by, local)?
        };
        done.insert(by, made);
        Ok(made)
    }

    fn product(&mut self, by: NodeId, local: NodeId) -> Result<NodeId, ProgramProblem> {
        if self.graph.constant(local) == Some(Const::F32((-1f32).to_bits())) {
            return self.graph.unary(Unary::Neg, by);
        }
        // c * (y / c), as of a soft cap.
        if let (Node::Binary(Binary::Mul, x, y), Node::Binary(Binary::Div, one, divisor)) =
            (self.graph.nodes[by.index()], self.graph.nodes[local.index()])
            && self.graph.constant(one) == Some(Const::F32(1f32.to_bits()))
            && (x == divisor || y == divisor)
        {
            return Ok(if x == divisor { y } else { x });
        }
        self.graph.binary(Binary::Mul, by, local)
    }

    fn add(&mut self, node: NodeId, by: NodeId) -> Result<(), ProgramProblem> {
        if self.graph.ty(node) != Type::F32 || by == self.zero || !self.is_smooth(node) {
            return Ok(());
        }
        let sum = match self.by_node[node.index()] {
            None => by,
            Some(before) => self.sum(before, by)?,
        };
        self.by_node[node.index()] = Some(sum);
        Ok(())
    }

    /// The sum; of two selects of which one is 0 where the other is not, one select.
    fn sum(&mut self, a: NodeId, b: NodeId) -> Result<NodeId, ProgramProblem> {
        if let (Node::Select(first, yes_a, no_a), Node::Select(second, yes_b, no_b)) =
            (self.graph.nodes[a.index()], self.graph.nodes[b.index()])
            && first == second
        {
            let yes = self.sum(yes_a, yes_b)?;
            let no = self.sum(no_a, no_b)?;
            return self.graph.select(first, yes, no);
        }
        if a == self.zero {
            return Ok(b);
        }
        if b == self.zero { Ok(a) } else { self.graph.binary(Binary::Add, a, b) }
    }
}
