"""A tiny stage C of Stable Cascade: the flags of a run, and a batch."""

import numpy as np
import paddle


def flags(tiny, folder="out", **changes) -> list[str]:
    settings = {
        "output_dir": folder,
        "file_list": tiny.file_list,
        "resolution": 64,
        "effnet_config_file": "effnet_tiny",
        "text_encoder_config_file": tiny.config("clip"),
        "prior_config_file": tiny.config("cascade_c"),
        "tokenizer_name": tiny.tokenizer,
        "model_max_length": 12,
        "seed": 5,
        **changes,
    }
    return [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]


def make_batch(size: int) -> dict:
    rng = np.random.default_rng(0)
    batch = {
        "pixel_values": rng.integers(0, 256, (size, 3, 4, 4), dtype=np.uint8).repeat(16, 2).repeat(16, 3),
        "input_ids": rng.integers(5, 50, (size, 12)),
        "timesteps": rng.integers(0, 1000, size),
        "noise": rng.standard_normal((size, 16, 2, 2), dtype=np.float32),
    }
    return {name: paddle.to_tensor(value) for name, value in batch.items()}
