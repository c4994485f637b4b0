"""The functions on jax's arrays: where jax traces them, `fa_attn.jax` computes them, on a GPU torch does."""

import importlib

from ._arrays import Arrays, mapped
from ._core import UnsupportedError
from ._latents import with_scales

_UNWRITTEN = "out: jax arrays cannot be written, leave it out"


class JaxArrays(Arrays):
    """jax's arrays cannot be written and jax exposes no stream. Arrays on a GPU are lent to torch and results
    handed back by DLPack, each library waiting for the other's stream; nothing is copied."""

    def attention(self, q, *others, out=None, division=None, wants_lse=True, mods=None):
        if out is not None:
            raise UnsupportedError(_UNWRITTEN)
        if _is_traced(q, *others, mods):
            # The work plans of other calls are behind the extras.
            return self._traced().traced_attention(q, *others[:4], division, mods)
        if _is_on_gpu(q):
            return self._by_torch("attention", q, *others, division=division, mods=mods)
        return super().attention(q, *others, division=division, mods=mods)

    def _traced(self):
        return importlib.import_module("fa_attn.jax")

    @property
    def codes(self):
        return importlib.import_module("._jax_codes", __package__)

    def bits(self, array):
        # Bytes have no gradients that could be refused.
        return array if _is_traced(array) else super().bits(array)

    def expanded(self, array, shape):
        np = self.library.jax.numpy
        return np.broadcast_to(array.reshape(1) if array.size == 1 else array, shape)

    def chosen(self, indices, rows, lengths):
        np = self.library.jax.numpy
        seen = (indices >= 0) & (indices < rows)
        if lengths is not None:
            seen &= np.arange(indices.shape[1])[None] < lengths[:, None]
        order = np.argsort(~seen, axis=1, stable=True)
        table = np.take_along_axis(np.where(seen, indices, 0), order, 1)
        return table.astype(np.int32), seen.sum(1, dtype=np.int32)

    def repeated(self, lengths, times):
        return self.library.jax.numpy.repeat(lengths, times)

    # jax has no longer integers by default.
    _index = "int32"

    @property
    def _operations(self):
        return self.library.jax.numpy

    def _own(self, array):
        return self.library.jax.numpy.asarray(array)

    def _of_bytes(self, name, cache, form):
        # jax's own arrays are contiguous.
        pages, page, _, width = cache.shape
        if form.scale_bytes != 1:
            return cache[:, :, 0], None
        return with_scales(cache.reshape(pages, page * width), page, form)

    def largest_scores(self, q, rows, table, used, scale):
        np = self.library.jax.numpy
        if not (rows.shape[0] and table.shape[1]):
            return np.full(q.shape[:2], -np.inf, np.float32)
        keys = rows[table].astype(np.float32)
        scores = np.einsum("thd,tjd->thj", q.astype(np.float32), keys) * scale
        is_seen = np.arange(table.shape[1])[None] < used[:, None]
        return np.where(is_seen[:, None], scores, -np.inf).max(-1)

    def sunk(self, out, lse, sinks, like):
        np = self.library.jax.numpy
        is_blind = np.isneginf(lse)
        column = np.asarray(sinks, np.float32).reshape((1,) * (lse.ndim - 2) + (-1, 1))
        above = np.where(is_blind, 0.0, lse) - column
        share = np.where(is_blind, 0.0, self.library.jax.nn.sigmoid(above))
        return (out.astype(np.float32) * np.swapaxes(share, -1, -2)[..., None]).astype(like.dtype)

    def without_blind(self, lse):
        np = self.library.jax.numpy
        return np.where(np.isneginf(lse), np.inf, lse)

    def backward(self, dout, *others):
        if _is_traced(dout, *others):
            return self._traced().traced_backward(dout, *others)
        if _is_on_gpu(dout):
            return self._by_torch("backward", dout, *others)
        return super().backward(dout, *others)

    def merge(self, outs, lses, sinks, dtype):
        if _is_traced(tuple(outs), tuple(lses), sinks):
            return self._traced().traced_merge(outs, lses, sinks, dtype)
        if _is_on_gpu(outs[0]):
            dtype = getattr(importlib.import_module("torch"), self.library.np.dtype(dtype).name)
            return self._by_torch("merge", tuple(outs), tuple(lses), sinks, dtype)
        return super().merge(outs, lses, sinks, dtype)

    def side_by_side(self, *arrays):
        return self.library.jax.numpy.concatenate(arrays, -1)

    def stored(self, values, out):
        raise UnsupportedError(_UNWRITTEN)

    def kept(self, q, extents, threshold, rng_state):
        bits = self._traced().kept_bits(extents, threshold, rng_state)
        return bits if _is_traced(q, bits) else self.library.np.asarray(bits)

    def packed_bits(self, mask):
        return self._traced().packed_bits(mask) if _is_traced(mask) else super().packed_bits(mask)

    def is_in_host_memory(self, array):
        return not _is_traced(array) and not _is_on_gpu(array)

    def check(self, *_):
        # `append` refuses all.
        pass

    def append(self, append):
        raise UnsupportedError("jax arrays cannot be appended to in place: use numpy or torch for the cache")

    def _by_torch(self, name, *arguments, **options):
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            raise UnsupportedError(
                "a jax array on a GPU: jax lets no other library write its memory; install torch with CUDA, "
                "which lends it, or move the array to the CPU"
            ) from None
        face = importlib.import_module("fa_attn.torch")
        jax, np = self.library.jax, self.library.np
        device = None

        def lent(value):
            nonlocal device
            if isinstance(value, jax.Array):
                tensor = torch.from_dlpack(value)
                device = tensor.device if device is None else device
                return tensor
            if isinstance(value, tuple):
                return mapped(lent, value)
            # Lengths that the package itself has computed.
            return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value

        def handed(value):
            return None if value is None else jax.dlpack.from_dlpack(value.contiguous())

        with torch.no_grad():
            arguments = [*map(lent, arguments)]
            named = {key: lent(value) for key, value in options.items()}
            return tuple(map(handed, getattr(face, name)(*arguments, **named)))


def _is_traced(*values):
    """Whether jax's own call computes arrays of these or of the tuples among them: it traces one, or has one
    on several devices, which lends none."""
    jax = importlib.import_module("jax")
    for value in values:
        if isinstance(value, tuple):
            if _is_traced(*value):
                return True
        elif isinstance(value, jax.core.Tracer):
            return True
        elif isinstance(value, jax.Array) and len(value.devices()) > 1:
            return True
    return False


def _is_on_gpu(array):
    devices = array.devices() if hasattr(array, "devices") else ()
    return {device.platform for device in devices} - {"cpu"} != set()
