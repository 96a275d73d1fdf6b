"""Stage B of Stable Cascade: draws the latents of stage A by the small latents of a picture."""

from dataclasses import dataclass
from typing import ClassVar

from ..networks.configs import paella_factor
from ..utils.rng import Stream
from .common.cascade import CascadeSettings, CascadeStage, config_option, weights_option


@dataclass(kw_only=True)
class CascadeDecoderConfig(CascadeSettings):
    """Where the components come from, and what is trained."""

    family: ClassVar[str] = "cascade_decoder"
    networks: ClassVar = ("effnet", "text_encoder", "vqgan", "decoder")

    vqgan_name_or_path: str | None = weights_option("vqgan", "Frozen stage A, the autoencoder of the latents")
    vqgan_config_file: str | None = config_option(
        "vqgan", "a stage A that stays as it is drawn, to try things out", "vqgan_f4, vqgan_tiny"
    )
    decoder_name_or_path: str | None = weights_option("decoder", "Stage B to start from")
    decoder_config_file: str | None = config_option(
        "decoder", "a stage B that is trained from scratch", "cascade_b_3b, cascade_b_700m, cascade_b_tiny"
    )


class CascadeDecoder(CascadeStage):
    """Trains stage B."""

    plural = "decoders of Stable Cascade"
    Config = CascadeDecoderConfig
    components: ClassVar = {**CascadeStage.frozen, "vqgan": "vqgan", "decoder": "cascade_decoder"}
    export_folder = "decoder"
    model = "stages.CascadeDecoderModel"
    joints = (
        ("effnet", "latent_channels", "decoder", "effnet_in_channels"),
        ("vqgan", "latent_channels", "decoder", "in_channels"),
        ("text_encoder", "projection_dim", "decoder", "clip_text_pooled_in_channels"),
    )

    def inputs(self, config: CascadeDecoderConfig, configs: dict, process) -> dict:
        """The picture, its caption, a noise level, noise of the latents, and how the EfficientNet sees the picture."""
        from ..data.inputs import Normals, Pixels, Pyramid, Uniform

        sizes = {"channels": configs["decoder"]["in_channels"], "factor": paella_factor(configs["vqgan"])}

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


FAMILY = CascadeDecoder()
