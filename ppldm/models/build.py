"""Parts from names, configs or folders. A part that is built (not loaded) is initialised as PyTorch does.

Every builder makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter names, which key
its optimizer's state, are the same in every process that builds the same model.
"""

import json
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError

import paddle
from ppdiffusers import AutoencoderKL, UNet2DConditionModel
from ppdiffusers.models.attention_processor import AttnProcessor
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

from ..config.arguments import DEFAULT_VAE, ModelArguments
from ..utils.errors import ConfigError, ModelError
from ..utils.log import get_logger
from .diffusion import NoiseSchedule
from .init import init_autoencoder, init_text_encoder, init_unet
from .ldm import LatentDiffusionModel

WEIGHT_FILES = ("*.pdparams", "*.safetensors", "*.bin")

# The folders of an exported pipeline; the second name is that of the older training layout.
PIPELINE_FOLDERS = {"vae": ("vqvae", "vae"), "text_encoder": ("bert", "ldmbert"), "unet": ("unet", "unet")}


def build_ldm(arguments: ModelArguments, vocab_size: int, seed: int) -> LatentDiffusionModel:
    """The model that the flags describe. `vocab_size` is the tokenizer's and replaces the config's.

    Raises ConfigError or ModelError, naming the file.
    """
    with paddle.utils.unique_name.guard():
        get_logger().info("building the model")
        if arguments.starts_from_pipeline:
            folder = Path(arguments.model_name_or_path).expanduser()
            vae = load_vae(pipeline_folder(folder, "vae"))
            text_encoder = _load(LDMBertModel, pipeline_folder(folder, "text_encoder"), "text encoder")
            unet = _load(UNet2DConditionModel, pipeline_folder(folder, "unet"), "UNet")
        else:
            text_encoder_config, unet_config = arguments.config_files()
            vae = load_vae(arguments.vae_name_or_path or DEFAULT_VAE)
            text_encoder = build_text_encoder(text_encoder_config, vocab_size, arguments.model_max_length, seed)
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
            NoiseSchedule(rescale_betas_zero_snr=arguments.rescale_betas_zero_snr),
            prediction_type=arguments.prediction_type,
            freeze_text_encoder=arguments.freeze_text_encoder,
            snr_gamma=arguments.snr_gamma,
            perturbed_input=arguments.input_perturbation > 0,
        )


def load_pipeline(folder: Path, prediction_type: str) -> LatentDiffusionModel:
    """An exported model, in evaluation mode. Raises ModelError."""
    model = LatentDiffusionModel(
        load_vae(pipeline_folder(folder, "vae")),
        _load(LDMBertModel, pipeline_folder(folder, "text_encoder"), "text encoder"),
        _load(UNet2DConditionModel, pipeline_folder(folder, "unet"), "UNet"),
        read_noise_schedule(folder),
        prediction_type=prediction_type,
    )
    model.eval()
    return model


def read_noise_schedule(folder: Path) -> NoiseSchedule:
    """The schedule that an exported pipeline was trained with; the published one where the folder names none."""
    path = folder / "scheduler" / "scheduler_config.json"
    config = read_json_config(path, "--model_name_or_path") if path.is_file() else {}
    return NoiseSchedule(**{field.name: config[field.name] for field in fields(NoiseSchedule) if field.name in config})


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


def load_vae(name_or_path) -> AutoencoderKL:
    """A trained VAE from a folder or by name, in float32."""
    return _load(AutoencoderKL, name_or_path, "VAE")


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels a side to one latent: 8 for four blocks."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_shape(vae: AutoencoderKL, resolution: int) -> tuple[int, int, int]:
    """(C, h, w) of the latents of square pictures. Raises ConfigError where the sides do not divide."""
    factor = downscale_factor(vae)
    if resolution % factor:
        raise ConfigError(f"--resolution {resolution} must be a multiple of {factor}, the VAE's downscaling factor")
    return (vae.config.latent_channels, resolution // factor, resolution // factor)


def pipeline_folder(folder: Path, part: str) -> Path:
    """The folder of `part` in an exported pipeline or in the older training layout. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(
            f"no folder {folder}; give that of an exported pipeline, or a published size as `--help` lists"
        )
    for name in PIPELINE_FOLDERS[part]:
        if (folder / name).is_dir():
            return folder / name
    raise ModelError(f"{folder} has no folder {' or '.join(PIPELINE_FOLDERS[part])}: it is not an exported pipeline")


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
        return model_class(**{key: value for key, value in config.items() if not key.startswith("_")})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config_file} makes no {model_class.__name__}: {error}") from error


def _load(model_class, name_or_path, what: str):
    """`from_pretrained` with our errors: checked by hand where it is a folder, downloaded by name otherwise."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"the {what} folder {path} has no config.json; give the folder that holds it and the weights"
            )
        if not any(any(path.glob(pattern)) for pattern in WEIGHT_FILES):
            raise ModelError(f"the {what} folder {path} has no weights ({' or '.join(WEIGHT_FILES)}); copy them there")
    elif path.is_absolute() or str(name_or_path).startswith((".", "~")):
        raise ModelError(f"no {what} folder {path}; check the path")
    try:
        return model_class.from_pretrained(str(path if path.is_dir() else name_or_path))
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, UnpicklingError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot load the {what} {name_or_path}: {first_line}; give a local folder with config.json and weights"
        ) from error


def _check_fit(vae, text_encoder, unet, vocab_size: int, max_length: int) -> None:
    """Raises ModelError where the parts do not fit one another or the tokenizer."""
    if unet.config.in_channels != vae.config.latent_channels:
        raise ModelError(
            f"the UNet takes {unet.config.in_channels} channels and the VAE gives {vae.config.latent_channels}; "
            "in_channels and out_channels of --unet_config_file must be the VAE's latent_channels"
        )
    width = text_encoder.config.d_model
    if unet.config.cross_attention_dim != width:
        raise ModelError(
            f"the UNet attends to width {unet.config.cross_attention_dim} and the text encoder gives {width}; "
            "cross_attention_dim of the UNet must be d_model of the text encoder"
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
