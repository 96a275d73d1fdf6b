"""A feature network is what its name, weights and convention say, however its pictures are batched."""

import numpy as np
import pytest

from ppldm.evaluation.features.base import BATCH_SIZE, CONVENTIONS, NETWORKS, load_features
from ppldm.utils.errors import ConfigError, ModelError

RNG = np.random.default_rng(0)
PICTURES = [RNG.integers(0, 256, (*RNG.integers(1, 40, 2), 3), np.uint8) for _ in range(BATCH_SIZE + 3)]


def test_pixels_need_nothing():
    network = load_features("pixels")
    features = network(PICTURES)
    assert features.shape == (len(PICTURES), network.dim) == (len(PICTURES), 192)
    assert features.dtype == np.float32
    assert 0 <= features.min() < features.max() <= 1
    assert network.convention == "pixels: means of 8 x 8 areas; 0 .. 1"
    assert network.digest == ""


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.random])
def test_random_weights_are_the_same_each_time_and_said(name):
    first, second = (load_features(name, "random") for _ in range(2))
    assert first.digest == second.digest
    assert first.convention.endswith("; random weights, which compare with no published value")
    if name == "inception":
        features = first(PICTURES[:4])
        assert features.shape == (4, 2048) and 0.01 < features.std() < 10
    else:
        assert float(first.distances([PICTURES[0]], [255 - PICTURES[0]])[0]) > 0


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.flag and not network.random])
def test_random_is_a_name_like_others_where_there_are_none(name):
    with pytest.raises(ModelError, match="random"):
        load_features(name, "random", offline=True)


def test_each_picture_has_its_own_row():
    network = load_features("pixels")
    whole = network(PICTURES)
    assert (whole == np.concatenate([network([picture]) for picture in PICTURES])).all()
    assert network([]).shape == (0, 192)


@pytest.mark.parametrize("name", NETWORKS)
def test_each_convention_of_a_network_is_one(name):
    assert set(NETWORKS[name].conventions) <= CONVENTIONS.keys()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("inceptoin",), "no feature network 'inceptoin' is known; did you mean inception"),
        (("inception",), "inception features need --inception FILE, a path or a name such as pytorch-fid"),
        (("clip",), "clip features need --clip DIR, a path or a name such as openai/clip-vit-base-patch32"),
        (("dinov2",), "dinov2 features need --dinov2 FILE, a path or a name such as dinov2_vitl14"),
        (("clip", "x", "clean-fid"), "clip features cannot be computed under the convention clean-fid; choose clip"),
        (("pixels", None, "legacy"), "choose pixels"),
        (("inception", "nowhere"), r"no folder or file nowhere.*, or give a name \(pytorch-fid, torch-fidelity"),
        (("dinov2", "dinov2_vits14_reg", None, None, True), "dinov2_vits14_reg4_pretrain.pth to that path"),
    ],
)
def test_what_is_not_there_is_named(arguments, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        load_features(*arguments)
