//! The part of the model that all kernels share: how the steps of a tile add up to a launch.

use fa_core::{ArchLimits, Pass, Problem};

use crate::account::clusters::cluster_of;
use crate::work::{Queue, TileClass, Work};

use super::constants::CostConstants;
use super::memory::{Memory, cluster_seconds, combine_seconds};
use super::predicted::{Cost, StepClocks, Terms};

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

/// Bytes per clock at which an SM stores partial results, 32 in a row (NB-140).
const PARTIAL_BYTES_PER_CLOCK: f64 = 32.0;

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
    /// The same with all SMs reading to the end.
    even_hbm: f64,
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
        let even_hbm = model.memory.time(tiles / sms, (parts, cluster)) * longest * bytes
            / (limits.hbm_bytes_per_s * c.hbm_efficiency);
        let equal = problem.lengths.is_uniform();
        let hbm = if equal || parts == 1 {
            let rounds = equal.then_some(tiles / slots);
            model.memory.to_the_end(even_hbm, rounds, whole.longest_part(parts).steps)
        } else {
            even_hbm
        };
        let combine = cluster_seconds(cluster, tile_m, model.rows)
            + if parts > cluster {
                let stored = together / cluster as f64;
                combine_seconds(whole.tiles * model.rows, model.head_dim_v, stored, clock, limits, c)
            } else {
                0.0
            };
        let is_fed = matches!(model.memory, Memory::Fed { .. });
        // Both, so that what SMs idle is never less than nothing.
        let [even, compute] = [even, compute].map(|seconds| model.memory.of_compute() * seconds);
        Times { compute, even, power, l2, hbm, even_hbm, is_fed, combine, launch: c.launch_s }
    }

    /// The time with the keys of each tile divided among `parts` CTAs, and where it goes.
    pub(crate) fn cost(&self, parts: usize) -> Cost {
        let Launch { problem, model, .. } = self;
        let divided = self.divided(parts);
        let work = divided.as_ref().unwrap_or(self.work);
        let times = self.times(work, parts);
        let Times { compute, even, power, l2, hbm, even_hbm, combine, launch, .. } = times;
        let (clock, slots) = (self.clock(), self.slots());
        let steps = work.steps();
        let alone = |clocks: f64| steps / slots * clocks / clock;
        let seconds = times.seconds();
        let terms = Terms {
            tensor: alone(model.tensor).max(power),
            exp: alone(model.exp),
            smem: alone(model.smem),
            l2,
            hbm: even_hbm,
            waves: (compute - even) + (hbm - even_hbm),
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
