"""The operations of recorded functions, by the names that Python, torch and numpy give them."""

from ._core import InputError, UnsupportedError
from ._traced import Indexed, NeedsConstant, Row, Traced, float_text

OPERATIONS = {}
# Those that make one scalar of a row, or a row of scalars.
OF_ROWS = {}
# Those that look through an array, or take an element of one.
OF_ARRAYS = set("searchsorted bucketize isin index_select take embedding index _unsafe_index".split())
SHOWN = set()
# Those that take an integer of more than 32 bits as the number that it is.
WIDE = set(
    "lt le gt ge eq ne less less_equal greater greater_equal equal not_equal where masked_fill min max "
    "minimum maximum clamp clip clamp_min clamp_max full_like new_full new_tensor float double half "
    "bfloat16 div truediv true_divide divide".split()
)


def _named(*names):
    def keep(operation):
        for name in names:
            OPERATIONS[name] = operation
        SHOWN.add(names[0])
        return operation

    return keep


def _binary(symbol, *names, kinds=("i32", "f32")):
    @_named(*names)
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
    @_named(*names)
    def operation(recorder, a, b):
        (a, b), kind = recorder.promoted(a, b)
        if kind == "bool" and symbol not in ("==", "!="):
            a, b = (recorder.converted(x, "i32") for x in (a, b))
        return recorder.line(f"{a.name} {symbol} {b.name}", "bool", a, b)


def _bits(symbol, *names):
    @_named(*names)
    def operation(recorder, a, b):
        (a, b), kind = recorder.promoted(a, b)
        if kind == "f32":
            raise UnsupportedError(f"`{symbol}` takes integers or truth values, not numbers")
        return recorder.line(f"{a.name} {symbol} {b.name}", kind, a, b)


def _logical(symbol, name):
    @_named(name)
    def operation(recorder, a, b):
        a, b = (recorder.converted(x, "bool") for x in (a, b))
        return recorder.line(f"{a.name} {symbol} {b.name}", "bool", a, b)


def _function(text, *names):
    """A function of one number."""

    @_named(*names)
    def operation(recorder, x):
        x = recorder.converted(x, "f32")
        return recorder.line(text.replace("X", x.name), "f32", x)


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
_function("exp(X)", "exp")
_function("exp2(X)", "exp2")
_function("exp(X) - 1.0", "expm1")
_function("log(X)", "log")
_function("log2(X)", "log2")
_function("log(1.0 + X)", "log1p")
_function("log2(X) * 0.30102999566398", "log10")
_function("tanh(X)", "tanh")
_function("sigmoid(X)", "sigmoid", "expit")
_function("sqrt(X)", "sqrt")
_function("rsqrt(X)", "rsqrt")
_function("1.0 / X", "reciprocal")
_function("sin(X)", "sin")
_function("cos(X)", "cos")
_function("X * sigmoid(X)", "silu")
_function("(exp(X) - exp(-X)) * 0.5", "sinh")
_function("(exp(X) + exp(-X)) * 0.5", "cosh")


@_named("rsub")
def _rsub(recorder, a, b):
    return OPERATIONS["sub"](recorder, b, a)


@_named("neg", "negative")
def _neg(recorder, x):
    x = recorder.converted(x, "i32") if x.kind == "bool" else x
    return _bounded(recorder.line(f"-{x.name}", x.kind, x), _ENDS["neg"], x)


@_named("pos", "positive", "clone", "contiguous", "squeeze", "unsqueeze", "view", "reshape", "flatten")
def _same(recorder, x, *others):
    if any(type(one).__name__ == "dtype" for one in others):
        raise UnsupportedError(
            "a number's bits as those of another type (`view`) have no equivalent in a mask or score function"
        )
    return x


@_named("detach")
def _detach(recorder, x):
    if recorder.is_score and x.kind == "f32":
        raise UnsupportedError(
            "`detach` of a number in a score function, whose derivative is that of all that it computes: "
            "detach the arrays that it reads before"
        )
    return x


@_named("abs", "absolute", "fabs")
def _abs(recorder, x):
    made = recorder.line(f"abs({x.name})", x.kind, x, is_natural=x.kind == "i32")
    return _bounded(made, _ENDS["abs"], x)


@_named("square")
def _square(recorder, x):
    return OPERATIONS["mul"](recorder, x, x)


@_named("invert", "bitwise_not")
def _invert(recorder, x):
    return recorder.line(f"~{x.name}", x.kind, x)


@_named("logical_not")
def _logical_not(recorder, x):
    return _invert(recorder, recorder.converted(x, "bool"))


@_named("div", "truediv", "true_divide", "divide")
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


@_named("floordiv", "floor_divide")
def _floordiv(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        return recorder.line(f"floor({a.name} / {b.name})", "f32", a, b)
    a, b, sign = _divided(recorder, a, b)
    is_natural = sign is None and a.is_natural
    made = recorder.line(f"{a.name} // {b.name}", "i32", a, b, is_natural=is_natural)
    return _bounded(made, _ENDS["//"], a, b) if b.fixed else made


@_named("mod", "remainder")
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


@_named("fmod")
def _fmod(recorder, a, b):
    """What is left of a division that is rounded towards 0."""
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        whole = _div(recorder, a, b, rounding_mode="trunc")
    else:
        a, b = (recorder.converted(x, "i32") for x in (a, b))
        whole, kind = _truncdiv(recorder, a, b), "i32"
    return recorder.line(f"{a.name} - {whole.name} * {b.name}", kind, a, whole, b)


@_named("pow", "power", "float_power")
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
    size = recorder.line(f"exp2({b.name} * log2({_SIZE.format(a.name)}))", "f32", a, b)
    if not is_whole:
        whole = recorder.line(f"select(floor({b.name}) == {b.name}, {size.name}, nan)", "f32", b, size)
        size = recorder.line(f"select({a.name} < 0.0, {whole.name}, {size.name})", "f32", a, whole, size)
    is_odd = f"{b.name} - 2.0 * floor({b.name} * 0.5) == 1.0"
    signed = f"select({a.name} < 0.0 and {is_odd}, -{size.name}, {size.name})"
    # Of 0 there is no logarithm.
    of_zero = f"select({b.name} == 0.0, 1.0, select({b.name} < 0.0, inf, 0.0))"
    return recorder.line(f"select({a.name} == 0.0, {of_zero}, {signed})", "f32", a, b, size)


@_named("floor")
def _floor(recorder, x):
    return recorder.line(f"floor({x.name})", "f32", x) if x.kind == "f32" else x


@_named("ceil")
def _ceil(recorder, x):
    return recorder.line(f"-floor(-{x.name})", "f32", x) if x.kind == "f32" else x


@_named("trunc", "fix")
def _trunc(recorder, x):
    if x.kind != "f32":
        return x
    return recorder.line(f"select({x.name} < 0.0, -floor(-{x.name}), floor({x.name}))", "f32", x)


@_named("round", "rint")
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


@_named("sign", "sgn")
def _sign(recorder, x):
    zero, one = ("0", "1") if x.kind == "i32" else ("0.0", "1.0")
    text = f"select({zero} < {x.name}, {one}, select({x.name} < {zero}, -{one}, {zero}))"
    return _bounded(recorder.line(text, x.kind, x), lambda a: [-1, 1], x)


def _extreme(function, *names):
    @_named(*names)
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


@_named("fmax")
def _fmax(recorder, a, b):
    """The number, where the other is NaN."""
    (a, b), kind = recorder.promoted(a, b)
    text = f"select({a.name} < {b.name} or {a.name} != {a.name}, {b.name}, {a.name})"
    return recorder.line(text, kind, a, b)


@_named("fmin")
def _fmin(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    text = f"select({b.name} < {a.name} or {a.name} != {a.name}, {b.name}, {a.name})"
    return recorder.line(text, kind, a, b)


@_named("clamp", "clip")
def _clamp(recorder, x, low=None, high=None, min=None, max=None, a_min=None, a_max=None):
    low = next((one for one in (low, min, a_min) if one is not None), None)
    high = next((one for one in (high, max, a_max) if one is not None), None)
    if low is not None:
        x = OPERATIONS["maximum"](recorder, x, recorder.operand(low))
    if high is not None:
        x = OPERATIONS["minimum"](recorder, x, recorder.operand(high))
    return x


@_named("clamp_min")
def _clamp_min(recorder, x, min):
    return _clamp(recorder, x, low=min)


@_named("clamp_max")
def _clamp_max(recorder, x, max):
    return _clamp(recorder, x, high=max)


@_named("relu")
def _relu(recorder, x):
    """Without a derivative at 0, unlike a maximum."""
    zero = recorder.converted(recorder.operand(0), x.kind).name
    text = f"select({zero} < {x.name}, {x.name}, {zero})"
    return recorder.line(text, x.kind, x, is_natural=x.kind == "i32")


@_named("hardtanh")
def _hardtanh(recorder, x, min_val=-1.0, max_val=1.0):
    x, low, high = (recorder.converted(recorder.operand(one), "f32") for one in (x, min_val, max_val))
    above = f"select({x.name} < {high.name}, {x.name}, {high.name})"
    return recorder.line(f"select({x.name} <= {low.name}, {low.name}, {above})", "f32", x, low, high)


@_named("leaky_relu")
def _leaky_relu(recorder, x, negative_slope=0.01):
    x = recorder.converted(x, "f32")
    slope = recorder.converted(recorder.operand(negative_slope), "f32")
    return recorder.line(f"select(0.0 < {x.name}, {x.name}, {x.name} * {slope.name})", "f32", x, slope)


@_named("relu6")
def _relu6(recorder, x):
    return _hardtanh(recorder, x, 0.0, 6.0)


@_named("threshold", "_threshold")
def _threshold(recorder, x, threshold, value):
    x, threshold, value = (recorder.converted(recorder.operand(one), "f32") for one in (x, threshold, value))
    text = f"select({x.name} <= {threshold.name}, {value.name}, {x.name})"
    return recorder.line(text, "f32", x, threshold, value)


@_named("hardshrink")
def _hardshrink(recorder, x, lambd=0.5):
    x, most = (recorder.converted(recorder.operand(one), "f32") for one in (x, lambd))
    return recorder.line(f"select(abs({x.name}) <= {most.name}, 0.0, {x.name})", "f32", x, most)


@_named("softshrink")
def _softshrink(recorder, x, lambd=0.5):
    x, most = (recorder.converted(recorder.operand(one), "f32") for one in (x, lambd))
    below = f"select({x.name} < -{most.name}, {x.name} + {most.name}, 0.0)"
    return recorder.line(f"select({most.name} < {x.name}, {x.name} - {most.name}, {below})", "f32", x, most)


@_named("logit")
def _logit(recorder, x, eps=None):
    x = recorder.converted(x, "f32")
    if eps is not None:
        low = recorder.operand(eps)
        high = recorder.operate("rsub", (low, 1.0), {})
        x = _clamp(recorder, x, low, high)
    return recorder.line(f"log({x.name} / (1.0 - {x.name}))", "f32", x)


def _formula(takes, text, *names):
    """A function of so many numbers, by its text."""

    @_named(*names)
    def operation(recorder, *given):
        if len(given) != takes:
            raise TypeError(f"{names[0]} takes {takes} numbers, not {len(given)}")
        own = [recorder.converted(x, "f32") for x in given]
        return recorder.line(text.format(*(x.name for x in own)), "f32", *own)


_formula(1, "clamp({0} / 6.0 + 0.5, 0.0, 1.0)", "hardsigmoid")
_formula(1, "{0} * clamp({0} / 6.0 + 0.5, 0.0, 1.0)", "hardswish")
# A side of 0 is selected, not taken by `abs`, so that 0 has the derivative of one.
_SIZE = "select({0} < 0.0, -{0}, {0})"
_formula(1, f"select({{0}} < 0.0, {{0}}, 0.0) - log(1.0 + exp(-{_SIZE}))", "log_sigmoid", "logsigmoid")
_formula(1, f"{{0}} * tanh(max({{0}}, 0.0) + log(1.0 + exp(-{_SIZE})))", "mish")
_formula(2, "sqrt({0} * {0} + {1} * {1})", "hypot")
_formula(2, "select({0} == 0.0 and {1} <= 0.0, 0.0, {0} * log({1}))", "xlogy")
_formula(2, "select({1} < 0.0, -abs({0}), abs({0}))", "copysign")
_formula(
    1,
    "select({0} < 0.0, -log(sqrt({0} * {0} + 1.0) - {0}), log(sqrt({0} * {0} + 1.0) + {0}))",
    "asinh",
    "arcsinh",
)


def _exponential_unit(recorder, x, alpha, exponent):
    x, alpha = (recorder.converted(recorder.operand(one), "f32") for one in (x, alpha))
    power = exponent.format(x.name, alpha.name)
    text = f"select(0.0 < {x.name}, {x.name}, {alpha.name} * (exp({power}) - 1.0))"
    return recorder.line(text, "f32", x, alpha)


@_named("elu")
def _elu(recorder, x, alpha=1.0):
    return _exponential_unit(recorder, x, alpha, "{0}")


@_named("celu")
def _celu(recorder, x, alpha=1.0):
    return _exponential_unit(recorder, x, alpha, "{0} / {1}")


@_named("softplus")
def _softplus(recorder, x, beta=1.0, threshold=20.0):
    x, beta, threshold = (recorder.converted(recorder.operand(one), "f32") for one in (x, beta, threshold))
    times = recorder.line(f"{x.name} * {beta.name}", "f32", x, beta)
    # Beyond the threshold the rest is lost in rounding, unless the threshold is a low one.
    text = f"(max({times.name}, 0.0) + log(1.0 + exp(-{_SIZE.format(times.name)}))) / {beta.name}"
    soft = recorder.line(text, "f32", times, beta)
    text = f"select({threshold.name} < {times.name}, {x.name}, {soft.name})"
    return recorder.line(text, "f32", x, times, threshold, soft)


def _polynomial(name, factors):
    """A polynomial without a constant, its factors from that of the first power on."""
    text = float_text(factors[-1])
    for factor in factors[-2::-1]:
        text = f"({float_text(factor)} + {name} * {text})"
    return f"{name} * {text}"


# Of 1 - erf(x) = P(1 / (1 + 0.54 x)) exp(-x^2) with x >= 0: to 5e-8, and 2e-7 of the derivative.
_ERF = (0.29347348, 0.40252262, -0.09049915, 0.81346788, -0.52248762, 0.10352278)
# Of arctan(x) = x (1 + P(x^2)) with 0 <= x <= 1: to 2e-8, and as much of the derivative.
_ATAN = (-0.3333264, 0.1998447, -0.1414537, 0.104315, -0.0708781, 0.03803923, -0.01333468, 0.002192129)


@_named("erf")
def _erf(recorder, x):
    x = recorder.converted(x, "f32")
    size = recorder.line(_SIZE.format(x.name), "f32", x)
    inner = recorder.line(f"1.0 / (1.0 + 0.54 * {size.name})", "f32", size)
    beyond = f"{_polynomial(inner.name, _ERF)} * exp(-{size.name} * {size.name})"
    up = recorder.line(f"1.0 - {beyond}", "f32", inner, size)
    return recorder.line(f"select({x.name} < 0.0, -{up.name}, {up.name})", "f32", x, up)


@_named("erfc")
def _erfc(recorder, x):
    return recorder.line(f"1.0 - {_erf(recorder, x).name}", "f32", x)


@_named("gelu")
def _gelu(recorder, x, approximate="none"):
    x = recorder.converted(x, "f32")
    if approximate == "none":
        part = _erf(recorder, recorder.line(f"{x.name} * 0.7071067811865476", "f32", x))
    elif approximate == "tanh":
        inner = f"0.7978845608 * ({x.name} + 0.044715 * {x.name} * {x.name} * {x.name})"
        part = recorder.line(f"tanh({inner})", "f32", x)
    else:
        raise InputError(f"`gelu` with approximate={approximate!r}: it is 'none' or 'tanh'")
    return recorder.line(f"0.5 * {x.name} * (1.0 + {part.name})", "f32", x, part)


@_named("atan", "arctan")
def _atan(recorder, x):
    x = recorder.converted(x, "f32")
    size = recorder.line(_SIZE.format(x.name), "f32", x)
    low = recorder.line(f"select(1.0 < {size.name}, 1.0 / {size.name}, {size.name})", "f32", size)
    square = recorder.line(f"{low.name} * {low.name}", "f32", low)
    near = recorder.line(f"{low.name} * (1.0 + {_polynomial(square.name, _ATAN)})", "f32", low, square)
    up = recorder.line(
        f"select(1.0 < {size.name}, 1.5707963267948966 - {near.name}, {near.name})", "f32", near
    )
    return recorder.line(f"select({x.name} < 0.0, -{up.name}, {up.name})", "f32", x, up)


@_named("atan2", "arctan2")
def _atan2(recorder, y, x):
    y, x = (recorder.converted(one, "f32") for one in (y, x))
    ratio = _atan(recorder, recorder.line(f"{y.name} / {x.name}", "f32", y, x))
    turn = f"select({y.name} < 0.0, -3.141592653589793, 3.141592653589793)"
    turned = f"{ratio.name} + select({x.name} < 0.0, {turn}, 0.0)"
    # Of 0 and 0 there is no ratio.
    return recorder.line(f"select({x.name} == 0.0 and {y.name} == 0.0, 0.0, {turned})", "f32", y, x, ratio)


@_named("asin", "arcsin")
def _asin(recorder, x):
    x = recorder.converted(x, "f32")
    ratio = recorder.line(f"{x.name} / sqrt((1.0 - {x.name}) * (1.0 + {x.name}))", "f32", x)
    return _atan(recorder, ratio)


@_named("acos", "arccos")
def _acos(recorder, x):
    return recorder.line(f"1.5707963267948966 - {_asin(recorder, x).name}", "f32", x)


@_named("logaddexp")
def _logaddexp(recorder, a, b):
    a, b = (recorder.converted(x, "f32") for x in (a, b))
    apart = recorder.line(f"{a.name} - {b.name}", "f32", a, b)
    text = f"max({a.name}, {b.name}) + log(1.0 + exp(-{_SIZE.format(apart.name)}))"
    return recorder.line(text, "f32", a, b, apart)


@_named("where")
def _where(recorder, condition, a, b):
    (a, b), kind = recorder.promoted(a, b)
    condition = recorder.converted(condition, "bool")
    made = recorder.line(f"select({condition.name}, {a.name}, {b.name})", kind, condition, a, b)
    return _bounded(made, _ENDS["select"], a, b)


@_named("masked_fill")
def _masked_fill(recorder, x, condition, value):
    return recorder.converted(_where(recorder, condition, value, x), x.kind)


@_named("isnan")
def _isnan(recorder, x):
    return recorder.line(f"{x.name} != {x.name}", "bool", x)


@_named("isinf")
def _isinf(recorder, x):
    return recorder.line(f"abs({x.name}) == inf", "bool", x)


# The most boundaries that are looked through one by one.
_BOUNDARIES = 40


def _counted(recorder, boundaries, x, right):
    """How many of the boundaries lie before a number."""
    count = boundaries.shape[0] if len(getattr(boundaries, "shape", ())) == 1 else _BOUNDARIES + 1
    if count > _BOUNDARIES:
        raise UnsupportedError(
            f"boundaries are one axis of at most {_BOUNDARIES} in a mask or score function: make a table of "
            "the numbers of intervals before, and index it"
        )
    found = recorder.operand(0)
    for at in range(count):
        edge = recorder.load(boundaries, (at,))
        before = OPERATIONS["le" if right else "lt"](recorder, edge, x)
        found = OPERATIONS["add"](recorder, found, recorder.converted(before, "i32"))
    return found


@_named("searchsorted")
def _searchsorted(recorder, boundaries, x, *, right=False, side=None, out_int32=False):
    return _counted(recorder, boundaries, x, right if side is None else side == "right")


@_named("bucketize")
def _bucketize(recorder, x, boundaries, *, right=False, out_int32=False):
    return _counted(recorder, boundaries, x, right)


@_named("isfinite")
def _isfinite(recorder, x):
    x = recorder.converted(x, "f32")
    return recorder.line(f"abs({x.name}) < inf", "bool", x)


@_named("isclose")
def _isclose(recorder, a, b, rtol=1e-5, atol=1e-8, equal_nan=False):
    if equal_nan:
        raise UnsupportedError("`isclose` with equal_nan is not computed in a mask or score function")
    a, b, rtol, atol = (recorder.converted(recorder.operand(x), "f32") for x in (a, b, rtol, atol))
    near = f"abs({a.name} - {b.name}) <= {atol.name} + {rtol.name} * abs({b.name}) and abs({b.name}) < inf"
    return recorder.line(f"{a.name} == {b.name} or {near}", "bool", a, b, rtol, atol)


@_named("nan_to_num")
def _nan_to_num(recorder, x, nan=0.0, posinf=None, neginf=None):
    if x.kind != "f32":
        return x
    largest = 3.4028234663852886e38
    low, high = (-largest if neginf is None else neginf), (largest if posinf is None else posinf)
    low, high, nan = (recorder.converted(recorder.operand(one), "f32") for one in (low, high, nan))
    inner = f"select({x.name} == inf, {high.name}, select({x.name} == -inf, {low.name}, {x.name}))"
    return recorder.line(f"select({x.name} != {x.name}, {nan.name}, {inner})", "f32", x, low, high, nan)


@_named("frac")
def _frac(recorder, x):
    return OPERATIONS["sub"](recorder, x, _trunc(recorder, x))


@_named("addcmul")
def _addcmul(recorder, x, a, b, value=1):
    times = OPERATIONS["mul"](recorder, OPERATIONS["mul"](recorder, a, b), recorder.operand(value))
    return OPERATIONS["add"](recorder, x, times)


@_named("lerp")
def _lerp(recorder, a, b, weight):
    times = OPERATIONS["mul"](recorder, OPERATIONS["sub"](recorder, b, a), recorder.operand(weight))
    return OPERATIONS["add"](recorder, a, times)


def _kind_of(dtype):
    name = str(dtype).rsplit(".", 1)[-1].strip("'<>").lower()
    if "bool" in name:
        return "bool"
    return "i32" if "int" in name or name == "long" else "f32"


@_named("to", "type", "astype")
def _to(recorder, x, target=None, *_, dtype=None, **__):
    target = dtype if dtype is not None else target
    if isinstance(target, Traced):
        return recorder.converted(x, target.kind)
    is_kind = type(target).__name__ in ("dtype", "type") or target in (int, float, bool)
    return recorder.converted(x, _kind_of(target)) if is_kind else x


@_named("type_as")
def _type_as(recorder, x, other):
    return recorder.converted(x, other.kind)


def _conversion(kind, *names):
    @_named(*names)
    def operation(recorder, x):
        return recorder.converted(x, kind)


_conversion("f32", "float", "double", "half", "bfloat16")
_conversion("i32", "int", "long", "short")
_conversion("bool", "bool")


def _filled(value, *names):
    @_named(*names)
    def operation(recorder, x, *_, dtype=None, **__):
        kind = x.kind if dtype is None else _kind_of(dtype)
        return recorder.converted(recorder.operand(value), kind)


_filled(1, "ones_like", "new_ones")
_filled(0, "zeros_like", "new_zeros")


@_named("full_like", "new_full", "new_tensor")
def _full_like(recorder, x, *values, fill_value=None, dtype=None, **_):
    value = values[-1] if fill_value is None else fill_value
    value = recorder.operand(value)
    return recorder.converted(value, value.kind if dtype is None else _kind_of(dtype))


@_named("embedding")
def _embedding(recorder, index, weight, padding_idx=None, max_norm=None, *_, **__):
    if padding_idx is not None or max_norm is not None:
        raise UnsupportedError("`embedding` without padding_idx and max_norm is computed: index its weight")
    return Indexed(recorder, weight)[index]


@_named("index", "_unsafe_index")
def _index(recorder, array, indices):
    """What aten's operator takes: a list of indices, None for a whole axis."""
    return Indexed(recorder, array)[tuple(slice(None) if one is None else one for one in indices)]


@_named("index_select")
def _index_select(recorder, array, dim, index):
    at = dim.value if isinstance(dim, Traced) else dim
    axes = len(array.shape)
    if not -axes <= at < axes:
        raise InputError(f"`index_select` along axis {at} of an array of {axes} axes")
    array = array if isinstance(array, Indexed) else Indexed(recorder, array)
    return array[(slice(None),) * (at % axes) + (index,)]


@_named("take")
def _take(recorder, array, index):
    if len(array.shape) != 1:
        raise UnsupportedError("`take` of an array of one axis is computed in a mask or score function")
    return Indexed(recorder, array)[index]


_formula(1, "sin({0}) / cos({0})", "tan")
_formula(1, "{0} / (1.0 + abs({0}))", "softsign")
_formula(1, "{0} - tanh({0})", "tanhshrink")
_formula(
    1,
    "1.0507009873554805 * select(0.0 < {0}, {0}, 1.6732632423543772 * (exp({0}) - 1.0))",
    "selu",
)
_formula(2, "select({0} == 0.0, {1}, select({0} < 0.0, 0.0, 1.0))", "heaviside")
_formula(1, "select({0} == 0.0, 1.0, sin(3.141592653589793 * {0}) / (3.141592653589793 * {0}))", "sinc")
_formula(1, "0.5 * log((1.0 + {0}) / (1.0 - {0}))", "atanh", "arctanh")
_formula(1, "log({0} + sqrt({0} * {0} - 1.0))", "acosh", "arccosh")
_formula(1, "{0} * 0.017453292519943295", "deg2rad", "radians")
_formula(1, "{0} * 57.29577951308232", "rad2deg", "degrees")


@_named("addcdiv")
def _addcdiv(recorder, x, a, b, value=1):
    ratio = OPERATIONS["mul"](recorder, _div(recorder, a, b), recorder.operand(value))
    return OPERATIONS["add"](recorder, x, ratio)


@_named("isin")
def _isin(recorder, x, among, *, invert=False):
    found = recorder.operand(False)
    for one in recorder.row(among) or ():
        found = OPERATIONS["logical_or"](recorder, found, OPERATIONS["eq"](recorder, x, one))
    return _invert(recorder, found) if invert else found


def _reduction(name, start, *names):
    """What an operation makes of all numbers of a row."""

    def operation(recorder, row, dim=-1, *, axis=-1):
        if isinstance(row, Traced):
            return row if start != "truth" else recorder.converted(row, "bool")
        elements = _row(recorder, names[0], row, dim, axis)
        made = elements[0] if start is None else recorder.operate(start, (elements[0],), {})
        if start == "pos" and made.kind == "bool":
            # Truth values are counted.
            made = recorder.converted(made, "i32")
        for one in elements[1:]:
            made = recorder.operate(name, (made, one), {})
        return made

    for one in names:
        OF_ROWS[one] = operation
    SHOWN.add(names[0])


def _row(recorder, name, row, dim=-1, axis=-1):
    elements = recorder.row(row)
    if elements is None or {dim, axis} - {None, 0, -1, (0,), (-1,)}:
        raise UnsupportedError(f"`{name}` in a mask or score function takes a row of numbers, as t[q] is")
    return elements


_reduction("add", "pos", "sum")
_reduction("mul", "pos", "prod")
_reduction("logical_or", "truth", "any")
_reduction("logical_and", "truth", "all")
_reduction("maximum", None, "amax")
_reduction("minimum", None, "amin")


OPERATIONS["truth"] = lambda recorder, x: recorder.converted(x, "bool")


def _of_row(*names):
    def keep(operation):
        OF_ROWS.update(dict.fromkeys(names, operation))
        SHOWN.add(names[0])
        return operation

    return keep


@_of_row("dot", "matmul", "inner", "vdot")
def _dot(recorder, a, b):
    a, b = (_row(recorder, "dot", one) for one in (a, b))
    if len(a) != len(b):
        raise InputError(f"`dot` of rows of {len(a)} and {len(b)} numbers in a mask or score function")
    return OF_ROWS["sum"](recorder, Row(recorder, [recorder.operate("mul", pair, {}) for pair in zip(a, b)]))


@_of_row("mean")
def _mean(recorder, row, dim=-1, *, axis=-1):
    elements = _row(recorder, "mean", row, dim, axis)
    return recorder.operate("div", (OF_ROWS["sum"](recorder, row), len(elements)), {})


@_of_row("norm", "linalg_vector_norm", "linalg_norm")
def _norm(recorder, row, p="fro", dim=-1, keepdim=False, out=None, dtype=None):
    if keepdim or p not in ("fro", 2, None):
        raise UnsupportedError("`norm` of order 2 without keepdim is computed in a mask or score function")
    squares = [recorder.operate("mul", (one, one), {}) for one in _row(recorder, "norm", row, dim)]
    return recorder.operate("sqrt", (OF_ROWS["sum"](recorder, Row(recorder, squares)),), {})


@_of_row("stack")
def _stack(recorder, tensors, dim=0):
    return Row(recorder, _row(recorder, "stack", tensors, dim))
