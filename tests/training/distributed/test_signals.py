"""A signal at any moment to any of two ranks ends the run as documented: status 130 or 75, and a checkpoint.

`PPLDM_NUM_SIGNALS=100 pytest tests/training/distributed/test_signals.py` plays more than the few that are the
default.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from signalled import draw

from ppldm.training.checkpoint import verify
from ppldm.training.metrics import read_metrics
from ppldm.utils.processes.ranks import SIGNS_DIR
from ppldm.weights.folders import list_checkpoints, step_of

ROOT = Path(__file__).resolve().parents[3]
NUM_SIGNALS = int(os.environ.get("PPLDM_NUM_SIGNALS", 3))
SEED = int(os.environ.get("PPLDM_SEED", 1))
ENVIRON = {**os.environ, "USE_TORCH": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
ENDLESS = {"max_steps": 10**6, "logging_steps": 1, "save_steps": 1, "save_total_limit": 2,
           "per_device_train_batch_size": 2}  # fmt: skip


@pytest.mark.turn("a stopped run goes on", 1)
@pytest.mark.slow
def test_each_signal_ends_two_ranks_with_a_checkpoint(tiny, tmp_path):
    metadata, flags = tmp_path / "facts", [str(word) for word in tiny.flags(tmp_path / "out", **ENDLESS)]
    result = subprocess.run(
        [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", tmp_path / "log",
         ROOT / "tests/helpers/signalled.py", str(SEED), str(NUM_SIGNALS), metadata, json.dumps(flags)],
        cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=120 + 20 * NUM_SIGNALS,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    ends = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    assert [len(of_rank) for of_rank in ends] == [NUM_SIGNALS, NUM_SIGNALS]
    for number, both in enumerate(zip(*ends, strict=True)):
        plan = draw(SEED, number)
        reached = {re.fullmatch(r"stopped after update (\d+) of .*", text)[1] for _, text in both}
        assert len(reached) == 1, (plan, both)
        newest = list_checkpoints(tmp_path / f"out-{number}")[0]
        assert step_of(newest) == int(reached.pop()) and verify(newest) is None, plan
        assert not (tmp_path / f"out-{number}" / SIGNS_DIR).exists(), plan
        interrupted = {rank for rank, (status, _) in enumerate(both) if status == 130}
        assert all(status in (75, 130) for status, _ in both)
        if plan["signal"] != signal.SIGINT:
            assert not interrupted, plan
        else:
            assert interrupted and interrupted <= set(plan["ranks"]), plan


@pytest.mark.turn("a stopped run goes on", 1)
@pytest.mark.slow
@pytest.mark.parametrize("number, kind", [(signal.SIGINT, "no_trainer"), (signal.SIGTERM, "trainer"),
                                          (signal.SIGUSR1, "no_trainer")])  # fmt: skip
def test_a_signal_to_the_launcher_ends_the_script_as_documented(tiny, tmp_path, number, kind):
    script = ROOT / f"examples/train_txt2img_laion400m_{kind}.py"
    words = tiny.flags(tmp_path / "out", **ENDLESS) + (["--do_train"] if kind == "trainer" else [])
    process = subprocess.Popen(
        [sys.executable, "-m", "ppldm.training.distributed.launch",
         "--nproc_per_node", "2", "--log_dir", tmp_path / "log", script,
         *words],
        cwd=ROOT, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and read_metrics(metrics)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 75), text
    assert "rror" not in text
    assert verify(list_checkpoints(tmp_path / "out")[0]) is None
