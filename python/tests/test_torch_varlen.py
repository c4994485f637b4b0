"""varlen_attn: torch's signature and rules."""

import inspect
import math

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
from fa_attn.flex import varlen_attn  # noqa: E402

H, HK, D = 4, 2, 16
# The third has no queries, the fourth no keys.
Q, K = [5, 17, 0, 3], [5, 24, 6, 0]
WINDOWS = [(-1, -1), (-1, 0), (4, 0), (3, 2), (-1, 1)]


class Aux:
    """What torch's AuxRequest is, which older torch lacks."""

    lse = True


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def drawn(seed=0, dtype=torch.float32, rows=(sum(Q), sum(K))):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows[0], H, D), (rows[1], HK, D), (rows[1], HK, D), (rows[0], H, D)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def formula(q, k, v, window, scale=None):
    """(out, lse) in float64, sequence by sequence."""
    outs, lses = [], []
    of_q, of_k = starts(Q).tolist(), starts(K).tolist()
    for at in range(len(Q)):
        own = q[of_q[at] : of_q[at + 1]].double()
        keys, values = (
            x[of_k[at] : of_k[at + 1]].double().repeat_interleave(H // HK, 1) for x in (k, v)
        )
        s = torch.einsum("ihd,jhd->hij", own, keys) * (D**-0.5 if scale is None else scale)
        distance = torch.arange(K[at]) - (torch.arange(Q[at])[:, None] + K[at] - Q[at])
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance >= -window[0]) | (window[0] < 0)
        seen &= (distance <= window[1]) | (window[1] < 0)
        s = s.masked_fill(~seen, -math.inf)
        lse = s.logsumexp(-1)
        p = (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        outs.append(torch.einsum("hij,jhd->ihd", p, values))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


def call(q, k, v, window, **options):
    longest = (max(Q), max(K))
    return varlen_attn(q, k, v, starts(Q), starts(K), *longest, window_size=window, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", WINDOWS)
def test_outputs_and_gradients_are_those_of_the_formula(dtype, window):
    q, k, v, dout = drawn(1, dtype)
    own = [x.clone().requires_grad_() for x in (q, k, v)]
    true = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = call(*own, window, return_aux=Aux, scale=0.3)
    want, want_lse = formula(*true, window, 0.3)
    limit = 2e-2 if dtype is torch.bfloat16 else 2e-5
    assert out.dtype is dtype and lse.shape == (H, sum(Q))
    torch.testing.assert_close(out.double(), want, atol=limit, rtol=limit)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=2e-5)
    dlse = torch.where(want_lse.isfinite(), torch.linspace(-1, 1, sum(Q), dtype=torch.float64), 0.0)
    found = torch.autograd.grad([out, lse], own, [dout, dlse.to(lse.dtype)])
    sums = (want * dout.double()).sum() + (want_lse.masked_fill(~want_lse.isfinite(), 0.0) * dlse).sum()
    for got, exact in zip(found, torch.autograd.grad(sums, true)):
        torch.testing.assert_close(got.double(), exact, atol=4 * limit, rtol=4 * limit)


def test_a_row_without_keys_is_nothing():
    out, lse = call(*drawn()[:3], (-1, -1), return_aux=Aux)
    assert (out[-3:] == 0).all() and (lse[:, -3:] == -math.inf).all()
    assert isinstance(call(*drawn()[:3], (-1, -1)), torch.Tensor)


def test_checks_of_gradients_in_float64():
    tensors = [x.requires_grad_() for x in drawn(2, torch.float64)[:3]]
    assert torch.autograd.gradcheck(lambda q, k, v: call(q, k, v, (4, 0)), tensors, nondet_tol=0.0)


@pytest.mark.parametrize("window", [(-1, 0), (3, 2)])
def test_compiled_without_a_break(window):
    def loss(q, k, v):
        return (call(q, k, v, window) ** 2).sum()

    tensors = [x.requires_grad_() for x in drawn(3)[:3]]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(loss(*tensors), tensors)
    for got, expected in zip(torch.autograd.grad(compiled(*tensors), tensors), want):
        torch.testing.assert_close(got, expected)


def test_names_and_defaults_are_torchs():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    own, other = (
        [(x.name, x.kind, x.default) for x in inspect.signature(face).parameters.values()]
        for face in (varlen_attn, varlen.varlen_attn)
    )
    # Later torch has more of them.
    assert own[:7] == other[:7] and set(own) <= set(other)
    assert fa_attn.varlen_attn is varlen_attn
    out = call(*drawn()[:3], (-1, -1), return_aux=varlen.AuxRequest(lse=False))
    assert isinstance(out, torch.Tensor)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(window_size=(1, 2, 3)), "window_size"),
        (dict(window_size=3), "window_size"),
        (dict(cu_seq_k=None), "cu_seq_k is None"),
        (dict(cu_seq_q=torch.tensor([0, 9, 5, 9, 9]).int()), "cu_seqlens_q"),
    ],
)
def test_what_is_not_of_the_form_is_refused(change, says):
    q, k, v, _ = drawn()
    given = dict(query=q, key=k, value=v, cu_seq_q=starts(Q), cu_seq_k=starts(K), max_q=max(Q), max_k=max(K))
    with pytest.raises((ValueError, TypeError), match=says):
        varlen_attn(**{**given, **change})
