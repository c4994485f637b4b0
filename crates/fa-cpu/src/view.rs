//! Strided views of rank-4 tensors: bounds are checked once, when a view is made.

use fa_core::{Strides, TensorLayout};

use crate::error::CpuError;

/// A read-only tensor of logical shape `[batch, seqlen, heads, dim]`. Strides may be zero (broadcast) or
/// negative only as far as every element stays within `data`.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a, T> {
    data: &'a [T],
    shape: [usize; 4],
    strides: Strides,
}

/// A tensor that is written; no two elements share storage.
#[derive(Debug)]
pub struct TensorMut<'a, T> {
    data: &'a mut [T],
    shape: [usize; 4],
    strides: Strides,
}

impl<'a, T> TensorRef<'a, T> {
    /// A view with explicit strides. `name` is for errors.
    ///
    /// # Errors
    /// [`CpuError::OutOfBounds`] when an element lies outside `data`.
    pub fn new(
        name: &'static str,
        data: &'a [T],
        shape: [usize; 4],
        strides: Strides,
    ) -> Result<Self, CpuError> {
        check_bounds(name, data.len(), shape, &strides)?;
        Ok(TensorRef { data, shape, strides })
    }

    /// A view of a packed tensor; `shape` is `[batch, seqlen, heads, dim]` whatever the layout.
    ///
    /// # Errors
    /// [`CpuError::OutOfBounds`] when `data` is too short.
    pub fn packed(
        name: &'static str,
        data: &'a [T],
        shape: [usize; 4],
        layout: TensorLayout,
    ) -> Result<Self, CpuError> {
        Self::new(name, data, shape, layout.strides(shape[1], shape[2], shape[3]))
    }

    /// `[batch, seqlen, heads, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> Strides {
        self.strides
    }

    /// The storage.
    pub fn data(&self) -> &'a [T] {
        self.data
    }
}

/// Elements of one row, `step` apart in the storage.
pub struct Row<'a, T> {
    data: &'a [T],
    first: i64,
    step: i64,
    len: usize,
}

impl<'a, T: Copy> Row<'a, T> {
    /// Elements that lie side by side.
    #[cfg(feature = "reference")]
    pub(crate) fn of(data: &'a [T]) -> Row<'a, T> {
        Row { data, first: 0, step: 1, len: data.len() }
    }

    /// Appends the elements as `number` makes them numbers.
    pub(crate) fn append<R>(&self, number: impl Fn(T) -> R, to: &mut Vec<R>) {
        to.extend(self.elements().map(number));
    }

    /// The same where an element has several.
    pub(crate) fn append_all<R, I: Iterator<Item = R>>(&self, numbers: impl Fn(T) -> I, to: &mut Vec<R>) {
        to.extend(self.elements().flat_map(numbers));
    }

    fn elements(&self) -> impl Iterator<Item = T> {
        (0..self.len as i64).map(|at| self.data[(self.first + at * self.step) as usize])
    }
}

impl<'a, T: Copy> TensorRef<'a, T> {
    /// The row at `(batch, seq, head)`.
    pub(crate) fn row(&self, batch: usize, seq: usize, head: usize) -> Row<'a, T> {
        let first = self.strides.offset(batch, seq, head, 0);
        Row { data: self.data, first, step: self.strides.dim, len: self.shape[3] }
    }

    /// The element at `(batch, seq, head, dim)`.
    ///
    /// # Panics
    /// If the position is outside the shape by so much that it leaves the storage.
    pub fn at(&self, batch: usize, seq: usize, head: usize, dim: usize) -> T {
        self.data[self.strides.offset(batch, seq, head, dim) as usize]
    }
}

impl<'a, T> TensorMut<'a, T> {
    /// A view with explicit strides. `name` is for errors.
    ///
    /// # Errors
    /// [`CpuError::OutOfBounds`] when an element lies outside `data`, [`CpuError::Overlap`] when two elements
    /// might share storage.
    pub fn new(
        name: &'static str,
        data: &'a mut [T],
        shape: [usize; 4],
        strides: Strides,
    ) -> Result<Self, CpuError> {
        check_bounds(name, data.len(), shape, &strides)?;
        check_disjoint(name, shape, &strides)?;
        Ok(TensorMut { data, shape, strides })
    }

    /// A view of a packed tensor; `shape` is `[batch, seqlen, heads, dim]` whatever the layout.
    ///
    /// # Errors
    /// [`CpuError::OutOfBounds`] when `data` is too short.
    pub fn packed(
        name: &'static str,
        data: &'a mut [T],
        shape: [usize; 4],
        layout: TensorLayout,
    ) -> Result<Self, CpuError> {
        Self::new(name, data, shape, layout.strides(shape[1], shape[2], shape[3]))
    }

    /// `[batch, seqlen, heads, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Strides in elements.
    pub fn strides(&self) -> Strides {
        self.strides
    }

    /// The storage.
    pub fn data_mut(&mut self) -> &mut [T] {
        self.data
    }

    /// The same tensor, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> TensorMut<'_, T> {
        TensorMut { data: self.data, shape: self.shape, strides: self.strides }
    }

    /// The same elements, to be read.
    pub fn as_ref(&self) -> TensorRef<'_, T> {
        TensorRef { data: self.data, shape: self.shape, strides: self.strides }
    }
}

fn axes(shape: [usize; 4], strides: &Strides) -> [(usize, i64); 4] {
    [(shape[0], strides.batch), (shape[1], strides.seq), (shape[2], strides.head), (shape[3], strides.dim)]
}

fn check_bounds(
    tensor: &'static str,
    len: usize,
    shape: [usize; 4],
    strides: &Strides,
) -> Result<(), CpuError> {
    if shape.contains(&0) {
        return Ok(());
    }
    let (mut low, mut high) = (0i128, 0i128);
    for (length, stride) in axes(shape, strides) {
        let reach = (length as i128 - 1) * i128::from(stride);
        // Two axes that reach across all of memory would wrap.
        if reach < 0 { low = low.saturating_add(reach) } else { high = high.saturating_add(reach) }
    }
    match (low, high) {
        (low, _) if low < 0 => Err(CpuError::OutOfBounds { tensor, last: low, len }),
        (_, high) if high >= len as i128 => Err(CpuError::OutOfBounds { tensor, last: high, len }),
        _ => Ok(()),
    }
}

/// Sorted by stride, every axis must step over all that the smaller ones span.
fn check_disjoint(tensor: &'static str, shape: [usize; 4], strides: &Strides) -> Result<(), CpuError> {
    let mut axes = axes(shape, strides);
    if axes.iter().any(|&(length, _)| length == 0) {
        return Ok(());
    }
    axes.sort_by_key(|&(_, stride)| stride.unsigned_abs());
    let mut span = 1i128;
    for (length, stride) in axes.into_iter().filter(|&(length, _)| length > 1) {
        if i128::from(stride.unsigned_abs()) < span {
            let strides = [strides.batch, strides.seq, strides.head, strides.dim];
            return Err(CpuError::Overlap { tensor, strides });
        }
        span = span.saturating_add((length as i128 - 1) * i128::from(stride.unsigned_abs()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_checked_when_they_are_made() {
        let mut data = [0f32; 24];
        let shape = [1, 3, 2, 4];
        assert!(TensorRef::packed("q", &data, shape, TensorLayout::Bhsd).is_ok());
        assert_eq!(
            TensorRef::packed("q", &data[..23], shape, TensorLayout::Bshd).unwrap_err(),
            CpuError::OutOfBounds { tensor: "q", last: 23, len: 23 }
        );
        let broadcast = Strides { batch: 0, seq: 0, head: 4, dim: 1 };
        assert!(TensorRef::new("k", &data, shape, broadcast).is_ok());
        assert!(matches!(
            TensorMut::new("out", &mut data, shape, broadcast),
            Err(CpuError::Overlap { tensor: "out", .. })
        ));
        // Reaches whose sum is above i128.
        let (all, far) =
            ([usize::MAX; 4], Strides { batch: i64::MAX, seq: i64::MAX, head: i64::MAX, dim: 1 });
        let is_refused = |error: CpuError| matches!(error, CpuError::OutOfBounds { tensor: "q", .. });
        assert!(is_refused(TensorRef::new("q", &data, all, far).unwrap_err()));
        let near = Strides { batch: i64::MIN, seq: i64::MIN, head: i64::MIN, dim: 1 };
        assert!(is_refused(TensorRef::new("q", &data, all, near).unwrap_err()));
        assert!(is_refused(TensorMut::new("q", &mut data, all, far).unwrap_err()));
        let backwards = Strides { batch: 0, seq: -8, head: 4, dim: 1 };
        assert!(matches!(
            TensorRef::new("q", &data, shape, backwards),
            Err(CpuError::OutOfBounds { last: -16, .. })
        ));
    }
}
