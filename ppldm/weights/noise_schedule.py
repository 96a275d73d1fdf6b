"""The noise schedule, and what samplers store with it, as scheduler_config.json has them: read and checked."""

from pathlib import Path

import numpy as np

from ..diffusion.process import BETA_SCHEDULES, FLOW, PREDICTION_TYPES, TIMESTEP_SPACINGS, Process
from ..networks.config_fields import POSITIVE, Condition, describe, fits
from ..utils.errors import ModelError
from ..utils.files import read_json_object

SCHEDULER_CLASS = "_class_name"  # in scheduler_config.json
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


def check_schedule(settings: dict, source) -> None:
    """Raises ModelError for a noise schedule, or a kind of prediction, that a model here cannot have, and for a stored
    setting of sampling that no sampler can take."""
    steps = settings["num_train_timesteps"]
    for name, rule in (*_RULES.items(), ("steps_offset", range(steps) if isinstance(steps, int) else bool)):
        if name in settings and not fits(settings[name], rule):
            raise ModelError(f"{source}: {name} {settings[name]!r} must be {describe(rule)}; correct it")
    if settings.get("rescale_betas_zero_snr") and settings["prediction_type"] in ("epsilon", FLOW):
        raise ModelError(
            f"{source}: rescale_betas_zero_snr with prediction_type {settings['prediction_type']} is not a model that "
            "can draw: its last timestep is pure noise, so it must predict v_prediction"
        )


def read_scheduler(path: Path) -> dict:
    """The settings in a scheduler_config.json, and its class. Raises ModelError for a schedule that a model here cannot
    have."""
    found = read_json_object(path, ModelError, inside=True)
    settings = {key: value for key, value in found.items() if not key.startswith("_") or key == SCHEDULER_CLASS}
    if settings.get(SCHEDULER_CLASS) == FLOW_CLASS:
        if settings.get("use_dynamic_shifting"):
            raise ModelError(f"{path} has use_dynamic_shifting, another process for each size, which is not supported")
        settings |= {"prediction_type": FLOW, "timestep_shift": settings.pop("shift", 1.0)}
    betas = settings.pop("trained_betas", None)
    check_schedule({**PUBLISHED_SCHEDULE, **settings}, path)
    if betas is not None:
        own = Process.of(settings).schedule.scheduler_config().get("trained_betas", [])
        if not np.array_equal(own, betas):
            raise ModelError(f"{path} has trained_betas, a noise schedule of its own, which is not supported")
    return settings
