//! The launches of a backward as data: parameters, tensor maps, workspace and the order of its kernels.

use fa_core::spec::{Scheduler, TileOrder, Traits};
use fa_core::{Arch, KernelSpec, LaunchPlan, MaskKind, Problem};
use fa_planner::account::panels::BwdPanels;
use fa_planner::account::{head_bytes, heads_side_by_side, panels_of, storing_heads};

use crate::Error;
use crate::jit::array_gradients::ArrayGradient;
use crate::jit::entries::{
    ARRAY_SUM, ARRAY_SUM_THREADS, DSINKS, DSINKS_THREADS, LISTS, LISTS_THREADS, MAP, MAP_THREADS,
    POSTPROCESS, POSTPROCESS_KV, PREPROCESS, PROCESS_THREADS, sums_dq,
};
use crate::jit::params::{BwdParams, PlanParams};
use crate::jit::program_params::{BlockMapParams, WithPrograms};
use crate::launch::checks::count;
use crate::launch::extras::{mod_params, needs, varlen_params};
use crate::launch::launches::{Launch, Launches, Params, Step, Tensor, check};
use crate::launch::problem_params::{score_params, shape_params};
use crate::launch::programs::{BlockMap, array_gradient};
use crate::launch::raw_program::Scores;
use crate::launch::sections::Sections;
use crate::launch::tma::MapTemplate;
use crate::launch::varied::{PlanBounds, plan_step};
use crate::launch::workspace::{BackwardParts, Workspace, room};

impl Launches {
    /// The launches of a backward by `plan` for `problem` on a GPU of `arch` with `sms` SMs.
    ///
    /// # Errors
    /// As [`Launches::of`]; [`Error::Mismatch`] for a forward.
    pub fn backward(plan: &LaunchPlan, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
        let spec = &plan.spec;
        let traits = check(spec, problem, true)?;
        check_division(plan, problem)?;
        let deterministic = traits.pass.deterministic();
        // Without queries no launch would zero the parts' accumulators.
        let is_empty = problem.lengths.reach_q() == 0 || problem.lengths.reach_k() == 0;
        let splits = if is_empty { 1 } else { plan.splits };
        let params = params(spec, &traits, problem, (arch, sms), splits)?;
        // With several tiles of keys, the others have to know when the first one's sums are stored; under a
        // program's mask also whether any are.
        let several = spec.reads.varied || spec.score.masks() || params.n_blocks > 1;
        let takes_turns = deterministic || (params.stores_dq != 0 && several);
        let dq_semaphores = spec.backward().map_or(0, |backward| backward.dq_semaphores);
        let mut workspace = Workspace::backward(
            problem,
            BackwardParts {
                head_dims: (spec.head_dim, spec.head_dim_v),
                tile: traits.tile,
                sums_dq: sums_dq(spec),
                turns: if takes_turns { dq_semaphores } else { 0 },
                deterministic,
                splits,
            },
        )?;
        let plan_bytes = if spec.reads.varied { PlanBounds::backward(problem, &traits).bytes() } else { 0 };
        workspace.add_plan(plan_bytes)?;
        let is_persistent = traits.scheduler != Scheduler::PerTile;
        if is_persistent {
            workspace.add_tile_counter()?;
        }
        let (m_tiles, n_tiles) = process_tiles(spec, &traits, problem)?;

        let process = |entry, grid| Step::Launch(Launch::plain(entry, grid, PROCESS_THREADS, 0));
        let main = Step::Launch(Launch::main(spec, params.num_tiles as u32, sms));
        let mut steps = Vec::new();
        if spec.reads.varied && (m_tiles + n_tiles > 0 || problem.score.sinks) {
            steps.push(plan_step(spec, problem));
        }
        if m_tiles > 0 {
            steps.push(process(PREPROCESS, m_tiles));
        } else if let Some(counter) = workspace.tile_counter {
            // Without queries there is nothing to preprocess, but tiles of keys are still drawn.
            steps.push(Step::Clear(counter));
        }
        let mut own_map = BlockMapParams::default();
        if let Some(map) = BlockMap::of(spec, problem)? {
            workspace.add_map(map.list_bytes, map.tile_bytes)?;
            own_map = map.params;
            if n_tiles > 0 {
                // Lists are of all the states that there may be, also where no sequence has queries.
                if map.rows > 0 {
                    steps.push(Step::Launch(Launch::plain(MAP, map.rows, MAP_THREADS, 0)));
                }
                let ctas = (map.columns * 32).div_ceil(LISTS_THREADS);
                steps.push(Step::Launch(Launch::plain(LISTS, ctas, LISTS_THREADS, 0)));
                steps.extend(map.order.map(Step::Launch));
                steps.extend(map.bits.filter(|_| m_tiles > 0).map(Step::Launch));
            }
        }
        let mut gradients = ArrayGradient::all(spec)?;
        if gradients.iter().any(|own| own.may_be_stored) && !visits_all_tiles(spec, problem) {
            steps.push(Step::ClearGradient);
        }
        if n_tiles > 0 {
            steps.push(main);
        }
        if m_tiles > 0 && sums_dq(spec) {
            steps.push(process(POSTPROCESS, m_tiles));
        }
        if n_tiles > 0 && splits > 1 {
            steps.push(process(POSTPROCESS_KV, n_tiles));
        }
        if problem.score.sinks {
            let (heads, smem) = (params.shape.heads_q as u32, DSINKS_THREADS / 32 * 4);
            steps.push(Step::Launch(Launch::plain(DSINKS, heads, DSINKS_THREADS, smem)));
        }
        for gradient in &mut gradients {
            steps.push(Step::Launch(array_gradient(gradient, spec, problem, arch)?));
            if gradient.may_be_stored {
                steps.push(Step::Launch(Launch::plain(ARRAY_SUM, u32::MAX >> 1, ARRAY_SUM_THREADS, 0)));
            }
        }
        let panels = panels_of(spec).filter(|_| n_tiles > 0);
        let (tensors, is_ragged) = (Tensor::of_pass(problem, true), spec.reads.varied);
        let maps = panels.map_or_else(Vec::new, |panels| maps(traits.tile, &panels, &tensors, is_ragged));
        Ok(Launches {
            tensors,
            extras: needs(problem, spec.kernel.pass(), plan_bytes),
            workspace,
            steps,
            params: Params::Backward(WithPrograms { params, map: own_map, ..WithPrograms::default() }),
            maps,
            plan_bytes,
            program: problem.score.program,
            descales: problem.descales,
            mask_offset: problem.mask.offset as i32,
            gradients,
            scores: Scores::of(problem),
            ds_box: spec.stored_gradient().map(|own| (own.panel, traits.tile.0)),
        })
    }
}

/// Whether the main kernel visits every tile of queries and keys.
fn visits_all_tiles(spec: &KernelSpec, problem: &Problem) -> bool {
    let Problem { lengths, mask, .. } = problem;
    let is_empty = lengths.reach_q() == 0 || lengths.reach_k() == 0;
    !spec.reads.varied && mask.is_full() && !spec.score.masks() && !is_empty
}

/// Checks that the query heads of a K/V head can be divided as the plan says.
///
/// # Errors
/// [`Error::Division`].
fn check_division(plan: &LaunchPlan, problem: &Problem) -> Result<(), Error> {
    let (group, splits, cluster) = (problem.group_size(), plan.splits, plan.cluster);
    if !(1..=group).contains(&splits) {
        let need = format!("1 to {group}, the query heads of a K/V head");
        return Err(Error::Division { name: "splits", value: splits, need });
    }
    if cluster != 1 {
        let need = "1: a backward combines nothing in clusters".to_owned();
        return Err(Error::Division { name: "cluster", value: cluster, need });
    }
    Ok(())
}

/// Heads of the last section at least, where tiles of keys come in the order of their lists: of five
/// documents in 8,192 tokens, 1,024 tiles end at 1.13 of an even share by one head, and at 1.03 by three
/// (by simulation, NB-208).
const LISTED_HEADS: u64 = 3;

/// CTAs of a head that may run at once in a deterministic backward under a mask that moves with the keys. By
/// simulation 8 to 16 are alike (NB-055).
const TURNS_AT_ONCE: usize = 16;

/// The maps of Q, K, V and dO: boxes of one panel's columns and one tile's rows.
fn maps(
    (tile_m, tile_n): (u32, u32),
    panels: &BwdPanels,
    tensors: &[Tensor],
    is_ragged: bool,
) -> Vec<MapTemplate> {
    let (k, v) = (1, 2);
    // Without queries Q and dO are not loaded and their addresses are unchecked, but a map needs valid
    // memory: use K's and V's.
    let (q, dout) = if tensors[0].shape.is_empty() { (k, v) } else { (0, 4) };
    let map = |name, tensor, panel, rows| MapTemplate { name, tensor, panel, rows, group: None, is_ragged };
    vec![
        map("q", q, panels.q, tile_m),
        map("k", k, panels.k, tile_n),
        map("v", v, panels.v, tile_n),
        map("dout", dout, panels.dout, tile_m),
    ]
}

/// Tiles of queries of all query heads and tiles of keys of all K/V heads; the most that there can be where
/// lengths are on the device.
///
/// # Errors
/// [`Error::TooLong`].
fn process_tiles(spec: &KernelSpec, traits: &Traits, problem: &Problem) -> Result<(u32, u32), Error> {
    let Problem { lengths, heads_q, heads_kv, .. } = problem;
    let (m_tiles, n_tiles) = if spec.reads.varied {
        // A sequence may be without rows: a bound on tiles is not one on rows.
        let bounds = PlanBounds::backward(problem, traits);
        let some = |tiles, rows| if rows == 0 { 0 } else { tiles };
        (some(bounds.m_tiles, lengths.reach_q()), some(bounds.n_tiles, lengths.reach_k()))
    } else {
        let tiles = |len: usize, tile: u32| len.div_ceil(tile as usize).saturating_mul(lengths.sequences());
        (tiles(lengths.max_q(), traits.tile.0), tiles(lengths.max_k(), traits.tile.1))
    };
    let m_tiles = count("tiles of queries", m_tiles.saturating_mul(*heads_q))?;
    let n_tiles = count("tiles of keys", n_tiles.saturating_mul(*heads_kv))?;
    Ok((m_tiles as u32, n_tiles as u32))
}

/// The parameters that the problem alone decides.
fn params(
    spec: &KernelSpec,
    traits: &Traits,
    problem: &Problem,
    (arch, sms): (Arch, u32),
    splits: usize,
) -> Result<BwdParams, Error> {
    let score = score_params(problem)?;
    let (tile_m, tile_n) = traits.tile;
    let lengths = &problem.lengths;
    let longest = lengths.max_q().div_ceil(tile_m as usize);
    // For lengths on the device, the workspace has room for tiles, and the plan lists those of all sequences.
    let (m_blocks, n_blocks, planned, sequences) = if spec.reads.varied {
        let tiles = |side, tile: u32| room(side, lengths.sequences(), tile as usize).1;
        let planned = PlanBounds::backward(problem, traits).n_tiles;
        (tiles(lengths.q(), tile_m), tiles(lengths.k(), tile_n), planned, 1)
    } else {
        let n_blocks = lengths.max_k().div_ceil(tile_n as usize);
        (longest, n_blocks, n_blocks, lengths.sequences())
    };
    let heads = problem.heads_kv.saturating_mul(sequences).saturating_mul(splits);
    // A head's queries, their gradients and dQ's accumulators, which all of its CTAs read or add to, stay in
    // the L2. On an H100 anything from a twentieth to a third of it measured the same for long sequences;
    // short ones gain 1 to 2 % by a 32nd (NB-153).
    let heads_per_tile = problem.group_size().div_ceil(splits.max(1));
    let head_bytes = head_bytes(problem, heads_per_tile);
    let slots = sms as usize * traits.blocks_per_sm as usize;
    let l2 = arch.limits().l2_bytes;
    let storing = storing_heads(spec, problem, arch, sms);
    let order = match traits.tile_order {
        _ if traits.pass.deterministic() => {
            let least = heads_side_by_side(problem, spec, sms, splits);
            if problem.mask.is_full() {
                Sections { heads: least, sections: heads.saturating_sub(1) / least }
            } else {
                let bytes = |heads: usize| head_bytes.saturating_mul(heads as u64);
                let room = (l2 / 8).min(bytes(slots.div_ceil(TURNS_AT_ONCE))).max(bytes(least));
                Sections::of(heads, 1, planned, head_bytes.max(1), 2 * slots, room)
            }
        }
        TileOrder::Natural if !spec.reads.varied => {
            let own = storing.unwrap_or(1);
            Sections { heads: own, sections: heads.saturating_sub(1) / own }
        }
        // A plan lists the tiles of a sequence side by side, also in the last section.
        TileOrder::Natural | TileOrder::LongestFirst => {
            let is_listed = spec.score.masks();
            // Under a window tiles of equal lengths are alike, and those of the last section would add to
            // zeros.
            let stores_to_the_end =
                storing.is_some() && spec.mask == MaskKind::Window && !spec.reads.varied && !is_listed;
            let least = if stores_to_the_end { 0 } else { 2 * slots };
            let own = Sections::of(heads, 1, planned, head_bytes.max(1), least, l2 / 32);
            let room = match (spec.reads.varied, is_listed) {
                (true, _) => u64::MAX,
                (false, true) => l2.max(head_bytes.saturating_mul(LISTED_HEADS)),
                (false, false) => l2,
            };
            own.with_last_within(heads, head_bytes, room)
        }
    };
    let plan = if spec.reads.varied {
        // Tiles of keys are sorted by the tiles of queries that see them.
        let heads = problem.heads_kv.saturating_mul(splits);
        PlanBounds::backward(problem, traits).params(heads, slots, longest)?
    } else {
        PlanParams::default()
    };
    Ok(BwdParams {
        plan,
        shape: shape_params(problem)?,
        score,
        varlen: varlen_params(&problem.lengths)?,
        mods: mod_params(problem),
        m_blocks: count("tiles of a head", m_blocks)?,
        n_blocks: count("tiles of a head", n_blocks)?,
        head_splits: count("head_splits", splits)?,
        num_tiles: count("tiles", planned.saturating_mul(heads))?,
        heads_per_section: count("heads", order.heads)?,
        sections: count("sections", order.sections)?,
        stores_dq: i32::from(storing.is_some()),
        ..BwdParams::default()
    })
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Lengths, Mask, Pass};
    use fa_planner::plan::{PlanOptions, best};

    use super::*;

    /// Heads of a section, and those that are left for the last one.
    fn sections(lengths: Lengths) -> (i32, i32) {
        let mask = Mask::causal_window(255);
        let problem = Problem::square(8, 2048, 16, 64, mask, Dtype::Bf16).with_lengths(lengths);
        let options = PlanOptions::default().with_pass(Pass::BACKWARD);
        let spec = best(&problem, Arch::Sm90, &options).expect("a plan").spec;
        let own = params(&spec, &spec.traits(), &problem, (Arch::Sm90, 132), 1).expect("parameters");
        assert_eq!(own.stores_dq, 1, "{spec}");
        let heads = if spec.reads.varied { 16 } else { 8 * 16 };
        (own.heads_per_section, heads - own.sections * own.heads_per_section)
    }

    #[test]
    fn windows_of_equal_lengths_have_whole_sections_and_packed_ones_a_last_one() {
        let (heads, left) = sections(Lengths::uniform(8, 2048, 2048));
        assert!(left < heads, "{left} of {heads}");
        let (heads, left) = sections(Lengths::packed(8, 8 * 2048, 8 * 2048, 4096, 4096));
        assert!(left > heads, "{left} of {heads}");
    }
}
