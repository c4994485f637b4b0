"""Ranks by the names of ring-flash-attention, yunchang, TransformerEngine and torch."""

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import fa_attn  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fa_attn import _sharded_packed, distributed  # noqa: E402
from torch_ranks import alone, near, over_ranks, ranks, tensors  # noqa: E402


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


@ranks(3)
def test_llama3_deals_packed_sequences_evenly():
    lengths, (total, rank) = [10, 1, 25, 12], (48, dist.get_rank())
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v, dout = (x[0] for x in tensors(total, batch=1))
    at_once = _sharded_packed._AT_ONCE
    for causal, limit in itertools.product((True, False), (0, at_once)):
        # Some heads at a time, and all of them where they take little memory.
        _sharded_packed._AT_ONCE = limit
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


@ranks(4)
def test_dropout_over_a_grid_is_that_of_one_process():
    whole, world, rank = tensors(64, heads=(8, 2)), dist.get_world_size(), dist.get_rank()
    distributed.set_seq_parallel_pg(2, 2, rank, world)
    for kind in ("basic", "zigzag"):
        own = functools.partial(distributed.EXTRACT_FUNC_DICT[kind], rank=rank, world_size=world, rd=2, ud=2)
        module = distributed.LongContextAttention(ring_impl_type=kind)
        # Without a state that of the first rank counts.
        torch.manual_seed(11)
        want = alone(*whole, causal=True, dropout_p=0.25)
        torch.manual_seed(11 + rank)
        q, k, v, dout = (own(x) for x in whole)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = module(q, k, v, causal=True, dropout_p=0.25)
        out.backward(dout)
        near([out, q.grad, k.grad, v.grad], [own(x) for x in want])
    module = distributed.LongContextAttention(ring_impl_type="strip")
    with pytest.raises(fa_attn.UnsupportedError, match="dropout of stripes"):
        module(q, k, v, causal=True, dropout_p=0.25)
    with pytest.raises(fa_attn.UnsupportedError, match="return_attn_probs of a grid"):
        module(q, k, v, return_attn_probs=True)


@ranks(4)
def test_types_of_transfers_by_their_names():
    whole, rank = tensors(64, heads=(8, 4)), dist.get_rank()
    slopes = torch.linspace(0.1, 0.8, 8)
    # Neighbours exchange heads.
    sides = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    pairs = [[dist.new_group(list(members)) for members in side] for side in sides]
    grid = pairs[0][rank // 2], pairs[1][rank % 2]
    kinds = (("p2p", None), ("all_gather", None), ("a2a", None), ("a2a+p2p", grid), (None, None))
    for options in (
        dict(causal=True, alibi_slopes=slopes),
        dict(causal=False, window_size=(9, 5), softcap=5.0),
        dict(causal=True, dropout_p=0.25, rng_state=(3, 4)),
    ):
        want = alone(*whole, **options)
        for kind, group in kinds:
            call = functools.partial(distributed.attention, cp_comm_type=kind, group=group)
            near(over_ranks(call, whole, "zigzag", **options), want)
    q, k, v = (distributed.shard(x) for x in whole[:3])
    for kind, group, options, said in (
        ("ring", None, {}, "cp_comm_type is 'ring': it must be one of p2p"),
        ("a2a+p2p", None, {}, "group no pair"),
        ("a2a", None, dict(return_lse=True), "return_lse, stages, scheme and seqlen with cp_comm_type 'a2a'"),
        ("a2a+p2p", grid, dict(mask_mod=lambda b, h, q, k: q >= k), "mask_mod with cp_comm_type"),
        ("a2a+p2p", grid, dict(layout="contiguous"), "a contiguous layout and sinks"),
    ):
        with pytest.raises((fa_attn.InputError, fa_attn.UnsupportedError), match=said):
            distributed.attention(q, k, v, cp_comm_type=kind, group=group, **options)


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
    with pytest.raises(fa_attn.UnsupportedError, match="seq_dim is 1: rows are axis 2"):
        distributed.ContextParallel(1, kinds.SDPA)
    with pytest.raises(fa_attn.InputError, match="attention_type is 'ring'"):
        distributed.ContextParallel(2, "ring")


def _flex_over_ranks():
    """Masks of the whole, as torch deals them and as they are, by both plans: beside one process."""
    from fa_attn import flex
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as by_torch
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import create_block_mask

    # Torch compiles it, which takes a minute.
    by_torch._compiled_create_block_mask = create_block_mask
    world, kinds = dist.get_world_size(), by_torch._ContextParallel.AttentionType
    length, mesh = 256 * world, init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    whole = [x.transpose(1, 2).contiguous() for x in tensors(length)]
    document = torch.arange(length) // 100

    class Flex(torch.nn.Module):
        def forward(self, query, key, value, **options):
            return flex.flex_attention(query, key, value, enable_gqa=True, **options)

    def run(module, given, dout, **options):
        given = [x.clone().requires_grad_() for x in given]
        out = module(*given, **options)
        out.backward(dout)
        return [out.detach(), *(x.grad for x in given)]

    masks = (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q >= k) & (document[q] == document[k]),
        lambda b, h, q, k: (q >= k) & (q - k < 70),
        lambda b, h, q, k: q // 300 == k // 300,
    )
    balancer = balancers._HeadTailLoadBalancer(length, world, torch.device("cpu"))
    for at, mask in enumerate(masks):
        block_mask = create_block_mask(mask, 1, 1, length, length, device="cpu")
        want = run(Flex(), whole[:3], whole[3], block_mask=block_mask)
        for of in (None, balancer)[at % 2 :: 2] if world > 2 else (None, balancer):
            *own, dout, dealt = by_torch._context_parallel_shard(
                mesh, [*(x.clone() for x in whole), block_mask], [2] * 5, of
            )
            for plan in (distributed.ContextParallel, by_torch._ContextParallel):
                module = parallelize_module(Flex(), mesh, plan(2, kinds.FLEX))
                found = run(module, own, dout, block_mask=dealt)
                near(by_torch.context_parallel_unshard(mesh, found, [2] * 4, of), want)
    # Scores see the numbers of the whole, and so do masks of either library.
    for made in (flex.create_block_mask, create_block_mask):
        block_mask = made(masks[2], 1, 1, length, length, device="cpu")
        options = dict(block_mask=block_mask, score_mod=lambda s, b, h, q, k: s - 0.01 * h * (q - k))
        want = run(Flex(), whole[:3], whole[3], **options)
        with distributed.context_parallel(mesh):
            own = [distributed.shard(x, 2).contiguous() for x in whole]
            found = run(Flex(), own[:3], own[3], **options)
            out, aux = Flex()(*own[:3], return_aux=flex.AuxRequest(lse=True), **options)
        near([distributed.unshard(x, 2) for x in found], want)
        _, lse = Flex()(*whole[:3], return_lse=True, **options)
        torch.testing.assert_close(distributed.unshard(aux.lse, 2), lse)
    with distributed.context_parallel(mesh):
        with pytest.raises(fa_attn.InputError, match="it must be that of the whole sequence"):
            Flex()(*own[:3], block_mask=create_block_mask(masks[0], 1, 1, 256, 256, device="cpu"))
        with pytest.raises(fa_attn.InputError, match="keys of all ranks are gathered here"):
            Flex()(own[0], *whole[1:3])
        with pytest.raises(fa_attn.UnsupportedError, match="max_scores over several ranks"):
            Flex()(*own[:3], return_aux=flex.AuxRequest(max_scores=True))
    *own, dealt = by_torch._context_parallel_shard(
        mesh, [*(x.clone() for x in whole[:3]), block_mask], [2] * 4, _Reversed(length)
    )
    module = parallelize_module(Flex(), mesh, distributed.ContextParallel(2, kinds.FLEX))
    with pytest.raises(fa_attn.UnsupportedError, match="deals rows neither zigzag nor contiguously"):
        module(*own, block_mask=dealt)


class _Reversed:
    def __init__(self, length):
        self.length = length

    def _generate_indices(self, restore=False):
        return torch.arange(self.length).flip(0)[None]


@ranks(2)
def test_flex_attention_under_context_parallel():
    _flex_over_ranks()


@ranks(4)
def test_flex_attention_under_context_parallel_of_four():
    _flex_over_ranks()


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


def test_a_llama_trains_over_two_ranks_as_on_one():
    pytest.importorskip("transformers")
    example = Path(__file__).parents[1] / "examples" / "train_over_ranks.py"
    run = [sys.executable, str(example), "--ranks", "2", "--steps", "4"]
    found = subprocess.run(run, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "the same losses" in found.stdout
