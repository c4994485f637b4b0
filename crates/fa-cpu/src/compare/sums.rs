//! What a comparison sums up over the elements.

/// Sums over pairs of an element and what it should be.
#[derive(Default)]
pub(super) struct Sums {
    count: usize,
    /// Pairs of which one is not finite and the other not the same.
    pub(super) mismatches: usize,
    pub(super) first_mismatch: Option<usize>,
    /// The largest difference of finite pairs, and where it is.
    pub(super) max_abs: f64,
    pub(super) worst: Option<usize>,
    squares: f64,
    finite: usize,
    dot: f64,
    out_norm: f64,
    reference_norm: f64,
}

impl Sums {
    /// Adds an element and what it should be.
    pub(super) fn add(&mut self, out: f64, reference: f64) {
        if out.is_finite() && reference.is_finite() {
            let difference = (out - reference).abs();
            if self.worst.is_none() || difference > self.max_abs {
                (self.max_abs, self.worst) = (difference, Some(self.count));
            }
            self.squares += difference * difference;
            self.dot += out * reference;
            self.out_norm += out * out;
            self.reference_norm += reference * reference;
            self.finite += 1;
        } else if out != reference && !(out.is_nan() && reference.is_nan()) {
            self.mismatches += 1;
            self.first_mismatch = self.first_mismatch.or(Some(self.count));
        }
        self.count += 1;
    }

    /// Root of the mean square of the finite differences.
    pub(super) fn rms(&self) -> f64 {
        (self.squares / self.finite.max(1) as f64).sqrt()
    }

    /// Of the angle between the finite elements and their references; 1 where both are 0.
    pub(super) fn cosine(&self) -> f64 {
        let norms = f64::sqrt(self.out_norm) * f64::sqrt(self.reference_norm);
        if self.out_norm == 0.0 && self.reference_norm == 0.0 {
            1.0
        } else if norms == 0.0 {
            0.0
        } else {
            self.dot / norms
        }
    }
}
