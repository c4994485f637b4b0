"""Models with biases and masks of their own train and generate as with eager attention: T5, Llama 4's chunks,
gpt-oss's sinks, PaliGemma's and Gemma 3's image spans, and 4-D masks of the caller's.

pip install torch transformers pytest && python -m pytest tests/test_transformers_biases.py
"""

import copy

import pytest

from transformers_cases import NAME, SMALL, torch, transformers

VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=7,
)
IMAGE = 98
_generator = torch.Generator().manual_seed(5)


def ids(*shape):
    return torch.randint(3, 90, shape, generator=_generator)


def padded():
    tokens = ids(2, 20)
    keys = torch.ones_like(tokens)
    keys[1, :6] = 0
    # A row without keys is the mean of V in eager attention, and predicts the first token.
    return dict(input_ids=tokens, attention_mask=keys, labels=tokens.masked_fill(keys.cumsum(1) < 2, -100))


def t5():
    config = transformers.T5Config(
        vocab_size=120,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    keys = torch.ones(2, 20, dtype=torch.int64)
    keys[1, 14:] = 0
    return (
        transformers.T5ForConditionalGeneration,
        config,
        dict(input_ids=ids(2, 20), attention_mask=keys, labels=ids(2, 9)),
    )


def llama4():
    own = dict(attention_chunk_size=6, intermediate_size_mlp=32, num_local_experts=2)
    return transformers.Llama4ForCausalLM, transformers.Llama4TextConfig(**SMALL, **own), padded()


def gpt_oss():
    own = dict(num_local_experts=2, sliding_window=5, num_experts_per_tok=1)
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(**SMALL, **own), padded()


def four_axes():
    tokens = ids(2, 20)
    seen = (torch.rand(2, 1, 20, 20, generator=_generator) > 0.3) | torch.eye(20).bool()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    batch = dict(input_ids=tokens, attention_mask=mask, labels=tokens)
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL), batch


def four_axes_behind_a_cap():
    _, _, batch = four_axes()
    own = dict(attn_logit_softcapping=2.0, query_pre_attn_scalar=16, sliding_window=32)
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**SMALL, **own), batch


def paligemma():
    config = transformers.PaliGemmaConfig(
        vision_config=dict(model_type="siglip_vision_model", projection_dim=64, **VISION),
        text_config=dict(model_type="gemma", **SMALL),
        image_token_index=IMAGE,
        projection_dim=64,
        hidden_size=64,
    )
    return transformers.PaliGemmaForConditionalGeneration, config, with_image(16, begin=0, suffix=7)


def gemma3():
    config = transformers.Gemma3Config(
        text_config=dict(**SMALL, sliding_window=9),
        vision_config=VISION,
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
        boi_token_index=97,
        eoi_token_index=96,
    )
    return transformers.Gemma3ForConditionalGeneration, config, with_image(4, begin=4)


def with_image(count, begin, suffix=None):
    tokens = torch.cat([ids(2, begin), torch.full((2, count), IMAGE), ids(2, 12)], 1)
    kinds = (tokens == IMAGE).long()
    if suffix is not None:
        kinds = (torch.arange(tokens.shape[1]) >= tokens.shape[1] - suffix).long().expand(2, -1)
    pixels = torch.randn(2, 3, 28, 28, generator=_generator)
    mask = torch.ones_like(tokens)
    return dict(
        input_ids=tokens, pixel_values=pixels, attention_mask=mask, token_type_ids=kinds, labels=tokens
    )


@pytest.mark.parametrize(
    "make",
    [t5, llama4, gpt_oss, four_axes, four_axes_behind_a_cap, paligemma, gemma3],
    ids=lambda make: make.__name__,
)
def test_losses_gradients_and_tokens_are_those_of_eager(make):
    kind, config, batch = make()
    torch.manual_seed(0)
    eager = kind(copy.deepcopy(config)).eval()
    ours = kind(copy.deepcopy(config)).eval()
    ours.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation(NAME)
    losses = [model(**batch).loss for model in (eager, ours)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.backward()
    of_eager, of_ours = (dict(model.named_parameters()) for model in (eager, ours))
    for name, one in of_eager.items():
        other = of_ours[name].grad
        assert (one.grad is None) == (other is None), name
        if other is not None:
            assert (one.grad - other).abs().max() <= 1e-4 * one.grad.abs().max() + 1e-6, name
    if make in (t5, llama4, gpt_oss):
        given = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        made = [model.generate(**given, max_new_tokens=8, do_sample=False) for model in (eager, ours)]
        assert torch.equal(*made)
