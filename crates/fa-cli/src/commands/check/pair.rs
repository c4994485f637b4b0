//! A tensor of one or two outputs, read to be compared.

use fa_core::{Dtype, TensorLayout};
use fa_cpu::compare::{self, Comparison};

use super::report::Row;
use crate::attention;
use crate::flags::AttentionArgs;
use crate::safetensors::{TensorFile, dtype_of};
use crate::term::failure::InputError;

/// The outputs that have rows of heads: of rank 3 where sequences are packed.
const ROWS: [&str; 4] = ["out", "dq", "dk", "dv"];

/// A tensor of A and, where it is given, of B, packed BSHD (LSE as it is).
pub(super) struct Pair {
    pub name: String,
    /// `[batch, seqlen, heads, dim]`; LSE `[1, batch, heads, seqlen_q]`.
    pub shape: [usize; 4],
    pub a: Vec<f64>,
    pub b: Option<Vec<f64>>,
    /// The coarser of the stored types.
    pub dtype: Dtype,
}

impl Pair {
    pub(crate) fn read(
        args: &AttentionArgs,
        a: &TensorFile,
        b: Option<&TensorFile>,
        name: &str,
    ) -> anyhow::Result<Pair> {
        let (shape, a_values) = read_bshd(a, args, name)?;
        let mut pair =
            Pair { name: name.to_owned(), shape, a: a_values, b: None, dtype: stored_dtype(a, name)? };
        if let Some(b) = b {
            let (b_shape, b_values) = read_bshd(b, args, name)?;
            if shape != b_shape {
                let got = a.entry(name)?.shape.clone();
                let need = format!("in {} it has {:?}", b.path().display(), b.entry(name)?.shape);
                return Err(InputError::Shape { name: name.to_owned(), got, need }.into());
            }
            pair.dtype = coarser(pair.dtype, stored_dtype(b, name)?);
            pair.b = Some(b_values);
        }
        Ok(pair)
    }

    /// The values of B, which every rule but that of the inputs compares A with.
    pub(crate) fn b(&self) -> &[f64] {
        self.b.as_deref().expect("without B, A is judged by its inputs")
    }

    pub(crate) fn is_lse(&self) -> bool {
        self.name == "lse"
    }

    /// Where the value `index` lies, as a [`Comparison`] has it.
    pub(crate) fn position(&self, index: usize) -> [usize; 4] {
        let [b, s, h, d] = self.shape;
        let at = [index / d / h / s % b, index / d / h % s, index / d % h, index % d];
        // LSE is [batch, heads, seqlen_q] behind a leading 1, and has no axis of the head dim.
        if self.is_lse() { [at[1], at[3], at[2], 0] } else { at }
    }

    /// A or B against the other or the oracle.
    pub(crate) fn compare(
        &self,
        dtype: Dtype,
        values: &[f64],
        exact: &[f64],
        low: Option<&[f64]>,
    ) -> Result<Comparison, fa_cpu::CpuError> {
        if self.is_lse() {
            let [_, batch, heads, seqlen] = self.shape;
            compare::compare_lse([batch, heads, seqlen], dtype, values, exact)
        } else {
            compare::compare(self.shape, dtype, values, exact, low)
        }
    }

    pub(crate) fn row(&self, compared: &'static str, found: Comparison) -> Row {
        Row { tensor: self.name.clone(), compared, found }
    }
}

/// A tensor's values and shape: rows of heads in BSHD order, others with leading ones.
fn read_bshd(
    file: &TensorFile,
    args: &AttentionArgs,
    name: &str,
) -> Result<([usize; 4], Vec<f64>), InputError> {
    let layout = args.layout(file.metadata().get("layout").map(String::as_str))?;
    let stored = &file.entry(name)?.shape;
    let refuse =
        |need: &str| InputError::Shape { name: name.to_owned(), got: stored.clone(), need: need.to_owned() };
    let rank = stored.len();
    if name == "lse" && !(2..=3).contains(&rank) {
        return Err(refuse("lse must be [batch, heads, seqlen_q], or [heads, total_q] of packed sequences"));
    }
    if rank > 4 {
        return Err(refuse("tensors of rank 4 at most are compared"));
    }
    let mut shape = [1usize; 4];
    shape[4 - rank..].copy_from_slice(stored);
    let values = file.read_f64(name)?;
    if rank < 3 || rank == 3 && !ROWS.contains(&name) {
        return Ok((shape, values));
    }
    if layout == TensorLayout::Bhsd {
        shape.swap(1, 2);
    }
    Ok((shape, attention::to_bshd(&values, shape, layout)))
}

/// The type whose rounding a stored tensor has; f64 counts as f32, the widest type outputs are written in.
pub(super) fn stored_dtype(file: &TensorFile, name: &str) -> Result<Dtype, InputError> {
    Ok(dtype_of(file.entry(name)?.dtype).unwrap_or(Dtype::F32))
}

pub(super) fn coarser(a: Dtype, b: Dtype) -> Dtype {
    if a.unit_roundoff() >= b.unit_roundoff() { a } else { b }
}

/// The type of the inputs behind an LSE, which is f32 itself: that of the output beside it.
pub(super) fn lse_dtype(files: &[&TensorFile]) -> Dtype {
    let of = |file: &&TensorFile| ["out", "q"].iter().find_map(|name| stored_dtype(file, name).ok());
    files.iter().filter_map(of).reduce(coarser).unwrap_or(Dtype::F32)
}
