"""Text to image by UViT (Bao et al. 2023, arXiv:2209.12152) on the latents of a frozen VAE: ppdiffusers' UViTT2IModel.

Captions and the noise level are tokens beside the patches, and skips join the first half of the blocks with the second.
docs/models.md has the recipes.
"""

from dataclasses import dataclass
from typing import ClassVar

from .common.transformer import TextToImageTransformer, TransformerSettings


@dataclass(kw_only=True)
class UVitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "uvit"


class UViT(TextToImageTransformer):
    """Of ppdiffusers' UViTT2IModel."""

    plural = "UViTs"
    Config = UVitConfig


FAMILY = UViT()
