"""Stable Diffusion 3 (`mmdit`), told of captions by up to three text encoders."""

from ..several_texts import SeveralTextEncoders
from .transform import TransformerDiffusionModel


class SD3DiffusionModel(SeveralTextEncoders, TransformerDiffusionModel):
    """Its state has the prefixes `vae.`, `transformer.` and those of TEXT_ENCODERS that are there."""

    def condition(self, input_ids, text_embeddings=None) -> dict:
        """What the transformer takes of the tokens of all text encoders [B, N], or of what was kept of them."""
        return self.told_of(input_ids, text_embeddings)
