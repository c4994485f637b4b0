//! A small part of the grid under the tools of compute-sanitizer.

use std::io::{Seek, Write};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use fa_core::{Dtype, Family, Lengths, Mask, Pass, Problem, Types};
use fa_kernels::toolchain;

use serde::Serialize;
use serde_json::json;

use super::options::{Cases, Job, Options};
use crate::device;
use crate::error::{Context, Error, Result};
use crate::grid::{self, Action, Arrangement, BASE, Case, Extent};
use crate::random::Random;
use crate::record::Provenance;
use crate::sequences::{Ragged, Sequences};
use crate::worker::Program;

const TOOLS: [&str; 4] = ["memcheck", "racecheck", "initcheck", "synccheck"];

/// Time after which a tool counts as hung. It needs seconds, or minutes where the kernels are not in the
/// cache.
const PATIENCE: Duration = Duration::from_secs(300);

/// The result of a tool.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// The tool.
    pub tool: &'static str,
    /// Whether it found nothing.
    pub clean: bool,
    /// Its summary line.
    pub summary: String,
    /// The first lines of its findings.
    pub first: Vec<String>,
    /// Seconds that it took.
    pub seconds: f64,
}

/// The cases: small, and of every kind of tile, mask and placement.
pub fn cases(pass: Pass) -> Vec<Case> {
    let mut cases = Vec::new();
    let small =
        BASE.with_lengths(Lengths::uniform(1, BASE.lengths.max_q(), BASE.lengths.max_k())).with_heads(2, 1);
    for (turn, (head_dim, head_dim_v)) in
        [(64, 64), (128, 128), (256, 256), (192, 128), (72, 40)].into_iter().enumerate()
    {
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(40, 9)] {
            let dtype = [Dtype::Bf16, Dtype::F16][turn % 2];
            let problem = small
                .with_lengths(Lengths::uniform(small.lengths.sequences(), 200, 333))
                .with_head_dims(head_dim, head_dim_v)
                .with_mask(mask)
                .with_types(Types::same(dtype));
            let arrangement = if turn == 4 { Arrangement::Gap(8) } else { Arrangement::Bshd };
            let case = Case { arrangement, pass, ..grid::case("sanitize", problem) };
            if pass.is_backward() {
                cases.push(Case { pass: Pass::DETERMINISTIC_BACKWARD, ..case.clone() });
            }
            cases.push(case);
        }
    }
    if pass == Pass::Forward {
        cases.extend(wide());
    }
    let small = |case: &Case| {
        let Problem { heads_q, head_dim, mask, .. } = case.problem;
        let pairs = case.sequences().pairs(&mask) * (heads_q * head_dim) as f64;
        pairs < 4e8 && case.sequences().count() < 50 && case.action == Action::Once
    };
    let all = match pass {
        Pass::Forward => {
            [grid::serving(Extent::Quick, 2), grid::codes(Extent::Quick, 2), grid::fp8(2)].concat()
        }
        Pass::Backward { .. } => grid::serving_gradients(Extent::Quick, 2),
    };
    // A few of every group: the tools slow kernels down a hundredfold.
    let mut taken = std::collections::HashMap::new();
    cases.extend(all.into_iter().filter(small).filter(|case| {
        let count: &mut usize = taken.entry(case.group).or_default();
        *count += 1;
        *count % 4 == 1 && *count < 32
    }));
    cases
}

/// Heads wider than most, and keys that begin with their values.
fn wide() -> impl Iterator<Item = Case> {
    let latent = BASE.with_heads(16, 1).with_latent(true).with_softmax_scale(Some(0.1));
    let wide = BASE.with_heads(2, 1);
    [(latent, (576, 512), (3, 200)), (latent, (512, 512), (1, 333)), (wide, (512, 512), (100, 150))]
        .into_iter()
        .flat_map(|(problem, dims, (queries, keys))| {
            let problem = problem.with_head_dims(dims.0, dims.1);
            let dense = problem.with_lengths(Lengths::uniform(1, queries, keys));
            let pages = Ragged::paged(&[keys, 7], 16, 1, &mut Random::new(1));
            let cache = Sequences { q: Ragged::uniform(2, queries), k: pages };
            [grid::case("sanitize", dense), grid::case_of("sanitize", "paged", problem, cache)]
        })
}

/// The results of the tools.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `sanitize`.
    pub kind: &'static str,
    /// Whether no tool found anything.
    pub passed: bool,
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// The family of the kernels.
    pub family: String,
    /// The result of each tool.
    pub tools: Vec<Finding>,
}

/// Runs a worker on [`cases()`] under each tool; of `options`, the family, the pass and the filter count.
///
/// # Errors
/// Without a GPU or compute-sanitizer, or when it does not start.
pub fn run(options: &Options, program: &Program) -> Result<Report> {
    let family = options.family.unwrap_or(Family::native(device::open()?.arch()));
    let sanitizer = find().ok_or_else(|| {
        Error::Request(
            "--sanitize needs compute-sanitizer, which comes with the CUDA toolkit: put it on PATH or set \
             CUDA_HOME"
                .to_owned(),
        )
    })?;
    let options = Options { family: Some(family), cases: Cases::Sanitize, ..options.clone() };
    let job = Job { options, finished: Vec::new() };
    let mut tools = Vec::new();
    for tool in TOOLS {
        let mut command = Command::new(&sanitizer);
        command.args(["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]);
        command.arg(&program.executable).args(&program.arguments);
        tools.push(run_tool(tool, command, &job)?);
    }
    Ok(Report {
        kind: "sanitize",
        passed: tools.iter().all(|finding| finding.clean),
        provenance: Provenance::new(&device::open()?)?,
        family: family.to_string(),
        tools,
    })
}

fn find() -> Option<PathBuf> {
    let usual = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"];
    let usual = usual.map(|folder| PathBuf::from(folder).join("compute-sanitizer"));
    toolchain::find_tool("compute-sanitizer").or_else(|| usual.into_iter().find(|path| path.is_file()))
}

fn run_tool(tool: &'static str, mut command: Command, job: &Job) -> Result<Finding> {
    let start = Instant::now();
    let log = tempfile::NamedTempFile::new()?;
    let mut input = tempfile::tempfile()?;
    writeln!(input, "{}", json!({ "validate": job }))?;
    input.rewind()?;
    let mut child = command
        .stdin(input)
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
        // A tool that ran nothing is not clean.
        assert!(!judge("memcheck", "========= ERROR SUMMARY: 0 errors\n", true, 1.0).clean);
    }
}
