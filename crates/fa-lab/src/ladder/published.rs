//! Rates that others publish of their kernels' steps, by board, beside what is planned there.
//!
//! They are other kernels' on GPUs that none of ours has run on: what can be compared is a plan's rate, as a
//! ratio, and that none lies above the board's peak.

use std::fmt::Write;

use fa_core::{Board, Dtype, Kernel, KernelSpec, Mask, Problem, Sm80Fwd};
use fa_planner::kernels::sm100_fwd;
use fa_planner::plan::{PlanError, PlanOptions, best, plan_spec};
use serde::Serialize;

use super::figures::TILES;
use super::sm80;

/// cuTile's tuned forward on a B300 by sequence length, on the problems of [`TILES`].
const B300: [(usize, f64); 5] =
    [(1024, 465.0), (2048, 770.0), (4096, 999.0), (8192, 1159.0), (16384, 1254.0)];

/// A published rate beside the plan for the same problem on the same board.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Published {
    /// The board.
    pub board: &'static str,
    /// Sequence length.
    pub seqlen: usize,
    /// The step of the published ladder.
    pub step: String,
    /// Its TFLOP/s.
    pub published: f64,
    /// The kernel planned: ours of the same step, or the planner's choice.
    pub kernel: String,
    /// Its predicted TFLOP/s.
    pub planned: f64,
}

impl Published {
    /// What is planned over what is published.
    pub fn ratio(&self) -> f64 {
        self.planned / self.published
    }
}

fn board(name: &str) -> Board {
    name.parse().expect("a test parses every name")
}

/// `spec` with one stage, or with one CTA on an SM.
fn smaller(spec: &KernelSpec, one_stage: bool) -> KernelSpec {
    let Kernel::Sm80Fwd(kernel) = &spec.kernel else { return spec.clone() };
    let kernel = match one_stage {
        true => Sm80Fwd { stages: 1, ..kernel.clone() },
        false => Sm80Fwd { blocks_per_sm: 1, ..kernel.clone() },
    };
    KernelSpec { kernel: Kernel::Sm80Fwd(kernel), ..spec.clone() }
}

/// Every published rate beside its plan.
///
/// # Errors
/// Where the planner has no kernel for a step.
pub fn rows() -> Result<Vec<Published>, PlanError> {
    let mut rows = Vec::new();
    for (name, ladder) in [("a10g", sm80::memory()), ("spark", sm80::arithmetic())] {
        let Board { name, arch, limits, .. } = board(name);
        let options = PlanOptions::default().with_board(Some(limits));
        for (step, published) in ladder.steps.iter().zip(&ladder.published) {
            let (Some(published), Ok(specs)) = (*published, &step.specs) else { continue };
            for spec in specs {
                // These SMs have 100 KB: two CTAs of 64 x 64 have room for one stage each. A step that turns
                // the stages is planned with one CTA, one that turns the CTAs with one stage.
                let fits = |spec: &KernelSpec| plan_spec(&ladder.problem, spec, arch, &options).ok();
                let plan = fits(spec).or_else(|| fits(&smaller(spec, name == "spark")));
                let Some(plan) = plan else { continue };
                let (seqlen, step) = (ladder.problem.lengths.max_k(), step.name.clone());
                let (kernel, planned) = (plan.spec.to_string(), plan.cost.tflops);
                rows.push(Published { board: name, seqlen, step, published, kernel, planned });
            }
        }
        let (step, published) = ladder.peer.map_or_else(
            || {
                (
                    "the planner's choice".to_owned(),
                    ladder.published.iter().flatten().copied().fold(0.0, f64::max),
                )
            },
            |(_, rate)| ("SDPA (FlashAttention-2)".to_owned(), rate),
        );
        let best = best(&ladder.problem, arch, &options)?;
        let (kernel, planned) = (best.spec.to_string(), best.cost.tflops);
        let seqlen = ladder.problem.lengths.max_k();
        rows.push(Published { board: name, seqlen, step, published, kernel, planned });
    }
    let tuned = TILES.map(|(seqlen, rates)| (seqlen, rates[5]));
    for (name, rates) in [("b200", tuned), ("b300", B300)] {
        let Board { name, arch, limits, .. } = board(name);
        for (seqlen, published) in rates {
            let problem = Problem::square(4, seqlen, 32, 128, Mask::CAUSAL, Dtype::F16);
            let set = sm100_fwd::explore(&problem, arch, None, Some(limits))?;
            let (kernel, planned) =
                set.plans.first().map_or((String::new(), 0.0), |best| (best.tile.name(), best.cost.tflops));
            rows.push(Published { board: name, seqlen, step: "tuned".into(), published, kernel, planned });
            let options = PlanOptions::default().with_board(Some(limits));
            let best = best(&problem, arch, &options)?;
            let (kernel, planned) = (best.spec.to_string(), best.cost.tflops);
            let step = "tuned, by mma.sync".to_owned();
            rows.push(Published { board: name, seqlen, step, published, kernel, planned });
        }
    }
    Ok(rows)
}

/// The rows as a table of Markdown.
pub fn table(rows: &[Published]) -> String {
    let head = "| board | N | step | published | planned here | ratio | kernel planned |";
    let mut text = format!("{head}\n|---|--:|---|--:|--:|--:|---|\n");
    for row in rows {
        let Published { board, seqlen, step, published, kernel, planned } = row;
        let ratio = row.ratio();
        writeln!(
            text,
            "| {board} | {seqlen} | {step} | {published} | {planned:.1} | {ratio:.2} | `{kernel}` |"
        )
        .expect("writing to a string cannot fail");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_published_rate_and_no_plan_lies_above_a_boards_peak() {
        let rows = rows().expect("plans");
        assert_eq!(rows.len(), 5 + 7 + 10 + 10, "{rows:?}");
        for row in &rows {
            let peak = board(row.board).limits.peak_tensor_flops() / 1e12;
            assert!(row.published < peak && row.planned < peak && row.planned > 0.0, "{row:?} of {peak}");
        }
        // What the playbook's "vs Spark" column says of the Spark at 16k.
        assert!(1254.0 / 14.2 < board("spark").limits.peak_tensor_flops() / 1e12);
    }

    #[test]
    fn the_document_has_the_rows() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sources.md");
        let text = std::fs::read_to_string(path).expect("docs/sources.md");
        let table = table(&rows().expect("plans"));
        assert!(text.contains(&table), "docs/sources.md has another table than the planner gives:\n{table}");
    }
}
