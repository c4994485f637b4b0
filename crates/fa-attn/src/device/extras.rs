//! The other inputs of a launch in device memory: lengths, page table, slopes, sinks.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_core::lengths::SideRows;
use fa_core::program::{Element, Inputs, Program};
use fa_core::{Dtype, Extra, Pass, Problem};
use fa_cpu::{Arguments, Extras, OwnedExtras};
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use fa_kernels::launch::{RawArray, RawProgram};
use fa_kernels::{Backward, Error, Forward, RawExtras};
use half::{bf16, f16};

use super::tensor::doing;

/// Starts and lengths of sequences, page table, slopes and sinks in device memory, as far as the problem has
/// them. Kernels read them when they run: one captured graph serves any values within the problem's bounds.
///
/// Kernels trust the starts of packed sequences, which therefore come from the host, where they are checked.
/// Lengths in use and page tables may hold anything, and other kernels may write them: rows beyond the
/// allocation and pages that do not exist are left out.
#[derive(Debug, Default)]
pub struct DeviceExtras {
    inputs: fa_core::Extras<CudaSlice<i32>, CudaSlice<f32>>,
    /// Rows that the packed sequences have, of queries and of keys.
    packed_rows: [usize; 2],
    /// A work plan that serves all forwards with these lengths, as [`DeviceExtras::make_plan`] makes it.
    /// Without one, every launch makes its own.
    plan: Option<CudaSlice<u8>>,
    /// The same for backwards.
    backward_plan: Option<CudaSlice<u8>>,
    /// The arrays and scalars of the problem's program.
    pub program: Option<DeviceProgram>,
}

/// Extras of a forward that an append before it takes too: see [`DeviceExtras::for_append`].
#[derive(Debug)]
pub struct AppendLengths<'a> {
    /// The page table, `[batch, table_columns]`.
    pub page_table: Option<&'a CudaSlice<i32>>,
    /// Keys in use, `[batch]`, for [`AppendArgs::used_out`](super::args::AppendArgs::used_out).
    pub seqused_k: Option<&'a mut CudaSlice<i32>>,
}

/// The gradient of an array in device memory.
#[derive(Debug)]
pub enum DeviceGradient {
    /// In f32.
    F32(CudaSlice<f32>),
    /// In 16 bits of f16, which these are.
    F16(CudaSlice<u16>),
    /// In 16 bits of bf16, which these are.
    Bf16(CudaSlice<u16>),
}

impl DeviceGradient {
    fn address(&self) -> u64 {
        match self {
            DeviceGradient::F32(own) => own.device_ptr(own.stream()).0,
            DeviceGradient::F16(own) | DeviceGradient::Bf16(own) => own.device_ptr(own.stream()).0,
        }
    }

    /// Copies it from the host, in its type.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub(crate) fn write(&mut self, stream: &Arc<CudaStream>, values: &[f32]) -> Result<(), Error> {
        let bits = |of: fn(f32) -> u16| values.iter().map(|&value| of(value)).collect::<Vec<_>>();
        let written = match self {
            DeviceGradient::F32(own) => stream.memcpy_htod(values, own),
            DeviceGradient::F16(own) => {
                stream.memcpy_htod(&bits(|value| f16::from_f32(value).to_bits()), own)
            }
            DeviceGradient::Bf16(own) => {
                stream.memcpy_htod(&bits(|value| bf16::from_f32(value).to_bits()), own)
            }
        };
        written.map_err(doing("copying to the GPU"))
    }

    /// Copies it to the host.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn read(&self, stream: &Arc<CudaStream>) -> Result<Vec<f32>, Error> {
        let read = doing("copying from the GPU");
        let narrow = |own, value: fn(u16) -> f32| -> Result<Vec<f32>, Error> {
            let bits: Vec<u16> = stream.clone_dtoh(own).map_err(&read)?;
            Ok(bits.into_iter().map(value).collect())
        };
        match self {
            DeviceGradient::F32(own) => stream.clone_dtoh(own).map_err(&read),
            DeviceGradient::F16(own) => narrow(own, |bits| f16::from_bits(bits).to_f32()),
            DeviceGradient::Bf16(own) => narrow(own, |bits| bf16::from_bits(bits).to_f32()),
        }
    }
}

/// Arrays and scalars of a program: the arrays in device memory, where a captured graph reads them.
#[derive(Debug)]
pub struct DeviceProgram {
    /// The elements, in the order of the program's declarations.
    pub arrays: Vec<CudaSlice<u8>>,
    /// Their gradients, each packed, of those that a backward is to compute.
    pub gradients: Vec<Option<DeviceGradient>>,
    /// Strides, extents and scalars; the addresses are those of `arrays`.
    layout: RawProgram,
}

impl DeviceProgram {
    /// Copies of the host's arrays.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn upload(stream: &Arc<CudaStream>, inputs: &Inputs<'_>) -> Result<DeviceProgram, Error> {
        let arrays = inputs.arrays().iter().map(|array| copy(stream, &array.data.bytes()));
        let arrays = arrays.collect::<Result<_, _>>()?;
        Ok(DeviceProgram { arrays, gradients: Vec::new(), layout: layout_of(inputs) })
    }

    /// As [`RawProgram::with_aligned_rows`]: the problem whose kernel is the fastest for these arrays. A
    /// launch on others whose rows are not as these refuses them.
    pub fn with_aligned_rows(&self, problem: Problem) -> Problem {
        self.raw(Pass::Forward).with_aligned_rows(problem)
    }

    /// Makes room in f32 for the gradients of the arrays that want one; backwards write them from now on.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn want_gradients(&mut self, stream: &Arc<CudaStream>, program: &Program) -> Result<(), Error> {
        self.make_room(stream, program, |_| None)
    }

    /// The same with those of arrays of 16 bits in their type.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn want_narrow_gradients(
        &mut self,
        stream: &Arc<CudaStream>,
        program: &Program,
    ) -> Result<(), Error> {
        self.make_room(stream, program, Element::narrow)
    }

    fn make_room(
        &mut self,
        stream: &Arc<CudaStream>,
        program: &Program,
        narrow: impl Fn(Element) -> Option<Dtype>,
    ) -> Result<(), Error> {
        self.gradients.clear();
        for (slot, (decl, array)) in program.arrays().iter().zip(&self.layout.arrays).enumerate() {
            let len =
                array.extents[..decl.rank].iter().map(|&extent| extent.max(0) as usize).product::<usize>();
            let len = len.max(1);
            let narrow = narrow(decl.element);
            self.layout.is_narrow[slot] = narrow.is_some();
            let make = || match narrow {
                Some(Dtype::F16) => Ok(DeviceGradient::F16(stream.alloc_zeros(len)?)),
                Some(_) => Ok(DeviceGradient::Bf16(stream.alloc_zeros(len)?)),
                None => Ok(DeviceGradient::F32(stream.alloc_zeros(len)?)),
            };
            let room = decl.gradient.then(make).transpose();
            self.gradients.push(room.map_err(doing("allocating device memory"))?);
        }
        Ok(())
    }

    /// Copies other elements into the same memory, for instance between replays of a captured graph; scalars,
    /// strides and extents stay those of the upload.
    ///
    /// # Errors
    /// [`Error::TooShort`] where an array has another number of elements, [`Error::Driver`].
    pub fn update(&mut self, stream: &Arc<CudaStream>, inputs: &Inputs<'_>) -> Result<(), Error> {
        for (to, array) in self.arrays.iter_mut().zip(inputs.arrays()) {
            let bytes = array.data.bytes();
            replace(stream, "program", Some(to), Some(&bytes))?;
        }
        Ok(())
    }

    /// What a launch takes.
    pub fn raw(&self, pass: Pass) -> RawProgram {
        let mut raw = self.layout;
        let wanted = self.gradients.iter().filter(|_| pass.is_backward());
        for (to, gradient) in raw.gradients.iter_mut().zip(wanted) {
            *to = gradient.as_ref().map_or(0, DeviceGradient::address);
        }
        for (to, array) in raw.arrays.iter_mut().zip(&self.arrays) {
            to.address = array.device_ptr(array.stream()).0;
        }
        raw
    }
}

/// Strides, extents and scalars of host inputs, whose copies begin at addresses that CUDA aligns.
pub(crate) fn layout_of(inputs: &Inputs<'_>) -> RawProgram {
    let mut layout = RawProgram { scalars: inputs.scalar_bits(), ..RawProgram::default() };
    for (array, to) in inputs.arrays().iter().zip(&mut layout.arrays) {
        *to = RawArray { address: 0, strides: array.strides, extents: array.extents };
    }
    layout
}

impl DeviceExtras {
    /// Copies of the host's extras.
    ///
    /// # Errors
    /// [`Error::Descending`] for starts that do not ascend from 0, [`Error::Driver`].
    pub fn upload<'a>(
        stream: &Arc<CudaStream>,
        arguments: impl Into<Arguments<'a>>,
    ) -> Result<DeviceExtras, Error> {
        let Arguments { extras, program, .. } = arguments.into();
        let packed_rows = packed_rows(&extras)?;
        let program = program.map(|inputs| DeviceProgram::upload(stream, inputs)).transpose()?;
        let inputs = extras.try_map(|_, values| copy(stream, values), |_, values| copy(stream, values))?;
        Ok(DeviceExtras { inputs, packed_rows, plan: None, backward_plan: None, program })
    }

    /// Tensors that are in device memory already.
    ///
    /// # Safety
    /// Starts of packed sequences ascend from 0 to no more than `packed_rows`, of queries and of keys, and do
    /// so as long as launches read them.
    pub unsafe fn of_device(
        inputs: fa_core::Extras<CudaSlice<i32>, CudaSlice<f32>>,
        packed_rows: [usize; 2],
    ) -> DeviceExtras {
        DeviceExtras { inputs, packed_rows, plan: None, backward_plan: None, program: None }
    }

    /// Copies of what the lengths of sequences are read from; waits for them.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub(super) fn host_lengths(&self, stream: &Arc<CudaStream>) -> Result<OwnedExtras, Error> {
        let of = |slice: &Option<CudaSlice<i32>>| {
            let copied = slice.as_ref().map(|slice| stream.clone_dtoh(slice)).transpose();
            copied.map_err(doing("copying from the GPU"))
        };
        let inputs = &self.inputs;
        let lengths = OwnedExtras {
            cu_seqlens_q: of(&inputs.cu_seqlens_q)?,
            cu_seqlens_k: of(&inputs.cu_seqlens_k)?,
            seqused_q: of(&inputs.seqused_q)?,
            seqused_k: of(&inputs.seqused_k)?,
            ..OwnedExtras::NONE
        };
        stream.synchronize().map_err(doing("waiting for the GPU"))?;
        Ok(lengths)
    }

    /// Keys in use, `[batch]`.
    pub fn seqused_k(&self) -> Option<&CudaSlice<i32>> {
        self.inputs.seqused_k.as_ref()
    }

    /// [`DeviceExtras::seqused_k`] to be written, by
    /// [`AppendArgs::used_out`](super::args::AppendArgs::used_out) or by a copy.
    pub fn seqused_k_mut(&mut self) -> Option<&mut CudaSlice<i32>> {
        self.inputs.seqused_k.as_mut()
    }

    /// The page table, `[batch, table_columns]`.
    pub fn page_table(&self) -> Option<&CudaSlice<i32>> {
        self.inputs.page_table.as_ref()
    }

    /// The page table to be written.
    pub fn page_table_mut(&mut self) -> Option<&mut CudaSlice<i32>> {
        self.inputs.page_table.as_mut()
    }

    /// What an append takes of these extras: the page table, and the lengths that it writes.
    pub fn for_append(&mut self) -> AppendLengths<'_> {
        let fa_core::Extras { page_table, seqused_k, .. } = &mut self.inputs;
        AppendLengths { page_table: page_table.as_ref(), seqused_k: seqused_k.as_mut() }
    }

    /// Gives a backward the gradient of the LSE, `[batch, heads_q, seqlen_q]` or `[heads_q, total_q]`.
    pub fn set_dlse(&mut self, dlse: Option<CudaSlice<f32>>) {
        self.inputs.dlse = dlse;
    }

    /// Checks that the packed rows are among those of `problem`.
    ///
    /// # Errors
    /// [`Error::Beyond`].
    pub(super) fn check_rows(&self, problem: &Problem) -> Result<(), Error> {
        let sides = [("cu_seqlens_q", problem.lengths.q()), ("cu_seqlens_k", problem.lengths.k())];
        for ((name, side), rows) in sides.into_iter().zip(self.packed_rows) {
            let SideRows::Packed { total, .. } = side.rows else { continue };
            if rows > total {
                return Err(Error::Beyond { name, rows, most: total });
            }
        }
        Ok(())
    }

    /// Copies new values into the same memory, for instance between replays of a captured graph. The host
    /// slices are read before this returns.
    ///
    /// # Errors
    /// [`Error::MissingExtra`] and [`Error::UnusedExtra`] where the set of tensors differs from the uploaded
    /// one, [`Error::TooShort`] where a length does, [`Error::Descending`], [`Error::Driver`].
    pub fn update(&mut self, stream: &Arc<CudaStream>, extras: &Extras<'_>) -> Result<(), Error> {
        // More than before, until all are copied: a copy may fail halfway.
        let packed_rows = packed_rows(extras)?;
        self.packed_rows = [0, 1].map(|side| self.packed_rows[side].max(packed_rows[side]));
        self.inputs.as_mut().zip(*extras).try_map(
            |extra, (slice, values)| replace(stream, extra.name(), slice, values),
            |extra, (slice, values)| replace(stream, extra.name(), slice, values),
        )?;
        self.packed_rows = packed_rows;
        Ok(())
    }

    /// Plans the work of `forward` for the lengths that are in device memory now: once a step, for all layers
    /// whose kernel and problem are the same. Allocates at the first call; the launch waits for nothing.
    /// After [`DeviceExtras::update`], plan again. Does nothing for a kernel that needs no plan.
    ///
    /// # Errors
    /// As [`Forward::plan`].
    pub fn make_plan(&mut self, forward: &Forward, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let Some(mut plan) = room(stream, self.plan.take(), forward.plan_bytes())? else { return Ok(()) };
        let planned = forward.plan(stream, self.args(), &mut plan);
        self.plan = Some(plan);
        planned
    }

    /// [`DeviceExtras::make_plan`] for backwards.
    ///
    /// # Errors
    /// As [`Backward::plan`].
    pub fn make_backward_plan(&mut self, backward: &Backward, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let Some(mut plan) = room(stream, self.backward_plan.take(), backward.plan_bytes())? else {
            return Ok(());
        };
        let planned = backward.plan(stream, self.backward_args(&mut None), &mut plan);
        self.backward_plan = Some(plan);
        planned
    }

    /// The extras as arguments of a forward.
    pub(super) fn args(&self) -> fa_kernels::Extras<'_> {
        fa_kernels::Extras { plan: self.plan.as_ref().map(|plan| plan as _), ..self.args_of(Pass::Forward) }
    }

    /// The extras as arguments of a backward, with the gradient of the sinks.
    pub(super) fn backward_args<'a>(
        &'a self,
        dsinks: &'a mut Option<CudaSlice<f32>>,
    ) -> fa_kernels::Extras<'a> {
        fa_kernels::Extras {
            plan: self.backward_plan.as_ref().map(|plan| plan as _),
            dsinks: dsinks.as_mut().map(|slice| slice as _),
            ..self.args_of(Pass::BACKWARD)
        }
    }

    fn args_of(&self, pass: Pass) -> fa_kernels::Extras<'_> {
        let inputs = self.inputs.as_ref().read_by(pass);
        let inputs =
            inputs.map(|_, slice| slice as &dyn DevicePtr<i32>, |_, slice| slice as &dyn DevicePtr<f32>);
        let program = self.program.as_ref().map(|program| program.raw(pass));
        fa_kernels::Extras { inputs, program, ..fa_kernels::Extras::default() }
    }

    /// The addresses for a forward.
    pub fn raw(&self, stream: &CudaStream) -> RawExtras {
        self.raw_of(Pass::Forward, &self.plan, stream)
    }

    /// The addresses for a backward.
    pub fn backward_raw(&self, dsinks: Option<u64>, stream: &CudaStream) -> RawExtras {
        RawExtras { dsinks, ..self.raw_of(Pass::BACKWARD, &self.backward_plan, stream) }
    }

    fn raw_of(&self, pass: Pass, plan: &Option<CudaSlice<u8>>, stream: &CudaStream) -> RawExtras {
        let inputs = self.inputs.as_ref().read_by(pass);
        let inputs = inputs.map(|_, slice| slice.device_ptr(stream).0, |_, slice| slice.device_ptr(stream).0);
        let plan = plan.as_ref().map(|plan| plan.device_ptr(stream).0);
        let program = self.program.as_ref().map(|program| program.raw(pass));
        RawExtras { inputs, plan, program, ..RawExtras::default() }
    }
}

/// The rows of packed queries and keys, by their starts; 0 where nothing is packed.
fn packed_rows(extras: &Extras<'_>) -> Result<[usize; 2], Error> {
    let rows = |extra: Extra, starts: Option<&[i32]>| {
        let mut least = 0;
        for (index, value) in starts.into_iter().flatten().copied().enumerate() {
            if value < least {
                return Err(Error::Descending { name: extra.name(), index, value, least });
            }
            least = value;
        }
        Ok(least as usize)
    };
    Ok([rows(Extra::CuSeqlensQ, extras.cu_seqlens_q)?, rows(Extra::CuSeqlensK, extras.cu_seqlens_k)?])
}

/// Makes `memory` at least `bytes` bytes long, reusing what is long enough; `None` for 0 bytes.
fn room(
    stream: &Arc<CudaStream>,
    have: Option<CudaSlice<u8>>,
    bytes: usize,
) -> Result<Option<CudaSlice<u8>>, Error> {
    match have {
        _ if bytes == 0 => Ok(None),
        Some(have) if have.len() >= bytes => Ok(Some(have)),
        _ => stream.alloc_zeros(bytes).map(Some).map_err(doing("allocating device memory")),
    }
}

/// Copies `values` over those that are there.
fn replace<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    name: &'static str,
    slice: Option<&mut CudaSlice<T>>,
    values: Option<&[T]>,
) -> Result<(), Error> {
    match (slice, values) {
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Error::UnusedExtra { name }),
        (Some(slice), None) => Err(Error::MissingExtra { name, need: slice.len() }),
        (Some(slice), Some(values)) if values.is_empty() && slice.len() == 1 => Ok(()),
        (Some(slice), Some(values)) if values.len() != slice.len() => {
            let (have, need) = (values.len() as u64, slice.len() as u64);
            Err(Error::TooShort { tensor: name, have, need })
        }
        (Some(slice), Some(values)) => stream.memcpy_htod(values, slice).map_err(doing("copying to the GPU")),
    }
}

/// A device copy; CUDA rejects allocations of zero bytes, so that an empty slice takes one element.
pub(super) fn copy<T: DeviceRepr + Default + Clone>(
    stream: &Arc<CudaStream>,
    values: &[T],
) -> Result<CudaSlice<T>, Error> {
    let one = [T::default()];
    let values = if values.is_empty() { &one } else { values };
    stream.clone_htod(values).map_err(doing("copying to the GPU"))
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask};

    use super::*;

    #[test]
    fn starts_ascend_and_end_within_the_problem() {
        let starts = |q: &[i32], k: &[i32]| {
            packed_rows(&Extras { cu_seqlens_q: Some(q), cu_seqlens_k: Some(k), ..Extras::NONE })
        };
        let said = |found: Result<[usize; 2], Error>| found.expect_err("refused").to_string();
        assert_eq!(said(starts(&[0, 5, 3], &[0])), "cu_seqlens_q[2] is 3, below 5: starts ascend from 0");
        assert_eq!(said(starts(&[0], &[-1, 5])), "cu_seqlens_k[0] is -1, below 0: starts ascend from 0");
        assert_eq!(packed_rows(&Extras::NONE).unwrap(), [0, 0]);
        let packed_rows = starts(&[0, 5, 5, 12], &[0, 0, 8, 9]).unwrap();
        assert_eq!(packed_rows, [12, 9]);
        let extras = DeviceExtras { packed_rows, ..DeviceExtras::default() };
        let problem = |rows_q, rows_k| {
            let square = Problem::square(1, 1, 4, 64, Mask::FULL, Dtype::Bf16);
            square.with_lengths(Lengths::packed(3, rows_q, rows_k, 12, 12))
        };
        extras.check_rows(&problem(12, 9)).unwrap();
        extras.check_rows(&problem(100, 100)).unwrap();
        let said = |q, k| extras.check_rows(&problem(q, k)).expect_err("refused").to_string();
        let bind = "and the problem has";
        assert_eq!(
            said(11, 9),
            format!("cu_seqlens_q ends at row 12, {bind} 11: bind a problem of 12 rows or more")
        );
        assert_eq!(
            said(12, 8),
            format!("cu_seqlens_k ends at row 9, {bind} 8: bind a problem of 9 rows or more")
        );
    }
}
