"""The laws of training: two loops on one curve, any split of a batch, resumed to the bit."""

import gc
import json
import os
import shutil
import signal

import numpy as np
import paddle
import pytest
from command_line import parse_arguments

from ppldm.networks.model import LatentMap
from ppldm.training.checkpoint import read_manifest
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import collected_at_times, run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskFullError,
    Interrupted,
    OutputError,
    TrainingError,
)


def train(kind, flags):
    """Run one of the loops; returns the run."""
    loop = kind == "loop"
    run = prepare(*parse_arguments([*flags, "--do_train"], loop))
    (run_loop if loop else run_trainer)(run)
    return run


def losses(folder):
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def weights(folder, step, name="model_state.pdparams"):
    return paddle.load(str(folder / f"checkpoint-{step}" / name), return_numpy=True)


def assert_equal_to_the_bit(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert (np.asarray(first[name]) == np.asarray(second[name])).all(), name


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """Runs of 6 updates without a stop, with checkpoints after 3: by the loop and by the Trainer."""
    folders = {}
    for kind in ("loop", "trainer"):
        folders[kind] = tmp_path_factory.mktemp(kind) / "run"
        train(kind, tiny.flags(folders[kind], max_steps=6, save_steps=3, use_ema=True))
    return folders


def test_loop_and_trainer_follow_one_curve(straight):
    np.testing.assert_allclose(losses(straight["loop"]), losses(straight["trainer"]), rtol=1e-5)
    assert len(losses(straight["loop"])) == 6
    first, second = (weights(straight[kind], 6) for kind in ("loop", "trainer"))
    for name in first:
        np.testing.assert_allclose(first[name], second[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("batch, asked", [(1, {"gradient_accumulation_steps": 4}), (2, {"global_batch_size": 4})])
def test_accumulation_is_a_bigger_batch(tiny, straight, tmp_path, kind, batch, asked):
    run = train(kind, tiny.flags(tmp_path / "run", per_device_train_batch_size=batch, max_steps=3, **asked))
    assert run.arguments.gradient_accumulation_steps == 4 // batch and run.global_batch_size == 4
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(straight["loop"])[:3], rtol=1e-5)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("started_by", ["loop", "trainer"])
def test_resuming_gives_the_same_bits(tiny, straight, tmp_path, kind, started_by):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoint-3", "run.json", "metrics.jsonl"):
        source = straight[started_by] / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    run = train(kind, tiny.flags(folder, max_steps=6, save_steps=3, use_ema=True))
    assert run.start_step == 3
    assert losses(folder) == losses(straight[kind])
    for name in ("model_state.pdparams", "ema_state.pdparams", "optimizer.pdopt"):
        assert_equal_to_the_bit(_flat(weights(folder, 6, name)), _flat(weights(straight[kind], 6, name)))


def _flat(state):
    return {k: v for k, v in state.items() if not isinstance(v, dict)}


@pytest.mark.parametrize(
    "kind, number, status",
    [("loop", signal.SIGINT, 130), ("trainer", signal.SIGINT, 130), ("loop", signal.SIGTERM, 75),
     ("trainer", signal.SIGTERM, 75), ("trainer", signal.SIGUSR1, 75)],
)  # fmt: skip
def test_a_signal_saves_and_the_same_command_goes_on(tiny, straight, tmp_path, kind, number, status, monkeypatch):
    from ppldm.training.report import Reporter

    flags = tiny.flags(tmp_path / "run", max_steps=6, save_steps=100, use_ema=True)
    after_update = Reporter.after_update

    def stop_at_two(self, step, loss, batches):
        after_update(self, step, loss, batches)
        if step == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Reporter, "after_update", stop_at_two)
    with pytest.raises(Interrupted, match="the same command again") as caught:
        train(kind, flags)
    assert caught.value.exit_status == status
    monkeypatch.undo()
    train(kind, flags)
    assert losses(tmp_path / "run") == losses(straight[kind])
    assert_equal_to_the_bit(weights(tmp_path / "run", 6), weights(straight[kind], 6))


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_the_checkpoint_before_the_first_update_is_a_start(tiny, straight, tmp_path, kind):
    """Its weights are those of a model just built; the limit holds for it, and a run that goes on from it has the
    bits of one that begins."""
    flags = tiny.flags(tmp_path / "run", max_steps=6, save_steps=3, use_ema=True)
    train(kind, [*flags, "--save_at", "0", "1"])
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == [
        f"checkpoint-{step}" for step in (0, 1, 3, 6)
    ]
    built = prepare(*parse_arguments([*tiny.flags(tmp_path / "new", use_ema=True), "--do_train"], kind == "loop"))
    own = {name: value.numpy() for name, value in built.state.model.state_dict().items()}
    assert_equal_to_the_bit(weights(tmp_path / "run", 0), own)
    shutil.move(tmp_path / "run/checkpoint-0", tmp_path / "again/checkpoint-0")
    flags = tiny.flags(tmp_path / "again", max_steps=6, save_steps=3, use_ema=True, save_total_limit=2)
    run = train(kind, [*flags, "--save_at", "0", "1"])
    assert run.start_step == 0 and run.checkpoint.name == "checkpoint-0"
    assert sorted(path.name for path in (tmp_path / "again").glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert losses(tmp_path / "again") == losses(tmp_path / "run") == losses(straight[kind])
    for name in ("model_state.pdparams", "ema_state.pdparams", "optimizer.pdopt"):
        assert_equal_to_the_bit(_flat(weights(tmp_path / "again", 6, name)), _flat(weights(straight[kind], 6, name)))


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_garbage_is_collected_at_set_times_alone(tiny, straight, tmp_path, kind, monkeypatch):
    from ppldm.training.report import Reporter

    seen, reached = [], [0]  # the update that was reached at each collection
    after_update = Reporter.after_update

    def note(self, step, *facts):
        after_update(self, step, *facts)
        reached[0] = step

    def collected(phase, _):
        if phase == "start":
            seen.append(reached[0])

    monkeypatch.setattr(Reporter, "after_update", note)
    gc.callbacks.append(collected)
    try:
        train(kind, tiny.flags(tmp_path / "run", max_steps=6, save_steps=3, use_ema=True, gc_steps=2))
        assert gc.isenabled() and [step for step in seen if 0 < step < 6] == [2, 4]
        with pytest.raises(ZeroDivisionError), collected_at_times(1):
            assert not gc.isenabled()
            1 / 0  # noqa: B018
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(collected)
    assert losses(tmp_path / "run") == losses(straight[kind])


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_means_over_an_interval_survive_a_stop_inside_it(tiny, tmp_path, kind):
    flags = tiny.flags(tmp_path / "run", max_steps=5, save_steps=2, logging_steps=5)
    train(kind, flags)
    straight = losses(tmp_path / "run")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    assert train(kind, flags).start_step == 2
    assert losses(tmp_path / "run") == straight and len(straight) == 1


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_finished_run_is_not_trained_again(tiny, straight, kind):
    before = losses(straight[kind])
    run = train(kind, tiny.flags(straight[kind], max_steps=6, save_steps=3, use_ema=True))
    assert run.start_step == 6 and losses(straight[kind]) == before


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_drawing_pictures_and_workers_change_nothing(tiny, straight, tmp_path, kind):
    train(kind, tiny.flags(tmp_path / "run", max_steps=6, use_ema=True, image_logging_steps=2,
                           dataloader_num_workers=2))  # fmt: skip
    assert losses(tmp_path / "run") == losses(straight[kind])
    names = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    tags = ("ddim-samples-1.0", "ddim-samples-7.5", "reconstruction")
    assert names == [f"step-{step:06d}-{tag}.png" for step in (2, 4, 6) for tag in tags]


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_recompute_is_the_same_training(tiny, straight, tmp_path, kind):
    train(kind, tiny.flags(tmp_path / "run", max_steps=3, recompute=True))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(straight["loop"])[:3], rtol=1e-5)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_recompute_with_accumulation_is_the_same_training(tiny, straight, tmp_path, kind):
    train(kind, tiny.flags(tmp_path / "run", max_steps=3, recompute=True, per_device_train_batch_size=2,
                           gradient_accumulation_steps=2))  # fmt: skip
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(straight["loop"])[:3], rtol=1e-5)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("recompute, times", [(False, 1), (True, 2)])
def test_recompute_reaches_unet_and_text_encoder_after_pictures_too(tiny, tmp_path, kind, recompute, times):
    flags = tiny.flags(tmp_path, max_steps=2, recompute=recompute, image_logging_steps=1)
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    model, calls = run.state.model, {}
    for name in ("text_encoder.model.layers.1", "unet.down_blocks.0.resnets.0", "unet.up_blocks.1.resnets.0"):

        def count(_layer, _inputs, name=name):
            if model.unet.training:
                calls[name] = calls.get(name, 0) + 1

        dict(model.named_sublayers())[name].register_forward_pre_hook(count)
    (run_loop if kind == "loop" else run_trainer)(run)
    assert set(calls.values()) == {2 * times} and len(calls) == 3


# Every objective and optimizer setting that is off by default.
EVERYTHING = {
    "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "snr_gamma": 5.0, "noise_offset": 0.1,
    "input_perturbation": 0.1, "random_flip": True, "ema_start_iters": 2, "ema_iters": 2, "ema_beta": 0.5,
    "unet_learning_rate": 2e-3, "text_encoder_learning_rate": 5e-4, "decay_norms_and_biases": False,
    "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2, "scale_lr": True, "lr_batch_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def everything(tiny, tmp_path_factory):
    """As `straight`, with EVERYTHING on."""
    folders = {}
    for kind in ("loop", "trainer"):
        folders[kind] = tmp_path_factory.mktemp(kind) / "run"
        train(kind, tiny.flags(folders[kind], max_steps=6, save_steps=3, **EVERYTHING))
    return folders


def test_loop_and_trainer_agree_with_everything_on(everything, straight):
    np.testing.assert_allclose(losses(everything["loop"]), losses(everything["trainer"]), rtol=1e-5)
    assert losses(everything["loop"]) != losses(straight["loop"])
    records = read_metrics(everything["loop"] / "metrics.jsonl")
    rates = [record["lr_abs"] for record in records]
    assert [r["lr_abs_unet"] for r in records] == pytest.approx([2 * rate for rate in rates])
    assert [r["lr_abs_text_encoder"] for r in records] == pytest.approx([rate / 2 for rate in rates])
    assert rates == [record["lr_abs"] for record in read_metrics(everything["trainer"] / "metrics.jsonl")]
    # Of 1e-3 x 4 / 8: half-way through the warm-up after the first update, at the top after the second, then a cosine.
    assert rates == pytest.approx([2.5e-4, 5e-4, *(5e-4 * (1 + np.cos(np.pi * k / 4)) / 2 for k in (1, 2, 3, 4))])
    assert weights(everything["loop"], 6, "ema_state.pdparams")["num_updates"] == 6


@pytest.mark.parametrize("kind, started_by", [("loop", "loop"), ("loop", "trainer"), ("trainer", "loop")])
def test_resuming_gives_the_same_bits_with_everything_on(tiny, everything, tmp_path, kind, started_by):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("checkpoint-3", "run.json", "metrics.jsonl"):
        source = everything[started_by] / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    train(kind, tiny.flags(folder, max_steps=6, save_steps=3, **EVERYTHING))
    assert read_metrics(folder / "metrics.jsonl")[-1]["lr_abs"] == pytest.approx(0, abs=1e-9)
    assert losses(folder) == losses(everything[kind])
    for name in ("model_state.pdparams", "ema_state.pdparams", "optimizer.pdopt"):
        assert_equal_to_the_bit(_flat(weights(folder, 6, name)), _flat(weights(everything[kind], 6, name)))


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_the_rate_is_the_same_for_any_accumulation(tiny, everything, tmp_path, kind):
    train(kind, tiny.flags(tmp_path, max_steps=6, **EVERYTHING | {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}))  # fmt: skip
    rates, expected = (
        [record["lr_abs"] for record in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path, everything[kind])
    )
    assert rates == expected
    np.testing.assert_allclose(losses(tmp_path), losses(everything[kind]), rtol=1e-5)


def test_exported_pipeline_carries_the_schedule(everything):
    from tiny_model import load_pipeline

    model = load_pipeline(everything["loop"] / "pipeline")
    assert model.process.prediction_type == "v_prediction"
    assert model.process.schedule.rescale_betas_zero_snr and float(model.levels[-1]) == 0


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_budget_in_samples_is_met_exactly(tiny, tmp_path, kind):
    run = train(kind, tiny.flags(tmp_path, max_steps=None, max_samples=9))
    assert run.max_steps == 3 and len(losses(tmp_path)) == 3


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_loss_that_is_not_finite_stops_before_the_update(tiny, tmp_path, kind):
    run = prepare(*parse_arguments([*tiny.flags(tmp_path / "run"), "--do_train"], kind == "loop"))
    run.state.model.latent_map = LatentMap(float("nan"))
    before = {name: p.numpy().copy() for name, p in run.state.model.named_parameters()}
    with pytest.raises(TrainingError, match="rows of rank 0"):
        (run_loop if kind == "loop" else run_trainer)(run)
    assert_equal_to_the_bit(before, {name: p.numpy() for name, p in run.state.model.named_parameters()})


def test_resume_from_a_named_checkpoint_wins(tiny, straight, tmp_path):
    flags = tiny.flags(tmp_path / "run", max_steps=6, use_ema=True,
                       resume_from_checkpoint=straight["loop"] / "checkpoint-3")  # fmt: skip
    assert train("loop", flags).start_step == 3
    assert_equal_to_the_bit(weights(tmp_path / "run", 6), weights(straight["loop"], 6))
    with pytest.raises(CheckpointError, match="cannot resume from"):
        train("loop", tiny.flags(tmp_path / "other", resume_from_checkpoint=tmp_path))


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_checkpoints_beside_the_training_are_those_that_it_waits_for(tiny, straight, tmp_path, kind):
    """All of them, though training goes on while they are written."""
    train(kind, tiny.flags(tmp_path / "run", max_steps=6, save_steps=1, use_ema=True, use_async_save=True))
    for step in (3, 6):
        one, other = (path / f"checkpoint-{step}" for path in (straight[kind], tmp_path / "run"))
        for name in ("model_state.pdparams", "optimizer.pdopt", "scheduler.pdparams"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), (step, name)
        averages = (paddle.load(str(path / "ema_state.pdparams"), return_numpy=True) for path in (one, other))
        assert_equal_to_the_bit(*averages)
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 6


@pytest.mark.parametrize("kind", ["loop", "trainer"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_is_survived_but_not_at_the_end(tiny, tmp_path, kind, beside, monkeypatch, capfd):
    free = iter([1 << 40, 0, 1 << 40, 0])  # before the checkpoints after updates 1, 2, 3 and 4
    monkeypatch.setattr("ppldm.training.checkpoint.count_free_bytes", lambda _: next(free))
    with pytest.raises(DiskFullError, match=r"checkpoint-4 needs 0\.0\d\d GB, .* has 0.000 GB free"):
        train(kind, tiny.flags(tmp_path / "run", max_steps=4, save_steps=1, use_async_save=beside))
    assert "update 2 is not saved, training goes on" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*")) == ["checkpoint-1", "checkpoint-3"]
    monkeypatch.undo()
    assert train(kind, tiny.flags(tmp_path / "run", max_steps=4, save_steps=1)).start_step == 3
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 4  # where PaddleNLP leaves it
    assert (tmp_path / "run/model_state.pdparams").samefile(tmp_path / "run/checkpoint-4/model_state.pdparams")


def test_a_folder_of_something_else_is_refused(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are not a run of ppldm"):
        train("loop", tiny.flags(tmp_path))
    train("loop", tiny.flags(tmp_path, max_steps=1, overwrite_output_dir=True))
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("reporter", ["visualdl", "tensorboard"])
def test_a_logging_folder_that_cannot_be_made_is_said_in_a_line(tiny, tmp_path, reporter):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write to the folder .*file/logs.* choose another"):
        train("loop", tiny.flags(tmp_path / "run", report_to=reporter, logging_dir=tmp_path / "file/logs"))


def test_overwriting_starts_anew(tiny, tmp_path):
    train("loop", tiny.flags(tmp_path / "run", max_steps=2))
    run = train("loop", tiny.flags(tmp_path / "run", max_steps=1, overwrite_output_dir=True))
    assert run.start_step == 0 and len(losses(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"seed": 6}, "seed"),
        ({"per_device_train_batch_size": 2}, "global_batch_size"),
        ({"caption_drop": 0.5}, "caption_drop"),
        ({"random_flip": True}, "random_flip"),
        ({"noise_offset": 0.1}, "noise_offset"),
        ({"snr_gamma": 5}, "snr_gamma"),
        ({"input_perturbation": 0.1}, "input_perturbation"),
        ({"learning_rate": 1e-4}, "learning_rate"),
        ({"weight_decay": 0.5}, "weight_decay"),
        ({"lr_scheduler_type": "constant_with_warmup"}, "lr_scheduler_type"),
        ({"ema_decay": 0.5}, "ema"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tiny, straight, changes, word):
    with pytest.raises(CheckpointError, match=f"was trained with {word} .* accept the change with --accept_changes"):
        train("loop", tiny.flags(straight["loop"], max_steps=6, save_steps=3, use_ema=True, **changes))


def test_an_unknown_change_is_refused(tiny, tmp_path):
    with pytest.raises(
        ConfigError, match="--accept_changes lr: there is no such setting; choose from seed, .*learning_rate"
    ):
        train("loop", tiny.flags(tmp_path, accept_changes="lr"))


def test_a_change_that_is_accepted_by_name_goes_through(tiny, straight, tmp_path):
    flags = tiny.flags(tmp_path, max_steps=4, use_ema=True, learning_rate=1e-5, accept_changes="learning_rate",
                       resume_from_checkpoint=straight["loop"] / "checkpoint-3")  # fmt: skip
    train("loop", flags)
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["lr_abs"] == pytest.approx(1e-5)
    assert read_manifest(tmp_path / "checkpoint-4")["identity"]["learning_rate"] == 1e-5


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_condition_is_part_of_the_run(tiny, tmp_path, kind):
    where = "caption not in ('picture 1', 'picture 30') and width>=36"
    train(kind, tiny.flags(tmp_path, where=where, max_steps=2, save_steps=2))
    identity = read_manifest(tmp_path / "checkpoint-2")["identity"]
    assert identity["rows"] == 38
    assert identity["where"] == 'not caption in ("picture 1", "picture 30") and width >= 36'
    with pytest.raises(CheckpointError, match="was trained with where not caption in .* this run has None"):
        train(kind, tiny.flags(tmp_path))
    with pytest.raises(ConfigError, match="--where: .* at character 9: width >= -->"):
        train(kind, tiny.flags(tmp_path / "new", where="width >="))
    with pytest.raises(ConfigError, match="unknown layout 'odd'"):
        train(kind, tiny.flags(tmp_path / "new", layout="odd"))
    with pytest.raises(DataError, match="no row of .*40 too small"):
        train(kind, tiny.flags(tmp_path / "new", resolution=64))


def test_more_batch_than_rows_is_refused(tiny, tmp_path):
    with pytest.raises(DataError, match="40 rows"):
        train("loop", tiny.flags(tmp_path / "run", per_device_train_batch_size=41))


def test_epochs_count_rows(tiny, tmp_path):
    run = train("loop", tiny.flags(tmp_path / "run", max_steps=0, num_train_epochs=1, per_device_train_batch_size=12))
    assert run.max_steps == 4
    assert len(losses(tmp_path / "run")) == 4


def test_exported_weights_are_the_average(tiny, straight):
    from tiny_model import load_pipeline

    model = load_pipeline(straight["loop"] / "pipeline")
    average = weights(straight["loop"], 6, "ema_state.pdparams")
    raw = weights(straight["loop"], 6)
    exported = model.state_dict()
    for name in average:
        if name != "num_updates":
            assert (exported[name].numpy() == average[name]).all(), name
    assert any((exported[name].numpy() != raw[name]).any() for name in raw)
