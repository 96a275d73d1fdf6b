"""A frozen VAE, or EfficientNet of Stable Cascade, as what `ppldm precompute` encodes with."""

from pathlib import Path

import numpy as np
import paddle

from ...config.data import EAGER
from ...networks.configs import LABELS, downscale_factor, is_effnet
from ...networks.encoders import encode_moments
from ...utils.errors import ModelError
from ...utils.files import read_json_object
from ...utils.log import get_logger, quiet_libraries
from ...utils.machine.devices import set_exactness
from ...weights.components import encoder_digest
from ...weights.configs import CONFIG_FILES
from ...weights.fill import fill_component, find_component_by_name
from ..engine import use_engine


class Encoder:
    """uint8 pixels [n, 3, H, W], n at most `batch_size`, to float32 moments [n, 2, C, h, w]: C is `channels`, h is H by
    `factor`. `digest`: of all that they depend on.

    Each batch has the full size, padded with black, so that what is computed of a row does not depend on how many
    others there are.
    """

    def __init__(self, vae, batch_size: int, digest: str = ""):
        self._vae, self.batch_size, self.digest = vae, batch_size, digest
        self.channels, self.factor = vae.config.latent_channels, downscale_factor(vae.config)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        batch = np.zeros((self.batch_size, *pixels.shape[1:]), np.uint8)
        batch[: len(pixels)] = pixels
        return encode_moments(self._vae, paddle.to_tensor(batch)).numpy()[: len(pixels)]


def load_encoder(vae: str, batch_size: int, offline: bool, engine: str = EAGER) -> Encoder:
    """Of the VAE in a folder or of a name, or of the EfficientNet in a folder; from here on this process computes
    exactly. Raises ModelError, ConfigError."""
    quiet_libraries()
    set_exactness(fewer_bits=False, search_kernels=False)
    own = Path(vae, CONFIG_FILES[0])
    kind = "effnet" if own.is_file() and is_effnet(read_json_object(own, ModelError, inside=True)) else "vae"
    found = find_component_by_name(kind, vae, offline=offline)
    layer, digest = fill_component(kind, found), encoder_digest(found)
    layer.eval()
    use_engine([layer if kind == "effnet" else layer.encoder], engine)
    get_logger().info("the %s of %s has the encoder %s", LABELS[kind], vae, digest)
    return Encoder(layer, batch_size, digest)
