"""Ranks that disagree, fail alone or end, and calls that are refused by name."""

import datetime
import functools

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
    from fa_attn import _sharded

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
        _sharded._is_slow = lambda device: is_slow
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


@ranks(2)
def test_ranks_forget_the_same_calls():
    from fa_attn import _sharded

    compared, gathered, texts = [], _sharded.of_all, _sharded._texts

    def counting(*given, **options):
        compared.append(len(calls))
        return texts(*given, **options)

    # As on a GPU, where a comparison is made once.
    _sharded._texts, _sharded._is_slow, _sharded._MOST_CALLS = counting, lambda device: True, 3
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
