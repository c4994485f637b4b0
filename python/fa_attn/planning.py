"""Problems, plans and bound kernels as plain dicts."""

import json

from . import _core


def problem(
    batch=1,
    seqlen=None,
    heads=1,
    head_dim=64,
    *,
    seqlen_q=None,
    seqlen_k=None,
    heads_kv=None,
    head_dim_v=None,
    dtype="bf16",
    causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    alibi=None,
    sinks=False,
    total_q=None,
    total_k=None,
    page=None,
    pages=None,
    used_q=False,
    used_k=False,
):
    """A problem of attention as a dict, checked.

    `seqlen`, or `seqlen_q` and `seqlen_k`: rows of a sequence, upper bounds where lengths differ. `total_q`,
    `total_k`: rows of packed arrays; `page`, `pages`: rows of a page and pages of the cache; `used_q`,
    `used_k`: whether lengths in use are given. `dtype`: f32, f16 or bf16. `alibi`: "per_head" or
    "per_sequence_head".
    """
    left, right = window_size
    sides = {
        "left": None if left is None or left < 0 else left,
        "right": 0 if causal else None if right is None or right < 0 else right,
    }
    fields = {
        "batch": batch,
        "seqlen_q": seqlen if seqlen_q is None else seqlen_q,
        "seqlen_k": seqlen if seqlen_k is None else seqlen_k,
        "total_q": total_q,
        "total_k": total_k,
        "page": page,
        "pages": pages,
        "used_q": used_q,
        "used_k": used_k,
        "heads_q": heads,
        "heads_kv": heads if heads_kv is None else heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        "mask": sides,
        "dtype": dtype,
        "softmax_scale": softmax_scale,
        "softcap": softcap or None,
        "alibi": alibi,
        "sinks": sinks,
    }
    if fields["seqlen_q"] is None or fields["seqlen_k"] is None:
        raise _core.InputError("seqlen is missing: give seqlen, or seqlen_q and seqlen_k")
    return json.loads(_core.problem(json.dumps(fields)))
