"""Checkpoints are read only if they verify, and rotate only after a new one does."""

import json

import paddle
import pytest
from paddlenlp.trainer import TrainerState

from ppldm.training.checkpoint import (
    TrainingState,
    list_checkpoints,
    load_model,
    newest_checkpoint,
    read_manifest,
    save_checkpoint,
    verify,
)
from ppldm.utils.errors import CheckpointError

FILES = ["model_state.pdparams", "optimizer.pdopt", "scheduler.pdparams", "trainer_state.json"]


def make_state(width=3):
    layer = paddle.nn.Linear(2, width)
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    return TrainingState(layer, paddle.optimizer.AdamW(scheduler, parameters=layer.parameters()), scheduler)


def save(folder, step, limit=None, state=None):
    return save_checkpoint(
        folder, state or make_state(), TrainerState(global_step=step), 8 * step, {"seed": 1}, [0.5, 0.25], limit
    )


def test_published_names_inside(tmp_path):
    folder = save(tmp_path, 7)
    assert folder.name == "checkpoint-7"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "manifest.json"])
    manifest = read_manifest(folder)
    assert (manifest["global_step"], manifest["samples_seen"], manifest["identity"]) == (7, 56, {"seed": 1})
    assert manifest["unlogged"] == [0.5, 0.25]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 7
    assert verify(folder) is None


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_damage_is_noticed_and_an_older_one_taken(tmp_path, name, damage):
    old, new = save(tmp_path, 2), save(tmp_path, 10)
    assert newest_checkpoint(tmp_path) == new
    path = new / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1] if name != "manifest.json" else content[: len(content) // 2])
    else:
        path.write_bytes(content.replace(content[20:24], b"\0\0\0\0", 1))
    assert verify(new)
    assert newest_checkpoint(tmp_path) == old


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]


@pytest.mark.parametrize("limit, kept", [(None, [4, 3, 2, 1]), (0, [4, 3, 2, 1]), (1, [4]), (2, [4, 3])])
def test_rotation(tmp_path, limit, kept):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, limit)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]


def test_another_model_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="weight, this model wants"):
        load_model(folder, make_state(width=4))


def test_an_interrupted_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    old = save(tmp_path, 1)
    monkeypatch.setattr(TrainerState, "save_to_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert newest_checkpoint(tmp_path) == old
