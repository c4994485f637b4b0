//! How long device memory takes, and those who combine the results of parts of the keys.

use fa_core::ArchLimits;

use crate::account::combine::{COMBINE_WARPS, shares_rows};

use super::constants::CostConstants;

/// How a kernel reads device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Memory {
    /// Its SMs do not always have all loads in flight that they could have.
    Throttled,
    /// Loads are always in flight, as in kernels of one warpgroup that wait for them: where device memory
    /// takes longest, hardly anything else is added to it.
    Fed {
        /// Times an SM's share that a CTA has in flight of what device memory's bandwidth asks for.
        in_flight: f64,
        /// Bytes of K and V that a step loads.
        step_bytes: f64,
        /// Whether the keys lie in pages.
        paged: bool,
        /// Whether a plan on the device divides the work, so that every SM has some.
        planned: bool,
        /// The share of the time that parts of whole steps add where steps are long.
        coarse: f64,
    },
}

/// The time that device memory takes with all in flight that it asks for, and the share by which it rises
/// where each CTA has an SM's share more or less than that: 3.11 TB/s by 64 KiB a CTA, 3.05 by 128, 2.98 by
/// 192 (NB-150).
const IN_FLIGHT: (f64, f64) = (0.974, 0.02);

/// The share of what is asked for that is in flight when only the latency limits the rate: 64 CTAs with 64
/// KiB each take 1.07 times as long as with 128, 48 take 1.19 and 32 take 1.58 (NB-164).
const LATENCY_SHARE: f64 = 0.375;

/// What idle SMs change in device memory's time, as a share of it, if all were idle: with as much in flight
/// in all, 64 CTAs of 132 read 3 % more in a second than 132 where each computes a whole tile, and 1.5 % more
/// in clusters; where a combine kernel alone adds up the parts, 3 % less (NB-164).
const IDLE_SMS: [f64; 3] = [-0.06, -0.03, 0.06];

/// Bytes of a step from which steps of whole tiles take longer where SMs are idle, and the share of device
/// memory's time that each KiB more adds if all are: 64 tiles of 128 columns take 88.8 us by 96 keys a step,
/// 89.5 by 112, 90.3 by 128, 92.4 by 160. Clusters of parts do not show it (NB-164).
const LARGE_STEP: (f64, f64) = (48.0 * 1024.0, 0.003);

/// The SMs' clocks as a share of the model's where loads are always in flight: 64 CTAs with tiles of 64x128
/// take no longer than 128 with 64x64 (NB-164).
const FED_COMPUTE: f64 = 0.6;

/// Bytes in a second that an SM reads at most whose neighbours are idle, of keys in one piece: 136 tiles of
/// 5,000 keys take 117 us on the 132 SMs of an H200 where 128 take 77; and of pages: a tile of 2,500 keys
/// among shorter ones takes 30 us (NB-224).
const ALONE: [f64; 2] = [64e9, 43e9];

impl Memory {
    /// The time that it takes with CTAs on the share `busy` of the SMs, as a multiple of what its efficiency
    /// says, with the keys of a tile in `parts` and `cluster` CTAs to a cluster.
    pub(super) fn time(self, busy: f64, (parts, cluster): (usize, usize)) -> f64 {
        let Memory::Fed { in_flight, step_bytes, planned, coarse, .. } = self else { return 1.0 };
        let busy = if planned { 1.0 } else { busy.min(1.0) };
        let in_flight = (in_flight * busy).max(1e-3);
        let waits = (1.0 + (LATENCY_SHARE / in_flight).powi(5)).powf(0.2);
        let beside = 1.0 + IN_FLIGHT.1 * (in_flight - 1.0).abs() / busy.max(1e-3);
        let [whole, in_clusters, by_kernel] = IDLE_SMS;
        let idle = match (parts, cluster) {
            (0..=1, _) => whole + LARGE_STEP.1 * (step_bytes - LARGE_STEP.0).max(0.0) / 1024.0,
            (_, 1) => by_kernel,
            _ => in_clusters,
        };
        IN_FLIGHT.0 * beside * waits * (1.0 + idle * (1.0 - busy) + coarse)
    }

    /// `seconds` that all bytes take together, or as long as the last tile takes, of `longest` steps: its SM
    /// reads no faster while others are idle. Of equal tiles that follow one another in `rounds` rounds it
    /// begins after those before it.
    pub(super) fn to_the_end(self, seconds: f64, rounds: Option<f64>, longest: f64) -> f64 {
        let Memory::Fed { step_bytes, paged, .. } = self else { return seconds };
        let alone = longest * step_bytes / ALONE[usize::from(paged)];
        let before = rounds.map_or(0.0, |rounds| (rounds.ceil() - 1.0).max(0.0) / rounds.max(1.0));
        seconds.max(before * seconds + alone)
    }

    /// The share of the SMs' clocks that counts.
    pub(super) fn of_compute(self) -> f64 {
        if matches!(self, Memory::Fed { planned: false, .. }) { FED_COMPUTE } else { 1.0 }
    }
}

/// Rows that a CTA of the combine kernel takes.
const COMBINE_ROWS: f64 = 4.0;

/// Seconds from the main kernel to the combine kernel and through its fixed part, in a stream or a graph.
const COMBINE_S: f64 = 2.5e-6;

/// Seconds of each further round in which the warps of a row read [`COMBINE_ROUND`] parts each, all at once
/// (NB-150, NB-154). What the bytes take is counted beside it.
const COMBINE_ROUND_S: f64 = 0.3e-6;
const COMBINE_ROUND: f64 = 4.0;

/// Seconds that a combine kernel of many rows takes more than one of few, and the rows from which it does:
/// 512 to 4,096 rows have a fixed part of 4.6 us (NB-166).
const COMBINE_MANY: (f64, f64) = (2.1e-6, 512.0);

/// Seconds in which the CTAs of a cluster wait for one another and combine their results (NB-164), and of
/// each row more that a warp combines: a tile of 128 rows takes 5 us more in clusters of 2, 3.6 in clusters
/// of 4 (NB-166).
const CLUSTER_S: f64 = 1.5e-6;
const CLUSTER_ROW_S: f64 = 0.75e-6;

/// Rows of a tile for each consumer warp.
const ROWS_OF_WARP: f64 = 16.0;

/// Share of the L2's rate at which partial results are read: each once, in pieces of a row (NB-140).
const COMBINE_RATE: f64 = 0.67;

/// Seconds of the kernel that adds up the partial results of `parts` CTAs for `rows` rows: each of its CTAs
/// reads `COMBINE_ROWS` rows of all parts, mostly from the L2.
pub(super) fn combine_seconds(
    rows: f64,
    head_dim_v: u32,
    parts: f64,
    clock: f64,
    limits: &ArchLimits,
    c: &CostConstants,
) -> f64 {
    let ctas = (rows / COMBINE_ROWS).ceil().max(1.0);
    let row_bytes = 4.0 * f64::from(head_dim_v) + 4.0;
    let busy = ctas.min(f64::from(limits.sms));
    let rate = (limits.l2_bytes_per_clock * c.l2_efficiency).min(busy * c.sm_bytes_per_clock) * clock;
    let warps = if shares_rows(rows.ceil() as usize, limits.sms as usize) { COMBINE_WARPS } else { 1 };
    let rounds = (parts / (warps as f64 * COMBINE_ROUND)).ceil().max(1.0);
    let many = COMBINE_MANY.0 * (rows / COMBINE_MANY.1).min(1.0);
    COMBINE_S + many + (rounds - 1.0) * COMBINE_ROUND_S + rows * parts * row_bytes / (rate * COMBINE_RATE)
}

/// Seconds in which the `cluster` CTAs of a cluster combine the parts of a tile of `tile_m` rows, `rows` of
/// them real.
pub(super) fn cluster_seconds(cluster: usize, tile_m: f64, rows: f64) -> f64 {
    if cluster <= 1 {
        return 0.0;
    }
    let warps = (cluster as f64 * tile_m / ROWS_OF_WARP).max(1.0);
    CLUSTER_S + ((rows / warps).ceil() - 1.0).max(0.0) * CLUSTER_ROW_S
}
