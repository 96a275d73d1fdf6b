"""The forecasts of disk and of the averages' memory, against real runs of the tiny networks."""

from pathlib import Path

import pytest
from tiny_model import write_base

from ppldm.training.commands.dry_run import describe, reckon
from ppldm.training.commands.train import check_early, run_recipe
from ppldm.training.doctor.memory import estimate, forecast
from ppldm.training.doctor.run import count_checkpoints, other_bytes

MOST = 0.15
POSTHOC = {"ema_posthoc": "0.05 0.10"}
SETTINGS = {
    "plain": {},
    "average": {"use_ema": "true"},
    "posthoc": POSTHOC,
    "posthoc often": POSTHOC | {"ema_posthoc_every": 1},
    "posthoc wide": POSTHOC | {"ema_posthoc_dtype": "float32", "ema_posthoc_every": 3},
    "posthoc beside the average": POSTHOC | {"use_ema": "true", "save_steps": 2},
    "few checkpoints": POSTHOC | {"save_steps": 1, "save_total_limit": 2},
    "many checkpoints": {"save_steps": 1},
    "backups": {"save_steps": 1, "save_total_limit": 1, "backup_every": 2},
    "frozen text encoder": {"freeze_text_encoder": "true"},
    "adapters": {"lora_rank": 4},
    "adapters merged": {"lora_rank": 4, "export_merged": "true"} | POSTHOC,
}


def recipe_of(tiny, folder: Path, changes: dict):
    flags = {"max_steps": 4, "save_steps": 100, "image_logging_steps": 0, **changes}
    if "lora_rank" in changes:
        words = ["--model_name_or_path", str(write_base(tiny)), "--model_max_length", "12", "--file_list"]
        words += [str(tiny.file_list), "--resolution", "32", "--output_dir", str(folder), "--device", "cpu"]
        words += ["--per_device_train_batch_size", "4", "--dataloader_num_workers", "0", "--report_to", "none"]
    else:
        words = tiny.flags(folder)
    words = [*words, *(word for name, value in flags.items() for word in (f"--{name}", *str(value).split()))]
    return check_early(words, True)


def bytes_below(folder: Path) -> int:
    """Of all files, one with two names once."""
    return sum({(one := path.stat()).st_ino: one.st_size for path in folder.rglob("*") if path.is_file()}.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_disk_of_a_run_is_what_was_forecast(tiny, tmp_path, name):
    recipe = recipe_of(tiny, tmp_path / "run", SETTINGS[name])
    on_disk, steps = reckon(recipe, 1)["bytes_on_disk"], recipe.training.max_steps
    forecast = count_checkpoints(recipe.training, steps) * on_disk["checkpoint"]
    forecast += other_bytes(recipe.model, on_disk, steps)
    run_recipe(recipe, True)
    assert forecast == pytest.approx(bytes_below(tmp_path / "run"), rel=MOST)


@pytest.mark.turn("a forecast of doctor holds", 2)
def test_each_average_of_posthoc_is_in_memory_and_in_a_dry_run(tiny, tmp_path):
    names = ("plain", "average", "posthoc", "posthoc beside the average")
    found = {name: estimate(recipe_of(tiny, tmp_path / "run", SETTINGS[name]), 1).by_purpose for name in names}
    one = found["average"]["average"]
    assert found["plain"]["average"] == 0 < one
    assert [found[name]["average"] / one for name in ("posthoc", "posthoc beside the average")] == [2, 3]
    assert found["posthoc beside the average"]["export"] == found["average"]["export"]
    assert found["posthoc"]["export"] == found["plain"]["export"]
    recipe = recipe_of(tiny, tmp_path / "run", POSTHOC)
    text = describe(reckon(recipe, 1) | forecast(recipe, 1))
    assert "on the disk, in GB:" in text and "snapshots" in text
