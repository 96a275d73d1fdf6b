"""Pickles of weights: a scan that bounds them, then Python's own unpickler with a table of names.

A pickle is a program that may call any function. So the unpickler gets a copy of the opcodes that weights need, and any
other is refused; a name is looked up in a table of functions of ours, which check their arguments, and constants.
Nothing is imported and nothing of the file is called. Files are mapped into memory: long bytes are views of the file
until an array copies them. A file cannot make more of itself than it holds: its arrays, and all that its calls take,
have no more bytes, and the number of opcodes is bounded.
"""

import mmap
import pickle
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

from ...utils.errors import ModelError
from ...utils.files import open_regular

_MOST_OPCODES = 2_000_000  # a checkpoint of 1,000 parameters and their optimizer's state has 0.2 million
_SMALL = 1 << 16  # bytes of a text or of bytes that are taken at once; longer ones stay in the file
_LONGEST_NAME = 200  # bytes of a module's or a function's name
_LONGEST_NUMBER = 8  # bytes of a whole number
# What the unpickler raises for a program that no pickler wrote.
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, LookupError, OverflowError)


class Refused(Exception):
    """A pickle asked for what is not in the table."""


class Malformed(Exception):
    """A pickle that is cut short, or that no program wrote."""


class Record:
    """What a pickle may make or name. Each says which state it takes: an unpickler would set any attribute."""

    def __setstate__(self, state) -> None:
        raise Refused("a state for what has none")

    @property
    def content_bytes(self) -> int:
        """Of the pickle's file, that its values are."""
        return 0


class _Inert(Record):
    """Stands for an object that is not weights, such as a callback's state: takes everything, does nothing."""

    def _pass(self, *_values):
        return self

    __call__ = __setitem__ = __setstate__ = extend = _pass


INERT = _Inert()


@dataclass(frozen=True)
class LongText(Record):
    """UTF-8 of the file; `is_latin1`: of bytes as the letters of Latin-1."""

    view: memoryview
    is_latin1: bool = False


class _Dict(dict):
    """Keys of other kinds are not names of weights: hashing a deep tuple would overrun the C stack."""

    def __setitem__(self, key, value) -> None:
        if key is None or isinstance(key, (str, int, float, bytes)):
            super().__setitem__(key, value)

    def __setstate__(self, state) -> None:
        """Attributes of a dict are not weights."""


def is_size(value) -> bool:
    """True for a whole number from 0 that a shape may hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


@contextmanager
def mapped(path, library: str):
    """The bytes of the file `path` of `library`; what goes wrong while it is read is a ModelError."""
    try:
        with open_regular(path) as file:
            yield memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.read(1) else b"")
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


def same_tuple(*args) -> tuple:
    """`tuple(values)`."""
    return take(args, tuple)[0]


def ordered_dict(*args) -> dict:
    """`OrderedDict()`, or of a list of pairs."""
    result = _Dict()
    for pair in take(args, list)[0] if args else ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise Malformed("a dict that is made of no pairs")
        result[pair[0]] = pair[1]
    return result


def load(data: memoryview, start: int, names: dict, inert=(), persistent=None):
    """(the value of the pickle at `start`, its end). `names`: (module, name) to a function or a Record; `inert`:
    packages whose objects are passed over; `persistent(pid)`: what such an id stands for. Raises Refused, Malformed."""
    try:
        program, values, end = _scan(data, start)
        unpickler = _Unpickler(program, values, len(data), names, inert, persistent)
        value = unpickler.load()
    except _BROKEN as error:
        raise Malformed(error) from error
    if sum(one.content_bytes for one in unpickler.made) > len(data):
        raise Malformed("its arrays have more bytes than the file")
    return value, end


class _Unpickler(pickle.Unpickler):
    """Python's, with a table of names. `made`: the records that calls gave; `left`: values that calls may take."""

    def __init__(self, program: bytearray, values: list, left: int, names: dict, inert, persistent):
        super().__init__(BytesIO(program), encoding="latin1", buffers=values)
        self.names, self.inert, self.persistent, self.left = names, inert, persistent, left
        self.made: list[Record] = []

    def find_class(self, module: str, name: str):
        """What stands in the table. Raises Refused."""
        found = self.names.get((module, name), INERT if module.split(".")[0] in self.inert else None)
        if found is None:
            raise Refused(f"{module}.{name}"[:_LONGEST_NAME])
        return found if isinstance(found, Record) else _Function(found, self)

    def persistent_load(self, pid):
        """What a persistent id stands for. Raises Refused."""
        if self.persistent is None:
            raise Refused("a persistent object")
        return self.persistent(pid)


class _Function(Record):
    """A function of the table. What it takes is counted: a file may name one value any number of times."""

    def __init__(self, function, unpickler: _Unpickler):
        self.function, self.unpickler = function, unpickler

    def __call__(self, *args):
        self.unpickler.left -= len(args) + sum(len(one) for one in args if isinstance(one, (str, bytes, list, tuple)))
        if self.unpickler.left < 0:
            raise Malformed("its calls take more than the file has")
        value = self.function(*args)
        if isinstance(value, Record):
            self.unpickler.made.append(value)
        return value


# Opcodes of protocols 2 to 5, without the buffers that protocol 5 keeps in other files: the bytes of their argument.
_WIDTHS = {
    **dict.fromkeys((pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE), 0),
    **dict.fromkeys((pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.MEMOIZE), 0),
    **dict.fromkeys((pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.ADDITEMS, pickle.FROZENSET), 0),
    **dict.fromkeys((pickle.SETITEM, pickle.SETITEMS, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD), 0),
    **dict.fromkeys((pickle.STACK_GLOBAL, pickle.BINPERSID, pickle.STOP), 0),
    **{pickle.BININT: 4, pickle.BININT1: 1, pickle.BININT2: 2, pickle.BINFLOAT: 8},
    **{pickle.BINGET: 1, pickle.LONG_BINGET: 4, pickle.BINPUT: 1, pickle.LONG_BINPUT: 4},
}
# Those whose argument begins with its length: the bytes of this.
_TEXTS = {pickle.SHORT_BINUNICODE: 1, pickle.BINUNICODE: 4, pickle.BINUNICODE8: 8}
_SIZED = {
    **{pickle.SHORT_BINBYTES: 1, pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.BYTEARRAY8: 8},
    **{pickle.SHORT_BINSTRING: 1, pickle.BINSTRING: 4, pickle.LONG1: 1, **_TEXTS},
}
_MADE = {pickle.EMPTY_DICT: _Dict, pickle.EMPTY_SET: _Inert}
_IGNORED = {pickle.PROTO: 1, pickle.FRAME: 8}
# What each is copied as. No weights are in sets.
_AS = {code: code for code in (*_WIDTHS, *_SIZED)} | {
    **{pickle.NEWOBJ: pickle.REDUCE, pickle.BYTEARRAY8: pickle.BINBYTES8},
    **{pickle.FROZENSET: pickle.TUPLE, pickle.ADDITEMS: pickle.POP_MARK},
}


def _scan(data: memoryview, place: int) -> tuple[bytearray, list, int]:
    """(the program, the values that it takes from outside: dicts and views of the file, its end). Raises Malformed."""
    program, values = bytearray(), []

    def read(count: int) -> memoryview:
        nonlocal place
        piece = data[place : place + count]
        place += len(piece)
        if len(piece) != count:
            raise Malformed("it is cut short")
        return piece

    def read_line() -> bytes:
        if not (size := bytes(data[place : place + _LONGEST_NAME + 1]).find(b"\n") + 1):
            raise Malformed("a name has no end")
        return bytes(read(size))

    for _ in range(_MOST_OPCODES):
        code = bytes(read(1))
        if code in _WIDTHS:
            program += _AS[code]
            if width := _WIDTHS[code]:
                program += (argument := read(width))
                if code == pickle.LONG_BINPUT and int.from_bytes(argument, "little") >= _MOST_OPCODES:
                    raise Malformed("its memo has gaps")
            elif code == pickle.STOP:
                return program, values, place
        elif width := _SIZED.get(code):
            length = read(width)
            argument = read(int.from_bytes(length, "little"))
            if len(argument) <= (_LONGEST_NUMBER if code == pickle.LONG1 else _SMALL):
                if code in _TEXTS:
                    str(argument, "utf-8")  # the unpickler lets half a pair of UTF-16 pass
                program += _AS[code] + bytes(length) + argument
                continue
            values.append(INERT if code == pickle.LONG1 else LongText(argument) if code in _TEXTS else argument)
            program += pickle.NEXT_BUFFER
        elif code in _MADE:
            values.append(_MADE[code]())
            program += pickle.NEXT_BUFFER
        elif code == pickle.GLOBAL:
            program += code + read_line() + read_line()
        elif code in _IGNORED:
            read(_IGNORED[code])
        else:
            raise Malformed(f"it has the opcode {code[0]:#04x}")
    raise Malformed(f"it has more than {_MOST_OPCODES} opcodes")
