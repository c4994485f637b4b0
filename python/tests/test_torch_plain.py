"""The short way of calls on plain tensors: that of the long one in values, and not taken where something
records, converts or differentiates them."""

import threading

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402 - after torch
import fa_attn.torch  # noqa: E402
from torch_cases import close, definition, needs_gpu, on, tensors  # noqa: E402

# An offset of 0 says nothing new, and the short way knows none.
LONG = dict(query_offset=0)


def halves(device, *shapes, seed=0):
    return tensors(device, torch.bfloat16, *shapes, seed=seed, grad=False)


def taken(monkeypatch):
    """How many calls the short way has computed, as a list's length."""
    made, plain = [], fa_attn.torch.plain_attention

    def counted(*arguments, **named):
        result = plain(*arguments, **named)
        if result is not None:
            made.append(result)
        return result

    monkeypatch.setattr(fa_attn.torch, "plain_attention", counted)
    return made


@on
def test_the_short_way_is_the_long_one(device, dtype, monkeypatch):
    made = taken(monkeypatch)
    is_short = dtype is not torch.float32
    q, k = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 64), grad=False)
    (v,) = tensors(device, dtype, (2, 40, 2, 32), seed=1, grad=False)
    wide = torch.stack([q, q, q], 2)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    for arguments in ((q, k, k), (q, k, v), wide.unbind(2), (apart, apart, apart)):
        for options in (
            dict(),
            dict(causal=True),
            dict(window_size=(7, 0), softcap=3.0),
            dict(softmax_scale=0.5, causal=True, deterministic=True),
        ):
            before = len(made)
            one = fa_attn.flash_attn_func(*arguments, **options)
            assert len(made) - before == is_short
            other = fa_attn.flash_attn_func(*arguments, **options, **LONG)
            assert torch.equal(one, other) and one.is_contiguous() and one.abs().sum() > 0
            assert not one.requires_grad and one.shape == other.shape
    starts = torch.tensor([0, 10, 80], dtype=torch.int32, device=device)
    packed = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, starts, 70, 70)
    before = len(made)
    one = fa_attn.flash_attn_varlen_func(*packed, causal=True)
    assert len(made) - before == (is_short and device == "cuda")
    assert torch.equal(one, fa_attn.flash_attn_varlen_func(*packed, causal=True, **LONG))
    table = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)
    used = torch.tensor([40, 30], dtype=torch.int32, device=device)
    pages = [x.reshape(10, 8, 2, -1) for x in (k, v)]
    queries = (packed[0], *pages, torch.tensor([0, 40, 80], dtype=torch.int32, device=device), starts, 40, 40)
    before = len(made)
    one = fa_attn.flash_attn_varlen_func(*queries, causal=True, seqused_k=used, block_table=table)
    assert len(made) - before == (is_short and device == "cuda")
    other = fa_attn.flash_attn_varlen_func(*queries, causal=True, seqused_k=used, page_table=table, **LONG)
    assert torch.equal(one, other)


@on
def test_a_change_of_a_tensor_is_seen(device, dtype):
    """Nothing of a tensor is kept from call to call: neither its address nor its shape, strides or type."""
    q, k, v = halves(device, (1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64))
    fa_attn.flash_attn_func(q, k, v)
    storage = torch.randn(1, 64, 2, 128, device=device).to(torch.bfloat16)
    for changed in (
        storage[:, :20, :, :64],
        storage[:, 30:50, :, 64:],
        storage[:, :, :, :64].transpose(1, 2)[:, :, :2].transpose(1, 2)[:, ::2],
        storage.half()[:, :20, :, :64],
    ):
        if changed.dtype is q.dtype:
            k.set_(changed.untyped_storage(), changed.storage_offset(), changed.shape, changed.stride())
            values = v[:, :1].expand_as(k)
            close(fa_attn.flash_attn_func(q, k, values), definition(q, k, values), k.dtype)
        else:
            with pytest.raises(fa_attn.InputError, match="k holds f16 and q bf16"):
                fa_attn.flash_attn_func(q, changed, v)
    rows = storage[:, :20, :, :20]
    close(fa_attn.flash_attn_func(rows, rows, rows), definition(rows, rows, rows), q.dtype)
    # Kernels of a GPU read 16 bytes at once: such rows are copied.
    rows = storage[:, :20, :, 1:65]
    close(fa_attn.flash_attn_func(rows, rows, rows), definition(rows, rows, rows), q.dtype)


@on
def test_what_records_converts_or_differentiates_takes_the_long_way(device, dtype, monkeypatch):
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    made = taken(monkeypatch)
    q, k, v = halves(device, (2, 20, 4, 64), (2, 20, 2, 64), (2, 20, 2, 64))
    call = fa_attn.flash_attn_func
    want = call(q, k, v)
    assert len(made) == 1
    made.clear()
    for at in range(3):
        leaves = [x.clone().requires_grad_(i == at) for i, x in enumerate((q, k, v))]
        out = call(*leaves)
        (gradient,) = torch.autograd.grad(out.float().sum(), leaves[at])
        assert torch.equal(out, want) and gradient.isfinite().all()
    assert len(made) == 3
    made.clear()

    class Own(torch.Tensor):
        pass

    assert torch.equal(call(q.as_subclass(Own), k, v), want)
    assert torch.equal(call(torch._neg_view(-q), k, v), want)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert call(q.float(), k, v).dtype is torch.bfloat16
    assert torch.equal(torch.vmap(call)(q[None], k[None], v[None])[0], want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(fa_attn.UnsupportedError, match="forward-mode"):
            call(dual, k, v)
    with FlopCounterMode(display=False) as counter:
        call(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 4 * 20 * 20 * 128
    traced = make_fx(lambda *x: call(*x))(q, k, v)
    assert "fa_attn.forward" in traced.code and torch.equal(traced(q, k, v), want)
    compiled = torch.compile(lambda *x: call(*x, causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), call(q, k, v, causal=True, **LONG))
    torch.compiler.reset()
    assert call(q.to("meta"), k.to("meta"), v.to("meta")).is_meta
    assert not made
    with torch.inference_mode():
        out = call(q, k, v)
    assert out.is_inference() and torch.equal(out, want) and len(made) == 1
    for wrong, said in (
        ((q.to_sparse(), k, v), "layout"),
        ((q[0], k, v), "q"),
        ((q, k[..., 0], v), "k"),
        ((q, k, v[0, 0, 0, 0]), "v"),
        ((q, k[:, :, :1].expand(2, 20, 3, 64), v), "head"),
        ((q, k, None), "v is NoneType"),
    ):
        with pytest.raises((fa_attn.InputError, fa_attn.UnsupportedError), match=said):
            call(*wrong)
    assert len(made) == 1


def test_options_are_kept_by_value_and_type(monkeypatch):
    made = taken(monkeypatch)
    q, k, v = halves("cpu", (1, 20, 2, 64), (1, 20, 2, 64), (1, 20, 2, 64))

    def call(**options):
        return fa_attn.flash_attn_func(q, k, v, **options)

    one = call(softmax_scale=1.0, softcap=1.0, window_size=(1, 0), causal=True)
    assert len(made) == 1
    # Of equal values some are of types that are refused.
    for wrong in (dict(softmax_scale=True), dict(softcap=True)):
        with pytest.raises(fa_attn.InputTypeError, match="it must be a number"):
            call(**{**dict(softmax_scale=1.0, softcap=1.0, window_size=(1, 0), causal=True), **wrong})
    for same in (dict(window_size=[1, 0]), dict(softmax_scale=1), dict(causal=1)):
        other = call(**{**dict(softmax_scale=1.0, softcap=1.0, window_size=(1, 0), causal=True), **same})
        assert torch.equal(one, other)
    # An array may hold another value at the next call.
    scale, side = torch.tensor(1.0), torch.tensor(3)
    for value in (1.0, 0.25):
        scale.fill_(value)
        assert torch.equal(call(softmax_scale=scale), call(softmax_scale=value))
    for value in (3, 0):
        side.fill_(value)
        assert torch.equal(call(window_size=(side, 0)), call(window_size=(value, 0)))
    for wrong in (dict(softcap=-1.0), dict(window_size=(1, 2, 3)), dict(window_size=(1,))):
        with pytest.raises(fa_attn.InputError, match=next(iter(wrong))):
            call(**wrong)


@on
def test_calls_as_engines_make_them_take_the_short_way(device, dtype, monkeypatch):
    made = taken(monkeypatch)
    is_short = dtype is not torch.float32
    q, k, v = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), grad=False)
    sinks = torch.randn(4, device=device)
    room = torch.full((2, 40, 8, 64), 7.0, device=device, dtype=dtype)

    def both(call, arguments, short=is_short, out=None, **options):
        """The results of the short way and of the long one."""
        results = []
        for beside in (dict(), LONG):
            before = len(made)
            if out is not None:
                beside = dict(beside, out=out)
                out.fill_(7.0)
            found = call(*arguments, **options, **beside)
            assert len(made) - before == (short and "query_offset" not in beside)
            found = found if isinstance(found, tuple) else (found,)
            assert out is None or found[0] is out
            results.append([x if x is None else x.clone() for x in found])
        for one, other in zip(*results):
            assert one is other is None or torch.equal(one, other)
        assert len(results[0]) == len(results[1]) and results[0][0].abs().sum() > 0
        return results[0]

    dense = fa_attn.flash_attn_func
    for options in (
        dict(return_softmax_lse=True),
        dict(return_lse=True, causal=True),
        dict(return_attn_probs=True),
        dict(window_size=[7, 0], softcap=0, softmax_scale=1),
        dict(window_size=None, fa_version=3, s_aux=None, num_splits=0, sm_margin=0, pack_gqa=None),
        dict(num_splits=2, pack_gqa=True, causal=True),
        dict(sinks=sinks, return_lse=True),
        dict(s_aux=torch.nn.Parameter(sinks, requires_grad=False)),
        dict(sinks=sinks.to(torch.bfloat16)),
        dict(alibi_slopes=sinks.abs(), causal=True),
        dict(alibi_slopes=torch.rand(2, 4, device=device), sinks=sinks, return_lse=True),
        dict(out=torch.empty_like(q)),
        dict(out=room[:, :, 2:6], return_softmax_lse=True),
    ):
        both(dense, (q, k, v), **options)
    assert room[:, :, :2].eq(7).all() and room[:, :, 6:].eq(7).all()
    # Rows that kernels do not write, and tensors of other types.
    for options in (
        dict(out=q.new_empty(2, 40, 64, 4).transpose(2, 3)),
        dict(causal=1),
        dict(num_splits=torch.tensor(1)),
        dict(alibi_slopes=sinks.double().float()[None].expand(2, 4)),
        dict(dropout_p=0),
    ):
        both(dense, (q, k, v), short=False, **options)
    # q, k and v in one tensor, and one number of keys for all sequences.
    stacked = torch.stack([q, q.flip(1), q.flip(2)], 2)
    both(fa_attn.flash_attn_qkvpacked_func, (stacked,), causal=True, return_attn_probs=True)
    both(fa_attn.flash_attn_kvpacked_func, (q, stacked[:, :, 1:]), alibi_slopes=sinks.abs())
    cache = fa_attn.flash_attn_with_kvcache
    for used in (1, 33, 40):
        found = both(cache, (q, k, v), cache_seqlens=used, return_lse=True, alibi_slopes=sinks.abs() + 1)
        counted = torch.full((2,), used, dtype=torch.int32, device=device)
        other = cache(q, k, v, cache_seqlens=counted, return_lse=True, alibi_slopes=sinks.abs() + 1)
        assert all(torch.equal(one, same) for one, same in zip(found, other))
    assert not cache(q, k, v, cache_seqlens=0).any()
    for wrong in (-1, 41):
        before = len(made)
        with pytest.raises(fa_attn.InputError, match="cache_seqlens"):
            cache(q, k, v, cache_seqlens=wrong)
        assert len(made) == before
    starts = torch.tensor([0, 10, 80], dtype=torch.int32, device=device)
    both(
        fa_attn.flash_attn_varlen_qkvpacked_func,
        (stacked.flatten(0, 1), starts, 70),
        is_short and device == "cuda",
        window_size=(9, 0),
        softcap=5.0,
    )
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    # Rows of queries in no use.
    few = torch.tensor([7, 40], dtype=torch.int32, device=device)
    out, lse = both(
        fa_attn.flash_attn_varlen_func, (q, k, v), seqused_q=few, seqused_k=few, return_lse=True
    )
    assert not out[0, 7:].any() and lse[0, :, 7:].eq(float("-inf")).all() and out[0, :7].abs().sum() > 0
    both(
        fa_attn.flash_attn_varlen_func,
        (*packed, starts, starts, 70, 70),
        is_short and device == "cuda",
        seqused_q=torch.tensor([3, 60], dtype=torch.int32, device=device),
        out=torch.full_like(packed[0], 7.0),
        causal=True,
    )
    table = torch.arange(10, dtype=torch.int32, device=device).view(2, 5)
    used = torch.tensor([40, 30], dtype=torch.int32, device=device)
    pages = [x.reshape(10, 8, 2, -1) for x in (k, v)]
    is_short = is_short and device == "cuda"
    both(fa_attn.flash_attn_varlen_func, (*packed, starts, starts, 70, 70), is_short, return_lse=True)
    plan = fa_attn.get_scheduler_metadata(
        2, 70, 40, 4, 2, 64, used, qkv_dtype=dtype, page_size=8, causal=True, num_splits=2
    )
    for options in (dict(), dict(s_aux=sinks), dict(scheduler_metadata=plan, num_splits=2)):
        both(
            fa_attn.flash_attn_varlen_func,
            (packed[0], *pages, starts, None, 70, None),
            is_short,
            out=torch.empty_like(packed[0]),
            seqused_k=used,
            block_table=table,
            causal=True,
            fa_version=3,
            window_size=[-1, -1],
            **options,
        )
    both(
        fa_attn.flash_attn_with_kvcache,
        (packed[0], *pages),
        is_short,
        cache_seqlens=used,
        page_table=table,
        cu_seqlens_q=starts,
        cu_seqlens_k_new=starts,
        max_seqlen_q=70,
        causal=True,
        ver=3,
        return_softmax_lse=True,
    )
    queries = packed[0].view(2, 40, 4, 64)
    both(cache, (queries, *pages), dtype is not torch.float32, cache_seqlens=35, block_table=table)


@on
def test_gradients_of_the_short_way_are_those_of_the_long_one(device, dtype, monkeypatch):
    made = taken(monkeypatch)
    is_short = dtype is not torch.float32
    starts = torch.tensor([0, 10, 40], dtype=torch.int32, device=device)
    dense = ((2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64)), fa_attn.flash_attn_func, ()
    packed = ((40, 4, 64), (40, 2, 64), (40, 2, 64)), fa_attn.flash_attn_varlen_func, (starts, starts, 30, 30)
    for (shapes, call, lengths), short in ((dense, is_short), (packed, is_short and device == "cuda")):
        inputs = tensors(device, dtype, *shapes, seed=3)
        for options in (dict(causal=True), dict(window_size=[9, 0], softcap=3.0, deterministic=True)):
            results = []
            for beside in (dict(), LONG):
                before = len(made)
                out, lse = call(*inputs, *lengths, return_lse=True, **options, **beside)
                assert len(made) - before == (short and not beside)
                loss = (out * out.detach()).float().sum() + lse.sum()
                results.append((out, lse, *torch.autograd.grad(loss, inputs)))
            for one, other in zip(*results):
                if options.get("deterministic") or device == "cpu":
                    assert torch.equal(one, other)
                close(one, other, dtype)
                assert one.abs().sum() > 0
        # Gradients are of one input, of none, and differentiated no further.
        out = call(inputs[0].detach(), inputs[1].detach(), inputs[2], *lengths)
        assert out.requires_grad and torch.autograd.grad(out.sum(), inputs[2])[0].abs().sum() > 0
        with torch.no_grad():
            before = len(made)
            assert not call(*inputs, *lengths).requires_grad and len(made) - before == short
        out = call(*inputs, *lengths)
        (first,) = torch.autograd.grad(out.float().square().sum(), inputs[0], create_graph=True)
        with pytest.raises(fa_attn.UnsupportedError, match="second derivatives"):
            torch.autograd.grad(first.float().sum(), inputs[0])
        out = call(*inputs, *lengths)
        with torch.no_grad():
            inputs[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@on
def test_gradients_of_sinks_and_with_slopes_are_those_of_the_long_way(device, dtype, monkeypatch):
    made = taken(monkeypatch)
    is_short = dtype is not torch.float32
    inputs = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), seed=4)
    slopes = torch.rand(4, device=device)
    for kind in (torch.float32, torch.bfloat16):
        sinks = torch.nn.Parameter(torch.randn(4, device=device, dtype=kind))
        for options in (dict(sinks=sinks), dict(s_aux=sinks, alibi_slopes=slopes), dict(alibi_slopes=slopes)):
            wanted = [*inputs, sinks] if len(options) > 1 or "sinks" in options else inputs
            results = []
            for beside in (dict(), LONG):
                before = len(made)
                out, lse = fa_attn.flash_attn_func(
                    *inputs, causal=True, deterministic=True, return_lse=True, **options, **beside
                )
                assert len(made) - before == (is_short and not beside)
                loss = (out * out.detach()).float().sum() + lse.sum()
                results.append((out, lse, *torch.autograd.grad(loss, wanted)))
            for one, other in zip(*results):
                assert torch.equal(one, other) and one.abs().sum() > 0
            # Of the sinks alone.
            if len(wanted) > 3:
                out = fa_attn.flash_attn_func(*(x.detach() for x in inputs), **options)
                (own,) = torch.autograd.grad(out.float().square().sum(), sinks)
                assert own.dtype is kind and own.abs().sum() > 0
    learned = slopes.clone().requires_grad_()
    with pytest.raises(fa_attn.UnsupportedError, match="alibi_slopes have no gradient"):
        fa_attn.flash_attn_func(*inputs, alibi_slopes=learned)
    # One gradient of q, k and v in one tensor, written in place: by the long way.
    stacked = torch.stack([inputs[0], inputs[0], inputs[0]], 2).detach().requires_grad_()
    before = len(made)
    fa_attn.flash_attn_qkvpacked_func(stacked).float().square().sum().backward()
    assert len(made) == before and stacked.grad.abs().sum() > 0


@on
def test_what_is_written_in_place_is_refused_as_by_the_long_way(device, dtype):
    q, k, v = halves(device, (2, 20, 4, 64), (2, 20, 2, 64), (2, 20, 2, 64))
    needs = q.clone().requires_grad_()
    for arguments, out, said in (
        ((q, k, v), q, "out lies in the memory of q"),
        ((q, k, v), v.expand(2, 20, 2, 64).repeat(1, 1, 2, 1)[:1], "out has the shape"),
        ((q, k, v), torch.empty_like(q).float(), "out holds"),
        ((needs, k, v), torch.empty_like(q), "require gradients"),
        ((q, k, v), torch.empty_like(q).requires_grad_(), "require gradients"),
    ):
        with pytest.raises(fa_attn.InputError, match=said):
            fa_attn.flash_attn_func(*arguments, out=out)
    for options in (dict(sinks=q[0, 0], s_aux=q[0, 0]), dict(num_splits=257), dict(num_splits=-1)):
        with pytest.raises(fa_attn.InputError, match="sinks|num_splits"):
            fa_attn.flash_attn_func(q, k, v, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        fa_attn.flash_attn_func(q, k, v, casual=True)


def test_errors_are_those_of_the_long_way():
    q, k, v = halves("cpu", (2, 20, 4, 64), (2, 20, 2, 64), (2, 20, 2, 64))
    starts = torch.tensor([0, 10, 20], dtype=torch.int32)
    for call, arguments in (
        (fa_attn.flash_attn_func, (q, k[:1], v)),
        (fa_attn.flash_attn_func, (q, k[..., :32], v)),
        (fa_attn.flash_attn_func, (q[:, :, :3], k, v)),
        (fa_attn.flash_attn_varlen_func, (q[0], k[0], v[0], starts, starts, 10, -1)),
        (fa_attn.flash_attn_varlen_func, (q[0], k[0], v[0], starts, starts, 1 << 70, 10)),
        (fa_attn.flash_attn_varlen_func, (q[0], k[0], v[0], starts.long(), starts, 10, 10)),
        (fa_attn.flash_attn_varlen_func, (q[0], k[0], v[0], starts, starts, None, 10)),
    ):
        results = []
        for beside in (dict(), LONG):
            try:
                results.append(call(*arguments, **beside))
            except (fa_attn.InputError, fa_attn.UnsupportedError) as error:
                results.append(f"{type(error).__name__}: {error}")
        if isinstance(results[0], str):
            assert results[0] == results[1]
        else:
            assert torch.equal(*results)


@on
def test_threads_have_their_own_results(device, dtype):
    inputs = [halves(device, *[(1, 30, 4, 64)] * 3, seed=at) for at in range(4)]
    want = [fa_attn.flash_attn_func(*x, causal=True, **LONG) for x in inputs]
    found = [None] * 4
    if device == "cuda":
        torch.cuda.synchronize()

    def work(at):
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            found[at] = all(
                torch.equal(fa_attn.flash_attn_func(*inputs[at], causal=True), want[at]) for _ in range(50)
            )

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


@needs_gpu
def test_calls_go_to_the_stream_and_the_device_of_their_tensors():
    q, k, v = halves("cuda", (8, 1, 8, 64), (8, 900, 2, 64), (8, 900, 2, 64))
    used = torch.full((8,), 900, dtype=torch.int32, device="cuda")

    def step(q):
        return fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True)

    want = step(q)
    torch.cuda.synchronize()
    # Work on two streams at once has workspaces of its own.
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(step(q))
    torch.cuda.synchronize()
    assert all(torch.equal(one, want) for one in found)
    # What a stream still writes is read behind it.
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        out = step(late)
    streams[0].synchronize()
    assert torch.equal(out, want)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(q)
    with torch.cuda.graph(graph):
        out = step(static)
    static.copy_(q)
    used.fill_(450)
    graph.replay()
    close(out, step(q), q.dtype)
    assert not torch.equal(out, want)
    if torch.cuda.device_count() > 1:
        used.fill_(900)
        there = [x.to("cuda:1") for x in (q, k, v, used)]
        other = fa_attn.flash_attn_with_kvcache(*there[:3], cache_seqlens=there[3], causal=True)
        assert other.device.index == 1 and torch.cuda.current_device() == 0
        assert torch.equal(other.cpu(), want.cpu())
        with pytest.raises(fa_attn.InputError, match="lies elsewhere"):
            fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=there[3], causal=True)


@on
def test_programs_of_plain_tensors_are_computed_without_an_operator(device, dtype, monkeypatch):
    from fa_attn import _torch_programs, flex

    q, k, v = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), seed=6, grad=False)
    table, sinks = torch.randn(4, 64, device=device), torch.randn(4, device=device)
    state = torch.tensor([7, 11], dtype=torch.int64)
    by_heads = [x.transpose(1, 2) for x in (q, k, v)]
    blocks = flex.create_block_mask(lambda b, h, i, j: (i >= j) | (j < 5), None, None, 40, 40, device=device)

    def change(score, b, h, i, j):
        return score * 0.5 + table[h, j]

    def call(name, **options):
        return lambda: fa_attn.flash_attn_func(q, k, v, return_lse=True, **options)

    calls = (
        call("score", score_mod=change),
        call("mask", mask_mod=lambda b, h, i, j: (i - j) % 3 < 2, sinks=sinks),
        call("bias", bias=torch.randn(1, 4, 40, 40, device=device), causal=True),
        call("dropout", dropout_p=0.3, rng_state=state),
        lambda: flex.flex_attention(*by_heads, change, blocks, enable_gqa=True, return_lse=True),
        lambda: flex.flex_attention(*by_heads, block_mask=blocks, enable_gqa=True, return_lse=True),
    )
    made, at_once = [], _torch_programs._at_once

    def noted(*given):
        made.append(at_once(*given))
        return made[-1]

    for call in calls:
        before = len(made)
        monkeypatch.setattr(_torch_programs, "_at_once", noted)
        one = call()
        assert len(made) == before + 1 and made[-1] is not None
        monkeypatch.setattr(_torch_programs, "_at_once", lambda *given: None)
        for own, other in zip(one, call()):
            assert torch.equal(own, other) and own.stride() == other.stride() and own.abs().sum() > 0
    # So is what is differentiated, of arrays as well.
    learned = table.clone().requires_grad_()

    def gradients():
        own = [x.detach().requires_grad_() for x in (q, k, v, sinks)] + [learned]
        out, lse = fa_attn.flash_attn_func(
            *own[:3],
            sinks=own[3],
            score_mod=lambda s, b, h, i, j: s + learned[h, j],
            dropout_p=0.3,
            rng_state=state,
            return_lse=True,
        )
        return torch.autograd.grad(out.float().square().sum() + lse.sum(), own)

    by_operator = gradients()
    monkeypatch.setattr(_torch_programs, "_at_once", noted)
    for own, other in zip(gradients(), by_operator):
        assert torch.equal(own, other) and own.abs().sum() > 0
    assert made[-1] is not None
    out = fa_attn.flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j: s + learned[h, j])
    assert torch.autograd.grad(out.float().square().sum(), learned)[0].abs().sum() > 0
    with torch.no_grad():
        fa_attn.flash_attn_func(q.requires_grad_(), k, v, score_mod=change)
    assert made[-1] is not None


@on
def test_torchs_functions_take_the_short_way(device, dtype, monkeypatch):
    from fa_attn import _torch_by_heads as by_heads
    from fa_attn import flex

    made, plain = [], by_heads.plain_attention

    def counted(*arguments):
        made.append(plain(*arguments))
        return made[-1]

    q, k, v = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 4, 64), (2, 40, 4, 64), seed=7, grad=False)
    of_heads = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    by_rows = [x.transpose(1, 2) for x in (q, k, v)]
    for inputs in (of_heads, by_rows):
        for call in (
            lambda: (flex.scaled_dot_product_attention(*inputs),),
            lambda: (flex.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3),),
            lambda: flex.flex_attention(*inputs, return_lse=True),
        ):
            monkeypatch.setattr(by_heads, "plain_attention", counted)
            one = call()
            assert (made[-1] is not None) == (dtype is not torch.float32)
            monkeypatch.setattr(by_heads, "plain_attention", lambda *_: None)
            for own, other in zip(one, call()):
                assert torch.equal(own, other) and own.abs().sum() > 0
                assert own.stride() == other.stride() and own.shape == other.shape
    monkeypatch.setattr(by_heads, "plain_attention", counted)
    before = len(made)
    learned = [x.clone().requires_grad_() for x in of_heads]
    out = flex.scaled_dot_product_attention(*learned)
    assert out.is_contiguous() and len(made) == before
    out.float().square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in learned)


@on
def test_caches_of_codes_take_the_short_way(device, dtype, monkeypatch):
    made = taken(monkeypatch)
    is_short = dtype is not torch.float32
    q, k, v = tensors(device, dtype, (3, 2, 4, 64), (6, 16, 2, 64), (6, 16, 2, 64), seed=8, grad=False)
    table = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    used = torch.tensor([3, 32, 20], dtype=torch.int32, device=device)
    per_head = torch.rand(2, device=device) + 0.5
    per_sequence = torch.rand(3, 2, device=device) + 0.5
    lengths = dict(cache_seqlens=used, block_table=table, causal=True, return_lse=True)
    cache = fa_attn.flash_attn_with_kvcache
    for codes in ("e4m3", "int8"):
        own_k, own_v = (fa_attn.quantize_kv(x, codes)[0] for x in (k, v))
        for descales, takes in (
            (dict(), True),
            (dict(k_descale=per_head, v_descale=per_head + 1), True),
            (dict(k_descale=per_sequence), True),
            (dict(v_descale=per_sequence[:, :1].expand(3, 2)), True),
            (dict(k_descale=per_head[:1]), False),
            (dict(k_descale=per_sequence[:1]), False),
        ):
            before = len(made)
            one = cache(q, own_k, own_v, **lengths, **descales)
            assert len(made) - before == (is_short and takes), (codes, descales)
            other = cache(q, own_k, own_v, **lengths, **descales, **LONG)
            assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(one, other))
        before = len(made)
        with pytest.raises(fa_attn.UnsupportedError, match="gradient"):
            cache(q, own_k, own_v, **lengths, k_descale=per_head.clone().requires_grad_())
        with pytest.raises(fa_attn.UnsupportedError, match="gradient"):
            own = [x.unflatten(0, (3, 2)).flatten(1, 2) for x in (own_k, own_v)]
            fa_attn.flash_attn_func(q.clone().requires_grad_(), *own).sum().backward()
        with pytest.raises(fa_attn.InputError, match="k_descale"):
            cache(q, own_k, own_v, **lengths, k_descale=per_head.double())
        with pytest.raises(fa_attn.UnsupportedError, match="kv_cache_dtype"):
            cache(q, own_k.view(torch.uint8), own_v.view(torch.uint8), **lengths)
        assert len(made) == before
    # Of keys without codes descales are factors.
    before = len(made)
    one = cache(q, k, v, **lengths, k_descale=per_head)
    assert len(made) == before and one[0].abs().sum() > 0


@on
def test_appends_end_by_the_short_way(device, dtype, monkeypatch):
    made = taken(monkeypatch)
    at_once = fa_attn.torch.plain_attention_on_cache
    q, k, v = tensors(device, dtype, (3, 2, 4, 64), (3, 2, 2, 64), (3, 2, 2, 64), seed=3, grad=False)
    pages = tensors(device, dtype, (12, 16, 2, 64), (12, 16, 2, 64), seed=4, grad=False)
    ints = dict(dtype=torch.int32, device=device)
    table, used = torch.randperm(12).view(3, 4).to(**ints), torch.tensor([0, 17, 61], **ints)
    cos, sin = tensors(device, dtype, (64, 16), (64, 16), seed=5, grad=False)
    starts = torch.tensor([0, 1, 3, 6], **ints)
    packed = dict(cu_seqlens_q=starts, max_seqlen_q=3, cu_seqlens_k_new=starts)
    turns = dict(rotary_cos=cos, rotary_sin=sin)
    for options in (
        dict(),
        dict(causal=True, return_softmax_lse=True),
        dict(**turns, causal=True, softcap=5.0),
        dict(**turns, rotary_interleaved=False, window_size=(9, 0), sinks=torch.rand(4, device=device)),
        dict(**packed, causal=True),
    ):
        new = [x.flatten(0, 1) for x in (q, k, v)] if "cu_seqlens_q" in options else (q, k, v)
        results = []
        for way in (at_once, lambda *_: None):
            monkeypatch.setattr(fa_attn.torch, "plain_attention_on_cache", way)
            caches, before = [x.clone() for x in pages], len(made)
            given = [x.clone().requires_grad_() for x in new]
            out = fa_attn.flash_attn_with_kvcache(
                given[0], *caches, *given[1:], cache_seqlens=used, block_table=table, **options
            )
            if "cu_seqlens_q" not in options:
                assert len(made) - before == (way is at_once and dtype is not torch.float32)
            results.append([*(out if isinstance(out, tuple) else (out,)), *caches])
        for one, other in zip(*results):
            assert torch.equal(one, other) and one.abs().sum() > 0 and not one.requires_grad
