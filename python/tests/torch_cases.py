"""What the tests on torch tensors share: devices and types, the definition in f64, comparisons."""

import pytest

torch = pytest.importorskip("torch")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TYPES = {"cpu": [torch.float32, torch.bfloat16], "cuda": [torch.bfloat16, torch.float16]}
CASES = [(device, dtype) for device in DEVICES for dtype in TYPES[device]]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
on = pytest.mark.parametrize("device,dtype", CASES, ids=[f"{d}-{str(t)[6:]}" for d, t in CASES])


def definition(
    q,
    k,
    v,
    causal=False,
    window=(-1, -1),
    scale=None,
    softcap=0.0,
    slopes=None,
    sinks=None,
    return_lse=False,
    offset=0,
):
    """Attention in f64, differentiable; q (batch, seqlen, heads, dim)."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = q.shape[1], k.shape[1]
    distance = (
        torch.arange(keys, device=q.device)[None, :]
        - torch.arange(rows, device=q.device)[:, None]
        - keys
        + rows
        - offset
    )
    if slopes is not None:
        scores = scores - slopes.double().reshape(-1, slopes.shape[-1], 1, 1) * distance.abs()
    left, right = window
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1)[..., :keys].nan_to_num()
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return (out, torch.logsumexp(scores, -1)) if return_lse else out


def tensors(device, dtype, *shapes, seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def close(got, want, dtype, factor=1.0):
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape
    limit = factor * TOLERANCE[dtype] * max(1.0, want.abs().max().item() if want.numel() else 1.0)
    assert (got - want).abs().max().item() <= limit


def same_gradients(out, want, inputs, dtype):
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(want, inputs, dout.double())
    for one, other in zip(got, wanted):
        assert one.dtype == other.dtype
        close(one, other, dtype, factor=4)
