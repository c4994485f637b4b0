#!/usr/bin/env python3
"""Time torch's CPU flash attention, and `fa bench --backend cpu` beside it shape by shape in one run.

    venv/bin/python scripts/bench_torch_cpu.py                               # torch alone
    venv/bin/python scripts/bench_torch_cpu.py --fa target/release/fa        # both, with a table of ratios
    venv/bin/python scripts/bench_torch_cpu.py --dtypes bf16 --no-amx        # what torch does without AMX
    venv/bin/python scripts/bench_torch_cpu.py --fa target/release/fa --sets decode,short

torch runs scaled_dot_product_attention on its flash path (nothing else is allowed to run) on contiguous
[batch, heads, seqlen, head_dim] tensors; backward is torch.autograd.grad alone on a retained graph. FLOPs are
4 * batch * heads * pairs * head_dim forward, with queries * keys pairs or N(N+1)/2 causal, and 2.5 times that
backward. --sets chooses among the squares (which the other options describe) and the shapes off them: one query
against many keys, 5 to 16 of them, batches of short and of tiny sequences, lengths of vision models, few queries
against many keys, other head dims, prompts of one sequence, causal training with grouped heads.

Standard output is a JSON list, one row a shape: kind, dtype, batch, heads, heads_kv, seqlen, seqlen_k, head_dim,
causal, ms_median, ms_min, gflops (torch's, by the median), and with --fa also fa_ms_median, fa_ms_min, fa_gflops, ratio
(torch's median time over ours: above 1 we are ahead), ratio_min (least time over least time, which other programs on the
machine disturb less) or fa_error. The table and the description of the machine go to standard error.

Instruction sets: oneDNN kills the process by SIGILL on virtual machines that report AMX but leave its CPUID leaves blank.
The script tries a small bf16 product in a child process first, and only if the child dies keeps oneDNN from using AMX
(ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16). MKL, which torch uses for the products of the bf16 forward, is left alone; it
uses AMX.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

MODES = ("fwd", "bwd")
DTYPES = ("f32", "bf16", "f16")


class Shape(NamedTuple):
    """One problem; lengths are equal where it is causal."""

    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    seqlen_k: int
    head_dim: int
    causal: bool


# Shapes off the squares, and the passes that are timed on them.
OFF_SQUARES = {
    "decode": (
        ("fwd",),
        [
            Shape(1, 16, 16, 1, 2048, 64, False),
            Shape(8, 16, 16, 1, 2048, 64, False),
            Shape(1, 32, 32, 1, 4096, 128, False),
            Shape(1, 32, 8, 1, 32768, 128, False),
            Shape(64, 8, 8, 1, 512, 64, False),
            Shape(1, 1, 1, 1, 8192, 128, False),
            Shape(1, 32, 1, 1, 4096, 128, False),
            Shape(1, 12, 12, 1, 100, 64, False),
            Shape(4, 28, 4, 1, 1500, 128, False),
        ],
    ),
    "few": (
        ("fwd",),
        [
            Shape(1, 2, 2, 5, 4096, 64, False),
            Shape(1, 1, 1, 8, 8192, 128, False),
            Shape(1, 8, 1, 16, 4096, 64, False),
            Shape(1, 32, 8, 16, 4096, 128, False),
        ],
    ),
    "short": (
        MODES,
        [Shape(64, 8, 8, 32, 32, 64, True), Shape(16, 12, 12, 128, 128, 64, False)],
    ),
    "tiny": (
        MODES,
        [
            Shape(50, 12, 12, 5, 5, 64, False),
            Shape(100, 8, 8, 9, 9, 32, False),
            Shape(3, 5, 1, 5, 333, 72, False),
            Shape(8, 8, 2, 12, 300, 128, False),
        ],
    ),
    "vit": (
        MODES,
        [Shape(8, 12, 12, 197, 197, 64, False), Shape(2, 16, 16, 577, 577, 64, False)],
    ),
    "cross": (
        MODES,
        [Shape(1, 8, 8, 64, 4096, 64, False), Shape(1, 8, 8, 1024, 77, 40, False)],
    ),
    "dims": (
        MODES,
        [
            Shape(1, 8, 8, 700, 700, 80, True),
            Shape(1, 8, 8, 1024, 1024, 96, True),
            Shape(1, 4, 4, 1024, 1024, 256, True),
            Shape(1, 12, 12, 512, 512, 32, False),
        ],
    ),
    "prefill": (
        ("fwd",),
        [
            Shape(1, 32, 8, 100, 100, 128, True),
            Shape(1, 32, 8, 500, 500, 128, True),
            Shape(1, 14, 2, 2000, 2000, 64, True),
            Shape(1, 8, 1, 300, 300, 256, True),
            Shape(1, 32, 8, 64, 2048, 128, False),
        ],
    ),
    "grouped": (
        MODES,
        [Shape(1, 16, 4, 1024, 1024, 128, True), Shape(1, 16, 4, 4096, 4096, 64, True)],
    ),
}


def parse_arguments():
    def integers(text):
        return [int(part) for part in text.split(",")]

    def words(allowed):
        def parse(text):
            parts = text.split(",")
            for part in parts:
                if part not in allowed:
                    raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(allowed)}")
            return parts

        return parse

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fa", metavar="PATH", help="fa binary to time beside torch, shape by shape")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seqlens", type=integers, default=[512, 1024, 2048, 4096], metavar="N,N")
    parser.add_argument("--head-dims", type=integers, default=[64, 128], metavar="D,D")
    parser.add_argument("--dtypes", type=words(DTYPES), default=list(DTYPES), metavar="f32,bf16,f16")
    sets = ("squares", *OFF_SQUARES)
    parser.add_argument("--sets", type=words(sets), default=list(sets), metavar=",".join(sets))
    parser.add_argument("--modes", type=words(MODES), default=list(MODES), metavar="fwd,bwd")
    parser.add_argument("--causal", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=3, help="times torch and fa take turns on a shape (default 3)")
    parser.add_argument("--seconds", type=float, default=0.4, help="least time for each in a round (default 0.4)")
    parser.add_argument("--no-amx", action="store_true", help="keep both oneDNN and MKL from using AMX")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    for name in ("threads", "batch", "heads", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def bf16_works():
    """Whether a bf16 product survives in a process with this one's environment."""
    code = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def prepare_environment(arguments):
    """Set thread counts and instruction sets; must come before torch is imported. Returns notes for the report."""
    notes = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(arguments.threads)
    if arguments.no_amx:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        os.environ["MKL_ENABLE_INSTRUCTIONS"] = "AVX512_E3"
        notes.append("AMX kept from oneDNN and MKL (--no-amx)")
    elif "bf16" in arguments.dtypes and not bf16_works():
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
        if not bf16_works():
            sys.exit("torch cannot multiply bf16 matrices on this machine; --dtypes f32 leaves them out")
        notes.append("oneDNN dies on bf16 here with its default instruction set: ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16")
    return notes


def flops(mode, shape):
    pairs = shape.seqlen * (shape.seqlen + 1) // 2 if shape.causal else shape.seqlen * shape.seqlen_k
    forward = 4 * shape.batch * shape.heads * pairs * shape.head_dim
    return forward if mode == "fwd" else forward * 5 // 2


class TorchTimer:
    """torch's attention on one shape, ready to be timed in turns."""

    def __init__(self, arguments, mode, dtype, shape):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.seconds = arguments.seconds
        torch.manual_seed(0)
        of_queries = (shape.batch, shape.heads, shape.seqlen, shape.head_dim)
        of_keys = (shape.batch, shape.heads_kv, shape.seqlen_k, shape.head_dim)
        element = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        q, k, v, dout = (torch.randn(size, dtype=element) for size in (of_queries, of_keys, of_keys, of_queries))
        grouped = {"enable_gqa": True} if shape.heads != shape.heads_kv else {}

        def forward():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, **grouped)

        if mode == "fwd":
            self.call = forward
        else:
            leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
            out = forward()
            # The backend context refuses other paths; the name says so for the record.
            if "FlashAttention" not in type(out.grad_fn).__name__:
                raise RuntimeError(f"torch took {type(out.grad_fn).__name__}, not its flash path")
            self.call = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        self.call()

    def round(self):
        """Milliseconds of each call in one round: at least three, at least `seconds` in all."""
        times = []
        while len(times) < 3 or sum(times) < self.seconds * 1e3:
            start = time.perf_counter()
            self.call()
            times.append((time.perf_counter() - start) * 1e3)
        return times


def time_fa(arguments, mode, dtype, shape):
    """((median, least) milliseconds, None) of one `fa bench`, or (None, what went wrong)."""
    lengths, heads = f"{shape.seqlen}x{shape.seqlen_k}", f"{shape.heads}:{shape.heads_kv}"
    command = [arguments.fa, "bench", "--backend", "cpu", "--headdim", str(shape.head_dim), "--seqlen", lengths]
    command += ["--heads", heads, "--batch", str(shape.batch), "--dtype", dtype, "--mode", mode]
    command += ["--threads", str(arguments.threads), "--seconds", str(arguments.seconds), "--json", "-"]
    command += ["--causal"] if shape.causal else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode != 0:
        return None, f"exit status {done.returncode}: {done.stderr.strip()[-500:]}"
    try:
        (row,) = json.loads(done.stdout)["rows"]
        asked = {"seqlen_q": shape.seqlen, "seqlen_k": shape.seqlen_k, "head_dim": shape.head_dim}
        asked |= {"causal": shape.causal, "dtype": dtype}
        for key, value in asked.items():
            if row[key] != value:
                return None, f"asked for {key} {value}, fa bench timed {row[key]}"
        return (float(row["ms_median"]), float(row["ms_min"])), None
    except (ValueError, KeyError, TypeError) as error:
        return None, f"fa bench's JSON is not as expected: {error!r}"


def measure(arguments, mode, dtype, shape):
    work = flops(mode, shape)
    timer = TorchTimer(arguments, mode, dtype, shape)
    torch_times, fa_times, fa_error = [], [], None
    for _ in range(arguments.rounds):
        torch_times += timer.round()
        if arguments.fa and fa_error is None:
            # torch's workers spin for a moment after their last task; let them go to sleep.
            time.sleep(0.05)
            times, fa_error = time_fa(arguments, mode, dtype, shape)
            fa_times += [] if times is None else [times]
    ms_median = statistics.median(torch_times)
    row = {
        "kind": mode,
        "dtype": dtype,
        **shape._asdict(),
        "ms_median": round(ms_median, 4),
        "ms_min": round(min(torch_times), 4),
        "gflops": round(work / ms_median / 1e6, 1),
    }
    if fa_error is not None:
        row["fa_error"] = fa_error
    elif fa_times:
        fa_median = statistics.median(median for median, _ in fa_times)
        fa_min = min(least for _, least in fa_times)
        row["fa_ms_median"] = round(fa_median, 4)
        row["fa_ms_min"] = round(fa_min, 4)
        row["fa_gflops"] = round(work / fa_median / 1e6, 1)
        row["ratio"] = round(ms_median / fa_median, 3)
        row["ratio_min"] = round(min(torch_times) / fa_min, 3)
    return row


def matrix_rate(dtype_name):
    """GFLOP/s of torch's 1024^3 matrix product, best of eight: the ceiling to hold attention's rate against.

    Without bf16 in hardware one takes seconds: then the first one is all.
    """
    import torch

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype_name]
    a, b = (torch.randn(1024, 1024, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
        if best > 1:
            break
    return 2 * 1024**3 / best / 1e9


def cpu_name():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown CPU"


def shapes(arguments):
    """(pass, type, shape) of everything that is asked for, set by set."""
    causal_choices = {"yes": [True], "no": [False], "both": [False, True]}[arguments.causal]
    squares = [
        Shape(arguments.batch, arguments.heads, arguments.heads, seqlen, seqlen, head_dim, causal)
        for head_dim in arguments.head_dims
        for causal in causal_choices
        for seqlen in arguments.seqlens
    ]
    for name in arguments.sets:
        modes, of_set = (MODES, squares) if name == "squares" else OFF_SQUARES[name]
        for mode in arguments.modes:
            for dtype in arguments.dtypes:
                if mode in modes:
                    yield from ((mode, dtype, shape) for shape in of_set)


def log(*parts):
    print(*parts, file=sys.stderr, flush=True)


def main():
    arguments = parse_arguments()
    notes = prepare_environment(arguments)
    import torch

    torch.set_num_threads(arguments.threads)
    capability = torch.backends.cpu.get_cpu_capability()
    log(f"torch {torch.__version__}, {capability}, {arguments.threads} threads, {cpu_name()}")
    for note in notes:
        log(note)
    for dtype in arguments.dtypes:
        log(f"torch 1024^3 {dtype} matrix product: {matrix_rate(dtype):.0f} GFLOP/s")
    log(f"load average before: {os.getloadavg()[0]:.2f} (anything else running spoils the figures)")
    rate_columns = f"{'torch ms':>11}{'GFLOP/s':>9}{'fa ms':>11}{'GFLOP/s':>9}{'ratio':>8}{'of min':>8}"
    log(f"{'':4}{'dtype':>5}{'hd':>5}{'B':>4}{'heads':>7}{'N':>11}{'causal':>8}{rate_columns}")

    rows = []
    for mode, dtype, shape in shapes(arguments):
        row = measure(arguments, mode, dtype, shape)
        rows.append(row)
        heads = f"{shape.heads}:{shape.heads_kv}" if shape.heads != shape.heads_kv else str(shape.heads)
        line = f"{mode:4}{dtype:>5}{shape.head_dim:>5}{shape.batch:>4}{heads:>7}"
        line += f"{f'{shape.seqlen}x{shape.seqlen_k}':>11}{'yes' if shape.causal else 'no':>8}"
        line += f"{row['ms_median']:>11.3f}{row['gflops']:>9.1f}"
        if "ratio" in row:
            line += f"{row['fa_ms_median']:>11.3f}{row['fa_gflops']:>9.1f}{row['ratio']:>8.2f}{row['ratio_min']:>8.2f}"
        log(line + ("  " + row["fa_error"] if "fa_error" in row else ""))
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        log(f"ahead on {sum(ratio > 1 for ratio in ratios)} of {len(rows)} shapes, worst ratio {min(ratios):.2f}")
        ratios = [row["ratio_min"] for row in rows if "ratio_min" in row]
        log(f"by least times: ahead on {sum(ratio > 1 for ratio in ratios)}, worst {min(ratios):.2f}")
    text = json.dumps(rows, indent=1)
    print(text)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(text + "\n")
    if any("fa_error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
