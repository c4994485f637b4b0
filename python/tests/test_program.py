"""`python -m fa_attn`, short texts, pages, and names of the release before."""

import inspect
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import fa_attn
from fa_attn import __main__, _core
from fa_attn._options import TENSORS, ExtraTensors, Options

PROBLEM = fa_attn.problem(2, 4096, heads=32, heads_kv=8, head_dim=128, causal=True)


def run(capsys, *arguments):
    status = __main__.main(list(arguments))
    return (status, *capsys.readouterr())


def test_doctor_says_what_works(capsys):
    status, printed, _ = run(capsys, "doctor", "--json")
    report = json.loads(printed)
    assert status == 0 and report["version"] == fa_attn.__version__
    checks = {check["name"]: check for check in report["checks"]}
    assert {
        "python",
        "cpu",
        "attention",
        "driver",
        "nvrtc",
        "cache",
        "numpy",
        "torch",
        "jax",
    } <= checks.keys()
    assert checks["attention"]["status"] == checks["forward"]["status"] == checks["numpy"]["status"] == "ok"
    assert all(check.get("advice") for check in checks.values() if check["status"] != "ok")
    status, printed, _ = run(capsys, "doctor")
    assert status == 0 and re.search(r"^ok  attention +right on a small problem", printed, re.M)


def test_doctor_fails_where_something_is_broken(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FA_NVRTC", str(tmp_path))
    status, printed, _ = run(capsys, "doctor")
    assert status == 1 and re.search(r"^BAD nvrtc", printed, re.M) and "unset FA_NVRTC" in printed
    monkeypatch.delenv("FA_NVRTC")
    monkeypatch.setattr(_core, "doctor", lambda: "[]")
    monkeypatch.setattr(fa_attn, "flash_attn_func", lambda q, k, v, causal: q)
    assert run(capsys, "doctor")[0] == 1


def test_the_cache_s_folder_and_mode_are_said(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("FA_CACHE_DIR", str(folder))
    assert f"{folder} (mode 0700), 0 kernels" in run(capsys, "doctor")[1]


def test_plans_are_printed_and_written(capsys, tmp_path):
    flags = ("--batch", "2", "--heads", "32:8", "--causal", "--limit", "3", "--mode", "both")
    status, printed, _ = run(capsys, "plan", *flags)
    best = fa_attn.plan(PROBLEM, mode="both", limit=3)
    assert status == 0 and printed.count(" us ") == 7
    assert best["forward"]["plans"][0]["spec"].name in printed
    assert json.loads(run(capsys, "plan", "--json", *flags)[1]) == best
    path = tmp_path / "plan.html"
    assert run(capsys, "report", str(path), *flags)[0] == 0
    page = path.read_text("utf-8")
    assert page.startswith("<!doctype html>") and page.count("<h3>") == 2 and "causal" in page
    assert best["backward"]["plans"][0]["spec"].name in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--heads", "x"), "--heads is 'x'"),
        (("plan", "--heads", "3:2"), "multiple"),
        (("plan", "--arch", "sm91"), "sm91"),
        (("plan", "--window", "5"), "--window is '5'"),
        (("plan", "--dtype", "f64"), "dtype is 'f64'"),
        (("plan", "--limit", "-1"), "limit is -1"),
        (("report", "/nonexistent/plan.html"), "/nonexistent/plan.html"),
    ],
)
def test_errors_have_no_traceback(capsys, arguments, said):
    status, printed, error = run(capsys, *arguments)
    assert status == 2 and not printed and error.startswith("error: ") and said in error


def test_the_module_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "fa_attn", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fa-attn {fa_attn.__version__}\n"


def test_texts_are_short():
    plan = fa_attn.plan(PROBLEM, mode="both")
    assert repr(PROBLEM) == "Problem(batch 2, seqlen 4096, heads 32:8, head dim 128, bf16, causal)"
    assert len(repr(plan)) < 600 and "fit; best sm90_fwd-bf16" in repr(plan)
    assert repr(plan["forward"]["plans"][0]["spec"]).startswith("Spec(sm90_fwd-bf16-hd128-causal-")
    kernels = fa_attn.Kernels(PROBLEM)
    assert repr(kernels).startswith("Kernels(batch 2, seqlen 4096") and "threads" in repr(kernels)
    for shown in (PROBLEM, plan, kernels):
        assert shown._repr_html_().startswith("<div class=fa>")
    windowed = fa_attn.problem(
        1, "1x8192", heads=4, window_size=(127, 0), query_offset=2, sinks=True, softcap=30.0
    )
    assert repr(windowed) == (
        "Problem(batch 1, seqlen 1x8192, heads 4, head dim 64, bf16, window 127 left, 0 right at offset 2, "
        "softcap 30.0, sinks)"
    )
    # They stay dicts, whatever is put into them.
    assert repr(fa_attn.Problem(a=1)) == "{'a': 1}" and repr(fa_attn.Plan(a=1)) == "{'a': 1}"
    assert plan["problem"] == PROBLEM and json.loads(json.dumps(plan)) == plan


def test_former_names_warn():
    for call in (
        lambda **named: fa_attn.plan(limit=1, **named),
        lambda **named: fa_attn.explain(query="tile_n=192", **named),
        lambda **named: fa_attn.Kernels(**named).report,
    ):
        with pytest.warns(DeprecationWarning, match="given is now problem"):
            former = call(given=PROBLEM)
        assert former == call(problem=PROBLEM)


def test_signatures_have_every_option():
    assert {"flex_attention", "BlockMask"} <= set(dir(fa_attn)) - set(fa_attn.__all__)
    for name in fa_attn.__all__:
        function = getattr(fa_attn, name)
        if not name.startswith("flash_attn_") or name.endswith(("backward", "combine")):
            continue
        parameters = inspect.signature(function).parameters
        assert set(Options.__annotations__) | {"return_softmax_lse", "return_lse"} <= parameters.keys(), name
        assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values()), name
    bound = inspect.signature(fa_attn.Kernels.forward).parameters
    assert tuple(ExtraTensors.__annotations__) == TENSORS and set(TENSORS) <= bound.keys()
    q = np.zeros((1, 1, 1, 8), np.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        fa_attn.flash_attn_func(q, q, q, casual=True)
