"""Small random models of transformers' model types, and inputs that fit them, for sweep_transformers.py: what
makes a configuration small by the names of its fields, and what single model types need beside that."""

import copy
import dataclasses
import importlib
import inspect
import re

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEXT, TARGET, LEFT, RIGHT = 24, 11, 5, 7
STD = 0.15
VOCABULARY = 99

# Heads from the most natural one on.
HEADS = "SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_TEXT_TO_TEXT MULTIMODAL_LM MASKED_LM CAUSAL_LM CTC"
MAPPINGS = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS.split()] + ["MODEL_MAPPING_NAMES"]
MAPPINGS += sorted(x for x in vars(modeling_auto) if re.match("MODEL_FOR.*_NAMES$", x) and x not in MAPPINGS)
ATTENTION = re.compile(r"class \w*Att(entio)?n|attention_interface|softmax\(|Encoder\(")


def class_of(kind):
    """The class of a model type with its most natural head."""
    config = CONFIG_MAPPING[kind]
    module = modeling_of(config)
    for mapping in MAPPINGS:
        names = getattr(modeling_auto, mapping).get(kind)
        if names is not None:
            name = names if isinstance(names, str) else names[0]
            cls = getattr(module if hasattr(module, name) else transformers, name)
            # A model of one of its parts may be named for a model type.
            if cls.config_class is config or module is transformers:
                return cls
    own = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    own = [x for x in own if x.config_class is config and not x.__name__.endswith("PreTrainedModel")]
    if not own:
        raise LookupError("transformers has no model of it")
    return own[-1]


def modeling_of(config_class):
    try:
        return importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError as error:
        if "modeling_" not in str(error):
            raise
        # Its models are another model type's.
        return transformers


def has_attention(kind):
    """Whether the modules of a model type and of its parts define any attention."""
    configs = [CONFIG_MAPPING[kind]()]
    for config in configs:
        module = modeling_of(type(config))
        if module is transformers:
            return True
        if ATTENTION.search(inspect.getsource(module)):
            return True
        configs += [x for x in vars(config).values() if isinstance(x, PreTrainedConfig)]
    return False


def _flat(value):
    return [x for y in value for x in _flat(y)] if isinstance(value, (list, tuple)) else [value]


def _each(value, change):
    return type(value)(_each(x, change) for x in value) if isinstance(value, (list, tuple)) else change(value)


def _at_most(limit):
    return lambda value: _each(value, lambda x: min(x, limit))


def _set(new):
    return lambda value: _each(value, lambda x: new)


def _heads(value):
    """Heads of each stage, or of all layers."""
    return _set(2)(value) if isinstance(value, (list, tuple)) else min(value, 4)


def _windows(value):
    """Sides of windows in patches, or in pixels."""
    return _each(value, lambda x: 4 if x < 32 else 16)


def _in_proportion(value, limit=64):
    """A list's numbers, the largest one `limit`."""
    top = max(_flat(value))
    return _each(value, lambda x: max(1, x * limit // top)) if top > limit else value


def _token(name):
    fixed = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if name in fixed:
        return fixed[name]
    name = re.sub(r"_(id|index)$", "", name)
    known = "image video audio image_start image_end vision_start vision_end boi eoi mask".split()
    known = [f"{x}_token" for x in known]
    return 72 + (known.index(name) if name in known else len(known) + sum(map(ord, name)) % 14)


# The first rule whose pattern a field's whole name matches makes it small; None leaves the default.
RULES = [
    (r"mamba_n_heads|mamba_num_heads", _set(8)),
    (r"mamba_d_head|mamba_head_dim", _set(16)),
    (r"mamba_d_state|ssm_state_size|state_size|d_state", _at_most(16)),
    (r"(mamba_)?n_groups", _set(1)),
    (r"num_kv_shared_layers", _set(0)),
    (r"upsample_groups|vector_quantization_hidden_dimension|patch_embed_hidden_size", _at_most(64)),
    (r"index_kpool", _at_most(4)),
    (r".*(drop|jitter).*|mask_(time|feature)_prob", _set(0.0)),
    (r"apply_spec_augment|use_mems_train|.*gradient_checkpointing", _set(False)),
    (r"(.*_)?vocab(ulary)?_size(_.*)?", _at_most(VOCABULARY)),
    (r"(num_)?experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|expert_top_k", _at_most(2)),
    (r"n_group|topk_group|num_expert_groups?", _set(1)),
    (r".*num_experts|(moe_)?(num_|n_)?(local_|routed_|sparse_)?experts", _at_most(4)),
    (r"n_shared_experts|(moe_)?num_shared_experts|num_zero_experts|zero_expert_num", _at_most(1)),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r"kv_lora_rank", _at_most(16)),
    (r".*lora_rank|lora_r", _at_most(32)),
    (r"qk_rope_head_dim|rotary_dim", _at_most(8)),
    (r"qk_head_dim", _at_most(24)),
    (r"index_topk", _at_most(8)),
    (r"(.*_)?(head_dim|head_size|kv_channels|dim_head|d_kv|d_head|dim_per_head)", _at_most(16)),
    (r"query_pre_attn_scalar", _set(16)),
    (r".*sliding_window(_size)?|attention_chunk_size|local_attention|attention_window", _set(8)),
    (r"(.*_)?(num_key_value_heads|kv_heads|n_head_kv|num_query_groups)", _at_most(2)),
    (r"(.*_)?(n_heads?|num_heads|attention_heads|nhead)", _heads),
    (r"depths|(num_)?layers_per_stage|blocks_per_stage", _set(1)),
    (r"(.*_)?(n_layers?|layers|num_.*blocks|num_blocks)", _at_most(2)),
    (r"((resampler|encoder|decoder|head)_)?depth", _at_most(2)),
    (r"(stage|stem)_.*channels.*|encoder_in_channels|max_depth", None),
    (r"(spatial_)?merge_size|temporal_patch_size|tubelet_size|num_channels|in_channels|in_chans", None),
    (r"(.*_)?patch_size", _at_most(8)),
    (r"(.*_)?(image_size|img_size)", _set(32)),
    (r"window_sizes?", _windows),
    (r"num_mel_bins|n_mels|mel_dim|num_mels", _at_most(16)),
    (r"max_source_positions", _at_most(30)),
    (r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_target_positions)", _at_most(512)),
    (r"max_seq_len|max_sequence_length", _at_most(512)),
    (r"(.*_)?num_frames|frames", _at_most(4)),
    (r"(.*_)?num_(queries|query_tokens|latents)|resampler_n_latents", _at_most(4)),
    (r"num_denoising|mm_tokens_per_image", _at_most(4)),
]
RULES = [(re.compile(pattern), change) for pattern, change in RULES]
# What some configurations leave open, and models need.
UNSET = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
UNSET |= dict(moe_intermediate_size=64, head_dim=16)
# Widths: in the first try all 64, then all in proportion, then as they are.
WIDTHS = r"""(.*_)?(sizes?|hidden_sizes|dims?|d_model|n_embd|width|channels|d_ff|n_inner|embed_dim_per_stage
    |channel_list|hidden_size_.*|units|features|.*_(in|out)put)"""
WIDTHS = re.compile(WIDTHS, re.VERBOSE)
LEVELS = ("small", "in proportion", "wide")


def _numbers(value):
    flat = _flat(value)
    return bool(flat) and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in flat)


def _small(name, value, level, hidden):
    if re.search(r"token_(id|index)$|^(boi|eoi|boa|eoa)_", name):
        return None if value is None else _token(name)
    for pattern, change in RULES:
        if pattern.fullmatch(name):
            if change is None or value is None or not (isinstance(value, bool) or _numbers(value)):
                return value
            if level == "wide" and "head" in name:
                return value
            made = change(value)
            return made if isinstance(made, bool) == isinstance(value, bool) else value
    if WIDTHS.fullmatch(name) and _numbers(value) and level != "wide":
        if isinstance(value, (list, tuple)):
            return _in_proportion(value)
        if level == "small" or hidden < 64:
            return min(value, 64)
        return max(value * 64 // hidden, 1) if value > 64 else value
    return value


def _rope(value):
    """Parameters of rotary positions for heads of 16."""
    if not isinstance(value, dict):
        return value
    value = {name: _rope(x) for name, x in value.items()}
    if "mrope_section" in value:
        value["mrope_section"] = {3: [2, 3, 3], 4: [2, 2, 2, 2], 2: [4, 4]}[len(value["mrope_section"])]
    return value


def _layers(config):
    """Indices of layers such that there is one of each kind, at least two."""
    count = getattr(config, "num_hidden_layers", None)
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if not isinstance(count, int) or name not in [x.name for x in dataclasses.fields(config)]:
        return None
    lists = [getattr(config, x, None) for x in vars(config) if x.endswith(("_types", "_type"))]
    lists = [x for x in lists if isinstance(x, (list, tuple)) and len(x) == count and isinstance(x[0], str)]
    seen = {}
    for i, key in enumerate(zip(*lists)):
        seen.setdefault(key, i)
    picks = sorted(seen.values())[:4]
    picks += [i for i in range(count) if i not in picks][: max(0, 2 - len(picks))]
    return sorted(picks)


def small_fields(config, overrides=None, level=LEVELS[0]):
    """A configuration's fields, each of a small model's size."""
    overrides = overrides or {}
    config.allow_global_per_layer_attribute_access = True
    hidden = found(config, "hidden_size", "d_model", "embed_dim", "dim", default=64)
    hidden = max(_flat(hidden))
    fields, picks = {}, _layers(config)
    count = getattr(config, "num_hidden_layers", None)
    names = dict(getattr(config, "attribute_map", {}))
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name, None)
        default = field.default
        if name in ("transformers_version", "architectures", "id2label", "label2id", "dtype", "problem_type"):
            continue
        if isinstance(value, PreTrainedConfig) and isinstance(overrides.get(name, {}), dict):
            fields[name] = small(type(value), value, overrides.get(name), level)
        elif name in ("rope_parameters", "rope_scaling"):
            if "mrope_section" in str(value):
                fields[name] = _rope(value)
        elif isinstance(value, (list, tuple)) and picks and len(value) == count:
            if isinstance(value[0], str) and (len(set(value)) > 1 or default is not None):
                fields[name] = type(value)(value[i] for i in picks)
        elif name == names.get("num_hidden_layers", "num_hidden_layers") and picks:
            fields[name] = len(picks)
        elif value is None and name in UNSET:
            fields[name] = UNSET[name]
        elif value is not None:
            made = _small(name, value, level, hidden)
            # What is a default may be derived from what is made small.
            is_default = default in (None, value) or default is dataclasses.MISSING
            if made != value or not is_default:
                fields[name] = made
    for key in ("num_key_value_heads", "num_kv_heads"):
        heads = getattr(config, "num_attention_heads", None)
        if fields.get(key) is not None and heads == getattr(config, key, None):
            fields[key] = 4
    for name, value in overrides.items():
        if not (isinstance(value, dict) and isinstance(fields.get(name), PreTrainedConfig)):
            fields[name] = value
    return fields


def small(config_class, config=None, overrides=None, level=LEVELS[0]):
    config = config_class() if config is None else config
    return config_class(**small_fields(config, overrides, level))


def config_of(kind, level=LEVELS[0]):
    from sweep_overrides import CONFIGS

    made = CONFIGS.get(kind, {})
    return made() if callable(made) else small(CONFIG_MAPPING[kind], None, copy.deepcopy(made), level)


def initialise(model, std=STD, seed=1):
    """Weights with which differences show: larger than initial ones, and no zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * std)
            elif parameter.dim() == 1 and std:
                parameter.add_(noise.to(parameter) * 0.1)


def found(config, *names, default=None):
    """A field of a configuration or of the first of its parts that has it."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            # Layers differ in it.
            value = None
        if value is not None and not isinstance(value, PreTrainedConfig):
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            value = found(part, *names)
            if value is not None:
                return value
    return default


def part(config, *names):
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, PreTrainedConfig):
            return value
    return config


def _two(value):
    return tuple(value) if isinstance(value, (list, tuple)) else (value, value)


def tokens(shape, seed=0):
    return torch.randint(5, 70, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def placed(inputs, device, dtype):
    """Inputs on a model's device, in its type."""
    return {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}


def images(config, names):
    """What may fit as images: dictionaries of inputs, the likeliest first."""
    vision = part(config, "vision_config", "vit_config", "backbone_config", "image_config", "encoder")
    channels = found(vision, "num_channels", "in_channels", "in_chans", "image_channels", default=3)
    channels = channels if isinstance(channels, int) else 3
    patch = _two(found(vision, "patch_size", default=8))[-1]
    if "image_grid_thw" in names or "grid_thw" in names:
        grid = torch.tensor([[1, 4, 4]] * 2)
        temporal = found(vision, "temporal_patch_size", default=1)
        key = "image_grid_thw" if "image_grid_thw" in names else "grid_thw"
        main = "pixel_values" if "pixel_values" in names else "hidden_states"
        temporal = max(_flat(temporal))
        for depth in (temporal, 1, 2):
            more = {"merge_sizes": torch.tensor([1, 1])} if "merge_sizes" in names else {}
            yield {main: noise(32, channels * patch * patch * depth), key: grid, **more}
        yield {main: noise(32, channels, patch, patch), key: grid}
        yield {main: noise(32, found(vision, "hidden_size", default=64)), key: grid}
    height, width = _two(found(vision, "image_size", "img_size", default=32))[-2:]
    if "spatial_shapes" in names:
        yield dict(
            pixel_values=noise(2, 16, channels * patch * patch),
            pixel_attention_mask=torch.ones(2, 16, dtype=torch.long),
            spatial_shapes=torch.tensor([[4, 4]] * 2),
        )
    if "target_sizes" in names:
        sizes = torch.tensor([[4, 4]] * 2)
        yield dict(pixel_values=noise(1, channels, patch, 32 * patch), target_sizes=sizes)
    main = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
    frames = found(vision, "num_frames", default=4)
    frames = frames if isinstance(frames, int) else 4
    still = {main: noise(2, channels, height, width)}
    video = {main: noise(2, frames, channels, height, width)}
    if "image_sizes" in names:
        sizes = torch.tensor([[height, width]] * 2)
        yield {**still, "image_sizes": sizes}
        for tiles, grid in ((3, [height, width * 2]), (5, [height * 2, width * 2])):
            sizes = torch.tensor([grid] * 2)
            yield {main: noise(2, tiles, channels, height, width), "image_sizes": sizes}
    first, second = (video, still) if main != "pixel_values" else (still, video)
    yield first
    yield second
    yield {main: noise(2, 1, channels, height, width)}
    for size in (64, 128):
        yield {main: noise(2, channels, size, size)}
    yield {main: noise(2, channels, frames, height, width)}
    yield {main: noise(2, frames, height, width, channels)}
    if "qformer_input_ids" in names:
        yield {main: noise(2, channels, height, width), "qformer_input_ids": tokens((2, 6), 4)}
        yield {main: noise(2, frames, channels, height, width), "qformer_input_ids": tokens((2, 6), 4)}
    if "image_position_ids" in names or "pixel_position_ids" in names:
        key = "image_position_ids" if "image_position_ids" in names else "pixel_position_ids"
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(1)
        yield {main: noise(2, 36, channels * patch * patch), key: places.expand(2, 36, 2)}


def bands(config):
    """Frequencies of a spectrogram."""
    names = "input_feat_per_channel num_mel_bins feature_size n_mels input_feat_size input_dim feat_dim"
    return found(config, *names.split(), default=16)


def sounds(config, name, names):
    """What may fit as the features of sound."""
    masks = [x for x in ("input_features_mask", "feature_attention_mask", "padding_mask") if x in names]
    audio = part(config, "audio_config", "encoder_config", "audio_encoder_config", "audio_encoder")
    mels = bands(audio)
    length = 2 * found(audio, "max_source_positions", default=30)
    for frames in (length, 64, 100, 3000):
        ones = {mask: torch.ones(2, frames, dtype=torch.long) for mask in masks}
        yield {name: noise(2, mels, frames), **ones}
        yield {name: noise(2, frames, mels), **ones}
    yield {name: noise(mels, 128)}


def waves():
    for length in (1600, 6400, 16000):
        yield dict(input_values=noise(2, length))
        yield dict(input_values=noise(2, 1, length))


def inputs_of(kind, model, config):
    """What may fit as a model's inputs: dictionaries, the likeliest first."""
    from sweep_overrides import INPUTS

    signature = inspect.signature(model.forward).parameters
    names = set(signature)
    if kind in INPUTS:
        made = INPUTS[kind](config)
        yield from (made if isinstance(made, list) else [made])
        return
    text = {}
    if "input_ids" in names:
        text["input_ids"] = tokens((2, TEXT))
    if "decoder_input_ids" in names:
        text["decoder_input_ids"] = tokens((2, TARGET), 1)
    if "bbox" in names:
        corners = tokens((2, TEXT, 2), 2)
        text["bbox"] = torch.cat([corners, corners + 9], -1)
    if inspect.Parameter.empty is getattr(signature.get("encoder_hidden_states"), "default", None):
        text["encoder_hidden_states"] = noise(2, 10, 64)
    media = []
    if {"pixel_values", "grid_thw", "pixel_values_videos"} & names:
        media = images(config, names)
    else:
        spectra = [x for x in ("input_features", "input_values") if x in names]
        if "input_features" in names or spectra and found(config, "num_mel_bins"):
            media += sounds(config, spectra[0], names)
        if "input_values" in names:
            media += waves()
    for one in media:
        made = with_places(model, config, text, one, names)
        yield made
        if "input_ids" in made and "attention_mask" in names:
            yield {**made, "attention_mask": torch.ones_like(made["input_ids"])}
    if text:
        yield text
    else:
        width = found(config, "hidden_size", "d_model", default=64)
        for name in [x for x in ("inputs_embeds", "hidden_states", "query_embeds") if x in names][:1]:
            yield {name: noise(2, TEXT, width)}


def with_places(model, config, text, media, names):
    """A text with as many places for an image or a sound as the model makes of it."""
    token, features = None, None
    for token_name, method in (("image", "get_image_features"), ("audio", "get_audio_features")):
        if hasattr(model, method) and ("pixel_values" in media) == (token_name == "image"):
            token = found(config, f"{token_name}_token_id", f"{token_name}_token_index")
            features = method
    if token is None or "input_ids" not in text:
        return {**text, **media}
    try:
        method = getattr(model, features)
        with torch.no_grad():
            out = method(**placed(media, model.device, model.dtype))
        if isinstance(out, dict):
            out = out["last_hidden_state"] if out.get("pooler_output") is None else out["pooler_output"]
        hidden = found(part(config, "text_config", "llm_config"), "hidden_size", "d_model", default=64)
        count = sum(x.numel() for x in _flat(list(out) if isinstance(out, (list, tuple)) else [out]))
        count = count // hidden // 2
    except Exception:
        return {**text, **media}
    ids = text["input_ids"]
    middle = torch.full((2, count), token)
    ids = torch.cat([ids[:, : LEFT + 3], middle, ids[:, LEFT + 3 :]], 1)
    kinds = (ids == token).long()
    extra = {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    return {**text, **media, **extra, "input_ids": ids}
