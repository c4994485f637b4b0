"""Attention of jax's arrays under jit, grad and vmap, against jax's own attention and numpy's results.

pip install jax pytest && python -m pytest tests/test_jax_traced.py
"""

import numpy as np
import pytest
import reference

import fa_attn

jax = pytest.importorskip("jax")
jnp = jax.numpy

from fa_attn.jax import dot_product_attention, flash_attn_func, flash_attn_varlen_func  # noqa: E402

SHAPES = dict(q=(2, 12, 4, 32), k=(2, 15, 2, 32), v=(2, 15, 2, 16))
SLOPES, SINKS = np.array([0.5, 0.25, 0.1, 0.0], np.float32), np.array([0.5, -1.0, 0.0, 2.0], np.float32)
# Names: (options as ours, options of the reference).
CASES = {
    "full": (dict(), dict()),
    "causal": (dict(causal=True), dict(causal=True)),
    "window": (dict(window_size=(3, 1)), dict(window=(3, 1))),
    "scale": (dict(causal=True, softmax_scale=0.3), dict(causal=True, scale=0.3)),
    "offset": (dict(causal=True, query_offset=2), dict(causal=True, offset=2)),
    "slopes": (dict(causal=True, alibi_slopes=SLOPES), dict(causal=True, slopes=SLOPES)),
    "sinks": (dict(causal=True, sinks=SINKS), dict(causal=True, sinks=SINKS)),
}
LENGTHS = np.array([5, 12], np.int32)
# The CPU computes f32; a GPU does not.
ON = jax.default_device(jax.devices("cpu")[0])


def made(seed=0, dtype="float32", **shapes):
    with ON:
        keys = jax.random.split(jax.random.PRNGKey(seed), len(shapes))
        return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes.values())]


def near(one, other, limit=2e-5):
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert one.shape == other.shape and np.abs(one - other).max(initial=0.0) <= limit


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_under_jit(name):
    options, of_reference = CASES[name]
    q, k, v, dout = made(**SHAPES, dout=(2, 12, 4, 16))
    sinks = options.get("sinks")
    rest = {key: value for key, value in options.items() if key != "sinks"}

    def both(q, k, v, sinks):
        return flash_attn_func(q, k, v, sinks=sinks, return_softmax_lse=True, **rest)

    out, lse = jax.jit(both)(q, k, v, sinks)

    def loss(q, k, v, sinks):
        return (both(q, k, v, sinks)[0] * dout).sum()

    wanted = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    grads = jax.jit(jax.grad(loss, argnums=wanted))(q, k, v, sinks)
    sums = np.zeros(4)
    for b in range(2):
        plain = [np.asarray(x[b], np.float64) for x in (q, k, v)]
        want, want_lse, _ = reference.attention(*plain, **of_reference)
        near(out[b], want)
        near(lse[b], want_lse)
        *want_grads, dsinks = reference.gradients(np.asarray(dout[b]), *plain, **of_reference)
        for grad, want_grad in zip(grads, want_grads):
            near(grad[b], want_grad, 1e-4)
        sums += 0 if dsinks is None else dsinks
    if sinks is not None:
        near(grads[3], sums, 1e-4)
    assert np.array_equal(out, fa_attn.flash_attn_func(q, k, v, **options))


def test_the_gradient_of_lse_counts():
    q, k, v = made(**SHAPES)

    def plain(q):
        wide = jnp.repeat(k, 2, axis=2)
        return jax.nn.logsumexp(jnp.einsum("bihd,bjhd->bhij", q, wide) * 32**-0.5, axis=-1).sum()

    def ours(q):
        return flash_attn_func(q, k, v, return_softmax_lse=True)[1].sum()

    near(jax.grad(ours)(q), jax.grad(plain)(q))


@pytest.mark.parametrize("name", ["causal", "slopes", "sinks"])
@pytest.mark.parametrize("axes", [(0, None, None), (2, 0, 1)])
def test_vmap_is_each_element_by_itself(name, axes):
    options, _ = CASES[name]
    arrays = made(**{name: (3, *shape) for name, shape in SHAPES.items()})
    moved = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(arrays, axes)]

    def call(q, k, v):
        return flash_attn_func(q, k, v, **options)

    def loss(q, k, v):
        return (call(q, k, v) ** 2).sum()

    def gradients(q, k, v):
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    got, grads = (jax.jit(jax.vmap(f, in_axes=axes))(*moved) for f in (call, gradients))
    for at in range(3):
        own = [x[0] if axis is None else x[at] for x, axis in zip(arrays, axes)]
        near(got[at], call(*own), 1e-6)
        for grad, want in zip(grads, gradients(*own)):
            near(grad[at], want, 1e-5)


def test_vmap_over_what_differs_for_each_element():
    q, k, v = made(**SHAPES)
    for options in (
        dict(sinks=np.stack([SINKS, SINKS + 1])),
        dict(alibi_slopes=np.stack([SLOPES, 2 * SLOPES])),
        dict(seqused_k=np.array([[3, 15], [1, 7]], np.int32)),
    ):
        ((name, values),) = options.items()

        def call(value, name=name):
            return flash_attn_varlen_func(q, k, v, **{name: value})

        got = jax.vmap(call)(jnp.asarray(values))
        for at in range(2):
            near(got[at], call(values[at]), 1e-6)
    dsinks = jax.vmap(jax.grad(lambda x: flash_attn_func(q, k, v, sinks=x).sum()))(jnp.stack([SINKS, SINKS]))
    near(dsinks[0], dsinks[1], 0)
    none = jax.vmap(lambda q: flash_attn_func(q, k, v))(jnp.zeros((0, *q.shape)))
    assert none.shape == (0, 2, 12, 4, 16)


def test_packed_rows_and_caches():
    q, k, v = made(q=(12, 4, 32), k=(12, 2, 32), v=(12, 2, 32))
    starts = np.array([0, 5, 12], np.int32)

    def packed(q, starts):
        return flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, causal=True)

    got = jax.jit(packed)(q, starts)
    for first, end in ((0, 5), (5, 12)):
        near(got[first:end], flash_attn_func(*(x[None, first:end] for x in (q, k, v)), causal=True)[0], 1e-6)
    both = jax.vmap(packed, in_axes=(0, None))(jnp.stack([q, 2 * q]), starts)
    near(both[1], packed(2 * q, starts), 1e-6)
    grads = jax.grad(lambda q: packed(q, starts).sum())(q)
    assert np.isfinite(grads).all() and np.abs(grads).max() > 0

    q, k, v = made(**SHAPES)
    used = jnp.asarray([3, 15], jnp.int32)
    step = jax.jit(lambda used: fa_attn.flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=used))
    near(step(used), fa_attn.flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=used), 1e-6)
    pages = made(pages=(6, 5, 2, 32))[0]
    table = np.array([[0, 2, 4], [5, 3, 1]], np.int32)
    paged = dict(page_table=table, seqused_k=used)
    out = jax.jit(lambda q: flash_attn_varlen_func(q, pages, pages, **paged))(q)
    near(out, fa_attn.flash_attn_varlen_func(q, pages, pages, **paged), 1e-6)
    with pytest.raises(fa_attn.UnsupportedError, match="keys in pages have no gradients"):
        jax.grad(lambda q: flash_attn_varlen_func(q, pages, pages, **paged).sum())(q)


def test_merging_under_jit():
    q, k, v = made(**SHAPES)

    def halves(q):
        parts = [
            flash_attn_func(q, *rows, return_lse=True)
            for rows in ((k[:, :7], v[:, :7]), (k[:, 7:], v[:, 7:]))
        ]
        return fa_attn.merge(*zip(*parts), sinks=SINKS)[0]

    whole = jax.jit(lambda q: flash_attn_func(q, k, v, sinks=SINKS))
    near(jax.jit(halves)(q), whole(q), 1e-6)
    near(*(jax.grad(lambda q, f=f: (f(q) ** 2).sum())(q) for f in (halves, whole)))
    # A part that sees no key, with the LSE that FlashAttention-2 writes.
    part = flash_attn_func(q, k, v, return_lse=True)
    nothing = (jnp.full_like(part[0], jnp.nan), jnp.full_like(part[1], jnp.inf))
    for found, want in zip(jax.jit(lambda part: fa_attn.merge(*zip(part, nothing)))(part), part):
        near(found, want, 1e-6)


@pytest.mark.parametrize(
    "options", [dict(), dict(is_causal=True), dict(local_window_size=(3, 1)), dict(scale=0.2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_product_attention_is_jax_s(options, dtype):
    q, k, v = made(dtype=dtype, q=(2, 9, 4, 32), k=(2, 9, 2, 32), v=(2, 9, 2, 32))
    limit = 2e-5 if dtype == "float32" else 3e-2
    near(
        jax.jit(lambda *x: dot_product_attention(*x, **options))(q, k, v),
        jax.nn.dot_product_attention(q, k, v, **options),
        limit,
    )
    # Of queries that see no key jax gives the mean of the values.
    for rows in ((4, 9), (5, 4)):
        some = q[:, : rows[0]], k[:, : rows[1]], v[:, : rows[1]]
        near(dot_product_attention(*some, **options), jax.nn.dot_product_attention(*some, **options), limit)
    near(dot_product_attention(q[0], k[0], v[0], **options), dot_product_attention(q, k, v, **options)[0], 0)
    lengths = jnp.asarray([4, 9], jnp.int32)
    got = dot_product_attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options)
    for b, n in enumerate((4, 9)):
        near(got[b, :n], dot_product_attention(*(x[b, :n] for x in (q, k, v)), **options), limit)
    assert not np.asarray(got[0, 4:], np.float32).any()


@pytest.mark.parametrize("sides", [("query",), ("key_value",), ("query", "key_value")])
def test_rows_that_are_not_in_use_have_no_results_and_no_gradients(sides):
    arrays = made(q=(2, 17, 6, 24), k=(2, 17, 2, 24), v=(2, 17, 2, 24))
    lengths = {f"{side}_seq_lengths": jnp.asarray([3, 17], jnp.int32) for side in sides}

    def step(function, *arrays):
        def loss(*arrays):
            out = function(*arrays, **lengths)
            return (out**2).sum(), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
        return out, *grads

    want = step(jax.nn.dot_product_attention, *arrays)
    # Memory that is given back holds numbers, which the next program's results may begin as.
    jax.jit(lambda *x: [jnp.sin(y) + 7.0 for y in x])(*arrays, *want)[0].block_until_ready()
    got = jax.jit(lambda *x: step(dot_product_attention, *x))(*arrays)
    for one, other in zip(got, want):
        near(one, other, 1e-4)


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("^bias has 12 along heads", lambda q, k, v: dot_product_attention(q, k, v, q)),
        ("^k has a head dim of 16", lambda q, k, v: flash_attn_func(q, k[..., :16], v)),
        ("^sinks has the shape", lambda q, k, v: flash_attn_func(q, k, v, sinks=SINKS[:3])),
        ("^num_splits is 999", lambda q, k, v: flash_attn_func(q, k, v, num_splits=999)),
        ("cannot be written", lambda q, k, v: flash_attn_func(q, k, v, out=q)),
    ],
)
def test_refusals_are_those_of_calls_outside(fault, call):
    with pytest.raises(ValueError, match=fault):
        jax.jit(call)(*made(**SHAPES))


def test_slopes_have_no_gradient_that_could_be_used():
    q, k, v = made(**SHAPES)
    grad = jax.grad(lambda slopes: flash_attn_func(q, k, v, alibi_slopes=slopes).sum())(jnp.asarray(SLOPES))
    assert np.isnan(grad).all()


def test_gradients_are_torch_s():
    torch = pytest.importorskip("torch")
    q, k, v, dout = made(**SHAPES, dout=(2, 12, 4, 16))
    options = dict(causal=True, window_size=(6, 0), softcap=3.0)
    grads = jax.grad(lambda *x: (flash_attn_func(*x, **options) * dout).sum(), argnums=(0, 1, 2))(q, k, v)
    leaves = [torch.tensor(np.asarray(x), requires_grad=True) for x in (q, k, v)]
    (fa_attn.flash_attn_func(*leaves, **options) * torch.tensor(np.asarray(dout))).sum().backward()
    for grad, leaf in zip(grads, leaves):
        assert np.array_equal(grad, leaf.grad.numpy())


def loss_of(function, *arguments):
    return jax.value_and_grad(lambda *own: jnp.sin(function(*own)).sum(), tuple(range(len(arguments))))(
        *arguments
    )


SHARED = {
    "causal": ({"is_causal": True}, ("x", "x", "x"), ()),
    "heads": ({}, (None, None, "x"), ()),
    "shared keys": ({}, ("x", None, None), ()),
    "shared bias": ({}, ("x", "x", "x"), ("bias",)),
    "mask": ({"mask": np.tril(np.ones((1, 1, 12, 12), bool))}, ("x", "x", "x"), ()),
}


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="jax.shard_map is newer")
@pytest.mark.parametrize("kept", [True, False], ids=["account", "no account"])
@pytest.mark.parametrize("name", SHARED)
def test_gradients_within_shard_map(name, kept):
    """Of two devices, with jax's account of what differs between them and without."""
    options, axes, others = SHARED[name]
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    keys = 1 if name == "shared keys" else 2
    arrays = [jax.random.normal(jax.random.PRNGKey(i), (n, 12, 4, 16)) for i, n in enumerate((2, keys, keys))]
    if name == "heads":
        specs = [spec(*axes)] * 3
    else:
        specs = [spec(axis) if axis else spec() for axis in axes]
    if others:
        arrays.append(jax.random.normal(jax.random.PRNGKey(9), (1, 4, 12, 12)))
        specs.append(spec())

    def of_jax(q, k, v, **options):
        k, v = (jnp.broadcast_to(x, q.shape) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, **options)

    def attend(function):
        return lambda q, k, v, *more: function(q, k, v, **dict(zip(others, more)), **options)

    def divided(*own):
        mapped = jax.shard_map(
            attend(dot_product_attention),
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=specs[0],
            check_vma=kept,
        )
        return mapped(*own)

    with jax.default_device(jax.devices("cpu")[0]):
        got, want = loss_of(divided, *arrays), loss_of(attend(of_jax), *arrays)
    near(got[0], want[0], 2e-4)
    for one, other in zip(got[1], want[1]):
        near(one, other)


@pytest.mark.skipif(not hasattr(jax.sharding, "AxisType"), reason="types with shardings are newer")
def test_gradients_lie_where_types_say():
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    q, k, v = (jax.random.normal(jax.random.PRNGKey(i), (2, 12, 4, 16)) for i in range(3))
    want = loss_of(jax.nn.dot_product_attention, q, k, v)
    with jax.set_mesh(mesh):
        own = [jax.device_put(x, place) for x in (q, k, v)]
        got = jax.jit(lambda *own: loss_of(dot_product_attention, *own))(*own)
        assert all(jax.typeof(x).sharding.spec[0] == "x" for x in got[1])
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        near(np.asarray(one), np.asarray(other), 2e-4)


def test_implementations_of_jax_are_named():
    q = jnp.ones((1, 3, 2, 16))
    for name in (None, "xla", "cudnn"):
        near(dot_product_attention(q, q, q, implementation=name), q)
    with pytest.raises(fa_attn.InputError, match="implementation is 'triton'"):
        dot_product_attention(q, q, q, implementation="triton")


def test_arrays_on_several_devices_need_no_jit():
    """No library is lent those: jax's own call computes them, as where it traces."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with ON:
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, seen = (jax.random.normal(key, (2, 9, 4, 16)) for key in keys)
    seen = seen[0, :, 0, :9] > -0.5
    spread = [jax.device_put(x, place) for x in (q, k, v)]

    def same(found, want):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=1e-6)

    call, backward = fa_attn.flash_attn_func, fa_attn.flash_attn_backward
    for options in (dict(causal=True), dict(mask=seen), dict(dropout_p=0.3, rng_state=(1, 2))):
        same(call(*spread, **options), call(q, k, v, **options))
    same(call(q, k, v, mask=jax.device_put(seen, whole)), call(q, k, v, mask=seen))
    out, lse = call(q, k, v, return_softmax_lse=True)
    same(backward(spread[0], *spread, out, lse), backward(q, q, k, v, out, lse))
    same(fa_attn.merge([jax.device_put(out, place)] * 2, [lse, lse]), fa_attn.merge([out, out], [lse, lse]))
    with pytest.raises(fa_attn.InputTypeError, match="causal is .*Tracer"):
        jax.jit(lambda causal: call(q, k, v, causal=causal))(True)
