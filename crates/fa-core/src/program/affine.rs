//! How a program's score depends on the score that it is given.

use super::cuda_names::Rate;
use super::error::ProgramProblem;
use super::graph::Graph;
use super::node::{Binary, Const, Node, NodeId, Unary};
use super::types::{Deps, Type, Var};

/// What a program does to a score `s`. Kernels compute what does not depend on `s` before there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreClass {
    /// `s + addend`: the derivative by `s` is 1.
    Additive {
        /// Does not depend on `s`.
        addend: NodeId,
    },
    /// `gain * s + addend`.
    Affine {
        /// Does not depend on `s`.
        gain: NodeId,
        /// Does not depend on `s`.
        addend: NodeId,
    },
    /// Anything else.
    General,
}

impl ScoreClass {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            ScoreClass::Additive { .. } => "additive",
            ScoreClass::Affine { .. } => "affine",
            ScoreClass::General => "general",
        }
    }
}

/// `gain * s + addend`.
#[derive(Clone, Copy)]
struct Line {
    gain: NodeId,
    addend: NodeId,
}

pub(super) fn class(graph: &mut Graph, score: NodeId) -> Result<ScoreClass, ProgramProblem> {
    let (zero, one) = (graph.float(0.0)?, graph.float(1.0)?);
    let mut lines: Vec<Option<Line>> = Vec::with_capacity(score.index() + 1);
    for index in 0..=score.index() {
        let id = NodeId(index as u16);
        let line = if graph.ty(id) != Type::F32 {
            None
        } else if graph.deps[index].has(Deps::SCORE) {
            line_of(graph, &lines, graph.nodes[index], zero, one)?
        } else {
            Some(Line { gain: zero, addend: id })
        };
        lines.push(line);
    }
    Ok(match lines[score.index()] {
        Some(Line { gain, addend }) if gain == one => ScoreClass::Additive { addend },
        Some(Line { gain, addend }) => ScoreClass::Affine { gain, addend },
        None => ScoreClass::General,
    })
}

fn line_of(
    graph: &mut Graph,
    lines: &[Option<Line>],
    node: Node,
    zero: NodeId,
    one: NodeId,
) -> Result<Option<Line>, ProgramProblem> {
    let line = |x: NodeId| lines[x.index()];
    Ok(match node {
        Node::Var(Var::S) => Some(Line { gain: one, addend: zero }),
        Node::Unary(Unary::Neg, x) => {
            let Some(x) = line(x) else { return Ok(None) };
            Some(Line { gain: graph.unary(Unary::Neg, x.gain)?, addend: graph.unary(Unary::Neg, x.addend)? })
        }
        Node::Binary(op @ (Binary::Add | Binary::Sub), a, b) => {
            let (Some(a), Some(b)) = (line(a), line(b)) else { return Ok(None) };
            Some(Line {
                gain: graph.binary(op, a.gain, b.gain)?,
                addend: graph.binary(op, a.addend, b.addend)?,
            })
        }
        Node::Binary(op @ (Binary::Mul | Binary::Div), a, b) => {
            let (Some(a), Some(b)) = (line(a), line(b)) else { return Ok(None) };
            let (own, factor) = match (op, a.gain == zero, b.gain == zero) {
                (Binary::Mul, true, false) => (b, a.addend),
                (_, false, true) => (a, b.addend),
                _ => return Ok(None),
            };
            let addend = if own.addend == zero { zero } else { graph.binary(op, own.addend, factor)? };
            let gain = graph.binary(op, own.gain, factor)?;
            Some(Line { gain, addend })
        }
        Node::Select(condition, a, b) if !graph.deps[condition.index()].has(Deps::SCORE) => {
            let (Some(a), Some(b)) = (line(a), line(b)) else { return Ok(None) };
            Some(Line {
                gain: graph.select(condition, a.gain, b.gain)?,
                addend: graph.select(condition, a.addend, b.addend)?,
            })
        }
        Node::Const(_)
        | Node::Var(_)
        | Node::Scalar(_)
        | Node::Load(..)
        | Node::Unary(..)
        | Node::Binary(..)
        | Node::Select(..) => None,
    })
}

/// `x` times log2(e), where it costs nothing for each score if it can: in a factor or a term that is made
/// less often.
pub(super) fn in_exponents(graph: &mut Graph, x: NodeId) -> Result<NodeId, ProgramProblem> {
    let log2e = graph.float(std::f32::consts::LOG2_E)?;
    let mut absorbed: Vec<Option<NodeId>> = Vec::with_capacity(x.index() + 1);
    for index in 0..=x.index() {
        let id = NodeId(index as u16);
        let own = |x: NodeId| absorbed[x.index()];
        let made = if graph.ty(id) != Type::F32 {
            None
        } else if let Node::Const(Const::F32(bits)) = graph.nodes[index] {
            let number = f32::from_bits(bits);
            let exponent = number * std::f32::consts::LOG2_E;
            // Finite where the number is: minus infinity alone hides a key.
            let is_finite = number.is_finite();
            Some(graph.float(if is_finite { exponent.clamp(-f32::MAX, f32::MAX) } else { exponent })?)
        } else if Rate::of(graph.deps[index]).is_kept() {
            Some(graph.binary(Binary::Mul, id, log2e)?)
        } else {
            match graph.nodes[index] {
                Node::Unary(Unary::Neg, x) => own(x).map(|x| graph.unary(Unary::Neg, x)).transpose()?,
                Node::Binary(op @ Binary::Mul, a, b) => match (own(a), own(b)) {
                    (Some(a), _) => Some(graph.binary(op, a, b)?),
                    (None, Some(b)) => Some(graph.binary(op, a, b)?),
                    (None, None) => None,
                },
                Node::Binary(op @ Binary::Div, a, b) => own(a).map(|a| graph.binary(op, a, b)).transpose()?,
                Node::Binary(op @ (Binary::Add | Binary::Sub), a, b) => {
                    own(a).zip(own(b)).map(|(a, b)| graph.binary(op, a, b)).transpose()?
                }
                Node::Select(c, a, b) => {
                    own(a).zip(own(b)).map(|(a, b)| graph.select(c, a, b)).transpose()?
                }
                Node::Const(_)
                | Node::Var(_)
                | Node::Scalar(_)
                | Node::Load(..)
                | Node::Unary(..)
                | Node::Binary(..) => None,
            }
        };
        absorbed.push(made);
    }
    match absorbed[x.index()] {
        Some(made) => Ok(made),
        None => graph.binary(Binary::Mul, x, log2e),
    }
}
