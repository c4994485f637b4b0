"""Rotary embedding of `shim`'s packages, as programs use it. On the CPU.

pip install torch pytest && python -m pytest tests/test_stand_in_rotary.py
"""

import pytest

torch = pytest.importorskip("torch")

from stand_in_cases import pytestmark, stand_in  # noqa: E402, F401
from torch_cases import close  # noqa: E402

import fa_attn  # noqa: E402


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_of_leaves_and_of_own_tables(interleaved):
    from flash_attn.layers import rotary
    from flash_attn.ops.triton.rotary import apply_rotary

    angles = torch.randn(12, 8)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(2, 7, 3, 32)
    places = torch.tensor([[2, 0, 5, 1, 1, 9, 3], [1, 2, 3, 4, 5, 6, 7]])
    turned = rotary.apply_rotary_emb_torch(x, cos[places], sin[places], interleaved)
    for i in range(2):
        for j, place in enumerate(places[i]):
            row = x[i : i + 1, j : j + 1]
            want = rotary.apply_rotary_emb(row, cos, sin, interleaved, seqlen_offsets=int(place))
            assert torch.equal(turned[i, j], want[0, 0])
    want = rotary.apply_rotary_emb(x, cos, sin, interleaved)
    close(apply_rotary(want, cos, sin, interleaved=interleaved, conjugate=True), x, torch.float32)
    # In place, also leaves, as theirs do.
    for turn, shape, at in (
        (lambda t: rotary.apply_rotary_emb(t, cos, sin, interleaved, inplace=True), (2, 7, 3, 32), ...),
        (
            lambda t: rotary.apply_rotary_emb_qkv_(t, cos, sin, interleaved=interleaved),
            (2, 7, 3, 3, 32),
            slice(0, 2),
        ),
        (lambda t: rotary.apply_rotary_emb_kv_(t, cos, sin, interleaved), (2, 7, 2, 3, 32), slice(0, 1)),
    ):
        leaf = torch.randn(shape, requires_grad=True)
        before = leaf.detach().clone()
        out = turn(leaf)
        assert out.data_ptr() == leaf.data_ptr()
        rows, made = ((t if at is ... else t[:, :, at].flatten(2, 3)) for t in (before, out))
        assert torch.equal(made, rotary.apply_rotary_emb(rows, cos, sin, interleaved))
        (grad,) = torch.autograd.grad(out, leaf, out.detach().clone())
        close(grad, before, torch.float32)
    with pytest.raises(
        fa_attn.InputError, match="cos and sin have 12 positions: 7 rows from position 6 on need 13"
    ):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=6)
    # Positions of their own that tables do not have are not turned, as by their kernel.
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=torch.tensor([0, 8]))
    assert torch.equal(out[0], want[0]) and torch.equal(out[1, 4:], x[1, 4:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_turns_back(interleaved):
    from flash_attn.layers import rotary

    angles = torch.randn(12, 8)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(2, 7, 3, 32, requires_grad=True)
    turned = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=5)
    assert torch.equal(turned[..., 16:], x[..., 16:])
    close(turned.norm(dim=-1), x.norm(dim=-1), torch.float32)
    # The gradient turns the other way.
    (back,) = torch.autograd.grad(turned, x, turned.detach())
    close(back, x, torch.float32)
    qkv = torch.randn(2, 7, 3, 3, 32)
    want = rotary.apply_rotary_emb(qkv[:, :, 1], cos, sin, interleaved)
    have = rotary.apply_rotary_emb_qkv_(qkv.clone(), cos, sin, interleaved=interleaved)
    assert torch.equal(have[:, :, 1], want) and torch.equal(have[:, :, 2], qkv[:, :, 2])
    grouped = qkv.flatten(2, 3)
    have = rotary.apply_rotary_emb_qkv_(grouped.clone(), cos, sin, interleaved=interleaved, num_heads_q=5)
    assert torch.equal(have[:, :, 7:], grouped[:, :, 7:]) and not torch.equal(have[:, :, 6], grouped[:, :, 6])
    kv = rotary.apply_rotary_emb_kv_(qkv[:, :, 1:].clone(), cos, sin, interleaved)
    assert torch.equal(kv[:, :, 0], want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_rotary_embedding_as_a_module(interleaved, scale_base):
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary, dim = RotaryEmbedding(8, 500.0, interleaved, scale_base), 8
    q, k, v = (torch.randn(2, 5, heads, 16) for heads in (4, 2, 2))

    def turned(x, places, sign, length):
        """By complex numbers; a scaled key is divided by what its query is multiplied by."""
        steps = torch.arange(0, dim, 2).double()
        angle = places.double()[..., None] * 500.0 ** (-steps / dim)
        part = x[..., :dim].double()
        pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).mT
        made = (
            torch.view_as_complex(pairs.contiguous())
            * torch.polar(torch.ones_like(angle), angle)[..., None, :]
        )
        if scale_base is not None:
            factor = (steps + 0.4 * dim) / (1.4 * dim)
            power = sign * (places.double()[..., None] - length // 2) / scale_base
            made = made * (factor**power)[..., None, :]
        pairs = torch.view_as_real(made)
        part = pairs.flatten(-2) if interleaved else pairs.mT.flatten(-2)
        return torch.cat([part, x[..., dim:].double()], -1)

    for offset, length in ((0, 5), (3, 8), (torch.tensor([2, 6]), 11)):
        places = torch.arange(5) + (offset[:, None] if isinstance(offset, torch.Tensor) else offset)
        places = places.expand(2, 5)
        want = turned(q, places, 1, length), turned(k, places, -1, length)
        whole = rotary(torch.cat([q, k, v], 2), seqlen_offset=offset, num_heads_q=4)
        torch.testing.assert_close(whole.double(), torch.cat([*want, v.double()], 2), atol=1e-5, rtol=1e-5)
        own, kv = rotary(q.clone(), torch.stack([k, v], 2), seqlen_offset=offset)
        torch.testing.assert_close(own.double(), want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kv.double(), torch.stack([want[1], v.double()], 2), atol=1e-5, rtol=1e-5)
    assert not rotary.state_dict()
    # A model in 16 bits has frequencies of 32.
    fine = RotaryEmbedding(64).bfloat16()(torch.ones(1, 900, 3, 1, 64, dtype=torch.bfloat16))
    exact = RotaryEmbedding(64)(torch.ones(1, 900, 3, 1, 64))
    torch.testing.assert_close(fine.float(), exact, atol=2e-2, rtol=0)


@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_tables_of_rotary_embedding_are_made_and_read_by_programs(scale_base):
    """As layers do that decode: tables for all positions first, then a cache's function with these tables."""
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary = RotaryEmbedding(8, scale_base=scale_base)
    assert rotary._cos_cached is None and rotary._seq_len_cached == 0
    rotary._update_cos_sin_cache(12, device="cpu", dtype=torch.bfloat16)
    tables = rotary._cos_cached, rotary._sin_cached
    assert tables[0].shape == (12, 4) and tables[0].dtype == torch.bfloat16
    assert (rotary._cos_k_cached is None) == (scale_base is None)
    rotary._update_cos_sin_cache(5, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert rotary._cos_cached is tables[0], "as many are there"
    rotary._update_cos_sin_cache(12)
    cos, sin = rotary._cos_cached, rotary._sin_cached
    assert cos.dtype == torch.float32 and rotary._seq_len_cached == 12
    if scale_base is not None:
        torch.testing.assert_close(cos * rotary._cos_k_cached + sin * rotary._sin_k_cached, torch.ones(12, 4))
        return
    q, k, v = (torch.randn(2, 1, heads, 16) for heads in (4, 2, 2))
    caches = [torch.randn(2, 12, 2, 16) for _ in range(2)]
    both = dict(cache_seqlens=7, causal=True)
    want = fa_attn.flash_attn_with_kvcache(
        q, *(x.clone() for x in caches), k, v, cos, sin, rotary_interleaved=False, **both
    )
    turned = rotary(torch.cat([q, k, v], 2), seqlen_offset=7, num_heads_q=4).split([4, 2, 2], 2)
    have = fa_attn.flash_attn_with_kvcache(turned[0], *caches, *turned[1:], **both)
    torch.testing.assert_close(have, want)


def test_views_of_one_projection_are_rotated_in_place():
    """q and kv of one tensor's split, as layers hand them over, whose gradients both join."""
    from flash_attn.layers.rotary import RotaryEmbedding

    weight, x = (torch.randn(*shape, requires_grad=True) for shape in ((128, 64), (2, 5, 64)))

    def gradients(apart):
        q, kv = torch.nn.functional.linear(x, weight).split([64, 64], -1)
        q, kv = q.unflatten(-1, (4, 16)), kv.unflatten(-1, (2, 2, 16))
        q, kv = RotaryEmbedding(16)(*((q.clone(), kv.clone()) if apart else (q, kv)), seqlen_offset=3)
        return torch.autograd.grad(
            fa_attn.flash_attn_kvpacked_func(q, kv, causal=True).square().sum(), (x, weight)
        )

    for have, want in zip(gradients(apart=False), gradients(apart=True)):
        torch.testing.assert_close(have, want)
