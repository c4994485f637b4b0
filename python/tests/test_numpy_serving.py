"""Caches, merged parts and plans of work on numpy arrays, against the definition in f64."""

import numpy as np
import pytest
import reference
from reference import arrays, close

import fa_attn


def paged(k, lengths, page, seed):
    """The rows of `k` (batch, room, heads, dim) in pages, in an order of their own; the table."""
    batch, room, *rest = k.shape
    columns = -(-room // page)
    order = np.random.default_rng(seed).permutation(batch * columns).astype(np.int32)
    table = order.reshape(batch, columns)
    pages = np.full((batch * columns, page, *rest), np.nan, k.dtype)
    for b in range(batch):
        for row in range(lengths[b]):
            pages[table[b, row // page], row % page] = k[b, row]
    return pages, table


@pytest.mark.parametrize("page", [1, 3, 16])
def test_caches_in_pages(page):
    q, k, v = arrays(6, (3, 2, 4, 32), (3, 40, 2, 32), (3, 40, 2, 32), dtype=np.float16)
    lengths = np.array([40, 1, 23], np.int32)
    k_pages, table = paged(k, lengths, page, 0)
    v_pages, _ = paged(v, lengths, page, 0)
    out, lse = fa_attn.flash_attn_with_kvcache(
        q, k_pages, v_pages, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
    )
    cu_k = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cu_q = np.arange(0, 7, 2, dtype=np.int32)
    same = fa_attn.flash_attn_varlen_func(
        q.reshape(6, 4, 32), k_pages, v_pages, cu_q, cu_k, 2, 40, causal=True, block_table=table
    )
    # A table of more rows than sequences.
    rows = np.array([2, 0, 1], np.int32)
    taller = np.zeros((4, table.shape[1]), np.int32)
    taller[rows] = table
    chosen = fa_attn.flash_attn_with_kvcache(
        q, k_pages, v_pages, cache_seqlens=lengths, cache_batch_idx=rows, page_table=taller, causal=True
    )
    assert (chosen == out).all()
    for b, n in enumerate(lengths):
        want, want_lse, _ = reference.attention(q[b], k[b, :n], v[b, :n], causal=True)
        close(out[b], want, np.float16)
        close(lse[b], want_lse, np.float16)
        close(same[2 * b : 2 * b + 2], want, np.float16)


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_are_appended_and_turned(page, interleaved, causal):
    q, k, v, cache_k, cache_v = arrays(
        7, (2, 3, 4, 32), (2, 3, 2, 32), (2, 3, 2, 32), (2, 30, 2, 32), (2, 30, 2, 32), dtype=np.float16
    )
    angles = np.random.default_rng(8).uniform(0, 6.28, (30, 8))
    cos, sin = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
    # Tables lie as they like, as halves of a wider one.
    cos, sin = np.repeat(cos, 2, 1)[:, ::2], np.concatenate([sin, sin], 1)[:, :8]
    lengths = np.array([20, 5], np.int32)
    given_k, given_v, table = cache_k.copy(), cache_v.copy(), None
    if page:
        given_k, table = paged(cache_k, lengths, page, 1)
        given_v, _ = paged(cache_v, lengths, page, 1)
    before = q.copy()
    out = fa_attn.flash_attn_with_kvcache(
        q,
        given_k,
        given_v,
        k,
        v,
        cos,
        sin,
        lengths,
        block_table=table,
        causal=causal,
        rotary_interleaved=interleaved,
    )
    assert (q == before).all() and lengths.tolist() == [20, 5]
    for b, n in enumerate(lengths):
        positions = np.arange(n, n + 3)
        new_k = reference.rotated(k[b], cos, sin, positions, interleaved)
        turned = reference.rotated(q[b], cos, sin, positions if causal else np.full(3, n), interleaved)
        keys = np.concatenate([cache_k[b, :n], new_k])
        values = np.concatenate([cache_v[b, :n], v[b]])
        close(out[b], reference.attention(turned, keys, values, causal=causal)[0], np.float16, factor=2)
        rows = [given_k[b, p] if page is None else given_k[table[b, p // page], p % page] for p in positions]
        close(np.stack(rows), new_k, np.float16)


def test_a_row_of_the_cache_for_each_sequence():
    q, k, v = arrays(9, (2, 1, 4, 32), (5, 30, 2, 32), (5, 30, 2, 32))
    rows, lengths = np.array([4, 1], np.int32), np.array([30, 11], np.int32)
    out = fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_batch_idx=rows)
    whole = fa_attn.flash_attn_with_kvcache(q, k, v, cache_batch_idx=rows)
    eleven = fa_attn.flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=11)
    for b in range(2):
        row, n = rows[b], lengths[b]
        close(out[b], reference.attention(q[b], k[row, :n], v[row, :n])[0])
        close(whole[b], reference.attention(q[b], k[row], v[row])[0])
        close(eleven[b], reference.attention(q[b], k[b, :11], v[b, :11])[0])


def test_rows_that_the_cache_lacks_are_named_as_the_caller_named_them():
    q, k, v = arrays(9, (2, 1, 4, 32), (5, 30, 2, 32), (5, 30, 2, 32))
    pages = [x.reshape(10, 15, 2, 32) for x in (k, v)]
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731
    for index, cache, options, said in (
        (ints(4, 5), (k, v), {}, "cache_batch_idx[1] is 5: the cache has 5 rows, so it must be from 0 to 4"),
        (ints(-1, 0), (k, v), {}, "cache_batch_idx[0] is -1: the cache has 5 rows"),
        (ints(2, 3), pages, dict(page_table=table), "cache_batch_idx[1] is 3: the page table has 3 rows"),
        (ints(-1, 2), pages, dict(page_table=table), "cache_batch_idx[0] is -1: the page table has 3 rows"),
        (ints(0, 1, 2), (k, v), {}, "cache_batch_idx has the shape (3,): it must be (2,)"),
    ):
        with pytest.raises(fa_attn.InputError) as error:
            fa_attn.flash_attn_with_kvcache(q, *cache, cache_batch_idx=index, **options)
        assert said in str(error.value)


def test_a_cache_with_padding_before_its_keys():
    q, k, v = arrays(20, (3, 2, 4, 32), (3, 20, 2, 32), (3, 20, 2, 32))
    used, left = np.array([20, 7, 12], np.int32), np.array([3, 0, 12], np.int32)
    for index in (None, np.array([2, 0, 2], np.int32)):
        out = fa_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, cache_leftpad=left, cache_batch_idx=index, causal=True
        )
        for b in range(3):
            row = b if index is None else index[b]
            keys, values = (x[row, left[b] : used[b]] for x in (k, v))
            want, _, _ = reference.attention(q[b], keys, values, causal=True)
            assert np.abs(out[b] - want).max() < 2e-6
    # The last row of the cache before must not be read.
    for wrong, said in (([3, -1, 2], "cache_leftpad[1] is -1"), ([-2, 0, 0], "cache_leftpad[0] is -2")):
        with pytest.raises(fa_attn.InputError) as error:
            left = np.array(wrong, np.int32)
            fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=left)
        assert said in str(error.value)
    with pytest.raises(fa_attn.InputError, match="give cache_batch_idx"):
        fa_attn.flash_attn_with_kvcache(q[:2], k, v, cache_seqlens=used[:2], cache_leftpad=used[:2])
    for dtype in (np.int64, np.float32):
        with pytest.raises(fa_attn.InputError, match="^cache_leftpad holds .*: it must be int32"):
            fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=used.astype(dtype))


def test_parts_of_the_keys_are_merged():
    q, k, v = arrays(21, (2, 9, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32))
    sinks = np.array([0.5, -1.0, 3.0, -np.inf], np.float32)
    call = fa_attn.flash_attn_func
    parts = [call(q, k[:, i : i + 2], v[:, i : i + 2], return_lse=True) for i in range(0, 40, 2)]
    want, want_lse = call(q, k, v, sinks=sinks, return_lse=True)
    out, lse = fa_attn.merge(*zip(*parts), sinks)
    assert np.abs(out - want).max() < 1e-6 and np.abs(lse - want_lse).max() < 2e-6
    half, _ = fa_attn.merge(*zip(*parts), sinks, dtype=np.float16)
    assert half.dtype == np.float16 and np.abs(half - want).max() < 2e-3
    # FlashAttention-2 and FlashMLA write +inf for a row that sees no key.
    for unread in (-np.inf, np.inf):
        nothing = (np.full_like(want, np.nan), np.full_like(want_lse, unread))
        out, lse = fa_attn.merge(*zip(nothing, nothing))
        assert (out == 0).all() and (lse == -np.inf).all()
        out, lse = fa_attn.merge(*zip(nothing, (want, want_lse), nothing))
        assert (out == want).all() and (lse == want_lse).all()
    with pytest.raises(fa_attn.InputError, match="one type"):
        fa_attn.merge([want, want.astype(np.float16)], [want_lse, want_lse])
    with pytest.raises(fa_attn.InputError, match="float32"):
        fa_attn.merge([want], [want_lse.astype(np.float64)])


def test_parts_are_combined_by_flash_attentions_name():
    q, k, v = arrays(22, (2, 9, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32))
    call = fa_attn.flash_attn_func
    parts = [call(q, k[:, i : i + 8], v[:, i : i + 8], return_lse=True) for i in range(0, 40, 8)]
    outs, lses = np.stack([out for out, _ in parts]), np.stack([lse.swapaxes(1, 2) for _, lse in parts])
    want, want_lse = call(q, k, v, return_lse=True)
    out, lse = fa_attn.flash_attn_combine(outs, lses)
    assert np.abs(out - want).max() < 1e-6 and np.abs(lse.swapaxes(1, 2) - want_lse).max() < 2e-6
    room = np.empty_like(out, dtype=np.float16)
    half, nothing = fa_attn.flash_attn_combine(outs, lses, room, return_lse=False)
    assert half is room and nothing is None and np.abs(room - want).max() < 2e-3
    flat, _ = fa_attn.flash_attn_combine(outs.reshape(5, 18, 4, 32), lses.reshape(5, 18, 4))
    assert (flat.reshape(out.shape) == out).all()
    for arguments, part in (
        ((outs[0, 0], lses), "out_partial has the shape"),
        ((outs[:0], lses[:0]), "at least one part"),
        ((outs, lses[:1]), "lse_partial has the shape"),
        ((outs, lses, room[:1]), "out has the shape"),
        ((outs, lses, room, np.float32), "out_dtype is"),
        ((outs, lses, None, "foo"), "dtype is 'foo'"),
        (([1], lses), "out_partial is list"),
    ):
        with pytest.raises(fa_attn.InputError, match=part):
            fa_attn.flash_attn_combine(*arguments)


def test_the_work_of_a_step_is_described_once():
    q, k, v = arrays(23, (2, 3, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32))
    lengths = np.array([40, 11], np.int32)
    options = dict(cache_seqlens=lengths, causal=True, window_size=(20, -1))
    metadata = fa_attn.get_scheduler_metadata(2, 3, 40, 4, 2, 32, lengths, causal=True, window_size=(20, -1))
    want = fa_attn.flash_attn_with_kvcache(q, k, v, **options)
    got = fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata, **options)
    assert (got == want).all() and metadata.plans == {}
    with pytest.raises(fa_attn.InputError, match="scheduler_metadata is of max_seqlen_q = 3, the call has 2"):
        fa_attn.flash_attn_with_kvcache(q[:, :2], k, v, scheduler_metadata=metadata, **options)
    with pytest.raises(fa_attn.InputTypeError, match="scheduler_metadata is ndarray"):
        fa_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=lengths, **options)
    with pytest.raises(fa_attn.UnsupportedError, match="for flash_attn_with_kvcache"):
        fa_attn.flash_attn_func(q, k, v, scheduler_metadata=metadata)
    for change, part in (
        (dict(cache_seqlens=4), "cache_seqlens is int"),
        (dict(cache_seqlens=lengths[:1]), "cache_seqlens has the shape"),
        (dict(page_size=0), "page_size is 0"),
        (dict(headdim="x"), "headdim is 'x'"),
    ):
        arguments = dict(zip(("batch_size", "max_seqlen_q", "max_seqlen_k"), (2, 3, 40)))
        arguments.update(num_heads_q=4, num_heads_kv=2, headdim=32, cache_seqlens=lengths)
        with pytest.raises(fa_attn.InputError, match=part):
            fa_attn.get_scheduler_metadata(**{**arguments, **change})


def test_results_are_written_where_the_caller_wants_them():
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 7, 4, 32), np.float32), rng.standard_normal((2, 9, 2, 32), np.float32)
    want = fa_attn.flash_attn_func(q, k, k, causal=True)
    for out in (np.empty_like(q), np.empty((2, 7, 8, 32), np.float32)[:, :, ::2]):
        assert fa_attn.flash_attn_func(q, k, k, causal=True, out=out) is out
        np.testing.assert_array_equal(out, want)
    fixed = np.empty_like(q)
    fixed.flags.writeable = False
    refused = [(np.empty_like(k), "out has the shape"), (q.astype(np.float16), "out holds float16")]
    for out, named in [*refused, (fixed, "out"), ([0.0], "out is list")]:
        with pytest.raises(ValueError, match=named):
            fa_attn.flash_attn_func(q, k, k, out=out)


def test_pages_are_columns_of_a_longer_table():
    pages = np.random.default_rng(6).standard_normal((8, 4, 2, 32), np.float32)
    q, used = pages[:2, :1], np.array([7, 3], np.int32)
    longer = np.array([[3, 1, -1], [2, 5, -1]], np.int32)
    have = fa_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=used, block_table=longer[:, :2])
    table = np.ascontiguousarray(longer[:, :2])
    want = fa_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=used, block_table=table)
    np.testing.assert_array_equal(have, want)


def test_caches_that_share_memory():
    """Rows that lie between each other's are two caches; an element of both would hold one of two values."""
    q, new = arrays(5, (1, 1, 2, 8), (2, 1, 1, 2, 8))
    both = np.zeros((1, 16, 2, 2, 8), np.float32)
    append = lambda k, v: fa_attn.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=3)  # noqa: E731
    append(both[:, :, 0], both[:, :, 1])
    assert (both[0, 3] == new[:, 0, 0]).all() and not both[0, 4:].any()
    wide = np.zeros((1, 16, 32 + 8), np.float32)
    append(wide[..., :16].reshape(1, 16, 2, 8), wide[..., 24:].reshape(1, 16, 2, 8))
    flat = np.zeros(600, np.float32)
    cache = lambda begin: flat[begin : begin + 256].reshape(1, 16, 2, 8)  # noqa: E731
    append(cache(0), cache(256))
    append(cache(300), cache(0))
    blocks, used = np.zeros((5, 16, 2, 8), np.float32), np.array([20], np.int32)

    def append_to_pages(*pages):
        table = np.array([pages], np.int32)
        return fa_attn.flash_attn_with_kvcache(
            q, blocks[:4], blocks[1:], *new, cache_seqlens=used, block_table=table
        )

    append_to_pages(2, 0)
    assert (blocks[[0, 1], 4] == new[:, 0, 0]).all() and np.count_nonzero(blocks) == new.size
    with pytest.raises(fa_attn.InputError, match="k_cache and v_cache have elements in common"):
        append_to_pages(2, 1)
    turned = np.zeros((16, 16, 2, 8), np.float32)
    for k, v in (
        (cache(0), cache(0)),
        (cache(0), cache(16)),
        (cache(255), cache(0)),
        (cache(0), cache(3)),
        (both[:, :, 0], both[:, :, 0]),
        (both[:, :, 0], both[:, ::-1][:, ::-1][:, :, 0]),
        (turned[:1], turned[:, :1].swapaxes(0, 1)),
    ):
        with pytest.raises(fa_attn.InputError, match="k_cache and v_cache have elements in common"):
            append(k, v)


def test_what_is_appended_lies_in_no_cache():
    """Rows of a cache that are written while they are read."""
    q, _ = arrays(6, (1, 1, 2, 8), (1,))
    both = np.zeros((2, 1, 16, 2, 8), np.float32)
    k, v = both
    new = np.ones((1, 1, 2, 8), np.float32)
    angles = np.ones((2, 16, 4), np.float32)

    def refused(name, cache, queries=q, k_new=new, v_new=new, cos=None, sin=None):
        said = f"^{name} lies in the memory of {cache}, .*: give a copy$"
        with pytest.raises(fa_attn.InputError, match=said):
            fa_attn.flash_attn_with_kvcache(queries, k, v, k_new, v_new, cos, sin, cache_seqlens=3)
        assert not both.any()

    refused("k", "k_cache", k_new=k[:, 3:4])
    refused("k", "v_cache", k_new=v[:, 5:6])
    refused("v", "k_cache", v_new=k[:, :1])
    refused("v", "v_cache", v_new=v[:, ::2][:, :1])
    refused("q", "v_cache", queries=v[:, 8:9], cos=angles[0], sin=angles[1])
    refused("rotary_sin", "k_cache", cos=angles[0], sin=k.reshape(-1)[:64].reshape(16, 4))
    # Without rotary embedding queries are read after the append, and copies may be given.
    fa_attn.flash_attn_with_kvcache(v[:, 8:9], k, v, k[:, :1].copy(), new, cache_seqlens=3)
    assert (v[0, 3] == 1).all() and not k.any()


def test_results_may_lie_between_the_inputs_rows_but_not_in_sinks():
    (buffer,) = arrays(33, (2, 5, 2, 4, 16))
    (k,) = arrays(34, (2, 5, 4, 16))
    want = fa_attn.flash_attn_func(buffer[:, :, 0].copy(), k, k)
    fa_attn.flash_attn_func(buffer[:, :, 0], k, k, out=buffer[:, :, 1])
    assert np.array_equal(buffer[:, :, 1], want)
    out = np.zeros((2, 5, 4, 16), np.float32)
    with pytest.raises(fa_attn.InputError, match="out lies in the memory of sinks"):
        fa_attn.flash_attn_func(k, k, k, sinks=out.reshape(-1)[:4], out=out)


def test_parts_are_merged_with_sinks_of_any_stride():
    q, k, v = arrays(35, (1, 3, 4, 8), (1, 6, 4, 8), (1, 6, 4, 8))
    parts = [fa_attn.flash_attn_func(q, k[:, s], v[:, s], return_lse=True) for s in (slice(3), slice(3, 6))]
    sinks = np.arange(8, dtype=np.float32)
    merged = [fa_attn.merge(*zip(*parts), own) for own in (sinks[::2], sinks[::2].copy())]
    assert np.array_equal(merged[0][0], merged[1][0])
    with pytest.raises(fa_attn.InputTypeError, match="must be a sequence of arrays"):
        fa_attn.merge(None, None)
