"""The functions on numpy arrays, against the definition in f64."""

import sys

import numpy as np
import pytest
import reference
from reference import arrays, close

import fa_attn
from fa_attn import _core
from fa_attn._options import TENSORS


MASKS = [
    dict(),
    dict(causal=True),
    dict(window_size=(5, 3)),
    dict(window_size=(7, -1)),
    dict(causal=True, window_size=(9, 4)),
    dict(window_size=(None, 2)),
    dict(causal=True, query_offset=-9),
    dict(causal=True, window_size=(9, 4), query_offset=12),
    dict(window_size=(5, 3), query_offset=-100),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("lengths", [(33, 33), (17, 40), (40, 17), (1, 70)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_masks_lengths_and_grouped_heads(mask, lengths, dtype):
    rows, keys = lengths
    q, k, v, dout = arrays(
        1, (2, rows, 4, 24), (2, keys, 2, 24), (2, keys, 2, 16), (2, rows, 4, 16), dtype=dtype
    )
    out, lse, nothing = fa_attn.flash_attn_func(q, k, v, return_attn_probs=True, **mask)
    assert nothing is None and out.dtype == dtype and lse.dtype == np.float32
    dq, dk, dv = fa_attn.flash_attn_backward(dout, q, k, v, out, lse, **mask)
    left, right = (-1 if side is None else side for side in mask.get("window_size", (-1, -1)))
    options = dict(causal=mask.get("causal", False), window=(left, right), offset=mask.get("query_offset", 0))
    for b in range(2):
        want, want_lse, _ = reference.attention(q[b], k[b], v[b], **options)
        close(out[b], want, dtype)
        close(lse[b], want_lse, dtype)
        for got, grad in zip((dq, dk, dv), reference.gradients(dout[b], q[b], k[b], v[b], **options)):
            close(got[b], grad, dtype, factor=8)


@pytest.mark.parametrize("offset", [5, -11])
def test_an_offset_moves_the_distances_of_slopes_too(offset):
    q, k, v, slopes = arrays(20, (20, 4, 32), (2, 30, 4, 32), (2, 30, 4, 32), (4,))
    starts = np.array([0, 8, 20], np.int32)
    bounds = dict(cu_seqlens_q=starts, max_seqlen_q=12, alibi_slopes=np.abs(slopes))
    out = fa_attn.flash_attn_varlen_func(q, k, v, causal=True, query_offset=offset, **bounds)
    for b, (first, end) in enumerate(zip(starts, starts[1:])):
        options = dict(causal=True, offset=offset, slopes=np.abs(slopes))
        close(out[first:end], reference.attention(q[first:end], k[b], v[b], **options)[0])
    for wrong, error in ((0.5, "must be a whole number"), (1 << 30, "query_offset = 1073741824 with ALiBi")):
        with pytest.raises(fa_attn.InputError, match=error):
            fa_attn.flash_attn_varlen_func(q, k, v, causal=True, query_offset=wrong, **bounds)


def test_scores_are_scaled_capped_biased_and_have_sinks():
    q, k, v, dout, slopes, sinks = arrays(
        2, (2, 30, 4, 32), (2, 30, 4, 32), (2, 30, 4, 32), (2, 30, 4, 32), (2, 4), (4,)
    )
    slopes = np.abs(slopes)
    out, lse = fa_attn.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=0.3,
        causal=True,
        softcap=5.0,
        alibi_slopes=slopes,
        sinks=sinks,
        return_softmax_lse=True,
    )
    for b in range(2):
        want, want_lse, _ = reference.attention(
            q[b], k[b], v[b], causal=True, scale=0.3, softcap=5.0, slopes=slopes[b], sinks=sinks
        )
        close(out[b], want)
        close(lse[b], want_lse)
    out, lse = fa_attn.flash_attn_func(q, k, v, alibi_slopes=slopes[0], learnable_sink=sinks, return_lse=True)
    *grads, dsinks = fa_attn.flash_attn_backward(dout, q, k, v, out, lse, alibi_slopes=slopes[0], sinks=sinks)
    total = np.zeros(4)
    for b in range(2):
        *want, of_sinks = reference.gradients(dout[b], q[b], k[b], v[b], slopes=slopes[0], sinks=sinks)
        total += of_sinks
        for got, grad in zip(grads, want):
            close(got[b], grad, factor=8)
    close(dsinks, total, factor=8)


def test_strides_are_honoured_and_inputs_are_not_copied():
    (qkv,) = arrays(3, (2, 20, 3, 4, 32))
    packed = fa_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    apart = fa_attn.flash_attn_func(*(np.ascontiguousarray(qkv[:, :, i]) for i in range(3)), causal=True)
    assert (packed == apart).all()
    kv = qkv[:, :, 1:]
    assert (fa_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True) == apart).all()
    heads_first = np.ascontiguousarray(qkv[:, :, 0].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    assert (fa_attn.flash_attn_func(heads_first, qkv[:, :, 1], qkv[:, :, 2], causal=True) == apart).all()
    one = np.broadcast_to(qkv[:1, :, 0], (2, 20, 4, 32))
    want = fa_attn.flash_attn_func(np.array(one), qkv[:, :, 1], qkv[:, :, 2])
    assert (fa_attn.flash_attn_func(one, qkv[:, :, 1], qkv[:, :, 2]) == want).all()


def _unaligned(x):
    return np.frombuffer(b"0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)


def _field(x):
    records = np.zeros(x.shape, [("tag", "i1"), ("value", x.dtype)])
    records["value"] = x
    return records["value"]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::-1],
        lambda x: x[..., ::-1],
        np.asfortranarray,
        lambda x: np.repeat(x, 2, -1)[..., ::2],
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        _unaligned,
        _field,
    ],
)
def test_views_of_any_layout_are_read(view):
    given = [view(x) for x in arrays(21, *((2, 9, 2, 16),) * 3)]
    out, lse = fa_attn.flash_attn_func(*given, causal=True, return_lse=True)
    grads = fa_attn.flash_attn_backward(view(out), *given, out, lse, causal=True)
    for b in range(2):
        close(out[b], reference.attention(*(x[b] for x in given), causal=True)[0])
        *want, _ = reference.gradients(view(out)[b], *(x[b] for x in given), causal=True)
        for got, grad in zip(grads, want):
            close(got[b], grad, factor=8)


def packed(seed, lengths_q, lengths_k):
    starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (lengths_q, lengths_k)]
    rows, keys = sum(lengths_q) + 3, sum(lengths_k) + 2
    return starts, arrays(seed, (rows, 4, 32), (keys, 2, 32), (keys, 2, 32), (rows, 4, 32))


def test_packed_sequences_and_lengths_in_use():
    lengths_q, lengths_k = [5, 0, 17, 1], [9, 4, 17, 0]
    (cu_q, cu_k), (q, k, v, dout) = packed(4, lengths_q, lengths_k)
    used_k = np.array([7, 4, 10, 0], np.int32)
    for used in (None, used_k):
        out, lse, _ = fa_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 17, 17, causal=True, return_attn_probs=True, seqused_k=used
        )
        dq, dk, dv = fa_attn.flash_attn_varlen_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, 17, 17, causal=True, seqused_k=used
        )
        assert lse.shape == (4, q.shape[0])
        seen_q, seen_k = np.zeros(len(q), bool), np.zeros(len(k), bool)
        for i, n in enumerate(lengths_q):
            of_q = slice(cu_q[i], cu_q[i] + n)
            of_k = slice(cu_k[i], cu_k[i] + (lengths_k[i] if used is None else used[i]))
            seen_q[of_q], seen_k[of_k] = True, True
            want, want_lse, _ = reference.attention(q[of_q], k[of_k], v[of_k], causal=True)
            close(out[of_q], want)
            close(lse[:, of_q], want_lse)
            grads = reference.gradients(dout[of_q], q[of_q], k[of_k], v[of_k], causal=True)
            for got, grad in zip((dq[of_q], dk[of_k], dv[of_k]), grads):
                close(got, grad, factor=8)
        assert not out[~seen_q].any() and not dq[~seen_q].any()
        assert not dk[~seen_k].any() and not dv[~seen_k].any()


def test_packed_in_one_array():
    starts = np.array([0, 5, 5, 12], np.int32)
    (qkv,) = arrays(5, (12, 3, 4, 32))
    one = fa_attn.flash_attn_varlen_qkvpacked_func(qkv, starts, 7, causal=True)
    two = fa_attn.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], starts, starts, 7, 7, causal=True)
    assert (one == two).all()
    close(one[5:], reference.attention(*(qkv[5:, i] for i in range(3)), causal=True)[0])


def test_gradients_through_the_lse():
    q, k, v, dout = arrays(22, (1, 6, 4, 16), (1, 9, 2, 16), (1, 9, 2, 16), (1, 6, 4, 16))
    dlse = np.random.default_rng(3).standard_normal((1, 4, 6)).astype(np.float32)
    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    got = fa_attn.flash_attn_backward(dout, q, k, v, out, lse, causal=True, dlse=dlse)

    def loss(*inputs):
        out, lse, _ = reference.attention(*(x[0] for x in inputs), causal=True)
        return (out * dout[0]).sum() + (lse * dlse[0]).sum()

    inputs = [x.astype(np.float64) for x in (q, k, v)]
    for grad, x in zip(got, inputs):
        for index in ((0, 0, 0, 0), (0, 3, 1, 7), (0, 5, -1, 15)):
            value, ends = x[index], []
            for x[index] in (value + 1e-5, value - 1e-5):
                ends.append(loss(*inputs))
            x[index] = value
            assert abs(grad[index] - (ends[0] - ends[1]) / 2e-5) < 2e-5
    with pytest.raises(fa_attn.InputError, match="dlse"):
        fa_attn.flash_attn_backward(dout, q, k, v, out, lse, causal=True, dlse=dlse[:, :2])


def test_a_number_that_has_a_gradient_elsewhere_is_a_number(monkeypatch):
    """Only torch has gradients that a call could miss."""

    class Learned:
        requires_grad = True

        def __float__(self):
            return 0.5

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    q = np.ones((1, 4, 2, 8), np.float32) * np.arange(4, dtype=np.float32)[:, None, None]
    got = fa_attn.flash_attn_func(q, q, q, softmax_scale=Learned())
    np.testing.assert_array_equal(got, fa_attn.flash_attn_func(q, q, q, softmax_scale=0.5))


def test_strange_arrays():
    (q,) = arrays(24, (1, 8, 2, 32))
    call = fa_attn.flash_attn_func
    want = call(q, q, q, causal=True)
    fixed = q.copy()
    fixed.flags.writeable = False
    assert np.array_equal(call(fixed, fixed, fixed, causal=1), want)
    every_other = np.repeat(q, 2, -1)[..., ::2]
    assert np.array_equal(call(every_other, every_other, every_other, causal=np.bool_(True)), want)
    one_key = np.broadcast_to(q[:, :1], q.shape)
    assert np.abs(call(q, one_key, one_key) - q[:, :1]).max() < 1e-6
    assert np.array_equal(call(q, q, q, window_size=(1 << 70, 0)), want)
    assert np.array_equal(call(q, q, q, window_size=(None, -0)), want)
    assert call(q[:0], q[:0], q[:0]).shape == (0, 8, 2, 32)
    assert (call(q, q[:, :0], q[:, :0]) == 0).all()
    odd = np.frombuffer(bytearray(b"x" + q.tobytes()), np.uint8)[1:].view(np.float32).reshape(q.shape)
    masked, weights = np.ma.masked_array(q, q > 0), np.ma.masked_array(np.ones(2, np.float32), True)
    whole = "an array is masked"
    for arguments, options, error, part in (
        ((q, masked, q), {}, fa_attn.InputTypeError, whole),
        ((q, q, q), dict(bias=np.ma.zeros((8, 8), np.float32)), fa_attn.InputTypeError, whole),
        ((q, q, q), dict(mask=np.ma.ones((8, 8), bool)), fa_attn.InputTypeError, whole),
        ((q, q, q), dict(score_mod=lambda s, b, h, i, j: s * weights[h]), fa_attn.InputTypeError, whole),
        ((q, q, q), dict(out=odd), fa_attn.InputError, "no multiple of its elements' 4 bytes"),
        ((q[0, 0],) * 3, {}, fa_attn.InputError, "(batch, seqlen, heads, head_dim)"),
        ((np.float32(1),) * 3, {}, fa_attn.InputError, "q has the shape ()"),
        ((q, q, q), dict(window_size=3), fa_attn.InputError, "window_size is 3"),
        ((q, q, q), dict(window_size=(1.5, 2)), fa_attn.InputError, "window_size is (1.5, 2)"),
        ((q.tolist(), q, q), {}, TypeError, "q is list: it must be an array that speaks DLPack"),
        ((q, None, q), {}, TypeError, "k is NoneType"),
        ((q, q, q), dict(out=q), fa_attn.InputError, "out lies in the memory of q"),
        ((q, q, q), dict(outs=q), TypeError, "'outs'"),
    ):
        with pytest.raises(error) as raised:
            call(*arguments, **options)
        assert part in str(raised.value), str(raised.value)
    starts = np.array([0, 4, 8], np.int32)
    with pytest.raises(fa_attn.InputError, match="max_seqlen_q is -2"):
        fa_attn.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, -2, 4)
    far = fa_attn.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 10**30, 4.0)
    assert far.shape == (8, 2, 32)
    cache = fa_attn.flash_attn_with_kvcache
    assert np.array_equal(
        cache(q[:, :1], q, q, cache_seqlens=np.int64(5)), cache(q[:, :1], q, q, cache_seqlens=5)
    )
    with pytest.raises(fa_attn.InputError, match="cache_seqlens is 1099511627776"):
        cache(q[:, :1], q, q, cache_seqlens=1 << 40)


class Lent:
    """An array of another library: a shape, a type of its own and DLPack."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, object()

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def test_arrays_of_other_libraries_are_read_where_they_lie():
    q, k, v, dout = arrays(11, (2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (2, 9, 4, 16))
    want, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_lse=True)
    have, have_lse = fa_attn.flash_attn_func(*map(Lent, (q, k, v)), causal=True, return_lse=True)
    assert np.array_equal(have, want) and np.array_equal(have_lse, lse)
    grads = fa_attn.flash_attn_backward(*map(Lent, (dout, q, k, v, want, lse)), causal=True)
    for one, other in zip(grads, fa_attn.flash_attn_backward(dout, q, k, v, want, lse, causal=True)):
        assert np.array_equal(one, other)
    starts = np.array([0, 4, 9], np.int32)
    packed = [q[0], k[0, :9], v[0, :9]]
    want = fa_attn.flash_attn_varlen_func(*packed, starts, starts, 5, 5)
    assert np.array_equal(fa_attn.flash_attn_varlen_func(*map(Lent, (*packed, starts, starts)), 5, 5), want)
    qkv = np.stack([q, q, q], 2)
    assert np.array_equal(
        fa_attn.flash_attn_qkvpacked_func(Lent(qkv)), fa_attn.flash_attn_qkvpacked_func(qkv)
    )
    used = np.array([3, 12], np.int32)
    want = fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used)
    lent = map(Lent, (q, k, v))
    assert np.array_equal(fa_attn.flash_attn_with_kvcache(*lent, cache_seqlens=Lent(used)), want)
    parts = Lent(have)
    merged, _ = fa_attn.merge([parts, parts], [Lent(lse)] * 2)
    close(merged, have, np.float32)
    with pytest.raises(fa_attn.InputError, match="float128|longdouble|cannot be lent"):
        fa_attn.flash_attn_func(Lent(q.astype(np.longdouble)), k, v)


def test_empty_problems_have_empty_or_zero_results():
    q, k = np.zeros((2, 3, 2, 16), np.float32), np.zeros((2, 0, 2, 16), np.float32)
    out, lse = fa_attn.flash_attn_func(q, k, k, return_softmax_lse=True)
    assert not out.any() and np.isneginf(lse).all()
    assert fa_attn.flash_attn_func(k, q, q).shape == (2, 0, 2, 16)
    assert fa_attn.flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 16)


def test_how_a_gpu_divides_the_work_changes_nothing_on_the_cpu():
    q, k, v = arrays(11, (2, 3, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32))
    starts = [np.arange(3, dtype=np.int32) * rows for rows in (3, 40)]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    qkv = np.stack([k, k, v], 2)
    for given in (dict(num_splits=3), dict(num_splits=1, pack_gqa=False), dict(num_splits=0, pack_gqa=True)):
        for call in (
            lambda **some: fa_attn.flash_attn_func(q, k, v, causal=True, **some),
            lambda **some: fa_attn.flash_attn_varlen_func(*flat, *starts, 3, 40, causal=True, **some),
            lambda **some: fa_attn.flash_attn_qkvpacked_func(qkv, **some),
            lambda **some: fa_attn.flash_attn_kvpacked_func(q, np.stack([k, v], 2), **some),
            lambda **some: fa_attn.flash_attn_with_kvcache(q, k, v, causal=True, **some),
        ):
            assert np.array_equal(call(**given), call())


def test_extras_are_in_the_order_of_the_library():
    assert tuple(name.split(" ")[0] for name in _core.BESIDE) == TENSORS
