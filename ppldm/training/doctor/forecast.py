"""Hours, disk and cost of a run, from the seconds of an update that were measured: those of a run's log, or on a CPU
of updates that are timed (`timed`). Where neither can be, on a CPU, the hours that it takes at least, by the operations
of its convolutions and matrix products."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from ...config.training import TrainingOptions
from ...utils.errors import ConfigError
from ..averages.snapshots import DEFAULT_NUMBER
from ..monitor.metrics import METRICS_FILE, read_metrics
from .machine import Finding, judged

_FIRST_LINES = 1  # of a log, in which compiling and first reads are counted
_LONG_HOURS = 48  # of a run on a CPU, which hardly anybody means to wait for
# Of the matrix products by which the speed is measured: so short that other programs do not interrupt all of them.
_SIDE, _PRODUCTS = 384, 64


def seconds_an_update(folder: Path) -> float:
    """The median over the lines of a run's log. Raises ConfigError where it has none."""
    path = folder / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    costs = [record["avg_batch_cost"] for record in records if record.get("avg_batch_cost")]
    costs = costs[_FIRST_LINES:] or costs
    if not costs:
        raise ConfigError(f"--run {folder} has no {METRICS_FILE} with a finished update; name the folder of a run")
    return statistics.median(costs)


def count_checkpoints(arguments: TrainingOptions, max_steps: int) -> int:
    """How many a run keeps at its end: the newest, and those of --backup_every."""
    every = arguments.backup_every
    backups = set(range(every, max_steps + 1, every)) if every else set()
    saved = sorted({*range(arguments.save_steps, max_steps, arguments.save_steps), max_steps, *backups})
    return len({*saved[-(arguments.save_total_limit or 0) :], *backups})


def other_bytes(config, on_disk: dict[str, int], max_steps: int) -> int:
    """What a run leaves beside its checkpoints: the exported model, and snapshots of the averages of --ema_posthoc."""
    every = getattr(config, "ema_posthoc_every", None) or max(1, max_steps // DEFAULT_NUMBER)
    return on_disk.get("exported", 0) + on_disk.get("snapshots", 0) * -(-max_steps // every)


def forecast(
    seconds: float, max_steps: int, disk_bytes: int, num_devices: int, price_per_hour: float | None
) -> dict[str, float]:
    """hours of the whole run, disk_gb at its end, and cost where the price of a device's hour is known."""
    hours = seconds * max_steps / 3600
    found = {"seconds_an_update": seconds, "hours": hours, "disk_gb": disk_bytes / 1e9}
    return found if price_per_hour is None else found | {"cost": hours * num_devices * price_per_hour}


def least_hours(operations: int, max_steps: int) -> float:
    """Of updates of so many floating-point operations on this CPU, at a speed that no training reaches."""
    return operations / matrix_speed() * max_steps / 3600


def matrix_speed() -> float:
    """Floating-point operations a second of this CPU in the fastest of some products of matrices."""
    import paddle

    matrix, seconds = paddle.ones([_SIDE, _SIDE]), []
    for _ in range(_PRODUCTS):
        start = time.perf_counter()
        paddle.matmul(matrix, matrix)
        seconds.append(time.perf_counter() - start)
    return 2 * _SIDE**3 / min(seconds)


def tell(found: dict[str, float] | None, least: float = 0.0, is_cpu: bool = False, how: str = "") -> Iterator[Finding]:
    """The forecast as a line; None where no update was measured, and then `least` hours, where they are known. how: it
    was measured, or why it was not."""
    hours, how = found["hours"] if found else least, f" ({how})" if how else ""
    fix = "take a smaller model, --resolution or --max_steps (`ppldm init` proposes some), or another device"
    if found:
        text = f"{found['seconds_an_update']:.3g} s an update{how}, {_words(hours)}, {found['disk_gb']:.3g} GB of disk"
        text += f", cost {found['cost']:.2f}" if "cost" in found else ""
    else:
        text = f"at least {least:.2g} h, at the speed of matrix products on this CPU; " if least else ""
        text += f"no update was measured{how}: --run FOLDER takes its seconds from a run's log"
    yield judged("forecast", text, warning=fix if is_cpu and hours > _LONG_HOURS else "")


def _words(hours: float) -> str:
    """In the unit that a person would take."""
    return f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min" if hours * 60 >= 1 else f"{hours * 3600:.2g} s"
