//! Tensors as laid out in device memory: rows of the sequences at their positions, NaN everywhere else.

use fa_attn::device::{DeviceGradients, Half, Placement, Stored};
use fa_core::{DescaleForm, TensorLayout};
use fa_cpu::OwnedExtras;

use crate::codes::{forms, kinds};
use crate::sequences::{Ragged, Sequences};
use crate::tensors::Inputs;

/// The gradients of a backward.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// dQ, dK and dV, rows of the sequences end to end, `[rows, heads, dim]`.
    pub values: [Vec<T>; 3],
    /// Elements outside all rows that are no longer NaN.
    pub strays: usize,
    /// Gradients of the sinks, `[heads_q]`; empty where there are none.
    pub dsinks: Vec<f32>,
    /// Gradients of the program's arrays, each packed; empty for those without one.
    pub darrays: Vec<Vec<f32>>,
}

impl<T: Half> Gradients<T> {
    /// Whether every bit is the same.
    pub fn same_bits(&self, other: &Gradients<T>) -> bool {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let arrays = |of: &Gradients<T>| of.darrays.iter().map(|own| bits(own)).collect::<Vec<_>>();
        let values = self.values.iter().zip(&other.values).all(|(a, b)| T::bits(a) == T::bits(b));
        values && bits(&self.dsinks) == bits(&other.dsinks) && arrays(self) == arrays(other)
    }
}

impl<T> From<DeviceGradients<T>> for Gradients<T> {
    fn from(DeviceGradients { values, strays, .. }: DeviceGradients<T>) -> Gradients<T> {
        Gradients { values, strays, dsinks: Vec::new(), darrays: Vec::new() }
    }
}

impl<T: Half> Inputs<T> {
    /// The arrays of these inputs.
    pub fn arrays(&self) -> OwnedExtras {
        let given = |values: &[f32]| (!values.is_empty()).then(|| values.to_vec());
        let forms = forms(&self.problem);
        let [q_descale, k_descale, v_descale] = [0, 1, 2].map(|of| match forms[of] {
            DescaleForm::TokenHead => Some(self.row_descales(&self.mods.descales[of])),
            DescaleForm::None | DescaleForm::Head | DescaleForm::SequenceHead => {
                given(&self.mods.descales[of])
            }
        });
        OwnedExtras {
            alibi_slopes: given(&self.mods.slopes),
            sinks: given(&self.mods.sinks),
            q_descale,
            k_descale,
            v_descale,
            ..self.sequences.arrays()
        }
    }

    /// A descale for each row and head in the layout of K; NaN for rows of no sequence.
    fn row_descales(&self, values: &[f32]) -> Vec<f32> {
        let rows = &self.sequences.k;
        let shape = rows.shape(self.problem.heads_kv, 1);
        place(values, rows, &Placement::packed(shape, TensorLayout::Bshd), f32::NAN)
    }

    /// Q, K and V as laid out in memory.
    pub fn stored(&self) -> [Vec<T>; 3] {
        let Sequences { q, k } = &self.sequences;
        let [of_q, of_k, of_v, _] = &self.placements;
        [store(&self.values[0], q, of_q), store(&self.values[1], k, of_k), store(&self.values[2], k, of_v)]
    }

    /// Those of Q, K and V that hold codes, as laid out in memory.
    pub(crate) fn stored_codes(&self) -> [Option<Vec<u8>>; 3] {
        let Sequences { q, k } = &self.sequences;
        let kinds = kinds(&self.problem);
        [0, 1, 2].map(|i| {
            let codes = kinds[i]?;
            // On this thread: it may hold the GPU, and would wait for itself if rayon gave it another case.
            let values: Vec<f32> = self.values[i].iter().map(|value| value.to_f32()).collect();
            let bytes: Vec<u8> = codes.pack(&values, 1.0).collect();
            Some(store(&bytes, if i == 0 { q } else { k }, &self.placements[i]))
        })
    }

    /// Whether there are no lengths, pages, slopes, sinks, codes or descales to pass with the tensors.
    pub fn is_plain(&self) -> bool {
        self.arrays() == OwnedExtras::default() && !self.problem.types.kv.is_code()
    }
}

/// Calls `row(offset in memory, first element on the host)` for each row of each head.
fn each_row(rows: &Ragged, placement: &Placement, mut row: impl FnMut(usize, usize)) {
    let [_, _, heads, dim] = placement.shape;
    for sequence in 0..rows.sequences() {
        for own in 0..rows.len(sequence) {
            let [entry, at] = rows.place(sequence, own);
            for head in 0..heads {
                let to = placement.strides.offset(entry, at, head, 0) as usize;
                row(to, ((rows.start(sequence) + own) * heads + head) * dim);
            }
        }
    }
}

/// `values`, `[rows, heads, dim]` end to end, at their positions in memory; NaN everywhere else.
pub fn store<T: Stored>(values: &[T], rows: &Ragged, placement: &Placement) -> Vec<T> {
    place(values, rows, placement, T::nan())
}

fn place<T: Copy>(values: &[T], rows: &Ragged, placement: &Placement, elsewhere: T) -> Vec<T> {
    let dim = placement.shape[3];
    let mut memory = vec![elsewhere; placement.span()];
    each_row(rows, placement, |to, from| {
        memory[to..to + dim].copy_from_slice(&values[from..from + dim]);
    });
    memory
}

/// The rows in `memory` end to end, and how many elements outside of them are no longer NaN: stray writes.
pub fn load<T: Half>(mut memory: Vec<T>, rows: &Ragged, placement: &Placement) -> (Vec<T>, usize) {
    let [_, _, heads, dim] = placement.shape;
    let mut values = vec![T::default(); rows.total() * heads * dim];
    let nan = T::from_f32(f32::NAN);
    each_row(rows, placement, |from, to| {
        values[to..to + dim].copy_from_slice(&memory[from..from + dim]);
        memory[from..from + dim].fill(nan);
    });
    let strays = memory.iter().filter(|value| !value.to_f32().is_nan()).count();
    (values, strays)
}

/// LSEs of the rows in `memory`, `[heads, rows]` of each sequence end to end, and how many others are no
/// longer NaN.
pub fn load_lse(mut memory: Vec<f32>, rows: &Ragged, heads: usize) -> (Vec<f32>, usize) {
    let mut values = Vec::with_capacity(rows.total() * heads);
    for sequence in 0..rows.sequences() {
        for head in 0..heads {
            for row in 0..rows.len(sequence) {
                let at = rows.lse_place(heads, sequence, head, row);
                values.push(std::mem::replace(&mut memory[at], f32::NAN));
            }
        }
    }
    let strays = memory.iter().filter(|value| !value.is_nan()).count();
    (values, strays)
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;
    use half::bf16;

    use super::*;
    use crate::random::Random;

    #[test]
    fn what_is_stored_is_loaded_and_nothing_else_is_a_stray() {
        let mut random = Random::new(9);
        let lens = [3, 0, 17, 1];
        for rows in [
            Ragged::uniform(4, 5),
            Ragged::padded(&lens, 20),
            Ragged::packed(&lens, 4),
            Ragged::packed_in(&lens, &[4, 5, 17, 3], 2),
            Ragged::paged(&lens, 4, 2, &mut random),
        ] {
            for (layout, gap) in [(TensorLayout::Bshd, 0), (TensorLayout::Bhsd, 0), (TensorLayout::Bshd, 8)] {
                let placement = Placement::padded(rows.shape(2, 8), layout, gap);
                let values: Vec<bf16> =
                    (0..rows.total() * 16).map(|i| bf16::from_f32((i % 251) as f32)).collect();
                let mut memory = store(&values, &rows, &placement);
                assert_eq!(load(memory.clone(), &rows, &placement), (values.clone(), 0));
                if let Some(gap) = memory.iter().position(|value| value.is_nan()) {
                    memory[gap] = bf16::ZERO;
                    assert_eq!(load(memory, &rows, &placement), (values, 1));
                }
            }
            let mut lse = vec![f32::NAN; rows.lse_len(3) + 1];
            for b in 0..rows.sequences() {
                for (head, row) in (0..3).flat_map(|head| (0..rows.len(b)).map(move |row| (head, row))) {
                    lse[rows.lse_place(3, b, head, row)] =
                        (rows.start(b) * 3 + head * rows.len(b) + row) as f32;
                }
            }
            let in_order: Vec<f32> = (0..rows.total() * 3).map(|i| i as f32).collect();
            assert_eq!(load_lse(lse.clone(), &rows, 3), (in_order.clone(), 0));
            *lse.last_mut().expect("one more") = 0.0;
            assert_eq!(load_lse(lse, &rows, 3), (in_order, 1));
        }
    }
}
