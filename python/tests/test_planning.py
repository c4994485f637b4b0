"""Problems, plans, bound kernels and tuning, as plain dicts."""

import json
import os
import pickle

import numpy as np
import pytest
import reference
from reference import arrays, close

import fa_attn


def test_problems_are_plain_dicts():
    problem = fa_attn.problem(2, 4096, heads=32, heads_kv=8, head_dim=128, causal=True, window_size=(127, 0))
    assert problem["mask"] == {"left": 127, "right": 0} and problem["heads_kv"] == 8
    json.dumps(problem)
    with pytest.raises(fa_attn.InputError, match="multiple"):
        fa_attn.problem(1, 8, heads=3, heads_kv=2)
    with pytest.raises(fa_attn.InputError, match="seqlen is missing"):
        fa_attn.problem(1)


def test_names_of_other_libraries_and_of_the_program_are_taken():
    want = fa_attn.problem(1, 8, heads=32, heads_kv=8, head_dim=192, head_dim_v=128, dtype="f16")
    for dtype in ("f16", "float16", "half", "fp16", "HALF", np.float16, np.dtype("float16")):
        pairs = dict(heads="32:8", head_dim="192:128", dtype=dtype)
        assert fa_attn.problem(1, 8, **pairs) == fa_attn.problem(1, "8x8", **pairs) == want
    for own, names in (("bf16", ("bf16", "bfloat16")), ("f32", ("float32", "float", np.float32))):
        assert {fa_attn.problem(1, 8, dtype=name)["dtype"] for name in names} == {own}
    assert fa_attn.problem(1, "1x8")["seqlen_k"] == 8
    problem = fa_attn.problem(1, 512, heads=8, head_dim=128)
    for name, arch in (("h100", "sm90"), ("NVIDIA H200", "sm90"), ("A100", "sm80"), ("RTX 4090", "sm89")):
        assert fa_attn.plan(problem, arch=name, limit=1)["arch"] == arch


def test_plans_are_those_of_the_command_line():
    problem = fa_attn.problem(2, 4096, heads=32, heads_kv=8, head_dim=128, causal=True)
    found = fa_attn.plan(problem, mode="both", limit=3)
    assert found["arch"] == "sm90" and found["problem"] == problem
    for name in ("forward", "backward"):
        of_pass = found[name]
        assert of_pass["tried"] >= of_pass["fit"] > 3 and len(of_pass["plans"]) == 3
        seconds = [plan["cost"]["seconds"] for plan in of_pass["plans"]]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert all(limit["count"] > 0 and limit["nearest"] for limit in of_pass["rejected"])
    why = fa_attn.explain(problem, "tile_n=192")["forward"]
    assert why["rejected"] and why["query"] == "tile_n=192"
    decode = fa_attn.problem(1, seqlen_q=1, seqlen_k=8192, heads=32, heads_kv=8, head_dim=128)
    assert fa_attn.plan(decode, limit=1)["forward"]["plans"][0]["cost"]["splits"] > 1
    assert fa_attn.plan(problem, arch="sm80")["forward"]["fit"] > 0
    assert "never_run" in fa_attn.plan(problem, arch="sm100")
    with pytest.raises(fa_attn.InputError, match="sm91"):
        fa_attn.plan(problem, arch="sm91")
    with pytest.raises(fa_attn.InputError, match="field"):
        fa_attn.explain(problem, "tile=192")
    with pytest.raises(fa_attn.UnsupportedError, match="f16 or bf16"):
        fa_attn.plan({**problem, "dtype": "f32"})
    with pytest.raises(fa_attn.InputError, match="mode"):
        fa_attn.plan(problem, mode="forward")


@pytest.mark.parametrize(
    ("options", "fields", "kernel"),
    [
        (dict(kv_dtype="int8"), {"kv_dtype": "int8"}, "sm80_fwd-bf16-int8kv-hd128"),
        (dict(kv_dtype="int4"), {"kv_dtype": "int4"}, "sm80_fwd-bf16-int4kv-hd128"),
        (
            dict(kv_dtype="float8_e4m3fn", descales="token_head", page=16, pages=4096),
            {"kv_dtype": "e4m3", "k_descale": "token_head", "v_descale": "token_head"},
            "sm80_fwd-bf16-e4m3kv-hd128-full-varlen-paged",
        ),
        (
            dict(kv_dtype="e4m3", descales={"k": "head", "v": "none"}),
            {"kv_dtype": "e4m3", "k_descale": "head"},
            "sm80_fwd-bf16-e4m3kv-hd128",
        ),
        (
            dict(dtype="fp8", descales="sequence_head"),
            {"dtype": "e4m3", "out_dtype": "bf16", "q_descale": "sequence_head"},
            "sm90_fwd_fp8-e4m3-hd128",
        ),
        (
            dict(head_dim="576-512", heads="128:1", latent=True, softmax_scale=0.1),
            {"latent": True, "head_dim": 576, "head_dim_v": 512},
            "sm90_wide-bf16-hd576-512",
        ),
    ],
)
def test_eight_bits_and_latents_are_planned(options, fields, kernel):
    asked = {"seqlen": "1x4096", "heads": "32:8", "head_dim": 128, **options}
    problem = fa_attn.problem(8, **asked)
    assert {name: problem.get(name) for name in fields} == fields
    found = fa_attn.plan(problem, limit=1)["forward"]["plans"][0]
    assert found["spec"].name.startswith(kernel), found["spec"].name
    for name in set(fields) & {"kv_dtype", "out_dtype", "k_descale"}:
        assert str(fields[name]) in repr(problem)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (dict(kv_dtype="e3m4"), "kv_dtype is 'e3m4'"),
        (dict(kv_dtype="int8", descales="row"), "'row'"),
        (dict(kv_dtype="int8", descales={"x": "head"}), "'x'"),
        (dict(descales="head"), "k_descale with K and V in bf16"),
        (dict(dtype="e4m3", descales={"q": "token_head"}), "q_descale is token_head"),
        (dict(dtype="e4m3", out_dtype="e4m3"), "out_dtype is 'e4m3'"),
        (dict(dtype="e4m3", kv_dtype="int8"), "kv_dtype is int8 and dtype is e4m3"),
        (dict(latent=True, head_dim="64-32"), "softmax_scale"),
    ],
)
def test_eight_bits_that_are_no_problem_are_named(options, fault):
    with pytest.raises(fa_attn.InputError, match=fault):
        fa_attn.problem(1, 8, **options)


@pytest.mark.parametrize("kv_dtype", ["e4m3", "int8", "int4"])
@pytest.mark.parametrize("form", ["head", "sequence_head", "token_head"])
def test_kernels_of_caches_of_codes(kv_dtype, form):
    problem = fa_attn.problem(
        2, "5x40", heads="4:2", head_dim=32, dtype="f32", kv_dtype=kv_dtype, descales=form, causal=True
    )
    kernels = fa_attn.Kernels(problem)
    assert list(kernels.report) == ["forward"]
    q, k, v = arrays(3, (2, 5, 4, 32), (2, 40, 2, 32), (2, 40, 2, 32))
    (k8, k_descale), (v8, v_descale) = (fa_attn.quantize_kv(x, kv_dtype, per=form) for x in (k, v))
    per_sequence = {"sequence_head": (2, 2)}.get(form, k_descale.shape)
    k_descale, v_descale = (x.reshape(per_sequence) for x in (k_descale, v_descale))
    out, lse = kernels.forward(q, k8, v8, k_descale=k_descale, v_descale=v_descale)
    pairs = ((k8, k_descale), (v8, v_descale))
    k, v = (fa_attn.dequantize_kv(*pair, kv_dtype=kv_dtype) for pair in pairs)
    for at in range(2):
        want, want_lse, _ = reference.attention(q[at], k[at], v[at], causal=True)
        close(out[at], want)
        close(lse[at], want_lse)
    with pytest.raises(fa_attn.InputError, match="^k_descale: missing"):
        kernels.forward(q, k8, v8, v_descale=v_descale)
    is_half = kv_dtype == "int4"
    fault = r"^k has the shape .*: bound is \(2, 40, 2, 16\)" if is_half else "^k holds float32: bound is"
    with pytest.raises(fa_attn.InputError, match=fault):
        kernels.forward(q, k, v8, k_descale=k_descale, v_descale=v_descale)
    for bad in (-1.0, np.inf, np.nan):
        wrong = k_descale.copy()
        wrong.flat[1] = bad
        with pytest.raises(fa_attn.InputError, match=r"k_descale\[1\] = .*finite number of 0 or more"):
            kernels.forward(q, k8, v8, k_descale=wrong, v_descale=v_descale)


def test_kernels_of_eight_bits():
    problem = fa_attn.problem(1, 20, heads="4:2", head_dim=32, dtype="e4m3", out_dtype="f32", descales="head")
    kernels = fa_attn.Kernels(problem)
    x = arrays(5, (1, 20, 4, 32), (1, 20, 2, 32), (1, 20, 2, 32))
    codes = [fa_attn.quantize_kv(own, "e4m3", descale=np.float32([0.01]))[0] for own in x]
    descale = np.float32([0.01, 0.01])
    out, _ = kernels.forward(*codes, q_descale=descale, k_descale=descale, v_descale=descale)
    q, k, v = (fa_attn.dequantize_kv(own, np.float32([0.01])) for own in codes)
    close(out[0], reference.attention(q[0], k[0], v[0])[0])
    with pytest.raises(fa_attn.InputError, match="bound is"):
        kernels.forward(*codes, q_descale=descale[None], k_descale=descale, v_descale=descale)
    with pytest.raises(fa_attn.InputError, match=r"^q_descale\[0\] = -0.01: a descale is a finite number"):
        kernels.forward(*codes, q_descale=-descale, k_descale=descale, v_descale=descale)


def test_kernels_are_bound_once():
    problem = fa_attn.problem(
        1, 40, heads=4, heads_kv=2, head_dim=32, dtype="f32", query_offset=3, causal=True, sinks=True
    )
    kernels = fa_attn.Kernels(problem)
    assert kernels.report["forward"]["backend"] == "cpu" and kernels.report["backward"]["threads"] >= 1
    q, k, v, dout, sinks = arrays(12, (1, 40, 4, 32), (1, 40, 2, 32), (1, 40, 2, 32), (1, 40, 4, 32), (4,))
    out, lse = kernels.forward(q, k, v, sinks=sinks)
    *grads, dsinks = kernels.backward(dout, q, k, v, out, lse, sinks=sinks)
    want, want_lse, _ = reference.attention(q[0], k[0], v[0], causal=True, sinks=sinks, offset=3)
    close(out[0], want)
    close(lse[0], want_lse)
    *wanted, of_sinks = reference.gradients(dout[0], q[0], k[0], v[0], causal=True, sinks=sinks, offset=3)
    for got, grad in zip(grads, wanted):
        close(got[0], grad, factor=8)
    close(dsinks, of_sinks, factor=8)
    # Nothing else is computed than what is bound.
    for fault, arguments, beside in (
        (r"^q has the shape \(1, 20, 4, 32\): bound is", (q[:, :20], k, v), dict(sinks=sinks)),
        (r"^v has the shape \(1, 40, 2, 24\): bound is", (q, k, v[..., :24]), dict(sinks=sinks)),
        ("^q holds float16: bound is f32", [x.astype("f2") for x in (q, k, v)], dict(sinks=sinks)),
        ("^sinks: missing", (q, k, v), dict()),
        ("^seqused_k: given, but", (q, k, v), dict(sinks=sinks, seqused_k=np.array([3], np.int32))),
    ):
        with pytest.raises(fa_attn.InputError, match=fault):
            kernels.forward(*arguments, **beside)
    assert np.array_equal(pickle.loads(pickle.dumps(kernels)).forward(q, k, v, sinks=sinks)[0], out)
    with pytest.raises(fa_attn.InputError, match="device"):
        fa_attn.Kernels(problem, "gpu")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(mode="yes"), "mode is 'yes'"),
        (dict(mode=2), "mode is 2"),
        (dict(candidates=1), "candidates is 1"),
        (dict(candidates=-3), "candidates is -3"),
        (dict(candidates=2.5), "candidates is 2.5"),
        (dict(candidates=1 << 70), "candidates is 118"),
        (dict(budget=0), "budget is 0.0 s"),
        (dict(budget=-1.0), "budget is -1.0 s"),
        (dict(budget=float("nan")), "budget is nan s"),
        (dict(budget=float("inf")), "budget is inf s"),
        (dict(budget=10**400), "budget is 1"),
        (dict(budget="long"), "budget is 'long'"),
        (dict(mode="off", candidates=0), "candidates is 0"),
    ],
)
def test_tuning_refuses_numbers_that_tune_nothing(options, named):
    with pytest.raises(fa_attn.InputError, match="must be") as raised:
        fa_attn.tune(**options)
    assert named in str(raised.value)


def test_tuning_has_nothing_to_measure_without_a_gpu():
    fa_attn.tune("off")
    assert fa_attn.finish_tuning() == []
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a GPU")
    with pytest.raises(fa_attn.DeviceError, match="nothing to tune"):
        fa_attn.tune()
