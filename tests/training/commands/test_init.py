"""`ppldm init`: whatever is answered, the recipe is one that `ppldm train --dry_run` takes."""

import io
import json
import shutil
from contextlib import closing, suppress
from itertools import product
from pathlib import Path

import pytest
from tiny_model import write_base

from ppldm.cli.main import run
from ppldm.config.load import read_yaml
from ppldm.config.network_files import CONFIG_DIR
from ppldm.data.formats.open import open_part
from ppldm.data.formats.part import Part
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.training.commands import dry_run, init
from ppldm.training.commands.init import DATA, GOALS, MACHINES, QUESTIONS
from ppldm.training.commands.train import read_recipe
from ppldm.training.doctor import memory
from ppldm.training.doctor import run as doctors_run
from ppldm.training.doctor import run as forecast
from ppldm.training.doctor.command import FoundErrors, doctor
from ppldm.training.rows import open_sources
from ppldm.utils.errors import ConfigError
from ppldm.utils.machine import nvidia_smi
from ppldm.utils.machine.devices import KINDS
from ppldm.utils.machine.nvidia_smi import Gpu

pytestmark = pytest.mark.usefixtures("shapes_of_each_config_once")


@pytest.fixture
def place(tiny, tmp_path, monkeypatch):
    """The working folder, with pictures, parts and metadata."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    with closing(Part(tiny.folder / "part-00000.gz")) as part:
        for number in range(3):
            row = part.read(number)
            (tmp_path / "pictures" / f"{number}.png").write_bytes(row.image)
            (tmp_path / "pictures" / f"{number}.txt").write_text(row.caption)
    (tmp_path / "metadata.parquet").touch()
    return tmp_path


def start(tiny, place, data: str, goal: str, machine: str, *words: str) -> None:
    path = {"pictures": place / "pictures", "parts": tiny.file_list, "laion": place / "metadata.parquet"}[data]
    run(["init", "--data", data, "--path", str(path), "--goal", goal, "--machine", machine, "--no-doctor", *words])


@pytest.mark.parametrize(("data", "goal", "machine"), list(product(DATA, GOALS, MACHINES)))
def test_every_answer_makes_a_recipe_that_passes_the_dry_run(tiny, place, capsys, data, goal, machine):
    start(tiny, place, data, goal, machine)
    write_vae(place / "recipe-autoencoder/vae")  # as the recipe of the autoencoder does
    recipe = read_recipe(["--config", "recipe.yaml"], True, None)
    capsys.readouterr()
    dry_run.dry_run(recipe, 1, True, memory.forecast)
    report = json.loads(capsys.readouterr().out)
    assert report["samples_an_update"] > 0 and sum(report["bytes_a_device"].values()) > 0
    trained = {name for name, part in report["components"].items() if part["trained"]}
    assert trained == ({"text_encoder", "unet"} if goal == "scratch" else {"unet"})
    assert (recipe.training.fp16, recipe.training.bf16) == (machine == "16gb", machine in ("24gb", "8x80gb"))
    if data != "laion":
        assert sum(len(source.parts) for source in open_sources(recipe.data)) == (1 if data == "pictures" else 2)


def test_every_setting_of_a_recipe_stands_under_its_help(tiny, place):
    start(tiny, place, "pictures", "lora", "24gb")
    text = (place / "recipe.yaml").read_text()
    assert "  # Samples that a device takes at a time.\n  per_device_train_batch_size: 2\n" in text
    lines = text.splitlines()
    settings = [number for number, line in enumerate(lines) if line.startswith("  ") and not line.startswith("  #")]
    assert len(settings) > 12 and all(lines[number - 1].startswith("  #") for number in settings)


def test_a_model_of_a_folder_keeps_what_it_was_trained_with(tiny, place):
    start(tiny, place, "pictures", "lora", "cpu", "--base", str(write_base(tiny)))
    values = read_yaml(place / "recipe.yaml")[0]
    assert values["family"] == "ldm" and values["model.model_max_length"] == 12
    read_recipe(["--config", "recipe.yaml"], True, None)


def test_a_tiny_model_of_pictures_needs_nothing_that_is_not_here(tiny, place, capsys):
    start(tiny, place, "pictures", "scratch", "cpu")
    said = capsys.readouterr().out
    assert "0.png: picture 0" in said
    assert said.endswith("then: ppldm train --config recipe-autoencoder.yaml, then ppldm train --config recipe.yaml\n")
    first = read_recipe(["--config", "recipe-autoencoder.yaml"], True, None)
    recipe = read_recipe(["--config", "recipe.yaml"], True, None)
    assert recipe.model.vae_name_or_path == f"{first.training.output_dir}/vae" == "recipe-autoencoder/vae"
    assert recipe.model.tokenizer_name == "recipe-tokenizer" and recipe.data.resolution == 32
    tokenizer = load_tokenizer("recipe-tokenizer", recipe.model.model_max_length)
    assert tokenizer.max_length == recipe.model.model_max_length and not tokenizer.unknown_words(["picture 1"])
    (source,) = open_sources(recipe.data)
    with closing(open_part(source.parts[0], source)) as part:
        assert [part.read(row).caption for row in range(len(part))] == ["picture 0", "picture 1", "picture 2"]
    assert all("# On two cores it takes about" in (place / name).read_text()
               for name in ("recipe.yaml", "recipe-autoencoder.yaml"))  # fmt: skip


def write_vae(folder: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copy(CONFIG_DIR / "vae_tiny.json", folder / "config.json")


def test_nothing_is_overwritten_and_what_is_missing_is_named(tiny, place):
    start(tiny, place, "pictures", "lora", "cpu")
    with pytest.raises(ConfigError, match=r"recipe.yaml is there already"):
        start(tiny, place, "pictures", "lora", "cpu")
    with pytest.raises(ConfigError, match="--path nowhere is not there"):
        run(["init", "--out", "other.yaml", "--data", "pictures", "--path", "nowhere"])
    with pytest.raises(ConfigError, match="--path is missing, and there is no terminal"):
        run(["init", "--out", "other.yaml"])
    assert not (place / "other.yaml").exists()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_questions_are_asked_on_a_terminal_until_they_are_answered(tiny, place, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Terminal(f"photos\npictures\n{place}/pictures\n24gb\n\n"))
    run(["init", "--no-doctor"])
    asked = capsys.readouterr().err
    assert all(one.text in asked for one in QUESTIONS) and "photos is not one of" in asked
    assert "Made by `ppldm init`: lora, for 24gb" in (place / "recipe.yaml").read_text()


@pytest.mark.parametrize(("kind", "memory", "capability", "count", "answers"), [
    ("cpu", "", None, 0, "scratch, for cpu"),
    ("gpu", "15360 MiB", 7.5, 1, "lora, for 16gb"),
    ("gpu", "32768 MiB", 7.0, 1, "lora, for 16gb"),  # without bfloat16
    ("gpu", "24564 MiB", 8.9, 2, "lora, for 24gb"),
    ("gpu", "81920 MiB", 8.0, 1, "lora, for 24gb"),
    ("gpu", "81559 MiB", 9.0, 8, "lora, for 8x80gb"),
    ("gpu", "[N/A]", 9.0, 1, "lora, for 16gb"),
    ("npu", "", None, 0, "lora, for 16gb"),
])  # fmt: skip
def test_enter_alone_fits_the_machine(place, monkeypatch, kind, memory, capability, count, answers):
    monkeypatch.setattr(init, "launch_kind", lambda: KINDS[kind])
    monkeypatch.setattr(nvidia_smi, "list_gpus", lambda: [Gpu("a card", "580.65.06", capability, memory)] * count)
    monkeypatch.setattr("sys.stdin", Terminal("\n" * len(QUESTIONS)))
    monkeypatch.chdir(place / "pictures")
    run(["init", "--no-doctor"])
    assert f"Made by `ppldm init`: {answers}." in Path("recipe.yaml").read_text()
    read_recipe(["--config", "recipe.yaml"], True, None)


def hours_at_100_gflops(operations: int, steps: int) -> float:
    """What two quiet cores do."""
    return operations * steps / 1e11 / 3600


@pytest.mark.turn("a forecast of doctor holds", 2)
@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS)
def test_doctor_has_nothing_against_what_enter_alone_gives_on_a_cpu(place, monkeypatch, capsys, goal):
    monkeypatch.setattr(init, "launch_kind", lambda: KINDS["cpu"])
    monkeypatch.setattr(doctors_run.resources, "usable_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(doctors_run.resources, "available_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(forecast, "least_hours", hours_at_100_gflops)
    run(["init", "--data", "pictures", "--path", "pictures", "--goal", goal, "--no-doctor"])
    capsys.readouterr()
    write_vae(place / "recipe-autoencoder/vae")  # as the recipe of the autoencoder does
    with suppress(FoundErrors):
        doctor(["--config", "recipe.yaml", "--json", "--no_timing"])
    report = json.loads(capsys.readouterr().out)
    bad = {one["name"]: one for one in report["findings"] if one["status"] != "ok"}
    bad.pop("access", None), bad.pop("tokenizer", None)  # this machine may have no network
    bad.pop("rows", None), bad.pop("disk", None)  # of three pictures; this machine may be full
    assert not bad
    steps = read_recipe(["--config", "recipe.yaml"], True, None).training.max_steps
    assert (0 if goal == "scratch" else 1) < hours_at_100_gflops(report["operations_an_update"], steps) < 12


def test_doctor_looks_at_the_recipe(tiny, place, capsys):
    shutil.rmtree(place / "pictures")
    (place / "pictures").mkdir()
    run(["init", "--data", "pictures", "--path", "pictures", "--goal", "lora", "--base", str(write_base(tiny))])
    assert "error   parts" in capsys.readouterr().out
