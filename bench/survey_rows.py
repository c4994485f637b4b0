"""The rows of survey.py: what they are, their tensors, and what calls of them should find."""

import math
import random
from types import SimpleNamespace

import torch

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


def rows(seed, only):
    """The rows whose names have `only`: layers drawn by that seed, and those of the tables."""
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
    return [own for own in some if only in str(own)]


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
