"""The recorder: what a function does to recording scalars is written down as the lines of a program."""

import contextlib
import copy
import math
import numbers
import sys
from reprlib import repr as short

from . import _traced_functions  # noqa: F401  (enters its operations)
from ._checks import wants_gradient
from ._core import InputError, UnsupportedError
from ._traced import Indexed, NeedsConstant, Row, Traced, called, float_text, recorder_of, rounded
from ._traced_narrow import LIMITS, Narrow
from ._traced_operations import OPERATIONS, SHOWN, WIDE
from ._traced_rows import OF_ARRAYS, OF_ROWS

# The most run-time scalars of a program; further numbers are constants.
MOST_SCALARS = 8
# The most numbers of a row, which are computed one by one.
MOST_ELEMENTS = 64
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


class Recorder:
    """The lines of a program while a function runs."""

    def __init__(self, constants, device=None, is_score=True, extents=None):
        # Numbers, in the order in which the function names them, that are to be constants.
        self.constants = constants
        # Where a function makes tensors that ask an index for its device.
        self.device = device
        # Scores have derivatives, masks have none.
        self.is_score = is_score
        # The sequences, heads, queries and keys of a call, None of any number; and whether lines follow from
        # them.
        self.extents, self.reads_extents = extents, False
        # Of the names of arrays and scalars, so that those of two functions differ.
        self.prefix = "" if is_score else "m"
        self.lines = []
        self.known = {}
        self.arrays = {}
        self.scalars = {}
        # How many numbers there are, and which of them are scalars.
        self.numbers, self.places = 0, set()
        # Tensors made of numbers within the function, alive as long as their identities are used.
        self.made = {}
        # Tensors computed within the function: another call has others.
        self.fresh = {}
        # Of these the parts of the function's arrays, whose elements are read from the whole.
        self.parts = {}
        # Whether Python has read values of tensors, which may be others at another call.
        self.reads_values = False

    def index(self, name, axis):
        """An index of a pair, of which the call has so many."""
        made = Traced(self, name, "i32", is_natural=True)
        most = None if self.extents is None else self.extents[axis]
        made.bounds = (0, 2**31 - 1 if most is None else max(most - 1, 0))
        return made

    # Declarations.

    def number(self, value):
        """A number that the function closes over: a run-time scalar, unless Python needs its value."""
        place = self.numbers
        self.numbers += 1
        if place in self.constants or place >= MOST_SCALARS:
            return value
        if type(value) is int and not -(2**31) <= value < 2**31:
            return value
        if type(value) is float and not math.isfinite(rounded(value)):
            return value
        name = f"{self.prefix}n{place}"
        self.scalars[name] = value
        self.places.add(place)
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
        return Indexed(self, array)

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
            else:
                operand = self._from_the_start(operand, tensor.shape[axis])
            at.append(operand.name)
        loaded = self.line(f"{name}[{', '.join(at)}]", _LOADED[element])
        loaded.is_natural = element == "u8"
        dtype = str(tensor.dtype).rsplit(".", 1)[-1]
        if dtype in LIMITS:
            loaded.narrow, loaded.bounds = dtype, LIMITS[dtype]
        return loaded

    def _from_the_start(self, index, size):
        """An index that may be negative, and then counts from the end. In calls of any lengths distances are
        not taken for negative: where they are, keys are hidden."""
        if index.is_natural:
            return index
        if index.bounds is not None:
            self.reads_extents = True
            if index.bounds[0] >= 0 or self.extents is None and index.bounds[1] >= 0:
                return index
        text = f"select({index.name} < 0, {index.name} + {size}, {index.name})"
        return self.line(text, "i32", index)

    def arrays_by_name(self):
        """The arrays that the program reads."""
        return {name: tensor for name, _, tensor in self.arrays.values()}

    def is_lasting(self):
        """Whether the program follows from what the function closes over, and from no value of its arrays."""
        return not self.reads_values and not any(key in self.fresh for key in self.arrays)

    def scalars_by_name(self):
        """The values of the scalars that the program takes."""
        used = self.used()
        return {name: value for name, value in self.scalars.items() if name in used}

    # Expressions.

    def line(self, expression, kind, *operands, is_natural=False):
        """A new line, or the line of the same expression. `is_natural`: an integer that is not negative."""
        known = self.known.get(expression)
        if known is None:
            name = f"v{len(self.lines)}"
            self.lines.append((name, expression))
            scalars = set().union(*(x.scalars for x in operands)) if operands else set()
            known = self.known[expression] = Traced(self, name, kind, scalars, is_natural=is_natural)
            known.fixed = bool(operands) and all(x.fixed for x in operands)
        # Of its own, as it may be changed in place.
        return copy.copy(known)

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
            wants = wants_gradient(tensor) and element in ("f32", "f16", "bf16")
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
        if isinstance(value, Row):
            return None
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return self._fixed("true" if value else "false", "bool", bool(value))
        if isinstance(value, numbers.Integral):
            if not -(2**31) <= int(value) < 2**31:
                wide = self._fixed(float_text(float(value)), "f32", float(value))
                wide.is_wide = True
                return wide
            return self._fixed(str(int(value)), "i32", int(value))
        if isinstance(value, numbers.Real):
            return self._fixed(float_text(float(value)), "f32", float(value))
        if hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) <= 1:
            if id(value) in self.made:
                return self.operand(value.item())
            if math.prod(value.shape) == 1:
                return self._element(value)
        return None

    def _fixed(self, name, kind, value):
        is_natural = kind == "i32" and value >= 0
        traced = Traced(self, f"({name})" if name.startswith("-") else name, kind, (), value, is_natural)
        traced.fixed = True
        return traced

    def _element(self, tensor):
        """The element of an array of one."""
        place = _place_in_base(tensor, id(tensor) in self.parts)
        if place is not None:
            return self.load(*place)
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
        return self.line(f"{kind}({x.name})", kind, x, is_natural=x.kind == "bool")

    def promoted(self, *values):
        """Operands of one kind, the widest."""
        kind = max((x.kind for x in values), key=_RANK.__getitem__)
        return [self.converted(x, kind) for x in values], kind

    def operate(self, name, arguments, options):
        """What the operation of this name of Python, torch or numpy gives."""
        name = name.strip("_") if name.startswith("__") else name
        is_in_place = name.endswith("_") or options.get("inplace", False)
        options = {key: value for key, value in options.items() if key != "inplace"}
        if is_in_place:
            return self._in_place(name.rstrip("_"), arguments, options)
        name = name[8:] if name.startswith("special_") else name
        self._need_numbers_beside_arrays([*arguments, *options.values()])
        if len(arguments) == 1 and not options:
            name = {"max": "amax", "min": "amin"}.get(name, name)
        if name in OF_ROWS:
            with _named_refusal(name, arguments):
                return OF_ROWS[name](self, *arguments, **options)
        if name not in OF_ARRAYS and any(self.is_row(one) for one in arguments):
            return self._by_element(name, arguments, options)
        operation = OPERATIONS.get(name)
        if operation is None:
            traced = list(_traced_within([*arguments, *options.values()]))
            if traced and all(one.fixed for one in traced):
                # Of captured numbers alone, as torch.arange(n), or a list of them.
                raise NeedsConstant(set().union(*(one.scalars for one in traced)))
            raise UnsupportedError(
                f"`{name}` has no equivalent in a mask or score function: there are "
                + ", ".join(sorted(SHOWN))
            )
        given = []
        for argument in arguments:
            operand = self.operand(argument)
            given.append(argument if operand is None else operand)
        traced = [one for one in given if isinstance(one, Traced)]
        wide = next((one for one in traced if one.is_wide), None)
        if wide is not None and name not in WIDE and all(x.is_wide or x.kind != "f32" for x in traced):
            raise UnsupportedError(
                f"`{name}` with {int(wide.value)}: integers of a mask or score function have 32 bits"
            )
        with _named_refusal(name, arguments):
            narrow = Narrow.of(self, name, traced, options)
            if narrow is not None:
                given, options = narrow.numbers(given, options)
            made = operation(self, *given, **options)
            made = copy.copy(made) if any(made is one for one in given) else made
            return made if narrow is None else narrow.result(made)

    def _need_numbers_beside_arrays(self, arguments):
        """Python computes an array of an array and captured numbers, as t.view(n, m), of their values."""
        traced = list(_traced_within(arguments))
        if all(one.fixed for one in traced) and any(_is_whole_array(self, one) for one in arguments):
            scalars = set().union(*(one.scalars for one in traced))
            if scalars:
                raise NeedsConstant(scalars)

    def is_row(self, value):
        """Whether it is a row, or an array of one axis that is used as one."""
        if isinstance(value, (Row, Indexed)) and value.row() is not None:
            return True
        array = value._tensor if isinstance(value, Indexed) else value
        shape = getattr(array, "shape", ())
        is_short = len(shape) == 1 and 1 < shape[0] <= MOST_ELEMENTS
        return is_short and hasattr(array, "dtype") and not isinstance(value, (Traced, Row))

    def _in_place(self, name, arguments, options):
        """The operation, of which the first argument becomes the result."""
        target = arguments[0] if arguments else None
        if not isinstance(target, Traced):
            raise UnsupportedError(
                f"`{name}` changes an array in place in a mask or score function: use what it gives instead"
            )
        made = self.operate(name, arguments, options)
        if not isinstance(made, Traced) or _RANK[made.kind] > _RANK[target.kind]:
            have = made.kind if isinstance(made, Traced) else "a row"
            raise UnsupportedError(
                f"`{name}` in place gives {have} to {target.kind} in a mask or score function: use what it "
                "gives instead"
            )
        vars(target).update(vars(self.converted(made, target.kind)))
        return target

    def row(self, value):
        """The scalars of a row, or of an array of one axis; None of anything else."""
        if isinstance(value, (Row, Indexed)) and value.row() is not None:
            found = value.row()
        elif isinstance(value, (list, tuple)):
            found = [self.operand(one) for one in value]
        elif len(getattr(value, "shape", ())) == 1:
            array = value if isinstance(value, Indexed) else Indexed(self, value)
            found = [array[at] for at in range(value.shape[0])]
        else:
            return None
        if not 1 <= len(found) <= MOST_ELEMENTS:
            raise UnsupportedError(
                f"a row of {len(found)} numbers in a mask or score function: 1 to {MOST_ELEMENTS} are "
                "computed"
            )
        return None if any(one is None for one in found) else found

    def _by_element(self, name, arguments, options):
        """The operation of each element of rows, with the numbers beside them."""
        rows = [None if self.operand(one) is not None else self.row(one) for one in arguments]
        counts = {len(row) for row in rows if row is not None and len(row) > 1} or {1}
        if len(counts) > 1:
            have = " and ".join(map(str, sorted(counts)))
            raise InputError(f"`{name}` of rows of {have} numbers in a mask or score function")
        made = []
        for at in range(counts.pop()):
            own = [
                one if row is None else row[min(at, len(row) - 1)] for one, row in zip(arguments, rows)
            ]
            made.append(self.operate(name, own, options))
        return Row(self, made)


@contextlib.contextmanager
def _named_refusal(name, arguments):
    """Of an operation that does not take what it is given, the error that says so."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        shown = ", ".join(map(short, arguments))
        raise UnsupportedError(f"`{name}` cannot take ({shown}) in a mask or score function") from error


def _traced_within(values):
    """The recording scalars among values and within lists of them."""
    for one in values:
        if isinstance(one, Traced):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _traced_within(one)


def _is_whole_array(recorder, value):
    """Whether it is an array of which no element is meant yet."""
    if isinstance(value, (Traced, Row)) or not hasattr(value, "dtype"):
        return False
    return len(getattr(value, "shape", ())) > 0 and recorder.operand(value) is None


def _place_in_base(tensor, is_part):
    """(array, indices) of a tensor of one number that is an element of another, as `t[0]` is: several of
    these are read from one array. None where it is none, or has a gradient of its own, as one that is no part
    made within the function may have."""
    base = getattr(tensor, "_base", None)
    if base is None or not 1 <= base.dim() <= 4 or base.dtype != tensor.dtype or not base.is_contiguous():
        return None
    if (base.requires_grad or tensor.requires_grad) and not is_part or tensor.is_conj() or tensor.is_neg():
        return None
    rest, indices = tensor.storage_offset() - base.storage_offset(), []
    for size, stride in zip(base.shape, base.stride()):
        # That of an axis of one may be anything.
        indices.append(rest // stride if size > 1 else 0)
        rest -= indices[-1] * stride
    return base, tuple(indices)


# Functions of torch that make tensors of numbers.
_MAKERS = ("tensor", "scalar_tensor", "full", "zeros", "ones", "as_tensor")
# What tells of a tensor's form, and of none of its values.
_FORMS = set(
    "__get__ size dim ndimension numel nelement stride storage_offset element_size get_device is_contiguous "
    "is_floating_point is_complex is_signed is_conj is_neg is_tensor type __len__ __hash__ __repr__".split()
)


# What gives parts of a tensor and no more.
_OF_PARTS = ("__getitem__", "select", "unbind")


def _is_of_function(recorder, tensor):
    """Whether it is an array that the function reads, or a part of one."""
    return id(tensor) in recorder.parts or id(tensor) not in recorder.fresh


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
            # Another's, where a function is recorded while another is.
            own = recorder_of(arguments, options)
            if own is not None:
                return called(own, function, arguments, options)
            result = function(*arguments, **options)
            name = getattr(function, "__name__", "")
            if name in _MAKERS and getattr(result, "ndim", 1) == 0:
                recorder.made[id(result)] = result
                return result
            parts = result if isinstance(result, (tuple, list)) else (result,)
            computed = [x for x in parts if isinstance(x, torch.Tensor)]
            given = [x for x in arguments if isinstance(x, torch.Tensor) and id(x) not in recorder.made]
            # The array that an element belongs to is none that was computed.
            bases = {id(x._base) for x in given}
            if name in _OF_PARTS and given and _is_of_function(recorder, given[0]):
                recorder.parts.update((id(x), x) for x in computed)
            recorder.fresh.update((id(x), x) for x in computed if id(x) not in bases)
            if given and not computed and name not in _FORMS:
                recorder.reads_values = True
            return result

    with Mode():
        yield
