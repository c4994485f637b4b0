#!/usr/bin/env python3
"""The Python package on a GPU, as its users meet it: FlashAttention's own tests, the package's tests, jax
under jit, the READMEs' lines, the examples. Prints a line for each, and what fails.

    python3 -m pip install --no-deps --target SITE target/wheels/fa_attn-*x86_64.whl
    PYTHONPATH=SITE python3 bench/python_faces.py --peer COPY --out FOLDER

It needs torch with CUDA, pytest and numpy, and leaves out what else is missing (jax, transformers, COPY: a
copy of Dao-AILab/flash-attention, of which tests/, hopper/*.py and flash_attn/bert_padding.py are read).
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON = ROOT / "python"
# Those whose cases run on a GPU where there is one.
TESTS = (
    "test_torch.py test_torch_serving.py test_torch_engines.py test_torch_flash_mla.py test_fp8.py "
    "test_codes.py test_flex.py test_jax.py test_jax_traced.py test_jax_programs.py test_jax_codes.py "
    "test_transformers.py"
).split()

JAX = """
import math
import jax, jax.numpy as jnp
import fa_attn
from fa_attn.jax import dot_product_attention, flash_attn_func

assert jax.devices()[0].platform == "gpu", jax.devices()
ROWS, HEADS, HEADS_KV, COLUMNS = 200, 4, 2, 64
keys = jax.random.split(jax.random.PRNGKey(0), 4)
shapes = [(2, ROWS, HEADS, COLUMNS), (2, ROWS, HEADS_KV, COLUMNS), (2, ROWS, HEADS_KV, COLUMNS)]
q, k, v = (jax.random.normal(key, shape).astype(jnp.bfloat16) for key, shape in zip(keys, shapes))
dout = jax.random.normal(keys[3], q.shape).astype(jnp.bfloat16)

def formula(q, k, v, seen=None):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, HEADS // HEADS_KV, 2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / math.sqrt(COLUMNS)
    seen = jnp.tril(jnp.ones((ROWS, ROWS), bool)) if seen is None else seen
    s = jnp.where(seen, s, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v, precision="highest")

def near(name, got, want, room=0.03):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        off = float(jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32)).max())
        scale = max(1.0, float(jnp.abs(other.astype(jnp.float32)).max()))
        assert off <= room * scale, f"{name}: off by {off}"
    print("ok", name, flush=True)

def ours(q, k, v):
    return flash_attn_func(q, k, v, causal=True)

def loss(f):
    return lambda q, k, v: (f(q, k, v).astype(jnp.float32) * dout.astype(jnp.float32)).sum()

near("outside of jit", fa_attn.flash_attn_func(q, k, v, causal=True), formula(q, k, v)) if TORCH else None
near("jit", jax.jit(ours)(q, k, v), formula(q, k, v))
near("grad under jit", *(jax.jit(jax.grad(loss(f), (0, 1, 2)))(q, k, v) for f in (ours, formula)))
near("vmap", jax.jit(jax.vmap(ours))(*(x[None] for x in (q, k, v)))[0], formula(q, k, v))
twice = jax.lax.scan(lambda c, _: (ours(c, k, v), None), q, None, 2)[0]
near("scan", twice, formula(formula(q, k, v).astype(q.dtype), k, v))
lengths = dict(query_seq_lengths=jnp.int32([150, 90]), key_value_seq_lengths=jnp.int32([200, 70]))
rows = jnp.arange(ROWS)
seen = (rows[:, None] >= rows) & (rows < lengths["key_value_seq_lengths"][:, None, None])
used = (rows < lengths["query_seq_lengths"][:, None])[:, :, None, None]
got = jax.jit(lambda *x: dot_product_attention(*x, is_causal=True, **lengths))(q, k, v)
near("lengths that differ", got, jnp.where(used, formula(q, k, v, seen[:, None]), 0))
bias = jax.random.normal(keys[3], (1, HEADS, ROWS, ROWS), jnp.float32)
got = jax.jit(jax.grad(lambda b: dot_product_attention(q, k, v, bias=b).astype(jnp.float32).sum()))(bias)
assert got.shape == bias.shape and bool(jnp.isfinite(got).all())
print("ok gradient of a bias")
"""

TORCH = """
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
import fa_attn

q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
scale = torch.tensor([0.01], device="cuda")
want = fa_attn.flash_attn_func(q, k, v, causal=True)
codes = fa_attn.flash_attn_func(q, k, v, causal=True, output_scale=scale)
assert codes.dtype is torch.float8_e4m3fn
assert torch.equal(codes.view(torch.uint8), fa_attn.quantize_kv(want, descale=scale)[0].view(torch.uint8))
print("ok results in codes")
starts = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
used = torch.tensor([200, 300], dtype=torch.int32, device="cuda")
sizes = (2, 300, 300, 4, 4, 64, used, torch.bfloat16)
meta = fa_attn.get_scheduler_metadata(*sizes, cu_seqlens_q=starts, causal=True)
given = [q.flatten(0, 1), k, v, starts, None, 300, 300]
options = dict(seqused_k=used, causal=True)
want = fa_attn.flash_attn_varlen_func(*given, **options)
for _ in range(3):
    assert torch.equal(fa_attn.flash_attn_varlen_func(*given, **options, scheduler_metadata=meta), want)
print("ok work that is planned for packed queries")
x = [t.transpose(1, 2) for t in (q[:, :100], k, v)]
got = fa_attn.scaled_dot_product_attention(*x, causal_lower_right(100, 300))
want = F.scaled_dot_product_attention(*x, torch.ones(100, 300, device="cuda", dtype=torch.bool).tril(200))
assert (got - want).abs().max() < 0.03
print("ok torch's causal bias")
"""


def blocks(page):
    """The Python blocks of a page, one program each."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def cells(notebook):
    found = [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(cell["source"]) for cell in found)


def has(name):
    return importlib.util.find_spec(name) is not None


def steps(options):
    """(name, command, seconds at most)."""
    python = [sys.executable]
    yield "doctor", [*python, "-m", "fa_attn", "doctor"], 60
    yield "new arguments", [*python, "-c", TORCH], 120
    if has("jax"):
        yield "jax", [*python, "-c", f"TORCH = {has('torch')}\n{JAX}"], 200
    for page in (ROOT / "README.md", PYTHON / "README.md"):
        for at, text in enumerate(blocks(page)):
            others = [name for name in ("jax", "transformers", "cupy") if f"import {name}" in text]
            if all(map(has, others)):
                yield f"{page.relative_to(ROOT)}, block {at + 1}", [*python, "-c", text], 120
    yield "examples/mla_decode.py", [*python, str(PYTHON / "examples/mla_decode.py")], 120
    yield "examples/start.ipynb", [*python, "-c", cells(PYTHON / "examples/start.ipynb")], 120
    tests = [str(PYTHON / "tests" / name) for name in TESTS]
    only = ["-k", "cuda or gpu or jax"] if options.quick else []
    command = [*python, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *only, *tests]
    yield "tests", command, options.tests
    if options.peer:
        record = ["--record", str(options.out / "flash-attention.json")]
        command = [*python, str(PYTHON / "shim/run.py"), str(options.peer), "--suite", "fa2", "fa3", *record]
        more = ["--cases", "60", "--limit", str(options.limit), "--jobs", str(options.jobs), "--seed", "52"]
        yield "FlashAttention-2's and -3's tests", [*command, *more], options.limit + 120


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=lambda x: pathlib.Path(x).resolve(), help="a copy of flash-attention")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="the folder for outputs")
    parser.add_argument("--limit", type=int, default=100, help="seconds for FlashAttention's tests")
    parser.add_argument("--tests", type=int, default=150, help="seconds at most for the package's tests")
    parser.add_argument("--jobs", type=int, default=8, help="processes for FlashAttention's tests")
    parser.add_argument(
        "--quick", action="store_true", help="of the package's tests those alone that name a GPU"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    failed, lines = 0, []
    for name, command, seconds in steps(options):
        begin = time.time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ)
            text = done.stdout + done.stderr
            state = "ok" if done.returncode == 0 else f"failed ({done.returncode})"
            if "block" in name and "NameError: name" in text:
                state = "left out"  # its names are the reader's own
        except subprocess.TimeoutExpired as error:
            parts = (error.stdout or b"", error.stderr or b"")
            text = "".join(x.decode(errors="replace") if isinstance(x, bytes) else x for x in parts)
            state = f"cut off after {seconds} s"
        failed += state not in ("ok", "left out")
        lines.append(f"{state:20} {time.time() - begin:6.1f} s  {name}")
        print(lines[-1], flush=True)
        if state not in ("ok", "left out"):
            marked = [x for x in text.splitlines() if x.startswith(("FAILED", "ERROR", "E  ", "  failed"))]
            shown = marked[:12] or text.strip().splitlines()[-4:]
            print("\n".join(f"    {x[:220]}" for x in shown), flush=True)
        (options.out / "python_faces.txt").open("a").write(f"== {name}: {state}\n{text[-6000:]}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
