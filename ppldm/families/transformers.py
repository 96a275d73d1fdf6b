"""Text to image by a transformer on the latents of a frozen VAE; docs/models.md has the recipes.

uvit      Bao et al. 2023, arXiv:2209.12152 (ppdiffusers' UViTT2IModel): captions and noise level are tokens beside the
          patches, and skips join the first half of the blocks with the second
dit       Peebles and Xie 2023, arXiv:2212.09748 (ppdiffusers' Transformer2DModel), with the captions of PixArt-alpha,
          Chen et al. 2023, arXiv:2310.00426
microdit  Sehwag et al. 2024, arXiv:2407.15811 (`networks.transformers.microdit`): a mixer tells patches of one another
          before most of them are left out
single_stream  words and patches are one sequence (`networks.transformers.single_stream`), of pictures of any shape
"""

from dataclasses import dataclass
from typing import ClassVar

from ..config.option import Positive, SmallShare, option
from ..networks.configs import downscale_factor, is_uvit, table_of
from ..utils.errors import ConfigError, ModelError
from .base import check_sides
from .ldm import TextToImage
from .settings import PartsSettings, config_option, learning_rate_of, lora_components, weights_option


@dataclass(kw_only=True)
class TransformerSettings(PartsSettings):
    """A base of the settings; `family` says which transformer it is."""

    denoiser: ClassVar[str] = "transformer"
    new_text_encoder = "text_encoder"

    transformer_name_or_path: str | None = weights_option("Transformer to start from", in_parts=True)
    transformer_config_file: str | None = config_option(
        "transformer", "a transformer that is trained from scratch", "uvit_s2, dit_xl2, …", in_parts=True
    )
    patch_masking: SmallShare = option(0.0, section="model", identity=True)
    """Leave this share of the patches of each picture out of the training: 0.75 makes a step about four times as cheap
    (docs/models.md)."""
    transformer_learning_rate: Positive | None = learning_rate_of("the transformer")
    lora_components: list[str] = lora_components("transformer", "text_encoder")

    def new_config(self, name: str) -> dict:
        """A UViT's table of positions is as long as the captions."""
        found = super().new_config(name)
        return found | {"num_text_tokens": self.model_max_length} if "num_text_tokens" in found else found


class TextToImageTransformer(TextToImage):
    """Trains a transformer of the family's name in `networks.config_fields.CLASSES`, and a text encoder if asked to."""

    components: ClassVar = {"vae": "vae", "text_encoder": "text_encoder", "transformer": "transformer"}
    masks_padding = False  # behind captions, where `--mask_pad_tokens` asks for it

    def check(self, config: TransformerSettings, data) -> None:
        """Also that patches fill the latents, and that some are kept."""
        super().check(config, data)
        configs = self.configs(config)
        if configs["vae"] and configs["transformer"]:
            side = downscale_factor(configs["vae"]) * configs["transformer"]["patch_size"]
            check_sides(side, "the VAE's", data, " times the transformer's patch_size")

    def check_configs(self, configs: dict, config: TransformerSettings) -> None:
        """Also that the transformer is of this family, and takes captions as they are."""
        super().check_configs(configs, config)
        transformer = configs["transformer"]
        if not transformer:
            return
        if (other := table_of("transformer", transformer)) != self.name:
            raise ModelError(f"the transformer is of another kind; train it as `family: {other}`")
        if is_uvit(transformer) and transformer["num_text_tokens"] != config.model_max_length:
            raise ModelError(
                f"the transformer has positions for {transformer['num_text_tokens']} tokens of a caption; give it "
                f"--model_max_length {transformer['num_text_tokens']}"
            )
        if config.mask_pad_tokens and not self.masks_padding:
            raise ConfigError(f"--mask_pad_tokens is not for {self.plural}, which look at all tokens; omit it")

    def build(self, config: TransformerSettings, data, seed: int):
        """With the patches that are kept in a batch, where some are left out."""
        from ..data.inputs import KeptPatches

        model = super().build(config, data, seed)
        if config.patch_masking:
            side = downscale_factor(model.vae.config) * model.transformer.config.patch_size
            model.inputs["kept_patches"] = KeptPatches(side, config.patch_masking)
        return model


@dataclass(kw_only=True)
class UVitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "uvit"


class UViT(TextToImageTransformer):
    plural = "UViTs"
    Config = UVitConfig


@dataclass(kw_only=True)
class DitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "dit"


class DiT(TextToImageTransformer):
    plural = "DiTs"
    masks_padding = True
    Config = DitConfig


@dataclass(kw_only=True)
class MicroDitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "microdit"


class MicroDiT(TextToImageTransformer):
    plural = "MicroDiTs"
    Config = MicroDitConfig


@dataclass(kw_only=True)
class SingleStreamConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "single_stream"


class SingleStream(TextToImageTransformer):
    plural = "single-stream transformers"
    masks_padding = True
    Config = SingleStreamConfig


FAMILIES = (UViT(), DiT(), MicroDiT(), SingleStream())
