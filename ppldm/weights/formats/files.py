"""One file of weights, or a folder of one component, to arrays by name; and back. What a file is, its first bytes say.
No more is built than a file can fill: a few numbers in a config beside it can ask for any amount."""

import json
import re
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ...utils.errors import ModelError
from ...utils.files import is_table, open_regular, read_json_object
from ..components import OLDER_TORCH_START, ComponentWeights, from_torch

# A network somewhat larger than its file is built all the same: what is missing is then listed by name.
_SPARE_VALUES, _SPARE_PARAMETERS = 1 << 24, 1000

# Names of weight files in a component's folder, the safest format first.
WEIGHT_FILES = (
    "diffusion_pytorch_model.safetensors",
    "model.safetensors",
    "model_state.pdparams",
    "model.pdparams",
    "diffusion_pytorch_model.bin",
    "pytorch_model.bin",
)
# What diffusers puts before the suffix of the same weights in another type; full precision before half.
_VARIANTS = ("", ".fp32", ".fp16", ".bf16")
_SHARD = re.compile(r"-\d+-of-\d+$")
_WEIGHT_PATTERNS = ("*.safetensors", "*.pdparams", "*.bin")


def is_pytorch(path) -> bool:
    """Whether Linear weights are [out, in]: not of Paddle, nor of .safetensors that say another format than "pt"."""
    kind = _kind(Path(path))
    return kind == "torch" or (kind == "safetensors" and read_metadata(path).get("format", "pt") == "pt")


def read_arrays(path, wanted=lambda name: True) -> dict[str, np.ndarray]:
    """Name to array, of those `wanted`, of any of the three formats; small floats become float32. Raises ModelError."""
    path = Path(path)
    kind = _kind(path)
    if kind == "torch":
        from .torch_files import read_torch

        return read_torch(path, wanted)
    if kind == "safetensors":
        return _read_safetensors(path, wanted)
    from .paddle_files import read_pdparams

    return read_pdparams(path, wanted)


def read_names(path) -> set[str]:
    """The names of the arrays of such a file. Raises ModelError."""
    names: list[str] = []
    read_arrays(path, names.append)  # which says no to each
    return set(names)


def read_component_arrays(path: Path, wanted=lambda name: True) -> dict[str, np.ndarray]:
    """Name to array, of those `wanted`, of a component's file or folder, with Linear weights as Paddle has them. Raises
    ModelError."""
    arrays: dict[str, np.ndarray] = {}
    for file in weight_files(path) if path.is_dir() else [path]:
        own = read_arrays(file, wanted)
        arrays |= from_torch(own) if is_pytorch(file) else own
    return arrays


def write_safetensors(path, arrays: dict[str, np.ndarray], framework: str) -> None:
    """`framework`, "pt" or "pd", says in which orientation the Linear weights are."""
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # scalars stay scalars
    save_file(contiguous, str(path), metadata={"format": framework})


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a component's folder: one, or the shards that an index names. Raises ModelError."""
    for variant in _VARIANTS:
        for name in WEIGHT_FILES:
            file = folder / name
            if (whole := file.with_stem(f"{file.stem}{variant}")).is_file():
                return [whole]
            if (index := folder / f"{name}.index{variant}.json").is_file():
                return _shards(index)
    others = sorted(path for pattern in _WEIGHT_PATTERNS for path in folder.glob(pattern))
    indexes = sorted(folder.glob("*.index*.json"))
    if len(indexes) == 1:
        return _shards(indexes[0])
    if len(others) == 1:
        return others
    if not others:
        raise ModelError(f"{folder} has no weights ({' or '.join(_WEIGHT_PATTERNS)}); copy them there")
    if any(_SHARD.search(path.stem) for path in others):
        raise ModelError(f"{folder} has shards ({others[0].name}) without their index, *.index*.json; copy that too")
    raise ModelError(
        f"{folder} has several weight files ({', '.join(path.name for path in others)}); keep the one that is meant"
    )


def _shards(index: Path) -> list[Path]:
    """The files that an index names, in order. Raises ModelError."""
    table = read_json_object(index, ModelError, inside=True).get("weight_map")
    names = sorted(set(table.values())) if is_table(table, str) else []
    if not names:
        raise ModelError(f"{index} is not an index of shards: weight_map does not name the file of each array")
    if missing := [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]:
        raise ModelError(f"{index} names {missing[0]}, which is not there; copy it too")
    return [index.parent / name for name in names]


def _kind(path: Path) -> str:
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    if start[:4] == b"PK\x03\x04":
        return "torch"
    if start[:1] == b"\x80" and path.suffix != ".safetensors":
        return "torch" if start == OLDER_TORCH_START[: len(start)] else "paddle"
    if start[8:9] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    raise ModelError(f"{path} is not a file of weights: neither safetensors, nor PyTorch's, nor Paddle's; give another")


def read_metadata(path) -> dict[str, str]:
    """What a .safetensors file says besides its arrays; nothing for a file of another kind. Raises ModelError."""
    path = Path(path)
    if _kind(path) != "safetensors":
        return {}
    try:
        with safe_open(str(path), framework="np") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _read_safetensors(path: Path, wanted) -> dict[str, np.ndarray]:
    try:
        with safe_open(str(path), framework="np") as file:
            names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118 (not a dict)
            kinds = {name: file.get_slice(name).get_dtype() for name in names}
            if odd := next((name for name, kind in kinds.items() if kind not in (*_OF_NUMPY, *_WIDENED)), None):
                raise ModelError(
                    f"{path}: {odd} has the type {kinds[odd]}, which is not supported; convert it to float16"
                )
            arrays = {name: file.get_tensor(name) for name, kind in kinds.items() if kind in _OF_NUMPY}
        return arrays | _read_widened(path, {name: kind for name, kind in kinds.items() if kind in _WIDENED})
    except (SafetensorError, OSError, TypeError) as error:
        raise _damaged(path, error) from error


def _read_widened(path: Path, kinds: dict[str, str]) -> dict[str, np.ndarray]:
    """What numpy has no type for, so the library gives no such array: their bytes are read where its header says."""
    if not kinds:
        return {}
    import ml_dtypes

    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        arrays = {}
        for name, kind in kinds.items():
            start, end = header[name]["data_offsets"]
            file.seek(8 + size + start)
            stored = np.frombuffer(file.read(end - start), getattr(ml_dtypes, _WIDENED[kind]))
            arrays[name] = stored.astype(np.float32).reshape(header[name]["shape"])
    return arrays


_OF_NUMPY = ("BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "I64", "U64", "F64")
_WIDENED = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}  # of ml_dtypes


def _damaged(path: Path, error: Exception) -> ModelError:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ModelError(f"{path} is damaged, cut short or no safetensors file ({first}); copy it again")


class _TooLarge(Exception):
    """A network wants more than the file of its weights has."""


@contextmanager
def within_file(component: ComponentWeights):
    """ModelError when a network is built here with far more parameters than `component` has, or than memory holds."""
    from paddle.base.layer_helper_base import LayerHelperBase

    require_few_layers(component.config, len(component.arrays), component.source)
    create = LayerHelperBase.create_parameter
    most = 2 * sum(array.size for array in component.arrays.values()) + _SPARE_VALUES
    count_most = 2 * len(component.arrays) + _SPARE_PARAMETERS
    made = {"count": 0, "values": 0}

    def counted(self, attr, shape, *args, **settings):
        made["count"] += 1
        made["values"] += prod(int(side) for side in shape)
        if made["count"] > count_most or made["values"] > most:
            raise _TooLarge
        return create(self, attr, shape, *args, **settings)

    LayerHelperBase.create_parameter = counted
    try:
        yield
    except _TooLarge as error:
        raise ModelError(
            f"{component.source}: the config describes a far larger network than the weights beside it; copy both again"
        ) from error
    except MemoryError as error:
        raise ModelError(f"{component.source} needs more memory than there is; use a machine with more") from error
    finally:
        LayerHelperBase.create_parameter = create


def require_few_layers(config: dict, num_arrays: int, source) -> None:
    """Raises ModelError where a config has more layers than its weights have arrays: their names would not end."""
    for layers in (config.get("encoder_layers"), config.get("layers_per_block")):
        if isinstance(layers, (int, float)) and layers > num_arrays:
            raise ModelError(f"{source}: the config has {layers} layers for {num_arrays} arrays; copy both again")
