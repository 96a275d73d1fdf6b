"""The noise schedule, and what samplers store with it, as scheduler_config.json has them: read and checked."""

from pathlib import Path

import numpy as np

from ..diffusion.process import BETA_SCHEDULES, FLOW, PREDICTION_TYPES, TIMESTEP_SPACINGS, Process
from ..utils.errors import ModelError
from ..utils.files import read_json_object

SCHEDULER_CLASS = "_class_name"  # in scheduler_config.json
FLOW_CLASS = "FlowMatchEulerDiscreteScheduler"
_MOST_STEPS = 1_000_000
PUBLISHED_SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}


def check_schedule(settings: dict, source) -> None:
    """Raises ModelError for a noise schedule, or a kind of prediction, that a model here cannot have."""
    steps, first, last = (settings[name] for name in ("num_train_timesteps", "beta_start", "beta_end"))
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _MOST_STEPS:
        raise ModelError(f"{source}: num_train_timesteps {steps!r} is not a whole number from 1 to {_MOST_STEPS:,}")
    if not all(isinstance(beta, (int, float)) and 0 < beta < 1 for beta in (first, last)):
        raise ModelError(f"{source}: beta_start {first!r} and beta_end {last!r} must be numbers between 0 and 1")
    shift = settings.get("timestep_shift", 1.0)
    if not isinstance(shift, (int, float)) or not 0 < shift < float("inf"):
        raise ModelError(f"{source}: timestep_shift {shift!r} must be a number above 0; correct it")
    for name, known in (("beta_schedule", BETA_SCHEDULES), ("prediction_type", PREDICTION_TYPES)):
        if settings[name] not in known:
            raise ModelError(f"{source}: {name} {settings[name]!r} is not supported; known: {', '.join(known)}")
    zero = settings.get("rescale_betas_zero_snr", False)
    if not isinstance(zero, bool):
        raise ModelError(f"{source}: rescale_betas_zero_snr {zero!r} must be true or false; correct it")
    if zero and settings["prediction_type"] in ("epsilon", FLOW):
        raise ModelError(
            f"{source}: rescale_betas_zero_snr with prediction_type {settings['prediction_type']} is not a model that "
            "can draw: its last timestep is pure noise, so it must predict v_prediction"
        )
    _check_sampling(settings, source)


def _check_sampling(settings: dict, source) -> None:
    """Raises ModelError for a stored setting of sampling that no sampler can take."""
    if settings.get("timestep_spacing", TIMESTEP_SPACINGS[0]) not in TIMESTEP_SPACINGS:
        known = ", ".join(TIMESTEP_SPACINGS)
        raise ModelError(f"{source}: timestep_spacing {settings['timestep_spacing']!r} is not one of {known}")
    offset = settings.get("steps_offset", 0)
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset < settings["num_train_timesteps"]:
        raise ModelError(f"{source}: steps_offset {offset!r} must be a whole number from 0; correct it")
    for name in ("clip_sample", "set_alpha_to_one", "thresholding"):
        if not isinstance(settings.get(name, False), bool):
            raise ModelError(f"{source}: {name} {settings[name]!r} must be true or false; correct it")
    for name in ("dynamic_thresholding_ratio", "clip_sample_range", "sample_max_value"):
        if not isinstance(settings.get(name, 1.0), (int, float)) or not settings.get(name, 1.0) > 0:
            raise ModelError(f"{source}: {name} {settings[name]!r} must be a number above 0; correct it")


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
