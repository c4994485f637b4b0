//! The sequences of a batch: the number of rows of each, their layout, and the arrays that describe them to a
//! kernel.

mod ragged;

use fa_core::{Lengths, Mask, Problem, Side};
use fa_cpu::OwnedExtras;

use crate::random::Random;

pub use ragged::{GARBAGE, Ragged, Store};

/// The queries and the keys of every sequence of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequences {
    /// The queries.
    pub q: Ragged,
    /// The keys.
    pub k: Ragged,
}

impl Sequences {
    /// The sequences of lengths that the host knows.
    pub fn uniform(lengths: &Lengths) -> Sequences {
        let batch = lengths.sequences();
        let (q, k) = (lengths.max_q(), lengths.max_k());
        Sequences { q: Ragged::uniform(batch, q), k: Ragged::uniform(batch, k) }
    }

    /// Sequences as long as the bounds allow, or as the rows divide among them: a stand-in for
    /// unknown lengths.
    pub fn filling(lengths: &Lengths) -> Sequences {
        let mut random = Random::new(1);
        let mut side = |side: Side| Ragged::filling(lengths.sequences(), side, &mut random);
        Sequences { q: side(lengths.q()), k: side(lengths.k()) }
    }

    /// Queries and keys of the same lengths, both end to end.
    pub fn packed(lens: &[usize]) -> Sequences {
        Sequences { q: Ragged::packed(lens, 0), k: Ragged::packed(lens, 0) }
    }

    /// The lengths as the host knows them.
    pub fn lengths(&self) -> Lengths {
        Lengths::of(self.q.sequences(), self.q.side(), self.k.side())
    }

    /// Shapes of Q, K, V and O in memory, in elements: see [`Ragged::shape`].
    pub fn shapes(&self, problem: &Problem) -> [[usize; 4]; 4] {
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, types, .. } = *problem;
        [
            self.q.shape(heads_q, head_dim),
            self.k.shape(heads_kv, types.kv.elements(problem.head_dim_k())),
            self.k.shape(heads_kv, types.kv.elements(head_dim_v)),
            self.q.shape(heads_q, head_dim_v),
        ]
    }

    /// Starts, lengths and the page table, where there are any; no slopes and no sinks.
    pub fn arrays(&self) -> OwnedExtras {
        let Sequences { q, k } = self;
        OwnedExtras {
            cu_seqlens_q: q.cu().map(<[i32]>::to_vec),
            cu_seqlens_k: k.cu().map(<[i32]>::to_vec),
            seqused_q: q.used(),
            seqused_k: k.used(),
            page_table: k.table().map(<[i32]>::to_vec),
            ..OwnedExtras::NONE
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.q.sequences()
    }

    /// Visible (query, key) pairs of one head over all sequences.
    pub fn pairs(&self, mask: &Mask) -> f64 {
        (0..self.count()).map(|b| mask.pairs(self.q.len(b), self.k.len(b)) as f64).sum()
    }

    /// The same memory with other lengths: see [`Ragged::drawn_again`].
    #[must_use]
    pub fn drawn_again(&self, seed: u64) -> Sequences {
        let mut random = Random::new(seed);
        random.bits();
        Sequences { q: self.q.drawn_again(&mut random), k: self.k.drawn_again(&mut random) }
    }

    /// `QUERIESxKEYS` for names.
    pub fn name(&self) -> String {
        format!("{}x{}", self.q.name(), self.k.name())
    }
}

#[cfg(test)]
mod tests {
    use super::ragged::tests::every;
    use super::*;

    #[test]
    fn lengths_that_nobody_knows_fill_their_bounds() {
        let mut random = Random::new(6);
        for rows in every(&mut random) {
            let lengths = Lengths::of(rows.sequences(), rows.side(), rows.side());
            let filled = Sequences::filling(&lengths);
            assert_eq!(filled.lengths(), lengths);
            assert_eq!(filled.k.shape(2, 8), rows.shape(2, 8));
            assert!(filled.k.total() <= lengths.reach_k());
        }
        assert_eq!(
            Sequences::filling(&Lengths::uniform(2, 3, 4)),
            Sequences::uniform(&Lengths::uniform(2, 3, 4))
        );
        let packed = Sequences::filling(&Lengths::packed(3, 10, 10, 10, 10));
        assert_eq!((packed.q.len(0), packed.q.len(1), packed.q.len(2)), (3, 3, 4));
    }

    #[test]
    fn pairs_are_those_of_each_sequence() {
        let sequences = Sequences::packed(&[3, 0, 2]);
        assert_eq!((sequences.pairs(&Mask::FULL), sequences.pairs(&Mask::CAUSAL)), (13.0, 9.0));
        assert_eq!(sequences.lengths(), Lengths::packed(3, 5, 5, 3, 3));
        let uniform = Sequences::uniform(&Lengths::uniform(2, 3, 4));
        assert!(uniform.lengths().is_uniform() && uniform.pairs(&Mask::FULL) == 24.0);
    }
}
