"""Masks, biases and programs as options of FlashAttention's functions, against the formula in float64."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402

B, H, HK, SQ, SK, D = 2, 4, 2, 21, 37, 16
_generator = torch.Generator().manual_seed(11)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=_generator).to(dtype)


def drop(*shape, share=0.4):
    return torch.rand(shape, generator=_generator) > share


BIAS = draw(B, H, SQ, SK)
TABLE = draw(H, SQ + SK)
SLOPES = torch.exp2(-torch.arange(1.0, H + 1))
DOCUMENT = torch.arange(SK) // 9
WINDOW = 7


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx + SK - SQ - kv_idx).abs()


def relative(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx - kv_idx + SK - 1]


def soft_cap(score, b, h, q_idx, kv_idx):
    return 2.0 * torch.tanh(score / 2.0)


def ignores(score, b, h, q_idx, kv_idx):
    return 0.1 * (q_idx - kv_idx).float()


def documents(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 3 == 0) & (q_idx + WINDOW >= kv_idx)


def with_empty_rows(b, h, q_idx, kv_idx):
    return (q_idx % 4 != 1) & (kv_idx != 5)


def row_hidden(mask):
    mask = mask.clone()
    mask[..., 3, :] = False
    return mask


def bias_with(value, at):
    bias = BIAS.clone()
    bias[at] = value
    return bias


# Name, options of the call, and what of them wants a gradient.
CASES = [
    ("dense bias", dict(bias=BIAS), "bias"),
    ("bias of batch 1", dict(bias=BIAS[:1]), "bias"),
    ("bias of one head", dict(bias=BIAS[:, :1]), "bias"),
    ("bias by keys", dict(bias=BIAS[:, :, :1]), "bias"),
    ("bias by rows", dict(bias=BIAS[..., :1]), "bias"),
    ("bias of 2 axes", dict(bias=BIAS[0, 0]), "bias"),
    ("bias with odd strides", dict(bias=draw(B, H, SQ, SK + 3)[..., 2:-1]), "bias"),
    ("bias transposed", dict(bias=draw(B, H, SK, SQ).mT), "bias"),
    ("bias in float64", dict(bias=BIAS.double()), "bias"),
    ("causal bias", dict(bias=BIAS, causal=True), "bias"),
    ("-inf in a bias", dict(bias=bias_with(-math.inf, (0, 1, 2, slice(4, 9)))), None),
    ("a row of -inf", dict(bias=bias_with(-math.inf, (1, 2, 5))), None),
    ("finite minimum", dict(bias=bias_with(-1e9, (0, slice(None), slice(None), slice(0, 9)))), None),
    ("additive mask", dict(mask=torch.where(drop(B, 1, SQ, SK), 0.0, -math.inf)), None),
    ("boolean mask", dict(mask=drop(B, H, SQ, SK)), None),
    ("boolean mask, rows without keys", dict(mask=row_hidden(drop(B, 1, SQ, SK))), None),
    ("padding", dict(mask=(torch.arange(SK) < torch.tensor([[30], [11]]))[:, None, None]), None),
    (
        "left padding",
        dict(mask=(torch.arange(SK) >= torch.tensor([[3], [20]]))[:, None, None], causal=True),
        None,
    ),
    ("mask by rows", dict(mask=drop(1, 1, SQ, 1)), None),
    ("mask of 2 axes and a bias", dict(mask=drop(SQ, SK), bias=BIAS), "bias"),
    ("mask and a window", dict(mask=drop(B, 1, SQ, SK), window_size=(9, 4)), None),
    ("chunks", dict(attention_chunk=8, causal=True), None),
    ("no chunks", dict(attention_chunk=0), None),
    ("ALiBi", dict(score_mod=alibi, causal=True), SLOPES),
    ("relative table", dict(score_mod=relative), TABLE),
    ("soft cap", dict(score_mod=soft_cap), None),
    ("a score that ignores s", dict(score_mod=ignores), None),
    ("documents", dict(mask_mod=documents, causal=True), None),
    ("dilated", dict(mask_mod=dilated), None),
    ("rows and a column without keys", dict(mask_mod=with_empty_rows), None),
    ("mask and score", dict(mask_mod=dilated, score_mod=relative), TABLE),
    ("all at once", dict(mask_mod=dilated, score_mod=alibi, bias=BIAS, mask=drop(B, 1, 1, SK)), "bias"),
    ("text", dict(mask_mod="k <= q + off and k % 2 == 0"), None),
    ("sinks", dict(mask_mod=with_empty_rows, sinks=draw(H)), None),
]


def expected(
    q,
    k,
    v,
    *,
    bias=None,
    mask=None,
    score_mod=None,
    mask_mod=None,
    attention_chunk=0,
    causal=False,
    window_size=(-1, -1),
    sinks=None,
):
    """(out, lse) in float64 of (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    b, h, i, j = torch.meshgrid(*map(torch.arange, s.shape), indexing="ij")
    off = s.shape[3] - s.shape[2]
    seen = torch.ones(s.shape, dtype=torch.bool)
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            s = s + mask.double()
    if score_mod is not None:
        s = score_mod(s, b, h, i, j)
    if isinstance(mask_mod, str):
        seen = seen & (j <= i + off) & (j % 2 == 0)
    elif mask_mod is not None:
        seen = seen & mask_mod(b, h, i, j)
    if attention_chunk:
        seen = seen & ((i + off) // attention_chunk == j // attention_chunk)
    left, right = window_size
    right = 0 if causal else right
    seen = seen & ((j <= i + off + right) | (right < 0)) & ((j >= i + off - left) | (left < 0))
    s = s.double().masked_fill(~seen | (s == -math.inf), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double().reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return (p @ v).transpose(1, 2), lse


def check(function, options, wanted=None, dtype=torch.float32, atol=2e-5):
    """out, LSE and all gradients of a call."""
    q, k, v = (draw(B, n, heads, D, dtype=dtype) for n, heads in ((SQ, H), (SK, HK), (SK, HK)))
    own = [x.detach().requires_grad_() for x in (q, k, v)]
    true = [x.detach().double().requires_grad_() for x in (q, k, v)]
    learned = ([], [])
    both = (dict(options), dict(options))
    if isinstance(wanted, str):
        for made, inputs in zip(both, learned):
            inputs.append(made[wanted].detach().clone().requires_grad_())
            made[wanted] = inputs[0]
    elif wanted is not None:
        learned = ([wanted], [wanted])
    try:
        if learned[0]:
            learned[0][0].requires_grad_()
        out, lse = function(*own, **both[0])
        want, want_lse = expected(*true, **both[1])
        torch.testing.assert_close(
            out.double(), want, atol=atol, rtol=1e-2 if dtype != torch.float32 else 1e-5
        )
        torch.testing.assert_close(lse.double(), want_lse, atol=atol, rtol=1e-4)
        dout = draw(*out.shape, dtype=dtype)
        got = torch.autograd.grad(out, (*own, *learned[0]), dout)
        need = torch.autograd.grad(
            want, (*true, *learned[1]), dout.double(), allow_unused=True, materialize_grads=True
        )
        for name, x, y in zip(("dq", "dk", "dv", "darray"), got, need):
            assert not x.isnan().any(), name
            torch.testing.assert_close(
                x.double(), y.double(), atol=10 * atol, rtol=2e-2 if dtype != torch.float32 else 1e-4
            )
    finally:
        for x in learned[0] if not isinstance(wanted, str) else ():
            x.requires_grad_(False)


def func(q, k, v, **options):
    return fa_attn.flash_attn_func(q, k, v, return_lse=True, **options)


@pytest.mark.parametrize("options, wanted", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_masks_and_scores_are_the_formula(options, wanted):
    check(func, options, wanted)


@pytest.mark.parametrize(
    "program, built_in",
    [
        (dict(score_mod="20 * tanh(s / 20)"), dict(softcap=20.0)),
        (dict(score_mod=soft_cap, mask_mod="k <= q + off"), dict(softcap=2.0, causal=True)),
        (dict(mask_mod="0 <= q + off - k < 8"), dict(causal=True, window_size=(7, 0))),
        (
            dict(mask_mod="abs(q + off - k) <= 3", alibi_slopes=SLOPES),
            dict(window_size=(3, 3), alibi_slopes=SLOPES),
        ),
        (dict(mask_mod="k <= q + off", bias=BIAS), dict(causal=True, bias=BIAS)),
    ],
)
def test_bands_and_soft_caps_are_the_built_in_ones(program, built_in):
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    dout = draw(B, SQ, H, D)
    found = []
    for options in (program, built_in):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        if "bias" in options:
            inputs.append(BIAS.clone().requires_grad_())
            options = dict(options, bias=inputs[-1])
        out = fa_attn.flash_attn_func(*inputs[:3], **options)
        found.append((out, *torch.autograd.grad(out, inputs, dout)))
    for got, want in zip(*found):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_beside_a_float_bias(dtype):
    check(func, dict(bias=BIAS), "bias", dtype, atol=2e-2)
    check(func, dict(bias=BIAS.to(dtype)), "bias", dtype, atol=2e-2)


def test_hidden_keys_and_hidden_biases_have_no_influence():
    # pytorch#101967: NaN and inf of K and V at masked keys; a NaN of a bias at a masked place has none
    # either.
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    mask = drop(B, 1, 1, SK)
    clean = fa_attn.flash_attn_func(q, k, v, mask=mask, bias=BIAS)
    hidden = ~mask[:, 0, 0]
    k[hidden], v[hidden] = math.nan, math.inf
    bias = torch.where(mask, BIAS, math.nan)
    torch.testing.assert_close(fa_attn.flash_attn_func(q, k, v, mask=mask, bias=bias), clean, atol=1e-6, rtol=0)
    # At a visible place it is that row's alone.
    bias = BIAS.clone()
    bias[0, 1, 2, torch.nonzero(mask[0, 0, 0])[0]] = math.nan
    k[hidden], v[hidden] = 0.0, 0.0
    out = fa_attn.flash_attn_func(q, k, v, mask=mask, bias=bias)
    assert out[0, 2, 1].isnan().all()
    out[0, 2, 1] = clean[0, 2, 1]
    torch.testing.assert_close(out, clean)


def test_an_expanded_bias_is_the_bias_it_shows():
    # openfold-3 PR 228, jax#30593.
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    small = BIAS[:1].clone().requires_grad_()
    whole = BIAS[:1].repeat(B, 1, 1, 1).requires_grad_()
    dout = draw(B, SQ, H, D)
    results = []
    for bias, leaf in ((small.expand(B, -1, -1, -1), small), (whole, whole)):
        out = fa_attn.flash_attn_func(q, k, v, bias=bias)
        results.append((out, torch.autograd.grad(out, leaf, dout)[0]))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1].sum(0, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(B, H, SQ, SK), (B, 1, 1, SK), (SQ, SK), (B, 1, SQ, 1)])
@pytest.mark.parametrize("wants", [True, False])
def test_rows_of_the_lowest_number_are_uniform(shape, dtype, wants):
    """Rows that are finfo.min throughout give the mean of V, and the gradients of a uniform softmax, as
    torch's math backend does (its flash backend on CPUs has them as many times as there are keys)."""
    bias = draw(*shape, dtype=dtype)
    rows = 0 if shape[-2] == 1 else slice(None, None, 4)
    bias[..., rows, :] = torch.finfo(dtype).min

    def found(function):
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        mask = bias.clone().requires_grad_(wants)
        out = function(*own, attn_mask=mask)
        wanted = [*own, mask] if wants else own
        return [out, *torch.autograd.grad(out, wanted, dout)]

    q, k, v = draw(B, H, SQ, D, dtype=dtype), draw(B, H, SK, D, dtype=dtype), draw(B, H, SK, D, dtype=dtype)
    dout = draw(B, H, SQ, D, dtype=dtype)
    got = found(fa_attn.scaled_dot_product_attention)
    atol = 2e-5 if dtype == torch.float32 else 6e-2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = found(torch.nn.functional.scaled_dot_product_attention)
    for ours, theirs in zip(got, wanted):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-2)


def test_only_the_bias_wants_a_gradient():
    # pytorch PR 188302; and none where nothing is asked for (cFE#115).
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    bias = BIAS.clone().requires_grad_()
    out, lse = func(q, k, v, bias=bias)
    (alone,) = torch.autograd.grad((out, lse), bias, (torch.ones_like(out), torch.ones_like(lse)))
    # dLSE is the probability: each row sums to 1, dO of equal values to 0.
    assert alone.abs().sum() > 0
    with torch.no_grad():
        assert not fa_attn.flash_attn_func(q, k, v, bias=bias).requires_grad
    assert not fa_attn.flash_attn_func(q, k, v, bias=BIAS).requires_grad


@pytest.mark.parametrize("expanded", [False, True], ids=["own", "expanded"])
def test_arrays_of_vmaps_elements_have_gradients(expanded):
    # Torch tells that an element of vmap wants one of the whole alone.
    q, k = draw(3, 1, 2, 5, D), draw(3, 1, 2, 7, D)
    bias, gain = draw(3, 1, 2, 5, 7), draw(3, 2)
    if expanded:
        bias = bias[..., :1].expand(bias.shape)
    given = [x.requires_grad_() for x in (q, k, bias, gain)]

    def ours(q, k, bias, gain):
        q = fa_attn.flex_attention(q, k, k, lambda s, b, h, i, j: s * gain[h])
        return fa_attn.scaled_dot_product_attention(q, k, k, bias)

    def formula(q, k, bias, gain):
        q = torch.softmax(q @ k.mT / math.sqrt(D) * gain[:, None, None], -1) @ k
        return torch.softmax(q @ k.mT / math.sqrt(D) + bias, -1) @ k

    out, want = torch.vmap(ours)(*given), torch.stack([formula(*each) for each in zip(*given)])
    torch.testing.assert_close(out, want)
    wanted = torch.autograd.grad(want.square().sum(), given)
    for one, other in zip(torch.autograd.grad(out.square().sum(), given), wanted):
        torch.testing.assert_close(one, other)
    whole = torch.func.grad(lambda bias: torch.vmap(ours)(q, k, bias, gain).square().sum())(bias)
    torch.testing.assert_close(whole, wanted[2])


def test_arrays_of_a_batch_without_sequences_have_zeros():
    q, k = draw(0, 3, H, D).requires_grad_(), draw(0, 5, HK, D)
    starts, rows = torch.zeros(1, dtype=torch.int32), draw(0, H, D).requires_grad_()
    for size in range(1, 65):
        # What is not written holds what lay there before.
        stale = torch.full((size,), 3e33)
        del stale
        gain, bias = torch.ones(size, requires_grad=True), torch.zeros(1, size, 1, 1, requires_grad=True)
        out = fa_attn.flash_attn_func(q, k, k, score_mod=lambda s, b, h, i, j: s * gain[h])
        assert not torch.autograd.grad(out.sum(), gain)[0].any()
        packed = fa_attn.flash_attn_varlen_func(
            rows, rows, rows, starts, starts, 0, 0, score_mod=lambda s, b, h, i, j: s * gain[h]
        )
        assert not torch.autograd.grad(packed.sum(), gain)[0].any()
        if size in (1, H):
            out = fa_attn.flash_attn_func(q, k, k, bias=bias)
            assert not torch.autograd.grad(out.sum(), bias)[0].any()


def test_an_array_that_is_not_used_has_zeros():
    # pytorch#166722.
    unused = torch.ones(3, requires_grad=True)
    q, k, v = draw(1, 8, 2, D), draw(1, 8, 2, D), draw(1, 8, 2, D)
    out = fa_attn.flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.0 * unused[0])
    assert torch.equal(torch.autograd.grad(out.sum(), unused)[0], torch.zeros(3))


def test_contents_scalars_and_lengths_are_those_of_the_call():
    # FI#1028: contents may change between calls; so may numbers that a function closes over.
    mask = drop(1, 1, SQ, SK)
    q, k, v = draw(1, SQ, H, D), draw(1, SK, HK, D), draw(1, SK, HK, D)
    first = fa_attn.flash_attn_func(q, k, v, mask=mask)
    mask ^= True
    second = fa_attn.flash_attn_func(q, k, v, mask=mask)
    torch.testing.assert_close(
        second.double(), expected(*(x.double() for x in (q, k, v)), mask=mask)[0], atol=2e-5, rtol=1e-5
    )
    assert not torch.equal(first, second)
    for window in (3, 5):

        def near(b, h, i, j):
            return (i - j).abs() <= window

        got = fa_attn.flash_attn_func(q, k, v, mask_mod=near)
        want = expected(*(x.double() for x in (q, k, v)), mask_mod=near)[0]
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-5)


def test_packed_sequences_and_caches_have_masks_and_biases_of_their_own():
    lengths = (SQ, 9)
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    q, k, v = (draw(sum(lengths), heads, D) for heads in (H, HK, HK))
    bias = draw(2, H, SQ, SQ)
    options = dict(mask_mod="(q - k) % 3 != 1", bias=bias)
    out = fa_attn.flash_attn_varlen_func(q, k, v, starts, starts, SQ, SQ, **options)
    for at, (begin, end) in enumerate(zip(starts[:-1], starts[1:])):
        rows = slice(begin, end)
        n = lengths[at]
        want = fa_attn.flash_attn_func(
            q[None, rows],
            k[None, rows],
            v[None, rows],
            mask_mod=options["mask_mod"],
            bias=bias[at : at + 1, :, :n, :n],
        )
        torch.testing.assert_close(out[rows], want[0])
    cache_k, cache_v = draw(B, SK, HK, D), draw(B, SK, HK, D)
    query, used = draw(B, 1, H, D), torch.tensor([30, 12], dtype=torch.int32)
    got = fa_attn.flash_attn_with_kvcache(
        query, cache_k, cache_v, cache_seqlens=used, mask_mod="k % 2 == 0", bias=BIAS[:, :, :1]
    )
    for at, n in enumerate(used.tolist()):
        mask = torch.arange(n) % 2 == 0
        want, _ = expected(
            *(x[at : at + 1, :n].double() for x in (query, cache_k, cache_v)),
            mask=mask,
            bias=BIAS[at : at + 1, :, :1, :n],
        )
        torch.testing.assert_close(got[at : at + 1].double(), want, atol=2e-5, rtol=1e-5)


def test_numpy_and_torch_agree():
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    for options in (
        dict(bias=BIAS, causal=True),
        dict(mask=drop(B, 1, SQ, SK)),
        dict(attention_chunk=8),
        dict(mask_mod=documents),
    ):
        lent = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        got = fa_attn.flash_attn_func(q.numpy(), k.numpy(), v.numpy(), **lent)
        np.testing.assert_allclose(got, fa_attn.flash_attn_func(q, k, v, **options).numpy(), atol=1e-6)


@pytest.mark.parametrize("keys", [32, 40])
def test_masks_of_any_order_of_axes(keys):
    q, k = torch.randn(2, 9, 4, 16), torch.randn(2, keys, 4, 16)
    mask = torch.rand(2, 4, 9, keys) < 0.7
    want = fa_attn.flash_attn_func(q, k, k, mask=mask)
    for order in ((0, 1, 3, 2), (3, 0, 1, 2), (2, 3, 1, 0)):
        back = [order.index(axis) for axis in range(4)]
        other = mask.permute(order).contiguous().permute(back)
        assert torch.equal(fa_attn.flash_attn_func(q, k, k, mask=other), want)
        arrays = [x.numpy() for x in (q, k, k)]
        got = fa_attn.flash_attn_func(*arrays, mask=other.numpy())
        np.testing.assert_allclose(got, want.numpy(), atol=1e-6)
    with pytest.raises(fa_attn.InputTypeError, match="mask holds uint8: it must be bool, float32"):
        fa_attn.flash_attn_func(q, k, k, mask=mask.to(torch.uint8))


WRONG = [
    (dict(bias=BIAS[..., :-1]), fa_attn.InputError, "along keys where the call has"),
    (dict(bias=BIAS[None]), fa_attn.InputError, "must be broadcast"),
    (dict(bias=BIAS > 0), fa_attn.InputTypeError, "is a mask"),
    (dict(bias=BIAS.int()), fa_attn.InputTypeError, "must be float32, float16 or bfloat16"),
    (dict(bias=3.0), fa_attn.InputTypeError, "bias"),
    (dict(mask=drop(3, 1, SQ, SK)), fa_attn.InputError, "3 along batch"),
    (dict(attention_chunk=-1), fa_attn.InputError, "attention_chunk"),
    (dict(attention_chunk=2.5), fa_attn.InputError, "attention_chunk"),
    (dict(mask_mod="k <= "), fa_attn.InputError, "."),
    (dict(mask_mod="s"), fa_attn.InputError, "is no mask"),
    (dict(mask_mod=7), fa_attn.InputError, "a function, a text or a Program"),
    (dict(score_mod=lambda s, b: s), fa_attn.InputError, "score_mod takes"),
    (dict(score_mod=lambda s, b, h, i, j: torch.lgamma(s)), fa_attn.UnsupportedError, "no equivalent"),
    (dict(score_mod=soft_cap, softcap=5.0), ValueError, "softcap"),
    (dict(score_mod="array t: f32[_]; score = s + t[q];"), fa_attn.InputError, "t"),
    (dict(score_mod=soft_cap, aux_tensors=[1]), fa_attn.UnsupportedError, "aux_tensors"),
]


@pytest.mark.parametrize(
    "options, error, message", WRONG, ids=[f"{case[2][:20]}-{i}" for i, case in enumerate(WRONG)]
)
def test_hostile_arguments_are_refused(options, error, message):
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    with pytest.raises(error, match=message):
        fa_attn.flash_attn_func(q, k, v, **options)


def test_a_gradient_that_a_text_leaves_out_is_an_error():
    table = torch.zeros(4, requires_grad=True)
    program = fa_attn.Program("array t: f32[_]; score = s + t[h];", dict(t=table))
    q = draw(1, 8, 4, D)
    with pytest.raises(fa_attn.InputError, match="declare it with `grad`"):
        fa_attn.flash_attn_func(q, q, q, score_mod=program)
    program = fa_attn.Program("array t: f32[_] grad; score = s * exp(t[h]);", dict(t=table))
    out = fa_attn.flash_attn_func(q, q, q, score_mod=program)
    assert torch.autograd.grad(out.square().sum(), table)[0].abs().sum() > 0


def test_arrays_may_be_aligned():
    q, k, v = draw(1, 9, 2, D), draw(1, 16, 2, D), draw(1, 16, 2, D)
    bias = draw(2, 9, 16).requires_grad_()
    made = []
    for how in ("grad", "grad aligned"):
        program = fa_attn.Program(f"array t: f32[_, _, _] {how}; s + t[h, q, k]", dict(t=bias))
        assert ("aligned" in program.text) == ("aligned" in how)
        out = fa_attn.flash_attn_func(q, k, v, score_mod=program)
        made.append((out, *torch.autograd.grad(out.square().sum(), bias)))
    assert all(torch.equal(*pair) for pair in zip(*made))


def test_indices_outside_read_no_other_memory():
    # pytorch#147551: a negative index at masked places; it is clamped.
    table = torch.arange(4.0)
    q, k, v = draw(1, 9, 2, D), draw(1, 9, 2, D), draw(1, 9, 2, D)
    got = fa_attn.flash_attn_func(
        q, k, v, score_mod=lambda s, b, h, i, j: s + table[(i - j) * 100000], causal=True
    )
    i, j = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    bias = table[((i - j) * 100000).clamp(0, 3)]
    torch.testing.assert_close(got, fa_attn.flash_attn_func(q, k, v, bias=bias, causal=True))


def test_operators_pass_torchs_checks():
    q, k, v = (draw(1, 6, heads, 8).requires_grad_() for heads in (2, 1, 1))
    bias = draw(1, 2, 6, 6).requires_grad_()
    text = "array fa_bias: f32[_, _, _, _] grad;\nscore = s + fa_bias[b, h, q, k];"
    program = (bias, *(None,) * 15, *(0.0,) * 8, text, "fa_bias", "")
    options = (None, True, -1, -1, 0.0, False, 0, False, None, None)
    for by_heads in (False, True):
        arguments = (q, k, v, *program, *(None,) * 10, 0, 0, *options, by_heads)
        torch.library.opcheck(torch.ops.fa_attn.forward_program, arguments)


def test_compiled_calls_have_no_breaks_and_no_stale_numbers():
    q, k, v = (draw(1, n, heads, D).requires_grad_() for n, heads in ((SQ, H), (SK, HK), (SK, HK)))
    mask, bias = drop(1, 1, 1, SK), BIAS[:1].clone().requires_grad_()

    def step(q, k, v, mask, bias):
        return fa_attn.flash_attn_func(q * 1.5, k, v, mask=mask, bias=bias, mask_mod="(q - k) % 3 != 0")

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out, want = compiled(q, k, v, mask, bias), step(q, k, v, mask, bias)
    torch.testing.assert_close(out, want)
    for got, need in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v, bias)) for x in (out, want))):
        torch.testing.assert_close(got, need)
    torch._dynamo.reset()
    width = 3

    def by_function(q, k, v):
        return fa_attn.flash_attn_func(q, k, v, mask_mod=lambda b, h, i, j: (i - j).abs() <= width)

    compiled = torch.compile(by_function, backend="aot_eager")
    for width in (3, 6):
        torch.testing.assert_close(compiled(q, k, v), by_function(q, k, v))


def test_autocast_leaves_biases_alone():
    q, k, v = draw(B, SQ, H, D), draw(B, SK, HK, D), draw(B, SK, HK, D)
    with torch.autocast("cpu", torch.bfloat16):
        out = fa_attn.flash_attn_func(q, k, v, bias=BIAS)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), expected(*(x.double() for x in (q, k, v)), bias=BIAS)[0], atol=3e-2, rtol=3e-2
    )
