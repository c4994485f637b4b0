//! What `fa run` says of a run: as JSON and as text.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use fa_attn::TuningOutcome;
use fa_core::{Problem, TensorLayout, counted};
use fa_cpu::compare::Comparison;
use serde::Serialize;

use crate::attention;
use crate::term::output::si;

/// What is printed.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub input: PathBuf,
    pub problem: Problem,
    pub softmax_scale: f64,
    pub layout: TensorLayout,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_plan: Option<CpuPlan>,
    /// What ran the forward; the backward ran on the same backend.
    #[serde(flatten)]
    pub engine: fa_attn::Report,
    /// The GPU kernel that ran the backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_backward: Option<String>,
    pub forward: Timing,
    /// The fastest of some more passes, where one takes little time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forward_warm: Option<Timing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backward: Option<Timing>,
    /// What was appended to the cache before, where the file has new keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub appended: Option<AppendReport>,
    /// Against the input file's own `out`, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference_from_own_out: Option<Difference>,
    pub output: Option<PathBuf>,
    /// What --tune measured in this run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tuned: Vec<Tuned>,
}

/// What was appended to a cache.
#[derive(Debug, Serialize)]
pub(super) struct AppendReport {
    /// New keys of all sequences.
    pub rows: usize,
    /// Elements of a row that were turned by its position.
    pub rotary_dim: Option<usize>,
    /// Whether they were turned as pairs of neighbours instead of pairs from two halves.
    pub rotary_interleaved: Option<bool>,
    /// On a GPU with the copies of the cache.
    pub ms: f64,
}

/// What came of measuring kernels for a pass.
#[derive(Debug, Serialize)]
pub(super) struct Tuned {
    /// `fwd` or `bwd`.
    pub kind: &'static str,
    /// The kernel of later runs.
    pub winner: Option<String>,
    /// The kernels tried, that of this run first.
    pub tried: Vec<Tried>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A kernel that was measured.
#[derive(Debug, Serialize)]
pub(super) struct Tried {
    pub kernel: String,
    pub ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Tuned {
    pub(crate) fn of(outcome: &TuningOutcome) -> Tuned {
        let tried = |tried: &fa_attn::Tried| Tried {
            kernel: tried.spec.to_string(),
            ms: tried.ms,
            error: tried.error.clone(),
        };
        Tuned {
            kind: outcome.pass.short_name(),
            winner: outcome.winner.as_ref().map(ToString::to_string),
            tried: outcome.tried.iter().map(tried).collect(),
            error: outcome.error.as_ref().map(ToString::to_string),
        }
    }
}

/// How the CPU computes.
#[derive(Debug, Serialize)]
pub(super) struct CpuPlan {
    pub tile_m: usize,
    pub tile_n: usize,
}

/// Of two outputs, without a verdict: the file's own may be the less exact of the two.
#[derive(Debug, Serialize)]
pub(super) struct Difference {
    pub max_abs: f64,
    pub rms: f64,
    pub cosine: f64,
    /// `[batch, seq, head, dim]` of the largest difference.
    pub worst: Option<[usize; 4]>,
    /// Positions that are infinite or NaN in one and not in the same way in the other.
    pub mismatches: usize,
}

impl Difference {
    pub(crate) fn of(found: &Comparison) -> Difference {
        let Comparison { max_abs, rms, cosine, worst, mismatches, .. } = *found;
        Difference { max_abs, rms, cosine, worst, mismatches }
    }

    fn text(&self) -> String {
        let Difference { max_abs, rms, cosine, worst, mismatches } = self;
        let positions = counted(*mismatches, "position");
        match (worst, mismatches) {
            (Some(_), 0) => format!(
                "out differs from the input file's 'out' by at most {max_abs:.3e}, rms {rms:.3e}, cosine \
                 {cosine:.9}"
            ),
            (Some(_), _) => format!(
                "where both are finite, out differs from the input file's 'out' by at most {max_abs:.3e}, \
                 rms {rms:.3e}, cosine {cosine:.9}; NaN or infinity in one alone at {positions}"
            ),
            (None, 0) => "neither out nor the input file's 'out' has a finite value".to_owned(),
            (None, _) => format!(
                "out and the input file's 'out' are nowhere both finite; NaN or infinity in one alone at \
                 {positions}"
            ),
        }
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Timing {
    pub ms: f64,
    pub gflops: f64,
}

impl Timing {
    pub(crate) fn new(time: Duration, flops: f64) -> Timing {
        let seconds = time.as_secs_f64();
        Timing { ms: seconds * 1e3, gflops: if seconds > 0.0 { flops / seconds * 1e-9 } else { 0.0 } }
    }
}

/// The report in lines of a name and what is said of it.
pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        writeln!(text, "{name:<10}{value}").expect("writing to a string cannot fail");
    };
    line("input", format!("{} ({})", report.input.display(), report.layout));
    line("problem", attention::describe(&report.problem));
    let tiles = report
        .cpu_plan
        .as_ref()
        .map_or(String::new(), |plan| format!(", tiles of {} queries x {} keys", plan.tile_m, plan.tile_n));
    line("backend", report.engine.text() + &tiles);
    if let Some(kernel) = &report.engine.kernel {
        line("kernel", kernel.clone());
    }
    if let Some(kernel) = &report.kernel_backward {
        line("", format!("backward: {kernel}"));
    }
    if let Some(reason) = &report.engine.gpu_passed_over {
        line("", format!("the GPU is passed over: {reason}"));
    }
    if let Some(AppendReport { rows, rotary_dim, rotary_interleaved, ms }) = &report.appended {
        let turned = rotary_dim.zip(*rotary_interleaved).map_or(String::new(), |(dim, interleaved)| {
            let pairs = if interleaved { "of neighbours" } else { "from two halves" };
            format!(", {dim} elements of keys and queries turned by position as pairs {pairs}")
        });
        line(
            "appended",
            format!("{} of keys and values{turned}, {}", counted(*rows, "row"), si(ms * 1e-3, "s")),
        );
    }
    let timing = |time: &Timing| format!("{}, {}", si(time.ms * 1e-3, "s"), si(time.gflops * 1e9, "FLOP/s"));
    let warm = report.forward_warm.as_ref();
    let warm = warm.map_or(String::new(), |warm| format!(" (cold; warm {})", timing(warm)));
    line("forward", timing(&report.forward) + &warm);
    if let Some(backward) = &report.backward {
        line("backward", timing(backward));
    }
    if let Some(found) = &report.difference_from_own_out {
        line("compared", found.text());
    }
    for Tuned { kind, winner, tried, error } in &report.tuned {
        let measured = tried.iter().filter(|tried| tried.ms.is_some()).count();
        let text = match (winner, error) {
            (Some(winner), None) => format!("{winner} is the fastest of {measured}, kept for later runs"),
            (_, Some(error)) => error.clone(),
            (None, None) => format!("{}, no winner", counted(measured, "kernel")),
        };
        line("tuned", format!("{kind}: {text}"));
    }
    match &report.output {
        Some(path) => line("wrote", path.display().to_string()),
        None => line("wrote", "nothing (-o FILE writes the result)".to_owned()),
    }
    text
}
