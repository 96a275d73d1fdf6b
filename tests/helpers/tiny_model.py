"""A model of the tiny configs, and batches for it."""

import numpy as np
import paddle

from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm


def make_model(tiny, **changes):
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae,
        text_encoder_config_file=tiny.config("ldmbert"),
        unet_config_file=tiny.config("unet"),
        model_max_length=12,
        **changes,
    )
    return build_ldm(arguments, vocab_size=100, seed=3)


def make_batch(size: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "pixel_values": paddle.to_tensor(rng.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8)),
        "input_ids": paddle.to_tensor(rng.integers(0, 100, (size, 12))),
        "timesteps": paddle.to_tensor(rng.integers(0, 1000, size)),
        "noise": paddle.to_tensor(rng.standard_normal((size, 4, 4, 4), dtype=np.float32)),
        "posterior_noise": paddle.to_tensor(rng.standard_normal((size, 4, 4, 4), dtype=np.float32)),
    }
