"""Masks, biases and programs of one's own under jax's jit, grad and vmap, against the formula in jax.

pip install jax pytest && python -m pytest tests/test_jax_programs.py
"""

import math
from functools import partial

import numpy as np
import pytest

import fa_attn

jax = pytest.importorskip("jax")
jnp = jax.numpy

from fa_attn.jax import dot_product_attention, flash_attn_func  # noqa: E402

B, L, S, H, HK, D = 2, 12, 15, 4, 2, 16
with jax.default_device(jax.devices("cpu")[0]):
    KEYS = jax.random.split(jax.random.PRNGKey(0), 7)
    Q, K, V, DOUT = (
        jax.random.normal(key, shape)
        for key, shape in zip(KEYS, [(B, L, H, D), (B, S, HK, D), (B, S, HK, D), (B, L, H, D)])
    )
    BIAS, TABLE = jax.random.normal(KEYS[4], (1, H, L, S)), jax.random.normal(KEYS[5], (H, L + S))
    MASK = jax.random.bernoulli(KEYS[6], 0.6, (B, 1, L, S)).at[:, :, 3].set(False)
    ROWS, COLUMNS = jnp.arange(L)[:, None], jnp.arange(S)
CAP = fa_attn.Program("scalar c: f32; score = c * tanh(s / c);", scalars={"c": 2.0})


def formula(q, k, v, score=lambda s, x: s, seen=True, x=None):
    k, v = (jnp.repeat(one, H // HK, 2) for one in (k, v))
    s = score(jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D), x)
    s = jnp.where(seen, s, -jnp.inf)
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - jnp.where(jnp.isinf(top), 0.0, top))
    total = e.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", e / jnp.where(total == 0, 1.0, total), v)


def relative(table):
    return lambda s, b, h, q, k: s * 0.5 + table[h, q - k + S]


# Names: (options of a call by its array, the formula's score of that array, the keys that are seen, it).
CASES = {
    "bias": (lambda x: dict(bias=x), lambda s, x: s + x, True, BIAS),
    "bias of keys": (lambda x: dict(bias=x), lambda s, x: s + x, True, BIAS[:, :1, :1]),
    "mask": (lambda x: dict(bias=x, mask=MASK), lambda s, x: s + x, MASK, BIAS),
    "text": (
        lambda x: dict(score_mod=CAP, bias=x, mask_mod="k <= q + off"),
        lambda s, x: 2 * jnp.tanh((s + x) / 2),
        COLUMNS <= ROWS + S - L,
        BIAS,
    ),
    "function": (
        lambda x: dict(score_mod=relative(x), mask_mod=lambda b, h, q, k: q + 3 >= k),
        lambda s, x: s * 0.5 + x[:, ROWS - COLUMNS + S],
        ROWS + 3 >= COLUMNS,
        TABLE,
    ),
}


def near(one, other, limit=2e-5):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        assert x.shape == y.shape
        assert np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0.0) <= limit


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_under_jit(name):
    options, score, seen, x = CASES[name]
    ours = lambda q, k, v, x: (flash_attn_func(q, k, v, **options(x)) * DOUT).sum()  # noqa: E731
    true = lambda q, k, v, x: (formula(q, k, v, score, seen, x) * DOUT).sum()  # noqa: E731
    near(flash_attn_func(Q, K, V, **options(x)), formula(Q, K, V, score, seen, x))
    every = (0, 1, 2, 3)
    near(
        jax.jit(jax.value_and_grad(ours, every))(Q, K, V, x),
        jax.value_and_grad(true, every)(Q, K, V, x),
        5e-5,
    )
    # What is not differentiated has no gradient to compute.
    near(jax.grad(ours, 0)(Q, K, V, x), jax.grad(true, 0)(Q, K, V, x))


def test_a_band_and_a_cap_are_the_built_in_ones():
    own, named = dict(score_mod=CAP, mask_mod="k <= q + off"), dict(softcap=2.0, causal=True)

    def gradients(options):
        return jax.jit(jax.grad(lambda *x: (flash_attn_func(*x, **options) * DOUT).sum(), (0, 1, 2)))(Q, K, V)

    for got, want in zip(gradients(own), gradients(named)):
        assert jnp.array_equal(got, want)


def test_vmap_is_each_element_by_itself():
    biases, queries = jnp.stack([BIAS, 2 * BIAS]), jnp.stack([Q, 2 * Q])
    added = lambda s, x: s + x  # noqa: E731
    ours = lambda q, x: flash_attn_func(q, K, V, bias=x)  # noqa: E731
    want = jnp.stack([formula(q, K, V, added, x=x) for q, x in zip(queries, biases)])
    near(jax.jit(jax.vmap(ours))(queries, biases), want)
    slope = jax.vmap(jax.grad(lambda x: (ours(Q, x) * DOUT).sum()))(biases)
    near(slope[1], jax.grad(lambda x: (formula(Q, K, V, added, x=x) * DOUT).sum())(biases[1]))


def test_a_bias_of_16_bits_has_a_gradient_of_its_type():
    ours = jax.jit(jax.grad(lambda x: (flash_attn_func(Q, K, V, bias=x) * DOUT).sum()))
    made = ours(BIAS.astype("bfloat16"))
    assert made.dtype == "bfloat16"
    true = jax.grad(lambda x: (formula(Q, K, V, lambda s, x: s + x, x=x) * DOUT).sum())(BIAS)
    near(made, true, 0.05)


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True),
        dict(local_window_size=(3, 2)),
        dict(bias=BIAS, is_causal=True),
        dict(mask=MASK.at[:, :, 3].set(True)),
        dict(bias=BIAS[0], mask=jnp.ones((L, S), bool)),
    ],
    ids=["causal", "window", "bias", "mask", "fewer axes"],
)
def test_dot_product_attention_is_jax_s_from_the_top_left(options):
    wide = {name: x[None] if getattr(x, "ndim", 4) == 3 else x for name, x in options.items()}
    wide = {name: x[None, None] if getattr(x, "ndim", 4) == 2 else x for name, x in wide.items()}
    want = jax.nn.dot_product_attention(Q, K, V, **wide)
    near(jax.jit(lambda q: dot_product_attention(q, K, V, **options))(Q), want)


@pytest.mark.parametrize("lengths", [(3, 15), (12, 2)])
@pytest.mark.parametrize("window", [None, (2, 5), (1, 0), 1])
@pytest.mark.parametrize("is_causal", [True, False])
def test_masks_from_the_top_left_of_other_lengths(lengths, window, is_causal, monkeypatch):
    """No kernel has a mask whose diagonal ends before the first key, or begins beyond the last."""
    rows, keys = lengths
    calls, plain = [], fa_attn.jax.flash_attn_varlen_func

    def called(*arrays, **options):
        calls.append((arrays[1].shape[1], options))
        return plain(*arrays, **options)

    monkeypatch.setattr(fa_attn.jax, "flash_attn_varlen_func", called)
    given = dict(is_causal=is_causal, local_window_size=window)
    q, k, v = Q[:, :rows], K[:, :keys], V[:, :keys]
    got = dot_product_attention(q, k, v, **given)
    ((count, options),) = calls
    left, right = options["window_size"]
    right = 0 if options["causal"] else right
    offset = options["query_offset"]
    assert count <= keys and (right < 0 or right + offset >= 0) and (left < 0 or left >= offset)
    left, right = (window, window) if isinstance(window, int) else window or (-1, -1)
    distance = jnp.arange(keys) - jnp.arange(rows)[:, None]
    seen = (distance >= -left if left >= 0 else distance < keys) & (distance <= right if right >= 0 else True)
    seen = (seen & (distance <= 0) if is_causal else seen).any(1)[:, None, None]
    near(got, jnp.where(seen, jax.nn.dot_product_attention(q, k, v, **given), 0.0))


def test_masks_of_numbers_are_refused_as_by_jax():
    for wrong in (MASK.astype(float), MASK.astype(int)):
        with pytest.raises(fa_attn.InputTypeError, match="mask holds .*: it must be bool"):
            dot_product_attention(Q, K, V, mask=wrong)


def test_numbers_of_python_and_numpy_are_arrays_as_for_jax():
    """numpy's own are of 64 bits, which jax makes 32 of."""
    mask, whole = MASK.at[:, :, 3].set(True), jnp.arange(S) % 3
    want = jax.nn.dot_product_attention(Q, K, V, bias=whole[None, None, None], mask=mask)
    given = (np.asarray(x, np.float64) for x in (Q, K, V))
    near(dot_product_attention(*given, bias=np.asarray(whole), mask=mask.tolist()), want)


@pytest.mark.parametrize("window", [(-1, 4), (4, -2), (-3, 5), (0, -1), (-1, -1)])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("rows", [L, 4])
def test_sides_of_windows_below_zero_are_jax_s(window, is_causal, rows):
    """They begin or end the window beside the diagonal; FlashAttention's -1 is no side."""
    distance = jnp.arange(S) - jnp.arange(rows)[:, None]
    seen = (distance >= -window[0]) & (distance <= window[1]) & ((distance <= 0) | (not is_causal))
    options = dict(is_causal=is_causal, local_window_size=window)
    want = jax.nn.dot_product_attention(Q[:, :rows], K, V, **options)
    got = dot_product_attention(Q[:, :rows], K, V, **options)
    near(got, jnp.where(seen.any(1)[:, None, None], want, 0.0))


@pytest.mark.parametrize("bias", [None, BIAS], ids=["alone", "bias"])
def test_a_scale_may_be_traced_and_has_a_gradient(bias):
    def loss(f, scale, q, bias):
        return (f(q, K, V, bias, scale=scale, is_causal=True) * DOUT).sum()

    wanted = (1, 2) if bias is None else (1, 2, 3)
    got, want = (
        jax.jit(jax.value_and_grad(partial(loss, f), tuple(at - 1 for at in wanted)))(0.3, Q, bias)
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    near(got[0], want[0], 1e-3)
    for one, other in zip(got[1], want[1]):
        near(one, other, 1e-3)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(is_causal=True),
        dict(local_window_size=(2, 1)),
        dict(key_value_seq_lengths=[15, 9], query_seq_lengths=[12, 7]),
        dict(scale=0.3, mask=True, bias=True),
    ],
    ids=["plain", "causal", "window", "lengths", "mask"],
)
def test_float64_is_computed_with_derivatives_of_every_order(options):
    with jax.enable_x64(True):
        q, k, v, dout = (x.astype(jnp.float64) for x in (Q, K, V, DOUT))
        options = {
            name: jnp.asarray(x, jnp.int32) if isinstance(x, list) else x for name, x in options.items()
        }
        if options.pop("mask", False):
            options.update(mask=MASK.at[:, :, 3].set(True), bias=BIAS.astype(jnp.float64))

        def loss(f, *given):
            return (f(*given, **options) ** 2 * dout).sum()

        ours, theirs = (partial(loss, f) for f in (dot_product_attention, jax.nn.dot_product_attention))
        for order in (
            lambda f: jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v),
            lambda f: jax.jvp(jax.grad(f), (q, k, v), (dout, v, k))[1],
        ):
            for one, other in zip(*(jax.tree.leaves(order(f)) for f in (ours, theirs))):
                assert one.dtype == np.float64
                # jax's own scores are of float32.
                near(one, other, 2e-5)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, H // k.shape[2], 2)) / 4
        want = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), jnp.repeat(v, H // v.shape[2], 2))
        near(dot_product_attention(q, k, v), want, 1e-13)
        with jax.debug_infs(True):
            near(dot_product_attention(q, k, v, mask=jnp.ones((S,), bool)), want, 1e-13)
        blind = dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 1, S), bool), return_residual=True)
        assert (blind[0] == 0).all() and (blind[1] == -jnp.inf).all()
        with pytest.raises(fa_attn.InputError, match="must be a multiple of key/value heads"):
            dot_product_attention(q[:, :, :1], k, v)


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True, query_seq_lengths=[12, 7], key_value_seq_lengths=[15, 9]),
        dict(is_causal=True, key_value_seq_lengths=[15, 9]),
        dict(local_window_size=(3, 2), query_seq_lengths=[12, 7], key_value_seq_lengths=[15, 9]),
        dict(local_window_size=(3, 2), is_causal=True, query_seq_lengths=[12, 7]),
    ],
    ids=["both", "keys", "window", "queries"],
)
def test_dot_product_attention_with_lengths_that_differ(options):
    options = {
        name: jnp.asarray(x, jnp.int32) if isinstance(x, list) else x for name, x in options.items()
    }

    def loss(function):
        return jax.value_and_grad(lambda *given: (function(*given, **options) * DOUT).sum(), (0, 1, 2))

    got, want = (loss(f)(Q, K, V) for f in (dot_product_attention, jax.nn.dot_product_attention))
    near(got[0], want[0], 1e-3)
    for one, other in zip(got[1], want[1]):
        near(one, other)


def test_lengths_of_any_integers_are_taken():
    want = jax.nn.dot_product_attention(Q, K, V, key_value_seq_lengths=jnp.asarray([15, 9], jnp.int32))
    for given in ([15, 9], np.array([15, 9]), np.array([15, 9], np.uint8)):
        near(dot_product_attention(Q, K, V, key_value_seq_lengths=given), want)
    for given in ([15, -9], [15.0, 9.0], np.array([15, 2**32 + 9])):
        with pytest.raises(ValueError, match="seqused_k"):
            dot_product_attention(Q, K, V, key_value_seq_lengths=given)


def test_ranks_are_not_promoted():
    """Programs may forbid it by jax_numpy_rank_promotion."""
    codes, descale = fa_attn.quantize_kv(K, per="head")
    with jax.numpy_rank_promotion("raise"):
        want = dot_product_attention(Q, K, V, mask=MASK)
        near(jax.jit(partial(dot_product_attention, mask=MASK))(Q, K, V), want)
        out, lse = jax.jit(partial(flash_attn_func, return_lse=True))(Q, K, V)
        merged, _ = jax.jit(lambda *x: fa_attn.merge(x, (lse, lse), sinks=jnp.zeros(H)))(out, out)
        assert merged.shape == out.shape
        made, _ = jax.jit(lambda x: fa_attn.quantize_kv(x, descale=descale))(K)
        assert (made == codes).all()
        near(fa_attn.dequantize_kv(made, descale), K, 0.2)


def test_a_residual_is_of_jax_s_type():
    q, k, v = (x.astype(jnp.bfloat16) for x in (Q, K, V))
    got, want = (
        f(q, k, v, return_residual=True)[1] for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert got.dtype == want.dtype
    near(got.astype(jnp.float32), want.astype(jnp.float32), 0.05)
    slope = jax.grad(lambda q: dot_product_attention(q, K, V, return_residual=True)[1].sum())(Q)
    assert (slope == 0).all(), "as jax's, whose residual has no gradient"


def test_what_a_program_refuses_is_refused_under_jit():
    for fault, options in (
        ("bias has 3 along keys", dict(bias=BIAS[..., :3])),
        ("the call lacks t", dict(score_mod="array t: f32[_]; score = s + t[h];")),
        ("softcap .* program", dict(score_mod="s * 2", softcap=3.0)),
    ):
        with pytest.raises(ValueError, match=fault):
            jax.jit(partial(flash_attn_func, k=K, v=V, **options))(Q)


@pytest.mark.parametrize("state", [(7, 2**40 + 3), jax.random.key(5)], ids=["pair", "key"])
def test_dropout_is_a_function_of_its_state(state):
    from fa_attn.jax import kept_bits

    # 0.75 of the bytes are at most 191.
    words = np.asarray(kept_bits((B, H, L, S), 191, state))
    kept = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[..., :S].astype(bool)
    assert 0.6 < kept.mean() < 0.9

    def own(q, k, v):
        return flash_attn_func(q, k, v, 0.25, causal=True, rng_state=state)

    def written_out(q, k, v):
        k, v = (jnp.repeat(one, H // HK, 2) for one in (k, v))
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
        p = jax.nn.softmax(jnp.where(COLUMNS <= ROWS + S - L, s, -jnp.inf)) * kept / 0.75
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    np.testing.assert_allclose(jax.jit(own)(Q, K, V), written_out(Q, K, V), atol=2e-5)
    np.testing.assert_allclose(own(Q, K, V), written_out(Q, K, V), atol=2e-5)
    found, expected = (
        jax.grad(lambda *x: (of(*x) * DOUT).sum(), argnums=(0, 1, 2))(Q, K, V) for of in (own, written_out)
    )
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, atol=5e-5)


def test_rows_are_computed():
    q = jnp.asarray(np.random.default_rng(5).normal(size=(1, 8, 2, 16)), jnp.float32)
    points = q[0, :, 0, :3]

    def distance(s, b, h, i, j):
        return s - ((points[i] - points[j]) ** 2).sum() + points[i] @ points[j]

    bias = -((points[:, None] - points[None]) ** 2).sum(-1) + points @ points.T
    want = dot_product_attention(q, q, q, bias[None, None])
    np.testing.assert_allclose(flash_attn_func(q, q, q, score_mod=distance), want, atol=2e-5)
