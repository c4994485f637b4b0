"""The packages of `shim`, which stand in for FlashAttention's, as programs use them beside its functions: the
functions below its autograd, layers and padding; test_stand_in_rotary.py has rotary embedding. On the CPU.

pip install torch pytest && python -m pytest tests/test_stand_in.py
"""

import inspect
import sys

import pytest

torch = pytest.importorskip("torch")

from stand_in_cases import pytestmark, stand_in  # noqa: E402, F401
from torch_cases import close, definition, tensors  # noqa: E402

import fa_attn  # noqa: E402


def by_their_names(function, **values):
    """A call by the names that the function has, as programs for several versions make it."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in names})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_keys_forward_and_backward(causal, dtype):
    """Two steps of a ring: the second half of the queries sees the first half of the keys in full and its own
    half causally; the gradient of each part from out and LSE of the whole."""
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v = tensors("cpu", dtype, (2, 16, 4, 32), (2, 32, 2, 32), (2, 32, 2, 32))
    halves = [(k[:, :16], v[:, :16], False), (k[:, 16:], v[:, 16:], causal)]
    options = dict(dropout_p=0, softmax_scale=0.2, window_size_left=-1, window_size_right=-1, softcap=0.0)
    options.update(alibi_slopes=None, return_softmax=False)
    parts = [
        by_their_names(_flash_attn_forward, q=q, k=k_part, v=v_part, causal=mask, **options)
        for k_part, v_part, mask in halves
    ]
    assert all(len(part) == 4 and not part[0].requires_grad for part in parts)
    out, lse = fa_attn.merge([part[0] for part in parts], [part[1] for part in parts])
    want, want_lse = definition(q, k, v, causal=causal, scale=0.2, return_lse=True)
    close(out, want, dtype)
    close(lse, want_lse, dtype)
    dout = torch.randn_like(out)
    dq, dk, dv = torch.zeros_like(q, dtype=torch.float32), torch.empty_like(k), torch.empty_like(v)
    for place, (k_part, v_part, mask) in enumerate(halves):
        room = torch.full_like(q, float("nan"))
        at = slice(16 * place, 16 * place + 16)
        given = dict(dout=dout, q=q, k=k_part, v=v_part, out=out, softmax_lse=lse, dq=room)
        given.update(dk=dk[:, at], dv=dv[:, at], causal=mask, deterministic=False, **options)
        delta = by_their_names(_flash_attn_backward, **given)
        close(delta, (out.float() * dout.float()).sum(-1).transpose(1, 2), dtype, factor=10)
        dq = dq + room
    wanted = torch.autograd.grad(want, (q, k, v), dout.double())
    for have, need in zip((dq, dk, dv), wanted):
        close(have, need, dtype, factor=10)


def test_packed_parts_forward_and_backward():
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward

    q, k, v = tensors("cpu", torch.float32, (2, 9, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32))
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    (flat_q, indices, starts, longest, used), (flat_k, *_), (flat_v, *_) = (
        unpad_input(x, mask) for x in (q, k, v)
    )
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 9, 13], torch.int32, 9, [9, 4])
    lengths = (starts, starts, longest, longest)
    out, lse, *_ = _flash_attn_varlen_forward(flat_q, flat_k, flat_v, *lengths, 0.0, 0.2, True)
    assert lse.shape == (4, 13)
    wants = [
        definition(*(x[i : i + 1, :rows] for x in (q, k, v)), causal=True, scale=0.2)
        for i, rows in ((0, 9), (1, 4))
    ]
    close(out, torch.cat([want[0] for want in wants]), torch.float32)
    assert (pad_input(out, indices, 2, 9)[1, 4:] == 0).all()
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (flat_q, flat_k, flat_v)]
    _flash_attn_varlen_backward(
        dout, flat_q, flat_k, flat_v, out, lse, *grads, *lengths, 0.0, 0.2, True, -1, -1, 0.0, None, False
    )
    want = torch.cat([want[0] for want in wants])
    for have, need in zip(grads, torch.autograd.grad(want, (q, k, v), dout.double())):
        close(have, need[mask], torch.float32, factor=10)


def test_rows_are_packed_and_put_back_with_gradients():
    from flash_attn import bert_padding

    x = torch.randn(2, 5, 3, requires_grad=True)
    lengths = torch.tensor([[2, 3, 0, 0, 0], [1, 2, 0, 0, 0]])
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert (starts.tolist(), longest, indices.tolist()) == ([0, 2, 5, 6, 8], 3, [0, 1, 2, 3, 4, 5, 6, 7])
    whole = bert_padding.pad_input(rows, indices, 2, 5)
    whole.sum().backward()
    assert x.grad.sum(-1).tolist() == [[3.0] * 5, [3.0] * 3 + [0.0] * 2]
    unused = torch.tensor([[False, True], [False, False]])
    used = torch.tensor([[True, False], [True, True]])
    rows, indices, starts, longest, counts = bert_padding.unpad_input(torch.ones(2, 2, 1), used, unused)
    assert (indices.tolist(), starts.tolist(), counts.tolist()) == ([0, 1, 2, 3], [0, 2, 4], [1, 2])


def test_rows_are_put_back_at_indices_of_any_integers():
    """transformers steps with int32 ones."""
    from flash_attn.bert_padding import index_first_axis, index_put_first_axis

    x = torch.randn(3, 2)
    for dtype in (torch.int32, torch.int64):
        at = torch.tensor([4, 0, 2], dtype=dtype)
        placed = index_put_first_axis(x, at, 5)
        assert torch.equal(placed[[4, 0, 2]], x) and torch.equal(placed[[1, 3]], torch.zeros(2, 2))
        assert torch.equal(index_first_axis(placed, at), x)


def test_functions_of_autograd_by_the_order_of_their_arguments():
    """As programs call them that leave out the functions around them; with the names that modules.mha has."""
    import flash_attn
    from flash_attn import flash_attn_interface as by_class
    from flash_attn.bert_padding import IndexFirstAxis, IndexPutFirstAxis
    from flash_attn.modules import mha

    q, k, v = tensors("cpu", torch.float32, (2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), grad=True)
    wide = torch.stack((q, *(x.repeat_interleave(2, 2) for x in (k, v))), 2)
    want, want_lse = definition(q, k, v, causal=True, scale=0.3, window=(4, 0), return_lse=True)
    options = (0.0, 0.3, True, (4, 0), 0.0, None, False)
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    lengths = (starts, starts, 9, 9)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    pairs = torch.stack((k, v), 2)
    calls = [
        (by_class.FlashAttnFunc, (q, k, v)),
        (by_class.FlashAttnKVPackedFunc, (q, pairs)),
        (by_class.FlashAttnQKVPackedFunc, (wide,)),
        (by_class.FlashAttnVarlenFunc, (*flat, *lengths)),
        (by_class.FlashAttnVarlenKVPackedFunc, (flat[0], pairs.flatten(0, 1), *lengths)),
        (by_class.FlashAttnVarlenQKVPackedFunc, (wide.flatten(0, 1), starts, 9)),
    ]
    need = torch.autograd.grad(want.square().sum(), (q, k, v))
    for function, arrays in calls:
        pages = (None,) if function is by_class.FlashAttnVarlenFunc else ()
        out, lse, _ = function.apply(*arrays, *options, True, *pages, True)
        lse = lse if lse.dim() == 3 else lse.unflatten(1, (2, 9)).transpose(0, 1)
        close(out.view_as(want), want, torch.float32)
        close(lse, want_lse, torch.float32)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
        for have, grad in zip(grads, need):
            close(have, grad, torch.float32, factor=10)
        assert not function.apply(*arrays, *options, False, *pages, False).requires_grad
    rows = torch.randn(6, 3, requires_grad=True)
    places = torch.tensor([4, 0, 5])
    taken = IndexFirstAxis.apply(rows, places)
    put = IndexPutFirstAxis.apply(taken, places, 6)
    (grad,) = torch.autograd.grad(put.sum(), rows)
    assert torch.equal(taken, rows[places]) and torch.equal(put[places], taken)
    assert grad.sum() == 9 and not grad[[1, 2, 3]].any()
    names = "kvpacked_func qkvpacked_func varlen_kvpacked_func varlen_qkvpacked_func with_kvcache".split()
    assert all(getattr(mha, f"flash_attn_{x}") is getattr(flash_attn, f"flash_attn_{x}") for x in names)


def test_functions_of_rotary_embedding_by_the_order_of_their_arguments():
    from flash_attn.layers import rotary

    cos, sin = torch.rand(2, 12, 4)
    x, qkv = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 3, 4, 16)
    want = rotary.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=2)
    assert torch.equal(rotary.ApplyRotaryEmb.apply(x, cos, sin, True, False, 2), want)
    tables = (cos, sin, cos * 2, sin * 2)
    want = rotary.apply_rotary_emb_qkv_(qkv.clone(), *tables, True, 2)
    assert torch.equal(rotary.ApplyRotaryEmbQKV_.apply(qkv.clone(), *tables, True, 2), want)
    want = rotary.apply_rotary_emb_kv_(qkv[:, :, 1:].clone(), cos, sin, True, 2)
    assert torch.equal(rotary.ApplyRotaryEmbKV_.apply(qkv[:, :, 1:].clone(), cos, sin, True, 2), want)


def test_the_extension_module_by_the_order_of_its_arguments():
    """As xformers calls it, which has an autograd of its own."""
    from flash_attn.flash_attn_interface import flash_attn_gpu

    q, k, v = tensors("cpu", torch.float32, (2, 9, 4, 32), (2, 12, 2, 32), (2, 12, 2, 32))
    want, want_lse = definition(q, k, v, causal=True, scale=0.3, return_lse=True)
    x = [t.detach() for t in (q, k, v)]
    tail = (True, -1, -1, 0.0)
    room = torch.empty_like(x[0])
    out, lse, _, state = flash_attn_gpu.fwd(*x, room, None, 0.0, 0.3, *tail, False, None)
    assert out is room
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)
    dout = torch.randn_like(out)
    dq = torch.empty_like(x[0])
    args = (dq, None, None, None, 0.0, 0.3, *tail, False, None, state)
    made = flash_attn_gpu.bwd(dout, *x, out, lse, *args)
    assert made[0] is dq and made[3].shape == lse.shape
    wanted = torch.autograd.grad(want, (q, k, v), dout.double())
    for have, need in zip(made, wanted):
        close(have, need, torch.float32, factor=10)
    starts = [torch.arange(3, dtype=torch.int32) * n for n in (9, 12)]
    flat = [t.flatten(0, 1) for t in x]
    lengths = (9, 12, 0.0, 0.3, False)
    packed = (None, *starts, None, None, None, None, *lengths, *tail, False, None)
    flat_out, flat_lse, *_ = flash_attn_gpu.varlen_fwd(*flat, *packed)
    assert torch.equal(flat_out, out.flatten(0, 1)) and flat_lse.shape == (4, 18)
    args = (None, None, None, *starts, None, *lengths, *tail, False, None, state)
    made = flash_attn_gpu.varlen_bwd(dout.flatten(0, 1), *flat, flat_out, flat_lse, *args)
    for have, need in zip(made, wanted):
        close(have, need.flatten(0, 1), torch.float32, factor=10)
    # The bound of keys with room behind them is one on those in use.
    used = torch.tensor([7, 5], dtype=torch.int32)
    args = (None, *starts, used, None, None, None, 9, 7, 0.0, 0.3, False, False, -1, -1, 0.0, False, None)
    flat_out, *_ = flash_attn_gpu.varlen_fwd(*flat, *args)
    for i, count in enumerate(used):
        need = definition(q[i : i + 1], k[i : i + 1, :count], v[i : i + 1, :count], scale=0.3)
        close(flat_out[9 * i : 9 * i + 9], need[0], torch.float32)
    step = torch.randn(2, 1, 2, 32)
    caches = [t.clone() for t in x[1:]]
    head = (used, None, None, None, None, None, None, None, 0.3, *tail, True, 0)
    out, lse = flash_attn_gpu.fwd_kvcache(x[0][:, :1], *caches, step, step, *head)
    assert torch.equal(caches[0][0, 7], step[0, 0]) and torch.equal(caches[1][1, 5], step[1, 0])
    need = fa_attn.flash_attn_with_kvcache(x[0][:, :1], *caches, cache_seqlens=used + 1, softmax_scale=0.3)
    close(out, need, torch.float32)
    with pytest.raises(fa_attn.InputError, match="^generator"):
        flash_attn_gpu.fwd(*x, None, None, 0.0, 0.3, *tail, False, torch.zeros(1))


def test_sinks_and_dropout_of_the_third_generation():
    """transformers leaves out what a function does not take."""
    import flash_attn_interface

    x = tensors("cpu", torch.float32, (2, 9, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32))
    sinks = torch.randn(4)
    want = fa_attn.flash_attn_func(*x, causal=True, sinks=sinks)
    assert torch.equal(flash_attn_interface.flash_attn_func(*x, causal=True, s_aux=sinks), want)
    starts = torch.arange(3, dtype=torch.int32) * 9
    flat = [t.flatten(0, 1) for t in x]
    have = flash_attn_interface.flash_attn_varlen_func(*flat, starts, starts, 9, 9, causal=True, s_aux=sinks)
    close(have, want.flatten(0, 1), torch.float32)
    used = torch.full((2,), 9, dtype=torch.int32)
    options = dict(cache_seqlens=used, causal=True, s_aux=sinks)
    close(flash_attn_interface.flash_attn_with_kvcache(*x, **options), want, torch.float32)
    torch.manual_seed(3)
    want = fa_attn.flash_attn_func(*x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(flash_attn_interface.flash_attn_func(*x, dropout_p=0.5), want)


def test_modules_without_weights():
    from flash_attn.modules import mha

    assert mha.get_alibi_slopes(4) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert mha.get_alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    qkv = torch.randn(2, 9, 3, 4, 32)
    q, k, v = qkv.unbind(2)
    slopes = torch.tensor(mha.get_alibi_slopes(4))
    module = mha.FlashSelfAttention(True, 0.2, 0.5, (3, 0), slopes, True)
    want = fa_attn.flash_attn_func(
        q, k, v, softmax_scale=0.2, causal=True, window_size=(3, 0), alibi_slopes=slopes
    )
    close(module.eval()(qkv), want, torch.float32)
    assert not torch.equal(module.train()(qkv), want) and not module.state_dict()
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    flat = module.eval()(qkv.flatten(0, 1), cu_seqlens=starts, max_seqlen=9)
    close(flat, want.flatten(0, 1), torch.float32)
    kv = torch.randn(2, 12, 2, 2, 32)
    want = fa_attn.flash_attn_func(q, *kv.unbind(2), causal=True)
    module = mha.FlashCrossAttention().eval()
    close(module(q, kv, causal=True), want, torch.float32)
    lengths = (starts, 9, torch.tensor([0, 12, 24], dtype=torch.int32), 12)
    close(module(q.flatten(0, 1), kv.flatten(0, 1), True, *lengths), want.flatten(0, 1), torch.float32)
    seen = torch.arange(12) < torch.tensor([[12], [7]])
    out = mha.CrossAttention().eval()(q, kv, key_padding_mask=seen)
    close(out[1:], fa_attn.flash_attn_func(q[1:], *kv[1:, :7].unbind(2)), torch.float32)
    out = mha.SelfAttention(causal=True).eval()(qkv, key_padding_mask=seen[:, :9])
    close(out[1:, :7], fa_attn.flash_attn_func(*qkv[1:, :7].unbind(2), causal=True), torch.float32)


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("flash", [True, False])
def test_a_layer_with_projections(flash, heads_kv):
    """Its rows by definition; packed, and one by one on a cache, the same."""
    from types import SimpleNamespace

    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.modules.mha import MHA

    layer = MHA(64, 4, heads_kv, causal=True, rotary_emb_dim=8, layer_idx=3, use_flash_attn=flash)
    assert {name.split(".")[0] for name in layer.state_dict()} == {"Wqkv", "out_proj"}
    x = torch.randn(2, 9, 64, requires_grad=True)
    q, k, v = layer.Wqkv(x).unflatten(-1, (4 + 2 * heads_kv, 16)).split([4, heads_kv, heads_kv], dim=2)
    layer.rotary_emb._update_cos_sin_cache(9, x.device, x.dtype)
    tables = layer.rotary_emb._cos_cached, layer.rotary_emb._sin_cached
    q, k = (apply_rotary_emb(t, *tables) for t in (q, k))
    want = layer.out_proj(definition(q, k, v, causal=True).flatten(-2).float())
    out = layer(x)
    close(out, want, torch.float32)
    grads = [torch.autograd.grad(y.square().sum(), (x, layer.Wqkv.weight)) for y in (out, want)]
    for have, need in zip(*grads):
        close(have, need, torch.float32, factor=10)
    params = SimpleNamespace(max_seqlen=12, max_batch_size=2, seqlen_offset=0, batch_size_offset=0)
    params.key_value_memory_dict, params.lengths_per_sample = {}, None
    with torch.no_grad():
        steps = [layer(x[:, :6], inference_params=params)]
        for params.seqlen_offset in (6, 7, 8):
            at = params.seqlen_offset
            steps.append(layer(x[:, at : at + 1], inference_params=params))
    assert params.key_value_memory_dict[3].shape == (2, 12, 2, heads_kv, 16)
    close(torch.cat(steps, 1), want, torch.float32)
    plain = MHA(64, 4, heads_kv, use_flash_attn=flash, return_residual=True, checkpointing=True)
    whole, same = plain(x)
    assert same is x
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    if flash:
        packed, _ = plain(x.flatten(0, 1), cu_seqlens=starts, max_seqlen=9)
        close(packed, whole.flatten(0, 1), torch.float32)
    else:
        seen = torch.arange(9) < torch.tensor([[9], [5]])
        close(plain(x, key_padding_mask=seen)[0][1:, :5], plain(x[1:, :5])[0], torch.float32)
    crossed = MHA(64, 4, heads_kv, cross_attn=True, use_flash_attn=flash)
    y = torch.randn(2, 5, 64)
    q, kv = crossed.Wq(x[:, :1]), crossed.Wkv(y).unflatten(-1, (2, heads_kv, 16))
    want = definition(q.unflatten(-1, (4, 16)), *kv.unbind(2)).flatten(-2).float()
    close(crossed(x, y, mixer_subset=slice(0, 1)), crossed.out_proj(want), torch.float32)
    with pytest.raises(fa_attn.UnsupportedError, match="^dwconv"):
        MHA(64, 4, dwconv=True)
    with pytest.raises(fa_attn.InputError, match="use_flash_attn=True$"):
        MHA(64, 4, window_size=(3, 0))


def test_blocks_and_latents_of_the_fourth_generation():
    from types import SimpleNamespace

    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    x = tensors("cpu", torch.float32, (2, 8, 4, 32), (2, 8, 2, 32), (2, 8, 2, 32))
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    at = torch.tensor([[[[0, 0], [0, 1]]]], dtype=torch.int32)
    empty = dict(mask_block_cnt=None, mask_block_idx=None)
    blocks = SimpleNamespace(full_block_cnt=counts, full_block_idx=at, block_size=(4, 4), **empty)
    out, _ = flash_attn_func(*x, causal=True, block_sparse_tensors=blocks)
    close(out, definition(*x, causal=True), torch.float32)
    # As SGLang's video models route blocks: without a mask they are seen in whole.
    routed = BlockSparseTensorsTorch(counts, at.flip(-1).contiguous(), block_size=(4, 4))
    out, _ = flash_attn_func(*x, block_sparse_tensors=routed)
    seen = torch.ones(8, 8, dtype=torch.bool)
    seen[:4, 4:] = False
    queries, keys, values = (y.double().transpose(1, 2) for y in x)
    scores = queries @ keys.repeat_interleave(2, 1).mT * 32**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    close(out, (weights @ values.repeat_interleave(2, 1)).transpose(1, 2), torch.float32)
    latents = torch.randn(2, 8, 1, 48)
    q, qv = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 32)
    k, v = latents[..., 32:], latents[..., :32]
    out, _ = flash_attn_func(q, k, v, qv=qv)
    close(out, fa_attn.flash_attn_func(q, k, v, qv=qv), torch.float32)
    with pytest.raises(fa_attn.UnsupportedError, match="^score_mod"):
        flash_attn_func(*x, score_mod=lambda *_: 0)


def test_padding_has_the_functions_of_einops_that_programs_import_from_it(monkeypatch):
    import types

    from flash_attn import bert_padding

    einops = types.SimpleNamespace(rearrange=object(), repeat=object())
    monkeypatch.setitem(sys.modules, "einops", einops)
    from flash_attn.bert_padding import rearrange, repeat

    assert rearrange is einops.rearrange and repeat is einops.repeat
    with pytest.raises(AttributeError, match="no attribute 'reduce'"):
        bert_padding.reduce  # noqa: B018


def test_third_and_fourth_generation_by_position():
    """Every argument in its place; a third generation's forward and backward below its autograd."""
    import flash_attn_interface as third
    from flash_attn.cute import interface as fourth

    q, k, v = tensors("cpu", torch.float32, (2, 9, 4, 32), (2, 11, 2, 32), (2, 11, 2, 32))
    want, want_lse = definition(q, k, v, causal=True, scale=0.2, window=(4, -1), return_lse=True)
    out, lse, *parts = third._flash_attn_forward(
        q, k, v, softmax_scale=0.2, causal=True, window_size_left=4, num_splits=0
    )
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)
    assert len(parts) == 2 and not out.requires_grad
    dout = torch.randn_like(out)
    rooms = [torch.empty_like(x) for x in (q, k, v)]
    lengths = (None,) * 6
    options = (0.2, True, 4, -1, 0.0, False, 0)
    delta = third._flash_attn_backward(dout, q, k, v, out, lse, *lengths, *rooms, *options)
    close(delta, (out * dout).sum(-1).transpose(1, 2), torch.float32, factor=10)
    for have, need in zip(rooms, torch.autograd.grad(want, (q, k, v), dout.double(), retain_graph=True)):
        close(have, need, torch.float32, factor=10)
    masks = (None,) * 7
    options = (None, None, 0.2, True, (4, None), None, 0.0, 1, None, False, *masks)
    out, lse = fourth.flash_attn_func(q, k, v, *options, True)
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)
    # LSE is theirs where it is asked for or there are gradients.
    assert fourth.flash_attn_func(*(x.detach() for x in (q, k, v)), *options)[1] is None
    with pytest.raises(fa_attn.UnsupportedError, match="mask_mod"):
        fourth.flash_attn_func(q, k, v, mask_mod=lambda *_: True)
    weight = torch.randn_like(lse)
    grads = fourth._flash_attn_bwd(
        q, k, v, out.detach(), dout, lse.detach(), 0.2, True, 0.0, 4, None, 64, 128, dlse=weight
    )
    total = (want * dout).sum() + (want_lse * weight).sum()
    for have, need in zip(grads, torch.autograd.grad(total, (q, k, v))):
        close(have, need, torch.float32, factor=10)


def test_operators_and_helpers_that_programs_with_an_autograd_of_their_own_import():
    """As xtuner does: the operators of the third generation, and the functions beside autograd's of both. LSE
    may be a part of a larger one, as a half of the rows is in Colossal-AI's ring."""
    import flash_attn_interface as third
    from flash_attn import flash_attn_interface as second

    for module in (second, third):
        turned = torch.ones(3, 5).transpose(0, 1)
        assert module.maybe_contiguous(turned).stride() == (3, 1) and module.maybe_contiguous(None) is None
        assert [module.round_multiple(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
    q, k, v = tensors("cpu", torch.float32, (9, 4, 32), (9, 2, 32), (9, 2, 32))
    starts = torch.tensor([0, 9], dtype=torch.int32)
    options = (0.2, True, -1, -1)
    of_pages_and_codes = (None,) * 9
    out, lse, *_ = third.flash_attn_3_gpu.fwd(
        *(x.detach() for x in (q, k, v)),
        *(None,) * 4,
        starts,
        starts,
        *(None,) * 3,
        9,
        9,
        *of_pages_and_codes,
        *options,
        0,
        0.0,
        True,
        None,
        1,
        None,
        0,
    )
    want = definition(*(x[None] for x in (q, k, v)), causal=True, scale=0.2)[0]
    close(out, want, torch.float32)
    dout = torch.randn_like(out)
    need = torch.autograd.grad(want, (q, k, v), dout.double())
    lses = torch.stack((lse, lse), -1)
    rooms = [torch.empty_like(x) for x in (q, k, v)]
    inputs = (dout, *(x.detach() for x in (q, k, v)), out, lses[..., 0])
    third.flash_attn_3_gpu.bwd(*inputs, *rooms, starts, starts, None, None, 9, 9, *options, 0.0, False, 0)
    for have, gradient in zip(rooms, need):
        close(have, gradient, torch.float32, factor=10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 5, 11), (1, 4, 1, 11), (1, 1, 5, 11)])
def test_functions_with_a_bias(shape, causal):
    """GPT-NeoX's and MPT's for ALiBi, whose masks begin in the top left corner."""
    from flash_attn import flash_attn_triton

    q, k, v, bias = tensors("cpu", torch.float32, (2, 5, 4, 32), (2, 11, 4, 32), (2, 11, 4, 32), shape)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 0.2 + bias.double()
    if causal:
        scores = scores.masked_fill(torch.ones(5, 11, dtype=torch.bool).triu(1), float("-inf"))
    want = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
    out = flash_attn_triton.flash_attn_func(q, k, v, bias, causal, 0.2)
    close(out, want, torch.float32)
    dout = torch.randn_like(out)
    inputs = (q, k, v, bias)
    needs = torch.autograd.grad(want, inputs, dout.double())
    for have, need in zip(torch.autograd.grad(out, inputs, dout), needs):
        close(have, need, torch.float32, factor=10)
    of_kv = flash_attn_triton.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), bias, causal, 0.2)
    assert torch.equal(of_kv, out)
    of_qkv = flash_attn_triton.flash_attn_qkvpacked_func(torch.stack((q, q, q), 2), causal=causal)
    assert torch.equal(of_qkv, flash_attn_triton.flash_attn_func(q, q, q, None, causal))


def test_a_third_generation_forward_on_a_cache():
    import flash_attn_interface as third

    q, k, v = tensors("cpu", torch.float32, (2, 1, 4, 32), (3, 16, 2, 32), (3, 16, 2, 32), grad=False)
    new = torch.randn(2, 2, 1, 2, 32)
    used, rows = (torch.tensor(x, dtype=torch.int32) for x in ([5, 9], [2, 0]))
    out, *_ = third._flash_attn_forward(q, k, v, *new, seqused_k=used, kv_batch_idx=rows, causal=True)
    for at, (row, keys) in enumerate(((2, 6), (0, 10))):
        assert torch.equal(k[row, keys - 1], new[0, at, 0])
        want = definition(q[at : at + 1], k[row : row + 1, :keys], v[row : row + 1, :keys], causal=True)
        close(out[at : at + 1], want, torch.float32)


def test_chunks_and_codes_of_flash_attention_3():
    import flash_attn_interface

    q, k, v = tensors("cpu", torch.bfloat16, (2, 6, 4, 32), (2, 9, 2, 32), (2, 9, 2, 32))
    for chunk in (0, 4):
        want = fa_attn.flash_attn_func(q, k, v, causal=True, attention_chunk=chunk)
        got = flash_attn_interface.flash_attn_func(q, k, v, causal=True, attention_chunk=chunk)
        assert torch.equal(got, want)
        used = torch.tensor([9, 5], dtype=torch.int32)
        want = fa_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, causal=True, attention_chunk=chunk
        )
        got = flash_attn_interface.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, causal=True, attention_chunk=chunk
        )
        assert torch.equal(got, want)
    with pytest.raises(fa_attn.UnsupportedError, match="sm_margin = 8: kernels use all SMs"):
        flash_attn_interface.flash_attn_func(q, k, v, sm_margin=8)
    scale = torch.rand(2, 2) + 0.5
    codes = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    named = dict(q_descale=scale, k_descale=scale, v_descale=scale)
    want = fa_attn.flash_attn_func(*codes, **named)
    needing = [x.requires_grad_() for x in codes]
    assert torch.equal(flash_attn_interface.flash_attn_func(*needing, **named), want)


def test_flash_mla_of_packed_sequences():
    import flash_mla

    q, k, v = tensors("cpu", torch.float32, (13, 4, 24), (13, 4, 24), (13, 4, 16))
    starts = torch.tensor([0, 9, 13], dtype=torch.int32)
    out, lse = flash_mla.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=True)
    want, want_lse = fa_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, 9, 9, causal=True, return_softmax_lse=True
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse.T) and lse.shape == (13, 4)
    for packed in (
        flash_mla.flash_attn_varlen_kvpacked_func(
            q, torch.cat([k, v], -1), starts, starts, 9, 9, 24, causal=True
        ),
        flash_mla.flash_attn_varlen_qkvpacked_func(torch.cat([q, k, v], -1), starts, 9, 24, causal=True),
    ):
        assert torch.equal(packed[0], out) and torch.equal(packed[1], lse)
    out.sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all()
    meta, nothing = flash_mla.get_mla_metadata(starts, 4, 1)
    table, used = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    q, cache = torch.randn(1, 2, 4, 24), torch.randn(2, 4, 1, 24)
    got, _ = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 16, meta, nothing, causal=True)
    rows = torch.cat([cache[1], cache[0]])[None, :7]
    close(got, fa_attn.flash_attn_func(q, rows, rows[..., :16], causal=True), torch.float32)


def test_flash_attention_4_without_a_window():
    """Megatron and TransformerEngine say so by (-1, -1) and, beside a causal mask, (-1, 0)."""
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    from flash_attn.cute.interface import _validate_head_dims

    q, k, v = tensors("cpu", torch.float32, (1, 9, 4, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    starts = torch.tensor([0, 9], dtype=torch.int32)
    for causal in (False, True):
        want = fa_attn.flash_attn_func(q, k, v, causal=causal)
        for window in ((None, None), (-1, -1), (-1, 0), (-4, 2)) if causal else ((-1, -1), (-1, 0), (-3, 2)):
            got, _ = flash_attn_func(q, k, v, causal=causal, window_size=window)
            assert torch.equal(got, want)
            rows = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal=causal, window_size=window)
            got, _ = flash_attn_varlen_func(q[0], k[0], v[0], **rows)
            close(got, want[0], torch.float32)
    got, _ = flash_attn_func(q, k, v, window_size=(3, None), causal=True)
    assert torch.equal(got, fa_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0)))
    with pytest.raises(fa_attn.UnsupportedError, match="negative window"):
        flash_attn_func(q, k, v, window_size=(-1, 5))
    _validate_head_dims(192, 128, 10, 8), _validate_head_dims(576, 512, 9, 8)
    with pytest.raises(AssertionError, match="at most .256, 256. on GPUs of capability 10"):
        _validate_head_dims(576, 512, 10, 8)


class _OnCpu:
    """A library of operators that registers for the CPU what is registered for a GPU."""

    def __init__(self, *_):
        self.library = torch.library.Library("aten", "IMPL", "CPU")

    def impl(self, name, function, _):
        self.library.impl(name, function, "CPU")


@pytest.mark.parametrize("version", [3, 4])
def test_torch_activates_it(version, monkeypatch):
    """What `torch.nn.attention.activate_flash_attention_impl` registers, on the CPU."""
    module = pytest.importorskip(f"torch.nn.attention._fa{version}")
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(module, f"_fa{version}_common_support_error", lambda *_, **__: None)
    monkeypatch.setattr(module, "Library", _OnCpu)
    path = "flash_attn_interface" if version == 3 else "flash_attn.cute.interface"
    getattr(module, f"_fa{version}_import_module")(path)
    monkeypatch.setattr(module, "_FA4_MODULE_PATH", path, raising=False)
    registered = getattr(module, f"_fa{version}_register_kernels")()
    try:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_backward
        for causal in (False, True):
            q, k, v = tensors("cpu", torch.bfloat16, *[(2, 4, 9, 32)] * 3)
            with torch.no_grad():
                out, lse, *others = attend(q, k, v, 0.0, causal)
            want = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), is_causal=causal
            )
            close(out, want, torch.bfloat16)
            dout = torch.randn_like(out)
            with torch.no_grad():
                *more, seed, offset, _ = others
                got = differentiate(dout, q, k, v, out, lse, *more, 0.0, causal, seed, offset)
            for have, need in zip(got, torch.autograd.grad(want, (q, k, v), dout.double())):
                close(have, need, torch.bfloat16, factor=10)
        q, k, v = tensors("cpu", torch.bfloat16, (12, 4, 32), (12, 2, 32), (12, 2, 32))
        starts = torch.tensor([0, 5, 12], dtype=torch.int32)
        for window in ((-1, -1), (-1, 0), (2, 0), (1, 1)):
            out = varlen.varlen_attn(q, k, v, starts, starts, 7, 7, window_size=window)
            parts = [(x[None, :5], x[None, 5:]) for x in (q, k, v)]
            want = torch.cat([definition(*x, window=window)[0] for x in zip(*parts)])
            close(out, want, torch.bfloat16)
            if version == 3:  # with FA4 torch refuses gradients of windows
                dout = torch.randn_like(out)
                wanted = torch.autograd.grad(want, (q, k, v), dout.double())
                for have, need in zip(torch.autograd.grad(out, (q, k, v), dout), wanted):
                    close(have, need, torch.bfloat16, factor=10)
    finally:
        registered.library._destroy()
        if version == 3:
            torch._C._set_sdp_use_fa3(False)
