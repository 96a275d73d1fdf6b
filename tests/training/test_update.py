"""An update is applied on all ranks or on none; the step counts either way."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from poison import poisoned

from ppldm.data.order import Mix
from ppldm.networks.model import Loss, Model
from ppldm.training.checkpoint import TrainingState, verify
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare as prepare_run
from ppldm.training.train import UpdateGuard, run_loop, train_step
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import TrainingError
from ppldm.utils.processes.ranks import World
from ppldm.weights.folders import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS, SEED = 40, 5


def rows_of(step, rank_slice=slice(None), batch=8):
    """The row ids that update `step` (counted from 1) takes, in order."""
    return Mix([NUM_ROWS], None, SEED).samples((step - 1) * batch, step * batch)[1].tolist()[rank_slice]


def prepare(kind, flags):
    return prepare_run(*parse_arguments([*flags, "--do_train"], kind == "loop"))


def run(kind, prepared):
    (run_loop if kind == "loop" else run_trainer)(prepared)


def losses(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_skipped_update_changes_nothing_but_step_and_rate(tiny, tmp_path, kind):
    flags = tiny.flags(tmp_path, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                       save_steps=1, use_ema=True, lr_scheduler_type="linear")  # fmt: skip
    with poisoned([rows_of(2)[5]]):
        run(kind, prepare(kind, flags))
    first, third = losses(tmp_path)[0], losses(tmp_path)[2]
    assert losses(tmp_path)[1] is None and np.isfinite([first, third]).all()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["skipped_updates"] for record in records] == [0, 1, 1]
    # The rate belongs to the step: 2/3 and 1/3 of it follow.
    assert [record["lr_abs"] for record in records] == pytest.approx([1e-3 * 2 / 3, 1e-3 / 3, 0])
    # A checkpoint is not written while updates are being skipped, but right after.
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-1"]


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_weights_optimizer_and_average_are_those_before_the_skip(tiny, tmp_path, kind):
    flags = tiny.flags(tmp_path / "a", max_steps=2, save_steps=1, use_ema=True, per_device_train_batch_size=8)
    with poisoned(rows_of(2)[:1]):
        run(kind, prepare(kind, flags))
    first, last = (tmp_path / "a" / f"checkpoint-{step}" for step in (1, 2))
    for name in ("model_state.pdparams", "optimizer.pdopt", "ema_state.pdparams"):
        before, after = (paddle.load(str(folder / name), return_numpy=True) for folder in (first, last))
        for key, value in before.items():
            if not isinstance(value, dict):
                assert (np.asarray(value) == np.asarray(after[key])).all(), key


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_an_update_leaves_no_gradients_which_another_would_find_as_zeros(tiny, tmp_path, kind, monkeypatch):
    prepared = prepare(kind, tiny.flags(tmp_path, max_steps=2, per_device_train_batch_size=8))
    model, found = prepared.state.model, []
    forward, learned = model.forward, [one for one in model.parameters() if not one.stop_gradient]

    def watched(*inputs, **named):
        found.append([one.grad for one in learned])
        return forward(*inputs, **named)

    monkeypatch.setattr(model, "forward", watched)
    run(kind, prepared)
    assert found == [[None] * len(learned)] * 2


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_after_so_many_in_a_row_the_run_stops_and_keeps_its_checkpoint(tiny, tmp_path, kind):
    flags = tiny.flags(tmp_path, max_steps=5, save_steps=1, per_device_train_batch_size=8, max_skipped_updates=2)
    bad = [rows_of(2)[0], rows_of(4)[1], rows_of(5)[7]]
    with poisoned(bad), pytest.raises(TrainingError, match=r"rows of rank 0: \[.*2 such updates in a row"):
        run(kind, prepare(kind, flags))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-1"]
    assert verify(list_checkpoints(tmp_path)[0]) is None


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_run_that_has_only_skipped_goes_on(tiny, tmp_path, kind):
    """Its checkpoint has no moments yet."""
    settings = {"per_device_train_batch_size": 8}
    with poisoned(rows_of(1)[:1]):
        run(kind, prepare(kind, tiny.flags(tmp_path, max_steps=1, **settings)))
    again = prepare(kind, tiny.flags(tmp_path, max_steps=2, **settings))
    assert again.start_step == 1
    run(kind, again)
    assert losses(tmp_path)[0] is None and np.isfinite(losses(tmp_path)[1])


class Toy(Model):
    """The loss is w . pixels; at pixels of 0 it is sqrt(0), finite with an infinite gradient."""

    inputs = {"pixels": None}
    components = {}

    def __init__(self):
        super().__init__()
        self.w = self.create_parameter([2], default_initializer=paddle.nn.initializer.Constant(1.0))

    def forward(self, pixels):
        return Loss((self.w * pixels).sum() if float(pixels.abs().sum()) > 0 else (self.w - 1).sum().sqrt())


def toy(scaler=None):
    """A referee of two weights, two micro-batches of two rows each."""
    model = Toy()
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    optimizer = paddle.optimizer.AdamW(scheduler, parameters=model.parameters())
    batches = [
        {"pixels": paddle.to_tensor([1.0, 2.0]), "row_ids": paddle.to_tensor([7, 8])},
        {"pixels": paddle.to_tensor([3.0, 4.0]), "row_ids": paddle.to_tensor([9, 10])},
    ]
    state = TrainingState(model, optimizer, scheduler, None, scaler)
    return UpdateGuard(state, World(), 1, nullcontext), batches


def test_loss_and_norm_of_an_update():
    guard, batches = toy()
    update = train_step(guard, batches, stop=True)
    assert update.loss == pytest.approx((3 + 7) / 2) and update.applied and update.stop
    assert update.grad_norm == pytest.approx(np.hypot(2, 3))


@pytest.mark.parametrize("bad, rows", [(0, [7, 8]), (1, [9, 10])])
@pytest.mark.parametrize("pixels", [[float("inf"), 1.0], [0.0, 0.0]], ids=["loss", "gradient alone"])
def test_the_offending_micro_batch_is_named(bad, rows, pixels):
    guard, batches = toy()
    batches[bad]["pixels"] = paddle.to_tensor(pixels)
    with pytest.raises(TrainingError) as caught:
        train_step(guard, batches)
    assert f"rows of rank 0: {rows};" in str(caught.value)
    assert guard.state.model.w.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pixels", [[float("inf"), 1.0], [0.0, 0.0]], ids=["loss", "gradient alone"])
def test_a_skipped_update_leaves_the_model_in_training(pixels):
    guard, batches = toy()
    guard.max_skipped = 3
    batches[0]["pixels"] = paddle.to_tensor(pixels)
    guard.state.model.train()
    assert not train_step(guard, batches).applied
    assert guard.state.model.training and guard.num_skipped_in_a_row == 1
    assert all(parameter.grad is None for parameter in guard.state.model.parameters())
    assert guard.state.model.w.tolist() == [1.0, 1.0]


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
@pytest.mark.parametrize("kind, recompute", [("loop", True), ("trainer", True), ("trainer", False)])
def test_two_ranks_skip_alike(tiny, tmp_path, kind, recompute):
    """The curve, with accumulation too, is that of one process; the ids come from the rank that has them."""
    bad = {2: rows_of(2)[5], 4: rows_of(4)[7], 5: rows_of(5)[4]}  # all of rank 1
    settings = {"max_steps": 5, "save_steps": 1, "max_skipped_updates": 2, "gradient_accumulation_steps": 2,
                "lr_scheduler_type": "cosine", "warmup_steps": 2}  # fmt: skip
    with poisoned(list(bad.values())), pytest.raises(TrainingError):
        run(kind, prepare(kind, tiny.flags(tmp_path / "one", per_device_train_batch_size=4, **settings)))
    flags = tiny.flags(tmp_path / "two", per_device_train_batch_size=2, recompute=recompute, **settings)
    result = subprocess.run(
        [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", tmp_path / "log",
         ROOT / "tests/helpers/poison.py", kind, ",".join(map(str, bad.values())), tmp_path / "facts", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode != 0
    metadata = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in (0, 1)]
    assert metadata[0]["weights"] == metadata[1]["weights"]
    assert all("2 such updates in a row" in fact["ended"] for fact in metadata)
    assert metadata[0]["ended"] == metadata[1]["ended"] and "; rows of rank 1: [" in metadata[0]["ended"]
    assert f"{bad[5]}" in metadata[1]["ended"]
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text(errors="replace") for rank in (0, 1)]
    assert "update skipped" not in logs[1]  # the main rank tells it of all
    assert all(any("update skipped" in line and str(bad[step]) in line for line in logs[0].splitlines())
               for step in (2, 4))  # fmt: skip
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    rates = [[r["lr_abs"] for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("one", "two")]
    assert rates[0] == rates[1] and rates[0][:2] == pytest.approx([5e-4, 1e-3])
    assert len(two) == 4 and [loss is None for loss in two] == [False, True, False, True]
    np.testing.assert_allclose([two[0], two[2]], [one[0], one[2]], rtol=1e-5)
    assert [path.name for path in list_checkpoints(tmp_path / "two")] == ["checkpoint-3", "checkpoint-1"]
