"""ppldm: text-to-image latent diffusion models, trained from scratch on PaddlePaddle."""

__version__ = "0.1.0"
