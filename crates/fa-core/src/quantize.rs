//! Codes of 8 and 4 bits and their descales: the quantisers of K and V.
//!
//! `value = code * descale` is what reading gives. Writing multiplies by `1 / descale`, clamps to the largest
//! code, and rounds to the nearest code, ties to even. Infinities become the largest code. NaN stays NaN in
//! e4m3 and e5m2; integers have none, and it becomes 0.
//!
//! Codes of 4 bits are two to a byte along a row: the lower half has the first. They are two's complement and
//! have no zero point: from -8 to 7 where they are read, from -7 to 7 as they are written.
//!
//! ```
//! use fa_core::quantize::{Codes, Scales, e4m3, int8, reciprocal};
//!
//! // 24.9 lies between the codes 24 and 26.
//! assert_eq!(e4m3::decode(e4m3::encode(24.9)), 24.0);
//! assert_eq!(e4m3::decode(e4m3::encode(1e9)), e4m3::LARGEST);
//! assert_eq!((int8::encode(2.5), int8::encode(3.5), int8::encode(-1e9)), (2, 4, -127));
//! // A row with the largest magnitude 6.35 is coded in steps of 0.05.
//! let descale = Codes::Int8.descale(6.35);
//! assert_eq!(int8::encode(-3.0 * reciprocal(descale)), -60);
//! // Two codes of 4 bits in a byte: -2 is 0b1110.
//! let made = Codes::Int4.quantize(&[7.0, -2.0], [1, 1, 1, 2], Scales::TokenHead);
//! assert_eq!((made.codes, made.descales), (vec![0b1110_0111], vec![1.0]));
//! assert!(Codes::Int4.numbers(&[0b1110_0111]).eq([7.0, -2.0]));
//! ```

use crate::Dtype;

/// A format of floating-point numbers of 8 bits, one of them a sign.
struct Float8 {
    mantissa: u32,
    bias: u32,
    /// The code of infinity, in formats that have it.
    infinity: Option<u8>,
    /// The code of the largest number; those above it that are not infinity are NaN.
    largest: u8,
}

/// The code that NaN becomes, in all formats of 8 bits.
const NAN: u8 = 0x7F;

impl Float8 {
    const fn table(&self) -> [f32; 256] {
        let mut table = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            table[code] = self.number(code as u8);
            code += 1;
        }
        table
    }

    const fn number(&self, code: u8) -> f32 {
        let sign = ((code & 0x80) as u32) << 24;
        let magnitude = (code & 0x7F) as u32;
        let bits = if magnitude <= self.largest as u32 {
            self.magnitude(magnitude).to_bits()
        } else if matches!(self.infinity, Some(infinity) if infinity as u32 == magnitude) {
            f32::INFINITY.to_bits()
        } else {
            f32::NAN.to_bits()
        };
        f32::from_bits(bits | sign)
    }

    /// A finite number without its sign: a subnormal counts steps, of a normal the exponent is rebased.
    const fn magnitude(&self, code: u32) -> f32 {
        if code < 1 << self.mantissa {
            code as f32 * f32::from_bits((127 - self.steps()) << 23)
        } else {
            f32::from_bits((code << (23 - self.mantissa)) + ((127 - self.bias) << 23))
        }
    }

    /// Subnormals are multiples of 2^-steps.
    const fn steps(&self) -> u32 {
        self.bias - 1 + self.mantissa
    }

    const fn encode(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let sign = ((bits >> 24) & 0x80) as u8;
        let magnitude = f32::from_bits(bits & 0x7FFF_FFFF);
        if magnitude.is_nan() {
            return NAN;
        }
        if magnitude >= self.magnitude(self.largest as u32) {
            return sign | self.largest;
        }
        if magnitude < self.magnitude(1 << self.mantissa) {
            // Adding 1.5 * 2^(23 - steps) leaves multiples of 2^-steps, which the sum's rounding counts.
            let ones = 1.5 * f32::from_bits((127 + 23 - self.steps()) << 23);
            return sign | ((magnitude + ones).to_bits() - ones.to_bits()) as u8;
        }
        let (bits, shift) = (magnitude.to_bits(), 23 - self.mantissa);
        let rounded = bits + (1 << (shift - 1)) - 1 + ((bits >> shift) & 1);
        sign | ((rounded >> shift) - ((127 - self.bias) << self.mantissa)) as u8
    }
}

/// The e4m3 format: 1 bit of sign, 4 of exponent with a bias of 7, 3 of mantissa. No infinities; 0x7F and
/// 0xFF are NaN.
pub mod e4m3 {
    const FORMAT: super::Float8 = super::Float8 { mantissa: 3, bias: 7, infinity: None, largest: 0x7E };

    /// The largest number, whose code is 0x7E.
    pub const LARGEST: f32 = 448.0;

    /// The code that NaN becomes.
    pub const NAN: u8 = super::NAN;

    /// The number of every code.
    pub const TABLE: [f32; 256] = FORMAT.table();

    /// The number of a code, exactly.
    pub const fn decode(code: u8) -> f32 {
        TABLE[code as usize]
    }

    /// The code of the nearest number, ties to even, saturating.
    pub const fn encode(value: f32) -> u8 {
        FORMAT.encode(value)
    }
}

/// The e5m2 format: 1 bit of sign, 5 of exponent with a bias of 15, 2 of mantissa, as the upper byte of f16.
/// 0x7C and 0xFC are infinities, which are read and never written; what is above them is NaN.
pub mod e5m2 {
    const FORMAT: super::Float8 =
        super::Float8 { mantissa: 2, bias: 15, infinity: Some(0x7C), largest: 0x7B };

    /// The largest number, whose code is 0x7B.
    pub const LARGEST: f32 = 57344.0;

    /// The code that NaN becomes.
    pub const NAN: u8 = super::NAN;

    /// The number of every code.
    pub const TABLE: [f32; 256] = FORMAT.table();

    /// The number of a code, exactly.
    pub const fn decode(code: u8) -> f32 {
        TABLE[code as usize]
    }

    /// The code of the nearest number, ties to even, saturating.
    pub const fn encode(value: f32) -> u8 {
        FORMAT.encode(value)
    }
}

/// Integers from -127 to 127. The code -128 is read as it is and never written.
pub mod int8 {
    /// The largest.
    pub const LARGEST: f32 = 127.0;

    /// The nearest integer, ties to even, saturating; 0 for NaN.
    pub fn encode(value: f32) -> i8 {
        value.clamp(-LARGEST, LARGEST).round_ties_even() as i8
    }
}

/// Integers from -7 to 7, in the lower four bits of a byte. The code -8 is read as it is and never written.
pub mod int4 {
    /// The largest.
    pub const LARGEST: f32 = 7.0;

    /// The bits of the nearest integer, ties to even, saturating; 0 for NaN.
    pub fn encode(value: f32) -> u8 {
        value.clamp(-LARGEST, LARGEST).round_ties_even() as i8 as u8 & 0xF
    }
}

/// A kind of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// Numbers of the e4m3 format.
    E4m3,
    /// Integers of 8 bits.
    Int8,
    /// Integers of 4 bits, two to a byte.
    Int4,
    /// Numbers of the e5m2 format.
    E5m2,
}

/// The numbers of int8 codes, by their bits.
const INT8_TABLE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = code as u8 as i8 as f32;
        code += 1;
    }
    table
};

/// The numbers of int4 codes, by the lower four bits.
const INT4_TABLE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = ((code as u8) << 4) as i8 as f32 / 16.0;
        code += 1;
    }
    table
};

impl Codes {
    /// All, in declaration order.
    pub const ALL: [Codes; 4] = [Codes::E4m3, Codes::Int8, Codes::Int4, Codes::E5m2];

    /// The codes that are elements of this type; `None` for numbers that are computed with as they are.
    pub const fn of(dtype: Dtype) -> Option<Codes> {
        match dtype {
            Dtype::E4m3 => Some(Codes::E4m3),
            Dtype::Int8 => Some(Codes::Int8),
            Dtype::Int4 => Some(Codes::Int4),
            Dtype::E5m2 => Some(Codes::E5m2),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => None,
        }
    }

    /// The element type.
    pub const fn dtype(self) -> Dtype {
        match self {
            Codes::E4m3 => Dtype::E4m3,
            Codes::Int8 => Dtype::Int8,
            Codes::Int4 => Dtype::Int4,
            Codes::E5m2 => Dtype::E5m2,
        }
    }

    /// The largest number.
    pub const fn largest(self) -> f32 {
        match self {
            Codes::E4m3 => e4m3::LARGEST,
            Codes::Int8 => int8::LARGEST,
            Codes::Int4 => int4::LARGEST,
            Codes::E5m2 => e5m2::LARGEST,
        }
    }

    /// The number of every code, by its bits; what lies above them in a byte does not count.
    pub const fn table(self) -> &'static [f32; 256] {
        match self {
            Codes::E4m3 => &e4m3::TABLE,
            Codes::Int8 => &INT8_TABLE,
            Codes::Int4 => &INT4_TABLE,
            Codes::E5m2 => &e5m2::TABLE,
        }
    }

    /// The bits of the code nearest to a number.
    pub fn encode(self, value: f32) -> u8 {
        match self {
            Codes::E4m3 => e4m3::encode(value),
            Codes::Int8 => int8::encode(value) as u8,
            Codes::Int4 => int4::encode(value),
            Codes::E5m2 => e5m2::encode(value),
        }
    }

    /// The number of a code.
    pub const fn decode(self, code: u8) -> f32 {
        self.table()[code as usize]
    }

    /// Codes in a byte.
    pub const fn per_byte(self) -> usize {
        self.dtype().per_element()
    }

    /// The number of code `index` of a byte.
    pub const fn number(self, byte: u8, index: usize) -> f32 {
        self.decode(byte >> (4 * index))
    }

    /// The numbers of a row's bytes.
    pub fn numbers(self, bytes: &[u8]) -> impl Iterator<Item = f32> {
        let of = move |&byte| (0..self.per_byte()).map(move |index| self.number(byte, index));
        bytes.iter().flat_map(of)
    }

    /// The codes of a row's values in its bytes. Behind an odd number of codes of 4 bits is a 0.
    pub fn pack(self, values: &[f32], factor: f32) -> impl Iterator<Item = u8> {
        values.chunks(self.per_byte()).map(move |of_byte| {
            let codes = of_byte.iter().enumerate().map(|(i, value)| self.encode(value * factor) << (4 * i));
            codes.fold(0, |byte, code| byte | code)
        })
    }

    /// The descale for values up to `amax` in magnitude: `amax / largest`, and at least the smallest normal
    /// f32, so that rows of zeros have one.
    pub const fn descale(self, amax: f32) -> f32 {
        (amax / self.largest()).max(f32::MIN_POSITIVE)
    }

    /// Codes and descales of a tensor `[batch, rows, heads, dim]`, in that order of axes, with rows of
    /// [`Codes::per_byte`] codes a byte.
    ///
    /// # Panics
    /// Where there are not as many values as the shape says.
    pub fn quantize(self, values: &[f32], shape: [usize; 4], scales: Scales) -> Quantized {
        let [batch, rows, heads, dim] = shape;
        assert_eq!(values.len(), batch * rows * heads * dim, "values of a tensor {shape:?}");
        let slot = |row: usize, head: usize| match scales {
            Scales::Tensor => 0,
            Scales::Head => head,
            Scales::SequenceHead => row / rows.max(1) * heads + head,
            Scales::TokenHead => row * heads + head,
        };
        let count = match scales {
            Scales::Tensor => 1,
            Scales::Head => heads,
            Scales::SequenceHead => batch * heads,
            Scales::TokenHead => batch * rows * heads,
        };
        let of_rows = || {
            let chunks = values.chunks_exact(dim.max(1)).enumerate();
            chunks.map(|(i, row)| (slot(i / heads.max(1), i % heads.max(1)), row))
        };
        let mut largest = vec![0.0f32; count];
        for (slot, row) in of_rows() {
            largest[slot] = largest[slot].max(amax(row));
        }
        let descales: Vec<f32> = largest.into_iter().map(|amax| self.descale(amax)).collect();
        let codes = of_rows().flat_map(|(slot, row)| self.pack(row, reciprocal(descales[slot])));
        Quantized { codes: codes.collect(), descales }
    }
}

/// Which values share a descale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// All.
    Tensor,
    /// Those of a head.
    Head,
    /// Those of a sequence and head.
    SequenceHead,
    /// Those of a row and head.
    TokenHead,
}

/// A tensor in codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The bytes of codes, in the order of the values.
    pub codes: Vec<u8>,
    /// One for each part of the tensor that shares one, in the order of its axes.
    pub descales: Vec<f32>,
}

/// The largest magnitude of the finite ones of `values`; 0 where there is none.
pub fn amax(values: &[f32]) -> f32 {
    values.iter().map(|value| value.abs()).filter(|value| value.is_finite()).fold(0.0, f32::max)
}

/// What values are multiplied by when they are written: `1 / descale`, within the range of f32, and 0 for a
/// descale of 0.
pub const fn reciprocal(descale: f32) -> f32 {
    if descale == 0.0 { 0.0 } else { (1.0 / descale).clamp(f32::MIN, f32::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of an e4m3 code by the definition of the format.
    fn defined(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => sign * mantissa / 8.0 * 2f64.powi(-6),
            (_, _) => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        }
    }

    /// The same of e5m2.
    fn defined_e5m2(code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (i32::from(code >> 2 & 31), f64::from(code & 3));
        match (exponent, code & 3) {
            (31, 0) => sign * f64::INFINITY,
            (31, _) => f64::NAN,
            (0, _) => sign * mantissa / 4.0 * 2f64.powi(-14),
            (_, _) => sign * (1.0 + mantissa / 4.0) * 2f64.powi(exponent - 15),
        }
    }

    #[test]
    fn every_code_is_decoded_and_encoded_back() {
        for code in 0..=255u8 {
            let (number, expected) = (e4m3::decode(code), defined(code));
            if expected.is_nan() {
                assert!(number.is_nan() && code & 0x7F == 0x7F);
                assert_eq!(e4m3::encode(number), e4m3::NAN);
            } else {
                assert_eq!((f64::from(number), number.is_sign_negative()), (expected, code >= 0x80));
                assert_eq!(e4m3::encode(number), code);
            }
            let (number, expected) = (e5m2::decode(code), defined_e5m2(code));
            let again = if expected.is_nan() { e5m2::NAN } else { code - u8::from(expected.is_infinite()) };
            assert_eq!((number.is_nan(), e5m2::encode(number)), (expected.is_nan(), again));
            if !expected.is_nan() {
                assert_eq!((f64::from(number), number.is_sign_negative()), (expected, code >= 0x80));
            }
            let integer = Codes::Int8.decode(code);
            assert_eq!(integer, f32::from(code as i8));
            assert_eq!(Codes::Int8.encode(integer), if code == 0x80 { 0x81 } else { code });
            let halves = [code & 15, code >> 4];
            for (index, half) in halves.into_iter().enumerate() {
                let number = Codes::Int4.number(code, index);
                assert_eq!(number, f32::from(((half ^ 8) as i8) - 8));
                assert_eq!(Codes::Int4.encode(number), if half == 8 { 9 } else { half });
            }
        }
    }

    #[test]
    fn values_between_codes_go_to_the_nearest_and_ties_to_even() {
        for code in 0..0x7Eu8 {
            let (low, high) = (e4m3::decode(code), e4m3::decode(code + 1));
            let middle = (low + high) / 2.0;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for (value, expected) in
                [(middle, even), (middle.next_down(), code), (middle.next_up(), code + 1)]
            {
                assert_eq!(e4m3::encode(value), expected, "{value} between {low} and {high}");
                assert_eq!(e4m3::encode(-value), 0x80 | expected);
            }
        }
        for code in 0..0x7Bu8 {
            let (low, high) = (e5m2::decode(code), e5m2::decode(code + 1));
            let middle = (low + high) / 2.0;
            let even = code + code % 2;
            let numbers = [middle, middle.next_down(), middle.next_up()];
            assert_eq!(numbers.map(e5m2::encode), [even, code, code + 1], "between {low} and {high}");
            assert_eq!(e5m2::encode(-middle), 0x80 | even);
        }
        for value in -127..127i8 {
            let middle = f32::from(value) + 0.5;
            let even = if value % 2 == 0 { value } else { value + 1 };
            assert_eq!(int8::encode(middle), even);
            assert_eq!(
                (int8::encode(middle.next_down()), int8::encode(middle.next_up())),
                (value, value + 1)
            );
        }
        for value in -7..7i8 {
            let middle = f32::from(value) + 0.5;
            let even = if value % 2 == 0 { value } else { value + 1 };
            let numbers = [middle, middle.next_down(), middle.next_up()].map(int4::encode);
            assert_eq!(numbers, [even, value, value + 1].map(|number| number as u8 & 15));
        }
    }

    #[test]
    fn values_beyond_the_largest_saturate_and_nan_stays() {
        for value in [448.0, 449.0, 464.0, 465.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!((e4m3::encode(value), e4m3::encode(-value)), (0x7E, 0xFE), "{value}");
            assert_eq!((int8::encode(value), int8::encode(-value)), (127, -127), "{value}");
            let wide = if value > 57344.0 { value } else { value * 128.0 };
            assert_eq!((e5m2::encode(wide), e5m2::encode(-wide)), (0x7B, 0xFB), "{wide}");
            assert_eq!((int4::encode(value), int4::encode(-value)), (7, 9), "{value}");
        }
        assert_eq!(
            (e4m3::encode(f32::NAN), e4m3::encode(-f32::NAN), int8::encode(f32::NAN)),
            (0x7F, 0x7F, 0)
        );
        let tiny = f32::from_bits(1);
        assert_eq!((e4m3::encode(tiny), e4m3::encode(-tiny), e4m3::encode(-0.0)), (0, 0x80, 0x80));
        assert_eq!(e4m3::encode(2f32.powi(-10)), 0);
        assert_eq!(e4m3::encode(2f32.powi(-10).next_up()), 1);
    }

    #[test]
    fn descales_are_of_what_shares_them() {
        let shape = [2, 3, 2, 4];
        let values: Vec<f32> = (0..48).map(|i| (i as f32 - 20.0) * 0.25).collect();
        for codes in Codes::ALL {
            for (scales, count) in
                [(Scales::Tensor, 1), (Scales::Head, 2), (Scales::SequenceHead, 4), (Scales::TokenHead, 12)]
            {
                let found = codes.quantize(&values, shape, scales);
                let per_byte = codes.per_byte();
                assert_eq!((found.codes.len(), found.descales.len()), (48 / per_byte, count));
                let number = |i: usize| codes.number(found.codes[i / per_byte], i % per_byte);
                for (i, value) in values.iter().enumerate() {
                    let (row, head) = (i / 8, i / 4 % 2);
                    let slot = match scales {
                        Scales::Tensor => 0,
                        Scales::Head => head,
                        Scales::SequenceHead => row / 3 * 2 + head,
                        Scales::TokenHead => i / 4,
                    };
                    let descale = found.descales[slot];
                    // Half a step: of e4m3 2^-4 of the value, or half a subnormal.
                    let step = match codes {
                        Codes::E5m2 => (value.abs() / 8.0).max(descale / 131_072.0),
                        Codes::E4m3 => (value.abs() / 16.0).max(descale / 1024.0),
                        Codes::Int8 | Codes::Int4 => descale / 2.0,
                    };
                    let error = (number(i) * descale - value).abs();
                    assert!(error <= step * 1.001, "{value} became {} times {descale}", number(i));
                }
                let most = (0..48).map(|i| number(i).abs()).fold(0.0, f32::max);
                assert_eq!(most, codes.largest());
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_of_what_is_not_finite_have_descales() {
        for codes in Codes::ALL {
            let per_byte = codes.per_byte();
            let zeros = codes.quantize(&[0.0; 4], [1, 1, 1, 4], Scales::TokenHead);
            assert_eq!((zeros.codes, zeros.descales), (vec![0; 4 / per_byte], vec![f32::MIN_POSITIVE]));
            let values = [f32::INFINITY, -2.0, f32::NAN, f32::NEG_INFINITY];
            let found = codes.quantize(&values, [1, 1, 1, 4], Scales::Tensor);
            assert_eq!(found.descales, [2.0 / codes.largest()]);
            let numbers = [0, 1, 2, 3].map(|i| codes.number(found.codes[i / per_byte], i % per_byte));
            assert_eq!(
                (numbers[0], numbers[1], numbers[3]),
                (codes.largest(), -codes.largest(), -codes.largest())
            );
            match codes {
                Codes::E4m3 | Codes::E5m2 => assert_eq!(found.codes[2], NAN),
                Codes::Int8 | Codes::Int4 => assert_eq!(numbers[2], 0.0),
            }
            let empty = codes.quantize(&[], [0, 3, 2, 4], Scales::SequenceHead);
            assert_eq!(empty, Quantized { codes: vec![], descales: vec![] });
        }
        assert_eq!((reciprocal(0.0), reciprocal(-0.0), reciprocal(4.0)), (0.0, 0.0, 0.25));
        assert_eq!((reciprocal(1e-40), reciprocal(-1e-40)), (f32::MAX, f32::MIN));
    }
}
