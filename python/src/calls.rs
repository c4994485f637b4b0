//! The functions that the package's Python calls: a pass on arrays in place, on the device that holds them.

use fa_attn::quantize::Codes;
use fa_attn::{
    Append, CacheCodes, Descales, Division, Dtype, Pass, Problem, QueryPositions, Rotary, RotaryPairs,
    RotaryQueries, Side,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::call_program::Programs;
use crate::dlpack::{Place, View, current_stream, elsewhere};
use crate::error::{InputError, raised};
use crate::given::{
    Given, KvDtype, Options, bound, descale_form, dtype_of, dtype_of_kv, heads_and_dim, heads_and_numbers,
    named_codes, words,
};
use crate::host::{self, Appended, Backward, Written};
use crate::{devices, dlpack, gpu, overlap};

/// Where and how a call runs: the caller's stream, the function that allocates memory for it, the work plans
/// that calls share, and how the caller wants the work divided.
#[derive(Clone, Copy)]
pub(crate) struct On<'a, 'py> {
    pub stream: Option<u64>,
    pub allocate: Option<&'a Bound<'py, PyAny>>,
    pub plans: Option<&'a Bound<'py, PyDict>>,
    pub division: Division,
    /// Whether no measurement of tuning may change the kernel.
    pub pinned: bool,
}

/// Computes the pass of `given` by `pass`. `q` is asked for its library's stream where `on` has none.
pub(crate) fn run(
    py: Python<'_>,
    given: &Given<'_>,
    (problem, pass): (&Problem, Pass),
    to: &Written<'_, '_>,
    q: Option<&Bound<'_, PyAny>>,
    on: On<'_, '_>,
) -> PyResult<()> {
    problem.check_pass(pass).map_err(|error| raised(error.into()))?;
    check(given, problem, to)?;
    match given.place() {
        Place::Cpu => host::run(py, given, problem, pass, to),
        Place::Cuda(ordinal) => {
            let _current = devices::Current::keep();
            let device = devices::device(ordinal)?;
            let problem = &given.of_kernels(problem, pass);
            let entry = device.bind(py, problem, pass, (on.division, on.pinned))?;
            let stream = match (on.stream, q) {
                (Some(stream), _) => stream,
                (None, Some(q)) => current_stream(q, ordinal)?.unwrap_or(0),
                (None, None) => 0,
            };
            let from = gpu::Caller { stream, allocate: on.allocate, plans: on.plans };
            device.run(py, &entry, given, to, from)
        }
    }
}

/// Checks shapes and types of the arrays other than Q, K and V: only their addresses go to the GPU.
fn check(given: &Given<'_>, problem: &Problem, to: &Written<'_, '_>) -> PyResult<()> {
    let (Given { q, k, v, .. }, dtype) = (given, problem.types.wide());
    let place = given.place();
    let same = |name: &str, view: &View<'_>, like: &View<'_>, dim: usize| {
        let axes = like.shape().len() - 1;
        if view.place != place {
            return Err(elsewhere(name, place));
        }
        if view.shape().len() != axes + 1
            || view.shape()[..axes] != like.shape()[..axes]
            || view.shape()[axes] != dim
        {
            let mut need = like.shape().to_vec();
            need[axes] = dim;
            let message = format!("{name} has the shape {:?}: it must be {need:?}", view.shape());
            return Err(InputError::new_err(message));
        }
        if dtype_of(name, view)? != dtype {
            let message =
                format!("{name} holds {} and q {dtype}: they must be of one type", view.type_name());
            return Err(InputError::new_err(message));
        }
        Ok(())
    };
    let rows = |name: &str, view: &View<'_>, need: usize| {
        if view.elements() == need {
            return Ok(());
        }
        Err(InputError::new_err(format!("{name} has {} elements: it must have {need}", view.elements())))
    };
    let lse_rows = problem.heads_q * q.shape()[..q.shape().len() - 2].iter().product::<usize>();
    match to {
        Written::Forward { out, lse } => {
            same("out", out, q, problem.head_dim_v)?;
            lse.map_or(Ok(()), |lse| rows("softmax_lse", lse, lse_rows))
        }
        Written::Backward(Backward { dout, out, lse, dq, dk, dv, dsinks }) => {
            same("dout", dout, q, problem.head_dim_v)?;
            same("out", out, q, problem.head_dim_v)?;
            same("dq", dq, q, problem.head_dim)?;
            same("dk", dk, k, problem.head_dim_k())?;
            same("dv", dv, v, problem.head_dim_v)?;
            rows("softmax_lse", lse, lse_rows)?;
            if let Some(dlse) = &given.beside.extras.dlse {
                if dlse.place != place {
                    return Err(elsewhere("dlse", place));
                }
                rows("dlse", dlse, lse_rows)?;
            }
            dsinks.map_or(Ok(()), |dsinks| rows("dsinks", dsinks, problem.heads_q))
        }
    }
}

/// Writes O to `out` and LSE to `lse`, which a GPU's arrays need not have. `plans` holds work plans for the
/// same lengths, to which this call adds its own. `division` is a [`Division`] as a tuple; it has no effect
/// on the CPU.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, out, lse, options, extras=None, stream=None, allocate=None,
    plans=None, division=None, programs=None
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn forward<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
    lse: Option<&Bound<'py, PyAny>>,
    options: Options,
    extras: Option<Bound<'py, PyTuple>>,
    stream: Option<u64>,
    allocate: Option<&Bound<'py, PyAny>>,
    plans: Option<&Bound<'py, PyDict>>,
    division: Option<(Option<usize>, Option<bool>)>,
    programs: Option<Programs<'py>>,
) -> PyResult<()> {
    let mut given = Given::of([q, k, v], extras.as_ref(), stream)?;
    given.take_programs(programs, stream)?;
    let problem = given.problem(&options)?;
    let out = View::of("out", out, stream)?;
    let lse = lse.map(|lse| View::of("softmax_lse", lse, stream)).transpose()?;
    let to = Written::Forward { out: &out, lse: lse.as_ref() };
    let (splits, pack_gqa) = division.unwrap_or_default();
    let division = Division { splits, pack_gqa };
    let pinned = options.deterministic;
    run(py, &given, (&problem, Pass::Forward), &to, Some(q), On { stream, allocate, plans, division, pinned })
}

/// Checks the arrays and options of a forward, without computing anything.
#[pyfunction]
#[pyo3(signature = (q, k, v, options, extras=None, stream=None, programs=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn check_forward<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    options: Options,
    extras: Option<Bound<'py, PyTuple>>,
    stream: Option<u64>,
    programs: Option<Programs<'py>>,
) -> PyResult<()> {
    let mut given = Given::of([q, k, v], extras.as_ref(), stream)?;
    given.take_programs(programs, stream)?;
    let problem = given.problem(&options)?;
    problem.check().map_err(|error| raised(error.into()))
}

/// Writes the gradients to `dq`, `dk`, `dv` and `dsinks`; `dlse` is that of the LSE, where it has one.
/// `gradients`: where those of the programs' arrays go, by name.
#[pyfunction]
#[pyo3(signature = (
    dout, q, k, v, out, lse, dq, dk, dv, dsinks, options, extras=None, stream=None, allocate=None, dlse=None,
    programs=None, gradients=None
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn backward<'py>(
    py: Python<'py>,
    dout: &Bound<'py, PyAny>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    out: &Bound<'py, PyAny>,
    lse: &Bound<'py, PyAny>,
    dq: &Bound<'py, PyAny>,
    dk: &Bound<'py, PyAny>,
    dv: &Bound<'py, PyAny>,
    dsinks: Option<&Bound<'py, PyAny>>,
    options: Options,
    extras: Option<Bound<'py, PyTuple>>,
    stream: Option<u64>,
    allocate: Option<&Bound<'py, PyAny>>,
    dlse: Option<&Bound<'py, PyAny>>,
    programs: Option<Programs<'py>>,
    gradients: Option<Vec<(String, Bound<'py, PyAny>)>>,
) -> PyResult<()> {
    let mut given = Given::of([q, k, v], extras.as_ref(), stream)?;
    given.take_programs(programs, stream)?;
    if let (Some(program), Some(gradients)) = (&mut given.program, gradients) {
        program.want(gradients, stream)?;
    }
    given.beside.extras.dlse = dlse.map(|dlse| words("dlse", dlse, stream, dlpack::Type::F32)).transpose()?;
    let problem = given.problem(&options)?;
    let view = |name: &str, object: &Bound<'py, PyAny>| View::of(name, object, stream);
    let (dout, out, lse) = (view("dout", dout)?, view("out", out)?, view("softmax_lse", lse)?);
    let (dq, dk, dv) = (view("dq", dq)?, view("dk", dk)?, view("dv", dv)?);
    let dsinks = dsinks.map(|dsinks| view("dsinks", dsinks)).transpose()?;
    let to = Written::Backward(Backward {
        dout: &dout,
        out: &out,
        lse: &lse,
        dq: &dq,
        dk: &dk,
        dv: &dv,
        dsinks: dsinks.as_ref(),
    });
    run(
        py,
        &given,
        (&problem, Pass::Backward { deterministic: options.deterministic }),
        &to,
        Some(q),
        On { stream, allocate, plans: None, division: Division::PLANNED, pinned: options.deterministic },
    )
}

/// What `forward` (or the backward) of these arrays runs: the engine's report as JSON. Nothing is computed.
#[pyfunction]
#[pyo3(signature = (
    q, k, v, options, extras=None, backward=false, division=None, programs=None
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn report<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    options: Options,
    extras: Option<Bound<'py, PyTuple>>,
    backward: bool,
    division: Option<(Option<usize>, Option<bool>)>,
    programs: Option<Programs<'py>>,
) -> PyResult<String> {
    let mut given = Given::of([q, k, v], extras.as_ref(), None)?;
    given.take_programs(programs, None)?;
    let problem = given.problem(&options)?;
    let pass = if backward { Pass::Backward { deterministic: options.deterministic } } else { Pass::Forward };
    let problem = given.of_kernels(&problem, pass);
    let (splits, pack_gqa) = division.unwrap_or_default();
    report_of(py, &problem, pass, (Division { splits, pack_gqa }, options.deterministic), given.place())
}

/// The report on a pass of `problem` on a device, as JSON.
pub(crate) fn report_of(
    py: Python<'_>,
    problem: &Problem,
    pass: Pass,
    (division, pinned): (Division, bool),
    place: Place,
) -> PyResult<String> {
    problem.check_pass(pass).map_err(|error| raised(error.into()))?;
    let report = match place {
        Place::Cpu => serde_json::to_string(&host::engine()?.bind(problem, pass).map_err(raised)?.report()),
        Place::Cuda(ordinal) => {
            let _current = devices::Current::keep();
            let device = devices::device(ordinal)?;
            let entry = device.bind(py, problem, pass, (division, pinned))?;
            serde_json::to_string(&serde_json::json!({
                "backend": "cuda",
                "kernel": entry.kernel.spec().to_string(),
                "family": entry.kernel.spec().kernel.family(),
                "gpu": device.name(),
                "workspace_bytes": entry.kernel.workspace_bytes(),
            }))
        }
    };
    report.map_err(|error| InputError::new_err(error.to_string()))
}

/// Appends `k` and `v` to a cache in place and rotates `q` into `q_out` (on the CPU `q_out` holds a copy of
/// `q`). Lengths afterwards go to `used_out`. Rows without a place are counted on the CPU and left out on a
/// GPU.
#[pyfunction]
#[pyo3(signature = (
    k, v, k_cache, v_cache, q, q_out, cos, sin, interleaved, following, cu_new, max_new, seqused_k,
    page_table, cu_seqlens_q, max_q, used_out, k_descale=None, v_descale=None, kv_dtype=None, stream=None
))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn append<'py>(
    py: Python<'py>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    k_cache: &Bound<'py, PyAny>,
    v_cache: &Bound<'py, PyAny>,
    q: Option<&Bound<'py, PyAny>>,
    q_out: Option<&Bound<'py, PyAny>>,
    cos: Option<&Bound<'py, PyAny>>,
    sin: Option<&Bound<'py, PyAny>>,
    interleaved: bool,
    following: bool,
    cu_new: Option<&Bound<'py, PyAny>>,
    max_new: i64,
    seqused_k: &Bound<'py, PyAny>,
    page_table: Option<&Bound<'py, PyAny>>,
    cu_seqlens_q: Option<&Bound<'py, PyAny>>,
    max_q: i64,
    used_out: &Bound<'py, PyAny>,
    k_descale: Option<&Bound<'py, PyAny>>,
    v_descale: Option<&Bound<'py, PyAny>>,
    kv_dtype: Option<KvDtype>,
    stream: Option<u64>,
) -> PyResult<usize> {
    let view = |name: &str, object: &Bound<'py, PyAny>| View::of(name, object, stream);
    let maybe = |name: &str, object: Option<&Bound<'py, PyAny>>| {
        object.map(|object| View::of(name, object, stream)).transpose()
    };
    let ints = |name: &str, object: Option<&Bound<'py, PyAny>>| {
        object.map(|object| words(name, object, stream, dlpack::Type::I32)).transpose()
    };
    let floats = |name: &str, object: Option<&Bound<'py, PyAny>>| {
        object.map(|object| words(name, object, stream, dlpack::Type::F32)).transpose()
    };
    let tables = match (cos, sin) {
        (Some(cos), Some(sin)) => Some([view("rotary_cos", cos)?, view("rotary_sin", sin)?]),
        _ => None,
    };
    let arrays = Appended {
        k_new: view("k", k)?,
        v_new: view("v", v)?,
        k_cache: view("k_cache", k_cache)?,
        v_cache: view("v_cache", v_cache)?,
        q: maybe("q", q)?,
        q_out: maybe("q", q_out)?,
        // Queries are rows to turn: without tables the append has none.
        cu_seqlens_q: if tables.is_some() { ints("cu_seqlens_q", cu_seqlens_q)? } else { None },
        tables,
        cu_new: ints("cu_seqlens_k_new", cu_new)?,
        seqused_k: ints("cache_seqlens", Some(seqused_k))?,
        page_table: ints("page_table (block_table)", page_table)?,
        used_out: ints("cache_seqlens", Some(used_out))?,
        k_descale: floats("k_descale", k_descale)?,
        v_descale: floats("v_descale", v_descale)?,
    };
    let bounds = (bound("max_seqlen_k_new", max_new)?, bound("max_seqlen_q", max_q)?);
    let named = kv_dtype.map(|KvDtype(dtype)| dtype);
    let append = appended(&arrays, named, (interleaved, following), bounds)?;
    check_apart(&arrays)?;
    match arrays.k_cache.place {
        Place::Cpu => host::append(py, &append, &arrays),
        Place::Cuda(ordinal) => {
            let _current = devices::Current::keep();
            let stream = match stream {
                Some(stream) => stream,
                None => current_stream(k_cache, ordinal)?.unwrap_or(0),
            };
            devices::device(ordinal)?.append(py, &append, &arrays, stream)?;
            Ok(0)
        }
    }
}

/// Refuses an append whose caches share elements with each other or with an input.
fn check_apart(arrays: &Appended<'_>) -> PyResult<()> {
    let Appended { k_new, v_new, k_cache, v_cache, q, tables, .. } = arrays;
    if k_new.elements() == 0 {
        return Ok(());
    }
    if overlap::share_elements(k_cache, v_cache) {
        let apart = arrays.page_table.as_ref().and_then(|_| overlap::pages_between(k_cache, v_cache));
        // Which pages a table names is not read on a GPU.
        let is_seen = k_cache.place == Place::Cpu;
        if apart.is_none_or(|pages| is_seen && host::pages_meet(arrays, pages)) {
            return Err(InputError::new_err(
                "k_cache and v_cache have elements in common: both are written, give two that have none",
            ));
        }
    }
    // Queries are read here where they are turned. Tables of another type cannot lie in a cache.
    let q = q.as_ref().filter(|_| tables.is_some());
    let tables = tables.iter().flatten().zip(["rotary_cos", "rotary_sin"]);
    let tables = tables.filter(|(table, _)| table.dtype == k_cache.dtype).map(|(table, name)| (name, table));
    let read = [("k", k_new), ("v", v_new)].into_iter().chain(q.map(|q| ("q", q))).chain(tables);
    for (name, view) in read {
        for (written, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
            if overlap::share_elements(view, cache) {
                return Err(InputError::new_err(format!(
                    "{name} lies in the memory of {written}, which is written while it is read: give a copy"
                )));
            }
        }
    }
    Ok(())
}

/// The append that the arrays describe.
fn appended(
    arrays: &Appended<'_>,
    named: Option<Dtype>,
    (interleaved, following): (bool, bool),
    (max_new, max_q): (usize, usize),
) -> PyResult<Append> {
    let of_cache = named_codes(dtype_of_kv("k_cache", &arrays.k_cache)?, named);
    // New rows of a cache of codes are of one type, which is quantised.
    let (dtype, first) = match of_cache.is_code() {
        true => (dtype_of("k", &arrays.k_new)?, "k"),
        false => (of_cache, "k_cache"),
    };
    let same = |name: &str, have: Dtype, (like, need): (&str, Dtype)| {
        if have == need {
            return Ok(());
        }
        let message = format!("{name} holds {have} and {like} {need}: they must be of one type");
        Err(InputError::new_err(message))
    };
    for (name, other) in [("k", &arrays.k_new), ("v", &arrays.v_new)] {
        same(name, dtype_of(name, other)?, (first, dtype))?;
    }
    let of_v = named_codes(dtype_of_kv("v_cache", &arrays.v_cache)?, named);
    same("v_cache", of_v, ("k_cache", of_cache))?;
    let (packed_new, packed_q) = (arrays.cu_new.is_some(), arrays.cu_seqlens_q.is_some());
    axes("k", &arrays.k_new, packed_new)?;
    axes("v", &arrays.v_new, packed_new)?;
    axes("k_cache", &arrays.k_cache, false)?;
    axes("v_cache", &arrays.v_cache, false)?;
    let Some(used) = &arrays.seqused_k else { return Err(InputError::new_err("cache_seqlens is missing")) };
    let sequences = used.shape().first().copied().unwrap_or(0);
    let cache = match &arrays.page_table {
        Some(table) => {
            axes_of_table(table, sequences)?;
            let (pages, page) = (arrays.k_cache.shape()[0], arrays.k_cache.shape()[1]);
            Side::paged(page, pages, table.shape()[1].saturating_mul(page))
        }
        None => Side::padded(arrays.k_cache.shape()[1]),
    };
    let queries = match &arrays.q {
        Some(q) if arrays.tables.is_some() => {
            axes("q", q, packed_q)?;
            if dtype_of("q", q)? != dtype {
                let like = if of_cache.is_code() { "the new keys'" } else { "the cache's" };
                return Err(InputError::new_err(format!("q must be of {like} type, {dtype}")));
            }
            let positions = if following { QueryPositions::Following } else { QueryPositions::Same };
            let [heads, _] = heads_and_dim(q);
            Some(RotaryQueries { rows: side(q, packed_q, max_q), heads, positions })
        }
        Some(_) | None => None,
    };
    let tables = arrays.tables.as_ref();
    let [heads_kv, head_dim] = heads_and_numbers(&arrays.k_cache, of_cache);
    let [_, head_dim_v] = heads_and_numbers(&arrays.v_cache, of_cache);
    let append = Append {
        sequences,
        new: side(&arrays.k_new, packed_new, max_new),
        cache,
        heads_kv,
        head_dim,
        head_dim_v,
        dtype,
        codes: codes_of(arrays, of_cache, (cache, sequences)),
        rotary: tables.map(|tables| rotary(tables, interleaved, queries)).transpose()?,
    };
    append.check().map_err(|error| raised(fa_cpu::CpuError::from(error).into()))?;
    for (name, view, need) in [
        ("k", &arrays.k_new, append.new_shape(append.head_dim)),
        ("v", &arrays.v_new, append.new_shape(append.head_dim_v)),
        ("v_cache", &arrays.v_cache, append.cache_shape(append.head_dim_v)),
        ("k_cache", &arrays.k_cache, append.cache_shape(append.head_dim)),
    ] {
        let have = host::placement(view).map(|(shape, _)| shape);
        if have != Some(need) {
            let message = format!("{name} has the shape {:?}: it must be {need:?}", view.shape());
            return Err(InputError::new_err(message));
        }
    }
    let descales = append.descales();
    for (name, view, form) in
        [("k_descale", &arrays.k_descale, descales.k), ("v_descale", &arrays.v_descale, descales.v)]
    {
        if let (Some(view), Some(need)) = (view, append.descale_shape(form))
            && view.shape() != need
        {
            let message = format!("{name} has the shape {:?}: it must be {need:?}", view.shape());
            return Err(InputError::new_err(message));
        }
    }
    Ok(append)
}

/// The codes of a cache of this type, where it holds some.
fn codes_of(arrays: &Appended<'_>, of_cache: Dtype, (cache, sequences): (Side, usize)) -> Option<CacheCodes> {
    let Appended { k_descale, v_descale, .. } = arrays;
    let form = |descales| descale_form(descales, cache, sequences);
    let kind = Codes::of(of_cache)?;
    Some(CacheCodes { kind, descales: Descales::new(form(k_descale), form(v_descale)) })
}

fn axes(name: &str, view: &View<'_>, is_packed: bool) -> PyResult<()> {
    let need = if is_packed { 3 } else { 4 };
    if view.shape().len() == need {
        return Ok(());
    }
    Err(InputError::new_err(format!("{name} has the shape {:?}: it must have {need} axes", view.shape())))
}

fn side(view: &View<'_>, is_packed: bool, max: usize) -> Side {
    let shape = view.shape();
    if is_packed { Side::packed(shape[0], max.min(shape[0])) } else { Side::padded(shape[1]) }
}

/// The rotary embedding that these tables describe, with the queries that it rotates.
fn rotary([cos, sin]: &[View<'_>; 2], interleaved: bool, queries: Option<RotaryQueries>) -> PyResult<Rotary> {
    if cos.shape() != sin.shape() || cos.shape().len() != 2 {
        return Err(InputError::new_err(format!(
            "rotary_cos has the shape {:?} and rotary_sin {:?}: both must be (positions, rotary_dim / 2)",
            cos.shape(),
            sin.shape()
        )));
    }
    let table = dtype_of("rotary_cos", cos)?;
    if dtype_of("rotary_sin", sin)? != table {
        return Err(InputError::new_err("rotary_cos and rotary_sin must be of one type"));
    }
    let pairs = if interleaved { RotaryPairs::Neighbours } else { RotaryPairs::Halves };
    Ok(Rotary { dim: 2 * cos.shape()[1], pairs, positions: cos.shape()[0], table, queries })
}

fn axes_of_table(table: &View<'_>, sequences: usize) -> PyResult<()> {
    match table.shape() {
        [rows, _] if *rows == sequences => Ok(()),
        shape => {
            let message =
                format!("page_table (block_table) has the shape {shape:?}: it must be ({sequences}, pages)");
            Err(InputError::new_err(message))
        }
    }
}
