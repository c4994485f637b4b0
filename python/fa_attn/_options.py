"""The functions' options other than arrays: FlashAttention's, each honoured or refused."""

from reprlib import repr as short
from typing import Any, NamedTuple

from ._checks import array, count, flag, is_neutral, most, number, surely, window
from ._core import BESIDE, InputError, UnsupportedError

# Arguments of FlashAttention's that are accepted at these values only, and what would work instead of others.
_NEUTRAL = {
    "sm_margin": ((0, None), "kernels use all SMs, leave it at 0"),
    "attention_chunk": ((0, None), "use window_size, or pack each chunk as a sequence of its own"),
    "qv": ((None,), "a second query on the values is not computed: join q and qv along the head dim"),
    "q_descale": ((None,), "no kernel computes in fp8: convert to bfloat16"),
    "k_descale": ((None,), "no kernel computes in fp8: convert to bfloat16"),
    "v_descale": ((None,), "no kernel computes in fp8: convert to bfloat16"),
    "scheduler_metadata": ((None,), "it is for flash_attn_with_kvcache, other calls plan their own work"),
    "score_mod": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "mask_mod": ((None,), "masks are causal ones and windows"),
    "block_sparse_tensors": ((None,), "masks are causal ones and windows"),
    "aux_tensors": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "score_mod_bwd": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "aux_scalars": ((None,), "scores are changed by softcap, alibi_slopes and sinks alone"),
    "block_sparse_tensors_bwd": ((None,), "masks are causal ones and windows"),
    "gather_kv_indices": ((None,), "keys are read in order: gather them, or give pages of one row"),
    "seqlen_k_per_split": ((None,), "how keys are divided is the planner's choice, leave it out"),
    "q_v": ((None,), "a second query on the values is not computed: join q and q_v along the head dim"),
    "cp_world_size": ((1, None), "keys of one process are attended to: join its parts by fa_attn.merge"),
    "cp_rank": ((0, None), "keys of one process are attended to: join its parts by fa_attn.merge"),
    "cp_tot_seqused_k": ((None,), "keys of one process are attended to: join its parts by fa_attn.merge"),
    "num_heads_q": ((None,), "qkv has as many heads for each: give q, k and v to flash_attn_func"),
}

# Accepted and not needed: hints for FlashAttention's scheduler, and which generation of it an engine calls.
_NEEDLESS = {"min_seqlen_k": most, "disable_scheduler_metadata": flag, "fa_version": most, "ver": most}

# Extras by the names of their keywords.
_EXTRAS = {"sinks": "sinks", "learnable_sink": "sinks", "s_aux": "sinks"}
_LSE = ("return_softmax_lse", "return_lse")
_DIVISION = ("num_splits", "pack_gqa")


# The most parts of a tile's keys.
_MOST_SPLITS = 256
_PLANNED = 0


def division_of(num_splits, pack_gqa):
    """How a GPU's kernel divides a forward's work, where the caller decides it: (parts of the keys, whether
    the heads of a group share a tile), either None for the planner's choice. None where both are."""
    splits = None
    packs = None if pack_gqa is None else flag("pack_gqa", pack_gqa)
    # By identity: a comparison would ask torch.compile for a symbol's value.
    if num_splits is not None and num_splits is not _PLANNED:
        number = count("num_splits", num_splits, most=_MOST_SPLITS)
        splits = None if surely(number == _PLANNED) else number
    return None if splits is packs is None else (splits, packs)


def others_of(function, others):
    """(extras, whether LSE is wanted, division of the work) from the keyword arguments; refuses what is not
    supported."""
    extras, wants_lse = {}, False
    division = division_of(others.get("num_splits"), others.get("pack_gqa"))
    for name, value in others.items():
        if name in _DIVISION:
            continue
        if name in _EXTRAS:
            field = _EXTRAS[name]
            if value is not None and field in extras:
                names = [other for other in _EXTRAS if _EXTRAS[other] == field]
                names = f"{', '.join(names[:-1])} and {names[-1]}"
                raise InputError(f"{field} are given twice: by one of the names {names}")
            if value is not None:
                extras[field] = value
        elif name in _LSE:
            wants_lse = wants_lse or flag(name, value)
        elif name in _NEUTRAL:
            neutral, advice = _NEUTRAL[name]
            if not is_neutral(value, neutral):
                raise UnsupportedError(f"{name} = {short(value)}: {advice}")
        elif name in _NEEDLESS:
            if value is not None:
                _NEEDLESS[name](name, value)
        else:
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    return extras, wants_lse, division


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
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0


NO_EXTRAS = Extras()
# The names of those that are tensors.
TENSORS = Extras._fields[:-2]


def extras_of(**named):
    """The extras of a call, checked to be arrays; None where there are none."""
    extras = Extras(**named)
    has_some = False
    for name, value in zip(BESIDE, extras):
        if value is not None:
            has_some = True
            array(name, value)
    if not has_some:
        return None
    bounds = most("max_seqlen_q", extras.max_seqlen_q), most("max_seqlen_k", extras.max_seqlen_k)
    return Extras(*extras[:-2], *bounds)


def is_varied(extras):
    """Whether a call's lengths differ, so that rows may belong to no sequence."""
    if extras is None:
        return False
    starts, used = (extras.cu_seqlens_q, extras.cu_seqlens_k), (extras.seqused_q, extras.seqused_k)
    return not starts[0] is starts[1] is used[0] is used[1] is None


# No offset.
_ALIGNED = 0


def options_of(softmax_scale, causal, window_size, softcap, deterministic, query_offset=0):
    """The options of a call, checked. Behind the sides of a window comes the offset, where there is one."""
    cap = number("softcap", softcap) or 0.0
    if cap < 0.0:
        raise InputError(f"softcap is {cap}: it must be above 0, or 0 for none")
    sides = window(window_size)
    # Not by ==, which would ask torch.compile for a symbol's value.
    if query_offset is not _ALIGNED:
        sides = (*sides, most("query_offset", query_offset))
    return (
        number("softmax_scale", softmax_scale),
        flag("causal", causal),
        sides,
        cap,
        flag("deterministic", deterministic),
    )


def moved(window):
    """A window of `options_of` as (left, right, offset)."""
    return window if len(window) == 3 else (*window, 0)


def returned(out, lse, wants_lse, return_attn_probs):
    if flag("return_attn_probs", return_attn_probs):
        return out, lse, None
    return (out, lse) if wants_lse else out
