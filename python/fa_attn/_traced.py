"""Recording scalars: what a function does to them is written down as the lines of a program."""

import contextlib
import math
import numbers
import struct
import sys
from reprlib import repr as short

from ._core import InputError, UnsupportedError

# The most run-time scalars of a program; further numbers are constants.
MOST_SCALARS = 8
_RANK = {"bool": 0, "i32": 1, "f32": 2}
_ELEMENTS = {
    "float32": "f32",
    "float64": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i32",
    "int32": "i32",
    "int16": "i32",
    "int8": "i32",
    "uint8": "u8",
    "bool": "bool",
}
_LOADED = {"f32": "f32", "f16": "f32", "bf16": "f32", "i32": "i32", "u8": "i32", "bool": "bool"}


class NeedsConstant(Exception):
    """Python needs the value of numbers that would be run-time scalars."""

    def __init__(self, names):
        super().__init__(", ".join(sorted(map(str, names))))
        self.names = set(names)


class Recorder:
    """The lines of a program while a function runs."""

    def __init__(self, constants, device=None, prefix=""):
        # Numbers, in the order in which the function names them, that are to be constants.
        self.constants = constants
        # Where a function makes tensors that ask an index for its device.
        self.device = device
        # Of the names of arrays and scalars, so that those of two functions differ.
        self.prefix = prefix
        self.lines = []
        self.known = {}
        self.arrays = {}
        self.scalars = {}
        self.numbers = 0
        # Tensors made of numbers within the function, alive as long as their identities are used.
        self.made = {}
        # Tensors computed within the function: another call has others.
        self.fresh = {}

    # Declarations.

    def number(self, value):
        """A number that the function closes over: a run-time scalar, unless Python needs its value."""
        place = self.numbers
        self.numbers += 1
        if place in self.constants or place >= MOST_SCALARS:
            return value
        if type(value) is int and not -(2**31) <= value < 2**31:
            return value
        if type(value) is float and not math.isfinite(_rounded(value)):
            return value
        name = f"{self.prefix}n{place}"
        self.scalars[name] = value
        kind = "i32" if type(value) is int else "f32"
        return Traced(self, name, kind, scalars={place}, value=value)

    def array(self, tensor):
        """The name of an array, its kind and its axes."""
        known = self.arrays.get(id(tensor))
        if known is None:
            element = _ELEMENTS.get(str(tensor.dtype).rsplit(".", 1)[-1])
            if element is None:
                have = ", ".join(sorted(set(_ELEMENTS)))
                raise UnsupportedError(f"an array of {tensor.dtype} cannot be read: convert it to {have}")
            known = self.arrays[id(tensor)] = (f"{self.prefix}a{len(self.arrays)}", element, tensor)
        return known

    def array_proxy(self, array):
        """Stands for a numpy array, which would not let recording scalars index it."""
        return Indexed(self, array, ())

    def load(self, tensor, indices):
        """The element of an array at recording scalars and integers, one for each axis."""
        rank = len(tensor.shape)
        if not 1 <= rank <= 4:
            raise UnsupportedError(f"an array of {rank} axes is read in a mod; 1 to 4 can be")
        name, element, _ = self.array(tensor)
        at = []
        for axis, index in enumerate(indices):
            operand = self.operand(index)
            if operand is None or operand.kind != "i32":
                raise UnsupportedError(f"an array is indexed by integers in a mod, not by {short(index)}")
            if isinstance(operand.value, int) and not operand.scalars and operand.value < 0:
                operand = self.operand(operand.value + tensor.shape[axis])
            at.append(operand.name)
        return self.line(f"{name}[{', '.join(at)}]", _LOADED[element])

    def arrays_by_name(self):
        """The arrays that the program reads."""
        return {name: tensor for name, _, tensor in self.arrays.values()}

    def is_lasting(self):
        """Whether the arrays are those that the function closes over, and not made when it is called."""
        return not any(key in self.fresh for key in self.arrays)

    def scalars_by_name(self):
        """The values of the scalars that the program takes."""
        used = self.used()
        return {name: value for name, value in self.scalars.items() if name in used}

    # Expressions.

    def line(self, expression, kind, *operands):
        """A new line; the same expression is the same line."""
        known = self.known.get(expression)
        if known is None:
            name = f"v{len(self.lines)}"
            self.lines.append((name, expression))
            scalars = set().union(*(x.scalars for x in operands)) if operands else set()
            known = self.known[expression] = Traced(self, name, kind, scalars=scalars)
            known.fixed = bool(operands) and all(x.fixed for x in operands)
        return known

    def used(self):
        """The names that lines use."""
        text = " ".join(expression for _, expression in self.lines) + " " + getattr(self, "result", "")
        for mark in "()[],+-*/%<>=&|^~":
            text = text.replace(mark, " ")
        return set(text.split())

    def text(self, result, value):
        """The program that gives `value`."""
        self.result = value.name
        used = self.used()
        lines = []
        for name, element, tensor in self.arrays.values():
            wants = getattr(tensor, "requires_grad", False) and element in ("f32", "f16", "bf16")
            axes = ", ".join("_" * len(tensor.shape))
            lines.append(f"array {name}: {element}[{axes}]{' grad' if wants else ''};")
        for name, number in self.scalars.items():
            if name in used:
                lines.append(f"scalar {name}: {'i32' if type(number) is int else 'f32'};")
        lines += [f"let {name} = {expression};" for name, expression in self.lines]
        lines.append(f"{result} = {value.name};")
        return "\n".join(lines)

    def operand(self, value):
        """A value as a recording scalar; None if it cannot be one."""
        if isinstance(value, Traced):
            return value
        if isinstance(value, Indexed):
            return value.whole()
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return self._fixed("true" if value else "false", "bool", bool(value))
        if isinstance(value, numbers.Integral):
            if not -(2**31) <= int(value) < 2**31:
                return self._fixed(_float(float(value)), "f32", float(value))
            return self._fixed(str(int(value)), "i32", int(value))
        if isinstance(value, numbers.Real):
            return self._fixed(_float(float(value)), "f32", float(value))
        if hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) <= 1:
            if id(value) in self.made:
                return self.operand(value.item())
            if math.prod(value.shape) == 1:
                return self._element(value)
        return None

    def _fixed(self, name, kind, value):
        traced = Traced(self, f"({name})" if name.startswith("-") else name, kind, value=value)
        traced.fixed = True
        return traced

    def _element(self, tensor):
        """The element of an array of one."""
        if len(tensor.shape) == 0:
            known = self.known.get(("one", id(tensor)))
            if known is None:
                # A view of one axis, which has the gradient of the tensor. The tensor stays alive with it.
                known = self.known["one", id(tensor)] = (tensor.reshape(1), tensor)
            tensor = known[0]
        return self.load(tensor, (0,))

    def converted(self, x, kind):
        """A value of another kind: f32 and i32 as Python converts, bool whether it is not 0."""
        if x.kind == kind:
            return x
        if kind == "bool":
            zero = "0" if x.kind == "i32" else "0.0"
            return self.line(f"{x.name} != {zero}", "bool", x)
        return self.line(f"{kind}({x.name})", kind, x)

    def promoted(self, *values):
        """Operands of one kind, the widest."""
        kind = max((x.kind for x in values), key=_RANK.__getitem__)
        return [self.converted(x, kind) for x in values], kind

    def operate(self, name, arguments, options):
        """What the operation of this name of Python, torch or numpy gives."""
        operation = OPERATIONS.get(name.strip("_") if name.startswith("__") else name)
        if operation is None:
            traced = [one for one in [*arguments, *options.values()] if isinstance(one, Traced)]
            if traced and all(one.fixed for one in traced):
                # Of captured numbers alone, as torch.arange(n).
                raise NeedsConstant(set().union(*(one.scalars for one in traced)))
            raise UnsupportedError(
                f"`{name}` has no equivalent in a mask or score function: there are "
                + ", ".join(sorted(_SHOWN))
            )
        given = []
        for argument in arguments:
            operand = self.operand(argument)
            given.append(argument if operand is None else operand)
        try:
            return operation(self, *given, **options)
        except (TypeError, AttributeError) as error:
            shown = ", ".join(map(short, arguments))
            raise UnsupportedError(f"`{name}` cannot take ({shown}) in a mask or score function") from error


def _rounded(value):
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _float(value):
    """A number as the language writes it, rounded to f32."""
    value = _rounded(value)
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if any(mark in text for mark in ".e") else text + ".0"


class Indexed:
    """An array with the first of its indices."""

    def __init__(self, recorder, tensor, indices):
        self._recorder, self._tensor, self._indices = recorder, tensor, indices

    def __getitem__(self, indices):
        more = indices if isinstance(indices, tuple) else (indices,)
        all_indices = self._indices + more
        if len(all_indices) > len(self._tensor.shape):
            given, axes = len(all_indices), len(self._tensor.shape)
            raise InputError(f"{given} indices of an array of {axes} axes in a mod")
        if any(one is None or one is Ellipsis or isinstance(one, slice) for one in more):
            raise UnsupportedError("an array is indexed by integers in a mod, not by slices, None or ...")
        if len(all_indices) == len(self._tensor.shape):
            return self._recorder.load(self._tensor, all_indices)
        return Indexed(self._recorder, self._tensor, all_indices)

    def __getattr__(self, name):
        if name in ("shape", "dtype", "ndim", "device", "size", "dim"):
            return getattr(self._tensor, name)
        raise UnsupportedError(
            f"`{name}` of an array has no equivalent in a mask or score function: index it first"
        )

    def whole(self):
        """The element of an array of one; None of others."""
        if self._indices or math.prod(self._tensor.shape) != 1 or len(self._tensor.shape) > 1:
            return None
        return self._recorder.operand(self._tensor)


class Traced:
    """A recording scalar."""

    # Before numpy's and torch's own operators.
    __array_priority__ = 1000

    def __init__(self, recorder, name, kind, scalars=(), value=None):
        self.recorder, self.name, self.kind = recorder, name, kind
        # The captured numbers that it follows from, and whether from nothing else.
        self.scalars, self.fixed = set(scalars), bool(scalars)
        # What it is for this call, of a captured number or a constant.
        self.value = value

    def __repr__(self):
        return f"<{self.kind} of a mod>"

    def __hash__(self):
        return id(self)

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), options=None):
        return _called(_recorder_of(arguments, options or {}), function, arguments, options or {})

    def __array_ufunc__(self, function, method, *arguments, **options):
        if method != "__call__":
            name = f"{function.__name__}.{method}"
            raise UnsupportedError(f"`{name}` has no equivalent in a mask or score function")
        return self.recorder.operate(function.__name__, arguments, options)

    def __array_function__(self, function, kinds, arguments, options):
        return self.recorder.operate(function.__name__, arguments, options)

    def _known(self):
        """Python needs a value: of captured numbers it has one, if they become constants."""
        if self.fixed and self.scalars:
            raise NeedsConstant(self.scalars)
        if self.fixed and self.value is not None:
            return self.value
        raise UnsupportedError(
            "a mask or score function cannot branch on its arguments: write torch.where(c, a, b) for `if`, "
            "& | ~ for `and`, `or`, `not`, and torch's functions for math's"
        )

    def __bool__(self):
        return bool(self._known())

    def __int__(self):
        return int(self._known())

    def __float__(self):
        return float(self._known())

    __index__ = __int__

    def item(self):
        return self._known()

    # What functions ask of a tensor.

    shape = ()
    ndim = 0
    requires_grad = False

    def dim(self):
        return 0

    def size(self):
        return ()

    @property
    def device(self):
        return sys.modules["torch"].device(self.recorder.device or "cpu")

    @property
    def dtype(self):
        torch = sys.modules["torch"]
        return {"i32": torch.int32, "f32": torch.float32, "bool": torch.bool}[self.kind]

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.recorder.operate(name, (self, *arguments), options)

    def __getitem__(self, indices):
        if indices is Ellipsis or indices == ():
            return self
        raise UnsupportedError("an index or score of a mod is a scalar: it cannot be indexed")


def _operator(name, swapped=False):
    def method(self, other=None):
        if other is None:
            return self.recorder.operate(name, (self,), {})
        if self.recorder.operand(other) is None:
            if hasattr(other, "shape"):
                raise UnsupportedError(
                    f"an array of {len(other.shape)} axes is used whole in a mask or score function: index it"
                )
            return NotImplemented
        return self.recorder.operate(name, (other, self) if swapped else (self, other), {})

    return method


for _name in "add sub mul truediv floordiv mod pow lshift rshift and or xor".split():
    setattr(Traced, f"__{_name}__", _operator(_name))
    setattr(Traced, f"__r{_name}__", _operator(_name, swapped=True))
for _name in "lt le gt ge eq ne neg abs invert pos".split():
    setattr(Traced, f"__{_name}__", _operator(_name))
Traced.__pow__ = lambda self, other, modulus=None: self.recorder.operate("pow", (self, other), {})


def _recorder_of(arguments, options):
    """The recorder of the first recording scalar within arguments."""
    for one in [*arguments, *options.values()]:
        if isinstance(one, (Traced, Indexed)):
            return one.recorder if isinstance(one, Traced) else one._recorder
        if isinstance(one, (list, tuple)):
            found = _recorder_of(one, {})
            if found is not None:
                return found
    return None


def _called(recorder, function, arguments, options):
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__" and arguments and not isinstance(arguments[0], Traced):
        return Indexed(recorder, arguments[0], ())[arguments[1]]
    return recorder.operate(name, arguments, options)


# Functions of torch that make tensors of numbers.
_MAKERS = ("tensor", "scalar_tensor", "full", "zeros", "ones", "as_tensor")


@contextlib.contextmanager
def recording(recorder):
    """While a function runs, torch's tensors can be indexed by recording scalars."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, kinds, arguments=(), options=None):
            options = options or {}
            if _recorder_of(arguments, options) is not None:
                return _called(recorder, function, arguments, options)
            result = function(*arguments, **options)
            if getattr(function, "__name__", "") in _MAKERS and getattr(result, "ndim", 1) == 0:
                recorder.made[id(result)] = result
            elif isinstance(result, torch.Tensor):
                recorder.fresh[id(result)] = result
            return result

    with Mode():
        yield


# The operations, by the names that Python, torch and numpy give them.

OPERATIONS = {}
_SHOWN = set()


def _named(*names):
    def keep(operation):
        for name in names:
            OPERATIONS[name] = operation
        _SHOWN.add(names[0])
        return operation

    return keep


def _binary(symbol, *names, kinds=("i32", "f32")):
    @_named(*names)
    def operation(recorder, a, b, alpha=1):
        if alpha != 1:
            b = OPERATIONS["mul"](recorder, b, recorder.operand(alpha))
        (a, b), kind = recorder.promoted(a, b)
        if kind not in kinds:
            a, b = (recorder.converted(x, "i32") for x in (a, b))
            kind = "i32"
        return recorder.line(f"{a.name} {symbol} {b.name}", kind, a, b)


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


_binary("+", "add", "add_")
_binary("-", "sub", "subtract", "sub_")
_binary("*", "mul", "multiply", "mul_")
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
_function("max(X, 0.0) + log(1.0 + exp(-abs(X)))", "softplus")
_function("X * sigmoid(X)", "silu")


@_named("rsub")
def _rsub(recorder, a, b):
    return OPERATIONS["sub"](recorder, b, a)


@_named("neg", "negative")
def _neg(recorder, x):
    x = recorder.converted(x, "i32") if x.kind == "bool" else x
    return recorder.line(f"-{x.name}", x.kind, x)


@_named("pos", "positive", "clone", "detach", "contiguous", "squeeze", "view", "reshape")
def _same(recorder, x, *_):
    return x


@_named("abs", "absolute", "fabs")
def _abs(recorder, x):
    return recorder.line(f"abs({x.name})", x.kind, x)


@_named("square")
def _square(recorder, x):
    return OPERATIONS["mul"](recorder, x, x)


@_named("invert", "bitwise_not")
def _invert(recorder, x):
    return recorder.line(f"~{x.name}", x.kind, x)


@_named("logical_not")
def _logical_not(recorder, x):
    return _invert(recorder, recorder.converted(x, "bool"))


@_named("div", "truediv", "true_divide", "divide", "div_")
def _div(recorder, a, b, rounding_mode=None):
    if rounding_mode == "floor":
        return _floordiv(recorder, a, b)
    a, b = (recorder.converted(x, "f32") for x in (a, b))
    ratio = recorder.line(f"{a.name} / {b.name}", "f32", a, b)
    if rounding_mode == "trunc":
        return _trunc(recorder, ratio)
    return ratio


def _divisor(recorder, x):
    """A divisor that the language takes: a positive constant, a scalar, or what is at least 1."""
    if x.fixed and x.scalars and x.name not in recorder.scalars:
        raise NeedsConstant(x.scalars)
    if x.fixed and x.value is not None and x.value <= 0:
        if x.scalars:
            raise NeedsConstant(x.scalars)
        raise UnsupportedError(f"integers are divided by positive ones, not by {x.value}")
    if x.fixed:
        return x
    return recorder.line(f"max({x.name}, 1)", "i32", x)


@_named("floordiv", "floor_divide")
def _floordiv(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        return recorder.line(f"floor({a.name} / {b.name})", "f32", a, b)
    b = _divisor(recorder, b)
    return recorder.line(f"{a.name} // {b.name}", "i32", a, b)


@_named("mod", "remainder")
def _mod(recorder, a, b):
    (a, b), kind = recorder.promoted(a, b)
    if kind == "f32":
        return recorder.line(f"{a.name} - floor({a.name} / {b.name}) * {b.name}", "f32", a, b)
    b = _divisor(recorder, b)
    return recorder.line(f"{a.name} % {b.name}", "i32", a, b)


@_named("pow", "power", "float_power")
def _pow(recorder, a, b):
    if b.scalars:
        raise NeedsConstant(b.scalars)
    if b.value is None:
        if a.value is not None and a.value < 0:
            raise UnsupportedError(f"a power of {a.value} with an exponent that varies is not computed")
        # The language has constant exponents.
        a, b = (recorder.converted(x, "f32") for x in (a, b))
        return recorder.line(f"exp2({b.name} * log2({a.name}))", "f32", a, b)
    if a.kind != "f32" and b.kind == "i32" and 0 < b.value <= 8:
        return recorder.line(" * ".join([a.name] * b.value), "i32", a)
    a = recorder.converted(a, "f32")
    exponent = _float(float(b.value))
    return recorder.line(f"pow({a.name}, {exponent})", "f32", a)


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


@_named("sign", "sgn")
def _sign(recorder, x):
    zero, one = ("0", "1") if x.kind == "i32" else ("0.0", "1.0")
    text = f"select({zero} < {x.name}, {one}, select({x.name} < {zero}, -{one}, {zero}))"
    return recorder.line(text, x.kind, x)


def _extreme(function, *names):
    @_named(*names)
    def operation(recorder, a, b):
        (a, b), kind = recorder.promoted(a, b)
        if kind == "bool":
            symbol = "and" if function == "min" else "or"
            return recorder.line(f"{a.name} {symbol} {b.name}", "bool", a, b)
        return recorder.line(f"{function}({a.name}, {b.name})", kind, a, b)


_extreme("min", "minimum", "min")
_extreme("max", "maximum", "max")


@_named("clamp", "clip", "clamp_")
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
def _relu(recorder, x, inplace=False):
    return _clamp(recorder, x, low=0)


@_named("where")
def _where(recorder, condition, a, b):
    (a, b), kind = recorder.promoted(a, b)
    condition = recorder.converted(condition, "bool")
    return recorder.line(f"select({condition.name}, {a.name}, {b.name})", kind, condition, a, b)


@_named("masked_fill")
def _masked_fill(recorder, x, condition, value):
    return recorder.converted(_where(recorder, condition, value, x), x.kind)


@_named("isnan")
def _isnan(recorder, x):
    return recorder.line(f"{x.name} != {x.name}", "bool", x)


@_named("isinf")
def _isinf(recorder, x):
    return recorder.line(f"abs({x.name}) == inf", "bool", x)


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
