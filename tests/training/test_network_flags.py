"""Configs that no network can have are refused by the scripts themselves, before paddle is imported."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppldm.families.autoencoder import AutoencoderConfig
from ppldm.training.commands.train import check_early
from ppldm.utils.errors import ConfigError, ModelError
from tests.conftest import TEXT_ENCODER_CONFIG, UNET_CONFIG, VAE_CONFIG

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("train_txt2img_laion400m_trainer.py", "train_txt2img_laion400m_no_trainer.py")


def write(path: Path, config: dict) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def test_what_can_be_trained_passes(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # the default filelist is there
    check_early([])
    check_early(["--vae_name_or_path", "CompVis/stable-diffusion-v1-4/vae"])
    check_early(tiny.flags(tmp_path))
    check_early(["--vae_config_file", tiny.config("vae")], config=AutoencoderConfig)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "flag, config, words",
    [
        ("text_encoder", TEXT_ENCODER_CONFIG | {"head_dim": 0}, "error: .*c.json: head_dim 0 must be"),
        ("text_encoder", UNET_CONFIG, "error: .*c.json is the config of a UNet, and an LDMBert text encoder is wanted"),
        ("unet", {}, "error: .*c.json is not a config of a UNet: it does not say in_channels"),
    ],
)
def test_the_scripts_say_it_without_paddle(tmp_path, script, flag, config, words):
    import re

    blocker = tmp_path / "paddle.py"
    blocker.write_text("raise SystemExit('paddle was imported')")
    path = write(tmp_path / "c.json", config)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, "--output_dir", tmp_path / "run", "--do_train",
         f"--{flag}_config_file={path}"],
        capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2 and re.fullmatch(f"{words}.*\n", done.stderr), done.stderr
    assert not (tmp_path / "run").exists()


def test_networks_are_compared(tiny, tmp_path):
    flags = tiny.flags(tmp_path)
    narrow = write(tmp_path / "narrow.json", UNET_CONFIG | {"cross_attention_dim": 16})
    with pytest.raises(ModelError, match="attends to width 16 and the text encoder gives 32"):
        check_early([*flags, "--unet_config_file", narrow])
    shutil.copytree(tiny.vae, tmp_path / "vae")
    for folder in (tmp_path / "vae", tmp_path / "vae" / "vae"):
        folder.mkdir(exist_ok=True)
        write(folder / "config.json", VAE_CONFIG | {"latent_channels": 8})
        with pytest.raises(ModelError, match="the UNet takes 4 channels and gives 4, and the VAE gives 8"):
            check_early([*flags, "--vae_name_or_path", str(tmp_path / "vae")])
    for kind, config in (("unet", UNET_CONFIG | {"in_channels": 5}), ("vqvae", VAE_CONFIG)):
        (tmp_path / "pipeline" / kind).mkdir(parents=True)
        write(tmp_path / "pipeline" / kind / "config.json", config)
    for flag in ("model_name_or_path", "pretrained_model_name_or_path"):
        with pytest.raises(ModelError, match="the UNet takes 5 channels"):
            check_early([f"--{flag}", str(tmp_path / "pipeline"), "--file_list", tiny.file_list])
    with pytest.raises(ConfigError, match="gray.json: the VAE takes 1 channels"):
        gray = write(tmp_path / "gray.json", VAE_CONFIG | {"in_channels": 1})
        check_early(["--vae_config_file", gray, "--file_list", tiny.file_list], config=AutoencoderConfig)


@pytest.mark.parametrize("script", [*SCRIPTS, "train_autoencoder.py"])
def test_the_scripts_check_sizes_without_paddle(tiny, tmp_path, script):
    """Before any row is read, in under two seconds of computing."""
    blocker = tmp_path / "paddle.py"
    blocker.write_text("raise SystemExit('paddle was imported')")
    network = ["--vae_config_file" if "autoencoder" in script else "--vae_name_or_path"]
    network += [tiny.config("vae") if "autoencoder" in script else tiny.vae]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, "--output_dir", tmp_path / "run", "--do_train", "--resolution",
         "60", "--file_list", tiny.file_list, *network],
        capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == "error: --resolution 60 must be a multiple of 8, the VAE's downscaling factor\n"
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
