"""Gradients through pages, beside those of the same keys without pages.

pip install torch pytest && python -m pytest tests/test_torch_paged.py
"""

import pytest

torch = pytest.importorskip("torch")

from torch_cases import close, on, tensors  # noqa: E402

import fa_attn  # noqa: E402

OPTIONS = {
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(3, 0), softcap=3.0),
    "program": dict(causal=True, score_mod=lambda s, b, h, q, k: s * 0.5 + 0.1 * (q - k)),
    "dropout": dict(dropout_p=0.3, rng_state=(1, 2)),
    "sinks": dict(causal=True),
}


@on
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("is_packed", [True, False])
def test_pages_have_gradients(device, dtype, kind, is_packed):
    q, k, v = tensors(device, dtype, (10, 4, 64), (6, 4, 2, 64), (6, 4, 2, 64))
    # Sequences share a page, and what lies behind their pages may be anything.
    table = torch.tensor([[3, 1, -1], [3, 5, 4]], dtype=torch.int32, device=device)
    used = torch.tensor([7, 10], dtype=torch.int32, device=device)
    options = dict(OPTIONS[kind], return_softmax_lse=True, seqused_k=used)
    if kind == "sinks":
        options["sinks"] = torch.linspace(-1, 2, 4, device=device, requires_grad=True)
    if is_packed:
        starts = (torch.tensor([0, 4, 10], dtype=torch.int32, device=device), None, 6, 12)
        rows = q
    else:
        starts, rows = (None, None, None, 12), q.unflatten(0, (2, 5))
    leaves = [q, k, v, *([options["sinks"]] if kind == "sinks" else [])]

    def gradients(made):
        (out, lse), seed = made, torch.Generator().manual_seed(7)
        douts = [torch.randn(x.shape, generator=seed).to(x) for x in (out, lse)]
        return torch.autograd.grad((out, lse), leaves, douts)

    paged = fa_attn.flash_attn_varlen_func(rows, k, v, *starts, block_table=table, **options)
    got = gradients(paged)
    own = [x[table.long().clamp(min=0)].flatten(1, 2) for x in (k, v)]
    starts = (*starts[:3], 0)
    plain = fa_attn.flash_attn_varlen_func(rows, *own, *starts, **options)
    for one, other in zip(got, gradients(plain)):
        assert one.dtype == other.dtype
        close(one, other.double(), dtype, 4)
    assert not got[1][[0, 2]].any() and not got[2][[0, 2]].any()


@on
def test_a_cache_that_is_read_alone_gets_none(device, dtype):
    q, k = tensors(device, dtype, (2, 5, 4, 64), (300, 4, 2, 64), grad=False)
    table = torch.tensor([[3, 1], [2, 5]], dtype=torch.int32, device=device)
    used = torch.tensor([7, 8], dtype=torch.int32, device=device)
    q.requires_grad_()
    out = fa_attn.flash_attn_varlen_func(q, k, k, max_seqlen_k=8, seqused_k=used, block_table=table)
    (got,) = torch.autograd.grad(out.sum(), q)
    own = k[table.long()].flatten(1, 2)
    want = fa_attn.flash_attn_varlen_func(q, own, own, seqused_k=used)
    close(got, torch.autograd.grad(want.sum(), q)[0].double(), dtype, 4)


def test_pages_have_gradients_in_one_graph():
    q, k, v = tensors("cpu", torch.float32, (10, 4, 64), (6, 4, 2, 64), (6, 4, 2, 64))
    table = torch.tensor([[3, 1, 0], [3, 5, 4]], dtype=torch.int32)
    used = torch.tensor([7, 10], dtype=torch.int32)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)

    def loss(q, k, v):
        out = fa_attn.flash_attn_varlen_func(
            q, k, v, starts, None, 6, 12, causal=True, seqused_k=used, block_table=table
        )
        return out.square().sum()

    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    made = torch.compile(loss, backend="aot_eager", fullgraph=True)(q, k, v)
    for one, other in zip(torch.autograd.grad(made, (q, k, v)), want):
        assert torch.equal(one, other)
