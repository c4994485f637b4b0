//! Tensors for tests: random ones of any problem, and views of packed ones.

use fa_core::{Problem, TensorLayout};
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_cpu::{Element, TensorRef};

/// Q, K, V and dO of one problem, packed BSHD.
#[derive(Clone, Debug)]
pub(crate) struct Inputs<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub dout: Vec<T>,
}

/// Views of [`Inputs`].
#[derive(Clone, Copy)]
pub(crate) struct Views<'a, T> {
    pub q: TensorRef<'a, T>,
    pub k: TensorRef<'a, T>,
    pub v: TensorRef<'a, T>,
    pub dout: TensorRef<'a, T>,
}

impl<T: Element> Inputs<T> {
    /// Normally distributed and rounded to `T`; the same for the same seed.
    pub(crate) fn random(problem: &Problem, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut draw = |shape: [usize; 4]| -> Vec<T> {
            (0..shape.iter().product()).map(|_| T::from_f64(random.normal())).collect()
        };
        Inputs {
            q: draw(q_shape(problem)),
            k: draw(k_shape(problem)),
            v: draw(v_shape(problem)),
            dout: draw(out_shape(problem)),
        }
    }

    pub(crate) fn views(&self, problem: &Problem) -> Views<'_, T> {
        Views {
            q: bshd("q", &self.q, q_shape(problem)),
            k: bshd("k", &self.k, k_shape(problem)),
            v: bshd("v", &self.v, v_shape(problem)),
            dout: bshd("dout", &self.dout, out_shape(problem)),
        }
    }
}

/// A view of a packed BSHD tensor.
pub(crate) fn bshd<'a, T>(name: &'static str, data: &'a [T], shape: [usize; 4]) -> TensorRef<'a, T> {
    TensorRef::packed(name, data, shape, TensorLayout::Bshd).expect("the data has the shape's length")
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): enough for test data, and the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    pub(crate) fn uniform(&mut self) -> f64 {
        ((self.bits() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// Normal with mean 0 and variance 1, by Box and Muller.
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Asserts that two slices agree within `tolerance * (1 + largest magnitude expected)`, infinities and NaN
/// exactly.
pub(crate) fn assert_close(name: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}: length");
    let largest = expected.iter().filter(|value| value.is_finite()).fold(0.0, |max: f64, v| max.max(v.abs()));
    for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let near = if got.is_finite() && expected.is_finite() {
            (got - expected).abs() <= tolerance * (1.0 + largest)
        } else {
            got == expected || got.is_nan() && expected.is_nan()
        };
        assert!(near, "{name}[{index}] is {got}, expected {expected} within {tolerance:e} * (1 + {largest})");
    }
}
