"""Copies between the GPUs of one host by their copy engines: each rank's process has memory that the others
map, pulls what it needs from theirs, and says by numbers in shared memory what is ready and what is taken,
for which streams wait. Unlike NCCL's kernels these copies need no SM: they begin while attention has all."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import mmap
import os
import secrets
import socket
import time
import weakref

import torch
import torch.distributed as dist

from ._sharded_peers import place, texts_of, watched

# At most so many ranks, whose numbers have a line of 64 bytes each in a page.
_MOST_RANKS = 16
_PAGE, _LINE = 4096, 64
_ALIGNED = 512

# Seconds for which a process that ends waits for others to take what it has sent.
_PATIENCE = 10.0

# Ends all waits: the numbers of messages are compared as their difference.
_BEYOND = 1 << 30

_POINTER, _U32, _U64, _SIZE = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class _Rows(ctypes.Structure):
    """The driver's description of rows to be copied."""

    _fields_ = [
        *((name, _SIZE) for name in ("source_x", "source_y")),
        ("source_kind", _U32),
        ("source_host", _POINTER),
        ("source", _U64),
        ("source_array", _POINTER),
        ("source_pitch", _SIZE),
        *((name, _SIZE) for name in ("target_x", "target_y")),
        ("target_kind", _U32),
        ("target_host", _POINTER),
        ("target", _U64),
        ("target_array", _POINTER),
        *((name, _SIZE) for name in ("target_pitch", "width", "height")),
    ]


# A GPU's memory, as the driver names it.
_ON_GPU = 2

_FUNCTIONS = {
    "cuMemAlloc_v2": (ctypes.POINTER(_U64), _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _U64),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_U64), _Handle, _U32),
    "cuIpcCloseMemHandle": (_U64,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _U32),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_U64), _POINTER, _U32),
    "cuMemcpyDtoDAsync_v2": (_U64, _U64, _SIZE, _POINTER),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Rows), _POINTER),
    "cuStreamWaitValue32_v2": (_POINTER, _U64, _U32, _U32),
    "cuStreamWriteValue32_v2": (_POINTER, _U64, _U32, _U32),
}


class _Driver:
    """The functions of the driver's library; what they return by a code is an error."""

    def __init__(self):
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.errcheck = types, self._checked
            setattr(self, name, function)

    @staticmethod
    def _checked(code, function, _):
        if code:
            raise RuntimeError(f"{function.__name__} of the CUDA driver failed by code {code}")
        return code


class _Memory:
    """An address of a GPU as torch takes it."""

    def __init__(self, address, size):
        of = dict(shape=(size,), typestr="|u1", data=(address, False), version=3)
        self.__cuda_array_interface__ = of


def _is_before(value, number):
    """Whether the number of a message, of 32 bits, is one before another."""
    return 0 < (number - value) % (1 << 32) < 1 << 31


def _begun(process):
    """When a process of this host began, which tells it from a later one of its number; None where it has
    ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Copies:
    """What the ranks of a group on one host copy by. All of them make it, and each message, alike."""

    def __init__(self, group, device):
        self.world, self.rank = place(group)
        self.group, self.device, self.size, self.bases = weakref.ref(group), device, 0, []
        # The messages so far, where the next one may begin, and which ones lie where.
        self.number, self.at, self.used = 0, 0, []
        self.driver = self.host = None
        own = dict(host=_host(), device=str(torch.cuda.get_device_properties(device).uuid))
        own["is_wanted"] = os.environ.get("FA_PEER_COPIES") != "0"
        own.update(process=os.getpid(), begun=_begun(os.getpid()), page=f"/dev/shm/fa-{secrets.token_hex(8)}")
        peers = self._told(own)
        self.peers = [(peer["process"], peer["begun"]) for peer in peers]
        is_one_host = len({peer["host"] for peer in peers}) == 1
        is_apart = len({peer["device"] for peer in peers}) == self.world
        is_wanted = all(peer["is_wanted"] for peer in peers)
        # Those by which all ranks decide alike, then those that each finds out.
        self.works = is_wanted and is_one_host and is_apart
        self.works = self.works and self._all(self._create, peers[0]["page"])
        self.works = self.works and self._all(self._attach, peers[0]["page"])
        if self.rank == 0:
            with contextlib.suppress(OSError):
                os.unlink(own["page"])
        if self.works:
            self.stream = torch.cuda.Stream(device, priority=-1)
            watched(group, self)
            atexit.register(self._close)

    def _told(self, own):
        """What all ranks tell each other, by the store through which they met."""
        own = json.dumps(own).encode()
        return [json.loads(text) for text in texts_of(self.group(), own, self.device)]

    def _all(self, function, *args):
        """Whether all ranks have done their part."""
        try:
            function(*args)
            error = None
        except (AttributeError, OSError, RuntimeError) as failed:
            error = str(failed)
        return all(text is None for text in self._told(error))

    def _create(self, path):
        if any(begun is None or _begun(process) != begun for process, begun in self.peers):
            raise RuntimeError("a rank's process is not seen by this one")
        self.driver = _Driver()
        if self.rank == 0:
            # For this user alone.
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.truncate(_PAGE)

    def _attach(self, path):
        with open(path, "r+b") as file:
            self.page = mmap.mmap(file.fileno(), _PAGE)
        self.host = (_U32 * (_PAGE // 4)).from_buffer(self.page)
        address, on_gpu = ctypes.addressof(self.host), _U64()
        # For all contexts, and mapped.
        self.driver.cuMemHostRegister_v2(address, _PAGE, 3)
        self.driver.cuMemHostGetDevicePointer_v2(ctypes.byref(on_gpu), address, 0)
        # Of each rank the last message that is ready, and the last one that it has taken.
        lines = [on_gpu.value + _LINE * line for line in range(2 * _MOST_RANKS)]
        self.ready, self.taken = lines[:_MOST_RANKS], lines[_MOST_RANKS:]

    def room(self, size):
        """Whether there is memory for messages of `size` bytes, made by all ranks where it is not yet."""
        if 2 * size <= self.size:
            return True
        size = 1 << max(26, (2 * size - 1).bit_length())
        torch.cuda.synchronize(self.device)
        # Nobody reads what is given back.
        self._told("done")
        self.works = self._all(self._allocate, size) and self._all(self._map)
        return self.works

    def _allocate(self, size):
        driver, own, handle = self.driver, _U64(), _Handle()
        for rank, base in enumerate(self.bases):
            (driver.cuMemFree_v2 if rank == self.rank else driver.cuIpcCloseMemHandle)(base)
        self.bases, self.size, self.at, self.used = [], 0, 0, []
        driver.cuMemAlloc_v2(ctypes.byref(own), size)
        driver.cuIpcGetMemHandle(ctypes.byref(handle), own)
        self.handles = self.driver, own.value, handle, size

    def _map(self):
        _, own, handle, size = self.handles
        told = self._told(bytes(handle.bytes).hex())
        for rank, text in enumerate(told):
            base = _U64(own)
            if rank != self.rank:
                of = _Handle.from_buffer_copy(bytes.fromhex(text))
                # Makes the GPU a peer of this one.
                self.driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), of, 1)
            self.bases.append(base.value)
        self.size = size
        self.memory = torch.as_tensor(_Memory(own, size), device=self.device)

    def message(self, tensors):
        """Begins a message of tensors of some shapes, which the caller fills. `tensors`: (shape, dtype) of
        each. Returns a `Message`."""
        ends, end = [], 0
        for shape, dtype in tensors:
            size = torch.Size(shape).numel() * dtype.itemsize
            ends.append((end, size))
            end += size + -size % _ALIGNED
        begin = self.at if self.at + end <= self.size else 0
        own = torch.cuda.current_stream(self.device).cuda_stream
        overlapped = [number for first, last, number in self.used if first < begin + end and begin < last]
        for rank in range(self.world) if overlapped else ():
            if rank != self.rank:
                self.driver.cuStreamWaitValue32_v2(own, self.taken[rank], max(overlapped), 0)
        self.used = [x for x in self.used if not (x[0] < begin + end and begin < x[1])]
        self.number += 1
        self.used.append((begin, begin + end, self.number))
        self.at = begin + end
        offsets = [begin + first for first, _ in ends]
        views = [
            self.memory[offset : offset + size].view(dtype).view(shape)
            for offset, (_, size), (shape, dtype) in zip(offsets, ends, tensors)
        ]
        return Message(self, self.number, offsets, views)

    @contextlib.contextmanager
    def kept(self):
        """Within it a call that fails gives back no memory that is still written."""
        try:
            yield
        except BaseException:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            raise

    def look(self):
        """Whether a rank has ended whose message this one waits for; the watch of the group asks."""
        if not _is_before(self.host[_LINE // 4 * (_MOST_RANKS + self.rank)], self.number):
            return None
        for rank, (process, begun) in enumerate(self.peers):
            if _begun(process) != begun:
                return f"rank {rank} of the group is lost: its process has ended"
        return None

    def release(self):
        """Ends all waits, since a rank is lost."""
        for line in range(2 * _MOST_RANKS):
            self.host[_LINE // 4 * line] = self.number + _BEYOND

    def _close(self):
        until = time.monotonic() + _PATIENCE
        lines = [_LINE // 4 * (_MOST_RANKS + rank) for rank in range(self.world) if rank != self.rank]
        while time.monotonic() < until and any(_is_before(self.host[line], self.number) for line in lines):
            if any(_begun(process) != begun for process, begun in self.peers):
                return
            time.sleep(1e-3)


class Message:
    """What a rank has for the others, and what it pulls of theirs."""

    def __init__(self, copies, number, offsets, views):
        self.copies, self.number, self.offsets, self.views = copies, number, offsets, views

    def ready(self):
        """The views are filled on the current stream: others may read them, and this rank theirs into memory
        of this stream."""
        copies = self.copies
        stream = torch.cuda.current_stream(copies.device)
        copies.driver.cuStreamWriteValue32_v2(stream.cuda_stream, copies.ready[copies.rank], self.number, 0)
        copies.stream.wait_stream(stream)
        self.seen = set()

    def pull(self, rank, view, source, target, pitches, width, height):
        """Copies rows of a rank's view, from a byte of it, to an address. `pitches`: the bytes from one row
        to the next there and here."""
        copies = self.copies
        driver, stream = copies.driver, copies.stream.cuda_stream
        if rank not in self.seen:
            driver.cuStreamWaitValue32_v2(stream, copies.ready[rank], self.number, 0)
            self.seen.add(rank)
        source += copies.bases[rank] + self.offsets[view]
        if height == 1 or pitches == (width, width):
            driver.cuMemcpyDtoDAsync_v2(target, source, width * height, stream)
            return
        rows = _Rows(source_kind=_ON_GPU, source=source, source_pitch=pitches[0], target_kind=_ON_GPU)
        rows.target, rows.target_pitch, rows.width, rows.height = target, pitches[1], width, height
        driver.cuMemcpy2DAsync_v2(ctypes.byref(rows), stream)

    def pulled(self, is_last):
        """What `arrived` takes of all pulls so far. `is_last`: no further ones follow."""
        copies = self.copies
        if is_last:
            copies.driver.cuStreamWriteValue32_v2(
                copies.stream.cuda_stream, copies.taken[copies.rank], self.number, 0
            )
        return copies.stream.record_event()

    def arrived(self, event):
        """Orders the current stream behind pulls."""
        torch.cuda.current_stream(self.copies.device).wait_event(event)


def _host():
    """This host, by its name and by when it was started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


# The copies of a group, that work or do not.
_made = weakref.WeakKeyDictionary()


def copies_of(group, x, size):
    """The copies of a group for messages of `size` bytes; None where there are none: on CPUs, between hosts,
    in a graph that is captured, without peer access, and where FA_PEER_COPIES is 0 on some rank."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return None
    group = dist.group.WORLD if group is None else group
    world, _ = place(group)
    if not 1 < world <= _MOST_RANKS or "nccl" not in str(dist.get_backend(group)):
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    made = _made.get(group)
    if made is None:
        made = _made[group] = Copies(group, x.device)
    if not made.works or made.device != x.device or not made.room(size):
        return None
    return made
