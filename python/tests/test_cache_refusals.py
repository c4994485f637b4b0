"""What is refused of caches, on numpy's arrays and torch's in the CPU's memory, before anything is written."""

import numpy as np
import pytest
from reference import arrays

import fa_attn


def given(library):
    """A function that gives numpy's arrays as the library's, sharing memory."""
    return np.asarray if library == "numpy" else pytest.importorskip("torch").from_numpy


def cache(room=20, pages=None):
    q, k, v = arrays(31, (2, 1, 2, 8), (2, room, 1, 8), (2, room, 1, 8))
    new = arrays(32, (2, 1, 1, 8), (2, 1, 1, 8))
    return q, k, v, new, None if pages is None else np.array(pages, np.int32)


def lengths(*values):
    return np.array(values, np.int32)


def called(give, q, k, v, new=(), **options):
    arrays_of = {name: give(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return fa_attn.flash_attn_with_kvcache(*map(give, (q, k, v, *new)), **arrays_of)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("options", "part"),
    [
        (dict(cache_seqlens=21), "cache_seqlens is 21: it must be from 0 to 20"),
        (dict(cache_seqlens=lengths(21, 20)), r"cache_seqlens\[0\] is 21: it must be from 0 to 20"),
        (dict(cache_seqlens=lengths(5, -3)), r"cache_seqlens\[1\] is -3"),
        (dict(cache_seqlens=np.array([5.9, 3.9])), "cache_seqlens holds .*float64"),
        (dict(cache_seqlens=lengths(5)), r"cache_seqlens has the shape \(1,\): it must be \(2,\)"),
        (dict(cache_seqlens=lengths(5, 5), pages=[[0, 1], [0, 2]]), r"\[1, 1\] is 2: the cache has 2 pages"),
        (dict(cache_seqlens=lengths(5, 5), pages=[[0, 1], [2**30, 1]]), r"\[1, 0\] is 1073741824"),
        (dict(cache_seqlens=lengths(5, 5), cache_leftpad=lengths(0, 21)), r"cache_leftpad\[1\] is 21"),
    ],
)
def test_padded_caches_are_read_within_their_room(library, options, part):
    options = dict(cache_leftpad=lengths(0, 2)) | options
    pages = options.pop("pages", None)
    q, k, v, _, table = cache(room=20 if pages is None else 4, pages=pages)
    with pytest.raises(fa_attn.InputError, match=part):
        called(given(library), q, k, v, block_table=table, **options)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_entries_of_a_table_that_hold_no_keys_in_use_may_be_anything(library):
    # Of the first sequence the second page is not in use, of the other the first holds padding alone.
    q, k, v, _, table = cache(room=4, pages=[[0, 2**30], [-7, 1]])
    options = dict(cache_seqlens=lengths(4, 7), cache_leftpad=lengths(1, 5))
    out = called(given(library), q, k, v, block_table=table, **options)
    want = called(given(library), q, k, v, block_table=np.clip(table, 0, 1), **options)
    assert np.array_equal(np.asarray(out), np.asarray(want))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("options", "part"),
    [
        (dict(cache_seqlens=lengths(-7, 3)), r"cache_seqlens\[0\] is -7: it must be from 0 to 20"),
        (dict(cu_seqlens_k_new=lengths(0, 1, 9)), r"cu_seqlens_k_new\[2\] is 9: it must be from 1, the entry"),
        (dict(cu_seqlens_k_new=lengths(-5, 1, 2)), r"cu_seqlens_k_new\[0\] is -5: it must be from 0 to 2"),
        (dict(cu_seqlens_k_new=lengths(0, 2)), r"cu_seqlens_k_new has the shape \(2,\): it must be \(3,\)"),
        (dict(sinks=np.zeros(3, np.float32)), "sinks has the shape"),
        (dict(alibi_slopes=np.zeros((3, 2), np.float32)), "alibi_slopes has the shape"),
        (dict(out=np.zeros((2, 1, 2, 9), np.float32)), "out has the shape"),
        (dict(out=np.zeros((2, 1, 2, 8), np.float64)), "out holds .*float64"),
        (dict(out="of the cache"), "out lies in the memory of k"),
        (dict(softcap=-1.0), "softcap is -1.0: it must be above 0, or 0 for none"),
        (dict(rotary_interleaved="x"), "rotary_interleaved is 'x'"),
    ],
)
def test_what_is_wrong_is_found_before_the_cache_is_written(library, options, part):
    q, k, v, new, _ = cache()
    if "cu_seqlens_k_new" in options:
        new = [x.reshape(2, 1, 8) for x in new]
    if isinstance(options.get("out"), str):
        options = dict(out=k.reshape(2, 10, 2, 8)[:, 5:6])
    before = k.copy(), v.copy()
    options = dict(cache_seqlens=lengths(3, 4)) | options
    with pytest.raises((fa_attn.InputError, fa_attn.InputTypeError), match=part):
        called(given(library), q, k, v, new, **options)
    assert np.array_equal(k, before[0]) and np.array_equal(v, before[1])


def test_what_is_written_is_of_the_library_of_q():
    torch = pytest.importorskip("torch")
    q, k, v, new, _ = cache()
    other = [torch.from_numpy(x) for x in (k, v)]
    with pytest.raises(fa_attn.InputTypeError, match="k_cache is torch.Tensor and q numpy.ndarray"):
        fa_attn.flash_attn_with_kvcache(q, *other, *new, cache_seqlens=3)
    with pytest.raises(fa_attn.InputTypeError, match="k_cache is numpy.ndarray and q torch.Tensor"):
        fa_attn.flash_attn_with_kvcache(torch.from_numpy(q), k, v, cache_seqlens=3)
    # Caches that are only read may be of any library.
    want = fa_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=3)
    assert np.array_equal(fa_attn.flash_attn_with_kvcache(q, *other, cache_seqlens=3), want)


def test_lengths_of_another_library_beside_a_result_of_ones_own():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in arrays(36, (9, 2, 8), (9, 1, 8), (9, 1, 8)))
    starts = lengths(0, 4, 9)
    want = fa_attn.flash_attn_varlen_func(q, k, v, torch.from_numpy(starts), torch.from_numpy(starts), 5, 5)
    out = torch.empty_like(q)
    got = fa_attn.flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, out=out)
    assert got is out and torch.equal(got, want)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_starts_of_new_keys_without_any(library):
    """Servers give them with every call: nothing is appended, and they are checked."""
    give = given(library)
    q, k = give(np.ones((2, 1, 2, 8), np.float32)), give(np.ones((2, 20, 2, 8), np.float32))
    call = dict(cache_seqlens=give(lengths(3, 20)))
    want = fa_attn.flash_attn_with_kvcache(q, k, k, **call)
    got = fa_attn.flash_attn_with_kvcache(q, k, k, cu_seqlens_k_new=give(lengths(0, 3, 23)), **call)
    assert (got == want).all()
    with pytest.raises(fa_attn.InputError, match="cu_seqlens_k_new has the shape"):
        fa_attn.flash_attn_with_kvcache(q, k, k, cu_seqlens_k_new=give(lengths(0, 3)), **call)
