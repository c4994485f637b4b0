//! A problem's tensors on the host: values, and how they are to lie on the GPU.

use fa_core::{Problem, Strides, TensorLayout};
use fa_kernels::Element;
use fa_kernels::cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::random::Random;

/// An element type that the GPU kernels compute in: f16 or bf16.
pub trait Half:
    Element + fa_cpu::Element + DeviceRepr + ValidAsZeroBits + PartialEq + Default + std::fmt::Debug
{
    /// The bits of each value: equal bits are equal results, which equal values (0 and -0, NaN) are not.
    fn bits(values: &[Self]) -> &[u16];
}

impl Half for half::f16 {
    fn bits(values: &[Self]) -> &[u16] {
        values.reinterpret_cast()
    }
}

impl Half for half::bf16 {
    fn bits(values: &[Self]) -> &[u16] {
        values.reinterpret_cast()
    }
}

/// Evaluates an expression with `$T` standing for the Rust type of a 16-bit [`fa_core::Dtype`]; `$other` for the rest.
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
            _ => $other,
        }
    };
}
pub(crate) use with_half;

/// Where a tensor lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// `[batch, seqlen, heads, dim]`.
    pub shape: [usize; 4],
    /// In elements; those of axes that are broadcast are 0.
    pub strides: Strides,
}

impl Place {
    /// A packed tensor.
    pub fn packed(shape: [usize; 4], layout: TensorLayout) -> Place {
        Place::padded(shape, layout, 0)
    }

    /// A tensor with `gap` elements (a multiple of 8) behind every row of `dim`.
    pub fn padded(shape: [usize; 4], layout: TensorLayout, gap: usize) -> Place {
        let [_, seqlen, heads, dim] = shape;
        Place { shape, strides: layout.strides(seqlen, heads, dim + gap) }
    }

    /// Elements from the first to behind the last, at least 1.
    pub fn len(&self) -> usize {
        self.reach(self.shape)
    }

    pub(crate) fn reach(&self, shape: [usize; 4]) -> usize {
        if shape.contains(&0) {
            return 1;
        }
        let [b, s, h, d] = shape;
        self.strides.offset(b - 1, s - 1, h - 1, d - 1) as usize + 1
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn is_packed_bshd(&self) -> bool {
        *self == Place::packed(self.shape, TensorLayout::Bshd)
    }

    /// Calls `row(offset within the place, first element of the packed row)` for every row of one batch entry.
    pub(crate) fn rows(&self, batch: usize, mut row: impl FnMut(usize, usize)) {
        let [_, seqlen, heads, dim] = self.shape;
        for s in 0..seqlen {
            for h in 0..heads {
                row(self.strides.offset(0, s, h, 0) as usize, ((batch * seqlen + s) * heads + h) * dim);
            }
        }
    }
}

/// Q, K and V of a problem: values packed `[batch, seqlen, heads, dim]` on the host, and where they are to lie.
#[derive(Clone, Debug)]
pub struct Inputs<T> {
    /// The problem.
    pub problem: Problem,
    /// Q, K and V, packed BSHD.
    pub values: [Vec<T>; 3],
    /// Where Q, K, V and O lie on the GPU.
    pub places: [Place; 4],
}

impl<T: Half> Inputs<T> {
    /// Values as a layer has them (independent, unit variance), the same for the same seed, all packed in `layout`.
    pub fn random(problem: &Problem, layout: TensorLayout, seed: u64) -> Inputs<T> {
        Inputs::placed(problem, shapes(problem).map(|shape| Place::packed(shape, layout)), seed)
    }

    /// Values as of [`Inputs::random`] for tensors that lie anywhere; along broadcast axes they repeat.
    pub fn placed(problem: &Problem, places: [Place; 4], seed: u64) -> Inputs<T> {
        let values = [0usize, 1, 2].map(|i| {
            let mut values = normal(places[i].elements(), seed.wrapping_mul(3).wrapping_add(i as u64));
            repeat_broadcast(&mut values, &places[i]);
            values
        });
        Inputs { problem: *problem, values, places }
    }
}

/// Shapes of Q, K, V and O.
pub fn shapes(problem: &Problem) -> [[usize; 4]; 4] {
    use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
    [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)]
}

fn normal<T: Half>(len: usize, seed: u64) -> Vec<T> {
    const CHUNK: usize = 1 << 14;
    let mut values = vec![T::default(); len];
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        let mut random = Random::new(seed ^ (chunk as u64).wrapping_mul(0xd134_2543_de82_ef95));
        values.iter_mut().for_each(|value| *value = <T as fa_cpu::Element>::from_f32(random.normal()));
    });
    values
}

/// Copies index 0 along the axes of stride 0 to the other indices: what a kernel reads there.
fn repeat_broadcast<T: Copy>(values: &mut [T], place: &Place) {
    let [batch, seqlen, heads, dim] = place.shape;
    let Strides { batch: sb, seq: ss, head: sh, .. } = place.strides;
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

/// dO of unit variance for `inputs`, packed BSHD, the same for the same seed.
pub fn random_dout<T: Half>(inputs: &Inputs<T>, seed: u64) -> Vec<T> {
    let place = dout_place(&inputs.places);
    let mut values = normal(place.elements(), seed ^ 0x5851_f42d_4c95_7f2d);
    repeat_broadcast(&mut values, &place);
    values
}

/// Where dO lies beside Q, K, V and O: as O does, but broadcast along the axes that K is, as the gradient of a sum is.
pub(crate) fn dout_place([_, k, _, out]: &[Place; 4]) -> Place {
    let like_k = |of_k: i64, own: i64| if of_k == 0 { 0 } else { own };
    let strides = Strides {
        batch: like_k(k.strides.batch, out.strides.batch),
        seq: like_k(k.strides.seq, out.strides.seq),
        head: like_k(k.strides.head, out.strides.head),
        dim: out.strides.dim,
    };
    Place { strides, ..*out }
}

/// What a call wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs<T> {
    /// O, packed BSHD.
    pub out: Vec<T>,
    /// LSE, `[batch, heads_q, seqlen_q]`.
    pub lse: Vec<f32>,
    /// Elements between the rows of O that are no longer NaN: written, though they are no part of it.
    pub strays: usize,
}

impl<T: Half> Outputs<T> {
    /// Whether every bit is the same.
    pub fn same_bits(&self, other: &Outputs<T>) -> bool {
        let lse = |outputs: &Outputs<T>| outputs.lse.iter().map(|lse| lse.to_bits()).collect::<Vec<_>>();
        T::bits(&self.out) == T::bits(&other.out) && lse(self) == lse(other)
    }
}

/// What a backward wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// dQ, dK and dV, packed BSHD.
    pub values: [Vec<T>; 3],
    /// Elements between the rows that are no longer NaN.
    pub strays: usize,
}

impl<T: Half> Gradients<T> {
    /// Whether every bit is the same.
    pub fn same_bits(&self, other: &Gradients<T>) -> bool {
        self.values.iter().zip(&other.values).all(|(a, b)| T::bits(a) == T::bits(b))
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};
    use half::bf16;

    use super::*;

    #[test]
    fn broadcast_axes_repeat_their_first_index() {
        let shape = [2, 3, 2, 8];
        let place = Place { shape, strides: Strides { batch: 0, seq: 16, head: 0, dim: 1 } };
        let mut values: Vec<usize> = (0..96).collect();
        repeat_broadcast(&mut values, &place);
        let at = |b: usize, s: usize, h: usize| values[((b * 3 + s) * 2 + h) * 8];
        for b in 0..2 {
            for s in 0..3 {
                assert_eq!((at(b, s, 0), at(b, s, 1)), (s * 16, s * 16));
            }
        }
        assert_eq!(place.len(), 40);
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
        let packed = shapes(&problem).map(|shape| Place::packed(shape, TensorLayout::Bshd));
        let plain = Inputs::<bf16>::placed(&problem, packed, 1);
        assert_eq!(dout_place(&packed), packed[3]);
        let rows = random_dout(&plain, 1);
        assert_ne!(rows[..8], rows[8..16]);
        let mut shared = packed;
        shared[1].strides.head = 0;
        let dout = random_dout(&Inputs::<bf16>::placed(&problem, shared, 1), 1);
        assert!(dout.chunks(4 * 8).all(|heads| heads.chunks(8).all(|row| *row == heads[..8])));
        assert_ne!(dout[..32], dout[32..64]);
    }
}
