"""What stands for scalars and arrays while a function is recorded: all that is done to them goes to the
recorder."""

import math
import struct
import sys

from ._core import InputError, UnsupportedError


class NeedsConstant(Exception):
    """Python needs the value of numbers that would be run-time scalars."""

    def __init__(self, names):
        super().__init__(", ".join(sorted(map(str, names))))
        self.names = set(names)


def rounded(value):
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def float_text(value):
    """A number as the language writes it, rounded to f32."""
    value = rounded(value)
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if any(mark in text for mark in ".e") else text + ".0"


@classmethod
def _torch_function(_, function, kinds, arguments=(), options=None):
    return called(recorder_of(arguments, options or {}), function, arguments, options or {})


def _method(recorder, name, own):
    """The method of this name of a recording scalar or row."""
    return lambda *others, **options: recorder.operate(name, _in_order(name, (own, *others)), options)


def _in_order(name, arguments):
    """A method's arguments as the function of its name takes them: `x.where(c, y)` is `where(c, x, y)`."""
    if name == "where" and len(arguments) == 3:
        own, condition, other = arguments
        return condition, own, other
    return arguments


class Row:
    """Recording scalars side by side, as `t[q]` of an array of two axes gives: computed one by one."""

    __array_priority__ = 1000

    def __init__(self, recorder, elements):
        self._recorder, self.elements = recorder, elements

    def __getitem__(self, index):
        part = self.elements[index]
        return Row(self._recorder, part) if isinstance(index, slice) else part

    def __len__(self):
        return len(self.elements)

    def __iter__(self):
        return iter(self.elements)

    @property
    def shape(self):
        return (len(self),)

    def row(self):
        return self.elements

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return _method(self._recorder, name, self)

    __torch_function__ = _torch_function

    def __array_ufunc__(self, function, method, *arguments, **options):
        return Traced.__array_ufunc__(self, function, method, *arguments, **options)

    @property
    def recorder(self):
        return self._recorder


class Indexed:
    """An array of which some axes have their index: None where an axis has none yet."""

    def __init__(self, recorder, tensor, indices=None):
        self._recorder, self._tensor = recorder, tensor
        self._indices = (None,) * len(tensor.shape) if indices is None else indices

    def __getitem__(self, indices):
        more = indices if isinstance(indices, tuple) else (indices,)
        is_open = [at for at, index in enumerate(self._indices) if index is None]
        if any(one is Ellipsis for one in more):
            at = next(place for place, one in enumerate(more) if one is Ellipsis)
            rest = max(len(is_open) - len(more) + 1, 0)
            more = (*more[:at], *(slice(None),) * rest, *more[at + 1 :])
        if len(more) > len(is_open):
            given, axes = len(self._tensor.shape) - len(is_open) + len(more), len(self._tensor.shape)
            raise InputError(f"{given} indices of an array of {axes} axes in a mod")
        if any(one is None or isinstance(one, slice) and not _is_whole(one) for one in more):
            raise UnsupportedError(
                "an array is indexed by integers, `:` and `...` in a mod, not by slices or None"
            )
        found = list(self._indices)
        for at, index in zip(is_open, more):
            found[at] = None if isinstance(index, slice) else index
        if all(index is not None for index in found):
            return self._recorder.load(self._tensor, found)
        return Indexed(self._recorder, self._tensor, tuple(found))

    def __getattr__(self, name):
        if name in ("shape", "dtype", "ndim", "device", "size", "dim"):
            return getattr(self._tensor, name)
        if name.startswith("_"):
            raise AttributeError(name)
        if self.row() is not None:
            return _method(self._recorder, name, self)
        raise UnsupportedError(
            f"`{name}` of an array has no equivalent in a mask or score function: index it first, or compute "
            "it before"
        )

    __torch_function__ = _torch_function

    def __len__(self):
        return next(size for size, at in zip(self._tensor.shape, self._indices) if at is None)

    def __iter__(self):
        """The parts along the first axis without an index."""
        return (self[at] for at in range(len(self)))

    def row(self):
        """The elements, where one axis is left and others have their indices; else None."""
        is_row = sum(index is None for index in self._indices) == 1 and len(self._indices) > 1
        return list(self) if is_row else None

    def whole(self):
        """The element of an array of one; None of others."""
        is_open = all(index is None for index in self._indices)
        if not is_open or len(self._indices) > 1 or math.prod(self._tensor.shape) != 1:
            return None
        return self._recorder.operand(self._tensor)

    def refuse(self):
        raise UnsupportedError(_whole(self))


def _is_whole(axis):
    return axis.start is axis.stop is axis.step is None


def _whole(array):
    """What is wrong with an array where a scalar belongs."""
    if isinstance(array, Indexed):
        given = sum(index is not None for index in array._indices)
        if given:
            return (
                f"an array of {len(array._indices)} axes is used with {given} of its indices in a mask or "
                "score function: index it to a scalar"
            )
        array = array._tensor
    return f"an array of {len(array.shape)} axes is used whole in a mask or score function: index it"


class Traced:
    """A recording scalar."""

    # Before numpy's and torch's own operators.
    __array_priority__ = 1000

    def __init__(self, recorder, name, kind, scalars=(), value=None, is_natural=False):
        self.recorder, self.name, self.kind = recorder, name, kind
        # The captured numbers that it follows from, and whether from nothing else.
        self.scalars, self.fixed = set(scalars), bool(scalars)
        # What it is for this call, of a captured number or a constant.
        self.value = value
        # Whether it is an integer that is known not to be negative.
        self.is_natural = is_natural
        # Whether it is a constant integer of more than 32 bits, written as a number.
        self.is_wide = False
        # The type of an integer of fewer than 32 bits, in which it is computed with others of that type and
        # with Python's numbers.
        self.narrow = None
        # The least and the largest that an integer can be, where that is known.
        self.bounds = (value, value) if kind == "i32" and type(value) is int else None

    def __repr__(self):
        return f"<{self.kind} of a mod>"

    def __hash__(self):
        return id(self)

    __torch_function__ = _torch_function

    def __array_ufunc__(self, function, method, *arguments, **options):
        if method != "__call__":
            name = f"{function.__name__}.{method}"
            raise UnsupportedError(f"`{name}` has no equivalent in a mask or score function")
        return self.recorder.operate(function.__name__, arguments, options)

    def __array_function__(self, function, kinds, arguments, options):
        if function.__name__ in ("shape", "ndim"):
            # Jax asks where torch is loaded, too, before it refuses the type.
            return getattr(self, function.__name__)
        return self.recorder.operate(function.__name__, arguments, options)

    def _known(self):
        """Python needs a value: of captured numbers it has one, if they become constants."""
        if self.fixed and self.scalars:
            raise NeedsConstant(self.scalars)
        if self.fixed and self.value is not None:
            return self.value
        raise UnsupportedError(
            "a mask or score function cannot branch on its arguments, nor take their values (float, int): "
            "write torch.where(c, a, b) for `if`, & | ~ for `and`, `or`, `not`, and torch's functions for "
            "math's"
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
        torch = sys.modules.get("torch")
        if torch is None:
            raise AttributeError("dtype")
        if self.narrow is not None:
            return getattr(torch, self.narrow)
        return {"i32": torch.int32, "f32": torch.float32, "bool": torch.bool}[self.kind]

    def __getattr__(self, name):
        if name.startswith("_") or name == "dtype":
            raise AttributeError(name)
        return _method(self.recorder, name, self)

    def __getitem__(self, indices):
        if indices is Ellipsis or indices == ():
            return self
        raise UnsupportedError("an index or score of a mod is a scalar: it cannot be indexed")


def _operator(name, swapped=False):
    def method(self, other=None):
        if other is None:
            return self.recorder.operate(name, (self,), {})
        if self.recorder.is_row(other):
            return self.recorder.operate(name, (other, self) if swapped else (self, other), {})
        if self.recorder.operand(other) is None:
            if hasattr(other, "shape"):
                raise UnsupportedError(_whole(other))
            return NotImplemented
        return self.recorder.operate(name, (other, self) if swapped else (self, other), {})

    return method


def _of_array(self):
    """What an operator takes of an array: a row, or a scalar where the array has one element."""
    own = self if self._recorder.is_row(self) else self.whole()
    return self.refuse() if own is None else own


def _array_operator(name, swapped=False):
    def method(self, *others):
        own = (_of_array(self), *others)
        return self._recorder.operate(name, own[::-1] if swapped else own, {})

    return method


for _name in "add sub mul truediv floordiv mod pow lshift rshift and or xor matmul".split():
    setattr(Traced, f"__{_name}__", _operator(_name))
    setattr(Traced, f"__r{_name}__", _operator(_name, swapped=True))
    for _of in (Row, Indexed):
        setattr(_of, f"__{_name}__", _array_operator(_name))
        setattr(_of, f"__r{_name}__", _array_operator(_name, swapped=True))
for _name in "lt le gt ge eq ne neg abs invert pos".split():
    setattr(Traced, f"__{_name}__", _operator(_name))
    for _of in (Row, Indexed):
        setattr(_of, f"__{_name}__", _array_operator(_name))
Traced.__pow__ = lambda self, other, modulus=None: self.recorder.operate("pow", (self, other), {})


def recorder_of(arguments, options):
    """The recorder of the first recording scalar within arguments."""
    for one in [*arguments, *options.values()]:
        if isinstance(one, (Traced, Row, Indexed)):
            return one._recorder if isinstance(one, Indexed) else one.recorder
        if isinstance(one, (list, tuple)):
            found = recorder_of(one, {})
            if found is not None:
                return found
    return None


def _custom(recorder, operator):
    """What an operator of another library computes, where that is a function of Python."""
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(operator)
    if found is None and _is_torchs(recorder, operator):
        name = operator.split("::")[1]
        return lambda *given, **options: recorder.operate(name, given, options)
    if found is None or recorder.is_score and found._backward_fn is not None:
        has = "is no function of Python" if found is None else "has a backward of its own"
        raise UnsupportedError(
            f"a mask or score function calls {operator}, which {has}: write what it computes in torch's "
            "operations"
        )
    return found._init_fn


def _is_torchs(recorder, operator):
    """Whether an operator of one number computes torch's function of its name, to a few bits of 16."""
    torch, (library, name) = sys.modules["torch"], operator.split("::")
    own, theirs = getattr(getattr(torch.ops, library), name), getattr(torch, name, None)
    points = torch.linspace(-8.0, 8.0, 257, device=recorder.device or "cpu")
    try:
        made, want = own(points), theirs(points)
        return torch.allclose(made, want, rtol=2e-3, atol=1e-5, equal_nan=True)
    except (RuntimeError, TypeError):
        return False


def called(recorder, function, arguments, options):
    name = getattr(function, "__name__", str(function))
    # Operators of torch.ops, and their overloads.
    operator = getattr(function, "_qualified_op_name", None) or getattr(
        getattr(function, "_schema", None), "name", ""
    )
    if "::" in operator:
        library, name = operator.split("::")[:2]
        if library != "aten":
            return _custom(recorder, operator)(*arguments, **options)
    if name == "__getitem__" and arguments and not isinstance(arguments[0], Traced):
        array = arguments[0]
        return (array if isinstance(array, Indexed) else Indexed(recorder, array))[arguments[1]]
    if type(function).__name__ == "method_descriptor":
        arguments = _in_order(name, arguments)
    return recorder.operate(name, arguments, options)
