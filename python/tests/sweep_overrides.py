"""What single model types need in sweep_transformers.py: fields of configurations, and inputs."""

import torch
import transformers
from sweep_models import TARGET, TEXT, noise, small, tokens


def resnet(cls=transformers.ResNetConfig, first=1):
    """A backbone without timm."""
    stages = [f"stage{i}" for i in range(first, 5)]
    return cls(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=stages)


def detr(kind):
    without_timm = dict(use_timm_backbone=False, backbone_config=resnet())
    cls = transformers.models.auto.CONFIG_MAPPING[kind]
    return lambda: small(cls, cls(**without_timm), {**without_timm, "backbone": None})


def bert(**more):
    return small(transformers.BertConfig, None, more)


def vit():
    return small(transformers.ViTConfig)


def wav2vec2():
    return small(transformers.Wav2Vec2Config)


def composed(cls, **parts):
    more = dict(decoder_start_token_id=1, pad_token_id=0)
    return lambda: cls(**{name: part() for name, part in parts.items()}, **more)


def decoder():
    return bert(is_decoder=True, add_cross_attention=True)


def sections(*values, **more):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=list(values), **more))


STAGES = dict(num_hidden_layers=4, out_indices=[1, 2, 3, 4], out_features=None)
ROPE_BY_LAYER = dict(
    rope_parameters=dict(full_attention=None, sliding_attention=dict(rope_type="default", rope_theta=1e4))
)
QWEN = "paddleocr_vl glm46v glm_ocr glm4v glm_image glmga qwen2_vl qwen2_5_vl qwen2_5_omni_thinker".split()
QWEN_TEXTS = "glm4v_text glm_image_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text".split()
INDEXED = dict(indexer_compress_ratio=2, indexer_budget=16, indexer_n_heads=2)
INDEXED |= dict(indexer_kv_heads=1, indexer_head_dim=16)
SERIES = dict(prediction_length=6, context_length=14, lags_sequence=[1, 2, 3], num_time_features=1)
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse"])
EXPERTS = dict(num_experts=4, top_k_experts=2)
PARTIAL = sections(1, 1, 2, partial_rotary_factor=0.5)
DETR = "detr conditional_detr dab-detr deformable_detr table-transformer".split()
DEPTHS = "depth_anything prompt_depth_anything chmv2 zoedepth upernet".split()
RT_DETR = dict(
    backbone_config=resnet(transformers.RTDetrResNetConfig, 2),
    encoder_in_channels=[16, 24, 32],
    encoder_hidden_dim=64,
)
VOCABULARY_MAP = {"<image>": 72, "<|extra_200|>": 73}
VOCABULARY_MAP |= {f"IMGIMG{letter}Z": 80 + i for i, letter in enumerate("ABCDEFGH")}
VISUAL_MAP = {"<image>": 72, "<|extra_200|>": 73} | {f"<|visual token {i:06}|>": 80 + i for i in range(8)}

CONFIGS = {
    "chameleon": dict(vocabulary_map=VOCABULARY_MAP),
    "emu3": dict(vocabulary_map=VISUAL_MAP),
    **{kind: detr(kind) for kind in DETR},
    **{kind: RT_DETR for kind in "rt_detr rt_detr_v2 d_fine".split()},
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], attention_layers=["global", "local"]),
    "esm": dict(vocab_size=99, pad_token_id=0, mask_token_id=4, token_dropout=False),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": dict(head_dim=8),
    **{kind: dict(image_size=128) for kind in "swin donut-swin maskformer-swin swinv2".split()},
    **{kind: dict(image_token_index=72) for kind in "blip-2 instructblip".split()},
    "instructblipvideo": dict(video_token_index=72),
    "cohere_compass_text": ROPE_BY_LAYER,
    "cohere_compass": dict(text_config=ROPE_BY_LAYER),
    **{kind: dict(backbone_config=STAGES) for kind in DEPTHS},
    "deepseek_ocr2_text": DENSE_FIRST,
    "deepseek_ocr2": dict(text_config=DENSE_FIRST),
    "unlimited_ocr_text": DENSE_FIRST,
    "unlimited_ocr": dict(text_config=DENSE_FIRST),
    "bamba": dict(attn_layer_indices=[1]),
    "janus": dict(image_token_id=72),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=16),
    "audio-spectrogram-transformer": dict(max_length=64),
    "qwen2_5_omni_audio_encoder": dict(max_source_positions=1500),
    "mllama_vision_model": dict(intermediate_layers_indices=[0, 1]),
    "mllama": dict(vision_config=dict(intermediate_layers_indices=[0, 1])),
    "muse_spark_audio": dict(num_hidden_layers=4),
    "muse_spark": dict(audio_config=dict(num_hidden_layers=4)),
    "dbrx": dict(attn_config=dict(rope_theta=1e4, clip_qkv=8.0)),
    "vipllava": dict(vision_feature_layers=[-2, -1]),
    "layoutlmv3": dict(coordinate_size=12, shape_size=8),
    "falcon_h1": dict(mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16),
    "esmc": dict(vocab_size=99),
    "hunyuan_vl_text": sections(2, 2, 2, 2),
    "hunyuan_vl": dict(text_config=sections(2, 2, 2, 2)),
    "dory": dict(
        layer_types=["full_attention"] * 3,
        num_hidden_layers=3,
        n_input_layers=1,
        n_recurrent_layers=1,
        n_output_layers=1,
    ),
    "ernie4_5_vl_moe_text": sections(3, 3, 2),
    "ernie4_5_vl_moe": dict(text_config=sections(3, 3, 2)),
    "hy_v4_vl_text": sections(1, 1, 2),
    "hy_v4_vl": dict(text_config=sections(1, 1, 2)),
    "glm4v_moe_text": PARTIAL,
    "glm4v_moe": dict(text_config=PARTIAL),
    **{kind: sections(2, 3, 3) for kind in QWEN_TEXTS},
    **{kind: dict(text_config=sections(2, 3, 3)) for kind in QWEN},
    "colqwen2": dict(vlm_config=dict(text_config=sections(2, 3, 3))),
    "moonshine_streaming": dict(num_key_value_heads=4),
    "nemotron": dict(num_key_value_heads=2),
    "owlvit_text_model": dict(max_position_embeddings=64),
    "owlv2_text_model": dict(max_position_embeddings=64),
    "owlvit": dict(text_config=dict(max_position_embeddings=64)),
    "owlv2": dict(text_config=dict(max_position_embeddings=64)),
    "molmo2": dict(adapter_config=dict(vision_feature_layer=[1, 0])),
    "qwen4_exp_text": INDEXED,
    "qwen4_exp": dict(text_config=INDEXED),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "step3p5": dict(layer_types=["full_attention", "sliding_attention"], sliding_window=8),
    "llama4_vision_model": dict(intermediate_size=256),
    "lw_detr_vit": dict(num_windows=4),
    "mamba2": dict(num_heads=8, head_dim=16),
    "diffusion_gemma_text": EXPERTS,
    "diffusion_gemma": dict(text_config=EXPERTS),
    "encoder-decoder": composed(transformers.EncoderDecoderConfig, encoder=bert, decoder=decoder),
    "vision-encoder-decoder": composed(transformers.VisionEncoderDecoderConfig, encoder=vit, decoder=decoder),
    "speech-encoder-decoder": composed(
        transformers.SpeechEncoderDecoderConfig, encoder=wav2vec2, decoder=decoder
    ),
    **{kind: SERIES for kind in "autoformer informer time_series_transformer".split()},
    "vision-text-dual-encoder": lambda: transformers.VisionTextDualEncoderConfig(
        vision_config=vit(), text_config=bert(), projection_dim=64
    ),
}


def series(config):
    """Values of two time series, whose last are to be predicted."""
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    width = max(config.num_time_features, 1)
    return dict(
        past_values=noise(2, past),
        past_time_features=noise(2, past, width, seed=4),
        past_observed_mask=torch.ones(2, past),
        future_values=noise(2, future, seed=6),
        future_time_features=noise(2, future, width, seed=7),
    )


def decisions(config):
    return dict(
        states=noise(2, 8, config.state_dim),
        actions=noise(2, 8, config.act_dim, seed=4),
        rewards=noise(2, 8, 1, seed=5),
        returns_to_go=noise(2, 8, 1, seed=6),
        timesteps=torch.arange(8).repeat(2, 1),
        attention_mask=torch.ones(2, 8, dtype=torch.long),
    )


def pairs_of_images(config):
    return [dict(pixel_values=noise(2, 2, channels, 64, 64)) for channels in (1, 3)]


def past(config):
    return dict(past_values=noise(2, config.context_length, config.num_input_channels))


def features(config):
    mels, length = config.num_mel_bins, 2 * 4 * config.n_window
    return dict(input_features=noise(mels, length), feature_lens=torch.tensor([length // 2] * 2))


INPUTS = {
    "audio-spectrogram-transformer": lambda config: dict(
        input_values=noise(2, config.max_length, config.num_mel_bins)
    ),
    "muse_spark_audio": lambda config: dict(input_values=noise(2, 3840)),
    "molmo2_vision": lambda config: dict(pixel_values=noise(2, 16, 3 * config.patch_size**2)),
    "dia_decoder": lambda config: dict(
        input_ids=tokens((2, TARGET, config.num_channels)), encoder_hidden_states=noise(2, TEXT, 64)
    ),
    "pix2struct": lambda config: dict(
        flattened_patches=torch.cat(
            [torch.ones(2, 16, 2), noise(2, 16, config.vision_config.patch_embed_hidden_size)], -1
        ),
        decoder_input_ids=tokens((2, TARGET), 1),
    ),
    "pix2struct_vision_model": lambda config: dict(
        flattened_patches=torch.cat([torch.ones(2, 16, 2), noise(2, 16, config.patch_embed_hidden_size)], -1)
    ),
    "mllama_vision_model": lambda config: dict(
        pixel_values=noise(2, 1, 4, 3, 32, 32),
        aspect_ratio_ids=torch.ones(2, 1, dtype=torch.long),
        aspect_ratio_mask=torch.ones(2, 1, 4, dtype=torch.long),
    ),
    "idefics": lambda config: dict(
        input_ids=tokens((2, TEXT)),
        pixel_values=noise(2, 1, 3, 32, 32),
        image_attention_mask=torch.ones(2, TEXT, 1, dtype=torch.long),
        attention_mask=torch.ones(2, TEXT, dtype=torch.long),
    ),
    "qwen2_5_omni_audio_encoder": features,
    "qwen3_omni_moe_audio_encoder": features,
    "autoformer": series,
    "informer": series,
    "time_series_transformer": series,
    "decision_transformer": decisions,
    "dia": lambda config: dict(
        input_ids=tokens((2, TEXT)),
        decoder_input_ids=tokens((2, TARGET, config.decoder_config.num_channels), 1),
    ),
    "musicgen": lambda config: dict(
        input_ids=tokens((2, TEXT)), decoder_input_ids=tokens((2 * config.decoder.num_codebooks, TARGET), 1)
    ),
    "musicgen_decoder": lambda config: dict(input_ids=tokens((2 * config.num_codebooks, TEXT))),
    "musicgen_melody_decoder": lambda config: dict(input_ids=tokens((2 * config.num_codebooks, TEXT))),
    "moshi_depth": lambda config: dict(input_ids=tokens((2, 2)), last_hidden_state=noise(2, 1, 64)),
    "qwen3_omni_moe_talker_code_predictor": lambda config: dict(inputs_embeds=noise(2, 4, 64)),
    **{kind: pairs_of_images for kind in "efficientloftr lightglue superglue".split()},
    "patchtst": past,
    "patchtsmixer": past,
    "lxmert": lambda config: dict(
        input_ids=tokens((2, TEXT)),
        visual_feats=noise(2, 10, config.visual_feat_dim),
        visual_pos=noise(2, 10, 4),
    ),
    "visual_bert": lambda config: dict(
        input_ids=tokens((2, TEXT)),
        visual_embeds=noise(2, 10, config.visual_embedding_dim),
        attention_mask=torch.ones(2, TEXT, dtype=torch.long),
    ),
}
