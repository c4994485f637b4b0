"""Gradients through pages: the keys that requests see are copied from their pages, and gradients added to
them, by torch's operations."""

from __future__ import annotations

import torch

from ._torch_memory import FLOAT


def are_paged(extras):
    return extras is not None and extras.page_table is not None


def gradients_of_pages(run, dout, q, k, v, out, lse, grads, options, extras, *others):
    """`run`, a backward, of keys in pages. `grads`: those of q, k and v, the last two None where they are not
    wanted. Takes the keys and values of all columns of the table, as much for their gradients, and f32 for
    those of all pages, of K and of V in turn; of a page that several requests share they are summed in one
    order."""
    # What lies behind a request's pages may be anything, and is not read.
    table = extras.page_table.long().clamp(0, max(k.shape[0] - 1, 0))
    rows = [x[table].flatten(1, 2) for x in (k, v)]
    made = [torch.zeros_like(x) for x in rows]
    own = extras._replace(page_table=None, max_seqlen_k=0)
    dq, *of_pages = grads
    dsinks = run(dout, q, *rows, out, lse, (dq, *made), options, own, *others)
    for whole, part in zip(of_pages, made):
        if whole is not None:
            sums = torch.zeros(whole.shape, dtype=FLOAT, device=whole.device)
            part = part.unflatten(1, (table.shape[1], -1)).to(FLOAT)
            whole.copy_(sums.index_put_((table,), part, accumulate=True))
    return dsinks
