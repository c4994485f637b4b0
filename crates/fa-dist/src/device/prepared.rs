//! A rank's program with its kernels and memory, made once.

use std::sync::Arc;

use fa_attn::device::{BindOptions, Bound, Gpu};
use fa_core::program::Interned;
use fa_core::{Division, Dtype, KernelSpec, Merge, Pass};
use fa_kernels::BoundMerge;
use fa_kernels::cudarc::driver::CudaEvent;

use super::copies::Links;
use super::memory::{BLOCK, Memory, driver};
use crate::error::Error;
use crate::plan::ShardPlan;
use crate::program::{Cell, Op, Program, Step, View};
use crate::pulls::Rooms;

/// What a step launches.
pub(super) enum Kernel {
    Attention(Box<Bound>),
    Merge(BoundMerge),
    /// A copy, a fill or a transfer.
    Plain,
}

/// A program with its kernels and memory.
pub(super) struct Prepared {
    pub(super) program: Program,
    /// The whole problem's program of masks and scores.
    pub(super) whole: Option<Interned>,
    /// How many slopes of ALiBi the whole problem has.
    pub(super) slopes: Option<usize>,
    pub(super) kernels: Vec<Kernel>,
    /// Starts of the packed queries and keys of steps that have their own.
    pub(super) starts: Vec<Option<[Memory; 2]>>,
    /// The addresses of the program's own buffers, which lie in `memory`.
    pub(super) scratch: Vec<u64>,
    pub(super) memory: Arc<Memory>,
    /// What exchanges copy, where ranks copy.
    pub(super) links: Links,
    pub(super) workspace: Memory,
    /// For steps that others wait for.
    pub(super) events: Vec<Option<CudaEvent>>,
    pub(super) begun: CudaEvent,
    pub(super) ended: CudaEvent,
}

/// The kernel that one GPU would take for `plan`'s whole problem, whose tiles shards should begin at
/// ([`ShardPlan::with_tiles`]): with it in all parts the bits are those of one GPU.
///
/// # Errors
/// What planning and compiling refuse.
pub fn one_gpu(gpu: &Gpu, plan: &ShardPlan, pass: Pass) -> Result<Bound, Error> {
    Ok(gpu.bind(plan.problem(), pass, &options(plan, pass, None))?)
}

/// Where bits are to be those of one GPU, keys of a tile are not divided: sums would be in another order.
fn options(plan: &ShardPlan, pass: Pass, spec: Option<KernelSpec>) -> BindOptions {
    let division = match pass {
        Pass::Forward if plan.same_bits() => Division { splits: Some(1), ..Division::PLANNED },
        Pass::Forward | Pass::Backward { .. } => Division::PLANNED,
    };
    BindOptions::default().with_division(division).with_spec(spec)
}

impl Prepared {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        plan: &ShardPlan,
        rank: usize,
        pass: Pass,
        spec: &KernelSpec,
    ) -> Result<Prepared, Error> {
        let program = plan.program(rank, pass)?;
        let kernels = program.steps.iter().map(|step| kernel(gpu, plan, &program, step, (pass, spec)));
        let kernels = kernels.collect::<Result<Vec<_>, Error>>()?;
        let starts = program.steps.iter().map(|step| starts(gpu, step)).collect::<Result<Vec<_>, Error>>()?;
        let rooms = Rooms::of(&program);
        // Of NaN, so that reading what was never written shows.
        let memory = Arc::new(Memory::new(gpu, rooms.bytes.next_multiple_of(BLOCK), 0xff)?);
        let scratch = rooms.offsets.iter().map(|offset| memory.address + *offset as u64).collect();
        let workspace = kernels.iter().map(|kernel| match kernel {
            Kernel::Attention(bound) => bound.workspace_bytes(),
            Kernel::Merge(_) | Kernel::Plain => 0,
        });
        // Zero before its first use, as forwards ask; each leaves it so.
        let workspace = Memory::new(gpu, workspace.max().unwrap_or(0), 0)?;
        let event = || gpu.context().new_event(None).map_err(driver("making an event"));
        let waited = |number: usize| program.steps.iter().any(|step| step.after == Some(number));
        let events = (0..program.steps.len()).map(|number| waited(number).then(event).transpose());
        let events = events.collect::<Result<Vec<_>, Error>>()?;
        let (begun, ended) = (event()?, event()?);
        let whole = plan.problem().score.program;
        let slopes = plan.problem().score.alibi.map(|_| plan.problem().heads_q);
        Ok(Prepared {
            program,
            whole,
            slopes,
            kernels,
            starts,
            scratch,
            memory,
            links: Links::default(),
            workspace,
            events,
            begun,
            ended,
        })
    }

    /// Bytes of the program's own memory.
    pub(super) fn bytes(&self) -> usize {
        self.workspace.bytes + self.memory.bytes
    }
}

/// The starts of a step's packed sequences, in device memory.
fn starts(gpu: &Arc<Gpu>, step: &Step) -> Result<Option<[Memory; 2]>, Error> {
    let part = match &step.op {
        Op::Forward { part, .. } | Op::Backward { part, .. } => part,
        Op::Sum { .. } | Op::Nothing { .. } | Op::Merge { .. } | Op::Place { .. } | Op::Exchange { .. } => {
            return Ok(None);
        }
    };
    let Some([q, k]) = &part.starts else { return Ok(None) };
    Ok(Some([Memory::of(gpu, q)?, Memory::of(gpu, k)?]))
}

/// The kernel of a step: of attention that of the whole problem wherever it computes the part.
fn kernel(
    gpu: &Gpu,
    plan: &ShardPlan,
    program: &Program,
    step: &Step,
    (pass, spec): (Pass, &KernelSpec),
) -> Result<Kernel, Error> {
    let merge = |parts: &[&View], to: &View, sinks: bool| -> Result<Kernel, Error> {
        let dtype = |cell: Cell| if cell == Cell::F32 { Dtype::F32 } else { program.dtype };
        let shape = program.shape(to.buffer);
        // A value of each head is a row of all of them.
        let (heads, dim) = if shape.dim == 1 { (1, to.heads.len()) } else { (to.heads.len(), shape.dim) };
        let merge = Merge {
            parts: parts.len(),
            batch: shape.batch,
            seqlen: to.rows.len(),
            heads,
            dim,
            part: dtype(program.shape(parts[0].buffer).cell),
            out: dtype(shape.cell),
            sinks,
        };
        Ok(Kernel::Merge(gpu.merge(&merge)?))
    };
    match &step.op {
        Op::Forward { part, .. } | Op::Backward { part, .. } => {
            let pinned = plan.same_bits().then(|| options(plan, pass, Some(spec.clone())));
            let bound = match pinned.map(|pinned| gpu.bind(&part.problem, pass, &pinned)) {
                Some(Ok(bound)) => bound,
                Some(Err(_)) | None => gpu.bind(&part.problem, pass, &options(plan, pass, None))?,
            };
            Ok(Kernel::Attention(Box::new(bound)))
        }
        Op::Merge { parts, out, sinks, .. } => {
            merge(&parts.iter().map(|[out, _]| out).collect::<Vec<_>>(), out, *sinks)
        }
        Op::Sum { parts, to }
            if parts.len() > 1 || (!parts.is_empty() && program.shape(to.buffer).dim > 1) =>
        {
            merge(&parts.iter().collect::<Vec<_>>(), to, false)
        }
        Op::Sum { .. } | Op::Nothing { .. } | Op::Place { .. } | Op::Exchange { .. } => Ok(Kernel::Plain),
    }
}
