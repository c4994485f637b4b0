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
    absolute: f64,
    finite: usize,
    whole: Products,
    /// Elements of a row; 0 for one row of all.
    row_len: usize,
    row: Products,
    /// The least cosine of the rows that are complete.
    least_cosine: Option<f64>,
}

/// Products of outputs and references.
#[derive(Clone, Copy, Default)]
struct Products {
    dot: f64,
    out: f64,
    reference: f64,
}

impl Products {
    fn add(&mut self, out: f64, reference: f64) {
        self.dot += out * reference;
        self.out += out * out;
        self.reference += reference * reference;
    }

    /// Of the angle between outputs and references; 1 where both are 0.
    fn cosine(&self) -> f64 {
        let norms = self.out.sqrt() * self.reference.sqrt();
        if self.out == 0.0 && self.reference == 0.0 {
            1.0
        } else if norms == 0.0 {
            0.0
        } else {
            self.dot / norms
        }
    }
}

impl Sums {
    /// Nothing summed yet of rows of so many elements.
    pub(super) fn of_rows(row_len: usize) -> Sums {
        Sums { row_len, ..Sums::default() }
    }

    /// Adds an element and what it should be.
    pub(super) fn add(&mut self, out: f64, reference: f64) {
        if out.is_finite() && reference.is_finite() {
            let difference = (out - reference).abs();
            if self.worst.is_none() || difference > self.max_abs {
                (self.max_abs, self.worst) = (difference, Some(self.count));
            }
            self.squares += difference * difference;
            self.absolute += difference;
            self.whole.add(out, reference);
            self.row.add(out, reference);
            self.finite += 1;
        } else if out != reference && !(out.is_nan() && reference.is_nan()) {
            self.mismatches += 1;
            self.first_mismatch = self.first_mismatch.or(Some(self.count));
        }
        self.count += 1;
        if self.row_len > 0 && self.count.is_multiple_of(self.row_len) {
            let cosine = self.row.cosine();
            self.least_cosine = Some(self.least_cosine.map_or(cosine, |least| least.min(cosine)));
            self.row = Products::default();
        }
    }

    /// Mean of the finite differences.
    pub(super) fn mean_abs(&self) -> f64 {
        self.absolute / self.finite.max(1) as f64
    }

    /// The least cosine of a row's angle; that of all where there are no rows.
    pub(super) fn least_cosine(&self) -> f64 {
        self.least_cosine.unwrap_or_else(|| self.cosine())
    }

    /// Root of the mean square of the finite differences.
    pub(super) fn rms(&self) -> f64 {
        (self.squares / self.finite.max(1) as f64).sqrt()
    }

    /// Of the angle between the finite elements and their references; 1 where both are 0.
    pub(super) fn cosine(&self) -> f64 {
        self.whole.cosine()
    }
}
