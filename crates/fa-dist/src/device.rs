//! Passes on a GPU: a rank's shard in device memory, computed by fa-attn's kernels, moved by NCCL.
//!
//! Everything is made when a rank is bound to a plan: kernels, memory, events. A call enqueues on the
//! caller's stream and on one of its own, and waits for nothing but NCCL's enqueuing.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fa_attn::device::{BindOptions, Bound, DeviceBackward, DeviceForward, Gpu, Half};
use fa_core::{Division, Dtype, KernelSpec, Merge, Pass};
use fa_kernels::cudarc::driver::sys::{self, CUevent_flags};
use fa_kernels::cudarc::driver::{CudaEvent, CudaStream, DriverError, result};
use fa_kernels::{
    BoundMerge, RawBackwardArgs, RawExtras, RawForwardArgs, RawMergeArgs, RawPartialResult, RawTensor,
};

use crate::bootstrap::{Bootstrap, Place, Store};
use crate::error::Error;
use crate::nccl::{Communicator, DevicePiece, Nccl, UniqueId};
use crate::plan::ShardPlan;
use crate::program::{Buffer, Cell, Lane, Op, Part, Piece, Program, Shape, Step, View};
use crate::run::{Engine, Order, run};

fn driver(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Kernels(fa_kernels::Error::Driver { doing, source })
}

/// How a rank on a GPU joins the others.
#[derive(Clone, Copy, Debug)]
pub struct RankOptions {
    /// The longest wait for others: to join, and for an enqueued pass in [`Rank::wait`].
    pub deadline: Duration,
    /// The most SMs that NCCL's transfers take; `None` for its own choice. Kernels of attention leave none
    /// free: few are enough where transfers are hidden.
    pub transfer_ctas: Option<u32>,
}

impl Default for RankOptions {
    fn default() -> RankOptions {
        RankOptions { deadline: Duration::from_secs(60), transfer_ctas: Some(16) }
    }
}

/// A stream's priority: less is earlier.
const HIGHEST: i32 = -5;

/// One GPU of several: a process or a thread each.
pub struct Rank {
    gpu: Arc<Gpu>,
    place: Place,
    store: Store,
    communicator: Option<Communicator>,
    transfer: Arc<CudaStream>,
}

impl Rank {
    /// Joins the other ranks, on a GPU of this process. NCCL's first transfers connect the ranks, so that
    /// later ones do not.
    ///
    /// # Errors
    /// [`Error::NoNccl`], [`Error::Deadline`] where a rank does not come, [`Error::Mismatch`] where ranks
    /// disagree on their number, [`Error::Nccl`] and those of the bootstrap.
    pub fn join(
        gpu: &Arc<Gpu>,
        bootstrap: &Bootstrap,
        place: Place,
        options: &RankOptions,
    ) -> Result<Rank, Error> {
        let RankOptions { deadline, transfer_ctas } = *options;
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        let mut store = Store::join(bootstrap, place, deadline)?;
        // Transfers get SMs before kernels that would hold all of them; the driver takes its own highest.
        let transfer = gpu.context().new_stream_with_priority(HIGHEST).map_err(driver("making a stream"))?;
        let mut communicator = None;
        if place.world > 1 {
            let loaded = Nccl::load();
            // A rank without the library says so to all, which would else wait for it.
            let own = match &loaded {
                Ok(nccl) if place.rank == 0 => nccl.unique_id()?.to_hex(),
                Ok(_) => String::new(),
                Err(error) => format!("error: {error}"),
            };
            let all = store.gather("exchanging NCCL's id", &own)?;
            let nccl = loaded?;
            for (rank, text) in all.iter().enumerate() {
                if text.starts_with("error: ") {
                    let (theirs, ours) = (text.clone(), "NCCL".to_owned());
                    return Err(Error::Mismatch { rank, theirs, ours });
                }
            }
            let id = UniqueId::from_hex(&all[0]).ok_or_else(|| Error::Mismatch {
                rank: 0,
                theirs: "no NCCL id".to_owned(),
                ours: "NCCL".to_owned(),
            })?;
            let lost = store.watch();
            let at = (place.rank, place.world);
            communicator = Some(Communicator::join(&nccl, id, at, transfer_ctas, deadline, &lost)?);
        }
        Ok(Rank { gpu: gpu.clone(), place, store, communicator, transfer })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The place among all ranks.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The text of every rank, in their order, which waits for all: a barrier, and a way to tell times.
    ///
    /// # Errors
    /// [`Error::PeerLost`] and [`Error::Deadline`].
    pub fn gather(&mut self, text: &str) -> Result<Vec<String>, Error> {
        self.store.gather("exchanging a text", text)
    }

    /// Adds up a few host values over all ranks, in their order: losses, and gradients of small models. It
    /// goes by the bootstrap's connections, as text.
    ///
    /// # Errors
    /// As [`Rank::gather`], and [`Error::Mismatch`] where a rank has another number of values.
    pub fn sum(&mut self, values: &mut [f32]) -> Result<(), Error> {
        let own: String = values.iter().map(|value| format!("{:08x}", value.to_bits())).collect();
        let all = self.store.gather("adding up values", &own)?;
        values.fill(0.0);
        for (rank, text) in all.iter().enumerate() {
            if text.len() != own.len() {
                let [theirs, ours] = [text, &own].map(|text| format!("{} values", text.len() / 8));
                return Err(Error::Mismatch { rank, theirs, ours });
            }
            let word =
                |at: usize| text.get(8 * at..8 * at + 8).and_then(|word| u32::from_str_radix(word, 16).ok());
            for (at, value) in values.iter_mut().enumerate() {
                *value += word(at).map_or(f32::NAN, f32::from_bits);
            }
        }
        Ok(())
    }

    /// Waits for what is enqueued on `stream`: until a rank is lost, NCCL fails, or the deadline is over,
    /// which ends the communicator.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Nccl`], [`Error::Deadline`], and asynchronous errors of the GPU.
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), Error> {
        const DOING: &str = "waiting for a pass";
        let event = stream.record_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let event = event.map_err(driver("recording an event"))?;
        let (begun, lost) = (Instant::now(), self.store.watch());
        while !event.is_complete() {
            if let Some(communicator) = &mut self.communicator {
                communicator.is_settled(DOING)?;
                communicator.still(DOING, begun, &lost)?;
            }
            std::thread::yield_now();
        }
        stream.synchronize().map_err(driver("waiting for the GPU"))
    }

    fn agree(&mut self, text: &str) -> Result<(), Error> {
        let rank = self.place.rank;
        let all = self.store.gather("comparing plans", text)?;
        match all.iter().enumerate().find(|(_, other)| *other != text) {
            Some((other, theirs)) if other != rank => {
                Err(Error::Mismatch { rank: other, theirs: theirs.clone(), ours: text.to_owned() })
            }
            _ => Ok(()),
        }
    }
}

/// Device memory that NCCL and peers may read: of no pool.
struct Memory {
    address: u64,
    bytes: usize,
    gpu: Arc<Gpu>,
}

impl Memory {
    /// `bytes` of memory with `byte` in each.
    fn new(gpu: &Arc<Gpu>, bytes: usize, byte: u8) -> Result<Memory, Error> {
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        let bytes = bytes.max(16);
        // SAFETY: the context is current; the memory is freed once, when this is dropped.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(driver("allocating device memory"))?;
        let memory = Memory { address, bytes, gpu: gpu.clone() };
        // SAFETY: the memory has so many bytes.
        unsafe { result::memset_d8_sync(address, byte, bytes) }.map_err(driver("filling device memory"))?;
        Ok(memory)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.gpu.context().bind_to_thread().is_ok() {
            // SAFETY: the memory is this one's, and freeing waits for work that uses it. What fails is that
            // the GPU has failed before.
            unsafe { result::free_sync(self.address) }.ok();
        }
    }
}

/// What a step launches.
enum Kernel {
    Attention(Box<Bound>),
    Merge(BoundMerge),
    /// A copy, a fill or a transfer.
    Plain,
}

/// A program with its kernels and memory.
struct Prepared {
    program: Program,
    kernels: Vec<Kernel>,
    scratch: Vec<Memory>,
    workspace: Memory,
    /// For steps that others wait for.
    events: Vec<Option<CudaEvent>>,
    begun: CudaEvent,
    ended: CudaEvent,
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
    fn new(
        gpu: &Arc<Gpu>,
        plan: &ShardPlan,
        rank: usize,
        pass: Pass,
        spec: &KernelSpec,
    ) -> Result<Prepared, Error> {
        let program = plan.program(rank, pass)?;
        let kernels = program.steps.iter().map(|step| kernel(gpu, plan, &program, step, (pass, spec)));
        let kernels = kernels.collect::<Result<Vec<_>, Error>>()?;
        // NaN, so that reading what was never written shows.
        let room = |shape: &Shape| Memory::new(gpu, shape.elements() * shape.cell.bytes(program.dtype), 0xff);
        let scratch = program.scratch.iter().map(room).collect::<Result<Vec<_>, Error>>()?;
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
        Ok(Prepared { program, kernels, scratch, workspace, events, begun, ended })
    }

    /// Bytes of the program's own memory.
    fn bytes(&self) -> usize {
        self.workspace.bytes + self.scratch.iter().map(|memory| memory.bytes).sum::<usize>()
    }
}

/// The kernel of a step: of attention that of the whole problem wherever it computes the part.
fn kernel(
    gpu: &Gpu,
    plan: &ShardPlan,
    program: &Program,
    step: &Step,
    (pass, spec): (Pass, &KernelSpec),
) -> Result<Kernel, Error> {
    let merge = |parts: &[&View], to: &View| -> Result<Kernel, Error> {
        let dtype = |cell: Cell| if cell == Cell::F32 { Dtype::F32 } else { program.dtype };
        let shape = program.shape(to.buffer);
        let merge = Merge {
            parts: parts.len(),
            batch: shape.batch,
            seqlen: to.rows.len(),
            heads: to.heads.len(),
            dim: shape.dim,
            part: dtype(program.shape(parts[0].buffer).cell),
            out: dtype(shape.cell),
            sinks: false,
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
        Op::Merge { parts, out, .. } => merge(&parts.iter().map(|[out, _]| out).collect::<Vec<_>>(), out),
        Op::Sum { parts, to } if !parts.is_empty() && program.shape(to.buffer).dim > 1 => {
            merge(&parts.iter().collect::<Vec<_>>(), to)
        }
        Op::Sum { .. } | Op::Nothing { .. } | Op::Exchange { .. } => Ok(Kernel::Plain),
    }
}

/// Addresses of the caller's tensors.
#[derive(Clone, Copy, Debug, Default)]
struct Given {
    q: Option<RawTensor>,
    k: Option<RawTensor>,
    v: Option<RawTensor>,
    out: Option<RawTensor>,
    lse: u64,
    dout: Option<RawTensor>,
    gradients: [Option<RawTensor>; 3],
    extras: RawExtras,
}

/// One rank's part of a sharded problem, on a GPU.
pub struct DeviceAttention {
    rank: Rank,
    plan: ShardPlan,
    forward: Prepared,
    backward: Option<Prepared>,
}

impl DeviceAttention {
    /// Agrees with the other ranks on the plan and on kernels, compiles and allocates. Of a training step
    /// give the backward pass, too.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where a rank has another plan, and those of planning, compiling and allocating.
    pub fn new(mut rank: Rank, plan: &ShardPlan, backward: Option<Pass>) -> Result<DeviceAttention, Error> {
        let Place { rank: own, world, .. } = rank.place;
        if world != plan.world() {
            let need = format!("the {} ranks of the plan", plan.world());
            return Err(Error::Ranks { name: "world", value: world, need });
        }
        let passes: Vec<Pass> = [Some(Pass::Forward), backward].into_iter().flatten().collect();
        let specs = passes.iter().map(|pass| Ok(one_gpu(&rank.gpu, plan, *pass)?.spec().clone()));
        let specs = specs.collect::<Result<Vec<_>, Error>>();
        let text = match &specs {
            Ok(specs) => specs.iter().map(KernelSpec::to_string).collect::<Vec<_>>().join(" and "),
            Err(error) => format!("error: {error}"),
        };
        rank.agree(&format!("{} by {text}", plan.descriptor()))?;
        let specs = specs?;
        let mut prepared = passes
            .iter()
            .zip(&specs)
            .map(|(pass, spec)| Prepared::new(&rank.gpu, plan, own, *pass, spec))
            .collect::<Result<Vec<_>, Error>>()?
            .into_iter();
        let Some(forward) = prepared.next() else { unreachable!("a forward is always prepared") };
        let backward = prepared.next();
        Ok(DeviceAttention { rank, plan: plan.clone(), forward, backward })
    }

    /// The plan.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// The rank, given back for another plan.
    pub fn into_rank(self) -> Rank {
        self.rank
    }

    /// The rank.
    pub fn rank(&mut self) -> &mut Rank {
        &mut self.rank
    }

    /// Bytes of device memory that the plan takes on this rank besides the caller's tensors.
    pub fn workspace_bytes(&self) -> usize {
        self.forward.bytes() + self.backward.as_ref().map_or(0, Prepared::bytes)
    }

    /// Enqueues the forward on `stream`: O and LSE of the rank's queries. Every rank calls it, in the same
    /// order.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::PeerLost`], [`Error::Nccl`], and those of launches.
    pub fn forward<T: Half>(
        &mut self,
        tensors: &mut DeviceForward<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let placed = [
            ("q", Buffer::Q, tensors.q.placement.shape),
            ("k", Buffer::K, tensors.k.placement.shape),
            ("v", Buffer::V, tensors.v.placement.shape),
            ("out", Buffer::Out, tensors.out.placement.shape),
        ];
        self.check(&placed)?;
        self.check_lse(tensors.rows)?;
        let raw = tensors.raw(stream);
        let given = Given {
            q: Some(raw.q),
            k: Some(raw.k),
            v: Some(raw.v),
            out: Some(raw.out),
            lse: raw.lse.unwrap_or(0),
            extras: raw.extras,
            ..Given::default()
        };
        launch(&mut self.rank, &self.forward, given, stream)
    }

    /// Enqueues the backward on `stream`: gradients of the rank's queries, keys and values. Every rank calls
    /// it, in the same order.
    ///
    /// # Errors
    /// As [`DeviceAttention::forward`]; [`Error::Refused`] where no backward was prepared.
    pub fn backward<T: Half>(
        &mut self,
        forward: &DeviceForward<T>,
        tensors: &mut DeviceBackward<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        self.check(&[
            ("q", Buffer::Q, forward.q.placement.shape),
            ("k", Buffer::K, forward.k.placement.shape),
            ("v", Buffer::V, forward.v.placement.shape),
            ("out", Buffer::Out, forward.out.placement.shape),
            ("dout", Buffer::Dout, tensors.dout.placement.shape),
            ("dq", Buffer::Dq, tensors.dq.placement.shape),
            ("dk", Buffer::Dk, tensors.dk.placement.shape),
            ("dv", Buffer::Dv, tensors.dv.placement.shape),
        ])?;
        self.check_lse(forward.rows)?;
        let Some(prepared) = &self.backward else {
            return Err(Error::Refused {
                scheme: self.plan.scheme().name(),
                world: self.plan.world(),
                what: "gradients, which were not asked for".to_owned(),
                instead: "make the attention with a backward pass".to_owned(),
            });
        };
        let raw = tensors.raw(forward, stream);
        let given = Given {
            q: Some(raw.q),
            k: Some(raw.k),
            v: Some(raw.v),
            out: Some(raw.out),
            lse: raw.lse,
            dout: Some(raw.dout),
            gradients: [Some(raw.dq), Some(raw.dk), Some(raw.dv)],
            extras: raw.extras,
        };
        launch(&mut self.rank, prepared, given, stream)
    }

    fn check(&self, tensors: &[(&'static str, Buffer, [usize; 4])]) -> Result<(), Error> {
        for (tensor, buffer, got) in tensors {
            let shape = self.plan.shape(self.rank.place.rank, *buffer);
            let need = [shape.batch, shape.rows, shape.heads, shape.dim];
            if *got != need {
                let (got, need) = (format!("{got:?}"), format!("{need:?}"));
                return Err(Error::Tensor { tensor, got, need });
            }
        }
        Ok(())
    }

    fn check_lse(&self, got: usize) -> Result<(), Error> {
        let need = self.plan.shape(self.rank.place.rank, Buffer::Lse).elements();
        if got == need {
            return Ok(());
        }
        let (got, need) = (format!("{got} elements"), format!("{need}"));
        Err(Error::Tensor { tensor: "lse", got, need })
    }
}

fn launch(rank: &mut Rank, prepared: &Prepared, given: Given, stream: &Arc<CudaStream>) -> Result<(), Error> {
    let recorded = driver("recording an event");
    let waited = driver("waiting for an event");
    prepared.begun.record(stream).map_err(&recorded)?;
    rank.transfer.wait(&prepared.begun).map_err(&waited)?;
    let transfer = rank.transfer.clone();
    let mut engine = DeviceEngine { rank, prepared, given, streams: [stream, &transfer] };
    run(&prepared.program, Order::Listed, &mut engine)?;
    prepared.ended.record(&transfer).map_err(&recorded)?;
    stream.wait(&prepared.ended).map_err(&waited)
}

struct DeviceEngine<'a> {
    rank: &'a mut Rank,
    prepared: &'a Prepared,
    given: Given,
    streams: [&'a Arc<CudaStream>; 2],
}

impl DeviceEngine<'_> {
    fn stream(&self, lane: Lane) -> &CudaStream {
        match lane {
            Lane::Compute => self.streams[0],
            Lane::Transfer => self.streams[1],
        }
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
            Buffer::Dq => self.given.gradients[0],
            Buffer::Dk => self.given.gradients[1],
            Buffer::Dv => self.given.gradients[2],
            Buffer::Scratch(number) => Some(own(self.prepared.scratch[number].address)),
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

    /// The extras of a part: those of its heads.
    fn extras(&self, part: &Part) -> RawExtras {
        let mut extras = self.given.extras;
        let shift = 4 * part.heads.start as u64;
        extras.inputs.alibi_slopes = extras.inputs.alibi_slopes.map(|address| address + shift);
        extras.inputs.sinks = extras.inputs.sinks.map(|address| address + shift);
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
                let of = |view: &View| RawPartialResult { out: self.raw(view), lse: 0 };
                let parts: Vec<RawPartialResult> = parts.iter().map(of).collect();
                let args = RawMergeArgs { parts: &parts, out: self.raw(to), lse: None, sinks: None };
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
            let plane = sys::CUDA_MEMCPY2D_st {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcHost: std::ptr::null(),
                srcDevice: from,
                srcArray: std::ptr::null_mut(),
                srcPitch: from_step as usize * size as usize,
                dstXInBytes: 0,
                dstY: 0,
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: std::ptr::null_mut(),
                dstDevice: to_at,
                dstArray: std::ptr::null_mut(),
                dstPitch: to_step as usize * size as usize,
                WidthInBytes: to.rows.len() * size as usize,
                Height: to.heads.len(),
            };
            // SAFETY: both planes lie in their buffers, as programs name rows and heads that these have.
            let copied = unsafe { sys::cuMemcpy2DAsync_v2(&plane, stream.cu_stream()) }.result();
            copied.map_err(driver("copying an LSE"))?;
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

impl Engine for DeviceEngine<'_> {
    fn before(&mut self, _: usize, step: &Step) -> Result<(), Error> {
        let event = step.after.and_then(|after| self.prepared.events[after].as_ref());
        match event {
            Some(event) => self.stream(step.lane).wait(event).map_err(driver("waiting for an event")),
            None => Ok(()),
        }
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
                    extras: self.extras(part),
                };
                // SAFETY: as for sums; the workspace is zero, and all that uses it is in this queue.
                Ok(unsafe { forward.run_raw(stream, &args) }?)
            }
            (Op::Backward { part, inputs, outputs }, Kernel::Attention(bound)) => {
                let Bound::Backward(backward) = bound.as_ref() else { return Ok(()) };
                let [q, k, v, out, lse, dout] = inputs.each_ref().map(|view| self.raw(view));
                let [dq, dk, dv] = outputs.each_ref().map(|view| self.raw(view));
                let lse = lse.address;
                let extras = self.extras(part);
                let args = RawBackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace, extras };
                // SAFETY: as for sums.
                Ok(unsafe { backward.run_raw(stream, &args) }?)
            }
            (Op::Merge { parts, out, lse }, Kernel::Merge(merge)) => {
                let of = |[out, lse]: &[View; 2]| RawPartialResult {
                    out: self.raw(out),
                    lse: self.raw(lse).address,
                };
                let parts: Vec<RawPartialResult> = parts.iter().map(of).collect();
                let lse = Some(self.raw(lse).address);
                let args = RawMergeArgs { parts: &parts, out: self.raw(out), lse, sinks: None };
                // SAFETY: as for sums; the result is in memory of its own.
                Ok(unsafe { merge.run_raw(stream, &args) }?)
            }
            (Op::Forward { .. } | Op::Backward { .. } | Op::Merge { .. } | Op::Exchange { .. }, _) => {
                unreachable!("kernels are made for their steps")
            }
        }
    }

    fn exchange(&mut self, step: &Step, sends: &[Piece], recvs: &[Piece]) -> Result<(), Error> {
        let device = |piece: &Piece| DevicePiece {
            peer: piece.peer,
            address: self.base(piece.buffer).address + piece.offset as u64,
            bytes: piece.bytes,
        };
        let [sends, recvs] = [sends, recvs].map(|all| all.iter().map(device).collect::<Vec<_>>());
        if sends.is_empty() && recvs.is_empty() {
            return Ok(());
        }
        let stream: *mut c_void = self.stream(step.lane).cu_stream().cast();
        let lost = self.rank.store.watch();
        let Some(communicator) = &mut self.rank.communicator else {
            // A rank that is alone sends to itself.
            return sends.iter().zip(&recvs).try_for_each(|(from, to)| {
                // SAFETY: as below; both have as many bytes.
                let copied =
                    unsafe { result::memcpy_dtod_async(to.address, from.address, to.bytes, stream.cast()) };
                copied.map_err(driver("copying device memory"))
            });
        };
        // SAFETY: pieces lie in the program's memory, which lives as long as the program; steps of other
        // queues that touch it wait for this one.
        unsafe { communicator.exchange(&sends, &recvs, stream, &lost) }
    }

    fn after(&mut self, number: usize, step: &Step) -> Result<(), Error> {
        match &self.prepared.events[number] {
            Some(event) => event.record(self.stream(step.lane)).map_err(driver("recording an event")),
            None => Ok(()),
        }
    }
}
