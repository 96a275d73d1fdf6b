"""Where curves and pictures are shown besides `metrics.jsonl`: VisualDL, TensorBoard, Weights & Biases.

Each shows one curve over any number of resumes. VisualDL shows one file of a folder, so its file is written again from
`metrics.jsonl` when a run resumes; TensorBoard is told from which step on older points are void; a run of Weights &
Biases goes on under its number, and takes no step twice.
"""

import importlib.util
import re
import uuid
from pathlib import Path

import numpy as np
from PIL import Image

from ...utils.errors import ConfigError
from ...utils.files import write_text

SAMPLES_DIR = "samples"
PICTURE = re.compile(r"step-(\d+)-(.+)\.png")  # as `picture_name` makes them
VISUALDL_FILE = "vdlrecords.ppldm.log"
WANDB_ID_FILE = "wandb-run-id"
_MAX_OLD_PICTURES = 10  # of a tag, shown again in VisualDL after a resume; its page shows no more

# The package that each name of --report_to needs.
PACKAGES = {"visualdl": "visualdl", "tensorboard": "tensorboardX", "wandb": "wandb"}


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


def writes_files(names: list[str]) -> bool:
    """Whether a place of `--report_to` is a folder: `--logging_dir`."""
    return not {"visualdl", "tensorboard"}.isdisjoint(names)


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
        """A line of `metrics.jsonl`, each number under train/<name>."""
        for name, value in _points(record):
            self.writer.add_scalar(name, value, record["global_step"], walltime=record["time"])

    def add_pictures(self, step: int, pictures: dict) -> None:
        """[H, W, 3] uint8 by tag."""
        for tag, picture in pictures.items():
            self.writer.add_image(tag, picture, step, dataformats="HWC")

    def close(self) -> None:
        """Write what is left."""
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
        """A line of `metrics.jsonl`, each number under train/<name>."""
        self.run.log(dict(_points(record)), step=record["global_step"])

    def add_pictures(self, step: int, pictures: dict) -> None:
        """[H, W, 3] uint8 by tag."""
        self.run.log({tag: self.picture(picture) for tag, picture in pictures.items()}, step=step)

    def close(self) -> None:
        """Write, or send, what is left."""
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
