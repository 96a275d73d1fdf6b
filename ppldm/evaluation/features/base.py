"""Feature networks: pictures to vectors, by a network and a convention of resizing that are part of the result.

    network = load_features("inception", "pt_inception-2015-12-05-6726825d.pth", "clean-fid")
    features = network(pictures)        # float32 [N, network.dim]

A distance between features depends on the weights and on how a picture comes to the network's size and numbers (Parmar
et al. 2022, arXiv:2104.11222). So each network states both, as `digest` and `convention`. A convention takes a picture,
uint8 [H, W, 3], and a side, and gives float32 [3, side, side]; each is a published tool's, to the pixel:

    clean               clean-fid's (the same paper)
    legacy_pytorch      pytorch-fid's, and that of older PyTorch scripts: bilinear without a prefilter, so it aliases
    legacy_tensorflow   TensorFlow 1's, which the first FIDs had, and torch-fidelity's: as above, and shifted
    clip                OpenAI's for CLIP (Radford et al. 2021, arXiv:2103.00020)
    dinov2              Meta's for DINOv2 (Oquab et al. 2023, arXiv:2304.07193)
    pixels              ours, for features without a network
    whole               none: a picture as it is
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module

import numpy as np
from PIL import Image
from PIL.Image import Resampling

from ...utils.checksums import sha256_arrays
from ...utils.errors import ConfigError
from ...utils.machine.devices import set_exactness, use_device
from ...utils.text import did_you_mean
from ...weights.fetch import RANDOM, PublishedFile, find_weights

BATCH_SIZE = 32
PIXELS_SIDE = 8


@dataclass(frozen=True)
class Convention:
    """`words` say what `prepare(picture, side)` does."""

    name: str
    words: str
    prepare: Callable[[np.ndarray, int], np.ndarray]


def find_convention(name: str) -> Convention:
    """The convention of this name, or of another name for it: clean-fid, legacy. Raises ConfigError."""
    own = _ALIASES.get(name, name)
    if own not in CONVENTIONS:
        raise ConfigError(f"no convention {name!r} is known; {did_you_mean(name, [*CONVENTIONS, *_ALIASES])}")
    return CONVENTIONS[own]


def _resize_channels(picture: np.ndarray, side: int, resample: Resampling) -> np.ndarray:
    """[3, side, side], Pillow's filter on float32: nothing is rounded to 8 bits."""
    channels = (Image.fromarray(channel) for channel in picture.transpose(2, 0, 1).astype(np.float32))
    return np.stack([np.asarray(channel.resize((side, side), resample)) for channel in channels])


def _bilinear(picture: np.ndarray, side: int, centre: float) -> np.ndarray:
    """[3, side, side]: between the four pixels around each position, however many lie between two positions. `centre`:
    where in a pixel its value holds, 0.5 in PyTorch and 0 in TensorFlow 1."""
    (top, bottom, down), (left, right, along) = (_neighbours(length, side, centre) for length in picture.shape[:2])
    planes = picture.transpose(2, 0, 1).astype(np.float32)
    rows = planes[:, :, left] + (planes[:, :, right] - planes[:, :, left]) * along
    return rows[:, top] + (rows[:, bottom] - rows[:, top]) * down[:, None]


def _neighbours(length: int, side: int, centre: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pixel before, pixel after, distance from the one before) of each of `side` positions in `length` pixels."""
    places = (np.arange(side) + centre) * float(np.float32(length / side)) - centre
    places = np.maximum(places, 0).astype(np.float32)  # rounded where both libraries round
    before = places.astype(np.int64)
    return before, np.minimum(before + 1, length - 1), places - before.astype(np.float32)


def _resize_and_crop(picture: np.ndarray, side: int, margin: float, mean: tuple, std: tuple) -> np.ndarray:
    """The shorter side to `margin` times `side` by Pillow's bicubic filter in 8 bits, the middle of that, normalised.
    As in torchvision the longer side is rounded down, the place to the nearest even number."""
    height, width = picture.shape[:2]
    shorter, least = round(side * margin), min(height, width)
    size = int(shorter * width / least), int(shorter * height / least)
    resized = np.asarray(Image.fromarray(picture).resize(size, Resampling.BICUBIC))
    top, left = (round((length - side) / 2) for length in resized.shape[:2])
    crop = resized[top : top + side, left : left + side].transpose(2, 0, 1).astype(np.float32) / 255
    return (crop - np.array(mean, np.float32)[:, None, None]) / np.array(std, np.float32)[:, None, None]


_OPENAI = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_MARGIN = 256 / 224  # of DINOv2's crop

_KNOWN: dict[str, tuple[str, Callable[[np.ndarray, int], np.ndarray]]] = {
    "clean": (
        "Pillow's bicubic on float32 channels to {side} x {side}, not rounded; -1 .. 1 by (x - 128) / 128",
        lambda picture, side: (_resize_channels(picture, side, Resampling.BICUBIC).clip(0, 255) - 128) / 128,
    ),
    "legacy_pytorch": (
        "bilinear without a prefilter, half-pixel centres, to {side} x {side}; -1 .. 1 by 2 x / 255 - 1",
        lambda picture, side: 2 * (_bilinear(picture, side, 0.5) / 255) - 1,
    ),
    "legacy_tensorflow": (
        "bilinear without a prefilter, TensorFlow 1's pixel corners: {side} x {side}; -1 .. 1 by (x - 128) / 128",
        lambda picture, side: (_bilinear(picture, side, 0.0) - 128) / 128,
    ),
    "clip": (
        "Pillow's bicubic in 8 bits, the shorter side to {side}, centre crop; OpenAI's mean and deviation",
        partial(_resize_and_crop, margin=1.0, **_OPENAI),
    ),
    "dinov2": (
        "Pillow's bicubic in 8 bits, the shorter side to 8/7 of {side}, centre crop; ImageNet's mean and deviation",
        partial(_resize_and_crop, margin=_MARGIN, **_IMAGENET),
    ),
    "whole": (
        "as it is; -1 .. 1 by x / 127.5 - 1",
        lambda picture, _: picture.transpose(2, 0, 1).astype(np.float32) / np.float32(127.5) - 1,
    ),
    "pixels": (
        "means of {side} x {side} areas; 0 .. 1",
        lambda picture, side: _resize_channels(picture, side, Resampling.BOX) / 255,
    ),
}
CONVENTIONS = {name: Convention(name, *rest) for name, rest in _KNOWN.items()}
_ALIASES = {"clean-fid": "clean", "legacy": "legacy_pytorch"}


@dataclass(frozen=True)
class Network:
    """What can be loaded. `flag` gives the weights, by path or name, such as `published`; None: there are none.
    `conventions`: the default first. `files`: names of single files; other names are of models on the hub. `of_pairs`:
    it compares two pictures. `random`: this word gives it random weights, to try things without a download."""

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
_GITHUB, _DOWNLOAD = "https://github.com", "releases/download"
_INCEPTION = {
    "pytorch-fid": PublishedFile(f"{_GITHUB}/mseitzer/pytorch-fid/{_DOWNLOAD}/fid_weights/pt_{_NAME}.pth", "6726825d"),
    "torch-fidelity": PublishedFile(f"{_GITHUB}/toshas/torch-fidelity/{_DOWNLOAD}/v0.2.0/weights-{_NAME}.pth"),
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
    """Pictures, uint8 [H, W, 3] of any sizes, to float32 [N, dim]. `digest`: of the weights by name, shape and value,
    whichever file holds them; "" without. `embed` takes what the convention prepares, float32 [N, 3, side, side]."""

    def __init__(self, name: str, dim: int, digest: str, convention: Convention, side: int, embed: Callable):
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

    from ...networks.cpu_operators.layers import use_cpu_operators

    use_cpu_operators(layer).eval()

    def embed(batch: np.ndarray) -> np.ndarray:
        with paddle.no_grad():
            return layer(paddle.to_tensor(batch)).numpy().reshape(len(batch), dim)

    return FeatureNetwork(name, dim, layer_digest(layer), convention, side, embed)


def layer_digest(layer) -> str:
    return sha256_arrays((name, value.numpy()) for name, value in layer.state_dict().items())


def load_features(
    name: str, path=None, convention: str | None = None, device: str | None = None, offline: bool = False
) -> FeatureNetwork:
    """The network of this name, one of NETWORKS, in float32 and for inference, with the weights at `path`, or of a
    published name, fetched once unless `offline`; under a `convention`, by default its own. Raises ConfigError for what
    is unknown or not given, ModelError for weights that are missing, damaged or of another network."""
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
    return import_module(".networks", __package__).LOADERS[name](path, chosen)
