#!/usr/bin/env python3
"""Rows of many forms beside the peers that are installed: where we are slower.

    python bench/survey.py OUT.json [SECONDS] [seed=N] [only=TEXT]

Forms: dense layers, drawn by a seed, of head dims 64 to 256 and 192-128, few and many heads, groups and odd
lengths; cross attention on 77 to 1,500 keys; windows, soft caps, slopes, masks and biases; packed batches of
unlike lengths; decoding and chunks of prompts on caches in one piece and in pages, of 16 and 8 bits; latents
(MLA). Peers: torch's cuDNN, FlashAttention-2 and "efficient", FlashAttention-3 (fa3-fwd), FlashInfer's decode
(flashinfer-python, compiled beside the first rows) and FlashMLA (sgl-flash-mla, planned before). Each row is
checked first: the last head group of the first and the last sequence, out and gradients, against the formula
in float32; a peer whose result is wrong leaves the row. Then the contestants replay CUDA graphs in turns, and
the median counts. A process each computes some of the rows, one row at a time, so that a fault costs one
row. Prints all passes, the slowest ratio first; "fa planned" is ours with the plan of a step made before,
"fa 16 bits" ours on the codes' numbers.
"""

import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_attn

NAMED = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
TURNS, LEAST = 5, 1e-3
BEGIN = time.time()
BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
DEVICE = "cuda"


class Row(SimpleNamespace):
    """What a row computes: batch, queries, keys, heads, heads_kv, dim, dim_v and what its form needs."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __str__(self):
        lengths = f"{self.queries}" if self.queries == self.keys else f"{self.queries}x{self.keys}"
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}:{self.heads_kv}"
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim}-{self.dim_v}"
        said = [f"{self.form} {self.batch} x {lengths}", heads, f"hd {dims}"]
        said += [name for name in ("causal", "alibi") if getattr(self, name)] if self.form == "dense" else []
        for name in ("window", "softcap", "mask", "bias", "page", "skewed"):
            value = getattr(self, name)
            if value:
                said.append(name if value is True else f"{name} {value}")
        if self.dtype not in (None, BF16):
            said.append(str(self.dtype).replace("torch.", ""))
        if self.codes:
            said.append(str(self.codes).replace("torch.", ""))
        return ", ".join(said)


def row(form, batch, queries, keys, heads, heads_kv, dim, dim_v=None, **rest):
    return Row(
        form=form,
        batch=batch,
        queries=queries,
        keys=keys,
        heads=heads,
        heads_kv=heads_kv,
        dim=dim,
        dim_v=dim_v or dim,
        **{"causal": False, "alibi": False, **rest},
    )


ODD = (300, 577, 729, 1025, 1370, 1536, 1999, 2500, 3000, 4100, 5000, 6144, 8000, 12345)


def near(rng, tokens):
    """A batch and an odd length of about so many tokens."""
    length = rng.choice(ODD)
    return max(1, round(tokens / length)), length


_DIMS = (
    (64, 64),
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (128, 128),
    (128, 128),
    (160, 160),
    (192, 192),
    (192, 128),
    (256, 256),
    (256, 256),
)
_GROUPS = ((1, 8), (2, 4), (4, 4), (8, 4), (8, 1), (12, 1), (16, 1), (20, 1), (4, 2))
_SMALL = (
    (128, 50, 12, 64, False),
    (64, 197, 12, 64, False),
    (32, 77, 12, 64, True),
    (1, 256, 8, 128, True),
    (1, 128, 4, 64, False),
    (4, 900, 8, 32, False),
)
_CROSS = (
    (2, 4096, 77, 10, 64),
    (2, 1024, 77, 20, 64),
    (2, 256, 77, 8, 160),
    (1, 448, 1500, 6, 64),
    (3, 9000, 512, 12, 128),
    (4, 100, 1064, 8, 32),
)
_BANDS = (
    dict(window=500, causal=True),
    dict(window=64),
    dict(alibi=True, causal=True),
    dict(softcap=30.0, causal=True),
)
_MASKS = (
    (4, 512, 12, 64, dict(mask="padding")),
    (2, 1000, 16, 64, dict(mask="random")),
    (1, 2000, 16, 128, dict(mask="padding")),
    (1, 1000, 8, 64, dict(bias=True)),
    (2, 1999, 8, 128, dict(bias=True)),
)
_PACKED = (
    (12, 3000, 32, 8, 128),
    (40, 800, 16, 16, 64),
    (300, 90, 16, 2, 128),
    (50, 9000, 8, 1, 128),
    (6, 4000, 16, 16, 96),
    (5, 2500, 8, 4, 256),
)
_DECODE = (
    (1, 300, 32, 8, 128),
    (4, 777, 28, 4, 128),
    (17, 5000, 40, 8, 128),
    (33, 1999, 16, 16, 64),
    (3, 20000, 8, 1, 256),
    (7, 3000, 32, 32, 80),
    (2, 12345, 64, 8, 128),
    (130, 900, 32, 8, 128),
    (1, 1500, 20, 20, 64),
    (12, 3000, 24, 8, 128),
    (64, 448, 20, 20, 64),
    (5, 7000, 16, 8, 256),
)
_CHUNKS = (
    (8, 5, 3000, 32, 8),
    (1, 16, 9000, 8, 1),
    (4, 64, 4100, 32, 8),
    (2, 200, 5000, 28, 4),
    (1, 700, 2500, 16, 2),
)
_PAGED = (
    (1, 1, 3000, 16, 32, 8, 128),
    (5, 1, 6000, 16, 32, 8, 128),
    (33, 1, 2500, 64, 28, 4, 128),
    (100, 1, 1700, 16, 16, 2, 128),
    (256, 1, 900, 64, 8, 1, 128),
    (16, 1, 9000, 256, 64, 8, 128),
    (24, 1, 3000, 256, 8, 8, 128),
    (64, 1, 600, 16, 32, 8, 128),
    (9, 1, 12000, 64, 16, 2, 128),
    (2, 1, 20000, 16, 40, 8, 128),
    (48, 1, 2000, 16, 32, 32, 128),
    (20, 1, 3000, 256, 16, 4, 256),
    (20, 1, 3000, 256, 64, 8, 64),
    (3, 700, 5000, 256, 32, 8, 128),
    (16, 4, 5000, 256, 32, 8, 128),
    (8, 100, 2000, 256, 8, 1, 128),
)
_CODES = ((40, 3000, 16, 32, 8), (5, 9000, 64, 16, 2), (100, 700, 16, 32, 8))
_LATENTS = ((5, 1, 3000, 128), (100, 1, 1500, 16), (24, 2, 5000, 128), (1, 1, 9000, 16))


def rows(seed):
    """The rows: layers drawn by that seed, and those of the tables."""
    rng, some = random.Random(seed), []
    for dim, dim_v in _DIMS:
        for causal in (True, False):
            batch, length = near(rng, rng.choice((2000, 6000, 12000)))
            heads_kv, group = rng.choice(_GROUPS)
            if dim_v != dim:
                heads_kv, group = 16, 1
            dtype = F16 if rng.random() < 0.2 else BF16
            heads = heads_kv * group
            options = dict(causal=causal, dtype=dtype, backward=True)
            some.append(row("dense", batch, length, length, heads, heads_kv, dim, dim_v, **options))
    for batch, length, heads, dim, causal in _SMALL:
        some.append(row("dense", batch, length, length, heads, heads, dim, causal=causal, backward=True))
    for batch, queries, keys, heads, dim in _CROSS:
        some.append(row("dense", batch, queries, keys, heads, heads, dim, backward=True))
    for extra in _BANDS:
        (batch, length), dim = near(rng, 8000), rng.choice((64, 128))
        some.append(row("dense", batch, length, length, 16, rng.choice((4, 16)), dim, backward=True, **extra))
    for batch, length, heads, dim, extra in _MASKS:
        some.append(row("sdpa", batch, length, length, heads, heads, dim, backward=True, **extra))
    for count, longest, heads, heads_kv, dim in _PACKED:
        options = dict(causal=rng.random() < 0.7, backward=True)
        some.append(row("packed", count, longest, longest, heads, heads_kv, dim, **options))
    for batch, keys, *heads in _DECODE:
        some.append(row("decode", batch, 1, keys, *heads))
    for batch, queries, keys, heads, heads_kv in _CHUNKS:
        some.append(row("chunk", batch, queries, keys, heads, heads_kv, 128, causal=True))
    for at, (batch, queries, keys, page, *heads) in enumerate(_PAGED):
        some.append(row("paged", batch, queries, keys, *heads, page=page, skewed=at not in (0, 6)))
    for batch, keys, page, heads, heads_kv in _CODES:
        options = dict(page=page, skewed=True, codes=E4M3)
        some.append(row("paged", batch, 1, keys, heads, heads_kv, 128, **options))
    for batch, queries, keys, heads in _LATENTS:
        some.append(row("latents", batch, queries, keys, heads, 1, 576, 512, page=64, skewed=True))
    return [own for own in some if NAMED.get("only", "") in str(own)]


def lengths_of(own, rng):
    """Lengths of sequences: the longest is what the row names."""
    if own.form == "packed":
        found = [
            max(1, min(own.keys, round(rng.lognormvariate(math.log(own.keys / 6), 0.9))))
            for _ in range(own.batch)
        ]
    elif own.skewed:
        found = [max(own.queries, round(own.keys * rng.uniform(0.05, 1) ** 1.5)) for _ in range(own.batch)]
    else:
        found = [own.keys] * own.batch
    found[0] = own.keys
    return found


def random_of(own):
    rng = random.Random(str(own))
    rng.randrange(1 << 30)
    return rng


class Case:
    """The tensors of a row, and what its calls should find."""

    def __init__(self, own):
        self.row = own
        torch.manual_seed(random.Random(str(own)).randrange(1 << 30))
        rng = random_of(own)
        self.lengths = lengths_of(own, rng)
        self.dtype = own.dtype or BF16
        b, h, hkv, d, dv = own.batch, own.heads, own.heads_kv, own.dim, own.dim_v
        if own.form == "packed":
            outer_q = outer_k = (sum(self.lengths),)
        else:
            outer_q, outer_k = (b, own.queries), (b, own.keys)
        self.q = self.draw(*outer_q, h, d)
        self.dout = self.draw(*outer_q, h, dv)
        self.used = torch.tensor(self.lengths, device=DEVICE, dtype=torch.int32)
        self.starts = torch.tensor([0, *self.lengths], device=DEVICE).cumsum(0).to(torch.int32)
        if own.page:
            count = [-(-n // own.page) for n in self.lengths]
            order = torch.randperm(sum(count), device=DEVICE).to(torch.int32)
            self.pages = order
            self.page_starts = torch.tensor([0, *count], device=DEVICE).cumsum(0).to(torch.int32)
            self.table = torch.zeros(b, max(count), device=DEVICE, dtype=torch.int32)
            for at, n in enumerate(count):
                self.table[at, :n] = order[self.page_starts[at] : self.page_starts[at + 1]]
            outer_k = (sum(count), own.page)
        if own.form == "latents":
            self.k = self.draw(*outer_k, 1, d)
            self.v = self.k[..., :dv]
        else:
            self.k, self.v = self.draw(*outer_k, hkv, d), self.draw(*outer_k, hkv, dv)
        self.k_codes = self.v_codes = None
        if own.codes:
            self.k_codes, self.v_codes = self.k.to(own.codes), self.v.to(own.codes)
            self.k, self.v = self.k_codes.to(self.dtype), self.v_codes.to(self.dtype)
        self.backward = bool(own.backward)
        if self.backward:
            for x in (self.q, self.k, self.v):
                x.requires_grad_()
        self.scale = 192**-0.5 if own.form == "latents" else d**-0.5
        self.slopes = torch.exp2(-8 * torch.arange(1, h + 1, device=DEVICE) / h) if own.alibi else None
        self.mask = self.bias = None
        if own.mask == "padding":
            last = torch.tensor([rng.randint(own.keys // 2, own.keys) for _ in range(b)], device=DEVICE)
            self.mask = (torch.arange(own.keys, device=DEVICE) < last[:, None])[:, None, None]
        elif own.mask == "random":
            self.mask = torch.rand(b, 1, own.queries, own.keys, device=DEVICE) < 0.7
            self.mask[..., 0] = True
        if own.bias:
            self.bias = torch.randn(1, h, own.queries, own.keys, device=DEVICE, dtype=self.dtype)
        self.causal = own.causal or own.form in ("paged", "latents")

    def draw(self, *shape):
        return torch.randn(*shape, device=DEVICE, dtype=self.dtype)

    def part(self, x, at, of_keys):
        """Rows of a sequence, of (rows, heads, dim)."""
        if self.row.form == "packed":
            return x[self.starts[at] : self.starts[at + 1]]
        if of_keys and self.row.page:
            return x[self.pages[self.page_starts[at] : self.page_starts[at + 1]].long()].flatten(0, 1)[
                : self.lengths[at]
            ]
        return x[at]

    def formula(self):
        """out, dq, dk and dv of the last head group of the first and the last sequence, in float32."""
        own, found = self.row, []
        group = own.heads // own.heads_kv
        for at in sorted({0, own.batch - 1}):
            q, k, v, dout = (
                self.part(x, at, of_keys).detach()[:, -count:].float().transpose(0, 1)
                for x, of_keys, count in (
                    (self.q, False, group),
                    (self.k, True, 1),
                    (self.v, True, 1),
                    (self.dout, False, group),
                )
            )
            q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
            scores = q @ k.transpose(1, 2) * self.scale
            i = torch.arange(q.shape[1], device=DEVICE)[:, None] + k.shape[1] - q.shape[1]
            j = torch.arange(k.shape[1], device=DEVICE)[None]
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=DEVICE)
            if own.softcap:
                scores = own.softcap * torch.tanh(scores / own.softcap)
            if self.slopes is not None:
                scores = scores - self.slopes[-group:, None, None] * (i - j).abs()
            if self.causal:
                seen = seen & (j <= i)
            if own.window:
                seen = seen & (j >= i - own.window)
                if not self.causal:
                    seen = seen & (j <= i + own.window)
            if self.mask is not None:
                seen = seen & self.mask[at, 0]
            if self.bias is not None:
                scores = scores + self.bias[0, -group:].float()
            out = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v
            grads = torch.autograd.grad(out, (q, k, v), dout) if self.backward else ()
            found.append((at, [x.detach() for x in (out, *grads)]))
        return found

    def is_right(self, results, want):
        group = self.row.heads // self.row.heads_kv
        for at, need in want:
            for own, ref, of_keys, count in zip(
                results, need, (False, False, True, True), (group, group, 1, 1)
            ):
                own = self.part(own, at, of_keys)[:, -count:].float().transpose(0, 1)
                error = (own - ref).abs().max() / ref.abs().max().clamp(min=1e-3)
                if not error.item() < (3e-2 if self.dtype is BF16 else 8e-3):
                    return False
        return True


def swapped(x):
    return x.transpose(1, 2)


def first(found):
    return found[0] if isinstance(found, (tuple, list)) else found


def window_of(own):
    return (own.window or -1, (0 if own.causal else own.window) if own.window else -1)


def ours(case):
    own = case.row
    if own.form == "sdpa":
        seen = case.bias if own.bias else case.mask
        return lambda: swapped(
            fa_attn.scaled_dot_product_attention(*map(swapped, (case.q, case.k, case.v)), attn_mask=seen)
        )
    if own.form == "packed":
        bounds = (case.starts, case.starts, own.keys, own.keys)
        return lambda: fa_attn.flash_attn_varlen_func(case.q, case.k, case.v, *bounds, causal=own.causal)
    if own.form == "latents":
        from fa_attn.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        metadata, splits = get_mla_metadata()
        return lambda: flash_mla_with_kvcache(
            case.q,
            case.k,
            case.table,
            case.used,
            own.dim_v,
            metadata,
            splits,
            softmax_scale=case.scale,
            causal=True,
        )[0]
    if own.page:
        options = dict(cache_seqlens=case.used, block_table=case.table, causal=True)
        k, v = (case.k, case.v) if case.k_codes is None else (case.k_codes, case.v_codes)
        if case.k_codes is not None:
            one = torch.ones(1, device=DEVICE)
            options.update(k_descale=one, v_descale=one)
        return lambda: fa_attn.flash_attn_with_kvcache(case.q, k, v, **options)
    options = dict(causal=own.causal)
    if own.window:
        options["window_size"] = window_of(own)
    if own.softcap:
        options["softcap"] = own.softcap
    if case.slopes is not None:
        options["alibi_slopes"] = case.slopes
    return lambda: fa_attn.flash_attn_func(case.q, case.k, case.v, **options)


def ours_planned(case):
    own = case.row
    if own.form != "paged":
        return None
    k, v = (case.k, case.v) if case.k_codes is None else (case.k_codes, case.v_codes)
    plan = fa_attn.get_scheduler_metadata(
        own.batch,
        own.queries,
        own.keys,
        own.heads,
        own.heads_kv,
        own.dim,
        case.used,
        qkv_dtype=case.dtype,
        page_size=own.page,
        causal=True,
    )
    options = dict(cache_seqlens=case.used, block_table=case.table, causal=True, scheduler_metadata=plan)
    if case.k_codes is not None:
        one = torch.ones(1, device=DEVICE)
        options.update(k_descale=one, v_descale=one)
    return lambda: fa_attn.flash_attn_with_kvcache(case.q, k, v, **options)


def ours_16_bits(case):
    """The cache of codes as numbers."""
    own = case.row
    if not own.codes:
        return None
    options = dict(cache_seqlens=case.used, block_table=case.table, causal=True)
    return lambda: fa_attn.flash_attn_with_kvcache(case.q, case.k, case.v, **options)


def torch_with(backend):
    def of(case):
        own = case.row
        is_plain = own.form in ("dense", "decode", "chunk") and not (own.window or own.softcap or own.alibi)
        if not is_plain and own.form != "sdpa":
            return None
        if own.causal and own.queries != own.keys:
            return None
        seen = case.bias if own.bias else case.mask
        if seen is not None and backend is SDPBackend.FLASH_ATTENTION:
            return None
        if seen is not None:
            seen = seen.expand(own.batch, own.heads, own.queries, own.keys)
        grouped = own.heads != own.heads_kv
        if grouped and backend is SDPBackend.EFFICIENT_ATTENTION:
            return None

        def call():
            with sdpa_kernel(backend):
                return swapped(
                    F.scaled_dot_product_attention(
                        *map(swapped, (case.q, case.k, case.v)),
                        attn_mask=seen,
                        is_causal=own.causal,
                        enable_gqa=grouped,
                    )
                )

        return call

    return of


def fa2(case):
    """torch's FlashAttention-2 by its operator, which has windows, slopes and packed rows."""
    own = case.row
    if own.form not in ("dense", "packed", "decode", "chunk") or own.softcap or own.dim != own.dim_v:
        return None
    left, right = window_of(own)
    options = dict(
        window_size_left=left if left >= 0 else None, window_size_right=right if left >= 0 else None
    )
    if case.slopes is not None:
        options["alibi_slopes"] = case.slopes
    starts = case.starts if own.form == "packed" else None
    fixed = (starts, starts, own.queries, own.keys, 0.0, own.causal, False)
    return lambda: torch.ops.aten._flash_attention_forward(case.q, case.k, case.v, *fixed, **options)[0]


def fa3():
    import fa3_fwd_interface as library

    def of(case):
        own = case.row
        q, k, v = (x.detach() for x in (case.q, case.k, case.v))
        if own.window or own.alibi or own.form == "sdpa" or case.dtype is F16 or own.codes:
            return None
        if own.form == "packed":
            bounds = (case.starts, case.starts, own.keys, own.keys)
            return lambda: first(library.flash_attn_varlen_func(q, k, v, *bounds, causal=own.causal))
        if own.form == "latents":
            qv, qr, rope, latent = q[..., :512], q[..., 512:], k[..., 512:], k[..., :512]
            options = dict(
                qv=qv, page_table=case.table, cache_seqlens=case.used, causal=True, softmax_scale=case.scale
            )
            return lambda: first(library.flash_attn_with_kvcache(qr, rope, latent, **options))
        if own.page:
            if own.page % 128:
                return None
            options = dict(page_table=case.table, cache_seqlens=case.used, causal=True)
            return lambda: first(library.flash_attn_with_kvcache(q, k, v, **options))
        if own.form in ("decode", "chunk"):
            return lambda: first(library.flash_attn_with_kvcache(q, k, v, causal=own.causal))
        options = dict(causal=own.causal, softcap=own.softcap or 0.0)
        return lambda: first(library.flash_attn_func(q, k, v, **options))

    return of


def flash_mla():
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    def of(case):
        if case.row.form != "latents":
            return None
        metadata, _ = get_mla_metadata()
        options = dict(softmax_scale=case.scale, causal=True, use_legacy=True)
        return lambda: flash_mla_with_kvcache(
            case.q, case.k, case.table, case.used, 512, metadata, **options
        )[0]

    return of


def infer_of(library, case):
    """FlashInfer's decode, planned before."""
    own = case.row
    codes = case.k_codes is not None
    k, v = (case.k_codes, case.v_codes) if codes else (case.k, case.v)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "NHD", use_tensor_cores=True
    )
    last = torch.tensor([(n - 1) % own.page + 1 for n in case.lengths], device=DEVICE, dtype=torch.int32)
    wrapper.plan(
        case.page_starts,
        case.pages,
        last,
        own.heads,
        own.heads_kv,
        own.dim,
        own.page,
        q_data_type=case.dtype,
        kv_data_type=k.dtype,
    )
    kv = torch.stack((k, v), 1)
    return lambda: wrapper.run(case.q[:, 0], kv)[:, None]


def flash_infer():
    import flashinfer as library

    def of(case):
        own = case.row
        if own.form != "paged" or own.queries != 1 or own.dim != 128:
            return None
        return infer_of(library, case)

    return of


def compile_infer(codes, infers):
    """Compiles FlashInfer's kernel, in a process of its own, and counts it."""
    try:
        import flashinfer as library

        case = Case(row("paged", 2, 1, 200, 8, 2, 128, page=16, **({"codes": E4M3} if codes else {})))
        infer_of(library, case)()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a peer that is not there
        print(f"flashinfer: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    with infers.get_lock():
        infers.value += 1


def contestants():
    found, missing = {"fa": ours, "fa planned": ours_planned, "fa 16 bits": ours_16_bits}, {}
    found["cudnn"] = torch_with(SDPBackend.CUDNN_ATTENTION)
    found["efficient"] = torch_with(SDPBackend.EFFICIENT_ATTENTION)
    found["fa2"] = fa2
    for name, load in (("fa3", fa3), ("flashmla", flash_mla), ("flashinfer", flash_infer)):
        try:
            found[name] = load()
        except Exception as error:  # noqa: BLE001 - whatever an import raises
            missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found, missing


class Replay:
    """So many steps in a graph that a replay takes LEAST."""

    def __init__(self, run):
        self.run = run  # What it holds is read by the graph.
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        self.count = max(1, min(100, round(LEAST * 3 / (time.perf_counter() - begin))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            for _ in range(self.count):
                run()
        torch.cuda.synchronize()

    def seconds(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / self.count


def no_grad(call):
    def run():
        with torch.no_grad():
            return call()

    return run


def results_of(case, call):
    out = call()
    if not case.backward or not out.requires_grad:
        return (out,)
    return (out, *torch.autograd.grad(out, (case.q, case.k, case.v), case.dout))


def said(error):
    return f"{type(error).__name__}: {str(error)[:150]}"


def measure(case, found):
    """Seconds by pass and contestant, and why others have none."""
    want = case.formula()
    torch.cuda.synchronize()
    calls, errors, times = {}, {}, {}
    for name, of in found.items():
        try:
            call = of(case)
            if call is None:
                continue
            results = results_of(case, call)
            torch.cuda.synchronize()
            if case.is_right(results, want):
                calls[name] = call, len(results) > 1
            else:
                errors[name] = "wrong"
            del results
        except torch.AcceleratorError as error:
            raise Broken(f"{name}: {said(error)}") from error
        except Exception as error:  # noqa: BLE001 - a peer that does not compute the row
            errors[name] = said(error)
    del want
    for mode in ("fwd", "bwd") if case.backward else ("fwd",):
        replays = {}
        for name, (call, has_gradients) in calls.items():
            if mode == "bwd" and not has_gradients:
                continue
            try:
                if mode == "fwd":
                    run = no_grad(call)
                else:
                    out = call()

                    def run(out=out):
                        torch.autograd.grad(out, (case.q, case.k, case.v), case.dout, retain_graph=True)

                replays[name] = Replay(run)
                replays[name].seconds()
            except torch.AcceleratorError as error:
                raise Broken(f"{name} {mode}, replayed: {said(error)}") from error
            except Exception as error:  # noqa: BLE001 - what cannot be captured
                errors[f"{name} {mode}"] = said(error)
                replays.pop(name, None)
        own, order = {name: [] for name in replays}, list(replays)
        for _ in range(TURNS):
            random.shuffle(order)
            for name in order:
                own[name].append(replays[name].seconds())
        times[mode] = {name: statistics.median(each) for name, each in own.items()}
    return times, errors


class Broken(Exception):
    """An error after which the process cannot use its GPU."""


def warm(some):
    """Compiles our kernels of these rows, beside other processes."""
    for own in some:
        try:
            case = Case(own)
            for of in (ours, ours_planned, ours_16_bits):
                call = of(case)
                if call is not None:
                    results_of(case, call)
            torch.cuda.synchronize()
            del case
        except torch.AcceleratorError as error:
            print(f"BROKEN {own}: ours: {said(error)}", flush=True)
            os._exit(4)
        except Exception as error:  # noqa: BLE001 - the row says it again
            print(f"{own}: {said(error)}", file=sys.stderr)


def work(some, shared, out, until, infers):
    """Compiles the kernels of these rows beside other processes, then measures them alone, a line each."""
    lock, ready, workers = shared
    warm(some)
    with ready.get_lock():
        ready.value += 1
    while ready.value < workers and time.time() < until - 60:
        time.sleep(0.05)
    found, missing = contestants()
    torch.cuda.set_stream(torch.cuda.Stream())
    for own in some:
        if own.form == "paged" and infers is not None:
            while infers.value < 2 and time.time() < until - 20:
                time.sleep(0.1)
            if infers.value < 2:
                found.pop("flashinfer", None)
        with lock:
            if time.time() > until:
                return
            line, broken = {"row": str(own), "missing": missing}, False
            try:
                line["seconds"], line["errors"] = measure(Case(own), found)
            except (Broken, torch.AcceleratorError) as error:
                line["errors"], broken = {"row": said(error)}, True
            except Exception as error:  # noqa: BLE001 - other rows go on
                line["errors"] = {"row": said(error)}
            with open(out + ".lines", "a") as file:
                file.write(json.dumps(line) + "\n")
            if not broken:
                torch.cuda.empty_cache()
        if broken:
            print(f"BROKEN {own}: {line['errors']['row']}", flush=True)
            os._exit(3)


def table_of(measured):
    """Lines of passes, the slowest ratio first, and the ratios."""
    table = []
    for each in measured:
        for mode, times in each.get("seconds", {}).items():
            mine = times.get("fa")
            peers = {name: value for name, value in times.items() if name.split()[0] != "fa"}
            best = min(peers, key=peers.get) if peers else None
            ratio = peers[best] / mine if best and mine else None
            more = "".join(f", {name} {times[name] * 1e6:.1f}" for name in times if name.startswith("fa "))
            shown = f"{ratio:.3f} of {best} {peers[best] * 1e6:.1f} us" if ratio else "no peer"
            mine = f"{mine * 1e6:9.1f} us" if mine else "   failed"
            table.append((ratio or 99, f"{each['row']:54} {mode} {mine} {shown}{more}"))
    table.sort()
    return [line for _, line in table], [ratio for ratio, _ in table if ratio != 99]


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else "survey.json"
    until = BEGIN + float(next((x for x in sys.argv[2:] if "=" not in x), 120))
    some = rows(NAMED.get("seed", "1"))
    Path(out + ".lines").write_text("")
    spawn = multiprocessing.get_context("spawn")
    infers = spawn.Value("i", 0) if any(Path(folder, "flashinfer").is_dir() for folder in sys.path) else None
    targets = (False, True) if infers is not None else ()
    compiling = [spawn.Process(target=compile_infer, args=(codes, infers)) for codes in targets]
    for process in compiling:
        process.start()
    # Rows that FlashInfer computes come last, from processes of their own.
    workers = max(2, min(12, (os.cpu_count() or 4) - 2))
    paged = [own for own in some if own.form == "paged"]
    others = [own for own in some if own.form != "paged"]
    parts = [others[at :: workers - 2] for at in range(workers - 2)] + [paged[at::2] for at in range(2)]
    parts = [part for part in parts if part]
    shared = spawn.Lock(), spawn.Value("i", 0), len(parts)

    def started(part):
        process = spawn.Process(target=work, args=(part, shared, out, until, infers))
        process.start()
        return process

    running = [(started(part), part) for part in parts]

    def lines():
        return [json.loads(line) for line in Path(out + ".lines").read_text().splitlines()]

    while running:
        process, part = running.pop(0)
        process.join()
        done = {line["row"] for line in lines()}
        left = [own for own in part if str(own) not in done]
        if process.exitcode == 3 and left and time.time() < until - 10:
            running.append((started(left), left))
    for process in compiling:
        process.kill()
    measured = lines()
    missing = {name: why for each in measured for name, why in each.pop("missing").items()}
    done = {each["row"] for each in measured}
    if len(done) < len(some):
        missing["rows"] = "; ".join(str(own) for own in some if str(own) not in done)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": measured,
        "missing": missing,
    }
    Path(out).write_text(json.dumps(report, indent=1))
    shown, ratios = table_of(measured)
    print("\n".join(shown))
    if ratios:
        print(
            f"{len(ratios)} passes with a peer: {statistics.geometric_mean(ratios):.3f} of the best, "
            f"{sum(ratio < 1 for ratio in ratios)} below 1"
        )
    for each in measured:
        for name, why in each["errors"].items():
            if name.split()[0] in ("fa", "row"):
                print(f"{each['row']}: {name}: {why}")
    for name, why in missing.items():
        print(f"without {name}: {why}")
    print(f"{time.time() - BEGIN:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
