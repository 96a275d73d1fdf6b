"""Stage A of Stable Cascade: Paella's autoencoder, such as `cascade_decoder` takes for its latents (docs/models.md).

Its latents are quantised while it learns; stage B draws them as they are before that.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..networks.configs import paella_factor
from ..utils.errors import ConfigError
from .autoencoder import Autoencoder, ReconstructionSettings
from .base import check_sides
from .common.cascade import config_option, weights_option


@dataclass(kw_only=True)
class CascadeAutoencoderConfig(ReconstructionSettings):
    """What it is trained as."""

    family: ClassVar[str] = "cascade_autoencoder"
    network: ClassVar[str] = "vqgan"

    vqgan_name_or_path: str | None = weights_option("vqgan", "Stage A to start from")
    vqgan_config_file: str | None = config_option("vqgan", "a new stage A", "vqgan_f4, vqgan_tiny")

    def check(self) -> None:
        """Also that something gives the network."""
        super().check()
        if not (self.source or self.vqgan_config_file):
            raise ConfigError("nothing gives stage A: name --vqgan_config_file, or weights, --vqgan_name_or_path")


class CascadeAutoencoder(Autoencoder):
    """Trains all of it."""

    plural = "autoencoders of Stable Cascade"
    Config = CascadeAutoencoderConfig
    components: ClassVar = {"vqgan": "vqgan", "discriminator": "PatchDiscriminator", "lpips": "Lpips"}
    export_folder = "vqgan"

    def check_sides(self, network, data) -> None:
        """By its downscaling factor."""
        check_sides(paella_factor(network), "stage A's", data)

    def objective(self, vqgan, config: CascadeAutoencoderConfig, settings: dict):
        """The model to train."""
        from ..data.inputs import Pixels
        from ..networks.cascade.autoencoder import QuantisedObjective

        model = QuantisedObjective(vqgan, config.reconstruction_loss, **settings)
        model.inputs = {"pixel_values": Pixels()}
        return model


FAMILY = CascadeAutoencoder()
