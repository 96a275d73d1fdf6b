"""Numbers and pictures of a run: `metrics.jsonl` is the truth; VisualDL and the terminal show the same.

One JSON object a line, `global_step` strictly rising. A resumed run first drops the lines past the step it resumes
from, so that the file is always one curve.
"""

import json
import time
from pathlib import Path

import numpy as np

from ..utils.errors import DataError, OutputError
from ..utils.files import atomic_write, write_text
from ..utils.log import get_logger

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes what one process logs. Made on the main process only."""

    def __init__(self, output_dir, reporters, logging_dir, start_step: int):
        self.path = Path(output_dir, METRICS_FILE)
        _drop_after(self.path, start_step)
        self.visualdl = None
        if "visualdl" in reporters:
            from visualdl import LogWriter

            self.visualdl = LogWriter(logdir=str(logging_dir), flush_secs=10)

    def log(self, step: int, values: dict) -> None:
        """Append {"global_step": step, **values} and show it. Values are numbers; NaN is written as null."""
        finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"global_step": step, **finite}) + "\n")
        if self.visualdl:
            for name, value in finite.items():
                if value is not None:
                    self.visualdl.add_scalar(f"train/{name}", value, step)
        get_logger().info("step %d  %s", step, "  ".join(f"{name} {_short(value)}" for name, value in values.items()))

    def pictures(self, step: int, pictures: dict[str, np.ndarray]) -> None:
        """Show [H, W, 3] uint8 pictures in VisualDL, by tag."""
        if self.visualdl:
            for tag, picture in pictures.items():
                self.visualdl.add_image(tag, picture, step)

    def close(self) -> None:
        """Finish VisualDL's file."""
        if self.visualdl:
            self.visualdl.close()


class Interval:
    """What happened since the last log line: losses, samples, seconds, seconds spent waiting for data.

    `losses` is the list that a checkpoint keeps, so that a resumed run logs the same mean as one that was not stopped.
    """

    def __init__(self, losses: list[float]):
        self.losses = losses
        self._start()

    def _start(self):
        self.samples, self.wait_seconds, self.started = 0, 0.0, time.perf_counter()

    def add(self, loss: float, samples: int, applied: bool = True) -> None:
        """One update: its loss (mean over ranks and micro-batches) and its samples over all ranks.

        The loss of an update that was skipped (not `applied`) enters no mean.
        """
        if applied:
            self.losses.append(loss)
        self.samples += samples

    def summary(self, world_size: int) -> dict:
        """Means over the interval, which ends here."""
        seconds = time.perf_counter() - self.started
        rate = self.samples / seconds
        values = {
            "loss": float(np.mean(self.losses)) if self.losses else float("nan"),
            "images_per_second": rate,
            "images_per_second_per_device": rate / world_size,
            "data_wait_share": self.wait_seconds / seconds,
        }
        self.losses.clear()
        self._start()
        return values


def read_metrics(path) -> list[dict]:
    """The lines of a metrics file. Raises DataError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a {METRICS_FILE} that training wrote") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON; remove it") from error
    return records


def plot_loss(
    metrics: str,  # a metrics.jsonl, or the folder of a run that holds one
    out: str = None,  # PNG to write; by default loss.png beside the metrics
):
    """Draw a run's loss curve as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    source = Path(metrics) / METRICS_FILE if Path(metrics).is_dir() else Path(metrics)
    records = [r for r in read_metrics(source) if r.get("loss") is not None]
    if not records:
        raise DataError(f"{source} has no losses; train first")
    steps, losses = [r["global_step"] for r in records], np.array([r["loss"] for r in records])
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    window = max(1, len(losses) // 25)
    axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="logged")
    if window > 1:
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="#08519c", label=f"mean of {window}")
        axes.legend()
    axes.set(xlabel="global step (optimizer updates)", ylabel="training loss", yscale="log")
    axes.grid(True, which="both", alpha=0.3)
    target = Path(out) if out else source.parent / "loss.png"
    try:
        with atomic_write(target) as file:
            figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}; give another --out") from error
    finally:
        pyplot.close(figure)
    get_logger().info("loss curve: %s", target)


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`; a last line that a kill cut short goes too."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["global_step"] > step:
            break
        kept.append(line + "\n")
    write_text(path, "".join(kept))


def _short(value: float) -> str:
    return f"{value:.4g}"
