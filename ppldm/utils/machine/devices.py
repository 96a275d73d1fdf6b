"""The kinds of devices that Paddle computes on, and what each can do. No other module asks for one by its name.

A kind that a plug-in of Paddle brings works as the CPU does until its line stands in `KINDS`. Paddle is imported when
asked; which cards there are is said by their driver, before anything is installed.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import ConfigError
from .resources import read_cpu_model, run_program


@dataclass(frozen=True)
class Kind:
    """What Paddle can do on a kind of device. `name` is Paddle's, as in --device."""

    name: str
    mixed_precision: bool = False  # float16 and bfloat16
    own_memory: bool = False  # not the machine's, and kept in a pool
    efficient_attention: bool = False  # kernels that do not keep the table of all pairs
    exactness_switches: bool = False  # matrix products of fewer bits, and kernels chosen by their speed


KINDS = {
    kind.name: kind
    for kind in (
        Kind("cpu"),
        Kind("gpu", mixed_precision=True, own_memory=True, efficient_attention=True, exactness_switches=True),
    )
}
DEFAULT_DEVICE = "gpu"  # of --device in training: one where there is one, else the CPU


def current_kind() -> Kind:
    """What this process computes on."""
    name = device_name().partition(":")[0]
    return KINDS.get(name, Kind(name))


def device_name() -> str:
    """What this process computes on, as Paddle names it: cpu, gpu:0."""
    import paddle

    return paddle.get_device()


def device_model() -> str:
    """What this process computes on, as its maker calls it; of a kind without a memory of its own, the processor."""
    import paddle

    return paddle.device.cuda.get_device_name() if current_kind().own_memory else read_cpu_model()


@contextmanager
def host_memory():
    """Inside the block, what is loaded comes to lie in the host's memory: a device may not hold all of it."""
    import paddle

    device = device_name()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def use_device(name: str | None) -> None:
    """Compute on `name`: cpu, gpu, gpu:1, or another kind that this Paddle has; None: what Paddle chooses. Raises
    ConfigError."""
    import paddle

    if name is None:
        return
    try:
        paddle.set_device(name)
    except (ValueError, RuntimeError) as error:
        found = ", ".join(["cpu", *paddle.device.get_available_device()])
        raise ConfigError(
            f"--device {name} cannot be used here; this Paddle finds {found}: choose one of these, or omit --device"
        ) from error


def peak_device_memory_bytes() -> int:
    """The most that Paddle has held of the device's own memory so far; 0 where it has none."""
    import paddle

    return paddle.device.cuda.max_memory_allocated() if current_kind().own_memory else 0


def release_device_memory() -> None:
    """Give back what Paddle keeps of the device's own memory without using it."""
    import paddle

    if current_kind().own_memory:
        paddle.device.cuda.empty_cache()


def set_exactness(fewer_bits: bool, search_kernels: bool) -> None:
    """Whether float32 matrix products may take fewer bits (TF32), and kernels be chosen by trial; on a kind of device
    that has neither, nothing.

    Paddle's own defaults are faster and less exact: here float32 means float32 unless it is asked for otherwise.
    """
    import paddle
    from paddle.base import core

    if current_kind().exactness_switches:
        core.set_cublas_switch(fewer_bits)
        core.set_cudnn_switch(fewer_bits)
        paddle.set_flags({"FLAGS_cudnn_exhaustive_search": search_kernels})


NO_GPU = "nvidia-smi shows no GPU"


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU. `driver` is a version ("550.54.14"), `capability` its compute capability, None where unknown."""

    name: str
    driver: str
    capability: float | None = None
    memory: str = ""

    def __str__(self):
        return f"{self.name} {self.memory}".rstrip() + f", driver {self.driver}"


def list_gpus() -> list[Gpu]:
    """Every NVIDIA GPU that nvidia-smi shows; empty where there is none, or no driver that works."""
    query = ("nvidia-smi", "--format=csv,noheader", "--query-gpu=name,memory.total,driver_version")
    # Drivers before 510 do not know compute_cap and refuse the whole question.
    return parse_gpus(run_program(*query[:-1], f"{query[-1]},compute_cap")) or parse_gpus(run_program(*query))


def parse_gpus(text: str) -> list[Gpu]:
    """The GPUs of nvidia-smi's CSV lines: name, memory, driver and, where it is there, compute capability."""
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) >= 3 and re.fullmatch(r"\d+(\.\d+)+", words[2]):
            known = len(words) > 3 and re.fullmatch(r"\d+\.\d+", words[3])
            gpus.append(Gpu(words[0], words[2], float(words[3]) if known else None, words[1]))
    return gpus
