//! `fa run`: attention on the tensors of a file.

mod report;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::slice;
use std::time::Duration;

use anyhow::Context;
use fa_attn::atomic_file::AtomicFile;
use fa_attn::{Call, Element, Engine, RotaryPairs, Tuning};
use fa_core::{Pass, Problem, TensorLayout};
use fa_cpu::compare;

use self::report::{AppendReport, CpuPlan, Difference, Report, Timing, Tuned, text};
use crate::append::Appended;
use crate::attention::{self, AnyInputs, Inputs, with_inputs};
use crate::compute::{self, Calls, Outputs};
use crate::flags::{self, AttentionArgs, Backend, CpuArgs};
use crate::safetensors::{self, Stored, TensorFile};
use crate::sequences::blank;
use crate::term::destinations::target;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress;
use clap::Args;

/// `fa run`.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// File with the tensors q, k, v (and dout with --backward), all f32, f16 or bf16, or q, k and v F8_E4M3;
    /// cu_seqlens_q, cu_seqlens_k, page_table, indices and others beside them make the batch packed, the keys
    /// paged or named one by one, k_new and v_new are appended first
    pub input: PathBuf,
    /// Where to write out and lse (with --backward also dq, dk, dv, and dsinks where there are sinks; the
    /// grown cache where keys were appended); replaced in one step when all is computed
    #[arg(short, long, value_name = "FILE", value_parser = flags::results())]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub attention: AttentionArgs,
    /// Also compute the gradients dq, dk, dv of dout
    #[arg(long)]
    pub backward: bool,
    /// Deterministic gradients, with the same bits in every run; somewhat slower on the GPU
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
  fa run latents.safetensors --latent --scale 0.0721688 --causal -o out.safetensors
  fa run sparse.safetensors --latent --scale 0.0721688 -o out.safetensors     indices, packed rows
  fa run qkv.safetensors --score-mod \"array bias: f32[_, _] grad; s + bias[q, k]\" -o out.safetensors

Shapes: q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim], v [batch, seqlen_k, \
heads_kv, head_dim_v]; heads before seqlen with --layout bhsd. out has q's layout, lse is f32 [batch, \
heads_q, seqlen_q] (natural logarithm). Masks are aligned at the bottom right: query i sits on key i + \
seqlen_k - seqlen_q.

With --latent (MLA), v holds the latents with which every key begins, and k the columns behind them: q is \
[.., head_dim_v + k's], in that order, and --scale is that of the heads before absorption, as 192^-0.5 = \
0.0721688 for DeepSeek. In the place of k and v, kv holds packed rows of 512 latents, U8 or F8_E4M3 \
[pages, page, 1, bytes of a row]: 656 (codes, four f32 scales, 64 columns of bf16), 584 (with e8m0 \
scales behind the rows \
of the page) or 576 (codes times k_descale, f32 [1]); they become q's type.

Tensors beside them, found by name:
  cu_seqlens_q, cu_seqlens_k   i32 [batch + 1], the sequences' starts: q (k and v) are then [total, heads, \
dim], lse [heads_q, total_q]
  seqused_q, seqused_k         i32 [batch], rows in use of each sequence (cache_seqlens is seqused_k)
  page_table                   i32 [batch, pages of a sequence]: k and v are then a cache [pages, page, \
heads_kv, dim], and cache_seqlens says how long each sequence is
  indices                      i32 [total_q, most]: rows of the cache k, v [pages, page, heads_kv, dim] that \
each query sees (sparse attention), counted over its pages; others than its rows name none. q is then \
[total_q, heads, dim], and topk_length, i32 [total_q], says how many entries count [default: all]
  alibi_slopes                 f32 [heads_q] or [batch, heads_q]: scores lose slope times the distance from \
the diagonal
  sinks                        f32 [heads_q]: a logit of each row in the denominator; lse includes it
  k_descale, v_descale         f32 [heads_kv], [batch, heads_kv] or one for each row of each head, in the \
shape of k without dim: k and v are F8_E4M3, I8, or U8 of half as many columns (int4, two codes to a byte, \
the first in the lower half), and each value is its code times this [default: 1]
  q_descale                    f32 [heads_kv] or [batch, heads_kv]: q is F8_E4M3 as k and v are
  k_new, v_new                 [batch, new, heads_kv, dim], or packed with cu_seqlens_k_new: appended to the \
cache k, v behind the cache_seqlens keys that it holds, before attention; the output file has k, v and \
cache_seqlens as they are then
  rotary_cos, rotary_sin       f32 or q's type [positions, rotary_dim / 2]: new keys are turned by their \
positions, and q, by those of the new keys under --causal or --window, else all by the first
  arrays and scalars of --mask-mod and --score-mod, by their names: a scalar is a tensor of one element, \
bits are U32 words; with --backward, an array NAME declared with `grad` has its gradient in dNAME, f32

Rows that belong to no sequence are written as out = 0, lse = -inf and gradients of 0.";

/// Time for passes after the first one.
const WARM: Duration = Duration::from_millis(6);

/// Operations below which a pass counts as short, however long the first one took.
const SMALL: f64 = 1e8;

/// The fastest of the passes that fit into some milliseconds, after a `first` one that took no longer or has
/// few operations.
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
pub(crate) fn command(args: &RunArgs) -> anyhow::Result<Verdict> {
    if let Some(arch) = &args.arch {
        let message =
            format!("fa run shows the kernel that runs here: `fa plan --arch {arch}` shows one for {arch}");
        return Err(InputError::Usage(message).into());
    }
    let file = TensorFile::open(&args.input)?;
    let target = args.output.as_deref().map(|path| target(path, slice::from_ref(&args.input))).transpose()?;
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
    let calls = progress::spinner("getting ready", || Calls::bind(&engine, &inputs.computed, backward))?;
    let mut outputs = Outputs::new(inputs)?;
    let flops = |work: fn(&Problem) -> f64| inputs.sequences.sum(&inputs.computed, work);
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
        appended: appended.map(|Appended { rows, rotary, time }| AppendReport {
            rows,
            rotary_dim: rotary.map(|rotary| rotary.dim),
            rotary_interleaved: rotary.map(|rotary| rotary.pairs == RotaryPairs::Neighbours),
            ms: time.as_secs_f64() * 1e3,
        }),
        difference_from_own_out: difference_from_own_out(file, inputs, &outputs)?,
        output: target.map(|target| target.path().to_owned()),
        tuned: Vec::new(),
    };
    if let Some(target) = target {
        let metadata = metadata(&problem, inputs.layout, report.engine.backend);
        let mut tensors = outputs.tensors(inputs);
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
    if let Some(hint) = attention::metadata_hint(file, &problem, &args.attention) {
        output::note(&hint);
    }
    let unread: Vec<&str> = file.never_asked().into_iter().filter(|name| !RESULTS.contains(name)).collect();
    if !unread.is_empty() {
        let names = unread.join(", ");
        output::note(&format!("not read: {names} (`fa run --help` lists the tensors that are)"));
    }
    if file.has("out") && report.difference_from_own_out.is_none() {
        let (theirs, ours) = (&file.entry("out")?.shape, stored_out_shape(file, inputs)?);
        output::note(&format!("not compared: the file's 'out' has shape {theirs:?}, the output {ours:?}"));
    }
    Ok(Verdict::Good)
}

/// What a file of a layer may hold for others: results, and what `--backward` reads.
const RESULTS: [&str; 7] = ["out", "lse", "dout", "dq", "dk", "dv", "dsinks"];

/// The shape of `out` in a file such as the input.
fn stored_out_shape<T: Element>(file: &TensorFile, inputs: &Inputs<T>) -> anyhow::Result<Vec<usize>> {
    let [b, s, h, d] = fa_cpu::check::out_shape(&inputs.problem);
    let rank = file.entry("q")?.shape.len();
    Ok(inputs.layout.shape(b, s, h, d)[4 - rank..].to_vec())
}

/// How far the output is from the file's own; `None` where it has none of this shape.
fn difference_from_own_out<T: Element + Stored>(
    file: &TensorFile,
    inputs: &Inputs<T>,
    outputs: &Outputs<T>,
) -> anyhow::Result<Option<Difference>> {
    if !file.has("out") || file.entry("out")?.shape != stored_out_shape(file, inputs)? {
        return Ok(None);
    }
    let shape = fa_cpu::check::out_shape(&inputs.problem);
    let ours = attention::to_bshd(&outputs.output.out.data, shape, inputs.layout);
    let mut theirs = attention::to_bshd(&file.read_f64("out")?, shape, inputs.layout);
    blank(&mut theirs, shape, TensorLayout::Bshd, inputs.sequences.q_rows.as_deref(), 0.0);
    let found = compare::compare::<T, T>(shape, inputs.problem.types.wide(), &ours, &theirs, None)?;
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
    let moved = Some(("query_offset", problem.mask.offset.to_string())).filter(|_| problem.mask.offset != 0);
    let own = problem.score.program.map(|program| ("program", program.text().to_owned()));
    entries.into_iter().chain(moved).chain(own).map(|(key, value)| (key.to_owned(), value)).collect()
}
