//! The launches of a forward as data: parameters, tensor maps, workspace and the order of its kernels.

use fa_core::spec::{Scheduler, TileOrder, Traits, byte_panel, operand_panel};
use fa_core::{Arch, KernelSpec, LaunchPlan, Pass, Problem};
use fa_planner::account::{LARGEST_CLUSTER, MAX_SPLITS, combine_ctas, combines_in_clusters, page_part};

use crate::Error;
use crate::jit::entries::{COMBINE, COMBINE_THREADS, MAP, MAP_THREADS, combine_smem};
use crate::jit::params::{FwdParams, PlanParams, SplitParams, VarlenParams};
use crate::jit::program_params::{BlockMapParams, WithPrograms};
use crate::launch::checks::count;
use crate::launch::extras::{cache_params, mod_params, needs, varlen_params};
use crate::launch::launches::{Launch, Launches, Params, Step, Tensor, check};
use crate::launch::problem_params::{score_params, shape_params};
use crate::launch::programs::BlockMap;
use crate::launch::raw_program::Scores;
use crate::launch::sections::Sections;
use crate::launch::tma::MapTemplate;
use crate::launch::varied::{PlanBounds, plan_step};
use crate::launch::workspace::{ForwardParts, Workspace};

impl Launches {
    /// The launches of a forward by `plan` for `problem` on a GPU of `arch` with `sms` SMs.
    ///
    /// # Errors
    /// As [`Launches::of`]; [`Error::Mismatch`] for a backward.
    pub fn forward(plan: &LaunchPlan, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
        let spec = &plan.spec;
        let traits = check(spec, problem, false)?;
        let uses_tma = traits.uses_tma();
        check_division(plan, &traits, problem)?;
        let tiled = traits.tiled(problem);
        let work = Work::of(plan, &traits, &tiled, sms);
        let params = params(spec, &traits, &tiled, &work, (arch, sms))?;
        // For lengths on the device, the upper bound on tiles.
        let tiles = params.num_tiles as u32;
        let mut main = Launch::main(spec, tiles, sms);
        if work.cluster > 1 {
            if main.grid != tiles {
                let need = format!("1 for more tiles than run at once ({tiles} on {sms} SMs)");
                return Err(Error::Division { name: "cluster", value: work.cluster, need });
            }
            // The CTAs of a cluster take the parts of one tile, and no other.
            main.cluster = work.cluster as u32;
        }
        let draws_tiles = traits.scheduler == Scheduler::Dynamic;
        // Packed rows may be of no sequence; the plan kernel takes one sequence and one tile at least.
        let has_work = main.grid > 0 && problem.lengths.reach_q() > 0;
        let tensors = Tensor::of_pass(problem, false);
        let plan_bytes = if spec.reads.varied { work.bounds.bytes() } else { 0 };
        let rows = work.slots.saturating_mul(work.heads).saturating_mul(work.slot_rows);
        let own_plan = 4 * params.plan.own_ints as usize;
        let map = BlockMap::of(spec, &tiled)?;
        let workspace = Workspace::forward(ForwardParts {
            draws_tiles,
            plan: if own_plan > 0 { own_plan.saturating_mul(work.ctas) } else { plan_bytes },
            rows,
            columns: problem.head_dim_v,
            map_lists: map.as_ref().map_or(0, |map| map.list_bytes),
        })?;
        let mut steps = Vec::new();
        if has_work && spec.reads.varied {
            steps.push(plan_step(spec, problem));
        }
        let mut own_map = BlockMapParams::default();
        if let Some(map) = map {
            own_map = map.params;
            if has_work {
                steps.push(Step::Launch(Launch::plain(MAP, map.rows, MAP_THREADS, 0)));
                steps.extend(map.bits.map(Step::Launch));
            }
        }
        if has_work {
            steps.push(Step::Launch(main));
        }
        if has_work && rows > 0 {
            // With a plan, the upper bound on divided rows.
            let rows = work.divided.saturating_mul(work.heads).saturating_mul(work.slot_rows);
            let grid = combine_ctas(rows, spec.head_dim_v, sms as usize) as u32;
            let combine = Launch::plain(COMBINE, grid, COMBINE_THREADS, combine_smem(spec));
            steps.push(Step::Launch(combine.early(arch)));
        }
        let maps = if has_work && uses_tma { maps(spec, &traits, &tiled, &tensors) } else { Vec::new() };
        Ok(Launches {
            tensors,
            extras: needs(problem, Pass::Forward, plan_bytes),
            workspace,
            steps,
            params: Params::Forward(WithPrograms {
                params,
                map: own_map,
                pass: cache_params(problem),
                ..WithPrograms::default()
            }),
            maps,
            plan_bytes,
            program: problem.score.program,
            descales: problem.descales,
            mask_offset: problem.mask.offset as i32,
            gradients: Vec::new(),
            scores: Scores::of(problem),
            ds_box: None,
        })
    }
}

/// How the work of a forward is divided.
struct Work {
    /// Bounds on a work plan's lists.
    bounds: PlanBounds,
    /// Tiles that an entry of the plan stands for, and CTAs that compute at once.
    heads: usize,
    ctas: usize,
    /// Parts of the keys of every row whose results are in the workspace, or an upper bound.
    splits: usize,
    /// CTAs of a cluster, which divide such a part among them and combine its results.
    cluster: usize,
    /// Partial results of a head, and tiles that they belong to; 0 where no keys are divided.
    slots: usize,
    divided: usize,
    /// Rows of a tile that can exist.
    slot_rows: usize,
}

impl Work {
    fn of(plan: &LaunchPlan, traits: &Traits, problem: &Problem, sms: u32) -> Work {
        let spec = &plan.spec;
        let (group, heads) =
            if traits.packs_gqa { (problem.group_size(), problem.heads_kv) } else { (1, problem.heads_q) };
        let queries = traits.tile_queries(problem.group_size()).max(1);
        let max_q = problem.lengths.max_q();
        let ctas = sms as usize * traits.blocks_per_sm as usize;
        let mut work = Work {
            bounds: PlanBounds::default(),
            heads,
            ctas,
            splits: 1,
            cluster: 1,
            slots: 0,
            divided: 0,
            slot_rows: max_q.min(queries) * group,
        };
        if spec.reads.varied {
            work.bounds = PlanBounds::forward(problem, traits, spec.split, (heads, ctas));
            work.splits = plan.splits.clamp(1, work.bounds.slots.max(1));
            (work.slots, work.divided) = (work.bounds.slots, work.bounds.split_items);
        } else if spec.split {
            let tiles = max_q.div_ceil(queries).saturating_mul(problem.lengths.sequences());
            (work.splits, work.cluster) = (plan.splits / plan.cluster, plan.cluster);
            if work.splits > 1 {
                (work.slots, work.divided) = (tiles.saturating_mul(work.splits), tiles);
            }
        }
        work
    }
}

/// Checks that the kernel can divide the keys of a tile as the plan says.
///
/// # Errors
/// [`Error::Division`].
fn check_division(plan: &LaunchPlan, traits: &Traits, problem: &Problem) -> Result<(), Error> {
    let LaunchPlan { spec, splits, cluster } = plan;
    let refuse = |name, value: usize, need| Err(Error::Division { name, value, need });
    let is_bound = spec.reads.varied && spec.split;
    let steps = problem.lengths.max_k().div_ceil(traits.tile.1 as usize).max(1);
    let most = if spec.split { steps.min(MAX_SPLITS) } else { 1 };
    if *splits == 0 || (!is_bound && *splits > most) {
        let kernel = if spec.split { "tiles" } else { "a kernel without splits, with tiles" };
        return refuse("splits", *splits, format!("1 to {most} for {kernel} of {steps} steps"));
    }
    if *cluster > 1 && !combines_in_clusters(problem, spec) {
        return refuse("cluster", *cluster, "1 for what this kernel combines in no cluster".to_owned());
    }
    if *cluster > LARGEST_CLUSTER || *cluster == 0 || !splits.is_multiple_of(*cluster) {
        return refuse("cluster", *cluster, format!("a divisor of {splits} splits up to {LARGEST_CLUSTER}"));
    }
    Ok(())
}

/// The maps of Q, K and V: boxes of one panel's columns and one tile's rows, or one page's part of them.
/// Where threads copy rows, half a tile's: boxes load those that are contiguous.
fn maps(spec: &KernelSpec, traits: &Traits, problem: &Problem, tensors: &[Tensor]) -> Vec<MapTemplate> {
    let (_, tile_n) = traits.tile;
    let panel_of = if spec.kernel.computes_in_8_bits() { byte_panel } else { operand_panel };
    let (panel, panel_v) = (panel_of(spec.head_dim), panel_of(spec.head_dim_v));
    let group = traits.packs_gqa.then_some(problem.group_size() as u32);
    // Without keys K and V are not loaded and their addresses are unchecked, but a map needs valid memory:
    // use Q's.
    let no_keys = problem.lengths.max_k() == 0 || tensors[2].shape.is_empty();
    // Nor is K where it has no columns of its own.
    let (k, v) = match no_keys {
        true => (0, 0),
        false if tensors[1].shape.is_empty() => (2, 2),
        false => (1, 2),
    };
    // CTAs of a cluster load an equal share of each K and V tile.
    let mut share = tile_n / traits.cluster;
    if let Some(page) = problem.lengths.page() {
        share = if traits.gathers { tile_n / 2 } else { page_part(page, tile_n) as u32 };
    }
    let is_ragged = spec.reads.varied;
    let mut maps = vec![
        MapTemplate { name: "q", tensor: 0, panel, rows: traits.query_box, group, is_ragged },
        MapTemplate { name: "k", tensor: k, panel, rows: share, group: None, is_ragged },
        MapTemplate { name: "v", tensor: v, panel: panel_v, rows: share, group: None, is_ragged },
    ];
    maps.truncate(traits.tensor_maps.len());
    maps
}

/// The parameters that the problem alone decides.
fn params(
    spec: &KernelSpec,
    traits: &Traits,
    problem: &Problem,
    work: &Work,
    (arch, sms): (Arch, u32),
) -> Result<FwdParams, Error> {
    let (_, tile_n) = traits.tile;
    let group = problem.group_size();
    let max_q = problem.lengths.max_q();
    let (rows, heads) = if traits.packs_gqa {
        (max_q.saturating_mul(group), problem.heads_kv)
    } else {
        (max_q, problem.heads_q)
    };
    let queries = traits.tile_queries(group).max(1);
    let m_blocks = max_q.div_ceil(queries).next_multiple_of(traits.cluster as usize);
    let all_heads = heads.saturating_mul(problem.lengths.sequences());
    let score = score_params(problem)?;
    count("query rows of a head", rows)?;
    let order = sections(traits, problem, (arch, sms), all_heads, m_blocks);
    let tiles = if spec.reads.varied {
        work.bounds.items.saturating_mul(heads)
    } else {
        m_blocks.saturating_mul(all_heads).saturating_mul(work.splits).saturating_mul(work.cluster)
    };
    let longest = problem.lengths.max_k().div_ceil(tile_n as usize);
    let part = problem.lengths.page().map_or(0, |page| page_part(page, tile_n));
    Ok(FwdParams {
        shape: shape_params(problem)?,
        score,
        varlen: VarlenParams { page_part: count("keys of a box", part)?, ..varlen_params(&problem.lengths)? },
        split: SplitParams {
            splits: count("parts of the keys", work.splits)?,
            slot_rows: count("rows of a tile", work.slot_rows)?,
            ..SplitParams::default()
        },
        plan: if spec.reads.varied {
            let own_ints = count("ints of a work plan", work.bounds.own_ints(spec, problem, m_blocks))?;
            PlanParams { own_ints, ..work.bounds.params(work.heads, work.ctas, longest)? }
        } else {
            PlanParams::default()
        },
        mods: mod_params(problem),
        m_blocks: count("tiles of a head", m_blocks)?,
        tile_queries: count("queries of a tile", queries)?,
        num_tiles: count("tiles", tiles)?,
        heads_per_section: count("heads", order.heads)?,
        sections: count("sections", order.sections)?,
        ..FwdParams::default()
    })
}

/// Tiles for every CTA that computes at once in the last section of the longest-first order.
const LAST_SECTION: [usize; 2] = [2, 3];

/// Tiles for every such CTA up to which the end of the run is simulated. Longer runs differ by less than a
/// percent.
const SIMULATED: usize = 16;

/// The sections of the kernel's tile order. The last one is the shorter of [`LAST_SECTION`], or the longer
/// where the run ends sooner with it: 4 x 1536 with 32:8 heads of 128 gains 1.8 %, 3 x 1200 with 40:8 heads
/// would lose 2 % (NB-155).
fn sections(
    traits: &Traits,
    problem: &Problem,
    (arch, sms): (Arch, u32),
    all_heads: usize,
    m_blocks: usize,
) -> Sections {
    match traits.tile_order {
        TileOrder::Natural => return Sections { heads: all_heads, sections: 0 },
        TileOrder::LongestFirst => {}
    }
    let row = problem.types.kv.elements(problem.head_dim + problem.head_dim_v) * problem.types.kv.bytes();
    let head_bytes = (problem.lengths.max_k() as u64).saturating_mul(row as u64);
    let group = if traits.packs_gqa { 1 } else { problem.group_size() };
    let slots = sms as usize * traits.blocks_per_sm as usize;
    // Each half of the L2 keeps a copy of what its SMs read, and Q, O and the neighbouring sections pass
    // through as well: more than a twelfth is slower (NB-008). Small sections mix long tiles, which compute,
    // with short ones, which mostly load: short sequences want a 48th, long ones two heads together (NB-153).
    let l2 = arch.limits().l2_bytes;
    let room = (l2 / 48).max(head_bytes.saturating_mul(2)).min(l2 / 12);
    let of = |last: usize| Sections::of(all_heads, group, m_blocks, head_bytes, last * slots, room);
    let [shorter, longer] = LAST_SECTION.map(of);
    let is_short = all_heads.saturating_mul(m_blocks) <= SIMULATED * slots;
    if shorter == longer || !is_short || !problem.lengths.is_uniform() {
        return shorter;
    }
    let lengths = tile_lengths(traits, problem, m_blocks);
    let end = |own: Sections| own.end(all_heads, &lengths, slots);
    if end(longer) < end(shorter) { longer } else { shorter }
}

/// How long each tile of a head takes, in halves of a step of keys. What is outside of the steps takes three.
fn tile_lengths(traits: &Traits, problem: &Problem, m_blocks: usize) -> Vec<u64> {
    let queries = traits.tile_queries(problem.group_size()).max(1);
    let (all, keys) = (problem.lengths.max_q(), problem.lengths.max_k());
    let steps = |block: usize| {
        let rows = (block * queries).min(all)..((block + 1) * queries).min(all);
        problem.mask.n_blocks(rows, all, keys, traits.tile.1 as usize).len() as u64
    };
    (0..m_blocks).map(|block| 2 * steps(block) + 3).collect()
}
