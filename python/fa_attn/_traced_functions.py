"""Functions of recorded scalars: activations, and what the language of programs has no word for."""

from ._core import InputError
from ._traced import float_text
from ._traced_operations import OPERATIONS, SIZE, named


def _function(text, *names):
    """A function of one number."""

    @named(*names)
    def operation(recorder, x):
        x = recorder.converted(x, "f32")
        return recorder.line(text.replace("X", x.name), "f32", x)


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


@named("relu")
def _relu(recorder, x):
    """Without a derivative at 0, unlike a maximum."""
    zero = recorder.converted(recorder.operand(0), x.kind).name
    text = f"select({zero} < {x.name}, {x.name}, {zero})"
    return recorder.line(text, x.kind, x, is_natural=x.kind == "i32")


@named("hardtanh")
def _hardtanh(recorder, x, min_val=-1.0, max_val=1.0):
    x, low, high = (recorder.converted(recorder.operand(one), "f32") for one in (x, min_val, max_val))
    above = f"select({x.name} < {high.name}, {x.name}, {high.name})"
    return recorder.line(f"select({x.name} <= {low.name}, {low.name}, {above})", "f32", x, low, high)


@named("leaky_relu")
def _leaky_relu(recorder, x, negative_slope=0.01):
    x = recorder.converted(x, "f32")
    slope = recorder.converted(recorder.operand(negative_slope), "f32")
    return recorder.line(f"select(0.0 < {x.name}, {x.name}, {x.name} * {slope.name})", "f32", x, slope)


@named("relu6")
def _relu6(recorder, x):
    return _hardtanh(recorder, x, 0.0, 6.0)


@named("threshold", "_threshold")
def _threshold(recorder, x, threshold, value):
    x, threshold, value = (recorder.converted(recorder.operand(one), "f32") for one in (x, threshold, value))
    text = f"select({x.name} <= {threshold.name}, {value.name}, {x.name})"
    return recorder.line(text, "f32", x, threshold, value)


@named("hardshrink")
def _hardshrink(recorder, x, lambd=0.5):
    x, most = (recorder.converted(recorder.operand(one), "f32") for one in (x, lambd))
    return recorder.line(f"select(abs({x.name}) <= {most.name}, 0.0, {x.name})", "f32", x, most)


@named("softshrink")
def _softshrink(recorder, x, lambd=0.5):
    x, most = (recorder.converted(recorder.operand(one), "f32") for one in (x, lambd))
    below = f"select({x.name} < -{most.name}, {x.name} + {most.name}, 0.0)"
    return recorder.line(f"select({most.name} < {x.name}, {x.name} - {most.name}, {below})", "f32", x, most)


@named("logit")
def _logit(recorder, x, eps=None):
    x = recorder.converted(x, "f32")
    if eps is not None:
        low = recorder.operand(eps)
        high = recorder.operate("rsub", (low, 1.0), {})
        x = OPERATIONS["clamp"](recorder, x, low, high)
    return recorder.line(f"log({x.name} / (1.0 - {x.name}))", "f32", x)


def _formula(takes, text, *names):
    """A function of so many numbers, by its text."""

    @named(*names)
    def operation(recorder, *given):
        if len(given) != takes:
            raise TypeError(f"{names[0]} takes {takes} numbers, not {len(given)}")
        own = [recorder.converted(x, "f32") for x in given]
        return recorder.line(text.format(*(x.name for x in own)), "f32", *own)


_formula(1, "clamp({0} / 6.0 + 0.5, 0.0, 1.0)", "hardsigmoid")
_formula(1, "{0} * clamp({0} / 6.0 + 0.5, 0.0, 1.0)", "hardswish")
_formula(1, f"select({{0}} < 0.0, {{0}}, 0.0) - log(1.0 + exp(-{SIZE}))", "log_sigmoid", "logsigmoid")
_formula(1, f"{{0}} * tanh(max({{0}}, 0.0) + log(1.0 + exp(-{SIZE})))", "mish")
_formula(2, "sqrt({0} * {0} + {1} * {1})", "hypot")
_formula(2, "select({0} == 0.0 and {1} <= 0.0, 0.0, {0} * log({1}))", "xlogy")
_formula(2, "select({1} < 0.0, -abs({0}), abs({0}))", "copysign")
_formula(
    1,
    "select({0} < 0.0, -log(sqrt({0} * {0} + 1.0) - {0}), log(sqrt({0} * {0} + 1.0) + {0}))",
    "asinh",
    "arcsinh",
)
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


def _exponential_unit(recorder, x, alpha, exponent):
    x, alpha = (recorder.converted(recorder.operand(one), "f32") for one in (x, alpha))
    power = exponent.format(x.name, alpha.name)
    text = f"select(0.0 < {x.name}, {x.name}, {alpha.name} * (exp({power}) - 1.0))"
    return recorder.line(text, "f32", x, alpha)


@named("elu")
def _elu(recorder, x, alpha=1.0):
    return _exponential_unit(recorder, x, alpha, "{0}")


@named("celu")
def _celu(recorder, x, alpha=1.0):
    return _exponential_unit(recorder, x, alpha, "{0} / {1}")


@named("softplus")
def _softplus(recorder, x, beta=1.0, threshold=20.0):
    x, beta, threshold = (recorder.converted(recorder.operand(one), "f32") for one in (x, beta, threshold))
    times = recorder.line(f"{x.name} * {beta.name}", "f32", x, beta)
    # Beyond the threshold the rest is lost in rounding, unless the threshold is a low one.
    text = f"(max({times.name}, 0.0) + log(1.0 + exp(-{SIZE.format(times.name)}))) / {beta.name}"
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


@named("erf")
def _erf(recorder, x):
    x = recorder.converted(x, "f32")
    size = recorder.line(SIZE.format(x.name), "f32", x)
    inner = recorder.line(f"1.0 / (1.0 + 0.54 * {size.name})", "f32", size)
    beyond = f"{_polynomial(inner.name, _ERF)} * exp(-{size.name} * {size.name})"
    up = recorder.line(f"1.0 - {beyond}", "f32", inner, size)
    return recorder.line(f"select({x.name} < 0.0, -{up.name}, {up.name})", "f32", x, up)


@named("erfc")
def _erfc(recorder, x):
    return recorder.line(f"1.0 - {_erf(recorder, x).name}", "f32", x)


@named("gelu")
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


@named("atan", "arctan")
def _atan(recorder, x):
    x = recorder.converted(x, "f32")
    size = recorder.line(SIZE.format(x.name), "f32", x)
    low = recorder.line(f"select(1.0 < {size.name}, 1.0 / {size.name}, {size.name})", "f32", size)
    square = recorder.line(f"{low.name} * {low.name}", "f32", low)
    near = recorder.line(f"{low.name} * (1.0 + {_polynomial(square.name, _ATAN)})", "f32", low, square)
    up = recorder.line(
        f"select(1.0 < {size.name}, 1.5707963267948966 - {near.name}, {near.name})", "f32", near
    )
    return recorder.line(f"select({x.name} < 0.0, -{up.name}, {up.name})", "f32", x, up)


@named("atan2", "arctan2")
def _atan2(recorder, y, x):
    y, x = (recorder.converted(one, "f32") for one in (y, x))
    ratio = _atan(recorder, recorder.line(f"{y.name} / {x.name}", "f32", y, x))
    turn = f"select({y.name} < 0.0, -3.141592653589793, 3.141592653589793)"
    turned = f"{ratio.name} + select({x.name} < 0.0, {turn}, 0.0)"
    # Of 0 and 0 there is no ratio.
    return recorder.line(f"select({x.name} == 0.0 and {y.name} == 0.0, 0.0, {turned})", "f32", y, x, ratio)


@named("asin", "arcsin")
def _asin(recorder, x):
    x = recorder.converted(x, "f32")
    ratio = recorder.line(f"{x.name} / sqrt((1.0 - {x.name}) * (1.0 + {x.name}))", "f32", x)
    return _atan(recorder, ratio)


@named("acos", "arccos")
def _acos(recorder, x):
    return recorder.line(f"1.5707963267948966 - {_asin(recorder, x).name}", "f32", x)


@named("logaddexp")
def _logaddexp(recorder, a, b):
    a, b = (recorder.converted(x, "f32") for x in (a, b))
    apart = recorder.line(f"{a.name} - {b.name}", "f32", a, b)
    text = f"max({a.name}, {b.name}) + log(1.0 + exp(-{SIZE.format(apart.name)}))"
    return recorder.line(text, "f32", a, b, apart)
