"""Models of transformers by this package and by their own eager attention.

pip install torch transformers pytest && python -m pytest tests/test_transformers.py
"""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

import transformers_models as models  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn.transformers  # noqa: E402

NAME = fa_attn.transformers.register()
DEVICES = [("cpu", torch.float32)] + ([("cuda", torch.bfloat16)] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device,dtype", DEVICES, ids=[device for device, _ in DEVICES])
@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("padding", [0, 7])
def test_the_same_tokens(name, device, dtype, padding):
    eager, ours = (models.generated(name, by, device, dtype, padding=padding) for by in ("eager", NAME))
    assert torch.equal(eager, ours)


@pytest.mark.parametrize("device,dtype", DEVICES, ids=[device for device, _ in DEVICES])
@pytest.mark.parametrize("name", models.MODELS)
def test_the_same_losses(name, device, dtype):
    eager, ours = (models.losses(name, by, device, dtype, steps=5) for by in ("eager", NAME))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert all(abs(a - b) < limit for a, b in zip(eager, ours)), (eager, ours)
    assert ours[-1] < ours[0]


def logits(by, **inputs):
    model = models.model_of("llama", by, "cpu", torch.float32).eval()
    with torch.no_grad():
        return model(**inputs).logits


def test_packed_sequences_do_not_see_each_other():
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (1, 30))
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    eager, ours = (
        logits(by, input_ids=tokens, position_ids=positions, use_cache=False) for by in ("eager", NAME)
    )
    assert (eager - ours).abs().max() < 1e-5
    apart = logits(NAME, input_ids=tokens[:, 12:])
    assert (ours[:, 12:] - apart).abs().max() < 1e-5


def test_padding_at_either_end():
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (2, 20))
    for hidden in (slice(0, 5), slice(15, 20)):
        keys = torch.ones_like(tokens)
        keys[1, hidden] = 0
        eager, ours = (logits(by, input_ids=tokens, attention_mask=keys) for by in ("eager", NAME))
        assert ((eager - ours).abs() * keys[..., None]).max() < 1e-5


def test_a_static_cache():
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (2, 12))
    found = []
    for by in ("eager", NAME):
        model = models.model_of("llama", by, "cpu", torch.float32).eval()
        with torch.no_grad():
            found.append(
                model.generate(tokens, max_new_tokens=6, do_sample=False, cache_implementation="static")
            )
    assert torch.equal(*found)


def test_a_quantized_cache():
    """A cache that keeps codes gives attention their numbers, here of int4."""
    from transformers.cache_utils import Cache, QuantizedLayer

    class Layer(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return fa_attn.quantize_kv(tensor, "int4", "token_head")

        def _dequantize(self, qtensor):
            return fa_attn.dequantize_kv(*qtensor, kv_dtype="int4")

    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (2, 12))
    found = []
    for by in ("eager", NAME):
        model = models.model_of("llama", by, "cpu", torch.float32).eval()
        layers = [Layer(residual_length=4) for _ in range(model.config.num_hidden_layers)]
        options = dict(max_new_tokens=9, do_sample=False, past_key_values=Cache(layers=layers))
        with torch.no_grad():
            found.append(model.generate(tokens, **options))
    assert torch.equal(*found)


def in_parts(model, tokens, keys, sizes, room=None):
    """Logits of a text that comes in parts of these sizes, by a cache that grows, or has room for so many."""
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=room) if room else None
    cache = cache or transformers.DynamicCache(config=config)
    found, begin = [], 0
    for size in sizes:
        part, seen = tokens[:, begin : begin + size], keys[:, : begin + size]
        found.append(model(input_ids=part, attention_mask=seen, past_key_values=cache).logits)
        begin += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("room", [None, 20, 32])
@pytest.mark.parametrize("sizes", [(19, 1), (7, 5, 1, 6, 1)], ids=str)
def test_padding_in_any_place_of_a_cache(room, sizes):
    """Rows behind padding that a cache holds, and rows that are padding themselves."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (4, 20))
    keys = torch.ones_like(tokens)
    keys[1, 14:], keys[2, :6], keys[3, 5:9] = 0, 0, 0
    found = []
    for by in ("eager", NAME):
        model = models.model_of("llama", by, "cpu", torch.float32).eval()
        with torch.no_grad():
            found.append(in_parts(model, tokens, keys, sizes, room))
    eager, ours = found
    assert ((eager - ours).abs() * keys[..., None]).max() < 1e-5


@pytest.mark.parametrize("name", ["qwen", "gpt-oss"])
def test_padding_in_the_windows_of_a_static_cache(name):
    """Windows begin behind the first key there, and masks are made twice: by generate and by the model."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (2, 33))
    keys = torch.ones_like(tokens)
    keys[1, :25] = 0
    options = dict(attention_mask=keys, max_new_tokens=8, do_sample=False, cache_implementation="static")
    for parts in (None, 13):
        found = []
        for by in ("eager", NAME):
            model = models.model_of(name, by, "cpu", torch.float32).eval()
            with torch.no_grad():
                found.append(model.generate(tokens, prefill_chunk_size=parts, **options))
        assert torch.equal(*found)


@pytest.mark.parametrize("name", ["qwen", "gpt-oss"])
def test_padding_between_tokens_and_windows(name):
    """A window counts the padding in it, in a row that is longer than the window, too."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (2, 40))
    keys = torch.ones_like(tokens)
    keys[1, 5:9] = 0
    # What follows padding is predicted by it.
    labels = tokens.masked_fill((keys == 0) | (keys.roll(1, 1) == 0), -100)
    for count in (24, 40):
        found = []
        for by in ("eager", NAME):
            model = models.model_of(name, by, "cpu", torch.float32).eval()
            given = dict(input_ids=tokens, attention_mask=keys, labels=labels)
            out = model(**{name: x[:, :count] for name, x in given.items()})
            out.loss.backward()
            grads = torch.cat([x.grad.reshape(-1) for x in model.parameters() if x.grad is not None])
            found.append((out.logits * keys[:, :count, None], grads))
        (eager, wanted), (ours, grads) = found
        assert (eager - ours).abs().max() < 1e-5
        assert (wanted - grads).abs().max() < 1e-5 * max(1.0, wanted.abs().max())


@pytest.mark.parametrize("name", ["qwen", "gpt-oss"])
def test_assisted_generation_with_windows(name):
    """Candidates that are not taken stay in the cache, hidden by the mask between the tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (1, 30))
    found = []
    for by in ("eager", NAME):
        model = models.model_of(name, by, "cpu", torch.float32).eval()
        helper = models.model_of(name, by, "cpu", torch.float32, seed=1).eval()
        options = dict(attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
        found.append(model.generate(tokens, assistant_model=helper, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_one_graph_for_models(name):
    """Prompts and steps on a cache, with padding and without: no part of the model is left out of the graph."""
    torch.manual_seed(0)
    tokens = torch.randint(2, 256, (3, 20))
    keys = torch.ones_like(tokens)
    keys[1, :6] = 0
    eager = models.model_of(name, "eager", "cpu", torch.float32).eval()
    ours = models.model_of(name, NAME, "cpu", torch.float32).eval()
    torch.compiler.reset()
    graph = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        for mask in (None, keys):
            one, other = (model(input_ids=tokens, attention_mask=mask).logits for model in (eager, graph))
            assert ((one - other).abs() * keys[..., None]).max() < 1e-5
        found = [in_parts(model, tokens, keys, (19, 1), 32) for model in (eager, graph)]
        assert ((found[0] - found[1]).abs() * keys[..., None]).max() < 1e-5
    # Rows that may be packed are none that end a graph.
    torch.compiler.reset()
    whole = torch.compile(ours.train(), fullgraph=True, backend="aot_eager")
    losses = [model(input_ids=tokens, labels=tokens, use_cache=False).loss for model in (eager.train(), whole)]
    assert (losses[0] - losses[1]).abs() < 1e-5
    torch.compiler.reset()


def test_more_rows_than_keys_and_masks_of_three_axes_raise():
    x, y = torch.randn(2, 2, 8, 16), torch.randn(2, 2, 5, 16)
    module = torch.nn.Module()
    keys = torch.ones(2, 5, dtype=torch.bool)
    keys[1, 0] = False
    with pytest.raises(fa_attn.UnsupportedError, match="8 queries on 5 keys"):
        fa_attn.transformers.attention(module, x, y, y, keys, is_causal=True)
    with pytest.raises(fa_attn.UnsupportedError, match=r"\(2, 8, 8\).*attn_implementation='sdpa'"):
        mask = torch.ones(2, 8, 8, dtype=torch.bool)
        fa_attn.transformers.attention(module, x, x, x, mask, is_causal=True)
    # One key that is padding is not all keys that are none.
    keys = torch.zeros(1, 1, dtype=torch.bool)
    one = torch.randn(1, 2, 1, 16)
    assert not fa_attn.transformers.attention(module, one, one, one, keys, is_causal=True)[0].any()


def both_ways(model, **inputs):
    """First results by eager attention and by this package."""
    found = []
    for by in ("eager", NAME):
        model.set_attn_implementation(by)
        with torch.no_grad():
            found.append(model(**inputs)[0])
    return found


SMALL = dict(vocab_size=99, attention_dropout=0.0)


@pytest.mark.parametrize("rows", [5, 11, 14])
def test_a_decoder_sees_all_of_the_encoder(rows):
    """More and fewer queries than keys, and as many; padding of the encoder is none of the decoder."""
    torch.manual_seed(0)
    side = dict(layers=2, attention_heads=4, ffn_dim=96)
    sizes = {f"{name}_{size}": value for name in ("encoder", "decoder") for size, value in side.items()}
    config = transformers.BartConfig(d_model=64, **sizes, **SMALL)
    model = transformers.BartForConditionalGeneration(config).eval()
    tokens = torch.randint(3, 99, (3, 11))
    mask = torch.ones_like(tokens)
    mask[1, :4], mask[2, 3:] = 0, 0
    decoder = torch.randint(3, 99, (3, rows))
    for keys in (None, mask):
        eager, ours = both_ways(model, input_ids=tokens, attention_mask=keys, decoder_input_ids=decoder)
        assert (eager - ours).abs().max() < 1e-5


def test_windows_to_both_sides():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    config = transformers.ModernBertConfig(**sizes, **SMALL, local_attention=4, pad_token_id=0)
    model = transformers.ModernBertModel(config).eval()
    tokens = torch.randint(3, 99, (2, 15))
    for hidden in (slice(0, 0), slice(0, 4), slice(12, 15)):
        keys = torch.ones_like(tokens)
        keys[1, hidden] = 0
        eager, ours = both_ways(model, input_ids=tokens, attention_mask=keys)
        assert ((eager - ours).abs() * keys[..., None]).max() < 1e-5


def test_dropout_is_that_of_torchs_generator():
    q, k, v = (torch.randn(2, 2, 8, 16) for _ in range(3))
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[1, 5:] = 0
    for mask in (None, padding):
        made = []
        for p in (0.5, 0.5, 0.0):
            torch.manual_seed(3)
            made.append(fa_attn.transformers.attention(None, q, k, v, mask, dropout=p, is_causal=False)[0])
        assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        torch.manual_seed(3)
        seen = None if mask is None else mask[:, None, None].bool()
        assert torch.equal(made[0], fa_attn.flash_attn_func(*turned, 0.5, mask=seen))


def test_biases_of_other_shapes_raise():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(fa_attn.InputError, match="16 along keys where the call has 8"):
        fa_attn.transformers.attention(None, x, x, x, None, position_bias=x)


@pytest.mark.parametrize("kind", ["bloom", "roformer"])
def test_models_that_compute_attention_themselves_are_refused(kind):
    """They would take the mask for one of scores, and sequences would see what is behind them."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        n_head=4,
        n_layer=1,
    )
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME)
    tokens = torch.randint(3, 64, (1, 9))
    with pytest.raises(fa_attn.UnsupportedError, match="its own code.*attn_implementation='eager'"):
        model(input_ids=tokens, attention_mask=(torch.arange(9) > 2).long()[None])


def test_models_that_support_no_other_attention_are_refused():
    """Layers of their decoders do not say that they are causal: queries would see the keys behind them."""
    sizes = dict(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32, vocab_size=64)
    config = transformers.BigBirdPegasusConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(fa_attn.UnsupportedError, match="no attention but its own.*attn_implementation='eager'"):
        model(input_ids=torch.randint(3, 64, (1, 9)))


def test_windows_that_layers_have_in_part():
    """Qwen2-MoE makes masks of both forms, which its layers choose from without naming a window."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, vocab_size=64)
    sizes |= dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
    tokens = torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for window in ({}, dict(use_sliding_window=True, sliding_window=4)):
        config = transformers.Qwen2MoeConfig(**sizes, **window)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
        eager, ours = both_ways(model, input_ids=tokens, attention_mask=mask)
        assert ((eager - ours).abs() * mask[..., None]).max() < 1e-5


def test_a_model_without_attention_of_its_own_is_taken():
    """Its text model has it."""
    config = transformers.AutoConfig.for_model("paligemma")
    fa_attn.transformers.check_model(config)
    fa_attn.transformers.check_model(config.text_config)
