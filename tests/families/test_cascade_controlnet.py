"""Stable Cascade's stage C led by control images: that nothing else is trained, what leads, what is refused."""

import re

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from overfit import learn, with_new_noise
from tiny_cascade import flags, make_batch
from tiny_model import write_prior

from ppldm.data.control import Canny
from ppldm.data.inputs import Control
from ppldm.diffusion.drawing import Drawing
from ppldm.diffusion.guided import draw
from ppldm.families.base import check_family, get_family
from ppldm.networks.cascade.control import _Block
from ppldm.training.commands.dry_run import reckon
from ppldm.training.commands.train import read_recipe
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.components import ComponentWeights
from ppldm.weights.fill import component_of
from ppldm.weights.source import read_component
from ppldm.weights.write import write_component

FAMILY = get_family("cascade_controlnet")
BLOCKS = (0, 1, 3)


def parsed(tiny, **changes):
    own = {"prior_config_file": None, "prior_name_or_path": write_prior(tiny), **changes}
    blocks = own.pop("controlnet_blocks", BLOCKS)
    words = [*flags(tiny, **own), "--controlnet_blocks", *map(str, blocks)] if blocks else flags(tiny, **own)
    return parse_arguments(words, True, FAMILY.Config)


def build(tiny, **changes):
    config, data, arguments = parsed(tiny, **changes)[:3]
    check_family(config, data, arguments)
    return FAMILY.build(config, data, seed=5)


def led_batch(size: int, channels: int = 3) -> dict:
    control = np.random.default_rng(1).integers(0, 256, (size, channels, 64, 64), dtype=np.uint8)
    return make_batch(size) | {"control": paddle.to_tensor(control)}


def test_the_preset_trains_the_control_network_of_the_largest():
    words = [
        "--preset",
        "cascade-c-controlnet",
        "--do_train",
        "data.file_list=x",
        "model.effnet_name_or_path=owner/model",
    ]
    found = reckon(read_recipe(words, True, None), num_devices=8)
    components = found["components"]
    # EfficientNetV2-S's features, and for each of 8 blocks 1280 x (1280 + 2048); statistics of norms are not trained.
    assert components["controlnet"]["trained"] >= 8 * 1280 * (1280 + 2048) + 20_177_488
    assert components["controlnet"]["class"] == "CascadeControlNet"
    assert components["prior"] == {"class": "StableCascadeUNet", "parameters": 3_589_103_632, "trained": 0}
    assert found["samples_an_update"] == 256


@pytest.mark.parametrize(
    "bottleneck, control",
    [
        ("effnet", "canny"),
        ("effnet", "canny,channels=1"),
        ("effnet", "inpainting"),
        ("simple", "inpainting"),
        ("large", "super-resolution,scale=0.5"),
    ],
)
def test_a_new_one_changes_nothing_and_alone_is_trained(tiny, monkeypatch, bottleneck, control):
    monkeypatch.setattr("ppldm.families.cascade.check_config", smaller)
    model = build(tiny, controlnet_bottleneck=bottleneck, control=control)
    channels = model.inputs["control"].filter.num_channels
    assert (model.inputs["control"] == Control(Canny())) == (control == "canny")
    batch = led_batch(2, channels)
    model.train()
    loss = model(**batch)
    model.eval()
    plain = super(type(model), model).forward(**{name: one for name, one in batch.items() if name != "control"})
    for one, other in zip(loss[:3], plain[:3], strict=True):
        assert np.array_equal(one.numpy(), other.numpy())
    assert {name.partition(".")[0] for name in model.trained_parameters()} == {"controlnet"} == {
        *model.components
    } - {*model.unsaved}  # fmt: skip
    loss.value.backward()
    moved = {name for name, one in model.named_parameters() if one.grad is not None and one.grad.abs().max() > 0}
    # Behind a convolution of zeros nothing is learned yet, but itself.
    assert moved == {f"controlnet.projections.{number}.2.weight" for number in range(len(BLOCKS))}
    with paddle.no_grad():
        for name in moved:
            parameter = model.trained_parameters()[name]
            parameter.set_value(parameter - 0.1 * parameter.grad)
    assert float(model(**batch).value) < float(loss.value)


def smaller(kind, own, *given):
    """`large` of other widths than the published ones, which take a gigabyte."""
    from ppldm.networks.configs import check_config

    changes = {"large_channels": [32, 8, 16], "large_layers": 2} if kind == "cascade_controlnet" else {}
    return check_config(kind, own | changes, *given)


def test_what_the_network_sees(tiny, monkeypatch):
    monkeypatch.setattr("ppldm.families.cascade.check_config", smaller)
    control = led_batch(2)["control"]
    pixels = control.numpy() / np.float32(255)
    assert np.array_equal(build(tiny).seen(control).numpy(), pixels)
    means = pixels.reshape(2, 3, 2, 32, 2, 32).mean((3, 5))
    np.testing.assert_allclose(build(tiny, controlnet_bottleneck="simple").seen(control).numpy(), means, atol=1e-6)
    model = build(tiny, controlnet_bottleneck="large", control="grey")
    assert np.array_equal(model.seen(control).numpy(), model.small_latents(control).numpy())
    effnet, control = model.effnet.backbone.state_dict(), build(tiny, control="inpainting").controlnet.backbone
    for name, value in control.state_dict().items():
        if name == "0.0.weight":
            assert np.array_equal(value.numpy()[:, :3], effnet[name].numpy()) and not value.numpy()[:, 3:].any()
        else:
            assert np.array_equal(value.numpy(), effnet[name].numpy()), name


def teach(model) -> None:
    rng = np.random.default_rng(4)
    for parameter in model.controlnet.projections.parameters():
        parameter.set_value(rng.standard_normal(parameter.shape, dtype=np.float32) * np.float32(1))


def test_it_leads_by_its_scale_and_what_is_drawn(tiny):
    model, batch = build(tiny), led_batch(2)
    teach(model)
    model.eval()
    condition = model.condition(batch["input_ids"])
    given = batch["noise"], batch["timesteps"]
    free, led, half, none = (
        model.denoise(*given, **more, **condition).numpy()
        for more in ({}, {"control": batch["control"]}, {"control": batch["control"], "control_scale": 0.5},
                     {"control": batch["control"], "control_scale": 0.0})
    )  # fmt: skip
    assert np.array_equal(free, none) and np.abs(led - free).max() > 0.02 and np.abs(half - led).max() > 0.01
    settings = {"shape": (16, 2, 2), "seed": 3, "drawing": Drawing(2, 3.0)}
    pictures = [
        draw(model, model.tokenizer, ["picture 1"], [0], **settings, control=lead)
        for lead in (None, model.lead(batch["control"][:1]), model.lead(batch["control"][1:]))
    ]
    assert pictures[0].shape == (1, 64, 64, 3)
    assert all(np.abs(one.astype(int) - other).max() > 2 for one, other in zip(pictures, pictures[1:], strict=False))


def test_what_is_exported_is_read_back_and_by_its_published_names(tiny, tmp_path):
    model = build(tiny)
    teach(model)
    config = parsed(tiny)[0]
    FAMILY.export(model, config, None, tmp_path / "controlnet", None, {"control": "canny"})
    again = build(tiny, controlnet_name_or_path=tmp_path / "controlnet", controlnet_blocks=None)
    for name, value in model.controlnet.state_dict().items():
        assert np.array_equal(again.controlnet.state_dict()[name].numpy(), value.numpy()), name
    one = {"controlnet_name_or_path": tmp_path / "one", "controlnet_blocks": None}
    FAMILY.export(build(tiny, control="canny,channels=1"), config, None, tmp_path / "one", None, {})
    assert build(tiny, **one, control="canny,channels=1").controlnet.config.conditioning_channels == 1
    with pytest.raises(ModelError, match="sees 1 channels; with --control canny there are 3"):
        build(tiny, **one)
    with pytest.raises(ModelError, match="sees 3 channels; with --control inpainting there are 4"):
        build(tiny, controlnet_name_or_path=tmp_path / "controlnet", controlnet_blocks=None, control="inpainting")
    # The single file that was published first, with its config beside it.
    (weights,) = (tmp_path / "controlnet").glob("*.safetensors")
    (tmp_path / "canny.json").write_text((tmp_path / "controlnet/config.json").read_text())
    weights.rename(tmp_path / "canny.safetensors")
    found = read_component("cascade_controlnet", tmp_path / "canny.safetensors")
    assert "projections.2.2.weight" in found.arrays and "backbone.0.0.weight" in found.arrays
    assert (
        isinstance(found, ComponentWeights)
        and found.config == component_of("cascade_controlnet", again.controlnet).config
    )


def test_the_prior_drops_nothing_out_whatever_mode_is_set(tiny, tmp_path):
    prior = read_component("cascade_prior", write_prior(tiny))
    write_component(
        "cascade_prior",
        ComponentWeights(prior.config | {"dropout": 0.5}, prior.arrays),
        tmp_path / "prior",
        "diffusers",
    )
    model, batch = build(tiny, prior_name_or_path=tmp_path / "prior"), led_batch(2)
    losses = []
    for mode in (model.train, model.eval):
        mode()
        for layer in model.sublayers():
            layer.training = mode == model.train
        losses.append(float(model(**batch).value))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"controlnet_blocks": (0, 4)}, "the ControlNet is for block 4, and the prior has 0 .. 3; choose others"),
        ({"controlnet_blocks": (2, 0)}, "blocks [2, 0] must be an ascending list of whole numbers"),
        ({"control": "inpainting", "controlnet_bottleneck": "large"}, "has 4 channels, and the EfficientNet of"),
        ({"control": "cany"}, "did you mean canny"),
        ({"prior_name_or_path": None}, "nothing gives the prior"),
        ({"resolution": 72}, "--resolution 72 must be a multiple of 32"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_read(tiny, changes, message):
    with pytest.raises((ConfigError, ModelError), match=re.escape(message)):
        build(tiny, **changes)


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_eight_pictures_are_learned_through_a_frozen_prior(tiny):
    """Eight latents and control images beside a frozen prior of random weights, through which all must go: the error
    falls by a quarter, and is higher under another picture's control image."""
    model, batch = build(tiny, prediction_type="v_prediction"), led_batch(8)
    latents = paddle.to_tensor(np.random.default_rng(1).standard_normal((8, 16, 2, 2), dtype=np.float32))
    model.latents = lambda pixel_values: latents
    losses = learn(model, 3e-3, with_new_noise(batch, (8, 16, 2, 2), 160))
    assert np.mean(losses[-20:]) < 3 / 4 * np.mean(losses[:3]), losses[::20]
    model.eval()
    with paddle.no_grad():
        for other in with_new_noise(batch, (8, 16, 2, 2), 5):
            given = {name: paddle.to_tensor(value) for name, value in other.items()}
            assert (
                model(**given).value
                < model(**{**given, "control": given["control"][[7, 0, 1, 2, 3, 4, 5, 6]]}).value - 0.05
            )


@pytest.mark.parametrize("least", [-1000.0, -89.0])
def test_gradients_pass_through_values_far_below_zero(least):
    """Where Paddle's own SiLU gives none that are numbers."""
    block = _Block(4, 4, True, 4, 1)
    x = paddle.full([1, 4, 3, 3], least)
    x.stop_gradient = False
    for parameter in block.parameters():
        parameter.set_value(paddle.ones_like(parameter))
    block.block[0](x).sum().backward()
    assert np.isfinite(x.grad.numpy()).all()
