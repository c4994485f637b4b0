"""Torch tensors as serving engines give them: room for the result, tables that are part of a longer one,
arguments of several generations of FlashAttention at once.

pip install torch pytest && python -m pytest tests/test_torch_engines.py
"""

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from torch_cases import close, definition, on, tensors  # noqa: E402

import fa_attn  # noqa: E402


@on
def test_results_are_written_where_the_caller_wants_them(device, dtype):
    q, k, v = tensors(device, dtype, (2, 9, 4, 64), (2, 9, 2, 64), (2, 9, 2, 64), grad=False)
    want = fa_attn.flash_attn_func(q, k, v, causal=True)
    # End to end, a part of a larger tensor, and rows that kernels do not write.
    part, turned = q.new_empty(2, 9, 8, 64)[:, :, 2:6], q.new_empty(2, 9, 64, 4).transpose(2, 3)
    rooms = [torch.empty_like(q), part, turned]
    for out in rooms:
        have, lse = fa_attn.flash_attn_func(q, k, v, causal=True, out=out, return_softmax_lse=True)
        assert have is out and lse.shape == (2, 4, 9)
        assert torch.equal(out, want)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    packed = [x[0].contiguous() for x in (q, k, v)]
    out = torch.full_like(packed[0], 7.0)
    fa_attn.flash_attn_varlen_func(*packed, starts, starts, 5, 5, out=out)
    assert torch.equal(out, fa_attn.flash_attn_varlen_func(*packed, starts, starts, 5, 5))
    out = torch.empty_like(q[:, :1])
    fa_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=5, out=out)
    assert torch.equal(out, fa_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=5))


def test_where_results_are_written_is_checked():
    q = torch.zeros(1, 4, 2, 64)
    refusals = [
        (dict(out=torch.empty(1, 4, 2, 32)), "out has the shape"),
        (dict(out=torch.empty(1, 4, 2, 64, dtype=torch.bfloat16)), "out holds torch.bfloat16"),
        (dict(out=np.empty((1, 4, 2, 64), np.float32)), "out is ndarray"),
        (dict(out=torch.empty(1, 4, 2, 64, requires_grad=True)), "require gradients"),
        (dict(out=q), "out lies in the memory of q"),
    ]
    for options, named in refusals:
        with pytest.raises(fa_attn.InputError, match=named):
            fa_attn.flash_attn_func(q, q, q, **options)
    with pytest.raises(fa_attn.InputError, match="require gradients"):
        needs = q.clone().requires_grad_()
        fa_attn.flash_attn_func(needs, q, q, out=torch.empty_like(q))
    with torch.no_grad():
        fa_attn.flash_attn_func(needs, q, q, out=torch.empty_like(q))
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        fa_attn.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), out=q)


@on
def test_a_serving_engines_call(device, dtype):
    """Pages by the columns in use of a longer table, a window that may be None, the engine's own options."""
    q, pages = tensors(device, dtype, (3, 4, 64), (8, 16, 2, 64), grad=False)
    longer = torch.full((3, 10), -1, dtype=torch.int32, device=device)
    longer[:, :2] = torch.tensor([[3, 1], [2, 5], [4, 6]], dtype=torch.int32)
    used = torch.tensor([20, 32, 1], dtype=torch.int32, device=device)
    starts = torch.arange(4, dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    fa_attn.flash_attn_varlen_func(
        q=q,
        k=pages,
        v=pages,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        seqused_k=used,
        max_seqlen_k=32,
        softmax_scale=0.125,
        causal=True,
        alibi_slopes=None,
        window_size=None,
        block_table=longer[:, :2],
        softcap=0,
        scheduler_metadata=None,
        fa_version=3,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        num_splits=0,
        s_aux=None,
        cp_world_size=1,
        cp_rank=0,
        cp_tot_seqused_k=None,
        output_scale=None,
        dynamic_causal=None,
        aux_tensor_leading_dims=None,
        gather_kv_valid_length=None,
    )
    for i, rows in enumerate(used.tolist()):
        keys = pages[longer[i, :2].long()].reshape(1, 32, 2, 64)[:, :rows]
        close(out[None, None, i], definition(q[None, None, i], keys, keys, causal=True), dtype)


@on
def test_work_that_is_planned_for_packed_queries(device, dtype):
    """As vLLM plans it: once for all layers, for queries of several lengths on pages."""
    q, pages = tensors(device, dtype, (6, 4, 64), (8, 16, 2, 64), grad=False)
    used = torch.tensor([20, 32, 7], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=device)
    table = torch.tensor([[3, 1], [2, 5], [4, 6]], dtype=torch.int32, device=device)
    sizes = dict(batch_size=3, max_seqlen_q=3, max_seqlen_k=32, num_heads_q=4, num_heads_kv=2, headdim=64)
    meta = fa_attn.get_scheduler_metadata(
        **sizes, cache_seqlens=used, qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=16, causal=True
    )
    options = dict(cu_seqlens_q=starts, max_seqlen_q=3, seqused_k=used, max_seqlen_k=32, block_table=table)
    want = fa_attn.flash_attn_varlen_func(q, pages, pages, causal=True, **options)
    for _ in range(2):
        out = fa_attn.flash_attn_varlen_func(q, pages, pages, causal=True, scheduler_metadata=meta, **options)
        assert torch.equal(out, want)
    with pytest.raises(fa_attn.InputError, match="scheduler_metadata is of causal = True"):
        fa_attn.flash_attn_varlen_func(q, pages, pages, scheduler_metadata=meta, **options)


@on
@pytest.mark.parametrize("tokens", [1, 3])
def test_ranks_have_every_nth_key(device, dtype, tokens):
    """As vLLM's decode context parallelism: each rank sees its keys, the parts are joined by their LSE."""
    world, whole = 3, torch.tensor([20, 7, 1 + tokens], dtype=torch.int32, device=device)
    q, k, v = tensors(device, dtype, (3 * tokens, 4, 64), (3, 24, 2, 64), (3, 24, 2, 64), grad=False)
    starts = torch.arange(4, dtype=torch.int32, device=device) * tokens
    parts = []
    for rank in range(world):
        own = own_keys(k, v, rank)
        used = ((whole - rank + world - 1) // world).int()
        table = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
        of_rank = dict(cp_world_size=world, cp_rank=rank, cp_tot_seqused_k=whole)
        options = dict(block_table=table, causal=True, return_softmax_lse=True, **of_rank)
        made = fa_attn.flash_attn_varlen_func(
            q, *own, starts, None, tokens, 8, seqused_k=used, **options, fa_version=3
        )
        again = fa_attn.flash_attn_with_kvcache(
            q.unflatten(0, (3, tokens)), *own, cache_seqlens=used, **options
        )
        close(again[0].flatten(0, 1), made[0], dtype)
        parts.append(made)
    out, _ = fa_attn.merge(*zip(*parts))
    for i, keys in enumerate(whole.tolist()):
        own = q[i * tokens : (i + 1) * tokens].transpose(0, 1)[None]
        rows = [x[i : i + 1, :keys].transpose(1, 2).repeat_interleave(2, 1).double() for x in (k, v)]
        seen = torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)
        want = torch.nn.functional.scaled_dot_product_attention(own.double(), *rows, seen)
        close(out[i * tokens : (i + 1) * tokens], want[0].transpose(0, 1), dtype)
    # Without a causal mask a rank's keys are seen as they are.
    seen = dict(block_table=table, seqused_k=used)
    made = fa_attn.flash_attn_varlen_func(q, *own_keys(k, v, 2), starts, None, tokens, 8, **seen, **of_rank)
    want = fa_attn.flash_attn_varlen_func(q, *own_keys(k, v, 2), starts, None, tokens, 8, **seen)
    assert torch.equal(made, want)
    with pytest.raises(fa_attn.UnsupportedError, match="cp_world_size = 3 with a window"):
        fa_attn.flash_attn_varlen_func(
            q, *own_keys(k, v, 2), starts, None, tokens, 8, **seen, **of_rank, window_size=(4, 0)
        )
    with pytest.raises(fa_attn.InputError, match="without cp_tot_seqused_k"):
        fa_attn.flash_attn_varlen_func(
            q, *own_keys(k, v, 2), starts, None, tokens, 8, **seen, causal=True, cp_world_size=3, cp_rank=1
        )


def own_keys(k, v, rank):
    return [x[:, rank::3].reshape(6, 4, 2, 64) for x in (k, v)]


def test_one_step_of_a_cache_in_columns_of_a_longer_table():
    pages, values, new = torch.zeros(8, 4, 2, 64), torch.zeros(8, 4, 2, 64), torch.ones(2, 1, 2, 64)
    longer = torch.tensor([[3, 1, -1], [2, 5, -1]], dtype=torch.int32)
    used = torch.tensor([5, 2], dtype=torch.int32)
    q = torch.ones(2, 1, 4, 64)
    options = dict(cache_seqlens=used, block_table=longer[:, :2], causal=True)
    fa_attn.flash_attn_with_kvcache(q, pages, values, new, new, **options)
    assert (pages[1, 1] == 1).all() and (pages[2, 2] == 1).all() and pages.sum() == 2 * 2 * 64
