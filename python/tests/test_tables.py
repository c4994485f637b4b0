"""Tables of relative positions, with gradients: T5's buckets, Swin's windows with and without shift, and
tables by distance."""

import math

import pytest

torch = pytest.importorskip("torch")

from test_flex import draw, formula, inputs, same  # noqa: E402

import fa_attn  # noqa: E402
from fa_attn import flex_attention  # noqa: E402

B, H, L, S, D = 2, 4, 40, 50, 16


def t5_bucket(distance, bidirectional):
    """T5's bucket of key less query, as transformers computes it."""
    count, found = 32, torch.zeros_like(distance)
    if bidirectional:
        count //= 2
        found, distance = (distance > 0).long() * count, distance.abs()
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    exact = count // 2
    far = torch.log(distance.float().clamp(min=1) / exact) / math.log(128 / exact) * (count - exact)
    return found + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=count - 1))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5s_buckets_of_every_distance(bidirectional):
    own, true = inputs((B, H, L, D), (B, H, S, D), (B, H, S, D))
    table = draw(32, H).requires_grad_()
    # A bucket for every distance, found once: a kernel's logarithm may fall on the other side of a boundary.
    buckets = t5_bucket(torch.arange(-L, S), bidirectional)

    def learned(score, b, h, q_idx, kv_idx):
        return score + table[buckets[kv_idx - q_idx + L], h]

    got = flex_attention(*own, learned, scale=1.0, return_lse=True)
    same(got, formula(*true, learned, scale=1.0), [*own, table], [*true, table])


@pytest.mark.parametrize("form", ["by distance", "clamped", "of both heads", "of rows and columns"])
def test_tables_by_distance(form):
    own, true = inputs((B, H, L, D), (B, H, S, D), (B, H, S, D))
    shape = {"of both heads": (L + S,), "clamped": (H, 21), "of rows and columns": (H, 2, L + S)}.get(
        form, (H, L + S)
    )
    table = draw(*shape).requires_grad_()

    def learned(score, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        if form == "clamped":
            return score + table[h, distance.clamp(-10, 10) + 10]
        if form == "of both heads":
            return score * table[distance + S]
        if form == "of rows and columns":
            return score + table[h, 0, q_idx // 7 - kv_idx // 7 + S] + table[h, 1, q_idx % 7 - kv_idx % 7 + S]
        return score + table[h, distance + S]

    got = flex_attention(*own, learned, return_lse=True)
    same(got, formula(*true, learned), [*own, table], [*true, table])


class Swin(torch.nn.Module):
    """Swin's attention in windows of `side` by `side`, shifted by `shift`, over a square image."""

    def __init__(self, size, side, shift, heads, dim, attention):
        super().__init__()
        self.size, self.side, self.shift, self.heads, self.attention = size, side, shift, heads, attention
        self.qkv, self.out = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, dim)
        self.table = torch.nn.Parameter(0.5 * torch.randn((2 * side - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None] + side - 1
        self.index = apart[0] * (2 * side - 1) + apart[1]
        # Windows at the border join parts of the image that are far apart.
        part = torch.zeros(size, size)
        cuts = [slice(0, -side), slice(-side, -shift), slice(-shift, None)] if shift else [slice(None)]
        for number, (rows, columns) in enumerate((a, b) for a in cuts for b in cuts):
            part[rows, columns] = number
        part = self.windows(part[None, ..., None]).squeeze(-1)
        self.mask = torch.where(part[:, None] == part[:, :, None], 0.0, -100.0)

    def windows(self, x):
        batch, size, _, dim = x.shape
        x = x.reshape(batch, size // self.side, self.side, size // self.side, self.side, dim)
        return x.transpose(2, 3).reshape(-1, self.side**2, dim)

    def forward(self, x):
        x = self.windows(torch.roll(x, (-self.shift, -self.shift), (1, 2)))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attention(self, q, k, v).transpose(1, 2).flatten(2)).square().mean()


def eager(swin, q, k, v):
    bias = swin.table[swin.index].permute(2, 0, 1)
    mask = swin.mask.repeat(q.shape[0] // swin.mask.shape[0], 1, 1)[:, None]
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias + mask).softmax(-1) @ v


def by_program(swin, q, k, v):
    table, index, mask, count = swin.table, swin.index, swin.mask, swin.mask.shape[0]

    def score(s, b, h, q_idx, kv_idx):
        return s + table[index[q_idx, kv_idx], h] + mask[b % count, q_idx, kv_idx]

    return flex_attention(q, k, v, score)


def by_bias(swin, q, k, v):
    """A bias of the heads, and one of the windows of an image: each image is a batch of its own."""
    bias = swin.table[swin.index].permute(2, 0, 1)
    images = q.shape[0] // swin.mask.shape[0]
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    mask = swin.mask.repeat(images, 1, 1)[:, None]
    return fa_attn.flash_attn_func(*rows, bias=bias, mask=mask).transpose(1, 2)


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("attention", [by_program, by_bias])
def test_swins_windows_are_as_eager(attention, shift):
    torch.manual_seed(1)
    ours = Swin(14, 7, shift, 3, 48, attention)
    want = Swin(14, 7, shift, 3, 48, eager)
    want.load_state_dict(ours.state_dict())
    image = draw(2, 14, 14, 48)
    losses = ours(image), want(image)
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, x), y in zip(ours.named_parameters(), want.parameters()):
        assert x.grad.abs().max() > 0, name
        torch.testing.assert_close(x.grad, y.grad, atol=2e-6, rtol=1e-4, msg=name)
