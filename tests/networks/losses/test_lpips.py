"""LPIPS equals torch-fidelity's to 1e-5, whichever of the published forms its weights have."""

import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import needs
import numpy as np
import paddle
import pytest
from fidelity import torch_fidelity
from small_lpips import WIDTHS, write_lpips

from ppldm.networks.losses import Lpips
from ppldm.utils.errors import ModelError
from ppldm.weights.formats.files import read_arrays, write_safetensors
from ppldm.weights.losses import load_lpips

SLICES = {**dict.fromkeys((0, 2), 1), **dict.fromkeys((5, 7), 2), **dict.fromkeys((10, 12, 14), 3)}
SLICES |= {**dict.fromkeys((17, 19, 21), 4), **dict.fromkeys((24, 26, 28), 5)}


def of_package(arrays: dict) -> dict:
    """Under the names of the lpips package, which has the linear layers twice."""
    renamed = {}
    for name, array in arrays.items():
        kind, number, which = name.split(".")
        if kind == "features":
            renamed[f"net.slice{SLICES[int(number)]}.{number}.{which}"] = array
        else:
            renamed |= {f"lin{number}.model.1.weight": array, f"lins.{number}.model.1.weight": array}
    return renamed | {"scaling_layer.shift": np.zeros((1, 3, 1, 1), np.float32)}


def write_forms(folder, arrays: dict) -> dict:
    package = of_package(arrays)
    (folder / "two").mkdir()
    features = {name: array for name, array in arrays.items() if name.startswith("features")}
    files = {
        "own": (folder / "own.safetensors", arrays),
        "package": (folder / "package.safetensors", package),
        "compvis": (folder / "compvis.safetensors", {f"loss.perceptual_loss.{k}": v for k, v in package.items()}),
        "vgg16": (folder / "two/vgg16.safetensors", features | {"classifier.0.weight": np.zeros((2, 2), np.float32)}),
        "linear": (folder / "two/vgg.safetensors", {k: v for k, v in package.items() if k.startswith("lin")}),
    }
    for path, content in files.values():
        write_safetensors(path, content, "pt")
    return {name: path for name, (path, _) in files.items()} | {"two files": folder / "two"}


def test_all_forms_of_its_weights_are_read(tmp_path):
    arrays = read_arrays(write_lpips(tmp_path))
    forms = write_forms(tmp_path, arrays)
    for form in ("own", "package", "compvis", "two files"):
        layer = load_lpips(forms[form])
        assert layer.config == {"widths": list(WIDTHS)}
        found = layer.state_dict()
        assert found.keys() == arrays.keys() and all((found[name].numpy() == arrays[name]).all() for name in arrays)
    with pytest.raises(ModelError, match="do not fit LPIPS of VGG16: 5 missing: lins.0.weight"):
        load_lpips(forms["vgg16"])


def test_random_weights_have_the_true_structure_and_are_named_as_such(caplog):
    first, again, other = (load_lpips("random", seed) for seed in (1, 1, 2))
    assert "random weights" in caplog.text
    shapes = {name: value.shape for name, value in first.state_dict().items()}
    assert len(shapes) == 31 and sum(np.prod(shape) for shape in shapes.values()) == 14_714_688 + 1_472
    key = "features.28.weight"
    same, differs = (bool((first.state_dict()[key] == one.state_dict()[key]).all()) for one in (again, other))
    assert same and not differs


def test_it_is_a_distance_whose_gradient_is_finite_where_nothing_answers(tmp_path):
    layer, rng = load_lpips(write_lpips(tmp_path)), np.random.default_rng(0)
    first, second = (paddle.to_tensor(rng.uniform(-1, 1, (3, 3, 16, 24)).astype(np.float32)) for _ in range(2))
    assert (layer(first, first) == 0).all() and (layer(first, second) > 0).all()
    np.testing.assert_allclose(layer(first, second), layer(second, first), rtol=1e-6)
    for value in layer.parameters():
        value.set_value(-value.abs())  # the first ReLU gives 0 of white pictures
    white = paddle.ones([1, 3, 16, 16])
    white.stop_gradient = False
    layer(white, paddle.ones([1, 3, 16, 16])).sum().backward()
    assert bool(paddle.isfinite(white.grad).all())


@pytest.mark.slow
def test_pictures_have_the_distances_of_torch_fidelity():
    needs.need("parity")
    import torch

    layer, rng = load_lpips("random", 3), np.random.default_rng(0)
    arrays = {name: value.numpy() for name, value in layer.state_dict().items()}
    package = {name: torch.from_numpy(value) for name, value in of_package(arrays).items() if "lins" not in name}

    def vgg16(**_):
        layers, channels = [], 3
        for width in (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"):
            if width == "M":
                layers.append(torch.nn.MaxPool2d(2, 2))
            else:
                layers += [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.ReLU(inplace=True)]
                channels = width
        net = torch.nn.Module()
        net.features = torch.nn.Sequential(*layers)
        return net

    def fetch(url, **_):
        if "lpips" in url:
            return {name: value for name, value in package.items() if name.startswith("lin")}
        return {name: torch.from_numpy(value) for name, value in arrays.items() if name.startswith("features")}

    torchvision = ModuleType("torchvision")
    torchvision.models = SimpleNamespace(vgg16=vgg16)
    with torch_fidelity() as load, mock.patch.dict(sys.modules, torchvision=torchvision):
        module = load("sample_similarity_lpips")
        with mock.patch.object(module, "load_state_dict_from_url", fetch):
            reference = module.SampleSimilarityLPIPS("lpips")
    first = rng.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8)
    second = (first + rng.normal(0, rng.uniform(0, 90, (24, 1, 1, 1)), first.shape)).clip(0, 255).astype(np.uint8)
    with torch.no_grad(), paddle.no_grad():
        expected = reference(*(torch.from_numpy(one) for one in (first, second))).flatten().numpy()
        found = layer(*(paddle.to_tensor(one.astype(np.float32) / 127.5 - 1) for one in (first, second))).numpy()
    assert expected.min() < 0.1 < expected.max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_blocks_have_the_channels_of_vgg16():
    assert Lpips().config["widths"] == [64, 128, 256, 512, 512]
