"""What a mask of transformers is: its mask functions, read by calling them on indices that record what is
compared, and the object that models hand from `mask` to `attention`."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ._core import UnsupportedError
from ._programs import Program
from ._torch_padding import Packed, Padding, gaps_of

FAR = 1 << 40

_KNOWN = "computed are causal and bidirectional masks, sliding windows, padding and packed sequences"
_OTHER = "use attn_implementation='sdpa' for this model"


class _Unknown(Exception):
    """A mask function compares what has no place in a `Band`."""


class Band:
    """The keys that a query sees: from `left` before it to `right` behind it, of its own number in `segments`
    (batch, rows), in its own chunk of `chunk` keys. `table`: the positions, where not the indices themselves,
    that are compared."""

    device = None

    def __init__(self, left=FAR, right=FAR, table=None, segments=None, chunk=None):
        self.left, self.right = left, right
        self.table, self.segments, self.chunk = table, segments, chunk

    def to(self, device):
        return self

    def __and__(self, other):
        if not isinstance(other, Band):
            raise _Unknown
        left, right = min(self.left, other.left), min(self.right, other.right)
        alike = (_one(getattr(self, x), getattr(other, x)) for x in ("table", "segments", "chunk"))
        return Band(left, right, *alike)

    def __or__(self, other):
        if isinstance(other, Band):
            if self.left + self.right < 0:
                return other
            if other.left + other.right < 0:
                return self
            alike = all(getattr(self, x) is getattr(other, x) for x in ("table", "segments", "chunk"))
            # Without a gap between them.
            if alike and max(-self.left, -other.left) <= min(self.right, other.right) + 1:
                left, right = max(self.left, other.left), max(self.right, other.right)
                return Band(left, right, self.table, self.segments, self.chunk)
        raise _Unknown("a union of masks (or_masks)")

    def __bool__(self):
        raise _Unknown


def _one(one, other):
    if one is not None and other is not None and one is not other:
        raise _Unknown
    return other if one is None else one


class _Index:
    """The index of a query or of a key, plus `shift`; or its entry in `table`."""

    def __init__(self, is_key, shift=0, table=None):
        self.is_key, self.shift, self.table = is_key, shift, table

    def new_ones(self, *shape, **options):
        return Band()

    def new_zeros(self, *shape, **options):
        return Band(-FAR, -FAR)

    def __add__(self, number):
        if isinstance(number, int):
            return _Index(self.is_key, self.shift + number, self.table)
        raise _Unknown

    def __sub__(self, other):
        if isinstance(other, _Start):
            return _InChunks(self, other)
        if isinstance(other, _Index) and other.is_key != self.is_key and other.table is self.table:
            return _Distance(1 if self.is_key else -1, self.shift - other.shift, self.table)
        return self + -other if isinstance(other, int) else self + other

    def __ge__(self, other):
        if isinstance(other, int) and other <= 0 and self.table is None and self.shift == 0:
            return Band()
        return (self - other) >= 0

    def __gt__(self, other):
        return (self - other) > 0

    def __le__(self, other):
        return (self - other) <= 0

    def __lt__(self, other):
        return (self - other) < 0

    def __eq__(self, other):
        if not isinstance(other, _Index) or other.is_key == self.is_key or self.shift != other.shift:
            raise _Unknown
        if self.table is None or self.table is not other.table:
            raise _Unknown
        return Band(segments=self.table)

    __hash__ = object.__hash__

    def __bool__(self):
        raise _Unknown


class _Distance:
    """How far behind the query's index the key's is, times `sign`, plus `shift`."""

    def __init__(self, sign, shift, table):
        self.sign, self.shift, self.table = sign, shift, table

    def __add__(self, number):
        if not isinstance(number, int):
            raise _Unknown
        return _Distance(self.sign, self.shift + number, self.table)

    def __sub__(self, number):
        return self + -number

    def __neg__(self):
        return _Distance(-self.sign, -self.shift, self.table)

    def __abs__(self):
        if self.shift:
            raise _Unknown
        return _Size(self.table)

    def __ge__(self, number):
        return -self <= -number

    def __gt__(self, number):
        return -self <= -number - 1

    def __le__(self, number):
        if not isinstance(number, int):
            raise _Unknown
        most = number - self.shift
        return Band(right=most, table=self.table) if self.sign > 0 else Band(left=most, table=self.table)

    def __lt__(self, number):
        return self <= number - 1


class _Size:
    """The size of a distance."""

    def __init__(self, table):
        self.table = table

    def __le__(self, number):
        if not isinstance(number, int):
            raise _Unknown
        return Band(number, number, self.table)

    def __lt__(self, number):
        return self <= number - 1


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
        if not isinstance(band, Band) or (band.table is not None and band.segments is None):
            raise _Unknown
    except (_Unknown, AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        name = getattr(function, "__name__", "another kind")
        what = str(error) if isinstance(error, _Unknown) and str(error) else f"a mask function ({name})"
        raise UnsupportedError(f"{what} that is none of these: {_KNOWN}; {_OTHER}") from error
    return band


class Mask:
    """The mask that layers hand to `attention`, in the place of a bool tensor (batch, 1, rows, keys). Of a
    model whose own code computes with it, it becomes that tensor.

    A query sees `left` keys before its own and `right` behind it; the last query's own key is the one before
    `end`, an int or a tensor. `used` int32 (batch,): the number of keys, where fewer are there than a cache
    has room for. `segments` (batch, rows): the number of each row's sequence in `packed` ones. `padding` and
    `packed`: see `_torch_padding`.
    """

    ndim = 4
    dtype = torch.bool
    requires_grad = False

    def __init__(self, shape, device, left, right, end, used=None, padding=None, packed=None, segments=None):
        self.shape, self.device = shape, device
        self.left, self.right, self.end = left, right, end
        self.used, self.padding, self.packed, self.segments = used, padding, packed, segments
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

    def tensor(self):
        """True where a query sees a key."""
        batch, _, rows, keys = self.shape
        places = torch.arange(keys, device=self.device)
        own = torch.arange(rows, device=self.device)[:, None] + (self.end - rows)
        seen = (places >= own - self.left) & (places <= own + self.right)
        seen = seen.expand(batch, 1, rows, keys)
        if self.used is not None:
            seen = seen & (places < self.used[:, None, None, None])
        if self.padding is not None:
            seen = seen & self.padding.keys[:, None, None]
        if self.segments is not None:
            seen = seen & (self.segments[:, None, :, None] == self.segments[:, None, None])
        return seen

    def dim(self):
        return self.ndim

    def size(self, axis=None):
        return torch.Size(self.shape) if axis is None else self.shape[axis]

    def to(self, *args, **options):
        """The mask on another device; its type stays."""
        device = options.get("device")
        for value in args:
            if isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
                device = value
            elif isinstance(value, torch.Tensor):
                device = value.device
        if device is None or torch.device(device) == self.device:
            return self
        moved = (self.used, self.padding, self.packed, self.segments)
        moved = (None if x is None else x.to(device) for x in moved)
        end = self.end.to(device) if isinstance(self.end, torch.Tensor) else self.end
        return Mask(self.shape, torch.device(device), self.left, self.right, end, *moved)

    def contiguous(self, *args, **options):
        return self

    clone = detach = bool = contiguous

    def cuda(self, device=None, **options):
        return self.to("cuda" if device is None else device)

    def cpu(self, **options):
        return self.to("cpu")

    def __getitem__(self, index):
        """The part `[:, :, :, :keys]` or `[..., :keys]` is a mask; any other a tensor."""
        if isinstance(index, tuple) and isinstance(index[-1], slice):
            others = [x for x in index[:-1] if x is not Ellipsis]
            whole = all(isinstance(x, slice) and x == slice(None) for x in others)
            begin, end, step = index[-1].start, index[-1].stop, index[-1].step
            end = self.shape[3] if end is None else end
            if whole and (len(index) == 4 or len(others) < len(index) - 1):
                part = self.of_first(end) if begin in (None, 0) and step in (None, 1) and end >= 0 else None
                if part is not None:
                    return part
        return self.tensor()[index]

    def of_first(self, count):
        """The mask of the first keys alone; None where only a tensor is that."""
        if count >= self.shape[3]:
            return self
        if self.is_aligned or any(x is not None for x in (self.used, self.padding, self.segments)):
            return None
        return Mask((*self.shape[:3], count), self.device, self.left, self.right, count)

    def __getattr__(self, name):
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __bool__(self):
        return bool(self.tensor())

    def __len__(self):
        return self.shape[0]

    def __eq__(self, other):
        return self.tensor() == other if isinstance(other, (int, float, torch.Tensor)) else self is other

    def __ne__(self, other):
        return self.tensor() != other if isinstance(other, (int, float, torch.Tensor)) else self is not other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.tensor() if isinstance(x, Mask) else x, (args, kwargs or {}))
        return function(*args, **kwargs)

    def attended(self, rows, keys, name):
        """The mask for a layer of so many queries and keys; an error where it is of others."""
        if self.left < 0 or self.right < 0:
            # Models make windows of 0 keys for layers that they do not have.
            raise UnsupportedError(f"a mask that hides a query's own key: {_KNOWN}; {_OTHER}")
        part = self.of_first(keys)
        if part is None or part.shape[3] != keys or (self.is_aligned and self.shape[2] != rows):
            raise UnsupportedError(
                f"{name}: a layer of {rows} queries and {keys} keys, and a mask of {self.shape[2]} and "
                f"{self.shape[3]}, which does not say what the others are; {_OTHER}"
            )
        return part


class ProgramMask(Mask):
    """A mask of any other form: `program` says what is seen, of the keys that `padding_of_keys` (batch,
    keys), where there is one, leaves."""

    def __init__(self, shape, device, function, program, padding_of_keys=None):
        super().__init__(shape, device, FAR, FAR, shape[3])
        self.function, self.program, self.padding_of_keys = function, program, padding_of_keys

    def tensor(self):
        batch, _, rows, keys = self.shape
        places = [torch.arange(n, device=self.device) for n in (batch, 1, rows, keys)]
        b, h, q, k = (x.view(*(-1 if at == axis else 1 for at in range(4))) for axis, x in enumerate(places))
        seen = self.function(b, h, q, k).expand(batch, 1, rows, keys)
        return seen if self.padding_of_keys is None else seen & self.padding_of_keys[:, None, None]

    def to(self, *args, **options):
        found = [x for x in (*args, options.get("device")) if isinstance(x, (str, int, torch.device))]
        if any(torch.device(x) != self.device for x in found):
            raise UnsupportedError(
                f"a mask of another form than these is moved between devices: {_KNOWN}; {_OTHER}"
            )
        return self

    def of_first(self, count):
        if count >= self.shape[3]:
            return self
        seen = self.padding_of_keys
        seen = None if seen is None else seen[:, :count]
        return ProgramMask((*self.shape[:3], count), self.device, self.function, self.program, seen)

    def attended(self, rows, keys, name):
        if self.shape[2] != rows or self.shape[3] < keys:
            raise UnsupportedError(
                f"{name}: a layer of {rows} queries and {keys} keys, and a mask of {self.shape[2]} and "
                f"{self.shape[3]}, which does not say what the others are; {_OTHER}"
            )
        return self.of_first(keys)


def program_mask(function, batch, rows, keys, q_offset, kv_offset, attention_mask, device):
    """The `ProgramMask` of transformers' arguments for a mask function of any form."""

    def moved(b, h, q, k):
        return function(b, h, q + q_offset, k + kv_offset)

    program = Program.of_mask(moved, device)
    seen = None
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise UnsupportedError(f"a mask of the shape {tuple(attention_mask.shape)}: {_KNOWN}; {_OTHER}")
        seen = _seen(attention_mask.to(device).expand(batch, -1), kv_offset, keys)
    return ProgramMask((batch, 1, rows, keys), device, moved, program, seen)


def _as_tensor(name):
    def compute(self, *others):
        return getattr(self.tensor(), name)(*others)

    return compute


for _name in "add sub mul truediv and or xor lt le gt ge radd rsub rmul rand ror rxor neg invert".split():
    setattr(Mask, f"__{_name}__", _as_tensor(f"__{_name}__"))


def made_mask(band, batch, rows, keys, q_offset, kv_offset, attention_mask, device):
    """The `Mask` of transformers' arguments for a mask function."""
    _check_band(band, rows, keys, q_offset, kv_offset)
    mask = Mask((batch, 1, rows, keys), device, band.left, band.right, keys)
    if band.segments is not None:
        if attention_mask is not None and not attention_mask.all():
            raise UnsupportedError("packed sequences with padding: leave the padding out")
        mask.segments = band.segments.expand(batch, -1)
        mask.packed = Packed.of(mask.segments)
        return mask
    # Of a cache with room for more, the keys that are there, which end with the queries' own; all of an
    # encoder's are.
    end = q_offset - kv_offset + rows if mask.is_aligned else keys
    if isinstance(end, torch.Tensor):
        end = end.to(device).clamp(max=keys)
        is_full = False
    else:
        is_full = end == keys
    mask.end = end
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise UnsupportedError(f"a mask of the shape {tuple(attention_mask.shape)}: {_KNOWN}; {_OTHER}")
        seen = _seen(attention_mask.to(device).expand(batch, -1), kv_offset, keys)
        if not is_full:
            seen = seen & (torch.arange(keys, device=device) < end)
        mask.padding = Padding.of(seen, end, rows, mask.is_aligned)
        if mask.padding is not None:
            if mask.padding.holes is True:
                mask.padding.stays = gaps_of(mask.padding.keys, mask.window) is not None
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
            f"a mask of chunks of {band.chunk} keys (chunked_overlay), for {kv_offset + keys}: {_KNOWN}; "
            f"{_OTHER}"
        )
    if band.left >= FAR and band.right >= FAR or isinstance(q_offset, torch.Tensor) and band.right == 0:
        return
    if isinstance(q_offset, torch.Tensor):
        raise UnsupportedError(
            "a window to both sides over a cache with room for more keys: leave cache_implementation out; "
            f"{_OTHER}"
        )
    end = q_offset - kv_offset + rows
    if end > keys or (band.right > 0 and end != keys):
        raise UnsupportedError(
            f"{rows} queries from position {q_offset} on {keys} keys from {kv_offset} on: the last query "
            f"must be at the last key; {_OTHER}"
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
