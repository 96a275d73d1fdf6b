"""A control network: a copy of the UNet's encoder that changes nothing yet, and leads what is frozen."""

import numpy as np
import paddle
import pytest
from tiny_model import make_batch, make_model

from ppldm.networks.configs import check_config, check_fit, controlnet_config, read_json_config
from ppldm.networks.controlnet import ControlledDiffusionModel, new_controlnet
from ppldm.utils.errors import ModelError
from ppldm.weights.fill import config_of


def led(tiny, channels=3, seed=3, **changes):
    """(base, the same with a new control network, a batch of both)."""
    base = make_model(tiny, **changes)
    rng = np.random.default_rng(1)
    for parameter in base.unet.parameters():
        parameter.set_value(
            parameter.numpy() + rng.standard_normal(parameter.shape, dtype=np.float32) * np.float32(0.05)
        )
    config = controlnet_config(config_of("unet", base.unet), base.vae.config, channels)
    parts = {"vae": base.vae, "text_encoder": base.text_encoder, "unet": base.unet}
    model = ControlledDiffusionModel(base.process, **parts, controlnet=new_controlnet(base.unet, config, seed))
    control = np.random.default_rng(2).integers(0, 256, (4, channels, 32, 32), dtype=np.uint8)
    return base, model, make_batch(4) | {"control": paddle.to_tensor(control)}


def test_a_new_one_changes_nothing_and_learns(tiny):
    base, model, batch = led(tiny)
    base.eval(), model.train()
    plain = {name: value for name, value in batch.items() if name != "control"}
    expected = base(**plain)
    found = model(**batch)
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert np.array_equal(one.numpy(), other.numpy())
    found.value.backward()
    gradients = {name: float(p.grad.abs().max()) for name, p in model.named_parameters() if p.grad is not None}
    assert all(name.startswith("controlnet.") for name in gradients)
    moved = {name for name, size in gradients.items() if size}
    # Behind a convolution of zeros nothing is learned yet, but itself.
    zeros = {
        name
        for name in gradients
        if name.startswith(("controlnet.controlnet_down_blocks", "controlnet.controlnet_mid"))
    }
    assert moved == zeros and set(model.trained_parameters()) == {
        name for name, _ in model.named_parameters() if name.startswith("controlnet.")
    }


def test_it_leads_by_its_scale_and_without_a_control_image_is_its_base(tiny):
    _, model, batch = led(tiny)
    model.eval()
    rng = np.random.default_rng(4)
    for name, parameter in model.controlnet.named_parameters():
        if "controlnet_" in name:
            parameter.set_value(rng.standard_normal(parameter.shape, dtype=np.float32) * np.float32(0.1))
    noisy, timesteps = batch["noise"], batch["timesteps"]
    condition = model.condition(batch["input_ids"])

    def denoise(**given):
        return model.denoise(noisy, timesteps, **condition, **given).numpy()

    plain = denoise()
    assert np.array_equal(denoise(control=batch["control"], control_scale=0.0), plain)
    once, twice = (
        np.abs(denoise(control=batch["control"], control_scale=scale) - plain).max() for scale in (0.01, 0.02)
    )
    assert once > 0 and twice == pytest.approx(2 * once, rel=0.1)
    other = 255 - batch["control"]
    assert not np.array_equal(denoise(control=other), denoise(control=batch["control"]))


def test_weights_are_the_unets_or_zero_or_drawn_by_the_seed(tiny):
    base, model, _ = led(tiny)
    own, copied = model.controlnet.state_dict(), base.unet.state_dict()
    assert {name.split(".")[0] for name in own if name not in copied} == {
        "controlnet_cond_embedding", "controlnet_down_blocks", "controlnet_mid_block"
    }  # fmt: skip
    _, same, _ = led(tiny)
    _, other, _ = led(tiny, seed=4)
    for name, value in own.items():
        value = value.numpy()
        assert np.array_equal(value, same.controlnet.state_dict()[name].numpy())
        if name in copied:
            assert np.array_equal(value, copied[name].numpy())
        elif "cond_embedding" not in name or "conv_out" in name:
            assert not value.any()
        else:
            assert not np.array_equal(value, other.controlnet.state_dict()[name].numpy())
    assert model.controlnet.conv_in.weight is not base.unet.conv_in.weight


@pytest.mark.parametrize("blocks", range(1, 7))
def test_a_control_image_is_brought_to_the_size_of_latents(tiny, blocks):
    unet = check_config("unet", read_json_config(tiny.config("unet"), ""), "unet")
    channels = controlnet_config(unet, {"block_out_channels": [8] * blocks}, 4)["conditioning_embedding_out_channels"]
    assert len(channels) == blocks and channels[:4] == [16, 32, 96, 256][:blocks]


@pytest.mark.parametrize("change", [{"mid_block_type": None}, {"cross_attention_dim": [32, 32]}, {"dropout": 0.5}])
def test_a_unet_that_cannot_be_copied_is_refused(tiny, change):
    unet = check_config("unet", read_json_config(tiny.config("unet"), ""), "unet") | change
    with pytest.raises(ModelError, match=f"no ControlNet can be made for this UNet.*{next(iter(change))}"):
        controlnet_config(unet, {"block_out_channels": [8] * 4}, 3)


def test_one_of_another_unet_is_refused(tiny):
    unet = check_config("unet", read_json_config(tiny.config("unet"), ""), "unet")
    config = controlnet_config(unet, {"block_out_channels": [8] * 4}, 3)
    check_fit({"unet": unet, "controlnet": config})
    for name in config.keys() & unet.keys():
        with pytest.raises(ModelError, match=f"the ControlNet has {name} 12345 .* it was made for another"):
            check_fit({"unet": unet, "controlnet": config | {name: 12345}})
