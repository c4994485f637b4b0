"""Functions that call jax's own: jax traces them, and the equations of their jaxpr go to the recorder."""

import contextlib
import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np

from ._core import InputError, UnsupportedError
from ._recorder import MOST_ELEMENTS
from ._traced import NeedsConstant, Traced

# Names of operations by jax's names, where they differ.
_NAMES = dict(
    max="maximum",
    min="minimum",
    integer_pow="pow",
    logistic="sigmoid",
    shift_left="lshift",
    shift_right_arithmetic="rshift",
    not_="invert",
    rem="fmod",
    is_finite="isfinite",
    stop_gradient="detach",
)
_NAMES["not"] = _NAMES.pop("not_")
_SAME = set(
    "add sub mul neg abs sign floor ceil exp exp2 log log1p expm1 tanh sqrt rsqrt pow square sin cos tan "
    "sinh cosh asin acos atan atan2 erf erfc lt le gt ge eq ne and or xor".split()
)
_REDUCTIONS = dict(
    reduce_sum="add",
    reduce_prod="mul",
    reduce_max="maximum",
    reduce_min="minimum",
    reduce_and="and",
    reduce_or="or",
)
_IDENTITIES = set("copy copy_p pvary optimization_barrier".split())
_TYPES = {
    **dict.fromkeys(("float32", "float64", "float16", "bfloat16"), "f32"),
    **dict.fromkeys(("int32", "int64"), "i32"),
    "bool": "bool",
}


class _Closed:
    """Takes the recorder's place where a function's closure is copied: its numbers in their order."""

    def __init__(self, is_score, given=None):
        self.is_score, self.given = is_score, given
        self.numbers, self.lasting = [], set()

    def number(self, value):
        self.numbers.append(value)
        return value if self.given is None else next(self.given)

    def array_proxy(self, array):
        if isinstance(array, np.ndarray):
            # Indices of jax are none for numpy.
            return jnp.asarray(array)
        self.lasting.add(id(array))
        return array


def as_jaxpr(recorder, function, arguments, copied, refusal):
    """What a function gives of its arguments. `copied` makes its copy with the numbers and arrays of a
    recorder; `refusal` says why it takes no recording scalars."""
    closed = _Closed(recorder.is_score)
    copied(closed, function)
    numbers = [recorder.number(value) for value in closed.numbers]
    scalars = [one for one in numbers if isinstance(one, Traced)]

    def called(*given):
        own, rest = given[: len(arguments)], iter(given[len(arguments) :])
        inner = (next(rest) if isinstance(one, Traced) else one for one in numbers)
        return copied(_Closed(recorder.is_score, inner), function)(*own)

    kinds = {"f32": np.float32, "i32": np.int32}
    stand_ins = [jax.ShapeDtypeStruct((), kinds[one.kind]) for one in arguments]
    try:
        traced = jax.make_jaxpr(called)(*stand_ins, *(one.value for one in scalars))
    except jax.errors.TracerArrayConversionError:
        # It calls numpy's functions as well.
        raise refusal from None
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        if scalars:
            raise NeedsConstant(set().union(*(one.scalars for one in scalars))) from error
        raise UnsupportedError(
            "a mask or score function cannot branch on its arguments, nor make arrays of their sizes: write "
            "jnp.where(c, a, b) for `if`, and & | ~ for `and`, `or`, `not`"
        ) from error
    if len(traced.out_avals) != 1 or traced.out_avals[0].shape != ():
        made = ", ".join(str(one) for one in traced.out_avals) or "nothing"
        raise InputError(f"a mask or score function gives one number: this one gives {made}")
    equations = _Equations(recorder, closed.lasting)
    (made,) = equations.run(traced.jaxpr, traced.consts, [_cell(one) for one in [*arguments, *scalars]])
    return equations.cells(made).item()


def _cell(scalar):
    cell = np.empty((), object)
    cell[()] = scalar
    return cell


class _View:
    """A part of an array: for each of its axes the index, or where it begins; and which axis each of the
    part's is, None of an axis of one element."""

    def __init__(self, array, starts=None, axes=None, shape=None):
        self.array = array
        self.starts = [0] * len(array.shape) if starts is None else starts
        self.axes = list(range(len(array.shape))) if axes is None else axes
        self.shape = tuple(array.shape) if shape is None else shape

    def indices(self, at):
        found = list(self.starts)
        for axis, place in zip(self.axes, at):
            if axis is not None:
                found[axis] += place
        return found


def _is_recorded(value):
    return isinstance(value, _View) or isinstance(value, np.ndarray) and value.dtype == object


def _is_number(value):
    return isinstance(value, (bool, int, float, np.generic))


class _Equations:
    """The equations of jaxprs. Values are arrays of recording scalars, parts of arrays that are read at
    recorded indices, numbers, or arrays of jax."""

    def __init__(self, recorder, lasting):
        self.recorder, self.lasting = recorder, lasting
        # Of results by identity: x of x < 0, (x, n) of x + n, and (x, n) of an index that counts from the end
        # of n elements where it is negative. What they are of stays alive with them.
        self.signs, self.sums, self.wrapped = {}, {}, {}

    def run(self, jaxpr, consts, given):
        known = dict(zip(jaxpr.constvars, consts))
        known.update(zip(jaxpr.invars, given))

        def value(variable):
            return np.asarray(variable.val)[()] if hasattr(variable, "val") else known[variable]

        for equation in jaxpr.eqns:
            made = self.equation(equation, [value(one) for one in equation.invars])
            known.update(zip(equation.outvars, made))
        return [value(one) for one in jaxpr.outvars]

    def equation(self, equation, given):
        name, params = equation.primitive.name, equation.params
        is_recorded = any(_is_recorded(one) for one in given)
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)
        if inner is not None and name not in ("scan", "while"):
            self.check_derivative(name, inner)
            whole = _division(inner)
            if whole is not None and is_recorded:
                return [self.by_element(whole, given, equation.outvars[0].aval)]
            jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.run(jaxpr, consts, given)
        if not is_recorded:
            return self.computed(equation, given)
        operation = getattr(self, f"_{name}", None)
        aval = equation.outvars[0].aval
        if operation is not None:
            return [operation(given, params, aval)]
        if name in _IDENTITIES:
            return list(given)
        if name in _REDUCTIONS:
            return [self.reduced(_REDUCTIONS[name], given[0], params["axes"])]
        if name in _SAME or name in _NAMES:
            more = (params["y"],) if name == "integer_pow" else ()
            return [self.by_element(_NAMES.get(name, name), [*given, *more], aval)]
        raise UnsupportedError(f"`{name}` of jax has no equivalent in a mask or score function")

    def computed(self, equation, given):
        """What follows from no argument is computed now."""
        is_fixed = all(_is_number(one) for one in given)
        with jax.ensure_compile_time_eval() if is_fixed else contextlib.nullcontext():
            made = equation.primitive.bind(*given, **equation.params)
        made = made if equation.primitive.multiple_results else [made]
        return [np.asarray(one)[()] if is_fixed and one.shape == () else one for one in made]

    def check_derivative(self, name, inner):
        """The derivative is that of what is computed: jax's own functions say so of theirs."""
        if not self.recorder.is_score or not name.startswith(("custom_jvp", "custom_vjp")):
            return
        jaxpr = getattr(inner, "jaxpr", inner)
        source = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
        if f"{os.sep}jax{os.sep}_src{os.sep}" in source:
            return
        raise UnsupportedError(
            f"a score function calls {source.split(' at ')[0] or 'a function'}, which has a derivative of "
            "its own: kernels compute that of what it computes"
        )

    # Values.

    def load(self, array, indices):
        if id(array) not in self.lasting:
            self.recorder.fresh[id(array)] = array
        return self.recorder.load(array, indices)

    def cells(self, value):
        """A value as an array of recording scalars and numbers."""
        if isinstance(value, np.ndarray) and value.dtype == object:
            return value
        if _is_number(value):
            return _cell(value)
        if getattr(value, "shape", None) == () and not isinstance(value, _View):
            if id(value) not in self.lasting:
                self.recorder.fresh[id(value)] = value
            return _cell(self.recorder.operand(value))
        count = math.prod(value.shape)
        if count > MOST_ELEMENTS:
            raise UnsupportedError(
                f"an array of {' x '.join(map(str, value.shape))} is used whole in a mask or score function: "
                f"index it, or use at most {MOST_ELEMENTS} of its elements"
            )
        view = value if isinstance(value, _View) else _View(value)
        made = np.empty(view.shape, object)
        for at in np.ndindex(*view.shape):
            made[at] = self.load(view.array, view.indices(at))
        return made

    def by_element(self, name, given, aval):
        kind = _TYPES.get(str(aval.dtype))
        if kind is None:
            raise UnsupportedError(
                f"`{name}` gives {aval.dtype} in a mask or score function: it computes int32, float32 and "
                "bool"
            )
        cells = [np.broadcast_to(self.cells(one), aval.shape) for one in given]
        made = np.empty(aval.shape, object)
        for at in np.ndindex(*aval.shape):
            made[at] = self.scalar(name, [one[at] for one in cells])
        return made

    def scalar(self, name, given):
        left, right = given[0], given[-1]
        is_first = isinstance(left, Traced) and _is_number(right) and len(given) == 2
        if name == "lt" and is_first and right == 0:
            if left.is_natural:
                return False
        options = {}
        if name == "div":
            is_int = not any(x.kind == "f32" for x in map(self.recorder.operand, given))
            options = {"rounding_mode": "trunc"} if is_int else {}
        given = [one.item() if isinstance(one, np.generic) else one for one in given]
        if not any(isinstance(one, Traced) for one in given):
            given = [self.recorder.operand(given[0]), *given[1:]]
        made = self.recorder.operate(name, tuple(given), options)
        if is_first and name == "lt" and right == 0:
            self.signs[id(made)] = (made, left)
        if is_first and name == "add":
            self.sums[id(made)] = (made, left, right)
        return made

    def reduced(self, name, value, axes):
        cells = self.cells(value)
        kept = [axis for axis in range(cells.ndim) if axis not in axes]
        flat = cells.transpose(*kept, *axes).reshape(*(cells.shape[axis] for axis in kept), -1)
        made = np.empty(flat.shape[:-1], object)
        for at in np.ndindex(*made.shape):
            if not flat.shape[-1]:
                raise UnsupportedError(f"`{name}` of no elements in a mask or score function")
            made[at] = flat[at][0]
            for one in flat[at][1:]:
                made[at] = self.scalar(name, [made[at], one])
        return made

    # Equations by jax's names.

    def _argmax(self, given, params, aval):
        return self.first(given[0], params["axes"], "gt")

    def _argmin(self, given, params, aval):
        return self.first(given[0], params["axes"], "lt")

    def first(self, value, axes, is_better):
        """Where the greatest or the least along an axis is, of equal ones the first."""
        (axis,) = axes
        cells = np.moveaxis(self.cells(value), axis, -1)
        made = np.empty(cells.shape[:-1], object)
        for at in np.ndindex(*made.shape):
            best, made[at] = cells[at][0], 0
            for place, one in enumerate(cells[at][1:], 1):
                better = self.scalar(is_better, [one, best])
                made[at] = self.recorder.operate("where", (better, place, made[at]), {})
                best = self.recorder.operate("where", (better, one, best), {})
        return made

    def _div(self, given, params, aval):
        return self.by_element("div", given, aval)

    def _round(self, given, params, aval):
        if getattr(params["rounding_method"], "name", "") != "TO_NEAREST_EVEN":
            raise UnsupportedError("`lax.round` away from zero has no equivalent in a mask or score function")
        return self.by_element("round", given, aval)

    def _clamp(self, given, params, aval):
        low, x, high = given
        return self.by_element("clamp", [x, low, high], aval)

    def _convert_element_type(self, given, params, aval):
        kind = _TYPES.get(str(aval.dtype))
        if kind is None:
            raise UnsupportedError(
                f"a number is converted to {aval.dtype} in a mask or score function: it computes int32, "
                "float32 and bool"
            )
        cells = self.cells(given[0])
        made = np.empty(cells.shape, object)
        for at in np.ndindex(*cells.shape):
            own = self.recorder.operand(cells[at])
            made[at] = self.recorder.converted(own, kind)
        return made

    def _select_n(self, given, params, aval):
        which, *cases = given
        if _is_number(which):
            return cases[int(which)]
        which, *cases = (np.broadcast_to(self.cells(one), aval.shape) for one in given)
        made = np.empty(aval.shape, object)
        for at in np.ndindex(*aval.shape):
            made[at] = self.selected(which[at], [one[at] for one in cases])
        return made

    def selected(self, which, cases):
        if _is_number(which):
            return cases[int(which)]
        if which.kind == "bool":
            made = self.recorder.operate("where", (which, cases[1], cases[0]), {})
            self.note_wrapped(made, which, cases)
            return made
        made = cases[-1]
        for at in range(len(cases) - 2, -1, -1):
            made = self.recorder.operate("where", (self.scalar("le", [which, at]), cases[at], made), {})
        return made

    def note_wrapped(self, made, which, cases):
        x = cases[0]
        _, of_sign = self.signs.get(id(which), (None, None))
        _, of_sum, size = self.sums.get(id(cases[1]), (None, None, None))
        if isinstance(x, Traced) and of_sign is x and of_sum is x:
            self.wrapped[id(made)] = (made, x, int(size))

    def _cond(self, given, params, aval):
        which, *given = given
        branches = [self.run(one.jaxpr, one.consts, given)[0] for one in params["branches"]]
        which = self.cells(which).item()
        if _is_number(which):
            return branches[int(which)]
        which = self.recorder.operand(which)
        cells = [self.cells(one) for one in branches]
        made = np.empty(aval.shape, object)
        for at in np.ndindex(*aval.shape):
            made[at] = self.selected(which, [one[at] for one in cells])
        return made

    def _squeeze(self, given, params, aval):
        axes = range(len(given[0].shape))
        return self.reshaped(given[0], [at for at in axes if at not in params["dimensions"]])

    def reshaped(self, value, axes):
        """The value with these of its axes, in this order; the others have one element."""
        if not isinstance(value, _View):
            cells = self.cells(value)
            rest = [at for at in range(cells.ndim) if at not in axes]
            return cells.transpose(*axes, *rest).reshape([cells.shape[at] for at in axes])
        own, shape = [value.axes[at] for at in axes], tuple(value.shape[at] for at in axes)
        return _View(value.array, list(value.starts), own, shape)

    def _transpose(self, given, params, aval):
        return self.reshaped(given[0], list(params["permutation"]))

    def _reshape(self, given, params, aval):
        return self.cells(given[0]).reshape(aval.shape)

    def _broadcast_in_dim(self, given, params, aval):
        cells, at = self.cells(given[0]), params["broadcast_dimensions"]
        shape = [1] * len(aval.shape)
        for axis, place in enumerate(at):
            shape[place] = cells.shape[axis]
        if math.prod(aval.shape) > MOST_ELEMENTS:
            raise UnsupportedError(
                f"an array of {' x '.join(map(str, aval.shape))} is made in a mask or score function: "
                f"{MOST_ELEMENTS} elements are the most"
            )
        return np.broadcast_to(cells.reshape(shape), aval.shape).copy()

    def _concatenate(self, given, params, aval):
        return np.concatenate([self.cells(one) for one in given], params["dimension"])

    def _stack(self, given, params, aval):
        return np.stack([self.cells(one) for one in given], params["axis"])

    def _slice(self, given, params, aval):
        steps = params["strides"] or (1,) * len(aval.shape)
        if isinstance(given[0], _View) and set(steps) == {1}:
            return self.part(given[0], list(params["start_indices"]), aval.shape)
        cells = self.cells(given[0])
        return cells[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]

    def part(self, view, begins, shape):
        starts, axes = list(view.starts), list(view.axes)
        for at, (axis, begin) in enumerate(zip(view.axes, begins)):
            if isinstance(begin, Traced):
                if axis is None or not (isinstance(starts[axis], int) and starts[axis] == 0):
                    raise UnsupportedError(
                        "a part of a part of an array is indexed in a mask or score function: index the array"
                    )
                starts[axis], axes[at] = begin, None
            elif axis is not None:
                starts[axis] += begin
        return _View(view.array, starts, axes, tuple(shape))

    def _dynamic_slice(self, given, params, aval):
        array, *begins = given
        sizes = params["slice_sizes"]
        if isinstance(array, np.ndarray) and array.dtype == object:
            raise UnsupportedError("a row of computed numbers is indexed in a mask or score function")
        view = array if isinstance(array, _View) else _View(array)
        at = []
        for begin, size, whole in zip(begins, sizes, view.shape):
            begin = self.cells(begin).item()
            if size == whole:
                # It begins at 0, wherever it is asked to.
                at.append(0)
            elif _is_number(begin):
                at.append(min(max(int(begin), 0), whole - size))
            elif size == 1:
                at.append(self.index(begin, whole))
            else:
                raise UnsupportedError(
                    f"{size} of {whole} elements from a place that varies are read in a mask or score "
                    "function: index them"
                )
        return self.part(view, at, aval.shape)

    def index(self, begin, whole):
        """An index that the recorder takes: it counts from the end where it is negative, as jax's own lines
        before say, or else is taken for 0."""
        begin = self.recorder.operand(begin)
        _, x, size = self.wrapped.get(id(begin), (None, None, None))
        if size == whole:
            return x
        return begin if begin.is_natural else self.recorder.operate("maximum", (begin, 0), {})

    def _gather(self, given, params, aval):
        array, indices = given
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        batching = getattr(numbers, "operand_batching_dims", ())
        if isinstance(array, np.ndarray) and array.dtype == object or batching:
            raise UnsupportedError("a row of computed numbers is indexed in a mask or score function")
        view = array if isinstance(array, _View) else _View(array)
        axes = [axis for axis in range(len(view.shape)) if axis not in numbers.collapsed_slice_dims]
        if any(sizes[at] not in (1, view.shape[at]) for at in range(len(sizes))):
            raise UnsupportedError("parts of an array that begin where an index says are read: index them")
        cells = self.cells(indices)
        made = np.empty(aval.shape, object)
        outer = [at for at in range(len(aval.shape)) if at not in numbers.offset_dims]
        if math.prod(aval.shape) > MOST_ELEMENTS and not outer:
            part, is_inside = self.gathered(view, cells, numbers, sizes, params)
            if is_inside is None:
                return self.reshaped(part, axes)
        for at in np.ndindex(*(aval.shape[axis] for axis in outer)):
            part, is_inside = self.gathered(view, cells[at], numbers, sizes, params)
            own = self.cells(self.reshaped(part, axes))
            for inner in np.ndindex(*own.shape):
                place = np.empty(len(aval.shape), int)
                place[outer], place[list(numbers.offset_dims)] = at, inner
                made[tuple(place)] = self.filled(own[inner], is_inside, params["fill_value"])
        return made

    def gathered(self, view, cells, numbers, sizes, params):
        """The part of an array at these indices, and whether they are inside, None where they are or are
        moved there."""
        begins, tests = [0] * len(view.shape), []
        is_filled = getattr(params["mode"], "name", "") == "FILL_OR_DROP"
        for axis, begin in zip(numbers.start_index_map, cells):
            whole = view.shape[axis]
            if sizes[axis] == whole and whole != 1:
                continue
            begin = begin.item() if isinstance(begin, np.generic) else begin
            if _is_number(begin):
                if is_filled and not 0 <= begin < whole:
                    tests.append(self.recorder.operand(False))
                begins[axis] = min(max(begin, 0), whole - 1)
                continue
            begins[axis] = self.index(begin, whole)
            if is_filled and not self.is_inside(begin, whole):
                tests += [self.scalar("ge", [begin, 0]), self.scalar("lt", [begin, whole])]
        inside = None
        for test in tests:
            inside = test if inside is None else self.recorder.operate("and", (inside, test), {})
        return self.part(view, begins, [sizes[at] for at in range(len(sizes))]), inside

    def is_inside(self, index, whole):
        if index.bounds is None or self.recorder.extents is None:
            return False
        self.recorder.reads_extents = True
        return index.bounds[0] >= 0 and index.bounds[1] < whole

    def filled(self, value, inside, fill):
        if inside is None:
            return value
        if fill is None:
            fill = {"f32": math.nan, "i32": -(2**31), "bool": True}[value.kind]
        return self.recorder.operate("where", (inside, value, np.asarray(fill).item()), {})

    def _dot_general(self, given, params, aval):
        (left, right), (of_left, of_right) = params["dimension_numbers"]
        if of_left or of_right:
            raise UnsupportedError("`dot_general` of batches has no equivalent in a mask or score function")
        a, b = (self.cells(one) for one in given)
        a = a.transpose(*(at for at in range(a.ndim) if at not in left), *left)
        b = b.transpose(*right, *(at for at in range(b.ndim) if at not in right))
        count = math.prod(a.shape[a.ndim - len(left) :])
        rows, columns = a.reshape(-1, count), b.reshape(count, -1)
        made = np.empty((len(rows), columns.shape[1]), object)
        for i, j in itertools.product(*map(range, made.shape)):
            for n in range(count):
                product = self.scalar("mul", [rows[i, n], columns[n, j]])
                made[i, j] = product if n == 0 else self.scalar("add", [made[i, j], product])
        return made.reshape(aval.shape)


# `a // b` and `a % b` of jax, each by the text of its jaxpr.
_DIVISIONS = {}


def _division(inner):
    """Which division of the language a jaxpr is, None of any other."""
    avals = getattr(inner, "in_avals", ())
    if len(avals) != 2 or any(one.shape or str(one.dtype) not in ("int32", "float32") for one in avals):
        return None
    key = tuple((str(one.dtype), one.weak_type) for one in avals)
    if key not in _DIVISIONS:
        kinds = {name: 1 if name == "int32" else 1.0 for name in ("int32", "float32")}
        like = [kinds[d] if weak else jnp.asarray(kinds[d], d) for d, weak in key]
        known = {}
        for function, name in ((jnp.floor_divide, "floordiv"), (jnp.remainder, "mod")):
            (equation,) = jax.make_jaxpr(function)(*like).eqns
            known[str(equation.params["jaxpr"])] = name
        _DIVISIONS[key] = known
    return _DIVISIONS[key].get(str(inner))
