//! Device memory of a call: tensors, extras and workspace, guarded, poisoned, and registered with the
//! machine.
#![allow(unsafe_code)]

use fa_core::{Dtype, Extra, Extras, Pass, Problem, Strides};
use fa_cpu::OwnedExtras;
use fa_kernels::launch::{Addresses, Launches, Part, RawArray, RawProgram, Shape, Workspace};
use fa_kernels::{RawExtras, RawTensor};
use half::{bf16, f16};

use crate::call::{Call, Given};
use crate::error::Error;
use crate::machine::{Access, Machine, Memory, PAGE, Session};
use crate::outcome::Finding;
use crate::unit::Unit;

/// The tensors of a call in guarded memory.
pub(crate) struct DeviceMemory<'a> {
    tensors: Vec<(&'static str, bool, Memory<'a>, Strides)>,
    raw: Vec<RawTensor>,
    lse: Memory<'a>,
    lse_is_input: bool,
    workspace: Memory<'a>,
    plan: Option<Part>,
    extras: Extras<Memory<'a>>,
    dsinks: Option<Memory<'a>>,
    arrays: Vec<Memory<'a>>,
    /// Gradients of arrays, of a backward.
    darrays: Vec<Option<Gradient<'a>>>,
    /// Where scores' gradients go that are summed.
    room: Option<Memory<'a>>,
    program: Option<RawProgram>,
    page_faults: Option<Memory<'a>>,
    /// Rows that belong to no sequence: address and bytes.
    foreign: Vec<(u64, u64)>,
}

/// The gradient of an array: its elements, and their type where it is of 16 bits.
type Gradient<'a> = (Memory<'a>, usize, Option<Dtype>);

impl<'a> DeviceMemory<'a> {
    pub(crate) fn new(
        unit: &'a Unit,
        problem: &Problem,
        launches: &Launches,
        call: &Call,
    ) -> Result<DeviceMemory<'a>, Error> {
        let machine = &*unit.machine;
        let (mut tensors, mut foreign) = (Vec::new(), Vec::new());
        for (tensor, given) in launches.tensors.iter().zip(&call.tensors) {
            let shape = &tensor.shape;
            let (memory, strides) = placed(machine, shape, given)?;
            let is_of_keys = matches!(shape.name, "k" | "v" | "dk" | "dv");
            let rows = call.rows[usize::from(is_of_keys)];
            for row in (0..rows.len()).filter(|&row| !rows[row]) {
                for head in 0..shape.heads {
                    let at = strides.offset(row / shape.seqlen, row % shape.seqlen, head, 0);
                    let bytes = given.element_bytes() as u64;
                    foreign.push((memory.address() + bytes * at as u64, bytes * shape.dim as u64));
                }
            }
            tensors.push((shape.name, tensor.is_output, memory, strides));
        }
        let queries = &launches.tensors[0].shape;
        let rows = queries.batch * queries.heads * queries.seqlen;
        let mut lse = Memory::new(machine, "lse", 4 * rows)?;
        if let Some(given) = call.lse {
            if given.len() < rows {
                return Err(Error::TooShort { tensor: "lse", have: given.len(), need: rows });
            }
            fill(&mut lse, given.iter().map(|value| value.to_ne_bytes()));
        }
        let mut workspace = Memory::new(machine, "workspace", launches.workspace.bytes)?;
        if let Some(part) = lasting(&launches.workspace) {
            workspace.bytes_mut()[part.offset..part.offset + part.bytes].fill(0);
        }
        let has_dsinks = problem.score.sinks && unit.spec.kernel.pass() != Pass::Forward;
        let dsinks = has_dsinks.then(|| Memory::new(machine, "dsinks", 4 * problem.heads_q)).transpose()?;
        let (arrays, mut program) = program(machine, problem, call)?;
        let mut darrays = Vec::new();
        if let (Some(raw), Some(own)) = (&mut program, problem.score.program)
            && unit.spec.kernel.is_backward()
        {
            for (slot, decl) in own.arrays().iter().enumerate() {
                let extents = &raw.arrays[slot].extents[..decl.rank];
                let len: usize = extents.iter().map(|&extent| extent as usize).product();
                let narrow = decl.element.narrow();
                let bytes = (len * narrow.map_or(4, Dtype::bytes)).next_multiple_of(4);
                let room = decl.gradient.then(|| Memory::new(machine, "darray", bytes)).transpose()?;
                raw.is_narrow[slot] = narrow.is_some();
                raw.gradients[slot] = room.as_ref().map_or(0, Memory::address);
                darrays.push(room.map(|room| (room, len, narrow)));
            }
        }
        let bytes = program.as_ref().map_or(0, |raw| launches.room_bytes(raw));
        let room = (bytes > 0).then(|| Memory::new(machine, "room", bytes)).transpose()?;
        if let (Some(raw), Some(room)) = (&mut program, &room) {
            raw.room = room.address();
        }
        let has_pages = problem.lengths.page().is_some();
        let mut page_faults = has_pages.then(|| Memory::new(machine, "page_faults", 4)).transpose()?;
        if let Some(memory) = &mut page_faults {
            memory.bytes_mut().fill(0);
        }
        let raw = tensors
            .iter()
            .map(|(_, _, memory, strides)| RawTensor { address: memory.address(), strides: *strides });
        Ok(DeviceMemory {
            raw: raw.collect(),
            tensors,
            lse,
            lse_is_input: call.lse.is_some(),
            workspace,
            plan: launches.workspace.plan,
            extras: extras(machine, call.extras)?,
            dsinks,
            arrays,
            darrays,
            room,
            program,
            page_faults,
            foreign,
        })
    }

    pub(crate) fn addresses(&self) -> Addresses<'_> {
        let workspace = (!self.workspace.bytes().is_empty()).then(|| self.workspace.address());
        let extras = RawExtras {
            inputs: self.extras.as_ref().map(|_, memory| memory.address(), |_, memory| memory.address()),
            page_faults: self.page_faults.as_ref().map(Memory::address),
            dsinks: self.dsinks.as_ref().map(Memory::address),
            program: self.program,
            ..RawExtras::default()
        };
        Addresses { tensors: &self.raw, lse: Some(self.lse.address()), workspace, extras }
    }

    pub(crate) fn name_regions(&self, session: &Session, launches: &Launches) {
        let around = (PAGE, PAGE);
        for (name, is_output, memory, _) in &self.tensors {
            let access = if *is_output { Access::Unwritten } else { Access::Input };
            session.region(name, memory.address(), memory.bytes().len() as u64, around, access);
        }
        for (extra, memory) in self.extras.iter() {
            let memory = memory.into_inner();
            session.region(
                extra.name(),
                memory.address(),
                memory.bytes().len() as u64,
                around,
                Access::Input,
            );
        }
        if let Some(memory) = &self.dsinks {
            let bytes = memory.bytes().len() as u64;
            session.region("dsinks", memory.address(), bytes, around, Access::Unwritten);
        }
        for (slot, memory) in self.arrays.iter().enumerate() {
            let bytes = memory.bytes().len() as u64;
            session.region(&format!("array {slot}"), memory.address(), bytes, around, Access::Input);
        }
        for (memory, ..) in self.darrays.iter().flatten() {
            let bytes = memory.bytes().len() as u64;
            session.region("darray", memory.address(), bytes, around, Access::Unwritten);
        }
        if let Some(memory) = &self.room {
            session.region("room", memory.address(), memory.bytes().len() as u64, around, Access::Unwritten);
        }
        if let Some(memory) = &self.page_faults {
            session.region("page_faults", memory.address(), 4, around, Access::Written);
        }
        for &(begin, bytes) in &self.foreign {
            session.forbid(begin, bytes);
        }
        let access = if self.lse_is_input { Access::Input } else { Access::Unwritten };
        session.region("lse", self.lse.address(), self.lse.bytes().len() as u64, around, access);
        let mut parts = parts(&launches.workspace);
        parts.sort_by_key(|(_, part)| part.offset);
        for (index, (name, part)) in parts.iter().enumerate() {
            let end = part.offset + part.bytes;
            let next = parts.get(index + 1).map_or(launches.workspace.bytes, |(_, next)| next.offset);
            let before = if index == 0 { PAGE } else { 0 };
            let after = (next - end) as u64 + if index + 1 == parts.len() { PAGE } else { 0 };
            let begin = self.workspace.address() + part.offset as u64;
            let lasts = lasting(&launches.workspace) == Some(*part);
            let access = if lasts { Access::Written } else { Access::Unwritten };
            session.region(&format!("workspace {name}"), begin, part.bytes as u64, (before, after), access);
        }
    }

    /// Zeroes a part of the workspace, as the stream would.
    pub(crate) fn clear(&self, session: &Session, part: &Part) {
        let begin = self.workspace.address() + part.offset as u64;
        // SAFETY: the part lies within the workspace, which nothing else accesses between launches.
        unsafe { std::ptr::write_bytes(begin as *mut u8, 0, part.bytes) };
        session.region("workspace, cleared", begin, part.bytes as u64, (0, 0), Access::Written);
    }

    /// Sets a gradient to zero, which is given by its address and bytes.
    pub(crate) fn clear_gradient(&self, session: &Session, cleared: Option<(u64, usize)>) {
        let Some((begin, bytes)) = cleared else { return };
        // SAFETY: the bytes are a gradient's, which nothing else accesses between launches.
        unsafe { std::ptr::write_bytes(begin as *mut u8, 0, bytes) };
        session.region("darray, cleared", begin, bytes as u64, (0, 0), Access::Written);
    }

    /// Nonzero words left in the part of the workspace that a call finds zero and must leave zero.
    pub(crate) fn leaked(&self, workspace: &Workspace) -> Option<Finding> {
        let part = lasting(workspace)?;
        let bytes = &self.workspace.bytes()[part.offset..part.offset + part.bytes];
        let at = part.offset + bytes.iter().position(|&byte| byte != 0)?;
        Some(Finding {
            kind: "leaked state".into(),
            text: format!(
                "tile_counter is not zero at the end (byte {at} of the workspace): the next call would start \
                 from it"
            ),
            cta: None,
            thread: None,
            count: 1,
            stack: Vec::new(),
            others: Vec::new(),
        })
    }

    pub(crate) fn outputs(&self) -> Vec<Vec<u16>> {
        let words = |memory: &Memory| {
            memory.bytes().chunks_exact(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect()
        };
        self.tensors
            .iter()
            .filter(|(_, is_output, ..)| *is_output)
            .map(|(_, _, memory, _)| words(memory))
            .collect()
    }

    pub(crate) fn lse(&self) -> Vec<f32> {
        if self.lse_is_input {
            return Vec::new();
        }
        floats(&self.lse)
    }

    /// Entries of the page table that the kernel counted as invalid.
    pub(crate) fn page_faults(&self) -> u32 {
        let memory = self.page_faults.as_ref();
        memory.map_or(0, |own| u32::from_ne_bytes(own.bytes().try_into().expect("a word")))
    }

    /// The ints of the work plan; none where there is none.
    pub(crate) fn plan(&self) -> Vec<i32> {
        let Some(part) = self.plan else { return Vec::new() };
        let bytes = &self.workspace.bytes()[part.offset..part.offset + part.bytes];
        bytes.chunks_exact(4).map(|word| i32::from_ne_bytes(word.try_into().expect("a word"))).collect()
    }

    /// Gradients of the program's arrays; empty where none is computed.
    pub(crate) fn darrays(&self) -> Vec<Vec<f32>> {
        let values = |(memory, len, narrow): &Gradient<'_>| match narrow {
            None => floats(memory),
            Some(dtype) => {
                let decode = |bytes: &[u8]| match dtype {
                    Dtype::F16 => f16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
                    Dtype::F32 | Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                        bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32()
                    }
                };
                memory.bytes().chunks_exact(2).take(*len).map(decode).collect()
            }
        };
        self.darrays.iter().map(|own| own.as_ref().map_or_else(Vec::new, values)).collect()
    }

    /// Gradients of the sinks; none where there are no sinks.
    pub(crate) fn dsinks(&self) -> Vec<f32> {
        self.dsinks.as_ref().map_or_else(Vec::new, floats)
    }
}

/// Memory for a tensor, with the elements of an input in it.
fn placed<'a>(machine: &'a Machine, shape: &Shape, given: &Given) -> Result<(Memory<'a>, Strides), Error> {
    let (have, strides) = match *given {
        Given::Input(elements, strides) => (elements.len(), strides),
        Given::Codes(codes, strides) => (codes.len(), strides),
        Given::Output(elements, strides) => (elements, strides),
    };
    let is_empty = shape.batch * shape.seqlen * shape.heads * shape.dim == 0;
    let last = |len: usize, stride: i64| (len as i64 - 1) * stride;
    let need = last(shape.batch, strides.batch)
        + last(shape.seqlen, strides.seq)
        + last(shape.heads, strides.head)
        + shape.dim as i64;
    if !is_empty && usize::try_from(need).is_ok_and(|need| need > have) {
        return Err(Error::TooShort { tensor: shape.name, have, need: need as usize });
    }
    let mut memory = Memory::new(machine, shape.name, given.element_bytes() * have)?;
    match given {
        Given::Input(elements, _) => fill(&mut memory, elements.iter().map(|element| element.to_ne_bytes())),
        Given::Codes(codes, _) => memory.bytes_mut()[..have].copy_from_slice(codes),
        Given::Output(..) => {}
    }
    Ok((memory, strides))
}

/// Memory for the arrays of the problem's program, and what the call says of them.
fn program<'a>(
    machine: &'a Machine,
    problem: &Problem,
    call: &Call,
) -> Result<(Vec<Memory<'a>>, Option<RawProgram>), Error> {
    let (Some(program), Some(given)) = (problem.score.program, call.program) else {
        return Ok((Vec::new(), None));
    };
    let inputs = given.view(&program).expect("the inputs are the program's");
    let mut raw = RawProgram { scalars: inputs.scalar_bits(), ..RawProgram::default() };
    let mut arrays = Vec::new();
    for (array, to) in inputs.arrays().iter().zip(&mut raw.arrays) {
        let bytes = array.data.bytes();
        // Words are tracked whole.
        let mut memory = Memory::new(machine, "array", bytes.len().next_multiple_of(4))?;
        memory.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
        *to = RawArray { address: memory.address(), strides: array.strides, extents: array.extents };
        arrays.push(memory);
    }
    Ok((arrays, Some(raw)))
}

/// Memory for each of the extras that there are.
fn extras<'a>(machine: &'a Machine, own: &OwnedExtras) -> Result<Extras<Memory<'a>>, Error> {
    fn words<'a, const N: usize>(
        machine: &'a Machine,
        extra: Extra,
        words: impl ExactSizeIterator<Item = [u8; N]>,
    ) -> Result<Memory<'a>, Error> {
        let mut memory = Memory::new(machine, extra.name(), N * words.len())?;
        fill(&mut memory, words);
        Ok(memory)
    }
    own.view().try_map(
        |extra, values| words(machine, extra, values.iter().map(|value| value.to_ne_bytes())),
        |extra, values| words(machine, extra, values.iter().map(|value| value.to_ne_bytes())),
    )
}

/// Writes words from the memory's first byte on, as many as it holds.
fn fill<const N: usize>(memory: &mut Memory, words: impl Iterator<Item = [u8; N]>) {
    for (to, from) in memory.bytes_mut().chunks_exact_mut(N).zip(words) {
        to.copy_from_slice(&from);
    }
}

fn floats(memory: &Memory) -> Vec<f32> {
    let word = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    memory.bytes().chunks_exact(4).map(word).collect()
}

/// The part of the workspace that a call finds zero and leaves zero.
fn lasting(workspace: &Workspace) -> Option<Part> {
    workspace.tile_counter.filter(|_| workspace.starts_zero)
}

/// The parts of a workspace that a pass has.
fn parts(workspace: &Workspace) -> Vec<(&'static str, Part)> {
    let all = [
        ("lse_log2", workspace.lse_log2),
        ("dpsum", workspace.dpsum),
        ("dq_accum", workspace.dq_accum),
        ("dk_accum", workspace.dk_accum),
        ("dv_accum", workspace.dv_accum),
        ("dq_semaphores", workspace.dq_semaphores),
        ("dkv_semaphores", workspace.dkv_semaphores),
        ("tile_counter", workspace.tile_counter),
        ("plan", workspace.plan),
        ("out_partial", workspace.out_partial),
        ("lse_partial", workspace.lse_partial),
        ("map_lists", workspace.map_lists),
        ("map_tiles", workspace.map_tiles),
    ];
    all.into_iter().filter_map(|(name, part)| Some((name, part?))).collect()
}
