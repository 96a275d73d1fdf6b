"""A run is repeated by the recipe that it leaves, to the bit, by either loop; recipe files are refused in time."""

import numpy as np
import pytest
import yaml

from ppldm.training.commands.train import check_early, run_recipe
from ppldm.weights.formats.files import read_arrays


def train(*words, loop: bool = True) -> None:
    run_recipe(check_early([*map(str, words), "--do_train"], loop, config=None), loop)


def tiny_recipe(tiny, folder) -> str:
    return f"""
family: ldm
model:
  vae_name_or_path: {tiny.vae}
  text_encoder_config_file: {tiny.config("ldmbert")}
  unet_config_file: {tiny.config("unet")}
  tokenizer_name: {tiny.tokenizer}
  model_max_length: 12
data: {{file_list: '${{oc.env:TINY_LISTS}}/tiny.filelist.list', resolution: 32, random_flip: true}}
optimizer: {{learning_rate: 1e-3, weight_decay: 0.01, use_ema: true}}
compute: {{dataloader_num_workers: 0, device: cpu}}
run:
  output_dir: {folder}/first
  per_device_train_batch_size: 4
  gradient_accumulation_steps: 1
  max_steps: 3
  seed: 5
logging: {{logging_steps: 1, report_to: [none]}}
validation: {{image_logging_steps: 0, num_inference_steps: 2}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", [True, False])
def test_the_recipe_of_a_run_repeats_it_to_the_bit(tiny, tmp_path, monkeypatch, loop):
    (tmp_path / "mine.yaml").write_text(tiny_recipe(tiny, tmp_path))
    monkeypatch.setenv("TINY_LISTS", str(tiny.folder))
    train("--config", tmp_path / "mine.yaml", "run.seed=6", "--save_steps", "2", loop=loop)
    first, again = tmp_path / "first", tmp_path / "again"
    recipe = first / "recipe.yaml"
    train("--config", recipe, "--output_dir", again, loop=loop)
    for folder in ("checkpoint-2", "checkpoint-3"):
        one, other = (read_arrays(run / folder / "model_state.pdparams") for run in (first, again))
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
    losses = [(run / "metrics.jsonl").read_text().count('"loss"') for run in (first, again)]
    assert losses == [3, 3]
    # It lies with everything that is made of the run, holds all settings, and nothing of the environment.
    for folder in (first / "checkpoint-2", first / "checkpoint-3", first / "pipeline"):
        assert (folder / "recipe.yaml").read_text() == recipe.read_text()
    kept = yaml.safe_load(recipe.read_text())
    assert kept["run"]["seed"] == 6 and kept["run"]["save_steps"] == 2 and kept["compute"]["bf16"] is False
    assert kept["data"]["file_list"] == "${oc.env:TINY_LISTS}/tiny.filelist.list"
    for path in (recipe, first / "run.json", first / "checkpoint-3" / "manifest.json"):
        assert f"{tiny.folder}/tiny.filelist" not in path.read_text(), path


@pytest.mark.slow
def test_the_recipe_of_a_run_goes_on_with_it(tiny, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(tiny_recipe(tiny, tmp_path))
    monkeypatch.setenv("TINY_LISTS", str(tiny.folder))
    train("--config", tmp_path / "mine.yaml", "run.overwrite_output_dir=true")
    train("--config", tmp_path / "first/recipe.yaml", "run.max_steps=5")
    curve = (tmp_path / "first/metrics.jsonl").read_text()
    assert curve.count('"loss"') == 5 and (tmp_path / "first/checkpoint-3").is_dir()
    assert yaml.safe_load((tmp_path / "first/recipe.yaml").read_text())["run"]["max_steps"] == 5
