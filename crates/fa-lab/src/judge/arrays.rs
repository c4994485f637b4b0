//! Gradients of the arrays that a program reads, each packed: sums over the heads that share an element.

use fa_core::Dtype;
use fa_cpu::CpuError;
use fa_cpu::compare::{self, Comparison};
use fa_cpu::reference::low_precision::keep_farther;

/// The sums of some heads' gradients, in low precision.
pub(super) type Arrays = Vec<Vec<f32>>;

/// Adds a head's gradients; arrays without a gradient are empty.
pub(super) fn add<R: Copy + std::ops::AddAssign>(sums: &mut Vec<Vec<R>>, head: Vec<Vec<R>>) {
    if sums.is_empty() {
        *sums = head;
        return;
    }
    for (sum, own) in sums.iter_mut().zip(head) {
        sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
    }
}

/// The expected gradients of every array.
#[derive(Clone, Debug, Default)]
pub(super) struct ArrayGradients {
    pub exact: Vec<Vec<f64>>,
    /// The first draw.
    pub low: Arrays,
    pub noise: Vec<f64>,
}

impl ArrayGradients {
    /// Of each element of `worst` and `draw` the one that is farther from the exact value.
    ///
    /// # Errors
    /// Sums of other arrays.
    pub(super) fn keep_farther(&self, worst: &mut Arrays, draw: &Arrays) -> Result<(), CpuError> {
        for ((worst, draw), exact) in worst.iter_mut().zip(draw).zip(&self.exact) {
            keep_farther(worst, draw, exact)?;
        }
        Ok(())
    }

    /// Compares array `slot` as a kernel of `dtype` has summed it; `None` for one without a gradient.
    ///
    /// # Errors
    /// Sums of another length.
    pub(super) fn compare(
        &self,
        slot: usize,
        dtype: Dtype,
        found: &Arrays,
        low: &Arrays,
    ) -> Result<Option<Comparison>, CpuError> {
        let exact = &self.exact[slot];
        if exact.is_empty() {
            return Ok(None);
        }
        let none = Vec::new();
        let found = found.get(slot).unwrap_or(&none);
        let judged = compare::compare([1, 1, exact.len(), 1], dtype, found, exact, Some(&low[slot]))?;
        Ok(Some(judged.allowing(self.noise[slot])))
    }
}
