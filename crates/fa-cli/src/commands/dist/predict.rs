//! `fa dist plan`: every scheme's predicted time.

use fa_core::Pass;
use fa_dist::Layout;
use fa_dist::cost::{Cost, rank};
use fa_planner::Mode;
use serde::Serialize;

use super::args::PlanArgs;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;

/// A scheme's prediction as JSON has it.
#[derive(Serialize)]
struct Row<'a> {
    pass: &'static str,
    #[serde(flatten)]
    cost: &'a Cost,
    share: f64,
}

/// Runs the command.
///
/// # Errors
/// A problem that contradicts itself, or that no kernel computes.
pub(super) fn plan(args: &PlanArgs) -> anyhow::Result<Verdict> {
    let problem = args.problem().map_err(InputError::Usage)?;
    problem.check()?;
    if args.batch == 0 || args.seqlen.q == 0 || args.seqlen.k == 0 {
        return Err(
            InputError::Usage("no queries or no keys: there is nothing to divide among GPUs".into()).into()
        );
    }
    let passes: &[Pass] = match args.mode.unwrap_or(Mode::Fwd) {
        Mode::Fwd => &[Pass::Forward],
        Mode::Bwd => &[Pass::BACKWARD],
        Mode::Both => &[Pass::Forward, Pass::BACKWARD],
    };
    // What balances a causal mask may not balance another.
    let layouts: &[Layout] = match (args.contiguous, problem.score.program) {
        (true, _) => &[Layout::Contiguous],
        (false, None) => &[Layout::Zigzag],
        (false, Some(_)) => &[Layout::Zigzag, Layout::Contiguous],
    };
    let (mut text, mut rows, mut fits) = (String::new(), Vec::new(), true);
    for &pass in passes {
        let found = rank(&problem, args.ranks, layouts, pass, args.machine())?;
        text += &format!("{} over {} GPUs ({}):\n{found}\n", pass.name(), args.ranks, args.arch);
        fits &= !found.plans.is_empty();
        for (_, cost) in &found.plans {
            let row = Row { pass: pass.name(), cost, share: cost.share(args.ranks) };
            rows.push(serde_json::to_value(&row)?);
        }
    }
    match args.json {
        true => output::print_json(&rows)?,
        false => output::print(&format!("{}\n", text.trim_end()))?,
    }
    Ok(if fits { Verdict::Good } else { Verdict::Bad })
}
