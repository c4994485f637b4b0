//! Runs of queries, and of keys, that a node does not tell apart: those of a block.

use super::node::{Binary, Const, Node, NodeId};
use super::types::{Deps, Var};
use super::whole::Program;

/// The longest run that is said.
const MAX_RUN: u32 = 1 << 15;

/// Runs of so many pairs are blocks, of which a tile has few.
const BLOCK_PAIRS: u32 = 1024;

/// A node whose values stay the same within every run of `length` from 0 on, all numbers if 0.
#[derive(Clone, Copy)]
struct Run {
    length: u32,
    /// Whether it is the number of the run.
    is_number: bool,
}

impl Program {
    /// How many queries, and how many keys, the mask does not tell apart: it is the same for all pairs whose
    /// numbers, divided by these and rounded down, are equal. Powers of 2 where all would do.
    pub fn mask_runs(&self) -> [u32; 2] {
        self.mask().map_or([MAX_RUN; 2], |mask| self.runs(mask))
    }

    /// Whether a load differs by blocks of queries and keys alone, as lists of blocks do.
    pub fn loads_by_blocks(&self, load: NodeId) -> bool {
        let deps = self.deps(load);
        let [queries, keys] = self.runs(load);
        deps.has(Deps::QUERY) && deps.has(Deps::KEY) && queries.saturating_mul(keys) >= BLOCK_PAIRS
    }

    /// Whether the mask reads lists of blocks of queries and keys.
    pub fn mask_lists_blocks(&self) -> bool {
        let is_list =
            |at: usize| matches!(self.nodes()[at], Node::Load(..)) && self.loads_by_blocks(NodeId(at as u16));
        self.mask().is_some_and(|mask| (0..=mask.index()).any(is_list))
    }

    fn runs(&self, node: NodeId) -> [u32; 2] {
        [Var::Q, Var::K].map(|var| {
            let mut runs: Vec<Run> = Vec::with_capacity(node.index() + 1);
            for &own in &self.nodes()[..=node.index()] {
                let run = run_of(self.nodes(), own, var, &runs);
                runs.push(run);
            }
            match runs[node.index()].length {
                0 => MAX_RUN,
                length if length <= MAX_RUN => length,
                length => common(length, MAX_RUN),
            }
        })
    }
}

fn run_of(nodes: &[Node], node: Node, var: Var, runs: &[Run]) -> Run {
    let run = |x: NodeId| runs[x.index()];
    let exact = |x: NodeId| match nodes[x.index()] {
        Node::Const(Const::I32(value)) => Some(value),
        Node::Const(_)
        | Node::Var(_)
        | Node::Scalar(_)
        | Node::Load(..)
        | Node::Unary(..)
        | Node::Binary(..)
        | Node::Select(..) => None,
    };
    let divided = match node {
        Node::Var(own) if own == var => Some((1, 1)),
        Node::Binary(Binary::FloorDiv, x, by) if run(x).is_number => {
            exact(by).map(|by| (run(x).length, by.max(1).unsigned_abs()))
        }
        Node::Binary(Binary::Shr, x, by) if run(x).is_number => {
            exact(by).map(|by| (run(x).length, 1 << if (0..31).contains(&by) { by } else { 30 }))
        }
        Node::Const(_)
        | Node::Var(_)
        | Node::Scalar(_)
        | Node::Load(..)
        | Node::Unary(..)
        | Node::Binary(..)
        | Node::Select(..) => None,
    };
    if let Some(length) = divided.and_then(|(length, by): (u32, u32)| length.checked_mul(by)) {
        return Run { length, is_number: true };
    }
    let length = node.operands().fold(0, |length, x| common(length, run(x).length));
    Run { length, is_number: false }
}

fn common(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common(b, a % b) }
}
