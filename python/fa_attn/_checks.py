"""Checks of options before anything is computed: each error names the argument, its value and what would
work."""

import sys
from numbers import Integral
from operator import index
from reprlib import repr as short

from ._core import BESIDE, InputError, InputTypeError, UnsupportedError

# Lengths are int32.
LARGEST = (1 << 31) - 1

# More than any sequence has.
_FAR = 1 << 40

# A side of a window without a limit.
_NO_LIMIT = -1

_EVERYWHERE = (_NO_LIMIT, _NO_LIMIT)


def window(window_size):
    """(left, right), -1 where there is no limit."""
    if window_size is None:
        return _EVERYWHERE
    try:
        left, right = window_size
        # Not by ==, which would ask torch.compile for a symbol's value.
        if left is _NO_LIMIT and right is _NO_LIMIT:
            return _EVERYWHERE
        if isinstance(window_size, (dict, set, frozenset)):
            raise TypeError
        return _side(left), _side(right)
    except (TypeError, ValueError):
        raise InputError(
            f"window_size is {short(window_size)}: it must be (left, right), keys on each side, -1 for no "
            "limit"
        ) from None


def _side(value):
    if value is None:
        return _NO_LIMIT
    value = _whole(value)
    if _is_symbol(value):
        return sys.modules["torch"].sym_max(value, _NO_LIMIT)
    return max(_NO_LIMIT, min(value, _FAR))


def _whole(value):
    """A whole number as an int, or what torch.compile and torch.export have in its place, a symbol: these
    stay symbols, so that a graph serves all values.

    Raises TypeError for anything else."""
    if type(value) is int or _is_symbol(value):
        return value
    if is_scalar(value) and hasattr(value, "item"):
        # A scalar of numpy or torch. Its index would be a constant of a graph.
        value = value.item()
        if type(value) is int or _is_symbol(value):
            return value
    try:
        return index(value)
    except (RuntimeError, ValueError) as error:
        # What torch raises.
        raise TypeError from error


def is_scalar(value):
    """Whether the value is an array of no axes."""
    try:
        return value.shape == ()
    except (AttributeError, RuntimeError):
        return False


def _is_symbol(value):
    """Whether this is one of torch's symbols; torch.compile has plain ints where it traces."""
    kind = type(value)
    return kind.__name__ == "SymInt" and kind.__module__ == "torch"


def is_whole(value):
    """Whether this is a whole number, or a symbol for one."""
    return (isinstance(value, Integral) and not isinstance(value, bool)) or _is_symbol(value)


def surely(condition):
    """Whether a condition holds; False where that depends on a value that is known at run time only, which
    the operators check."""
    torch = sys.modules.get("torch")
    if torch is not None and (torch.compiler.is_compiling() or isinstance(condition, torch.SymBool)):
        from torch.fx.experimental import symbolic_shapes

        # torch 2.7 and newer.
        if hasattr(symbolic_shapes, "guard_or_false"):
            return symbolic_shapes.guard_or_false(condition)
    return bool(condition)


def number(name, value):
    """A float; None where the value is None."""
    if value is None or type(value) is float:
        return value
    if type(value) is int:
        # Of a symbol torch.compile cannot say whether it has a gradient.
        try:
            return float(value)
        except OverflowError:
            raise InputTypeError(f"{name} is {short(value)}: it must be a number") from None
    if getattr(value, "requires_grad", False):
        _no_gradient(name)
    try:
        # True is what a third generation's caller gives by position for `causal`.
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputTypeError(f"{name} is {short(value)}: it must be a number") from None


def wants_gradient(array):
    """Whether an array asks for a gradient. That an element of vmap does, torch tells of the whole alone."""
    wants = getattr(array, "requires_grad", False)
    torch = sys.modules.get("torch")
    if wants or torch is None or not isinstance(array, torch.Tensor):
        return wants
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    parts = torch._C._functorch
    while not wants and parts.is_functorch_wrapped_tensor(array):
        array = parts.get_unwrapped(array)
        wants = array.requires_grad
    return wants


def _no_gradient(name):
    """Raises where a torch tensor that is used as a number would lose its gradient."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} requires a gradient, which is not computed: detach it (a factor on q has one)"
        )


def flag(name, value):
    """A bool, from a bool or from 0 or 1."""
    if type(value) is bool:
        # A comparison of lengths that torch.compile knows as symbols becomes a guard.
        return bool(value)
    is_number = is_whole(value) or isinstance(value, float) or is_scalar(value)
    try:
        if value is None or (is_number and value in (0, 1)):
            return bool(value)
    except TypeError:
        # What jax traces has no value yet.
        pass
    raise InputTypeError(f"{name} is {short(value)}: it must be True or False")


def upper_bound(name, value):
    """An upper bound on rows. Whether it is negative is checked where it is used, in the extension module."""
    if type(value) is not int:
        try:
            value = int(value) if isinstance(value, float) and value.is_integer() else _whole(value)
        except TypeError:
            raise InputError(f"{name} is {short(value)}: it must be a whole number") from None
        if _is_symbol(value):
            return value
    # Of min and max torch.compile makes operations, of comparisons it makes guards.
    return max(-_FAR, min(value, _FAR))


def offset(name, value):
    """A number of keys, either way; 0 where the value is None."""
    return 0 if value is None else upper_bound(name, value)


def count(name, value, least=0, largest=_FAR):
    """A whole number of a problem, from `least` to `largest`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = _whole(value)
    except TypeError:
        raise InputTypeError(f"{name} is {short(value)}: it must be a whole number") from None
    if surely(number < least) or surely(number > largest):
        raise InputError(f"{name} is {number}: it must be from {least} to {largest}")
    return number


def one_of(name, value, choices):
    """The value, checked to be one of these names."""
    if not isinstance(value, str) or value not in choices:
        need = ", ".join(map(repr, choices))
        raise InputError(f"{name} is {short(value)}: it must be one of {need}")
    return value


def array(name, value):
    """The value, checked to have a shape."""
    try:
        if value.shape is not None and not isinstance(value, type):
            return value
    except AttributeError:
        pass
    except RuntimeError:
        # Of nested tensors torch gives none.
        raise UnsupportedError(
            f"{name} is a nested tensor: give its values() and offsets() to flash_attn_varlen_func"
        ) from None
    raise no_array(name, f"the type {value.__name__}" if isinstance(value, type) else type(value).__name__)


def check_unmasked(kind):
    """Refuses arrays of numpy whose single elements may count for nothing."""
    if kind.__module__.startswith("numpy.ma"):
        raise InputTypeError("an array is masked: attention has no mask of single elements, fill it")


def no_array(name, kind):
    """The error for what is no array."""
    return InputTypeError(
        f"{name} is {kind}: it must be an array that speaks DLPack (numpy, torch, jax, cupy)"
    )


def int32(name, value):
    """The value, checked to be an array of int32."""
    dtype = getattr(value, "dtype", None)
    if str(dtype).rpartition(".")[2] != "int32":
        raise InputError(f"{name} holds {dtype}: it must be int32, convert it once")
    return value


def check_lse(name, lse, out):
    """The LSE, checked against the shape of `out` or q: (batch, heads, seqlen), or (heads, total)."""
    *outer, rows, heads, _ = tuple(array("out", out).shape)[-4:] if len(out.shape) > 2 else (0, 0, 0)
    need, have = (*outer, heads, rows), tuple(array(name, lse).shape)
    if have != need:
        raise InputError(
            f"{name} has the shape {have}: its elements must be {need}, (batch, heads, seqlen) or packed"
        )
    return lse


def check_backward(dout, q, k, v, out, lse):
    """Checks the axes of what a backward gets, and that the results and their gradient have one shape."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(array(name, x).shape) not in (3, 4):
            raise InputError(
                f"{name} has the shape {tuple(x.shape)}: it must be (batch, seqlen, heads, head_dim) or "
                "(total, heads, head_dim)"
            )
    need = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dout", dout), ("out", out)):
        if tuple(array(name, x).shape) != need:
            raise InputError(f"{name} has the shape {tuple(x.shape)}: it must be {need}, that of the result")
    check_lse("softmax_lse", lse, q)


def check_out(out, shape, dtype):
    """Checks the shape and type of an array that the caller gives for a result."""
    have, need = tuple(array("out", out).shape), tuple(shape)
    if have != need:
        raise InputError(f"out has the shape {have}: it must be {need}, that of the result")
    if out.dtype != dtype:
        raise InputError(f"out holds {out.dtype}: it must hold {dtype}, the result's type")
    return out


def check_no_overlap(out, q, k, v, extras, overlap):
    """Checks that no input of a call shares memory with the output."""
    for name, value in zip(("q", "k", "v", *BESIDE), (q, k, v, *(extras or ()))):
        if value is not None and overlap(out, value):
            raise InputError(f"out lies in the memory of {name}, which is still read: give memory of its own")


def check_within_cache(name, rows, capacity):
    """Checks numbers of rows of a cache, in host memory: each entry is within its capacity."""
    outside = (rows < 0) | (rows > capacity)
    if outside.any():
        entry = int(outside.nonzero()[0][0])
        raise InputError(
            f"{name}[{entry}] is {int(rows[entry])}: it must be from 0 to {capacity}, the rows of the cache"
        )


def check_ascending(name, starts, rows):
    """Checks the starts of packed sequences of `rows` rows, in host memory."""
    before = 0
    for entry, start in enumerate(starts.tolist()):
        if not before <= start <= rows:
            least = "0" if entry == 0 else f"{before}, the entry before,"
            raise InputError(f"{name}[{entry}] is {start}: it must be from {least} to {rows}, the rows")
        before = start


def check_pages(table, leftpad, used, page, pages, columns):
    """Checks a page table in host memory: entries that hold keys in use, which `leftpad` rows precede, are
    pages of the cache. `columns` numbers the table's."""
    holds = (columns * page < used[:, None]) & ((columns + 1) * page > leftpad[:, None])
    outside = holds & ((table < 0) | (table >= pages))
    if outside.any():
        row, column = divmod(int(outside.reshape(-1).nonzero()[0][0]), table.shape[1])
        raise InputError(
            f"page_table (block_table)[{row}, {column}] is {int(table[row, column])}: the cache has {pages} "
            f"pages, so it must be from 0 to {pages - 1}"
        )


def capacity_of(cache, table):
    """The most keys of a sequence that a cache holds."""
    return cache.shape[1] * (1 if table is None else table.shape[1])


def refuse_dropped(dropped, cache, table, cos):
    """Refuses an append that left rows out, `dropped` of them."""
    if dropped:
        places = [f"beyond the {capacity_of(cache, table)} rows that the cache has for a sequence"]
        places += [] if table is None else [f"in a page that is none of its {cache.shape[0]}"]
        places += [] if cos is None else [f"at a position beyond the {cos.shape[0]} of rotary_cos"]
        raise InputError(
            f"{dropped} rows of new keys or their queries have no place: {' or '.join(places)}; the others are "
            "written"
        )


def lengths_of(name, value, batch, whose="a length for each sequence"):
    """The lengths of `batch` sequences, checked to be int32 (batch,)."""
    int32(name, array(name, value))
    if tuple(value.shape) != (batch,):
        raise InputError(f"{name} has the shape {tuple(value.shape)}: it must be ({batch},), {whose}")
    return value


def check_cache_rows(index, rows, table):
    """Checks `cache_batch_idx` in host memory: each entry is one of the cache's `rows`, or a row of the
    table."""
    rows, of = (rows, "the cache") if table is None else (len(table), "the page table")
    outside = (index < 0) | (index >= rows)
    if outside.any():
        entry = int(outside.nonzero()[0][0])
        raise InputError(
            f"cache_batch_idx[{entry}] is {int(index[entry])}: {of} has {rows} rows, so it must be from 0 to "
            f"{rows - 1}"
        )


def is_neutral(value, neutral):
    """Whether an argument has one of its neutral values; an array never has."""
    return any(
        value is n or (isinstance(value, Integral) and n is not None and value == n) for n in neutral
    )


def no_dropout(dropout_p):
    if type(dropout_p) is float and dropout_p == 0.0:
        return
    if dropout_p is not None and number("dropout_p", dropout_p) != 0.0:
        raise UnsupportedError(
            f"dropout_p = {dropout_p}: dropout has no function below autograd's, use flash_attn_func or "
            "flash_attn_varlen_func"
        )


def check_integers(least, most):
    """Of an array that a program reads, the least and the most of its integers."""
    for value in (int(least), int(most)):
        if not -(2**31) <= value < 2**31:
            raise InputError(
                f"an array of a mask or score function holds {value}, and integers there have 32 bits: "
                "number what it tells apart from 0"
            )
