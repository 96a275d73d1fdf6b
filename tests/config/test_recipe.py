"""Recipes: the three groups of settings as one tree, filled with defaults and checked."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
from command_line import make_recipe, tree_of

from ppldm.config.data import DataOptions
from ppldm.config.load import Layer, Setting
from ppldm.config.option import Bounds, Needs, identity_of, option, options
from ppldm.config.recipe import (
    SECTIONS,
    defaults,
    flatten,
    groups_of,
    idle_settings,
    merge_settings,
    naming_origins,
    schema_of,
    sections_of,
)
from ppldm.config.training import TrainingOptions
from ppldm.families.ldm import LdmConfig
from ppldm.utils.errors import ConfigError, FilelistError


@dataclass(kw_only=True)
class Config:
    """The settings of a family that there is in tests only."""

    family: ClassVar[str] = "toy"
    loop_defaults: ClassVar[dict] = {"output_dir": "./output-toy"}
    width: int = option(8, "Width.", bounds=Bounds(above=0), section="model", also=("model_width",))
    depth: int = option(2, "Depth.", section="model", needs=Needs("--width above 8", lambda given: given.width > 8))

    def check(self) -> None:
        if self.width % 2:
            raise ConfigError(f"--width {self.width} must be even")


@pytest.mark.parametrize(
    "origin, message, told",
    [
        ("default", "--width 3 must be even", "--width is not given; its default 3 must be even"),
        ("default", "--width: no such part", "--width is not given; its default: no such part"),
        ("default", "lower --width", "lower --width"),
        ("run.yaml:2", "--width 3 must be even", "run.yaml:2: --width 3 must be even"),
        ("flag", "--width 3 must be even", "--width 3 must be even"),
    ],
)
def test_an_error_about_a_setting_says_who_gave_it(origin, message, told):
    settings = {"model.width": Setting(3, origin)}
    with pytest.raises(FilelistError) as error, naming_origins(settings, FilelistError):
        raise FilelistError(message)
    assert str(error.value) == told
    with pytest.raises(ConfigError, match=message), naming_origins(settings, FilelistError):
        raise ConfigError(message)  # of another kind


def test_names_are_unique_over_all_groups_and_sections_are_known():
    seen = {}
    for group in groups_of(Config):
        for name, stated in options(group).items():
            assert name not in seen and stated.section in SECTIONS and stated.help.endswith((".", ").")), name
            seen[name] = stated
            assert (stated.default is None) <= stated.may_be_none
    spellings = [name for stated in seen.values() for name in (stated.name, *stated.also)]
    assert len(spellings) == len(set(spellings))


def test_a_recipe_of_nothing_is_the_defaults_of_its_script():
    loop = make_recipe({"family": "toy"}, True, Config)
    assert loop.training.output_dir == "./output-toy" and loop.training.seed == 23 and loop.model.width == 8
    trainer = make_recipe({"family": "toy", "run": {"output_dir": "x"}}, False, Config)
    assert trainer.training.seed == 42 and trainer.data == DataOptions()
    with pytest.raises(ConfigError, match="run.output_dir is missing; add it"):
        make_recipe({"family": "toy"}, False, Config)


def test_the_tree_of_a_recipe_makes_it_again_under_either_script():
    tree = {"family": "toy", "model": {"width": 10}, "optimizer": {"learning_rate": 1}, "logging": {"report_to": []}}
    recipe = make_recipe(tree, True, Config)
    for loop in (True, False):
        assert make_recipe(tree_of(recipe), loop, Config) == recipe
    flat = flatten(tree_of(recipe))
    assert flat["family"] == "toy" and flat["model.width"] == 10 and flat["optimizer.learning_rate"] == 1.0
    names = set(schema_of(Config))
    assert flat.keys() == names | {"family"}
    assert set(defaults(Config, True)) == names


def test_a_tree_shares_nothing_with_its_recipe():
    recipe = make_recipe({"family": "toy"}, True, Config)
    tree_of(recipe)["logging"]["report_to"].append("wandb")
    assert recipe.training.report_to == ["visualdl"]


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"modle": {}}, "modle is not known; did you mean model?"),
        ({"model": {"widht": 1}}, "model.widht is not known; did you mean model.width?"),
        (
            {"model": {"learning_rate": 1}},
            "model.learning_rate is not known; learning_rate stands under optimizer: optimizer.learning_rate",
        ),
        ({"run": {"max_train_steps": 1}}, "run.max_train_steps is not known; it is called run.max_steps here"),
        ({"run": {"qqqq": 1}}, "run.qqqq is not known; known: output_dir, overwrite_output_dir"),
        ({"model": {"width": 0}}, "model.width 0 must be above 0"),
        ({"model": {"width": 3}}, "--width 3 must be even"),
        ({"run": {"max_steps": "many"}}, "run.max_steps many must be a whole number"),
        ({"compute": {"fp16": True, "bf16": True}}, "--fp16 and --bf16 do not go together"),
    ],
)
def test_what_is_refused(tree, message):
    with pytest.raises(ConfigError) as caught:
        make_recipe({"family": "toy"} | tree, True, Config)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_without_effect_are_found():
    tree = {"family": "toy", "model": {"depth": 3}, "optimizer": {"power": 2.0}}
    found = {one.name: one.needs.words for one in idle_settings(make_recipe(tree, True, Config), True)}
    assert found == {"depth": "--width above 8", "power": "--lr_scheduler_type polynomial"}
    tree["optimizer"]["lr_scheduler_type"] = "polynomial"
    tree["model"]["width"] = 10
    assert not idle_settings(make_recipe(tree, True, Config), True)


@pytest.mark.parametrize(
    "layers, replaced",
    [
        (({"unet_config_file": "u"}, {"model_name_or_path": "run"}), True),
        (({"model_name_or_path": "old"}, {"unet_config_file": "u"}, {"model_name_or_path": "run"}), True),
        (({"model_name_or_path": "run"}, {"unet_config_file": "u"}), False),  # a contradiction, which is refused
        (({"unet_config_file": "u", "model_name_or_path": "run"},), False),
        (({"unet_config_file": "u"}, {"model_name_or_path": "CompVis/ldm_laion400M_pretrain"}), False),  # a size
        (({"unet_config_file": "u"}, {"model_name_or_path": "run"}, {"model_name_or_path": None}), False),
    ],
)
def test_a_pipeline_replaces_the_networks_of_weaker_layers(layers, replaced):
    said = [Layer(str(at), {f"model.{name}": value for name, value in one.items()}) for at, one in enumerate(layers)]
    found = merge_settings(said, True, LdmConfig)["model.unet_config_file"]
    assert (found.value, found.origin == "default") == ((None, True) if replaced else ("u", False))


def test_files_of_curves_lie_in_the_output_folder():
    made = TrainingOptions(output_dir="o")
    assert [str(dataclasses.replace(made, logging_dir=one).log_folder) for one in (None, "l", "/l")] == [
        "o/logs",
        "o/l",
        "/l",
    ]


@pytest.mark.parametrize("name", ["output_dir", "logging_dir"])
def test_addresses_of_other_machines_are_refused(name):
    assert getattr(TrainingOptions(**{"output_dir": "o", name: "file:///a"}), name) == "/a"
    with pytest.raises(ConfigError, match="ftp://b is an address"):
        TrainingOptions(**{"output_dir": "o", name: "ftp://b"})


def test_an_output_folder_in_a_store_is_a_folder_here_that_is_recorded_by_its_address(tmp_path, monkeypatch):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path))
    made = TrainingOptions(output_dir="S3://bucket/a/run/")
    assert made.output_dir == f"{tmp_path}/outputs/s3/bucket/a/run" and made.output_store == "s3://bucket/a/run"
    assert dataclasses.replace(made, seed=1).output_store == made.output_store
    assert sections_of(made)["run"]["output_dir"] == made.output_store
    with pytest.raises(ConfigError, match="a password or a query") as raised:
        TrainingOptions(output_dir="https://me:secret@host/run")
    assert "secret" not in str(raised.value)


def test_the_identity_of_a_run_keeps_its_names():
    """Older checkpoints hold these; a name that is missing or new would not be compared with theirs."""
    from ppldm.families.autoencoder import AutoencoderConfig
    from ppldm.families.ldm import LdmConfig

    groups = (LdmConfig(), AutoencoderConfig(), DataOptions(), TrainingOptions(output_dir="o"))
    names = {name for group in groups for name in identity_of(group)}
    assert names == {
        *("prediction_type", "noise_offset", "input_perturbation", "snr_gamma", "rescale_betas_zero_snr"),
        *("beta_schedule", "timestep_shift", "shift_base_resolution", "timestep_sampling", "logit_mean", "logit_std"),
        *("timestep_bias_from", "timestep_bias_to", "timestep_bias_multiplier"),
        *("stratified_timesteps", "loss_weighting", "p2_gamma", "p2_k"),
        *("freeze_text_encoder", "model_max_length", "mask_pad_tokens", "kl_weight", "reconstruction_loss"),
        *("perceptual_weight", "adversarial_weight", "adversarial_start", "discriminator_learning_rate"),
        *("train_decoder_only", "alignment_weight", "empty_caption", "size_conditioning", "size_conditioning_drop"),
        *("lora_rank", "lora_alpha", "lora_modules", "lora_components", "train_tokens", "ema_posthoc"),
        *("resolution", "crop_fraction", "random_crop", "random_flip", "num_crops", "interpolation"),
        *("max_skipped", "max_skipped_share", "smart_crop", "bucket_upscale"),
        *("bucket_max_upscale", "bucket_random_ratio"),
        *("learning_rate", "unet_learning_rate", "text_encoder_learning_rate", "scale_lr", "lr_batch_size"),
        *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "num_cycles", "lr_end", "min_lr", "lr_steps", "power"),
        *("weight_decay", "decay_norms_and_biases", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("optimizer", "muon_momentum", "muon_nesterov", "methods"),
    }
