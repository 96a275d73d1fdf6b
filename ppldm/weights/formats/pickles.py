"""A small pickle machine: the opcodes that weights need, and plain values as its outcome.

A pickle is a program: it may name any function and call it, and it may fill objects with a state that their own code
never would. Python's unpickler is therefore not used at all. This machine builds dicts, lists, tuples, texts and
numbers, and for numpy's arrays records whose shape and type were checked against their bytes (pickled_arrays.py). A
name is looked up in a table of the caller's, and what stands there is a function of ours or a constant; any other name
is refused, and so is any other opcode. Nothing is imported and nothing of the file is called.

Long bytes stay in the file (`Content`), and are read once, into their place. A file cannot make more of itself than it
holds: records claim no more bytes than the file has, and the number of opcodes is bounded.

Opcodes: protocols 2 to 5 of https://docs.python.org/3/library/pickletools.html, without the buffers that protocol 5
keeps in other files.
"""

import struct
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...utils.errors import ModelError

_MOST_OPCODES = 2_000_000  # a checkpoint of 1,000 parameters and their optimizer's state has 0.2 million
_SMALL = 1 << 16  # bytes of a text or of bytes that are taken at once; longer ones stay in the file
_LONGEST_NAME = 200  # bytes of a module's or a function's name


class Refused(Exception):
    """A pickle asked for what is not in the table."""


class Malformed(Exception):
    """A pickle that is cut short, or that no program wrote."""


@dataclass(frozen=True)
class Function:
    """What stands in the table for a callable: `call(args)` gives a value, or raises Malformed or Refused."""

    call: Callable[[tuple], Any]


class _Inert:
    """Stands for an object that is not weights, such as a callback's state: takes everything, does nothing."""


INERT = _Inert()


@dataclass(frozen=True)
class Content:
    """Bytes of the file that are not read yet. `is_text`: they are UTF-8; `is_latin1`: of the bytes as Latin-1."""

    start: int
    size: int
    is_text: bool = False
    is_latin1: bool = False


class Record:
    """What a `Function` may give so that BUILD can fill it."""

    def build(self, state) -> None:
        """Take the state. Raises Malformed, Refused."""
        raise Refused("a state for what has none")

    @property
    def num_bytes(self) -> int:
        """Of memory that it will need, as far as that is known."""
        return 0


@contextmanager
def named_errors(path, library: str):
    """What goes wrong while the file `path` of `library` is read, as a ModelError."""
    try:
        yield
    except Refused as error:
        raise ModelError(
            f"{path} is refused: its pickle asks for {error}, which no weights need and which could run a program; "
            "nothing of it was run. Use a copy from a source that you trust, best as .safetensors"
        ) from error
    except Malformed as error:
        raise ModelError(f"{path} is damaged or holds no weights of {library} ({error}); copy it again") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; check the path") from error
    except MemoryError as error:
        raise ModelError(f"{path} needs more memory than there is; use a machine with more") from error


def take(args: tuple, *kinds) -> tuple:
    """The first arguments of a call, which must be of these types. Raises Malformed."""
    if len(args) < len(kinds) or not all(map(isinstance, args, kinds)):
        raise Malformed("a call with other arguments than its function has")
    return args[: len(kinds)]


def _ordered_dict(args: tuple) -> dict:
    if not args:
        return {}
    (pairs,) = take(args, list)
    result = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise Malformed("a dict that is made of no pairs")
        _set_item(result, *pair)
    return result


def _same_tuple(args: tuple) -> tuple:
    return take(args, tuple)[0]


TUPLE = Function(_same_tuple)
ORDERED_DICT = Function(_ordered_dict)


def _set_item(target, key, value) -> None:
    """Keys of other kinds are not names of weights; hashing a deep tuple would overrun the C stack."""
    if isinstance(target, dict):
        if key is None or isinstance(key, (str, int, float, bytes)):
            target[key] = value
    elif target is not INERT:
        raise Malformed("items of no dict")


def _extend(target, values: list) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif target is not INERT:
        raise Malformed("elements of no list")


class Machine:
    """One run over a file. `names`: (module, name) to `Function` or a constant; `inert`: packages whose objects are
    passed over; `persistent(pid)`: what a persistent id stands for."""

    def __init__(self, file: BinaryIO, num_bytes: int, names: dict, inert=(), persistent=None):
        self.file, self.num_bytes, self.names, self.inert, self.persistent = file, num_bytes, names, inert, persistent
        self.stack, self.outer, self.memo, self.left = [], [], {}, num_bytes

    def run(self):
        """The value of the pickle at the file's position. Raises Refused, Malformed."""
        for _ in range(_MOST_OPCODES):
            code = self.file.read(1)
            if code == b".":
                return self.pop()
            handler = _OPCODES.get(code)
            if handler is None:
                raise Malformed("it is cut short" if not code else f"it has the opcode {code[0]:#04x}")
            handler(self)
        raise Malformed(f"it has more than {_MOST_OPCODES} opcodes")

    def pop(self):
        """The last value."""
        if not self.stack:
            raise Malformed("a value is missing")
        return self.stack.pop()

    def top(self):
        """The last value, which stays."""
        if not self.stack:
            raise Malformed("a value is missing")
        return self.stack[-1]

    def pop_mark(self) -> list:
        """The values since the last mark."""
        if not self.outer:
            raise Malformed("a mark is missing")
        values, self.stack = self.stack, self.outer.pop()
        return values

    def push(self, value) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def read(self, count: int) -> bytes:
        """So many bytes of the file, all of them."""
        data = self.file.read(count)
        if len(data) != count:
            raise Malformed("it is cut short")
        return data

    def number(self, width: int, signed: bool = False) -> int:
        """A number of `width` bytes."""
        return int.from_bytes(self.read(width), "little", signed=signed)

    def content(self, width: int, is_text: bool):
        """Bytes or a text whose length comes first, in `width` bytes; `Content` where they are long."""
        size = self.number(width)
        if size <= _SMALL:
            data = self.read(size)
            try:
                return data.decode() if is_text else data
            except UnicodeDecodeError:
                raise Malformed("a text is not UTF-8") from None
        start = self.file.tell()
        if start + size > self.num_bytes:
            raise Malformed("it is cut short")
        self.file.seek(size, 1)
        return Content(start, size, is_text)

    def string(self, width: int):
        """A text of Python 2, which may be bytes: Latin-1 takes either."""
        content = self.content(width, False)
        return content.decode("latin1") if isinstance(content, bytes) else content

    def find(self, module, name) -> None:
        """Push what stands in the table for a name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise Malformed("a name that is not text")
        if (module, name) in self.names:
            self.push(self.names[module, name])
        elif module.split(".")[0] in self.inert:
            self.push(INERT)
        else:
            raise Refused(f"{module}.{name}"[:_LONGEST_NAME])

    def line(self) -> str:
        """A name of the older form, up to the end of its line."""
        data = self.file.readline(_LONGEST_NAME + 1)
        if not data.endswith(b"\n"):
            raise Malformed("a name has no end")
        return data[:-1].decode("utf-8", "replace")

    def call(self, function, args) -> None:
        """Push what a call gives."""
        if not isinstance(args, tuple):
            raise Malformed("arguments that are not a tuple")
        if function is INERT:
            self.push(INERT)
            return
        if not isinstance(function, Function):
            raise Refused("a call of what is not a function")
        value = function.call(args)
        self.claim(value)
        self.push(value)

    def claim(self, value) -> None:
        """Count what a value needs. Raises Malformed for more than the file has."""
        if isinstance(value, Record):
            self.left -= value.num_bytes
        elif isinstance(value, dict):
            self.left -= 4 * len(value)  # made of a list, which may serve again
        if self.left < 0:
            raise Malformed("its arrays have more bytes than the file")

    def build(self) -> None:
        """BUILD: a state for the last value."""
        state, target = self.pop(), self.top()
        if isinstance(target, Record):
            target.build(state)
            self.claim(target)
        elif not isinstance(target, dict) and target is not INERT:  # attributes of a dict are not weights
            raise Refused("a state for what has none")

    def remember(self, index: int) -> None:
        """PUT."""
        self.memo[index] = self.top()

    def recall(self, index: int) -> None:
        """GET."""
        if index not in self.memo:
            raise Malformed("a value is used before it is there")
        self.push(self.memo[index])

    def tuple_of(self, count: int) -> None:
        """TUPLE1 to TUPLE3."""
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def set_items(self, values: list) -> None:
        """SETITEMS, with the dict below `values`."""
        if len(values) % 2:
            raise Malformed("a key without a value")
        target = self.top()
        for position in range(0, len(values), 2):
            _set_item(target, values[position], values[position + 1])

    def mark(self) -> None:
        """MARK."""
        self.outer.append(self.stack)
        self.stack = []

    def long(self) -> None:
        """LONG1. Of more than 64 bits, no weights need it."""
        size = self.number(1)
        value = self.number(size, signed=True)
        self.push(value if size <= 8 else INERT)

    def persist(self) -> None:
        """BINPERSID."""
        if self.persistent is None:
            raise Refused("a persistent object")
        self.push(self.persistent(self.pop()))


def _two(machine: Machine) -> list:
    last, first = machine.pop(), machine.pop()
    return [first, last]


_OPCODES = {
    b"\x80": lambda m: m.read(1),  # PROTO
    b"\x95": lambda m: m.read(8),  # FRAME
    b"(": Machine.mark,
    b"0": Machine.pop,
    b"1": Machine.pop_mark,
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"\x8a": Machine.long,
    b"G": lambda m: m.push(struct.unpack(">d", m.read(8))[0]),
    b"X": lambda m: m.push(m.content(4, True)),
    b"\x8c": lambda m: m.push(m.content(1, True)),
    b"\x8d": lambda m: m.push(m.content(8, True)),
    b"T": lambda m: m.push(m.string(4)),
    b"U": lambda m: m.push(m.string(1)),
    b"B": lambda m: m.push(m.content(4, False)),
    b"C": lambda m: m.push(m.content(1, False)),
    b"\x8e": lambda m: m.push(m.content(8, False)),
    b"\x96": lambda m: m.push(m.content(8, False)),  # BYTEARRAY8
    b"]": lambda m: m.push([]),
    b"a": lambda m: _extend(*(lambda pair: (m.top(), [pair]))(m.pop())),
    b"e": lambda m: _extend(*(lambda values: (m.top(), values))(m.pop_mark())),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"}": lambda m: m.push({}),
    b"s": lambda m: m.set_items(_two(m)),
    b"u": lambda m: m.set_items(m.pop_mark()),
    b"\x8f": lambda m: m.push(INERT),  # EMPTY_SET
    b"\x90": Machine.pop_mark,  # ADDITEMS
    b"\x91": lambda m: (m.pop_mark(), m.push(INERT)),  # type: ignore[func-returns-value]  # FROZENSET
    b"h": lambda m: m.recall(m.number(1)),
    b"j": lambda m: m.recall(m.number(4)),
    b"q": lambda m: m.remember(m.number(1)),
    b"r": lambda m: m.remember(m.number(4)),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"c": lambda m: m.find(m.line(), m.line()),
    b"\x93": lambda m: m.find(*_two(m)),
    b"R": lambda m: m.call(*_two(m)),
    b"\x81": lambda m: m.call(*_two(m)),
    b"b": Machine.build,
    b"Q": Machine.persist,
}
