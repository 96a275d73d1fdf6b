"""A run as its files tell it, read on while it grows. Nothing in its folder is changed, and paddle is not needed.

`metrics.jsonl` is read from where the last look ended. A run that resumes drops lines and writes the file again; that
is known by the end of what was read, which is then no longer there, and all is read anew.
"""

import json
import re
import socket
import threading
import time
from array import array
from collections import defaultdict
from pathlib import Path

import numpy as np

from ...config.write import RECIPE_FILE
from ...training.monitor.control import CONTROL_DIR, PROMPTS_FILE, STATUS_FILE, Order
from ...training.monitor.metrics import EVALUATION_FILE, METRICS_FILE, NUM_QUARTERS, skipped_rows, thin
from ...training.monitor.sinks import SAMPLES_DIR
from ...training.start import read_start
from ...utils.errors import ConfigError
from ...utils.files import is_held, read_json
from ...utils.grid import read_cells
from ...weights.runs import RUN_FILE, find_runs

MOST_POINTS = 600  # of a curve, at most: of more, groups are shown by their mean, least and most
_TAIL = 200  # bytes by which a file is known again
_LATE = 50  # lines of which the speed is taken
_PICTURE = re.compile(r"step-(\d+)-(.+)\.png")

# Charts in their order: title -> names of numbers. Each other number has a chart of its own behind them.
CHARTS = {
    "loss": ("loss", "validation_loss"),
    "loss by noise level": tuple(f"loss_quarter_{number}" for number in range(1, NUM_QUARTERS + 1)),
    "images a second": ("images_per_second",),
    "share of time waiting for data": ("data_wait_share",),
    "gradient norm": ("grad_norm",),
    "learning rate": ("lr_abs",),
    "skipped so far": ("skipped_rows", "skipped_updates"),
    "memory, GB": ("peak_memory_gb", "peak_device_memory_gb"),
}
SMOOTHED = ("loss", "loss by noise level")  # as losses alone are noise about a curve
_HIDDEN = {"global_step", "time", "data_crc32", "avg_reader_cost", "avg_batch_cost", "ips",
           "images_per_second_per_device"}  # fmt: skip


class Follower:
    """One run. `look` reads on; all else tells what was found. Of one thread at a time. is_named: whether its folder
    was named, and not one above it."""

    def __init__(self, folder: Path, is_named: bool = True):
        self.folder, self.name, self.is_named = folder, folder.resolve().name, is_named
        self.lock = threading.Lock()
        self._cells: dict[tuple, list] = {}
        self._start()

    def _start(self) -> None:
        self._offset, self._tail, self.damaged = 0, b"", 0
        self.series = defaultdict(lambda: (array("d"), array("d")))  # name -> steps, values
        self.last: dict[str, float] = {}  # the newest of each number

    def look(self) -> None:
        """Read what is new of metrics.jsonl. A line that is not whole yet waits; damaged ones are counted."""
        try:
            with open(self.folder / METRICS_FILE, "rb") as file:
                file.seek(self._offset - len(self._tail))
                content = file.read()
                if not content.startswith(self._tail):
                    self._start()
                    file.seek(0)
                    content = file.read()
        except OSError:
            self._start()
            return
        new = content[len(self._tail) :]
        end = new.rfind(b"\n") + 1
        records, damaged = parse_lines(new[:end])
        self._offset, self._tail = self._offset + end, (self._tail + new[:end])[-_TAIL:]
        self.damaged += damaged
        for record in records:
            step = record["global_step"]
            for name, value in record.items():
                if type(value) is float or type(value) is int:
                    steps, values = self.series[name]
                    steps.append(step)
                    values.append(value)
                    self.last[name] = value

    def charts(self, share: float = 1.0) -> dict[str, list[dict]]:
        """Title -> lines: {"name", "points": steps, means, leasts, mosts, "last": the newest number}. share: of the
        run, its newest part."""
        first = self.step * (1 - share)
        known = {name: title for title, names in CHARTS.items() for name in names}
        found: dict[str, list] = {title: [] for title in CHARTS}
        for name in sorted(self.series.keys() - _HIDDEN, key=lambda name: [*known, name].index(name)):
            steps, values = (np.array(one) for one in self.series[name])
            keep = np.isfinite(values) & (steps >= first)
            if keep.any() and not name.startswith("skipped_rows_"):
                title = known.get(name, "learning rate" if name.startswith("lr_abs") else name)
                points = [_short(one) for one in thin(steps[keep], values[keep], MOST_POINTS)]
                found.setdefault(title, []).append({"name": name, "points": points, "last": values[keep][-1]})
        for title, lines in self._evaluations(first).items():
            found.setdefault(title, []).extend(lines)
        return {title: lines for title, lines in found.items() if lines}

    def _evaluations(self, first: float) -> dict[str, list[dict]]:
        try:
            records, _ = parse_lines((self.folder / EVALUATION_FILE).read_bytes())
        except OSError:
            return {}
        lines: dict[tuple, list] = defaultdict(list)
        for record in records:
            for name in record:
                ends = [record.get(name + end) for end in ("", "_low", "_high")]
                if record["global_step"] >= first and None not in ends:
                    lines[name, record.get("guidance_scale")].append([record["global_step"], *ends])
        found = defaultdict(list)
        for (name, scale), points in lines.items():
            label = name if scale is None else f"{name} at guidance {scale:g}"
            found[name].append({"name": label, "points": list(zip(*points, strict=True)), "last": points[-1][1]})
        return found

    @property
    def step(self) -> int:
        """The newest update that was logged."""
        return int(self.last.get("global_step", 0))

    def pictures(self) -> dict[str, list[dict]]:
        """Tag -> {"step", "file", "prompts"} in order of steps; tags in the order in which they were drawn. What an
        earlier run has left past this one's start is not among them."""
        status, found, drawn = self._status(), defaultdict(list), []
        try:
            paths = sorted((self.folder / SAMPLES_DIR).iterdir())
        except OSError:
            return {}
        for path in paths:
            if not (match := _PICTURE.fullmatch(path.name)):
                continue
            try:
                key = path.name, path.stat().st_mtime
                if key not in self._cells:
                    self._cells[key] = read_cells(path)
            except OSError:  # gone meanwhile, or no picture
                continue
            if int(match[1]) > status.get("start_step", 0) and key[1] < status.get("started", 0):
                continue
            prompts = [caption for caption, _ in self._cells[key]]
            drawn.append((key[1], match[2], {"step": int(match[1]), "file": path.name, "prompts": prompts}))
        for _, tag, one in sorted(drawn, key=lambda one: one[0]):
            found[tag].append(one)
        return {tag: sorted(files, key=lambda one: one["step"]) for tag, files in found.items()}

    def picture(self, name: str) -> Path:
        """The file of a picture. Raises ConfigError for what is none."""
        path = self.folder / SAMPLES_DIR / name
        if not _PICTURE.fullmatch(name) or "/" in name or not path.is_file():
            raise ConfigError("there is no such picture; reload the page")
        return path

    def _status(self) -> dict:
        found = read_json(self.folder / CONTROL_DIR / STATUS_FILE, optional=True)
        return found if isinstance(found, dict) else {}

    def state(self) -> str:
        """`finished`, `training`, `stopped`, or `unknown` where the run is on another machine and says no more."""
        held = is_held(self.folder)  # looked at first: a run says that it has finished, and then lets go
        start = read_start(self.folder)
        if start is not None and start.finished:
            return "finished"
        if held:
            return "training"
        here = self._status().get("host") in (None, socket.gethostname())
        return "stopped" if here else "unknown"

    def seconds_left(self) -> float | None:
        """Until the last update, by the median speed of the newest lines, with what drawing and saving take, without
        the first update of a start and the pause before it."""
        status = self._status()
        last, start = status.get("max_steps"), status.get("start_step", 0)
        steps, times = (np.array(one[-_LATE - 1 :]) for one in self.series["time"])
        with np.errstate(divide="ignore", invalid="ignore"):
            paces = np.diff(times) / np.diff(steps)
        begins = (steps[:-1] <= start) & (steps[1:] > start)
        paces = paces[np.isfinite(paces) & (paces > 0) & ~begins]
        if not last or not len(paces):
            return None
        return max(0.0, (last - self.step) * float(np.median(paces)) - max(0.0, time.time() - times[-1]))

    def now(self) -> dict:
        """What changes from moment to moment, and what is asked of the run, JSON-ready."""
        status, state = self._status(), self.state()
        control = self.folder / CONTROL_DIR
        config = read_json(self.folder / RUN_FILE, optional=True)
        config = config if isinstance(config, dict) else {}
        validation = config.get("validation")
        own = validation.get("validation_prompts") if isinstance(validation, dict) else None
        prompts = control / PROMPTS_FILE
        return {
            "name": self.name,
            "folder": str(self.folder),
            "named": self.is_named,
            "state": state,
            "family": str(config.get("family", "")),
            "step": self.step,
            "max_steps": status.get("max_steps"),
            "seconds_left": self.seconds_left() if state == "training" else None,
            "last": {name: value for name, value in self.last.items() if not name.startswith("skipped_rows_")},
            "skipped": skipped_rows(self.last),
            "damaged": self.damaged,
            "machine": {name: status[name] for name in ("host", "device", "ranks") if status.get(name) is not None},
            "takes_orders": control.is_dir() and state in ("training", "unknown"),
            "orders": [order.file for order in Order if (control / order.file).exists()],
            "prompts": prompts.read_text(encoding="utf-8", errors="replace") if prompts.is_file() else "",
            "own_prompts": [str(one) for one in own] if isinstance(own, list) else [],
        }

    def recipe(self) -> str:
        """All settings of the run; empty where they are not there."""
        path = self.folder / RECIPE_FILE
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def follow(followers: list[Follower], places: list[Path]) -> None:
    """Append a follower of each run in these folders that has none yet, the newest first."""
    for place in places:
        known = {one.folder for one in followers}
        followers += [Follower(run, run == place) for run in find_runs(place) if run not in known]


def parse_lines(content: bytes) -> tuple[list[dict], int]:
    """(the records of whole lines of JSON, how many lines are none)."""
    lines = content.split(b"\n")[:-1]
    try:
        records = json.loads(b"[" + b",".join(lines) + b"]")  # at once: half the time
        if len(records) == len(lines) and all(map(_is_record, records)):
            return records, 0
    except (ValueError, RecursionError):
        pass
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _is_record(record):
            records.append(record)
    return records, len(lines) - len(records)


def _is_record(value) -> bool:
    return isinstance(value, dict) and type(value.get("global_step")) is int


def _short(numbers) -> list[float]:
    """Enough digits for a curve."""
    return [float(f"{number:.6g}") for number in numbers]
