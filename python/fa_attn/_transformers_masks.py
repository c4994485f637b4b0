"""What a mask of transformers is: its mask functions, read by calling them on indices that record what is
compared, and the object that models hand from `mask` to `attention`."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from ._core import UnsupportedError
from ._torch_padding import Packed, Padding, check_window

FAR = 1 << 40

_KNOWN = "computed are causal and bidirectional masks, sliding windows, padding and packed sequences"
_OTHER = "use attn_implementation='sdpa' for this model"


class _Unknown(Exception):
    """A mask function compares what has no place in a `Band`."""


class Band:
    """The keys that a query sees: from `left` before it to `right` behind it, of its own number in `segments`
    (batch, rows), in its own chunk of `chunk` keys. `nothing`: what a union of masks begins with."""

    device = None

    def __init__(self, left=FAR, right=FAR, segments=None, chunk=None, nothing=False):
        self.left, self.right, self.segments, self.chunk = left, right, segments, chunk
        self.nothing = nothing

    def to(self, device):
        return self

    def __and__(self, other):
        if not isinstance(other, Band) or self.nothing or other.nothing:
            raise _Unknown
        segments = self.segments if other.segments is None else other.segments
        if self.segments is not None and other.segments is not None:
            raise _Unknown
        chunks = [x for x in (self.chunk, other.chunk) if x is not None]
        left, right = min(self.left, other.left), min(self.right, other.right)
        return Band(left, right, segments, min(chunks) if chunks else None)

    def __or__(self, other):
        if isinstance(other, Band) and self.nothing:
            return other
        raise _Unknown("a union of masks (or_masks)")

    def __bool__(self):
        raise _Unknown


class _Index:
    """The index of a query or of a key, plus `shift`; or its entry in `table`."""

    def __init__(self, is_key, shift=0, table=None):
        self.is_key, self.shift, self.table = is_key, shift, table

    def new_ones(self, *shape, **options):
        return Band()

    def new_zeros(self, *shape, **options):
        return Band(nothing=True)

    def __add__(self, number):
        if isinstance(number, int):
            return _Index(self.is_key, self.shift + number, self.table)
        raise _Unknown

    def __sub__(self, other):
        if isinstance(other, _Start):
            return _InChunks(self, other)
        if isinstance(other, _Index) and other.is_key != self.is_key and other.table is self.table:
            return _Distance(self, other)
        return self + -other if isinstance(other, int) else self + other

    def __ge__(self, other):
        if isinstance(other, int) and other <= 0 and self.table is None and self.shift == 0:
            return Band()
        return (self - other).at_least(0)

    def __gt__(self, other):
        return (self - other).at_least(1)

    def __le__(self, other):
        return (self - other).at_most(0)

    def __lt__(self, other):
        return (self - other).at_most(-1)

    def __eq__(self, other):
        if not isinstance(other, _Index) or other.is_key == self.is_key or self.shift != other.shift:
            raise _Unknown
        if self.table is None or self.table is not other.table:
            raise _Unknown
        return Band(segments=self.table)

    __hash__ = object.__hash__

    def at_least(self, number):
        raise _Unknown

    at_most = at_least

    def __bool__(self):
        raise _Unknown


class _Distance:
    """The difference of a query's and a key's index."""

    def __init__(self, one, other):
        self.is_key, self.shift = one.is_key, one.shift - other.shift

    def __add__(self, number):
        moved = _Distance(_Index(self.is_key), _Index(not self.is_key))
        moved.shift = self.shift + number
        return moved

    def __sub__(self, number):
        return self + -number

    def __abs__(self):
        return _Size(self.shift)

    def at_least(self, number):
        # Of a key's index less a query's, it is how far behind the query the key is.
        limit = number - self.shift
        return Band(left=-limit) if self.is_key else Band(right=-limit)

    def at_most(self, number):
        limit = number - self.shift
        return Band(right=limit) if self.is_key else Band(left=limit)

    def __ge__(self, number):
        return self.at_least(number)

    def __gt__(self, number):
        return self.at_least(number + 1)

    def __le__(self, number):
        return self.at_most(number)

    def __lt__(self, number):
        return self.at_most(number - 1)


class _Size:
    """The size of a difference."""

    def __init__(self, shift):
        if shift:
            raise _Unknown

    def __le__(self, number):
        return Band(int(number), int(number))

    def __lt__(self, number):
        return Band(int(number) - 1, int(number) - 1)


class _Batch:
    """The index of a sequence."""


class _Start:
    """The entry of a sequence in a table of first keys."""


class _InChunks:
    """An index from the first key of a sequence on, and the number of its chunk."""

    def __init__(self, index, start, size=None):
        self.index, self.start, self.size = index, start, size

    def __floordiv__(self, size):
        return _InChunks(self.index, self.start, size)

    def __eq__(self, other):
        if not isinstance(other, _InChunks) or self.size is None or other.size != self.size:
            raise _Unknown
        return Band(chunk=self.size)

    __hash__ = object.__hash__


class _Lookups(TorchFunctionMode):
    """Lets tensors be indexed by `_Batch` and `_Index`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__:
            table, index = args
            if isinstance(index, _Batch):
                return _Start()
            if isinstance(index, tuple) and len(index) == 2 and isinstance(index[1], _Index):
                if index[1].table is not None or index[1].shift:
                    raise _Unknown
                return _Index(index[1].is_key, 0, table)
        return function(*args, **(kwargs or {}))


def band_of(function):
    """The `Band` that a mask function is, for one that compares indices alone."""
    if function is None:
        return Band(right=0)
    try:
        with _Lookups():
            band = function(_Batch(), 0, _Index(False), _Index(True))
        if not isinstance(band, Band) or band.nothing:
            raise _Unknown
    except (_Unknown, AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        name = getattr(function, "__name__", "another kind")
        what = str(error) if isinstance(error, _Unknown) and str(error) else f"a mask function ({name})"
        raise UnsupportedError(f"{what} that is none of these: {_KNOWN}; {_OTHER}") from error
    return band


class Mask:
    """The mask that layers hand to `attention`, in the place of a tensor (batch, 1, rows, keys). Code of a
    model that computes with it raises an error.

    A query sees `left` keys before its own and `right` behind it; the last query's own key is the last one,
    or the last of `used` int32 (batch,). `padding` and `packed`: see `_torch_padding`; `bare`: whether nobody
    gave a mask, so that positions alone may tell packed rows.
    """

    ndim = 4
    dtype = torch.bool
    requires_grad = False
    is_nested = False

    def __init__(self, shape, device, left, right, used=None, padding=None, packed=None):
        self.shape, self.device = shape, device
        self.left, self.right = left, right
        self.used, self.padding, self.packed = used, padding, packed
        self.told = None

    @property
    def is_aligned(self):
        """Whether it matters at which key a query is."""
        return self.left < FAR or self.right < FAR

    @property
    def causal(self):
        return self.right == 0

    @property
    def window(self):
        right = -1 if self.right == 0 or self.right >= FAR else self.right
        return (self.left if self.left < FAR else -1, right)

    def with_(self, **changes):
        names = ("shape", "device", "left", "right", "used", "padding", "packed")
        return Mask(**{name: changes.get(name, getattr(self, name)) for name in names})

    def dim(self):
        return self.ndim

    def size(self, axis=None):
        return torch.Size(self.shape) if axis is None else self.shape[axis]

    def to(self, *args, **options):
        device = options.get("device")
        for value in args:
            if isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
                device = value
            elif isinstance(value, torch.Tensor):
                device = value.device
        if device is None or torch.device(device) == self.device:
            return self
        moved = {name: getattr(self, name) for name in ("used", "padding", "packed")}
        moved = {name: None if x is None else x.to(device) for name, x in moved.items()}
        return self.with_(device=torch.device(device), **moved)

    def contiguous(self, *args, **options):
        return self

    clone = detach = bool = contiguous

    def cuda(self, device=None, **options):
        return self.to("cuda" if device is None else device)

    def cpu(self, **options):
        return self.to("cpu")

    def __getitem__(self, index):
        """The first keys of the mask: `[:, :, :, :count]` and `[..., :count]`."""
        whole = slice(None)
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index and len(index) <= 4:
            at = index.index(Ellipsis)
            index = index[:at] + (whole,) * (5 - len(index)) + index[at + 1 :]
        index = index + (whole,) * (4 - len(index))
        *others, keys = index
        if any(x != whole for x in others) or not isinstance(keys, slice) or len(index) != 4:
            self._refuse(f"it takes the part {index} of it")
        if keys.start not in (None, 0) or keys.step not in (None, 1):
            self._refuse(f"it takes the part {index} of it")
        count = self.shape[3] if keys.stop is None else keys.stop
        if count < 0:
            count = max(count + self.shape[3], 0)
        return self.of_first(min(count, self.shape[3]))

    def of_first(self, count):
        """The mask of the first keys alone."""
        if count == self.shape[3]:
            return self
        if self.is_aligned or self.padding is not None or self.packed is not None or self.used is not None:
            self._refuse(f"it takes the first {count} of {self.shape[3]} keys")
        return self.with_(shape=(*self.shape[:3], count))

    def _refuse(self, what):
        raise UnsupportedError(
            f"the model's own code computes with its attention mask: {what}; use attn_implementation="
            "'eager' or 'sdpa' for this model"
        )

    def __getattr__(self, name):
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            self._refuse(f"it asks for .{name}")
        raise AttributeError(name)

    def __bool__(self):
        self._refuse("it asks whether it is true")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        raise UnsupportedError(
            f"the model's own code computes with its attention mask ({name}); use attn_implementation="
            "'eager' or 'sdpa' for this model"
        )

    def attended(self, rows, keys, name):
        """The mask for a layer of so many queries and keys; an error where it is of others."""
        if self.shape[3] != keys and self.shape[3] > keys:
            return self.of_first(keys).attended(rows, keys, name)
        if self.shape[3] != keys or (self.is_aligned and self.shape[2] != rows):
            raise UnsupportedError(
                f"{name}: a layer of {rows} queries and {keys} keys, and a mask of {self.shape[2]} and "
                f"{self.shape[3]}, which does not say what the others are; {_OTHER}"
            )
        return self


def _operation(name):
    def refuse(self, *others):
        self._refuse(f"it computes {name.strip('_')} of it")

    return refuse


for _name in "add sub mul truediv and or xor lt le gt ge".split():
    setattr(Mask, f"__{_name}__", _operation(_name))
for _name in "add sub mul truediv and or xor".split():
    setattr(Mask, f"__r{_name}__", _operation(_name))
for _name in ("neg", "invert"):
    setattr(Mask, f"__{_name}__", _operation(_name))


def made_mask(band, batch, rows, keys, q_offset, kv_offset, attention_mask, device):
    """The `Mask` of transformers' arguments for a mask function."""
    _check_band(band, rows, keys, q_offset, kv_offset)
    mask = Mask((batch, 1, rows, keys), device, band.left, band.right)
    if band.segments is not None:
        if attention_mask is not None and not attention_mask.all():
            raise UnsupportedError("packed sequences with padding: leave the padding out")
        mask.packed = Packed.of(band.segments.expand(batch, -1))
        return mask
    # Of a cache with room for more, the keys that are there, which end with the queries' own; all of an
    # encoder's are.
    end = q_offset - kv_offset + rows if mask.is_aligned else keys
    if isinstance(end, torch.Tensor):
        end = end.to(device).clamp(max=keys)
        is_full = False
    else:
        is_full = end == keys
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise UnsupportedError(f"a mask of the shape {tuple(attention_mask.shape)}: {_KNOWN}; {_OTHER}")
        seen = _seen(attention_mask.to(device).expand(batch, -1), kv_offset, keys)
        if not is_full:
            seen = seen & (torch.arange(keys, device=device) < end)
        mask.padding = Padding.of(seen, end, rows, mask.is_aligned)
        if mask.padding is not None:
            if mask.padding.holes is True:
                check_window(mask.padding.keys, mask.window)
            return mask
    if not is_full:
        mask.used = _lengths(end, batch, device)
    return mask


def _lengths(end, batch, device):
    if isinstance(end, torch.Tensor):
        return end.to(torch.int32).reshape(1).repeat(batch)
    return torch.full((batch,), end, dtype=torch.int32, device=device)


def _seen(attention_mask, begin, count):
    """Which of the `count` keys from `begin` on are not padding; what is beyond a mask is."""
    seen = attention_mask.to(torch.bool)[:, begin : begin + count]
    return torch.nn.functional.pad(seen, (0, count - seen.shape[1])) if seen.shape[1] < count else seen


def _check_band(band, rows, keys, q_offset, kv_offset):
    if band.chunk is not None and kv_offset + keys > band.chunk:
        raise UnsupportedError(
            f"a mask of chunks of {band.chunk} keys (chunked_overlay), for {kv_offset + keys}: {_KNOWN}; {_OTHER}"
        )
    if band.left < 0 or band.right < 0:
        raise UnsupportedError(f"a mask that hides a query's own key: {_KNOWN}; {_OTHER}")
    if band.left >= FAR and band.right >= FAR or isinstance(q_offset, torch.Tensor) and band.right == 0:
        return
    if isinstance(q_offset, torch.Tensor):
        raise UnsupportedError(
            f"a window to both sides over a cache with room for more keys: leave cache_implementation out; {_OTHER}"
        )
    end = q_offset - kv_offset + rows
    if end > keys or (band.right > 0 and end != keys):
        raise UnsupportedError(
            f"{rows} queries from position {q_offset} on {keys} keys from {kv_offset} on: the last query must "
            f"be at the last key; {_OTHER}"
        )


def told_by_positions(position_ids, device):
    """The `Packed` rows of a batch of one whose positions begin anew, as flash_attention_2 finds them; None
    where they do not."""
    positions = position_ids.reshape(1, -1).to(device)
    begins = positions.diff(dim=1) != 1
    # Anything else than runs that begin with the least position tells nothing.
    is_packed = (~begins | (positions[:, 1:] == positions.min())).all()
    segments = torch.nn.functional.pad((begins & is_packed).cumsum(1), (1, 0))
    return Packed.of(segments)
