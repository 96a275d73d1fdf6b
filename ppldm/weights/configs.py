"""Configs of components that have weights, and of a scheduler (the noise schedule, and what samplers store with it):
read from the JSON files of all known forms, completed and checked."""

from pathlib import Path

import numpy as np

from ..diffusion.process import BETA_SCHEDULES, FLOW, FLOW_SAMPLE, FLOWS, PREDICTION_TYPES, TIMESTEP_SPACINGS, Process
from ..networks.config_fields import POSITIVE, Condition, describe, fits
from ..networks.configs import check_config
from ..utils.errors import ModelError
from ..utils.files import read_json_object
from .components import to_paddle_config
from .folders import OPEN_CLIP

CONFIG_FILES = ("config.json", "model_config.json", OPEN_CLIP)  # the second is PaddleNLP's name before 2.5
SCHEDULER_CLASS = "_class_name"  # in scheduler_config.json
ZEROS_IF_EMPTY = "force_zeros_for_empty_prompt"  # in model_index.json of Stable Diffusion XL
FLOW_CLASS = "FlowMatchEulerDiscreteScheduler"
PUBLISHED_SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
_BETA = Condition("a number between 0 and 1", lambda value: fits(value, POSITIVE) and value < 1)
# What each setting, where it is stored, must be (`networks.config_fields.fits`).
_RULES = {
    "num_train_timesteps": range(1, 1_000_001),
    **dict.fromkeys(("beta_start", "beta_end"), _BETA),
    **{name: "|".join(known) for name, known in (
        ("beta_schedule", BETA_SCHEDULES), ("prediction_type", PREDICTION_TYPES),
        ("timestep_spacing", TIMESTEP_SPACINGS),
    )},
    **dict.fromkeys(("rescale_betas_zero_snr", "clip_sample", "set_alpha_to_one", "thresholding"), bool),
    **dict.fromkeys(
        ("timestep_shift", "dynamic_thresholding_ratio", "clip_sample_range", "sample_max_value"), POSITIVE
    ),
}  # fmt: skip


def read_config(kind: str, folder: Path) -> dict:
    """The completed config of the component in `folder`. Raises ModelError."""
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            return complete_config(kind, _flat(read_json_object(folder / name, ModelError, inside=True)), folder / name)
    raise ModelError(f"the {kind} folder {folder} has no config.json; give the folder that holds it and the weights")


def complete_config(kind: str, config: dict, source) -> dict:
    """`config` as ppdiffusers' class takes it, with its defaults for what is not there. Raises ModelError."""
    if "model_cfg" in config and kind.endswith("text_encoder"):
        from .layouts.open_clip import text_settings

        config = text_settings(config, source)
    return check_config(kind, to_paddle_config(kind, config, source), source)


def _flat(config: dict) -> dict:
    """PaddleNLP's older configs keep the settings in `init_args`, one inside the other."""
    for inner in config.get("init_args", ()):
        if isinstance(inner, dict):
            config = {**config, **_flat(inner)}
    return {key: value for key, value in config.items() if key not in ("init_args", "init_class")}


def check_schedule(settings: dict, source) -> None:
    """Raises ModelError for a process that no model here can have, or a setting that no sampler can take."""
    steps = settings["num_train_timesteps"]
    for name, rule in (*_RULES.items(), ("steps_offset", range(steps) if isinstance(steps, int) else bool)):
        if name in settings and not fits(settings[name], rule):
            raise ModelError(f"{source}: {name} {settings[name]!r} must be {describe(rule)}; correct it")
    if settings.get("rescale_betas_zero_snr") and settings["prediction_type"] in ("epsilon", *FLOWS):
        raise ModelError(
            f"{source}: rescale_betas_zero_snr with prediction_type {settings['prediction_type']} is not a model that "
            "can draw: its last timestep is pure noise, so it must predict v_prediction"
        )


def read_scheduler(path: Path) -> dict:
    """The settings of a scheduler_config.json, with its class. Raises ModelError for a schedule no model here has."""
    found = read_json_object(path, ModelError, inside=True)
    settings = {key: value for key, value in found.items() if not key.startswith("_") or key == SCHEDULER_CLASS}
    if settings.get(SCHEDULER_CLASS) == FLOW_CLASS:
        if settings.get("use_dynamic_shifting"):
            raise ModelError(f"{path} has use_dynamic_shifting, another process for each size, which is not supported")
        kind = FLOW_SAMPLE if settings.get("prediction_type") == FLOW_SAMPLE else FLOW  # which only ppldm writes
        settings |= {"prediction_type": kind, "timestep_shift": settings.pop("shift", 1.0)}
    betas = settings.pop("trained_betas", None)
    check_schedule({**PUBLISHED_SCHEDULE, **settings}, path)
    if betas is not None:
        own = Process.of(settings).schedule.scheduler_config().get("trained_betas", [])
        if not np.array_equal(own, betas):
            raise ModelError(f"{path} has trained_betas, a noise schedule of its own, which is not supported")
    return settings
