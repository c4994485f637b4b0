"""Gradients of head dims above 256 by torch's products, beside those of the CPU's kernels."""

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
from fa_attn import _torch_passes as passes  # noqa: E402
from fa_attn import _torch_wide as wide  # noqa: E402

B, H, G, R, K, D, E = 2, 4, 2, 21, 34, 24, 16

CALLS = {
    "full": {},
    "scale": dict(softmax_scale=0.3),
    "causal": dict(causal=True),
    "window": dict(window_size=(5, 3)),
    "moved window": dict(causal=True, window_size=(7, 0), query_offset=-20),
    "cap": dict(causal=True, softcap=0.7),
    "slopes": dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.7])),
    "slopes of sequences": dict(causal=True, alibi_slopes=torch.rand((B, H))),
    "mask": dict(mask=torch.rand((B, 1, R, K), generator=torch.Generator().manual_seed(3)) < 0.7),
}
SCORES = {
    "bias": "array t: f32[_, _, _, _] grad; score = s + t[b, h, q, k];",
    "one row": "array t: f32[_, _, _, _] grad; mask = (q + k) % 5 != 0; score = s + t[b, h, 3, k];",
    "heads": "array t: f32[_, _, _, _] grad; score = s * t[0, h, 0, 1] + t[b, hk, q, 2 * k];",
    "distance": "array t: f32[_, _, _, _] grad; score = tanh(s) + t[0, h, 0, q - k + off + 5];",
    "untaken": "array t: f32[_, _, _, _] grad; score = select(s > 0.0, sqrt(s) + t[b, h, q, k], -s);",
    "list": "array t: f32[_, _, _, _] grad; array c: i32[_]; mask = c[q] <= c[k];"
    "score = s + t[0, 1, c[q], c[k]];",
}


def drawn(*shapes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


def both(monkeypatch, call, learned, room=1 << 24):
    """The gradients of a call of (out, LSE) by the CPU's kernels and by products."""
    found = []
    for is_wide in (False, True):
        monkeypatch.setattr(passes, "is_wide", lambda *_, is_wide=is_wide: is_wide)
        monkeypatch.setattr(wide, "_ROOM", room)
        results = [x for x in call() if x is not None]
        draw = torch.Generator().manual_seed(7)
        given = [torch.randn(x.shape, generator=draw) for x in results]
        found.append(torch.autograd.grad(results, learned, given))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("room", [1, 1 << 24], ids=["parts", "whole"])
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, room, monkeypatch):
    tensors = drawn((B, R, H, D), (B, K, G, D), (B, K, G, E))
    call = lambda: fa_attn.flash_attn_func(*tensors, return_softmax_lse=True, **CALLS[name])  # noqa: E731
    both(monkeypatch, call, tensors, room)


@pytest.mark.parametrize("form", ["equal", "packed"])
@pytest.mark.parametrize("name", SCORES)
def test_programs(name, form, monkeypatch):
    q, k, v = drawn((B, R, H, D), (B, K, G, D), (B, K, G, E))
    (t,) = drawn((B, H, R, K), seed=1)
    arrays = dict(t=t, c=torch.arange(K, dtype=torch.int32) % 7)
    program = fa_attn.Program(SCORES[name], {x: arrays[x] for x in arrays if f"array {x}:" in SCORES[name]})

    def call():
        if form == "equal":
            return fa_attn.flash_attn_func(q, k, v, score_mod=program, return_softmax_lse=True)
        starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 21, 30], [0, 30, 61]))
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        packed = (*flat, starts_q, starts_k, 21, 31)
        # Rows of no sequence have no results that are written.
        out, lse = fa_attn.flash_attn_varlen_func(*packed, score_mod=program, return_softmax_lse=True)[:2]
        return out[:30], lse[:, :30]

    both(monkeypatch, call, [q, k, v, t], room=1)


def test_sinks_of_sequences_used_in_part(monkeypatch):
    q, k, v, sinks = drawn((B, R, H, D), (B, K, G, D), (B, K, G, E), (H,))
    used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([9, 0], [34, 3]))

    def call():
        own = dict(seqused_q=used_q, seqused_k=used_k, causal=True, sinks=sinks)
        return (fa_attn.flash_attn_varlen_func(q, k, v, **own),)

    both(monkeypatch, call, [q, k, v, sinks])


def test_dropout(monkeypatch):
    tensors = drawn((B, R, H, D), (B, K, G, D), (B, K, G, E))

    def call():
        torch.manual_seed(3)
        return (fa_attn.flash_attn_func(*tensors, dropout_p=0.3, causal=True),)

    both(monkeypatch, call, tensors)


def test_shapes_of_results_are_checked(monkeypatch):
    monkeypatch.setattr(passes, "is_wide", lambda *_: True)
    q, k, v = (x.detach() for x in drawn((B, R, H, D), (B, K, G, D), (B, K, G, E)))
    out, lse = fa_attn.flash_attn_func(q, k, v, return_softmax_lse=True)[:2]
    with pytest.raises(fa_attn.InputError, match=r"lse has the shape \(2, 4, 20\)"):
        fa_attn.flash_attn_backward(torch.ones_like(out), q, k, v, out, lse[..., 1:])
