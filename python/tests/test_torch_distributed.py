"""Ranks that are processes, over gloo, beside one process: outputs, gradients, and the drop-ins."""

import datetime
import functools
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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


def start(rank, world, path, name, arguments):
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
                given = (world, os.path.join(folder, "store"), work.__name__, args)
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


@ranks(2)
def test_two_ranks_compute_what_one_does():
    whole = tensors(64)
    for layout in distributed.LAYOUTS:
        for options in (dict(causal=True), dict(causal=False), *WINDOWS):
            for stages in (1, 2):
                call = functools.partial(distributed.attention, layout=layout, stages=stages)
                near(over_ranks(call, whole, layout, **options), alone(*whole, **options))


@ranks(4)
def test_four_ranks_and_their_drop_ins():
    whole = tensors(64, heads=(8, 4))
    for causal in (True, False):
        want = alone(*whole, causal=causal)
        zigzag = functools.partial(distributed.zigzag_ring_flash_attn_func, causal=causal)
        near(over_ranks(zigzag, whole, "zigzag"), want)
        ring = functools.partial(distributed.ring_flash_attn_func, causal=causal)
        near(over_ranks(ring, whole, "contiguous"), want)
        for layout in distributed.LAYOUTS:
            call = functools.partial(distributed.ulysses_attention, layout=layout)
            near(over_ranks(call, whole, layout, causal=causal), want)
        module = distributed.UlyssesAttention()
        near(over_ranks(module, whole, "contiguous", causal=causal), want)
    stacked = [distributed.shard(x) for x in tensors(64, heads=(4, 4))[:3]]
    packed = distributed.zigzag_ring_flash_attn_qkvpacked_func(torch.stack(stacked, 2), causal=True)
    assert torch.equal(packed, distributed.zigzag_ring_flash_attn_func(*stacked, causal=True))


@ranks(4)
def test_stripes_are_dealt_anew():
    whole, world, rank = tensors(64, heads=(8, 4)), dist.get_world_size(), dist.get_rank()

    def own(x, axis=1):
        return x.movedim(axis, 0)[rank::world].movedim(0, axis).contiguous()

    for options in (dict(), dict(window_size=(9, 0)), dict(alibi_slopes=torch.linspace(0.1, 0.8, 8))):
        want = alone(*whole, causal=True, **options)
        q, k, v = (own(x).requires_grad_() for x in whole[:3])
        out, lse, _ = distributed.stripe_flash_attn_func(
            q, k, v, causal=True, return_attn_probs=True, **options
        )
        out.backward(own(whole[3]))
        near([out, q.grad, k.grad, v.grad], [own(x) for x in want])
        exact = fa_attn.flash_attn_func(*whole[:3], causal=True, return_attn_probs=True, **options)[1]
        torch.testing.assert_close(lse, own(exact, 2), rtol=1e-4, atol=2e-5)
    kv = torch.stack([k, v], 2).detach()
    packed = distributed.stripe_flash_attn_kvpacked_func(q, kv, causal=True)
    assert torch.equal(packed, distributed.stripe_flash_attn_func(q, k, v, causal=True))
    with pytest.raises(fa_attn.UnsupportedError, match="without causal: stripes"):
        distributed.stripe_flash_attn_func(q, k, v)
    # 12 rows of a rank: 8 chunks do not divide them.
    whole = [x[:, :48] for x in whole]
    want = alone(*whole, causal=True)
    q, k, v = (own(x).requires_grad_() for x in whole[:3])
    out = distributed.stripe_flash_attn_func(q, k, v, causal=True)
    out.backward(own(whole[3]))
    near([out, q.grad, k.grad, v.grad], [own(x) for x in want])


@ranks(4)
def test_ulysses_shares_few_key_heads():
    whole = tensors(32, heads=(8, 2))
    found = over_ranks(distributed.ulysses_attention, whole, "contiguous", causal=True)
    near(found, alone(*whole, causal=True))


@ranks(3)
def test_llama3_deals_packed_sequences_evenly():
    lengths, (total, rank) = [10, 1, 25, 12], (48, dist.get_rank())
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v, dout = (x[0] for x in tensors(total, batch=1))
    for causal in (True, False):
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        want = fa_attn.flash_attn_varlen_func(*whole, starts, starts, 25, 25, causal=causal)
        want.backward(dout)
        own = slice(rank * 16, (rank + 1) * 16)
        local = [x[own].clone().requires_grad_() for x in (q, k, v)]
        *given, keys = distributed.llama3_flash_attn_prepare_cu_seqlens(starts, causal, rank, 3)
        out = distributed.llama3_flash_attn_varlen_func(*local, *given, 1, keys, causal=causal)
        out.backward(dout[own])
        torch.testing.assert_close(out, want[own], rtol=1e-4, atol=2e-5)
        for x, y in zip(local, whole):
            torch.testing.assert_close(x.grad, y.grad[own], rtol=1e-4, atol=2e-5)


@ranks(2)
def test_packed_sequences_are_dealt_one_by_one():
    lengths = [8, 0, 40, 16]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    whole, world = [x[0] for x in tensors(64, batch=1)], dist.get_world_size()
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05])

    def own(x, layout):
        return torch.cat([distributed.shard(part, 0, layout=layout) for part in x.split(lengths)])

    for layout, function in (
        ("zigzag", distributed.zigzag_ring_flash_attn_varlen_func),
        ("contiguous", distributed.ring_flash_attn_varlen_func),
    ):
        for options in (
            dict(causal=True),
            dict(causal=False),
            dict(causal=True, window_size=(5, 0)),
            dict(causal=True, alibi_slopes=slopes),
        ):
            q, k, v = (x.clone().requires_grad_() for x in whole[:3])
            want = fa_attn.flash_attn_varlen_func(q, k, v, starts, starts, 40, 40, **options)
            want.backward(whole[3])
            local = [own(x, layout).requires_grad_() for x in whole[:3]]
            out = function(*local, starts // world, 20, **options)
            out.backward(own(whole[3], layout))
            near([out, *(x.grad for x in local)], [own(x, layout) for x in (want, q.grad, k.grad, v.grad)])
        with pytest.raises(fa_attn.UnsupportedError, match="without causal, of packed sequences"):
            function(*local, starts // world, 20, window_size=(3, 3))
        with pytest.raises(fa_attn.InputError, match="max_seqlen is 3"):
            function(*local, starts // world, 3)
        with pytest.raises(fa_attn.InputError, match="it must ascend from 0 to the 32 rows"):
            function(*local, starts, 40)
    kv = torch.stack(local[1:], 1)
    packed = distributed.ring_flash_attn_varlen_kvpacked_func(local[0], kv, starts // world, 20)
    assert torch.equal(packed, distributed.ring_flash_attn_varlen_func(*local, starts // world, 20))


@ranks(2)
def test_slopes_and_sinks_are_those_of_all_heads():
    whole = tensors(64)
    given = dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05]))
    calls = distributed.attention, distributed.ulysses_attention
    for layout, function in itertools.product(distributed.LAYOUTS, calls):
        call = functools.partial(function, layout=layout)
        near(over_ranks(call, whole, layout, causal=True, **given), alone(*whole, causal=True, **given))
        of_sequences = torch.rand(2, 4, generator=torch.Generator().manual_seed(2))
        for mask in (dict(causal=False), dict(causal=False, window_size=(9, 5))):
            for slopes in (given["alibi_slopes"], of_sequences):
                options = dict(alibi_slopes=slopes, softcap=3.0, **mask)
                if function is distributed.attention:
                    near(over_ranks(call, whole, layout, **options), alone(*whole, **options))
        for causal in (True, False):
            one, all_ranks = (torch.linspace(-1, 1, 4).requires_grad_() for _ in range(2))
            want = alone(*whole, causal=causal, sinks=one)
            near(over_ranks(call, whole, layout, causal=causal, sinks=all_ranks), want)
            dist.all_reduce(all_ranks.grad)
            torch.testing.assert_close(all_ranks.grad, one.grad, rtol=1e-4, atol=2e-5)


@ranks(2)
def test_ranks_that_disagree_say_so():
    rank = dist.get_rank()
    rows = 8 + 4 * rank
    q, k, v = (torch.zeros(1, rows, heads, 8) for heads in (4, 2, 2))
    for call in (distributed.attention, distributed.ulysses_attention, distributed.decode_attention):
        said = f"rank {1 - rank} of the group calls with \\(1, {20 - rows},"
        with pytest.raises(fa_attn.InputError, match=said):
            call(q, k, v)
    # A rank more rows than the ranks divide: the other one is told, too, and does not wait.
    q, k, v = (torch.zeros(1, 8 + rank, 2, 8) for _ in range(3))
    calls = [distributed.attention, distributed.ulysses_attention, distributed.zigzag_ring_flash_attn_func]
    calls.append(functools.partial(distributed.stripe_flash_attn_func, causal=True))
    for call in calls:
        with pytest.raises(fa_attn.InputError, match=f"rank {1 - rank} of the group calls with"):
            call(q, k, v)
    starts = torch.tensor([0, 8 + rank], dtype=torch.int32)
    with pytest.raises(fa_attn.InputError, match=f"rank {1 - rank} of the group calls with"):
        distributed.zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], starts, 8 + rank)
    same = torch.zeros(1, 8, 2, 8)
    with pytest.raises(fa_attn.InputError, match="the same options"):
        distributed.attention(same, same, same, causal=rank == 0)
    assert distributed.attention(same, same, same).shape == same.shape


TRANSFERS = ("all_gather", "all_gather_into_tensor", "all_to_all_single")


@ranks(2)
def test_a_rank_that_stops_is_an_error_of_the_other_at_every_stage():
    class Stops(Exception):
        pass

    transfers = {name: getattr(dist, name) for name in TRANSFERS}

    def train(group, left):
        def counted(transfer):
            def call(*args, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise Stops
                return transfer(*args, **options)

            return call

        for name, transfer in transfers.items():
            setattr(dist, name, counted(transfer))
        try:
            for call in (distributed.attention, distributed.ulysses_attention):
                own = [torch.ones(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
                call(*own, group=group).sum().backward()
        finally:
            for name, transfer in transfers.items():
                setattr(dist, name, transfer)

    everything = [1000]
    train(dist.new_group([0, 1]), everything)
    stages, rank = 1000 - everything[0], dist.get_rank()
    assert stages > 12
    for stage in range(0, stages, 3):
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
        with pytest.raises(Stops if rank else RuntimeError, match=None if rank else "[Tt]imed out"):
            train(group, [stage if rank else 1000])
        dist.barrier()
    train(None, [1000])


@ranks(4)
def test_groups_of_some_ranks():
    rank = dist.get_rank()
    # Two pairs, whose ranks are not those of the world, and other tensors in each.
    pairs = [dist.new_group(list(members)) for members in ((1, 3), (2, 0))]
    at = 0 if rank in (1, 3) else 1
    group = pairs[at]
    whole = tensors(32, seed=at)
    torch.manual_seed(rank)

    def own(x, **options):
        return distributed.shard(x, group=group, **options)

    drop = dict(dropout_p=0.25)
    for call, layout in ((distributed.attention, "zigzag"), (distributed.ulysses_attention, "contiguous")):
        for options in (dict(causal=True), dict(causal=False, attention_chunk=8), drop):
            q, k, v, dout = (own(x, layout=layout).clone().requires_grad_() for x in whole)
            out = call(q, k, v, group=group, layout=layout, **options)
            out.backward(dout.detach())
            found = (out, q.grad, k.grad, v.grad)
            found = [distributed.unshard(x, group=group, layout=layout) for x in found]
            if options is drop:
                # All have the state of the group's first rank.
                both = [torch.empty_like(found[0]) for _ in range(2)]
                dist.all_gather(both, found[0], group=group)
                assert torch.equal(*both)
            else:
                near(found, alone(*whole, **options))
    last, keys = whole[0][:, -1:], [own(x, layout="contiguous") for x in whole[1:3]]
    out = distributed.decode_attention(last, *keys, group=group)
    want = fa_attn.flash_attn_func(last, *whole[1:3])
    torch.testing.assert_close(out, want, rtol=1e-4, atol=2e-5)


@ranks(2)
def test_rows_that_are_not_contiguous_and_ranks_without_rows():
    whole = tensors(32)
    want = alone(*whole, causal=True)
    for call, layout in ((distributed.attention, "zigzag"), (distributed.ulysses_attention, "contiguous")):
        # (batch, heads, rows, dim) in memory, and every other element of a row.
        laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole]
        wide = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in whole]
        for given in (laid, wide):
            q, k, v, dout = (distributed.shard(x, layout=layout) for x in given)
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = call(q, k, v, causal=True, layout=layout)
            out.backward(dout)
            near([distributed.unshard(x, layout=layout) for x in (out, q.grad, k.grad, v.grad)], want)
    # A sequence of one row: the other rank has none.
    one = [x[:, :1].contiguous() for x in whole]
    for options in (dict(causal=True), dict(causal=False, dropout_p=0.5, rng_state=(1, 2))):
        want = alone(*one, **options)
        for layout in distributed.LAYOUTS:
            q, k, v, dout = (distributed.shard(x, layout=layout) for x in one)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out, lse = distributed.attention(q, k, v, layout=layout, seqlen=1, return_lse=True, **options)
            assert lse.shape == (2, 4, q.shape[1])
            out.backward(dout)
            found = (out, q.grad, k.grad, v.grad)
            near([distributed.unshard(x, layout=layout, seqlen=1) for x in found], want)
    meta = whole[1].to("meta")
    for call in (distributed.attention, distributed.ulysses_attention, distributed.decode_attention):
        with pytest.raises(fa_attn.InputError, match="q on cpu, k on meta, v on cpu: all have to be on one"):
            call(whole[0], meta, whole[2])


@ranks(2)
def test_compiled_and_under_autocast():
    whole = tensors(32)
    compiled = torch.compile(distributed.attention, backend="aot_eager")
    near(over_ranks(compiled, whole, "zigzag"), over_ranks(distributed.attention, whole, "zigzag"))
    q, k, v, _ = (distributed.shard(x) for x in whole)
    want = distributed.attention(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        got = distributed.attention(q, k, v)
    assert torch.equal(got, want)


@ranks(2)
def test_checkpoints_run_it_again():
    from torch.utils.checkpoint import checkpoint

    whole = tensors(32)
    again = functools.partial(checkpoint, distributed.attention, use_reentrant=False)
    near(over_ranks(again, whole, "zigzag"), over_ranks(distributed.attention, whole, "zigzag"), exact=True)


@ranks(3)
def test_decoding_merges_what_ranks_hold():
    q, k, v, _ = tensors(48)
    own_k, own_v = (distributed.shard(x, layout="contiguous") for x in (k, v))
    for rows, causal in ((1, True), (4, True), (4, False), (20, True)):
        last = q[:, -rows:].contiguous()
        out, lse = distributed.decode_attention(last, own_k, own_v, causal=causal, return_lse=True)
        want, want_lse, _ = fa_attn.flash_attn_func(last, k, v, causal=causal, return_attn_probs=True)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=2e-6)
    # A short sequence has no keys on the later ranks.
    used = [[16, 5, 3][dist.get_rank()], [9, 0, 0][dist.get_rank()]]
    used = torch.tensor(used, dtype=torch.int32)
    out = distributed.decode_attention(q[:, :1], own_k, own_v, cache_seqlens=used)
    for at, keys in enumerate(([*range(21), 32, 33, 34], range(9))):
        one = slice(at, at + 1)
        want = fa_attn.flash_attn_func(q[one, :1], k[one, list(keys)], v[one, list(keys)])
        torch.testing.assert_close(out[one], want, rtol=1e-5, atol=2e-6)
    # Of 4 queries the first sees three keys less than the last.
    out = distributed.decode_attention(q[:, :4], own_k, own_v, cache_seqlens=used)
    for at, keys in enumerate(([*range(21), 32, 33, 34], range(9))):
        one = slice(at, at + 1)
        want = fa_attn.flash_attn_func(q[one, :4], k[one, list(keys)], v[one, list(keys)], causal=True)
        torch.testing.assert_close(out[one], want, rtol=1e-5, atol=2e-6)
    with pytest.raises(fa_attn.InputError, match="page_table without cache_seqlens"):
        table = torch.zeros(2, 1, dtype=torch.int32)
        distributed.decode_attention(q[:, :1], own_k, own_v, page_table=table)
    with pytest.raises(fa_attn.UnsupportedError, match="gradients of decode_attention"):
        distributed.decode_attention(q[:, :1].requires_grad_(), own_k, own_v)


@ranks(3)
def test_decoding_on_pages_of_each_rank():
    world, rank, page, dim = dist.get_world_size(), dist.get_rank(), 4, 16
    # Keys of each sequence on each rank, of which some have none.
    lengths = [[13, 5, 0], [7, 0, 3]]
    make = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, 20, 2, dim, generator=make) for _ in range(2)]
    q, sinks = torch.randn(2, 5, 4, dim, generator=make), torch.linspace(-1, 1, 4)
    used = torch.tensor([own[rank] for own in lengths], dtype=torch.int32)
    # Ranks have as much room as they like.
    table = torch.arange(8, dtype=torch.int32).flip(0).view(2, 4)
    cache = [torch.zeros(8 + rank, page, 2, dim) for _ in range(2)]
    for at, own in enumerate(lengths):
        for row in range(own[rank]):
            for pages, keys in zip(cache, whole):
                pages[table[at, row // page], row % page] = keys[at, sum(own[:rank]) + row]
    given = dict(cache_seqlens=used, page_table=table)
    for rows, causal, of_sinks in ((1, True, None), (5, True, None), (5, True, sinks), (3, False, None)):
        options = dict(causal=causal, sinks=of_sinks)
        last = q[:, -rows:]
        out, lse = distributed.decode_attention(last, *cache, return_lse=True, **given, **options)
        for at, own in enumerate(lengths):
            one, keys = slice(at, at + 1), slice(0, sum(own))
            want, want_lse, _ = fa_attn.flash_attn_func(
                last[one], *(x[one, keys] for x in whole), return_attn_probs=True, **options
            )
            torch.testing.assert_close(out[one], want, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(lse[one], want_lse, rtol=1e-4, atol=2e-5)
    # Of codes with a power of two the decoded values are exact.
    codes = [(x * 32).to(torch.float8_e4m3fn) for x in cache]
    decoded = [(x.float() / 32).bfloat16() for x in codes]
    descale, last = torch.full((2, 2), 1 / 32), q[:, -3:].bfloat16()
    out = distributed.decode_attention(last, *codes, k_descale=descale, v_descale=descale, **given)
    want = distributed.decode_attention(last, *decoded, **given)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@ranks(3)
def test_ranks_need_not_divide_the_rows():
    for length in (37, 5, 2):
        whole = tensors(length)
        for layout in distributed.LAYOUTS:
            rows = distributed.shard(whole[0], layout=layout).shape[1]
            places = distributed.positions(rows, layout=layout, seqlen=length)
            assert torch.equal(places, distributed.shard(torch.arange(length), 0, layout=layout))
            for options in (dict(causal=True), dict(causal=False), *WINDOWS):
                q, k, v, dout = (distributed.shard(x, layout=layout) for x in whole)
                q, k, v = (x.requires_grad_() for x in (q, k, v))
                out = distributed.attention(q, k, v, layout=layout, seqlen=length, **options)
                out.backward(dout)
                found = (out, q.grad, k.grad, v.grad)
                found = [distributed.unshard(x, layout=layout, seqlen=length) for x in found]
                near(found, alone(*whole, **options))


@ranks(2)
def test_programs_see_the_numbers_of_the_whole():
    whole = tensors(32)
    make = torch.Generator().manual_seed(5)
    bias, table = torch.randn(1, 4, 32, 32, generator=make), torch.randn(4, generator=make)
    for options in (
        dict(causal=False, mask_mod=lambda b, h, q, k: (q - k) % 3 == 0),
        dict(causal=False, score_mod=lambda s, b, h, q, k: s + table[h] * (q - k) * 0.1 + b * 0.5 * k),
        dict(causal=False, bias=bias),
        dict(causal=True, bias=bias, window_size=(9, 0)),
        dict(causal=True, attention_chunk=8),
    ):
        want = alone(*whole, **options)
        for layout, call in itertools.product(
            distributed.LAYOUTS, (distributed.attention, distributed.ulysses_attention)
        ):
            near(over_ranks(functools.partial(call, layout=layout), whole, layout, **options), want)
    # The gradient of a bias is that of a rank's rows, or heads.
    one = bias.clone().requires_grad_()
    alone(*whole, bias=one)
    for call in (distributed.attention, distributed.ulysses_attention):
        own = bias.clone().requires_grad_()
        over_ranks(functools.partial(call, layout="zigzag"), whole, "zigzag", causal=False, bias=own)
        dist.all_reduce(own.grad)
        torch.testing.assert_close(own.grad, one.grad, rtol=1e-4, atol=2e-5)


@ranks(2)
def test_dropout_of_some_heads_is_that_of_one_process():
    whole = tensors(32)
    for options in (dict(causal=True), dict(causal=False, window_size=(9, 3))):
        options.update(dropout_p=0.25, rng_state=(123, 456))
        want = alone(*whole, **options)
        for layout in distributed.LAYOUTS:
            call = functools.partial(distributed.ulysses_attention, layout=layout)
            near(over_ranks(call, whole, layout, **options), want, exact=True)
    # Without a state that of the first rank counts.
    torch.manual_seed(7)
    q, k, v, _ = whole
    want = fa_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    torch.manual_seed(7 + dist.get_rank())
    own = (distributed.shard(x, layout="contiguous") for x in (q, k, v))
    found = distributed.ulysses_attention(*own, dropout_p=0.5)
    assert torch.equal(distributed.unshard(found, layout="contiguous"), want)


@ranks(3)
def test_dropout_of_gathered_keys_is_that_of_one_process():
    whole, length = tensors(37), 37
    bias = torch.randn(1, 4, 37, 37, generator=torch.Generator().manual_seed(5))
    for options in (
        dict(causal=True),
        dict(causal=False, window_size=(9, 3)),
        dict(causal=False, bias=bias),
        dict(causal=False, alibi_slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])),
    ):
        options.update(dropout_p=0.25, rng_state=(123, 456))
        want = alone(*whole, **options)
        for layout in distributed.LAYOUTS:
            q, k, v, dout = (distributed.shard(x, layout=layout) for x in whole)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = distributed.attention(q, k, v, layout=layout, seqlen=length, **options)
            out.backward(dout)
            found = (out, q.grad, k.grad, v.grad)
            near([distributed.unshard(x, layout=layout, seqlen=length) for x in found], want)
    # Without a state that of the first rank counts.
    torch.manual_seed(7)
    q, k, v = (x[:, :36].contiguous() for x in whole[:3])
    want = fa_attn.flash_attn_func(q, k, v, causal=True, dropout_p=0.5)
    torch.manual_seed(7 + dist.get_rank())
    own = (distributed.shard(x) for x in (q, k, v))
    found = distributed.zigzag_ring_flash_attn_func(*own, causal=True, dropout_p=0.5)
    torch.testing.assert_close(distributed.unshard(found), want, rtol=1e-4, atol=2e-5)
    with pytest.raises(fa_attn.InputError, match="the same options"):
        distributed.attention(*(x.clone() for x in (q, k, v)), dropout_p=0.5, rng_state=(dist.get_rank(), 0))


@ranks(2)
def test_the_lse_has_gradients():
    whole = tensors(32)

    def train(x, weights, call):
        x = [part.clone().requires_grad_() for part in x]
        out, lse = call(*x)
        ((out * weights).sum() + lse.square().sum()).backward()
        return out.detach(), *(part.grad for part in x)

    def one(q, k, v):
        return fa_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[:2]

    want = train(whole[:3], whole[3], one)
    own = [distributed.shard(x) for x in whole]
    found = train(own[:3], own[3], functools.partial(distributed.attention, return_lse=True))
    near([distributed.unshard(x) for x in found], want)


@ranks(4)
def test_grids_of_ulysses_and_ring():
    whole, world, rank = tensors(64, heads=(8, 2)), dist.get_world_size(), dist.get_rank()
    slopes = dict(alibi_slopes=torch.linspace(0.1, 0.8, 8))
    for low, (ulysses, ring) in itertools.product((True, False), ((2, 2), (4, 1), (1, 4))):
        distributed.set_seq_parallel_pg(ulysses, ring, rank, world, low)
        for kind, extract in distributed.EXTRACT_FUNC_DICT.items():
            own = functools.partial(extract, rank=rank, world_size=world, rd=ring, ud=ulysses)
            module = distributed.LongContextAttention(ring_impl_type=kind)
            for causal, options in ((True, {}), (True, slopes), (False, {})):
                if kind == "strip" and not causal:
                    continue
                q, k, v, dout = (own(x) for x in whole)
                q, k, v = (x.requires_grad_() for x in (q, k, v))
                out = module(q, k, v, causal=causal, **options)
                out.backward(dout)
                want = alone(*whole, causal=causal, **options)
                near([out, q.grad, k.grad, v.grad], [own(x) for x in want])
    qkv = torch.stack([own(x) for x in tensors(64, heads=(4, 4))[:3]], 2)
    packed = distributed.LongContextAttentionQKVPacked(ring_impl_type="zigzag")(qkv, causal=True)
    module = distributed.LongContextAttention(ring_impl_type="zigzag")
    assert torch.equal(packed, module(*qkv.unbind(2), causal=True))


@ranks(2)
def test_packed_rows_of_a_llama():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    def logits(name, **inputs):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=name,
        )
        return LlamaForCausalLM(config)(**inputs).logits

    starts, places = torch.tensor([0, 10, 25, 40], dtype=torch.int32), torch.arange(40)
    numbers = torch.repeat_interleave(torch.arange(3), starts.diff().long())
    positions = (places - starts[numbers])[None]
    distributed.substitute_hf_flash_attn(None, 1, name="fa_over_ranks")
    own = slice(dist.get_rank() * 20, dist.get_rank() * 20 + 20)
    inputs = dict(input_ids=places[None, own], position_ids=positions[:, own])
    with pytest.raises(fa_attn.InputError, match="call update_ring_flash_attn_params for each batch"):
        logits("fa_over_ranks", **inputs)
    distributed.update_ring_flash_attn_params(starts, None)
    found = logits("fa_over_ranks", **inputs)
    seen = (numbers[:, None] == numbers) & (places[:, None] >= places)
    inputs = dict(input_ids=places[None], position_ids=positions, attention_mask=seen[None, None])
    torch.testing.assert_close(found, logits("sdpa", **inputs)[:, own], rtol=1e-3, atol=1e-4)


@ranks(2)
def test_context_parallel_replaces_scaled_dot_product_attention():
    q, k, v, _ = (x.transpose(1, 2).contiguous() for x in tensors(32))
    plain = torch.nn.functional.scaled_dot_product_attention
    want = plain(q, k, v, is_causal=True, enable_gqa=True)
    buffers = [q.clone(), k.clone(), v.clone()]
    with distributed.context_parallel(None, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        assert buffers[0].shape[2] == 16
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(*buffers, is_causal=True, enable_gqa=True)
    assert torch.nn.functional.scaled_dot_product_attention is plain
    assert torch.equal(buffers[0], q)
    (whole,) = distributed.context_parallel_unshard(None, [out], [2])
    torch.testing.assert_close(whole, want, rtol=1e-4, atol=2e-5)
    for dims, part in (([2, 3], "axis 3 has 15 rows"), ([2, 4], "axis 4 of a tensor of 4 axes")):
        odd = k[..., :15].clone()
        with pytest.raises(fa_attn.InputError, match=part):
            with distributed.context_parallel(None, buffers=[buffers[0], odd], buffer_seq_dims=dims):
                pass
        assert torch.equal(buffers[0], q) and torch.equal(odd, k[..., :15])


@ranks(2)
def test_a_plan_of_modules_over_ranks():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._attention import _ContextParallel
    from torch.distributed.tensor.parallel import parallelize_module

    class Attends(torch.nn.Module):
        def forward(self, q, k, v, **options):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    mesh, kinds = init_device_mesh("cpu", (2,)), _ContextParallel.AttentionType
    whole = [x.transpose(1, 2).contiguous().requires_grad_() for x in tensors(32)[:3]]
    plain = torch.nn.functional.scaled_dot_product_attention
    want = plain(*whole, is_causal=True, enable_gqa=True)
    want.square().sum().backward()
    for layout in (None, *distributed.LAYOUTS):
        module = parallelize_module(Attends(), mesh, distributed.ContextParallel(2, kinds.SDPA, layout))
        given = dict(dim=2, layout=layout or "zigzag")
        own = [distributed.shard(x.detach(), **given).requires_grad_() for x in whole]
        out = module(*own, is_causal=True, enable_gqa=True)
        out.square().sum().backward()
        assert torch.nn.functional.scaled_dot_product_attention is plain
        for found, x in zip((out, *(x.grad for x in own)), (want, *(x.grad for x in whole))):
            found = distributed.unshard(found, **given)
            torch.testing.assert_close(found, x.detach(), rtol=1e-4, atol=2e-5)
    with pytest.raises(fa_attn.UnsupportedError, match="attention_type FLEX: use torch's plan"):
        distributed.ContextParallel(2, kinds.FLEX)
    with pytest.raises(fa_attn.UnsupportedError, match="seq_dim is 1: rows are axis 2"):
        distributed.ContextParallel(1, kinds.SDPA)
    with pytest.raises(fa_attn.InputError, match="attention_type is 'ring'"):
        distributed.ContextParallel(2, "ring")


@ranks(2)
def test_context_parallel_deals_as_torch_is_told_to():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as torchs

    rows = torch.arange(8.0).view(1, 1, 8, 1)

    def dealt(mesh=None, **options):
        own = rows.clone()
        with distributed.context_parallel(mesh, buffers=[own], buffer_seq_dims=[2], **options):
            return own.flatten().tolist()

    zigzag, contiguous = ([0, 1, 6, 7], [2, 3, 4, 5]), ([0, 1, 2, 3], [4, 5, 6, 7])
    rank = dist.get_rank()
    assert dealt() == dealt(load_balance=True) == dealt(layout="zigzag") == zigzag[rank]
    assert dealt(load_balance=False) == dealt(layout="contiguous") == contiguous[rank]
    torchs._cp_options.enable_load_balance = False
    assert dealt() == contiguous[rank] and dealt(load_balance=True) == zigzag[rank]
    for method in ("alltoall", "allgather"):
        torchs.set_rotate_method(method)
        distributed.set_rotate_method(method)
        assert dealt(load_balance=True) == zigzag[rank]
    with pytest.raises(fa_attn.InputError, match="rotate_method is 'ring': it must be one of"):
        distributed.set_rotate_method("ring")
    torchs._cp_options.enable_load_balance = True
    with pytest.raises(fa_attn.InputError, match="give one of them"):
        dealt(layout="zigzag", load_balance=True)
    with pytest.raises(fa_attn.InputError, match="load_balance is 1"):
        dealt(load_balance=1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    assert dealt(mesh["cp"]) == zigzag[rank]
    with pytest.raises(fa_attn.InputError, match=r"mesh has 2 axes: give the one .* mesh\['cp'\]"):
        dealt(mesh)


@ranks(2)
def test_ranks_forget_the_same_calls():
    from fa_attn import _sharded

    compared = []
    gathered = _sharded.of_all

    def counting(tensor, group, world):
        compared.append(len(calls))
        return gathered(tensor, group, world)

    # As on a GPU, where a comparison is made once.
    _sharded.of_all, _sharded._is_slow, _sharded._MOST_CALLS = counting, lambda device: True, 3
    group, calls = dist.new_group([0, 1]), []
    x = torch.zeros(1)
    for name in "abcabcdaabcd":
        calls.append(name)
        _sharded.agree(group, x, name)
    # Of a, b, c the call d drops a, which then drops b; hits count as uses.
    assert compared == [1, 2, 3, 7, 8, 10, 11, 12], compared
    every = gathered(torch.tensor(compared), None, 2)
    assert torch.equal(*every)
    assert len(_sharded._agreed[group]) == 3
    _sharded.agree(None, x, "a")
    assert compared[-1] == 12 and len(_sharded._agreed[dist.group.WORLD]) == 1
    # What differs behind the part of a text that is shown is found, too.
    long = list(range(400))
    with pytest.raises(fa_attn.InputError, match="the same options"):
        _sharded.agree(group, x, [*long, dist.get_rank()])
    assert len(_sharded._agreed[group]) == 3
    for step in range(50):
        _sharded.agree(group, x, [*long, step])
    assert len(_sharded._agreed[group]) == 3


@ranks(2)
def test_what_is_not_computed_is_refused_by_name():
    q = k = v = torch.zeros(1, 8, 2, 8)
    slopes = torch.zeros(2)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(fa_attn.UnsupportedError, match="alibi_slopes without causal, of packed sequences"):
        distributed.ring_flash_attn_varlen_func(q[0], k[0], v[0], starts, 8, alibi_slopes=slopes)
    with pytest.raises(fa_attn.UnsupportedError, match="dropout_p is 0.5"):
        distributed.ring_flash_attn_varlen_func(q[0], k[0], v[0], starts, 8, dropout_p=0.5)
    with pytest.raises(fa_attn.InputError, match="dropout_p is 1.5: it is a probability"):
        distributed.ring_flash_attn_func(q, k, v, dropout_p=1.5)
    with pytest.raises(fa_attn.InputError, match="7 rows, which 2 chunks"):
        distributed.attention(q[:, :7], k[:, :7], v[:, :7])
    for call in (distributed.attention, distributed.ulysses_attention):
        with pytest.raises(fa_attn.UnsupportedError, match="q_descale of .*attention: over several ranks it"):
            call(q, k, v, q_descale=slopes)
    with pytest.raises(fa_attn.InputError, match=r"bias has 2 along keys where the call has 16"):
        distributed.attention(q, k, v, causal=False, bias=slopes)
    with pytest.raises(fa_attn.InputError, match="seqlen is 9, of which rank . of 2 has . rows"):
        distributed.attention(q, k, v, seqlen=9)
    with pytest.raises(fa_attn.UnsupportedError, match="ring_impl_type is 'basic_npu': it must be one of"):
        distributed.LongContextAttention(ring_impl_type="basic_npu")
    with pytest.raises(fa_attn.InputError, match="call set_seq_parallel_pg first"):
        distributed.LongContextAttention()
    with pytest.raises(fa_attn.InputError, match="degrees 3 and 1: their product must divide it"):
        distributed.set_seq_parallel_pg(3, 1, dist.get_rank(), 2)
    for call in (distributed.attention, distributed.ulysses_attention):
        with pytest.raises(fa_attn.InputError, match=r"alibi_slopes is \(3,\): it must be"):
            call(q, k, v, alibi_slopes=torch.zeros(3), causal=True)
    with pytest.raises(fa_attn.InputError, match="stages is 3"):
        distributed.attention(q, k, v, stages=3)
    with pytest.raises(fa_attn.InputError, match="k is torch.float32 and v torch.bfloat16"):
        distributed.attention(q, k, v.bfloat16())
    with pytest.raises(fa_attn.InputError, match="layout is 'striped'"):
        distributed.attention(q, k, v, layout="striped")
    with pytest.raises(fa_attn.InputError, match="7 rows, which 2 chunks"):
        distributed.ulysses_attention(q[:, :7], k[:, :7], v[:, :7], layout="zigzag")
    three, one = torch.zeros(1, 8, 3, 8), torch.zeros(1, 8, 1, 8)
    for heads in ((three, k, v), (q, k, one), (q, one[:, :, :0], one)):
        for call in (distributed.attention, distributed.ulysses_attention, distributed.decode_attention):
            with pytest.raises(fa_attn.InputError, match="a divisor of q's"):
                call(*heads)
    for call in (distributed.attention, distributed.decode_attention):
        with pytest.raises(fa_attn.InputError, match="of the type ndarray: it must be a torch tensor"):
            call(q.numpy(), k.numpy(), v.numpy())
    with pytest.raises(fa_attn.InputError, match="window_size is 3: it must be"):
        distributed.attention(q, k, v, window_size=3)
    with pytest.raises(fa_attn.InputError, match="group is of the type str"):
        distributed.shard(q, group="all")
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        for call in (distributed.shard, distributed.unshard):
            with pytest.raises(fa_attn.InputError, match="no rank of group"):
                call(q, group=first)
    with pytest.raises(fa_attn.UnsupportedError, match="3 query heads and 3 K/V heads over 2 ranks"):
        distributed.ulysses_attention(*[torch.zeros(1, 8, 3, 8)] * 3)


def test_a_llama_trains_over_two_ranks_as_on_one():
    pytest.importorskip("transformers")
    example = Path(__file__).parents[1] / "examples" / "train_over_ranks.py"
    run = [sys.executable, str(example), "--ranks", "2", "--steps", "4"]
    found = subprocess.run(run, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "the same losses" in found.stdout
