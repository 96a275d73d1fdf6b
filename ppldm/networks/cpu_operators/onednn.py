"""oneDNN, which Paddle's wheels for CPUs bring and do not use in training, called on tensors where they lie in memory.

An operation is described by the shapes and strides of its tensors, compiled once, and then run on their addresses,
through the C interface of oneDNN 3 (its header dnnl_types.h has the numbers below). It computes on the threads of
Paddle, as both use one OpenMP library, and is written for float32.
"""

import ctypes
import os
import threading
from collections.abc import Collection
from contextlib import contextmanager, nullcontext
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path

import paddle

FORWARD, DIRECT, SOFTMAX = c_int(64), c_int(1), c_int(0x30000)  # forward in training; algorithms
NONE = c_void_p(0)
_CPU, _FLOAT32, _ANY, _LINEAR, _ADD, _NAME = 1, 3, 1, 0x26, 0x1FFF0, 8
_PLACES = {"src": 1, "dst": 17, "weights": 33, "bias": 41}  # of a tensor among the arguments
_PLACES |= {f"diff_{name}": place + 128 for name, place in _PLACES.items()} | {"added": 32768 * 2 + 2}
_LAYOUTS = {"src": 129, "diff_src": 130, "weights": 131, "diff_weights": 132, "dst": 133, "diff_dst": 134}
LOCK = threading.RLock()  # other threads of Python run during a call, and calls share operations and scratch memory
_EVERY_SIGNAL, _SET_MASK = ctypes.create_string_buffer(b"\xff" * 128, 128), 2  # sigset_t; SIG_SETMASK of <signal.h>
_NOTHING = nullcontext()
_WORKERS = threading.local()  # of this thread, how many get no signal
os.register_at_fork(after_in_child=lambda: vars(_WORKERS).clear())  # whose workers are new


class _Argument(ctypes.Structure):
    _fields_ = [("place", c_int), ("memory", c_void_p)]


@cache
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL, ctypes.CDLL] | None:
    """(oneDNN, OpenMP) of the installed Paddle, and libc; None where it brings none."""
    folder = Path(paddle.__file__).parent / "libs"
    try:
        onednn, openmp = (ctypes.CDLL(os.fspath(folder / name)) for name in ("libdnnl.so.3", "libiomp5.so"))
    except OSError:
        return None
    onednn.dnnl_primitive_desc_query_md.restype = c_void_p
    onednn.dnnl_memory_desc_get_size.restype = c_size_t
    return onednn, openmp, ctypes.CDLL(None)


def num_threads() -> int:
    """How many compute; an operation is compiled for as many."""
    return libraries()[1].omp_get_max_threads()


def _call(name: str, *arguments) -> None:
    status = getattr(libraries()[0], f"dnnl_{name}")(*arguments)
    if status:
        raise RuntimeError(f"dnnl_{name} of oneDNN failed with status {status}; PPLDM_NO_CPU_TUNING=1 does without it")


@cache
def _engine() -> tuple[c_void_p, c_void_p]:
    """(engine, stream)."""
    engine, stream = c_void_p(), c_void_p()
    _call("engine_create", byref(engine), c_int(_CPU), c_size_t(0))
    _call("stream_create", byref(stream), engine, c_uint(1))
    return engine, stream


def is_own_product(description: c_void_p) -> bool:
    """Whether an operation computes by oneDNN's own products of matrices. They keep numbers where the kernel writes
    the frame of a signal's handler: wrong results, a broken heap or a crash follow (seen in wheels of Paddle 3.3)."""
    name = ctypes.c_char_p()
    _call("primitive_desc_query", description, c_int(_NAME), c_int(0), byref(name))
    return b"gemm:jit" in (name.value or b"")


@contextmanager
def shielded():
    """Inside the block neither this thread nor those that compute beside it get a signal."""
    before, set_mask = ctypes.create_string_buffer(len(_EVERY_SIGNAL)), libraries()[2].pthread_sigmask
    set_mask(c_int(_SET_MASK), _EVERY_SIGNAL, before)
    try:
        _keep_signals_from_workers()
        yield
    finally:
        set_mask(c_int(_SET_MASK), before, NONE)


def _keep_signals_from_workers() -> None:
    """From here on, the threads that compute beside this one get no signal either: one for the process waits for us."""
    if getattr(_WORKERS, "count", 0) < num_threads():
        libraries()[1].GOMP_parallel(libraries()[2].sigsetmask, c_void_p(0xFFFFFFFF), c_uint(0), c_uint(0))
        _WORKERS.count = num_threads()


def numbers(values) -> ctypes.Array:
    """As the library takes sizes, strides and paddings."""
    return (c_int64 * 12)(*values)


@cache
def layout(shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> c_void_p:
    """Of a tensor; strides count elements, without them it is contiguous."""
    if strides is None:
        strides = (1,)
        for size in reversed(shape[1:]):
            strides = (strides[0] * size, *strides)
    elif shape[-2] == 1:  # a single row: its stride says nothing, but the library looks for the rows' distance in it
        strides = (*strides[:-2], shape[-1] * strides[-1], strides[-1])
    made = c_void_p()
    sizes = c_int(len(shape)), numbers(shape), c_int(_FLOAT32), numbers(strides)
    _call("memory_desc_create_with_strides", byref(made), *sizes)
    return made


@cache
def any_layout(shape: tuple[int, ...]) -> c_void_p:
    """The one in which an operation is fastest."""
    made = c_void_p()
    _call("memory_desc_create_with_tag", byref(made), c_int(len(shape)), numbers(shape), c_int(_FLOAT32), c_int(_ANY))
    return made


def then(scale: float, added: c_void_p | None = None) -> c_void_p:
    """What an operation does with its result: times `scale`, plus the tensor `added` of this layout."""
    steps, made = c_void_p(), c_void_p()
    _call("post_ops_create", byref(steps))
    _call("post_ops_append_eltwise", steps, c_int(_LINEAR), c_float(scale), c_float(0.0))
    if added is not None:
        _call("post_ops_append_binary", steps, c_int(_ADD), added)
    _call("primitive_attr_create", byref(made))
    _call("primitive_attr_set_post_ops", made, steps)
    return made


class Operation:
    """One operation on tensors of fixed shapes. Called with their addresses, in the order of `tensors`.

    kind: of `dnnl_<kind>_primitive_desc_create`. described: its arguments behind the engine. tensors: layouts by name;
    None, where the library chooses.
    """

    def __init__(self, kind: str, described: tuple, tensors: dict[str, c_void_p | None]):
        (engine, self._stream), self._library = _engine(), libraries()[0]
        self.description, self._primitive = c_void_p(), c_void_p()
        leading = () if kind == "reorder" else (engine,)
        _call(f"{kind}_primitive_desc_create", byref(self.description), *leading, *described)
        _call("primitive_create", byref(self._primitive), self.description)
        self.layouts = {name: self._chosen(name) if known is None else known for name, known in tensors.items()}
        self._memories, self._arguments = [], (_Argument * len(tensors))()
        for number, (name, known) in enumerate(self.layouts.items()):
            self._memories.append(memory := c_void_p())
            _call("memory_create", byref(memory), known, engine, NONE)
            self._arguments[number] = _Argument(_PLACES[name], memory)
        self._count = c_int(len(tensors))
        self._set, self._wait = self._library.dnnl_memory_set_data_handle, self._library.dnnl_stream_wait
        self._execute = self._library.dnnl_primitive_execute
        self._is_shielded = is_own_product(self.description)

    def handles(self) -> tuple[int, ...]:
        """The addresses of its primitive, stream and arguments, and of its tensors' memories."""
        own = self._primitive.value, self._stream.value, ctypes.addressof(self._arguments)
        return *own, *(memory.value for memory in self._memories)

    def _chosen(self, name: str) -> c_void_p:
        return c_void_p(libraries()[0].dnnl_primitive_desc_query_md(self.description, c_int(_LAYOUTS[name]), c_int(0)))

    def __call__(self, *addresses: int) -> None:
        for memory, address in zip(self._memories, addresses, strict=True):
            self._set(memory, c_void_p(address))
        with shielded() if self._is_shielded else _NOTHING:
            status = self._execute(self._primitive, self._stream, self._count, self._arguments)
            status = status or self._wait(self._stream)
        if status:
            raise RuntimeError(f"an operation of oneDNN failed with status {status}")

    def __del__(self):
        for memory in getattr(self, "_memories", ()):
            self._library.dnnl_memory_destroy(memory)
        self._library.dnnl_primitive_destroy(self._primitive)
        self._library.dnnl_primitive_desc_destroy(self.description)


class ReorderedOperation:
    """An operation whose tensors lie in the layouts that are fastest for it. Called with the addresses of contiguous
    tensors, which are copied to and from scratch memory where its layouts are others."""

    def __init__(self, kind: str, described: tuple, shapes: dict[str, tuple[int, ...]], written: Collection[str]):
        """written: the names of results. A bias has one layout."""
        tensors = {name: layout(shape) if name.endswith("bias") else None for name, shape in shapes.items()}
        self.operation = Operation(kind, described, tensors)
        self._scratch: list[tuple[str, int] | None] = []
        self._before, self._after = [], []
        for number, (name, shape) in enumerate(shapes.items()):
            plain, wanted = layout(shape), self.operation.layouts[name]
            if libraries()[0].dnnl_memory_desc_equal(plain, wanted):
                self._scratch.append(None)
                continue
            self._scratch.append((name, libraries()[0].dnnl_memory_desc_get_size(wanted)))
            copies, ends = (self._after, (wanted, plain)) if name in written else (self._before, (plain, wanted))
            engine = _engine()[0]
            described = ends[0], engine, ends[1], engine, NONE
            copies.append((number, Operation("reorder", described, dict(zip(("src", "dst"), ends, strict=True)))))

    def __call__(self, *addresses: int) -> None:
        used = [
            address if held is None else scratch(*held) for held, address in zip(self._scratch, addresses, strict=True)
        ]
        for number, copy in self._before:
            copy(addresses[number], used[number])
        self.operation(*used)
        for number, copy in self._after:
            copy(used[number], addresses[number])


_SCRATCH: dict[str, tuple[int, int, paddle.Tensor]] = {}


def scratch(name: str, size: int) -> int:
    """The address of at least `size` bytes, for whoever holds the lock. It grows to the largest that was asked for."""
    address, held, _ = _SCRATCH.get(name, (0, 0, None))
    if held < size:
        memory = paddle.empty([(size + 3) // 4], "float32")
        address, held, _ = _SCRATCH[name] = memory.data_ptr(), size, memory
    return address
