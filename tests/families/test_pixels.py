"""Pixels in place of a VAE's latents, and x-prediction with the v-loss."""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from tiny_model import write_base

import ppldm
from ppldm.cache.encoders import load_picture_encoder
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab, load_tokenizer
from ppldm.demo.shapes_world.write import World
from ppldm.diffusion.drawing import Drawing
from ppldm.diffusion.guided import draw, sample_latents
from ppldm.diffusion.process import NoiseSchedule, Process
from ppldm.families.base import get_family
from ppldm.families.ldm import LdmConfig
from ppldm.families.ldm_build import build_ldm
from ppldm.networks.build import build_network
from ppldm.networks.configs import check_config
from ppldm.networks.transformers.transform import TransformerDiffusionModel, transform
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.fill import load_vae
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights
from tests.conftest import CLIP_CONFIG, SINGLE_STREAM_PIXELS_CONFIG, UNET_CONFIG


def make_model(kind="flow_sample", lively=True, **changes) -> TransformerDiffusionModel:
    config = check_config("transformer", SINGLE_STREAM_PIXELS_CONFIG | changes, "x")
    parts = {"vae": load_vae("pixels"), "transformer": build_network("transformer", config, 1)}
    parts["text_encoder"] = build_network("text_encoder", check_config("text_encoder", CLIP_CONFIG, "x"), 1)
    model = TransformerDiffusionModel(Process(NoiseSchedule(), kind), **parts)
    rng = np.random.default_rng(0)
    for parameter in model.transformer.parameters() if lively else ():
        parameter.set_value(parameter + paddle.to_tensor(0.1 * rng.standard_normal(parameter.shape, np.float32)))
    return model


def make_batch(size=6) -> dict:
    rng = np.random.default_rng(1)
    batch = {
        "pixel_values": rng.integers(0, 256, (size, 3, 32, 32), np.uint8),
        "noise": rng.standard_normal((size, 3, 32, 32), np.float32),
        "input_ids": rng.integers(0, 50, (size, 12)),
        "timesteps": np.array([0, 20, 48, 49, 500, 999])[:size],  # shares of noise from 0.001: 0.05 is the bound
    }
    return {name: paddle.to_tensor(value) for name, value in batch.items()}


def test_latents_are_the_pixels_and_decoding_clips():
    model, batch = make_model(), make_batch()
    pixels = batch["pixel_values"].numpy()
    latents = model.latents(pixel_values=batch["pixel_values"])
    np.testing.assert_allclose(latents, pixels / 127.5 - 1, atol=1e-6)
    assert (model.decode(latents) == latents).all() and not model.vae.parameters()
    assert (model.decode(3 * latents) == (3 * latents).clip(-1, 1)).all()


def test_loss_and_gradients_are_the_papers():
    """Its notation: t is the share of the picture, z what the network sees, and x its prediction."""
    model, batch = make_model(), make_batch()
    model.train()
    loss = model(**batch)
    loss.value.backward()
    found = {name: parameter.grad.numpy() for name, parameter in model.transformer.named_parameters()}
    model.clear_gradients()

    picture, noise = batch["pixel_values"].astype("float32") / 127.5 - 1, batch["noise"]
    t = (1 - (batch["timesteps"].astype("float32") + 1) / 1000).reshape([-1, 1, 1, 1])
    z = t * picture + (1 - t) * noise
    hidden = model.text_encoder(batch["input_ids"])[0]
    x = transform(model.transformer, z, (1 - t).flatten() * 1000, hidden)
    below = (1 - t).clip(min=0.05)
    errors = ((x - z) / below - (picture - z) / below).square()
    errors.mean().backward()
    assert float(loss.value) == pytest.approx(float(errors.mean()), rel=1e-4)
    np.testing.assert_allclose(loss.per_sample, errors.mean([1, 2, 3]), rtol=1e-3)
    for name, parameter in model.transformer.named_parameters():
        scale = float(parameter.grad.abs().max())
        np.testing.assert_allclose(found[name], parameter.grad, atol=2e-4 * scale, err_msg=name)


def test_a_perturbed_input_is_judged_by_the_picture():
    model, batch = make_model(), make_batch()
    model.train()
    batch["input_noise"] = batch["noise"] + 0.1 * batch["noise"].flip(0)
    seen = []
    model.transformer.register_forward_post_hook(lambda _, given, made: seen.append(made))
    found = model(**batch)
    share = ((batch["timesteps"].astype("float32") + 1) / 1000).clip(0.05)
    errors = (seen[0] - model.latents(pixel_values=batch["pixel_values"])).square().mean([1, 2, 3]) / share**2
    np.testing.assert_allclose(found.per_sample, errors, rtol=1e-3)


@pytest.mark.parametrize("more", [{}, {"cfg_zero": True}, {"guidance_rescale": 0.5}, {"guidance_interval": (0.2, 0.9)}])
def test_drawing_by_the_picture_is_drawing_by_the_direction_that_follows(more):
    model, batch = make_model(), make_batch(2)
    model.eval()
    condition, without = (model.condition(ids) for ids in (batch["input_ids"], batch["input_ids"][:1] * 0))
    other = make_model("flow")
    other.set_state_dict(model.state_dict())
    other.eval()
    plain = other.denoise

    def direction(noisy, timestep, **told):
        return (noisy - plain(noisy, timestep, **told)) / max(0.05, float(timestep) / 1000)

    other.denoise = direction
    for scale in (1.0, 3.0):
        drawing = Drawing(7, scale, "flow-euler", **more)
        one, two = (sample_latents(each, condition, without, batch["noise"], drawing) for each in (model, other))
        np.testing.assert_allclose(one, two, atol=1e-4)
        assert float((one - batch["noise"]).abs().max()) > 0.1


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_a_small_run_on_the_shapes_world_learns_to_tell_pictures(tmp_path):
    """What it predicts is nearer to pictures of the world than their mean is, and what it draws is near to one.

    Of seven runs, of four seeds, the errors were at most 0.55 and 1.44 of the mean's; 7 and 16 with the wrong sign.
    """
    world = World(32, max_objects=1)
    rows = [world.draw(False, row) for row in range(8)]
    pictures = np.stack([picture for _, _, picture in rows]).transpose(0, 3, 1, 2)
    captions = [caption for _, caption, _ in rows]
    CaptionTokenizer(build_vocab(captions), 12).save(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 12)
    model, rng = make_model(lively=False, dim=64, head_dim=16, bottleneck=24), np.random.default_rng(2)
    own = CLIP_CONFIG | {"vocab_size": tokenizer.vocab_size}
    model.text_encoder = build_network("text_encoder", check_config("text_encoder", own, "x"), 1)
    optimizer = paddle.optimizer.AdamW(4e-3, parameters=list(model.trained_parameters().values()), weight_decay=0.0)
    model.train()
    losses, twice = [], lambda one: np.concatenate([one, one])
    for _ in range(150):
        drawn = {"pixel_values": twice(pictures), "input_ids": twice(tokenizer.encode(captions))}
        drawn |= {"noise": rng.standard_normal((16, 3, 32, 32), np.float32), "timesteps": rng.integers(50, 1000, 16)}
        loss = model(**{name: paddle.to_tensor(value) for name, value in drawn.items()})
        loss.value.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss.value))
    assert np.mean(losses[-10:]) < 0.2 * np.mean(losses[:3])
    model.eval()
    truth = pictures / np.float32(127.5) - 1
    error_of_mean = ((truth - truth.mean(0)) ** 2).mean()
    noisy = 0.5 * truth + 0.5 * rng.standard_normal(truth.shape, np.float32)
    condition = model.condition(paddle.to_tensor(tokenizer.encode(captions)))
    told = model.denoise(paddle.to_tensor(noisy), paddle.full([8], 500.0), **condition).numpy()
    assert ((told - truth) ** 2).mean() < error_of_mean
    found = draw(model, tokenizer, captions, [0] * 8, (3, 32, 32), 1, Drawing(10, 1.0))
    found = found.transpose(0, 3, 1, 2) / np.float32(127.5) - 1
    apart = ((found[:, None] - truth[None]) ** 2).mean((2, 3, 4))
    assert np.median(apart.min(1)) < 3 * error_of_mean


def flags_of(tiny, folder, **changes) -> list[str]:
    settings = {"unet_config_file": None, "text_encoder_config_file": tiny.config("clip"), "max_steps": 2}
    settings |= {"transformer_config_file": tiny.config("single_stream_pixels"), "vae_name_or_path": "pixels"}
    settings |= {"prediction_type": "flow_sample"}
    words = tiny.flags(folder, **(settings | changes))
    return words if changes.get("model_name_or_path") else [*words, "--train_text_encoder"]


def train(tiny, folder, **changes):
    run = prepare(*parse_arguments(flags_of(tiny, folder, **changes), True, get_family("single_stream").Config))
    run_loop(run)
    return run


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pixels") / "run"
    train(tiny, folder, use_ema=True, save_steps=2)
    return folder


def test_what_is_trained_is_drawn_from_any_of_its_forms(trained):
    """A checkpoint and a pipeline; without a VAE's weights."""
    pipeline, checkpoint = ppldm.load(trained / "pipeline"), ppldm.load(trained / "checkpoint-2", ema=True)
    given = {"num_inference_steps": 3, "seed": 1, "height": 24, "width": 40}
    one, other = (model.generate(["picture 1"], **given) for model in (pipeline, checkpoint))
    assert one.shape == (1, 1, 24, 40, 3) and (one == other).all() and len(np.unique(one)) > 2
    assert pipeline.model.process.prediction_type == checkpoint.model.process.prediction_type == "flow_sample"
    scheduler = json.loads((trained / "pipeline/scheduler/scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "flow_sample"
    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 24, 3), np.uint8)
    assert (pipeline.decode(pipeline.encode(pictures)) == pictures).all()
    assert pipeline.latent_shape(24, 40) == (3, 24, 40)


def test_a_stage_goes_on_from_the_export(tiny, trained, tmp_path):
    parts = dict.fromkeys(("vae_name_or_path", "text_encoder_config_file", "transformer_config_file", "tokenizer_name"))
    run = train(tiny, tmp_path / "next", model_name_or_path=trained / "pipeline", patch_masking=0.5, **parts)
    assert run.dataset.inputs["kept_patches"].shape(32, 32) == (8,)
    assert "posterior_noise" not in run.dataset.inputs


@pytest.mark.parametrize("form", ["diffusers", "compvis"])
def test_other_libraries_are_refused_by_name(tiny, trained, tmp_path, form):
    weights = open_model(trained / "pipeline").read()
    with pytest.raises(ModelError, match=f"{form} (has no network|draws no pixels)"):
        write_weights(weights, form, tmp_path / "out")
    of_unet = open_model(write_base(tiny)).read()
    of_unet.scheduler["prediction_type"] = "flow_sample"
    with pytest.raises(ModelError, match=f"{form} draws no pixels without a VAE, nor flow by x-prediction"):
        write_weights(of_unet, form, tmp_path / "out")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"latents": "cached", "num_crops": 1}, "--latents cached is for a VAE's, and pixels are their own"),
        ({"latents": "ondemand", "num_crops": 1}, "--latents ondemand is for a VAE's, and pixels are their own"),
        ({"resolution": 36}, "--resolution 36 must be a multiple of 8"),
        ({"beta_schedule": "linear"}, "--beta_schedule is not for --prediction_type flow_sample"),
    ],
)
def test_what_cannot_be_is_refused_first(tiny, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        train(tiny, tmp_path / "run", file_list="/nope", **changes)
    assert not (tmp_path / "run").exists()


def test_what_needs_a_vae_says_so(tiny, tmp_path):
    with pytest.raises(ConfigError, match="pixels leaves pictures as they are: there is nothing to compute"):
        load_picture_encoder(SimpleNamespace(model="pixels", offline=True, engine="eager", batch_size=2))
    with pytest.raises(ConfigError, match="pixels is pixels in place of a VAE: nothing of it is trained"):
        get_family("autoencoder").Config(vae_name_or_path="pixels", vae_config_file="vae_tiny").network_config()
    (tmp_path / "unet.json").write_text(json.dumps(UNET_CONFIG | {"in_channels": 3, "out_channels": 3}))
    changes = {"vae_name_or_path": "pixels", "unet_config_file": tmp_path / "unet.json", "methods": "alignment"}
    with pytest.raises(ConfigError, match="--methods alignment: pixels have no VAE with features; give features"):
        prepare(*parse_arguments(tiny.flags(tmp_path / "run", **changes), True, LdmConfig))


def test_a_unet_on_pixels(tiny, tmp_path):
    (tmp_path / "unet.json").write_text(json.dumps(UNET_CONFIG | {"in_channels": 3, "out_channels": 3}))
    given = {"vae_name_or_path": "pixels", "unet_config_file": tmp_path / "unet.json"}
    config = LdmConfig(**given, text_encoder_config_file=tiny.config("ldmbert"), prediction_type="flow_sample")
    model, batch = build_ldm(config, 100, 3), make_batch(4)
    assert "posterior_noise" not in model.inputs
    share = ((batch["timesteps"].astype("float32") + 1) / 1000).clip(0.05)
    expected = model.latents(pixel_values=batch["pixel_values"]).square().mean([1, 2, 3]) / share**2  # a new UNet's: 0
    np.testing.assert_allclose(model(**batch).per_sample, expected, rtol=1e-3)
