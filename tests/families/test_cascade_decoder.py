"""Stable Cascade's stage B: published sizes, what is refused, what the network is told, and that it learns."""

import re

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from overfit import learn, with_new_noise

from ppldm.data.inputs import Normals, Pyramid, Uniform
from ppldm.families.base import check_family, get_family
from ppldm.networks.cascade.control import EffNetEncoder
from ppldm.networks.cascade.stages import _shrink
from ppldm.training.commands.dry_run import reckon
from ppldm.training.commands.train import read_recipe
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.utils.rng import Generators, Stream

FAMILY = get_family("cascade_decoder")
SCALE = 0.3764


def flags(tiny, **changes) -> list[str]:
    settings = {
        **{"output_dir": "out", "file_list": tiny.file_list, "resolution": 64, "effnet_config_file": "effnet_tiny"},
        **{"text_encoder_config_file": tiny.config("clip"), "vqgan_config_file": "vqgan_tiny"},
        **{"decoder_config_file": tiny.config("cascade_b"), "tokenizer_name": tiny.tokenizer},
        **{"model_max_length": 12, "seed": 5},
        **changes,
    }
    return [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]


def build(tiny, **changes):
    config, data, arguments = parse_arguments(flags(tiny, **changes), True, FAMILY.Config)[:3]
    check_family(config, data, arguments)
    return FAMILY.build(config, data, seed=5)


def make_batch(size: int, side: int = 64) -> dict:
    rng = np.random.default_rng(0)
    batch = {
        "pixel_values": rng.integers(0, 256, (size, 3, side, side), dtype=np.uint8),
        "input_ids": rng.integers(5, 50, (size, 12)),
        "timesteps": rng.integers(0, 1000, size),
        "noise": rng.standard_normal((size, 4, side // 4, side // 4), dtype=np.float32),
        "effnet_resize": rng.random(size, dtype=np.float32),
        "effnet_drop": np.linspace(0.05, 0.95, size, dtype=np.float32),
    }
    return {name: paddle.to_tensor(value) for name, value in batch.items()}


@pytest.mark.parametrize(
    "preset, count, batch", [("cascade-b-3b", 1_562_941_136, 256), ("cascade-b-700m", 699_471_248, 512)]
)
def test_presets_train_what_is_published(preset, count, batch):
    words = ["--preset", preset, "--do_train", "data.file_list=x", "model.effnet_name_or_path=owner/model"]
    found = reckon(read_recipe(words, True, None), num_devices=8)
    components = found["components"]
    assert components["decoder"] == {"class": "StableCascadeUNet", "parameters": count, "trained": count}
    assert [components[name]["trained"] for name in ("effnet", "text_encoder", "vqgan")] == [0, 0, 0]
    assert components["vqgan"]["class"] == "PaellaVQModel"
    assert found["samples_an_update"] == batch


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vqgan_config_file": None}, "nothing gives the vqgan: name its weights, --vqgan_name_or_path, or the config"),
        ({"resolution": 72}, "--resolution 72 must be a multiple of 32, the EfficientNet's downscaling factor"),
        (
            {"decoder_config_file": "cascade_b_tiny"},
            "the text_encoder gives projection_dim 32, and the decoder takes clip_text_pooled_in_channels 128",
        ),
        ({"decoder_config_file": "cascade_c_tiny"}, "cascade_c_tiny"),
        ({"to_static": True}, "--to_static is not supported for decoders of Stable Cascade"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(tiny, changes, message):
    with pytest.raises((ConfigError, ModelError), match=re.escape(message)):
        build(tiny, **changes)


def test_a_batch_has_pyramid_noise_and_draws_of_the_effnet(tiny):
    inputs = build(tiny, noise_offset=0.1).inputs
    assert inputs["noise"].first == Pyramid(Normals(Stream.NOISE, 4, 4), Stream.PYRAMID)
    assert inputs["effnet_resize"] == Uniform(Stream.EFFNET_RESIZE)
    assert inputs["effnet_drop"] == Uniform(Stream.EFFNET_DROP)
    assert build(tiny).inputs["noise"] == inputs["noise"].first
    draws = [inputs[name].draw([(0, 1)], (64, 64), Generators(5), {}) for name in ("effnet_resize", "effnet_drop")]
    assert draws[0] != draws[1] and (Stream.EFFNET_DROP, Stream.PYRAMID, Stream.CLIP_IMAGE) == (43, 44, 45)


@pytest.mark.needs("parity")
@pytest.mark.parametrize("weighting", ["none", "p2"])
def test_the_loss_is_that_of_the_published_trainer(tiny, weighting):
    """From pixels on, but for what the networks compute, in PyTorch: sizes, drops, latents, noising, weights."""
    import torch
    from torch.nn.functional import interpolate

    size, side = 10, 96
    model, batch = build(tiny, loss_weighting=weighting, resolution=96), make_batch(size, side)
    rng = np.random.default_rng(3)
    for parameter in model.decoder.parameters():
        parameter.set_value(0.1 * rng.standard_normal(parameter.shape, dtype=np.float32))
    model.eval()
    images = torch.as_tensor(batch["pixel_values"].numpy()).double() / 255
    told = torch.zeros(size, 16, side // 8, side // 8, dtype=torch.float64)
    sizes = set()
    for row, (u, drop) in enumerate(zip(batch["effnet_resize"].tolist(), batch["effnet_drop"].tolist(), strict=True)):
        new = int(((side * (0.5 + 0.5 * u)) // 32) * 32)
        sizes.add(new)
        seen = interpolate(images[row : row + 1], size=(new, new), mode="nearest")
        if drop >= 0.1:
            latents = torch.as_tensor(model.effnet(paddle.to_tensor(seen.float().numpy())).numpy()).double()
            told[row] = interpolate(latents, size=told.shape[2:], mode="bilinear", align_corners=True)[0]
    assert sizes == {32, 64} and (told[0] == 0).all() and (told[1] != 0).any()
    stage_a = model.vqgan.encode(paddle.to_tensor(images.float().numpy())).latents.numpy()
    latents, noise = torch.as_tensor(stage_a).double() / SCALE, torch.as_tensor(batch["noise"].numpy()).double()
    t = (torch.as_tensor(batch["timesteps"].numpy()).double() + 1) / 1000
    first = torch.cos(torch.tensor(0.008 / 1.008 * torch.pi / 2, dtype=torch.float64)) ** 2
    signal = (torch.cos((0.008 + t) / 1.008 * torch.pi / 2) ** 2 / first).clamp(0.0001, 0.9999).reshape(-1, 1, 1, 1)
    ratio = ((signal.flatten() * first) ** 0.5).acos() / (torch.pi / 2) * 1.008 - 0.008
    noisy = signal**0.5 * latents + (1 - signal) ** 0.5 * noise
    given = [torch.as_tensor(model.embed_captions(batch["input_ids"])[1].numpy()), *(None, None), told]
    given = [one if one is None else paddle.to_tensor(one.float().numpy()) for one in (noisy, ratio, *given)]
    predicted = torch.as_tensor(model.decoder(*given).numpy()).double()
    errors = ((predicted - noise) ** 2).mean(dim=[1, 2, 3])
    weights = 1 - signal.flatten() if weighting == "p2" else 1  # 1 / (1 + SNR)
    loss = model(**batch)
    np.testing.assert_allclose(loss.per_sample.numpy(), errors.numpy(), rtol=1e-5)
    np.testing.assert_allclose(loss.value.item(), (errors * weights).mean().item(), rtol=1e-6)


@pytest.mark.parametrize("height, width, share, expected", [(64, 96, 0.999, (32, 64)), (32, 160, 0.5, (32, 64))])
def test_pictures_shrink_to_the_nearest_pixels_of_multiples_of_32(height, width, share, expected):
    picture = np.random.default_rng(0).random((3, height, width), np.float32)
    found = _shrink(paddle.to_tensor(picture), share).numpy()
    rows, columns = (np.arange(new) * old // new for new, old in zip(expected, (height, width), strict=True))
    assert (found == picture[:, rows][:, :, columns]).all()


def test_latents_are_those_of_stage_a_and_come_back(tiny):
    model, batch = build(tiny), make_batch(2)
    assert {name.partition(".")[0] for name in model.trained_parameters()} == {"decoder"}
    latents = model.latents(batch["pixel_values"])
    assert latents.shape == [2, 4, 16, 16] and 0.3 < float(latents.std()) < 3
    decoded = model.vqgan.decode(latents * SCALE).sample.clip(0, 1)
    np.testing.assert_allclose(model.decode(latents).numpy(), decoded.numpy() * 2 - 1, atol=1e-6)


def test_what_is_drawn_is_led_by_pictures_and_its_other_branch_by_nothing(tiny):
    from ppldm.diffusion.drawing import Drawing
    from ppldm.diffusion.guided import sample_latents

    model, batch = build(tiny), make_batch(2)
    seen, inner = [], model.decoder.forward
    model.decoder.forward = lambda *given, **named: seen.append(named["effnet"]) or inner(*given, **named)
    led = model.lead(batch["pixel_values"])
    said, empty = (model.condition(ids) for ids in (batch["input_ids"], paddle.zeros([1, 12], "int64")))
    sample_latents(model, said, empty, batch["noise"], Drawing(1, 2.0), control=led)
    sample_latents(model, said, None, batch["noise"], Drawing(1, 1.0), control=led)
    own = model.effnet(batch["pixel_values"].astype("float32") / 255).numpy()
    assert (seen[0][:2].numpy() == 0).all() and (seen[0][2:].numpy() == own).all() and (seen[1].numpy() == own).all()


@pytest.mark.needs("parity")
def test_diffusers_loads_what_is_exported(tiny, tmp_path):
    import torch
    from diffusers.models.unets import StableCascadeUNet

    model, rng = build(tiny), np.random.default_rng(0)
    for parameter in model.decoder.parameters():
        parameter.set_value(0.1 * rng.standard_normal(parameter.shape, dtype=np.float32))
    config = parse_arguments(flags(tiny), True, FAMILY.Config)[0]
    FAMILY.export(model, config, None, tmp_path / "decoder", None, {})
    theirs = StableCascadeUNet.from_pretrained(tmp_path / "decoder").eval()
    shapes = {"sample": (2, 4, 16, 24), "clip_text_pooled": (2, 1, 32), "effnet": (2, 16, 2, 3)}
    given = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    given["timestep_ratio"] = np.array([0.1, 0.9], np.float32)
    with torch.no_grad():
        expected = theirs(**{name: torch.tensor(value) for name, value in given.items()}).sample.numpy()
    model.eval()
    found = model.decoder(**{name: paddle.to_tensor(value) for name, value in given.items()})
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_eight_pictures_are_learned(tiny):
    """Their latents are told by what the EfficientNet sees, and by captions: the error falls."""
    model, batch = build(tiny), make_batch(8)
    blocks = batch["pixel_values"].numpy()[:, :, ::16, ::16]
    batch["pixel_values"] = paddle.to_tensor(blocks.repeat(16, 2).repeat(16, 3))
    losses = learn(model, 5e-3, with_new_noise(batch, (8, 4, 16, 16), 150))
    assert np.mean(losses[:3]) > 0.8 and np.mean(losses[-30:]) < 0.45, losses[::20]


def test_frozen_networks_are_not_differentiated(tiny):
    model, batch = build(tiny), make_batch(2)
    model.train()
    model(**batch).value.backward()
    assert isinstance(model.effnet, EffNetEncoder) and not model.vqgan.training and not model.effnet.training
    assert all(parameter.grad is None for parameter in model.vqgan.parameters())
