"""The settings of each kind of network: the default of each, and what its value may be.

Names, defaults and types are those of the signature of the network's class, read from the source: a config is refused
in milliseconds. `_RULES` says what a type does not: which names run, and beyond which numbers a network crashes.
"""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.errors import EnvironmentProblem

# The class whose settings a config of a kind consists of. That of a DiT makes other networks too.
CLASSES = {
    "unet": "ppdiffusers.models.unet_2d_condition.UNet2DConditionModel",
    "controlnet": "ppdiffusers.models.controlnet.ControlNetModel",
    "uvit": "ppdiffusers.models.uvit_t2i.UViTT2IModel",
    "dit": "ppdiffusers.models.transformer_2d.Transformer2DModel",
    "microdit": "ppldm.networks.transformers.microdit.MicroDiT",
    "single_stream": "ppldm.networks.transformers.single_stream.SingleStreamTransformer",
    "sd3": "ppdiffusers.models.transformer_sd3.SD3Transformer2DModel",
    "vae": "ppdiffusers.models.autoencoder_kl.AutoencoderKL",
    "pixels": "ppldm.networks.pixels.PixelAutoencoder",
    "ldmbert": "ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion.LDMBertConfig",
    "clip": "ppdiffusers.transformers.clip.configuration.CLIPTextConfig",
    "t5": "ppdiffusers.transformers.t5.configuration.T5Config",
    "cascade_prior": "ppldm.networks.cascade.unet.CascadeUNet",
    "cascade_decoder": "ppldm.networks.cascade.unet.CascadeUNet",
    "effnet": "ppldm.networks.cascade.control.EffNetEncoder",
    "vqgan": "ppdiffusers.pipelines.wuerstchen.modeling_paella_vq_model.PaellaVQModel",
    "image_encoder": "ppdiffusers.transformers.clip.configuration.CLIPVisionConfig",
    "cascade_controlnet": "ppldm.networks.cascade.control.CascadeControlNet",
}
_ENCODERS = "ppdiffusers.transformers"
# By kind, or by the name above: the classes of networks that take their settings as an object of the class above, and
# of those that have no settings here.
NETWORKS = {
    "ldmbert": "ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion.LDMBertModel",
    "clip": f"{_ENCODERS}.CLIPTextModel",
    "t5": f"{_ENCODERS}.T5EncoderModel",
    **dict.fromkeys(("projected_text_encoder", "text_encoder_2"), f"{_ENCODERS}.CLIPTextModelWithProjection"),
    "image_encoder": f"{_ENCODERS}.CLIPVisionModelWithProjection",
    "PatchDiscriminator": "ppldm.networks.losses.PatchDiscriminator",
    "Lpips": "ppldm.networks.losses.Lpips",
    "LatentAlignment": "ppldm.networks.losses.LatentAlignment",
    "Dinov2": "ppldm.networks.dinov2.Dinov2",
}
_CASCADE = (
    "in_channels out_channels conditioning_dim block_out_channels num_attention_heads down_num_layers_per_block "
    "up_num_layers_per_block block_types_per_layer"
)
_CLIP = "hidden_size num_hidden_layers num_attention_heads intermediate_size"
_PATCHES = "sample_size in_channels patch_size"
# What a config of a network that is built anew must name itself: a size that nobody chose would be built otherwise.
REQUIRED = {
    "unet": "in_channels out_channels down_block_types up_block_types block_out_channels cross_attention_dim",
    "controlnet": "conditioning_channels down_block_types block_out_channels cross_attention_dim",
    "uvit": f"{_PATCHES} num_layers num_attention_heads attention_head_dim clip_dim",
    "dit": f"{_PATCHES} num_layers num_attention_heads attention_head_dim cross_attention_dim caption_channels "
    "norm_type num_embeds_ada_norm",
    "microdit": f"{_PATCHES} dim depth head_dim caption_channels patch_mixer_depth patch_mixer_dim num_experts",
    "single_stream": f"{_PATCHES} dim depth head_dim caption_channels bottleneck",
    "sd3": f"{_PATCHES} num_layers num_attention_heads attention_head_dim joint_attention_dim caption_projection_dim "
    "pooled_projection_dim pos_embed_max_size",
    "vae": "down_block_types up_block_types block_out_channels latent_channels",
    "pixels": "colour_space",
    "ldmbert": "d_model encoder_layers encoder_attention_heads head_dim encoder_ffn_dim",
    "clip": _CLIP,
    "t5": "d_model d_kv d_ff num_layers num_heads feed_forward_proj",
    "cascade_prior": f"{_CASCADE} clip_text_in_channels clip_image_in_channels",
    "cascade_decoder": f"{_CASCADE} effnet_in_channels",
    "effnet": "stage_channels stage_layers latent_channels",
    "vqgan": "levels bottleneck_blocks embed_dim",
    "image_encoder": f"{_CLIP} patch_size",
    "cascade_controlnet": "conditioning_channels projection_channels blocks bottleneck",
}


@dataclass(frozen=True)
class Condition:
    """What a value must be, in words and as a condition."""

    words: str
    holds: Callable[[Any], bool]


def fits(value, rule) -> bool:
    """Whether a value of JSON is what a rule says: `bool`; a range, for a whole number in it, which true and 3.0 are
    not; a regular expression of names; a Condition; a list of one rule, for a list of such values that is not empty, or
    of n times the same, for a list of n; or a tuple of rules, for what any of them takes."""
    if isinstance(rule, tuple):
        return any(fits(value, one) for one in rule)
    if isinstance(rule, list):
        is_list = isinstance(value, list) and bool(value) and len(rule) in (1, len(value))
        return is_list and all(fits(one, rule[0]) for one in value)
    if isinstance(rule, range):
        return isinstance(value, int) and not isinstance(value, bool) and value in rule
    if isinstance(rule, str):
        return isinstance(value, str) and re.fullmatch(rule, value) is not None
    return isinstance(value, bool) if rule is bool else rule.holds(value)


def describe(rule) -> str:
    """A rule in words."""
    if isinstance(rule, tuple):
        return " or ".join(map(describe, rule))
    if isinstance(rule, list):
        return f"a list of {f'{len(rule)} ' if rule[1:] else ''}values, each {describe(rule[0])}"
    if isinstance(rule, range):
        return f"{'an odd' if rule.step == 2 else 'a'} whole number from {rule[0]} to {rule[-1]}"
    if isinstance(rule, str):
        return f"one of {rule.removeprefix('(?i)').replace('|', ', ')}"
    return "true or false" if rule is bool else rule.words


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_SIZE = range(1, (1 << 20) + 1)  # channels, words, positions, sides: far beyond what any machine holds
_TOKEN = range(_SIZE.stop)
NULL = Condition("null", lambda value: value is None)
_OFF = Condition("false (ppdiffusers' network does not run with it)", lambda value: value is None or value is False)
_NOT_SET = Condition("null (ppdiffusers cannot build anything else)", NULL.holds)
_TEXT = Condition("a text", lambda value: isinstance(value, str))
_NUMBER = Condition("a number", _is_number)
POSITIVE = Condition("a number above 0", lambda value: _is_number(value) and value > 0)
_SHARE = Condition("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1)
_ASCENDING = Condition(
    "an ascending list of whole numbers from 0", lambda value: fits(value, [_TOKEN]) and value == sorted(set(value))
)
_COUNT = range(1, 1024 + 1)
_IS_COUNT = re.compile("layers|depth|blocks|experts|mappers|clip_seq").search  # in names of what repeats something
_BY_LAYER = [(_COUNT, [_COUNT])]
CASCADE_BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")
CONTROL_BOTTLENECKS = ("effnet", "simple", "large")
# Beyond types, by the names of settings, of all classes or of one: the rule of a value, which holds for each in a list
# where the annotation allows lists; or in a tuple the whole. The names are those that run: ppdiffusers has more, whose
# forward fails in a network of this kind.
_RULES = {
    "act_fn time_embedding_act_fn timestep_post_act": "(?i)silu|swish|mish|gelu|relu",
    "activation_function hidden_act": "gelu|gelu_10|gelu_fast|gelu_new|gelu_python|linear|mish|quick_gelu|relu|relu6|"
    "sigmoid|silu|swish|tanh",
    "addition_embed_type": "text|text_image|text_time|image|image_hint",
    "attention_type": "default",
    "bos_token_id eos_token_id pad_token_id": (_TOKEN, NULL),
    "class_embed_type": "timestep|identity|projection|simple_projection",
    "controlnet_conditioning_channel_order": "rgb|bgr",
    "conv_in_kernel conv_out_kernel kernel_size": range(1, 32, 2),
    "cross_attention_norm": "layer_norm|group_norm",
    "data_format": "NCHW|NHWC",
    "down_block_types": "DownBlock2D|CrossAttnDownBlock2D|ResnetDownsampleBlock2D|SimpleCrossAttnDownBlock2D",
    "downsample_padding": range(2),
    "dual_cross_attention class_embeddings_concat": _OFF,
    "encoder_hid_dim_type": "text_proj|text_image_proj|image_proj",
    "freq_shift latents_mean shift_factor": _NUMBER,
    "latents_std": POSITIVE,
    "mid_block_type": ("UNetMidBlock2DCrossAttn|UNetMidBlock2DSimpleCrossAttn|UNetMidBlock2D", NULL),
    "qk_scale": POSITIVE,
    "resnet_time_scale_shift": "default|scale_shift|ada_group",
    "reverse_transformer_layers_per_block": (_BY_LAYER,),
    "time_embedding_type": "positional|fourier",
    "transformer_layers_per_block": (_COUNT, _BY_LAYER),
    "up_block_types": "UpBlock2D|CrossAttnUpBlock2D|ResnetUpsampleBlock2D|SimpleCrossAttnUpBlock2D|AttnUpBlock2D",
    "upcast_attention use_linear_projection resnet_skip_time_act": (bool, NULL),
    "UNet2DConditionModel.num_attention_heads ControlNetModel.num_attention_heads": (_NOT_SET,),
    "UNet2DConditionModel.sample_size AutoencoderKL.sample_size": (_SIZE, [_SIZE] * 2),
    "AutoencoderKL.down_block_types": "DownEncoderBlock2D|AttnDownEncoderBlock2D",
    "AutoencoderKL.up_block_types": "UpDecoderBlock2D|AttnUpDecoderBlock2D",
    "UViTT2IModel.norm_type": "layer_norm",
    "Transformer2DModel.norm_type": "layer_norm|ada_norm_single",
    "Transformer2DModel.activation_fn": "geglu|gelu|gelu-approximate",
    "Transformer2DModel.data_format": "NCHW",
    "Transformer2DModel.num_vector_embeds": _NOT_SET,
    "MicroDiT.experts_every_n": range(2, _COUNT.stop),
    "LDMBertConfig.pad_token_id": _TOKEN,
    "PixelAutoencoder.colour_space": "rgb",
    "PixelAutoencoder.latent_channels": range(3, 4),
    "CLIPTextConfig.projection_dim": (_SIZE, NULL),
    "T5Config.feed_forward_proj": "relu|gated-gelu|gated-silu",
    "T5Config.relative_attention_num_buckets": range(4, 257),
    "T5Config.relative_attention_max_distance": range(128, _SIZE.stop),
    "CascadeUNet.block_types_per_layer": ([["|".join(CASCADE_BLOCKS)]],),
    "CascadeUNet.num_attention_heads": range(-1, _SIZE.stop),  # below 1 where a level does not attend
    "CascadeUNet.patch_size PaellaVQModel.up_down_scale_factor": range(1, 65),
    "CascadeUNet.timestep_conditioning_type": "sca|crp",
    "CascadeUNet.timestep_ratio_embedding_dim": range(4, _SIZE.stop),
    "PaellaVQModel.levels": range(1, 17),
    "CascadeControlNet.blocks": (_ASCENDING,),
    "CascadeControlNet.bottleneck": "|".join(CONTROL_BOTTLENECKS),
}
_TYPES, _TUPLE = re.compile(r"\b(?:bool|float|int|str)\b"), re.compile(r"[Tt]uple\[(.*?)\]")
_RULE_OF = {name: rule for names, rule in _RULES.items() for name in names.split()}
# Settings of the classes of PaddleNLP's configs that no network here reads.
_T5_UNUSED = (
    "classifier_dropout initializer_factor is_encoder_decoder num_decoder_layers tensor_parallel_output use_cache"
)
_UNUSED = {
    "ldmbert": {"classifier_dropout", "use_cache"},
    "clip": (_CLIP_UNUSED := {"attention_dropout", "initializer_factor", "initializer_range"}),
    "image_encoder": _CLIP_UNUSED,
    "t5": set(_T5_UNUSED.split()),
}
# What transformers and older versions write beside them, and LDMBert's settings by other names.
_OTHERS = (
    "attn_implementation dense_act_fn dropout hidden_size is_gated_act model_type n_positions num_attention_heads "
    "num_hidden_layers output_past tf_legacy_loss torchscript use_bfloat16"
)


class Setting(NamedTuple):
    """What a class takes where a config does not name it, as its source writes it, and the annotation."""

    default: Any
    annotation: ast.expr | None


@cache
def settings_of(kind: str) -> dict[str, Setting]:
    """The settings of a kind of network, by name. Raises EnvironmentProblem."""
    module, _, name = CLASSES[kind].rpartition(".")
    own = _source_of(module).partition(f"\nclass {name}(")[2].partition("\nclass ")[0]
    found = re.search(r"\n    def __init__\((.*?)\)(?: -> None)?:\n", own, re.DOTALL)
    try:
        arguments = ast.parse(f"def made({found[1]}): pass").body[0].args
        defaults = list(map(ast.literal_eval, arguments.defaults))
        given = list(zip(arguments.args[-len(defaults) :], defaults, strict=True))
    except (TypeError, ValueError, SyntaxError) as error:
        raise EnvironmentProblem(_unread(CLASSES[kind], error)) from error
    return {one.arg: Setting(default, one.annotation) for one, default in given if one.arg not in _UNUSED.get(kind, ())}


@cache
def rule_of(kind: str, setting: str) -> tuple:
    """What a setting of a kind of network may be (`fits`). Raises EnvironmentProblem."""
    default, annotation = settings_of(kind)[setting]
    first = default[0] if isinstance(default, tuple) else default  # whose type says more than some annotations
    plain = type(first).__name__ if first is default else f"tuple[{type(first).__name__}]"
    hint = ast.unparse(annotation) if annotation else plain
    word = type(first).__name__ if isinstance(first, (bool, float)) else next(iter(_TYPES.findall(hint)), "")
    rule = _RULE_OF.get(f"{CLASSES[kind].rpartition('.')[2]}.{setting}") or _RULE_OF.get(setting)
    if rule is None and word == "float":
        rule = _SHARE if "drop" in setting else POSITIVE
    elif rule is None:
        rule = {"bool": bool, "int": _COUNT if _IS_COUNT(setting) else _SIZE, "str": _TEXT}.get(word, NULL)
    if not isinstance(rule, tuple):
        lists = [[rule] * (1 if "..." in inner else inner.count(",") + 1) for inner in _TUPLE.findall(hint)]
        rule = (*lists,) if lists and not _TYPES.search(_TUPLE.sub("", hint)) else (rule, *lists)
    return rule if default is not None or fits(None, rule) else (*rule, NULL)


@cache
def ignored_by(kind: str) -> frozenset[str]:
    """What a config of a kind may say that reaches no network, as PretrainedConfig does. Raises EnvironmentProblem."""
    if kind not in _UNUSED:
        return frozenset()
    source = _source_of("paddlenlp.transformers.configuration_utils").partition("def save_pretrained(")[0]
    written = re.findall(r'(?:kwargs\.(?:pop|get)\(|\n {8}\(|\n {12})"(\w+)"', source)
    return frozenset().union(written, _OTHERS.split(), *_UNUSED.values()) - settings_of(kind).keys()


def _source_of(module: str) -> str:
    """The source of a module of an installed package, without an import of it. Raises EnvironmentProblem."""
    package, *inner = module.split(".")
    try:
        return Path(find_spec(package).submodule_search_locations[0], *inner).with_suffix(".py").read_bytes().decode()
    except (AttributeError, OSError, ValueError) as error:
        raise EnvironmentProblem(_unread(module, error)) from error


def _unread(what: str, error: Exception) -> str:
    return f"the settings of {what} cannot be read ({type(error).__name__}: {error}); `ppldm env` shows what to install"


def is_effnet(config) -> bool:
    """True for the config of an EfficientNet encoder."""
    return "stage_channels" in config
