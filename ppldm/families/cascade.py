"""The stages of Stable Cascade (Pernias et al. 2023, arXiv:2306.00637, and its public trainer).

A picture goes through three networks: stage A, an autoencoder; stage B, which draws the latents of A by the small
latents of an EfficientNet; and stage C, which draws those by a caption. A is trained by itself, B and C one at a time,
beside networks that stay frozen. Latents of A are quantised while it learns; B draws them as they are before that.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from ..config.option import Needs, option
from ..data.control import make_filter
from ..networks.config_fields import CASCADE_BLOCKS, CONTROL_BOTTLENECKS
from ..networks.configs import EFFNET_FACTOR, check_config, downscale_factor, read_new_config
from ..utils.errors import ConfigError, ModelError
from ..utils.rng import Stream
from .base import check_sides
from .ldm import TextToImage
from .settings import (
    AdapterSettings,
    AverageSettings,
    ControlSettings,
    DrawnSettings,
    ObjectiveSettings,
    config_option,
    lora_components,
    lora_modules,
    weights_option,
)

_model = partial(option, section="model")
_CONTROLNET, _PUBLISHED_BLOCKS = "controlnet", (0, 4, 8, 12, 51, 55, 59, 63)
_new = partial(
    option,
    section="model",
    needs=Needs("a new ControlNet: --controlnet_name_or_path goes before it",
                lambda given: given.controlnet_name_or_path is None),
)  # fmt: skip


@dataclass(kw_only=True)
class CascadeSettings(ObjectiveSettings, AverageSettings, DrawnSettings):
    """A base of the settings of a stage. networks: the names of the components that it must have, the one that is
    trained last; optional: of those that it has where their weights are named."""

    networks: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    trains_adapters: ClassVar[bool] = False
    starts_from_pipeline: ClassVar[bool] = False
    default_tokenizer: ClassVar[None] = None
    trains_text_encoder: ClassVar[bool] = False
    how_to_freeze: ClassVar[str] = ""
    original_config_file: ClassVar[None] = None
    load_ema: ClassVar[bool] = False
    mask_pad_tokens: ClassVar[bool] = True

    effnet_name_or_path: str | None = weights_option("Frozen EfficientNet, which makes the small latents")
    effnet_config_file: str | None = config_option(
        "effnet", "an EfficientNet that stays as it is drawn, to try things out", "effnet_v2_s, effnet_tiny"
    )
    text_encoder_name_or_path: str | None = weights_option(
        "Frozen CLIP text encoder with its projection and its tokenizer"
    )
    text_encoder_config_file: str | None = config_option(
        "text_encoder", "a text encoder that stays as it is drawn, to try things out", "clip_vit_bigg, clip_tiny"
    )
    tokenizer_name: str | None = _model(None, kind="tokenizer")
    "The tokenizer's folder, with vocab.json and merges.txt, or vocab.txt (default: the text encoder's own)."

    def check(self) -> None:
        """Raises ConfigError for components that nothing gives, and combinations that cannot work."""
        self.check_given(self.networks)
        if (kind := self.prediction_type).startswith("flow"):
            raise ConfigError(f"--prediction_type {kind} is not for Stable Cascade; use epsilon or v_prediction")
        self.check_objective()
        self.check_average()

    @property
    def components(self) -> tuple[str, ...]:
        return (*(name for name in self.optional if self.name_of(name)), *self.networks)

    @property
    def trained(self) -> tuple[str, ...]:
        """The last, unless it has adapters."""
        return () if self.trains_adapters else self.components[-1:]

    def schedule(self, resolution: int | None) -> dict:
        """The settings of the process (`diffusion.process.Process.of`): the cosine schedule, where none is chosen."""
        return {"beta_schedule": "cosine", **self.chosen_schedule(resolution)}


@dataclass(kw_only=True)
class PriorSettings(CascadeSettings):
    """The same of stage C, trained or led."""

    networks: ClassVar = ("effnet", "text_encoder", "prior")
    optional: ClassVar = ("image_encoder",)

    image_encoder_name_or_path: str | None = weights_option(
        "Frozen CLIP image encoder, of which stage C is told for 10 % of the samples (default: none)"
    )
    previewer_name_or_path: str | None = _model(None, kind="path")
    """Stable Cascade's previewer.safetensors, by which small latents are shown in samples (default: three of their
    channels as colours)."""
    prior_name_or_path: str | None = weights_option("Stage C to start from")
    prior_config_file: str | None = config_option(
        "prior", "a stage C that is trained from scratch", "cascade_c_3b, cascade_c_1b, cascade_c_tiny"
    )


class CascadeStage(TextToImage):
    """Trains the last of a config's `components`, and no other. model: where in `networks.cascade` its class is."""

    model: ClassVar[str]
    frozen: ClassVar = {"effnet": "effnet", "text_encoder": "projected_text_encoder"}
    unsupported = ("to_static",)

    def check(self, config: CascadeSettings, data) -> None:
        """Configs that are here, by themselves and together, and the size of pictures."""
        check_sides(EFFNET_FACTOR, "the EfficientNet's", data)
        super().check(config, data)

    def new_config(self, name: str, config: CascadeSettings, found: dict) -> dict | None:
        return read_new_config(self.components[name], config.file_of(name), f"--{name}_config_file")

    def make(self, config: CascadeSettings, data, seed: int, tokenizer):
        import paddle

        from ..diffusion.process import Process
        from .ldm_build import make_parts

        with paddle.utils.unique_name.guard():
            parts, configs = make_parts(self, config, tokenizer.vocab_size, seed)
            process = Process.of(config.schedule(data.resolution), config.weighting())
            model = resolve_name(f"ppldm.networks.cascade.{self.model}")(**parts, process=process)
        if place := getattr(config, "previewer_name_or_path", None):
            from ..networks.cascade.previewer import load_previewer
            from ..weights.formats.files import read_arrays

            model.previewer = (load_previewer(read_arrays(place), configs["prior"]["in_channels"], place),)
        model.end_id = tokenizer.end_id
        model.inputs = self.inputs(config, configs, model.process)
        return model

    def inputs(self, config: CascadeSettings, configs: dict, process) -> dict:
        """What a batch must hold, by name: here the caption and a noise level."""
        from ..data.inputs import TextEmbeddings, Tokens

        length = config.model_max_length
        return {
            "input_ids": Tokens(length),
            "text_embeddings": TextEmbeddings(length + 1, configs["text_encoder"]["hidden_size"]),
            "timesteps": config.level_input(process.num_levels),
        }

    def exported(self, config: CascadeSettings) -> tuple[str, ...]:
        return config.components[-1:]

    def export(self, model, config: CascadeSettings, dataset, folder: Path, average, metadata: dict) -> None:
        """The trained network, a stage as diffusers' StableCascadeUNet reads it, model.json and ppldm.json."""
        from contextlib import nullcontext

        from ..utils.files import atomic_dir, write_json
        from ..weights.components import Weights
        from ..weights.fill import component_of, describe_model
        from ..weights.lora.merge import lora_of, merge_lora
        from ..weights.write import write_component

        name = config.components[-1]
        kind = self.components[name]
        with atomic_dir(folder) as target:
            if not model.adapters:  # nothing is left of them once they are merged in
                describe_model(self, model).write(target)
            with average.applied() if average else nullcontext():
                whole = merge_lora(Weights({name: component_of(kind, getattr(model, name))}), lora_of(model))
                write_component(kind, whole.components[name], target, "diffusers")
            write_json(target / "ppldm.json", {**metadata, "ema": average is not None})


@dataclass(kw_only=True)
class CascadePriorConfig(AdapterSettings, PriorSettings):
    """Where the components come from, and what is trained."""

    family: ClassVar[str] = "cascade_prior"

    lora_modules: list[str] = lora_modules("attention", "kv_mapper, channelwise, to_q …")
    lora_components: list[str] = lora_components("prior")

    def check(self) -> None:
        super().check()
        self.check_adapters()
        if self.lora_components != ["prior"]:
            raise ConfigError(
                f"--lora_components {' '.join(self.lora_components)}: of Stable Cascade only the prior can have "
                "low-rank adapters; omit it"
            )


class CascadePrior(CascadeStage):
    plural = "priors of Stable Cascade"
    Config = CascadePriorConfig
    components: ClassVar = {**CascadeStage.frozen, "image_encoder": "image_encoder", "prior": "cascade_prior"}
    optional = ("image_encoder",)
    export_folder = "prior"
    model = "stages.CascadePriorModel"

    def check(self, config: CascadePriorConfig, data) -> None:
        """Cached latents, beside which there are no pictures to be told of."""
        super().check(config, data)
        if data.latents != "off" and config.image_encoder_name_or_path:
            raise ConfigError(
                f"--latents {data.latents} leaves no pictures for the image encoder; omit --image_encoder_name_or_path "
                "or --latents"
            )
        if data.text_embeddings != "off" and getattr(config, "train_tokens", None):
            raise ConfigError("--train_tokens changes what captions are embedded as; omit --text_embeddings")

    def inputs(self, config: CascadePriorConfig, configs: dict, process) -> dict:
        """The picture, its caption, a noise level, noise of the small latents, and whether the picture is told."""
        from ..data.inputs import Moments, Normals, Pixels, Uncached, Uniform

        latents = {"channels": configs["prior"]["in_channels"], "factor": EFFNET_FACTOR}
        told = {"clip_image": Uniform(Stream.CLIP_IMAGE)}
        cached = {"moments": Moments(**latents), "uncached": Uncached()}
        return {
            "pixel_values": Pixels(),
            **(told if "image_encoder" in configs else cached),
            **super().inputs(config, configs, process),
            **config.noise_inputs(partial(Normals, **latents)),
        }


@dataclass(kw_only=True)
class CascadeDecoderConfig(CascadeSettings):
    """Where the components come from, and what is trained."""

    family: ClassVar[str] = "cascade_decoder"
    networks: ClassVar = ("effnet", "text_encoder", "vqgan", "decoder")

    vqgan_name_or_path: str | None = weights_option("Frozen stage A, the autoencoder of the latents")
    vqgan_config_file: str | None = config_option(
        "vqgan", "a stage A that stays as it is drawn, to try things out", "vqgan_f4, vqgan_tiny"
    )
    decoder_name_or_path: str | None = weights_option("Stage B to start from")
    decoder_config_file: str | None = config_option(
        "decoder", "a stage B that is trained from scratch", "cascade_b_3b, cascade_b_700m, cascade_b_tiny"
    )


class CascadeDecoder(CascadeStage):
    plural = "decoders of Stable Cascade"
    Config = CascadeDecoderConfig
    components: ClassVar = {**CascadeStage.frozen, "vqgan": "vqgan", "decoder": "cascade_decoder"}
    export_folder = "decoder"
    model = "stages.CascadeDecoderModel"

    def inputs(self, config: CascadeDecoderConfig, configs: dict, process) -> dict:
        """The picture, its caption, a noise level, noise of the latents, and how the EfficientNet sees the picture."""
        from ..data.inputs import Normals, Pixels, Pyramid, Uniform

        sizes = {"channels": configs["decoder"]["in_channels"], "factor": downscale_factor(configs["vqgan"])}

        def normals(stream, **changes):
            own = Normals(stream, **{**sizes, **changes})
            return Pyramid(own, Stream.PYRAMID) if stream == Stream.NOISE else own

        return {
            "pixel_values": Pixels(),
            **super().inputs(config, configs, process),
            **config.noise_inputs(normals),
            "effnet_resize": Uniform(Stream.EFFNET_RESIZE),
            "effnet_drop": Uniform(Stream.EFFNET_DROP),
        }


@dataclass(kw_only=True)
class CascadeControlNetConfig(ControlSettings, PriorSettings):
    """Where the components come from, and what is trained."""

    family: ClassVar[str] = "cascade_controlnet"

    controlnet_name_or_path: str | None = weights_option("ControlNet to start from (default: a new one)")
    controlnet_blocks: list[int] = _new(list(_PUBLISHED_BLOCKS))
    """The numbers of the residual blocks of stage C before which the ControlNet adds something; the published ones are
    for the 64 blocks of the largest."""
    controlnet_bottleneck: str = _new("effnet", choices=CONTROL_BOTTLENECKS)
    """What the ControlNet is: a copy of the EfficientNet, of the control image; large, of what the EfficientNet makes
    of that; simple, two convolutions of its means over 32 x 32 pixels."""

    @property
    def components(self) -> tuple[str, ...]:
        return (*super().components, _CONTROLNET)


class CascadeControlNet(CascadePrior):
    plural = "ControlNets of Stable Cascade"
    Config = CascadeControlNetConfig
    components: ClassVar = {**CascadePrior.components, _CONTROLNET: "cascade_controlnet"}
    export_folder = _CONTROLNET
    model = "control.ControlledPriorModel"

    def unsaved(self, config: CascadeControlNetConfig) -> tuple[str, ...]:
        """What is frozen."""
        return config.components[:-1]

    def new_config(self, name: str, config: CascadeControlNetConfig, found: dict) -> dict | None:
        """The ControlNet's follows from the others; None where those are not here."""
        if name != _CONTROLNET:
            return super().new_config(name, config, found)
        effnet, prior = found["effnet"], found["prior"]
        if not (effnet and prior):
            return None
        own: dict[str, Any] = {"bottleneck": config.controlnet_bottleneck, "blocks": config.controlnet_blocks}
        own |= {"conditioning_channels": self._num_channels(config, own, effnet)}
        own |= {"projection_channels": prior["block_out_channels"][0]}
        own |= {key: effnet[key] for key in ("stage_channels", "stage_layers")}
        return check_config(self.components[name], own, "--controlnet_blocks", ConfigError)

    def _num_channels(self, config: CascadeControlNetConfig, own: dict | None, effnet: dict | None) -> int | None:
        """Of what a ControlNet of the config `own` sees; None where configs are not here. Raises ConfigError."""
        channels = make_filter(config.control).num_channels
        if not (own and effnet):
            return None
        if own["bottleneck"] != "large":
            return channels
        if channels != 3:
            raise ConfigError(
                f"--control {config.control} has {channels} channels, and the EfficientNet of --controlnet_bottleneck "
                "large takes 3; choose another"
            )
        return effnet["latent_channels"]

    def check_configs(self, configs: dict, config: CascadeControlNetConfig) -> None:
        """The ControlNet with the filter of control images and the prior too."""
        super().check_configs(configs, config)
        own, prior = configs[_CONTROLNET], configs["prior"]
        seen = self._num_channels(config, own, configs["effnet"])
        if seen and own["conditioning_channels"] != seen:
            raise ModelError(
                f"{config.controlnet_name_or_path} sees {own['conditioning_channels']} channels; with --control "
                f"{config.control} there are {seen}"
            )
        if own and prior and (problem := next(control_misfits(own, prior), None)):
            raise ModelError(f"{problem}; choose others, or set --controlnet_blocks")

    def new_network(self, name: str, config: dict, parts: dict, seed: int):
        """A ControlNet begins with the EfficientNet."""
        if name != _CONTROLNET:
            return super().new_network(name, config, parts, seed)
        from ..networks.cascade.control import new_controlnet

        return new_controlnet(parts["effnet"], config, seed)

    def inputs(self, config: CascadeControlNetConfig, configs: dict, process) -> dict:
        """Those of stage C, and the control image."""
        from ..data.inputs import Control

        return super().inputs(config, configs, process) | {"control": Control(make_filter(config.control))}


def control_misfits(controlnet: dict, prior: dict):
    """Why a control network, by completed configs, is not for a prior."""
    channels, widths = controlnet["projection_channels"], prior["block_out_channels"]
    if set(widths) != {channels}:
        yield f"the ControlNet gives {channels} channels, and the prior's levels have {widths}"
    passes = zip((*zip(prior["down_num_layers_per_block"], prior["down_blocks_repeat_mappers"], strict=True),
                  *zip(prior["up_num_layers_per_block"], prior["up_blocks_repeat_mappers"], strict=True)),
                 (*prior["block_types_per_layer"], *prior["block_types_per_layer"][::-1]), strict=True)  # fmt: skip
    blocks = sum(depth * times * names.count(CASCADE_BLOCKS[0]) for (depth, times), names in passes)
    if controlnet["blocks"][-1] >= blocks:
        yield f"the ControlNet is for block {controlnet['blocks'][-1]}, and the prior has 0 .. {blocks - 1}"


FAMILIES = (CascadePrior(), CascadeDecoder(), CascadeControlNet())
