//! What a program costs, and its expressions as they are shown.

use super::cuda_names::Rate;
use super::node::{Node, NodeId};
use super::print;
use super::whole::Program;

/// How many operations and loads a result takes, by how often they are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Once per tile.
    pub tile: usize,
    /// Once per query.
    pub row: usize,
    /// Once per key.
    pub column: usize,
    /// For each query and key, without the score.
    pub pair: usize,
    /// For each score.
    pub score: usize,
}

impl Program {
    /// A node as one expression, without names for what it uses more than once; `..` where it is long.
    pub fn expression(&self, node: NodeId) -> String {
        print::expression(&self.graph, node)
    }

    /// What the result `root` takes.
    pub fn operations(&self, root: NodeId) -> Operations {
        let mut needed = vec![false; root.index() + 1];
        needed[root.index()] = true;
        let mut count = Operations::default();
        for index in (0..=root.index()).rev() {
            let id = NodeId(index as u16);
            let node = self.nodes()[index];
            if !needed[index] || matches!(node, Node::Const(_) | Node::Var(_) | Node::Scalar(_)) {
                continue;
            }
            node.operands().for_each(|x| needed[x.index()] = true);
            match Rate::of(self.deps(id)) {
                Rate::Tile => count.tile += 1,
                Rate::Row => count.row += 1,
                Rate::Column => count.column += 1,
                Rate::Pair => count.pair += 1,
                Rate::Score => count.score += 1,
            }
        }
        count
    }
}
