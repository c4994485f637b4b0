"""vLLM's caches of int4_per_token_head on numpy, and torch where it is there."""

import fa_attn
import numpy as np
import pytest
from test_codes import as_array, as_numpy, libraries, needs_torch, normal

ASKED = {"kv_cache_dtype": "int4_per_token_head"}


def signs(columns):
    """1 or -1 for each column, by the bits of torch's generator on the CPU."""
    bits = np.random.MT19937()
    bits._legacy_seeding(0x9E3779B9)
    draws = (bits.random_raw(columns) & 0xFFFFFF) / 2.0**24
    return np.where(draws < 0.5, 1.0, -1.0)


def sylvester(columns):
    matrix = np.ones((1, 1))
    while len(matrix) < columns:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def stored(x):
    """(codes, scales, the numbers that they stand for) of rows as vLLM writes them."""
    columns = x.shape[-1]
    turn = signs(columns)[:, None] * sylvester(columns)
    turned = (x @ turn).astype(np.float32)
    low, high = turned.min(-1), turned.max(-1)
    scale = np.maximum((high - low) / np.float32(15), np.float32(1e-6))
    zero = np.clip(np.trunc(-low / scale + np.float32(0.5)), 0, 15)
    codes = np.clip(np.trunc(turned / scale[..., None] + zero[..., None] + np.float32(0.5)), 0, 15)
    bits = scale.view(np.int32) & -16
    numbers = (codes - zero[..., None]) * bits.view(np.float32)[..., None].astype(np.float64)
    codes = codes.astype(np.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed, (bits | zero.astype(np.int32)).view(np.float32), numbers @ turn.T / columns


def attention(q, k, v, length):
    """(O, LSE) in f64 of the last queries of a sequence, causal."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x[:length], group, 1).transpose(1, 0, 2) for x in (k, v))
    scores = q.astype(np.float64).transpose(1, 0, 2) @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    hidden = np.arange(length) > np.arange(len(q))[:, None] + length - len(q)
    scores = np.where(hidden, -np.inf, scores)
    lse = np.logaddexp.reduce(scores, -1)
    return (np.exp(scores - lse[..., None]) @ v).transpose(1, 0, 2), lse


@needs_torch
def test_signs_are_those_of_torchs_generator():
    import torch
    from fa_attn._turned_rows import NEGATED

    generator = torch.Generator()
    generator.manual_seed(0x9E3779B9)
    drawn = 2 * torch.bernoulli(torch.full((512,), 0.5), generator=generator) - 1
    assert (drawn.numpy() == signs(512)).all()
    own = [1 - 2 * (word >> bit & 1) for word in NEGATED for bit in range(32)]
    assert (drawn.numpy() == own).all()


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("dims", ((128, 128), (64, 32), (16, 256)))
def test_pages_are_the_numbers_that_vllm_wrote(library, dims):
    lengths, table = np.array([40, 17, 33], np.int32), np.array([[4, 0, 7], [2, 8, 1], [5, 3, 6]], np.int32)
    k, v = normal(9, 16, 2, dims[0], seed=1), normal(9, 16, 2, dims[1], seed=2)
    q = normal(3, 2, 6, dims[0], seed=3)
    (k4, k_scale, k_read), (v4, v_scale, v_read) = stored(k), stored(v)
    # Of half a step of fifteen, whose size the largest turned number makes.
    assert np.abs(k_read - k).max() < 0.5
    # Rows behind a sequence's last.
    for scale in (k_scale, v_scale):
        scale[table[1, 1], 1:] = np.nan
    made = fa_attn.flash_attn_with_kvcache(
        *(as_array(library, x) for x in (q, k4, v4)),
        cache_seqlens=as_array(library, lengths),
        page_table=as_array(library, table),
        causal=True,
        k_descale=as_array(library, k_scale),
        v_descale=as_array(library, v_scale),
        return_softmax_lse=True,
        **ASKED,
    )
    for i, length in enumerate(lengths):
        rows = [x[table[i]].reshape(-1, *x.shape[2:]) for x in (k_read, v_read)]
        for got, want in zip(made, attention(q[i], *rows, length)):
            assert np.abs(as_numpy(got)[i] - want).max() < 1e-5


@needs_torch
@pytest.mark.parametrize("form", ("padded", "packed"))
def test_rows_in_one_piece_and_results_of_the_callers(form):
    import torch

    q, k, v = normal(2, 5, 4, 64).astype(np.float16), normal(2, 9, 2, 64, seed=1), normal(2, 9, 2, 64, seed=2)
    (k4, k_scale, k_read), (v4, v_scale, v_read) = stored(k), stored(v)
    arrays = [torch.from_numpy(x) for x in (q, k4, v4)]
    # With any strides, as views of a page's bytes have.
    scales = [torch.from_numpy(np.repeat(x, 3, -1))[..., ::3] for x in (k_scale, v_scale)]
    if form == "packed":
        arrays, scales = [x.flatten(0, 1) for x in arrays], [x.flatten(0, 1) for x in scales]
    named = dict(k_descale=scales[0], v_descale=scales[1], causal=True, **ASKED)
    room = torch.full_like(arrays[0], float("nan"))
    if form == "packed":
        starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 9)]
        out = fa_attn.flash_attn_varlen_func(*arrays, *starts, 5, 9, out=room, **named)
    else:
        out = fa_attn.flash_attn_func(*arrays, out=room, **named)
    assert out is room
    for i, got in enumerate(out.reshape(q.shape)):
        want, _ = attention(q[i], k_read[i], v_read[i], 9)
        assert np.abs(got.float().numpy() - want).max() < 4e-3


@pytest.mark.parametrize("library", libraries())
def test_what_such_rows_need_is_said(library):
    q, k = normal(1, 2, 2, 16), normal(1, 9, 2, 16, seed=1)
    packed, scale, _ = stored(k)
    q, packed, scale = (as_array(library, x) for x in (q, packed, scale))
    named = dict(k_descale=scale, v_descale=scale, **ASKED)
    short = as_array(library, normal(1, 9, 2))[..., :1]
    for error, call, part in (
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q, packed, packed, **ASKED),
            "k_descale: the scales of",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q, packed, packed, **{**named, "v_descale": short}),
            "v_descale has the shape",
        ),
        (fa_attn.InputError, lambda: fa_attn.flash_attn_func(q, q, q, **named), "two to a byte"),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q[..., :12], packed[..., :6], packed[..., :6], **named),
            "those of int4_per_token_head are a power of two",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q[..., :8], packed, packed, **named),
            "k has rows of 16 columns and q of 8",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_with_kvcache(
                q, packed, packed, q, q, cache_seqlens=as_array(library, np.full(1, 4, np.int32)), **named
            ),
            "rows that join such a cache are written by vLLM",
        ),
    ):
        with pytest.raises(error, match=part):
            call()
