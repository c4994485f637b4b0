"""Where tensors lie and what is kept of them: rows at any address, memory within compiled graphs."""

import pytest

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402 - after torch
from torch_cases import close, needs_gpu, on, tensors  # noqa: E402


def odd(x):
    """A copy that begins two bytes beyond a multiple of 16, and one with rows that are no multiple of it."""
    shifted = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    apart = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., :-1].copy_(x)
    return shifted, apart


@on
def test_rows_at_any_address_are_read(device, dtype):
    q, k, v, dout = tensors(device, dtype, (2, 40, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64), (2, 40, 4, 64))
    starts = torch.tensor([0, 10, 80], dtype=torch.int32, device=device)

    def dense(q, k, v):
        return fa_attn.flash_attn_func(q, k, v, causal=True)

    def packed(q, k, v):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return fa_attn.flash_attn_varlen_func(*flat, starts, starts, 70, 70).view(q.shape)

    for call in (dense, packed):
        out = call(q, k, v)
        want = torch.autograd.grad(out, (q, k, v), dout)
        for given in zip(*(odd(x.detach()) for x in (q, k, v))):
            assert torch.equal(call(*given), out)
            given = [x.requires_grad_() for x in given]
            again = call(*given)
            assert torch.equal(again, out)
            for one, other in zip(torch.autograd.grad(again, given, odd(dout)[0]), want):
                close(one, other, dtype)


@needs_gpu
@pytest.mark.parametrize("seqlen_k", [64, 4000], ids=["whole", "divided"])
def test_nothing_is_left_in_the_pool_of_a_compiled_graph(seqlen_k):
    q, k, v = tensors("cuda", torch.bfloat16, (1, 8, 4, 64), (1, seqlen_k, 4, 64), (1, seqlen_k, 4, 64))
    call = torch.compile(lambda q, k, v: fa_attn.flash_attn_func(2 * q, k, v), mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(call(q, k, v), fa_attn.flash_attn_func(2 * q, k, v))
