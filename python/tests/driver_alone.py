#!/usr/bin/env python3
"""The shipped wheel on a GPU with nothing but its driver: no torch, no toolkit, no NVRTC; memory comes from
the driver itself.

    FA_NVRTC=none python python/tests/driver_alone.py

Computes forward and backward by kernels of the wheel's bundle, compares them with numpy, and checks that no
compiler was loaded. Needs numpy alone.
"""

import ctypes
import os
import sys
import tempfile
import time

import numpy as np
import reference

from fa_attn import DeviceError, _core
from fa_attn._options import CallOptions

CUDA = 2
TYPES = {"bf16": (4, np.uint16), "f16": (2, np.float16), "f32": (2, np.float32)}


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Driver:
    """The few calls of the driver that are needed, in the primary context of GPU 0."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self("cuCtxSetCurrent", context)

    def __call__(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: error {status} of the driver")

    def memory(self, count):
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(count, 1)))
        self("cuMemsetD8_v2", address, 0, ctypes.c_size_t(max(count, 1)))
        return address.value


class Array:
    """An array in the GPU's memory, as DLPack shows it; it is never freed."""

    def __init__(self, driver, shape, dtype, values=None):
        self.driver, self.shape, self.dtype = driver, shape, dtype
        code, self.kind = TYPES[dtype]
        bits = np.dtype(self.kind).itemsize * 8
        self.bytes = int(np.prod(shape)) * bits // 8
        self.address = driver.memory(self.bytes)
        if values is not None:
            values = np.ascontiguousarray(stored(values, dtype))
            at = ctypes.c_void_p(values.ctypes.data)
            driver("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), at, ctypes.c_size_t(self.bytes))
        self.lengths = (ctypes.c_int64 * len(shape))(*shape)
        self.managed = Managed(
            self.address, Device(CUDA, 0), len(shape), Dtype(code, bits, 1), self.lengths, None, 0, None, None
        )

    def __dlpack__(self, stream=None):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return CUDA, 0

    def numpy(self):
        values = np.empty(self.shape, self.kind)
        at = ctypes.c_void_p(values.ctypes.data)
        self.driver("cuMemcpyDtoH_v2", at, ctypes.c_uint64(self.address), ctypes.c_size_t(self.bytes))
        return loaded(values, self.dtype)


def stored(values, dtype):
    if dtype != "bf16":
        return values.astype(TYPES[dtype][1])
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def loaded(values, dtype):
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else values


def case(driver, dtype, head_dim, causal):
    """(seconds of the first forward and backward, the largest error), or why there is no kernel."""
    batch, rows, heads = 1, 256, 2
    shape = (batch, rows, heads, head_dim)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape).astype(np.float32) for _ in range(4)]
    q, k, v, dout = (Array(driver, shape, dtype, x) for x in values)
    out, lse = Array(driver, shape, dtype), Array(driver, (batch, heads, rows), "f32")
    grads = [Array(driver, shape, dtype) for _ in range(3)]
    kept = []

    def allocate(count, zero):
        del zero  # all memory is zero at first
        kept.append(Array(driver, (count // 4 + 4,), "f32"))
        return kept[-1]

    options = CallOptions(None, causal, (-1, -1), 0.0, False)
    begin = time.perf_counter()
    try:
        _core.forward(q, k, v, out, lse, options, None, 1, allocate)
        _core.backward(dout, q, k, v, out, lse, *grads, None, options, None, 1, allocate)
    except DeviceError as error:
        return str(error)
    driver("cuCtxSynchronize")
    seconds = time.perf_counter() - begin
    rounded = [loaded(stored(x, dtype), dtype)[0].astype(np.float64) for x in values]
    want = [reference.attention(*rounded[:3], causal=causal)[0]]
    want += reference.gradients(rounded[3], *rounded[:3], causal=causal)[:3]
    errors = [float(np.abs(got.numpy()[0] - x).max()) for got, x in zip([out, *grads], want)]
    return seconds, max(errors)


def main():
    driver = Driver()
    computed, wrong = 0, 0
    for dtype in ("bf16", "f16"):
        for head_dim in (64, 128):
            for causal in (False, True):
                found = case(driver, dtype, head_dim, causal)
                name = f"{dtype} head dim {head_dim} {'causal' if causal else 'full'}"
                if isinstance(found, str):
                    print(f"{name}: {found[:160]}")
                    continue
                computed += 1
                limit = 6e-2 if dtype == "bf16" else 3e-2
                wrong += found[1] > limit
                print(f"{name}: first forward and backward {found[0] * 1e3:.0f} ms, error {found[1]:.1e}")
    with open("/proc/self/maps") as maps:
        compilers = sorted({line.split()[-1] for line in maps if "nvrtc" in line or "nvcc" in line})
    counts = f"{computed} of 8 problems, {wrong} wrong"
    print(f"computed by a driver alone: {counts}; compilers loaded: {compilers}")
    return 0 if computed and not wrong and not compilers else 1


if __name__ == "__main__":
    # No compiler, and no kernels of earlier runs.
    os.environ.setdefault("FA_NVRTC", "none")
    os.environ["FA_CACHE_DIR"] = tempfile.mkdtemp()
    sys.exit(main())
