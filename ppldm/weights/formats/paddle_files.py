"""What paddle.save writes: state dicts of weights (.pdparams), and nested ones of optimizers and schedules (.pdopt).

Three layouts, by the version that wrote them: arrays by name; tensors as (generated name, array); and arrays by name
with `StructuredToParameterName@@`, a table of the generated names. bfloat16 is stored as uint16. Under protocols 2 and
3 arrays of 1 GiB and more are cut, and `UnpackBigParamInfor@@` says how to join them.

`write_tree` writes the last layout, and the second where tensors are nested, as paddle.save does, but one array after
the other. paddle.save first copies all tensors, and its pickler keeps a second copy of each until the file is whole:
for an optimizer's state four times the bytes of the weights, at each checkpoint.

What numpy's own `__reduce__` writes is read and nothing more: `_reconstruct` (protocols 2 to 4), `_frombuffer`
(protocol 5) and `scalar`. A type's state may set its byte order; any other would make of it what its bytes are not.
"""

import codecs
import math
import os
import pickle
from dataclasses import replace
from functools import cache
from typing import BinaryIO

import numpy as np

from ...utils.files import open_regular
from ..components import widen_bfloat16
from .pickles import (
    INERT,
    Content,
    Malformed,
    Record,
    Refused,
    is_size,
    load,
    named_errors,
    ordered_dict,
    same_tuple,
    take,
)

NAME_TABLE = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"
_DEEPEST = 16  # dicts and lists in one another
# The numeric types that arrays of weights may have: numpy's names in pickles.
_DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_CHUNK = 1 << 20
_MOST_DIMENSIONS = 32  # numpy's own limit


def read_pdparams(path, wanted=lambda name: True) -> dict[str, np.ndarray]:
    """Name to array of a state dict that paddle.save wrote; bfloat16 becomes float32. `wanted(name)` chooses.

    Raises ModelError.
    """
    with named_errors(path, "Paddle"), open(path, "rb") as file:
        tree = _parse(file)
        slices = _slices(tree)
        cut = {part for parts, _ in slices.values() for part in parts}
        arrays = {}
        read = cache(lambda array: _widened(array.read(file)))  # once, whatever its names
        for name, value in tree.items():
            value = value[1] if _is_named(value) else value
            if isinstance(name, str) and isinstance(value, _Array) and name not in cut and wanted(name):
                arrays[name] = read(value)
        for name, (parts, shape) in slices.items():
            if wanted(name):
                arrays[name] = _widened(_join([tree[part] for part in parts], shape, file))
        return arrays


def read_tree(path) -> dict:
    """The whole of a nested dict that paddle.save wrote, its tensors as arrays or as (generated name, array).

    Raises ModelError.
    """
    with named_errors(path, "Paddle"), open_regular(path) as file:
        tree = _parse(file)
        if _SLICES in tree:
            raise Malformed("arrays in slices, which no checkpoint has")
        return _read_all(tree, file, {}, _DEEPEST)


def write_tree(path, tree: dict) -> None:
    """Write nested dicts with tensors and arrays for `paddle.load` and `read_tree`. The memory that it takes is twice
    that of the largest tensor."""
    import paddle

    names = {key: value.name for key, value in tree.items() if isinstance(value, paddle.Tensor)}
    if names and not any(isinstance(value, dict) and _has_tensors(value, paddle.Tensor) for value in tree.values()):
        plain = {key: _Later(value) if key in names else value for key, value in tree.items()}
        tree = {**plain, NAME_TABLE: names}
    with open(path, "wb") as file:
        _ArrayByArray(file, protocol=4).dump(tree)


def _has_tensors(tree: dict, kind: type) -> bool:
    return any(isinstance(one, kind) or (isinstance(one, dict) and _has_tensors(one, kind)) for one in tree.values())


class _Later:
    """A tensor that becomes an array when its turn comes."""

    def __init__(self, tensor):
        self.tensor = tensor


class _ArrayByArray(pickle.Pickler):
    """Tensors as (name, array). It has no memo, which would keep the bytes of all arrays."""

    def __init__(self, file, protocol: int):
        super().__init__(file, protocol=protocol)
        self.fast = True

    def reducer_override(self, value):
        import paddle

        if isinstance(value, _Later):
            return value.tensor.numpy().__reduce__()
        if isinstance(value, paddle.Tensor):
            return tuple, ((value.name, value.numpy()),)
        return NotImplemented


def _parse(file) -> dict:
    tree = load(file, os.fstat(file.fileno()).st_size, _NAMES)
    if not isinstance(tree, dict):
        raise Malformed("not a dict of tensors")
    return tree


def _is_named(value) -> bool:
    """True for a tensor as (generated name, array)."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _widened(array: np.ndarray) -> np.ndarray:
    return widen_bfloat16(array) if array.dtype == np.uint16 else array


def _slices(tree: dict) -> dict[str, tuple[list[str], tuple]]:
    """(names of its slices, shape) of each array that is cut. No slice may serve twice, which would
    take more memory than the file has bytes."""
    found, used = {}, set()
    table = tree.get(_SLICES, {})
    if not isinstance(table, dict):
        raise Malformed(f"{_SLICES} is not a dict")
    for name, info in table.items():
        parts, shape = (info.get(key) for key in ("slices", "OriginShape")) if isinstance(info, dict) else (None, None)
        if not isinstance(parts, list) or not isinstance(shape, (tuple, list)) or not parts:
            raise Malformed(f"{_SLICES} of no known form")
        for part in parts:
            if not isinstance(part, str) or part in used or not isinstance(tree.get(part), _Array):
                raise Malformed(f"{_SLICES} names a slice that is not there, or twice")
            used.add(part)
        if not isinstance(name, str) or not all(isinstance(side, int) and side >= 0 for side in shape):
            raise Malformed(f"{_SLICES} of no known form")
        found[name] = parts, tuple(shape)
    return found


def _join(slices: list["_Array"], shape: tuple, file) -> np.ndarray:
    """The array of its slices, each read and put into its place."""
    if len({one.dtype for one in slices}) != 1 or sum(math.prod(one.shape) for one in slices) != math.prod(shape):
        raise Malformed(f"{_SLICES}: the slices do not make an array of shape {list(shape)}")
    flat, start = np.empty(math.prod(shape), dtype=slices[0].dtype.newbyteorder("=")), 0
    for one in slices:
        values = one.read(file).reshape(-1)
        flat[start : start + values.size] = values
        start += values.size
    return flat.reshape(shape)


def _read_all(value, file, seen: dict, deeper: int):
    """The value with its arrays read. What stands in several places is read once."""
    if not isinstance(value, (dict, list, tuple, _Array)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    if not deeper:
        raise Malformed(f"it is nested more than {_DEEPEST} times")
    if isinstance(value, _Array):
        result = value.read(file)
    elif isinstance(value, dict):
        result = {key: _read_all(one, file, seen, deeper - 1) for key, one in value.items()}
    else:
        result = type(value)(_read_all(one, file, seen, deeper - 1) for one in value)
    seen[id(value)] = result
    return result


class _Dtype(Record):
    """A numeric type; its byte order comes as its state."""

    def __init__(self, name: str):
        self.numpy = np.dtype(name)

    def __setstate__(self, state) -> None:
        """numpy's state: (version, byte order, None, None, None, -1, -1, flags), which says no more of plain types."""
        if not isinstance(state, tuple) or len(state) not in (8, 9) or not isinstance(state[1], str):
            raise Malformed("the state of a dtype")
        if state[1] not in ("<", ">", "|", "=") or state[2:7] != (None, None, None, -1, -1):
            raise Refused("a dtype with a state of its own")
        self.numpy = self.numpy.newbyteorder(state[1])


class _Array(Record):
    """A numpy array, whose values are read by `read`. `content` is None until its state came."""

    def __init__(self):
        self.dtype, self.shape, self.is_fortran, self.content = np.dtype("u1"), (), False, None

    @property
    def content_bytes(self) -> int:
        """Of its values; 0 until they came."""
        return 0 if self.content is None else math.prod(self.shape) * self.dtype.itemsize

    def __setstate__(self, state) -> None:
        """numpy's state: (version, shape, dtype, is Fortran's order, bytes). Raises Malformed where they disagree."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise Malformed("the state of an array")
        self.fill(state[4], state[2], state[1], bool(state[3]) if isinstance(state[3], (bool, int)) else False)

    def fill(self, content, dtype, shape, is_fortran: bool) -> None:
        """Take shape, type and bytes, once. Raises Malformed where the bytes are not those of such an array."""
        if self.content is not None:
            raise Malformed("an array that is filled twice")
        if not isinstance(dtype, _Dtype):
            raise Refused("an array of no numeric type")
        if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS or not all(map(is_size, shape)):
            raise Malformed("the shape of an array")
        if math.prod(max(1, side) for side in shape) * dtype.numpy.itemsize >= 1 << 62:
            raise Malformed(f"an array of shape {list(shape)}")
        if not isinstance(content, (bytes, str, Content)):
            raise Malformed("an array without bytes")
        size = content.size if isinstance(content, Content) else len(content)
        due = math.prod(shape) * dtype.numpy.itemsize
        # How many bytes a text makes is known when it is read; each takes one or two in the file.
        if due > size or (due != size and not (isinstance(content, Content) and content.is_latin1)):
            raise Malformed(f"an array of {due} bytes has {size}")
        self.dtype, self.shape, self.is_fortran, self.content = dtype.numpy, shape, is_fortran, content

    def read(self, file: BinaryIO) -> np.ndarray:
        """The array, in native byte order. Raises Malformed where its values are not there, or the file is shorter
        than it was."""
        if self.content is None:
            raise Malformed("an array without its values")
        flat = np.empty(math.prod(self.shape), dtype=self.dtype)
        if flat.size:
            _fill_bytes(file, self.content, memoryview(flat.view(np.uint8)))
        if flat.dtype.kind == "b":
            flat = flat.view(np.uint8) != 0  # no other byte is a truth value
        if not flat.dtype.isnative:
            flat = flat.astype(flat.dtype.newbyteorder("="))
        return flat.reshape(self.shape, order="F" if self.is_fortran else "C")


def _fill_bytes(file: BinaryIO, content, target: memoryview) -> None:
    """Read `content` into `target`, all of it. Raises Malformed where the bytes are fewer or more."""
    if not isinstance(content, Content):
        target[:] = _latin1(content)
        return
    file.seek(content.start)
    if not content.is_latin1:
        if file.readinto(target) != len(target):
            raise Malformed("the file is cut short")
        return
    decode, done, left = codecs.getincrementaldecoder("utf-8")().decode, 0, content.size
    while left:
        piece = file.read(min(left, _CHUNK))
        left -= len(piece)
        try:
            values = decode(piece, final=not left or not piece).encode("latin1")
        except UnicodeError:
            raise Malformed("bytes that are stored as no text") from None
        if not piece or done + len(values) > len(target):
            raise Malformed("an array's text has another length")
        target[done : done + len(values)] = values
        done += len(values)
    if done != len(target):
        raise Malformed("an array's text has another length")


def _dtype(*args) -> _Dtype:
    (name,) = take(args, str)
    if name not in _DTYPES:
        raise Refused(f"an array of type {name[:20]!r}")
    return _Dtype(name)


def _frombuffer(*args) -> _Array:
    content, dtype, shape, order = take(args, (bytes, Content), _Dtype, tuple, str)
    array = _Array()
    array.fill(content, dtype, shape, order == "F")
    return array


def _scalar(*args):
    dtype, content = take(args, _Dtype, (bytes, str))
    array = _Array()
    array.fill(_latin1(content), dtype, (), False)
    return np.frombuffer(array.content, dtype=array.dtype)[0].item()


def _encode(*args):
    """Bytes as protocol 2 writes them: a text whose characters are the bytes."""
    text, encoding = take(args, (str, Content), str)
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"_codecs.encode to {encoding[:20]!r}")
    if isinstance(text, Content):
        return replace(text, is_latin1=text.is_text)
    return _latin1(text)


def _no_bytes(*args) -> bytes:
    """`bytes()`, as protocol 2 writes none."""
    if args:
        raise Refused("bytes of something")
    return b""


def _latin1(text: str | bytes) -> bytes:
    """Bytes, or those that are stored as the letters of a text."""
    try:
        return text.encode("latin1") if isinstance(text, str) else text
    except UnicodeEncodeError:
        raise Malformed("bytes that are stored as no text") from None


_numpy = [module for core in ("core", "_core") for module in (f"numpy.{core}.multiarray", f"numpy.{core}.numeric")]
_NAMES = {
    ("numpy", "ndarray"): INERT,  # the argument of `_reconstruct`
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
    **{(module, "_reconstruct"): lambda *args: _Array() for module in _numpy},
    **{(module, "scalar"): _scalar for module in _numpy},
    **{(module, "_frombuffer"): _frombuffer for module in _numpy},
    ("collections", "OrderedDict"): ordered_dict,
    ("builtins", "tuple"): same_tuple,
    ("__builtin__", "tuple"): same_tuple,
}
