//! A pass on the host: tensors in guarded memory, the library's list of launches, and the outcome.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fmt::Write;

use fa_core::program::Ahead;
use fa_core::{Dtype, Problem, Strides, TensorLayout};
use fa_kernels::launch::{Launches, Shape, Step, TensorMap};
use fa_planner::divide;
use serde::Deserialize;

use crate::call::{Call, Given};
use crate::error::Error;
use crate::machine::Launch;
use crate::memory::DeviceMemory;
use crate::options::Options;
use crate::outcome::{Finding, Frame, LaunchOutcome, Outcome, Party, Span};
use crate::symbols::{self, Symbols};
use crate::unit::Unit;

impl Unit {
    /// A forward on packed tensors `[batch, seqlen, heads, dim]` of equal lengths: q, k and v.
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
        self.run(problem, &Call::dense(tensors, None), options)
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
        self.run(problem, &Call::dense(tensors, Some(lse)), options)
    }

    /// The launches of the pass on the number of SMs of the options.
    ///
    /// # Errors
    /// Those of the library for a problem that the kernel does not compute.
    pub fn launches(&self, problem: &Problem, options: &Options) -> Result<Launches, Error> {
        let plan = divide(problem, &self.spec, self.arch, options.sms, options.splits);
        Ok(Launches::of(&plan, problem, self.arch, options.sms)?)
    }

    /// Runs a pass on any tensors.
    ///
    /// # Errors
    /// Those of the library, and [`Error::TooShort`].
    pub fn run(&self, problem: &Problem, call: &Call, options: &Options) -> Result<Outcome, Error> {
        let launches = self.launches(problem, options)?;
        let memory = DeviceMemory::new(self, problem, &launches, call)?;
        let addresses = memory.addresses();
        launches.check(&addresses)?;
        let session = self.machine.session(options, self.spec.kernel.pass().deterministic());
        memory.name_regions(&session, &launches);
        let mut params = launches.argument(&addresses);
        let blocks_per_sm = self.spec.traits().blocks_per_sm;
        let maps: Vec<EmulatedMap> =
            launches.maps(&addresses).map(|map| EmulatedMap::of(&map, problem.types.q)).collect();
        for unread in launches.unread(&addresses) {
            memory.clear_gradient(&session, Some(unread));
        }
        for step in launches.steps.iter().filter(|step| launches.takes(step, &addresses)) {
            match step {
                Step::Clear(part) => memory.clear(&session, part),
                Step::ClearGradient => memory.clear_gradient(&session, launches.cleared(&addresses)),
                Step::Plan(launch) | Step::Launch(launch) => {
                    let launch = &launches.launch_at(launch, &addresses);
                    let ahead = self.spec.score.program.and_then(|program| program.ahead());
                    let mut arguments: Vec<*const c_void> = vec![params.raw().cast_const()];
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
                            // So do the kernels of arrays' gradients, of every family, and what copies an
                            // array of 16 bits ahead.
                            cp_async: self.spec.traits().copies_rows()
                                || launch.entry.starts_with("fa_array_gradient")
                                || ahead.is_some_and(Ahead::is_copied),
                            blocks_per_sm: if launch.entry == fa_kernels::ENTRY { blocks_per_sm } else { 1 },
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
        // Frames of the twins and of calling a unit are left out.
        let stack = |addresses: &[u64]| -> Vec<Frame> {
            let frames = addresses.iter().filter_map(|address| symbols.get(address)).flatten();
            let own = |frame: &&Frame| {
                !frame.file.starts_with("ptx/") && frame.file != "cuda.h" && frame.file != "kernel.cu"
            };
            frames.filter(own).cloned().collect()
        };
        // The planner accounts for the main kernel's buffers only.
        let named = |entry: &str, text: String| {
            if entry == fa_kernels::ENTRY { self.name_buffers(&text) } else { text }
        };
        let party = |entry: &str, party: RawParty| Party {
            who: named(entry, party.who),
            threads: party.threads,
            stack: stack(&party.stack),
        };
        let mut findings: Vec<Finding> = Vec::new();
        for raw in raw.findings {
            let others = raw.others.into_iter().map(|other| party(&raw.entry, other));
            let (own, others): (_, Vec<Party>) = (stack(&raw.stack), others.collect());
            // Lanes at two copies of one line, which compilers may make, have not diverged.
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
                    text: named(&raw.entry, raw.text),
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
            dsinks: memory.dsinks(),
            darrays: memory.darrays(),
            plan: memory.plan(),
            page_faults: memory.page_faults(),
        }
    }

    /// Adds the buffer's name to `shared memory +N`.
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

    /// Writes of the main kernel between the planner's buffers.
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
    entry: String,
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
