//! The problem that tensors and options pose, and the tensors beside Q, K and V as kernels read them.

use candle_core::{DType, Layout, Result, Tensor};
use fa_core::quantize::Codes;
use fa_core::{
    Alibi, DescaleForm, Descales, Dtype, Extra, Extras, Lengths, Mask, Problem, ScoreMod, Side, Strides,
    Types,
};
use fa_cpu::CpuError;

use crate::codes::{CODES, codes_of};
use crate::error::{Error, refused, same_device};
use crate::options::{Options, Rows};
use crate::programs;

/// A call's problem and the tensors that it names.
#[derive(Clone, Debug)]
pub(crate) struct Posed {
    pub(crate) problem: Problem,
    pub(crate) beside: Beside,
    pub(crate) program: Option<programs::ProgramCall>,
    /// Of gradients on a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) deterministic: bool,
}

/// The gradients that a backward gives.
pub(crate) struct Gradients {
    /// Of Q, K and V.
    pub(crate) inputs: [Tensor; 3],
    /// Of the sinks, where there are some.
    pub(crate) sinks: Option<Tensor>,
    /// Of the program's arrays that [`Posed::tracked`] has, f32.
    pub(crate) arrays: Vec<Tensor>,
}

impl Gradients {
    /// Those of [`Posed::tracked`].
    pub(crate) fn beside(self, posed: &Posed) -> Vec<Tensor> {
        let wants_sinks = posed.beside.sinks.as_ref().is_some_and(Tensor::track_op);
        self.sinks.filter(|_| wants_sinks).into_iter().chain(self.arrays).collect()
    }
}

/// Tensors beside Q, K and V: contiguous, on Q's device; starts, lengths and pages u32 or i32, the others
/// f32.
pub(crate) type Beside = Extras<Tensor>;

impl Posed {
    /// What the CPU's kernels refuse, in the words of the arguments.
    pub(crate) fn refused(&self, error: CpuError) -> candle_core::Error {
        if let CpuError::Beyond { name, index, value, limit } = error
            && name == Extra::SequsedK.name()
            && self.beside.page_table.is_some()
        {
            return Error::PagedLength { sequence: index, keys: value, room: limit }.into();
        }
        refused(error)
    }

    /// Checks shapes, types and devices, and everything that does not depend on the device.
    pub(crate) fn new(q: &Tensor, k: &Tensor, v: &Tensor, options: &Options<'_>) -> Result<Posed> {
        let dtype = dtype_of(q)?;
        let codes = codes_of(k.dtype(), options.byte_codes).filter(|_| q.dtype() != CODES);
        let of_kv = if codes.is_some() { k.dtype() } else { q.dtype() };
        for (name, tensor) in [("k", k), ("v", v)] {
            same_device(name, tensor, q)?;
            if tensor.dtype() != of_kv {
                let need = format!("{of_kv:?}, the type of {}", if codes.is_some() { "k" } else { "q" });
                return Err(Error::Dtype { tensor: name, got: tensor.dtype(), need }.into());
            }
        }
        let per_element = codes.map_or(1, Codes::per_byte);
        let inputs = Inputs { q, k, v, latent: options.latent, per_element };
        let (sides, mut beside) = match options.rows {
            Rows::Padded { used_q, used_k } => padded(inputs, [used_q, used_k])?,
            Rows::Packed { seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k } => {
                packed(inputs, [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k])?
            }
            Rows::Paged { seqlens_q, seqlens_k, block_table, max_seqlen_q, max_seqlen_k } => {
                paged(inputs, [seqlens_q, seqlens_k], block_table, [max_seqlen_q, max_seqlen_k])?
            }
            Rows::Named { indices, lengths } => named(inputs, indices, lengths)?,
        };
        let Sides { lengths, heads_q, head_dim, heads_kv, head_dim_v } = sides;
        let alibi = match options.alibi_slopes {
            Some(slopes) => {
                let (alibi, slopes) = alibi(slopes, lengths.sequences(), heads_q, q)?;
                beside.alibi_slopes = Some(slopes);
                Some(alibi)
            }
            None => None,
        };
        beside.sinks = options.sinks.map(|sinks| floats("sinks", sinks, &[heads_q], q)).transpose()?;
        let program = programs::ProgramCall::new(options, &lengths, heads_q, q)?;
        let types = match dtype {
            Dtype::E4m3 => Types::fp8(Dtype::Bf16),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => {
                Types::same(dtype).with_kv(codes.map_or(dtype, Codes::dtype))
            }
        };
        let form = |descale: Option<&Tensor>| match descale.map(Tensor::dims) {
            None => DescaleForm::None,
            Some(dims) => DescaleForm::of_shape(dims, lengths.k(), lengths.sequences()),
        };
        let problem = Problem::new(lengths, (heads_q, heads_kv), (head_dim, head_dim_v), types)
            .with_latent(options.latent)
            .with_descales(
                Descales::new(form(options.k_descale), form(options.v_descale))
                    .with_q(form(options.q_descale)),
            )
            .with_mask(mask(options, &lengths))
            .with_softmax_scale(Some(f64::from(options.softmax_scale)))
            .with_score(
                ScoreMod::NONE
                    .with_softcap(options.softcap.filter(|cap| *cap != 0.0).map(f64::from))
                    .with_alibi(alibi)
                    .with_sinks(beside.sinks.is_some())
                    .with_program(program.as_ref().map(|own| own.program)),
            );
        let problem = program.as_ref().map_or(problem, |own| problem.with_mods_built_in(&own.scalars));
        let program = program.and_then(|own| own.left(problem.score.program));
        problem.check().map_err(refused)?;
        beside.q_descale = descale(Extra::QDescale, options.q_descale, &problem, q)?;
        beside.k_descale = descale(Extra::KDescale, options.k_descale, &problem, q)?;
        beside.v_descale = descale(Extra::VDescale, options.v_descale, &problem, q)?;
        Ok(Posed {
            problem,
            beside,
            program,
            #[cfg(feature = "cuda")]
            deterministic: options.deterministic,
        })
    }

    /// What the lengths of sequences are read from.
    pub(crate) fn lengths(&self) -> Beside {
        let Extras { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, .. } = self.beside.clone();
        Extras { cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, ..Extras::NONE }
    }

    /// The tensors beside Q, K and V that require a gradient: sinks, then arrays of the program.
    pub(crate) fn tracked(&self) -> Vec<Tensor> {
        let sinks = self.beside.sinks.clone().filter(Tensor::track_op);
        let arrays = self.program.iter().flat_map(|own| own.tracked().map(|slot| own.arrays[slot].clone()));
        sinks.into_iter().chain(arrays).collect()
    }

    /// Shape of the output: that of Q, with V's rows.
    pub(crate) fn out_shape(&self, q: &[usize]) -> Vec<usize> {
        let (_, outer) = q.split_last().unwrap_or((&0, q));
        outer.iter().copied().chain([self.problem.head_dim_v]).collect()
    }

    /// Shape of LSE for Q of this shape: `(batch, heads, seqlen_q)` or `(heads, total_q)`.
    pub(crate) fn lse_shape(&self, q: &[usize]) -> Vec<usize> {
        match *q {
            [batch, seqlen, heads, _] => vec![batch, heads, seqlen],
            [total, heads, _] => vec![heads, total],
            _ => q.to_vec(),
        }
    }
}

/// What the shapes of Q, K and V say.
struct Sides {
    lengths: Lengths,
    heads_q: usize,
    head_dim: usize,
    heads_kv: usize,
    head_dim_v: usize,
}

/// Q, K and V, and whether V has the first columns of keys.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    latent: bool,
    /// Numbers in an element of K and V.
    per_element: usize,
}

impl Inputs<'_> {
    /// Checks K, of these rows and heads, and V: K has the columns of Q, or those that V does not have.
    fn check(&self, rows: &[usize], head_dim: usize, head_dim_v: usize) -> Result<()> {
        let of_k = head_dim.saturating_sub(if self.latent { head_dim_v } else { 0 });
        fits("k", self.k, &[rows, &[of_k.div_ceil(self.per_element)]].concat())?;
        fits("v", self.v, &[rows, &[head_dim_v / self.per_element]].concat())
    }
}

fn padded(inputs: Inputs<'_>, used: [Option<&Tensor>; 2]) -> Result<(Sides, Beside)> {
    let Inputs { q, k, v, .. } = inputs;
    let [batch, seqlen_q, heads_q, head_dim] = dims(q, "q", "(batch, seqlen_q, heads, head_dim)")?;
    let [_, seqlen_k, heads_kv, _] = dims(k, "k", "(batch, seqlen_k, heads_kv, head_dim)")?;
    let [_, _, _, head_dim_v] = dims(v, "v", "(batch, seqlen_k, heads_kv, head_dim_v)")?;
    let head_dim_v = head_dim_v * inputs.per_element;
    inputs.check(&[batch, seqlen_k, heads_kv], head_dim, head_dim_v)?;
    let [used_q, used_k] = used;
    let side = |len: usize, used: Option<&Tensor>| {
        if used.is_some() { Side::padded(len).with_used() } else { Side::padded(len) }
    };
    let lengths = Lengths::of(batch, side(seqlen_q, used_q), side(seqlen_k, used_k));
    let used = |name, used: Option<&Tensor>| used.map(|used| integers(name, used, &[batch], q)).transpose();
    let beside =
        Beside { seqused_q: used("used_q", used_q)?, seqused_k: used("used_k", used_k)?, ..Beside::NONE };
    Ok((Sides { lengths, heads_q, head_dim, heads_kv, head_dim_v }, beside))
}

fn packed(inputs: Inputs<'_>, starts: [&Tensor; 2], max: [usize; 2]) -> Result<(Sides, Beside)> {
    let Inputs { q, k, v, .. } = inputs;
    let [total_q, heads_q, head_dim] = dims(q, "q", "(total_q, heads, head_dim)")?;
    let [total_k, heads_kv, _] = dims(k, "k", "(total_k, heads_kv, head_dim)")?;
    let [_, _, head_dim_v] = dims(v, "v", "(total_k, heads_kv, head_dim_v)")?;
    let head_dim_v = head_dim_v * inputs.per_element;
    inputs.check(&[total_k, heads_kv], head_dim, head_dim_v)?;
    let [seqlens_q, seqlens_k] = starts;
    let batch = sequences(seqlens_q)?;
    let beside = Beside {
        cu_seqlens_q: Some(integers("seqlens_q", seqlens_q, &[batch + 1], q)?),
        cu_seqlens_k: Some(integers("seqlens_k", seqlens_k, &[batch + 1], q)?),
        ..Beside::NONE
    };
    let lengths = Lengths::packed(batch, total_q, total_k, max[0], max[1]);
    Ok((Sides { lengths, heads_q, head_dim, heads_kv, head_dim_v }, beside))
}

fn paged(
    inputs: Inputs<'_>,
    starts: [&Tensor; 2],
    block_table: &Tensor,
    max: [usize; 2],
) -> Result<(Sides, Beside)> {
    let Inputs { q, k, v, .. } = inputs;
    let [total_q, heads_q, head_dim] = dims(q, "q", "(total_q, heads, head_dim)")?;
    let [pages, page, heads_kv, _] = dims(k, "k", "(pages, page_block_size, heads_kv, head_dim)")?;
    let [_, _, _, head_dim_v] = dims(v, "v", "(pages, page_block_size, heads_kv, head_dim_v)")?;
    let head_dim_v = head_dim_v * inputs.per_element;
    inputs.check(&[pages, page, heads_kv], head_dim, head_dim_v)?;
    let [seqlens_q, seqlens_k] = starts;
    let batch = sequences(seqlens_q)?;
    let cu_q = integers("seqlens_q", seqlens_q, &[batch + 1], q)?;
    let seqlens_k = integers("seqlens_k", seqlens_k, &[batch + 1], q)?;
    let [ends, begins] = [1, 0].map(|at| seqlens_k.narrow(0, at, batch));
    let used_k = differences(&ends?, &begins?)?;
    let keys = Side::paged(page, pages, max[1]);
    let lengths = Lengths::of(batch, Side::packed(total_q, max[0]), keys);
    let beside = Beside {
        cu_seqlens_q: Some(cu_q),
        seqused_k: Some(used_k),
        page_table: Some(table(block_table, batch, lengths.table_columns(), q)?),
        ..Beside::NONE
    };
    Ok((Sides { lengths, heads_q, head_dim, heads_kv, head_dim_v }, beside))
}

/// Each query as a sequence of its own, with pages of one row.
fn named(inputs: Inputs<'_>, indices: &Tensor, lengths: &Tensor) -> Result<(Sides, Beside)> {
    let Inputs { q, k, v, .. } = inputs;
    let [tokens, heads_q, head_dim] = dims(q, "q", "(tokens, heads, head_dim)")?;
    let [rows, page, heads_kv, _] = dims(k, "k", "(rows, 1, heads_kv, head_dim)")?;
    let [_, _, _, head_dim_v] = dims(v, "v", "(rows, 1, heads_kv, head_dim_v)")?;
    let head_dim_v = head_dim_v * inputs.per_element;
    let [_, most] = dims(indices, "indices", "(tokens, most)")?;
    if page != 1 {
        let need = format!("({rows}, 1, {heads_kv}, head_dim): reshape pages of several rows");
        return Err(Error::Shape { tensor: "k", shape: k.dims().to_vec(), need }.into());
    }
    inputs.check(&[rows, 1, heads_kv], head_dim, head_dim_v)?;
    let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
    let starts = Tensor::arange(0, count(tokens).saturating_add(1), q.device())?;
    let beside = Beside {
        cu_seqlens_q: Some(integers("seqlens_q", &starts, &[tokens + 1], q)?),
        seqused_k: Some(integers("lengths", lengths, &[tokens], q)?),
        page_table: Some(integers("indices", indices, &[tokens, most], q)?),
        ..Beside::NONE
    };
    let lengths = Lengths::of(tokens, Side::packed(tokens, 1), Side::paged(1, rows, most));
    Ok((Sides { lengths, heads_q, head_dim, heads_kv, head_dim_v }, beside))
}

/// `ends - begins`. On the CPU sums that descend give negative numbers, which the kernels refuse.
fn differences(ends: &Tensor, begins: &Tensor) -> Result<Tensor> {
    if !ends.device().is_cpu() {
        return ends - begins;
    }
    let dtype = DType::I64;
    (ends.to_dtype(dtype)? - begins.to_dtype(dtype)?)?.to_dtype(DType::I32)
}

/// The strides of a layout; the problem says whether a tensor is packed or a cache in pages.
pub(crate) fn strides(layout: &Layout) -> Strides {
    let at = |from_last: usize| {
        let strides = layout.stride();
        strides.len().checked_sub(from_last).map_or(0, |axis| strides[axis] as i64)
    };
    Strides { batch: at(4), seq: at(3), head: at(2), dim: at(1) }
}

/// The type of Q, K and V.
fn dtype_of(q: &Tensor) -> Result<Dtype> {
    let computed = [
        (DType::F32, Dtype::F32),
        (DType::F16, Dtype::F16),
        (DType::BF16, Dtype::Bf16),
        (CODES, Dtype::E4m3),
    ];
    let got = q.dtype();
    let found = computed.into_iter().find(|(theirs, _)| *theirs == got).map(|(_, ours)| ours);
    Ok(found.ok_or_else(|| {
        let need = "f16, bf16 or f8e4m3, on the CPU also f32: convert by `to_dtype`".to_owned();
        Error::Dtype { tensor: "q", got, need }
    })?)
}

/// A window at least as wide as the sequence hides nothing.
fn mask(options: &Options<'_>, lengths: &Lengths) -> Mask {
    let (max_q, max_k) = (lengths.max_q(), lengths.max_k());
    let is_moved = options.query_offset != 0;
    let left = options.window_size_left.filter(|left| is_moved || *left < max_k.saturating_sub(1));
    let hides = |right: &usize| is_moved || *right <= max_k && *right < max_q.saturating_sub(1);
    let right = options.window_size_right.filter(hides);
    let side = |side: Option<usize>| side.and_then(|side| u32::try_from(side).ok());
    Mask::band(side(left), side(right)).with_offset(options.query_offset)
}

fn dims<const N: usize>(tensor: &Tensor, name: &'static str, need: &str) -> Result<[usize; N]> {
    let shape = tensor.dims();
    let wrong = || Error::Shape { tensor: name, shape: shape.to_vec(), need: need.to_owned() };
    Ok(<[usize; N]>::try_from(shape).map_err(|_| wrong())?)
}

fn fits(name: &'static str, tensor: &Tensor, need: &[usize]) -> Result<()> {
    let shape = tensor.dims();
    if shape == need {
        return Ok(());
    }
    Err(Error::Shape { tensor: name, shape: shape.to_vec(), need: format!("{need:?}") }.into())
}

/// Sequences whose starts these are.
fn sequences(starts: &Tensor) -> Result<usize> {
    let need = "(batch + 1): the first row of each sequence, then the end of the last";
    let [count] = dims(starts, "seqlens_q", need)?;
    let none = || Error::Shape { tensor: "seqlens_q", shape: vec![0], need: need.to_owned() };
    Ok(count.checked_sub(1).ok_or_else(none)?)
}

/// Starts, lengths or pages as kernels read them.
fn integers(name: &'static str, tensor: &Tensor, shape: &[usize], q: &Tensor) -> Result<Tensor> {
    same_device(name, tensor, q)?;
    fits(name, tensor, shape)?;
    let got = tensor.dtype();
    if !matches!(got, DType::U32 | DType::I32) {
        return Err(Error::Dtype { tensor: name, got, need: "u32 or i32".to_owned() }.into());
    }
    tensor.contiguous()
}

/// Slopes or sinks as kernels read them; those of another float type are converted.
fn floats(name: &'static str, tensor: &Tensor, shape: &[usize], q: &Tensor) -> Result<Tensor> {
    same_device(name, tensor, q)?;
    fits(name, tensor, shape)?;
    let got = tensor.dtype();
    if !matches!(got, DType::F32 | DType::F16 | DType::BF16 | DType::F64) {
        return Err(Error::Dtype { tensor: name, got, need: "f32".to_owned() }.into());
    }
    tensor.to_dtype(DType::F32)?.contiguous()
}

/// Descales in the problem's form; one for all heads is repeated.
fn descale(extra: Extra, given: Option<&Tensor>, problem: &Problem, q: &Tensor) -> Result<Option<Tensor>> {
    let (Some(given), Some(axes)) = (given, extra.axes_of(problem)) else { return Ok(None) };
    let shape: Vec<usize> = axes.iter().map(|axis| axis.len(problem)).collect();
    let given = if given.dims() == [1] { given.broadcast_as(shape.as_slice())? } else { given.clone() };
    floats(extra.name(), &given.detach(), &shape, q).map(Some)
}

/// The first `columns` of a page table.
fn table(table: &Tensor, batch: usize, columns: usize, q: &Tensor) -> Result<Tensor> {
    let need = format!("({batch}, ceil(max_seqlen_k / page_block_size) = {columns} or more)");
    let [rows, have] = dims(table, "block_table", &need)?;
    if rows != batch || have < columns {
        return Err(Error::Shape { tensor: "block_table", shape: vec![rows, have], need }.into());
    }
    integers("block_table", &table.narrow(1, 0, columns)?, &[batch, columns], q)
}

/// ALiBi's slopes, for each sequence or for all.
fn alibi(slopes: &Tensor, batch: usize, heads: usize, q: &Tensor) -> Result<(Alibi, Tensor)> {
    if slopes.track_op() {
        let instead = "give `alibi_slopes.detach()`";
        return Err(Error::NoGradient { tensor: "alibi_slopes", instead }.into());
    }
    if slopes.rank() == 2 {
        return Ok((Alibi::PerSequenceHead, floats("alibi_slopes", slopes, &[batch, heads], q)?));
    }
    Ok((Alibi::PerHead, floats("alibi_slopes", slopes, &[heads], q)?))
}
