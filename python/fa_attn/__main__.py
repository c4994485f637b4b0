"""`python -m fa_attn doctor|plan|report`: what works here, and the planner's answers."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any, Dict, List, Optional

from . import _core
from ._nvrtc import find_nvrtc
from .planning import Plan, plan, problem

_MARKS = {"ok": "ok", "missing": "--", "broken": "BAD"}

# Packages whose arrays are computed, and the oldest versions that work.
_LIBRARIES = {"numpy": None, "torch": (2, 4), "jax": (0, 5), "transformers": (5, 0), "cupy": None}


def main(arguments: Optional[List[str]] = None) -> int:
    """The program; its exit status."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fa_attn", description="FlashAttention: what works here, and the planner's answers."
    )
    parser.add_argument("--version", action="version", version=f"fa-attn {_core.version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what works on this machine, and what to do about the rest")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)
    planned = commands.add_parser("plan", help="the kernels that fit a problem, best first")
    _add_problem(planned)
    planned.add_argument("--json", action="store_true", help="print what `fa plan --json` prints")
    planned.set_defaults(run=_plan)
    report = commands.add_parser("report", help="write the plan of a problem as an HTML page")
    report.add_argument("path", metavar="FILE", help="the page, as in plan.html")
    _add_problem(report)
    report.set_defaults(run=_report)
    return parser


def _add_problem(parser: argparse.ArgumentParser) -> None:
    """The flags of `fa plan`."""
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--seqlen", default="4096", metavar="N", help="rows, or queries and keys as in 1x8192")
    add("--heads", default="16", metavar="N", help="heads, or query and K/V heads as in 32:8")
    add("--headdim", default="128", metavar="N", help="head dim, or those of Q and K and of V as in 192:128")
    add("--dtype", default="bf16", help="f16 or bf16")
    add("--causal", action="store_true")
    add("--window", metavar="L,R", help="keys left and right of the diagonal, -1 for all")
    add("--softcap", type=float, default=0.0, metavar="X")
    add("--scale", type=float, metavar="X", help="factor on Q K^T; without it 1/sqrt(headdim)")
    add("--sinks", action="store_true", help="a sink for each head")
    add("--arch", default="sm90", help="sm80 to sm121, or the name of a GPU such as h100")
    add("--mode", default="fwd", help="fwd, bwd or both")
    add("--deterministic", action="store_true", help="gradients with the same bits in every run")
    add("--limit", type=int, default=10, metavar="N", help="the most kernels of a pass")


def _planned(args: argparse.Namespace) -> Plan:
    window: Any = (-1, -1)
    if args.window is not None:
        sides = args.window.split(",")
        try:
            left, right = map(int, sides)
        except ValueError:
            raise _core.InputError(
                f"--window is {args.window!r}: it must be two numbers as in 127,0"
            ) from None
        window = (left, right)
    seqlen = int(args.seqlen) if args.seqlen.isdigit() else args.seqlen
    posed = problem(
        args.batch,
        seqlen,
        args.heads if ":" in args.heads else _whole("--heads", args.heads),
        args.headdim if ":" in args.headdim else _whole("--headdim", args.headdim),
        dtype=args.dtype,
        causal=args.causal,
        window_size=window,
        softcap=args.softcap,
        softmax_scale=args.scale,
        sinks=args.sinks,
    )
    return plan(posed, args.arch, args.mode, args.deterministic, limit=args.limit)


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise _core.InputError(f"{name} is {text!r}: it must be a whole number, or two as in 32:8")
    return int(text)


def _plan(args: argparse.Namespace) -> int:
    found = _planned(args)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(repr(found)[len("Plan(") : -1])
    for name in ("forward", "backward"):
        for at, each in enumerate((found.get(name) or {}).get("plans", ()), 1):
            cost = each["cost"]
            figures = f"{cost['seconds'] * 1e6:10.1f} us {cost['tflops']:7.1f} TFLOP/s"
            print(f"{name:9}{at:4}{figures}  {each['spec'].name}")
    return 0


def _report(args: argparse.Namespace) -> int:
    _planned(args).save(args.path)
    print(f"wrote {args.path}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    find_nvrtc()
    checks: List[Dict[str, Any]] = [_check("python", f"{platform.python_version()}, {platform.platform()}")]
    checks += json.loads(_core.doctor())
    checks += [_library(name, oldest) for name, oldest in _LIBRARIES.items()]
    checks.append(_through_numpy())
    is_broken = any(check["status"] == "broken" for check in checks)
    if args.json:
        print(json.dumps({"version": _core.version(), "checks": checks}, indent=2))
        return int(is_broken)
    print(f"fa-attn {_core.version()}")
    for check in checks:
        print(f"{_MARKS[check['status']]:4}{check['name']:14}{check['found']}")
        if "advice" in check:
            print(f"{'':18}{check['advice']}")
    return int(is_broken)


def _check(name: str, found: str, status: str = "ok", advice: Optional[str] = None) -> Dict[str, Any]:
    check = {"name": name, "status": status, "found": found}
    return check if advice is None else dict(check, advice=advice)


def _library(name: str, oldest: Any) -> Dict[str, Any]:
    """The version of a library; it is not imported, which takes seconds."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _check(name, "not installed", "missing", f"only needed for {name}'s own arrays and models")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if oldest is not None and numbers < oldest:
        need = ".".join(map(str, oldest))
        return _check(name, version, "broken", f"{need} or newer is needed: pip install --upgrade {name}")
    return _check(name, version)


def _through_numpy() -> Dict[str, Any]:
    """A forward through the package's own functions, against the formula in float64."""
    try:
        np = importlib.import_module("numpy")
    except ImportError:
        return _check("forward", "not tried", "missing", "pip install numpy, to try it on numpy's arrays")
    from . import flash_attn_func

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 33, 2, 32)).astype(np.float32) for _ in range(3))
    try:
        out = flash_attn_func(q, k, v, causal=True)
    except (ValueError, RuntimeError) as error:
        return _check("forward", str(error), "broken", "report this with the output of this command")
    scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) / 32**0.5
    scores = np.where(np.tri(33, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
    error = np.abs(out - want).max()
    found = f"numpy's arrays in float32: at most {error:.1e} from the formula"
    if error < 1e-5:
        return _check("forward", found)
    return _check("forward", found, "broken", "report this with the output of this command")


if __name__ == "__main__":
    sys.exit(main())
