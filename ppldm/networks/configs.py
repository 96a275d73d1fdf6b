"""The one reader for configs of networks. No paddle is imported and nothing built: a config is refused in milliseconds.

A kind is one of LABELS; a `text_encoder` is `ldmbert`, `clip` or `t5`, a `transformer` `uvit`, `dit`, `microdit` or
`sd3` or `single_stream`, as the config says (`table_of`). All return or take configs completed with the classes'
defaults. Every function raises the `error` it is given, in one line that names the file, the setting, its value and
what it must be.
"""

import json

from ..config.network_files import find_network_file
from ..utils.errors import ConfigError, ModelError, PpldmError
from ..utils.files import local_path, read_json_object
from ..utils.text import did_you_mean
from .config_fields import CLASSES, NETWORKS, REQUIRED, describe, fits, ignored_by, is_effnet, rule_of, settings_of

_NAMES = {
    "vae": "a VAE", "unet": "a UNet", "controlnet": "a ControlNet", "ldmbert": "an LDMBert text encoder",
    "clip": "a CLIP text encoder", "t5": "a T5 text encoder", "cascade_prior": "a Stable Cascade prior",
    "cascade_decoder": "a Stable Cascade decoder", "effnet": "an EfficientNet encoder",
    "vqgan": "a Paella autoencoder", "image_encoder": "a CLIP image encoder", "uvit": "a UViT", "dit": "a DiT",
    "cascade_controlnet": "a Stable Cascade ControlNet", "microdit": "a MicroDiT", "text_encoder": "a text encoder",
    "single_stream": "a single-stream transformer", "pixels": "a VAE of pixels",
    "sd3": "a transformer of Stable Diffusion 3", "text_encoder_2": "a second text encoder",
    "text_encoder_3": "a third text encoder",
    "projected_text_encoder": "a text encoder with a projection", "transformer": "a transformer",
}  # fmt: skip
LABELS = {kind: name.partition(" ")[2] for kind, name in _NAMES.items()}
# Of these kinds, the one that a config names more settings of; the first where it names none.
_TABLES = {
    "vae": ("vae", "pixels"), "text_encoder": ("ldmbert", "clip", "t5"), "projected_text_encoder": ("clip",),
    "text_encoder_2": ("clip",), "text_encoder_3": ("t5",),
    "transformer": ("uvit", "dit", "microdit", "sd3", "single_stream"),
}  # fmt: skip
CLIPS = ("text_encoder", "text_encoder_2")  # of Stable Diffusion 3 and XL
TEXT_ENCODERS = (*CLIPS, "text_encoder_3")  # with a T5
# What a network cannot do without once another setting has this value (any, where it is None).
_UNET_NEEDS = (
    ("encoder_hid_dim_type", None, "encoder_hid_dim"),
    ("class_embed_type", "projection", "projection_class_embeddings_input_dim"),
    ("class_embed_type", "simple_projection", "projection_class_embeddings_input_dim"),
    ("addition_embed_type", "text_time", "addition_time_embed_dim"),
    ("addition_embed_type", "text_time", "projection_class_embeddings_input_dim"),
)
# Settings with which a UNet asks for more than noisy latents, timesteps and hidden states of the caption.
_FURTHER_INPUTS = (
    "class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim", "time_cond_proj_dim",
)  # fmt: skip
POOLS_CAPTIONS = "text"  # addition_embed_type of one that adds pooled hidden states to the timestep, as DeepFloyd's IF
# With these a UNet embeds six sizes as that of SDXL does (arXiv:2307.01952, section 2.2), of which each sinusoid has
# 256 numbers; for the state of the whole caption, which stands before them there, they leave no room.
_SIZES, _SINUSOIDS = 6, 256
SIZE_EMBEDDING = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": _SINUSOIDS,
    "projection_class_embeddings_input_dim": _SIZES * _SINUSOIDS,
}
_TOLD_SIZES = 128  # side of the latents at which ppdiffusers and diffusers make a DiT with layers for sizes
EFFNET_STAGES, EFFNET_FACTOR = 6, 32  # pixels a side to one latent
RGB, _SHOWN_CHARACTERS = 3, 60
# Where a network has levels, a list has an entry for each, as the first of these that it has; but these lists have not.
_LEVELS = ("down_block_types", "block_out_channels")
_OTHER_LISTS = {
    "sample_size", "latents_mean", "latents_std", "conditioning_embedding_out_channels", "timestep_conditioning_type",
    "switch_level",
}  # fmt: skip
# What must divide what, in every network that has both.
_DIVISORS = (
    ("num_attention_heads", "hidden_size"), ("head_dim", "dim"), ("head_dim", "patch_mixer_dim"),
    ("patch_size", "sample_size"),
)  # fmt: skip

# (component, its setting, another component, its setting): equal where both are there.
_JOINTS = (
    ("vae", "latent_channels", "transformer", "in_channels"),
    ("effnet", "latent_channels", "prior", "in_channels"),
    ("text_encoder", "hidden_size", "prior", "clip_text_in_channels"),
    ("text_encoder", "projection_dim", "prior", "clip_text_pooled_in_channels"),
    ("image_encoder", "projection_dim", "prior", "clip_image_in_channels"),
    ("effnet", "latent_channels", "decoder", "effnet_in_channels"),
    ("vqgan", "latent_channels", "decoder", "in_channels"),
    ("text_encoder", "projection_dim", "decoder", "clip_text_pooled_in_channels"),
)
_CONTROL_CHANNELS = (16, 32, 96, 256)  # of the layers that take a control image to latents; each halves the sides
# Of what a UNet has and the copy of its encoder has not, all that may be as it likes. The rest must be at its default.
_NOT_COPIED = {
    "sample_size", "out_channels", "up_block_types", "reverse_transformer_layers_per_block", "time_cond_proj_dim",
    "conv_out_kernel", "data_format",
}  # fmt: skip


def check_config(kind: str, config: dict, source, error: type[PpldmError] = ModelError, new: bool = False) -> dict:
    """`config` with the class's defaults, without keys that start with `_`. Of a `new` network what decides its size
    must be named, and every key known. Else an unknown null asks for nothing. Raises `error`."""
    table = table_of(kind, config)
    settings, what = settings_of(table), _NAMES[table]
    given = {key: config[key] for key in settings if key in config}
    missing = [key for key in REQUIRED[table].split() if key not in given]
    others = [key for key in config if not key.startswith("_") and key not in settings]
    unknown = [key for key in others if key not in ignored_by(table)]
    if len(unknown) > bool(not missing):  # else it is of this kind, with a word misspelt
        known = {name: len(config.keys() & (settings_of(name).keys() | ignored_by(name))) for name in CLASSES}
        meant = max(known, key=known.get)
        if known[meant] > known[table]:
            raise error(f"{source} is the config of {_NAMES[meant]}, and {what} is wanted here; give another file")
    for key in unknown:
        if new or config[key] is not None:
            raise error(f"{source}: no setting {key!r} is known for {what}; {did_you_mean(key, settings)}")
    if missing and (new or not (given or unknown)):
        raise error(f"{source} is not a config of {what}: it does not say {', '.join(missing)}; add what is missing")
    found = {key: _plain(given.get(key, setting.default)) for key, setting in settings.items()}
    for key in given:
        if not fits(found[key], rule := rule_of(table, key)):
            raise error(f"{source}: {key} {_shown(found[key])} must be {describe(rule)}; correct it")
    if problem := next(_problems(table, found), None):
        raise error(f"{source}: {problem}; correct it")
    return found


def read_new_config(kind: str, path, flag: str) -> dict:
    """The completed config in the JSON file that `flag` names, for a network to build anew. Raises ConfigError."""
    return check_config(kind, read_json_config(path, flag), path, ConfigError, new=True)


def read_json_config(path, flag: str) -> dict:
    """The object in the JSON file that `flag` names. Raises ConfigError naming both."""
    return read_json_object(find_network_file(path, flag), ConfigError, f"{flag} names a JSON file")


def is_ldmbert(config: dict) -> bool:
    """True for the config of an LDMBert; else it is a CLIP's or a T5's."""
    return table_of("text_encoder", config) == "ldmbert"


def is_t5(config: dict) -> bool:
    """True for the config of a T5."""
    return table_of("text_encoder", config) == "t5"


def is_uvit(transformer: dict) -> bool:
    """True for the config of a UViT; else it is another transformer's."""
    return table_of("transformer", transformer) == "uvit"


def is_sd3(transformer: dict) -> bool:
    """True for the config of a transformer of Stable Diffusion 3."""
    return table_of("transformer", transformer) == "sd3"


def clip_widths(configs: dict, pooled: int) -> dict[str, tuple[int, int]]:
    """(width of the states, of the projection) of each of CLIPS by its config; of one that is not there both are what
    the other one leaves of `pooled`, as both of Stable Diffusion 3 project to their own width."""
    known = {name: (configs[name]["hidden_size"], configs[name]["projection_dim"]) for name in CLIPS if name in configs}
    rest = max(0, pooled - sum(projected for _, projected in known.values()))
    return {name: known.get(name, (rest, rest)) for name in CLIPS if known or name == CLIPS[0]}


def hidden_width(text_encoder) -> int:
    """Of the hidden states of a text encoder, by its config."""
    return text_encoder["d_model" if "d_model" in text_encoder else "hidden_size"]


def table_of(kind: str, config: dict) -> str:
    """The name in CLASSES of the settings of a network, by its kind and config."""
    tables = {table: settings_of(table).keys() for table in _TABLES.get(kind, (kind,))}
    shared = set.intersection(*map(set, tables.values()))
    return max(tables, key=lambda table: len((tables[table] & config.keys()) - shared))


def network_class(kind: str, config: dict) -> str:
    """Where the class of a network is, by its kind, which may be one without settings, and its config."""
    if kind in NETWORKS:
        return NETWORKS[kind]
    table = table_of(kind, config)
    return NETWORKS.get(table, CLASSES[table])


def downscale_factor(encoder) -> int:
    """Pixels a side to one latent, by the config of a VAE, 8 for four blocks, of a Paella autoencoder, 4 for two
    levels, of pixels 1, or of an EfficientNet encoder."""
    if "up_down_scale_factor" in encoder:
        return encoder["up_down_scale_factor"] * 2 ** (encoder["levels"] - 1)
    if is_pixels(encoder):
        return 1
    return EFFNET_FACTOR if is_effnet(encoder) else 2 ** (len(encoder["block_out_channels"]) - 1)


def latent_shape(vae, height: int, width: int) -> tuple[int, int, int]:
    """(C, h, w) of latents by a VAE's config, of pictures so large in pixels. Raises ConfigError for wrong ones."""
    factor = downscale_factor(vae)
    if min(height, width) <= 0 or height % factor or width % factor:
        raise ConfigError(f"width {width}, height {height}: choose multiples of {factor}, as the VAE needs")
    return (vae["latent_channels"], height // factor, width // factor)


def is_pixels(vae) -> bool:
    """Whether a config is a `PixelAutoencoder`'s, which leaves pictures as they are, and not a real VAE's."""
    return "colour_space" in vae


def is_shifted(vae) -> bool:
    """Whether a VAE's latents are not only scaled for a model that diffuses them, by its config."""
    return any(vae.get(name) for name in ("shift_factor", "latents_mean"))


def with_statistics(vae: dict, file) -> dict:
    """A VAE's completed config by which its latents have mean 0 and deviation 1 in each channel, where they have those
    of a JSON file, as `ppldm precompute --json` prints them. Raises ConfigError."""
    said = read_json_object(local_path(file), ConfigError, "--latents_statistics names a JSON file")
    if not (said.get("latents_mean") and said.get("latents_std")):
        raise ConfigError(f"{file} has no latents_mean and latents_std; `ppldm precompute --json` prints them")
    stated = {name: said[name] for name in ("latents_mean", "latents_std")}
    return check_config("vae", vae | {"scaling_factor": 1.0, "shift_factor": None} | stated, file, ConfigError)


def check_fit(configs: dict[str, dict], source: str = "", error: type[PpldmError] = ModelError, drawn=False) -> None:
    """Raises `error` where completed configs of a text-to-image model, by name, do not fit one another, or one asks for
    what such a model does not give it. drawn: it is not trained, so that its UNet may be one that `takes_mask`."""
    if problem := next(_misfits(configs, drawn), None):
        raise error(f"{source}: {problem}" if source else problem)


def controlnet_config(unet: dict, vae, num_channels: int) -> dict:
    """The completed config of a control network beside a UNet. Raises ModelError for one that cannot be copied."""
    settings, copied = settings_of("unet"), settings_of("controlnet").keys() & unet.keys()
    bound = settings.keys() - copied - _NOT_COPIED
    odd = {name: unet[name] for name in unet if name in bound and unet[name] not in (settings[name].default, None)}
    lists = {name: unet[name] for name in ("layers_per_block", "cross_attention_dim") if isinstance(unet[name], list)}
    if unet["mid_block_type"] is None or odd or lists:
        odd = {"mid_block_type": unet["mid_block_type"], **odd, **lists}
        shown = ", ".join(f"{name} {value}" for name, value in odd.items())
        raise ModelError(f"no ControlNet can be made for this UNet ({shown}); start from another")
    halvings = downscale_factor(vae).bit_length() - 1
    last = _CONTROL_CHANNELS[-1:] * max(0, halvings + 1 - len(_CONTROL_CHANNELS))
    own = {
        "conditioning_channels": num_channels,
        "conditioning_embedding_out_channels": [*_CONTROL_CHANNELS[: halvings + 1], *last],
    }
    return check_config("controlnet", {name: unet[name] for name in copied} | own, "the UNet")


def takes_mask(unet, channels: int) -> bool:
    """Whether a UNet, by its config, sees a mask and the masked picture beside latents of so many channels."""
    return (unet["in_channels"], unet["out_channels"]) == (2 * channels + 1, channels)


def pooled_width(unet) -> int | None:
    """Of the state of a whole caption that a UNet, by its config, is told before sizes; 0 of one that is told sizes
    alone, None of one that is told no sizes."""
    if unet.get("addition_embed_type") != "text_time":
        return None
    return unet["projection_class_embeddings_input_dim"] - _SIZES * unet["addition_time_embed_dim"]


def takes_sizes(unet) -> bool:
    """Whether a UNet, by its config, is told sizes and nothing else beside noisy latents, timesteps and captions."""
    return pooled_width(unet) == 0


def is_sdxl(unet) -> bool:
    """True for the config of a UNet of Stable Diffusion XL, which is told of whole captions and sizes."""
    return (pooled_width(unet) or 0) > 0


def check_sizes_taken(unet: dict, wanted: bool) -> None:
    """Raises ModelError where a UNet is to be told sizes and does not take them, or the other way about."""
    if wanted and pooled_width(unet) is None:
        settings = ", ".join(f"{name} {value}" for name, value in SIZE_EMBEDDING.items())
        raise ModelError(
            f"--size_conditioning: the UNet has no layers for sizes ({settings} in its config); start from one that "
            "was trained with them, or omit it"
        )
    if takes_sizes(unet) and not wanted:
        raise ModelError("the UNet was made to be told sizes (addition_embed_type text_time); add --size_conditioning")


def check_tokenizer_fit(text_encoder: dict, vocab_size: int, max_length: int) -> None:
    """Raises ModelError where a tokenizer has more words, or captions more tokens, than the text encoder knows."""
    words, positions = text_encoder["vocab_size"], text_encoder.get("max_position_embeddings", max_length)
    if words < vocab_size or positions < max_length:
        raise ModelError(
            f"the text encoder knows {words} words and {positions} positions, the tokenizer {vocab_size} and "
            f"{max_length}; use the model's own tokenizer and --model_max_length"
        )


def _misfits(configs: dict[str, dict], drawn: bool):
    kinds = ("vae", "text_encoder", "unet", "transformer", "controlnet")
    vae, text_encoder, unet, transformer, controlnet = map(configs.get, kinds)
    latents, width = vae and vae["latent_channels"], text_encoder and hidden_width(text_encoder)
    if unet and is_sdxl(unet) and "text_encoder_2" in configs:
        second = configs["text_encoder_2"]
        text_encoder, width = (text_encoder, width + second["hidden_size"]) if text_encoder and second else (None, None)
        if second and second["projection_dim"] != pooled_width(unet):
            yield (
                f"the UNet takes a state of {pooled_width(unet)} numbers of a caption, and text_encoder_2 projects to "
                f"{second['projection_dim']}; choose networks that were made for one another"
            )
    elif unet and pooled_width(unet):
        yield (
            "the UNet asks for an input that a text-to-image model does not give it, but Stable Diffusion XL "
            "(`family: sdxl`)"
        )
    if vae and (vae["in_channels"], vae["out_channels"]) != (RGB, RGB):
        yield f"the VAE takes {vae['in_channels']} channels and gives {vae['out_channels']}; pictures have {RGB}"
    if vae and unet and takes_mask(unet, latents):
        if not drawn:
            yield "the UNet takes a mask: models for inpainting draw and are not trained; start from one without"
    elif vae and unet and (unet["in_channels"], unet["out_channels"]) != (latents, latents):
        yield (
            f"the UNet takes {unet['in_channels']} channels and gives {unet['out_channels']}, and the VAE gives "
            f"{latents}; in_channels and out_channels of --unet_config_file must be the VAE's latent_channels"
        )
    if transformer and is_sd3(transformer):
        yield from _sd3_misfits(configs, transformer)
        transformer = None
    reads = "clip_dim" if transformer and is_uvit(transformer) else "caption_channels"
    for name, network, key in (("UNet", unet, "cross_attention_dim"), ("transformer", transformer, reads)):
        own = network[key] if network and text_encoder else width
        if set(own if isinstance(own, list) else [own]) != {width}:
            yield (
                f"the {name} attends to width {_shown(own)} and the text encoder gives {width}; {key} of the {name} "
                "must be d_model (CLIP: hidden_size) of the text encoder"
            )
    for name, key, other, needed in _JOINTS:
        one, two = configs.get(name), configs.get(other)
        if one and two and one[key] != two[needed]:
            yield (
                f"the {name} gives {key} {one[key]}, and the {other} takes {needed} {two[needed]}; choose networks "
                "that were made for one another"
            )
    for key in sorted(controlnet.keys() & unet.keys()) if controlnet and unet else ():
        if controlnet[key] != unet[key]:
            own, other = _shown(controlnet[key]), _shown(unet[key])
            yield f"the ControlNet has {key} {own} and the UNet {other}; it was made for another"
    for key in _FURTHER_INPUTS:
        if unet and unet[key] not in (None, POOLS_CAPTIONS, SIZE_EMBEDDING["addition_embed_type"]):
            yield f"the UNet's {key} {_shown(unet[key])} asks for an input that a text-to-image model does not give it"


def _sd3_misfits(configs: dict[str, dict], transformer: dict):
    """Of text encoders that are known."""
    reads, pools = transformer["joint_attention_dim"], transformer["pooled_projection_dim"]
    clips, t5 = [name for name in CLIPS if configs.get(name)], configs.get("text_encoder_3")
    widths = clip_widths({name: configs[name] for name in clips}, pools).values()
    states, pooled = sum(width for width, _ in widths), sum(projected for _, projected in widths)
    if clips and (pooled != pools or states > reads):
        yield (
            f"the transformer takes pooled_projection_dim {pools} and joint_attention_dim {reads}, and the CLIPs "
            f"({', '.join(clips)}) give {pooled} by projection_dim and {states} by hidden_size; choose networks that "
            "were made for one another"
        )
    if t5 and hidden_width(t5) != reads:
        yield f"the transformer takes joint_attention_dim {reads}, and text_encoder_3 gives {hidden_width(t5)}"


def _problems(table: str, config: dict):
    """What is wrong with settings that may each be by itself: first laws of every network that has them."""
    levels = next((name for name in _LEVELS if name in config), None)
    for name, value in config.items():
        if levels and isinstance(value, list) and name not in _OTHER_LISTS and len(value) != len(config[levels]):
            yield f"{name} has {len(value)} entries, and {levels} {len(config[levels])}"
    groups = config.get("norm_num_groups")
    for name in ("block_out_channels", "down_block_out_channels", "up_block_out_channels") if groups else ():
        if any(one % groups for one in config.get(name) or ()):
            yield f"norm_num_groups {groups} does not divide all of {name} {config[name]}"
    for divisor, name in _DIVISORS:
        if config.get(name) and config.get(divisor) and config[name] % config[divisor]:
            yield f"{divisor} {config[divisor]} does not divide {name} {config[name]}"
    match table:
        case "unet":
            yield from _unet_problems(config)
        case "uvit" | "dit" | "microdit" | "sd3" | "single_stream":
            yield from _transformer_problems(table, config)
        case "cascade_prior" | "cascade_decoder":
            yield from _cascade_problems(table == "cascade_prior", config)
        case "ldmbert" if config["pad_token_id"] >= config["vocab_size"]:
            yield f"pad_token_id {config['pad_token_id']} must be below vocab_size {config['vocab_size']}"
        case "vae" | "pixels":
            yield from _vae_problems(config)
        case "vqgan" if config["embed_dim"] % 2 ** (config["levels"] - 1):
            yield f"embed_dim {config['embed_dim']} cannot be halved for each of levels {config['levels']}"
        case "effnet" | "cascade_controlnet":
            channels, layers = len(config["stage_channels"]), len(config["stage_layers"])
            if layers != EFFNET_STAGES or channels != layers + 2:
                yield (
                    f"stage_channels has {channels} entries and stage_layers {layers}; there are {EFFNET_STAGES} "
                    "stages, and one convolution before and one behind them"
                )


def _vae_problems(config: dict):
    stated = [name for name in ("latents_mean", "latents_std") if config[name]]
    for name in stated:
        if len(config[name]) != config["latent_channels"]:
            yield f"{name} has {len(config[name])} entries, and latent_channels is {config['latent_channels']}"
    if len(stated) == 1 or (stated and config["shift_factor"]):
        yield "latents_mean and latents_std must be there together, without a shift_factor"


def _unet_problems(config: dict):
    channels, heads = config["block_out_channels"], config["attention_head_dim"]
    heads = heads if isinstance(heads, list) else [heads] * len(channels)
    blocks = [*zip(config["down_block_types"], reversed(config["up_block_types"]), strict=True)]
    blocks[-1] += (config["mid_block_type"] or "",)
    for number, names in enumerate(blocks):
        if "Attn" in "".join(names) and channels[number] % heads[number]:
            yield f"attention_head_dim {heads[number]} does not divide block_out_channels {channels[number]}"
    if channels[0] // 2 <= config["freq_shift"]:
        yield f"freq_shift {config['freq_shift']} must be below half of the first of block_out_channels {channels[0]}"
    for key, value, needed in _UNET_NEEDS:
        if config[key] is not None and config[key] == (value or config[key]) and config[needed] is None:
            yield f"{key} {config[key]} needs {needed}"
    width, heads = config["cross_attention_dim"], config["addition_embed_type_num_heads"]
    if config["addition_embed_type"] == POOLS_CAPTIONS and (not isinstance(width, int) or width % heads):
        yield f"addition_embed_type_num_heads {heads} does not divide cross_attention_dim {_shown(width)}"


def _transformer_problems(table: str, config: dict):
    takes, gives, side = config["in_channels"], config.get("out_channels"), config["sample_size"]
    if not (side and takes and config["patch_size"]):
        yield "sample_size, in_channels and patch_size must be numbers"
    if turned := {"microdit": "dim", "single_stream": "head_dim"}.get(table):
        if config[turned] % 4:
            yield f"{turned} {config[turned]} must be a multiple of 4, which positions take"
    elif gives not in (None, takes, *([2 * takes] if table == "dit" else [])):
        yield f"out_channels {gives} must be in_channels {takes}, or {'twice as many' if table == 'dit' else 'null'}"
    if table == "uvit" and config["num_layers"] % 2:
        yield f"num_layers {config['num_layers']} must be even: half of the blocks have a skip from the other half"
    if table not in ("dit", "sd3"):
        return
    width = config["num_attention_heads"] * config["attention_head_dim"]
    if width % 4:
        yield f"num_attention_heads times attention_head_dim, {width}, must be a multiple of 4, which positions take"
    if table == "sd3":
        if config["caption_projection_dim"] != width:
            yield f"caption_projection_dim {config['caption_projection_dim']} must be heads times their width, {width}"
        return
    if config["norm_type"] != "ada_norm_single" or not config["caption_channels"]:
        yield (
            f"norm_type {config['norm_type']} must be ada_norm_single with caption_channels: other DiTs read no caption"
        )
    if config["cross_attention_dim"] != width:
        yield f"cross_attention_dim {config['cross_attention_dim']} must be heads times their width, {width}"
    if not config["num_embeds_ada_norm"]:
        yield "num_embeds_ada_norm null must be a number, 1000 as published: diffusers builds no DiT without"
    if side == _TOLD_SIZES:
        yield f"sample_size {_TOLD_SIZES} makes a DiT that is told sizes and aspect ratios, which is not supported"


def _cascade_problems(is_prior: bool, config: dict):
    widths, heads, switches = (config[key] for key in ("block_out_channels", "num_attention_heads", "switch_level"))
    if switches and len(switches) != len(widths) - 1:
        yield f"switch_level has {len(switches)} entries, and there are {len(widths) - 1} steps between levels"
    for width, number, blocks in zip(widths, heads, config["block_types_per_layer"], strict=True):
        if "SDCascadeAttnBlock" in blocks and (number < 1 or width % number):
            yield f"num_attention_heads {number} does not divide block_out_channels {width}"
    if config["in_channels"] != config["out_channels"]:
        yield f"in_channels {config['in_channels']} and out_channels {config['out_channels']} differ"
    if is_prior and config["effnet_in_channels"]:
        yield f"effnet_in_channels {config['effnet_in_channels']} is for a decoder, and this is a prior"
    elif not is_prior and config["effnet_in_channels"] is None:
        yield "effnet_in_channels null: a decoder is told the latents of the prior"
    for key in ("clip_text_in_channels", "clip_image_in_channels") if is_prior else ():
        if config[key] is None:
            yield f"{key} null: a prior attends to captions and pictures"


def _plain(value):
    """Tuples, as a live config has them, as the lists that JSON has."""
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _shown(value) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
