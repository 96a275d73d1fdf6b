"""The settings of each kind of network: default, what the value must be. One table a kind, and nothing else.

The names and defaults are those of ppdiffusers' AutoencoderKL, UNet2DConditionModel, UViTT2IModel, Transformer2DModel,
LDMBertConfig, CLIPTextConfig, CLIPVisionConfig and PaellaVQModel, and of our networks of Stable Cascade and MicroDiT (a
test compares them). `ppldm.networks.configs` reads configs by these tables.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_CHANNELS = 1 << 20  # and words, positions, sides: far beyond what any machine holds
MOST_LAYERS = 1024


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words and as a condition; `one | other` takes either."""

    words: str
    holds: Callable[[Any], bool]

    def __or__(self, other: "Rule") -> "Rule":
        return Rule(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


@dataclass(frozen=True)
class Setting:
    """One setting of a network: what the class takes where a config does not name it, and what it may be."""

    default: Any
    rule: Rule


def is_whole(value) -> bool:
    """True for a whole number, which JSON's true and 3.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(low: int, high: int) -> Rule:
    """A whole number from low to high, both included."""
    return Rule(f"a whole number from {low} to {high}", lambda value: is_whole(value) and low <= value <= high)


def lists_of(words: str, rule: Rule) -> Rule:
    """A list that is not empty, of what `rule` takes."""
    return Rule(words, lambda value: isinstance(value, list) and bool(value) and all(map(rule.holds, value)))


def one_of(*names: str) -> Rule:
    """One of these names."""
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


NULL = Rule("null", lambda value: value is None)
OFF = Rule("false (ppdiffusers' network does not run with it)", lambda value: value is None or value is False)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
NUMBER = Rule("a number", _is_real)
POSITIVE = Rule("a number above 0", lambda value: _is_real(value) and value > 0)
SHARE = Rule("a number from 0 to below 1", lambda value: _is_real(value) and 0 <= value < 1)
SIZE = whole(1, MOST_CHANNELS)
SIZES = lists_of("a list of such numbers", SIZE)
SIZE_LISTS = Rule(f"a list of {SIZE.words[2:]}", SIZES.holds)
SIDES = Rule("a list of two such numbers", lambda value: SIZES.holds(value) and len(value) == 2)
LAYERS = whole(1, MOST_LAYERS)
LAYER_LISTS = lists_of("a list of such numbers", LAYERS)
NESTED_LAYERS = lists_of("a list of such numbers or of lists of them", LAYERS | LAYER_LISTS)
KERNEL = Rule("an odd whole number from 1 to 31", lambda value: is_whole(value) and 1 <= value <= 31 and value % 2 == 1)
NUMBERS = lists_of("a list of numbers", NUMBER)
NOT_SET = Rule("null (ppdiffusers cannot build anything else)", lambda value: value is None)


_ACTIVATIONS = ("silu", "swish", "mish", "gelu", "relu")
_TEXT_ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "linear", "mish", "quick_gelu", "relu", "relu6"),
    *("sigmoid", "silu", "swish", "tanh"),
)
_ACTIVATION = Rule(  # ppdiffusers looks it up in lower case
    f"one of {', '.join(_ACTIVATIONS)}", lambda value: isinstance(value, str) and value.lower() in _ACTIVATIONS
)

# The blocks that run. ppdiffusers has others, whose forward fails in a network of this kind.
UNET_DOWN_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D")
UNET_UP_BLOCKS = ("UpBlock2D", "CrossAttnUpBlock2D", "ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D",
                  "AttnUpBlock2D")  # fmt: skip
UNET_MID_BLOCKS = ("UNetMidBlock2DCrossAttn", "UNetMidBlock2DSimpleCrossAttn", "UNetMidBlock2D")
VAE_DOWN_BLOCKS = ("DownEncoderBlock2D", "AttnDownEncoderBlock2D")
VAE_UP_BLOCKS = ("UpDecoderBlock2D", "AttnUpDecoderBlock2D")


def _blocks(names: tuple[str, ...]) -> Rule:
    return lists_of(f"a list of {', '.join(names)}", one_of(*names))


UNET = {
    "sample_size": Setting(None, SIZE | SIDES | NULL),
    "in_channels": Setting(4, SIZE),
    "out_channels": Setting(4, SIZE),
    "center_input_sample": Setting(False, FLAG),
    "flip_sin_to_cos": Setting(True, FLAG),
    "freq_shift": Setting(0, NUMBER),
    "down_block_types": Setting([*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"], _blocks(UNET_DOWN_BLOCKS)),
    "mid_block_type": Setting("UNetMidBlock2DCrossAttn", one_of(*UNET_MID_BLOCKS) | NULL),
    "up_block_types": Setting(["UpBlock2D", *["CrossAttnUpBlock2D"] * 3], _blocks(UNET_UP_BLOCKS)),
    "only_cross_attention": Setting(False, FLAG | lists_of("a list of them", FLAG)),
    "block_out_channels": Setting([320, 640, 1280, 1280], SIZE_LISTS),
    "layers_per_block": Setting(2, LAYERS | LAYER_LISTS),
    "downsample_padding": Setting(1, whole(0, 1)),
    "mid_block_scale_factor": Setting(1, POSITIVE),
    "dropout": Setting(0.0, SHARE),
    "act_fn": Setting("silu", _ACTIVATION),
    "norm_num_groups": Setting(32, SIZE),
    "norm_eps": Setting(1e-5, POSITIVE),
    "cross_attention_dim": Setting(1280, SIZE | SIZES),
    "transformer_layers_per_block": Setting(1, LAYERS | NESTED_LAYERS),
    "reverse_transformer_layers_per_block": Setting(None, NESTED_LAYERS | NULL),
    "encoder_hid_dim": Setting(None, SIZE | NULL),
    "encoder_hid_dim_type": Setting(None, one_of("text_proj", "text_image_proj", "image_proj") | NULL),
    "attention_head_dim": Setting(8, SIZE | SIZES),
    "num_attention_heads": Setting(None, NOT_SET),
    "dual_cross_attention": Setting(False, OFF),
    "use_linear_projection": Setting(False, FLAG | NULL),
    "class_embed_type": Setting(None, one_of("timestep", "identity", "projection", "simple_projection") | NULL),
    "addition_embed_type": Setting(None, one_of("text", "text_image", "text_time", "image", "image_hint") | NULL),
    "addition_time_embed_dim": Setting(None, SIZE | NULL),
    "num_class_embeds": Setting(None, SIZE | NULL),
    "upcast_attention": Setting(False, FLAG | NULL),
    "resnet_time_scale_shift": Setting("default", one_of("default", "scale_shift", "ada_group")),
    "resnet_skip_time_act": Setting(False, FLAG | NULL),
    "resnet_out_scale_factor": Setting(1.0, POSITIVE),
    "time_embedding_type": Setting("positional", one_of("positional", "fourier")),
    "time_embedding_dim": Setting(None, SIZE | NULL),
    "time_embedding_act_fn": Setting(None, _ACTIVATION | NULL),
    "timestep_post_act": Setting(None, _ACTIVATION | NULL),
    "time_cond_proj_dim": Setting(None, SIZE | NULL),
    "conv_in_kernel": Setting(3, KERNEL),
    "conv_out_kernel": Setting(3, KERNEL),
    "projection_class_embeddings_input_dim": Setting(None, SIZE | NULL),
    "attention_type": Setting("default", one_of("default")),
    "class_embeddings_concat": Setting(False, OFF),
    "mid_block_only_cross_attention": Setting(None, FLAG | NULL),
    "cross_attention_norm": Setting(None, one_of("layer_norm", "group_norm") | NULL),
    "addition_embed_type_num_heads": Setting(64, SIZE),
    "data_format": Setting("NCHW", one_of("NCHW", "NHWC")),
}

# Of the copy of a UNet's encoder, with settings of its own.
CONTROLNET = {
    **{
        name: UNET[name]
        for name in (
            "in_channels", "flip_sin_to_cos", "freq_shift", "down_block_types", "mid_block_type",
            "only_cross_attention", "block_out_channels", "layers_per_block", "downsample_padding",
            "mid_block_scale_factor", "act_fn", "norm_num_groups", "norm_eps", "cross_attention_dim",
            "transformer_layers_per_block", "encoder_hid_dim", "encoder_hid_dim_type", "attention_head_dim",
            "num_attention_heads", "use_linear_projection", "class_embed_type", "addition_embed_type",
            "addition_time_embed_dim", "num_class_embeds", "upcast_attention", "resnet_time_scale_shift",
            "projection_class_embeddings_input_dim", "addition_embed_type_num_heads",
        )
    },
    "conditioning_channels": Setting(3, SIZE),
    "controlnet_conditioning_channel_order": Setting("rgb", one_of("rgb", "bgr")),
    "conditioning_embedding_out_channels": Setting([16, 32, 96, 256], SIZES),
    "global_pool_conditions": Setting(False, FLAG),
}  # fmt: skip

# Of UViTT2IModel, which takes sides of latents and channels without defaults.
UVIT = {
    "sample_size": Setting(None, SIZE | NULL),
    "in_channels": Setting(None, SIZE | NULL),
    "out_channels": Setting(None, SIZE | NULL),
    "patch_size": Setting(2, SIZE),
    "num_layers": Setting(28, LAYERS),
    "num_attention_heads": Setting(16, SIZE),
    "attention_head_dim": Setting(72, SIZE),
    "mlp_ratio": Setting(4.0, POSITIVE),
    "qkv_bias": Setting(False, FLAG),
    "qk_scale": Setting(None, POSITIVE | NULL),
    "pos_drop_rate": Setting(0.0, SHARE),
    "drop_rate": Setting(0.0, SHARE),
    "attn_drop_rate": Setting(0.0, SHARE),
    "norm_type": Setting("layer_norm", one_of("layer_norm")),
    "clip_dim": Setting(768, SIZE),
    "num_text_tokens": Setting(77, SIZE),
    "conv": Setting(True, FLAG),
}

# Of Transformer2DModel where it is PixArt's text-to-image DiT; the class makes other networks too.
DIT = {
    "num_attention_heads": Setting(16, SIZE),
    "attention_head_dim": Setting(88, SIZE),
    "in_channels": Setting(None, SIZE | NULL),
    "out_channels": Setting(None, SIZE | NULL),
    "num_layers": Setting(1, LAYERS),
    "dropout": Setting(0.0, SHARE),
    "norm_num_groups": Setting(32, SIZE),
    "cross_attention_dim": Setting(None, SIZE | NULL),
    "attention_bias": Setting(False, FLAG),
    "sample_size": Setting(None, SIZE | NULL),
    "num_vector_embeds": Setting(None, NOT_SET),
    "patch_size": Setting(None, SIZE | NULL),
    "activation_fn": Setting("geglu", one_of("geglu", "gelu", "gelu-approximate")),
    "num_embeds_ada_norm": Setting(None, SIZE | NULL),
    "use_linear_projection": Setting(False, FLAG),
    "only_cross_attention": Setting(False, FLAG),
    "double_self_attention": Setting(False, FLAG),
    "upcast_attention": Setting(False, FLAG),
    "norm_type": Setting("layer_norm", one_of("layer_norm", "ada_norm_single")),
    "norm_elementwise_affine": Setting(True, FLAG),
    "norm_eps": Setting(1e-5, POSITIVE),
    "attention_type": Setting("default", one_of("default")),
    "caption_channels": Setting(None, SIZE | NULL),
    "data_format": Setting("NCHW", one_of("NCHW")),
}

# Of micro_diffusion's transformer.
_RATIOS = Rule(
    "a list of two numbers above 0", lambda value: NUMBERS.holds(value) and len(value) == 2 and min(value) > 0
)
MICRODIT = {
    "sample_size": Setting(32, SIZE),
    "patch_size": Setting(2, SIZE),
    "in_channels": Setting(4, SIZE),
    "dim": Setting(1024, SIZE),
    "depth": Setting(28, LAYERS),
    "head_dim": Setting(64, SIZE),
    "multiple_of": Setting(256, SIZE),
    "caption_channels": Setting(1024, SIZE),
    "qkv_ratio": Setting([0.5, 1.0], _RATIOS),
    "mlp_ratio": Setting([0.5, 4.0], _RATIOS),
    "patch_mixer_depth": Setting(6, LAYERS),
    "patch_mixer_dim": Setting(768, SIZE),
    "num_experts": Setting(8, LAYERS),
    "expert_capacity": Setting(2.0, POSITIVE),
    "experts_every_n": Setting(2, whole(2, MOST_LAYERS)),
}

VAE = {
    "in_channels": Setting(3, SIZE),
    "out_channels": Setting(3, SIZE),
    "down_block_types": Setting(["DownEncoderBlock2D"], _blocks(VAE_DOWN_BLOCKS)),
    "down_block_out_channels": Setting(None, SIZES | NULL),
    "up_block_types": Setting(["UpDecoderBlock2D"], _blocks(VAE_UP_BLOCKS)),
    "up_block_out_channels": Setting(None, SIZES | NULL),
    "block_out_channels": Setting([64], SIZE_LISTS),
    "layers_per_block": Setting(1, LAYERS),
    "act_fn": Setting("silu", _ACTIVATION),
    "latent_channels": Setting(4, SIZE),
    "norm_num_groups": Setting(32, SIZE),
    "sample_size": Setting(32, SIZE | SIDES),
    "scaling_factor": Setting(0.18215, POSITIVE),
    "shift_factor": Setting(None, NUMBER | NULL),
    "latents_mean": Setting(None, NUMBERS | NULL),
    "latents_std": Setting(None, NUMBERS | NULL),
    "force_upcast": Setting(True, FLAG),
    "use_quant_conv": Setting(True, FLAG),
    "use_post_quant_conv": Setting(True, FLAG),
}

# The settings that decide a text encoder's weights and what it computes. Its class takes many more.
LDMBERT = {
    "vocab_size": Setting(30522, SIZE),
    "max_position_embeddings": Setting(77, SIZE),
    "encoder_layers": Setting(32, LAYERS),
    "encoder_ffn_dim": Setting(5120, SIZE),
    "encoder_attention_heads": Setting(8, SIZE),
    "head_dim": Setting(64, SIZE),
    "encoder_layerdrop": Setting(0.0, SHARE),
    "activation_function": Setting("gelu", one_of(*_TEXT_ACTIVATIONS)),
    "d_model": Setting(1280, SIZE),
    "dropout": Setting(0.1, SHARE),
    "attention_dropout": Setting(0.0, SHARE),
    "activation_dropout": Setting(0.0, SHARE),
    "init_std": Setting(0.02, POSITIVE),
    "scale_embedding": Setting(False, FLAG),
    "pad_token_id": Setting(0, whole(0, MOST_CHANNELS)),
}

_TOKEN = whole(0, MOST_CHANNELS) | NULL
CLIP = {
    "vocab_size": Setting(49408, SIZE),
    "hidden_size": Setting(512, SIZE),
    "intermediate_size": Setting(2048, SIZE),
    "projection_dim": Setting(512, SIZE | NULL),
    "num_hidden_layers": Setting(12, LAYERS),
    "num_attention_heads": Setting(8, SIZE),
    "max_position_embeddings": Setting(77, SIZE),
    "hidden_act": Setting("quick_gelu", one_of(*_TEXT_ACTIVATIONS)),
    "layer_norm_eps": Setting(1e-5, POSITIVE),
    "pad_token_id": Setting(1, _TOKEN),
    "bos_token_id": Setting(49406, _TOKEN),
    "eos_token_id": Setting(49407, _TOKEN),
}

# Of CLIP's image encoder with its projection.
IMAGE_ENCODER = {
    "hidden_size": Setting(768, SIZE),
    "intermediate_size": Setting(3072, SIZE),
    "projection_dim": Setting(512, SIZE),
    "num_hidden_layers": Setting(12, LAYERS),
    "num_attention_heads": Setting(12, SIZE),
    "num_channels": Setting(3, SIZE),
    "image_size": Setting(224, SIZE),
    "patch_size": Setting(32, SIZE),
    "hidden_act": Setting("quick_gelu", one_of(*_TEXT_ACTIVATIONS)),
    "layer_norm_eps": Setting(1e-5, POSITIVE),
}

# Of Stable Cascade's network, in both stages: diffusers' StableCascadeUNet.
CASCADE_BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
_LAYERS_BY_LEVEL = Rule(f"a list of {LAYERS.words[2:]}", LAYER_LISTS.holds)
CASCADE = {
    "in_channels": Setting(16, SIZE),
    "out_channels": Setting(16, SIZE),
    "timestep_ratio_embedding_dim": Setting(64, whole(4, MOST_CHANNELS)),
    "patch_size": Setting(1, whole(1, 64)),
    "conditioning_dim": Setting(2048, SIZE),
    "block_out_channels": Setting([2048, 2048], SIZE_LISTS),
    "num_attention_heads": Setting([32, 32], lists_of(
        "a list of whole numbers, at most 0 where a level does not attend", whole(-1, MOST_CHANNELS)
    )),
    "down_num_layers_per_block": Setting([8, 24], _LAYERS_BY_LEVEL),
    "up_num_layers_per_block": Setting([24, 8], _LAYERS_BY_LEVEL),
    "down_blocks_repeat_mappers": Setting([1, 1], _LAYERS_BY_LEVEL),
    "up_blocks_repeat_mappers": Setting([1, 1], _LAYERS_BY_LEVEL),
    "block_types_per_layer": Setting(
        [[*CASCADE_BLOCKS]] * 2,
        lists_of(f"lists of {', '.join(CASCADE_BLOCKS)}, one a level", _blocks(CASCADE_BLOCKS)),
    ),
    "clip_text_in_channels": Setting(None, SIZE | NULL),
    "clip_text_pooled_in_channels": Setting(1280, SIZE),
    "clip_image_in_channels": Setting(None, SIZE | NULL),
    "clip_seq": Setting(4, LAYERS),
    "effnet_in_channels": Setting(None, SIZE | NULL),
    "pixel_mapper_in_channels": Setting(None, SIZE | NULL),
    "kernel_size": Setting(3, KERNEL),
    "dropout": Setting([0.1, 0.1], SHARE | lists_of("a list of them", SHARE)),
    "self_attn": Setting(True, FLAG | lists_of("a list of them", FLAG)),
    "timestep_conditioning_type": Setting(["sca", "crp"], lists_of("a list of sca, crp", one_of("sca", "crp"))),
    "switch_level": Setting(None, NULL | lists_of("a list of true and false", FLAG)),
}  # fmt: skip

_THREE_SIZES = Rule("a list of three sizes", lambda value: SIZES.holds(value) and len(value) == 3)
CONTROL_BOTTLENECKS = ("effnet", "simple", "large")

# Of Stable Cascade's encoder of pictures: EfficientNetV2-S and a convolution behind it.
EFFNET = {
    "stage_channels": Setting([24, 24, 48, 64, 128, 160, 256, 1280], SIZE_LISTS),
    "stage_layers": Setting([2, 4, 4, 6, 9, 15], _LAYERS_BY_LEVEL),
    "latent_channels": Setting(16, SIZE),
}

# Of the control network beside its prior: blocks are numbers of residual blocks of that.
CASCADE_CONTROLNET = {
    "conditioning_channels": Setting(3, SIZE),
    "projection_channels": Setting(2048, SIZE),
    "blocks": Setting([0, 4, 8, 12, 51, 55, 59, 63], Rule(
        "an ascending list of whole numbers from 0",
        lambda value: lists_of("", whole(0, MOST_CHANNELS)).holds(value) and value == sorted(set(value)),
    )),
    "bottleneck": Setting("effnet", one_of(*CONTROL_BOTTLENECKS)),
    **{name: EFFNET[name] for name in ("stage_channels", "stage_layers")},
    "large_channels": Setting([16384, 1024, 1280], _THREE_SIZES),
    "large_layers": Setting(8, LAYERS),
}  # fmt: skip

# Of Stable Cascade's autoencoder (stage A), Paella's.
VQGAN = {
    "in_channels": Setting(3, SIZE),
    "out_channels": Setting(3, SIZE),
    "up_down_scale_factor": Setting(2, whole(1, 64)),
    "levels": Setting(2, whole(1, 16)),
    "bottleneck_blocks": Setting(12, LAYERS),
    "embed_dim": Setting(384, SIZE),
    "latent_channels": Setting(4, SIZE),
    "num_vq_embeddings": Setting(8192, SIZE),
    "scale_factor": Setting(0.3764, POSITIVE),
}

# What PaddleNLP's and transformers' PretrainedConfig write beside these: nothing of it reaches a text encoder here.
_BOOKKEEPING = """
    add_cross_attention architectures attn_implementation attention_dropout bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward classifier_dropout context_parallel_degree cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    fuse_attention_ffn fuse_attention_qkv fuse_sequence_parallel_allreduce gradient_checkpointing hidden_size id2label
    initializer_factor initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    model_type no_recompute_layers no_repeat_ngram_size num_attention_heads num_beam_groups num_beams num_choices
    num_hidden_layers num_return_sequences offload_recompute_inputs output_attentions output_hidden_states output_scores
    paddlenlp_version pipeline_parallel_degree pp_recompute_interval prefix problem_type pruned_heads
    quantization_config recompute recompute_granularity recompute_use_reentrant refined_recompute
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_parallel_degree sep_token_id
    sequence_parallel suppress_tokens task_specific_params temperature tensor_parallel_degree tensor_parallel_output
    tensor_parallel_rank tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache use_flash_attention
    use_fused_dropout_add use_fused_linear use_fused_linear_cross_entropy use_fused_rms_norm use_fused_rope
    virtual_pp_degree
"""
SETTINGS = {
    "unet": UNET, "controlnet": CONTROLNET, "uvit": UVIT, "dit": DIT, "microdit": MICRODIT, "vae": VAE,
    "ldmbert": LDMBERT, "clip": CLIP, "cascade_prior": CASCADE, "cascade_decoder": CASCADE, "effnet": EFFNET,
    "vqgan": VQGAN, "image_encoder": IMAGE_ENCODER, "cascade_controlnet": CASCADE_CONTROLNET,
}  # fmt: skip
IGNORED = dict.fromkeys(SETTINGS, frozenset()) | {
    "ldmbert": frozenset(_BOOKKEEPING.split()) - LDMBERT.keys(),
    "clip": frozenset(_BOOKKEEPING.split()) - CLIP.keys(),
    "image_encoder": frozenset([*_BOOKKEEPING.split(), "pad_token_id"]) - IMAGE_ENCODER.keys(),
}

# What a config of a network that is built anew must name itself: a size that nobody chose would be built otherwise.
_CASCADE_SIZES = (
    "in_channels", "out_channels", "conditioning_dim", "block_out_channels", "num_attention_heads",
    "down_num_layers_per_block", "up_num_layers_per_block", "block_types_per_layer",
)  # fmt: skip
REQUIRED = {
    "unet": ("in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels",
             "cross_attention_dim"),
    "controlnet": ("conditioning_channels", "down_block_types", "block_out_channels", "cross_attention_dim"),
    "uvit": ("sample_size", "in_channels", "patch_size", "num_layers", "num_attention_heads", "attention_head_dim",
             "clip_dim"),
    "dit": ("sample_size", "in_channels", "patch_size", "num_layers", "num_attention_heads", "attention_head_dim",
            "cross_attention_dim", "caption_channels", "norm_type", "num_embeds_ada_norm"),
    "microdit": ("sample_size", "patch_size", "in_channels", "dim", "depth", "head_dim", "caption_channels",
                 "patch_mixer_depth", "patch_mixer_dim", "num_experts"),
    "vae": ("down_block_types", "up_block_types", "block_out_channels", "latent_channels"),
    "ldmbert": ("d_model", "encoder_layers", "encoder_attention_heads", "head_dim", "encoder_ffn_dim"),
    "clip": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "cascade_prior": (*_CASCADE_SIZES, "clip_text_in_channels", "clip_image_in_channels"),
    "cascade_decoder": (*_CASCADE_SIZES, "effnet_in_channels"),
    "effnet": ("stage_channels", "stage_layers", "latent_channels"),
    "cascade_controlnet": ("conditioning_channels", "projection_channels", "blocks", "bottleneck"),
    "image_encoder": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size"),
    "vqgan": ("levels", "bottleneck_blocks", "embed_dim"),
}  # fmt: skip


def is_effnet(config) -> bool:
    """True for the config of an EfficientNet encoder."""
    return "stage_channels" in config
