"""The operations of recorded functions on scalars, by the names that Python, torch and numpy give them."""

import copy

from ._core import UnsupportedError
from ._traced import NeedsConstant, Traced, float_text
from ._traced_narrow import wrapped

OPERATIONS = {}
SHOWN = set()
# Those that take an integer of more than 32 bits as the number that it is.
WIDE = set(
    "lt le gt ge eq ne less less_equal greater greater_equal equal not_equal where masked_fill min max "
    "minimum maximum clamp clip clamp_min clamp_max full_like new_full new_tensor float double half "
    "bfloat16 div truediv true_divide divide".split()
)


def named(*names):
    def keep(operation):
        for name in names:
            OPERATIONS[name] = operation
        SHOWN.add(names[0])
        return operation

    return keep


def _binary(symbol, *names, kinds=("i32", "f32")):
    @named(*names)
    def operation(recorder, a, b, alpha=1):
        if alpha != 1:
            b = OPERATIONS["mul"](recorder, b, recorder.operand(alpha))
        (a, b), kind = recorder.promoted(a, b)
        if kind == "bool" and symbol == "+":
            # Of truth values a sum is one, too.
            return OPERATIONS["or"](recorder, a, b)
        if kind not in kinds:
            a, b = (recorder.converted(x, "i32") for x in (a, b))
            kind = "i32"
        is_natural = symbol in "+*" and a.is_natural and b.is_natural
        made = recorder.line(f"{a.name} {symbol} {b.name}", kind, a, b, is_natural=is_natural)
        return _bounded(made, _ENDS[symbol], a, b)


_ENDS = {
    "+": lambda a, b: [x + y for x in a for y in b],
    "-": lambda a, b: [x - y for x in a for y in b],
    "*": lambda a, b: [x * y for x in a for y in b],
    "//": lambda a, b: [x // y for x in a for y in b],
    "neg": lambda a: [-x for x in a],
    "abs": lambda a: [abs(x) for x in a] + [0],
    "min": lambda a, b: list(map(min, a, b)),
    "max": lambda a, b: list(map(max, a, b)),
    "select": lambda a, b: [*a, *b],
}


def _bounded(made, ends, *operands):
    """An integer with the bounds that follow from those of its operands, by the values at their ends."""
    if made.kind == "i32" and all(x.bounds is not None for x in operands):
        values = ends(*(x.bounds for x in operands))
        # Beyond 32 bits it wraps. Calls of any lengths are taken for short ones.
        if made.recorder.extents is None or (-(2**31) <= min(values) and max(values) < 2**31):
            made.bounds = (min(values), max(values))
    return made


def _comparison(symbol, *names):
    @named(*names)
    def operation(recorder, a, b):
        (a, b), kind = recorder.promoted(a, b)
        if kind == "bool" and symbol not in ("==", "!="):
            a, b = (recorder.converted(x, "i32") for x in (a, b))
        return recorder.line(f"{a.name} {symbol} {b.name}", "bool", a, b)


def _bits(symbol, *names):
    @named(*names)
    def operation(recorder, a, b):
        (a, b), kind = recorder.promoted(a, b)
        if kind == "f32":
            raise UnsupportedError(f"`{symbol}` takes integers or truth values, not numbers")
        return recorder.line(f"{a.name} {symbol} {b.name}", kind, a, b)


def _logical(symbol, name):
    @named(name)
    def operation(recorder, a, b):
        a, b = (recorder.converted(x, "bool") for x in (a, b))
        return recorder.line(f"{a.name} {symbol} {b.name}", "bool", a, b)


_binary("+", "add")
_binary("-", "sub", "subtract")
_binary("*", "mul", "multiply")
_comparison("<", "lt", "less")
_comparison("<=", "le", "less_equal")
_comparison(">", "gt", "greater")
_comparison(">=", "ge", "greater_equal")
_comparison("==", "eq", "equal")
_comparison("!=", "ne", "not_equal")
_bits("&", "and", "bitwise_and")
_bits("|", "or", "bitwise_or")
_bits("^", "xor", "bitwise_xor")
_bits("<<", "lshift", "bitwise_left_shift", "left_shift")
_bits(">>", "rshift", "bitwise_right_shift", "right_shift")
_logical("and", "logical_and")
_logical("or", "logical_or")
_logical("!=", "logical_xor")


@named("rsub")
def _rsub(recorder, a, b):
    return OPERATIONS["sub"](recorder, b, a)


@named("neg", "negative")
def _neg(recorder, x):
    x = recorder.converted(x, "i32") if x.kind == "bool" else x
    return _bounded(recorder.line(f"-{x.name}", x.kind, x), _ENDS["neg"], x)


@named("pos", "positive", "clone", "contiguous", "squeeze", "unsqueeze", "view", "reshape", "flatten")
def _same(recorder, x, *others):
    if any(type(one).__name__ == "dtype" for one in others):
        raise UnsupportedError(
            "a number's bits as those of another type (`view`) have no equivalent in a mask or score function"
        )
    return x


@named("detach")
def _detach(recorder, x):
    if recorder.is_score and x.kind == "f32":
        raise UnsupportedError(
            "`detach` of a number in a score function, whose derivative is that of all that it computes: "
            "detach the arrays that it reads before"
        )
    return x


@named("abs", "absolute", "fabs")
def _abs(recorder, x):
    made = recorder.line(f"abs({x.name})", x.kind, x, is_natural=x.kind == "i32")
    return _bounded(made, _ENDS["abs"], x)


@named("square")
def _square(recorder, x):
    return OPERATIONS["mul"](recorder, x, x)


@named("invert", "bitwise_not")
def _invert(recorder, x):
    return recorder.line(f"~{x.name}", x.kind, x)


@named("logical_not")
def _logical_not(recorder, x):
    return _invert(recorder, recorder.converted(x, "bool"))


@named("div", "truediv", "true_divide", "divide")
def _div(recorder, a, b, rounding_mode=None):
    if rounding_mode == "floor":
        return _floordiv(recorder, a, b)
    if rounding_mode == "trunc" and "f32" not in (a.kind, b.kind):
        return _truncdiv(recorder, a, b)
    a, b = (recorder.converted(x, "f32") for x in (a, b))
    ratio = recorder.line(f"{a.name} / {b.name}", "f32", a, b)
    return _trunc(recorder, ratio) if rounding_mode == "trunc" else ratio


def _divisor(recorder, x):
    """A divisor that the language takes, at least 1, and the sign of what it stands for: None where that is
    positive."""
    if x.fixed and x.scalars and (x.name not in recorder.scalars or x.value <= 0):
        raise NeedsConstant(x.scalars)
    if x.fixed and x.value == 0:
        raise UnsupportedError("integers are divided by others than 0")
    if x.fixed and x.value > 0:
        return x, None
    if x.fixed:
        return recorder.operand(-x.value), recorder.operand(-1)
    if x.is_natural:
        return recorder.line(f"max({x.name}, 1)", "i32", x), None
    sign = recorder.line(f"select({x.name} < 0, -1, 1)", "i32", x)
    return recorder.line(f"max(abs({x.name}), 1)", "i32", x), sign


def _divided(recorder, a, b):
    """Integers whose quotient is that of a and b, the second at least 1, and the sign that both gave up."""
    a, b = (recorder.converted(x, "i32") for x in (a, b))
    b, sign = _divisor(recorder, b)
    return _signed(recorder, a, sign), b, sign


def _signed(recorder, x, sign):
    return x if sign is None else recorder.line(f"{x.name} * {sign.name}", "i32", x, sign)


@named("floordiv", "floor_divide")
def _floordiv(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        return recorder.line(f"floor({a.name} / {b.name})", "f32", a, b)
    a, b, sign = _divided(recorder, a, b)
    is_natural = sign is None and a.is_natural
    made = recorder.line(f"{a.name} // {b.name}", "i32", a, b, is_natural=is_natural)
    return _bounded(made, _ENDS["//"], a, b) if b.fixed else made


@named("mod", "remainder")
def _mod(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        return recorder.line(f"{a.name} - floor({a.name} / {b.name}) * {b.name}", "f32", a, b)
    a, b, sign = _divided(recorder, a, b)
    rest = recorder.line(f"{a.name} % {b.name}", "i32", a, b, is_natural=True)
    rest.bounds = (0, b.value - 1) if b.fixed and type(b.value) is int else None
    return _signed(recorder, rest, sign)


def _truncdiv(recorder, a, b):
    """The quotient of integers, rounded towards 0."""
    a, b, _ = _divided(recorder, a, b)
    if a.is_natural:
        return recorder.line(f"{a.name} // {b.name}", "i32", a, b, is_natural=True)
    text = f"select({a.name} < 0, -(-{a.name} // {b.name}), {a.name} // {b.name})"
    return recorder.line(text, "i32", a, b)


@named("fmod")
def _fmod(recorder, a, b):
    """What is left of a division that is rounded towards 0."""
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        whole = _div(recorder, a, b, rounding_mode="trunc")
    else:
        a, b = (recorder.converted(x, "i32") for x in (a, b))
        whole, kind = _truncdiv(recorder, a, b), "i32"
    return recorder.line(f"{a.name} - {whole.name} * {b.name}", kind, a, whole, b)


@named("pow", "power", "float_power")
def _pow(recorder, a, b):
    if b.scalars:
        raise NeedsConstant(b.scalars)
    if b.value is None:
        if a.value is not None and a.value < 0:
            raise UnsupportedError(f"a power of {a.value} with an exponent that varies is not computed")
        return _varying_power(recorder, a, b)
    if a.kind != "f32" and b.kind == "i32" and 0 < b.value <= 8:
        return recorder.line(" * ".join([a.name] * b.value), "i32", a)
    a = recorder.converted(a, "f32")
    exponent = float_text(float(b.value))
    return recorder.line(f"pow({a.name}, {exponent})", "f32", a)


def _varying_power(recorder, a, b):
    """A power whose exponent is no constant, as the language has them."""
    is_whole = b.kind != "f32"
    a, b = (recorder.converted(x, "f32") for x in (a, b))
    size = recorder.line(f"exp2({b.name} * log2({SIZE.format(a.name)}))", "f32", a, b)
    if not is_whole:
        whole = recorder.line(f"select(floor({b.name}) == {b.name}, {size.name}, nan)", "f32", b, size)
        size = recorder.line(f"select({a.name} < 0.0, {whole.name}, {size.name})", "f32", a, whole, size)
    is_odd = f"{b.name} - 2.0 * floor({b.name} * 0.5) == 1.0"
    signed = f"select({a.name} < 0.0 and {is_odd}, -{size.name}, {size.name})"
    # Of 0 there is no logarithm.
    of_zero = f"select({b.name} == 0.0, 1.0, select({b.name} < 0.0, inf, 0.0))"
    return recorder.line(f"select({a.name} == 0.0, {of_zero}, {signed})", "f32", a, b, size)


@named("floor")
def _floor(recorder, x):
    return recorder.line(f"floor({x.name})", "f32", x) if x.kind == "f32" else x


@named("ceil")
def _ceil(recorder, x):
    return recorder.line(f"-floor(-{x.name})", "f32", x) if x.kind == "f32" else x


@named("trunc", "fix")
def _trunc(recorder, x):
    if x.kind != "f32":
        return x
    return recorder.line(f"select({x.name} < 0.0, -floor(-{x.name}), floor({x.name}))", "f32", x)


@named("round", "rint")
def _round(recorder, x, decimals=0):
    """To the nearest integer, of two to the even one."""
    if x.kind != "f32":
        return x
    if decimals:
        raise UnsupportedError(f"`round` to {decimals} digits is not computed in a mask or score function")
    up = recorder.line(f"floor({x.name} + 0.5)", "f32", x)
    is_odd = f"{up.name} - 2.0 * floor({up.name} * 0.5) != 0.0"
    text = f"select({up.name} - {x.name} == 0.5 and {is_odd}, {up.name} - 1.0, {up.name})"
    return recorder.line(text, "f32", x, up)


@named("sign", "sgn")
def _sign(recorder, x):
    zero, one = ("0", "1") if x.kind == "i32" else ("0.0", "1.0")
    text = f"select({zero} < {x.name}, {one}, select({x.name} < {zero}, -{one}, {zero}))"
    return _bounded(recorder.line(text, x.kind, x), lambda a: [-1, 1], x)


def _extreme(function, *names):
    @named(*names)
    def operation(recorder, a, b):
        (a, b), kind = recorder.promoted(a, b)
        if kind == "bool":
            symbol = "and" if function == "min" else "or"
            return recorder.line(f"{a.name} {symbol} {b.name}", "bool", a, b)
        of = any if function == "max" else all
        is_natural = kind == "i32" and of(x.is_natural for x in (a, b))
        made = recorder.line(f"{function}({a.name}, {b.name})", kind, a, b, is_natural=is_natural)
        return _bounded(made, _ENDS[function], a, b)


_extreme("min", "minimum", "min")
_extreme("max", "maximum", "max")


@named("fmax")
def _fmax(recorder, a, b):
    """The number, where the other is NaN."""
    (a, b), kind = recorder.promoted(a, b)
    text = f"select({a.name} < {b.name} or {a.name} != {a.name}, {b.name}, {a.name})"
    return recorder.line(text, kind, a, b)


@named("fmin")
def _fmin(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    text = f"select({b.name} < {a.name} or {a.name} != {a.name}, {b.name}, {a.name})"
    return recorder.line(text, kind, a, b)


@named("clamp", "clip")
def _clamp(recorder, x, low=None, high=None, min=None, max=None, a_min=None, a_max=None):
    low = next((one for one in (low, min, a_min) if one is not None), None)
    high = next((one for one in (high, max, a_max) if one is not None), None)
    if low is not None:
        x = OPERATIONS["maximum"](recorder, x, recorder.operand(low))
    if high is not None:
        x = OPERATIONS["minimum"](recorder, x, recorder.operand(high))
    return x


@named("clamp_min")
def _clamp_min(recorder, x, min):
    return _clamp(recorder, x, low=min)


@named("clamp_max")
def _clamp_max(recorder, x, max):
    return _clamp(recorder, x, high=max)


# A side of 0 is selected, not taken by `abs`, so that 0 has the derivative of one.
SIZE = "select({0} < 0.0, -{0}, {0})"


@named("where")
def _where(recorder, condition, a, b):
    (a, b), kind = recorder.promoted(a, b)
    condition = recorder.converted(condition, "bool")
    made = recorder.line(f"select({condition.name}, {a.name}, {b.name})", kind, condition, a, b)
    return _bounded(made, _ENDS["select"], a, b)


@named("masked_fill")
def _masked_fill(recorder, x, condition, value):
    return recorder.converted(_where(recorder, condition, value, x), x.kind)


@named("isnan")
def _isnan(recorder, x):
    return recorder.line(f"{x.name} != {x.name}", "bool", x)


@named("isinf")
def _isinf(recorder, x):
    return recorder.line(f"abs({x.name}) == inf", "bool", x)


@named("isfinite")
def _isfinite(recorder, x):
    x = recorder.converted(x, "f32")
    return recorder.line(f"abs({x.name}) < inf", "bool", x)


@named("isclose")
def _isclose(recorder, a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    if equal_nan:
        raise UnsupportedError("`isclose` with equal_nan is not computed in a mask or score function")
    a, b, rtol, atol = (recorder.converted(recorder.operand(x), "f32") for x in (a, b, rtol, atol))
    near = f"abs({a.name} - {b.name}) <= {atol.name} + {rtol.name} * abs({b.name}) and abs({b.name}) < inf"
    return recorder.line(f"{a.name} == {b.name} or {near}", "bool", a, b, rtol, atol)


@named("nan_to_num")
def _nan_to_num(recorder, x, nan=0.0, posinf=None, neginf=None):
    if x.kind != "f32":
        return x
    largest = 3.4028234663852886e38
    low, high = (-largest if neginf is None else neginf), (largest if posinf is None else posinf)
    low, high, nan = (recorder.converted(recorder.operand(one), "f32") for one in (low, high, nan))
    inner = f"select({x.name} == inf, {high.name}, select({x.name} == -inf, {low.name}, {x.name}))"
    return recorder.line(f"select({x.name} != {x.name}, {nan.name}, {inner})", "f32", x, low, high, nan)


@named("frac")
def _frac(recorder, x):
    return OPERATIONS["sub"](recorder, x, _trunc(recorder, x))


@named("addcmul")
def _addcmul(recorder, x, a, b, value=1):
    times = OPERATIONS["mul"](recorder, OPERATIONS["mul"](recorder, a, b), recorder.operand(value))
    return OPERATIONS["add"](recorder, x, times)


@named("lerp")
def _lerp(recorder, a, b, weight):
    times = OPERATIONS["mul"](recorder, OPERATIONS["sub"](recorder, b, a), recorder.operand(weight))
    return OPERATIONS["add"](recorder, a, times)


def _name_of(dtype):
    return str(dtype).rsplit(".", 1)[-1].strip("'<>").lower()


def _kind_of(dtype):
    name = _name_of(dtype)
    if "bool" in name:
        return "bool"
    return "i32" if "int" in name or name == "long" else "f32"


@named("to", "type", "astype")
def _to(recorder, x, target=None, *_, dtype=None, **__):
    target = dtype if dtype is not None else target
    if isinstance(target, Traced):
        return _converted(recorder, x, target.kind, target.narrow)
    is_kind = type(target).__name__ in ("dtype", "type") or target in (int, float, bool)
    return _converted(recorder, x, _kind_of(target), _name_of(target)) if is_kind else x


def _converted(recorder, x, kind, dtype):
    """A value of another kind, and integers in their type."""
    made = recorder.converted(copy.copy(x), kind)
    return wrapped(recorder, made, {"short": "int16", "char": "int8", "byte": "uint8"}.get(dtype, dtype))


@named("type_as")
def _type_as(recorder, x, other):
    return _converted(recorder, x, other.kind, other.narrow)


def _conversion(kind, *names):
    @named(*names)
    def operation(recorder, x):
        return _converted(recorder, x, kind, names[0])


_conversion("f32", "float", "double", "half", "bfloat16")
_conversion("i32", "int", "long")
_conversion("i32", "short")
_conversion("i32", "char")
_conversion("i32", "byte")
_conversion("bool", "bool")


def _filled(value, *names):
    @named(*names)
    def operation(recorder, x, *_, dtype=None, **__):
        kind = x.kind if dtype is None else _kind_of(dtype)
        return recorder.converted(recorder.operand(value), kind)


_filled(1, "ones_like", "new_ones")
_filled(0, "zeros_like", "new_zeros")


@named("full_like", "new_full", "new_tensor")
def _full_like(recorder, x, *values, fill_value=None, dtype=None, **_):
    value = values[-1] if fill_value is None else fill_value
    value = recorder.operand(value)
    return recorder.converted(value, value.kind if dtype is None else _kind_of(dtype))


@named("addcdiv")
def _addcdiv(recorder, x, a, b, value=1):
    ratio = OPERATIONS["mul"](recorder, _div(recorder, a, b), recorder.operand(value))
    return OPERATIONS["add"](recorder, x, ratio)


OPERATIONS["truth"] = lambda recorder, x: recorder.converted(x, "bool")
