"""Stable Diffusion 1.x and 2.x: CLIP's text encoder, frozen or trained, a UNet and a frozen VAE.

It is latent diffusion as `ldm` is, and everything but the settings is shared with it (`text_to_image`). What differs is
where components come from. Each has three sources; the first that is given counts:

    --model_name_or_path PIPELINE     all components: fine-tuning
    --<component>_name_or_path        weights of one: a pipeline's folder that holds it, or its own
    --<component>_config_file         one built from scratch: the UNet, or a text encoder that is trained

docs/finetune.md has the recipes.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..config.option import option
from ..networks.configs import is_ldmbert
from ..utils.errors import ModelError
from .common.text_to_image import TextToImage
from .settings.parts import OF_PARTS, PartsSettings, anew
from .settings.text_to_image import UNetSettings

_model = partial(option, section="model")


@dataclass(kw_only=True)
class StableDiffusionConfig(PartsSettings, UNetSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "stable_diffusion"
    new_text_encoder = "clip"

    unet_name_or_path: str | None = _model(
        None, "UNet to start from: a pipeline's folder, its own folder, or a name.", kind="model", needs=OF_PARTS
    )
    unet_config_file: str | None = _model(
        None,
        "Config of a UNet2DConditionModel that is trained from scratch: a JSON file, or a name (unet_sd1, unet_sd2).",
        kind="network",
        needs=anew("unet"),
    )


class StableDiffusion(TextToImage):
    """Of CLIP's text encoder."""

    plural = "Stable Diffusion models"
    Config = StableDiffusionConfig

    def check_configs(self, configs: dict, config: StableDiffusionConfig) -> None:
        """Also that the text encoder is CLIP's."""
        super().check_configs(configs, config)
        if configs["text_encoder"] and is_ldmbert(configs["text_encoder"]):
            raise ModelError("the text encoder is an LDMBert, not CLIP's; train it as `family: ldm`")


FAMILY = StableDiffusion()
