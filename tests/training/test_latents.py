"""Training on cached latents is training on the pictures: the same samples, and the same numbers as far as they were
rounded; where they were computed makes no difference to the bit."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from formats import write_mds
from sampling import ALL

from ppldm.data.cached.file import Latents
from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import Part
from ppldm.networks.build import build_network, save_component
from ppldm.networks.configs import read_new_config
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import ConfigError, PartError

MANY = 200 if ALL else 40  # updates
ROOT = Path(__file__).resolve().parents[2]
EPOCHS = {"per_device_train_batch_size": 8, "max_steps": 10, "save_steps": 5,  # two of the 40 rows
          "size_conditioning": True, "size_conditioning_drop": 0.2}  # fmt: skip


def copy_data(tiny, folder) -> Path:
    """The tiny data set in a folder of its own, which gets latents beside its parts."""
    for name in ("part-00000.gz", "part-00001.gz", "tiny.filelist", "tiny.filelist.list"):
        shutil.copy(tiny.folder / name, folder / name)
    return folder / "tiny.filelist.list"


def train(tiny, folder, kind="loop", **changes):
    settings = {**EPOCHS, "random_crop": False, **changes}
    words = [*tiny.flags(folder, **settings), *(["--do_train"] if kind == "trainer" else [])]
    run = prepare(*parse_arguments(words, kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def weights(folder) -> list:
    state = paddle.load(str(folder / "checkpoint-10/model_state.pdparams"), return_numpy=True)
    return [np.asarray(state[name]) for name in sorted(state) if name != "StructuredToParameterName@@"]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """Losses of a run on pictures, and of one that computes and keeps latents of them; the latter's filelists."""
    folder = tmp_path_factory.mktemp("latents")
    file_list = copy_data(tiny, folder)
    online = train(tiny, folder / "online", file_list=file_list)
    return folder, file_list, online, train(tiny, folder / "ondemand", file_list=file_list, latents="ondemand")


@pytest.mark.turn("a cached file changes no loss", 2)
def test_latents_on_demand_are_the_pictures_rounded(runs):
    _, _, online, ondemand = runs
    assert len(online) == 10 and online != ondemand
    assert np.allclose(online, ondemand, rtol=1e-3)


def test_every_row_is_computed_once_and_kept(runs):
    folder, _, _, _ = runs
    files = sorted(folder.glob("*.latents"))
    assert [len(Latents(path)) for path in files] == [25, 15]
    assert all((Latents(path).states == 1).all() for path in files)
    part = Part(folder / "part-00001.gz")
    rows = [Latents(files[1]).texts(number) for number in range(15)]
    assert [(row.caption, row.meta) for row in rows] == [part.read_fields(number) for number in range(15)]


@pytest.mark.parametrize("kind, workers", [("loop", 0), ("trainer", 2)])
def test_cached_latents_give_the_run_that_computed_them_without_any_picture(tiny, runs, tmp_path, kind, workers):
    folder, _, _, ondemand = runs
    for path in (*folder.glob("*.latents"), *folder.glob("tiny.*")):
        os.link(path, tmp_path / path.name)
    file_list = tmp_path / "tiny.filelist.list"
    losses = train(tiny, tmp_path / "run", kind, file_list=file_list, latents="cached", dataloader_num_workers=workers)
    assert losses == ondemand
    assert all(map(np.array_equal, weights(tmp_path / "run"), weights(folder / "ondemand")))


def test_a_run_goes_on_to_the_bit_by_either_way_to_the_latents(tiny, runs, tmp_path):
    folder, file_list, _, ondemand = runs
    shutil.copytree(folder / "ondemand", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-10", "pipeline"))
    losses = train(tiny, tmp_path / "run", file_list=file_list, latents="cached")
    assert losses == ondemand
    with pytest.raises(Exception, match="trained with latents float16"):
        train(tiny, tmp_path / "run", file_list=file_list, max_steps=12)


@pytest.mark.turn("a cached file changes no loss", 2)
def test_pictures_and_latents_in_one_run(tiny, runs, tmp_path):
    """One list of each, and one of which the latents are kept in float32 as they are met."""
    folder, _, online, _ = runs
    names = ("part-00000.gz", "part-00001.gz")
    for number, name in enumerate(names):
        shutil.copy(folder / name, tmp_path / name)
        write_filelist(tmp_path / f"{number}.filelist", [name])
    # As one list, but for the order of bad rows, of which there are none.
    write_filelist(tmp_path / "all.list", ["0.filelist latents=ondemand", "1.filelist"])
    changes = {"file_list": tmp_path / "all.list", "latents_dtype": "float32", "latents_dir": tmp_path / "kept"}
    for name, mode in (("ondemand", "ondemand"), ("cached", "cached")):
        write_filelist(tmp_path / "all.list", [f"0.filelist latents={mode}", "1.filelist"])
        assert np.allclose(train(tiny, tmp_path / name, **changes), online, rtol=1e-6, atol=0)
    assert [path.name[:10] for path in (tmp_path / "kept").iterdir()] == ["part-00000"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"crop_fraction": 1.0}, "crop_fraction"),
        ({"interpolation": "area"}, "interpolation"),
        ({"latents_dtype": "bfloat16"}, "dtype"),
        ({"num_crops": 2, "random_crop": True}, "crops"),
        ({"random_flip": True}, "flips"),
        ({"vae": True}, "autoencoder"),
        ({"resolution": 24}, "shapes"),
    ],
)
def test_latents_of_something_else_are_refused_by_what_differs(tiny, runs, tmp_path, changes, words):
    _, file_list, _, _ = runs
    if changes.pop("vae", False):
        save_component(build_network("vae", read_new_config("vae", tiny.config("vae"), ""), seed=8), tmp_path / "vae")
        changes["vae_name_or_path"] = tmp_path / "vae"
    with pytest.raises(PartError, match=f"made of something else.*{words}.*ppldm precompute") as caught:
        train(tiny, tmp_path / "run", file_list=file_list, latents="cached", **changes)
    assert "\n" not in str(caught.value)


def test_latents_of_other_rows_or_captions_are_refused(tiny, runs, tmp_path):
    folder, _, _, _ = runs
    shutil.copy(next(folder.glob("part-00000*.latents")), tmp_path / "part-00001.gz.01234567.latents")
    file_list = copy_data(tiny, tmp_path)
    write_filelist(tmp_path / "tiny.filelist", ["part-00001.gz"])
    with pytest.raises(PartError, match="made of something else.*part"):
        train(tiny, tmp_path / "run", file_list=file_list, latents="cached")


def test_what_is_missing_is_named_with_the_command(tiny, runs, tmp_path):
    folder, _, _, _ = runs
    file_list = copy_data(tiny, tmp_path)
    with pytest.raises(PartError, match="no cached latents.*ppldm precompute FILELIST"):
        train(tiny, tmp_path / "run", file_list=file_list, latents="cached")
    for path in folder.glob("*.latents"):
        shutil.copy(path, tmp_path / path.name)
    Latents(next(tmp_path.glob("part-00000*.latents")), writable=True).forget(3, 0)
    with pytest.raises(Exception, match="lacks latents of row 3"):
        train(tiny, tmp_path / "run", file_list=file_list, latents="cached")


def test_crops_that_are_not_known_ahead_are_refused_at_once(tiny, tmp_path):
    with pytest.raises(ConfigError, match="--random_crop false, or --num_crops N"):
        train(tiny, tmp_path / "run", latents="cached", random_crop=True)


def test_shards_of_micro_diffusion_are_trained_on(tiny, runs, tmp_path):
    """Scaled samples of the posterior: those of noise 0 are its mean."""
    folder, _, _, _ = runs
    factor = 0.18215
    columns = {
        "caption": ("str", None, lambda row: row[0].encode()),
        "caption_latents": ("bytes", None, lambda row: b"\0" * 64),
        "latents_32": ("bytes", None, lambda row: (row[1] * factor).astype("<f2").tobytes()),
    }
    for number, path in enumerate(sorted(folder.glob("*.latents"))):
        latents = Latents(path)
        rows = [(latents.texts(row).caption, latents.read(row, 0)[0]) for row in range(len(latents))]
        write_mds(tmp_path / f"shard.{number:05}.mds", rows, columns)
    write_filelist(tmp_path / "mds.filelist", sorted(tmp_path.glob("*.mds")))
    write_filelist(tmp_path / "mds.list", ["mds.filelist format=mds latents=cached"])
    words = tiny.flags(tmp_path / "run", **EPOCHS | {"random_crop": False, "file_list": tmp_path / "mds.list"})
    run = prepare(*parse_arguments(words, True))
    moments = run.dataset.make_batch([(0, place) for place in range(len(rows))])["moments"]
    means = np.stack([Latents(sorted(folder.glob("*.latents"))[0]).read(row, 0)[0] for row in range(len(rows))])
    np.testing.assert_allclose(moments[:, 0], means, rtol=2e-3, atol=1e-4)
    assert not moments[:, 1].any()
    run_loop(run)
    losses = [record["loss"] for record in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert np.allclose(losses, runs[2], rtol=0.05)
    with pytest.raises(PartError, match="latents of 32 pixels, not of 16"):
        train(tiny, tmp_path / "other", file_list=tmp_path / "mds.list", resolution=16)


@pytest.mark.turn("a long run on cached files is the one on pictures and captions", 1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float16", 1e-3), ("float32", 1e-6)])
def test_a_long_run_on_latents_is_the_one_on_pictures(tiny, tmp_path, dtype, tolerance):
    file_list = copy_data(tiny, tmp_path)
    settings = {"file_list": file_list, "max_steps": MANY, "per_device_train_batch_size": 4, "learning_rate": 1e-4,
                "save_steps": 1000, "logging_steps": 1, "latents_dtype": dtype}  # fmt: skip
    online = train(tiny, tmp_path / "online", **settings)
    kept = train(tiny, tmp_path / "kept", latents="ondemand", **settings)
    assert len(kept) == MANY
    np.testing.assert_allclose(kept, online, rtol=tolerance)


def start(tiny, folder, *prefix, **changes):
    words = tiny.flags(folder, **{**EPOCHS, "random_crop": False, **changes})
    return subprocess.Popen(
        [sys.executable, *prefix, ROOT / "tests/helpers/law_run.py", "ldm", "loop", *words], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.turn("what holds on one rank holds on two", 2)
@pytest.mark.slow
def test_two_ranks_keep_each_row_once(tiny, runs, tmp_path):
    folder, _, _, ondemand = runs
    file_list = copy_data(tiny, tmp_path)
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"))
    changes = {"file_list": file_list, "latents": "ondemand", "per_device_train_batch_size": 4}
    process = start(tiny, tmp_path / "run", *launch, dataloader_num_workers=1, **changes)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    losses = [record["loss"] for record in read_metrics(tmp_path / "run/metrics.jsonl")]
    np.testing.assert_allclose(losses, ondemand, rtol=1e-4)
    for name in ("part-00000", "part-00001"):
        one, other = (Latents(next(place.glob(f"{name}*.latents"))) for place in (folder, tmp_path))
        for row in range(len(one)):
            np.testing.assert_allclose(one.read(row, 0), other.read(row, 0), rtol=2e-3, atol=1e-5)


@pytest.mark.turn("a killed training loses nothing", 1)
@pytest.mark.slow
def test_a_kill_while_latents_are_kept_changes_nothing(tiny, runs, tmp_path):
    """At some moments of the first epoch; the run that goes on ends with the bits of one that nothing stopped."""
    folder, _, _, ondemand = runs
    file_list = copy_data(tiny, tmp_path)
    changes = {"file_list": file_list, "latents": "ondemand", "dataloader_num_workers": 1, "save_steps": 1}
    for number in range(3):
        process = start(tiny, tmp_path / "run", **changes)
        while process.poll() is None and not (tmp_path / f"run/checkpoint-{number + 1}").is_dir():
            time.sleep(0.002)
        process.kill()
        process.communicate()
    losses = train(tiny, tmp_path / "run", **changes)
    assert losses == ondemand
    for path in folder.glob("*.latents"):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
