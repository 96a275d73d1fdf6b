"""Text to image by a DiT (Peebles and Xie 2023, arXiv:2212.09748) on the latents of a frozen VAE: ppdiffusers'
Transformer2DModel with the captions of PixArt-alpha (Chen et al. 2023, arXiv:2310.00426).

docs/models.md has the recipes.
"""

from dataclasses import dataclass
from typing import ClassVar

from .common.transformer import TextToImageTransformer, TransformerSettings


@dataclass(kw_only=True)
class DitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "dit"


class DiT(TextToImageTransformer):
    """Of PixArt-alpha's text-to-image DiT."""

    plural = "DiTs"
    masks_padding = True
    Config = DitConfig


FAMILY = DiT()
