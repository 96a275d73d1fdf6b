"""What layers drop is a function of (seed, update): neither a stop nor what was drawn before changes a bit."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from ppldm.training.train import UpdateGuard
from ppldm.utils.processes.ranks import World
from tests.training.test_loops import assert_equal_to_the_bit, losses, train, weights


@pytest.fixture(scope="module")
def flags(tiny, tmp_path_factory):
    config = json.loads(Path(tiny.config("ldmbert")).read_text())
    path = tmp_path_factory.mktemp("config") / "ldmbert.json"
    path.write_text(json.dumps(config | {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1}))

    own = {"text_encoder_config_file": path, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

    def make(folder, **changes):
        return tiny.flags(folder, **own | {"max_steps": 4, "save_steps": 2} | changes)

    return make


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) / "run" for kind in ("loop", "trainer")}
    for number, (kind, folder) in enumerate(folders.items()):
        paddle.seed(number)
        train(kind, flags(folder))
    return folders


def test_both_loops_drop_the_same(straight):
    np.testing.assert_allclose(losses(straight["loop"]), losses(straight["trainer"]), rtol=1e-5)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_resumed_run_drops_what_one_without_a_stop_does(flags, straight, tmp_path, kind):
    folder = tmp_path / "run"
    train(kind, flags(folder, max_steps=2))
    paddle.seed(77)
    paddle.rand([5])
    train(kind, flags(folder))
    assert losses(folder) == losses(straight[kind])
    assert_equal_to_the_bit(weights(folder, 4), weights(straight[kind], 4))


def test_each_micro_batch_of_each_rank_and_update_has_its_own():
    guard = SimpleNamespace(seed=3, step=0, world=World())
    seen = set()
    for guard.seed in (3, 4):
        for guard.step in range(3):
            for guard.world in (World(0, 2), World(1, 2)):
                for number in range(3):
                    UpdateGuard.seed_dropout(guard, number)
                    seen.add(tuple(paddle.rand([4]).tolist()))
    assert len(seen) == 2 * 3 * 2 * 3
