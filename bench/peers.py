#!/usr/bin/env python3
"""Time other attention kernels on the GPU, for `fa bench --peers` to compare with in one run.

It is started by `fa` and talks in JSON, one object a line, requests on standard input and replies on standard output.
Standard error is for people. The first line it prints is

    {"hello": {"torch": "2.11.0", "gpu": "NVIDIA H100", "driver": "580.1", "peers": ["fa2", "cudnn"],
               "versions": {"fa2": "torch 2.11.0", "cudnn": "9.19.0"}, "errors": {...}}}

with null for what is not there, and in errors why a peer is not in the list. Then, one reply a request, in order:

    {"cmd": "time", "mode": "fwd"|"bwd", "batch": 1, "heads_q": 16, "heads_kv": 16, "seqlen_q": 8192, "seqlen_k": 8192,
     "head_dim": 128, "head_dim_v": 128, "causal": true, "dtype": "bf16"|"f16", "reps": 30,
     "window": [1023, 0], "softcap": 50.0,        these and what follows only where there are any; null is an open side
     "alibi": "per_head", "sinks": true, "deterministic": true,
     "sequences": {"q": {"store": "packed", "lens": [100, 7]}, "k": {"store": "paged", "lens": [90, 33], "page": 16}},
     "graph": 16}
        -> {"peers": {"fa2": 3.1, "cudnn": 1.9}, "errors": {"fa3": "forward only"}}      median milliseconds
    {"cmd": "open", ... as "time"}
        -> {"peers": ["fa2", "cudnn"], "errors": {"fa3": "forward only"}}    checked and warm; replaces what was open
    {"cmd": "round", "peer": "fa2", "reps": 6}
        -> {"times": [3.1, 3.2, ...], "errors": {}}    milliseconds of each call; the asker decides whose turn it is
    {"cmd": "close"}  -> {"errors": {}}    gives the memory back
    {"cmd": "warm", "requests": [{...}, ...]} -> {"compiled": 12, "errors": {}}    compiles what peers compile at their first
                      call (FlashAttention 4), in processes of its own side by side, into that peer's cache on disk
    {"cmd": "matmul"} -> {"tflops": 785.0, "ms": 1.4, "errors": {}}       8192^3, bf16, random normal
    {"cmd": "copy"}   -> {"gb_per_s": 3020.0, "ms": 1.4, "errors": {}}    on the device, bytes read plus bytes written
    {"cmd": "quit"}   -> no reply; it exits, as it does at the end of its input

"sequences" has the length of each sequence where they differ or lie otherwise than [batch, seqlen, heads, dim]; stores are
padded (with lengths in use), packed (cu_seqlens) and paged (shuffled pages of so many rows). With "graph" so many calls are
captured as one CUDA graph, which is replayed: times are those of one call still, without the host's. Peers then use their
entry for decoding, where they have one.

"time" takes an optional "peers": ["fa2", ...] that limits what is timed. A request that makes no sense gets
{"peers": {}, "errors": {"request": "why"}}. When the GPU context is lost the reply says so and the process exits with
status 1.

Peers:
    fa2     torch's scaled_dot_product_attention, flash backend (FlashAttention 2)
    cudnn   the same, cuDNN backend
    fa3     FlashAttention 3: the PyPI wheel fa3-fwd (forward, bf16), or a full build (flash_attn_interface)
    fa4     FlashAttention 4 (flash_attn.cute)

How it is timed: inputs are random normal, in BSHD memory for every peer. After a warm-up every call stands between two
CUDA events; a spin kernel holds the GPU back while calls are queued, so that no gap of the host's shows up, and a few calls
that do not count run between the two, so that clocks are those of work and not of idling. Peers take turns in rounds, in
another order each time, and the median over all rounds counts. Inputs that would stay in the L2 cache are replaced by several sets
used in turn. Backward is torch.autograd.grad alone on a retained graph. A peer whose result differs from the first peer's is
reported as an error and not timed.
"""

import importlib.metadata
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
import traceback

ROUNDS = 3
# Calls that do not count at the head of every queue.
LEAD_CALLS = 3
WARM_UP_CALLS = 3
WARM_UP_SECONDS = 0.02
# Calls queued behind one spin kernel; the driver's queue holds about a thousand launches.
QUEUE_CALLS = 32
SPIN_SECONDS_LIMIT = 0.25
L2_BYTES_FALLBACK = 50 << 20
MAX_INPUT_SETS = 8
MAX_GRAPH_CALLS = 256
# Peers that compile a kernel at their first call, and keep it on disk where this variable says so.
COMPILING = ("fa4",)
COMPILED_KERNELS_KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
MAX_COMPILERS = 15
COMPILE_SECONDS = 600
# Root mean square of the difference over that of the reference. 16-bit rounding stays under 1 percent.
DISAGREEMENT_LIMIT = 0.03


def log(*parts):
    print("peers:", *parts, file=sys.stderr, flush=True)


def brief(error):
    """One line of an exception, short enough for a table's footnote."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:400]


class Refused(Exception):
    """A peer does not do what was asked for, known without trying."""


def stores(request):
    """How queries and keys lie: (padded, packed or paged; None where they are plain tensors), each."""
    sequences = request.get("sequences") or {}
    return tuple((sequences.get(side) or {}).get("store") for side in ("q", "k"))


class Sdpa:
    """torch's scaled_dot_product_attention, kept to one backend."""

    def __init__(self, torch, backend_name):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.torch = torch
        self.backend = getattr(SDPBackend, backend_name)
        self.sdpa_kernel = sdpa_kernel

    def refuse(self, request):
        if request.get("deterministic"):
            raise Refused("torch's fused kernels are not asked for the same bits in every run here")
        if request.get("window") or request.get("softcap"):
            raise Refused("torch's fused kernels take no window and no soft cap")
        if request.get("sinks") or request.get("alibi"):
            raise Refused("torch's fused kernels take no sinks and no slopes")
        if request.get("sequences"):
            raise Refused("torch's fused kernels take neither packed sequences nor pages nor lengths in use")
        if request["causal"] and request["seqlen_q"] not in (1, request["seqlen_k"]):
            raise Refused("torch aligns a causal mask top-left; seqlen_q must be seqlen_k (or 1)")

    def __call__(self, tensors, request):
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        # One query at the bottom right sees every key; torch's top-left mask would leave it only the first.
        causal = request["causal"] and q.shape[1] > 1
        grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        with self.sdpa_kernel(self.backend):
            out = self.torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, **grouped)
        return out.transpose(1, 2)


class Package:
    """A package's functions: BSHD in and out, causal aligned bottom-right; by name flash_attn_func and, where it has them,
    flash_attn_varlen_func and flash_attn_with_kvcache."""

    def __init__(self, module, open_side, forward_only=False, dtypes=("bf16", "f16"), sinks=False):
        self.dense = module.flash_attn_func
        self.varlen = getattr(module, "flash_attn_varlen_func", None)
        self.kvcache = getattr(module, "flash_attn_with_kvcache", None)
        self.open_side = open_side
        self.forward_only = forward_only
        self.dtypes = dtypes
        self.sinks = sinks

    def refuse(self, request):
        if request["mode"] == "bwd" and self.forward_only:
            raise Refused("this build has the forward only")
        if request["dtype"] not in self.dtypes:
            raise Refused(f"this build does not take {request['dtype']}, only {', '.join(self.dtypes)}")
        if request.get("sinks") and not self.sinks:
            raise Refused("this build takes no sinks")
        if request.get("alibi"):
            raise Refused("this build takes no ALiBi slopes")
        q, k = stores(request)
        if q or k:
            if not (self.varlen or self.kvcache):
                raise Refused("this build takes neither packed sequences nor pages nor lengths in use")
            if "packed" in (q, k) and not self.varlen:
                raise Refused("this build takes no packed sequences")
            if k == "packed" and q != "packed" or q == "paged":
                raise Refused("this build takes packed keys with packed queries only")

    def options(self, request):
        options = {"causal": request["causal"]}
        if request.get("window"):
            options["window_size"] = tuple(self.open_side if side is None else side for side in request["window"])
        if request.get("softcap"):
            options["softcap"] = request["softcap"]
        if request.get("deterministic"):
            options["deterministic"] = True
        return options

    def __call__(self, tensors, request):
        options = self.options(request)
        if request.get("sinks"):
            options["learnable_sink"] = tensors["sinks"]
        q, k = stores(request)
        # What a build calls decoding splits the keys; its other functions do not.
        decodes = request["mode"] == "fwd" and self.kvcache and q != "packed" and k != "packed" and (k or request.get("graph"))
        if decodes and not request.get("sinks"):
            if k:
                options["cache_seqlens"] = tensors["used_k"]
            if k == "paged":
                options["page_table"] = tensors["table"]
            out = self.kvcache(tensors["q"], tensors["k"], tensors["v"], **options)
        elif q or k:
            lengths = {"cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k", "used_q": "seqused_q", "used_k": "seqused_k",
                       "table": "page_table"}
            given = {name: tensors[own] for own, name in lengths.items() if own in tensors}
            if q == "packed":
                given["max_seqlen_q"] = request["seqlen_q"]
            if k == "packed" or q == "packed":
                given["max_seqlen_k"] = request["seqlen_k"]
            out = self.varlen(tensors["q"], tensors["k"], tensors["v"], **given, **options)
        else:
            out = self.dense(tensors["q"], tensors["k"], tensors["v"], **options)
        # Some versions return (out, lse).
        return out[0] if isinstance(out, (tuple, list)) else out


def load_fa3(_torch):
    try:
        # Importing the module registers its operators; the wheel is built without the backward and without f16.
        import fa3_fwd_interface

        return Package(fa3_fwd_interface, open_side=-1, forward_only=True, dtypes=("bf16",))
    except ImportError as wheel_error:
        try:
            import flash_attn_interface
        except ImportError as error:
            raise ImportError(f"{wheel_error}; {error}") from error
        return Package(flash_attn_interface, open_side=-1)


def load_fa4(_torch):
    import flash_attn.cute

    return Package(flash_attn.cute, open_side=None, sinks=True)


LOADERS = {
    "fa2": lambda torch: Sdpa(torch, "FLASH_ATTENTION"),
    "cudnn": lambda torch: Sdpa(torch, "CUDNN_ATTENTION"),
    "fa3": load_fa3,
    "fa4": load_fa4,
}


def versions(torch):
    """What each peer is, as far as it says: torch's own backends, cuDNN, and the packages of the others."""
    found = {"fa2": f"torch {torch.__version__}"}
    cudnn = torch.backends.cudnn.version()
    if cudnn:
        found["cudnn"] = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    for name, packages in {"fa3": ("fa3-fwd", "flash-attn-3"), "fa4": ("flash-attn-4",)}.items():
        for package in packages:
            try:
                found[name] = f"{package} {importlib.metadata.version(package)}"
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


class Clock:
    """Times calls on the current stream with CUDA events."""

    def __init__(self, torch):
        self.torch = torch
        self.cycles_per_second = None

    def spin(self, seconds):
        """Keep the GPU busy for about `seconds`, so that calls queue up behind it."""
        sleep = getattr(self.torch.cuda, "_sleep", None)
        if sleep is None:
            return
        if self.cycles_per_second is None:
            cycles = 20_000_000
            sleep(cycles)
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            sleep(cycles)
            end.record()
            self.torch.cuda.synchronize()
            self.cycles_per_second = cycles / max(start.elapsed_time(end) / 1e3, 1e-6)
        sleep(int(min(seconds, SPIN_SECONDS_LIMIT) * self.cycles_per_second))

    def warm_up(self, call):
        """Run the call until clocks and caches have settled; return the host's seconds to queue one call."""
        call()
        self.torch.cuda.synchronize()
        begin = time.perf_counter()
        queued = []
        while len(queued) < WARM_UP_CALLS or time.perf_counter() - begin < WARM_UP_SECONDS:
            start = time.perf_counter()
            call()
            queued.append(time.perf_counter() - start)
            self.torch.cuda.synchronize()
        return statistics.median(queued)

    def time(self, call, calls, host_seconds):
        """Milliseconds of each of `calls` calls."""
        times = []
        while len(times) < calls:
            count = min(QUEUE_CALLS, calls - len(times))
            events = [[self.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            self.spin(1.5 * (count + LEAD_CALLS) * host_seconds + 1e-3)
            for _ in range(LEAD_CALLS):
                call()
            for start, end in events:
                start.record()
                call()
                end.record()
            self.torch.cuda.synchronize()
            times += [start.elapsed_time(end) for start, end in events]
        return times


class Inputs:
    """Sets of q, k, v, dout in BSHD memory (packed and paged where asked), enough of them to be out of the L2 cache when
    their turn comes."""

    def __init__(self, torch, request, device, most=MAX_INPUT_SETS):
        dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[request["dtype"]]
        heads_q, heads_kv = request["heads_q"], request["heads_kv"]
        sides = self.sides(request)
        shapes = {
            "q": (*sides["q"], heads_q, request["head_dim"]),
            "k": (*sides["k"], heads_kv, request["head_dim"]),
            "v": (*sides["k"], heads_kv, request["head_dim_v"]),
            "dout": (*sides["q"], heads_q, request["head_dim_v"]),
        }
        read = ("q", "k", "v", "dout") if request["mode"] == "bwd" else ("q", "k", "v")
        bytes_per_set = 2 * sum(math.prod(shapes[name]) for name in read)
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES_FALLBACK
        count = 1 if bytes_per_set > cache else min(most, 1 + math.ceil(cache / bytes_per_set))
        generator = torch.Generator(device=device).manual_seed(0)
        leaf = request["mode"] == "bwd"

        def draw(name):
            tensor = torch.randn(shapes[name], device=device, dtype=torch.float32, generator=generator).to(dtype)
            return tensor.requires_grad_() if leaf and name != "dout" else tensor

        extras = self.arrays(torch, request, device)
        if request.get("sinks"):
            sinks = torch.randn(heads_q, device=device, dtype=torch.float32, generator=generator)
            extras["sinks"] = sinks.requires_grad_() if leaf else sinks
        self.sets = [{name: draw(name) for name in read} | extras for _ in range(count)]

    @staticmethod
    def sides(request):
        """The leading lengths of the queries' and of the keys' tensors."""
        found = {}
        for side, seqlen in (("q", request["seqlen_q"]), ("k", request["seqlen_k"])):
            sequences = (request.get("sequences") or {}).get(side)
            if sequences and sequences["store"] == "packed":
                found[side] = (max(sum(sequences["lens"]), 1),)
            elif sequences and sequences["store"] == "paged":
                page = sequences["page"]
                found[side] = (max(sum(-(-length // page) for length in sequences["lens"]), 1), page)
            else:
                found[side] = (request["batch"], seqlen)
        return found

    @staticmethod
    def arrays(torch, request, device):
        """Lengths, starts and pages of the sequences, i32 on the device."""
        found = {}
        for side, sequences in (request.get("sequences") or {}).items():
            lens = sequences["lens"]
            own = torch.tensor(lens, dtype=torch.int32, device=device)
            seqlen = request["seqlen_q"] if side == "q" else request["seqlen_k"]
            if sequences["store"] == "packed":
                cu = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
                cu[1:] = own.cumsum(0)
                found[f"cu_{side}"] = cu
            elif sequences["store"] == "paged" or any(length != seqlen for length in lens) or side == "k":
                found[f"used_{side}"] = own
            if sequences["store"] == "paged":
                page = sequences["page"]
                needed = [-(-length // page) for length in lens]
                generator = torch.Generator().manual_seed(page)
                order = torch.randperm(sum(needed), generator=generator).to(torch.int32)
                columns = max(-(-seqlen // page), max(needed, default=1), 1)
                table = torch.zeros((len(lens), columns), dtype=torch.int32)
                first = 0
                for row, count in enumerate(needed):
                    table[row, :count] = order[first : first + count]
                    first += count
                found["table"] = table.to(device)
        return found


def make_call(torch, peer, request, inputs):
    """A call that takes the next input set each time and returns what to compare, by name: out, or dq, dk and dv."""
    turn = 0
    if request["mode"] == "fwd":

        def call():
            nonlocal turn
            tensors = inputs.sets[turn % len(inputs.sets)]
            turn += 1
            with torch.no_grad():
                return {"out": peer(tensors, request)}

        return call

    graphs = []
    for tensors in inputs.sets:
        leaves = {f"d{name}": tensors[name] for name in ("q", "k", "v", "sinks") if name in tensors}
        graphs.append((peer(tensors, request), leaves, tensors["dout"]))

    def call():
        nonlocal turn
        out, leaves, dout = graphs[turn % len(graphs)]
        turn += 1
        gradients = torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True)
        return dict(zip(leaves, gradients, strict=True))

    return call


class Replay:
    """So many calls captured as one CUDA graph."""

    def __init__(self, torch, call, calls):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.calls = calls
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            # Results live in the graph's memory.
            self.results = [call() for _ in range(calls)]

    def __call__(self):
        self.graph.replay()
        return self.results[-1]


def disagreement(result, reference):
    difference = (result.float() - reference.float()).square().mean().sqrt().item()
    size = reference.float().square().mean().sqrt().item()
    return difference / max(size, 1e-30)


def checked_request(request):
    """The request with every field present and of the right kind, or ValueError."""
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "reps"):
        value = request.get(name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    if request["heads_q"] % request["heads_kv"] != 0:
        raise ValueError(f"heads_q {request['heads_q']} is not a multiple of heads_kv {request['heads_kv']}")
    for name, allowed in (("mode", ("fwd", "bwd")), ("dtype", ("bf16", "f16")), ("causal", (True, False))):
        if request.get(name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, not {request.get(name)!r}")
    window = request.get("window")
    if window is not None:
        is_side = [side is None or type(side) is int and side >= 0 for side in window]
        if len(is_side) != 2 or not all(is_side) or request["causal"]:
            raise ValueError(f"window must be two sides, each null or at least 0, without causal, not {window!r}")
    softcap = request.get("softcap")
    if softcap is not None and not (isinstance(softcap, (int, float)) and softcap > 0):
        raise ValueError(f"softcap must be above 0, not {softcap!r}")
    graph = request.get("graph")
    if graph is not None and not (type(graph) is int and 1 <= graph <= MAX_GRAPH_CALLS):
        raise ValueError(f"graph must be a whole number from 1 to {MAX_GRAPH_CALLS}, not {graph!r}")
    if graph is not None and request["mode"] == "bwd":
        raise ValueError("graph goes with the forward")
    for name in ("deterministic", "sinks"):
        if request.get(name) not in (None, True, False):
            raise ValueError(f"{name} must be true or false, not {request.get(name)!r}")
    checked_sequences(request)
    return request


def checked_sequences(request):
    """Both sides' stores and lengths, where there are any, fit the request's bounds, or ValueError."""
    sequences = request.get("sequences")
    if sequences is None:
        return
    if not isinstance(sequences, dict) or set(sequences) != {"q", "k"}:
        raise ValueError(f"sequences must have q and k, not {sequences!r}")
    for side, bound in (("q", request["seqlen_q"]), ("k", request["seqlen_k"])):
        store, lens, page = (sequences[side].get(name) for name in ("store", "lens", "page"))
        if store not in ("padded", "packed", "paged") or (store == "paged") != (page is not None):
            raise ValueError(f"{side} must be padded, packed or paged with a page, not {store!r} with {page!r}")
        if page is not None and not (type(page) is int and page >= 1):
            raise ValueError(f"page must be a whole number of at least 1, not {page!r}")
        fits = isinstance(lens, list) and all(type(length) is int and 0 <= length <= bound for length in lens)
        if not fits or len(lens) != request["batch"]:
            raise ValueError(f"lens of {side} must be {request['batch']} whole numbers of at most {bound}")


def compile_key(request):
    """Requests of one key have the same kernels: batch and lengths of single sequences do not count."""
    sequences = request.get("sequences") or {}
    kinds = tuple((side, own["store"], own.get("page")) for side, own in sorted(sequences.items()))
    left_out = ("batch", "sequences", "reps", "peers", "cmd", "graph")
    rest = tuple(sorted((name, str(value)) for name, value in request.items() if name not in left_out))
    return kinds, rest


class Helper:
    """The peers that could be loaded, and the answers to requests."""

    def __init__(self):
        self.peers = {}
        self.errors = {}
        self.torch = None
        self.session = None
        self.context_lost = False
        try:
            import torch

            self.torch = torch
        except Exception as error:
            self.errors["torch"] = brief(error)
            return
        if not torch.cuda.is_available():
            self.errors["gpu"] = "torch sees no CUDA GPU"
            return
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.clock = Clock(torch)
        for name, load in LOADERS.items():
            try:
                self.peers[name] = load(torch)
            except Exception as error:
                self.errors[name] = brief(error)

    def hello(self):
        gpu = self.torch.cuda.get_device_name(self.device) if self.peers else None
        version = self.torch.__version__ if self.torch else None
        hello = {"torch": version, "gpu": gpu, "driver": driver_version(), "peers": list(self.peers)}
        known = versions(self.torch) if self.peers else {}
        hello["versions"] = {name: known[name] for name in self.peers if name in known}
        return {"hello": hello | {"errors": self.errors}}

    def answer(self, request):
        handlers = {
            "time": self.time,
            "open": self.open,
            "round": self.round,
            "close": self.close,
            "warm": self.warm,
            "matmul": self.matmul,
            "copy": self.copy,
        }
        command = request.get("cmd") if isinstance(request, dict) else None
        if command not in handlers:
            raise ValueError(f"cmd must be one of {', '.join(handlers)}, quit, not {command!r}")
        if not self.peers:
            return {"peers": {}, "errors": dict(self.errors)}
        try:
            return handlers[command](request)
        finally:
            # Memory given back between rounds would have to be asked for again within the next one.
            if command != "round":
                self.tidy()

    def tidy(self):
        """Give memory back, and notice a lost context: after an illegal access no call works any more."""
        try:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
        except Exception as error:
            self.context_lost = True
            log("the GPU context is lost:", brief(error))

    def open(self, request):
        """Peers that compute the request, with inputs and warm; kept until the next one."""
        self.session = None
        request = checked_request(request)
        wanted = request.get("peers") or list(self.peers)
        errors = {name: self.errors.get(name, "no such peer") for name in wanted if name not in self.peers}
        inputs = Inputs(self.torch, request, self.device)
        calls, host_seconds, reference = {}, {}, None
        for name in wanted:
            if name in errors:
                continue
            try:
                peer = self.peers[name]
                peer.refuse(request)
                call = make_call(self.torch, peer, request, inputs)
                results = call()
                for what, result in results.items():
                    if not bool(self.torch.isfinite(result).all()):
                        raise Refused(f"its {what} is not finite")
                    if reference and not (off := disagreement(result, reference[1][what])) < DISAGREEMENT_LIMIT:
                        raise Refused(f"its {what} differs from {reference[0]}'s by {off:.3g}")
                if reference is None:
                    reference = (name, {what: result.clone() for what, result in results.items()})
                del results, result
                if request.get("graph"):
                    call = Replay(self.torch, call, request["graph"])
                host_seconds[name] = self.clock.warm_up(call)
                calls[name] = call
            except Exception as error:
                errors[name] = str(error) if isinstance(error, Refused) else brief(error)
                log(name, "failed:", errors[name])
        self.session = (calls, host_seconds)
        return {"peers": list(calls), "errors": errors}

    def round(self, request):
        """Times of one peer of what is open."""
        calls, host_seconds = self.session or ({}, {})
        name, reps = request.get("peer"), request.get("reps")
        if name not in calls:
            raise ValueError(f"{name!r} is not open, only {', '.join(calls) or 'nothing'}")
        if type(reps) is not int or reps < 1:
            raise ValueError(f"reps must be a whole number of at least 1, not {reps!r}")
        try:
            times = self.clock.time(calls[name], reps, host_seconds[name])
            share = getattr(calls[name], "calls", 1)
            return {"times": [ms / share for ms in times], "errors": {}}
        except Exception as error:
            log(name, "failed while timed:", brief(error))
            del calls[name]
            self.tidy()
            return {"times": [], "errors": {name: brief(error)}}

    def close(self, _request):
        self.session = None
        return {"errors": {}}

    def warm(self, request):
        """Compile the kernels of the requests' peers into their cache on disk."""
        requests = [checked_request(own) for own in request.get("requests") or []]
        if not any(name in self.peers for name in COMPILING):
            return {"compiled": 0, "errors": {}}
        distinct = list({compile_key(own): own for own in requests}.values())
        count = min(len(distinct), max((os.cpu_count() or 2) - 1, 1), MAX_COMPILERS)
        command = [sys.executable, os.path.abspath(__file__), "--warm"]
        workers = []
        for index in range(count):
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            worker.stdin.write("".join(json.dumps(own) + "\n" for own in distinct[index::count]))
            worker.stdin.close()
            workers.append(worker)
        deadline = time.monotonic() + COMPILE_SECONDS
        errors = {}
        for worker in workers:
            try:
                worker.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.kill()
                errors["warm"] = f"compiling took more than {COMPILE_SECONDS} s"
        return {"compiled": len(distinct), "errors": errors}

    def compile(self, request):
        """Call the peers that compile once, for their cache."""
        request = checked_request(request)
        inputs = Inputs(self.torch, request, self.device, most=1)
        for name in COMPILING:
            try:
                peer = self.peers[name]
                peer.refuse(request)
                make_call(self.torch, peer, request, inputs)()
            except Exception as error:
                log(name, "is not compiled:", str(error) if isinstance(error, Refused) else brief(error))
        del inputs
        self.tidy()

    def time(self, request):
        opened = self.open(request)
        errors = opened["errors"]
        times = {name: [] for name in opened["peers"]}
        for _ in range(ROUNDS):
            left = [name for name in times if name not in errors]
            for name in random.sample(left, len(left)):
                answer = self.round({"peer": name, "reps": math.ceil(request["reps"] / ROUNDS)})
                times[name] += answer["times"]
                errors |= answer["errors"]
        self.session = None
        return {"peers": {name: statistics.median(times[name]) for name in times if name not in errors}, "errors": errors}

    def matmul(self, _request):
        n = 8192
        a, b = (self.torch.randn(n, n, device=self.device).bfloat16() for _ in range(2))
        out = self.torch.empty_like(a)
        ms = self.median_ms(lambda: self.torch.mm(a, b, out=out))
        return {"tflops": 2 * n**3 / ms / 1e9, "ms": ms, "errors": {}}

    def copy(self, _request):
        source = self.torch.randint(0, 255, (2 << 30,), device=self.device, dtype=self.torch.uint8)
        target = self.torch.empty_like(source)
        ms = self.median_ms(lambda: target.copy_(source))
        return {"gb_per_s": 2 * source.numel() / ms / 1e6, "ms": ms, "errors": {}}

    def median_ms(self, call):
        host_seconds = self.clock.warm_up(call)
        return statistics.median(self.clock.time(call, 20, host_seconds))


def driver_version():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def compile_only():
    """What a process of "warm" does: requests by lines, no replies."""
    helper = Helper()
    for line in sys.stdin:
        if line.strip() and not helper.context_lost:
            helper.compile(json.loads(line))
    return 0


def main():
    os.environ.setdefault(COMPILED_KERNELS_KEPT, "1")
    if "--warm" in sys.argv[1:]:
        return compile_only()
    # Packages print as they like; only replies may reach standard output, so it becomes standard error for all else.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    helper = Helper()
    reply(helper.hello())
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            request = json.loads(line)
            if isinstance(request, dict) and request.get("cmd") == "quit":
                return 0
            answer = helper.answer(request)
        except ValueError as error:
            answer = {"peers": {}, "errors": {"request": str(error)}}
        except Exception as error:
            log(traceback.format_exc())
            answer = {"peers": {}, "errors": {"request": brief(error)}}
        if helper.context_lost:
            answer.setdefault("errors", {})["gpu"] = "the GPU context is lost; start this helper again"
        reply(answer)
        if helper.context_lost:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
