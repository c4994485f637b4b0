"""Attention by its definition, in numpy's f64."""

import numpy as np

TOLERANCE = {np.float32: 2e-6, np.float16: 2e-3}


def arrays(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def close(got, want, dtype=np.float32, factor=1.0):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    both = np.isfinite(want)
    assert (both == np.isfinite(got)).all()
    got, want = got[both], want[both]
    limit = factor * TOLERANCE[dtype] * max(1.0, np.abs(want).max(initial=0.0))
    assert np.abs(got - want).max(initial=0.0) <= limit


def visible(seqlen_q, seqlen_k, left, right, offset=0):
    """Which keys each query sees, aligned to the bottom right but for an offset; a negative side has no limit."""
    distance = np.arange(seqlen_k)[None, :] - (np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q + offset)
    mask = np.ones((seqlen_q, seqlen_k), bool)
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def attention(
    q, k, v, *, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, sinks=None, offset=0
):
    """(out, lse, probabilities) of one sequence: q (rows, heads_q, dim), k and v (keys, heads_kv, dim)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    rows, keys = q.shape[0], k.shape[0]
    if slopes is not None:
        distance = np.abs(np.arange(rows)[:, None] + keys - rows + offset - np.arange(keys)[None, :])
        scores = scores - np.asarray(slopes, np.float64)[:, None, None] * distance
    left, right = window
    mask = visible(rows, keys, left, 0 if causal else right, offset)
    scores = np.where(mask, scores, -np.inf)
    logits = (
        scores
        if sinks is None
        else np.concatenate(
            [scores, np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:2], 1))],
            -1,
        )
    )
    top = logits.max(-1, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    total = np.exp(logits - safe[..., None]).sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, safe + np.log(total), -np.inf)
    shifted = np.where(np.isfinite(lse), lse, 0.0)
    weights = np.where(np.isfinite(lse)[..., None], np.exp(scores - shifted[..., None]), 0.0)
    return np.einsum("hij,jhd->ihd", weights, v), lse, weights


def gradients(dout, q, k, v, *, scale=None, sinks=None, **options):
    """(dq, dk, dv, dsinks) of one sequence, without a soft cap."""
    out, lse, weights = attention(q, k, v, scale=scale, sinks=sinks, **options)
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dweights = np.einsum("ihd,jhd->hij", dout, wide_v)
    delta = np.einsum("ihd,ihd->hi", dout, out)
    dscores = weights * (dweights - delta[..., None]) * scale
    narrow = lambda x: x.reshape(x.shape[0], k.shape[1], group, x.shape[-1]).sum(2)  # noqa: E731
    dq = np.einsum("hij,jhd->ihd", dscores, wide_k)
    dk = narrow(np.einsum("hij,ihd->jhd", dscores, q))
    dv = narrow(np.einsum("hij,ihd->jhd", weights, dout))
    dsinks = None
    if sinks is not None:
        dsinks = -(np.exp(np.asarray(sinks, np.float64)[:, None] - lse) * delta).sum(-1)
    return dq, dk, dv, dsinks


def rotated(x, cos, sin, positions, interleaved):
    """Rotary embedding of x (rows, heads, dim) at `positions`; cos and sin (positions, rotary_dim / 2)."""
    x = np.array(x, np.float64)
    half = cos.shape[1]
    c, s = (np.asarray(t, np.float64)[positions][:, None, :] for t in (cos, sin))
    low = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    high = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., low].copy(), x[..., high].copy()
    x[..., low], x[..., high] = a * c - b * s, b * c + a * s
    return x
