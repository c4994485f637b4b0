//! The time of the SM90 forward for wide heads: S by one warpgroup, its softmax, then P V by two.

use fa_core::{ArchLimits, KernelSpec, Problem, Sm90Wide};

use crate::account::pages::page_part;
use crate::cost::constants::CostConstants;
use crate::cost::core::{KernelModel, Launch, overlap};
use crate::cost::memory::Memory;
use crate::cost::scores::{f32_lanes, score_costs, softmax_clocks};
use crate::kernels::planned::Forward;
use crate::work::Queue;

/// The forward of `problem`, cut into the tiles of `kernel`.
pub(super) fn launch<'a>(
    kernel: &'a Sm90Wide,
    forward: &Forward<'a>,
) -> Launch<'a, impl Fn(f64) -> f64 + use<'a>> {
    let Forward { problem, spec, work, limits, constants } = *forward;
    let (model, step) = model(problem, spec, kernel, limits, constants);
    let step = move |_on_sm: f64| step;
    Launch { problem, tile: (kernel.tile_m, kernel.tile_n), work, model, step, limits, constants }
}

/// Clocks of TMA for a box, however small; four warps issue those of pages (NB-058).
const BOX_CLOCKS: f64 = 60.0;
const BOX_WARPS: f64 = 4.0;

/// The bytes that an SM must have in flight, as seconds of its share of the device memory's bandwidth
/// (NB-150).
const IN_FLIGHT_S: f64 = 2.6e-6;

/// Bytes of the rows of a key in shared memory: latent rows hold their values.
fn key_bytes(spec: &KernelSpec, k: &Sm90Wide) -> f64 {
    f64::from(k.key_columns(spec) * spec.elem_bytes())
}

/// The same in device memory.
fn stored_bytes(spec: &KernelSpec, k: &Sm90Wide) -> f64 {
    f64::from(k.key_columns(spec)) * spec.types.kv.bytes_per_number()
}

/// Codes of latents that the producer's warps load and convert in a clock, of which each step waits for as
/// many as a tile has: 183 and 355 us for 62 and 124 steps (NB-215).
const CODES_PER_CLOCK: f64 = 7.6;

/// The same of K and V apart, which half of the warps each convert: clocks of a tile, and codes in a further
/// clock. Tiles of 32 and 64 keys of 512 columns take 4,130 and 4,900 (NB-219).
const APART_TILE_CLOCKS: f64 = 3_400.0;
const APART_CODES_PER_CLOCK: f64 = 44.0;

/// Clocks that a step's tile takes from free buffers to numbers in them; 0 without codes.
fn conversion(spec: &KernelSpec, k: &Sm90Wide) -> f64 {
    let codes = f64::from(k.key_columns(spec) * k.tile_n);
    match (spec.reads_codes(), k.latent) {
        (false, _) => 0.0,
        (true, true) => codes / CODES_PER_CLOCK,
        (true, false) => APART_TILE_CLOCKS + codes / APART_CODES_PER_CLOCK,
    }
}

/// Where each key is read once, loads are in flight whenever a buffer is free.
fn memory(spec: &KernelSpec, k: &Sm90Wide, rows: usize, limits: &ArchLimits) -> Memory {
    if rows > k.tile_m as usize {
        return Memory::Throttled;
    }
    let step_bytes = f64::from(k.tile_n) * stored_bytes(spec, k);
    let enough = IN_FLIGHT_S * limits.hbm_bytes_per_s / f64::from(limits.sms);
    // A tile of latents waits for the next one before its P V.
    let loading = k.kv_stages - u32::from(k.latent && k.overlap);
    let in_flight = f64::from(loading) * step_bytes / enough;
    Memory::Fed { in_flight, step_bytes, paged: false, planned: spec.reads.varied, coarse: 0.0 }
}

/// How well the softmax hides under P V, which is half of the products: an exponent as in [`overlap`].
const SOFTMAX_OVERLAP: f64 = 4.0;

/// The kernel, and the clocks of a step, overlap and latency included.
fn model(
    problem: &Problem,
    spec: &KernelSpec,
    k: &Sm90Wide,
    limits: &ArchLimits,
    c: &CostConstants,
) -> (KernelModel, f64) {
    let [tile_m, tile_n] = [k.tile_m, k.tile_n].map(f64::from);
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let scores = tile_m * tile_n;
    let tensor = 2.0 * scores * (hd + hdv) / limits.tensor_flops / c.tensor_efficiency;
    // S reads Q and K, P V reads V, and one of its warpgroups P, which the other one writes; TMA writes keys.
    let bytes = f64::from(spec.elem_bytes());
    let keys = tile_n * key_bytes(spec, k);
    let traffic = ((tile_m + tile_n) * hd + tile_n * hdv + 2.0 * scores) * bytes + keys;
    let smem = traffic / limits.smem_bytes;

    let poly = f64::from(k.exp_poly_of_16) / 16.0;
    let lazy = k.rescale_threshold > 0;
    let (cap_mufu, cap_ops) = score_costs(spec.score, c);
    let rescale = hdv / tile_n * if lazy { c.rescale_left } else { 1.0 };
    let ops = c.sm90_softmax_ops[usize::from(lazy)] + rescale + poly * c.poly_ops + cap_ops;
    let exp = scores * softmax_clocks(limits, 1.0 - poly + cap_mufu, ops);

    let products = overlap([tensor, smem], 4.0);
    // Both tiles of latents are in use until P V is done, and the next S then waits for its tile.
    let refill = if k.latent && k.overlap && k.kv_stages == 2 { keys / c.sm_bytes_per_clock } else { 0.0 };
    let exposed = c.sm90_step + c.sm90_p_store + refill;
    let hidden = if k.overlap { overlap([products, exp], SOFTMAX_OVERLAP) } else { products + exp };
    let parts = problem
        .lengths
        .page()
        .filter(|_| !k.gather && !spec.reads_codes())
        .map(|page| k.tile_n as usize / page_part(page, k.tile_n));
    let panels = key_bytes(spec, k) / (64.0 * bytes);
    let copies = parts.map_or(0.0, |parts| panels * parts as f64 * BOX_CLOCKS / BOX_WARPS);
    let tiled = problem.heads_q / problem.heads_kv.max(1) / k.head_parts as usize;
    let rows = problem.lengths.mean_q() * if k.pack_gqa { tiled } else { 1 };
    let model = KernelModel {
        head_dim: spec.head_dim,
        head_dim_v: spec.head_dim_v,
        // Of latent rows the values are not loaded again.
        sharing: (hd + hdv) * bytes / key_bytes(spec, k),
        queue: Queue::of(false, k.tile_order),
        resident: 1.0,
        tensor,
        exp,
        smem,
        mask: scores * c.sm90_mask_ops / f32_lanes(limits),
        exposed,
        tile: c.sm90_block,
        second: 0.0,
        start: 0.0,
        // Q and the keys of the first step are asked for by all SMs at once.
        first: (tile_m * hd * bytes + keys) / c.sm90_first_bytes,
        rows: tile_m.min(rows as f64),
        in_clusters: false,
        memory: memory(spec, k, rows, limits),
    };
    let conversion = conversion(spec, k);
    let step = hidden + exposed;
    let step = match (k.kv_stages, spec.reads_codes() && !k.latent && !k.overlap) {
        // K is converted under P V, and V under S.
        (1, true) => step / 2.0 + conversion,
        // With a single tile nothing hides the conversion of the next.
        (1, false) => step + conversion,
        _ => step.max(conversion),
    };
    (model, step.max(copies))
}
