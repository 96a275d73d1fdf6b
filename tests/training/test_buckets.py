"""The laws of training with pictures of several shapes: one run whatever the loop, the stops, the ranks and workers."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from PIL import Image
from shaped import write_shaped
from toy import registered_toy
from visualdl import LogReader

from ppldm.cli.main import run as run_command
from ppldm.families.base import get_family
from ppldm.training import prepare as module
from ppldm.training.checkpoint import verify
from ppldm.training.metrics import VISUALDL_FILE, read_metrics
from ppldm.training.prepare import prepare, run_identity
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def registered():
    with registered_toy():
        yield


@pytest.fixture(scope="module")
def lists(tmp_path_factory) -> dict[str, Path]:
    """Filelists of 40 rows to train on and 12 to validate on, of three shapes of very different shares."""
    return write_shaped(tmp_path_factory.mktemp("shapes"))


def toy_flags(lists, folder, **changes) -> list[str]:
    settings = {
        "config": ROOT / "tests/helpers/toy.yaml", "output_dir": folder, "file_list": lists["train"], "resolution": 8,
        "buckets": "8x8,12x8,8x12", "bucket_group_size": 2, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "seed": 5,
        "dataloader_num_workers": 0, "report_to": "none", "learning_rate": 1e-3, **changes,
    }  # fmt: skip
    return [word for flag, value in settings.items() if value is not None for word in (f"--{flag}", str(value))]


def train(words, name="toy", kind="loop"):
    words = words + (["--do_train"] if kind == "trainer" else [])
    run = prepare(*parse_arguments(words, kind == "loop", get_family(name).Config))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def weights(folder, step=STEPS) -> dict:
    found = paddle.load(str(folder / f"checkpoint-{step}" / "model_state.pdparams"), return_numpy=True)
    return {name: np.asarray(value) for name, value in found.items() if name != "StructuredToParameterName@@"}


def losses(folder) -> list:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


def assert_same_run(one, other, steps=STEPS):
    mine, theirs = weights(one, steps), weights(other, steps)
    assert mine.keys() == theirs.keys() and all((mine[key] == theirs[key]).all() for key in mine)
    assert losses(one)[:steps] == losses(other)[:steps]


@pytest.fixture(scope="module")
def straights(lists, tmp_path_factory):
    """Runs of both loops that nothing stopped."""
    folders = {}
    for kind in ("loop", "trainer"):
        folders[kind] = tmp_path_factory.mktemp(kind) / "run"
        run = train(toy_flags(lists, folders[kind]), kind=kind)
        assert len(run.dataset.buckets.shapes) == 3
    return folders


@pytest.fixture(scope="module")
def straight(straights):
    """That of the hand-written loop."""
    return straights["loop"]


def test_both_loops_have_one_curve(straights):
    np.testing.assert_allclose(losses(straights["loop"]), losses(straights["trainer"]), rtol=1e-5)


def test_loader_processes_change_nothing(lists, straight, tmp_path):
    train(toy_flags(lists, tmp_path / "run", dataloader_num_workers=2))
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(lists, straights, tmp_path, kind):
    shutil.copytree(straights[kind], tmp_path / "run")
    for step in (4, STEPS):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    assert train(toy_flags(lists, tmp_path / "run"), kind=kind).start_step == 2
    assert_same_run(tmp_path / "run", straights[kind])


@pytest.mark.parametrize(
    "changes, told",
    [({"buckets": "8x8,12x8,8x14"}, r"buckets \['8x8', '12x8', '8x12'\], this run has \['8x8', '12x8', '8x14'\]"),
     ({"bucket_group_size": 4}, "bucket_group_size 2, this run has 4"),
     ({"buckets": None, "bucket_group_size": None}, r"buckets \['8x8', .*\], this run has None")],
)  # fmt: skip
def test_a_checkpoint_of_other_shapes_is_refused_by_name(lists, straight, tmp_path, changes, told):
    shutil.copytree(straight, tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"was trained with {told}"):
        train(toy_flags(lists, tmp_path / "run", **changes))


def test_a_checkpoint_older_than_buckets_was_trained_without(lists, tmp_path, monkeypatch):
    def as_it_was(*settings):
        identity = run_identity(*settings)
        assert identity.pop("buckets") is identity.pop("bucket_group_size") is None
        return identity

    monkeypatch.setattr(module, "run_identity", as_it_was)
    squares = {"buckets": None, "bucket_group_size": None}
    train(toy_flags(lists, tmp_path / "run", max_steps=2, **squares))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="was trained with buckets None"):
        train(toy_flags(lists, tmp_path / "run"))
    assert train(toy_flags(lists, tmp_path / "run", max_steps=3, accept_changes="max_steps", **squares)).start_step == 2


def test_groups_that_do_not_fit_the_batch_are_refused(lists, tmp_path):
    with pytest.raises(ConfigError, match="give --bucket_group_size 2, or another of its multiples that divide 4"):
        train(toy_flags(lists, tmp_path / "run", bucket_group_size=3))


def test_held_out_rows_come_in_batches_of_one_shape_and_their_loss_is_their_mean(lists, tmp_path):
    run = train(toy_flags(lists, tmp_path / "run", validation_file_list=lists["held-out"], max_steps=1,
                          validation_steps=1))  # fmt: skip
    held_out = run.validate.args[1]
    assert sorted(sum(held_out.places, [])) == list(range(12)) and len(held_out.dataset.buckets.shapes) == 3
    each = [held_out.dataset[0, place] for batch in held_out.places for place in batch]
    model, found = run.state.model, []
    with run.state.ema.applied(), paddle.no_grad():
        for sample in each:
            batch = {name: paddle.to_tensor(sample[name][None]) for name in model.inputs}
            found.append(float(model.loss(batch | {"row_ids": None}).value))
    np.testing.assert_allclose(run.validate()["validation_loss"], np.mean(found), rtol=1e-5)


@pytest.mark.parametrize("name", ["ldm", "autoencoder"])
def test_every_family_trains_on_several_shapes_and_draws_them(tiny, lists, tmp_path, name):
    words = tiny.flags(tmp_path / "run", file_list=lists["train"], buckets="32x32,48x32,32x48", max_steps=3,
                       per_device_train_batch_size=2, image_logging_steps=3, report_to="visualdl",
                       logging_dir=tmp_path / "logs")  # fmt: skip
    words += ["--size_conditioning"] if name == "ldm" else []
    if name == "autoencoder":
        settings = dict(zip(words[::2], words[1::2], strict=True))
        for flag in ("vae_name_or_path", "text_encoder_config_file", "unet_config_file", "tokenizer_name",
                     "model_max_length", "num_inference_steps"):  # fmt: skip
            del settings[f"--{flag}"]
        words = [*(word for pair in settings.items() for word in pair), "--vae_config_file", tiny.config("vae")]
    run = train(words, name)
    assert len(run.dataset.buckets.shapes) == 3 and np.isfinite(losses(tmp_path / "run")).all()
    chart = Image.open(tmp_path / "run/buckets.png").convert("RGB")
    assert chart.width > 500
    (shown,) = LogReader(file_path=str(tmp_path / "logs" / VISUALDL_FILE)).get_data("image", "buckets")
    assert np.array_equal(Image.open(io.BytesIO(shown.image.encoded_image_string)).convert("RGB"), chart)
    drawn = Image.open(tmp_path / "run/samples/step-000003-reconstruction.png")
    # Beside one another the pictures of a batch, of one shape, or of the rows that an autoencoder is watched on.
    assert drawn.height in ((66 + 2 * 32, 66 + 2 * 48) if name == "ldm" else (66 + 2 * 48,))


def start(words, *prefix):
    return subprocess.Popen(
        [sys.executable, *prefix, ROOT / "tests/helpers/law_run.py", "toy", "loop", *words], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
def test_two_processes_train_on_the_samples_of_one(lists, straight, tmp_path):
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"))
    process = start(toy_flags(lists, tmp_path / "run", gradient_accumulation_steps=1), *launch)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    mine, theirs = weights(tmp_path / "run"), weights(straight)
    for key in theirs:
        np.testing.assert_allclose(mine[key], theirs[key], rtol=2e-4, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(straight), rtol=1e-4)


@pytest.mark.turn("a killed training loses nothing", 1)
@pytest.mark.slow
def test_a_kill_loses_nothing(lists, straight, tmp_path):
    process = start(toy_flags(lists, tmp_path / "run", max_steps=60, save_total_limit=300))
    while process.poll() is None and not (tmp_path / "run/checkpoint-4").is_dir():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = [path for path in (tmp_path / "run").glob("checkpoint-*") if verify(path) is None]
    assert kept
    for folder in kept:
        if int(folder.name.split("-")[1]) >= STEPS:
            shutil.rmtree(folder)
    train(toy_flags(lists, tmp_path / "run"))
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.turn("a cached file changes no loss", 2)
def test_latents_of_several_shapes_are_those_of_the_pictures(tiny, lists, tmp_path):
    """Computed while training, or by `ppldm precompute` of the same buckets, without a picture there afterwards."""
    parts = tmp_path / "parts"
    shutil.copytree(lists["train"].parent, parts, ignore=shutil.ignore_patterns("*.latents"))
    shapes = "32x32,48x32,32x48"

    def curve(name, **changes):
        words = tiny.flags(tmp_path / name, file_list=parts / "train.filelist", buckets=shapes, bucket_group_size=4,
                           random_crop=False, max_steps=12, **changes)  # fmt: skip
        run_loop(prepare(*parse_arguments(words, loop=True)))
        return losses(tmp_path / name)

    online, ondemand = curve("online"), curve("ondemand", latents="ondemand", latents_dir=tmp_path / "kept")
    assert online != ondemand and np.allclose(online, ondemand, rtol=1e-3)
    words = ["precompute", parts / "train.filelist", "--vae", tiny.vae, "--buckets", shapes, "--bucket-group-size", 4]
    run_command([*map(str, words)])
    (parts / "train.gz").unlink()
    assert np.allclose(curve("cached", latents="cached"), ondemand, rtol=1e-3)
