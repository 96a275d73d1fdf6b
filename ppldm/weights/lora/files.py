"""LoRA files, in diffusers' keys and in kohya's (`keys`): .safetensors, float32 or float16.

In kohya's form alpha stands beside each pair. diffusers' form has none, or from 0.35 settings in the header
(`adapter_config`), and older versions of its loader scale pairs of several ranks by the first one's. So there each pair
is written with alpha = rank = the largest rank of its component: up is multiplied by alpha / rank, which is exact where
that is a power of two, and smaller ranks are filled with zeros.

A pair changes a weight (Hu et al. 2021, arXiv:2106.09685): W + alpha / r * up @ down. Arrays have PyTorch's
orientation, as in the files; Paddle's linear layers hold them transposed.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ...utils.errors import ConfigError, ModelError
from ...utils.files import atomic_write
from ..components import cast, require_finite, turn_linear
from ..formats.files import is_pytorch, read_arrays, read_metadata
from .adapter_config import STATED, plain_alpha, read_settings, stated_alpha
from .keys import FORMS, KOHYA_PREFIXES, PEFT_PREFIX, adapter_names, read_key, write_key

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for in a folder
_PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_SHOWN = 3  # keys that a message lists


@dataclass(frozen=True)
class LoraPair:
    """The change of one layer's weight. Of a linear layer: down [r, in], up [out, r]; of a convolution: down
    [r, in, kh, kw], up [out, r, 1, 1]. alpha: the change is scaled by alpha / r."""

    down: np.ndarray
    up: np.ndarray
    alpha: float

    @property
    def rank(self) -> int:
        """r, of at least 1."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight: (out, in) or (out, in, kh, kw)."""
        return len(self.up), *self.down.shape[1:]

    @property
    def change(self) -> np.ndarray:
        """What is added to the weight, float32 of its shape."""
        down, up = (array.reshape(len(array), -1).astype(np.float32) for array in (self.down, self.up))
        return (self.alpha / self.rank * (up @ down)).reshape(self.shape)

    @property
    def squared_norm(self) -> float:
        """The sum of the squares of the change, without making it: the trace of (up' up) (down down')."""
        down, up = (array.reshape(len(array), -1).astype(np.float64) for array in (self.down, self.up))
        return (self.alpha / self.rank) ** 2 * float(np.sum((up.T @ up) * (down @ down.T)))


@dataclass(frozen=True)
class Lora:
    """Pairs by component ("unet", "text_encoder") and by layer ("down_blocks.0.attentions.0.to_q" as diffusers names
    it; "….to_out.0"). metadata: what is known of how they were trained."""

    components: dict[str, dict[str, LoraPair]]
    metadata: dict = field(default_factory=dict)
    source: str = "the LoRA"  # where it came from, for messages

    def cast(self, dtype: str) -> "Lora":
        """The same with arrays of that dtype."""
        components = {
            component: {
                layer: replace(pair, **cast({"down": pair.down, "up": pair.up}, dtype))
                for layer, pair in layers.items()
            }
            for component, layers in self.components.items()
        }
        return replace(self, components=components)


def read_lora(path, unet: dict | None = None) -> Lora:
    """The pairs of a file, or of the folder that holds LORA_FILE, with the bits that they have there.

    unet: the config of the UNet that it is for, where its layers have CompVis' numbers and it is not Stable
    Diffusion's. Raises ModelError for a file that is damaged, or that holds anything besides pairs.
    """
    path = find_lora(path)
    arrays = read_arrays(path)
    arrays = arrays if is_pytorch(path) else turn_linear(arrays)
    keys = {key: read_key(key, unet) for key in arrays}
    if unknown := sorted(key for key, found in keys.items() if found is None):
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        if any("dora_scale" in key or "lora_magnitude_vector" in key for key in unknown):
            raise ModelError(f"{path} is a DoRA ({unknown[0]}), which is not supported; give a LoRA")
        raise ModelError(
            f"{path} holds {', '.join(unknown[:_SHOWN]):.300}{more}, which is not a LoRA of a UNet or its text encoder "
            "in diffusers' or kohya's keys; convert it with the program that made it"
        )
    if not arrays:
        raise ModelError(f"{path} holds no LoRA; give another file")
    if len(names := sorted(adapter_names(arrays))) > 1:
        raise ModelError(
            f"{path} holds several adapters ({', '.join(names[:_SHOWN])}); write each to a file of its own"
        )
    found: dict[str, dict] = defaultdict(lambda: defaultdict(dict))
    for key, (component, layer, array) in keys.items():
        if array in found[component][layer]:
            raise ModelError(f"{path} holds {component} {layer} twice, in two forms ({key}); make it again")
        found[component][layer][array] = arrays[key]
    metadata = {key: value for key, value in read_metadata(path).items() if key != "format"}
    said = read_settings(path, metadata, any(PEFT_PREFIX in key or adapter_names([key]) for key in arrays))
    plain = plain_alpha(metadata, any(key.startswith(tuple(KOHYA_PREFIXES.values())) for key in arrays))
    components = {
        component: {
            layer: _pair(own, f"{path}: {component} {layer}", layer, said.get(component) or said.get("") or {}, plain)
            for layer, own in layers.items()
        }
        for component, layers in found.items()
    }
    return Lora(components, metadata, str(path))


def find_lora(path) -> Path:
    """The file of a folder, diffusers' or else peft's; a file itself."""
    path = Path(path).expanduser()
    if not path.is_dir():
        return path
    return next((path / name for name in (LORA_FILE, *_PEFT_FILES) if (path / name).is_file()), path / LORA_FILE)


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
    require_finite(arrays, lora.source)
    contiguous = {key: np.array(array, order="C") for key, array in arrays.items()}
    own = {key: value for key, value in lora.metadata.items() if key not in STATED}  # alpha stands in the pairs
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
    if form == "kohya":
        metadata |= _kohya_metadata(lora)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(save(contiguous, metadata={**metadata, "format": "pt"}))
    return path


def _pair(arrays: dict[str, np.ndarray], where: str, layer: str, said: dict, plain: tuple | None) -> LoraPair:
    """The pair of a layer. `said`: the settings of its adapter; `plain`: what the header says of the scale besides.
    Raises ModelError where its arrays are not a pair, and where what the file says does not agree."""
    if missing := [name for name in ("down", "up") if name not in arrays]:
        raise ModelError(f"{where} lacks its {' and its '.join(missing)} matrix; copy the file again")
    down, up = arrays["down"], arrays["up"]
    shapes = f"down {list(down.shape)}, up {list(up.shape)}"
    fits = down.ndim in (2, 4) and up.ndim in (2, 4) and up.shape[1] == len(down) > 0 and set(up.shape[2:]) <= {1}
    if not fits or {down.dtype.kind, up.dtype.kind} != {"f"}:
        raise ModelError(f"{where} is not a pair of matrices ({shapes}, {down.dtype}); make the file again")
    rank, stated = len(down), stated_alpha(said, layer, len(down), where)
    array = arrays.get("alpha")
    if array is not None and (array.size != 1 or array.dtype.kind not in "fiu" or not np.isfinite(array).all()):
        raise ModelError(f"{where} has an alpha that is not a number; make the file again")
    if array is None and stated is None:
        if plain and plain[1] != rank:
            raise ModelError(
                f"{where} has rank {rank} and no alpha, and the header says {plain[0]} {plain[1]:g}: whether it is "
                "scaled by that is not clear; make the file again with alpha beside each pair"
            )
        return LoraPair(down, up, float(rank))
    alpha = stated if array is None else float(array.reshape(()))
    if stated is not None and abs(alpha - stated) > 1e-3 * abs(stated):
        raise ModelError(f"{where} has alpha {alpha:g}, and its settings say {stated:g}; make the file again")
    return LoraPair(down, up, alpha)


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
