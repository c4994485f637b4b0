#!/usr/bin/env python3
"""A small decoder with DeepSeek's multi-head latent attention: the tokens that it generates from a cache of
keys and values for each head, and from a cache of latents in pages, with the heads' projections absorbed into
queries and outputs.

    pip install fa-attn torch && python examples/mla_decode.py
"""

import time

import torch
from torch import nn
from torch.nn.functional import rms_norm

import fa_attn
from fa_attn.flash_mla import flash_mla_with_kvcache, get_mla_metadata

VOCABULARY, HIDDEN, LAYERS, HEADS = 256, 128, 3, 8
# Columns of a head without and with rotary embedding, of its values, and of the latent that all heads share.
NOPE, ROPE, VALUE, LATENT = 32, 16, 32, 64
SCALE = (NOPE + ROPE) ** -0.5
PAGE, ROOM = 16, 128


def turned(x, positions):
    """x (.., tokens, heads, ROPE) by rotary embedding, pairs from two halves."""
    frequencies = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    angles = positions[..., None, None] * frequencies
    one, two = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.latent = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        # Each head's keys and values from the latent.
        self.up = nn.Parameter(torch.randn(HEADS, NOPE + VALUE, LATENT) * LATENT**-0.5)
        self.out = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def rows(self, x, positions):
        """Queries (.., tokens, heads, NOPE + ROPE) and what a token adds to a cache of latents."""
        q = self.q(x).unflatten(-1, (HEADS, NOPE + ROPE))
        q = torch.cat([q[..., :NOPE], turned(q[..., NOPE:], positions)], -1)
        latent, key = self.latent(x).split([LATENT, ROPE], -1)
        row = torch.cat([rms_norm(latent, (LATENT,)), turned(key[..., None, :], positions)[..., 0, :]], -1)
        return q, row

    def heads(self, row):
        """Keys and values of all heads, of rows of latents."""
        each = torch.einsum("...l,hdl->...hd", row[..., :LATENT], self.up)
        key = row[..., None, LATENT:].expand(*each.shape[:-1], ROPE)
        return torch.cat([each[..., :NOPE], key], -1), each[..., NOPE:]

    def absorbed(self, q):
        """Queries that meet latents: each head's projection of keys is a factor of its queries."""
        meets = torch.einsum("...hd,hdl->...hl", q[..., :NOPE], self.up[:, :NOPE])
        return torch.cat([meets, q[..., NOPE:]], -1)

    def values(self, out):
        """Each head's values of attended latents."""
        return torch.einsum("...hl,hdl->...hd", out, self.up[:, NOPE:])


class Decoder(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        wide = (nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.others = nn.ModuleList(nn.Sequential(*map(copied, wide)) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens, positions, attend):
        """Logits; `attend` (layer, its attention, queries, rows) gives each head's values."""
        x = self.embedding(tokens)
        for layer, (attention, other) in enumerate(zip(self.attentions, self.others)):
            q, row = attention.rows(rms_norm(x, (HIDDEN,)), positions)
            x = x + attention.out(attend(layer, attention, q, row).flatten(-2))
            x = x + other(rms_norm(x, (HIDDEN,)))
        return self.head(rms_norm(x, (HIDDEN,)))


def copied(layer):
    return nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer


def eager(attention, q, row):
    """Attention by its definition, causal."""
    k, v = attention.heads(row)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * SCALE
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Heads:
    """A cache of each head's keys and values: (48 + 32) * 8 numbers a token here, 40,960 for DeepSeek."""

    def __init__(self, batch, dtype):
        self.k = torch.zeros(LAYERS, batch, ROOM, HEADS, NOPE + ROPE, dtype=dtype)
        self.v = torch.zeros(LAYERS, batch, ROOM, HEADS, VALUE, dtype=dtype)

    def filled(self, layer, attention, sequence, row):
        k, v = attention.heads(row[0])
        self.k[layer, sequence, : len(k)], self.v[layer, sequence, : len(v)] = k, v

    def step(self, lengths):
        def attend(layer, attention, q, row):
            k, v = attention.heads(row)
            return fa_attn.flash_attn_with_kvcache(
                q, self.k[layer], self.v[layer], k, v, cache_seqlens=lengths, causal=True, softmax_scale=SCALE
            )

        return attend


class Latents:
    """A cache of latents in pages: 64 + 16 numbers a token here, 576 for DeepSeek."""

    def __init__(self, batch, dtype):
        columns = ROOM // PAGE
        self.table = torch.randperm(batch * columns, dtype=torch.int32).view(batch, columns)
        self.rows = torch.full((LAYERS, batch * columns, PAGE, 1, LATENT + ROPE), torch.nan, dtype=dtype)

    def write(self, layer, sequences, positions, row):
        pages = self.table[sequences, positions // PAGE].long()
        self.rows[layer, pages, positions % PAGE, 0] = row

    def filled(self, layer, attention, sequence, row):
        self.write(layer, sequence, torch.arange(row.shape[1]), row[0])

    def step(self, lengths):
        # One for all layers of a step.
        metadata, splits = get_mla_metadata()

        def attend(layer, attention, q, row):
            self.write(layer, torch.arange(len(lengths)), lengths.long(), row[:, 0])
            out, _ = flash_mla_with_kvcache(
                attention.absorbed(q), self.rows[layer], self.table, lengths + 1, LATENT, metadata, splits,
                SCALE, causal=True,
            )  # fmt: skip
            return attention.values(out)

        return attend


@torch.no_grad()
def by_definition(model, prompt, count):
    """The tokens that follow a prompt, everything computed anew for each."""
    tokens = prompt[None]
    for _ in range(count):
        positions = torch.arange(tokens.shape[1])
        logits = model(tokens, positions, lambda layer, attention, q, row: eager(attention, q, row))
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :]


@torch.no_grad()
def generated(model, prompts, count, kind):
    """The tokens that follow each prompt (count, prompts), and the seconds of the steps."""
    cache = kind(len(prompts), model.head.weight.dtype)
    first = []
    for sequence, prompt in enumerate(prompts):

        def attend(layer, attention, q, row, sequence=sequence):
            cache.filled(layer, attention, sequence, row)
            k, v = attention.heads(row)
            return fa_attn.flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True)

        logits = model(prompt[None], torch.arange(len(prompt)), attend)
        first.append(logits[0, -1].argmax())
    tokens = [torch.stack(first)]
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    begin = time.perf_counter()
    for _ in range(count - 1):
        logits = model(tokens[-1][:, None], lengths[:, None], cache.step(lengths))
        tokens.append(logits[:, -1].argmax(-1))
        lengths += 1
    return torch.stack(tokens), time.perf_counter() - begin


def prompts_of(seed=1):
    torch.manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,)) for length in (40, 1, 17)]


def main(count=48):
    model, prompts = Decoder(), prompts_of()
    exact = torch.stack([by_definition(model, prompt, count) for prompt in prompts], 1)
    for kind in (Heads, Latents):
        tokens, seconds = generated(model, prompts, count, kind)
        same = (tokens == exact).sum().item()
        rate = (count - 1) * len(prompts) / seconds
        name, all_of = kind.__name__, exact.numel()
        print(f"{name:7}: {same} of {all_of} tokens as by the definition, {rate:.0f} a second")


if __name__ == "__main__":
    main()
