"""The folder of a run: made, held against a second run, begun anew where that is meant, and its checkpoint chosen."""

import dataclasses
import shutil
from pathlib import Path

import paddle

from ..config.training import TrainingOptions
from ..utils.errors import ConfigError
from ..utils.files import lock_folder, make_output_dir, remove_leftovers, write_json
from ..utils.log import get_logger
from ..utils.processes.rank_watch import SIGNS_DIR, barrier, leave_signs, waiting
from ..utils.processes.world import World
from ..utils.variables import all_variables
from ..weights.folders import list_checkpoints
from ..weights.runs import RUN_FILE
from .checkpoint.checkpoint import SNAPSHOTS, find_checkpoint, read_manifest, set_aside_after
from .monitor.metrics import EVALUATION_DIR, EVALUATION_FILE, METRICS_FILE
from .monitor.sinks import writes_files
from .start import LAUNCH_LOGS, begins_anew, checksum_of, find_job, next_start, read_start, write_start

_held_folders = []  # open lock files: a run holds its folder as long as the process lives


def prepare_output(arguments: TrainingOptions, world: World, config: dict) -> Path | None:
    """Create the output folder, hold it, mark it by a run.json, and return the checkpoint to resume from, if any.

    The main process decides for all ranks. `resume_from_checkpoint` says which (`find_checkpoint`): by default the
    newest sound one. `overwrite_output_dir` starts anew, once (`start.begins_anew`). A folder that holds something else
    is refused. Raises ConfigError, CheckpointError or OutputError.
    """
    folder = Path(arguments.output_dir)
    store = open_store(arguments) if arguments.output_store else None
    chosen = [None]
    if world.is_main:
        make_output_dir(folder)
        if store:
            store.bring_records(RUN_FILE)
        check_output(arguments, folder)
        _held_folders.append(lock_folder(folder))
        shutil.rmtree(folder / SIGNS_DIR, ignore_errors=True)  # of ranks that were killed
        if freed := remove_leftovers(folder):
            get_logger().info("removed %.3f GB that an interrupted run left unfinished", freed / 1e9)
        _record_start(arguments, folder, config, store)
        if store:
            store.bring_newest()
            store.push(wait=True)  # what other machines go on from must be there
        chosen = [find_checkpoint(folder, arguments.resume_from_checkpoint)]
        step = read_manifest(chosen[0])["global_step"] if chosen[0] else 0
        if step:
            set_aside_after(folder, step)
        if (folder / SNAPSHOTS).is_dir():
            from .averages.snapshots import remove_later

            remove_later(folder, step)
        if not (folder / RUN_FILE).exists():
            write_json(folder / RUN_FILE, config)
        if writes_files(arguments.report_to):
            make_output_dir(arguments.log_folder)
    if world.size > 1:
        with waiting(world):
            barrier(world)
            paddle.distributed.broadcast_object_list(chosen, src=0)
        if store and chosen[0] and not chosen[0].is_dir():
            store.bring(chosen[0].name)
    leave_signs(folder)
    return chosen[0]


def open_store(arguments: TrainingOptions):
    """The OutputStore of `--output_store`."""
    from .output_store import OutputStore

    return OutputStore(Path(arguments.output_dir), arguments.output_store)


def _record_start(arguments: TrainingOptions, folder: Path, config: dict, store) -> None:
    """Begin anew where `overwrite_output_dir` means it, and leave a record of this start."""
    last, job, command = read_start(folder), find_job(all_variables()), checksum_of(config)
    overwrites, anew = arguments.overwrite_output_dir, False
    if overwrites:
        anew, why_not = begins_anew(last, job, command)
        if why_not:
            get_logger().warning(
                "--overwrite_output_dir: the run in %s goes on, as %s; remove the folder to start anew", folder, why_not
            )
    start = next_start(last, job, command, overwrites, anew)
    if anew:
        write_start(folder, dataclasses.replace(start, clearing=True))
        files = (METRICS_FILE, EVALUATION_FILE, EVALUATION_DIR)
        for old in (*list_checkpoints(folder), *(folder / name for name in files)):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        if store:
            store.clear()
    write_start(folder, start)


def check_output(arguments: TrainingOptions, folder: Path) -> None:
    """Raises ConfigError for a folder with files that are not a run of ours."""
    ours = (folder / RUN_FILE).exists() or list_checkpoints(folder)
    others = [path for path in folder.iterdir() if path.name != LAUNCH_LOGS] if folder.is_dir() else []
    if not ours and not arguments.overwrite_output_dir and others:
        raise ConfigError(
            f"--output_dir {folder} holds files that are not a run of ppldm; "
            "choose another folder, or add --overwrite_output_dir to write among them"
        )
