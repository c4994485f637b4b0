#!/usr/bin/env python3
"""Batches of short sequences, as encoders and classifiers have them, beside torch's attention (FlashAttention-2, cuDNN) and
FlashAttention-3 where it is installed (wheel fa3-fwd).

    python bench/short.py OUT.json [SECONDS] [cpu]

32k tokens of 12 heads in sequences of 64 to 512, head dims 64 and 128, bf16 and f16, forward and backward, dense and packed
(lengths between half of the longest and the longest), and the gradients of 64 x 384 of 4 heads of 32. Each row is checked
first: out, dq, dk and dv of two sequences against the formula in float32; a peer whose result is wrong leaves the row. Then
the contestants replay CUDA graphs in turns, the median over the turns counts. TFLOP/s are of all pairs of a query and a key
of its sequence: 4 operations for each element of the head dim in the forward, 10 in the backward; TB/s of q, k, v and out
once, in the backward of those, dout and the gradients once. `cpu` only checks, on small batches.
"""

import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_attn

GPU = "cpu" not in sys.argv[2:]
DEVICE = "cuda" if GPU else "cpu"
TOKENS = 32768 if GPU else 2048
TURNS, LEAST = 9, 2e-3
BEGIN = time.time()


def rows():
    """(packed, longest, heads, head dim, type), the issue's own kinds first."""
    for longest in (64, 128, 256, 512):
        for dim in (64, 128):
            yield False, longest, 12, dim, torch.bfloat16
            yield True, longest, 12, dim, torch.bfloat16
    yield False, 384, 4, 32, torch.bfloat16
    for longest in (64, 128, 256, 512):
        for dim in (64, 128):
            yield False, longest, 12, dim, torch.float16


class Case:
    """The tensors of a row."""

    def __init__(self, packed, longest, heads, dim, dtype):
        self.packed, self.longest, self.dtype = packed, longest, dtype
        rng = random.Random(f"{longest} {dim}")
        tokens = 64 * 384 if dim == 32 and GPU else TOKENS
        self.lengths = [longest] * (tokens // longest)
        if packed:
            self.lengths = [rng.randint(longest // 2, longest) for _ in self.lengths]
        shape = (sum(self.lengths), heads, dim) if packed else (len(self.lengths), longest, heads, dim)
        make = torch.Generator(DEVICE).manual_seed(longest + dim)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, device=DEVICE, dtype=dtype, generator=make) for _ in range(4)
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self.ends = starts.tolist()
        self.starts = starts.to(DEVICE, torch.int32)
        pairs = sum(n * n for n in self.lengths) * heads
        self.flops = {"fwd": 4 * pairs * dim, "bwd": 10 * pairs * dim}
        self.bytes = {"fwd": 4 * self.q.numel() * 2, "bwd": 8 * self.q.numel() * 2}

    def sequence(self, x, at):
        return x[self.ends[at] : self.ends[at + 1]] if self.packed else x[at]

    def is_right(self, results):
        """Whether out and gradients of the first and the last sequence are those of the formula."""
        for at in (0, len(self.lengths) - 1):
            q, k, v, dout = (
                self.sequence(x, at).detach().float().transpose(0, 1) for x in (self.q, self.k, self.v, self.dout)
            )
            q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
            out = torch.softmax(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ v
            need = (out, *torch.autograd.grad(out, (q, k, v), dout))
            for own, want in zip(results, need):
                own = self.sequence(own, at).float().transpose(0, 1)
                limit = (3e-2 if self.dtype is torch.bfloat16 else 6e-3) * max(1.0, want.abs().max().item())
                if not (own - want).abs().max().item() < limit:
                    return False
        return True


def ours(case):
    if case.packed:
        bounds = (case.starts, case.starts, case.longest, case.longest)
        return lambda: fa_attn.flash_attn_varlen_func(case.q, case.k, case.v, *bounds)
    return lambda: fa_attn.flash_attn_func(case.q, case.k, case.v)


def torch_with(backend):
    def of(case):
        if case.packed:
            return None

        def call():
            with sdpa_kernel(backend):
                q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
                return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

        return call

    return of


def packed_fa2(case):
    """torch's FlashAttention-2 of packed sequences, by its operator."""
    if not case.packed:
        return None
    bounds = (case.starts, case.starts, case.longest, case.longest, 0.0, False, False)
    return lambda: torch.ops.aten._flash_attention_forward(case.q, case.k, case.v, *bounds)[0]


def fa3():
    import fa3_fwd_interface as library

    def of(case):
        q, k, v = (x.detach() for x in (case.q, case.k, case.v))
        if case.packed:
            bounds = (case.starts, case.starts, case.longest, case.longest)
            call = lambda: library.flash_attn_varlen_func(q, k, v, *bounds)  # noqa: E731
        else:
            call = lambda: library.flash_attn_func(q, k, v)  # noqa: E731

        def first():
            out = call()
            return out[0] if isinstance(out, tuple) else out

        return first

    return of


def contestants():
    """Functions of a case by name, and why others are missing."""
    found, missing = {"fa": ours}, {}
    if GPU:
        found["fa2"] = torch_with(SDPBackend.FLASH_ATTENTION)
        found["cudnn"] = torch_with(SDPBackend.CUDNN_ATTENTION)
        found["fa2 packed"] = packed_fa2
        try:
            found["fa3"] = fa3()
        except Exception as error:  # noqa: BLE001 - whatever an import raises
            missing["fa3"] = f"{type(error).__name__}: {error}"
    else:
        found["sdpa"] = torch_with(SDPBackend.MATH)
    return found, missing


class Replay:
    """So many steps in a graph that a replay takes LEAST."""

    def __init__(self, step):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run = step()
            for _ in range(3):
                run()
            stream.synchronize()
            begin = time.perf_counter()
            for _ in range(5):
                run()
            stream.synchronize()
            self.count = max(1, min(200, round(LEAST * 5 / (time.perf_counter() - begin))))
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(self.count):
                    run()
        torch.cuda.synchronize()

    def seconds(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / self.count


def forward(call):
    def step():
        def run():
            with torch.no_grad():
                return call()

        return run

    return step


def backward(case, call):
    def step():
        # On the stream of the graph: a backward runs where its forward ran.
        out = call()
        return lambda: torch.autograd.grad(out, (case.q, case.k, case.v), case.dout, retain_graph=True)

    return step


def results_of(case, call):
    out = call()
    if not out.requires_grad:
        return (out,)
    return (out, *torch.autograd.grad(out, (case.q, case.k, case.v), case.dout))


def measure(case, found):
    """Seconds by pass and contestant, and why others have none."""
    calls, errors = {}, {}
    for name, of in found.items():
        call = of(case)
        if call is None:
            continue
        try:
            results = results_of(case, call)
            if case.is_right(results):
                calls[name] = (call, len(results) > 1)
            else:
                errors[name] = "wrong"
        except Exception as error:  # noqa: BLE001 - a peer that does not compute the row
            errors[name] = f"{type(error).__name__}: {str(error)[:120]}"
    times = {}
    for mode in ("fwd", "bwd") if GPU else ():
        replays = {}
        for name, (call, has_gradients) in calls.items():
            if mode == "bwd" and not has_gradients:
                continue
            try:
                replays[name] = Replay(forward(call) if mode == "fwd" else backward(case, call))
            except Exception as error:  # noqa: BLE001 - what cannot be captured
                errors[f"{name} {mode}"] = f"{type(error).__name__}: {str(error)[:120]}"
        own, order = {name: [] for name in replays}, list(replays)
        for _ in range(TURNS):
            random.shuffle(order)
            for name in order:
                own[name].append(replays[name].seconds())
        times[mode] = {name: statistics.median(found) for name, found in own.items()}
    return times, errors, [name for name in calls]


def compile_ours(kind):
    """Compiles the kernels of a row, beside those of others."""
    case = Case(*kind)
    try:
        results_of(case, ours(case))
    except Exception as error:  # noqa: BLE001 - the row says it again
        print(f"{kind}: {error}", file=sys.stderr)


def words(kind):
    packed, longest, heads, dim, dtype = kind
    name = "bf16" if dtype is torch.bfloat16 else "f16"
    return f"{'packed' if packed else 'dense'} {longest}, {heads} of {dim}, {name}"


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else "short.json"
    budget = float(next((x for x in sys.argv[2:] if x != "cpu"), 120))
    kinds = list(rows())
    found, missing = contestants()
    if GPU:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(compile_ours, kinds))
        print(f"compiled after {time.time() - BEGIN:.0f} s", file=sys.stderr)
    measured, lines, left = [], [], []
    for kind in kinds:
        if time.time() - BEGIN > budget:
            left.append(words(kind))
            continue
        case = Case(*kind)
        times, errors, right = measure(case, found)
        measured.append({"row": words(kind), "seconds": times, "errors": errors, "right": right})
        if not GPU:
            lines.append(f"{words(kind):32} right: {', '.join(right)}")
        for mode, own in times.items():
            peers = {name: seconds for name, seconds in own.items() if name != "fa"}
            if "fa" not in own:
                lines.append(f"{words(kind):32} {mode}  fa: {errors.get('fa') or errors.get(f'fa {mode}')}")
                continue
            best = min(peers, key=peers.get) if peers else None
            rate = case.flops[mode] / own["fa"] * 1e-12
            ratio = f"{peers[best] / own['fa']:.3f} of {best}" if best else "no peer"
            lines.append(
                f"{words(kind):32} {mode} {own['fa'] * 1e6:8.1f} us {rate:5.0f} TFLOP/s "
                f"{case.bytes[mode] / own['fa'] * 1e-12:5.2f} TB/s  {ratio}"
            )
        for name, why in errors.items():
            lines.append(f"{words(kind):32} without {name}: {why}")
        report = {
            "gpu": torch.cuda.get_device_name() if GPU else "none",
            "torch": torch.__version__,
            "rows": measured,
            "missing": missing,
            "left": left,
        }
        with open(out, "w") as file:
            json.dump(report, file, indent=1)
    print("\n".join(lines))
    for mode in ("fwd", "bwd"):
        for packed in ("dense", "packed"):
            ratios = [
                min(x for name, x in row["seconds"][mode].items() if name != "fa") / row["seconds"][mode]["fa"]
                for row in measured
                if row["row"].startswith(packed) and len(row["seconds"].get(mode, {})) > 1 and "fa" in row["seconds"][mode]
            ]
            if ratios:
                print(f"{packed} {mode}: {statistics.geometric_mean(ratios):.3f} of the best, lowest {min(ratios):.3f}")
    for name, why in {**missing, **({"rows": ", ".join(left)} if left else {})}.items():
        print(f"without {name}: {why}")
    return 1 if any("fa" in row["errors"] for row in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
