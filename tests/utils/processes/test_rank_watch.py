"""Who is late is told apart by the signs of life; a wait that is too long ends the process, another one does not."""

import subprocess
import sys
import time

import pytest

from ppldm.utils.errors import TrainingError
from ppldm.utils.processes import ranks
from ppldm.utils.processes.ranks import RankWatch, World, leave_signs, waiting, watch_ranks


@pytest.fixture
def watch(tmp_path):
    watch = RankWatch(World(0, 4), 1000.0)  # a pause of 5 s
    watch.folder = tmp_path

    def leave(signs: dict, now: float):
        for rank, sign in signs.items():
            (tmp_path / str(rank)).write_text(sign)
        watch.look(now)

    return watch, leave


def test_a_silent_rank_is_named_before_one_that_is_behind(watch):
    watch, leave = watch
    leave({1: "7 3", 2: "7 2", 3: "7 3"}, 0.0)
    assert watch.describe_late(0.0, 3) == "rank 2, which lives and has something else to do: read data, save or compute"
    assert watch.describe_late(0.0, 4).startswith("ranks 1, 2, 3, which live and have ")
    assert watch.describe_late(0.0, 2) == "the other ranks"
    leave({1: "7 3", 2: "8 2", 3: "8 3"}, 15.0)
    assert watch.describe_late(15.0, 3).startswith("rank 2, which lives")  # 15 s are no silence yet
    leave({1: "7 3", 2: "9 2", 3: "9 3"}, 15.1)
    assert watch.describe_late(15.1, 3) == "rank 1, which gives no sign of life: stopped, cut off or gone"
    leave({1: "7 3", 2: "9 2", 3: "10 3"}, 31.0)
    assert watch.describe_late(31.0, 3).startswith("ranks 1, 2, which give no sign")
    leave({1: "8 3", 2: "10 3", 3: "11 3"}, 32.0)
    assert watch.describe_late(32.0, 3) == "the other ranks"


def test_a_rank_that_never_came_is_silent(watch):
    watch, leave = watch
    leave({1: "7 3", 2: "7 3"}, 0.0)
    leave({1: "8 3", 2: "8 3"}, 16.0)
    assert watch.describe_late(16.0, 3).startswith("rank 3, which gives no sign of life")


def test_a_sign_that_is_just_being_written_is_the_last_one(watch):
    watch, leave = watch
    leave({1: "7 3", 2: "7 2", 3: "7 3"}, 0.0)
    leave({1: "8 3", 2: "", 3: "8 3"}, 5.0)
    assert watch.describe_late(5.0, 3).startswith("rank 2, which lives")
    leave({1: "9 3", 2: "", 3: "9 3"}, 15.1)  # a file that stays empty is no sign of life
    assert watch.describe_late(15.1, 3).startswith("rank 2, which gives no sign")


RANK = """
import sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from ppldm.utils.processes.ranks import SIGNS_DIR, leave_signs, waiting, watch_ranks
from ppldm.utils.processes.ranks import World

world = World({rank}, 2)
watch_ranks(world, {seconds})
leave_signs({folder!r})
while not Path({folder!r}, SIGNS_DIR, str(1 - {rank})).exists():  # however late the other one starts
    time.sleep(0.01)
for _ in range(4):
    with waiting(world):
        with waiting(world):
            time.sleep(0.15)
        time.sleep(0.15)
print("short ones are none", flush=True)
if {hangs}:
    with waiting(world):
        time.sleep(60)
time.sleep(1.5)
"""


def start(folder, rank, hangs):
    code = RANK.format(path=sys.path, rank=rank, seconds=1.0, folder=str(folder), hangs=hangs)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_wait_that_is_too_long_ends_the_process_in_one_line(tmp_path):
    waits, sleeps = start(tmp_path, 0, True), start(tmp_path, 1, False)
    out, told = waits.communicate(timeout=60)
    assert (waits.returncode, out) == (1, "short ones are none\n"), told
    assert told.startswith("error: rank 0 has waited 1 s for rank 1, which ") and told.count("\n") == 1
    assert told.endswith("and --rank_timeout allows more\n")
    assert sleeps.communicate(timeout=60)[1] == "" and sleeps.returncode == 0


def test_signs_end_and_are_removed(watch, tmp_path, monkeypatch):
    watch, _ = watch
    watch.folder = None
    folder = tmp_path / ".ranks"
    watch.leave_signs(folder)
    until = time.monotonic() + 120
    while not (folder / "0").exists() and time.monotonic() < until:
        time.sleep(0.01)
    monkeypatch.setattr(ranks, "_watch", watch)
    monkeypatch.setattr(ranks, "barrier", lambda world: None)
    ranks.remove_signs(World(1, 4))
    assert folder.is_dir()  # the main rank's to remove
    watch.folder = folder
    ranks.remove_signs(World(0, 4))
    assert not folder.exists() and watch.folder is None
    watch.look(0.0)
    assert watch.describe_late(100.0, 3) == "the other ranks"


def test_without_a_limit_nothing_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_watch", None)
    watch_ranks(World(0, 2), 0)
    watch_ranks(World(), 5)
    leave_signs(tmp_path)
    assert ranks._watch is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text, waited, told",
    [
        ("[/paddle/third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error", 0, "rank 1 has lost the connection"),
        ("(InvalidArgument) TCP receive error. Details: reset", 0, "rank 1 has lost the connection"),
        ("[/paddle/third_party/gloo/gloo/x.cc:80] TIMEOUT", 30, "rank 1 has waited for the other ranks, for longer"),
        ("[/paddle/third_party/gloo/gloo/x.cc:80] TIMEOUT", 0, "rank 1 has lost the connection"),
        ("shapes differ", 0, None),
    ],
)
def test_a_lost_connection_is_one_line_and_a_bug_is_itself(text, waited, told):
    with pytest.raises(TrainingError if told else RuntimeError, match=f"^{told or text}"), waiting(World(1, 2)):
        ranks._own.since -= waited
        raise RuntimeError(text)
    with pytest.raises(RuntimeError), waiting(World()):
        raise RuntimeError(text)
