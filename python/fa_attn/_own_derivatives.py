"""torch.autograd.Function in functions of scores: kernels compute the derivative of what its forward
computes, so that its backward has to be that."""

import inspect
import itertools
import math
import sys
import types

from ._core import UnsupportedError

_REFUSED = (
    "a score function calls a torch.autograd.Function, of which kernels compute the derivative of the forward"
)
# Scores at which a backward is compared with the derivative, for a key before the query and one behind.
_TRIED = [sign * at for at in (1e-3, *(0.3 * n for n in range(1, 30)), 30.0, 1e2, 1e3) for sign in (-1, 1)]
_POINTS = [(at, 0, 0, 0, 1, key, 0, 0, 0) for at in _TRIED for key in (0, 2)]
# What stands for an argument beside the score: a condition, a number or an integer.
_BESIDE = (lambda q, k: q >= k, lambda q, k: 0.75, lambda q, k: k)


def is_autograd_function(value):
    """Whether it is a torch.autograd.Function, or `apply` of one."""
    function = getattr(getattr(sys.modules.get("torch"), "autograd", None), "Function", None)
    kinds = (value, getattr(value, "__self__", None))
    return function is not None and any(isinstance(x, type) and issubclass(x, function) for x in kinds)


def of_function(value, traced):
    """What is called in place of a torch.autograd.Function, or of its `apply`: its forward, where its
    backward is the derivative at all scores that are tried. `traced` makes a program of a function of
    scores."""
    own = _Forward(getattr(value, "__self__", value))
    name = own.function.__name__
    try:
        forward, backward = _programs(own, traced)
        reads = any(one.arrays or one.scalars for one in (forward, backward))
        found = [] if reads else zip(forward.evaluate(_POINTS), backward.evaluate(_POINTS))
        near = [
            math.isclose(slope, value, rel_tol=1e-5, abs_tol=1e-6) or not math.isfinite(slope + score)
            for (_, score, slope), (_, value, _) in found
        ]
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UnsupportedError(f"{_REFUSED}: {name} is none of one number") from error
    if reads or not all(near):
        raise UnsupportedError(f"{_REFUSED}: the backward of {name} is another, or unknown")
    return own


def _programs(own, traced):
    """Forward and backward as programs, with arguments beside the score of the first kinds that fit."""
    refused = None
    for kinds in itertools.product(_BESIDE, repeat=own.count_beside()):
        try:
            return [traced(_Score(own, kinds, slope)) for slope in (None, 1.0)]
        except UnsupportedError as error:
            refused = refused or error
    raise refused


class _Score:
    """A function of scores, whose numbers are constants as those of all objects are."""

    def __init__(self, own, kinds, slope):
        self.own, self.kinds, self.slope = own, kinds, slope

    def __call__(self, s, b, h, q_idx, kv_idx):
        return self.own(s, *(kind(q_idx, kv_idx) for kind in self.kinds), slope=self.slope)


class _Forward:
    def __init__(self, function):
        self.function, self.apply = function, self
        self.has_context = function.setup_context is sys.modules["torch"].autograd.Function.setup_context

    def __call__(self, *given, slope=None):
        """What forward gives, or where `slope` is its derivative what backward does."""
        function, is_needed = self.function, (True,) + (False,) * (len(given) - 1)
        context = types.SimpleNamespace(needs_input_grad=is_needed, saved_tensors=())
        context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
        context.mark_non_differentiable = context.set_materialize_grads = lambda *_: None
        if self.has_context:
            out = function.forward(context, *given)
        else:
            out = function.forward(*given)
            function.setup_context(context, given, out)
        if slope is None:
            return out
        made = function.backward(context, slope)
        score, *others = made if isinstance(made, tuple) else (made,)
        if any(one is not None for one in others):
            raise TypeError("an argument beside the score has a derivative")
        return score

    def count_beside(self):
        """How many arguments forward takes beside the score."""
        taken = inspect.signature(self.function.forward).parameters
        return len(taken) - (2 if self.has_context else 1)
