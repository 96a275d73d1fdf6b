"""A frozen VAE as what `ppldm precompute` encodes with."""

import numpy as np
import paddle

from ...networks.autoencoder import encode_moments
from ...networks.configs import downscale_factor
from ...utils.log import get_logger, quiet_libraries
from ...utils.machine.devices import set_exactness
from ...weights.components import encoder_digest
from ...weights.fill import fill_component, find_component_by_name


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


def load_encoder(vae: str, batch_size: int, offline: bool) -> Encoder:
    """Of the VAE in a folder or of a name; from here on this process computes exactly. Raises ModelError."""
    quiet_libraries()
    set_exactness(fewer_bits=False, search_kernels=False)
    found = find_component_by_name("vae", vae, offline=offline)
    layer, digest = fill_component("vae", found), encoder_digest(found)
    layer.eval()
    get_logger().info("the VAE of %s has the encoder %s", vae, digest)
    return Encoder(layer, batch_size, digest)
