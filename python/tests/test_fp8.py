"""q, k and v in e4m3: results against those of the decoded values, in every form of descales; refusals.
numpy, and torch where it is there."""

import importlib.util
import itertools

import fa_attn
import numpy as np
import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
LIBRARIES = ("numpy", pytest.param("torch", marks=needs_torch))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def descales(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.01, 0.03, shape).astype(np.float32)


def as_array(library, x):
    if library == "numpy":
        return x
    import torch

    return torch.from_numpy(np.ascontiguousarray(x))


def as_numpy(x):
    return np.asarray(x.float() if hasattr(x, "float") else x)


def coded(library, x, descale):
    """(codes, what they stand for). `descale`: per sequence and head of x."""
    codes, _ = fa_attn.quantize_kv(as_array(library, x), descale=as_array(library, descale))
    return codes, as_numpy(fa_attn.dequantize_kv(codes, as_array(library, descale)))


def as_bits(x):
    return x.view(np.uint8) if isinstance(x, np.ndarray) else x.view(__import__("torch").uint8)


def said(library):
    return {"kv_cache_dtype": "fp8_e4m3"} if library == "numpy" else {}


def near(library, got, want):
    """bfloat16 of torch is rounded once; numpy's bytes give float32."""
    name = str(got.dtype)
    assert name.endswith("bfloat16") if library == "torch" else name == "float32"
    step = 2.0**-8 * np.abs(want) + 1e-5 if library == "torch" else 1e-5
    assert (np.abs(as_numpy(got) - want) <= step).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_those_of_the_values(library):
    # Heads 0 and 1 read K/V head 0, 2 and 3 head 1: so do q's descales.
    scales = [descales(2, 2, seed=seed) for seed in range(3)]
    q8, q = coded(library, normal(2, 7, 4, 32), np.repeat(scales[0], 2, 1))
    k8, k = coded(library, normal(2, 50, 2, 32, seed=1), scales[1])
    v8, v = coded(library, normal(2, 50, 2, 24, seed=2), scales[2])
    named = dict(zip(("q_descale", "k_descale", "v_descale"), (as_array(library, x) for x in scales)))
    for options in (dict(causal=True), dict(softcap=5.0, window_size=(9, 3)), dict(softmax_scale=0.3)):
        options["return_softmax_lse"] = True
        out, lse = fa_attn.flash_attn_func(q8, k8, v8, **named, **said(library), **options)
        want, want_lse = fa_attn.flash_attn_func(q, k, v, **options)
        near(library, out, want)
        assert np.abs(as_numpy(lse) - want_lse).max() < 1e-4
        # LSE says nothing of v's.
        double = {**named, "v_descale": 2 * named["v_descale"]}
        twice, same = fa_attn.flash_attn_func(q8, k8, v8, **double, **said(library), **options)
        assert (as_numpy(twice) == 2 * as_numpy(out)).all() and (as_numpy(same) == as_numpy(lse)).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_descales_are_broadcast(library):
    one = np.full((2, 2), 0.02, np.float32)
    q8, q = coded(library, normal(2, 3, 2, 16), one)
    k8, k = coded(library, normal(2, 9, 2, 16, seed=1), one)
    want = fa_attn.flash_attn_func(q, k, k)
    full = as_array(library, one)
    for x in (full[:1, :1], full[0, :1], full[0], full[:1], full[:, :1]):
        out = fa_attn.flash_attn_func(q8, k8, k8, q_descale=x, k_descale=x, v_descale=x, **said(library))
        near(library, out, want)
    # None is 1, and every other descale is there or not by itself.
    scale = 0.02**2 / 4
    out = fa_attn.flash_attn_func(q8, k8, k8, softmax_scale=scale, v_descale=full, **said(library))
    near(library, out, want)


@pytest.mark.parametrize("library", LIBRARIES)
def test_q_k_and_v_in_one_array(library):
    scales = descales(2, 3, seed=4)
    codes, _ = coded(library, normal(2, 5, 3, 16), scales)
    stacked = np.asarray(as_bits(codes))[:, :, None]
    stacked = as_array(library, np.concatenate([stacked, stacked[:, ::-1], stacked], 2).copy())
    if library == "torch":
        stacked = stacked.view(codes.dtype)
    named = {name: as_array(library, scales) for name in ("q_descale", "k_descale", "v_descale")}
    named.update(said(library), causal=True)
    q, k, v = (stacked[:, :, at] for at in range(3))
    want = fa_attn.flash_attn_func(q, k, v, **named)
    out, lse = fa_attn.flash_attn_qkvpacked_func(stacked, return_lse=True, **named)
    assert (as_numpy(out) == as_numpy(want)).all() and tuple(lse.shape) == (2, 3, 5)
    starts = as_array(library, np.array([0, 5, 10], np.int32))
    flat = stacked.reshape(10, 3, 3, 16)
    out = fa_attn.flash_attn_varlen_qkvpacked_func(flat, starts, 5, **named)
    assert (as_numpy(out).reshape(want.shape) == as_numpy(want)).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_packed_sequences_and_pages(library):
    lens = [5, 0, 20]
    starts = np.array([0, 5, 5, 25], np.int32)
    scales = descales(3, 2, seed=4)
    rows = np.repeat(np.arange(3), lens)
    by_row = scales[rows]
    codes, values = [], []
    for seed, heads in ((0, 4), (1, 2), (2, 2)):
        x = normal(25, heads, 16, seed=seed)
        own = np.ascontiguousarray(np.repeat(by_row, heads // 2, 1))
        bits, _ = fa_attn.quantize_kv(as_array(library, x), descale=as_array(library, own))
        codes.append(bits)
        values.append(as_numpy(fa_attn.dequantize_kv(bits, as_array(library, own))))
    given = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=20, max_seqlen_k=20, causal=True)
    named = {name: as_array(library, scales) for name in ("q_descale", "k_descale", "v_descale")}
    cu = {**given, **{name: as_array(library, starts) for name in ("cu_seqlens_q", "cu_seqlens_k")}}
    out = fa_attn.flash_attn_varlen_func(*codes, **cu, **named, **said(library))
    near(library, out, fa_attn.flash_attn_varlen_func(*values, **given))
    # A cache in pages of 4 rows, read in another order.
    q8, k8, v8 = codes
    q, k, v = values
    table, used = np.array([[4, 0, 2]], np.int32), np.array([11], np.int32)
    pages = [x[:20].reshape(5, 4, 2, 16) for x in (k8, v8)]
    flat = [x[:20].reshape(5, 4, 2, 16) for x in (k, v)]
    one = np.ones((1, 2), np.float32)
    k_values = [np.concatenate([x[page] for page in table[0]])[None] for x in flat]
    by_page = by_row[:20].reshape(5, 4, 2, 1)[table[0]].reshape(1, 12, 2, 1)
    bare = [x / by_page for x in k_values]
    q_bare = (q / np.repeat(by_row, 2, 1)[..., None])[None, :1]
    out = fa_attn.flash_attn_with_kvcache(
        q8[None, :1],
        *pages,
        cache_seqlens=as_array(library, used),
        block_table=as_array(library, table),
        q_descale=as_array(library, 0.01 * one),
        k_descale=as_array(library, 0.02 * one),
        v_descale=as_array(library, 0.03 * one),
        **said(library),
    )
    want = fa_attn.flash_attn_func(0.01 * q_bare, 0.02 * bare[0][:, :11], 0.03 * bare[1][:, :11])
    near(library, out, want.astype(np.float32))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("is_coded, is_turned", ((True, False), (True, True), (False, False), (False, True)))
def test_rows_that_join_a_cache(library, is_coded, is_turned):
    # New rows are codes with the cache's descales, which join it bit by bit, or values, which are quantised.
    scales = [descales(2, 2, seed=seed) for seed in range(3)]
    q8, q = coded(library, normal(2, 3, 4, 16), np.repeat(scales[0], 2, 1))
    k8, _ = coded(library, normal(2, 12, 2, 16, seed=1), scales[1])
    v8, _ = coded(library, normal(2, 12, 2, 16, seed=2), scales[2])
    new = [coded(library, normal(2, 3, 2, 16, seed=seed), scales[seed - 2]) for seed in (3, 4)]
    new_codes, new_values = zip(*new)
    named = dict(zip(("q_descale", "k_descale", "v_descale"), (as_array(library, x) for x in scales)))
    used, tables = np.array([4, 9], np.int32), {}
    if is_turned:
        angles = np.random.default_rng(8).uniform(0, 6.28, (20, 8)).astype(np.float32)
        tables = dict(rotary_cos=np.cos(angles), rotary_sin=np.sin(angles))
    given = new_codes if is_coded else [as_array(library, x) for x in new_values]
    if library == "torch" and not is_coded:
        given = [x.bfloat16() for x in given]
    out = fa_attn.flash_attn_with_kvcache(
        q8, k8, v8, *given, cache_seqlens=as_array(library, used), causal=True, **named, **said(library),
        **{name: as_array(library, x) for name, x in tables.items()},
    )  # fmt: skip
    k, v = (as_numpy(fa_attn.dequantize_kv(x, as_array(library, d))) for x, d in zip((k8, v8), scales[1:]))
    want_q, wanted = q, []
    for b, at in enumerate(used):
        rows = slice(at, at + 3)
        if is_turned:
            cos, sin = (tables[name][rows][:, None] for name in ("rotary_cos", "rotary_sin"))
            turn = lambda x: np.stack(  # noqa: E731
                [x[..., 0::2] * cos - x[..., 1::2] * sin, x[..., 0::2] * sin + x[..., 1::2] * cos], -1
            ).reshape(x.shape)
            want_q = np.concatenate([want_q[:b], turn(q[b])[None], want_q[b + 1 :]])
            want = turn(new_values[0][b])
            assert (np.abs(k[b, rows] - want) <= 0.08 * np.abs(want) + 0.02).all()
        elif is_coded:
            assert np.array_equal(as_numpy(as_bits(k8))[b, rows], as_numpy(as_bits(new_codes[0]))[b])
        if is_coded:
            assert np.array_equal(as_numpy(as_bits(v8))[b, rows], as_numpy(as_bits(new_codes[1]))[b])
        else:
            assert (np.abs(v[b, rows] - new_values[1][b]) <= 0.07 * np.abs(new_values[1][b]) + 0.02).all()
        here = slice(b, b + 1)
        wanted.append(
            fa_attn.flash_attn_func(want_q[here], k[here, : at + 3], v[here, : at + 3], causal=True)
        )
    got, want = as_numpy(out), np.concatenate(wanted)
    # A turned q is rounded to codes again.
    assert np.abs(got - want).max() < (0.15 if is_turned else 0.02)


@pytest.mark.parametrize("library", LIBRARIES)
def test_programs_and_sinks(library):
    ones = np.ones((1, 2), np.float32)
    q8, q = coded(library, normal(1, 6, 2, 16), ones)
    k8, k = coded(library, normal(1, 9, 2, 16, seed=1), ones)
    bias, sinks = normal(1, 2, 6, 9, seed=2), normal(2, seed=3)
    options = dict(bias=as_array(library, bias), sinks=as_array(library, sinks))
    out = fa_attn.flash_attn_func(q8, k8, k8, **options, **said(library))
    near(library, out, fa_attn.flash_attn_func(q, k, k, bias=bias, sinks=sinks))


@pytest.mark.parametrize("library", LIBRARIES)
def test_refusals_name_the_argument(library):
    ones = np.ones((1, 2), np.float32)
    q8, q = coded(library, normal(1, 2, 2, 16), ones)
    named = said(library)
    wide = as_array(library, q)
    if library == "torch":
        wide = wide.bfloat16()
    three = as_array(library, np.ones((1, 2, 2), np.float32))
    int8 = fa_attn.quantize_kv(wide, "int8")[0]
    whole = as_array(library, np.zeros((1, 2, 2, 16), np.int32))
    rows = as_array(library, np.ones((1, 2, 2), np.float32))
    for error, call, part in (
        (fa_attn.UnsupportedError, lambda: fa_attn.flash_attn_func(int8, int8, int8), "q holds"),
        (fa_attn.InputError, lambda: fa_attn.flash_attn_func(q8, int8, int8), "give all three in"),
        (fa_attn.InputError, lambda: fa_attn.flash_attn_func(q8, wide, wide), "give all three in"),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q8, q8, q8, q_descale=three, **named),
            "q_descale has the shape (1, 2, 2): it must be (1,), (2,), (1, 2)",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(q8, q8, q8, qv=q8, **named),
            "qv with q of 8 bits: give both in 16 bits",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q8, q8, q8, out=whole, **named),
            "out",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_with_kvcache(q8, q8, q8, int8, q8, cache_seqlens=1, **named),
            "k holds int8 and k_cache codes of e4m3",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_with_kvcache(
                q8, q8, q8, q8, q8, cache_seqlens=1, k_descale=rows, **named
            ),
            "k holds codes, and k_descale is written with each row",
        ),
    ):
        if library == "numpy" and "all three" in part:
            continue
        with pytest.raises(error) as found:
            call()
        assert part in str(found.value)


@needs_torch
def test_a_plan_of_codes_and_one_of_chunks():
    import torch

    q8, k8 = (torch.from_numpy(normal(2, n, 2, 16, seed=n)).to(torch.float8_e4m3fn) for n in (1, 9))
    used = torch.tensor([9, 4], dtype=torch.int32)
    made = fa_attn.get_scheduler_metadata(2, 1, 9, 2, 2, 16, used, q8.dtype)
    want = fa_attn.flash_attn_with_kvcache(q8, k8, k8, cache_seqlens=used)
    for metadata in (made, fa_attn.get_scheduler_metadata(2, 1, 9, 2, 2, 16, used)):
        call = dict(cache_seqlens=used, scheduler_metadata=metadata)
        assert torch.equal(fa_attn.flash_attn_with_kvcache(q8, k8, k8, **call), want)
    chunks = dict(cache_seqlens=used, causal=True, attention_chunk=4)
    metadata = fa_attn.get_scheduler_metadata(2, 1, 9, 2, 2, 16, used, causal=True, attention_chunk=4)
    got = fa_attn.flash_attn_with_kvcache(q8, k8, k8, scheduler_metadata=metadata, **chunks)
    assert torch.equal(got, fa_attn.flash_attn_with_kvcache(q8, k8, k8, **chunks))
    assert not torch.equal(got, want)
    for other in (0, 5):
        with pytest.raises(fa_attn.InputError, match="scheduler_metadata is of attention_chunk = 4"):
            fa_attn.flash_attn_with_kvcache(
                q8, k8, k8, scheduler_metadata=metadata, **{**chunks, "attention_chunk": other}
            )


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_in_codes(library):
    """`output_scale`, as vLLM gives it: the codes of what would be in 16 bits, whichever function it is."""
    q, k, v = (as_array(library, normal(2, 9, 4, 32, seed=seed)) for seed in range(3))
    scale = as_array(library, np.float32([0.01]))
    starts = as_array(library, np.int32([0, 9, 18]))
    packed = [x.reshape(18, 4, 32) for x in (q, k, v)]
    stacked = as_array(library, np.stack([as_numpy(x) for x in (q, k, v)], 2))
    calls = (
        (fa_attn.flash_attn_func, (q, k, v)),
        (fa_attn.flash_attn_qkvpacked_func, (stacked,)),
        (fa_attn.flash_attn_varlen_func, (*packed, starts, starts, 9, 9)),
        (fa_attn.flash_attn_with_kvcache, (q, k, v)),
    )
    for function, given in calls:
        want = function(*given)
        codes, _ = fa_attn.quantize_kv(want, descale=scale)
        got = function(*given, output_scale=scale)
        assert got.dtype == codes.dtype and (as_bits(got) == as_bits(codes)).all()
        assert np.abs(as_numpy(fa_attn.dequantize_kv(got, scale)) - as_numpy(want)).max() < 0.1
        if function is not fa_attn.flash_attn_qkvpacked_func:
            out = as_bits(codes) * 0
            out = out if library == "numpy" else out.view(codes.dtype)
            assert function(*given, output_scale=scale, out=out) is out
            assert (as_bits(out) == as_bits(codes)).all()
    with pytest.raises(fa_attn.InputError, match="out holds"):
        fa_attn.flash_attn_func(q, k, v, output_scale=scale, out=q * 0)
    with pytest.raises(fa_attn.InputError, match="output_scale is float32 of the shape \\(2,\\)"):
        fa_attn.flash_attn_func(q, k, v, output_scale=as_array(library, np.float32([1, 2])))
    if library == "torch":
        with pytest.raises(fa_attn.UnsupportedError, match="output_scale: .* no gradients"):
            fa_attn.flash_attn_func(q.clone().requires_grad_(), k, v, output_scale=scale)


@needs_torch
def test_what_no_kernel_of_8_bits_computes_is_computed_in_16():
    """On a GPU: q's numbers are those of bfloat16, and its descale joins that of k. Here on the CPU."""
    import torch

    from fa_attn._options import call_options, extras_of
    from fa_attn._torch_passes import in_16_bits, run_forward

    codes = lambda *shape, seed: torch.from_numpy(  # noqa: E731
        np.ascontiguousarray(coded("numpy", normal(*shape, seed=seed), np.ones((2, shape[2]), np.float32))[0])
    )
    q, k, v = codes(2, 3, 4, 32, seed=1), codes(2, 20, 2, 32, seed=2), codes(2, 20, 2, 32, seed=3)
    heads, sequences = torch.tensor([0.5, 1.5]), torch.tensor([[0.5, 1.0], [1.25, 0.75]])
    rows = torch.rand(2, 20, 2) + 0.5
    options = call_options(0.3, True, (-1, -1), 0.0, False)._replace(kv_dtype="e4m3", out_dtype="bf16")
    for of_q, of_k in itertools.product((None, heads, sequences), (None, heads, sequences, rows)):
        extras = extras_of(q_descale=of_q, k_descale=of_k)
        want, want_lse = run_forward(q, k, v, options, extras)
        wide, as_wide, joined = in_16_bits(q, options, extras)
        assert wide.dtype is torch.bfloat16 and as_wide.out_dtype is None
        got, lse = run_forward(wide, k, v, as_wide, joined)
        assert got.dtype is want.dtype is torch.bfloat16
        assert (got - want).abs().max() < 2e-2 and (lse - want_lse).abs().max() < 1e-3
    # Descales of sequences do not join those of rows in pages.
    table = torch.zeros(2, 1, dtype=torch.int32)
    assert in_16_bits(q, options, extras_of(q_descale=sequences, k_descale=rows, page_table=table)) is None


@needs_torch
def test_torch_refuses_gradients_and_other_formats():
    import torch

    q = torch.from_numpy(normal(1, 4, 2, 16))
    q8 = q.to(torch.float8_e4m3fn)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    for wants in range(4):
        three = [q8, q8, q8] if wants < 3 else [q, q8, q8]
        three[wants % 3] = three[wants % 3].clone().requires_grad_()
        packed = [x.detach()[0].requires_grad_(x.requires_grad) for x in three]
        with torch.no_grad():
            want = fa_attn.flash_attn_func(*three)
        # As FlashAttention-3: the forward is computed, the backward refused.
        for out in (
            fa_attn.flash_attn_func(*three),
            fa_attn.flash_attn_varlen_func(*packed, starts, starts, 4, 4)[None],
        ):
            assert torch.equal(out, want) and out.requires_grad
            with pytest.raises(fa_attn.UnsupportedError, match="in codes: there are no gradients"):
                out.float().sum().backward()
        with pytest.raises(fa_attn.UnsupportedError, match="requires a gradient: with k and v in codes"):
            fa_attn.flash_attn_func(*three, out=torch.empty_like(want))
    # Gradients in 16 bits from O and LSE of the fp8 forward.
    out, lse = fa_attn.flash_attn_func(q8, q8, q8, return_softmax_lse=True)
    half = q8.bfloat16()
    grads = fa_attn.flash_attn_backward(torch.ones_like(out), half, half, half, out, lse)
    assert all(x is None or torch.isfinite(x).all() for x in grads)


@needs_torch
def test_compiled_calls_agree_and_the_operator_is_right():
    import torch

    q, k = torch.from_numpy(normal(2, 5, 4, 16)), torch.from_numpy(normal(2, 9, 2, 16, seed=1))
    q8, k8 = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 0.5).expand(2, 2)

    def call(q, k, v, scale):
        return fa_attn.flash_attn_func(
            q, k, v, causal=True, q_descale=scale, k_descale=scale, v_descale=scale, return_softmax_lse=True
        )

    plain = call(q8, k8, k8, scale)
    compiled = torch.compile(call, fullgraph=True, backend="eager")(q8, k8, k8, scale)
    assert plain[0].dtype is torch.bfloat16 and plain[0].shape == q.shape
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled))
    bits = [x.view(torch.uint8) for x in (q8, k8, k8)]
    options = (None, True, -1, -1, 0.0, False, 0, False, "e4m3", "bf16", False)
    arguments = (*bits, *[None] * 7, *[scale.contiguous()] * 3, 0, 0, *options)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fa_attn.forward.default, arguments, test_utils=tests)
    wide = torch.empty(2, 5, 4, 16, dtype=torch.bfloat16)
    assert fa_attn.flash_attn_func(q8, k8, k8, out=wide) is wide
