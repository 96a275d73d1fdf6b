"""What is reckoned of a recipe's weights, gradients and averages is what the objects of its run hold."""

import pytest
from tiny_model import write_base

from ppldm.families.base import get_family
from ppldm.training.commands.dry_run import reckon
from ppldm.training.commands.train import check_early, run_recipe
from ppldm.training.doctor.memory import estimate
from ppldm.training.optimizer import in_8_bits, matrices_of
from ppldm.training.prepare import prepare
from ppldm.utils.machine.resources import process_memory_bytes

ON_BASE = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None, "tokenizer_name": None}
AUTOENCODER = ON_BASE | {"model_max_length": None, "num_inference_steps": None, "vae_config_file": "{vae}"}
DECODER = AUTOENCODER | {"vae_config_file": None, "vae_name_or_path": "{trained}", "train_decoder_only": "true"}
POSTHOC = {"ema_posthoc": "0.05 0.10"}
SETTINGS = {
    "plain": ("ldm", {}),
    "average": ("ldm", {"use_ema": "true"}),
    "posthoc": ("ldm", POSTHOC),
    "posthoc beside an average": ("ldm", POSTHOC | {"use_ema": "true"}),
    "frozen text encoder": ("ldm", POSTHOC | {"freeze_text_encoder": "true"}),
    "adapters": ("ldm", ON_BASE | POSTHOC | {"model_name_or_path": "{base}", "lora_rank": 4}),
    "control network": ("controlnet", ON_BASE | POSTHOC | {"model_name_or_path": "{base}", "control": "canny"}),
    "autoencoder": ("autoencoder", AUTOENCODER | POSTHOC),
    "autoencoder with a discriminator": ("autoencoder", AUTOENCODER | {"adversarial_weight": 0.5, "use_ema": "true"}),
    "decoder": ("autoencoder", DECODER | POSTHOC),
    "muon": ("ldm", {"optimizer": "muon"}),
    "eight bits": ("ldm", {"optimizer": "adamw8bit"}),
    "averages in host memory": ("ldm", {"use_ema": "true", "offload_ema": "true"}),
    "muon of an autoencoder": ("autoencoder", AUTOENCODER | {"adversarial_weight": 0.5, "optimizer": "muon"}),
}  # fmt: skip


def recipe_of(tiny, folder, family: str, changes: dict):
    places = {"base": write_base(tiny), "vae": tiny.config("vae"), "trained": tiny.vae}
    changes = {name: value.format(**places) if isinstance(value, str) else value for name, value in changes.items()}
    (folder / "family.yaml").write_text(f"family: {family}\n")
    words = [word for words in tiny.flags(folder / "run", **changes) for word in words.split()]
    return check_early(["--config", str(folder / "family.yaml"), *words], True, None)


@pytest.mark.parametrize("name", SETTINGS)
def test_bytes_that_are_reckoned_are_those_that_a_run_holds(tiny, tmp_path, name):
    recipe = recipe_of(tiny, tmp_path, *SETTINGS[name])
    reckoned = reckon(recipe, 1)
    told = reckoned["bytes_a_device"]
    state = prepare(recipe.model, recipe.data, recipe.training).state
    if not state.model.adapters:
        assert set(get_family(recipe.family).unsaved(recipe.model)) == set(state.model.unsaved)
    parameters = [*state.model.trained_parameters().values()]
    trained = sum(one.size for one in parameters)
    moments = sum(4 * one.size * (1 if one.name in matrices_of(state.optimizer) else 2) for one in parameters)
    large = [one.size for one in parameters if one.name in in_8_bits(state.optimizer)]
    moments += sum(2 * 260 * -(-size // 256) - 8 * size for size in large)
    weights = sum(one.size for one in state.model.parameters())
    averages = sum(
        array.size for average in (state.ema, *state.posthoc.values()) if average for array in average.shadow.values()
    )
    told["average"] += reckoned["bytes_offloaded"]  # on a CPU all is in one memory
    assert bool(reckoned["bytes_offloaded"]) == ("host memory" in name)
    assert told == {"weights": 4 * weights, "gradients": 4 * trained, "optimizer": moments, "average": 4 * averages}


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    {"adversarial_weight": 0.5, "adversarial_start": 0, "discriminator_layers": 1, "discriminator_channels": 256},
    {"perceptual_weight": 1, "lpips_weights": "random"},
])  # fmt: skip
def test_what_judges_an_autoencoder_is_not_exported_and_what_never_learns_is_not_saved(tiny, tmp_path, more):
    recipe = recipe_of(
        tiny, tmp_path, "autoencoder", AUTOENCODER | more | {"max_steps": 1, "vae_config_file": "vae_tiny"}
    )
    told, folder = reckon(recipe, 1)["bytes_on_disk"], tmp_path / "run"
    run_recipe(recipe, True)
    for name, place in (("checkpoint", "checkpoint-1"), ("exported", "vae")):
        size = sum(path.stat().st_size for path in (folder / place).rglob("*") if path.is_file())
        assert told[name] == pytest.approx(size, rel=0.15)


def test_a_run_takes_more_of_the_host_than_this_process_does_before_it(tiny, tmp_path):
    family, changes = SETTINGS["adapters"]
    before = process_memory_bytes("VmRSS")
    assert estimate(recipe_of(tiny, tmp_path, family, changes), 1).by_purpose["process"] > before > 0


@pytest.mark.turn("a forecast of doctor holds", 2)
def test_adapters_are_exported_without_their_base_and_read_with_it(tiny, tmp_path):
    names = ({}, {"export_merged": "true"})
    small = {"per_device_train_batch_size": 1, "resolution": 8}
    family, changes = SETTINGS["adapters"]
    alone, merged = (estimate(recipe_of(tiny, tmp_path, family, changes | small | one), 1) for one in names)
    whole = alone.by_purpose["weights"]
    assert alone.on_disk["exported"] + whole == pytest.approx(merged.on_disk["exported"], rel=0.2)
    later = sum(alone.by_purpose[name] for name in ("gradients", "optimizer", "average", "activations", "heap"))
    assert alone.by_purpose["export"] == 0
    assert 0 < alone.by_purpose["reading"] == pytest.approx(whole - later, rel=0.2)
