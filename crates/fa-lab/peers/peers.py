#!/usr/bin/env python3
"""Time other attention kernels on the GPU, for `fa bench --peers` to compare with in one run.

It is started by `fa` and talks in JSON, one object a line, requests on standard input and replies on standard
output. Standard error is for people. The first line it prints is

    {"hello": {"torch": "2.11.0", "gpu": "NVIDIA H100", "driver": "580.1", "peers": ["fa2", "cudnn"],
               "versions": {"fa2": "torch 2.11.0", "cudnn": "9.19.0"}, "errors": {...}}}

with null for what is not there, and in errors why a peer is not in the list. Then, one reply a request, in
order:

    {"cmd": "time", "mode": "fwd"|"bwd", "batch": 1, "heads_q": 16, "heads_kv": 16, "seqlen_q": 8192,
     "seqlen_k": 8192, "head_dim": 128, "head_dim_v": 128, "causal": true, "dtype": "bf16"|"f16", "reps": 30,
     "window": [1023, 0],        a null is an open side; this and what follows only where there is any
     "softcap": 50.0, "alibi": "per_head", "sinks": true, "deterministic": true,
     "sequences": {"q": {"store": "packed", "lens": [100, 7]},
                   "k": {"store": "paged", "lens": [90, 33], "page": 16}},
     "graph": 16}
        -> {"peers": {"fa2": 3.1, "cudnn": 1.9}, "errors": {"fa3": "forward only"}}      median milliseconds
    {"cmd": "open", ... as "time"}
        -> {"peers": ["fa2", "cudnn"], "errors": {"fa3": "forward only"}}
           checked and warm; replaces what was open
    {"cmd": "round", "peer": "fa2", "reps": 6}
        -> {"times": [3.1, 3.2, ...], "errors": {}}
           milliseconds of each call; the asker decides whose turn it is
    {"cmd": "close"}  -> {"errors": {}}    gives the memory back
    {"cmd": "warm", "requests": [{...}, ...]}
        -> {"compiled": 12, "errors": {}}
           compiles what peers compile at their first call (FlashAttention 4), in processes of its own side by
           side, into that peer's cache on disk
    {"cmd": "matmul"} -> {"tflops": 785.0, "ms": 1.4, "errors": {}}       8192^3, bf16, random normal
    {"cmd": "copy"}   -> {"gb_per_s": 3020.0, "ms": 1.4, "errors": {}}    on the device, read and written
    {"cmd": "quit"}   -> no reply; it exits, as it does at the end of its input

"sequences" has the length of each sequence where they differ or lie otherwise than [batch, seqlen, heads,
dim]; stores are padded (with lengths in use), packed (cu_seqlens) and paged (shuffled pages of so many rows).
With "graph" so many calls are captured as one CUDA graph, which is replayed: times are those of one call
still, without the host's. Peers then use their entry for decoding, where they have one.

"time" takes an optional "peers": ["fa2", ...] that limits what is timed. A request that makes no sense gets
{"peers": {}, "errors": {"request": "why"}}. When the GPU context is lost the reply says so, with the peer
that was at work in "lost_to" (null where none was), and the process exits with status 1: `fa` starts another
and leaves that peer out of the shape.

Peers (fa_peers/kernels.py):
    fa2     torch's scaled_dot_product_attention, flash backend (FlashAttention 2)
    cudnn   the same, cuDNN backend
    fa3     FlashAttention 3: the PyPI wheel fa3-fwd (forward, bf16), or a full build (flash_attn_interface)
    fa4     FlashAttention 4 (flash_attn.cute)
    flashinfer  FlashInfer of keys in pages, planned beforehand (it compiles by nvcc at its first call)

How it is timed: inputs are random normal, in BSHD memory for every peer. After a warm-up every call stands
between two CUDA events; a spin kernel holds the GPU back while calls are queued, so that no gap of the host's
shows up, and a few calls that do not count run between the two, so that clocks are those of work and not of
idling. Peers take turns in rounds, in another order each time, and the median over all rounds counts. Inputs
that would stay in the L2 cache are replaced by several sets used in turn; results go to the memory that
torch's allocator has just got back, and ours to the same tensors in every call. Backward is
torch.autograd.grad alone on a retained graph. A peer whose result differs from the first peer's is reported
as an error and not timed.
"""

import json
import os
import sys
import traceback

from fa_peers.helper import COMPILED_KERNELS_KEPT, Helper
from fa_peers.report import brief, log


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
    # Packages print as they like, and only replies may reach standard output: it becomes standard error for
    # all else.
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
            answer["lost_to"] = helper.lost_to
        reply(answer)
        if helper.context_lost:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
