"""Codes, latents, wide heads and fp8 under torch's transformations: each form by each of them gives what a
plain call gives, or is refused by name. Calls with drawn flags are right beside f64, or refused."""

import random

import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")

import fa_attn  # noqa: E402
from fa_attn import flash_mla  # noqa: E402


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def in_pages(x, page=4):
    batch, keys = x.shape[:2]
    columns = -(-keys // page)
    table = torch.arange(batch * columns, dtype=torch.int32).reshape(batch, columns).flip(0).contiguous()
    pages = torch.zeros(table.numel(), page, *x.shape[2:], dtype=torch.uint8)
    room = pages if x.itemsize == 1 else pages.to(x.dtype)
    bits = x.view(room.dtype)
    for row, own in zip(table, bits):
        for place, part in zip(row, own.split(page)):
            room[int(place), : len(part)] = part
    return room.view(x.dtype), table


def dense(kind, per, dim=16):
    def made(batch, keys):
        arrays = (fa_attn.quantize_kv(normal(batch, keys + i, 2, dim)[:, :keys], kind, per) for i in range(2))
        (k, of_k), (v, of_v) = arrays
        return normal(batch, 4, 4, dim), k, v, of_k, of_v

    def call(q, k, v, of_k, of_v):
        named = dict(kv_cache_dtype="int4") if kind == "int4" else {}
        return fa_attn.flash_attn_func(
            q, k, v, causal=True, k_descale=of_k, v_descale=of_v, return_softmax_lse=True, **named
        )

    return made, call


def paged(kind):
    of, _ = dense(kind, "head")

    def made(batch, keys):
        q, k, v, of_k, of_v = of(batch, keys)
        (k, table), (v, _) = in_pages(k), in_pages(v)
        return q, k, v, of_k, of_v, table, torch.full((batch,), keys - 3, dtype=torch.int32)

    def call(q, k, v, of_k, of_v, table, used):
        named = dict(kv_cache_dtype="int4") if kind == "int4" else {}
        named |= dict(k_descale=of_k, v_descale=of_v, return_softmax_lse=True)
        return fa_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, block_table=table, causal=True, **named
        )

    return made, call


def latent(kind=None):
    def made(batch, keys):
        rows = normal(batch, keys, 1, 24)
        cache, table = in_pages(rows if kind is None else rows.to(kind))
        used = torch.full((batch,), keys - 3, dtype=torch.int32)
        return normal(batch, 2, 4, 24), cache, table, used, torch.full((1,), 0.5)

    def call(q, cache, table, used, descale):
        named = {} if kind is None else dict(is_fp8_kvcache=True, descale_k=descale)
        return flash_mla.flash_mla_with_kvcache(q, cache, table, used, 16, None, None, 0.2, True, **named)

    return made, call


def wide(dim, dim_v):
    made = lambda batch, keys: (  # noqa: E731
        normal(batch, 4, 4, dim),
        normal(batch, keys, 2, dim),
        normal(batch, keys, 2, dim_v),
    )
    return made, lambda q, k, v: fa_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)


def fp8(kind):
    def made(batch, keys):
        k = normal(batch, keys, 2, 16).to(kind)
        return normal(batch, 4, 4, 16).to(kind), k, torch.full((batch, 2), 0.5)

    def call(q, k, of):
        return fa_attn.flash_attn_func(
            q, k, k, causal=True, q_descale=of, k_descale=of, v_descale=of, return_softmax_lse=True
        )

    return made, call


FORMS = {
    "e4m3 head": dense("e4m3", "head"),
    "e5m2 sequence_head": dense("e5m2", "sequence_head"),
    "int8 token_head": dense("int8", "token_head"),
    "int4 token_head": dense("int4", "token_head"),
    "e4m3 of 512": dense("e4m3", "head", 512),
    "paged e4m3": paged("e4m3"),
    "paged int4": paged("int4"),
    "latent": latent(),
    "latent e4m3": latent(torch.float8_e4m3fn),
    "latent e5m2": latent(torch.float8_e5m2),
    "heads of 512": wide(512, 512),
    "heads of 320-256": wide(320, 256),
    "fp8": fp8(torch.float8_e4m3fn),
    "fp8 e5m2": fp8(torch.float8_e5m2),
}


def same(one, other):
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other))


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def form(request):
    return request.param


def test_modes_give_the_same_bits(form):
    made, call = form
    arrays = made(3, 20)
    want = call(*arrays)
    with torch.inference_mode():
        assert same(call(*arrays), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(call(*arrays), want)
        if arrays[0].itemsize > 1:
            assert same(call(arrays[0].float(), *arrays[1:]), want)
    assert same(torch.utils.checkpoint.checkpoint(call, *arrays, use_reentrant=False), want)
    assert call(*made(0, 20))[0].shape == (0, *want[0].shape[1:])


def test_one_graph_serves_all_sizes(form):
    made, call = form
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, keys in ((3, 20), (2, 24), (4, 36)):
        arrays = made(batch, keys)
        assert same(compiled(*arrays), call(*arrays))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_exported_programs_give_the_same_bits(form):
    made, call = form

    class Module(torch.nn.Module):
        def forward(self, *arrays):
            return call(*arrays)

    arrays = made(3, 20)
    assert same(torch.export.export(Module(), arrays).module()(*arrays), call(*arrays))


def test_vmap_is_each_element_by_itself_or_refused(form):
    made, call = form
    arrays = made(3, 20)
    stacked = [torch.stack([x, x]) for x in arrays]
    if any(x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for x in arrays):
        with pytest.raises(fa_attn.UnsupportedError, match="torch.vmap of float8"):
            torch.vmap(call)(*stacked)
    else:
        assert same([x[1] for x in torch.vmap(call)(*stacked)], call(*arrays))


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith(("e4m3", "e5m2", "int", "fp8"))])
def test_gradients_of_codes_are_refused_by_name(name):
    made, call = FORMS[name]
    q, *others = made(3, 20)
    descale = others[2 if len(others) == 4 else 1]
    if q.itemsize > 1:
        out, _ = call(q.requires_grad_(), *others)
        with pytest.raises(fa_attn.UnsupportedError, match="in codes: there are no gradients"):
            out.sum().backward()
    descale.requires_grad_()
    with pytest.raises(fa_attn.UnsupportedError, match="_descale requires a gradient"):
        call(q, *others)


QUERIES = {
    "f32": (torch.float32, 3e-4),
    "bf16": (torch.bfloat16, 2e-2),
    "f16": (torch.float16, 4e-3),
    "e4m3": (torch.float8_e4m3fn, 2e-2),
    "e5m2": (torch.float8_e5m2, 2e-2),
}
# What no call computes: sentences that begin so name what would work.
REFUSED = ("softcap and a program", "alibi and a program", "q holds float8_e4m3fn")


@pytest.mark.parametrize("seed", range(3))
def test_drawn_flags_are_right_beside_f64_or_refused(seed):
    drawn = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    computed = 0
    for _ in range(40):
        kind, name = drawn.choice(("e4m3", "e5m2", "int8", "int4")), drawn.choice(list(QUERIES))
        dtype, tolerance = QUERIES[name]
        kind = kind if name != "e4m3" or drawn.random() < 0.2 else "e4m3"
        batch, heads, group = drawn.choice((1, 2, 3)), drawn.choice((1, 2)), drawn.choice((1, 2, 3))
        rows, keys = drawn.choice((1, 3, 17)), drawn.choice((5, 33, 64))
        dim, dim_v = (drawn.choice((16, 32, 64, 320, 576)) for _ in range(2))
        form = drawn.choice(("dense", "packed", "paged"))
        q = normal(batch, rows, heads * group, dim).to(dtype)
        codes, descales, values = [], [], []
        for width in (dim, dim_v):
            per = drawn.choice(("tensor", "head", "sequence_head", "token_head"))
            made, own = fa_attn.quantize_kv(normal(batch, keys, heads, width), kind, per)
            codes.append(made), descales.append(own)
            values.append(fa_attn.dequantize_kv(made, own, kv_dtype=kind).numpy())
        causal = drawn.random() < 0.5
        window = (drawn.choice((-1, 0, 8)), drawn.choice((-1, 2)))
        window = (-1, -1) if causal or drawn.random() < 0.6 else window
        scale, softcap = drawn.choice((dim**-0.5, 0.1)), drawn.choice((0.0, 0.0, 2.0))
        slopes = 0.1 * torch.rand(heads * group, generator=generator) if drawn.random() < 0.3 else None
        sinks = normal(heads * group) if drawn.random() < 0.3 else None
        of_q = torch.rand(batch, heads, generator=generator) + 0.5 if drawn.random() < 0.4 else None
        used = [keys] * batch if form != "paged" else [drawn.randint(0, keys) for _ in range(batch)]
        named = dict(causal=causal, window_size=window, softmax_scale=scale, softcap=softcap)
        named |= dict(kv_cache_dtype="int4") if kind == "int4" else {}
        if drawn.random() < 0.2:
            named["score_mod"], sinks = lambda s, b, h, q, k: s + 0.05 * (k - q), None
        named |= dict(alibi_slopes=slopes, sinks=sinks, q_descale=of_q, return_softmax_lse=True)
        if form == "packed":
            starts = torch.arange(batch + 1, dtype=torch.int32)
            lengths = (rows * starts, keys * starts, rows, keys)
            codes = [x.flatten(0, 1) for x in codes]
            descales = [x.flatten(0, 1) if x.dim() == 3 else x for x in descales]
            call, arrays = fa_attn.flash_attn_varlen_func, (q.flatten(0, 1), *codes, *lengths)
        elif form == "paged":
            named["cache_seqlens"] = torch.tensor(used, dtype=torch.int32)
            (k, named["block_table"]), (v, _) = map(in_pages, codes)
            descales = [in_pages(x)[0] if x.dim() == 3 else x for x in descales]
            call, arrays = fa_attn.flash_attn_with_kvcache, (q, k, v)
        else:
            call, arrays = fa_attn.flash_attn_func, (q, *codes)
        try:
            out, lse = call(*arrays, k_descale=descales[0], v_descale=descales[1], **named)
        except (fa_attn.UnsupportedError, fa_attn.InputError) as error:
            assert str(error).startswith(REFUSED), error
            continue
        computed += 1
        out = out.double().reshape(batch, rows, heads * group, dim_v).numpy()
        lse = lse.double().reshape(-1, batch, rows).transpose(0, 1) if form == "packed" else lse
        for i, n in enumerate(used):
            own = q[i].double() if of_q is None else q[i].double() * of_q[i].repeat_interleave(group)[:, None]
            given = [own.numpy(), *(x[i, :n] for x in values)]
            if "score_mod" in named:
                # By the keys' places as a further column; the queries' change LSE alone.
                given[0] = np.concatenate([given[0], np.full_like(given[0][..., :1], 0.05 / scale)], -1)
                places = np.broadcast_to(np.arange(n)[:, None, None], (*given[1].shape[:2], 1))
                given[1] = np.concatenate([given[1], places], -1)
            asked = dict(causal=causal, window=window, scale=scale, softcap=softcap)
            asked |= dict(slopes=slopes, sinks=sinks)
            want, want_lse, _ = reference.attention(*given, **asked)
            if "score_mod" in named:
                want_lse = want_lse - 0.05 * np.arange(rows)
            assert np.abs(out[i] - want).max() <= tolerance * max(1.0, np.abs(want).max()), (seed, named)
            assert np.allclose(np.asarray(lse[i], np.float64), want_lse, atol=2e-2, rtol=0), (seed, named)
    assert computed > 25
