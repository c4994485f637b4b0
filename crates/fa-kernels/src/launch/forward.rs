//! A forward kernel bound to a problem: what is computed once, and a call that checks, encodes and launches.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::CudaStream;
use fa_core::spec::{Scheduler, TileOrder, Traits};
use fa_core::{Arch, KernelSpec, Problem};
use fa_planner::account::panels::widest;
use fa_planner::account::{kv_splits, page_part};

use crate::Error;
use crate::jit::params::{FwdParams, PlanParams, SplitParams, VarlenParams};
use crate::jit::source::{COMBINE, COMBINE_SMEM, COMBINE_THREADS, ENTRY};
use crate::launch::args::{Element, ForwardArgs, RawForwardArgs, RawTensor};
use crate::launch::checks::count;
use crate::launch::extras::{Extra, mod_params, varlen_params};
use crate::launch::launches::{
    Addresses, Launch, Launches, Params, Step, Tensor, check_code, score_params, shape_params,
};
use crate::launch::module::LoadedKernel;
use crate::launch::run::{Buffer, check_buffers, check_element, enqueue};
use crate::launch::sections::Sections;
use crate::launch::tma::MapTemplate;
use crate::launch::varied::{PlanBounds, plan_step, shape_of};
use crate::launch::workspace::{ForwardParts, Workspace};
use crate::smem_bytes;

/// A forward pass ready to run. Cheap to make from a loaded kernel, cheap to run; shared by threads.
#[derive(Debug)]
pub struct Forward {
    kernel: Arc<LoadedKernel>,
    problem: Problem,
    launches: Launches,
}

impl Forward {
    /// Binds `kernel` to `problem`.
    ///
    /// # Errors
    /// As [`Launches::forward`].
    pub fn new(kernel: Arc<LoadedKernel>, problem: &Problem) -> Result<Forward, Error> {
        let launches = Launches::forward(&kernel.spec, problem, kernel.arch, kernel.sms)?;
        Ok(Forward::of(kernel, problem, launches))
    }

    /// Binds `kernel` to `problem`, for which it makes `launches`.
    pub(crate) fn of(kernel: Arc<LoadedKernel>, problem: &Problem, launches: Launches) -> Forward {
        Forward { kernel, problem: *problem, launches }
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The kernel that computes it.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// What a call launches.
    pub fn launches(&self) -> &Launches {
        &self.launches
    }

    /// Bytes of workspace that a call needs, often 0. Zero before the first call; each call leaves them zero.
    pub fn workspace_bytes(&self) -> usize {
        self.launches.workspace.bytes
    }

    /// Launches the kernel on `stream`. Allocates nothing and waits for nothing, so it can be captured in a
    /// CUDA graph (there, use one stream, or switch off cudarc's event tracking, whose events do not outlive
    /// a capture).
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; a missing workspace; a stream or a
    /// tensor of another context; [`Error::Driver`].
    pub fn run<T: Element>(&self, stream: &CudaStream, args: ForwardArgs<'_, T>) -> Result<(), Error> {
        let ForwardArgs { q, k, v, out, lse, workspace, mut extras } = args;
        check_element::<T>(&self.problem)?;
        let buffers = [
            Buffer::of(&q.strides, q.data.len(), q.data.stream()),
            Buffer::of(&k.strides, k.data.len(), k.data.stream()),
            Buffer::of(&v.strides, v.data.len(), v.data.stream()),
            Buffer::of(&out.strides, out.data.len(), out.data.stream()),
        ];
        let lse_buffer = lse.as_ref().map(|lse| (lse.len(), lse.stream()));
        let workspace_buffer = workspace.as_ref().map(|workspace| (workspace.len(), workspace.stream()));
        check_buffers(&self.kernel, &self.launches, &buffers, lse_buffer, workspace_buffer)?;
        let (extras, _extras) = extras
            .raw(&self.launches.extras, stream, |name, of| self.kernel.check_context(name, of.context()))?;
        // Each guard tells cudarc, when it is dropped after the launch, that the stream has used its tensor.
        let raw = |address, strides| RawTensor { address, strides };
        let (q_address, _q) = q.data.device_ptr(stream);
        let (k_address, _k) = k.data.device_ptr(stream);
        let (v_address, _v) = v.data.device_ptr(stream);
        let (out_address, _out) = out.data.device_ptr_mut(stream);
        let lse = lse.map(|lse| lse.device_ptr_mut(stream));
        let workspace = workspace.map(|workspace| workspace.device_ptr_mut(stream));
        let args = RawForwardArgs {
            q: raw(q_address, q.strides),
            k: raw(k_address, k.strides),
            v: raw(v_address, v.strides),
            out: raw(out_address, out.strides),
            lse: lse.as_ref().map(|(address, _)| *address),
            workspace: workspace.as_ref().map(|(address, _)| *address),
            extras,
        };
        // SAFETY: the tensors' lengths were checked against shapes and strides, they stay borrowed until the
        // launch is enqueued, and cudarc orders the stream before any later use or release of them.
        unsafe { self.run_raw(stream, &args) }
    }

    /// [`Forward::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the problem's shapes under the given strides lies in device memory that the stream's
    /// context can access, and stays there, untouched by others, until the stream has run the kernel. Outputs
    /// share no memory with inputs. The workspace is zero.
    ///
    /// # Errors
    /// As [`Forward::run`], except that lengths are the caller's responsibility.
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawForwardArgs) -> Result<(), Error> {
        let tensors = [args.q, args.k, args.v, args.out];
        let at =
            Addresses { tensors: &tensors, lse: args.lse, workspace: args.workspace, extras: args.extras };
        // SAFETY: the launches are of this kernel; the caller vouches for the memory.
        unsafe { enqueue(&self.kernel, &self.launches, self.problem.types.qkv, stream, &at) }
    }
}

impl Launches {
    /// The launches of a forward kernel of `spec` for `problem` on a GPU of `arch` with `sms` SMs.
    ///
    /// # Errors
    /// As [`Launches::of`]; [`Error::Mismatch`] for a backward.
    pub fn forward(spec: &KernelSpec, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
        problem.check()?;
        spec.serves(problem)?;
        check_code(spec)?;
        let traits = spec.traits();
        if traits.pass.is_backward() {
            let (kernel, problem) = ("the backward".into(), "the forward".into());
            return Err(Error::Mismatch { what: "pass", kernel, problem });
        }
        let uses_tma = traits.uses_tma();
        let work = Work::of(spec, &traits, problem, (arch, sms));
        let params = params(spec, &traits, problem, &work, (arch, sms))?;
        // Of sequences whose lengths are on the device, the most tiles that there can be.
        let tiles = params.num_tiles as u32;
        // Persistent CTAs compute tiles until none is left.
        let resident = sms / traits.cluster * traits.cluster;
        let (grid, draws_tiles) = match traits.scheduler {
            Scheduler::PerTile => (tiles, false),
            Scheduler::Static => (tiles.min(resident), false),
            Scheduler::Dynamic => (tiles.min(resident), true),
        };
        let launch = Launch {
            entry: ENTRY,
            grid,
            threads: traits.threads,
            smem: smem_bytes(spec),
            cluster: traits.cluster,
            takes_maps: uses_tma,
        };
        let has_work = grid > 0 && problem.lengths.total_q() > 0;
        let tensors = tensors(problem);
        let plan_bytes = if spec.reads.varied { work.bounds.bytes() } else { 0 };
        let rows = work.slots.saturating_mul(work.heads).saturating_mul(work.slot_rows);
        let workspace = Workspace::forward(ForwardParts {
            draws_tiles,
            plan: plan_bytes,
            rows,
            columns: problem.head_dim_v,
        })?;
        let mut steps = Vec::new();
        if has_work && spec.reads.varied {
            steps.push(plan_step());
        }
        if has_work {
            steps.push(Step::Launch(launch));
        }
        if has_work && rows > 0 {
            // A CTA a row at a time; of what a plan divides, the most rows that there can be.
            let rows = work.divided.saturating_mul(work.heads).saturating_mul(work.slot_rows);
            steps.push(Step::Launch(Launch {
                entry: COMBINE,
                grid: rows.min(COMBINE_CTAS * sms as usize) as u32,
                threads: COMBINE_THREADS,
                smem: COMBINE_SMEM,
                cluster: 1,
                takes_maps: false,
            }));
        }
        let maps = if has_work && uses_tma { maps(spec, &traits, problem, &tensors) } else { Vec::new() };
        Ok(Launches {
            tensors,
            extras: Extra::of(problem, false, plan_bytes),
            workspace,
            steps,
            params: Params::Forward(params),
            maps,
            plan_bytes,
        })
    }
}

/// CTAs of the combine kernel for each SM, at the most.
const COMBINE_CTAS: usize = 16;

/// How the work of a forward is divided.
struct Work {
    /// Bounds on a work plan's lists.
    bounds: PlanBounds,
    /// Tiles that an entry of the plan stands for, and CTAs that compute at once.
    heads: usize,
    ctas: usize,
    /// Parts of the keys of every row, or the most of them.
    splits: usize,
    /// Partial results of a head, and tiles that they belong to; 0 where no keys are divided.
    slots: usize,
    divided: usize,
    /// Rows of a tile that can exist.
    slot_rows: usize,
}

impl Work {
    fn of(spec: &KernelSpec, traits: &Traits, problem: &Problem, (arch, sms): (Arch, u32)) -> Work {
        let (group, heads) =
            if traits.packs_gqa { (problem.group_size(), problem.heads_kv) } else { (1, problem.heads_q) };
        let queries = traits.tile_queries(problem.group_size()).max(1);
        let max_q = problem.lengths.max_q();
        let ctas = sms as usize * traits.blocks_per_sm as usize;
        let mut work = Work {
            bounds: PlanBounds::default(),
            heads,
            ctas,
            splits: 1,
            slots: 0,
            divided: 0,
            slot_rows: max_q.min(queries) * group,
        };
        if spec.reads.varied {
            work.bounds = PlanBounds::forward(problem, traits, spec.split, (heads, ctas));
            (work.splits, work.slots, work.divided) =
                (work.bounds.slots.max(1), work.bounds.slots, work.bounds.split_items);
        } else if spec.split {
            let tiles = max_q.div_ceil(queries).saturating_mul(problem.lengths.sequences());
            work.splits = kv_splits(problem, spec, arch, sms);
            if work.splits > 1 {
                (work.slots, work.divided) = (tiles.saturating_mul(work.splits), tiles);
            }
        }
        work
    }
}

/// q, k, v and out.
fn tensors(problem: &Problem) -> Vec<Tensor> {
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, lengths, .. } = *problem;
    let queries = |name, dim| shape_of(name, lengths.q(), lengths.sequences(), heads_q, dim);
    let keys = |name, dim| shape_of(name, lengths.k(), lengths.sequences(), heads_kv, dim);
    vec![
        Tensor { shape: queries("q", head_dim), is_output: false },
        Tensor { shape: keys("k", head_dim), is_output: false },
        Tensor { shape: keys("v", head_dim_v), is_output: false },
        Tensor { shape: queries("out", head_dim_v), is_output: true },
    ]
}

/// The maps of Q, K and V: boxes of one panel's columns and one tile's rows, or one page's part of them. Of
/// rows that threads copy, half a tile's: boxes load those that follow one another.
fn maps(spec: &KernelSpec, traits: &Traits, problem: &Problem, tensors: &[Tensor]) -> Vec<MapTemplate> {
    let (tile_m, tile_n) = traits.tile;
    let (panel, panel_v) = (widest(spec.head_dim), widest(spec.head_dim_v));
    let group = traits.packs_gqa.then_some(problem.group_size() as u32);
    // Without keys K and V are not loaded and their addresses are unchecked, but a map needs valid memory:
    // use Q's.
    let no_keys = problem.lengths.max_k() == 0 || tensors[1].shape.is_empty();
    let (k, v) = if no_keys { (0, 0) } else { (1, 2) };
    // CTAs of a cluster load an equal share of each K and V tile.
    let mut share = tile_n / traits.cluster;
    if let Some(page) = problem.lengths.page() {
        share = if traits.gathers { tile_n / 2 } else { page_part(page, tile_n) as u32 };
    }
    let is_ragged = spec.reads.varied;
    vec![
        MapTemplate { name: "q", tensor: 0, panel, rows: tile_m, group, is_ragged },
        MapTemplate { name: "k", tensor: k, panel, rows: share, group: None, is_ragged },
        MapTemplate { name: "v", tensor: v, panel: panel_v, rows: share, group: None, is_ragged },
    ]
}

/// The parameters that the problem alone decides.
fn params(
    spec: &KernelSpec,
    traits: &Traits,
    problem: &Problem,
    work: &Work,
    (arch, sms): (Arch, u32),
) -> Result<FwdParams, Error> {
    let (_, tile_n) = traits.tile;
    let group = problem.group_size();
    let max_q = problem.lengths.max_q();
    let (rows, heads) = if traits.packs_gqa {
        (max_q.saturating_mul(group), problem.heads_kv)
    } else {
        (max_q, problem.heads_q)
    };
    let queries = traits.tile_queries(group).max(1);
    let m_blocks = max_q.div_ceil(queries).next_multiple_of(traits.cluster as usize);
    let all_heads = heads.saturating_mul(problem.lengths.sequences());
    let score = score_params(problem)?;
    count("query rows of a head", rows)?;
    let order = sections(traits, problem, (arch, sms), all_heads, m_blocks);
    let tiles = if spec.reads.varied {
        work.bounds.items.saturating_mul(heads)
    } else {
        m_blocks.saturating_mul(all_heads).saturating_mul(work.splits)
    };
    let longest = problem.lengths.max_k().div_ceil(tile_n as usize);
    let part = problem.lengths.page().map_or(0, |page| page_part(page, tile_n));
    Ok(FwdParams {
        shape: shape_params(problem)?,
        score,
        varlen: VarlenParams { page_part: count("keys of a box", part)?, ..varlen_params(&problem.lengths)? },
        split: SplitParams {
            splits: count("parts of the keys", work.splits)?,
            slot_rows: count("rows of a tile", work.slot_rows)?,
            ..SplitParams::default()
        },
        plan: if spec.reads.varied {
            work.bounds.params(work.heads, work.ctas, longest)?
        } else {
            PlanParams::default()
        },
        mods: mod_params(problem),
        m_blocks: count("tiles of a head", m_blocks)?,
        tile_queries: count("queries of a tile", queries)?,
        num_tiles: count("tiles", tiles)?,
        heads_per_section: count("heads", order.heads)?,
        sections: count("sections", order.sections)?,
        ..FwdParams::default()
    })
}

/// The sections of the kernel's tile order.
fn sections(
    traits: &Traits,
    problem: &Problem,
    (arch, sms): (Arch, u32),
    all_heads: usize,
    m_blocks: usize,
) -> Sections {
    match traits.tile_order {
        TileOrder::Natural => return Sections { heads: all_heads, sections: 0 },
        TileOrder::LongestFirst => {}
    }
    let row = (problem.head_dim + problem.head_dim_v) * problem.types.qkv.bytes();
    let head_bytes = (problem.lengths.max_k() as u64).saturating_mul(row as u64);
    let group = if traits.packs_gqa { 1 } else { problem.group_size() };
    let slots = sms as usize * traits.blocks_per_sm as usize;
    // A twelfth of the L2 measured best on an H100 (NB-008): each half of the L2 keeps a copy of what its SMs
    // read, and Q, O and the neighbouring sections pass through as well.
    let room = arch.limits().l2_bytes / 12;
    Sections::of(all_heads, group, m_blocks, head_bytes, slots, room)
}
