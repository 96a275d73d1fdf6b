"""Numbers of a run: the file and the lines they go to, and their reading again.

`metrics.jsonl` is the truth: one JSON object a line, `global_step` strictly rising; `monitor.sinks` shows the
same elsewhere. A resumed run first drops the lines past the step it resumes from, so that the file is always one curve.
"""

import json
import time
from pathlib import Path

import numpy as np

from ...utils.errors import DataError
from ...utils.files import atomic_write, naming_full_disk, write_text
from ...utils.log import get_logger

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"  # what `ppldm evaluate --watch` finds, a process of its own
EVALUATION_DIR = "evaluation"  # its results and pictures
_LONGEST_LINE = 1 << 16  # bytes
NUM_QUARTERS = 4  # of the timesteps, by each of which the loss is logged; the first has the least noise


class MetricsWriter:
    """Writes what one process logs: a line of the file, a line of the log, and a point in each sink."""

    def __init__(self, path: Path, sinks: list = ()):
        self.path, self.sinks = Path(path), sinks

    def log(self, step: int, values: dict) -> None:
        """Append {"global_step": step, "time": seconds since 1970, **values}, and show it. NaN is written as null."""
        record = {name: value if np.isfinite(value) else None for name, value in values.items()}
        record = {"global_step": step, "time": round(time.time(), 3), **record}
        with naming_full_disk(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        for sink in self.sinks:
            sink.add_numbers(record)
        get_logger().info("%s", describe(step, values))

    def add_pictures(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Show [H, W, 3] uint8 pictures, by tag, where pictures can be shown."""
        for sink in self.sinks:
            sink.add_pictures(step, pictures)

    def close(self) -> None:
        """Finish what the sinks wrote."""
        for sink in self.sinks:
            sink.close()


def describe(step: int, values: dict) -> str:
    """The numbers as a line for people; those that are not there are left out."""
    words = [f"step {step}"]
    if "loss" in values:
        words.append(f"loss {values['loss']:.4f}")
    quarters = [values[name] for number in range(NUM_QUARTERS) if (name := f"loss_quarter_{number + 1}") in values]
    if quarters:
        words.append(f"by timestep {' '.join('-' if np.isnan(q) else f'{q:.3f}' for q in quarters)}")
    shown = {
        "validation_loss": "validation loss {:.4f}",
        "psnr": "psnr {:.2f} dB",
        "grad_norm": "gradient {:.3g}",
        "lr_abs": "lr {:.3g}",
        "images_per_second": "{:.3g} images/s",
        "data_wait_share": "waited for data {:.1%}",
        "peak_memory_gb": "memory {:.1f} GB",
        "peak_device_memory_gb": "device {:.1f} GB",
    }
    per_device = values.get("images_per_second_per_device")
    if per_device not in (None, values.get("images_per_second")):
        shown["images_per_second"] += f" ({per_device:.3g} a device)"
    words += [form.format(values[name]) for name, form in shown.items() if name in values]
    for what in ("rows", "updates"):
        if values.get(f"skipped_{what}"):
            words.append(f"skipped {values[f'skipped_{what}']:.0f} {what}")
    return "  ".join(words)


def describe_costs(values: dict, samples_per_update: int) -> str:
    """The line of `--benchmark`, whose words scripts look for: costs in seconds an update, ips in images a second."""
    return (
        f"avg_reader_cost: {values['avg_reader_cost']:.5f} sec, avg_batch_cost: {values['avg_batch_cost']:.5f} sec, "
        f"avg_samples: {samples_per_update}, ips: {values['images_per_second']:.5f} images/sec"
    )


def read_metrics(path) -> list[dict]:
    """The lines of a metrics file. Raises DataError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a {METRICS_FILE} that training wrote") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); give a {METRICS_FILE} that training wrote") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON; remove it") from error
    return records


def skipped_rows(record: dict) -> dict[str, int]:
    """The bad rows that a run has passed over by one of its lines, by reason."""
    start = "skipped_rows_"
    return {name.removeprefix(start): int(record[name]) for name in record if name.startswith(start)}


def drop_after(path: Path, step: int, ends: int | None = None) -> list[dict]:
    """Keep the lines of a metrics file up to `step`, and return them; a last line that a kill cut short goes too.

    `ends`: the step of the last line when the checkpoint of `step` was written, where that is known. Lines that are
    damaged or lost meanwhile are said in a warning and never stop a run; what the file held is set aside.
    """
    if not path.exists():
        if ends:
            get_logger().warning("%s is not there: the curve up to update %d is lost", path, ends)
        return []
    content = path.read_bytes()
    *lines, _unfinished = content.split(b"\n")
    kept, problem = [], None
    for number, line in enumerate(lines, 1):
        record = _parse(line, kept[-1]["global_step"] if kept else -1)
        if record is None:
            kind = "a line of metrics" if _is_text(line) else "UTF-8 text"
            problem = problem or f"line {number} is not {kind}; what it held is in {_set_aside(path, content).name}"
        elif record["global_step"] <= step:
            kept.append(record)
    reached = kept[-1]["global_step"] if kept else 0
    if problem is None and ends is not None and reached < ends:
        problem = f"ends at update {reached} and reached {ends} when its checkpoint was written: lines are lost"
    if problem:
        get_logger().warning("%s: %s", path, problem)
    write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def last_step(path: Path) -> int:
    """The step of the last line of a metrics file; 0 where it has none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    record = _parse(lines[-2], -1) if len(lines) > 1 else None
    return record["global_step"] if record else 0


def _parse(line: bytes, after: int) -> dict | None:
    """The record of a line, whose step is above `after`; None where it is not one."""
    try:
        record = json.loads(line.decode("utf-8"))
        is_whole = isinstance(record["global_step"], int) and record["global_step"] > after
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if is_whole else None


def _is_text(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _set_aside(path: Path, content: bytes) -> Path:
    target = path.with_name(f"damaged-{path.name}")
    with atomic_write(target) as file:
        file.write(content)
    return target
