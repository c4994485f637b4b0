#!/usr/bin/env python3
"""Host time of a call through Python: this library's beside those of FlashAttention 3 and 4 where they are installed
(wheels fa3-fwd and flash-attn-4), for a small problem.

    python bench/host_time.py [--json | --warm]

A peer that is not installed, or has no backward, is named and left out. FlashAttention-4 compiles a kernel in some ten
seconds: `--warm`, with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, compiles all of them beforehand, side by side.
Calls are enqueued in rounds of so many that the queue does not fill, and the clock is read before the GPU is waited for:
what is measured is the time that the host takes, unless the GPU is slower; its own time stands beside. Peers take turns,
the median over rounds counts.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

import torch

ROUNDS = 41
CALLS = 50


def ours():
    import fa_attn

    def call(q, k, v, causal):
        return fa_attn.flash_attn_func(q, k, v, causal=causal)

    return call


def fa3():
    import fa3_fwd_interface

    def call(q, k, v, causal):
        return fa3_fwd_interface.flash_attn_func(q, k, v, causal=causal)

    return call


def fa4():
    import flash_attn.cute

    def call(q, k, v, causal):
        return flash_attn.cute.flash_attn_func(q, k, v, causal=causal)

    return call


def sdpa():
    from torch.nn.functional import scaled_dot_product_attention

    def call(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


ROWS = [("fwd", False), ("fwd", True), ("fwd+bwd", False), ("fwd+bwd", True)]


def work_of(mode, causal):
    """A step by a peer's call."""
    inputs = [torch.randn(1, 256, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if mode != "fwd":
        inputs = [x.requires_grad_() for x in inputs]
    dout = torch.randn_like(inputs[0])

    def work(call):
        out = call(*inputs, causal)
        out = out[0] if isinstance(out, tuple) else out
        if mode != "fwd":
            torch.autograd.grad(out if out.shape == dout.shape else out.transpose(1, 2), inputs, dout)

    return work


def warm_row(mode, causal):
    """Compiles what FlashAttention-4 runs for a row; where it is not installed there is nothing to compile."""
    try:
        work_of(mode, causal)(fa4())
    except ModuleNotFoundError as error:
        print(f"without fa4: {error}")
    return 0


def host_us(work):
    """Microseconds of the host for one call of `work`, and of the GPU where that is longer."""
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(CALLS):
        work()
    host = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return host / CALLS / 1e3, (time.perf_counter_ns() - begin) / CALLS / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--warm", action="store_true", help="only compile FlashAttention-4's kernels, into its cache")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row is not None:
        return warm_row(*ROWS[arguments.row])
    if arguments.warm:
        rows = [subprocess.Popen([sys.executable, __file__, "--row", str(row)]) for row in range(len(ROWS))]
        return max(row.wait() for row in rows)
    peers, missing = {}, {}
    for name, load in {"fa": ours, "fa3": fa3, "fa4": fa4, "sdpa": sdpa}.items():
        try:
            peers[name] = load()
        except Exception as error:  # noqa: BLE001 - whatever an import raises
            missing[name] = f"{type(error).__name__}: {error}"
    rows = []
    for mode, causal in ROWS:
        work = work_of(mode, causal)
        times = {}
        for name, call in peers.items():
            try:
                for _ in range(20):
                    work(call)
                times[name] = []
            except Exception as error:  # noqa: BLE001 - a peer without a backward, or one that does not compile
                missing[f"{name} {mode}"] = f"{type(error).__name__}: {str(error)[:100]}"
        order = list(times)
        for _ in range(ROUNDS):
            random.shuffle(order)
            for name in order:
                times[name].append(host_us(lambda name=name: work(peers[name])))
        medians = {
            name: [round(statistics.median(column), 2) for column in zip(*found)] for name, found in times.items()
        }
        rows.append({"mode": mode, "causal": causal, "us": medians})
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "problem": "batch 1, 256 x 256, heads 16, head dim 128, bf16",
        "rows": rows,
        "missing": missing,
    }
    if arguments.json:
        json.dump(report, sys.stdout)
        print()
        return
    print(f"{report['gpu']}, torch {report['torch']}; {report['problem']}; us a call: host, and until the GPU is done")
    for row in rows:
        cells = "  ".join(f"{name} {host:.1f} {total:.1f}" for name, (host, total) in row["us"].items())
        print(f"{row['mode']:8} {'causal' if row['causal'] else 'full':7} {cells}")
    for name, why in missing.items():
        print(f"without {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
