"""An autoencoder's run obeys the laws of the other: resumed to the bit, its latents measured."""

import json
import shutil

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from safetensors.numpy import load_file
from shifted import CASES, write_vae
from small_lpips import write_lpips

from ppldm.cli.main import run as command
from ppldm.families.autoencoder import AutoencoderConfig
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
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


def train(arguments, kind="loop"):
    words = [*arguments, *(["--do_train"] if kind == "trainer" else [])]
    run = prepare(*parse_arguments(words, loop=kind == "loop", config=AutoencoderConfig))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def checkpoint(folder, step) -> dict:
    return paddle.load(str(folder / f"checkpoint-{step}/model_state.pdparams"), return_numpy=True)


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


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_the_adversarial_phase_begins_at_its_update_and_leaves_all_before_as_it_is(tiny, tmp_path, kind):
    common = {"max_steps": 3, "save_steps": 1, "image_logging_steps": 0, "use_ema": True}
    common |= {"perceptual_weight": 1, "lpips_weights": write_lpips(tmp_path)}
    adversary = {"adversarial_weight": 0.5, "discriminator_channels": 4, "discriminator_layers": 2}

    def run(name, **changes):
        train(flags(tiny, tmp_path / name, **common, **changes), kind)
        return [checkpoint(tmp_path / name, step) for step in (1, 2, 3)]

    plain, both = run("plain"), run("both", adversarial_start=2, **adversary)
    learned = [name for name in both[0] if name.startswith("discriminator.")]
    for step in (0, 1):
        assert all((both[step][name] == value).all() for name, value in plain[step].items() if name.startswith("vae."))
        assert float(both[step]["balance.ratio"]) == 0
    assert learned and all((both[0][name] == both[1][name]).all() for name in learned)
    assert any((both[1][name] != both[2][name]).any() for name in learned)
    assert float(both[2]["balance.ratio"]) > 0
    assert not any(name.startswith("lpips.") for name in both[0])


def test_with_the_decoder_alone_latents_and_their_scaling_factor_stay(tiny, tmp_path):
    settings = {"vae_config_file": None, "max_steps": 2, "image_logging_steps": 0}
    words = flags(tiny, tmp_path / "run", **settings, vae_name_or_path=tiny.vae, train_decoder_only=True)
    words += ["--ema_posthoc", "0.05", "0.1", "--ema_posthoc_every", "1"]
    del words[words.index("--vae_config_file") : words.index("--vae_config_file") + 2]
    train(words)
    before, after = load_vae(tiny.vae), load_vae(tmp_path / "run/vae")
    same = {name: bool((value == after.state_dict()[name]).all()) for name, value in before.state_dict().items()}
    assert all(kept == name.startswith(("encoder.", "quant_conv.")) for name, kept in same.items()), same
    shutil.rmtree(tmp_path / "run/vae")  # as of a run that has not ended
    command(["ema", str(tmp_path / "run"), "--std", "0.1", "--out", str(tmp_path / "made")])
    made = load_vae(tmp_path / "made")
    assert after.config.scaling_factor == before.config.scaling_factor == made.config.scaling_factor


@pytest.mark.parametrize("decoder_only", [False, True])
def test_of_shifted_latents_a_new_encoder_has_others_and_an_old_one_the_same(tiny, tmp_path, decoder_only):
    """Also where there are no convolutions beside the latents."""
    start = write_vae(tmp_path / "start", **CASES["stated, 32"])
    settings = {"max_steps": 2, "image_logging_steps": 0, "vae_name_or_path": start, "train_decoder_only": decoder_only}
    words = flags(tiny, tmp_path / "run", **settings)
    del words[words.index("--vae_config_file") : words.index("--vae_config_file") + 2]
    train([*words, "--ema_posthoc", "0.05", "0.1", "--ema_posthoc_every", "1"])
    command(["ema", str(tmp_path / "run"), "--std", "0.1", "--out", str(tmp_path / "made")])
    before = load_vae(start)
    for after in (load_vae(tmp_path / "run/vae"), load_vae(tmp_path / "made")):
        kept = [after.config[name] == before.config[name] for name in ("latents_mean", "latents_std", "scaling_factor")]
        assert kept == [decoder_only] * 3 and (after.config["latents_mean"] is None) is not decoder_only
        frozen = before.encoder.conv_out.weight == after.encoder.conv_out.weight
        assert bool(frozen.all()) is decoder_only and after.quant_conv is None


@pytest.mark.filterwarnings("error:Skip loading")
def test_an_average_made_afterwards_has_the_scaling_factor_of_the_run(tiny, tmp_path):
    """Of the autoencoder alone, though the discriminator is averaged as well."""
    settings = {"max_steps": 2, "save_steps": 2, "image_logging_steps": 0, "ema_posthoc_every": 1}
    settings |= {"perceptual_weight": 1, "lpips_weights": write_lpips(tmp_path), "adversarial_weight": 0.5}
    settings |= {"adversarial_start": 0, "discriminator_channels": 4, "discriminator_layers": 2}
    train([*flags(tiny, tmp_path / "run", **settings), "--ema_posthoc", "0.05", "0.1"])
    words = ["ema", str(tmp_path / "run"), "--std", "0.1", "--out", str(tmp_path / "made")]
    command(words)
    last, made = load_vae(tmp_path / "run/vae"), load_vae(tmp_path / "made")
    assert made.config.scaling_factor == last.config.scaling_factor
    facts = json.loads((tmp_path / "made/ppldm.json").read_text())
    assert facts["scaling_factor"] == made.config.scaling_factor and facts["ema_std"] == 0.1
    snapshot = load_file(tmp_path / "run/ema_snapshots/0.1-2.safetensors")
    arrays = {f"vae.{name}": value.numpy() for name, value in made.state_dict().items()}
    for name, value in arrays.items():
        np.testing.assert_allclose(value, snapshot[name].astype(np.float32), rtol=1e-6, err_msg=name)
    assert snapshot.keys() - arrays.keys() == {name for name in snapshot if name.startswith("discriminator.")} != set()
    shutil.rmtree(tmp_path / "run/vae")
    with pytest.raises(CheckpointError, match="the scaling factor is measured when the run ends"):
        command(words)


@pytest.mark.parametrize(
    "given, what",
    [
        ({"perceptual_weight": 1}, "--perceptual_weight needs LPIPS"),
        ({"perceptual_weight": 1, "lpips_weights": "nope"}, "--lpips_weights nope is not there"),
        ({"train_decoder_only": True}, "--train_decoder_only needs a trained encoder"),
        ({"adversarial_weight": 1, "discriminator_layers": 4}, "needs pictures of 48 pixels a side"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tiny, tmp_path, given, what):
    with pytest.raises(ConfigError, match=what):
        train(flags(tiny, tmp_path / "run", **given))
