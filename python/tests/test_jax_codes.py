"""K and V in codes, `qv` and FlashMLA's functions on jax's arrays: eagerly, under jit and vmap, against
the results on the values that codes stand for.

pip install jax pytest && python -m pytest tests/test_jax_codes.py
"""

import numpy as np
import pytest

import fa_attn
from fa_attn import flash_mla

jax = pytest.importorskip("jax")
jnp = jax.numpy

from fa_attn.jax import flash_attn_func  # noqa: E402

ON = jax.default_device(jax.devices("cpu")[0])


def normal(*shape, seed=0):
    with ON:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def near(got, want, limit=2e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape and (np.abs(got - want) <= limit + limit * np.abs(want)).all()


def per_row(x, codes):
    rows = codes.shape[:-1]
    return x if x.shape == rows else jnp.broadcast_to(x.reshape(-1, 1, x.shape[-1]), rows)


@pytest.mark.parametrize("per", ("tensor", "head", "sequence_head", "token_head"))
@pytest.mark.parametrize("kind", ("e4m3", "e5m2", "int8", "int4"))
def test_caches_of_codes(kind, per):
    q, k, v = normal(2, 3, 4, 16), normal(2, 9, 2, 16, seed=1), normal(2, 9, 2, 16, seed=2)
    (k8, k_descale), (v8, v_descale) = (fa_attn.quantize_kv(x, kind, per) for x in (k, v))
    bits, own = fa_attn.quantize_kv(np.asarray(k), kind, per)
    held = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8, "int4": jnp.uint8}
    assert k8.dtype == held[kind]
    named = {"kv_cache_dtype": "int4"} if kind == "int4" else {}
    assert (np.asarray(k_descale) == own).all()
    assert (np.asarray(k8).view(bits.dtype) == bits).all()
    again = jax.jit(lambda x: fa_attn.quantize_kv(x, kind, per))(k)
    assert (again[0].view(jnp.uint8) == k8.view(jnp.uint8)).all()
    values = [fa_attn.dequantize_kv(x, d, kv_dtype=kind) for x, d in ((k8, k_descale), (v8, v_descale))]
    want = flash_attn_func(q, *values, causal=True)

    def call(q, k8, v8, k_descale, v_descale):
        return flash_attn_func(q, k8, v8, causal=True, k_descale=k_descale, v_descale=v_descale, **named)

    arguments = (q, k8, v8, k_descale, v_descale)
    near(call(*arguments), want)
    near(jax.jit(call)(*arguments), want)
    rows = [per_row(x, k8) for x in arguments[3:]]
    each = jax.vmap(lambda *own: call(*(x[None] for x in own))[0])
    near(each(*arguments[:3], *rows), want)
    if per == "head":
        near(jax.vmap(lambda *own: call(*(x[None] for x in own), *arguments[3:])[0])(*arguments[:3]), want)
    for at in (0, 3):
        for function in (call, jax.jit(call)):
            with pytest.raises(fa_attn.UnsupportedError, match="in codes: there are no gradients"):
                jax.grad(lambda *own: function(*own).sum(), argnums=at)(*arguments)  # noqa: B023


def test_q_of_codes():
    scale = jnp.asarray(np.random.default_rng(3).uniform(0.01, 0.03, (2, 2)).astype(np.float32))
    q8, k8 = ((normal(2, n, 2, 16, seed=n) * 20).astype(jnp.float8_e4m3fn) for n in (3, 9))
    q, k = (fa_attn.dequantize_kv(x, scale) for x in (q8, k8))
    want = flash_attn_func(q, k, k)
    named = dict(q_descale=scale, k_descale=scale, v_descale=scale)
    for function in (flash_attn_func, jax.jit(flash_attn_func)):
        out = function(q8, k8, k8, **named)
        assert out.dtype == jnp.bfloat16
        near(out.astype(jnp.float32), want, 5e-3)
    bits = [x.view(jnp.uint8) for x in (q8, k8)]
    out = jax.jit(lambda q, k: flash_attn_func(q, k, k, kv_cache_dtype="fp8", **named))(*bits)
    assert out.dtype == jnp.float32
    near(out, want)
    loss = lambda q: flash_attn_func(q, k8, k8, **named).astype(jnp.float32).sum()  # noqa: E731
    for function in (loss, jax.jit(loss)):
        with pytest.raises(fa_attn.UnsupportedError, match="in codes: there are no gradients"):
            jax.grad(function)(q8)


def test_latent_rows():
    q, qv = normal(2, 3, 4, 8), normal(2, 3, 4, 24, seed=1)
    k, v = normal(2, 9, 1, 8, seed=2), normal(2, 9, 1, 24, seed=3)
    want = flash_attn_func(jnp.concatenate([qv, q], -1), jnp.concatenate([v, k], -1), v, causal=True)
    call = lambda q, qv, k, v: flash_attn_func(q, k, v, causal=True, qv=qv)  # noqa: E731
    near(jax.jit(call)(q, qv, k, v), want)
    with pytest.raises(fa_attn.UnsupportedError, match="qv: keys that begin with their values have no"):
        jax.grad(lambda q: call(q, qv, k, v).sum())(q)
    # FlashMLA's functions, on numpy's arrays and on jax's.
    tokens, cache = normal(2, 2, 4, 32, seed=4), normal(5, 4, 1, 32, seed=5)
    table, used = np.array([[3, 0], [1, 4]], np.int32), np.array([0, 7], np.int32)
    indices = np.array([[[0, 9, -1, 3], [-1, -1, -1, -1]], [[19, 20, 4, 4], [1, 2, 3, 4]]], np.int32)
    sinks = np.array([0.5, -np.inf, np.inf, -1.0], np.float32)

    def dense(q, cache, table, used):
        return flash_mla.flash_mla_with_kvcache(q, cache, table, used, 24, causal=True)

    def sparse(q, cache, indices, sinks):
        return flash_mla.flash_mla_with_kvcache(q, cache, None, None, 24, indices=indices, attn_sink=sinks)

    def prefill(q, rows, indices, sinks):
        return flash_mla.flash_mla_sparse_fwd(q, rows, indices, 0.2, 24, sinks)

    for function, arguments in (
        (dense, (tokens, cache, table, used)),
        (sparse, (tokens, cache, indices, sinks)),
        (prefill, (tokens[0], cache.reshape(20, 1, 32), indices[1][:, None], sinks)),
    ):
        want = function(*map(np.asarray, arguments))
        for own in (function, jax.jit(function)):
            for got, need in zip(own(*map(jnp.asarray, arguments)), want):
                assert (np.isinf(got) == np.isinf(need)).all()
                near(np.nan_to_num(got, posinf=1, neginf=-1), np.nan_to_num(need, posinf=1, neginf=-1))


@pytest.mark.parametrize("width", [656, 584, 576])
def test_packed_rows(width):
    """jax's arrays, eagerly and under jit, give what numpy's do."""
    rng = np.random.default_rng(width)
    columns, page = 512 if width == 584 else 576, 4
    rows = rng.integers(0, 256, (5, page, 1, width), dtype=np.uint8)
    if width == 584:
        data = rows.reshape(5, page * width)
        data[:, page * 576 :] = rng.integers(120, 130, (5, page * 8), dtype=np.uint8)
        data[:, : page * 576].reshape(5, page, 576)[..., 448:] = 61
        data[:, : page * 576].reshape(5, page, 576)[..., :448] &= 0xBF
    else:
        rows[..., :576] &= 0xBF
        if width == 656:
            rows[..., 512:528] = rng.standard_normal((5, page, 1, 4)).astype(np.float32).view(np.uint8)
            rows[..., 528:] = 61
    descale = np.array([0.5], np.float32) if width == 576 else None
    q = rng.standard_normal((2, 3, 4, columns), dtype=np.float32)
    table, used = np.array([[3, 0], [1, 4]], np.int32), np.array([0, 7], np.int32)
    indices = rng.integers(-2, 21, (2, 3, 6), dtype=np.int32)

    def dense(q, rows, table, used):
        call = dict(causal=True, softmax_scale=0.02, is_fp8_kvcache=True, descale_k=descale)
        return flash_mla.flash_mla_with_kvcache(q, rows, table, used, 512, **call)

    def sparse(q, rows, indices):
        call = dict(softmax_scale=0.02, is_fp8_kvcache=True, descale_k=descale)
        return flash_mla.flash_mla_with_kvcache(q, rows, None, None, 512, indices=indices, **call)

    for function, arguments in ((dense, (q, rows, table, used)), (sparse, (q, rows, indices))):
        want = function(*arguments)
        assert np.isfinite(want[0]).all() and np.abs(want[0]).max() > 0.1
        for own in (function, jax.jit(function)):
            for got, need in zip(own(*map(jnp.asarray, arguments)), want):
                assert (np.isinf(got) == np.isinf(need)).all()
                near(np.nan_to_num(got, posinf=1), np.nan_to_num(need, posinf=1))
