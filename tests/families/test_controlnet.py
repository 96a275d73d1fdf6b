"""The family as its users meet it, and the same loss, gradients and pictures as plain diffusers."""

import json

import needs
import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from overfit import overfit
from PIL import Image
from small_weights import small_weights, write_clip
from tiny_model import load_pipeline, write_base

import ppldm
from ppldm.config.data import DataOptions
from ppldm.data.control import apply_filter, make_filter
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.families.base import get_family
from ppldm.families.controlnet import FAMILY, ControlNetConfig
from ppldm.families.ldm_build import build_model
from ppldm.networks.configs import controlnet_config
from ppldm.networks.controlnet import new_controlnet
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.utils.rng import Stream, make_rng
from ppldm.weights.fill import component_of, fill_component
from ppldm.weights.source import open_model, read_component
from ppldm.weights.write import write_weights

UNUSED = ("vae_name_or_path", "text_encoder_config_file", "unet_config_file", "tokenizer_name")


def flags(tiny, folder, **changes) -> list[str]:
    return tiny.flags(folder, **{**dict.fromkeys(UNUSED), "model_name_or_path": write_base(tiny), **changes})


def start(tiny, folder, **changes):
    return prepare(*parse_arguments(flags(tiny, folder, **changes), True, get_family("controlnet").Config))


def controlled(seed=0, channels=3, clip=None, prediction_type="epsilon"):
    """Whole weights with a control network that has learned something."""
    weights = small_weights(seed, prediction_type=prediction_type)
    if clip:
        weights.components["text_encoder"] = read_component("text_encoder", write_clip(clip))
        weights.tokenizer = load_tokenizer(str(clip / "tokenizer"), 77)
    unet = weights.components["unet"]
    config = controlnet_config(unet.config, weights.components["vae"].config, channels)
    found = component_of("controlnet", new_controlnet(fill_component("unet", unet), config, seed))
    rng = np.random.default_rng(seed)
    for array in found.arrays.values():
        array += rng.standard_normal(array.shape, dtype=np.float32) * np.float32(0.05)
    weights.components["controlnet"] = found
    return weights


@pytest.mark.parametrize("channels, prediction_type", [(3, "epsilon"), (4, "v_prediction")])
def test_loss_and_gradients_are_those_of_a_plain_loop_of_diffusers(tmp_path, channels, prediction_type):
    needs.need("parity")
    import diffusers
    import torch
    from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertModel

    weights = controlled(1, channels, prediction_type=prediction_type)
    write_weights(weights, "diffusers", tmp_path / "d")
    rng = np.random.default_rng(2)
    given = {
        "pixel_values": rng.integers(0, 256, (2, 3, 64, 64), dtype=np.uint8),
        "control": rng.integers(0, 256, (2, channels, 64, 64), dtype=np.uint8),
        "input_ids": rng.integers(0, 60, (2, 77)),
        "timesteps": np.array([40, 900]),
        "noise": rng.standard_normal((2, 4, 8, 8), dtype=np.float32),
        "posterior_noise": rng.standard_normal((2, 4, 8, 8), dtype=np.float32),
    }
    ours = build_model(weights, "small")
    ours.train()
    loss = ours(**{name: paddle.to_tensor(value) for name, value in given.items()}).value
    loss.backward()

    vae = diffusers.AutoencoderKL.from_pretrained(tmp_path / "d/vqvae").eval()
    unet = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "d/unet").eval().requires_grad_(False)
    text_encoder = LDMBertModel.from_pretrained(tmp_path / "d/bert").eval()
    scheduler = diffusers.DDPMScheduler.from_pretrained(tmp_path / "d/scheduler")
    controlnet = diffusers.ControlNetModel.from_pretrained(tmp_path / "d/controlnet").train()
    batch = {name: torch.tensor(value) for name, value in given.items()}
    with torch.no_grad():
        posterior = vae.encode(batch["pixel_values"].float() / 127.5 - 1).latent_dist
        latents = (posterior.mean + posterior.std * batch["posterior_noise"]) * vae.config.scaling_factor
        hidden = text_encoder(batch["input_ids"])[0]
    noise, timesteps = batch["noise"], batch["timesteps"]
    noisy = scheduler.add_noise(latents, noise, timesteps)
    down, middle = controlnet(noisy, timesteps, encoder_hidden_states=hidden, controlnet_cond=batch["control"] / 255,
                              return_dict=False)  # fmt: skip
    predicted = unet(noisy, timesteps, encoder_hidden_states=hidden, down_block_additional_residuals=down,
                     mid_block_additional_residual=middle).sample  # fmt: skip
    target = noise if prediction_type == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
    theirs = torch.nn.functional.mse_loss(predicted, target)
    theirs.backward()
    assert float(loss) == pytest.approx(theirs.item(), abs=1e-4)
    expected = {name: value.grad.numpy() for name, value in controlnet.named_parameters()}
    found = {name: value.grad.numpy() for name, value in ours.controlnet.named_parameters()}
    assert found.keys() == expected.keys() and max(np.abs(one).max() for one in expected.values()) > 0.01
    for name, gradient in expected.items():
        own = found[name] if found[name].shape == gradient.shape and gradient.ndim != 2 else found[name].T
        assert np.abs(own - gradient).max() <= 1e-4, name


def test_diffusers_pipeline_of_an_export_draws_the_same(tmp_path):
    weights = controlled(3, clip=tmp_path / "clip")
    for form in ("ppdiffusers", "diffusers"):
        write_weights(weights, form, tmp_path / form)
    assert json.loads((tmp_path / "diffusers/model_index.json").read_text())["controlnet"] == [
        "diffusers",
        "ControlNetModel",
    ]
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "control.png")
    settings = {"guidance_scale": 3.0, "num_inference_steps": 3}
    model = ppldm.load(tmp_path / "ppdiffusers")
    ours = model.generate("red blue", seed=4, control=tmp_path / "control.png", control_scale=0.7, **settings)[0, 0]
    free = model.generate("red blue", seed=4, **settings)[0, 0]
    assert np.abs(ours.astype(int) - free).mean() > 2
    needs.need("parity")
    import diffusers
    import torch
    from noise import initial_noise

    noise = torch.tensor(initial_noise(4, "red blue", 0, (4, 8, 8))[None])
    theirs = diffusers.StableDiffusionControlNetPipeline.from_pretrained(str(tmp_path / "diffusers"))(
        "red blue", image=Image.open(tmp_path / "control.png"), latents=noise, height=64, width=64,
        controlnet_conditioning_scale=0.7, **settings,
    ).images[0]  # fmt: skip
    assert np.abs(np.asarray(theirs).astype(int) - ours).mean() < 1


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("controlnet")
    run = start(tiny, folder / "run", control="inpainting", max_steps=2, image_logging_steps=2, num_inference_steps=1)
    drawn = []
    make = run.draw
    object.__setattr__(run, "draw", lambda batch: drawn.append(make(batch)) or drawn[-1])
    run_loop(run)
    return folder, drawn


def test_the_base_stays_what_it_was_and_another_run_goes_on_from_the_network(tiny, trained):
    folder, _ = trained
    base, exported = load_pipeline(write_base(tiny)), load_pipeline(folder / "run/pipeline")
    for name, value in base.state_dict().items():
        assert np.array_equal(exported.state_dict()[name].numpy(), value.numpy()), name
    assert json.loads((folder / "run/pipeline/ppldm.json").read_text())["control"] == "inpainting"
    again = start(tiny, folder / "again", control="inpainting", controlnet_name_or_path=folder / "run/pipeline")
    for name, value in exported.controlnet.state_dict().items():
        assert np.array_equal(again.state.model.controlnet.state_dict()[name].numpy(), value.numpy()), name
    with pytest.raises(ModelError, match="takes control images of 4 channels; --control canny has 3"):
        start(tiny, folder / "other", controlnet_name_or_path=folder / "run/pipeline")


def test_samples_while_training_stand_beside_their_control_images(trained):
    ((pictures, _),) = trained[1]
    shown = next(np.asarray(picture) for tag, picture in pictures.items() if tag.startswith("ddim"))
    assert (shown == (230, 60, 200)).all(axis=2).sum() > 100  # holes


def test_a_hole_is_where_a_picture_is_transparent(trained, tmp_path):
    model = ppldm.load(trained[0] / "run/pipeline")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 4), dtype=np.uint8)
    pixels[..., 3] = 255 * (np.arange(48) < 20)
    Image.fromarray(pixels).save(tmp_path / "hole.png")
    control = model.read_control(tmp_path / "hole.png", (32, 32))
    assert np.array_equal(control[3], np.broadcast_to(255 * (np.arange(8, 40) >= 20), (32, 32)))
    assert np.array_equal(control[:3], np.where(control[3], 0, pixels[:, 8:40, :3].transpose(2, 0, 1)))
    Image.fromarray(pixels[..., :3]).save(tmp_path / "whole.png")
    with pytest.raises(ConfigError, match="3 channels, and the model takes 4; give a picture that is transparent"):
        model.read_control(tmp_path / "whole.png", (32, 32))
    made = model.read_control(tmp_path / "whole.png", (32, 32), "inpainting", seed=5)
    crop = np.ascontiguousarray(pixels[:, 8:40, :3].transpose(2, 0, 1))
    assert np.array_equal(made, apply_filter(make_filter("inpainting"), crop, make_rng(5, Stream.CONTROL)))
    with pytest.raises(ConfigError, match="cannot be read as a picture"):
        model.read_control(__file__, (32, 32))


def test_what_cannot_be_trained_is_refused_first(tiny, tmp_path):
    for changes, said in (
        ({"model_name_or_path": None}, "stands on a model that is trained"),
        ({"unet_learning_rate": 1e-4}, "--unet_learning_rate is for what is not trained here"),
        ({"lora_rank": 2}, "--lora_rank and --train_tokens adapt the base"),
        ({"ema_posthoc": 0.05}, "--ema_posthoc takes two different"),
        ({"control": "cany"}, "did you mean canny"),
    ):
        with pytest.raises(ConfigError, match=said):
            start(tiny, tmp_path / "run", **changes)


def test_a_model_without_one_takes_no_control_image(tiny, tmp_path):
    model = ppldm.load(write_base(tiny))
    with pytest.raises(ConfigError, match="this one has none"):
        model.generate("picture 1", control=tmp_path / "x.png")
    assert load_tokenizer(tiny.tokenizer, 12).vocab == model.tokenizer.vocab


def test_compvis_has_no_place_for_it(tmp_path):
    with pytest.raises(ModelError, match="with a ControlNet is not written for CompVis"):
        write_weights(controlled(), "compvis", tmp_path / "c")
    assert open_model(write_twice(tmp_path)).read(("vae",)).components.keys() == {"vae"}


def write_twice(folder):
    write_weights(controlled(), "ppdiffusers", folder / "p", safetensors=True)
    return folder / "p"


@pytest.mark.turn("a family learns eight pictures", 1)
@pytest.mark.slow
def test_it_overfits_eight_pictures(tiny):
    """Of eight latents, captions and control images, beside a frozen UNet of random weights, through which all must go:
    the error falls by a third in 150 updates."""
    config = ControlNetConfig(
        model_name_or_path=str(write_base(tiny)), model_max_length=12, prediction_type="v_prediction"
    )
    model = FAMILY.build(config, DataOptions(resolution=32), seed=1)
    control = np.random.default_rng(1).integers(0, 256, (8, 3, 32, 32), dtype=np.uint8)
    assert overfit(model, control=control) < 2 / 3
