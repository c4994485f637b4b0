"""DTensors: what ranks compute of their heads or sequences is what one computes of all.

pip install torch pytest && python -m pytest tests/test_torch_shards.py
"""

import functools
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

MESHES = {"1": (1,), "2": (2,), "4": (4,), "2x2": (2, 2)}


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_compute_what_one_computes(mesh, tmp_path):
    shape = MESHES[mesh]
    count = functools.reduce(int.__mul__, shape)
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), mesh, str(tmp_path / "ranks")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(os.environ, OMP_NUM_THREADS="1", RAYON_NUM_THREADS="1"),
        )
        for rank in range(count)
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    for rank, text in zip(ranks, said):
        assert rank.returncode == 0 and "all cases" in text, text


def test_importing_the_package_imports_no_distributed_tensors():
    code = "import sys, torch; before = 'torch.distributed.tensor' in sys.modules; import fa_attn.torch\n"
    code += "assert before == ('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def run(rank, mesh_name, file):
    """All cases, on one of the ranks."""
    import fa_attn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    shape = MESHES[mesh_name]
    count = functools.reduce(int.__mul__, shape)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", shape)
    torch.manual_seed(0)

    def placed(x, axes):
        """The tensor sharded along these of its axes, one for each axis of the mesh."""
        axes = [*axes, *(None,) * len(shape)][: len(shape)]
        return distribute_tensor(x.detach(), mesh, [Replicate() if a is None else Shard(a) for a in axes])

    def same(got, want, axes=None):
        for one, other in zip(got, want):
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            assert torch.allclose(whole, other, atol=2e-5), (whole - other).abs().max()
        if axes is not None:
            assert got[0].placements == placed(want[0], axes).placements, got[0].placements

    def attention(q, k, v, dout, sinks=None, **options):
        """Results and gradients."""
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        inputs = [q, k, v]
        if sinks is not None:
            inputs.append(sinks.detach().requires_grad_())
            options["sinks"] = inputs[-1]
        out, lse = fa_attn.flash_attn_func(q, k, v, return_softmax_lse=True, **options)
        return [out, lse, *torch.autograd.grad((out * dout).sum() + lse.sum(), inputs)]

    q, k, v, dout = torch.randn(4, 9, 8, 64), *torch.randn(2, 4, 9, 4, 64), torch.randn(4, 9, 8, 64)
    ways = [(2,), (0,), (None,)] + ([(0, 2), (2, 2), (0, 0), (None, 2)] if len(shape) > 1 else [])
    for axes in ways:
        for options in (
            dict(causal=True),
            dict(sinks=torch.linspace(-1, 1, 8), alibi_slopes=torch.rand(8)),
            dict(alibi_slopes=torch.rand(4, 8), window_size=(3, 1)),
        ):
            got = attention(*(placed(x, axes) for x in (q, k, v, dout)), **options)
            same(got, attention(q, k, v, dout, **options), axes)
    # Rows of a sequence on several ranks are gathered.
    same(attention(*(placed(x, (1,)) for x in (q, k, v, dout))), attention(q, k, v, dout))

    used, cu = torch.tensor([9, 3, 5, 7], dtype=torch.int32), torch.arange(5, dtype=torch.int32) * 9
    varlen = fa_attn.flash_attn_varlen_func
    want = varlen(q, k, v, seqused_k=used, causal=True)
    for axes, lengths in (((0,), placed(used, (0,))), ((2,), placed(used, ())), ((0,), used)):
        same([varlen(*(placed(x, axes) for x in (q, k, v)), seqused_k=lengths, causal=True)], [want], axes)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    want = varlen(*flat, cu, cu, 9, 9, causal=True)
    for axes in ((1,), (None,)):
        same([varlen(*(placed(x, axes) for x in flat), cu, cu, 9, 9, causal=True)], [want], axes)
    same([varlen(*(placed(x, (0,)) for x in flat), cu, cu, 9, 9, causal=True)], [want])
    qkv = torch.randn(36, 3, 8, 64)
    stacked = fa_attn.flash_attn_varlen_qkvpacked_func
    same([stacked(placed(qkv, (2,)), cu, 9)], [stacked(qkv, cu, 9)], (1,))

    step, rows = fa_attn.flash_attn_with_kvcache, torch.randn(4, 2, 4, 64)
    q = torch.randn(4, 2, 8, 64)
    angles = torch.rand(32, 16)
    table = torch.arange(16, dtype=torch.int32).view(4, 4).flip(0).contiguous()
    turned = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin())
    for options, ways in (
        (dict(cache_seqlens=used), ((2,), (0,), (None,))),
        (dict(cache_seqlens=5, **turned), ((2,), (0,), (0, 2))),
        (dict(cache_seqlens=used, block_table=table), ((2,),)),
    ):
        cache = torch.randn(16, 8, 4, 64) if "block_table" in options else torch.randn(4, 32, 4, 64)
        for axes in ways:
            own, shards = [cache.clone(), cache * 2], [placed(cache, axes), placed(cache * 2, axes)]
            want = step(q, *own, rows, rows, causal=True, return_softmax_lse=True, **options)
            new = [placed(rows, axes)] * 2
            got = step(placed(q, axes), *shards, *new, causal=True, return_softmax_lse=True, **options)
            same([*got, *shards], [*want, *own], axes)
    pages, pad = torch.randn(16, 8, 4, 64), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    want = step(q, pages, pages, cache_seqlens=used, block_table=table)
    for axes, of_pages, of_table in (((2,), (2,), ()), ((0,), (), (0,))):
        lengths = dict(cache_seqlens=placed(used, of_table), block_table=placed(table, of_table))
        same([step(placed(q, axes), *[placed(pages, of_pages)] * 2, **lengths)], [want], axes)
    want = step(q, k, v, cache_seqlens=used, cache_leftpad=pad)
    for whole in (lambda x: x, lambda x: placed(x, ())):
        lengths = dict(cache_seqlens=whole(used), cache_leftpad=whole(pad))
        same([step(*(placed(x, (2,)) for x in (q, k, v)), **lengths)], [want], (2,))
    unequal = placed(k, (1,)), placed(v, (1,))
    if count > 1:
        try:
            step(placed(q, (2,)), *unequal, *[placed(rows, (2,))] * 2, cache_seqlens=3)
            raise AssertionError("rows are appended to a cache whose rows are sharded")
        except fa_attn.UnsupportedError as error:
            assert "k_cache is placed as" in str(error)

    outs, lses = torch.randn(2, 4, 9, 8, 64), torch.randn(2, 4, 8, 9)
    want = fa_attn.merge(list(outs), list(lses))
    for axes, of_lse in (((2,), (1,)), ((0,), (0,))):
        parts = [placed(x, axes) for x in outs], [placed(x, of_lse) for x in lses]
        same(fa_attn.merge(*parts), want, axes)
    # Heads that no two ranks can share are gathered.
    for heads in (6, 3):
        q, k = torch.randn(4, 9, 2 * heads, 64), torch.randn(4, 9, heads, 64)
        want = fa_attn.flash_attn_func(q, k, k)
        for axes in ((2,), (2, 2)):
            same([fa_attn.flash_attn_func(*(placed(x, axes) for x in (q, k, k)))], [want])
    try:
        fa_attn.flash_attn_func(placed(q, (2,)), k, k)
        raise AssertionError("a tensor of one rank is taken beside those of all")
    except fa_attn.InputTypeError as error:
        assert "k is no DTensor and q is" in str(error)

    try:
        fa_attn.flash_attn_func(*[placed(q, (2,))] * 3, dropout_p=0.5)
        raise AssertionError("the bits of a rank's heads are those of the first")
    except fa_attn.UnsupportedError as error:
        assert "with dropout_p give local tensors" in str(error)

    q, k, v = dout, *torch.randn(2, 4, 9, 4, 64)
    slopes, by_both, hidden = torch.rand(8), torch.rand(4, 8), torch.rand(4, 8, 9, 9) > 0.3
    programs = (
        dict(score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j) + by_both[b, h]),
        dict(mask_mod=lambda b, h, i, j: (i + b >= j) & ((h + i + j) % 3 != 0)),
        dict(mask=hidden),
        dict(causal=True, score_mod=lambda s, b, h, i, j: s * (1 + h) - b, sinks=torch.rand(8)),
    )
    for axes in [(1,), *ways]:
        kept = axes if axes != (1,) else None
        for options in programs:
            want = attention(q, k, v, dout, **options)
            same(attention(*(placed(x, axes) for x in (q, k, v, dout)), **options), want, kept)
        own = dict(mask=placed(hidden, ()))
        want = attention(q, k, v, dout, mask=hidden)
        same(attention(*(placed(x, axes) for x in (q, k, v, dout)), **own), want, kept)
        for bias in (torch.randn(4, 8, 9, 9), torch.randn(1, 8, 9, 9), torch.randn(9, 9)):
            want = attention(q, k, v, dout, bias=bias)
            for given in (bias, placed(bias, ()), placed(bias, (bias.dim() - 3,) if bias.dim() > 2 else ())):
                same(attention(*(placed(x, axes) for x in (q, k, v, dout)), bias=given), want, kept)
    # Whole where heads cannot be shared out.
    few = torch.randn(4, 9, 6, 64), torch.randn(4, 9, 3, 64)
    want = fa_attn.flash_attn_func(few[0], few[1], few[1], **programs[1])
    sharded = [placed(few[at], (2,)) for at in (0, 1, 1)]
    same([fa_attn.flash_attn_func(*sharded, **programs[1])], [want])
    try:
        fa_attn.flash_attn_func(q, placed(k, (2,)), placed(v, (2,)), bias=bias)
        raise AssertionError("a tensor of one rank is taken beside those of all")
    except fa_attn.InputTypeError as error:
        assert "k is a DTensor and q is none" in str(error)

    # Codes: gloo does not send them, ranks hold their own.
    codes, one = torch.randn(4, 32, 4, 64).to(torch.float8_e4m3fn), torch.rand(4) + 0.5
    last = torch.randn(4, 2, 8, 64)
    lengths = torch.tensor([9, 30, 5, 17], dtype=torch.int32)
    scales = dict(k_descale=one, v_descale=one * 2)
    want = step(last, codes, codes, cache_seqlens=lengths, causal=True, **scales)
    for axes in ((2,), (0,), (None,)):
        like = placed(codes.float(), axes)
        own = DTensor.from_local(like.to_local().to(codes.dtype), mesh, like.placements, run_check=False)
        got = step(placed(last, axes), own, own, cache_seqlens=lengths, causal=True, **scales)
        same([got], [want], axes)
    latents, of_q = torch.randn(4, 9, 1, 192), torch.randn(4, 9, 8, 192)
    options = dict(causal=True, softmax_scale=0.1)
    want = fa_attn.flash_attn_func(
        of_q[..., :64], latents[..., :64], latents[..., 64:], qv=of_q[..., 64:], **options
    )
    for axes in ((0,), (2,), (None,)):
        own = [placed(x, axes) for x in (of_q[..., :64], of_q[..., 64:])]
        keys = [placed(x, axes if axes != (2,) else ()) for x in (latents[..., :64], latents[..., 64:])]
        got = fa_attn.flash_attn_func(own[0], *keys, qv=own[1], **options)
        same([got], [want])

    compiled = torch.compile(attention, backend="aot_eager")
    q, k, v = dout, *torch.randn(2, 4, 9, 4, 64)
    for axes in ((2,), (0,)):
        got = compiled(*(placed(x, axes) for x in (q, k, v, dout)), causal=True)
        same(got, attention(q, k, v, dout, causal=True), axes)
    dist.destroy_process_group()
    print("all cases", flush=True)
    # Gloo's threads may outlive the groups, which aborts an interpreter that takes itself down.
    os._exit(0)


if __name__ == "__main__":
    run(int(sys.argv[1]), *sys.argv[2:])
