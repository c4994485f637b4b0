"""Tests whose bodies run on several ranks, which are processes over gloo."""

import functools
import importlib
import multiprocessing
import os
import tempfile

import pytest

torch = pytest.importorskip("torch")
import fa_attn  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from fa_attn import distributed  # noqa: E402

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)


# What a rank imports, once for all: ranks are forks of a process that has computed nothing, whereas torch's
# autograd does not survive a fork of one that has.
multiprocessing.set_forkserver_preload(["torch.testing", "torch._dynamo", "fa_attn.distributed", "pytest"])

# Bodies of tests by name.
WORK = {}


def start(rank, world, path, module, name, arguments):
    importlib.import_module(module)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    try:
        WORK[name](*arguments)
    finally:
        dist.destroy_process_group()


def ranks(world):
    """A test whose body runs in `world` processes; what one raises fails the test."""

    def decorate(work):
        @functools.wraps(work)
        def test(*args):
            with tempfile.TemporaryDirectory() as folder:
                store = os.path.join(folder, "store")
                given = (world, store, work.__module__, work.__name__, args)
                mp.start_processes(start, given, nprocs=world, start_method="forkserver")

        WORK[work.__name__] = work
        del test.__wrapped__
        return test

    return decorate


def tensors(length, heads=(4, 2), batch=2, dim=16, seed=0):
    """Q, K, V and dO of the whole, the same on every rank."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, count, dim) for count in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=make) for shape in shapes]


def alone(q, k, v, dout, **options):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = fa_attn.flash_attn_func(q, k, v, **options)
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def over_ranks(function, whole, layout, **options):
    q, k, v, dout = (distributed.shard(x, layout=layout) for x in whole)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = function(q, k, v, **options)
    out.backward(dout)
    return [distributed.unshard(x, layout=layout) for x in (out, q.grad, k.grad, v.grad)]


def near(found, want, exact=False):
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, want):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, msg=lambda text: f"{name}: {text}")
    if exact:
        assert torch.equal(found[0], want[0])


WINDOWS = (
    dict(causal=True, window_size=(9, 0)),
    dict(causal=False, window_size=(9, 5)),
    dict(causal=False, window_size=(-1, 20)),
    dict(causal=False, window_size=(3, -1)),
)
