"""Text to image led by a second picture: ControlNet (Zhang et al. 2023, arXiv:2302.05543).

The base, a model of `ldm` or of `stable_diffusion`, is frozen; a copy of its UNet's encoder is trained, which sees a
control image beside each picture (`networks.controlnet`).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..config.option import option
from ..data.control import make_filter
from ..utils.errors import ConfigError, ModelError
from ..weights.model_file import Component
from .ldm import TextToImage
from .settings import ControlSettings, UNetSettings

_model = partial(option, section="model")


@dataclass(kw_only=True)
class ControlNetConfig(ControlSettings, UNetSettings):
    """The base, and what is trained beside it."""

    family: ClassVar[str] = "controlnet"
    trains_text_encoder = False
    starts_from_pipeline = True

    model_name_or_path: str | None = _model(
        None,
        "The base, whole: a pipeline's folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, CompVis' .ckpt, or a "
        "name, such as CompVis/stable-diffusion-v1-4.",
        also=("pretrained_model_name_or_path",),
        kind="model",
    )
    controlnet_name_or_path: str | None = _model(
        None,
        "ControlNet to start from: its folder, or that of a model with one (default: a copy of the UNet's encoder).",
        kind="model",
    )
    tokenizer_name: str | None = _model(None, "The tokenizer's folder (default: the base's own).", kind="tokenizer")

    def check(self) -> None:
        if self.model_name_or_path is None:
            raise ConfigError("a ControlNet stands on a model that is trained: name it with --model_name_or_path")
        if self.unet_learning_rate is not None:
            raise ConfigError("--unet_learning_rate is for what is not trained here; use --learning_rate")
        if self.trains_adapters:
            raise ConfigError("--lora_rank and --train_tokens adapt the base, which is frozen here; omit them")
        super().check()


class ControlNet(TextToImage):
    """Trains only the control network."""

    plural = "ControlNets"
    Config = ControlNetConfig
    components: ClassVar = {**TextToImage.components, "controlnet": "controlnet"}

    def check(self, config: ControlNetConfig, data) -> None:
        """With the filter of control images."""
        make_filter(config.control)
        super().check(config, data)

    def places(self, config: ControlNetConfig) -> dict[str, str | None]:
        """The base's, and that of a control network with weights."""
        return super().places(config) | {"controlnet": config.controlnet_name_or_path}

    def networks(self, config: ControlNetConfig, data) -> dict[str, Component]:
        """Of the base, frozen, and of the control network."""
        from ..networks.controlnet import controlnet_config

        base = {name: Component(one.config, False) for name, one in super().networks(config, data).items()}
        channels = make_filter(config.control).num_channels
        own = controlnet_config(base["unet"].config, base["vae"].config, channels)
        return base | {"controlnet": Component(own, True)}

    def build(self, config: ControlNetConfig, data, seed: int):
        """The base and its control network; a batch has control images."""
        from ..data.inputs import Control

        model = super().build(config, data, seed)
        model.inputs["control"] = Control(make_filter(config.control))
        return model

    def assemble(self, config: ControlNetConfig, seed: int, vae, text_encoder, unet, process, frozen, sampling):
        """With a control network of weights of its own, or a new one."""

        from ..networks.configs import check_fit
        from ..networks.controlnet import ControlledDiffusionModel, controlnet_config, new_controlnet
        from ..networks.cpu_operators.layers import plain_attention
        from ..weights.fill import config_of, fill_component
        from ..weights.source import read_component

        base, channels = config_of("unet", unet), make_filter(config.control).num_channels
        if name := config.controlnet_name_or_path:
            found = read_component("controlnet", name, offline=config.offline)
            check_fit({"unet": base, "controlnet": found.config}, name)
            if (takes := found.config["conditioning_channels"]) != channels:
                raise ModelError(
                    f"{name} takes control images of {takes} channels; --control {config.control} has {channels}"
                )
            controlnet = fill_component("controlnet", found)
        else:
            controlnet = new_controlnet(unet, controlnet_config(base, vae.config, channels), seed)
        if config.enable_xformers_memory_efficient_attention:
            controlnet.enable_xformers_memory_efficient_attention()
        else:
            controlnet.set_attn_processor(plain_attention())
        return ControlledDiffusionModel(vae, text_encoder, unet, controlnet, process, sampling)

    def export(self, model, config: ControlNetConfig, dataset, folder, average, metadata: dict) -> None:
        """A ppdiffusers pipeline, the base's weights too."""
        super().export(model, config, dataset, folder, average, metadata | {"control": config.control})


FAMILY = ControlNet()
