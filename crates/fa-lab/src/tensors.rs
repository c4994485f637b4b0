//! A problem's tensors on the host: values, and their layout on the GPU.

use fa_attn::device::{Half, Placement};
use fa_core::program::{self, ArrayData, ArrayView, OwnedInputs};
use fa_core::quantize::Codes;
use fa_core::{Problem, Strides, TensorLayout};
use fa_kernels::launch::{RawArray, RawProgram};
use rayon::prelude::*;

use crate::codes::{kinds, spread};
use crate::mods::Mods;
use crate::random::Random;
use crate::sequences::Sequences;

/// Evaluates an expression with `$T` standing for the Rust type of a 16-bit [`fa_core::Dtype`]; `$other` for
/// the rest.
macro_rules! with_half {
    ($dtype:expr, $T:ident => $body:expr, else $other:expr) => {
        match $dtype {
            fa_core::Dtype::F16 => {
                type $T = half::f16;
                $body
            }
            fa_core::Dtype::Bf16 => {
                type $T = half::bf16;
                $body
            }
            fa_core::Dtype::F32
            | fa_core::Dtype::E4m3
            | fa_core::Dtype::Int8
            | fa_core::Dtype::Int4
            | fa_core::Dtype::E5m2 => $other,
        }
    };
}
pub(crate) use with_half;

/// Q, K and V of a problem: values of the sequences end to end, `[rows, heads, dim]` (of sequences of one
/// length that is packed `[batch, seqlen, heads, dim]`), and their layout on the GPU.
#[derive(Clone, Debug)]
pub struct Inputs<T> {
    /// The problem.
    pub problem: Problem,
    /// Q, K and V, rows end to end; the numbers of codes where a tensor holds these.
    pub values: [Vec<T>; 3],
    /// Placement of Q, K, V and O on the GPU.
    pub placements: [Placement; 4],
    /// The sequences.
    pub sequences: Sequences,
    /// The slopes, sinks and descales; may be empty.
    pub mods: Mods,
    /// The arrays and scalars of the problem's program.
    pub program: Option<OwnedInputs>,
}

impl<T> Inputs<T> {
    /// The arrays and scalars of the program, as a call takes them.
    pub fn program(&self) -> Option<program::Inputs<'_>> {
        let (given, own) = (self.program.as_ref()?, self.problem.score.program?);
        Some(given.view(&own).expect("they are drawn for the program"))
    }
}

impl<T: Half> Inputs<T> {
    /// Random values (independent, unit variance), the same for the same seed, packed in `layout`; sequences
    /// as long as the problem's bounds allow.
    pub fn random(problem: &Problem, layout: TensorLayout, seed: u64) -> Inputs<T> {
        Inputs::of(problem, Sequences::filling(&problem.lengths), layout, seed)
    }

    /// The same of sequences with lengths of their own.
    pub fn of(problem: &Problem, sequences: Sequences, layout: TensorLayout, seed: u64) -> Inputs<T> {
        let placements = sequences.shapes(problem).map(|shape| Placement::packed(shape, layout));
        Inputs::placed(problem, sequences, placements, seed)
    }

    /// Values as those of [`Inputs::random`] for tensors in any layout; along broadcast axes they repeat.
    pub fn placed(
        problem: &Problem,
        sequences: Sequences,
        placements: [Placement; 4],
        seed: u64,
    ) -> Inputs<T> {
        Inputs::drawn(problem, sequences, placements, seed).held()
    }

    /// The same before the values of codes are rounded.
    pub(crate) fn drawn(
        problem: &Problem,
        sequences: Sequences,
        placements: [Placement; 4],
        seed: u64,
    ) -> Inputs<T> {
        let values = [0usize, 1, 2].map(|i| {
            let rows = if i == 0 { &sequences.q } else { &sequences.k };
            let mut numbers = placements[i];
            numbers.shape[3] *= kinds(problem)[i].map_or(1, Codes::per_byte);
            let [_, _, heads, dim] = numbers.shape;
            let len = rows.total() * heads * dim;
            let mut values = normal(len, seed.wrapping_mul(3).wrapping_add(i as u64));
            repeat_broadcast(&mut values, &numbers);
            values
        });
        let mods = Mods::random(problem, &sequences, seed);
        let program = OwnedInputs::drawn(problem, seed);
        Inputs { problem: *problem, values, placements, sequences, mods, program }
    }

    /// With the numbers of codes in place of the values of tensors that hold codes.
    pub(crate) fn held(mut self) -> Inputs<T> {
        for (values, codes) in self.values.iter_mut().zip(kinds(&self.problem)) {
            let Some(codes) = codes else { continue };
            let number = |value: f32| codes.decode(codes.encode(value * spread(codes)));
            values.par_iter_mut().for_each(|value| *value = T::from_f32(number(value.to_f32())));
        }
        self
    }
}

/// The problem of a call with the program's arrays of [`Inputs`], as those who know their arrays bind it.
pub(crate) fn with_drawn_rows(problem: &Problem) -> Problem {
    let mut raw = RawProgram::default();
    for (to, extents) in raw.arrays.iter_mut().zip(OwnedInputs::drawn_extents(problem)) {
        let ArrayView { strides, extents, .. } = ArrayView::contiguous(ArrayData::U8(&[]), &extents);
        *to = RawArray { address: 0, strides, extents };
    }
    raw.with_aligned_rows(*problem)
}

fn normal<T: Half>(len: usize, seed: u64) -> Vec<T> {
    const CHUNK: usize = 1 << 14;
    let mut values = vec![T::default(); len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        let mut random = Random::new(seed ^ (chunk as u64).wrapping_mul(0xd134_2543_de82_ef95));
        values.iter_mut().for_each(|value| *value = T::from_f32(random.normal()));
    });
    values
}

/// Copies index 0 to the other indices along axes of stride 0, as a kernel reads them.
fn repeat_broadcast<T: Copy>(values: &mut [T], placement: &Placement) {
    let [batch, seqlen, heads, dim] = placement.shape;
    let Strides { batch: sb, seq: ss, head: sh, .. } = placement.strides;
    if sb != 0 && ss != 0 && sh != 0 || values.is_empty() {
        return;
    }
    let first = |index: usize, stride: i64| if stride == 0 { 0 } else { index };
    for b in 0..batch {
        for s in 0..seqlen {
            for h in 0..heads {
                let row = |b, s, h| ((b * seqlen + s) * heads + h) * dim;
                let from = row(first(b, sb), first(s, ss), first(h, sh));
                values.copy_within(from..from + dim, row(b, s, h));
            }
        }
    }
}

/// dO of unit variance for `inputs`, rows end to end, the same for the same seed.
pub fn random_dout<T: Half>(inputs: &Inputs<T>, seed: u64) -> Vec<T> {
    let placement = dout_placement(&inputs.placements);
    let [_, _, heads, dim] = placement.shape;
    let len = inputs.sequences.q.total() * heads * dim;
    let mut values = normal(len, seed ^ 0x5851_f42d_4c95_7f2d);
    repeat_broadcast(&mut values, &placement);
    values
}

/// The placement of dO: that of O, but broadcast along the axes that K is, as the gradient of a sum is.
pub(crate) fn dout_placement([_, k, _, out]: &[Placement; 4]) -> Placement {
    // The strides of a K without rows are meaningless.
    let is_empty = k.shape.contains(&0);
    let like_k = |of_k: i64, own: i64| if of_k == 0 && !is_empty { 0 } else { own };
    let strides = Strides {
        batch: like_k(k.strides.batch, out.strides.batch),
        seq: like_k(k.strides.seq, out.strides.seq),
        head: like_k(k.strides.head, out.strides.head),
        dim: out.strides.dim,
    };
    Placement { strides, ..*out }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};
    use half::bf16;

    use super::*;

    #[test]
    fn broadcast_axes_repeat_their_first_index() {
        let shape = [2, 3, 2, 8];
        let placement = Placement { shape, strides: Strides { batch: 0, seq: 16, head: 0, dim: 1 } };
        let mut values: Vec<usize> = (0..96).collect();
        repeat_broadcast(&mut values, &placement);
        let at = |b: usize, s: usize, h: usize| values[((b * 3 + s) * 2 + h) * 8];
        for b in 0..2 {
            for s in 0..3 {
                assert_eq!((at(b, s, 0), at(b, s, 1)), (s * 16, s * 16));
            }
        }
        assert_eq!(placement.span(), 40);
    }

    #[test]
    fn random_inputs_repeat_and_have_unit_variance() {
        let problem = Problem::square(2, 100, 3, 64, fa_core::Mask::FULL, fa_core::Dtype::Bf16);
        let one = Inputs::<bf16>::random(&problem, TensorLayout::Bhsd, 7);
        let two = Inputs::<bf16>::random(&problem, TensorLayout::Bhsd, 7);
        assert!(one.values == two.values && one.values[0] != one.values[1]);
        let values: Vec<f64> = one.values[2].iter().map(|value| value.to_f64()).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn dout_is_broadcast_as_keys_are() {
        let problem = Problem::square(2, 3, 4, 8, Mask::FULL, Dtype::Bf16);
        let sequences = Sequences::uniform(&problem.lengths);
        let packed = sequences.shapes(&problem).map(|shape| Placement::packed(shape, TensorLayout::Bshd));
        let placed = |placements| Inputs::<bf16>::placed(&problem, sequences.clone(), placements, 1);
        let plain = placed(packed);
        assert_eq!(dout_placement(&packed), packed[3]);
        let rows = random_dout(&plain, 1);
        assert_ne!(rows[..8], rows[8..16]);
        let mut shared = packed;
        shared[1].strides.head = 0;
        let dout = random_dout(&placed(shared), 1);
        assert!(dout.chunks(4 * 8).all(|heads| heads.chunks(8).all(|row| *row == heads[..8])));
        assert_ne!(dout[..32], dout[32..64]);
    }
}
