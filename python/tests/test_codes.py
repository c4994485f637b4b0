"""K and V in codes on numpy, and torch where it is there: quantisers, descales, appends, refusals."""

import importlib.util

import fa_attn
import numpy as np
import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
KINDS = ("e4m3", "e5m2", "int8", "int4")
PER = ("tensor", "head", "sequence_head", "token_head")
# What a call says of bytes: of numpy's, and of int4 of torch's as well.
ASKED = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "int8": None, "int4": "int4"}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def libraries():
    return ("numpy", pytest.param("torch", marks=needs_torch))


def as_array(library, x):
    if library == "numpy":
        return x
    import torch

    return torch.from_numpy(np.array(x) if not x.flags.writeable else np.ascontiguousarray(x))


def as_bytes(x):
    """torch's codes as uint8; others as they are."""
    if not HAS_TORCH or isinstance(x, np.ndarray):
        return x
    import torch

    return x.view(torch.uint8)


def as_numpy(x):
    return np.asarray(x.float() if hasattr(x, "float") else x)


def given(library, kind, x, per="head"):
    """(codes, descale, their values, keywords of a call)."""
    codes, descale = fa_attn.quantize_kv(as_array(library, x), kind, per)
    values = as_numpy(fa_attn.dequantize_kv(codes, descale, kv_dtype=kind))
    return codes, descale, values, naming(library, kind)


def naming(library, kind):
    """Keywords of a call that say what its bytes are."""
    asked = ASKED[kind] if library == "numpy" or kind == "int4" else None
    return {} if asked is None else {"kv_cache_dtype": asked}


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", PER)
def test_quantised_values_are_within_half_a_step(library, kind, per):
    x = normal(2, 5, 3, 16)
    codes, descale, values, _ = given(library, kind, x, per)
    shapes = {"tensor": (1,), "head": (3,), "sequence_head": (2, 3), "token_head": (2, 5, 3)}
    assert tuple(descale.shape) == shapes[per]
    share = {"e4m3": 1 / 16, "e5m2": 1 / 8}.get(kind)
    step = as_numpy(descale).max() / 2 if share is None else np.abs(x) * share + 1e-3
    assert (np.abs(values - x) <= step * 1.001).all()
    # With the descales given, the codes are the same.
    again, _ = fa_attn.quantize_kv(as_array(library, x), kind, descale=descale)
    assert (as_numpy(again) == as_numpy(codes)).all()


@needs_torch
@pytest.mark.parametrize("kind", KINDS)
def test_torch_and_numpy_quantise_to_the_same_codes(kind):
    import torch

    edges = [0.0, -0.0, 448, 449, 464, 465, 1e9, np.inf, -np.inf, np.nan, 2**-9, 2**-10, 3 * 2**-10, 1e-40]
    ties = [(a + b) / 2 for a, b in zip(range(1, 100), range(2, 101))]
    x = np.concatenate([edges, ties, np.negative(ties), 300 * normal(500)]).astype(np.float32)
    x = x.reshape(1, 1, 1, -1)
    one = np.ones(1, np.float32)
    ours, _ = fa_attn.quantize_kv(x, kind, descale=one)
    theirs, _ = fa_attn.quantize_kv(torch.from_numpy(x), kind, descale=torch.from_numpy(one))
    theirs = theirs.view(torch.int8 if kind == "int8" else torch.uint8).numpy()
    assert (ours == theirs).all()
    # pytorch#150756: what torch's own cast makes NaN saturates, and NaN stays.
    if kind == "e4m3":
        assert list(ours.reshape(-1)[2:10]) == [0x7E] * 6 + [0xFE, 0x7F]


@pytest.mark.parametrize("library", libraries())
def test_all_codes_of_e5m2_are_the_upper_bytes_of_float16(library):
    bits = np.arange(256, dtype=np.uint8)
    values = as_numpy(fa_attn.dequantize_kv(as_array(library, bits), kv_dtype="e5m2"))
    want = (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    assert np.array_equal(values, want, equal_nan=True)
    one = as_array(library, np.ones(1, np.float32))
    again, _ = fa_attn.quantize_kv(as_array(library, values.reshape(1, 1, 1, 256)), "e5m2", descale=one)
    again = np.asarray(as_bytes(again)).reshape(-1)
    finite = np.isfinite(want)
    assert (again[finite] == bits[finite]).all() and list(again[[0x7C, 0xFC]]) == [0x7B, 0xFB]


@pytest.mark.parametrize("library", libraries())
def test_all_codes_come_back(library):
    bits = np.arange(256, dtype=np.uint8)
    values = as_numpy(fa_attn.dequantize_kv(as_array(library, bits)))
    assert np.isnan(values[[0x7F, 0xFF]]).all() and np.isnan(values).sum() == 2
    assert (values[0x7E], values[1], values[8], values[0x88]) == (448.0, 2.0**-9, 2.0**-6, -(2.0**-6))
    one = as_array(library, np.ones(1, np.float32))
    again, _ = fa_attn.quantize_kv(as_array(library, values.reshape(1, 1, 1, 256)), descale=one)
    again = np.asarray(as_bytes(again)).reshape(-1)
    same = np.ones(256, bool)
    same[0xFF] = False
    assert (again == bits)[same].all()


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per", PER)
def test_attention_is_that_of_the_values(library, kind, per):
    q, k, v = normal(2, 7, 4, 32), normal(2, 50, 2, 32, seed=1), normal(2, 50, 2, 24, seed=2)
    k8, k_descale, k_values, options = given(library, kind, k, per)
    v8, v_descale, v_values, _ = given(library, kind, v, per)
    q = as_array(library, q)
    call = dict(causal=True, softcap=5.0, return_softmax_lse=True)
    out, lse = fa_attn.flash_attn_func(q, k8, v8, k_descale=k_descale, v_descale=v_descale, **call, **options)
    want, want_lse = fa_attn.flash_attn_func(
        q, as_array(library, k_values), as_array(library, v_values), **call
    )
    assert np.abs(as_numpy(out) - as_numpy(want)).max() < 1e-5
    assert np.abs(as_numpy(lse) - as_numpy(want_lse)).max() < 1e-4


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_paged_keys(library, kind):
    lens, starts = [3, 0, 20], np.array([0, 3, 3, 23], np.int32)
    q, k, v = normal(3, 1, 4, 16), normal(23, 2, 16, seed=1), normal(23, 2, 16, seed=2)
    for per in ("tensor", "head", "token_head"):
        k8, k_descale, k_values, options = given(library, kind, k, per)
        v8, v_descale, v_values, _ = given(library, kind, v, per)
        named = dict(cu_seqlens_k=as_array(library, starts), max_seqlen_k=20)
        out = fa_attn.flash_attn_varlen_func(
            as_array(library, q), k8, v8, **named, k_descale=k_descale, v_descale=v_descale, **options
        )
        values = [as_array(library, x) for x in (q, k_values, v_values)]
        want = fa_attn.flash_attn_varlen_func(*values, **named)
        assert np.abs(as_numpy(out) - as_numpy(want)).max() < 1e-5
        # The same in pages of 4 rows, in disorder.
        order = np.random.default_rng(3).permutation(9)
        table = np.full((3, 5), -1, np.int32)
        caches = [np.zeros((9, 4, 2, 16), np.asarray(as_numpy(x)).dtype) for x in (k_values, v_values)]
        at = iter(order)
        for sequence, (first, length) in enumerate(zip(starts, lens)):
            for row in range(length):
                if row % 4 == 0:
                    table[sequence, row // 4] = next(at)
                page = table[sequence, row // 4]
                for cache, x in zip(caches, (k_values, v_values)):
                    cache[page, row % 4] = x[first + row]
        made = [given(library, kind, x, per) for x in caches]
        paged = fa_attn.flash_attn_with_kvcache(
            as_array(library, q),
            made[0][0],
            made[1][0],
            cache_seqlens=as_array(library, np.array(lens, np.int32)),
            block_table=as_array(library, table),
            k_descale=made[0][1],
            v_descale=made[1][1],
            **options,
        )
        again = fa_attn.flash_attn_with_kvcache(
            as_array(library, q),
            *(as_array(library, x[2]) for x in made),
            cache_seqlens=as_array(library, np.array(lens, np.int32)),
            block_table=as_array(library, table),
        )
        assert np.abs(as_numpy(paged) - as_numpy(again)).max() < 1e-5


@pytest.mark.parametrize("library", libraries())
def test_descales_broadcast_and_each_is_applied(library):
    q, k, v = normal(2, 3, 4, 16), normal(2, 9, 2, 16, seed=1), normal(2, 9, 2, 16, seed=2)
    k8, _, _, options = given(library, "int8", k)
    v8, _, _, _ = given(library, "int8", v)
    q = as_array(library, q)

    def call(**named):
        named = {name: as_array(library, x) if isinstance(x, np.ndarray) else x for name, x in named.items()}
        return as_numpy(fa_attn.flash_attn_func(q, k8, v8, **named, **options))

    two, scale = np.full(1, 0.02, np.float32), 16**-0.5
    base = call(k_descale=two, v_descale=two)
    for shape in ((2,), (1, 1), (2, 1), (1, 2), (2, 2), (2, 9, 2)):
        spread = np.broadcast_to(two.reshape((1,) * len(shape)), shape)
        assert (call(k_descale=spread, v_descale=spread) == base).all(), shape
    # flashinfer#1023: a descale that is accepted and not applied.
    doubled = call(k_descale=two, v_descale=two, softmax_scale=2 * scale)
    assert (call(k_descale=2 * two, v_descale=two) == doubled).all()
    assert (call(k_descale=two, v_descale=2 * two) == 2 * base).all()
    # flashinfer#2595: tiny descales and 0.
    tiny = np.full(1, 1e-23, np.float32)
    assert np.isfinite(call(k_descale=tiny, v_descale=tiny)).all()
    assert (call(k_descale=two, v_descale=0 * two) == 0).all()


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ("none", "head", "sequence_head", "token_head"))
def test_appends_quantise_new_rows_alone(library, kind, form):
    q, k, v = normal(2, 1, 4, 16), normal(2, 3, 2, 16, seed=1), normal(2, 3, 2, 16, seed=2)
    is_per_row = form == "token_head"
    dtype = np.int8 if kind == "int8" else np.uint8
    caches = [np.full((5, 4, 2, 8 if kind == "int4" else 16), 7, dtype) for _ in range(2)]
    table, used = np.array([[3, 1], [0, 4]], np.int32), np.array([2, 4], np.int32)
    shapes = {"none": None, "head": (2,), "sequence_head": (2, 2), "token_head": (5, 4, 2)}
    scales = [None if shapes[form] is None else np.full(shapes[form], 0.03125, np.float32) for _ in range(2)]
    # Of descales in pages a view whose elements do not lie end to end.
    wide = [np.full((5, 4, 2, 2), 0.03125, np.float32) for _ in range(2)]
    if is_per_row:
        scales = [x[..., 0] for x in wide]
    # These share numpy's memory.
    own = [as_array(library, x) for x in caches]
    given_scales = [None if x is None else as_array(library, x) for x in scales]
    if is_per_row:
        given_scales = [as_array(library, x)[..., 0] for x in wide]
    before = [x.copy() for x in caches]
    named = {name: x for name, x in zip(("k_descale", "v_descale"), given_scales) if x is not None}
    out = fa_attn.flash_attn_with_kvcache(
        as_array(library, q),
        *own,
        as_array(library, k),
        as_array(library, v),
        cache_seqlens=as_array(library, used),
        block_table=as_array(library, table),
        kv_cache_dtype=ASKED[kind] or kind,
        causal=True,
        **named,
    )
    assert np.isfinite(as_numpy(out)).all()
    touched = np.zeros((5, 4), bool)
    for i, (new, cache) in enumerate(zip((k, v), caches)):
        if form == "none":
            made, made_scales = fa_attn.quantize_kv(new, kind, descale=np.ones(1, np.float32))
        elif is_per_row:
            made, made_scales = fa_attn.quantize_kv(new, kind, "token_head")
        else:
            made, made_scales = fa_attn.quantize_kv(new, kind, descale=np.full(1, 0.03125, np.float32))
        for sequence in range(2):
            for t in range(3):
                position = used[sequence] + t
                page, row = table[sequence, position // 4], position % 4
                touched[page, row] = True
                assert (cache[page, row] == made[sequence, t]).all()
                if is_per_row:
                    assert (wide[i][page, row, :, 0] == made_scales[sequence, t]).all()
        assert (cache[~touched] == before[i][~touched]).all()
        if is_per_row:
            assert (wide[i][~touched] == 0.03125).all() and (wide[i][..., 1] == 0.03125).all()


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_nothing_before_them(library, kind):
    """TransformerEngine#3248: with a descale for each row, or given ones, no token sees the future's amax."""
    q, k, v = (normal(1, 20, 2, 16, seed=seed) for seed in (0, 1, 2))
    at, out = 13, {}
    for name, factor in (("as it is", 1.0), ("changed", 100.0)):
        k_own, v_own = k.copy(), v.copy()
        k_own[:, at:] *= factor
        v_own[:, at:] *= factor
        for per in ("token_head", "given", "tensor"):
            fixed = {} if per != "given" else {"descale": as_array(library, np.full(1, 0.02, np.float32))}
            made = [
                fa_attn.quantize_kv(as_array(library, x), kind, **(fixed or {"per": per}))
                for x in (k_own, v_own)
            ]
            call = dict(k_descale=made[0][1], v_descale=made[1][1], causal=True, **naming(library, kind))
            found = fa_attn.flash_attn_func(as_array(library, q), made[0][0], made[1][0], **call)
            out[name, per] = as_numpy(found)[:, :at]
    for per in ("token_head", "given"):
        assert (out["as it is", per] == out["changed", per]).all()
    # One descale for all is of all that it is computed from.
    assert (out["as it is", "tensor"] != out["changed", "tensor"]).any()


def test_numpy_types_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k = normal(1, 2, 2, 16), normal(1, 9, 2, 16, seed=1)
    k8, descale = fa_attn.quantize_kv(k)
    want = fa_attn.flash_attn_func(q, k8, k8, k_descale=descale, v_descale=descale, kv_cache_dtype="fp8")
    k8 = k8.view(ml_dtypes.float8_e4m3fn)
    assert (fa_attn.flash_attn_func(q, k8, k8, k_descale=descale, v_descale=descale) == want).all()


@pytest.mark.parametrize("library", libraries())
def test_refusals_say_what_works(library):
    q, k = normal(1, 2, 2, 16), normal(1, 9, 2, 16, seed=1)
    k8, descale, _, asked = given(library, "e4m3", k)
    q, k = as_array(library, q), as_array(library, k)
    bits = as_bytes(k8)
    long, per_row = as_array(library, np.ones((3, 2), np.float32)), np.ones((1, 9, 2), np.float32)
    for error, call, part in (
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(q, bits, bits),
            "give kv_cache_dtype='fp8_e4m3'",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q, bits, bits, kv_cache_dtype="int4"),
            "k has a head dim of 32 and q of 16",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(bits, bits, bits, kv_cache_dtype="int4"),
            "q holds uint8: beside k and v in int4",
        ),
        (fa_attn.InputError, lambda: fa_attn.quantize_kv(k[..., :15], "int4"), "rows of 15 columns"),
        (
            fa_attn.InputError,
            lambda: fa_attn.dequantize_kv(bits, kv_dtype="int8"),
            "and kv_dtype is 'int8': give one of",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(q, bits, bits, kv_cache_dtype="nvfp4"),
            "use 'auto' or one of 'fp8'",
        ),
        (fa_attn.InputError, lambda: fa_attn.flash_attn_func(q, k, k, kv_cache_dtype="fp8"), "holds float32"),
        (fa_attn.InputError, lambda: fa_attn.quantize_kv(k8), "it must be floating point"),
        (fa_attn.InputError, lambda: fa_attn.dequantize_kv(k), "codes holds"),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_with_kvcache(q, k, k, k, k, cache_seqlens=0, k_descale=descale),
            "what joins a cache without codes has no descale, leave it out",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q, k, k, k_descale=as_array(library, per_row)),
            "k_descale has the shape (1, 9, 2): it must be (1,), (2,), (1, 2)",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(q, k, k, qv=q, v_descale=descale),
            "v_descale with qv and v of 16 bits: leave it out",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(q, k8, k8, qv=q, q_descale=descale, **asked),
            "q_descale with qv and q of 16 bits: leave it out",
        ),
        (
            fa_attn.UnsupportedError,
            lambda: fa_attn.flash_attn_func(q, k, k, kv_cache_dtype="bfloat16"),
            "k holds float32",
        ),
        (
            fa_attn.InputError,
            lambda: fa_attn.flash_attn_func(q, bits, bits, kv_cache_dtype="fp8", k_descale=long),
            "k_descale has the shape (3, 2)",
        ),
    ):
        with pytest.raises(error) as found:
            call()
        assert part in str(found.value)


@needs_torch
def test_gradients_are_refused_and_compiled_calls_agree():
    import torch

    q, k = torch.from_numpy(normal(1, 2, 4, 16)).bfloat16(), torch.from_numpy(normal(1, 9, 2, 16, seed=1))
    k8, descale = fa_attn.quantize_kv(k)
    wants = q.clone().requires_grad_()
    with pytest.raises(fa_attn.UnsupportedError, match="k and v in codes: there are no gradients"):
        fa_attn.flash_attn_func(wants, k8, k8).sum().backward()
    with torch.no_grad():
        plain = fa_attn.flash_attn_func(wants, k8, k8, k_descale=descale, v_descale=descale)

    def call(q, k8, descale):
        return fa_attn.flash_attn_func(q, k8, k8, k_descale=descale, v_descale=descale)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k8, descale), plain)
    codes8, descale8 = fa_attn.quantize_kv(k, "int8", "token_head")
    assert torch.equal(compiled(q, codes8, descale8), call(q, codes8, descale8))

    def call_of_int4(q, k, descale):
        named = dict(k_descale=descale, v_descale=descale, kv_cache_dtype="int4")
        return fa_attn.flash_attn_func(q, k, k, **named)

    codes4, descale4 = fa_attn.quantize_kv(k, "int4", "token_head")
    compiled = torch.compile(call_of_int4, fullgraph=True, backend="eager")
    got = compiled(q, codes4, descale4)
    assert got.shape == q.shape and torch.equal(got, call_of_int4(q, codes4, descale4))


@pytest.mark.parametrize("library", libraries())
def test_a_cache_is_named_by_what_it_holds(library):
    q, k = (as_array(library, normal(1, n, 2, 16, seed=n)) for n in (2, 9))
    want = fa_attn.flash_attn_func(q, k, k)
    for name in (None, "auto", "float32", q.dtype):
        assert (fa_attn.flash_attn_func(q, k, k, kv_cache_dtype=name) == want).all()
    codes, descale = fa_attn.quantize_kv(k, "int8")
    want = fa_attn.flash_attn_func(q, codes, codes, k_descale=descale)
    for name in (None, "auto", "int8", codes.dtype):
        got = fa_attn.flash_attn_func(q, codes, codes, k_descale=descale, kv_cache_dtype=name)
        assert (got == want).all()


@pytest.mark.parametrize("library", libraries())
def test_descales_of_numbers_are_factors(library):
    # Engines give descales with every call, whatever a cache holds.
    def near(got, want):
        got = as_numpy(got)
        assert got.shape == want.shape and np.abs(got - want).max() < 2e-5

    q, k, v = normal(3, 4, 6, 16), normal(3, 9, 2, 16, seed=1), normal(3, 9, 2, 16, seed=2)
    starts = [np.arange(0, 3 * n + 1, n, dtype=np.int32) for n in (4, 9)]
    rng = np.random.default_rng(4)
    for shape in ((1,), (2,), (1, 2), (3, 2)):
        scales = [rng.uniform(0.5, 1.5, shape).astype(np.float32) for _ in range(3)]
        of_q, of_k, of_v = (np.broadcast_to(x, (3, 2))[:, None, :, None] for x in scales)
        values = (q * np.repeat(of_q, 3, 2), k * of_k, v * of_v)
        want, want_lse = fa_attn.flash_attn_func(*values, softcap=4.0, return_lse=True)
        named = dict(zip(("q_descale", "k_descale", "v_descale"), (as_array(library, x) for x in scales)))
        named.update(softcap=4.0, return_lse=True)
        arrays = [as_array(library, x) for x in (q, k, v)]
        made = as_array(library, np.empty_like(q))
        used = as_array(library, np.full(3, 9, np.int32))
        packed = [as_array(library, x.reshape(-1, *x.shape[2:])) for x in (q, k, v)]
        for out, lse in (
            fa_attn.flash_attn_func(*arrays, **named),
            fa_attn.flash_attn_func(*arrays, out=made, **named),
            fa_attn.flash_attn_with_kvcache(*arrays, cache_seqlens=used, **named),
            fa_attn.flash_attn_varlen_func(*packed, *(as_array(library, x) for x in starts), 4, 9, **named),
        ):
            near(out.reshape(q.shape), want)
            lse = as_numpy(lse)
            near(lse if lse.ndim == 3 else lse.reshape(6, 3, 4).swapaxes(0, 1), want_lse)
        near(made, want)
    # A q of numbers beside k and v of codes.
    (k8, k_descale, _, asked), (v8, v_descale, *_) = (given(library, "e4m3", x) for x in (k, v))
    named = dict(k_descale=k_descale, v_descale=v_descale, **asked)
    scaled = as_numpy(fa_attn.flash_attn_func(as_array(library, values[0]), k8, v8, **named))
    named.update(q_descale=as_array(library, scales[0]))
    near(fa_attn.flash_attn_func(as_array(library, q), k8, v8, **named), scaled)


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("held", ("codes", "numbers"))
def test_descales_are_finite_and_not_negative(library, held):
    # Of rows without keys an infinite factor would make NaN.
    q, k = as_array(library, normal(2, 1, 2, 16)), normal(2, 5, 2, 16, seed=1)
    k, _, _, asked = given(library, "e4m3", k) if held == "codes" else (as_array(library, k), None, None, {})
    used = as_array(library, np.zeros(2, np.int32))
    for name in ("k_descale", "v_descale"):
        for value in (np.inf, np.nan, -1.0):
            named = {**asked, name: as_array(library, np.array([1.0, value], np.float32))}
            with pytest.raises(fa_attn.InputError, match=f"{name}.*a descale is a finite number of 0 or more"):
                fa_attn.flash_attn_with_kvcache(q, k, k, cache_seqlens=used, **named)


@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize("kind", ("e5m2", "e4m3", "int8"))
def test_queries_in_e5m2_are_the_numbers_of_their_codes(library, kind):
    if library == "numpy" and kind != "e5m2":
        pytest.skip("bytes are of one type")
    q, k = normal(2, 3, 4, 16), normal(2, 9, 2, 16, seed=1)
    one = as_array(library, np.ones(1, "f4"))
    codes, own = fa_attn.quantize_kv(as_array(library, q), "e5m2", descale=one)
    numbers = fa_attn.dequantize_kv(codes, own, kv_dtype="e5m2")
    k8, descale, _, asked = given(library, kind, k)
    if library == "torch":
        import torch

        numbers, asked = numbers.to(torch.bfloat16), {}
    call = lambda q, **named: fa_attn.flash_attn_func(  # noqa: E731
        q, k8, k8, causal=True, k_descale=descale, v_descale=descale, **asked, **named
    )
    assert np.array_equal(as_numpy(call(codes)), as_numpy(call(numbers)))
    factor = as_array(library, np.array([2.0, 0.5], "f4"))
    scaled = [as_numpy(call(x, q_descale=factor)) for x in (codes, numbers)]
    assert np.array_equal(*scaled)

    # Beside rows that join the cache, of which each result is that of its factor.
    new, used = as_array(library, normal(2, 3, 2, 16, seed=2)), as_array(library, np.full(2, 4, np.int32))

    def joined(q, **named):
        cache = k8.copy() if library == "numpy" else k8.clone()
        twin = k8.copy() if library == "numpy" else k8.clone()
        own = numbers.dtype if library == "torch" else np.float32
        rows = new.to(own) if library == "torch" else new
        return as_numpy(
            fa_attn.flash_attn_with_kvcache(
                q, cache, twin, rows, rows, cache_seqlens=used, causal=True, **asked, **named
            )
        )

    assert np.array_equal(joined(codes, q_descale=factor), joined(numbers, q_descale=factor))
    twice = as_array(library, np.full(1, 2.0, "f4"))
    assert np.array_equal(joined(codes, q_descale=twice), joined(2 * numbers))


@needs_torch
def test_transforms_see_codes_as_bytes():
    import torch

    q, k = (torch.from_numpy(normal(3, n, 2, 16, seed=n)).bfloat16() for n in (4, 9))
    k8, descale = fa_attn.quantize_kv(k)

    def each(q, k, **named):
        return fa_attn.flash_attn_func(q[None], k[None], k[None], k_descale=descale, **named)[0]

    want = fa_attn.flash_attn_func(q, k8, k8, k_descale=descale)
    got = torch.vmap(lambda q, k: each(q, k, kv_cache_dtype="fp8"))(q, k8.view(torch.uint8))
    assert torch.equal(got, want)
    with pytest.raises(fa_attn.UnsupportedError, match="torch.vmap of float8_e4m3fn"):
        torch.vmap(each)(q, k8)
    for one in (q, k8):
        with pytest.raises(fa_attn.UnsupportedError, match="forward-mode derivatives"):
            call = lambda q: fa_attn.flash_attn_func(q, k8[:, :4], k8[:, :4]).float()  # noqa: E731
            torch.func.jvp(call, (one[:, :4],), (one[:, :4],))

    def quantised(q, k):
        codes, own = fa_attn.quantize_kv(k, "int8", "sequence_head")
        again = fa_attn.dequantize_kv(codes, own, torch.bfloat16)
        return fa_attn.flash_attn_func(q, codes, codes, k_descale=own, v_descale=own), again

    compiled = torch.compile(quantised, fullgraph=True, backend="eager", dynamic=True)
    for batch in (3, 2):
        own = quantised(q[:batch], k[:batch])
        assert all(map(torch.equal, compiled(q[:batch], k[:batch]), own))
        assert (own[1] - k[:batch]).abs().max() < 0.05


@pytest.mark.parametrize("gap", (0, 2, 64))
def test_new_rows_beside_a_cache_of_codes_are_not_taken_to_share_its_memory(gap):
    # Bytes of k_cache, v_cache, k and v, one behind the other.
    size = 2 * 8 * 2 * 16
    memory = np.zeros(2 * size + gap + 256, np.uint8)
    caches = [memory[at : at + size].view(np.int8).reshape(2, 8, 2, 16) for at in (0, size)]
    at = 2 * size + gap
    k, v = (memory[at + i * 128 :][:128].view(np.float16).reshape(2, 1, 2, 16) for i in range(2))
    k[...], v[...] = normal(2, 1, 2, 16), normal(2, 1, 2, 16, seed=1)
    q, used = normal(2, 1, 4, 16).astype(np.float16), np.zeros(2, np.int32)
    fa_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=used)
    assert caches[0][:, 0].any() and not caches[0][:, 1:].any()
    inside = caches[0].reshape(-1)[100:228].view(np.float16).reshape(2, 1, 2, 16)
    with pytest.raises(fa_attn.InputError, match="k lies in the memory of k_cache"):
        fa_attn.flash_attn_with_kvcache(q, *caches, inside, v, cache_seqlens=used)


@needs_torch
def test_compiled_appends_write_codes_and_descales():
    import torch

    def call(q, k_cache, v_cache, k, v, used, k_descale, v_descale):
        return fa_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=used, k_descale=k_descale, v_descale=v_descale
        )

    q, k = torch.from_numpy(normal(2, 1, 4, 16)), torch.from_numpy(normal(2, 1, 2, 16, seed=1))
    used = torch.tensor([3, 0], dtype=torch.int32)
    results = []
    for run in (call, torch.compile(call, fullgraph=True, backend="eager")):
        caches = [torch.zeros(2, 8, 2, 16, dtype=torch.int8) for _ in range(2)]
        scales = [torch.ones(2, 8, 2) for _ in range(2)]
        results.append((run(q, *caches, k, k, used, *scales), *caches, *scales))
    assert all(torch.equal(one, other) for one, other in zip(*results))
    assert results[0][1][0, 3].abs().max() == 127 and (results[0][3][0, 4:] == 1).all()
