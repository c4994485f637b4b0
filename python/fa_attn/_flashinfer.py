"""What `fa_attn.flashinfer` makes of FlashInfer's arguments: layouts, pages, scores, masks and results."""

from __future__ import annotations

import math
import weakref
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch

from ._checks import array, check_ascending, count, flag, number
from ._core import InputError, InputTypeError, UnsupportedError
from ._programs import Program
from ._torch_memory import is_lasting

LOG2_E = math.log2(math.e)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
# The most entries of captured graphs' page tables, unless the buffer of pages has more.
_TABLE_ROOM = 1 << 22


class Scores(NamedTuple):
    """What scores are made of, as plans and the older calls say it."""

    causal: bool = False
    window_left: int = -1
    soft_cap: float = 0.0
    scale: Optional[float] = None
    encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4


def scores_of(causal, window_left, soft_cap, scale, encoding, rope_scale, rope_theta):
    """The arguments, checked."""
    if encoding not in ("NONE", "ROPE_LLAMA", "ALIBI"):
        raise InputError(f"pos_encoding_mode is {encoding!r}: it must be 'NONE', 'ROPE_LLAMA' or 'ALIBI'")
    cap = number("logits_soft_cap", soft_cap) or 0.0
    if cap < 0.0:
        raise InputError(f"logits_soft_cap is {cap}: it must be above 0, or 0 for none")
    if encoding == "ALIBI" and cap:
        raise UnsupportedError("logits_soft_cap with pos_encoding_mode='ALIBI': leave one of them out")
    rope = (number("rope_scale", rope_scale), number("rope_theta", rope_theta))
    rope = [value if value is not None else other for value, other in zip(rope, (1.0, 1e4))]
    for name, value in zip(("rope_scale", "rope_theta"), rope):
        if not 0.0 < value < math.inf:
            raise InputError(f"{name} is {value}: it must be finite and above 0")
    left = left_of(window_left)
    return Scores(flag("causal", causal), left, cap, number("sm_scale", scale), encoding, *rope)


def left_of(window_left):
    """Keys to the left of a row's own that it sees, -1 for all."""
    return -1 if window_left is None else max(-1, count("window_left", window_left, -(1 << 40)))


def refuse(**options):
    """Refuses what only FlashInfer's own kernels take."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"fa_attn.flashinfer: {name} is not supported, leave it out")


def check_layout(layout):
    if layout not in ("NHD", "HND"):
        raise InputError(f"kv_layout is {layout!r}: it must be 'NHD' or 'HND'")
    return layout


def by_rows(tensor, layout):
    """Keys or values as (.., rows, heads, head_dim), where they lie."""
    return tensor if layout == "NHD" else tensor.transpose(-3, -2)


def caches_of(cache, layout):
    """(k, v) of a paged cache, (pages, page, heads, head_dim) each, where they lie. Pages of one row may have
    no axis of their own."""
    if isinstance(cache, torch.Tensor):
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            shape = tuple(cache.shape)
            raise InputError(
                f"paged_kv_cache has the shape {shape}: one tensor must be (pages, 2, page, heads, "
                "head_dim), with kv_layout='HND' (pages, 2, heads, page, head_dim)"
            )
        cache = cache.unbind(1)
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        raise InputTypeError(
            f"paged_kv_cache is {type(cache).__name__}: it must be a tensor or (k_cache, v_cache)"
        )
    for name, x in zip(("k_cache", "v_cache"), cache):
        if not isinstance(x, torch.Tensor) or x.dim() not in (3, 4):
            raise InputError(f"{name} of paged_kv_cache must be a tensor of (pages, page, heads, head_dim)")
        if x.dtype is torch.uint8:
            need = "caches are of 16 bits, float8_e4m3fn or float8_e5m2"
            raise UnsupportedError(f"{name} of uint8 (NVFP4): {need}")
    return tuple(by_rows(x, layout) if x.dim() == 4 else x.unsqueeze(1) for x in cache)


def with_page(cache):
    """The cache, or of one without pages one that has a page."""
    return cache if cache.shape[0] else cache.new_zeros((1, *cache.shape[1:]))


def dtype_of(dtype, otherwise=None):
    """A torch type that is given by its name or itself."""
    if dtype is None:
        return otherwise
    made = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(made, torch.dtype):
        raise InputError(f"{dtype!r} is no type of torch")
    return made


def check_buffer(name, buffer, device):
    """Checks a buffer that captured calls read."""
    if buffer.dtype is not torch.int32 or buffer.device != device or not buffer.is_contiguous():
        raise InputError(
            f"the buffer of {name} is {buffer.dtype} on {buffer.device}: it must be contiguous int32 on "
            f"{device}"
        )


def int32_of(x):
    """int32 on the tensor's device; of uint32, which torch converts on few devices, the same bits."""
    if x.dtype is torch.uint32:
        return x.view(torch.int32)
    if x.dtype is torch.int64 and x.device.type == "cpu":
        # What 32 bits do not hold stays what no cache has.
        x = x.clamp(-(2**31), 2**31 - 1)
    return x.to(torch.int32)


def on_host(name, tensor):
    """Integers on the host."""
    kind = getattr(tensor, "dtype", type(tensor).__name__)
    if not isinstance(tensor, torch.Tensor) or kind.is_floating_point or kind.is_complex:
        raise InputTypeError(f"{name} is {kind}: it must be a tensor of integers")
    return tensor.detach().to("cpu", torch.int64)


def pages_of(name, indices):
    """The list of pages, checked to be one."""
    if not isinstance(indices, torch.Tensor) or indices.dim() != 1 or indices.dtype.is_floating_point:
        raise InputTypeError(f"{name} must be a tensor of integers, (pages,)")
    return indices


def copy_of(x):
    """What a later plan reads of the caller's tensor, which may change until then."""
    return x.clone() if isinstance(x, torch.Tensor) else x


def lengths_of(name, lengths, batch):
    """Lengths on the host, checked to be one of each request."""
    host = on_host(name, lengths)
    if tuple(host.shape) != (batch,):
        have = tuple(host.shape)
        raise InputError(f"{name} has the shape {have}: it must be ({batch},), one of each request")
    return host


def starts_of(name, indptr, end=None):
    """Starts on the host, checked."""
    if not isinstance(indptr, torch.Tensor) or indptr.dim() != 1 or indptr.shape[0] < 1:
        raise InputError(f"{name} must be a tensor of (batch + 1,)")
    host = on_host(name, indptr)
    check_ascending(name, host.numpy(), int(host[-1]) if end is None else end)
    return host


# The memory of page tables by the buffers of pages and of their starts. Wrappers for several batches that
# share both take turns, as only one of their plans can be in the buffers.
_TABLES: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def _table_memory(indptr, indices, batch):
    most = indices.shape[0]
    room = max(1, most, min(batch * most, _TABLE_ROOM))
    key = (indptr.data_ptr(), indices.data_ptr(), indices.device)
    made = _TABLES.get(key)
    if made is None or made.shape[0] < room:
        made = _TABLES[key] = torch.zeros(room, dtype=torch.int32, device=indices.device)
    return made


class Pages:
    """The page table and the lengths of a batch, which a plan sets. `buffers`: those of a wrapper whose calls
    are captured (indptr, indices and lengths or lengths of last pages), which get what plans are given."""

    def __init__(self, device, buffers=None):
        self.device, self.buffers = device, buffers
        self.table = self.lengths = None
        self.longest = self.total = 0
        if buffers is None:
            return
        names = ("indptr", "indices", "lengths")
        for name, buffer in zip(names, buffers):
            if not isinstance(buffer, torch.Tensor):
                raise InputError(f"use_cuda_graph without a buffer of {name}: give a tensor for each")
            check_buffer(name, buffer, device)
        indptr, indices, lengths = buffers
        batch = lengths.shape[0]
        if indptr.shape[0] != batch + 1:
            raise InputError(f"the buffer of indptr has {indptr.shape[0]} elements: it must have {batch + 1}")
        self._memory = _table_memory(indptr, indices, batch)
        columns = max(1, min(indices.shape[0], self._memory.shape[0] // max(batch, 1)))
        self.table = self._memory[: batch * columns].view(batch, columns)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def plan(self, indptr, indices, lengths, page_size, given):
        """Of starts and lengths on the host, pages anywhere; `given`: what the buffers get."""
        counts = indptr.diff()
        self.page_size = page_size
        batch, most = counts.shape[0], int(counts.max()) if counts.numel() else 0
        if (lengths < 0).any():
            raise InputError(f"a sequence has {int(lengths.min())} keys: at least 0")
        if (lengths > counts * page_size).any():
            raise InputError(
                f"a sequence has {int(lengths.max())} keys: its pages of {page_size} do not hold as many"
            )
        columns = max(most, 1) if self.buffers is None else self.table.shape[1]
        if self.buffers is not None:
            if batch != self.table.shape[0]:
                raise InputError(
                    f"the batch is {batch}: that of the wrapper's buffers is {self.table.shape[0]}"
                )
            if indices.shape[0] > self.buffers[1].shape[0] or most > columns:
                raise InputError(
                    f"there are {indices.shape[0]} pages, {most} of one sequence: the wrapper's buffers hold "
                    f"{self.buffers[1].shape[0]}, {columns} of one sequence"
                )
            for buffer, value in zip(self.buffers, given):
                # Servers write to the buffers before they plan.
                if value.data_ptr() != buffer.data_ptr() or value.dtype != buffer.dtype:
                    buffer[: value.shape[0]].copy_(value)
        # Entries behind a sequence's pages name any page; none is read.
        indices = int32_of(indices).to(self.device)
        at = indptr[:-1, None].to(self.device) + torch.arange(max(most, 1), device=self.device)
        made = at.new_zeros(at.shape, dtype=torch.int32)
        if indices.shape[0]:
            made = indices[at.clamp_(max=indices.shape[0] - 1)]
        self.longest, self.total = int(lengths.max()) if batch else 0, int(lengths.sum())
        lengths = lengths.to(self.device, torch.int32)
        if self.buffers is None:
            self.table, self.lengths = made, lengths
        else:
            self.table[:, : made.shape[1]].copy_(made)
            self.lengths.copy_(lengths)

    def packed(self, k, v, dtype):
        """(k, v, starts) with the rows of sequences one after another, as numbers of `dtype`."""
        sequence, place, starts = places_of(self.lengths, self.total)
        page = k.shape[1]
        at = (self.table[sequence, place // page].long(), place % page)
        return k[at].to(dtype), v[at].to(dtype), starts.int()


def places_of(lengths, total):
    """(sequence, place within it) of each of `total` packed rows, and their starts."""
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(lengths.long(), output_size=total)
    rows = torch.arange(total, device=lengths.device)
    return sequence, rows - starts[sequence], starts


def page_lengths(indptr, name, last, page_size):
    """Keys of sequences, of their starts on the host and their last pages' lengths."""
    counts = indptr.diff()
    last = lengths_of(name, last, counts.shape[0])
    outside = (counts > 0) & ((last < 0) | (last > page_size))
    if outside.any():
        at = int(outside.nonzero()[0])
        raise InputError(
            f"{name}[{at}] is {int(last[at])}: it must be from 0 to {page_size}, the rows of a page"
        )
    return torch.where(counts > 0, (counts - 1) * page_size + last, 0)


def rotated(x, places, scores):
    """x (rows, heads, head_dim) turned by its rows' places, halves paired, as LLaMA's."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise InputError(
            f"pos_encoding_mode='ROPE_LLAMA' with a head_dim of {x.shape[-1]}: it turns pairs, give an even "
            "one"
        )
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = places[:, None].float() * (scores.rope_theta**-steps / scores.rope_scale)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def alibi(q):
    """ALiBi's slopes times the distance from a query to a key, which are counted from the first of each."""
    return (_alibi if is_lasting(q) else _alibi.__wrapped__)(q.shape[-2], q.device)


@lru_cache(maxsize=None)
def _alibi(heads, device):
    whole = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    text = "array slope: f32[_];\nscore = s + slope[h] * (k - q);"
    return Program(text, {"slope": torch.tensor(slopes, dtype=torch.float32, device=device)})


_PACKED = """array seen: u8[_];
array start: i32[_];
let at = q * sk + k;
mask = ((seen[start[b] + (at >> 3)] >> (at & 7)) & 1) == 1;"""


def mask_of(packed, starts):
    """The program of a batch's masks, whose bits begin at the bytes `starts`."""
    return Program(_PACKED, {"seen": packed, "start": starts})


_ITEMS = """array prefix: i32[_];
array place: i32[_];
scalar width: i32;
let at = q + off;
let first = prefix[b];
mask = k <= at and (at < first or k < first or at < k + place[b * width + at - first]);"""


def items_of(prefix, places, width, device):
    """The program of items behind a prefix that all of them see: each token sees those of its own item before
    it, as many as `places` says for the tokens behind the prefix, `width` for each sequence."""
    arrays = {"prefix": prefix, "place": places}
    arrays = {name: x.to(device, torch.int32).reshape(-1) for name, x in arrays.items()}
    return Program(_ITEMS, arrays, {"width": count("token_pos_in_items_len", width)})


def mask_sizes(rows, keys):
    """Bits of each sequence's mask, of numbers on the host."""
    sizes = rows * keys
    if sizes.numel() and int(sizes.max()) >= 2**31:
        raise UnsupportedError(
            f"a custom mask of {int(sizes.max())} elements: at most {2**31 - 1} can be read"
        )
    return sizes


def packed_bits(x, order):
    """Truth values (.., n) as bytes (.., ceil(n / 8)), numpy's packbits."""
    if order not in ("big", "little"):
        raise InputError(f"bitorder is {order!r}: it must be 'big' or 'little'")
    x = torch.nn.functional.pad(x.bool(), (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.arange(8, device=x.device, dtype=torch.int32)
    places = places if order == "little" else 7 - places
    return (x.int() << places).sum(-1).to(torch.uint8)


def unpacked_bits(packed, size):
    """The first `size` bits of bytes, the lowest first."""
    places = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.reshape(-1, 1) >> places) & 1).reshape(-1)[:size].bool()


def segments(x, sizes, order):
    """(bytes, starts) of packed truth values whose segments have these sizes, on the host; every segment
    begins at a byte."""
    widths = (sizes + 7) // 8
    starts = torch.nn.functional.pad(widths.cumsum(0), (1, 0))
    sequence, place, _ = places_of(sizes.to(x.device), int(sizes.sum()))
    room = torch.zeros(8 * int(starts[-1]), dtype=torch.bool, device=x.device)
    room[8 * starts.to(x.device)[sequence] + place] = x.reshape(-1).bool()
    return packed_bits(room, order), starts


def scaled(scores, q, q_scale, k_scale, descales):
    """The scale of scores, where factors are numbers; those that are tensors join the descales of k."""
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    for name, factor in (("q_scale", q_scale), ("k_scale", k_scale)):
        if isinstance(factor, torch.Tensor):
            factor = factor.to(q.device, torch.float32).reshape(-1)
            have = descales.get("k_descale")
            descales["k_descale"] = factor if have is None else have * factor
        elif factor is not None:
            scale *= number(name, factor)
    return scale


def program_of(jit_args):
    """The scores and masks of a wrapper's own that `jit_args` is, as a program; None without."""
    if jit_args is None:
        return None
    if not isinstance(jit_args, (str, Program)):
        kind = type(jit_args).__name__
        raise UnsupportedError(
            f"jit_args is {kind}: FlashInfer's variants are CUDA's text, give a program's "
            "(docs/programs.md), as a str or fa_attn's Program; sinks are an argument of run()"
        )
    return Program.of_score(jit_args)


def keywords(scores, q, *, q_scale=None, k_scale=None, descales=None, mask=None, program=None):
    """The keyword arguments of a call with these scores."""
    made = dict(descales or {})
    made["softmax_scale"] = scaled(scores, q, q_scale, k_scale, made)
    made["causal"] = scores.causal and mask is None
    made["window_size"] = (scores.window_left, -1)
    made["softcap"] = scores.soft_cap
    if mask is not None:
        made["mask_mod"] = mask
    if scores.encoding == "ALIBI" and program is not None:
        raise UnsupportedError(
            "pos_encoding_mode='ALIBI' with jit_args: write slope[h] * (k - q) into the program"
        )
    if scores.encoding == "ALIBI":
        program = alibi(q)
    if program is not None:
        made["score_mod"] = program
    return made


def of_codes(q, scale_q):
    """q of codes as numbers, where each of its heads has a factor."""
    if scale_q is None:
        return q
    return (q.float() * scale_q.to(q.device, torch.float32).reshape(-1, 1)).to(
        torch.bfloat16 if q.dtype in _CODES else q.dtype
    )


def narrowed(x, dtype):
    """Numbers of another type, those beyond the range of codes the largest of these, as by kernels."""
    if dtype in _CODES:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)


class Results(NamedTuple):
    """What a call writes and returns: `dtype` of out, `factor` of it, tensors for it and for the LSE."""

    dtype: Optional[torch.dtype] = None
    factor: Any = None
    out: Optional[torch.Tensor] = None
    lse: Optional[torch.Tensor] = None
    wants_lse: bool = False
    base: float = LOG2_E

    def room(self, shape, dtype):
        """The tensor that a kernel writes out to, or None."""
        if self.out is None:
            return None
        if tuple(array("out", self.out).shape) != tuple(shape):
            raise InputError(f"out has the shape {tuple(self.out.shape)}: it must be {tuple(shape)}")
        # Of q in codes the result is of 16 bits.
        is_plain = self.out.dtype == dtype and (self.dtype or dtype) == dtype and dtype.itemsize > 1
        return self.out if is_plain and self.is_whole else None

    @property
    def is_whole(self):
        return self.factor is None or (isinstance(self.factor, (int, float)) and self.factor == 1)

    def of(self, made, lse=None):
        """What the call returns. lse (heads, rows), natural; None where it is not asked for."""
        if not self.is_whole:
            factor = self.factor
            if not isinstance(factor, torch.Tensor):
                factor = number("v_scale or bmm2_scale", factor)
            made = made * factor
        if self.dtype is not None and made.dtype != self.dtype:
            made = narrowed(made, self.dtype)
        if self.out is not None:
            if self.out.dtype != made.dtype:
                raise InputError(f"out holds {self.out.dtype}: it must hold {made.dtype}, as planned")
            is_there = made.data_ptr() == self.out.data_ptr()
            made = self.out if is_there else self.out.copy_(made)
        if not self.wants_lse and self.lse is None:
            return made
        lse = lse.transpose(-1, -2)
        room = self.lse
        if room is None:
            room = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
        elif array("lse", room).shape != lse.shape or room.dtype is not torch.float32:
            raise InputError(
                f"lse is {tuple(room.shape)} of {room.dtype}: it must be {tuple(lse.shape)} of float32"
            )
        lse = torch.mul(lse, self.base, out=room)
        return (made, lse) if self.wants_lse else made
