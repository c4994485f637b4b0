//! The attention problem that a file's tensors pose: checked before any data is read, then read.

use fa_attn::machine;
use fa_attn::quantize::Codes;
use fa_attn::{Append, AppendExtras, AppendTensors, Element, Engine, KvRef, Pass, Tensor};
use fa_core::program::{self, OwnedInputs};
use fa_core::{Alibi, DescaleForm, Dtype, Lengths, Problem, Side, SideRows, TensorLayout, Types, counted};
use fa_cpu::{Arguments, TensorRef};
use fa_lab::shape::{head_dims, pair};
use half::{bf16, f16};
use safetensors::Dtype as StoredDtype;

use crate::append::{Appended, NewRows};
use crate::flags::{AttentionArgs, parse_layout};
use crate::kv_tensor::KvTensor;
use crate::names::KV;
use crate::packed_rows::PackedRows;
use crate::programs;
use crate::safetensors::{NewTensor, Stored, TensorFile, codes_of, dtype_of};
use crate::sequences::{Sequences, SideTensors, shape_of};
use crate::term::failure::InputError;
use crate::term::output::si;

/// Q, K, V and perhaps dO of one problem, in `layout`, and the tensors beside them. Of packed sequences the
/// tensors are `[1, total, heads, head_dim]`; a cache in pages is `[pages, page, heads, head_dim]`.
#[derive(Debug)]
pub(crate) struct Inputs<T> {
    /// The problem, checked.
    pub problem: Problem,
    /// The same as it is computed: [`Problem::with_mods_built_in`].
    pub computed: Problem,
    /// The order of every tensor's axes.
    pub layout: TensorLayout,
    /// `[batch, seqlen_q, heads_q, head_dim]`.
    pub q: KvTensor<T>,
    /// `[batch, seqlen_k, heads_kv, head_dim]`.
    pub k: KvTensor<T>,
    /// `[batch, seqlen_k, heads_kv, head_dim_v]`.
    pub v: KvTensor<T>,
    /// `[batch, seqlen_q, heads_q, head_dim_v]`.
    pub dout: Option<Tensor<T>>,
    /// Starts, lengths, pages, slopes and sinks.
    pub sides: SideTensors,
    /// The arrays and scalars of the problem's program.
    pub program: Option<OwnedInputs>,
    /// The sequences that these describe.
    pub sequences: Sequences,
    /// New keys and values, until they are appended; lengths and sequences count them already.
    pub new: Option<NewRows<T>>,
    /// Whether they have been.
    pub grown: bool,
}

/// [`Inputs`] of whichever type the file holds.
#[derive(Debug)]
pub(crate) enum AnyInputs {
    /// f32.
    F32(Inputs<f32>),
    /// f16.
    F16(Inputs<f16>),
    /// bf16.
    Bf16(Inputs<bf16>),
}

/// Evaluates an expression with `$inputs` bound to the [`Inputs`] inside an [`AnyInputs`].
macro_rules! with_inputs {
    ($any:expr, $inputs:ident => $body:expr) => {
        match $any {
            $crate::attention::AnyInputs::F32($inputs) => $body,
            $crate::attention::AnyInputs::F16($inputs) => $body,
            $crate::attention::AnyInputs::Bf16($inputs) => $body,
        }
    };
}
pub(crate) use with_inputs;

impl AnyInputs {
    /// Reads q, k, v and, if `backward`, dout. What the header says is checked before any data is read.
    ///
    /// # Errors
    /// [`InputError`] or [`fa_core::ProblemError`].
    pub(crate) fn read(file: &TensorFile, args: &AttentionArgs, backward: bool) -> anyhow::Result<AnyInputs> {
        let layout = args.layout(file.metadata().get("layout").map(String::as_str))?;
        let mut sides = SideTensors::read(file, layout)?;
        let packed = PackedRows::find(file, &mut sides, layout, args.latent)?;
        let is_new = NewRows::are_in(file, args.rotary_interleaved)?;
        if is_new && backward {
            let message = "the file has k_new, and what is appended has no gradients: leave --backward out";
            return Err(InputError::Usage(message.to_owned()).into());
        }
        let problem = problem_of(file, args, (&sides, packed), layout, backward)?;
        check_memory(&problem, backward)?;
        // Of a cache that grows, before and after.
        let sequences = sides.sequences(&problem)?;
        let beside = Beside { sequences, sides, packed, layout, backward };
        let turns = is_new.then_some(args.rotary_interleaved);
        if is_new && problem.types.is_fp8() {
            let message = "the file has k_new and an fp8 q: rows are appended beside a q of 16 bits or f32";
            return Err(InputError::Usage(message.to_owned()).into());
        }
        Ok(match problem.types.wide() {
            Dtype::F32 => AnyInputs::F32(Inputs::read(file, problem, beside, turns)?),
            Dtype::F16 => AnyInputs::F16(Inputs::read(file, problem, beside, turns)?),
            Dtype::Bf16 => AnyInputs::Bf16(Inputs::read(file, problem, beside, turns)?),
            Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => unreachable!("problem_of refuses it"),
        })
    }

    /// Appends what the file has for its cache, on the engine's backend or else on the CPU; nothing
    /// otherwise.
    ///
    /// # Errors
    /// What the backend refuses.
    pub(crate) fn append(&mut self, engine: Option<&Engine>) -> anyhow::Result<Option<Appended>> {
        match (self, engine) {
            // No GPU kernel appends f32.
            (AnyInputs::F32(inputs), _) => inputs.grow_on_cpu(),
            (AnyInputs::F16(inputs), None) => inputs.grow_on_cpu(),
            (AnyInputs::Bf16(inputs), None) => inputs.grow_on_cpu(),
            (AnyInputs::F16(inputs), Some(engine)) => inputs.grow(|a, e, t| engine.append(a, e, t)),
            (AnyInputs::Bf16(inputs), Some(engine)) => inputs.grow(|a, e, t| engine.append(a, e, t)),
        }
    }
}

/// What was read before q, k and v.
struct Beside {
    sequences: Sequences,
    sides: SideTensors,
    packed: Option<PackedRows>,
    layout: TensorLayout,
    backward: bool,
}

impl<T: Element + Stored> Inputs<T> {
    /// Appends by `act` what the file has for its cache; nothing otherwise.
    fn grow(
        &mut self,
        act: impl FnOnce(
            &Append,
            &mut AppendExtras<'_>,
            &mut AppendTensors<'_, T>,
        ) -> Result<usize, fa_attn::Error>,
    ) -> anyhow::Result<Option<Appended>> {
        let Some(new) = self.new.take() else { return Ok(None) };
        let (append, Inputs { q, k, v, sides, .. }) = (new.append(), &mut *self);
        let KvTensor::Same(q) = q else { unreachable!("a file with new rows and an fp8 q is refused") };
        let done = new.apply((q, [k, v]), sides, |extras, tensors| act(&append, extras, tensors))?;
        self.grown = true;
        Ok(Some(done))
    }

    fn grow_on_cpu(&mut self) -> anyhow::Result<Option<Appended>> {
        self.grow(|append, extras, tensors| Ok(fa_attn::append(append, extras, tensors)?))
    }

    /// The cache with the new keys, its lengths and pages, and the rotated queries, for an output file;
    /// nothing where nothing was appended.
    pub(crate) fn grown_tensors(&self) -> Vec<NewTensor> {
        let Inputs { q, k, v, sides, grown, .. } = self;
        if !grown {
            return Vec::new();
        }
        let is_packed = sides.values.cu_seqlens_q.is_some();
        let mut tensors = vec![q.stored("q", is_packed), k.stored("k", false), v.stored("v", false)];
        tensors.extend(sides.lengths_and_pages());
        tensors.extend(sides.descale_tensors());
        tensors
    }

    fn read(
        file: &TensorFile,
        problem: Problem,
        Beside { mut sequences, mut sides, packed, layout, backward }: Beside,
        turns: Option<bool>,
    ) -> anyhow::Result<Self> {
        use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
        let new = match turns {
            Some(is_interleaved) => {
                let new = NewRows::read(file, &problem, &mut sides, layout, is_interleaved)?;
                sequences = sides.sequences(&problem)?;
                Some(new)
            }
            None => None,
        };
        let program =
            problem.score.program.map(|program| programs::read(file, program, &problem, &[])).transpose()?;
        let computed = program.as_ref().map_or(problem, |own| problem.with_mods_built_in(&own.scalars));
        let tensor = |name: &str, shape| -> anyhow::Result<Tensor<T>> {
            Ok(Tensor::with_layout(shape, layout, file.read(name)?)?)
        };
        let [k_shape, v_shape] = [k_shape(&problem), v_shape(&problem)];
        let own = |name, shape, dtype| KvTensor::read(file, name, shape, layout, Codes::of(dtype));
        let [k, v] = match packed {
            Some(packed) => packed.read(file, [k_shape, v_shape], layout)?,
            None => [own("k", k_shape, problem.types.kv)?, own("v", v_shape, problem.types.kv)?],
        };
        Ok(Inputs {
            problem,
            computed,
            layout,
            q: own("q", q_shape(&problem), problem.types.q)?,
            k,
            v,
            dout: backward.then(|| tensor("dout", out_shape(&problem))).transpose()?,
            sides,
            program,
            sequences,
            new,
            grown: false,
        })
    }

    /// Views of Q, K and V.
    ///
    /// # Errors
    /// When a tensor is shorter than the problem says.
    pub(crate) fn views(&self) -> Result<[KvRef<'_, T>; 3], fa_attn::Error> {
        Ok([self.q.view("q")?, self.k.view("k")?, self.v.view("v")?])
    }

    /// Views of Q, K and V for gradients.
    ///
    /// # Errors
    /// As [`Inputs::views`], and for codes, which have none.
    pub(crate) fn differentiable(&self) -> Result<[TensorRef<'_, T>; 3], fa_attn::Error> {
        self.problem.check_pass(Pass::BACKWARD)?;
        let [q, k, v] = self.views()?;
        let types = self.problem.types;
        match [q.same(), k.same(), v.same()] {
            [Some(q), Some(k), Some(v)] => Ok([*q, *k, *v]),
            _ => Err(fa_attn::Error::Dtype { got: types.kv, need: types.q }),
        }
    }

    /// The arrays and scalars of the program, as a call takes them.
    pub(crate) fn program(&self) -> Option<program::Inputs<'_>> {
        let (given, own) = (self.program.as_ref()?, self.problem.score.program?);
        Some(given.view(&own).expect("they have been checked where they were read"))
    }

    /// All that a call has besides tensors and gradients, with [`Inputs::program`].
    pub(crate) fn arguments<'a>(&'a self, program: Option<&'a program::Inputs<'a>>) -> Arguments<'a> {
        Arguments { extras: self.sides.extras(), program, ..Arguments::default() }
    }

    /// A view of dO, if it was read.
    ///
    /// # Errors
    /// When it is shorter than the problem says.
    pub(crate) fn dout_view(&self) -> Result<Option<TensorRef<'_, T>>, fa_attn::Error> {
        self.dout.as_ref().map(|dout| dout.view("dout")).transpose()
    }
}

/// Refuses a problem whose tensors do not fit into memory: the system would kill the program without a
/// message.
///
/// # Errors
/// [`InputError::Usage`] with what is needed and what there is.
pub(crate) fn check_memory(problem: &Problem, backward: bool) -> Result<(), InputError> {
    use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
    let elements = |shape: [usize; 4]| shape.iter().map(|&n| n as u64).product::<u64>();
    // The problem's check bounds every tensor to 2^48 elements, so that the sum stays far below 2^64.
    let tensors: u64 =
        [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)].map(elements).iter().sum();
    let copies = if backward { 2 } else { 1 };
    // Codes take half or a quarter of this, but of fp8 Q and O are in f32 as well.
    let bytes = if problem.types.is_fp8() { Dtype::F32 } else { problem.types.q }.bytes() as u64;
    let need = copies * tensors * bytes + 4 * lse_len(problem) as u64;
    check_free(need, "the problem's tensors", "split the batch or the heads")
}

/// Refuses to hold `need` bytes of `what` where less memory is free.
///
/// # Errors
/// As [`check_memory`].
pub(crate) fn check_free(need: u64, what: &str, advice: &str) -> Result<(), InputError> {
    match machine::available_memory() {
        Some(have) if need > have => Err(InputError::Usage(format!(
            "{what} take {}, {} of memory are free: {advice}",
            si(need as f64, "B"),
            si(have as f64, "B")
        ))),
        _ => Ok(()),
    }
}

/// The problem that the tensors' shapes and the flags describe.
fn problem_of(
    file: &TensorFile,
    args: &AttentionArgs,
    (sides, packed): (&SideTensors, Option<PackedRows>),
    layout: TensorLayout,
    backward: bool,
) -> anyhow::Result<Problem> {
    if backward && args.latent {
        let message = "--latent: absorbed heads have no gradients; leave --backward out, or train on the \
                       heads before absorption";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    if backward && sides.named {
        let message = "the queries name their rows by indices, which have no gradients: leave --backward \
                       out, or give the same mask by --mask-mod";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    if backward && sides.values.page_table.is_some() {
        let message = "the keys lie in pages, which have no gradients: leave --backward out, or give k and v \
                       packed, with cu_seqlens_k, or padded";
        return Err(InputError::Usage(message.to_owned()).into());
    }
    let types = common_types(file, args.out_dtype, packed.is_some(), backward)?;
    if backward {
        types
            .check_gradients()
            .map_err(|error| InputError::Usage(format!("{error}; leave --backward out")))?;
    }
    let q = shape_of(file, "q", layout, sides.starts_of_q())?;
    let [batch, seqlen_q, heads_q, head_dim] = q;
    // In numbers, of which int4 has two in an element.
    let per_element = types.kv.per_element();
    let of_keys = |name| -> anyhow::Result<[usize; 4]> {
        let [batch, seqlen, heads, elements] = shape_of(file, name, layout, "cu_seqlens_k")?;
        Ok([batch, seqlen, heads, elements * per_element])
    };
    let [k, v] = match packed {
        Some(packed) => packed.shapes(),
        None => [of_keys("k")?, of_keys("v")?],
    };
    if packed.is_some() && k[3] + v[3] != head_dim {
        let need = format!("its last axis must be {}, the columns of rows in {KV}", k[3] + v[3]);
        let got = file.entry("q")?.shape.clone();
        return Err(InputError::Shape { name: "q".to_owned(), got, need }.into());
    }
    let [batch_k, seqlen_k, heads_kv, _] = k;
    let head_dim_v = v[3];
    let latents = if args.latent { head_dim_v } else { 0 };
    let agree = |name: &str, got: [usize; 4], need: [usize; 4], why: &str| {
        if got == need {
            return Ok(());
        }
        let rank = file.entry(name)?.shape.len();
        let per_element = if matches!(name, "k" | "v") { per_element } else { 1 };
        let shape = |[b, s, h, d]: [usize; 4]| layout.shape(b, s, h, d / per_element)[4 - rank..].to_vec();
        let need = format!("{why} (in {layout}: {:?})", shape(need));
        Err(InputError::Shape { name: name.to_owned(), got: shape(got), need })
    };
    let batch_of_k = if sides.are_padded() { batch } else { batch_k };
    let why = match (args.latent, k[3] > 0 && k[3] + head_dim_v == head_dim) {
        (true, _) => "with --latent, q has the columns of v and then those of k",
        (false, true) => "head_dim must be q's, or v's latents the first columns of keys: add --latent",
        (false, false) if sides.are_padded() => "batch and head_dim must be q's",
        (false, false) => "head_dim must be q's",
    };
    agree("k", k, [batch_of_k, seqlen_k, heads_kv, head_dim.saturating_sub(latents)], why)?;
    agree("v", v, [batch_k, seqlen_k, heads_kv, head_dim_v], "batch, seqlen and heads must be k's")?;
    if backward {
        let dout = shape_of(file, "dout", layout, "cu_seqlens_q")?;
        agree("dout", dout, [batch, seqlen_q, heads_q, head_dim_v], "it must have the shape of the output")?;
    }
    let k = sides.of_cache(k);
    sides.check_heads(heads_q)?;
    let score = args.program.of(sides.score(args.softcap)).map_err(InputError::Usage)?;
    let lengths = sides.lengths(q, k)?;
    let problem = Problem::new(lengths, (heads_q, heads_kv), (head_dim, head_dim_v), types)
        .with_descales(sides.descales(&lengths))
        .with_latent(args.latent)
        .with_mask(args.mask.mask())
        .with_softmax_scale(args.scale)
        .with_score(score);
    problem.check()?;
    sides.check_descales(&problem)?;
    Ok(problem)
}

/// The element type that the tensors share, and that of k and v where they are codes.
fn common_types(
    file: &TensorFile,
    out: Option<Dtype>,
    is_packed: bool,
    backward: bool,
) -> Result<Types, InputError> {
    let first = file.entry("q")?.dtype;
    if let (true, Some(dtype)) = (is_packed, dtype_of(first)) {
        return Ok(Types::same(dtype).with_out(out.unwrap_or(dtype)));
    }
    let wrong = |name: &str, got: StoredDtype, need: String| {
        Err(InputError::Dtype { name: name.to_owned(), got: got.to_string(), need })
    };
    let of_k = file.entry("k")?.dtype;
    if first == StoredDtype::F8_E4M3 {
        for name in ["k", "v"] {
            let got = file.entry(name)?.dtype;
            if got != first {
                return wrong(name, got, "q holds F8_E4M3: k and v must hold it as well".to_owned());
            }
        }
        return Ok(Types::fp8(out.unwrap_or(Dtype::Bf16)));
    }
    let Some(dtype) = dtype_of(first) else {
        return wrong("q", first, "attention is computed on F32, F16, BF16 and F8_E4M3".to_owned());
    };
    let codes = codes_of(of_k);
    let of_kv = codes.map_or(first, |_| of_k);
    let others = [("k", of_kv), ("v", of_kv)].into_iter().chain(backward.then_some(("dout", first)));
    for (name, need) in others {
        let got = file.entry(name)?.dtype;
        if got != need {
            let need = match codes {
                Some(_) => format!("k holds {of_k}: k and v must be of one type, dout of q's"),
                None => format!(
                    "q holds {first}, and all tensors must be of one type, but for k and v of F8_E4M3, I8, \
                     or U8 (int4, two to a byte)"
                ),
            };
            return wrong(name, got, need);
        }
    }
    let types = Types::same(dtype).with_kv(codes.map_or(dtype, Codes::dtype));
    Ok(types.with_out(out.unwrap_or(dtype)))
}

/// Packs a tensor of `layout` as BSHD; `shape` is `[batch, seqlen, heads, dim]`.
pub(crate) fn to_bshd<T: Copy>(values: &[T], shape: [usize; 4], layout: TensorLayout) -> Vec<T> {
    let [batch, seqlen, heads, dim] = shape;
    match layout {
        TensorLayout::Bshd => values.to_vec(),
        TensorLayout::Bhsd => swap_middle_axes(values, [batch, heads, seqlen, dim]),
    }
}

/// `[a, b, c, d]` to `[a, c, b, d]`.
pub(crate) fn swap_middle_axes<T: Copy>(values: &[T], [first, second, third, dim]: [usize; 4]) -> Vec<T> {
    let mut swapped = Vec::with_capacity(values.len());
    for a in 0..first {
        for c in 0..third {
            for b in 0..second {
                let at = ((a * second + b) * third + c) * dim;
                swapped.extend_from_slice(&values[at..at + dim]);
            }
        }
    }
    swapped
}

/// Six digits behind the point, or a power of ten where they would say nothing.
fn scale_text(scale: f64) -> String {
    match scale.abs() {
        0.0 | 1e-3..1e6 => format!("{scale:.6}"),
        _ => format!("{scale:e}"),
    }
}

/// A problem in a line.
pub(crate) fn describe(p: &Problem) -> String {
    let mut text = format!(
        "batch {}, queries x keys {}x{}{}, heads {}, head dim {}, mask {}, {}, scale {}",
        p.lengths.sequences(),
        p.lengths.max_q(),
        p.lengths.max_k(),
        rows(&p.lengths),
        pair(p.heads_q, p.heads_kv, ':'),
        head_dims(p),
        p.mask,
        types(p),
        scale_text(p.scale())
    );
    if let Some(cap) = p.score.softcap {
        text += &format!(", soft cap {cap}");
    }
    match p.score.alibi {
        None => (),
        Some(Alibi::PerHead) => text += ", ALiBi",
        Some(Alibi::PerSequenceHead) => text += ", ALiBi by sequence",
    }
    text += if p.score.sinks { ", sinks" } else { "" };
    if let Some(own) = p.score.program {
        let has_weight = own.weight().is_some() && p.score.dropout.is_none();
        let parts =
            [("mask", own.mask().is_some()), ("score", own.score().is_some()), ("weight", has_weight)];
        let parts: Vec<&str> =
            parts.iter().filter(|(_, is_there)| *is_there).map(|(part, _)| *part).collect();
        text +=
            &if parts.is_empty() { String::new() } else { format!(", a program's {}", parts.join(" and ")) };
    }
    if let Some(dropout) = p.score.dropout {
        text += &format!(", dropout {}", dropout.p());
    }
    text
}

/// The types, and the descales of codes.
fn types(p: &Problem) -> String {
    let Types { q, kv, out, .. } = p.types;
    if !kv.is_code() {
        return q.to_string();
    }
    let named = [("Q", p.descales.q), ("K", p.descales.k), ("V", p.descales.v)];
    let descales = named.map(|(name, form)| match form {
        DescaleForm::None => String::new(),
        DescaleForm::Head => format!(", {name}'s descale per head"),
        DescaleForm::SequenceHead => format!(", {name}'s descale per sequence and head"),
        DescaleForm::TokenHead => format!(", {name}'s descale per row and head"),
    });
    let beside = if p.types.is_fp8() { format!("O in {out}") } else { format!("K and V in {kv}") };
    format!("{q} with {beside}{}", descales.concat())
}

/// How rows lie where lengths are on the device; nothing for uniform lengths.
fn rows(lengths: &Lengths) -> String {
    if lengths.is_uniform() {
        return String::new();
    }
    let side = |name: &str, side: Side| {
        let lie = match side.rows {
            SideRows::Padded { .. } => String::new(),
            SideRows::Packed { total, .. } => format!(" packed in {total}"),
            SideRows::Paged { page, pages, .. } => format!(" in {} of {page}", counted(pages, "page")),
        };
        let used = if side.used { " in use" } else { "" };
        (!lie.is_empty() || side.used).then(|| format!("{name}{lie}{used}"))
    };
    let sides = [side("queries", lengths.q()), side("keys", lengths.k())];
    format!(" at most ({})", sides.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// A note when the file's metadata names another mask, scale or cap than the problem has, or another layout
/// or way to rotate than the flags: only flags count, and a forgotten flag gives a plausible wrong answer.
pub(crate) fn metadata_hint(file: &TensorFile, problem: &Problem, args: &AttentionArgs) -> Option<String> {
    let entry = |key: &str| file.metadata().get(key).map(String::as_str);
    // What an entry says: a number, none, or nothing.
    let number = |key: &str| match entry(key)? {
        "none" => Some(None),
        text => text.parse::<f64>().ok().map(Some),
    };
    let side = |side: Option<u32>| side.map(f64::from);
    let other = |key: &str, have: Option<f64>| number(key).is_some_and(|said| said != have);
    let cut_off = problem.mask.right == Some(0);
    let causal = match entry("causal") {
        Some("true") => Some(true),
        Some("false") if number("window_right") != Some(Some(0.0)) => Some(false),
        _ => None,
    };
    let causal_differs = causal.is_some_and(|causal| causal != cut_off);
    let right_is_said = causal == Some(true) || causal_differs;
    let right_differs = !right_is_said && other("window_right", side(problem.mask.right));
    let scale = number("scale").flatten();
    let layout = entry("layout").and_then(|said| parse_layout(said).ok());
    let layout_differs = layout.zip(args.layout).is_some_and(|(said, flag)| said != flag);
    let interleaved = entry("rotary_interleaved").and_then(|said| said.parse::<bool>().ok());
    let rotary_differs =
        NewRows::are_rotated(file) && interleaved.is_some_and(|said| said != args.rotary_interleaved);
    let own = problem.score.program.map(|program| program.text().to_owned());
    let program_differs = entry("program").is_some_and(|said| own.as_deref() != Some(said));
    let differs = [
        ("layout", "--layout", layout_differs),
        ("causal", "--causal", causal_differs),
        ("window_left", "--window", other("window_left", side(problem.mask.left))),
        ("window_right", "--window", right_differs),
        ("query_offset", "--query-offset", other("query_offset", Some(problem.mask.offset as f64))),
        ("softcap", "--softcap", other("softcap", problem.score.softcap)),
        ("scale", "--scale", scale.is_some_and(|n| (n - problem.scale()).abs() > 1e-6 * n.abs())),
        ("rotary_interleaved", "--rotary-interleaved", rotary_differs),
        ("program", "--mask-mod, --score-mod", program_differs),
    ];
    let differ: Vec<String> = differs
        .into_iter()
        .filter(|(_, _, differs)| *differs)
        .map(|(key, flag, _)| format!("{key} = {} ({flag})", entry(key).unwrap_or_default()))
        .collect();
    if differ.is_empty() {
        return None;
    }
    Some(format!("the metadata of {} says {}; only flags decide", file.path().display(), differ.join(", ")))
}
