#!/usr/bin/env python3
"""Small random Llama, Qwen and gpt-oss models: the tokens that they generate and the losses of their
training, by this package and by transformers' own eager attention.

    pip install target/wheels/fa_attn-*.whl transformers && python examples/transformers_models.py [cuda]
"""

import sys

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import fa_attn.transformers

COMMON = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
WINDOWED = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen": (
        Qwen3ForCausalLM,
        Qwen3Config,
        dict(use_sliding_window=True, sliding_window=24, layer_types=WINDOWED),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=24, layer_types=WINDOWED),
    ),
}


def model_of(name, implementation, device, dtype, seed=0):
    """A model with random weights from a seed."""
    model, config, options = MODELS[name]
    torch.manual_seed(seed)
    made = model(config(**COMMON, **options, attn_implementation=implementation))
    return made.to(device, dtype)


def text_of(device):
    """Rows that repeat themselves."""
    torch.manual_seed(2)
    return torch.randint(2, 256, (4, 16)).repeat(1, 6).to(device)


def generated(name, implementation, device, dtype, prompt=40, new=16, padding=0, steps=25):
    """Greedy tokens of a model that eager attention has trained for some steps, so that it is sure of its
    choice: after prompts of its text, the first of which begins with `padding` padding tokens."""
    trained = model_of(name, "eager", device, dtype).train()
    train(trained, text_of(device), steps, lr=4e-3)
    model = model_of(name, implementation, device, dtype).eval()
    model.load_state_dict(trained.state_dict())
    tokens = text_of(device)[:2, :prompt].clone()
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    tokens[0, :padding] = 0
    with torch.no_grad():
        return model.generate(tokens, attention_mask=mask, max_new_tokens=new, do_sample=False)[:, prompt:]


def losses(name, implementation, device, dtype, steps=8):
    """Losses of the first steps of training on a text that repeats itself."""
    model = model_of(name, implementation, device, dtype).train()
    return train(model, text_of(device), steps, lr=1e-3)


def train(model, text, steps, lr):
    """Losses of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    found = []
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    # On the CPU in f32; on a GPU, where kernels compute in 16 bits, in bf16.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = fa_attn.transformers.register()
    for model in MODELS:
        tokens = [generated(model, by, device, dtype) for by in ("eager", name)]
        same = (tokens[0] == tokens[1]).float().mean().item()
        curves = [losses(model, by, device, dtype) for by in ("eager", name)]
        apart = max(abs(a - b) for a, b in zip(*curves))
        count = tokens[0].numel()
        print(
            f"{model:8} {device} {str(dtype)[6:]}: {100 * same:.0f} % of {count} tokens the same; loss "
            f"{curves[1][0]:.4f} to {curves[1][-1]:.4f}, at most {apart:.1e} from eager's"
        )


if __name__ == "__main__":
    main()
