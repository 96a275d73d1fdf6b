"""The map between an autoencoder's latents and those that a model diffuses: its formulas, and diffusers' pipelines."""

from types import SimpleNamespace

import needs
import numpy as np
import paddle
import pytest
from shifted import CASES, write_unet

from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm
from ppldm.networks.configs import check_config
from ppldm.networks.model import LatentMap
from ppldm.weights.source import read_component
from ppldm.weights.write import write_component
from tests.conftest import VAE_CONFIG


def latents_of(channels: int) -> np.ndarray:
    return np.random.default_rng(3).normal(0.7, 2, (2, channels, 3, 5)).astype(np.float32)


def expected(config: dict, latents: np.ndarray) -> np.ndarray:
    """(z - mean) / std times the scaling factor, in float64."""
    column = [np.array(config[name] or [own]).reshape(-1, 1, 1) for name, own in (
        ("latents_mean", config["shift_factor"] or 0), ("latents_std", 1))]  # fmt: skip
    return (latents.astype(np.float64) - column[0]) / column[1] * config["scaling_factor"]


@pytest.mark.parametrize("case", CASES)
def test_the_map_is_that_of_its_config_and_has_an_inverse(case):
    config = check_config("vae", VAE_CONFIG | CASES[case], "x")
    own, latents = LatentMap.of(config), latents_of(config["latent_channels"])
    mapped = own.to_model(latents)
    assert mapped.dtype == np.float32
    np.testing.assert_allclose(mapped, expected(config, latents), atol=1e-5)
    np.testing.assert_allclose(own.to_autoencoder(mapped), latents, atol=1e-5)
    np.testing.assert_allclose(own.to_model(own.to_autoencoder(latents)), latents, atol=1e-5)
    for change in (own.to_model, own.to_autoencoder):
        assert (change(paddle.to_tensor(latents)).numpy() == change(latents)).all()


def test_what_is_only_scaled_is_what_it_was_to_the_bit():
    latents = latents_of(4)
    for shift in (None, 0.0):
        own = LatentMap.of(check_config("vae", VAE_CONFIG | {"scaling_factor": 0.18215, "shift_factor": shift}, "x"))
        assert (own.to_model(paddle.to_tensor(latents)) == paddle.to_tensor(latents) * 0.18215).all()
        assert (own.to_autoencoder(paddle.to_tensor(latents)) == paddle.to_tensor(latents) / 0.18215).all()


def their_latents(config: dict, vae, pixels, generator):
    """By the pipelines' own code; of channels other than 4 by its formula, for that of Stable Diffusion XL takes 4."""
    from diffusers import (
        StableDiffusion3Img2ImgPipeline,
        StableDiffusionImg2ImgPipeline,
        StableDiffusionXLImg2ImgPipeline,
    )

    def keep(latents, *_):
        return latents

    pipeline = SimpleNamespace(vae=vae, scheduler=SimpleNamespace(add_noise=keep, scale_noise=lambda z, *_: z))
    given = (pipeline, pixels, None, 2, 1, pixels.dtype, pixels.device, generator)
    if config["shift_factor"]:
        return StableDiffusion3Img2ImgPipeline.prepare_latents(*given)
    if not config["latents_mean"]:
        return StableDiffusionImg2ImgPipeline.prepare_latents(*given)
    if config["latent_channels"] == 4:
        return StableDiffusionXLImg2ImgPipeline.prepare_latents(*given, add_noise=False)
    mean, std = (pixels.new_tensor(config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (vae.encode(pixels).latent_dist.sample(generator) - mean) * config["scaling_factor"] / std


def their_pixels(config: dict, vae, latents):
    """The lines of their `__call__`."""
    if config["shift_factor"]:
        latents = (latents / vae.config.scaling_factor) + vae.config.shift_factor
    elif config["latents_mean"]:
        mean, std = (latents.new_tensor(config[name]).view(1, -1, 1, 1) for name in ("latents_mean", "latents_std"))
        latents = latents * std / vae.config.scaling_factor + mean
    else:
        latents = latents / vae.config.scaling_factor
    return vae.decode(latents).sample.clamp(-1, 1)


@pytest.mark.parametrize("case", CASES)
def test_a_model_encodes_and_decodes_as_diffusers_does(tiny, tmp_path, case):
    needs.need("parity")
    import diffusers
    import torch

    torch.manual_seed(5)
    vae = diffusers.AutoencoderKL(**VAE_CONFIG | CASES[case]).eval()
    vae.save_pretrained(tmp_path / "theirs")
    found = read_component("vae", tmp_path / "theirs")
    for form in ("diffusers", "ppdiffusers"):
        write_component("vae", found, tmp_path / form, form)
        again = read_component("vae", tmp_path / form)
        assert again.config == found.config and again.arrays.keys() == found.arrays.keys()
        assert all((again.arrays[name] == array).all() for name, array in found.arrays.items())
    reread = diffusers.AutoencoderKL.from_pretrained(tmp_path / "diffusers").state_dict()
    assert reread.keys() == vae.state_dict().keys()
    assert all((reread[name] == value).all() for name, value in vae.state_dict().items())
    channels = found.config["latent_channels"]
    files = {"text_encoder_config_file": tiny.config("ldmbert"), "unet_config_file": write_unet(tmp_path, channels)}
    model = build_ldm(LdmConfig(vae_name_or_path=str(tmp_path / "theirs"), model_max_length=12, **files), 100, seed=3)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    noise = torch.randn((2, channels, 4, 4), generator=torch.Generator().manual_seed(9))
    ours = model.latents(paddle.to_tensor(noise.numpy()), paddle.to_tensor(pixels))
    with torch.no_grad():
        generator, theirs = torch.Generator().manual_seed(9), torch.tensor(pixels) / 127.5 - 1
        theirs = their_latents(found.config, vae, theirs, generator)
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-5)
        decoded = their_pixels(found.config, vae, theirs).numpy()
    np.testing.assert_allclose(model.decode(ours).numpy(), decoded, atol=1e-5)
