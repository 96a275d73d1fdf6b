"""PyTorch's files (.ckpt, .bin, .pt, .pth): a pickle that says which tensors there are, and their storages.

Since PyTorch 1.6 they are zip files, with an uncompressed member for each storage; before, the storages followed the
pickle. A tensor is a view of a storage and never larger: what is not so is refused before memory is taken for it.
"""

import math
import os
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...utils.errors import ModelError
from ..components import OLDER_TORCH_START, widen_bfloat16
from .pickles import INERT, Malformed, Record, Refused, is_size, load, mapped, ordered_dict, same_tuple, take

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
_CHUNK = 1 << 20
_OLDER_VERSION = 1001
_LONGEST_LIST = 64  # dimensions of a tensor
# What zipfile raises on damaged files: versions, methods, flags, offsets and names that cannot be.
_BROKEN_ZIP = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, KeyError, OverflowError,
               struct.error)  # fmt: skip


@dataclass(frozen=True)
class StoredTensor(Record):
    """A tensor of a PyTorch file, not yet read. `offset` and `strides` are in elements, as PyTorch has them."""

    dtype: str
    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stored_dtype(self) -> np.dtype:
        """Of the storage's elements: uint16 for bfloat16, uint8 for truth values, which a file may hold as any byte."""
        return np.dtype({BFLOAT16: "uint16", "bool": "uint8"}.get(self.dtype, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Of its values in the file."""
        return math.prod(self.shape) * self.stored_dtype.itemsize

    def view(self, content: np.ndarray) -> np.ndarray:
        """The values in a storage's bytes [n] uint8. Raises Malformed where it has fewer, or shows some twice."""
        if content.size % self.stored_dtype.itemsize:
            raise Malformed(f"storage {self.storage} has {content.size} bytes, not whole values")
        flat = content.view(self.stored_dtype)
        count = math.prod(self.shape)
        if not count:
            return np.empty(self.shape, dtype=np.float32 if self.dtype == BFLOAT16 else self.dtype)
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if last >= flat.size:
            raise Malformed(f"storage {self.storage} has {flat.size} values, a tensor wants {last + 1}")
        if count > flat.size or any(n > 1 and not stride for n, stride in zip(self.shape, self.strides, strict=True)):
            raise Malformed(f"storage {self.storage} has {flat.size} values, a tensor shows some of them twice")
        values = np.lib.stride_tricks.as_strided(
            flat[self.offset :], self.shape, [stride * flat.itemsize for stride in self.strides]
        )
        if self.dtype == BFLOAT16:
            return widen_bfloat16(values)
        if self.dtype == "bool":
            return values != 0
        whole = values.flags.c_contiguous and count == flat.size
        return values if whole else np.array(values, order="C")


@dataclass(frozen=True)
class _Storage(Record):
    """A storage of the file; without a `key` a class of torch, of which only the dtype matters."""

    dtype: str
    key: str = ""


def _rebuild_tensor(*args) -> StoredTensor:
    storage, offset, shape, strides = take(args, _Storage, int, tuple, tuple)
    if len(shape) != len(strides) or len(shape) > _LONGEST_LIST or not all(map(is_size, (offset, *shape, *strides))):
        raise Malformed("a tensor with a shape or strides that no tensor has")
    return StoredTensor(storage.dtype, storage.key, offset, shape, strides)


def _find_storage(pid) -> _Storage:
    # Before PyTorch 1.6 it had a sixth entry, for views of a storage, which no state dict has had since 0.4.
    if isinstance(pid, tuple) and len(pid) == 6 and pid[5] is None:
        pid = pid[:5]
    if not isinstance(pid, tuple) or len(pid) != 5 or not isinstance(pid[1], _Storage) or pid[0] != "storage":
        raise Refused("a persistent object that is not a storage")
    if not isinstance(pid[2], (str, int)):
        raise Malformed("a storage without a name")
    return _Storage(pid[1].dtype, str(pid[2]))


_NAMES = {
    ("collections", "OrderedDict"): ordered_dict,
    ("collections", "defaultdict"): INERT,
    ("argparse", "Namespace"): INERT,
    ("numpy", "dtype"): INERT,
    ("numpy.core.multiarray", "scalar"): INERT,
    ("numpy._core.multiarray", "scalar"): INERT,
    ("_codecs", "encode"): INERT,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda *args: take(args, StoredTensor)[0],
    ("torch", "Size"): same_tuple,
    **{("torch", name): _Storage(dtype) for name, dtype in _STORAGES.items()},
}
# What training frameworks leave beside the weights: their callbacks, configs and numbers.
_INERT = ("pytorch_lightning", "lightning", "lightning_fabric", "omegaconf")


def read_torch(path, wanted=lambda name: True) -> dict[str, np.ndarray]:
    """Name to array of a file that torch.save wrote: a state dict, by itself or under "state_dict", or the vectors of a
    textual inversion. `wanted(name)` chooses; the others are not read. Half precision stays, bfloat16 becomes float32.
    Raises ModelError."""
    path = Path(path)
    with mapped(path, "PyTorch") as data, _open(path, data) as (tree, read_storage):
        for name in ("state_dict", "string_to_param"):
            if isinstance(tree, dict) and isinstance(tree.get(name), dict):
                tree = tree[name]
        if not isinstance(tree, dict):
            raise Malformed("not a dict of tensors")
        found = {name: one for name, one in tree.items() if isinstance(name, str) and isinstance(one, StoredTensor)}
        tensors = {name: one for name, one in found.items() if wanted(name)}
        if sum(one.num_bytes for one in set(tensors.values())) > len(data):
            raise Malformed("its tensors have more bytes than the file")
        by_storage: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            by_storage.setdefault(tensor.storage, []).append(name)
        arrays = {}
        for key, names in by_storage.items():
            content = read_storage(key)
            views = {tensor: tensor.view(content) for tensor in {tensors[name] for name in names}}
            arrays |= {name: views[tensors[name]] for name in names}
        return {name: arrays[name] for name in tensors}


@contextmanager
def _open(path: Path, data: memoryview):
    """(what is pickled in the file, what gives the bytes of a storage by its name). Raises ModelError."""
    if data[: len(OLDER_TORCH_START)] == OLDER_TORCH_START:
        yield _open_older(data)
        return
    try:
        with zipfile.ZipFile(path) as archive:
            root = _root(archive)
            pickled = memoryview(_read_member(archive, f"{root}/data.pkl"))
            tree, _ = load(pickled, 0, _NAMES, _INERT, _find_storage)
            yield tree, lambda key: _read_member(archive, f"{root}/data/{key}")
    except _BROKEN_ZIP as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); copy it again") from error


def _open_older(data: memoryview):
    """The same of a file from before PyTorch 1.6, behind its first number: pickles of a version, of the machine, of the
    state dict and of the storages' names, then for each of these the number of its values, 8 bytes, and the values."""
    stored: dict[str, _Storage] = {}

    def find(pid) -> _Storage:
        one = _find_storage(pid)
        return stored.setdefault(one.key, one)

    found, place = [], len(OLDER_TORCH_START)
    for _ in range(4):
        value, place = load(data, place, _NAMES, _INERT, find)
        found.append(value)
    version, machine, tree, keys = found
    if version != _OLDER_VERSION or not isinstance(machine, dict) or not machine.get("little_endian"):
        raise Malformed("it is of another version, or was saved on a big-endian machine")
    if not isinstance(keys, list) or not all(isinstance(key, str) and key in stored for key in keys):
        raise Malformed("it names storages that it does not have")
    places = {}
    for key in keys:
        count = int.from_bytes(data[place : place + 8], "little")
        places[key] = place + 8, count * StoredTensor(stored[key].dtype, key, 0, (), ()).stored_dtype.itemsize
        place = sum(places[key])
        if place > len(data):
            raise Malformed("it is cut short")

    def read_storage(key: str) -> np.ndarray:
        if key not in places:
            raise Malformed(f"no storage {key[:80]}")
        start, size = places[key]
        return np.array(data[start : start + size], np.uint8)

    return tree, read_storage


def _root(archive: zipfile.ZipFile) -> str:
    for name in archive.namelist():
        if name.endswith("/data.pkl") and name.count("/") == 1:
            root = name.partition("/")[0]
            if f"{root}/byteorder" in archive.NameToInfo and archive.read(f"{root}/byteorder")[:3] == b"big":
                raise Malformed("it was saved on a big-endian machine")
            return root
    raise Malformed("no data.pkl in the archive")


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """The bytes [n] uint8 of a member, read once, into their place; zipfile compares their CRC-32."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise Malformed(f"{name[:80]} is compressed, which torch.save never does")
    if info.header_offset + info.file_size > os.fstat(archive.fp.fileno()).st_size:
        raise Malformed(f"{name[:80]} is longer than the file")
    content, done = np.empty(info.file_size, dtype=np.uint8), 0
    with archive.open(info) as member:
        while piece := member.read(_CHUNK):
            content[done : done + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            done += len(piece)
    if done != content.size:
        raise Malformed(f"{name[:80]} is cut short")
    return content


def pickled_text(value: str) -> bytes:
    """The opcode of a text, as torch.save writes it under protocol 2."""
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def pickled_number(value: int) -> bytes:
    """The opcode of a whole number from 0."""
    if value < 2**31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def pickled_tensor(key: str, storage: str, size: int, shape, strides, offset: int = 0) -> bytes:
    """The opcodes of a tensor that is a view of the storage `key`, of `size` values of the class `storage`."""
    sides, steps = (b"(" + b"".join(map(pickled_number, values)) + b"t" for values in (shape, strides))
    stored = f"ctorch\n{storage}\n".encode() + pickled_text(key) + pickled_text("cpu") + pickled_number(size)
    view = pickled_number(offset) + sides + steps + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + pickled_text("storage") + stored + b"tQ" + view


def write_torch(path, state_dict: dict[str, np.ndarray], numbers: dict[str, int]) -> None:
    """A file that torch.load reads: {"state_dict": tensors, **numbers}. The arrays' dtypes stay."""
    storages = {dtype: name for name, dtype in _STORAGES.items()}
    program = b"\x80\x02}("
    for name, number in numbers.items():
        program += pickled_text(name) + pickled_number(number)
    program += pickled_text("state_dict") + b"}("
    for key, (name, array) in enumerate(state_dict.items()):
        strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        tensor = pickled_tensor(str(key), storages[array.dtype.name], array.size, array.shape, strides)
        program += pickled_text(name) + tensor
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", program + b"uu.")
        archive.writestr("archive/byteorder", "little")
        for key, array in enumerate(state_dict.values()):
            with archive.open(f"archive/data/{key}", "w", force_zip64=array.nbytes > 2**30) as file:
                file.write(memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B"))
        archive.writestr("archive/version", "3\n")
