"""Values of jaxprs whose equations are recorded: arrays of recording scalars and numbers, and parts of arrays
that are read at recorded indices."""

import math

import numpy as np

from ._core import UnsupportedError
from ._recorder import MOST_ELEMENTS
from ._traced import Traced

# What the language computes for jax's types.
TYPES = {
    **dict.fromkeys(("float32", "float64", "float16", "bfloat16"), "f32"),
    **dict.fromkeys(("int32", "int64"), "i32"),
    "bool": "bool",
}


def kind_of(aval, does):
    """The language's type for a result of jax's. `does`: what makes it, for the error."""
    kind = TYPES.get(str(aval.dtype))
    if kind is None:
        raise UnsupportedError(
            f"{does} {aval.dtype} in a mask or score function: it computes int32, float32 and bool"
        )
    return kind


def each(function, shape, *cells):
    """What a function gives of the elements of arrays, which are broadcast to the shape."""
    made, cells = np.empty(shape, object), [np.broadcast_to(one, shape) for one in cells]
    for at in np.ndindex(*shape):
        made[at] = function(*(one[at] for one in cells))
    return made


def cell_of(scalar):
    return each(lambda: scalar, ())


class View:
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


def are_cells(value):
    """Whether it is an array of recording scalars and numbers."""
    return isinstance(value, np.ndarray) and value.dtype == object


def is_recorded(value):
    return isinstance(value, View) or are_cells(value)


def is_number(value):
    return isinstance(value, (bool, int, float, np.generic))


class Values:
    """What is done to values. Those without a recorded part are numbers or arrays of jax."""

    def __init__(self, recorder, lasting):
        self.recorder, self.lasting = recorder, lasting
        # Of results by identity: x of x < 0, (x, n) of x + n, and (x, n) of an index that counts from the end
        # of n elements where it is negative. What they are of stays alive with them.
        self.signs, self.sums, self.wrapped = {}, {}, {}

    def load(self, array, indices):
        if id(array) not in self.lasting:
            self.recorder.fresh[id(array)] = array
        return self.recorder.load(array, indices)

    def cells(self, value):
        """A value as an array of recording scalars and numbers."""
        if are_cells(value):
            return value
        if is_number(value):
            return cell_of(value)
        if getattr(value, "shape", None) == () and not isinstance(value, View):
            if id(value) not in self.lasting:
                self.recorder.fresh[id(value)] = value
            return cell_of(self.recorder.operand(value))
        count = math.prod(value.shape)
        if count > MOST_ELEMENTS:
            raise UnsupportedError(
                f"an array of {' x '.join(map(str, value.shape))} is used whole in a mask or score function: "
                f"index it, or use at most {MOST_ELEMENTS} of its elements"
            )
        view = value if isinstance(value, View) else View(value)
        made = np.empty(view.shape, object)
        for at in np.ndindex(*view.shape):
            made[at] = self.load(view.array, view.indices(at))
        return made

    def by_element(self, name, given, aval):
        kind_of(aval, f"`{name}` gives")
        return each(lambda *own: self.scalar(name, own), aval.shape, *map(self.cells, given))

    def scalar(self, name, given):
        left, right = given[0], given[-1]
        is_first = isinstance(left, Traced) and is_number(right) and len(given) == 2
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

    def selected(self, which, cases):
        if is_number(which):
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

    def reshaped(self, value, axes):
        """The value with these of its axes, in this order; the others have one element."""
        if not isinstance(value, View):
            cells = self.cells(value)
            rest = [at for at in range(cells.ndim) if at not in axes]
            return cells.transpose(*axes, *rest).reshape([cells.shape[at] for at in axes])
        own, shape = [value.axes[at] for at in axes], tuple(value.shape[at] for at in axes)
        return View(value.array, list(value.starts), own, shape)

    def part(self, view, begins, shape):
        starts, axes = list(view.starts), list(view.axes)
        for at, (axis, begin) in enumerate(zip(view.axes, begins)):
            if axis is None:
                continue
            is_first = isinstance(begin, Traced) and isinstance(starts[axis], int) and starts[axis] == 0
            starts[axis] = begin if is_first else starts[axis] + begin
            if isinstance(begin, Traced):
                axes[at] = None
        return View(view.array, starts, axes, tuple(shape))

    def index(self, begin, view, at):
        """An index along an axis of a part, as the recorder takes it: along an axis of the array it counts
        from the end where it is negative, as jax's own lines before say, or else is taken for 0."""
        begin, axis, whole = self.recorder.operand(begin), view.axes[at], view.shape[at]
        if axis is not None and (view.starts[axis], view.array.shape[axis]) != (0, whole):
            return self.recorder.operate("clamp", (begin, 0, whole - 1), {})
        _, x, size = self.wrapped.get(id(begin), (None, None, None))
        if size == whole:
            return x
        return begin if begin.is_natural else self.recorder.operate("maximum", (begin, 0), {})

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
            if is_number(begin):
                if is_filled and not 0 <= begin < whole:
                    tests.append(self.recorder.operand(False))
                begins[axis] = min(max(begin, 0), whole - 1)
                continue
            begins[axis] = self.index(begin, view, axis)
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
