"""The operations of recorded functions that take rows and arrays."""

from ._core import InputError, UnsupportedError
from ._traced import Indexed, Row, Traced
from ._traced_operations import OPERATIONS, SHOWN, named

# Those that make one scalar of a row, or a row of scalars.
OF_ROWS = {}
# Those that look through an array, or take an element of one.
OF_ARRAYS = set("searchsorted bucketize isin index_select take embedding index _unsafe_index".split())
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


@named("searchsorted")
def _searchsorted(recorder, boundaries, x, *, right=False, side=None, out_int32=False):
    return _counted(recorder, boundaries, x, right if side is None else side == "right")


@named("bucketize")
def _bucketize(recorder, x, boundaries, *, right=False, out_int32=False):
    return _counted(recorder, boundaries, x, right)


@named("embedding")
def _embedding(recorder, index, weight, padding_idx=None, max_norm=None, *_, **__):
    if padding_idx is not None or max_norm is not None:
        raise UnsupportedError("`embedding` without padding_idx and max_norm is computed: index its weight")
    return Indexed(recorder, weight)[index]


@named("index", "_unsafe_index")
def _index(recorder, array, indices):
    """What aten's operator takes: a list of indices, None for a whole axis."""
    return Indexed(recorder, array)[tuple(slice(None) if one is None else one for one in indices)]


@named("index_select")
def _index_select(recorder, array, dim, index):
    at = dim.value if isinstance(dim, Traced) else dim
    axes = len(array.shape)
    if not -axes <= at < axes:
        raise InputError(f"`index_select` along axis {at} of an array of {axes} axes")
    array = array if isinstance(array, Indexed) else Indexed(recorder, array)
    return array[(slice(None),) * (at % axes) + (index,)]


@named("take")
def _take(recorder, array, index):
    if len(array.shape) != 1:
        raise UnsupportedError("`take` of an array of one axis is computed in a mask or score function")
    return Indexed(recorder, array)[index]


@named("isin")
def _isin(recorder, x, among, *, invert=False):
    found = recorder.operand(False)
    for one in recorder.row(among) or ():
        found = OPERATIONS["logical_or"](recorder, found, OPERATIONS["eq"](recorder, x, one))
    return OPERATIONS["invert"](recorder, found) if invert else found


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
        if start == "pos":
            # Sums have 64 bits.
            made.narrow = None
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
