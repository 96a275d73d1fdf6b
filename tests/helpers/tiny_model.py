"""A model of the tiny configs, that as if it were trained, and batches for it."""

from pathlib import Path

import numpy as np
import paddle

from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm, build_model
from ppldm.weights.source import open_model


def load_pipeline(folder):
    """The model in a folder or file of any known form, in evaluation mode."""
    return build_model(open_model(folder).read(), folder)


def make_model(tiny, **changes):
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae,
        text_encoder_config_file=tiny.config("ldmbert"),
        unet_config_file=tiny.config("unet"),
        model_max_length=12,
        **changes,
    )
    return build_ldm(arguments, vocab_size=100, seed=3)


def make_lively_model(tiny, tokenizer, prediction_type: str, seed: int = 0):
    """One to draw with, whose UNet depends on the prompt: its zeroed layers get weights."""
    arguments = LdmConfig(
        vae_name_or_path=tiny.vae,
        text_encoder_config_file=tiny.config("ldmbert"),
        unet_config_file=tiny.config("unet"),
        model_max_length=12,
        prediction_type=prediction_type,
    )
    model = build_ldm(arguments, tokenizer.vocab_size, seed=3)
    rng = np.random.default_rng(seed)
    for parameter in model.unet.parameters():
        parameter.set_value(parameter + paddle.to_tensor(rng.standard_normal(parameter.shape, dtype=np.float32) * 0.05))
    for parameter in model.text_encoder.parameters():
        parameter.set_value(parameter * 3)
    model.eval()
    return model


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


def write_dinov2(folder) -> Path:
    """A small DINOv2 with random weights, for pictures of 32 pixels a side, written once a session."""
    from ppldm.networks.dinov2 import Dinov2

    path = Path(folder) / "dinov2.pdparams"
    if not path.exists():
        paddle.seed(0)
        paddle.save(Dinov2(64, depth=1, patch=14, positions=5, registers=0).state_dict(), str(path))
    return path


def make_batch(size: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "pixel_values": paddle.to_tensor(rng.integers(0, 256, (size, 3, 32, 32), dtype=np.uint8)),
        "input_ids": paddle.to_tensor(rng.integers(0, 100, (size, 12))),
        "timesteps": paddle.to_tensor(rng.integers(0, 1000, size)),
        "noise": paddle.to_tensor(rng.standard_normal((size, 4, 4, 4), dtype=np.float32)),
        "posterior_noise": paddle.to_tensor(rng.standard_normal((size, 4, 4, 4), dtype=np.float32)),
    }


def write_image_encoder(tiny) -> Path:
    """The folder of a CLIP image encoder of 16 pixels a side whose embeddings have 8 numbers, written once a session;
    a new network draws its weights by itself."""
    from ppdiffusers.transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from ppldm.networks.build import save_component
    from ppldm.weights.configs import complete_config

    folder = tiny.folder / "image_encoder"
    if not folder.exists():
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"projection_dim": 8, "image_size": 16, "patch_size": 8}
        paddle.seed(3)
        config = CLIPVisionConfig(**complete_config("image_encoder", sizes, "tiny"))
        save_component(CLIPVisionModelWithProjection(config), folder)
    return folder


def write_prior(tiny) -> Path:
    """The folder of a stage C of the tiny config in which no weight is at its initial zero, written once a session."""
    from ppldm.networks.build import build_network
    from ppldm.networks.configs import read_new_config
    from ppldm.weights.fill import component_of
    from ppldm.weights.write import write_component

    folder = tiny.folder / "prior"
    if not folder.exists():
        config = read_new_config("cascade_prior", tiny.config("cascade_c"), "")
        found = component_of("cascade_prior", build_network("cascade_prior", config, 3))
        rng = np.random.default_rng(7)
        for array in found.arrays.values():
            array += rng.standard_normal(array.shape, dtype=np.float32) * np.float32(0.1)
        write_component("cascade_prior", found, folder, "diffusers")
    return folder
