"""`--to_static` trains what is trained without it, in both loops, from and to the same checkpoints."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from tiny_model import make_batch, make_model

from ppldm.training.checkpoint import read_manifest
from ppldm.training.compiled import CompiledPrediction
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.processes.ranks import World

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"max_steps": 4, "save_steps": 2, "use_ema": True}


def train(kind, tiny, folder, **changes):
    flags = tiny.flags(folder, **SETTINGS | changes)
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def losses(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def checkpoint(folder, name="model_state.pdparams"):
    return paddle.load(str(folder / "checkpoint-4" / name), return_numpy=True)


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    """A run of 4 updates that is not compiled."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train("loop", tiny, folder)
    return folder


@pytest.mark.turn("what is compiled is what the modules do", 2)
@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_the_curve_is_the_same_and_only_the_training_forward_is_compiled(
    tiny, plain, tmp_path, kind, caplog, monkeypatch
):
    from ppldm.utils.log import get_logger

    monkeypatch.setattr(get_logger(), "propagate", True)
    calls = Counter()
    call = CompiledPrediction.__call__
    monkeypatch.setattr(CompiledPrediction, "__call__", lambda self, *inputs: calls.update(n=1) or call(self, *inputs))
    run = train(kind, tiny, tmp_path / "run", to_static=True, image_logging_steps=2, validation_prompts="picture 3")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(plain), rtol=1e-5)
    for name in ("model_state.pdparams", "ema_state.pdparams"):
        ours, expected = checkpoint(tmp_path / "run", name), checkpoint(plain, name)
        assert ours.keys() == expected.keys()
        for key in ours:
            np.testing.assert_allclose(ours[key], expected[key], atol=1e-5, err_msg=key)
    assert calls["n"] == 4
    assert "--to_static: compiling" in caplog.text and "--to_static: compiled in" in caplog.text
    assert len(list((tmp_path / "run/samples").iterdir())) == 6
    assert read_manifest(tmp_path / "run/checkpoint-4")["identity"] == read_manifest(plain / "checkpoint-4")["identity"]
    assert json.loads((tmp_path / "run/run.json").read_text())["compute"]["to_static"]
    assert run.state.model.compiled_predict


@pytest.mark.turn("what is compiled is what the modules do", 2)
@pytest.mark.slow
@pytest.mark.parametrize("kind, before, after", [("loop", True, False), ("trainer", False, True)])
def test_runs_go_on_with_or_without_it(tiny, plain, tmp_path, kind, before, after):
    train(kind, tiny, tmp_path / "run", to_static=before)
    shutil.rmtree(tmp_path / "run/checkpoint-4")
    run = train(kind, tiny, tmp_path / "run", to_static=after)
    assert run.start_step == 2
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(plain), rtol=1e-5)


@pytest.mark.turn("what is compiled is what the modules do", 2)
@pytest.mark.parametrize("freeze, sizes", [(False, True), (True, False)])
def test_loss_and_gradients_are_those_of_the_modules(tiny, freeze, sizes):
    model, batch = make_model(tiny, freeze_text_encoder=freeze, size_conditioning=sizes), make_batch(2)
    if sizes:
        batch["sizes"] = paddle.to_tensor([[512, 768, 0, 40, 32, 32], [0] * 6])
    # The last layers begin as zeros, and would hide what is before them.
    for parameter in model.trained_parameters().values():
        parameter.set_value(paddle.where(parameter == 0, paddle.full_like(parameter, 0.02), parameter))
    model.train()
    names = list(model.state_dict())
    found = []
    for compiled in (None, CompiledPrediction(model, World())):
        model.compiled_predict = compiled
        for _ in range(2):  # gradients add up, as with accumulation
            loss = model(**batch).value
            loss.backward()
        gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss), gradients))
        model.clear_gradients()
    (plain_loss, plain_gradients), (loss, gradients) = found
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert gradients.keys() == plain_gradients.keys() == model.trained_parameters().keys()
    for name in gradients:
        np.testing.assert_allclose(gradients[name], plain_gradients[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert list(model.state_dict()) == names


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["no_trainer", "trainer"])
def test_two_processes_are_one_with_twice_the_batch(tiny, plain, tmp_path, kind):
    flags = tiny.flags(tmp_path / "run", **SETTINGS, to_static=True, per_device_train_batch_size=1,
                       gradient_accumulation_steps=2)  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", tmp_path / "log",
         f"examples/train_txt2img_laion400m_{kind}.py", *flags, *(["--do_train"] if kind == "trainer" else [])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(plain), rtol=1e-5)
