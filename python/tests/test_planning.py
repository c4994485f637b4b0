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


def test_problems_of_8_bits():
    of_cache = fa_attn.problem(
        2, "1x900", "32:8", 128, kv_dtype="fp8_e4m3", k_descale="token_head", v_descale="head"
    )
    assert (of_cache["dtype"], of_cache["kv_dtype"], of_cache["k_descale"]) == ("bf16", "e4m3", "token_head")
    assert "bf16 on e4m3" in repr(of_cache) and "k_descale token_head" in repr(of_cache)
    fp8 = fa_attn.problem(2, 900, 8, 128, dtype="float8_e4m3fn", q_descale="sequence_head")
    assert (fp8["dtype"], fp8["out_dtype"], fp8["q_descale"]) == ("e4m3", "bf16", "sequence_head")
    assert fa_attn.problem(1, 8, kv_dtype=np.int8)["kv_dtype"] == "int8"
    for problem, arch, part in (
        (of_cache, "sm90", "sm90_fwd-bf16-e4m3kv"),
        (of_cache, "sm80", "sm80_fwd-bf16-e4m3kv"),
        (fp8, "sm90", "sm90_fwd_fp8-e4m3"),
    ):
        assert part in str(fa_attn.plan(problem, arch, limit=1))
    for problem, arch, part in (
        (of_cache, "sm100", "no kernel of this family reads K and V in e4m3"),
        (fp8, "sm100", "the forward of sm90 computes in them"),
        (fp8, "sm80", "the forward of sm90 computes in them"),
    ):
        with pytest.raises(fa_attn.UnsupportedError, match=part):
            fa_attn.plan(problem, arch)
    for given, part in (
        (dict(dtype="int8"), "dtype is 'int8': it must be one of"),
        (dict(k_descale="tensor"), "k_descale is 'tensor': it must be one of 'head'"),
        (dict(k_descale="head"), "k_descale"),
        (dict(dtype="e4m3", q_descale="token_head"), "q_descale"),
        (dict(kv_dtype="fp8_e5m2"), "kv_dtype is 'fp8_e5m2'"),
    ):
        with pytest.raises(fa_attn.InputError, match=part):
            fa_attn.problem(1, 8, **given)


def test_kernels_of_codes():
    (q, k) = arrays(5, (2, 3, 4, 16), (2, 9, 2, 16))
    for kind in ("e4m3", "int8"):
        codes, descale = fa_attn.quantize_kv(k, kind)
        problem = fa_attn.problem(
            2, "3x9", "4:2", 16, dtype="f32", kv_dtype=kind, k_descale="head", v_descale="head"
        )
        kernels = fa_attn.Kernels(problem)
        assert list(kernels.report) == ["forward"]
        out, lse = kernels.forward(q, codes, codes, k_descale=descale, v_descale=descale)
        values = fa_attn.dequantize_kv(codes, descale)
        want, want_lse = fa_attn.flash_attn_func(q, values, values, return_lse=True)
        close(out, want)
        close(lse, want_lse)
        with pytest.raises(fa_attn.InputError, match=f"k holds float32: bound is {kind}"):
            kernels.forward(q, k, codes, k_descale=descale, v_descale=descale)
        with pytest.raises(fa_attn.InputError, match="k_descale: missing"):
            kernels.forward(q, codes, codes, v_descale=descale)


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
