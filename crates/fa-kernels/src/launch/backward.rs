//! A backward kernel bound to a problem: what is computed once, and a call that checks, encodes and launches.
//!
//! Three launches on the caller's stream, and a fourth where several CTAs share a tile of dK and dV:
//! preprocess (row statistics, zeroed accumulators), the products, postprocess (dQ from its accumulators),
//! and the same for dK and dV. With sinks, one more: their gradient from the row statistics.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::CudaStream;
use fa_core::spec::{Scheduler, TileOrder, Traits};
use fa_core::{Arch, KernelSpec, Problem};
use fa_planner::account::panels::BwdPanels;
use fa_planner::account::{head_bytes, head_splits, heads_side_by_side, panels_of, storing_heads};

use crate::Error;
use crate::jit::params::{BwdParams, PlanParams};
use crate::jit::source::{
    DSINKS, DSINKS_THREADS, ENTRY, POSTPROCESS, POSTPROCESS_KV, PREPROCESS, PROCESS_THREADS,
};
use crate::launch::args::{BackwardArgs, Element, RawBackwardArgs, RawTensor};
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
use crate::launch::workspace::{Workspace, room};
use crate::smem_bytes;

/// A backward pass ready to run. Cheap to make from a loaded kernel, cheap to run; shared by threads.
#[derive(Debug)]
pub struct Backward {
    kernel: Arc<LoadedKernel>,
    problem: Problem,
    launches: Launches,
}

impl Backward {
    /// Binds `kernel` to `problem`.
    ///
    /// # Errors
    /// As [`Launches::backward`].
    pub fn new(kernel: Arc<LoadedKernel>, problem: &Problem) -> Result<Backward, Error> {
        let launches = Launches::backward(&kernel.spec, problem, kernel.arch, kernel.sms)?;
        Ok(Backward::of(kernel, problem, launches))
    }

    /// Binds `kernel` to `problem`, for which it makes `launches`.
    pub(crate) fn of(kernel: Arc<LoadedKernel>, problem: &Problem, launches: Launches) -> Backward {
        Backward { kernel, problem: *problem, launches }
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

    /// Bytes of workspace that a call needs. They need no initialisation.
    pub fn workspace_bytes(&self) -> usize {
        self.launches.workspace.bytes
    }

    /// Launches the kernels on `stream`. Allocates nothing and waits for nothing, so it can be captured in a
    /// CUDA graph (there, use one stream, or switch off cudarc's event tracking, whose events do not outlive
    /// a capture).
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; a stream or a tensor of another
    /// context; [`Error::Driver`].
    pub fn run<T: Element>(&self, stream: &CudaStream, args: BackwardArgs<'_, T>) -> Result<(), Error> {
        let BackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace, mut extras } = args;
        check_element::<T>(&self.problem)?;
        let buffers = [
            Buffer::of(&q.strides, q.data.len(), q.data.stream()),
            Buffer::of(&k.strides, k.data.len(), k.data.stream()),
            Buffer::of(&v.strides, v.data.len(), v.data.stream()),
            Buffer::of(&out.strides, out.data.len(), out.data.stream()),
            Buffer::of(&dout.strides, dout.data.len(), dout.data.stream()),
            Buffer::of(&dq.strides, dq.data.len(), dq.data.stream()),
            Buffer::of(&dk.strides, dk.data.len(), dk.data.stream()),
            Buffer::of(&dv.strides, dv.data.len(), dv.data.stream()),
        ];
        let lse_buffer = Some((lse.len(), lse.stream()));
        let workspace_buffer = Some((workspace.len(), workspace.stream()));
        check_buffers(&self.kernel, &self.launches, &buffers, lse_buffer, workspace_buffer)?;
        let (extras, _extras) = extras
            .raw(&self.launches.extras, stream, |name, of| self.kernel.check_context(name, of.context()))?;
        // Dropped after the launches, each guard notes in cudarc that the stream has used its tensor.
        let raw = |address, strides| RawTensor { address, strides };
        let (q_address, _q) = q.data.device_ptr(stream);
        let (k_address, _k) = k.data.device_ptr(stream);
        let (v_address, _v) = v.data.device_ptr(stream);
        let (out_address, _out) = out.data.device_ptr(stream);
        let (lse_address, _lse) = lse.device_ptr(stream);
        let (dout_address, _dout) = dout.data.device_ptr(stream);
        let (dq_address, _dq) = dq.data.device_ptr_mut(stream);
        let (dk_address, _dk) = dk.data.device_ptr_mut(stream);
        let (dv_address, _dv) = dv.data.device_ptr_mut(stream);
        let (workspace_address, _workspace) = workspace.device_ptr_mut(stream);
        let args = RawBackwardArgs {
            q: raw(q_address, q.strides),
            k: raw(k_address, k.strides),
            v: raw(v_address, v.strides),
            out: raw(out_address, out.strides),
            lse: lse_address,
            dout: raw(dout_address, dout.strides),
            dq: raw(dq_address, dq.strides),
            dk: raw(dk_address, dk.strides),
            dv: raw(dv_address, dv.strides),
            workspace: workspace_address,
            extras,
        };
        // SAFETY: the lengths cover the shapes under the strides, and the guards keep the memory until the
        // launches are in the stream.
        unsafe { self.run_raw(stream, &args) }
    }

    /// [`Backward::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the problem's shapes under the given strides, the LSE and
    /// [`Backward::workspace_bytes`] bytes of workspace lie in device memory that the stream's context can
    /// access, and stay there, untouched by others, until the stream has run the kernels. Gradients and
    /// workspace share no memory with one another and the inputs.
    ///
    /// # Errors
    /// As [`Backward::run`], except that lengths are the caller's responsibility.
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawBackwardArgs) -> Result<(), Error> {
        let tensors = [args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv];
        let at = Addresses {
            tensors: &tensors,
            lse: Some(args.lse),
            workspace: Some(args.workspace),
            extras: args.extras,
        };
        // SAFETY: the launches are of this kernel; the caller vouches for the memory.
        unsafe { enqueue(&self.kernel, &self.launches, self.problem.types.qkv, stream, &at) }
    }
}

impl Launches {
    /// The launches of a backward kernel of `spec` for `problem` on a GPU of `arch` with `sms` SMs.
    ///
    /// # Errors
    /// As [`Launches::of`]; [`Error::Mismatch`] for a forward.
    pub fn backward(spec: &KernelSpec, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
        problem.check()?;
        spec.serves(problem)?;
        check_code(spec)?;
        let traits = spec.traits();
        let Some(own) = spec.backward() else {
            let (kernel, problem) = ("the forward".into(), "the backward".into());
            return Err(Error::Mismatch { what: "pass", kernel, problem });
        };
        let deterministic = traits.pass.deterministic();
        let panels = panels_of(spec);
        // Without queries no launch would zero the accumulators of parts.
        let is_empty = problem.lengths.reach_q() == 0 || problem.lengths.reach_k() == 0;
        let splits = if is_empty { 1 } else { head_splits(problem, spec, arch, sms) };
        let params = params(spec, &traits, problem, (arch, sms), splits)?;
        let head_dims = (spec.head_dim, spec.head_dim_v);
        // Of several tiles of keys the others have to know when the first one's sums are stored.
        let several = spec.reads.varied || params.n_blocks > 1;
        let takes_turns = deterministic || (params.stores_dq != 0 && several);
        let turns = if takes_turns { own.dq_semaphores } else { 0 };
        let mut workspace =
            Workspace::backward(problem, head_dims, traits.tile, turns, deterministic, splits)?;
        let plan_bytes = if spec.reads.varied { PlanBounds::backward(problem, &traits).bytes() } else { 0 };
        workspace.add_plan(plan_bytes)?;
        let is_persistent = traits.scheduler != Scheduler::PerTile;
        if is_persistent {
            workspace.add_tile_counter()?;
        }
        let (m_tiles, n_tiles) = process_tiles(spec, &traits, problem)?;

        let process = |entry, grid| {
            Step::Launch(Launch {
                entry,
                grid,
                threads: PROCESS_THREADS,
                smem: 0,
                cluster: 1,
                takes_maps: false,
            })
        };
        let main = Step::Launch(Launch {
            entry: ENTRY,
            grid: if is_persistent { (params.num_tiles as u32).min(sms) } else { params.num_tiles as u32 },
            threads: traits.threads,
            smem: smem_bytes(spec),
            cluster: 1,
            takes_maps: panels.is_some(),
        });
        let mut steps = Vec::new();
        if spec.reads.varied && (m_tiles + n_tiles > 0 || problem.score.sinks) {
            steps.push(plan_step());
        }
        if m_tiles > 0 {
            steps.push(process(PREPROCESS, m_tiles));
        } else if let Some(counter) = workspace.tile_counter {
            // Without queries there is nothing to preprocess, but tiles of keys are drawn all the same.
            steps.push(Step::Clear(counter));
        }
        if n_tiles > 0 {
            steps.push(main);
        }
        if m_tiles > 0 {
            steps.push(process(POSTPROCESS, m_tiles));
        }
        if n_tiles > 0 && splits > 1 {
            steps.push(process(POSTPROCESS_KV, n_tiles));
        }
        if problem.score.sinks {
            steps.push(Step::Launch(Launch {
                entry: DSINKS,
                grid: params.shape.heads_q as u32,
                threads: DSINKS_THREADS,
                smem: DSINKS_THREADS / 32 * 4,
                cluster: 1,
                takes_maps: false,
            }));
        }
        let panels = panels.filter(|_| n_tiles > 0);
        let (tensors, is_ragged) = (tensors(problem), spec.reads.varied);
        let maps = panels.map_or_else(Vec::new, |panels| maps(traits.tile, &panels, &tensors, is_ragged));
        Ok(Launches {
            tensors,
            extras: Extra::of(problem, true, plan_bytes),
            workspace,
            steps,
            params: Params::Backward(params),
            maps,
            plan_bytes,
        })
    }
}

/// CTAs of a head that may run at once in a deterministic backward under a mask that moves with the keys. By
/// simulation 8 to 16 are alike (NB-055).
const TURNS_AT_ONCE: usize = 16;

/// q, k, v, out, dout, dq, dk and dv.
fn tensors(problem: &Problem) -> Vec<Tensor> {
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, lengths, .. } = *problem;
    let queries = |name, dim| shape_of(name, lengths.q(), lengths.sequences(), heads_q, dim);
    let keys = |name, dim| shape_of(name, lengths.k(), lengths.sequences(), heads_kv, dim);
    vec![
        Tensor { shape: queries("q", head_dim), is_output: false },
        Tensor { shape: keys("k", head_dim), is_output: false },
        Tensor { shape: keys("v", head_dim_v), is_output: false },
        Tensor { shape: queries("out", head_dim_v), is_output: false },
        Tensor { shape: queries("dout", head_dim_v), is_output: false },
        Tensor { shape: queries("dq", head_dim), is_output: true },
        Tensor { shape: keys("dk", head_dim), is_output: true },
        Tensor { shape: keys("dv", head_dim_v), is_output: true },
    ]
}

/// The maps of Q, K, V and dO: boxes of one panel's columns and one tile's rows.
fn maps(
    (tile_m, tile_n): (u32, u32),
    panels: &BwdPanels,
    tensors: &[Tensor],
    is_ragged: bool,
) -> Vec<MapTemplate> {
    let (k, v) = (1, 2);
    // Without queries Q and dO are not loaded and their addresses are unchecked, but a map needs valid
    // memory: use K's and V's.
    let (q, dout) = if tensors[0].shape.is_empty() { (k, v) } else { (0, 4) };
    let map = |name, tensor, panel, rows| MapTemplate { name, tensor, panel, rows, group: None, is_ragged };
    vec![
        map("q", q, panels.q, tile_m),
        map("k", k, panels.k, tile_n),
        map("v", v, panels.v, tile_n),
        map("dout", dout, panels.dout, tile_m),
    ]
}

/// Tiles of queries of all query heads and tiles of keys of all K/V heads; the most that there can be where
/// lengths are on the device.
///
/// # Errors
/// [`Error::TooLong`].
fn process_tiles(spec: &KernelSpec, traits: &Traits, problem: &Problem) -> Result<(u32, u32), Error> {
    let Problem { lengths, heads_q, heads_kv, .. } = problem;
    let (m_tiles, n_tiles) = if spec.reads.varied {
        // A sequence may be without rows: a bound on tiles is not one on rows.
        let bounds = PlanBounds::backward(problem, traits);
        let some = |tiles, rows| if rows == 0 { 0 } else { tiles };
        (some(bounds.m_tiles, lengths.reach_q()), some(bounds.n_tiles, lengths.reach_k()))
    } else {
        let tiles = |len: usize, tile: u32| len.div_ceil(tile as usize).saturating_mul(lengths.sequences());
        (tiles(lengths.max_q(), traits.tile.0), tiles(lengths.max_k(), traits.tile.1))
    };
    let m_tiles = count("tiles of queries", m_tiles.saturating_mul(*heads_q))?;
    let n_tiles = count("tiles of keys", n_tiles.saturating_mul(*heads_kv))?;
    Ok((m_tiles as u32, n_tiles as u32))
}

/// The parameters that the problem alone decides.
fn params(
    spec: &KernelSpec,
    traits: &Traits,
    problem: &Problem,
    (arch, sms): (Arch, u32),
    splits: usize,
) -> Result<BwdParams, Error> {
    let score = score_params(problem)?;
    let (tile_m, tile_n) = traits.tile;
    let lengths = &problem.lengths;
    let longest = lengths.max_q().div_ceil(tile_m as usize);
    // Of sequences whose lengths are on the device, the workspace has room for tiles, and the plan lists
    // those of all sequences.
    let (m_blocks, n_blocks, planned, sequences) = if spec.reads.varied {
        let tiles = |side, tile: u32| room(side, lengths.sequences(), tile as usize).1;
        let planned = PlanBounds::backward(problem, traits).n_tiles;
        (tiles(lengths.q(), tile_m), tiles(lengths.k(), tile_n), planned, 1)
    } else {
        let n_blocks = lengths.max_k().div_ceil(tile_n as usize);
        (longest, n_blocks, n_blocks, lengths.sequences())
    };
    let heads = problem.heads_kv.saturating_mul(sequences).saturating_mul(splits);
    // A head's queries, their gradients and dQ's accumulators, which all of its CTAs read or add to, stay in
    // the L2. On an H100 anything from a twentieth to a third of it measured the same.
    let heads_per_tile = problem.group_size().div_ceil(splits.max(1));
    let head_bytes = head_bytes(problem, heads_per_tile);
    let slots = sms as usize * traits.blocks_per_sm as usize;
    let room = arch.limits().l2_bytes / 8;
    let storing = storing_heads(spec, problem, arch, sms);
    let order = match traits.tile_order {
        _ if traits.pass.deterministic() => {
            let least = heads_side_by_side(problem, spec, sms, splits);
            if problem.mask.is_full() {
                Sections { heads: least, sections: heads.saturating_sub(1) / least }
            } else {
                let bytes = |heads: usize| head_bytes.saturating_mul(heads as u64);
                let room = room.min(bytes(slots.div_ceil(TURNS_AT_ONCE))).max(bytes(least));
                Sections::of(heads, 1, planned, head_bytes.max(1), slots, room)
            }
        }
        TileOrder::Natural if !spec.reads.varied => {
            let own = storing.unwrap_or(1);
            Sections { heads: own, sections: heads.saturating_sub(1) / own }
        }
        TileOrder::Natural | TileOrder::LongestFirst => {
            Sections::of(heads, 1, planned, head_bytes.max(1), slots, room)
        }
    };
    let plan = if spec.reads.varied {
        // Tiles of keys are sorted by the tiles of queries that see them.
        let heads = problem.heads_kv.saturating_mul(splits);
        PlanBounds::backward(problem, traits).params(heads, slots, longest)?
    } else {
        PlanParams::default()
    };
    Ok(BwdParams {
        plan,
        shape: shape_params(problem)?,
        score,
        varlen: varlen_params(&problem.lengths)?,
        mods: mod_params(problem),
        m_blocks: count("tiles of a head", m_blocks)?,
        n_blocks: count("tiles of a head", n_blocks)?,
        head_splits: count("head_splits", splits)?,
        num_tiles: count("tiles", planned.saturating_mul(heads))?,
        heads_per_section: count("heads", order.heads)?,
        sections: count("sections", order.sections)?,
        stores_dq: i32::from(storing.is_some()),
        ..BwdParams::default()
    })
}
