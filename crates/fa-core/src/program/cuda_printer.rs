//! What the parts of a program's header are printed from: nodes by name, and what is known of each.

use super::cuda_names::{Rate, literal, scalar_of, variable};
use super::node::{Node, NodeId};
use super::whole::Program;

/// The part of an address that is made at a lower rate than its load: `o7_row`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) load: NodeId,
    pub(super) rate: Rate,
    pub(super) bits: bool,
}

/// The number of an integer that counts keys and queries one by one: along a tile it is a first number and
/// a step, whose sum is exact below 2^24 and spares a conversion for each score.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    /// The conversion, the integer, and whether its magnitude counts.
    pub(super) id: NodeId,
    pub(super) of: NodeId,
    pub(super) magnitude: bool,
    /// What the integer grows by with the query, and with the key.
    pub(super) by_query: i32,
    pub(super) by_key: i32,
}

/// A program's header as far as it is printed.
pub(super) struct Printer<'a> {
    pub(super) program: &'a Program,
    pub(super) counted: Vec<Counted>,
    /// Whether a node is needed by a result.
    pub(super) used: Vec<bool>,
    /// Whether it is kept in a struct: made at its rate, used at another.
    pub(super) kept: Vec<bool>,
    pub(super) parts: Vec<Part>,
    pub(super) text: String,
}

impl Printer<'_> {
    pub(super) fn rate(&self, node: NodeId) -> Rate {
        Rate::of(self.program.deps(node))
    }

    pub(super) fn node(&self, id: NodeId) -> Node {
        self.program.nodes()[id.index()]
    }

    /// Constants, variables and scalars are written where they are used.
    pub(super) fn is_inline(&self, id: NodeId) -> bool {
        matches!(self.node(id), Node::Const(_) | Node::Var(_) | Node::Scalar(_))
    }

    pub(super) fn is_counted(&self, id: NodeId) -> bool {
        self.counted.iter().any(|counted| counted.id == id)
    }

    /// A node's value as code at `rate` names it.
    pub(super) fn value(&self, id: NodeId, at: Rate) -> String {
        let index = id.index();
        match self.node(id) {
            Node::Const(value) => literal(value),
            Node::Scalar(scalar) => scalar_of(scalar, self.program.ty(id)),
            Node::Var(var) => variable(var, at),
            Node::Load(..) | Node::Unary(..) | Node::Binary(..) | Node::Select(..) => {
                let own = self.rate(id);
                if own.is_kept() && own != at {
                    format!("{}v{index}", owner(own))
                } else {
                    format!("n{index}")
                }
            }
        }
    }
}

pub(super) const fn suffix(rate: Rate) -> &'static str {
    match rate {
        Rate::Tile => "tile",
        Rate::Row => "row",
        Rate::Column => "column",
        Rate::Pair | Rate::Score => "score",
    }
}

pub(super) const fn owner(rate: Rate) -> &'static str {
    match rate {
        Rate::Row => "row.",
        Rate::Column => "column.",
        Rate::Tile | Rate::Pair | Rate::Score => "",
    }
}
