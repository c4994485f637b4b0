"""Ranks that are processes, over gloo, beside one process: outputs and gradients."""

import functools
import itertools

import pytest

torch = pytest.importorskip("torch")
import fa_attn  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fa_attn import distributed  # noqa: E402
from torch_ranks import WINDOWS, alone, near, over_ranks, ranks, tensors  # noqa: E402


@ranks(2)
def test_two_ranks_compute_what_one_does():
    whole = tensors(64)
    for layout in distributed.LAYOUTS:
        for options in (dict(causal=True), dict(causal=False), *WINDOWS):
            for stages in (1, 2):
                call = functools.partial(distributed.attention, layout=layout, stages=stages)
                near(over_ranks(call, whole, layout, **options), alone(*whole, **options))


@ranks(4)
def test_ulysses_shares_few_key_heads():
    whole = tensors(32, heads=(8, 2))
    found = over_ranks(distributed.ulysses_attention, whole, "contiguous", causal=True)
    near(found, alone(*whole, causal=True))


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
    compiled = torch.compile(distributed.attention, backend="aot_eager", fullgraph=True)
    near(over_ranks(compiled, whole, "zigzag"), over_ranks(distributed.attention, whole, "zigzag"))
    q, k, v, _ = (distributed.shard(x) for x in whole)
    want = distributed.attention(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        got = distributed.attention(q, k, v)
        starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
        packed = distributed.zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], starts, q.shape[1])
    assert got.dtype == packed.dtype == torch.bfloat16 and torch.equal(got, want)
    # Lengths that change, of which torch makes a symbol.
    for length in (32, 48, 64):
        whole = tensors(length, seed=length)
        near(over_ranks(compiled, whole, "zigzag"), over_ranks(distributed.attention, whole, "zigzag"))


@ranks(2)
def test_one_graph_of_a_compiler_holds_transfers():
    from torch.utils.checkpoint import checkpoint

    whole = tensors(32)
    q, k, v, dout = (distributed.shard(x) for x in whole)
    sinks, slopes = torch.linspace(-1, 1, 4), torch.tensor([0.5, 0.25, 0.1, 0.05])

    def same(call, *given):
        found = []
        for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            own = [x.detach().clone().requires_grad_() for x in given]
            out, lse = function(*own)
            found.append([out, lse, *torch.autograd.grad((out * dout).sum() + (lse * lse).sum(), own)])
        for one, other in zip(*found):
            assert torch.equal(one, other)

    def with_lse(**options):
        return lambda q, k, v: distributed.attention(q, k, v, return_lse=True, **options)

    for options in (dict(scheme="gather", stages=2), dict(scheme="ring"), *WINDOWS):
        same(with_lse(**options), q, k, v)
    same(
        lambda q, k, v, sinks: distributed.attention(
            q, k, v, sinks=sinks, alibi_slopes=slopes, return_lse=True
        ),
        *(q, k, v, sinks),
    )
    again = functools.partial(checkpoint, distributed.zigzag_ring_flash_attn_func, use_reentrant=False)
    compiled = torch.compile(lambda q, k, v: again(q, k, v, causal=True), backend="aot_eager", fullgraph=True)
    near(over_ranks(compiled, whole, "zigzag"), alone(*whole, causal=True))
    for layout in distributed.LAYOUTS:
        call = functools.partial(distributed.ulysses_attention, causal=True, layout=layout)
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        near(over_ranks(compiled, whole, layout), alone(*whole, causal=True))
    # What an operator does is compared by the ranks, too.
    odd = [x[:, : 8 - 4 * dist.get_rank()] for x in (q, k, v)]
    with pytest.raises(fa_attn.InputError, match="of the group calls with"):
        torch.compile(distributed.attention, backend="aot_eager")(*odd)


class _Block(torch.nn.Module):
    """A layer of attention over some group, or of one process."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.attend = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32), None

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 8)) for part in self.qkv(x).chunk(3, -1))
        attend = self.attend or fa_attn.flash_attn_func
        return x + self.out(attend(q, k, v, causal=True).flatten(-2))


def _model(group=None, over=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(_Block(), _Block())
    for block in model:
        block.attend = functools.partial(distributed.attention, group=group) if over else None
    return model


def _trained(step, parameters, batches, reduce=lambda: None):
    optimizer, losses = torch.optim.SGD(parameters, 0.05), []
    for x in batches:
        optimizer.zero_grad()
        losses.append(step(x))
        reduce()
        optimizer.step()
    return losses


def _batches(rows=32):
    make = torch.Generator().manual_seed(3)
    return [torch.randn(2, rows, 32, generator=make) for _ in range(3)]


@ranks(4)
def test_models_train_by_ddp_and_fsdp_over_groups_as_on_one():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = _model(over=False)

    def step_of_one(x):
        loss = alone(x).square().mean()
        loss.backward()
        return loss.item()

    want = _trained(step_of_one, alone.parameters(), _batches())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group, own = mesh["cp"].get_group(), mesh.get_local_rank("dp")

    def of(model):
        def step(x):
            x = distributed.shard(x[own : own + 1], group=group)
            loss = model(x).square().mean()
            loss.backward()
            loss = loss.detach()
            dist.all_reduce(loss)
            return loss.item() / 4

        return step

    by_ddp, by_fsdp = _model(group), _model(group)
    replicas = torch.nn.parallel.DistributedDataParallel(by_ddp)
    whole = mesh._flatten("dp_cp")
    for block in by_fsdp:
        fully_shard(block, mesh=whole)
    fully_shard(by_fsdp, mesh=whole)
    for model, module in ((by_ddp, replicas), (by_fsdp, by_fsdp)):
        losses = _trained(of(module), model.parameters(), _batches())
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-6)
        for x, y in zip(model.parameters(), alone.parameters()):
            x = x.full_tensor() if hasattr(x, "full_tensor") else x
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@ranks(2)
def test_threads_with_a_group_each():
    import threading

    groups, errors = [dist.new_group([0, 1]) for _ in range(3)], []

    def stage(number):
        try:
            for step in range(4):
                whole = tensors(32, seed=10 * number + step)
                want = alone(*whole, causal=True)
                q, k, v, dout = (distributed.shard(x, group=groups[number]) for x in whole)
                given = [x.clone().requires_grad_() for x in (q, k, v)]
                out = distributed.attention(*given, group=groups[number])
                out.backward(dout)
                found = [out.detach(), *(x.grad for x in given)]
                near([distributed.unshard(x, group=groups[number]) for x in found], want)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=stage, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@ranks(2)
def test_what_torch_makes_of_calls_is_refused_by_name():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    q, k, v, _ = (distributed.shard(x) for x in tensors(32))
    rows = [DTensor.from_local(x, mesh, [Shard(1)]) for x in (q, k, v)]
    for call in (distributed.attention, distributed.ulysses_attention, distributed.decode_attention):
        with pytest.raises(fa_attn.UnsupportedError, match="q is a DTensor: give q.to_local()"):
            call(*rows)
        with pytest.raises(fa_attn.UnsupportedError, match="torch.func's transformations of attention over"):
            torch.func.vjp(lambda q: call(q, k, v), q)
    # All ranks are in step.
    out = distributed.attention(*(x.to_local() for x in rows))
    assert torch.equal(out, distributed.attention(q, k, v))


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


@ranks(2)
def test_decoding_exchanges_once():
    from fa_attn import _sharded

    calls, places = [], dict(all_gather=dist, gather=_sharded.Results)

    def counted(name):
        transfer = getattr(places[name], name)

        def call(*args, **options):
            calls.append(name)
            return transfer(*args, **options)

        return call

    for kind, rows, dim in ((torch.float32, 1, 16), (torch.bfloat16, 3, 24), (torch.float16, 1, 8)):
        q, k, v = (x.to(kind) for x in tensors(32, heads=(3, 1), batch=1, dim=dim)[:3])
        own = [distributed.shard(x, layout="contiguous") for x in (k, v)]
        want = distributed.decode_attention(q[:, -rows:], *own, return_lse=True)
        plain = {name: getattr(place, name) for name, place in places.items()}
        for name, place in places.items():
            setattr(place, name, counted(name))
        found = distributed.decode_attention(q[:, -rows:], *own, return_lse=True)
        for name, transfer in plain.items():
            setattr(places[name], name, transfer)
        # The first compares the calls, which GPUs do once.
        assert calls == ["all_gather", "gather"], calls
        calls.clear()
        assert all(torch.equal(*both) for both in zip(found, want))
        exact = fa_attn.flash_attn_func(q[:, -rows:], k, v, causal=True)
        tolerance = 1e-5 if kind == torch.float32 else 1e-2
        torch.testing.assert_close(found[0], exact, rtol=tolerance, atol=tolerance)


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
    # On GPUs the ranks' states are on other devices, which is no difference of the calls.
    agree, given = distributed.agree, []
    distributed.agree = lambda *args: given.extend(args) or agree(*args)
    state = torch.tensor(options["rng_state"])
    try:
        found = over_ranks(call, whole, layout, **{**options, "rng_state": state})
    finally:
        distributed.agree = agree
    assert torch.equal(found[0], want[0]) and any(x is state for x in given)
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
