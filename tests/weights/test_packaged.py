"""The autoencoder that comes with the package: found by its name, and good enough for small pictures."""

import numpy as np
import paddle
import pytest

from ppldm.config.network_files import CONFIG_DIR
from ppldm.demo.openmoji import QUICKSTART, read_catalog, render
from ppldm.networks.autoencoder import psnr, reconstruct
from ppldm.utils.files import read_json
from ppldm.weights.fetch import PACKAGED, check_name, locate_model
from ppldm.weights.fill import load_vae
from ppldm.weights.formats.files import read_arrays
from ppldm.weights.source import config_here

NAME = "vae_tiny"


def test_a_name_is_the_packages_folder_unless_a_path_here_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_name(NAME)
    assert locate_model(NAME, offline=True, kinds=["vae"]) == PACKAGED / NAME
    assert config_here("vae", NAME)["latent_channels"] == read_json(CONFIG_DIR / f"{NAME}.json")["latent_channels"]
    (tmp_path / NAME).mkdir()
    assert locate_model(NAME, offline=True, kinds=["vae"]).resolve() == tmp_path / NAME


def test_it_is_stored_in_half_and_computes_in_float32():
    arrays = read_arrays(PACKAGED / NAME / "model.safetensors")
    assert {array.dtype for array in arrays.values()} == {np.dtype("float16")}
    assert (PACKAGED / NAME / "model.safetensors").stat().st_size < 2.5e6
    assert {one.dtype for one in load_vae(NAME).parameters()} == {paddle.float32}


@pytest.mark.parametrize("kind, least", [("drawings", 22), ("gradients", 24)])
def test_it_gives_small_pictures_back(kind, least):
    """Drawings of the quickstart; a light that falls off, as photographs have it, which it has never seen."""
    if kind == "drawings":
        pictures = [
            np.asarray(render(one.svg.read_text(), 48)) for one in read_catalog("en").find(QUICKSTART.drawn)[::8]
        ]
    else:
        x, y = np.meshgrid(*[np.linspace(0, 1, 48)] * 2)
        tops = np.random.default_rng(0).uniform(80, 255, (8, 3))
        pictures = [np.stack([top * (0.4 * x + 0.6 * y * (1 - x)) for top in one], -1).astype(np.uint8) for one in tops]
    vae, pixels = load_vae(NAME), paddle.to_tensor(np.stack(pictures).transpose(0, 3, 1, 2))
    vae.eval()
    latents = vae.encode(pixels.astype("float32") / 127.5 - 1).latent_dist.mode() * vae.config.scaling_factor
    assert psnr(pixels, reconstruct(vae, pixels)) > least
    if kind == "drawings":
        assert 0.7 < float(latents.std()) < 1.4, "the scaling factor brings latents to about unit deviation"
