#!/usr/bin/env python3
"""Forward and backward of head dim 512 on a GPU, beside torch's own attention.

    python bench/wide_gradients.py

bf16, random normal inputs; milliseconds, medians of eight runs. Gradients of two sequences of 200 rows, with
the same heads and mask, are checked against the formula in float64 first.
"""

import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fa_attn

ROWS = [(2, 4096, 8, 4, True), (2, 4096, 8, 4, False), (1, 8192, 8, 1, True)]
PEERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def milliseconds(call):
    call()
    times = []
    for _ in range(8):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def drawn(batch, rows, heads, heads_kv):
    options = dict(device="cuda", dtype=torch.bfloat16)
    made = [torch.randn(batch, rows, h, 512, **options) for h in (heads, heads_kv, heads_kv, heads)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def repeated(tensors):
    """Torch's layout, with a head of K and V for each of Q."""
    q, k, v = tensors
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    return [x.transpose(1, 2) for x in (q, k, v)]


def check(heads, heads_kv, is_causal):
    tensors, dout = drawn(2, 200, heads, heads_kv)
    got = torch.autograd.grad(fa_attn.flash_attn_func(*tensors, causal=is_causal), tensors, dout)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*repeated(doubles), is_causal=is_causal).transpose(1, 2)
    for one, other in zip(got, torch.autograd.grad(out, doubles, dout.double())):
        apart = ((one - other).norm() / other.norm()).item()
        assert apart < 1e-2, f"a gradient is {apart:.1e} from the formula's"


def main():
    for batch, rows, heads, heads_kv, is_causal in ROWS:
        check(heads, heads_kv, is_causal)
        tensors, dout = drawn(batch, rows, heads, heads_kv)
        out = fa_attn.flash_attn_func(*tensors, causal=is_causal)
        with torch.no_grad():
            forward = milliseconds(lambda: fa_attn.flash_attn_func(*tensors, causal=is_causal))
        found = milliseconds(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True))
        line = f"{batch} x {rows}, {heads}:{heads_kv}, {'causal' if is_causal else 'full'}: "
        line += f"forward {forward:.2f}, backward {found:.2f}"
        for peer in PEERS:
            with sdpa_kernel(peer):
                theirs = repeated(tensors)
                out = scaled_dot_product_attention(*theirs, is_causal=is_causal)
                given = dout.transpose(1, 2)
                found = milliseconds(lambda: torch.autograd.grad(out, theirs, given, retain_graph=True))
            line += f"; {peer.name.lower()} {found:.2f}"
        print(line, flush=True)


main()
