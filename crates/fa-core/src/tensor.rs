//! How a rank-4 tensor lies in memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The order of the axes batch (B), sequence (S), head (H) and head dim (D), slowest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TensorLayout {
    /// `[batch, seqlen, heads, head_dim]`.
    #[default]
    Bshd,
    /// `[batch, heads, seqlen, head_dim]`.
    Bhsd,
}

/// Distances in elements between neighbours along each axis. Zero broadcasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Strides {
    /// Between batch entries.
    pub batch: i64,
    /// Between positions of the sequence.
    pub seq: i64,
    /// Between heads.
    pub head: i64,
    /// Between elements of the head dim.
    pub dim: i64,
}

impl TensorLayout {
    /// The strides of a packed tensor of this layout.
    ///
    /// Products of lengths saturate at `i64::MAX`, for which no buffer is long enough; the tensors of a
    /// problem that [`crate::Problem::check`] accepts stay far below.
    pub const fn strides(self, seqlen: usize, heads: usize, head_dim: usize) -> Strides {
        let (s, h, d) = (length(seqlen), length(heads), length(head_dim));
        let (hd, sd) = (h.saturating_mul(d), s.saturating_mul(d));
        let batch = s.saturating_mul(hd);
        match self {
            TensorLayout::Bshd => Strides { batch, seq: hd, head: d, dim: 1 },
            TensorLayout::Bhsd => Strides { batch, seq: d, head: sd, dim: 1 },
        }
    }

    /// The shape of a tensor in this layout.
    pub const fn shape(self, batch: usize, seqlen: usize, heads: usize, head_dim: usize) -> [usize; 4] {
        match self {
            TensorLayout::Bshd => [batch, seqlen, heads, head_dim],
            TensorLayout::Bhsd => [batch, heads, seqlen, head_dim],
        }
    }
}

/// A length as a number that can be a stride.
const fn length(length: usize) -> i64 {
    if length > i64::MAX as usize { i64::MAX } else { length as i64 }
}

impl Strides {
    /// Offset in elements of `(batch, seq, head, dim)`.
    pub const fn offset(&self, batch: usize, seq: usize, head: usize, dim: usize) -> i64 {
        batch as i64 * self.batch + seq as i64 * self.seq + head as i64 * self.head + dim as i64 * self.dim
    }
}

impl fmt::Display for TensorLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TensorLayout::Bshd => "bshd",
            TensorLayout::Bhsd => "bhsd",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_of_lengths_that_no_memory_holds_do_not_wrap_around() {
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            let strides = layout.strides(1 << 40, 1 << 20, 1 << 10);
            assert_eq!(strides.batch, i64::MAX);
            assert!(strides.seq > 0 && strides.head > 0);
            assert_eq!(layout.strides(usize::MAX, 1, 1).batch, i64::MAX);
            assert_eq!(layout.strides(0, usize::MAX, usize::MAX).batch, 0);
        }
    }

    #[test]
    fn packed_strides_number_every_element_once() {
        let (batch, seqlen, heads, head_dim) = (2, 3, 4, 5);
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            let strides = layout.strides(seqlen, heads, head_dim);
            let mut seen = vec![false; batch * seqlen * heads * head_dim];
            for b in 0..batch {
                for s in 0..seqlen {
                    for h in 0..heads {
                        for d in 0..head_dim {
                            let at = strides.offset(b, s, h, d) as usize;
                            assert!(!std::mem::replace(&mut seen[at], true));
                        }
                    }
                }
            }
            assert!(seen.iter().all(|&hit| hit));
        }
    }
}
