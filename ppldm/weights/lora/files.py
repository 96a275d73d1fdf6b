"""LoRA files, in diffusers' keys and in kohya's (`keys`): .safetensors, float32 or float16.

In kohya's form alpha stands beside each pair. diffusers' form has no alpha, and older versions of its loader scale
pairs of several ranks by the first one's; so there each pair is written with alpha = rank = the largest rank of its
component: up is multiplied by alpha / rank, which is exact where that is a power of two, and smaller ranks are filled
with zeros.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ...utils.errors import ConfigError, ModelError
from ...utils.files import atomic_write
from ..components import turn_linear
from ..formats.files import is_pytorch, read_arrays, read_metadata
from .keys import FORMS, read_key, write_key
from .pairs import Lora, LoraPair

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for in a folder
_SHOWN = 3  # keys that a message lists


def read_lora(path, unet: dict | None = None) -> Lora:
    """The pairs of a file, or of the folder that holds LORA_FILE, with the bits that they have there.

    unet: the config of the UNet that it is for, where its layers have CompVis' numbers and it is not Stable
    Diffusion's. Raises ModelError for a file that is damaged, or that holds anything besides pairs.
    """
    path = Path(path).expanduser()
    path = path / LORA_FILE if path.is_dir() else path
    arrays = read_arrays(path)
    arrays = arrays if is_pytorch(path) else turn_linear(arrays)
    keys = {key: read_key(key, unet) for key in arrays}
    if unknown := sorted(key for key, found in keys.items() if found is None):
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise ModelError(
            f"{path} holds {', '.join(unknown[:_SHOWN])}{more}, which is no LoRA of a UNet or its text encoder in "
            "diffusers' or kohya's keys; convert it with the program that made it"
        )
    if not arrays:
        raise ModelError(f"{path} holds no LoRA; give another file")
    found: dict[str, dict] = defaultdict(lambda: defaultdict(dict))
    for key, (component, layer, array) in keys.items():
        if array in found[component][layer]:
            raise ModelError(f"{path} holds {component} {layer} twice, in two forms ({key}); make it again")
        found[component][layer][array] = arrays[key]
    components = {
        component: {layer: _pair(own, f"{path}: {component} {layer}") for layer, own in layers.items()}
        for component, layers in found.items()
    }
    return Lora(components, _without_format(read_metadata(path)), str(path))


def write_lora(lora: Lora, path, form: str = "diffusers") -> Path:
    """Write the pairs to `path`, or to LORA_FILE in it where it does not end in .safetensors; which file is returned.

    form: "diffusers" or "kohya". Arrays keep their dtypes. Raises ConfigError, and ModelError for a layer that the form
    has no name for.
    """
    if form not in FORMS:
        raise ConfigError(f"the form {form} of a LoRA file is not one of {', '.join(FORMS)}")
    path = Path(path)
    path = path if path.suffix == ".safetensors" else path / LORA_FILE
    arrays = {}
    for component, layers in lora.components.items():
        largest = max((pair.rank for pair in layers.values()), default=0)
        for layer, pair in layers.items():
            down, up = (pair.down, pair.up) if form == "kohya" else _without_alpha(pair, largest)
            arrays[write_key(component, layer, "down", form)] = down
            arrays[write_key(component, layer, "up", form)] = up
            if form == "kohya":
                arrays[write_key(component, layer, "alpha", form)] = np.float32(pair.alpha)
    contiguous = {key: np.array(array, order="C") for key, array in arrays.items()}
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in lora.metadata.items()}
    if form == "kohya":
        metadata |= _kohya_metadata(lora)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(save(contiguous, metadata={**metadata, "format": "pt"}))
    return path


def _pair(arrays: dict[str, np.ndarray], where: str) -> LoraPair:
    """The pair of a layer. Raises ModelError where its arrays are no pair."""
    if missing := [name for name in ("down", "up") if name not in arrays]:
        raise ModelError(f"{where} lacks its {' and its '.join(missing)} matrix; copy the file again")
    down, up = arrays["down"], arrays["up"]
    shapes = f"down {list(down.shape)}, up {list(up.shape)}"
    fits = down.ndim in (2, 4) and up.ndim in (2, 4) and up.shape[1] == len(down) > 0 and set(up.shape[2:]) <= {1}
    if not fits or {down.dtype.kind, up.dtype.kind} != {"f"}:
        raise ModelError(f"{where} is no pair of matrices ({shapes}, {down.dtype}); make the file again")
    alpha = arrays.get("alpha", np.float32(len(down)))
    if alpha.size != 1 or not np.isfinite(alpha).all():
        raise ModelError(f"{where} has an alpha that is not a number; make the file again")
    return LoraPair(down, up, float(alpha.reshape(())))


def _without_alpha(pair: LoraPair, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(down, up) of the same change, of that rank, whose alpha is the rank."""
    missing, scale = rank - pair.rank, pair.alpha / pair.rank
    up = pair.up if scale == 1 else (pair.up.astype(np.float64) * scale).astype(pair.up.dtype)
    down = np.pad(pair.down, [(0, missing)] + [(0, 0)] * (pair.down.ndim - 1))
    return down, np.pad(up, [(0, 0), (0, missing)] + [(0, 0)] * (up.ndim - 2))


def _kohya_metadata(lora: Lora) -> dict[str, str]:
    """What tools of kohya's form show: one rank and alpha, or "Dynamic" where layers differ."""

    def one(values: set) -> str:
        return f"{values.pop():g}" if len(values) == 1 else "Dynamic"

    pairs = [pair for layers in lora.components.values() for pair in layers.values()]
    return {
        "ss_network_module": "networks.lora",
        "ss_network_dim": one({pair.rank for pair in pairs}),
        "ss_network_alpha": one({pair.alpha for pair in pairs}),
    }


def _without_format(metadata: dict) -> dict:
    return {key: value for key, value in metadata.items() if key != "format"}
