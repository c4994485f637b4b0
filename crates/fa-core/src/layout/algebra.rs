//! Coalesce, composition, complement and right inverse.

use super::{IntTuple, Layout, LayoutError, Mode};

impl Layout {
    /// The same function on `0..size()` with the fewest modes: extents of 1 are dropped, and neighbours that
    /// continue each other are merged.
    ///
    /// Law: same size, and `coalesce(A)(i) = A(i)` for every `i`.
    pub fn coalesce(&self) -> Layout {
        from_flat(&merged(self.flat()))
    }

    /// Each top-level mode coalesced by itself, so that the rank stays.
    pub fn coalesce_modes(&self) -> Layout {
        let (shapes, strides): (Vec<_>, Vec<_>) =
            self.modes().iter().map(Layout::coalesce).map(|m| (m.shape, m.stride)).unzip();
        match &self.shape {
            IntTuple::Int(_) => self.coalesce(),
            IntTuple::Tuple(_) => Layout::part(&IntTuple::Tuple(shapes), &IntTuple::Tuple(strides)),
        }
    }

    /// The layout `i -> self(inner(i))`, with the shape of `inner` (a mode of it may split into several).
    ///
    /// Law: `compose(A, B)(i) = A(B(i))` for every `i < size(B)`.
    ///
    /// # Errors
    /// `OutOfDomain` if `inner` reaches past the domain of `self`. `StrideIndivisible`, `ExtentIndivisible`
    /// or `Carry` if the function is not mode by mode a shape and a stride. The last is a condition that CuTe
    /// leaves to its user: modes of `inner` that are fine one at a time may together carry over the end of a
    /// mode of `self`, as in `(4,8):(8,1)` after `(2,2):(2,2)`.
    pub fn compose(&self, inner: &Layout) -> Result<Layout, LayoutError> {
        if inner.cosize() > self.size() {
            return Err(LayoutError::OutOfDomain { index: inner.cosize() - 1, size: self.size() });
        }
        let outer = merged(self.flat());
        let mut reach = vec![0; outer.len()];
        let (shape, stride) = compose_tuple(&outer, &mut reach, &inner.shape, &inner.stride)?;
        Layout::new(shape, stride)
    }

    /// The layout of the smallest offsets that `self` leaves out: shifted copies of `self`, one per offset of
    /// the complement, do not overlap and together cover `0..bound`.
    ///
    /// Laws, for `C = complement(A, bound)`: `A(i) + C(j)` takes no value twice (up to what `A` itself
    /// repeats); every offset below `bound` is such a sum; `C` is strictly increasing. Where `bound` is not a
    /// multiple of the block that `A` and the gaps in it fill, the last copy goes past it.
    ///
    /// # Errors
    /// `NotComplementable` if the strides of `self` overlap or interleave unevenly; `Overflow`.
    pub fn complement(&self, bound: u64) -> Result<Layout, LayoutError> {
        let mut modes: Vec<Mode> = self.flat();
        modes.retain(|m| m.extent > 1 && m.stride > 0);
        modes.sort_by_key(|m| m.stride);

        let mut gaps = Vec::new();
        let mut covered = 1u64;
        for mode in modes {
            if mode.stride % covered != 0 {
                return Err(LayoutError::NotComplementable { stride: mode.stride, covered });
            }
            gaps.push(Mode { extent: mode.stride / covered, stride: covered });
            covered = mode
                .stride
                .checked_mul(mode.extent)
                .ok_or(LayoutError::Overflow { what: "the block that the layout covers" })?;
        }
        gaps.push(Mode { extent: bound.div_ceil(covered).max(1), stride: covered });
        let gaps = merged(gaps);
        // Unlike the parts of a layout, the last copy may reach past 64 bits.
        Layout::from_modes(&gaps.iter().map(|m| (m.extent, m.stride)).collect::<Vec<_>>())
    }

    /// The longest layout `R` that undoes `self` from the right.
    ///
    /// Law: `A(R(j)) = j` for every `j < size(R)`. `size(R)` is the length of the contiguous run of offsets
    /// from 0 that whole modes of `A` make; it is `size(A)` exactly if `A` is a bijection onto `0..size(A)`.
    pub fn right_inverse(&self) -> Layout {
        let mut index_step = 1;
        let mut steps = Vec::new();
        for mode in merged(self.flat()) {
            steps.push((mode, index_step));
            index_step *= mode.extent;
        }
        steps.sort_by_key(|(mode, _)| mode.stride);

        let mut run = 1;
        let mut inverse = Vec::new();
        for (mode, index_step) in steps {
            if mode.stride == run {
                inverse.push(Mode { extent: mode.extent, stride: index_step });
                run *= mode.extent;
            }
        }
        from_flat(&merged(inverse))
    }
}

/// Drops extents of 1 and joins modes that continue each other.
fn merged(modes: Vec<Mode>) -> Vec<Mode> {
    let mut merged: Vec<Mode> = Vec::with_capacity(modes.len());
    for mode in modes {
        match merged.last_mut() {
            _ if mode.extent == 1 => {}
            Some(last) if last.extent.checked_mul(last.stride) == Some(mode.stride) => {
                last.extent *= mode.extent;
            }
            _ => merged.push(mode),
        }
    }
    merged
}

/// A layout of modes whose size and cosize are known to fit.
fn from_flat(modes: &[Mode]) -> Layout {
    match modes {
        [] => Layout::part(&IntTuple::Int(1), &IntTuple::Int(0)),
        [m] => Layout::part(&IntTuple::Int(m.extent), &IntTuple::Int(m.stride)),
        _ => {
            Layout::part(&modes.iter().map(|m| m.extent).collect(), &modes.iter().map(|m| m.stride).collect())
        }
    }
}

fn compose_tuple(
    outer: &[Mode],
    reach: &mut [u64],
    shape: &IntTuple,
    stride: &IntTuple,
) -> Result<(IntTuple, IntTuple), LayoutError> {
    match (shape, stride) {
        (IntTuple::Tuple(shapes), IntTuple::Tuple(strides)) => {
            let (mut new_shapes, mut new_strides) = (Vec::new(), Vec::new());
            for (shape, stride) in shapes.iter().zip(strides) {
                let (shape, stride) = compose_tuple(outer, reach, shape, stride)?;
                new_shapes.push(shape);
                new_strides.push(stride);
            }
            Ok((IntTuple::Tuple(new_shapes), IntTuple::Tuple(new_strides)))
        }
        (IntTuple::Int(extent), IntTuple::Int(stride)) => compose_mode(outer, reach, *extent, *stride),
        (IntTuple::Int(_), IntTuple::Tuple(_)) | (IntTuple::Tuple(_), IntTuple::Int(_)) => {
            Err(LayoutError::NotCongruent { shape: shape.to_string(), stride: stride.to_string() })
        }
    }
}

/// Takes `extent` steps of `stride` through the index space of `outer` (coalesced).
///
/// An index is a number whose digits are the coordinates of `outer`. A step that is a multiple of an extent
/// leaves that digit alone. A step within a digit is worth `step * stride` until the digit is full, after
/// which the steps go on in the next digit, one by one, provided that steps and digit end together.
/// `reach` sums up the largest digit that each mode of the inner layout attains: while no sum exceeds its
/// digit, adding offsets mode by mode is the same as adding indices, which is what makes the result right for
/// the modes together.
fn compose_mode(
    outer: &[Mode],
    reach: &mut [u64],
    extent: u64,
    stride: u64,
) -> Result<(IntTuple, IntTuple), LayoutError> {
    if extent == 1 || stride == 0 {
        return Ok((IntTuple::Int(extent), IntTuple::Int(0)));
    }
    let (mut left, mut step) = (extent, stride);
    let mut pieces = Vec::new();
    for (mode, reach) in outer.iter().zip(reach) {
        if left == 1 {
            break;
        }
        if step >= mode.extent {
            if step % mode.extent != 0 {
                return Err(LayoutError::StrideIndivisible { stride: step, extent: mode.extent });
            }
            step /= mode.extent;
            continue;
        }
        let taken = if (left - 1).saturating_mul(step) < mode.extent {
            left
        } else {
            if mode.extent % step != 0 {
                return Err(LayoutError::StrideIndivisible { stride: step, extent: mode.extent });
            }
            let steps = mode.extent / step;
            if left % steps != 0 {
                return Err(LayoutError::ExtentIndivisible { extent: left, steps });
            }
            steps
        };
        *reach = reach.saturating_add((taken - 1) * step);
        if *reach >= mode.extent {
            return Err(LayoutError::Carry { reach: *reach, extent: mode.extent });
        }
        let worth = step
            .checked_mul(mode.stride)
            .ok_or(LayoutError::Overflow { what: "a stride of the composition" })?;
        pieces.push(Mode { extent: taken, stride: worth });
        left /= taken;
        step = 1;
    }
    if left > 1 {
        let size = outer.iter().map(|m| m.extent).product();
        return Err(LayoutError::OutOfDomain { index: (extent - 1).saturating_mul(stride), size });
    }
    let composed = from_flat(&pieces);
    Ok((composed.shape, composed.stride))
}
