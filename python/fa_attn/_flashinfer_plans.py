"""What the wrappers of `fa_attn.flashinfer` have in common: their plans and, on pages, their attention."""

from __future__ import annotations

import contextlib
from typing import Any, Optional

import torch

from ._checks import count
from ._core import InputError, InputTypeError, UnsupportedError
from ._flashinfer import (
    Pages,
    Scores,
    check_buffer,
    check_layout,
    dtype_of,
    items_of,
    keywords,
    left_of,
    lengths_of,
    mask_of,
    mask_sizes,
    of_codes,
    pages_of,
    places_of,
    program_of,
    rotated,
    scores_of,
    segments,
    starts_of,
    with_page,
)
from .interface import flash_attn_varlen_func, flash_attn_with_kvcache

Tensor = torch.Tensor


def descales_of(k_descale, v_descale):
    given = {"k_descale": k_descale, "v_descale": v_descale}
    return {name: x.float().reshape(-1) for name, x in given.items() if x is not None}


def is_undivided(disable_split_kv, fixed_split_size):
    """Whether keys stay in one piece: parts of one size, which do not depend on the batch, are not made."""
    return disable_split_kv or (fixed_split_size is not None and fixed_split_size > 0)


def on_pages(q, k, v, pages, starts, longest, results, call):
    """Attention on `pages` (a table and lengths) of q, (batch, rows, heads, head_dim) or with starts packed;
    what it returns has packed rows. `call`: keyword arguments, and it may have a `factor` of the result."""
    if "factor" in call:
        call = dict(call)
        results = results._replace(factor=call.pop("factor"))
    shape, packed = (*q.shape[:-1], v.shape[-1]), starts is not None
    room = results.room(shape if packed else (shape[0] * shape[1], *shape[2:]), q.dtype)
    if not packed and room is not None:
        room = room.view(shape)
    made = flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=pages.lengths,
        block_table=pages.table,
        cu_seqlens_q=starts,
        max_seqlen_q=longest if packed else None,
        out=room,
        **call,
    )
    made, lse = made if call["return_softmax_lse"] else (made, None)
    if not packed:
        made = made.flatten(0, 1)
        lse = None if lse is None else lse.transpose(0, 1).flatten(1)
    return results.of(made, lse)


class Plan:
    """What the plans of a batch's queries, keys and masks have in common."""

    def __init__(self, float_workspace_buffer, kv_layout, use_cuda_graph, jit_args=None):
        self.device = float_workspace_buffer.device
        self._program = program_of(jit_args)
        self._layout = check_layout(kv_layout)
        self._captures = bool(use_cuda_graph)
        self._scores: Optional[Scores] = None
        self._mask = None
        # Scores, mask and the keywords of a run with these and without factors of its own.
        self._kept: Any = (None, None, None)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._captures

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any) -> None:
        """Without effect: workspaces are not needed."""

    def end_forward(self) -> None:
        """Without effect, as in FlashInfer."""

    def _set(self, scores, heads, head_dim, types, undivided):
        self._scores, self._heads, self._head_dim = scores, heads, head_dim
        q_type = dtype_of(types[0], torch.float16)
        self._types = (q_type, dtype_of(types[1], q_type), dtype_of(types[2], q_type))
        self._splits = 1 if undivided else 0

    def _set_mask(self, custom, packed, rows, keys, buffers=(None, None)):
        """The masks of a batch with so many queries and keys each, on the host."""
        self._mask = None
        if packed is None and custom is None:
            return
        sizes = mask_sizes(rows, keys)
        if packed is None:
            if not isinstance(custom, torch.Tensor):
                raise InputTypeError(f"custom_mask is {type(custom).__name__}: it must be a tensor")
            if custom.numel() < int(sizes.sum()):
                raise InputError(
                    f"custom_mask has {custom.numel()} elements: the batch's queries and keys ask for "
                    f"{int(sizes.sum())}"
                )
            if custom.dtype.is_floating_point:
                need = "it must hold truth values, True where seen"
                raise InputError(f"custom_mask holds {custom.dtype}: {need}")
            packed, starts = segments(custom.reshape(-1)[: int(sizes.sum())], sizes, "little")
        else:
            if not isinstance(packed, torch.Tensor):
                raise InputTypeError(f"packed_custom_mask is {type(packed).__name__}: it must be a tensor")
            starts = torch.nn.functional.pad(((sizes + 7) // 8).cumsum(0), (1, 0))
            if packed.numel() < int(starts[-1]):
                raise InputError(
                    f"packed_custom_mask has {packed.numel()} bytes: the batch's queries and keys ask for "
                    f"{int(starts[-1])}"
                )
            if packed.dtype is not torch.uint8:
                raise InputError(f"packed_custom_mask holds {packed.dtype}: it must hold bytes, uint8")
        if self._captures:
            room, room_starts = buffers
            if room is None or room_starts is None or room.numel() < packed.numel():
                raise InputError(
                    "custom_mask_buf and mask_indptr_buf must hold the mask: give both with use_cuda_graph"
                )
            check_buffer("mask_indptr", room_starts, self.device)
            room[: packed.numel()].copy_(packed.reshape(-1))
            room_starts.copy_(starts)
            packed, starts = room, room_starts
        elif not packed.numel():
            return
        self._mask = mask_of(
            packed.to(self.device).reshape(-1), starts.to(self.device, torch.int32)
        )

    def _set_items(self, prefix, places, width, batch):
        """Masks of items instead of other ones, where a plan has them."""
        if prefix is None and places is None:
            return
        if prefix is None or places is None:
            raise InputError("prefix_len_ptr and token_pos_in_items_ptr belong together: give both")
        if prefix.numel() != batch:
            raise InputError(f"prefix_len_ptr has {prefix.numel()} elements: it must have {batch}")
        if self._captures:
            raise UnsupportedError("prefix_len_ptr with use_cuda_graph: give a custom_mask in its buffers")
        self._mask = items_of(prefix, places, width, self.device)

    def _check(self, q, k, names=("q", "k")):
        if self._scores is None:
            raise InputError("plan() comes before run()")
        shape = q.shape
        heads = (shape[-2], k.shape[-2])
        # What is as planned needs no names.
        if heads == self._heads and shape[-1] == self._head_dim and (q.dtype, k.dtype) == self._types[:2]:
            return
        if heads != self._heads:
            raise InputError(f"q and k have {heads} heads: the plan is of {self._heads}")
        if q.shape[-1] != self._head_dim:
            raise InputError(f"q has a head_dim of {q.shape[-1]}: the plan is of {self._head_dim}")
        for name, x, need in zip(names, (q, k), self._types):
            if x.dtype != need:
                raise InputError(
                    f"{name}.dtype is {x.dtype}: the plan says {need}, give it q_data_type and kv_data_type"
                )

    def _without_codes(self, q, args):
        """(q, descales) of a run, whose further arguments by position are the factors of 8-bit q, k and v."""
        if not args:
            return q, {}
        if len(args) != 3 or q.dtype.itemsize != 1:
            raise UnsupportedError(
                "run() takes no further arguments by position: a program of jit_args has its arrays"
            )
        return of_codes(q, args[0]), descales_of(*args[1:])

    @contextlib.contextmanager
    def _instead(self, **scores):
        """What one run says of scores, instead of the plan."""
        planned = self._scores
        try:
            if planned is not None:
                self._scores = planned._replace(**scores)
            yield
        finally:
            self._scores = planned

    def _old(self, causal, scores):
        """Sets what the older calls say of scores."""
        self._scores = scores_of(self._scores.causal if causal is None else causal, *scores)


class PagedPlan(Plan):
    """A batch of queries on pages."""

    def __init__(self, workspace, kv_layout, use_cuda_graph, buffers, jit_args=None):
        super().__init__(workspace, kv_layout, use_cuda_graph, jit_args)
        self._pages = Pages(self.device, buffers if self._captures else None)

    def _check(self, q, k, names=("q", "k")):
        super()._check(q, k, names)
        if k.shape[-3] != self._pages.page_size:
            raise InputError(f"pages have {k.shape[-3]} rows: the plan is of {self._pages.page_size}")

    def _set_starts(self, starts):
        """Sets the first row of every request and the end of the last, on the host."""
        self._total, rows = int(starts[-1]), starts.diff()
        self._longest = int(rows.max()) if rows.numel() else 0
        if self._captures:
            self._starts.copy_(starts)
        else:
            self._starts = starts.to(self.device, torch.int32)

    def _set_lengths(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size):
        """Sets rows and pages where the keys of each request are counted."""
        starts = starts_of("qo_indptr", qo_indptr)
        lengths = lengths_of("kv_len_arr", kv_len_arr, starts.shape[0] - 1)
        kv_indptr = kv_indptr[: starts.shape[0]]
        indptr = starts_of("kv_indptr", kv_indptr, pages_of("kv_indices", kv_indices).shape[0])
        given = (kv_indptr, kv_indices, kv_len_arr)
        self._pages.plan(indptr, kv_indices, lengths, count("page_size", page_size, 1), given)
        self._set_starts(starts)

    def _check_rows(self, q, name="q"):
        if q.shape[0] != self._total:
            raise InputError(f"{name} has {q.shape[0]} rows: the plan's qo_indptr ends at {self._total}")

    def _buffer(self, at):
        """A buffer of a wrapper whose calls are captured, to which servers write before they plan."""
        if self._pages.buffers is None:
            raise AttributeError("pages are set by plan(); buffers are of use_cuda_graph=True alone")
        return self._pages.buffers[at]

    # By FlashInfer's names, and not to be set: what counts is in the buffers when plan() is called.
    _paged_kv_indptr_buf = property(lambda self: self._buffer(0))
    _paged_kv_indices_buf = property(lambda self: self._buffer(1))
    _paged_kv_last_page_len_buf = property(lambda self: self._buffer(2))

    def _attention(self, q, k, v, starts, longest, results, window_left, scales, sinks=None, args=()):
        """Attention of q, (batch, rows, heads, head_dim) or with starts packed."""
        scores = self._scores
        if window_left is not None and window_left != scores.window_left:
            scores = scores._replace(window_left=left_of(window_left))
        q_scale, k_scale = scales
        q, descales = self._without_codes(q, args)
        has_factors = q_scale is not None or k_scale is not None or descales
        of_scores, of_mask, call = self._kept
        if has_factors or of_scores is not scores or of_mask is not self._mask:
            factors = dict(q_scale=q_scale, k_scale=k_scale, descales=descales)
            call = keywords(scores, q, mask=self._mask, program=self._program, **factors)
            if not has_factors:
                self._kept = (scores, self._mask, call)
        call = dict(call)
        packed, k, v = starts is not None, with_page(k), with_page(v)
        # Making and turning an LSE takes as long as the call's checks.
        wants_lse = results.wants_lse or results.lse is not None
        call.update(return_softmax_lse=wants_lse, sinks=sinks, num_splits=self._splits)
        if scores.encoding == "ROPE_LLAMA":
            if self._captures:
                raise UnsupportedError(
                    "pos_encoding_mode='ROPE_LLAMA' with use_cuda_graph: turn q and k before"
                )
            batch = self._pages.lengths.shape[0]
            if not packed:
                longest = q.shape[1]
                starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * longest
                q = q.flatten(0, 1)
            k, v, starts_k = self._pages.packed(k, v, q.dtype)
            sequence, place, _ = places_of(self._pages.lengths, k.shape[0])
            rows = starts.diff()
            of_row, at, _ = places_of(rows, q.shape[0])
            q = rotated(q, at + (self._pages.lengths - rows)[of_row], scores)
            k = rotated(k, place, scores)
            made = flash_attn_varlen_func(q, k, v, starts, starts_k, longest, self._pages.longest, **call)
            return results.of(*made) if wants_lse else results.of(made)
        return on_pages(q, k, v, self._pages, starts, longest, results, call)
