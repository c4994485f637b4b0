"""The functions on numpy arrays, against the definition in f64."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import reference
from reference import arrays, close

import fa_attn

MASKS = [
    dict(),
    dict(causal=True),
    dict(window_size=(5, 3)),
    dict(window_size=(7, -1)),
    dict(causal=True, window_size=(9, 4)),
    dict(window_size=(None, 2)),
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
    options = dict(causal=mask.get("causal", False), window=(left, right))
    for b in range(2):
        want, want_lse, _ = reference.attention(q[b], k[b], v[b], **options)
        close(out[b], want, dtype)
        close(lse[b], want_lse, dtype)
        for got, grad in zip((dq, dk, dv), reference.gradients(dout[b], q[b], k[b], v[b], **options)):
            close(got[b], grad, dtype, factor=8)


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


def test_a_forked_process_computes():
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    q, k, v = arrays(23, (2, 300, 4, 32), (2, 300, 2, 32), (2, 300, 2, 32))
    want = fa_attn.flash_attn_func(q, k, v, causal=True)
    child = os.fork()
    if child == 0:
        same = np.array_equal(fa_attn.flash_attn_func(q, k, v, causal=True), want)
        plans = fa_attn.plan(fa_attn.problem(1, 512, heads=4, head_dim=64), limit=1)
        os._exit(0 if same and plans["forward"]["plans"] else 1)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the forked process hangs")


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


_INTERPRETERS = """
import sys
try:
    import _interpreters as made
except ImportError:
    made = __import__("_xxsubinterpreters")
run = made.exec if sys.version_info >= (3, 13) else made.run_string
body = f"import sys; sys.path[:] = {sys.path!r}" + sys.argv[1]
if sys.version_info < (3, 12):
    several = [made.create()]
elif sys.version_info < (3, 13):
    several = [made.create(isolated=True), made.create(isolated=False)]
else:
    several = [made.create("isolated"), made.create("legacy")]
for interpreter in several:
    print(run(interpreter, body) or "", end="", flush=True)
made.destroy(several[-1])
exec(body)
"""

_IN_EACH = """
try:
    import fa_attn
except ImportError as error:
    assert "subinterpreters" in str(error), error
    print("refused")
else:
    try:
        fa_attn.problem(1, -1, heads=1, head_dim=8)
    except fa_attn.InputError:
        print("taken")
"""


def test_interpreters_of_one_process():
    """One with a lock of its own refuses the module by name; those that share a lock take it."""
    command = [sys.executable, "-c", _INTERPRETERS, _IN_EACH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    own = ["refused"] if sys.version_info >= (3, 12) else []
    assert done.stdout.split() == [*own, "taken", "taken"]


def test_more_threads_than_are_of_use_are_not_started():
    """A pool of a hundred thousand threads takes minutes to start."""
    code = (
        "import numpy as np, fa_attn; q = np.ones((1, 64, 2, 16), 'f'); "
        "assert fa_attn.flash_attn_func(q, q, q).sum() == 2048"
    )
    variables = {**os.environ, "RAYON_NUM_THREADS": "100000"}
    subprocess.run([sys.executable, "-c", code], env=variables, timeout=60, check=True)


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
    odd = np.frombuffer(b"x" + q.tobytes(), np.uint8)[1:].view(np.float32).reshape(q.shape)
    for arguments, options, error, part in (
        ((odd, q, q), {}, fa_attn.InputError, "no multiple of its elements' 4 bytes"),
        ((q[0, 0],) * 3, {}, fa_attn.InputError, "(batch, seqlen, heads, head_dim)"),
        ((np.float32(1),) * 3, {}, fa_attn.InputError, "q has the shape ()"),
        ((q, q, q), dict(window_size=3), fa_attn.InputError, "window_size is 3"),
        ((q, q, q), dict(window_size=(1.5, 2)), fa_attn.InputError, "window_size is (1.5, 2)"),
        ((q.tolist(), q, q), {}, TypeError, "speaks DLPack"),
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


def test_masked_arrays_are_refused():
    q, k, v = arrays(12, (1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    for given in ((np.ma.masked_array(q, q > 0), k, v), (q, k, np.ma.masked_array(v, v > 0))):
        with pytest.raises(fa_attn.InputTypeError, match="masked"):
            fa_attn.flash_attn_func(*given)


def test_threads_compute_side_by_side():
    q, k, v = arrays(25, (1, 200, 4, 32), (1, 200, 4, 32), (1, 200, 4, 32))
    want = fa_attn.flash_attn_func(q, k, v)
    found = []
    work = lambda: found.append(np.array_equal(fa_attn.flash_attn_func(q, k, v), want))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_what_is_not_computed_raises_and_says_what_would_work():
    q, k, v = arrays(10, (1, 8, 4, 32), (1, 8, 2, 32), (1, 8, 2, 32))
    call = fa_attn.flash_attn_func

    def refused(error, part, function, *arguments, **options):
        with pytest.raises(error) as raised:
            function(*arguments, **options)
        assert part in str(raised.value), str(raised.value)

    unsupported, wrong = fa_attn.UnsupportedError, fa_attn.InputError
    refused(unsupported, "without dropout", call, q, k, v, dropout_p=0.1)
    refused(wrong, "num_splits is -1: it must be from 0 to 256", call, q, k, v, num_splits=-1)
    refused(wrong, "num_splits is 257: it must be from 0 to 256", call, q, k, v, num_splits=257)
    refused(wrong, "num_splits is 1.5: it must be a whole number", call, q, k, v, num_splits=1.5)
    refused(wrong, "pack_gqa is 2: it must be True or False", call, q, k, v, pack_gqa=2)
    refused(unsupported, "sm_margin = 8", call, q, k, v, sm_margin=8)
    refused(unsupported, "bfloat16", call, q, k, v, q_descale=np.ones(1))
    refused(unsupported, "window_size", call, q, k, v, attention_chunk=128)
    refused(unsupported, "head dim", call, q, k, v, qv=q)
    refused(unsupported, "float16 and bfloat16", call, *(x.astype(np.float64) for x in (q, k, v)))
    refused(wrong, "of one type", call, q, k.astype(np.float16), v)
    refused(wrong, "(4,)", call, q, k, v, sinks=np.zeros(3, np.float32))
    refused(wrong, "float32", call, q, k, v, sinks=np.zeros(4))
    refused(wrong, "differ in more", call, q, k, v[:, :5])
    refused(wrong, "not a multiple", call, q[:, :, :3], k, v)
    refused(wrong, "batch of 2", call, q, np.repeat(k, 2, 0), np.repeat(v, 2, 0))
    refused(wrong, "negative", call, q[:, ::-1], k, v)
    refused(wrong, "3, heads", fa_attn.flash_attn_qkvpacked_func, q)
    refused(
        wrong,
        "int32",
        fa_attn.flash_attn_varlen_func,
        q[0],
        k[0],
        v[0],
        np.array([0, 8]),
        np.array([0, 8]),
        8,
        8,
    )
    starts = np.array([0, 8], np.int32)
    refused(wrong, "upper bound", fa_attn.flash_attn_varlen_func, q[0], k[0], v[0], starts, starts, None, 8)
    cache = fa_attn.flash_attn_with_kvcache
    refused(wrong, "cache_leftpad has the shape", cache, q, k, v, cache_leftpad=starts)
    refused(wrong, "cache_seqlens is missing", cache, q, k, v, k=k, v=v)
    refused(wrong, "both or neither", cache, q, k, v, k=k, cache_seqlens=8)
    half = [x.astype(np.float16) for x in (q, k, v)]
    refused(wrong, "no place", cache, *half, k=half[1], v=half[2], cache_seqlens=np.array([5], np.int32))
    frozen = k.astype(np.float16)
    frozen.setflags(write=False)
    refused(wrong, "read-only", cache, half[0], frozen, half[2], k=half[1], v=half[2], cache_seqlens=0)
    refused(TypeError, "speaks DLPack", call, [1.0], k, v)
    refused(TypeError, "unexpected keyword", call, q, k, v, dropout=0.0)
    assert issubclass(unsupported, ValueError) and issubclass(fa_attn.DeviceError, RuntimeError)
    assert call(frozen[:, :, :, :].repeat(2, 2), frozen, frozen).shape == (1, 8, 4, 32), (
        "inputs may be read-only"
    )


def test_empty_problems_have_empty_or_zero_results():
    q, k = np.zeros((2, 3, 2, 16), np.float32), np.zeros((2, 0, 2, 16), np.float32)
    out, lse = fa_attn.flash_attn_func(q, k, k, return_softmax_lse=True)
    assert not out.any() and np.isneginf(lse).all()
    assert fa_attn.flash_attn_func(k, q, q).shape == (2, 0, 2, 16)
    assert fa_attn.flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 16)


def test_threads_compute_beside_each_other():
    q, k, v = arrays(11, (1, 256, 4, 64), (1, 256, 4, 64), (1, 256, 4, 64))
    want = fa_attn.flash_attn_func(q, k, v, causal=True)
    got = [None] * 4

    def compute(i):
        got[i] = fa_attn.flash_attn_func(q, k, v, causal=True)

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((out == want).all() for out in got)


Q = np.ones((1, 4, 2, 8), np.float32)
P, CU = Q[0], np.array([0, 4], np.int32)
SWAPPED = Q.astype(Q.dtype.newbyteorder())


def dense(**options):
    return lambda: fa_attn.flash_attn_func(Q, Q, Q, **options)


def in_rows(most, cu=CU):
    return lambda: fa_attn.flash_attn_varlen_func(P, P, P, cu, CU, most, 4)


def cached(*new, cache=Q, **options):
    caches = (cache.copy(), cache.copy())
    return lambda: fa_attn.flash_attn_with_kvcache(Q, *caches, *new, **options)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (dense(window_size=5), "window_size is 5"),
        (dense(window_size=np.ones((2, 2))), "window_size is array"),
        (dense(window_size="ab"), "window_size is 'ab'"),
        (dense(softmax_scale="x"), "softmax_scale is 'x'"),
        (dense(softmax_scale=10**400), "softmax_scale is 1000"),
        (dense(softmax_scale=np.ones(2)), "softmax_scale is array"),
        # FlashAttention-3's order of arguments.
        (lambda: fa_attn.flash_attn_func(Q, Q, Q, None, True), "softmax_scale is True"),
        (dense(min_seqlen_k="few"), "min_seqlen_k is 'few'"),
        (dense(softcap="a"), "softcap is 'a'"),
        (dense(softcap=float("nan")), "softcap is NaN"),
        (dense(causal="no"), "causal is 'no'"),
        (dense(causal=np.ones(2)), "causal is array"),
        (dense(deterministic="yes"), "deterministic is 'yes'"),
        (dense(return_softmax_lse="x"), "return_softmax_lse is 'x'"),
        (dense(dropout_p="a"), "dropout_p is 'a'"),
        (dense(sinks=[1, 2]), "sinks is list"),
        (dense(alibi_slopes=[1, 2]), "alibi_slopes is list"),
        (lambda: fa_attn.flash_attn_func(SWAPPED, Q, Q), "q (>f4) cannot be lent"),
        (lambda: fa_attn.flash_attn_func(Q, Q, SWAPPED), "v (>f4) cannot be lent"),
        (lambda: fa_attn.flash_attn_func(Q.astype(object), Q, Q), "q (object) cannot be lent"),
        (in_rows(-3), "max_seqlen_q is -3"),
        (in_rows(2.5), "max_seqlen_q is 2.5"),
        (in_rows(float("nan")), "max_seqlen_q is nan"),
        (in_rows(float("inf")), "max_seqlen_q is inf"),
        (in_rows("4"), "max_seqlen_q is '4'"),
        (in_rows(np.array([4, 4])), "max_seqlen_q is array"),
        (in_rows(4, [0, 4]), "cu_seqlens_q is list"),
        (in_rows(4, CU.astype(CU.dtype.newbyteorder())), "cu_seqlens_q (>i4) cannot be lent"),
        (cached(cache_seqlens=-1), "cache_seqlens is -1"),
        (cached(cache_seqlens=[3]), "cache_seqlens) is list"),
        (cached(cache_batch_idx=[0]), "cache_batch_idx is list"),
        (cached(cache_seqlens=4, block_table=[[0]]), "block_table) is list"),
        (cached([1], [1], cache_seqlens=0), "k is list"),
        (cached(cache=P), "k_cache has the shape (4, 2, 8)"),
        (
            cached(Q, Q, Q, Q, cache_seqlens=0, rotary_interleaved="no"),
            "rotary_interleaved is 'no'",
        ),
        (
            lambda: fa_attn.flash_attn_with_kvcache(Q, *(Q.copy(),) * 2, Q, Q, cache_seqlens=0),
            "k_cache and v_cache have elements in common",
        ),
        (
            lambda: fa_attn.flash_attn_with_kvcache(
                P, Q.copy(), Q.copy(), Q, Q, cache_seqlens=0, cu_seqlens_q=CU, max_seqlen_q=-1
            ),
            "max_seqlen_q is -1",
        ),
        (lambda: fa_attn.flash_attn_qkvpacked_func([1]), "qkv is list"),
        (lambda: fa_attn.flash_attn_kvpacked_func(Q, None), "kv is NoneType"),
        (lambda: fa_attn.merge([Q], [Q[..., 0].swapaxes(1, 2).copy()], dtype="foo"), "dtype is 'foo'"),
        (lambda: fa_attn.merge([[1]], [[1]]), "a part of outs is list"),
        # Another library's order of axes, with as many elements.
        (lambda: fa_attn.merge([Q], [Q[..., 0].copy()]), "a part of lses has the shape (1, 4, 2)"),
        (
            lambda: fa_attn.flash_attn_backward(Q, Q, Q, Q, Q, Q[..., 0].copy()),
            "softmax_lse has the shape (1, 4, 2): its elements must be (1, 2, 4)",
        ),
        (lambda: fa_attn.flash_attn_backward(None, Q, Q, Q, Q, Q), "dout is NoneType"),
        (lambda: fa_attn.problem(1, -5), "seqlen_q is -5"),
        (lambda: fa_attn.problem(1, 2**80), "seqlen_q is 120"),
        (lambda: fa_attn.problem(1, "5"), "seqlen_q is '5'"),
        (lambda: fa_attn.problem(1, 5, window_size=5), "window_size is 5"),
        (lambda: fa_attn.problem(1, 5, softmax_scale=float("nan")), "softmax_scale is nan"),
        (lambda: fa_attn.problem(1, 5, dtype="f64"), "dtype is 'f64'"),
        (lambda: fa_attn.plan({1: object()}), "is no problem"),
        (lambda: fa_attn.plan(fa_attn.problem(1, 5), arch=90), "arch is 90"),
        (lambda: fa_attn.plan(fa_attn.problem(1, 5), limit=-1), "limit is -1"),
        (lambda: fa_attn.plan(fa_attn.problem(1, 5), mode=[]), "mode is []"),
        (lambda: fa_attn.explain(fa_attn.problem(1, 5), 5), "query is 5"),
        (lambda: fa_attn.Kernels(fa_attn.problem(1, 5), "cuda:99999999999"), "device is 'cuda:99999999999'"),
    ],
)
def test_what_is_refused_is_named(call, named):
    with pytest.raises(fa_attn.InputError) as raised:
        call()
    assert named in str(raised.value), str(raised.value)


def test_numbers_of_numpy_and_arrays_without_a_name_beside_them_are_taken():
    want = fa_attn.flash_attn_func(Q, Q, Q, softmax_scale=0.5, causal=True, window_size=(1, 0))
    numpys = dict(softmax_scale=np.float32(0.5), causal=np.True_, window_size=np.array([1, 0]), softcap=None)
    assert np.array_equal(fa_attn.flash_attn_func(Q, Q, Q, **numpys), want)
    assert fa_attn.problem(np.int64(1), np.int32(5))["seqlen_q"] == 5
    with pytest.raises(fa_attn.UnsupportedError, match="^qv = array"):
        fa_attn.flash_attn_func(Q, Q, Q, qv=np.ones(100_000))


def test_arguments_of_the_fourth_generation_are_taken_at_their_defaults_or_raise_by_name():
    neutral = dict.fromkeys(
        "qv gather_kv_indices learnable_sink pack_gqa score_mod score_mod_bwd mask_mod aux_tensors "
        "aux_scalars block_sparse_tensors block_sparse_tensors_bwd scheduler_metadata seqlen_k_per_split "
        "min_seqlen_k num_heads_q q_descale k_descale v_descale".split()
    )
    want = fa_attn.flash_attn_func(Q, Q, Q, causal=True)
    others = dict(num_splits=1, disable_scheduler_metadata=True, window_size=(None, None), **neutral)
    assert np.array_equal(fa_attn.flash_attn_func(Q, Q, Q, causal=True, **others), want)
    used = np.array([4], np.int32)
    out = fa_attn.flash_attn_varlen_func(Q, Q, Q, seqused_k=used, causal=True, **others)
    assert np.array_equal(out, want)
    for name in sorted(set(neutral) - {"learnable_sink", "min_seqlen_k", "pack_gqa"}):
        with pytest.raises(fa_attn.UnsupportedError, match=f"^{name} = "):
            fa_attn.flash_attn_func(Q, Q, Q, **{name: 3})


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


def test_absurd_sizes_are_refused_and_not_allocated():
    """A broadcast array of any number of sequences takes the memory of one row."""
    q = np.zeros((1 << 43, 0, 1, 8), np.float32)
    k = np.broadcast_to(np.float32(1), (1 << 43, 3, 1, 8))
    with pytest.raises(fa_attn.InputError, match="8796093022208 sequences are listed in .* bytes"):
        fa_attn.flash_attn_func(q, k, k)
    assert fa_attn.flash_attn_func(q, q, q).shape == q.shape
    rows = np.zeros((1, 1, 1, 8), np.float32)
    wide = np.zeros((1, 0, 1, 1 << 20), np.float32)
    with pytest.raises(fa_attn.InputError, match="head_dim_v = 1048576: at most 65536"):
        fa_attn.flash_attn_func(rows, rows[:, :0], wide)
    with pytest.raises(fa_attn.InputError, match="cache_seqlens"):
        fa_attn.flash_attn_with_kvcache(rows, rows, rows, cache_seqlens=True)


def test_refusals_name_the_arguments():
    x = np.zeros((9, 2, 8), np.float32)
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731

    def refused(match, starts_q, starts_k, most=9, **others):
        with pytest.raises(fa_attn.InputError, match=match):
            fa_attn.flash_attn_varlen_func(x, x, x, starts_q, starts_k, most, most, **others)

    good = ints(0, 4, 9)
    refused(r"^cu_seqlens_q gives sequence 1 5 rows, max_seqlen is 4$", good, good, 4)
    refused(r"^cu_seqlens_k\[2\] = 12: it must be from 0 to 9$", good, good + 3)
    refused(r"^cu_seqlens_q\[0\] = 9 and cu_seqlens_q\[1\] = 4: ", good[::-1].copy(), good)
    used = ints(5, 1)
    refused(r"^seqused_k \(cache_seqlens\)\[0\] = 5: it must be from 0 to 4$", good, good, seqused_k=used)
    refused(r"^seqused_q\[1\] = -1: ", good, good, seqused_q=ints(1, -1))
