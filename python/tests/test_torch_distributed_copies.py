"""Attention by heads, by copies: on the CPU what moves is copied from memory that the ranks share, on GPUs by
the copy engines."""

import contextlib
import ctypes
import functools
import itertools
import os
import tempfile

import pytest

torch = pytest.importorskip("torch")
import fa_attn  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fa_attn import _sharded_heads, distributed  # noqa: E402
from torch_ranks import ranks, tensors  # noqa: E402


class _Memory:
    """The copies of a group whose ranks are processes without GPUs: one message after the other."""

    def __init__(self, folder, size=1 << 22):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        names = [os.path.join(folder, str(rank)) for rank in range(self.world)]
        self.arenas = [torch.from_file(name, True, size, dtype=torch.uint8) for name in names]
        self.messages, self.pulled_bytes, self.kept = 0, 0, contextlib.nullcontext

    def message(self, shapes):
        self.messages += 1
        return _Message(self, shapes)


class _Message:
    def __init__(self, memory, shapes):
        self.memory, self.offsets, self.views, end = memory, [], [], 0
        for shape, dtype in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            own = memory.arenas[memory.rank][end : end + size]
            # What nobody fills nobody may read.
            own.fill_(255)
            self.views.append(own.view(dtype).view(shape))
            self.offsets.append(end)
            end += size + -size % 512

    def ready(self):
        dist.barrier()

    def pull(self, rank, view, source, target, pitches, width, height):
        assert rank != self.memory.rank
        there, here = pitches
        first = self.memory.arenas[rank].data_ptr() + self.offsets[view] + source
        for row in range(height):
            ctypes.memmove(target + row * here, first + row * there, width)
        self.memory.pulled_bytes += width * height

    def pulled(self, is_last):
        if is_last:
            dist.barrier()

    def arrived(self, event):
        pass


def _check(world, rows_in_stages):
    _sharded_heads._ROWS_IN_STAGES = rows_in_stages
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    memory = _Memory(folder[0])
    _sharded_heads.copies_of = lambda *_: memory
    masks = (dict(causal=True), dict(causal=False, window_size=(9, 5), softcap=3.0))
    cases = itertools.product(distributed.LAYOUTS, ((8, 4), (4, 4)), masks)
    for layout, heads, options in cases:
        whole = [x.bfloat16() for x in tensors(48, heads=heads, dim=16)]
        own = [distributed.shard(x, layout=layout).clone().requires_grad_() for x in whole[:3]]
        alone = [x.clone().requires_grad_() for x in whole[:3]]
        want = fa_attn.flash_attn_func(*alone, **options)
        want = [want, *torch.autograd.grad(want, alone, whole[3])]
        before = memory.messages, memory.pulled_bytes
        call = distributed.ulysses_attention
        if options["causal"]:
            call = functools.partial(distributed.attention, scheme="ulysses")
        out = call(*own, layout=layout, **options)
        found = [out, *torch.autograd.grad(out, own, distributed.shard(whole[3], layout=layout))]
        stages = 2 if rows_in_stages == 0 and heads[1] // world % 2 == 0 else 1
        # Q, K and V, O of each stage, dO, the gradients of each stage.
        assert memory.messages - before[0] == 2 + 2 * stages
        received = sum(x.numel() * 2 for x in (own[0], own[1], own[2], out)) * 2 * (world - 1) // world
        assert memory.pulled_bytes - before[1] == received
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, want):
            other = distributed.shard(other.detach(), layout=layout)
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3, msg=lambda text: f"{name}: {text}")


@ranks(2)
def test_two_ranks_pull_what_is_theirs():
    for rows_in_stages in (0, 1 << 20):
        _check(2, rows_in_stages)


@ranks(4)
def test_four_ranks_pull_what_is_theirs():
    _check(4, 0)


@ranks(2)
def test_copies_are_chosen_for_what_they_compute():
    heads, asked = _sharded_heads, []
    q, k, v = (torch.zeros(1, 64, count, 16, dtype=torch.bfloat16) for count in (4, 2, 2))
    heads.copies_of = lambda group, x, size: asked.append(size) or "copies"
    assert heads.copies_for(None, q, k, v) == "copies" and asked.pop() == 2 * 64 * 16 * 8 + 3 * 1024
    # Types apart, heads that two ranks do not divide, and no rows.
    assert heads.copies_for(None, q, k, v.float()) is None
    assert heads.copies_for(None, q.float(), k.float(), v.float()) is None
    assert heads.copies_for(None, q, k[:, :, :1], v[:, :, :1]) is None
    assert heads.copies_for(None, q[:, :0], k[:, :0], v[:, :0]) is None and not asked
    # On the CPU there are none, and the ranks exchange by their group.
    from fa_attn._sharded_copies import copies_of

    assert copies_of(None, q, 64) is None
    with pytest.raises(fa_attn.UnsupportedError, match="return_lse with scheme 'ulysses'"):
        distributed.attention(q, k, v, scheme="ulysses", return_lse=True)
    with pytest.raises(fa_attn.UnsupportedError, match="dropout_p with scheme 'ulysses'"):
        distributed.attention(q, k, v, scheme="ulysses", dropout_p=0.5)


def _on_gpus(rank, path):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=2)
    by_copies = _sharded_heads.copies_of
    for layout, heads in itertools.product(distributed.LAYOUTS, ((8, 4), (8, 8))):
        make = torch.Generator("cuda").manual_seed(0)
        shapes = [(2, 16384, count, 64) for count in (heads[0], heads[1], heads[1], heads[0])]
        q, k, v, dout = (torch.randn(shape, generator=make, device="cuda").bfloat16() for shape in shapes)
        found = []
        for copies in (by_copies, by_copies, lambda *_: None):
            _sharded_heads.copies_of = copies
            own = [distributed.shard(x, layout=layout).clone().requires_grad_() for x in (q, k, v)]
            out = distributed.ulysses_attention(*own, causal=True, layout=layout, deterministic=True)
            found.append([out, *torch.autograd.grad(out, own, distributed.shard(dout, layout=layout))])
        for again, by_nccl, first in zip(*found[1:], found[0]):
            assert torch.equal(again, first)
            torch.testing.assert_close(first, by_nccl, rtol=2e-2, atol=2e-3)
    _sharded_heads.copies_of = by_copies
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_copy_what_nccl_sends():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_gpus, (os.path.join(folder, "store"),), nprocs=2)
