//! How many queries and keys the sequences of a batch have.

/// The sequences of a batch: how many there are, and the queries and keys of each.
///
/// Callers ask for what they need (the longest sequence, or all of them together) and not for how the batch
/// is laid out: for one tile grid, [`Lengths::max_q`]; for sizes of memory, [`Lengths::total_q`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lengths {
    /// All sequences are of the same lengths.
    Uniform(Uniform),
}

/// The lengths of a batch whose sequences are all alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Uniform {
    sequences: usize,
    q: usize,
    k: usize,
}

impl Lengths {
    /// `batch` sequences of `q` queries and `k` keys each.
    pub const fn uniform(batch: usize, q: usize, k: usize) -> Lengths {
        Lengths::Uniform(Uniform { sequences: batch, q, k })
    }

    /// Sequences of the batch.
    pub const fn sequences(&self) -> usize {
        match self {
            Lengths::Uniform(uniform) => uniform.sequences,
        }
    }

    /// Queries of the sequence that has the most.
    pub const fn max_q(&self) -> usize {
        match self {
            Lengths::Uniform(uniform) => uniform.q,
        }
    }

    /// Keys of the sequence that has the most.
    pub const fn max_k(&self) -> usize {
        match self {
            Lengths::Uniform(uniform) => uniform.k,
        }
    }

    /// Queries of all sequences together; at most `usize::MAX`.
    pub const fn total_q(&self) -> usize {
        match self {
            Lengths::Uniform(uniform) => uniform.sequences.saturating_mul(uniform.q),
        }
    }

    /// Keys of all sequences together; at most `usize::MAX`.
    pub const fn total_k(&self) -> usize {
        match self {
            Lengths::Uniform(uniform) => uniform.sequences.saturating_mul(uniform.k),
        }
    }

    /// Whether each sequence has as many queries as keys.
    pub const fn is_square(&self) -> bool {
        match self {
            Lengths::Uniform(uniform) => uniform.q == uniform.k,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_over_all_sequences() {
        let lengths = Lengths::uniform(3, 5, 7);
        assert_eq!((lengths.sequences(), lengths.max_q(), lengths.max_k()), (3, 5, 7));
        assert_eq!((lengths.total_q(), lengths.total_k()), (15, 21));
        assert!(!lengths.is_square() && Lengths::uniform(3, 5, 5).is_square());
        assert_eq!(Lengths::uniform(2, usize::MAX, 0).total_q(), usize::MAX);
    }
}
