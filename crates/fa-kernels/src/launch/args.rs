//! The tensors of a call: addresses with strides, and the kernels' requirements.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use fa_core::lengths::SideRows;
use fa_core::{Dtype, Side, Strides};

use crate::Error;
use crate::launch::checks::check_address;
use crate::launch::extras::{Extras, RawExtras};

/// A Rust type with the representation of a [`Dtype`].
pub trait Element: 'static {
    /// The type.
    const DTYPE: Dtype;
}

/// For partial results and their merging; no attention kernel computes in it.
impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Element for half::f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Element for half::bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

/// A Rust type that K and V are in: an [`Element`], or the bits of codes.
pub trait KvElement: 'static {
    /// Whether its values are of `dtype`.
    fn holds(dtype: Dtype) -> bool;

    /// Its name.
    fn name() -> String;
}

impl<T: Element> KvElement for T {
    fn holds(dtype: Dtype) -> bool {
        dtype == T::DTYPE
    }

    fn name() -> String {
        T::DTYPE.to_string()
    }
}

impl KvElement for u8 {
    fn holds(dtype: Dtype) -> bool {
        dtype.is_code()
    }

    fn name() -> String {
        "8-bit codes".to_owned()
    }
}

/// A tensor that is read: device memory of cudarc, with element `[0, 0, 0, 0]` first, on a multiple of 16
/// bytes.
#[derive(Clone, Copy)]
pub struct Input<'a, T> {
    /// The elements: a `CudaSlice`, a `CudaView`, or anything else that cudarc can point at.
    pub data: &'a dyn DevicePtr<T>,
    /// Strides in elements; `TensorLayout::strides` gives those of packed BSHD and BHSD tensors. Rows are
    /// contiguous (`dim` is 1), the other strides multiples of 8 elements, of codes of 16; 0 broadcasts along
    /// the axis.
    pub strides: Strides,
}

/// A tensor that is written, with element `[0, 0, 0, 0]` first, on a multiple of 16 bytes.
pub struct Output<'a, T> {
    /// The elements.
    pub data: &'a mut dyn DevicePtrMut<T>,
    /// Strides as in [`Input::strides`], with no two rows in the same memory. Memory between rows is left as
    /// it is.
    pub strides: Strides,
}

impl<'a, T> Input<'a, T> {
    /// Its strides, length and stream, for checks.
    pub(crate) fn buffer(&self) -> Buffer<'_> {
        Buffer { strides: &self.strides, len: self.data.len(), stream: self.data.stream() }
    }

    /// Its address for `stream`, with the guard to keep until the launch.
    pub(crate) fn raw<'s>(&self, stream: &'s CudaStream) -> (RawTensor, SyncOnDrop<'s>)
    where
        'a: 's,
    {
        let (address, guard) = self.data.device_ptr(stream);
        (RawTensor { address, strides: self.strides }, guard)
    }
}

impl<'a, T> Output<'a, T> {
    /// Its strides, length and stream, for checks.
    pub(crate) fn buffer(&self) -> Buffer<'_> {
        Buffer { strides: &self.strides, len: self.data.len(), stream: self.data.stream() }
    }

    /// Its address for `stream`, with the guard to keep until the launch.
    pub(crate) fn raw<'s>(self, stream: &'s CudaStream) -> (RawTensor, SyncOnDrop<'s>)
    where
        'a: 's,
    {
        let (address, guard) = self.data.device_ptr_mut(stream);
        (RawTensor { address, strides: self.strides }, guard)
    }
}

/// A tensor of a call, before its device address is taken.
pub(crate) struct Buffer<'a> {
    pub strides: &'a Strides,
    pub len: usize,
    pub stream: &'a CudaStream,
}

/// The arguments of a forward call. Shapes are the problem's, by each tensor's strides. K and V are of `K`:
/// the type of Q, or the bits of codes.
pub struct ForwardArgs<'a, T, K = T, Q = T> {
    /// Q, `[batch, seqlen_q, heads_q, head_dim]`.
    pub q: Input<'a, Q>,
    /// K, `[batch, seqlen_k, heads_kv, head_dim]`.
    pub k: Input<'a, K>,
    /// V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
    pub v: Input<'a, K>,
    /// O, `[batch, seqlen_q, heads_q, head_dim_v]`; every element is written.
    pub out: Output<'a, T>,
    /// LSE, `[batch, heads_q, seqlen_q]` packed, natural logarithm; every element is written.
    pub lse: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// At least `Forward::workspace_bytes` bytes, zero before their first use; a call leaves them zero. Calls
    /// that may run at the same time need one each. `None` where no workspace is needed.
    pub workspace: Option<&'a mut dyn DevicePtrMut<u8>>,
    /// Arguments that only some problems have.
    pub extras: Extras<'a>,
}

/// The arguments of a backward call. Shapes are the problem's, by each tensor's strides.
pub struct BackwardArgs<'a, T> {
    /// Q, `[batch, seqlen_q, heads_q, head_dim]`.
    pub q: Input<'a, T>,
    /// K, `[batch, seqlen_k, heads_kv, head_dim]`.
    pub k: Input<'a, T>,
    /// V, `[batch, seqlen_k, heads_kv, head_dim_v]`.
    pub v: Input<'a, T>,
    /// O of the forward, `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub out: Input<'a, T>,
    /// LSE of the forward, `[batch, heads_q, seqlen_q]` packed, natural logarithm.
    pub lse: &'a dyn DevicePtr<f32>,
    /// The gradient of O, in its shape.
    pub dout: Input<'a, T>,
    /// The gradient of Q, in its shape; every element is written.
    pub dq: Output<'a, T>,
    /// The gradient of K, in its shape; every element is written.
    pub dk: Output<'a, T>,
    /// The gradient of V, in its shape; every element is written.
    pub dv: Output<'a, T>,
    /// At least `Backward::workspace_bytes` bytes, whatever is in them. Calls that may run at the same time
    /// need one each.
    pub workspace: &'a mut dyn DevicePtrMut<u8>,
    /// Arguments that only some problems have.
    pub extras: Extras<'a>,
}

/// A tensor by its address alone, for memory that cudarc does not own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawTensor {
    /// Device address of element `[0, 0, 0, 0]`.
    pub address: u64,
    /// Strides in elements.
    pub strides: Strides,
}

/// [`ForwardArgs`] by addresses alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawForwardArgs {
    /// Q.
    pub q: RawTensor,
    /// K.
    pub k: RawTensor,
    /// V.
    pub v: RawTensor,
    /// O.
    pub out: RawTensor,
    /// LSE; `None` for none.
    pub lse: Option<u64>,
    /// Workspace; `None` where none is needed.
    pub workspace: Option<u64>,
    /// Arguments that only some problems have.
    pub extras: RawExtras,
}

/// [`BackwardArgs`] by addresses alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawBackwardArgs {
    /// Q.
    pub q: RawTensor,
    /// K.
    pub k: RawTensor,
    /// V.
    pub v: RawTensor,
    /// O of the forward.
    pub out: RawTensor,
    /// LSE of the forward.
    pub lse: u64,
    /// The gradient of O.
    pub dout: RawTensor,
    /// The gradient of Q.
    pub dq: RawTensor,
    /// The gradient of K.
    pub dk: RawTensor,
    /// The gradient of V.
    pub dv: RawTensor,
    /// Workspace, a multiple of 16.
    pub workspace: u64,
    /// Arguments that only some problems have.
    pub extras: RawExtras,
}

/// A tensor's name and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Its name in a call's arguments.
    pub name: &'static str,
    /// Independent sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub seqlen: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a row.
    pub dim: usize,
    /// Elements that its strides are multiples of: 8, or 16 of one byte.
    pub step: i64,
}

/// Copies move 16 bytes.
const ALIGN_BYTES: u64 = 16;

/// Elements of 16 bits that copies move.
pub(crate) const STEP: i64 = 8;

/// The same of codes, whose elements have one byte.
const CODE_STEP: i64 = 16;

/// Elements that the strides of a tensor of `dtype` are multiples of.
pub(crate) const fn step_of(dtype: Dtype) -> i64 {
    if dtype.is_code() { CODE_STEP } else { STEP }
}

/// Strides that stay within the 40 bits of bytes that a tensor map holds.
const MAX_STRIDE: i64 = (1 << 39) - 1;

impl Shape {
    /// The tensor of one side of a batch: packed rows are one entry, and pages are the entries of a cache.
    pub(crate) fn of(
        name: &'static str,
        side: Side,
        sequences: usize,
        heads: usize,
        (dim, dtype): (usize, Dtype),
    ) -> Shape {
        let (batch, seqlen) = match side.rows {
            SideRows::Padded { len } => (sequences, len),
            SideRows::Packed { total, .. } => (1, total),
            SideRows::Paged { page, pages, .. } => (pages, page),
        };
        Shape { name, batch, seqlen, heads, dim, step: step_of(dtype) }
    }

    /// Whether it has no elements.
    pub(crate) fn is_empty(&self) -> bool {
        self.batch == 0 || self.seqlen == 0 || self.dim == 0
    }

    fn axes(&self, strides: &Strides) -> [(&'static str, usize, i64); 3] {
        [
            ("batch", self.batch, strides.batch),
            ("seq", self.seqlen, strides.seq),
            ("head", self.heads, strides.head),
        ]
    }

    /// Checks what every kernel requires: a contiguous head dim, other strides in multiples of 16 bytes
    /// (axes of length 1 excepted), and for outputs that each axis steps over all that the axes of smaller
    /// strides reach, so that no two rows share memory. An empty tensor always passes.
    pub(crate) fn check_strides(&self, strides: &Strides, is_output: bool) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let bad = |axis, stride, need| Error::Stride { tensor: self.name, axis, stride, need };
        if strides.dim != 1 && self.dim > 1 {
            return Err(bad("dim", strides.dim, "1: copy the tensor so that its head dim is contiguous"));
        }
        let mut axes = self.axes(strides);
        for (axis, len, stride) in axes {
            if len <= 1 {
                continue;
            }
            if stride % self.step != 0 || !(0..=MAX_STRIDE).contains(&stride) {
                let need = match self.step {
                    CODE_STEP => "a multiple of 16 elements from 0 to 2^39: pad the rows to one",
                    _ => "a multiple of 8 elements from 0 to 2^39: pad the rows to one",
                };
                return Err(bad(axis, stride, need));
            }
        }
        if is_output {
            axes.sort_by_key(|&(_, _, stride)| stride);
            let mut reach = self.dim as i128;
            for (axis, len, stride) in axes.into_iter().filter(|&(_, len, _)| len > 1) {
                if i128::from(stride) < reach {
                    return Err(bad(
                        axis,
                        stride,
                        "beyond the rows of smaller strides in an output: rows that share memory overwrite \
                         each other",
                    ));
                }
                reach += (len as i128 - 1) * i128::from(stride);
            }
        }
        Ok(())
    }

    /// Checks that kernels can count the bytes of the rows of a cache of codes from its first: units of 16,
    /// in 32 bits. The strides have been checked.
    pub(crate) fn check_reach(&self, strides: &Strides) -> Result<(), Error> {
        if self.step != CODE_STEP {
            return Ok(());
        }
        let axes = [("batch", self.batch, strides.batch), ("seq", self.seqlen, strides.seq)];
        let reach: i128 =
            axes.iter().map(|&(_, len, stride)| (len as i128 - 1).max(0) * i128::from(stride)).sum();
        let units = reach / i128::from(ALIGN_BYTES);
        if units < i128::from(u32::MAX) {
            return Ok(());
        }
        let (axis, _, stride) = if self.batch > 1 { axes[0] } else { axes[1] };
        let need = "shorter: rows of K and V in codes lie within 64 GiB of the first";
        Err(Error::Stride { tensor: self.name, axis, stride, need })
    }

    /// Checks that the tensor starts on 16 bytes.
    pub(crate) fn check_address(&self, address: u64) -> Result<(), Error> {
        if self.is_empty() { Ok(()) } else { check_address(self.name, address, ALIGN_BYTES) }
    }

    /// Checks that the last element lies within `len` elements. The strides have been checked.
    pub(crate) fn check_len(&self, strides: &Strides, len: usize) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let last: i128 =
            self.axes(strides).iter().map(|&(_, len, stride)| (len as i128 - 1) * i128::from(stride)).sum();
        let need = last + self.dim as i128;
        if need <= len as i128 {
            return Ok(());
        }
        Err(Error::TooShort {
            tensor: self.name,
            have: len as u64,
            need: u64::try_from(need).unwrap_or(u64::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;

    use super::*;

    const SHAPE: Shape = Shape { name: "k", batch: 2, seqlen: 100, heads: 3, dim: 64, step: STEP };

    #[test]
    fn packed_layouts_pass() {
        for layout in [TensorLayout::Bshd, TensorLayout::Bhsd] {
            let strides = layout.strides(100, 3, 64);
            SHAPE.check_strides(&strides, true).unwrap();
            SHAPE.check_len(&strides, 2 * 100 * 3 * 64).unwrap();
            assert!(matches!(
                SHAPE.check_len(&strides, 2 * 100 * 3 * 64 - 1),
                Err(Error::TooShort { tensor: "k", need: 38400, .. })
            ));
        }
    }

    #[test]
    fn refusals_name_the_axis() {
        let packed = TensorLayout::Bshd.strides(100, 3, 64);
        let refused = |strides: Strides, is_output: bool, part: &str| {
            let text = SHAPE.check_strides(&strides, is_output).expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not name {part}");
        };
        refused(Strides { dim: 2, ..packed }, false, "dim stride of k is 2");
        refused(Strides { seq: 196, ..packed }, false, "seq stride of k is 196");
        refused(Strides { head: -64, ..packed }, false, "head stride of k is -64");
        refused(Strides { batch: 0, ..packed }, true, "batch stride of k is 0");
        refused(Strides { head: 32, ..packed }, true, "head stride of k is 32");
        refused(Strides { seq: 2 * 64, ..packed }, true, "seq stride of k is 128");
        refused(Strides { batch: 99 * 192, ..packed }, true, "batch stride of k is 19008");
        // Interleaved rows of three tensors, such as dQ, dK and dV in one buffer.
        let within = Strides { batch: 100 * 576, seq: 576, ..packed };
        SHAPE.check_strides(&within, true).unwrap();
        SHAPE.check_strides(&Strides { batch: 0, seq: 0, head: 0, ..packed }, false).unwrap();
        let codes = Shape { dim: 72, step: CODE_STEP, ..SHAPE };
        let text =
            codes.check_strides(&TensorLayout::Bshd.strides(100, 3, 72), false).unwrap_err().to_string();
        assert!(text.contains("a multiple of 16 elements"), "{text}");
        let single = Shape { heads: 1, ..SHAPE };
        single.check_strides(&Strides { head: 7, ..packed }, true).unwrap();
        let empty = Shape { seqlen: 0, ..SHAPE };
        empty.check_strides(&TensorLayout::Bshd.strides(0, 3, 64), true).unwrap();
    }

    #[test]
    fn addresses_start_on_16_bytes_unless_the_tensor_is_empty() {
        SHAPE.check_address(0x7000).unwrap();
        assert!(SHAPE.check_address(0x7002).unwrap_err().to_string().contains("a multiple of 16 bytes"));
        assert!(SHAPE.check_address(0).is_err());
        Shape { batch: 0, ..SHAPE }.check_address(0).unwrap();
    }
}
