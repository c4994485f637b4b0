"""What is refused on numpy arrays, and what a refusal names."""

import importlib.util

import hostile
import numpy as np
import pytest
from reference import arrays

import fa_attn


def test_masked_arrays_are_refused():
    q, k, v = arrays(12, (1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    for given in ((np.ma.masked_array(q, q > 0), k, v), (q, k, np.ma.masked_array(v, v > 0))):
        with pytest.raises(fa_attn.InputTypeError, match="masked"):
            fa_attn.flash_attn_func(*given)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_functions_of_torch_say_what_they_are_without_it():
    for name in ("flex_attention", "scaled_dot_product_attention", "BlockMask"):
        with pytest.raises(ModuleNotFoundError, match=f"fa_attn.{name} takes torch's tensors") as raised:
            getattr(fa_attn, name)
        assert raised.value.name == "torch"


def test_what_is_not_computed_raises_and_says_what_would_work():
    q, k, v = arrays(10, (1, 8, 4, 32), (1, 8, 2, 32), (1, 8, 2, 32))
    call = fa_attn.flash_attn_func

    def refused(error, part, function, *arguments, **options):
        with pytest.raises(error) as raised:
            function(*arguments, **options)
        assert part in str(raised.value), str(raised.value)

    unsupported, wrong = fa_attn.UnsupportedError, fa_attn.InputError
    refused(wrong, "dropout_p without rng_state", call, q, k, v, dropout_p=0.1)
    refused(wrong, "dropout_p is 1.0: it is a probability", call, q, k, v, dropout_p=1.0, rng_state=(1, 2))
    refused(wrong, "rng_state without dropout_p", call, q, k, v, rng_state=(1, 2))
    refused(wrong, "rng_state is 7: it must be (seed, offset)", call, q, k, v, dropout_p=0.1, rng_state=7)
    refused(wrong, "the seed 18446744073709551616", call, q, k, v, dropout_p=0.1, rng_state=(2**64, 0))
    refused(wrong, "num_splits is -1: it must be from 0 to 256", call, q, k, v, num_splits=-1)
    refused(wrong, "num_splits is 257: it must be from 0 to 256", call, q, k, v, num_splits=257)
    refused(wrong, "num_splits is 1.5: it must be a whole number", call, q, k, v, num_splits=1.5)
    refused(wrong, "pack_gqa is 2: it must be True or False", call, q, k, v, pack_gqa=2)
    refused(unsupported, "sm_margin = 8", call, q, k, v, sm_margin=8)
    refused(wrong, "q_descale holds float64: it must be float32", call, q, k, v, q_descale=np.ones(1))
    refused(wrong, "attention_chunk", call, q, k, v, attention_chunk=-1)
    refused(unsupported, "float16 and bfloat16", call, *(x.astype(np.float64) for x in (q, k, v)))
    refused(wrong, "of one type", call, q, k.astype(np.float16), v)
    refused(wrong, "(4,)", call, q, k, v, sinks=np.zeros(3, np.float32))
    refused(wrong, "float32", call, q, k, v, sinks=np.zeros(4))
    refused(wrong, "differ in more", call, q, k, v[:, :5])
    refused(wrong, "not a multiple", call, q[:, :, :3], k, v)
    twice = np.repeat(k, 2, 0)
    refused(wrong, "k is of a batch of 2 and q of one of 1", call, q, twice, twice)
    step = dict(k=k[:, :1], v=v[:, :1], cache_seqlens=3)
    cache = k.copy()[:, ::-1]
    refused(wrong, "k_cache has the strides", fa_attn.flash_attn_with_kvcache, q, cache, v.copy(), **step)
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
    pages = k.repeat(3, 0)
    refused(wrong, "3 and q of one of 1: give cache_batch_idx, or block_table", cache, q, pages, pages)
    refused(wrong, "cache_seqlens is missing", cache, q, k, v, k=k, v=v)
    refused(wrong, "both or neither", cache, q, k, v, k=k, cache_seqlens=8)
    half = [x.astype(np.float16) for x in (q, k, v)]
    new = dict(k=half[1].copy(), v=half[2].copy())
    five = np.array([5], np.int32)
    refused(wrong, "no place: beyond the 8 rows that", cache, *half, **new, cache_seqlens=five)
    frozen = k.astype(np.float16)
    frozen.setflags(write=False)
    refused(wrong, "read-only", cache, half[0], frozen, half[2], **new, cache_seqlens=0)
    refused(TypeError, "speaks DLPack", call, [1.0], k, v)
    refused(TypeError, "unexpected keyword", call, q, k, v, dropout=0.0)
    assert issubclass(unsupported, ValueError) and issubclass(fa_attn.DeviceError, RuntimeError)
    assert call(frozen[:, :, :, :].repeat(2, 2), frozen, frozen).shape == (1, 8, 4, 32), (
        "inputs may be read-only"
    )


Q = np.ones((1, 4, 2, 8), np.float32)
P, CU = Q[0], np.array([0, 4], np.int32)
L = np.zeros((1, 2, 4), np.float32)
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
        (dense(query_offset="ab"), "query_offset is 'ab'"),
        (dense(query_offset=0.5), "query_offset is 0.5"),
        (dense(query_offset=1 << 30, alibi_slopes=np.ones(2, np.float32)), "query_offset = 1073741824 with"),
        (lambda: fa_attn.problem(1, 5, query_offset="x"), "query_offset is 'x'"),
        (dense(window_size="ab"), "window_size is 'ab'"),
        (dense(window_size={1: 2, 3: 4}), "window_size is {1: 2, 3: 4}"),
        (dense(softmax_scale=9e29), "for which it may be at most 6.93e29"),
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
        (dense(return_attn_probs="x"), "return_attn_probs is 'x'"),
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
        (lambda: fa_attn.merge(5, [Q]), "outs is int"),
        (lambda: fa_attn.merge([Q], 5.0), "lses is float"),
        (lambda: fa_attn.merge([Q], [L], sinks=np.zeros(3, np.float32)), "sinks has the shape (3,)"),
        (cached(np.float32(1), Q, cache_seqlens=0), "k has the shape ()"),
        (cached(Q, np.zeros((), np.float32), cache_seqlens=0), "v has the shape ()"),
        (
            cached(np.zeros(()), Q, cache_seqlens=0, rotary_cos=Q[0, :, 0], rotary_sin=Q[0, :, 0]),
            "k has the shape ()",
        ),
        (cached(Q, Q, cache_seqlens=0, rotary_cos=5, rotary_sin=Q), "rotary_cos is int"),
        (dense(sinks=np.float32), "sinks is the type float32"),
        (lambda: fa_attn.flash_attn_backward(np.float32(1), Q, Q, Q, Q, L), "dout has the shape ()"),
        (lambda: fa_attn.flash_attn_backward(Q, Q, np.float32(1), Q, Q, L), "k has the shape ()"),
        (lambda: fa_attn.flash_attn_backward(Q, Q, Q, Q, Q[:, :1], L), "out has the shape (1, 1, 2, 8)"),
        (lambda: fa_attn.problem(1, 5, heads="32"), "heads is '32': it must be a whole number, or two"),
        (lambda: fa_attn.problem(1, 5, heads="32:8", heads_kv=4), "heads is '32:8' and heads_kv 4"),
        (lambda: fa_attn.problem(1, 5, heads="32:x"), "heads is '32:x'"),
        (lambda: fa_attn.problem(1, "1x5", seqlen_q=5), "seqlen is '1x5' and seqlen_q 5"),
        (lambda: fa_attn.problem(1, 5, dtype=np.float64), "dtype is <class 'numpy.float64'>"),
        (lambda: fa_attn.problem(1, 5, dtype=None), "dtype is None"),
        (lambda: fa_attn.plan(None), "the problem is None: make one by fa_attn.problem"),
        (lambda: fa_attn.Kernels("x"), "the problem is 'x'"),
        (lambda: fa_attn.Kernels(fa_attn.problem(1, 5), backward="x"), "backward is 'x'"),
        (lambda: fa_attn.plan(fa_attn.problem(1, 5), arch="v100"), "unknown architecture 'v100'"),
        (lambda: fa_attn.problem(1, -5), "seqlen_q is -5"),
        (lambda: fa_attn.problem(1, 2**80), "seqlen_q is 120"),
        (lambda: fa_attn.problem(1, "5"), "seqlen is '5'"),
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
    with pytest.raises(fa_attn.InputError, match="^q_descale has the shape .100000"):
        fa_attn.flash_attn_func(Q, Q, Q, q_descale=np.ones(100_000, np.float32))


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
    for name in ("mask_mod", "score_mod"):
        with pytest.raises(fa_attn.InputError, match=f"{name} is a function, a text or a Program, not 3"):
            fa_attn.flash_attn_func(Q, Q, Q, **{name: 3})
    computed = {"block_sparse_tensors", "learnable_sink", "mask_mod", "min_seqlen_k", "pack_gqa", "qv", "score_mod"}
    descales = {"q_descale", "k_descale", "v_descale"}
    for name in sorted(descales):
        with pytest.raises(fa_attn.InputTypeError, match=f"^{name} is int: it must be an array"):
            fa_attn.flash_attn_func(Q, Q, Q, **{name: 3})
    computed |= descales
    for name in sorted(set(neutral) - computed):
        with pytest.raises(fa_attn.UnsupportedError, match=f"^{name} = "):
            fa_attn.flash_attn_func(Q, Q, Q, **{name: 3})


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


def test_rotary_tables_of_another_type_are_named():
    tables = [np.ones((8, 4), np.float16)] * 2
    wanted = "^the type of rotary_cos and rotary_sin is f16: must be f32$"
    with pytest.raises(fa_attn.InputError, match=wanted):
        cached(Q, Q, cache_seqlens=0, rotary_cos=tables[0], rotary_sin=tables[1])()


def test_arrays_from_the_last_row_to_the_first_are_taken():
    q, k, v, dout = arrays(40, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 5, 4, 8))

    def flipped(x):
        """The same array, in memory from the last to the first."""
        return np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1]

    want, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    room = np.full_like(want, 9)[:, ::-1]
    got = fa_attn.flash_attn_func(flipped(q), flipped(k), flipped(v), causal=True, out=room)
    assert got is room and np.array_equal(room, want)
    grads = fa_attn.flash_attn_backward(dout, q, k, v, want, lse, causal=True, dlse=lse)
    given = [flipped(x) for x in (dout, q, k, v, want)]
    for one, other in zip(
        fa_attn.flash_attn_backward(*given, flipped(lse), causal=True, dlse=flipped(lse)), grads
    ):
        assert np.array_equal(one, other)
    parts = [[want, flipped(want)], [lse, flipped(lse)]]
    for one, other in zip(fa_attn.merge(*parts), fa_attn.merge([want] * 2, [lse] * 2)):
        assert np.array_equal(one, other)
    used = np.array([2, 3], np.int32)
    caches, others = [k.copy(), v.copy()], [k.copy(), v.copy()]
    new = k[:, :2]
    step, given = fa_attn.flash_attn_with_kvcache, [flipped(x) for x in (q, new, new)]
    got = step(given[0], *caches, *given[1:], cache_seqlens=used[::-1])
    want = step(q, *others, new, new, cache_seqlens=used[::-1].copy())
    assert np.array_equal(got, want) and all(map(np.array_equal, caches, others))


def test_a_batch_of_nothing_is_taken():
    q, cache = np.zeros((0, 1, 4, 8), np.float32), np.zeros((0, 6, 2, 8), np.float32)
    none, table = np.zeros(0, np.int32), np.zeros((0, 3), np.int32)
    pages = np.zeros((5, 2, 2, 8), np.float32)
    new = np.zeros((0, 1, 2, 8), np.float32)
    step = fa_attn.flash_attn_with_kvcache
    for rows, options in (
        (cache, dict()),
        (cache, dict(cache_leftpad=none)),
        (cache, dict(cache_batch_idx=none)),
        (pages, dict(page_table=table)),
        (pages, dict(page_table=table, cache_leftpad=none)),
        (pages[:0], dict(page_table=table)),
        (pages[:0], dict(page_table=table[:, :0])),
        (pages[:0], dict(page_table=table, cache_leftpad=none)),
        (pages, dict(page_table=table, cache_leftpad=none, cache_batch_idx=none)),
    ):
        assert step(q, rows, rows, cache_seqlens=none, **options).shape == q.shape
        assert step(q, rows, rows.copy(), new, new, cache_seqlens=none, **options).shape == q.shape


@pytest.mark.parametrize("name", sorted(hostile.calls(np.asarray)))
def test_wrong_arguments_raise_errors_of_this_package(name):
    hostile.attack(name, np.asarray)
