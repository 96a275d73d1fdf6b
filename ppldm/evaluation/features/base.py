"""Feature networks: pictures to vectors, by a network and a convention of resizing that are part of the result.

    network = load_features("inception", "pt_inception-2015-12-05-6726825d.pth", "clean-fid")
    features = network(pictures)        # float32 [N, network.dim]

A distance between features depends on the weights and on how a picture comes to the network's size (Parmar et al. 2022,
arXiv:2104.11222). So each network states both, as `digest` and `convention`, and nothing is chosen by what happens to
be installed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import numpy as np

from ...utils.checksums import sha256_arrays
from ...utils.errors import ConfigError
from ...utils.machine.devices import set_exactness, use_device
from ...utils.text import did_you_mean
from ...weights.fetch import RANDOM, PublishedFile, find_weights
from .resize import Convention, find_convention

BATCH_SIZE = 32
PIXELS_SIDE = 8


@dataclass(frozen=True)
class Network:
    """What can be loaded. `flag` gives the weights, by path or name, such as `published`; None for a network without
    any. `conventions`: those that it can be used with, the default first. `files`: the names of single files; all
    others are of models on the hub. `of_pairs`: it compares two pictures, and has no features of one. `random`: this
    word instead of a path gives it random weights, to try things without a download."""

    flag: str | None
    published: str
    conventions: tuple[str, ...]
    files: dict[str, PublishedFile] = field(default_factory=dict)
    of_pairs: bool = False
    random: bool = False

    @property
    def given_by(self) -> str:
        """What `flag` takes, in words."""
        return f"a path or a name such as {self.published}" if self.published else "a file or a folder"


_NAME = "inception-2015-12-05-6726825d"  # which ends, as PyTorch's hub has it, in the beginning of a SHA-256
_INCEPTION = {
    "pytorch-fid": PublishedFile(
        f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_{_NAME}.pth", "6726825d"
    ),
    "torch-fidelity": PublishedFile(
        f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-{_NAME}.pth"
    ),
    "paddlenlp": PublishedFile(f"https://paddlenlp.bj.bcebos.com/models/mseitzer/pp_{_NAME}.pdparams"),
    "paddlegan": PublishedFile("https://paddlegan.bj.bcebos.com/InceptionV3.pdparams"),
}
_DINOV2 = {
    f"dinov2_{size}14{kind}": PublishedFile(
        f"https://dl.fbaipublicfiles.com/dinov2/dinov2_{size}14/dinov2_{size}14{ending}_pretrain.pth"
    )
    for size in ("vits", "vitb", "vitl")
    for kind, ending in (("", ""), ("_reg", "_reg4"))
}
NETWORKS = {
    "inception": Network(
        "--inception FILE", "pytorch-fid", ("clean", "legacy_pytorch", "legacy_tensorflow"), _INCEPTION, random=True
    ),
    "clip": Network("--clip DIR", "openai/clip-vit-base-patch32", ("clip",)),
    "dinov2": Network("--dinov2 FILE", "dinov2_vitl14", ("dinov2",), _DINOV2),
    # A picture's own colours, averaged to 8 x 8 pixels: 192 numbers. Distances on them see colours, brightness
    # and rough layout only, and compare with no published number; but they need no weights.
    "pixels": Network(None, "", ("pixels",)),
    "lpips": Network("--lpips FILE", "", ("whole",), of_pairs=True, random=True),
}


class FeatureNetwork:
    """Pictures, uint8 [H, W, 3] of any sizes, to float32 [N, dim].

    `digest`: of the weights, by name, shape and value, the same for every file that holds them; "" without weights.
    `embed` takes what the convention prepares, float32 [N, 3, side, side].
    """

    def __init__(
        self,
        name: str,
        dim: int,
        digest: str,
        convention: Convention,
        side: int,
        embed: Callable[[np.ndarray], np.ndarray],
    ):
        self.name, self.dim, self.digest = name, dim, digest
        self.convention = f"{convention.name}: {convention.words.format(side=side)}"
        self._prepare, self._side, self._embed = convention.prepare, side, embed

    def __call__(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Features [N, dim] float32, in batches of BATCH_SIZE from the first picture on."""
        features = np.empty((len(pictures), self.dim), np.float32)
        for start in range(0, len(pictures), BATCH_SIZE):
            stop = min(start + BATCH_SIZE, len(pictures))
            batch = np.stack([self._prepare(pictures[i], self._side) for i in range(start, stop)])
            features[start:stop] = self._embed(batch)
        return features


def network_of(name: str, layer, dim: int, convention: Convention, side: int) -> FeatureNetwork:
    """The features that a layer of Paddle gives, [N, dim, ...] of float32 [N, 3, side, side]."""
    import paddle

    layer.eval()

    def embed(batch: np.ndarray) -> np.ndarray:
        with paddle.no_grad():
            return layer(paddle.to_tensor(batch)).numpy().reshape(len(batch), dim)

    return FeatureNetwork(name, dim, layer_digest(layer), convention, side, embed)


def layer_digest(layer) -> str:
    """Of a layer's weights: `sha256_arrays`."""
    return sha256_arrays((name, value.numpy()) for name, value in layer.state_dict().items())


def load_features(
    name: str, path=None, convention: str | None = None, device: str | None = None, offline: bool = False
) -> FeatureNetwork:
    """The network of this name, one of NETWORKS, with the weights at `path`, in float32 and for inference.

    `path`: or a name, whose weights are fetched once, unless `offline`. `convention`: a name of `resize`; the
    network's own by default. `device`: as --device; by default that in use.
    Raises ConfigError for a name or convention that is not known and for weights that are not given, ModelError for
    weights that are missing, damaged or of another network.
    """
    if name not in NETWORKS:
        raise ConfigError(f"no feature network {name!r} is known; {did_you_mean(name, NETWORKS)}")
    network = NETWORKS[name]
    chosen = find_convention(convention or network.conventions[0])
    if chosen.name not in network.conventions:
        raise ConfigError(
            f"{name} features cannot be computed under the convention {convention}; "
            f"choose {' or '.join(network.conventions)}"
        )
    if name == "pixels":
        dim = 3 * PIXELS_SIDE**2
        return FeatureNetwork(name, dim, "", chosen, PIXELS_SIDE, lambda batch: batch.reshape(len(batch), dim))
    if path is None:
        raise ConfigError(f"{name} features need {network.flag}, {network.given_by}")
    use_device(device)
    set_exactness(fewer_bits=False, search_kernels=False)
    if network.random and str(path) == RANDOM:
        chosen = replace(chosen, words=f"{chosen.words}; random weights, which compare with no published value")
    else:
        path = find_weights(path, network.files, offline)
    return import_module(f".{name}", __package__).load(path, chosen)
