#!/usr/bin/env python3
"""Masks, changes of scores and biases of the user's own, beside torch's FlexAttention (Triton) and SDPA.

    python bench/mods.py OUT.json [SECONDS] [NAME ..]

Each row is checked first: rows of out and dQ against the formula in float32, dK and dV against a peer's. Then
the contestants are timed in turns, and the median of the turns counts. TFLOP/s are of visible pairs: 4
operations a pair and element of the head dim in the forward, 10 in the backward. "first" is the first forward
of the process and "first with gradients" the first backward after it, compiling included, in an empty cache
of kernels.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time

for _name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ[_name] = tempfile.mkdtemp(prefix="fa-mods-")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention as torch_flex  # noqa: E402

import fa_attn  # noqa: E402

B, HQ, HKV, N, D = 2, 32, 8, 8192, 128
DEVICE, DTYPE = "cuda", torch.bfloat16
TURNS, REST = 5, 0.02
LEAST = 0.03
BEGIN = time.time()


def documents(count, seed):
    """The document of each token, and where documents begin: five of unlike lengths that fill N."""
    lengths, rng = [], random.Random(seed)
    while len(lengths) < count - 1:
        lengths.append(rng.randint(734, 2429))
    last = N - sum(lengths)
    if not 700 < last < 2500:
        return documents(count, seed + 1)
    lengths.append(last)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    number = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths)).to(DEVICE, torch.int32)
    return number, starts, max(lengths)


# Mods, as users of flex_attention write them.


def causal(b, h, q, k):
    return q >= k


def prefix(b, h, q, k):
    return (q >= k) | (k < 1024)


def neighbourhood(b, h, q, k):
    return ((q // 64 - k // 64).abs() <= 6) & ((q % 64 - k % 64).abs() <= 6)


def dilated(b, h, q, k):
    return (q >= k) & ((q - k) % 4 == 0)


def soft_cap(score, b, h, q, k):
    return 30.0 * torch.tanh(score / 30.0)


def cases():
    number, starts, longest = documents(5, 3)
    slopes = torch.exp2(-torch.arange(1, HQ + 1, device=DEVICE, dtype=torch.float32) / 4)
    table = torch.randn(HQ, 2 * N - 1, device=DEVICE)

    def within(b, h, q, k):
        return (q >= k) & (number[q] == number[k])

    def alibi(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    def relative(score, b, h, q, k):
        return score + table[h, q - k + N - 1]

    def packed(q, k, v):
        # The same documents as sequences of a packed call.
        starts_of_all = torch.cat([starts[:-1] + at * N for at in range(B)] + [starts[-1:] + (B - 1) * N])
        rows = (x.transpose(1, 2).reshape(B * N, x.shape[1], D) for x in (q, k, v))
        out = fa_attn.flash_attn_varlen_func(
            *rows, starts_of_all, starts_of_all, longest, longest, causal=True
        )
        return out.view(B, N, HQ, D).transpose(1, 2)

    def built_in(**options):
        return lambda q, k, v: fa_attn.flash_attn_func(*map(swapped, (q, k, v)), **options).transpose(1, 2)

    yield "causal by program", causal, None, built_in(causal=True)
    yield "five documents, causal", within, None, packed
    yield "prefix-LM 1024", prefix, None, None
    yield "neighbourhood 13 x 13 of 128 x 64", neighbourhood, None, None
    yield "causal and (q - k) % 4 == 0", dilated, None, None
    yield "ALiBi by program", causal, alibi, built_in(causal=True, alibi_slopes=slopes)
    yield "soft cap by program", causal, soft_cap, built_in(causal=True, softcap=30.0)
    yield "table by q - k, causal", causal, relative, None
    yield "table by q - k, full", None, relative, None


# batch, heads, length, head dim, the shape of the bias, and whether a gradient of it is wanted as well.
BIASES = [
    (1, 16, 4096, 64, (1, 16, 4096, 4096), True),
    (1, 16, 4096, 128, (1, 16, 4096, 4096), True),
    (64, 16, 512, 64, (1, 16, 512, 512), True),
    (8, 12, 1024, 64, (8, 1, 1, 1024), False),
    (64, 4, 384, 32, (1, 4, 384, 384), True),
]


def swapped(x):
    return x.transpose(1, 2)


def draw(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE, requires_grad=True)


def seconds(call):
    torch.cuda.synchronize()
    begin = time.time()
    made = call()
    torch.cuda.synchronize()
    return made, time.time() - begin


def milliseconds(call, times):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def in_turns(calls):
    """The median time of each call in ms, timed one after the other in each turn."""
    times = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        times[name] = max(3, int(LEAST * 1e3 / max(milliseconds(call, 2), 1e-3)))
    found = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            time.sleep(REST)
            found[name].append(milliseconds(call, times[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def pairs_of(mask, batch, heads):
    if mask is None:
        return batch * heads * N * N
    k, count = torch.arange(N, device=DEVICE)[None], 0
    for begin in range(0, N, 1024):
        q = torch.arange(begin, begin + 1024, device=DEVICE)[:, None]
        count += int(mask(0, 0, q, k).sum())
    return batch * heads * count


def formula(q, k, v, dout, rows, mask, score, bias=None):
    """out and dQ of some rows of the last head of the last sequence, in float32."""
    b, h = q.shape[0] - 1, q.shape[1] - 1
    own = q[b, h, rows].detach().float().requires_grad_()
    keys, values = (x[b, h * x.shape[1] // q.shape[1]].detach().float() for x in (k, v))
    s = own @ keys.T / q.shape[-1] ** 0.5
    at = rows[:, None], torch.arange(k.shape[2], device=DEVICE)[None]
    if score is not None:
        s = score(s, torch.tensor(b, device=DEVICE), torch.tensor(h, device=DEVICE), *at)
    if bias is not None:
        s = (
            s
            + bias.detach()
            .float()
            .expand(q.shape[0], q.shape[1], *bias.shape[2:])[b, h, rows % bias.shape[2]]
        )
    if mask is not None:
        s = s.masked_fill(~mask(b, h, *at), float("-inf"))
    out = s.softmax(-1) @ values
    return out, torch.autograd.grad(out, own, dout[b, h, rows].float())[0]


def differences(got, want):
    """The largest error as a share of the largest value."""
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6))


def measured(row, calls, inputs, dout, reference, operations, extra=()):
    """Fills in the row: first calls, errors and rates of each contestant."""
    rows = torch.randperm(inputs[0].shape[2], device=DEVICE)[:64]
    want, want_dq = reference(rows)
    forwards, backwards, peer = {}, {}, None
    for name, call in calls.items():
        wanted = [*inputs, *extra] if name != "ours, no bias" else list(inputs)
        try:
            out, row[f"{name}: first s"] = seconds(lambda: call(*inputs))
            grads, row[f"{name}: first with gradients s"] = seconds(
                lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True)
            )
        except Exception as error:  # A peer without the form.
            row[f"{name}: error"] = repr(error)[:200]
            continue
        if name != "ours, no bias":
            at = inputs[0].shape[0] - 1, inputs[0].shape[1] - 1
            errors = [differences(out[at][rows], want), differences(grads[0][at][rows], want_dq)]
            if peer is None:
                peer = grads
            errors += [differences(x, y) for x, y in zip(grads[1:], peer[1:])]
            row[f"{name}: errors"] = errors
            if not max(errors) < 0.05:
                row[f"{name}: error"] = f"results differ: {errors}"
                continue
        forwards[name] = lambda call=call: call(*inputs)
        backwards[name] = lambda out=out, wanted=wanted: torch.autograd.grad(
            out, wanted, dout, retain_graph=True
        )
    with torch.no_grad():
        for name, ms in in_turns(forwards).items():
            row[f"{name}: fwd"] = operations / ms / 1e9
    for name, ms in in_turns(backwards).items():
        row[f"{name}: bwd"] = 2.5 * operations / ms / 1e9


def main():
    out, limit = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 500.0
    chosen = sys.argv[3:]
    torch._dynamo.config.cache_size_limit = 1000
    torch.manual_seed(0)
    table = []

    def is_wanted(name):
        return (not chosen or any(part in name for part in chosen)) and time.time() - BEGIN < limit

    def put(row):
        table.append(row)
        with open(out + ".part", "w") as file:
            json.dump(
                dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, rows=table), file, indent=1
            )
        os.replace(out + ".part", out)
        print(
            f"[{time.time() - BEGIN:.0f} s] {row['case']}",
            {k: v for k, v in row.items() if "error" in k},
            flush=True,
        )

    for name, mask, score, built_in in cases():
        if not is_wanted(name):
            continue
        q, k, v = draw(B, HQ, N, D), draw(B, HKV, N, D), draw(B, HKV, N, D)
        dout = draw(B, HQ, N, D).detach()
        row = dict(case=name)
        ours, row["ours: mask s"] = seconds(
            lambda: mask and fa_attn.create_block_mask(mask, None, None, N, N, device=DEVICE)
        )
        theirs, row["flex: mask s"] = seconds(
            lambda: mask and torch.compile(torch_block_mask)(mask, None, None, N, N, device=DEVICE)
        )
        compiled = torch.compile(torch_flex, dynamic=False)
        calls = {
            "flex": lambda *x: compiled(
                *x, score_mod=score, block_mask=theirs, enable_gqa=True, kernel_options={"BACKEND": "TRITON"}
            ),
            "ours": lambda *x: fa_attn.flex_attention(*x, score, ours, enable_gqa=True),
        }
        if built_in is not None:
            calls["built in"] = built_in
        operations = 4.0 * D * pairs_of(mask, B, HQ)
        measured(
            row, calls, (q, k, v), dout, lambda rows: formula(q, k, v, dout, rows, mask, score), operations
        )
        put(row)

    for batch, heads, length, dim, shape, learns in BIASES:
        for with_gradient in (False, True) if learns else (False,):
            name = (
                f"bias {shape} on {batch} x {heads} x {length}, hd {dim}{', dBias' if with_gradient else ''}"
            )
            if not is_wanted(name):
                continue
            q, k, v = (draw(batch, heads, length, dim) for _ in range(3))
            dout = draw(batch, heads, length, dim).detach()
            bias = torch.randn(*shape, device=DEVICE, dtype=DTYPE).requires_grad_(with_gradient)
            seen = None
            if shape[2] == 1:
                # Padding: keys that no query sees.
                seen = torch.arange(length, device=DEVICE) < torch.randint(
                    length // 2, length, (batch, 1), device=DEVICE
                )
                seen = seen[:, None, None]

            def by_torch(backend):
                attn_mask = (bias if seen is None else seen).expand(batch, heads, length, length)

                def call(*x):
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(*x, attn_mask=attn_mask)

                return call

            calls = {
                "efficient": by_torch(SDPBackend.EFFICIENT_ATTENTION),
                "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION),
                "ours": lambda *x: fa_attn.scaled_dot_product_attention(
                    *x, attn_mask=bias if seen is None else seen
                ),
                "ours, no bias": lambda *x: fa_attn.scaled_dot_product_attention(*x),
            }
            row = dict(case=name)
            mask = None if seen is None else (lambda b, h, i, j: seen[b, 0, 0][j])
            own = None if seen is not None else bias
            measured(
                row,
                calls,
                (q, k, v),
                dout,
                lambda rows: formula(q, k, v, dout, rows, mask, None, own),
                4.0 * batch * heads * dim * length * length,
                (bias,) if with_gradient else (),
            )
            put(row)

    print("\nTFLOP/s, forward / backward; first forward s")
    for row in table:
        shown = []
        for name in ("ours", "built in", "ours, no bias", "flex", "cudnn", "efficient"):
            if f"{name}: fwd" in row:
                first = row[f"{name}: first s"]
                shown.append(f"{name} {row[f'{name}: fwd']:.0f} / {row[f'{name}: bwd']:.0f} ({first:.1f})")
        print(f"{row['case']}: {'; '.join(shown)}")


if __name__ == "__main__":
    main()
