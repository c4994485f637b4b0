"""Problems, plans and bound kernels as plain dicts."""

import json
from operator import index

from . import _core
from ._faces import face_of, find_nvrtc


def problem(
    batch=1,
    seqlen=None,
    heads=1,
    head_dim=64,
    *,
    seqlen_q=None,
    seqlen_k=None,
    heads_kv=None,
    head_dim_v=None,
    dtype="bf16",
    causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    alibi=None,
    sinks=False,
    total_q=None,
    total_k=None,
    page=None,
    pages=None,
    used_q=False,
    used_k=False,
):
    """A problem of attention as a dict, checked.

    `seqlen`, or `seqlen_q` and `seqlen_k`: rows of a sequence, upper bounds where lengths differ. `total_q`,
    `total_k`: rows of packed arrays; `page`, `pages`: rows of a page and pages of the cache; `used_q`,
    `used_k`: whether lengths in use are given. `dtype`: f32, f16 or bf16. `alibi`: "per_head" or
    "per_sequence_head".
    """
    left, right = window_size
    sides = {
        "left": None if left is None or left < 0 else left,
        "right": 0 if causal else None if right is None or right < 0 else right,
    }
    fields = {
        "batch": batch,
        "seqlen_q": seqlen if seqlen_q is None else seqlen_q,
        "seqlen_k": seqlen if seqlen_k is None else seqlen_k,
        "total_q": total_q,
        "total_k": total_k,
        "page": page,
        "pages": pages,
        "used_q": used_q,
        "used_k": used_k,
        "heads_q": heads,
        "heads_kv": heads if heads_kv is None else heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        "mask": sides,
        "dtype": dtype,
        "softmax_scale": softmax_scale,
        "softcap": softcap or None,
        "alibi": alibi,
        "sinks": sinks,
    }
    if fields["seqlen_q"] is None or fields["seqlen_k"] is None:
        raise _core.InputError("seqlen is missing: give seqlen, or seqlen_q and seqlen_k")
    return json.loads(_core.problem(json.dumps(fields)))


_MODES = {"fwd": (True, False), "bwd": (False, True), "both": (True, True)}


def _asked(given, mode):
    if mode not in _MODES:
        raise _core.InputError(f"mode is {mode!r}: it must be 'fwd', 'bwd' or 'both'")
    return json.dumps(given), *_MODES[mode]


def plan(given, arch="sm90", mode="fwd", deterministic=False, family=None, limit=None):
    """Which kernels fit a problem (of `problem`) on a GPU, best first, and why the others do not: the dict
    that `fa plan --json` prints.

    "forward" and "backward" have "tried" and "fit" (how many), "plans" (each with its "spec", registers,
    shared memory in bytes, and "cost": seconds, tflops, bottleneck) and "rejected" (by limit, with the
    nearest miss). `arch`: sm80, sm86, sm89, sm90, sm100, sm103, sm120 or sm121. `limit`: plans of a pass at
    most.
    """
    text, forward, backward = _asked(given, mode)
    return json.loads(_core.plan(text, arch, family, forward, backward, deterministic, limit))


def explain(given, query, arch="sm90", mode="fwd", deterministic=False, family=None):
    """What became of the candidates with the fields of `query`, as in "tile_n=192,num_wg=2": "feasible" with
    rank and account, "rejected" with the limit that each breaks."""
    text, forward, backward = _asked(given, mode)
    return json.loads(_core.explain(text, query, arch, family, forward, backward, deterministic))


def tuning(on=True, *, candidates=4, budget=30.0):
    """Switches tuning on or off, for all GPUs of this process; it is off by default.

    >>> fa_attn.tuning()

    Where it is on, the first call for a problem and pass computes as it does without, at once, and hands the
    problem to a thread. There the kernel that ran and the best of the planner's others, `candidates` in all,
    are compiled and measured, for `budget` seconds at most, on memory and a stream of their own. The winner
    is used from the next call on, but not by captured graphs, and is kept for later processes in the table
    that FA_TUNED names, or beside the kernel cache. Without a GPU there is nothing to tune: DeviceError.
    """
    if not isinstance(on, bool):
        raise _core.InputError(f"on is {on!r}: it must be True or False")
    try:
        count = index(candidates)
    except TypeError:
        raise _core.InputError(f"candidates is {candidates!r}: it must be a whole number from 2") from None
    try:
        seconds = float(budget)
    except (TypeError, ValueError, OverflowError):
        raise _core.InputError(f"budget is {budget!r}: it must be a number of seconds above 0") from None
    if not 2 <= count <= _MOST_CANDIDATES:
        raise _core.InputError(f"candidates is {count}: it must be from 2 to {_MOST_CANDIDATES}")
    if not 0 < seconds <= _LONGEST_BUDGET:
        raise _core.InputError(f"budget is {seconds} s: it must be above 0 s and at most a day")
    if on:
        find_nvrtc()
    _core.tuning(count if on else None, seconds)


def finish_tuning():
    """Waits until no problem is left to be measured. Returns what came of those since the last call, a list
    of dicts: "problem", "pass" (forward or backward), "deterministic", "family", "tried" (each with "kernel",
    "ms" or "error"), "winner" (a kernel, or None) and "error". An empty list where tuning is off."""
    return json.loads(_core.finish_tuning())


# More kernels than any problem has.
_MOST_CANDIDATES = 10_000

_LONGEST_BUDGET = 86_400.0


class Kernels:
    """The kernels of one problem, bound when this is made: planned, compiled and checked once, run as often
    as wanted.

    >>> kernels = fa_attn.Kernels(fa_attn.problem(2, 4096, heads=32, head_dim=128, causal=True), "cuda")
    >>> out, lse = kernels.forward(q, k, v)
    >>> dq, dk, dv = kernels.backward(dout, q, k, v, out, lse)

    `device`: "cpu", "cuda" or "cuda:1". `forward` and `backward` take arrays of the problem's shapes, and by
    name what the problem has beside them: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table,
    alibi_slopes, sinks.
    """

    def __init__(self, given, device="cpu", deterministic=False, backward=None):
        self.problem = json.loads(_core.problem(json.dumps(given)))
        self.device, self.deterministic = str(device), deterministic
        text = json.dumps(given)
        ordinal = self._ordinal()
        if ordinal is not None:
            find_nvrtc()
        self.report = {"forward": json.loads(_core.bind(text, False, False, ordinal))}
        # Keys in pages have no gradients.
        if backward or (backward is None and self.problem.get("page") is None):
            self.report["backward"] = json.loads(_core.bind(text, True, deterministic, ordinal))
        mask = self.problem["mask"]
        sides = (mask["left"], mask["right"])
        self._options = (
            self.problem["softmax_scale"],
            False,
            tuple(-1 if side is None else side for side in sides),
            self.problem["softcap"] or 0.0,
        )

    def _ordinal(self):
        kind, _, index = self.device.partition(":")
        if kind == "cpu":
            return None
        if kind != "cuda" or (index and not index.isdigit()):
            raise _core.InputError(f"device is {self.device!r}: it must be 'cpu', 'cuda' or 'cuda:0'")
        return int(index or 0)

    def _extras(self, q, k, named):
        for name in named:
            if name not in _BESIDE:
                raise TypeError(f"unexpected keyword argument '{name}': {', '.join(_BESIDE)} are known")
        beside = tuple(named.get(name) for name in _BESIDE)
        given = self.problem
        outer_q = [given["batch"], given["seqlen_q"]] if "total_q" not in given else [given["total_q"]]
        outer_k = [given["batch"], given["seqlen_k"]] if "total_k" not in given else [given["total_k"]]
        if "page" in given:
            outer_k = [given["pages"], given["page"]]
        need = (
            (*outer_q, given["heads_q"], given["head_dim"]),
            (*outer_k, given["heads_kv"], given["head_dim"]),
        )
        have = (tuple(q.shape), tuple(k.shape))
        if have != need:
            raise _core.InputError(f"q is {have[0]} and k {have[1]}, bound are {need[0]} and {need[1]}")
        if all(x is None for x in beside):
            return None
        return (*beside, given["seqlen_q"], given["seqlen_k"])

    def forward(self, q, k, v, **beside):
        """(out, lse)."""
        return face_of(q).attention(q, k, v, *self._options, self.deterministic, self._extras(q, k, beside))

    def backward(self, dout, q, k, v, out, lse, **beside):
        """(dq, dk, dv), with sinks (dq, dk, dv, dsinks)."""
        extras = self._extras(q, k, beside)
        *grads, dsinks = face_of(q).backward(
            dout, q, k, v, out, lse, *self._options, self.deterministic, extras
        )
        return tuple(grads) if dsinks is None else (*grads, dsinks)


_BESIDE = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "page_table",
    "alibi_slopes",
    "sinks",
)
