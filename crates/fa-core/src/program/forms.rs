//! How arrays are indexed: what an index follows, and so how the gradient of an array is summed.

use super::node::{Binary, Const, Node, NodeId, Unary};
use super::types::{Deps, Var};
use super::whole::Program;

/// What an index of a load follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// `b`: sequences have elements of their own, unless the axis has one.
    Batch,
    /// `h`
    Head,
    /// `hk`
    HeadKv,
    /// Something else that is one for a tile: several sequences or heads may share an element.
    Tile,
    /// `q`
    Query,
    /// `k`
    Key,
    /// The distance of the query and the key, clamped or not, plus something that is one for a tile.
    Diagonal,
    /// Anything else.
    Other,
}

/// How the gradient of an array is summed, by what its indices follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientForm {
    /// Over what is not an axis of the array: an element for each query and key.
    Pair,
    /// Over keys.
    Row,
    /// Over queries.
    Column,
    /// Over queries and keys.
    Tile,
    /// Over the pairs of one distance.
    Diagonal,
    /// Over whatever an index leads to.
    Gather,
}

impl GradientForm {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            GradientForm::Pair => "pair",
            GradientForm::Row => "row",
            GradientForm::Column => "column",
            GradientForm::Tile => "tile",
            GradientForm::Diagonal => "diagonal",
            GradientForm::Gather => "gather",
        }
    }
}

impl Program {
    /// What the indices of `load` follow; none for other nodes.
    pub fn axes(&self, load: NodeId) -> Vec<Axis> {
        let node = self.nodes()[load.index()];
        if !matches!(node, Node::Load(..)) {
            return Vec::new();
        }
        node.operands().map(|index| self.axis(index)).collect()
    }

    fn axis(&self, index: NodeId) -> Axis {
        match self.nodes()[index.index()] {
            Node::Var(Var::B) => return Axis::Batch,
            Node::Var(Var::H) => return Axis::Head,
            Node::Var(Var::Hk) => return Axis::HeadKv,
            Node::Var(Var::Q) => return Axis::Query,
            Node::Var(Var::K) => return Axis::Key,
            Node::Var(Var::S | Var::Sq | Var::Sk | Var::Off)
            | Node::Const(_)
            | Node::Scalar(_)
            | Node::Load(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => {}
        }
        let deps = self.deps(index);
        if !deps.has(Deps::QUERY) && !deps.has(Deps::KEY) && !deps.has(Deps::SCORE) {
            return Axis::Tile;
        }
        match self.slopes(index, true) {
            Some((query, key)) if query == -key && query.abs() == 1 => Axis::Diagonal,
            Some(_) | None => Axis::Other,
        }
    }

    /// Whether an integer rises with the query, else with the key, if it is their distance plus something
    /// that is one for a tile, not clamped.
    pub(super) fn distance(&self, index: NodeId) -> Option<bool> {
        match self.slopes(index, false)? {
            (1, -1) => Some(true),
            (-1, 1) => Some(false),
            _ => None,
        }
    }

    /// The factors of `q` and `k` in an integer that is a line in both; `clamped` ones too, or not.
    fn slopes(&self, node: NodeId, clamped: bool) -> Option<(i64, i64)> {
        let deps = self.deps(node);
        if !deps.has(Deps::QUERY) && !deps.has(Deps::KEY) {
            return (!deps.has(Deps::SCORE)).then_some((0, 0));
        }
        match self.nodes()[node.index()] {
            Node::Var(Var::Q) => Some((1, 0)),
            Node::Var(Var::K) => Some((0, 1)),
            Node::Unary(Unary::Neg, x) => self.slopes(x, clamped).map(|(query, key)| (-query, -key)),
            Node::Binary(Binary::Add, a, b) => {
                let (a, b) = (self.slopes(a, clamped)?, self.slopes(b, clamped)?);
                Some((a.0 + b.0, a.1 + b.1))
            }
            Node::Binary(Binary::Sub, a, b) => {
                let (a, b) = (self.slopes(a, clamped)?, self.slopes(b, clamped)?);
                Some((a.0 - b.0, a.1 - b.1))
            }
            // A bound that is one for a tile; the index is the line between the bounds.
            Node::Binary(Binary::Min | Binary::Max, a, b) if clamped => {
                match (self.slopes(a, clamped)?, self.slopes(b, clamped)?) {
                    ((0, 0), line) | (line, (0, 0)) => Some(line),
                    _ => None,
                }
            }
            Node::Binary(Binary::Mul, a, b) => {
                let factor = |x: NodeId| {
                    let Node::Const(Const::I32(value)) = self.nodes()[x.index()] else { return None };
                    Some(i64::from(value))
                };
                let (line, by) = match (factor(a), factor(b)) {
                    (Some(by), _) => (self.slopes(b, clamped)?, by),
                    (_, Some(by)) => (self.slopes(a, clamped)?, by),
                    (None, None) => return None,
                };
                Some((line.0.checked_mul(by)?, line.1.checked_mul(by)?))
            }
            Node::Const(_)
            | Node::Var(_)
            | Node::Scalar(_)
            | Node::Load(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => None,
        }
    }

    /// How the gradient by `load` is summed.
    pub fn form(&self, load: NodeId) -> GradientForm {
        let axes = self.axes(load);
        let count = |axis| axes.iter().filter(|&&own| own == axis).count();
        match (count(Axis::Query), count(Axis::Key), count(Axis::Diagonal), count(Axis::Other)) {
            (1, 1, 0, 0) => GradientForm::Pair,
            (1, 0, 0, 0) => GradientForm::Row,
            (0, 1, 0, 0) => GradientForm::Column,
            (0, 0, 0, 0) => GradientForm::Tile,
            (0, 0, 1, 0) => GradientForm::Diagonal,
            _ => GradientForm::Gather,
        }
    }

    /// What the mask depends on; nothing without one.
    pub fn mask_deps(&self) -> Deps {
        self.mask().map_or(Deps::NONE, |mask| self.deps(mask))
    }
}
