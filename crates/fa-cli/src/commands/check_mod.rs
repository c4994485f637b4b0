//! `fa check-mod`: what a mask or a modification of scores is, without computing attention.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use fa_core::program::{
    Deps, Inputs, Interned, Operations, OwnedInputs, Point, Program, ScoreClass, Tile, TileState, Type, Value,
};
use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, counted};
use fa_lab::shape::{parse_pair, whole};
use serde::Serialize;

use crate::programs;
use crate::safetensors::TensorFile;
use crate::term::failure::{InputError, Verdict};
use crate::term::output;

/// `fa check-mod`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  fa check-mod 'k <= q + off and q + off - k < 512' --seqlen 8192
  fa check-mod 'scalar w: i32; abs(q - k) <= w' --scalar w=64 --seqlen 1000 --tile 64x80
  fa check-mod 'array bias: bf16[_, _, _, _] grad; score = s + bias[b, h, q, k]' --json
  fa check-mod 'array doc: i32[_]; doc[q] == doc[k] and k <= q' --inputs documents.safetensors --seqlen 8192
  fa check-mod 'scalar c: f32; c * tanh(s / c)' --header")]
pub(crate) struct CheckModArgs {
    /// The program, as in docs/programs.md; - reads it from standard input
    #[arg(allow_hyphen_values = true)]
    pub program: String,
    /// Queries and keys of a sequence, or both as one number
    #[arg(long, value_name = "N|QxK", default_value = "4096", value_parser = parse_lengths)]
    pub seqlen: (usize, usize),
    /// Queries and keys of a tile
    #[arg(long, value_name = "QxK", default_value = "128x128", value_parser = parse_lengths)]
    pub tile: (usize, usize),
    /// The value of a scalar (may be repeated); without one, tiles hold for every value
    #[arg(long, value_name = "NAME=VALUE")]
    pub scalar: Vec<String>,
    /// A safetensors file whose tensors are the program's arrays and scalars, by their names; without one,
    /// tiles hold for every value
    #[arg(long, value_name = "FILE", conflicts_with = "draw")]
    pub inputs: Option<PathBuf>,
    /// Draw arrays and scalars with this seed, as those of timings are
    #[arg(long, value_name = "SEED", value_parser = whole::<u64>)]
    pub draw: Option<u64>,
    /// Print the header that kernels are compiled with, and nothing else
    #[arg(long, conflicts_with_all = ["json", "seqlen", "tile", "scalar", "inputs", "draw"])]
    pub header: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

fn parse_lengths(text: &str) -> Result<(usize, usize), String> {
    let (q, k) = parse_pair(text, 'x', "128 or 64x128")?;
    let fits = |n: usize| (1..=i32::MAX as usize).contains(&n);
    if fits(q) && fits(k) { Ok((q, k)) } else { Err("lengths are 1 to 2^31 - 1".to_owned()) }
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    program: String,
    hash: String,
    nodes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask: Option<MaskReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<ScoreReport>,
}

#[derive(Debug, Serialize)]
struct MaskReport {
    /// The mask that kernels have built in, where it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    built_in: Option<Mask>,
    depends_on: Vec<&'static str>,
    operations: Counts,
    tiles: Tiles,
    /// The keys of some queries, where they are at most two intervals.
    intervals: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct ScoreReport {
    /// The soft cap that kernels have built in, where it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    softcap: Option<f64>,
    class: &'static str,
    depends_on: Vec<&'static str>,
    operations: Counts,
    /// d score / d s.
    slope: String,
    slope_operations: Counts,
    gradients: Vec<GradientReport>,
}

#[derive(Debug, Serialize)]
struct GradientReport {
    array: String,
    form: &'static str,
    slope: String,
}

/// Operations and loads, by how often they are made.
#[derive(Debug, Serialize)]
struct Counts {
    tile: usize,
    row: usize,
    column: usize,
    pair: usize,
    score: usize,
}

#[derive(Debug, Serialize)]
struct Tiles {
    seqlen_q: usize,
    seqlen_k: usize,
    tile_q: usize,
    tile_k: usize,
    empty: usize,
    partial: usize,
    full: usize,
}

#[derive(Debug, Serialize)]
struct Row {
    query: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<Vec<[i32; 2]>>,
}

impl Counts {
    fn of(Operations { tile, row, column, pair, score }: Operations) -> Counts {
        Counts { tile, row, column, pair, score }
    }

    fn shown(&self) -> String {
        let Counts { tile, row, column, pair, score } = self;
        format!("{pair} per pair, {score} per score, {row} per row, {column} per column, {tile} per tile")
    }
}

/// The most tiles that are looked at.
const MOST_TILES: usize = 1 << 22;

/// Runs the command.
///
/// # Errors
/// When the text is no program, and when standard output is closed.
pub(crate) fn command(args: &CheckModArgs) -> anyhow::Result<Verdict> {
    let text = if args.program == "-" {
        std::io::read_to_string(std::io::stdin()).map_err(InputError::read(Path::new("standard input")))?
    } else {
        args.program.clone()
    };
    let program = Program::parse(&text).map_err(|error| InputError::Usage(error.to_string()))?;
    let program = program.intern().map_err(|error| InputError::Usage(error.to_string()))?;
    if args.header {
        output::print(&program.cuda())?;
        return Ok(Verdict::Good);
    }
    let report = report(program, args)?;
    if args.json {
        output::print_json(&report)?
    } else {
        output::print(&shown(&report))?
    }
    Ok(Verdict::Good)
}

fn report(program: Interned, args: &CheckModArgs) -> Result<Report, InputError> {
    let mut scalars = scalars(&program, &args.scalar)?;
    let (queries, keys) = args.seqlen;
    let problem = Problem::square(1, queries, 1, 64, Mask::FULL, Dtype::Bf16)
        .with_lengths(Lengths::uniform(1, queries, keys))
        .with_score(ScoreMod::NONE.with_program(Some(program)));
    let flag = if args.inputs.is_some() { "--inputs" } else { "--draw" };
    if (args.inputs.is_some() || args.draw.is_some()) && program.arrays().is_empty() && scalars.is_empty() {
        return Err(InputError::Usage(format!(
            "{flag}: the program reads no arrays and no scalars, leave it out"
        )));
    }
    let given = match (&args.inputs, args.draw) {
        (Some(path), _) => Some(programs::read(&TensorFile::open(path)?, program, &problem, &scalars)?),
        (None, Some(seed)) => OwnedInputs::drawn(&problem, seed),
        (None, None) => None,
    };
    let given = given.map(|mut given| {
        for (given, flag) in given.scalars.iter_mut().zip(&mut scalars) {
            *given = *flag.get_or_insert(*given);
        }
        given
    });
    let inputs = given.as_ref().map(|given| given.view(&program)).transpose();
    let inputs = inputs.map_err(|error| InputError::Usage(error.to_string()))?;
    // Without a value a scalar is no number.
    let known: Option<Vec<Value>> = scalars.iter().copied().collect();
    let built_in = problem.with_mods_built_in(&known.unwrap_or_default());
    let program = &program;
    let mask = program.mask().map(|mask| -> Result<MaskReport, InputError> {
        Ok(MaskReport {
            built_in: Some(built_in.mask).filter(|mask| !mask.is_full()),
            depends_on: depends_on(program.deps(mask)),
            operations: Counts::of(program.operations(mask)),
            tiles: tiles(program, args, &scalars, inputs.as_ref())?,
            intervals: intervals(program, args, &scalars, inputs.as_ref()),
        })
    });
    let score = program.score().zip(program.slope()).map(|(score, slope)| ScoreReport {
        softcap: built_in.score.softcap,
        class: program.class().map_or("none", ScoreClass::name),
        depends_on: depends_on(program.deps(score)),
        operations: Counts::of(program.operations(score)),
        slope: program.expression(slope),
        slope_operations: Counts::of(program.operations(slope)),
        gradients: program
            .gradients()
            .iter()
            .map(|gradient| GradientReport {
                array: program.expression(gradient.load),
                form: program.form(gradient.load).name(),
                slope: program.expression(gradient.slope),
            })
            .collect(),
    });
    Ok(Report {
        program: program.text().to_owned(),
        hash: format!("{:016x}", program.hash64()),
        nodes: program.own_nodes(),
        mask: mask.transpose()?,
        score,
    })
}

fn depends_on(deps: Deps) -> Vec<&'static str> {
    let all =
        [(Deps::BATCH, "b"), (Deps::HEAD, "h"), (Deps::QUERY, "q"), (Deps::KEY, "k"), (Deps::SCORE, "s")];
    all.into_iter().filter(|&(one, _)| deps.has(one)).map(|(_, name)| name).collect()
}

/// The values given for a program's scalars, in the order of its declarations.
fn scalars(program: &Program, given: &[String]) -> Result<Vec<Option<Value>>, InputError> {
    let mut values = vec![None; program.scalars().len()];
    for text in given {
        let usage = |problem: String| InputError::Usage(format!("--scalar {text}: {problem}"));
        let (name, value) = text.split_once('=').ok_or_else(|| usage("use NAME=VALUE".to_owned()))?;
        let place = program.scalars().iter().position(|scalar| scalar.name == name.trim());
        let place = place.ok_or_else(|| {
            let names: Vec<_> = program.scalars().iter().map(|scalar| scalar.name.as_str()).collect();
            usage(format!(
                "the program has no such scalar; it has {}",
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            ))
        })?;
        let decl = &program.scalars()[place];
        let value = value.trim();
        let parsed = if decl.ty == Type::I32 {
            value.parse().ok().map(Value::I32)
        } else {
            value.parse::<f32>().ok().map(|value| Value::F32(value.into()))
        };
        let parsed = parsed.ok_or_else(|| usage(format!("this is no {}", decl.ty)))?;
        if decl.positive && matches!(parsed, Value::I32(value) if value <= 0) {
            return Err(usage("it divides, and has to be positive".to_owned()));
        }
        if values[place].replace(parsed).is_some() {
            return Err(usage(format!("{} has a value already", decl.name)));
        }
    }
    Ok(values)
}

/// A tile of head 0 of sequence 0.
fn tile(args: &CheckModArgs, first_q: usize, first_k: usize) -> Tile {
    let (sq, sk) = args.seqlen;
    let range = |first: usize, step: usize, length: usize| {
        first as i32..first.saturating_add(step).min(length) as i32
    };
    Tile {
        b: 0,
        h: 0,
        hk: 0,
        q: range(first_q, args.tile.0, sq),
        k: range(first_k, args.tile.1, sk),
        sq: sq as i32,
        sk: sk as i32,
        off: sk as i32 - sq as i32,
    }
}

fn tiles(
    program: &Program,
    args: &CheckModArgs,
    scalars: &[Option<Value>],
    inputs: Option<&Inputs<'_>>,
) -> Result<Tiles, InputError> {
    let ((sq, sk), (tile_q, tile_k)) = (args.seqlen, args.tile);
    let (rows, columns) = (sq.div_ceil(tile_q), sk.div_ceil(tile_k));
    if rows.saturating_mul(columns) > MOST_TILES {
        let problem = format!("{rows} x {columns} tiles are more than {MOST_TILES}: use a larger --tile");
        return Err(InputError::Usage(problem));
    }
    let mut found = Tiles { seqlen_q: sq, seqlen_k: sk, tile_q, tile_k, empty: 0, partial: 0, full: 0 };
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        let tile = tile(args, row * tile_q, column * tile_k);
        let state = match inputs {
            Some(inputs) => program.tile_state(inputs, &tile),
            None => program.tile_state_of_any(scalars, &tile),
        };
        match state {
            TileState::Empty => found.empty += 1,
            TileState::Partial => found.partial += 1,
            TileState::Full => found.full += 1,
        }
    }
    Ok(found)
}

/// The keys of the first, middle and last query, where no unknown array or scalar decides.
fn intervals(
    program: &Program,
    args: &CheckModArgs,
    scalars: &[Option<Value>],
    inputs: Option<&Inputs<'_>>,
) -> Vec<Row> {
    let known: Option<Vec<Value>> = scalars.iter().copied().collect();
    let of_scalars = || known.and_then(|known| Inputs::new(program, Vec::new(), known).ok());
    let inputs = inputs.cloned().or_else(of_scalars);
    let (Some(inputs), (sq, sk)) = (inputs, args.seqlen) else { return Vec::new() };
    let mut queries = vec![0, sq / 2, sq - 1];
    queries.dedup();
    let row = |query: usize| {
        let Tile { sq, sk: keys, off, .. } = tile(args, 0, 0);
        let point = Point { q: query as i32, sq, sk: keys, off, ..Point::default() };
        let keys = program.row_intervals(&inputs, &point);
        Row { query, keys: keys.map(|keys| keys.into_iter().map(|keys| [keys.start, keys.end]).collect()) }
    };
    // Each query may look at every key.
    if sk > 1 << 22 { Vec::new() } else { queries.into_iter().map(row).collect() }
}

fn shown(report: &Report) -> String {
    let mut text = format!("{}{}, hash {}\n", report.program, counted(report.nodes, "node"), report.hash);
    let list = |names: &[&str]| if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    if let Some(mask) = &report.mask {
        let tiles = &mask.tiles;
        let _ = writeln!(text, "\nmask");
        if let Some(built_in) = mask.built_in {
            let _ = writeln!(text, "  built in    {built_in}");
        }
        let _ = writeln!(text, "  depends on  {}", list(&mask.depends_on));
        let _ = writeln!(text, "  operations  {}", mask.operations.shown());
        let _ = writeln!(
            text,
            "  tiles       {} empty, {} partial, {} full ({}x{} of {}x{})",
            tiles.empty,
            tiles.partial,
            tiles.full,
            tiles.tile_q,
            tiles.tile_k,
            tiles.seqlen_q,
            tiles.seqlen_k
        );
        for row in &mask.intervals {
            let keys = match &row.keys {
                None => "more than two intervals, or found by trying every key".to_owned(),
                Some(keys) if keys.is_empty() => "none".to_owned(),
                Some(keys) => keys.iter().map(|[a, b]| format!("{a}..{b}")).collect::<Vec<_>>().join(", "),
            };
            let _ = writeln!(text, "  query {:<6}{keys}", row.query);
        }
    }
    if let Some(score) = &report.score {
        let _ = writeln!(text, "\nscore");
        if let Some(cap) = score.softcap {
            let _ = writeln!(text, "  built in    soft cap of {cap}");
        }
        let _ = writeln!(text, "  class       {}", score.class);
        let _ = writeln!(text, "  depends on  {}", list(&score.depends_on));
        let _ = writeln!(text, "  operations  {}", score.operations.shown());
        let _ = writeln!(text, "  d / d s     {}", score.slope);
        let _ = writeln!(text, "  its cost    {}", score.slope_operations.shown());
        for gradient in &score.gradients {
            let GradientReport { array, form, slope } = gradient;
            let _ = writeln!(text, "  gradient    {array}: {form}, d / d = {slope}");
        }
    }
    text
}
