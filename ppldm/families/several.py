"""What families have in common whose captions several frozen text encoders read, each by its own tokenizer."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..config.network_files import beside
from ..data.text.tokenizer import load_tokenizer
from ..networks.configs import CLIPS, TEXT_ENCODERS
from ..utils.errors import ConfigError
from .ldm import TextToImage
from .settings import PartsSettings, config_option, weights_option

LENGTH = "text_encoder_3_max_length"
T5_LENGTH = 256  # tokens, as of diffusers' StableDiffusion3Pipeline


@dataclass(kw_only=True)
class SeveralTextsSettings(PartsSettings):
    """A base of their settings: the text encoders stay as they are."""

    default_tokenizer = "clip"
    train_text_encoder: ClassVar[bool] = False
    trains_text_encoder: ClassVar[bool] = False
    text_encoder_learning_rate: ClassVar[None] = None
    train_tokens: ClassVar[list[str]] = []
    mask_pad_tokens: ClassVar[bool] = False

    text_encoder_config_file: str | None = config_option(
        "text_encoder", "a CLIP that stays as it is drawn, to try things out", "clip_vit_l, clip_tiny", in_parts=True
    )
    text_encoder_2_name_or_path: str | None = weights_option(
        "Second text encoder, a CLIP with its tokenizer", in_parts=True
    )
    text_encoder_2_config_file: str | None = config_option(
        "text_encoder_2", "one that stays as it is drawn, to try things out", "clip_vit_bigg, clip_tiny", in_parts=True
    )

    def check(self) -> None:
        """Raises ConfigError for components that nothing gives, and combinations that cannot work."""
        if odd := next((one for one in self.lora_components if one != self.denoiser), None):
            raise ConfigError(f"--lora_components {odd} is not one of {self.denoiser}; correct it")
        super().check()

    def check_text_encoders(self) -> None:
        """Of a model of parts: all are given, as `check_given` has seen."""


class SeveralTexts(TextToImage):
    """Trains what removes the noise. A batch has the tokens of all text encoders, side by side."""

    def tokenizer(self, config: SeveralTextsSettings):
        """Those of all text encoders: each has its own, or that of `--tokenizer_name`. Raises ConfigError."""
        from .ldm_build import tokenizer_source

        places = {name: tokenizer_source(config, name) for name in self.places(config) if name in TEXT_ENCODERS}
        return load_several(places, vars(config), config.offline)

    def read_tokenizer(self, place, components: Iterable[str], said: dict):
        """Those that lie beside it, else the same for all."""
        places = {name: beside(Path(place), name) for name in TEXT_ENCODERS if name in components}
        places = {name: one if one.is_dir() else place for name, one in places.items()}
        return load_several(places, {LENGTH: T5_LENGTH} | said)

    def make(self, config: SeveralTextsSettings, data, seed: int, tokenizer):
        from ..data.inputs import TextEmbeddings, Tokens

        model = super().make(config, data, seed, tokenizer)
        model.inputs |= {
            "input_ids": Tokens(tokenizer.num_tokens), "text_embeddings": TextEmbeddings(*model.captions.shape)
        }  # fmt: skip
        return model


def load_several(places: dict, lengths: dict, offline: bool = False):
    """The tokenizers of text encoders by name, of these places; lengths: by the names of the settings."""
    from ..data.text.several import SeveralTokenizers

    clip = lengths["model_max_length"]
    found = {
        name: load_tokenizer(one, clip if name in CLIPS else lengths[LENGTH], offline) for name, one in places.items()
    }
    return SeveralTokenizers(found, clip)
