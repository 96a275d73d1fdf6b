"""The numbers of a run, read and checked again, by whoever wants to know them; no paddle here.

`metrics.jsonl` is the truth: one JSON object a line, `global_step` strictly rising. A resumed run first drops the lines
past the step it resumes from, so that the file is always one curve.
"""

import importlib.util
import json
import re
from pathlib import Path

from ..config.training import PACKAGES
from ..utils.errors import ConfigError, DataError
from ..utils.files import atomic_write, write_text
from ..utils.log import get_logger

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"  # what `ppldm evaluate --watch` finds, a process of its own
EVALUATION_DIR = "evaluation"  # its results and pictures
_LONGEST_LINE = 1 << 16  # bytes
SAMPLES_DIR = "samples"
PICTURE = re.compile(r"step-(\d+)-(.+)\.png")  # as the Reporter names them
VISUALDL_FILE = "vdlrecords.ppldm.log"
WANDB_ID_FILE, COMET_KEY_FILE = "wandb-run-id", "comet-experiment-key"
_MAX_OLD_PICTURES = 10  # of a tag, shown again in VisualDL after a resume; its page shows no more


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
    damaged or lost meanwhile are said in a warning and never stop a run; what the file held is set aside."""
    if not path.exists():
        if ends:
            get_logger().warning("%s is not there: the curve up to update %d is lost", path, ends)
        return []
    content = path.read_bytes()
    *lines, _unfinished = content.split(b"\n")
    kept, problem = [], None
    for number, line in enumerate(lines, 1):
        record = _parse(line, kept[-1]["global_step"] if kept else -1)
        if record is None and problem is None:
            aside = path.with_name(f"damaged-{path.name}")
            with atomic_write(aside) as file:
                file.write(content)
            is_text = line.decode("utf-8", "replace").encode("utf-8") == line
            kind = "a line of metrics" if is_text else "UTF-8 text"
            problem = f"line {number} is not {kind}; what it held is in {aside.name}"
        elif record is not None and record["global_step"] <= step:
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


def check_reporters(names: list[str]) -> None:
    """Raises ConfigError for a name that is not known, or whose package is not installed."""
    for name in names:
        if name == "none":
            continue
        if name not in PACKAGES:
            raise ConfigError(f"--report_to {name} is not known; use {', '.join(PACKAGES)}, all or none")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            fix = f"run pip install {PACKAGES[name]}, or omit {name}"
            raise ConfigError(f"--report_to {name} needs a package that is not installed; {fix}")


def old_pictures(output_dir: Path, start_step: int) -> list[tuple[int, str, Path]]:
    """(step, tag, file) of the newest pictures up to `start_step`, in order of their steps, and of one as they were
    drawn, the model's own guidance first."""
    by_tag: dict[str, list] = {}
    for path in sorted(Path(output_dir, SAMPLES_DIR).glob("step-*.png")):
        match = PICTURE.fullmatch(path.name)
        if match and int(match[1]) <= start_step:
            by_tag.setdefault(match[2], []).append((int(match[1]), match[2], path))
    newest = (picture for pictures in by_tag.values() for picture in sorted(pictures)[-_MAX_OLD_PICTURES:])
    return sorted(newest, key=lambda one: (one[0], one[2].stat().st_mtime_ns, one[1]))
