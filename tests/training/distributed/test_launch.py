"""Whatever ends one of two ranks, the terminal says which and why, and nothing goes on running."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from paddle.distributed.launch.utils.kv_server import KVServer
from ports import free_port
from running import running

from ppldm.training.distributed.launch import SILENCE_SECONDS, Peers, WatchedController, meet_at
from ppldm.utils.errors import ConfigError

IMPATIENT = (sys.executable, Path(__file__).parents[2] / "helpers/impatient.py", "ppldm.training.distributed.launch")

RANK = """
import itertools, os, signal, sys, threading
from ppldm.utils.entry import entry

with entry():
    import paddle
    from ppldm.training.distributed.rank_checks import check_ranks
    from ppldm.training.report import IntervalMetrics
    from ppldm.training.train import timed_batches
    from ppldm.utils.errors import DataError
    from ppldm.utils.processes.ranks import leave_signs, waiting, watch_ranks
    from ppldm.utils.processes.ranks import barrier
    from ppldm.utils.processes.ranks import World

    paddle.distributed.init_parallel_env()
    world, end = World.detect(), sys.argv[1]
    watch_ranks(world, 4.0 if end.endswith("stopped") else 0)
    leave_signs(os.path.dirname(__file__))

    def batches():
        for step in itertools.count():
            if step == 3 and world.rank == (end != "main stopped"):
                if end == "hang":
                    threading.Event().wait()
                elif end.endswith("stopped"):
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif end == "error":
                    raise DataError("a bad part")
                elif end == "bug":
                    raise KeyError("a bug")
            if step == 3 and end == "done":
                return
            yield step

    weights = {"first": paddle.ones([3]), "second": paddle.ones([3])}
    seconds = 0 if end.endswith("stopped") else 2.0
    least = int(open("/proc/sys/net/ipv4/ip_local_port_range").read().split()[0])  # of what a connection may be given
    assert int(os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[2]) < least
    for step in timed_batches(batches(), IntervalMetrics(world), seconds, world.rank):
        print("step", step, flush=True)
        with waiting(world):
            barrier(world)
            paddle.distributed.all_reduce(paddle.ones([1]))
        if end == "differ" and step == 2 and world.rank == 1:
            weights["second"][1] += 1e-7
        check_ranks(weights, step, world)
    barrier(world)
"""

ENDS = {
    "done": (0, None),
    "killed": (137, "rank 1 failed first: it was killed by SIGKILL (most often as memory ran out"),
    "error": (1, "  [1] error: a bad part"),
    "bug": (1, "  [1] KeyError: 'a bug'"),
    "hang": (1, "  [1] error: rank 1 has waited 2 s for a batch; see to its storage"),
    "stopped": (1, "  [0] error: rank 0 has waited 4 s for rank 1, which gives no sign of life"),
    "main stopped": (1, "  [1] error: rank 1 has waited 4 s for rank 0, which gives no sign of life"),
    "differ": (1, "error: after update 2, second on rank 1 differs from the others' of 2"),
}


@pytest.mark.turn("what befalls one rank is known to all", 1)
@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_an_end_of_one_rank_is_the_end_of_all(tmp_path, end):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*IMPATIENT, "--nproc_per_node", "2", "--log_dir", tmp_path / "log", script, end],
        capture_output=True, text=True, timeout=120, env=environ,
    )  # fmt: skip
    status, line = ENDS[end]
    assert result.returncode == status, result.stdout + result.stderr
    assert not running(tmp_path)
    if line is None:
        assert "error" not in result.stderr
    else:
        told = [one for one in result.stderr.splitlines() if one.startswith(("error: rank", "  ["))]
        assert told[0].startswith("error: rank"), result.stderr
        assert any(line in one for one in told), result.stderr
        assert "step 2" in "\n".join(told)
        assert end == "bug" or "Traceback" not in result.stdout + result.stderr


VICTIM = """
import os, sys, time
from pathlib import Path
from ppldm.utils.processes.signals import FOLDER_VARIABLE, note_failure
from ppldm.utils.processes.ranks import World

rank = World.detect().rank
if rank == 0:
    while not Path(os.environ[FOLDER_VARIABLE], "1").exists():
        time.sleep(0.01)
note_failure(rank)
if rank == 1:
    while not Path(os.environ[FOLDER_VARIABLE], "0").exists():
        time.sleep(0.01)
    time.sleep(2.5)  # longer than others are waited for
sys.exit(3 + rank)
"""


@pytest.mark.slow
def test_a_victim_that_ends_before_its_cause_is_not_blamed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(VICTIM)
    result = subprocess.run(
        [sys.executable, "-m", "ppldm.training.distributed.launch",
         "--nproc_per_node", "2", "--log_dir", tmp_path / "log", script],
        capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert result.returncode == 4, result.stderr
    assert "error: rank 1 failed first: it ended with exit status 4" in result.stderr


def test_other_machines_are_believed_as_long_as_they_count():
    peers = Peers("localhost:1", "job", 0, 3)
    peers.look({0: "running 1", 1: "running 1"}, 0.0)
    peers.look({0: "running 2", 1: "running 2", 2: "running 1"}, SILENCE_SECONDS - 1)
    peers.look({0: "running 3", 1: "running 3", 2: "running 1"}, 2 * SILENCE_SECONDS - 2)
    assert peers.trouble is None and not peers.others_ended
    peers.look({0: "running 4", 1: "running 4", 2: "running 1"}, 2 * SILENCE_SECONDS)
    assert peers.trouble == "the launcher of machine 2 gives no sign of life"


def test_a_machine_that_has_ended_may_be_silent():
    peers = Peers("localhost:1", "job", 0, 2)
    for now in (0.0, 10 * SILENCE_SECONDS):
        peers.look({0: "running 4", 1: "done 3"}, now)
    assert peers.trouble is None and peers.others_ended
    peers.look({1: "failed 4"}, 10 * SILENCE_SECONDS)
    assert "a rank on machine 1 failed" in peers.trouble


def test_a_launcher_does_not_leave_before_the_others_can_read_how_it_ended():
    """The one that carries the messages would wait for it for SILENCE_SECONDS."""
    server = KVServer(port := free_port())
    server.start()
    first, second = (Peers(f"localhost:{port}", "job", node, 2) for node in (0, 1))

    def tell_the_end():  # as the thread's next beat does, whenever that comes
        while second.state != "failed":
            time.sleep(0.01)
        time.sleep(0.3)
        second._exchange(2)

    try:
        first.state = "failed"
        first._exchange(1)
        second._exchange(1)
        assert second.others_ended
        beat = threading.Thread(target=tell_the_end)
        beat.start()
        master = SimpleNamespace(role="participant", MAIN="main", stop=lambda: None)
        WatchedController.finalize(SimpleNamespace(peers=second, exit_status=1, master=master), exit=False)
        first._exchange(2)
        assert first.others_ended
        beat.join()
    finally:
        server.stop()


DEAF = """
import signal, sys, time
from ppldm.utils.entry import entry

with entry():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def deaf_ranks(tmp_path):
    """The launcher of two ranks that hear nothing and would go on for minutes, once both are there."""
    script = tmp_path / "rank.py"
    script.write_text(DEAF)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ppldm.training.distributed.launch",
         "--nproc_per_node", "2", "--log_dir", tmp_path / "log", script],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_TOKEN": "hidden-7c1f"},
    )  # fmt: skip
    logs, deadline = [tmp_path / "log" / f"workerlog.{rank}" for rank in (0, 1)], time.monotonic() + 100
    while not all(log.exists() and "ready" in log.read_text(errors="replace") for log in logs):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.05)
    yield launcher
    launcher.kill()
    launcher.wait()


@pytest.mark.slow
def test_ranks_end_with_their_launcher(deaf_ranks, tmp_path):
    deaf_ranks.kill()
    deaf_ranks.wait()
    deadline = time.monotonic() + 120
    while running(tmp_path):
        assert time.monotonic() < deadline, running(tmp_path)
        time.sleep(0.05)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_blames_nobody(deaf_ranks, tmp_path):
    for _ in range(2):
        deaf_ranks.send_signal(signal.SIGINT)
        time.sleep(0.5)
    _, text = deaf_ranks.communicate(timeout=120)
    assert deaf_ranks.returncode == 130, text
    assert text.splitlines()[-1] == "stopped; the same command again goes on from the last checkpoint"
    assert "error" not in text and not running(tmp_path)
    for path in (tmp_path / "log").iterdir():  # what Paddle would write of the environment
        assert "hidden-7c1f" not in path.read_text(errors="replace"), path


@pytest.mark.turn("what befalls one rank is known to all", 1)
@pytest.mark.slow
def test_two_machines_end_together(tmp_path):
    # Two launchers on this machine, one rank each; the second's rank is killed.
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    master = f"127.0.0.1:{free_port()}"
    launchers = [
        subprocess.Popen(
            [*IMPATIENT, "--master", master, "--nnodes", "2", "--rank", str(node), "--nproc_per_node", "1",
             "--log_dir", tmp_path / f"log{node}", script, "killed"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ,
        )
        for node in (0, 1)
    ]  # fmt: skip
    started = time.monotonic()
    texts = [launcher.communicate(timeout=150)[1] for launcher in launchers]
    assert time.monotonic() - started < 120
    assert launchers[1].returncode == 128 + signal.SIGKILL, texts
    assert "rank 1 failed first: it was killed by SIGKILL" in texts[1]
    assert launchers[0].returncode != 0 and "error: " in texts[0]
    assert not running(tmp_path)


@pytest.mark.turn("what befalls one rank is known to all", 1)
@pytest.mark.slow
@pytest.mark.parametrize("kind, workers", [("loop", 0), ("trainer", 1), ("loop", 2)])
def test_a_failing_disk_ends_all_ranks_at_once(tiny, tmp_path, kind, workers):
    flags = tiny.flags(tmp_path / "out", max_steps=1000, data_timeout=0, dataloader_num_workers=workers,
                       per_device_train_batch_size=2)  # fmt: skip
    script = Path(__file__).parents[2] / "helpers" / "failing_disk.py"
    result = subprocess.run(
        [sys.executable, "-m", "ppldm.training.distributed.launch",
         "--nproc_per_node", "2", "--log_dir", tmp_path / "log", script,
         kind, *flags],
        capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    assert "error: rank 1 failed first" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert re.match(r"  \[1\] error: cannot read \S+part-0000\d\.gz row \d+ \(Input/output error\)", last), last
    assert "Traceback" not in result.stderr
    assert not running(tmp_path)


def test_machines_meet_at_a_name_or_an_address():
    own = socket.gethostbyname(socket.gethostname())
    assert meet_at("localhost:29500") == meet_at("127.0.0.1:29500") == ("127.0.0.1:29500", "127.0.0.1")
    assert meet_at(f"{socket.gethostname()}:1") == (f"{own}:1", own)


@pytest.mark.parametrize("master", ["nowhere.invalid:29500", "localhost", "localhost:port", "localhost:99999999"])
def test_a_master_that_cannot_be_is_one_line(master):
    with pytest.raises(ConfigError, match=f"--master {master} cannot be found"):
        meet_at(master)
