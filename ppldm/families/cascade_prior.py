"""Stage C of Stable Cascade: draws the small latents of a picture by its caption."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..networks.configs import EFFNET_FACTOR
from ..utils.errors import ConfigError
from ..utils.rng import Stream
from .common.cascade import CascadeStage, PriorSettings
from .settings.adapters import AdapterSettings, lora_components, lora_modules


@dataclass(kw_only=True)
class CascadePriorConfig(AdapterSettings, PriorSettings):
    """Where the components come from, and what is trained."""

    family: ClassVar[str] = "cascade_prior"

    lora_modules: list[str] = lora_modules("attention", "kv_mapper, channelwise, to_q …")
    lora_components: list[str] = lora_components("prior")

    def check(self) -> None:
        """With the adapters."""
        super().check()
        self.check_adapters()
        if self.lora_components != ["prior"]:
            raise ConfigError(
                f"--lora_components {' '.join(self.lora_components)}: of Stable Cascade only the prior can have "
                "low-rank adapters; omit it"
            )


class CascadePrior(CascadeStage):
    """Trains stage C."""

    plural = "priors of Stable Cascade"
    Config = CascadePriorConfig
    components: ClassVar = {**CascadeStage.frozen, "image_encoder": "image_encoder", "prior": "cascade_prior"}
    optional = ("image_encoder",)
    export_folder = "prior"
    model = "stages.CascadePriorModel"
    joints = (
        ("effnet", "latent_channels", "prior", "in_channels"),
        ("text_encoder", "hidden_size", "prior", "clip_text_in_channels"),
        ("text_encoder", "projection_dim", "prior", "clip_text_pooled_in_channels"),
        ("image_encoder", "projection_dim", "prior", "clip_image_in_channels"),
    )

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

    def build(self, config: CascadePriorConfig, data, seed: int):
        """With its adapters."""
        model = super().build(config, data, seed)
        if config.trains_adapters:
            from ..networks.adapters import adapt

            adapt(model, config, seed)
        return model

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


FAMILY = CascadePrior()
