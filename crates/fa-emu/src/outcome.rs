//! The outcome of an emulated pass: outputs, findings with their locations in the kernel's source, and
//! counters.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A location in the sources of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Frame {
    /// The function, without its template arguments.
    pub function: String,
    /// The header, as it is included: `sm90/fwd.cuh`; of the unit itself `kernel.cu`.
    pub file: String,
    /// The line, from 1; 0 when unknown.
    pub line: u32,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Another thread or operation that a finding is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Party {
    /// The thread or operation, and what it did or waits for.
    pub who: String,
    /// Threads at the same location.
    pub threads: u32,
    /// Where, innermost first.
    pub stack: Vec<Frame>,
}

/// A fault of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// `data race`, `deadlock`, `missing proxy fence`, ...
    pub kind: String,
    /// The thread, its access, and the memory.
    pub text: String,
    /// The CTA in which it was found.
    pub cta: Option<u32>,
    /// The thread within that CTA.
    pub thread: Option<u32>,
    /// How often it was found at this location.
    pub count: u64,
    /// Where, innermost first; the functions of `ptx/` are left out.
    pub stack: Vec<Frame>,
    /// Other parties: the other side of a race, all that wait in a deadlock.
    pub others: Vec<Party>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.text)?;
        if self.count > 1 {
            write!(f, " ({} times)", self.count)?;
        }
        write_stack(f, &self.stack, "    ")?;
        for party in &self.others {
            write!(f, "\n    {}", party.who)?;
            if party.threads > 1 {
                write!(f, " ({} threads)", party.threads)?;
            }
            write_stack(f, &party.stack, "        ")?;
        }
        Ok(())
    }
}

fn write_stack(f: &mut fmt::Formatter<'_>, stack: &[Frame], indent: &str) -> fmt::Result {
    for (index, frame) in stack.iter().enumerate() {
        let word = if index == 0 { "at" } else { "in" };
        write!(f, "\n{indent}{word} {frame} ({})", frame.function)?;
    }
    Ok(())
}

/// Counters of a launch, over all CTAs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Steps of the scheduler: a warp runs to its next wait, or an operation completes.
    pub steps: u64,
    /// Switches between threads.
    pub switches: u64,
    /// Instructions executed by a whole warp.
    pub collectives: u64,
    /// Asynchronous operations.
    pub agents: u64,
    /// Loads and stores of plain C++.
    pub plain_accesses: u64,
    /// mma.sync of a warp.
    pub mma_sync: u64,
    /// wgmma of a warp: a quarter of a warpgroup's.
    pub wgmma: u64,
    /// tcgen05.mma.
    pub tcgen05: u64,
    /// Floating-point operations of all three.
    pub flops: u64,
    /// Boxes that TMA loaded.
    pub tma_boxes: u64,
    /// Bytes of those boxes.
    pub tma_bytes: u64,
    /// Of them, bytes within the tensors.
    pub tma_bytes_inside: u64,
    /// Bytes of bulk copies to shared memory.
    pub bulk_bytes: u64,
    /// Bytes that cp.async read.
    pub cp_async_bytes: u64,
    /// Bytes added to device memory.
    pub red_bytes: u64,
    /// Phases of eight lanes of ldmatrix.
    pub load_phases: u64,
    /// Wavefronts that they took: more where banks conflict.
    pub load_wavefronts: u64,
    /// Phases of stmatrix.
    pub store_phases: u64,
    /// Their wavefronts.
    pub store_wavefronts: u64,
}

/// One launch of a pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchOutcome {
    /// The entry function.
    pub entry: String,
    /// Whether every CTA finished.
    pub finished: bool,
    /// Its counters.
    pub counters: Counters,
    /// Ranges of shared memory that some CTA wrote, in bytes, ascending.
    pub touched: Vec<(u32, u32)>,
}

/// An interval of the traced CTA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// A warp, TMA, a warpgroup's tensor core.
    pub track: String,
    /// The wait or the operation.
    pub what: String,
    /// First step.
    pub begin: u64,
    /// Step after the last.
    pub end: u64,
    /// Where it was issued or waited for.
    pub stack: Vec<Frame>,
}

/// The outcome of an emulated pass.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The findings; empty for a kernel without a fault that the emulation detects.
    pub findings: Vec<Finding>,
    /// The launches that were made.
    pub launches: Vec<LaunchOutcome>,
    /// The timeline of the traced CTA.
    pub spans: Vec<Span>,
    /// Elements of the written tensors with what lies between their rows, in the order of a call: of a
    /// forward out, of a backward dq, dk, dv.
    #[serde(skip)]
    pub outputs: Vec<Vec<u16>>,
    /// LSE of a forward.
    #[serde(skip)]
    pub lse: Vec<f32>,
    /// Gradients of the sinks, of a backward that has them.
    #[serde(skip)]
    pub dsinks: Vec<f32>,
    /// Gradients of the arrays that the problem's program reads, each packed.
    pub darrays: Vec<Vec<f32>>,
    /// The ints of the work plan; none where lengths are uniform.
    #[serde(skip)]
    pub plan: Vec<i32>,
    /// Entries of the page table that the kernel counted as invalid.
    pub page_faults: u32,
}

impl Outcome {
    /// Whether all launches finished without a finding.
    pub fn clean(&self) -> bool {
        self.findings.is_empty() && self.launches.iter().all(|launch| launch.finished)
    }

    /// Counters of all launches together.
    pub fn counters(&self) -> Counters {
        let mut all = Counters::default();
        for launch in &self.launches {
            all.add(&launch.counters);
        }
        all
    }
}

impl Counters {
    /// Adds the counters of another launch.
    pub fn add(&mut self, other: &Counters) {
        self.steps += other.steps;
        self.switches += other.switches;
        self.collectives += other.collectives;
        self.agents += other.agents;
        self.plain_accesses += other.plain_accesses;
        self.mma_sync += other.mma_sync;
        self.wgmma += other.wgmma;
        self.tcgen05 += other.tcgen05;
        self.flops += other.flops;
        self.tma_boxes += other.tma_boxes;
        self.tma_bytes += other.tma_bytes;
        self.tma_bytes_inside += other.tma_bytes_inside;
        self.bulk_bytes += other.bulk_bytes;
        self.cp_async_bytes += other.cp_async_bytes;
        self.red_bytes += other.red_bytes;
        self.load_phases += other.load_phases;
        self.load_wavefronts += other.load_wavefronts;
        self.store_phases += other.store_phases;
        self.store_wavefronts += other.store_wavefronts;
    }
}
