"""Whole numbers that change from call to call, under torch.compile and torch.export: a graph serves all.

pip install torch pytest && python -m pytest tests/test_torch_compiled.py
"""

import functools
import logging

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402

# More values than a function may be compiled for, but for the limits of the tests' time.
VALUES = range(20, 30)
ROOM = 64


def rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def starts(total):
    return ints(0, total // 2, total)


ANGLES = rows(ROOM, 16)
TURNED = dict(rotary_cos=ANGLES.cos(), rotary_sin=ANGLES.sin())
step = fa_attn.flash_attn_with_kvcache


def varlen(q, cu, most):
    return fa_attn.flash_attn_varlen_func(q, q, q, cu, cu, most, most, causal=True)


def longest(cu):
    return int((cu[1:] - cu[:-1]).max())


def varlen_backward(q, cu, most):
    lengths = (cu, cu, most, most)
    out, lse = fa_attn.flash_attn_varlen_func(q, q, q, *lengths, causal=True, return_softmax_lse=True)
    return fa_attn.flash_attn_varlen_backward(out, q, q, q, out, lse, *lengths, causal=True)


def backward(q, side):
    options = dict(window_size=(side, side), query_offset=side)
    out, lse = fa_attn.flash_attn_func(q, q, q, return_softmax_lse=True, **options)
    return fa_attn.flash_attn_backward(out, q, q, q, out, lse, **options)


def appended(q, cache, new, used, **options):
    """The result, and a cache that was written."""
    written = cache * 1
    return step(q, written, cache * 2, new, new, cache_seqlens=used, **options), written


def planned(q, cache, cu, used, most, others):
    metadata = fa_attn.get_scheduler_metadata(
        2, most, others, 4, 2, 64, used, cu_seqlens_q=cu, max_seqlen_k_new=others, num_splits=others
    )
    options = dict(cu_seqlens_q=cu, max_seqlen_q=most, scheduler_metadata=metadata)
    return step(q, cache, cache, cache_seqlens=used, **options)


def described(batch, most, heads, dim, used):
    options = dict(headdim_v=dim, page_size=most, window_size=(most, most))
    fa_attn.get_scheduler_metadata(batch, most, most, 2 * heads, heads, dim, used, **options)
    return used * 2


Q, CACHE, QKV = rows(1, 40, 2, 64), rows(2, ROOM, 2, 64), rows(1, 40, 3, 2, 64)
ONE, NEW = rows(2, 1, 4, 64), rows(2, 1, 2, 64)
PAGES, TABLE = CACHE.view(8, 16, 2, 64), torch.arange(8, dtype=torch.int32).view(2, 4)
# A function, and its arguments for a number.
CASES = {
    "varlen": (varlen, lambda n: (rows(n, 2, 64), starts(n), n)),
    "varlen, two bounds": (
        lambda q, k, cu, cu_k, most, most_k: fa_attn.flash_attn_varlen_func(q, k, k, cu, cu_k, most, most_k),
        lambda n: (rows(n, 2, 64), rows(2 * n, 2, 64), starts(n), starts(2 * n), n, 2 * n),
    ),
    "varlen, one bound": (
        lambda q, cu, most: fa_attn.flash_attn_varlen_func(q, Q, Q, cu, None, most, 40),
        lambda n: (rows(n, 2, 64), ints(0, n), n),
    ),
    "kvpacked": (
        lambda q, kv, cu, n: fa_attn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, n, n),
        lambda n: (rows(n, 2, 64), rows(n, 2, 2, 64), starts(n), n),
    ),
    "qkvpacked": (
        fa_attn.flash_attn_varlen_qkvpacked_func,
        lambda n: (rows(n, 3, 2, 64), starts(n), n),
    ),
    "offset": (
        lambda q, n: fa_attn.flash_attn_func(q, q, q, causal=True, query_offset=n - 24),
        lambda n: (Q, n),
    ),
    "window": (lambda q, n: fa_attn.flash_attn_func(q, q, q, window_size=(n, n + 1)), lambda n: (Q, n - 18)),
    "one side": (
        lambda q, sides: fa_attn.flash_attn_func(q, q, q, causal=True, window_size=sides),
        lambda n: (Q, (n - 18, -1)),
    ),
    "window of qkv": (
        lambda x, n: fa_attn.flash_attn_qkvpacked_func(x, window_size=(n, 0)),
        lambda n: (QKV, n - 18),
    ),
    "num_splits": (lambda q, n: fa_attn.flash_attn_func(q, q, q, num_splits=n), lambda n: (Q, n - 18)),
    "hints": (
        lambda q, n: fa_attn.flash_attn_func(q, q, q, min_seqlen_k=n, fa_version=n),
        lambda n: (Q, n - 18),
    ),
    "cache": (lambda q, c, n: step(q, c, c, cache_seqlens=n, num_splits=n), lambda n: (ONE, CACHE, n)),
    "cache in pages": (
        lambda q, c, n: step(q, c, c, cache_seqlens=n, page_table=TABLE),
        lambda n: (ONE, PAGES, n),
    ),
    "cache with padding": (
        lambda q, c, n: step(q, c, c, cache_seqlens=n, cache_leftpad=ints(3, 5)),
        lambda n: (ONE, CACHE, n),
    ),
    "packed queries": (
        lambda q, c, cu, n: step(q, c, c, cu_seqlens_q=cu, max_seqlen_q=n, cache_seqlens=n),
        lambda n: (rows(n, 4, 64), CACHE, starts(n), n),
    ),
    "append": (appended, lambda n: (ONE, CACHE, NEW, n)),
    "append, turned": (
        lambda q, c, new, n: appended(q, c, new, n, window_size=(n, n), **TURNED),
        lambda n: (ONE, CACHE, NEW, n),
    ),
    "append of packed rows": (
        lambda q, c, new, cu, n, used: appended(
            q, c, new, used, cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=n, **TURNED
        ),
        lambda n: (rows(n, 4, 64), CACHE, rows(n, 2, 64), starts(n), n, n - 10),
    ),
    "metadata": (planned, lambda n: (rows(n, 4, 64), CACHE, starts(n), ints(n, 9), n, n - 10)),
    "all of metadata": (described, lambda n: (n, n + 1, n + 2, 2 * n, torch.ones(n, dtype=torch.int32))),
    "flags of lengths": (
        lambda q: fa_attn.flash_attn_func(q, q, q, causal=q.shape[1] > 1, return_lse=q.shape[1] > 2),
        lambda n: (rows(1, n, 2, 64),),
    ),
    "whole numbers as factors": (
        lambda q, cap, scale: fa_attn.flash_attn_func(q, q, q, softcap=cap, softmax_scale=scale),
        lambda n: (rows(1, n, 2, 64), 30, 1),
    ),
    "varlen backward": (varlen_backward, lambda n: (rows(n, 2, 64), starts(n), n)),
    "backward": (backward, lambda n: (Q, n - 18)),
}
# The same with numbers that only the run knows.
READ = {
    "int": (lambda q, cu: varlen(q, cu, longest(cu)), lambda n: (rows(n, 2, 64), starts(n))),
    "item": (lambda q, cu: varlen(q, cu, cu.diff().max().item()), lambda n: (rows(n, 2, 64), starts(n))),
    "tensor": (lambda q, cu: varlen(q, cu, cu.diff().max()), lambda n: (rows(n, 2, 64), starts(n))),
    "kvpacked": (
        lambda q, kv, cu: fa_attn.flash_attn_varlen_kvpacked_func(
            q, kv, cu, cu, longest(cu), cu.diff().max()
        ),
        lambda n: (rows(n, 2, 64), rows(n, 2, 2, 64), starts(n)),
    ),
    "qkvpacked": (
        lambda x, cu: fa_attn.flash_attn_varlen_qkvpacked_func(x, cu, longest(cu)),
        lambda n: (rows(n, 3, 2, 64), starts(n)),
    ),
    "window": (
        lambda q, x: fa_attn.flash_attn_func(q, q, q, window_size=(int(x.max()), x.max())),
        lambda n: (Q, ints(1, n - 18)),
    ),
    "num_splits": (
        lambda q, x: fa_attn.flash_attn_func(q, q, q, num_splits=x.max().item()),
        lambda n: (Q, ints(1, n - 18)),
    ),
    "cache": (lambda q, c, x: step(q, c, c, cache_seqlens=int(x.max())), lambda n: (ONE, CACHE, ints(n, 1))),
    "append": (
        lambda q, c, new, x: appended(q, c, new, int(x.max()), window_size=(int(x.max()), 0), **TURNED),
        lambda n: (ONE, CACHE, NEW, ints(n, 1)),
    ),
    "append of packed rows": (
        lambda q, c, new, cu, used: appended(
            q, c, new, used, cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=longest(cu), **TURNED
        ),
        lambda n: (rows(n, 4, 64), CACHE, rows(n, 2, 64), starts(n), n - 10),
    ),
    "metadata": (
        lambda q, c, cu, used: planned(q, c, cu, used, longest(cu), int(used.min())),
        lambda n: (rows(n, 4, 64), CACHE, starts(n), ints(n, 9)),
    ),
    "varlen backward": (
        lambda q, cu: varlen_backward(q, cu, longest(cu)),
        lambda n: (rows(n, 2, 64), starts(n)),
    ),
}


@pytest.fixture(autouse=True)
def fresh():
    logging.disable(logging.WARNING)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()
    logging.disable(logging.NOTSET)


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else [x for one in results for x in flat(one)]


def compare(got, want):
    for one, other in zip(flat(got), flat(want)):
        assert torch.allclose(one, other, atol=1e-5), (one - other).abs().max()


@pytest.mark.parametrize("options", [dict(), dict(fullgraph=True, dynamic=True)], ids=["plain", "dynamic"])
@pytest.mark.parametrize("name", [*CASES, *(f"read: {name}" for name in READ)])
def test_numbers_that_change_are_compiled_once_or_twice(name, options):
    function, arguments = READ[name[6:]] if name.startswith("read: ") else CASES[name]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs) if options else graph.forward

    compiled = torch.compile(function, backend=backend, **options)
    for n in VALUES:
        compare(compiled(*arguments(n)), function(*arguments(n)))
    assert len(graphs) <= 2, f"{len(graphs)} compilations of {len(VALUES)} calls"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["varlen", "read"])
def test_gradients_of_bounds_that_change(name, backend):
    import torch._dynamo.utils as counted

    function = varlen if name == "varlen" else lambda q, cu, _: varlen(q, cu, longest(cu))
    counted.counters.clear()
    squared = lambda q, *most: function(q * 2, *most).square()  # noqa: E731
    compiled = torch.compile(squared, backend=backend, fullgraph=True)
    try:
        for n in VALUES:
            q = rows(n, 2, 64).requires_grad_()
            (got,) = torch.autograd.grad(compiled(q, starts(n), n).sum(), q)
            (want,) = torch.autograd.grad(function(q * 2, starts(n), n).square().sum(), q)
            assert torch.allclose(got, want, atol=1e-4)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"inductor compiles nothing here: {error}")
    assert counted.counters["stats"]["unique_graphs"] <= 2


def test_wrong_numbers_are_refused_when_the_graph_runs():
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    packed = compiled(varlen)
    for n in (20, 21, 22):
        packed(rows(n, 2, 64), starts(n), n)
    for most, text in ((-3, "max_seqlen_q is -3"), (5, "max_seqlen is 5")):
        with pytest.raises(fa_attn.InputError, match=text):
            packed(rows(24, 2, 64), starts(24), most)
    for name, bad in (("cache", 99), ("cache", -1), ("num_splits", 300), ("num_splits", 17)):
        function, arguments = READ[name]
        run = compiled(function)
        run(*arguments(30))
        *others, _ = arguments(30)
        if (name, bad) == ("num_splits", 17):
            run(*others, ints(17))
            continue
        with pytest.raises(fa_attn.InputError, match=f"{'seqused_k' if name == 'cache' else name}.* {bad}"):
            run(*others, ints(bad))


class Packed(torch.nn.Module):
    def forward(self, q, cu, most):
        return varlen(q, cu, most)


class Read(torch.nn.Module):
    def forward(self, q, cu):
        return varlen(q, cu, cu.diff().max().item())


class Step(torch.nn.Module):
    def forward(self, q, cache, new, used, side):
        return appended(q, cache, new, used, window_size=(side, side), num_splits=side)[0]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("module", [Packed, Read, Step], ids=lambda x: x.__name__)
def test_numbers_stay_open_in_exported_programs(module, strict):
    dim = getattr(getattr(torch.export, "Dim", None), "DYNAMIC", None)
    if dim is None:
        pytest.skip("torch 2.6 and newer leave a number open")
    arguments, shapes = {
        Packed: (lambda n: (rows(n, 2, 64), starts(n), n), ({0: dim}, None, dim)),
        Read: (lambda n: (rows(n, 2, 64), starts(n)), ({0: dim}, None)),
        Step: (lambda n: (ONE, rows(2, 2 * n, 2, 64), NEW, n, n - 9), (None, {1: dim}, None, dim, dim)),
    }[module]
    program = torch.export.export(module(), arguments(20), dynamic_shapes=shapes, strict=strict).module()
    for n in (20, 31, 45):
        compare(program(*arguments(n)), module()(*arguments(n)))


def test_a_graph_of_jagged_tensors_does_not_ask_for_their_longest():
    """A graph that makes them, and one that gets them, of several lengths."""

    def made(values, offsets):
        return whole(torch.nested.nested_tensor_from_jagged(values, offsets))

    def whole(x):
        x = x.transpose(1, 2)
        return fa_attn.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)

    torch._dynamo.reset()
    given = torch.compile(whole, backend="aot_eager", fullgraph=True)
    for call in (
        torch.compile(made, backend="aot_eager", fullgraph=True),
        lambda values, offsets: given(torch.nested.nested_tensor_from_jagged(values, offsets)),
    ):
        for lengths in ((3, 4), (9, 0, 2)):
            offsets = torch.tensor([0, *lengths]).cumsum(0)
            values = rows(sum(lengths), 2, 16).requires_grad_()
            found = call(values, offsets).values()
            cu, most = offsets.int(), max(lengths)
            want = fa_attn.flash_attn_varlen_func(values, values, values, cu, cu, most, most, causal=True)
            torch.testing.assert_close(found, want)
            torch.testing.assert_close(*(torch.autograd.grad(x.sum(), values) for x in (found, want)))


def test_one_graph_serves_masks_of_all_lengths():
    """Whether their words are one or several, and 32 divides the lengths or not."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def call(q, seen):
        return fa_attn.flash_attn_func(q, q, q, mask=seen)

    def given(length):
        return rows(1, length, 2, 16), rows(length, length) > -0.5

    class Module(torch.nn.Module):
        def forward(self, q, seen):
            return call(q, seen)

    length = torch.export.Dim("length", min=2, max=ROOM + 40)
    exported = torch.export.export(Module(), given(9), dynamic_shapes=({1: length}, {0: length, 1: length}))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for length in (9, 32, 33, 64, 31, 96, 2):
        want = call(*given(length))
        torch.testing.assert_close(exported.module()(*given(length)), want)
        torch.testing.assert_close(compiled(*given(length)), want)
    assert counter.frame_count == 1
