//! `fa build --all-configs`: what the planner predicts of every configuration, and what the compiler makes of
//! it.

use fa_core::{Arch, Family, Pass};
use fa_lab::configs::{self, Built, NEAR_MISS};
use fa_planner::Mode;
use fa_planner::report::PlanFamily;
use serde::Serialize;

use super::args::BuildArgs;
use crate::flags::pass_of;
use crate::term::destinations::Destinations;
use crate::term::failure::Verdict;
use crate::term::{output, progress};

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    compiler: String,
    summaries: Vec<Summary>,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    arch: Arch,
    /// `fwd` or `bwd`.
    pass: &'static str,
    #[serde(flatten)]
    built: Built,
}

/// The configurations of one architecture, pass and problem.
#[derive(Debug, Serialize)]
struct Summary {
    arch: Arch,
    pass: &'static str,
    /// Head dims and mask.
    problem: String,
    /// Configurations that the planner says fit.
    fit: usize,
    /// Of those, how many compile cleanly.
    clean: usize,
    /// Configurations that it rejects for registers by little, and how many of them compile cleanly.
    near_misses: usize,
    near_misses_clean: usize,
}

/// Runs the command: a bad verdict when a configuration that fits does not compile cleanly.
///
/// # Errors
/// Without a compiler, for head dims or families that an architecture has no kernels for, and an unwritable
/// target.
pub(crate) fn command(args: &BuildArgs) -> anyhow::Result<Verdict> {
    let destinations = Destinations::probe(args.json.as_deref(), None, &[])?;
    let archs = if args.arch.is_empty() { &[Arch::Sm90][..] } else { &args.arch };
    let passes = match args.mode {
        Mode::Fwd => vec![pass_of(Pass::Forward, args.deterministic)?],
        Mode::Bwd => vec![pass_of(Pass::BACKWARD, args.deterministic)?],
        Mode::Both => vec![Pass::Forward, pass_of(Pass::BACKWARD, args.deterministic)?],
    };
    let mut lists = Vec::new();
    for &arch in archs {
        let family = args.family.map_or(Family::native(arch), PlanFamily::kernels);
        for &pass in &passes {
            lists.push((arch, pass.short_name(), configs::list(&args.headdim, pass, family, arch)?));
        }
    }
    let compiler = args.compiler()?;
    let mut report = Report { compiler: compiler.version()?, summaries: Vec::new(), rows: Vec::new() };
    for (arch, pass, configs) in lists {
        let found = configs::compile(&configs, arch, &compiler, &mut progress::steps());
        let row = |(config, found): (&configs::Config, _)| Row { arch, pass, built: config.built(found) };
        report.rows.extend(configs.iter().zip(&found).map(row));
    }
    report.sum_up();
    destinations.write(&report, || Ok(String::new()), || report.text())?;
    let clean = report.summaries.iter().all(|summary| summary.clean == summary.fit);
    Ok(if clean { Verdict::Good } else { Verdict::Bad })
}

impl Report {
    fn sum_up(&mut self) {
        for Row { arch, pass, built } in &self.rows {
            let of_the_row = |summary: &Summary| {
                (summary.arch, summary.pass, &summary.problem) == (*arch, *pass, &built.problem)
            };
            if !self.summaries.last().is_some_and(of_the_row) {
                let (arch, pass, problem) = (*arch, *pass, built.problem.clone());
                let (fit, clean, near_misses, near_misses_clean) = (0, 0, 0, 0);
                self.summaries.push(Summary {
                    arch,
                    pass,
                    problem,
                    fit,
                    clean,
                    near_misses,
                    near_misses_clean,
                });
            }
            let Some(summary) = self.summaries.last_mut() else { continue };
            let clean = usize::from(built.fault.is_none());
            if built.fits {
                summary.fit += 1;
                summary.clean += clean;
            } else {
                summary.near_misses += 1;
                summary.near_misses_clean += clean;
            }
        }
    }

    fn text(&self) -> String {
        let mut table = output::table(&[
            "configuration",
            "arch",
            "plan",
            "regs planned",
            "regs",
            "spill B",
            "smem B",
            "not clean for",
        ]);
        for Row { arch, built, .. } in &self.rows {
            let number = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
            table.add_row([
                built.kernel.clone(),
                arch.to_string(),
                if built.fits { "fits" } else { "rejected" }.to_owned(),
                format!("{} of {}", built.registers_planned, built.register_limit),
                number(built.registers),
                number(built.spills),
                built.smem.to_string(),
                built.verdict(),
            ]);
        }
        let mut text = output::table_text(&table) + "\n";
        let mut table =
            output::table(&["arch", "pass", "problem", "fit", "clean", "near misses", "clean nevertheless"]);
        for summary in &self.summaries {
            table.add_row([
                summary.arch.to_string(),
                summary.pass.to_owned(),
                summary.problem.clone(),
                summary.fit.to_string(),
                summary.clean.to_string(),
                summary.near_misses.to_string(),
                summary.near_misses_clean.to_string(),
            ]);
        }
        text += &output::table_text(&table);
        let sum = |count: fn(&Summary) -> usize| self.summaries.iter().map(count).sum::<usize>();
        text += &format!(
            "{} of {} configurations that fit by plan compile cleanly by {}; near misses are beyond the \
             register limit by at most {:.0} %, or known to spill\n",
            sum(|summary| summary.clean),
            sum(|summary| summary.fit),
            self.compiler,
            NEAR_MISS * 100.0
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_are_summed_up_and_faults_named() {
        let row = |problem: &str, fits, spills: Option<u32>, fault: Option<&str>| Row {
            arch: Arch::Sm90,
            pass: "fwd",
            built: Built {
                problem: problem.to_owned(),
                kernel: format!("kernel of {problem}"),
                fits,
                registers_planned: 200,
                register_limit: 240,
                registers: spills.map(|_| 168),
                spills,
                fault: fault.map(str::to_owned),
                smem: 1024,
            },
        };
        let rows = vec![
            row("hd64 full", true, Some(0), None),
            row("hd64 full", true, Some(24), Some("24 bytes stored")),
            row("hd64 full", false, Some(0), None),
            row("hd64 causal", false, None, Some("error: too many registers")),
        ];
        let mut report = Report { compiler: "nvrtc 13.0".to_owned(), summaries: Vec::new(), rows };
        report.sum_up();
        let counts = |s: &Summary| [s.fit, s.clean, s.near_misses, s.near_misses_clean];
        assert_eq!(report.summaries.iter().map(counts).collect::<Vec<_>>(), [[2, 1, 1, 1], [0, 0, 1, 0]]);
        let text = report.text();
        for part in ["24 B of spills", "error: too many registers", "1 of 2 configurations", "200 of 240"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
