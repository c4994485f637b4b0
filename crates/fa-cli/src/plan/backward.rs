//! The backward by the SM90 guide's model: what fits, in the guide's order.

use std::fmt::Write;

use fa_core::{Arch, Problem};
use fa_planner::sm90::bwd::BwdConfig;
use fa_planner::sm90::candidates::BwdSpec;
use fa_planner::sm90::reject::{Explain, Rejected};
use fa_planner::sm90::search::{self, Tiles};
use fa_planner::sm90::why::{self, Constraint};
use fa_planner::{HeadDims, Mode};
use serde::Serialize;

use crate::failure::InputError;
use crate::output;
use crate::plan::forward::kib;

/// What was tried for a backward.
#[derive(Clone, Debug)]
pub struct Backward {
    configs: Vec<BwdConfig>,
    explain: Explain<BwdSpec>,
}

/// For JSON and RON.
#[derive(Debug, Serialize)]
pub struct BackwardReport<'a> {
    /// Candidates tried.
    tried: usize,
    /// Of these, how many fit.
    fit: usize,
    configs: &'a [BwdConfig],
    explain: &'a Explain<BwdSpec>,
}

/// The answer to `--why`.
#[derive(Debug, Serialize)]
pub struct BackwardWhy {
    query: String,
    feasible: Vec<BwdConfig>,
    rejected: Vec<Rejected<BwdSpec>>,
}

impl Backward {
    /// Tries everything for the problem's head dims.
    ///
    /// # Errors
    /// [`InputError::Usage`] for another architecture than SM90 and for head dims out of range.
    pub fn search(problem: &Problem, arch: Arch) -> Result<Backward, InputError> {
        if arch != Arch::Sm90 {
            let message =
                format!("the backward is planned for sm90, not for {arch}: use --arch sm90 or --mode fwd");
            return Err(InputError::Usage(message));
        }
        let found = search::search(head_dims(problem)?, Mode::Bwd, &Tiles::default())
            .map_err(|e| InputError::Usage(e.to_string()))?;
        let explain =
            found.explain.and_then(|explain| explain.bwd).unwrap_or(Explain::of(found.bwd.len(), &[]));
        Ok(Backward { configs: found.bwd, explain })
    }

    /// What fits, in the guide's order.
    pub fn configs(&self) -> &[BwdConfig] {
        &self.configs
    }

    /// For JSON and RON, at most `limit` configurations.
    pub fn report(&self, limit: usize) -> BackwardReport<'_> {
        let shown = self.configs.len().min(limit);
        BackwardReport {
            tried: self.explain.candidates,
            fit: self.configs.len(),
            configs: &self.configs[..shown],
            explain: &self.explain,
        }
    }

    /// For people.
    pub fn text(&self, limit: usize) -> String {
        let mut text = format!(
            "backward  {} of {} candidates fit (the guide's model, in its order)\n",
            self.configs.len(),
            self.explain.candidates
        );
        if !self.configs.is_empty() {
            text.push('\n');
            text += &table(&self.configs[..self.configs.len().min(limit)]);
            text.push('\n');
        }
        for (name, limit) in self.explain.limits() {
            if let Some(nearest) = &limit.nearest {
                let Rejected { spec, reason } = nearest;
                writeln!(text, "rejected  {} by {name}, nearest {spec}: {reason}", limit.rejected)
                    .expect("writing to a string cannot fail");
            }
        }
        text
    }
}

/// Looks at the candidates that meet every condition of `query`.
///
/// # Errors
/// [`InputError::Usage`] for a query that cannot be read or selects nothing.
pub fn why(problem: &Problem, query: &str) -> Result<BackwardWhy, InputError> {
    let usage = |e: why::WhyError| InputError::Usage(e.to_string());
    let constraints: Vec<Constraint> =
        query.split(',').map(|part| part.trim().parse().map_err(usage)).collect::<Result<_, _>>()?;
    let found = why::why(head_dims(problem)?, Mode::Bwd, &constraints).map_err(usage)?;
    let (feasible, rejected) = found.bwd.map_or((Vec::new(), Vec::new()), |o| (o.feasible, o.rejected));
    Ok(BackwardWhy { query: query.to_owned(), feasible, rejected })
}

impl BackwardWhy {
    /// For people.
    pub fn text(&self) -> String {
        let mut text = format!(
            "why       {}: {} fit, {} do not\n",
            self.query,
            self.feasible.len(),
            self.rejected.len()
        );
        if !self.feasible.is_empty() {
            text += &table(&self.feasible);
        }
        for Rejected { spec, reason } in &self.rejected {
            writeln!(text, "rejected  {spec}: {reason}").expect("writing to a string cannot fail");
        }
        text
    }
}

fn head_dims(problem: &Problem) -> Result<HeadDims, InputError> {
    let dim =
        |n: usize| u32::try_from(n).map_err(|_| InputError::Usage(format!("head dim {n} is out of range")));
    Ok(HeadDims { head_dim: dim(problem.head_dim)?, head_dim_v: dim(problem.head_dim_v)? })
}

fn table(configs: &[BwdConfig]) -> String {
    let mut table = output::table(&[
        "#",
        "tile_m",
        "tile_n",
        "wg",
        "swap",
        "atoms SdP,dKV,dQ",
        "dK/dV from",
        "stages Q,dO,PdS",
        "regs",
        "SMEM KiB",
        "traffic/elem",
    ]);
    for (rank, c) in configs.iter().enumerate() {
        let swaps = [("SdP", c.sdp_swap_ab), ("dKV", c.dkv_swap_ab), ("dQ", c.dq_swap_ab)];
        let swaps: Vec<&str> = swaps.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect();
        table.add_row([
            (rank + 1).to_string(),
            c.tile_m.to_string(),
            c.tile_n.to_string(),
            c.num_wg.to_string(),
            if swaps.is_empty() { "-".to_owned() } else { swaps.join(",") },
            format!("{},{},{}", c.atom_layout_m_sdp, c.atom_layout_n_dkv, c.atom_layout_m_dq),
            if c.mma_dkv_is_rs { "regs" } else { "smem" }.to_owned(),
            format!("{},{},{}", c.q_stage, c.do_stage, c.pds_stage),
            format!("{}/{}", c.total_regs, c.reg_limit),
            format!("{:.1}", kib(c.smem_bytes)),
            format!("{:.2}", c.traffic_per_element()),
        ]);
    }
    output::table_text(&table)
}
