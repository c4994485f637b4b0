//! The number of CTAs that share the query heads of a K/V head in the backward that takes the least time.

use fa_core::{ArchLimits, Family, KernelSpec, Problem};

use crate::work::{Queue, TileClass, Work};

/// Bytes per clock that an SM adds to f32 accumulators in the L2.
const ADDED_BYTES: f64 = 32.0;

/// Share of the L2 that holds what the CTAs of a head read and add to, before parts of it are evicted between
/// two uses.
const L2_SHARE: f64 = 0.3;

/// Heads of a group (of three at least), and the shares of the L2 that their Q, dO and dQ's accumulators
/// take, of dense and of packed sequences, up to which the CTAs of an SM90 kernel lose nothing to the L2 in
/// one part, however far they drift apart. Sums cost per key and misses per query, so that short sequences
/// are better off with whole groups and long ones with parts: of 32:8 heads 1,024 queries gain 5 to 13 % by
/// one part, 1,536 packed are alike (dense ones lost a third before NB-136, and were not measured since),
/// 8,192 lose.
const SMALL_GROUP: (f64, [f64; 2]) = (4.0, [1.0 / 10.0, 1.0 / 7.0]);

/// The same of larger groups, and of parts, of packed sequences: the share at head dims from 128 on, which
/// goes down with the head dim, whose steps are shorter. Queries are between the mean and the longest
/// sequence's. One part of 7 and 8 heads gains 13 to 40 % over four to eight parts with means of 130 to 500
/// and no sequence longer than 1,200; two parts gain 10 % with means of 800 and sequences up to 3,300; 2,048
/// in every sequence lose (NB-136, NB-193).
const SMALL_PACKED: (f64, f64) = (8.0, 1.0 / 7.0);

/// Share of the device-memory bandwidth of the main launch, and of those that zero and convert accumulators.
const BANDWIDTH: [f64; 2] = [0.93, 0.4];

/// Parts under a program's mask, and tiles for every CTA that computes at once from which there are no more:
/// tiles come in the order of their lists, so that the launch ends evenly, and four parts are 1 to 5 % slower
/// than two in four masks over 8,192 tokens with groups of four heads (NB-201, NB-208).
const LISTED_PARTS: (usize, f64) = (2, 2.0);

/// More parts are taken only if they are faster by this factor: parts need a workspace of dK and dV in f32.
const GAIN: f64 = 1.01;

/// Rates of a backward's main kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardRates {
    /// Floating-point operations per clock and SM that its steps reach.
    pub tensor_flops: f64,
    /// Clocks of a CTA outside its steps.
    pub cta: f64,
}

/// A number of parts and what it costs in memory traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Split {
    /// CTAs per tile of keys of a K/V head.
    pub parts: usize,
    /// Bytes of dK and dV that a CTA adds to accumulators.
    pub added: f64,
    /// Bytes of the f32 accumulators of dK and dV.
    pub sums: f64,
    /// Bytes of Q, dO and dQ that are read from device memory again, or written there, because the L2
    /// evicted them.
    pub missed: f64,
}

impl Split {
    /// The split with the least estimated time: see [`crate::divide::head_splits`].
    pub(crate) fn choose(
        problem: &Problem,
        spec: &KernelSpec,
        rates: BackwardRates,
        limits: &ArchLimits,
        sms: u32,
    ) -> Split {
        let group = problem.group_size().max(1);
        let is_empty = problem.lengths.sequences() == 0
            || problem.lengths.mean_q() == 0
            || problem.lengths.mean_k() == 0;
        if group == 1 || is_empty {
            return Split { parts: 1, added: 0.0, sums: 0.0, missed: 0.0 };
        }
        let model = Model::new(problem, spec, rates, limits, sms);
        let mut best = model.split(1);
        let mut least = model.seconds(&best);
        let mut heads = group;
        while heads > 1 {
            // The fewest parts with fewer heads each.
            let parts = group.div_ceil(heads - 1);
            if parts > model.most_parts(spec) {
                break;
            }
            heads = group.div_ceil(parts);
            let split = model.split(parts);
            let seconds = model.seconds(&split);
            if seconds * GAIN < least {
                (best, least) = (split, seconds);
            }
        }
        best
    }
}

/// What the estimate needs of the problem, cut into one tile of keys per CTA with all query heads of a group
/// in one part.
struct Model<'a> {
    problem: &'a Problem,
    limits: &'a ArchLimits,
    /// All query heads in parts of one.
    single_heads: Work,
    /// Whether [`SMALL_GROUP`], [`SMALL_PACKED`] and [`LISTED_PARTS`] hold: not in deterministic kernels,
    /// whose CTAs wait for one another, nor in the SM80 class, where they were not measured.
    keeps_small_groups: bool,
    /// CTAs that run at once.
    slots: f64,
    /// Clocks of a step.
    step: f64,
    /// Clocks of a CTA outside its steps.
    cta: f64,
    /// Elements of Q and K rows and of V and O rows, padded to the tile.
    head_dims: [f64; 2],
    tile: [f64; 2],
}

impl Model<'_> {
    fn new<'a>(
        problem: &'a Problem,
        spec: &KernelSpec,
        rates: BackwardRates,
        limits: &'a ArchLimits,
        sms: u32,
    ) -> Model<'a> {
        let traits = spec.traits();
        let (tile_m, tile_n) = traits.tile;
        let tile = [tile_m, tile_n].map(f64::from);
        let head_dims = [spec.head_dim, spec.head_dim_v].map(f64::from);
        let resident = f64::from(traits.blocks_per_sm);
        let products = 2.0 * tile[0] * tile[1] * (3.0 * head_dims[0] + 2.0 * head_dims[1]);
        Model {
            problem,
            limits,
            single_heads: Work::of_keys(problem, tile_m, tile_n, problem.group_size()),
            keeps_small_groups: spec.kernel.family() == Family::Sm90 && !traits.pass.deterministic(),
            slots: f64::from(sms) * resident,
            step: resident * products / rates.tensor_flops,
            cta: rates.cta,
            head_dims,
            tile,
        }
    }

    /// The parts that are tried.
    fn most_parts(&self, spec: &KernelSpec) -> usize {
        let group = self.problem.group_size().max(1);
        let (parts, tiles) = LISTED_PARTS;
        let in_parts = self.single_heads.tiles * parts as f64 / group as f64;
        let is_full = in_parts >= tiles * self.slots;
        if self.keeps_small_groups && spec.score.masks() && is_full { parts } else { group }
    }

    /// The traffic of `parts` parts.
    fn split(&self, parts: usize) -> Split {
        let Model { problem, limits, .. } = self;
        let [hd, hdv] = self.head_dims;
        let [tile_m, tile_n] = self.tile;
        let heads = problem.group_size().div_ceil(parts) as f64;
        // What CTAs of the same part share while they are in step: Q, dO and the f32 accumulators of dQ of a
        // head.
        let shared = problem.lengths.mean_q() as f64 * (2.0 * (hd + hdv) + 4.0 * hd);
        let n_tiles = (problem.lengths.mean_k() as f64 / tile_n).ceil().max(1.0);
        let all_parts = (problem.lengths.sequences() * problem.heads_kv * parts) as f64;
        let in_step = (self.slots / n_tiles).min(all_parts).max(1.0) * shared;
        // Tiles of unequal lengths drift apart over the heads: under a causal mask over half of them on
        // average.
        let mean = self.single_heads.steps() / self.single_heads.tiles;
        let drift = 1.0 - mean / self.single_heads.longest.steps.max(mean).max(1.0);
        let in_use = in_step * (1.0 + (heads - 1.0) * drift);
        let room = (limits.l2_bytes as f64 * L2_SHARE).max(in_step);
        let stays = self.keeps_small_groups && heads > 2.0 && self.is_small(parts, heads, shared);
        let share = if stays { 0.0 } else { (1.0 - room / in_use).max(0.0) };
        let step_bytes = tile_m * (2.0 * (hd + hdv) + 8.0 * hd);
        let missed = share * self.single_heads.steps() * step_bytes;
        if parts == 1 {
            return Split { parts, added: 0.0, sums: 0.0, missed };
        }
        let keys = problem.heads_kv as f64 * problem.lengths.reach_k() as f64;
        Split { parts, added: tile_n * (hd + hdv) * 4.0, sums: keys * (hd + hdv) * 4.0, missed }
    }

    /// Whether the `heads` of each of `parts` parts, which take `shared` bytes each in a sequence of the
    /// mean, are few enough to stay in the L2.
    fn is_small(&self, parts: usize, heads: f64, shared: f64) -> bool {
        let (lengths, l2) = (&self.problem.lengths, self.limits.l2_bytes as f64);
        let (most, shares) = SMALL_GROUP;
        let share = shares[usize::from(!lengths.is_uniform())];
        if parts == 1 && heads <= most && heads * shared <= l2 * share {
            return true;
        }
        let (most, share) = SMALL_PACKED;
        let longest = lengths.max_q().min(lengths.reach_q()) as f64 / lengths.mean_q().max(1) as f64;
        let of_dim = (self.head_dims[0].max(self.head_dims[1]) / 128.0).min(1.0);
        let is_large = heads * shared * longest.max(1.0).sqrt() > l2 * share * of_dim;
        !lengths.is_uniform() && heads <= most && !is_large
    }

    /// The estimated time of the launches, less what does not depend on the split.
    fn seconds(&self, split: &Split) -> f64 {
        let Model { problem, limits, .. } = self;
        let group = problem.group_size();
        let heads = group.div_ceil(split.parts) as f64;
        let share = split.parts as f64 / group as f64;
        let classes = self.single_heads.classes.iter();
        let work = Work {
            tiles: self.single_heads.tiles * share,
            classes: classes.map(|c| TileClass { count: c.count * share, ..*c }).collect(),
            longest: self.single_heads.longest,
        };
        let length =
            |class: &TileClass| self.cta + split.added / ADDED_BYTES + class.steps * heads * self.step;
        let (_, end) = work.makespan(self.slots, Queue::LongestFirst, length);
        let busy = end / (limits.clock_ghz * 1e9);
        let accumulators = problem.rows() * self.head_dims[0] * 4.0;
        let bytes = problem.bytes_backward() + 2.0 * accumulators + split.missed;
        let traffic = bytes / (limits.hbm_bytes_per_s * BANDWIDTH[0]);
        // dK and dV in f32 are zeroed before the main launch, and read and converted after it.
        (busy.powi(3) + traffic.powi(3)).cbrt() + 2.5 * split.sums / (limits.hbm_bytes_per_s * BANDWIDTH[1])
    }
}
