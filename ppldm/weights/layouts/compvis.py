"""CompVis' latent diffusion: a .ckpt with all components in one state dict, and the YAML file that describes them.

CompVis' classes fix what the YAML does not name: 32 groups in every GroupNorm, and in the text encoder 8 heads of 64
and a feed-forward of 4 times the width. A model with other values cannot be written for them and is refused.
"""

import re
from pathlib import Path

import numpy as np
import yaml

from ...config.network_files import CONFIG_DIR
from ...networks.configs import is_shifted
from ...utils.errors import ModelError
from ...utils.files import read_json_object, read_small
from ..components import ComponentWeights, Weights, turn_linear
from ..configs import PUBLISHED_SCHEDULE, check_schedule, complete_config
from ..folders import EXPORTED_CKPT
from ..formats.files import read_arrays, read_names, require_few_layers
from ..names import Unmapped, rename, text_encoder_names, unet_names, vae_names
from . import single_file

PREFIXES = {"unet": "model.diffusion_model.", "vae": "first_stage_model.", "text_encoder": "cond_stage_model."}
NAMES = {"unet": unet_names, "vae": vae_names, "text_encoder": text_encoder_names}
_GROUPS, _HEADS, _HEAD_DIM, _FEED_FORWARD = 32, 8, 64, 4
_AVERAGES = "model_ema.diffusion_model"
# Where the names of a UNet have dots, for names without them.
_DOTS = (
    (r"^(input_blocks|output_blocks)(\d+)(\d)", r"\1.\2.\3."),
    (r"^(middle_block|time_embed|out)(\d)", r"\1.\2."),
    (r"(transformer_blocks|in_layers|out_layers|emb_layers|to_out)(\d)", r"\1.\2."),
    (r"ffnet(\d)(proj)?", r"ff.net.\1.\2."),
    (r"(attn\d|norm\d?|to_[qkv]|proj_in|proj_out|skip_connection|\bop|\bconv)(?=weight|bias|to_)", r"\1."),
    (r"\.\.", "."),
)
# Settings of ours that theirs have by another name, or the same.
_UNET = {
    "sample_size": "image_size", "in_channels": "in_channels", "out_channels": "out_channels",
    "layers_per_block": "num_res_blocks", "cross_attention_dim": "context_dim",
}  # fmt: skip
_VAE = {
    "sample_size": "resolution", "in_channels": "in_channels", "out_channels": "out_ch",
    "layers_per_block": "num_res_blocks",
}  # fmt: skip
_TEXT = {
    "d_model": "n_embed", "encoder_layers": "n_layer", "vocab_size": "vocab_size",
    "max_position_embeddings": "max_seq_len",
}  # fmt: skip
_PARAMETERIZATION = {"epsilon": "eps", "v_prediction": "v"}
# What forks of their class call a schedule that ends in pure noise.
_ZERO_SNR = ("rescale_betas_zero_snr", "zero_terminal_snr", "zero_snr", "zsnr", "ztsnr")
_CONV_IN_ATTENTION = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")


def read_yaml(path) -> dict:
    """The `model.params` of a YAML file. Raises ModelError."""
    try:
        params = yaml.safe_load(read_small(path, ModelError).decode())["model"]["params"]
        if not isinstance(params, dict):
            raise TypeError("model.params is not a mapping")
        return params
    except (UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise ModelError(f"{path} is not a YAML config of latent diffusion with model.params ({first})") from error


def configs_of(params: dict, source) -> dict[str, dict]:
    """The components' configs that `model.params` describes; no text encoder where it is not a BERTEmbedder."""
    try:
        configs = {
            "unet": _unet_config(params["unet_config"]["params"], source),
            "vae": _vae_config(params["first_stage_config"]["params"], params.get("scale_factor", 1.0), source),
        }
        text = params.get("cond_stage_config") or {}
        if isinstance(text, dict) and str(text.get("target", "")).endswith(".BERTEmbedder"):
            own = {"vocab_size": 30522, "max_seq_len": 77, **text["params"]}
            configs["text_encoder"] = {ours: own[theirs] for ours, theirs in _TEXT.items()} | {
                "encoder_ffn_dim": _FEED_FORWARD * own["n_embed"],
                "encoder_attention_heads": _HEADS,
                "head_dim": _HEAD_DIM,
                "dropout": 0.0,
            }
        return configs
    except KeyError as error:
        raise ModelError(f"{source} lacks {error}, which its model needs; give the YAML file of the .ckpt") from error
    except (TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{source} describes no model ({error}); give the YAML file of the .ckpt") from error


def scheduler_of(params: dict, source) -> dict:
    """The noise schedule and prediction type that `model.params` describes. Raises ModelError."""
    kinds = {theirs: ours for ours, theirs in _PARAMETERIZATION.items()}
    # Their "linear" is linear in sqrt(beta), ours "scaled_linear".
    for name, known in (("parameterization", tuple(kinds)), ("beta_schedule", ("linear",))):
        if params.get(name, known[0]) not in known:
            raise ModelError(f"{source}: {name} {params[name]!r} is not supported; known: {', '.join(known)}")
    if params.get("given_betas") is not None:
        raise ModelError(f"{source}: given_betas, a noise schedule of its own, is not supported")
    zero = any(params.get(name) for name in _ZERO_SNR)
    return {
        **({"rescale_betas_zero_snr": True} if zero else {}),
        "num_train_timesteps": params.get("timesteps", 1000),
        "beta_start": params.get("linear_start", 1e-4),
        "beta_end": params.get("linear_end", 2e-2),
        "beta_schedule": "scaled_linear",
        "prediction_type": kinds[params.get("parameterization", "eps")],
    }


def split(
    state_dict: dict[str, np.ndarray], configs: dict[str, dict], source, ema: bool
) -> dict[str, ComponentWeights]:
    """The components of a state dict, under our names. `ema`: with averages. Raises ModelError for an odd key."""
    components = {}
    for kind, config in configs.items():
        prefix = PREFIXES[kind]
        own = {name.removeprefix(prefix): array for name, array in state_dict.items() if name.startswith(prefix)}
        if kind == "vae":
            own = {name: array for name, array in own.items() if not name.startswith("loss.")}
        if kind == "unet" and ema:
            own = averaged(own, state_dict, _AVERAGES, source)
        if not own:
            continue
        require_few_layers(config, len(own), source)
        theirs = {theirs: ours for ours, theirs in NAMES[kind](config).items()}
        try:
            arrays = {rename(name, theirs): array for name, array in own.items()}
        except Unmapped as error:
            raise ModelError(
                f"{source} holds {prefix}{error}, for which its config has no place; give the YAML file of this .ckpt"
            ) from error
        arrays = {
            name: array[:, :, 0, 0] if _is_convolution_there(kind, name) and array.ndim == 4 else array
            for name, array in arrays.items()
        }
        components[kind] = ComponentWeights(config, turn_linear(arrays), str(source))
    return components


def averaged(own: dict, state_dict: dict, start: str, source) -> dict[str, np.ndarray]:
    """The averages of `own`, by its names: they have `start` and no dots. Raises ModelError where one is missing."""
    keys = {name: start + name.replace(".", "") for name in own}
    if missing := next((key for key in keys.values() if key not in state_dict), None):
        raise ModelError(f"{source} holds no averaged weights (no {missing}); load it without them")
    return {name: state_dict[key] for name, key in keys.items()}


def join(weights: Weights) -> dict[str, np.ndarray]:
    """The state dict of all components under CompVis' names, with its class's tables of the noise schedule."""
    state_dict = schedule_tables(weights.scheduler)
    for kind, prefix in PREFIXES.items():
        state_dict |= {prefix + name: one for name, one in state_of(kind, weights.components[kind]).items()}
    return state_dict


def state_of(kind: str, component: ComponentWeights) -> dict[str, np.ndarray]:
    """The arrays of one component under CompVis' names."""
    names, found = NAMES[kind](component.config), {}
    for name, array in turn_linear(component.arrays).items():
        found[rename(name, names)] = array[:, :, None, None] if _is_convolution_there(kind, name) else array
    return found


def params_of(weights: Weights) -> dict:
    """The `model.params` of a YAML file. Raises ModelError for a network, or a process, that CompVis lacks."""
    if (kind := weights.scheduler["prediction_type"]) not in _PARAMETERIZATION:
        raise ModelError(f"CompVis' samplers do not know models of prediction_type {kind}; export to diffusers")
    unet, vae, text = (weights.components[kind].config for kind in ("unet", "vae", "text_encoder"))
    unet_params, vae_params = _unet_params(unet), _vae_params(vae)
    _require(
        (text["encoder_attention_heads"], text["head_dim"], text["encoder_ffn_dim"])
        == (_HEADS, _HEAD_DIM, _FEED_FORWARD * text["d_model"]),
        f"the text encoder must have {_HEADS} heads of {_HEAD_DIM} and encoder_ffn_dim {_FEED_FORWARD} times d_model",
    )
    return {
        "linear_start": weights.scheduler["beta_start"],
        "linear_end": weights.scheduler["beta_end"],
        "timesteps": weights.scheduler["num_train_timesteps"],
        "parameterization": _PARAMETERIZATION[weights.scheduler["prediction_type"]],
        "first_stage_key": "image",
        "cond_stage_key": "caption",
        "image_size": unet["sample_size"],
        "channels": unet["in_channels"],
        "cond_stage_trainable": True,
        "conditioning_key": "crossattn",
        "scale_factor": vae.get("scaling_factor", 0.18215),
        "use_ema": False,
        "unet_config": {"target": "ldm.modules.diffusionmodules.openaimodel.UNetModel", "params": unet_params},
        "first_stage_config": {"target": "ldm.models.autoencoder.AutoencoderKL", "params": vae_params},
        "cond_stage_config": {
            "target": "ldm.modules.encoders.modules.BERTEmbedder",
            "params": {theirs: text[ours] for ours, theirs in _TEXT.items()},
        },
    }


def yaml_text(params: dict) -> str:
    """The YAML file of `params_of`."""
    whole = {"model": {"target": "ldm.models.diffusion.ddpm.LatentDiffusion", "params": params}}
    return yaml.safe_dump(whole, sort_keys=False)


def schedule_tables(scheduler: dict) -> dict[str, np.ndarray]:
    """CompVis' buffers, made in float64 (arXiv:2006.11239, equations 4, 7). Raises ModelError for other schedules."""
    own = {"rescale_betas_zero_snr": False, "timestep_shift": 1, **scheduler}
    if own["beta_schedule"] != "scaled_linear" or own["rescale_betas_zero_snr"] or own["timestep_shift"] != 1:
        raise ModelError("CompVis' classes know only the scaled_linear noise schedule; export to diffusers")
    steps = scheduler["num_train_timesteps"]
    betas = np.linspace(scheduler["beta_start"] ** 0.5, scheduler["beta_end"] ** 0.5, steps) ** 2
    alphas = 1.0 - betas
    bar = np.cumprod(alphas)
    before = np.append(1.0, bar[:-1])
    variance = betas * (1.0 - before) / (1.0 - bar)
    tables = {
        "betas": betas,
        "alphas_cumprod": bar,
        "alphas_cumprod_prev": before,
        "sqrt_alphas_cumprod": np.sqrt(bar),
        "sqrt_one_minus_alphas_cumprod": np.sqrt(1.0 - bar),
        "log_one_minus_alphas_cumprod": np.log(1.0 - bar),
        "sqrt_recip_alphas_cumprod": np.sqrt(1.0 / bar),
        "sqrt_recipm1_alphas_cumprod": np.sqrt(1.0 / bar - 1),
        "posterior_variance": variance,
        "posterior_log_variance_clipped": np.log(np.maximum(variance, 1e-20)),
        "posterior_mean_coef1": betas * np.sqrt(before) / (1.0 - bar),
        "posterior_mean_coef2": (1.0 - before) * np.sqrt(alphas) / (1.0 - bar),
    }
    return {name: table.astype(np.float32) for name, table in tables.items()}


def _with_dots(name: str) -> str:
    for pattern, dotted in _DOTS:
        name = re.sub(pattern, dotted, name)
    return name


def _is_convolution_there(kind: str, name: str) -> bool:
    """The VAE's attention is 1 x 1 convolutions [out, in, 1, 1] there and Linear [out, in] here."""
    return kind == "vae" and ".attentions." in name and name.endswith(_CONV_IN_ATTENTION)


def _unet_config(params: dict, source) -> dict:
    if params.get("num_classes") is not None or params.get("transformer_depth", 1) != 1:
        raise ModelError(f"{source}: a UNet with num_classes, or with transformer_depth other than 1, is not supported")
    channels = [params["model_channels"] * factor for factor in params["channel_mult"]]
    attention = [2**level in params["attention_resolutions"] for level in range(len(channels))]
    width = params.get("num_head_channels", -1)
    return single_file.unet_config(
        channels,
        attention,
        params.get("use_linear_in_transformer"),
        **{ours: ({"image_size": 32} | params)[theirs] for ours, theirs in _UNET.items()},
        attention_head_dim=[one // width for one in channels] if width > 0 else params["num_heads"],
    )


def _unet_params(config: dict) -> dict:
    channels = config["block_out_channels"]
    _require(config.get("addition_embed_type") is None, "the UNet is told sizes or pools captions")
    _require(config["in_channels"] == config["out_channels"], "the UNet takes a mask (a model for inpainting)")
    _require(config.get("norm_num_groups", 32) == _GROUPS, f"the UNet's norm_num_groups must be {_GROUPS}")
    _require(all(one % channels[0] == 0 for one in channels), "the UNet's channels must be multiples of the first")
    attention = [2**level for level, kind in enumerate(config["down_block_types"]) if "CrossAttn" in kind]
    heads = config.get("attention_head_dim", 8)
    if isinstance(heads, int):
        split = {"num_heads": heads}
    else:
        widths = {one // number for one, number in zip(channels, heads, strict=True)}
        _require(len(widths) == 1, "the UNet's heads must all have one width, or every level as many heads")
        split = {"num_head_channels": widths.pop()}
    params = {
        **{theirs: config[ours] for ours, theirs in _UNET.items()},
        "model_channels": channels[0],
        "attention_resolutions": attention[::-1],
        "channel_mult": [one // channels[0] for one in channels],
        **split,
        "use_spatial_transformer": True,
        "transformer_depth": 1,
        "use_checkpoint": True,
        "legacy": False,
    }
    return {**params, "use_linear_in_transformer": True} if config.get("use_linear_projection") else params


def _vae_config(params: dict, scaling_factor: float, source) -> dict:
    inner = params["ddconfig"]
    if inner.get("attn_resolutions"):
        raise ModelError(f"{source}: an autoencoder with attn_resolutions {inner['attn_resolutions']} is not supported")
    if inner["z_channels"] != params["embed_dim"]:
        raise ModelError(f"{source}: z_channels {inner['z_channels']} differs from embed_dim {params['embed_dim']}")
    return single_file.vae_config(
        [inner["ch"] * factor for factor in inner["ch_mult"]],
        **{ours: inner[theirs] for ours, theirs in _VAE.items()},
        latent_channels=params["embed_dim"],
        scaling_factor=scaling_factor,
    )


def _vae_params(config: dict) -> dict:
    channels = config["block_out_channels"]
    _require(config.get("norm_num_groups", 32) == _GROUPS, f"the VAE's norm_num_groups must be {_GROUPS}")
    convolved = config.get("use_quant_conv", True) and config.get("use_post_quant_conv", True)
    _require(convolved, "the VAE has no convolution beside its latents (use_quant_conv, use_post_quant_conv)")
    _require(not is_shifted(config), "the VAE's latents are shifted (shift_factor, latents_mean), and not only scaled")
    _require(all(one % channels[0] == 0 for one in channels), "the VAE's channels must be multiples of the first")
    return {
        "embed_dim": config["latent_channels"],
        "monitor": "val/rec_loss",
        "ddconfig": {
            "double_z": True,
            "z_channels": config["latent_channels"],
            **{theirs: config[ours] for ours, theirs in _VAE.items()},
            "ch": channels[0],
            "ch_mult": [one // channels[0] for one in channels],
            "attn_resolutions": [],
            "dropout": 0.0,
        },
        "lossconfig": {"target": "torch.nn.Identity"},
    }


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ModelError(f"CompVis' classes cannot build this model: {what}; export it to diffusers or ppdiffusers")


def read_compvis(model, kinds) -> Weights:
    """The components `kinds` of a single file, a `source.ModelSource`, without a tokenizer. Raises ModelError."""
    path, ema = model.path, model.ema
    kinds = [kind for kind in kinds if kind in PREFIXES]
    wanted = tuple(PREFIXES[kind] for kind in kinds) + (("model_ema.",) if ema else ())
    names = read_names(path)
    for part, what in single_file.OTHERS.items():
        if any(part in name for name in names):
            raise ModelError(f"{path} is {what}")
    state_dict = read_arrays(path, lambda name: name.startswith(wanted) or name in single_file.TABLES)
    if not state_dict.keys() - single_file.TABLES.keys():
        raise ModelError(f"{path} holds none of {', '.join(wanted)}: it is not a latent diffusion model of CompVis")
    starts = {name.partition(".diffusion_model")[0] for name in names if ".diffusion_model" in name}
    if "unet" in kinds and any(name.startswith(_AVERAGES) for name in names) and "model" not in starts:
        if not ema:
            raise ModelError(f"{path} holds only averaged weights of its UNet; take them: --ema (--load_ema)")
        own = {name.removeprefix(_AVERAGES): array for name, array in state_dict.items() if name.startswith(_AVERAGES)}
        state_dict |= {PREFIXES["unet"] + _with_dots(name): array for name, array in own.items()}
    described, has_clip = _described(path, model.config_file, names), single_file.has_clip(names)
    source, configs, schedule = described or (path, single_file.configs_by_shapes(state_dict, path), PUBLISHED_SCHEDULE)
    if described and has_clip and "text_encoder" in kinds:
        configs["text_encoder"] = single_file.configs_by_shapes(state_dict, path)["text_encoder"]
    check_schedule(schedule, source)
    if unet := "unet" in kinds and configs.get("unet"):
        second = not described and unet.get("use_linear_projection", False)
        of_yaml = isinstance(source, Path) and bool(described)
        schedule = single_file.read_schedule(model, state_dict, names, schedule, of_yaml, second)
        if second and schedule["prediction_type"] == "v_prediction":
            unet["sample_size"] = single_file.V_SIDE
        check_schedule(schedule, source)
    configs = {kind: complete_config(kind, config, source) for kind, config in configs.items() if kind in kinds}
    theirs = {kind: config for kind, config in configs.items() if kind != "text_encoder" or not has_clip}
    components = split(state_dict, theirs, path, ema)
    if has_clip and "text_encoder" in configs:
        arrays = turn_linear(single_file.text_encoder_arrays(state_dict))
        components["text_encoder"] = ComponentWeights(configs["text_encoder"], arrays, str(path))
    weights = Weights(components, dict(schedule))
    if path.name == EXPORTED_CKPT and (path.parent / "ppldm.json").is_file():
        weights.metadata = read_json_object(path.parent / "ppldm.json", ModelError, inside=True)
        weights.metadata.pop("files", None)  # checksums, which say nothing of the training
    return weights


def _described(path: Path, yaml_file, names: set[str]) -> tuple[Path | str, dict, dict] | None:
    """(where from, configs, noise schedule): by the YAML file given, that beside the .ckpt, or of an LDMBert the
    published size of its depth; None for another model without one."""
    beside = path.with_suffix(".yaml")
    if yaml_file or beside.is_file():
        source = Path(yaml_file or beside)
        params = read_yaml(source.expanduser())
        return source, configs_of(params, source), PUBLISHED_SCHEDULE | scheduler_of(params, source)
    prefix = "cond_stage_model.transformer.attn_layers.layers."
    depth = len({name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}) // 2
    if not depth:
        return None
    said = f"{path} (no YAML file given: taken for the published size)"
    return said, published_configs(depth), PUBLISHED_SCHEDULE


def published_configs(depth: int) -> dict[str, dict]:
    """Those of the published LDM whose text encoder has about so many layers."""
    size = "" if depth > 12 else "_12"
    files = {"unet": f"unet{size}.json", "text_encoder": f"ldmbert{size}.json", "vae": "vae_kl_f8.json"}
    return {kind: read_json_object(CONFIG_DIR / name, ModelError) for kind, name in files.items()}
