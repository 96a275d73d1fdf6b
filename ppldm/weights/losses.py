"""The networks that a loss is made with, read from files, or made anew: LPIPS, the discriminator, DINOv2.

LPIPS has the names of torchvision's VGG16 with the lpips package's linear layers, of that package, torch-fidelity, a
.ckpt of CompVis, or ours; the discriminator is in a .ckpt of CompVis, a checkpoint of ours, or a file of its own;
DINOv2 has Meta's names, or transformers', and its sizes follow from the shapes of its weights.
Paddle's own names of parameters have a prefix here: those of the autoencoder stay.
"""

import re
from pathlib import Path

import numpy as np
import paddle

from ..networks.build import init_like_pytorch, init_network, uninitialized
from ..networks.dinov2 import HEAD, Dinov2
from ..networks.losses import WIDTHS, LatentAlignment, Lpips, PatchDiscriminator
from ..utils.errors import ModelError
from ..utils.log import get_logger
from .components import STATISTICS
from .fetch import RANDOM
from .fill import fill_layer
from .formats.files import read_arrays, read_component_arrays

_SALT = 29  # of the alignment's initial weights: `networks.build` has smaller ones
_SUFFIXES = (".safetensors", ".pdparams", ".pth", ".pt", ".bin", ".ckpt")
_LPIPS_NAMES = {
    re.compile(r"^(?:.*perceptual_loss\.|lpips\.)?" + theirs): ours
    for theirs, ours in (
        (r"(?:net\.slice\d\.|features\.)(\d+)\.(weight|bias)$", r"features.\1.\2"),
        (r"lins?\.?(\d)\.(?:model\.\d\.)?weight$", r"lins.\1.weight"),
    )
}
_DINOV2_NAMES = (
    (r"^embeddings\.", ""),
    (r"^encoder\.layer\.", "blocks."),
    (r"^position_embeddings$", "pos_embed"),
    (r"^patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^layernorm\.", "norm."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
)
_THIRDS = ("query", "key", "value")
_DISCRIMINATOR_NAME = re.compile(r"^(?:(?:loss\.)?discriminator\.)?(main\.\d+\.)(\w+)$")


@uninitialized()
def load_lpips(path, seed: int = 0) -> Lpips:
    """LPIPS of a file, or of a folder with those of VGG16 and of the linear layers, as wide as its weights. `random`:
    with weights drawn from `seed`, whose distances compare with no published ones. Raises ModelError."""
    if str(path) == RANDOM:
        get_logger().warning("LPIPS has random weights: its distances compare with no published ones")
        with paddle.utils.unique_name.guard("lpips_"):
            return init_network(Lpips(), "lpips", seed)
    arrays = _read(path, _lpips_name)
    shapes = [arrays.get(f"lins.{block}.weight", np.empty((1, width))).shape for block, width in enumerate(WIDTHS)]
    with paddle.utils.unique_name.guard("lpips_"):
        layer = Lpips([shape[1] for shape in shapes])
    fill_layer(layer, arrays, path, "LPIPS of VGG16")
    return layer


@uninitialized()
def load_discriminator(path, channels: int, layers: int, seed: int) -> PatchDiscriminator:
    """That of a file, as large as its weights, with its running statistics; of None a new one. Raises ModelError."""
    if path is None:
        with paddle.utils.unique_name.guard("discriminator_"):
            return init_network(PatchDiscriminator(channels, layers), "discriminator", seed)
    arrays = _read(path, _discriminator_name)
    convolutions, first = sum(array.ndim == 4 for array in arrays.values()), arrays.get("main.0.weight")
    if first is None or convolutions < 3:
        raise ModelError(f"{path} holds no discriminator of patches (main.0.weight and so on); give another file")
    norm = "batch" if any(name.endswith("_mean") for name in arrays) else "group"
    with paddle.utils.unique_name.guard("discriminator_"):
        layer = PatchDiscriminator(len(first), convolutions - 2, norm)
    fill_layer(layer, arrays, path, "a discriminator of their size")
    return layer


def load_alignment(path, channels: int, seed: int) -> tuple[Dinov2, LatentAlignment]:
    """DINOv2 of a file or folder, and a new alignment of latents of so many channels to it. Raises ModelError."""
    network = load_dinov2(path)
    with paddle.utils.unique_name.guard("alignment_"):
        return network, init_like_pytorch(LatentAlignment(channels, network.config["width"]), seed, _SALT)


@uninitialized()
def load_dinov2(path) -> Dinov2:
    """That of a file, or of a folder, as large as its weights. Raises ModelError."""
    arrays = rename_dinov2(read_component_arrays(Path(path).expanduser()))
    shapes = [arrays.get(name, np.empty(0)).shape for name in ("cls_token", "pos_embed", "patch_embed.proj.weight")]
    if [len(shape) for shape in shapes] != [3, 3, 4] or shapes[0][-1] % HEAD:
        raise ModelError(f"{path} holds no DINOv2; give Meta's file of its weights or transformers' folder")
    depth = len({name.split(".")[1] for name in arrays if name.startswith("blocks.")})
    registers = arrays.get("register_tokens", np.empty((1, 0))).shape[1]
    with paddle.utils.unique_name.guard("dinov2_"):
        layer = Dinov2(shapes[0][-1], depth, shapes[2][-1], shapes[1][1], registers)
    fill_layer(layer, arrays, path, "a DINOv2 of their size")
    return layer


def rename_dinov2(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights under Meta's names, in Paddle's orientation, without the mask that only training needs."""
    renamed = {}
    for name, array in arrays.items():
        for pattern, ours in _DINOV2_NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = array
    for name in [name for name in renamed if ".attention.attention.query." in name]:
        thirds = [renamed.pop(name.replace("query", third), np.empty(0)) for third in _THIRDS]
        if len({third.shape for third in thirds}) == 1:
            renamed[name.replace("attention.attention.query", "attn.qkv")] = np.concatenate(thirds, -1)
    renamed.pop("mask_token", None)
    return renamed


def _lpips_name(name: str) -> str | None:
    """Ours for one of LPIPS, None for one of something else."""
    return next((pattern.sub(ours, name) for pattern, ours in _LPIPS_NAMES.items() if pattern.match(name)), None)


def _discriminator_name(name: str) -> str | None:
    found = _DISCRIMINATOR_NAME.match(name)
    if found is None or found[2] == "num_batches_tracked":
        return None
    return found[1] + STATISTICS.get(found[2], found[2])


def _read(path, rename) -> dict[str, np.ndarray]:
    """The arrays of a file, or of all files of a folder, that have a name by `rename`. Raises ModelError."""
    path = Path(path).expanduser()
    files = sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES) if path.is_dir() else [path]
    return {rename(name): array for file in files for name, array in read_arrays(file, rename).items()}
