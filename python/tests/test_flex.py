"""flex_attention, scaled_dot_product_attention and triangle_attention: torch's signatures and rules."""

import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
import fa_attn.flex  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fa_attn import BlockMask, create_block_mask, flex_attention  # noqa: E402
from fa_attn import _torch_by_heads as by_heads  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402
from torch.nn.attention.bias import CausalBias, CausalVariant  # noqa: E402

B, H, HK, L, S, D = 2, 4, 2, 35, 50, 16
_generator = torch.Generator().manual_seed(3)


def draw(*shape):
    return torch.randn(shape, generator=_generator)


SLOPES = torch.exp2(-torch.arange(1.0, H + 1))
DOCUMENT = torch.arange(S) // 17


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def by_batch_and_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 5 + 4 * b + h


def empty_rows(b, h, q_idx, kv_idx):
    return (q_idx >= 8) & (kv_idx != 3)


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def cap(score, b, h, q_idx, kv_idx):
    return 3.0 * torch.tanh(score / 3.0)


NARROW = {
    "u": torch.arange(250, 250 + S).to(torch.uint8),
    "i": (torch.arange(S) * 37).to(torch.int8),
    "s": (torch.arange(S) * 3771).to(torch.int16),
}


def inputs(*shapes):
    own = [draw(*shape).requires_grad_() for shape in shapes]
    return own, [x.detach().double().requires_grad_() for x in own]


def formula(q, k, v, score_mod=None, seen=None, scale=None):
    """(out, lse) in float64 of (batch, heads, seqlen, head_dim)."""
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    grid = torch.meshgrid(*map(torch.arange, s.shape), indexing="ij")
    s = s if score_mod is None else score_mod(s, *grid).double()
    seen = seen(*grid) if callable(seen) else seen
    if seen is not None:
        s = s.masked_fill(~seen.expand(s.shape), -math.inf)
    lse = s.logsumexp(-1)
    return (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp() @ v, lse


def same(got, want, own, true):
    """out (and LSE), then the gradients."""
    for x, y in zip(got, want):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=1e-4)
    dout = draw(*got[0].shape)
    made = torch.autograd.grad(got[0], own, dout), torch.autograd.grad(want[0], true, dout.double())
    for x, y in zip(*made):
        torch.testing.assert_close(x.double(), y.double(), atol=2e-4, rtol=1e-4)


CASES = [
    ("plain", None, None),
    ("causal from the top left", None, causal),
    ("documents", None, documents),
    ("by batch and head", cap, by_batch_and_head),
    ("rows and columns without keys", None, empty_rows),
    ("ALiBi", alibi, causal),
]


@pytest.mark.parametrize("score_mod, mask_mod", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("made_by", ["ours", "torch"])
def test_flex_attention_is_the_formula(score_mod, mask_mod, made_by):
    own, true = inputs((B, H, L, D), (B, HK, S, D), (B, HK, S, D))
    mask = None
    if mask_mod is not None:
        make = create_block_mask if made_by == "ours" else flex.create_block_mask
        sizes = (B, H) if mask_mod is by_batch_and_head else (None, None)
        mask = make(mask_mod, *sizes, L, S, device="cpu")
    got = flex_attention(*own, score_mod, mask, enable_gqa=True, return_lse=True)
    same(got, formula(*true, score_mod, mask_mod), own, true)


def test_lists_are_honoured_where_the_mask_says_nothing():
    # pytorch#188322. Entries behind a list's length may hold anything.
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[3, 77, -5, 9], [0, 2, 1 << 30, 1], [1, 1, 1, 1]]]], dtype=torch.int32)
    block = (16, 16)
    blocks = torch.tensor([[0, 0, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]]).bool()
    seen = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)[:L, :S]
    own, true = inputs((B, H, L, D), (B, H, S, D), (B, H, S, D))
    for make in (BlockMask, flex.BlockMask):
        mask = make.from_kv_blocks(counts, indices, BLOCK_SIZE=block, seq_lengths=(L, S))
        got = flex_attention(*own, block_mask=mask, return_lse=True)
        same(got, formula(*true, None, seen), own, true)
        assert torch.equal(got[0][:, :, 32:], torch.zeros(B, H, L - 32, D))
        assert (got[1][:, :, 32:] == -math.inf).all()
    # In full blocks mask_mod is not evaluated.
    nothing = torch.zeros_like(counts)
    mask = BlockMask.from_kv_blocks(nothing, indices, counts, indices, block, causal, (L, S))
    same(flex_attention(*own, block_mask=mask, return_lse=True), formula(*true, None, seen), own, true)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=block, mask_mod=causal, seq_lengths=(L, S))
    lower = seen & torch.ones(L, S).tril().bool()
    same(flex_attention(*own, block_mask=mask, return_lse=True), formula(*true, None, lower), own, true)


def test_batches_of_one_scales_and_combinators():
    own, true = inputs((B, H, L, D), (1, H, S, D), (1, H, S, D))
    seen = flex.or_masks(flex.and_masks(causal, documents), by_batch_and_head)
    mask = create_block_mask(seen, B, H, L, S)
    got = flex_attention(*own, block_mask=mask, scale=0.5, return_aux=flex.AuxRequest(lse=True))
    want = formula(*true, None, lambda *at: (causal(*at) & documents(*at)) | by_batch_and_head(*at), 0.5)
    same((got[0], got[1].lse), want, own, true)
    ours = create_block_mask(
        fa_attn.flex.or_masks(fa_attn.flex.and_masks(causal, documents), by_batch_and_head), B, H, L, S
    )
    assert ours.program == mask.program


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lengths", [(L, S), (S, L), (L, L)])
def test_a_mask_beside_is_causal_hides_more(lengths, bias):
    (q, k, v), _ = own, true = inputs(*((B, H, length, D) for length in (lengths[0], lengths[1], lengths[1])))
    mask = draw(H, *lengths) if bias else draw(B, 1, *lengths) > -0.7
    out = fa_attn.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    seen = torch.ones(lengths, dtype=torch.bool).tril()
    if bias:
        want = formula(*true, lambda s, b, h, i, j: s + mask.double(), seen)
    else:
        want = formula(*true, None, mask & seen)
    same((out,), want[:1], own, true)


AT_ZERO = [
    *(
        getattr(F, name)
        for name in "relu relu6 hardtanh hardswish softplus logsigmoid mish gelu silu".split()
    ),
    *(getattr(F, name) for name in "elu selu celu leaky_relu softsign tanhshrink".split()),
    *(torch.erf, torch.atan, torch.asin, torch.asinh, torch.abs),
    lambda score: torch.logaddexp(score, -2 * score),
    lambda score: torch.xlogy(score, score + 2),
    lambda score: torch.atan2(score, torch.ones_like(score)),
]


@pytest.mark.parametrize("function", AT_ZERO, ids=lambda function: function.__name__)
def test_scores_of_exactly_0_have_torchs_derivatives(function):
    """As rows of zeros, which paddings are, have."""
    (k, v), (true_k, true_v) = inputs((1, 1, 5, D), (1, 1, 5, D))
    q, true_q = torch.zeros(1, 1, 3, D).requires_grad_(), torch.zeros(1, 1, 3, D).double().requires_grad_()

    def score_mod(score, b, h, q_idx, kv_idx):
        return function(score)

    own, true = (q, k, v), (true_q, true_k, true_v)
    same(flex_attention(*own, score_mod, return_lse=True), formula(*true, score_mod), own, true)


def test_captured_scalars_learn():
    # pytorch#145208: the gradient of a captured scalar, and of a table.
    gain, table = torch.tensor([1.3], requires_grad=True), draw(H, L + S).requires_grad_()
    own, true = inputs((B, H, L, D), (B, H, S, D), (B, H, S, D))

    def learned(score, b, h, q_idx, kv_idx):
        return score * gain[0] + table[h, q_idx - kv_idx + S]

    got = flex_attention(*own, learned, return_lse=True)
    same(got, formula(*true, learned), [*own, gain, table], [*true, gain, table])


@pytest.mark.parametrize("sk", [L, S, 20])
@pytest.mark.parametrize(
    "mask", ["none", "causal", "bool", "row", "float", "keys", "two axes", "learned", "head", "nothing seen"]
)
def test_scaled_dot_product_attention_is_torchs(mask, sk):
    own, true = inputs((B, H, L, D), (B, HK, sk, D), (B, HK, sk, D))
    options, both = dict(enable_gqa=True), {}
    made = {
        "bool": torch.rand(B, H, L, sk, generator=_generator) > 0.3,
        "row": (torch.arange(sk) < torch.tensor([[sk], [7]]))[:, None, None],
        "float": draw(B, 1, L, sk),
        "keys": draw(B, 1, 1, sk),
        "two axes": draw(L, sk),
        "learned": draw(1, H, L, sk).requires_grad_(),
        "head": draw(H, 1, 1).requires_grad_(),
        "nothing seen": torch.zeros(1, 1, L, sk, dtype=torch.bool),
    }
    attn_mask = made.get(mask)
    options["is_causal"] = mask == "causal"
    if attn_mask is not None:
        both = dict(attn_mask=attn_mask if attn_mask.dtype == torch.bool else attn_mask.double())
    got = fa_attn.scaled_dot_product_attention(*own, attn_mask=attn_mask, **options)
    want = F.scaled_dot_product_attention(*true, **both, **options)
    learned = [attn_mask] if attn_mask is not None and attn_mask.requires_grad else []
    same((got,), (want,), [*own, *learned], [*true, *learned])


def test_a_mask_of_float32_beside_16_bits_without_columns():
    q, mask = draw(1, 2, 5, 0).half(), draw(5, 5)
    v = draw(1, 2, 5, 3).half()
    out = fa_attn.scaled_dot_product_attention(q, q, v, attn_mask=mask, scale=1.0)
    assert out.dtype == torch.float16
    want = torch.softmax(mask, -1) @ v.float()
    torch.testing.assert_close(out.float(), want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    "query, key, mask",
    [
        ((9, D), (9, D), (9, 9)),
        ((3, 9, D), (3, 9, D), (3, 9, 9)),
        ((6, 9, D), (2, 5, D), (9, 1)),
        ((2, 2, 3, 9, D), (2, 2, 3, 9, D), (2, 2, 3, 9, 9)),
        ((2, 2, 3, 9, D), (1, 2, 3, 9, D), (9, 9)),
        ((B, H, 9, D), (1, 1, 7, D), (7,)),
        ((B, 1, 9, D), (B, H, 7, D), (H, 9, 7)),
        ((B, H, 0, D), (B, H, 7, D), (B, 1, 0, 7)),
        ((B, H, 9, D), (B, HK, 0, D), (9, 0)),
        ((0, H, 9, D), (0, H, 7, D), (0, H, 9, 7)),
        ((0, D), (3, D), (0, 3)),
    ],
)
def test_scaled_dot_product_attention_of_other_axes(query, key, mask):
    own, true = inputs(query, key, key)
    seen = torch.rand(mask, generator=_generator) > 0.2
    gqa = len(query) > 2 and query[-3] > key[-3] > 1
    for mask in (seen, torch.where(seen, 0.5, -math.inf)):
        # Torch takes no mask of one axis.
        theirs = torch.where(seen, 0.0, -math.inf) if mask is seen else mask
        theirs = torch.atleast_2d(theirs.double())
        want = F.scaled_dot_product_attention(*true, theirs, enable_gqa=gqa)
        got = fa_attn.scaled_dot_product_attention(*own, mask, enable_gqa=gqa)
        same((got,), (want.nan_to_num(),), own, true)


@pytest.mark.parametrize(
    "query, key, value",
    [
        ((1, H, 9, D), (B, HK, 7, D), (B, HK, 7, D)),
        ((B, H, 9, D), (1, HK, 7, D), (B, HK, 7, D)),
        ((B, H, 9, D), (H, 7, D), (H, 7, D)),
        ((H, 9, D), (B, H, 7, D), (1, 7, D)),
        ((9, D), (B, H, 7, D), (B, H, 7, D)),
        ((2, B, H, 9, D), (H, 7, D), (B, H, 7, D)),
        ((9, D), (H, 7, D), (H, 7, D)),
    ],
)
def test_batches_are_broadcast_to_each_other(query, key, value):
    own, true = inputs(query, key, value)
    gqa = query[-3:-2] == (H,) and key[-3] == HK
    want = F.scaled_dot_product_attention(*true, enable_gqa=gqa)
    same((fa_attn.scaled_dot_product_attention(*own, enable_gqa=gqa),), (want,), own, true)


def test_what_cannot_be_broadcast_is_said():
    q, k = draw(2, 3, H, 9, D), draw(4, H, 7, D)
    wrong = [
        (lambda: fa_attn.scaled_dot_product_attention(q, k, k), "their batches must be broadcast"),
        (lambda: fa_attn.scaled_dot_product_attention(*[k[0]] * 3, draw(1, 1, 7, 7)), "attn_mask has 4 axes"),
        (lambda: fa_attn.scaled_dot_product_attention(k, None, k), "key must be a torch tensor"),
        (
            lambda: fa_attn.scaled_dot_product_attention(k, k[:, :2], k[:, :1], enable_gqa=True),
            "key has 2 heads and value 1",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(fa_attn.InputError, match=message):
            call()


def test_a_mask_of_float32_is_added_to_scores_of_float64():
    q, k, v = (draw(B, H, n, D).double() for n in (L, S, S))
    mask = draw(L, S)
    want = F.scaled_dot_product_attention(q, k, v, mask.double())
    assert (fa_attn.scaled_dot_product_attention(q, k, v, mask) - want).abs().max() < 1e-12


@pytest.mark.parametrize("batch", [1, 2])
def test_triangle_attention_shares_a_bias_between_rows(batch):
    rows, heads, n = 3, 2, 19
    own, true = inputs(*((batch, rows, heads, n, D),) * 3, (batch, 1, heads, n, n))
    mask = torch.rand(batch, rows, 1, 1, n, generator=_generator) > 0.3
    mask[0, 1] = False
    out, lse, _ = fa_attn.triangle_attention(*own, mask, scale=0.3, return_aux=True)
    q, k, v, bias = true
    s = (0.3 * q @ k.mT + bias).masked_fill(~mask, -math.inf)
    want_lse = s.logsumexp(-1, keepdim=True)
    want = (s - want_lse.masked_fill(want_lse == -math.inf, 0.0)).exp() @ v
    same((out, lse), (want, want_lse), own, true)
    assert torch.equal(out[0, 1], torch.zeros(heads, n, D))
    # openfold-3 PR 271: the bits of the gradient of a shared bias do not change.
    grads = [torch.autograd.grad(fa_attn.triangle_attention(*own, mask).sum(), own[3])[0] for _ in range(2)]
    assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("lengths", [(L, S), (S, L), (L, L)])
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_torchs_causal_biases_are_read_by_what_they_say(lengths, alignment):
    """They are tensors whose elements mean nothing."""
    rows, keys = lengths
    own, true = inputs((B, H, rows, D), (B, H, keys, D), (B, H, keys, D))
    bias = CausalBias(getattr(CausalVariant, alignment.upper()), rows, keys)
    seen = torch.ones(lengths).bool().tril(keys - rows if alignment == "lower_right" else 0)
    got, (want, _) = fa_attn.scaled_dot_product_attention(*own, bias), formula(*true, seen=seen)
    assert (got - want).abs().max() < 1e-5
    assert torch.equal(fa_attn.scaled_dot_product_attention(*(x[0, 0] for x in own), bias), got[0, 0])
    for one, other in zip(torch.autograd.grad(got.sum(), own), torch.autograd.grad(want.sum(), true)):
        assert (one - other).abs().max() < 1e-4
    with pytest.raises(fa_attn.InputError, match="CausalBias of .* make one for these"):
        fa_attn.scaled_dot_product_attention(own[0][:, :, 1:], *own[1:], bias)
    with pytest.raises(fa_attn.InputError, match="is_causal beside a CausalBias"):
        fa_attn.scaled_dot_product_attention(*own, bias, is_causal=True)
    with pytest.raises(fa_attn.InputTypeError, match="mask is a CausalBias"):
        fa_attn.flash_attn_func(*(x.transpose(1, 2) for x in own), mask=bias)


@pytest.mark.parametrize("masked", [None, "bool", "added", "of rows"])
def test_keys_beyond_the_last_query_reach_no_kernel(masked, monkeypatch):
    """No kernel has a causal mask whose diagonal ends before the first key."""
    rows, keys = 7, 30
    own, true = inputs((B, H, rows, D), (B, H, keys, D), (B, H, keys, D))
    seen = torch.ones(rows, keys).bool().tril()
    masks = {"bool": draw(rows, keys) > -1.0, "added": draw(H, rows, keys), "of rows": draw(rows, 1)}
    mask = masks.get(masked)
    calls, plain = [], by_heads.attention

    def called(q, k, v, options, *others, **named):
        calls.append((k.shape[1], options.query_offset))
        return plain(q, k, v, options, *others, **named)

    monkeypatch.setattr(by_heads, "attention", called)
    got = fa_attn.scaled_dot_product_attention(*own, mask, is_causal=True)
    assert calls == [(rows, 0)]
    added = 0.0 if mask is None else torch.where(mask, 0.0, -math.inf) if masked == "bool" else mask
    scores = (true[0] @ true[1].mT / D**0.5 + added).masked_fill(~seen, -math.inf)
    want = torch.softmax(scores, -1).nan_to_num() @ true[2]
    assert (got - want).abs().max() < 1e-5
    for one, other in zip(torch.autograd.grad(got.sum(), own), torch.autograd.grad(want.sum(), true)):
        assert (one - other).abs().max() < 1e-4


def test_the_largest_scores_are_those_after_mask_and_change():
    q, k, v = draw(B, H, L, D), draw(B, H, S, D), draw(B, H, S, D)
    bias = draw(H, S).requires_grad_()
    # Equal scores by the cap, and rows without keys.
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i % 3 != 1), None, None, L, S)
    request = flex.AuxRequest(lse=True, max_scores=True)

    def change(s, b, h, i, j):
        return torch.tanh(9 * s + bias[h, j])

    out, found = flex_attention(q, k, v, change, mask, return_aux=request)
    rows, keys = torch.arange(L)[:, None], torch.arange(S)
    scores = torch.tanh(9 * (q @ k.mT) / math.sqrt(D) + bias[:, None])
    want = torch.where((rows >= keys) & (rows % 3 != 1), scores, -math.inf).amax(-1)
    assert not found.max_scores.requires_grad and found.lse.requires_grad
    torch.testing.assert_close(found.max_scores, want.detach(), atol=2e-4, rtol=0)
    assert torch.equal(out, flex_attention(q, k, v, change, mask))
    alone = flex_attention(q, k, v, return_aux=fa_attn.flex.AuxRequest(max_scores=True))[1]
    assert alone.lse is None
    torch.testing.assert_close(alone.max_scores, (q @ k.mT).amax(-1) / math.sqrt(D), atol=2e-4, rtol=0)
    # In a graph of any lengths.
    graph = torch.compile(flex_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    again = graph(q, k, v, return_aux=fa_attn.flex.AuxRequest(max_scores=True))[1]
    torch.testing.assert_close(again.max_scores, alone.max_scores)


def test_what_torch_refuses_or_nothing_computes_is_an_error():
    q, k, v = draw(B, H, L, D), draw(B, H, S, D), draw(B, H, S, D)
    mask = create_block_mask(causal, None, None, L, S + 1)
    wrong = [
        (lambda: flex_attention(q, k, v, block_mask=mask), "make one for these lengths"),
        (lambda: flex_attention(q, k, v, block_mask=7), "block_mask is int"),
        (lambda: flex_attention(q, k[:, :2], v[:, :2]), "enable_gqa"),
        (lambda: flex_attention(q[0], k, v), "must be \\(batch, heads"),
        (lambda: flex_attention(q, k, v, kernel_options={"speed": 9}), "kernel_options has 'speed'"),
        (lambda: flex_attention(q, k, v, block_mask=create_block_mask(causal, 3, None, L, S)), "B = 3"),
        (lambda: create_block_mask(causal, None, None, -1, S), "Q_LEN"),
        (lambda: create_block_mask(causal, None, None, L, S, BLOCK_SIZE=0), "BLOCK_SIZE"),
        (lambda: fa_attn.scaled_dot_product_attention(q, k, v, dropout_p=1.5), "dropout_p is 1.5"),
        (lambda: fa_attn.scaled_dot_product_attention(q, k, v, torch.ones(L, S + 1)), "along keys"),
        (lambda: fa_attn.triangle_attention(q[None], k[None], v[None], draw(1, 1, H, L, L)), "bias"),
    ]
    for call, message in wrong:
        with pytest.raises((fa_attn.InputError, fa_attn.UnsupportedError), match=message):
            call()


def test_compiled_flex_has_no_break_with_a_block_mask():
    q, k, v = (draw(B, H, n, D).requires_grad_() for n in (L, S, S))
    mask, score = create_block_mask(causal, None, None, L, S), fa_attn.Program.of_score(alibi)

    def step(q, k, v):
        return flex_attention(q * 2.0, k, v, score, mask) + 1.0

    out, want = torch.compile(step, backend="aot_eager", fullgraph=True)(q, k, v), step(q, k, v)
    torch.testing.assert_close(out, want)
    for x, y in zip(*(torch.autograd.grad(one.square().sum(), (q, k, v)) for one in (out, want))):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "mod", [causal, by_batch_and_head, alibi, lambda s, b, h, q, k: s.where(q < k, -math.inf)]
)
def test_a_dense_mask_is_torchs(mod):
    sizes = (B, H, L, S) if mod is not causal else (None, None, L, S)
    made, want = (module.create_mask(mod, *sizes, device="cpu") for module in (fa_attn.flex, flex))
    assert torch.equal(made, want) and made.dtype == torch.bool


@pytest.mark.parametrize("heads_kv", [H, HK])
@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors_are_packed_rows(heads_kv, causal):
    lengths = (3, 7, 1)
    own = [[draw(n, heads, D).requires_grad_() for n in lengths] for heads in (H, heads_kv, heads_kv)]
    offsets = torch.tensor([0, 3, 10, 11])
    q, k, v = (torch.nested.nested_tensor_from_jagged(torch.cat(x), offsets).transpose(1, 2) for x in own)
    out = fa_attn.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads_kv != H)
    assert out.shape == q.shape and out.layout == torch.jagged
    for at, part in enumerate(out.unbind()):
        mine = [x[at] for x in own]
        true = [x.detach().double().requires_grad_() for x in mine]
        rows = lengths[at]
        seen = torch.ones(rows, rows, dtype=torch.bool).tril() if causal else None
        want = formula(*(x.transpose(0, 1)[None] for x in true), None, seen)[0][0]
        torch.testing.assert_close(part.double(), want, atol=2e-5, rtol=1e-4)
        dout = draw(*part.shape)
        made = torch.autograd.grad(part, mine, dout, retain_graph=True)
        for x, y in zip(made, torch.autograd.grad(want, true, dout.double())):
            torch.testing.assert_close(x.double(), y, atol=2e-4, rtol=1e-4)


def test_nested_tensors_that_are_not_computed_are_errors():
    one = torch.nested.nested_tensor([draw(3, H, D), draw(5, H, D)], layout=torch.jagged).transpose(1, 2)
    other = torch.nested.nested_tensor([draw(4, H, D), draw(4, H, D)], layout=torch.jagged).transpose(1, 2)
    strided = torch.nested.nested_tensor([draw(H, 3, D), draw(H, 5, D)])
    wrong = [
        (lambda: fa_attn.scaled_dot_product_attention(strided, strided, strided), "layout=torch.jagged"),
        (lambda: fa_attn.scaled_dot_product_attention(one, draw(2, H, 5, D), one), "key beside nested"),
        (lambda: fa_attn.scaled_dot_product_attention(one, one, one, torch.ones(5, 5)), "attn_mask beside"),
        (lambda: fa_attn.scaled_dot_product_attention(one, other, other, is_causal=True), "is_causal"),
        (lambda: fa_attn.scaled_dot_product_attention(one, one, other), "value has other lengths"),
    ]
    for call, message in wrong:
        with pytest.raises((fa_attn.InputError, fa_attn.UnsupportedError), match=message):
            call()


def test_a_counter_that_is_imported_before_sees_all_operators():
    program = "import torch.utils.flop_counter, torch, fa_attn; q = torch.ones(1, 1, 2, 8)\n"
    program += "print(fa_attn.scaled_dot_product_attention(q, q, q, q.new_zeros(2, 2)).sum().item())"
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (made.returncode, made.stdout) == (0, "16.0\n"), made.stderr


def _scores(bias, number):
    return lambda s, b, h, q, k: s * number + bias[h, q - k + S]


TRANSFORMED = {
    "bias": lambda q, k, v, bias, number: flex_attention(q, k, v, _scores(bias, 1.5)),
    "number": lambda q, k, v, bias, number: flex_attention(q, k, v, lambda s, b, h, i, j: s * number),
    "block mask": lambda q, k, v, bias, number: flex_attention(
        q, k, v, _scores(bias, number), create_block_mask(empty_rows, None, None, L, S)
    ),
    "float mask": lambda q, k, v, bias, number: fa_attn.scaled_dot_product_attention(
        q, k, v, bias[:, :S].expand(L, H, S).transpose(0, 1) * number
    ),
    "padding": lambda q, k, v, bias, number: fa_attn.scaled_dot_product_attention(
        q, k, v, bias[0, :S].expand(L, S) > number - 2
    ),
    "bool mask": lambda q, k, v, bias, number: fa_attn.scaled_dot_product_attention(
        q, k, v, bias[:, :1, None].expand(H, L, S) > number - 2
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_programs_under_transforms_are_each_element_by_itself(name):
    own = [draw(3, *shape) for shape in ((B, H, L, D), (B, HK * 2, S, D), (B, H, S, D), (H, 2 * S))]
    own.append(torch.tensor([0.5, 1.0, 1.5]))
    call = TRANSFORMED[name]
    out = torch.func.vmap(call)(*own)
    each = [[x[at].clone().requires_grad_() for x in own] for at in range(3)]
    want = [call(*one) for one in each]
    torch.testing.assert_close(out, torch.stack(want))
    places = tuple(range(5))
    made = torch.func.vmap(torch.func.grad(lambda *own: call(*own).square().sum(), places))(*own)
    for at, (one, x) in enumerate(zip(each, want)):
        true = torch.autograd.grad(x.square().sum(), one, allow_unused=True, retain_graph=True)
        for got, y in zip(made, true):
            torch.testing.assert_close(got[at], torch.zeros_like(got[at]) if y is None else y)
    one = [x.detach() for x in each[0]]
    torch.testing.assert_close(torch.func.functionalize(call)(*one), want[0])
    jacobian = torch.func.jacrev(lambda q: call(q, *one[1:]).sum((0, 1, 2)))(one[0])
    true = torch.autograd.grad(want[0][..., 1].sum(), each[0][0])[0]
    torch.testing.assert_close(jacobian[1], true)


def test_derivatives_that_programs_do_not_have_are_errors():
    q, k, v, bias = draw(B, H, L, D).requires_grad_(), draw(B, H, S, D), draw(B, H, S, D), draw(H, 2 * S)
    out = flex_attention(q, k, v, _scores(bias, 1.0))
    [first] = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(fa_attn.UnsupportedError, match="second derivatives"):
        first.sum().backward()
    with pytest.raises(fa_attn.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda q: flex_attention(q, k, v, _scores(bias, 1.0)), (q.detach(),), (k[:, :, :L],))


def test_torchs_mask_of_no_blocks_is_of_any_lengths():
    q, k, v = draw(B, H, L, D), draw(B, H, S, D), draw(B, H, S, D)
    mask = flex._create_empty_block_mask(q, k)
    torch.testing.assert_close(flex_attention(q, k, v, alibi, mask), flex_attention(q, k, v, alibi))


@pytest.mark.parametrize("function", ["scaled", "flex"])
def test_out_lies_as_the_query(function):
    def call(q, k, v):
        if function == "scaled":
            return fa_attn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return flex_attention(q, k, v, alibi, create_block_mask(causal, None, None, L, S))

    q, k, v = draw(B, H, L, D), draw(B, H, S, D), draw(B, H, S, 8)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True) if function == "scaled" else None
    for layout in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        for is_differentiated in (False, True):
            x = layout.detach().requires_grad_(is_differentiated)
            out = call(x, k, v)
            assert out.is_contiguous() == x.is_contiguous()
            assert out.transpose(1, 2).is_contiguous() != x.is_contiguous()
            if want is not None:
                torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
            if is_differentiated:
                (dq,) = torch.autograd.grad(out.square().sum(), x)
                (other,) = torch.autograd.grad(call(x.contiguous(), k, v).square().sum(), x)
                torch.testing.assert_close(dq, other)


def test_doubles_are_exact_and_differentiated_twice():
    q, k, v = (draw(B, heads, n, 6).double().requires_grad_() for heads, n in ((H, 5), (HK, 7), (HK, 7)))
    bias = draw(1, H, 5, 7).double().requires_grad_()
    seen = torch.rand(5, 7, generator=_generator) > 0.4
    seen[2] = False
    scaled = fa_attn.scaled_dot_product_attention
    for mask, options in ((None, {"is_causal": True}), (seen, {"scale": 0.3}), (bias, {"is_causal": True})):
        out = scaled(q, k, v, mask, enable_gqa=True, **options)
        mods = (lambda s, *_: s + bias) if mask is bias else None
        visible = seen if mask is seen else torch.ones(5, 7, dtype=torch.bool).tril()
        want = formula(q, k, v, mods, visible, options.get("scale"))[0]
        torch.testing.assert_close(out, want, atol=1e-14, rtol=1e-13)
    lower = CausalBias(CausalVariant.LOWER_RIGHT, 5, 7)
    want = formula(q, k, v, None, torch.ones(5, 7, dtype=torch.bool).tril(2))[0]
    torch.testing.assert_close(scaled(q, k, v, lower, enable_gqa=True), want, atol=1e-14, rtol=1e-13)
    few = [x[:1, :, :3].detach().requires_grad_() for x in (q, k, v)]
    table = draw(H).double().requires_grad_()

    def own(q, k, v, table):
        mask = create_block_mask(lambda b, h, i, j: (i >= j) | (j == 2), None, None, 3, 3)
        score = lambda s, b, h, i, j: s * table[h] + (i - j)  # noqa: E731
        return flex_attention(q, k, v, score, mask, enable_gqa=True, return_lse=True)

    assert torch.autograd.gradcheck(own, (*few, table))
    assert torch.autograd.gradgradcheck(lambda *x: scaled(*x, enable_gqa=True), few)
    # Of lists of blocks what they list, as torch's eager function.
    theirs = flex.create_block_mask(empty_rows, None, None, 16, 16, "cpu", BLOCK_SIZE=4)
    q, k, v = (draw(B, H, 16, 8).double() for _ in range(3))
    for got, want in zip(
        flex_attention(q, k, v, cap, theirs, return_lse=True),
        flex.flex_attention(q, k, v, cap, theirs, return_lse=True),
    ):
        torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-12)
        assert got.dtype is torch.float64
    with pytest.raises(fa_attn.UnsupportedError, match="score_mod of float64: give a function"):
        flex_attention(q, k, v, "s * 2.0")
    with pytest.raises(
        fa_attn.InputTypeError, match="attn_mask holds torch.float16: it must be bool, float32 or"
    ):
        scaled(q, k, v, torch.zeros(16, 16).half())


@pytest.mark.parametrize("shape", [(2, 4, 5, 0), (0, 0, 0, 0), (2, 0, 5, 4), (2, 4, 0, 8), (0, 4, 5, 8)])
def test_tensors_without_elements_are_torchs(shape):
    for columns in (8, 0):
        q, k = (torch.zeros(shape, requires_grad=True) for _ in range(2))
        v = draw(*shape[:3], columns).requires_grad_()
        out = fa_attn.scaled_dot_product_attention(q, k, v)
        # Without columns of keys all are seen alike.
        want = v.mean(2, keepdim=True).expand(out.shape) if v.numel() else v
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(flex_attention(q, k, v), want)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("name", sorted(NARROW))
@pytest.mark.parametrize(
    "text",
    [
        "x > -1",
        "x - 5 > 100",
        "x // -2 > 3",
        "x * 100 + n > 20",
        "-x > 7",
        "~x > 100",
        "abs(x - 100) > 50",
        "(x << 3) > 50",
        "torch.clamp(x, -3, 90) > 20",
        "x.clamp(min=-3) > 5",
        "torch.where(x > 5, x, -1) > 100",
        "x % -7 > -3",
        "x + q_idx > 100",
        "x.to(torch.int32) - 5 > 100",
        "x - NARROW['i'][q_idx] > 3",
        "(q_idx * 50).to(torch.int8) > x",
        "(kv_idx * 99).byte() + x > 40",
        "x / 2 > -20",
        "torch.div(x, -3, rounding_mode='trunc') > 2",
    ],
)
def test_integers_of_few_bits_are_computed_as_torch_does(name, text):
    scope = {"torch": torch, "NARROW": NARROW, "n": 7}
    exec(f"def mask(b, h, q_idx, kv_idx):\n    x = NARROW['{name}'][kv_idx]\n    return ({text}) | (kv_idx == 0)", scope)
    q, k, v = draw(1, 2, L, D), draw(1, 2, S, D), draw(1, 2, S, D)
    seen = scope["mask"](0, 0, torch.arange(L)[:, None], torch.arange(S)[None])
    made = create_block_mask(scope["mask"], 1, 2, L, S, device="cpu")
    want = F.scaled_dot_product_attention(q, k, v, seen.expand(L, S))
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=made), want, rtol=1e-4, atol=1e-5)


def test_captured_numbers_are_sizes_of_tensors():
    table, rows, columns = draw(S), 3, S

    def spread(score, b, h, q_idx, kv_idx):
        return score + table[None].expand(rows, columns)[b, kv_idx]

    q, k, v = draw(B, H, L, D), draw(B, H, S, D), draw(B, H, S, D)
    want = F.scaled_dot_product_attention(q, k, v, table.expand(L, S))
    torch.testing.assert_close(flex_attention(q, k, v, score_mod=spread), want, rtol=1e-4, atol=1e-5)
