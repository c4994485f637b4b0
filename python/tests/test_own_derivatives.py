"""Functions of scores with operators and derivatives of their own: computed where these are the derivatives of
what they compute, else refused."""

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
from fa_attn._programs import Program  # noqa: E402


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch.round(x)

    @staticmethod
    def backward(context, gradient):
        return gradient


@torch.library.custom_op("fa_tests::tanh", mutates_args=())
def approximate(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


# Other than torch's function of that name.
@torch.library.custom_op("fa_tests::exp", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.ops.fa_tests.tanh(x)

    @staticmethod
    def setup_context(context, inputs, output):
        context.save_for_backward(output)

    @staticmethod
    def backward(context, gradient):
        (out,) = context.saved_tensors
        return gradient * (1 - out * out)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        return 2 * context.saved_tensors[0] * gradient


class Hidden(torch.autograd.Function):
    """Of a score and of whether it is seen, as torch's own tests have one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score, seen):
        return torch.where(seen, score, -float("inf"))

    @staticmethod
    def setup_context(context, inputs, output):
        context.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x * factor

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


class Product(torch.autograd.Function):
    """Whose second argument has a derivative, too."""

    @staticmethod
    def forward(context, x, y):
        context.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(context, gradient):
        x, y = context.saved_tensors
        return gradient * y, gradient * x


def test_functions_whose_backward_is_the_derivative_are_computed():
    capped = Program.of_score(lambda s, b, h, q, k: 20 * Tanh.apply(s / 20))
    assert capped.text == Program.of_score(lambda s, b, h, q, k: 20 * torch.tanh(s / 20)).text
    square, plain = (Program.of_score(x) for x in (lambda s, *_: Square.apply(s), lambda s, *_: s * s))
    assert square.text == plain.text
    # Operators by what they compute, not by their names.
    twice = Program.of_score(lambda s, b, h, q, k: torch.ops.fa_tests.exp(s) + doubled(s))
    assert twice.evaluate([(1.5, *(0,) * 8)])[0][1:] == (6.0, 4.0)
    # Those that are no functions of Python, if they compute torch's of the same name.
    with torch.library._scoped_library("fa_tests", "FRAGMENT") as library:
        library.define("sigmoid(Tensor x) -> Tensor")
        library.define("exp2(Tensor x) -> Tensor")
        library.impl("sigmoid", lambda x: torch.sigmoid(x) * 1.0005, "CompositeExplicitAutograd")
        library.impl("exp2", lambda x: torch.exp2(x) * 1.05, "CompositeExplicitAutograd")
        rough = Program.of_score(lambda s, b, h, q, k: torch.ops.fa_tests.sigmoid(s))
        assert rough.text == Program.of_score(lambda s, b, h, q, k: torch.sigmoid(s)).text
        with pytest.raises(fa_attn.UnsupportedError, match="fa_tests::exp2, which is no function of Python"):
            Program.of_score(lambda s, b, h, q, k: torch.ops.fa_tests.exp2(s))
    aten = Program.of_score(lambda s, b, h, q, k: torch.ops.aten.tanh.default(s))
    assert aten.text == Program.of_score(lambda s, b, h, q, k: torch.tanh(s)).text


def test_functions_of_a_score_and_of_what_has_no_derivative_are_computed():
    hidden = Program.of_score(lambda s, b, h, q, k: Hidden.apply(s, q <= k))
    assert hidden.text == Program.of_score(lambda s, b, h, q, k: torch.where(q <= k, s, -float("inf"))).text
    scaled = Program.of_score(lambda s, b, h, q, k: Scaled.apply(s, 3.0))
    assert scaled.evaluate([(1.5, *(0,) * 8)])[0][1:] == (4.5, 3.0)
    with pytest.raises(fa_attn.UnsupportedError, match="Product is none of one number"):
        Program.of_score(lambda s, b, h, q, k: Product.apply(s, s))


# Refused where a function of scores reads it, which an attribute of its name is not.
sin = StraightThrough


def test_attributes_are_not_read_as_globals_of_their_names():
    assert Program.of_score(lambda s, b, h, q, k: s.sin() + torch.sin(s)).score
    with pytest.raises(fa_attn.UnsupportedError, match="the backward of StraightThrough is another"):
        Program.of_score(lambda s, b, h, q, k: sin.apply(s))


def test_derivatives_of_ones_own_are_refused():
    straight = StraightThrough.apply
    wrong = [
        (lambda s, b, h, q, k: StraightThrough.apply(s), "calls a torch.autograd.Function"),
        (lambda s, b, h, q, k: straight(s), "calls a torch.autograd.Function"),
        (lambda s, b, h, q, k: s + (torch.round(s) - s).detach(), "`detach` of a number in a score"),
    ]
    for mod, message in wrong:
        with pytest.raises(fa_attn.UnsupportedError, match=message):
            Program.of_score(mod)
    # Distances and masks have none.
    Program.of_score(lambda s, b, h, q, k: s + (q - k).detach())
    Program.of_mask(lambda b, h, q, k: StraightThrough.apply(q * 0.3).detach() > k)
