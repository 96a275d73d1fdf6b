"""A model of the tiny configs, that as if it were trained, and batches for it."""

from pathlib import Path

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


def write_base(tiny) -> Path:
    """A pipeline of the tiny configs in which no weight is at its initial zero, written once a session."""
    from ppldm.data.text.tokenizer import load_tokenizer
    from ppldm.families.ldm_build import weights_of
    from ppldm.weights.write import write_weights

    folder = tiny.folder / "base"
    if not folder.exists():
        model = make_model(tiny)
        model.tokenizer = load_tokenizer(tiny.tokenizer, 12)
        weights, rng = weights_of(model), np.random.default_rng(7)
        for array in weights.components["unet"].arrays.values():
            array += rng.standard_normal(array.shape, dtype=np.float32) * np.float32(0.05)
        weights.metadata["model_max_length"] = 12
        write_weights(weights, "ppdiffusers", folder)
    return folder


def make_batch(size: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "pixel_values": paddle.to_tensor(rng.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8)),
        "input_ids": paddle.to_tensor(rng.integers(0, 100, (size, 12))),
        "timesteps": paddle.to_tensor(rng.integers(0, 1000, size)),
        "noise": paddle.to_tensor(rng.standard_normal((size, 4, 4, 4), dtype=np.float32)),
        "posterior_noise": paddle.to_tensor(rng.standard_normal((size, 4, 4, 4), dtype=np.float32)),
    }
