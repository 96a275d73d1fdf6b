"""Sinks of `--report_to` besides VisualDL: TensorBoard is told from which step on older points are void; a run of
Weights & Biases goes on under its number, and takes no step twice; an experiment of Comet goes on under its key, and
takes updates that are done again a second time, at the same values."""

import uuid
from pathlib import Path

from ..utils.files import write_text
from ..utils.variables import read, set_for_libraries
from .metrics import COMET_KEY_FILE, WANDB_ID_FILE


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

        number = _kept_number(output_dir / WANDB_ID_FILE, start_step, 12)
        self.picture = wandb.Image
        place = {"project": read("WANDB_PROJECT") or "ppldm", "name": output_dir.resolve().name, "dir": str(output_dir)}
        self.run = wandb.init(id=number, resume="allow", config=config, **place)

    def add_numbers(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def add_pictures(self, step: int, pictures: dict) -> None:
        self.run.log({tag: self.picture(picture) for tag, picture in pictures.items()}, step=step)

    def close(self) -> None:
        self.run.finish()


class CometSink:
    """An experiment of Comet under the key kept in the output folder. COMET_API_KEY, COMET_PROJECT_NAME and the like
    are heeded; with COMET_START_ONLINE=false it is a .zip in the output folder, which `comet upload` sends. What Comet
    would take from the process by itself stays here: command line, code, the terminal's lines, its own errors."""

    begins_anew = False

    def __init__(self, output_dir: Path, start_step: int, config: dict):
        set_for_libraries({"COMET_ERROR_TRACKING_ENABLE": "false"})
        import comet_ml

        names = ("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details")
        silent = {**dict.fromkeys(names, False), "auto_output_logging": False, "display_summary_level": 0}
        place = read("COMET_OFFLINE_DIRECTORY") or str(output_dir)
        own = comet_ml.ExperimentConfig(name=output_dir.resolve().name, offline_directory=place, **silent)
        project = read("COMET_PROJECT_NAME") or "ppldm"
        key = _kept_number(output_dir / COMET_KEY_FILE, start_step, 32)
        self.run = comet_ml.start(project_name=project, experiment_key=key, experiment_config=own)
        self.run.log_parameters(config)

    def add_numbers(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        self.run.log_metrics(numbers, step=step)

    def add_pictures(self, step: int, pictures: dict) -> None:
        for tag, picture in pictures.items():
            self.run.log_image(picture, name=tag, step=step)

    def close(self) -> None:
        self.run.end()


def _kept_number(path: Path, start_step: int, length: int) -> str:
    """The number in a file under which a run is known elsewhere; a new one where it begins."""
    if start_step == 0 or not path.exists():
        write_text(path, uuid.uuid4().hex[:length] + "\n")
    return path.read_text().strip()
