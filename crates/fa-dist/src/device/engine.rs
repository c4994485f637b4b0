//! A prepared program's steps, enqueued on a GPU's streams.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use fa_attn::device::Bound;
use fa_core::TensorLayout;
use fa_core::program::MAX_ARRAYS;
use fa_kernels::cudarc::driver::{CudaStream, sys};
use fa_kernels::{RawBackwardArgs, RawExtras, RawForwardArgs, RawMergeArgs, RawPartialResult, RawTensor};

use super::marks::Marks;
use super::memory::{copy_rows, driver};
use super::prepared::{Kernel, Prepared};
use super::rank::Rank;
use super::transfers::Transfers;
use crate::error::Error;
use crate::moved;
use crate::nccl::DevicePiece;
use crate::program::{Buffer, Lane, Op, Part, Piece, Step, View, Window};
use crate::run::{Engine, Order, run};

/// Addresses of the caller's tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Given {
    pub(super) q: Option<RawTensor>,
    pub(super) k: Option<RawTensor>,
    pub(super) v: Option<RawTensor>,
    pub(super) out: Option<RawTensor>,
    pub(super) lse: u64,
    pub(super) dout: Option<RawTensor>,
    pub(super) gradients: [Option<RawTensor>; 3],
    pub(super) dsinks: u64,
    pub(super) dlse: u64,
    /// Of arrays by their numbers in the whole's program.
    pub(super) darrays: [u64; MAX_ARRAYS],
    pub(super) extras: RawExtras,
}

/// Enqueues a program on the caller's stream and the rank's own.
pub(super) fn launch(
    rank: &mut Rank,
    prepared: &Prepared,
    given: Given,
    stream: &Arc<CudaStream>,
    marks: Option<&Marks>,
) -> Result<(), Error> {
    let transfer = rank.transfer.clone();
    let has_transfers = prepared.program.steps.iter().any(|step| step.lane == Lane::Transfer);
    let mut engine = DeviceEngine { rank, prepared, given, streams: [stream, &transfer], marks };
    if !has_transfers {
        // A decode is short: waits between streams would be a large part of it.
        return run(&prepared.program, Order::Listed, &mut engine);
    }
    let recorded = driver("recording an event");
    let waited = driver("waiting for an event");
    prepared.begun.record(stream).map_err(&recorded)?;
    transfer.wait(&prepared.begun).map_err(&waited)?;
    run(&prepared.program, Order::Listed, &mut engine)?;
    prepared.ended.record(&transfer).map_err(&recorded)?;
    stream.wait(&prepared.ended).map_err(&waited)
}

struct DeviceEngine<'a> {
    rank: &'a mut Rank,
    prepared: &'a Prepared,
    given: Given,
    streams: [&'a Arc<CudaStream>; 2],
    marks: Option<&'a Marks>,
}

impl DeviceEngine<'_> {
    fn stream(&self, lane: Lane) -> &CudaStream {
        match lane {
            Lane::Compute => self.streams[0],
            Lane::Transfer => self.streams[1],
        }
    }

    fn mark(&self, number: usize, is_end: bool, lane: Lane) -> Result<(), Error> {
        self.marks.map_or(Ok(()), |marks| marks.record(number, is_end, self.stream(lane)))
    }

    /// A buffer's address and strides.
    fn base(&self, buffer: Buffer) -> RawTensor {
        let shape = self.prepared.program.shape(buffer);
        let strides = shape.order.strides(shape.rows, shape.heads, shape.dim);
        let own = |address: u64| RawTensor { address, strides };
        let given = match buffer {
            Buffer::Q => self.given.q,
            Buffer::K => self.given.k,
            Buffer::V => self.given.v,
            Buffer::Out => self.given.out,
            Buffer::Lse => Some(own(self.given.lse)),
            Buffer::Dout => self.given.dout,
            Buffer::Dlse => Some(own(self.given.dlse)),
            Buffer::Dq => self.given.gradients[0],
            Buffer::Dk => self.given.gradients[1],
            Buffer::Dv => self.given.gradients[2],
            Buffer::Dsinks => Some(own(self.given.dsinks)),
            Buffer::Darray(array) => Some(own(self.given.darrays[array])),
            Buffer::Scratch(number) => Some(own(self.prepared.scratch[number])),
        };
        // A tensor without elements has no address, and nothing of it is touched.
        given.unwrap_or(own(0))
    }

    fn element(&self, buffer: Buffer) -> u64 {
        let program = &self.prepared.program;
        program.shape(buffer).cell.bytes(program.dtype) as u64
    }

    /// The tensor of a view.
    fn raw(&self, view: &View) -> RawTensor {
        let RawTensor { address, strides } = self.base(view.buffer);
        let offset = strides.offset(0, view.rows.start, view.heads.start, 0) as u64;
        RawTensor { address: address + offset * self.element(view.buffer), strides }
    }

    /// Messages in device memory: those of joined buffers are one.
    fn device_pieces(&self, all: &[Piece]) -> Vec<DevicePiece> {
        let joined = |number: &usize| self.prepared.program.joined.contains(number);
        let mut pieces: Vec<DevicePiece> = Vec::with_capacity(all.len());
        for piece in all {
            let address = self.base(piece.buffer).address + piece.offset as u64;
            let own = DevicePiece { peer: piece.peer, address, bytes: piece.bytes };
            let is_joined = matches!(&piece.buffer, Buffer::Scratch(number) if joined(number));
            match pieces.last_mut() {
                // Of both sides or of neither, as their buffers are alike.
                Some(last) if is_joined && last.meets(&own) => last.bytes += own.bytes,
                _ => pieces.push(own),
            }
        }
        pieces
    }

    /// The extras of a part: those of its heads, its own starts, and where the gradients of arrays go.
    fn extras(&self, number: usize, part: &Part, darrays: &[(usize, View)]) -> RawExtras {
        let mut extras = self.given.extras;
        if let Some([q, k]) = &self.prepared.starts[number] {
            extras.inputs.cu_seqlens_q = Some(q.address);
            extras.inputs.cu_seqlens_k = Some(k.address);
        }
        extras.inputs.sinks = extras.inputs.sinks.filter(|_| part.problem.score.sinks);
        let shift = 4 * part.heads.start as u64;
        let slopes = extras.inputs.alibi_slopes.zip(self.prepared.slopes);
        extras.inputs.alibi_slopes =
            extras.inputs.alibi_slopes.filter(|_| part.problem.score.alibi.is_some());
        extras.inputs.alibi_slopes = extras.inputs.alibi_slopes.map(|address| address + shift);
        extras.inputs.sinks = extras.inputs.sinks.map(|address| address + shift);
        if let Some(own) = part.problem.score.program {
            let programs = (self.prepared.whole.as_deref(), &*own);
            let of_part = (part.places.as_slice(), part.arrays.as_slice());
            let mut raw = moved::device(programs, of_part, extras.program, slopes);
            let whole = self.prepared.whole.as_deref();
            for (array, view) in darrays {
                if let Some(at) = whole.and_then(|whole| moved::place((whole, &*own), *array)) {
                    raw.gradients[at] = self.raw(view).address;
                }
            }
            extras.program = Some(raw);
        }
        extras
    }

    /// Rows of elements that follow one another, as a plane for the driver's copies and fills: the address of
    /// each sequence and head with its count of rows, for tensors of one element a row.
    fn lines(&self, view: &View) -> Vec<(u64, i64)> {
        let shape = self.prepared.program.shape(view.buffer);
        let RawTensor { address, strides } = self.base(view.buffer);
        let at = |b: usize| strides.offset(b, view.rows.start, view.heads.start, 0) as u64;
        (0..shape.batch).map(|b| (address + at(b) * self.element(view.buffer), strides.head)).collect()
    }

    fn sum(&self, number: usize, lane: Lane, parts: &[View], to: &View) -> Result<(), Error> {
        let stream = self.stream(lane);
        match (&self.prepared.kernels[number], parts) {
            (Kernel::Merge(merge), _) => {
                // A value of each head is a row of all of them.
                let row = |view: &View| match self.prepared.program.shape(view.buffer).dim {
                    1 => RawTensor {
                        strides: TensorLayout::Bshd.strides(1, 1, view.heads.len()),
                        ..self.raw(view)
                    },
                    _ => self.raw(view),
                };
                let of = |view: &View| RawPartialResult { out: row(view), lse: 0 };
                let parts: Vec<RawPartialResult> = parts.iter().map(of).collect();
                let args = RawMergeArgs { parts: &parts, out: row(to), lse: None, sinks: None };
                // SAFETY: programs name rows and heads that their buffers have; the caller's tensors were
                // checked against them.
                Ok(unsafe { merge.run_raw(stream, &args) }?)
            }
            (_, []) => self.fill(stream, to, 0),
            (_, [from, ..]) => self.copy_lines(stream, from, to),
        }
    }

    /// Copies an LSE's rows: one element each, those of a head side by side.
    fn copy_lines(&self, stream: &CudaStream, from: &View, to: &View) -> Result<(), Error> {
        let size = self.element(to.buffer);
        for ((from, from_step), (to_at, to_step)) in self.lines(from).into_iter().zip(self.lines(to)) {
            let size = size as usize;
            let [from, to_at] =
                [(from, from_step), (to_at, to_step)].map(|(at, step)| (at, step as usize * size));
            // SAFETY: both planes lie in their buffers, as programs name rows and heads that these have.
            let copied = unsafe { copy_rows(stream, from, to_at, (to.rows.len() * size, to.heads.len())) };
            copied.map_err(driver("copying an LSE"))?;
        }
        Ok(())
    }

    /// Copies a box of an array, packed, to its place.
    fn place(&self, stream: &CudaStream, from: &View, to: &View, window: &Window) -> Result<(), Error> {
        let [from, to] = [from, to].map(|view| self.raw(view).address);
        for plane in planes(window) {
            let Plane { from: from_at, to: to_at, width, height, pitch } = plane;
            let [from, to] = [(from + from_at as u64, width), (to + to_at as u64, pitch)];
            // SAFETY: both planes lie in their buffers, which have the elements of the box and of the array.
            let copied = unsafe { copy_rows(stream, from, to, (width, height)) };
            copied.map_err(driver("copying the gradient of an array"))?;
        }
        Ok(())
    }

    /// Fills with 32-bit words: an LSE, or zeros of any type.
    fn fill(&self, stream: &CudaStream, to: &View, word: u32) -> Result<(), Error> {
        let (shape, size) = (self.prepared.program.shape(to.buffer), self.element(to.buffer) as usize);
        let RawTensor { address, strides } = self.base(to.buffer);
        // Of a row of elements each head apart; of an LSE each head's rows together.
        let (outer, inner, width) = match shape.dim {
            1 => (to.heads.clone(), 0..1, to.rows.len() * size),
            dim => (to.rows.clone(), to.heads.clone(), dim * size),
        };
        for b in 0..shape.batch {
            for second in inner.clone() {
                let (first, pitch) = match shape.dim {
                    1 => (strides.offset(b, to.rows.start, outer.start, 0), strides.head),
                    _ => (strides.offset(b, outer.start, second, 0), strides.seq),
                };
                let at = address + first as u64 * size as u64;
                let pitch = pitch as usize * size;
                // SAFETY: the plane lies in the buffer; widths and pitches are whole words.
                let filled = unsafe {
                    sys::cuMemsetD2D32Async(at, pitch, word, width / 4, outer.len(), stream.cu_stream())
                };
                filled.result().map_err(driver("filling device memory"))?;
            }
        }
        Ok(())
    }
}

/// Rows of a box of an array that are as far from one another, in bytes.
#[derive(Debug, PartialEq)]
struct Plane {
    /// Bytes before it in the box, packed, and in the array.
    from: usize,
    to: usize,
    width: usize,
    height: usize,
    /// Bytes from one row to the next in the array.
    pitch: usize,
}

fn planes(window: &Window) -> Vec<Plane> {
    let Window { extents: [_, b, c, d], ranges: [first, second, third, last] } = window.merged();
    let (width, height, pitch) = (4 * last.len(), third.len(), 4 * d);
    let starts = first.flat_map(|i| second.clone().map(move |j| i * b + j));
    let at = |(number, start): (usize, usize)| Plane {
        from: number * width * height,
        to: 4 * ((start * c + third.start) * d + last.start),
        width,
        height,
        pitch,
    };
    starts.enumerate().map(at).collect()
}

impl Engine for DeviceEngine<'_> {
    fn before(&mut self, number: usize, step: &Step) -> Result<(), Error> {
        if let Some(event) = step.after.and_then(|after| self.prepared.events[after].as_ref()) {
            self.stream(step.lane).wait(event).map_err(driver("waiting for an event"))?;
        }
        self.mark(number, false, step.lane)
    }

    fn apply(&mut self, number: usize, step: &Step) -> Result<(), Error> {
        let workspace = self.prepared.workspace.address;
        let stream = self.stream(step.lane);
        match (&step.op, &self.prepared.kernels[number]) {
            (Op::Sum { parts, to }, _) => self.sum(number, step.lane, parts, to),
            (Op::Nothing { to }, _) => self.fill(stream, to, f32::NEG_INFINITY.to_bits()),
            (Op::Forward { part, q, k, v, out, lse }, Kernel::Attention(bound)) => {
                let Bound::Forward(forward) = bound.as_ref() else { return Ok(()) };
                let args = RawForwardArgs {
                    q: self.raw(q),
                    k: self.raw(k),
                    v: self.raw(v),
                    out: self.raw(out),
                    lse: Some(self.raw(lse).address),
                    workspace: (forward.workspace_bytes() > 0).then_some(workspace),
                    extras: self.extras(number, part, &[]),
                };
                // SAFETY: as for sums; the workspace is zero, and all that uses it is in this queue.
                Ok(unsafe { forward.run_raw(stream, &args) }?)
            }
            (Op::Backward { part, inputs, outputs, dsinks, dlse, darrays }, Kernel::Attention(bound)) => {
                let Bound::Backward(backward) = bound.as_ref() else { return Ok(()) };
                let [q, k, v, out, lse, dout] = inputs.each_ref().map(|view| self.raw(view));
                let [dq, dk, dv] = outputs.each_ref().map(|view| self.raw(view));
                let lse = lse.address;
                let dsinks = dsinks.as_ref().map(|view| self.raw(view).address);
                let mut extras = RawExtras { dsinks, ..self.extras(number, part, darrays) };
                extras.inputs.dlse = dlse.as_ref().map(|view| self.raw(view).address);
                let args = RawBackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace, extras };
                // SAFETY: as for sums.
                Ok(unsafe { backward.run_raw(stream, &args) }?)
            }
            (Op::Merge { parts, out, lse, sinks }, Kernel::Merge(merge)) => {
                let of = |[out, lse]: &[View; 2]| RawPartialResult {
                    out: self.raw(out),
                    lse: self.raw(lse).address,
                };
                let parts: Vec<RawPartialResult> = parts.iter().map(of).collect();
                let lse = Some(self.raw(lse).address);
                let sinks = self.given.extras.inputs.sinks.filter(|_| *sinks);
                let args = RawMergeArgs { parts: &parts, out: self.raw(out), lse, sinks };
                // SAFETY: as for sums; the result is in memory of its own.
                Ok(unsafe { merge.run_raw(stream, &args) }?)
            }
            (Op::Place { from, to, window }, _) => self.place(stream, from, to, window),
            (Op::Forward { .. } | Op::Backward { .. } | Op::Merge { .. } | Op::Exchange { .. }, _) => {
                unreachable!("kernels are made for their steps")
            }
        }
    }

    fn exchange(&mut self, number: usize, sends: &[Piece], recvs: &[Piece]) -> Result<(), Error> {
        let stream = match self.prepared.program.steps[number].lane {
            Lane::Compute => self.streams[0],
            Lane::Transfer => self.streams[1],
        };
        if let Transfers::Copies(copies) = &mut self.rank.transfers {
            // SAFETY: the links are the program's own, whose memory all ranks keep until they make others.
            return unsafe { copies.exchange(&self.prepared.links, number, stream) };
        }
        let [sends, recvs] = [sends, recvs].map(|all| self.device_pieces(all));
        let Transfers::Nccl(communicator) = &mut self.rank.transfers else { return Ok(()) };
        if sends.is_empty() && recvs.is_empty() {
            return Ok(());
        }
        let (queue, lost): (*mut c_void, _) = (stream.cu_stream().cast(), self.rank.store.watch());
        // SAFETY: pieces lie in the program's memory, which lives as long as the program; steps of other
        // queues that touch it wait for this one.
        unsafe { communicator.exchange(&sends, &recvs, queue, &lost) }
    }

    fn after(&mut self, number: usize, step: &Step) -> Result<(), Error> {
        self.mark(number, true, step.lane)?;
        match &self.prepared.events[number] {
            Some(event) => event.record(self.stream(step.lane)).map_err(driver("recording an event")),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Planes copy what the stretches of a box are.
    #[test]
    fn planes_are_the_stretches_of_a_box() {
        for (extents, ranges) in [
            ([2, 3, 4, 5], [0..2, 1..3, 0..4, 0..5]),
            ([2, 3, 4, 5], [1..2, 1..3, 2..4, 1..5]),
            ([2, 3, 4, 5], [0..2, 0..3, 1..2, 0..5]),
            ([1, 1, 1, 40], [0..1, 0..1, 0..1, 0..40]),
        ] {
            let window = Window { extents, ranges };
            let rows = planes(&window).into_iter().flat_map(|plane| {
                let row = move |row: usize| {
                    let [from, to] = [plane.from + row * plane.width, plane.to + row * plane.pitch];
                    (from / 4, to / 4, plane.width / 4)
                };
                (0..plane.height).map(row)
            });
            assert_eq!(rows.collect::<Vec<_>>(), window.stretches(), "{window:?}");
        }
    }
}
