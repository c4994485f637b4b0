//! The arrays and options of a call, and the problem that they pose.

use std::cell::Cell;

use fa_attn::{Alibi, DescaleForm, Descales, Dtype, Lengths, Mask, Pass, Problem, ScoreMod, Side, Types};
use fa_core::extras::Value;
use fa_core::{Extra, Extras};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::call_program::{CallProgram, Programs};
use crate::dlpack::{Place, Type, View, elsewhere};
use crate::error::{InputError, UnsupportedError};

/// The options of a call that are numbers: the package's `CallOptions`, field by field.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
pub(crate) struct Options {
    /// Factor on Q K^T; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    pub causal: bool,
    /// Keys left and right of the diagonal that a query sees; negative for all.
    pub window: (i64, i64),
    /// 0 for none.
    pub softcap: f64,
    /// Whether gradients have the same bits in every run.
    pub deterministic: bool,
    /// Keys by which queries lie right of the bottom-right alignment.
    pub query_offset: i64,
    /// Whether V is the first columns of each key, of which K has the others.
    pub latent: bool,
    /// The codes that K and V are: bytes alone do not say.
    #[serde(default)]
    pub kv_dtype: Option<KvDtype>,
    /// The type of O, where Q is codes as well.
    #[serde(default)]
    pub out_dtype: Option<KvDtype>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Options {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Options> {
        let py = object.py();
        Ok(Options {
            scale: object.getattr(intern!(py, "scale"))?.extract()?,
            causal: object.getattr(intern!(py, "causal"))?.extract()?,
            window: object.getattr(intern!(py, "window"))?.extract()?,
            softcap: object.getattr(intern!(py, "softcap"))?.extract()?,
            deterministic: object.getattr(intern!(py, "deterministic"))?.extract()?,
            query_offset: object.getattr(intern!(py, "query_offset"))?.extract()?,
            latent: object.getattr(intern!(py, "latent"))?.extract()?,
            kv_dtype: object.getattr(intern!(py, "kv_dtype"))?.extract()?,
            out_dtype: object.getattr(intern!(py, "out_dtype"))?.extract()?,
        })
    }
}

/// A type by its name, as of the codes of K and V.
#[derive(Clone, Copy, Debug, serde::Deserialize)]
#[serde(transparent)]
pub(crate) struct KvDtype(pub Dtype);

impl<'a, 'py> FromPyObject<'a, 'py> for KvDtype {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<KvDtype> {
        let name: String = object.extract()?;
        name.parse()
            .map(KvDtype)
            .map_err(|error: fa_core::dtype::ParseDtypeError| InputError::new_err(error.to_string()))
    }
}

impl Options {
    /// FlashAttention's causal flag and window: a causal mask ends at the diagonal whatever the window's
    /// right side is.
    fn mask(&self) -> Mask {
        let (left, right) = self.window;
        let side = |side: i64| u32::try_from(side).ok();
        let right = if self.causal { Some(0) } else { side(right) };
        Mask::band(side(left), right).with_offset(self.query_offset)
    }
}

/// The arrays of a call other than Q, K and V.
#[derive(Default)]
pub(crate) struct Beside<'py> {
    pub extras: Extras<View<'py>>,
    /// Upper bounds on the rows of a packed sequence, and of one in pages.
    pub max: (usize, usize),
}

impl<'py> Beside<'py> {
    /// These arrays with upper bounds on the rows of packed sequences.
    pub(crate) fn bounded(extras: Extras<View<'py>>, max_q: i64, max_k: i64) -> PyResult<Beside<'py>> {
        Ok(Beside { extras, max: (bound("max_seqlen_q", max_q)?, bound("max_seqlen_k", max_k)?) })
    }

    /// The arrays of a tuple, in the order of [`arguments`], and the two bounds behind them.
    fn of(objects: Option<&Bound<'py, PyTuple>>, stream: Option<u64>) -> PyResult<Beside<'py>> {
        let Some(objects) = objects else { return Ok(Beside::default()) };
        let next = Cell::new(0);
        // Asked for in the table's order.
        let view = |extra: Extra, need: Type| {
            if !is_argument(extra) {
                return Ok(None);
            }
            let object = objects.get_borrowed_item(next.replace(next.get() + 1))?;
            if object.is_none() {
                return Ok(None);
            }
            words(argument(extra), &object, stream, need).map(Some)
        };
        let extras = Extras::try_of(|extra| view(extra, Type::I32), |extra| view(extra, Type::F32))?;
        let most =
            |name: &str, at: usize| bound(name, objects.get_borrowed_item(next.get() + at)?.extract()?);
        Ok(Beside { extras, max: (most("max_seqlen_q", 0)?, most("max_seqlen_k", 1)?) })
    }
}

/// The extras that every function takes: all but the gradient of the LSE.
pub(crate) fn arguments() -> impl Iterator<Item = Extra> {
    Extra::ALL.into_iter().filter(|extra| is_argument(*extra))
}

fn is_argument(extra: Extra) -> bool {
    extra.is_read_by(Pass::Forward)
}

/// The names of an argument in errors.
pub(crate) fn argument(extra: Extra) -> &'static str {
    const SEVERAL: [(Extra, &str); 2] =
        [(Extra::SequsedK, "seqused_k (cache_seqlens)"), (Extra::PageTable, "page_table (block_table)")];
    SEVERAL.iter().find(|(own, _)| *own == extra).map_or(extra.name(), |(_, names)| *names)
}

/// An upper bound on rows. It is checked here and not in Python, where torch.compile traces the call before
/// the value is known.
pub(crate) fn bound(name: &str, value: i64) -> PyResult<usize> {
    usize::try_from(value)
        .map_err(|_| InputError::new_err(format!("{name} is {value}: it must be at least 0")))
}

/// An array of one type whose elements lie end to end.
pub(crate) fn words<'py>(
    name: &str,
    object: &Bound<'py, PyAny>,
    stream: Option<u64>,
    need: Type,
) -> PyResult<View<'py>> {
    let view = View::of(name, object, stream)?;
    if view.dtype != need {
        let need = if need == Type::F32 { "float32" } else { "int32" };
        let message = format!("{name} holds {}: it must be {need}, convert it once", view.type_name());
        return Err(InputError::new_err(message));
    }
    if !view.is_contiguous() {
        let message = format!(
            "{name} has the shape {:?} and the strides {:?}: its elements must lie end to end, make it \
             contiguous",
            view.shape(),
            view.strides()
        );
        return Err(InputError::new_err(message));
    }
    Ok(view)
}

/// Q, K and V of a call, with its other arrays.
pub(crate) struct Given<'py> {
    pub q: View<'py>,
    pub k: View<'py>,
    pub v: View<'py>,
    pub beside: Beside<'py>,
    /// The call's own mask and change of scores.
    pub program: Option<CallProgram<'py>>,
    pub dtype: Dtype,
    /// The type of K and V: that of Q, or codes.
    pub kv: Dtype,
}

/// The element type of an array.
pub(crate) fn dtype_of(name: &str, view: &View<'_>) -> PyResult<Dtype> {
    match view.dtype {
        Type::F32 => Ok(Dtype::F32),
        Type::F16 => Ok(Dtype::F16),
        Type::Bf16 => Ok(Dtype::Bf16),
        Type::I32 | Type::E4m3 | Type::I8 | Type::Other => {
            let message = format!(
                "{name} holds {}: attention computes in float16 and bfloat16, on the CPU also in float32",
                view.type_name()
            );
            Err(UnsupportedError::new_err(message))
        }
    }
}

/// The element type of K or V, or of a Q that may be codes.
pub(crate) fn dtype_of_kv(name: &str, view: &View<'_>) -> PyResult<Dtype> {
    match view.dtype {
        Type::E4m3 => Ok(Dtype::E4m3),
        Type::I8 => Ok(Dtype::Int8),
        Type::F32 | Type::F16 | Type::Bf16 | Type::I32 | Type::Other => dtype_of(name, view),
    }
}

/// The type of K and V of this type where a call names it: bytes that are read as e4m3 may hold int4 or e5m2.
pub(crate) fn named_codes(kv: Dtype, named: Option<Dtype>) -> Dtype {
    match (kv, named) {
        (Dtype::E4m3, Some(codes @ (Dtype::Int4 | Dtype::E5m2))) => codes,
        (kv, _) => kv,
    }
}

/// Heads, and numbers of a row, of which int4 has two in an element.
pub(crate) fn heads_and_numbers(view: &View<'_>, dtype: Dtype) -> [usize; 2] {
    let [heads, elements] = heads_and_dim(view);
    [heads, elements.saturating_mul(dtype.per_element())]
}

impl<'py> Given<'py> {
    /// Q, K and V, checked to be on one device and of one type.
    ///
    /// # Errors Arrays on different devices or of different types, and types that are not supported.
    pub(crate) fn of(
        [q, k, v]: [&Bound<'py, PyAny>; 3],
        extras: Option<&Bound<'py, PyTuple>>,
        stream: Option<u64>,
    ) -> PyResult<Given<'py>> {
        let (q, k, v) = (View::of("q", q, stream)?, View::of("k", k, stream)?, View::of("v", v, stream)?);
        dtype_of_kv("q", &q)?;
        Given::of_views([q, k, v], Beside::of(extras, stream)?)
    }

    /// The same of arrays that are read already.
    ///
    /// # Errors As [`Given::of`].
    pub(crate) fn of_views([q, k, v]: [View<'py>; 3], beside: Beside<'py>) -> PyResult<Given<'py>> {
        let dtype = dtype_of_kv("q", &q)?;
        let kv = dtype_of_kv("k", &k)?;
        let kv = if kv.is_code() { kv } else { dtype };
        let given = Given { q, k, v, beside, program: None, dtype, kv };
        for (name, view) in [("k", &given.k), ("v", &given.v)] {
            let other = dtype_of_kv(name, view)?;
            if other != kv {
                let like = if kv == dtype { "q" } else { "k" };
                let message = format!("{name} holds {other} and {like} {kv}: they must be of one type");
                return Err(InputError::new_err(message));
            }
        }
        let place = given.q.place;
        for (name, view) in [("k", &given.k), ("v", &given.v)] {
            if view.place != place {
                return Err(elsewhere(name, place));
            }
        }
        for (extra, view) in given.beside.extras.iter() {
            if view.into_inner().place != place {
                return Err(elsewhere(argument(extra), place));
            }
        }
        Ok(given)
    }

    /// Takes programs as well.
    ///
    /// # Errors
    /// As [`CallProgram::of`], and arrays that lie elsewhere.
    pub(crate) fn take_programs(
        &mut self,
        programs: Option<Programs<'py>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let program = programs.map(|programs| CallProgram::of(programs, stream)).transpose()?.flatten();
        self.take_program(program)
    }

    pub(crate) fn take_program(&mut self, program: Option<CallProgram<'py>>) -> PyResult<()> {
        program.as_ref().map_or(Ok(()), |program| program.check_place(self.place()))?;
        self.program = program;
        Ok(())
    }

    /// The problem that kernels of `pass` are bound to: in forwards of a bias whose rows are aligned, of the
    /// program that says so.
    pub(crate) fn of_kernels(&self, problem: &Problem, pass: Pass) -> Problem {
        let program = self.program.as_ref().filter(|_| !pass.is_backward());
        program.map_or(*problem, |program| program.raw().with_aligned_rows(*problem))
    }

    pub(crate) fn place(&self) -> Place {
        self.q.place
    }

    /// The problem that the arrays pose with these options.
    ///
    /// # Errors
    /// Shapes that contradict each other.
    pub(crate) fn problem(&self, options: &Options) -> PyResult<Problem> {
        let Given { q, k, v, beside, dtype, kv, program } = self;
        let extras = &beside.extras;
        let named = options.kv_dtype.map(|KvDtype(dtype)| dtype);
        let kv = &named_codes(*kv, named);
        for (name, view, own) in [("q", q, dtype), ("k", k, kv)] {
            if own.is_code() && named != Some(*own) {
                let held = view.type_name();
                let message = format!(
                    "{name} holds {held}: attention computes in float16 and bfloat16, and flash_attn_func \
                     and its like in codes"
                );
                return Err(UnsupportedError::new_err(message));
            }
        }
        let types = Types::same(*dtype).with_kv(*kv);
        let types = options.out_dtype.map_or(types, |KvDtype(out)| types.with_out(out));
        let of_q = extras.q_descale.as_ref().map_or(DescaleForm::None, |view| match view.shape() {
            [] | [_] => DescaleForm::Head,
            _ => DescaleForm::SequenceHead,
        });
        let mut batch = Batch::default();
        let (side_q, side_k) = (self.queries(&mut batch)?, self.keys(&mut batch)?);
        let rows = k.shape().len();
        if v.shape().len() != rows || v.shape()[..rows - 1] != k.shape()[..rows - 1] {
            return Err(InputError::new_err(format!(
                "v has the shape {:?} and k {:?}: they differ in more than the head dim",
                v.shape(),
                k.shape()
            )));
        }
        let [heads_q, head_dim] = heads_and_dim(q);
        let [heads_kv, head_dim_k] = heads_and_numbers(k, *kv);
        let [_, head_dim_v] = heads_and_numbers(v, *kv);
        if !options.latent && head_dim_k != head_dim {
            return Err(InputError::new_err(format!(
                "k has a head dim of {head_dim_k} and q of {head_dim}: they must be equal"
            )));
        }
        if options.latent && head_dim_k.saturating_add(head_dim_v) != head_dim {
            return Err(InputError::new_err(format!(
                "q has a head dim of {head_dim}: a key begins with its latent, of {head_dim_v} columns, and \
                 has {head_dim_k} others"
            )));
        }
        let sequences = batch.sequences();
        let alibi =
            extras.alibi_slopes.as_ref().map(|slopes| alibi(slopes, sequences, heads_q)).transpose()?;
        let softcap = (options.softcap != 0.0).then_some(options.softcap);
        let lengths = Lengths::of(sequences, side_q, side_k);
        let score = ScoreMod::NONE.with_softcap(softcap).with_alibi(alibi).with_sinks(extras.sinks.is_some());
        let score = score.with_program(program.as_ref().map(|own| own.program));
        let problem = Problem::new(lengths, (heads_q, heads_kv), (head_dim, head_dim_v), types)
            .with_descales(
                Descales::new(
                    descale_form(&extras.k_descale, side_k, sequences),
                    descale_form(&extras.v_descale, side_k, sequences),
                )
                .with_q(of_q),
            )
            .with_latent(options.latent)
            .with_mask(options.mask())
            .with_softmax_scale(options.scale)
            .with_score(score);
        let problem = program.as_ref().map_or(problem, |own| problem.with_mods_built_in(own.scalars()));
        for (extra, value) in extras.iter().filter(|(extra, _)| is_argument(*extra)) {
            if let (Value::F32(view), Some(axes)) = (value, extra.axes_of(&problem)) {
                check_shape(extra.name(), view, axes.iter().map(|axis| axis.len(&problem)).collect())?;
            }
        }
        Ok(problem)
    }

    /// The rows of Q.
    fn queries(&self, batch: &mut Batch) -> PyResult<Side> {
        let (q, beside) = (&self.q, &self.beside);
        let side = match &beside.extras.cu_seqlens_q {
            Some(cu) => {
                axes("q", q, 3, "(total, heads, head_dim) with cu_seqlens_q")?;
                batch.is("cu_seqlens_q", sequences_of("cu_seqlens_q", cu)?)?;
                Side::packed(q.shape()[0], beside.max.0.min(q.shape()[0]))
            }
            None => {
                axes("q", q, 4, "(batch, seqlen, heads, head_dim) without cu_seqlens_q")?;
                batch.is("q", q.shape()[0])?;
                Side::padded(q.shape()[1])
            }
        };
        used("seqused_q", &beside.extras.seqused_q, side, batch)
    }

    /// The rows of K and V.
    fn keys(&self, batch: &mut Batch) -> PyResult<Side> {
        let (k, beside) = (&self.k, &self.beside);
        let side = match (&beside.extras.page_table, &beside.extras.cu_seqlens_k) {
            (Some(table), None) => {
                axes("k", k, 4, "(pages, page, heads, head_dim) with a page_table (block_table)")?;
                axes("page_table (block_table)", table, 2, "(batch, pages of a sequence)")?;
                batch.is("page_table (block_table)", table.shape()[0])?;
                let (pages, page) = (k.shape()[0], k.shape()[1]);
                // Without sequences a cache may have no pages, and then has no room.
                let columns = if pages == 0 && table.shape()[0] == 0 { 0 } else { table.shape()[1] };
                Side::paged(page, pages, columns.saturating_mul(page))
            }
            (Some(_), Some(_)) => {
                let message = "page_table (block_table) with cu_seqlens_k: keys in pages have their lengths \
                               in seqused_k (cache_seqlens), leave cu_seqlens_k out";
                return Err(InputError::new_err(message));
            }
            (None, Some(cu)) => {
                axes("k", k, 3, "(total, heads, head_dim) with cu_seqlens_k")?;
                batch.is("cu_seqlens_k", sequences_of("cu_seqlens_k", cu)?)?;
                Side::packed(k.shape()[0], beside.max.1.min(k.shape()[0]))
            }
            (None, None) => {
                axes("k", k, 4, "(batch, seqlen, heads, head_dim) without cu_seqlens_k and page_table")?;
                batch.is("k", k.shape()[0])?;
                Side::padded(k.shape()[1])
            }
        };
        used("seqused_k (cache_seqlens)", &beside.extras.seqused_k, side, batch)
    }
}

/// The sequences of a batch, and the array that had them first: the others must agree.
#[derive(Default)]
struct Batch(Option<(usize, &'static str)>);

impl Batch {
    fn is(&mut self, name: &'static str, found: usize) -> PyResult<()> {
        let (batch, first) = *self.0.get_or_insert((found, name));
        if batch == found {
            return Ok(());
        }
        let message =
            format!("{name} is of a batch of {found} and {first} of one of {batch}: they must be equal");
        Err(InputError::new_err(message))
    }

    fn sequences(&self) -> usize {
        self.0.map_or(0, |(sequences, _)| sequences)
    }
}

fn check_shape(name: &str, view: &View<'_>, need: Vec<usize>) -> PyResult<()> {
    if view.shape() == need {
        return Ok(());
    }
    let need: Vec<String> = need.iter().map(usize::to_string).collect();
    let need = if need.len() == 1 { format!("({},)", need[0]) } else { format!("({})", need.join(", ")) };
    Err(InputError::new_err(format!("{name} has the shape {:?}: it must be {need}", view.shape())))
}

fn axes(name: &str, view: &View<'_>, need: usize, what: &str) -> PyResult<()> {
    if view.shape().len() == need {
        return Ok(());
    }
    Err(InputError::new_err(format!("{name} has the shape {:?}: it must be {what}", view.shape())))
}

/// Sequences whose starts these are.
fn sequences_of(name: &str, starts: &View<'_>) -> PyResult<usize> {
    match starts.shape() {
        [len] if *len > 0 => Ok(len - 1),
        shape => Err(InputError::new_err(format!("{name} has the shape {shape:?}: it must be (batch + 1,)"))),
    }
}

/// `side`, with lengths in use where there are some.
fn used(name: &'static str, lengths: &Option<View<'_>>, side: Side, batch: &mut Batch) -> PyResult<Side> {
    let Some(lengths) = lengths else { return Ok(side) };
    axes(name, lengths, 1, "(batch,)")?;
    batch.is(name, lengths.shape()[0])?;
    Ok(side.with_used())
}

/// The last two lengths of an array of rows.
pub(crate) fn heads_and_dim(view: &View<'_>) -> [usize; 2] {
    let axes = view.shape().len();
    [view.shape()[axes - 2], view.shape()[axes - 1]]
}

/// The form of descales of K or V.
pub(crate) fn descale_form(descales: &Option<View<'_>>, keys: Side, sequences: usize) -> DescaleForm {
    let form = |view: &View<'_>| DescaleForm::of_shape(view.shape(), keys, sequences);
    descales.as_ref().map_or(DescaleForm::None, form)
}

fn alibi(slopes: &View<'_>, sequences: usize, heads: usize) -> PyResult<Alibi> {
    match *slopes.shape() {
        [own] if own == heads => Ok(Alibi::PerHead),
        [batch, own] if (batch, own) == (sequences, heads) => Ok(Alibi::PerSequenceHead),
        ref shape => Err(InputError::new_err(format!(
            "alibi_slopes has the shape {shape:?}: it must be ({heads},) or ({sequences}, {heads})"
        ))),
    }
}
