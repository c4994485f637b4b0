//! A rank's buffers in the host's memory, and the steps of a plan's program by fa-cpu's tiles.

use std::collections::HashMap;

use fa_core::Strides;
use fa_core::program::{Inputs, Interned};
use fa_cpu::merge::{add_sinks, merge_row};
use fa_cpu::tiled::{self, BackwardInputs};
use fa_cpu::{Arguments, CpuError, Element, Extras, KvRef, TensorMut, TensorRef};

use crate::error::Error;
use crate::moved;
use crate::program::{Buffer, Cell, Op, Part, Piece, Program, Shape, Step, View};
use crate::run::Engine;
use crate::transport::HostTransport;

/// An element type of host tensors that travels: f32, f16 or bf16.
pub trait Wire: Element {
    /// The bytes of elements, little-endian.
    fn to_bytes(elements: &[Self]) -> Vec<u8>;
    /// The elements of bytes.
    fn from_bytes(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! wire {
    ($type:ty) => {
        impl Wire for $type {
            fn to_bytes(elements: &[Self]) -> Vec<u8> {
                elements.iter().flat_map(|element| element.to_le_bytes()).collect()
            }
            fn from_bytes(bytes: &[u8]) -> Vec<Self> {
                let chunks = bytes.as_chunks::<{ size_of::<$type>() }>().0;
                chunks.iter().map(|bytes| <$type>::from_le_bytes(*bytes)).collect()
            }
        }
    };
}

wire!(f32);
wire!(half::f16);
wire!(half::bf16);

/// A buffer in host memory.
pub(super) enum Slot<'a, T> {
    Read(TensorRef<'a, T>),
    /// A cache of codes.
    Codes(TensorRef<'a, u8>),
    Write(TensorMut<'a, T>),
    ReadF32(&'a [f32]),
    WriteF32(&'a mut [f32]),
    Own(Vec<T>),
    OwnF32(Vec<f32>),
}

/// The buffers of a rank.
pub(super) struct HostMemory<'a, T> {
    slots: HashMap<Buffer, (Shape, Slot<'a, T>)>,
}

fn strides(shape: &Shape) -> Strides {
    shape.order.strides(shape.rows, shape.heads, shape.dim)
}

impl<'a, T: Wire> HostMemory<'a, T> {
    pub(super) fn new(program: &Program, tensors: Vec<(Buffer, Slot<'a, T>)>) -> HostMemory<'a, T> {
        let given = tensors.into_iter().map(|(buffer, slot)| (buffer, (program.shape(buffer), slot)));
        // NaN, so that reading what was never written shows.
        let own = program.scratch.iter().enumerate().map(|(number, shape)| {
            let slot = match shape.cell {
                Cell::Own => Slot::Own(vec![T::from_f32(f32::NAN); shape.elements()]),
                Cell::F32 => Slot::OwnF32(vec![f32::NAN; shape.elements()]),
            };
            (Buffer::Scratch(number), (*shape, slot))
        });
        HostMemory { slots: given.chain(own).collect() }
    }

    /// Calls `visit(number in the view, offset in memory)` for each element of a view, in the order
    /// `[batch, rows, heads, dim]`.
    fn each(&self, view: &View, mut visit: impl FnMut(usize, usize)) {
        let (shape, slot) = &self.slots[&view.buffer];
        let strides = match slot {
            Slot::Read(tensor) => tensor.strides(),
            Slot::Write(tensor) => tensor.strides(),
            Slot::Codes(tensor) => tensor.strides(),
            Slot::ReadF32(_) | Slot::WriteF32(_) | Slot::Own(_) | Slot::OwnF32(_) => strides(shape),
        };
        let mut number = 0;
        for b in 0..shape.batch {
            for row in view.rows.clone() {
                for head in view.heads.clone() {
                    for d in 0..shape.dim {
                        visit(number, strides.offset(b, row, head, d) as usize);
                        number += 1;
                    }
                }
            }
        }
    }

    /// Shape of a view, `[batch, rows, heads, dim]`.
    fn shape(&self, view: &View) -> [usize; 4] {
        let shape = &self.slots[&view.buffer].0;
        [shape.batch, view.rows.len(), view.heads.len(), shape.dim]
    }

    fn read_f32(&self, view: &View) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.shape(view).iter().product());
        match &self.slots[&view.buffer].1 {
            Slot::Read(tensor) => self.each(view, |_, at| values.push(tensor.data()[at].to_f32())),
            Slot::Write(tensor) => {
                let data = tensor.as_ref();
                self.each(view, |_, at| values.push(data.data()[at].to_f32()));
            }
            Slot::Own(data) => self.each(view, |_, at| values.push(data[at].to_f32())),
            Slot::ReadF32(data) => self.each(view, |_, at| values.push(data[at])),
            Slot::WriteF32(data) => self.each(view, |_, at| values.push(data[at])),
            Slot::OwnF32(data) => self.each(view, |_, at| values.push(data[at])),
            Slot::Codes(_) => unreachable!("programs read codes by kernels"),
        }
        values
    }

    /// A view's elements in the problem's type.
    fn read(&self, view: &View) -> Vec<T> {
        self.read_f32(view).into_iter().map(T::from_f32).collect()
    }

    fn write_f32(&mut self, view: &View, values: &[f32]) {
        let mut places = Vec::with_capacity(values.len());
        self.each(view, |_, at| places.push(at));
        let Some((_, slot)) = self.slots.get_mut(&view.buffer) else { return };
        let pairs = places.into_iter().zip(values);
        match slot {
            Slot::Write(tensor) => pairs.for_each(|(at, value)| tensor.data_mut()[at] = T::from_f32(*value)),
            Slot::Own(data) => pairs.for_each(|(at, value)| data[at] = T::from_f32(*value)),
            Slot::WriteF32(data) => pairs.for_each(|(at, value)| data[at] = *value),
            Slot::OwnF32(data) => pairs.for_each(|(at, value)| data[at] = *value),
            Slot::Read(_) | Slot::Codes(_) | Slot::ReadF32(_) => {
                unreachable!("programs do not write inputs")
            }
        }
    }

    /// Elements of a buffer in memory order, from one on.
    fn write_flat(&mut self, view: &View, first: usize, values: &[f32]) {
        match self.slots.get_mut(&view.buffer) {
            Some((_, Slot::WriteF32(data))) => data[first..][..values.len()].copy_from_slice(values),
            Some((_, Slot::OwnF32(data))) => data[first..][..values.len()].copy_from_slice(values),
            _ => unreachable!("gradients of arrays are of f32"),
        }
    }

    /// The codes of a cache.
    fn codes(&self, view: &View) -> Option<TensorRef<'_, u8>> {
        match &self.slots[&view.buffer].1 {
            Slot::Codes(tensor) => Some(*tensor),
            Slot::Read(_)
            | Slot::Write(_)
            | Slot::ReadF32(_)
            | Slot::WriteF32(_)
            | Slot::Own(_)
            | Slot::OwnF32(_) => None,
        }
    }

    fn write(&mut self, view: &View, values: &[T]) {
        let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        self.write_f32(view, &values);
    }

    /// An LSE in memory order, `[batch, heads, rows]`: its view is all of a buffer.
    fn lse(&self, view: &View) -> &[f32] {
        match &self.slots[&view.buffer].1 {
            Slot::ReadF32(data) => data,
            Slot::WriteF32(data) => data,
            Slot::OwnF32(data) => data,
            Slot::Read(_) | Slot::Codes(_) | Slot::Write(_) | Slot::Own(_) => &[],
        }
    }

    fn lse_mut(&mut self, view: &View) -> &mut [f32] {
        match self.slots.get_mut(&view.buffer) {
            Some((_, Slot::WriteF32(data))) => data,
            Some((_, Slot::OwnF32(data))) => data,
            _ => &mut [],
        }
    }
}

impl<T: Wire> HostMemory<'_, T> {
    /// The bytes of a piece of the program's own memory.
    fn bytes(&self, piece: &Piece) -> Vec<u8> {
        match &self.slots[&piece.buffer].1 {
            Slot::Own(data) => {
                let size = size_of::<T>();
                T::to_bytes(&data[piece.offset / size..][..piece.bytes / size])
            }
            Slot::OwnF32(data) => f32::to_bytes(&data[piece.offset / 4..][..piece.bytes / 4]),
            Slot::Read(_) | Slot::Codes(_) | Slot::Write(_) | Slot::ReadF32(_) | Slot::WriteF32(_) => {
                unreachable!("programs send their own memory")
            }
        }
    }

    fn set_bytes(&mut self, piece: &Piece, bytes: &[u8]) {
        match self.slots.get_mut(&piece.buffer) {
            Some((_, Slot::Own(data))) => {
                let size = size_of::<T>();
                data[piece.offset / size..][..piece.bytes / size].copy_from_slice(&T::from_bytes(bytes));
            }
            Some((_, Slot::OwnF32(data))) => {
                data[piece.offset / 4..][..piece.bytes / 4].copy_from_slice(&f32::from_bytes(bytes));
            }
            _ => unreachable!("programs receive in their own memory"),
        }
    }
}

/// A rank's buffers, fa-cpu's tiles and the way to the other ranks.
pub(super) struct HostEngine<'a, T> {
    pub(super) memory: HostMemory<'a, T>,
    pub(super) given: Arguments<'a>,
    /// The whole problem's.
    pub(super) program: Option<Interned>,
    pub(super) transport: &'a mut dyn HostTransport,
}

/// The extras of a part: those of its heads, and its own starts.
fn part_extras<'a>(extras: &Extras<'a>, part: &'a Part) -> Extras<'a> {
    let mut own = *extras;
    own.alibi_slopes = own.alibi_slopes.filter(|_| part.problem.score.alibi.is_some());
    own.alibi_slopes = own.alibi_slopes.and_then(|slopes| slopes.get(part.heads.clone()));
    own.sinks = own.sinks.filter(|_| part.problem.score.sinks);
    own.sinks = own.sinks.and_then(|sinks| sinks.get(part.heads.clone()));
    if let Some([q, k]) = &part.starts {
        (own.cu_seqlens_q, own.cu_seqlens_k) = (Some(q.as_slice()), Some(k.as_slice()));
    }
    own
}

/// What the program of a part is given, if it has one.
fn part_program<'a>(
    program: Option<Interned>,
    part: &Part,
    given: &Arguments<'a>,
) -> Result<Option<Inputs<'a>>, CpuError> {
    if program.is_none() && given.program.is_some() {
        return Err(CpuError::Extra { name: "program", asked: false });
    }
    let Some(own) = part.problem.score.program else { return Ok(None) };
    let programs = (program.as_deref(), &*own);
    let of_part = (part.places.as_slice(), part.arrays.as_slice());
    Ok(Some(moved::host(programs, of_part, given.program, given.extras.alibi_slopes)?))
}

impl<T: Wire> Engine for HostEngine<'_, T> {
    fn before(&mut self, _: usize, _: &Step) -> Result<(), Error> {
        Ok(())
    }

    fn exchange(&mut self, _: usize, sends: &[Piece], recvs: &[Piece]) -> Result<(), Error> {
        let rank = self.transport.rank();
        let sent = |piece: &Piece| (piece.peer, self.memory.bytes(piece));
        let (own, sends): (Vec<_>, Vec<_>) = sends.iter().map(sent).partition(|(peer, _)| *peer == rank);
        let others = || recvs.iter().filter(|piece| piece.peer != rank);
        let wanted: Vec<(usize, usize)> = others().map(|piece| (piece.peer, piece.bytes)).collect();
        let arrived = self.transport.exchange(sends, &wanted)?;
        others().zip(arrived).for_each(|(piece, bytes)| self.memory.set_bytes(piece, &bytes));
        // What a rank sends to itself needs no transport.
        let mine = recvs.iter().filter(|piece| piece.peer == rank);
        mine.zip(own).for_each(|(piece, (_, bytes))| self.memory.set_bytes(piece, &bytes));
        Ok(())
    }

    fn apply(&mut self, _: usize, step: &Step) -> Result<(), Error> {
        let memory = &mut self.memory;
        match &step.op {
            Op::Sum { parts, to } => {
                let mut sum = vec![0.0f32; memory.shape(to).iter().product()];
                for (index, part) in parts.iter().enumerate() {
                    let values = memory.read_f32(part);
                    match index {
                        // A copy is exact, -0 included.
                        0 => sum = values,
                        _ => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
                    }
                }
                memory.write_f32(to, &sum);
            }
            Op::Nothing { to } => {
                let values = vec![f32::NEG_INFINITY; memory.shape(to).iter().product()];
                memory.write_f32(to, &values);
            }
            Op::Forward { part, q, k, v, out, lse } => {
                let views = [q, k, v];
                let inputs = views.map(|view| match memory.codes(view) {
                    Some(_) => Vec::new(),
                    None => memory.read(view),
                });
                let of = |i: usize| -> Result<KvRef<'_, T>, CpuError> {
                    Ok(match memory.codes(views[i]) {
                        Some(codes) => KvRef::Codes(codes),
                        None => KvRef::Same(packed("input", &inputs[i], memory.shape(views[i]))?),
                    })
                };
                let (q, k, v) = (of(0)?, of(1)?, of(2)?);
                let shape = memory.shape(out);
                let mut values = vec![T::from_f32(0.0); shape.iter().product()];
                let mut own = vec![0.0f32; memory.lse(lse).len()];
                let program = part_program(self.program, part, &self.given)?;
                let extras = part_extras(&self.given.extras, part);
                let arguments = Arguments { extras, program: program.as_ref(), ..Arguments::default() };
                tiled::forward_extras(
                    tiled::Options::default(),
                    &part.problem,
                    arguments,
                    q,
                    k,
                    v,
                    &mut packed_mut("out", &mut values, shape)?,
                    Some(&mut own),
                )?;
                memory.write(out, &values);
                memory.lse_mut(lse).copy_from_slice(&own);
            }
            Op::Backward { part, inputs: [q, k, v, out, lse, dout], outputs, dsinks, dlse, darrays } => {
                let inputs = [q, k, v, out, dout].map(|view| (memory.shape(view), memory.read(view)));
                let view = |i: usize| packed("input", &inputs[i].1, inputs[i].0);
                let own = memory.lse(lse).to_vec();
                let own_dlse = dlse.as_ref().map(|view| memory.lse(view).to_vec());
                let program = part_program(self.program, part, &self.given)?;
                let extras = part_extras(&self.given.extras, part);
                let extras = Extras { dlse: own_dlse.as_deref(), ..extras };
                let arguments = Arguments { extras, program: program.as_ref(), ..Arguments::default() };
                let given = BackwardInputs {
                    q: view(0)?,
                    k: view(1)?,
                    v: view(2)?,
                    out: view(3)?,
                    lse: &own,
                    dout: view(4)?,
                };
                let shapes = outputs.each_ref().map(|view| memory.shape(view));
                let mut values = shapes.map(|shape| vec![T::from_f32(0.0); shape.iter().product()]);
                let [dq, dk, dv] = &mut values;
                let mut own_dsinks = dsinks.as_ref().map(|view| vec![0.0; view.heads.len()]);
                let mut own_arrays = Vec::new();
                tiled::backward_program(
                    tiled::Options::default(),
                    &part.problem,
                    arguments,
                    &given,
                    &mut packed_mut("dq", dq, shapes[0])?,
                    &mut packed_mut("dk", dk, shapes[1])?,
                    &mut packed_mut("dv", dv, shapes[2])?,
                    own_dsinks.as_deref_mut(),
                    (!darrays.is_empty()).then_some(&mut own_arrays),
                )?;
                let programs = self.program.as_deref().zip(part.problem.score.program.as_deref());
                for (array, view) in darrays {
                    let found = programs.and_then(|programs| moved::place(programs, *array));
                    let Some(own) = found.and_then(|at| own_arrays.get(at)) else {
                        unreachable!("scores read the arrays whose gradients a call has")
                    };
                    memory.write_f32(view, own);
                }
                outputs.iter().zip(&values).for_each(|(view, values)| memory.write(view, values));
                if let (Some(view), Some(values)) = (dsinks, own_dsinks) {
                    memory.write_f32(view, &values);
                }
            }
            Op::Merge { parts, out, lse, sinks } => {
                merge(memory, parts, out, lse, self.given.extras.sinks.filter(|_| *sinks))?;
            }
            Op::Place { from, to, window } => {
                let values = memory.read_f32(from);
                for (at, first, len) in window.stretches() {
                    memory.write_flat(to, first, &values[at..at + len]);
                }
            }
            Op::Exchange { .. } => {}
        }
        Ok(())
    }

    fn after(&mut self, _: usize, _: &Step) -> Result<(), Error> {
        Ok(())
    }
}

fn merge<T: Wire>(
    memory: &mut HostMemory<'_, T>,
    parts: &[[View; 2]],
    out: &View,
    lse: &View,
    sinks: Option<&[f32]>,
) -> Result<(), Error> {
    let [batch, rows, heads, dim] = memory.shape(out);
    let mut values = vec![0.0f32; batch * rows * heads * dim];
    // As a view of an LSE is read: rows before heads.
    let mut merged = vec![f32::NEG_INFINITY; batch * rows * heads];
    for [part, part_lse] in parts {
        let (own, own_lse) = (memory.read_f32(part), memory.read_f32(part_lse));
        let rows = values.chunks_exact_mut(dim).zip(own.chunks_exact(dim));
        for ((row, other), (lse, other_lse)) in rows.zip(merged.iter_mut().zip(own_lse)) {
            merge_row(row, lse, other, other_lse);
        }
    }
    if let Some(sinks) = sinks {
        let shape = [1, 1, batch * rows * heads, dim];
        let sinks: Vec<f32> = sinks.iter().copied().cycle().take(merged.len()).collect();
        add_sinks(&mut packed_mut("out", &mut values, shape)?, &mut merged, &sinks)?;
    }
    memory.write_f32(out, &values);
    memory.write_f32(lse, &merged);
    Ok(())
}

fn packed<'a, T>(
    name: &'static str,
    values: &'a [T],
    shape: [usize; 4],
) -> Result<TensorRef<'a, T>, fa_cpu::CpuError> {
    TensorRef::packed(name, values, shape, fa_core::TensorLayout::Bshd)
}

fn packed_mut<'a, T>(
    name: &'static str,
    values: &'a mut [T],
    shape: [usize; 4],
) -> Result<TensorMut<'a, T>, fa_cpu::CpuError> {
    TensorMut::packed(name, values, shape, fa_core::TensorLayout::Bshd)
}

pub(super) fn slot<T>(kv: KvRef<'_, T>) -> Slot<'_, T> {
    match kv {
        KvRef::Same(tensor) => Slot::Read(tensor),
        KvRef::Codes(tensor) => Slot::Codes(tensor),
    }
}
