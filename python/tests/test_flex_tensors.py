"""What flex_attention takes of tensors: axes in any order, several types, elements of parameters."""

import pytest

torch = pytest.importorskip("torch")

from test_flex import D, H, HK, L, S, draw  # noqa: E402

import fa_attn  # noqa: E402
from fa_attn import flex_attention  # noqa: E402


def alibi_of_any(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx).abs()


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_out_has_its_axes_in_the_querys_order(order):
    shape = [(2, 5, 3)[order[axis]] for axis in range(3)]
    lain = draw(*(shape[order.index(axis)] for axis in range(3)), D)
    q = lain.permute(order).requires_grad_()
    own = [q, draw(*shape, D), draw(*shape, 8)]
    out = flex_attention(*own, alibi_of_any)
    assert out.permute([order.index(axis) for axis in range(4)]).is_contiguous()
    want = flex_attention(*(x.contiguous() for x in own), alibi_of_any)
    torch.testing.assert_close(out, want)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), q) for x in (out, want))):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("held", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_keys_of_other_types_are_computed_in_the_querys(held):
    q, k, v = draw(1, H, L, D), draw(1, HK, S, D).to(held), draw(1, HK, S, D).to(held)
    for query in (q, q.half(), q.double()):
        got = flex_attention(query, k, v, enable_gqa=True)
        want = flex_attention(query.float(), k.float(), v.float(), enable_gqa=True).to(query.dtype)
        assert got.dtype is query.dtype
        torch.testing.assert_close(got, want, atol=2e-3 if query.dtype is torch.float16 else 2e-6, rtol=1e-3)
    if held is torch.float16:
        k.requires_grad_()
        flex_attention(q, k, v, enable_gqa=True).sum().backward()
        assert k.grad.dtype is held and k.grad.any()
    with pytest.raises(fa_attn.UnsupportedError, match="k holds int64"):
        flex_attention(q, k.long(), v, enable_gqa=True)


def test_elements_of_a_parameter_are_of_one_array():
    first, second = (torch.nn.Parameter(draw(9)) for _ in range(2))
    own = [draw(1, H, n, D).requires_grad_() for n in (L, S, S)]

    def many(score, b, h, q_idx, kv_idx):
        return score + sum(first[at] * torch.sin(second[at] * (q_idx - kv_idx)) for at in range(9))

    def rows(score, b, h, q_idx, kv_idx):
        distances = torch.arange(L)[:, None] - torch.arange(S)
        return score + (first * torch.sin(second * distances[..., None])).sum(-1)[q_idx, kv_idx]

    assert len(fa_attn.Program.of_score(many).arrays) == 2
    outs = [flex_attention(*own, f) for f in (many, rows)]
    found = [torch.autograd.grad(out.square().sum(), (*own, first, second)) for out in outs]
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    with torch.no_grad():
        torch.testing.assert_close(flex_attention(*own, many), outs[0])
    # What is detached has none, and an element that was made before has its own.
    element = first[1]
    out = flex_attention(*own, lambda s, b, h, q, k: s * element + first.detach()[2] + first[0])
    made, whole = torch.autograd.grad(out.square().sum(), (element, first))
    torch.testing.assert_close(made, whole[1])
    assert made != 0 and not whole[2:].any()
