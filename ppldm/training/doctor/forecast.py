"""Hours, disk and cost of a run, from the seconds of an update that were measured: those of a run's log."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from ...config.training import TrainingOptions
from ...utils.errors import ConfigError
from ..monitor.metrics import METRICS_FILE, read_metrics
from .findings import Finding, good

_FIRST_LINES = 1  # of a log, in which compiling and first reads are counted


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
    saved = -(-max_steps // arguments.save_steps)
    backups = max_steps // arguments.backup_every if arguments.backup_every else 0
    return saved + backups if not arguments.save_total_limit else min(saved, arguments.save_total_limit) + backups


def forecast(
    seconds: float, max_steps: int, disk_bytes: int, num_devices: int, price_per_hour: float | None
) -> dict[str, float]:
    """hours of the whole run, disk_gb at its end, and cost where the price of a device's hour is known."""
    hours = seconds * max_steps / 3600
    found = {"seconds_an_update": seconds, "hours": hours, "disk_gb": disk_bytes / 1e9}
    return found if price_per_hour is None else found | {"cost": hours * num_devices * price_per_hour}


def tell(found: dict[str, float] | None) -> Iterator[Finding]:
    """The forecast as a line; None where no update was measured."""
    if found is None:
        yield good("forecast", "no update was measured: --run FOLDER takes the seconds of an update from a run's log")
        return
    text = f"{found['seconds_an_update']:.3g} s an update, {found['hours']:.3g} h, {found['disk_gb']:.3g} GB of disk"
    yield good("forecast", text + (f", cost {found['cost']:.2f}" if "cost" in found else ""))
