"""Parts from names, configs or folders. A part that is built (not loaded) is initialised as PyTorch does.

Every builder makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter names, which key
its optimizer's state, are the same in every process that builds the same model.
"""

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
from ..diffusion.process import NoiseSchedule, sampling_settings
from ..networks.configs import LABELS, check_config, check_fit, check_tokenizer_fit, is_ldmbert, read_new_config
from ..networks.init import init_autoencoder, init_text_encoder, init_unet
from ..utils.errors import ConfigError, ModelError
from ..utils.log import get_logger
from ..weights.components import Part, Weights
from ..weights.configs import complete_config
from ..weights.fetch import locate_model
from ..weights.limits import within_file
from ..weights.model_file import (
    AUTOENCODER,
    LDM,
    Component,
    ModelDescription,
    TokenizerFiles,
    checksum_arrays,
    describe,
)
from ..weights.read import PART_FOLDERS, PUBLISHED_SCHEDULE, read_part, read_weights
from .ldm import LatentDiffusionModel

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
                locate_model(arguments.model_name_or_path, PART_FOLDERS, arguments.offline),
                yaml_file=arguments.original_config_file,
                ema=arguments.load_ema,
            )
            schedule = weights.scheduler
            for name, before in (("prediction_type", "epsilon"), ("rescale_betas_zero_snr", False)):
                before, now = schedule.get(name, before), getattr(arguments, name)
                if before != now:
                    get_logger().warning("%s was trained with %s %s and goes on with %s",
                                         arguments.model_name_or_path, name, before, now)  # fmt: skip
            vae, text_encoder, unet = _fill_all(weights, arguments, vocab_size)
        else:
            vae, text_encoder, unet = _build_all(arguments, vocab_size, seed)
        if arguments.enable_xformers_memory_efficient_attention:
            if not paddle.is_compiled_with_cuda():
                raise ConfigError("--enable_xformers_memory_efficient_attention needs a GPU; omit it on a CPU")
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


def _fill_all(weights: Weights, arguments: ModelArguments, vocab_size: int) -> list:
    """VAE, text encoder and UNet of a whole model to start from."""
    for kind in PART_FOLDERS:
        _require_part(kind, weights, arguments.model_name_or_path)
    configs = {kind: weights.parts[kind].config for kind in PART_FOLDERS}
    check_fit(configs)
    check_tokenizer_fit(configs["text_encoder"], vocab_size, arguments.model_max_length)
    return [fill_part(kind, weights.parts[kind]) for kind in PART_FOLDERS]


def _build_all(arguments: ModelArguments, vocab_size: int, seed: int) -> list:
    """VAE, text encoder and UNet, each from weights of its own or anew; nothing is built before all of them fit."""
    files = dict(zip(("text_encoder", "unet"), arguments.config_files(), strict=True))
    names = {
        "vae": arguments.vae_name_or_path or DEFAULT_VAE,
        "text_encoder": arguments.pretrained_text_encoder_name,
        "unet": arguments.unet_name_or_path,
    }
    tables = {"text_encoder": "ldmbert", "unet": "unet"}
    configs = {
        kind: read_new_config(table, files[kind], f"--{kind}_config_file")
        for kind, table in tables.items()
        if not names[kind]
    }
    if "text_encoder" in configs:
        sizes = {"vocab_size": vocab_size, "max_position_embeddings": arguments.model_max_length}
        configs["text_encoder"] = resize_text_encoder(configs["text_encoder"], files["text_encoder"], sizes)
    check_fit(configs)
    parts = {kind: find_part_by_name(kind, name, arguments) for kind, name in names.items() if name}
    configs |= {kind: part.config for kind, part in parts.items()}
    check_fit(configs)
    check_tokenizer_fit(configs["text_encoder"], vocab_size, arguments.model_max_length)
    make = {"text_encoder": build_text_encoder, "unet": build_unet}
    return [fill_part(kind, parts[kind]) if kind in parts else make[kind](configs[kind], seed) for kind in PART_FOLDERS]


def build_model(weights: Weights, source) -> LatentDiffusionModel:
    """The model of whole weights, in evaluation mode. Raises ModelError where parts are missing or do not fit."""
    for kind in PART_FOLDERS:
        _require_part(kind, weights, source)
    check_fit({kind: weights.parts[kind].config for kind in PART_FOLDERS}, source)
    with paddle.utils.unique_name.guard():
        model = LatentDiffusionModel(
            *(fill_part(kind, weights.parts[kind]) for kind in PART_FOLDERS),
            noise_schedule(weights.scheduler),
            prediction_type=weights.scheduler["prediction_type"],
            sampling=sampling_settings(weights.scheduler),
        )
    model.eval()
    return model


def load_pipeline(folder: Path) -> LatentDiffusionModel:
    """The model in a folder or file of any known form, in evaluation mode. Raises ModelError."""
    return build_model(read_weights(folder), folder)


def find_part_by_name(kind: str, name_or_path, arguments: ModelArguments) -> Part:
    """One part, trained, from a folder, a .ckpt or by name. Raises ModelError."""
    path = locate_model(name_or_path, {kind: PART_FOLDERS[kind]}, arguments.offline)
    return read_part(kind, path, arguments.original_config_file, arguments.load_ema and kind == "unet")


def load_vae(name_or_path) -> AutoencoderKL:
    """A trained VAE from a folder, a .ckpt or by name, in float32."""
    return fill_part("vae", find_part_by_name("vae", name_or_path, ModelArguments()))


def _require_part(kind: str, weights: Weights, source) -> None:
    if kind not in weights.parts:
        raise ModelError(f"{source} has no {LABELS[kind]} of a kind that is known; {_remedy(kind)}")


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
        return {"vae": AutoencoderKL, "unet": UNet2DConditionModel}[kind](**part.config)
    except _UNBUILDABLE as error:
        raise ModelError(
            f"{part.source}: the config makes no {LABELS[kind]} ({type(error).__name__}: {error}); copy it again"
        ) from error


def weights_of(model: LatentDiffusionModel) -> Weights:
    """The weights of a built model, copied, in float32."""
    parts = {
        kind: Part(
            config_of(kind, getattr(model, kind)),
            {name: value.astype("float32").numpy() for name, value in getattr(model, kind).state_dict().items()},
            kind,
        )
        for kind in PART_FOLDERS
    }
    frozen = tuple(kind for kind in PART_FOLDERS if not _is_trained(kind, model))
    return Weights(parts, process_of(model) | model.sampling, frozen=frozen)


def config_of(kind: str, layer) -> dict:
    """The completed config of a built network."""
    return complete_config(kind, layer.config.to_dict() if kind == "text_encoder" else dict(layer.config), kind)


def process_of(model: LatentDiffusionModel) -> dict:
    """The noise schedule that a model is trained under, and what it predicts."""
    return {**model.noise_schedule.scheduler_config(), "prediction_type": model.prediction_type}


def describe_ldm(model: LatentDiffusionModel, tokenizer: TokenizerFiles) -> ModelDescription:
    """What model.json says of a built model: with checksums of its frozen weights, which must be in float32 yet."""
    components = {}
    for kind in PART_FOLDERS:
        layer, trained = getattr(model, kind), _is_trained(kind, model)
        arrays = ((name, value.numpy()) for name, value in layer.state_dict().items())
        components[kind] = Component(config_of(kind, layer), trained, None if trained else checksum_arrays(arrays))
    return describe(LDM, components, process_of(model), tokenizer)


def describe_autoencoder(vae: AutoencoderKL) -> ModelDescription:
    """What model.json says of an autoencoder that is trained."""
    return describe(AUTOENCODER, {"vae": Component(config_of("vae", vae), trained=True)})


def _is_trained(kind: str, model: LatentDiffusionModel) -> bool:
    return kind == "unet" or (kind == "text_encoder" and not model.freeze_text_encoder)


def noise_schedule(scheduler: dict) -> NoiseSchedule:
    """The training schedule of a scheduler's settings; the published values for what they do not name."""
    return NoiseSchedule(
        **{field.name: scheduler[field.name] for field in fields(NoiseSchedule) if field.name in scheduler}
    )


def resize_text_encoder(config: dict, source, sizes: dict[str, int]) -> dict:
    """`config` with the tokenizer's `sizes` (vocab_size, max_position_embeddings), checked again."""
    for name, value in sizes.items():
        if config[name] != value:
            get_logger().info("text encoder: %s %s of %s becomes the tokenizer's %d",
                              name, config[name], source, value)  # fmt: skip
    return check_config("ldmbert", config | sizes, source, ConfigError)


def build_text_encoder(config: dict, seed: int) -> LDMBertModel:
    """A new LDMBert of a completed config."""
    return init_text_encoder(LDMBertModel(LDMBertConfig(**config)), seed)


def build_unet(config: dict, seed: int) -> UNet2DConditionModel:
    """A new UNet of a completed config. Raises ConfigError."""
    return init_unet(_from_config(UNet2DConditionModel, config), seed)


def build_autoencoder(config_file, seed: int) -> AutoencoderKL:
    """A new AutoencoderKL from its JSON config."""
    config = read_new_config("vae", config_file, "--vae_config_file")
    check_fit({"vae": config}, config_file, ConfigError)
    with paddle.utils.unique_name.guard():
        return init_autoencoder(_from_config(AutoencoderKL, config), seed)


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels a side to one latent: 8 for four blocks."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def latent_shape(vae: AutoencoderKL, resolution: int) -> tuple[int, int, int]:
    """(C, h, w) of the latents of square pictures. Raises ConfigError where the sides do not divide."""
    factor = downscale_factor(vae)
    if resolution % factor:
        raise ConfigError(f"--resolution {resolution} must be a multiple of {factor}, the VAE's downscaling factor")
    return (vae.config.latent_channels, resolution // factor, resolution // factor)


def _from_config(model_class, config: dict):
    try:
        return model_class(**config)
    except _UNBUILDABLE as error:
        raise ConfigError(f"ppdiffusers cannot build {model_class.__name__} of this config: {error}") from error


def save_part(part, folder) -> None:
    """config.json and model_state.pdparams of one part, as `from_pretrained` reads them."""
    if isinstance(part, LDMBertModel):
        part.save_pretrained(str(folder))
    else:
        part.save_pretrained(str(folder), safe_serialization=False)
