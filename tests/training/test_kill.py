"""A run that is killed again and again, while it saves too, ends with the bits of one that was never touched."""

import json
import os
import random
import signal
import time

import numpy as np
import paddle
import pytest
from forking import forking, kill, stop_when
from sampling import ALL

from ppldm.training.checkpoint import verify
from ppldm.training.metrics import read_metrics
from ppldm.weights.folders import list_checkpoints, step_of

KILLS = 9 if ALL else 6
SEEDS = (7, 8, 9) if ALL else (7,)
MOMENTS = ["starting", "training", "saving"] * (KILLS // 3)

IMPORTS = """
import json
import ppldm.data.kernels
from command_line import parse_arguments
from ppldm.training.train import run_loop
from ppldm.training.prepare import prepare
from ppldm.training.trainer import run_trainer

def go(line):
    kind, flags = json.loads(line)
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(kind, flags), as `forking` gives it."""
    with forking(IMPORTS, tmp_path_factory.mktemp("starter") / "log") as start:
        yield lambda kind, flags: start(json.dumps([kind, [str(flag) for flag in flags]]))


def is_saving(folder) -> bool:
    return any(folder.glob(".checkpoint-*"))


def newest_step(folder) -> int:
    return max(map(step_of, list_checkpoints(folder)), default=0)


def stop_while_saving(chance, folder, pid) -> None:
    """Stop the process `pid` (SIGSTOP) at a random moment of one of its next saves, however busy the machine is."""
    seen, wanted = 0, chance.randint(1, 2)

    def reached() -> bool:
        nonlocal seen
        seen = seen + 1 if is_saving(folder) else 0
        return seen == wanted

    stop_when(pid, reached, lambda: chance.uniform(0, 0.002))


def kill_somewhere(start, chance, moment, folder, kind, flags) -> bool:
    """Start a run, kill it somewhere while it is `moment`, return whether it was saving."""
    before = newest_step(folder)
    pid, wait = start(kind, flags)
    if moment == "starting":
        time.sleep(chance.uniform(0, 0.5))
    else:
        wanted = before + chance.randint(0, 2)
        while newest_step(folder) <= wanted and os.path.exists(f"/proc/{pid}"):
            time.sleep(0.002)
        if moment == "saving":
            stop_while_saving(chance, folder, pid)
        else:
            time.sleep(chance.uniform(0, 0.1))
    kill(pid)
    assert wait() == signal.SIGKILL
    return is_saving(folder)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True], ids=["waiting", "beside"])
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_many_moments(tiny, start, tmp_path, seed, beside):
    """`beside`: checkpoints are written while training goes on."""
    chance = random.Random(seed)
    settings = {"save_steps": 1, "save_total_limit": 2, "use_ema": True, "max_steps": 1000, "use_async_save": beside}
    folder, reached, caught_saving = tmp_path / "killed", 0, 0
    for moment in chance.sample(MOMENTS, KILLS):
        kind = chance.choice(["loop", "trainer"])
        caught_saving += kill_somewhere(start, chance, moment, folder, kind, tiny.flags(folder, **settings))
        # Whatever has the name of a checkpoint is one, and none is lost.
        assert all(verify(checkpoint) is None for checkpoint in list_checkpoints(folder))
        assert newest_step(folder) >= reached
        reached = newest_step(folder)
    assert caught_saving >= KILLS // 3 and reached >= KILLS // 2
    settings["max_steps"] = reached + 2
    statuses = [start(kind, tiny.flags(path, **settings))[1]()
                for kind, path in (("loop", folder), ("trainer", tmp_path / "straight"))]  # fmt: skip
    assert statuses == [0, 0]
    first, second = (path / f"checkpoint-{reached + 2}" for path in (folder, tmp_path / "straight"))
    for name in ("model_state.pdparams", "ema_state.pdparams", "optimizer.pdopt"):
        one, other = (paddle.load(str(path / name), return_numpy=True) for path in (first, second))
        assert one.keys() == other.keys()
        for key in one:
            if not isinstance(one[key], dict):
                assert (np.asarray(one[key]) == np.asarray(other[key])).all(), (name, key)
    curves = [[(r["global_step"], r["loss"]) for r in read_metrics(path / "metrics.jsonl")]
              for path in (folder, tmp_path / "straight")]  # fmt: skip
    assert curves[0] == curves[1] and len(curves[0]) == reached + 2
    # Nothing of the killed runs is left: the last start removed it.
    assert not list(folder.glob(".checkpoint-*"))
