"""Training on an autoencoder whose latents are shifted, or stated by channel, and that may have no convolutions beside
them: cached as in pixels, exported and read again to the bit, resumed by the same map only."""

import json
import shutil

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from formats import write_mds
from shifted import CASES, write_unet, write_vae
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run as command
from ppldm.data.cached.file import Latents
from ppldm.data.filelist import write_filelist
from ppldm.inference.export import export
from ppldm.networks.model import LatentMap
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import CheckpointError, ConfigError, ModelError
from ppldm.weights.source import open_model, read_component
from ppldm.weights.write import write_weights


def flags(tiny, folder, vae, **changes) -> list[str]:
    channels = read_component("vae", vae).config["latent_channels"]
    own = {"vae_name_or_path": vae, "unet_config_file": write_unet(vae.parent, channels), "random_crop": False}
    return tiny.flags(folder, **{**own, "max_steps": 2, "save_steps": 1, **changes})


def train(words, kind="loop"):
    run = prepare(*parse_arguments([*words, *["--do_train"] * (kind == "trainer")], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def losses(folder) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module", params=["shifted", "stated, 16"])
def trained(tiny, tmp_path_factory, request):
    """(the folder of a run on pictures, that of its VAE)."""
    folder = tmp_path_factory.mktemp("trained")
    vae = write_vae(folder / "vae", **CASES[request.param])
    train(flags(tiny, folder / "run", vae))
    return folder / "run", vae


def test_cached_latents_and_pictures_give_the_same_losses(tiny, trained, tmp_path):
    run, vae = trained
    cached = {"latents": "ondemand", "latents_dtype": "float32", "latents_dir": tmp_path}
    train(flags(tiny, tmp_path / "cached", vae, **cached), "trainer")
    np.testing.assert_allclose(losses(tmp_path / "cached"), losses(run), rtol=1e-6)
    # What is kept depends on no map: a VAE that is only scaled takes the same files, and has other losses.
    config = json.loads((vae / "config.json").read_text()) | {"shift_factor": None, "latents_mean": None}
    other = shutil.copytree(vae, tmp_path / "vae")
    (other / "config.json").write_text(json.dumps(config | {"latents_std": None}))
    train(flags(tiny, tmp_path / "other", other, **cached))
    assert len([*tmp_path.glob("*.latents")]) == 2
    # A new UNet gives 0 whatever it sees.
    assert (
        losses(tmp_path / "other")[0] == losses(run)[0] and abs(losses(tmp_path / "other")[1] - losses(run)[1]) > 5e-5
    )


@pytest.mark.parametrize("form", ["ppdiffusers", "diffusers"])
def test_an_export_is_read_and_draws_the_same_pictures_to_the_bit(trained, tmp_path, form):
    run, vae = trained
    checkpoint, own = run / "checkpoint-2", read_component("vae", vae)
    export(str(checkpoint), out=str(tmp_path / "out"), to=form)
    drawn = [ppldm.load(place).generate("picture 1", num_inference_steps=2) for place in (checkpoint, tmp_path / "out")]
    assert (drawn[0] == drawn[1]).all() and drawn[0].std() > 1
    for place in (checkpoint, run / "pipeline", tmp_path / "out"):
        found = read_component("vae", place)
        assert found.config == own.config and found.arrays.keys() == own.arrays.keys()
        assert all((found.arrays[name] == array).all() for name, array in own.arrays.items())
    assert f"the pipelines of {form} for this UNet only scale latents" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    "change, words",
    [({"shift_factor": 0.1}, "the VAE's latents are shifted"), ({"use_quant_conv": False}, "the VAE has no conv"),
     ({"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}, "the VAE's latents are shifted"),
     ({"use_post_quant_conv": False}, "the VAE has no conv")],
)  # fmt: skip
def test_compvis_has_no_such_autoencoder(tmp_path, change, words):
    weights = small_weights()
    weights.components["vae"].config |= change
    with pytest.raises(ModelError, match=f"CompVis' classes cannot build this model: {words}"):
        write_weights(weights, "compvis", tmp_path / "out")


def test_a_picture_is_encoded_and_decoded_by_the_map(trained):
    model = ppldm.load(trained[0] / "checkpoint-2")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    vae, latents = model.model.vae, model.encode(pixels)
    mean = vae.encode(paddle.to_tensor(pixels.transpose(0, 3, 1, 2).astype("float32") / 127.5 - 1)).latent_dist.mean
    np.testing.assert_allclose(latents, LatentMap.of(vae.config).to_model(mean).numpy(), atol=1e-6)
    decoded = vae.decode(mean).sample.clip(-1, 1).numpy().transpose(0, 2, 3, 1)
    assert abs(model.decode(latents) - (decoded + 1) * 127.5).max() < 1
    drawn = model.generate("picture 1", image=pixels[0], strength=0.5, num_inference_steps=2)
    assert drawn.shape == (1, 1, 32, 32, 3)


def test_a_resumed_run_refuses_another_map(tiny, trained, tmp_path):
    run, vae = trained
    other, here = shutil.copytree(vae, tmp_path / "vae"), shutil.copytree(run, tmp_path / "run")
    config = json.loads((other / "config.json").read_text())
    name, value = ("shift_factor", 0.25) if config["shift_factor"] else ("latents_mean", [0.5] * 16)
    (other / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(CheckpointError, match=f"was trained with vae's {name} .*--accept_changes vae"):
        train(flags(tiny, here, other, max_steps=3))
    assert train(flags(tiny, here, vae, max_steps=3)).start_step == 2


def test_measured_statistics_bring_latents_to_mean_0_and_deviation_1(tiny, tmp_path, capsys):
    vae = write_vae(tmp_path / "vae", **CASES["scaled, 32"])
    words = ["precompute", tiny.file_list, "--vae", str(vae), "--resolutions", "32", "--latents-dir", str(tmp_path)]
    command([*words, "--dtype", "float32", "--batch-size", "8", "--num-workers", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    moments = [Latents(path).read(row, 0) for path in sorted(tmp_path.glob("*.latents")) for row in range(15)]
    moments += [Latents(sorted(tmp_path.glob("*.latents"))[0]).read(row, 0) for row in range(15, 25)]
    mean, std = np.stack(moments, 1).astype(np.float64).transpose(0, 2, 1, 3, 4).reshape(2, 32, -1)
    np.testing.assert_allclose(report["latents_mean"], mean.mean(1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(report["latents_std"], np.sqrt(mean.var(1) + (std**2).mean(1)), rtol=1e-4)
    command([*words, "--batch-size", "8"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said.keys() == {"latents_mean", "latents_std"}
    command([*words, "--batch-size", "8"])
    assert "latents_mean" not in capsys.readouterr().out  # nothing was encoded
    (tmp_path / "latents.json").write_text(json.dumps(report))
    run = train(flags(tiny, tmp_path / "run", vae, latents_statistics=tmp_path / "latents.json"))
    model = run.state.model
    assert model.latent_map == LatentMap(1.0, None, tuple(report["latents_mean"]), tuple(report["latents_std"]))
    noise = np.random.default_rng(0).normal(size=(len(moments), 32, 4, 4)).astype(np.float32)
    latents = model.latents(paddle.to_tensor(noise), moments=paddle.to_tensor(np.stack(moments))).numpy()
    assert abs(latents.mean((0, 2, 3))).max() < 0.15 and abs(latents.std((0, 2, 3)) - 1).max() < 0.1
    assert open_model(tmp_path / "run/pipeline").config("vae")["latents_mean"] == report["latents_mean"]
    with pytest.raises(CheckpointError, match="was trained with vae's "):
        train(flags(tiny, tmp_path / "run", vae, max_steps=3))


def test_of_an_autoencoder_that_states_them_none_are_measured(tiny, tmp_path, capsys):
    vae = write_vae(tmp_path / "vae", **CASES["shifted"])
    words = ["precompute", tiny.file_list, "--vae", str(vae), "--resolutions", "32", "--latents-dir", str(tmp_path)]
    command([*words, "--batch-size", "8", "--num-workers", "1", "--json"])
    assert "latents_mean" not in json.loads(capsys.readouterr().out)


def test_statistics_that_cannot_be_are_refused(tiny, tmp_path):
    path = tmp_path / "latents.json"
    for said, words in (
        ({"encoded": 3}, "has no latents_mean and latents_std; `ppldm precompute --json` prints them"),
        ({"latents_mean": [0.0] * 3, "latents_std": [1.0] * 3}, "latents_mean has 3 entries, and latent_channels is 4"),
    ):
        path.write_text(json.dumps(said))
        with pytest.raises(ConfigError, match=words):
            train(tiny.flags(tmp_path / "run", latents_statistics=path))
    whole = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None}
    with pytest.raises(ConfigError, match="--latents_statistics would give the whole model"):
        train(tiny.flags(tmp_path / "run", latents_statistics=path, model_name_or_path=tmp_path, **whole))


def test_shards_of_micro_diffusion_are_only_scaled(tiny, tmp_path):
    vae = write_vae(tmp_path / "vae", **CASES["stated"])
    columns = {"caption": ("str", None, lambda row: b"picture"), "caption_latents": ("bytes", None, lambda row: b"0"),
               "latents_32": ("bytes", None, lambda row: bytes(2 * 4 * 4 * 4))}  # fmt: skip
    write_mds(tmp_path / "a.mds", range(8), columns)
    write_filelist(tmp_path / "mds.filelist", ["a.mds"])
    write_filelist(tmp_path / "mds.list", ["mds.filelist format=mds latents=cached"])
    with pytest.raises(ConfigError, match="holds latents that are only scaled; train on them with a VAE whose config"):
        train(flags(tiny, tmp_path / "run", vae, file_list=tmp_path / "mds.list"))
