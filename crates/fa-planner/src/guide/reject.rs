//! Rejections as data: the limit that a candidate breaks, by how much, and which of many comes nearest.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tally::{Tally, tally};

/// The products of the two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MmaName {
    /// Forward, `Q K^T`: `[tile_m, tile_n]`.
    S,
    /// Forward, `P V`: `[tile_m, hdv]`.
    O,
    /// Backward, `Q K^T` and `dO V^T`, which share their layout: `[tile_m, tile_n]`.
    SdP,
    /// Backward, `dS^T Q`: `[tile_n, hd]`.
    DK,
    /// Backward, `P^T dO`: `[tile_n, hdv]`.
    DV,
    /// Backward, `dS K`: `[tile_m, hd]`.
    DQ,
}

/// An axis of a product's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Axis {
    /// Rows: 64 per instruction and warpgroup.
    M,
    /// Columns: multiples of 8 per warpgroup.
    N,
}

/// The limit that a candidate breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// A product's side cannot be shared out over the warpgroups in whole instructions.
    MmaShape {
        /// The product.
        mma: MmaName,
        /// The side, after the swap if there is one.
        axis: Axis,
        /// It must be a multiple of this.
        need: u32,
        /// Its extent.
        have: u32,
    },
    /// More registers per thread than the budget.
    RegOverflow {
        /// Live at the peak.
        need: u32,
        /// The budget.
        have: u32,
    },
    /// More shared memory than the budget, in bytes.
    SmemOverflow {
        /// The buffers' sum.
        need: u32,
        /// The budget.
        have: u32,
    },
}

/// A candidate and the first limit that it breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejected<S> {
    /// The candidate.
    pub spec: S,
    /// The limit.
    pub reason: Reason,
}

/// The rejections by one limit in a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit<S> {
    /// How many it rejected.
    pub rejected: usize,
    /// Of these the one that misses by least, the first enumerated among equals; `None` when there are none.
    pub nearest: Option<Rejected<S>>,
}

/// How many candidates there were, and what became of them. A candidate counts for the first limit that it
/// breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Explain<S> {
    /// All that were enumerated.
    pub candidates: usize,
    /// Those that fit.
    pub feasible: usize,
    /// Checked first: whole instructions per warpgroup.
    pub mma_shape: Limit<S>,
    /// Checked second: registers per thread.
    pub registers: Limit<S>,
    /// Checked last: shared memory.
    pub smem: Limit<S>,
}

/// The three limits, in the order in which they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    MmaShape,
    Registers,
    Smem,
}

impl Reason {
    const fn kind(&self) -> Kind {
        match self {
            Reason::MmaShape { .. } => Kind::MmaShape,
            Reason::RegOverflow { .. } => Kind::Registers,
            Reason::SmemOverflow { .. } => Kind::Smem,
        }
    }

    /// By how much the limit is missed, in the limit's own unit: to the nearest multiple, or above the
    /// budget.
    pub const fn shortfall(&self) -> u32 {
        match *self {
            Reason::MmaShape { need, have, .. } => {
                let above = have % need;
                // Below one multiple the nearest one is above.
                if have < need || need - above < above { need - above } else { above }
            }
            Reason::RegOverflow { need, have } | Reason::SmemOverflow { need, have } => need - have,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::MmaShape { mma, axis, need, have } => {
                write!(f, "{axis:?} of {mma:?} must be a multiple of {need}, is {have}")
            }
            Reason::RegOverflow { need, have } => write!(f, "needs {need} registers per thread, has {have}"),
            Reason::SmemOverflow { need, have } => {
                let kib = |bytes: &u32| f64::from(*bytes) / 1024.0;
                write!(f, "needs {:.1} KiB of shared memory, has {:.1}", kib(need), kib(have))
            }
        }
    }
}

impl<S: Copy> Explain<S> {
    /// Counts the rejected by limit and finds the nearest of each.
    pub fn of(feasible: usize, rejected: &[Rejected<S>]) -> Explain<S> {
        let none = Limit { rejected: 0, nearest: None };
        let candidates = feasible + rejected.len();
        let mut explain = Explain { candidates, feasible, mma_shape: none, registers: none, smem: none };
        let misses =
            rejected.iter().map(|miss| (miss.reason.kind(), f64::from(miss.reason.shortfall()), *miss));
        for Tally { limit, rejected, nearest } in tally(misses) {
            let limit = match limit {
                Kind::MmaShape => &mut explain.mma_shape,
                Kind::Registers => &mut explain.registers,
                Kind::Smem => &mut explain.smem,
            };
            *limit = Limit { rejected, nearest: Some(nearest) };
        }
        explain
    }

    /// The limits by name, in the order in which they are checked.
    pub fn limits(&self) -> [(&'static str, &Limit<S>); 3] {
        [("MMA shape", &self.mma_shape), ("registers", &self.registers), ("shared memory", &self.smem)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn shape(need: u32, have: u32) -> Reason {
        Reason::MmaShape { mma: MmaName::DQ, axis: Axis::M, need, have }
    }

    #[test]
    fn the_nearest_miss_is_the_first_that_misses_by_least() {
        let rejected: Vec<Rejected<u32>> = [
            shape(128, 64),
            shape(64, 80),
            Reason::RegOverflow { need: 240, have: 216 },
            Reason::RegOverflow { need: 136, have: 128 },
            shape(64, 112),
            Reason::RegOverflow { need: 224, have: 216 },
        ]
        .into_iter()
        .zip(0..)
        .map(|(reason, spec)| Rejected { spec, reason })
        .collect();
        let explain = Explain::of(4, &rejected);
        assert_eq!((explain.candidates, explain.feasible), (10, 4));
        let found = |limit: &Limit<u32>| (limit.rejected, limit.nearest.map(|n| n.spec));
        assert_eq!(found(&explain.mma_shape), (3, Some(1)));
        assert_eq!(found(&explain.registers), (3, Some(3)));
        assert_eq!(found(&explain.smem), (0, None));
    }

    #[test]
    fn shortfall_is_the_way_to_the_nearest_multiple() {
        for (need, have, short) in [(128, 64, 64), (64, 80, 16), (64, 112, 16), (24, 128, 8), (64, 40, 24)] {
            assert_eq!(shape(need, have).shortfall(), short, "{have} to a multiple of {need}");
        }
    }
}
