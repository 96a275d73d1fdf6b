"""A setting's statement: what values it takes, in which words it refuses others."""

import argparse
from dataclasses import dataclass

import pytest

from ppldm.config.data import DataOptions
from ppldm.config.option import (
    REQUIRED,
    Bounds,
    check_value,
    explain_unknown,
    identity_of,
    option,
    options,
    parse_value,
)
from ppldm.config.training import TrainingOptions
from ppldm.utils.errors import ConfigError


@dataclass(kw_only=True)
class Group:
    folder: str = option(REQUIRED, "Where.", loop_default="./out", kind="path")
    rate: float = option(1e-3, "Rate.", bounds=Bounds(above=0), identity=True, section="optimizer")
    steps: int | None = option(None, "Steps.", bounds=Bounds(least=1), unit="updates", also=("max_steps",))
    share: float = option(0.5, "Share.", bounds=Bounds(least=0, below=1))
    kind: str = option("linear", "Kind.", choices=("linear", "cosine"), identity=True)
    scales: list[float] = option((1.0, 7.5), "Scales.")
    words: list[str] | None = option(None, "Words.")
    fast: bool = option(False, "Fast.")
    kept: str = option("off", "Kept.")
    derived: int = 3


@dataclass(kw_only=True)
class Above:
    wheels: int = option(3)
    """Wheels of
    the cart."""
    size: int = option(4, "Size.")
    "of no field"


@dataclass(kw_only=True)
class Below(Above):
    size: int = option(5)
    "Its own."


KNOWN = options(Group)


def test_a_help_may_stand_below_the_field():
    assert [one.help for one in options(Above).values()] == ["Wheels of the cart.", "Size."]
    assert [one.help for one in options(Below).values()] == ["Wheels of the cart.", "Its own."]
    assert all(one.help for group in (DataOptions, TrainingOptions) for one in options(group).values())


def test_an_option_knows_its_field():
    assert list(KNOWN) == ["folder", "rate", "steps", "share", "kind", "scales", "words", "fast", "kept"]
    facts = {name: (one.type, one.is_list, one.may_be_none) for name, one in KNOWN.items()}
    assert facts["steps"] == (int, False, True) and facts["scales"] == (float, True, False)
    assert facts["words"] == (str, True, True) and facts["fast"] == (bool, False, False)
    assert KNOWN["rate"].key == "optimizer.rate" and KNOWN["folder"].key == "run.folder"


def test_defaults_are_the_fields_and_lists_are_nobody_elses():
    made = Group(folder="x")
    assert (made.rate, made.steps, made.scales) == (1e-3, None, [1.0, 7.5])
    assert made.scales is not Group(folder="x").scales
    assert KNOWN["folder"].default_of(loop=False) is REQUIRED and KNOWN["folder"].default_of(loop=True) == "./out"
    with pytest.raises(TypeError):
        Group()


@pytest.mark.parametrize(
    "name, value, taken",
    [
        ("rate", 1, 1.0),
        ("steps", None, None),
        ("steps", 3, 3),
        ("scales", [1, 2.5], [1.0, 2.5]),
        ("words", (), []),
        ("kind", "cosine", "cosine"),
        ("share", 0, 0.0),
        ("fast", True, True),
        ("kept", False, "off"),
        ("kept", "on", "on"),
    ],
)
def test_values_that_are_taken(name, value, taken):
    found = check_value(KNOWN[name], value)
    assert found == taken and type(found) is type(taken)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("rate", 0, "--rate 0.0 must be above 0"),
        ("rate", float("nan"), "--rate nan must be above 0"),
        ("rate", float("inf"), "--rate inf must be above 0"),
        ("rate", None, "--rate None must be a number"),
        ("rate", "fast", "--rate fast must be a number"),
        ("steps", 0, "--steps 0 must be 1 or more"),
        ("steps", 2.0, "--steps 2.0 must be a whole number"),
        ("steps", True, "--steps True must be a whole number"),
        ("share", 1.0, "--share 1.0 must be at least 0 and below 1"),
        ("scales", [1.0, float("nan")], "--scales nan must be a number"),
        ("scales", 7.5, "--scales 7.5 must be a list; write it in brackets"),
        ("words", [1], "--words 1 must be text"),
        ("kind", "cosin", "--kind cosin is not known; did you mean cosine? use one of linear, cosine"),
        ("kind", False, "--kind False must be text"),
        ("fast", 1, "--fast 1 must be true or false"),
    ],
)
def test_values_that_are_refused(name, value, message):
    with pytest.raises(ConfigError) as caught:
        check_value(KNOWN[name], value)
    assert str(caught.value) == message
    with pytest.raises(ConfigError, match="run.yaml: x"):
        check_value(KNOWN[name], value, "run.yaml: x")


@pytest.mark.parametrize(
    "bounds, words",
    [
        (Bounds(least=0, most=1), "from 0 to 1"),
        (Bounds(above=0, most=1), "above 0 and at most 1"),
        (Bounds(least=0), "0 or more"),
        (Bounds(below=3), "below 3"),
        (Bounds(most=3), "at most 3"),
    ],
)
def test_ranges_in_words(bounds, words):
    assert str(bounds) == words


def test_the_limits_of_ranges():
    assert [Bounds(above=0, most=1).hold(value) for value in (0, 0.1, 1, 1.1)] == [False, True, True, False]
    assert [Bounds(least=0, below=1).hold(value) for value in (-0.1, 0, 0.9, 1)] == [False, True, True, False]


def test_a_path_without_a_flag_is_told_that_it_needs_one(tmp_path):
    parser = argparse.ArgumentParser()
    assert "name a path by its flag" in explain_unknown(str(tmp_path), parser)
    assert "flags start with --" in explain_unknown("nothing-here", parser)


@pytest.mark.parametrize(
    "name, text, value",
    [("rate", "1e-4", 1e-4), ("steps", "7", 7), ("steps", "x", "x"), ("fast", "False", False), ("fast", "2", "2")],
)
def test_words_of_a_command_line(name, text, value):
    assert parse_value(KNOWN[name], text) == value


def test_the_identity_is_made_of_what_says_so():
    assert identity_of(Group(folder="x", rate=2.0), Group(folder="y", rate=2.0)) == {"rate": 2.0, "kind": "linear"}


def test_flags_of_diffusers_scripts_mean_what_they_mean_there():
    from ppldm.training.commands.train import read_flags

    words = (
        "--train_data_dir data --center_crop --random_flip --proportion_empty_prompts 0.2 --checkpointing_steps 500 "
        "--checkpoints_total_limit 3 --gradient_checkpointing --allow_tf32 --lr_num_cycles 2 --lr_power 0.5 --rank 8 "
        "--max_train_steps 9 --train_batch_size 2 --lr_warmup_steps 4 --snr_gamma 5 --scale_lr --use_ema"
    )
    assert read_flags(words.split(), True) == ({
        **{"file_list": "data", "random_crop": False, "random_flip": True, "caption_drop": 0.2, "save_steps": 500},
        **{"save_total_limit": 3, "recompute": True, "tf32": True, "num_cycles": 2.0, "power": 0.5, "lora_rank": 8},
        **{"max_steps": 9, "per_device_train_batch_size": 2, "warmup_steps": 4, "snr_gamma": 5.0, "scale_lr": True},
        "use_ema": True,
    }, [])  # fmt: skip
