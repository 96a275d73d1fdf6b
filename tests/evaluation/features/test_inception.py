"""FID's InceptionV3 gives torch-fidelity's features, whichever of the published forms its weights have."""

from unittest import mock

import numpy as np
import paddle
import pytest
from fidelity import torch_fidelity
from PIL import Image

from ppldm.evaluation.features.base import load_features
from ppldm.evaluation.features.networks import build_inception, rename_inception
from ppldm.utils.errors import ModelError

# Of each kind of block: what Paddle calls what pytorch-fid calls otherwise.
PAIRS = {
    "Conv2d_1a_3x3.conv.weight": "inception_stem.conv_1a_3x3.0.weight",
    "Conv2d_4a_3x3.bn.bias": "inception_stem.conv_4a_3x3.1.bias",
    "Mixed_5b.branch_pool.conv.weight": "inception_block_list.0.branch_pool_conv.0.weight",
    "Mixed_6a.branch3x3dbl_3.bn.running_mean": "inception_block_list.3.branch3x3dbl_3.1._mean",
    "Mixed_6e.branch7x7dbl_5.bn.running_var": "inception_block_list.7.branch7x7dbl_5.1._variance",
    "Mixed_7a.branch7x7x3_4.bn._mean": "inception_block_list.8.branch7x7x3_4.1._mean",
    "Mixed_7c.branch3x3_2a.bn.weight": "inception_block_list.10.branch3x3_2a.1.weight",
}
UNUSED = {"fc.weight": (1008, 2048), "fc.bias": (1008,), "Conv2d_1a_3x3.bn.num_batches_tracked": ()}


def test_the_published_names_are_paddles():
    given = {name: np.full(1, i) for i, name in enumerate(PAIRS)} | {k: np.zeros(v) for k, v in UNUSED.items()}
    renamed = rename_inception(given, "x")
    assert renamed == {ours: i for i, ours in enumerate(PAIRS.values())}
    assert rename_inception(renamed, "x") == renamed


def test_weights_for_imagenet_are_refused():
    with pytest.raises(ModelError, match="x holds an InceptionV3 of 1000 classes, and FID's has 1008; give"):
        rename_inception({"fc.bias": np.zeros(1000)}, "x")


def test_pools_leave_out_the_padding_and_the_last_is_a_maximum():
    network = build_inception()
    ones, spike = paddle.ones([1, 1, 5, 5]), paddle.eye(5)[None, None] * 9
    pools = [block.branch_pool for block in network.inception_block_list]
    assert all(bool((pool(ones) == 1).all()) for pool in pools)
    assert float(pools[-2](spike).max()) < 9 == float(pools[-1](spike).max())
    assert pools[-1](spike).shape == spike.shape
    assert {layer._epsilon for layer in network.sublayers() if isinstance(layer, paddle.nn.BatchNorm2D)} == {0.001}


def pictures(number):
    """Blurred and blocky ones, of a few strong colours each."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (number, 5, 4, 3), np.uint8)
    filters = (Image.Resampling.NEAREST, Image.Resampling.BICUBIC)
    return [np.asarray(Image.fromarray(one).resize((50, 40), filters[i % 2])) for i, one in enumerate(small)]


def reference(module, shown):
    """torch-fidelity's network with random weights at which activations stay near 1, and its features in float64."""
    import torch

    network = module.FeatureExtractorInceptionV3
    torch.manual_seed(0)
    with mock.patch.object(network, "load_state_dict"), mock.patch.object(module, "load_state_dict_from_url"):
        network = network("inception", ["2048"])
    batch = torch.tensor(np.stack(shown).transpose(0, 3, 1, 2).copy())
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0  # statistics of the next batch
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
            torch.nn.init.normal_(layer.bias, 0, 0.1)
    with torch.no_grad():
        network.train()(batch)
        weights = {name: value.clone() for name, value in network.state_dict().items()}
        network.double().Conv2d_1a_3x3.register_forward_pre_hook(lambda layer, inputs: inputs[0].double())
        return weights, network.eval()(batch)[0].numpy()


@pytest.mark.slow
@pytest.mark.needs("parity")
def test_features_are_those_of_torch_fidelity(tmp_path):
    import torch

    shown = pictures(6)
    with torch_fidelity() as module:
        weights, expected = reference(module("feature_extractor_inceptionv3"), shown)
    assert 0.1 < expected.std() < 10
    torch.save(weights, tmp_path / "new.pth")
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    arrays = rename_inception({name: value.numpy() for name, value in weights.items()}, "x")
    paddle.save({name: paddle.to_tensor(value) for name, value in arrays.items()}, str(tmp_path / "fid.pdparams"))
    assert build_inception().state_dict().keys() == arrays.keys()
    networks = [
        load_features("inception", tmp_path / n, "legacy_tensorflow") for n in ("new.pth", "old.pth", "fid.pdparams")
    ]
    assert len({network.digest for network in networks}) == 1
    # Sums of up to 18,432 numbers through 94 layers, in an order that is the processor's.
    np.testing.assert_allclose(networks[0](shown), expected, rtol=0, atol=2e-4)
