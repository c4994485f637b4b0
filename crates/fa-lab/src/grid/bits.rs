//! A case's tensors as bits, for the emulation.

use fa_attn::device::Half;
use fa_core::{Dtype, Problem};
use fa_cpu::OwnedExtras;

use super::case::Case;
use crate::sequences::{Ragged, Sequences};
use crate::tensors::{Inputs, random_dout};

impl Case {
    /// Q, K, V and dO as `fa validate` gives them to a GPU, each as bits in the order of its tensor's packed
    /// `[batch, seqlen, heads, dim]`, rows of no sequence zero; and the extras. `None` for a type that no
    /// kernel takes.
    pub fn bits(&self) -> Option<([Vec<u16>; 4], OwnedExtras)> {
        match self.problem.types.wide() {
            Dtype::F16 => Some(bits_of::<half::f16>(self)),
            Dtype::Bf16 => Some(bits_of::<half::bf16>(self)),
            Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => None,
        }
    }
}

fn bits_of<T: Half>(case: &Case) -> ([Vec<u16>; 4], OwnedExtras) {
    let inputs = case.inputs::<T>();
    let dout = random_dout(&inputs, case.seed());
    let extras = inputs.arrays();
    let Inputs { values: [q, k, v], sequences: Sequences { q: of_q, k: of_k }, .. } = inputs;
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = case.problem;
    let spread = |values: &[T], rows: &Ragged, heads: usize, dim: usize| {
        let [outer, inner, ..] = rows.shape(heads, dim);
        let (bits, row) = (T::bits(values), heads * dim);
        let mut all = vec![0u16; outer * inner * row];
        for sequence in 0..rows.sequences() {
            for at in 0..rows.len(sequence) {
                let [n, s] = rows.place(sequence, at);
                let from = (rows.start(sequence) + at) * row;
                all[(n * inner + s) * row..][..row].copy_from_slice(&bits[from..from + row]);
            }
        }
        all
    };
    let values = [
        spread(&q, &of_q, heads_q, head_dim),
        spread(&k, &of_k, heads_kv, case.problem.head_dim_k()),
        spread(&v, &of_k, heads_kv, head_dim_v),
        spread(&dout, &of_q, heads_q, head_dim_v),
    ];
    (values, extras)
}
