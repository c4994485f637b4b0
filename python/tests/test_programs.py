"""Programs traced from Python functions compute what the functions do."""

import functools
import math
import random
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks  # noqa: E402

import fa_attn  # noqa: E402
from fa_attn._programs import Program  # noqa: E402

LENGTH, HEADS, BATCH = 48, 4, 2
_generator = torch.Generator().manual_seed(7)


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=_generator).to(dtype)


def ints(low, high, *shape, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=_generator).to(dtype)


WINDOW = 9
DOCUMENT = torch.arange(LENGTH) // 13
DOCUMENTS = torch.stack([DOCUMENT, torch.arange(LENGTH) // 7])
PREFIX = torch.tensor([5, 20])
BIAS = draw(BATCH, HEADS, LENGTH, LENGTH)
TABLE = draw(HEADS, 2 * LENGTH - 1, dtype=torch.bfloat16)
SLOPES = torch.exp2(-torch.arange(1, HEADS + 1, dtype=torch.float32))
LEVEL = torch.arange(LENGTH).float().add(1).log2().to(torch.uint8)
VALID = ints(0, 2, BATCH, LENGTH, dtype=torch.bool)
ANCESTORS = ints(0, 2, LENGTH, LENGTH, dtype=torch.bool)
BUCKETS = draw(32, HEADS)
FORGET = draw(BATCH, HEADS, LENGTH).cumsum(-1)
NUMPY_SLOPES = SLOPES.numpy()
SIGNED = torch.tensor([3, -2, 1, -5])
EDGES = torch.tensor([3, 9, 9, 20, 31])
PLACES = torch.stack([torch.arange(LENGTH) // 8, torch.arange(LENGTH) % 8], -1)
POINTS, KEY_POINTS = draw(LENGTH, 3), draw(BATCH, 1, LENGTH, 3)
AXES = torch.tensor([0.5, 1.0, 2.0])
LEVELS = torch.nn.Embedding(32, HEADS)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size):
    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return sliding_window


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < PREFIX[b]


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def dilated(size, dilation):
    def mask(b, h, q, k):
        distance = (q - k).abs()
        return (distance <= size) & (torch.remainder(q - k, dilation) == 0)

    return mask


def neighbourhood(width, height, kernel):
    def mask(b, h, q, k):
        qx, qy = q // width, q % width
        kx, ky = k // width, k % width
        center_x = qx.clamp(kernel // 2, height - 1 - kernel // 2)
        center_y = qy.clamp(kernel // 2, width - 1 - kernel // 2)
        return ((center_x - kx).abs() <= kernel // 2) & ((center_y - ky).abs() <= kernel // 2)

    return mask


def block_diffusion(n, block):
    def mask(b, h, q_idx, kv_idx):
        x0_q, x0_k = q_idx >= n, kv_idx >= n
        bq = torch.where(x0_q, (q_idx - n) // block, q_idx // block)
        bk = torch.where(x0_k == 1, (kv_idx - n) // block, kv_idx // block)
        diagonal = (bq == bk) & (x0_q == x0_k)
        offset = (bq > bk) & (x0_k == 1) & (x0_q == 0)
        return diagonal | offset | ((bq >= bk) & (x0_k == 1) & (x0_q == 1))

    return mask


def morton(b, h, q, k):
    def spread(x):
        return (x & 1) | ((x >> 1) & 2) | ((x >> 2) & 4)

    return torch.abs(spread(q) - spread(k)) <= 1


def random_mask(seed):
    def mask(b, h, q, k):
        x = ((q * 7919) ^ (k * 10473) ^ seed) * 31
        return ((x ^ (x >> 5)) & 7) < 3

    return mask


def near_places(b, h, q, k):
    x, y = PLACES[q]
    return ((x - PLACES[k][0]).abs() <= 1) & ((y - PLACES[k][1]).abs() <= 2)


class Holder:
    def __init__(self):
        self.start, self.length = DOCUMENT * 13, 40

    def mask(self, b, h, q, k):
        return (self.start[q] <= k) & (k < self.length)


MASKS = {
    "causal": causal,
    "window": window(5),
    "window of a global": lambda b, h, q, k: abs(q - k) < WINDOW,
    "prefix": or_masks(prefix, causal),
    "documents": and_masks(document, causal),
    "three": and_masks(or_masks(prefix, causal), window(11), noop_mask),
    "dilated": dilated(12, 3),
    "neighbourhood": neighbourhood(8, 6, 3),
    "block diffusion": block_diffusion(24, 4),
    "scales": lambda b, h, q, k: LEVEL[k] <= LEVEL[q],
    "padding": lambda b, h, q, k: VALID[b, k],
    "chained indices": lambda b, h, q, k: VALID[b][k] & ~VALID[b][q],
    "tree": lambda b, h, q, k: (k < 16) | ANCESTORS[q, (k - 16).clamp(min=0)],
    "morton": morton,
    "heads": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, VALID[b, k]),
    "hash": random_mask(12345),
    "method": Holder().mask,
    "partial": functools.partial(lambda size, b, h, q, k: q - k < size, 7),
    "logical": lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(VALID[b, k])),
    "constant": lambda b, h, q, k: True,
    "shifts": lambda b, h, q, k: (q >> 2) << 2 == torch.bitwise_left_shift(k >> 2, 2),
    "numpy": lambda b, h, q, k: NUMPY_SLOPES[h] * q > 0.1 * k,
    "divisors of either sign": lambda b, h, q, k: (
        ((q - k) // -3 + (q - k) % -3 + (k - q) // SIGNED[h] + (k - q) % SIGNED[h]) % 2 == 0
    ),
    "towards zero": lambda b, h, q, k: (
        torch.div(q - k, 3, rounding_mode="trunc") + torch.fmod(q - k, -4) + torch.fmod(k - q, SIGNED[h]) > 0
    ),
    "slices": lambda b, h, q, k: VALID[:, k][b] & ~VALID[b, ...][q] & VALID[b][:][k],
    "intervals": lambda b, h, q, k: (
        torch.searchsorted(EDGES, q, right=True) == torch.bucketize(k, EDGES, right=True)
    ),
    "near": lambda b, h, q, k: (
        torch.isclose(q.float(), k.float(), atol=4.0) & torch.isfinite(BIAS[b, h, q, k])
    ),
    "coordinates": near_places,
    "rows": lambda b, h, q, k: (PLACES[q] >= PLACES[k]).all() | (PLACES[q] == PLACES[k]).any(-1),
    "some of a row": lambda b, h, q, k: (POINTS[q] < POINTS[k]).sum() >= 2,
    "one of these": lambda b, h, q, k: (
        torch.isin(k, torch.tensor([0, 1, 5])) | torch.stack([q == k, k == 0]).any()
    ),
    "beyond 32 bits": lambda b, h, q, k: (q < 2**40) & (k > -(2**35)) & (q >= k),
    "level as float": lambda b, h, q, k: LEVEL[k].float() / 2 <= LEVEL[q].to(torch.float32),
}


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def softcap(cap):
    def mod(score, b, h, q, k):
        return cap * torch.tanh(score / cap)

    return mod


def relative(score, b, h, q, k):
    return score + TABLE[h, q - k + LENGTH - 1]


def t5(score, b, h, q, k):
    relative_position = k - q
    buckets = (relative_position > 0).to(torch.long) * 16
    distance = torch.abs(relative_position)
    large = 8 + (torch.log(distance.float().clamp(min=1) / 8) / math.log(128 / 8) * 8).to(torch.long)
    large = torch.min(large, torch.full_like(large, 15))
    return score + BUCKETS[buckets + torch.where(distance < 8, distance, large), h]


def mlp(score, b, h, q, k):
    distance = (q - k).abs() + 1.0
    return score - torch.relu(0.3 * torch.log(distance) - 0.1) - torch.nn.functional.softplus(-0.2 * distance)


def changed_in_place(s, b, h, q, k):
    kept, distance = s.clone(), q - k
    same, seen = q - k, q >= k
    torch.nn.functional.relu(s.mul_(2).sub_(0.5), inplace=True)
    seen.logical_and_(distance.abs_() < 20)
    return s.masked_fill_(~seen, -3.0) + kept.clamp_(-1, 1) + same + torch.relu_(distance - 5)


def with_lists(gains, table):
    return lambda s, b, h, q, k: s * torch.tensor(gains)[h] + torch.tensor(table)[b, h % 2]


def with_arrays(heads, step, factor):
    def score(s, b, h, q, k):
        return s + FORGET.view(-1, heads, LENGTH)[b, h, q] + (FORGET * factor).roll(step)[b, h, k]

    return score


SCORES = {
    "ALiBi": alibi,
    "bias": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "scaled bias": lambda s, b, h, q, k: torch.add(s, BIAS[b, h, q, k], alpha=2),
    "bias by head": lambda s, b, h, q, k: s + BIAS[0][h, q, k],
    "relative": relative,
    "T5": t5,
    "soft cap": softcap(20.0),
    "soft cap of an integer": softcap(20),
    "forgetting": lambda s, b, h, q, k: s + FORGET[b, h, q] - FORGET[b, h, k],
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "causal by a tensor": lambda s, b, h, q, k: torch.where(q >= k, s, torch.tensor(float("-inf"))),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -1e9),
    "decay": lambda s, b, h, q, k: s * torch.pow(torch.tensor(0.9), (q - k).abs()),
    "decay by a number": lambda s, b, h, q, k: s * torch.exp(-0.1 * (q - k).abs()),
    "SSMax": lambda s, b, h, q, k: s * 0.43 * torch.log(q + 1.0),
    "gain": lambda s, b, h, q, k: s * SLOPES[h],
    "local boost": lambda s, b, h, q, k: torch.where(abs(q - k) <= 3, s * 2, s),
    "powers": lambda s, b, h, q, k: s**2 - 0.1 * (q - k) ** 2 + s.square().sqrt(),
    "sigmoid": lambda s, b, h, q, k: torch.log(torch.sigmoid(s) + 1e-3),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -1.0, 1.5) + s.clamp_min(0),
    "in place": changed_in_place,
    "where as a method": lambda s, b, h, q, k: s.where(q >= k, s * 0.5) + FORGET[0, 0, 0].where(h > 1, 0.25),
    "waves": lambda s, b, h, q, k: s + torch.sin(q * 0.1) * torch.cos(k / 10),
    "MLP of a distance": mlp,
    "sums of booleans": lambda s, b, h, q, k: s + ((q > k) + (q > 2)) * 2 + (q > k) * (k > 3),
    "booleans": lambda s, b, h, q, k: s * (q >= k) + VALID[b, k] * 0.5,
    "modulo of numbers": lambda s, b, h, q, k: s % 1.5 + (k / 7) // 2,
    "zero-dim tensor": lambda s, b, h, q, k: s * SLOPES[1] + SLOPES.sum(),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, torch.maximum(s * 0 + 0.5, k - q + 0.0)),
    "activations": lambda s, b, h, q, k: (
        torch.nn.functional.silu(s)
        + torch.nn.functional.leaky_relu(s, 0.3)
        + torch.nn.functional.gelu(s, approximate="tanh")
        + torch.nn.functional.hardtanh(s, -0.5, 0.7)
    ),
    "hyperbolic": lambda s, b, h, q, k: torch.sinh(s * 0.3) + torch.cosh(s) + torch.logaddexp(s, s * 0.5),
    "more activations": lambda s, b, h, q, k: (
        torch.nn.functional.elu(s, 0.7)
        + torch.nn.functional.relu6(s * 4)
        + torch.nn.functional.hardswish(s)
        + torch.nn.functional.hardsigmoid(s)
        + torch.nn.functional.logsigmoid(s)
        + torch.asinh(s)
    ),
    "of two numbers": lambda s, b, h, q, k: (
        torch.hypot(s, BIAS[b, h, q, k])
        + torch.copysign(s, BIAS[b, h, q, k])
        + torch.xlogy(s.abs(), s.abs() + 1)
        + torch.addcmul(s, SLOPES[h], SLOPES[b], value=2)
        + torch.nan_to_num(torch.frac(s))
    ),
    "dot of rows": lambda s, b, h, q, k: s + torch.dot(POINTS[q], KEY_POINTS[b, h // HEADS, k]) * 0.3,
    "product of rows": lambda s, b, h, q, k: s + POINTS[q] @ POINTS[k],
    "distance": lambda s, b, h, q, k: s - ((POINTS[q] - POINTS[k]) ** 2 * AXES).sum(-1),
    "norms": lambda s, b, h, q, k: (
        s
        - torch.norm(POINTS[q] - POINTS[k])
        - torch.linalg.norm(POINTS[q])
        + (-POINTS[q]).max()
        + (2 - POINTS[k]).prod()
        + abs(POINTS[k]).mean()
        + torch.stack([s, s * 0.5]).sum(0)
    ),
    "loop over a row": lambda s, b, h, q, k: s - sum((x - y).abs() for x, y in zip(POINTS[q], POINTS[k])),
    "embedding": lambda s, b, h, q, k: s + LEVELS((q - k).abs() % 32)[h] + torch.take(FORGET[0, 0], k),
    "yet more activations": lambda s, b, h, q, k: (
        torch.nn.functional.softsign(s)
        + torch.nn.functional.mish(s)
        + torch.nn.functional.selu(s)
        + torch.nn.functional.tanhshrink(s)
        + torch.special.expit(s)
        + torch.tan(s * 0.1)
        + torch.atanh(torch.tanh(s) * 0.5)
        + torch.acosh(s.abs() + 1.5)
        + torch.deg2rad(s)
        + torch.rad2deg(s) * 0.01
        + torch.addcdiv(s, q, k + 1.0, value=0.3)
    ),
    "activations by erf": lambda s, b, h, q, k: (
        torch.nn.functional.gelu(s)
        + torch.erf(s * 0.7)
        + torch.special.erfc(s)
        + torch.nn.functional.celu(s, 0.7)
        + torch.nn.functional.softplus(s, 2.0, 1.0)
    ),
    "angles": lambda s, b, h, q, k: (
        torch.atan(s * 2)
        + torch.asin(torch.tanh(s) * 0.9)
        + torch.acos(torch.sigmoid(s))
        + torch.atan2(q - 7.0, k - 9.0)
    ),
    "unsqueezed": lambda s, b, h, q, k: s + (POINTS[q] == k.unsqueeze(-1)).any(dim=-1) * 0.5,
    "the rest of the activations": lambda s, b, h, q, k: (
        torch.nn.functional.threshold(s, 0.1, -3.0)
        + torch.nn.functional.softshrink(s, 0.1)
        + torch.nn.functional.hardshrink(s, 0.3)
        + torch.logit(torch.sigmoid(s), 0.1)
        + torch.special.log1p(s * s)
        + torch.sinc(s * (q > 9))
        + torch.heaviside((q - k) + 0.0, SLOPES[h])
        + torch.fmax(s, s * 0.2)
        + torch.fmin(s / (q % 3), s)
    ),
    "powers of numbers": lambda s, b, h, q, k: s + 1e-3 * (q - k) ** SIGNED[h % 3].abs() + s ** (h // 2),
    "powers of a learned number": lambda s, b, h, q, k: s - (q - k).abs() ** SLOPES[h],
    "short arrays": lambda s, b, h, q, k: (
        s * AXES.sum() + torch.dot(AXES, torch.cos((q - k) * AXES)) + (torch.relu(s * AXES + AXES) * AXES).sum()
    ),
    "lists of numbers": with_lists([1.5, 2.5, 3.5, 4.5], [[1, 2], [3, 4]]),
    "arrays with numbers": with_arrays(HEADS, 3, 0.5),
    "index operators": lambda s, b, h, q, k: (
        s + torch.ops.aten.index(TABLE, [h, q]) + SLOPES.index_select(0, h.reshape(1)).squeeze()
    ),
    "round": lambda s, b, h, q, k: torch.round(s * 2) + torch.round((q - k) / 2) + torch.fmod(s, 1.5),
    "numpy functions": lambda s, b, h, q, k: s + np.where(q > k, np.abs(q - k), 0) * np.float32(0.25),
    "numpy's shape": lambda s, b, h, q, k: s + len(np.shape(s)) + np.ndim(q),
    "other types": lambda s, b, h, q, k: s + (q - k).to(s.dtype) + torch.zeros_like(s) + q.new_ones(()),
}


def points(count=60):
    generator = random.Random(3)
    for _ in range(count):
        b, h = generator.randrange(BATCH), generator.randrange(HEADS)
        q, k = generator.randrange(LENGTH), generator.randrange(LENGTH)
        yield generator.uniform(-4, 4), b, h, h // 2, q, k, LENGTH, LENGTH, 0


def eager(function, point, mask):
    s, b, h, _, q, k, *_ = point
    indices = [torch.tensor(index) for index in (b, h, q, k)]
    result = function(*indices) if mask else function(torch.tensor(s, dtype=torch.float64), *indices)
    return result.item() if hasattr(result, "item") else result


# Functions that call numpy's functions are run eagerly with numbers.
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_the_functions(name):
    program = Program.of_mask(MASKS[name])
    assert program.mask and not program.score
    given = list(points())
    for point, (visible, _, _) in zip(given, program.evaluate(given)):
        assert visible == bool(eager(MASKS[name], point, True)), (point, program.text)


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_functions(name):
    program = Program.of_score(SCORES[name])
    given = list(points())
    for point, (visible, score, _) in zip(given, program.evaluate(given)):
        expected = eager(SCORES[name], point, False)
        got = score if visible else -math.inf
        if name == "T5" and abs(point[4] - point[5]) in (16, 32):
            # Where f32's logarithm is a whole number or just below.
            continue
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-5), (point, program.text)


def test_masking_functions_of_transformers():
    masking = pytest.importorskip("transformers.masking_utils")
    padding = torch.tensor([3, 0])
    packed = DOCUMENTS
    spans = torch.where(DOCUMENTS % 2 == 0, DOCUMENTS, -1)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) % 20])
    functions = [
        masking.causal_mask_function,
        masking.bidirectional_mask_function,
        masking.sliding_window_causal_mask_function(9),
        masking.sliding_window_bidirectional_mask_function(6),
        masking.chunked_causal_mask_function(8, padding),
        masking.and_masks(masking.padding_mask_function(VALID), masking.causal_mask_function),
        masking.packed_sequence_mask_function(packed),
        masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(spans)),
        masking.add_offsets_to_mask_function(masking.sliding_window_causal_mask_function(9), 11, 2),
    ]
    if hasattr(masking, "remap_positions_for_packed_sequence"):  # not in every version
        functions.append(
            masking.remap_positions_for_packed_sequence(masking.causal_mask_function, positions)
        )
    given = list(points())
    for function in functions:
        program = Program.of_mask(function)
        for point, (visible, _, _) in zip(given, program.evaluate(given)):
            assert visible == bool(eager(function, point, True)), (point, program.text)


def test_numbers_are_scalars_and_other_numbers_are_the_same_program():
    a, b = Program.of_mask(window(5)), Program.of_mask(window(6))
    assert a == b and (a.scalars, b.scalars) == ({"mn0": 5}, {"mn0": 6})
    a, b = Program.of_score(softcap(20.0)), Program.of_score(softcap(50.0))
    assert a == b and a.scalars == {"n0": 20.0}

    # Python has to know these: how often a loop runs, and which way a branch goes.
    def unrolled(count):
        def mod(score, b, h, q, k):
            for i in range(count):
                score = score + SLOPES[i]
            return score if count > 1 else -score

        return mod

    assert Program.of_score(unrolled(2)) != Program.of_score(unrolled(3))
    assert Program.of_score(unrolled(2)).scalars == {}

    def table(count):
        return lambda b, h, q, k: torch.arange(count, device=q.device)[q % count] == 1

    assert Program.of_mask(table(4)).scalars == {}
    # A divisor stays a scalar, and has to be positive.
    chunked = Program.of_mask(lambda b, h, q, k, size=8: q // size == k // size)
    assert chunked.scalars == {"mn0": 8}
    with pytest.raises(fa_attn.InputError, match="the scalar mn0 divides, and has to be positive, not 0"):
        Program(chunked.text, scalars={"mn0": 0})


def test_arrays_are_the_callers_and_ask_for_gradients():
    bias = draw(HEADS, LENGTH, dtype=torch.bfloat16).requires_grad_()
    program = Program.of_score(lambda s, b, h, q, k: s + bias[h, k] - bias[h, q])
    assert program.arrays == {"a0": bias} and program.arrays["a0"] is bias
    assert program.gradients == ["a0"] and program.is_lasting
    [array] = program.description["arrays"]
    assert (array["element"], array["rank"], array["forms"]) == ("bf16", 2, ["column", "row"])
    assert program.description["class"] == "additive"
    # A parameter of one element.
    cap = torch.tensor(3.0, requires_grad=True)
    program = Program.of_score(lambda s, b, h, q, k: cap * torch.tanh(s / cap))
    assert program.gradients == ["a0"] and program.description["arrays"][0]["forms"] == ["tile"]
    # What the function computes anew for each call.
    assert not Program.of_score(lambda s, b, h, q, k: s + (SLOPES * 2)[h]).is_lasting


def test_values_that_python_reads_are_read_anew():
    number, numbers = torch.tensor(3), torch.tensor([3, 8])
    masks = (
        lambda b, h, q, k: q - k <= number.item(),
        lambda b, h, q, k: q - k <= int(number),
        lambda b, h, q, k: (q >= k) if number > 5 else (q > k),
        lambda b, h, q, k: q - k <= numbers.tolist()[0],
        lambda b, h, q, k: q - k <= (numbers + 1).numpy()[0],
        lambda b, h, q, k: q - k <= numbers.sort().values[0],
        lambda b, h, q, k: q - k <= (numbers * 2).unbind()[0],
    )
    for at, mask in enumerate(masks):
        number.fill_(3), numbers[0].fill_(3)
        before = Program.of_mask(mask)
        assert Program.of_mask(mask) is not before
        number.fill_(9), numbers[0].fill_(5)
        after = Program.of_mask(mask)
        given = list(points())
        for point, (visible, _, _) in zip(given, after.evaluate(given)):
            assert visible == bool(eager(mask, point, True)), (at, after.text)
    # What is read where it lies, and what a form says, lasts.
    size = lambda: len(numbers) * numbers.numel() * 8  # noqa: E731
    assert Program.of_mask(lambda b, h, q, k: (q - k <= numbers[0]) & (k < size())).is_lasting


def test_elements_of_one_array_are_one_array():
    places = torch.tensor([[0, 5, 11], [17, 29, 48]])

    def own_part(b, h, q, k):
        edges = [places[at // 3, at % 3] for at in range(6)]
        return sum((q >= a) & (q < z) & (k >= a) & (k < z) for a, z in zip(edges, edges[1:])) > 0

    program = Program.of_mask(own_part)
    [array] = program.arrays.values()
    assert array is places and program.is_lasting
    given = list(points())
    for point, (visible, _, _) in zip(given, program.evaluate(given)):
        assert visible == bool(eager(own_part, point, True))
    # An axis of one may have any stride.
    odd = torch.arange(6).as_strided((1, 4), (1, 1), 1)[0, 2]
    [(visible, _, _)] = Program.of_mask(lambda b, h, q, k: odd == 3).evaluate(list(points(1)))
    assert visible


REFUSED = [
    (lambda b, h, q, k: q if q > k else k, "cannot branch on its arguments"),
    (lambda b, h, q, k: q > k and h > 1, "cannot branch"),
    (lambda b, h, q, k: torch.lgamma(q) > k, "`lgamma` has no equivalent in a mask or score function"),
    (lambda b, h, q, k: VALID[b], "returns neither a number nor a truth value"),
    (lambda b, h, q, k: VALID[b, q:], "not by slices"),
    (lambda b, h, q, k: VALID[b, q, k], "3 indices of an array of 2 axes"),
    (lambda b, h, q, k: (q + 0.5) & 1, "takes integers or truth values"),
    (lambda b, h, q, k: q // 0 == k, "integers are divided by others than 0"),
    (lambda b, h, q, k: BIAS.to(torch.complex64)[b, h, q, k] == 1, "cannot be read: convert it"),
    (lambda b, h, q: q > 1, r"mask_mod takes \(b, h, q_idx, kv_idx\)"),
    (lambda b, h, q, k: q * 0.5, "returns f32, and a mask is a truth value"),
    (lambda b, h, q, k: BIAS.sum(0)[h] > q, "an array of 3 axes is used with 1 of its indices"),
    (lambda b, h, q, k: torch.softmax(q, 0) > k, "`softmax` has no equivalent"),
    ("q <", "expected an expression, found the end"),
    ("s + 1", "mask_mod is no mask alone"),
    (lambda b, h, q, k: (q * 2654435761 + k) % 7 < 4, "`mul` with 2654435761: integers .* have 32 bits"),
    (lambda b, h, q, k: k + 2**31 > q, "`add` with 2147483648: integers .* have 32 bits"),
    (lambda b, h, q, k: draw(4, 65)[h].sum() > 0, "a row of 65 numbers .* 1 to 64 are computed"),
    (lambda b, h, q, k: (POINTS[q] + PLACES[k]).sum() > 0, "`add` of rows of 2 and 3 numbers"),
    (lambda b, h, q, k: torch.nn.functional.embedding(q, BUCKETS, 0)[h] > 0, "without padding_idx"),
    (lambda b, h, q, k: torch.stack([q, k]).sum(dtype=torch.int8) > 0, "`sum` cannot take"),
    (lambda b, h, q, k: (q - k).div_(2) > 0, "`div` in place gives f32 to i32"),
    (lambda b, h, q, k: EDGES.add_(q)[0] > k, "`add` changes an array in place"),
    (lambda b, h, q, k: (q * 0.5).view(torch.int32) > k, "bits as those of another type"),
    (lambda b, h, q, k: q * LEVEL.repeat(2) > k, "an array of 1 axes is used whole"),
    (lambda b, h, q, k: torch.from_numpy(NUMPY_SLOPES)[h] > k, "makes a tensor of an array of numpy"),
    (7, "mask_mod is a function, a text or a Program, not 7"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals_say_what_has_no_equivalent(number):
    function, message = REFUSED[number]
    with pytest.raises(ValueError, match=message):
        Program.of_mask(function)


NEGATIVE = {
    "distance": lambda i, j: i - j,
    "distance within limits": lambda i, j: (i - j).clamp(-6, 6),
    "from the end": lambda i, j: -1 - j,
    "of the row": lambda i, j: i // 2 - 5,
    "either": lambda i, j: torch.where(i > 3, j - i, i - 2),
    "never": lambda i, j: (i - j).abs() % 7,
}


@pytest.mark.parametrize("lengths", [(8, 12), (12, 8)])
@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_indices_count_from_the_end(name, lengths):
    table, seen = draw(40).requires_grad_(), draw(40) > -0.5
    rows, keys = lengths
    q, k, v = (draw(1, 2, n, 16).requires_grad_() for n in (rows, keys, keys))
    index = NEGATIVE[name]
    mask = fa_attn.create_block_mask(lambda b, h, i, j: seen[index(i, j)], None, None, rows, keys)

    def score(s, b, h, i, j):
        return s + table[index(i, j)]

    out = fa_attn.flex_attention(q, k, v, score, mask)
    places = index(torch.arange(rows)[:, None], torch.arange(keys)[None]).expand(rows, keys)
    bias = table[places].masked_fill(~seen[places], -math.inf)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    inputs, dout = (q, k, v, table), draw(*out.shape)
    made = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(want, inputs, dout)
    for x, y in zip(*made):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-3)
    # The function is kept, and other lengths are other bounds.
    more = [torch.cat([x, x], 2) for x in (q, k, v)]
    longer = fa_attn.flex_attention(*more, score, mask._adjust(2 * rows, 2 * keys))
    places = index(torch.arange(2 * rows)[:, None], torch.arange(2 * keys)[None]).expand(2 * rows, 2 * keys)
    bias = table[places].masked_fill(~seen[places], -math.inf)
    want = torch.nn.functional.scaled_dot_product_attention(*more, attn_mask=bias)
    torch.testing.assert_close(longer, want, atol=2e-5, rtol=1e-4)


def test_a_learned_power_of_a_distance_of_0_has_a_gradient():
    power = torch.rand(2, generator=_generator).requires_grad_()
    q, k, v = (draw(1, 2, 8, 16) for _ in range(3))
    out = fa_attn.flex_attention(q, k, v, lambda s, b, h, i, j: s - (i - j).abs() ** power[h])
    distance = (torch.arange(8)[:, None] - torch.arange(8)).abs()
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=-(distance ** power[:, None, None])[None]
    )
    made, true = (torch.autograd.grad(x.square().sum(), power)[0] for x in (out, want))
    torch.testing.assert_close(made, true, atol=1e-4, rtol=1e-3)


class Settings:
    width = 3

    @staticmethod
    def near(q, k):
        return q - k < Settings.width


def test_attributes_of_classes_and_modules_are_those_of_the_call():
    module = types.ModuleType("settings")
    module.width = 3
    masks = [
        lambda b, h, q, k: q - k < Settings.width,
        lambda b, h, q, k: Settings.near(q, k),
        lambda b, h, q, k: q - k < module.width,
    ]
    point = [(0.0, 0, 0, 0, 5, 0, 9, 9, 0)]
    for width, seen in ((3, False), (9, True), (3, False)):
        Settings.width = module.width = width
        for mask in masks:
            assert Program.of_mask(mask).evaluate(point)[0][0] == seen


@pytest.mark.parametrize("numbers", [[0, 2**32], [-(2**31) - 1, 0]])
def test_integers_that_are_read_have_32_bits(numbers):
    # Of ids, those 2^32 apart would be one.
    ids = torch.tensor(numbers).repeat_interleave(4)
    q = draw(1, 8, 2, 16)
    for x, own in ((q, ids), (q.numpy(), ids.numpy())):
        with pytest.raises(fa_attn.InputError, match="holds .*, and integers there have 32 bits"):
            fa_attn.flash_attn_func(x, x, x, mask_mod=lambda b, h, i, j: own[i] == own[j])
    edge = torch.tensor([-(2**31), 2**31 - 1]).repeat_interleave(4)
    out = fa_attn.flash_attn_func(q, q, q, mask_mod=lambda b, h, i, j: edge[i] == edge[j])
    halves = [fa_attn.flash_attn_func(x, x, x) for x in q.split(4, 1)]
    torch.testing.assert_close(out, torch.cat(halves, 1))


def test_rows_have_gradients():
    points, axes = draw(8, 3).requires_grad_(), draw(3).requires_grad_()
    q, k, v = (draw(1, 2, 8, 16).requires_grad_() for _ in range(3))
    out = fa_attn.flex_attention(
        q, k, v, lambda s, b, h, i, j: s - ((points[i] - points[j]) ** 2 * axes).sum()
    )
    bias = -((points[:, None] - points[None]) ** 2 * axes).sum(-1)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)
    inputs, dout = (q, k, v, points, axes), draw(1, 2, 8, 16)
    made = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(want, inputs, dout)
    for x, y in zip(*made):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-3)


def test_texts_and_functions_are_one():
    assert Program.of_mask("k <= q") == Program.of_mask(causal)
    assert Program.of_mask(Program.of_mask(causal)) == Program("mask = k <= q")
    with pytest.raises(fa_attn.InputError, match="the program's arrays are t: the call lacks t"):
        Program("array t: f32[_]; s + t[h]")
    program = Program("array t: f32[_]; scalar c: f32; c * s + t[h]", {"t": NUMPY_SLOPES}, {"c": 2.0})
    assert program.evaluate([(1.0, 0, 1, 0, 0, 0, 4, 4, 0)]) == [(True, 2.25, 2.0)]


@pytest.mark.parametrize("count", [9, 16])
def test_programs_of_many_arrays_have_all_gradients(count):
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randn(20, generator=generator, requires_grad=True) for _ in range(count)]
    q, k, v = (torch.randn(1, 2, 20, 16, generator=generator, requires_grad=True) for _ in range(3))
    indices = torch.arange(20)

    def score_mod(score, b, h, q_idx, kv_idx):
        for at, row in enumerate(rows):
            score = score + row[kv_idx] * (1.0 if at % 2 else 0.5) * row[q_idx]
        return score

    scores = score_mod(q @ k.mT / 4, 0, 0, indices[:, None], indices[None])
    want = torch.softmax(scores, -1) @ v
    got = fa_attn.flex_attention(q, k, v, score_mod=score_mod)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    leaves = (q, k, v, *rows)
    found = torch.autograd.grad(got.square().sum(), leaves)
    for one, true in zip(found, torch.autograd.grad(want.square().sum(), leaves)):
        torch.testing.assert_close(one, true, rtol=1e-3, atol=1e-4)


def test_more_arrays_than_a_program_has_are_refused():
    rows = [torch.randn(8) for _ in range(17)]
    x = torch.randn(1, 1, 8, 16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + sum(row[kv_idx] for row in rows)

    with pytest.raises(fa_attn.InputError, match="at most 16 arrays"):
        fa_attn.flex_attention(x, x, x, score_mod=score_mod)
