//! Flags that commands share, parsed once into resolved values. No command is imported here.

pub(crate) mod lengths;
pub(crate) mod mods;
mod values;

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Command, Id, ValueEnum};
use fa_core::quantize::Codes;
use fa_core::{
    DescaleForm, Descales, Dtype, Family, Lengths, Mask, Pass, Problem, ScoreMod, TensorLayout, Types,
};
use fa_cpu::simd::Isa;
use fa_kernels::Headers;
use fa_lab::marks::Marks;
use fa_lab::shape::{HeadDim, LATENT_SCALE, whole};
use fa_planner::Mode;
use fa_planner::report::PlanFamily;

use crate::flags::lengths::{LengthsArgs, ScoreArgs};
use crate::flags::mods::{ModArgs, ProgramArgs};
use crate::term::failure::InputError;

pub(crate) use values::{
    Heads, Seqlen, Window, day, markdown_file, page_file, parse_layout, plot_file, results,
};

/// The flags of `A`, for those that conflict with all of them. A flag that conflicts with these cannot
/// require another flag that conflicts with them as well: clap does not require a flag that conflicts with
/// another, and would ignore the first.
pub(crate) fn flags_of<A: Args>() -> Vec<Id> {
    A::augment_args(Command::new("")).get_arguments().map(|flag| flag.get_id().clone()).collect()
}

/// Which implementation computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// The fastest that works here
    Auto,
    /// Tiled, multi-threaded, SIMD
    Cpu,
    /// Naive f64: slow, exact
    Reference,
    /// Kernels compiled for the first NVIDIA GPU: f16 and bf16
    Cuda,
}

/// The device sources of kernels that are being written.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct HeadersArgs {
    /// Folder of device sources in place of those in this program, as its repository's crates/fa-kernels/cuda
    #[arg(long, value_name = "DIR")]
    pub headers: Option<PathBuf>,
}

impl HeadersArgs {
    /// Compiles kernels with them from now on, in workers too.
    ///
    /// # Errors
    /// Where there is no such folder.
    pub(crate) fn choose(&self) -> anyhow::Result<()> {
        let Some(folder) = &self.headers else { return Ok(()) };
        if !folder.is_dir() {
            let message = format!("--headers {}: there is no such folder", folder.display());
            return Err(InputError::Usage(message).into());
        }
        Ok(Headers::choose(folder)?)
    }
}

/// The parts of a problem that the tensors of a file do not determine.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct AttentionArgs {
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Factor on Q K^T [default: 1/sqrt(head_dim); none with --latent]
    #[arg(long, value_name = "X")]
    pub scale: Option<f64>,
    /// v holds latents (MLA), with which keys begin: q has v's columns and then k's
    #[arg(long)]
    pub latent: bool,
    /// Soft cap: scores become X tanh(score / X), before the mask
    #[arg(long, value_name = "X")]
    pub softcap: Option<f64>,
    /// Order of the tensors' axes [default: the file's metadata entry 'layout', else bshd]
    #[arg(long, value_parser = parse_layout)]
    pub layout: Option<TensorLayout>,
    /// Rotary embedding rotates pairs of neighbouring elements (GPT-J) instead of pairs from two halves
    /// (Llama)
    #[arg(long)]
    pub rotary_interleaved: bool,
    /// Element type of O where q, k and v are F8_E4M3: bf16, f16, f32 [default: bf16]
    #[arg(long, value_name = "TYPE")]
    pub out_dtype: Option<Dtype>,
    #[command(flatten)]
    pub program: ProgramArgs,
}

impl AttentionArgs {
    /// Whether any flag but the layout is given.
    pub(crate) fn describes_a_problem(&self) -> bool {
        let Self { mask, scale, latent, softcap, layout: _, rotary_interleaved, out_dtype, program } = self;
        let ProgramArgs { mask_mod, score_mod, dropout } = program;
        let is_own = mask_mod.is_some() || score_mod.is_some() || dropout.dropout.is_some();
        let is_scored = scale.is_some() || softcap.is_some() || is_own;
        let is_of_other_types = *latent || *rotary_interleaved || out_dtype.is_some();
        mask.mask() != Mask::FULL || is_scored || is_of_other_types
    }

    /// The layout: the flag's, else the file's metadata entry, else BSHD.
    ///
    /// # Errors
    /// [`InputError::Usage`] when the metadata names a layout that does not exist.
    pub(crate) fn layout(&self, from_file: Option<&str>) -> Result<TensorLayout, InputError> {
        match (self.layout, from_file) {
            (Some(layout), _) => Ok(layout),
            (None, Some(text)) => parse_layout(text)
                .map_err(|e| InputError::Usage(format!("the file's metadata: {e}, or give --layout"))),
            (None, None) => Ok(TensorLayout::default()),
        }
    }
}

/// Mask flags.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct MaskArgs {
    /// No query sees a key after its own
    #[arg(long)]
    pub causal: bool,
    /// Each query sees L keys before and R keys after its own; 'inf' for no limit
    #[arg(long, value_name = "L,R", allow_hyphen_values = true)]
    pub window: Option<Window>,
    /// Query i lies N keys right of key i + keys - queries, for the mask and for ALiBi
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<i64>)]
    pub query_offset: i64,
}

impl MaskArgs {
    /// The mask: causal cuts the window's right side off.
    pub(crate) fn mask(&self) -> Mask {
        let Window { left, right } = self.window.unwrap_or(Window { left: None, right: None });
        Mask::band(left, if self.causal { Some(0) } else { right }).with_offset(self.query_offset)
    }
}

/// Flags of codes.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct KvArgs {
    /// Element type of K and V where they are codes: e4m3, int8, int4, e5m2 [default: that of --dtype]
    #[arg(long, value_name = "TYPE", value_parser = parse_codes)]
    pub kv_dtype: Option<Codes>,
    /// What shares a descale of K and V in codes, and of Q in e4m3: none, head, sequence_head, of K and V
    /// also token_head [default: head]
    #[arg(long, value_name = "FORM", value_parser = parse_descale)]
    pub kv_descale: Option<DescaleForm>,
    /// Element type of O where --dtype is e4m3: bf16, f16, f32 [default: bf16]
    #[arg(long, value_name = "TYPE")]
    pub out_dtype: Option<Dtype>,
}

impl KvArgs {
    /// The problem with K, V and O of these types.
    ///
    /// # Errors
    /// [`InputError::Usage`] for descales of what is no code.
    pub(crate) fn of(self, problem: Problem) -> Result<Problem, InputError> {
        let form = self.kv_descale.unwrap_or(DescaleForm::Head);
        if problem.types.is_fp8() {
            let types = Types::fp8(self.out_dtype.unwrap_or(Dtype::Bf16));
            let types = self.kv_dtype.map_or(types, |codes| types.with_kv(codes.dtype()));
            let of_q = if form == DescaleForm::TokenHead { DescaleForm::Head } else { form };
            return Ok(problem.with_types(types).with_descales(Descales::both(form).with_q(of_q)));
        }
        let out = self.out_dtype.unwrap_or(problem.types.out);
        let problem = problem.with_types(problem.types.with_out(out));
        let Some(codes) = self.kv_dtype.or(Codes::of(problem.types.kv)) else {
            return match self.kv_descale {
                Some(_) => Err(InputError::Usage("--kv-descale is of codes: add --kv-dtype".to_owned())),
                None => Ok(problem),
            };
        };
        Ok(problem.with_types(problem.types.with_kv(codes.dtype())).with_descales(Descales::both(form)))
    }
}

pub(crate) fn parse_codes(text: &str) -> Result<Codes, String> {
    let known = text.parse::<Dtype>().ok().and_then(Codes::of);
    known
        .ok_or_else(|| format!("'{text}' is no type of codes: use e4m3, int8, int4 or e5m2, or leave it out"))
}

pub(crate) fn parse_descale(text: &str) -> Result<DescaleForm, String> {
    let known = DescaleForm::ALL.into_iter().find(|form| form.name() == text);
    known.ok_or_else(|| format!("unknown form '{text}': use none, head, sequence_head or token_head"))
}

/// Flags of the CPU implementation.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CpuArgs {
    /// CPU threads, at most 64 or, if that is more, 4 per core [default: all cores]
    #[arg(long, value_name = "N", value_parser = parse_threads)]
    pub threads: Option<u16>,
    /// Instruction set of the CPU kernels: portable, neon, avx2, avx512, avx512-bf16, amx-bf16 [default: the
    /// best that this CPU has]
    #[arg(long)]
    pub isa: Option<Isa>,
}

/// CPU threads: up to as many as are of use ([`fa_cpu::threads::most`]).
fn parse_threads(text: &str) -> Result<u16, String> {
    let (threads, most) = (whole::<usize>(text)?, fa_cpu::threads::most());
    let own = u16::try_from(threads).ok().filter(|_| (1..=most).contains(&threads));
    let cores = fa_cpu::threads::cores();
    own.ok_or_else(|| format!("use 1 to {most}: 64 or, if that is more, 4 for each of {cores} cores"))
}

/// Problem flags of `fa plan`.
#[derive(Clone, Debug, Args)]
pub(crate) struct ProblemArgs {
    /// Independent sequences
    #[arg(long, default_value_t = 4, value_parser = whole::<usize>)]
    pub batch: usize,
    /// Sequence length, or queries x keys as in 1x4096
    #[arg(long, value_name = "N[xM]", default_value = "4096", conflicts_with_all = ["seqlen_q", "seqlen_k"])]
    pub seqlen: Seqlen,
    /// Queries per sequence
    #[arg(long, requires = "seqlen_k", value_parser = whole::<usize>)]
    pub seqlen_q: Option<usize>,
    /// Keys per sequence
    #[arg(long, requires = "seqlen_q", value_parser = whole::<usize>)]
    pub seqlen_k: Option<usize>,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "16")]
    pub heads: Heads,
    /// Head dim, and the values' if different, as in 192-128
    #[arg(long, value_name = "D[-DV]", default_value = "128")]
    pub headdim: HeadDim,
    /// V is the first DV columns of K (MLA), as in --headdim 576-512 --heads 128:1
    #[arg(long)]
    pub latent: bool,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Element type: bf16, f16, f32, or e4m3 of Q, K and V
    #[arg(long, default_value = "bf16")]
    pub dtype: Dtype,
    #[command(flatten)]
    pub kv: KvArgs,
    /// Soft cap: scores become X tanh(score / X), before the mask
    #[arg(long, value_name = "X")]
    pub softcap: Option<f64>,
    #[command(flatten)]
    pub score: ScoreArgs,
    #[command(flatten)]
    pub lengths: LengthsArgs,
}

impl ProblemArgs {
    /// The problem, checked; bands and soft caps that are written as programs are the built-in ones.
    ///
    /// # Errors
    /// What [`Problem::check`] finds, and [`InputError::Usage`] for flags that contradict each other.
    pub(crate) fn problem(&self) -> anyhow::Result<Problem> {
        let seqlen = match (self.seqlen_q, self.seqlen_k) {
            (Some(q), Some(k)) => Seqlen { q, k },
            _ => self.seqlen,
        };
        let problem = Problem::new(
            self.lengths.lengths(self.batch, seqlen.q, seqlen.k).map_err(InputError::Usage)?,
            (self.heads.q, self.heads.kv),
            (self.headdim.qk, self.headdim.v),
            Types::same(self.dtype),
        )
        .with_mask(self.mask.mask())
        .with_score(self.score.score(self.softcap).map_err(InputError::Usage)?);
        let problem = self.kv.of(latent_if(self.latent, problem))?;
        problem.check()?;
        Ok(problem.with_mods_built_in(&[]))
    }
}

/// The problem, or with `--latent` the latent one, whose times do not depend on its scale.
fn latent_if(latent: bool, problem: Problem) -> Problem {
    if latent { problem.with_latent(true).with_softmax_scale(Some(LATENT_SCALE)) } else { problem }
}

fn pass_values() -> [PossibleValue; 2] {
    [PossibleValue::new("fwd").help("Forward"), PossibleValue::new("bwd").help("Backward (gradients)")]
}

/// Parses `fwd` or `bwd`; whether a backward is deterministic is a flag of its own, which [`pass_of`] adds.
pub(crate) fn one_pass() -> impl TypedValueParser<Value = Pass> {
    PossibleValuesParser::new(pass_values())
        .map(|name| if name == "bwd" { Pass::BACKWARD } else { Pass::Forward })
}

/// Parses `fwd`, `bwd` or `both`.
pub(crate) fn passes() -> impl TypedValueParser<Value = Mode> {
    let both = PossibleValue::new("both").help("Forward, then backward");
    PossibleValuesParser::new(pass_values().into_iter().chain([both])).try_map(|name| name.parse::<Mode>())
}

/// The pass that `--mode` and `--deterministic` ask for.
///
/// # Errors
/// [`InputError::Usage`] for a deterministic forward: every forward is.
pub(crate) fn pass_of(mode: Pass, deterministic: bool) -> Result<Pass, InputError> {
    match mode {
        Pass::Backward { .. } => Ok(Pass::Backward { deterministic }),
        Pass::Forward if deterministic => {
            let message = "--deterministic is about gradients, every forward is: add --mode bwd".to_owned();
            Err(InputError::Usage(message))
        }
        Pass::Forward => Ok(Pass::Forward),
    }
}

fn family_values() -> [PossibleValue; 3] {
    Family::ALL.map(|family| {
        PossibleValue::new(family.name()).help(match family {
            Family::Sm80 => "mma.sync and cp.async: every architecture from 8.0 on",
            Family::Sm90 => "wgmma and TMA: 9.0",
            Family::Sm100 => "tcgen05: 10.0 and 10.3; assembled and emulated, never run on a GPU",
        })
    })
}

/// Parses the name of a family that has kernels.
pub(crate) fn family() -> impl TypedValueParser<Value = Family> {
    PossibleValuesParser::new(family_values()).try_map(|name| name.parse::<Family>())
}

/// Parses the name of a fixed list of shapes.
pub(crate) fn marks() -> impl TypedValueParser<Value = Marks> {
    let values = Marks::ALL.map(|marks| PossibleValue::new(marks.name()).help(marks.about()));
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Marks>())
}

/// Parses what can be planned with: `sm80`, `sm90` or `sm100`.
pub(crate) fn plan_family() -> impl TypedValueParser<Value = PlanFamily> {
    PossibleValuesParser::new(family_values()).try_map(|name| name.parse().map(PlanFamily::of))
}

/// Problem flags of `fa bench` and `fa tune`: every head dim with every mask and length.
#[derive(Clone, Debug, Args)]
pub(crate) struct ShapeArgs {
    /// Independent sequences [default: 1]
    #[arg(long, conflicts_with = "tokens", value_parser = whole::<usize>)]
    pub batch: Option<usize>,
    /// As many sequences as have this many positions in all, at least one, instead of --batch
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub tokens: Option<usize>,
    /// Sequence lengths, each N or queries x keys
    #[arg(long, value_name = "N[xM],..", value_delimiter = ',', default_value = "512,1024,2048,4096")]
    pub seqlen: Vec<Seqlen>,
    /// Query heads, and key/value heads if fewer
    #[arg(long, value_name = "Q[:KV]", default_value = "8")]
    pub heads: Heads,
    /// Head dims, each D or D-DV
    #[arg(long, value_name = "D[-DV],..", value_delimiter = ',', default_value = "64")]
    pub headdim: Vec<HeadDim>,
    /// V is the first DV columns of K (MLA), as in --headdim 576-512 --heads 128:1
    #[arg(long)]
    pub latent: bool,
    #[command(flatten)]
    pub mask: MaskArgs,
    /// Both without a mask and with a causal one
    #[arg(long, conflicts_with_all = ["causal", "window"])]
    pub both_masks: bool,
    /// Element type: f32, f16, bf16, or e4m3 of Q, K and V [default: bf16 on the GPU, f32 on the CPU]
    #[arg(long)]
    pub dtype: Option<Dtype>,
    #[command(flatten)]
    pub kv: KvArgs,
    /// Soft cap: scores become X tanh(score / X), before the mask
    #[arg(long, value_name = "X")]
    pub softcap: Option<f64>,
    #[command(flatten)]
    pub mods: ModArgs,
}

impl ShapeArgs {
    /// Every shape asked for, of type `dtype` unless a flag says otherwise, checked; bands and soft caps that
    /// are written as programs are the built-in ones.
    ///
    /// # Errors
    /// [`InputError::Usage`] for a type that nothing computes, and what [`Problem::check`] finds.
    pub(crate) fn problems(&self, dtype: Dtype) -> anyhow::Result<Vec<Problem>> {
        let dtype = self.dtype.unwrap_or(dtype);
        if matches!(dtype, Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) {
            let message =
                format!("{dtype} is of K and V alone: use --kv-dtype {dtype} and --dtype f32, f16 or bf16");
            return Err(InputError::Usage(message).into());
        }
        let masks = if self.both_masks {
            vec![Mask::FULL, Mask::CAUSAL.with_offset(self.mask.query_offset)]
        } else {
            vec![self.mask.mask()]
        };
        let score = ScoreMod::NONE.with_softcap(self.softcap);
        let score = self.mods.of(score).map_err(InputError::Usage)?;
        let mut problems = Vec::new();
        for &HeadDim { qk, v } in &self.headdim {
            for &mask in &masks {
                for &Seqlen { q: seqlen_q, k: seqlen_k } in &self.seqlen {
                    let batch = match self.tokens {
                        Some(tokens) => (tokens / seqlen_k.max(1)).max(1),
                        None => self.batch.unwrap_or(1),
                    };
                    let problem = Problem::new(
                        Lengths::uniform(batch, seqlen_q, seqlen_k),
                        (self.heads.q, self.heads.kv),
                        (qk, v),
                        Types::same(dtype),
                    )
                    .with_mask(mask)
                    .with_score(score);
                    let problem = self.kv.of(latent_if(self.latent, problem))?;
                    problem.check()?;
                    problems.push(problem.with_mods_built_in(&[]));
                }
            }
        }
        Ok(problems)
    }

    /// [`ShapeArgs::problems`] for the GPU: of a 16-bit type, bf16 unless a flag says otherwise.
    ///
    /// # Errors
    /// As [`ShapeArgs::problems`], and [`InputError::Usage`] for f32.
    pub(crate) fn problems_of_halves(&self) -> anyhow::Result<Vec<Problem>> {
        if self.dtype == Some(Dtype::F32) {
            let message = "no GPU kernel computes in f32: use bf16 or f16".to_owned();
            return Err(InputError::Usage(message).into());
        }
        self.problems(Dtype::Bf16)
    }
}
