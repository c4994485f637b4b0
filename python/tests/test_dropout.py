"""Dropout: values and gradients against attention written out with the same bits, and torch's generator."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
from fa_attn._core import dropout_bits  # noqa: E402
from fa_attn._dropout import numbers_of  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_cases import needs_gpu  # noqa: E402

SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 2**40 + 5


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def philox(counter, key):
    """Seven rounds of Philox 4x32, of Python's integers."""
    a, b, c, d = counter
    for _ in range(7):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            right >> 32 ^ b ^ key[0],
            right & 0xFFFFFFFF,
            left >> 32 ^ d ^ key[1],
            left & 0xFFFFFFFF,
        )
        key = (key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32
    return a, b, c, d


def kept_by_definition(batch, heads, rows, keys, p, seed=SEED, offset=OFFSET):
    """What FlashAttention-2 keeps, element by element."""
    kept = np.zeros((batch, heads, rows, keys), bool)
    threshold = numbers_of(p)[1]
    for b, h, q, k in np.ndindex(kept.shape):
        # The accumulators of mma.m16n8k16: a lane's row, and its pair of columns.
        lane = 4 * (q % 8) + k % 8 // 2
        counter = offset + 32 * (b * heads + h) + lane
        words = philox((counter % 2**32, counter >> 32, q // 16, k // 32), (seed % 2**32, seed >> 32))
        place = 8 * (k % 32 // 16) + 4 * (k % 16 // 8) + 2 * (q % 16 // 8) + k % 2
        kept[b, h, q, k] = words[place // 4] >> 8 * (place % 4) & 0xFF <= threshold
    return torch.from_numpy(kept)


def kept_bits(batch, heads, rows, keys, p, seed=SEED, offset=OFFSET):
    bits = np.zeros((batch, heads, rows, -(-keys // 32)), np.int32)
    dropout_bits(bits, None, (seed, offset, numbers_of(p)[1]))
    unpacked = np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")
    return torch.from_numpy(unpacked[..., :keys].astype(bool))


def dense(q, k, v, kept, p, seen=None):
    """Attention written out: (batch, rows, heads, head_dim)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1) * kept * numbers_of(p)[0]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def test_the_bits_are_those_of_flash_attention_2():
    for p in (0.1, 0.5):
        sizes = (2, 3, 21, 70)
        assert torch.equal(kept_bits(*sizes, p), kept_by_definition(*sizes, p))
    share = kept_bits(1, 4, 256, 256, 0.1).double().mean().item()
    assert abs(share - 230 / 256) < 4 * (0.1 * 0.9 / 2**18) ** 0.5


@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_are_those_of_the_bits(causal):
    q, k, v = draw(2, 37, 4, 16), draw(2, 50, 2, 16, seed=1), draw(2, 50, 2, 8, seed=2)
    seen = torch.ones(37, 50).tril(13).bool() if causal else None
    kept = kept_bits(2, 4, 37, 50, 0.2)
    out, lse = fa_attn.flash_attn_func(
        q, k, v, 0.2, causal=causal, rng_state=(SEED, OFFSET), return_softmax_lse=True
    )
    expected = dense(q, k, v, kept, 0.2, seen)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    plain = fa_attn.flash_attn_func(q, k, v, causal=causal, return_softmax_lse=True)[1]
    torch.testing.assert_close(lse, plain)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(out, (q, k, v), dout)
    for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    # A tensor of the state says the same.
    state = torch.tensor([SEED, OFFSET])
    assert torch.equal(fa_attn.flash_attn_func(q, k, v, 0.2, causal=causal, rng_state=state), out)
    packed = fa_attn.flash_attn_kvpacked_func(
        q, torch.stack([k, k], 2), 0.2, causal=causal, rng_state=(SEED, OFFSET)
    )
    torch.testing.assert_close(packed, dense(q, k, k, kept, 0.2, seen), atol=1e-5, rtol=1e-5)


def test_packed_sequences_have_the_bits_of_their_own_rows():
    lengths = [(5, 9), (23, 40), (17, 17)]
    q, k, v = draw(45, 4, 16), draw(66, 2, 16, seed=1), draw(66, 2, 16, seed=2)
    starts = [torch.tensor(np.cumsum([0, *one]), dtype=torch.int32) for one in zip(*lengths)]
    out = fa_attn.flash_attn_varlen_func(q, k, v, *starts, 23, 40, 0.3, rng_state=(7, 8))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(out, (q, k, v), dout)
    kept = kept_bits(3, 4, 23, 40, 0.3, 7, 8)
    parts = []
    for b, (rows, keys) in enumerate(lengths):
        (first, last), (first_k, last_k) = (starts[0][b : b + 2], starts[1][b : b + 2])
        own = (q[None, first:last], k[None, first_k:last_k], v[None, first_k:last_k])
        parts.append(dense(*own, kept[b : b + 1, :, :rows, :keys], 0.3)[0])
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), dout)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_call_with_dropout_has_masks_biases_and_sinks_too():
    q, k, v = draw(1, 20, 2, 8), draw(1, 30, 2, 8, seed=1), draw(1, 30, 2, 8, seed=2)
    bias = draw(1, 2, 20, 30, seed=3)
    options = dict(bias=bias, mask_mod=lambda b, h, q, k: (q + k) % 4 != 0, rng_state=(1, 2))
    out = fa_attn.flash_attn_func(q, k, v, 0.5, **options)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5 + bias
    seen = (torch.arange(20)[:, None] + torch.arange(30)) % 4 != 0
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1) * kept_bits(1, 2, 20, 30, 0.5, 1, 2) * 2
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    inputs = (q, k, v, bias)
    found = torch.autograd.grad(out.sum(), inputs)
    for one, other in zip(found, torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_torchs_generator_decides_and_moves_on():
    q, k, v = draw(1, 64, 2, 8), draw(1, 64, 2, 8, seed=1), draw(1, 64, 2, 8, seed=2)

    def call():
        return fa_attn.flash_attn_func(q, k, v, 0.5)

    torch.manual_seed(5)
    first, second = call(), call()
    torch.manual_seed(5)
    assert torch.equal(call(), first) and not torch.equal(first, second)
    # A checkpoint computes the same again.
    torch.manual_seed(5)
    plain = torch.autograd.grad(call().square().sum(), (q, k, v))
    torch.manual_seed(5)
    again = checkpoint(call, use_reentrant=False).square().sum()
    for one, other in zip(torch.autograd.grad(again, (q, k, v)), plain):
        assert torch.equal(one, other)


def test_torchs_own_face_drops():
    q, k, v = (draw(2, 4, 33, 8, seed=seed) for seed in range(3))
    torch.manual_seed(9)
    out = fa_attn.scaled_dot_product_attention(q, k, v, dropout_p=0.25, is_causal=True)
    torch.manual_seed(9)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(out, fa_attn.flash_attn_func(*turned, 0.25, causal=True).transpose(1, 2))
    # The mean over many calls is attention without dropout.
    with torch.no_grad():
        calls = [fa_attn.scaled_dot_product_attention(q, k, v, dropout_p=0.25) for _ in range(400)]
        mean = torch.stack(calls).mean(0) * (0.75 * 256 / 192)
        plain = fa_attn.scaled_dot_product_attention(q, k, v)
    assert (mean - plain).abs().max() < 0.1 and (calls[0] - plain).abs().max() > 0.1


def test_compiled_calls_draw_anew():
    q, k, v = (draw(1, 32, 2, 8, seed=seed) for seed in range(3))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q, k, v):
        return fa_attn.flash_attn_func(q, k, v, 0.5, causal=True)

    torch.manual_seed(3)
    first, second = call(q, k, v), call(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    eager = fa_attn.flash_attn_func(q, k, v, 0.5, causal=True)
    assert torch.equal(first, eager)
    found = torch.autograd.grad(first.sum(), (q, k, v))
    for one, other in zip(found, torch.autograd.grad(eager.sum(), (q, k, v))):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_calls_take_other_probabilities(dynamic):
    """Of which torch.compile makes symbols."""
    q = draw(1, 32, 2, 8).detach()

    def call(q, p):
        return fa_attn.flash_attn_func(q, q, q, p, rng_state=(SEED, OFFSET))

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for p in (0.3, 0.5, 0.1):
        assert torch.equal(compiled(q, p), call(q, p))


def test_numpy_takes_the_state():
    q, k, v = (draw(1, 20, 2, 8, seed=seed) for seed in range(3))
    out = fa_attn.flash_attn_func(*(x.detach().numpy() for x in (q, k, v)), 0.5, rng_state=(SEED, 3))
    torch.testing.assert_close(
        torch.from_numpy(out), fa_attn.flash_attn_func(q, k, v, 0.5, rng_state=(SEED, 3)).detach()
    )


def test_what_makes_no_sense_is_refused_by_name():
    q, k, v = (draw(1, 20, 2, 8, seed=seed) for seed in range(3))
    state = torch.zeros(3, dtype=torch.int64)
    for options, message in [
        (dict(dropout_p=1.0), "dropout_p is 1.0"),
        (dict(dropout_p=-0.5), "dropout_p is -0.5"),
        (dict(rng_state=(1, 2)), "rng_state without dropout_p"),
        (dict(dropout_p=0.5, rng_state=state), "it must be \\(2,\\) int64"),
    ]:
        with pytest.raises(fa_attn.InputError, match=message):
            fa_attn.flash_attn_func(q, k, v, **options)
    with pytest.raises(fa_attn.UnsupportedError, match="flash_attn_with_kvcache has no dropout"):
        fa_attn.flash_attn_with_kvcache(q, k, v, rng_state=(1, 2))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "head_dim, heads, causal", [(64, (4, 4), True), (128, (6, 2), False), (96, (4, 1), True)]
)
def test_a_gpu_drops_the_same(dtype, head_dim, heads, causal):
    sizes = [(2, 200, heads[0], head_dim), (2, 333, heads[1], head_dim), (2, 333, heads[1], head_dim)]
    given = [draw(*size, seed=seed).detach().to(dtype) for seed, size in enumerate(sizes)]
    wide = [x.float().requires_grad_() for x in given]
    seen = torch.ones(200, 333).tril(133).bool() if causal else None
    expected = dense(*wide, kept_bits(2, heads[0], 200, 333, 0.2), 0.2, seen)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected_grads = torch.autograd.grad(expected, wide, dout.float())
    for deterministic in (False, True, True):
        own = [x.cuda().requires_grad_() for x in given]
        out = fa_attn.flash_attn_func(
            *own, 0.2, causal=causal, deterministic=deterministic, rng_state=(SEED, OFFSET)
        )
        grads = torch.autograd.grad(out, own, dout.cuda())
        tolerance = dict(atol=0.02, rtol=0.02) if dtype is torch.bfloat16 else dict(atol=4e-3, rtol=4e-3)
        torch.testing.assert_close(out.float().cpu(), expected, **tolerance)
        for one, other in zip(grads, expected_grads):
            bound = 4 * tolerance["atol"] * max(1.0, other.abs().max().item())
            assert (one.float().cpu() - other).abs().max() < bound
        if deterministic:
            again = torch.autograd.grad(
                fa_attn.flash_attn_func(
                    *own, 0.2, causal=causal, deterministic=True, rng_state=(SEED, OFFSET)
                ),
                own,
                dout.cuda(),
            )
            assert all(torch.equal(one, other) for one, other in zip(grads, again))


@needs_gpu
def test_a_gpus_bits_are_those_of_the_cpu():
    state = torch.tensor([SEED, OFFSET, 229], device="cuda")
    for sizes in [(2, 3, 37, 70), (1, 16, 1024, 1024)]:
        bits = torch.empty((*sizes[:3], -(-sizes[3] // 32)), dtype=torch.int32, device="cuda")
        dropout_bits(bits, state, None, torch.cuda.current_stream().cuda_stream)
        by_value = torch.empty_like(bits)
        dropout_bits(by_value, None, (SEED, OFFSET, 229), torch.cuda.current_stream().cuda_stream)
        expected = np.zeros(bits.shape, np.int32)
        dropout_bits(expected, None, (SEED, OFFSET, 229))
        assert torch.equal(bits, by_value) and np.array_equal(bits.cpu().numpy(), expected)


@needs_gpu
def test_a_gpus_generator_decides_and_graphs_draw_anew():
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def call():
        return fa_attn.flash_attn_func(q, k, v, 0.5)

    torch.manual_seed(5)
    first, second = call(), call()
    torch.manual_seed(5)
    before = torch.cuda.default_generators[0].get_offset()
    assert torch.equal(call(), first) and not torch.equal(first, second)
    assert torch.cuda.default_generators[0].get_offset() == before + 32 * 4
    # The seed is torch's, as FlashAttention-2 takes it.
    assert torch.equal(fa_attn.flash_attn_func(q, k, v, 0.5, rng_state=(5, before)), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    made = []
    for _ in range(2):
        graph.replay()
        made.append(out.clone())
    assert not torch.equal(*made) and all(x.isfinite().all() for x in made)


@pytest.mark.skipif(not hasattr(torch.library, "register_vmap"), reason="torch has no rules of vmap")
def test_vmap_drops_as_its_randomness_says():
    q = draw(1, 9, 2, 16).detach().expand(3, -1, -1, -1, -1)

    def call(x):
        return fa_attn.flash_attn_func(x, x, x, dropout_p=0.5)

    def seeded(function):
        torch.manual_seed(3)
        return function()

    one = seeded(lambda: call(q[0]))
    same = seeded(lambda: torch.vmap(call, randomness="same")(q))
    torch.testing.assert_close(same, one.expand_as(same))
    each = seeded(lambda: torch.stack([call(x) for x in q]))
    torch.testing.assert_close(seeded(lambda: torch.vmap(call, randomness="different")(q)), each)
    assert not torch.equal(each[0], each[1])
    assert torch.vmap(call, randomness="different")(q[:0]).shape == (0, *one.shape)
    with pytest.raises(fa_attn.InputError, match="say randomness='different', or 'same'"):
        torch.vmap(call)(q)
