import numpy as np
import paddle

from ppldm.networks.model import encode_moments
from ppldm.weights.fill import load_vae


def test_moments_are_those_of_the_posterior_whatever_the_batch(tiny):
    vae = load_vae(tiny.vae)
    vae.eval()
    pixels = paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (32, 3, 32, 32), dtype=np.uint8))
    posterior = vae.encode(pixels.astype("float32") / 127.5 - 1.0).latent_dist
    together = encode_moments(vae, pixels).numpy()
    assert together.dtype == np.float32 and together.shape == (32, 2, 4, 4, 4)
    assert (together[:, 0] == posterior.mean.numpy()).all() and (together[:, 1] == posterior.std.numpy()).all()
    alone = np.concatenate([encode_moments(vae, pixels[i : i + 1]).numpy() for i in range(32)])
    assert abs(alone - together).max() <= 1e-5
