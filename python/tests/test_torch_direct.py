"""Gradients of arrays that no kernel sums, by arrays that torch gathers, beside those that the CPU sums."""

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
from fa_attn import _torch_passes as passes  # noqa: E402

B, H, G, L, S, D = 3, 4, 2, 21, 34, 16

# Each reads `t` at indices for which kernels have no sum; of arrays and scalars there are those in `given`.
SCORES = {
    "distance": "array t: f32[_, _] grad; score = s + t[h, q - k + 33];",
    "clamped distance": "array t: f32[_, _] grad; scalar n: i32;"
    "score = s * t[hk, min(max(q - k, -n), n) + n];",
    "distance from the end": "array t: f32[_, _] grad; score = s + t[b, k - q - off + 33];",
    "beyond both ends": "array t: f32[_, _] grad; score = s + t[h, 2 * (q - k)];",
    "constant": "array t: f32[_, _] grad; score = s + t[1, k];",
    "constants": "array t: f32[_, _] grad; score = s * t[1, 2] + t[0, 70];",
    "twice": "array t: f32[_, _] grad; score = s + t[h, k] - t[h, q];",
    "plain and not": "array t: f32[_, _] grad; array u: f32[_, _] grad; score = s + t[h, q // 3] + u[q, k];",
    "of a list": "array t: f32[_, _] grad; array c: i32[_]; mask = c[q] <= c[k];"
    "score = s + t[h, c[k] * 5 + c[q]];",
    "of bytes and bits": "array t: f32[_, _] grad; array w: bits[_, _]; array e: u8[_]; array o: bool[_];"
    "score = s + t[select(w[q, k], 0, 1), select(o[k], e[q], e[k])];",
    "row and its own": "array t: f32[_, _] grad; score = s + t[q % 4, (q ^ k) & 15];",
    "sequences": "array t: f32[_, _] grad; score = s + t[b, sk - k + sq];",
    "shifts": "array t: f32[_, _] grad; score = s + t[h, (k >> 2) + (1 << (q % 3)) + (k >> 40) + (q << 33)];",
    "bucket": "array t: f32[_, _] grad; let d = f32(max(q - k, 1));"
    "score = s + t[h, i32(log(d) / log(128.0) * 16.5) + abs(-i32(floor(d / 9.7)))];",
    "of one index": "array t: f32[_, _] grad; score = s * t[h, h] + t[k, k] + t[q, q];",
    "where it is small": "array t: f32[_, _] grad; score = select(t[0, 0] < 9.0, s + t[h, k % 5], s);",
}


def given():
    draw = torch.Generator().manual_seed(5)
    return dict(
        t=torch.randn((4, 72), generator=draw),
        u=torch.randn((L, S), generator=draw).to(torch.bfloat16),
        c=torch.randint(0, 4, (S,), generator=draw, dtype=torch.int32),
        w=torch.randint(-(2**31), 2**31, (L, 2), generator=draw).to(torch.int32),
        e=torch.randint(0, 60, (S,), generator=draw, dtype=torch.uint8),
        o=torch.rand((S,), generator=draw) < 0.5,
    ), dict(n=9)


@pytest.mark.parametrize("form", ["equal", "used", "packed"])
@pytest.mark.parametrize("name", SCORES)
def test_gathered_arrays_have_the_gradients_of_their_elements(name, form, monkeypatch):
    text = SCORES[name]
    arrays, scalars = given()
    arrays = {key: x for key, x in arrays.items() if f"array {key}:" in text}
    if "u" in arrays:
        text = text.replace("array u: f32", "array u: bf16")
    scalars = {key: x for key, x in scalars.items() if f"scalar {key}:" in text}
    learned = [arrays[key].requires_grad_() for key in ("t", "u") if key in arrays]
    program = fa_attn.Program(text, arrays, scalars)
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=draw) for shape in ((B, L, H, D), (B, S, G, D), (B, S, G, D)))
    dout = torch.randn(q.shape, generator=draw)

    def gradients():
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        if form == "packed":
            starts_q = torch.tensor([0, L, L + 5, L + 5 + 17], dtype=torch.int32)
            starts_k = torch.tensor([0, 11, 11 + S, 11 + S + 30], dtype=torch.int32)
            rows = [x.flatten(0, 1)[:n] for x, n in zip(own, (L + 22, 41 + S, 41 + S))]
            out = fa_attn.flash_attn_varlen_func(*rows, starts_q, starts_k, L, S, score_mod=program)
            out.backward(dout.flatten(0, 1)[: L + 22])
        elif form == "used":
            used = torch.tensor([S, 7, 30], dtype=torch.int32)
            options = dict(seqused_k=used, score_mod=program, causal=True)
            fa_attn.flash_attn_varlen_func(*own, **options).backward(dout)
        else:
            fa_attn.flash_attn_func(*own, score_mod=program, window_size=(20, 9)).backward(dout)
        made = [x.grad for x in (*own, *learned)]
        for x in learned:
            x.grad = None
        return made

    want = gradients()
    calls = []
    monkeypatch.setattr(passes, "has_kernels", lambda q: calls.append(q) or True)
    for got, other in zip(gradients(), want):
        assert calls and got.dtype == other.dtype
        limit = 2e-5 if got.dtype == q.dtype else 8e-3
        assert (got - other).abs().max() <= limit * max(1.0, other.abs().max())
    assert any(x.abs().max() > 1e-3 for x in want[3:])


def test_programs_that_no_kernel_differentiates_are_left_to_its_error(monkeypatch):
    """Nine loads need more arrays than there can be: a GPU refuses the program, the CPU computes it."""
    table = torch.randn(40, requires_grad=True)
    q = torch.randn(1, 9, 2, D)
    terms = " + ".join(f"t[q + {at}]" for at in range(9))
    program = fa_attn.Program(f"array t: f32[_] grad; score = s + {terms};", dict(t=table))
    monkeypatch.setattr(passes, "has_kernels", lambda q: True)
    fa_attn.flash_attn_func(q, q, q, score_mod=program).sum().backward()
    # A term that all keys of a query share changes nothing.
    assert table.grad.abs().max() < 1e-4


# Arrays that go on behind their indices, one that no score follows, and one beside a mask that is built in.
PARTS = [
    "array t: f32[_, _] grad; array u: f32[_, _] grad; score = s + t[h, k];",
    "array t: f32[_, _] grad; array u: f32[_, _] grad; score = s * t[hk, 3] + u[q, k];",
    "array t: f32[_, _] grad; array u: f32[_, _] grad; score = s + u[b, q] * t[h, q - k];",
    "array t: f32[_, _] grad; array u: f32[_, _] grad; score = s + t[h, q - k];",
    "array t: f32[_, _] grad; array u: f32[_, _] grad; mask = k <= q;",
]


@pytest.mark.parametrize("text", PARTS)
def test_gradients_of_what_is_not_read_are_zeros(text, monkeypatch):
    draw = torch.Generator().manual_seed(7)
    arrays = {name: torch.randn((40, 80), generator=draw).requires_grad_() for name in "tu"}
    program = fa_attn.Program(text, arrays)
    own = [torch.randn((B, rows, heads, D), generator=draw) for rows, heads in ((L, H), (S, G), (S, G))]
    own = [x.requires_grad_() for x in own]

    def gradients():
        mods = dict(score_mod=program) if program.score else dict(mask_mod=program)
        out = fa_attn.flash_attn_func(*own, **mods)
        return torch.autograd.grad(out.square().sum(), (*own, *arrays.values()))

    want = gradients()
    monkeypatch.setattr(passes, "has_kernels", lambda q: True)
    for got, other in zip(gradients(), want):
        torch.testing.assert_close(got, other, atol=2e-5, rtol=2e-5)
