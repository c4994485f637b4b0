"""Lists of blocks of the caller's: exactly those that are listed are seen, in forward and backward."""

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from test_flex import causal, documents, formula, inputs, same  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

import fa_attn  # noqa: E402
from fa_attn import BlockMask, create_block_mask, flex_attention  # noqa: E402

B, H, L, S, D = 2, 4, 70, 90, 16
BLOCK = (16, 32)
_generator = torch.Generator().manual_seed(5)
# 0 for a block that is not listed, 1 for one that a mask decides on, 2 for a whole one.
STATES = torch.randint(0, 3, (B, H, 5, 3), generator=_generator)
STATES[0, 0, 1] = 0


class BlockSparse(NamedTuple):
    """As FlashAttention 4's."""

    mask_block_cnt: Any = None
    mask_block_idx: Any = None
    full_block_cnt: Any = None
    full_block_idx: Any = None
    cu_total_m_blocks: Any = None
    cu_block_idx_offsets: Any = None
    block_size: Any = BLOCK


def lists(states, state):
    """Counts and indices, of which those behind the count are of no block."""
    there = states == state
    counts, order = there.sum(-1).int(), there.int().argsort(dim=-1, descending=True, stable=True).int()
    behind = torch.arange(order.shape[-1]) >= counts[..., None]
    return counts, torch.where(behind, 1 << 30, order)


def seen(states, mask_mod=None, block=BLOCK):
    wide = states.repeat_interleave(block[0], 2)[:, :, :L].repeat_interleave(block[1], 3)[..., :S]
    own = (
        torch.ones(L, S, dtype=torch.bool)
        if mask_mod is None
        else mask_mod(0, 0, *torch.meshgrid(torch.arange(L), torch.arange(S), indexing="ij"))
    )
    return (wide == 2) | ((wide == 1) & own)


def draws():
    return inputs((B, H, L, D), (B, H, S, D), (B, H, S, D))


FORMS = {
    "of ours": lambda mask: BlockMask.from_kv_blocks(
        *lists(STATES, 1), *lists(STATES, 2), BLOCK, mask, (L, S)
    ),
    "of torch": lambda mask: flex.BlockMask.from_kv_blocks(
        *lists(STATES, 1), *lists(STATES, 2), BLOCK, flex.noop_mask if mask is None else mask, (L, S)
    ),
}


@pytest.mark.parametrize("mask_mod", [None, causal], ids=["no mask", "causal"])
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_flex_are_what_is_seen(form, mask_mod):
    own, true = draws()
    got = flex_attention(*own, block_mask=FORMS[form](mask_mod), return_lse=True)
    same(got, formula(*true, None, seen(STATES, mask_mod)), own, true)


@pytest.mark.parametrize("mask_mod", [None, causal, "k <= q", fa_attn.Program("k <= q")], ids=str)
def test_block_sparse_tensors_of_flash_attention_4(mask_mod):
    own, true = draws()
    tensors = BlockSparse(*lists(STATES, 1), *lists(STATES, 2))
    rows = [x.transpose(1, 2) for x in own]
    out, lse = fa_attn.flash_attn_func(
        *rows, block_sparse_tensors=tensors, mask_mod=mask_mod, return_lse=True
    )
    want = formula(*true, None, seen(STATES, None if mask_mod is None else causal))
    same((out.transpose(1, 2), lse), want, own, true)
    # Lists of one kind alone, shared by sequences and heads, of numpy.
    counts, indices = (x.numpy() for x in lists(STATES[:1, :1], 2))
    arrays = [x.detach().numpy() for x in rows]
    out = fa_attn.flash_attn_func(
        *arrays, block_sparse_tensors=BlockSparse(full_block_cnt=counts, full_block_idx=indices)
    )
    want = formula(*true, None, seen(STATES[:1, :1] // 2 * 2))[0]
    torch.testing.assert_close(
        torch.from_numpy(out).transpose(1, 2).double(), want.detach(), atol=2e-5, rtol=1e-4
    )


def test_compressed_rows():
    own, true = draws()
    states = (STATES[:1, :1] > 0).int()
    indices = torch.cat([torch.nonzero(row).flatten() for row in states[0, 0]])
    indptr = torch.tensor([0, *states[0, 0].sum(-1).cumsum(0).tolist()])
    for mask_mod in (None, causal):
        mask = BlockMask.from_csr(indptr, indices, BLOCK, mask_mod, (L, S))
        same(
            flex_attention(*own, block_mask=mask, return_lse=True),
            formula(*true, None, seen(states, mask_mod)),
            own,
            true,
        )


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 16 * (h + 1))


def test_a_part_of_a_mask_is_that_of_a_decoding_step():
    """As gpt-fast decodes: the block of the step, with the mask of its offset."""
    step = 50
    (q, k, v), _ = inputs((B, H, 1, D), (B, H, S, D), (B, H, S, D))
    want = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, : step + 1], v[:, :, : step + 1])
    offset = torch.tensor(step)
    for make in (create_block_mask, flex.create_block_mask):
        mask = make(causal, B, 1, S, S, device="cpu", BLOCK_SIZE=32)[:, :, step // 32]
        mask.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + offset, kv_idx)
        mask.seq_lengths = (1, S)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), want, atol=2e-5, rtol=1e-4)
    listed = BlockMask.from_kv_blocks(*lists(STATES, 1), *lists(STATES, 2), BLOCK, causal, (L, S))[1, 2:4, 3]
    assert torch.equal(listed.states, STATES[1:2, 2:4, 3:4].to(torch.uint8)) and listed.shape == (1, 2, L, S)
    with pytest.raises(fa_attn.InputError, match="set its mask_mod"):
        create_block_mask(causal, B, 1, S, S)[0].program


@pytest.mark.parametrize(
    "mask_mod", [causal, documents, lambda b, h, q, k: k >= 0], ids=["causal", "documents", "all"]
)
def test_a_mask_lists_the_blocks_that_torch_lists(mask_mod):
    ours = create_block_mask(mask_mod, None, None, 50, 50, BLOCK_SIZE=16)
    torchs = flex.create_block_mask(mask_mod, None, None, 50, 50, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(ours.to_dense(), torchs.to_dense())
    assert ours.numel() == torchs.numel() and ours.shape == torchs.shape
    # Torch counts the last block, of 2 of 16, as whole numbers of positions of its own.
    assert ours.sparsity() == pytest.approx(100 * (1 - torchs.to_dense().float().mean().item()))
    full = flex.BlockMask.from_kv_blocks(
        ours.kv_num_blocks,
        ours.kv_indices,
        ours.full_kv_num_blocks,
        ours.full_kv_indices,
        16,
        mask_mod,
        (50, 50),
    )
    # The lists by keys are those that torch makes of the lists by queries.
    names = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    for name in names[::2]:
        assert torch.equal(getattr(ours, name), getattr(full, name)), name
    for counts, name in zip(names[::2], names[1::2]):
        for row in range(4):
            length = int(getattr(full, counts)[0, 0, row])
            assert torch.equal(*(getattr(one, name)[0, 0, row, :length] for one in (ours, full))), name
    assert [type(one) for one in ours.as_tuple()] == [type(one) for one in full.as_tuple()]
    assert ours.to_string().count("\n") == full.to_string().count("\n") == 5
    (q, k, v), _ = inputs((1, 2, 50, D), (1, 2, 50, D), (1, 2, 50, D))
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=full), flex_attention(q, k, v, block_mask=ours)
    )


def test_parts_of_a_mask_have_the_blocks_that_torchs_have():
    ours, torchs = (
        make(by_head, B, H, 80, 80, device="cpu", BLOCK_SIZE=16)
        for make in (create_block_mask, flex.create_block_mask)
    )
    for index in (0, (1, 2), (slice(None), 0), (slice(None), slice(None), 3), (slice(0, 2), 1, [1, 4])):
        part, want = ours[index], torchs[index]
        for name in ("kv_num_blocks", "full_kv_num_blocks"):
            assert torch.equal(getattr(part, name), getattr(want, name)), (index, name)
            assert torch.equal(getattr(part[0], name), getattr(want[0], name)), (index, name)


def test_torchs_constructor_and_lengths_of_a_part():
    own, true = draws()
    torchs = flex.BlockMask.from_kv_blocks(*lists(STATES, 1), *lists(STATES, 2), BLOCK, causal, (L, S))
    mask = BlockMask(*torchs.as_tuple(flatten=False))
    assert torch.equal(mask.to_dense(), torchs.to_dense()) and mask.seq_lengths == (L, S)
    same(
        flex_attention(*own, block_mask=mask, return_lse=True),
        formula(*true, None, seen(STATES, causal)),
        own,
        true,
    )
    shorter = (L - 1, S - BLOCK[1])
    (q, k, v) = (x.detach()[:, :, :length] for x, length in zip(own, (shorter[0], shorter[1], shorter[1])))
    dense = seen(STATES, causal)[:, :, : shorter[0], : shorter[1]]
    for one in (mask._adjust(*shorter), BlockMask(*mask.as_tuple(flatten=False))._adjust(*shorter)):
        made = flex_attention(q, k, v, block_mask=one)
        want = formula(q.double(), k.double(), v.double(), None, dense)[0]
        torch.testing.assert_close(made.double(), want, atol=2e-5, rtol=1e-4)
    traced = create_block_mask(causal, None, None, L, S)._adjust(*shorter)
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=traced),
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, *shorter)),
    )


def test_lists_by_keys_may_be_left_out():
    q, k, v = (torch.randn(B, H, length, D, generator=_generator) for length in (L, S, S))
    torchs = flex.create_block_mask(causal, B, H, L, S, device="cpu", BLOCK_SIZE=BLOCK)
    rows = [torchs.kv_num_blocks, torchs.kv_indices, torchs.full_kv_num_blocks, torchs.full_kv_indices]
    options = dict(BLOCK_SIZE=BLOCK, mask_mod=causal)
    want = flex_attention(q, k, v, block_mask=torchs)
    made = create_block_mask(causal, B, H, L, S, device="cpu")
    assert made.q_num_blocks is not None
    with pytest.raises(fa_attn.InputError, match="set None"):
        made.q_num_blocks = torchs.q_num_blocks
    made.q_num_blocks = None
    masks = [
        BlockMask((L, S), *rows, **options),
        BlockMask.from_kv_blocks(*rows, seq_lengths=(L, S), compute_q_blocks=False, **options),
        made,
    ]
    for mask in [*masks, masks[0].to("cpu")]:
        assert mask.q_indices is mask.full_q_num_blocks is None and mask.as_tuple()[6:10] == (None,) * 4
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), want)
    assert masks[0][:, :, 0].q_num_blocks is None


def test_what_is_no_mask_mod_is_named():
    rows = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    for mask_mod in ((16, 16), 5, torch.ones(2)):
        with pytest.raises(fa_attn.InputError, match="mask_mod is a function, a text or a Program, not"):
            BlockMask.from_csr(*rows, BLOCK, mask_mod)


def test_parts_and_pictures_of_a_mask_are_torchs():
    ours, torchs = (
        module.create_block_mask(lambda b, h, q, k: (q >= k) & (b + h >= 0), 4, 3, 512, 300, "cpu", 64)
        for module in (fa_attn.flex, flex)
    )
    listed = BlockMask(*torchs.as_tuple(flatten=False))
    for index in (0, -1, ..., (0, 1), ([0, 2],), torch.tensor([0, 2]), (slice(None), 0, slice(1, 3))):
        for one in (ours[index], listed[index]):
            assert one.shape == torchs[index].shape, index
        assert torch.equal(listed[index].to_dense(), torchs[index].to_dense()), index
    assert torch.equal(listed[..., -1].to_dense(), torchs[:, :, -1].to_dense())
    for wrong in (None, 1.5, True, 4, (0, 0, 0, 0), (..., ...)):
        with pytest.raises(fa_attn.InputError, match="block_mask"):
            ours[wrong]
    big = create_block_mask(causal, None, None, 8192, 8192)
    rows = big.to_string((8, -1)).splitlines()
    assert len(rows) == 9 and len(rows[1]) == 128 and len(big.to_string().splitlines()) < 22
    assert str(ours).startswith("BlockMask(shape=(4, 3, 512, 300), sparsity=") and "to be set" in str(ours[0])
    with pytest.raises(fa_attn.InputError, match="grid_size is 0"):
        big.to_string(0)


def test_a_mask_of_lists_that_say_nothing_is_an_error():
    counts, indices = lists(STATES, 1)
    q, k, v = (torch.zeros(B, n, H, D) for n in (L, S, S))
    wrong = [
        (lambda: BlockMask.from_kv_blocks(counts[:, :, 1:], indices), "a list for each block of queries"),
        (lambda: BlockMask.from_kv_blocks(counts, indices, counts), "full blocks have a list of counts or"),
        (
            lambda: BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=8, seq_lengths=(L, S)),
            "have blocks for",
        ),
        (lambda: BlockMask.from_csr(torch.tensor([0, 2]), torch.tensor([1])), "indptr goes from 0 to 1"),
        (
            lambda: BlockMask.from_csr(torch.tensor([0, 1]), torch.tensor([7]), 16, None, (L, S)),
            "has the block 7",
        ),
        (lambda: fa_attn.flash_attn_func(q, k, v, block_sparse_tensors=7), "block_sparse_tensors is int"),
        (
            lambda: fa_attn.flash_attn_func(
                q, k, v, block_sparse_tensors=BlockSparse(counts, indices, block_size=None)
            ),
            "no block_size",
        ),
        (
            lambda: fa_attn.flash_attn_func(
                q, k, v, block_sparse_tensors=BlockSparse(counts, indices, cu_total_m_blocks=counts)
            ),
            "packed sequences are not read",
        ),
        (lambda: fa_attn.flash_attn_func(q, k, v, block_sparse_tensors_bwd=7), "leave it out"),
    ]
    for call, message in wrong:
        with pytest.raises((fa_attn.InputError, fa_attn.UnsupportedError), match=message):
            call()


def test_lists_are_given_back_as_they_are_and_reach_all_keys():
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.arange(3).view(1, 1, 3, 1)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=32, seq_lengths=(96, 96))
    assert mask.kv_num_blocks is counts and mask.kv_indices is indices
    for name in ("full_kv_num_blocks", "full_kv_indices", "full_q_num_blocks", "full_q_indices"):
        assert getattr(mask, name) is getattr(mask[0], name) is getattr(mask._adjust(64, 64), name) is None
    own, true = inputs((1, H, 96, D), (1, H, 96, D), (1, H, 96, D))
    diagonal = torch.ones(3, 3).diag().diag().repeat_interleave(32, 0).repeat_interleave(32, 1).bool()
    same(flex_attention(*own, block_mask=mask, return_lse=True), formula(*true, None, diagonal), own, true)
    for name in ("q", "full_q"):
        with pytest.raises(fa_attn.InputError, match=f"{name}_num_blocks and {name}_indices"):
            BlockMask((96, 96), counts, indices, **{f"{name}_num_blocks": counts})
