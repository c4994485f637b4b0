//! Rows of an append that go to a cache of codes.

use std::sync::{Mutex, PoisonError};

use fa_core::quantize::{Codes, amax, reciprocal};
use fa_core::{Append, DescaleForm};

use super::rows::{Row, Scratch, write};
use crate::element::Element;
use crate::view::TensorMut;

/// The descales of a cache's rows.
pub(super) struct Descaling<'a> {
    form: DescaleForm,
    values: Mutex<&'a mut [f32]>,
    heads: usize,
    /// Rows of an entry of the cache.
    rows: usize,
}

impl<'a> Descaling<'a> {
    pub(super) fn new(append: &Append, form: DescaleForm, values: Option<&'a mut [f32]>) -> Self {
        let [_, rows, heads, _] = append.cache_shape(0);
        Descaling { form, values: Mutex::new(values.unwrap_or(&mut [])), heads, rows }
    }

    /// What divides a row, which is what it says, or, per row and head, what the row's values ask for.
    fn of(&self, codes: Codes, row: &Row, head: usize, values: &[f32]) -> f32 {
        let mut own = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        match self.form {
            DescaleForm::None => 1.0,
            DescaleForm::Head => own[head],
            DescaleForm::SequenceHead => own[row.sequence * self.heads + head],
            DescaleForm::TokenHead => {
                let descale = codes.descale(amax(values));
                own[(row.to.0 * self.rows + row.to.1) * self.heads + head] = descale;
                descale
            }
        }
    }
}

/// Writes rows as codes.
pub(super) struct Quantiser<'a> {
    codes: Codes,
    descaling: Descaling<'a>,
}

impl<'a> Quantiser<'a> {
    /// For a checked append, whose cache is of codes.
    pub(super) fn new(append: &Append, descaling: Descaling<'a>) -> Self {
        let codes = append.codes.expect("the cache is one of codes").kind;
        Quantiser { codes, descaling }
    }

    /// Writes the rows that `fill` makes in the type of the new ones.
    pub(super) fn write<T: Element>(
        &self,
        cache: &mut TensorMut<'_, u8>,
        rows: &[Row],
        fill: impl Fn(&Row, usize, &mut [T], &mut Scratch) + Sync,
    ) {
        write(cache, rows, |row, head, to, scratch| {
            let mut own = vec![T::default(); to.len() * self.codes.per_byte()];
            fill(row, head, &mut own, scratch);
            let values: Vec<f32> = own.into_iter().map(T::to_f32).collect();
            let factor = reciprocal(self.descaling.of(self.codes, row, head, &values));
            to.iter_mut().zip(self.codes.pack(&values, factor)).for_each(|(to, byte)| *to = byte);
        });
    }
}
