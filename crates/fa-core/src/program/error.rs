//! What is wrong with a program's text, with its place.

use std::fmt;
use std::ops::Range;

use super::limits::MAX_RANK;
use super::types::Type;

/// What is wrong with a program, and where in its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramError {
    /// What is wrong.
    pub problem: ProgramProblem,
    /// The bytes of the text that are meant; empty at its end.
    pub span: Range<usize>,
    /// The line, the column (both from 1) and the text meant, for messages.
    place: (usize, usize, String),
}

impl ProgramError {
    pub(super) fn new(problem: ProgramProblem, text: &str, span: Range<usize>) -> ProgramError {
        let start = (0..=span.start.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        let end = (start..=span.end.clamp(start, text.len()))
            .rev()
            .find(|&at| text.is_char_boundary(at))
            .unwrap_or(start);
        let line = text[..start].matches('\n').count() + 1;
        let column = text[..start].rsplit('\n').next().unwrap_or("").chars().count() + 1;
        let meant = text[start..end].lines().next().unwrap_or("").chars().take(60).collect();
        ProgramError { problem, span: start..end, place: (line, column, meant) }
    }
}

impl fmt::Display for ProgramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (line, column, meant) = &self.place;
        write!(f, "{}", self.problem)?;
        if meant.is_empty() {
            return write!(f, " (line {line}, column {column})");
        }
        write!(f, " (line {line}, column {column}: `{meant}`)")
    }
}

impl std::error::Error for ProgramError {}

/// What can be wrong with a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramProblem {
    /// Something else was expected here.
    #[error("expected {expected}, found {found}")]
    Syntax {
        /// What would fit.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A character that no program has.
    #[error("the character {0:?} is not part of the language")]
    Character(char),
    /// A number that its type does not hold.
    #[error("the number does not fit {0}")]
    Number(Type),
    /// A name that nothing has.
    #[error(
        "unknown name `{name}`: variables are s, b, h, hk, q, k, sq, sk, off; declare others, as in `scalar \
         {name}: i32;` or `array {name}: f32[_];`"
    )]
    UnknownName {
        /// The name.
        name: String,
    },
    /// A function that the language does not have.
    #[error("unknown function `{name}`: there are {functions}")]
    UnknownFunction {
        /// The name.
        name: String,
        /// The functions that there are.
        functions: &'static str,
    },
    /// A name given to two things.
    #[error("the name `{name}` is taken")]
    Taken {
        /// The name.
        name: String,
    },
    /// A name longer than a name may be.
    #[error("a name has at most {most} characters")]
    LongName {
        /// The limit.
        most: usize,
    },
    /// An operation on a type that it does not take.
    #[error("`{operation}` takes {takes}, not {given}")]
    Operand {
        /// The operation.
        operation: &'static str,
        /// What it takes.
        takes: &'static str,
        /// The types given.
        given: String,
    },
    /// A function with another number of arguments.
    #[error("`{function}` takes {takes} arguments, not {given}")]
    Arguments {
        /// The function.
        function: String,
        /// How many it takes.
        takes: usize,
        /// How many are given.
        given: usize,
    },
    /// An array indexed with another number of indices.
    #[error("the array `{array}` has {rank} axes, not {given}")]
    Rank {
        /// The array.
        array: String,
        /// Its axes.
        rank: usize,
        /// The indices given.
        given: usize,
    },
    /// An array without axes, or with too many.
    #[error("an array has 1 to {most} axes, not {given}", most = MAX_RANK)]
    Axes {
        /// The axes given.
        given: usize,
    },
    /// An element type that does not exist, or that does not fit here.
    #[error("`{name}` is not {what}")]
    BadType {
        /// What is given.
        name: String,
        /// What would fit.
        what: &'static str,
    },
    /// A gradient of an array that is not of floating point.
    #[error("only arrays of f32, f16 or bf16 have gradients")]
    GradientOfIntegers,
    /// A divisor that may be 0 or negative.
    #[error(
        "an integer divisor is a positive constant, an i32 scalar or max(x, c) with a constant c >= 1, so \
         that it cannot be 0 or negative"
    )]
    Divisor,
    /// An exponent that is not constant.
    #[error("the exponent of a power is a constant; write exp2(y * log2(x)) for others")]
    Exponent,
    /// The score in a mask or in weights.
    #[error("a {result} cannot depend on the score `s`")]
    ScoreInMask {
        /// `mask` or `weight`.
        result: &'static str,
    },
    /// An array whose gradient is wanted in the weights.
    #[error("array `{name}` with `grad` in a weight: gradients are those of scores, leave `grad` out")]
    GradientInWeight {
        /// The array.
        name: String,
    },
    /// An index of an array whose gradient is wanted that follows the score.
    #[error(
        "an index of array `{name}` follows the score `s`: its gradient is not computed, leave `grad` out"
    )]
    IndexOfScore {
        /// The array.
        name: String,
    },
    /// No mask and no score.
    #[error("a program ends in an expression, or sets `mask = ..;`, `score = ..;` or `weight = ..;`")]
    NoResult,
    /// A result of another type.
    #[error("a {result} is {needed}, not {given}")]
    ResultType {
        /// `mask` or `score`.
        result: &'static str,
        /// The type that it has.
        needed: Type,
        /// The type given.
        given: Type,
    },
    /// A result set twice.
    #[error("the {0} is set twice")]
    SetTwice(&'static str),
    /// More than a limit.
    #[error("a program has at most {most} {what}; this has {given}")]
    Limit {
        /// What there are too many of.
        what: &'static str,
        /// The limit.
        most: usize,
        /// How many there are.
        given: usize,
    },
    /// Two programs that declare a name differently.
    #[error("`{name}` is declared differently in the two programs")]
    Conflict {
        /// The name.
        name: String,
    },
}

/// An error for more than `most`.
pub(super) fn limit(what: &'static str, most: usize, given: usize) -> Result<(), ProgramProblem> {
    if given > most { Err(ProgramProblem::Limit { what, most, given }) } else { Ok(()) }
}
