"""Triangle attention of protein models (N rows of S queries and keys, a bias that the rows share) beside
cuEquivariance, where it is installed, and torch's "efficient" attention: microseconds of a forward, and of a
forward with a backward that has the bias's gradient.

    pip install cuequivariance-ops-torch-cu13
    python bench/triangles.py                   # CUDA graphs on a GPU

Each is compared with float64 first, under a mask of random keys. "random" hides a fifth of the keys of each row,
"padding" those behind a random length of at least half; one graph is replayed of each, in turns.
"""

import math
import os
import statistics

os.environ.setdefault("CUEQ_TRIATTN_FALLBACK_THRESHOLD", "0")

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_attn

HEADS, DIM = 4, 32
SIZES = (256, 384, 512, 768)
# Its scores and the mask that is added to them are tensors of rows x heads x queries x keys.
MOST_OF_EFFICIENT = 512
ROUNDS = 9


def efficient(q, k, v, bias, mask):
    whole = bias.expand(*q.shape[:4], k.shape[3]).flatten(0, 1)
    if mask is not None:
        whole = whole + torch.where(mask, 0.0, -1e9).to(bias.dtype).flatten(0, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=whole)[None]


def implementations():
    found = dict(ours=fa_attn.triangle_attention, efficient=efficient)
    try:
        import cuequivariance_ops_torch
    except ImportError:
        return found
    return dict(found, cuequivariance=cuequivariance_ops_torch.triangle_attention)


def tensors(rows, length, hides):
    torch.manual_seed(0)
    shape = (1, rows, HEADS, length, DIM)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    bias = torch.randn(1, 1, HEADS, length, length, device="cuda", dtype=torch.bfloat16)
    mask = None
    if hides == "random":
        mask = torch.rand(1, rows, 1, 1, length, device="cuda") > 0.2
    elif hides == "padding":
        lengths = torch.randint(length // 2, length, (1, rows, 1, 1, 1), device="cuda")
        mask = torch.arange(length, device="cuda") < lengths
    return (q, k, v, bias), mask, dout


def both(call, inputs, mask, dout):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs, mask)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def formula(q, k, v, bias, mask):
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def check(calls):
    """Raises where a result is not that of float64."""
    inputs, mask, dout = tensors(32, 200, "random")
    want = both(formula, [x.double() for x in inputs], mask, dout.double())
    for name, call in calls.items():
        for found, exact in zip(both(call, inputs, mask, dout), want):
            error = (found.double() - exact).norm() / exact.norm()
            if not error < 1e-2:
                raise RuntimeError(f"{name} differs from float64 by {error:.2g}")


def graph(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        kept = call()
    return made, kept


def times(graphs):
    """The median microseconds of each, in turns."""
    taken = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (made, _) in graphs.items():
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            made.replay()
            ended.record()
            torch.cuda.synchronize()
            taken[name].append(1e3 * begun.elapsed_time(ended))
    return {name: round(statistics.median(own)) for name, own in taken.items()}


def main():
    calls = implementations()
    check(calls)
    print("us of a forward; of a forward and a backward with the bias's gradient")
    for size in SIZES:
        for hides in ("nothing", "random", "padding"):
            inputs, mask, dout = tensors(size, size, hides)
            own = {name: call for name, call in calls.items() if name != "efficient" or size <= MOST_OF_EFFICIENT}
            with torch.no_grad():
                forward = times({name: graph(lambda: call(*inputs, mask)) for name, call in own.items()})
            whole = times({name: graph(lambda: both(call, inputs, mask, dout)) for name, call in own.items()})
            print(f"{size}^3, {HEADS} heads of {DIM}, {hides} hidden:", forward, whole, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
