"""Integers of fewer than 32 bits of recorded functions: torch computes them in their own type where Python's
numbers are all that is beside them, and wraps both."""

from ._traced import NeedsConstant, Traced

# The least and the largest of each type.
LIMITS = {"uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1)}

# Operations whose results can leave the type of their operands.
_LEAVING = set(
    "add sub subtract rsub mul multiply neg negative abs absolute square pow power invert bitwise_not lshift "
    "bitwise_left_shift left_shift floordiv floor_divide addcmul".split()
)
# Others that take and give integers of the type.
_KEEPING = _LEAVING | set(
    "lt less le less_equal gt greater ge greater_equal eq equal ne not_equal mod remainder fmod and or xor "
    "bitwise_and bitwise_or bitwise_xor rshift bitwise_right_shift right_shift where masked_fill minimum "
    "maximum min max fmin fmax clamp clip clamp_min clamp_max sign sgn relu".split()
)


def wrapped(recorder, x, dtype):
    """An integer in a type of fewer bits, or in 32 bits where `dtype` is none of those."""
    if dtype not in LIMITS:
        x.narrow = None
        return x
    low, high = LIMITS[dtype]
    if x.bounds is None or x.bounds[0] < low or x.bounds[1] > high:
        if x.fixed and type(x.value) is int:
            x = recorder.operand((x.value - low) % (high - low + 1) + low)
        else:
            text = f"{x.name} & {high}" if low == 0 else f"(({x.name} + {-low}) & {high - low}) - {-low}"
            x = recorder.line(text, "i32", x, is_natural=low == 0)
            x.bounds = LIMITS[dtype]
    x.narrow = dtype
    return x


class Narrow:
    """An operation on integers of a type of few bits."""

    def __init__(self, recorder, name, dtype):
        self.recorder, self.name, self.dtype = recorder, name, dtype

    @classmethod
    def of(cls, recorder, name, operands, options):
        """None where the operation is computed in another type."""
        rounds = name in ("div", "divide") and options.get("rounding_mode") is not None
        if name not in _KEEPING and not rounds or any(x.kind == "f32" for x in operands):
            return None
        own = {x.narrow for x in operands if x.kind == "i32" and not x.fixed}
        if not own or None in own:
            return None
        return cls(recorder, name, own.pop() if len(own) == 1 else "int16")

    def numbers(self, given, options):
        """The arguments with Python's numbers in the type."""
        options = {key: self._number(one) if type(one) is int else one for key, one in options.items()}
        return [self._number(one) for one in given], options

    def _number(self, one):
        if type(one) is int:
            return wrapped(self.recorder, self.recorder.operand(one), self.dtype).value
        if not isinstance(one, Traced) or one.kind != "i32" or not one.fixed:
            return one
        low, high = LIMITS[self.dtype]
        if one.scalars and not low <= one.value <= high:
            raise NeedsConstant(one.scalars)
        return one if one.scalars else wrapped(self.recorder, one, self.dtype)

    def result(self, made):
        if not isinstance(made, Traced) or made.kind != "i32":
            return made
        if self.name in _LEAVING:
            return wrapped(self.recorder, made, self.dtype)
        made.narrow = self.dtype
        return made
