"""An autoencoder's run obeys the laws of the other: resumed to the bit, its latents measured."""

import json

import numpy as np
import pytest

from ppldm.families.autoencoder import AutoencoderConfig
from ppldm.training.commands.arguments import parse_arguments
from ppldm.training.loop import run_loop
from ppldm.training.monitor.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.utils.errors import CheckpointError, ConfigError
from ppldm.weights.fill import load_vae


def flags(tiny, folder, **changes):
    settings = {
        "output_dir": folder,
        "file_list": tiny.file_list,
        "vae_config_file": tiny.config("vae"),
        "resolution": 32,
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "save_steps": 3,
        "logging_steps": 1,
        "num_workers": 0,
        "image_logging_steps": 2,
        "report_to": "none",
        **changes,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train(arguments):
    run = prepare(*parse_arguments(arguments, loop=True, config=AutoencoderConfig))
    run_loop(run)
    return run


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoder") / "run"
    train(flags(tiny, folder))
    return folder


def test_resuming_gives_the_same_bits(tiny, straight, tmp_path):
    (tmp_path / "run").mkdir()
    arguments = flags(
        tiny, tmp_path / "run", resume_from_checkpoint=straight / "checkpoint-3", overwrite_output_dir=True
    )
    assert train(arguments).start_step == 3
    first, second = (load_vae(folder / "vae").state_dict() for folder in (straight, tmp_path / "run"))
    assert all((first[name].numpy() == second[name].numpy()).all() for name in first)
    losses = [
        [record["loss"] for record in read_metrics(folder / "metrics.jsonl")] for folder in (straight, tmp_path / "run")
    ]
    assert losses[1] == losses[0][3:]


def test_exported_scaling_factor_is_measured(straight):
    metadata = json.loads((straight / "vae/ppldm.json").read_text())
    vae = load_vae(straight / "vae")
    assert vae.config.scaling_factor == pytest.approx(1 / metadata["latent_std"])
    assert metadata["pictures"] == 40 and np.mean(metadata["latent_channel_means"]) == pytest.approx(
        metadata["latent_mean"], abs=1e-4
    )


def test_pictures_and_psnr_of_fixed_rows(straight):
    names = sorted(path.name for path in (straight / "samples").iterdir())
    assert names == [f"step-{step:06d}-reconstruction.png" for step in (2, 4, 6)]
    assert [r["global_step"] for r in read_metrics(straight / "metrics.jsonl") if "psnr" in r] == [2, 4, 6]


@pytest.mark.parametrize("flag", ["fp16", "recompute", "to_static"])
def test_what_it_cannot_do_is_refused(tiny, tmp_path, flag):
    with pytest.raises(ConfigError, match=f"--{flag} is not supported for autoencoders"):
        train(flags(tiny, tmp_path / "run", **{flag: True}))


def test_another_length_of_a_falling_schedule_is_another_run(tiny, tmp_path):
    train(flags(tiny, tmp_path / "run", lr_scheduler="cosine", image_logging_steps=0))
    with pytest.raises(CheckpointError, match="max_steps 6, this run has 7"):
        train(flags(tiny, tmp_path / "run", lr_scheduler="cosine", max_steps=7))
