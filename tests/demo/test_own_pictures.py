"""`ppldm quickstart --pictures`: the plan follows the pictures and the files that it wrote; one run to its grid."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppldm.config.load import read_yaml
from ppldm.demo.own_pictures import plan_pictures
from ppldm.demo.quickstart import describe_further, next_commands, quickstart
from ppldm.families import first_training
from ppldm.training.commands.train import read_recipe
from ppldm.utils import stages
from ppldm.utils.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
COLOURS = ("red", "green", "blue", "white", "black")


@pytest.fixture(autouse=True)
def blurred(monkeypatch):
    """The package's autoencoder, whose networks need not be loaded here, blurs all pictures."""
    monkeypatch.setattr(first_training, "measure", lambda *given: 15.0)


@pytest.fixture
def pictures(tmp_path):
    """Ten pictures whose names say what they show."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, colour in enumerate(COLOURS * 2):
        noise = rng.integers(0, 60, (96, 80 + number, 3), dtype=np.uint8)
        pixels = np.asarray(Image.new("RGB", noise.shape[1::-1], colour)) // 2 + noise
        Image.fromarray(pixels).save(folder / f"a_{colour}_wall_{number}.jpg")
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def plan(pictures, out, **wishes):
    made, lines = plan_pictures(pictures, out, 1, **wishes)
    return {stage.name: stage for stage in made}, lines


def changed(before: dict, after: dict) -> set[str]:
    """The stages that are made anew, but for those that only come after another."""
    return {name for name, stage in after.items() if name not in before or before[name].identity != stage.identity}


def test_a_dry_run_writes_nothing_and_says_what_the_commands_read(pictures, out):
    _, lines = plan_pictures(pictures, out, 1, write=False)
    assert not out.exists() and lines[-1].startswith("the commands read prompts.txt, captions.csv, ")
    assert not any("dry run" in line for line in plan(pictures, out)[1])


def test_what_was_found_is_said_and_its_recipes_can_be_trained(pictures, out):
    made, lines = plan(pictures, out, steps=40, train_autoencoder=True)
    assert "10 pictures with captions from the pictures' names (few: 20 or more teach more):" in lines[0]
    assert [line.strip() for line in lines[1:4]] == [
        f"a_{colour}_wall_{number}.jpg: a {colour} wall" for colour, number in (("black", 4), ("blue", 7), ("red", 0))
    ]
    for name, steps in (("autoencoder", 800), ("diffusion", 40)):
        recipe = read_recipe(["--config", str(out / f"{name}.yaml")], True, None)
        assert (recipe.training.max_steps, recipe.data.resolution) == (steps, 64)
        assert recipe.training.output_dir == str(out / name) and str(out / f"{name}.yaml") in made[name].command
    assert recipe.model.vae_name_or_path == str(out / "autoencoder/vae")
    assert (out / "prompts.txt").read_text().splitlines()[0] == "a black wall"
    assert set(made) == {"data", "tokenizer", "autoencoder", "diffusion", "pictures", "curve"}


@pytest.mark.parametrize(("count", "batches"), [(2, (2, 2)), (3, (2, 2)), (9, (4, 8)), (10, (4, 8))])
@pytest.mark.parametrize("processes", [1, 4])
def test_a_batch_is_no_larger_than_the_pictures_are_many(pictures, out, count, batches, processes):
    for path in sorted(pictures.iterdir())[count:]:
        path.unlink()
    made = plan_pictures(pictures, out, processes, train_autoencoder=True)[0]
    for name, batch in zip(("autoencoder", "diffusion"), batches, strict=True):
        (command,) = (stage.command for stage in made if stage.name == name)
        ranks = int(command[command.index("--nproc_per_node") + 1]) if processes > 1 else 1
        assert int(command[-1]) * ranks == batch
        assert read_yaml(out / f"{name}.yaml")[0]["run.per_device_train_batch_size"] == batch


def test_the_same_command_changes_nothing(pictures, out):
    before, _ = plan(pictures, out)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    after, _ = plan(pictures, out)
    assert not changed(before, after)
    assert files == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    os.utime(pictures / "a_red_wall_0.jpg")  # touched: its content is what counts
    assert not changed(before, plan(pictures, out)[0])


def test_another_picture_or_caption_makes_the_data_anew(pictures, out):
    before, _ = plan(pictures, out)
    Image.new("RGB", (80, 80), "red").save(pictures / "a_red_wall_0.jpg")
    seen = plan(pictures, out)[0]
    assert "data" in changed(before, seen)
    (pictures / "a_red_wall_0.jpg").rename(pictures / "a_door.jpg")
    assert "data" in changed(seen, plan(pictures, out)[0])


def test_a_file_changed_by_hand_is_kept_and_what_reads_it_is_made_anew(pictures, out):
    before, _ = plan(pictures, out)
    for name, stage in {"diffusion.yaml": "diffusion", "prompts.txt": "pictures", "captions.csv": "data"}.items():
        text = (out / name).read_text()
        (out / name).write_text(text.replace("wall", "door") + "\n")
        after, lines = plan(pictures, out)
        assert changed(before, after) == {stage} and f"{name} was changed by hand" in lines[-1]
        assert (out / name).read_text() != text
        (out / name).unlink()
        assert not changed(before, plan(pictures, out)[0]) and (out / name).read_text() == text


def test_a_recipe_changed_by_hand_says_how_long_it_trains(pictures, out):
    usual = {stage.name: stage for stage in plan_pictures(pictures, out, 1)[0]}
    for name, updates in (("diffusion", 40), ("autoencoder", 7)):
        recipe = out / f"{name}.yaml"
        every = read_yaml(recipe)[0]["validation.image_logging_steps"]
        assert usual[name].title.endswith(f", samples every {every}")
        recipe.write_text(recipe.read_text().replace(f"max_steps: {usual[name].updates}", f"max_steps: {updates}"))
        stages, lines = plan_pictures(pictures, out, 1)
        stage = next(one for one in stages if one.name == name)
        assert stage.updates == updates and stage.seconds < usual[name].seconds
        assert f"{updates} updates" in stage.title and any(f"{updates} updates of the" in line for line in lines)
    assert "train further, to 80 updates" in describe_further(stages)[0]


def test_other_settings_make_only_their_stage_anew(pictures, out):
    before, _ = plan(pictures, out, steps=40)
    assert changed(before, plan(pictures, out, steps=41)[0]) == {"diffusion"}
    assert {"data", "diffusion"} <= changed(before, plan(pictures, out, steps=40, resolution=32)[0])


@pytest.mark.parametrize("processes, devices", [(1, ""), (2, " --devices 0,1")])
def test_training_further_has_the_processes_and_the_batch_of_before(pictures, out, processes, devices):
    stages, _ = plan_pictures(pictures, out, processes, train_autoencoder=True)
    (further,) = describe_further(stages)
    batch, twice = 8 // processes, 2 * stages[3].updates
    told = f"train further, to {twice} updates in all (the loss may rise at first; grid.png stays as it is)"
    assert further.startswith(f"{told}: ppldm train --config ")
    assert further.endswith(
        f"--per_device_train_batch_size {batch}{devices} --max_steps {twice} --accept_changes max_steps"
    )


@pytest.mark.parametrize(
    ("decibels", "asked", "trained"), [(30.0, False, False), (30.0, True, True), (15.0, False, True)]
)
def test_an_autoencoder_that_blurs_these_pictures_is_trained_on_them(
    pictures, out, monkeypatch, decibels, asked, trained
):
    measured = []

    def measure(*given):
        measured.append(given)
        os.environ["SET_BY_A_LIBRARY"] = "2"  # as the number of threads is
        return decibels

    monkeypatch.setattr(first_training, "check_name", lambda name: None)
    monkeypatch.setattr(first_training, "measure", measure)
    made, lines = plan(pictures, out, train_autoencoder=asked)
    assert ("autoencoder" in made) == trained and f"PSNR {decibels} dB" in "".join(lines)
    own = read_yaml(out / "diffusion.yaml")[0]["model.vae_name_or_path"]
    assert (own == str(out / "autoencoder/vae")) == trained
    if trained:  # it begins as the package's
        assert read_yaml(out / "autoencoder.yaml")[0]["model.vae_name_or_path"] != own
    plan(pictures, out, train_autoencoder=asked)
    assert "SET_BY_A_LIBRARY" not in os.environ  # the stages choose for themselves
    assert len(measured) == 1  # once for the same pictures


@pytest.mark.parametrize("way", ["names", "files"])
def test_results_may_lie_in_the_folder_of_pictures(pictures, monkeypatch, way):
    if way == "files":
        for path in [*pictures.iterdir()]:
            path.with_suffix(".txt").write_text("a wall")
    monkeypatch.chdir(pictures)
    out = pictures / "pictures-model"
    before, _ = plan(".", out)
    assert f"{out}/captions.csv" in before["data"].command  # and not the folder, which will hold other pictures
    for name in ("pictures/a_red_wall.png", "diffusion/samples/step-1-a.png", "autoencoder/a.png", ".before/a.png"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 80)).save(out / name)
        (out / name).with_suffix(".txt").write_text("no caption of these")
    assert not changed(before, plan(".", out)[0])
    (pictures / "a_red_wall_0.jpg").unlink()
    assert "data" in changed(before, plan(".", out)[0])


@pytest.mark.parametrize("out", [".", "..", "own", "link"])
def test_results_do_not_go_where_pictures_are(pictures, monkeypatch, out):
    """The stages put away what lies in their folders, such as OUT/pictures."""
    (pictures / "own").mkdir()
    (pictures / "a_red_wall_0.jpg").rename(pictures / "own/a_red_wall_0.jpg")
    (pictures / "link").symlink_to("own")
    monkeypatch.chdir(pictures)
    with pytest.raises(ConfigError, match=f"--out {out} holds the pictures of .; name a folder without"):
        plan_pictures(".", Path(out), 1)


def test_a_dry_run_writes_nothing_and_pictures_that_cannot_be_trained_on_are_refused(
    pictures, out, capsys, monkeypatch
):
    monkeypatch.chdir(pictures)
    quickstart(["--pictures", ".", "--dry-run"])
    assert f"--out {pictures}/pictures-model/data" in capsys.readouterr().out
    quickstart(["--pictures", str(pictures), "--dry-run", "--out", str(out)])
    assert f"convert {out}/captions.csv" in capsys.readouterr().out and not out.exists()
    assert not (pictures / "pictures-model").exists()
    for side, words in ((40, "multiples of 16"), (112, "no picture of")):
        with pytest.raises((ConfigError, DataError), match=words):
            quickstart(["--pictures", ".", "--out", str(out), "--resolution", str(side)])
    with pytest.raises(DataError, match="say nothing"):
        for number, path in enumerate(sorted(pictures.iterdir())):
            path.rename(pictures / f"{number}.jpg")
        quickstart(["--pictures", "."])


def test_results_go_beside_the_demos(pictures, monkeypatch, capsys):
    monkeypatch.chdir(pictures.parent)
    quickstart(["--pictures", "pictures", "--dry-run"])
    assert f"--out {pictures.parent}/pictures-model/data" in capsys.readouterr().out


def test_captions_beside_pictures_are_read_by_the_conversion_itself(pictures, out):
    for path in list(pictures.iterdir()):
        path.with_suffix(".txt").write_text("ein roter Stuhl")
    made, _ = plan(pictures, out)
    assert str(pictures) in made["data"].command and not (out / "captions.csv").exists()


def test_a_stage_of_other_inputs_removes_what_was_made(pictures, out):
    run = []
    quick = [stage for stage in plan_pictures(pictures, out, 1)[0] if stage.name in ("data", "tokenizer")]
    stages.run_stages(quick, out, lambda stage: run.append(stage.name))
    stages.run_stages(quick, out, lambda stage: run.append(stage.name))
    assert run == ["data", "tokenizer"]
    (out / "data").mkdir()
    (pictures / "a_red_wall_0.jpg").unlink()
    again = [stage for stage in plan_pictures(pictures, out, 1)[0] if stage.name in ("data", "tokenizer")]
    stages.run_stages(again, out, lambda stage: run.append(stage.name))
    assert run[2:] == ["data", "tokenizer"] and not (out / "data").exists()


@pytest.mark.turn("commands lead from a folder to pictures", 1)
@pytest.mark.slow
def test_ten_pictures_become_pictures_of_their_captions(pictures):
    """By a command that is given where they lie."""
    out = pictures / "pictures-model"
    words = [
        "--steps",
        "3",
        "--autoencoder-steps",
        "2",
        "--processes",
        "1",
        "--resolution",
        "32",
        "--train-autoencoder",
    ]
    command = [sys.executable, "-m", "ppldm", "quickstart", "--pictures", ".", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PPLDM_OFFLINE": "1"}
    done = subprocess.run(command, cwd=pictures, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = [json.loads(line) for line in (out / "pictures/pictures.jsonl").read_text().splitlines()]
    assert {one["prompt"] for one in drawn} == {f"a {colour} wall" for colour in COLOURS} and len(drawn) == 20
    assert (out / "pictures/grid.png").stat().st_size
    stages, _ = plan_pictures(
        pictures, out, 1, False, resolution=32, steps=3, autoencoder_steps=2, train_autoencoder=True
    )
    assert all(line in done.stderr for line in next_commands(out) + describe_further(stages))
    again = subprocess.run(command, cwd=pictures, env=variables, capture_output=True, text=True)
    assert again.returncode == 0 and again.stderr.count("done before") == 6
