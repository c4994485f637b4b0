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
from ._traced_jax_values import Values, View, are_cells, cell_of, each, is_number, is_recorded, kind_of

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
    (made,) = equations.run(traced.jaxpr, traced.consts, [cell_of(one) for one in [*arguments, *scalars]])
    return equations.cells(made).item()


class _Equations(Values):
    """The equations of jaxprs, by jax's names."""

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
        has_recorded = any(is_recorded(one) for one in given)
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)
        if inner is not None and name not in ("scan", "while"):
            self.check_derivative(name, inner)
            whole = _division(inner)
            if whole is not None and has_recorded:
                return [self.by_element(whole, given, equation.outvars[0].aval)]
            jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.run(jaxpr, consts, given)
        if not has_recorded:
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
        is_fixed = all(is_number(one) for one in given)
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

    def _argmax(self, given, params, aval):
        return self.first(given[0], params["axes"], "gt")

    def _argmin(self, given, params, aval):
        return self.first(given[0], params["axes"], "lt")

    def _cumsum(self, given, params, aval):
        cells, axis = self.cells(given[0]), params["axis"]
        step = -1 if params["reverse"] else 1
        rows = np.moveaxis(cells, axis, 0)[::step].copy()
        for at in range(1, len(rows)):
            for place in np.ndindex(*rows.shape[1:]):
                rows[(at, *place)] = self.scalar("add", [rows[(at - 1, *place)], rows[(at, *place)]])
        return np.moveaxis(rows[::step], 0, axis)

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
        kind, recorder = kind_of(aval, "a number is converted to"), self.recorder
        cells = self.cells(given[0])
        return each(lambda own: recorder.converted(recorder.operand(own), kind), cells.shape, cells)

    def _select_n(self, given, params, aval):
        which, *cases = given
        if is_number(which):
            return cases[int(which)]
        return each(lambda at, *own: self.selected(at, own), aval.shape, *map(self.cells, given))

    def _cond(self, given, params, aval):
        which, *given = given
        branches = [self.run(one.jaxpr, one.consts, given)[0] for one in params["branches"]]
        return self._select_n([which, *branches], params, aval)

    def _squeeze(self, given, params, aval):
        axes = range(len(given[0].shape))
        return self.reshaped(given[0], [at for at in axes if at not in params["dimensions"]])

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
        if isinstance(given[0], View) and set(steps) == {1}:
            return self.part(given[0], list(params["start_indices"]), aval.shape)
        cells = self.cells(given[0])
        return cells[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]

    def _dynamic_slice(self, given, params, aval):
        array, *begins = given
        sizes = params["slice_sizes"]
        if are_cells(array):
            raise UnsupportedError("a row of computed numbers is indexed in a mask or score function")
        view = array if isinstance(array, View) else View(array)
        at = []
        for axis, (begin, size, whole) in enumerate(zip(begins, sizes, view.shape)):
            begin = self.cells(begin).item()
            if size == whole:
                # It begins at 0, wherever it is asked to.
                at.append(0)
            elif is_number(begin):
                at.append(min(max(int(begin), 0), whole - size))
            elif size == 1:
                at.append(self.index(begin, view, axis))
            else:
                raise UnsupportedError(
                    f"{size} of {whole} elements from a place that varies are read in a mask or score "
                    "function: index them"
                )
        return self.part(view, at, aval.shape)

    def _gather(self, given, params, aval):
        array, indices = given
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        batching = getattr(numbers, "operand_batching_dims", ())
        if are_cells(array) or batching:
            raise UnsupportedError("a row of computed numbers is indexed in a mask or score function")
        view = array if isinstance(array, View) else View(array)
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
