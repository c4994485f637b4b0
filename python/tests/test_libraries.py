"""Every function on the arrays of jax and of cupy: results are those on numpy's arrays, in their library.

pip install jax pytest && python -m pytest tests/test_libraries.py    # and cupy-cuda13x where there is a GPU
"""

import numpy as np
import pytest
from reference import arrays

import fa_attn

B, SQ, SK, H, HK, D = 2, 9, 20, 4, 2, 32


class Jax:
    def __init__(self):
        jax = pytest.importorskip("jax")
        self.kind, self.on_gpu = jax.Array, jax.default_backend() != "cpu"
        self.give = jax.numpy.asarray

    def numpy(self, array):
        return np.asarray(array)


class Cupy:
    on_gpu = True

    def __init__(self):
        cupy = pytest.importorskip("cupy")
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"cupy finds no GPU: {error}")
        self.kind, self.give, self.numpy = cupy.ndarray, cupy.asarray, cupy.asnumpy


def qkv(seed=0):
    return arrays(seed, (B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, D))


def ints(*values):
    return np.array(values, np.int32)


def dense(call):
    return call.flash_attn_func(*qkv(), causal=True, window_size=(7, 0), softcap=3.0, return_lse=True)


def modified(call):
    slopes, sinks = arrays(3, (H,), (H,))
    return call.flash_attn_func(*qkv(), alibi_slopes=abs(slopes), sinks=sinks, return_lse=True)


def stacked(call):
    q, k, v = qkv()
    return (
        call.flash_attn_qkvpacked_func(np.stack([k, k, v], 2), causal=True),
        call.flash_attn_kvpacked_func(q, np.stack([k, v], 2)),
    )


def packed(call):
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in qkv())
    starts_q, starts_k = ints(0, 5, 5, 18), ints(0, 30, 33, 40)
    kv, more = np.stack([k, v], 1), (starts_q, starts_k, 13, 30)
    return (
        *call.flash_attn_varlen_func(q, k, v, *more, causal=True, return_lse=True),
        call.flash_attn_varlen_kvpacked_func(q, kv, *more),
        call.flash_attn_varlen_qkvpacked_func(np.stack([k, k, v], 1), starts_k, 30, causal=True),
    )


def paged(call):
    q, k, v = qkv()
    pages = [x.reshape(-1, 5, HK, D) for x in (k, v)]
    table, starts = ints([[3, 0, 6], [1, 7, 2]]).reshape(2, 3), ints(0, SQ, 2 * SQ)
    more = dict(block_table=table, seqused_k=ints(11, 15))
    rows = q.reshape(-1, H, D)
    return call.flash_attn_varlen_func(rows, *pages, starts, None, SQ, 15, causal=True, **more)


def cached(call):
    q, k, v = qkv()
    used = ints(7, 20)
    return (
        call.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True),
        call.flash_attn_with_kvcache(q, k, v, cache_seqlens=11),
        call.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_batch_idx=ints(1, 0)),
        call.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=ints(2, 5), causal=True),
    )


def merged(call):
    q, k, v = qkv()
    parts = [call.flash_attn_func(q, k[:, i:j], v[:, i:j], return_lse=True) for i, j in ((0, 13), (13, SK))]
    return call.merge(*zip(*parts))


def gradients(call):
    q, k, v = qkv()
    (dout,) = arrays(5, (B, SQ, H, D))
    (sinks,) = arrays(6, (H,))
    out, lse = call.flash_attn_func(q, k, v, causal=True, sinks=sinks, return_lse=True)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (dout, q, k, v)]
    more = (ints(0, 9, 18), ints(0, 20, 40), SQ, SK)
    rows, masses = call.flash_attn_varlen_func(*flat[1:], *more, return_lse=True)
    return (
        *call.flash_attn_backward(dout, q, k, v, out, lse, causal=True, sinks=sinks, deterministic=True),
        *call.flash_attn_varlen_backward(*flat, rows, masses, *more),
    )


class Calls:
    """The package's functions on the arrays of a library: numpy's are converted on their way in."""

    def __init__(self, give, floats, seen):
        self._give, self._floats, self._seen = give, floats, seen

    def _there(self, value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._there, value))
        if not isinstance(value, np.ndarray):
            return value
        return self._give(value)

    def __getattr__(self, name):
        def call(*given, **beside):
            # Words beside the tensors stay in float32.
            small = {key: self._there(value) for key, value in beside.items()}
            large = [x.astype(self._floats) if _is_tensor(x) else x for x in given]
            made = getattr(fa_attn, name)(*map(self._there, large), **small)
            self._seen.append(made)
            return made

        return call


def _is_tensor(value):
    """q, k, v and their like; LSE, which stays in float32, has fewer axes or is no array of numpy."""
    return isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape[-1] == D


@pytest.mark.parametrize("library", [Jax, Cupy])
@pytest.mark.parametrize("case", [dense, modified, stacked, packed, paged, cached, merged, gradients])
def test_results_are_those_on_numpys_arrays(library, case):
    library = library()
    floats = np.float16 if library.on_gpu else np.float32
    seen = []
    got = case(Calls(library.give, floats, seen))
    want = case(Calls(lambda array: array, np.float32, []))
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for one, other in zip(got, want):
        assert isinstance(one, library.kind), type(one)
        one = library.numpy(one)
        assert one.shape == other.shape
        if library.on_gpu:
            finite = np.isfinite(other)
            assert np.array_equal(np.isfinite(one), finite)
            np.testing.assert_allclose(one[finite], other[finite], atol=4e-3 * max(1, np.abs(other[finite]).max()))
        else:
            np.testing.assert_array_equal(one, other)
    assert seen
