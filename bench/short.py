#!/usr/bin/env python3
"""Batches of short sequences, as encoders, classifiers and trainers have them, beside torch's attention
(FlashAttention-2, cuDNN) and FlashAttention-3 and -4 where they are installed (wheels fa3-fwd, flash-attn-4).

    python bench/short.py OUT.json [SECONDS] [cpu] [seed=N] [peers=NAME,..] [only=TEXT]

32k tokens of 12 heads in sequences of 64 to 512, head dims 64 and 128, bf16 and f16, forward and backward,
dense and packed (lengths between half of the longest and the longest); 64 x 384 of 4 heads of 32; and packed
batches of trainers, causal: rollouts of several hundred tokens with groups of 7 and 8, and one long sequence
among many short ones. With a seed the rows are drawn instead, two for each of dense and packed, full and
causal, 12 and 16 heads of 64 and 12 of 128, bf16 and f16: some hundred sequences of 64 to 512 tokens. `peers`
leaves other peers out, `only` rows whose names lack it. Each row is checked first: out, dq, dk and dv of two
sequences against the formula in float32; a peer whose result is wrong leaves the row. Then the contestants replay CUDA graphs in turns, the
median over the turns counts. TFLOP/s are of all pairs of a query and a key of its sequence: 4 operations for
each element of the head dim in the forward, 10 in the backward; TB/s of q, k, v and out once, in the backward
of those, dout and the gradients once; causal rows count half of the pairs. `cpu` only checks, on small
batches.
"""

import json
import math
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_attn

GPU = "cpu" not in sys.argv[2:]
NAMED = dict(word.split("=", 1) for word in sys.argv[2:] if "=" in word)
DEVICE = "cuda" if GPU else "cpu"
TOKENS = 32768 if GPU else 1024
TURNS, LEAST = 9, 2e-3
BEGIN = time.time()


class Row(NamedTuple):
    """What a row computes; `form`: dense, packed, rollouts or one long."""

    form: str
    longest: int
    heads: int = 12
    heads_kv: int = 12
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    tokens: int = TOKENS

    @property
    def packed(self):
        return not self.form.startswith("dense")

    @property
    def causal(self):
        return self.form in ("rollouts", "one long") or self.form.endswith("causal")

    def lengths(self):
        """Lengths of the sequences; the first and the last, which are checked, are short."""
        rng = random.Random(f"{self.form} {self.longest} {self.dim}")
        tokens = 64 * 384 if self.dim == 32 and GPU else self.tokens
        if self.form == "rollouts":
            found = []
            while sum(found) < tokens:
                found.append(max(16, min(self.longest, round(rng.lognormvariate(math.log(self.longest / 4), 0.6)))))
            return found
        if self.form == "one long":
            short = [rng.randint(self.longest // 64, self.longest // 16) for _ in range(TOKENS // 400)]
            return [*short[1:], self.longest, short[0]]
        least = self.longest // 2 if self.packed else self.longest
        return [rng.randint(least, self.longest) for _ in range(tokens // self.longest)]

    def __str__(self):
        heads = f"{self.heads}" if self.heads == self.heads_kv else f"{self.heads}:{self.heads_kv}"
        name = "bf16" if self.dtype is torch.bfloat16 else "f16"
        count = "" if self.tokens == TOKENS else f", {self.tokens // self.longest} sequences"
        return f"{self.form} {self.longest}, {heads} of {self.dim}, {name}{count}"


def drawn(seed):
    """Rows of short sequences by that seed, those of bf16 first: lengths in the lower and the upper half of 64 to
    512, by their logarithms."""
    rng = random.Random(seed)
    for dtype in (torch.bfloat16, torch.float16):
        for heads, dim in ((12, 64), (12, 128), (16, 64)):
            for form in ("dense", "dense causal", "packed", "packed causal"):
                for half in (0, 1):
                    longest = round(2 ** (6 + 1.5 * (half + rng.random())))
                    tokens = round(TOKENS * 2 ** rng.uniform(-0.5, 0.75))
                    yield Row(form, longest, heads, heads, dim, dtype, tokens)


def rows():
    """The rows, those of bf16 first."""
    for longest in (64, 128, 256, 512):
        for dim in (64, 128):
            yield Row("dense", longest, dim=dim)
            yield Row("packed", longest, dim=dim)
    yield Row("dense", 384, 4, 4, 32)
    yield Row("rollouts", 2400, 28, 4, 128)
    yield Row("rollouts", 4000, 32, 4, 128)
    yield Row("rollouts", 2400, 14, 2, 64)
    yield Row("one long", 8192, 16, 16, 64)
    yield Row("one long", 8192, 32, 8, 128)
    for longest in (64, 128, 256, 512):
        for dim in (64, 128):
            yield Row("dense", longest, dim=dim, dtype=torch.float16)


class Case:
    """The tensors of a row."""

    def __init__(self, row):
        self.row, self.lengths = row, row.lengths()
        self.longest = max(self.lengths)
        outer = (sum(self.lengths),) if row.packed else (len(self.lengths), row.longest)
        make = torch.Generator(DEVICE).manual_seed(row.longest + row.dim)
        self.q, self.k, self.v, self.dout = (
            torch.randn((*outer, heads, row.dim), device=DEVICE, dtype=row.dtype, generator=make)
            for heads in (row.heads, row.heads_kv, row.heads_kv, row.heads)
        )
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        self.ends = starts.tolist()
        self.starts = starts.to(DEVICE, torch.int32)
        self.bounds = (self.starts, self.starts, self.longest, self.longest)
        pairs = sum(n * (n + 1) // 2 if row.causal else n * n for n in self.lengths) * row.heads
        self.flops = {"fwd": 4 * pairs * row.dim, "bwd": 10 * pairs * row.dim}
        once = 4 * (self.q.numel() + self.k.numel())
        self.bytes = {"fwd": once, "bwd": 2 * once}

    def sequence(self, x, at):
        return x[self.ends[at] : self.ends[at + 1]] if self.row.packed else x[at]

    def is_right(self, results):
        """Whether out and gradients of the first and the last sequence are those of the formula."""
        for at in (0, len(self.lengths) - 1):
            q, k, v, dout = (
                self.sequence(x, at).detach().float().transpose(0, 1) for x in (self.q, self.k, self.v, self.dout)
            )
            q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
            group = self.row.heads // self.row.heads_kv
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * q.shape[-1] ** -0.5
            if self.row.causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            out = torch.softmax(scores, -1) @ v.repeat_interleave(group, 0)
            need = (out, *torch.autograd.grad(out, (q, k, v), dout))
            for own, want in zip(results, need):
                own = self.sequence(own, at).float().transpose(0, 1)
                limit = (3e-2 if self.row.dtype is torch.bfloat16 else 6e-3) * max(1.0, want.abs().max().item())
                if not (own - want).abs().max().item() < limit:
                    return False
        return True


def ours(case):
    causal = case.row.causal
    if case.row.packed:
        return lambda: fa_attn.flash_attn_varlen_func(case.q, case.k, case.v, *case.bounds, causal=causal)
    return lambda: fa_attn.flash_attn_func(case.q, case.k, case.v, causal=causal)


def torch_with(backend):
    def of(case):
        if case.row.packed:
            return None

        def call():
            with sdpa_kernel(backend):
                q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=case.row.causal).transpose(1, 2)

        return call

    return of


def packed_fa2(case):
    """torch's FlashAttention-2 of packed sequences, by its operator."""
    if not case.row.packed:
        return None
    options = (*case.bounds, 0.0, case.row.causal, False)
    return lambda: torch.ops.aten._flash_attention_forward(case.q, case.k, case.v, *options)[0]


class PackedCudnn(torch.autograd.Function):
    """torch's cuDNN of packed sequences, by its operators."""

    @staticmethod
    def forward(ctx, q, k, v, starts, longest, causal):
        bounds = (starts, starts, longest, longest)
        operator = torch.ops.aten._cudnn_attention_forward
        out, lse, *_, seed, offset, _ = operator(q, k, v, None, *bounds, True, 0.0, causal, False)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.bounds, ctx.causal = bounds, causal
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, *state = ctx.saved_tensors
        operator = torch.ops.aten._cudnn_attention_backward
        return (*operator(dout, q, k, v, out, lse, *state, None, *ctx.bounds, 0.0, ctx.causal), None, None, None)


def packed_cudnn(case):
    if not case.row.packed or case.row.heads != case.row.heads_kv:
        return None
    return lambda: PackedCudnn.apply(case.q, case.k, case.v, case.starts, case.longest, case.row.causal)


def first(results):
    return results[0] if isinstance(results, tuple) else results


def fa3():
    import fa3_fwd_interface as library

    def of(case):
        # It has no gradients.
        q, k, v = (x.detach() for x in (case.q, case.k, case.v))
        causal = case.row.causal
        if case.row.packed:
            return lambda: first(library.flash_attn_varlen_func(q, k, v, *case.bounds, causal=causal))
        return lambda: first(library.flash_attn_func(q, k, v, causal=causal))

    return of


def fa4():
    from flash_attn import cute as library

    def of(case):
        causal, (starts, _, longest, _) = case.row.causal, case.bounds
        if case.row.packed:
            options = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
            return lambda: first(library.flash_attn_varlen_func(case.q, case.k, case.v, causal=causal, **options))
        return lambda: first(library.flash_attn_func(case.q, case.k, case.v, causal=causal))

    return of


def contestants():
    """Functions of a case by name, and why others are missing."""
    found, missing = {"fa": ours}, {}
    if GPU:
        found["fa2"] = torch_with(SDPBackend.FLASH_ATTENTION)
        found["cudnn"] = torch_with(SDPBackend.CUDNN_ATTENTION)
        found["fa2 packed"] = packed_fa2
        found["cudnn packed"] = packed_cudnn
        for name, load in (("fa3", fa3), ("fa4", fa4)):
            try:
                found[name] = load()
            except Exception as error:  # noqa: BLE001 - whatever an import raises
                missing[name] = f"{type(error).__name__}: {error}"
    else:
        found["sdpa"] = torch_with(SDPBackend.MATH)
    if "peers" in NAMED:
        wanted = NAMED["peers"].split(",")
        found = {name: of for name, of in found.items() if name == "fa" or name.split()[0] in wanted}
    return found, missing


class Replay:
    """So many steps in a graph that a replay takes LEAST."""

    def __init__(self, step):
        run = step()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        self.count = max(1, min(200, round(LEAST * 5 / (time.perf_counter() - begin))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
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


def compile_ours(row):
    """Compiles the kernels of a row, beside those of others."""
    case = Case(row)
    try:
        results_of(case, ours(case))
    except Exception as error:  # noqa: BLE001 - the row says it again
        print(f"{row}: {error}", file=sys.stderr)


def line(row, case, mode, own, errors):
    """A row of the table."""
    if "fa" not in own:
        return f"{row!s:50} {mode}  fa: {errors.get('fa') or errors.get(f'fa {mode}')}"
    rate, bytes_ = (count[mode] / own["fa"] * 1e-12 for count in (case.flops, case.bytes))
    peers = {name: seconds for name, seconds in own.items() if name != "fa"}
    best = min(peers, key=peers.get) if peers else None
    ratio = f"{peers[best] / own['fa']:.3f} of {best}" if best else "no peer"
    return f"{row!s:50} {mode} {own['fa'] * 1e6:8.1f} us {rate:5.0f} TFLOP/s {bytes_:5.2f} TB/s  {ratio}"


def ratio_of(own):
    """How many times as fast as the best peer; None without one."""
    peers = [seconds for name, seconds in own.items() if name != "fa"]
    return min(peers) / own["fa"] if peers and "fa" in own else None


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else "short.json"
    budget = float(next((x for x in sys.argv[2:] if x != "cpu" and "=" not in x), 120))
    all_rows = drawn(NAMED["seed"]) if "seed" in NAMED else rows()
    all_rows = [row for row in all_rows if NAMED.get("only", "") in str(row)]
    if "seed" in NAMED:
        print(f"rows drawn by seed {NAMED['seed']}")
    found, missing = contestants()
    if GPU:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(compile_ours, all_rows))
        torch.cuda.synchronize()
        # Forwards, backwards and graphs are of one stream that can be captured.
        torch.cuda.set_stream(torch.cuda.Stream())
        print(f"compiled after {time.time() - BEGIN:.0f} s", file=sys.stderr)
    measured, lines, ratios, against = [], [], {}, {}
    for at, row in enumerate(all_rows):
        if time.time() - BEGIN > budget:
            missing["rows"] = ", ".join(map(str, all_rows[at:]))
            break
        case = Case(row)
        times, errors, right = measure(case, found)
        measured.append({"row": str(row), "seconds": times, "errors": errors, "right": right})
        if not GPU:
            lines.append(f"{row!s:50} right: {', '.join(right)}")
        for mode, own in times.items():
            lines.append(line(row, case, mode, own, errors))
            ratio = ratio_of(own)
            if ratio is not None:
                ratios.setdefault(f"{row.form} {mode}", []).append(ratio)
                ratios.setdefault(f"{row.heads} of {row.dim} {mode}", []).append(ratio)
            for peer in own.keys() - {"fa"} if "fa" in own else ():
                against.setdefault(f"{row.form} {mode}, {peer}", []).append(own[peer] / own["fa"])
        lines += [f"{row!s:50} without {name}: {why}" for name, why in errors.items()]
        gpu = torch.cuda.get_device_name() if GPU else "none"
        report = {"gpu": gpu, "torch": torch.__version__, "rows": measured, "missing": missing}
        with open(out, "w") as file:
            json.dump(report, file, indent=1)
    print("\n".join(lines))
    for name, own in ratios.items():
        print(f"{name}: {statistics.geometric_mean(own):.3f} of the best, lowest {min(own):.3f}, {len(own)} rows")
    for name, own in sorted(against.items()):
        print(f"{name}: {statistics.geometric_mean(own):.3f}, lowest {min(own):.3f}, {len(own)} rows")
    for name, why in missing.items():
        print(f"without {name}: {why}")
    return 1 if any("fa" in row["errors"] for row in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
