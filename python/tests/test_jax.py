"""The functions on jax's arrays outside of its transformations, and on numpy's bfloat16.

pip install jax pytest && python -m pytest tests/test_jax.py
"""

import numpy as np
import pytest
import reference

import fa_attn


def place(jax, dtype):
    """Where arrays of `dtype` are computed: on the GPU if jax has one, but f32, which only the CPU computes."""
    return jax.default_device(jax.devices("cpu")[0] if dtype == "float32" else jax.devices()[0])


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_arrays_of_jax(dtype):
    jax = pytest.importorskip("jax")
    with place(jax, dtype):
        keys = jax.random.split(jax.random.PRNGKey(0), 4)
        q, k, v, dout = (jax.random.normal(key, (1, 33, 4, 32)).astype(dtype) for key in keys)
    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, jax.Array) and out.dtype == dtype and lse.shape == (1, 4, 33)
    plain = [np.asarray(x[0], np.float64) for x in (q, k, v, dout)]
    want, want_lse, _ = reference.attention(*plain[:3], causal=True)
    assert np.abs(np.asarray(out[0], np.float64) - want).max() < TOLERANCE[dtype] * 2
    assert np.abs(np.asarray(lse[0], np.float64) - want_lse).max() < TOLERANCE[dtype] * 2
    grads = fa_attn.flash_attn_backward(dout, q, k, v, out, lse, causal=True)
    for got, grad in zip(grads, reference.gradients(plain[3], *plain[:3], causal=True)):
        assert got.dtype == dtype
        assert np.abs(np.asarray(got[0], np.float64) - grad).max() < TOLERANCE[dtype] * 16
    with pytest.raises(fa_attn.UnsupportedError, match="in place"):
        fa_attn.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=3)


def test_results_lie_where_their_arrays_do():
    """Not on jax's default device, which is a GPU where there is one."""
    jax = pytest.importorskip("jax")
    first, *_, last = jax.devices("cpu")
    with jax.default_device(first):
        q = jax.random.normal(jax.random.PRNGKey(0), (1, 5, 2, 32))
    with jax.default_device(last):
        out, lse = fa_attn.flash_attn_func(q, q, q, return_lse=True)
        grads = fa_attn.flash_attn_backward(q, q, q, q, out, lse)
    assert first != last and {x.device for x in (out, lse, *grads)} == {q.device} == {first}


def test_arrays_on_a_gpu_are_lent_to_torch(monkeypatch):
    """The way of a GPU's arrays, on the CPU's: what differs is where they lie."""
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    from fa_attn import _jax_arrays

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    q, k, v, dout = (jax.random.normal(key, (2, 33, 4, 32)).astype("bfloat16") for key in keys)
    sinks = jax.numpy.asarray([0.5, -1.0, 0.0, 2.0], "float32")
    options = dict(causal=True, sinks=sinks)
    want = fa_attn.flash_attn_func(q, k, v, return_lse=True, **options)
    want += fa_attn.flash_attn_backward(dout, q, k, v, *want, **options)
    monkeypatch.setattr(_jax_arrays, "_is_on_gpu", lambda array: True)
    got = fa_attn.flash_attn_func(q, k, v, return_lse=True, **options)
    got += fa_attn.flash_attn_backward(dout, q, k, v, *got, **options)
    assert len(got) == len(want) == 6
    for one, other in zip(got, want):
        assert isinstance(one, jax.Array) and one.dtype == other.dtype
        assert np.array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    for cache in (7, np.asarray([7, 33], np.int32)):
        out = fa_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=cache)
        assert isinstance(out, jax.Array) and out.shape == (2, 1, 4, 32)
    merged, lse = fa_attn.merge([got[0], got[0]], [got[1], got[1]], dtype="float32")
    assert merged.dtype == "float32" and np.allclose(lse, got[1] + np.log(2), atol=1e-6)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(fa_attn.UnsupportedError, match="install torch with CUDA"):
        fa_attn.flash_attn_func(q, k, v)
    del torch


def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 20, 2, 32)).astype(ml_dtypes.bfloat16) for _ in range(3))
    out = fa_attn.flash_attn_func(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    want, _, _ = reference.attention(q[0], k[0], v[0])
    assert np.abs(out[0].astype(np.float64) - want).max() < TOLERANCE["bfloat16"]


def test_bfloat16_of_numpy_is_called_so():
    """numpy's capsules know no bfloat16: they have its words, which are no numbers of their own."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = np.ones((1, 4, 2, 32), np.float32)
    brief = q.astype(ml_dtypes.bfloat16)
    for arrays, said in (
        ((q, brief, brief), "k holds bf16 and q f32"),
        ((brief, brief, q), "v holds f32 and q bf16"),
        ((brief, q.astype(np.uint16), brief), "k holds uint16: attention"),
        ((q.astype(np.uint16),) * 3, "q holds uint16: attention"),
    ):
        with pytest.raises(ValueError, match=said):
            fa_attn.flash_attn_func(*arrays)
    with pytest.raises(fa_attn.InputError, match="sinks holds bfloat16: it must be float32"):
        fa_attn.flash_attn_func(q, q, q, sinks=np.ones(2, ml_dtypes.bfloat16))
