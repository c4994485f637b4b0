//! A mask or a change of scores by a text of the caller's own.

use candle_core::{Result, Tensor};
use fa_core::program::Interned;

use crate::error::refused;

/// A mask or a change of scores of the caller's own, as a text of fa's language of programs, with the tensors
/// and numbers that it reads. The text is parsed once; other tensors and numbers compile nothing.
///
/// Arrays of `f32` take tensors of any float type, `f16`, `bf16`, `i32` (or u32), `u8` and `bool` (u8) those
/// of their own, `bits` u32 words whose bits lie along the last axis. Strides are free: broadcast tensors are
/// read as they lie. An array that is declared with `grad` gives its tensor a gradient.
///
/// ```
/// use candle_core::{Device, Result, Tensor};
/// use fa_candle::{Options, Program, attention};
///
/// # fn main() -> Result<()> {
/// # let device = Device::Cpu;
/// // ALiBi within documents, whose numbers the tokens have.
/// let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &device)?;
/// let documents = Tensor::new(&[0i32, 0, 0, 1, 1, 2, 2, 2], &device)?;
/// let program = Program::new(
///     "array slope: f32[_];  array document: i32[_];
///      mask = document[q] == document[k] and k <= q;
///      score = s - slope[h] * (q - k);",
/// )?
/// .with_array("slope", &slopes)
/// .with_array("document", &documents);
/// let x = Tensor::randn(0f32, 1.0, (1, 8, 4, 16), &device)?;
/// let out = attention(&x, &x, &x, &Options::full(0.25).with_program(Some(&program)))?;
/// assert_eq!(out.dims(), x.dims());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Program {
    pub(crate) own: Interned,
    pub(crate) arrays: Vec<(String, Tensor)>,
    pub(crate) scalars: Vec<(String, f64)>,
}

impl Program {
    /// The program of a text, before it is given what it reads.
    ///
    /// # Errors
    /// [`crate::Error::Program`], which has the place in the text, and [`crate::Error::Programs`].
    pub fn new(text: &str) -> Result<Program> {
        let own = fa_core::program::Program::parse(text).map_err(refused)?.intern().map_err(refused)?;
        Ok(Program { own, arrays: Vec::new(), scalars: Vec::new() })
    }

    /// Gives it an array, in place of one of that name that it had.
    #[must_use]
    pub fn with_array(mut self, name: &str, tensor: &Tensor) -> Program {
        self.arrays.retain(|(had, _)| had != name);
        self.arrays.push((name.to_owned(), tensor.clone()));
        self
    }

    /// Gives it a scalar, in place of one of that name that it had; one of type f32 is rounded to it.
    #[must_use]
    pub fn with_scalar(mut self, name: &str, value: impl Into<f64>) -> Program {
        self.scalars.retain(|(had, _)| had != name);
        self.scalars.push((name.to_owned(), value.into()));
        self
    }
}
