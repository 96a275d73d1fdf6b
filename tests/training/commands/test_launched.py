"""`ppldm train` starts its ranks itself, and after a failure again, with the bits of a run that was left alone."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import paddle
import pytest
import yaml
from command_line import parse_arguments
from running import running

from ppldm.training.commands.train import is_wanted, launch_command, read_launch
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
TRAIN = [sys.executable, "-u", "-m", "ppldm", "train"]
LAUNCHER = [sys.executable, "-u", "-m", "ppldm.training.distributed.launch"]


def command(words, environ=None):
    given, rest = read_launch(words.split())
    return launch_command(given, rest, Path("out/launch"), environ or {}) if is_wanted(given) else None


@pytest.mark.parametrize(
    "words, launcher",
    [
        ("--config r.yaml", None),
        ("--max_restarts 3 --config r.yaml", []),
        ("--devices 0,1 --config r.yaml", ["--nproc_per_node", "2"]),
        ("--nnodes 2 --master a:1 --config r.yaml", ["--nnodes", "2", "--master", "a:1"]),
        (
            "--devices 0 --nnodes 2 --master a:1 --node_rank 1 --config r.yaml",
            ["--nproc_per_node", "1", "--nnodes", "2", "--master", "a:1", "--rank", "1"],
        ),
    ],
)
def test_what_is_started(words, launcher):
    started = [*TRAIN, "--config", "r.yaml"]
    if launcher:
        logs = "out/launch"
        if "--nnodes" in launcher:
            logs += "/node-1" if "--rank" in launcher else f"/{socket.gethostname()}"
        started = [*LAUNCHER, *launcher, "--log_dir", logs, *started]
    assert command(words) == (None if launcher is None else started)


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    assert not is_wanted(read_launch(["--devices", "0,1"])[0])


@pytest.mark.parametrize(
    "words, says",
    [
        ("--nnodes 2", "--nnodes 2 needs --master HOST:PORT"),
        ("--nnodes 0 --master a:1", "--nnodes 0 must be 1 or more"),
        ("--max_restarts -1", "--max_restarts -1 must be 1 or more"),
        ("--master a:1", "--master does nothing without --nnodes above 1"),
        ("--node_rank 1 --devices 0", "--node_rank does nothing without --nnodes above 1"),
        ("--devices 0,zero", "--devices 0,zero must be different whole numbers"),
        ("--nnodes two", "--nnodes"),
    ],
)
def test_what_cannot_be_is_one_line(words, says):
    with pytest.raises(ConfigError, match=says):
        command(words)


@pytest.mark.turn("a killed training loses nothing", 1)
@pytest.mark.slow
def test_a_killed_rank_costs_nothing_but_time(tiny, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    processes = [
        subprocess.Popen(
            [*TRAIN, *more, "--devices", "0,1",
             *map(str, tiny.flags(folder, max_steps=6, save_steps=1, per_device_train_batch_size=1))],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for folder, more in ((undisturbed, []), (killed, ["--max_restarts", "1", "--use_async_save"]))
    ]  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(killed.glob("checkpoint-2")) and processes[1].poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks = _ranks_of(killed)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert (
        "failed first: it was killed by SIGKILL" in said[1] and "starts again in 1 s, with 0 restarts left" in said[1]
    )
    one, other = (
        paddle.load(str(folder / "checkpoint-6/model_state.pdparams"), return_numpy=True)
        for folder in (undisturbed, killed)
    )
    assert one.keys() == other.keys() and all((np.asarray(one[key]) == np.asarray(other[key])).all() for key in one)
    assert not running(killed)


@pytest.mark.turn("what befalls one rank is known to all", 1)
@pytest.mark.slow
def test_a_rank_that_others_wait_for_is_named(tiny, tmp_path):
    """One of two is stopped for most of its time, once both train. An update takes eight forward passes: longer than
    what it is stopped for, and than most of what else the machine does."""
    shared = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    words = tiny.flags(tmp_path / "slow", max_steps=10, logging_steps=1, **shared)
    with open(tmp_path / "said", "w") as output:
        process = subprocess.Popen(
            [*TRAIN, *words, "--devices", "0,1"], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline = time.monotonic() + 300
    metrics = tmp_path / "slow/metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    slow = next(pid for pid in _ranks_of(tmp_path / "slow") if _rank_of(pid) == "1")
    named = "WARNING rank 1 on"
    while process.poll() is None and named not in (tmp_path / "said").read_text() and time.monotonic() < deadline:
        with suppress(ProcessLookupError):
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(slow, signal.SIGCONT)
            time.sleep(0.01)
    status, said = process.wait(300), (tmp_path / "said").read_text()
    assert status == 0, said
    assert named in said and "times as long as the median rank" in said, (
        said
    )  # rank 0 is, when the machine is busy, too


def _rank_of(pid: int) -> str | None:
    environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((one.partition("=")[2] for one in environ if one.startswith("PADDLE_TRAINER_ID=")), None)


def _ranks_of(folder) -> list[int]:
    """The processes that train into `folder`, without the launcher and who supervises it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            environ = (path / "environ").read_text()
        except OSError:
            continue
        if str(folder) in words and "ppldm.training.distributed.launch" not in words and "PADDLE_TRAINER_ID" in environ:
            found.append(int(path.name))
    return sorted(found)


def test_the_pods_of_kubernetes_run_what_there_is():
    """The PaddleJob parses, and its command is the launcher's with a training of ours."""
    job = yaml.safe_load((ROOT / "run_scripts/kubernetes/paddlejob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PaddleJob")
    worker = job["spec"]["paddleReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "paddle"  # by which the operator finds it
    assert container["command"][1:4] == LAUNCHER[1:] and container["args"][:5] == ["python", *TRAIN[1:]]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"


@pytest.mark.turn("a killed training loses nothing", 1)
@pytest.mark.slow
def test_four_ranks_that_save_beside_the_training_are_one_and_another_number_goes_on(tiny, tmp_path):
    """But for the order in which gradients were added up."""
    shared = {"global_batch_size": 4, "gradient_accumulation_steps": None, "use_async_save": True, "save_steps": 2}
    words = tiny.flags(tmp_path / "four", per_device_train_batch_size=1, **shared)
    done = subprocess.run(
        [*TRAIN, *words, "--devices", "0,1,2,3"], env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "global_batch_size 4 = 1 per device x 1 accumulation x 4 ranks" in done.stdout + done.stderr
    shutil.copytree(tmp_path / "four/checkpoint-2", tmp_path / "resumed/checkpoint-2")
    for name in ("one", "resumed"):
        words = tiny.flags(tmp_path / name, per_device_train_batch_size=4, **shared)
        run_loop(prepare(*parse_arguments(words, loop=True)))
    one, four, resumed = (
        paddle.load(str(tmp_path / name / "checkpoint-4/model_state.pdparams"), return_numpy=True)
        for name in ("one", "four", "resumed")
    )
    for key, expected in one.items():
        # Attention does not depend on the bias of its keys: their gradient is rounding, which AdamW makes steps of.
        if isinstance(expected, np.ndarray) and not key.endswith("to_k.bias"):
            np.testing.assert_allclose(four[key], expected, rtol=2e-4, atol=1e-5, err_msg=key)
            np.testing.assert_allclose(resumed[key], expected, rtol=2e-4, atol=1e-5, err_msg=key)
