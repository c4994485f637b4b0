//! K and V as a call gives them: elements of Q's type, or codes with their descales.

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
    /// Of int4, bytes of two codes.
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

    /// `[batch, seqlen, heads, dim]`, in numbers.
    pub(crate) fn shape(&self) -> [usize; 4] {
        match self {
            Values::Same(tensor) => tensor.shape(),
            Values::Codes(rows) => {
                let [batch, seqlen, heads, bytes] = rows.bits.shape();
                [batch, seqlen, heads, bytes * rows.codes.per_byte()]
            }
        }
    }

    /// Strides in elements of the tensor.
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
                let per_byte = rows.codes.per_byte();
                let row = rows.bits.row(outer, inner, head);
                row.append_all(
                    |byte| {
                        let numbers = (0..per_byte).map(move |index| rows.codes.number(byte, index));
                        numbers.map(|number| R::from_element(number) * descale)
                    },
                    to,
                );
            }
        }
    }

    /// One element, exactly.
    pub(crate) fn number(&self, batch: &Batch<'_>, [sequence, key, head]: [usize; 3], dim: usize) -> f64 {
        let (outer, inner) = batch.key(sequence, key);
        match self {
            Values::Same(tensor) => tensor.at(outer, inner, head, dim).to_f64(),
            Values::Codes(rows) => {
                let code = rows.number([outer, inner, head], dim);
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

    /// A code as a number.
    fn number(&self, [outer, inner, head]: [usize; 3], dim: usize) -> f32 {
        let per_byte = self.codes.per_byte();
        self.codes.number(self.bits.at(outer, inner, head, dim / per_byte), dim % per_byte)
    }

    /// A row as f32.
    pub(crate) fn read(&self, sequence: usize, [outer, inner, head]: [usize; 3], to: &mut [f32]) {
        let descale = self.descale(sequence, [outer, inner, head]);
        let strides = self.bits.strides();
        if strides.dim == 1 {
            let start = strides.offset(outer, inner, head, 0) as usize;
            let bytes = &self.bits.data()[start..start + to.len() / self.codes.per_byte()];
            match self.codes {
                Codes::E4m3 => widest(Decode { bytes, numbers: e4m3, factor: descale, to }),
                Codes::Int8 => widest(Decode { bytes, numbers: int8, factor: descale, to }),
                Codes::Int4 => widest(Decode { bytes, numbers: int4, factor: descale, to }),
                Codes::E5m2 => widest(Decode { bytes, numbers: e5m2, factor: descale, to }),
            }
            return;
        }
        for (dim, to) in to.iter_mut().enumerate() {
            *to = self.number([outer, inner, head], dim) * descale;
        }
    }
}

/// A row of codes, decoded and multiplied.
struct Decode<'a, F> {
    bytes: &'a [u8],
    /// Of a byte.
    numbers: F,
    factor: f32,
    to: &'a mut [f32],
}

impl<const N: usize, F: Fn(u8) -> [f32; N]> Work for Decode<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Decode { bytes, numbers, factor, to } = self;
        for (to, &byte) in to.as_chunks_mut::<N>().0.iter_mut().zip(bytes) {
            *to = numbers(byte).map(|number| number * factor);
        }
    }
}

/// The number of an e4m3 code without a table, which lanes have to look up one by one.
#[inline(always)]
fn e4m3(bits: u8) -> [f32; 1] {
    let magnitude = u32::from(bits & 0x7F);
    let normal = (magnitude << 20) + (120 << 23);
    let subnormal = (magnitude as f32 * (1.0 / 512.0)).to_bits();
    let number = if magnitude < 8 { subnormal } else { normal };
    let number = if magnitude == 0x7F { f32::NAN.to_bits() } else { number };
    [f32::from_bits(number | u32::from(bits & 0x80) << 24)]
}

/// The same of an e5m2 code.
#[inline(always)]
fn e5m2(bits: u8) -> [f32; 1] {
    let magnitude = u32::from(bits & 0x7F);
    let normal = (magnitude << 21) + (112 << 23);
    let subnormal = (magnitude as f32 * (1.0 / 65_536.0)).to_bits();
    let number = if magnitude < 4 { subnormal } else { normal };
    // Infinity and NaN have all bits of the exponent.
    let number = if magnitude >= 0x7C { number | f32::INFINITY.to_bits() } else { number };
    [f32::from_bits(number | u32::from(bits & 0x80) << 24)]
}

#[inline(always)]
fn int8(bits: u8) -> [f32; 1] {
    [f32::from(bits as i8)]
}

/// The code in the lower half, then that in the upper one.
#[inline(always)]
fn int4(bits: u8) -> [f32; 2] {
    [bits << 4, bits].map(|upper| f32::from(upper as i8 >> 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_decode_what_the_tables_say() {
        let bits: Vec<u8> = (0..=255).collect();
        for codes in Codes::ALL {
            let per_byte = codes.per_byte();
            let mut row = vec![0.0; 256 * per_byte];
            let rows = CodeRows {
                bits: TensorRef::packed("k", &bits, [1, 1, 1, 256], fa_core::TensorLayout::Bshd).unwrap(),
                codes,
                descales: &[0.5],
                steps: [0; 4],
            };
            rows.read(0, [0, 0, 0], &mut row);
            for (dim, number) in row.into_iter().enumerate() {
                let expected = codes.number(bits[dim / per_byte], dim % per_byte) * 0.5;
                let agree = number == expected || number.is_nan() && expected.is_nan();
                assert!(agree, "{codes:?} {dim}: {number}, not {expected}");
            }
        }
        assert_eq!(crate::kv_ref::bits_of(&[-1, 127, -128]), [0xFF, 0x7F, 0x80]);
    }
}
