"""A request to end before the ranks have met ends all of them: under our launcher or started by hand."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from ports import free_port
from running import hear, running

SECONDS = 60.0  # in which they must have ended by themselves

RANK = """
import os, sys
from ppldm.utils.entry import entry
from ppldm.utils.processes import ranks

world, told = ranks.World.detect(), sys.argv[1:]
ranks._PATIENCE_SECONDS = 0.0

def start():
    if str(world.rank) == told[0]:  # slower than the others
        with open(told[1], "w") as fifo:
            fifo.write("here")
        os.read(os.pipe()[0], 1)  # for ever

with entry(start, meets=True):
    ranks.join(world)
"""
LATE = RANK.replace("entry(start,", "entry(").replace("    ranks.join", "    start()\n    ranks.join")


def environ_of(rank: int, ports: list[int]) -> dict:
    """What Paddle tells ranks that nobody launches."""
    places = [f"127.0.0.1:{port}" for port in ports]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": ",".join(places),
        "PADDLE_CURRENT_ENDPOINT": places[rank],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("told_is_slow", [True, False])
def test_one_of_two_ranks_started_by_hand_is_told(tmp_path, number, status, slow, told_is_slow):
    script, fifo = tmp_path / "rank.py", tmp_path / "fifo"
    script.write_text(LATE)  # the signal comes when Paddle is there
    os.mkfifo(fifo)
    ports = [free_port(), free_port()]
    ranks = [
        subprocess.Popen([sys.executable, script, str(slow), fifo], stderr=subprocess.PIPE, text=True,
                         env=environ_of(rank, ports))
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        hear(fifo, SECONDS)
        while f"waits for rank {slow} to start" not in ranks[1 - slow].stderr.readline():
            assert ranks[1 - slow].poll() is None
        told = slow if told_is_slow else 1 - slow
        ranks[told].send_signal(number)
        said = ranks[told].communicate(timeout=SECONDS)[1]
        assert ranks[told].returncode == status and "stopped by" in said.splitlines()[-1]
        if told_is_slow:  # the other one waits, and must end by itself
            said = ranks[1 - told].communicate(timeout=SECONDS)[1]
            assert ranks[1 - told].returncode == status
            assert said.splitlines()[-1].startswith(f"rank {told} was stopped before all ranks had met"), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_to_the_launcher_while_one_rank_is_slow_ends_all_in_one_line(tmp_path, number, status):
    script, fifo, log = tmp_path / "rank.py", tmp_path / "fifo", tmp_path / "log" / "workerlog.0"
    script.write_text(RANK)
    os.mkfifo(fifo)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ppldm.training.distributed.launch", "--nproc_per_node", "2", "--log_dir", log.parent,
         script, "1", fifo],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end = threading.Timer(SECONDS, launcher.kill)  # of a wait for a line that does not come
    end.start()
    try:
        hear(fifo, SECONDS)
        said = ""
        while "waits for rank 1 to start" not in said:  # rank 0's log is on the terminal
            line = launcher.stdout.readline()
            assert line, said
            said += line
        launcher.send_signal(number)
        after = launcher.communicate(timeout=SECONDS)[0]
        assert launcher.returncode == status, said + after
        assert len([line for line in after.splitlines() if "stopped" in line]) == len(after.splitlines()) == 1, after
        assert not running(tmp_path)
    finally:
        end.cancel()
        launcher.kill()
        launcher.communicate()


TALKATIVE = """
import os, sys, time
from ppldm.utils.entry import entry

with entry():
    for number in range(25):  # over more than one of the launcher's looks at the logs
        print("line", number, flush=True)
        time.sleep(0.1)
    open(sys.argv[1] + os.environ["PADDLE_TRAINER_ID"], "w").close()
"""


@pytest.mark.slow
def test_ranks_go_on_where_nobody_reads_what_they_say(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(TALKATIVE)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ppldm.training.distributed.launch", "--nproc_per_node", "2",
         "--log_dir", tmp_path / "log", script, tmp_path / "done"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    with launcher:
        assert launcher.stdout.readline()
        launcher.stdout.close()
        launcher.wait(SECONDS)
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}
