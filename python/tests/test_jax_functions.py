"""Masks and score functions that call jax's own functions, against what they give of numbers.

pip install jax pytest && python -m pytest tests/test_jax_functions.py
"""

import functools
import itertools

import numpy as np
import pytest

import fa_attn
from fa_attn import Program

jax = pytest.importorskip("jax")
jnp, lax, nn = jax.numpy, jax.lax, jax.nn

from fa_attn.jax import flash_attn_func  # noqa: E402

B, H, L = 2, 3, 12
with jax.default_device(jax.devices("cpu")[0]):
    KEYS = jax.random.split(jax.random.PRNGKey(0), 6)
    Q, K, V, DOUT = (jax.random.normal(key, (B, L, H, 16)) for key in KEYS[:4])
    TABLE, SLOPES = jax.random.normal(KEYS[4], (H, 2 * L)), jax.random.normal(KEYS[5], (H,))
    LENGTHS, DOCUMENTS = jnp.array([7, 12]), jnp.array([[0] * 5 + [1] * 7, [0] * 9 + [2] * 3])
    WORDS = jnp.array([[1, 5, 2], [4, 1, 1]], jnp.int8)
WIDTH, CAP = 4, 2.5

SCORES = {
    "where": lambda s, b, h, q, k: jnp.where((q - k) % 3 == 0, s, -jnp.inf),
    "cap": lambda s, b, h, q, k: CAP * jnp.tanh(s / CAP),
    "table": lambda s, b, h, q, k: s + TABLE[h, q - k + L],
    "negative": lambda s, b, h, q, k: s + TABLE[h, q - k],
    "slopes": lambda s, b, h, q, k: s - jnp.exp2(SLOPES[h]) * jnp.abs(q - k),
    "take": lambda s, b, h, q, k: s + jnp.take(SLOPES, h) * jnp.minimum(jnp.maximum(q - k, -WIDTH), WIDTH),
    "clip": lambda s, b, h, q, k: jnp.clip(s, -1.0, 1.5) + jnp.clip(q - k, -2, 2),
    "relu": lambda s, b, h, q, k: nn.relu(s) + nn.gelu(s) * nn.sigmoid(s) - nn.softplus(s),
    "silu": lambda s, b, h, q, k: nn.silu(s) + nn.leaky_relu(s) + nn.elu(s),
    "powers": lambda s, b, h, q, k: s**2 + jnp.power(2.0, -(q + 1)) + lax.rsqrt(s * s + jnp.sqrt(1.0 + q)),
    "cond": lambda s, b, h, q, k: lax.cond(q >= k, lambda x: x, lambda x: 0.5 * x, s),
    "switch": lambda s, b, h, q, k: lax.switch(h, [lambda x: x, lambda x: 2 * x, lambda x: -x], s),
    "select": lambda s, b, h, q, k: jnp.select([q == k, q > k], [s + 1.0, s], 0.25 * s),
    "parts": lambda s, b, h, q, k: s + TABLE[h, 2:8][q % 6 - 6] + TABLE[:, ::2][h, k % 5] + SLOPES[-1 - h],
    "moved": lambda s, b, h, q, k: s + SLOPES.at[q].get(mode="clip"),
    "filled": lambda s, b, h, q, k: s + SLOPES.at[k].get(mode="fill", fill_value=2),
    "piecewise": lambda s, b, h, q, k: jnp.piecewise(s, [s < 0, s >= 0], [lambda x: -x, lambda x: 2 * x]),
    "literal": lambda s, b, h, q, k: s + jnp.array([0.5, -1.0, 2.0])[h] + jnp.cumsum(LENGTHS)[b],
    "row": lambda s, b, h, q, k: s + jnp.dot(TABLE[h, :4], TABLE[h, 2:6]) + (TABLE[h, :3] * SLOPES).sum(),
    "rounding": lambda s, b, h, q, k: jnp.floor(s) + jnp.round(2 * s) + jnp.ceil(s) + jnp.sign(s),
    "divided": lambda s, b, h, q, k: s + (q - k) // 3 + jnp.remainder(k - q, 5) + jnp.trunc(s / 2),
    "truncated": lambda s, b, h, q, k: s + lax.rem(k - q, 3) + lax.div(k - q, 2),
    "logs": lambda s, b, h, q, k: jnp.logaddexp(s, 1.0) + jnp.log1p(jnp.exp(s)),
    "greatest": lambda s, b, h, q, k: jnp.max(jnp.stack([s, 2 * s])) + jnp.argmin(jnp.stack([s, s * s])),
    "types": lambda s, b, h, q, k: s.astype(jnp.float32) + (q > k).astype(jnp.float32) - q.astype(float) / 7,
    "jitted": lambda s, b, h, q, k: jax.jit(lambda x, y: x * y)(s, SLOPES[h]),
    "reduced": lambda s, b, h, q, k: s + jnp.sum(jnp.where(WORDS[b] == q, 1.0, 0.0)) + jnp.max(WORDS[b]),
}
MASKS = {
    "documents": lambda b, h, q, k: jnp.logical_and(DOCUMENTS[b, q] == DOCUMENTS[b, k], q >= k),
    "lengths": lambda b, h, q, k: k < jnp.take(LENGTHS, b, axis=0),
    "isin": lambda b, h, q, k: jnp.isin(k - q, jnp.array([0, -1, 3])),
    "any": lambda b, h, q, k: jnp.any(WORDS[b] == k - q) | (q == k),
    "logic": lambda b, h, q, k: jnp.logical_or(~(q < k), jnp.logical_xor(q % 2 == 0, k % 2 == 1)),
    "chunks": lambda b, h, q, k: jnp.logical_and(q // WIDTH == k // WIDTH, jnp.greater_equal(q, k)),
    "bits": lambda b, h, q, k: jnp.bitwise_and(jnp.right_shift(q, 1), k) == 0,
    "number": lambda b, h, q, k: jnp.where(q >= k, 1, 0),
}


POINTS = list(itertools.product([-1.3, 0.25, 2.5], range(B), range(H), [0, 3, 11], [0, 2, 5, 11]))


def of_all(function, points):
    """What a function gives of each of the points, by jax."""
    columns = [jnp.asarray(column) for column in zip(*points)]
    return np.asarray(jax.jit(jax.vmap(function))(*columns))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("extents", [None, (B, H, L, L)], ids=["any", "extents"])
def test_scores(name, extents):
    function = SCORES[name]
    if name == "negative" and extents is None:
        # Of calls of any lengths distances are not taken for negative.
        function = SCORES["table"]
    made = Program.of_score(function, extents=extents)
    got = made.evaluate([(s, b, h, h, q, k, L, L, 0) for s, b, h, q, k in POINTS])
    visible, values, slopes = (np.array(column) for column in zip(*got))
    want = of_all(function, POINTS)
    assert np.array_equal(visible, want != -np.inf)
    assert np.allclose(values[visible], want[visible], 1e-5, 1e-5)
    want = of_all(jax.grad(lambda s, *at: jnp.asarray(function(s, *at), jnp.float32)), POINTS)
    assert np.allclose(slopes[visible], want[visible], 1e-4, 1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    function = MASKS[name]
    made = Program.of_mask(function, extents=(B, H, L, L))
    points = [at for s, *at in POINTS if s == 2.5]
    got = made.evaluate([(0.0, b, h, h, q, k, L, L, 0) for b, h, q, k in points])
    assert [visible for visible, *_ in got] == of_all(function, points).astype(bool).tolist()


def test_calls_and_gradients_under_jit():
    def scored(s, b, h, q, k, table=None):
        return jnp.where(q >= k, s + (TABLE if table is None else table)[h, q - k + L], -jnp.inf)

    def ours(q, k, v, table):
        return (flash_attn_func(q, k, v, score_mod=functools.partial(scored, table=table)) * DOUT).sum()

    def formula(q, k, v, table):
        at = jnp.arange(L)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4 + table[:, at[:, None] - at + L]
        p = nn.softmax(jnp.where(at[:, None] >= at, s, -jnp.inf))
        return (jnp.einsum("bhqk,bkhd->bqhd", p, v) * DOUT).sum()

    got, want = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(Q, K, V, TABLE) for f in (ours, formula))
    for one, other in zip(got, want):
        assert np.abs(one - other).max() < 1e-4
    eager = jax.grad(ours, (0, 1, 2, 3))(Q, K, V, TABLE)
    assert all(np.abs(one - other).max() < 1e-5 for one, other in zip(eager, got))


def test_numbers_are_scalars_of_the_program():
    def masked(width, by):
        return lambda b, h, q, k: jnp.abs(q - k) <= width * by

    first, second = (Program.of_mask(masked(*given)) for given in ((3, 2), (5, 1)))
    assert first.text == second.text and sorted(first.scalars.values()) == [2, 3]
    # One that makes an array of as many elements is a constant.
    listed = Program.of_mask((lambda n: lambda b, h, q, k: jnp.any(jnp.arange(n) == q - k))(3))
    assert not listed.scalars


def test_divisions_are_the_language_s():
    chunks = Program.of_mask(MASKS["chunks"])
    assert "//" in chunks.text and "select" not in chunks.text


def test_what_is_refused_says_why():
    @jax.custom_jvp
    def straight(x):
        return jnp.round(x)

    straight.defjvp(lambda x, dx: (straight(*x), dx[0]))
    for function, words in (
        (lambda s, b, h, q, k: straight(s), "straight, which has a derivative of its own"),
        (lambda s, b, h, q, k: s if jnp.abs(q) > k else -s, "cannot branch"),
        (lambda s, b, h, q, k: s + jnp.sum(jnp.arange(100) * q), "64"),
        (lambda s, b, h, q, k: s + jax.random.uniform(jax.random.key(q)), "in a mask or score function"),
        (lambda s, b, h, q, k: lax.fori_loop(0, q, lambda i, x: x + 1, s), "`while` of jax"),
        (lambda s, b, h, q, k: lax.stop_gradient(s), "detach"),
        (lambda s, b, h, q, k: s + jnp.float32(lax.bitcast_convert_type(q, jnp.uint32)), "jax"),
    ):
        with pytest.raises(fa_attn.UnsupportedError, match=words):
            Program.of_score(function)
    with pytest.raises(fa_attn.InputError, match="gives one number"):
        Program.of_score(lambda s, b, h, q, k: (jnp.abs(s), jnp.abs(q)))
