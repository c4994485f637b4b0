//! A forward kernel bound to a problem: what is computed once, and a call that only checks, encodes and launches.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Kernel, Problem, Strides, Traits};

use crate::Error;
use crate::jit::params::{ConstPtr, FwdParams, MutF32Ptr, MutPtr, MutU32Ptr, RowStrides};
use crate::launch::args::{Element, ForwardArgs, RawForwardArgs, RawTensor, Shape, check_address};
use crate::launch::module::LoadedKernel;
use crate::launch::sections::Sections;
use crate::launch::tma::{self, MapShape};

/// Lengths and counts that kernels hold in 32-bit integers stay below this, with room for a tile beyond the end.
const MAX_COUNT: usize = 1 << 30;

/// Bytes of workspace of a dynamic scheduler: the next tile, and how many blocks are through.
const COUNTER_BYTES: usize = 8;

/// LSE and counters are read and written word by word.
pub(crate) const WORD_BYTES: u64 = 4;

/// A forward pass ready to run. Cheap to make from a loaded kernel, cheap to run; shared by threads.
#[derive(Debug)]
pub struct Forward {
    kernel: Arc<LoadedKernel>,
    problem: Problem,
    /// All but addresses and strides.
    params: FwdParams,
    blocks: u32,
}

impl Forward {
    /// Binds `kernel` to `problem`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] when the kernel does not compute the problem, [`Error::TooLong`] for counts beyond 2^30 and
    /// [`Error::Scale`] and [`Error::Softcap`] for numbers that the kernels cannot use.
    pub fn new(kernel: Arc<LoadedKernel>, problem: &Problem) -> Result<Forward, Error> {
        problem.check()?;
        kernel.spec.serves(problem)?;
        if kernel.spec.kernel.is_backward() {
            let (kernel, problem) = ("the backward".into(), "the forward".into());
            return Err(Error::Mismatch { what: "pass", kernel, problem });
        }
        let params = params(&kernel, problem)?;
        let tiles = params.num_tiles as u32;
        let Traits { scheduler, cluster, .. } = kernel.spec.traits();
        let blocks = match scheduler {
            Scheduler::PerTile => tiles,
            Scheduler::Static | Scheduler::Dynamic => tiles.min(kernel.sms / cluster * cluster),
        };
        Ok(Forward { kernel, problem: *problem, params, blocks })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The kernel that computes it.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// Bytes of workspace that a call needs, often 0. Zero before the first call; each call leaves them zero.
    pub fn workspace_bytes(&self) -> usize {
        match self.kernel.spec.traits().scheduler {
            Scheduler::Dynamic => COUNTER_BYTES,
            Scheduler::PerTile | Scheduler::Static => 0,
        }
    }

    /// Launches the kernel on `stream`. Allocates nothing and waits for nothing, so it can be captured in a CUDA graph
    /// (there, use one stream, or switch off cudarc's event tracking, whose events do not outlive a capture).
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; a missing workspace; a stream or a tensor of another context;
    /// [`Error::Driver`].
    pub fn run<T: Element>(&self, stream: &CudaStream, args: ForwardArgs<'_, T>) -> Result<(), Error> {
        let ForwardArgs { q, k, v, out, lse, workspace } = args;
        if T::DTYPE != self.problem.dtype {
            return Err(Error::Mismatch {
                what: "dtype",
                kernel: self.problem.dtype.to_string(),
                problem: T::DTYPE.to_string(),
            });
        }
        let [shape_q, shape_k, shape_v, shape_out] = self.shapes();
        for (shape, strides, len, context, is_output) in [
            (shape_q, &q.strides, q.data.len(), q.data.stream().context(), false),
            (shape_k, &k.strides, k.data.len(), k.data.stream().context(), false),
            (shape_v, &v.strides, v.data.len(), v.data.stream().context(), false),
            (shape_out, &out.strides, out.data.len(), out.data.stream().context(), true),
        ] {
            shape.check_strides(strides, is_output)?;
            shape.check_len(strides, len)?;
            self.kernel.check_context(shape.name, context)?;
        }
        let enough = |tensor, have: usize, need: usize| {
            let error = Error::TooShort { tensor, have: have as u64, need: need as u64 };
            if have < need { Err(error) } else { Ok(()) }
        };
        if let Some(lse) = &lse {
            enough("lse", lse.len(), self.problem.batch * self.problem.heads_q * self.problem.seqlen_q)?;
            self.kernel.check_context("lse", lse.stream().context())?;
        }
        if let Some(workspace) = &workspace {
            enough("workspace", workspace.len(), self.workspace_bytes())?;
            self.kernel.check_context("workspace", workspace.stream().context())?;
        }
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
        };
        // SAFETY: the tensors' lengths were checked against shapes and strides, they stay borrowed until the launch is
        // enqueued, and cudarc orders the stream before any later use or release of them.
        unsafe { self.run_raw(stream, &args) }
    }

    /// [`Forward::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the problem's shapes under the given strides lies in device memory that the stream's context can
    /// access, and stays there, untouched by others, until the stream has run the kernel. Outputs share no memory with inputs. The
    /// workspace is zero.
    ///
    /// # Errors
    /// As [`Forward::run`], except that lengths are the caller's promise.
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawForwardArgs) -> Result<(), Error> {
        let shapes = self.shapes();
        let tensors = [args.q, args.k, args.v, args.out];
        for (index, (shape, tensor)) in shapes.iter().zip(&tensors).enumerate() {
            shape.check_strides(&tensor.strides, index == 3)?;
            shape.check_address(tensor.address)?;
        }
        if self.workspace_bytes() > 0 && args.workspace.is_none() {
            return Err(Error::NoWorkspace { need: self.workspace_bytes() });
        }
        if self.blocks == 0 {
            return Ok(());
        }
        for (name, address) in [("lse", args.lse), ("workspace", args.workspace)] {
            address.map_or(Ok(()), |address| check_address(name, address, WORD_BYTES))?;
        }
        self.kernel.enter(stream)?;
        let mut params = FwdParams {
            q: ConstPtr(args.q.address),
            k: ConstPtr(args.k.address),
            v: ConstPtr(args.v.address),
            out: MutPtr(args.out.address),
            lse: MutF32Ptr(args.lse.unwrap_or(0)),
            tile_counter: MutU32Ptr(args.workspace.unwrap_or(0)),
            q_strides: row_strides(&args.q.strides),
            k_strides: row_strides(&args.k.strides),
            v_strides: row_strides(&args.v.strides),
            out_strides: row_strides(&args.out.strides),
            ..self.params
        };
        let params = (&raw mut params).cast::<c_void>();
        match &self.kernel.spec.kernel {
            Kernel::Sm80Bwd(_) | Kernel::Sm90Bwd(_) => unreachable!("checked when the kernel was bound"),
            // SAFETY: this entry takes the parameters alone; the addresses are the caller's promise.
            Kernel::Sm80Fwd(_) => unsafe { self.kernel.launch(stream, self.blocks, &mut [params]) },
            Kernel::Sm90Fwd(_) => {
                let mut maps = self.tensor_maps(args)?;
                let [q, k, v] = maps.each_mut().map(|map| (&raw mut *map).cast::<c_void>());
                // SAFETY: this entry takes the parameters and three tensor maps.
                unsafe { self.kernel.launch(stream, self.blocks, &mut [params, q, k, v]) }
            }
        }
    }

    /// Shapes of q, k, v and out.
    fn shapes(&self) -> [Shape; 4] {
        let Problem { batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        [
            Shape { name: "q", batch, seqlen: seqlen_q, heads: heads_q, dim: head_dim },
            Shape { name: "k", batch, seqlen: seqlen_k, heads: heads_kv, dim: head_dim },
            Shape { name: "v", batch, seqlen: seqlen_k, heads: heads_kv, dim: head_dim_v },
            Shape { name: "out", batch, seqlen: seqlen_q, heads: heads_q, dim: head_dim_v },
        ]
    }

    /// The maps of Q, K and V: boxes of one panel's columns and one tile's rows.
    fn tensor_maps(&self, args: &RawForwardArgs) -> Result<[cudarc::driver::sys::CUtensorMap; 3], Error> {
        let spec = &self.kernel.spec;
        let (tile_m, tile_n) = spec.tile();
        let [q, k, v, _] = self.shapes();
        let dtype = self.problem.dtype;
        let group = self.problem.group_size() as u64;
        // Without keys nothing is loaded and nothing was asked of where they lie, but a map must be of some memory.
        let ((k, at_k), (v, at_v)) =
            if self.problem.seqlen_k == 0 { ((q, args.q), (q, args.q)) } else { ((k, args.k), (v, args.v)) };
        let q_map = if spec.traits().packs_gqa {
            let rows = map_shape(&q, &args.q.strides, tma::panel(spec.head_dim), 1);
            let (dim, seqlen, batch) = (rows.dims[0], rows.dims[1], rows.dims[3]);
            let (seq, head, entry) = (rows.strides[1], rows.strides[2], rows.strides[3]);
            let shape = MapShape {
                dims: [dim, group, seqlen, self.problem.heads_kv as u64, batch],
                strides: [1, head, seq, head * group, entry],
                tile: [rows.tile[0], group as u32, tile_m / group as u32, 1, 1],
            };
            tma::encode("q", dtype, args.q.address, &shape)?
        } else {
            tma::encode(
                "q",
                dtype,
                args.q.address,
                &map_shape(&q, &args.q.strides, tma::panel(spec.head_dim), tile_m),
            )?
        };
        // Blocks of a cluster load an equal share of each K and V tile.
        let share = tile_n / spec.traits().cluster;
        let k_shape = map_shape(&k, &at_k.strides, tma::panel(spec.head_dim), share);
        let v_shape = map_shape(&v, &at_v.strides, tma::panel(spec.head_dim_v), share);
        Ok([
            q_map,
            tma::encode("k", dtype, at_k.address, &k_shape)?,
            tma::encode("v", dtype, at_v.address, &v_shape)?,
        ])
    }
}

/// `{head dim, sequence, heads, batch}` with a box of one panel and `rows` positions.
pub(crate) fn map_shape(shape: &Shape, strides: &Strides, panel: u32, rows: u32) -> MapShape<4> {
    let Shape { batch, seqlen, heads, dim, .. } = *shape;
    // The strides have been checked to be 0 or more wherever they are stepped along.
    let stride = |stride: i64| stride.max(0) as u64;
    MapShape {
        dims: [dim as u64, seqlen.max(1) as u64, heads as u64, batch as u64],
        strides: [1, stride(strides.seq), stride(strides.head), stride(strides.batch)],
        tile: [panel, rows, 1, 1],
    }
}

pub(crate) fn row_strides(strides: &Strides) -> RowStrides {
    RowStrides { batch: strides.batch, seq: strides.seq, head: strides.head }
}

/// The parameters that the problem alone decides.
fn params(kernel: &LoadedKernel, problem: &Problem) -> Result<FwdParams, Error> {
    let spec = &kernel.spec;
    let packed = spec.traits().packs_gqa;
    let (tile_m, _) = spec.tile();
    let group = problem.group_size();
    let rows = if packed { problem.seqlen_q.saturating_mul(group) } else { problem.seqlen_q };
    let heads = if packed { problem.heads_kv } else { problem.heads_q };
    let m_blocks = rows.div_ceil(tile_m as usize).next_multiple_of(spec.traits().cluster as usize);
    let all_heads = heads.saturating_mul(problem.batch);
    let (scale, scale_log2) = usable_scale(problem)?;
    let order = sections(kernel, problem, packed, all_heads, m_blocks);
    Ok(FwdParams {
        batch: count("batch", problem.batch)?,
        heads_q: count("heads_q", problem.heads_q)?,
        heads_kv: count("heads_kv", problem.heads_kv)?,
        group_size: count("heads_q / heads_kv", group)?,
        seqlen_q: count("query rows of a head", rows).and(count("seqlen_q", problem.seqlen_q))?,
        seqlen_k: count("seqlen_k", problem.seqlen_k)?,
        head_dim: count("head_dim", problem.head_dim)?,
        head_dim_v: count("head_dim_v", problem.head_dim_v)?,
        window_left: side(problem.mask.left, problem.seqlen_k),
        window_right: side(problem.mask.right, problem.seqlen_q),
        scale,
        scale_log2,
        softcap: problem.softcap.unwrap_or(0.0) as f32,
        m_blocks: count("tiles of a head", m_blocks)?,
        num_tiles: count("tiles", m_blocks.saturating_mul(all_heads))?,
        heads_per_section: count("heads", order.heads)?,
        sections: count("sections", order.sections)?,
        ..FwdParams::default()
    })
}

/// The largest soft cap. Kernels compute `cap * (1 - 2 / (1 + e^x))`, which is off by some 2^-23 of the cap: beyond this one,
/// by more than f16 rounds weights.
const MAX_SOFTCAP: f64 = 1024.0;

/// The scale, and the scale times log2(e), as f32.
///
/// # Errors
/// [`Error::Scale`] when it is not positive or one of the two is no normal f32, [`Error::Softcap`] for a soft cap that
/// would spoil the scores.
pub(crate) fn usable_scale(problem: &Problem) -> Result<(f32, f32), Error> {
    let scale = problem.scale();
    let scale_log2 = scale * std::f64::consts::LOG2_E;
    let usable = |value: f64| value > 0.0 && (value as f32).is_normal();
    if !usable(scale) || !usable(scale_log2) {
        return Err(Error::Scale { scale });
    }
    if let Some(softcap) = problem.softcap
        && (softcap > MAX_SOFTCAP || !usable(softcap) || !usable(2.0 * scale_log2 / softcap))
    {
        return Err(Error::Softcap { softcap, scale, limit: MAX_SOFTCAP });
    }
    Ok((scale as f32, scale_log2 as f32))
}

/// The sections of the kernel's tile order.
fn sections(
    kernel: &LoadedKernel,
    problem: &Problem,
    packed: bool,
    all_heads: usize,
    m_blocks: usize,
) -> Sections {
    let Traits { tile_order, blocks_per_sm, .. } = kernel.spec.traits();
    if tile_order == TileOrder::Natural {
        return Sections { heads: all_heads, sections: 0 };
    }
    let row = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes();
    let head_bytes = (problem.seqlen_k as u64).saturating_mul(row as u64);
    let group = if packed { 1 } else { problem.group_size() };
    let places = kernel.sms as usize * blocks_per_sm as usize;
    // A twelfth of the L2 measured best on an H100: each of its halves keeps a copy of what its SMs read, and Q, O and the
    // neighbouring sections pass through as well.
    let room = kernel.arch.limits().l2_bytes / 12;
    Sections::of(all_heads, group, m_blocks, head_bytes, places, room)
}

pub(crate) fn count(name: &'static str, value: usize) -> Result<i32, Error> {
    if value <= MAX_COUNT {
        return Ok(value as i32);
    }
    Err(Error::TooLong { name, value, limit: MAX_COUNT })
}

/// A side of the window for the kernel: -1 for a side that hides no key of any query, so that no sum of a diagonal and a
/// side leaves 32 bits.
pub(crate) fn side(side: Option<u32>, len: usize) -> i32 {
    side.filter(|&side| (side as usize) < len).map_or(-1, |side| side as i32)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn scales_and_soft_caps_that_spoil_scores_are_refused() {
        let check = |softmax_scale, softcap| {
            let problem = Problem::square(1, 16, 1, 64, Mask::FULL, Dtype::F16);
            usable_scale(&Problem { softmax_scale, softcap, ..problem })
        };
        assert_eq!(check(None, None).unwrap().0, 0.125);
        for softcap in [1e-3, 30.0, MAX_SOFTCAP] {
            assert!(check(None, Some(softcap)).is_ok(), "{softcap}");
        }
        for softcap in [1e-39, MAX_SOFTCAP * 1.001, 1e300] {
            assert!(matches!(check(None, Some(softcap)), Err(Error::Softcap { .. })), "{softcap}");
        }
        assert!(matches!(check(Some(1e30), Some(1e-30)), Err(Error::Softcap { .. })));
        for scale in [0.0, -1.0, 1e-39, 1e39] {
            assert!(matches!(check(Some(scale), None), Err(Error::Scale { .. })), "{scale}");
        }
    }
}
