"""Initial weights beside PyTorch's own, layer type by layer type. Needs the extra `parity`."""

import needs
import numpy as np
import paddle
import pytest

from ppldm.networks.build import init_like_pytorch

needs.need("parity")

import torch  # noqa: E402

PAIRS = {
    "Linear": (lambda: paddle.nn.Linear(300, 400), lambda: torch.nn.Linear(300, 400)),
    "Conv2D": (lambda: paddle.nn.Conv2D(48, 96, 3), lambda: torch.nn.Conv2d(48, 96, 3)),
    "Conv2D 1x1": (lambda: paddle.nn.Conv2D(256, 300, 1), lambda: torch.nn.Conv2d(256, 300, 1)),
    "Embedding": (lambda: paddle.nn.Embedding(900, 64), lambda: torch.nn.Embedding(900, 64)),
    "LayerNorm": (lambda: paddle.nn.LayerNorm(64), lambda: torch.nn.LayerNorm(64)),
    "GroupNorm": (lambda: paddle.nn.GroupNorm(8, 64), lambda: torch.nn.GroupNorm(8, 64)),
    "BatchNorm": (lambda: paddle.nn.BatchNorm2D(64), lambda: torch.nn.BatchNorm2d(64)),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_every_layer_type_has_pytorchs_distribution(kind):
    ours, layer = (make() for make in PAIRS[kind])
    torch.manual_seed(0)
    layer.reset_parameters()
    init_like_pytorch(ours, seed=11, salt=0)
    theirs = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    statistics = {"_mean": "running_mean", "_variance": "running_var"}
    theirs |= {
        ours_name: getattr(layer, name).numpy() for ours_name, name in statistics.items() if hasattr(layer, name)
    }
    ours = {name: value.numpy() for name, value in ours.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert values.size == theirs[name].size
        one, other = np.sort(values.ravel()), np.sort(theirs[name].ravel())
        if other.std() == 0:
            assert (one == other).all()
            continue
        # Two samples of n from one distribution: the largest gap of their distribution functions is under
        # 2.5 / sqrt(n / 2) but once in 100,000 times (Kolmogorov and Smirnov).
        grid = np.concatenate([one, other])
        gap = np.abs(np.searchsorted(one, grid, "right") - np.searchsorted(other, grid, "right")).max() / one.size
        assert gap < 2.5 / np.sqrt(one.size / 2), name
        assert abs(one.std() / other.std() - 1) < 5 / np.sqrt(one.size), name
        if kind != "Embedding":
            assert np.abs(one).max() <= np.abs(other).max() * (1 + 20 / one.size), name
