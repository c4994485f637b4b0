//! Masks and changes of scores of the caller's own: the arrays and scalars that a call brings, and the map of
//! tiles that the kernels of a mask make.

use fa_core::program::{Axis, Deps, Node, Program, Var};
use fa_core::{Arch, KernelSpec, Problem};

use crate::Error;
use crate::jit::array_gradients::{ARRAY_TILE, ArrayGradient, array_gradient_smem};
use crate::jit::entries::{
    ARRAY_GRADIENT_THREADS, ARRAY_GRADIENTS, MASK_BITS, ORDER, ORDER_THREADS, mask_bits_threads, orders_lists,
};
use crate::jit::program_params::BlockMapParams;
use crate::launch::checks::count;
use crate::launch::launches::Launch;
use crate::launch::varied::PlanBounds;

/// Tiles of keys, and of queries, that a map's entries can name (`BlockEntry` of attn/block_list.cuh).
const MOST_TILES: usize = 1 << 15;

/// The launch for a problem: a CTA for each tile that the array may have. Fills in `lengths`.
///
/// # Errors
/// [`Error::TooLong`], and [`Error::NoCode`] for head dims whose tiles do not fit the GPU.
pub(crate) fn array_gradient(
    gradient: &mut ArrayGradient,
    spec: &KernelSpec,
    problem: &Problem,
    arch: Arch,
) -> Result<Launch, Error> {
    let (q, k) = (problem.lengths.max_q(), problem.lengths.max_k());
    let sequences = problem.lengths.sequences();
    let mut ctas = 1usize;
    gradient.lengths.clear();
    for axis in &gradient.axes {
        let (len, tiles) = match axis {
            Axis::Batch => (sequences, sequences),
            Axis::Head => (problem.heads_q, problem.heads_q),
            Axis::HeadKv => (problem.heads_kv, problem.heads_kv),
            Axis::Query => (q, q.div_ceil(ARRAY_TILE)),
            Axis::Key => (k, k.div_ceil(ARRAY_TILE)),
            Axis::Tile | Axis::Diagonal | Axis::Other => (1, 1),
        };
        gradient.lengths.push(len);
        ctas = ctas.saturating_mul(tiles.max(1));
    }
    let smem = array_gradient_smem(spec);
    if u64::from(smem) > u64::from(arch.limits().smem_per_block) {
        let what = "gradients of arrays at these head dims on this GPU";
        return Err(Error::NoCode { kernel: spec.kernel.name(), what });
    }
    let grid = count("tiles of an array's gradient", ctas)? as u32;
    Ok(Launch::plain(ARRAY_GRADIENTS[gradient.index], grid, ARRAY_GRADIENT_THREADS, smem))
}

/// The map of a mask's tiles, and the bytes of its lists and of its states.
pub(crate) struct BlockMap {
    pub params: BlockMapParams,
    /// Of the lists, and of the bits behind them.
    pub list_bytes: usize,
    /// Of the tiles' states, and of the order of the tiles of keys behind them.
    pub tile_bytes: usize,
    /// CTAs that find the states, and tiles of keys whose queries are listed.
    pub rows: u32,
    pub columns: u32,
    /// The launch that orders the tiles of keys, of a backward that draws them so.
    pub order: Option<Launch>,
    /// The launch that evaluates the mask's pairs, of a kernel that reads them as bits.
    pub bits: Option<Launch>,
}

/// Bytes of bits that a map may have, and tiles of a list that have some whatever that takes.
const MOST_BITS: usize = 64 << 20;
const LEAST_KEPT: usize = 8;

/// CTAs that share the tiles of a list.
const BITS_CTAS: usize = 8;

impl BlockMap {
    /// The map of a kernel of `spec` for `problem`; `None` for a kernel without a mask of its own.
    ///
    /// # Errors
    /// [`Error::TooLong`].
    pub(crate) fn of(spec: &KernelSpec, problem: &Problem) -> Result<Option<BlockMap>, Error> {
        let Some(program) = spec.score.program.filter(|_| spec.score.masks()) else { return Ok(None) };
        let traits = spec.traits();
        let (group, lengths) = (problem.group_size(), &problem.lengths);
        let queries = traits.tile_queries(group).max(1);
        let rows = lengths.max_q().div_ceil(queries);
        let columns = lengths.max_k().div_ceil(traits.tile.1 as usize);
        for (name, value) in [("tiles of queries of a program's mask", rows), ("tiles of its keys", columns)]
        {
            if value > MOST_TILES {
                return Err(Error::TooLong { name, value, limit: MOST_TILES });
            }
        }
        let (by_batch, by_head) = mask_axes(&program);
        let batches = if by_batch || spec.reads.varied { lengths.sequences() } else { 1 };
        let is_shared = spec.kernel.is_backward() || traits.packs_gqa;
        let (heads, head_group) = match (by_head, is_shared) {
            (false, _) => (1, 1),
            (true, true) => (problem.heads_kv, group),
            (true, false) => (problem.heads_q, 1),
        };
        let slots = batches.saturating_mul(heads);
        let [outer, inner] = if spec.kernel.is_backward() { [columns, rows] } else { [rows, columns] };
        let words = |each: usize| slots.saturating_mul(each).saturating_mul(4);
        let lists = slots.saturating_mul(outer);
        let mut list_bytes = words(outer.saturating_mul(inner + 1));
        let (mut kept, mut bits) = (0, None);
        if let Some(threads) = mask_bits_threads(spec) {
            let scores = (traits.tile.0 as usize * traits.tile.1 as usize).div_ceil(threads as usize);
            let bytes = 4 * scores.div_ceil(32) * threads as usize;
            // Heads of a group may differ, whose tiles a backward lists together.
            if !(spec.kernel.is_backward() && head_group > 1) {
                kept = (MOST_BITS / lists.saturating_mul(bytes).max(1)).max(LEAST_KEPT).min(inner);
            }
            let entries = 4 * (1 + inner).next_multiple_of(32);
            list_bytes = lists.saturating_mul(entries.saturating_add(kept.saturating_mul(bytes)));
            if kept > 0 {
                let ctas = lists.saturating_mul(BITS_CTAS.min(kept));
                let ctas = count("tiles of a program's mask", ctas)?;
                bits = Some(Launch::plain(MASK_BITS, ctas as u32, threads, 0));
            }
        }
        let mut tile_bytes = if spec.kernel.is_backward() { words(rows.saturating_mul(columns)) } else { 0 };
        let mut order = None;
        if orders_lists(spec) {
            // With lengths on the device the tiles of all sequences have an order for each head.
            let (orders, tiles) = if spec.reads.varied {
                (heads, PlanBounds::backward(problem, &traits).n_tiles)
            } else {
                (slots, columns)
            };
            tile_bytes = tile_bytes.saturating_add(orders.saturating_mul(tiles).saturating_mul(4));
            let warps = orders.saturating_mul(tiles.div_ceil(32));
            let ctas = warps.saturating_mul(32).div_ceil(ORDER_THREADS as usize);
            let ctas = count("tiles of a program's mask", ctas)? as u32;
            order = Some(Launch::plain(ORDER, ctas, ORDER_THREADS, 0));
        }
        let ctas = |tiles: usize| count("tiles of a program's mask", slots.saturating_mul(tiles));
        Ok(Some(BlockMap {
            params: BlockMapParams {
                rows: count("tiles", rows)?,
                columns: count("tiles", columns)?,
                batches: count("batch", batches)?,
                heads: count("heads", heads)?,
                head_group: count("heads", head_group)?,
                kept: count("tiles", kept)?,
                ..BlockMapParams::default()
            },
            list_bytes,
            tile_bytes,
            rows: ctas(rows)? as u32,
            columns: ctas(columns)? as u32,
            order,
            bits,
        }))
    }
}

/// Whether a program's mask differs between sequences of one length, and between heads.
fn mask_axes(program: &Program) -> (bool, bool) {
    let deps = program.mask().map_or(Deps::NONE, |mask| program.deps(mask));
    let names_sequence = program.own().any(|(_, node)| node == Node::Var(Var::B));
    (deps.has(Deps::BATCH) && names_sequence, deps.has(Deps::HEAD))
}
