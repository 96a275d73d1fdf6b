"""The kinds of devices that Paddle computes on, and what each can do. No other module asks for one by its name.

A kind that is not in `KINDS`, of a plug-in, is taken by what Paddle says of it. Which devices a machine has is seen
before anything is installed: by the driver's program, or its files in /dev. Paddle is imported when asked.

Sources. Variables that limit what is seen, their order and `FLAGS_selected_*`: paddle/distributed/launch/context/
device.py of Paddle 3.3.1 and the makers' runtimes. Backends: `init_parallel_env` there. `settings`: those that Paddle's
own PaddleX sets for a kind (paddlex/utils/device.py, `set_env_for_device_type`). Packages: Paddle's package index.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .. import variables
from ..errors import ConfigError, exit_on_error
from ..text import nearest
from .resources import read_cpu, usable_memory_bytes, versions_of

if TYPE_CHECKING:
    from .nvidia_smi import Gpu


@dataclass(frozen=True)
class Kind:
    """What Paddle can do on a kind of device. `name` is that of --device, `words` the maker's.

    place: Paddle's name of it. visible: the variables that limit what a process sees, the strongest first. settings:
    variables that Paddle must find when it is loaded. collective: how ranks talk. package: what Paddle for it is called
    in `index`, a folder of Paddle's package index; `plugin`: it is installed beside paddlepaddle. version: of the
    package, if not the lock's. pythons: that it is built for. signs: files of its driver, where no program shows them.
    """

    name: str
    words: str
    place: str = ""
    visible: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    collective: str = "xccl"  # which a plug-in implements
    package: str = ""
    index: str = ""
    plugin: bool = True
    version: str = ""
    pythons: tuple[str, ...] = ("3.10",)
    signs: tuple[str, ...] = ()
    mixed_precision: bool = True  # autocast has an effect
    own_memory: bool = True  # not the machine's, and kept in a pool
    tells_model: bool = False  # Paddle knows model and memory of one
    efficient_attention: bool = False  # kernels that do not keep the table of all pairs
    exactness_switches: bool = False  # matrix products of fewer bits, and kernels chosen by their speed

    @property
    def paddle(self) -> str:
        """Paddle's name of it, as in `paddle.set_device`."""
        return self.place or self.name

    @property
    def launcher_reads(self) -> tuple[str, ...]:
        """The variables by whose numbers Paddle's launcher names devices."""
        if self.plugin:
            return (f"{self.name.upper()}_VISIBLE_DEVICES",)
        return self.visible if _is_xpu(self) else GPU.visible

    @property
    def is_cpu(self) -> bool:
        return not self.own_memory


_NO_STRIDES = {"FLAGS_use_stride_kernel": "0"}
_ALL_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CPU = Kind("cpu", "a CPU", collective="gloo", package="paddlepaddle", plugin=False, pythons=_ALL_PYTHONS,
           mixed_precision=False, own_memory=False)  # fmt: skip
GPU = Kind("gpu", "an NVIDIA GPU", visible=("CUDA_VISIBLE_DEVICES",), collective="nccl", package="paddlepaddle-gpu",
           plugin=False, pythons=_ALL_PYTHONS, tells_model=True, efficient_attention=True,
           exactness_switches=True)  # fmt: skip
KINDS = {
    kind.name: kind
    for kind in (
        CPU,
        GPU,
        Kind("dcu", "a Hygon DCU", place="gpu", visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
             settings={"FLAGS_conv_workspace_size_limit": "2000"}, collective="nccl", package="paddlepaddle-dcu",
             index="dcu", plugin=False, tells_model=True, signs=("/dev/mkfd", "/opt/hyhal")),
        Kind("xpu", "a Kunlun XPU", visible=("XPULINK_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
             settings={"BKCL_FORCE_SYNC": "1", "BKCL_TIMEOUT": "1800", **_NO_STRIDES}, collective="bkcl",
             package="paddlepaddle-xpu", index="xpu-p800", plugin=False, signs=("/dev/xpu[0-9]*",)),
        Kind("npu", "an Ascend NPU", visible=("ASCEND_RT_VISIBLE_DEVICES",),
             settings={"FLAGS_npu_storage_format": "0", "FLAGS_npu_jit_compile": "0", "FLAGS_npu_scale_aclnn": "True",
                       "FLAGS_npu_split_aclnn": "True", "FLAGS_allocator_strategy": "auto_growth",
                       "CUSTOM_DEVICE_BLACK_LIST": "pad3d,pad3d_grad,set_value,set_value_with_tensor", **_NO_STRIDES},
             package="paddle-custom-npu", index="npu", version="3.3.0", signs=("/dev/davinci[0-9]*",)),
        Kind("mlu", "a Cambricon MLU", visible=("MLU_VISIBLE_DEVICES",), settings=_NO_STRIDES,
             package="paddle-custom-mlu", index="mlu", version="3.3.0", signs=("/dev/cambricon_dev[0-9]*",)),
        Kind("gcu", "an Enflame GCU", visible=("TOPS_VISIBLE_DEVICES",), settings=_NO_STRIDES,
             package="paddle-custom-gcu", index="gcu", version="3.3.0", signs=("/dev/gcu[0-9]*",)),
        Kind("metax_gpu", "a MetaX GPU", visible=("MACA_VISIBLE_DEVICES",), package="paddle-metax-gpu", index="maca",
             version="3.3.0", tells_model=True, signs=("/dev/mxcd",)),
    )
}  # fmt: skip
DEFAULT_DEVICE = "auto"  # of --device: what the installed Paddle is made for where one is there, else the CPU
DEVICE_HELP = f"{DEFAULT_DEVICE} (the installed Paddle's), {', '.join(KINDS)}, or one of several, as gpu:1"


@dataclass(frozen=True)
class Device:
    """What a process computes on. name: Paddle's, as npu:0; model: its maker's; memory_bytes: in all, 0 where Paddle
    does not say; bfloat16, float16: as `paddle.amp` says, and only where autocast has an effect."""

    kind: Kind
    name: str
    model: str
    memory_bytes: int
    bfloat16: bool
    float16: bool


def current_kind() -> Kind:
    """What this process computes on."""
    return kind_of(device_name().partition(":")[0])


def kind_of(place: str) -> Kind:
    """The kind that this Paddle means by its name for it. A build for DCUs calls them GPUs."""
    import paddle

    if place == GPU.paddle and paddle.device.is_compiled_with_rocm():
        return KINDS["dcu"]
    return KINDS.get(place) or Kind(place, f"a device {place}", visible=(f"{place.upper()}_VISIBLE_DEVICES",))


def current_device() -> Device:
    """What this process computes on, with what it can do."""
    import paddle

    kind, memory = current_kind(), 0
    if kind.is_cpu:
        memory = usable_memory_bytes() or 0
    elif _is_xpu(kind):
        memory = paddle.device.xpu.memory_total()
    elif kind.tells_model:
        memory = paddle.device.get_device_properties(device_name()).total_memory
    asked = (paddle.amp.is_bfloat16_supported, paddle.amp.is_float16_supported)
    return Device(kind, device_name(), device_model(), memory, *(kind.mixed_precision and has() for has in asked))


def device_name() -> str:
    """What this process computes on, as Paddle names it: cpu, gpu:0."""
    import paddle

    return paddle.get_device()


def device_model() -> str:
    """What this process computes on, as its maker calls it; of a CPU, the processor."""
    import paddle

    kind = current_kind()
    if kind.is_cpu:
        return read_cpu("model name")
    return paddle.device.get_device_name(device_name()) if kind.tells_model else kind.words


def _is_xpu(kind: Kind) -> bool:
    return kind.collective == "bkcl"


@contextmanager
def host_memory():
    """Inside the block, what is loaded comes to lie in the host's memory: a device may not hold all of it."""
    import paddle

    device = device_name()
    paddle.set_device(CPU.paddle)
    try:
        yield
    finally:
        paddle.set_device(device)


def parse_device(name: str) -> tuple[Kind | None, str]:
    """The kind and the number ("" without one) of a value of --device; None for the default. Raises ConfigError."""
    word, _, number = name.partition(":")
    if name == DEFAULT_DEVICE:
        return None, ""
    if not re.fullmatch(r"[a-z_]\w*(:\d+)?", name):
        raise ConfigError(f"--device {name} is not a device; choose {DEVICE_HELP}")
    return KINDS.get(word) or Kind(word, f"a device {word}"), number


def use_device(name: str | None) -> None:
    """Compute on `name`, a value of --device. None, auto: what Paddle chooses. Raises ConfigError."""
    import paddle

    kind, number = parse_device(name or DEFAULT_DEVICE)
    if kind is None:
        return
    try:
        if kind.place and kind_of(kind.place) != kind:
            raise ValueError(f"this Paddle is not made for {kind.words}")
        paddle.set_device(kind.paddle + (number and f":{number}"))
    except (ValueError, RuntimeError) as error:
        found = ", ".join(dict.fromkeys([CPU.name, *paddle.device.get_available_device()]))
        near = nearest(kind.name, [*KINDS])
        fix = f"install Paddle for {kind.words} (bash run_scripts/setup.sh --device {kind.name})"
        if kind.name not in KINDS:
            fix = f"did you mean {near}?" if near else "choose one of these"
        raise ConfigError(
            f"--device {name} cannot be used here; this Paddle finds {found}: {fix}, or omit --device"
        ) from error


def check_precision(bf16: bool, fp16: bool, device: Device) -> None:
    """Raises ConfigError where an accelerator has not the half precision that is asked for. On a kind without any, a
    CPU, float32 takes its place; `optimizer.warn_of_cpu` says so."""
    if not device.kind.mixed_precision:
        return
    for flag, name, asked, has, other, has_other in (
        ("--bf16", "bfloat16", bf16, device.bfloat16, "--fp16", device.float16),
        ("--fp16", "float16", fp16, device.float16, "--bf16", device.bfloat16),
    ):
        if asked and not has:
            fix = f"use {other}, or omit {flag}" if has_other else f"omit {flag}"
            raise ConfigError(f"{flag}: {device.model} ({device.name}) has no {name}, says Paddle; {fix}")


def launch_arguments(kind: Kind, devices: str, environ: Mapping[str, str]) -> list[str]:
    """What Paddle's launcher is told to start one process on each of `devices`: numbers as the driver counts, with
    commas between; "" for all that are visible. They must be among those that a variable shows, which the launcher
    counts from 0 where it does not read it. On a CPU they only say how many processes. Raises ConfigError."""
    words = [word.strip() for word in devices.split(",")] if devices else []
    if not all(re.fullmatch(r"\d+", word) for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"--devices {devices} must be different whole numbers with commas between, as 0,1")
    if not words or kind.is_cpu:
        return ["--nproc_per_node", str(len(words))] if words else []
    variable = next((name for name in kind.visible if environ.get(name, "all") != "all"), None)
    seen = [word.strip() for word in environ[variable].split(",")] if variable else words
    if missing := [word for word in words if word not in seen]:
        shown = f"{variable} shows {', '.join(seen) or 'none'}"
        raise ConfigError(f"--devices {devices}: {missing[0]} is not there; {shown}")
    if variable and variable not in kind.launcher_reads:
        words = [str(seen.index(word)) for word in words]
    return ["--devices", ",".join(words)]


def collective_variables(kind: Kind) -> dict[str, str]:
    """What `init_parallel_env` must find to let ranks talk on devices of a kind that Paddle would not choose itself."""
    return {"PADDLE_DISTRI_BACKEND": kind.collective} | ({"PADDLE_XCCL_BACKEND": kind.name} if kind.plugin else {})


def installed_kind(packages: Sequence[str] | None = None) -> Kind:
    """What the installed Paddle is made for. packages: by default those of this environment."""
    if packages is None:
        packages = list(versions_of(kind.package for kind in KINDS.values()))
    return next((kind for kind in KINDS.values() if not kind.is_cpu and kind.package in packages), CPU)


def peak_device_memory_bytes() -> int:
    """The most that Paddle has held of the device's own memory so far; 0 where it has none."""
    import paddle

    return paddle.device.max_memory_allocated() if current_kind().own_memory else 0


def release_device_memory() -> None:
    """Give back what Paddle keeps of the device's own memory without using it."""
    import paddle

    if current_kind().own_memory:
        paddle.device.empty_cache()


def wait_for_device() -> None:
    """Until all that was asked of the device is done."""
    import paddle

    if current_kind().own_memory:
        paddle.device.synchronize()


def set_exactness(fewer_bits: bool, search_kernels: bool) -> None:
    """Whether float32 matrix products may take fewer bits (TF32), and kernels be chosen by trial, on devices that can.
    Paddle's own defaults are faster and less exact: here float32 means float32 unless it is asked for otherwise."""
    import paddle
    from paddle.base import core

    if current_kind().exactness_switches:
        core.set_cublas_switch(fewer_bits)
        core.set_cudnn_switch(fewer_bits)
        paddle.set_flags({"FLAGS_cudnn_exhaustive_search": search_kernels})


def seen_kinds(root: Path = Path("/")) -> list[Kind]:
    """The kinds of devices, other than the CPU, that this machine's drivers show. root: of the files looked for."""
    from .nvidia_smi import list_gpus

    kinds = [GPU] if list_gpus() else []
    return kinds + [kind for kind in KINDS.values() if any(any(root.glob(sign[1:])) for sign in kind.signs)]


def count_devices(kind: Kind) -> int:
    """How many of a kind the installed Paddle can use; of a CPU none are counted. Paddle is imported."""
    import paddle

    if kind.paddle == GPU.paddle:
        return paddle.device.cuda.device_count()
    if _is_xpu(kind):
        return paddle.base.core.get_xpu_device_count()
    return sum(name.partition(":")[0] == kind.paddle for name in paddle.device.get_available_custom_device() or ())


def launch_kind() -> Kind:
    """The installed Paddle's kind where the machine has such a device, else the CPU. Paddle is not imported."""
    kind = installed_kind()
    return kind if kind in seen_kinds() else CPU


def list_cards(kind: Kind) -> "list[Gpu]":
    """The devices of a kind as far as their driver describes them: NVIDIA's."""
    from .nvidia_smi import list_gpus

    return list_gpus() if kind == GPU else []


def main() -> None:
    """For the scripts that start processes: the launcher's arguments, on one line."""
    parser = argparse.ArgumentParser(description="What Paddle's launcher is told, to use this machine's devices.")
    parser.add_argument("--devices", default="", help="numbers with commas between (all that are visible)")
    parser.add_argument("--processes", default="", help="so many processes, whatever the machine has")
    parser.add_argument("--cpu_processes", default="2", help="so many where it has nothing but a CPU (2)")
    arguments = parser.parse_args()
    kind, processes = launch_kind(), arguments.processes
    words = launch_arguments(kind, arguments.devices, variables.all_variables())
    if not arguments.devices and (processes or kind.is_cpu):
        words = ["--nproc_per_node", processes or arguments.cpu_processes]
    sys.stdout.write(" ".join(words) + "\n")


if __name__ == "__main__":
    with exit_on_error():
        main()
