"""Caches, merged parts, plans of work and tuning on torch tensors, on the CPU and, where there is one, on a
GPU.

pip install torch pytest && python -m pytest tests/test_torch_serving.py
"""

import json

import pytest

torch = pytest.importorskip("torch")

from torch_cases import close, definition, needs_gpu, on, same_gradients, tensors  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn.torch  # noqa: E402
from fa_attn._options import CallOptions  # noqa: E402


@on
def test_rings_of_merged_parts_have_the_gradients_of_the_whole(device, dtype):
    q, k, v = tensors(device, dtype, (1, 64, 4, 64), (1, 96, 4, 64), (1, 96, 4, 64))
    parts = [
        fa_attn.flash_attn_func(q, k[:, i : i + 32], v[:, i : i + 32], return_lse=True) for i in (0, 32, 64)
    ]
    out, _ = fa_attn.merge(*zip(*parts))
    same_gradients(out, definition(q, k, v), (q, k, v), dtype)


@on
def test_rows_that_see_no_key_in_any_part_have_gradients_of_0(device, dtype):
    q, k, v = tensors(device, dtype, (1, 12, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64))
    first = fa_attn.flash_attn_func(q, k[:, :4], v[:, :4], window_size=(-1, 4), return_softmax_lse=True)
    second = fa_attn.flash_attn_func(q, k[:, 4:], v[:, 4:], causal=True, return_softmax_lse=True)
    out, lse = fa_attn.merge(*zip(first, second))
    assert (lse[..., :4] == float("-inf")).all() and lse[..., 4:].isfinite().all()
    same_gradients(out, definition(q, k, v, causal=True), (q, k, v), dtype)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    # FlashAttention-2 writes +inf for such a row.
    infinite = [part.masked_fill(part == -float("inf"), float("inf")) for part in (first[1], second[1])]
    again = fa_attn.merge((first[0], second[0]), infinite)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    with torch.no_grad():
        again = fa_attn.merge((first[0], second[0]), infinite)
    assert torch.allclose(again[0], out, atol=1e-2) and torch.allclose(again[1], lse)
    for sinks in (None, torch.tensor([-float("inf"), 0.5], device=device, requires_grad=True)):
        merged = fa_attn.merge(*zip(first, second), sinks)
        inputs = [x for x in (*first, *second, sinks) if x is not None]
        grads = torch.autograd.grad(merged, inputs, [dout, dlse], retain_graph=True)
        assert all(x.isfinite().all() for x in grads)
        for part in (grads[1], grads[3]):
            assert (part[:, 0, :4] == 0).all() and (part[..., 6:] != 0).any()
        # Of exp(lse) each part's gradient is its share.
        shares = torch.autograd.grad(merged[1][:, 0, 4:].sum(), (first[1], second[1]), retain_graph=True)
        assert torch.allclose(sum(shares)[:, 0, 4:], torch.ones(1, 8, device=device))


@pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * torch.cuda.is_available())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_join_a_cache_of_another_type_under_autocast(device, dtype):
    q, new = tensors(device, torch.float32, (2, 1, 4, 64), (2, 1, 4, 64), grad=False)
    (cache,) = tensors(device, dtype, (2, 64, 4, 64), seed=1, grad=False)
    used = torch.tensor([5, 9], dtype=torch.int32, device=device)
    angles = torch.rand(64, 8, device=device)
    tables = [dict(rotary_cos=angles.cos().to(t), rotary_sin=angles.sin().to(t)) for t in TABLES]
    for turned in (dict(), *tables):
        own, others = (cache.clone(), cache.clone()), (cache.clone(), cache.clone())
        given = dict(cache_seqlens=used, causal=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            got = fa_attn.flash_attn_with_kvcache(q, *own, new, new, **given, **turned)
        assert got.dtype is dtype
        low = [x.to(dtype) for x in (q, new)]
        # Tables are taken in float32, and in the cache's type.
        for name, table in turned.items():
            given[name] = table if table.dtype is dtype else table.float()
        want = fa_attn.flash_attn_with_kvcache(low[0], *others, low[1], low[1], **given)
        assert torch.equal(got, want) and all(map(torch.equal, own, others))
        assert not torch.equal(own[0], cache)
    with pytest.raises(fa_attn.InputError, match="must be of one type"):
        fa_attn.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, cache_seqlens=used)


TABLES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
@pytest.mark.parametrize(
    "apart, pages", [(1, (6, 0, 2, 8, 4, 10)), (-1, (6, 0, 2, 8, 4, 10)), (3, (0, 1, 2, 6, 7, 8))]
)
def test_keys_and_values_in_pages_of_one_tensor(device, dtype, apart, pages):
    """As transformers' continuous batching lays them: V's page is one of K's that no table names."""
    torch.manual_seed(9)
    blocks = torch.randn(13, 4, 2, 64).to(device, dtype)
    k, v = (blocks[max(x, 0) : 13 + min(x, 0)] for x in (-apart, apart))
    q, *new = tensors(device, dtype, (2, 2, 4, 64), (2, 2, 2, 64), (2, 2, 2, 64), grad=False)
    table = torch.tensor(pages, dtype=torch.int32, device=device).view(2, 3)
    used = torch.tensor([9, 6], dtype=torch.int32, device=device)
    caches = k.clone(), v.clone()
    options = dict(cache_seqlens=used, causal=True, block_table=table)
    want = fa_attn.flash_attn_with_kvcache(q, *caches, *new, **options)
    out = fa_attn.flash_attn_with_kvcache(q, k, v, *new, **options)
    assert torch.equal(out, want)
    assert all(torch.equal(x[table.long()], y[table.long()]) for x, y in zip((k, v), caches))
    if device == "cpu":
        # V of the first page would lie where K of the second does.
        table[0, 1] = table[0, 0] + apart
        with pytest.raises(fa_attn.InputError, match="k_cache and v_cache have elements in common"):
            fa_attn.flash_attn_with_kvcache(q, k, v, *new, **options)


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
    with pytest.raises(fa_attn.InputError, match="give cache_batch_idx"):
        fa_attn.flash_attn_with_kvcache(q[:2], k, v, cache_leftpad=left[:2])
    if device == "cpu":
        for options, rows in ((dict(), 3), (dict(page_table=table[:, :1]), 3)):
            with pytest.raises(fa_attn.InputError, match=rf"cache_batch_idx\[1\] is 3: .* has {rows} rows"):
                fa_attn.flash_attn_with_kvcache(q, k, v, cache_batch_idx=ints(0, 3, 1), **options)
        with pytest.raises(fa_attn.InputError, match=r"cache_leftpad\[2\] is -1"):
            fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=ints(0, 0, -1))


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


@needs_gpu
def test_graphs_that_replay_at_once_have_counters_of_their_own():
    # More tiles than SMs, which CTAs draw from a counter, and a chunk whose keys are divided.
    cases = [((4, 700, 32, 128), (4, 700, 8, 128)), ((1, 300, 8, 128), (1, 5000, 1, 128))]
    given = [tensors("cuda", torch.bfloat16, q, k, k, seed=q[0], grad=False) for q, k in cases]
    used = [torch.tensor([k[1]] * k[0], dtype=torch.int32, device="cuda") for _, k in cases]
    calls = [
        lambda q=q, k=k, v=v, n=n: fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=n, causal=True)
        for (q, k, v), n in zip(given, used)
    ]
    wanted = [call() for call in calls]
    graphs, outs = [], []
    for call in calls * 2:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append([call() for _ in range(3)])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(5):
        for own in outs:
            for out in own:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for own, want in zip(outs, wanted * 2):
            for out in own:
                close(out, want, torch.bfloat16)


@needs_gpu
def test_a_cache_that_grows_is_planned_once_for_lengths_near_each_other():
    q, k, v = tensors("cuda", torch.bfloat16, (1, 1, 8, 128), (1, 600, 2, 128), (1, 600, 2, 128), grad=False)
    kernels = set()
    for keys in range(513, 545):
        here = [x[:, :keys].contiguous() for x in (k, v)]
        close(fa_attn.flash_attn_func(q, *here, causal=True), definition(q, *here), torch.bfloat16)
        report = fa_attn._core.report(q, *here, CallOptions(None, True, (-1, -1), 0.0, False))
        kernels.add(json.loads(report)["kernel"])
    assert len(kernels) == 1


@needs_gpu
def test_tuning_measures_what_is_called_and_the_winner_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_TUNED", str(tmp_path / "tuned.json"))
    q, k, v = tensors("cuda", torch.bfloat16, *[(2, 777, 8, 64)] * 3, grad=False)
    fa_attn.tune(candidates=2, budget=60.0)
    try:
        first = fa_attn.flash_attn_func(q, k, v)
        [outcome] = fa_attn.finish_tuning()
        assert outcome["pass"] == "forward" and outcome["error"] is None
        assert all(tried["ms"] for tried in outcome["tried"]) and len(outcome["tried"]) == 2
        report = fa_attn._core.report(q, k, v, CallOptions(None, False, (-1, -1), 0.0, False))
        assert json.loads(report)["kernel"] == outcome["winner"]
        close(fa_attn.flash_attn_func(q, k, v), first, torch.bfloat16)
    finally:
        fa_attn.tune("off")
    assert (tmp_path / "tuned.json").exists() and fa_attn.finish_tuning() == []


@on
def test_parts_are_combined_by_flash_attentions_name(device, dtype):
    q, k, v = tensors(device, dtype, (2, 9, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), grad=False)
    want, want_lse = fa_attn.flash_attn_func(q, k, v, return_lse=True)
    keys = [[x[:, i : i + 10] for x in (k, v)] for i in range(0, 40, 10)]
    calls = [fa_attn.flash_attn_func(q, *part, return_lse=True) for part in keys]
    outs = torch.stack([out.float() for out, _ in calls])
    lses = torch.stack([lse.transpose(1, 2) for _, lse in calls])
    out, lse = fa_attn.flash_attn_combine(outs, lses, out_dtype=dtype)
    assert out.dtype == dtype and lse.shape == (2, 9, 4)
    close(out, want, dtype, factor=2)
    close(lse.transpose(1, 2), want_lse, torch.float32, factor=4)
    room = torch.empty_like(want)
    given, nothing = fa_attn.flash_attn_combine(outs, lses.contiguous(), room, return_lse=False)
    assert given is room and nothing is None and torch.equal(room, out)
    packed, _ = fa_attn.flash_attn_combine(outs.flatten(1, 2), lses.flatten(1, 2), out_dtype=dtype)
    assert torch.equal(packed, out.flatten(0, 1))
    for arguments, part in (
        ((outs[0, 0], lses), "out_partial"),
        ((outs, lses.transpose(2, 3)), "lse_partial"),
        ((outs, lses, room[:1]), "out has the shape"),
        ((outs, lses, room, torch.float64), "out_dtype"),
    ):
        with pytest.raises(fa_attn.InputError, match=part):
            fa_attn.flash_attn_combine(*arguments)
    with pytest.raises(fa_attn.InputTypeError, match="virtual_batch_idx is int"):
        fa_attn.flash_attn_combine(outs, lses, virtual_batch_idx=3)


DIVISIONS = [(1, None), (2, None), (5, True), (3, False), (0, True), (0, False), (256, None)]


@on
@pytest.mark.parametrize("splits,packs", DIVISIONS)
def test_the_caller_divides_the_work(device, dtype, splits, packs):
    """Of decode and of long queries; padded, packed, in a cache with lengths, with gradients, compiled."""
    if dtype == torch.float16:
        pytest.skip("on a GPU each takes six kernels, which are compiled; bfloat16 has the same")
    given = dict(num_splits=splits, pack_gqa=packs)
    for rows, keys, dim in ((1, 700, 64), (130, 700, 128), (4, 4, 64)):
        q, k, v = tensors(device, dtype, (2, rows, 8, dim), (2, keys, 2, dim), (2, keys, 2, dim))
        (sinks,) = tensors(device, torch.float32, (8,), seed=3)
        options = dict(causal=True, sinks=sinks, return_lse=True)
        out, lse = fa_attn.flash_attn_func(q, k, v, **options, **given)
        want, want_lse = definition(q, k, v, causal=True, sinks=sinks, return_lse=True)
        close(out, want, dtype)
        close(lse, want_lse, torch.float32, factor=100)
        if rows == 4:
            dout = torch.randn_like(out)
            grads = torch.autograd.grad(out, (q, k, v, sinks), dout)
            for got, need in zip(grads, torch.autograd.grad(want, (q, k, v, sinks), dout.double())):
                close(got, need, dtype, factor=2)
        starts = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (rows, keys)]
        with torch.no_grad():
            flat = [x.flatten(0, 1) for x in (q, k, v)]
            packed, _ = fa_attn.flash_attn_varlen_func(*flat, *starts, rows, keys, **options, **given)
            close(packed.view_as(out), want, dtype)
            used = torch.tensor([keys, keys // 2], dtype=torch.int32, device=device)
            cached = fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, **given)
            close(cached[:1], definition(q[:1], k[:1], v[:1], causal=True), dtype)
            half = [x[1:, : keys // 2] for x in (k, v)]
            close(cached[1:], definition(q[1:], *half, causal=True), dtype)
        if rows == 1 and splits == 5:
            compiled = torch.compile(fa_attn.flash_attn_func, backend="aot_eager", fullgraph=True)
            close(compiled(q, k, v, **options, **given)[0], want, dtype)
            torch.compiler.reset()
    if device == "cuda":
        options = CallOptions(None, True, (-1, -1), 0.0, False)
        report = fa_attn._core.report(q, k, v, options, division=(splits or None, packs))
        assert packs is None or ("-pack" in json.loads(report)["kernel"]) == packs


@needs_gpu
def test_the_kernel_is_the_one_that_divides_so():
    q, k, v = tensors("cuda", torch.bfloat16, *[(1, 1, 8, 128)], *[(1, 8192, 2, 128)] * 2, grad=False)
    seen = {}
    for splits, packs in (*DIVISIONS, (16, True)):
        division = (splits or None, packs)
        options = CallOptions(None, True, (-1, -1), 0.0, False)
        report = json.loads(fa_attn._core.report(q, k, v, options, division=division))
        kernel, bytes_ = report["kernel"], report["workspace_bytes"]
        seen[splits, packs] = bytes_, kernel.startswith("sm90")
        assert splits == 0 or ("-split" in kernel) == (splits > 1), kernel
        assert packs is None or ("-pack" in kernel) == packs, kernel
    # O and LSE of each part of each row, unless the CTAs that have the parts are a cluster.
    part = 8 * (128 + 1) * 4
    for division, parts in (((16, True), 16), ((5, True), 5), ((2, None), 2)):
        bytes_, clusters = seen[division]
        stored = 0 if clusters and parts <= 8 else parts
        assert 0 <= bytes_ - stored * part < part, division


@on
def test_the_work_of_a_step_is_planned_once(device, dtype):
    k, v = tensors(device, dtype, (3, 300, 2, 64), (3, 300, 2, 64), grad=False)
    lengths = torch.tensor([300, 17, 0], dtype=torch.int32, device=device)
    options = dict(cache_seqlens=lengths, causal=True)
    metadata = fa_attn.get_scheduler_metadata(3, 2, 300, 4, 2, 64, lengths, dtype, causal=True)
    # The layers of a step.
    for layer in range(3):
        (q,) = tensors(device, dtype, (3, 2, 4, 64), seed=layer, grad=False)
        want = fa_attn.flash_attn_with_kvcache(q, k, v, **options)
        got = fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, **options)
        assert torch.equal(got, want)
    assert len(metadata.plans) == (1 if device == "cuda" else 0)
    # In pages, where another kernel computes: a plan of its own beside the first.
    table = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    got = fa_attn.flash_attn_with_kvcache(q, k, v, block_table=table, scheduler_metadata=metadata, **options)
    close(got, want, dtype)
    # Engines do not say whether there is a soft cap: a kernel with one has a plan of its own.
    capped = fa_attn.flash_attn_with_kvcache(q, k, v, softcap=3.0, **options)
    got = fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, softcap=3.0, **options)
    assert torch.equal(got, capped) and not torch.equal(got, want)
    for change in (dict(causal=False), dict(window_size=(5, 0))):
        with pytest.raises(fa_attn.InputError, match=f"scheduler_metadata is of .*{next(iter(change))}"):
            fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, **{**options, **change})
    with pytest.raises(fa_attn.InputError, match="num_heads_q = 4, the call has 2"):
        fa_attn.flash_attn_with_kvcache(q[:, :, :2], k, v, scheduler_metadata=metadata, **options)
    with pytest.raises(fa_attn.InputTypeError, match="get_scheduler_metadata gives"):
        fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=lengths, **options)
    about = (3, 2, 300, 4, 2, 64, lengths, dtype)
    divided = fa_attn.get_scheduler_metadata(*about, causal=True, num_splits=4)
    for given in (dict(), dict(num_splits=4)):
        got = fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=divided, **given, **options)
        close(got, want, dtype)
    assert len(divided.plans) == (1 if device == "cuda" else 0)
    with pytest.raises(fa_attn.InputError, match=r"is of .* = \(4, None\), the call has \(2"):
        fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=divided, num_splits=2, **options)
    with pytest.raises(fa_attn.InputError, match="batch_size"):
        fa_attn.get_scheduler_metadata(2, 2, 300, 4, 2, 64, lengths, dtype)
    compiled = torch.compile(fa_attn.flash_attn_with_kvcache, backend="aot_eager")
    got = compiled(q, k, v, scheduler_metadata=metadata, **options)
    close(got, want, dtype)
    torch.compiler.reset()


@on
def test_the_short_way_of_a_step_is_the_long_one(device, dtype):
    q, k, v = tensors(device, dtype, (2, 1, 4, 64), (6, 16, 2, 64), (6, 16, 2, 64), grad=False)
    used = torch.tensor([20, 37], dtype=torch.int32, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    # This bound says nothing new, and the short way knows none.
    bound = dict(max_seqlen_q=1)

    def both(q, k, v, used, table=None, **options):
        results = []
        for beside in (dict(), bound):
            try:
                call = fa_attn.flash_attn_with_kvcache
                results.append(call(q, k, v, cache_seqlens=used, block_table=table, **options, **beside))
            except (fa_attn.InputError, fa_attn.UnsupportedError) as error:
                results.append(f"{type(error).__name__}: {error}")
        return results

    is_short = dtype is not torch.float32
    grown = torch.zeros(4, dtype=torch.int32, device=device)
    grown[::2] = used
    dense = (q, k[:2], v[:2], used % 16)
    for arguments, short in (
        ((q, k, v, used, table), is_short),
        (dense, is_short),
        ((q.expand(2, 3, 4, 64), k, v, used, table), is_short),
        ((q, k, v, grown[::2], table), False),
        ((q.detach().clone().requires_grad_(), k, v, used, table), False),
        ((q.transpose(2, 3).contiguous().transpose(2, 3), k, v, used, table), False),
    ):
        lengths = (None, None, *arguments[3:], *(None,) * (10 - len(arguments)))
        asked = ((None, False, (-1, -1), 0.0, False), (None, False, False, False), None, (), {}, 0.0)
        found = fa_attn.torch.plain_attention(*arguments[:3], *asked, lengths, None, True)
        assert (found is not None) == short
        for options in (dict(causal=True), dict(window_size=(9, 0), softcap=3.0), dict(num_splits=2)):
            one, other = both(*arguments, **options)
            assert torch.equal(one, other) and not one.requires_grad and one.abs().sum() > 0
            one, other = both(*arguments, return_softmax_lse=True, **options)
            assert all(map(torch.equal, one, other))
    with torch.inference_mode():
        assert torch.equal(*both(q, k, v, used, table))
    for wrong, said in (
        ((q, k, v, used[:1], table), "cache_seqlens"),
        ((q, k, v, used.long(), table), "int32"),
        ((q, k, v, used, table[0]), "block_table"),
        ((q, k, v[..., :1, :], used, table), "v"),
        ((q, k[..., :32], v, used, table), "k"),
        ((q[0], k, v, used, table), "q has the shape"),
        ((q, k, v.to(torch.float64), used, table), "v holds float64"),
    ):
        one, other = both(*wrong)
        assert one == other and isinstance(one, str) and said in one


@on
def test_out_does_not_depend_on_whether_lse_is_wanted(device, dtype):
    q, k = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 64), grad=False)
    starts = torch.tensor([0, 10, 80], dtype=torch.int32, device=device)
    packed = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), starts, starts, 70, 70)
    qkv = torch.stack([q, q, q], 2)
    for call, arguments in (
        (fa_attn.flash_attn_func, (q, k, k)),
        (fa_attn.flash_attn_varlen_func, packed),
        (fa_attn.flash_attn_qkvpacked_func, (qkv,)),
    ):
        out, lse = call(*arguments, causal=True, return_softmax_lse=True)
        assert torch.equal(call(*arguments, causal=True), out) and lse.isfinite().all()
        assert torch.equal(call(*arguments, causal=True, return_attn_probs=True)[1], lse)


@on
def test_a_cache_gives_no_gradients(device, dtype):
    """New keys are written in place, where autograd does not see them: without theirs the others are wrong."""
    q, new_k, new_v = tensors(device, dtype, (2, 3, 4, 64), (2, 3, 2, 64), (2, 3, 2, 64))
    k, v = tensors(device, dtype, (2, 50, 2, 64), (2, 50, 2, 64), seed=1)
    (sinks,) = tensors(device, torch.float32, (4,))
    used = torch.tensor([5, 9], dtype=torch.int32, device=device)
    for options in (dict(), dict(k=new_k, v=new_v)):
        out, lse = fa_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, sinks=sinks, return_softmax_lse=True, **options
        )
        assert not out.requires_grad and not lse.requires_grad


def test_paddings_and_parts_are_checked():
    q, k, v = tensors("cpu", torch.float32, (2, 3, 4, 64), (2, 20, 4, 64), (2, 20, 4, 64), grad=False)
    used = torch.tensor([5, 9], dtype=torch.int32)
    for entry in (21, -1):
        leftpad = torch.tensor([2, entry], dtype=torch.int32)
        with pytest.raises(fa_attn.InputError, match=rf"cache_leftpad\[1\] is {entry}: .* from 0 to 20"):
            fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=leftpad)
    out, lse = fa_attn.flash_attn_func(q.requires_grad_(), k, v, return_lse=True)
    with pytest.raises(fa_attn.InputError, match=r"part 1 of outs has the shape \(1, 3, 4, 64\)"):
        fa_attn.merge([out, out[:1]], [lse, lse[:1]])


@on
def test_rows_of_no_whole_chunks_are_appended(device, dtype):
    """Head dims that are no multiple of 8, with and without rotary embedding; on a GPU by copies."""
    from fa_attn import _torch_caches

    for dim, dim_v, turned in ((59, 59, 16), (20, 3, 0), (9, 40, 0)):
        q, new_k, new_v = tensors(
            device, dtype, (2, 3, 4, dim), (2, 3, 2, dim), (2, 3, 2, dim_v), grad=False
        )
        k, v = tensors(device, dtype, (2, 50, 2, dim), (2, 50, 2, dim_v), seed=1, grad=False)
        used = torch.tensor([5, 9], dtype=torch.int32, device=device)
        tables = [torch.rand(60, turned // 2, device=device) for _ in range(2)] if turned else [None, None]
        others = (*tables, False, True, -1, -1, None, 3, used, None, None, 3)
        caches = [(k.clone(), v.clone()) for _ in range(2)]
        found = [
            way(new_k, new_v, *cache, q, *others)
            for way, cache in zip((_torch_caches.run_append, _torch_caches.append_padded), caches)
        ]
        for one, other in zip((*found[0], *caches[0]), (*found[1], *caches[1])):
            assert one.shape == other.shape and torch.equal(one, other)
        assert torch.equal(caches[0][1][1, 9:12], new_v[1]) and torch.equal(caches[0][1][:, 13:], v[:, 13:])
        out = fa_attn.flash_attn_with_kvcache(
            q, k, v, new_k, new_v, *tables, cache_seqlens=used, causal=True, rotary_interleaved=False
        )
        assert out.shape == (2, 3, 4, dim_v) and torch.equal(k, caches[0][0])


def test_extras_lie_as_they_like():
    """Slopes expanded over a batch, every other entry, columns of a table: copied where they do not lie end to
    end. numpy's too."""
    q, k, v = tensors("cpu", torch.float32, (2, 9, 4, 32), (2, 11, 2, 32), (2, 11, 2, 32))
    slopes = torch.rand(4)
    sinks = torch.randn(8, requires_grad=True)
    got = fa_attn.flash_attn_func(q, k, v, alibi_slopes=slopes.expand(2, 4), sinks=sinks[::2])
    want = definition(q, k, v, slopes=slopes, sinks=sinks[::2])
    close(got, want, torch.float32)
    for one, other in zip(*(torch.autograd.grad(x.sum(), (q, sinks)) for x in (got, want))):
        close(one, other, torch.float32, factor=4)
    flat = [x.detach().flatten(0, 1) for x in (q, k, v)]
    starts = [torch.tensor([[0, 7], [n, 7], [2 * n, 7]], dtype=torch.int32)[:, 0] for n in (9, 11)]
    packed = fa_attn.flash_attn_varlen_func(*flat, *starts, 9, 11, alibi_slopes=slopes.expand(2, 4))
    close(packed.view_as(q), definition(q, k, v, slopes=slopes), torch.float32)
    arrays = [x.numpy() for x in (*flat, *starts)]
    given = slopes.expand(2, 4).numpy()
    packed = fa_attn.flash_attn_varlen_func(*arrays, 9, 11, alibi_slopes=given)
    close(torch.from_numpy(packed).view_as(q), definition(q, k, v, slopes=slopes), torch.float32)


def test_refusals_of_caches_name_their_arguments():
    q, k, v = tensors("cpu", torch.float32, (2, 1, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16), grad=False)
    new, call = torch.randn(2, 2, 1, 2, 16), fa_attn.flash_attn_with_kvcache
    tables = torch.ones(2, 8, 9)
    for refused, said in (
        (lambda: call(q, k, v, cache_batch_idx=torch.tensor([1, 0])), "cache_batch_idx holds torch.int64"),
        (lambda: call(q.numpy(), k, v, cache_batch_idx=torch.tensor([1, 0]).numpy()), "cache_batch_idx holds"),
        (lambda: call(q, k, v, *new, *tables, cache_seqlens=3), "twice the columns of rotary_cos = 18"),
        (
            lambda: call(q, k, v, *new, *tables[:, :, :8].half(), cache_seqlens=3),
            "^the type of rotary_cos and rotary_sin is f16: must be f32$",
        ),
    ):
        with pytest.raises(fa_attn.InputError, match=said):
            refused()


def negated(x):
    """The same values with a sign that is a flag of the tensor, which DLPack does not tell: the form in which
    the imaginary part of a conjugate comes."""
    return torch._neg_view(-x)


@on
def test_negated_views_are_read_by_their_values(device, dtype):
    q, k, v, new = tensors(device, dtype, *((2, 9, 4, 64),) * 3, (2, 1, 4, 64), grad=False)
    slopes, sinks, dlse = (torch.rand(*shape, device=device) for shape in ((4,), (4,), (2, 4, 9)))
    used = torch.tensor([4, 2], dtype=torch.int32, device=device)

    def differentiated(q, k, v, sinks, dout, dlse):
        inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        results = fa_attn.flash_attn_func(*inputs[:3], sinks=inputs[3], return_lse=True)
        return torch.autograd.grad(results, inputs, [dout, dlse])

    def appended(q, k, v, *new):
        return fa_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), *new, cache_seqlens=used)

    def functions():
        yield lambda *x: fa_attn.flash_attn_func(*x[:3], alibi_slopes=x[3], sinks=x[4]), (q, k, v, slopes, sinks)
        yield differentiated, (q, k, v, sinks, q * 2, dlse)
        yield appended, (q, k, v, new, new * 2)
        yield lambda x, *lses: fa_attn.merge([x, q], lses)[0], (k, dlse, dlse * 2)
        made = fa_attn.flash_attn_func(q, k, v, return_lse=True)
        yield fa_attn.flash_attn_backward, (k, q, k, v, *made)

    for function, arguments in functions():
        want = function(*arguments)
        for at in range(len(arguments)):
            have = function(*(negated(x) if i == at else x for i, x in enumerate(arguments)))
            for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (have, want))):
                assert torch.equal(one, other), (function, at)
    out = negated(torch.zeros_like(q))
    assert torch.equal(fa_attn.flash_attn_func(q, k, v, out=out), fa_attn.flash_attn_func(q, k, v))
    for caches in ((negated(k), v), (k, negated(v))):
        with pytest.raises(fa_attn.InputError, match="_cache is a view of negated elements"):
            fa_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=used)


def test_padding_of_a_cache_without_rows():
    q, k = torch.randn(3, 1, 4, 32), torch.randn(3, 0, 2, 32)
    for left, more in ((torch.zeros(3, dtype=torch.int32), dict(cache_seqlens=0)), (None, {})):
        out, lse = fa_attn.flash_attn_with_kvcache(q, k, k, cache_leftpad=left, return_lse=True, **more)
        assert not out.any() and lse.isneginf().all()
