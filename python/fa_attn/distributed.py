"""Attention over several GPUs: sequences whose rows are spread over the ranks of a process group.

Every rank holds some rows of Q, K and V and gets its rows of the output, and of the gradients. All functions
are collective: each rank calls them, in the same order. Transfers are those of the caller's process group:
NCCL on GPUs, gloo on CPUs.

- `attention`: keys and values are gathered, in stages those of some heads while others are computed; nothing
  is merged: a rank's rows are computed as on one GPU. Gradients of K and V are summed in float32. Or they
  travel in a ring, those of one rank while others are attended to, and results are merged.
- `ulysses_attention`: an exchange turns shards of rows into shards of heads; between GPUs of one host by
  copies that need no SM.
- `decode_attention`: few queries on a cache whose keys are spread over ranks; results are merged.
- `zigzag_ring_flash_attn_func`, `ring_flash_attn_func`, `stripe_flash_attn_func`, those of packed sequences
  (`zigzag_ring_flash_attn_varlen_func`, `llama3_flash_attn_varlen_func`) and their relatives: the names and
  arguments of ring-flash-attention; `substitute_hf_flash_attn` and `update_ring_flash_attn_params` for
  models of transformers. `UlyssesAttention`, `LongContextAttention` (a grid of both) and
  `set_seq_parallel_pg`: those of yunchang.
- `context_parallel`, `context_parallel_unshard`, `set_rotate_method`, the plan `ContextParallel`: as those of
  `torch.distributed.tensor.experimental`.
- `shard`, `unshard`, `positions`: the rows of a rank, and where they are in the sequence.

Rows are dealt "zigzag" (of 2 * world chunks rank r has chunks r and 2 * world - 1 - r, so that a causal mask
gives every rank as much to do) or "contiguous" (rank r has chunk r). All ranks have as many rows, unless
`attention` is told the `seqlen` of the whole, and give the same options: they compare them, on GPUs at the
first call with each, and a difference is an error on every rank. A rank that is lost is torch's error: that
of the group's timeout, or of its connection.
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn import functional

from . import flex
from ._core import InputError, UnsupportedError
from ._sharded import (
    LAYOUTS,
    InParts,
    Options,
    cast,
    check,
    chunk_length,
    dealt,
    of_rows,
    parts_of,
    positions,
    shard,
    spans_of,
    stacked,
    unshard,
)
from ._sharded_decode import decode_attention
from ._sharded_flex import flex_over_ranks
from ._sharded_heads import ByHeads, copies_for, gains, is_trained
from ._sharded_hybrid import (
    EXTRACT_FUNC_DICT,
    AsyncLongContextAttention,
    LongContextAttention,
    LongContextAttentionQKVPacked,
    basic_extract_local,
    check_kind,
    over_grid,
    set_seq_parallel_pg,
    stripe_extract_local,
    zigzag_extract_local,
)
from ._sharded_operators import PASSES, agreed, by_heads, exchange, over_ranks
from ._sharded_packed import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)
from ._sharded_peers import PeerLost, agree, place, telling, together, transferred
from ._sharded_programs import by_sequence, dropout_state, dropped, of_part, shown_state
from ._sharded_programs import computed as with_programs
from ._sharded_programs import modifications as program_of
from ._sharded_programs import with_slopes
from ._sharded_ring import Ring, pays
from ._sharded_transformers import substitute_hf_flash_attn, update_ring_flash_attn_params
from .interface import flash_attn_func

__all__ = [
    "EXTRACT_FUNC_DICT",
    "LAYOUTS",
    "AsyncLongContextAttention",
    "ContextParallel",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "PeerLost",
    "UlyssesAttention",
    "attention",
    "basic_extract_local",
    "context_parallel",
    "context_parallel_unshard",
    "decode_attention",
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "positions",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "set_rotate_method",
    "set_seq_parallel_pg",
    "shard",
    "stripe_extract_local",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "ulysses_attention",
    "unshard",
    "update_ring_flash_attn_params",
    "zigzag_extract_local",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

@together
def attention(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=True,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    alibi_slopes=None,
    sinks=None,
    group=None,
    layout="zigzag",
    stages=1,
    scheme=None,
    return_lse=False,
    seqlen=None,
    dropout_p=0.0,
    rng_state=None,
    cp_comm_type=None,
    **modifications,
):
    """Attention of this rank's queries over the keys of all ranks.

    q (batch, rows, heads_q, head_dim), k and v (batch, rows, heads_kv, head_dim): this rank's rows, as many
    on every rank, or those of a sequence of `seqlen` rows, which the ranks need not divide, as `shard` deals
    them. `layout`: how rows are dealt. `stages`: in how many parts the K/V heads are gathered, one
    after the other; a divisor of their number. One is fastest over two GPUs from 8k to 64k rows: each
    transfer costs the host and the GPUs more than it hides. `scheme`: "gather"; or "ring", in which K and V
    travel from rank to rank while others are attended to: the least memory. Results are merged by their LSE
    in float32, so that they have other last bits than those of one GPU; slopes, sinks, dropout, modifications
    and stages are the gather's. Or "ulysses": `ulysses_attention` of this layout, without LSE and `seqlen`.
    None: on GPUs the fastest that computes the call, but for windows: ulysses in a step of training, the ring
    where K and V have as many heads as Q; else the gather.
    `alibi_slopes` and `sinks`: those of all heads, the same on every rank; the gradient of sinks is that of
    this rank's rows, to be added up as those of weights are. `modifications`: score_mod, mask_mod, bias,
    mask, attention_chunk and block_sparse_tensors of `flash_attn_func`, of the whole and the same on every
    rank (a bias is that of all queries and keys; its gradient is that of this rank's rows); K and V are then
    gathered at once, and kept for the backward.
    `dropout_p` and `rng_state`: likewise; what is dropped is that of one GPU with the same state, which is
    the first rank's where it is not given.
    `cp_comm_type`: a name by which Megatron and TransformerEngine choose transfers. "all_gather" is the
    gather, "p2p" chooses as None does; "a2a" is `ulysses_attention` of rows in this layout; "a2a+p2p"
    exchanges heads in the first of a pair of groups that `group` is, and gathers in the second: rows are
    dealt zigzag over both, the ranks of a first group next to each other.
    Returns out, in the shape of q, and with `return_lse` (out, lse).
    """
    if cp_comm_type not in (None, "p2p", "all_gather"):
        options = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
        options.update(deterministic=deterministic, alibi_slopes=alibi_slopes, sinks=sinks)
        options.update(dropout_p=dropout_p, rng_state=rng_state, **modifications)
        if return_lse or stages != 1 or seqlen is not None or scheme is not None:
            raise UnsupportedError(
                f"return_lse, stages, scheme and seqlen with cp_comm_type {cp_comm_type!r}: use 'p2p' or "
                "'all_gather'"
            )
        return _by_heads_first(q, k, v, cp_comm_type, group, layout, options)
    world, rank = place(group)
    check(0.0, q=(q, 4), k=(k, 4), v=(v, 4))
    q, k, v = cast(q, k, v)
    options = Options(softmax_scale, causal, window_size, softcap, deterministic, alibi_slopes, sinks)
    options.check_shapes(q.shape[0], q.shape[2])
    if q.shape[1] != k.shape[1] or k.shape[1] != v.shape[1]:
        raise InputError(
            f"q has {q.shape[1]} rows, k {k.shape[1]} and v {v.shape[1]}: a rank's shards are of equal length"
        )
    drop = (dropout_p, shown_state(rng_state))
    if scheme not in (None, *_SCHEMES):
        raise InputError(f"scheme is {scheme!r}: it must be one of {', '.join(_SCHEMES)}")
    drops = dropout_p != 0.0 or rng_state is not None
    beyond = _beyond_ring(alibi_slopes, sinks, stages, drops, modifications)
    by_rows = [name for name, x in (("return_lse", return_lse or None), ("seqlen", seqlen)) if x is not None]
    if scheme in ("ring", "ulysses") and beyond:
        raise UnsupportedError(f"{', '.join(beyond)} with scheme {scheme!r}: use 'gather'")
    if scheme == "ulysses" and by_rows:
        raise UnsupportedError(f"{', '.join(by_rows)} with scheme 'ulysses': use 'gather'")
    asked = scheme or (cp_comm_type, return_lse, is_trained(q, k, v))
    agreed(group, q, k, v, layout, stages, asked, seqlen, options, *drop, *sorted(modifications))
    # By what all ranks have agreed on: they choose alike.
    if scheme is None and (beyond or cp_comm_type == "all_gather"):
        scheme = "gather"
    elif scheme is None:
        is_by_heads = not by_rows and cp_comm_type is None and gains(q, k, v, group, options)
        scheme = "ulysses" if is_by_heads else "ring" if pays(q, k, options) else "gather"
    if scheme == "ulysses":
        numbers = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap)
        return ulysses_attention(q, k, v, group=group, layout=layout, deterministic=deterministic, **numbers)
    if torch.compiler.is_compiling() and not drops and not modifications and not _needs_program(options):
        out, lse = over_ranks(q, k, v, group, layout, scheme, stages, seqlen, options)
        return (out, lse) if return_lse else out
    dealing = of_rows(layout, world, rank, q.shape[1], seqlen)
    if scheme == "ring":
        out, lse = Ring.apply(q, k, v, PASSES, group, dealing, options)
        return (out, lse) if return_lse else out
    spans = spans_of(dealing, rank)
    parts = parts_of(spans, dealing.rows, options)
    mods = program_of("attention", q, dealing.rows, modifications)
    if _needs_program(options):
        mods = with_slopes(mods, options)
    if drops:
        mods = dropped(mods, q, dealing.rows, dropout_p, rng_state, group)
    if mods is None:
        out, lse = InParts.apply(q, k, v, sinks, PASSES, parts, group, dealing, stages, options)
    else:
        out, lse = with_programs(q, k, v, mods, parts, spans, group, dealing, options)
    return (out, lse) if return_lse else out


class _Exchange(torch.autograd.Function):
    """`exchange` of rows there or `back`, whose gradient is the exchange the other way."""

    @staticmethod
    def forward(ctx, x, exchange, group, back):
        ctx.given = (exchange, group, back)
        return exchange(x, group, back)

    @staticmethod
    @telling(lambda ctx: ctx.given[1])
    def backward(ctx, gradient):
        exchange, group, back = ctx.given
        return _Exchange.apply(gradient, exchange, group, not back), None, None, None


def _ordered(x, world, layout, back=False):
    """Rows in the order of ranks put in that of the sequence, or back."""
    if layout == "contiguous":
        return x
    order = [chunk for own in dealt(layout, world) for chunk in own]
    if not back:
        order = [order.index(chunk) for chunk in range(len(order))]
    chunks = x.chunk(len(order), 1)
    return torch.cat([chunks[chunk] for chunk in order], 1)


def exchanged(x, group, back=False):
    """Shards of rows, contiguous, as shards of heads, or back; with gradients."""
    if torch.compiler.is_compiling():
        return exchange(x, group, back)
    return _Exchange.apply(x, by_heads, group, back)


# Options that mean the same for some heads as for all.
_BY_HEADS = ("softmax_scale", "causal", "window_size", "softcap", "deterministic", "query_offset")


@together
def ulysses_attention(
    q,
    k,
    v,
    *,
    alibi_slopes=None,
    sinks=None,
    group=None,
    layout="contiguous",
    dropout_p=0.0,
    rng_state=None,
    **options,
):
    """Attention of whole sequences for some heads: exchanges turn shards of rows into shards of heads and
    back. The ranks divide the query heads, and the K/V heads or are a multiple of them. `alibi_slopes` and
    `sinks`: those of all heads, the same on every rank; the gradient of sinks is that of this rank's heads.
    `dropout_p` and `rng_state`: what is dropped is that of one GPU with the same state, which is the first
    rank's where it is not given. `options`: softmax_scale, causal, window_size, softcap, deterministic and
    query_offset of `flash_attn_func`, and score_mod, mask_mod, bias, mask, attention_chunk and
    block_sparse_tensors of all heads, the same on every rank. Returns out, in the shape of q."""
    check(0.0, q=(q, 4), k=(k, 4), v=(v, 4))
    if options.pop("return_lse", False):
        raise UnsupportedError("return_lse of ulysses_attention: the LSE is spread over heads, use attention")
    numbers = {name: options.pop(name) for name in _BY_HEADS if name in options}
    # First of all: an error of one rank alone would leave the others waiting.
    given = (sorted(numbers.items()), sorted(options), alibi_slopes is None, sinks is None)
    agree(group, q, k, v, layout, *given, dropout_p, shown_state(rng_state))
    world, rank = place(group)
    chunk_length(q.shape[1], len(dealt(layout, world)[0]), layout)
    heads_q, heads_kv = q.shape[2], k.shape[2]
    if heads_q % world or (heads_kv % world and world % heads_kv):
        raise UnsupportedError(
            f"{heads_q} query heads and {heads_kv} K/V heads over {world} ranks: ulysses needs ranks that "
            "divide them, use attention"
        )
    of_heads = Options(None, True, (-1, -1), 0.0, False, alibi_slopes, sinks)
    of_heads.check_shapes(q.shape[0], heads_q)
    own = slice(rank * heads_q // world, (rank + 1) * heads_q // world)
    mods = program_of("ulysses_attention", q, q.shape[1] * world, options)
    drop = None
    if dropout_p != 0.0 or rng_state is not None:
        drop = dropout_p, dropout_state(q, q.shape[0], heads_q, dropout_p, rng_state, group)
    is_plain = mods is None and drop is None and alibi_slopes is None and sinks is None
    if is_plain and not torch.compiler.is_compiling():
        copies = copies_for(group, q, k, v)
        if copies is not None:
            return ByHeads.apply(q, k, v, copies, group, layout, numbers)
    if heads_kv < world:
        k, v = (x.repeat_interleave(world // heads_kv, 2) for x in (k, v))
    q, k, v = (_ordered(exchanged(x, group), world, layout) for x in (q, k, v))
    if mods is None and drop is None:
        out = flash_attn_func(q, k, v, **numbers, **of_heads.of(own))
    else:
        if mods is not None:
            mods = of_part(mods, dict(h=own, hk=slice(rank * heads_kv // world, None)))
        out = by_sequence(q, k, v, numbers, of_heads.of(own), mods, drop, (own.start, heads_q))
    return exchanged(_ordered(out, world, layout, back=True), group, back=True)


_SCHEMES = ("gather", "ring", "ulysses")


def _beyond_ring(slopes, sinks, stages, drops, modifications):
    """What of a call a ring does not compute, by name."""
    given = dict(alibi_slopes=slopes is not None, sinks=sinks is not None)
    given.update(stages=stages != 1, dropout_p=drops)
    return [name for name, is_given in given.items() if is_given] + sorted(modifications)


def _needs_program(options):
    """Whether slopes are a program's: distances of a part are those of its own diagonal, which a causal mask
    alone keeps."""
    return options.slopes is not None and not options.causal


def _by_heads_first(q, k, v, kind, group, layout, options):
    """`attention` by the types of transfers that exchange heads."""
    if kind == "a2a":
        return ulysses_attention(q, k, v, group=group, layout=layout, **options)
    if kind != "a2a+p2p":
        raise InputError(
            f"cp_comm_type is {kind!r}: it must be one of p2p, all_gather, a2a and a2a+p2p, or None"
        )
    if not isinstance(group, (tuple, list)) or len(group) != 2:
        raise InputError(
            "cp_comm_type is 'a2a+p2p' and group no pair: give the group that exchanges heads and the one "
            "that gathers keys"
        )
    if layout != "zigzag" or options.pop("sinks") is not None:
        raise UnsupportedError(
            "a contiguous layout and sinks with cp_comm_type 'a2a+p2p': use 'a2a' or 'p2p'"
        )
    check(0.0, q=(q, 4), k=(k, 4), v=(v, 4))
    drop = options.pop("dropout_p"), options.pop("rng_state")
    scale, causal, window, cap, deterministic, slopes = (
        options.pop(name)
        for name in ("softmax_scale", "causal", "window_size", "softcap", "deterministic", "alibi_slopes")
    )
    if options:
        raise UnsupportedError(f"{', '.join(options)} with cp_comm_type 'a2a+p2p': use 'a2a' or 'p2p'")
    own = Options(scale, causal, window, cap, deterministic, slopes)
    for rows in (q.shape[1], k.shape[1], v.shape[1]):
        chunk_length(rows, 2, layout)
    return over_grid(q, k, v, group, "interleaved", own, drop)


def _ring(layout, name):
    def function(
        q,
        k,
        v,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        group=None,
    ):
        """ring-flash-attention's function: q, k and v (batch, rows, heads, head_dim) are this rank's rows,
        dealt {layout}. Keys are gathered where that is faster than to pass them around, as `attention`
        chooses: the results are those of one GPU, up to their last bits."""
        made = attention(
            q,
            k,
            v,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            deterministic=deterministic,
            alibi_slopes=alibi_slopes,
            group=group,
            layout=layout,
            return_lse=return_attn_probs,
        )
        return (*made, None) if return_attn_probs else made

    function.__name__ = function.__qualname__ = name
    function.__doc__ = function.__doc__.replace("{layout}", layout)
    return function


zigzag_ring_flash_attn_func = _ring("zigzag", "zigzag_ring_flash_attn_func")
ring_flash_attn_func = _ring("contiguous", "ring_flash_attn_func")
zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = stacked(
    zigzag_ring_flash_attn_func, 2
)
ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = stacked(ring_flash_attn_func, 2)


def _dealt_anew(x, group, back):
    """Rows of (batch, rows, ..) that are striped, rank r with r, r + world, .., dealt zigzag, or back."""
    world = dist.get_world_size(group)
    batch, rows, *rest = x.shape
    piece = rows // (2 * world)
    if back:
        # Of each of this rank's chunks every world-th row belongs to one rank.
        sends = x.reshape(batch, 2, piece, world, *rest).movedim(3, 0).contiguous()
    else:
        # Of every chunk this rank has some rows.
        chunks = x.reshape(batch, 2 * world, piece, *rest)
        sends = torch.stack([chunks[:, own] for own in dealt("zigzag", world)])
    parts = torch.empty_like(sends)
    transferred("all_to_all_single", parts, sends, group=group)
    if not back:
        return parts.movedim(0, 3).reshape(x.shape)
    return _ordered(parts.transpose(0, 1).reshape(x.shape), world, "zigzag")


@together
def stripe_flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    group=None,
):
    """ring-flash-attention's function: q, k and v (batch, rows, heads, head_dim) are this rank's rows, dealt
    in stripes: rank r has rows r, r + world, .. of the sequence. An exchange deals them zigzag, and another
    one gives the results back: `zigzag_ring_flash_attn_func` needs neither."""
    if not causal:
        raise UnsupportedError(
            "stripe_flash_attn_func without causal: stripes balance a causal mask, use ring_flash_attn_func"
        )
    check(0.0, q=(q, 4), k=(k, 4), v=(v, 4))
    agree(group, q, k, v, "stripes")
    world, _ = place(group)
    # Rows behind those of all ranks are the last of the sequence, which no other row sees.
    rows, short = q.shape[1], -q.shape[1] % (2 * world)
    if short:
        q, k, v = (functional.pad(x, (0, 0, 0, 0, 0, short)) for x in (q, k, v))
    q, k, v = (_Exchange.apply(x, _dealt_anew, group, False) for x in (q, k, v))
    options = (dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic)
    out, lse, _ = zigzag_ring_flash_attn_func(q, k, v, *options, return_attn_probs=True, group=group)
    out = _Exchange.apply(out, _dealt_anew, group, True)[:, :rows]
    if not return_attn_probs:
        return out
    return out, _dealt_anew(lse.transpose(1, 2), group, True)[:, :rows].transpose(1, 2).contiguous(), None


stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = stacked(stripe_flash_attn_func, 2)


class UlyssesAttention(torch.nn.Module):
    """yunchang's module (DeepSpeed's DistributedAttention): q, k and v (batch, rows, heads, head_dim) are
    this rank's rows, dealt contiguously."""

    def __init__(
        self, sequence_process_group=None, scatter_idx=2, gather_idx=1, use_sync=False, attn_type=None
    ):
        super().__init__()
        if (scatter_idx, gather_idx) != (2, 1):
            raise UnsupportedError(
                f"scatter_idx {scatter_idx} and gather_idx {gather_idx}: heads are axis 2 and rows axis 1"
            )
        if use_sync:
            raise UnsupportedError("use_sync: transfers are ordered by streams, leave it out")
        check_kind(attn_type)
        self.group = sequence_process_group

    def forward(
        self,
        query,
        key,
        value,
        *others,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    ):
        if others or return_attn_probs:
            raise UnsupportedError("return_attn_probs and further arguments: leave them out")
        return ulysses_attention(
            query,
            key,
            value,
            group=self.group,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            dropout_p=dropout_p,
        )


def _balances_load():
    """Whether torch's own context_parallel balances load, where a program has imported it."""
    module = sys.modules.get("torch.distributed.tensor.experimental._attention")
    return getattr(getattr(module, "_cp_options", None), "enable_load_balance", True)


_ROTATIONS = ("allgather", "alltoall")


def set_rotate_method(rotate_method):
    """As torch's function, whose two methods give the same results: by `alltoall` torch passes keys around to
    save memory. Here `attention` chooses in either case."""
    if rotate_method not in _ROTATIONS:
        raise InputError(f"rotate_method is {rotate_method!r}: it must be one of {', '.join(_ROTATIONS)}")


def context_parallel_unshard(mesh, buffers, seq_dims, load_balancer=None):
    """As torch's function: the whole of tensors that `context_parallel` has dealt, each along its axis of
    `seq_dims`. Without gradients."""
    if load_balancer is not None:
        raise UnsupportedError("load_balancer: rows are dealt zigzag or contiguous, leave it out")
    layout, group = "zigzag" if _balances_load() else "contiguous", _group_of(mesh)
    return [unshard(x, dim, group, layout) for x, dim in zip(buffers, seq_dims)]


def _group_of(mesh):
    if getattr(mesh, "ndim", 1) != 1:
        raise InputError(
            f"mesh has {mesh.ndim} axes: give the one along which sequences are split, as mesh['cp']"
        )
    return mesh.get_group() if hasattr(mesh, "get_group") else mesh


@contextlib.contextmanager
def _over_ranks(group, layout):
    """Torch's scaled_dot_product_attention and `fa_attn.flex.flex_attention` see the keys of all ranks."""
    plain = functional.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if attn_mask is not None:
            raise UnsupportedError("attn_mask under context_parallel: use is_causal, or no mask")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise InputError(
                f"query has {query.shape[1]} heads and key {key.shape[1]}: give enable_gqa=True to share them"
            )
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options = dict(softmax_scale=scale, causal=is_causal, dropout_p=dropout_p)
        return attention(q, k, v, group=group, layout=layout, **options).transpose(1, 2)

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    flex.over_ranks.append(flex_over_ranks(attention, group, layout))
    try:
        yield
    finally:
        flex.over_ranks.pop()
        functional.scaled_dot_product_attention = plain


def ContextParallel(seq_dim, attention_type, layout=None):
    """As the plan `_ContextParallel` of `torch.distributed.tensor.experimental._attention`, for
    `parallelize_module`: in the module's forward, whose tensors are this rank's rows, torch's
    scaled_dot_product_attention, or of attention_type FLEX `fa_attn.flex.flex_attention`, sees the keys of
    all ranks. Masks of the latter are those of the whole, or what torch's `_context_parallel_shard` makes of
    them, and score_mod sees the numbers of the whole. `layout`: how rows are dealt; without it as torch's own
    `_cp_options.enable_load_balance` says."""
    from torch.distributed.tensor.parallel import ParallelStyle

    kind = getattr(attention_type, "value", attention_type)
    if kind not in ("flex_attention", "scaled_dot_product_attention"):
        raise InputError(
            f"attention_type is {attention_type!r}: it must be AttentionType.SDPA or AttentionType.FLEX"
        )
    if seq_dim not in (2, -2):
        raise UnsupportedError(f"seq_dim is {seq_dim!r}: rows are axis 2 of (batch, heads, rows, head_dim)")
    layout = layout or ("zigzag" if _balances_load() else "contiguous")
    dealt(layout, 1)

    class Plan(ParallelStyle):
        def _apply(self, module, device_mesh):
            forward, group = module.forward, _group_of(device_mesh)

            def over_ranks(*args, **options):
                with _over_ranks(group, layout):
                    return forward(*args, **options)

            module.forward = over_ranks
            return module

    return Plan()


@contextlib.contextmanager
def context_parallel(
    mesh, *, buffers=None, buffer_seq_dims=None, no_restore_buffers=None, layout=None, load_balance=None
):
    """As `torch.distributed.tensor.experimental.context_parallel`: within it each of `buffers` holds this
    rank's rows along its axis of `buffer_seq_dims`, and `scaled_dot_product_attention` sees the keys of all
    ranks. `mesh`: a device mesh of one axis, or a process group. `load_balance`: whether rows are dealt
    zigzag, or else contiguous, as `layout` says by name; without either, what torch's own
    `_cp_options.enable_load_balance` is, True unless a program has set it."""
    if not isinstance(load_balance, (bool, type(None))):
        raise InputError(f"load_balance is {load_balance!r}: it must be True, False or None")
    if layout is not None and load_balance is not None:
        raise InputError(f"layout is {layout!r} and load_balance {load_balance}: give one of them")
    if layout is None:
        is_balanced = _balances_load() if load_balance is None else load_balance
        layout = "zigzag" if is_balanced else "contiguous"
    group = _group_of(mesh)
    buffers, dims = list(buffers or []), list(buffer_seq_dims or [])
    if len(buffers) != len(dims):
        raise InputError(
            f"buffers has {len(buffers)} entries and buffer_seq_dims {len(dims)}: give one axis each"
        )
    kept = no_restore_buffers or set()
    whole = [None if any(x is other for other in kept) else x.detach().clone() for x in buffers]
    count = len(dealt(layout, place(group)[0])[0]) * place(group)[0]
    for x, dim in zip(buffers, dims):
        if -x.dim() <= dim < x.dim() and x.shape[dim] % count:
            raise InputError(
                f"axis {dim} has {x.shape[dim]} rows, which {count} chunks do not divide: pad it, or use "
                "another number of ranks"
            )
    with torch.no_grad():
        # All of them or none.
        owns = [shard(x, dim, group, layout).clone() for x, dim in zip(buffers, dims)]
        for x, own in zip(buffers, owns):
            x.resize_(own.shape).copy_(own)
    try:
        with _over_ranks(group, layout):
            yield
    finally:
        with torch.no_grad():
            for x, before in zip(buffers, whole):
                if before is not None:
                    x.resize_(before.shape).copy_(before)
