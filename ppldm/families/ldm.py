"""Text to image: a frozen VAE, a text encoder and a UNet (latent diffusion, Rombach et al. 2022, arXiv:2112.10752).

By default as published: LDMBert and UNet from scratch over the VAE of Stable Diffusion. Models with CLIP's text encoder
are the family `stable_diffusion`; here it may stand frozen in place of an LDMBert.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from ..config.network_files import DEFAULT_MODEL, DEFAULT_TOKENIZER, DEFAULT_VAE, KNOWN_MODELS
from ..config.option import Needs, option
from ..utils.errors import ConfigError
from .common.text_to_image import TextToImage
from .settings.adapters import adapts_text_encoder, trains_adapters
from .settings.average import learning_rate_of
from .settings.text_to_image import UNetSettings

_model = partial(option, section="model")


def _trains_text_encoder(given) -> bool:
    if trains_adapters(given):
        return adapts_text_encoder(given)
    return not (given.freeze_text_encoder or given.pretrained_text_encoder_name)


@dataclass(kw_only=True)
class LdmConfig(UNetSettings):
    """What is trained: which components, from where, with which target."""

    family: ClassVar[str] = "ldm"
    new_text_encoder = "ldmbert"
    default_tokenizer = DEFAULT_TOKENIZER
    how_to_freeze = "add --freeze_text_encoder, or start from a frozen one with --pretrained_text_encoder_name"

    model_name_or_path: str | None = _model(
        None,
        "What to start from: a pipeline's folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, CompVis' .ckpt, a "
        "name (docs/weights.md); or a published size, built and initialised here: "
        f"{' (32 layers, the default), '.join(KNOWN_MODELS)} (12 layers).",
        also=("pretrained_model_name_or_path",),
        kind="model",
    )
    vae_name_or_path: str | None = _model(
        None,
        "Frozen VAE: a folder with config.json and weights, a pipeline's folder, a .ckpt, or a name "
        f"(default: {DEFAULT_VAE}).",
        kind="model",
    )
    unet_name_or_path: str | None = _model(
        None, "UNet to start from, such as Stable Diffusion's: a folder, a .ckpt, or a name.", kind="model"
    )
    pretrained_text_encoder_name: str | None = _model(
        None, "A frozen CLIP text encoder in place of a trained LDMBert: a folder, or a name.", kind="model"
    )
    text_encoder_config_file: str | None = _model(
        None, "Config of an LDMBert text encoder, built from scratch: a JSON file, or a name.", kind="network"
    )
    unet_config_file: str | None = _model(
        None, "Config of a UNet2DConditionModel, built from scratch: a JSON file, or a name.", kind="network"
    )
    tokenizer_name: str | None = _model(
        None,
        f"Folder with vocab.txt, or a name: bert-base-chinese, ernie-1.0, {DEFAULT_TOKENIZER} (the default).",
        kind="tokenizer",
    )
    freeze_text_encoder: bool = _model(False, "Train the UNet only.", identity=True)
    text_encoder_learning_rate: float | None = learning_rate_of(
        "the text encoder",
        Needs(
            "a text encoder that is trained: those of --freeze_text_encoder and --pretrained_text_encoder_name are not",
            _trains_text_encoder,
        ),
    )

    def check(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        components = (
            self.text_encoder_config_file, self.unet_config_file, self.vae_name_or_path, self.unet_name_or_path,
            self.pretrained_text_encoder_name,
        )  # fmt: skip
        if self.starts_from_pipeline and any(components):
            name = self.model_name_or_path
            what = "is a whole pipeline" if Path(name).exists() else "is not here, so it must be a pipeline on a hub"
            raise ConfigError(
                f"--model_name_or_path {name} {what}; correct it, or omit --vae_name_or_path, --unet_name_or_path, "
                "--pretrained_text_encoder_name, --text_encoder_config_file and --unet_config_file"
            )
        for name, flag in (
            ("unet_name_or_path", "unet_config_file"),
            ("pretrained_text_encoder_name", "text_encoder_config_file"),
        ):
            if getattr(self, name) and getattr(self, flag):
                raise ConfigError(f"--{name} brings its own config; do not give --{flag} beside it")
        super().check()

    @property
    def trains_text_encoder(self) -> bool:
        """False where it is frozen."""
        return _trains_text_encoder(self)

    @property
    def starts_from_pipeline(self) -> bool:
        """True where the weights come from an exported pipeline, not from configs."""
        return self.model_name_or_path is not None and self.model_name_or_path not in KNOWN_MODELS

    def component_names(self) -> dict[str, str | None]:
        """As the flags say, and the published VAE where they name none."""
        names = (self.vae_name_or_path or DEFAULT_VAE, self.pretrained_text_encoder_name, self.unet_name_or_path)
        return dict(zip(LatentDiffusion.components, names, strict=True))

    def config_files(self) -> dict[str, str]:
        """Text encoder and UNet to their config files: those given, else those of the published size."""
        text_encoder, unet = KNOWN_MODELS[self.model_name_or_path or DEFAULT_MODEL]
        return {
            "text_encoder": self.text_encoder_config_file or text_encoder,
            "unet": self.unet_config_file or unet,
        }


class LatentDiffusion(TextToImage):
    """Of an LDMBert that is trained, or of a text encoder that is frozen."""

    Config = LdmConfig


FAMILY = LatentDiffusion()
