"""Every place that shows curves shows one, over any number of resumes, also after a kill."""

import json
import struct
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from ppldm.config.training import TrainingOptions
from ppldm.training.metrics import (
    COMET_KEY_FILE,
    METRICS_FILE,
    PACKAGES,
    SAMPLES_DIR,
    VISUALDL_FILE,
    WANDB_ID_FILE,
    check_reporters,
    drop_after,
    old_pictures,
)
from ppldm.training.report import log_metrics, open_sinks
from ppldm.training.sinks import WandbSink
from ppldm.utils.errors import ConfigError
from ppldm.utils.pictures import save_png


def write(folder, reporters, resume_at, steps, factor=1.0):
    """Log `steps` as a run does that resumes at `resume_at`; a picture every second step."""
    path = folder / METRICS_FILE
    past = drop_after(path, resume_at)
    first = {"buckets": np.full((4, 8, 3), 200, np.uint8)}
    sinks = open_sinks(reporters, folder, folder / "logs", past, {"seed": 5}, first)
    (folder / SAMPLES_DIR).mkdir(exist_ok=True)
    for step in steps:
        log_metrics(path, step, {"loss": factor / step}, sinks)
        if step % 2 == 0:
            picture = np.full((4, 8, 3), step, dtype=np.uint8)
            save_png(folder / SAMPLES_DIR / f"step-{step:06d}-reconstruction.png", picture)
            for sink in sinks:
                sink.add_pictures(step, {"reconstruction": picture})
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize("resume_at", [0, 3, 6])
def test_visualdl_shows_one_curve_and_the_pictures(tmp_path, resume_at):
    from visualdl import LogReader

    write(tmp_path, ["visualdl"], 0, range(1, 7), factor=7.0)
    write(tmp_path, ["visualdl"], resume_at, range(resume_at + 1, 9))
    reader = LogReader(logdir=str(tmp_path / "logs"))
    # The page shows the newest file of a folder alone; the reader does as the page does.
    assert [list(files) for files in [reader.logs().values()]] == [[VISUALDL_FILE]]
    records = LogReader(file_path=str(tmp_path / "logs" / VISUALDL_FILE))
    curve = {record.id: record.value for record in records.get_data("scalar", "train/loss")}
    assert curve == pytest.approx({step: (7.0 if step <= resume_at else 1.0) / step for step in range(1, 9)})
    assert [record.id for record in records.get_data("image", "reconstruction")] == [2, 4, 6, 8]
    assert [record.id for record in records.get_data("image", "buckets")] == [0]


def test_old_pictures_are_the_newest_of_each_tag(tmp_path):
    (tmp_path / SAMPLES_DIR).mkdir()
    for step in range(1, 31):
        for tag in ("a", "ddim-samples-7.5"):
            (tmp_path / SAMPLES_DIR / f"step-{step:06d}-{tag}.png").touch()
    found = [(step, tag) for step, tag, _ in old_pictures(tmp_path, 25)]
    assert found == [(step, tag) for step in range(16, 26) for tag in ("a", "ddim-samples-7.5")]
    assert old_pictures(tmp_path / "nowhere", 5) == []


def events(path):
    """The events of a TensorBoard file, read by its format: length, checksum, bytes, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, place = path.read_bytes(), 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        yield Event.FromString(data[place + 12 : place + 12 + length])
        place += length + 16


@pytest.mark.parametrize("resume_at", [0, 3])
def test_tensorboard_takes_back_what_is_past_the_step(tmp_path, resume_at):
    write(tmp_path, ["tensorboard"], 0, range(1, 7), factor=7.0)
    first = set((tmp_path / "logs").iterdir())
    write(tmp_path, ["tensorboard"], resume_at, range(resume_at + 1, 9))
    curve, pictures = {}, []
    for path in [*first, *set((tmp_path / "logs").iterdir()) - first]:
        for event in events(path):
            if event.HasField("session_log"):  # as TensorBoard does where a start says from which step on
                curve = {step: value for step, value in curve.items() if step < event.step}
                pictures = [(tag, step) for tag, step in pictures if step < event.step]
            for value in event.summary.value:
                if value.tag == "train/loss":
                    curve[event.step] = value.simple_value
                elif value.HasField("image"):
                    pictures.append((value.tag, event.step))
    assert curve == pytest.approx({step: (7.0 if step <= resume_at else 1.0) / step for step in range(1, 9)})
    assert sorted(pictures) == [("buckets", 0), *(("reconstruction", step) for step in (2, 4, 6, 8))]


@pytest.mark.slow
@pytest.mark.needs("wandb")
def test_wandb_goes_on_under_one_number(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, ["wandb"], 0, range(1, 5))
    number = (tmp_path / WANDB_ID_FILE).read_text().strip()
    write(tmp_path, ["wandb"], 2, range(3, 6))
    assert (tmp_path / WANDB_ID_FILE).read_text().strip() == number
    runs = sorted(path.name for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert runs and all(name.endswith(number) for name in runs)
    write(tmp_path, ["wandb"], 0, range(1, 3))
    assert (tmp_path / WANDB_ID_FILE).read_text().strip() != number


@pytest.mark.slow
@pytest.mark.needs("comet")
def test_comet_goes_on_under_one_key(tmp_path, monkeypatch):
    """Off line each start leaves a .zip, whose messages are what it would have sent."""
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--token", "hidden-7c1f"])
    keys, archives = [], set()
    for resume_at, steps in ((0, range(1, 5)), (2, range(3, 6)), (0, range(1, 3))):
        write(tmp_path, ["comet_ml"], resume_at, steps)
        keys.append((tmp_path / COMET_KEY_FILE).read_text().strip())
        (archive,) = {*tmp_path.glob("*.zip")} - archives
        archives.add(archive)
        with zipfile.ZipFile(archive) as file:
            contents = {name: file.read(name) for name in file.namelist()}
        assert not any(b"hidden-7c1f" in content for content in contents.values())
        said = [json.loads(line) for line in contents["messages.json"].decode().splitlines()]
        points = [one["payload"]["metric"] for one in said if one["type"] == "metric_msg"]
        curve = {one["step"]: one["metricValue"] for one in points if one["metricName"] == "train/loss"}
        assert curve == pytest.approx({step: 1 / step for step in steps})
        shown = [one["payload"] for one in said if "upload" in one["type"]]
        pictures = sorted((one["additional_params"]["step"], one["additional_params"]["figName"]) for one in shown)
        drawn = [(step, "reconstruction") for step in steps if step % 2 == 0]
        assert pictures == ([(0, "buckets")] * (resume_at == 0) + drawn)
        assert json.loads(contents["experiment.json"])["offline_id"] == keys[-1]
    assert keys[0] == keys[1] != keys[2]


def test_all_places_are_those_whose_package_is_installed(monkeypatch, tmp_path):
    installed = {"visualdl", "tensorboardX"}
    monkeypatch.setattr("ppldm.config.training.find_spec", lambda package: package in installed or None)
    assert TrainingOptions(output_dir=str(tmp_path), report_to=["all"]).report_to == ["visualdl", "tensorboard"]
    assert TrainingOptions(output_dir=str(tmp_path), report_to=["none"]).report_to == ["none"]


@pytest.mark.parametrize("said, project", [(None, "ppldm"), ("", "ppldm"), ("mine", "mine")])
def test_the_project_of_wandb_is_what_its_variable_says(tmp_path, monkeypatch, said, project):
    """By a stand-in for the package, which takes what it is called with."""
    given = {}
    stand_in = SimpleNamespace(init=lambda **settings: given.update(settings), Image=None)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    if said is None:
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
    else:
        monkeypatch.setenv("WANDB_PROJECT", said)
    WandbSink(tmp_path, 0, {})
    assert given["project"] == project and given["name"] == tmp_path.name


def test_what_is_not_installed_is_said_in_a_line(monkeypatch):
    check_reporters(["visualdl", "none"])
    monkeypatch.setitem(PACKAGES, "wandb", "no_such_package")
    with pytest.raises(
        ConfigError, match="wandb needs a package that is not installed; run pip install no_such_package"
    ):
        check_reporters(["wandb"])
    with pytest.raises(
        ConfigError,
        match="--report_to tensorbord is not known; use visualdl, tensorboard, wandb, comet_ml, all or none",
    ):
        check_reporters(["tensorbord"])


def test_the_file_is_json_lines(tmp_path):
    write(tmp_path, [], 0, range(1, 4))
    assert [json.loads(line)["global_step"] for line in (tmp_path / METRICS_FILE).open()] == [1, 2, 3]
