"""`ppldm finetune`: which commands a folder of pictures comes to, and that they lead to pictures."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from small_weights import small_weights, write_clip

from ppldm.cli.main import run
from ppldm.data.filelist import read_filelist_list
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.training.commands.finetune import Settings, plan, read_pictures, read_start, write_lists
from ppldm.training.commands.train import read_recipe
from ppldm.utils.errors import ConfigError, PpldmError
from ppldm.weights.lora.files import read_lora
from ppldm.weights.lora.merge import read_tokens
from ppldm.weights.source import read_component
from ppldm.weights.write import write_weights


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model that was trained otherwise than by default."""
    weights = small_weights(unet={"sample_size": 4}, prediction_type="v_prediction")
    weights.scheduler["rescale_betas_zero_snr"] = True
    weights.metadata = {"mask_pad_tokens": True, "model_max_length": 20}
    vocab = build_vocab(["a photo of a dog"])
    weights.tokenizer = CaptionTokenizer([*vocab, *(f"x{number}" for number in range(60 - len(vocab)))], 77)
    folder = tmp_path_factory.mktemp("base") / "base"
    write_weights(weights, "ppdiffusers", folder)
    return folder


@pytest.fixture
def pictures(tmp_path):
    """Three pictures, of which two have captions."""
    folder = tmp_path / "my pictures"
    (folder / "inner").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a.png", "inner/b.JPG", "c.jpg"):
        colours = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        colours.resize((40, 36)).save(folder / name, format="PNG")
    (folder / "a.txt").write_text("a dog\n")
    (folder / "c.txt").write_text("一只狗", encoding="utf-8")
    return folder


def flags(command) -> dict[str, str]:
    """The value behind each flag of a command."""
    return {word[2:]: after for word, after in zip(command, command[1:], strict=False) if word.startswith("--")}


def dry_run(capsys, *words) -> dict[str, list[str]]:
    """The words of the commands that a dry run prints, by the command's name."""
    run(["finetune", *map(str, words), "--dry-run"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("python")]
    return {words[4]: words[5:] for words in lines}


def test_a_dry_run_prints_what_a_shell_can_run_and_writes_nothing(base, pictures, tmp_path, capsys):
    run(["finetune", str(pictures), "--base", str(base), "--out", str(tmp_path / "out"), "--caption", "it's",
         "--class-prompt", "a dog", "--num-class-pictures", "2", "--dry-run"])  # fmt: skip
    text = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    made = text.partition("# reading the pictures (")[0]
    subprocess.run(["sh", "-ec", made], check=True)
    tables = sorted((tmp_path / "out").glob("*.jsonl"), reverse=True)
    own, drawn = ([json.loads(line) for line in path.read_text().splitlines()] for path in tables)
    assert [one["caption"] for one in own] == ["it's"] * 3 and len(drawn) == 2
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)


def test_what_the_base_was_trained_with_is_kept(base, pictures, capsys):
    given = flags(dry_run(capsys, pictures, "--base", base)["train"])
    expected = {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": "True",
        "mask_pad_tokens": "True",
        "model_max_length": "20",
        "empty_caption": "embedding",
        "resolution": "32",
        "model_name_or_path": str(base),
    }
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(
    "words, steps",
    [([], 400), (["--batch-size", "1"], 600), (["--batch-size", "1", "--class-prompt", "a dog"], 1200),
     (["--steps", "7"], 7), (["--batch-size", "100"], 400)],
)  # fmt: skip
def test_updates_by_the_number_of_pictures(base, pictures, capsys, words, steps):
    assert flags(dry_run(capsys, pictures, "--base", base, *words)["train"])["max_steps"] == str(steps)


def test_lora_or_all_weights(base, pictures, capsys):
    lora, full = (dry_run(capsys, pictures, "--base", base, "--method", one, "--rank", 8) for one in ("lora", "full"))
    assert flags(lora["train"])["lora_rank"] == "8" and flags(lora["train"])["learning_rate"] == "0.0001"
    assert "lora_rank" not in flags(full["train"]) and flags(full["train"])["learning_rate"] == "5e-06"
    out = flags(lora["train"])["output_dir"]
    assert flags(lora["generate"])["lora"] == f"{out}/lora" and flags(lora["generate"])["model"] == str(base)
    assert flags(full["generate"])["model"] == f"{out}/pipeline" and "lora" not in flags(full["generate"])


@pytest.mark.parametrize("method, expected", [("lora", ["<my-dog>", "<b>"]), ("full", [])])
def test_words_in_angle_brackets_become_tokens(base, pictures, capsys, method, expected):
    words = ["--caption", "a <my-dog> and <b> of <my-dog>, 3 < 4 > 2", "--method", method]
    train = dry_run(capsys, pictures, "--base", base, *words)["train"]
    found = train[train.index("--train_tokens") + 1 :][:2] if "--train_tokens" in train else []
    assert found == expected


@pytest.mark.parametrize("method", ["lora", "full"])
def test_every_flag_of_the_training_is_one_that_it_takes(base, pictures, capsys, method):
    words = ["--caption", "a photo of <fido>", "--method", method, "--rank", 3]
    recipe = read_recipe(dry_run(capsys, pictures, "--base", base, *words)["train"], loop=True, config=None)
    assert recipe.model.family == "ldm" and recipe.model.starts_from_pipeline
    assert recipe.model.lora_rank == (3 if method == "lora" else None)
    assert recipe.model.train_tokens == (["<fido>"] if method == "lora" else [])


def test_other_pictures_or_captions_are_another_plan(base, pictures, tmp_path, capsys):
    plans = [dry_run(capsys, pictures, "--base", base, *more) for more in ([], ["--caption", "a dog"])]
    (pictures / "c.txt").write_text("a cat, larger")
    plans.append(dry_run(capsys, pictures, "--base", base))
    (pictures / "a.png").rename(pictures / "d.png")
    (pictures / "a.txt").rename(pictures / "d.txt")
    plans.append(dry_run(capsys, pictures, "--base", base))
    assert len({tuple(one["convert"]) for one in plans}) == len({tuple(one["train"]) for one in plans}) == 4
    assert plans[-1]["train"][-2:] == ["a cat, larger", "a dog"]  # captions, each once, as prompts
    assert plans[1]["train"][-1:] == ["a dog"]


def test_pictures_of_the_class_are_mixed_one_to_one(base, pictures, tmp_path):
    own = read_pictures(pictures, "a <dog>")
    stages, settings = _settings(base, tmp_path, own)
    assert [stage.name for stage in stages] == ["data", "class", "class-data", "training", "pictures"]
    for path, text in write_lists(settings, own).items():
        path.write_text(text)
    for folder, name in (("data", own.name), ("class-data", "class")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.filelist").write_text("")
    mixed = read_filelist_list(tmp_path / "mixed.filelist.list")
    assert [(item.weight, item.path.parent.name) for item in mixed] == [(1.0, "data"), (1.0, "class-data")]
    assert flags(stages[3].command)["file_list"] == str(tmp_path / "mixed.filelist.list")
    listed = [json.loads(line)["file_name"] for line in (tmp_path / "class.jsonl").read_text().splitlines()]
    assert listed == [f"{tmp_path}/class/000-{number:02d}.png" for number in range(102)]
    alone = plan(replace(settings, class_prompt=""), own)
    assert [stage.name for stage in alone] == ["data", "training", "pictures"]


def _settings(base, out, own):
    settings = Settings(
        out=out, start=read_start(str(base)), method="full", rank=4, steps=10, batch_size=2, learning_rate=1e-4,
        resolution=32, class_prompt="a dog", num_class_pictures=102, prompts=own.captions, seed=1,
    )  # fmt: skip
    return plan(settings, own), settings


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere"], "cannot read the folder .*nowhere: No such file"),
        (["{pictures}/inner"], "no picture in .* has a caption; write cat.txt beside cat.jpg"),
        (["{pictures}", "--base", "{pictures}"], "is not a whole pipeline; make one of it with `ppldm export`"),
        (["{pictures}", "--batch-size", "0"], "--batch-size 0 must be above 0"),
        (["{pictures}", "--steps", "0"], "--steps 0 must be above 0"),
        (["{pictures}", "--learning-rate", "-1"], "--learning-rate -1 must be above 0"),
    ],
)
def test_bad_input_is_one_line(base, pictures, words, message):
    words = [word.format(pictures=pictures) for word in words]
    with pytest.raises(ConfigError, match=message):
        run(["finetune", *(words if "--base" in words else [*words, "--base", str(base)]), "--dry-run"])


@pytest.mark.turn("commands lead from a folder to pictures", 1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_one_command_leads_from_a_folder_to_pictures_and_goes_on(base, pictures, tmp_path, capfd, method):
    words = [str(pictures), "--base", str(base), "--caption", "a photo of a dog", "--out", str(tmp_path / "out"),
             "--method", method, "--steps", "2", "--batch-size", "1"]  # fmt: skip
    run(["finetune", *words])
    assert Image.open(tmp_path / "out/pictures/000-00.png").size == (32, 32)
    assert (tmp_path / "out/training/lora").is_dir() == (method == "lora")
    log = (tmp_path / "out/training/metrics.jsonl").read_text()
    capfd.readouterr()
    run(["finetune", *words])
    assert capfd.readouterr().err.count("done before") == 3
    assert (tmp_path / "out/training/metrics.jsonl").read_text() == log


# Ends the training as a scheduler does, the moment that its first checkpoint is there.
STOPPING = """
import os, signal, sys
def stop(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("training/checkpoint-1"):
        os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(stop)
"""


@pytest.mark.turn("commands lead from a folder to pictures", 1)
@pytest.mark.slow
def test_a_lora_and_a_token_of_stable_diffusion_beside_pictures_of_the_class(pictures, tmp_path, monkeypatch, capfd):
    weights, clip, out = small_weights(unet={"sample_size": 4}), write_clip(tmp_path / "clip"), tmp_path / "out"
    weights.components["text_encoder"] = read_component("text_encoder", clip)
    weights.tokenizer = clip.parent / "tokenizer"
    write_weights(weights, "diffusers", tmp_path / "base")
    words = ["finetune", str(pictures), "--base", str(tmp_path / "base"), "--out", str(out), "--caption",
             "a photo of <fido>", "--class-prompt", "a photo of a dog", "--num-class-pictures", "2", "--rank", "2",
             "--steps", "3", "--batch-size", "1", "--learning-rate", "0.1"]  # fmt: skip
    (tmp_path / "stopping").mkdir()
    (tmp_path / "stopping/sitecustomize.py").write_text(STOPPING)
    with monkeypatch.context() as stopping, pytest.raises(PpldmError):
        stopping.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "stopping"), *sys.path]))
        run(words)
    assert (out / "training/checkpoint-1").exists() and not (out / "training/checkpoint-3").exists()
    assert not (out / "training/lora").exists() and len(list(out.glob("class/000-*.png"))) == 2
    capfd.readouterr()
    run(words)
    said = capfd.readouterr().err
    assert said.count("done before") == 3 and "resuming from" in said
    logged = (out / "training/metrics.jsonl").read_text().splitlines()
    assert json.loads(logged[-1])["global_step"] == 3
    found = read_lora(out / "training/lora").components
    assert found.keys() == {"unet"} and {pair.rank for pair in found["unet"].values()} == {2}
    assert {token: row.shape for token, row in read_tokens(out / "training/lora").items()} == {"<fido>": (1, 32)}
    drawn = {}
    for name, lora in {"half": [f"{out}/training/lora:0.5"], "whole": [f"{out}/training/lora"]}.items():
        run(["generate", "--model", str(tmp_path / "base"), "--lora", *lora, "--prompt", "a photo of <fido>",
             "--num-samples", "1", "--num-inference-steps", "2", "--out", str(tmp_path / name)])  # fmt: skip
        drawn[name] = np.asarray(Image.open(tmp_path / name / "000-00.png"))
    assert drawn["half"].shape == (32, 32, 3) and not np.array_equal(drawn["half"], drawn["whole"])
    assert Image.open(out / "pictures/000-00.png").size == (32, 32)
