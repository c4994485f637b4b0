"""The functions on torch tensors, on the CPU and, where there is one, on a GPU.

pip install torch pytest && python -m pytest tests/test_torch.py
"""

import pytest

torch = pytest.importorskip("torch")

import torch.utils.checkpoint  # noqa: E402, F811
from torch_cases import close, definition, needs_gpu, on, same_gradients, tensors  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn.torch  # noqa: E402, F401 - its operators
from fa_attn._options import NO_EXTRAS, call_options  # noqa: E402
from fa_attn._torch_schemas import flat as arguments_of  # noqa: E402


MASKS = [dict(), dict(causal=True), dict(window_size=(17, 9)), dict(causal=True, window_size=(30, -1))]
MASKS += [dict(causal=True, query_offset=5), dict(window_size=(17, 9), query_offset=-3)]


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
    offset = mask.get("query_offset", 0)
    want = definition(
        q, k, v, mask.get("causal", False), mask.get("window_size", (-1, -1)), offset=offset
    )
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
    starts = (3, 33, 40, 70), (0, 50, 50, 90)
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in starts)
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
    options = call_options(None, True, (-1, -1), 0.0, False, 3)
    arguments = (q, k, v, *NO_EXTRAS._replace(sinks=sinks), *arguments_of(options))
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
    meta = fa_attn.flash_attn_backward(*(x.to("meta") for x in (dout, q, k, v, out, lse)), causal=True)
    assert [x.shape for x in meta] == [x.shape for x in want]
    compiled = torch.compile(fa_attn.flash_attn_backward, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(dout, q, k, v, out, lse, causal=True), want):
        close(one, other, dtype)


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


def test_gradients_of_many_at_once():
    """By `is_grads_batched`, as vectorised Jacobians ask for them, and within `torch.vmap`."""
    q, k, v = tensors("cpu", torch.float32, (1, 3, 2, 8), (1, 5, 1, 8), (1, 5, 1, 8))
    qkv = tensors("cpu", torch.float32, (1, 3, 3, 2, 8))[0]
    sinks = torch.randn(2, requires_grad=True)
    bias = torch.randn(2, 3, 5, requires_grad=True)
    calls = (
        (lambda *x: fa_attn.flash_attn_func(*x, causal=True, return_softmax_lse=True), (q, k, v)),
        (lambda q, k, v, x: (fa_attn.flash_attn_func(q, k, v, sinks=x),), (q, k, v, sinks)),
        (lambda q, k, v, x: (fa_attn.flash_attn_func(q, k, v, bias=x),), (q, k, v, bias)),
        (lambda x: (fa_attn.flash_attn_qkvpacked_func(x),), (qkv,)),
    )
    for call, given in calls:
        results = call(*given)
        many = [torch.randn(3, *x.shape) for x in results]
        got = torch.autograd.grad(results, given, many, is_grads_batched=True, retain_graph=True)
        for at in range(3):
            one = torch.autograd.grad(results, given, [x[at] for x in many], retain_graph=True)
            for have, need in zip(got, one):
                close(have[at], need, torch.float32)
        mapped = torch.vmap(lambda *x: torch.autograd.grad(results, given, x, retain_graph=True))(*many)
        for have, need in zip(mapped, got):
            close(have, need, torch.float32)
    jacobian = torch.autograd.functional.jacobian
    made = [jacobian(fa_attn.flash_attn_func, (q, k, v), vectorize=x) for x in (True, False)]
    for have, need in zip(*made):
        close(have, need, torch.float32)


def test_what_records_operators_sees_them():
    """A plain call writes to memory that traces and modes see as empty."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    q, k, v = tensors("cpu", torch.float32, (2, 9, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32), grad=False)
    other = torch.randn_like(q)

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.seen.append(str(operator))
            return operator(*args, **(kwargs or {}))

    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    forward = lambda q: fa_attn.flash_attn_func(q, k, v, causal=True)  # noqa: E731
    backward = lambda q: fa_attn.flash_attn_backward(out, q, k, v, out, lse, causal=True)[1]  # noqa: E731
    for call, name in ((forward, "fa_attn.forward.default"), (backward, "fa_attn.backward.default")):
        want = call(other)
        assert torch.equal(torch.jit.trace(call, (q,), check_trace=False)(other), want)
        assert torch.equal(make_fx(call)(q)(other), want)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert call(q).shape == want.shape
        with Names() as names:
            assert torch.equal(call(other), want)
        assert name in names.seen


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


@on
def test_head_dims_off_sixteen_bytes_have_results_that_can_be_viewed(device, dtype):
    """Kernels compute rows that are rounded up; models of transformers join heads by `view`."""
    q, k, v = tensors(device, dtype, (2, 9, 4, 12), (2, 11, 2, 12), (2, 11, 2, 20), grad=False)
    out = fa_attn.flash_attn_func(q, k, v, causal=True)
    close(out.view(2, 9, 80), definition(q, k, v, causal=True).reshape(2, 9, 80), dtype)


@on
def test_operations_are_counted(device, dtype):
    """As of torch's own attention; its counter copies what it counts when it is made."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = tensors(device, dtype, (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16))
    starts = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)

    def counted(call, with_backward=True):
        with FlopCounterMode(display=False) as counter:
            out = call()
            if with_backward:
                out.sum().backward()
        return counter.get_total_flops()

    pairs = 2 * 4 * 9 * 11
    padded = lambda **options: fa_attn.flash_attn_func(q, k, v, **options)  # noqa: E731
    assert counted(padded, with_backward=False) == 4 * pairs * 16
    assert counted(lambda: padded(causal=True)) == 14 * pairs * 16
    out = padded()
    assert counted(lambda: out) == 10 * pairs * 16
    # As many heads of each: torch's formula has no groups in every version.
    alike = [x.detach().repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v)]
    own = lambda: torch.nn.functional.scaled_dot_product_attention(*alike)  # noqa: E731
    if device == "cuda":
        assert counted(own, with_backward=False) == 4 * pairs * 16
    flat = [x[0] for x in (q, k, v)]
    packed = lambda **used: fa_attn.flash_attn_varlen_func(*flat, starts, starts, 6, 6, **used)  # noqa: E731
    assert counted(packed) == 14 * 4 * (3 * 3 + 6 * 6) * 16
    used = torch.tensor([1, 2], dtype=torch.int32, device=device)
    assert counted(lambda: packed(seqused_k=used)) == 14 * 4 * (3 * 1 + 6 * 2) * 16
    # Of programs as well, recorded with the forward or behind it.
    bias = torch.randn(4, 1, 11, device=device).requires_grad_()
    assert counted(lambda: padded(bias=bias)) == 14 * pairs * 16
    out = padded(bias=bias)
    assert counted(lambda: out) == 10 * pairs * 16 and bias.grad.abs().sum() > 0
    assert counted(lambda: packed(bias=bias[..., :1])) == 14 * 4 * (3 * 3 + 6 * 6) * 16
    (qkv,) = tensors(device, dtype, (2, 9, 3, 4, 16))
    out = fa_attn.flash_attn_qkvpacked_func(qkv)
    want = torch.autograd.grad(out.sum(), qkv, retain_graph=True)[0]
    assert counted(lambda: out) == 10 * 2 * 4 * 9 * 9 * 16
    close(qkv.grad, want, dtype)


@on
def test_lengths_written_before_the_backward_are_noticed(device, dtype):
    """As q, k and v are: gradients by other lengths would be wrong, and nothing would say so."""
    q, k, v = tensors(device, dtype, (12, 4, 16), (12, 2, 16), (12, 2, 16))
    (qkv,) = tensors(device, dtype, (12, 3, 4, 16))
    for call in (
        lambda starts: fa_attn.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7),
        lambda starts: fa_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 7),
    ):
        starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
        out = call(starts)
        starts[1] = 6
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    with torch.inference_mode():
        starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    fa_attn.flash_attn_varlen_func(q, k, v, starts, starts, 7, 7).sum().backward()


def test_a_batch_of_no_elements_has_a_vmap():
    q, k = torch.randn(0, 2, 9, 4, 16), torch.randn(2, 11, 2, 16)
    out, lse = torch.vmap(lambda q: fa_attn.flash_attn_func(q, k, k, return_lse=True))(q)
    assert out.shape == q.shape and lse.shape == (0, 2, 4, 9)


def test_appends_within_vmap_are_refused():
    q, k, cache = torch.randn(3, 1, 2, 4, 16), torch.randn(1, 2, 4, 16), torch.zeros(3, 1, 9, 4, 16)

    def step(q, cache):
        return fa_attn.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=3)

    with pytest.raises(fa_attn.UnsupportedError, match="append within torch.vmap"):
        torch.vmap(step)(q, cache)
    assert not cache.any()
