//! The tensors of a call besides Q, K, V and O: whether a call has those that its problem names.

use fa_core::extras::{HostExtras, Value};
use fa_core::program::{Inputs, Interned};
use fa_core::{Pass, Problem};

use crate::check::check_len;
use crate::error::CpuError;

/// Host arrays besides Q, K and V, with the same meaning as on a GPU.
pub type Extras<'a> = HostExtras<'a>;

/// [`Extras`] that own their values.
pub use fa_core::extras::OwnedExtras;

/// All that a call has besides Q, K, V and their gradients. Functions that take it take [`Extras`] alone as
/// well.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arguments<'a> {
    /// Lengths, pages, slopes and sinks.
    pub extras: Extras<'a>,
    /// The arrays and scalars of the problem's program; may be left out for a program that reads none.
    pub program: Option<&'a Inputs<'a>>,
    /// Where the problem is a part of a larger one, as the program sees it.
    pub within: Within,
}

/// The place of a problem in a larger one of which it computes some heads and queries of one sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Within {
    /// Its sequence, first query head, first K/V head and first query.
    pub first: [usize; 4],
    /// Queries and keys of the sequence; `None` for the problem's own.
    pub lengths: Option<[usize; 2]>,
}

impl<'a> From<&Extras<'a>> for Arguments<'a> {
    fn from(extras: &Extras<'a>) -> Arguments<'a> {
        Arguments { extras: *extras, ..Arguments::default() }
    }
}

impl<'a> From<&Arguments<'a>> for Arguments<'a> {
    fn from(own: &Arguments<'a>) -> Arguments<'a> {
        *own
    }
}

impl<'a> Arguments<'a> {
    /// `problem`'s program with its inputs.
    ///
    /// # Errors
    /// [`CpuError::Program`] for inputs that are not the program's, [`CpuError::Extra`] for those of none.
    pub(crate) fn of_program(&self, problem: &Problem) -> Result<Option<(Interned, Inputs<'a>)>, CpuError> {
        match (problem.score.program, self.program) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(CpuError::Extra { name: "program", asked: false }),
            (Some(program), None) => Ok(Some((program, Inputs::new(&program, vec![], vec![])?))),
            (Some(program), Some(inputs)) => {
                inputs.check(&program)?;
                Ok(Some((program, inputs.clone())))
            }
        }
    }
}

/// Those that `problem` names are given, and no others, each with as many values as it needs.
///
/// # Errors
/// [`CpuError::Extra`] and [`CpuError::Length`].
pub fn check_extras(problem: &Problem, pass: Pass, extras: &Extras<'_>) -> Result<(), CpuError> {
    for (extra, values) in extras.entries() {
        let name = extra.name();
        let got = values.map(|values| match values {
            Value::I32(values) => values.len(),
            Value::F32(values) => values.len(),
        });
        match (extra.need(problem, pass), got) {
            (Some(need), Some(got)) => check_len(name, got, need.len)?,
            (Some(need), None) if !need.is_optional => return Err(CpuError::Extra { name, asked: true }),
            (None, Some(_)) => return Err(CpuError::Extra { name, asked: false }),
            (_, None) => (),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Batch;
    use fa_core::{Alibi, Dtype, Lengths, Mask, ScoreMod, Side};

    #[test]
    fn even_extras_are_what_the_problem_names() {
        let square = Problem::square(1, 1, 4, 8, Mask::CAUSAL, Dtype::F32);
        let score = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
        let padded = Side::padded(7);
        for (lengths, counts) in [
            (Lengths::uniform(3, 7, 9), [7, 9]),
            (Lengths::packed(3, 20, 100, 7, 30), [6, 30]),
            (Lengths::of(3, padded.with_used(), Side::packed(20, 7).with_used()), [7, 6]),
            (Lengths::of(3, padded, Side::paged(4, 5, 40)), [7, 6]),
            (Lengths::of(3, padded, Side::paged(16, 50, 40)), [7, 40]),
        ] {
            for score in [ScoreMod::NONE, score] {
                let problem = square.with_lengths(lengths).with_score(score);
                let extras = OwnedExtras::even(&problem);
                let batch = Batch::new(&problem, &extras.view()).unwrap();
                assert!(batch.sequences.iter().all(|one| [one.q.len, one.k.len] == counts), "{lengths:?}");
            }
        }
        assert_eq!(OwnedExtras::even(&square), OwnedExtras::NONE);
    }
}
