"""Sinks of `--report_to` besides VisualDL: TensorBoard is told from which step on older points are void; a run of
Weights & Biases goes on under its number, and takes no step twice."""

import uuid
from pathlib import Path

from ..utils.files import write_text
from ..utils.variables import read
from .metrics import WANDB_ID_FILE


class TensorBoardSink:
    """An event file of this start; `purge_step` takes back what an earlier one wrote past `start_step`."""

    begins_anew = False

    def __init__(self, folder: Path, start_step: int):
        from tensorboardX import SummaryWriter

        suffix = f".after-{start_step}"
        self.writer = SummaryWriter(
            str(folder), purge_step=start_step and start_step + 1, flush_secs=10, filename_suffix=suffix
        )

    def add_numbers(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        for tag, value in numbers.items():
            self.writer.add_scalar(tag, value, step, walltime=seconds)

    def add_pictures(self, step: int, pictures: dict) -> None:
        for tag, picture in pictures.items():
            self.writer.add_image(tag, picture, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A run of Weights & Biases under the number kept in the output folder; WANDB_PROJECT, WANDB_MODE and the
    like are heeded."""

    begins_anew = False

    def __init__(self, output_dir: Path, start_step: int, config: dict):
        import wandb

        path = output_dir / WANDB_ID_FILE
        if start_step == 0 or not path.exists():
            write_text(path, uuid.uuid4().hex[:12] + "\n")
        self.picture = wandb.Image
        place = {"project": read("WANDB_PROJECT") or "ppldm", "name": output_dir.resolve().name, "dir": str(output_dir)}
        self.run = wandb.init(id=path.read_text().strip(), resume="allow", config=config, **place)

    def add_numbers(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def add_pictures(self, step: int, pictures: dict) -> None:
        self.run.log({tag: self.picture(picture) for tag, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()
