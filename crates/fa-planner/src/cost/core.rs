//! The part of the model that all kernels share: the resources that a step keeps busy, and how steps add up
//! to a launch.

use fa_core::program::{Binary, Deps, Node, Unary};
use fa_core::{ArchLimits, Pass, Problem, ScoreKind};
use serde::Serialize;

use crate::account::clusters::cluster_of;
use crate::account::combine::{COMBINE_WARPS, shares_rows};
use crate::work::{Queue, TileClass, Work};

use super::constants::CostConstants;

/// Predicted time of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Seconds per launch.
    pub seconds: f64,
    /// Rate in 10^12 operations per second, by the field's count ([`Problem::flops_forward`],
    /// [`Problem::flops_backward`]).
    pub tflops: f64,
    /// Compulsory bytes a second ([`Problem::bytes`]): the rate that counts where few operations are done for
    /// each byte, as in decode.
    pub bytes_per_s: f64,
    /// The largest of `terms`.
    pub bottleneck: Bottleneck,
    /// Where the time goes.
    pub terms: Terms,
    /// Query tiles over all heads and sequences; with splits, their parts.
    pub tiles: f64,
    /// Tiles that the GPU works on at once.
    pub slots: f64,
    /// Steps over all tiles.
    pub steps: f64,
    /// Steps that test a mask.
    pub masked_steps: f64,
    /// CTAs that share the keys of a tile's rows: the most, where lengths are on the device.
    pub splits: usize,
    /// A step on one SM.
    pub step: StepClocks,
}

/// Clocks of a step on one SM: those in which each of its resident CTAs makes one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepClocks {
    /// CTAs on the SM.
    pub resident: f64,
    /// The tensor cores are busy for so long.
    pub tensor: f64,
    /// The softmax pipes.
    pub exp: f64,
    /// Shared memory.
    pub smem: f64,
    /// What nothing hides: barriers, shuffles, waits.
    pub exposed: f64,
    /// The step, with the overlap that was calibrated.
    pub total: f64,
}

/// Seconds that each resource alone would take with all SMs equally busy. They overlap and do not add up to
/// the total.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Terms {
    /// Matrix products, at the rate that the power limit sustains.
    pub tensor: f64,
    /// Softmax: exponentials and the f32 instructions around them.
    pub exp: f64,
    /// Shared-memory traffic.
    pub smem: f64,
    /// L2 to SM traffic.
    pub l2: f64,
    /// Device-memory traffic.
    pub hbm: f64,
    /// Idle SMs: a partial last wave, tiles of unequal length, fewer tiles than SMs.
    pub waves: f64,
    /// Launch, and the clocks of tiles and steps that nothing hides.
    pub latency: f64,
}

/// What a kernel waits for most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bottleneck {
    /// Matrix products.
    Tensor,
    /// Exponentials and the rest of softmax.
    Exp,
    /// Shared-memory bandwidth.
    Smem,
    /// L2 bandwidth.
    L2,
    /// Device-memory bandwidth.
    Hbm,
    /// Idle SMs.
    Waves,
    /// Launch and the latency of dependent steps.
    Latency,
}

impl Bottleneck {
    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Bottleneck::Tensor => "tensor",
            Bottleneck::Exp => "exp",
            Bottleneck::Smem => "smem",
            Bottleneck::L2 => "l2",
            Bottleneck::Hbm => "hbm",
            Bottleneck::Waves => "waves",
            Bottleneck::Latency => "latency",
        }
    }
}

impl Cost {
    /// The cost of what cannot be computed.
    pub const NEVER: Cost = Cost {
        seconds: f64::INFINITY,
        tflops: 0.0,
        bytes_per_s: 0.0,
        bottleneck: Bottleneck::Latency,
        terms: Terms {
            tensor: 0.0,
            exp: 0.0,
            smem: 0.0,
            l2: 0.0,
            hbm: 0.0,
            waves: 0.0,
            latency: f64::INFINITY,
        },
        tiles: 0.0,
        slots: 0.0,
        steps: 0.0,
        masked_steps: 0.0,
        splits: 1,
        step: StepClocks { resident: 0.0, tensor: 0.0, exp: 0.0, smem: 0.0, exposed: 0.0, total: 0.0 },
    };

    /// The cost of a pass that takes `seconds` on `slots` tiles at once, whose keys `splits` CTAs share.
    pub(crate) fn of(
        problem: &Problem,
        pass: Pass,
        (work, splits): (&Work, usize),
        seconds: f64,
        terms: Terms,
        slots: f64,
        step: StepClocks,
    ) -> Cost {
        Cost {
            seconds,
            tflops: problem.flops(pass) / seconds / 1e12,
            bytes_per_s: problem.bytes(pass) / seconds,
            bottleneck: terms.largest(),
            terms,
            tiles: work.tiles,
            slots,
            steps: work.steps(),
            masked_steps: work.masked(),
            splits,
            step,
        }
    }
}

impl Terms {
    /// Every term with the bottleneck that it stands for.
    pub const fn named(&self) -> [(Bottleneck, f64); 7] {
        [
            (Bottleneck::Tensor, self.tensor),
            (Bottleneck::Exp, self.exp),
            (Bottleneck::Smem, self.smem),
            (Bottleneck::L2, self.l2),
            (Bottleneck::Hbm, self.hbm),
            (Bottleneck::Waves, self.waves),
            (Bottleneck::Latency, self.latency),
        ]
    }

    fn largest(&self) -> Bottleneck {
        let named = self.named();
        named.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bottleneck::Latency, |(name, _)| name)
    }
}

/// A kernel as the schedule sees it: how its tiles are cut, and the clocks of a step on one SM.
///
/// Clocks are for the tiles of all resident CTAs together: `resident` CTAs make a step each in `step` clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelModel {
    /// Extents that the tiles are padded to.
    pub head_dim: u32,
    pub head_dim_v: u32,
    /// CTAs that share one copy of K and V from L2 (multicast).
    pub sharing: f64,
    pub queue: Queue,
    /// CTAs on an SM.
    pub resident: f64,
    pub tensor: f64,
    pub exp: f64,
    pub smem: f64,
    /// Further clocks of a step that tests a mask.
    pub mask: f64,
    /// Of `step`, what nothing hides.
    pub exposed: f64,
    /// Clocks of a tile outside its steps.
    pub tile: f64,
    /// Further clocks of a tile that has a second step.
    pub second: f64,
    /// Clocks once, before the first tile.
    pub start: f64,
    /// Clocks until a launch's first operands are there, under which no SM computes.
    pub first: f64,
    /// Query rows of a tile that exist, of `tile_m`: what partial results are made of.
    pub rows: f64,
    /// Whether CTAs that share a tile's keys may combine in a cluster.
    pub in_clusters: bool,
    pub memory: Memory,
}

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

impl Memory {
    /// The time that it takes with CTAs on the share `busy` of the SMs, as a multiple of what its efficiency
    /// says, with the keys of a tile in `parts` and `cluster` CTAs to a cluster.
    fn time(self, busy: f64, (parts, cluster): (usize, usize)) -> f64 {
        let Memory::Fed { in_flight, step_bytes, planned, coarse } = self else { return 1.0 };
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

    /// The share of the SMs' clocks that counts.
    fn of_compute(self) -> f64 {
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

/// Bytes per clock at which an SM stores partial results, 32 in a row (NB-140).
const PARTIAL_BYTES_PER_CLOCK: f64 = 32.0;

/// Seconds of the kernel that adds up the partial results of `parts` CTAs for `rows` rows: each of its CTAs
/// reads `COMBINE_ROWS` rows of all parts, mostly from the L2.
fn combine_seconds(
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

/// CTAs that are resident on an SM when the tiles are spread over all SMs first.
pub(crate) fn resident_blocks(tiles: f64, blocks_per_sm: u32, limits: &ArchLimits) -> f64 {
    (tiles / f64::from(limits.sms)).ceil().clamp(1.0, f64::from(blocks_per_sm))
}

/// `(sum x^p)^(1/p)`: between the sum (`p = 1`) and the largest (`p` to infinity).
pub(crate) fn overlap<const N: usize>(terms: [f64; N], p: f64) -> f64 {
    let largest = terms.iter().copied().fold(0.0, f64::max);
    if largest <= 0.0 {
        return 0.0;
    }
    largest * terms.iter().map(|x| (x / largest).powf(p)).sum::<f64>().powf(1.0 / p)
}

/// Clocks per score on the softmax pipes of an SM: special-function results and f32 instructions.
pub(crate) fn softmax_clocks(limits: &ArchLimits, mufu: f64, ops: f64) -> f64 {
    mufu / limits.mufu + ops / f32_lanes(limits)
}

/// f32 instructions per element of ALiBi: the distance from the diagonal, and slope times it.
const ALIBI_OPS: f64 = 2.0;

/// Special-function results and f32 instructions per element that the changes of scores add to a forward.
pub(crate) fn score_costs(score: ScoreKind, c: &CostConstants) -> (f64, f64) {
    let (mufu, ops) = if score.softcap { (1.0, c.softcap_ops) } else { (0.0, 0.0) };
    let (own_mufu, own_ops) = program_costs(score);
    (mufu + own_mufu, ops + own_ops + if score.alibi { ALIBI_OPS } else { 0.0 })
}

/// The same of a backward, which computes the changes and their slopes.
pub(crate) fn slope_costs(score: ScoreKind, c: &CostConstants) -> (f64, f64) {
    let (mufu, ops) = if score.softcap { (2.0, c.softcap_ops + 3.0) } else { (0.0, 0.0) };
    let (own_mufu, own_ops) = program_costs(score);
    (mufu + 2.0 * own_mufu, ops + 2.0 * own_ops)
}

/// Issue slots of a load of one value a lane: 32 lanes a clock are served.
const LOAD_OPS: f64 = 4.0;

/// What of a node is computed once a row or a column falls to each score.
const SHARED: f64 = 0.1;

/// Special results and f32 instructions of a score by a program of the caller's own: its nodes, by what they
/// depend on.
fn program_costs(score: ScoreKind) -> (f64, f64) {
    let Some(program) = score.program else { return (0.0, 0.0) };
    let mut costs = (0.0, 0.0);
    for (id, node) in program.own() {
        let deps = program.deps(id);
        let is_pair = deps.has(Deps::SCORE) || (deps.has(Deps::QUERY) && deps.has(Deps::KEY));
        let is_shared = deps.has(Deps::QUERY) || deps.has(Deps::KEY);
        let share = if is_pair {
            1.0
        } else if is_shared {
            SHARED
        } else {
            0.0
        };
        let (mufu, ops) = match node {
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) => (0.0, 0.0),
            Node::Load(..) => (0.0, LOAD_OPS),
            Node::Unary(Unary::Tanh | Unary::Sigmoid, _) => (2.0, 3.0),
            Node::Unary(
                Unary::Exp
                | Unary::Exp2
                | Unary::Log
                | Unary::Log2
                | Unary::Sqrt
                | Unary::Rsqrt
                | Unary::Sin
                | Unary::Cos,
                _,
            ) => (1.0, 1.0),
            Node::Unary(..) | Node::Select(..) => (0.0, 1.0),
            Node::Binary(Binary::FloorDiv | Binary::FloorMod, ..) => (0.0, 12.0),
            Node::Binary(..) => (0.0, 1.0),
        };
        costs = (costs.0 + share * mufu, costs.1 + share * ops);
    }
    costs
}

/// f32 instructions per clock of an SM.
pub(crate) fn f32_lanes(limits: &ArchLimits) -> f64 {
    limits.fp32_flops / 2.0
}

/// A forward by one kernel: a problem's tiles, and the clocks of the kernel's steps.
pub(crate) struct Launch<'a, F> {
    pub problem: &'a Problem,
    /// `tile_m` and `tile_n`.
    pub tile: (u32, u32),
    /// The problem in such tiles, each with all of its keys.
    pub work: &'a Work,
    pub model: KernelModel,
    /// The clocks of a step where an SM holds so many CTAs.
    pub step: F,
    pub limits: &'a ArchLimits,
    pub constants: &'a CostConstants,
}

/// What the rest of the chip adds to device memory that is always busy: a share where both take as long, as
/// in [`overlap`] with an exponent of 3, and the power of their quotient by which it falls. With half the
/// time it adds less than half a percent (NB-150).
const FED_OVERLAP: (f64, i32) = (0.26, 6);

/// Seconds of a launch with the keys of each tile divided among a number of CTAs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Of the SMs, and the same with all of them equally busy.
    compute: f64,
    even: f64,
    /// The tensor cores at the power limit.
    power: f64,
    l2: f64,
    hbm: f64,
    /// [`Memory::Fed`].
    is_fed: bool,
    /// The combine kernel.
    combine: f64,
    /// The launch.
    launch: f64,
}

impl Times {
    /// The launch, with the overlap that was calibrated.
    pub(crate) fn seconds(&self) -> f64 {
        let chip = overlap([self.compute, self.power], 8.0);
        let on_chip = overlap([chip, self.l2], 6.0);
        let busy = if self.is_fed && self.hbm > on_chip {
            self.hbm * (1.0 + FED_OVERLAP.0 * (on_chip / self.hbm).powi(FED_OVERLAP.1))
        } else {
            overlap([on_chip, self.hbm], 3.0)
        };
        busy + self.combine + self.launch
    }

    /// What [`Times::seconds`] is at least, without its powers: within 2 %.
    fn at_least(&self) -> f64 {
        // A p-norm of two is concave in the p-th power of their quotient: at least its chord, whose slopes
        // 2^(1/p) - 1 are rounded down.
        let chord = |a: f64, b: f64, p: i32, slope: f64| {
            let (less, more) = (a.min(b), a.max(b));
            if more > 0.0 { more * (1.0 + slope * (less / more).powi(p)) } else { 0.0 }
        };
        let chip = chord(self.compute, self.power, 8, 0.09);
        let on_chip = chord(chip, self.l2, 6, 0.122);
        let busy = if self.is_fed { on_chip.max(self.hbm) } else { chord(on_chip, self.hbm, 3, 0.259) };
        // Powers are rounded.
        busy * (1.0 - 1e-12) + self.combine + self.launch
    }
}

impl<F: Fn(f64) -> f64> Launch<'_, F> {
    /// Seconds with the keys of each tile divided among `parts` CTAs.
    pub(crate) fn seconds(&self, parts: usize) -> f64 {
        self.times(self.divided(parts).as_ref().unwrap_or(self.work), parts).seconds()
    }

    /// What [`Launch::seconds`] is at least, in a tenth of its time: SMs work no longer than on the longest
    /// tile or an even share of all.
    pub(crate) fn at_least(&self, parts: usize) -> f64 {
        let Launch { work, model, .. } = self;
        let tiles = work.tiles_in_parts(parts);
        let step = (self.step)(model.resident);
        let longest = work.longest_part(parts);
        let alone = model.tile + longest.steps * step + longest.masked * model.mask;
        let even = (tiles * model.tile + work.steps() * step) / self.slots();
        let clocks = if tiles > 0.0 { alone.max(even) * (1.0 - 1e-12) } else { 0.0 };
        self.times_of((tiles, work.steps()), (0.0, clocks), parts).at_least()
    }

    /// CTAs of a cluster that combine such parts in shared memory; 1 without clusters.
    pub(crate) fn cluster(&self, parts: usize) -> usize {
        if !self.model.in_clusters {
            return 1;
        }
        cluster_of((self.work.tiles * parts as f64) as usize, parts, self.limits.sms as usize)
    }

    fn divided(&self, parts: usize) -> Option<Work> {
        (parts > 1).then(|| self.work.in_parts(parts))
    }

    fn clock(&self) -> f64 {
        self.limits.clock_ghz * 1e9 * self.constants.clock
    }

    /// CTAs that run at once.
    pub(crate) fn slots(&self) -> f64 {
        f64::from(self.limits.sms) * self.model.resident
    }

    /// Clocks in which a CTA stores the partial results of a part, in f32 where the whole tile's are 16-bit.
    fn partial_clocks(&self) -> f64 {
        self.model.rows * f64::from(self.model.head_dim_v) * 4.0 / PARTIAL_BYTES_PER_CLOCK
    }

    fn times(&self, work: &Work, parts: usize) -> Times {
        let Launch { model, .. } = self;
        // `resident` CTAs make a step each in `step` clocks, so a CTA's step takes as long.
        let tile = model.tile + if parts > 1 { self.partial_clocks() } else { 0.0 };
        let length = |class: &TileClass, on_sm: f64| {
            let second = if class.steps > 1.0 { model.second } else { 0.0 };
            let masked = class.masked * model.mask * on_sm / model.resident;
            tile + second + class.steps * (self.step)(on_sm) + masked
        };
        let sms = f64::from(self.limits.sms);
        let clocks = work.makespan_shared(sms, model.resident, model.queue, length);
        self.times_of((work.tiles, work.steps()), clocks, parts)
    }

    /// The times of `tiles` tiles of `steps` steps together, which take `total` clocks on one slot and end
    /// after `end`.
    fn times_of(&self, (tiles, steps): (f64, f64), (total, end): (f64, f64), parts: usize) -> Times {
        let Launch { problem, work: whole, model, limits, constants: c, .. } = self;
        let (sms, clock, slots) = (f64::from(limits.sms), self.clock(), self.slots());
        let first = if tiles > 0.0 { model.first } else { 0.0 };
        let (even, compute) = ((total / slots + first) / clock, (end + model.start + first) / clock);
        let (tile_m, tile_n) = (f64::from(self.tile.0), f64::from(self.tile.1));
        let scores = tile_m * tile_n;
        let width = f64::from(model.head_dim + model.head_dim_v);
        let element = problem.types.q.bytes() as f64;
        let peak = limits.peak_tensor_flops_of(problem.types.q);
        let power = steps * 2.0 * scores * width / (peak * c.power_cap);

        let tile_bytes = tile_m * width * element;
        let l2_bytes = steps * tile_n * width * element / model.sharing + tiles * tile_bytes;
        let busy = tiles.min(sms).max(1.0);
        let l2_rate = (limits.l2_bytes_per_clock * c.l2_efficiency).min(busy * c.sm_bytes_per_clock) * clock;
        let l2 = l2_bytes / l2_rate;
        let together = tiles / whole.tiles.max(1.0);
        let bytes = hbm_bytes(problem, whole, slots / together.max(1.0), limits, c);
        let cluster = self.cluster(parts);
        // Parts that run at once read at equal rates, and the longest one ends last (NB-150).
        let longest = if parts > 1 && tiles <= slots { whole.unevenness(parts).max(1.0) } else { 1.0 };
        let hbm = model.memory.time(tiles / sms, (parts, cluster)) * longest * bytes
            / (limits.hbm_bytes_per_s * c.hbm_efficiency);
        let in_cluster = if cluster > 1 {
            let warps = (cluster as f64 * tile_m / ROWS_OF_WARP).max(1.0);
            CLUSTER_S + ((model.rows / warps).ceil() - 1.0).max(0.0) * CLUSTER_ROW_S
        } else {
            0.0
        };
        let combine = in_cluster
            + if parts > cluster {
                let stored = together / cluster as f64;
                combine_seconds(whole.tiles * model.rows, model.head_dim_v, stored, clock, limits, c)
            } else {
                0.0
            };
        let is_fed = matches!(model.memory, Memory::Fed { .. });
        // Both, so that what SMs idle is never less than nothing.
        let [even, compute] = [even, compute].map(|seconds| model.memory.of_compute() * seconds);
        Times { compute, even, power, l2, hbm, is_fed, combine, launch: c.launch_s }
    }

    /// The time with the keys of each tile divided among `parts` CTAs, and where it goes.
    pub(crate) fn cost(&self, parts: usize) -> Cost {
        let Launch { problem, model, .. } = self;
        let divided = self.divided(parts);
        let work = divided.as_ref().unwrap_or(self.work);
        let times = self.times(work, parts);
        let Times { compute, even, power, l2, hbm, combine, launch, .. } = times;
        let (clock, slots) = (self.clock(), self.slots());
        let steps = work.steps();
        let alone = |clocks: f64| steps / slots * clocks / clock;
        let seconds = times.seconds();
        let terms = Terms {
            tensor: alone(model.tensor).max(power),
            exp: alone(model.exp),
            smem: alone(model.smem),
            l2,
            hbm,
            waves: compute - even,
            latency: launch + combine + (steps * model.exposed + work.tiles * model.tile) / slots / clock,
        };
        let step = StepClocks {
            resident: model.resident,
            tensor: model.tensor,
            exp: model.exp,
            smem: model.smem,
            exposed: model.exposed,
            total: (self.step)(model.resident),
        };
        Cost::of(problem, Pass::Forward, (work, parts), seconds, terms, slots, step)
    }
}

/// Compulsory bytes, and for every further wave of a head's tiles the part of K and V that L2 does not hold.
/// A wave reads the keys that its queries see.
fn hbm_bytes(problem: &Problem, work: &Work, slots: f64, limits: &ArchLimits, c: &CostConstants) -> f64 {
    let width = problem.bytes_per_key();
    if work.tiles == 0.0 {
        return 0.0;
    }
    let heads = problem.lengths.sequences() as f64 * problem.heads_kv as f64;
    let tiles_per_head = work.tiles / heads;
    let passes = (tiles_per_head / slots).max(1.0);
    let (mean_q, mean_k) = (problem.lengths.mean_q(), problem.lengths.mean_k());
    let seen = |queries: usize| problem.mask.keys_of_all(queries, mean_k).len() as f64;
    let of_wave = seen((mean_q as f64 / passes).ceil() as usize);
    if of_wave == 0.0 {
        return problem.bytes_forward();
    }
    let heads_at_once = (slots / tiles_per_head.max(1.0)).clamp(1.0, heads);
    let held = limits.l2_bytes as f64 * c.l2_reuse / (heads_at_once * of_wave * width);
    let again = (passes * of_wave - seen(mean_q)).max(0.0) * heads * width;
    problem.bytes_forward() + (1.0 - held).max(0.0) * again
}
