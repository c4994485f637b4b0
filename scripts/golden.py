#!/usr/bin/env python3
"""Make the golden vectors of crates/fa-cpu/tests/golden with torch in float64.

    python3 -m venv venv
    venv/bin/pip install torch numpy
    venv/bin/python scripts/golden.py

Inputs (q, k, v, dout) are random, rounded to the case's dtype and stored in it; results (out, lse, dq, dk, dv) are
computed from those rounded inputs in float64, the gradients by torch's autograd, and stored as float64. Shapes:

    q, dq      [batch, seqlen_q, heads_q,  head_dim]
    k, dk      [batch, seqlen_k, heads_kv, head_dim]
    v, dv      [batch, seqlen_k, heads_kv, head_dim_v]
    out, dout  [batch, seqlen_q, heads_q,  head_dim_v]
    lse        [batch, heads_q, seqlen_q], natural logarithm

In this order: S = scale * Q K^T; S = softcap * tanh(S / softcap); mask; softmax; times V. Query i sees key j when

    i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q + window_right

where a window of "none" is unbounded and causal makes window_right 0. A query that sees no key has out 0 and lse -inf,
and gives no gradient. Query head h uses key head h / (heads_q / heads_kv).
"""

import argparse
import math
import sys
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch

import safetensors_file

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SIZE_LIMIT = 2_000_000


@dataclass(frozen=True)
class Case:
    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str = "f32"
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    head_dim_v: int | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    scale: float | None = None
    softcap: float | None = None
    # q is multiplied by this: scores far from 0.
    q_factor: float = 1.0

    def metadata(self):
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["head_dim_v"] = self.head_dim_v or self.head_dim
        del values["name"], values["q_factor"]

        def text(value):
            if value is None:
                return "none"
            return str(value).lower() if isinstance(value, bool) else repr(value).strip("'")

        return {key: text(value) for key, value in values.items()} | {
            "case": self.name,
            "layout": "bshd",
            "made_by": "scripts/golden.py",
        }


CASES = [
    Case("full_f32", 17, 17, 16, batch=2),
    Case("full_f16", 31, 64, 32, "f16", heads_q=1, heads_kv=1),
    Case("batch9_f32", 3, 3, 8, batch=9),
    Case("one_by_one_f32", 1, 1, 8, heads_q=1, heads_kv=1),
    Case("one_by_one_causal_bf16", 1, 1, 64, "bf16", causal=True),
    Case("decode_causal_bf16", 1, 77, 32, "bf16", heads_q=4, heads_kv=1, causal=True),
    Case("causal_f32", 33, 33, 16, causal=True),
    Case("causal_f16", 40, 40, 40, "f16", heads_q=1, heads_kv=1, causal=True),
    Case("causal_bf16", 34, 34, 64, "bf16", heads_q=1, heads_kv=1, causal=True),
    Case("gqa_6_3_f32", 16, 21, 16, heads_q=6, heads_kv=3),
    Case("gqa_6_3_causal_f16", 24, 24, 16, "f16", heads_q=6, heads_kv=3, causal=True),
    Case("gqa_8_1_causal_bf16", 19, 35, 16, "bf16", heads_q=8, heads_kv=1, causal=True),
    Case("window_left_f32", 37, 41, 16, window_left=6),
    Case("window_right_f32", 41, 37, 16, window_right=4),
    Case("window_both_f32", 30, 30, 16, window_left=7, window_right=3),
    Case("window_zero_f32", 12, 20, 16, window_left=0, window_right=0),
    Case("causal_window_f32", 36, 36, 16, causal=True, window_left=9),
    Case("causal_window_bf16", 30, 61, 16, "bf16", heads_q=4, heads_kv=2, causal=True, window_left=16),
    Case("hd192_hdv128_causal_bf16", 9, 16, 192, "bf16", heads_kv=1, head_dim_v=128, causal=True),
    Case("hd192_hdv128_f16", 12, 9, 192, "f16", heads_q=1, heads_kv=1, head_dim_v=128),
    Case("hd64_hdv128_f32", 10, 15, 64, heads_q=1, heads_kv=1, head_dim_v=128),
    Case("hd13_hdv7_causal_f32", 22, 27, 13, head_dim_v=7, causal=True),
    Case("ragged_113_203_causal_f32", 113, 203, 16, heads_q=1, heads_kv=1, causal=True),
    Case("ragged_113_203_bf16", 113, 203, 16, "bf16", heads_q=1, heads_kv=1),
    Case("masked_rows_causal_f32", 23, 9, 16, causal=True),
    Case("masked_rows_causal_bf16", 70, 5, 16, "bf16", heads_kv=1, causal=True),
    Case("masked_rows_window_f32", 40, 12, 16, window_left=3, window_right=4),
    Case("masked_rows_causal_window_f16", 36, 20, 16, "f16", causal=True, window_left=5),
    Case("softcap_f32", 25, 33, 16, softcap=2.5, scale=1.0),
    Case("softcap_causal_bf16", 34, 34, 32, "bf16", heads_kv=1, causal=True, softcap=30.0, scale=1.5),
    Case("scale_f32", 18, 18, 24, scale=0.0625),
    Case("large_scores_f32", 29, 31, 16, q_factor=40.0),
    Case("large_scores_causal_f16", 32, 32, 32, "f16", causal=True, q_factor=60.0),
]


def visible(case):
    """[seqlen_q, seqlen_k], true where the query sees the key."""
    diagonal = torch.arange(case.seqlen_q)[:, None] + case.seqlen_k - case.seqlen_q
    key = torch.arange(case.seqlen_k)[None, :]
    seen = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    if case.causal:
        seen &= key <= diagonal
    if case.window_right is not None:
        seen &= key <= diagonal + case.window_right
    if case.window_left is not None:
        seen &= key >= diagonal - case.window_left
    return seen


def scores(case, q, k):
    """Scaled and soft-capped scores [batch, heads_q, seqlen_q, seqlen_k] before the mask."""
    group = case.heads_q // case.heads_kv
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    s = scale * torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, dim=2))
    return s if case.softcap is None else case.softcap * torch.tanh(s / case.softcap)


def attention(case, q, k, v):
    """(out, lse), differentiable, with no NaN anywhere for rows that see nothing."""
    group = case.heads_q // case.heads_kv
    seen = visible(case)
    any_key = seen.any(dim=-1, keepdim=True)
    s = scores(case, q, k).masked_fill(~seen, -math.inf)
    # An empty row would subtract -inf from -inf; 0 in its place leaves its weights exp(-inf) = 0.
    row_max = torch.where(any_key, s.detach().amax(dim=-1, keepdim=True), 0.0)
    weights = torch.exp(s - row_max)
    row_sum = torch.where(any_key, weights.sum(dim=-1, keepdim=True), 1.0)
    out = torch.einsum("bhij,bjhd->bihd", weights / row_sum, v.repeat_interleave(group, dim=2))
    lse = torch.where(any_key, row_max + torch.log(row_sum), -math.inf).squeeze(-1)
    return out, lse


def check_against_torch(case, q, k, v, out, lse):
    """Compare with torch's own softmax, logsumexp and attention on the rows that see a key."""
    group = case.heads_q // case.heads_kv
    seen = visible(case)
    rows = seen.any(dim=-1)
    s = scores(case, q, k).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(lse, torch.logsumexp(s, dim=-1), rtol=1e-12, atol=1e-12)
    assert torch.all(lse[..., ~rows] == -math.inf) and torch.all(out[:, ~rows] == 0)
    if case.softcap is None:
        heads_first = [
            q.transpose(1, 2),
            k.repeat_interleave(group, dim=2).transpose(1, 2),
            v.repeat_interleave(group, dim=2).transpose(1, 2),
        ]
        theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=case.scale)
    else:
        theirs = torch.softmax(s, dim=-1) @ v.repeat_interleave(group, dim=2).transpose(1, 2)
    torch.testing.assert_close(out[:, rows], theirs.transpose(1, 2)[:, rows], rtol=1e-11, atol=1e-11)


def make(case):
    """All tensors of one case."""
    # A seed of its own: adding a case leaves the others as they are.
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    dtype = DTYPES[case.dtype]
    head_dim_v = case.head_dim_v or case.head_dim

    def draw(*shape, factor=1.0):
        return (factor * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    inputs = {
        "q": draw(case.batch, case.seqlen_q, case.heads_q, case.head_dim, factor=case.q_factor),
        "k": draw(case.batch, case.seqlen_k, case.heads_kv, case.head_dim),
        "v": draw(case.batch, case.seqlen_k, case.heads_kv, head_dim_v),
        "dout": draw(case.batch, case.seqlen_q, case.heads_q, head_dim_v),
    }
    q, k, v = (inputs[name].double().requires_grad_() for name in ("q", "k", "v"))
    out, lse = attention(case, q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs["dout"].double())
    results = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    results = {name: tensor.detach() for name, tensor in results.items()}
    for name, tensor in results.items():
        if tensor.isnan().any() or (name != "lse" and not tensor.isfinite().all()):
            sys.exit(f"{case.name}: {name} is not finite")
    with torch.no_grad():
        check_against_torch(case, q, k, v, results["out"], results["lse"])
    return inputs | results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default_folder = Path(__file__).resolve().parent.parent / "crates/fa-cpu/tests/golden"
    parser.add_argument("-o", "--output", type=Path, default=default_folder, help="folder for the files")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    # One thread, so that sums are taken in one order.
    torch.set_num_threads(1)
    total = 0
    for case in CASES:
        size = safetensors_file.write(folder / f"{case.name}.safetensors", make(case), case.metadata())
        total += size
        print(f"{case.name}: {size} bytes")
    print(f"{len(CASES)} files, {total} bytes")
    if total > SIZE_LIMIT:
        sys.exit(f"the files have {total} bytes together, more than {SIZE_LIMIT}")


if __name__ == "__main__":
    main()
