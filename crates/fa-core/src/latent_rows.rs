//! Packed rows of latents, as servers keep them: e4m3 codes times scales for groups of columns, and the
//! columns that rotary embedding turned in bfloat16. Every form has 512 columns of latents (V).
//!
//! ```
//! use fa_core::latent_rows::LatentRows;
//!
//! let form = LatentRows::of_bytes(656).unwrap();
//! assert_eq!((form.columns(), form.bytes()), (576, 656));
//! // A row of ones (code 0x38) with scales of 2, and zeros behind them.
//! let mut row = vec![0x38; 512];
//! row.extend([2f32.to_le_bytes(); 4].concat());
//! row.resize(656, 0);
//! let mut values = Vec::new();
//! form.decode(&row, 1.0, |value| values.push(value));
//! assert_eq!((values.len(), values[511], values[512]), (576, 2.0, 0.0));
//! ```

use crate::quantize::e4m3;

/// The first columns of every form, which are values as well.
pub const LATENTS: usize = 512;

/// How a row lies in its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatentRows {
    /// 656 bytes, DeepSeek-V3.2's: 512 codes, four f32 scales of 128 columns each, 64 columns of bf16.
    Scales128,
    /// 584 bytes, DeepSeek-V4's, whose latents include the turned columns: 448 codes and 64 columns of bf16
    /// for each row of the page, then for each row seven scales of 64 columns in e8m0 and a spare byte.
    Scales64,
    /// 576 bytes: 576 codes with one scale for all.
    Codes,
}

impl LatentRows {
    /// Every form.
    pub const ALL: [LatentRows; 3] = [LatentRows::Scales128, LatentRows::Scales64, LatentRows::Codes];

    /// The form whose rows have this many bytes.
    pub fn of_bytes(bytes: usize) -> Option<LatentRows> {
        LatentRows::ALL.into_iter().find(|form| form.bytes() == bytes)
    }

    /// Of a row.
    pub const fn bytes(self) -> usize {
        match self {
            LatentRows::Scales128 => 656,
            LatentRows::Scales64 => 584,
            LatentRows::Codes => 576,
        }
    }

    /// Columns of a row: those of Q.
    pub const fn columns(self) -> usize {
        match self {
            LatentRows::Scales128 | LatentRows::Codes => 576,
            LatentRows::Scales64 => LATENTS,
        }
    }

    /// The first columns, which are codes; the others are bf16.
    pub const fn codes(self) -> usize {
        match self {
            LatentRows::Scales128 => 512,
            LatentRows::Scales64 => 448,
            LatentRows::Codes => 576,
        }
    }

    /// Columns of codes that share a scale of the row's own, and the bytes of the scale: an f32, or a power
    /// of two in e8m0 behind all rows of the page. Zeros where one scale is given for all.
    pub const fn group(self) -> (usize, usize) {
        match self {
            LatentRows::Scales128 => (128, 4),
            LatentRows::Scales64 => (64, 1),
            LatentRows::Codes => (0, 0),
        }
    }

    /// Whether rows have scales of their own, so that none is given for all.
    pub const fn has_scales(self) -> bool {
        self.group().0 > 0
    }

    /// Hands on the columns of all rows of a page, row by row. `scale` is that of rows without their own.
    pub fn decode(self, page: &[u8], scale: f32, mut each: impl FnMut(f32)) {
        let rows = page.len() / self.bytes();
        let (group, scale_bytes) = self.group();
        match self {
            LatentRows::Scales128 => {
                for row in page.chunks_exact(self.bytes()) {
                    let (codes, behind) = row.split_at(self.codes());
                    let (scales, turned) = behind.split_at(scale_bytes * (self.codes() / group));
                    for (codes, scale) in codes.chunks(group).zip(scales.chunks(scale_bytes)) {
                        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
                        scaled(codes, f64::from(scale), &mut each);
                    }
                    bf16(turned, &mut each);
                }
            }
            LatentRows::Scales64 => {
                let (data, scales) = page.split_at(576 * rows);
                for (row, scales) in data.chunks_exact(576).zip(scales.chunks_exact(8)) {
                    let (codes, turned) = row.split_at(self.codes());
                    for (codes, &exponent) in codes.chunks(group).zip(scales) {
                        scaled(codes, e8m0(exponent), &mut each);
                    }
                    bf16(turned, &mut each);
                }
            }
            LatentRows::Codes => scaled(page, f64::from(scale), &mut each),
        }
    }
}

/// The numbers of e4m3 codes, times `scale`.
fn scaled(codes: &[u8], scale: f64, each: &mut impl FnMut(f32)) {
    codes.iter().for_each(|&code| each((f64::from(e4m3::decode(code)) * scale) as f32));
}

/// Numbers of bf16, which are the upper halves of f32.
fn bf16(bytes: &[u8], each: &mut impl FnMut(f32)) {
    let halves = bytes.chunks_exact(2).map(|half| u16::from_le_bytes([half[0], half[1]]));
    halves.for_each(|half| each(f32::from_bits(u32::from(half) << 16)));
}

/// A power of two by its exponent.
fn e8m0(exponent: u8) -> f64 {
    if exponent == u8::MAX { f64::NAN } else { 2f64.powi(i32::from(exponent) - 127) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(form: LatentRows, page: &[u8], scale: f32) -> Vec<f32> {
        let mut values = Vec::new();
        form.decode(page, scale, |value| values.push(value));
        values
    }

    #[test]
    fn scales_are_those_of_their_row_and_group() {
        // Two rows, each with ones; scales differ by row and group.
        let mut page = Vec::new();
        for row in 0..2 {
            page.extend([0x38; 512]);
            page.extend((0..4).flat_map(|group| ((1 + 4 * row + group) as f32 * 0.1).to_le_bytes()));
            page.extend([0x40, 0xC0].repeat(64)); // -3.0
        }
        let values = decoded(LatentRows::Scales128, &page, 1.0);
        assert_eq!(values.len(), 2 * 576);
        for (at, value) in values.iter().enumerate() {
            let (row, column) = (at / 576, at % 576);
            let need = if column < 512 { (1 + 4 * row + column / 128) as f32 * 0.1 } else { -3.0 };
            assert_eq!(*value, need, "row {row} column {column}");
        }

        let mut page = [[0x38; 448].as_slice(), &[0x80, 0x3F].repeat(64)].concat().repeat(2);
        page.extend([127, 128, 126, 0, 254, 255, 130, 77, 120, 121, 122, 123, 124, 125, 126, 99]);
        let values = decoded(LatentRows::Scales64, &page, 1.0);
        assert_eq!(values.len(), 2 * 512);
        let row = |row: usize| (0..8).map(|group| values[row * 512 + 64 * group]).collect::<Vec<_>>();
        assert_eq!(row(0)[..5], [1.0, 2.0, 0.5, 2f32.powi(-127), 2f32.powi(127)]);
        assert!(row(0)[5].is_nan());
        assert_eq!(row(0)[6..], [8.0, 1.0]);
        assert_eq!(row(1)[..3], [2f32.powi(-7), 2f32.powi(-6), 2f32.powi(-5)]);

        let page: Vec<u8> = (0..576).map(|i| (i % 256) as u8).collect();
        let values = decoded(LatentRows::Codes, &page, 0.5);
        assert_eq!((values[0x7E], values[0xFE]), (224.0, -224.0));
        assert!(values[0x7F].is_nan() && values[0xFF].is_nan());
    }

    #[test]
    fn a_form_is_known_by_its_bytes() {
        for form in LatentRows::ALL {
            assert_eq!(LatentRows::of_bytes(form.bytes()), Some(form));
            // Codes, scales (of Scales64 with a spare byte) and bf16 fill a row.
            let (group, scale_bytes) = form.group();
            let scales = form.codes().checked_div(group).unwrap_or(0) * scale_bytes;
            let filled = form.codes() + scales.next_multiple_of(8) + 2 * (form.columns() - form.codes());
            assert_eq!(filled, form.bytes());
        }
        assert_eq!(LatentRows::of_bytes(512), None);
    }
}
