//! The short way of a call: what most calls of torch's tensors ask is read, checked and computed here alone.
//! A call that asks for anything else takes the package's long way, which words the errors, too.

use fa_attn::{Division, Dtype, Pass, Problem};
use fa_core::Extras;
use fa_planner::account::MAX_SPLITS;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use crate::calls::{On, run};
use crate::dlpack::{Place, Type, View};
use crate::given::{Beside, Given, KvDtype, Options};
use crate::host::Written;

/// Elements of 16 bits of which a GPU's kernels read whole multiples in each row, and bytes of which they
/// write whole multiples.
const WHOLE: usize = 8;
const WRITTEN_AT: usize = 16;

/// What the short way takes from the package, once.
#[pyclass(frozen, module = "fa_attn._core")]
pub(crate) struct Plain {
    /// torch's `Tensor` and `Parameter`.
    types: [Py<PyAny>; 2],
    /// How a keyword is read where it is not None: a tuple of its neutral values, or a name that
    /// [`Asked::keyword`] knows; what has neither takes the long way.
    keywords: Py<PyDict>,
    /// `empty_like(q)` for a result in the shape of a contiguous q, `new_out(q, columns)` for others,
    /// `new_lse(q)`; the same two where rows of q are in no use, as results have them there.
    new: [Py<PyAny>; 5],
    /// A tensor as contiguous float32, without autograd.
    floats: Py<PyAny>,
    is_grad_enabled: Py<PyAny>,
}

/// An array that a call may have.
type Maybe<'py> = Option<Bound<'py, PyAny>>;

/// How the caller wants the work divided, as the package has it.
type Divided = (Option<usize>, Option<bool>);

/// What a call asks besides its arrays.
struct Asked<'py> {
    options: Options,
    out: Maybe<'py>,
    sinks: Maybe<'py>,
    slopes: Maybe<'py>,
    /// Those of k and v.
    descales: [Maybe<'py>; 2],
    wants_lse: bool,
    /// Whether the result is FlashAttention's of `return_attn_probs`.
    is_triple: bool,
    division: Divided,
}

/// Starts of queries and keys, keys in use, the page table, the starts of new keys, queries in use, and the
/// bounds on rows.
struct Lengths<'py> {
    arrays: [Maybe<'py>; 6],
    most: [i64; 2],
}

#[pymethods]
impl Plain {
    #[new]
    fn new(
        types: [Py<PyAny>; 2],
        keywords: Py<PyDict>,
        new: [Py<PyAny>; 5],
        floats: Py<PyAny>,
        is_grad_enabled: Py<PyAny>,
    ) -> Plain {
        Plain { types, keywords, new, floats, is_grad_enabled }
    }

    /// What the call returns; `None` for the long way, `False` where gradients of q, k and v are asked for.
    /// `numbers`: softmax_scale, causal, window_size, softcap and deterministic. `results`: out,
    /// return_softmax_lse, return_lse and return_attn_probs. `slopes`: alibi_slopes. `unasked`: what has to
    /// be None. `lengths`: cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, page_table, cu_seqlens_k_new,
    /// max_seqlen_q, max_seqlen_k and seqused_q. `metadata`: a `SchedulerMetadata`.
    #[allow(clippy::too_many_arguments)]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        numbers: &Bound<'py, PyTuple>,
        results: &Bound<'py, PyTuple>,
        slopes: Option<Bound<'py, PyAny>>,
        unasked: &Bound<'py, PyTuple>,
        keywords: &Bound<'py, PyDict>,
        dropout_p: &Bound<'py, PyAny>,
        lengths: Option<&Bound<'py, PyTuple>>,
        num_splits: &Bound<'py, PyAny>,
        is_cache: bool,
        metadata: Option<&Bound<'py, PyAny>>,
        stream: Option<u64>,
        allocate: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let is_dropped = !dropout_p.cast_exact::<PyFloat>().is_ok_and(|p| p.value() == 0.0);
        if is_dropped || unasked.iter_borrowed().any(|value| !value.is_none()) {
            return Ok(None);
        }
        let Some(mut asked) = self.asked(numbers, results, keywords, num_splits)? else { return Ok(None) };
        asked.slopes = slopes;
        let Some(lengths) = Lengths::of(lengths, is_cache) else { return Ok(None) };
        let Some(is_differentiated) = self.is_differentiated([q, k, v], &asked, &lengths)? else {
            return Ok(None);
        };
        if is_differentiated {
            // Codes have no gradients, which the long way says.
            let dtype = |x: &Bound<'py, PyAny>| x.getattr(intern!(py, "dtype"));
            if asked.descales.iter().any(Option::is_some) || !dtype(q)?.is(&dtype(k)?) {
                return Ok(None);
            }
            let has_none = is_cache || asked.out.is_some() || lengths.arrays[3].is_some();
            return Ok((!has_none).then(|| PyBool::new(py, false).to_owned().into_any()));
        }
        let views = [View::of("q", q, stream)?, View::of("k", k, stream)?, View::of("v", v, stream)?];
        let dtype = views[0].dtype;
        let codes = codes_of(&views[1]);
        // A whole number of pieces of 16 bytes.
        let (keys, whole) = if codes.is_some() { (views[1].dtype, 2 * WHOLE) } else { (dtype, WHOLE) };
        let is_plain = |view: &View<'_>, dtype: Type, whole: usize| {
            let last = (view.shape().last(), view.strides().last());
            let (Some(&columns), Some(&stride)) = last else { return false };
            let has_rows = stride == 1 || view.is_contiguous();
            view.dtype == dtype && has_rows && columns % whole == 0
        };
        // Others are copied, but for a cache, which an error names.
        let inputs = if is_cache { &views[..1] } else { &views[..] };
        let is_read = |view: &View<'_>| {
            view.place == Place::Cpu || is_aligned(view, if view.dtype == keys { whole } else { WHOLE })
        };
        if !inputs.iter().all(is_read) {
            return Ok(None);
        }
        let are_plain =
            is_plain(&views[0], dtype, WHOLE) && views[1..].iter().all(|view| is_plain(view, keys, whole));
        if !matches!(dtype, Type::F16 | Type::Bf16) || !are_plain || codes_of(&views[2]) != codes {
            return Ok(None);
        }
        // Of what holds no codes they are factors like any; metadata are of calls without codes.
        let has_descales = asked.descales.iter().any(Option::is_some);
        if (has_descales && codes.is_none()) || (metadata.is_some() && codes.is_some()) {
            return Ok(None);
        }
        asked.options.kv_dtype = codes.map(KvDtype);
        let is_on_cpu = views[0].place == Place::Cpu;
        // Rows that belong to no sequence are left as they are, which is for a GPU only.
        if is_on_cpu && lengths.arrays[0].is_some() {
            return Ok(None);
        }
        let sinks = match &asked.sinks {
            Some(sinks) => Some(self.words("sinks", sinks, stream)?),
            None => None,
        };
        let mut descales: [Maybe<'py>; 2] = [None, None];
        for ((own, given), name) in descales.iter_mut().zip(&asked.descales).zip(["k_descale", "v_descale"]) {
            let Some(given) = given else { continue };
            let view = View::of(name, given, stream)?;
            // One for all heads is broadcast, one for each row written with its row.
            let heads = views[1].shape().iter().rev().nth(1);
            let has_form = match view.shape() {
                [own] => Some(own) == heads,
                [_, own] => Some(own) == heads && views[1].shape().len() == 4,
                _ => false,
            };
            if view.dtype != Type::F32 || !has_form {
                return Ok(None);
            }
            drop(view);
            *own = Some(self.words(name, given, stream)?);
        }
        let Some(mut extras) = lengths.extras(stream)? else { return Ok(None) };
        let [of_k, of_v] = &descales;
        let slots = [("k_descale", of_k, &mut extras.k_descale), ("v_descale", of_v, &mut extras.v_descale)];
        for (name, own, slot) in slots {
            *slot = own.as_ref().map(|own| View::of(name, own, stream)).transpose()?;
        }
        extras.sinks = sinks.as_ref().map(|sinks| View::of("sinks", sinks, stream)).transpose()?;
        if let Some(slopes) = &asked.slopes {
            let slopes = View::of("alibi_slopes", slopes, stream)?;
            if slopes.dtype != Type::F32 || !slopes.is_contiguous() {
                return Ok(None);
            }
            extras.alibi_slopes = Some(slopes);
        }
        let most_q = match (&lengths.arrays[0], views[0].shape()) {
            (None, &[_, rows, _, _]) => i64::try_from(rows).unwrap_or(i64::MAX),
            _ => lengths.most[0],
        };
        let given = Given::of_views(views, Beside::bounded(extras, most_q, lengths.most[1])?)?;
        let problem = given.problem(&asked.options)?;
        if let Some(starts) = &lengths.arrays[4] {
            let starts = View::of("cu_seqlens_k_new", starts, stream)?;
            if starts.dtype != Type::I32 || starts.shape() != [problem.lengths.sequences() + 1] {
                return Ok(None);
            }
        }
        let [empty_like, mut new_out, mut new_lse, unused_out, unused_lse] = self.new.each_ref();
        let has_gaps = lengths.arrays[5].is_some();
        if has_gaps {
            (new_out, new_lse) = (unused_out, unused_lse);
        }
        let out = match &asked.out {
            Some(out) => out.clone(),
            None if !has_gaps && given.q.is_contiguous() && problem.head_dim == problem.head_dim_v => {
                empty_like.bind(py).call1((q,))?
            }
            None => new_out.bind(py).call1((q, problem.head_dim_v))?,
        };
        let own = View::of("out", &out, stream)?;
        if asked.out.is_some() && !(is_written_in_place(&own) && is_apart(&own, &given)) {
            return Ok(None);
        }
        let lse = if asked.wants_lse || is_on_cpu { Some(new_lse.bind(py).call1((q,))?) } else { None };
        let own_lse = lse.as_ref().map(|lse| View::of("softmax_lse", lse, stream)).transpose()?;
        let to = Written::Forward { out: &own, lse: own_lse.as_ref() };
        let mut plans = None;
        let mut division = asked.division;
        if let Some(metadata) = metadata {
            let longest = usize::try_from(most_q).unwrap_or(usize::MAX);
            if !is_described(metadata, q, (&given, &problem), longest, &asked.options)? {
                return Ok(None);
            }
            let planned: Option<Divided> = metadata.getattr(intern!(py, "division"))?.extract()?;
            division = match (division, planned) {
                (own, None) => own,
                ((None, None), Some(planned)) => planned,
                (own, Some(planned)) if own == planned => own,
                _ => return Ok(None),
            };
            plans = Some(metadata.getattr(intern!(py, "plans"))?.cast_into::<PyDict>()?);
        }
        let (splits, pack_gqa) = division;
        let on = On {
            stream,
            allocate: Some(allocate),
            plans: plans.as_ref(),
            division: Division { splits, pack_gqa },
            pinned: asked.options.deterministic,
        };
        run(py, &given, (&problem, Pass::Forward), &to, Some(q), on)?;
        drop((own, own_lse));
        match lse.filter(|_| asked.wants_lse) {
            None => Ok(Some(out)),
            Some(lse) if asked.is_triple => Ok(Some((out, lse, py.None()).into_pyobject(py)?.into_any())),
            Some(lse) => Ok(Some((out, lse).into_pyobject(py)?.into_any())),
        }
    }
}

impl Plain {
    /// What a call asks, where all of it is of the types that the package documents.
    fn asked<'py>(
        &self,
        numbers: &Bound<'py, PyTuple>,
        results: &Bound<'py, PyTuple>,
        keywords: &Bound<'py, PyDict>,
        num_splits: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Asked<'py>>> {
        let Some(options) = options(numbers)? else { return Ok(None) };
        let mut wants = [false; 3];
        for (at, want) in wants.iter_mut().enumerate() {
            let Some(given) = flag(&results.get_item(at + 1)?) else { return Ok(None) };
            *want = given;
        }
        let mut asked = Asked {
            options,
            out: some(results.get_item(0)?),
            sinks: None,
            slopes: None,
            descales: [const { None }; 2],
            wants_lse: wants.contains(&true),
            is_triple: wants[2],
            division: (None, None),
        };
        if !num_splits.is_none() && !asked.keyword("num_splits", num_splits) {
            return Ok(None);
        }
        let table = self.keywords.bind(keywords.py());
        for (name, value) in keywords {
            let Some(kind) = table.get_item(&name)? else { return Ok(None) };
            if value.is_none() {
                continue;
            }
            let is_read = match (kind.cast::<PyTuple>(), kind.cast::<PyString>()) {
                // Neutral values are small integers, which are one object each.
                (Ok(neutral), _) => neutral.iter_borrowed().any(|own| own.is(&value)),
                (_, Ok(kind)) => asked.keyword(kind.to_cow()?.as_ref(), &value),
                _ => false,
            };
            if !is_read {
                return Ok(None);
            }
        }
        Ok(Some(asked))
    }

    /// Whether autograd is to record the call; `None` where an array is none of torch's own.
    fn is_differentiated(
        &self,
        inputs: [&Bound<'_, PyAny>; 3],
        asked: &Asked<'_>,
        lengths: &Lengths<'_>,
    ) -> PyResult<Option<bool>> {
        let py = inputs[0].py();
        let [tensor, parameter] = self.types.each_ref().map(|own| own.bind(py));
        let is_tensor = |x: &Bound<'_, PyAny>| x.get_type().is(tensor);
        let descales = asked.descales.iter().flatten();
        let beside = asked.out.iter().chain(&asked.slopes).chain(descales.clone());
        let beside = beside.chain(lengths.arrays.iter().flatten());
        let arrays = inputs.into_iter().chain(beside);
        let is_sinks = |x: &Bound<'_, PyAny>| is_tensor(x) || x.get_type().is(parameter);
        if !arrays.into_iter().all(is_tensor) || !asked.sinks.iter().all(is_sinks) {
            return Ok(None);
        }
        // Slopes and descales have no gradient, which the long way says.
        let requires_grad = |x: &Bound<'_, PyAny>| x.getattr(intern!(py, "requires_grad"))?.is_truthy();
        // DLPack does not tell.
        let is_negated = |x: &Bound<'_, PyAny>| x.call_method0(intern!(py, "is_neg"))?.is_truthy();
        for x in asked.slopes.iter().chain(descales) {
            if requires_grad(x)? || is_negated(x)? {
                return Ok(None);
            }
        }
        let mut requires = false;
        for x in inputs.into_iter().chain(&asked.out).chain(&asked.sinks) {
            requires |= requires_grad(x)?;
            if is_negated(x)? {
                return Ok(None);
            }
        }
        Ok(Some(requires && self.is_grad_enabled.bind(py).call0()?.is_truthy()?))
    }

    /// A tensor of contiguous float32: itself, or a copy.
    fn words<'py>(
        &self,
        name: &str,
        x: &Bound<'py, PyAny>,
        stream: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let view = View::of(name, x, stream)?;
        if view.dtype == Type::F32 && view.is_contiguous() {
            return Ok(x.clone());
        }
        self.floats.bind(x.py()).call1((x,))
    }
}

impl<'py> Asked<'py> {
    /// Reads a keyword that is not None; whether it is of a kind and a value that are read here.
    fn keyword(&mut self, kind: &str, value: &Bound<'py, PyAny>) -> bool {
        match kind {
            "sinks" => self.sinks.replace(value.clone()).is_none(),
            "k_descale" => self.descales[0].replace(value.clone()).is_none(),
            "v_descale" => self.descales[1].replace(value.clone()).is_none(),
            "num_splits" => match whole(value).and_then(|splits| usize::try_from(splits).ok()) {
                Some(splits) if splits <= MAX_SPLITS => {
                    self.division.0 = (splits > 0).then_some(splits);
                    true
                }
                _ => false,
            },
            "pack_gqa" => {
                self.division.1 = flag(value);
                self.division.1.is_some()
            }
            "flag" => flag(value).is_some(),
            "upper_bound" => whole(value).is_some(),
            _ => false,
        }
    }
}

impl<'py> Lengths<'py> {
    /// Those of a call; `None` where some are missing, given twice or of another type.
    fn of(given: Option<&Bound<'py, PyTuple>>, is_cache: bool) -> Option<Lengths<'py>> {
        let Some(given) = given else { return Some(Lengths { arrays: [const { None }; 6], most: [0, 0] }) };
        let mut items = given.iter();
        let mut array = || items.next().map(some);
        let (starts_q, starts_k, used) = (array()?, array()?, array()?);
        let (table, other, starts_new) = (array()?, array()?, array()?);
        let bounds = [items.next()?, items.next()?];
        let used_q = items.next().and_then(some);
        let table = match (table, other) {
            (Some(_), Some(_)) => return None,
            (table, other) => table.or(other),
        };
        // Of keys in pages the lengths in use say all.
        let starts_k = if table.is_some() { None } else { starts_k };
        if used.is_none() && (table.is_some() || is_cache) {
            return None;
        }
        let mut most = [0, 0];
        for ((bound, most), starts) in bounds.iter().zip(&mut most).zip([&starts_q, &starts_k]) {
            match (bound.is_none(), whole(bound)) {
                (true, _) if starts.is_none() => {}
                (_, Some(bound)) if (0..=i64::from(i32::MAX)).contains(&bound) => *most = bound,
                _ => return None,
            }
        }
        Some(Lengths { arrays: [starts_q, starts_k, used, table, starts_new, used_q], most })
    }

    /// What the kernels read of them; `None` where an array is not as they read it.
    fn extras(&self, stream: Option<u64>) -> PyResult<Option<Extras<View<'py>>>> {
        let mut extras = Extras::NONE;
        let [starts_q, starts_k, used, table, _, used_q] = &self.arrays;
        for (name, object, slot) in [
            ("cu_seqlens_q", starts_q, &mut extras.cu_seqlens_q),
            ("cu_seqlens_k", starts_k, &mut extras.cu_seqlens_k),
            ("seqused_q", used_q, &mut extras.seqused_q),
            ("seqused_k (cache_seqlens)", used, &mut extras.seqused_k),
            ("page_table (block_table)", table, &mut extras.page_table),
        ] {
            let Some(object) = object else { continue };
            let view = View::of(name, object, stream)?;
            if view.dtype != Type::I32 || !view.is_contiguous() {
                return Ok(None);
            }
            *slot = Some(view);
        }
        Ok(Some(extras))
    }
}

/// The numbers of a call.
fn options(numbers: &Bound<'_, PyTuple>) -> PyResult<Option<Options>> {
    let item = |at: usize| numbers.get_item(at);
    let (scale, softcap) = (item(0)?, item(3)?);
    let (Some(causal), Some(window), Some(softcap), Some(deterministic)) =
        (flag(&item(1)?), window(&item(2)?)?, real(&softcap), flag(&item(4)?))
    else {
        return Ok(None);
    };
    let scale = match (scale.is_none(), real(&scale)) {
        (false, None) => return Ok(None),
        (_, scale) => scale,
    };
    Ok((softcap >= 0.0).then_some(Options {
        scale,
        causal,
        window,
        softcap,
        deterministic,
        query_offset: 0,
        latent: false,
        kv_dtype: None,
        out_dtype: None,
    }))
}

/// The codes that keys or values are, where their type says it: bytes may be of several kinds.
fn codes_of(keys: &View<'_>) -> Option<Dtype> {
    match keys.dtype {
        Type::E4m3 => (keys.type_name() != "uint8").then_some(Dtype::E4m3),
        Type::I8 => Some(Dtype::Int8),
        Type::F32 | Type::F16 | Type::Bf16 | Type::I32 | Type::Other => None,
    }
}

/// Both sides of a window, negative for no limit.
fn window(given: &Bound<'_, PyAny>) -> PyResult<Option<(i64, i64)>> {
    let sides = if let Ok(sides) = given.cast_exact::<PyTuple>() {
        if sides.len() != 2 {
            return Ok(None);
        }
        [sides.get_item(0)?, sides.get_item(1)?]
    } else if let Ok(sides) = given.cast_exact::<PyList>() {
        if sides.len() != 2 {
            return Ok(None);
        }
        [sides.get_item(0)?, sides.get_item(1)?]
    } else {
        return Ok(given.is_none().then_some((-1, -1)));
    };
    let [left, right] = sides.each_ref().map(whole);
    Ok(left.zip(right))
}

/// What is not None.
fn some(value: Bound<'_, PyAny>) -> Maybe<'_> {
    (!value.is_none()).then_some(value)
}

/// A bool; what is equal to one takes the long way.
fn flag(value: &Bound<'_, PyAny>) -> Option<bool> {
    value.cast_exact::<PyBool>().ok().map(|flag| flag.is_true())
}

/// A whole number.
fn whole(value: &Bound<'_, PyAny>) -> Option<i64> {
    value.cast_exact::<PyInt>().ok()?.extract().ok()
}

/// A number.
fn real(value: &Bound<'_, PyAny>) -> Option<f64> {
    match value.cast_exact::<PyFloat>() {
        Ok(value) => Some(value.value()),
        Err(_) => whole(value).map(|value| value as f64),
    }
}

/// Whether a `SchedulerMetadata` is of this call, whose longest sequence of queries has so many rows.
fn is_described(
    metadata: &Bound<'_, PyAny>,
    q: &Bound<'_, PyAny>,
    (given, problem): (&Given<'_>, &Problem),
    longest: usize,
    options: &Options,
) -> PyResult<bool> {
    let py = metadata.py();
    let is_number = |name: &Bound<'_, PyString>, need: usize| -> PyResult<bool> {
        Ok(i64::try_from(need) == Ok(metadata.getattr(name)?.extract::<i64>()?))
    };
    let dtype = metadata.getattr(intern!(py, "qkv_dtype"))?;
    let page: Option<usize> = metadata.getattr(intern!(py, "page_size"))?.extract()?;
    let has_page =
        |page: usize| given.beside.extras.page_table.is_some() && given.k.shape().get(1) == Some(&page);
    let window: (i64, i64) = metadata.getattr(intern!(py, "window_size"))?.extract()?;
    let (left, right) = options.window;
    Ok(is_number(intern!(py, "batch_size"), problem.lengths.sequences())?
        && is_number(intern!(py, "max_seqlen_q"), longest)?
        && is_number(intern!(py, "num_heads_q"), problem.heads_q)?
        && is_number(intern!(py, "num_heads_kv"), problem.heads_kv)?
        && is_number(intern!(py, "headdim"), problem.head_dim)?
        && is_number(intern!(py, "headdim_v"), problem.head_dim_v)?
        && is_number(intern!(py, "attention_chunk"), 0)?
        && metadata.getattr(intern!(py, "causal"))?.extract::<bool>()? == options.causal
        && window == (left.max(-1), right.max(-1))
        && (dtype.is_none() || dtype.is(&q.getattr(intern!(py, "dtype"))?))
        && page.is_none_or(has_page))
}

/// Whether kernels write the tensor in place.
fn is_written_in_place(out: &View<'_>) -> bool {
    out.strides().last() == Some(&1) && is_aligned(out, WHOLE)
}

/// Whether each row of the tensor begins on 16 bytes, `whole` elements.
fn is_aligned(view: &View<'_>, whole: usize) -> bool {
    let mut outer = view.shape().iter().zip(view.strides()).rev().skip(1);
    let is_even = |(&size, &stride): (&usize, &i64)| size <= 1 || stride % whole as i64 == 0;
    (view.address() as usize).is_multiple_of(WRITTEN_AT) && outer.all(is_even)
}

/// Whether no address of an input is within the reach of `out`.
fn is_apart(out: &View<'_>, given: &Given<'_>) -> bool {
    let reach = |view: &View<'_>| {
        let bytes = view.span()? as u64 * u64::from(view.element_bytes());
        Some((view.address(), view.address() + bytes))
    };
    let apart = |other: &View<'_>| {
        reach(out).zip(reach(other)).is_some_and(|((first, end), (from, to))| end <= from || to <= first)
    };
    let beside = given.beside.extras.iter().map(|(_, view)| view.into_inner());
    [&given.q, &given.k, &given.v].into_iter().chain(beside).all(apart)
}
