//! `fa run`: attention on the tensors of a file.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use fa_attn::atomic_file::AtomicFile;
use fa_attn::{Call, Element, Engine, Tuning, TuningOutcome};
use fa_core::{Pass, Problem, TensorLayout};
use fa_cpu::compare::{self, Comparison};
use serde::Serialize;

use crate::append::Appended;
use crate::attention::{self, AnyInputs, Inputs, with_inputs};
use crate::compute::{self, Calls, Outputs};
use crate::flags::{AttentionArgs, Backend, CpuArgs};
use crate::safetensors::{self, Stored, TensorFile};
use crate::sequences::blank;
use crate::term::failure::{InputError, Verdict};
use crate::term::output::{self, si};
use crate::term::progress;
use clap::Args;

/// `fa run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct RunArgs {
    /// File with the tensors q, k, v (and dout with --backward), all f32, f16 or bf16; cu_seqlens_q,
    /// cu_seqlens_k, page_table and others beside them make the batch packed or the keys paged, k_new and
    /// v_new are appended first
    pub input: PathBuf,
    /// Where to write out and lse (with --backward also dq, dk, dv, and dsinks where there are sinks; the
    /// grown cache where keys were appended); replaced in one step when all is computed
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub attention: AttentionArgs,
    /// Also compute the gradients dq, dk, dv of dout
    #[arg(long)]
    pub backward: bool,
    /// Gradients with the same bits in every run, which on the GPU costs some speed
    #[arg(long, requires = "backward")]
    pub deterministic: bool,
    /// Which implementation computes
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: Backend,
    #[command(flatten)]
    pub cpu: CpuArgs,
    /// Measure the best few GPU kernels for this problem in the background, within half a minute a pass, and
    /// keep the winners for later runs
    #[arg(long)]
    pub tune: bool,
    /// Gone: what runs is shown, and plans for other GPUs are those of `fa plan`
    #[arg(long, hide = true)]
    pub arch: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

const RUN_EXAMPLES: &str = "\
Examples:
  fa run examples/minilm-layer0.safetensors -o out.safetensors
  fa run qkv.safetensors --causal --window 256,0 --layout bhsd -o out.safetensors
  fa run qkv.safetensors --causal --backward -o grads.safetensors --threads 8
  fa run qkv.safetensors --causal --backward --backend cuda --deterministic -o grads.safetensors
  fa run qkv.safetensors --causal --tune -o out.safetensors
  fa run examples/packed-causal.safetensors --causal --backward -o grads.safetensors
  fa run examples/decode-paged.safetensors --causal -o out.safetensors
  fa run examples/append-paged.safetensors --causal -o out.safetensors      new keys, rotary embedding

Shapes: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim], v [batch, seqlen_k, \
heads_kv, head_dim_v]; heads before seqlen with --layout bhsd. out has q's layout, lse is f32 [batch, \
heads_q, seqlen_q] (natural logarithm). Masks are aligned at the bottom right: query i sits on key i + \
seqlen_k - seqlen_q.

Tensors beside them, found by name:
  cu_seqlens_q, cu_seqlens_k   i32 [batch + 1], the sequences' starts: q (k and v) are then [total, heads, \
dim], lse [heads_q, total_q]
  seqused_q, seqused_k         i32 [batch], rows in use of each sequence (cache_seqlens is seqused_k)
  page_table                   i32 [batch, pages of a sequence]: k and v are then a cache [pages, page, \
heads_kv, dim], and cache_seqlens says how long each sequence is
  alibi_slopes                 f32 [heads_q] or [batch, heads_q]: scores lose slope times the distance from \
the diagonal
  sinks                        f32 [heads_q]: a logit of each row in the denominator; lse includes it
  k_new, v_new                 [batch, new, heads_kv, dim], or packed with cu_seqlens_k_new: appended to the \
cache k, v behind the cache_seqlens keys that it holds, before attention; the output file has k, v and \
cache_seqlens as they are then
  rotary_cos, rotary_sin       f32 or q's type [positions, rotary_dim / 2]: new keys are turned by their \
positions, and q, by those of the new keys under --causal or --window, else all by the first

Rows that belong to no sequence are written as out = 0, lse = -inf and gradients of 0.";

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    input: PathBuf,
    problem: Problem,
    softmax_scale: f64,
    layout: TensorLayout,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_plan: Option<CpuPlan>,
    /// What ran the forward; the backward ran on the same backend.
    #[serde(flatten)]
    engine: fa_attn::Report,
    /// The GPU kernel that ran the backward.
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel_backward: Option<String>,
    forward: Timing,
    /// The fastest of some more passes, where one takes little time.
    #[serde(skip_serializing_if = "Option::is_none")]
    forward_warm: Option<Timing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backward: Option<Timing>,
    /// What was appended to the cache before, where the file has new keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    appended: Option<AppendReport>,
    /// Against the input file's own `out`, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    difference_from_own_out: Option<Difference>,
    output: Option<PathBuf>,
    /// What --tune measured in this run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tuned: Vec<Tuned>,
}

/// What was appended to a cache.
#[derive(Debug, Serialize)]
struct AppendReport {
    /// New keys of all sequences.
    rows: usize,
    /// Elements of a row that were turned by its position.
    rotary_dim: Option<usize>,
    /// On a GPU with the copies of the cache.
    ms: f64,
}

/// What came of measuring kernels for a pass.
#[derive(Debug, Serialize)]
struct Tuned {
    /// `fwd` or `bwd`.
    kind: &'static str,
    /// The kernel of later runs.
    winner: Option<String>,
    /// The kernels tried, that of this run first.
    tried: Vec<Tried>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A kernel that was measured.
#[derive(Debug, Serialize)]
struct Tried {
    kernel: String,
    ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Tuned {
    fn of(outcome: &TuningOutcome) -> Tuned {
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
struct CpuPlan {
    tile_m: usize,
    tile_n: usize,
}

/// Of two outputs, without a verdict: the file's own may be the less exact of the two.
#[derive(Debug, Serialize)]
struct Difference {
    max_abs: f64,
    rms: f64,
    cosine: f64,
    /// `[batch, seq, head, dim]` of the largest difference.
    worst: Option<[usize; 4]>,
    /// Positions that are infinite or NaN in one and not in the same way in the other.
    mismatches: usize,
}

impl Difference {
    fn of(found: &Comparison) -> Difference {
        let Comparison { max_abs, rms, cosine, worst, mismatches, .. } = *found;
        Difference { max_abs, rms, cosine, worst, mismatches }
    }
}

#[derive(Debug, Serialize)]
struct Timing {
    ms: f64,
    gflops: f64,
}

impl Timing {
    fn new(time: Duration, flops: f64) -> Timing {
        let seconds = time.as_secs_f64();
        Timing { ms: seconds * 1e3, gflops: if seconds > 0.0 { flops / seconds * 1e-9 } else { 0.0 } }
    }
}

/// Time for passes after the first one.
const WARM: Duration = Duration::from_millis(6);

/// Operations of a pass that is short however long the first one was kept waiting.
const SMALL: f64 = 1e8;

/// The fastest of the passes that some milliseconds have room for, after a `first` one that took no longer or
/// of few operations.
fn warm(
    first: Duration,
    flops: f64,
    mut again: impl FnMut() -> anyhow::Result<Duration>,
) -> anyhow::Result<Option<Duration>> {
    const MOST: usize = 20;
    let (mut left, mut fastest) = (WARM, None::<Duration>);
    for _ in 0..MOST {
        if first > WARM && flops > SMALL || left.is_zero() {
            break;
        }
        let time = again()?;
        left = left.saturating_sub(time);
        fastest = Some(fastest.map_or(time, |known| known.min(time)));
    }
    Ok(fastest)
}

/// Runs the command.
///
/// # Errors
/// Bad input, an unwritable target, or what the backend reports.
pub fn command(args: &RunArgs) -> anyhow::Result<Verdict> {
    if let Some(arch) = &args.arch {
        let message =
            format!("fa run shows the kernel that runs here: `fa plan --arch {arch}` shows one for {arch}");
        return Err(InputError::Usage(message).into());
    }
    let file = TensorFile::open(&args.input)?;
    let target = args.output.as_deref().map(AtomicFile::probe).transpose().map_err(InputError::from)?;
    if let Some(target) = &target {
        refuse_same_file(&file, target)?;
    }
    let mut inputs = AnyInputs::read(&file, &args.attention, args.backward)?;
    let engine = progress::spinner("getting ready", || {
        let engine = compute::engine(args.backend, &args.cpu)?;
        if args.tune {
            engine.set_tuning(Tuning::ON_FIRST_USE).context("--tune")?;
        }
        anyhow::Ok(engine)
    })?;
    let appended = inputs.append(Some(&engine))?;
    with_inputs!(&inputs, inputs => compute(args, &file, target.as_ref(), (engine, appended), inputs))
}

/// The output would replace the only copy of the input.
fn refuse_same_file(input: &TensorFile, target: &AtomicFile) -> Result<(), InputError> {
    let same = match (input.path().canonicalize(), target.path().canonicalize()) {
        (Ok(input), Ok(target)) => input == target,
        _ => false,
    };
    if same {
        let reason = "it is the input file, whose tensors would be lost".to_owned();
        return Err(InputError::Target { path: target.path().to_owned(), reason });
    }
    Ok(())
}

fn compute<T: Element + Stored>(
    args: &RunArgs,
    file: &TensorFile,
    target: Option<&AtomicFile>,
    (engine, appended): (Engine, Option<Appended>),
    inputs: &Inputs<T>,
) -> anyhow::Result<Verdict> {
    let problem = inputs.problem;
    tracing::info!(?problem, layout = %inputs.layout, "computing");
    let backward = args.backward.then_some(Pass::Backward { deterministic: args.deterministic });
    let calls = progress::spinner("getting ready", || Calls::bind(&engine, &problem, backward))?;
    let mut outputs = Outputs::new(inputs);
    let flops = |work: fn(&Problem) -> f64| inputs.sequences.sum(&problem, work);
    let (forward_time, warm_time, backward_time) = progress::spinner("computing attention", || {
        let forward_time = calls.forward(inputs, &mut outputs)?;
        let warm_time =
            warm(forward_time, flops(Problem::flops_forward), || calls.forward(inputs, &mut outputs))?;
        anyhow::Ok((forward_time, warm_time, calls.backward(inputs, &mut outputs)?))
    })?;
    outputs.settle(inputs);
    let kernel_backward = calls.backward.as_ref().and_then(Call::spec).map(ToString::to_string);
    let mut report = Report {
        input: args.input.clone(),
        problem,
        softmax_scale: problem.scale(),
        layout: inputs.layout,
        cpu_plan: calls.forward.cpu_plan()?.map(|plan| CpuPlan { tile_m: plan.tile_m, tile_n: plan.tile_n }),
        engine: calls.forward.report(),
        kernel_backward,
        forward: Timing::new(forward_time, flops(Problem::flops_forward)),
        forward_warm: warm_time.map(|time| Timing::new(time, flops(Problem::flops_forward))),
        backward: backward_time.map(|time| Timing::new(time, flops(Problem::flops_backward))),
        appended: appended.map(|Appended { rows, rotary_dim, time }| AppendReport {
            rows,
            rotary_dim,
            ms: time.as_secs_f64() * 1e3,
        }),
        difference_from_own_out: difference_from_own_out(file, inputs, &outputs)?,
        output: target.map(|target| target.path().to_owned()),
        tuned: Vec::new(),
    };
    if let Some(target) = target {
        let metadata = metadata(&problem, inputs.layout, report.engine.backend);
        let mut tensors = outputs.tensors(&problem);
        tensors.extend(inputs.grown_tensors());
        target
            .write(|mut writer| safetensors::write(&mut writer, &tensors, &metadata))
            .map_err(InputError::from)?;
    }
    if args.tune {
        // The result is written: what is waited for is for later runs.
        let outcomes = progress::spinner("measuring kernels", || engine.finish_tuning());
        report.tuned = outcomes.iter().map(Tuned::of).collect();
    }
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report))?
    }
    if let Some(hint) = attention::metadata_hint(file, &problem) {
        output::note(&hint);
    }
    Ok(Verdict::Good)
}

fn difference_from_own_out<T: Element + Stored>(
    file: &TensorFile,
    inputs: &Inputs<T>,
    outputs: &Outputs<T>,
) -> anyhow::Result<Option<Difference>> {
    let shape = fa_cpu::check::out_shape(&inputs.problem);
    let [b, s, h, d] = shape;
    let stored = inputs.layout.shape(b, s, h, d);
    let rank = file.entry("q")?.shape.len();
    if !file.has("out") || file.entry("out")?.shape != stored[4 - rank..] {
        return Ok(None);
    }
    let ours = attention::to_bshd(&outputs.output.out.data, shape, inputs.layout);
    let mut theirs = attention::to_bshd(&file.read_f64("out")?, shape, inputs.layout);
    blank(&mut theirs, shape, TensorLayout::Bshd, inputs.sequences.q_rows.as_deref(), 0.0);
    let found = compare::compare::<T, T>(shape, inputs.problem.types.qkv, &ours, &theirs, None)?;
    Ok(Some(Difference::of(&found)))
}

/// The header's text entries, by which the file says what it holds.
fn metadata(problem: &Problem, layout: TensorLayout, backend: &str) -> BTreeMap<String, String> {
    let side = |side: Option<u32>| side.map_or("none".to_owned(), |n| n.to_string());
    let entries = [
        ("made_by", concat!("fa ", env!("CARGO_PKG_VERSION")).to_owned()),
        ("backend", backend.to_owned()),
        ("layout", layout.to_string()),
        ("causal", (problem.mask.right == Some(0)).to_string()),
        ("window_left", side(problem.mask.left)),
        ("window_right", side(problem.mask.right)),
        ("scale", problem.scale().to_string()),
        ("softcap", problem.score.softcap.map_or("none".to_owned(), |cap| cap.to_string())),
    ];
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn text(report: &Report) -> String {
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
    if let Some(AppendReport { rows, rotary_dim, ms }) = &report.appended {
        let turned = rotary_dim
            .map_or(String::new(), |dim| format!(", {dim} elements of keys and queries turned by position"));
        line("appended", format!("{rows} rows of keys and values{turned}, {}", si(ms * 1e-3, "s")));
    }
    let timing = |time: &Timing| format!("{}, {}", si(time.ms * 1e-3, "s"), si(time.gflops * 1e9, "FLOP/s"));
    let warm = report.forward_warm.as_ref();
    let warm = warm.map_or(String::new(), |warm| format!(" (cold; warm {})", timing(warm)));
    line("forward", timing(&report.forward) + &warm);
    if let Some(backward) = &report.backward {
        line("backward", timing(backward));
    }
    if let Some(found) = &report.difference_from_own_out {
        let place = if found.mismatches > 0 {
            format!(", NaN or infinity in other places at {} positions", found.mismatches)
        } else {
            String::new()
        };
        line(
            "own out",
            format!(
                "differs from the file's 'out' by at most {:.3e}, rms {:.3e}, cosine {:.9}{place}",
                found.max_abs, found.rms, found.cosine
            ),
        );
    }
    for Tuned { kind, winner, tried, error } in &report.tuned {
        let measured = tried.iter().filter(|tried| tried.ms.is_some()).count();
        let text = match (winner, error) {
            (Some(winner), None) => format!("{winner} is the fastest of {measured}, kept for later runs"),
            (_, Some(error)) => error.clone(),
            (None, None) => format!("{measured} kernels, no winner"),
        };
        line("tuned", format!("{kind}: {text}"));
    }
    match &report.output {
        Some(path) => line("wrote", path.display().to_string()),
        None => line("wrote", "nothing (-o FILE writes the result)".to_owned()),
    }
    text
}
