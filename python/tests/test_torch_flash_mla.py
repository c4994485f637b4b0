"""FlashMLA's functions and `qv` on torch tensors: strided caches, operators, gradients, memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa_attn
import fa_attn.torch  # its operators
from fa_attn import _torch_latents, _torch_packed_rows, flash_mla
from fa_attn._options import NO_EXTRAS, call_options
from fa_attn._torch_memory import are_whole_rows, on_whole_rows
from fa_attn._torch_schemas import flat

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
    assert ((got.double() - want)[both].abs() <= room).all()


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
    # As vLLM gives the room of a result.
    room, rows = torch.empty_like(out), torch.empty_like(tokens)
    made, _ = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, **call, out=room)
    assert made is room and torch.equal(room, out)
    options = dict(topk_length=lengths[:2], return_max_logits=False, out=rows)
    made, _, _ = flash_mla.flash_mla_sparse_fwd(q[0], flat[:, None], indices[0][:, None], SCALE, **options)
    assert made is rows and torch.equal(rows, tokens)
    with pytest.raises(fa_attn.InputError, match="out has the shape"):
        flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, **call, out=room[:1])


def test_a_prompt_in_chunks():
    """As vLLM's prefill: of what is cached the heads' keys and values are multiplied out, in parts that are
    merged; the same tokens on the latents themselves."""
    q, cache, table, used = step(seqlen_q=2, dtype=torch.float32)
    # The second sequence has no more than its tokens, in a page of the first.
    used, table[1, 0], heads = used.clamp(min=2), table[0, 0], q.shape[2]
    to_k, to_v = torch.randn(heads, 128, 512) * 0.05, torch.randn(heads, 512, 128) * 0.05
    tokens = torch.cat([torch.randn(6, heads, 128), q.reshape(6, heads, 576)[..., 512:]], -1)
    absorbed = torch.cat([torch.einsum("thd,hdc->thc", tokens[..., :128], to_k), tokens[..., 128:]], -1)
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    packed = dict(softmax_scale=SCALE, causal=True, cu_seqlens_q=starts, max_seqlen_q=2)
    out, lse = flash_mla.flash_mla_with_kvcache(absorbed, cache, table, used, 512, **packed)
    out = torch.einsum("thc,hcd->thd", out, to_v)
    # The last two rows are the tokens' own; those before are cached, the first five apart.
    cached, parts = used - 2, []
    for first, rows, causal in (
        (torch.zeros_like(used), cached.clamp(max=5), False),
        (cached.clamp(max=5), cached - cached.clamp(max=5), False),
        (cached, torch.full_like(used, 2), True),
    ):
        ends = torch.cat([torch.zeros(1), rows.cumsum(0)]).to(torch.int32)
        total, longest = int(ends[-1]), max(1, int(rows.max()))
        latents = flash_mla.gather_rows(cache, table, ends, total, seq_starts=first.to(torch.int32))
        k = torch.einsum("tc,hdc->thd", latents[:, 0, :512], to_k)
        k = torch.cat([k, latents[..., 512:].expand(-1, heads, -1)], -1)
        v = torch.einsum("tc,hcd->thd", latents[:, 0, :512], to_v)
        parts.append(
            fa_attn.flash_attn_varlen_func(
                tokens, k, v, starts, ends, 2, longest, softmax_scale=SCALE, causal=causal, return_lse=True
            )
        )
    merged, merged_lse = fa_attn.merge(*zip(*parts))
    close(merged, out, 1e-5)
    close(merged_lse, lse, 1e-4)


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
    options = call_options(0.2, True, (-1, -1), 0.0, False)._replace(latent=True)
    arguments = (torch.cat([qv, q], -1), k, v, *NO_EXTRAS, *flat(options))
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


def test_rows_are_read_where_they_lie():
    """Rows of single pages: those of one layer among several are a view, others a copy."""
    layers = torch.arange(5 * 3 * 4 * 8.0).view(5, 3, 4, 1, 8)
    numbers = torch.tensor([[19, 0, 7]], dtype=torch.int32)
    padded = torch.nn.functional.pad(layers[:, 1], (0, 2))[..., :8]
    odd = torch.arange(5 * 36.0).as_strided((5, 4, 1, 8), (36, 8, 8, 1))
    for cache, is_copied in ((layers[:, 1], False), (layers[:, 0].contiguous(), False), (padded, False)):
        rows, table = _torch_latents.rows_of_pages(cache, numbers)
        assert (rows.data_ptr() != cache.data_ptr()) is is_copied
        assert torch.equal(rows[table[0].long()][:, 0], cache.reshape(20, 1, 8)[numbers[0].long()])
        assert table.dtype is torch.int32
    # Pages at distances that are no multiple of a row's.
    rows, table = _torch_latents.rows_of_pages(odd, numbers)
    assert rows.is_contiguous() and torch.equal(rows[19, 0, 0], odd[4, 3, 0])


def test_entries_that_name_rows_come_first():
    indices = torch.tensor([[-1, 5, 9, 2, 10, 0], [3, -7, 2147480000, 1, 3, 4]], dtype=torch.int32)
    table, used = _torch_latents.chosen(indices, 10, None)
    assert used.tolist() == [4, 4] and used.dtype is table.dtype is torch.int32 and table.is_contiguous()
    assert [row[:n] for row, n in zip(table.tolist(), used)] == [[5, 9, 2, 0], [3, 1, 3, 4]]
    table, used = _torch_latents.chosen(indices.long(), 10, torch.tensor([3, 9]))
    assert [row[:n] for row, n in zip(table.tolist(), used)] == [[5, 9], [3, 1, 3, 4]]


@pytest.mark.parametrize("room", [1, 1 << 28])
def test_the_largest_scores_of_any_number_of_tokens(room, monkeypatch):
    monkeypatch.setattr(_torch_latents, "ROOM", room)
    torch.manual_seed(3)
    q, kv = torch.randn(5, 4, 24), torch.randn(9, 1, 24)
    kv[0] = torch.nan
    indices = torch.randint(-2, 12, (5, 1, 7), dtype=torch.int32).masked_fill_(torch.rand(5, 1, 7) < 0.3, -1)
    indices[indices == 0], indices[2] = 3, -1
    out, most, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.3, 16)
    for token, named in enumerate(indices[:, 0].tolist()):
        keys = kv[[i for i in named if 0 <= i < 9], 0]
        want = (q[token] @ keys.T * 0.3).amax(-1) if len(keys) else torch.full((4,), -torch.inf)
        torch.testing.assert_close(most[token], want)
    same = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.3, 16, return_max_logits=False)
    assert same[1] is None and torch.equal(same[0], out) and torch.equal(same[2], lse)


def packed(rows, width, seed=5):
    """(a cache of bytes of the rows (pages, page, columns), what they stand for in f64, a descale)."""
    pages, page, columns = rows.shape
    codes, group = {656: (512, 128), 584: (448, 64), 576: (576, 576)}[width]
    groups = rows[..., :codes].unflatten(-1, (-1, group))
    scales = torch.exp2((groups.abs().amax(-1) / 448).clamp_min(1e-4).log2().ceil())
    if width == 576:
        scales = scales.amax() * torch.ones_like(scales) * 0.75
    values = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    turned = rows[..., codes:].bfloat16()
    exact = (values.double() * scales[..., None].double()).flatten(-2)
    exact = torch.cat([exact, turned.double()], -1)
    values = values.flatten(-2).view(torch.uint8)
    if width == 656:
        parts = [values, scales.contiguous().view(torch.uint8), turned.contiguous().view(torch.uint8)]
        # Pages with a row behind them that is nobody's.
        cache = torch.full((pages, page + 1, width), 255, dtype=torch.uint8)[:, :page]
        cache[:] = torch.cat(parts, -1)
        return cache[:, :, None], exact, None
    if width == 576:
        return values[:, :, None], exact, scales.flatten()[:1].clone()
    of_rows = torch.cat([values, turned.contiguous().view(torch.uint8)], -1).flatten(1)
    exponents = (scales.log2() + 127).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, 1), value=255).flatten(1)
    room = -(-page * width // 576) * 576
    cache = torch.full((pages, room), 255, dtype=torch.uint8)[:, : page * width]
    cache[:] = torch.cat([of_rows, exponents], -1)
    return cache.view(pages, page, 1, width), exact, None


@pytest.mark.parametrize("room", [1 << 14, 1 << 28])
@pytest.mark.parametrize("dtype, most_apart", [(torch.bfloat16, 2e-2), (torch.float32, 3e-6)])
@pytest.mark.parametrize("width", [656, 584, 576])
def test_rows_of_codes(width, dtype, most_apart, room, monkeypatch):
    monkeypatch.setattr(flash_mla, "ROOM", room)
    torch.manual_seed(4)
    columns = 512 if width == 584 else 576
    page, pages, used = 7, 9, torch.tensor([20, 0, 37], dtype=torch.int32)
    cache, exact, descale = packed(torch.randn(pages, page, columns) * torch.rand(pages, page, 1), width)
    table = torch.full((3, 6), 2147480000, dtype=torch.int32)
    table[0, :3], table[2, :6] = torch.tensor([4, 0, 7]), torch.tensor([8, 1, 2, 3, 5, 6])
    q = torch.randn(3, 2, 5, columns).to(dtype)
    call = dict(softmax_scale=0.05, is_fp8_kvcache=True, descale_k=descale)
    # As numbers of q's type, which is all that is rounded.
    numbers = exact.to(dtype).double()[:, :, None]
    for causal in (False, True):
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 512, causal=causal, **call)
        assert out.dtype is dtype
        want, want_lse = reference(q, numbers, table, used, 512, 0.05, causal)
        close(out, want, most_apart)
        close(lse, want_lse, 1e-4)
    as_codes = cache.view(torch.float8_e4m3fn)
    indices = torch.randint(0, pages * page, (3, 2, 11), dtype=torch.int32)
    indices[:, :, 2], indices[1, 1], indices[0, 0, 5] = -1, -1, pages * page
    sinks, lengths = torch.randn(5), torch.tensor([11, 4, 9], dtype=torch.int32)
    named = dict(indices=indices, topk_length=lengths, attn_sink=sinks)
    out, lse = flash_mla.flash_mla_with_kvcache(q, as_codes, None, None, 512, **named, **call)
    flat_rows = numbers.reshape(-1, columns)
    for b in range(3):
        for i in range(2):
            mine = [n for n in indices[b, i, : lengths[b]].tolist() if 0 <= n < pages * page]
            scores = q[b, i].double() @ flat_rows[mine].T * 0.05
            own = torch.logsumexp(scores, -1)
            close(lse[b, :, i], own.masked_fill(own == -torch.inf, torch.inf), 1e-4)
            weights = torch.exp(scores - own[:, None]) * torch.sigmoid(own - sinks)[:, None]
            close(out[b, i], weights @ flat_rows[mine, :512], most_apart)
    if width == 576:
        # Of any width, and in e5m2, where they lie.
        wide = cache.view(torch.float8_e4m3fn)[..., :72].float().to(torch.float8_e5m2)
        out, lse = flash_mla.flash_mla_with_kvcache(q[..., :72], wide, table, used, 64, causal=True, **call)
        numbers = wide.double() * descale.double()
        want, want_lse = reference(q[..., :72], numbers, table, used, 64, 0.05, True)
        close(out, want, most_apart)
        close(lse, want_lse, 1e-4)
        return
    # Half of them in a second cache.
    both, both_lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, softmax_scale=0.05, is_fp8_kvcache=True, indices=indices[:, :, :6],
        extra_k_cache=cache, extra_indices_in_kvcache=indices[:, :, 6:],
    )  # fmt: skip
    one, one_lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, softmax_scale=0.05, is_fp8_kvcache=True, indices=indices
    )
    close(both, one.double(), most_apart)
    close(both_lse, one_lse.double(), 1e-4)


def test_a_sink_beside_two_caches_is_rounded_once():
    q, cache, _, _ = step(2, 2, 8, 64, page=16, most=70)
    rows = torch.nonzero(cache[..., 0, 0].isfinite().flatten())[:, 0].int()
    indices = rows[torch.randint(0, len(rows), (2, 2, 24))]
    sinks = torch.randn(8)
    call = dict(softmax_scale=0.2, extra_k_cache=cache, extra_indices_in_kvcache=indices[..., 9:])
    of = (q, cache, None, None, 48)
    out, lse = flash_mla.flash_mla_with_kvcache(*of, indices=indices[..., :9], attn_sink=sinks, **call)
    parts = [
        flash_mla.flash_mla_with_kvcache(*of, softmax_scale=0.2, indices=indices[..., part])
        for part in (slice(9), slice(9, 24))
    ]
    both, both_lse = fa_attn.merge(*zip(*parts), dtype=torch.float32)
    share = torch.sigmoid(both_lse - sinks[:, None]).transpose(1, 2)[..., None]
    assert torch.equal(out, (both * share).bfloat16()) and torch.equal(lse, both_lse)


def test_all_codes_and_scales_of_packed_rows():
    """NaN stays NaN, powers of two reach from 2^-127 to 2^127."""
    cache = torch.zeros(1, 1, 1, 584, dtype=torch.uint8)
    cache[..., :256] = torch.arange(256)
    cache[..., 576:583] = torch.tensor([0, 127, 254, 255, 1, 128, 120])
    rows = _torch_packed_rows.packed_rows("k_cache", cache, torch.float32, None).unpacked()[0, 0, 0]
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
    for group, scale in ((0, 2.0**-127), (1, 1.0), (2, 2.0**127)):
        at = slice(64 * group, 64 * (group + 1))
        torch.testing.assert_close(rows[at], (codes[at] * scale).float(), rtol=0, atol=0, equal_nan=True)
    assert rows[192:256].isnan().all() and (rows[256:] == 0).all()


def test_queries_of_codes():
    torch.manual_seed(6)
    cache, exact, descale = packed(torch.randn(4, 16, 576), 576)
    q = torch.randn(1, 1, 8, 576).to(torch.float8_e4m3fn)
    table, used = torch.arange(4, dtype=torch.int32)[None], torch.tensor([60], dtype=torch.int32)
    call = dict(softmax_scale=0.05, is_fp8_kvcache=True, descale_k=descale, descale_q=torch.tensor([0.5]))
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 512, **call)
    assert out.dtype is torch.bfloat16
    numbers = exact.bfloat16().double()[:, :, None]
    want, want_lse = reference(q.double() * 0.5, numbers, table, used, 512, 0.05, False)
    close(out, want, 2e-2)
    close(lse, want_lse, 1e-4)


def test_refusals_of_packed_rows():
    cache, _, descale = packed(torch.randn(4, 16, 576), 656)
    q = torch.randn(1, 1, 8, 576)
    table, used = torch.tensor([[3, 2, 9]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    call, wrong = flash_mla.flash_mla_with_kvcache, fa_attn.InputError
    fp8 = dict(is_fp8_kvcache=True)
    cases = [
        ("rows of codes need is_fp8_kvcache=True", q, cache, used, {}),
        ("k_cache holds torch.bfloat16", q, cache.bfloat16(), used, fp8),
        ("of which there are 656, 584, 576", q, cache[..., :600], used, fp8),
        ("rows of 576 columns and q of 512", q[..., :512], cache, used, fp8),
        ("descale_k: rows of 656 bytes", q, cache, used, dict(fp8, descale_k=torch.ones(1))),
        ("descale_q beside a q of torch.float32", q, cache, used, dict(fp8, descale_q=torch.ones(1))),
        ("descale_k without is_fp8_kvcache", q, cache, used, dict(descale_k=torch.ones(1))),
        ("descale_k is torch.float32 (2,)", q, cache[..., :576], used, dict(fp8, descale_k=torch.ones(2))),
        ("[0, 2] is 9", q, cache, used + 15, fp8),
        ("cache_seqlens", q, cache, used + 40, fp8),
    ]
    for part, q, cache, lengths, options in cases:
        with pytest.raises(wrong) as raised:
            call(q, cache, table, lengths, 512, **options)
        assert part in str(raised.value), str(raised.value)
    # numpy's arrays give what torch's tensors give.
    table = table.clamp_max(3)
    arrays = (x.numpy() for x in (q, cache, table, used))
    for got, want in zip(call(*arrays, 512, **fp8), call(q, cache, table, used, 512, **fp8)):
        torch.testing.assert_close(torch.from_numpy(got), want)


@pytest.mark.parametrize("width, columns", [(656, 576), (584, 512)])
def test_a_compiled_step_on_rows_of_choice(width, columns):
    cache, _, _ = packed(torch.randn(6, 16, columns), width)
    q = torch.randn(2, 1, 4, columns)

    def step(q, cache, indices):
        return flash_mla.flash_mla_with_kvcache(
            q, cache, None, None, 512, softmax_scale=0.05, is_fp8_kvcache=True, indices=indices
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in (0, 1):
        torch.manual_seed(seed)
        indices = torch.randint(-1, 96, (2, 1, 9), dtype=torch.int32)
        for got, want in zip(compiled(q, cache, indices), step(q, cache, indices)):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "columns, columns_v, options",
    [
        (20, 20, {}),
        (36, 12, dict(latent=True, scale=0.2)),
        (24, 20, dict(kv_dtype="e4m3")),
        (24, 20, dict(kv_dtype="int4")),
        (24, 24, dict(kv_dtype="e4m3", out_dtype="bf16")),
    ],
)
def test_rows_are_rounded_up_for_a_gpu(columns, columns_v, options):
    """What is computed on rows of whole multiples of 16 bytes is what the call asked for."""
    torch.manual_seed(7)
    numbers = call_options(None, True, (-1, -1), 0.0, False)._replace(**options)
    columns_k = columns - columns_v if numbers.latent else columns
    q = torch.randn(2, 3, 4, columns)
    k, v = torch.randn(2, 9, 2, columns_k), torch.randn(2, 9, 2, columns_v)
    if numbers.kv_dtype == "int4":
        k, v = (fa_attn.quantize_kv(x, "int4", descale=torch.ones(1))[0] for x in (k, v))
    elif numbers.kv_dtype:
        k, v = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (k, v))
    if numbers.out_dtype:
        q = q.to(torch.float8_e4m3fn).view(torch.uint8)
    per = numbers.per_element
    step = 16 * per if numbers.kv_dtype else 8
    assert are_whole_rows(k, columns, columns_v, per) is (columns % step == columns_v % step == 0)
    wide = on_whole_rows(q, k, v, numbers)
    assert all(x.shape[-1] * own % step == 0 for x, own in zip(wide, (1, per, per)))
    face = fa_attn.torch
    want, want_lse = face.attention(q, k, v, numbers, None)
    out, lse = face.attention(*wide, None)
    torch.testing.assert_close(out[..., :columns_v], want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=1e-6)
    assert (out[..., columns_v:] == 0).all()


class Recorder(TorchDispatchMode):
    """The tensors that the forward is given."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.fa_attn.forward.default:
            self.given.append(args)
        return function(*args, **(kwargs or {}))


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def on_a_gpu():
    """Calls on a GPU's tensors: (name, function, columns of q, k and v that the kernel gets, (pages, page) of
    a latent problem)."""
    int32, e4m3, uint8 = torch.int32, torch.float8_e4m3fn, torch.uint8
    step = (fake(2, 5, dtype=int32), fake(2, dtype=int32))
    cache, narrow, layer = fake(9, 16, 1, 576), fake(9, 16, 1, 36), fake(9, 2, 16, 1, 576)[:, 1]
    tokens, large = fake(2, 3, 128, 576), fake(4000, 64, 1, 656, dtype=uint8)
    named = dict(softmax_scale=0.1, indices=fake(2, 3, 100, dtype=int32))
    half, codes, scale = fake(2, 3, 4, 72), fake(2, 30, 2, 72, dtype=e4m3), fake(1, dtype=torch.float32)
    mla, attend = flash_mla.flash_mla_with_kvcache, fa_attn.flash_attn_func

    def chosen(rows, **options):
        return lambda: mla(tokens, rows, None, None, 512, **named, **options)

    def with_qv():
        keys = fake(2, 30, 1, 64), fake(2, 30, 1, 256)
        return attend(fake(2, 3, 4, 64), *keys, qv=fake(2, 3, 4, 256))

    wide = (576, 64, 512)
    return [
        ("dense", lambda: mla(fake(2, 1, 16, 576), cache, *step, 512), wide, (9, 16)),
        ("narrow", lambda: mla(fake(2, 1, 16, 36), narrow, *step, 12), (40, 24, 16), (9, 16)),
        ("rows of choice", chosen(cache), wide, (144, 1)),
        # From the first row of the first page to the last row of the last.
        ("of a layer", chosen(layer), wide, (272, 1)),
        ("packed", chosen(large, is_fp8_kvcache=True), wide, (None, None)),
        ("qv", with_qv, (320, 64, 256), (None, None)),
        ("8-bit keys", lambda: attend(half, codes, codes, k_descale=scale), (80, 80, 80), None),
        ("8 bits", lambda: attend(half.to(e4m3), codes, codes), (80, 80, 80), None),
    ]


@pytest.mark.parametrize("at", range(8))
def test_what_a_gpu_is_given(at):
    """Without one: rows are whole, nothing is read on the host, and the planner has a kernel for it."""
    with FakeTensorMode(), Recorder() as recorder:
        recorder.given = []
        name, call, columns, latent = on_a_gpu()[at]
        out = call()
        out = out if isinstance(out, torch.Tensor) else out[0]
    assert out.is_cuda and len(recorder.given) == 1, name
    q, k, v = recorder.given[0][:3]
    assert tuple(x.shape[-1] for x in (q, k, v)) == columns, name
    shape = (q.shape[0], f"{q.shape[1]}x100", f"{q.shape[2]}:{k.shape[2]}", f"{columns[0]}:{columns[2]}")
    if latent is None:
        is_fp8 = q.dtype is torch.uint8
        types = dict(dtype="e4m3", out_dtype="bf16") if is_fp8 else dict(kv_dtype="e4m3", k_descale="head")
        problem, kernel = {**fa_attn.problem(*shape), **types}, "sm90_fwd_fp8" if is_fp8 else "e4m3kv"
    else:
        pages, page = latent
        assert page is None or tuple(k.shape[:2]) == (pages, page)
        options = dict(latent=True, softmax_scale=0.1, used_k=True, pages=pages, page=page)
        problem, kernel = fa_attn.problem(*shape, **options), "sm90_wide"
    assert kernel in str(fa_attn.plan(problem, arch="sm90"))


HAS_KERNEL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.skipif(not HAS_KERNEL, reason="there is no GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype, room", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("heads, seqlen_q, page", [(16, 1, 64), (128, 2, 64), (64, 4, 1), (9, 2, 61)])
def test_a_gpu_computes_what_the_cpu_does(heads, seqlen_q, page, dtype, room):
    q, cache, table, used = step(heads=heads, seqlen_q=seqlen_q, page=page, dtype=dtype)
    there = torch.isfinite(cache[:, :, 0, 0]).flatten().nonzero()[:, 0]
    indices = there[torch.randint(len(there), (3, seqlen_q, 200))].to(torch.int32)
    indices[:, :, 100:150], indices[0, 0] = -1, 2147480000
    as_pages, of_choice = (cache, table, used), (cache, None, None)
    named = dict(indices=indices, topk_length=torch.tensor([200, 120, 0], dtype=torch.int32))
    for arguments, options in ((as_pages, dict(causal=True)), (of_choice, named)):
        want = flash_mla.flash_mla_with_kvcache(q, *arguments, 512, softmax_scale=SCALE, **options)
        arguments = [None if x is None else x.cuda() for x in (q, *arguments)]
        options = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
        got = flash_mla.flash_mla_with_kvcache(*arguments, 512, softmax_scale=SCALE, **options)
        for one, other, most in zip(got, want, (room, 1e-3)):
            close(one.cpu(), other.double(), most)


@pytest.mark.skipif(not HAS_KERNEL, reason="there is no GPU of compute capability 9.0")
@pytest.mark.parametrize("width", [656, 584, 576])
def test_a_gpu_unpacks_rows(width):
    torch.manual_seed(8)
    columns = 512 if width == 584 else 576
    cache, _, descale = packed(torch.randn(12, 64, columns), width)
    q, table = torch.randn(2, 1, 64, columns).bfloat16(), torch.randperm(12).to(torch.int32).view(2, 6)
    used, indices = torch.tensor([300, 7], dtype=torch.int32), torch.randint(-1, 768, (2, 1, 128))
    dense = dict(block_table=table, cache_seqlens=used, causal=True)
    for own in (dense, dict(block_table=None, cache_seqlens=None, indices=indices.to(torch.int32))):
        call = dict(own, q=q, k_cache=cache, head_dim_v=512, is_fp8_kvcache=True, descale_k=descale)
        want = flash_mla.flash_mla_with_kvcache(**call)
        call = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in call.items()}
        for one, other, most in zip(flash_mla.flash_mla_with_kvcache(**call), want, (2e-2, 1e-3)):
            close(one.cpu(), other.double(), most)
