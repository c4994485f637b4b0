"""Work on a cache that is planned once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from ._checks import array, count, flag, lengths_of, surely, upper_bound
from ._core import InputError, InputTypeError
from ._options import call_options, division_of, read_options
from ._types import Array, Window


@dataclass
class SchedulerMetadata:
    """The arguments of `get_scheduler_metadata`, and the work plans that calls have made with it."""

    batch_size: int
    max_seqlen_q: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    qkv_dtype: Any
    page_size: Optional[int]
    causal: bool
    window_size: Window
    division: Any
    attention_chunk: int = 0
    plans: Dict[Tuple[int, int], Any] = field(default_factory=dict, repr=False)

    def check(self, q, k_cache, v_cache, numbers, batch, longest, is_paged, chunk):
        """Raises an error where the call is not the one that was described."""
        there = {
            "batch_size": batch,
            "max_seqlen_q": longest,
            "num_heads_q": q.shape[-2],
            "num_heads_kv": k_cache.shape[-2],
            "headdim": q.shape[-1],
            "headdim_v": v_cache.shape[-1] * numbers.per_element,
            "qkv_dtype": q.dtype,
            "page_size": k_cache.shape[1] if is_paged else None,
            "causal": numbers.causal,
            "window_size": numbers.window,
            "attention_chunk": 0 if chunk is None else chunk,
        }
        for name, have in there.items():
            need = getattr(self, name)
            # A type and a page size may be left open.
            if need is not None and _differ(need, have):
                raise InputError(
                    f"scheduler_metadata is of {name} = {need}, the call has {have}: make one for the call"
                )

    def divided(self, division):
        """How the call's work is divided: as the call says, or else the metadata."""
        if None not in (division, self.division) and division != self.division:
            raise InputError(
                f"scheduler_metadata is of (num_splits, pack_gqa) = {self.division}, the call has "
                f"{division}: make one for the call"
            )
        return division or self.division


def _differ(one, other):
    """Whether two values are known to differ: numbers, types or tuples of them."""
    if isinstance(one, tuple):
        return any(map(_differ, one, other))
    return surely(one != other)


def plans_of(metadata):
    if not isinstance(metadata, SchedulerMetadata):
        kind = type(metadata).__name__
        raise InputTypeError(
            f"scheduler_metadata is {kind}: it must be what fa_attn.get_scheduler_metadata gives"
        )
    return metadata.plans


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Array,
    qkv_dtype: Any = None,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Array] = None,
    cu_seqlens_k_new: Optional[Array] = None,
    cache_leftpad: Optional[Array] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: Optional[int] = 0,
    has_softcap: bool = False,
    num_splits: Optional[int] = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: Optional[int] = 0,
) -> SchedulerMetadata:
    """The plan of the work on a cache, made once for all layers of a step: give it to
    `flash_attn_with_kvcache` as `scheduler_metadata`.

    Arguments are those of FlashAttention-3. The first call that gets the plan reads the lengths on the device
    and plans; later calls on the same stream skip planning. A plan therefore serves the lengths of one step:
    make another when they change. It is optional: without it each call plans its own work, as do calls that
    are captured in a graph or compiled by torch.compile, and those with `attention_chunk`. Where nothing is
    planned (on the CPU, or for equal lengths) it has no effect. `num_splits` and `pack_gqa` apply to calls
    that do not give their own. `has_softcap` is not needed: each kernel has a plan of its own. A call that
    contradicts the other arguments raises an error.
    """
    read_options("get_scheduler_metadata", {"sm_margin": sm_margin})
    flag("has_softcap", has_softcap)
    division = division_of(num_splits, pack_gqa)
    lengths = {"cache_seqlens": cache_seqlens, "cu_seqlens_q": cu_seqlens_q}
    lengths.update(cu_seqlens_k_new=cu_seqlens_k_new, cache_leftpad=cache_leftpad)
    for name, value in lengths.items():
        if value is not None or name == "cache_seqlens":
            array(name, value)
    for name, value in (("max_seqlen_k", max_seqlen_k), ("max_seqlen_k_new", max_seqlen_k_new)):
        upper_bound(name, value)
    numbers = call_options(None, causal, window_size, 0.0, False)
    batch = count("batch_size", batch_size)
    lengths_of("cache_seqlens", cache_seqlens, batch, "batch_size")
    headdim = count("headdim", headdim, 1)
    heads_q, heads_kv = count("num_heads_q", num_heads_q, 1), count("num_heads_kv", num_heads_kv, 1)
    if heads_q % heads_kv:
        raise InputError(f"num_heads_q is {heads_q}: it must be a multiple of num_heads_kv, {heads_kv}")
    return SchedulerMetadata(
        batch_size=batch,
        max_seqlen_q=upper_bound("max_seqlen_q", max_seqlen_q),
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        headdim=headdim,
        headdim_v=headdim if headdim_v is None else count("headdim_v", headdim_v, 1),
        qkv_dtype=qkv_dtype,
        page_size=None if page_size is None else count("page_size", page_size, 1),
        causal=numbers.causal,
        window_size=numbers.window,
        division=division,
        attention_chunk=0 if attention_chunk is None else count("attention_chunk", attention_chunk),
    )
