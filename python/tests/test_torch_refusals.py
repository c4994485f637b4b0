"""What is refused on torch tensors, and what a refusal names."""

import pytest

torch = pytest.importorskip("torch")

import hostile  # noqa: E402
from torch_cases import needs_gpu  # noqa: E402

import fa_attn  # noqa: E402


def test_what_is_not_computed_raises():
    q = torch.randn(1, 8, 2, 32)
    with pytest.raises(fa_attn.UnsupportedError, match="float16 and bfloat16"):
        fa_attn.flash_attn_func(q.double(), q.double(), q.double())
    slopes = torch.rand(2, requires_grad=True)
    sloped = lambda q: fa_attn.flash_attn_func(q, q, q, alibi_slopes=slopes)  # noqa: E731
    for call, given in ((sloped, q), (torch.vmap(sloped), q[None])):
        with pytest.raises(fa_attn.UnsupportedError, match="detach them"):
            call(given)
    with torch.no_grad():
        assert torch.equal(sloped(q), fa_attn.flash_attn_func(q, q, q, alibi_slopes=slopes.detach()))
    # A factor that is learned would get no gradient.
    for name in ("softmax_scale", "softcap"):
        factor = torch.tensor(0.5, requires_grad=True)
        with pytest.raises(fa_attn.UnsupportedError, match=f"{name} requires a gradient"):
            fa_attn.flash_attn_func(q, q, q, **{name: factor})
        with torch.no_grad():
            got = fa_attn.flash_attn_func(q, q, q, **{name: factor})
        assert torch.equal(got, fa_attn.flash_attn_func(q, q, q, **{name: 0.5}))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_tensors_of_other_layouts_are_refused(layout):
    parts = [torch.randn(rows, 2, 8) for rows in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(fa_attn.UnsupportedError, match="nested.*flash_attn_varlen_func"):
        fa_attn.flash_attn_func(nested, nested, nested)
    with pytest.raises(fa_attn.UnsupportedError, match="to_dense"):
        fa_attn.flash_attn_func(torch.ones(1, 4, 2, 8).to_sparse(), *(torch.ones(1, 4, 2, 8),) * 2)


def test_types_of_8_bits_are_named():
    q = torch.ones(1, 4, 2, 16).to(torch.int8)
    with pytest.raises(fa_attn.UnsupportedError, match="q holds int8"):
        fa_attn.flash_attn_func(q, q, q)
    qkv = torch.ones(1, 4, 3, 2, 16)
    with pytest.raises(fa_attn.UnsupportedError, match="q holds int8"):
        fa_attn.flash_attn_qkvpacked_func(qkv.to(torch.int8))
    for given in (dict(kv_cache_dtype="fp8"), dict(v_descale=torch.ones(1))):
        with pytest.raises(fa_attn.UnsupportedError, match="qkv holds no codes, leave it out"):
            fa_attn.flash_attn_qkvpacked_func(qkv, **given)


def test_second_derivatives_raise():
    """Also where dout is a constant, so that nothing but the gradients' own inputs says what they depend on."""
    q = torch.randn(1, 8, 2, 32, requires_grad=True)
    qkv = torch.randn(1, 8, 3, 2, 32, requires_grad=True)
    for x, out in (
        (q, fa_attn.flash_attn_func(q, q, q)),
        (qkv, fa_attn.flash_attn_qkvpacked_func(qkv)),
    ):
        for loss in (out.square().sum(), out.sum()):
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert torch.equal(grad, plain)
            with pytest.raises(fa_attn.UnsupportedError, match="second derivatives"):
                (out.sum() + grad.square().sum()).backward(retain_graph=True)
            # Asked for one leaf alone, autograd goes no way that does not lead there.
            with pytest.raises(fa_attn.UnsupportedError, match="second derivatives"):
                torch.autograd.grad(out.sum() + grad.square().sum(), x, retain_graph=True)


def test_forward_mode_raises():
    from torch.autograd import forward_ad

    q, k, v = (torch.randn(1, 8, 2, 32) for _ in range(3))
    want = fa_attn.flash_attn_func(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(fa_attn.flash_attn_func(q, k, v), want)
        for leaf in (q, q.clone().requires_grad_()):
            dual = forward_ad.make_dual(leaf, torch.ones_like(q))
            with pytest.raises(fa_attn.UnsupportedError, match="forward-mode derivatives"):
                fa_attn.flash_attn_func(dual, k, v)
            with pytest.raises(fa_attn.UnsupportedError, match="forward-mode derivatives"):
                fa_attn.flash_attn_qkvpacked_func(torch.stack([k, dual, v], 2))
    with pytest.raises(fa_attn.UnsupportedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda q: fa_attn.flash_attn_func(q, k, v), (q,), (q,))


def test_a_tensor_that_requires_a_gradient_beside_numpy_arrays_raises():
    q = torch.randn(1, 8, 2, 32)
    lent = fa_attn.flash_attn_func(q.numpy(), q, q)
    assert (lent == fa_attn.flash_attn_func(q, q, q).numpy()).all()
    with pytest.raises(fa_attn.InputTypeError, match="requires a gradient"):
        fa_attn.flash_attn_func(q.numpy(), q.clone().requires_grad_(), q)


@needs_gpu
def test_a_gpu_computes_no_f32_and_says_so():
    q = torch.randn(1, 8, 2, 32, device="cuda")
    with pytest.raises(fa_attn.UnsupportedError, match="f16 or bf16"):
        fa_attn.flash_attn_func(q, q, q)
    with pytest.raises(fa_attn.InputError, match="elsewhere"):
        fa_attn.flash_attn_func(q.half(), q.half().cpu(), q.half())


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


def test_tensors_that_are_not_lent_are_refused_by_name():
    q = torch.zeros(1, 3, 2, 8)
    quantised = torch.quantize_per_tensor(q, 0.1, 0, torch.qint8)
    for at, other in enumerate((quantised, q.to("meta"))):
        with pytest.raises(fa_attn.InputError, match=f"^{'qk'[at]} .torch.* cannot be lent: .*; convert it$"):
            fa_attn.flash_attn_func(*((other, q, q), (q, other, q))[at])


def wrong_tensors():
    q = torch.zeros(2, 4, 4, 8)
    yield from (torch.tensor(3.0), torch.tensor(2), torch.tensor(2, dtype=torch.int32), q)
    yield from map(q.to, (torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn))
    yield from (q.clone().requires_grad_(), q.to("meta"))
    yield from (q.to_sparse(), torch.quantize_per_tensor(q, 1.0, 0, torch.qint8), q[None, None, None])
    yield from (torch.zeros(0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(3).long())
    yield from (torch.nested.nested_tensor([q[0, 0], q[0, :3, 0]]), torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("array", [torch.from_numpy, lambda x: x], ids=["torch", "numpy"])
@pytest.mark.parametrize("name", sorted(hostile.calls(torch.from_numpy)))
def test_wrong_arguments_raise_errors_of_this_package(name, array):
    hostile.attack(name, array, tuple(wrong_tensors()))


def test_arrays_beside_tensors_are_named():
    q, cache = torch.zeros(1, 4, 2, 8), torch.zeros(1, 8, 2, 8)
    used, x = torch.zeros(1, dtype=torch.int32), q.numpy()
    step = fa_attn.flash_attn_with_kvcache
    for name, call in (
        ("k", lambda: fa_attn.flash_attn_func(q, x, q)),
        ("v", lambda: fa_attn.flash_attn_func(q, q, x)),
        ("sinks", lambda: fa_attn.flash_attn_func(q, q, q, sinks=x[0, 0, :, 0])),
        ("out", lambda: fa_attn.flash_attn_func(q, q, q, out=x)),
        ("k", lambda: step(q, cache, cache.clone(), x, q, cache_seqlens=used)),
        ("rotary_cos", lambda: step(q, cache, cache.clone(), q, q, x[0, 0], q[0, 0], cache_seqlens=used)),
        ("cache_leftpad", lambda: step(q, cache, cache, cache_seqlens=used, cache_leftpad=used.numpy())),
        ("a part of lses", lambda: fa_attn.merge([q], [x[..., 0].swapaxes(1, 2)])),
    ):
        with pytest.raises(fa_attn.InputTypeError, match=f"^{name} is .*ndarray"):
            call()
