"""FlashMLA's functions and `qv` on torch tensors: strided caches, operators, gradients, memory."""

import pytest
import torch

import fa_attn
from fa_attn import flash_mla

SCALE = 192**-0.5


def step(batch=3, seqlen_q=2, heads=16, columns=576, page=16, most=70, dtype=torch.bfloat16, seed=0):
    """Queries and one buffer of rows, NaN where no sequence has one, with what else a step needs."""
    torch.manual_seed(seed)
    used = torch.tensor([most, 0, 33][:batch], dtype=torch.int32)
    columns_of_table = -(-most // page) + 1
    table = torch.full((batch, columns_of_table), 2147480000, dtype=torch.int32)
    order = torch.randperm(batch * columns_of_table).tolist()
    # A cache of more layers, of which this is one: pages do not follow each other.
    cache = torch.full((batch * columns_of_table, 2, page, 1, columns), float("nan"), dtype=dtype)[:, 1]
    for b in range(batch):
        for i in range(-(-int(used[b]) // page)):
            table[b, i] = order.pop()
            count = min(page, int(used[b]) - i * page)
            cache[table[b, i], :count] = torch.randn(count, 1, columns).to(dtype)
    return torch.randn(batch, seqlen_q, heads, columns).to(dtype), cache, table, used


def reference(q, cache, table, used, columns_v, scale, causal):
    """(out, lse) in f64."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, columns_v, dtype=torch.float64)
    lse = torch.full((batch, heads, rows), torch.inf, dtype=torch.float64)
    for b in range(batch):
        n = int(used[b])
        pages = [cache[p, :, 0] for p in table[b].tolist() if p < cache.shape[0]]
        keys = torch.cat([*pages, cache[:0, 0, 0]])
        keys = keys[:n].double()
        scores = torch.einsum("ihd,jd->hij", q[b].double(), keys) * scale
        if causal:
            hidden = torch.arange(n)[None] > torch.arange(rows)[:, None] + n - rows
            scores = scores.masked_fill(hidden, -torch.inf)
        if n:
            own = torch.logsumexp(scores, -1)
            lse[b] = own.masked_fill(own == -torch.inf, torch.inf)
            out[b] = torch.einsum("hij,jd->ihd", torch.exp(scores - lse[b][..., None]), keys[:, :columns_v])
    return out, lse


def close(got, want, room):
    assert got.shape == want.shape
    both = torch.isfinite(want)
    assert (torch.isfinite(got) == both).all()
    assert (got.double() - want)[both].abs().max() <= room


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype, room", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 2e-6)]
)
def test_a_layer_of_a_larger_cache(dtype, room, causal):
    q, cache, table, used = step(dtype=dtype)
    meta, none = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 512, meta, none, SCALE, causal)
    assert out.dtype is dtype and lse.dtype is torch.float32
    want, want_lse = reference(q, cache, table, used, 512, SCALE, causal)
    close(out, want, room)
    close(lse, want_lse, 1e-4 if dtype is torch.float32 else 2e-2)
    assert torch.isposinf(lse[1]).all()
    # By the default scale, and rows without rotary columns.
    q, cache = q[..., :512].contiguous(), cache[..., :512]
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 512, causal=causal)
    want, _ = reference(q, cache, table, used, 512, 512**-0.5, causal)
    close(out, want, room)


def test_tokens_on_rows_of_their_choice():
    q, cache, table, used = step(seqlen_q=2)
    there = torch.isfinite(cache[:, :, 0, 0]).flatten().nonzero()[:, 0]
    indices = there[torch.randint(len(there), (3, 2, 20))].to(torch.int32)
    indices[:, :, 15:] = -1
    lengths = torch.tensor([20, 6, 20], dtype=torch.int32)
    sinks = torch.randn(16)
    call = dict(softmax_scale=SCALE, indices=indices, topk_length=lengths, attn_sink=sinks)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, **call)
    flat = cache.reshape(-1, 576)
    for b in range(3):
        for i in range(2):
            keys = flat[indices[b, i, : min(15, int(lengths[b]))].long()].double()
            scores = q[b, i].double() @ keys.T * SCALE
            own = torch.logsumexp(scores, -1)
            close(lse[b, :, i], own, 2e-2)
            share = torch.sigmoid(own - sinks)[:, None]
            close(out[b, i], torch.softmax(scores, -1) @ keys[:, :512] * share, 2e-2)
    tokens, most, lse = flash_mla.flash_mla_sparse_fwd(
        q[0], flat[:, None], indices[0][:, None], SCALE, topk_length=lengths[:2]
    )
    assert tokens.shape == (2, 16, 512) and most.shape == lse.shape == (2, 16)
    assert (most <= lse + 1e-5).all() and (lse <= most + 4).all()


def qkv(dtype=torch.float32):
    torch.manual_seed(1)
    shapes = [(3, 4, 8), (3, 4, 24), (20, 1, 8), (20, 1, 24)]
    return (torch.randn(2, *shape, dtype=dtype) for shape in shapes)


def test_a_second_query_on_the_values():
    q, qv, k, v = qkv()
    want = fa_attn.flash_attn_func(torch.cat([qv, q], -1), torch.cat([v, k], -1), v, causal=True)
    torch.testing.assert_close(fa_attn.flash_attn_func(q, k, v, causal=True, qv=qv), want)
    used = torch.tensor([20, 20], dtype=torch.int32)
    out = fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, qv=qv)
    torch.testing.assert_close(out, want)
    call = lambda q, qv, k, v: fa_attn.flash_attn_func(q, k, v, causal=True, qv=qv)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, qv, k, v), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = fa_attn.flash_attn_func(q, k, v, causal=True, qv=qv)
    assert half.dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fa_attn.flash_attn_func(q, k, v, causal=True, qv=qv.bfloat16()), half)
    torch.testing.assert_close(half.float(), want, atol=3e-2, rtol=3e-2)
    each = torch.func.vmap(call)
    torch.testing.assert_close(each(q[:, None], qv[:, None], k[:, None], v[:, None])[:, 0], want)


def test_operators_take_latent_problems():
    q, qv, k, v = qkv()
    # Scale, causal, window, soft cap, deterministic, offset, latent, codes and the type of out.
    options = (0.2, True, -1, -1, 0.0, False, 0, True, None, None)
    arguments = (torch.cat([qv, q], -1), k, v, *(None,) * 10, 0, 0, *options)
    torch.library.opcheck(torch.ops.fa_attn.forward, arguments, test_utils=["test_schema", "test_faketensor"])


def test_gradients_are_refused_by_name():
    q, qv, k, v = qkv()
    out = fa_attn.flash_attn_func(q.requires_grad_(), k, v, qv=qv)
    with pytest.raises(fa_attn.UnsupportedError, match="a latent problem has no backward"):
        out.sum().backward()
    tokens, cache, table, used = step(dtype=torch.float32)
    out, _ = flash_mla.flash_mla_with_kvcache(tokens.requires_grad_(), cache, table, used, 512)
    assert not out.requires_grad
    with pytest.raises(fa_attn.InputError, match="qv holds torch.float64"):
        fa_attn.flash_attn_func(q.detach(), k, v, qv=qv.double())


def test_a_compiled_step_serves_changing_lengths():
    call = torch.compile(
        lambda q, cache, table, used: flash_mla.flash_mla_with_kvcache(
            q, cache, table, used, 512, softmax_scale=SCALE, causal=True
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    q, cache, table, used = step(dtype=torch.float32)
    for shorter in (0, 7):
        lengths = (used - shorter).clamp_min(0)
        out, lse = call(q, cache, table, lengths)
        want, want_lse = reference(q, cache, table, lengths, 512, SCALE, True)
        close(out, want, 2e-6)
        close(lse, want_lse, 1e-4)
