"""The functions' options: FlashAttention's, each computed or refused.

`Options` is the table of the keyword arguments that every function takes. A row is an argument's name, its
type and how it is read; signatures, editors, type checkers and `read_options` all go by it.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from operator import ne
from reprlib import repr as short
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    NamedTuple,
    Optional,
    Tuple,
    TypedDict,
    TypeVar,
    get_type_hints,
)

from ._checks import array, count, flag, is_neutral, number, offset, surely, upper_bound, window
from ._core import BESIDE, InputError, UnsupportedError
from ._faces import of_one_library
from ._types import Array

if TYPE_CHECKING:
    from typing_extensions import Annotated
else:
    from typing import Annotated


class Tensor(NamedTuple):
    """An argument that is a tensor of `Extras`, by the name of its field."""

    field: str


class Division(NamedTuple):
    """An argument that decides how a GPU's work is divided."""


class Number(NamedTuple):
    """An argument that is a number of `CallOptions`, which `call_options` reads, and its default."""

    default: Any


class Modification(NamedTuple):
    """An argument that masks or changes scores, which `modifications` reads."""


class State(NamedTuple):
    """An argument that is the state of a generator, which `dropping` reads."""


class Only(NamedTuple):
    """An argument that is accepted at these values only, and what would work instead of others."""

    values: Tuple[Any, ...]
    advice: str


class OnValues(NamedTuple):
    """An argument that is a part of the queries, of what meets the values as keys; `on_values` reads it."""


class Unneeded(NamedTuple):
    """An argument that is checked and has no effect: hints for FlashAttention's scheduler, and which
    generation of it an engine calls."""

    check: Callable[[str, Any], Any]


class Codes(NamedTuple):
    """An argument that names the codes of K and V, which `coded` reads."""


class Stored(NamedTuple):
    """An argument that says what the result is stored as, which `as_codes` reads."""


_NO_SCORES = Only((None,), "score_mod is differentiated as it is, and closes over the arrays that it reads")
_IN_ORDER = Only((None,), "keys are read in order: gather them, or give pages of one row")
_ONE_PROCESS = "keys of a rank are for flash_attn_varlen_func and flash_attn_with_kvcache"


class CommonOptions(TypedDict, total=False):
    """Keyword arguments that every function takes."""

    sinks: Annotated[Optional[Array], Tensor("sinks")]
    learnable_sink: Annotated[Optional[Array], Tensor("sinks")]
    s_aux: Annotated[Optional[Array], Tensor("sinks")]
    query_offset: Annotated[Optional[int], Number(0)]
    pack_gqa: Annotated[Optional[bool], Division()]
    sm_margin: Annotated[Optional[int], Only((0, None), "kernels use all SMs, leave it at 0")]
    score_mod: Annotated[Any, Modification()]
    mask_mod: Annotated[Any, Modification()]
    bias: Annotated[Optional[Array], Modification()]
    mask: Annotated[Optional[Array], Modification()]
    attention_chunk: Annotated[Optional[int], Modification()]
    rng_state: Annotated[Any, State()]
    qv: Annotated[Optional[Array], OnValues()]
    q_v: Annotated[Optional[Array], OnValues()]
    q_descale: Annotated[Optional[Array], Tensor("q_descale")]
    k_descale: Annotated[Optional[Array], Tensor("k_descale")]
    v_descale: Annotated[Optional[Array], Tensor("v_descale")]
    kv_cache_dtype: Annotated[Optional[str], Codes()]
    output_scale: Annotated[Optional[Array], Stored()]
    score_mod_bwd: Annotated[None, _NO_SCORES]
    aux_tensors: Annotated[None, _NO_SCORES]
    aux_scalars: Annotated[None, _NO_SCORES]
    aux_tensor_leading_dims: Annotated[None, _NO_SCORES]
    dynamic_causal: Annotated[
        None, Only((None,), "causal is one for all sequences: call for those of each kind, or give mask_mod")
    ]
    block_sparse_tensors: Annotated[Any, Modification()]
    block_sparse_tensors_bwd: Annotated[
        None, Only((None,), "the backward's lists follow from block_sparse_tensors, leave it out")
    ]
    gather_kv_indices: Annotated[None, _IN_ORDER]
    gather_kv_valid_length: Annotated[None, _IN_ORDER]
    seqlen_k_per_split: Annotated[
        None, Only((None,), "how keys are divided is the planner's choice, leave it out")
    ]
    cp_world_size: Annotated[Optional[int], Only((1, None), _ONE_PROCESS)]
    cp_rank: Annotated[Optional[int], Only((0, None), _ONE_PROCESS)]
    cp_tot_seqused_k: Annotated[Optional[Array], Only((None,), _ONE_PROCESS)]
    num_heads_q: Annotated[
        None, Only((None,), "qkv has as many heads for each: give q, k and v to flash_attn_func")
    ]
    min_seqlen_k: Annotated[Optional[int], Unneeded(upper_bound)]
    disable_scheduler_metadata: Annotated[Optional[bool], Unneeded(flag)]
    fa_version: Annotated[Optional[int], Unneeded(upper_bound)]
    ver: Annotated[Optional[int], Unneeded(upper_bound)]


class DividedOptions(CommonOptions, total=False):
    """Those of functions with `scheduler_metadata` among their arguments."""

    num_splits: Annotated[Optional[int], Division()]


class Options(DividedOptions, total=False):
    """Those of the other functions, which plan their own work."""

    scheduler_metadata: Annotated[
        Any,
        Only((None,), "it is for flash_attn_with_kvcache and flash_attn_varlen_func, leave it out"),
    ]


class ExtraTensors(TypedDict, total=False):
    """The tensors of `Extras` as keyword arguments of bound kernels."""

    cu_seqlens_q: Optional[Array]
    cu_seqlens_k: Optional[Array]
    seqused_q: Optional[Array]
    seqused_k: Optional[Array]
    page_table: Optional[Array]
    alibi_slopes: Optional[Array]
    sinks: Optional[Array]
    q_descale: Optional[Array]
    k_descale: Optional[Array]
    v_descale: Optional[Array]


_TABLE: Dict[str, Any] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Options, include_extras=True).items()
}
# Those that mask or change scores.
MODIFICATIONS = tuple(name for name, row in _TABLE.items() if isinstance(row, Modification))


def _read_at_once(name, row):
    """How the extension module's short way reads a keyword that is not None: see its `Plain`."""
    if isinstance(row, Only):
        return row.values
    if isinstance(row, Tensor):
        return row.field
    return row.check.__name__ if isinstance(row, Unneeded) else name


READ_AT_ONCE = {name: _read_at_once(name, row) for name, row in _TABLE.items()}
F = TypeVar("F", bound=Callable[..., Any])


def with_options(function: F) -> F:
    """The function with the keywords of its `**options: Unpack[..]` in its signature, one by one."""
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    keywords = globals()[rest.annotation[len("Unpack[") : -1]]
    function.__signature__ = signature.replace(parameters=[*own, *_parameters_of(keywords)])
    return function


@lru_cache(maxsize=None)
def _parameters_of(keywords):
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(name), annotation=kind)
        for name, kind in get_type_hints(keywords).items()
    ]


def _default_of(name):
    row = _TABLE.get(name)
    if isinstance(row, Number):
        return row.default
    return row.values[0] if isinstance(row, Only) else None


# The most parts of a tile's keys.
_MOST_SPLITS = 256
PLANNED = 0


def division_of(num_splits, pack_gqa):
    """How a GPU's kernel divides a forward's work, where the caller decides it: (parts of the keys, whether
    the heads of a group share a tile), either None for the planner's choice. None where both are."""
    splits = None
    packs = None if pack_gqa is None else flag("pack_gqa", pack_gqa)
    # By identity: a comparison would ask torch.compile for a symbol's value.
    if num_splits is not None and num_splits is not PLANNED:
        number = count("num_splits", num_splits, largest=_MOST_SPLITS)
        splits = None if surely(number == PLANNED) else number
    return None if splits is packs is None else (splits, packs)


def read_options(function, options):
    """(extra tensors by their fields, division of the work) from the keyword arguments of a function; refuses
    what is not supported."""
    if not options:
        return {}, None
    extras = {}
    division = division_of(options.get("num_splits"), options.get("pack_gqa"))
    for name, value in options.items():
        row = _TABLE.get(name)
        if isinstance(row, Tensor):
            if value is not None and row.field in extras:
                names = [other for other in _TABLE if _TABLE[other] == row]
                names = f"{', '.join(names[:-1])} and {names[-1]}"
                raise InputError(f"{row.field} are given twice: by one of the names {names}")
            if value is not None:
                extras[row.field] = value
        elif isinstance(row, Only):
            if not is_neutral(value, row.values):
                raise UnsupportedError(f"{name} = {short(value)}: {row.advice}")
        elif isinstance(row, Unneeded):
            if value is not None:
                row.check(name, value)
        elif isinstance(row, OnValues):
            if value is not None and "packed" in function:
                raise UnsupportedError(f"{name} with keys and values in one array: give q, k and v apart")
        elif isinstance(row, State):
            if value is not None and ("kvcache" in function or "backward" in function):
                raise UnsupportedError(f"{name}: {function} has no dropout, leave it out")
        elif not isinstance(row, (Codes, Division, Modification, Number, Stored)):
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    return extras, division


def on_values(face, q, v, options, numbers):
    """(q, numbers) of a call whose keys begin with their values where it has `qv`, the part of the queries
    that meets them: q with those columns first, and the scale of all columns by default."""
    given = {name: options[name] for name in ("qv", "q_v") if options.get(name) is not None}
    if not given:
        return q, numbers
    if len(given) == 2:
        raise InputError("qv and q_v are two names of one array: give one")
    ((name, qv),) = given.items()
    if numbers.out_dtype is not None:
        raise UnsupportedError(f"{name} with q of 8 bits: give both in 16 bits, k and v may be of 8")
    factors = DESCALES[: 1 if numbers.kv_dtype is not None else 3]
    for factor in factors:
        if options.get(factor) is not None:
            raise UnsupportedError(
                f"{factor} with {name} and {factor[0]} of 16 bits: leave it out, or multiply by it beforehand"
            )
    of_one_library(name, array(name, qv), q, face)
    shape, need = tuple(qv.shape), (*q.shape[:-1], v.shape[-1] * numbers.per_element)
    if len(shape) != len(need) or any(map(surely, map(ne, shape, need))):
        raise InputError(f"{name} has the shape {shape}: it must be {need}, q's rows of v's columns")
    if qv.dtype != q.dtype and not face.is_cast(q, qv):
        raise InputError(f"{name} holds {qv.dtype} and q {q.dtype}: they must be of one type")
    scale = (q.shape[-1] + need[-1]) ** -0.5 if numbers.scale is None else numbers.scale
    return face.side_by_side(qv, q), numbers._replace(scale=scale, latent=True)


class Extras(NamedTuple):
    """The tensors of a call besides q, k and v, and the upper bounds on lengths behind them: the extension
    module's, in its order."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    page_table: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    max_seqlen_q: Any = 0
    max_seqlen_k: Any = 0


NO_EXTRAS = Extras()
# The names of those that are tensors.
TENSORS = Extras._fields[:-2]
DESCALES = ("q_descale", "k_descale", "v_descale")


def extras_of(
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    alibi_slopes=None,
    sinks=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    max_seqlen_q: Any = 0,
    max_seqlen_k: Any = 0,
):
    """The extras of a call, checked to be arrays; None where there are none."""
    arrays = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, alibi_slopes, sinks)
    arrays += (q_descale, k_descale, v_descale)
    has_some = False
    for at, value in enumerate(arrays):
        if value is not None:
            has_some = True
            array(BESIDE[at], value)
    if not has_some:
        return None
    return Extras(
        *arrays, upper_bound("max_seqlen_q", max_seqlen_q), upper_bound("max_seqlen_k", max_seqlen_k)
    )


def is_varied(extras):
    """Whether a call's lengths differ, so that rows may belong to no sequence."""
    if extras is None:
        return False
    starts, used = (extras.cu_seqlens_q, extras.cu_seqlens_k), (extras.seqused_q, extras.seqused_k)
    return not starts[0] is starts[1] is used[0] is used[1] is None


class CallOptions(NamedTuple):
    """The options of a call that are numbers, checked; the extension module reads them by these names."""

    scale: Optional[float]
    causal: bool
    # (left, right), -1 for no limit.
    window: Any
    softcap: float
    deterministic: bool
    # Keys by which queries lie right of the bottom-right alignment.
    query_offset: Any = 0
    # Whether v is the first columns of each key, of which k has the others.
    latent: bool = False
    # The codes that k and v are, where they are bytes.
    kv_dtype: Optional[str] = None
    # The type of out, where q is codes as well.
    out_dtype: Optional[str] = None
    # Whether out lies with heads before rows in memory, as torch's functions leave it where q does.
    by_heads: bool = False

    @property
    def has_mask(self):
        return self.causal or self.window != (-1, -1)

    @property
    def per_element(self):
        """Numbers in an element of k and v: codes of int4 are two to a byte."""
        return 2 if self.kv_dtype == "int4" else 1


def call_options(softmax_scale, causal, window_size, softcap, deterministic, query_offset=None):
    """The options of a call, checked."""
    cap = number("softcap", softcap) or 0.0
    if cap < 0.0:
        raise InputError(f"softcap is {cap}: it must be above 0, or 0 for none")
    # Most are what they should be: a function for each would take a third of the host's time here.
    return CallOptions(
        None if softmax_scale is None else number("softmax_scale", softmax_scale),
        causal if causal is True or causal is False else flag("causal", causal),
        window(window_size),
        cap,
        False if deterministic is False else flag("deterministic", deterministic),
        0 if query_offset is None else offset("query_offset", query_offset),
    )


def returned(out, lse, return_softmax_lse, return_lse, return_attn_probs):
    """What a function returns of its results."""
    if lse is None:
        return out
    wants_lse = flag("return_softmax_lse", return_softmax_lse)
    wants_lse = flag("return_lse", return_lse) or wants_lse
    if flag("return_attn_probs", return_attn_probs):
        return out, lse, None
    return (out, lse) if wants_lse else out
