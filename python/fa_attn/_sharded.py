"""Rows of sequences that the ranks of a process group share: who holds which, and how they are gathered."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
import threading
import weakref
from collections import OrderedDict

import torch
import torch.distributed as dist

from . import _core
from ._checks import window
from ._core import InputError, UnsupportedError
from ._options import call_options

LAYOUTS = ("zigzag", "contiguous")


def place(group):
    """Ranks of the group, and this one."""
    is_group = group is None or group is dist.GroupMember.NON_GROUP_MEMBER
    if not is_group and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group is of the type {type(group).__name__}: it must be a process group of torch.distributed "
            "(dist.new_group, DeviceMesh.get_group), or None for all ranks"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError("this process is no rank of group: only those of the group make the call")
    return dist.get_world_size(group), rank


def dealt(layout, world):
    """The chunks of each rank, in the order in which it stores them: those of the crate fa-dist."""
    if not isinstance(layout, str):
        raise InputError(f"layout is {layout!r}: it must be a name, zigzag or contiguous")
    return _core.chunks(layout, world)


# Called by torch.compile where it traces, not traced.
dealt._dynamo_marked_constant = True


def chunk_length(rows, per_rank, layout):
    if rows % per_rank:
        raise InputError(
            f"a rank has {rows} rows, which {per_rank} chunks of equal length do not have: pad the sequence "
            f"to a multiple of {per_rank} times the ranks ({layout} shards)"
        )
    return rows // per_rank


def bounds(layout, world, rows):
    """Where the chunks of a sequence begin, and its end."""
    return tuple(_core.bounds(layout, world, rows))


bounds._dynamo_marked_constant = True


class Dealing:
    """A sequence of some rows in chunks, and which rank has which: of equal length where the ranks divide the
    rows, else some are a row longer, or empty."""

    def __init__(self, layout, world, rows):
        self.rows, self.owned = rows, dealt(layout, world)
        self.bounds = bounds(layout, world, rows)
        self.most = max(self.count(rank) for rank in range(world))

    def count(self, rank):
        """The rows of a rank."""
        return sum(end - first for first, end in self.spans(rank))

    def spans(self, rank):
        """The first row of each chunk of a rank, and its end."""
        return [(self.bounds[chunk], self.bounds[chunk + 1]) for chunk in self.owned[rank]]

    def in_order(self, parts, dim):
        """The chunks of all ranks' rows, which may be followed by others, in the order of the sequence."""
        chunks = {}
        for rank, part in enumerate(parts):
            lengths = [end - first for first, end in self.spans(rank)]
            chunks.update(zip(self.owned[rank], part.narrow(dim, 0, sum(lengths)).split(lengths, dim)))
        return [chunks[chunk] for chunk in sorted(chunks)]

    def of_rank(self, tensor, rank, dim):
        """A rank's rows of the whole."""
        own = [tensor.narrow(dim, first, end - first) for first, end in self.spans(rank)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def padded(self, tensor, dim):
        """A rank's rows, with others behind them so that all ranks have as many."""
        short = self.most - tensor.shape[dim]
        if not short:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = short
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def shard(tensor, dim=1, group=None, layout="zigzag"):
    """This rank's rows of a whole tensor. Where the ranks do not divide them some have a row more:
    `attention` is then told by `seqlen`."""
    world, rank = place(group)
    dealt(layout, world)
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(f"axis {dim} of a tensor of {tensor.dim()} axes")
    return Dealing(layout, world, tensor.shape[dim]).of_rank(tensor, rank, dim)


def unshard(tensor, dim=1, group=None, layout="zigzag", seqlen=None):
    """The whole tensor, from each rank's rows. Without gradients. `seqlen`: the rows of the whole, where the
    ranks do not divide them."""
    world, rank = place(group)
    dealing = of_rows(layout, world, rank, tensor.shape[dim], seqlen)
    parts = of_all(dealing.padded(tensor.detach(), dim), group, world)
    return torch.cat(dealing.in_order(parts, dim), dim)


def of_rows(layout, world, rank, rows, seqlen):
    """How a sequence is dealt of which this rank has `rows` rows."""
    if seqlen is None:
        chunk_length(rows, len(dealt(layout, world)[rank]), layout)
        return Dealing(layout, world, rows * world)
    if not isinstance(seqlen, int) or seqlen < 0:
        raise InputError(f"seqlen is {seqlen!r}: it must be the number of rows of the whole sequence")
    dealing = Dealing(layout, world, seqlen)
    if dealing.count(rank) != rows:
        raise InputError(
            f"seqlen is {seqlen}, of which rank {rank} of {world} has {dealing.count(rank)} rows ({layout} "
            f"shards), and {rows} are given: deal them by fa_attn.distributed.shard"
        )
    return dealing


def of_all(tensor, group, world):
    """The tensors of all ranks, which have one shape."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def results_of_all(out, lse, group, world):
    """O and LSE of all ranks, of one shape and type on each, by one transfer: of both a sequence."""
    own, ends = [], []
    for x in (out, lse):
        own.append(x.contiguous().view(-1).view(torch.uint8))
        ends.append(sum(map(len, own)))
        # Kernels read whole vectors.
        if ends[-1] % 16:
            own.append(own[0].new_empty(-ends[-1] % 16))
    own = torch.cat(own)
    parts = own.new_empty(world, len(own))
    dist.all_gather_into_tensor(parts.view(-1), own, group=group)
    of_out, of_lse = parts[:, : ends[0]], parts[:, ends[0] + -ends[0] % 16 : ends[1]]
    outs = of_out.view(out.dtype).view(world, *out.shape).unbind()
    return outs, of_lse.view(lse.dtype).view(world, *lse.shape).unbind()


def positions(rows, group=None, layout="zigzag", device=None, seqlen=None):
    """The positions in the whole sequence of this rank's `rows` rows: what rotary embedding takes. `seqlen`:
    the rows of the whole, where the ranks do not divide them."""
    world, rank = place(group)
    dealing = of_rows(layout, world, rank, rows, seqlen)
    return torch.cat([torch.arange(first, end, device=device) for first, end in dealing.spans(rank)])


class Options:
    """What all parts of a call have in common."""

    def __init__(self, scale, causal, window_size, softcap, deterministic, alibi_slopes=None, sinks=None):
        self.left, right = window(window_size)
        self.right = 0 if causal else right
        self.causal = self.right == 0
        self.slopes, self.sinks = alibi_slopes, sinks
        self.common = dict(softmax_scale=scale, softcap=softcap)
        self.backward = dict(self.common, deterministic=deterministic)

    def __repr__(self):
        given = self.backward, self.left, self.right
        return repr((*given, self.slopes is not None, self.sinks is not None))

    def seen(self, first, end, total):
        """The keys that rows `first` to `end` see, and the mask between them, whose diagonal ends in the last
        row and key."""
        stop = total if self.right < 0 else min(total, end + self.right)
        start = max(0, first - self.left) if self.left >= 0 else 0
        beyond = stop - end
        sides = (self.left + beyond if self.left >= 0 else -1, max(self.right - beyond, -1))
        return slice(start, stop), dict(causal=self.causal, window_size=sides)

    def check_shapes(self, batch, heads):
        """Whether slopes and sinks are those of all heads, before parts are taken of them."""
        one = ((heads,),)
        of_slopes = one if batch is None else ((heads,), (batch, heads))
        for name, x, shapes in (("alibi_slopes", self.slopes, of_slopes), ("sinks", self.sinks, one)):
            if x is not None and (not isinstance(x, torch.Tensor) or tuple(x.shape) not in shapes):
                got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise InputError(
                    f"{name} is {got}: it must be a torch tensor of all heads on every rank, of the shape "
                    f"{' or '.join(map(str, shapes))}"
                )

    def numbers(self, mask):
        """Those of a part, checked."""
        scale, softcap = self.common["softmax_scale"], self.common["softcap"]
        deterministic = self.backward["deterministic"]
        return call_options(scale, mask["causal"], mask["window_size"], softcap, deterministic, None)

    def of(self, heads):
        """What belongs to some of the query heads."""
        named = dict(alibi_slopes=self.slopes, sinks=self.sinks)
        return {name: x[..., heads].contiguous() for name, x in named.items() if x is not None}


class Gathered:
    """K and V (.., rows, heads, head_dim) of all ranks, some heads at a time: the next while those before are
    used."""

    def __init__(self, k, v, group, dealing, stages):
        self.k, self.v, self.group, self.dealing = k, v, group, dealing
        self.world, heads = dist.get_world_size(group), k.shape[-2]
        if k.dtype != v.dtype:
            # One transfer would make one type of both.
            raise InputError(f"k is {k.dtype} and v {v.dtype}: both need q's type")
        if not isinstance(stages, int) or stages < 1 or heads % stages:
            raise InputError(f"stages is {stages}: it must divide the {heads} K/V heads")
        size = heads // stages
        self.stages = [slice(stage * size, (stage + 1) * size) for stage in range(stages)]

    def __iter__(self):
        pending = self._start(self.stages[0])
        for heads, following in itertools.zip_longest(self.stages, self.stages[1:]):
            work, parts = pending
            if following is not None:
                pending = self._start(following)
            work.wait()
            yield heads, *self._whole(parts, heads.stop - heads.start)

    def _start(self, heads):
        """Begins to gather K and V in one transfer: each has a latency of its own."""
        own = [self.dealing.padded(x[..., heads, :], -3).reshape(-1) for x in (self.k, self.v)]
        own = torch.cat(own)
        parts = own.new_empty(self.world * len(own))
        return dist.all_gather_into_tensor(parts, own, group=self.group, async_op=True), parts

    def _whole(self, parts, heads):
        """K and V of all ranks, in the order of the sequence."""
        parts, end = parts.view(self.world, -1), 0
        for own in (self.k, self.v):
            shape = (*own.shape[:-3], self.dealing.most, heads, own.shape[-1])
            first, end = end, end + math.prod(shape)
            chunks = self.dealing.in_order([x.view(shape) for x in parts[:, first:end]], -3)
            yield torch.cat(chunks, -3)


def summed(total, group, dealing):
    """This rank's rows of the sum over ranks, in the order of the ranks, by float32."""
    world, rank = place(group)
    sends = [dealing.padded(dealing.of_rank(total, other, -3), -3) for other in range(world)]
    sends = torch.stack(sends)
    parts = torch.empty_like(sends)
    dist.all_to_all_single(parts, sends, group=group)
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result.narrow(-3, 0, dealing.count(rank))


class InParts(torch.autograd.Function):
    """Parts of this rank's rows, each over some of the rows of all ranks. Gathers again in the backward:
    nothing of other ranks is kept. `passes`: the functions of the forward and the backward; `parts`: for each
    its rows, the rows that they see, the lengths that the functions take, and the mask."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, passes, parts, group, dealing, stages, options):
        ratio = q.shape[-2] // k.shape[-2]
        *batch, rows_q, heads_q, _ = q.shape
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(*batch, heads_q, rows_q, dtype=torch.float32, device=q.device)
        for heads, keys, values in Gathered(k, v, group, dealing, stages):
            of = slice(heads.start * ratio, heads.stop * ratio)
            for rows, seen, lengths, mask in parts:
                part, part_lse, _ = passes[0](
                    q[..., rows, of, :],
                    keys[..., seen, :, :],
                    values[..., seen, :, :],
                    *lengths,
                    return_attn_probs=True,
                    **options.common,
                    **options.of(of),
                    **mask,
                )
                out[..., rows, of, :], lse[..., of, rows] = part, part_lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = (passes, parts, group, dealing, stages, options)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        passes, parts, group, dealing, stages, options = ctx.given
        ratio = q.shape[-2] // k.shape[-2]
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dsinks = None if options.sinks is None else torch.zeros_like(options.sinks)
        for heads, keys, values in Gathered(k, v, group, dealing, stages):
            of = slice(heads.start * ratio, heads.stop * ratio)
            sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values)]
            for rows, seen, lengths, mask in parts:
                made = passes[1](
                    dout[..., rows, of, :],
                    q[..., rows, of, :],
                    keys[..., seen, :, :],
                    values[..., seen, :, :],
                    out[..., rows, of, :],
                    lse[..., of, rows].contiguous(),
                    *lengths,
                    dlse=None if dlse is None else dlse[..., of, rows].contiguous(),
                    **options.backward,
                    **options.of(of),
                    **mask,
                )
                dq[..., rows, of, :] = made[0]
                for total, part in zip(sums, made[1:]):
                    total[..., seen, :, :] += part
                if dsinks is not None:
                    dsinks[of] += made[3]
            for to, total in zip((dk, dv), sums):
                to[..., heads, :] = summed(total, group, dealing)
        return dq, dk, dv, dsinks, None, None, None, None, None, None


def stacked(function, axis):
    """The forms of a function that take K and V, or Q, K and V, stacked along an axis."""

    def kvpacked(q, kv, *args, **options):
        return function(q, *kv.unbind(axis), *args, **options)

    def qkvpacked(qkv, *args, **options):
        return function(*qkv.unbind(axis), *args, **options)

    for form in (kvpacked, qkvpacked):
        form.__name__ = form.__qualname__ = f"{function.__name__.removesuffix('func')}{form.__name__}_func"
        form.__doc__ = f"`{function.__name__}` of tensors that are stacked along axis {axis}."
    return kvpacked, qkvpacked


def check(dropout_p, **axes):
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"dropout_p is {dropout_p}: over several ranks it is computed by attention and "
            "ulysses_attention, use these or leave it out"
        )
    for name, (x, count) in axes.items():
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name} is of the type {type(x).__name__}: it must be a torch tensor")
        if x.dim() != count:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must have {count} axes")
    devices = {name: x.device for name, (x, _) in axes.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise InputError(f"{where}: all have to be on one device, that of the group's transfers")
    if axes:
        heads_q, heads_k, heads_v = (x.shape[-2] for x, _ in axes.values())
        if not heads_k or heads_q % heads_k or heads_v != heads_k:
            raise InputError(
                f"q has {heads_q} heads, k {heads_k} and v {heads_v}: k and v need as many, a divisor of q's"
            )


# The calls that the ranks of a group have agreed on lately, on GPUs: there a comparison waits for the other
# hosts, and is made once. All ranks make the same calls, so that they forget the same ones: none compares
# alone.
_agreed = weakref.WeakKeyDictionary()

# Calls of a group that are remembered: lengths of packed batches may differ at each step.
_MOST_CALLS = 256

# Bytes of a call's text that an error shows, and of the digest of all of it, which is zeros of a rank that
# has failed before its call.
_TEXT, _DIGEST = 480, 32
_FAILED = bytes(_DIGEST)

# How many texts the ranks of a group have exchanged through the store, and this rank's that are there.
_exchanged = weakref.WeakKeyDictionary()

# Whether the call that this thread is in has come to its comparison.
_call = threading.local()


def _is_slow(device):
    """Whether reading what another rank says waits for a GPU."""
    return device.type == "cuda"


def _texts(group, own, device, waits=True):
    """The texts of all ranks, of as many bytes on each. On GPUs they go through the store of the process
    group, by the host alone, and a rank that does not wait leaves its own there."""
    world, rank = place(group)
    if not _is_slow(device):
        own = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return [bytes(theirs.tolist()) for theirs in of_all(own.to(device), group, world)]
    group = dist.group.WORLD if group is None else group
    store = dist.distributed_c10d._get_default_store()
    numbers, keys = _exchanged.setdefault(group, (itertools.count(), []))
    stem = f"fa_attn/{group.group_name}/{next(numbers)}"
    store.set(f"{stem}/{rank}", own)
    if not waits:
        keys.append(f"{stem}/{rank}")
        return []
    texts = [store.get(f"{stem}/{other}") for other in range(world)]
    # All ranks are here, so that nobody reads earlier texts.
    for key in keys:
        store.delete_key(key)
    keys[:] = [f"{stem}/{rank}"]
    return texts


def agree(group, *given):
    """Refuses a call that ranks make with different shapes or options, or that one has failed to make:
    transfers of other sizes end in an error of the process group, or never."""
    if torch.compiler.is_compiling():
        return
    _call.has_agreed = True
    world, rank = place(group)
    shown = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else str(x) for x in given]
    text, device = ", ".join(shown), given[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    digest, is_slow = hashlib.sha256(text.encode()).digest(), _is_slow(device)
    known = _agreed.setdefault(dist.group.WORLD if group is None else group, OrderedDict())
    if is_slow and digest in known:
        known.move_to_end(digest)
        return
    for other, theirs in enumerate(_texts(group, _text_of(text, digest), device)):
        shown = theirs[:_TEXT].rstrip(b"\0").decode(errors="ignore")
        if theirs[_TEXT:] == _FAILED:
            raise InputError(f"rank {other} of the group fails before the call of this rank, {rank}: {shown}")
        if theirs[_TEXT:] != digest:
            raise InputError(
                f"rank {other} of the group calls with {shown}, and this rank, {rank}, with {text}: all "
                "ranks have tensors of one shape and the same options (pad what the ranks do not divide)"
            )
    if is_slow:
        known[digest] = None
        if len(known) > _MOST_CALLS:
            known.popitem(last=False)


def _text_of(text, digest):
    return text.encode()[:_TEXT].ljust(_TEXT, b"\0") + digest


def together(function):
    """A function that all ranks of a group call: what one of them raises before it has compared its call with
    the others' is an error of all of them, which would else wait for it. On GPUs of those whose call is new
    to them."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **options):
        if torch.compiler.is_compiling() or getattr(_call, "is_open", False):
            return function(*args, **options)
        _call.is_open, _call.has_agreed = True, False
        try:
            return function(*args, **options)
        except Exception as error:
            if not _call.has_agreed:
                _tell(signature, args, options, error)
            raise
        finally:
            _call.is_open = False

    return call


def _tell(signature, args, options, error):
    try:
        group = signature.bind_partial(*args, **options).arguments.get("group")
        place(group)
        is_nccl = "nccl" in str(dist.get_backend(group))
    except Exception:
        # Whatever is wrong with the arguments or the group, no other rank waits here.
        return
    text = f"{type(error).__name__}: {error}"
    _texts(group, _text_of(text, _FAILED), torch.device("cuda" if is_nccl else "cpu"), waits=False)
