"""FlashMLA's functions and FlashAttention-3's `qv` against the definition in f64."""

import numpy as np
import pytest
import reference
from reference import arrays, close

import fa_attn
from fa_attn import flash_mla
from fa_attn._faces import face_of

COLUMNS, LATENT = 576, 512
SCALE = 192**-0.5


def rows_of(cache, table, length, page):
    """The rows of a sequence, (length, columns)."""
    rows = [cache[table[i // page], i % page, 0] for i in range(length)]
    return np.stack(rows) if rows else cache[0, :0, 0]


def step(seed, batch, seqlen_q, heads, page, lengths, dtype=np.float16, columns=COLUMNS):
    """Queries, a cache that is NaN where no sequence has a row, and a table that ends in garbage."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // page) for length in lengths]
    pages = sum(needed) + 2
    cache = np.full((pages, page, 1, columns), np.nan, dtype)
    table = np.full((batch, max([*needed, 1]) + 2), 2147480000, np.int32)
    free = list(rng.permutation(pages))
    for b, length in enumerate(lengths):
        for i in range(needed[b]):
            table[b, i] = free.pop()
            count = min(page, length - i * page)
            cache[table[b, i], :count, 0] = rng.standard_normal((count, columns)).astype(dtype)
    q = rng.standard_normal((batch, seqlen_q, heads, columns)).astype(dtype)
    return q, cache, table, np.array(lengths, np.int32)


def check(q, cache, table, lengths, out, lse, causal, columns_v, dtype, scale=SCALE):
    for b, length in enumerate(lengths):
        keys = rows_of(cache, table[b], length, cache.shape[1])[:, None]
        want, want_lse, _ = reference.attention(q[b], keys, keys[..., :columns_v], causal=causal, scale=scale)
        close(out[b], want, dtype)
        assert (np.isposinf(lse[b]) == np.isneginf(want_lse)).all()
        close(np.where(np.isposinf(lse[b]), -np.inf, lse[b]), want_lse, np.float32, 20)


CASES = [
    (1, 1, 64), (3, 4, 61), (9, 2, 69), (16, 1, 64), (63, 2, 2), (64, 4, 64), (126, 1, 61), (128, 2, 64)
]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, seqlen_q, page", CASES)
def test_tokens_on_their_pages(heads, seqlen_q, page, causal):
    lengths = [0, 1, page, 3, 2 * page + 37, 130]
    q, cache, table, used = step(heads, 6, seqlen_q, heads, page, lengths)
    meta, no_splits = flash_mla.get_mla_metadata(used, heads * seqlen_q, 1)
    call = (cache, table, used, LATENT, meta, no_splits, SCALE, causal)
    out, lse = flash_mla.flash_mla_with_kvcache(q, *call)
    assert out.shape == (6, seqlen_q, heads, LATENT) and out.dtype == q.dtype
    assert lse.shape == (6, heads, seqlen_q) and lse.dtype == np.float32
    check(q, cache, table, lengths, out, lse, causal, LATENT, np.float16)
    assert (out[0] == 0).all() and np.isposinf(lse[0]).all()
    # Again by the same metadata, and by that of another shape.
    again = flash_mla.flash_mla_with_kvcache(q, *call)
    assert (again[0] == out).all() and (again[1] == lse).all()
    with pytest.raises(fa_attn.InputError, match="tile_scheduler_metadata is of calls with batch = 6"):
        flash_mla.flash_mla_with_kvcache(q[:1], cache, table[:1], used[:1], *call[3:])


@pytest.mark.parametrize(
    "columns, latent, page", [(512, 512, 16), (512, 512, 1), (320, 256, 16), (40, 16, 16), (17, 9, 16)]
)
def test_rows_of_other_columns(columns, latent, page):
    q, cache, table, used = step(2, 3, 2, 5, page, [33, 0, 7], np.float32, columns)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, latent, causal=True)
    check(q, cache, table, used, out, lse, True, latent, np.float32, columns**-0.5)


def test_a_step_of_many_splits():
    q, cache, table, used = step(5, 2, 1, 16, 64, [3000, 700])
    meta = flash_mla.get_mla_metadata()[0]
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, LATENT, meta, softmax_scale=SCALE)
    check(q, cache, table, used, out, lse, False, LATENT, np.float16)


def chosen(rng, batch, seqlen_q, topk, there):
    """For each token rows of those that are `there`, with entries that name none among them."""
    indices = rng.choice(there, (batch, seqlen_q, topk)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.3] = -1
    indices[rng.random(indices.shape) < 0.1] = 2147480000
    indices[0, 0] = -1
    return indices


def seen(indices, rows, length=None):
    own = indices if length is None else indices[:length]
    return own[(own >= 0) & (own < rows)]


@pytest.mark.parametrize("with_lengths", [False, True])
def test_tokens_on_rows_of_their_choice(with_lengths):
    rng = np.random.default_rng(3)
    q, cache, table, used = step(8, 2, 3, 16, 64, [130, 64])
    flat = cache.reshape(-1, COLUMNS)
    there = np.flatnonzero(np.isfinite(flat[:, 0]))
    indices = chosen(rng, 2, 3, 40, there)
    lengths = np.array([40, 11], np.int32) if with_lengths else None
    sinks = np.array([*rng.standard_normal(14), np.inf, -np.inf], np.float32)
    meta = flash_mla.get_mla_metadata()[0]
    call = dict(softmax_scale=SCALE, indices=indices, topk_length=lengths)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, LATENT, meta, **call)
    sunk, same = flash_mla.flash_mla_with_kvcache(q, cache, None, None, LATENT, meta, attn_sink=sinks, **call)
    assert (lse == same).all()
    for b in range(2):
        for i in range(3):
            rows = seen(indices[b, i], len(flat), None if lengths is None else lengths[b])
            keys = flat[rows][:, None]
            of_row = (q[b, i : i + 1], keys, keys[..., :LATENT])
            want, want_lse, _ = reference.attention(*of_row, scale=SCALE)
            close(out[b, i], want[0], np.float16)
            assert np.isposinf(lse[b, :, i]).all() == (len(rows) == 0)
            if len(rows):
                close(lse[b, :, i], want_lse[:, 0], np.float32, 20)
            share = 1 / (1 + np.exp(sinks.astype(np.float64) - want_lse[:, 0])) if len(rows) else np.zeros(16)
            close(sunk[b, i], want[0] * share[:, None], np.float16)
    # A second cache joins: both together are one.
    more = chosen(rng, 2, 3, 7, there)
    both, both_lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, LATENT, softmax_scale=SCALE, indices=indices, extra_k_cache=cache,
        extra_indices_in_kvcache=more,
    )  # fmt: skip
    one, one_lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, LATENT, softmax_scale=SCALE, indices=np.concatenate([indices, more], -1)
    )
    close(both, one, np.float16)
    close(both_lse, one_lse, np.float32, 20)


def packed(rows, width):
    """(a cache of bytes of the rows (pages, page, columns), what they stand for, a descale)."""
    pages, page, columns = rows.shape
    codes, group = {656: (512, 128), 584: (448, 64), 576: (576, 576)}[width]
    groups = rows[..., :codes].reshape(pages, page, -1, group)
    scales = np.exp2(np.ceil(np.log2(np.maximum(np.abs(groups).max(-1) / 448, 1e-4)))).astype(np.float32)
    if width == 576:
        scales = np.full_like(scales, scales.max() * 0.75)
    if width == 656:
        # No powers of two.
        scales = scales * np.float32(1.3)
    values = (groups / scales[..., None]).astype(np.float32)
    made, _ = fa_attn.quantize_kv(values.reshape(-1, 1, group), "e4m3", descale=np.ones(1, np.float32))
    exact = fa_attn.dequantize_kv(made, None).reshape(groups.shape).astype(np.float64) * scales[..., None]
    made = np.asarray(made).view(np.uint8).reshape(pages, page, codes)
    turned = (rows[..., codes:].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    exact_turned = (turned.astype(np.uint32) << 16).view(np.float32)
    exact = np.concatenate([exact.reshape(pages, page, codes), exact_turned], -1)
    turned = np.ascontiguousarray(turned).view(np.uint8)
    if width == 656:
        # Pages with a row behind them that is nobody's.
        cache = np.full((pages, page + 1, 1, width), 255, np.uint8)[:, :page]
        cache[:, :, 0] = np.concatenate([made, scales.view(np.uint8), turned], -1)
        return cache, exact, None
    if width == 576:
        return made[:, :, None], exact, scales.reshape(-1)[:1].copy()
    exponents = np.full((pages, page, 8), 255, np.uint8)
    exponents[..., :7] = np.log2(scales) + 127
    parts = [np.concatenate([made, turned], -1), exponents]
    # Pages of whole multiples of 576 bytes.
    room = np.full((pages, -(-page * width // 576) * 576), 255, np.uint8)
    room[:, : page * width] = np.concatenate([part.reshape(pages, -1) for part in parts], -1)
    between = room.strides[0]
    return np.lib.stride_tricks.as_strided(room, (pages, page, 1, width), (between, width, width, 1)), exact, None


@pytest.mark.parametrize("room", [1 << 14, 1 << 28])
@pytest.mark.parametrize("width", [656, 584, 576])
def test_rows_of_codes(width, room, monkeypatch):
    monkeypatch.setattr(flash_mla, "ROOM", room)
    rng = np.random.default_rng(width)
    columns, pages, page, lengths = 512 if width == 584 else 576, 9, 7, [20, 0, 37]
    rows = rng.standard_normal((pages, page, columns)) * rng.random((pages, page, 1))
    cache, exact, descale = packed(rows, width)
    table = np.full((3, 6), 2147480000, np.int32)
    table[0, :3], table[2, :6] = [4, 0, 7], [8, 1, 2, 3, 5, 6]
    q = rng.standard_normal((3, 2, 5, columns)).astype(np.float32)
    used = np.array(lengths, np.int32)
    call = dict(softmax_scale=0.05, is_fp8_kvcache=True, descale_k=descale)
    numbers = exact.astype(np.float32)[:, :, None]
    for causal in (False, True):
        out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 512, causal=causal, **call)
        check(q, numbers, table, lengths, out, lse, causal, 512, np.float32, 0.05)
    indices = chosen(rng, 3, 2, 11, np.arange(pages * page))
    topk = np.array([11, 4, 9], np.int32)
    named = dict(indices=indices, topk_length=topk)
    got = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, **named, **call)
    want = flash_mla.flash_mla_with_kvcache(q, numbers, None, None, 512, softmax_scale=0.05, **named)
    for one, other in zip(got, want):
        assert (np.isinf(one) == np.isinf(other)).all()
        close(np.nan_to_num(one, posinf=0), np.nan_to_num(other, posinf=0))
    if width != 576:
        return
    # Queries of codes.
    codes, _ = fa_attn.quantize_kv(q, "e4m3", descale=np.ones(1, np.float32))
    half = dict(call, descale_q=np.array([0.5], np.float32))
    out, lse = flash_mla.flash_mla_with_kvcache(codes, cache, table, used, 512, **half)
    exact_q = np.float32(0.5) * fa_attn.dequantize_kv(codes, None)
    assert out.dtype == np.float32
    check(exact_q, numbers, table, lengths, out, lse, False, 512, np.float32, 0.05)


@pytest.mark.parametrize("width", [None, 656, 584, 576])
def test_packed_tokens_and_their_rows(width, monkeypatch):
    """Prefill by chunks: sequences of different numbers of tokens, and rows multiplied out."""
    rng = np.random.default_rng(7)
    columns, pages, page, lengths, counts = 512 if width == 584 else 576, 9, 7, [20, 0, 37], [5, 2, 9]
    rows = rng.standard_normal((pages, page, columns)) * rng.random((pages, page, 1))
    cache, exact, descale = (rows.astype(np.float32)[:, :, None], rows, None)
    fp8 = {}
    if width is not None:
        cache, exact, descale = packed(rows, width)
        fp8 = dict(is_fp8_kvcache=True, descale_k=descale)
    numbers = exact.astype(np.float32)[:, :, None]
    table = np.full((3, 6), 2147480000, np.int32)
    table[0, :3], table[2, :6] = [4, 0, 7], [8, 1, 2, 3, 5, 6]
    used, starts = np.array(lengths, np.int32), np.array([0, 5, 7, 16], np.int32)
    q = rng.standard_normal((16, 5, columns)).astype(np.float32)
    sinks = rng.standard_normal(5).astype(np.float32)
    named = dict(softmax_scale=0.05, cu_seqlens_q=starts, max_seqlen_q=9)
    for room in (1 << 14, 1 << 28):
        monkeypatch.setattr(flash_mla, "ROOM", room)
        call = (q, cache, table, used, 512)
        out, lse = flash_mla.flash_mla_with_kvcache(*call, causal=True, **named, **fp8)
        sunk, same = flash_mla.flash_mla_with_kvcache(*call, causal=True, attn_sink=sinks, **named, **fp8)
        assert out.shape == (16, 5, 512) and lse.shape == (5, 16) and (same == lse).all()
        for b, (first, count) in enumerate(zip(starts, counts)):
            own = slice(first, first + count)
            check(
                q[None, own], numbers, table[b : b + 1], used[b : b + 1], out[None, own], lse[None, :, own],
                True, 512, np.float32, 0.05,
            )  # fmt: skip
            share = 1 / (1 + np.exp(sinks[:, None].astype(np.float64) - lse[:, own]))
            close(sunk[own], out[own] * np.where(np.isposinf(lse[:, own]), 0, share).T[..., None])
    first, ends = np.array([3, 0, 30], np.int32), np.array([0, 17, 17, 24], np.int32)
    dtype = np.float32 if width else None
    made = flash_mla.gather_rows(cache, table, ends, 26, dtype, seq_starts=first, **fp8)
    want = [rows_of(numbers, table[b], lengths[b], page)[first[b] :] for b in (0, 2)]
    assert made.shape == (26, 1, columns) and made.dtype == np.float32
    assert (made[:24, 0] == np.concatenate(want)).all() and (made[24:] == 0).all()


def test_all_codes_and_scales_of_packed_rows():
    """NaN stays NaN, powers of two reach from 2^-127 to 2^127."""
    cache = np.zeros((1, 1, 1, 584), np.uint8)
    cache[..., :256] = np.arange(256)
    cache[..., 576:583] = [0, 127, 254, 255, 1, 128, 120]
    with np.errstate(over="ignore"):
        rows = face_of(cache).packed_rows("k_cache", cache, np.dtype("float32"), None).unpacked()[0, 0, 0]
    codes = fa_attn.dequantize_kv(np.arange(256, dtype=np.uint8)[:, None], None)[:, 0].astype(np.float64)
    with np.errstate(over="ignore"):
        for group, scale in ((0, 2.0**-127), (1, 1.0), (2, 2.0**127)):
            at = slice(64 * group, 64 * (group + 1))
            np.testing.assert_array_equal(rows[at], (codes[at] * scale).astype(np.float32))
    assert np.isnan(rows[192:256]).all() and (rows[256:] == 0).all()


def test_prefill_on_rows_of_its_choice():
    rng = np.random.default_rng(4)
    q, kv = arrays(1, (5, 8, COLUMNS), (70, 1, COLUMNS), dtype=np.float16)
    kv[60:] = np.nan
    indices = chosen(rng, 5, 1, 24, np.arange(60))
    lengths = np.array([24, 3, 0, 24, 24], np.int32)
    out, most, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, topk_length=lengths)
    *same, of_first = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, 512, None, lengths, 8)
    assert all((one == other).all() for one, other in zip(same, (out, most, lse)))
    _, _, want = flash_mla.flash_mla_sparse_fwd(q, kv, indices[..., :8], SCALE, 512, None, lengths)
    assert (of_first == want).all()
    assert out.shape == (5, 8, LATENT) and most.shape == lse.shape == (5, 8)
    for i in range(5):
        rows = seen(indices[i, 0], 70, lengths[i])
        want, want_lse, _ = reference.attention(q[i : i + 1], kv[rows], kv[rows, :, :LATENT], scale=SCALE)
        close(out[i], want[0], np.float16)
        if not len(rows):
            assert np.isposinf(lse[i]).all() and np.isneginf(most[i]).all()
            continue
        close(lse[i], want_lse[:, 0], np.float32, 20)
        scores = q[i].astype(np.float64) @ kv[rows, 0].astype(np.float64).T * SCALE
        close(most[i], scores.max(-1), np.float32, 20)


@pytest.mark.parametrize("name", ["qv", "q_v"])
def test_a_second_query_on_the_values(name):
    q, qv, k, v = arrays(2, (2, 3, 6, 8), (2, 3, 6, 24), (2, 20, 2, 8), (2, 20, 2, 24))
    keys, queries = np.concatenate([v, k], -1), np.concatenate([qv, q], -1)
    out, lse = fa_attn.flash_attn_func(q, k, v, causal=True, return_lse=True, **{name: qv})
    want, want_lse = fa_attn.flash_attn_func(queries, keys, v, causal=True, return_lse=True)
    close(out, want)
    close(lse, want_lse)
    for b in range(2):
        exact, _, _ = reference.attention(queries[b], keys[b], v[b], causal=True, scale=32**-0.5)
        close(out[b], exact)
    cu = np.array([0, 20, 40], np.int32)
    packed = fa_attn.flash_attn_varlen_func(
        q, k.reshape(40, 2, 8), v.reshape(40, 2, 24), None, cu, None, 20, causal=True, qv=qv
    )
    close(packed, out)
    # Decoding, with what is new appended and its rotary columns turned.
    new_k, new_v = arrays(3, (2, 3, 2, 8), (2, 3, 2, 24))
    angles = np.random.default_rng(8).uniform(0, 6.28, (40, 4)).astype(np.float32)
    tables = dict(rotary_cos=np.cos(angles), rotary_sin=np.sin(angles))
    k_cache, v_cache = np.zeros((2, 30, 2, 8), np.float32), np.zeros((2, 30, 2, 24), np.float32)
    k_cache[:, :20], v_cache[:, :20] = k, v
    used = np.array([20, 11], np.int32)
    out = fa_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, cache_seqlens=used, causal=True, qv=qv, softmax_scale=0.3, **tables
    )
    turned = lambda x, at: np.stack(  # noqa: E731
        [
            x[..., 0::2] * np.cos(angles)[at][:, None] - x[..., 1::2] * np.sin(angles)[at][:, None],
            x[..., 0::2] * np.sin(angles)[at][:, None] + x[..., 1::2] * np.cos(angles)[at][:, None],
        ],
        -1,
    ).reshape(x.shape)
    for b, n in enumerate(used):
        at = np.arange(n, n + 3)
        own_k = np.concatenate([k[b, :n], turned(new_k[b], at)])
        own_v = np.concatenate([v[b, :n], new_v[b]])
        own_q = np.concatenate([qv[b], turned(q[b], at)], -1)
        keys = np.concatenate([own_v, own_k], -1)
        want, _, _ = reference.attention(own_q, keys, own_v, causal=True, scale=0.3)
        close(out[b], want)
        close(v_cache[b, n : n + 3], new_v[b])


def test_refusals_name_the_arguments():
    q, cache, table, used = step(1, 2, 1, 4, 16, [5, 20])
    call = flash_mla.flash_mla_with_kvcache

    def refused(error, part, function, *arguments, **options):
        with pytest.raises(error) as raised:
            function(*arguments, **options)
        assert part in str(raised.value), str(raised.value)

    wrong, unsupported = fa_attn.InputError, fa_attn.UnsupportedError
    fp8 = dict(is_fp8_kvcache=True)
    refused(wrong, "k_cache holds float16", call, q, cache, table, used, LATENT, **fp8)
    bytes_of_rows = np.zeros((4, 16, 1, 600), np.uint8)
    starts = np.array([0, 1, 2], np.int32)
    for part, tokens, options in (
        ("it must be with cu_seqlens_q (total_q", q, dict(cu_seqlens_q=starts)),
        ("max_seqlen_q is None", q[:, 0], dict(cu_seqlens_q=starts)),
        ("max_seqlen_q without cu_seqlens_q", q, dict(max_seqlen_q=1)),
        ("cu_seqlens_q with indices", q[:, 0], dict(cu_seqlens_q=starts, max_seqlen_q=1, indices=table)),
    ):
        refused(wrong, part, call, tokens, cache, table, used, LATENT, **options)
    gather = flash_mla.gather_rows
    refused(wrong, "k_cache holds uint8: rows of codes", gather, bytes_of_rows, table, starts, 2)
    refused(wrong, "dtype is None", gather, bytes_of_rows, table, starts, 2, is_fp8_kvcache=True)
    refused(wrong, "descale_k without is_fp8_kvcache", gather, cache, table, starts, 2, descale_k=used)
    refused(wrong, "must be from 0 to", gather, cache, table, np.array([0, 999, 999], np.int32), 999)
    refused(wrong, "there are 656, 584, 576", call, q, bytes_of_rows, table, used, LATENT, **fp8)
    rows = np.zeros((4, 16, 1, 656), np.uint8)
    one = np.ones(1, np.float32)
    refused(wrong, "of their own", call, q, rows, table, used, LATENT, **fp8, descale_k=one)
    apart = np.zeros((4, 16, 1, 600), np.uint8)[..., :584]
    narrow = q[..., :512]
    refused(wrong, "at distances of 600", call, narrow, apart, table, used, LATENT, **fp8)
    two = dict(fp8, descale_k=np.ones(2, np.float32))
    refused(wrong, "descale_k is float32 (2,)", call, q, rows[..., :576], table, used, LATENT, **two)
    garbage = np.full_like(table, 9)
    refused(wrong, "is 9: the cache has 4 pages", call, q, rows, garbage, used, LATENT, **fp8)
    refused(wrong, "num_splits", call, q, cache, table, used, LATENT, None, 3)
    kind = fa_attn.InputTypeError
    refused(kind, "tile_scheduler_metadata is ndarray", call, q, cache, table, used, LATENT, used)
    refused(wrong, "head_dim_v is 577", call, q, cache, table, used, 577)
    refused(wrong, "rows of 570 columns", call, q, cache[..., :570], table, used, LATENT)
    refused(wrong, "block_table and cache_seqlens are missing", call, q, cache, None, used, LATENT)
    refused(wrong, "topk_length without indices", call, q, cache, table, used, LATENT, topk_length=used)
    refused(wrong, "cache_seqlens", call, q, cache, table, used[:1], LATENT)
    refused(wrong, "is 2147480000", call, q, cache, table, np.array([5, 60], np.int32), LATENT)
    indices = np.zeros((2, 1, 4), np.int32)
    refused(wrong, "causal with indices", call, q, cache, None, None, LATENT, causal=True, indices=indices)
    refused(wrong, "must be (2, 1, topk)", call, q, cache, None, None, LATENT, indices=indices[:1])
    refused(wrong, "attn_sink", call, q, cache, table, used, LATENT, attn_sink=np.zeros(3, np.float32))
    k, qv = cache[..., :8], q[..., :LATENT]
    one = fa_attn.flash_attn_with_kvcache
    kept = dict(block_table=table, cache_seqlens=used)
    refused(wrong, "qv has the shape (2, 1, 4, 8)", one, q[..., :8], k, cache, qv=q[..., :8], **kept)
    refused(wrong, "two names of one array", one, q[..., :8], k, cache[..., :LATENT], qv=qv, q_v=qv, **kept)
    qkv = np.zeros((1, 3, 3, 2, 8), np.float32)
    refused(unsupported, "give q, k and v apart", fa_attn.flash_attn_qkvpacked_func, qkv, qv=qkv[:, :, 0])


def test_problems_and_bound_kernels():
    q, cache, table, used = step(6, 2, 1, 8, 4, [32, 9], np.float32, 24)
    problem = fa_attn.problem(
        2, "1x32", "8:1", "24:16", latent=True, softmax_scale=0.2, dtype="f32", page=4, pages=len(cache)
    )
    assert problem["latent"] is True and "latent" in repr(problem)
    kernels = fa_attn.Kernels(problem)
    assert list(kernels.report) == ["forward"]
    out, lse = kernels.forward(
        q, cache[..., 16:], cache[..., :16], seqused_k=used, page_table=np.ascontiguousarray(table[:, :8])
    )
    check(q, cache, table, used, out, np.where(np.isneginf(lse), np.inf, lse), False, 16, np.float32, 0.2)
    with pytest.raises(fa_attn.InputError, match="softmax_scale is not given"):
        fa_attn.problem(2, "1x32", "8:1", "24:16", latent=True)
    half = {**problem, "dtype": "f16"}
    assert "sm90_wide" in str(fa_attn.plan(half, limit=1))
    for arch in ("sm80", "sm100", "sm120"):
        with pytest.raises(fa_attn.UnsupportedError, match="a latent problem .24-16"):
            fa_attn.plan(half, arch)
