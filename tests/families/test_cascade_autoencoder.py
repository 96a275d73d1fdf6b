"""Stable Cascade's stage A: its loss by formula, the statistics of its norm, what is refused, and that it learns."""

import re

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from overfit import learn

from ppldm.families.base import check_family, get_family
from ppldm.networks.autoencoder import psnr
from ppldm.utils.errors import ConfigError

FAMILY = get_family("cascade_autoencoder")


def build(tiny, **changes):
    settings = {"output_dir": "out", "file_list": tiny.file_list, "resolution": 32, "vqgan_config_file": "vqgan_tiny"}
    words = [word for name, value in (settings | changes).items() if value is not None for word in (f"--{name}", value)]
    config, data, arguments = parse_arguments(list(map(str, words)), True, FAMILY.Config)[:3]
    check_family(config, data, arguments)
    return FAMILY.build(config, data, seed=5)


def pictures(count: int, side: int = 32):
    blocks = np.random.default_rng(1).integers(0, 256, (count, 3, side // 8, side // 8), dtype=np.uint8)
    return paddle.to_tensor(blocks.repeat(8, 2).repeat(8, 3))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vqgan_config_file": None}, "nothing gives stage A: name --vqgan_config_file"),
        ({"resolution": 34}, "--resolution 34 must be a multiple of 4, stage A's downscaling factor"),
        ({"adversarial_weight": 1}, "--discriminator_layers 3 needs pictures of 24 pixels a side; some have 16"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(tiny, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build(tiny, **{"resolution": 16, **changes})


@pytest.mark.parametrize("kind, powers", [("l1", [1]), ("mse", [2]), ("l1_mse", [1, 2])])
def test_the_loss_is_the_published_one_and_gradients_go_straight_through(tiny, kind, powers):
    model, pixels = build(tiny, reconstruction_loss=kind), pictures(2)
    model.train()
    loss = model(pixels).value
    z = model.vqgan.encode(pixels.astype("float32") / 255).latents.detach()
    codes = model.vqgan.vquantizer.embedding.weight.numpy().astype(np.float64)
    flat = z.numpy().astype(np.float64).transpose(0, 2, 3, 1)
    nearest = np.square(flat[..., None, :] - codes).sum(-1).argmin(-1)
    assert len(np.unique(nearest)) > 10  # new codes are where latents are
    quantised = paddle.to_tensor(codes[nearest].transpose(0, 3, 1, 2), "float32", stop_gradient=False)
    decoded = model.vqgan.decode(quantised).sample
    off = 2 * (decoded - pixels.astype("float32") / 255)
    error = sum((off.abs() ** power).mean() for power in powers)
    assert float(loss) == pytest.approx(float(error) + 1.25 * np.square(flat - codes[nearest]).mean(), rel=1e-4)
    # What comes to the latents: the decoder's gradient at the codes, and a quarter of that of the squared error.
    error.backward()
    leaf = z.clone()
    leaf.stop_gradient = False
    model.vqgan.encode = lambda _: type("Encoded", (), {"latents": leaf})
    model(pixels).value.backward()
    expected = quantised.grad.numpy() + 0.25 * 2 * (z.numpy() - quantised.numpy()) / z.size
    np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("adversarial", [False, True])
def test_the_norm_moves_a_tenth_to_all_pictures_of_an_update(tiny, adversarial):
    given = {"adversarial_weight": 0.5, "adversarial_start": 0, "discriminator_layers": 1} if adversarial else {}
    model, pixels = build(tiny, **given), pictures(5)
    convolution, norm = model.vqgan.down_blocks[-1]
    came = []
    hook = convolution.register_forward_post_hook(lambda _layer, _given, out: came.append(out.numpy()))
    model.train()
    whole = model(pixels)
    hook.remove()
    assert (norm._mean.numpy() == 0).all() and (norm._variance.numpy() == 1).all()  # nothing yet, and not the batch's
    parts = [model(pixels[:2]), model(pixels[2:])]
    assert len(whole.statistics) == 9 + (1 + 2 * model.last_layer.weight.size if adversarial else 0)
    np.testing.assert_allclose(
        model.statistics(parts)[:9].numpy(), model.statistics([whole])[:9].numpy(), rtol=1e-4, atol=1e-3
    )
    model.keep_statistics(model.statistics(parts))
    np.testing.assert_allclose(norm._mean.numpy(), 0.1 * came[0].mean((0, 2, 3)), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(norm._variance.numpy(), 0.9 + 0.1 * came[0].var((0, 2, 3)), rtol=1e-4)
    assert (model.balance is not None) == adversarial and (not adversarial or float(model.balance.ratio) > 0)
    model.eval()
    assert model(pixels).statistics is None


@pytest.mark.turn("a family learns eight pictures", 1)
def test_eight_pictures_are_learned(tiny):
    model, pixels = build(tiny, reconstruction_loss="l1_mse"), pictures(8)
    before = psnr(pixels, model.reconstruct(pixels))
    losses = learn(model, 2e-3, [{"pixel_values": pixels}] * 120)
    model.eval()
    after = psnr(pixels, model.reconstruct(pixels))
    assert np.mean(losses[-5:]) < 0.35 * np.mean(losses[:3]) and after > before + 6, (losses[::20], before, after)
