"""VAEs whose latents are more than scaled, or that have no convolutions beside them, and what a model on them takes."""

import json
from pathlib import Path

import numpy as np

from ppldm.networks.build import build_network, save_component
from ppldm.networks.configs import check_config
from tests.conftest import UNET_CONFIG, VAE_CONFIG

BARE = {"use_quant_conv": False, "use_post_quant_conv": False}
_RNG = np.random.default_rng(11)
_STATED = {
    channels: {
        "latents_mean": _RNG.normal(size=channels).round(3).tolist(),
        "latents_std": _RNG.uniform(0.5, 3, channels).round(3).tolist(),
    }
    for channels in (4, 16, 32)
}
# Stable Diffusion, Stable Diffusion 3 and Flux, Stable Diffusion XL's fine-tunes, and the same with more channels.
CASES = {
    "scaled": {"scaling_factor": 0.18215},
    "shifted": {"scaling_factor": 1.5305, "shift_factor": 0.0609, "latent_channels": 16, **BARE},
    "stated": {"scaling_factor": 0.5, **_STATED[4]},
    "stated, 16": {"scaling_factor": 1.0, "latent_channels": 16, **_STATED[16]},
    "stated, 32": {"scaling_factor": 1.0, "latent_channels": 32, **_STATED[32], **BARE},
    "scaled, 32": {"scaling_factor": 0.3611, "latent_channels": 32, "use_quant_conv": False},
}


def write_vae(folder: Path, seed: int = 1, **changes) -> Path:
    """The folder of a VAE of the tiny config with these changes."""
    save_component(build_network("vae", check_config("vae", VAE_CONFIG | changes, "x"), seed), folder)
    return folder


def write_unet(folder: Path, channels: int) -> Path:
    """The config of the tiny UNet for latents of so many channels."""
    path = folder / f"unet-{channels}.json"
    path.write_text(json.dumps(UNET_CONFIG | {"in_channels": channels, "out_channels": channels}))
    return path
