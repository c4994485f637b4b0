"""The functions on torch tensors, on the CPU and, where there is one, on a GPU.

pip install torch pytest && python -m pytest tests/test_torch.py
"""

import json

import pytest

torch = pytest.importorskip("torch")

import torch.utils.checkpoint  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn.torch  # noqa: E402, F401 - its operators

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {"cpu": [torch.float32, torch.bfloat16], "cuda": [torch.bfloat16, torch.float16]}
CASES = [(device, dtype) for device in DEVICES for dtype in TYPES[device]]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
on = pytest.mark.parametrize("device,dtype", CASES, ids=[f"{d}-{str(t)[6:]}" for d, t in CASES])


def definition(
    q,
    k,
    v,
    causal=False,
    window=(-1, -1),
    scale=None,
    softcap=0.0,
    slopes=None,
    sinks=None,
    return_lse=False,
):
    """Attention in f64, differentiable; q (batch, seqlen, heads, dim)."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = q.shape[1], k.shape[1]
    distance = (
        torch.arange(keys, device=q.device)[None, :]
        - torch.arange(rows, device=q.device)[:, None]
        - keys
        + rows
    )
    if slopes is not None:
        scores = scores - slopes.double().reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :keys].nan_to_num()
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return (out, torch.logsumexp(scores, -1)) if return_lse else out


def tensors(device, dtype, *shapes, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def close(got, want, dtype, factor=1.0):
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    limit = factor * TOLERANCE[dtype] * max(1.0, want.abs().max().item() if want.numel() else 1.0)
    assert (got - want).abs().max().item() <= limit


def same_gradients(out, want, inputs, dtype):
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(want, inputs, dout.double())
    for one, other in zip(got, wanted):
        assert one.dtype == other.dtype
        close(one, other, dtype, factor=4)


MASKS = [dict(), dict(causal=True), dict(window_size=(17, 9)), dict(causal=True, window_size=(30, -1))]


@on
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", [(65, 65, 4, 2, 64), (40, 130, 4, 4, 128), (33, 70, 6, 1, 59)], ids=str)
def test_gradients_by_autograd(device, dtype, mask, shape):
    rows, keys, heads, heads_kv, dim = shape
    q, k, v = tensors(
        device, dtype, (2, rows, heads, dim), (2, keys, heads_kv, dim), (2, keys, heads_kv, dim)
    )
    out, lse, _ = fa_attn.flash_attn_func(q, k, v, return_attn_probs=True, **mask)
    assert out.dtype == dtype and lse.shape == (2, heads, rows)
    want = definition(q, k, v, mask.get("causal", False), mask.get("window_size", (-1, -1)))
    close(out, want, dtype)
    same_gradients(out, want, (q, k, v), dtype)


@on
def test_sinks_and_slopes(device, dtype):
    q, k, v = tensors(device, dtype, (2, 50, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64))
    sinks, slopes = tensors(device, torch.float32, (4,), (2, 4))
    slopes = slopes.detach().abs()
    options = dict(causal=True, softmax_scale=0.2)
    out = fa_attn.flash_attn_func(q, k, v, sinks=sinks, alibi_slopes=slopes, **options)
    want = definition(q, k, v, True, scale=0.2, slopes=slopes, sinks=sinks)
    close(out, want, dtype)
    same_gradients(out, want, (q, k, v, sinks), dtype)
    in_type = sinks.detach().to(dtype).requires_grad_()
    fa_attn.flash_attn_func(q, k, v, sinks=in_type).sum().backward()
    assert in_type.grad.dtype == dtype
    out = fa_attn.flash_attn_func(q, k, v, softcap=4.0)
    want = definition(q, k, v, softcap=4.0)
    close(out, want, dtype)
    same_gradients(out, want, (q, k, v), dtype)


@on
def test_gradients_through_the_lse(device, dtype):
    q, k, v = tensors(device, dtype, (2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    (sinks,) = tensors(device, torch.float32, (4,))
    weight = torch.randn(2, 4, 70, device=device)
    for softcap in (0.0, 3.0):
        options = dict(causal=True, window_size=(40, -1), softcap=softcap)
        wanted = definition(
            q, k, v, causal=True, window=(40, -1), softcap=softcap, sinks=sinks, return_lse=True
        )
        inputs = (q, k, v, sinks)
        dout = torch.randn_like(q)
        for of_out, of_lse in ((1, 1), (0, 1)):
            loss = lambda out, lse: of_out * (out * dout.to(out)).sum() + of_lse * (lse * weight).sum()  # noqa: E731, B023
            want = torch.autograd.grad(loss(*wanted), inputs, retain_graph=True)
            call = lambda *given: fa_attn.flash_attn_func(*given[:3], sinks=given[3], return_lse=True, **options)  # noqa: E731, B023, E501
            for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                got = torch.autograd.grad(loss(*function(*inputs)), inputs)
                for one, other in zip(got, want):
                    close(one, other, dtype, factor=4)
        torch.compiler.reset()
    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    want = torch.autograd.grad((out * dout).sum() + (lse * weight).sum(), (q, k, v))
    got = fa_attn.flash_attn_backward(dout, q, k, v, out, lse, causal=True, dlse=weight)
    for one, other in zip(got, want):
        close(one, other, dtype)
    with pytest.raises(fa_attn.InputError, match="dlse"):
        fa_attn.flash_attn_backward(dout, q, k, v, out, lse, causal=True, dlse=weight[:1])
    # Packed sequences, one of which has no keys, and rows that no sequence has.
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ((3, 33, 40, 70), (0, 50, 50, 90)))
    flat = [x[0].detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = fa_attn.flash_attn_varlen_func(*flat, starts_q, starts_k, 30, 50, return_lse=True)
    lse = lse[:, 3:]
    got = torch.autograd.grad(lse[lse.isfinite()].sum(), flat)
    leaves = [x.detach().clone().requires_grad_() for x in flat]
    total = 0
    for (a, b), (c, d) in (((3, 33), (0, 50)), ((40, 70), (50, 90))):
        parts = [leaves[0][a:b], leaves[1][c:d], leaves[2][c:d]]
        total = total + definition(*(x[None] for x in parts), return_lse=True)[1].sum()
    want = torch.autograd.grad(total, leaves[:2])
    for one, other in zip(got, want):
        close(one, other, dtype, factor=4)
    assert (got[2] == 0).all()


@on
def test_rings_of_merged_parts_have_the_gradients_of_the_whole(device, dtype):
    q, k, v = tensors(device, dtype, (1, 64, 4, 64), (1, 96, 4, 64), (1, 96, 4, 64))
    parts = [
        fa_attn.flash_attn_func(q, k[:, i : i + 32], v[:, i : i + 32], return_lse=True) for i in (0, 32, 64)
    ]
    out, _ = fa_attn.merge(*zip(*parts))
    same_gradients(out, definition(q, k, v), (q, k, v), dtype)


@on
def test_packed_arrays_have_one_gradient(device, dtype):
    (qkv,) = tensors(device, dtype, (2, 40, 3, 4, 64))
    out = fa_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    want = definition(*qkv.unbind(2), causal=True)
    close(out, want, dtype)
    same_gradients(out, want, (qkv,), dtype)
    q, kv = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 2, 64))
    out = fa_attn.flash_attn_kvpacked_func(q, kv, causal=True)
    want = definition(q, *kv.unbind(2), causal=True)
    close(out, want, dtype)
    same_gradients(out, want, (q, kv), dtype)


@on
def test_packed_sequences(device, dtype):
    lengths = [20, 0, 33, 1]
    starts = torch.tensor([0, 20, 20, 53, 54], dtype=torch.int32, device=device)
    # Two rows behind the last sequence are nobody's.
    q, k, v = tensors(device, dtype, (56, 4, 64), (56, 2, 64), (56, 2, 64))
    out, lse = fa_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, 33, 33, causal=True, return_softmax_lse=True
    )
    assert out.shape == (56, 4, 64) and lse.shape == (4, 56)
    begin, wanted = 0, []
    for n in lengths:
        part = slice(begin, begin + n)
        wanted.append(definition(q[None, part], k[None, part], v[None, part], causal=True)[0])
        begin += n
    want = torch.cat(wanted)
    close(out[:54], want, dtype)
    dout = torch.randn_like(want).to(dtype)
    got = torch.autograd.grad(out[:54], (q, k, v), dout)
    for one, other in zip(got, torch.autograd.grad(want, (q, k, v), dout.double())):
        close(one, other, dtype, factor=4)
        assert not one[54:].any()
    (qkv,) = tensors(device, dtype, (54, 3, 4, 64))
    out = fa_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 33)
    out.backward(torch.ones_like(out))
    assert qkv.grad.isfinite().all() and qkv.grad.abs().sum() > 0


@on
def test_a_cache_is_appended_to(device, dtype):
    q, new_k, new_v = tensors(device, dtype, (2, 3, 4, 64), (2, 3, 2, 64), (2, 3, 2, 64), grad=False)
    k, v = tensors(device, dtype, (2, 50, 2, 64), (2, 50, 2, 64), seed=1, grad=False)
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
    angles = torch.rand(50, 16, device=device) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    # The same in pages of 16 rows, and by another row of the cache.
    table = torch.tensor([[5, 2, 0, 7], [1, 4, 6, 3]], dtype=torch.int32, device=device)
    pages_k, pages_v = (torch.zeros(8, 16, 2, 64, dtype=dtype, device=device) for _ in range(2))
    for b in range(2):
        for page in range(3):
            pages_k[table[b, page]] = k[b, 16 * page : 16 * page + 16]
            pages_v[table[b, page]] = v[b, 16 * page : 16 * page + 16]
    out, lse = fa_attn.flash_attn_with_kvcache(
        q,
        pages_k,
        pages_v,
        new_k,
        new_v,
        cos,
        sin,
        lengths,
        block_table=table,
        causal=True,
        return_softmax_lse=True,
    )
    one, one_lse = fa_attn.flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cos, sin, lengths, causal=True, return_softmax_lse=True
    )
    close(out, one, dtype)
    close(lse, one_lse, dtype)
    for b, n in enumerate(lengths.tolist()):
        keys, values = k[b : b + 1, : n + 3].clone(), v[b : b + 1, : n + 3].clone()
        turned = q[b : b + 1].clone()
        for i in range(3):
            a, c = turned[0, i, :, 0:32:2].float(), turned[0, i, :, 1:32:2].float()
            x, y = cos[n + i].float(), sin[n + i].float()
            turned[0, i, :, 0:32:2], turned[0, i, :, 1:32:2] = (
                (a * x - c * y).to(dtype),
                (c * x + a * y).to(dtype),
            )
            assert (v[b, n + i] == new_v[b, i]).all()
        close(one[b : b + 1], definition(turned, keys, values, causal=True), dtype)

    def step(q, k, v, new_k, new_v, lengths):
        return fa_attn.flash_attn_with_kvcache(q, k, v, new_k, new_v, cos, sin, lengths, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = k.clone(), v.clone()
    caches[0][:, 40:], caches[1][:, 40:] = 0, 0
    close(compiled(q, *caches, new_k, new_v, lengths), one, dtype)
    assert torch.equal(caches[1][0, 40:43], new_v[0])
    swapped = fa_attn.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=lengths.flip(0),
        cache_batch_idx=torch.tensor([1, 0], dtype=torch.int32, device=device),
    )
    for b, n in ((0, 7), (1, 40)):
        other = 1 - b
        close(
            swapped[b : b + 1],
            definition(q[b : b + 1], k[other : other + 1, :n], v[other : other + 1, :n]),
            dtype,
        )


@on
def test_a_cache_with_padding_before_its_keys(device, dtype):
    q, k, v = tensors(device, dtype, (3, 4, 4, 64), (3, 40, 2, 64), (3, 40, 2, 64), grad=False)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    used, left = ints(40, 17, 30), ints(7, 0, 26)
    table = torch.arange(15, dtype=torch.int32, device=device).flip(0).reshape(3, 5)
    pages = [x.reshape(15, 8, 2, 64).flip(0) for x in (k, v)]
    for cache, options in (
        ((k, v), dict()),
        ((k[:, :, :1], v[:, :, :1]), dict()),
        ((k, v), dict(cache_batch_idx=ints(2, 0, 2))),
        (pages, dict(page_table=table)),
    ):
        rows = options.get("cache_batch_idx", ints(0, 1, 2)).tolist()
        out = fa_attn.flash_attn_with_kvcache(
            q, *cache, cache_seqlens=used, cache_leftpad=left, causal=True, **options
        )
        keys = cache if "page_table" not in options else (k, v)
        for b, row in enumerate(rows):
            here = [x[row : row + 1, left[b] : used[b]] for x in keys]
            close(out[b : b + 1], definition(q[b : b + 1], *here, causal=True), dtype)
    whole = fa_attn.flash_attn_with_kvcache(q, k, v, cache_leftpad=left)
    close(whole[:1], definition(q[:1], k[:1, 7:], v[:1, 7:]), dtype)
    with pytest.raises(fa_attn.InputError, match="cache_leftpad has the shape"):
        fa_attn.flash_attn_with_kvcache(q, k, v, cache_leftpad=left[:2])


@on
def test_parts_of_the_keys_are_merged(device, dtype):
    q, k, v = tensors(device, dtype, (2, 9, 4, 64), (2, 38, 2, 64), (2, 38, 2, 64), grad=False)
    (sinks,) = tensors(device, torch.float32, (4,), grad=False)
    step = 2
    parts = [
        fa_attn.flash_attn_func(q, k[:, i : i + step], v[:, i : i + step], return_lse=True)
        for i in range(0, 38, step)
    ]
    # A part of which nothing is seen.
    parts.append((torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], float("-inf"))))
    want, want_lse = fa_attn.flash_attn_func(q, k, v, sinks=sinks, return_lse=True)
    for given in (parts, parts[:1] * 2):
        out, lse = fa_attn.merge(*zip(*given), sinks if given is parts else None)
        assert out.dtype == dtype and lse.shape == (2, 4, 9)
        if given is parts:
            close(out, want, dtype, factor=2)
            close(lse, want_lse, torch.float32, factor=4)
        else:
            close(out, given[0][0], dtype)
            close(lse, given[0][1] + 0.6931472, torch.float32)
    wide, _ = fa_attn.merge(*zip(*parts), dtype=torch.float32)
    assert wide.dtype == torch.float32
    leaves = [[x.clone().requires_grad_() for x in part] for part in parts[:3]]
    out, lse = fa_attn.merge(*zip(*leaves), sinks)
    close(out, fa_attn.merge(*zip(*parts[:3]), sinks)[0], dtype, factor=2)
    (out.float().sum() + lse.sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for part in leaves for x in part)
    with pytest.raises(fa_attn.InputError, match="one of each for every part"):
        fa_attn.merge([want], [])
    with pytest.raises(fa_attn.InputError, match="elements"):
        fa_attn.merge([want, want], [want_lse, want_lse[:1]])


@on
def test_deterministic_gradients_have_the_same_bits(device, dtype):
    q, k, v = tensors(device, dtype, (2, 300, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64))
    dout = torch.randn_like(q)
    runs = []
    for _ in range(2):
        out = fa_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
        runs.append(torch.autograd.grad(out, (q, k, v), dout))
    assert all(torch.equal(one, other) for one, other in zip(*runs))


@on
def test_strides_and_expanded_gradients(device, dtype):
    q, k, v = tensors(device, dtype, (2, 4, 40, 64), (2, 4, 40, 64), (2, 40, 4, 128))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v[..., :64]
    out = fa_attn.flash_attn_func(q, k, v)
    want = definition(q, k, v)
    close(out, want, dtype)
    got = torch.autograd.grad(out.sum(), (q, k, v))
    for one, other in zip(got, torch.autograd.grad(want.sum(), (q, k, v))):
        close(one, other, dtype, factor=4)


@on
def test_operators_and_compile(device, dtype):
    q, k, v = tensors(device, dtype, (2, 48, 4, 64), (2, 48, 2, 64), (2, 48, 2, 64))
    (sinks,) = tensors(device, torch.float32, (4,))
    nothing = (None,) * 6
    arguments = (q, k, v, *nothing, sinks, 0, 0, None, True, -1, -1, 0.0, False)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    rounding = dict(atol=1e-2, rtol=1e-2) if dtype != torch.float32 else {}
    torch.library.opcheck(torch.ops.fa_attn.forward, arguments, test_utils=tests, **rounding)

    def block(q, k, v):
        return fa_attn.flash_attn_func(q * 2, k, v, causal=True, window_size=(20, 0), sinks=sinks).sin()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for rows in (48, 31):
        inputs = [x[:, :rows].detach().clone().requires_grad_() for x in (q, k, v)]
        got, want = compiled(*inputs), block(*inputs)
        close(got, want, dtype)
        dout = torch.randn_like(want)
        grads = [torch.autograd.grad(x, (*inputs, sinks), dout) for x in (got, want)]
        for one, other in zip(*grads):
            close(one, other, dtype)
    starts = torch.tensor([0, 20, 48], dtype=torch.int32, device=device)

    def packed(q, k, v):
        return fa_attn.flash_attn_varlen_func(q, k, v, starts, starts, 28, 28, causal=True)

    flat = [x[0].detach() for x in (q, k, v)]
    close(torch.compile(packed, fullgraph=True, backend="aot_eager")(*flat), packed(*flat), dtype)


@on
def test_gradients_without_autograd(device, dtype):
    q, k, v = tensors(device, dtype, (2, 48, 4, 64), (2, 48, 2, 64), (2, 48, 2, 64))
    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), dout)
    got = fa_attn.flash_attn_backward(dout, q, k, v, out, lse, causal=True, deterministic=False)
    for one, other in zip(got, want):
        close(one, other, dtype)


def test_what_is_not_computed_raises():
    q = torch.randn(1, 8, 2, 32)
    with pytest.raises(fa_attn.UnsupportedError, match="float16 and bfloat16"):
        fa_attn.flash_attn_func(q.double(), q.double(), q.double())
    with pytest.raises(fa_attn.UnsupportedError, match="detach them"):
        slopes = torch.rand(2, requires_grad=True)
        fa_attn.flash_attn_func(q, q, q, alibi_slopes=slopes)
    table = torch.zeros(1, 1, dtype=torch.int32)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    leaf = torch.randn(8, 2, 32, requires_grad=True)
    out = fa_attn.flash_attn_varlen_func(leaf, q, q, starts, starts, 8, 8, block_table=table)
    with pytest.raises(ValueError, match="pages"):
        out.sum().backward()


def test_transforms_autocast_and_checkpoints():
    q, k, v = tensors("cpu", torch.float32, (3, 9, 4, 32), (3, 9, 2, 32), (3, 9, 2, 32))
    call = lambda q, k, v: fa_attn.flash_attn_func(q, k, v, causal=True)  # noqa: E731
    want = call(q, k, v)
    dout = torch.randn_like(want)
    wanted = torch.autograd.grad(want, (q, k, v), dout)
    plain = [x.detach() for x in (q, k, v)]
    _, pull = torch.func.vjp(call, *plain)
    for one, other in zip(pull(dout), wanted):
        close(one, other, torch.float32)
    each = torch.vmap(lambda q, k, v: call(q[None], k[None], v[None])[0])(*plain)
    close(each, want, torch.float32)
    grads = torch.vmap(
        torch.func.grad(lambda q, k, v, d: (call(q[None], k[None], v[None])[0] * d).sum(), (0, 1, 2))
    )(*plain, dout)
    for one, other in zip(grads, wanted):
        close(one, other, torch.float32)
    got = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(got, (q, k, v), dout), wanted):
        assert torch.equal(one, other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16
    close(out, want, torch.bfloat16)
    assert fa_attn.flash_attn_func(*(x.to("meta") for x in plain)).shape == want.shape
    # A lazy minus, of which DLPack says nothing.
    minus = torch._neg_view(plain[0])
    close(call(minus, plain[1], torch._neg_view(plain[2])), -call(-plain[0], *plain[1:]), torch.float32)


def test_second_derivatives_raise():
    q = torch.randn(1, 8, 2, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(fa_attn.flash_attn_func(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradients_are_what_finite_differences_say():
    torch.manual_seed(1)
    inputs = [torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3)]
    call = lambda *x: fa_attn.flash_attn_func(*x, causal=True, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs, eps=1e-2, atol=3e-3, rtol=1e-2, nondet_tol=0.0)


def test_compile_with_dynamic_shapes():
    torch.compiler.reset()

    def packed(x, starts, most):
        return fa_attn.flash_attn_varlen_func(x, x, x, starts, starts, most, most, causal=True)

    def padded(q, k):
        return fa_attn.flash_attn_func(q * 1.0, k, k, causal=True, window_size=(5, 0)).sin()

    one, other = (
        torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager") for f in (packed, padded)
    )
    for rows in (8, 13, 21):
        x = torch.randn(rows, 2, 32)
        starts = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
        close(one(x, starts, rows), packed(x, starts, rows), torch.float32)
        q, k = (torch.randn(2, rows, heads, 32, requires_grad=True) for heads in (4, 2))
        got, want = other(q, k), padded(q, k)
        close(got, want, torch.float32)
        grads = [torch.autograd.grad(x.sum(), (q, k)) for x in (got, want)]
        for a, b in zip(*grads):
            close(a, b, torch.float32)


@needs_gpu
def test_a_gpu_computes_no_f32_and_says_so():
    q = torch.randn(1, 8, 2, 32, device="cuda")
    with pytest.raises(fa_attn.UnsupportedError, match="f16 or bf16"):
        fa_attn.flash_attn_func(q, q, q)
    with pytest.raises(fa_attn.InputError, match="elsewhere"):
        fa_attn.flash_attn_func(q.half(), q.half().cpu(), q.half())


@needs_gpu
def test_streams_and_graphs():
    q, k, v = tensors("cuda", torch.bfloat16, (2, 300, 8, 64), (2, 300, 2, 64), (2, 300, 2, 64), grad=False)
    want = definition(q, k, v, causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        close(fa_attn.flash_attn_func(q, k, v, causal=True), want, torch.bfloat16)
    torch.cuda.current_stream().wait_stream(side)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    def step():
        out = fa_attn.flash_attn_func(*inputs, causal=True)
        return out, torch.autograd.grad(out, inputs, dout)

    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, grads = step()
    for seed in (1, 2):
        new = tensors("cuda", torch.bfloat16, *(x.shape for x in inputs), seed=seed, grad=False)
        with torch.no_grad():
            for x, y in zip(inputs, new):
                x.copy_(y)
        graph.replay()
        leaves = [x.requires_grad_() for x in new]
        want = definition(*leaves, causal=True)
        close(out, want, torch.bfloat16)
        for one, other in zip(grads, torch.autograd.grad(want, leaves, dout.double())):
            close(one, other, torch.bfloat16, factor=4)


@needs_gpu
def test_a_graph_replays_with_other_lengths():
    q, k, v = tensors("cuda", torch.bfloat16, (2, 1, 8, 128), (2, 500, 2, 128), (2, 500, 2, 128), grad=False)
    lengths = torch.tensor([500, 17], dtype=torch.int32, device="cuda")
    call = lambda: fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for pair in ([3, 499], [256, 1]):
        lengths.copy_(torch.tensor(pair, dtype=torch.int32))
        graph.replay()
        for b, n in enumerate(pair):
            close(
                out[b : b + 1], definition(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]), torch.bfloat16
            )


def test_what_is_no_tensor_is_named():
    q = torch.ones(1, 4, 2, 8)
    twos, lse = torch.ones(2).numpy(), torch.zeros(1, 2, 4)
    for call, named in (
        (lambda: fa_attn.flash_attn_func(q, q.numpy(), q), "ndarray"),
        (lambda: fa_attn.flash_attn_func(q, q, q, sinks=twos), "sinks is ndarray"),
        (lambda: fa_attn.flash_attn_func(q, q, q, alibi_slopes=twos), "alibi_slopes is ndarray"),
        (lambda: fa_attn.flash_attn_qkvpacked_func(torch.stack([q] * 3, 2), sinks=twos), "sinks is ndarray"),
        (lambda: fa_attn.merge([q], [lse.numpy()]), "a part of lses is ndarray"),
        (lambda: fa_attn.merge([q], [lse], dtype="foo"), "dtype is 'foo'"),
        (lambda: fa_attn.merge([q], [lse.mT.contiguous().requires_grad_()]), "a part of lses has the shape"),
        (lambda: fa_attn.flash_attn_func(q, q, q, softmax_scale=torch.ones(2)), "softmax_scale is tensor"),
    ):
        with pytest.raises(fa_attn.InputError) as raised:
            call()
        assert named in str(raised.value), str(raised.value)


@needs_gpu
def test_a_cache_that_grows_is_planned_once_for_lengths_near_each_other():
    q, k, v = tensors("cuda", torch.bfloat16, (1, 1, 8, 128), (1, 600, 2, 128), (1, 600, 2, 128), grad=False)
    kernels = set()
    for keys in range(513, 545):
        here = [x[:, :keys].contiguous() for x in (k, v)]
        close(fa_attn.flash_attn_func(q, *here, causal=True), definition(q, *here), torch.bfloat16)
        report = fa_attn._core.report(q, *here, None, True, (-1, -1), 0.0)
        kernels.add(json.loads(report)["kernel"])
    assert len(kernels) == 1


@needs_gpu
def test_tuning_measures_what_is_called_and_the_winner_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_TUNED", str(tmp_path / "tuned.ron"))
    q, k, v = tensors("cuda", torch.bfloat16, *[(2, 777, 8, 64)] * 3, grad=False)
    fa_attn.tuning(candidates=2, budget=60.0)
    try:
        first = fa_attn.flash_attn_func(q, k, v)
        [outcome] = fa_attn.finish_tuning()
        assert outcome["pass"] == "forward" and outcome["error"] is None
        assert all(tried["ms"] for tried in outcome["tried"]) and len(outcome["tried"]) == 2
        report = fa_attn._core.report(q, k, v, None, False, (-1, -1), 0.0)
        assert json.loads(report)["kernel"] == outcome["winner"]
        close(fa_attn.flash_attn_func(q, k, v), first, torch.bfloat16)
    finally:
        fa_attn.tuning(False)
    assert (tmp_path / "tuned.ron").exists() and fa_attn.finish_tuning() == []


@needs_gpu
def test_inductor_compiles_on_a_gpu():
    q, k, v = tensors("cuda", torch.bfloat16, (2, 128, 8, 64), (2, 128, 2, 64), (2, 128, 2, 64))

    def block(q, k, v):
        return torch.nn.functional.gelu(fa_attn.flash_attn_func(q * 0.5, k, v, causal=True))

    compiled = torch.compile(block, fullgraph=True)
    got, want = compiled(q, k, v), block(q, k, v)
    close(got, want, torch.bfloat16)
    dout = torch.randn_like(want)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (got, want))):
        close(one, other, torch.bfloat16, factor=2)
