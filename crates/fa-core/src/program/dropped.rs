//! Dropout as a program with its inputs.

use super::eval::ArrayView;
use super::ops::Value;
use super::owned::{OwnedArray, OwnedData, OwnedInputs};
use super::standard::Standard;
use crate::{Dropout, DropoutError, Problem, ScoreMod};

impl Dropout {
    /// Scores with dropout: the program of [`Standard::Dropout`] joins their own.
    ///
    /// # Errors
    /// A program that leaves no room for it.
    pub fn of(self, score: ScoreMod) -> Result<ScoreMod, DropoutError> {
        let own = Standard::Dropout.program()?;
        let program = match score.program {
            Some(before) => before.with(&own)?,
            None => own,
        };
        Ok(score.with_program(Some(program.intern()?)).with_dropout(Some(self)))
    }

    /// Sets what the program of [`Standard::Dropout`] reads among the inputs of `problem`, which has it.
    pub fn set(&self, problem: &Problem, inputs: &mut OwnedInputs) {
        let Some(program) = problem.score.program else { return };
        for (decl, array) in program.arrays().iter().zip(&mut inputs.arrays) {
            if decl.name == Dropout::BITS {
                *array = self.bits(problem);
            }
        }
        for (decl, scalar) in program.scalars().iter().zip(&mut inputs.scalars) {
            if decl.name == Dropout::FACTOR {
                *scalar = Value::F32(self.factor().into());
            }
        }
    }

    /// The bits of a problem's probabilities, as the array of [`Standard::Dropout`]: `[sequences, heads_q,
    /// queries, keys]`, by the upper bounds of lengths.
    pub fn bits(&self, problem: &Problem) -> OwnedArray {
        let lengths = &problem.lengths;
        let extents = [lengths.sequences(), problem.heads_q, lengths.max_q(), lengths.max_k()];
        let [sequences, heads, queries, keys] = extents.map(|extent| extent.max(1));
        let mut data = vec![0; sequences * heads * queries * keys.div_ceil(32)];
        self.kept().fill(queries, keys.div_ceil(32), &mut data);
        let data = OwnedData::Bits(data);
        let view = ArrayView::contiguous(data.view(), &[sequences, heads, queries, keys]);
        let (strides, extents) = (view.strides, view.extents);
        OwnedArray { data, strides, extents }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Lengths, Mask};

    #[test]
    fn bits_are_those_of_each_place_and_about_as_many_as_asked_for() {
        let lengths = Lengths::uniform(2, 37, 101);
        let problem = Problem::square(2, 37, 3, 64, Mask::FULL, Dtype::Bf16).with_lengths(lengths);
        for p in [0.0, 0.1, 0.5, 0.97] {
            let dropout = Dropout::new(p, 0x1234_5678_9abc_def0, (1 << 40) + 17).unwrap();
            let bits = dropout.bits(&problem);
            let OwnedData::Bits(words) = &bits.data else { panic!("no bits") };
            assert_eq!((words.len(), bits.extents), (2 * 3 * 37 * 4, [2, 3, 37, 101]));
            let mut count = 0;
            for (index, word) in words.iter().enumerate() {
                let (head, query) = (index / (37 * 4), index / 4 % 37);
                for bit in 0..32 {
                    let key = 32 * (index % 4) + bit;
                    assert_eq!(word >> bit & 1 == 1, dropout.kept().keeps(head, query, key));
                }
                count += word.count_ones();
            }
            let (share, all) =
                (f64::from(dropout.kept().threshold) / 256.0 + 1.0 / 256.0, words.len() as f64 * 32.0);
            let sigma = (all * share * (1.0 - share)).sqrt();
            assert!((f64::from(count) - all * share).abs() <= 4.0 * sigma, "{p}: {count} of {all}");
        }
        // A factor of 1 / (1 - p), and FlashAttention-2's threshold.
        let tenth = Dropout::new(0.1, 0, 0).unwrap();
        assert_eq!((tenth.factor(), tenth.kept().threshold), (1.0 / 0.9, 229));
        for p in [-0.1, 1.0, f64::NAN, 0.99999999999] {
            assert!(Dropout::new(p, 0, 0).is_err(), "{p}");
        }
    }
}
