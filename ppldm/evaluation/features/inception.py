"""InceptionV3 as FID has it: TensorFlow's network of 2015 with its weights, 2048 features of the last average pool.

It differs from the published architecture (Szegedy et al. 2015, arXiv:1512.00567), which paddle.vision has: averages
leave out the padding, the last block's pool is a maximum, batch norm has an epsilon of 0.001, and 1008 classes.

Its weights are published under three kinds of names, all of them read here: of pytorch-fid and torch-fidelity
(Mixed_5b.branch1x1.conv.weight), of PaddleGAN (the same, with Paddle's names for the statistics of batch norm), and of
paddle.vision (inception_block_list.0.branch1x1.0.weight), which PaddleNLP's file has.
"""

from pathlib import Path

import numpy as np
from paddle.nn import AvgPool2D, BatchNorm2D, MaxPool2D
from paddle.vision.models import InceptionV3

from ...networks.init import init_inception
from ...utils.errors import ModelError
from ...utils.log import get_logger
from ...weights.fetch import RANDOM
from ...weights.fill import fill_layer
from ...weights.formats.files import read_component_arrays
from .base import FeatureNetwork, network_of
from .resize import Convention

SIDE, DIM, CLASSES = 299, 2048, 1008
_BLOCKS = ["5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c"]
_NAMES = (
    ("Conv2d_", "inception_stem.conv_"),
    *((f"Mixed_{block}.", f"inception_block_list.{number}.") for number, block in enumerate(_BLOCKS)),
    (".branch_pool.", ".branch_pool_conv."),
    (".conv.", ".0."),
    (".bn.", ".1."),
    (".running_mean", "._mean"),
    (".running_var", "._variance"),
)
_UNUSED = ("fc.", "AuxLogits.")  # the classifiers


def load(path: Path, convention: Convention) -> FeatureNetwork:
    """FID's InceptionV3 with the weights at `path`, or random ones. Raises ModelError."""
    layer = build()
    if str(path) == RANDOM:
        get_logger().warning("InceptionV3 has random weights: distances compare with no published ones")
        init_inception(layer, seed=0)
    else:
        fill_layer(layer, rename(read_component_arrays(path), path), path, "FID's InceptionV3")
    return network_of("inception", layer, DIM, convention, SIDE)


def build() -> InceptionV3:
    """FID's variant of paddle.vision's network, up to the last average pool."""
    network = InceptionV3(num_classes=0)
    for layer in network.sublayers():
        if isinstance(layer, BatchNorm2D):
            layer._epsilon = 0.001
        elif isinstance(layer, AvgPool2D):
            layer.exclusive = True
    network.inception_block_list[-1].branch_pool = MaxPool2D(kernel_size=3, stride=1, padding=1)
    return network


def rename(arrays: dict[str, np.ndarray], source) -> dict[str, np.ndarray]:
    """The weights under paddle.vision's names, without classifiers. Raises ModelError for ImageNet's 1000 classes."""
    classes = arrays.get("fc.bias", np.empty(CLASSES)).shape[0]
    if classes != CLASSES:
        raise ModelError(
            f"{source} holds an InceptionV3 of {classes} classes, and FID's has {CLASSES}; give TensorFlow's of 2015"
        )
    renamed = {}
    for name, array in arrays.items():
        if not name.startswith(_UNUSED) and not name.endswith("num_batches_tracked"):
            for theirs, ours in _NAMES:
                name = name.replace(theirs, ours)
            renamed[name] = array
    return renamed
