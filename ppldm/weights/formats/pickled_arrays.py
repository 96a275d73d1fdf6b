"""numpy's arrays, types and scalars in pickles, as records: plain numeric types, with the bytes that their shape needs.

What numpy's own `__reduce__` writes is read and nothing more: `_reconstruct` (protocols 2 to 4), `_frombuffer`
(protocol 5) and `scalar`. A type's state may set its byte order; any other would make of it what its bytes are not.
"""

import codecs
import math
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from .pickles import INERT, Content, Function, Malformed, Record, Refused, take

# The numeric types that arrays of weights may have: numpy's names in pickles.
DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_CHUNK = 1 << 20
_MOST_DIMENSIONS = 32  # numpy's own limit


class Dtype(Record):
    """A numeric type; its byte order comes by BUILD."""

    def __init__(self, name: str):
        self.numpy = np.dtype(name)

    def build(self, state) -> None:
        """numpy's state: (version, byte order, None, None, None, -1, -1, flags), which says no more of plain types."""
        if not isinstance(state, tuple) or len(state) not in (8, 9) or not isinstance(state[1], str):
            raise Malformed("the state of a dtype")
        if state[1] not in ("<", ">", "|", "=") or state[2:7] != (None, None, None, -1, -1):
            raise Refused("a dtype with a state of its own")
        self.numpy = self.numpy.newbyteorder(state[1])


class Array(Record):
    """A numpy array, whose values are read by `read`. `content` is None until its state came."""

    def __init__(self):
        self.dtype, self.shape, self.is_fortran, self.content = None, (), False, None

    @property
    def num_bytes(self) -> int:
        """Of its values; 0 until they came."""
        return 0 if self.content is None else math.prod(self.shape) * self.dtype.itemsize

    def build(self, state) -> None:
        """numpy's state: (version, shape, dtype, is Fortran's order, bytes). Raises Malformed where they disagree."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise Malformed("the state of an array")
        self.fill(state[4], state[2], state[1], bool(state[3]) if isinstance(state[3], (bool, int)) else False)

    def fill(self, content, dtype, shape, is_fortran: bool) -> None:
        """Take shape, type and bytes, once. Raises Malformed where the bytes are not those of such an array."""
        if self.content is not None:
            raise Malformed("an array that is filled twice")
        if not isinstance(dtype, Dtype):
            raise Refused("an array of no numeric type")
        if not isinstance(shape, tuple) or len(shape) > _MOST_DIMENSIONS or not all(map(is_size, shape)):
            raise Malformed("the shape of an array")
        if math.prod(max(1, side) for side in shape) * dtype.numpy.itemsize >= 1 << 62:
            raise Malformed(f"an array of shape {list(shape)}")
        content = _latin1(content) if isinstance(content, str) else content
        if not isinstance(content, (bytes, Content)):
            raise Malformed("an array without bytes")
        size = content.size if isinstance(content, Content) else len(content)
        due = math.prod(shape) * dtype.numpy.itemsize
        # How many bytes a text makes is known when it is read; each takes one or two in the file.
        if due > size or (due != size and not (isinstance(content, Content) and content.is_latin1)):
            raise Malformed(f"an array of {due} bytes has {size}")
        self.dtype, self.shape, self.is_fortran, self.content = dtype.numpy, shape, is_fortran, content

    def read(self, file: BinaryIO) -> np.ndarray:
        """The array, in native byte order. Raises Malformed where the file is shorter than it was."""
        flat = np.empty(math.prod(self.shape), dtype=self.dtype)
        if flat.size:
            fill_bytes(file, self.content, memoryview(flat.view(np.uint8)))
        if flat.dtype.kind == "b":
            flat = flat.view(np.uint8) != 0  # no other byte is a truth value
        if not flat.dtype.isnative:
            flat = flat.astype(flat.dtype.newbyteorder("="))
        return flat.reshape(self.shape, order="F" if self.is_fortran else "C")


def is_size(value) -> bool:
    """True for a whole number from 0 that a shape may hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def fill_bytes(file: BinaryIO, content, target: memoryview) -> None:
    """Read `content` into `target`, all of it. Raises Malformed where the bytes are fewer or more."""
    if isinstance(content, bytes):
        target[:] = content
        return
    file.seek(content.start)
    if not content.is_latin1:
        done = 0
        while done < len(target):
            count = file.readinto(target[done : done + (_CHUNK << 6)])
            if not count:
                raise Malformed("the file is cut short")
            done += count
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


def _dtype(args: tuple) -> Dtype:
    (name,) = take(args, str)
    if name not in DTYPES:
        raise Refused(f"an array of type {name[:20]!r}")
    return Dtype(name)


def _frombuffer(args: tuple) -> Array:
    content, dtype, shape, order = take(args, (bytes, Content), Dtype, tuple, str)
    array = Array()
    array.fill(content, dtype, shape, order == "F")
    return array


def _scalar(args: tuple):
    dtype, content = take(args, Dtype, (bytes, str))
    array = Array()
    array.fill(content, dtype, (), False)
    return np.frombuffer(array.content, dtype=array.dtype)[0].item()


def _encode(args: tuple):
    """Bytes as protocol 2 writes them: a text whose characters are the bytes."""
    text, encoding = take(args, (str, Content), str)
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"_codecs.encode to {encoding[:20]!r}")
    if isinstance(text, Content):
        return replace(text, is_latin1=text.is_text)
    return _latin1(text)


def _no_bytes(args: tuple) -> bytes:
    """`bytes()`, as protocol 2 writes none."""
    if args:
        raise Refused("bytes of something")
    return b""


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise Malformed("bytes that are stored as no text") from None


_numpy = [module for core in ("core", "_core") for module in (f"numpy.{core}.multiarray", f"numpy.{core}.numeric")]
NUMPY_NAMES = {
    ("numpy", "ndarray"): INERT,  # the argument of `_reconstruct`
    ("numpy", "dtype"): Function(_dtype),
    ("_codecs", "encode"): Function(_encode),
    ("__builtin__", "bytes"): Function(_no_bytes),
    **{(module, "_reconstruct"): Function(lambda args: Array()) for module in _numpy},
    **{(module, "scalar"): Function(_scalar) for module in _numpy},
    **{(module, "_frombuffer"): Function(_frombuffer) for module in _numpy},
}
