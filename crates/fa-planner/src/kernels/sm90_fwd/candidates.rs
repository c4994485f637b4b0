//! The SM90 forwards that are tried for a problem.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{Arch, Division, KernelSpec, MaskKind, Problem, Reads, ScoreKind, Sm90Fwd};

use super::account::smem;
use super::cost::{is_one_step, slow_rows};
use crate::account::pages::gathers;
use crate::account::tiles::query_tiles;
use crate::kernels::{has_idle_warps, packings, split_choices};
use crate::refusals::Refusals;

/// Keys per step that are tried.
pub const TILE_N: [u32; 13] = [64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256];

/// Powers of 2 by which P may exceed 1 before O is rescaled: far from the limits of P in f16 and of sums in
/// f32, and rarely reached after the first tile of keys.
pub const RESCALE_THRESHOLD: u32 = 8;

/// Every SM90 forward that is tried for `problem`, with the knobs that go with each tile by measurement on an
/// H100.
///
/// In order: warpgroups, keys per step, P from registers or not, intra-warpgroup overlap or not, heads of a
/// group packed or not, keys in one piece or shared by several CTAs, loads of K and V shared or not.
pub fn candidates(
    problem: &Problem,
    head_dim: u32,
    head_dim_v: u32,
    division: Division,
) -> impl Iterator<Item = KernelSpec> {
    let (mask, reads) = (MaskKind::of(&problem.mask), Reads::of(problem));
    let problem = *problem;
    // Tiles of equal length and many steps are assigned statically; others are drawn, the longest first.
    // Where loads are slow, a tile of fewer rows is shorter than the others even without a mask. How long
    // tiles are that a program masks is known on the device only.
    let (alike, tile_order) = if mask == MaskKind::Full && !reads.varied && !problem.score.kind().masks() {
        (true, TileOrder::Natural)
    } else {
        (false, TileOrder::LongestFirst)
    };
    let alone = move |rows: u32, tile_n: u32, pack_gqa: bool, split: bool| {
        let short = !split && are_short(&problem, rows, tile_n, pack_gqa) && !is_one_step(&problem, tile_n);
        // CTAs that read drift apart: 192 tiles of head dim 128 take 71 us where they are drawn, 83 assigned;
        // at 64 they are alike, at 80 either is ahead by 8 % (NB-224).
        let drifts = !split
            && [problem.head_dim, problem.head_dim_v] == [128, 128]
            && decodes_in_rounds(&problem, rows, pack_gqa);
        let assigned = alike && !slow_rows(&problem) && !short && !drifts;
        if assigned { Scheduler::Static } else { Scheduler::Dynamic }
    };
    let codes = problem.types.kv.is_code();
    let switches = [(true, true), (true, false), (false, true), (false, false)];
    (1..=3u32)
        .flat_map(|num_wg| TILE_N.into_iter().map(move |tile_n| (num_wg, tile_n)))
        .filter(move |(_, tile_n)| *tile_n as usize <= widest(&problem))
        // Warps convert codes of 16 rows at a time, each in half of a tile.
        .filter(move |(_, tile_n)| !codes || tile_n.is_multiple_of(32))
        .flat_map(move |tile| switches.into_iter().map(move |switch| (tile, switch)))
        .flat_map(move |(tile, switch)| {
            let has_rows = move |pack_gqa: &&bool| !has_idle_warps(&problem, 64 * tile.0, **pack_gqa);
            let packings = packings(&problem, 64 * tile.0, division).iter().filter(has_rows);
            packings.map(move |&pack_gqa| (tile, switch, pack_gqa))
        })
        .flat_map(move |(tile, switch, pack_gqa)| {
            let rows = 64 * tile.0;
            split_choices(&problem, rows, tile.1, pack_gqa, division)
                .iter()
                .map(move |&split| (tile, switch, pack_gqa, split))
        })
        .flat_map(move |choice| {
            let ((num_wg, _), _, pack_gqa, split) = choice;
            let shares = !pack_gqa && !split && shares_loads(&problem, mask, 64 * num_wg);
            (1..=1 + u32::from(shares)).map(move |cluster_m| (choice, cluster_m))
        })
        .flat_map(move |(((num_wg, tile_n), (pv_is_rs, overlap_wg), pack_gqa, split), cluster_m)| {
            let tile_m = 64 * num_wg;
            let kernel = Sm90Fwd {
                tile_m,
                tile_n,
                num_wg,
                pv_is_rs,
                overlap_wg,
                q_stages: 2,
                kv_stages: 2,
                ping_pong: if overlap_wg { num_wg >= 2 } else { num_wg == 2 },
                scheduler: if cluster_m > 1 {
                    Scheduler::Static
                } else {
                    alone(tile_m, tile_n, pack_gqa, split)
                },
                tile_order,
                cluster_m,
                exp_poly_of_16: 0,
                rescale_threshold: if pv_is_rs && overlap_wg { RESCALE_THRESHOLD } else { 0 },
                pack_gqa,
                gather: !codes && gathers(&problem, tile_n, (head_dim, head_dim_v)),
                blocks_per_sm: 1,
            };
            let spec_of = |kernel: &Sm90Fwd| KernelSpec {
                split,
                ..KernelSpec::for_problem(&problem, [head_dim, head_dim_v], kernel.clone())
            };
            let shared = (!split).then(|| that_shares(&kernel, &problem)).flatten();
            let decodes = (!split).then(|| that_decodes(&kernel, &problem)).flatten();
            let shared = shared.or(decodes);
            let alone = (!waits_for_queries(&kernel, spec_of)).then(|| with_room(kernel, &problem, spec_of));
            alone.into_iter().chain(shared.map(|kernel| spec_of(&kernel)))
        })
}

/// The most keys for which CTAs that share an SM are tried.
const SHARED_KEYS: usize = 512;

/// CTAs of one warpgroup with tiles of 64x64 that share an SM, by head dim: as many as have registers enough.
/// At head dim 128 two are slower than one that has the SM to itself (NB-199).
fn sharing(problem: &Problem) -> Option<u32> {
    match [problem.head_dim, problem.head_dim_v] {
        [32, 32] if problem.lengths.is_uniform() => Some(4),
        [32, 32] | [64, 64] => Some(3),
        _ => None,
    }
}

/// The kernel of which several CTAs share an SM, where `kernel` has the tiles for it and the problem enough
/// tiles of few steps: one CTA loads and stores while the others compute (NB-199).
fn that_shares(kernel: &Sm90Fwd, problem: &Problem) -> Option<Sm90Fwd> {
    let blocks_per_sm = sharing(problem)?;
    let Problem { lengths, mask, score, .. } = problem;
    let tiles = query_tiles(problem, kernel.tile_m, kernel.pack_gqa);
    let suits = (kernel.num_wg, kernel.tile_n, kernel.cluster_m) == (1, 64, 1)
        && (kernel.pv_is_rs, kernel.overlap_wg) == (true, true)
        && score.kind() == ScoreKind::NONE
        && !problem.types.kv.is_code()
        && lengths.page().is_none()
        && lengths.max_k() <= SHARED_KEYS
        && tiles > (blocks_per_sm * Arch::Sm90.limits().sms) as usize;
    // Without a mask tiles of one step at head dim 32, and of two at 64, are 13 % faster where they are
    // assigned; others are up to 14 % faster where they are drawn.
    let steps = lengths.max_k().div_ceil(kernel.tile_n as usize);
    let is_assigned = mask.is_full() && lengths.is_uniform() && steps * 32 == problem.head_dim;
    let scheduler = if is_assigned { Scheduler::Static } else { Scheduler::Dynamic };
    suits.then(|| Sm90Fwd { scheduler, blocks_per_sm, ..kernel.clone() })
}

/// Keys of the widest tile that is tried: where there are more tiles than SMs, none is wider than the keys.
/// Where all keys are one step, the model takes wider tiles for more bytes in flight, but the rows beyond the
/// keys are zeros, which are written and multiplied: 512 x 64 of 12 heads of 64 take 87 us by 64x112 and 71
/// by 64x64 (NB-181).
fn widest(problem: &Problem) -> usize {
    if query_tiles(problem, 64, false) <= Arch::Sm90.limits().sms as usize {
        return usize::MAX;
    }
    problem.lengths.max_k().next_multiple_of(16).max(TILE_N[0] as usize)
}

/// Whether three warpgroups have one buffer of Q, which the next tile's queries wait for, where with 64 keys
/// they would have two: at head dim 192-128, 192x64 is ahead of 192x80 in 14 of 16 pairs, by 2 % in the mean
/// and by 7 % in short sequences (NB-173).
fn waits_for_queries(kernel: &Sm90Fwd, spec_of: impl Fn(&Sm90Fwd) -> KernelSpec) -> bool {
    let fits = |tile_n, q_stages| {
        let kernel = Sm90Fwd { tile_n, q_stages, ..kernel.clone() };
        smem(&spec_of(&kernel), &kernel).total <= Arch::Sm90.limits().smem_per_block
    };
    kernel.num_wg == 3 && !fits(kernel.tile_n, 2) && fits(kernel.tile_n, 1) && fits(TILE_N[0], 2)
}

/// Steps of a tile up to which tiles of equal length are drawn as well.
const SHORT: usize = 8;

/// Whether tiles, of which there are more than SMs, have few steps: what one of them waits for then sets its
/// SM back by more than its draw takes (NB-097).
fn are_short(problem: &Problem, tile_m: u32, tile_n: u32, packed: bool) -> bool {
    let tiles = query_tiles(problem, tile_m, packed);
    tiles > Arch::Sm90.limits().sms as usize && problem.lengths.max_k().div_ceil(tile_n as usize) <= SHORT
}

/// Whether clusters of two are tried: where TMA is slow (rows that do not begin on 32 bytes, NB-066), half of
/// the loads of K and V are worth waiting for one another. Both CTAs need a tile of every head.
fn shares_loads(problem: &Problem, mask: MaskKind, tile_m: u32) -> bool {
    let tiles = problem.lengths.max_q().div_ceil(tile_m as usize);
    let alike = mask == MaskKind::Full && problem.lengths.is_uniform();
    alike && slow_rows(problem) && tiles > 0 && tiles.is_multiple_of(2)
}

/// Whether each K/V head of a sequence is one tile of a warpgroup, and these are more than SMs, as many
/// sequences that decode have.
fn decodes_in_rounds(problem: &Problem, tile_m: u32, packed: bool) -> bool {
    let rows = problem.lengths.max_q().saturating_mul(if packed { problem.group_size() } else { 1 });
    let sms = Arch::Sm90.limits().sms as usize;
    tile_m == 64 && rows <= 64 && query_tiles(problem, tile_m, packed) > sms
}

/// The kernel of which two CTAs share an SM while they decode: the tiles of a second round are read beside
/// the first, so that no SM reads alone at the end. 136 tiles of 5,000 keys with 128 columns take 82 us, and
/// 117 one after another; at head dim 80 two were slower (NB-224).
fn that_decodes(kernel: &Sm90Fwd, problem: &Problem) -> Option<Sm90Fwd> {
    let Problem { lengths, mask, score, .. } = problem;
    let tile_n = match [problem.head_dim, problem.head_dim_v] {
        [128, 128] => 64,
        [64, 64] => 96,
        _ => return None,
    };
    let suits = (kernel.num_wg, kernel.tile_n, kernel.cluster_m) == (1, tile_n, 1)
        && (kernel.pv_is_rs, kernel.overlap_wg) == (true, true)
        && score.kind() == ScoreKind::NONE
        && !problem.types.kv.is_code()
        && lengths.is_uniform()
        && mask.is_full()
        && decodes_in_rounds(problem, kernel.tile_m, kernel.pack_gqa);
    suits.then(|| Sm90Fwd { scheduler: Scheduler::Dynamic, blocks_per_sm: 2, ..kernel.clone() })
}

/// The most keys for which a warpgroup gains by skipping tiles far ahead of the others.
const SKIPPED_KEYS: usize = 4096;

/// The most buffers of K and V that are of use to a kernel of several warpgroups. With the third a warpgroup
/// that skips tiles of keys runs further ahead of the others, and rows that are slow to load arrive in time
/// (NB-155). Keys in pages arrive later than those in one piece: a tile takes a microsecond or two, and has a
/// fourth.
fn most_stages(problem: &Problem, kernel: &Sm90Fwd) -> u32 {
    let skips =
        || kernel.skips_blocks(MaskKind::of(&problem.mask)) && problem.lengths.max_k() <= SKIPPED_KEYS;
    match kernel.num_wg {
        // What is in flight are the stages of codes.
        _ if problem.types.kv.is_code() => 2,
        0..=1 if has_room_in_flight(problem, kernel) => 3,
        0..=1 => 2,
        _ if problem.lengths.page().is_some() => 4,
        _ if skips() || slow_rows(problem) => 3,
        _ => 2,
    }
}

/// Whether a kernel of one warpgroup that computes few tiles, each on an SM of its own, gains by a third
/// buffer: by two, narrow heads have less in flight than half of the SMs need (64 x 8k with heads of 64 take
/// 47.1 us by three buffers of 160 keys and 49.4 by two and twice the CTAs, NB-164).
fn has_room_in_flight(problem: &Problem, kernel: &Sm90Fwd) -> bool {
    let tiles = query_tiles(problem, kernel.tile_m, kernel.pack_gqa);
    let kv = problem.types.kv;
    let row = kv.elements(problem.head_dim + problem.head_dim_v) * kv.bytes();
    problem.lengths.is_uniform() && tiles <= Arch::Sm90.limits().sms as usize / 2 && row <= NARROW_ROW
}

/// Bytes of K and V for a key up to which heads are narrow: those of head dim 64.
const NARROW_ROW: usize = 256;

/// The spec of `kernel` with more buffers of K and V, up to [`most_stages`], where shared memory has room for
/// them beside two of Q, into one of which the next tile's Q is loaded during this one, and the compiler is
/// not known to spill; with one buffer of Q where there is no room for two.
fn with_room(mut kernel: Sm90Fwd, problem: &Problem, spec_of: impl Fn(&Sm90Fwd) -> KernelSpec) -> KernelSpec {
    let limit = Arch::Sm90.limits().smem_per_block;
    let fits = |kernel: &Sm90Fwd| smem(&spec_of(kernel), kernel).total <= limit;
    if fits(&kernel) {
        for kv_stages in kernel.kv_stages + 1..=most_stages(problem, &kernel) {
            let deeper = Sm90Fwd { kv_stages, ..kernel.clone() };
            if fits(&deeper) && !Refusals::shipped().has(&spec_of(&deeper), Arch::Sm90) {
                kernel = deeper;
            }
        }
    } else {
        kernel.q_stages = 1;
        if problem.types.kv.is_code() && !fits(&kernel) {
            kernel.kv_stages = 1;
        }
    }
    spec_of(&kernel)
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask};

    use super::*;
    use crate::plan::{PlanOptions, best};

    #[test]
    fn two_ctas_decode_beside_each_other_where_tiles_are_more_than_sms() {
        let of = |batch, keys, (heads_q, heads_kv), head_dim| {
            let problem = Problem::square(1, 1, heads_q, head_dim, Mask::FULL, Dtype::Bf16)
                .with_heads_kv(heads_kv)
                .with_lengths(Lengths::uniform(batch, 1, keys));
            let spec = best(&problem, Arch::Sm90, &PlanOptions::default()).expect("a plan").spec;
            (spec.tile(), spec.traits().blocks_per_sm, spec.traits().scheduler)
        };
        assert_eq!(of(17, 5000, (40, 8), 128), ((64, 64), 2, Scheduler::Dynamic));
        assert_eq!(of(20, 5000, (40, 8), 128), ((64, 64), 2, Scheduler::Dynamic));
        // 128 tiles, and a head dim at which one is faster.
        assert_eq!(of(16, 5000, (40, 8), 128).1, 1);
        assert_eq!(of(7, 3000, (32, 32), 80).1, 1);
    }

    #[test]
    fn ctas_share_an_sm_for_short_sequences_of_narrow_heads() {
        let of = |keys, head_dim, mask| {
            let problem = Problem::square(32_768 / keys, keys, 12, head_dim, mask, Dtype::Bf16);
            let spec = best(&problem, Arch::Sm90, &PlanOptions::default()).expect("a plan").spec;
            (spec.tile(), spec.traits().blocks_per_sm, spec.traits().scheduler)
        };
        assert_eq!(of(128, 64, Mask::FULL), ((64, 64), 3, Scheduler::Static));
        for (keys, mask) in [(64, Mask::FULL), (256, Mask::FULL), (512, Mask::FULL), (64, Mask::CAUSAL)]
            .into_iter()
            .chain([(128, Mask::CAUSAL), (256, Mask::CAUSAL), (512, Mask::CAUSAL)])
        {
            assert_eq!(of(keys, 64, mask), ((64, 64), 3, Scheduler::Dynamic), "{keys} {mask}");
        }
        assert_eq!(of(64, 32, Mask::FULL), ((64, 64), 4, Scheduler::Static));
        for (keys, mask) in [(128, Mask::FULL), (512, Mask::FULL), (64, Mask::CAUSAL), (512, Mask::CAUSAL)] {
            assert_eq!(of(keys, 32, mask), ((64, 64), 4, Scheduler::Dynamic), "{keys} {mask}");
        }
        // Long sequences, and wider heads.
        for (keys, head_dim, mask) in [(1024, 64, Mask::FULL), (128, 128, Mask::FULL), (64, 96, Mask::CAUSAL)]
        {
            assert_eq!(of(keys, head_dim, mask).1, 1, "{keys} {head_dim} {mask}");
        }
    }

    #[test]
    fn no_tile_is_wider_than_the_keys() {
        for head_dim in [64, 128] {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                let of = |keys, lengths| {
                    let square = Problem::square(512, keys, 12, head_dim, mask, Dtype::Bf16);
                    let problem = square.with_lengths(lengths);
                    let spec = best(&problem, Arch::Sm90, &PlanOptions::default()).expect("a plan").spec;
                    (spec.tile().1, spec)
                };
                for keys in [1, 64, 77, 100, 128] {
                    let packed = Lengths::packed(512, 512 * keys, 512 * keys, keys, keys);
                    for lengths in [Lengths::uniform(512, keys, keys), packed] {
                        let (tile_n, spec) = of(keys, lengths);
                        assert!(tile_n as usize <= keys.next_multiple_of(16).max(64), "{keys}: {spec}");
                    }
                }
            }
        }
    }
}
