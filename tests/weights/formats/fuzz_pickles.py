"""Random pickles to the readers of weights, in a process of its own: `python fuzz_pickles.py --count 100000 --seed 0`.

Files are sound ones that are changed (bytes, opcodes, pieces of others), and random programs of opcodes that weights
and attacks use. Each must give arrays or a ModelError of one line. Any other exception, an import, or a call of the
operating system that reading does not need ends the process with status 1, and a crash ends it by a signal. The files
are small, so that one that takes much memory is a fault too. Prints what became of them, as JSON.
"""

import argparse
import io
import json
import pickle
import random
import resource
import sys
import tempfile
import traceback
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np

from ppldm.utils.errors import ModelError
from ppldm.weights.formats.paddle_files import read_pdparams, read_tree
from ppldm.weights.formats.torch_files import read_torch, write_torch

SPARE_BYTES = 1 << 30  # of address space, for files of a few kB
FORBIDDEN = ("import", "exec", "compile", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "code.", "shutil.")

NAMES = [
    *(("numpy", name) for name in ("dtype", "ndarray", "object_", "load", "frombuffer", "core.multiarray.scalar")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *(("numpy.core.numeric", "_frombuffer"), ("_codecs", "encode"), ("collections", "OrderedDict")),
    *(("builtins", name) for name in ("tuple", "eval", "getattr", "bytearray", "bytes", "list", "object", "type")),
    *(("os", "system"), ("torch", "FloatStorage"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2")),
    *(("torch._utils", "_rebuild_parameter"), ("pytorch_lightning", "Trainer"), ("argparse", "Namespace")),
]
TEXTS = ["O8", "f4", "u1", "V8", "M8", "<", "|", ">", "b", "C", "F", "latin1", "data", "storage", "0", "cpu", "slices",
         "UnpackBigParamInfor@@", "OriginShape", "StructuredToParameterName@@", "state_dict", "w", "中"]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 4, 8, 63, 255, -1, 2**31 - 1, -(2**31)]


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def integer(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def forged_dtype(rng) -> bytes:
    """A type with a state that says it is another."""
    state = [integer(3), text(rng.choice("<>|=")), *[rng.choice([b"N", b")", integer(1)]) for _ in range(3)],
             integer(rng.choice([-1, 8])), integer(rng.choice([-1, 8])), integer(rng.choice([0, 63]))]  # fmt: skip
    made = named("numpy", "dtype") + text(rng.choice(["f4", "O8", "V8", "u1"])) + b"\x89\x88\x87R"
    return made + b"(" + b"".join(state) + b"tb"


def array(rng) -> bytes:
    """An array, with a shape that may lie and a type that may be forged."""
    module = rng.choice(["numpy.core.multiarray", "numpy._core.multiarray"])
    made = named(module, "_reconstruct") + named("numpy", "ndarray") + integer(0) + b"\x85C\x01b\x87R"
    sides = b"".join(integer(rng.choice(NUMBERS)) for _ in range(rng.randrange(3)))
    kind = forged_dtype(rng) if rng.random() < 0.5 else named("numpy", "dtype") + text("f4") + b"\x89\x88\x87R"
    size = rng.choice([0, 4, 8, 16])
    return (
        made + b"(" + integer(1) + b"(" + sides + b"t" + kind + b"\x89C" + bytes([size]) + rng.randbytes(size) + b"tb"
    )


def scalar(rng) -> bytes:
    size = rng.choice([1, 4, 8])
    kind = forged_dtype(rng)
    return named("numpy.core.multiarray", "scalar") + kind + b"C" + bytes([size]) + rng.randbytes(size) + b"\x86R"


def tensor(rng) -> bytes:
    """A tensor of torch, with sides, strides and an offset that may lie."""
    numbers = [b"(" + b"".join(integer(rng.choice(NUMBERS)) for _ in range(rng.randrange(3))) + b"t" for _ in range(2)]
    storage = b"(" + text("storage") + named("torch", rng.choice(["FloatStorage", "BoolStorage", "BFloat16Storage"]))
    storage += text(rng.choice(["0", "1"])) + text("cpu") + integer(4) + b"tQ"
    inner = storage + integer(rng.choice(NUMBERS)) + numbers[0] + numbers[1] + b"\x89ccollections\nOrderedDict\n)R"
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + inner + b"tR"


def opcode(rng) -> bytes:
    """One opcode with its argument."""
    choice = rng.randrange(12)
    if choice == 0:
        return integer(rng.choice(NUMBERS))
    if choice == 1:
        return text(rng.choice(TEXTS))
    if choice == 2:
        return named(*rng.choice(NAMES))
    if choice == 3:
        return rng.choice([b"h", b"q"]) + bytes([rng.randrange(6)])
    if choice == 4:
        return rng.choice([b"B", b"X", b"T"]) + rng.choice([b"\3\0\0\0abc", b"\xff\xff\xff\x7fa", b"\0\0\0\0"])
    if choice == 5:
        return rng.choice([b"\x96", b"\x8e", b"\x8d"]) + rng.choice([b"\3" + bytes(7) + b"abc", b"\xff" * 8])
    if choice == 6:
        return rng.choice([array, scalar, tensor, forged_dtype])(rng)
    if choice == 7:
        return rng.choice([b"j", b"r"]) + rng.choice([b"\0\0\0\0", b"\xff\xff\xff\xff"])
    if choice == 8:
        return bytes([rng.randrange(256)])
    return bytes([rng.choice(b"(0123NRQabcdeh]}){tu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98")])


def program(rng) -> bytes:
    """A dict whose values are made by random opcodes."""
    body = b"".join(text(rng.choice(TEXTS)) + opcode(rng) for _ in range(rng.randrange(1, 5)))
    loose = b"".join(opcode(rng) for _ in range(rng.randrange(12)))
    return b"\x80\x04" + rng.choice([b"}(" + body + loose + b"u.", loose + b"}(" + body + b"u.", loose + b"."])


def sound_files() -> list[bytes]:
    """Pickles that are read: of every protocol, and of torch."""
    values = OrderedDict(w=np.ones((2, 3), "f4"), b=("b_0", np.arange(4)), n={"last_lr": np.float64(0.1), "k": [1, 2]})
    found = [pickle.dumps(values, protocol=protocol) for protocol in (2, 3, 4, 5)]
    buffer = io.BytesIO()
    write_torch(buffer, {"w": np.ones((2, 3), "f4"), "v": np.ones(2, "f2")}, {"global_step": 3})
    with zipfile.ZipFile(buffer) as archive:
        return [*found, archive.read("archive/data.pkl")]


def change(rng, data: bytes, others: list[bytes]) -> bytes:
    """A sound file with some of its bytes others, out, twice, or from another."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place, kind = rng.randrange(len(changed) + 1), rng.randrange(5)
        if kind == 0 and place < len(changed):
            changed[place] = rng.randrange(256)
        elif kind == 1:
            changed[place:place] = opcode(rng)
        elif kind == 2:
            del changed[place : place + rng.randrange(1, 20)]
        elif kind == 3:
            changed[place:place] = changed[max(0, place - rng.randrange(1, 40)) : place]
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            changed[place:place] = other[start : start + rng.randrange(1, 60)]
    return bytes(changed)


def write_zip(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/data/0", bytes(24))
        archive.writestr("archive/data/1", bytes(4))


def watch(read, path) -> str:
    """What became of a file: `read`, or the kind of its ModelError."""
    try:
        read(path)
        return "read"
    except ModelError as error:
        message = str(error)
        if "\n" in message or "more memory" in message:
            raise AssertionError(message) from error
        return "refused" if "is refused" in message else "damaged"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000, help="files (default: 3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the files (default: 0)")
    arguments = parser.parse_args()
    sound, outcomes, events = sound_files(), Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        plain, zipped = Path(folder, "a.pdparams"), Path(folder, "a.ckpt")
        for data in sound:  # whatever is imported late
            plain.write_bytes(data)
            write_zip(zipped, data)
            for read, path in ((read_pdparams, plain), (read_tree, plain), (read_torch, zipped)):
                watch(read, path)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
        reading = False

        def hook(event, _details):
            if reading and event.startswith(FORBIDDEN) and event != "os.fspath":
                events.append(event)

        sys.addaudithook(hook)
        for number in range(arguments.count):
            rng = random.Random(f"{arguments.seed}-{number}")
            data = change(rng, rng.choice(sound), sound) if rng.random() < 0.5 else program(rng)
            plain.write_bytes(data)
            write_zip(zipped, data)
            for read, path in ((read_pdparams, plain), (read_tree, plain), (read_torch, zipped)):
                reading = True
                try:
                    outcomes[f"{read.__name__} {watch(read, path)}"] += 1
                except BaseException:
                    traceback.print_exc()
                    print(f"file {number} of seed {arguments.seed}, {read.__name__}: {data!r}", file=sys.stderr)
                    return 1
                finally:
                    reading = False
            if events:
                print(f"file {number} of seed {arguments.seed}: {events}: {data!r}", file=sys.stderr)
                return 1
    print(json.dumps({"files": arguments.count, **dict(sorted(outcomes.items()))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
