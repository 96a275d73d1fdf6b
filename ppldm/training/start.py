"""When `--overwrite_output_dir` starts anew: once for what the user asked for, never for a job that is put back.

A scheduler gives a job that it stopped, or whose machine it lost, the same command again. So the output folder keeps a
record of its last start, start.json: the scheduler's job, the command, whether the folder was begun anew, and whether
the run was stopped to be started again (exit status 75). `begins_anew` is the rule, a function of that record, the job
and the command; without a scheduler a command that is given again means what it says.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..utils.checksums import checksum_json
from ..utils.files import read_json, write_json

START_FILE = "start.json"
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
    """Whether `--overwrite_output_dir` starts anew, and why not.

    Not where this job's first start did so already; where the scheduler says that it has put the job back; where this
    very command was stopped to be started again, by whatever job. What a kill interrupted is cleared to its end.
    """
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
    return Start(
        job=name,
        command=command,
        overwritten=overwrites or (last is not None and name is not None and last.job == name and last.overwritten),
        stopped=goes_on and last.stopped,
    )


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
