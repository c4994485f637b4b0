//! Tensors in device memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::{Problem, Strides, TensorLayout};
use fa_cpu::{TensorMut, TensorRef};
use fa_kernels::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError, result,
};
use fa_kernels::{Error, Input, Output, RawTensor};

use super::half::Stored;

/// A tensor's shape and strides in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placement {
    /// `[batch, seqlen, heads, dim]`.
    pub shape: [usize; 4],
    /// In elements; 0 along axes that are broadcast.
    pub strides: Strides,
}

impl Placement {
    /// A packed tensor.
    pub fn packed(shape: [usize; 4], layout: TensorLayout) -> Placement {
        Placement::padded(shape, layout, 0)
    }

    /// A tensor with `gap` elements (a multiple of 8) after every row of `dim`.
    pub fn padded(shape: [usize; 4], layout: TensorLayout, gap: usize) -> Placement {
        let [_, seqlen, heads, dim] = shape;
        Placement { shape, strides: layout.strides(seqlen, heads, dim + gap) }
    }

    /// Elements from the first to the end of the last, at least 1: CUDA rejects allocations of zero bytes.
    pub fn span(&self) -> usize {
        self.span_of(self.shape)
    }

    fn span_of(&self, shape: [usize; 4]) -> usize {
        if shape.contains(&0) {
            return 1;
        }
        let [b, s, h, d] = shape;
        self.strides.offset(b - 1, s - 1, h - 1, d - 1) as usize + 1
    }

    /// Elements of the tensor.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its layout, if it is packed.
    fn layout(&self) -> Option<TensorLayout> {
        let packed = |layout: &TensorLayout| *self == Placement::packed(self.shape, *layout);
        [TensorLayout::Bshd, TensorLayout::Bhsd].into_iter().find(packed)
    }

    /// Whether it is packed, in either layout.
    pub fn is_packed(&self) -> bool {
        self.layout().is_some()
    }

    /// Calls `row(offset in memory, first element of the packed row)` for every row of one batch entry.
    fn rows(&self, batch: usize, mut row: impl FnMut(usize, usize)) {
        let [_, seqlen, heads, dim] = self.shape;
        for s in 0..seqlen {
            for h in 0..heads {
                row(self.strides.offset(0, s, h, 0) as usize, ((batch * seqlen + s) * heads + h) * dim);
            }
        }
    }

    fn batch_offset(&self, batch: usize) -> usize {
        self.strides.offset(batch, 0, 0, 0) as usize
    }
}

/// Shapes of Q, K, V and O, `[batch, seqlen, heads, dim]` each.
pub fn shapes(problem: &Problem) -> [[usize; 4]; 4] {
    use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
    [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)]
}

/// A tensor in device memory.
#[derive(Debug)]
pub struct DeviceTensor<T> {
    /// At least [`Placement::span`] elements.
    pub data: CudaSlice<T>,
    /// Where they lie.
    pub placement: Placement,
}

/// Spans above this are filled and read batch entry by batch entry (inputs whose entries are above it row by
/// row), and what lies between entries is not looked at.
const WHOLE_LIMIT: usize = 1 << 28;

impl<T: Stored> DeviceTensor<T> {
    /// A tensor filled with NaN, so that elements which a kernel fails to write show.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn nan(stream: &Arc<CudaStream>, placement: Placement) -> Result<DeviceTensor<T>, Error> {
        let data = stream.alloc_zeros(placement.span()).map_err(doing("allocating device memory"))?;
        let mut tensor = DeviceTensor { data, placement };
        tensor.poison(stream)?;
        Ok(tensor)
    }

    /// A copy of a host tensor: in its own layout where it is packed, else packed BSHD.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn upload(stream: &Arc<CudaStream>, host: &TensorRef<'_, T>) -> Result<DeviceTensor<T>, Error> {
        let shape = host.shape();
        let given = Placement { shape, strides: host.strides() };
        match given.layout() {
            Some(layout) => {
                let elements = &host.data()[..given.elements()];
                DeviceTensor::of_elements(stream, elements, Placement::packed(shape, layout))
            }
            None => {
                let packed: Vec<T> = positions(shape).map(|[b, s, h, d]| host.at(b, s, h, d)).collect();
                let placement = Placement::packed(shape, TensorLayout::Bshd);
                DeviceTensor::of_elements(stream, &packed, placement)
            }
        }
    }

    /// A copy of `elements`, which are in memory order.
    fn of_elements(
        stream: &Arc<CudaStream>,
        elements: &[T],
        placement: Placement,
    ) -> Result<DeviceTensor<T>, Error> {
        if elements.is_empty() {
            return DeviceTensor::nan(stream, placement);
        }
        let data = stream.clone_htod(elements).map_err(doing("copying to the GPU"))?;
        Ok(DeviceTensor { data, placement })
    }

    /// A copy of `values`, packed `[batch, seqlen, heads, dim]`, placed as `placement` says; NaN in the gaps.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn place(
        stream: &Arc<CudaStream>,
        values: &[T],
        placement: Placement,
    ) -> Result<DeviceTensor<T>, Error> {
        if placement.layout() == Some(TensorLayout::Bshd) {
            return DeviceTensor::of_elements(stream, values, placement);
        }
        let sent = doing("copying to the GPU");
        let mut tensor = DeviceTensor::nan(stream, placement)?;
        if values.is_empty() {
            return Ok(tensor);
        }
        let [batch, seqlen, heads, dim] = placement.shape;
        let nan = T::nan();
        if placement.span() <= WHOLE_LIMIT {
            let mut whole = vec![nan; placement.span()];
            for b in 0..batch {
                let base = placement.batch_offset(b);
                placement.rows(b, |at, from| {
                    whole[base + at..][..dim].copy_from_slice(&values[from..from + dim]);
                });
            }
            stream.memcpy_htod(&whole, &mut tensor.data).map_err(sent)?;
            return Ok(tensor);
        }
        let entry_len = placement.span_of([1, seqlen, heads, dim]);
        if entry_len > WHOLE_LIMIT {
            let mut rows = Vec::new();
            for b in 0..batch {
                placement.rows(b, |at, from| rows.push((placement.batch_offset(b) + at, from)));
            }
            for (at, from) in rows {
                let mut row = tensor.data.slice_mut(at..at + dim);
                stream.memcpy_htod(&values[from..from + dim], &mut row).map_err(&sent)?;
            }
            return Ok(tensor);
        }
        for b in 0..batch {
            let mut entry = vec![nan; entry_len];
            placement.rows(b, |at, from| entry[at..][..dim].copy_from_slice(&values[from..from + dim]));
            let base = placement.batch_offset(b);
            let mut slice = tensor.data.slice_mut(base..base + entry_len);
            stream.memcpy_htod(&entry, &mut slice).map_err(&sent)?;
        }
        Ok(tensor)
    }

    /// Fills it with NaN, gaps included.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn poison(&mut self, stream: &CudaStream) -> Result<(), Error> {
        fill_with_nan(stream, &mut self.data)
    }

    /// Copies it to the host; waits for the stream.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn download(&self, stream: &Arc<CudaStream>, host: &mut TensorMut<'_, T>) -> Result<(), Error> {
        let elements = self.placement.elements();
        if elements == 0 {
            return Ok(());
        }
        let same = self.placement == Placement { shape: host.shape(), strides: host.strides() };
        if same && self.placement.is_packed() {
            let read = doing("copying from the GPU");
            let to = &mut host.data_mut()[..elements];
            stream.memcpy_dtoh(&self.data.slice(..elements), to).map_err(&read)?;
            return stream.synchronize().map_err(read);
        }
        let (packed, _) = self.read(stream)?;
        let strides = host.strides();
        for ([b, s, h, d], value) in positions(self.placement.shape).zip(packed) {
            host.data_mut()[strides.offset(b, s, h, d) as usize] = value;
        }
        Ok(())
    }

    /// The tensor packed `[batch, seqlen, heads, dim]`, and how many elements of the gaps between its rows
    /// are not NaN any more: stray writes. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<(Vec<T>, usize), Error> {
        let read = doing("copying from the GPU");
        let placement = &self.placement;
        let elements = placement.elements();
        if placement.layout() == Some(TensorLayout::Bshd) && elements > 0 {
            return Ok((stream.clone_dtoh(&self.data).map_err(read)?, 0));
        }
        let written = |values: &[T]| values.iter().filter(|value| !value.is_nan()).count();
        if elements == 0 {
            return Ok((Vec::new(), written(&stream.clone_dtoh(&self.data).map_err(read)?)));
        }
        let [batch, seqlen, heads, dim] = placement.shape;
        let nan = T::nan();
        let mut values = vec![T::default(); elements];
        let mut strays = 0;
        let mut take = |block: &mut [T], base: usize, b: usize| {
            placement.rows(b, |at, to| {
                let row = &mut block[base + at..][..dim];
                values[to..to + dim].copy_from_slice(row);
                row.fill(nan);
            });
        };
        if placement.span() <= WHOLE_LIMIT {
            let mut whole = stream.clone_dtoh(&self.data).map_err(read)?;
            for b in 0..batch {
                take(&mut whole, placement.batch_offset(b), b);
            }
            strays += written(&whole);
        } else {
            let entry_len = placement.span_of([1, seqlen, heads, dim]);
            for b in 0..batch {
                let base = placement.batch_offset(b);
                let entry = self.data.slice(base..base + entry_len);
                let mut entry = stream.clone_dtoh(&entry).map_err(&read)?;
                take(&mut entry, 0, b);
                strays += written(&entry);
            }
        }
        Ok((values, strays))
    }

    /// The tensor as an argument that is read.
    pub fn input(&self) -> Input<'_, T> {
        Input { data: &self.data, strides: self.placement.strides }
    }

    /// The tensor as an argument that is written.
    pub fn output(&mut self) -> Output<'_, T> {
        Output { data: &mut self.data, strides: self.placement.strides }
    }

    /// Its address and strides; the tensor keeps the memory.
    pub fn raw(&self, stream: &CudaStream) -> RawTensor {
        RawTensor { address: self.data.device_ptr(stream).0, strides: self.placement.strides }
    }
}

/// Fills with bytes of all ones, a NaN of every float type.
///
/// # Errors
/// [`Error::Driver`].
pub fn fill_with_nan<U: DeviceRepr>(stream: &CudaStream, slice: &mut CudaSlice<U>) -> Result<(), Error> {
    let bytes = slice.num_bytes();
    let (address, _guard) = slice.device_ptr_mut(stream);
    // SAFETY: the slice is that long and borrowed mutably.
    unsafe { result::memset_d8_async(address, 0xff, bytes, stream.cu_stream()) }
        .map_err(doing("poisoning device memory"))
}

/// Every position of a shape, in packed order.
fn positions([batch, seqlen, heads, dim]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..batch * seqlen * heads * dim)
        .map(move |i| [i / (seqlen * heads * dim), i / (heads * dim) % seqlen, i / dim % heads, i % dim])
}

pub(crate) fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { doing, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_know_their_layout_and_span() {
        let shape = [2, 3, 2, 8];
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            let packed = Placement::packed(shape, layout);
            assert_eq!((packed.span(), packed.layout()), (96, Some(layout)));
            let padded = Placement::padded(shape, layout, 8);
            assert_eq!((padded.span(), padded.layout()), (192 - 8, None));
        }
        let broadcast = Placement { shape, strides: Strides { batch: 0, seq: 16, head: 0, dim: 1 } };
        assert_eq!((broadcast.span(), broadcast.elements()), (40, 96));
        assert_eq!(Placement::packed([0, 3, 2, 8], TensorLayout::Bshd).span(), 1);
    }

    #[test]
    fn positions_are_in_packed_order() {
        let strides = TensorLayout::Bshd.strides(3, 2, 4);
        let offsets: Vec<i64> =
            positions([2, 3, 2, 4]).map(|[b, s, h, d]| strides.offset(b, s, h, d)).collect();
        assert_eq!(offsets, (0..48).collect::<Vec<i64>>());
    }
}
