//! A backward kernel bound to a problem: what is computed once, and a call that only checks, encodes and launches.
//!
//! Three launches on the caller's stream, and a fourth where several blocks share a tile of dK and dV: the rows' statistics
//! and zeroed accumulators, the products, dQ from its accumulators, dK and dV from theirs.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result, sys::CUtensorMap};
use fa_core::spec::TileOrder;
use fa_core::{Kernel, KernelSpec, Problem, Sm90Bwd};
use fa_planner::HeadDims;
use fa_planner::account::panels::BwdPanels;
use fa_planner::cost::head_splits;

use crate::Error;
use crate::jit::params::{BwdParams, ConstF32Ptr, ConstPtr, MutF32Ptr, MutPtr, MutU32Ptr};
use crate::launch::args::{BackwardArgs, Element, RawBackwardArgs, RawTensor, Shape, check_address};
use crate::launch::forward::{WORD_BYTES, check_match, count, map_shape, row_strides, side, usable_scale};
use crate::launch::module::LoadedKernel;
use crate::launch::sections::Sections;
use crate::launch::tma;

/// Parts of the workspace start on multiples of this: the copy engine asks for 16, cache lines for 128.
const PART_ALIGN: usize = 256;

/// What the copy engine asks of the workspace's start.
const WORKSPACE_ALIGN: u64 = 16;

/// Places of the further entries in `source::BACKWARD_ENTRIES`.
const PREPARE: usize = 0;
const FINISH: usize = 1;
const FINISH_KV: usize = 2;

/// A backward pass ready to run. Cheap to make from a loaded kernel, cheap to run; shared by threads.
#[derive(Debug)]
pub struct Backward {
    kernel: Arc<LoadedKernel>,
    problem: Problem,
    /// All but addresses and strides.
    params: BwdParams,
    workspace: Workspace,
}

/// What the launches need to know of either backward kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Walk {
    tile_m: u32,
    tile_n: u32,
    tile_order: TileOrder,
    deterministic: bool,
    blocks_per_sm: usize,
}

impl Walk {
    /// `None` for a forward.
    fn of(spec: &KernelSpec) -> Option<Walk> {
        let (tile_m, tile_n) = spec.tile();
        let (tile_order, deterministic, blocks_per_sm) = match &spec.kernel {
            Kernel::Sm80Bwd(own) => (own.tile_order, own.deterministic, own.blocks_per_sm as usize),
            Kernel::Sm90Bwd(own) => (own.tile_order, own.deterministic, 1),
            Kernel::Sm80Fwd(_) | Kernel::Sm90Fwd(_) => return None,
        };
        Some(Walk { tile_m, tile_n, tile_order, deterministic, blocks_per_sm })
    }
}

/// Bytes from the start of the workspace to each part, and the whole. Parts that a kernel does without have no place.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Workspace {
    lse_log2: usize,
    dpsum: usize,
    dq_accum: usize,
    dkv_accum: Option<(usize, usize)>,
    turns: Option<(usize, usize)>,
    bytes: usize,
}

impl Workspace {
    fn of(problem: &Problem, head_dims: (usize, usize), kernel: &Walk, splits: usize) -> Option<Workspace> {
        let (tile_m, tile_n) = (kernel.tile_m as usize, kernel.tile_n as usize);
        let m_blocks = problem.seqlen_q.div_ceil(tile_m);
        let n_blocks = problem.seqlen_k.div_ceil(tile_n);
        let rows = problem.batch.checked_mul(problem.heads_q)?.checked_mul(m_blocks)?.checked_mul(tile_m)?;
        let keys = problem.batch.checked_mul(problem.heads_kv)?.checked_mul(n_blocks)?.checked_mul(tile_n)?;
        let mut end = 0usize;
        let mut part = |elements: usize| -> Option<usize> {
            let begin = end;
            end = begin.checked_add(elements.checked_mul(4)?)?.checked_next_multiple_of(PART_ALIGN)?;
            Some(begin)
        };
        let lse_log2 = part(rows)?;
        let dpsum = part(rows)?;
        let dq_accum = part(rows.checked_mul(head_dims.0)?)?;
        let dkv_accum = if splits > 1 {
            Some((part(keys.checked_mul(head_dims.0)?)?, part(keys.checked_mul(head_dims.1)?)?))
        } else {
            None
        };
        let turns = if kernel.deterministic { Some((part(rows / tile_m)?, part(1)?)) } else { None };
        Some(Workspace { lse_log2, dpsum, dq_accum, dkv_accum, turns, bytes: end })
    }
}

impl Backward {
    /// Binds `kernel` to `problem`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when the kernel does not compute the problem's gradients, [`Error::TooLong`] for counts beyond 2^30
    /// and [`Error::Scale`] for a scale that the kernels cannot use.
    pub fn new(kernel: Arc<LoadedKernel>, problem: &Problem) -> Result<Backward, Error> {
        problem.check()?;
        check_match(&kernel.spec, problem)?;
        let Some(own) = Walk::of(&kernel.spec) else {
            return Err(Error::Mismatch {
                what: "pass",
                kernel: "the forward".into(),
                problem: "the backward".into(),
            });
        };
        let splits = head_splits(problem, own.tile_n, own.deterministic, kernel.sms);
        let params = params(&kernel, &own, problem, splits)?;
        let head_dims = (kernel.spec.head_dim as usize, kernel.spec.head_dim_v as usize);
        let workspace = Workspace::of(problem, head_dims, &own, splits).ok_or(Error::TooLong {
            name: "bytes of workspace",
            value: usize::MAX,
            limit: isize::MAX as usize,
        })?;
        Ok(Backward { kernel, problem: *problem, params, workspace })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The kernel that computes it.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Bytes of workspace that a call needs. They need no initialisation.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes
    }

    /// Launches the kernels on `stream`. Allocates nothing and waits for nothing, so it can be captured in a CUDA graph
    /// (there, use one stream, or switch off cudarc's event tracking, whose events do not outlive a capture).
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; a stream or a tensor of another context; [`Error::Driver`].
    pub fn run<T: Element>(&self, stream: &CudaStream, args: BackwardArgs<'_, T>) -> Result<(), Error> {
        let BackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace } = args;
        if T::DTYPE != self.problem.dtype {
            return Err(Error::Mismatch {
                what: "dtype",
                kernel: self.problem.dtype.to_string(),
                problem: T::DTYPE.to_string(),
            });
        }
        let tensors = [
            (&q.strides, q.data.len(), q.data.stream()),
            (&k.strides, k.data.len(), k.data.stream()),
            (&v.strides, v.data.len(), v.data.stream()),
            (&out.strides, out.data.len(), out.data.stream()),
            (&dout.strides, dout.data.len(), dout.data.stream()),
            (&dq.strides, dq.data.len(), dq.data.stream()),
            (&dk.strides, dk.data.len(), dk.data.stream()),
            (&dv.strides, dv.data.len(), dv.data.stream()),
        ];
        for ((shape, is_output), (strides, len, own)) in self.shapes().iter().zip(tensors) {
            shape.check_strides(strides, *is_output)?;
            shape.check_len(strides, len)?;
            self.kernel.check_context(shape.name, own.context())?;
        }
        let rows = self.problem.batch * self.problem.heads_q * self.problem.seqlen_q;
        for (tensor, have, need, own) in [
            ("lse", lse.len(), rows, lse.stream()),
            ("workspace", workspace.len(), self.workspace_bytes(), workspace.stream()),
        ] {
            if have < need {
                return Err(Error::TooShort { tensor, have: have as u64, need: need as u64 });
            }
            self.kernel.check_context(tensor, own.context())?;
        }
        // Each guard tells cudarc, when it is dropped after the launches, that the stream has used its tensor.
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
        };
        // SAFETY: the lengths cover the shapes under the strides, and the guards keep the memory until the launches are
        // in the stream.
        unsafe { self.run_raw(stream, &args) }
    }

    /// [`Backward::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the problem's shapes under the given strides, the LSE and [`Backward::workspace_bytes`] bytes of
    /// workspace lie in device memory that the stream's context can access, and stay there, untouched by others, until the
    /// stream has run the kernels. Gradients and workspace share no memory with one another and the inputs.
    ///
    /// # Errors
    /// As [`Backward::run`], except that lengths are the caller's promise.
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawBackwardArgs) -> Result<(), Error> {
        let tensors = [args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv];
        for ((shape, is_output), tensor) in self.shapes().iter().zip(&tensors) {
            shape.check_strides(&tensor.strides, *is_output)?;
            shape.check_address(tensor.address)?;
        }
        let parts = &self.workspace;
        if parts.bytes > 0 {
            check_address("workspace", args.workspace, WORKSPACE_ALIGN)?;
        }
        if self.params.batch > 0 && self.params.seqlen_q > 0 {
            check_address("lse", args.lse, WORD_BYTES)?;
        }
        self.kernel.enter(stream)?;
        let part = |offset: usize| args.workspace + offset as u64;
        let float = |offset: Option<usize>| MutF32Ptr(offset.map_or(0, part));
        let word = |offset: Option<usize>| MutU32Ptr(offset.map_or(0, part));
        let mut params = BwdParams {
            q: ConstPtr(args.q.address),
            k: ConstPtr(args.k.address),
            v: ConstPtr(args.v.address),
            out: ConstPtr(args.out.address),
            dout: ConstPtr(args.dout.address),
            dq: MutPtr(args.dq.address),
            dk: MutPtr(args.dk.address),
            dv: MutPtr(args.dv.address),
            lse: ConstF32Ptr(args.lse),
            lse_log2: float(Some(parts.lse_log2)),
            dpsum: float(Some(parts.dpsum)),
            dq_accum: float(Some(parts.dq_accum)),
            dk_accum: float(parts.dkv_accum.map(|(dk, _)| dk)),
            dv_accum: float(parts.dkv_accum.map(|(_, dv)| dv)),
            dq_turns: word(parts.turns.map(|(turns, _)| turns)),
            tile_counter: word(parts.turns.map(|(_, counter)| counter)),
            q_strides: row_strides(&args.q.strides),
            k_strides: row_strides(&args.k.strides),
            v_strides: row_strides(&args.v.strides),
            out_strides: row_strides(&args.out.strides),
            dout_strides: row_strides(&args.dout.strides),
            dq_strides: row_strides(&args.dq.strides),
            dk_strides: row_strides(&args.dk.strides),
            dv_strides: row_strides(&args.dv.strides),
            ..self.params
        };
        let heads = |heads: i32, blocks: i32| (blocks * heads * self.params.batch) as u32;
        let m_tiles = heads(self.params.heads_q, self.params.m_blocks);
        let n_tiles = heads(self.params.heads_kv, self.params.n_blocks);
        let kernel = &self.kernel;
        let mut maps = match &kernel.spec.kernel {
            Kernel::Sm90Bwd(own) if n_tiles > 0 => Some(self.tensor_maps(own, args)?),
            _ => None,
        };
        let params = (&raw mut params).cast::<c_void>();
        // SAFETY: these entries take the parameters alone, the main one of SM90 four tensor maps as well; addresses are the caller's
        // promise, and the counter lies in the workspace.
        unsafe {
            if m_tiles > 0 {
                kernel.launch_further(stream, PREPARE, m_tiles, &mut [params])?;
            } else if let Some((_, counter)) = parts.turns {
                // Without queries nothing is prepared, but tiles of keys are drawn all the same.
                result::memset_d8_async(part(counter), 0, 4, stream.cu_stream())
                    .map_err(|source| Error::Driver { doing: "clearing the counter of tiles", source })?;
            }
            if let Some(maps) = &mut maps {
                let [q, k, v, dout] = maps.each_mut().map(|map| (&raw mut *map).cast::<c_void>());
                kernel.launch(stream, self.params.num_tiles as u32, &mut [params, q, k, v, dout])?;
            } else if n_tiles > 0 {
                kernel.launch(stream, self.params.num_tiles as u32, &mut [params])?;
            }
            if m_tiles > 0 {
                kernel.launch_further(stream, FINISH, m_tiles, &mut [params])?;
            }
            if n_tiles > 0 && self.params.head_splits > 1 {
                kernel.launch_further(stream, FINISH_KV, n_tiles, &mut [params])?;
            }
        }
        Ok(())
    }

    /// Shapes of q, k, v, out, dout, dq, dk and dv, and whether each is written.
    fn shapes(&self) -> [(Shape, bool); 8] {
        let Problem { batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        let queries = |name, dim| Shape { name, batch, seqlen: seqlen_q, heads: heads_q, dim };
        let keys = |name, dim| Shape { name, batch, seqlen: seqlen_k, heads: heads_kv, dim };
        [
            (queries("q", head_dim), false),
            (keys("k", head_dim), false),
            (keys("v", head_dim_v), false),
            (queries("out", head_dim_v), false),
            (queries("dout", head_dim_v), false),
            (queries("dq", head_dim), true),
            (keys("dk", head_dim), true),
            (keys("dv", head_dim_v), true),
        ]
    }

    /// The maps of Q, K, V and dO: boxes of one panel's columns and one tile's rows.
    fn tensor_maps(&self, own: &Sm90Bwd, args: &RawBackwardArgs) -> Result<[CUtensorMap; 4], Error> {
        let spec = &self.kernel.spec;
        let dtype = self.problem.dtype;
        let [q, k, v, _, dout, ..] = self.shapes().map(|(shape, _)| shape);
        let (k, v) = ((k, args.k), (v, args.v));
        // Without queries nothing of them is loaded and nothing was asked of where they lie, but a map must be of some memory.
        let (q, dout) = if self.problem.seqlen_q == 0 { (k, v) } else { ((q, args.q), (dout, args.dout)) };
        let dims = HeadDims { head_dim: spec.head_dim, head_dim_v: spec.head_dim_v };
        let panels = BwdPanels::of(dims, own);
        let map = |name, (shape, tensor): (Shape, RawTensor), panel, rows| {
            tma::encode(name, dtype, tensor.address, &map_shape(&shape, &tensor.strides, panel, rows))
        };
        Ok([
            map("q", q, panels.q, own.tile_m)?,
            map("k", k, panels.k, own.tile_n)?,
            map("v", v, panels.v, own.tile_n)?,
            map("dout", dout, panels.dout, own.tile_m)?,
        ])
    }
}

/// The parameters that the problem alone decides.
fn params(kernel: &LoadedKernel, own: &Walk, problem: &Problem, splits: usize) -> Result<BwdParams, Error> {
    let (scale, scale_log2) = usable_scale(problem)?;
    let m_blocks = problem.seqlen_q.div_ceil(own.tile_m as usize);
    let n_blocks = problem.seqlen_k.div_ceil(own.tile_n as usize);
    let heads = problem.heads_kv.saturating_mul(problem.batch).saturating_mul(splits);
    let m_tiles = m_blocks.saturating_mul(problem.heads_q).saturating_mul(problem.batch);
    count("tiles of queries", m_tiles)?;
    // A head's queries, their gradients and dQ's accumulators, which all of its blocks read or add to, stay in the L2. From a
    // twentieth to a third of it measured alike on an H100.
    let row = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes() + problem.head_dim * 4;
    let walks = problem.group_size().div_ceil(splits.max(1));
    let head_bytes = (problem.seqlen_q as u64).saturating_mul(row as u64).saturating_mul(walks as u64).max(1);
    let places = kernel.sms as usize * own.blocks_per_sm;
    let room = kernel.arch.limits().l2_bytes / 8;
    let order = match own.tile_order {
        TileOrder::LongestFirst => Sections::of(heads, 1, n_blocks, head_bytes, places, room),
        TileOrder::Natural => Sections { heads, sections: 0 },
    };
    Ok(BwdParams {
        batch: count("batch", problem.batch)?,
        heads_q: count("heads_q", problem.heads_q)?,
        heads_kv: count("heads_kv", problem.heads_kv)?,
        group_size: count("heads_q / heads_kv", problem.group_size())?,
        seqlen_q: count("seqlen_q", problem.seqlen_q)?,
        seqlen_k: count("seqlen_k", problem.seqlen_k)?,
        head_dim: count("head_dim", problem.head_dim)?,
        head_dim_v: count("head_dim_v", problem.head_dim_v)?,
        window_left: side(problem.mask.left, problem.seqlen_k),
        window_right: side(problem.mask.right, problem.seqlen_q),
        scale,
        scale_log2,
        softcap: problem.softcap.unwrap_or(0.0) as f32,
        m_blocks: count("tiles of a head", m_blocks)?,
        n_blocks: count("tiles of a head", n_blocks)?,
        head_splits: count("head_splits", splits)?,
        num_tiles: count("tiles", n_blocks.saturating_mul(heads))?,
        heads_per_section: count("heads", order.heads)?,
        sections: count("sections", order.sections)?,
        ..BwdParams::default()
    })
}

#[cfg(test)]
mod tests {
    use fa_core::Pass;
    use fa_core::{Arch, Dtype, Mask};
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    fn best(problem: &Problem, deterministic: bool) -> Walk {
        let options = PlanOptions { pass: Pass::Backward { deterministic }, ..PlanOptions::default() };
        let spec = plan(problem, Arch::Sm90, &options).expect("plans").swap_remove(0).spec;
        Walk::of(&spec).expect("a backward")
    }

    #[test]
    fn the_workspace_holds_the_parts_that_the_kernel_needs() {
        let problem = Problem { heads_kv: 2, ..Problem::square(3, 1000, 8, 128, Mask::CAUSAL, Dtype::Bf16) };
        for deterministic in [false, true] {
            let kernel = best(&problem, deterministic);
            for splits in [1, 4] {
                let (tile_m, tile_n) = (kernel.tile_m as usize, kernel.tile_n as usize);
                let parts = Workspace::of(&problem, (128, 128), &kernel, splits).expect("it is small");
                let rows = 3 * 8 * 1000usize.next_multiple_of(tile_m);
                let keys = 3 * 2 * 1000usize.next_multiple_of(tile_n);
                let part = |elements: usize| (elements * 4).next_multiple_of(256);
                let mut bytes = 2 * part(rows) + part(rows * 128);
                bytes += if splits > 1 { 2 * part(keys * 128) } else { 0 };
                bytes += if deterministic { part(rows / tile_m) + part(1) } else { 0 };
                assert_eq!(parts.bytes, bytes);
                assert_eq!((parts.lse_log2, parts.dpsum), (0, part(rows)));
                assert_eq!((parts.dkv_accum.is_some(), parts.turns.is_some()), (splits > 1, deterministic));
            }
        }
    }

    #[test]
    fn a_workspace_beyond_the_address_space_is_none() {
        let problem = Problem::square(1 << 40, 1 << 30, 64, 128, Mask::FULL, Dtype::Bf16);
        let kernel = best(&Problem { batch: 1, ..problem }, false);
        assert_eq!(Workspace::of(&problem, (128, 128), &kernel, 1), None);
    }
}
