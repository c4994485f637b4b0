//! `fa check`: are two outputs equal within tolerance?

mod pair;
mod references;
mod report;

use std::path::PathBuf;

use fa_core::{Dtype, Problem, TensorLayout};
use fa_cpu::compare;

use self::pair::{Pair, lse_dtype};
use self::references::{Reference, References, hold_to_worst, references};
use self::report::{Report, Row, RuleName, TO_EXACT, text};
use crate::attention::{self, AnyInputs, with_inputs};
use crate::flags::AttentionArgs;
use crate::packed_rows::PackedRows;
use crate::safetensors::TensorFile;
use crate::sequences::{Sequences, blank};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress;
use clap::Args;

/// `fa check`.
#[derive(Debug, Args)]
#[command(after_help = CHECK_EXAMPLES)]
pub(crate) struct CheckArgs {
    /// The output to judge
    pub a: PathBuf,
    /// The output to judge it by; without it A is judged by its inputs alone
    pub b: Option<PathBuf>,
    /// Compare this tensor (may be repeated) [default: those of out, lse, dq, dk, dv, dsinks that A and B
    /// have]
    #[arg(long = "tensor", value_name = "NAME")]
    pub tensors: Vec<String>,
    /// File with q, k, v (and dout): both outputs are judged against an f64 computation on them [default: A
    /// or B, when one of them holds q, k and v]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["atol", "rtol"])]
    pub inputs: Option<PathBuf>,
    #[command(flatten)]
    pub attention: AttentionArgs,
    /// Judge by |a - b| <= atol + rtol |b| instead; no inputs are used
    #[arg(long, value_name = "X", value_parser = parse_tolerance)]
    pub atol: Option<f64>,
    /// See --atol
    #[arg(long, value_name = "X", value_parser = parse_tolerance)]
    pub rtol: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

const CHECK_EXAMPLES: &str = "\
Examples:
  fa check out.safetensors examples/minilm-layer0.safetensors      inputs found in the second file
  fa check out.safetensors --inputs qkv.safetensors --causal       one output, by an f64 computation
  fa check a.safetensors b.safetensors --inputs qkv.safetensors --causal
  fa check a.safetensors b.safetensors --atol 1e-3 --rtol 1e-3

The rule: max|out - ref| <= 2 max|low - ref| + one rounding step of the output type at the magnitude of ref, \
where ref is computed in f64 from the inputs and low is the same formula in the inputs' precision (for f32 \
at least 32 rounding steps); both outputs must satisfy it. Without inputs and tolerances, A may differ from \
B by 3 rounding steps of a 16-bit type, 65 of f32. Where tolerances are given, max abs and tolerance are \
those of the element that takes the largest share of its own. LSEs may differ by 1e-3 or, from 2048 on, \
8 rounding steps of f32 (by 1e-5 of their magnitude where inputs are f32). \
Infinities and NaN must be at the same places.
Exit code 1 when the outputs differ beyond tolerance.";

/// The tensors that `fa run` writes.
const OUTPUTS: [&str; 6] = ["out", "lse", "dq", "dk", "dv", "dsinks"];

/// Runs the command.
///
/// # Errors
/// Bad input; a difference is a verdict, not an error.
pub(crate) fn command(args: &CheckArgs) -> anyhow::Result<Verdict> {
    let a = TensorFile::open(&args.a)?;
    let b = args.b.as_deref().map(TensorFile::open).transpose()?;
    let outputs: Vec<&TensorFile> = [&a].into_iter().chain(&b).collect();
    let names = names(args, &outputs)?;
    let entries = || names.iter().flat_map(|name| outputs.iter().map(|file| file.entry(name)));
    let elements: usize = entries().flatten().map(|entry| entry.shape.iter().product::<usize>()).sum();
    let need = 8 * elements as u64;
    attention::check_free(
        need,
        "the tensors as f64",
        "compare one at a time, by --tensor, or parts of them",
    )?;
    let mut pairs: Vec<Pair> = names
        .iter()
        .map(|name| Pair::read(&args.attention, &a, b.as_ref(), name))
        .collect::<Result<_, _>>()?;
    let given = args.atol.is_some() || args.rtol.is_some();
    let separate = args.inputs.as_deref().map(TensorFile::open).transpose()?;
    let inputs = separate
        .as_ref()
        .or_else(|| outputs.iter().rev().copied().find(|file| holds_inputs(file)))
        .filter(|_| !given);
    if inputs.is_none() && b.is_none() {
        let message = "one output is judged by its inputs: give --inputs FILE with q, k and v, or a second \
                       output to compare it with";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    if inputs.is_none() && args.attention.describes_a_problem() {
        let message = "--causal, --scale and the other flags of a problem tell how outputs follow from \
                       inputs, and no inputs are used: give --inputs FILE";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let (rule, problem, rows) = match inputs {
        Some(file) => {
            let (problem, rows) = judge_by_inputs(file, &args.attention, &outputs, &mut pairs)?;
            (RuleName::F64OfInputs, Some(problem), rows)
        }
        None if given => {
            let (atol, rtol) = (args.atol.unwrap_or(0.0), args.rtol.unwrap_or(0.0));
            (RuleName::Given, None, judge_by_tolerances(&pairs, atol, rtol)?)
        }
        None => (RuleName::RoundingOfType, None, judge_by_rounding(&pairs, lse_dtype(&outputs))?),
    };
    let passed = rows.iter().all(|row| row.found.passed());
    let off = [("a", TO_EXACT[0]), ("b", TO_EXACT[1])]
        .into_iter()
        .filter(|(_, compared)| rows.iter().any(|row| row.compared == *compared && !row.found.passed()))
        .map(|(side, _)| side)
        .collect();
    let report = Report {
        a: args.a.clone(),
        b: args.b.clone(),
        rule,
        inputs: inputs.map(|file| file.path().to_owned()),
        problem,
        rows,
        passed,
        off,
    };
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&text(&report))?
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

fn holds_inputs(file: &TensorFile) -> bool {
    file.has("q") && (PackedRows::are_in(file) || ["k", "v"].iter().all(|name| file.has(name)))
}

/// The tensors to compare.
fn names(args: &CheckArgs, files: &[&TensorFile]) -> Result<Vec<String>, InputError> {
    if !args.tensors.is_empty() {
        return Ok(args.tensors.clone());
    }
    let in_all = |name: &&str| files.iter().all(|file| file.has(name));
    let common: Vec<String> = OUTPUTS.into_iter().filter(in_all).map(str::to_owned).collect();
    if !common.is_empty() {
        return Ok(common);
    }
    let outputs = OUTPUTS.join(", ");
    Err(InputError::Usage(match files {
        [a, b] => {
            let inputs = files.iter().find(|file| holds_inputs(file));
            let advice = inputs.map_or(String::new(), |inputs| {
                let path = inputs.path().display();
                format!("; to judge one output by q, k and v of {path} give --inputs {path} and no B")
            });
            format!(
                "A and B have none of {outputs} in common: A has {}; B has {}; --tensor NAME compares \
                 others{advice}",
                a.named(),
                b.named()
            )
        }
        files => {
            let has: Vec<String> = files.iter().map(|file| file.named()).collect();
            format!("A has none of {outputs}: it has {}", has.join(", "))
        }
    }))
}

fn judge_by_inputs(
    file: &TensorFile,
    args: &AttentionArgs,
    outputs: &[&TensorFile],
    pairs: &mut [Pair],
) -> anyhow::Result<(Problem, Vec<Row>)> {
    let gradients = ["dq", "dk", "dv", "dsinks"];
    let backward = pairs.iter().any(|pair| gradients.contains(&pair.name.as_str()));
    let mut inputs = AnyInputs::read(file, args, backward)?;
    inputs.append(None)?;
    let posed = with_inputs!(&inputs, inputs => inputs.problem);
    // An output's metadata names the options that it was computed with, an input's those that it was made
    // for.
    let mut asked: Vec<&TensorFile> = Vec::new();
    for one in outputs.iter().copied().chain([file]) {
        if asked.iter().all(|other| other.path() != one.path()) {
            asked.push(one);
        }
    }
    let hints = asked.into_iter().filter_map(|file| attention::metadata_hint(file, &posed, args));
    hints.for_each(|hint| output::note(&hint));
    for pair in pairs.iter() {
        let Some(need) = shape_in(&posed, &pair.name).filter(|need| *need != pair.shape) else { continue };
        // LSE has no axis of the head dim, which stands first as 1.
        let (axes, from) = if pair.is_lse() { ("heads, seqlen_q", 1) } else { ("seqlen, heads, dim", 0) };
        let paths: Vec<String> = outputs.iter().map(|file| file.path().display().to_string()).collect();
        let need = format!(
            "so it is as [batch, {axes}] in {}, but the inputs of {} give {:?}: give the inputs that {} \
             computed from",
            paths.join(" and "),
            file.path().display(),
            &need[from..],
            if paths.len() == 1 { "it was" } else { "they were" }
        );
        return Err(
            InputError::Shape { name: pair.name.clone(), got: pair.shape[from..].to_vec(), need }.into()
        );
    }
    let (problem, sequences) = with_inputs!(&inputs, inputs => (inputs.problem, &inputs.sequences));
    let mut references =
        progress::spinner("computing in f64", || with_inputs!(&inputs, inputs => references(inputs)))?;
    // The contents of rows that belong to no sequence do not count.
    for pair in pairs.iter_mut() {
        for values in [&mut pair.a].into_iter().chain(&mut pair.b) {
            blank_unused(&pair.name, values, pair.shape, sequences);
        }
    }
    let judge = |references: &mut References| -> anyhow::Result<Vec<Row>> {
        for pair in pairs.iter() {
            let Some(reference) = references.get_mut(pair.name.as_str()) else { continue };
            for values in [&mut reference.exact, &mut reference.low] {
                blank_unused(&pair.name, values, pair.shape, sequences);
            }
        }
        rows_by(references, pairs, problem.types.wide())
    };
    let rows = judge(&mut references)?;
    let beyond = |row: &Row| gradients.contains(&row.tensor.as_str()) && !row.found.passed();
    if !rows.iter().any(beyond) {
        return Ok((problem, rows));
    }
    progress::spinner(
        "computing gradients at other scales",
        || with_inputs!(&inputs, inputs => hold_to_worst(inputs, &mut references)),
    )?;
    Ok((problem, judge(&mut references)?))
}

/// Each pair by its reference.
fn rows_by(references: &References, pairs: &[Pair], dtype: Dtype) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for pair in pairs {
        let Some(Reference { exact, low, noise }) = references.get(pair.name.as_str()) else {
            return Err(InputError::Usage(format!(
                "tensor '{}' is not an output of attention, so it cannot be computed from the inputs: \
                 give --atol or --rtol",
                pair.name
            ))
            .into());
        };
        for (compared, values) in TO_EXACT.into_iter().zip([&pair.a].into_iter().chain(&pair.b)) {
            let found = pair.compare(dtype, values, exact, Some(low))?;
            rows.push(pair.row(compared, found.allowing(*noise)));
        }
    }
    Ok(rows)
}

/// Zeroes the rows of an output that no sequence has.
fn blank_unused(name: &str, values: &mut [f64], shape: [usize; 4], sequences: &Sequences) {
    let (q_rows, k_rows) = (sequences.q_rows.as_deref(), sequences.k_rows.as_deref());
    let [_, batch, heads, seqlen] = shape;
    match name {
        "out" | "dq" => blank(values, shape, TensorLayout::Bshd, q_rows, 0.0),
        "dk" | "dv" => blank(values, shape, TensorLayout::Bshd, k_rows, 0.0),
        "lse" => blank(values, [batch, seqlen, heads, 1], TensorLayout::Bhsd, q_rows, 0.0),
        _ => {}
    }
}

/// The shape of an output of `problem`, as [`Pair::shape`]; `None` for other tensors.
fn shape_in(problem: &Problem, name: &str) -> Option<[usize; 4]> {
    use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
    match name {
        "out" => Some(out_shape(problem)),
        "lse" => {
            let [batch, seqlen, heads, _] = out_shape(problem);
            Some([1, batch, heads, seqlen])
        }
        "dsinks" => Some([1, 1, 1, problem.heads_q]),
        "dq" => Some(q_shape(problem)),
        "dk" => Some(k_shape(problem)),
        "dv" => Some(v_shape(problem)),
        _ => None,
    }
}

fn judge_by_rounding(pairs: &[Pair], lse_dtype: Dtype) -> anyhow::Result<Vec<Row>> {
    let judge = |pair: &Pair| {
        let dtype = if pair.is_lse() { lse_dtype } else { pair.dtype };
        Ok(pair.row("A to B", pair.compare(dtype, &pair.a, pair.b(), None)?))
    };
    pairs.iter().map(judge).collect()
}

fn judge_by_tolerances(pairs: &[Pair], atol: f64, rtol: f64) -> anyhow::Result<Vec<Row>> {
    let judge = |pair: &Pair| {
        let mut found = pair.compare(Dtype::F32, &pair.a, pair.b(), None)?;
        // The tolerance is per element: shown is the element that takes the most of its own, by its own
        // difference.
        let off = |index: usize| (pair.a[index] - pair.b()[index]).abs();
        let share = |index: usize| off(index) / (atol + rtol * pair.b()[index].abs());
        let differ = (0..pair.a.len()).filter(|&index| off(index).is_finite() && off(index) > 0.0);
        let most = |a: &usize, b: &usize| share(*a).total_cmp(&share(*b)).then(off(*a).total_cmp(&off(*b)));
        if let Some(index) = differ.max_by(most) {
            (found.worst_out, found.worst_reference) = (pair.a[index], pair.b()[index]);
            found.worst = Some(pair.position(index));
            found.max_abs = off(index);
        }
        found.tolerance = atol + rtol * found.worst_reference.abs();
        if found.mismatches == 0 {
            let beyond = found.max_abs > found.tolerance;
            found.verdict = if beyond { compare::Verdict::TooFar } else { compare::Verdict::Pass };
        }
        Ok(pair.row("A to B", found))
    };
    pairs.iter().map(judge).collect()
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a number, 0 or more".to_owned()),
    }
}
