"""The recipes of the package: what they say, that both scripts read them alike, and that they are the published ones.

`python tests/config/test_presets.py` writes the snapshot anew.
"""

import json
import subprocess
from pathlib import Path

import pytest
from command_line import tree_of

from ppldm.config.load import list_presets
from ppldm.training.commands.train import read_recipe

ROOT = Path(__file__).resolve().parents[2]
CASCADE = ("cascade-b-3", "cascade-b-7", "cascade-c-1", "cascade-c-3", "cascade-c-co", "cascade-c-l")
SNAPSHOT = Path(__file__).with_name("presets.json")


def recipe(name: str, *words, loop: bool = True):
    """A preset's recipe; what it leaves to the user is filled in."""
    unfinished = ("sd1", "sd2", "sd3-m", "sd3-l", "sdxl-b", "sdxl-l", "autoencoder-f", "uvit-s", "micro-", *CASCADE)
    missing = ["data.file_list=x"] if name.startswith(unfinished) else []
    missing += ["model.effnet_name_or_path=owner/model"] if name.startswith(CASCADE) else []
    missing += ["model.lpips_weights=random"] if name.startswith("autoencoder-f") else []
    return read_recipe(["--preset", name, *missing, "--do_train", *words], loop, config=None)


def stated(name: str) -> dict:
    """What a preset says, what it builds on included."""
    found = recipe(name).settings
    return {key: one.value for key, one in found.items() if one.origin.startswith("preset ")}


def write_snapshot() -> str:
    return json.dumps({name: stated(name) for name in list_presets()}, indent=1) + "\n"


def test_presets_are_as_in_the_snapshot():
    assert json.loads(write_snapshot()) == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_is_the_same_recipe_in_both_loops(name):
    trees = [tree_of(recipe(name, loop=loop)) for loop in (True, False)]
    for tree in trees:
        budget = tree["run"]
        assert (budget["max_samples"] or 0) > 0 or budget["max_steps"] > 0
        del budget["num_train_epochs"]  # the budget above goes before it
        if budget["max_samples"]:
            del budget["max_steps"]
    assert trees[0] == trees[1]


def test_every_preset_is_described_in_one_line():
    presets = list_presets()
    assert {"ldm-32layer-laion400m", "ldm-12layer-laion400m", "ldm-tiny-cpu", "sd2-base-256", "sd2-base-512"} < {
        *presets
    }
    assert all(20 < len(what) < 130 and what.endswith(".") for what in presets.values())


@pytest.mark.parametrize("script", ["trainer", "no_trainer"])
def test_the_scripts_for_the_shell_have_the_settings_of_the_preset(script):
    text = f'source run_scripts/launch.sh; printf "%s\\n" "${{{script}_command[@]}}"'
    done = subprocess.run(["bash", "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    loop = script == "no_trainer"
    published = tree_of(read_recipe(done.stdout.split("\n")[1:-1], loop))
    rows = f"data.file_list={ROOT}/data/filelist/train.filelist.list"
    preset = tree_of(recipe("ldm-32layer-laion400m", rows, loop=loop))
    for tree in (published, preset):
        tree["run"] |= {"output_dir": "", "do_train": True}
        if loop:  # which keeps all checkpoints, as published
            del tree["run"]["save_total_limit"]
    assert published == preset


if __name__ == "__main__":
    SNAPSHOT.write_text(write_snapshot())
