"""What came from the environment is in nothing that a run writes: its expression stands there, whatever the setting."""

import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from toy import FAMILY as TOY
from toy import registered_toy
from toy_runs import read_rows

from ppldm.config.recipe import schema_of
from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import write_part
from ppldm.families.base import get_family
from ppldm.training.commands.train import check_early, run_recipe
from ppldm.utils.text import hide, note_hidden, reveal

SECRET = "hidden-7c1f"

# Texts that the model is made of, and cannot be kept from it; what is no secret in any use.
OF_THE_MODEL = {"model.lora_modules", "model.lora_components", "model.train_tokens", "model.original_config_file"}
NO_SECRETS = {
    "compute.device", "compute.sharding", "compute.amp_custom_white_list", "compute.amp_custom_black_list",
    "data.bucket_ratios", "data.buckets", "data.layout", "run.accept_changes", "logging.profiler_options",
    "model.methods", "optimizer.lr_steps",
}  # fmt: skip
PLAIN = {
    "optimizer": {"learning_rate": 1e-3},
    "compute": {"dataloader_num_workers": 0, "device": "cpu"},
    "run": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2, "seed": 5},
    "logging": {"logging_steps": 1},
}
NETWORKS = {
    "vae_name_or_path": "${oc.env:FOLDER}/vae",
    "text_encoder_config_file": "${oc.env:FOLDER}/ldmbert.json",
    "unet_config_file": "${oc.env:FOLDER}/unet.json",
    "tokenizer_name": "${oc.env:FOLDER}/tokenizer",
    "model_max_length": 12,
}
SAMPLES = {
    "num_inference_steps": 1, "image_logging_steps": 1, "validation_file_list": "${oc.env:FOLDER}/held.filelist"
}  # fmt: skip
RECIPES = {
    "new": {
        "family": "ldm",
        "model": NETWORKS,
        "data": {"file_list": "${oc.env:FOLDER}/tiny.filelist.list", "resolution": 32},
        "run": {"output_dir": "${oc.env:OUT}/new", "hub_model_id": "me/${oc.env:WORD}", "hub_token": "${oc.env:WORD}2"},
        "logging": {"report_to": ["visualdl", "tensorboard"], "logging_dir": "${oc.env:OUT}/curves"},
        "validation": SAMPLES | {"validation_prompts": ["${oc.env:PHRASE}", "plain"]},
    },
    "adapters": {
        "family": "ldm",
        "model": {"model_name_or_path": "${oc.env:OUT}/new/pipeline", "lora_rank": 2, "model_max_length": 12},
        "data": {
            "file_list": "${oc.env:FOLDER}/tiny.filelist", "resolution": 32, "random_crop": False,
            "where": "license != '${oc.env:WORD}'",
            "shuffle_tags": True, "tag_separator": "${oc.env:WORD}", "keep_tags_separator": "${oc.env:WORD}1",
            "tag_group_separator": "${oc.env:WORD}2", "latents": "ondemand", "latents_dir": "${oc.env:OUT}/latents",
        },
        "run": {"output_dir": "${oc.env:OUT}/adapters"},
        "logging": {"report_to": ["none"]},
        "validation": SAMPLES | {"validation_prompts": "${oc.env:PHRASES}"},
    },
    "begun": {
        "family": "ldm",
        "model": {"model_name_or_path": "${oc.env:OUT}/new/pipeline", "lora_rank": 2, "model_max_length": 12,
                  "lora_from": "${oc.env:OUT}/adapters/lora"},
        "data": {"file_list": "${oc.env:FOLDER}/tiny.filelist", "resolution": 32},
        "run": {"output_dir": "${oc.env:OUT}/begun", "max_steps": 1},
        "logging": {"report_to": ["none"]},
        "validation": {"image_logging_steps": 0},
    },
    "resumed": {
        "family": "ldm",
        "model": NETWORKS,
        "data": {"file_list": "${oc.env:FOLDER}/tiny.filelist.list", "resolution": 32},
        "run": {"output_dir": "${oc.env:OUT}/resumed", "resume_from_checkpoint": "${oc.env:OUT}/new/checkpoint-2",
                "max_steps": 3},
        "logging": {"report_to": ["none"]},
        "validation": {"image_logging_steps": 0},
    },
    "toy": {
        "family": "toy",
        "data": {"file_list": "${oc.env:FOLDER}/tiny.filelist.list", "resolution": 8, "where": "${oc.env:CONDITION}"},
        "run": {"output_dir": "${oc.env:OUT}/toy"},
        "logging": {"report_to": ["none"]},
    },
}  # fmt: skip


@pytest.fixture
def environment(tiny, tmp_path, monkeypatch):
    """A copy of the data in a folder of a secret name, and variables that hold the secret."""
    folder = tmp_path / SECRET / "data"
    shutil.copytree(tiny.folder, folder)
    for name, stop in {"held.gz": 6, "part-00000.gz": 25, "part-00001.gz": 15}.items():
        rows = read_rows(folder / name.replace("held", "part-00001"))[:stop]
        write_part(folder / name, [replace(row, meta={"license": "cc0"}) for row in rows])
    write_filelist(folder / "held.filelist", ["held.gz"])
    values = {
        "FOLDER": folder, "OUT": tmp_path / "runs" / SECRET, "PHRASE": f"a {SECRET} prompt", "WORD": SECRET,
        "PHRASES": f"[one {SECRET}, other {SECRET}]", "CONDITION": f"license != '{SECRET}'",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / SECRET


def train(name: str, folder: Path) -> None:
    recipe = {section: PLAIN.get(section, {}) for section in PLAIN} | {"family": RECIPES[name]["family"]}
    for section, values in RECIPES[name].items():
        recipe[section] = recipe.get(section, {}) | values if isinstance(values, dict) else values
    path = folder.parent / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(recipe))
    run_recipe(check_early(["--config", str(path), "--do_train"], True, config=None), True)


def find_secret(folder: Path) -> list[str]:
    """The files below a folder that hold the secret, in their bytes or packed, or in their name."""
    found = []
    for base, _, names in os.walk(folder):
        for path in (Path(base, name) for name in names):
            data = path.read_bytes()
            texts = [path.name.encode(), data, gzip.decompress(data) if data[:2] == b"\x1f\x8b" else b""]
            found += [str(path.relative_to(folder))] if any(SECRET.encode() in text for text in texts) else []
    return found


@pytest.mark.slow
def test_nothing_that_a_run_writes_holds_what_came_from_the_environment(environment, capfd):
    with registered_toy():
        for name in RECIPES:
            train(name, environment)
            assert find_secret(environment) == [], name
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err and "${oc.env:OUT}/new/pipeline" in said.err
    # A run is known again by the environment's text, and by a digest where the text decides what is trained.
    manifest = json.loads((environment / "resumed/checkpoint-3/manifest.json").read_text())
    assert reveal(manifest["resumed_from"]) == str(environment / "new/checkpoint-2")
    where = json.loads((environment / "toy/checkpoint-2/manifest.json").read_text())["identity"]["where"]
    assert where.startswith("${oc.env:CONDITION} (digest ")
    assert json.loads((environment / "new/pipeline/ppldm.json").read_text())["example_prompt"] == "plain"
    assert json.loads((environment / "adapters/lora/ppldm.json").read_text())["example_prompt"].startswith("picture ")


def test_every_text_among_the_settings_is_tried_or_is_no_secret():
    tried = {f"{section}.{name}" for recipe in RECIPES.values() for section, values in recipe.items()
             if isinstance(values, dict) for name, value in values.items() if "${" in str(value)}  # fmt: skip
    options = [one for config in (get_family("ldm").Config, TOY.Config) for one in schema_of(config).values()]
    texts = {one.key for one in options if one.type is str and not one.choices}
    models = {"model.unet_name_or_path", "model.pretrained_text_encoder_name", "model.latents_statistics"}  # as the VAE
    assert texts - tried == OF_THE_MODEL | NO_SECRETS | models


def test_a_text_is_hidden_whole_inside_and_in_its_plain_form(monkeypatch):
    assert hide("a/b") == "a/b"
    note_hidden("./secret//x", "${oc.env:A}")
    note_hidden("b", "${oc.env:B}")
    for text, shown in {"b": "${oc.env:B}", "a bee": "a bee", "/c/secret/x/y": "/c/${oc.env:A}/y"}.items():
        assert hide(text) == shown
    monkeypatch.setenv("A", "/z")
    assert reveal("${oc.env:A}/y ${oc.env:NOT_THERE}") == "/z/y ${oc.env:NOT_THERE}"
