"""How long a run is: what was typed decides, and a budget that decides nothing is named."""

import math
from fractions import Fraction

import pytest
from command_line import parse_arguments

from ppldm.config.load import list_presets
from ppldm.config.option import options
from ppldm.config.recipe import defaults
from ppldm.config.training import TrainingOptions
from ppldm.families.base import get_family, list_families
from ppldm.families.ldm import LdmConfig
from ppldm.training.commands.train import read_recipe, warn_of_idle
from ppldm.training.optimizer import lr_factor
from ppldm.training.rows import count_steps
from ppldm.utils.errors import ConfigError

from ..config.test_presets import recipe as preset_recipe

BASE = ["--do_train", "--output_dir", "x"]
EPOCHS = ["3", "0.07", "1", "100", "0.5", "1e-300", "7.25"]


def words(source: str, epochs: str, folder) -> list[str]:
    """Epochs as each source of settings gives them."""
    if source == "file":
        path = folder / "x.yaml"
        path.write_text(f"family: ldm\nrun: {{num_train_epochs: {float(epochs)!r}}}\n")
        return ["--config", str(path)]
    return {"flag": ["--num_train_epochs", epochs], "override": [f"run.num_train_epochs={float(epochs)!r}"]}[source]


@pytest.mark.parametrize("source", ["flag", "override", "file"])
@pytest.mark.parametrize("config", [None, LdmConfig])
@pytest.mark.parametrize("loop", [True, False])
def test_epochs_are_the_rows_times_so_many_wherever_they_are_given(source, config, loop, tmp_path):
    for epochs in EPOCHS:
        training = read_recipe([*BASE, *words(source, epochs, tmp_path)], loop, config).training
        for rows, batch in ((46, 4), (100, 1), (3, 64)):
            assert count_steps(training, rows, batch) == math.ceil(Fraction(epochs) * rows / batch), (epochs, rows)


@pytest.mark.parametrize("family", list_families())
@pytest.mark.parametrize("loop", [True, False])
def test_no_default_of_another_budget_stands_against_epochs(family, loop):
    usual = defaults(get_family(family).Config, loop)
    assert usual["run.max_steps"] <= 0 and usual["run.max_samples"] is None and usual["run.num_train_epochs"] > 0


def test_schedules_follow_the_epochs():
    training = parse_arguments(["--num_train_epochs", "3"], loop=True)[2]
    steps = count_steps(training, 46, 4)
    assert steps == 35 and lr_factor(steps, "cosine", math.ceil(0.1 * steps), steps) == pytest.approx(0)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("value", ["0", "-1", "-0.5", "inf", "nan", "1e308", "2e9"])
@pytest.mark.parametrize("beside", [[], ["--max_steps", "5"]])
def test_epochs_that_are_no_length_are_refused(loop, value, beside):
    with pytest.raises(ConfigError, match="--num_train_epochs .* must be"):
        parse_arguments([*BASE, "--num_train_epochs", value, *beside], loop)


@pytest.mark.parametrize("flag", ["--max_steps", "--max_samples"])
def test_a_budget_that_no_counter_holds_is_refused(flag):
    with pytest.raises(ConfigError, match=f"{flag} {10**30} must be .*at most {10**15}"):
        parse_arguments([flag, str(10**30)], loop=True)


@pytest.mark.parametrize("name", list_presets())
def test_epochs_beside_the_budget_of_a_preset_are_named(name, capsys):
    for loop in (True, False):
        for typed in ("3", "1", "100"):  # among them both scripts' defaults
            warn_of_idle(preset_recipe(name, "--num_train_epochs", typed, loop=loop), loop)
            said = capsys.readouterr().err
            assert "--num_train_epochs does nothing beside --max_steps or --max_samples" in said
        warn_of_idle(preset_recipe(name, loop=loop), loop)
        assert "beside" not in capsys.readouterr().err  # of what nobody typed, nothing is said


@pytest.mark.parametrize(
    "flags, name, stronger",
    [
        ("--max_steps 5 --num_train_epochs 3", "num_train_epochs", "--max_steps"),
        ("--max_samples 50 --num_train_epochs 3", "num_train_epochs", "--max_samples"),
        ("--warmup_steps 5 --warmup_ratio 0.1", "warmup_ratio", "--warmup_steps"),
        ("--global_batch_size 60 --gradient_accumulation_steps 4", "gradient_accumulation_steps", "--global_batch"),
        ("--vae_name_or_path a/b --vae_config_file vae_tiny", "vae_config_file", "--vae_name_or_path"),
    ],
)
def test_what_gives_way_to_another_setting_is_named_with_it(flags, name, stronger, capsys):
    config = get_family("autoencoder").Config if "vae" in flags else LdmConfig
    parse_arguments(flags.split(), loop=True, config=config)
    said = capsys.readouterr().err
    assert f"--{name} does nothing beside " in said and stronger in said


def test_every_setting_that_gives_way_says_so_in_its_help():
    found = [one for one in options(TrainingOptions).values() if one.needs and one.needs.beside]
    assert {"num_train_epochs", "warmup_ratio", "gradient_accumulation_steps"} == {one.name for one in found}
