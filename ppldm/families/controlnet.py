"""Text to image led by a second picture: ControlNet (Zhang et al. 2023, arXiv:2302.05543).

The base, a model of `ldm` or of `stable_diffusion`, is frozen; a copy of its UNet's encoder is trained, which sees a
control image beside each picture (`networks.controlnet`).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..config.option import option
from ..data.control import make_filter
from ..networks.configs import controlnet_config
from ..utils.errors import ConfigError, ModelError
from .ldm import TextToImage
from .settings import ControlSettings, UNetSettings

_model = partial(option, section="model")


@dataclass(kw_only=True)
class ControlNetConfig(ControlSettings, UNetSettings):
    """The base, and what is trained beside it."""

    family: ClassVar[str] = "controlnet"
    trained = ("controlnet",)
    trains_text_encoder = False
    starts_from_pipeline = True

    model_name_or_path: str | None = _model(None, also=("pretrained_model_name_or_path",), kind="model")
    """The base, whole: a pipeline's folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, CompVis' .ckpt, or a
    name, such as CompVis/stable-diffusion-v1-4."""
    controlnet_name_or_path: str | None = _model(None, kind="model")
    "ControlNet to start from: its folder, or that of a model with one (default: a copy of the UNet's encoder)."
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
    plural = "ControlNets"
    Config = ControlNetConfig
    components: ClassVar = {**TextToImage.components, "controlnet": "controlnet"}

    def places(self, config: ControlNetConfig) -> dict[str, str | None]:
        """The base's, and that of a control network with weights."""
        return super().places(config) | {"controlnet": config.controlnet_name_or_path}

    def new_config(self, name: str, config: ControlNetConfig, found: dict) -> dict | None:
        """The control network's follows from the base's; None where that is not here."""
        if not (found["unet"] and found["vae"]):
            return None
        return controlnet_config(found["unet"], found["vae"], make_filter(config.control).num_channels)

    def new_network(self, name: str, config: dict, parts: dict, seed: int):
        """A copy of the UNet's encoder."""
        from ..networks.controlnet import new_controlnet

        return new_controlnet(parts["unet"], config, seed)

    def published(self, name: str, config: ControlNetConfig, found: dict) -> dict | None:
        return (self.new_config if name == "controlnet" else super().published)(name, config, found)

    def check_configs(self, configs: dict, config: ControlNetConfig) -> None:
        """Also that the control network takes what the filter gives."""
        super().check_configs(configs, config)
        own, channels = configs["controlnet"], make_filter(config.control).num_channels
        if own and own["conditioning_channels"] != channels:
            raise ModelError(
                f"{config.controlnet_name_or_path} takes control images of {own['conditioning_channels']} channels; "
                f"--control {config.control} has {channels}"
            )

    def build(self, config: ControlNetConfig, data, seed: int):
        """The base and its control network; a batch has control images."""
        from ..data.inputs import Control

        model = super().build(config, data, seed)
        model.inputs["control"] = Control(make_filter(config.control))
        return model

    def export(self, model, config: ControlNetConfig, dataset, folder, average, metadata: dict) -> None:
        """A ppdiffusers pipeline, the base's weights too."""
        super().export(model, config, dataset, folder, average, metadata | {"control": config.control})


FAMILY = ControlNet()
