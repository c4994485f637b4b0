"""Problems, plans and bound kernels, as dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from math import isfinite
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, Union

from . import _core
from ._checks import array, check_backward, count, flag, number, offset, one_of, window
from ._codes import coded
from ._deprecated import renamed
from ._faces import face_of
from ._nvrtc import find_nvrtc
from ._options import DESCALES, TENSORS, CallOptions, Extras, ExtraTensors, with_options
from ._reports import page, plan_html, plan_text, problem_html, problem_text
from ._types import A, Window

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Problem(Dict[str, Any]):
    """An attention problem, of `problem`: a dict with a short text, and a table in notebooks."""

    def __repr__(self) -> str:
        try:
            return f"Problem({problem_text(self)})"
        except KeyError:
            return super().__repr__()

    def _repr_html_(self) -> str:
        return problem_html(self)


class Spec(Dict[str, Any]):
    """A kernel's parameters: a dict whose text is the kernel's name."""

    @property
    def name(self) -> str:
        return _core.spec_name(json.dumps(self))

    def __repr__(self) -> str:
        try:
            return f"Spec({self.name})"
        except _core.InputError:
            return super().__repr__()


class Plan(Dict[str, Any]):
    """What was tried for a problem, of `plan`: a dict with a short text, and a report in notebooks."""

    def __repr__(self) -> str:
        try:
            return f"Plan({plan_text(self)})"
        except KeyError:
            return super().__repr__()

    def _repr_html_(self) -> str:
        return plan_html(self)

    def save(self, path: Union[str, Path]) -> None:
        """Writes the report as a page of its own."""
        Path(path).write_text(page("fa: plan", [problem_html(self["problem"]), plan_html(self)]), "utf-8")


def problem(
    batch: int = 1,
    seqlen: Union[int, str, None] = None,
    heads: Union[int, str] = 1,
    head_dim: Union[int, str] = 64,
    *,
    seqlen_q: Optional[int] = None,
    seqlen_k: Optional[int] = None,
    heads_kv: Optional[int] = None,
    head_dim_v: Optional[int] = None,
    dtype: Any = "bf16",
    kv_dtype: Any = None,
    out_dtype: Any = None,
    descales: Union[str, Mapping[str, str], None] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    query_offset: Optional[int] = 0,
    softmax_scale: Optional[float] = None,
    softcap: float = 0.0,
    alibi: Optional[str] = None,
    sinks: bool = False,
    total_q: Optional[int] = None,
    total_k: Optional[int] = None,
    page: Optional[int] = None,
    pages: Optional[int] = None,
    used_q: bool = False,
    used_k: bool = False,
    latent: bool = False,
) -> Problem:
    """An attention problem as a dict, checked.

    `seqlen`, or `seqlen_q` and `seqlen_k`: rows of a sequence, upper bounds where lengths differ. `total_q`,
    `total_k`: rows of packed arrays; `page`, `pages`: rows of a page and pages of the cache; `used_q`,
    `used_k`: whether lengths in use are given. `heads`, `head_dim` and `seqlen` may be pairs as the program
    `fa` takes them: "32:8", "192:128" (or "192-128"), "1x8192". `dtype`: f32, f16 or bf16, or e4m3 of q, k and
    v, also by the names of numpy and torch or as their types; out is then `out_dtype`, bf16 unless said.
    `kv_dtype`: e4m3, e5m2, int8 or int4 of k and v alone. `descales`: what shares a descale, "none", "head",
    "sequence_head" or, of k and v, "token_head": one for all, or a dict by "q", "k" and "v". `query_offset`:
    keys by which queries lie right of the bottom-right alignment. `alibi`: "per_head" or "per_sequence_head".
    `latent`: whether v is the first columns of each key, of which k has the others (MLA); `softmax_scale` is
    then needed.
    """
    left, right = window(window_size)
    heads, heads_kv = _pair("heads", heads, ":", "heads_kv", heads_kv)
    if isinstance(head_dim, str):
        head_dim = head_dim.replace("-", ":", 1)
    head_dim, head_dim_v = _pair("head_dim", head_dim, ":", "head_dim_v", head_dim_v)
    if isinstance(seqlen, str):
        if seqlen_q is not None:
            raise _core.InputError(f"seqlen is {seqlen!r} and seqlen_q {short(seqlen_q)}: give one of them")
        seqlen_q, seqlen_k = _pair("seqlen", seqlen, "x", "seqlen_k", seqlen_k)
    sides = {
        "left": None if left < 0 else min(left, _WIDEST),
        "right": 0 if flag("causal", causal) else None if right < 0 else min(right, _WIDEST),
    }
    fields: Dict[str, Any] = {
        "batch": batch,
        "seqlen_q": seqlen if seqlen_q is None else seqlen_q,
        "seqlen_k": seqlen if seqlen_k is None else seqlen_k,
        "total_q": total_q,
        "total_k": total_k,
        "page": page,
        "pages": pages,
        "heads_q": heads,
        "heads_kv": heads if heads_kv is None else heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
    }
    if fields["seqlen_q"] is None or fields["seqlen_k"] is None:
        raise _core.InputError("seqlen is missing: give seqlen, or seqlen_q and seqlen_k")
    fields = {name: None if value is None else count(name, value) for name, value in fields.items()}
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        value = number(name, value)
        if value is not None and not isfinite(value):
            raise _core.InputError(f"{name} is {value}: it must be finite")
        fields[name] = value if name == "softmax_scale" else value or None
    fields["mask"] = {**sides, "offset": offset("query_offset", query_offset)}
    fields["dtype"] = _dtype("dtype", dtype, (*_COMPUTED, "e4m3"))
    is_fp8 = fields["dtype"] == "e4m3"
    if kv_dtype is not None:
        fields["kv_dtype"] = _dtype("kv_dtype", kv_dtype, (*_COMPUTED, *_CODES))
    if is_fp8 or out_dtype is not None:
        fields["out_dtype"] = _dtype("out_dtype", "bf16" if out_dtype is None else out_dtype, _COMPUTED)
    if descales is not None:
        fields.update(_descales(descales, is_fp8))
    fields["alibi"] = None if alibi is None else one_of("alibi", alibi, ("per_head", "per_sequence_head"))
    for name, value in (
        ("used_q", used_q),
        ("used_k", used_k),
        ("sinks", sinks),
        ("latent", latent),
    ):
        fields[name] = flag(name, value)
    return Problem(json.loads(_core.problem(json.dumps(fields))))


def _descales(descales, is_fp8):
    """The forms of descales as fields of a problem."""
    sides = ("q", "k", "v") if is_fp8 else ("k", "v")
    if isinstance(descales, str):
        of_q = "head" if descales == "token_head" else descales
        descales = {side: of_q if side == "q" else descales for side in sides}
    if not isinstance(descales, Mapping):
        raise _core.InputTypeError(f"descales is {short(descales)}: it must be a form, or a dict of forms")
    for side in descales:
        one_of("a key of descales", side, ("q", "k", "v"))
    return {
        f"{side}_descale": one_of(f"descales[{side!r}]", form, _FORMS) for side, form in descales.items()
    }


_FORMS = ("none", "head", "sequence_head", "token_head")


def _pair(name, value, between, second_name, second):
    """(value, second), of a text such as "32:8" both."""
    if not isinstance(value, str):
        return value, second
    parts = value.split(between)
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        both = f"32{between}8"
        raise _core.InputTypeError(
            f"{name} is {short(value)}: it must be a whole number, or two as in {both!r}"
        )
    if second is not None:
        raise _core.InputError(f"{name} is {value!r} and {second_name} {short(second)}: give one of them")
    return int(parts[0]), int(parts[1])


_NAMES = {
    "f32": ("f32", "float32", "float", "fp32", "single"),
    "f16": ("f16", "float16", "half", "fp16"),
    "bf16": ("bf16", "bfloat16"),
    "e4m3": ("e4m3", "float8_e4m3fn", "fp8", "fp8_e4m3"),
    "int8": ("int8",),
    "int4": ("int4",),
    "e5m2": ("e5m2", "float8_e5m2", "fp8_e5m2"),
}
# What arrays of a type hold: bytes where a library has none.
_BYTES = ("uint8",)
_HELD = {**_NAMES, "int4": _BYTES, **{kind: _NAMES[kind] + _BYTES for kind in ("e4m3", "e5m2")}}
_COMPUTED, _CODES = ("f32", "f16", "bf16"), ("e4m3", "int8", "int4", "e5m2")


def _dtype(argument, value, known):
    """The type by its name here, from its name or type in another library."""
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value)).rpartition(".")[2]
    found = next((own for own, names in _NAMES.items() if name.lower() in names), None)
    return one_of(argument, value if found is None else found, known)


# More than any sequence has.
_WIDEST = (1 << 32) - 1

_MODES = {"fwd": (True, False), "bwd": (False, True), "both": (True, True)}


def _wanted(problem, mode):
    return _text(problem), *_MODES[one_of("mode", mode, tuple(_MODES))]


def _text(problem):
    if not isinstance(problem, Mapping):
        raise _core.InputTypeError(f"the problem is {short(problem)}: make one by fa_attn.problem")
    try:
        return json.dumps(problem)
    except (TypeError, ValueError):
        raise _core.InputTypeError(f"{short(problem)} is no problem: make one by fa_attn.problem") from None


def _name(name, value):
    if not isinstance(value, str):
        raise _core.InputTypeError(f"{name} is {short(value)}: it must be a text")
    return value


@renamed(given="problem")
def plan(
    problem: Mapping[str, Any],
    arch: str = "sm90",
    mode: str = "fwd",
    deterministic: bool = False,
    family: Optional[str] = None,
    limit: Optional[int] = None,
) -> Plan:
    """Which kernels fit a problem (of `problem`) on a GPU, best first, and why the others do not: the dict
    that `fa plan --json` prints, with a short text, a report in notebooks and `save`, which writes it.

    "forward" and "backward" have "tried" and "fit" (how many), "plans" (each with its "spec", registers,
    shared memory in bytes, and "cost": seconds, tflops, bottleneck) and "rejected" (by limit, with the
    nearest miss). `arch`: sm80, sm86, sm89, sm90, sm100, sm103, sm110, sm120 or sm121, or the name of a GPU,
    as in "h200" or "a10g", whose number of SMs and rates are then taken. `limit`: the most plans per pass.
    """
    text, forward, backward = _wanted(problem, mode)
    family = None if family is None else _name("family", family)
    limit = None if limit is None else count("limit", limit)
    deterministic = flag("deterministic", deterministic)
    found = json.loads(_core.plan(text, _name("arch", arch), family, forward, backward, deterministic, limit))
    found["problem"] = Problem(found["problem"])
    for name in ("forward", "backward"):
        for each in (found.get(name) or {}).get("plans", ()):
            each["spec"] = Spec(each["spec"])
    return Plan(found)


@renamed(given="problem")
def explain(
    problem: Mapping[str, Any],
    query: str,
    arch: str = "sm90",
    mode: str = "fwd",
    deterministic: bool = False,
    family: Optional[str] = None,
) -> Dict[str, Any]:
    """Why the candidates that match `query`, as in "tile_n=192,num_wg=2", were chosen or not: "feasible" with
    rank and account, "rejected" with the limit that each breaks."""
    text, forward, backward = _wanted(problem, mode)
    family = None if family is None else _name("family", family)
    query, arch = _name("query", query), _name("arch", arch)
    deterministic = flag("deterministic", deterministic)
    return json.loads(_core.explain(text, query, arch, family, forward, backward, deterministic))


def tune(mode: str = "auto", *, candidates: int = 4, budget: float = 5.0) -> None:
    """Switches tuning on ("auto") or off ("off"), for all GPUs of this process. Before the first call of this
    it is as FA_TUNE says: auto, auto:SECONDS with a budget, or off, its default.

    >>> fa_attn.tune("auto")

    Where it is on, the first call for a problem and pass computes at once, as it does without tuning, and
    hands the problem to a thread. There the kernel that ran and the best of the planner's others,
    `candidates` in all, are compiled and measured, for `budget` seconds at most and a fifth of that where the
    cache has the kernels, with memory and a stream of their own. The winner is used from the next call on, but
    not by captured graphs, and is kept for later processes in the table that FA_TUNED names, or beside the
    kernel cache. Calls with `deterministic=True` keep the kernels that they have without tuning. Without a GPU
    there is nothing to tune: DeviceError.
    """
    on, candidates = one_of("mode", mode, ("auto", "off")) == "auto", count("candidates", candidates, 2)
    seconds = number("budget", budget)
    if seconds is None or not 0 < seconds <= _LONGEST_BUDGET:
        raise _core.InputError(f"budget is {seconds} s: it must be above 0 s and at most a day")
    if on:
        find_nvrtc()
    _core.tune(candidates if on else None, seconds)


def finish_tuning() -> List[Dict[str, Any]]:
    """Waits until every problem has been measured. Returns the outcomes since the last call, a list of dicts:
    "problem", "pass" (forward or backward), "deterministic", "family", "tried" (each with "kernel", "ms" or
    "error"), "winner" (a kernel, or None) and "error". An empty list where tuning is off."""
    return json.loads(_core.finish_tuning())


_LONGEST_BUDGET = 86_400.0


class Kernels:
    """The kernels of one problem, bound on construction: planned, compiled and checked once, then run as
    often as needed.

    >>> kernels = fa_attn.Kernels(fa_attn.problem(2, 4096, heads=32, head_dim=128, causal=True), "cuda")
    >>> out, lse = kernels.forward(q, k, v)
    >>> dq, dk, dv = kernels.backward(dout, q, k, v, out, lse)

    `device`: "cpu", "cuda" or "cuda:1". `forward` and `backward` take arrays of the problem's shapes, and by
    name the other arrays that the problem has: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
    alibi_slopes, sinks, and of codes q_descale, k_descale, v_descale. k and v in codes are float8_e4m3fn or
    float8_e5m2 (or the bytes, uint8), int8, or of int4 uint8 with half as many columns.
    """

    @renamed(given="problem")
    def __init__(
        self,
        problem: Mapping[str, Any],
        device: str = "cpu",
        deterministic: bool = False,
        backward: Optional[bool] = None,
    ) -> None:
        text = _text(problem)
        self.problem = Problem(json.loads(_core.problem(text)))
        self._needs = _core.needs(text)
        self.device, self.deterministic = str(device), flag("deterministic", deterministic)
        ordinal = self._ordinal()
        if ordinal is not None:
            find_nvrtc()
        self.report: Dict[str, Dict[str, Any]] = {
            "forward": json.loads(_core.bind(text, False, False, ordinal))
        }
        # Keys in pages, latents and codes have no gradients.
        self._codes = self.problem.get("kv_dtype") or {"e4m3": "e4m3"}.get(self.problem["dtype"])
        has_gradients = self._codes is None and not any(map(self.problem.get, ("page", "latent")))
        is_wanted = has_gradients if backward is None else flag("backward", backward)
        if is_wanted:
            self.report["backward"] = json.loads(_core.bind(text, True, self.deterministic, ordinal))
        mask = self.problem["mask"]
        sides = (mask["left"], mask["right"])
        self._options = CallOptions(
            self.problem["softmax_scale"],
            False,
            tuple(-1 if side is None else side for side in sides),
            self.problem["softcap"] or 0.0,
            self.deterministic,
            mask.get("offset", 0),
            self.problem.get("latent", False),
        )

    def __repr__(self) -> str:
        runs = "; ".join(f"{name} {_runner_text(report)}" for name, report in self.report.items())
        return f"Kernels({problem_text(self.problem)}, on {self.device}: {runs})"

    def _repr_html_(self) -> str:
        return problem_html(self.problem) + f"<p>{escape(repr(self))}</p>"

    def _ordinal(self):
        kind, _, index = self.device.partition(":")
        if kind == "cpu":
            return None
        if kind != "cuda" or (index and not (index.isascii() and index.isdigit() and len(index) < 9)):
            raise _core.InputError(f"device is {self.device!r}: it must be 'cpu', 'cuda' or 'cuda:0'")
        return int(index or 0)

    def _extras(self, q, k, v, named):
        array("q", q), array("k", k), array("v", v)
        for name in named:
            if name not in TENSORS:
                raise TypeError(f"unexpected keyword argument '{name}': {', '.join(TENSORS)} are known")
        extras = tuple(named.get(name) for name in TENSORS)
        bound = self.problem
        for name, value in zip(TENSORS, extras):
            if (value is not None) != (name in self._needs):
                fault = (
                    "missing: the problem has them" if value is None else "given, but the problem has none"
                )
                raise _core.InputError(f"{name}: {fault}")
        outer_q = [bound["batch"], bound["seqlen_q"]] if "total_q" not in bound else [bound["total_q"]]
        outer_k = [bound["batch"], bound["seqlen_k"]] if "total_k" not in bound else [bound["total_k"]]
        if "page" in bound:
            outer_k = [bound["pages"], bound["page"]]
        latents = bound["head_dim_v"] if bound.get("latent") else 0
        per_element = 2 if self._codes == "int4" else 1
        need = {
            "q": (*outer_q, bound["heads_q"], bound["head_dim"]),
            "k": (*outer_k, bound["heads_kv"], (bound["head_dim"] - latents) // per_element),
            "v": (*outer_k, bound["heads_kv"], bound["head_dim_v"] // per_element),
        }
        for name, have in (("q", q), ("k", k), ("v", v)):
            if tuple(have.shape) != need[name]:
                raise _core.InputError(f"{name} has the shape {tuple(have.shape)}: bound is {need[name]}")
        for name, x, own in (("q", q, bound["dtype"]), ("k", k, self._codes), ("v", v, self._codes)):
            held = str(x.dtype).rpartition(".")[2]
            if own is not None and held not in _HELD[own]:
                raise _core.InputError(f"{name} holds {x.dtype}: bound is {own}")
        if hasattr(q, "__dlpack_device__"):
            try:
                kind, index = q.__dlpack_device__()
            except (ValueError, RuntimeError) as error:
                raise _core.InputError(f"q lies where nothing is computed: {error}") from None
            at = None if int(kind) == _CPU else index
            if at != self._ordinal():
                place = "in the memory of the CPU" if at is None else f"on GPU {at}"
                raise _core.InputError(f"q lies {place}: bound is {self.device!r}")
        if all(x is None for x in extras):
            return None
        return Extras(*extras, max_seqlen_q=bound["seqlen_q"], max_seqlen_k=bound["seqlen_k"])

    @with_options
    def forward(self, q: A, k: A, v: A, **tensors: Unpack[ExtraTensors]) -> Tuple[A, A]:
        """(out, lse)."""
        extras, options = self._extras(q, k, v, tensors), self._options
        if self._codes is not None:
            asked = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}.get(self._codes, self._codes)
            face = face_of(q)
            q, k, v, coded_tensors, options, _ = coded(
                q, k, v, tensors, options, asked, tensors.get("cu_seqlens_q"), is_cache=True
            )
            own = self.problem.get("out_dtype")
            if options.out_dtype != own:
                raise _core.InputError(f"q of {type(q).__name__} gives {options.out_dtype}: bound is {own}")
            extras = self._descaled(coded_tensors, extras)
            return face.attention(q, k, v, options, extras)
        return face_of(q).attention(q, k, v, options, extras)

    def _descaled(self, tensors, extras):
        """Extras with descales as `coded` leaves them, in the forms that are bound."""
        bound = self.problem
        heads = bound["heads_kv"]
        rows = [bound["batch"], bound["seqlen_k"]] if "total_k" not in bound else [bound["total_k"]]
        if "page" in bound:
            rows = [bound["pages"], bound["page"]]
        shapes = {"head": (heads,), "sequence_head": (bound["batch"], heads), "token_head": (*rows, heads)}
        given = {name: tensors[name] for name in DESCALES if tensors.get(name) is not None}
        for name, x in given.items():
            need = shapes[bound[name]]
            if tuple(x.shape) != need:
                raise _core.InputError(f"{name} has the shape {tuple(x.shape)}: bound is {need}")
        return extras if extras is None else extras._replace(**given)

    @with_options
    def backward(
        self, dout: A, q: A, k: A, v: A, out: A, lse: A, **tensors: Unpack[ExtraTensors]
    ) -> Tuple[A, ...]:
        """(dq, dk, dv), with sinks (dq, dk, dv, dsinks)."""
        extras = self._extras(q, k, v, tensors)
        check_backward(dout, q, k, v, out, lse)
        *grads, dsinks = face_of(q).backward(dout, q, k, v, out, lse, self._options, extras)
        return tuple(grads) if dsinks is None else (*grads, dsinks)


def _runner_text(report):
    if report["backend"] == "cuda":
        return f"{report['kernel']} on {report['gpu']}"
    return f"{report['isa']} on {report['threads']} threads"


# DLPack's device type for the CPU.
_CPU = 1
