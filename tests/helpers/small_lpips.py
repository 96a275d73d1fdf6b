"""LPIPS of VGG16's depth and few channels, for tests."""

from pathlib import Path

from ppldm.networks.build import init_network
from ppldm.networks.losses import Lpips
from ppldm.weights.formats.files import write_safetensors

WIDTHS = (4, 4, 8, 8, 8)
_BIAS = 0.3  # of each convolution: where all channels are at 0, a last bit would decide on a feature of length 1


def write_lpips(folder) -> Path:
    """Its file in `folder`, under our names."""
    path, layer = Path(folder, "lpips.safetensors"), init_network(Lpips(WIDTHS), "lpips", seed=0)
    arrays = {name: value.numpy() + _BIAS * name.endswith("bias") for name, value in layer.state_dict().items()}
    write_safetensors(path, {name: array.astype("float32") for name, array in arrays.items()}, "pd")
    return path
