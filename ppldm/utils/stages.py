"""A chain of commands, each a process of its own, that goes on where it was stopped.

FOLDER/.done/NAME.json holds a stage's command and inputs, its seconds so far, and whether it is finished. A finished
stage is skipped; one that runs makes those after it run again. One that was begun with another command or other inputs
starts anew: what it and those after it have made, FOLDER/NAME, lies in FOLDER/.before from then on, or in .before-2,
.before-3 …: nothing that was kept is replaced.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from .errors import Interrupted, PpldmError
from .machine.devices import installed_kind
from .machine.resources import count_usable_cores, has_vectors

BEFORE, DONE = ".before", ".done"  # beside what the stages make
_GUESS_SECONDS = 60.0  # of stages on a usual machine that tell as much of this one's speed as the sums do
_START_SECONDS = 20.0  # of a stage, in which nothing is done of it
_USUAL_SPEED, _USUAL_CORES = 4400, 2  # sums of _NUMBERS that such a core (Intel Xeon) makes in a second
# Preset: seconds of an update at 48 pixels on two usual cores, with AVX-512 and without.
_UPDATES = {"autoencoder-tiny-cpu": (0.085, 0.14), "ldm-tiny-cpu": (0.135, 0.21)}
_NUMBERS, _SUMS, _MEASURED_S = 10_000, 10, 0.2
_BUSY, _MEASURED_BUSY_S = 1.3, 2.0  # so many times as long: others run too, and a moment says little


@dataclass(frozen=True)
class Stage:
    """One command, in which the word `python` is the interpreter that runs this. `seconds`: on two usual cores.
    `share_done`: how much of it, of 1, an earlier run has left to go on from. `inputs`: digests of what it reads beside
    what earlier stages have made. `updates`: of a training, in all."""

    name: str
    title: str
    command: tuple[str, ...]
    seconds: float
    share_done: Callable[[], float] = field(default=lambda: 0.0, compare=False)
    inputs: tuple[str, ...] = ()
    updates: int = 0

    @property
    def identity(self) -> tuple[str, ...]:
        return (*self.command, *self.inputs)


@dataclass(frozen=True)
class Record:
    """What is known of a stage: the identity it was begun with, its seconds so far, those that it would have taken on
    a usual machine that does nothing else, as far as `slowness` tells, and whether it is finished."""

    command: tuple[str, ...]
    seconds: float = 0.0
    finished: bool = False
    usual_seconds: float = 0.0


def as_flags(**values) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def command(*words, **flags) -> tuple[str, ...]:
    return ("python", "-m", "ppldm", *map(str, words), *as_flags(**flags))


def train_command(processes: int, log: Path, **flags) -> tuple[str, ...]:
    """The command that trains, in one process or in several, whose logs lie in the folder `log`."""
    launch = ("-m", "ppldm.training.distributed.launch", "--nproc_per_node", str(processes), "--log_dir", str(log))
    train = ("python", "-u", "-m", "ppldm", "train", *as_flags(**flags))
    return train if processes == 1 else ("python", "-u", *launch, *train)


def drawing_stages(out: Path, prompts: Path, title: str, inputs: tuple[str, ...] = ()) -> list[Stage]:
    """The last two: pictures of the prompts, in OUT/pictures, and the loss curve beside them."""
    drawing = {"model": out / "diffusion/pipeline", "prompts": prompts, "out": out / "pictures", "num_samples": 4}
    curve = command("plot-loss", out / "diffusion", out=out / "pictures/loss.png")
    pictures = Stage("pictures", title, command("generate", **drawing), 20, inputs=inputs)
    return [pictures, Stage("curve", "drawing the loss curve", curve, 2)]


def describe(stages: list[Stage], folder: Path) -> str:
    """What `run_stages` would do, for a shell: each command below its title and time; what is done is a comment."""
    records = {stage.name: _read(folder, stage) for stage in stages}
    begun = next((number for number, one in enumerate(stages) if not _is_done(one, records[one.name])), len(stages))
    lines = [line for one in stages[:begun] for line in (f"# {one.title}: done before", f"# {shlex.join(one.command)}")]
    if begun < len(stages) and (record := records[stages[begun].name]) and record.command != stages[begun].identity:
        why = _why_anew(stages[begun])
        lines.append(f"# {why}: all of this is made anew, and what was made is kept in {_place_aside(folder)}")
        records[stages[begun].name] = None
    records |= dict.fromkeys((one.name for one in stages[begun + 1 :]), None)
    for number, stage in enumerate(stages[begun:], start=begun):
        times = describe_time(*expect(stages, records, number))
        lines += [f"# {_label(stage, records[stage.name])} ({times})", shlex.join(stage.command)]
    return "".join(f"{line}\n" for line in lines)


def run_stages(stages: list[Stage], folder: Path, run: Callable[[Stage], None] | None = None) -> None:
    """Run what is not finished, in order, by `run` (`run_stage`), and tell on stderr what it is, how long it will take
    and what it took. Raises what `run` raises, OutputError where another process holds the folder."""
    from .files import lock_folder, make_output_dir

    make_output_dir(folder / DONE)
    with lock_folder(folder / DONE):
        records = {stage.name: _read(folder, stage) for stage in stages}
        report = []
        for number, stage in enumerate(stages, start=1):
            record, place = records[stage.name], f"[{number}/{len(stages)}]"
            if _is_done(stage, record):
                tell(f"{place} {stage.title}: done before")
                report.append(f"{record.seconds:6.0f} s  {stage.title} (before)")
                continue
            later = stages[number - 1 :]
            if record and record.command != stage.identity:
                kept = _set_aside(folder, later)
                tell(f"{_why_anew(stage)}: it and what follows are made anew; what they had made is kept in {kept}")
                records |= dict.fromkeys((one.name for one in later), None)
            _begin(folder, later, records)
            machine = slowness(sum(one.seconds for one in later))
            times = describe_time(*expect(stages, records, number - 1, machine))
            tell(f"{place} {_label(stage, records[stage.name])} ({times}, while the machine is as busy as now)")
            _run_timed(folder, stage, records, run or run_stage, machine)
            report.append(f"{records[stage.name].seconds:6.0f} s  {stage.title}")
    sys.stderr.write("".join(f"{line}\n" for line in report))


def _why_anew(stage: Stage) -> str:
    return f"stage {stage.name} was begun with {'other pictures or settings' if stage.inputs else 'another command'}"


def _is_done(stage: Stage, record: Record | None) -> bool:
    return bool(record and record.finished and record.command == stage.identity)


def _label(stage: Stage, record: Record | None) -> str:
    """A stage's title, and how much of it is there to go on from."""
    share = min(1.0, stage.share_done()) if record else 0.0
    return f"{stage.title}: goes on from {share:.0%}" if share else stage.title


def seconds_per_update(preset: str) -> float:
    """Of a small model, on two usual cores of this kind."""
    return _UPDATES[preset][0 if has_vectors("avx512f") else 1]


def slowness(about_s: float) -> float:
    """How many times as long as on two idle usual cores a training takes here now: by sums, and by how many others want
    the cores, of which each gets a share; 1 with another device. A look takes at most a tenth of about_s, or 0.2 s."""
    if not installed_kind().is_cpu:
        return 1.0
    found, longer = _slowness_for(_MEASURED_S), min(_MEASURED_BUSY_S, about_s / 10)
    return found if found < _BUSY or longer < _MEASURED_S else _slowness_for(longer)


def _slowness_for(seconds: float) -> float:
    started, began, others = time.perf_counter(), time.thread_time(), []
    while (passed := time.perf_counter() - started) < seconds:
        for _ in range(_SUMS):
            sum(range(_NUMBERS))
        others.append(_count_running() - 1)
    taken = time.thread_time() - began
    used = min(_USUAL_CORES, count_usable_cores())
    # Others have all cores of the machine, of which this process may use a few.
    waiting = max(passed / taken, (used + sum(others) / len(others)) / (os.cpu_count() or used))
    return _USUAL_SPEED * taken / (_SUMS * len(others)) * waiting * _USUAL_CORES / used


def _count_running() -> int:
    """How many threads of this machine run or wait for a core, this one among them; 1 where no /proc tells."""
    with suppress(OSError):
        found = re.search(r"^procs_running (\d+)", Path("/proc/stat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 1
    return 1


def expect(
    stages: list[Stage], records: dict[str, Record | None], number: int, machine: float = 1.0
) -> tuple[float, float]:
    """Seconds that stage `number` (from 0), and that it and all after it, will still take while this machine is
    `machine` times as slow as a usual one. What is left of a begun stage follows what that one has taken, others follow
    all that is done; the less there is of that, the more they are taken for usual ones."""
    begun = [(one, record) for one in stages if (record := records[one.name])]
    shares = {one.name: 1.0 if record.finished else min(1.0, one.share_done()) for one, record in begun}
    taken = {one.name: record.usual_seconds for one, record in begun if record.usual_seconds and shares[one.name]}
    usual = {one.name: one.seconds * shares[one.name] for one in stages if one.name in taken}
    speeds = [(both, sum(both.values(), _GUESS_SECONDS)) for both in (taken, usual)]

    def left(one: Stage) -> float:
        own = one.name in taken  # also what was stopped while it began
        spent, due = (both[one.name] + _START_SECONDS if own else of_all for both, of_all in speeds)
        return one.seconds * (1 - shares.get(one.name, 0)) * spent / due * machine

    return left(stages[number]), sum(map(left, stages[number:]))


def describe_time(seconds: float, seconds_to_the_end: float) -> str:
    def words(value: float) -> str:
        return f"about {value / 60:.0f} min" if value >= 90 else f"about {max(1, round(value / 10)) * 10} s"

    return f"{words(seconds)}, {words(seconds_to_the_end)} to the end"


def tell(text: str) -> None:
    sys.stderr.write(f"==> {text}\n")
    sys.stderr.flush()


def run_stage(stage: Stage, stdout=None) -> None:
    """Run a stage's command, which ends with this process. stdout: a file for what it prints. Ctrl-C, SIGTERM, SIGHUP
    end it by SIGTERM, so that it may save, a second one at once. Raises Interrupted then, PpldmError where it fails."""
    from .processes.signals import handled
    from .processes.workers import start_child, wait_for

    asked: list[int] = []
    process = None

    def pass_on(number: int, _frame) -> None:
        asked.append(number)
        if process:
            _kill(process, signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), pass_on):
        process = start_child([sys.executable if one == "python" else one for one in stage.command], stdout=stdout)
        if asked:
            _kill(process, signal.SIGTERM)
        status = wait_for(process)
        _kill(process, signal.SIGKILL)  # children that outlived it
    if asked:
        raise Interrupted("stopped; the same command again goes on from what is finished")
    if status:
        raise PpldmError(f"stage {stage.name} failed, see above; the same command again goes on from here")


def _kill(process: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _run_timed(folder: Path, stage: Stage, records: dict, run: Callable[[Stage], None], machine: float) -> None:
    """Run a stage and record its seconds, whether it ends well or not. machine: how slow this one is at its start."""
    started, before, finished = time.monotonic(), records[stage.name], False
    try:
        run(stage)
        finished = True
    finally:
        seconds = time.monotonic() - started
        usual = before.usual_seconds + seconds / ((machine + slowness(seconds)) / 2)
        records[stage.name] = Record(stage.identity, before.seconds + seconds, finished, usual)
        _write(folder, stage, records[stage.name])


def _begin(folder: Path, later: list[Stage], records: dict) -> None:
    """Record that the first of these stages runs, and that those after it are to run again."""
    for one in later:
        record = records[one.name]
        if record.finished if record else one is later[0]:
            records[one.name] = Record(record.command if record else one.identity)
            _write(folder, one, records[one.name])


def _place_aside(folder: Path) -> Path:
    """The first of .before, .before-2 … that is not there."""
    names = (BEFORE if number == 1 else f"{BEFORE}-{number}" for number in count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _set_aside(folder: Path, stages: list[Stage]) -> Path:
    """Move what these stages have made to a place of their own, which is returned."""
    before = _place_aside(folder)
    before.mkdir()
    for stage in stages:
        if (folder / stage.name).exists():
            os.replace(folder / stage.name, before / stage.name)
        _record_path(folder, stage).unlink(missing_ok=True)
    return before


def _record_path(folder: Path, stage: Stage) -> Path:
    return folder / DONE / f"{stage.name}.json"


def _read(folder: Path, stage: Stage) -> Record | None:
    path = _record_path(folder, stage)
    if not path.exists():  # as before the installation, when only Python is there
        return None
    from .files import read_json

    found = read_json(path)
    return Record(**{**found, "command": tuple(found["command"])}) if found else None


def _write(folder: Path, stage: Stage, record: Record) -> None:
    from .files import write_json

    write_json(_record_path(folder, stage), vars(record))
