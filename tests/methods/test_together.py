"""Methods that are drawn together at random keep the laws of a training, or are refused by the name of a setting."""

import os
import random
import shutil

import pytest
from sampling import ALL
from tiny_model import write_base

from ppldm.utils.errors import ConfigError
from tests.families.test_laws import assert_close_run, assert_same_run, train
from tests.methods.test_consistency import from_start

STUDENT = ("consistency:guidance=3,skip=100",)
# What the model says that a student starts from.
OF_START = ("prediction_type", "beta_schedule", "rescale_betas_zero_snr", "timestep_shift", "size_conditioning")
CHOICES = {
    "prediction_type": ("epsilon", "v_prediction", "sample", "flow", "flow_sample"),
    "beta_schedule": (None, None, "linear", "squaredcos_cap_v2", "cosine"),
    "rescale_betas_zero_snr": (None, None, True),
    "timestep_sampling": ("uniform", "logit_normal", "biased"),
    "stratified_timesteps": (None, True),
    "timestep_shift": (None, 2),
    "loss_weighting": (None, "min_snr", "p2", "adaptive"),
    "noise_offset": (None, 0.1),
    "input_perturbation": (None, 0.1),
    "methods": (
        None,
        ("alignment",),
        ("contrastive_flow",),
        ("alignment", "contrastive_flow"),
        ("tread",),
        ("alignment:block=1",),
        ("dream",),
        STUDENT,
    ),
    "optimizer": ("adamw", "adamw8bit", "muon"),
    "use_ema": (None, True),
    "ema_posthoc": (None, (0.05, 0.1)),
    "recompute": (None, None, True),
    "patch_masking": (None, None, 0.25),
    "size_conditioning": (None, None, True),
}
COUNT = 30
SEED = int(os.environ.get("PPLDM_SEED", 1))


def drawn(number: int) -> tuple[str, dict]:
    """(family, settings), a function of the number."""
    rng = random.Random(number)
    family = rng.choice(["ldm", "ldm", "uvit", "microdit", "single_stream"])
    settings = {name: rng.choice(values) for name, values in CHOICES.items()}
    if family == "ldm":
        settings.pop("patch_masking")
    else:
        settings.pop("size_conditioning")
    # What the law's own settings of the family say is not added to these.
    plain = dict.fromkeys(("size_conditioning_drop", "ema_posthoc_every", "ema_posthoc_dtype", "empty_caption"))
    if settings["ema_posthoc"]:  # float16 would round apart what differs in its last bits only
        plain["ema_posthoc_dtype"] = "float32"
    return family, {"adam_epsilon": 1e-6, **plain, **settings}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT) if ALL else random.Random(SEED).sample(range(COUNT), 3))
def test_what_is_drawn_together_keeps_the_laws_or_is_refused_by_name(tiny, tmp_path, number):
    family, settings = drawn(number)
    if settings["methods"] == STUDENT:
        own = {name: value for name, value in settings.items() if name not in OF_START}
        family, settings = "ldm", from_start(write_base(tiny), freeze_text_encoder=True) | own
    try:
        train(tiny, family, tmp_path / "straight", **settings)
    except ConfigError as error:
        assert any(f"--{name}" in str(error) for name, value in settings.items() if value is not None), error
        return
    train(tiny, family, tmp_path / "trainer", kind="trainer", **settings)
    assert_same_run(tmp_path / "trainer", tmp_path / "straight")
    micro = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    train(tiny, family, tmp_path / "cut", **settings, **micro)
    assert_close_run(tmp_path / "cut", tmp_path / "straight", steps=2)
    shutil.rmtree(tmp_path / "straight/checkpoint-4")
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    assert train(tiny, family, tmp_path / "again", **settings).start_step == 2
    assert_same_run(tmp_path / "again", tmp_path / "trainer")
