"""The peers that are there, and the answers to requests."""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time

from .inputs import Inputs, disagreement, make_call
from .kernels import LOADERS, versions
from .report import Refused, brief, log
from .request import checked_request, compile_key
from .timing import Clock, Replay

ROUNDS = 3
# Peers that compile a kernel at their first call, and keep it on disk where this variable says so.
COMPILING = ("fa4",)
COMPILED_KERNELS_KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
MAX_COMPILERS = 15
COMPILE_SECONDS = 600
# Root mean square of the difference over that of the reference. 16-bit rounding stays under 1 percent.
DISAGREEMENT_LIMIT = 0.03


class Helper:
    """The peers that could be loaded, and the answers to requests."""

    def __init__(self):
        self.peers = {}
        self.errors = {}
        self.torch = None
        self.session = None
        self.context_lost = False
        # The peer that was at work when the context was lost.
        self.lost_to = None
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

    def survives(self, name):
        """Whether the context still works after peer `name` has failed."""
        self.tidy()
        if self.context_lost:
            self.lost_to = name
        return not self.context_lost

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
                    off = disagreement(result, reference[1][what]) if reference else 0.0
                    if not off < DISAGREEMENT_LIMIT:
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
                # What the failed call left behind is freed before the next one's turn.
                call = results = result = None
                if not isinstance(error, Refused) and not self.survives(name):
                    return {"peers": [], "errors": errors}
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
            self.survives(name)
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
        command = [sys.executable, os.path.abspath(sys.argv[0]), "--warm"]
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
        medians = {name: statistics.median(times[name]) for name in times if name not in errors}
        return {"peers": medians, "errors": errors}

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
