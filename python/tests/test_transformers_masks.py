"""What transformers' masks say, read from their functions and computed whatever layers say; padding without
copies of keys; what is refused by name.

pip install torch transformers pytest && python -m pytest tests/test_transformers_masks.py
"""

import types

import pytest

from transformers_cases import NAME, SMALL, torch, transformers

from transformers import masking_utils as made  # noqa: E402

import fa_attn  # noqa: E402
import fa_attn._torch_padding as padding  # noqa: E402
import fa_attn.transformers  # noqa: E402
from fa_attn._transformers_masks import FAR, Mask, band_of  # noqa: E402

ENCODER = {name: SMALL[name] for name in SMALL if name not in ("num_key_value_heads", "head_dim")}
ENCODER |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def own_window(left, right):
    """As Gemma 4's and T5Gemma 2's own mask functions say it."""

    def inner(batch, head, q, k):
        distance = q - k
        return ((distance >= 0) & (distance < left)) | ((distance < 0) & (-distance < right))

    return inner


WINDOW = made.sliding_window_causal_mask_function(5)
BANDS = {
    "none": (None, (FAR, 0)),
    "causal": (made.causal_mask_function, (FAR, 0)),
    "bidirectional": (made.bidirectional_mask_function, (FAR, FAR)),
    "window": (WINDOW, (4, 0)),
    "both": (made.sliding_window_bidirectional_mask_function(5), (5, 5)),
    "overlay": (made.and_masks(made.bidirectional_mask_function, made.sliding_window_overlay(3)), (2, FAR)),
    "two": (made.and_masks(WINDOW, made.sliding_window_overlay(3)), (2, 0)),
    "union": (
        made.or_masks(made.causal_mask_function, made.sliding_window_bidirectional_overlay(2)),
        (FAR, 2),
    ),
    "own": (own_window(4, 3), (3, 2)),
    "own causal": (own_window(4, 0), (3, 0)),
}


@pytest.mark.parametrize("name", BANDS)
def test_mask_functions_are_read(name):
    function, (left, right) = BANDS[name]
    band = band_of(function)
    assert (band.left, band.right) == (left, right)


OTHERS = {
    "image spans": made.or_masks(
        made.causal_mask_function,
        made.blockwise_overlay(torch.tensor([[-1] * 3 + [0] * 6 + [-1] * 4 + [1] * 3] * 2)),
    ),
    "a gap": made.or_masks(made.sliding_window_bidirectional_overlay(1), own_window(3, 0)),
    "packed rows": made.packed_sequence_mask_function(torch.tensor([[0] * 7 + [1] * 9] * 2)),
    "chunks": made.chunked_causal_mask_function(5, torch.tensor([2, 0])),
    "a table": lambda batch, head, q, k: TABLE[q, k],
    "every other key": lambda batch, head, q, k: (q - k) % 2 == 0,
    "rows without keys": lambda batch, head, q, k: q >= 3,
}
TABLE = torch.arange(256).reshape(16, 16) % 3 != 0


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("padded", [False, True])
def test_other_mask_functions_are_programs(name, padded):
    """As sdpa's tensor, which they become in a model's own code, and by position biases beside them."""
    keys = torch.ones(2, 16, dtype=torch.bool)
    keys[1, :4] = not padded
    options = dict(
        batch_size=2, q_length=12, kv_length=16, q_offset=4, attention_mask=keys, mask_function=OTHERS[name]
    )
    if name == "packed rows":
        options.update(q_length=16, q_offset=0, attention_mask=None)
    want = made.sdpa_mask(**options, allow_is_causal_skip=False).expand(2, -1, -1, -1)
    mask = fa_attn.transformers.mask(**options)
    assert torch.equal(mask.tensor(), want)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16) for n in (want.shape[2], 16, 16))
    for bias in (None, torch.randn(1, 2, want.shape[2], 16)):
        for given in (mask, want, torch.where(want, 0.0, float("-inf"))):
            out = fa_attn.transformers.attention(torch.nn.Module(), q, k, v, given, position_bias=bias)[0]
            scores = q @ k.mT / 4 + (0.0 if bias is None else bias)
            expected = scores.masked_fill(~want, float("-inf")).softmax(-1).nan_to_num(0.0) @ v
            torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_masks_that_hide_a_query_s_own_key_are_refused():
    x = torch.randn(1, 2, 16, 16)
    for function in (lambda batch, head, q, k: k < q, made.sliding_window_causal_mask_function(0)):
        mask = fa_attn.transformers.mask(1, 16, 16, mask_function=function)
        with pytest.raises(fa_attn.UnsupportedError, match="hides a query's own key"):
            fa_attn.transformers.attention(torch.nn.Module(), x, x, x, mask)


def chunks(size, padding=(0, 0)):
    return made.chunked_causal_mask_function(size, torch.tensor(padding))


@pytest.mark.parametrize(
    "function",
    [BANDS[name][0] for name in ("causal", "bidirectional", "window", "own causal", "union")] + [chunks(64)],
    ids=["causal", "bidirectional", "window", "own causal", "union", "chunks"],
)
@pytest.mark.parametrize("lengths", [(8, 8, 0, 0), (3, 11, 8, 0), (1, 7, 9, 3), (4, 20, 6, 0)], ids=str)
@pytest.mark.parametrize("pads", [(0, 0), (3, 0), (0, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_masks_are_those_of_sdpa(function, lengths, pads, cached):
    """The tensor that a model's own code gets, and the attention by the mask, beside sdpa's tensor."""
    rows, keys, q_offset, kv_offset = lengths
    given = torch.ones(2, keys + kv_offset, dtype=torch.bool)
    end = q_offset + rows
    given[1, : pads[0]], given[1, end - pads[1] : end] = False, False
    offsets = dict(q_offset=torch.tensor(q_offset) if cached else q_offset, kv_offset=kv_offset)
    options = dict(batch_size=2, q_length=rows, kv_length=keys, attention_mask=given, mask_function=function)
    want = made.sdpa_mask(**options, q_offset=q_offset, kv_offset=kv_offset, allow_is_causal_skip=False)
    band = band_of(function)
    if 0 < band.right < FAR and (cached or keys + kv_offset != end):
        with pytest.raises(fa_attn.UnsupportedError, match="last query|both sides"):
            fa_attn.transformers.mask(**options, **offsets)
        return
    mask = fa_attn.transformers.mask(**options, **offsets)
    assert torch.equal(mask.tensor(), want)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16) for n in (rows, keys, keys))
    module = types.SimpleNamespace(is_causal=True)
    out = fa_attn.transformers.attention(module, q, k, v, mask)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=want).transpose(1, 2)
    is_token = given[:, q_offset : q_offset + rows, None, None]
    assert ((out - expected) * is_token).nan_to_num(9.0).abs().max() < 1e-5


def test_a_mask_in_a_model_s_own_code():
    keys = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    mask = fa_attn.transformers.mask(2, 4, 4, attention_mask=keys)
    want = mask.tensor()
    assert mask.shape == (2, 1, 4, 4) and mask.ndim == mask.dim() == 4 and mask.dtype is torch.bool
    assert mask.to("cpu") is mask and mask[:, :, :, :4] is mask and mask[..., :9] is mask
    for one, other in (
        (~mask, ~want),
        (mask[:, 0], want[:, 0]),
        (mask & want, want),
        (want & mask, want),
        (mask == 0, ~want),
        (torch.all(mask, dim=2), want.all(2)),
        (torch.where(mask, 1.0, 0.0), want.float()),
        (mask.sum(-1), want.sum(-1)),
        (torch.cat([mask, want], -1), torch.cat([want, want], -1)),
    ):
        assert torch.equal(one, other)
    x = torch.randn(2, 2, 4, 16)
    same = [fa_attn.transformers.attention(None, x, x, x, given)[0] for given in (mask, mask & want)]
    torch.testing.assert_close(same[0] * keys[..., None, None], same[1] * keys[..., None, None])
    wider = torch.randn(2, 2, 6, 16)
    with pytest.raises(fa_attn.UnsupportedError, match="Module: a layer of 4 queries and 6 keys"):
        fa_attn.transformers.attention(torch.nn.Module(), x, wider, wider, mask)
    with pytest.raises(fa_attn.UnsupportedError, match="2 sequences for a batch of 4"):
        fa_attn.transformers.attention(torch.nn.Module(), *[x.repeat(2, 1, 1, 1)] * 3, mask)


def pair(config, auto=transformers.AutoModel):
    found = []
    for by in ("eager", NAME):
        torch.manual_seed(0)
        model = auto.from_config(type(config).from_dict(config.to_dict()), attn_implementation=by).eval()
        torch.manual_seed(1)
        for weights in model.parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.15)
        found.append(model)
    return found


def ids(batch=2, count=24):
    return torch.randint(5, 98, (batch, count), generator=torch.Generator().manual_seed(3))


def results(models, **inputs):
    with torch.no_grad():
        return [model(**inputs)[0] for model in models]


def agree(config, **more):
    """Without padding and with it on either side."""
    models, tokens = pair(config), ids()
    for hidden in (slice(0, 0), slice(0, 9), slice(17, 24)):
        keys = torch.ones_like(tokens)
        keys[0, hidden] = 0
        eager, ours = results(models, input_ids=tokens, attention_mask=keys, **more)
        assert ((eager - ours) * keys[..., None]).abs().max() < 2e-5 * eager.abs().max()


def bidirectional(config):
    config.is_causal = False
    return config


LAYERS = {
    "a window to both sides of a decoder": bidirectional(
        transformers.MistralConfig(**SMALL, sliding_window=5)
    ),
    "windows of some layers": bidirectional(transformers.Gemma2Config(**SMALL, sliding_window=5)),
    "no causal mask of layers that are": bidirectional(transformers.LlamaConfig(**SMALL)),
    "windows that layers do not know": transformers.PhimoeConfig(
        **{**SMALL, "num_hidden_layers": 1}, sliding_window=4, num_local_experts=2
    ),
    "chunks that are long enough": transformers.Llama4TextConfig(
        **SMALL, attention_chunk_size=24, intermediate_size_mlp=32, num_local_experts=2
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_mask_decides(name):
    agree(LAYERS[name], use_cache=False)


def test_a_causal_mask_of_layers_that_are_not():
    side = dict(layers=2, attention_heads=4, ffn_dim=96)
    sizes = {f"{name}_{size}": value for name in ("encoder", "decoder") for size, value in side.items()}
    config = transformers.PegasusXConfig(
        vocab_size=99, d_model=64, block_size=8, num_global_tokens=4, dropout=0.0, **sizes
    )
    decoder = ids(2, 7)
    keys = torch.ones_like(decoder)
    keys[1, :2] = 0
    for mask in (None, keys):
        given = dict(input_ids=ids(), decoder_input_ids=decoder, decoder_attention_mask=mask, use_cache=False)
        eager, ours = results(pair(config), **given)
        kept = torch.ones_like(keys) if mask is None else mask
        assert ((eager - ours) * kept[..., None]).abs().max() < 2e-5 * eager.abs().max()


PACKED = {
    "bert": (transformers.BertConfig(**ENCODER), {}, 0),
    "roberta": (transformers.RobertaConfig(**ENCODER), {}, 1),
    "llama": (transformers.LlamaConfig(**SMALL), dict(use_cache=False), 0),
    "llama with a cache": (transformers.LlamaConfig(**SMALL), dict(use_cache=True), 0),
    "mistral": (transformers.MistralConfig(**SMALL, sliding_window=5), dict(use_cache=False), 0),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_told_by_positions(name):
    config, more, start = PACKED[name]
    eager, ours = pair(config)
    tokens, lengths = ids(1), (9, 1, 14)
    positions = torch.cat([torch.arange(n) for n in lengths])[None] + start
    want, begin = [], 0
    for n in lengths:
        part = slice(begin, begin + n)
        want.append(eager(input_ids=tokens[:, part], position_ids=positions[:, part], **more)[0])
        begin += n
    want = torch.cat(want, 1)
    found = ours(input_ids=tokens, position_ids=positions, **more)[0]
    assert (want - found).abs().max() < 2e-5 * want.abs().max()
    grads = []
    for model, out in ((eager, want), (ours, found)):
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        grads.append(torch.cat([x.grad.reshape(-1) for x in model.parameters() if x.grad is not None]))
    assert (grads[0] - grads[1]).abs().max() < 1e-4 * grads[0].abs().max()
    # Two rows are not separated, as by flash_attention_2, unless the model's mask does so.
    if name == "bert":
        two = dict(input_ids=ids(2), position_ids=positions.repeat(2, 1))
        assert torch.allclose(*results((eager, ours), **two), atol=2e-5)


def small(kind, **more):
    config = transformers.AutoConfig.for_model(kind)
    for name, value in {**SMALL, **more}.items():
        if name in vars(config) and not isinstance(getattr(config, name), (list, dict, type(None))):
            setattr(config, name, value)
    return config


def test_layers_that_add_keys_are_refused():
    more = dict(num_key_value_heads=1, n_routed_experts=4, num_local_experts=4, num_experts_per_tok=2)
    more |= dict(moe_intermediate_size=24, q_lora_rank=16, o_lora_rank=16, sliding_window=4)
    config = small("deepseek_v4", **more)
    config.layer_types = list(dict.fromkeys(config.layer_types))[:2]
    _, ours = pair(config)
    with pytest.raises(fa_attn.UnsupportedError, match="DeepseekV4Attention: a layer of 24 queries and"):
        ours(input_ids=ids(), use_cache=False)


TABLES = [("falcon", "FALCON"), ("git", "GIT_SELF"), ("data2vec-vision", "DATA2VEC")]


@pytest.mark.parametrize("kind,table", TABLES)
def test_models_with_tables_of_their_own_are_refused(kind, table):
    with pytest.raises(fa_attn.UnsupportedError, match=f"{table}.*_CLASSES.*'{NAME}'.*='eager'"):
        transformers.AutoModel.from_config(small(kind), attn_implementation=NAME)
    assert transformers.AutoModel.from_config(small(kind), attn_implementation="eager") is not None


# Queries, keys and values as models lay them out: projections have a row's heads side by side, caches a
# head's rows.
def tensors(rows, keys, of_cache, batch=5, heads=8, heads_kv=2, dim=32):
    def make(heads, rows, by_head):
        if by_head:
            return torch.randn(batch, heads, rows, dim)
        return torch.randn(batch, rows, heads, dim).transpose(1, 2)

    return make(heads, rows, False), make(heads_kv, keys, of_cache), make(heads_kv, keys, of_cache)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("form", ["step", "prompt", "training"])
def test_padding_copies_no_keys(form, side):
    """What is allocated and which operations run, with one sequence of five padded and with none."""
    torch.manual_seed(0)
    keys = 256
    rows = 1 if form == "step" else keys
    q, k, v = tensors(rows, keys, of_cache=form != "training")
    given = torch.ones(5, keys, dtype=torch.bool)
    given[1, : 0 if side == "right" else 80] = False
    given[1, keys - (0 if side == "left" else 60) :] = False
    module = types.SimpleNamespace(is_causal=True)
    used, names, found = [], [], []
    for mask in (torch.ones_like(given), given):
        lengths = dict(batch_size=5, q_length=rows, kv_length=keys, q_offset=keys - rows)
        mask = fa_attn.transformers.mask(**lengths, attention_mask=mask)
        x = [t.detach().requires_grad_(form == "training") for t in (q, k, v)]
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            out = fa_attn.transformers.attention(module, *x, mask)[0]
            if form == "training":
                out.sum().backward()
        names.append({event.name for event in profile.function_events})
        used.append(sum(max(event.self_cpu_memory_usage, 0) for event in profile.function_events))
        found.append((mask, out, [t.grad for t in x]))
    copies = {f"aten::{name}" for name in "gather index index_select take scatter masked_select".split()}
    assert not names[1] & copies, names[1] & copies
    assert used[1] < used[0] + k.numel() * k.element_size() // 8, used
    # And what is computed is right.
    mask, out, grads = found[1]
    x = [t.detach().clone().requires_grad_(form == "training") for t in (q, k, v)]
    heads = [x[0], *(t.repeat_interleave(4, 1) for t in x[1:])]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask.tensor()).transpose(1, 2)
    tokens = given[:, keys - rows :, None, None]
    want = torch.where(tokens, want, 0.0)
    assert ((out - want) * tokens).abs().max() < 1e-5
    if form == "training":
        want.sum().backward()
        assert not (out * ~tokens).any()
        assert all((one - other.grad).abs().max() < 1e-4 for one, other in zip(grads, x))


DECODERS = {
    "llama": lambda window: transformers.LlamaConfig(**SMALL),
    "mistral": lambda window: transformers.MistralConfig(**SMALL, sliding_window=window),
    "gemma2": lambda window: transformers.Gemma2Config(**SMALL, sliding_window=window),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "both", "holes", "none"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_gradients_with_padding(kind, side, graph):
    """Losses and gradients of a training step beside eager attention's, in one graph and without."""
    config = DECODERS[kind](30 if side == "holes" else 6)
    models, tokens = pair(config, transformers.AutoModelForCausalLM), ids(3, 20)
    keys = torch.ones_like(tokens)
    hidden = dict(left=[(0, 6)], right=[(13, 20)], both=[(0, 3), (15, 20)], holes=[(5, 9)], none=[])
    for hidden in hidden[side]:
        keys[1, slice(*hidden)] = 0
    # What follows padding is predicted by it.
    labels = tokens.masked_fill((keys == 0) | (keys.roll(1, 1) == 0), -100)
    found = []
    for model in models:
        model.train()
        call = model
        if graph and model is models[1]:
            torch.compiler.reset()
            call = torch.compile(model, fullgraph=True, backend="aot_eager")
        mask = None if side == "none" else keys
        loss = call(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        found.append((loss.item(), torch.cat([x.grad.reshape(-1) for x in model.parameters()])))
    assert abs(found[0][0] - found[1][0]) < 1e-5
    assert (found[0][1] - found[1][1]).abs().max() < 1e-5 * max(1.0, found[0][1].abs().max())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_with_padding(reentrant):
    tokens = ids(3, 20)
    keys = torch.ones_like(tokens)
    keys[1, :6] = 0
    grads = []
    for checkpoints in (False, True):
        model = pair(DECODERS["mistral"](6), transformers.AutoModelForCausalLM)[1].train()
        if checkpoints:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model(input_ids=tokens, attention_mask=keys, labels=tokens, use_cache=False).loss.backward()
        grads.append(torch.cat([x.grad.reshape(-1) for x in model.parameters()]))
    assert (grads[0] - grads[1]).abs().max() < 1e-6


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static", "compiled"])
def test_generation_with_padding(kind, cache):
    models, tokens = pair(DECODERS[kind](6), transformers.AutoModelForCausalLM), ids(5, 12)
    keys = torch.ones_like(tokens)
    keys[1, :5], keys[3, :1] = 0, 0
    options = dict(attention_mask=keys, max_new_tokens=7, min_new_tokens=7, do_sample=False)
    if cache != "dynamic":
        options |= dict(cache_implementation="static", disable_compile=cache == "static")
    found = []
    for model in models:
        more = dict(options)
        if cache == "compiled" and model is models[0]:
            more["disable_compile"] = True
        elif cache == "compiled":
            torch.compiler.reset()
            config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
            config._compile_all_devices = True
            more["compile_config"] = config
        with torch.no_grad():
            found.append(model.generate(tokens, **more))
    assert torch.equal(*found)


def compilations(model, calls):
    torch.compiler.reset()
    made = []

    def count(graph, examples):
        made.append(graph)
        return graph.forward

    graph = torch.compile(model, backend=count, fullgraph=True)
    with torch.no_grad():
        pairs = [(model(**call)[0], graph(**call)[0]) for call in calls]
    torch.compiler.reset()
    assert all((one - other).abs().max() < 1e-4 for one, other in pairs)
    return len(made)


@pytest.mark.parametrize("told", ["positions", "an encoder's positions", "starts", "padding"])
def test_graphs_of_changing_lengths(told):
    """Packed rows and padded batches of other lengths are not compiled anew."""
    calls = []
    for count in range(20, 30):
        lengths = (count // 3, count - count // 3)
        if told == "padding":
            keys = torch.ones(3, count, dtype=torch.int64)
            keys[1, :5] = 0
            calls.append(dict(input_ids=ids(3, count), attention_mask=keys, use_cache=False))
            continue
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        calls.append(dict(input_ids=ids(1, count), position_ids=positions))
        if told != "an encoder's positions":
            calls[-1] |= dict(use_cache=False)
        if told == "starts":
            starts = torch.tensor([0, lengths[0], count], dtype=torch.int32)
            calls[-1] |= dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts)
            calls[-1] |= dict(max_length_q=lengths[1], max_length_k=lengths[1])
    is_encoder = told == "an encoder's positions"
    ours = pair(transformers.BertConfig(**ENCODER) if is_encoder else DECODERS["llama"](None))[1]
    assert compilations(ours, calls) <= 3


def test_holes_are_left_out_by_copies(monkeypatch):
    """And nothing else is."""
    copied = []
    gathered = padding._gathered
    monkeypatch.setattr(padding, "_gathered", lambda *args: copied.append(1) or gathered(*args))
    x = torch.randn(2, 2, 8, 16)
    for hidden, expected in ((slice(0, 3), 0), (slice(6, 8), 0), (slice(3, 5), 1)):
        keys = torch.ones(2, 8, dtype=torch.bool)
        keys[1, hidden] = False
        for mask in (fa_attn.transformers.mask(2, 8, 8, attention_mask=keys), keys):
            copied.clear()
            out = fa_attn.transformers.attention(types.SimpleNamespace(is_causal=True), x, x, x, mask)[0]
            seen = made.sdpa_mask(2, 8, 8, attention_mask=keys, allow_is_causal_skip=False)
            want = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen).transpose(1, 2)
            assert ((out - want) * keys[:, :, None, None]).abs().max() < 1e-5
            assert len(copied) == expected


def test_masks_move_and_stay_what_they_are():
    keys = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    mask = fa_attn.transformers.mask(2, 4, 4, attention_mask=keys)
    moved = mask.to("meta")
    assert isinstance(moved, Mask) and moved.padding.used_k.device.type == moved.device.type == "meta"
    assert (moved.left, moved.right, moved.shape) == (mask.left, mask.right, mask.shape)
    assert fa_attn.transformers.mask(2, 4, 4, attention_mask=mask) is mask
