"""What paddle.save writes: state dicts of weights (.pdparams), and nested ones of optimizers and schedules (.pdopt).

Three layouts: arrays by name; tensors as (generated name, array); and arrays by name with
`StructuredToParameterName@@`, a table of the generated names. bfloat16 is stored as uint16. `write_tree` writes the
last layout, the second where tensors are nested, without the two further copies that paddle.save keeps.
"""

import math
import pickle
from functools import cache

import numpy as np

from ..components import widen_bfloat16
from .pickles import INERT, LongText, Malformed, Record, Refused, is_size, load, mapped, ordered_dict, same_tuple, take

NAME_TABLE = "StructuredToParameterName@@"
_SLICES = "UnpackBigParamInfor@@"  # of arrays of 1 GiB and more, under protocols 2 and 3
_DEEPEST = 16  # dicts and lists in one another
# The numeric types that arrays of weights may have: numpy's names in pickles.
_DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_MOST_DIMENSIONS = 32  # numpy's own limit


def read_pdparams(path, wanted=lambda name: True) -> dict[str, np.ndarray]:
    """Name to array, of those `wanted`, of a state dict of paddle.save; bfloat16 becomes float32. Raises ModelError."""
    with mapped(path, "Paddle") as data:
        arrays = {}
        # Once, whatever its names; bfloat16 is kept as uint16.
        read = cache(lambda one: widen_bfloat16(found) if (found := one.read()).dtype == np.uint16 else found)
        for name, value in _parse(data).items():
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
                value = value[1]  # of a tensor with its generated name
            if isinstance(name, str) and isinstance(value, _Array) and wanted(name):
                arrays[name] = read(value)
        return arrays


def read_tree(path) -> dict:
    """A nested dict that paddle.save wrote, its tensors as arrays or (generated name, array). Raises ModelError."""
    with mapped(path, "Paddle") as data:
        return _read_all(_parse(data), {}, _DEEPEST)


def write_tree(path, tree: dict) -> None:
    """Write nested dicts with tensors and arrays for `paddle.load` and `read_tree`, in twice the largest's memory."""
    import paddle

    names = {key: value.name for key, value in tree.items() if isinstance(value, paddle.Tensor)}
    is_flat = bool(names) and not any(isinstance(value, dict) and _has_tensors(value) for value in tree.values())
    with open(path, "wb") as file:
        _ArrayByArray(file, as_pairs=not is_flat).dump(tree | {NAME_TABLE: names} if is_flat else tree)


def _has_tensors(tree: dict) -> bool:
    import paddle

    return any(_has_tensors(one) if isinstance(one, dict) else isinstance(one, paddle.Tensor) for one in tree.values())


class _ArrayByArray(pickle.Pickler):
    """Tensors as arrays, or as (name, array). It has no memo, which would keep the bytes of all arrays."""

    def __init__(self, file, as_pairs: bool):
        super().__init__(file, protocol=4)
        self.fast, self.as_pairs = True, as_pairs

    def reducer_override(self, value):
        import paddle

        if not isinstance(value, paddle.Tensor):
            return NotImplemented
        return (tuple, ((value.name, value.numpy()),)) if self.as_pairs else value.numpy().__reduce__()


def _parse(data: memoryview) -> dict:
    tree, _ = load(data, 0, _NAMES)
    if not isinstance(tree, dict):
        raise Malformed("not a dict of tensors")
    if _SLICES in tree:
        raise Malformed("arrays in slices of 1 GiB, which no network here has")
    return tree


def _read_all(value, seen: dict, deeper: int):
    """The value with its arrays read. What stands in several places is read once."""
    if not isinstance(value, (dict, list, tuple, _Array)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    if not deeper:
        raise Malformed(f"it is nested more than {_DEEPEST} times")
    if isinstance(value, _Array):
        result = value.read()
    elif isinstance(value, dict):
        result = {key: _read_all(one, seen, deeper - 1) for key, one in value.items()}
    else:
        result = type(value)(_read_all(one, seen, deeper - 1) for one in value)
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
        self.fill(state[4], state[2], state[1], isinstance(state[3], int) and bool(state[3]))

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
        if not isinstance(content, (bytes, str, memoryview, LongText)):
            raise Malformed("an array without bytes")
        is_text, due = isinstance(content, LongText), math.prod(shape) * dtype.numpy.itemsize
        size = len(content.view if is_text else content)
        # How many bytes a text makes is known when it is read; each takes one or two in the file.
        if due > size or (due != size and not (is_text and content.is_latin1)):
            raise Malformed(f"an array of {due} bytes has {size}")
        self.dtype, self.shape, self.is_fortran, self.content = dtype.numpy, shape, is_fortran, content

    def read(self) -> np.ndarray:
        """The array, in native byte order. Raises Malformed where its values are not there."""
        if self.content is None:
            raise Malformed("an array without its values")
        content = _latin1(self.content)
        if len(content) != self.content_bytes:
            raise Malformed("an array's text has another length")
        flat = np.frombuffer(content, np.uint8).copy() if content else np.empty(0, np.uint8)
        # No other byte is a truth value.
        flat = flat != 0 if self.dtype.kind == "b" else flat.view(self.dtype)
        if not flat.dtype.isnative:
            flat = flat.astype(flat.dtype.newbyteorder("="))
        return flat.reshape(self.shape, order="F" if self.is_fortran else "C")


def _dtype(*args) -> _Dtype:
    (name,) = take(args, str)
    if name not in _DTYPES:
        raise Refused(f"an array of type {name[:20]!r}")
    return _Dtype(name)


def _frombuffer(*args) -> _Array:
    content, dtype, shape, order = take(args, (bytes, memoryview, LongText), _Dtype, tuple, str)
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
    text, encoding = take(args, (str, LongText), str)
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"_codecs.encode to {encoding[:20]!r}")
    return LongText(text.view, is_latin1=True) if isinstance(text, LongText) else _latin1(text)


def _no_bytes(*args) -> bytes:
    """`bytes()`, as protocol 2 writes none."""
    if args:
        raise Refused("bytes of something")
    return b""


def _latin1(text):
    """Bytes, or those that are stored as the letters of a text."""
    try:
        text = str(text.view, "utf-8") if isinstance(text, LongText) else text
        return text.encode("latin1") if isinstance(text, str) else text
    except UnicodeError:
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
