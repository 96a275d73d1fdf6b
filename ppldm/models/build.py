"""Parts from names, configs or folders. A part that is built (not loaded) is initialised as PyTorch does.

Every builder makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter names, which key
its optimizer's state, are the same in every process that builds the same model.
"""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import numpy as np
import paddle
from ppdiffusers import AutoencoderKL, UNet2DConditionModel
from ppdiffusers.models.attention_processor import AttnProcessor
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from ppdiffusers.transformers import CLIPTextConfig, CLIPTextModel

from ..config.arguments import DEFAULT_VAE, ModelArguments
from ..utils.errors import ConfigError, ModelError
from ..utils.log import get_logger
from .diffusion import NoiseSchedule, sampling_settings
from .init import init_autoencoder, init_text_encoder, init_unet
from .ldm import LatentDiffusionModel
from .weights.configs import complete_config
from .weights.fetch import local_path
from .weights.limits import within_file
from .weights.parts import Part, Weights, is_ldmbert
from .weights.read import PART_FOLDERS, PUBLISHED_SCHEDULE, read_part, read_weights

_LABELS = {"vae": "VAE", "text_encoder": "text encoder", "unet": "UNet"}
# What the classes raise on settings that no network can have.
_UNBUILDABLE = (TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
_SHOWN = 5  # keys of each kind that a message lists


def build_ldm(arguments: ModelArguments, vocab_size: int, seed: int) -> LatentDiffusionModel:
    """The model that the flags describe. `vocab_size` is the tokenizer's and replaces the config's.

    Raises ConfigError or ModelError, naming the file.
    """
    with paddle.utils.unique_name.guard():
        get_logger().info("building the model")
        schedule = PUBLISHED_SCHEDULE
        if arguments.starts_from_pipeline:
            weights = read_weights(
                local_path(arguments.model_name_or_path, PART_FOLDERS, arguments.offline),
                yaml_file=arguments.original_config_file,
                ema=arguments.load_ema,
            )
            schedule = weights.scheduler
            for name, before in (("prediction_type", "epsilon"), ("rescale_betas_zero_snr", False)):
                before, now = schedule.get(name, before), getattr(arguments, name)
                if before != now:
                    get_logger().warning("%s was trained with %s %s and goes on with %s",
                                         arguments.model_name_or_path, name, before, now)  # fmt: skip
            vae, text_encoder, unet = (build_part(kind, weights, arguments.model_name_or_path) for kind in PART_FOLDERS)
        else:
            text_encoder_config, unet_config = arguments.config_files()
            vae = load_part("vae", arguments.vae_name_or_path or DEFAULT_VAE, arguments)
            if arguments.pretrained_text_encoder_name:
                text_encoder = load_part("text_encoder", arguments.pretrained_text_encoder_name, arguments)
            else:
                text_encoder = build_text_encoder(text_encoder_config, vocab_size, arguments.model_max_length, seed)
            if arguments.unet_name_or_path:
                unet = load_part("unet", arguments.unet_name_or_path, arguments)
            else:
                unet = build_unet(unet_config, seed)
        _check_fit(vae, text_encoder, unet, vocab_size, arguments.model_max_length)
        if arguments.enable_xformers_memory_efficient_attention:
            if not paddle.is_compiled_with_cuda():
                raise ConfigError("--enable_xformers_memory_efficient_attention needs a GPU; leave it away on a CPU")
            unet.enable_xformers_memory_efficient_attention()
        else:
            unet.set_attn_processor(AttnProcessor())  # ppdiffusers would choose by the GPU
        return LatentDiffusionModel(
            vae,
            text_encoder,
            unet,
            noise_schedule({**schedule, "rescale_betas_zero_snr": arguments.rescale_betas_zero_snr}),
            prediction_type=arguments.prediction_type,
            freeze_text_encoder=arguments.freeze_text_encoder or bool(arguments.pretrained_text_encoder_name),
            snr_gamma=arguments.snr_gamma,
            perturbed_input=arguments.input_perturbation > 0,
            sampling=sampling_settings(schedule),
        )


def build_model(weights: Weights, source) -> LatentDiffusionModel:
    """The model of whole weights, in evaluation mode. Raises ModelError where parts are missing or do not fit."""
    with paddle.utils.unique_name.guard():
        model = LatentDiffusionModel(
            *(build_part(kind, weights, source) for kind in PART_FOLDERS),
            noise_schedule(weights.scheduler),
            prediction_type=weights.scheduler["prediction_type"],
            sampling=sampling_settings(weights.scheduler),
        )
    model.eval()
    return model


def load_pipeline(folder: Path) -> LatentDiffusionModel:
    """The model in a folder or file of any known form, in evaluation mode. Raises ModelError."""
    return build_model(read_weights(folder), folder)


def load_part(kind: str, name_or_path, arguments: ModelArguments):
    """One part, trained, in float32, from a folder, a .ckpt or by name. Raises ModelError."""
    path = local_path(name_or_path, {kind: PART_FOLDERS[kind]}, arguments.offline)
    return fill_part(kind, read_part(kind, path, arguments.original_config_file, arguments.load_ema and kind == "unet"))


def load_vae(name_or_path) -> AutoencoderKL:
    """A trained VAE from a folder, a .ckpt or by name, in float32."""
    return load_part("vae", name_or_path, ModelArguments())


def build_part(kind: str, weights: Weights, source):
    """The part `kind` of `weights`. Raises ModelError where there is none."""
    if kind not in weights.parts:
        raise ModelError(f"{source} has no {_LABELS[kind]} of a kind that is known; {_remedy(kind)}")
    return fill_part(kind, weights.parts[kind])


def _remedy(kind: str) -> str:
    if kind == "text_encoder":
        return "start from its VAE and UNet with --vae_name_or_path and --unet_name_or_path"
    return "give a whole pipeline"


def fill_part(kind: str, part: Part):
    """A network of `part.config` that holds `part.arrays` in float32.

    Raises ModelError that lists the keys which are missing, not expected or of another shape; and before it is built
    where the config describes a far larger network.
    """
    with within_file(part):
        layer = _make(kind, part)
    own = layer.state_dict()
    problems = [
        *_listed("missing", own.keys() - part.arrays.keys()),
        *_listed("unexpected", part.arrays.keys() - own.keys()),
        *_listed(
            "of another shape",
            (
                f"{name} {list(part.arrays[name].shape)} instead of {list(value.shape)}"
                for name, value in own.items()
                if name in part.arrays and list(part.arrays[name].shape) != list(value.shape)
            ),
        ),
    ]
    if problems:
        raise ModelError(f"the weights in {part.source} do not fit their config: {'; '.join(problems)}")
    with paddle.no_grad():
        for name, value in own.items():
            value.set_value(np.ascontiguousarray(part.arrays[name]).astype(np.float32, copy=False))
    return layer


def _listed(what: str, names: Iterable[str]) -> list[str]:
    names = sorted(names)
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"]


def _make(kind: str, part: Part):
    try:
        if kind == "text_encoder" and not is_ldmbert(part.config):
            return CLIPTextModel(CLIPTextConfig(**part.config))
        if kind == "text_encoder":
            return LDMBertModel(LDMBertConfig(**part.config))
        return _make_network({"vae": AutoencoderKL, "unet": UNet2DConditionModel}[kind], part.config)
    except _UNBUILDABLE as error:
        raise ModelError(
            f"{part.source}: the config makes no {_LABELS[kind]} ({type(error).__name__}: {error}); copy it again"
        ) from error


def _make_network(model_class, config: dict):
    """A VAE or UNet. Raises one of _UNBUILDABLE; also for groups, which its class looks at in the first step only."""
    network = model_class(**config)
    groups, channels = network.config.norm_num_groups, network.config.block_out_channels
    if groups is not None and (groups < 1 or any(one % groups for one in channels)):
        raise ValueError(f"norm_num_groups {groups} does not divide all of block_out_channels {list(channels)}")
    return network


def weights_of(model: LatentDiffusionModel) -> Weights:
    """The weights of a built model, copied, in float32."""
    parts = {}
    for kind in PART_FOLDERS:
        layer = getattr(model, kind)
        config = layer.config.to_dict() if kind == "text_encoder" else dict(layer.config)
        arrays = {name: value.astype("float32").numpy() for name, value in layer.state_dict().items()}
        parts[kind] = Part(complete_config(kind, config, kind), arrays, kind)
    schedule = {**model.noise_schedule.scheduler_config(), "prediction_type": model.prediction_type}
    schedule |= model.sampling
    return Weights(parts, schedule)


def noise_schedule(scheduler: dict) -> NoiseSchedule:
    """The training schedule of a scheduler's settings; the published values for what they do not name."""
    return NoiseSchedule(
        **{field.name: scheduler[field.name] for field in fields(NoiseSchedule) if field.name in scheduler}
    )


def build_text_encoder(config_file, vocab_size: int, max_length: int, seed: int) -> LDMBertModel:
    """A new LDMBert with the tokenizer's vocabulary and length, which replace the config's."""
    config = read_json_config(config_file, "--text_encoder_config_file")
    for name, value in (("vocab_size", vocab_size), ("max_position_embeddings", max_length)):
        if config.get(name) != value:
            get_logger().info("text encoder: %s %s of %s becomes the tokenizer's %d",
                              name, config.get(name), config_file, value)  # fmt: skip
            config[name] = value
    return init_text_encoder(LDMBertModel(LDMBertConfig(**config)), seed)


def build_unet(config_file, seed: int) -> UNet2DConditionModel:
    """A new UNet from its JSON config."""
    config = read_json_config(config_file, "--unet_config_file")
    return init_unet(_from_config(UNet2DConditionModel, config, config_file), seed)


def build_autoencoder(config_file, seed: int) -> AutoencoderKL:
    """A new AutoencoderKL from its JSON config."""
    config = read_json_config(config_file, "--vae_config_file")
    with paddle.utils.unique_name.guard():
        return init_autoencoder(_from_config(AutoencoderKL, config, config_file), seed)


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels a side to one latent: 8 for four blocks."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_shape(vae: AutoencoderKL, resolution: int) -> tuple[int, int, int]:
    """(C, h, w) of the latents of square pictures. Raises ConfigError where the sides do not divide."""
    factor = downscale_factor(vae)
    if resolution % factor:
        raise ConfigError(f"--resolution {resolution} must be a multiple of {factor}, the VAE's downscaling factor")
    return (vae.config.latent_channels, resolution // factor, resolution // factor)


def read_json_config(path, flag: str) -> dict:
    """The object in a JSON file. Raises ConfigError naming the file and the flag it came by."""
    path = Path(path).expanduser()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path} ({error.strerror}); {flag} names a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); {flag} names a JSON file") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object; {flag} names a model config")
    return config


def _from_config(model_class, config: dict, config_file):
    known = set(model_class._get_init_keys(model_class))
    unknown = [key for key in config if key not in known and not key.startswith("_")]
    if unknown:
        raise ConfigError(f"{config_file}: {model_class.__name__} has no setting {unknown[0]!r}; correct or remove it")
    try:
        return _make_network(model_class, {key: value for key, value in config.items() if not key.startswith("_")})
    except _UNBUILDABLE as error:
        raise ConfigError(f"{config_file} makes no {model_class.__name__}: {error}") from error


def _check_fit(vae, text_encoder, unet, vocab_size: int, max_length: int) -> None:
    """Raises ModelError where the parts do not fit one another or the tokenizer."""
    if unet.config.in_channels != vae.config.latent_channels:
        raise ModelError(
            f"the UNet takes {unet.config.in_channels} channels and the VAE gives {vae.config.latent_channels}; "
            "in_channels and out_channels of --unet_config_file must be the VAE's latent_channels"
        )
    width = text_encoder.config.hidden_size
    if unet.config.cross_attention_dim != width:
        raise ModelError(
            f"the UNet attends to width {unet.config.cross_attention_dim} and the text encoder gives {width}; "
            "cross_attention_dim of the UNet must be d_model (CLIP: hidden_size) of the text encoder"
        )
    if text_encoder.config.vocab_size < vocab_size or text_encoder.config.max_position_embeddings < max_length:
        raise ModelError(
            f"the text encoder knows {text_encoder.config.vocab_size} words and "
            f"{text_encoder.config.max_position_embeddings} positions, the tokenizer {vocab_size} and {max_length}; "
            "use the model's own tokenizer and --model_max_length"
        )


def save_part(part, folder) -> None:
    """config.json and model_state.pdparams of one part, as `from_pretrained` reads them."""
    if isinstance(part, LDMBertModel):
        part.save_pretrained(str(folder))
    else:
        part.save_pretrained(str(folder), safe_serialization=False)
