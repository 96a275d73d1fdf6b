"""What `ppldm certify` finds, as one object."""

import datetime
import platform
import time
from collections.abc import Callable
from dataclasses import asdict

import paddle

from ... import __version__
from ...utils.log import get_logger, progress
from ...utils.machine import devices
from ...utils.machine import resources as machine
from ...utils.machine.environment import installed_versions
from .operations import BAR, REFUSALS, compare, drift, first_line, list_networks, list_operations
from .resume import try_resume

REPEATS = 5
SIDE = 1024  # of the matrices
PICTURES = (8, 64, 64, 64)  # of the convolution: batch, channels, height, width


def make_report(device: str, resume: bool) -> dict:
    """The whole report. Raises ConfigError for a device that is not here, PpldmError where a training fails."""
    devices.use_device(device)
    devices.set_exactness(fewer_bits=False, search_kernels=False)
    found = devices.current_device()
    operations = []
    for operation in progress(list_operations(), desc="operations", unit="operation"):
        operations.append(compare(operation, found.name))
    halves = {"bfloat16": found.bfloat16, "float16": found.float16}
    drifts = {half: [drift(one, found.name, half) for one in list_networks()] if has else None
              for half, has in halves.items()}  # fmt: skip
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": asdict(found) | {"kind": found.kind.name},
        "machine": {"system": platform.platform(), "cores": machine.count_usable_cores(),
                    "processor": machine.read_cpu_model(), "memory_bytes": machine.usable_memory_bytes()},
        "versions": {"ppldm": __version__, "python": platform.python_version(), **installed_versions()},
        "bar": BAR,
        "operations": operations,
        "half_precision": drifts,
        "peak_device_memory_bytes": devices.peak_device_memory_bytes(),
        "speed": {half: measure_speed(half) for half in ("float32", *halves) if halves.get(half, True)},
        "resume": try_resume(device) if resume else None,
    }  # fmt: skip
    passed = all(one["ok"] for one in operations) and (not resume or report["resume"]["equal"])
    return report | {"passed": passed}


def measure_speed(half: str) -> dict:
    """GFLOP a second, forward and backward: a product of square matrices, and a convolution of 3 x 3; None for what the
    device cannot compute in this type."""
    matrices = [paddle.randn([SIDE, SIDE]) for _ in range(2)]
    batch, channels, height, width = PICTURES
    convolution, pictures = paddle.nn.Conv2D(channels, channels, 3, padding=1), paddle.randn(PICTURES)
    works = {
        "matmul": (lambda: paddle.matmul(*matrices), 2 * SIDE**3),
        "conv2d": (lambda: convolution(pictures), 2 * 9 * channels**2 * batch * height * width),
    }
    for one in (*matrices, pictures):
        one.stop_gradient = False
    found = {}
    for name, (work, operations) in works.items():
        try:
            seconds = sorted(_time(work, half) for _ in range(REPEATS + 1))
        except REFUSALS as error:
            found[name] = None
            get_logger().warning("%s in %s: %s", name, half, first_line(error))
        else:
            found[name] = 3 * operations / seconds[REPEATS // 2] / 1e9
    return found


def _time(work: Callable, half: str) -> float:
    """Seconds of once forward and backward."""
    devices.wait_for_device()
    began = time.perf_counter()
    with paddle.amp.auto_cast(enable=half != "float32", dtype="float16" if half == "float32" else half):
        work().astype("float32").sum().backward()
    devices.wait_for_device()
    return time.perf_counter() - began


def describe(report: dict) -> str:
    """For people."""
    device, operations = report["device"], report["operations"]
    lines = [f"{device['name']}: {device['model']}", ""]
    for network in dict.fromkeys(one["network"] for one in operations):
        of = [one for one in operations if one["network"] == network]
        worst = [max(one.get(name, float("inf")) for one in of) for name in ("forward", "gradient")]
        lines.append(f"  {network:<10} {len(of):>3} operations  forward {worst[0]:.1e}  gradient {worst[1]:.1e}")
    lines += [f"  not the same: {one['network']}, {one['what']}: {one.get('error') or one}" for one in operations
              if not one["ok"]]  # fmt: skip
    for half, found in report["half_precision"].items():
        worst = max((one.get("gradient", float("inf")) for one in found or ()), default=0)
        lines.append(f"  {half:<10} " + (f"gradients off by {worst:.1e} (root mean square)" if found else "not here"))
        lines += [f"  {half:<10} {one['network']}: {one['error']}" for one in found or () if "error" in one]
    for kind, speeds in report["speed"].items():
        lines.append(f"  {kind:<10} " + ", ".join(f"{name} {speed or 0:.0f} GFLOP/s" for name, speed in speeds.items()))
    if report["resume"]:
        lines.append(f"  resumed    {'equal to the bit' if report['resume']['equal'] else 'NOT equal'}")
    return "\n".join([*lines, "", "certified" if report["passed"] else "NOT certified"])
