"""Small random models of one family after another, beside transformers' own eager attention: logits with and
without padding, greedy tokens from caches that grow and that are static, losses of training.

pip install torch transformers pytest && python -m pytest tests/test_transformers_models.py
"""

import pytest

from transformers_cases import NAME, SMALL, torch, transformers

DEVICES = [("cpu", torch.float32)] + ([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])
on = pytest.mark.parametrize("device,dtype", DEVICES, ids=[device for device, _ in DEVICES])

TOKENS = dict(vocab_size=128, pad_token_id=0, bos_token_id=1, eos_token_id=None)
DECODER = {**SMALL, **TOKENS}
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
DECODERS = {
    "llama": {},
    "mistral": dict(sliding_window=12),
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    # Scores are capped, layers take turns at a window.
    "gemma2": dict(sliding_window=12, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3_text": dict(sliding_window=12, query_pre_attn_scalar=16),
    "gpt_oss": dict(sliding_window=12, **EXPERTS),
    "phi3": {},
    "olmo3": dict(sliding_window=12),
    "cohere2": dict(sliding_window=12),
}


def pair(kind, options, auto, device, dtype):
    """The same model with eager attention and with this package's."""
    made = []
    for by in ("eager", NAME):
        torch.manual_seed(1)
        model = auto.from_config(transformers.AutoConfig.for_model(kind, **options), attn_implementation=by)
        made.append(model.to(device, dtype).eval())
    return made


def close(eager, ours, dtype, rows=None):
    limit = (2e-5 if dtype == torch.float32 else 4e-2) * max(1.0, eager.abs().max().item())
    apart = (eager - ours).abs()
    assert (apart if rows is None else apart * rows[..., None]).max().item() < limit


def losses_agree(models, dtype, steps=3, **inputs):
    curves = []
    for model in models:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        curves.append([])
        for _ in range(steps):
            loss = model(**inputs).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curves[-1].append(loss.item())
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert all(abs(a - b) < limit for a, b in zip(*curves)), curves
    assert curves[1][-1] < curves[1][0]


@on
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders(kind, device, dtype):
    options = {**DECODER, **DECODERS[kind]}
    eager, ours = pair(kind, options, transformers.AutoModelForCausalLM, device, dtype)
    torch.manual_seed(0)
    ids = torch.randint(2, 128, (2, 33)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        close(eager(ids).logits, ours(ids).logits, dtype)
        close(*(model(ids, attention_mask=mask).logits for model in (eager, ours)), dtype, mask)
    if dtype == torch.float32:
        caches = dict(), dict(cache_implementation="static", disable_compile=True)
        for cache in caches:
            more = dict(attention_mask=mask, max_new_tokens=14, do_sample=False, **cache)
            with torch.no_grad():
                tokens = [model.generate(ids, **more)[:, 33:] for model in (eager, ours)]
            assert torch.equal(*tokens), cache
    losses_agree((eager, ours), dtype, input_ids=ids, labels=ids)


@on
def test_an_encoder(device, dtype):
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    dropouts = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    options = dict(vocab_size=128, max_position_embeddings=64, pad_token_id=0, **sizes, **dropouts)
    eager, ours = pair("bert", options, transformers.AutoModelForMaskedLM, device, dtype)
    torch.manual_seed(0)
    ids = torch.randint(2, 128, (2, 33)).to(device)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    with torch.no_grad():
        close(*(model(ids, attention_mask=mask).logits for model in (eager, ours)), dtype, mask)
    losses_agree((eager, ours), dtype, input_ids=ids, attention_mask=mask, labels=ids)


@on
def test_a_decoder_on_an_encoder_of_sound(device, dtype):
    """Whisper: attention over the sound, of the decoder to it, and from caches of both."""
    side = dict(layers=2, attention_heads=4, ffn_dim=96)
    options = {f"{name}_{size}": value for name in ("encoder", "decoder") for size, value in side.items()}
    options |= dict(d_model=64, num_mel_bins=16, max_source_positions=30, max_target_positions=40)
    options |= dict(**TOKENS, decoder_start_token_id=1, dropout=0.0, suppress_tokens=None)
    options |= dict(begin_suppress_tokens=None)
    eager, ours = pair("whisper", options, transformers.AutoModelForSpeechSeq2Seq, device, dtype)
    torch.manual_seed(0)
    sound = torch.randn(2, 16, 60).to(device, dtype)
    ids = torch.randint(2, 128, (2, 9)).to(device)
    with torch.no_grad():
        close(*(model(sound, decoder_input_ids=ids).logits for model in (eager, ours)), dtype)
        if dtype == torch.float32:
            more = dict(decoder_input_ids=ids, max_new_tokens=12, do_sample=False)
            tokens = [model.generate(sound, **more) for model in (eager, ours)]
            assert torch.equal(*tokens)
    losses_agree((eager, ours), dtype, input_features=sound, labels=ids)
