"""Stable Diffusion 1.x and 2.x as one file (.safetensors, .ckpt) without a YAML: its configs follow from its shapes.

Such a file has CompVis' names of UNet and VAE (`names`), and a text encoder in one of two layouts:

    1.x   cond_stage_model.transformer.text_model.…   transformers' CLIPTextModel; early files lack `text_model`
    2.x   cond_stage_model.model.…                    open_clip's, with a last layer that is not used

What shapes do not tell is as in the published models. Noise schedule and prediction are told by a YAML file, the
header, tables of the schedule and keys that are marks (v_pred, ztsnr), which must agree (`read_schedule`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ...diffusion.process import Process
from ...networks.configs import SIZE_EMBEDDING, takes_mask
from ...utils.errors import ModelError
from ..formats.files import read_metadata

UNET, VAE, TEXT = "model.diffusion_model.", "first_stage_model.", "cond_stage_model."
_CLIP, _OPEN_CLIP = f"{TEXT}transformer.", f"{TEXT}model."
_HEAD_WIDTH, _NUM_HEADS, _USED_LAYERS = 64, 8, 23
_PIXELS, SDXL_PIXELS, _FACTOR = 512, 1024, 8
SDXL_SCALE = 0.13025  # of the latents of Stable Diffusion XL's VAE
# What of a VAE shapes do not tell, by the channels of its latents: of Stable Diffusion 1.x and 2.x, and of 3.
_VAES = {
    4: {"scaling_factor": 0.18215},
    16: {"scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False, "use_post_quant_conv": False},
}
V_SIDE = 96  # of the latents that published models of v_prediction draw

# Parts of names that other things than a Stable Diffusion 1.x or 2.x have, and what to do.
THIRD = "model.diffusion_model.joint_blocks."  # of Stable Diffusion 3, whose own layout is `sd3`
SECOND_TEXT = "conditioner.embedders.1.model."  # of Stable Diffusion XL, whose own layout is `sdxl`
OTHERS = {
    "conditioner.embedders.": "a refiner of Stable Diffusion XL, which is not supported; give the base",
    "double_blocks.": "Flux, which is not supported",
    "control_model.": "a ControlNet in CompVis' layout; give one in the layout of diffusers, beside its base",
    "string_to_param": "a textual inversion; give its base model",
    **dict.fromkeys(
        ("lora_unet_", "lora_te_", ".lora_A.", ".lora_down."), "a LoRA; give its base model, and this file with --lora"
    ),
}
# What else a whole CLIP has, which hidden states of captions do not depend on.
_NOT_TEXT_MODEL = ("text_projection", "logit_scale", "vision_model.", "visual_projection")
_OPEN_CLIP_NAMES = {
    "ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}  # fmt: skip
_OPEN_CLIP_TOP = {
    "token_embedding.weight": "embeddings.token_embedding.weight",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_final.weight": "final_layer_norm.weight",
    "ln_final.bias": "final_layer_norm.bias",
}
_SAID = ("epsilon", "v_prediction")  # of a model in a single file
_V_KEY, _ZERO_KEY, _EDM_KEYS = "v_pred", "ztsnr", ("edm_mean", "edm_std", "edm_vpred.")
_PREDICTIONS = {"epsilon": "epsilon", "eps": "epsilon", "v": "v_prediction", "v_prediction": "v_prediction"}
# What headers say of the prediction, as it is or by the name of a published model.
_SPEC, _ARCHITECTURE = ("modelspec.prediction_type", "modelspec.predict_key"), "modelspec.architecture"
_ARCHITECTURES = {"stable-diffusion-v2-512": "epsilon", "stable-diffusion-v2-768-v": "v_prediction"}
# Buffers from which abar_t follows; half precision must not make a schedule another one.
TABLES = {
    "alphas_cumprod": lambda table: table,
    "betas": lambda table: np.cumprod(1.0 - table),
    "denoiser.sigmas": lambda table: np.sort(1.0 / (1.0 + table**2))[::-1],
}
_ROUNDING = 5e-3


def is_open_clip(names: Iterable[str]) -> bool:
    """Whether a file with these names has the text encoder of 2.x."""
    return any(name.startswith(_OPEN_CLIP) for name in names)


def has_clip(names: Iterable[str]) -> bool:
    """Whether a file with these names has a CLIP, of either layout."""
    names = set(names)
    clip = (f"{_CLIP}text_model.", f"{_CLIP}embeddings.")
    return is_open_clip(names) or any(name.startswith(clip) for name in names)


def configs_by_shapes(arrays: Mapping[str, np.ndarray], source) -> dict[str, dict]:
    """The configs of the components whose arrays, by the file's names, are there. Raises ModelError."""
    configs = {}
    shapes = {name: array.shape for name, array in arrays.items()}
    readers = (("unet", UNET, _unet), ("vae", VAE, _vae), ("text_encoder", TEXT, _text_encoder))
    for kind, prefix, read in readers:
        own = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        if own:
            try:
                configs[kind] = read(own, source)
            except (KeyError, IndexError) as error:
                raise ModelError(
                    f"{source} lacks {prefix}{error.args[0]}, or has it in another shape; copy it again"
                ) from error
    return configs


def read_schedule(
    model, arrays: Mapping[str, np.ndarray], names: Iterable[str], schedule: dict, described: bool, second: bool
) -> dict:
    """The noise schedule of a single file, a `source.ModelSource`, and its prediction, which a 2.x (`second`) must say.
    schedule: that of its YAML file where it is `described`, else the published one. Raises ModelError."""
    path, given, assumed = model.path, model.prediction_type, model.assumed_prediction
    if given and given not in _SAID:
        raise ModelError(f"--prediction-type {given} of {path} must be epsilon or v_prediction")
    if odd := next((name for name in sorted(names) if name.startswith(_EDM_KEYS)), None):
        raise ModelError(f"{path} has {odd}: it was trained on the noise levels of EDM, which is not supported")
    told = given or _said_prediction(path, names, schedule["prediction_type"] if described else None)
    marks = [_ZERO_KEY] * (_ZERO_KEY in names) + [
        name for name in TABLES if name in arrays and _ends_in_noise(arrays[name], name, schedule, path)
    ]
    if marks and not told:
        raise ModelError(f"{path} says by {marks[0]} that its last timestep is pure noise, but not what it predicts; "
                         "add --prediction-type v_prediction")  # fmt: skip
    if not (told := told or (assumed if assumed in _SAID else None)) and second:
        raise ModelError(
            f"{path} is a Stable Diffusion 2.x and does not say what it predicts; add --prediction-type v_prediction "
            "(2.0 and 2.1 for 768 pixels) or epsilon (2-base, 2.1-base and 2-inpainting)"
        )
    zero = {"rescale_betas_zero_snr": True} if marks or model.zero_snr else {}
    return {**schedule, **zero, "prediction_type": told or "epsilon"}


def _said_prediction(path, names: Iterable[str], of_yaml: str | None) -> str | None:
    """What all of a file's statements say; None where there is none. Raises ModelError."""
    metadata, found = read_metadata(path), {"its YAML file": of_yaml} if of_yaml else {}
    for key in _SPEC:
        if value := metadata.get(key, ""):
            if value.lower() not in _PREDICTIONS:
                raise ModelError(f"{path} says {key} {value!r:.80}, which is not supported; known: epsilon, v")
            found[key] = _PREDICTIONS[value.lower()]
    if architecture := _ARCHITECTURES.get(metadata.get(_ARCHITECTURE, "").partition("/")[0]):
        found[_ARCHITECTURE] = architecture
    if _V_KEY in names:
        found[f"the key {_V_KEY}"] = "v_prediction"
    if len({*found.values()}) > 1:
        said = " and ".join(f"{where} ({what})" for where, what in found.items())
        raise ModelError(f"{path}: {said} do not agree on what it predicts; say it with --prediction-type")
    return next(iter(found.values()), None)


def _ends_in_noise(table: np.ndarray, name: str, schedule: dict, path) -> bool:
    """Whether a table is that of `schedule` shifted to end in pure noise. Raises ModelError where it is neither."""
    own = Process.of({**schedule, "prediction_type": "v_prediction"}).schedule
    apart = [np.inf, np.inf]
    if table.size == own.num_train_timesteps and np.isfinite(table).all():
        with np.errstate(all="ignore"):
            stored = TABLES[name](table.astype(np.float64).reshape(-1))
        both = (replace(own, rescale_betas_zero_snr=zero).alphas_cumprod() for zero in (False, True))
        apart = [np.abs(stored - one).max() for one in both]
    if not min(apart) <= _ROUNDING:
        raise ModelError(
            f"{path}: its table {name} is of another noise schedule than betas from {own.beta_start:g} to "
            f"{own.beta_end:g} in {own.num_train_timesteps} steps; give its YAML file with --original-config-file"
        )
    return apart[1] < apart[0]


def text_encoder_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The used arrays of a text encoder by the names of transformers' CLIPTextModel, in PyTorch's orientation."""
    found: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if name.startswith(_OPEN_CLIP):
            found |= from_open_clip(name.removeprefix(_OPEN_CLIP), array)
        elif name.startswith(_CLIP) and not (own := name.removeprefix(_CLIP)).startswith(_NOT_TEXT_MODEL):
            found[f"text_model.{own.removeprefix('text_model.')}"] = array
    layers = _used_layers(arrays) if is_open_clip(arrays) else len(arrays)
    return {name: array for name, array in found.items() if not name.endswith("position_ids") and _layer(name) < layers}


def from_open_clip(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """An array of open_clip's text encoder by the names of transformers' CLIPTextModel; {} of one that is not used."""
    if name in _OPEN_CLIP_TOP:
        return {f"text_model.{_OPEN_CLIP_TOP[name]}": array}
    if not name.startswith("transformer.resblocks."):
        return {}  # logit_scale, text_projection
    number, rest = name.removeprefix("transformer.resblocks.").split(".", 1)
    layer = f"text_model.encoder.layers.{number}"
    if rest.startswith("attn.in_proj_"):
        leaf = rest.removeprefix("attn.in_proj_")
        parts = zip("qkv", np.split(array, 3), strict=True)
        return {f"{layer}.self_attn.{one}_proj.{leaf}": part for one, part in parts}
    inner, _, leaf = rest.rpartition(".")
    return {f"{layer}.{_OPEN_CLIP_NAMES.get(inner, inner)}.{leaf}": array}


def to_open_clip(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What `from_open_clip` gives of all arrays of a text encoder, by the names of open_clip's."""
    found = {}
    top, inner = ({ours: theirs for theirs, ours in one.items()} for one in (_OPEN_CLIP_TOP, _OPEN_CLIP_NAMES))
    for name, array in arrays.items():
        own = name.removeprefix("text_model.")
        if own in top:
            found[top[own]] = array
            continue
        number, rest = own.removeprefix("encoder.layers.").split(".", 1)
        block, _, leaf = rest.rpartition(".")
        layer, start = f"transformer.resblocks.{number}", name.removesuffix(rest)
        if block == "self_attn.q_proj":
            parts = [arrays[f"{start}self_attn.{one}_proj.{leaf}"] for one in "qkv"]
            found[f"{layer}.attn.in_proj_{leaf}"] = np.concatenate(parts)
        elif block not in ("self_attn.k_proj", "self_attn.v_proj"):
            found[f"{layer}.{inner.get(block, block)}.{leaf}"] = array
    return found


def _used_layers(names: Iterable[str]) -> int:
    """Of an open_clip text encoder all but the last; all where the last was left out, with what stands behind it."""
    names = [name.removeprefix(TEXT) for name in names]
    start = "model.transformer.resblocks."
    layers = {name.removeprefix(start).split(".")[0] for name in names if name.startswith(start)}
    return min(len(layers) - ("model.text_projection" in names), _USED_LAYERS)


def _layer(name: str) -> int:
    head, found, rest = name.partition(".layers.")
    return int(rest.split(".")[0]) if found else -1


def _unet(shapes: Mapping[str, tuple], source) -> dict:
    first, out = shapes["input_blocks.0.0.weight"], shapes["out.2.weight"][0]
    if first[1] != out and not takes_mask({"in_channels": first[1], "out_channels": out}, out):
        raise ModelError(
            f"{source}: its UNet takes {first[1]} channels and gives {out}: it is made for depth or editing, which is "
            "not supported; give a plain model, or one for inpainting"
        )
    channels, attention, depths, layers = [], [], [], []
    block, depth = 1, 0
    while (resnet := f"input_blocks.{block}.0.out_layers.3.weight") in shapes:
        depth += 1
        if (
            f"input_blocks.{block + 1}.0.op.weight" in shapes
            or f"input_blocks.{block + 1}.0.in_layers.0.weight" not in shapes
        ):
            channels.append(shapes[resnet][0])
            attention.append(f"input_blocks.{block}.1.proj_in.weight" in shapes)
            depths.append(depth)
            layers.append(max(1, _count(shapes, f"input_blocks.{block}.1.transformer_blocks.")))
            block, depth = block + 1, 0
        block += 1
    if not channels or len(set(depths)) > 1 or not any(attention):
        raise KeyError(f"input_blocks.{block}.0.out_layers.3.weight")
    at = next(name for name in sorted(shapes) if name.endswith(".attn2.to_k.weight"))
    linear = len(shapes[at.partition(".transformer_blocks.")[0] + ".proj_in.weight"]) == 2
    told, label = {}, shapes.get("label_emb.0.0.weight")
    if label and not attention[0] and attention[-1]:  # the base of Stable Diffusion XL
        told = SIZE_EMBEDDING | {"projection_class_embeddings_input_dim": label[1]}
        told |= {"transformer_layers_per_block": layers, "sample_size": SDXL_PIXELS // _FACTOR}
    depth = max(1, _count(shapes, "middle_block.1.transformer_blocks."))
    if depth != layers[-1] if told else label or {depth, *layers} != {1}:
        raise ModelError(
            f"{source} holds a UNet that is told more than captions, or has deeper blocks, and is not the base of "
            "Stable Diffusion XL; not supported"
        )
    return unet_config(
        channels,
        attention,
        linear,
        in_channels=first[1],
        out_channels=out,
        layers_per_block=depths[0],
        cross_attention_dim=shapes[at][1],
        attention_head_dim=[max(1, one // _HEAD_WIDTH) for one in channels] if linear else _NUM_HEADS,
        **{"sample_size": _PIXELS // _FACTOR} | told,
    )


def _count(shapes: Mapping[str, tuple], start: str) -> int:
    """How many numbers follow this start of a name."""
    return len({name.removeprefix(start).partition(".")[0] for name in shapes if name.startswith(start)})


def unet_config(channels: list[int], attention: list[bool], linear, **others) -> dict:
    """The config of a UNet of CompVis, by each level. diffusers' attention_head_dim is the number of heads."""
    return {
        "down_block_types": ["CrossAttnDownBlock2D" if one else "DownBlock2D" for one in attention],
        "up_block_types": ["CrossAttnUpBlock2D" if one else "UpBlock2D" for one in reversed(attention)],
        "block_out_channels": channels,
        "norm_num_groups": 32,
        **({"use_linear_projection": True} if linear else {}),
        **others,
    }


def vae_config(channels: list[int], **others) -> dict:
    """The config of an autoencoder of CompVis, by the channels of each level."""
    return {
        "down_block_types": ["DownEncoderBlock2D"] * len(channels),
        "up_block_types": ["UpDecoderBlock2D"] * len(channels),
        "block_out_channels": channels,
        "norm_num_groups": 32,
        **others,
    }


def _vae(shapes: Mapping[str, tuple], source) -> dict:
    channels = []
    while (resnet := f"encoder.down.{len(channels)}.block.0.conv1.weight") in shapes:
        channels.append(shapes[resnet][0])
    layers = 0
    while f"encoder.down.0.block.{layers}.conv1.weight" in shapes:
        layers += 1
    if not channels:
        raise KeyError("encoder.down.0.block.0.conv1.weight")
    latent_channels = shapes["decoder.conv_in.weight"][1]
    if latent_channels not in _VAES:
        raise ModelError(f"{source} has a VAE of {latent_channels} channels, and does not say how its latents are "
                         "scaled; give the folder of diffusers")  # fmt: skip
    return vae_config(
        channels,
        sample_size=_PIXELS,
        in_channels=shapes["encoder.conv_in.weight"][1],
        out_channels=shapes["decoder.conv_out.weight"][0],
        layers_per_block=layers,
        latent_channels=latent_channels,
        **_VAES[latent_channels],
    )


def _text_encoder(shapes: Mapping[str, tuple], source) -> dict:
    names = [f"{TEXT}{name}" for name in shapes]
    second = is_open_clip(names)
    own = text_encoder_arrays(
        {f"{TEXT}{name}": np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    )
    words, width = own["text_model.embeddings.token_embedding.weight"].shape
    return {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": own["text_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": 1 + max(map(_layer, own)),
        "num_attention_heads": max(1, width // _HEAD_WIDTH),
        "max_position_embeddings": own["text_model.embeddings.position_embedding.weight"].shape[0],
        "hidden_act": "gelu" if second else "quick_gelu",
        "layer_norm_eps": 1e-5,
        "projection_dim": 512 if second else width,
    }
