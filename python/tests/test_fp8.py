"""q, k and v in e4m3: results against those of the decoded values, in every form of descales; refusals.
numpy, and torch where it is there."""

import importlib.util

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
            lambda: fa_attn.flash_attn_func(wide, wide, wide, q_descale=as_array(library, ones)),
            "q is of 16 bits and has no descale",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q8, q8, q8, out=whole, **named),
            "out",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_with_kvcache(q8, q8, q8, q8, q8, cache_seqlens=1, **named),
            "k and an fp8 q: rows are appended beside a q of 16 bits",
        ),
    ):
        if library == "numpy" and "all three" in part:
            continue
        with pytest.raises(error) as found:
            call()
        assert part in str(found.value)


@needs_torch
def test_torch_refuses_gradients_and_other_formats():
    import torch

    q = torch.from_numpy(normal(1, 4, 2, 16))
    q8 = q.to(torch.float8_e4m3fn)
    for wants in range(3):
        three = [q8, q8, q8]
        three[wants] = q8.clone().requires_grad_()
        with pytest.raises(fa_attn.UnsupportedError, match="requires a gradient: with k and v of 8 bits"):
            fa_attn.flash_attn_func(*three)
        with torch.no_grad():
            assert fa_attn.flash_attn_func(*three).dtype is torch.bfloat16
    with pytest.raises(fa_attn.UnsupportedError, match="float8_e5m2"):
        fa_attn.flash_attn_func(*[q.to(torch.float8_e5m2)] * 3)
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
    options = (None, True, -1, -1, 0.0, False, 0, False, "e4m3", "bf16")
    arguments = (*bits, *[None] * 7, *[scale.contiguous()] * 3, 0, 0, *options)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fa_attn.forward.default, arguments, test_utils=tests)
    wide = torch.empty(2, 5, 4, 16, dtype=torch.bfloat16)
    assert fa_attn.flash_attn_func(q8, k8, k8, out=wide) is wide
