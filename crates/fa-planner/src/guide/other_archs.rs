//! The same search for the architectures that the guide does not cover: tiles by the planner's own account
//! and cost model.

use std::fmt::Write;

use fa_core::{Arch, Dtype, Kernel, Mask, Pass, Problem};
use serde::{Deserialize, Serialize};

use crate::account::Reason;
use crate::head_dims::HeadDims;
use crate::kernels::sm100_fwd::{self as sm100, Sm100Rejected};
use crate::plan::{self, PlanError, PlanOptions, RejectedSpec};
use crate::table::Table;
use crate::tally::{Tally, tally};

use super::mode::Mode;

/// What is listed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// The architecture searched for.
    pub arch: Arch,
    /// Head dim of Q and K.
    pub head_dim: u32,
    /// Head dim of V.
    pub head_dim_v: u32,
    /// Forward tiles, by predicted time, best first.
    pub fwd: Vec<Row>,
    /// Backward tiles, by predicted time, best first.
    pub bwd: Vec<BwdRow>,
    /// What each limit rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<Explain>,
}

/// What each limit rejected, by pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Explain {
    /// Forward tiles.
    pub fwd: Vec<Limit>,
    /// Backward tiles.
    pub bwd: Vec<Limit>,
}

/// One feasible tile of the forward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Query rows of a CTA.
    pub tile_m: u32,
    /// Keys per step.
    pub tile_n: u32,
    /// Warps of a CTA.
    pub num_warps: u32,
    /// K/V buffers in flight.
    pub stages: u32,
    /// Q fragments live in registers (SM80-class only).
    pub q_in_regs: bool,
    /// Resident CTAs per SM.
    pub blocks_per_sm: u32,
    /// Predicted registers of a thread that does softmax.
    pub regs: u32,
    /// Bytes of shared memory.
    pub smem_bytes: u32,
    /// Tensor memory columns allocated; 0 where there is none.
    pub tmem_columns: u32,
    /// Predicted 10^12 operations per second on [`problem`].
    pub tflops: f64,
}

/// One feasible tile of the backward, which mma.sync kernels compute on all of these architectures.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BwdRow {
    /// Queries per step.
    pub tile_m: u32,
    /// Keys of a CTA.
    pub tile_n: u32,
    /// Warps of a CTA.
    pub num_warps: u32,
    /// Q buffers in flight.
    pub q_stages: u32,
    /// dO buffers in flight.
    pub do_stages: u32,
    /// Warps along tile_m in S and dP.
    pub atom_layout_m_sdp: u32,
    /// Warps along tile_n in dK and dV.
    pub atom_layout_n_dkv: u32,
    /// Warps along tile_m in dQ.
    pub atom_layout_m_dq: u32,
    /// Resident CTAs per SM.
    pub blocks_per_sm: u32,
    /// Predicted registers of a thread.
    pub regs: u32,
    /// Bytes of shared memory.
    pub smem_bytes: u32,
    /// Predicted 10^12 operations per second on [`problem`].
    pub tflops: f64,
}

/// What one limit rejected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Its name.
    pub limit: String,
    /// How many candidates it rejected.
    pub rejected: usize,
    /// The candidate that misses it by least.
    pub nearest: String,
    /// What that one needs.
    pub need: Option<u32>,
    /// What there is.
    pub have: Option<u32>,
}

/// The problem that tiles are ranked by: long, without a mask.
pub const fn problem(dims: HeadDims) -> Problem {
    let square = Problem::square(4, 4096, 16, dims.head_dim as usize, Mask::FULL, Dtype::Bf16);
    square.with_head_dim_v(dims.head_dim_v as usize)
}

/// The tiles of the passes that fit, less those whose sides are not in the lists.
///
/// # Errors
/// Head dims that no kernel has tiles for.
pub fn search(
    dims: HeadDims,
    mode: Mode,
    arch: Arch,
    tile_m: Option<&[u32]>,
    tile_n: Option<&[u32]>,
) -> Result<Found, PlanError> {
    let listed = |m: u32, n: u32| {
        tile_m.is_none_or(|list| list.contains(&m)) && tile_n.is_none_or(|list| list.contains(&n))
    };
    let problem = problem(dims);
    let (mut fwd, mut bwd, mut explain) = (Vec::new(), Vec::new(), Explain::default());
    if mode != Mode::Bwd && arch.has_tcgen05() {
        let set = sm100::explore(&problem, arch, None, None)?;
        fwd.extend(set.plans.iter().map(sm100_row).filter(|row| listed(row.tile_m, row.tile_n)));
        let rejected = set.rejected.iter().filter(|miss| listed(miss.tile.tile_m(), miss.tile.tile_n));
        explain.fwd = limits(rejected.map(|miss| (miss, &miss.reason)), shape_name);
    } else if mode != Mode::Bwd {
        let set = plan::explore(&problem, arch, &PlanOptions::default())?;
        fwd.extend(set.plans.iter().filter_map(sm80_row).filter(|row| listed(row.tile_m, row.tile_n)));
        explain.fwd = limits(listed_specs(&set.rejected, listed), |miss| miss.spec.to_string());
    }
    if mode != Mode::Fwd {
        let pass = Pass::BACKWARD;
        let set = plan::explore(&problem, arch, &PlanOptions::default().with_pass(pass))?;
        bwd.extend(set.plans.iter().filter_map(bwd_row).filter(|row| listed(row.tile_m, row.tile_n)));
        explain.bwd = limits(listed_specs(&set.rejected, listed), |miss| miss.spec.to_string());
    }
    let HeadDims { head_dim, head_dim_v } = dims;
    Ok(Found { arch, head_dim, head_dim_v, fwd, bwd, explain: Some(explain) })
}

fn bwd_row(plan: &plan::Plan) -> Option<BwdRow> {
    let Kernel::Sm80Bwd(kernel) = &plan.spec.kernel else { return None };
    Some(BwdRow {
        tile_m: kernel.tile_m,
        tile_n: kernel.tile_n,
        num_warps: kernel.num_warps,
        q_stages: kernel.q_stages,
        do_stages: kernel.do_stages,
        atom_layout_m_sdp: kernel.atom_layout_m_sdp,
        atom_layout_n_dkv: kernel.atom_layout_n_dkv,
        atom_layout_m_dq: kernel.atom_layout_m_dq,
        blocks_per_sm: plan.blocks_per_sm,
        regs: plan.regs.total,
        smem_bytes: plan.smem.total,
        tflops: plan.cost.tflops,
    })
}

fn sm80_row(plan: &plan::Plan) -> Option<Row> {
    let Kernel::Sm80Fwd(kernel) = &plan.spec.kernel else { return None };
    Some(Row {
        tile_m: kernel.tile_m,
        tile_n: kernel.tile_n,
        num_warps: kernel.num_warps,
        stages: kernel.stages,
        q_in_regs: kernel.q_in_regs,
        blocks_per_sm: plan.blocks_per_sm,
        regs: plan.regs.total,
        smem_bytes: plan.smem.total,
        tmem_columns: 0,
        tflops: plan.cost.tflops,
    })
}

fn sm100_row(plan: &sm100::Sm100Plan) -> Row {
    Row {
        tile_m: plan.tile_m,
        tile_n: plan.tile.tile_n,
        num_warps: plan.threads / 32,
        stages: plan.tile.kv_stages,
        q_in_regs: false,
        blocks_per_sm: 1,
        regs: plan.roles.iter().find(|role| role.name == "softmax").map_or(0, |role| role.regs),
        smem_bytes: plan.smem.total,
        tmem_columns: plan.tmem.allocated,
        tflops: plan.cost.tflops,
    }
}

/// The rejected kernels whose tiles are listed.
fn listed_specs(
    rejected: &[RejectedSpec],
    listed: impl Fn(u32, u32) -> bool,
) -> impl Iterator<Item = (&RejectedSpec, &Reason)> {
    let tile_is_listed = move |miss: &&RejectedSpec| {
        let (tile_m, tile_n) = miss.spec.tile();
        listed(tile_m, tile_n)
    };
    rejected.iter().filter(tile_is_listed).map(|miss| (miss, &miss.reason))
}

fn shape_name(miss: &Sm100Rejected) -> String {
    let tile = &miss.tile;
    format!("{}x{}, {} stages", tile.tile_m(), tile.tile_n, tile.kv_stages)
}

/// What each limit rejected, with the name of the nearest miss.
fn limits<'a, T: 'a>(
    misses: impl Iterator<Item = (&'a T, &'a Reason)>,
    name: impl Fn(&T) -> String,
) -> Vec<Limit> {
    let misses = misses.map(|(miss, reason)| (reason.kind(), reason.excess(), (miss, reason)));
    let report = |Tally { limit, rejected, nearest: (miss, reason) }: Tally<&str, (&T, &Reason)>| {
        let (need, have) = reason.need_have().unzip();
        Limit { limit: limit.into(), rejected, nearest: format!("{}: {reason}", name(miss)), need, have }
    };
    tally(misses).into_iter().map(report).collect()
}

impl Found {
    /// The first `n` rows of each pass as a table, and what was rejected with `explain`, or the nearest
    /// misses where nothing fits.
    pub fn table(&self, mode: Mode, n: usize, explain: bool) -> String {
        let mut text = String::new();
        let limits = self.explain.clone().unwrap_or_default();
        if mode != Mode::Bwd {
            let rows = self.fwd.iter().map(row_cells).collect();
            text += &self.pass("forward", FWD_HEADER, rows, &limits.fwd, n, explain);
        }
        if mode == Mode::Both {
            text.push('\n');
        }
        if mode != Mode::Fwd {
            let rows = self.bwd.iter().map(bwd_cells).collect();
            text += &self.pass("backward", BWD_HEADER, rows, &limits.bwd, n, explain);
        }
        text
    }

    /// The text of one pass; `rows` are all that fit.
    fn pass<const N: usize>(
        &self,
        name: &str,
        header: [&'static str; N],
        mut rows: Vec<[String; N]>,
        limits: &[Limit],
        n: usize,
        explain: bool,
    ) -> String {
        let dims = HeadDims { head_dim: self.head_dim, head_dim_v: self.head_dim_v };
        let fit = rows.len();
        let candidates = fit + limits.iter().map(|limit| limit.rejected).sum::<usize>();
        let mut text = format!("{} {name}, head dim {dims}: ", self.arch);
        if candidates == 0 {
            text.push_str("none of the tiles that are tried has these sides\n");
            return text;
        }
        if fit == 0 {
            let _ = writeln!(text, "no tile fits; the limits rejected all {candidates} candidates:");
        } else {
            rows.truncate(n);
            let shown = if rows.len() < fit { format!(", the best {}", rows.len()) } else { String::new() };
            let _ = writeln!(text, "{fit} of {candidates} candidates fit{shown}:\n");
            let _ = write!(text, "{}", Table { header, rows });
            let _ =
                writeln!(text, "\nTFLOP/s as predicted for bf16, batch 4, 16 heads, 4096 x 4096, no mask.");
            if name == "forward" && self.fwd.iter().any(|row| row.tmem_columns > 0) {
                text.push_str(
                    "Forwards by tcgen05 were assembled and emulated, never run on a GPU: their rates are \
                     assumptions.\n",
                );
            }
            if !explain || limits.is_empty() {
                return text;
            }
            text.push_str("\nRejected, by the first limit broken:\n");
        }
        for Limit { limit, rejected, nearest, .. } in limits {
            let _ = writeln!(text, "  {limit:<9}  {rejected:>5}  nearest: {nearest}");
        }
        text
    }
}

const FWD_HEADER: [&str; 10] = [
    "tile_m",
    "tile_n",
    "warps",
    "stages",
    "Q in regs",
    "blocks/SM",
    "regs",
    "SMEM KiB",
    "TMEM columns",
    "TFLOP/s",
];

fn row_cells(row: &Row) -> [String; 10] {
    [
        row.tile_m.to_string(),
        row.tile_n.to_string(),
        row.num_warps.to_string(),
        row.stages.to_string(),
        if row.q_in_regs { "T" } else { "F" }.into(),
        row.blocks_per_sm.to_string(),
        row.regs.to_string(),
        format!("{:.1}", f64::from(row.smem_bytes) / 1024.0),
        if row.tmem_columns > 0 { row.tmem_columns.to_string() } else { "-".into() },
        format!("{:.0}", row.tflops),
    ]
}

const BWD_HEADER: [&str; 10] = [
    "tile_m",
    "tile_n",
    "warps",
    "stages Q",
    "dO",
    "atoms SdP/dKV/dQ",
    "blocks/SM",
    "regs",
    "SMEM KiB",
    "TFLOP/s",
];

fn bwd_cells(row: &BwdRow) -> [String; 10] {
    [
        row.tile_m.to_string(),
        row.tile_n.to_string(),
        row.num_warps.to_string(),
        row.q_stages.to_string(),
        row.do_stages.to_string(),
        format!("{}/{}/{}", row.atom_layout_m_sdp, row.atom_layout_n_dkv, row.atom_layout_m_dq),
        row.blocks_per_sm.to_string(),
        row.regs.to_string(),
        format!("{:.1}", f64::from(row.smem_bytes) / 1024.0),
        format!("{:.0}", row.tflops),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_architectures_list_what_fits_and_account_for_the_rest() {
        for arch in Arch::ALL.into_iter().filter(|arch| !arch.has_wgmma()) {
            let found = search(HeadDims::square(128), Mode::Both, arch, None, None).expect("tiles for 128");
            assert!(!found.fwd.is_empty(), "{arch}");
            assert!(found.fwd.iter().all(|row| row.smem_bytes <= arch.limits().smem_per_block), "{arch}");
            assert_eq!(found.fwd.iter().all(|row| row.tmem_columns > 0), arch.has_tcgen05());
            assert!(found.fwd.is_sorted_by(|a, b| a.tflops >= b.tflops), "{arch}");
            let ron = ron::to_string(&found).expect("plain data");
            assert_eq!(ron::from_str(&ron), Ok(found.clone()));
            let narrow = search(HeadDims::square(128), Mode::Both, arch, Some(&[128]), Some(&[64]))
                .expect("tiles for 128");
            assert!(narrow.fwd.iter().all(|row| (row.tile_m, row.tile_n) == (128, 64)));
            assert!(narrow.fwd.len() < found.fwd.len());
            assert!(!found.bwd.is_empty(), "{arch}");
            assert!(found.bwd.iter().all(|row| row.smem_bytes <= arch.limits().smem_per_block), "{arch}");
            assert!(found.bwd.is_sorted_by(|a, b| a.tflops >= b.tflops), "{arch}");
            assert!(narrow.bwd.iter().all(|row| (row.tile_m, row.tile_n) == (128, 64)));
            let backward = search(HeadDims::square(128), Mode::Bwd, arch, None, None).expect("tiles for 128");
            assert!(backward.fwd.is_empty() && backward.bwd == found.bwd);
        }
        assert!(search(HeadDims::square(100), Mode::Fwd, Arch::Sm80, None, None).is_err());
    }
}
