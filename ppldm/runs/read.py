"""The one reader of what a run wrote. Nothing in its folder is changed, and a run that is being written is read safely.

`metrics.jsonl` is read on from where the last look ended. A run that resumes writes it again without some lines: then
what was read last is no longer there, and all is read anew.
"""

import json
import socket
import threading
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..config.recipe import RECIPE_FILE
from ..data.filelist import Fingerprint
from ..training.checkpoint import read_manifest, verify
from ..training.metrics import EVALUATION_FILE, METRICS_FILE, PICTURE, SAMPLES_DIR, read_metrics
from ..training.run_folder import CONTROL_DIR, STATUS_FILE, has_finished
from ..utils.errors import CheckpointError, ConfigError, DataError
from ..utils.files import is_held, read_json, read_json_object
from ..utils.log import get_logger
from ..utils.pictures import read_cells
from ..utils.text import escape
from ..weights.folders import RUN_FILE, find_runs, list_checkpoints, one_run, step_of
from ..weights.model_file import has_model_file, read_model_file

_TAIL = 200  # bytes by which a file is known again
_LATE = 10  # lines of which the speed is taken: it follows what else the machine does
# Settings of `compute` by which no bit of a result changes.
_NO_BITS = (
    *("device", "dataloader_num_workers", "check_ranks_every", "data_timeout", "rank_timeout", "release_grads"),
    *("skip_memory_metrics", "skip_profile_timer"),
)


@dataclass(frozen=True)
class Line:
    """A line of metrics.jsonl with a loss: of the updates `first` to `last`."""

    first: int
    last: int
    values: dict


class RunFolder:
    """One run. `look` reads metrics on, of one thread at a time; records, lines, checkpoints and manifests
    are read once and kept. is_named: whether its folder was named, and not one above it."""

    def __init__(self, folder: Path, is_named: bool = True):
        self.folder, self.name, self.is_named = folder, escape(folder.resolve().name), is_named
        self.lock = threading.Lock()
        self._cells: dict[tuple, list] = {}
        self._start()

    def _start(self) -> None:
        self._offset, self._tail, self.damaged = 0, b"", 0
        self.series = defaultdict(lambda: (array("d"), array("d")))  # name -> steps, values
        self.last: dict[str, float] = {}  # the newest of each number

    # ---- what a run writes while it trains: what is damaged, or not whole yet, is passed over

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

    @property
    def step(self) -> int:
        return int(self.last.get("global_step", 0))

    def evaluations(self) -> list[dict]:
        """The sound lines of evaluation.jsonl."""
        try:
            return parse_lines((self.folder / EVALUATION_FILE).read_bytes())[0]
        except OSError:
            return []

    def pictures(self) -> dict[str, list[dict]]:
        """Tag -> {"step", "file", "prompts"} in order of steps; tags in the order in which they were drawn. What an
        earlier run has left past this one's start is not among them."""
        status, found, drawn = self.status(), defaultdict(list), []
        try:
            paths = sorted((self.folder / SAMPLES_DIR).iterdir())
        except OSError:
            return {}
        for path in paths:
            if not (match := PICTURE.fullmatch(path.name)):
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
        if not PICTURE.fullmatch(name) or "/" in name or not path.is_file():
            raise ConfigError("there is no such picture; reload the page")
        return path

    def status(self) -> dict:
        """What the run says of its start in control/status.json."""
        return _object(read_json(self.folder / CONTROL_DIR / STATUS_FILE, optional=True))

    def state(self) -> str:
        """`finished`, `training`, `stopped`, or `unknown` where the run is on another machine and says no more."""
        held = is_held(self.folder)  # looked at first: a run says that it has finished, and then lets go
        if has_finished(self.folder):
            return "finished"
        if held:
            return "training"
        here = self.status().get("host") in (None, socket.gethostname())
        return "stopped" if here else "unknown"

    def seconds_left(self) -> float | None:
        """Until the last update, by the median speed of the newest lines, with what drawing and saving take, without
        the first update of a start and the pause before it."""
        status = self.status()
        last, start = status.get("max_steps"), status.get("start_step", 0)
        steps, times = (np.array(one[-_LATE - 1 :]) for one in self.series["time"])
        with np.errstate(divide="ignore", invalid="ignore"):
            paces = np.diff(times) / np.diff(steps)
        begins = (steps[:-1] <= start) & (steps[1:] > start)
        paces = paces[np.isfinite(paces) & (paces > 0) & ~begins]
        if not last or not len(paces):
            return None
        return max(0.0, (last - self.step) * float(np.median(paces)) - max(0.0, time.time() - times[-1]))

    def config(self, optional: bool = False) -> dict:
        """All settings, as run.json has them. Raises DataError where it is not `optional` and cannot be read."""
        return _object(read_json(self.folder / RUN_FILE, optional))

    def recipe(self) -> str:
        """All settings as a recipe; empty where it is not there."""
        path = self.folder / RECIPE_FILE
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    # ---- what a run has recorded: what is damaged is refused

    @cached_property
    def records(self) -> list[dict]:
        """The lines of metrics.jsonl. Raises DataError naming a damaged one."""
        return read_metrics(self.folder / METRICS_FILE)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Those with a loss. Raises CheckpointError."""
        lines, last = [], 0
        try:
            for record in self.records:
                if "loss" in record:
                    lines.append(Line(last + 1, record["global_step"], record))
                    last = record["global_step"]
        except DataError as error:
            raise CheckpointError(f"{error}; without it nothing can be compared") from error
        return tuple(lines)

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """Those that verify, by step in rising order; others are passed over with a warning."""
        sound = {}
        for one in reversed(list_checkpoints(self.folder)):
            if problem := verify(one):
                get_logger().warning("passing over %s: %s", one, problem)
            else:
                sound[step_of(one)] = one
        return sound

    @cached_property
    def manifests(self) -> dict[int, dict]:
        return {step: read_manifest(one) for step, one in self.checkpoints.items()}

    @property
    def num_updates(self) -> int:
        return max([*self.checkpoints, *(line.last for line in self.lines)], default=0)

    def record_of(self, step: int) -> int:
        """The checkpoint that says how update `step` was made: the first one with it, or else the newest."""
        return next((one for one in self.checkpoints if one >= step), max(self.checkpoints))

    def manifest(self, step: int) -> dict:
        """The manifest that says how update `step` was made."""
        return self.manifests[self.record_of(step)]

    def num_ranks(self, step: int) -> int:
        """How many processes made update `step`; 1 where an older version has not recorded it."""
        return self.manifest(step).get("machine", {}).get("ranks", 1)

    def machine(self, step: int) -> dict:
        """What last bits of update `step` depend on: the kind of machine, versions, switches."""
        manifest = self.manifest(step)
        switches = manifest.get("config", {}).get("compute", {})
        switches = {name: value for name, value in switches.items() if name not in _NO_BITS}
        return {**manifest.get("machine", {}), **manifest.get("versions", {}), **switches}

    @cached_property
    def settings(self) -> dict:
        """What decides its samples and what is made of them, networks included, by name."""
        newest = max(self.checkpoints)
        known = read_model_file(self.checkpoints[newest]).settings() if has_model_file(self.checkpoints[newest]) else {}
        manifest = self.manifests[newest]
        return {"family": manifest["config"]["family"], **manifest["identity"], **known}

    def data(self, step: int) -> Fingerprint:
        """What update `step` was trained on. Raises CheckpointError where an older version has not recorded it."""
        path = self.checkpoints[self.record_of(step)] / "data.json.gz"
        if not path.is_file():
            raise CheckpointError(f"{path.parent} does not record its data; train with this version of ppldm")
        return Fingerprint.from_record(path.read_bytes())


def open_run(path) -> RunFolder:
    """The run in a folder, which has a sound checkpoint. Raises CheckpointError."""
    run = RunFolder(one_run(path).resolve())
    read_json_object(run.folder / RUN_FILE, CheckpointError, "give the --output_dir of a run")
    if not run.checkpoints:
        raise CheckpointError(f"{run.folder} has no sound checkpoint; train until it has one (--save_steps)")
    return run


def follow(runs: list[RunFolder], places: list[Path]) -> None:
    """Append each run in these folders that is not there yet, the newest first."""
    for place in places:
        known = {one.folder for one in runs}
        runs += [RunFolder(run, run == place) for run in find_runs(place) if run not in known]


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


def _object(value) -> dict:
    return value if isinstance(value, dict) else {}


def flatten(tree: dict, above: str = "") -> dict:
    """The values of a nested dict by dotted names."""
    found = {}
    for name, value in tree.items():
        found |= flatten(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found
