"""Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206): a frozen VAE, three frozen text encoders, of which any may
be missing, and a transformer that learns rectified flow (`networks.transformers.sd3`).

text_encoder    a CLIP with a projection, ViT-L as published
text_encoder_2  the same, ViT-bigG
text_encoder_3  a T5, of captions of up to 256 tokens
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..config.option import Count, option
from ..data.shapes import make_shapes
from ..networks.configs import TEXT_ENCODERS, downscale_factor
from ..utils.errors import ConfigError, ModelError
from ..weights.source import may_hold
from .settings import config_option, lora_components, weights_option
from .several import LENGTH, T5_LENGTH, SeveralTexts, SeveralTextsSettings
from .transformers import TextToImageTransformer, TransformerSettings


@dataclass(kw_only=True)
class SD3Config(SeveralTextsSettings, TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "sd3"
    new_text_encoder = "text_encoder_2"
    enable_xformers_memory_efficient_attention: ClassVar[bool] = False

    prediction_type: str = option("flow", section="model", identity=True, choices=("flow",))
    "What the transformer predicts: the direction of rectified flow."
    text_encoder_3_name_or_path: str | None = weights_option(
        "Third text encoder, a T5 with its tokenizer", in_parts=True
    )
    text_encoder_3_config_file: str | None = config_option(
        "text_encoder_3", "one that stays as it is drawn, by --tokenizer_name", "t5_tiny", in_parts=True
    )
    text_encoder_3_max_length: Count = option(T5_LENGTH, section="model", identity=True, unit="tokens")
    "Tokens of a caption that the third text encoder reads."
    omitted_text_encoders: list[str] = option([], section="model", identity=True)
    "Text encoders of --model_name_or_path that are left out: zeros stand in their place."
    lora_components: list[str] = lora_components("transformer")

    def check(self) -> None:
        """Also for what is omitted and is no text encoder."""
        if odd := next((one for one in self.omitted_text_encoders if one not in TEXT_ENCODERS), None):
            raise ConfigError(f"--omitted_text_encoders {odd} is not one of {', '.join(TEXT_ENCODERS)}; correct it")
        super().check()

    def check_text_encoders(self) -> None:
        if not any(name in TEXT_ENCODERS for name in self.components):
            raise ConfigError("nothing gives a text encoder: name its weights, --text_encoder_name_or_path")

    @property
    def components(self) -> tuple[str, ...]:
        """All of a pipeline's, or those that are given."""
        given = [name for name in TEXT_ENCODERS if name not in self.omitted_text_encoders]
        if not self.starts_from_pipeline:
            given = [name for name in given if self.name_of(name) or self.file_of(name)]
        return "vae", *given, "transformer"


class SD3(SeveralTexts, TextToImageTransformer):
    """Trains the transformer."""

    plural = "models of Stable Diffusion 3"
    Config = SD3Config
    components: ClassVar = {
        **{"vae": "vae", "text_encoder": "projected_text_encoder", "text_encoder_2": "text_encoder_2"},
        **{"text_encoder_3": "text_encoder_3", "transformer": "transformer"},
    }
    optional = TEXT_ENCODERS

    def check(self, config: SD3Config, data) -> None:
        """Also that the transformer has positions for all patches."""
        super().check(config, data)
        configs = self.configs(config)
        if configs["vae"] and configs["transformer"]:
            patch = downscale_factor(configs["vae"]) * configs["transformer"]["patch_size"]
            most = patch * configs["transformer"]["pos_embed_max_size"]
            for side in (data.resolution, *(side for shape in make_shapes(data) or () for side in shape)):
                if side > most:
                    raise ConfigError(f"pictures of {side} pixels a side are larger than the {most} that the "
                                      "transformer has positions for; choose smaller ones")  # fmt: skip

    def places(self, config: SD3Config) -> dict[str, str | None]:
        """Of text encoders those that are there, as far as that is known."""
        if not config.starts_from_pipeline:
            return config.component_names()
        name = config.model_name_or_path
        kinds = {one: self.components[one] for one in config.components}
        return {one: name for one, kind in kinds.items() if one not in self.optional or may_hold(kind, name)}

    def check_configs(self, configs: dict, config: SD3Config) -> None:
        super().check_configs(configs, config)
        if not any(name in TEXT_ENCODERS for name in configs):
            raise ModelError(f"{config.model_name_or_path} has no text encoder; choose a whole pipeline")

    def export(self, model, config: SD3Config, dataset, folder: Path, average, metadata: dict) -> None:
        said = {LENGTH: config.text_encoder_3_max_length} if hasattr(model, "text_encoder_3") else {}
        super().export(model, config, dataset, folder, average, metadata | said)


FAMILY = SD3()
