"""Stable Diffusion XL (Podell et al. 2023, arXiv:2307.01952): a frozen VAE, two frozen text encoders, and a UNet that
is also told the state of the whole caption and six sizes (`networks.sdxl`). Of its models the base, not the refiner.

text_encoder    a CLIP, ViT-L as published
text_encoder_2  a CLIP with a projection, ViT-bigG
"""

from dataclasses import dataclass
from typing import ClassVar

from ..config.option import option
from ..networks.configs import SIZE_EMBEDDING, is_sdxl, table_of
from ..utils.errors import ModelError
from .settings import UNetSettings, config_option, lora_components, weights_option
from .several import SeveralTexts, SeveralTextsSettings


@dataclass(kw_only=True)
class SDXLConfig(SeveralTextsSettings, UNetSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "sdxl"
    new_text_encoder = "clip"
    size_conditioning: ClassVar[bool] = True

    unet_name_or_path: str | None = weights_option("UNet to start from", in_parts=True)
    unet_config_file: str | None = config_option(
        "unet", "a UNet2DConditionModel that is trained from scratch", "unet_sdxl, unet_sdxl_tiny", in_parts=True
    )
    empty_caption: str | None = option(None, section="model", identity=True, choices=("embedding", "zeros"))
    """What is seen of an empty caption, in guidance too: the embedding of it, or zeros; saved with the model (default:
    as the starting model's force_zeros_for_empty_prompt says, else zeros)."""
    lora_components: list[str] = lora_components("unet")

    @property
    def components(self) -> tuple[str, ...]:
        return "vae", "text_encoder", "text_encoder_2", "unet"


class SDXL(SeveralTexts):
    """Trains the UNet."""

    plural = "Stable Diffusion XL models"
    Config = SDXLConfig
    components: ClassVar = {
        **{"vae": "vae", "text_encoder": "text_encoder", "text_encoder_2": "text_encoder_2", "unet": "unet"},
    }

    def check_configs(self, configs: dict, config: SDXLConfig) -> None:
        """Also that the networks are of these kinds."""
        if configs["text_encoder"] and (kind := table_of("text_encoder", configs["text_encoder"])) != "clip":
            raise ModelError(f"the text encoder is of the kind {kind}, and a CLIP is due; choose one")
        if configs["unet"] and not is_sdxl(configs["unet"]):
            raise ModelError(
                f"the UNet is told no state of a whole caption ({', '.join(SIZE_EMBEDDING)} in its config); train it "
                "as `family: stable_diffusion`"
            )
        super().check_configs(configs, config)

    def make(self, config: SDXLConfig, data, seed: int, tokenizer):
        """The corner of a crop is that in the picture as it is seen, mirrored or not."""
        from ..data.inputs import Sizes

        if not config.starts_from_pipeline:
            config.empty_caption = config.empty_caption or "zeros"
        model = super().make(config, data, seed, tokenizer)
        model.inputs |= {"sizes": Sizes(config.size_conditioning_drop, as_seen=True)}
        return model


FAMILY = SDXL()
