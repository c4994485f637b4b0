#!/usr/bin/env python3
"""Host time of a call through Python: this library's beside those of FlashAttention 3 and 4 where they are
installed (wheels fa3-fwd and flash-attn-4), for a small problem.

    python bench/host_time.py [--json | --warm | --first | --calls]

Rows: dense, packed, and a step of decoding from pages, which plans its own work or is given a plan; then, of
this library alone, the first call of a process (milliseconds until the GPU is done, which torch has used
before), with an empty kernel cache and with the one that this filled, and the import of the library.
`--first` measures that alone, `--calls` all but that. Of this library's forwards there is also the part of a
call that is the extension module's (arguments read, results allocated, kernel found, launches): the rest is
Python's. A peer that is not installed, or has
no backward, is named and left out. FlashAttention-4 compiles a kernel in some ten seconds: `--warm`, with
FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, compiles all of them beforehand, side by side. Calls are enqueued in
rounds of so many that the queue does not fill, and the clock is read before the GPU is waited for: what is
measured is the time that the host takes, unless the GPU is slower; its own time stands beside. Peers take
turns, the median over rounds counts.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import torch

ROUNDS = 41
CALLS = 50


def ours():
    import fa_attn

    def plan(used):
        return fa_attn.get_scheduler_metadata(
            BATCH, 1, PAGES * PAGE, 32, 8, 128, used, qkv_dtype=torch.bfloat16, page_size=PAGE, causal=True
        )

    return {
        "dense": fa_attn.flash_attn_func,
        "packed": fa_attn.flash_attn_varlen_func,
        "paged": lambda q, *cache, used, table, **options: fa_attn.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=used, block_table=table, **options
        ),
        "plan": plan,
    }


def fa3():
    import fa3_fwd_interface as fa3

    def plan(used):
        return fa3.get_scheduler_metadata(
            BATCH, 1, PAGES * PAGE, 32, 8, 128, used, qkv_dtype=torch.bfloat16, page_size=PAGE, causal=True
        )

    return {
        "dense": fa3.flash_attn_func,
        "packed": fa3.flash_attn_varlen_func,
        "paged": lambda q, *cache, used, table, **options: fa3.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=used, page_table=table, **options
        ),
        "plan": plan,
    }


def fa4():
    import flash_attn.cute

    return {"dense": flash_attn.cute.flash_attn_func}


def sdpa():
    from torch.nn.functional import scaled_dot_product_attention

    def dense(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return {"dense": dense}


# (what is computed, mode, whether the mask is causal).
ROWS = [
    ("dense", "fwd", False),
    ("dense", "fwd", True),
    ("dense", "fwd+bwd", False),
    ("dense", "fwd+bwd", True),
    ("packed", "fwd", True),
    ("packed", "fwd+bwd", True),
    ("paged", "fwd", True),
    ("paged, planned", "fwd", True),
]
BATCH, PAGES, PAGE = 8, 16, 64


def work_of(what, mode, causal):
    """A step by a peer's calls."""

    def rows(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=mode != "fwd")

    if what == "dense":
        inputs = [rows(1, 256, 16, 128) for _ in range(3)]
        options = {}
    elif what == "packed":
        inputs = [rows(512, heads, 128) for heads in (16, 4, 4)]
        starts = torch.arange(0, 513, 64, device="cuda", dtype=torch.int32)
        options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=64, max_seqlen_k=64)
    else:
        inputs = [rows(BATCH, 1, 32, 128), *(rows(BATCH * PAGES, PAGE, 8, 128) for _ in range(2))]
        table = torch.arange(BATCH * PAGES, device="cuda", dtype=torch.int32).view(BATCH, PAGES)
        used = torch.randint(PAGE, PAGES * PAGE, (BATCH,), device="cuda", dtype=torch.int32)
        options = dict(used=used, table=table)
    dout = torch.randn_like(inputs[0])
    plans = {}

    def work(calls):
        if what == "paged, planned" and id(calls) not in plans:
            plans[id(calls)] = dict(scheduler_metadata=calls["plan"](options["used"]))
        out = calls[what.split(",")[0]](*inputs, causal=causal, **options, **plans.get(id(calls), {}))
        out = out[0] if isinstance(out, tuple) else out
        if mode != "fwd":
            torch.autograd.grad(out if out.shape == dout.shape else out.transpose(1, 2), inputs, dout)

    return work


def stages(what, mode, causal):
    """Microseconds of a forward of this library by what they go to: the whole, and the extension module."""
    import fa_attn.torch as face

    work, calls, given = work_of(what, mode, causal), ours(), []
    plain = face._plain
    work(calls)

    def recorded(*arguments):
        given.append(arguments)
        return plain(*arguments)

    face._plain = recorded
    try:
        work(calls)
    finally:
        face._plain = plain
    (arguments,) = given
    steps = {"whole": lambda: work(calls), "extension": lambda: plain(*arguments)}
    times = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(host_us(step)[0])
    return {
        **{name: round(statistics.median(found), 2) for name, found in times.items()},
        **driver_calls(steps["whole"]),
    }


def driver_calls(step):
    """Microseconds in the driver's functions that a profiler shows of a step, which makes them slower, by name
    and number of calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
    own = [event for event in profiled.key_averages() if event.key.startswith("cu")]
    of_step = [event for event in own if event.count >= CALLS]
    return {
        f"{event.key} x{event.count / CALLS:.0f}": round(event.self_cpu_time_total / CALLS, 2)
        for event in of_step
    }


def first_call(row):
    """Prints the milliseconds of this process's first call, and of importing the library before it."""
    work = work_of(*ROWS[row])
    # At its first gradient torch imports half a second of modules of its own.
    leaf = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(leaf * 2, leaf, torch.ones_like(leaf))
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    import fa_attn.torch  # noqa: F401 - measured

    imported = time.perf_counter_ns()
    work(ours())
    torch.cuda.synchronize()
    print(json.dumps({"call": (time.perf_counter_ns() - imported) / 1e6, "import": (imported - begin) / 1e6}))


def first_calls():
    """For each row the milliseconds of a process's first call, by what its kernel cache holds."""
    found = []
    for row, (what, mode, causal) in enumerate(ROWS):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--first-of", str(row)]
            environment = {**os.environ, "FA_CACHE_DIR": cache}
            runs = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(4)]
        bad = next((run for run in runs if run.returncode), None)
        if bad is not None:
            found.append({"what": what, "mode": mode, "causal": causal, "error": bad.stderr.strip()[-300:]})
            continue
        empty, *warm = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
        times = {name: statistics.median(run[name] for run in warm) for name in ("call", "import")}
        times = {"empty": empty["call"], "warm": times["call"], "import": times["import"]}
        found.append({"what": what, "mode": mode, "causal": causal, "ms": times})
    return found


def warm_row(what, mode, causal):
    """Compiles what FlashAttention-4 runs for a row; where it is not installed there is nothing to compile."""
    try:
        calls = fa4()
        if what in calls:
            work_of(what, mode, causal)(calls)
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
    parser.add_argument("--first", action="store_true", help="only measure first calls")
    parser.add_argument("--calls", action="store_true", help="measure no first calls")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_of is not None:
        return first_call(arguments.first_of)
    if arguments.row is not None:
        return warm_row(*ROWS[arguments.row])
    if arguments.warm:
        rows = [subprocess.Popen([sys.executable, __file__, "--row", str(row)]) for row in range(len(ROWS))]
        return max(row.wait() for row in rows)
    peers, missing = {}, {}
    loads = {} if arguments.first else {"fa": ours, "fa3": fa3, "fa4": fa4, "sdpa": sdpa}
    for name, load in loads.items():
        try:
            peers[name] = load()
        except Exception as error:  # noqa: BLE001 - whatever an import raises
            missing[name] = f"{type(error).__name__}: {error}"
    rows = []
    for what, mode, causal in ROWS if peers else ():
        work = work_of(what, mode, causal)
        times = {}
        for name, calls in peers.items():
            if what.split(",")[0] not in calls:
                continue
            try:
                for _ in range(20):
                    work(calls)
                times[name] = []
            except Exception as error:  # noqa: BLE001 - a peer without a backward, or one that does not compile
                missing[f"{name} {what} {mode}"] = f"{type(error).__name__}: {str(error)[:100]}"
        order = list(times)
        for _ in range(ROUNDS):
            random.shuffle(order)
            for name in order:
                times[name].append(host_us(lambda name=name: work(peers[name])))
        medians = {
            name: [round(statistics.median(column), 2) for column in zip(*found)] for name, found in times.items()
        }
        rows.append({"what": what, "mode": mode, "causal": causal, "us": medians})
        if mode == "fwd" and "fa" in medians:
            rows[-1]["stages"] = stages(what, mode, causal)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "problem": "bf16, head dim 128; dense: batch 1, 256 x 256, heads 16; packed: 8 of 64, heads 16:4; "
        f"paged: {BATCH} of 1 x {PAGE} to {PAGES * PAGE}, heads 32:8, pages of {PAGE}",
        "rows": rows,
        "first": [] if arguments.calls else first_calls(),
        "missing": missing,
    }
    if arguments.json:
        json.dump(report, sys.stdout)
        print()
        return
    print(f"{report['gpu']}, torch {report['torch']}; {report['problem']}; us a call: host, and until the GPU is done")
    for row in rows:
        cells = "  ".join(f"{name} {host:.1f} {total:.1f}" for name, (host, total) in row["us"].items())
        cells += "".join(f"  {name} {us:.1f}" for name, us in row.get("stages", {}).items())
        print(f"{row['what']:14} {row['mode']:8} {'causal' if row['causal'] else 'full':7} {cells}")
    if report["first"]:
        print("the first call of a process, ms: with an empty kernel cache, with a warm one, and the import before it")
    for row in report["first"]:
        cells = row["error"] if "error" in row else "  ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
        print(f"{row['what']:14} {row['mode']:8} {'causal' if row['causal'] else 'full':7} {cells}")
    for name, why in missing.items():
        print(f"without {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
