"""Causal attention over the GPUs of one host: `fa_attn.distributed` by the scheme that it chooses and by each
of three, beside torch's `context_parallel` and, where it is installed, ring-flash-attention's zigzag function
(on whatever `flash_attn` is, as python/shim), each as a share of one GPU that computes all of it by the same
library in the same run. The multicast of NVSwitch stays off, as for `fa dist bench`.

    python bench/over_ranks.py --ranks 2                      # GPUs, NCCL
    python bench/over_ranks.py --ranks 2 --cpu --lengths 512  # gloo: shows that it runs, not rates

Outputs over ranks are compared with those of one GPU first. A row has the milliseconds of a forward, and of a
forward with a backward; the slowest rank counts.
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HEADS = ((32, 8), (64, 8), (32, 32))
DIM = 128


def seconds(call, device, runs, group_size):
    """The median time of a call, of the slowest rank."""
    times = []
    for run in range(runs + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        if group_size > 1:
            dist.barrier()
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if run >= 2:
            times.append(time.perf_counter() - begun)
    slowest = torch.tensor([statistics.median(times)], device=device)
    if group_size > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measured(forward, tensors, dout, device, runs, group_size):
    """Seconds of a forward, and of a forward with a backward."""

    def both():
        for x in tensors:
            x.grad = None
        forward().backward(dout)

    with torch.no_grad():
        one = seconds(forward, device, runs, group_size)
    return one, seconds(both, device, runs, group_size)


def check(own, whole, axis):
    """Raises where a rank's rows are not those of one GPU."""
    from fa_attn.distributed import shard

    difference = (own.float() - shard(whole, axis).float()).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if not difference.item() < 2e-2:
        raise RuntimeError(f"differs from one GPU by {difference.item():.3g}")


def ours(whole, mesh, scheme=None):
    """(over ranks, on one GPU), each a context to be in, a function and its tensors, and the axis of rows."""
    from fa_attn import distributed, flash_attn_func

    local = [distributed.shard(x).detach().requires_grad_() for x in whole]
    alone = [x.detach().clone().requires_grad_() for x in whole]
    return (
        (nullcontext(), lambda: distributed.attention(*local, causal=True, scheme=scheme), local),
        (nullcontext(), lambda: flash_attn_func(*alone, causal=True), alone),
    ), 1


def torchs(whole, mesh):
    """torch's, whose tensors are (batch, heads, rows, dim)."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional

    from fa_attn.distributed import shard

    turned = [x.transpose(1, 2).contiguous() for x in whole]
    # Its autograd takes as many heads of each.
    heads = turned[0].shape[1]
    alone = [x.repeat_interleave(heads // x.shape[1], 1).requires_grad_() for x in turned]
    local = [shard(x.detach(), 2).requires_grad_() for x in alone]
    # It asks for one buffer, which it cuts.
    length = torch.zeros(turned[0].shape[2], device=turned[0].device)
    return (
        (
            context_parallel(mesh, buffers=[length], buffer_seq_dims=[0]),
            # Replaced within the context.
            lambda: functional.scaled_dot_product_attention(*local, is_causal=True),
            local,
        ),
        (nullcontext(), lambda: functional.scaled_dot_product_attention(*alone, is_causal=True), alone),
    ), 2


def rings(whole, mesh):
    """ring-flash-attention's, on the kernels of whatever `flash_attn` is."""
    from flash_attn import flash_attn_func
    from ring_flash_attn import zigzag_ring_flash_attn_func

    from fa_attn.distributed import shard

    local = [shard(x).detach().requires_grad_() for x in whole]
    alone = [x.detach().clone().requires_grad_() for x in whole]
    return (
        (nullcontext(), lambda: zigzag_ring_flash_attn_func(*local, causal=True), local),
        (nullcontext(), lambda: flash_attn_func(*alone, causal=True), alone),
    ), 1


LIBRARIES = (
    ("fa", ours),
    ("fa gather", partial(ours, scheme="gather")),
    ("fa ring", partial(ours, scheme="ring")),
    ("fa ulysses", partial(ours, scheme="ulysses")),
    ("ring_flash_attn", rings),
    ("torch", torchs),
)


def counts(text):
    """Heads of Q and of K and V."""
    return tuple(map(int, text.split(":")))


def start(rank, args, path):
    device = torch.device("cpu") if args.cpu else torch.device("cuda", rank)
    if not args.cpu:
        torch.cuda.set_device(device)
    backend = "gloo" if args.cpu else "nccl"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=args.ranks)
    mesh = dist.device_mesh.init_device_mesh(device.type, (args.ranks,))
    if rank == 0:
        header = f"{'shape':<18} {'library':<16} {'pass':<8} {'1 GPU ms':>10} {'ms':>10} {'per GPU':>8}"
        print(header, flush=True)
    for length in args.lengths:
        for heads_q, heads_kv in args.heads:
            torch.manual_seed(0)
            shapes = [(1, length, count, DIM) for count in (heads_q, heads_kv, heads_kv)]
            whole = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
            for name, make in LIBRARIES:
                shape = f"{length} {heads_q}:{heads_kv}"
                try:
                    found, outs = [], []
                    contestants, axis = make(whole, mesh)
                    for context, call, tensors in contestants:
                        with context:
                            outs.append(call().detach())
                            dout = torch.randn_like(tensors[0])
                            found.append(measured(call, tensors, dout, device, args.runs, args.ranks))
                    check(*outs, axis)
                except (ImportError, RuntimeError) as error:
                    if rank == 0:
                        print(f"{shape:<18} {name:<16} {str(error).splitlines()[0]}", flush=True)
                    continue
                for of, over, alone in zip(("fwd", "fwd+bwd"), *found):
                    if rank == 0:
                        share = 100 * alone / over / args.ranks
                        row = f"{shape:<18} {name:<16} {of:<8} {alone * 1e3:>10.3f} {over * 1e3:>10.3f}"
                        print(f"{row} {share:>7.1f}%", flush=True)
    dist.destroy_process_group()


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=counts, nargs="+", default=HEADS, help="as 32:8")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="over gloo, without GPUs")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (args, os.path.join(folder, "store")), nprocs=args.ranks)


if __name__ == "__main__":
    main()
