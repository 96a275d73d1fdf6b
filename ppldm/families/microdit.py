"""Text to image by micro_diffusion's transformer (Sehwag et al. 2024, arXiv:2407.15811) on the latents of a frozen VAE:
`networks.microdit`.

A mixer tells patches of one another before most of them are left out. docs/transformers.md has the recipes.
"""

from dataclasses import dataclass
from typing import ClassVar

from .settings.transformer import TransformerSettings
from .transformer import TextToImageTransformer


@dataclass(kw_only=True)
class MicroDitConfig(TransformerSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "microdit"


class MicroDiT(TextToImageTransformer):
    """Of micro_diffusion's transformer."""

    name = "microdit"
    plural = "MicroDiTs"
    Config = MicroDitConfig


FAMILY = MicroDiT()
