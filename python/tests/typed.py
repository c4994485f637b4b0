"""What a type checker sees of the package: pyright checks this file, which is never run. A line with
`type: ignore` must be a mistake."""

from typing import Tuple

import numpy as np
from typing_extensions import assert_type

import fa_attn

q: "np.ndarray[Tuple[int, ...], np.dtype[np.float32]]" = np.zeros((1, 8, 2, 32), np.float32)

assert_type(
    fa_attn.flash_attn_func(q, q, q, causal=True), "np.ndarray[Tuple[int, ...], np.dtype[np.float32]]"
)
out, lse = fa_attn.flash_attn_func(q, q, q, return_softmax_lse=True, sinks=None, num_splits=2)
out.astype(np.float64)
lse.max()
fa_attn.flash_attn_func(q, q, q, casual=True)  # type: ignore
fa_attn.flash_attn_func(q, q, q, sinks=3)  # type: ignore
fa_attn.flash_attn_func(q, q, q, window_size=5)  # type: ignore
fa_attn.flash_attn_qkvpacked_func(q, return_lse=False, num_split=2)  # type: ignore
fa_attn.flash_attn_varlen_func(q, q, q, max_seqlen_q="8")  # type: ignore
fa_attn.flash_attn_with_kvcache(q, q, q, cache_seqlens=3).max()
fa_attn.flash_attn_with_kvcache(q, q, q, cache_seqlen=3)  # type: ignore
problem = fa_attn.problem(1, 8, heads="32:8", causal=True)
fa_attn.plan(problem, limit=1).save("plan.html")
fa_attn.plan(problem, archs="sm90")  # type: ignore
kernels = fa_attn.Kernels(problem)
kernels.forward(q, q, q, sinks=q)[0].astype(np.float32)
kernels.forward(q, q, q, sink=q)  # type: ignore
