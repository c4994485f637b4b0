"""The ranks of a process group as peers of a call: whether all are there and make the same one, their
transfers, and what they learn of one that fails."""

from __future__ import annotations

import atexit
import functools
import hashlib
import inspect
import itertools
import threading
import time
import weakref
from collections import OrderedDict

import torch
import torch.distributed as dist

from ._core import InputError, UnsupportedError


class PeerLost(RuntimeError):
    """Another rank of a group has failed in a call that all had begun: the group's transfers are no longer in
    step. Make a new group, or start all ranks again."""


def place(group):
    """Ranks of the group, and this one."""
    is_group = group is None or group is dist.GroupMember.NON_GROUP_MEMBER
    if not is_group and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group is of the type {type(group).__name__}: it must be a process group of torch.distributed "
            "(dist.new_group, DeviceMesh.get_group), or None for all ranks"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise InputError("this process is no rank of group: only those of the group make the call")
    return dist.get_world_size(group), rank


class _Watch:
    """What is known of a group's ranks that have failed, by the store through which its processes met."""

    def __init__(self, group):
        self.group, self.why = weakref.ref(group), None
        self.store = dist.distributed_c10d._get_default_store()
        self.key = f"fa_attn/lost/{group.group_name}"
        self.thread = self.copies = None

    def look(self):
        """Whether a rank has failed, by what it left."""
        if self.why is None and self.store.check([self.key]):
            self.why = self.store.get(self.key).decode(errors="ignore")
        return self.why is not None

    def tell(self, rank, error):
        """Leaves what this rank has failed by."""
        self.why = f"rank {rank} of the group is lost: {type(error).__name__}: {error}"[:_TEXT]
        self.store.set(self.key, self.why)

    def refuse(self):
        if self.why is not None:
            raise PeerLost(f"{self.why}; make a new group, or start all ranks again")

    def watch(self):
        """Looks from now on, since nothing of this rank waits where a GPU does: transfers that would wait for
        ever are ended."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._keep_looking, daemon=True)
            self.thread.start()

    def _keep_looking(self):
        while not _ended.wait(_LOOKS):
            group = self.group()
            if group is None:
                return
            try:
                if self.copies is not None and self.why is None:
                    self.why = self.copies.look()
                    if self.why is not None:
                        self.copies.release()
                        return
                if self.look():
                    if self.copies is not None:
                        self.copies.release()
                    group.abort()
                    return
            except RuntimeError:
                # The processes part, and their store has ended.
                return
            del group


# Seconds between two looks at whether a rank has failed.
_LOOKS = 0.25
_ended = threading.Event()
atexit.register(_ended.set)
_watches = weakref.WeakKeyDictionary()


def _watch(group):
    group = dist.group.WORLD if group is None else group
    found = _watches.get(group)
    if found is None:
        found = _watches[group] = _Watch(group)
    return found


def watched(group, copies):
    """Has what a group copies by end its waits where a rank is lost."""
    watch = _watch(group)
    watch.copies = copies
    watch.watch()


def in_step(group):
    """Refuses where a rank of the group is known to be lost."""
    _watch(group).refuse()


def lost(group, error):
    """Tells the other ranks that this one has failed in a call that they have begun: for want of memory, or
    as a GPU or a transfer failed. What all ranks refuse alike leaves them in step, as does torch's way to end
    what a checkpoint computes again."""
    is_refused = isinstance(error, (InputError, UnsupportedError, PeerLost))
    if is_refused or not isinstance(error, (RuntimeError, MemoryError)):
        return
    for own in group if isinstance(group, (tuple, list)) else (group,):
        try:
            _watch(own).tell(place(own)[1], error)
        except (RuntimeError, ValueError, InputError):
            # Without processes nobody waits.
            continue


def transferred(transfer, *tensors, group=None, **options):
    """A transfer of torch's by name; see `finished`."""
    transfer, is_async = getattr(dist, transfer), not torch.compiler.is_compiling()
    work = transfer(*tensors, group=group, async_op=is_async, **options)
    if is_async:
        finished(work, tensors[-1], group)


def finished(work, tensor, group):
    """Waits for a transfer: on CPUs by gloo as long as no rank is known to be lost; where a stream orders
    what follows the host does not wait."""
    if work is None:
        return
    if torch.compiler.is_compiling() or tensor.is_cuda or "gloo" not in str(dist.get_backend(group)):
        work.wait()
        return
    begun = looked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        time.sleep(0.0 if now - begun < 1e-3 else 1e-4)
        if now - looked > _LOOKS:
            looked = now
            watch = _watch(group)
            watch.look()
            watch.refuse()
    work.wait()


def telling(group_of):
    """A gradient's function whose error the other ranks of `group_of(ctx)` learn of."""

    def decorate(function):
        @functools.wraps(function)
        def call(ctx, *args):
            if torch.compiler.is_compiling():
                return function(ctx, *args)
            try:
                return function(ctx, *args)
            except Exception as error:
                lost(group_of(ctx), error)
                raise

        return call

    return decorate


def of_all(tensor, group, world):
    """The tensors of all ranks, which have one shape."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(world)]
    transferred("all_gather", parts, tensor.contiguous(), group=group)
    return parts


# The calls that the ranks of a group have agreed on lately, on GPUs: there a comparison waits for the other
# hosts, and is made once. All ranks make the same calls, so that they forget the same ones: none compares
# alone.
_agreed = weakref.WeakKeyDictionary()

# Calls of a group that are remembered: lengths of packed batches may differ at each step.
_MOST_CALLS = 256

# Bytes of a call's text that an error shows, and of the digest of all of it, which is zeros of a rank that
# has failed before its call.
_TEXT, _DIGEST = 480, 32
_FAILED = bytes(_DIGEST)

# How many texts the ranks of a group have exchanged through the store, and this rank's that are there.
_exchanged = weakref.WeakKeyDictionary()

# Whether the call that this thread is in has come to its comparison.
_call = threading.local()


def _is_slow(device):
    """Whether reading what another rank says waits for a GPU."""
    return device.type == "cuda"


def texts_of(group, own, device, waits=True):
    """The texts of all ranks, of as many bytes on each. On GPUs they go through the store of the process
    group, by the host alone, and a rank that does not wait leaves its own there."""
    world, rank = place(group)
    if not _is_slow(device):
        own = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return [bytes(theirs.tolist()) for theirs in of_all(own.to(device), group, world)]
    group = dist.group.WORLD if group is None else group
    store = dist.distributed_c10d._get_default_store()
    numbers, keys = _exchanged.setdefault(group, (itertools.count(), []))
    stem = f"fa_attn/{group.group_name}/{next(numbers)}"
    store.set(f"{stem}/{rank}", own)
    if not waits:
        keys.append(f"{stem}/{rank}")
        return []
    texts = [store.get(f"{stem}/{other}") for other in range(world)]
    # All ranks are here, so that nobody reads earlier texts.
    for key in keys:
        store.delete_key(key)
    keys[:] = [f"{stem}/{rank}"]
    return texts


def agree(group, *given):
    """Refuses a call that ranks make with different shapes or options, or that one has failed to make:
    transfers of other sizes end in an error of the process group, or never. Returns what `has_agreed` takes,
    where the call is remembered."""
    if torch.compiler.is_compiling():
        return None
    _call.has_agreed = True
    world, rank = place(group)
    shown = [f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else str(x) for x in given]
    text, device = "; ".join(shown), given[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    digest, is_slow = hashlib.sha256(text.encode()).digest(), _is_slow(device)
    watch = _watch(group)
    watch.refuse()
    if is_slow:
        watch.watch()
    known = _agreed.setdefault(dist.group.WORLD if group is None else group, OrderedDict())
    if is_slow and digest in known:
        known.move_to_end(digest)
        return watch, known, digest
    for other, theirs in enumerate(texts_of(group, _text_of(text, digest), device)):
        shown = theirs[:_TEXT].rstrip(b"\0").decode(errors="ignore")
        if theirs[_TEXT:] == _FAILED:
            raise InputError(f"rank {other} of the group fails before the call of this rank, {rank}: {shown}")
        if theirs[_TEXT:] != digest:
            pairs = itertools.zip_longest(shown.split("; "), text.split("; "), fillvalue="no more")
            theirs, ours = ("; ".join(x) for x in zip(*(pair for pair in pairs if pair[0] != pair[1])))
            raise InputError(
                f"rank {other} of the group calls with {theirs}, and this rank, {rank}, with {ours}: all "
                "ranks have tensors of one shape and the same options (pad what the ranks do not divide)"
            )
    if not is_slow:
        return None
    known[digest] = None
    if len(known) > _MOST_CALLS:
        known.popitem(last=False)
    return watch, known, digest


def has_agreed(watch, known, digest):
    """Whether the ranks of a group are there and still remember a call, by what `agree` returned: it is then
    the latest."""
    if digest not in known or watch.why is not None:
        return False
    known.move_to_end(digest)
    _call.has_agreed = True
    return True


def _text_of(text, digest):
    return text.encode()[:_TEXT].ljust(_TEXT, b"\0") + digest


def together(function):
    """A function that all ranks of a group call: what one of them raises before it has compared its call with
    the others' is an error of all of them, which would else wait for it. On GPUs of those whose call is new
    to them."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **options):
        if torch.compiler.is_compiling() or getattr(_call, "is_open", False):
            return function(*args, **options)
        _call.is_open, _call.has_agreed = True, False
        try:
            if torch._C._are_functorch_transforms_active():
                raise UnsupportedError(
                    "torch.func's transformations of attention over several ranks: use torch.autograd.grad, "
                    "or transform attention of one GPU"
                )
            return function(*args, **options)
        except Exception as error:
            if _call.has_agreed:
                lost(_group_of(signature, args, options), error)
            else:
                _tell(signature, args, options, error)
            raise
        finally:
            _call.is_open = False

    return call


def _group_of(signature, args, options):
    return signature.bind_partial(*args, **options).arguments.get("group")


def _tell(signature, args, options, error):
    try:
        group = _group_of(signature, args, options)
        place(group)
        is_nccl = "nccl" in str(dist.get_backend(group))
    except Exception:
        # Whatever is wrong with the arguments or the group, no other rank waits here.
        return
    text = f"{type(error).__name__}: {error}"
    texts_of(group, _text_of(text, _FAILED), torch.device("cuda" if is_nccl else "cpu"), waits=False)
