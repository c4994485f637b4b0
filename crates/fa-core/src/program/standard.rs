//! Programs that need no text of the user's: masks by rows, by bits and by chunks, biases, and dropout.
//!
//! Their arrays are broadcast over what has an axis of 1. Their names begin with `fa_`, so that a program of
//! the user's joins them ([`Program::with`]).

use super::error::ProgramError;
use super::types::Element;
use super::whole::Program;

/// A mask, a bias or dropout, whose values are arrays and scalars of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standard {
    /// Each query sees an interval of keys: from `fa_begin` up to `fa_end`, i32 `[batch, heads, queries]`.
    Rows,
    /// Each query sees two intervals, the second from `fa_begin_2` up to `fa_end_2`.
    TwoRows,
    /// `fa_bits`, bits `[batch, heads, queries, keys]`.
    Bits,
    /// A query sees the keys of its chunk of `fa_chunk` (i32), by positions aligned at the end of the keys.
    Chunk,
    /// `fa_bias`, `[batch, heads, queries, keys]`, is added to the scores.
    Bias {
        /// Its element type, one of floating point.
        element: BiasElement,
        /// Whether its gradient is wanted.
        gradient: bool,
    },
    /// Probabilities whose bit in `fa_kept`, bits `[batch, heads, queries, keys]`, is set are multiplied by
    /// `fa_kept_factor` (f32), the others are dropped ([`crate::Dropout`]).
    Dropout,
}

/// The element type of a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BiasElement {
    /// f32
    F32,
    /// f16
    F16,
    /// bf16
    Bf16,
}

impl BiasElement {
    /// As an element of any array.
    pub const fn element(self) -> Element {
        match self {
            BiasElement::F32 => Element::F32,
            BiasElement::F16 => Element::F16,
            BiasElement::Bf16 => Element::Bf16,
        }
    }
}

impl Standard {
    /// Its text.
    pub fn text(self) -> String {
        const ROWS: &str = "array fa_begin: i32[_, _, _]; array fa_end: i32[_, _, _];\n";
        match self {
            Standard::Rows => format!("{ROWS}mask = fa_begin[b, h, q] <= k < fa_end[b, h, q];"),
            Standard::TwoRows => format!(
                "{ROWS}array fa_begin_2: i32[_, _, _]; array fa_end_2: i32[_, _, _];\nmask = \
                 fa_begin[b, h, q] <= k < fa_end[b, h, q] or fa_begin_2[b, h, q] <= k < fa_end_2[b, h, q];"
            ),
            Standard::Bits => "array fa_bits: bits[_, _, _, _];\nmask = fa_bits[b, h, q, k];".to_owned(),
            Standard::Chunk => {
                "scalar fa_chunk: i32;\nmask = (q + off) // fa_chunk == k // fa_chunk;".to_owned()
            }
            Standard::Bias { element, gradient } => {
                let (element, gradient) = (element.element().name(), if gradient { " grad" } else { "" });
                format!("array fa_bias: {element}[_, _, _, _]{gradient};\nscore = s + fa_bias[b, h, q, k];")
            }
            Standard::Dropout => "array fa_kept: bits[_, _, _, _]; scalar fa_kept_factor: f32;\nweight = \
                                  select(fa_kept[b, h, q, k], fa_kept_factor, 0.0);"
                .to_owned(),
        }
    }

    /// The program.
    ///
    /// # Errors
    /// None: a test parses each of the texts.
    pub fn program(self) -> Result<Program, ProgramError> {
        Program::parse(&self.text())
    }
}
