"""The folder of a run: made, held against a second run, and begun anew where that is meant.

`--overwrite_output_dir` starts anew once for what the user asked for, never for a job that is put back. A scheduler
gives a job that it stopped, or whose machine it lost, the same command again. So the folder keeps a record of its last
start, start.json: the scheduler's job, the command, whether the folder was begun anew, and whether the run was stopped
to be started again (exit status 75). `begins_anew` is the rule, a function of that record, the job and the command;
without a scheduler a command that is given again means what it says.

What a user asks of the run while it trains are files in RUN/control/ (docs/evaluation.md), made by `touch` or by
`ppldm watch --control`: sample_now, save_now, stop, and prompts.txt, which stays. The main process looks when an update
is settled and removes each order as it takes it, so that none is obeyed twice; the update's all-reduce tells it to the
other ranks. None of it changes a later update: drawing leaves no trace, a checkpoint reads the state, and a run that
stopped goes on with the same bits.
"""

import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import IntFlag
from pathlib import Path
from typing import Any

from ..config.training import TrainingOptions
from ..utils.checksums import checksum_json
from ..utils.errors import ConfigError, Interrupted, PpldmError
from ..utils.files import lock_folder, make_output_dir, read_json, remove_leftovers, write_json
from ..utils.log import get_logger
from ..utils.processes.ranks import SIGNS_DIR, World, barrier, leave_signs, waiting
from ..utils.variables import all_variables
from ..weights.folders import RUN_FILE, list_checkpoints
from .checkpoint import find_checkpoint, read_manifest, set_aside_after
from .metrics import EVALUATION_DIR, EVALUATION_FILE, METRICS_FILE

_held_folders = []  # open lock files: a run holds its folder as long as the process lives
SNAPSHOTS = "ema_snapshots"  # of averages, in the output folder
START_FILE = "start.json"
CONTROL_DIR = "control"
LOG_FILE = "logs.txt"  # the lines of the log, of all ranks and starts
PROMPTS_FILE = "prompts.txt"
STATUS_FILE = "status.json"  # what the page cannot know from elsewhere: updates in all, where the run is
MOST_PROMPTS = 64
MOST_BYTES = 64 << 10  # of the file of prompts
LAUNCH_LOGS = "launch"  # in the output folder, of each rank that `ppldm train` starts itself: there before the run is


@dataclass(frozen=True)
class Job:
    """A scheduler's job: a name that stays when it is put back, and whether the scheduler says that it was."""

    name: str
    was_put_back: bool = False


@dataclass(frozen=True)
class Start:
    """What is remembered of the last start in a folder. `job`: its name, None without a scheduler."""

    job: str | None
    command: str  # checksum of all settings
    overwritten: bool = False  # by this job's first start, or by this command
    clearing: bool = False  # the old run is being removed; to be finished
    stopped: bool = False  # status 75, and not come to its end since
    finished: bool = False  # come to its end, and its model exported


# Scheduler -> variables that make up the job's name, the first of which is always there; variable and values of a job
# that was put back. Of what a scheduler does not set, nothing is known.
_SCHEDULERS = {
    "job": (("PPLDM_JOB_ID",), None, ()),  # for schedulers that say nothing of themselves, Kubernetes for one
    "Slurm job": (("SLURM_JOB_ID", "SLURM_CLUSTER_NAME"), "SLURM_RESTART_COUNT", None),
    "PBS job": (("PBS_JOBID",), None, ()),
    "LSF job": (("LSB_JOBID", "LSB_JOBINDEX"), "LSB_RESTART", ("Y", "y")),
    "AWS Batch job": (("AWS_BATCH_JOB_ID",), None, ()),
    "Grid Engine job": (("JOB_ID", "SGE_TASK_ID", "SGE_O_HOST"), "RESTARTED", None),
}
_NEEDED_TOO = {"Grid Engine job": "SGE_O_HOST"}  # JOB_ID by itself may be anybody's


def find_job(environment: Mapping[str, str]) -> Job | None:
    """The scheduler's job that this process belongs to, by its environment."""
    for kind, (names, restarts, words) in _SCHEDULERS.items():
        if not environment.get(names[0]) or not environment.get(_NEEDED_TOO.get(kind, names[0])):
            continue
        value = environment.get(restarts or "", "")
        put_back = value in words if words is not None else value.isdecimal() and int(value) > 0
        return Job(f"{kind} {'.'.join(environment[name] for name in names if environment.get(name))}", put_back)
    return None


def checksum_of(config: dict) -> str:
    """The checksum of a run's settings, by which a command is known again."""
    settings = {name: value for name, value in config.items() if name != "ppldm"}
    return f"{checksum_json(settings):08x}"


def begins_anew(last: Start | None, job: Job | None, command: str) -> tuple[bool, str]:
    """Whether `--overwrite_output_dir` starts anew, and why not. Not where this job's first start did so already; where
    the scheduler says that it has put the job back; where this very command was stopped to be started again, by
    whatever job. What a kill interrupted is cleared to its end."""
    if last and last.clearing:
        return True, ""
    if job and last and last.job == job.name and last.overwritten:
        return False, f"{job.name} did so at its first start"
    if job and job.was_put_back:
        return False, f"{job.name} was put back into the queue"
    if last and last.stopped and last.command == command:
        return False, "this command was stopped here, with status 75, to be given again"
    return True, ""


def next_start(last: Start | None, job: Job | None, command: str, overwrites: bool, anew: bool) -> Start:
    """The record of this start, with what it takes over from the last one in the folder."""
    name = job.name if job else None
    goes_on = last is not None and not anew and last.command == command
    overwritten = overwrites or (last is not None and name is not None and last.job == name and last.overwritten)
    return Start(name, command, overwritten, stopped=goes_on and last.stopped)


def read_start(folder: Path) -> Start | None:
    """The record of the last start in a folder; None where there is none, or it is damaged."""
    found = read_json(folder / START_FILE)
    known = Start.__dataclass_fields__
    if not isinstance(found, dict) or "command" not in found or "job" not in found:
        return None
    return Start(**{name: value for name, value in found.items() if name in known})


def has_finished(folder: Path) -> bool:
    """Whether the run in a folder has come to its end."""
    start = read_start(folder)
    return start is not None and start.finished


def write_start(folder: Path, start: Start) -> None:
    """Record a start, durably."""
    write_json(folder / START_FILE, asdict(start))


def note_stopped(folder: Path, stopped: bool) -> None:
    """Record that the run was stopped to be started again, or that it has come to its end."""
    if last := read_start(folder):
        write_start(folder, replace(last, stopped=stopped, finished=not stopped))


def prepare_output(arguments: TrainingOptions, world: World, config: dict, store: Any) -> Path | None:
    """Create the output folder, hold it, mark it by a run.json, and return the checkpoint to resume from, if any
    (`find_checkpoint`). The main process decides for all ranks. `overwrite_output_dir` starts anew, once
    (`begins_anew`). A folder that holds something else is refused. store: the OutputStore of the folder, if it has one.
    Raises ConfigError, CheckpointError or OutputError."""
    folder = Path(arguments.output_dir)
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
        if chosen[0]:
            set_aside_after(folder, step)
        if not (folder / RUN_FILE).exists():
            write_json(folder / RUN_FILE, config)
        if not {"visualdl", "tensorboard"}.isdisjoint(arguments.report_to):
            make_output_dir(arguments.log_folder)
    if world.size > 1:
        with waiting(world):
            barrier(world)
            import paddle

            paddle.distributed.broadcast_object_list(chosen, src=0)
        if store and chosen[0] and not chosen[0].is_dir():
            store.bring(chosen[0].name)
    leave_signs(folder)
    return chosen[0]


@contextmanager
def refusals_undone(arguments: TrainingOptions):
    """A run that the block refuses leaves no folder where there was none, and the record of the start before it. A
    folder that this process does not hold, as another run has it, is left alone."""
    folder, held = Path(arguments.output_dir), len(_held_folders)
    was_there, last = folder.exists(), read_start(folder)
    try:
        yield
    except PpldmError as error:
        if len(_held_folders) > held and not isinstance(error, Interrupted):
            if not was_there:
                shutil.rmtree(folder, ignore_errors=True)
            elif last and not arguments.overwrite_output_dir:
                write_start(folder, last)
        raise


def _record_start(arguments: TrainingOptions, folder: Path, config: dict, store) -> None:
    """Begin anew where `overwrite_output_dir` means it, and leave a record of this start."""
    last, job, command = read_start(folder), find_job(all_variables()), checksum_of(config)
    overwrites, anew = arguments.overwrite_output_dir, False
    if overwrites:
        anew, why_not = begins_anew(last, job, command)
        if why_not:
            text = "--overwrite_output_dir: the run in %s goes on, as %s; remove the folder to start anew"
            get_logger().warning(text, folder, why_not)
    start = next_start(last, job, command, overwrites, anew)
    if anew:
        write_start(folder, replace(start, clearing=True))
        files = (METRICS_FILE, LOG_FILE, EVALUATION_FILE, EVALUATION_DIR)
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
        fix = "choose another folder, or add --overwrite_output_dir to write among them"
        raise ConfigError(f"--output_dir {folder} holds files that are not a run of ppldm; {fix}")


class Order(IntFlag):
    """Something that a run does once when asked. The file that asks has this name in small letters."""

    SAMPLE_NOW = 1
    SAVE_NOW = 2
    STOP = 4

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.name.lower()


NOTHING = Order(0)
