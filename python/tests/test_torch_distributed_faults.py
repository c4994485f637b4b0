"""Ranks that disagree, fail alone or end, and calls that are refused by name."""

import datetime
import functools
import time

import pytest

torch = pytest.importorskip("torch")
import fa_attn  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fa_attn import distributed  # noqa: E402
from torch_ranks import ranks  # noqa: E402


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


@ranks(3)
def test_what_one_rank_raises_before_its_call_is_an_error_of_all():
    from fa_attn import _sharded_peers

    rank = dist.get_rank()
    q = k = v = torch.ones(1, 8, 2, 8)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    calls = (
        lambda k: distributed.attention(q, k, v),
        lambda k: distributed.ulysses_attention(q[:, :, :1].expand(1, 8, 3, 8), k[:, :, :1], v[:, :, :1]),
        lambda k: distributed.decode_attention(q, k, v),
        lambda k: distributed.zigzag_ring_flash_attn_func(q, k, v, causal=False),
        lambda k: distributed.zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], starts, 8),
    )
    # Texts go by gloo, and as on GPUs by the host, where nobody knows the call yet.
    for is_slow in (False, True):
        _sharded_peers._is_slow = lambda device: is_slow
        for step, call in enumerate(calls):
            failing = step % 3
            said = None if rank == failing else f"rank {failing} of the group fails before the call"
            said = said or r"must have . axes|k has the shape"
            with pytest.raises(fa_attn.InputError, match=said):
                call(k[None] if rank == failing else k)
            # All go on with the next one.
            if step != 1:
                assert call(k) is not None
    # An error of all ranks is that of each.
    with pytest.raises(fa_attn.InputError, match="must have 4 axes"):
        distributed.attention(q[0], k, v)
    assert distributed.attention(q, k, v).shape == q.shape


TRANSFERS = ("all_gather", "all_gather_into_tensor", "all_to_all_single")


@ranks(2)
def test_a_rank_that_stops_is_an_error_of_the_other_at_every_stage():
    class Stops(RuntimeError):
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
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
        said = None if rank else "rank 1 of the group is lost: Stops"
        with pytest.raises(Stops if rank else distributed.PeerLost, match=said):
            train(group, [stage if rank else 1000])
        dist.barrier()
    train(None, [1000])


@ranks(3)
def test_a_rank_without_memory_is_an_error_of_all_at_shapes_that_they_know():
    from fa_attn import _sharded, _sharded_decode, _sharded_peers, _sharded_programs

    rank, q, k = dist.get_rank(), torch.ones(1, 12, 4, 8), torch.ones(1, 12, 2, 8)
    few, starts = q[:, :1].bfloat16(), torch.tensor([0, 12], dtype=torch.int32)
    halves = [torch.ones(1, 12, 2, 8, dtype=torch.bfloat16) for _ in range(2)]

    def trained(call):
        own = [x.clone().requires_grad_() for x in (q, k, k)]
        call(*own).sum().backward()

    def decoded(group):
        with torch.no_grad():
            distributed.decode_attention(few, *halves, group=group)

    def packed(q, k, v, group):
        deal = distributed.ring_flash_attn_varlen_func
        return deal(q[0], k[0], v[0], starts, 12, causal=True, group=group)

    mask = dict(mask_mod=lambda b, h, q, k: q - k < 7)
    calls = (
        lambda group: trained(lambda *own: distributed.attention(*own, group=group)),
        lambda group: trained(lambda *own: distributed.attention(*own, group=group, **mask)),
        lambda group: trained(lambda *own: packed(*own, group)),
        decoded,
    )
    # Where memory is taken: after the ranks have agreed, in the forward or the backward.
    places = (
        (0, _sharded.Gathered, "_whole"),
        (0, _sharded, "summed"),
        (1, _sharded_programs, "of_all"),
        (1, _sharded_programs, "summed"),
        (2, _sharded.Gathered, "_start"),
        (3, _sharded_decode.Results, "gather"),
    )

    def raises(*_, **__):
        raise torch.OutOfMemoryError("no room for 8 GiB")

    # As on GPUs, where a comparison is made once.
    _sharded_peers._is_slow = lambda device: True
    for at, (call, owner, name) in enumerate(places):
        group = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=60))
        for _ in range(3):
            calls[call](group)
        failing, plain, begun = at % 3, getattr(owner, name), time.monotonic()
        if rank == failing:
            setattr(owner, name, raises)
        kind = torch.OutOfMemoryError if rank == failing else distributed.PeerLost
        said = "no room"
        if rank != failing:
            said = f"rank {failing} of the group is lost: OutOfMemoryError: no room"
        with pytest.raises(kind, match=said):
            calls[call](group)
        assert time.monotonic() - begun < 20
        setattr(owner, name, plain)
        # What follows would be out of step.
        with pytest.raises(distributed.PeerLost, match=f"rank {failing} .* make a new group"):
            calls[call](group)
        dist.barrier()
        calls[call](None)


@ranks(2)
def test_calls_again_are_those_of_before():
    from fa_attn import _sharded_decode, _sharded_peers

    # As on GPUs, where a known call takes the short way.
    _sharded_peers._is_slow = lambda device: True
    make, rank = torch.Generator().manual_seed(1), dist.get_rank()

    def halves(*shape):
        return torch.randn(shape, generator=make).bfloat16()

    whole = [halves(3, 24, 2, 16) for _ in range(2)]
    k, v = (distributed.shard(x, layout="contiguous") for x in whole)
    sinks, used = torch.randn(4, generator=make), torch.tensor([5, 0, 12], dtype=torch.int32)
    pages = torch.arange(6, dtype=torch.int32).view(3, 2).flip(0)
    paged = [x.reshape(6, 6, 2, 16) for x in (k, v)]
    again, short = [], _sharded_decode._again

    def counted(*given):
        made = short(*given)
        again.append(made is not None)
        return made

    _sharded_decode._again = counted
    calls = (
        dict(),
        dict(sinks=sinks),
        dict(softmax_scale=0.5, softcap=2.0),
        dict(cache_seqlens=used),
        dict(cache_seqlens=used, page_table=pages, sinks=sinks),
    )
    found = []
    for step in range(3):
        for at, call in enumerate(calls):
            # Other queries at each step.
            q = halves(3, 1, 4, 16) * (1 + step)
            own = paged if "page_table" in call else (k, v)
            out, lse = distributed.decode_attention(q, *own, return_lse=True, **call)
            found.append((call, q, own, out, lse))
            assert again.pop() is (step > 0), (step, call)
    # Results of earlier calls are their own, and those of calls that take the long way.
    _sharded_decode._kinds.clear()
    for call, q, own, out, lse in found:
        want = distributed.decode_attention(q, *own, return_lse=True, **call)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
        _sharded_decode._kinds.clear()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                out = distributed.decode_attention(q, k, v)
            assert torch.equal(out, distributed.decode_attention(q, k, v))
    # A chunk of queries: the last rank alone has a mask.
    q = halves(3, 4, 4, 16)
    for _ in range(3):
        out = distributed.decode_attention(q, k, v)
        want = fa_attn.flash_attn_func(q, *whole, causal=True)
        torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
    assert again[-1]
    # What is differentiated takes the long way, which refuses it.
    with pytest.raises(fa_attn.UnsupportedError, match="gradients of decode_attention"):
        distributed.decode_attention(q.clone().requires_grad_(), k, v)
    # A rank that has left a call is an error of the other, and ranks that differ say so.
    with pytest.raises(fa_attn.InputError, match="the same options"):
        distributed.decode_attention(q[:, : 1 + rank], k, v, softcap=1.0)


@ranks(2)
def test_ranks_forget_the_same_calls():
    from fa_attn import _sharded_peers

    compared, gathered, texts = [], _sharded_peers.of_all, _sharded_peers.texts_of

    def counting(*given, **options):
        compared.append(len(calls))
        return texts(*given, **options)

    # As on a GPU, where a comparison is made once.
    _sharded_peers.texts_of, _sharded_peers._MOST_CALLS = counting, 3
    _sharded_peers._is_slow = lambda device: True
    group, calls = dist.new_group([0, 1]), []
    x = torch.zeros(1)
    for name in "abcabcdaabcd":
        calls.append(name)
        _sharded_peers.agree(group, x, name)
    # Of a, b, c the call d drops a, which then drops b; hits count as uses.
    assert compared == [1, 2, 3, 7, 8, 10, 11, 12], compared
    every = gathered(torch.tensor(compared), None, 2)
    assert torch.equal(*every)
    assert len(_sharded_peers._agreed[group]) == 3
    _sharded_peers.agree(None, x, "a")
    assert compared[-1] == 12 and len(_sharded_peers._agreed[dist.group.WORLD]) == 1
    # What differs behind the part of a text that is shown is found, too.
    long = list(range(400))
    with pytest.raises(fa_attn.InputError, match="the same options"):
        _sharded_peers.agree(group, x, [*long, dist.get_rank()])
    assert len(_sharded_peers._agreed[group]) == 3
    for step in range(50):
        _sharded_peers.agree(group, x, [*long, step])
    assert len(_sharded_peers._agreed[group]) == 3


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
