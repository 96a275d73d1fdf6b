"""ppldm: text-to-image latent diffusion models, trained from scratch on PaddlePaddle.

`ppldm.load` is `ppldm.inference.load.load`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .inference.load import load

__version__ = "0.1.0"
__all__ = ["load"]


def __getattr__(name: str):
    """`load`, for which Paddle is imported, with this machine's threads as by every command."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .utils.machine.cpu import load_paddle

    load_paddle()
    from .inference.load import load

    return load
