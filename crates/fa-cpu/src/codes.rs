//! K and V as a call gives them: elements of Q's type, or codes of 8 bits with their descales.

use fa_core::lengths::SideRows;
use fa_core::quantize::Codes;
use fa_core::{DescaleForm, Problem, Strides};

use crate::batch::Batch;
use crate::element::Element;
use crate::extras::Extras;
use crate::kv_ref::KvRef;
use crate::real::Real;
use crate::simd::{Work, widest};
use crate::view::TensorRef;

/// K or V of a checked call, as numbers.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a, T> {
    Same(TensorRef<'a, T>),
    Codes(CodeRows<'a>),
}

/// Codes with what they are multiplied by.
#[derive(Clone, Copy)]
pub(crate) struct CodeRows<'a> {
    bits: TensorRef<'a, u8>,
    codes: Codes,
    descales: &'a [f32],
    /// Between sequences, outer and inner indices of the tensor, and heads.
    steps: [usize; 4],
}

/// Which of the two tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    K,
    V,
}

impl<'a, T: Element> Values<'a, T> {
    /// Those of a checked call.
    pub(crate) fn new(problem: &Problem, extras: &Extras<'a>, of: Of, tensor: &KvRef<'a, T>) -> Self {
        let (form, descales) = match of {
            Of::K => (problem.descales.k, extras.k_descale),
            Of::V => (problem.descales.v, extras.v_descale),
        };
        match (tensor, Codes::of(problem.types.kv)) {
            (KvRef::Same(tensor), _) => Values::Same(*tensor),
            (KvRef::Codes(bits), codes) => {
                let heads = problem.heads_kv;
                let inner = match problem.lengths.k().rows {
                    SideRows::Padded { len } => len,
                    SideRows::Packed { .. } => 0,
                    SideRows::Paged { page, .. } => page,
                };
                let steps = match form {
                    DescaleForm::None => [0; 4],
                    DescaleForm::Head => [0, 0, 0, 1],
                    DescaleForm::SequenceHead => [heads, 0, 0, 1],
                    DescaleForm::TokenHead => [0, inner * heads, heads, 1],
                };
                let codes = codes.expect("the call was checked");
                Values::Codes(CodeRows { bits: *bits, codes, descales: descales.unwrap_or(&[1.0]), steps })
            }
        }
    }

    /// `[batch, seqlen, heads, dim]`.
    pub(crate) fn shape(&self) -> [usize; 4] {
        match self {
            Values::Same(tensor) => tensor.shape(),
            Values::Codes(rows) => rows.bits.shape(),
        }
    }

    /// Strides in elements.
    pub(crate) fn strides(&self) -> Strides {
        match self {
            Values::Same(tensor) => tensor.strides(),
            Values::Codes(rows) => rows.bits.strides(),
        }
    }

    /// Appends the row of a key as numbers.
    pub(crate) fn append_row<R: Real>(
        &self,
        batch: &Batch<'_>,
        [sequence, key, head]: [usize; 3],
        to: &mut Vec<R>,
    ) {
        let (outer, inner) = batch.key(sequence, key);
        match self {
            Values::Same(tensor) => R::append_row(&tensor.row(outer, inner, head), to),
            Values::Codes(rows) => {
                let descale = R::from_element(rows.descale(sequence, [outer, inner, head]));
                let table = rows.codes.table();
                let number = |bits: u8| R::from_element(table[usize::from(bits)]) * descale;
                rows.bits.row(outer, inner, head).append(number, to);
            }
        }
    }

    /// One element, exactly.
    pub(crate) fn number(&self, batch: &Batch<'_>, [sequence, key, head]: [usize; 3], dim: usize) -> f64 {
        let (outer, inner) = batch.key(sequence, key);
        match self {
            Values::Same(tensor) => tensor.at(outer, inner, head, dim).to_f64(),
            Values::Codes(rows) => {
                let code = rows.codes.decode(rows.bits.at(outer, inner, head, dim));
                f64::from(code) * f64::from(rows.descale(sequence, [outer, inner, head]))
            }
        }
    }
}

impl CodeRows<'_> {
    /// What the codes of a row are multiplied by.
    pub(crate) fn descale(&self, sequence: usize, [outer, inner, head]: [usize; 3]) -> f32 {
        let [of_sequence, of_outer, of_inner, of_head] = self.steps;
        self.descales[sequence * of_sequence + outer * of_outer + inner * of_inner + head * of_head]
    }

    /// A row as f32.
    pub(crate) fn read(&self, sequence: usize, [outer, inner, head]: [usize; 3], to: &mut [f32]) {
        let descale = self.descale(sequence, [outer, inner, head]);
        let strides = self.bits.strides();
        if strides.dim == 1 {
            let start = strides.offset(outer, inner, head, 0) as usize;
            let bits = &self.bits.data()[start..start + to.len()];
            match self.codes {
                Codes::E4m3 => widest(Decode { bits, number: e4m3, factor: descale, to }),
                Codes::Int8 => widest(Decode { bits, number: int8, factor: descale, to }),
            }
            return;
        }
        for (dim, to) in to.iter_mut().enumerate() {
            *to = self.codes.decode(self.bits.at(outer, inner, head, dim)) * descale;
        }
    }
}

/// A row of codes, decoded and multiplied.
struct Decode<'a, F> {
    bits: &'a [u8],
    number: F,
    factor: f32,
    to: &'a mut [f32],
}

impl<F: Fn(u8) -> f32> Work for Decode<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Decode { bits, number, factor, to } = self;
        for (to, &bits) in to.iter_mut().zip(bits) {
            *to = number(bits) * factor;
        }
    }
}

/// The number of an e4m3 code without a table, which lanes have to look up one by one.
#[inline(always)]
fn e4m3(bits: u8) -> f32 {
    let magnitude = u32::from(bits & 0x7F);
    let normal = (magnitude << 20) + (120 << 23);
    let subnormal = (magnitude as f32 * (1.0 / 512.0)).to_bits();
    let number = if magnitude < 8 { subnormal } else { normal };
    let number = if magnitude == 0x7F { f32::NAN.to_bits() } else { number };
    f32::from_bits(number | u32::from(bits & 0x80) << 24)
}

#[inline(always)]
fn int8(bits: u8) -> f32 {
    f32::from(bits as i8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_decode_what_the_tables_say() {
        let bits: Vec<u8> = (0..=255).collect();
        let mut row = [0.0; 256];
        for codes in [Codes::E4m3, Codes::Int8] {
            let rows = CodeRows {
                bits: TensorRef::packed("k", &bits, [1, 1, 1, 256], fa_core::TensorLayout::Bshd).unwrap(),
                codes,
                descales: &[0.5],
                steps: [0; 4],
            };
            rows.read(0, [0, 0, 0], &mut row);
            for (bits, number) in bits.iter().zip(row) {
                let expected = codes.decode(*bits) * 0.5;
                assert!(number == expected || number.is_nan() && expected.is_nan(), "{bits}: {number}");
            }
        }
        assert_eq!(crate::kv_ref::bits_of(&[-1, 127, -128]), [0xFF, 0x7F, 0x80]);
    }
}
