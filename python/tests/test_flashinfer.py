"""FlashInfer's functions and wrappers, beside attention by its definition."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from reference import attention, rotated

import fa_attn
import fa_attn.flashinfer as flashinfer

ROWS, KEYS = (5, 1, 0, 9), (21, 8, 4, 9)
HEADS, HEADS_KV, DIM = 6, 2, 32
WORKSPACE = torch.empty(16, dtype=torch.uint8)


def starts(lengths):
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def batch(page=4, layout="NHD", dtype=torch.float32, rows=ROWS, keys=KEYS):
    """(q, k and v of each request, a cache with NaN where there is no key, its pages)."""
    torch.manual_seed(3)
    counts = [-(-n // page) for n in keys]
    total = sum(counts) + 2
    order = torch.randperm(total)[: sum(counts)].int()
    cache = torch.full((total, 2, page, HEADS_KV, DIM), float("nan"), dtype=dtype)
    q, own, first = torch.randn(sum(rows), HEADS, DIM).to(dtype), [], 0
    for n, count in zip(keys, counts):
        kv = torch.randn(2, n, HEADS_KV, DIM).to(dtype)
        own.append(kv)
        for i in range(count):
            part = kv[:, i * page : (i + 1) * page]
            cache[order[first + i], :, : part.shape[1]] = part
        first += count
    last = torch.tensor([(n - 1) % page + 1 if n else 0 for n in keys], dtype=torch.int32)
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    return q, own, cache, (starts(rows), starts(counts), order, last)


def expected(q, own, rows=ROWS, masks=None, bias=None, **options):
    """(out, lse in base 2) of the requests."""
    outs, lses, first = [], [], 0
    for at, (n, (k, v)) in enumerate(zip(rows, own)):
        part = q[first : first + n].double().numpy()
        k, v = k.double().numpy(), v.double().numpy()
        if masks is None and bias is None:
            out, lse, _ = attention(part, k, v, **options)
        else:
            scores = np.einsum("ihd,jhd->hij", part, np.repeat(k, HEADS // HEADS_KV, 1)) * DIM**-0.5
            distance = np.arange(k.shape[0])[None] - np.arange(n)[:, None]
            scores = scores if bias is None else scores + bias[:, None, None] * distance
            scores = scores if masks is None else np.where(masks[at].numpy(), scores, -np.inf)
            top = scores.max(-1, initial=-1e30)
            weights = np.exp(scores - top[..., None])
            with np.errstate(divide="ignore"):
                lse = np.log(weights.sum(-1)) + top
            weights /= np.maximum(weights.sum(-1), 1e-300)[..., None]
            out = np.einsum("hij,jhd->ihd", weights, np.repeat(v, HEADS // HEADS_KV, 1))
        outs.append(out)
        lses.append(lse.T * math.log2(math.e))
        first += n
    return np.concatenate(outs), np.concatenate(lses)


def check(got, want, room=2e-5):
    for x, y in zip(got, want):
        x = x.double().numpy()
        assert x.shape == y.shape
        both = np.isfinite(y)
        assert (np.isfinite(x) == both).all()
        x, y = x[both], y[both]
        assert np.abs(x - y).max(initial=0) <= room * max(1, np.abs(y).max(initial=0))


OPTIONS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"causal": True, "window_left": 5}, {"causal": True, "window": (5, 0)}),
    "left": ({"window_left": 2, "logits_soft_cap": 4.0}, {"window": (2, -1), "softcap": 4.0}),
    "scale": ({"sm_scale": 0.3, "disable_split_kv": True}, {"scale": 0.3}),
}
TYPES = {"q_data_type": torch.float32}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("page, layout", [(4, "NHD"), (1, "NHD"), (16, "HND")])
def test_a_paged_prefill_is_attention(option, page, layout):
    ours, want = OPTIONS[option]
    q, own, cache, pages = batch(page, layout)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, layout)
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, page, **ours, **TYPES)
    want = expected(q, own, **want)
    check(wrapper.run(q, cache, return_lse=True), want)
    check([wrapper.run(q, cache.unbind(1))], want)
    if page == 1:
        check([wrapper.run(q, cache[:, :, 0])], want)
        check([wrapper.run(q, tuple(x[:, 0] for x in cache.unbind(1)))], want)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    assert wrapper.run(q, cache, out=out, lse=lse) is out
    check((out, lse), want)


@pytest.mark.parametrize("option", ["full", "causal", "window", "left"])
def test_a_ragged_prefill_is_attention(option):
    ours, want = OPTIONS[option]
    q, own, _, _ = batch()
    k, v = (torch.cat([kv[i] for kv in own]) for i in (0, 1))
    for layout in ("NHD", "HND"):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, layout)
        wrapper.plan(starts(ROWS), starts(KEYS), HEADS, HEADS_KV, DIM, **ours, **TYPES)
        given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
        check(wrapper.run_return_lse(q, *given), expected(q, own, **want))


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_decode_is_attention(tokens):
    rows, keys = (tokens,) * 3, (21, 3, 9)
    q, own, cache, (_, *pages) = batch(rows=rows, keys=keys)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    sinks = torch.linspace(-1, 2, HEADS)
    plan = dict(window_left=7, q_len_per_req=tokens, **TYPES)
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, **plan)
    want = expected(q, own, rows, causal=True, window=(7, 0), sinks=sinks.numpy())
    check(wrapper.run(q, cache, sinks=sinks, return_lse=True), want)
    # A plan of one token takes runs of several.
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, window_left=7, **TYPES)
    check(wrapper.run(q, cache, sinks=sinks, return_lse=True, q_len_per_req=tokens), want)
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, **plan)
    # A factor of keys is one of scores, one of values is one of the result.
    want = expected(q, own, rows, causal=True, window=(7, 0), scale=0.5 * DIM**-0.5)
    got = wrapper.run(q, cache, k_scale=0.25, q_scale=torch.tensor(2.0), v_scale=3.0, return_lse=True)
    check(got, (3 * want[0], want[1]))
    # As the older calls say it; the plan that programs put in the place of a wrapper's own.
    fast = dict(data_type=torch.float32, q_len_per_req=tokens)
    wrapper.plan = lambda *arguments, **options: flashinfer.fast_decode_plan(wrapper, *arguments, **options)
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, **fast, global_override_indptr_cpu=pages[0])
    wrapper._types = (torch.float32,) * 3
    check([wrapper.forward(q, cache, window_left=7)], expected(q, own, rows, causal=True, window=(7, 0)))


def test_masks_are_flat_or_bits():
    q, own, cache, pages = batch()
    masks = [torch.rand(n, m) > 0.4 for n, m in zip(ROWS, KEYS)]
    masks[0][1] = False
    want = expected(q, own, masks=masks)
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    sizes = starts([n * m for n, m in zip(ROWS, KEYS)])
    bits, at = flashinfer.segment_packbits(flat, sizes, "little")
    assert at.tolist() == starts([-(-n * m // 8) for n, m in zip(ROWS, KEYS)]).tolist()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    k, v = (torch.cat([kv[i] for kv in own]) for i in (0, 1))
    for mask in ({"custom_mask": flat}, {"packed_custom_mask": bits}):
        wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, causal=True, **mask, **TYPES)
        check(wrapper.run(q, cache, return_lse=True), want)
        ragged.plan(pages[0], starts(KEYS), HEADS, HEADS_KV, DIM, causal=True, **mask, **TYPES)
        check(ragged.run(q, k, v, return_lse=True), want)
    (first, keys), mask = own[0], masks[0]
    for given in ({"custom_mask": mask}, {"packed_custom_mask": flashinfer.packbits(mask, "little")}):
        got = flashinfer.single_prefill_with_kv_cache_return_lse(q[:5], first, keys, **given)
        check(got, (want[0][:5], want[1][:5]))
    packed = flashinfer.packbits(mask).numpy()
    assert (packed == np.packbits(mask.numpy().reshape(-1))).all()


def test_items_see_their_prefix_and_themselves():
    q, own, cache, pages = batch(rows=(9, 12, 3, 9), keys=(12, 12, 9, 9))
    prefix = torch.tensor([3, 2, 9, 0], dtype=torch.uint32)
    width = 16
    places = torch.zeros(4, width, dtype=torch.uint16)
    masks = []
    for at, (n, m, first) in enumerate(zip((9, 12, 3, 9), (12, 12, 9, 9), prefix.tolist())):
        item = torch.arange(m - first) % 4
        places[at, : m - first] = item.to(torch.uint16)
        seen = torch.ones(m, m, dtype=torch.bool).tril()
        for i in range(first, m):
            seen[i, first:] = False
            seen[i, i - int(item[i - first]) + 1 : i + 1] = True
        masks.append(seen[m - n :])
    items = dict(
        prefix_len_ptr=prefix, token_pos_in_items_ptr=places.reshape(-1), token_pos_in_items_len=width
    )
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, causal=True, **items, **TYPES)
    want = expected(q, own, (9, 12, 3, 9), masks=masks)
    check(wrapper.run(q, cache, return_lse=True), want)


def test_new_rows_and_their_prefix_merge_as_in_sglang():
    new, keys, window = (10, 17, 14), (40, 17, 64), 9
    q, own, cache, (starts_q, *_) = batch(1, rows=new, keys=keys)
    prefix = [m - n for n, m in zip(new, keys)]
    # The last keys of each prefix, by pages of one row, and what each new row sees of them.
    kept = [min(n, window) for n in prefix]
    pages, masks, place = [], [], 0
    order = batch(1, rows=new, keys=keys)[3][2]
    for n, m, count in zip(new, keys, kept):
        pages.append(order[place + m - n - count : place + m - n])
        masks.append(torch.arange(-count, 0)[None] >= torch.arange(n)[:, None] - window)
        place += m
    pages = torch.cat([*pages, torch.full((256,), 10**6, dtype=torch.int32)])
    flat = torch.cat(
        [mask.to(torch.uint8).reshape(-1) for mask in masks] + [torch.ones(9, dtype=torch.uint8)]
    )
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, backend="fa2")
    types = dict(q_data_type=torch.float32, kv_data_type=torch.float32)
    last = torch.ones(3, dtype=torch.int32)
    paged.begin_forward(
        starts_q, starts(kept), pages, last, HEADS, HEADS_KV, DIM, 1, custom_mask=flat, **types
    )
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.begin_forward(starts_q, starts_q, HEADS, HEADS_KV, DIM, q_data_type=torch.float32)
    k, v = (torch.cat([kv[i, -n:] for n, kv in zip(new, own)]) for i in (0, 1))
    scores = dict(sm_scale=0.2, logits_soft_cap=0.0)
    one = ragged.forward_return_lse(q, k, v, causal=True, window_left=window, **scores)
    two = paged.forward_return_lse(q, cache[:, :, 0], causal=False, window_left=-1, **scores)
    want = expected(q, own, new, causal=True, window=(window, 0), scale=0.2)
    check(flashinfer.merge_state(*one, *two), want)


def test_positions_are_of_requests():
    q, own, cache, pages = batch()
    slopes = 2.0 ** -np.array([2, 4, 6, 8, 1, 3])
    k, v = (torch.cat([kv[i] for kv in own]) for i in (0, 1))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    angles = np.arange(64)[:, None] / 2.0 * 500.0 ** -(np.arange(DIM // 2) / (DIM // 2))
    tables, turned, first, turned_q = (np.cos(angles), np.sin(angles)), [], 0, []
    for n, (keys, values) in zip(ROWS, own):
        m = keys.shape[0]
        turned.append((torch.tensor(rotated(keys.numpy(), *tables, np.arange(m), False)), values))
        turned_q.append(rotated(q[first : first + n].numpy(), *tables, np.arange(m - n, m), False))
        first += n
    turned_q = torch.tensor(np.concatenate(turned_q))
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0}
    for options, want in (
        ({"pos_encoding_mode": "ALIBI"}, expected(q, own, bias=slopes)),
        (rope, expected(turned_q, turned, causal=True)),
    ):
        options["causal"] = "ROPE" in options["pos_encoding_mode"]
        wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, **options, **TYPES)
        check(wrapper.run(q, cache, return_lse=True), want)
        ragged.plan(pages[0], starts(KEYS), HEADS, HEADS_KV, DIM, **options, **TYPES)
        check(ragged.run(q, k, v, return_lse=True), want)
        got = flashinfer.single_prefill_with_kv_cache(q[:5], *own[0], return_lse=True, **options)
        check(got, (want[0][:5], want[1][:5]))


def test_codes_and_types():
    q, own, cache, pages = batch(dtype=torch.bfloat16)
    cache = cache.nan_to_num().to(torch.float8_e4m3fn)
    own = [kv.to(torch.float8_e4m3fn).float() for kv in own]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    plan = dict(q_data_type="bfloat16", kv_data_type=torch.float8_e4m3fn, o_data_type="float16")
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 4, **plan)
    out, lse = wrapper.run(q, cache, k_scale=0.5, v_scale=2.0, return_lse=True)
    assert out.dtype is torch.float16
    want = expected(q, own, scale=0.5 * DIM**-0.5)
    check((out, lse), (2 * want[0], want[1]), 2e-2)
    with pytest.raises(fa_attn.InputError, match="k.dtype is torch.bfloat16: the plan says"):
        wrapper.run(q, cache.to(torch.bfloat16))


def test_captured_plans_keep_their_place():
    q, own, cache, (indptr_q, *pages) = batch()
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (5, 40, 4)]
    mask_buffers = (torch.zeros(64, dtype=torch.uint8), torch.zeros(5, dtype=torch.int32))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        WORKSPACE, "NHD", True, torch.zeros(5, dtype=torch.int32), *buffers, *mask_buffers
    )
    wrapper.plan(indptr_q, *pages, HEADS, HEADS_KV, DIM, 4, causal=True, **TYPES)
    places = [x.data_ptr() for x in (wrapper._pages.table, wrapper._pages.lengths, wrapper._starts)]
    check(wrapper.run(q, cache, return_lse=True), expected(q, own, causal=True))
    masks = [torch.rand(n, m) > 0.4 for n, m in zip(ROWS, KEYS)]
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    wrapper.plan(indptr_q, *pages, HEADS, HEADS_KV, DIM, 4, custom_mask=flat, **TYPES)
    check(wrapper.run(q, cache, return_lse=True), expected(q, own, masks=masks))
    assert places == [x.data_ptr() for x in (wrapper._pages.table, wrapper._pages.lengths, wrapper._starts)]
    for buffer, page in zip(buffers, pages):
        assert torch.equal(buffer[: len(page)], page) and not buffer[len(page) :].any()
    decode = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert decode.is_cuda_graph_enabled
    with pytest.raises(fa_attn.InputError, match="the batch is 3: that of the wrapper's buffers is 4"):
        decode.plan(pages[0][:4], pages[1], pages[2][:3], HEADS, HEADS_KV, DIM, 4)
    with pytest.raises(fa_attn.InputError, match="the wrapper's buffers hold 40"):
        wrapper.plan(indptr_q, pages[0], pages[1].new_zeros(41), pages[2], HEADS, HEADS_KV, DIM, 4)
    # A server writes the pages to the buffer itself; wrappers of several batches share the table's memory.
    few = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, buffers[0][:2], buffers[1], buffers[2][:1]
    )
    assert few._pages.table.data_ptr() == decode._pages.table.data_ptr()
    few._paged_kv_indices_buf[:6] = pages[1][:6]
    few.plan(pages[0][:2], few._paged_kv_indices_buf, pages[2][:1], HEADS, HEADS_KV, DIM, 4, **TYPES)
    check([few.run(q[:1], cache)], expected(q[:1], own[:1], (1,))[:1])
    with pytest.raises(AttributeError):
        few._paged_kv_indices_buf = pages[1]
    with pytest.raises(AttributeError, match="pages are set by plan"):
        getattr(flashinfer.BatchAttention(device="cpu"), "_paged_kv_indices_buf")  # noqa: B009
    with pytest.raises(fa_attn.InputError, match="the buffer of lengths is torch.int64 on cpu: it must be"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers[:2], buffers[2].long())
    with pytest.raises(fa_attn.InputError, match="without a buffer of indices"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, False, buffers[0])


@pytest.mark.parametrize("rotary", [64, 0])
def test_latents_in_two_caches(rotary):
    torch.manual_seed(5)
    rows, keys, page, latents = (2, 1), (19, 6), 8, 128
    ckv, kpe = torch.randn(5, page, latents), torch.randn(5, page, rotary)
    q_nope, q_pe = torch.randn(3, 4, latents), torch.randn(3, 4, rotary)
    order = torch.tensor([4, 0, 2, 3], dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    lengths = torch.tensor(keys, dtype=torch.int32)
    types = (torch.float32, torch.float32)
    wrapper.plan(starts(rows), starts((3, 1)), order, lengths, 4, latents, rotary, page, True, 0.1, *types)
    own = []
    for n, pages in zip(keys, ([4, 0, 2], [3])):
        v = ckv[pages].reshape(-1, 1, latents)[:n]
        own.append((torch.cat((v, kpe[pages].flatten(0, 1)[:n, None]), -1), v))
    want = expected(torch.cat((q_nope, q_pe), -1), own, rows, causal=True, scale=0.1)
    check(wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True), want)
    got = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True, return_lse_base_on_e=True)
    check(got, (want[0], want[1] / math.log2(math.e)))
    table = torch.tensor([[4, 0, 2], [3, 3, 3]], dtype=torch.int32)
    with pytest.raises(fa_attn.InputError, match=r"kv_len and page_table after plan\(\)"):
        wrapper.run(q_nope, q_pe, ckv, kpe, kv_len=lengths, page_table=table)


def test_latents_without_a_plan():
    torch.manual_seed(5)
    page, latents, rotary, keys = 8, 128, 64, (19, 6)
    ckv, kpe = torch.randn(5, page, latents), torch.randn(5, page, rotary)
    q_nope, q_pe = torch.randn(2, 4, latents), torch.randn(2, 4, rotary)
    table = torch.tensor([[4, 0, 2], [3, 3, 3]], dtype=torch.int32)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE, backend="cutlass")
    made = wrapper.run(q_nope, q_pe, ckv, kpe, kv_len=torch.tensor(keys, dtype=torch.int32), page_table=table)
    own = []
    for n, pages in zip(keys, ([4, 0, 2], [3])):
        v = ckv[pages].reshape(-1, 1, latents)[:n]
        own.append((torch.cat((v, kpe[pages].flatten(0, 1)[:n, None]), -1), v))
    want = expected(torch.cat((q_nope, q_pe), -1), own, (1, 1), causal=True, scale=192**-0.5)
    check([made], want[:1])
    out = torch.empty(made.shape, dtype=torch.float8_e4m3fn)
    lengths = torch.tensor(keys, dtype=torch.int32)
    wrapper.run(q_nope, q_pe, ckv, kpe, kv_len=lengths, page_table=table, out=out, o_scale=0.25)
    check([out.float() / 4], want[:1], 0.04)
    with pytest.raises(fa_attn.InputError, match="kv_len and page_table belong together"):
        wrapper.run(q_nope, q_pe, ckv, kpe, kv_len=lengths)


def test_levels_and_states_merge():
    q, own, cache, pages = batch(keys=(24, 8, 4, 9), rows=(3, 3, 3, 3))
    # Of all requests the first 8 keys of the first, then their own.
    shared = own[0][:, :8]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    arrays = zip((starts((12,)), starts((2,)), pages[2][:2], torch.tensor([4], dtype=torch.int32)), pages)
    wrapper.plan(*map(list, arrays), HEADS, HEADS_KV, DIM, 4, causal=True, **TYPES)
    whole = [torch.cat((shared, kv), 1) for kv in own]
    check([wrapper.run(q, cache)], expected(q, whole, (3,) * 4, causal=True)[:1])
    parts = [flashinfer.single_prefill_with_kv_cache_return_lse(q, *own[at]) for at in (0, 1, 3)]
    joined = [torch.cat([own[at] for at in (0, 1, 3)], 1)]
    want = expected(q, joined, (12,))
    outs, lses = (torch.stack(x, 1) for x in zip(*parts))
    check(flashinfer.merge_states(outs, lses), want)
    two = flashinfer.merge_state(*parts[0], *parts[1])
    v, s = (x.clone() for x in parts[2])
    flashinfer.merge_state_in_place(v, s, *two)
    check((v, s), want)
    v, s = (x.clone() for x in parts[2])
    seen = torch.arange(12) % 2 == 0
    flashinfer.merge_state_in_place(v, s, *two, mask=seen)
    check((v[seen], s[seen]), [x[seen.numpy()] for x in want])
    assert torch.equal(v[~seen], parts[2][0][~seen]) and torch.equal(s[~seen], parts[2][1][~seen])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_join_their_pages(layout):
    _, own, cache, (_, indptr, indices, last) = batch(layout=layout)
    lengths = flashinfer.get_seq_lens(indptr, last, 4)
    assert lengths.tolist() == list(KEYS)
    new = (3, 1, 0, 2)
    request, place = flashinfer.get_batch_indices_positions(starts(new), lengths, 8)
    assert request.tolist() == [0, 0, 0, 1, 3, 3, -1, -1] and place.tolist() == [18, 19, 20, 7, 7, 8, 0, 0]
    rows = torch.cat([kv[:, kv.shape[1] - n :] for n, kv in zip(new, own)] + [torch.zeros(2, 2, 2, DIM)], 1)
    want, first = cache.clone(), 0
    for n, m, at in zip(new, KEYS, indptr.tolist()):
        for i in range(m - n, m):
            page = cache[indices[at + i // 4]]
            page[:, i % 4] if layout == "NHD" else page[:, :, i % 4]
            (page[:, i % 4] if layout == "NHD" else page[:, :, i % 4]).fill_(7.0)
        first += n
    flashinfer.append_paged_kv_cache(*rows, request, place, cache, indices, indptr, last, layout)
    assert torch.equal(cache.nan_to_num(nan=9.0), want.nan_to_num(nan=9.0))
    # Where no row has a place nothing is written.
    flashinfer.append_paged_kv_cache(*rows, request - 9, place, cache, indices, indptr, last, layout)
    assert torch.equal(cache.nan_to_num(nan=9.0), want.nan_to_num(nan=9.0))
    ckv = torch.zeros(cache.shape[0], 4, 8)
    flashinfer.append_paged_mla_kv_cache(
        torch.ones(1, 8), torch.ones(1, 0), request[:1], place[:1], ckv, ckv[..., :0], indices, indptr, last
    )
    assert ckv.sum() == 8 and ckv[indices[4], 2].sum() == 8


def test_refusals_name_what_works():
    q, own, cache, pages = batch()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    heads = (HEADS, HEADS_KV, DIM, 4)
    with pytest.raises(fa_attn.InputError, match=r"plan\(\) comes before run\(\)"):
        wrapper.run(q, cache)
    for options, error, match in (
        ({"prefix_len_ptr": q}, fa_attn.InputError, "prefix_len_ptr and token_pos_in_items_ptr belong"),
        ({"pos_encoding_mode": "ROPE"}, fa_attn.InputError, "pos_encoding_mode is 'ROPE': it must be"),
        ({"custom_mask": torch.ones(3)}, fa_attn.InputError, "custom_mask has 3 elements"),
        ({"packed_custom_mask": torch.ones(3)}, fa_attn.InputError, "packed_custom_mask has 3 bytes"),
    ):
        with pytest.raises(error, match=match):
            wrapper.plan(*pages, *heads, **options)
    with pytest.raises(fa_attn.InputError, match="a sequence has 25 keys: its pages of 4"):
        flashinfer.BatchAttention(device="cpu").plan(
            starts((3,)), starts((6,)), pages[2], torch.tensor([25]), *heads[:3], DIM, 4
        )
    wrapper.plan(*pages, *heads, **TYPES)
    for given, match in (
        ((q[1:], cache), "q has 14 rows: the plan's qo_indptr ends at 15"),
        ((q[:, 1:], cache), r"q and k have \(5, 2\) heads: the plan is of \(6, 2\)"),
        ((q, cache[:, :1]), "paged_kv_cache has the shape"),
        ((q, cache[:, :, :2]), "pages have 2 rows: the plan is of 4"),
    ):
        with pytest.raises(fa_attn.InputError, match=match):
            wrapper.run(*given)
    with pytest.raises(fa_attn.UnsupportedError, match="kv_cache_sf is not supported"):
        wrapper.run(q, cache, kv_cache_sf=q)


def test_what_is_no_plan_is_refused():
    q, _, cache, (indptr_q, indptr, indices, last) = batch()
    plan = dict(indptr_q=indptr_q, indptr=indptr, indices=indices, last=last)
    for change, error, match in (
        ({"last": last[:1]}, fa_attn.InputError, r"has the shape \(1,\): it must be \(4,\)"),
        ({"last": last - 9}, fa_attn.InputError, r"last_page_len\[0\] is -8: it must be from 0 to 4"),
        ({"last": last.tolist()}, fa_attn.InputTypeError, "is list: it must be a tensor of integers"),
        ({"indices": indices.tolist()}, fa_attn.InputTypeError, "paged_kv_indices must be a tensor"),
        ({"indptr_q": indptr_q + 0.7}, fa_attn.InputTypeError, "qo_indptr is torch.float32"),
    ):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
        with pytest.raises(error, match=match):
            wrapper.plan(*(plan | change).values(), HEADS, HEADS_KV, DIM, 4)
    sizes = sum(n * m for n, m in zip(ROWS, KEYS))
    for options, error, match in (
        ({"custom_mask": torch.zeros(sizes)}, fa_attn.InputError, "it must hold truth values"),
        ({"packed_custom_mask": torch.zeros(sizes)}, fa_attn.InputError, "it must hold bytes"),
        ({"window_left": "2"}, fa_attn.InputTypeError, "window_left is '2'"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 0.0}, fa_attn.InputError, "rope_scale is 0.0"),
    ):
        with pytest.raises(error, match=match):
            wrapper.plan(*plan.values(), HEADS, HEADS_KV, DIM, 4, **options)
    # What 32 bits do not hold is no page, not that of its lowest bits.
    wrapper.plan(indptr_q, indptr, indices.long() + 2**32, last, HEADS, HEADS_KV, DIM, 4, **TYPES)
    with pytest.raises(fa_attn.InputError, match="in the page table is 2147483647"):
        wrapper.run(q, cache)
    with pytest.raises(fa_attn.InputError, match="a head_dim of 15: it turns pairs"):
        flashinfer.single_prefill_with_kv_cache(*[torch.ones(2, 1, 15)] * 3, pos_encoding_mode="ROPE_LLAMA")


def test_rows_without_a_place_are_refused():
    one = torch.tensor([0, 0], dtype=torch.int32)
    starts_of_pages, pages = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5, 1], dtype=torch.int32)
    rows, cache = torch.ones(2, HEADS_KV, DIM), torch.zeros(6, 2, 4, HEADS_KV, DIM)
    for of, requests, places, named, match in (
        (rows, one, one + 8, pages, r"positions\[0\] is 8: the pages of request 0 hold 8 rows"),
        (rows, one, one - 1, pages, r"positions\[0\] is -1"),
        (rows, one + 1, one, pages, "batch_indices has 1: there are 1 requests"),
        (rows, one, one, pages + 1, "kv_indices names a page that is none"),
        (rows[:, :1], one, one, pages, "rows must be"),
    ):
        with pytest.raises(fa_attn.InputError, match=match):
            flashinfer.append_paged_kv_cache(of, of, requests, places, cache, named, starts_of_pages, one[:1])
    assert not cache.any()


def test_a_runs_scores_are_its_own():
    """A soft cap or a scale of one run is not that of the next."""
    q, own, cache, pages = batch()
    both = flashinfer.BatchAttention(device="cpu")
    lengths = torch.tensor(KEYS)
    both.plan(*pages[:3], lengths, HEADS, HEADS_KV, DIM, DIM, 4, q_data_type=q.dtype, kv_data_type=q.dtype)
    check(both.run(q, cache, logits_soft_cap=0.5), expected(q, own, softcap=0.5))
    check(both.run(q, cache), expected(q, own))
    sinks = flashinfer.BatchAttentionWithAttentionSinkWrapper(WORKSPACE)
    sinks.plan(*pages, HEADS, HEADS_KV, DIM, 4, **TYPES)
    check(sinks.run(q, cache, None, 0.7, return_lse=True), expected(q, own, scale=0.7))
    check(sinks.run(q, cache, return_lse=True), expected(q, own))


def test_plans_are_of_what_tensors_held():
    """The caller's tensors may change between a plan and a run that plans again."""
    q, own, cache, pages = batch()
    prefix = torch.randn(2, 7, HEADS_KV, DIM)
    whole = [torch.cat([prefix, kv], 1) for kv in own]
    shared = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE)
    beside = flashinfer.BatchPODWithPagedKVCacheWrapper(WORKSPACE)
    given = [x.clone() for x in pages]
    shared.plan(*given, HEADS, HEADS_KV, DIM, 4)
    beside.plan(*given, *given, HEADS, HEADS_KV, DIM, 4, **TYPES)
    for x in given:
        x.zero_()
    check([shared.run(q, *prefix, cache)], expected(q, whole)[:1])
    found = beside.run(q, cache, q, cache, causal_p=True)
    check(found, [expected(q, own, causal=True)[0], expected(q, own)[0]])


def test_slopes_are_not_kept_from_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call():
        x = torch.ones(3, 11, 16)
        return flashinfer.single_prefill_with_kv_cache(x, x, x, pos_encoding_mode="ALIBI")

    with FakeTensorMode():
        assert call().shape == (3, 11, 16)
    torch.testing.assert_close(call(), torch.ones(3, 11, 16))
    with FakeTensorMode():
        assert call().shape == (3, 11, 16)


STAND_IN = """
import fa_attn.flashinfer as ours
ours.stand_in()
import flashinfer
from flashinfer import merge_state, BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import single_prefill_with_kv_cache as prefill
assert prefill is ours.single_prefill_with_kv_cache
assert flashinfer.decode.fast_decode_plan is ours.fast_decode_plan
try:
    flashinfer.rmsnorm
except AttributeError as error:
    assert "fa_attn.flashinfer has no rmsnorm" in str(error)
else:
    raise SystemExit("no error")
"""


def test_it_stands_in_for_flashinfer():
    ran = subprocess.run([sys.executable, "-c", STAND_IN], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
