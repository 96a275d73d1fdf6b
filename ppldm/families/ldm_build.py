"""A latent diffusion model of built components: from settings, or from whole weights; and its weights again."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import paddle

from ..data.inputs import Input, Moments, Normals, Pixels, Sizes, TextEmbeddings, Tokens, Uncached
from ..diffusion.drawing import drawing_of, kept_of, samplers_of
from ..diffusion.process import Process, sampling_settings
from ..networks.build import resize_text_encoder
from ..networks.configs import (
    LABELS,
    check_fit,
    check_tokenizer_fit,
    downscale_factor,
    hidden_width,
    is_pixels,
    is_sd3,
    is_sdxl,
    with_statistics,
)
from ..networks.cpu_operators.layers import plain_attention
from ..networks.latent_diffusion import LatentDiffusionModel
from ..utils.errors import ConfigError, ModelError
from ..utils.log import get_logger
from ..utils.machine.devices import current_kind
from ..utils.rng import Stream
from ..weights.components import Weights
from ..weights.configs import PUBLISHED_SCHEDULE
from ..weights.fill import component_of, config_of, fill_component
from ..weights.folders import FOLDERS, whole_model
from ..weights.model_file import family_of, kind_of
from ..weights.source import ModelSource, open_model
from .base import get_family

CONTROLNET = "controlnet"
_MODELS = {
    CONTROLNET: "controlnet.ControlledDiffusionModel",
    "sd3": "transformers.sd3.SD3DiffusionModel",
    "sdxl": "sdxl.SDXLDiffusionModel",
    "transformer": "transformers.transform.TransformerDiffusionModel",
    "unet": "latent_diffusion.LatentDiffusionModel",
}  # by the component that says so, or its kind


def build_ldm(arguments, vocab_size: int | dict, seed: int, resolution: int | None = None) -> LatentDiffusionModel:
    """The model that a `TextToImageSettings` describes. `vocab_size` replaces the config's; `resolution` is what
    `--shift_base_resolution` needs. Raises ConfigError, ModelError."""
    with paddle.utils.unique_name.guard():
        get_logger().info("building the model")
        said, weights = {}, None
        schedule = PUBLISHED_SCHEDULE
        chosen = arguments.chosen_schedule(resolution)
        if arguments.starts_from_pipeline:
            told = {"ema": arguments.load_ema, "assumed_prediction": arguments.prediction_type}
            kinds = arguments.components
            weights = _open(arguments, arguments.model_name_or_path, kinds, **told).read((*FOLDERS, *kinds))
            schedule = weights.scheduler
            now = chosen | {name: getattr(arguments, name) for name in ("mask_pad_tokens", "empty_caption")}
            unsaid = {name: getattr(type(arguments), name) for name in now} | {"timestep_shift": 1.0}
            before = unsaid | weights.metadata | schedule
            if arguments.empty_caption is None:
                from ..weights.write import metadata_of

                arguments.empty_caption = now["empty_caption"] = metadata_of(weights)["empty_caption"]
            for name in (name for name in now if before[name] != now[name]):
                what = f"{arguments.model_name_or_path} was trained with {name} {before[name]}"
                if any(method.is_whole_loss for method in arguments.chosen_methods()):
                    raise ConfigError(f"{what}, and --methods {arguments.methods[0]} learns from it; set --{name} so")
                get_logger().warning("%s and goes on with %s", what, now[name])
            said = kept_of(weights.metadata)
        parts = make_parts(get_family(arguments.family), arguments, vocab_size, seed, weights)[0]
        attending = [parts[kind] for kind in (arguments.denoiser, CONTROLNET) if kind in parts]
        if arguments.enable_xformers_memory_efficient_attention and not current_kind().efficient_attention:
            raise ConfigError(
                f"--enable_xformers_memory_efficient_attention needs a GPU; omit it on {current_kind().words}"
            )
        for one in attending:
            if arguments.enable_xformers_memory_efficient_attention:
                one.enable_xformers_memory_efficient_attention()
            elif arguments.denoiser == "unet":
                one.set_attn_processor(plain_attention())  # ppdiffusers would choose by the device
        process = Process.of({**schedule, **chosen}, arguments.weighting())
        model = _class_of(parts)(process, sampling_settings(schedule), not arguments.trains_text_encoder, **parts)
        if chosen and said.get("sampler") not in samplers_of(process):
            said.pop("sampler", None)  # of what it predicted before
        model.usual = drawing_of(said, process, arguments.model_name_or_path)
        text = parts.get("text_encoder")
        text_width = hidden_width(config_of("text_encoder", text)) if text else 0
        model.inputs = inputs_of(arguments, model.vae.config, text_width, process)
        return model


def inputs_of(arguments, vae_config, text_width: int, process: Process) -> dict[str, Input]:
    """What a batch must hold, by name."""
    latents = {"channels": vae_config["latent_channels"], "factor": downscale_factor(vae_config)}
    normals = partial(Normals, **latents)
    inputs = {
        "pixel_values": Pixels(),
        "moments": Moments(**latents),
        "uncached": Uncached(),
        "posterior_noise": normals(Stream.POSTERIOR),  # type: ignore[call-arg]
        "input_ids": Tokens(arguments.model_max_length),
        "timesteps": arguments.level_input(process.num_levels),
        **arguments.noise_inputs(normals),
    }
    if is_pixels(vae_config):
        del inputs["posterior_noise"]
    if not arguments.trains_text_encoder:
        inputs["text_embeddings"] = TextEmbeddings(arguments.model_max_length, text_width)
    if arguments.size_conditioning:
        inputs["sizes"] = Sizes(arguments.size_conditioning_drop)
    return inputs


def tokenizer_source(arguments, text_encoder: str = "text_encoder") -> str:
    """`--tokenizer_name`, else the tokenizer of the model to start from, else the family's. Raises ConfigError."""
    if arguments.tokenizer_name and (text_encoder != "text_encoder_3" or arguments.file_of(text_encoder)):
        return arguments.tokenizer_name
    if name := arguments.model_name_or_path if arguments.starts_from_pipeline else arguments.name_of(text_encoder):
        kinds = arguments.components if arguments.starts_from_pipeline else (text_encoder,)
        found = _open(arguments, name, kinds)
        if own := found.tokenizer_of(text_encoder) if arguments.starts_from_pipeline else found.tokenizer:
            return str(own)
        if not arguments.starts_from_pipeline:
            raise ConfigError(
                f"{found.path} has no tokenizer (merges.txt, vocab.json) in or beside it; name its folder: "
                "--tokenizer_name"
            )
    if arguments.default_tokenizer:
        return arguments.default_tokenizer
    raise ConfigError("a text encoder that is built anew has no tokenizer; name its folder: --tokenizer_name")


def make_parts(
    family, arguments, vocab_size: int | dict, seed: int, weights: Weights | None = None
) -> tuple[dict, dict]:
    """(networks, their configs) by name: of whole `weights`, or one by one. Nothing is built before all of them fit.
    vocab_size: of each text encoder, by name, where there are several."""
    components, configs, parts = {}, {}, {}
    places, kinds = family.places(arguments), family.components
    sizes = vocab_size if isinstance(vocab_size, dict) else {"text_encoder": vocab_size}
    if weights:
        lacking = {name for name in family.optional if name not in weights.components}
        places = {name: place for name, place in places.items() if name not in lacking}
        wanted = [name for name in arguments.components if name not in lacking]
        require_components(wanted, weights, arguments.model_name_or_path)
        components = {name: weights.components[name] for name in wanted}
    for name in (name for name, place in places.items() if place and name not in components):
        ema = arguments.load_ema and name == arguments.denoiser
        components[name] = _open(arguments, places[name], (kinds[name],), ema=ema).component(kinds[name])
    if "vae" in components and arguments.latents_statistics:
        components["vae"].config = with_statistics(components["vae"].config, arguments.latents_statistics)
    for name in places:
        known = name in components
        configs[name] = components[name].config if known else family.new_config(name, arguments, configs)
    for name in (name for name in sizes if name not in components):
        configs[name] = resize_text_encoder(configs[name], arguments, sizes[name], name)
    family.check_configs(configs, arguments)
    for name, size in sizes.items():
        check_tokenizer_fit(configs[name], size, arguments.model_max_length)
    for name, config in configs.items():
        if name in components:
            parts[name] = fill_component(kinds[name], components.pop(name))
        else:
            parts[name] = family.new_network(name, config, parts, seed)
    return parts, configs


def _open(arguments, name: str, kinds: tuple[str, ...], **told) -> ModelSource:
    return open_model(name, arguments.offline, kinds, config_file=arguments.original_config_file, **told)


def build_model(weights: Weights, source) -> LatentDiffusionModel:
    """The model of whole weights, in evaluation mode. Raises ModelError where components are missing or do not fit."""
    require_components(whole_model(weights.components), weights, source)
    check_fit({kind: component.config for kind, component in weights.components.items()}, source, drawn=True)
    with paddle.utils.unique_name.guard():
        family = family_of(weights.components)
        parts = {name: fill_component(kind_of(family, name), one) for name, one in weights.components.items()}
        model = _class_of(parts)(Process.of(weights.scheduler), sampling_settings(weights.scheduler), **parts)
    model.eval()
    return model


def _class_of(parts) -> type[LatentDiffusionModel]:
    own = (("transformer", "sd3", is_sd3), ("unet", "sdxl", is_sdxl))
    names = {*parts, *(name for kind, name, is_own in own if kind in parts and is_own(parts[kind].config))}
    return resolve_name(f"ppldm.networks.{next(where for name, where in _MODELS.items() if name in names)}")


def weights_of(model: LatentDiffusionModel, average=None) -> Weights:
    """The weights of a built model, or their `average`, copied, in float32, adapters merged in; and its tokenizer."""
    from ..weights.lora.merge import merged

    with average.applied() if average else nullcontext():
        components = {name: component_of(name, one.layer) for name, one in model.networks.items()}
        weights = merged(Weights(components, model.process_settings(), model.tokenizer), model)
    frozen = tuple(name for name, component in model.networks.items() if not component.trained)
    return replace(weights, frozen=frozen)


def require_components(kinds, weights: Weights, source) -> None:
    """Raises ModelError where one of these components is missing."""
    for kind in (kind for kind in kinds if kind not in weights.components):
        from_parts = "start from its VAE and UNet with --vae_name_or_path and --unet_name_or_path"
        remedy = from_parts if kind == "text_encoder" else "give a whole pipeline"
        raise ModelError(f"{source} has no {LABELS[kind]} of a kind that is known; {remedy}")
