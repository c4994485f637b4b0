//! `fa validate --sanitize`: a small part of the grid under the tools of compute-sanitizer.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use fa_core::{Dtype, Family, Lengths, Mask, Pass, Problem, Types};
use fa_kernels::toolchain;

use serde::Serialize;

use super::args::ValidateArgs;
use super::cases::{self, BASE, Case, Placing};
use crate::cuda::Device;
use crate::record::{self, Provenance};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;

const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// A tool that takes longer is stopped; the cases are small, so it hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a tool found.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// The tool.
    pub tool: &'static str,
    /// Whether it found nothing.
    pub clean: bool,
    /// Its summary line.
    pub summary: String,
    /// The first lines about what it found.
    pub first: Vec<String>,
    /// Seconds that it took.
    pub seconds: f64,
}

/// The cases: small, and of every kind of tile, mask and placement.
pub fn cases(pass: Pass) -> Vec<Case> {
    let mut cases = Vec::new();
    let small = Problem {
        lengths: Lengths::uniform(1, BASE.lengths.max_q(), BASE.lengths.max_k()),
        heads_q: 2,
        heads_kv: 1,
        ..BASE
    };
    for (turn, (head_dim, head_dim_v)) in
        [(64, 64), (128, 128), (256, 256), (192, 128), (72, 40)].into_iter().enumerate()
    {
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(40, 9)] {
            let dtype = [Dtype::Bf16, Dtype::F16][turn % 2];
            let problem = Problem {
                lengths: Lengths::uniform(small.lengths.sequences(), 200, 333),
                head_dim,
                head_dim_v,
                mask,
                types: Types::same(dtype),
                ..small
            };
            let placing = if turn == 4 { Placing::Gap(8) } else { Placing::Bshd };
            let case = Case { placing, pass, ..cases::case("sanitize", problem) };
            if pass.is_backward() {
                cases.push(Case { pass: Pass::DETERMINISTIC_BACKWARD, ..case.clone() });
            }
            cases.push(case);
        }
    }
    cases
}

/// What is printed and recorded.
#[derive(Debug, Serialize)]
struct Report {
    kind: &'static str,
    passed: bool,
    #[serde(flatten)]
    provenance: Provenance,
    family: String,
    tools: Vec<Finding>,
}

/// Runs a worker on [`cases()`] under each tool.
///
/// # Errors
/// Without compute-sanitizer, or when it does not start.
pub fn command(
    args: &ValidateArgs,
    family: Family,
    worker: impl Fn() -> anyhow::Result<Command>,
) -> anyhow::Result<Verdict> {
    let sanitizer = find().ok_or_else(|| {
        InputError::Usage(
            "--sanitize needs compute-sanitizer, which comes with the CUDA toolkit: put it on PATH or set CUDA_HOME"
                .to_owned(),
        )
    })?;
    let mut tools = Vec::new();
    for tool in TOOLS {
        let plain = worker()?;
        let mut command = Command::new(&sanitizer);
        command.args(["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]);
        command.arg(plain.get_program()).args(plain.get_args());
        tools.push(run(tool, command)?);
    }
    let report = Report {
        kind: "sanitize",
        passed: tools.iter().all(|finding| finding.clean),
        provenance: Provenance::new(&Device::open()?)?,
        family: family.to_string(),
        tools,
    };
    if args.record {
        let name = format!("{}{}-{}.json", report.family, args.suffix(), report.provenance.gpu_slug());
        let path = record::write(&args.results, record::SANITIZED, &name, &output::json_text(&report)?)?;
        eprintln!("wrote {}", path.display());
    }
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report.tools))?;
    }
    Ok(if report.passed { Verdict::Good } else { Verdict::Bad })
}

fn find() -> Option<PathBuf> {
    let usual = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"];
    let usual = usual.map(|folder| PathBuf::from(folder).join("compute-sanitizer"));
    toolchain::find_tool("compute-sanitizer").or_else(|| usual.into_iter().find(|path| path.is_file()))
}

fn run(tool: &'static str, mut command: Command) -> anyhow::Result<Finding> {
    let start = Instant::now();
    let log = tempfile::NamedTempFile::new()?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(log.reopen()?)
        .stderr(log.reopen()?)
        .spawn()
        .context("compute-sanitizer does not start")?;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if start.elapsed() > PATIENCE => {
                child.kill()?;
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    let text = String::from_utf8_lossy(&std::fs::read(log.path())?).into_owned();
    let seconds = start.elapsed().as_secs_f64();
    let Some(status) = status else {
        let summary = format!("did not end within {} s", PATIENCE.as_secs());
        return Ok(Finding { tool, clean: false, summary, first: Vec::new(), seconds });
    };
    Ok(judge(tool, &text, status.success(), seconds))
}

fn judge(tool: &'static str, text: &str, success: bool, seconds: f64) -> Finding {
    let lines: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("=========")).map(str::trim).collect();
    let summary = lines.iter().rev().find(|line| line.contains("SUMMARY")).copied();
    let wrong = text.lines().filter(|line| line.contains("\"status\":\"failed\"")).count();
    let done = text.lines().filter(|line| line.contains("\"status\":\"passed\"")).count();
    let quiet = summary.is_some_and(|line| line.contains(": 0 "));
    let first = lines
        .iter()
        .filter(|line| !line.is_empty() && !line.contains("SUMMARY") && !line.contains("COMPUTE-SANITIZER"))
        .take(12)
        .map(|line| (*line).to_owned());
    Finding {
        tool,
        clean: quiet && success && wrong == 0 && done > 0,
        summary: format!("{done} cases right, {wrong} wrong; {}", summary.unwrap_or("no summary")),
        first: if quiet { Vec::new() } else { first.collect() },
        seconds,
    }
}

fn text(findings: &[Finding]) -> String {
    let mut table = output::table(&["tool", "verdict", "s", "summary"]);
    for finding in findings {
        let verdict = if finding.clean { "clean" } else { "NOT CLEAN" };
        let seconds = format!("{:.0}", finding.seconds);
        table.add_row([finding.tool, verdict, &seconds, &finding.summary]);
    }
    let mut text = output::table_text(&table);
    for finding in findings {
        for line in &finding.first {
            text += &format!("{}: {line}\n", finding.tool);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_read() {
        let done = "{\"done\":{\"status\":\"passed\"}}\n";
        let clean = format!("========= COMPUTE-SANITIZER\n{done}========= ERROR SUMMARY: 0 errors\n");
        assert!(judge("memcheck", &clean, true, 1.0).clean);
        assert!(!judge("memcheck", &clean, false, 1.0).clean);
        let race = "========= COMPUTE-SANITIZER\n========= Error: Race reported between Write and Read\n\
                    ========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n";
        let found = judge("racecheck", &format!("{done}{race}"), true, 1.0);
        assert!(!found.clean && found.first[0].contains("Race reported"));
        // Nothing ran: nothing is clean.
        assert!(!judge("memcheck", "========= ERROR SUMMARY: 0 errors\n", true, 1.0).clean);
    }
}
