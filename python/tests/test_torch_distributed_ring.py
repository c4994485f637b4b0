"""Keys and values that travel from rank to rank, over gloo, beside the gathered ones and one process."""

import datetime
import functools
import itertools
import math
import os
import time
import types

import pytest

torch = pytest.importorskip("torch")
import fa_attn  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fa_attn import _sharded_heads, distributed  # noqa: E402
from fa_attn._sharded import Dealing, Options  # noqa: E402
from fa_attn._sharded_heads import gains  # noqa: E402
from fa_attn._sharded_ring import calls, pays  # noqa: E402
from torch_ranks import WINDOWS, alone, near, over_ranks, ranks, tensors  # noqa: E402

MASKS = (dict(causal=True), dict(causal=False), *WINDOWS)
ring = functools.partial(distributed.attention, scheme="ring")


def test_calls_see_what_the_mask_shows():
    """Each pair of a query and a key that the mask shows is in one call of one step, and no other."""
    counts = {}
    for layout, world, length in itertools.product(distributed.LAYOUTS, (1, 2, 3), (0, 1, 5, 24, 29)):
        dealing = Dealing(layout, world, length)
        own = [[at for span in dealing.spans(rank) for at in range(*span)] for rank in range(world)]
        for mask in MASKS:
            options = Options(None, mask["causal"], mask.get("window_size", (-1, -1)), 0.0, False)
            found = torch.zeros(length, length, dtype=torch.int32)
            for rank, owner in itertools.product(range(world), range(world)):
                made = calls(options, dealing, rank, owner)
                named = mask.get("window_size"), mask["causal"]
                counts[layout, world, length, rank, owner, *named] = len(made)
                for rows, keys, sides in made:
                    left, right = sides["window_size"]
                    queries, seen = own[rank][rows], own[owner][keys]
                    assert sides["causal"] == (right == 0) and queries and seen
                    for i, j in itertools.product(range(len(queries)), range(len(seen))):
                        distance = j - i - (len(seen) - len(queries))
                        if (left < 0 or distance >= -left) and (right < 0 or distance <= right):
                            found[queries[i], seen[j]] += 1
            behind = torch.arange(length)[:, None] - torch.arange(length)
            want = torch.ones(length, length, dtype=torch.int32)
            if options.left >= 0:
                want[behind > options.left] = 0
            if options.right >= 0:
                want[behind < -options.right] = 0
            assert torch.equal(found, want), (layout, world, length, mask)
    # Of a causal mask and of none, one call for each step.
    for rank, owner, causal in itertools.product(range(3), range(3), (True, False)):
        assert counts["zigzag", 3, 24, rank, owner, None, causal] == 1


@ranks(2)
def test_two_ranks_compute_what_one_does():
    for heads in ((4, 2), (2, 2), (4, 1)):
        whole = tensors(64, heads=heads)
        for layout, options in itertools.product(distributed.LAYOUTS, (*MASKS, dict(softcap=3.0))):
            call = functools.partial(ring, layout=layout)
            found = over_ranks(call, whole, layout, **options)
            near(found, alone(*whole, **{"causal": True, **options}))
            gathered = functools.partial(distributed.attention, layout=layout, scheme="gather")
            near(found, over_ranks(gathered, whole, layout, **options))
            runs = [over_ranks(call, whole, layout, deterministic=True, **options) for _ in range(2)]
            assert all(map(torch.equal, *runs))


@ranks(4)
def test_four_ranks_compute_what_one_does():
    whole = tensors(64, batch=1)
    for layout, options in itertools.product(distributed.LAYOUTS, MASKS):
        call = functools.partial(ring, layout=layout)
        near(over_ranks(call, whole, layout, **options), alone(*whole, **options))


@ranks(3)
def test_ranks_need_not_divide_the_rows():
    for length in (1, 2, 5, 43, 48):
        whole = tensors(length)
        for layout, options in itertools.product(distributed.LAYOUTS, MASKS):
            q, k, v, dout = (distributed.shard(x, layout=layout) for x in whole)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out, lse = ring(q, k, v, layout=layout, seqlen=length, return_lse=True, **options)
            assert lse.shape == (2, 4, q.shape[1]) and lse.dtype == torch.float32
            out.backward(dout)
            found = (out, q.grad, k.grad, v.grad)
            found = [distributed.unshard(x, layout=layout, seqlen=length) for x in found]
            near(found, alone(*whole, **options))


@ranks(2)
def test_the_lse_and_its_gradient():
    whole = tensors(32)
    for options in MASKS:
        found = []
        for scheme in ("gather", "ring"):
            own = [distributed.shard(x).requires_grad_() for x in whole[:3]]
            out, lse = distributed.attention(*own, scheme=scheme, return_lse=True, **options)
            (lse.sin().sum() + out.square().sum()).backward()
            found.append((out, lse, *(x.grad for x in own)))
            (lse_alone,) = torch.autograd.grad(
                distributed.attention(*own, scheme=scheme, return_lse=True, **options)[1].sum(), own[:1]
            )
            found[-1] += (lse_alone,)
        for one, other in zip(*found):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@ranks(2)
def test_halves_are_merged_in_float32():
    whole = [x.bfloat16() for x in tensors(128, seed=3)]
    want = alone(*(x.float() for x in whole), causal=True)
    for one, exact in zip(over_ranks(ring, whole, "zigzag", causal=True), want):
        assert one.dtype == torch.bfloat16
        scale = exact.abs().max().item()
        torch.testing.assert_close(one.float(), exact, rtol=0.0, atol=0.012 * scale)
    with torch.autocast("cpu", torch.bfloat16):
        own = [distributed.shard(x) for x in tensors(32)[:3]]
        assert ring(*own).dtype == torch.bfloat16
        assert torch.equal(ring(*own), ring(*(x.bfloat16() for x in own)))


@ranks(2)
def test_compiled_checkpointed_and_of_groups():
    from torch.utils.checkpoint import checkpoint

    whole = tensors(32)
    want = alone(*whole, causal=True)
    compiled = torch.compile(ring, backend="aot_eager")
    near(over_ranks(compiled, whole, "zigzag"), want)
    again = functools.partial(checkpoint, ring, use_reentrant=False)
    near(over_ranks(lambda q, k, v: again(q, k, v), whole, "zigzag"), want)
    # The ranks of the group are in another order than those of the world.
    group = dist.new_group([1, 0])
    own = [distributed.shard(x, group=group).requires_grad_() for x in whole[:3]]
    out = ring(*own, group=group)
    out.backward(distributed.shard(whole[3], group=group))
    found = [distributed.unshard(x, group=group) for x in (out, *(x.grad for x in own))]
    near(found, want)
    one = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    near([ring(*whole[:3], group=one)], want[:1])
    # Rows that are not contiguous in memory.
    laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in whole]
    near(over_ranks(ring, laid, "zigzag"), want)


def test_a_ring_pays_where_k_and_v_have_as_many_heads():
    def of(*heads, is_cuda=True, causal=True, window_size=(-1, -1)):
        q, k = (types.SimpleNamespace(shape=(1, 64, count, 8), is_cuda=is_cuda) for count in heads)
        return pays(q, k, Options(None, causal, window_size, 0.0, False))

    assert of(8, 8) and of(8, 8, causal=False)
    assert not of(8, 2) and not of(8, 8, is_cuda=False)
    assert not of(8, 8, window_size=(9, 0)) and of(8, 8, causal=False, window_size=(-1, 5))


@ranks(2)
def test_heads_pay_in_a_step_of_training():
    def of(rows, *heads, is_cuda=True, window_size=(-1, -1), requires_grad=True):
        like = dict(is_cuda=is_cuda, requires_grad=requires_grad)
        tensors = [types.SimpleNamespace(shape=(1, rows, count, 8), **like) for count in heads]
        return gains(*tensors, None, Options(None, True, window_size, 0.0, False))

    assert of(4096, 8, 8, 8) and not of(4095, 8, 8, 8)
    assert not of(4096, 8, 1, 1) and not of(4096, 8, 8, 8, is_cuda=False)
    assert not of(4096, 8, 8, 8, window_size=(9, 0)) and not of(4096, 8, 8, 8, requires_grad=False)
    with torch.no_grad():
        assert not of(4096, 8, 8, 8)
    # A gather moves less of few K/V heads, but by copies it matters little.
    _sharded_heads.copies_for = lambda *_: None
    assert of(4096, 6, 2, 2) and not of(4096, 8, 2, 2)
    _sharded_heads.copies_for = lambda *_: "copies"
    assert of(4096, 8, 2, 2)


@ranks(2)
def test_the_scheme_is_chosen():
    whole, slopes = tensors(64, heads=(4, 4)), torch.linspace(0.1, 0.4, 4)
    rule, gains, asked = distributed.pays, distributed.gains, []

    def made(**options):
        return over_ranks(distributed.attention, whole, "zigzag", **options)

    def same(one, other):
        return all(map(torch.equal, one, other))

    by = {name: made(scheme=name) for name in distributed._SCHEMES}
    assert not same(by["gather"], by["ring"])
    # On CPUs keys are gathered.
    assert same(made(), by["gather"])
    distributed.pays = lambda *given: asked.append(given) or True
    try:
        for kind in (None, "p2p"):
            assert same(made(cp_comm_type=kind), by["ring"])
        assert same(made(cp_comm_type="all_gather"), by["gather"])
        drop_in = functools.partial(distributed.zigzag_ring_flash_attn_func, causal=True)
        assert same(over_ranks(drop_in, whole, "zigzag"), by["ring"])
        assert len(asked) == 3
        # What a ring does not compute, whatever it would cost.
        for options in (dict(alibi_slopes=slopes), dict(stages=2), dict(dropout_p=0.2, rng_state=(1, 2))):
            assert same(made(**options), made(scheme="gather", **options))
        # By heads where that is the faster one, but where rows are asked for.
        distributed.gains = lambda *given: True
        assert same(made(), by["ulysses"]) and same(made(cp_comm_type="p2p"), by["ring"])
        assert same(over_ranks(drop_in, whole, "zigzag"), by["ulysses"])
        assert same(made(seqlen=64), by["ring"])
        distributed.gains = gains
        near(made(alibi_slopes=slopes), alone(*whole, causal=True, alibi_slopes=slopes))
    finally:
        distributed.pays, distributed.gains = rule, gains


@ranks(2)
def test_what_a_ring_does_not_compute_is_refused_by_name():
    q = k = v = torch.zeros(1, 8, 2, 8)
    two, bias = torch.zeros(2), torch.zeros(1, 1, 16, 16)
    for options in (
        dict(alibi_slopes=two),
        dict(sinks=two),
        dict(stages=2),
        dict(dropout_p=0.5),
        dict(bias=bias),
        dict(mask_mod=lambda b, h, q, k: q > k),
    ):
        (name,) = options
        with pytest.raises(fa_attn.UnsupportedError, match=f"{name} with scheme 'ring': use 'gather'"):
            ring(q, k, v, **options)
    with pytest.raises(fa_attn.InputError, match="scheme is 'rings': it must be one of gather, ring"):
        distributed.attention(q, k, v, scheme="rings")
    with pytest.raises(fa_attn.UnsupportedError, match="scheme and seqlen with cp_comm_type 'a2a'"):
        ring(q, k, v, cp_comm_type="a2a")
    # Ranks that take other ways are told so, and do not wait.
    rank, begun = dist.get_rank(), time.monotonic()
    with pytest.raises(fa_attn.InputError, match=f"rank {1 - rank} of the group calls with"):
        distributed.attention(q, k, v, scheme=distributed._SCHEMES[rank])
    assert time.monotonic() - begun < 20
    assert math.isfinite(ring(q, k, v).sum())


@ranks(3)
def test_a_rank_that_stops_is_an_error_of_the_others_at_every_step():
    class Stops(RuntimeError):
        pass

    transfer, rank = dist.all_to_all_single, dist.get_rank()

    def train(group, left):
        def counted(*args, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Stops
            return transfer(*args, **options)

        dist.all_to_all_single = counted
        try:
            own = [torch.ones(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
            ring(*own, group=group).sum().backward()
            # Who needs nothing more of it learns of it here.
            dist.barrier(group)
        finally:
            dist.all_to_all_single = transfer

    everything = [100]
    train(dist.new_group([0, 1, 2]), everything)
    steps = 100 - everything[0]
    # Twice the keys of two others, and the gradients of three.
    assert steps == 2 + 2 + 3
    for step in range(steps):
        group, begun = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=60)), time.monotonic()
        failing = step % 3
        if rank == failing:
            with pytest.raises(Stops):
                train(group, [step])
        else:
            with pytest.raises(distributed.PeerLost, match=f"rank {failing} of the group is lost: Stops"):
                own = [torch.ones(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
                ring(*own, group=group).sum().backward()
                ring(*own, group=group)
        assert time.monotonic() - begun < 20
        dist.barrier()


@ranks(3)
def test_a_rank_that_is_killed_is_an_error_of_the_others():
    transfer, rank, left = dist.all_to_all_single, dist.get_rank(), [5]

    def counted(*args, **options):
        left[0] -= 1
        if rank == 1 and left[0] < 0:
            # As by a signal, in the midst of a backward; the test does not fail of it.
            os._exit(0)
        return transfer(*args, **options)

    dist.all_to_all_single = counted
    group, begun = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=20)), time.monotonic()
    own = [torch.ones(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
    with pytest.raises(RuntimeError):
        ring(*own, group=group).sum().backward()
        ring(*own, group=group)
    assert time.monotonic() - begun < 20
