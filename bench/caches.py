#!/usr/bin/env python3
"""Tokens per second of decoders by what their caches hold: layers of a Llama on keys and values in bf16, e4m3, int8 and
int4 (with a descale for each row and head), and of DeepSeek's multi-head latent attention (MLA) on latents, absorbed.

    python bench/caches.py [cpu|cuda] [--batch N] [--keys N] [--steps N] [--layers N]

On a GPU the layers have the sizes of Llama 3 8B and DeepSeek-V3 (with a dense MLP), on the CPU small ones; weights and
what caches hold are random. A step is everything from the tokens to the next ones: on a GPU one CUDA graph, whose
lengths grow from replay to replay. Caches are in pages of 64, shuffled; new rows are appended, and quantised, by the
call. Beside the rate stand a step's time and what of it is attention: the difference to the same step without, in turns.
"""

import argparse
import time
from functools import partial

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

import fa_attn
from fa_attn.flash_mla import flash_mla_with_kvcache, get_mla_metadata

PAGE = 64
BF16 = torch.bfloat16


class Llama:
    """Sizes of Llama 3 8B's layers, or small ones."""

    name = "Llama"

    def __init__(self, small):
        self.hidden, self.inner, self.vocabulary = (256, 512, 512) if small else (4096, 14336, 128256)
        self.heads, self.heads_kv, self.dim = (8, 2, 64) if small else (32, 8, 128)
        self.values = self.dim

    def projections(self, new):
        return {"qkv": new(self.hidden, (self.heads + 2 * self.heads_kv) * self.dim)}

    def bytes_of(self, cache):
        # Of int4 with the descales of each row.
        row = {"bf16": 2 * self.dim, "int4": self.dim // 2 + 4}.get(cache, self.dim)
        return 2 * self.heads_kv * row

    def filled(self, cache, layers, batch, keys, device):
        return Pages(self, cache, layers, batch, keys, device)


class Latents:
    """Sizes of DeepSeek-V3's attention, or small ones."""

    name = "MLA, absorbed"

    def __init__(self, small):
        self.hidden, self.inner, self.vocabulary = (256, 512, 512) if small else (7168, 18432, 129280)
        self.heads, self.query = (16, 96) if small else (128, 1536)
        self.nope, self.rope, self.values, self.latent = (32, 16, 32, 64) if small else (128, 64, 128, 512)

    def projections(self, new):
        return {
            "down_q": new(self.hidden, self.query),
            "up_q": new(self.query, self.heads * (self.nope + self.rope)),
            "row": new(self.hidden, self.latent + self.rope),
            # Of each head: what meets latents, and what makes values of them.
            "up_k": new(self.heads, self.nope, self.latent),
            "up_v": new(self.heads, self.latent, self.values),
        }

    def bytes_of(self, cache):
        return 2 * (self.latent + self.rope)

    def filled(self, cache, layers, batch, keys, device):
        return LatentPages(self, layers, batch, keys, device)


def table_of(batch, keys, device):
    columns = -(-keys // PAGE)
    return torch.randperm(batch * columns, device=device).to(torch.int32).view(batch, columns)


def angles_of(positions, columns, device):
    rates = 500000.0 ** (-torch.arange(0, columns, 2, device=device) / columns)
    return positions[..., None].float() * rates


class Pages:
    """Keys and values of each layer."""

    def __init__(self, sizes, cache, layers, batch, keys, device):
        self.sizes, self.table = sizes, table_of(batch, keys, device)
        shape = (self.table.numel(), PAGE, sizes.heads_kv, sizes.dim)
        self.layers = []
        for _ in range(layers):
            both = [torch.randn(shape, device=device, dtype=BF16) for _ in range(2)]
            descales = {}
            if cache != "bf16":
                per = "token_head" if cache == "int4" else "head"
                both, own = zip(*(fa_attn.quantize_kv(x, cache, per) for x in both))
                descales = dict(zip(("k_descale", "v_descale"), own))
                descales["kv_cache_dtype"] = "int4" if cache == "int4" else None
            self.layers.append((*both, descales))
        angles = angles_of(torch.arange(keys, device=device), sizes.dim, device)
        self.turns = dict(rotary_cos=angles.cos().to(BF16), rotary_sin=angles.sin().to(BF16))
        self.blank = torch.zeros(batch, 1, sizes.heads, sizes.dim, device=device, dtype=BF16)

    def step(self, lengths, attends=True):
        sizes = self.sizes

        def attend(layer, own, x):
            heads = [sizes.heads, sizes.heads_kv, sizes.heads_kv]
            q, k, v = (x @ own["qkv"]).unflatten(-1, (-1, sizes.dim)).split(heads, -2)
            k_cache, v_cache, descales = self.layers[layer]
            if not attends:
                # Contiguous as O is: cuBLAS takes another kernel for Q, a view, eight times slower.
                return self.blank
            return fa_attn.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=self.table, causal=True,
                rotary_interleaved=False, **self.turns, **descales,
            )  # fmt: skip

        return attend


class LatentPages:
    """The latents of each layer, behind each the key's columns with rotary embedding."""

    def __init__(self, sizes, layers, batch, keys, device):
        self.sizes, self.table = sizes, table_of(batch, keys, device)
        shape = (self.table.numel(), PAGE, 1, sizes.latent + sizes.rope)
        self.layers = [torch.randn(shape, device=device, dtype=BF16) for _ in range(layers)]

    def step(self, lengths, attends=True):
        sizes, (metadata, splits) = self.sizes, get_mla_metadata()
        scale = (sizes.nope + sizes.rope) ** -0.5
        places = lengths.long()
        pages = self.table.gather(1, places[:, None] // PAGE)[:, 0].long()
        angles = angles_of(lengths, sizes.rope, lengths.device)[:, None, None]
        cos, sin = angles.cos(), angles.sin()

        def turned(x):
            one, two = x.float().chunk(2, -1)
            return torch.cat([one * cos - two * sin, one * sin + two * cos], -1).to(x.dtype)

        def attend(layer, own, x):
            q = (rms_norm(x @ own["down_q"], (sizes.query,)) @ own["up_q"]).unflatten(-1, (sizes.heads, -1))
            q, q_rope = q.split([sizes.nope, sizes.rope], -1)
            latent, key = (x @ own["row"])[:, :, None].split([sizes.latent, sizes.rope], -1)
            row = torch.cat([rms_norm(latent, (sizes.latent,)), turned(key)], -1)
            cache = self.layers[layer]
            cache[pages, places % PAGE] = row[:, 0]
            # By heads: (heads, batch, columns) times each head's matrix.
            meets = torch.bmm(q[:, 0].transpose(0, 1), own["up_k"]).transpose(0, 1)[:, None]
            q, out = torch.cat([meets, turned(q_rope)], -1), meets
            if attends:
                call = (cache, self.table, lengths + 1, sizes.latent, metadata, splits, scale)
                out, _ = flash_mla_with_kvcache(q, *call, causal=True)
            return torch.bmm(out[:, 0].transpose(0, 1), own["up_v"]).transpose(0, 1)[:, None]

        return attend


class Decoder:
    def __init__(self, sizes, layers, device):
        self.sizes = sizes

        def new(*shape):
            return torch.randn(shape, device=device, dtype=BF16) * shape[-2] ** -0.5

        self.embedding, self.head = new(sizes.vocabulary, sizes.hidden), new(sizes.hidden, sizes.vocabulary)
        self.layers = [
            {
                **sizes.projections(new),
                "out": new(sizes.heads * sizes.values, sizes.hidden),
                "gate": new(sizes.hidden, 2 * sizes.inner),
                "down": new(sizes.inner, sizes.hidden),
            }
            for _ in range(layers)
        ]

    def __call__(self, tokens, attend):
        """The tokens that follow, (batch, 1)."""
        hidden = (self.sizes.hidden,)
        x = nn.functional.embedding(tokens, self.embedding)
        for layer, own in enumerate(self.layers):
            x = x + attend(layer, own, rms_norm(x, hidden)).flatten(-2) @ own["out"]
            gate, up = (rms_norm(x, hidden) @ own["gate"]).chunk(2, -1)
            x = x + (silu(gate) * up) @ own["down"]
        return (rms_norm(x, hidden) @ self.head).argmax(-1)


def step_of(decoder, attends, lengths, tokens, device):
    """A step, on a GPU a graph of it: its tokens become the next ones, and its lengths grow."""

    def step():
        tokens.copy_(decoder(tokens, attends(lengths)))
        lengths.add_(1)

    if device == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_of(decoder, all_attends, keys, batch, steps, device):
    """The median time of a step of each in `all_attends`, measured in turns."""
    lengths = [torch.zeros(batch, dtype=torch.int32, device=device) for _ in all_attends]
    tokens = [torch.zeros(batch, 1, dtype=torch.long, device=device) for _ in all_attends]
    for own in lengths:
        own.fill_(keys)
    runs = [step_of(decoder, *own, device) for own in zip(all_attends, lengths, tokens)]
    for run, own in zip(runs, lengths):
        run()
        own.fill_(keys)
    times = [[] for _ in runs]
    for _ in range(steps):
        for run, own in zip(runs, times):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            own.append(time.perf_counter() - begin)
    assert all((own == keys + steps).all() for own in lengths)
    return [sorted(own)[steps // 2] for own in times]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--batch", type=int, help="sequences (64; 4 on the CPU)")
    parser.add_argument("--keys", type=int, help="keys of each before the first step (4096; 1024)")
    parser.add_argument("--steps", type=int, help="steps that are measured (64; 8)")
    parser.add_argument("--layers", type=int, help="layers (4; 2)")
    given = parser.parse_args()
    small = given.device == "cpu"
    defaults = dict(zip(("batch", "keys", "steps", "layers"), (4, 1024, 8, 2) if small else (64, 4096, 64, 4)))
    batch, keys, steps, layers = (
        default if getattr(given, name) is None else getattr(given, name) for name, default in defaults.items()
    )
    if min(batch, keys, steps, layers) < 1:
        parser.error(f"batch, keys, steps and layers are {batch}, {keys}, {steps}, {layers}: each must be 1 or more")
    torch.manual_seed(0)
    name = "CPU" if small else torch.cuda.get_device_name()
    print(f"{name}: {batch} sequences of {keys} keys, {layers} layers, {steps} steps, the median\n")
    print("| decoder | cache | bytes of a token and layer | tokens per second | of bf16 | ms of a step | attention |")
    print("|---|---|---|---|---|---|---|")
    for sizes, caches in ((Llama(small), ("bf16", "e4m3", "int8", "int4")), (Latents(small), ("bf16",))):
        decoder, first = Decoder(sizes, layers, given.device), None
        for cache in caches:
            # Steps beside those that are measured: two, and one on a GPU.
            filled = sizes.filled(cache, layers, batch, keys + steps + 3, given.device)
            both = [filled.step, partial(filled.step, attends=False)]
            seconds, without = seconds_of(decoder, both, keys, batch, steps, given.device)
            first = first or seconds
            cells = (sizes.name, cache, sizes.bytes_of(cache), f"{batch / seconds:.0f}", f"{first / seconds:.2f}")
            print("|", *(f"{cell} |" for cell in cells), f"{seconds * 1e3:.3f} |", end=" ")
            print(f"{(seconds - without) * 1e3:.3f} |", flush=True)
            del filled


if __name__ == "__main__":
    main()
