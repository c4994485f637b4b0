"""FlashInfer's functions by TensorRT-LLM's, XQA's and cuDNN's names, beside attention in f64.

pip install torch pytest && python -m pytest tests/test_flashinfer_calls.py
"""

import math

import pytest

torch = pytest.importorskip("torch")

from torch_cases import close, on, tensors  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn.flashinfer as flashinfer  # noqa: E402

HEADS, HEADS_KV, DIM, PAGE, SCALE = 6, 2, 64, 8, 0.11
LENGTHS = (19, 5, 33)
LOG2_E = math.log2(math.e)


def attention(q, k, v, seen, scale=SCALE, sinks=None):
    """(out, lse in base 2) of one request in f64: q (rows, heads, columns), seen (rows, keys)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).T * LOG2_E


def causal(rows, keys, device, left=None):
    at = torch.arange(rows, device=device)[:, None] + keys - rows
    k = torch.arange(keys, device=device)[None]
    return (k <= at) & ((k >= at - left) if left is not None else True)


class Batch:
    """Requests on pages (pages, 2, heads_kv, page, head_dim), NaN where there is no key."""

    def __init__(self, device, dtype, heads_kv=HEADS_KV, dim=DIM, values=None):
        torch.manual_seed(3)
        self.device, columns = device, -(-max(LENGTHS) // PAGE)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        order = torch.randperm(3 * columns + 2)[: 3 * columns].int()
        self.table = order.view(3, columns).to(device)
        cache = torch.full((3 * columns + 2, 2, heads_kv, PAGE, dim), float("nan")).to(device, dtype)
        self.own = []
        for pages, n in zip(self.table.long(), LENGTHS):
            rows = torch.randn(2, n, heads_kv, dim).to(device, dtype)
            for at in range(0, n, PAGE):
                part = rows[:, at : at + PAGE].transpose(1, 2)
                cache[pages[at // PAGE], :, :, : part.shape[2]] = part
            # What a kernel reads behind a request's last key is a number.
            last = pages[(n - 1) // PAGE]
            cache[last] = cache[last].nan_to_num()
            self.own.append(rows)
        self.cache = cache
        # Entries behind a request's pages name any page.
        for i, n in enumerate(LENGTHS):
            self.table[i, -(-n // PAGE) :] = 7


def bits_of(mask):
    """(.., tokens) truth values as XQA's words of 16 bits."""
    words = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    words = (words << torch.arange(32, device=mask.device)).sum(-1)
    return (words - (words >= 2**31).long() * 2**32).int().view(torch.uint16)


@on
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "window", "draft", "sinks"])
def test_decoding_by_tensorrts_name(device, dtype, tokens, kind):
    batch = Batch(device, dtype)
    (q,) = tensors(device, dtype, (3 * tokens, HEADS, DIM), grad=False)
    left = 4 if kind == "window" else None
    sinks = torch.linspace(-1, 2, HEADS, device=device) if kind == "sinks" else None
    drafts = torch.rand(3, tokens, tokens, device=device) > 0.4 if kind == "draft" else None
    options = dict(window_left=-1 if left is None else left, sinks=sinks, return_lse=True)
    uniform = {} if drafts is None else {"mask": bits_of(drafts)}
    packed = {} if drafts is None else {"mask": bits_of(drafts.flatten(0, 1))}
    sizes = (None, batch.table, batch.lengths, max(LENGTHS))
    calls = [
        flashinfer.trtllm_batch_decode_with_kv_cache(
            q, batch.cache, *sizes, SCALE, 1.5, q_len_per_req=tokens, **uniform, **options
        )
    ]
    starts = torch.arange(4, dtype=torch.int32, device=device) * tokens
    factors = [torch.tensor([x], device=device) for x in (SCALE, 1.5)]
    calls.append(
        flashinfer.trtllm_batch_decode_with_kv_cache(
            q,
            batch.cache.unbind(1),
            *sizes,
            *factors,
            cum_seq_lens_q=starts,
            max_q_len=tokens,
            q_len_per_req=None,
            **packed,
            **options,
        )
    )
    both = torch.stack((batch.table, batch.table), 1)
    calls.append(
        flashinfer.trtllm_batch_decode_with_kv_cache(
            q,
            batch.cache.transpose(2, 3).contiguous(),
            None,
            both,
            batch.lengths.view(torch.uint32),
            max(LENGTHS),
            1.0,
            1.5,
            bmm1_scale_log2=factors[0] * LOG2_E,
            kv_layout="NHD",
            uses_shared_paged_kv_idx=False,
            q_len_per_req=tokens,
            **uniform,
            **options,
        )
    )
    out = torch.empty_like(q)
    given = dict(q_len_per_req=tokens, out=out, sinks=sinks, window_left=options["window_left"], **uniform)
    made = flashinfer.xqa_batch_decode_with_kv_cache(
        q, batch.cache, *sizes, SCALE, 1.5, kv_layout="HND", **given
    )
    assert made is out
    room = torch.empty(3, 1, *([tokens] if tokens > 1 else []), HEADS, DIM, device=device, dtype=dtype)
    flashinfer.xqa(
        q.view(room.shape),
        *batch.cache.unbind(1),
        batch.table,
        batch.lengths[:, None],
        room,
        None,
        None,
        HEADS_KV,
        PAGE,
        None if sinks is None else sinks.view(HEADS_KV, -1),
        SCALE / 1.5 * DIM**0.5,
        1.5,
        0 if left is None else left + 1,
        "HND",
        q_seq_len=tokens,
        mask=uniform.get("mask"),
    )
    calls += [(out, calls[0][1]), (room.view(q.shape), calls[0][1])]
    for i, n in enumerate(LENGTHS):
        rows = slice(i * tokens, (i + 1) * tokens)
        seen = causal(tokens, n, device, left)
        if drafts is not None:
            seen = torch.cat((seen.new_ones(tokens, n - tokens), drafts[i]), 1)
        want, lse = attention(q[rows], *batch.own[i], seen, sinks=sinks)
        for made, made_lse in calls:
            close(made[rows], 1.5 * want, dtype)
            close(made_lse[rows], lse, dtype)


@on
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_heads_have_pages_of_their_own(device, dtype, tokens, layout):
    cache = torch.randn(20, 2, HEADS_KV, PAGE, DIM).to(device, dtype)
    (q,) = tensors(device, dtype, (3 * tokens, HEADS, DIM), grad=False)
    table = torch.stack([torch.randperm(20)[:15].view(3, 5) for _ in range(HEADS_KV)]).int().to(device)
    lengths = torch.randint(3, 5 * PAGE, (HEADS_KV, 3)).int().to(device)
    given = cache if layout == "HND" else cache.transpose(2, 3).contiguous()
    made = flashinfer.trtllm_batch_decode_with_kv_cache(
        q,
        given,
        None,
        table,
        lengths,
        5 * PAGE,
        SCALE,
        kv_layout=layout,
        q_len_per_req=tokens,
        enable_block_sparse_attention=True,
        return_lse=True,
    )
    group = HEADS // HEADS_KV
    for i in range(3):
        for h in range(HEADS_KV):
            n = int(lengths[h, i])
            rows, heads = slice(i * tokens, (i + 1) * tokens), slice(h * group, (h + 1) * group)
            own = [cache[table[h, i].long(), j, h].reshape(-1, 1, DIM)[:n] for j in (0, 1)]
            want = attention(q[rows, heads], *own, causal(tokens, n, device))
            for x, y in zip(made, want):
                close(x[rows, heads], y, dtype)


@on
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_by_other_names(device, dtype, is_causal):
    batch = Batch(device, dtype)
    rows = (4, 0, 7)
    starts = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 19, 24, 57], dtype=torch.int32, device=device)
    (q,) = tensors(device, dtype, (11, HEADS, DIM), grad=False)
    sinks = torch.linspace(-1, 2, HEADS, device=device)
    k, v = (torch.cat([own[j] for own in batch.own]) for j in (0, 1))
    paged = (None, batch.table, batch.lengths, 7, max(LENGTHS), SCALE, 1.0, 3, starts, starts_k)
    ragged = (None, batch.lengths, 7, max(LENGTHS), SCALE, 1.0, -1.0, 3, -1, starts, starts_k, None)
    used = torch.tensor(rows, dtype=torch.int32, device=device).view(3, 1, 1, 1)
    bounds = dict(max_token_per_sequence=7, max_sequence_kv=max(LENGTHS), causal=is_causal, return_lse=True)
    counts = dict(actual_seq_lens_q=used, actual_seq_lens_kv=batch.lengths.view(3, 1, 1, 1))
    tokens = dict(batch_offsets_q=starts, batch_offsets_k=starts_k, batch_offsets_units="tokens")
    width, width_k = HEADS * DIM, HEADS_KV * DIM
    elements = dict(
        batch_offsets_q=starts * width,
        batch_offsets_o=starts * width,
        batch_offsets_k=starts_k * width_k,
        batch_offsets_v=starts_k * width_k,
    )
    out = torch.empty_like(q)
    mode = "causal" if is_causal else "padding"
    v2 = (None, batch.lengths, 7, max(LENGTHS), SCALE, 1.0, 3, starts, starts_k)
    cudnn = flashinfer.cudnn_batch_prefill_with_kv_cache
    made = {
        "context": flashinfer.trtllm_batch_context_with_kv_cache(
            q, batch.cache, *paged, causal=is_causal, return_lse=True
        ),
        "sinks": flashinfer.trtllm_batch_context_with_kv_cache(
            q, batch.cache, *paged, causal=is_causal, sinks=[sinks], out=out, return_lse=True
        ),
        "ragged": flashinfer.trtllm_ragged_attention_deepseek(q, k, v, *ragged, is_causal, True),
        "fmha": flashinfer.trtllm_fmha_v2_prefill(
            (q, batch.cache), "Q_PAGED_KV_HND", *v2, batch.table, mask_mode=mode
        ),
        "kv": flashinfer.trtllm_fmha_v2_prefill(
            (q, torch.stack((k, v), 1)), "CONTIGUOUS_Q_KV", *v2, mask_mode=mode
        ),
        "apart": flashinfer.trtllm_fmha_v2_prefill((q, k, v), "SEPARATE_Q_K_V", *v2, mask_mode=mode),
        "cudnn": cudnn(q, *batch.cache.unbind(1), SCALE, None, block_tables=batch.table, **bounds, **counts),
        "tokens": cudnn(q, k, v, SCALE, None, **bounds, **tokens),
        "elements": cudnn(q, k, v, SCALE, None, **bounds, **counts, **elements),
    }
    assert made["sinks"][0] is out
    for i, n in enumerate(LENGTHS):
        own, first = slice(int(starts[i]), int(starts[i + 1])), rows[i]
        seen = (
            causal(first, n, device) if is_causal else torch.ones(first, n, device=device, dtype=torch.bool)
        )
        for name, got in made.items() if first else ():
            out, lse = got if isinstance(got, tuple) else (got, None)
            of = sinks if name == "sinks" else None
            want, want_lse = attention(q[own], *batch.own[i], seen, sinks=of)
            close(out[own], want, dtype)
            if lse is not None and lse.dim() == 3:
                close(lse[i, :first], want_lse / LOG2_E, dtype)
                assert (lse[i, first:] == -math.inf).all()
            elif lse is not None:
                close(lse[own], want_lse, dtype)


@on
def test_fmha_masks(device, dtype):
    batch = Batch(device, dtype)
    starts_k = torch.tensor([0, 19, 24, 57], dtype=torch.int32, device=device)
    q, k, v = tensors(device, dtype, *[(57, HEADS, DIM)] * 3, grad=False)
    sizes = (None, batch.lengths, max(LENGTHS), max(LENGTHS), SCALE, 1.0, 3, starts_k, starts_k)
    packed = torch.stack((q, k, v), 1)
    for options in (
        {"mask_mode": "sliding_window", "window_left": 5},
        {"mask_mode": "chunked", "chunked_attention_size": 8},
        {"logits_soft_cap_scale": 3.0},
    ):
        made = flashinfer.trtllm_fmha_v2_prefill(packed, "PACKED_QKV", *sizes, **options)
        want = fa_attn.flash_attn_varlen_func(
            *packed.unbind(1),
            starts_k,
            starts_k,
            max(LENGTHS),
            max(LENGTHS),
            softmax_scale=SCALE,
            causal=True,
            window_size=(options.get("window_left", -1), -1),
            softcap=options.get("logits_soft_cap_scale", 0.0),
            attention_chunk=options.get("chunked_attention_size"),
        )
        assert torch.equal(made, want)


@on
def test_decoding_by_cudnns_name(device, dtype):
    batch = Batch(device, dtype)
    (q,) = tensors(device, dtype, (3, HEADS, DIM), grad=False)
    offsets = torch.arange(4, device=device) * HEADS * DIM
    k, v = batch.cache.unbind(1)
    lengths = batch.lengths.view(3, 1, 1, 1)
    options = dict(max_sequence_kv=max(LENGTHS), actual_seq_lens_kv=lengths, block_tables=batch.table)
    made = flashinfer.cudnn_batch_decode_with_kv_cache(
        q, k, v, SCALE, None, batch_offsets_q=offsets, batch_offsets_o=offsets, **options
    )
    for i, n in enumerate(LENGTHS):
        want, _ = attention(q[i : i + 1], *batch.own[i], causal(1, n, device))
        close(made[i : i + 1], want, dtype)
    with pytest.raises(fa_attn.UnsupportedError, match="batch_offsets_o names other rows"):
        flashinfer.cudnn_batch_decode_with_kv_cache(
            q, k, v, SCALE, None, batch_offsets_o=offsets + 1, **options
        )


def latents(device, dtype, rank, rotary):
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("latents are read by kernels of 9.0")
    batch = Batch(device, dtype, 1, rank + rotary)
    batch.cache = batch.cache[:, 0, 0]
    batch.own = [(own[0], own[0][..., :rank]) for own in batch.own]
    return batch


@on
@pytest.mark.parametrize("rotary", [64, 0])
@pytest.mark.parametrize("tokens", [1, 3])
def test_latents_by_tensorrts_name(device, dtype, rotary, tokens):
    rank, sinks = 512, torch.linspace(-1, 2, HEADS, device=device)
    batch = latents(device, dtype, rank, rotary)
    (q,) = tensors(device, dtype, (3, tokens, HEADS, rank + rotary), grad=False)
    scale = 0.03
    sizes = (None, 128, rank, rotary, batch.table, batch.lengths, max(LENGTHS))
    name = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    options = dict(bmm1_scale=scale, bmm2_scale=2.0, return_lse=True)
    starts = torch.arange(4, dtype=torch.int32, device=device) * tokens
    whole = dict(enable_dcp=True, cp_world=2, cp_rank=1, causal_seqlens_kv_global=2 * batch.lengths)
    room = torch.empty(3, tokens, HEADS, rank, device=device, dtype=dtype)
    made = {
        "plain": name(q, batch.cache, *sizes, **options),
        "tensor": name(q, batch.cache[:, None], *sizes, **{**options, "bmm1_scale": torch.tensor(scale)}),
        "sinks": name(q, batch.cache, *sizes, sinks=sinks, out=room, **options),
        "packed": name(
            q.flatten(0, 1), batch.cache, *sizes, cum_seq_lens_q=starts, max_q_len=tokens, **options
        ),
        "rank": name(q, batch.cache, *sizes, **whole, **options),
    }
    assert made["sinks"][0] is room
    for i, n in enumerate(LENGTHS):
        for kind, (out, lse) in made.items():
            seen = causal(tokens, n, device)
            if kind == "rank":
                at = torch.arange(tokens, device=device)[:, None]
                seen = 2 * torch.arange(n, device=device)[None] + 1 <= 2 * n - tokens + at
            of = sinks if kind == "sinks" else None
            want, want_lse = attention(q[i], *batch.own[i], seen, scale, of)
            close(out.view(3, tokens, HEADS, rank)[i], 2 * want, dtype)
            close(lse.view(3, tokens, HEADS)[i], want_lse, dtype)
    xqa = flashinfer.xqa_batch_decode_with_kv_cache_mla(q, batch.cache, *sizes, None, scale, 2.0)
    assert torch.equal(xqa, made["plain"][0])
    if tokens == 1:
        out = torch.empty_like(room)
        rows = batch.cache.flatten(0, 1)
        lengths = batch.lengths[:, None]
        flashinfer.xqa_mla(q, rows, rows, batch.table, lengths, out, None, None, PAGE, scale / 2, 2.0)
        close(out, made["plain"][0], dtype)


@on
@pytest.mark.parametrize("tokens", [1, 2])
def test_named_rows_by_tensorrts_name(device, dtype, tokens):
    rank, rotary, top = 512, 64, 16
    batch = latents(device, dtype, rank, rotary)
    cache = batch.cache.nan_to_num()
    (q,) = tensors(device, dtype, (3, tokens, HEADS, rank + rotary), grad=False)
    total = cache.shape[0] * PAGE
    named = torch.stack([torch.randperm(total)[:top] for _ in range(3 * tokens)]).view(3, tokens, top)
    named[0, 0, 11:] = -1
    named = named.int().to(device)
    lengths = torch.tensor([40, 9, 3], dtype=torch.int32, device=device)
    sizes = (None, 128, rank, rotary)
    options = dict(sparse_mla_top_k=top, bmm1_scale=0.03, return_lse=True)
    name = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    made = [name(q, cache, *sizes, named, lengths, 40, **options)]
    own = torch.stack([lengths - tokens + 1 + j for j in range(tokens)], 1)
    made.append(name(q, cache, *sizes, named, own, 40, **options))
    made.append(name(q, cache, *sizes, named, None, 40, sparse_mla_top_k_lens=own.flatten(), **options))
    starts = torch.arange(4, dtype=torch.int32, device=device) * tokens
    packed = dict(cum_seq_lens_q=starts, max_q_len=tokens)
    made.append(name(q.flatten(0, 1), cache, *sizes, named.flatten(0, 1), lengths, 40, **packed, **options))
    for i in range(3):
        for j in range(tokens):
            rows = named[i, j, : max(int(own[i, j]), 0)]
            rows = cache.flatten(0, 1)[rows[rows >= 0].long()][:, None]
            seen = torch.ones(1, rows.shape[0], dtype=torch.bool, device=device)
            want, lse = attention(q[i, j][None], rows, rows[..., :rank], seen, 0.03)
            for out, out_lse in made:
                close(out.view(3, tokens, HEADS, rank)[i, j], want[0], dtype)
                close(out_lse.view(3, tokens, HEADS)[i, j], lse[0], dtype)


def rows_of_584(rows):
    """(pages of bytes (pages, page, 584), what they stand for): scales of 1."""
    codes, turned = rows[..., :448].to(torch.float8_e4m3fn), rows[..., 448:].bfloat16()
    whole = torch.cat([x.contiguous().view(torch.uint8) for x in (codes, turned)], -1)
    scales = torch.full((*rows.shape[:2], 8), 127, dtype=torch.uint8, device=rows.device)
    cache = torch.cat([whole.flatten(1), scales.flatten(1)], 1).view(*rows.shape[:2], 584)
    return cache, torch.cat([codes.double(), turned.double()], -1)


@on
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kind", ["numbers", "codes", "bytes"])
def test_window_and_compressed_rows_of_deepseek_v4(device, dtype, kind, tokens):
    """By one table for both caches with the keys of each request, and by tables apart; with sinks."""
    dtype = torch.bfloat16 if kind != "numbers" and dtype is torch.float32 else dtype
    torch.manual_seed(6)
    window, compressed = torch.randn(50, 4, 512).to(device, dtype), torch.randn(12, 2, 512).to(device, dtype)
    exact = [x.double() for x in (window, compressed)]
    if kind == "codes":
        window, compressed = (x.to(torch.float8_e4m3fn) for x in (window, compressed))
        exact = [x.double() for x in (window, compressed)]
    elif kind == "bytes":
        (window, own), (compressed, more) = rows_of_584(window), rows_of_584(compressed)
        exact = [own, more]
    own, more = (x.flatten(0, 1)[:, None] for x in exact)
    q, sinks = tensors(device, dtype, (3, tokens, HEADS, 512), (HEADS,), grad=False)
    sinks, total = sinks.float(), 3 * tokens
    named = torch.stack([torch.randperm(200)[:128] for _ in range(total)]).int().to(device)
    extra = torch.stack([torch.randperm(24)[:8] for _ in range(total)]).int().to(device)
    extra[0, 2] = -1
    lengths = torch.tensor([300, 9, 3], dtype=torch.int32, device=device)
    of_window = torch.stack([lengths - tokens + 1 + j for j in range(tokens)], 1).flatten().clamp(0, 128)
    of_more = torch.tensor([8, 0, 5, 3, 8, 1], dtype=torch.int32, device=device)[:total]
    both = torch.cat((named, extra), 1)
    name, scale = flashinfer.trtllm_batch_decode_sparse_mla_dsv4, 0.03
    combined = dict(sparse_topk_lens=of_more + 128, seq_lens=lengths, sinks=sinks)
    options = dict(bmm1_scale=scale, bmm2_scale=0.5)
    made = [name(q, window, None, both, compressed, **combined, **options)]
    starts = torch.arange(4, dtype=torch.int32, device=device) * tokens
    wide = dict(kv_layout="NHD", cum_seq_lens_q=starts, max_q_len=tokens, **combined, **options)
    made.append(name(q.flatten(0, 1), window[:, :, None], None, both, compressed[:, :, None], **wide))
    apart = dict(swa_topk_lens=of_window, extra_sparse_indices=extra, extra_sparse_topk_lens=of_more)
    out = torch.empty_like(q)
    numbers = {k: torch.tensor([v], device=device) for k, v in options.items()}
    assert name(q, window[:, None], None, named, compressed, out=out, sinks=sinks, **apart, **numbers) is out
    made.append(out)
    alone = name(q, window, None, named, swa_topk_lens=of_window, **options)
    assert all(x.dtype is dtype for x in made)
    for i in range(total):
        seen = own[named[i, : of_window[i]].long()]
        rows = extra[i, : of_more[i]]
        for have, keys, sink in (
            (made, torch.cat((seen, more[rows[rows >= 0].long()])), sinks),
            ([alone], seen, None),
        ):
            sees = torch.ones(1, keys.shape[0], dtype=torch.bool, device=device)
            want = 0.5 * attention(q.flatten(0, 1)[i][None], keys, keys, sees, scale, sink)[0]
            for part in have:
                # P is of 8 bits, too, where a kernel computes in 8 bits, and q is rounded once more.
                close(part.view(total, HEADS, 512)[i][None], want, dtype, 4)
    for mistake, words in (
        (dict(combined, **apart), "leave the others out"),
        (dict(sparse_topk_lens=of_more + 128), "give seq_lens too"),
        (dict(apart, hca_seq_lens=lengths), "hca_seq_lens"),
    ):
        with pytest.raises(ValueError, match=words):
            name(q, window, None, both, compressed, **mistake)
    with pytest.raises(fa_attn.InputError, match="compressed_kv_cache is None"):
        name(q, window, None, named, **apart)


@on
def test_codes_by_tensorrts_name(device, dtype):
    if dtype is torch.float32:
        dtype = torch.bfloat16
    batch = Batch(device, dtype)
    codes = batch.cache.nan_to_num().to(torch.float8_e4m3fn)
    own = [x.to(torch.float8_e4m3fn).to(dtype) for x in batch.own]
    (q,) = tensors(device, dtype, (3, HEADS, DIM), grad=False)
    sizes = (None, batch.table, batch.lengths, max(LENGTHS), SCALE, 0.5)
    name = flashinfer.trtllm_batch_decode_with_kv_cache
    made = name(q, codes, *sizes)
    of_codes = name(q.to(torch.float8_e4m3fn), codes, *sizes, out_dtype=dtype)
    narrow = name(q.to(torch.float8_e4m3fn), codes, *sizes)
    assert narrow.dtype is torch.float8_e4m3fn
    out = torch.empty_like(narrow)
    assert name(q.to(torch.float8_e4m3fn), codes, *sizes, out=out) is out
    assert torch.equal(out.view(torch.uint8), narrow.view(torch.uint8))
    for i, n in enumerate(LENGTHS):
        seen = causal(1, n, device)
        close(made[i : i + 1], 0.5 * attention(q[i : i + 1], *own[i], seen)[0], dtype)
        want = 0.5 * attention(q[i : i + 1].to(torch.float8_e4m3fn).to(dtype), *own[i], seen)[0]
        # P is of 8 bits, too, where a kernel computes in 8 bits.
        close(of_codes[i : i + 1], want, dtype, 4)
        close(narrow[i : i + 1].to(dtype), want, dtype, 8)


def test_refusals_name_what_works():
    batch = Batch("cpu", torch.float32)
    q = torch.randn(3, HEADS, DIM)
    sizes = (None, batch.table, batch.lengths, max(LENGTHS))
    name = flashinfer.trtllm_batch_decode_with_kv_cache
    for given, error, match in (
        ({"kv_cache_sf": (q, q)}, fa_attn.UnsupportedError, "kv_cache_sf is not supported"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, fa_attn.UnsupportedError, "skip_softmax"),
        ({"out_dtype": "nvfp4"}, fa_attn.UnsupportedError, "results in NVFP4: give out"),
        ({"q_len_per_req": 2}, fa_attn.InputError, "query has 3 rows: 3 requests have 2 each"),
        ({"mask": torch.zeros(3, 2, 2, dtype=torch.uint16)}, fa_attn.InputError, "mask has the shape"),
        ({"uses_shared_paged_kv_idx": False}, fa_attn.InputError, r"tables of K and V are \(requests, 2"),
        (
            {"enable_block_sparse_attention": True, "window_left": 3},
            fa_attn.UnsupportedError,
            "enable_block_sparse_attention with window_left: leave one",
        ),
        ({"out": torch.empty(2, HEADS, DIM)}, fa_attn.InputError, "out has the shape"),
    ):
        with pytest.raises(error, match=match):
            name(q, batch.cache, *sizes, **given)
    with pytest.raises(fa_attn.UnsupportedError, match="q has 2 beams: give one"):
        flashinfer.xqa(
            q[:, None].expand(3, 2, HEADS, DIM),
            *batch.cache.unbind(1),
            *sizes[1:3],
            q,
            None,
            None,
            2,
            8,
            kv_layout="HND",
        )
    with pytest.raises(fa_attn.InputError, match="mask_mode is 'chunked' without chunked_attention_size"):
        flashinfer.trtllm_fmha_v2_prefill(
            (q, batch.cache),
            "Q_PAGED_KV_HND",
            None,
            batch.lengths,
            1,
            33,
            1.0,
            1.0,
            3,
            None,
            None,
            batch.table,
            mask_mode="chunked",
        )
