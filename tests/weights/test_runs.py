"""A place that is given for a model or a run means what lies in it: one rule, at one door."""

import os

import pytest
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run as run_command
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.pictures.draw import describe_source
from ppldm.runs.read import follow
from ppldm.runs.watch import make_page
from ppldm.training.commands.finetune import read_start
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.utils.files import write_json
from ppldm.weights.folders import find_runs, model_in, one_run, runs_in
from ppldm.weights.source import config_here, open_model
from ppldm.weights.write import write_weights


def make_run(folder, family="ldm", holds=(), time=1e9):
    """A run's folder: its checkpoints by number, and folders of exported models."""
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"family": family})
    for one in holds:
        made = folder / (f"checkpoint-{one}" if isinstance(one, int) else one)
        made.mkdir()
        if isinstance(one, int):
            write_json(made / "manifest.json", {})
            (made / "model_state.pdparams").write_bytes(b"")
    os.utime(folder / "run.json", (time, time))
    return folder


@pytest.mark.parametrize(
    "family, holds, found",
    [
        ("ldm", [100, 200], "checkpoint-200"),
        ("ldm", [100, "pipeline"], "pipeline"),
        ("autoencoder", [100, "vae"], "vae"),
        ("cascade_prior", [100, "prior"], ""),  # whose parts are read from the run's folder
    ],
)
def test_a_run_is_the_model_that_it_has_exported_or_else_its_newest_checkpoint(tmp_path, caplog, family, holds, found):
    run = make_run(tmp_path / "out/training", family, holds)
    for place in (run, tmp_path / "out", tmp_path):
        assert model_in(place) == open_model(str(place)).path == (run / found if found else run)
        assert find_runs(place) == [one_run(place)] == [run]
    assert ("training has not ended: its newest checkpoint is taken" in caplog.text) is found.startswith("checkpoint")


def test_a_checkpoint_that_is_not_whole_is_no_model(tmp_path):
    run = make_run(tmp_path / "run", holds=[100, 200])
    (run / "checkpoint-200/manifest.json").unlink()
    assert model_in(run) == run / "checkpoint-100"


def test_an_autoencoder_does_not_stand_in_the_way_of_the_model_beside_it(tmp_path):
    make_run(tmp_path / "autoencoder", "autoencoder", ["vae"])
    run = make_run(tmp_path / "diffusion", "ldm", ["pipeline"])
    assert model_in(tmp_path) == run / "pipeline"


def test_what_is_a_model_itself_is_left_alone(tmp_path):
    make_run(tmp_path / "pipeline/run", holds=["pipeline"])
    (tmp_path / "pipeline/unet").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.ckpt").write_bytes(b"")
    for name in ("pipeline", "empty", "file.ckpt", "missing"):
        assert model_in(tmp_path / name) == tmp_path / name


def test_a_choice_is_one_line_with_all_of_them_the_newest_first(tmp_path):
    for name, time in (("old", 1e9), ("new", 2e9)):
        make_run(tmp_path / name, holds=["pipeline"], time=time)
    with pytest.raises(ModelError) as refused:
        open_model(tmp_path)
    both = f"{tmp_path}/new{{0}}, {tmp_path}/old{{0}}; name one"
    assert str(refused.value) == f"{tmp_path} holds 2 models: {both.format('/pipeline')}"
    with pytest.raises(ConfigError) as refused:
        one_run(tmp_path)
    assert str(refused.value) == f"{tmp_path} holds 2 runs: {both.format('')}"


def test_nothing_there_yet_is_said(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(ModelError, match="run has no model yet; a checkpoint comes every --save_steps"):
        model_in(run)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="nor holds one .no run.json.; name a training's --output_dir"):
        runs_in(empty)
    with pytest.raises(ConfigError, match="elsewhere is not there; name a training's --output_dir"):
        runs_in(tmp_path / "elsewhere")


def test_runs_far_below_and_hidden_ones_are_not_looked_for(tmp_path):
    make_run(tmp_path / "a/b/c")
    make_run(tmp_path / ".cache/run")
    assert not find_runs(tmp_path)


def test_a_config_is_read_through_the_same_door(tmp_path):
    run = make_run(tmp_path / "run", holds=["pipeline"])
    (run / "pipeline/unet").mkdir()
    (run / "pipeline/unet/config.json").write_text("no JSON")
    with pytest.raises(ModelError, match="pipeline/unet/config.json"):
        config_here("unet", str(tmp_path))


def test_the_page_finds_runs_that_begin_later_and_keeps_their_numbers(tmp_path):
    make_run(tmp_path / "autoencoder", time=1e9)
    followers: list = []
    client = make_page(followers, find=lambda: follow(followers, [tmp_path])).test_client()
    assert [one["name"] for one in client.get("/now").json["runs"]] == ["autoencoder"]
    make_run(tmp_path / "diffusion", time=2e9)
    runs = client.get("/now").json["runs"]
    assert [(one["name"], one["named"]) for one in runs] == [("autoencoder", False), ("diffusion", False)]
    found = client.get("/curves?runs=1").json
    assert len(found) == 2 and found[0] == {"charts": {}, "pictures": {}}
    follow(named := [], [tmp_path / "diffusion"])
    assert [one.is_named for one in named] == [True]


def test_every_door_takes_it(tmp_path):
    run = make_run(tmp_path / "out/training")
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
    write_weights(weights, "ppdiffusers", run / "pipeline")
    assert ppldm.load(tmp_path / "out").resolution == ppldm.load(run / "pipeline").resolution
    run_command(["export", str(tmp_path / "out"), "--out", str(tmp_path / "exported")])
    assert (tmp_path / "exported/unet").is_dir()
    assert read_start(str(tmp_path / "out")).model == str(run / "pipeline")
    found, named = (describe_source(str(path), False)["sha256"] for path in (tmp_path, run / "pipeline"))
    assert found == named
    assert config_here("unet", str(tmp_path / "out"))
