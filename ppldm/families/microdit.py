"""Text to image by micro_diffusion's transformer (Sehwag et al. 2024, arXiv:2407.15811) on the latents of a frozen VAE:
`networks.transformers.microdit`.

A mixer tells patches of one another before most of them are left out. docs/models.md has the recipes.
"""

from dataclasses import dataclass
from typing import ClassVar

from .common.transformer import TextToImageTransformer, TransformerSettings


@dataclass(kw_only=True)
class MicroDitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "microdit"


class MicroDiT(TextToImageTransformer):
    """Of micro_diffusion's transformer."""

    plural = "MicroDiTs"
    Config = MicroDitConfig


FAMILY = MicroDiT()
