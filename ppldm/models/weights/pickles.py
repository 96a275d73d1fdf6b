"""Weights in pickles, read without running them: PyTorch's zip files (.ckpt, .bin, .pt) and Paddle's .pdparams.

A pickle is a program: it may name any function and call it. The readers here resolve names in a short table alone, to
functions of this module or to ones known to be harmless; any other name is a ModelError and nothing has been called.
Neither torch nor anything else of the file's choosing is imported.
"""

import collections
import io
import math
import pickle
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...utils.errors import ModelError

BFLOAT16 = "bfloat16"
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": BFLOAT16,
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_BROKEN = (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, MemoryError,
           UnicodeDecodeError, OverflowError)  # fmt: skip


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of bfloat16 to the float32 of the same values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class StoredTensor(NamedTuple):
    """A tensor of a PyTorch file, not yet read. `offset` and `strides` are in elements, as PyTorch has them."""

    dtype: str
    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, archive: zipfile.ZipFile, root: str) -> np.ndarray:
        """The tensor's values. zipfile compares the CRC-32 of what it reads. Raises ValueError where it is cut."""
        stored = "uint16" if self.dtype == BFLOAT16 else self.dtype
        flat = np.frombuffer(archive.read(f"{root}/data/{self.storage}"), dtype=stored)
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if min(self.shape, default=1) > 0 and not (
            self.offset >= 0 and last < flat.size and min(self.strides, default=0) >= 0
        ):
            raise ValueError(f"storage {self.storage} has {flat.size} values, a tensor wants {last + 1}")
        values = np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, [stride * flat.itemsize for stride in self.strides], writeable=False
        )
        return widen_bfloat16(values) if self.dtype == BFLOAT16 else np.ascontiguousarray(values).reshape(self.shape)


class Inert:
    """Stands for an object that is not weights, such as a callback's state: takes everything, does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        """Take what a list would."""

    def extend(self, values):
        """Take what a list would."""


class _Restricted(pickle.Unpickler):
    """`allowed` maps (module, name) to what stands for it; `inert` are packages whose objects are passed over."""

    allowed: dict = {}
    inert: tuple[str, ...] = ()

    def find_class(self, module, name):
        if (module, name) in self.allowed:
            return self.allowed[module, name]
        if module.split(".")[0] in self.inert:
            return Inert
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid):
        raise _Refused("a persistent object")


class _Refused(Exception):
    """A pickle asked for what is not in the table."""


class _Storage(NamedTuple):
    """A storage class of torch by name; only its dtype matters."""

    dtype: str


def _rebuild_tensor(storage, offset, shape, strides, *_ignored):
    dtype, key = storage
    shape, strides = tuple(int(n) for n in shape), tuple(int(n) for n in strides)
    return StoredTensor(dtype, key, int(offset), shape, strides)


def _rebuild_parameter(tensor, *_ignored):
    return tensor


class _TorchUnpickler(_Restricted):
    allowed = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): Inert,
        ("argparse", "Namespace"): Inert,
        ("numpy", "dtype"): Inert,
        ("numpy.core.multiarray", "scalar"): Inert,
        ("numpy._core.multiarray", "scalar"): Inert,
        ("_codecs", "encode"): Inert,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
        ("torch", "Size"): tuple,
        **{("torch", name): _Storage(dtype) for name, dtype in _STORAGES.items()},
    }
    # What training frameworks leave beside the weights: their callbacks, configs and numbers.
    inert = ("pytorch_lightning", "lightning", "lightning_fabric", "omegaconf")

    def persistent_load(self, pid):
        kind, storage_class, key, _device, _size = pid
        if kind != "storage" or not isinstance(storage_class, _Storage):
            raise _Refused("a persistent object that is no storage")
        return storage_class.dtype, str(key)


def read_torch(path, wanted=None) -> dict[str, np.ndarray]:
    """Name to array of a file that torch.save wrote since PyTorch 1.6: a state dict, alone or under "state_dict".

    `wanted(name)` chooses; the others are not read. Half precision stays, bfloat16 becomes float32. Raises ModelError.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive)
            tree = _TorchUnpickler(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()
            tensors = _state_dict(tree)
            return {
                name: tensor.read(archive, root) for name, tensor in tensors.items() if wanted is None or wanted(name)
            }
    except _Refused as error:
        raise _refusal(path, error) from error
    # Not implemented, or in need of a password: versions, methods and flags of a damaged zip file.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ModelError(
            f"{path} is damaged, cut short, or was saved by PyTorch before 1.6 ({error}); copy it again, or save it "
            "anew with a newer PyTorch"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except _BROKEN as error:
        raise ModelError(
            f"{path} holds no weights of PyTorch ({error}); give a state dict that torch.save wrote"
        ) from error


def _root(archive: zipfile.ZipFile) -> str:
    for name in archive.namelist():
        if name.endswith("/data.pkl") and name.count("/") == 1:
            return name.partition("/")[0]
    raise ValueError("no data.pkl in the archive")


def _state_dict(tree) -> dict:
    if isinstance(tree, dict) and isinstance(tree.get("state_dict"), dict):
        tree = tree["state_dict"]
    if not isinstance(tree, dict):
        raise ValueError("not a dict of tensors")
    return {name: value for name, value in tree.items() if isinstance(name, str) and isinstance(value, StoredTensor)}


def _reconstruct(subtype, shape, dtype):
    return np.ndarray.__new__(np.ndarray, shape, dtype)


def _encode_latin1(text, encoding="latin1"):
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _Refused(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


class _PaddleUnpickler(_Restricted):
    allowed = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("builtins", "tuple"): tuple,
        ("__builtin__", "tuple"): tuple,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy.core.multiarray", "scalar"): np.core.multiarray.scalar,
        ("numpy._core.multiarray", "scalar"): np.core.multiarray.scalar,
        ("_codecs", "encode"): _encode_latin1,
    }


def read_pdparams(path, wanted=None) -> dict[str, np.ndarray]:
    """Name to array of a state dict that paddle.save wrote. `wanted(name)` chooses. Raises ModelError."""
    with _named_errors(path):
        tree = _join_slices(_read_paddle_tree(path))
        return {
            name: array
            for name, value in tree.items()
            if isinstance(name, str) and (array := _array(value)) is not None and (wanted is None or wanted(name))
        }


def refuse_programs(path) -> None:
    """Raises ModelError where a file that paddle.save wrote is more than data, so that paddle.load would run it."""
    with _named_errors(path):
        _read_paddle_tree(path)


def _read_paddle_tree(path) -> dict:
    with open(path, "rb") as file:
        tree = _PaddleUnpickler(file, encoding="latin1").load()
    if not isinstance(tree, dict):
        raise ValueError("not a dict of tensors")
    return tree


@contextmanager
def _named_errors(path):
    try:
        yield
    except _Refused as error:
        raise _refusal(path, error) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except _BROKEN as error:
        raise ModelError(
            f"{path} is damaged or holds no weights of Paddle ({str(error) or type(error).__name__}); copy it again"
        ) from error


def _array(value) -> np.ndarray | None:
    """A numeric array, given alone or as paddle.save writes a tensor, (generated name, array); None for all else."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return None
    return widen_bfloat16(value) if value.dtype == np.uint16 else value


def _join_slices(tree: dict) -> dict:
    """paddle.save cuts arrays of 4 GiB and more; `UnpackBigParamInfor@@` says how to join them."""
    tree = dict(tree)
    for name, info in tree.pop("UnpackBigParamInfor@@", {}).items():
        slices = [tree.pop(part) for part in info["slices"]]
        tree[name] = np.concatenate(slices).reshape(info["OriginShape"])
    return tree


def _refusal(path, error: _Refused) -> ModelError:
    return ModelError(
        f"{path} is refused: its pickle asks for {error}, which no weights need and which could run a program; "
        "nothing of it was run. Use a copy from a source that you trust, best as .safetensors"
    )


class _Emitter:
    """Writes the few pickle opcodes of a dict of tensors, as torch.save does under protocol 2."""

    def __init__(self):
        self.out = bytearray(b"\x80\x02")

    def text(self, value: str):
        data = value.encode()
        self.out += b"X" + len(data).to_bytes(4, "little") + data

    def integer(self, value: int):
        if value < 2**31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            self.out += b"\x8a\x08" + value.to_bytes(8, "little", signed=True)

    def tuple(self, values):
        self.out += b"("
        for value in values:
            self.integer(value)
        self.out += b"t"

    def tensor(self, key: str, storage: str, shape, strides, size: int):
        self.out += b"ctorch._utils\n_rebuild_tensor_v2\n(("
        self.text("storage")
        self.out += f"ctorch\n{storage}\n".encode()
        self.text(key)
        self.text("cpu")
        self.integer(size)
        self.out += b"tQ"
        self.integer(0)
        self.tuple(shape)
        self.tuple(strides)
        self.out += b"\x89ccollections\nOrderedDict\n)RtR"


def write_torch(path, state_dict: dict[str, np.ndarray], numbers: dict[str, int]) -> None:
    """A file that torch.load reads: {"state_dict": tensors, **numbers}. The arrays' dtypes stay."""
    storages = {dtype: name for name, dtype in _STORAGES.items()}
    emitter = _Emitter()
    emitter.out += b"}("
    for name, number in numbers.items():
        emitter.text(name)
        emitter.integer(number)
    emitter.text("state_dict")
    emitter.out += b"}("
    for key, (name, array) in enumerate(state_dict.items()):
        emitter.text(name)
        strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        emitter.tensor(str(key), storages[array.dtype.name], array.shape, strides, array.size)
    emitter.out += b"uu."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", bytes(emitter.out))
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(state_dict.values()):
            with archive.open(f"archive/data/{key}", "w", force_zip64=array.nbytes > 2**30) as file:
                file.write(memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B"))
        archive.writestr("archive/version", "3\n")
