//! `fa check`: are two outputs equal within tolerance?

mod references;

use std::path::PathBuf;

use fa_core::{Dtype, Problem, TensorLayout};
use fa_cpu::compare::{self, Comparison};
use safetensors::Dtype as StoredDtype;
use serde::Serialize;

use self::references::{Reference, References, hold_to_worst, references};
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

/// What [`Row::compared`] says of A and of B where inputs tell what they should be.
const TO_EXACT: [&str; 2] = ["A to f64", "B to f64"];

/// The tensors that `fa run` writes.
const OUTPUTS: [&str; 6] = ["out", "lse", "dq", "dk", "dv", "dsinks"];

/// Those of them that have rows of heads: of rank 3 where sequences are packed.
const ROWS: [&str; 4] = ["out", "dq", "dk", "dv"];

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    a: PathBuf,
    b: PathBuf,
    rule: RuleName,
    #[serde(skip_serializing_if = "Option::is_none")]
    inputs: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<Problem>,
    rows: Vec<Row>,
    passed: bool,
    /// The outputs, `a` or `b`, that are too far from the f64 result; none where no inputs tell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    off: Vec<&'static str>,
}

/// By which rule outputs are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum RuleName {
    /// A and B each by the f64 result on the inputs.
    F64OfInputs,
    /// A by B, with the tolerance that the type's rounding gives.
    RoundingOfType,
    /// A by B, with the tolerances given.
    Given,
}

/// One comparison of a tensor.
#[derive(Debug, Serialize)]
struct Row {
    tensor: String,
    /// `A to f64`, `B to f64` or `A to B`.
    compared: &'static str,
    #[serde(flatten)]
    found: Comparison,
}

/// A tensor of both files, packed BSHD (LSE as it is).
struct Pair {
    name: String,
    /// `[batch, seqlen, heads, dim]`; LSE `[1, batch, heads, seqlen_q]`.
    shape: [usize; 4],
    a: Vec<f64>,
    b: Vec<f64>,
    /// The coarser of the two stored types.
    dtype: Dtype,
}

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
        names.iter().map(|name| Pair::read(args, &a, &b, name)).collect::<Result<_, _>>()?;
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

impl Pair {
    fn read(args: &CheckArgs, a: &TensorFile, b: &TensorFile, name: &str) -> anyhow::Result<Pair> {
        let (a_shape, a_values) = read_bshd(a, &args.attention, name)?;
        let (b_shape, b_values) = read_bshd(b, &args.attention, name)?;
        if a_shape != b_shape {
            let got = a.entry(name)?.shape.clone();
            let need = format!("in {} it has {:?}", b.path().display(), b.entry(name)?.shape);
            return Err(InputError::Shape { name: name.to_owned(), got, need }.into());
        }
        let dtype = coarser(stored_dtype(a, name)?, stored_dtype(b, name)?);
        Ok(Pair { name: name.to_owned(), shape: a_shape, a: a_values, b: b_values, dtype })
    }

    fn is_lse(&self) -> bool {
        self.name == "lse"
    }

    /// A or B against the other or the oracle.
    fn compare(
        &self,
        dtype: Dtype,
        values: &[f64],
        exact: &[f64],
        low: Option<&[f64]>,
    ) -> Result<Comparison, fa_cpu::CpuError> {
        if self.is_lse() {
            let [_, batch, heads, seqlen] = self.shape;
            compare::compare_lse([batch, heads, seqlen], dtype, values, exact)
        } else {
            compare::compare(self.shape, dtype, values, exact, low)
        }
    }

    fn row(&self, compared: &'static str, found: Comparison) -> Row {
        Row { tensor: self.name.clone(), compared, found }
    }
}

/// A tensor's values and shape: rows of heads in BSHD order, others with leading ones.
fn read_bshd(
    file: &TensorFile,
    args: &AttentionArgs,
    name: &str,
) -> Result<([usize; 4], Vec<f64>), InputError> {
    let layout = args.layout(file.metadata().get("layout").map(String::as_str))?;
    let stored = &file.entry(name)?.shape;
    let refuse =
        |need: &str| InputError::Shape { name: name.to_owned(), got: stored.clone(), need: need.to_owned() };
    let rank = stored.len();
    if name == "lse" && !(2..=3).contains(&rank) {
        return Err(refuse("lse must be [batch, heads, seqlen_q], or [heads, total_q] of packed sequences"));
    }
    if rank > 4 {
        return Err(refuse("tensors of rank 4 at most are compared"));
    }
    let mut shape = [1usize; 4];
    shape[4 - rank..].copy_from_slice(stored);
    let values = file.read_f64(name)?;
    if rank < 3 || rank == 3 && !ROWS.contains(&name) {
        return Ok((shape, values));
    }
    if layout == TensorLayout::Bhsd {
        shape.swap(1, 2);
    }
    Ok((shape, attention::to_bshd(&values, shape, layout)))
}

/// The type whose rounding a stored tensor has; f64 counts as f32, the widest type outputs are written in.
fn stored_dtype(file: &TensorFile, name: &str) -> Result<Dtype, InputError> {
    Ok(match file.entry(name)?.dtype {
        StoredDtype::BF16 => Dtype::Bf16,
        StoredDtype::F16 => Dtype::F16,
        _ => Dtype::F32,
    })
}

fn coarser(a: Dtype, b: Dtype) -> Dtype {
    if a.unit_roundoff() >= b.unit_roundoff() { a } else { b }
}

/// The type of the inputs behind an LSE, which is f32 itself: that of the output beside it.
fn lse_dtype(a: &TensorFile, b: &TensorFile) -> Dtype {
    let of = |file: &TensorFile| ["out", "q"].iter().find_map(|name| stored_dtype(file, name).ok());
    [of(a), of(b)].into_iter().flatten().reduce(coarser).unwrap_or(Dtype::F32)
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

fn text(report: &Report) -> String {
    let header = [
        "tensor",
        "compared",
        "max abs",
        "tolerance",
        "rms",
        "cosine",
        "worst [b,s,h,d]",
        "values",
        "verdict",
    ];
    let mut table = output::table(&header);
    for Row { tensor, compared, found } in &report.rows {
        let worst = found.worst.map_or("-".to_owned(), |position| format!("{position:?}"));
        let verdict = match (found.verdict, found.first_mismatch) {
            (compare::Verdict::Pass, _) => "pass".to_owned(),
            (compare::Verdict::TooFar, _) => "TOO FAR".to_owned(),
            (compare::Verdict::NonFiniteMismatch, at) => {
                format!("NaN/inf differ at {}, first {:?}", found.mismatches, at.unwrap_or_default())
            }
        };
        table.add_row([
            tensor.clone(),
            (*compared).to_owned(),
            format!("{:.3e}", found.max_abs),
            format!("{:.3e}", found.tolerance),
            format!("{:.3e}", found.rms),
            format!("{:.9}", found.cosine),
            worst,
            format!("{:.6e} {:.6e}", found.worst_out, found.worst_reference),
            verdict,
        ]);
    }
    let rule = match (report.rule, &report.inputs) {
        (RuleName::F64OfInputs, Some(path)) => {
            format!("each against f64 on the inputs of {}, by twice the inputs' precision", path.display())
        }
        (RuleName::Given, _) => "A against B by the tolerances given".to_owned(),
        _ => "A against B by the rounding of their type (inputs unknown)".to_owned(),
    };
    let verdict = match (report.passed, report.off.as_slice()) {
        (true, _) => "equal within tolerance".to_owned(),
        (false, ["a"]) => format!("DIFFERENT: A is off, {}; B is right", report.a.display()),
        (false, ["b"]) => format!("DIFFERENT: B is off, {}; A is right", report.b.display()),
        (false, ["a", "b"]) => "DIFFERENT: both are off".to_owned(),
        (false, _) => "DIFFERENT".to_owned(),
    };
    format!("{}rule     {rule}\nverdict  {verdict}\n", output::table_text(&table))
}

fn parse_tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("must be a number, 0 or more".to_owned()),
    }
}
