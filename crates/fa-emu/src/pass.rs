//! A pass on the host: tensors in guarded memory, the library's own list of launches, and what came of it.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fmt::Write;

use fa_core::{Dtype, Family, Problem, Strides, TensorLayout};
use fa_kernels::launch::{Addresses, Launches, Params, Part, Shape, Step, TensorMap, Workspace};
use fa_kernels::{RawExtras, RawTensor};
use serde::Deserialize;

use crate::error::Error;
use crate::machine::{Access, Launch, Memory, PAGE, Session, SessionOptions};
use crate::options::Options;
use crate::outcome::{Finding, Frame, LaunchOutcome, Outcome, Party, Span};
use crate::symbols::{self, Symbols};
use crate::unit::Unit;

/// One tensor of a call, as elements of 16 bits.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// An input.
    Input(&'a [u16], Strides),
    /// An output of so many elements.
    Output(usize, Strides),
}

/// The tensors of a call.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// In the order of the library's arguments: q, k, v, out; of a backward also dout, dq, dk, dv.
    pub tensors: Vec<Given<'a>>,
    /// LSE, an input of a backward. A forward writes one of its own.
    pub lse: Option<&'a [f32]>,
}

impl Unit {
    /// A forward on packed tensors `[batch, seqlen, heads, dim]`: q, k and v.
    ///
    /// # Errors
    /// Those of the library for a problem that the kernel does not compute.
    pub fn forward(
        &self,
        problem: &Problem,
        inputs: [&[u16]; 3],
        options: &Options,
    ) -> Result<Outcome, Error> {
        let launches = self.launches(problem, options)?;
        let packed = packed(&launches);
        let mut tensors: Vec<_> = (0..3).map(|i| Given::Input(inputs[i], packed[i].1)).collect();
        tensors.push(Given::Output(packed[3].0, packed[3].1));
        self.run(problem, &Call { tensors, lse: None }, options)
    }

    /// A backward on packed tensors: q, k, v, out and dout.
    ///
    /// # Errors
    /// As [`Unit::forward`].
    pub fn backward(
        &self,
        problem: &Problem,
        inputs: [&[u16]; 5],
        lse: &[f32],
        options: &Options,
    ) -> Result<Outcome, Error> {
        let launches = self.launches(problem, options)?;
        let packed = packed(&launches);
        let mut tensors: Vec<_> = (0..5).map(|i| Given::Input(inputs[i], packed[i].1)).collect();
        tensors.extend((5..8).map(|i| Given::Output(packed[i].0, packed[i].1)));
        self.run(problem, &Call { tensors, lse: Some(lse) }, options)
    }

    /// What the pass launches on as many SMs as the options say.
    ///
    /// # Errors
    /// Those of the library for a problem that the kernel does not compute.
    pub fn launches(&self, problem: &Problem, options: &Options) -> Result<Launches, Error> {
        Ok(Launches::of(&self.spec, problem, self.arch, options.sms)?)
    }

    /// Runs a pass on any tensors.
    ///
    /// # Errors
    /// Those of the library, and [`Error::TooShort`].
    pub fn run(&self, problem: &Problem, call: &Call, options: &Options) -> Result<Outcome, Error> {
        let launches = self.launches(problem, options)?;
        let memory = DeviceMemory::new(self, &launches, call)?;
        let addresses = memory.addresses();
        launches.check(&addresses)?;
        let session = self.machine.session(&SessionOptions {
            seed: options.seed,
            pace: options.pace,
            order: options.order,
            poison: options.poison,
            hazards: options.hazards,
            ordered_additions: self.spec.kernel.pass().deterministic(),
            trace_cta: options.trace_cta,
            step_limit: options.step_limit,
            progress: options.progress,
        });
        memory.name_regions(&session, &launches);
        let mut params = launches.params(&addresses);
        let maps: Vec<EmulatedMap> =
            launches.maps(&addresses).map(|map| EmulatedMap::of(&map, problem.types.qkv)).collect();
        for step in &launches.steps {
            match step {
                Step::Clear(part) => memory.clear(&session, part),
                Step::Plan(launch) | Step::Launch(launch) => {
                    let mut arguments: Vec<*const c_void> = vec![raw(&mut params)];
                    if launch.takes_maps {
                        arguments.extend(maps.iter().map(|map| (&raw const *map).cast::<c_void>()));
                    }
                    // SAFETY: the entry is of the unit's own source, which takes these arguments; all that
                    // they point at has been named, and lives until the end of this function.
                    let finished = unsafe {
                        session.launch(&Launch {
                            name: launch.entry,
                            entry: self.entry(launch.entry),
                            arguments: &arguments,
                            grid: launch.grid,
                            threads: launch.threads,
                            cluster: launch.cluster,
                            resident: options.resident,
                            smem_bytes: launch.smem,
                            cp_async: self.spec.kernel.family() == Family::Sm80,
                        })
                    };
                    if !finished {
                        break;
                    }
                }
            }
        }
        let mut outcome = self.outcome(&session.result(), &memory);
        if launches.workspace.starts_zero && outcome.launches.iter().all(|launch| launch.finished) {
            outcome.findings.extend(memory.leaked(&launches.workspace));
        }
        outcome.findings.extend(self.outside_buffers(&outcome.launches));
        Ok(outcome)
    }

    fn outcome(&self, json: &str, memory: &DeviceMemory) -> Outcome {
        let raw: RawOutcome = serde_json::from_str(json).expect("the machine writes JSON");
        let mut addresses = BTreeSet::new();
        for finding in &raw.findings {
            addresses
                .extend(finding.stack.iter().chain(finding.others.iter().flat_map(|other| &other.stack)));
        }
        addresses.extend(raw.spans.iter().flat_map(|span| &span.stack));
        let symbols = if addresses.is_empty() {
            Symbols::new()
        } else {
            symbols::resolve(&self.path, addresses.into_iter())
        };
        // Of the twins and of how a unit is called, nothing is of interest to a reader.
        let stack = |addresses: &[u64]| -> Vec<Frame> {
            let frames = addresses.iter().filter_map(|address| symbols.get(address)).flatten();
            let own = |frame: &&Frame| {
                !frame.file.starts_with("ptx/") && frame.file != "cuda.h" && frame.file != "kernel.cu"
            };
            frames.filter(own).cloned().collect()
        };
        let party = |party: RawParty| Party {
            who: self.name_buffers(&party.who),
            threads: party.threads,
            stack: stack(&party.stack),
        };
        let mut findings: Vec<Finding> = Vec::new();
        for raw in raw.findings {
            let (own, others): (_, Vec<Party>) =
                (stack(&raw.stack), raw.others.into_iter().map(party).collect());
            // Lanes in two copies of one line, as compilers make them, have not diverged.
            let kind = match raw.kind.strip_suffix('?') {
                Some(_) if others.iter().all(|other| same_line(&other.stack, &own)) => continue,
                Some(kind) => kind.to_owned(),
                None => raw.kind,
            };
            let known =
                findings.iter_mut().find(|known| known.kind == kind && !own.is_empty() && known.stack == own);
            match known {
                Some(known) => known.count += raw.count,
                None => findings.push(Finding {
                    kind,
                    text: self.name_buffers(&raw.text),
                    cta: u32::try_from(raw.cta).ok(),
                    thread: u32::try_from(raw.thread).ok(),
                    count: raw.count,
                    stack: own,
                    others,
                }),
            }
        }
        let spans = raw.spans.into_iter().map(|span| Span {
            track: span.track,
            what: span.what,
            begin: span.begin,
            end: span.end,
            stack: stack(&span.stack),
        });
        Outcome {
            findings,
            launches: raw.launches,
            spans: spans.collect(),
            outputs: memory.outputs(),
            lse: memory.lse(),
        }
    }

    /// Says which buffer `shared memory +N` lies in.
    fn name_buffers(&self, text: &str) -> String {
        const MARK: &str = "shared memory +";
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(MARK) {
            let (head, tail) = rest.split_at(at + MARK.len());
            let digits = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
            out.push_str(head);
            out.push_str(&tail[..digits]);
            if let Ok(offset) = tail[..digits].parse::<u32>() {
                let inside = |offset: u32, begin: u32, size: u32| (begin..begin + size).contains(&offset);
                let buffer = self.smem.buffers.iter().find(|own| inside(offset, own.offset, own.size));
                if let Some(buffer) = buffer {
                    let _ = write!(out, " ({} +{})", buffer.name, offset - buffer.offset);
                }
            }
            rest = &tail[digits..];
        }
        out + rest
    }

    /// What the main kernel wrote between the planner's buffers.
    fn outside_buffers(&self, launches: &[LaunchOutcome]) -> Vec<Finding> {
        let named = |begin: u32| {
            let own =
                self.smem.buffers.iter().filter(|own| own.offset <= begin && begin < own.offset + own.size);
            own.map(|own| own.offset + own.size).max()
        };
        let mut findings = Vec::new();
        for launch in launches.iter().filter(|launch| launch.entry == fa_kernels::ENTRY) {
            for &(begin, end) in &launch.touched {
                let mut at = begin;
                while at < end {
                    match named(at) {
                        Some(next) => at = next,
                        None => {
                            findings.push(Finding {
                                kind: "outside the named buffers".into(),
                                text: format!(
                                    "the kernel writes shared memory +{at}, which belongs to none of the \
                                        planner's buffers"
                                ),
                                cta: None,
                                thread: None,
                                count: 1,
                                stack: Vec::new(),
                                others: Vec::new(),
                            });
                            break;
                        }
                    }
                }
            }
        }
        findings
    }
}

fn same_line(a: &[Frame], b: &[Frame]) -> bool {
    match (a.first(), b.first()) {
        (Some(a), Some(b)) => a.file == b.file && a.line == b.line,
        _ => false,
    }
}

fn raw(params: &mut Params) -> *const c_void {
    params.raw().0.cast_const()
}

/// Elements and strides of every tensor, packed.
fn packed(launches: &Launches) -> Vec<(usize, Strides)> {
    let of = |shape: &Shape| {
        let strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.dim);
        (shape.batch * shape.seqlen * shape.heads * shape.dim, strides)
    };
    launches.tensors.iter().map(|tensor| of(&tensor.shape)).collect()
}

/// The emulator's tensor map, in the bytes of the driver's: see `machine/interface.h`.
#[repr(C, align(64))]
struct EmulatedMap {
    address: u64,
    rank: u32,
    swizzle: u32,
    dims: [u64; 5],
    strides: [u64; 5],
    tile: [u16; 5],
    element: u16,
    rest: [u8; 20],
}

const _: () = assert!(size_of::<EmulatedMap>() == 128);

impl EmulatedMap {
    fn of(map: &TensorMap, dtype: Dtype) -> EmulatedMap {
        let bytes = dtype.bytes() as u64;
        let shape = &map.shape;
        EmulatedMap {
            address: map.address,
            rank: shape.rank as u32,
            swizzle: shape.tile[0] * bytes as u32,
            dims: shape.dims,
            strides: shape.strides.map(|stride| stride * bytes),
            tile: shape.tile.map(|len| len as u16),
            element: bytes as u16,
            rest: [0; 20],
        }
    }
}

/// The tensors of a call in guarded memory.
struct DeviceMemory<'a> {
    tensors: Vec<(&'static str, bool, Memory<'a>, Strides)>,
    raw: Vec<RawTensor>,
    lse: Memory<'a>,
    lse_is_input: bool,
    workspace: Memory<'a>,
}

impl<'a> DeviceMemory<'a> {
    fn new(unit: &'a Unit, launches: &Launches, call: &Call) -> Result<DeviceMemory<'a>, Error> {
        let machine = &*unit.machine;
        let mut tensors = Vec::new();
        for (tensor, given) in launches.tensors.iter().zip(&call.tensors) {
            let shape = &tensor.shape;
            let name = shape.name;
            let (have, strides) = match *given {
                Given::Input(elements, strides) => (elements.len(), strides),
                Given::Output(elements, strides) => (elements, strides),
            };
            let is_empty = shape.batch * shape.seqlen * shape.heads * shape.dim == 0;
            let last = |len: usize, stride: i64| (len as i64 - 1) * stride;
            let need = last(shape.batch, strides.batch)
                + last(shape.seqlen, strides.seq)
                + last(shape.heads, strides.head)
                + shape.dim as i64;
            if !is_empty && usize::try_from(need).is_ok_and(|need| need > have) {
                return Err(Error::TooShort { tensor: name, have, need: need as usize });
            }
            let mut memory = Memory::new(machine, name, 2 * have)?;
            if let Given::Input(elements, _) = given {
                for (to, from) in memory.bytes_mut().chunks_exact_mut(2).zip(elements.iter()) {
                    to.copy_from_slice(&from.to_ne_bytes());
                }
            }
            tensors.push((name, tensor.is_output, memory, strides));
        }
        let queries = &launches.tensors[0].shape;
        let rows = queries.batch * queries.heads * queries.seqlen;
        let mut lse = Memory::new(machine, "lse", 4 * rows)?;
        if let Some(given) = call.lse {
            if given.len() < rows {
                return Err(Error::TooShort { tensor: "lse", have: given.len(), need: rows });
            }
            for (to, from) in lse.bytes_mut().chunks_exact_mut(4).zip(given) {
                to.copy_from_slice(&from.to_ne_bytes());
            }
        }
        let mut workspace = Memory::new(machine, "workspace", launches.workspace.bytes)?;
        if launches.workspace.starts_zero {
            workspace.bytes_mut().fill(0);
        }
        let raw = tensors
            .iter()
            .map(|(_, _, memory, strides)| RawTensor { address: memory.address(), strides: *strides });
        Ok(DeviceMemory { raw: raw.collect(), tensors, lse, lse_is_input: call.lse.is_some(), workspace })
    }

    fn addresses(&self) -> Addresses<'_> {
        let workspace = (!self.workspace.bytes().is_empty()).then(|| self.workspace.address());
        Addresses {
            tensors: &self.raw,
            lse: Some(self.lse.address()),
            workspace,
            extras: RawExtras::default(),
        }
    }

    fn name_regions(&self, session: &Session, launches: &Launches) {
        let around = (PAGE, PAGE);
        for (name, is_output, memory, _) in &self.tensors {
            let access = if *is_output { Access::Unwritten } else { Access::Input };
            session.region(name, memory.address(), memory.bytes().len() as u64, around, access);
        }
        let access = if self.lse_is_input { Access::Input } else { Access::Unwritten };
        session.region("lse", self.lse.address(), self.lse.bytes().len() as u64, around, access);
        let access = if launches.workspace.starts_zero { Access::Written } else { Access::Unwritten };
        let mut parts = parts(&launches.workspace);
        parts.sort_by_key(|(_, part)| part.offset);
        for (index, (name, part)) in parts.iter().enumerate() {
            let end = part.offset + part.bytes;
            let next = parts.get(index + 1).map_or(launches.workspace.bytes, |(_, next)| next.offset);
            let before = if index == 0 { PAGE } else { 0 };
            let after = (next - end) as u64 + if index + 1 == parts.len() { PAGE } else { 0 };
            let begin = self.workspace.address() + part.offset as u64;
            session.region(&format!("workspace {name}"), begin, part.bytes as u64, (before, after), access);
        }
    }

    /// Sets a part of the workspace to zero, as the stream would.
    fn clear(&self, session: &Session, part: &Part) {
        let begin = self.workspace.address() + part.offset as u64;
        // SAFETY: the part lies within the workspace, which nothing else looks at between launches.
        unsafe { std::ptr::write_bytes(begin as *mut u8, 0, part.bytes) };
        session.region("workspace, cleared", begin, part.bytes as u64, (0, 0), Access::Written);
    }

    /// What is left in a workspace that a call finds zero and leaves zero.
    fn leaked(&self, workspace: &Workspace) -> Option<Finding> {
        let counter = workspace.tile_counter?;
        let bytes = &self.workspace.bytes()[counter.offset..counter.offset + counter.bytes];
        let at = counter.offset + bytes.iter().position(|&byte| byte != 0)?;
        let parts = parts(workspace);
        let part = parts.iter().find(|(_, part)| (part.offset..part.offset + part.bytes).contains(&at));
        let name = part.map_or("workspace", |(name, _)| name);
        Some(Finding {
            kind: "leaked state".into(),
            text: format!(
                "{name} is not zero at the end (byte {at} of the workspace): the next call would start from \
                 it"
            ),
            cta: None,
            thread: None,
            count: 1,
            stack: Vec::new(),
            others: Vec::new(),
        })
    }

    fn outputs(&self) -> Vec<Vec<u16>> {
        let words = |memory: &Memory| {
            memory.bytes().chunks_exact(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect()
        };
        self.tensors
            .iter()
            .filter(|(_, is_output, ..)| *is_output)
            .map(|(_, _, memory, _)| words(memory))
            .collect()
    }

    fn lse(&self) -> Vec<f32> {
        if self.lse_is_input {
            return Vec::new();
        }
        let word = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        self.lse.bytes().chunks_exact(4).map(word).collect()
    }
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
    ];
    all.into_iter().filter_map(|(name, part)| Some((name, part?))).collect()
}

#[derive(Deserialize)]
struct RawParty {
    who: String,
    threads: u32,
    stack: Vec<u64>,
}

#[derive(Deserialize)]
struct RawFinding {
    kind: String,
    text: String,
    cta: i64,
    thread: i64,
    count: u64,
    stack: Vec<u64>,
    others: Vec<RawParty>,
}

#[derive(Deserialize)]
struct RawSpan {
    track: String,
    what: String,
    begin: u64,
    end: u64,
    stack: Vec<u64>,
}

#[derive(Deserialize)]
struct RawOutcome {
    findings: Vec<RawFinding>,
    launches: Vec<LaunchOutcome>,
    spans: Vec<RawSpan>,
}
