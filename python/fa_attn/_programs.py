"""Masks and modifications of scores as programs: from text, or traced from a Python function.

A function is called once with recording scalars in place of its arguments. What it does to them is written
down as the text of a program (docs/programs.md); the arrays that it indexes and the numbers that it closes
over become the program's arrays and run-time scalars, so that other contents and other numbers compile
nothing.
"""

import dis
import functools
import inspect
import json
import sys
import types
import weakref
from reprlib import repr as short

from ._checks import check_unmasked, wants_gradient
from ._core import InputError, UnsupportedError
from ._core import program as _described
from ._core import program_eval as _evaluated
from ._own_derivatives import is_autograd_function, of_function
from ._recorder import Recorder, recording
from ._traced import NeedsConstant, Traced

_MASK = ("b", "h", "q", "k")
_SCORE = ("s", *_MASK)


class Program:
    """A mask, a modification of scores, weights of probabilities, or several of these.

    text: the canonical text. arrays and scalars: what a call passes, by name. mask, score, weight: which it
    has.
    gradients: the names of arrays that want a gradient. description: what fa_attn knows of it.
    """

    def __init__(self, text, arrays=None, scalars=None):
        description = description_of(text)
        self.description = description
        self.text = description["text"]
        self.mask, self.score = description["mask"], description["score"]
        self.weight = description["weight"]
        self.arrays = _by_name("array", description["arrays"], arrays or {})
        for array in self.arrays.values():
            check_unmasked(type(array))
        self.scalars = _by_name("scalar", description["scalars"], scalars or {})
        for scalar in description["scalars"]:
            _check_scalar(scalar, self.scalars[scalar["name"]])
        # Whether a function need not be traced again while it closes over the same arrays and numbers.
        self.is_lasting = True
        # Those of the calls that it is for, where it follows from them.
        self.extents = None
        self.gradients = [array["name"] for array in description["arrays"] if array["gradient"]]

    def __repr__(self):
        return f"Program({self.text!r})"

    def __eq__(self, other):
        return isinstance(other, Program) and self.text == other.text

    def __hash__(self):
        return hash(self.text)

    @classmethod
    def of_mask(cls, function, device=None, extents=None):
        """The program of a text, or of a function (b, h, q_idx, kv_idx): whether a key is visible.

        device: where the function makes tensors that ask an index for its device. extents: the sequences,
        heads, queries and keys of the call, None of any number. An index of an array that they leave negative
        counts from the array's end, as in Python."""
        return cls._of(function, "mask", _MASK, device, extents)

    @classmethod
    def of_score(cls, function, device=None, extents=None):
        """The program of a text, or of a function (score, b, h, q_idx, kv_idx): a score."""
        return cls._of(function, "score", _SCORE, device, extents)

    @classmethod
    def _of(cls, function, result, names, device, extents):
        if isinstance(function, Program):
            program = function
        elif isinstance(function, str):
            program = cls(function)
        elif callable(function):
            program = _kept(function, result, names, device, extents)
        else:
            raise InputError(f"{result}_mod is a function, a text or a Program, not {short(function)}")
        # A score that is -inf somewhere is a mask, too.
        if result == "mask" and (program.score or not program.mask):
            raise InputError(f"mask_mod is no mask alone: {short(program.text)}")
        return program

    def evaluate(self, points):
        """(visible, score, slope) at each of the points (s, b, h, hk, q, k, sq, sk, off), in f64."""
        arrays = []
        for array in self.description["arrays"]:
            arrays.append(bytes_of(self.arrays[array["name"]], array["element"]))
        scalars = [float(self.scalars[scalar["name"]]) for scalar in self.description["scalars"]]
        return _evaluated(self.text, arrays, scalars, [(float(s), [int(x) for x in at]) for s, *at in points])


def description_of(text):
    """What the extension module says of a program."""
    return json.loads(_described(text))


# Called by torch.compile where it traces, not traced.
description_of._dynamo_marked_constant = True


def _by_name(what, declared, given):
    names = [one["name"] for one in declared]
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has no {', '.join(map(str, unknown))}"
        has = ", ".join(names) or "none"
        raise InputError(f"the program's {what}s are {has}: the call {wrong}")
    return {name: given[name] for name in names}


def _check_scalar(scalar, value):
    name, is_int = scalar["name"], scalar["type"] == "i32"
    kinds = int if is_int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InputError(f"the scalar {name} is of {scalar['type']}, not {short(value)}")
    if is_int and not -(2**31) <= value < 2**31:
        raise InputError(f"the scalar {name} does not fit 32 bits: {value}")
    if scalar["positive"] and value <= 0:
        raise InputError(f"the scalar {name} divides, and has to be positive, not {value}")


def bytes_of(array, element):
    """The bytes of an array's elements, contiguous, and its extents."""
    import numpy as np

    if element == "bits":
        words = np.ascontiguousarray(array, dtype=np.uint32)
        return words.tobytes(), [*words.shape[:-1], words.shape[-1] * 32]
    if hasattr(array, "detach"):
        torch = sys.modules["torch"]
        array = array.detach().cpu().contiguous()
        if element == "bf16":
            return array.to(torch.bfloat16).view(torch.int16).numpy().tobytes(), list(array.shape)
        array = array.numpy()
    kinds = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "u8": np.uint8, "bool": np.bool_}
    if element not in kinds:
        raise UnsupportedError(f"arrays of {element} are evaluated from torch's tensors only")
    array = np.ascontiguousarray(array, dtype=kinds[element])
    return array.tobytes(), list(array.shape)


# Programs by the function that they were traced from, each with what the function closed over.
_PROGRAMS = weakref.WeakKeyDictionary()


def _kept(function, result, names, device, extents):
    """The program of a function, traced again where it closes over other arrays, numbers or functions."""
    found = _closed_over(function, set()) if isinstance(function, types.FunctionType) else None
    if found is None:
        return _traced(function, result, names, device, extents)
    key = (result, str(device), extents is None, *found)
    kept = _PROGRAMS.get(function)
    if kept is not None and kept[0] == key and kept[1].extents in (None, extents):
        return kept[1]
    program = _traced(function, result, names, device, extents)
    if program.is_lasting:
        _PROGRAMS[function] = (key, program)
    return program


def not_compiled(disable):
    """torch.compile calls it between two graphs, and does not trace it: numbers and arrays may be others each
    time."""
    global _kept
    if not hasattr(_kept, "__wrapped__"):
        _kept = disable(_kept)


def _closed_over(function, seen):
    """What a program of a function follows from: numbers by value, arrays by identity; None where it cannot
    be told, as of an object whose attributes may change."""
    if id(function) in seen:
        return ()
    seen.add(id(function))
    names = _names_of(function.__code__)
    found = [id(function.__code__)]
    for value in _values_of(function):
        part = _told(value, seen, names)
        if part is None:
            return None
        found.append(part)
    return tuple(found)


def _values_of(function):
    """What a function closes over, has as defaults and reads by global names."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    own = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return own + list(_globals_of(function).values())


def _told(value, seen, names):
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value).__name__, repr(value)
    if "jax" in sys.modules and isinstance(value, sys.modules["jax"].core.Tracer):
        # Of one trace: another call has another.
        return None
    if isinstance(value, types.BuiltinFunctionType) or hasattr(value, "__dlpack__"):
        return id(value), wants_gradient(value)
    if isinstance(value, (types.ModuleType, type)):
        return _told_parts(value, seen, names)
    if isinstance(value, types.FunctionType):
        own = (value.__module__ or "").split(".")[0] in ("torch", "numpy", "transformers")
        return id(value) if own and not value.__closure__ else _closed_over(value, seen)
    if type(value) in (list, tuple) and len(value) <= 64:
        parts = [_told(one, seen, names) for one in value]
        return None if None in parts else tuple(parts)
    return None


# Modules and classes of these change no attribute that a function reads.
_FIXED = "builtins functools math operator fa_attn jax numpy torch transformers".split()


def _told_parts(value, seen, names):
    """A module by what the code, whose names these are, can read of it. What a class's functions read is not
    among the names."""
    is_module = isinstance(value, types.ModuleType)
    home = value.__name__ if is_module else value.__module__
    if home.split(".")[0] in _FIXED:
        return id(value)
    key = (id(value), *names)
    if not is_module or key in seen:
        return () if is_module else None
    seen.add(key)
    parts = [_told(getattr(value, name), seen, names) for name in names if hasattr(value, name)]
    return None if None in parts else (id(value), *parts)


def _is_filled(cell):
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _traced(function, result, names, device, extents):
    constants, of_jax = set(), None
    while True:
        recorder = Recorder(constants, device, result == "score", extents)
        try:
            text = _text_of(recorder, function, result, names, of_jax)
            break
        except _OfJax as found:
            constants, of_jax = set(), found
        except NeedsConstant as needed:
            # Each turn makes at least one number a constant.
            if not needed.names - constants:
                raise InputError(f"the number of {result}_mod cannot be traced: {needed}") from None
            constants |= needed.names
    program = Program(text, recorder.arrays_by_name(), recorder.scalars_by_name())
    program.is_lasting = recorder.is_lasting()
    program.extents = extents if recorder.reads_extents else None
    return program


class _OfJax(Exception):
    """A function calls jax's, which take no recording scalars: jax traces it."""


def _text_of(recorder, function, result, names, of_jax):
    score = [Traced(recorder, "s", "f32")] if names == _SCORE else []
    arguments = [*score, *(recorder.index(name, axis) for axis, name in enumerate(_MASK))]
    _check_signature(function, result, names)
    if of_jax is None:
        value = _called(recorder, function, result, arguments)
    else:
        from ._traced_jaxprs import as_jaxpr

        copied = functools.partial(_with_recorded, seen=set())
        value = as_jaxpr(recorder, function, arguments, copied, of_jax.__cause__)
    value = recorder.operand(value)
    if value is None:
        raise UnsupportedError(f"{result}_mod returns neither a number nor a truth value")
    kind = "bool" if result == "mask" else "f32"
    if value.kind != kind:
        if result == "mask" and value.kind != "i32":
            raise InputError(f"{result}_mod returns {value.kind}, and a mask is a truth value")
        value = recorder.converted(value, kind)
    return recorder.text(result, value)


def _called(recorder, function, result, arguments):
    """What a function gives of recording scalars."""
    with recording(recorder):
        try:
            return recorder.operand(_with_recorded(recorder, function, set())(*arguments))
        except (TypeError, ValueError, IndexError, AttributeError, UnsupportedError) as error:
            is_of_type = isinstance(error, TypeError)
            # Jax names the type that it does not take.
            is_named = is_of_type and "fa_attn._traced." in str(error)
            if "jax" in sys.modules and (is_named or _reads_jax(function, set())):
                raise _OfJax from error
            if is_of_type and recorder.places:
                # Torch takes some arguments of tensors as integers only, as sizes are.
                raise NeedsConstant(recorder.places) from error
            if is_of_type and "(got Indexed)" in str(error):
                raise UnsupportedError(
                    f"{result}_mod makes a tensor of an array of numpy: make it outside of the function"
                ) from error
            raise


def _reads_jax(function, seen):
    """Whether a function closes over a module, a function or an array of jax, or reads one by a global
    name."""
    function = getattr(function, "__func__", getattr(function, "func", function))
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    for value in _values_of(function):
        if isinstance(value, types.ModuleType):
            home = value.__name__
        else:
            home = getattr(value, "__module__", None) if callable(value) else type(value).__module__
        if str(home).split(".")[0] in ("jax", "jaxlib") or _reads_jax(value, seen):
            return True
    return False


def takes(function, count):
    """Whether a function can be called with so many arguments; one without a signature can."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        pass
    return True


def _check_signature(function, result, names):
    if not takes(function, len(names)):
        taken = "(b, h, q_idx, kv_idx)" if result == "mask" else "(score, b, h, q_idx, kv_idx)"
        raise InputError(f"{result}_mod takes {taken}")


def _with_recorded(recorder, function, seen):
    """The function with the numbers and arrays recorded that it closes over or reads by global names."""
    if isinstance(function, functools.partial):
        parts = [_recorded(recorder, part, seen) for part in function.args]
        named = {name: _recorded(recorder, part, seen) for name, part in function.keywords.items()}
        return functools.partial(_with_recorded(recorder, function.func, seen), *parts, **named)
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_recorded(recorder, function.__func__, seen), function.__self__)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return function
    seen = seen | {id(function)}
    cells = tuple(_cell(recorder, cell, seen) for cell in function.__closure__ or ())
    defaults = function.__defaults__
    defaults = defaults and tuple(_recorded(recorder, one, seen) for one in defaults)
    named = function.__kwdefaults__ and {
        name: _recorded(recorder, one, seen) for name, one in function.__kwdefaults__.items()
    }
    scope = function.__globals__
    # Libraries read numbers of their own by global names.
    if not function.__module__ or function.__module__.split(".")[0] not in ("torch", "numpy", "transformers"):
        own = _globals_of(function)
        new = {name: _recorded(recorder, value, seen) for name, value in own.items()}
        if any(new[name] is not own[name] for name in own):
            scope = {**scope, **new}
    copy = types.FunctionType(function.__code__, scope, function.__name__, defaults, cells)
    copy.__kwdefaults__ = named
    return copy


@functools.lru_cache(maxsize=1024)
def _names_of(code):
    """The global names of a function's code, its attributes, and those of functions within, in order."""
    return sorted(set(code.co_names).union(*(_names_of(one) for one in _codes_within(code))))


@functools.lru_cache(maxsize=1024)
def _global_names_of(code):
    """Of these the global names."""
    read = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return sorted(read.union(*(_global_names_of(one) for one in _codes_within(code))))


def _codes_within(code):
    return [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _globals_of(function):
    """What a function reads by global names."""
    scope = function.__globals__
    return {name: scope[name] for name in _global_names_of(function.__code__) if name in scope}


def _cell(recorder, cell, seen):
    try:
        content = cell.cell_contents
    except ValueError:
        return cell
    new = _recorded(recorder, content, seen)
    return cell if new is content else types.CellType(new)


def _recorded(recorder, value, seen):
    if isinstance(value, bool) or value is None:
        return value
    if type(value) in (int, float):
        return recorder.number(value)
    if hasattr(value, "__dlpack__") and not type(value).__module__.startswith("torch"):
        return recorder.array_proxy(value)
    if recorder.is_score and is_autograd_function(value):
        return of_function(value, lambda function: _traced(function, "score", _SCORE, None, None))
    if isinstance(value, (types.FunctionType, functools.partial, types.MethodType)):
        return _with_recorded(recorder, value, seen)
    if type(value) in (list, tuple) and value and len(value) <= 64:
        new = [_recorded(recorder, one, seen) for one in value]
        return value if all(a is b for a, b in zip(new, value)) else type(value)(new)
    return value
