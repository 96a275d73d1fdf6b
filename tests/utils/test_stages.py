"""Laws of a chain of commands: finished stages are skipped, later ones follow an earlier one, a stopped one goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from forking import state_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.demo.quickstart import plan
from ppldm.utils import stages as stages_module
from ppldm.utils.errors import Interrupted, PpldmError
from ppldm.utils.stages import Record, Stage, describe, describe_time, expect, run_stages, slowness

NAMES = ("data", "model", "pictures")


@pytest.fixture(autouse=True)
def usual_machine(monkeypatch):
    """Without the tenths of seconds that a look at the machine takes."""
    monkeypatch.setattr(stages_module, "slowness", lambda _: 1.0)


def make_stages(**commands) -> list[Stage]:
    """Three stages whose commands are their names, or what is given."""
    return [Stage(name, f"making {name}", ("python", "-c", commands.get(name, name)), 10) for name in NAMES]


class Runner:
    """Runs stages by noting their names; each leaves a folder of results. One of them may raise."""

    def __init__(self, folder, raising: dict[str, Exception] | None = None):
        self.folder, self.ran, self.raising = folder, [], raising or {}

    def __call__(self, stage: Stage) -> None:
        self.ran.append(stage.name)
        (self.folder / stage.name).mkdir(exist_ok=True)
        (self.folder / stage.name / stage.command[-1]).touch()
        if stage.name in self.raising:
            raise self.raising.pop(stage.name)


def run_again(folder, stages, **raising) -> list[str]:
    """The names of the stages that this run has run."""
    runner = Runner(folder, raising)
    run_stages(stages, folder, runner)
    return runner.ran


def test_finished_stages_are_skipped(tmp_path, capsys):
    assert run_again(tmp_path, make_stages()) == [*NAMES]
    capsys.readouterr()
    assert run_again(tmp_path, make_stages()) == []
    assert capsys.readouterr().err.count("done before") == 3


def test_another_command_starts_anew_and_takes_the_later_results_with_it(tmp_path, capsys):
    run_again(tmp_path, make_stages())
    capsys.readouterr()
    forecast = describe(make_stages(model="longer"), tmp_path)
    assert (
        "# stage model was begun with another command: all of this is made anew, and what was made is kept in"
        in forecast
    )
    assert run_again(tmp_path, make_stages(model="longer")) == ["model", "pictures"]
    said = capsys.readouterr().err
    assert "stage model was begun with another command: it and what follows are made anew; what they had made" in said
    # Nothing of the first one may be resumed, and nothing of it is lost.
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["longer"]
    assert [path.name for path in (tmp_path / ".before/model").iterdir()] == ["model"]
    assert run_again(tmp_path, make_stages(model="again")) == ["model", "pictures"]
    assert f"is kept in {tmp_path / '.before-2'}\n" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / ".before-2/model").iterdir()] == ["longer"]
    assert [path.name for path in (tmp_path / ".before/model").iterdir()] == ["model"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["data"]


@pytest.mark.parametrize("error", [PpldmError("no"), Interrupted("stopped"), OSError("no")])
def test_what_did_not_come_to_its_end_is_run_again_and_keeps_its_results(tmp_path, error):
    with pytest.raises(type(error)):
        run_again(tmp_path, make_stages(), model=error)
    (tmp_path / "model/checkpoint").touch()
    assert run_again(tmp_path, make_stages()) == ["model", "pictures"]
    assert (tmp_path / "model/checkpoint").exists()


def test_a_stage_that_was_begun_with_another_command_starts_anew(tmp_path):
    with pytest.raises(PpldmError):
        run_again(tmp_path, make_stages(model="longer"), model=PpldmError("no"))
    assert run_again(tmp_path, make_stages()) == ["model", "pictures"]
    assert not (tmp_path / "model/longer").exists()


def test_a_stage_that_runs_again_makes_those_after_it_run_again(tmp_path):
    run_again(tmp_path, make_stages())
    (tmp_path / ".done/data.json").unlink()
    with pytest.raises(PpldmError):
        run_again(tmp_path, make_stages(), data=PpldmError("no"))
    assert run_again(tmp_path, make_stages()) == [*NAMES]
    assert (tmp_path / "model/model").exists()


def test_the_seconds_of_a_stage_are_those_of_all_its_runs(tmp_path):
    with pytest.raises(PpldmError):
        run_again(tmp_path, make_stages(), data=PpldmError("no"))
    path = tmp_path / ".done/data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 1000}))
    run_again(tmp_path, make_stages())
    assert 1000 < json.loads(path.read_text())["seconds"] < 1100


def done(usual_seconds: float, finished: bool = True) -> Record:
    """Of a stage that took so long, of which a usual machine that does nothing else takes so long as is said."""
    return Record((), 7 * usual_seconds, finished, usual_seconds)


def test_the_time_left_follows_the_speed_of_this_machine_and_what_is_done():
    stages = [Stage(name, "", (), 100) for name in NAMES]
    assert expect(stages, dict.fromkeys(NAMES), 0) == (100, 300)
    assert expect(stages, dict.fromkeys(NAMES), 0, machine=1.5) == (150, 450)
    as_said = {"data": done(100), "model": None, "pictures": None}
    assert expect(stages, as_said, 1, machine=2) == (200, 400)
    assert expect(stages, as_said | {"model": done(500, False)}, 1, 2) == (200, 400)  # what is left is unknown
    killed = [Stage(name, "", (), 100, lambda: 0.5) for name in NAMES]  # before its seconds were noted
    assert expect(killed, as_said | {"model": Record(())}, 1, 2) == (100, 300)


# Of 320 s, with the seconds of its beginning, which are as many here.
@pytest.mark.parametrize("share, left", [(0.0, 100), (0.25, 75 * 320 / 45), (0.5, 50 * 320 / 70), (1.0, 0), (1.5, 0)])
def test_what_is_left_of_a_begun_stage_follows_its_own_seconds(share, left):
    stages = [Stage(name, "", (), 100, lambda: share) for name in NAMES]
    records = {"data": done(100), "model": done(300, False), "pictures": None}
    assert expect(stages, records, 1)[0] == pytest.approx(left)


def test_a_stage_that_was_stopped_at_its_beginning_is_not_taken_for_a_slow_one():
    stages = [Stage("model", "", (), 200, lambda: 0.01)]
    assert 198 < expect(stages, {"model": done(30, False)}, 0)[0] < 3 * 198


def test_the_more_is_done_the_more_it_tells_of_the_stages():
    told = []
    for seconds in (1, 10, 100, 1000):
        stages = [Stage("data", "", (), seconds), Stage("model", "", (), 100)]
        told.append(expect(stages, {"data": done(3 * seconds), "model": None}, 1)[0])
    assert told == sorted(told) and 100 < told[0] < told[-1] < 300
    assert told[0] == pytest.approx(100, rel=0.3) and told[-1] == pytest.approx(300, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.floats(0.2, 20), min_size=3, max_size=3))
def test_no_load_that_comes_and_goes_makes_the_time_left_wrong(loads):
    """What else the machine does while a stage runs is no property of the stages."""
    stages, records = [Stage(name, "", (), 100) for name in NAMES], dict.fromkeys(NAMES)
    for number, load in enumerate(loads):
        assert expect(stages, records, number, load)[0] == pytest.approx(100 * load)
        records[stages[number].name] = Record((), 100 * load, True, 100)


def test_a_stage_is_told_by_what_a_free_machine_takes(tmp_path, monkeypatch):
    now, speeds = [0.0], iter([2.0, 4.0])  # before and after the stage
    monkeypatch.setattr(stages_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(stages_module, "slowness", lambda _: next(speeds))
    run_stages(make_stages()[:1], tmp_path, lambda stage: now.__setitem__(0, now[0] + 30))
    record = json.loads((tmp_path / ".done/data.json").read_text())
    assert (record["seconds"], record["usual_seconds"]) == (30, 10)


def measured(
    monkeypatch, cores: int, others: int, seconds_of_ten_sums=lambda now: 2e-4, usable: int | None = None, about_s=99
) -> tuple[float, float]:
    """(slowness, how long it was looked at) where so many threads of others want the cores of a machine."""
    now = [0.0]

    def tick() -> float:
        now[0] += seconds_of_ten_sums(now[0])
        return now[0]

    monkeypatch.setattr(stages_module, "time", SimpleNamespace(perf_counter=tick, thread_time=lambda: now[0]))
    monkeypatch.setattr(stages_module, "count_usable_cores", lambda: usable or cores)
    monkeypatch.setattr(stages_module.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(stages_module, "_count_running", lambda: 1 + others)
    monkeypatch.setattr(stages_module, "_NUMBERS", 1)  # the clock says how long a sum takes
    return slowness(about_s), now[0]


def test_the_machine_is_known_by_its_sums_and_its_cores(monkeypatch):
    assert measured(monkeypatch, 1, 0)[0] == pytest.approx(2 * 2e-5 * 4400, rel=0.01)
    assert measured(monkeypatch, 8, 0)[0] == pytest.approx(2e-5 * 4400, rel=0.01)


@pytest.mark.parametrize("cores, others, share", [(1, 1, 2), (2, 1, 1.5), (2, 4, 3), (8, 6, 1), (8, 14, 2)])
def test_a_core_that_others_want_is_shared(monkeypatch, cores, others, share):
    free = measured(monkeypatch, cores, 0)[0]
    assert measured(monkeypatch, cores, others)[0] == pytest.approx(share * free, rel=0.01)


def test_others_of_a_large_machine_have_its_other_cores_too(monkeypatch):
    """Of a container with two cores of 64: what runs beside it takes none of its own."""
    free = measured(monkeypatch, 64, 0, usable=2)[0]
    assert measured(monkeypatch, 64, 60, usable=2)[0] == pytest.approx(free, rel=0.01)
    assert measured(monkeypatch, 64, 126, usable=2)[0] == pytest.approx(2 * free, rel=0.01)


@pytest.mark.parametrize(
    "text, count", [("cpu  1 2\nprocs_running 7\nprocs_blocked 3\n", 7), ("cpu  1 2\n", 1), (None, 1)]
)
def test_those_that_run_are_counted(monkeypatch, tmp_path, text, count):
    if text:
        (tmp_path / "stat").write_text(text)
    monkeypatch.setattr(stages_module, "Path", lambda place: tmp_path / "stat")
    assert stages_module._count_running() == count


def test_a_busy_machine_is_looked_at_for_longer(monkeypatch):
    """A burst of other work at the beginning is not what a training of minutes will have beside it."""
    found, looked = measured(monkeypatch, 2, 0, lambda now: 0.1 if now < 0.2 else 2e-3)
    assert found == pytest.approx(2e-4 * 4400, rel=0.01) and looked > 2
    for about_s, most in ((0.5, 0.4), (9, 1.4)):  # and for no longer than a tenth of what is asked about
        assert measured(monkeypatch, 2, 0, lambda now: 0.1 if now < 0.2 else 2e-3, about_s=about_s)[1] < most


def test_an_update_takes_less_where_networks_compute_by_ppldms_operators(monkeypatch, tmp_path):
    found = []
    for has_them in (True, False):
        monkeypatch.setattr(stages_module, "has_vectors", lambda kind, has_them=has_them: has_them)
        stages = {one.name: one.seconds for one in plan(tmp_path, 1000, 1000, 2)}
        found.append((stages["diffusion"], stages["autoencoder"]))
    assert all(fast < slow for fast, slow in zip(*found, strict=True))


@pytest.mark.parametrize(
    "seconds, words", [(0, "about 10 s"), (44, "about 40 s"), (89, "about 90 s"), (90, "about 2 min"), (400, "7 min")]
)
def test_times_in_words(seconds, words):
    assert words in describe_time(seconds, 1000)


def test_the_description_is_what_a_shell_reads(tmp_path):
    text = describe([Stage("a", "making a", ("python", "-c", "a b'c"), 10)], tmp_path)
    assert text == "# making a (about 10 s, about 10 s to the end)\npython -c 'a b'\"'\"'c'\n"


@pytest.mark.parametrize("done", range(4))
@pytest.mark.parametrize("changed", [*NAMES, None])
def test_the_description_leaves_what_the_run_would_leave(tmp_path, done, changed):
    first = make_stages()
    for stage in first[done : done + 1]:  # begun, and not finished
        with pytest.raises(PpldmError):
            run_again(tmp_path, first, **{stage.name: PpldmError("no")})
    if done == len(NAMES):
        run_again(tmp_path, first)
    then = make_stages(**({changed: "other"} if changed else {}))
    commands = [line for line in describe(then, tmp_path).splitlines() if not line.startswith("#")]
    ran = run_again(tmp_path, then)
    assert commands == [f"python -c {stage.command[-1]}" for stage in then if stage.name in ran]


def test_what_goes_on_says_from_where(tmp_path, capsys):
    stages = [replace(one, share_done=lambda: 0.4) for one in make_stages()]
    with pytest.raises(PpldmError):
        run_again(tmp_path, stages[:1], data=PpldmError("no"))
    assert "# making data: goes on from 40% (about 10 s," in describe(stages, tmp_path)
    assert "# making model (about 10 s, " in describe(stages, tmp_path)
    capsys.readouterr()
    run_again(tmp_path, stages)
    assert "[1/3] making data: goes on from 40% (" in capsys.readouterr().err


PROGRAM = """
import sys
from pathlib import Path
from ppldm.utils.stages import Stage, run_stages
from ppldm.utils.errors import exit_on_error
with exit_on_error():
    run_stages([Stage("a", "making a", ("python", "-c", sys.argv[2]), 1)], Path(sys.argv[1]))
"""
# Neither ends by itself: what is seen to end was ended.
SLOW = """
import signal, subprocess, sys, time
from pathlib import Path
def stop(*_):
    Path("said").write_text("saved")
    if {obeys}:
        sys.exit(75)
signal.signal(signal.SIGTERM, stop)
child = subprocess.Popen(["sleep", "infinity"], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
Path("begun").write_text(str(child.pid))
while True:  # one long sleep might begin just after a signal, which would then wait for its end
    time.sleep(0.05)
"""
LIMIT_S = 60


@pytest.fixture
def start(tmp_path):
    """Start a chain of one stage that runs a program, until that has begun; nothing of it outlives the test."""
    started = []

    def start(program: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "out"), program], cwd=tmp_path, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        wait_until(lambda: process.poll() is not None or read(tmp_path / "begun"))
        assert process.poll() is None
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        with suppress(ProcessLookupError, ValueError):
            os.killpg(os.getpgid(int(read(tmp_path / "begun"))), signal.SIGKILL)


def read(path) -> str:
    return path.read_text() if path.exists() else ""


def wait_until(is_so) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_ends(pid: int) -> None:
    wait_until(lambda: state_of(pid) == "Z")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to_group", [False, True], ids=["process alone", "as Ctrl-C does"])
def test_a_signal_lets_the_stage_save_and_leaves_no_child(tmp_path, start, number, to_group):
    process = start(SLOW.format(obeys=True))
    (os.killpg if to_group else os.kill)(process.pid, number)
    wait_until(lambda: process.poll() is not None)  # not for the end of stderr, which a child that is left has too
    assert_ends(int(read(tmp_path / "begun")))
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 130 and read(tmp_path / "said") == "saved"
    assert "the same command again goes on from what is finished" in said and "Traceback" not in said


def test_a_second_signal_does_not_wait(tmp_path, start):
    process = start(SLOW.format(obeys=False))
    process.send_signal(signal.SIGINT)
    wait_until(lambda: read(tmp_path / "said"))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.wait(timeout=LIMIT_S)
    assert process.returncode == 130
    assert_ends(int(read(tmp_path / "begun")))


def test_a_stage_ends_with_the_chain(tmp_path, start):
    program = "import os, time\nopen('begun', 'w').write(str(os.getpid()))\nwhile True: time.sleep(60)"
    process = start(program)
    process.kill()
    process.wait()  # not for the end of stderr, which the stage has too
    assert_ends(int(read(tmp_path / "begun")))


def test_a_failed_stage_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path, "raise SystemExit(3)"], capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "error: stage a failed, see above; the same command again goes on from here"


def test_two_chains_do_not_share_a_folder(tmp_path, start, monkeypatch):
    from ppldm.utils import files

    process = start(SLOW.format(obeys=True))
    waits = files.lock_folder
    monkeypatch.setattr(files, "lock_folder", lambda folder: waits(folder, wait_seconds=0))
    with pytest.raises(PpldmError, match="another process is writing"):
        run_again(tmp_path / "out", make_stages())
    process.terminate()
    process.communicate(timeout=LIMIT_S)
