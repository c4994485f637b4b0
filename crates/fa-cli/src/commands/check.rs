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
use crate::safetensors::TensorFile;
use crate::sequences::{Sequences, blank};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress;
use clap::Args;

/// `fa check`.
#[derive(Debug, Args)]
#[command(after_help = CHECK_EXAMPLES)]
pub struct CheckArgs {
    /// The output to judge
    pub a: PathBuf,
    /// The output to judge it by
    pub b: PathBuf,
    /// Compare this tensor (may be repeated) [default: those of out, lse, dq, dk, dv that both files have]
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
  fa check a.safetensors b.safetensors --inputs qkv.safetensors --causal
  fa check a.safetensors b.safetensors --atol 1e-3 --rtol 1e-3

The rule: max|out - ref| <= 2 max|low - ref| + one rounding step of the output type at the magnitude of ref, \
where ref is computed in f64 from the inputs and low is the same formula in the inputs' precision (for f32 \
at least 32 rounding steps); both outputs must keep it. Without inputs and tolerances, A may differ from B \
by 3 rounding steps of a 16-bit type, 65 of f32. LSEs may differ by 1e-3 (1e-5 of their magnitude for f32). \
Infinities and NaN must be at the same places.
Exit code 1 when the outputs differ beyond tolerance.";

/// The tensors that `fa run` writes.
const OUTPUTS: [&str; 6] = ["out", "lse", "dq", "dk", "dv", "dsinks"];

/// Runs the command.
///
/// # Errors
/// Bad input; a difference is a verdict, not an error.
pub fn command(args: &CheckArgs) -> anyhow::Result<Verdict> {
    let a = TensorFile::open(&args.a)?;
    let b = TensorFile::open(&args.b)?;
    let names = names(args, &a, &b)?;
    let entries = || names.iter().flat_map(|name| [&a, &b].map(|file| file.entry(name)));
    let elements: usize = entries().flatten().map(|entry| entry.shape.iter().product::<usize>()).sum();
    let need = 8 * elements as u64;
    attention::check_free(
        need,
        "the tensors as f64",
        "compare one at a time, by --tensor, or parts of them",
    )?;
    let mut pairs: Vec<Pair> =
        names.iter().map(|name| Pair::read(&args.attention, &a, &b, name)).collect::<Result<_, _>>()?;
    let given = args.atol.is_some() || args.rtol.is_some();
    let separate = args.inputs.as_deref().map(TensorFile::open).transpose()?;
    let holds_inputs = |file: &&TensorFile| ["q", "k", "v"].iter().all(|name| file.has(name));
    let inputs = separate.as_ref().or_else(|| [&b, &a].into_iter().find(holds_inputs)).filter(|_| !given);
    if inputs.is_none() && args.attention.describes_a_problem() {
        let message = "--causal, --window, --scale and --softcap tell how outputs follow from inputs, and \
                       none are used: give --inputs FILE";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let (rule, problem, rows) = match inputs {
        Some(file) => {
            let (problem, rows) = judge_by_inputs(file, &args.attention, [&a, &b], &mut pairs)?;
            // Outputs say what they were computed with, inputs what they were made for.
            let mut asked: Vec<&TensorFile> = Vec::new();
            for one in [&a, &b, file] {
                if asked.iter().all(|other| other.path() != one.path()) {
                    asked.push(one);
                }
            }
            let hints = asked.into_iter().filter_map(|file| attention::metadata_hint(file, &problem));
            hints.for_each(|hint| output::note(&hint));
            (RuleName::F64OfInputs, Some(problem), rows)
        }
        None if given => {
            let (atol, rtol) = (args.atol.unwrap_or(0.0), args.rtol.unwrap_or(0.0));
            (RuleName::Given, None, judge_by_tolerances(&pairs, atol, rtol)?)
        }
        None => (RuleName::RoundingOfType, None, judge_by_rounding(&pairs, lse_dtype(&a, &b))?),
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

/// The tensors to compare.
fn names(args: &CheckArgs, a: &TensorFile, b: &TensorFile) -> Result<Vec<String>, InputError> {
    if !args.tensors.is_empty() {
        return Ok(args.tensors.clone());
    }
    let common: Vec<String> =
        OUTPUTS.into_iter().filter(|name| a.has(name) && b.has(name)).map(str::to_owned).collect();
    if common.is_empty() {
        let list = |file: &TensorFile| file.names().collect::<Vec<_>>().join(", ");
        let inputs = [a, b].into_iter().find(|file| ["q", "k", "v"].iter().all(|name| file.has(name)));
        let advice = inputs.map_or(String::new(), |inputs| {
            let path = inputs.path().display();
            format!("; to judge one output by q, k and v of {path} give it as A and B, with --inputs {path}")
        });
        return Err(InputError::Usage(format!(
            "A and B have none of {} in common: A has {}; B has {}; --tensor NAME compares others{advice}",
            OUTPUTS.join(", "),
            list(a),
            list(b)
        )));
    }
    Ok(common)
}

fn judge_by_inputs(
    file: &TensorFile,
    args: &AttentionArgs,
    [a, b]: [&TensorFile; 2],
    pairs: &mut [Pair],
) -> anyhow::Result<(Problem, Vec<Row>)> {
    let gradients = ["dq", "dk", "dv", "dsinks"];
    let backward = pairs.iter().any(|pair| gradients.contains(&pair.name.as_str()));
    let mut inputs = AnyInputs::read(file, args, backward)?;
    inputs.append(None)?;
    let posed = with_inputs!(&inputs, inputs => inputs.problem);
    for pair in pairs.iter() {
        let Some(need) = shape_in(&posed, &pair.name).filter(|need| *need != pair.shape) else { continue };
        // LSE has no axis of the head dim, which stands first as 1.
        let (axes, from) = if pair.is_lse() { ("heads, seqlen_q", 1) } else { ("seqlen, heads, dim", 0) };
        let need = format!(
            "so it is as [batch, {axes}] in {} and {}, but the inputs of {} give {:?}: give the inputs that \
             they were computed from",
            a.path().display(),
            b.path().display(),
            file.path().display(),
            &need[from..]
        );
        return Err(
            InputError::Shape { name: pair.name.clone(), got: pair.shape[from..].to_vec(), need }.into()
        );
    }
    let (problem, sequences) = with_inputs!(&inputs, inputs => (inputs.problem, &inputs.sequences));
    let mut references =
        progress::spinner("computing in f64", || with_inputs!(&inputs, inputs => references(inputs)))?;
    // What the rows hold that no sequence has is nobody's business.
    for pair in pairs.iter_mut() {
        for values in [&mut pair.a, &mut pair.b] {
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
        rows_by(references, pairs, problem.types.qkv)
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
                "tensor '{}' is no output of attention, so the inputs do not tell what it should be: \
                 give --atol or --rtol",
                pair.name
            ))
            .into());
        };
        let found = pair.compare(dtype, &pair.a, exact, Some(low))?;
        rows.push(pair.row(TO_EXACT[0], found.allowing(*noise)));
        let found = pair.compare(dtype, &pair.b, exact, Some(low))?;
        rows.push(pair.row(TO_EXACT[1], found.allowing(*noise)));
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
        Ok(pair.row("A to B", pair.compare(dtype, &pair.a, &pair.b, None)?))
    };
    pairs.iter().map(judge).collect()
}

fn judge_by_tolerances(pairs: &[Pair], atol: f64, rtol: f64) -> anyhow::Result<Vec<Row>> {
    let judge = |pair: &Pair| {
        let mut found = pair.compare(Dtype::F32, &pair.a, &pair.b, None)?;
        // The tolerance is per element; the one shown is that of the worst element.
        found.tolerance = atol + rtol * found.worst_reference.abs();
        let beyond = pair.a.iter().zip(&pair.b).any(|(a, b)| (a - b).abs() > atol + rtol * b.abs());
        if found.mismatches == 0 {
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
