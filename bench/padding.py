#!/usr/bin/env python3
"""What padding costs in transformers' models: a step of decoding, a prompt and a step of training, of batches of 5 and 16
sequences of which one is padded, beside the same without padding and torch's own attention.

    python bench/padding.py [cpu|cuda]
"""

import sys
import time
import types

import torch

import fa_attn.transformers

GPU = (sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu") == "cuda"
DEVICE = "cuda" if GPU else "cpu"
HEADS, HEADS_KV, DIM, KEYS = (32, 8, 128, 4096) if GPU else (8, 2, 64, 1024)
MODULE = types.SimpleNamespace(is_causal=True)


def tensors(batch, rows, of_cache):
    """As projections lay them out, and caches their keys and values."""

    def make(heads, rows, by_head):
        x = torch.randn((batch, heads, rows, DIM) if by_head else (batch, rows, heads, DIM), device=DEVICE)
        return (x if by_head else x.transpose(1, 2)).bfloat16()

    return make(HEADS, rows, False), make(HEADS_KV, KEYS, of_cache), make(HEADS_KV, KEYS, of_cache)


def seconds(steps, repeats):
    """The least time of each step; they take turns."""
    least = {}
    for turn in range(repeats + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if GPU:
                torch.cuda.synchronize()
            if turn >= 2:
                least[name] = min(least.get(name, 1e9), time.perf_counter() - begin)
    return least


def steps_of(batch, form):
    rows = 1 if form == "step" else KEYS
    x = [t.requires_grad_(form == "training") for t in tensors(batch, rows, form != "training")]

    def step(attend):
        out = attend(*x)
        if form == "training":
            torch.autograd.grad(out, x, torch.ones_like(out))

    def ours(mask):
        return lambda: step(lambda *x: fa_attn.transformers.attention(MODULE, *x, mask)[0])

    found = {}
    for name, left, right in (("whole", 0, 0), ("right", 0, KEYS // 3), ("left", KEYS // 3, 0)):
        given = torch.ones(batch, KEYS, dtype=torch.bool, device=DEVICE)
        given[1, :left], given[1, KEYS - right :] = False, False
        lengths = dict(batch_size=batch, q_length=rows, kv_length=KEYS, q_offset=KEYS - rows)
        mask = fa_attn.transformers.mask(**lengths, attention_mask=given, device=DEVICE)
        found[name] = ours(mask)
    sdpa, seen = torch.nn.functional.scaled_dot_product_attention, mask.tensor()
    found["torch"] = lambda: step(lambda *x: sdpa(*x, attn_mask=seen, enable_gqa=True))
    return found


def main():
    torch.manual_seed(0)
    print(f"{HEADS} heads on {HEADS_KV} of {DIM}, {KEYS} keys, bf16, {DEVICE}: ms, and how many times the whole")
    for batch in (5, 16):
        for form in ("step", "prompt", "training"):
            times = seconds(steps_of(batch, form), 20 if form == "step" or GPU else 3)
            whole = times.pop("whole")
            others = ", ".join(f"{name} {t * 1e3:.2f} ({t / whole:.2f}x)" for name, t in times.items())
            print(f"batch {batch:2d}, {form:8s}: {whole * 1e3:.2f}, {others}", flush=True)


if __name__ == "__main__":
    main()
