"""Stable Diffusion 1.x and 2.x: CLIP's text encoder, frozen or trained, a UNet and a frozen VAE.

It is latent diffusion as `ldm` is, and everything but the settings is shared with it (`text_to_image`). What differs is
where components come from. Each has three sources; the first that is given counts:

    --model_name_or_path PIPELINE     all components: fine-tuning
    --<component>_name_or_path        weights of one: a pipeline's folder that holds it, or its own
    --<component>_config_file         one built from scratch: the UNet, or a text encoder that is trained

docs/stable_diffusion.md has the recipes.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ..config.option import Bounds, Needs, option
from ..networks.configs import is_ldmbert
from ..utils.errors import ConfigError, ModelError
from .settings.adapters import adapts_text_encoder, trains_adapters
from .settings.text_to_image import TextToImageSettings
from .text_to_image import TextToImage

_model = partial(option, section="model")
_OF_PARTS = Needs(
    "a model of parts: --model_name_or_path gives all of it", lambda given: given.model_name_or_path is None
)


def _anew(component: str) -> Needs:
    flags = ("model_name_or_path", f"{component}_name_or_path")
    words = " and ".join(f"--{flag}" for flag in flags)
    return Needs(
        f"a component that is built anew: {words} go before it",
        lambda given: all(getattr(given, flag) is None for flag in flags),
    )


def _trains_text_encoder(given) -> bool:
    return adapts_text_encoder(given) if trains_adapters(given) else given.train_text_encoder


@dataclass(kw_only=True)
class StableDiffusionConfig(TextToImageSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "stable_diffusion"
    loop_defaults: ClassVar[dict] = {}
    new_text_encoder = "clip"
    how_to_freeze = "omit --train_text_encoder"

    model_name_or_path: str | None = _model(
        None,
        "Pipeline to fine-tune, whole: its folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, or a name, such "
        "as stabilityai/stable-diffusion-2-1. Goes before all flags of single components.",
        also=("pretrained_model_name_or_path",),
        kind="model",
    )
    vae_name_or_path: str | None = _model(
        None, "Frozen VAE: a pipeline's folder, its own folder, or a name.", kind="model", needs=_OF_PARTS
    )
    text_encoder_name_or_path: str | None = _model(
        None,
        "CLIP text encoder to start from, with its tokenizer: a pipeline's folder, its own folder, or a name.",
        kind="model",
        needs=_OF_PARTS,
    )
    unet_name_or_path: str | None = _model(
        None, "UNet to start from: a pipeline's folder, its own folder, or a name.", kind="model", needs=_OF_PARTS
    )
    text_encoder_config_file: str | None = _model(
        None,
        "Config of a CLIP text encoder that is trained from scratch: a JSON file, or a name (clip_vit_l, clip_vit_h).",
        kind="network",
        needs=_anew("text_encoder"),
    )
    unet_config_file: str | None = _model(
        None,
        "Config of a UNet2DConditionModel that is trained from scratch: a JSON file, or a name (unet_sd1, unet_sd2).",
        kind="network",
        needs=_anew("unet"),
    )
    tokenizer_name: str | None = _model(
        None,
        "Folder with vocab.json and merges.txt, or with vocab.txt (default: the text encoder's own).",
        kind="tokenizer",
    )
    train_text_encoder: bool = _model(False, "Train the text encoder too, not only the UNet.", identity=True)
    text_encoder_learning_rate: float | None = option(
        None,
        "Learning rate of the text encoder (default: --learning_rate).",
        section="optimizer",
        bounds=Bounds(above=0),
        identity=True,
        needs=Needs("--train_text_encoder, or an adapter in it", lambda given: _trains_text_encoder(given)),
    )

    def check(self) -> None:
        """Raises ConfigError for components that nothing gives, and combinations that cannot work."""
        if not self.starts_from_pipeline:
            names, files = self.component_names(), self.config_files()
            for name in names:
                if not (names[name] or files.get(name)):
                    own = "" if name == "vae" else f", or the config of a new one: --{name}_config_file"
                    raise ConfigError(
                        f"nothing gives the {name}: name a whole pipeline, --model_name_or_path; the folder of one, or "
                        f"of the component, --{name}_name_or_path{own}"
                    )
            if not (names["text_encoder"] or self.train_text_encoder):
                raise ConfigError(
                    f"--text_encoder_config_file {self.text_encoder_config_file} makes a text encoder that knows "
                    "nothing yet; add --train_text_encoder, or start from a trained one: --text_encoder_name_or_path"
                )
        super().check()

    @property
    def trains_text_encoder(self) -> bool:
        """`train_text_encoder`, or whether an adapter is in it."""
        return _trains_text_encoder(self)

    @property
    def starts_from_pipeline(self) -> bool:
        """True where a whole pipeline is named."""
        return self.model_name_or_path is not None

    def component_names(self) -> dict[str, str | None]:
        """As the flags say."""
        return {name: getattr(self, f"{name}_name_or_path") for name in StableDiffusion.components}

    def config_files(self) -> dict[str, str]:
        """As the flags say."""
        files = {"text_encoder": self.text_encoder_config_file, "unet": self.unet_config_file}
        return {name: file for name, file in files.items() if file}


class StableDiffusion(TextToImage):
    """Of CLIP's text encoder."""

    name = "stable_diffusion"
    plural = "Stable Diffusion models"
    Config = StableDiffusionConfig

    def check_configs(self, configs: dict, config: StableDiffusionConfig) -> None:
        """Also that the text encoder is CLIP's."""
        super().check_configs(configs, config)
        if configs["text_encoder"] and is_ldmbert(configs["text_encoder"]):
            raise ModelError("the text encoder is an LDMBert, not CLIP's; train it as `family: ldm`")


FAMILY = StableDiffusion()
