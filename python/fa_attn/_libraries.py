"""The array libraries without autograd: how each reads, makes and lends its arrays."""

import importlib

from ._checks import check_integers, check_unmasked
from ._core import InputError, InputTypeError, dropout_bits
from ._dropout import halves
from ._nvrtc import find_nvrtc

# Candidates that are tried before two arrays count as overlapping.
_OVERLAP_WORK = 10_000


class Numpy:
    """Arrays in the CPU's memory."""

    def __init__(self):
        self.np = importlib.import_module("numpy")

    def read(self, array):
        """The array in a form that the extension module reads."""
        if type(array) is not self.np.ndarray:
            return self.written(array)
        return array if self.is_read(array) else array.copy()

    def is_read(self, array):
        """Whether the extension module takes an array where it lies: rows in any order but from the last to
        the first, of whole elements at their own alignment."""
        flags, size = array.flags, array.itemsize
        if flags.c_contiguous and flags.aligned:
            return True
        return flags.aligned and all(stride >= 0 and stride % size == 0 for stride in array.strides)

    def written(self, array):
        """An array in which the module writes, or another library's."""
        check_unmasked(type(array))
        if getattr(array, "requires_grad", False):
            kind = type(array).__name__
            raise InputTypeError(
                f"a {kind} that requires a gradient is beside arrays that have none: give all as {kind}, or "
                "detach it"
            )
        return array

    def empty(self, shape, like, dtype=None):
        return self.np.empty(shape, like.dtype if dtype is None else dtype)

    def zeros(self, shape, like, dtype=None):
        return self.np.zeros(shape, like.dtype if dtype is None else dtype)

    def floats(self, shape, like):
        return self.np.empty(shape, self.np.float32)

    def ints(self, value, count, like):
        return self.np.full((count,), value, self.np.int32)

    def copy(self, array):
        return array.copy()

    def stream(self, like):
        return None

    allocate = None
    counts_on_host = True

    def give(self, array):
        return array

    def read_by_program(self, array):
        """An array in a type that programs read: as tracing declares those that they do not."""
        array = self.host(array)
        kinds = {"float64": "float32", "int64": "int32", "int16": "int32", "int8": "int32"}
        kind = kinds.get(array.dtype.name, array.dtype)
        if array.dtype.name == "int64" and array.size:
            check_integers(array.min(), array.max())
        if array.dtype.name == "bool":
            array, kind = array.view(self.np.uint8), self.np.uint8
        if min(array.strides, default=0) < 0:
            array = array.copy()
        return array.astype(kind, copy=False)

    def kept(self, extents, threshold, rng_state):
        """The bits that dropout keeps."""
        if rng_state is None:
            raise InputError("dropout_p without rng_state: give (seed, offset), numpy has no state to take")
        batch, heads, rows, keys = extents
        bits = self.np.empty((batch, heads, rows, -(-keys // 32)), self.np.int32)
        dropout_bits(bits, None, (*halves(rng_state), threshold), None)
        return bits

    def packed_bits(self, mask):
        mask = self.host(mask)
        if mask.shape[-1] == 1:
            return self.np.where(mask, -1, 0).astype(self.np.int32)
        mask = self.np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
        # In the order of the mask's axes, of which the last may not be the innermost.
        bits = self.np.packbits(mask, axis=-1, bitorder="little")
        return self.np.ascontiguousarray(bits).view(self.np.int32)

    def contiguous(self, array):
        return self.np.ascontiguousarray(array) if isinstance(array, self.np.ndarray) else array

    def unstack(self, array, axis):
        return [array[(slice(None),) * axis + (i,)] for i in range(array.shape[axis])]

    def overlap(self, one, other):
        """Whether two arrays have elements in common; True where that would take long to find out. Those of
        another library are taken to have none."""
        if not isinstance(other, self.np.ndarray):
            return False
        try:
            return self.np.shares_memory(one, other, max_work=_OVERLAP_WORK)
        except RuntimeError:
            return True

    def host(self, array):
        """An array in the CPU's memory, as numpy's."""
        is_own = isinstance(array, self.np.ndarray) or not hasattr(array, "__dlpack__")
        return self.np.asarray(array) if is_own else self.np.from_dlpack(array)


class Cupy(Numpy):
    """Arrays of cupy, on its current stream."""

    def __init__(self):
        self.np = importlib.import_module("cupy")
        find_nvrtc()

    def stream(self, like):
        return self.np.cuda.get_current_stream(like.device.id).ptr

    def overlap(self, one, other):
        has_both = isinstance(other, self.np.ndarray) and one.size > 0 and other.size > 0
        return has_both and self.np.may_share_memory(one, other)

    def is_read(self, array):
        return array.flags.c_contiguous or min(array.strides) >= 0

    # Not in host memory, where nothing is checked: lengths stay on the GPU.
    counts_on_host = False

    def host(self, array):
        return self.np.asarray(array)

    def allocate(self, count, zero, device):
        make = self.np.zeros if zero else self.np.empty
        with self.np.cuda.Device(device):
            return make((count,), self.np.uint8)


class Jax(Numpy):
    """Arrays of jax in the CPU's memory: results are allocated by numpy and handed over."""

    def __init__(self):
        super().__init__()
        self.jax = importlib.import_module("jax")

    def read(self, array):
        return super().read(array) if isinstance(array, self.np.ndarray) else array

    written = read

    def copy(self, array):
        return self.np.array(array)

    def host(self, array):
        # From a GPU's memory as well.
        return self.np.asarray(array)

    def give(self, array):
        # Where jax has a GPU, its arrays are made there by default.
        with self.jax.default_device(self.jax.devices("cpu")[0]):
            return self.jax.numpy.asarray(array)

    def contiguous(self, array):
        # jax's own arrays are contiguous.
        return array
