"""FlashInfer's wrappers for blocks of keys, for prefill beside decoding, and for shared prefixes.

pip install torch pytest && python -m pytest tests/test_flashinfer_blocks.py
"""

import pytest

torch = pytest.importorskip("torch")

from test_flashinfer_calls import attention, causal  # noqa: E402
from torch_cases import close, on, tensors  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn.flashinfer as flashinfer  # noqa: E402

HEADS, HEADS_KV, DIM = 4, 2, 64
SIZES = [(10, 12, 4, 3), (8, 16, 1, 16), (9, 5, 9, 1), (7, 6, 3, 2), (200, 192, 64, 64)]


def start(counts):
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def same(got, want, dtype):
    for x, y in zip(got, want):
        seen = torch.isfinite(y)
        assert torch.equal(torch.isfinite(x), seen)
        close(x.masked_fill(~seen, 0), y.masked_fill(~seen, 0), dtype)


def of_heads(q, k, v, seen):
    """The definition where each K/V head has a mask (heads_kv, rows, keys) of its own."""
    group = q.shape[1] // k.shape[1]
    parts = [
        attention(q[:, h * group : (h + 1) * group], k[:, h : h + 1], v[:, h : h + 1], seen[h], DIM**-0.5)
        for h in range(k.shape[1])
    ]
    return [torch.cat(x, 1) for x in zip(*parts)]


def expanded(blocks, rows, columns):
    """Truth values of blocks as those of elements, of sizes of blocks."""
    return blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def counted(listed, rows):
    """Causal masks as FlashInfer has them: of the keys that a row of blocks lists, one after another."""
    made, first = torch.zeros_like(listed), 0
    for n in rows.tolist():
        keys = listed[first].nonzero().flatten() if n else []
        for r in range(n):
            made[first + r, keys[: max(len(keys) - n + r + 1, 0)]] = True
        first += n
    return made


@on
@pytest.mark.parametrize("M, N, R, C", SIZES)
def test_listed_blocks_are_seen(device, dtype, M, N, R, C):
    torch.manual_seed(M)
    q, k, v = tensors(device, dtype, (M, HEADS, DIM), (N, HEADS_KV, DIM), (N, HEADS_KV, DIM), grad=False)
    blocks = torch.rand(-(-M // R), N // C) < 0.5
    if blocks.shape[0] > 2:
        blocks[1] = False
    sizes = torch.full((blocks.shape[0],), R)
    sizes[-1] = M - R * (blocks.shape[0] - 1)
    indptr, indices = start(blocks.sum(1)).to(device), blocks.nonzero()[:, 1].int().to(device)
    wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(0, device=device))

    def planned(*lists, **options):
        types = dict(q_data_type=dtype, o_data_type=dtype)
        wrapper.plan(*lists, M, N, R, C, HEADS, HEADS_KV, DIM, **types, **options)
        out = torch.empty_like(q)
        made = wrapper.run(q, k, v, return_lse=True)
        assert wrapper.run(q, k, v, out=out) is out and torch.equal(out, made[0])
        return made

    seen = expanded(blocks, sizes, C).to(device)
    same(planned(indptr, indices), attention(q, k, v, seen, DIM**-0.5), dtype)
    own = counted(seen.cpu(), sizes).to(device)
    same(planned(indptr, indices, causal=True), attention(q, k, v, own, DIM**-0.5), dtype)
    # A mask within blocks, as truth values and as bits.
    mask = torch.rand(indices.shape[0], R, C) < 0.6
    whole = torch.zeros(blocks.shape[0] * R, N, dtype=torch.bool)
    flat = []
    for at, (i, j) in enumerate(blocks.nonzero().tolist()):
        whole[i * R : (i + 1) * R, j * C : (j + 1) * C] = mask[at]
    for i, row in enumerate(blocks):
        flat.append(whole[i * R : i * R + int(sizes[i])][:, row.repeat_interleave(C)].reshape(-1))
    want = attention(q, k, v, whole[:M].to(device), DIM**-0.5)
    same(planned(indptr, indices, mask=mask.to(device)), want, dtype)
    ends = start(torch.tensor([x.numel() for x in flat]))
    packed, _ = flashinfer.segment_packbits(torch.cat(flat), ends, "little")
    same(planned(indptr, indices, packed_mask=packed.to(device)), want, dtype)
    # Blocks of each head.
    of_kv = torch.rand(HEADS_KV, *blocks.shape) < 0.5
    want = of_heads(q, k, v, expanded(of_kv, sizes, C).to(device))
    same(planned(None, None, block_mask=of_kv), want, dtype)
    same(planned(None, None, block_mask=of_kv.repeat_interleave(2, 0)), want, dtype)


@on
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_any_size(device, dtype, is_causal):
    torch.manual_seed(2)
    M, N = 40, 33
    q, k, v = tensors(device, dtype, (HEADS, M, DIM), (HEADS_KV, N, DIM), (HEADS_KV, N, DIM), grad=False)

    def parts(total, count):
        cuts = torch.randint(0, total + 1, (HEADS_KV, count - 1)).sort(1).values
        ends = torch.full((HEADS_KV, 1), total)
        return torch.cat((cuts, ends), 1) - torch.cat((ends * 0, cuts), 1)

    rows, columns, blocks = parts(M, 5), parts(N, 6), torch.rand(HEADS_KV, 5, 6) < 0.6
    seen = [expanded(*of) for of in zip(blocks, rows, columns)]
    if is_causal:
        seen = [counted(x, n) for x, n in zip(seen, rows)]
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0, device=device))
    given = (blocks.to(device), rows.int().to(device), columns.int().to(device))
    wrapper.plan(*given, HEADS, HEADS_KV, DIM, causal=is_causal, q_data_type=dtype)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    turned = [x.transpose(0, 1) for x in (q, k, v)]
    want = of_heads(*turned, torch.stack(seen).to(device))
    same((out.transpose(0, 1), lse.T), want, dtype)
    room = torch.empty_like(out)
    assert wrapper.run(q, k, v, out=room) is room and torch.equal(room, out)


def test_blocks_that_are_refused():
    wrapper = flashinfer.BlockSparseAttentionWrapper(torch.empty(0))
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    sizes = (8, 8, 4, 4, HEADS, HEADS_KV, DIM)
    for given, error, match in (
        ((indptr, torch.tensor([0, 2, 1])), fa_attn.InputError, "there are blocks 0 to 1"),
        ((indptr, torch.tensor([1, 1, 1])), fa_attn.InputError, "a block of a row twice"),
        ((indptr[:2], indices[:2]), fa_attn.InputError, "8 rows in blocks of 4 have 3"),
        ((None, None), fa_attn.InputError, "give both, or block_mask"),
    ):
        with pytest.raises(error, match=match):
            wrapper.plan(*given, *sizes)
    with pytest.raises(fa_attn.UnsupportedError, match="pos_encoding_mode is 'ALIBI' with blocks"):
        wrapper.plan(indptr, indices, *sizes, pos_encoding_mode="ALIBI")
    with pytest.raises(fa_attn.InputError, match="mask has the shape"):
        wrapper.plan(indptr, indices, *sizes, mask=torch.ones(3, 4, 3))


def pages_of(device, dtype, lengths, page):
    """(cache, keys and values of each request, starts, pages, lengths of last pages)."""
    counts = torch.tensor([-(-n // page) for n in lengths])
    order = torch.randperm(int(counts.sum())).int().to(device)
    cache = torch.randn(len(order), 2, page, HEADS_KV, DIM).to(device, dtype)
    ends, own = start(counts), []
    for i, n in enumerate(lengths):
        rows = cache[order[ends[i] : ends[i + 1]].long()]
        own.append([rows[:, j].flatten(0, 1)[:n] for j in (0, 1)])
    last = torch.tensor([(n - 1) % page + 1 for n in lengths], dtype=torch.int32, device=device)
    return cache, own, (ends.to(device), order, last)


@on
def test_a_prefill_beside_decoding(device, dtype):
    torch.manual_seed(4)
    workspace = torch.empty(0, device=device)
    cache, own, pages = pages_of(device, dtype, (13, 4, 30), 8)
    q_p, k_p, v_p, q_d = tensors(
        device, dtype, (9, HEADS, DIM), (20, HEADS_KV, DIM), (20, HEADS_KV, DIM), (3, HEADS, DIM), grad=False
    )
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace)
    wrapper.plan(*pages, HEADS, HEADS_KV, DIM, 8, data_type=dtype, sm_scale=0.2)
    prefill, decode = wrapper.run(q_p, k_p, v_p, q_d, cache, causal_p=True, v_scale=3.0, return_lse_d=True)
    close(prefill, attention(q_p, k_p, v_p, causal(9, 20, device), DIM**-0.5)[0], dtype)
    batch = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace)
    rows = (torch.tensor([0, 4, 4, 9]).int().to(device), torch.arange(4).int().to(device))
    batch.plan(rows[0], *pages, rows[1], *pages, HEADS, HEADS_KV, DIM, 8, data_type=dtype, sm_scale=0.2)
    for is_causal in (True, False, True):
        outs, lses = batch.run(q_p, cache, q_d, cache, causal_p=is_causal, v_scale=3.0, return_lse=True)
        for i, keys in enumerate(own):
            n = keys[0].shape[0]
            first = slice(int(rows[0][i]), int(rows[0][i + 1]))
            count = first.stop - first.start
            seen = causal(count, n, device) if is_causal else torch.ones(count, n, device=device) > 0
            if count:
                same((outs[0][first], lses[0][first]), attention(q_p[first], *keys, seen, 0.2), dtype)
            want, lse = attention(q_d[i : i + 1], *keys, causal(1, n, device), 0.2)
            for got, got_lse in (decode, (outs[1], lses[1])):
                same((got[i : i + 1], got_lse[i : i + 1]), (3 * want, lse), dtype)
    with pytest.raises(fa_attn.UnsupportedError, match="custom_mask_d is not supported"):
        wrapper.run(q_p, k_p, v_p, q_d, cache, custom_mask_d=q_d)


@on
def test_a_prefix_that_requests_share(device, dtype):
    torch.manual_seed(5)
    workspace = torch.empty(0, device=device)
    cache, own, pages = pages_of(device, dtype, (13, 4, 30), 8)
    k, v, q, q_d = tensors(
        device, dtype, (20, HEADS_KV, DIM), (20, HEADS_KV, DIM), (9, HEADS, DIM), (3, HEADS, DIM), grad=False
    )
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace)
    decode.begin_forward(*pages, HEADS, HEADS_KV, DIM, 8, data_type=dtype)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace)
    rows = torch.tensor([0, 2, 5, 9]).int().to(device)
    prefill.begin_forward(rows, *pages, HEADS, HEADS_KV, DIM, 8)
    decoded, filled = decode.forward(q_d, k, v, cache), prefill.forward(q, k, v, cache, causal=True)
    for i, keys in enumerate(own):
        keys = [torch.cat(x) for x in zip((k, v), keys)]
        n = keys[0].shape[0]
        want, _ = attention(q_d[i : i + 1], *keys, causal(1, n, device), DIM**-0.5)
        close(decoded[i : i + 1], want, dtype)
        first = slice(int(rows[i]), int(rows[i + 1]))
        seen = causal(first.stop - first.start, n, device)
        close(filled[first], attention(q[first], *keys, seen, DIM**-0.5)[0], dtype)


@on
def test_scores_of_a_wrappers_own(device, dtype):
    """A program in place of `jit_args`."""
    torch.manual_seed(6)
    workspace = torch.empty(0, device=device)
    cache, own, pages = pages_of(device, dtype, (13, 4, 30), 8)
    q, k, v = tensors(device, dtype, (9, HEADS, DIM), (47, HEADS_KV, DIM), (47, HEADS_KV, DIM), grad=False)
    rows = torch.tensor([0, 2, 5, 9]).int().to(device)
    text = "array gain: f32[_];\nscore = s * gain[h];\nmask = (k - q) % 2 == 0;"
    gain = torch.linspace(0.5, 2, HEADS, device=device)
    program = fa_attn.Program(text, {"gain": gain})
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, jit_args=program)
    paged.plan(rows, *pages, HEADS, HEADS_KV, DIM, 8, q_data_type=dtype)
    got = paged.run(q, cache)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, jit_args=program)
    ends = start(torch.tensor([13, 4, 30])).to(device)
    ragged.plan(rows, ends, HEADS, HEADS_KV, DIM, q_data_type=dtype)
    packed = [torch.cat([keys[j] for keys in own]) for j in (0, 1)]
    close(ragged.run(q, *packed), got.double(), dtype)
    for i, keys in enumerate(own):
        first = slice(int(rows[i]), int(rows[i + 1]))
        part, n = q[first], keys[0].shape[0]
        at = torch.arange(part.shape[0], device=device)[:, None], torch.arange(n, device=device)[None]
        want, _ = attention(
            part.double() * gain.double()[:, None], *keys, (at[1] - at[0]) % 2 == 0, DIM**-0.5
        )
        close(got[first], want, dtype)
    with pytest.raises(
        fa_attn.UnsupportedError, match="jit_args is tuple: FlashInfer's variants are CUDA's text"
    ):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, jit_args=("name", "struct Variant {};"))
