//! Merging of partial results on a GPU: O and LSE over different keys of the same queries, combined.

use crate::Dtype;

/// What is merged: parts of one shape and type, each with its LSE `[batch, heads, seqlen]` (`[heads, total]`
/// of packed sequences, with a batch of 1).
///
/// A row of the result is the average of the parts' rows, weighted by `exp(LSE)`, computed in f32 and rounded
/// once; its LSE is the logarithm of the sum of `exp(LSE)`. A part whose row sees no key (`O = 0`, `LSE =
/// -inf`) does not change it. Parts leave sinks out; the merged result may have them, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Parts, from 1 to [`Merge::MAX_PARTS`].
    pub parts: usize,
    /// Independent sequences; 1 where they are packed.
    pub batch: usize,
    /// Positions of a sequence, or of all where they are packed.
    pub seqlen: usize,
    /// Query heads.
    pub heads: usize,
    /// Elements of a row of O, a multiple of 8.
    pub dim: usize,
    /// Type of the parts: f32, f16 or bf16.
    pub part: Dtype,
    /// Type of the result: f32, f16 or bf16. What is merged again is best kept in f32.
    pub out: Dtype,
    /// Whether a sink of each head joins the result.
    pub sinks: bool,
}

/// Why a merge is not valid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MergeError {
    /// A number is out of range, or not a multiple of what it must be.
    #[error("{name} = {value}: must be {need}")]
    BadValue {
        /// The field.
        name: &'static str,
        /// Its value.
        value: usize,
        /// What it must be.
        need: &'static str,
    },
    /// An element type that merging does not support.
    #[error("{name} is {dtype}: must be f32, f16 or bf16")]
    Dtype {
        /// The field.
        name: &'static str,
        /// Its type.
        dtype: Dtype,
    },
}

/// Counts are 32-bit integers on the device.
const MAX_COUNT: usize = 1 << 30;

impl Merge {
    /// The most parts of one launch.
    pub const MAX_PARTS: usize = 16;

    /// Checks counts, head dim and types.
    ///
    /// # Errors
    /// The first [`MergeError`] found.
    pub fn check(&self) -> Result<(), MergeError> {
        let bad = |name, value, need| Err(MergeError::BadValue { name, value, need });
        if !(1..=Merge::MAX_PARTS).contains(&self.parts) {
            return bad("parts", self.parts, "1 to 16: merge more in turns, kept in f32 between them");
        }
        if self.dim == 0 || !self.dim.is_multiple_of(8) || self.dim > 1 << 16 {
            return bad("dim", self.dim, "a multiple of 8 from 8 to 65536");
        }
        if self.heads == 0 {
            return bad("heads", 0, "at least 1");
        }
        for (name, value) in [("batch", self.batch), ("seqlen", self.seqlen), ("heads", self.heads)] {
            if value > MAX_COUNT {
                return bad(name, value, "at most 2^30");
            }
        }
        for (name, dtype) in [("part", self.part), ("out", self.out)] {
            match dtype {
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
                Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                    return Err(MergeError::Dtype { name, dtype });
                }
            }
        }
        Ok(())
    }

    /// Rows of a part: elements of its LSE.
    pub fn rows(&self) -> usize {
        self.batch.saturating_mul(self.seqlen).saturating_mul(self.heads)
    }

    /// `[batch, seqlen, heads, dim]` of the parts and of the result.
    pub fn shape(&self) -> [usize; 4] {
        [self.batch, self.seqlen, self.heads, self.dim]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_field_value_and_what_works() {
        let good = Merge {
            parts: 2,
            batch: 3,
            seqlen: 5,
            heads: 4,
            dim: 128,
            part: Dtype::Bf16,
            out: Dtype::F32,
            sinks: true,
        };
        good.check().unwrap();
        assert_eq!((good.rows(), good.shape()), (60, [3, 5, 4, 128]));
        for (bad, part) in [
            (Merge { parts: 17, ..good }, "parts = 17: must be 1 to 16"),
            (Merge { parts: 0, ..good }, "parts = 0"),
            (Merge { dim: 100, ..good }, "dim = 100: must be a multiple of 8"),
            (Merge { heads: 0, ..good }, "heads = 0"),
            (Merge { seqlen: 1 << 31, ..good }, "seqlen = 2147483648: must be at most 2^30"),
            (Merge { out: Dtype::E4m3, ..good }, "out is e4m3: must be f32, f16 or bf16"),
        ] {
            let text = bad.check().expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not say {part}");
        }
    }
}
