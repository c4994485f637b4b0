//! A pass as data: its parameters, tensor maps, workspace and list of launches. No CUDA call is made here, so
//! that the driver and an emulation run the same launches.

use fa_core::extras::Need;
use fa_core::program::{Axis, Interned};
use fa_core::spec::{Scheduler, Traits};
use fa_core::{Arch, Descales, KernelSpec, LaunchPlan, Problem, Strides};
use fa_planner::account::missing_code;

use crate::Error;
use crate::jit::array_gradients::{ARRAY_TILE, ArrayGradient};
use crate::jit::cache_params::CacheParams;
use crate::jit::declare::{ConstF32Ptr, ConstPtr, MutF32Ptr, MutI32Ptr, MutPtr, MutU32Ptr};
use crate::jit::entries::{ARRAY_GRADIENTS, ARRAY_SUM, ARRAY_SUM_THREADS, ENTRY};
use crate::jit::params::{
    BwdParams, ConstTensor, FwdParams, MutTensor, PlanParams, RowStrides, SplitParams, TmaStrides,
    VarlenParams,
};
use crate::jit::program_params::{
    ArrayGradientParams, BackwardParams, BlockMapParams, FEW_ARRAYS, ForwardParams, ManyArrays,
    ProgramParams, StoredParams, WithPrograms,
};
use crate::launch::args::{RawTensor, Shape};
use crate::launch::checks::check_address;
use crate::launch::extras::RawExtras;
use crate::launch::raw_program::{RawProgram, Scores, Stored, check_program};
use crate::launch::stored;
use crate::launch::tma::{MapShape, MapTemplate, Ragged, TensorMap};
use crate::launch::workspace::{Part, Workspace};
use crate::smem_bytes;

/// LSE is read and written word by word.
const WORD_BYTES: u64 = 4;

/// A kernel's parameters, the first argument of each of its entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Params {
    /// Of a forward.
    Forward(ForwardParams),
    /// Of a backward.
    Backward(BackwardParams),
}

impl Params {
    /// The parameters of the program, and of its mask's map.
    pub fn program(&self) -> (&ProgramParams, &BlockMapParams) {
        match self {
            Params::Forward(own) => (&own.program, &own.map),
            Params::Backward(own) => (&own.program, &own.map),
        }
    }
}

/// A kernel's parameters as its launches take them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// Of a kernel without a program, or whose program reads as many arrays as most.
    Few(Params),
    /// Of a forward whose program reads more.
    ManyForward(ManyArrays<FwdParams, CacheParams>),
    /// Of a backward whose program reads more.
    ManyBackward(ManyArrays<BwdParams, StoredParams>),
}

impl Argument {
    /// Their address.
    pub fn raw(&mut self) -> *mut std::ffi::c_void {
        match self {
            Argument::Few(Params::Forward(params)) => (&raw mut *params).cast(),
            Argument::Few(Params::Backward(params)) => (&raw mut *params).cast(),
            Argument::ManyForward(params) => (&raw mut *params).cast(),
            Argument::ManyBackward(params) => (&raw mut *params).cast(),
        }
    }
}

/// One kernel launch; grid and CTAs are one-dimensional.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The entry function.
    pub entry: &'static str,
    /// CTAs of the grid, at least 1.
    pub grid: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub smem: u32,
    /// CTAs of a cluster; divides `grid`.
    pub cluster: u32,
    /// Whether the tensor maps follow the parameters in its arguments.
    pub takes_maps: bool,
    /// Whether it may start before the launch before it in the same call has ended, for which its code waits
    /// (`ptx/grid.cuh`).
    pub starts_early: bool,
}

impl Launch {
    /// The launch of the main kernel of `spec`, for `tiles` tiles on `sms` SMs: a CTA for each tile, or for
    /// each SM where CTAs compute tiles until none is left.
    pub(crate) fn main(spec: &KernelSpec, tiles: u32, sms: u32) -> Launch {
        let Traits { threads, cluster, scheduler, blocks_per_sm, .. } = spec.traits();
        let ctas = sms.saturating_mul(blocks_per_sm);
        let grid = match scheduler {
            Scheduler::PerTile => tiles,
            Scheduler::Static | Scheduler::Dynamic => tiles.min(ctas / cluster * cluster),
        };
        let (smem, takes_maps) = (smem_bytes(spec), spec.traits().uses_tma());
        Launch { entry: ENTRY, grid, threads, smem, cluster, takes_maps, starts_early: false }
    }

    /// This launch, started early where GPUs of `arch` can.
    pub(crate) fn early(self, arch: Arch) -> Launch {
        Launch { starts_early: arch.compute_capability().0 >= 9, ..self }
    }

    /// A launch of another kernel: without clusters, and without tensor maps.
    pub(crate) const fn plain(entry: &'static str, grid: u32, threads: u32, smem: u32) -> Launch {
        Launch { entry, grid, threads, smem, cluster: 1, takes_maps: false, starts_early: false }
    }
}

/// One operation on the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sets a part of the workspace to zero.
    Clear(Part),
    /// Sets the gradient that the main kernel stores to zero, where it visits not every tile
    /// ([`Launches::cleared`]).
    ClearGradient,
    /// Launches the kernel that plans the work of sequences whose lengths are on the device
    /// ([`Launches::takes`]).
    Plan(Launch),
    /// Launches a kernel.
    Launch(Launch),
}

/// A tensor of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name and lengths.
    pub shape: Shape,
    /// Whether the pass writes it.
    pub is_output: bool,
}

impl Tensor {
    /// The tensors of a pass in the order of a call: q, k, v, out; of a backward also dout, dq, dk, dv.
    pub(crate) fn of_pass(problem: &Problem, backward: bool) -> Vec<Tensor> {
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, lengths, types, .. } = *problem;
        let queries = |name, dim, is_output| {
            let shape = Shape::of(name, lengths.q(), lengths.sequences(), heads_q, (dim, types.q));
            Tensor { shape, is_output }
        };
        let keys = |name, dim, is_output| {
            let row = (types.kv.elements(dim), types.kv);
            let shape = Shape::of(name, lengths.k(), lengths.sequences(), heads_kv, row);
            Tensor { shape, is_output }
        };
        let mut tensors = vec![
            queries("q", head_dim, false),
            keys("k", problem.head_dim_k(), false),
            keys("v", head_dim_v, false),
            queries("out", head_dim_v, !backward),
        ];
        if backward {
            tensors.extend([
                queries("dout", head_dim_v, false),
                queries("dq", head_dim, true),
                keys("dk", head_dim, true),
                keys("dv", head_dim_v, true),
            ]);
        }
        tensors
    }
}

/// Device addresses of a call's memory.
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a> {
    /// In the order of [`Launches::tensors`].
    pub tensors: &'a [RawTensor],
    /// LSE; optional for a forward.
    pub lse: Option<u64>,
    /// At least [`Workspace::bytes`] bytes; `None` where those are 0.
    pub workspace: Option<u64>,
    /// Arguments that only some problems have.
    pub extras: RawExtras,
}

/// The most bytes of a room that a call asks for: beyond them the gradient is computed anew.
const MOST_ROOM: usize = 4 << 30;

/// The launches of a pass for one problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Launches {
    /// The tensors, in the order of a call: q, k, v, out; of a backward also dout, dq, dk, dv.
    pub tensors: Vec<Tensor>,
    /// The extras that calls take.
    pub extras: Vec<Need>,
    /// The memory that the launches share.
    pub workspace: Workspace,
    /// What is enqueued, in this order; empty for a problem without work.
    pub steps: Vec<Step>,
    /// The parameters, without addresses and strides.
    pub(crate) params: Params,
    pub(crate) maps: Vec<MapTemplate>,
    /// Bytes of a work plan; 0 where there is none.
    pub plan_bytes: usize,
    /// The program, whose arrays and scalars calls bring.
    pub(crate) program: Option<Interned>,
    /// What the codes of K and V are multiplied by.
    pub(crate) descales: Descales,
    /// The mask's offset, which a program's `off` counts in.
    pub(crate) mask_offset: i32,
    /// The arrays whose gradients are computed; backward only.
    pub(crate) gradients: Vec<ArrayGradient>,
    /// The scores that there may be.
    pub(crate) scores: Scores,
    /// Keys of a panel of dS and queries of a tile, of a kernel that may store dS.
    pub(crate) ds_box: Option<(u32, u32)>,
}

impl Launches {
    /// The launches of `plan` for `problem` on a GPU of `arch` with `sms` SMs.
    ///
    /// # Errors
    /// [`Error::Problem`], and what [`KernelSpec::serves`] finds: [`Error::Mismatch`] when the kernel does
    /// not compute the problem, [`Error::Page`] for pages that it cannot load, [`Error::TooLong`] for counts
    /// beyond 2^30, [`Error::Scale`] and [`Error::Softcap`] for numbers that kernels cannot use;
    /// [`Error::Division`] for a division of tiles that the kernel does not have.
    pub fn of(plan: &LaunchPlan, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
        if plan.spec.kernel.is_backward() {
            Launches::backward(plan, problem, arch, sms)
        } else {
            Launches::forward(plan, problem, arch, sms)
        }
    }

    /// Checks strides, alignment and presence of a call's memory. Lengths are the caller's responsibility.
    ///
    /// # Errors
    /// [`Error::Stride`], [`Error::Address`], [`Error::MissingExtra`], [`Error::UnusedExtra`] and
    /// [`Error::NoWorkspace`].
    pub fn check(&self, at: &Addresses) -> Result<(), Error> {
        for (tensor, raw) in self.tensors.iter().zip(at.tensors) {
            tensor.shape.check_strides(&raw.strides, tensor.is_output)?;
            tensor.shape.check_address(raw.address)?;
            tensor.shape.check_reach(&raw.strides)?;
        }
        for map in self.maps.iter().filter(|map| map.is_ragged) {
            let tensor = &self.tensors[map.tensor].shape;
            Ragged::of(tensor, &at.tensors[map.tensor].strides, map.group).check(tensor.name)?;
        }
        at.extras.check(&self.extras)?;
        check_program(self.program, at.extras.program.as_ref(), &self.gradients, self.scores.keys)?;
        let Workspace { bytes, align, .. } = self.workspace;
        if bytes > 0 && at.workspace.is_none() {
            return Err(Error::NoWorkspace { need: bytes });
        }
        if self.steps.is_empty() {
            return Ok(());
        }
        if bytes > 0
            && let Some(address) = at.workspace
        {
            check_address("workspace", address, align)?;
        }
        // Without queries there is no LSE.
        let has_lse = !self.tensors[0].shape.is_empty();
        at.lse.filter(|_| has_lse).map_or(Ok(()), |address| check_address("lse", address, WORD_BYTES))
    }

    /// Whether a call at `at` takes `step`: no plan is made where the call brings one, or where all CTAs plan
    /// for themselves.
    pub fn takes(&self, step: &Step, at: &Addresses) -> bool {
        match step {
            Step::Plan(_) => at.extras.plan.is_none() && !self.plans_for_itself(),
            Step::Clear(_) => true,
            Step::ClearGradient => self.stored(at).is_some(),
            Step::Launch(launch) if launch.entry == ARRAY_SUM => {
                self.stored(at).is_some_and(|(_, stored, _)| stored == Stored::Room)
            }
            Step::Launch(launch) => {
                let Some(own) = self.gradient_of(launch) else { return true };
                let is_wanted = at.extras.program.is_some_and(|given| {
                    given.gradients[own.slot] != 0 && given.reached(own).all(|(_, len)| len > 0)
                });
                is_wanted && self.stored(at).is_none_or(|(.., stored)| stored != own)
            }
        }
    }

    fn gradient_of(&self, launch: &Launch) -> Option<&ArrayGradient> {
        self.gradients.iter().find(|own| ARRAY_GRADIENTS[own.index] == launch.entry)
    }

    /// A launch of a call at `at`: those of arrays' gradients have as many CTAs as the call's arrays need.
    pub fn launch_at(&self, launch: &Launch, at: &Addresses) -> Launch {
        let Some(given) = at.extras.program else { return *launch };
        let tiles = |(axis, len): (Axis, usize)| {
            let of_tile = if matches!(axis, Axis::Query | Axis::Key) { ARRAY_TILE } else { 1 };
            len.div_ceil(of_tile)
        };
        let grid = match (self.gradient_of(launch), self.stored(at)) {
            (Some(own), _) => given.reached(own).map(tiles).product(),
            (None, Some((_, _, own))) if launch.entry == ARRAY_SUM => {
                let rows = given.reached(own).filter(|&(axis, _)| axis != Axis::Key);
                let rows: usize = rows.map(|(_, len)| len).product();
                let threads = rows.saturating_mul(self.scores.keys.div_ceil(8));
                threads.div_ceil(ARRAY_SUM_THREADS as usize)
            }
            (None, _) => return *launch,
        };
        Launch { grid: u32::try_from(grid).unwrap_or(launch.grid).min(launch.grid), ..*launch }
    }

    /// Where the main kernel stores dS in a call at `at`, and the array whose gradient that serves.
    fn stored(&self, at: &Addresses) -> Option<(RawProgram, Stored, &ArrayGradient)> {
        let given = at.extras.program?;
        let found = |own| Some((given, given.stores(own, self.scores)?, own));
        self.gradients.iter().find_map(found)
    }

    /// Bytes of the room ([`RawProgram::room`]) that makes a call with this program faster; 0 for none.
    pub fn room_bytes(&self, given: &RawProgram) -> usize {
        let needs = self.gradients.iter().any(|own| given.needs_room(own, self.scores));
        let bytes = if needs { self.scores.room_bytes() } else { 0 };
        if bytes > MOST_ROOM { 0 } else { bytes }
    }

    /// Address and bytes of what [`Step::ClearGradient`] sets to zero.
    pub fn cleared(&self, at: &Addresses) -> Option<(u64, usize)> {
        let (given, stored, own) = self.stored(at)?;
        Some(match stored {
            Stored::Room => (given.room, self.scores.room_bytes()),
            Stored::Own => (given.gradients[own.slot], given.gradient_bytes(own.slot)),
        })
    }

    /// Address and bytes of each gradient that a call at `at` sets to zero before all steps: of arrays of
    /// which kernels read a part or nothing.
    pub fn unread<'a>(&'a self, at: &Addresses) -> impl Iterator<Item = (u64, usize)> + 'a {
        let given = at.extras.program.unwrap_or_default();
        let is_whole = move |slot: usize| {
            self.gradients.iter().find(|own| own.slot == slot).is_some_and(|own| {
                let mut lengths = given.reached(own).zip(given.arrays[slot].extents);
                lengths.all(|((_, len), extent)| len == extent as usize)
            })
        };
        let wanted = (0..given.gradients.len()).filter(move |&slot| given.gradients[slot] != 0);
        let parts = wanted.filter(move |&slot| !is_whole(slot));
        parts.map(move |slot| (given.gradients[slot], given.gradient_bytes(slot)))
    }

    pub(crate) fn plans_for_itself(&self) -> bool {
        match &self.params {
            Params::Forward(own) => own.params.plan.own_ints > 0,
            Params::Backward(_) => false,
        }
    }

    /// The parameters of a call.
    pub fn params(&self, at: &Addresses) -> Params {
        let reads = |i: usize| {
            let RawTensor { address, strides } = at.tensors[i];
            let shape = &self.tensors[i].shape;
            ConstTensor { data: ConstPtr(address), strides: row_strides(shape, &strides) }
        };
        let writes = |i: usize| {
            let RawTensor { address, strides } = at.tensors[i];
            let shape = &self.tensors[i].shape;
            MutTensor { data: MutPtr(address), strides: row_strides(shape, &strides) }
        };
        let lse = at.lse.unwrap_or(0);
        let part = |part: Option<Part>| part.map_or(0, |part| at.workspace.unwrap_or(0) + part.offset as u64);
        let floats = |of: Option<Part>| MutF32Ptr(part(of));
        let words = |of: Option<Part>| MutU32Ptr(part(of));
        let parts = &self.workspace;
        let plan = |own: PlanParams| match at.extras.plan {
            Some(given) => PlanParams { buffer: MutI32Ptr(given), own_ints: 0, ..own },
            None => PlanParams { buffer: MutI32Ptr(part(parts.plan)), ..own },
        };
        let tma = |i: usize| match self.maps.get(i) {
            Some(map) if map.is_ragged => {
                let strides = &at.tensors[map.tensor].strides;
                Ragged::of(&self.tensors[map.tensor].shape, strides, map.group).params()
            }
            _ => TmaStrides::default(),
        };
        let varlen = |params: VarlenParams| VarlenParams {
            tma_q: tma(0),
            tma_k: tma(1),
            tma_v: tma(2),
            tma_do: tma(3),
            ..at.extras.varlen(params)
        };
        let program = at.extras.program.unwrap_or_default().params(self.mask_offset);
        let map = |own: BlockMapParams| BlockMapParams {
            lists: words(parts.map_lists),
            tiles: words(parts.map_tiles),
            ..own
        };
        match self.params {
            Params::Forward(own) => {
                let params = own.params;
                let params = FwdParams {
                    q: reads(0),
                    k: reads(1),
                    v: reads(2),
                    out: writes(3),
                    lse: MutF32Ptr(lse),
                    tile_counter: match (parts.tile_counter, at.extras.counter) {
                        (Some(_), Some(counter)) => MutU32Ptr(counter),
                        (own, _) => words(own),
                    },
                    varlen: varlen(params.varlen),
                    mods: at.extras.mods(params.mods),
                    split: SplitParams {
                        out_partial: floats(parts.out_partial),
                        lse_partial: floats(parts.lse_partial),
                        ..params.split
                    },
                    plan: plan(params.plan),
                    ..params
                };
                let gradients = ArrayGradientParams::default();
                let pass = at.extras.cache(own.pass, self.descales);
                Params::Forward(WithPrograms { params, program, map: map(own.map), gradients, pass })
            }
            Params::Backward(own) => {
                let params = own.params;
                let params = BwdParams {
                    q: reads(0),
                    k: reads(1),
                    v: reads(2),
                    out: reads(3),
                    dout: reads(4),
                    dq: writes(5),
                    dk: writes(6),
                    dv: writes(7),
                    lse: ConstF32Ptr(lse),
                    lse_log2: floats(parts.lse_log2),
                    dpsum: floats(parts.dpsum),
                    dq_accum: floats(parts.dq_accum),
                    dk_accum: floats(parts.dk_accum),
                    dv_accum: floats(parts.dv_accum),
                    dq_semaphores: words(parts.dq_semaphores),
                    tile_counter: words(parts.tile_counter),
                    varlen: varlen(params.varlen),
                    mods: at.extras.mods(params.mods),
                    dkv_semaphores: words(parts.dkv_semaphores),
                    dlse: ConstF32Ptr(at.extras.inputs.dlse.unwrap_or(0)),
                    plan: plan(params.plan),
                    ..params
                };
                let given = at.extras.program.unwrap_or_default();
                let (gradients, is_stored) = (given.gradients(), self.stored(at).is_some());
                let pass = given.stored_params(self.scores, is_stored);
                Params::Backward(WithPrograms { params, program, map: map(own.map), gradients, pass })
            }
        }
    }

    /// What a call's launches take.
    pub fn argument(&self, at: &Addresses) -> Argument {
        let params = self.params(at);
        if self.program.is_none_or(|program| program.arrays().len() <= FEW_ARRAYS) {
            return Argument::Few(params);
        }
        let given = at.extras.program.unwrap_or_default();
        let (program, gradients) = (given.many_params(self.mask_offset), given.many_gradients());
        match params {
            Params::Forward(WithPrograms { params, map, pass, .. }) => {
                Argument::ManyForward(WithPrograms { params, program, map, gradients, pass })
            }
            Params::Backward(WithPrograms { params, map, pass, .. }) => {
                Argument::ManyBackward(WithPrograms { params, program, map, gradients, pass })
            }
        }
    }

    /// The tensor maps of a call, in the order of the arguments: five at most.
    pub fn maps<'a>(&'a self, at: &'a Addresses) -> impl ExactSizeIterator<Item = TensorMap> + 'a {
        let of_tensor = |map: &MapTemplate| {
            let raw = &at.tensors[map.tensor];
            let shape = MapShape::of(&self.tensors[map.tensor].shape, &raw.strides, map);
            TensorMap { tensor: map.name, address: raw.address, shape }
        };
        let (ds_box, stored) = (self.ds_box.filter(|_| !self.maps.is_empty()), self.stored(at));
        (0..self.maps.len() + usize::from(ds_box.is_some())).map(move |i| {
            match (self.maps.get(i), ds_box, stored) {
                (Some(map), ..) => of_tensor(map),
                (None, Some(tile), Some((given, stored, own))) => {
                    stored::map(&given, (stored, own), self.scores, tile)
                }
                // Of a call that stores no dS any map will do.
                (None, ..) => of_tensor(&self.maps[0]),
            }
        })
    }
}

/// Checks that a kernel of `spec` computes the forward of `problem`, or its backward, and has device code for
/// all that the spec asks for.
///
/// # Errors
/// As [`Launches::of`]; [`Error::NoCode`] for the first thing that the kernel lacks; [`Error::Mismatch`] for
/// a kernel of the other pass.
pub(crate) fn check(spec: &KernelSpec, problem: &Problem, backward: bool) -> Result<Traits, Error> {
    problem.check()?;
    spec.serves(problem)?;
    if let Some(what) = missing_code(spec) {
        return Err(Error::NoCode { kernel: spec.kernel.name(), what });
    }
    let traits = spec.traits();
    if traits.pass.is_backward() != backward {
        let name = |backward| if backward { "the backward" } else { "the forward" }.to_owned();
        return Err(Error::Mismatch { what: "pass", kernel: name(!backward), problem: name(backward) });
    }
    Ok(traits)
}

/// Packed sequences are one entry whose rows are counted through: no sequence steps along the batch.
fn row_strides(shape: &Shape, strides: &Strides) -> RowStrides {
    let batch = if shape.batch > 1 { strides.batch } else { 0 };
    RowStrides { batch, seq: strides.seq, head: strides.head }
}
