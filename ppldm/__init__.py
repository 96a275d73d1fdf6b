"""ppldm: text-to-image latent diffusion models, trained from scratch on PaddlePaddle."""

__version__ = "0.1.0"


def load(path, **settings):
    """A trained model with `.generate`, `.encode` and `.decode`: see `ppldm.inference.load.load`."""
    from .inference.load import load as load_model

    return load_model(path, **settings)
