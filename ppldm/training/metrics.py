"""Numbers of a run: the file and the lines they go to, and their reading again.

`metrics.jsonl` is the truth: one JSON object a line, `global_step` strictly rising. A resumed run first drops the lines
past the step it resumes from, so that the file is always one curve.

The sinks show the same elsewhere, each one curve over any number of resumes. VisualDL shows one file of a folder, which
is written again from `metrics.jsonl` when a run resumes; TensorBoard is told from which step on older points are void;
a run of Weights & Biases goes on under its number, and takes no step twice.
"""

import importlib.util
import json
import re
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from ..utils.errors import ConfigError, DataError
from ..utils.files import atomic_write, naming_full_disk, write_text
from ..utils.log import get_logger

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"  # what `ppldm evaluate --watch` finds, a process of its own
EVALUATION_DIR = "evaluation"  # its results and pictures
_LONGEST_LINE = 1 << 16  # bytes
NUM_QUARTERS = 4  # of the timesteps, by each of which the loss is logged; the first has the least noise
SAMPLES_DIR = "samples"
PICTURE = re.compile(r"step-(\d+)-(.+)\.png")  # as `picture_name` makes them
VISUALDL_FILE = "vdlrecords.ppldm.log"
WANDB_ID_FILE = "wandb-run-id"
_MAX_OLD_PICTURES = 10  # of a tag, shown again in VisualDL after a resume; its page shows no more

# The package that each name of --report_to needs.
PACKAGES = {"visualdl": "visualdl", "tensorboard": "tensorboardX", "wandb": "wandb"}


def log_metrics(path: Path, step: int, values: dict, sinks: Iterable = ()) -> None:
    """Append {"global_step": step, "time": seconds since 1970, **values} to the file, and show it in the log and in
    each sink. NaN is written as null."""
    record = {name: value if np.isfinite(value) else None for name, value in values.items()}
    record = {"global_step": step, "time": round(time.time(), 3), **record}
    with naming_full_disk(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    for sink in sinks:
        sink.add_numbers(record)
    get_logger().info("%s", describe(step, values))


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


def picture_name(step: int, tag: str) -> str:
    """The name of the file of a sample picture."""
    return f"step-{step:06d}-{tag}.png"


def check_reporters(names: list[str]) -> None:
    """Raises ConfigError for a name that is not known, or whose package is not installed."""
    for name in names:
        if name == "none":
            continue
        if name not in PACKAGES:
            raise ConfigError(f"--report_to {name} is not known; use {', '.join(PACKAGES)} or none")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"--report_to {name} needs a package that is not installed; "
                f"run pip install {PACKAGES[name]}, or omit {name}"
            )


def open_sinks(
    names: list[str], output_dir: Path, logging_dir: Path, past: list[dict], config: dict, first: dict | None = None
) -> list:
    """The sinks of `--report_to`. `past`: the records of `metrics.jsonl` before this start. `config`: the settings.
    `first`: pictures by tag, [H, W, 3] uint8, of the run and not of an update: shown at step 0, once."""
    start_step = past[-1]["global_step"] if past else 0
    makers = {
        "visualdl": lambda: VisualDLSink(logging_dir, past, old_pictures(output_dir, start_step)),
        "tensorboard": lambda: TensorBoardSink(logging_dir, start_step),
        "wandb": lambda: WandbSink(output_dir, start_step, config),
    }
    sinks = [makers[name]() for name in dict.fromkeys(names) if name != "none"]
    for sink in sinks:
        if first and (start_step == 0 or sink.begins_anew):
            sink.add_pictures(0, first)
    return sinks


class VisualDLSink:
    """VisualDL's record file, from the first step of the run on. prefix: of the names of numbers."""

    begins_anew = True  # at every start

    def __init__(self, folder: Path, past: list[dict], pictures: list[tuple[int, str, Path]], prefix: str = "train"):
        from visualdl import LogWriter

        self.prefix = prefix
        Path(folder, VISUALDL_FILE).unlink(missing_ok=True)
        self.writer = LogWriter(logdir=str(folder), file_name=VISUALDL_FILE, flush_secs=10)
        for record in past:
            self.add_numbers(record)
        for step, tag, path in pictures:
            self.writer.add_image(tag, np.asarray(Image.open(path)), step)

    def add_numbers(self, record: dict) -> None:
        """A line of `metrics.jsonl`, each number under <prefix>/<name>."""
        for name, value in _points(record, self.prefix):
            self.writer.add_scalar(name, value, record["global_step"], walltime=round(record["time"] * 1000))

    def add_pictures(self, step: int, pictures: dict) -> None:
        """[H, W, 3] uint8 by tag."""
        for tag, picture in pictures.items():
            self.writer.add_image(tag, picture, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class TensorBoardSink:
    """An event file of this start; `purge_step` takes back what an earlier one wrote past `start_step`."""

    begins_anew = False

    def __init__(self, folder: Path, start_step: int):
        from tensorboardX import SummaryWriter

        suffix = f".after-{start_step}"
        self.writer = SummaryWriter(
            str(folder), purge_step=start_step and start_step + 1, flush_secs=10, filename_suffix=suffix
        )

    def add_numbers(self, record: dict) -> None:
        for name, value in _points(record):
            self.writer.add_scalar(name, value, record["global_step"], walltime=record["time"])

    def add_pictures(self, step: int, pictures: dict) -> None:
        for tag, picture in pictures.items():
            self.writer.add_image(tag, picture, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A run of Weights & Biases under the number kept in the output folder; WANDB_MODE and the like are heeded."""

    begins_anew = False

    def __init__(self, output_dir: Path, start_step: int, config: dict):
        import wandb

        path = output_dir / WANDB_ID_FILE
        if start_step == 0 or not path.exists():
            write_text(path, uuid.uuid4().hex[:12] + "\n")
        self.picture = wandb.Image
        self.run = wandb.init(
            id=path.read_text().strip(),
            resume="allow",
            project="ppldm",
            name=output_dir.resolve().name,
            dir=str(output_dir),
            config=config,
        )

    def add_numbers(self, record: dict) -> None:
        self.run.log(dict(_points(record)), step=record["global_step"])

    def add_pictures(self, step: int, pictures: dict) -> None:
        self.run.log({tag: self.picture(picture) for tag, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


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


def _points(record: dict, prefix: str = "train"):
    for name, value in record.items():
        if name not in ("global_step", "time", "data_crc32") and value is not None:
            yield f"{prefix}/{name}", value
