"""Stable Diffusion's loss and gradients are those of a plain loop of PyTorch's diffusers over the same batch, and what
is exported is read by it. True structure of 1.x and 2.x, small widths, random weights.

Bars: 1e-4 of the loss, and of the largest gradient; 1e-4 for every network's output.
"""

from types import SimpleNamespace

import needs
import numpy as np
import paddle
import pytest
from small_weights import CLIP, VAE, write_clip

needs.need("parity")

import diffusers  # noqa: E402
import torch  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModel  # noqa: E402

from ppldm.config.network_files import CONFIG_DIR  # noqa: E402
from ppldm.families.ldm import StableDiffusion, StableDiffusionConfig  # noqa: E402
from ppldm.families.ldm_build import weights_of  # noqa: E402
from ppldm.networks.configs import read_json_config  # noqa: E402
from ppldm.weights.components import turn_linear  # noqa: E402
from ppldm.weights.write import write_weights  # noqa: E402

BAR = 1e-4
# Groups of a few values have hardly any variance to be divided by: PyTorch's own float32 is 1e-2 off its float64 then.
SMALL = {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 1, "cross_attention_dim": CLIP["hidden_size"],
         "sample_size": 16, "norm_num_groups": 8}  # fmt: skip
HEADS = {"unet_sd1": 4, "unet_sd2": [2, 4, 4, 4]}


@pytest.fixture(scope="module", params=["unet_sd1-epsilon", "unet_sd2-v_prediction"])
def pair(request, tmp_path_factory):
    """(diffusers' networks, the same in the family stable_diffusion), all trained but the VAE."""
    network, prediction_type = request.param.split("-")
    folder = tmp_path_factory.mktemp(network)
    torch.manual_seed(1)
    config = read_json_config(CONFIG_DIR / f"{network}.json", "") | SMALL | {"attention_head_dim": HEADS[network]}
    unet = diffusers.UNet2DConditionModel(**config)
    act = "quick_gelu" if network == "unet_sd1" else "gelu"
    write_clip(folder)
    text_encoder = CLIPTextModel(CLIPTextConfig(**CLIP | {"hidden_act": act}))
    vae = diffusers.AutoencoderKL(**VAE).eval()
    for name, part in (("unet", unet), ("text_encoder", text_encoder), ("vae", vae)):
        part.save_pretrained(folder / name)
    scheduler = diffusers.DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction_type,
        clip_sample=False,
    )  # fmt: skip
    scheduler.save_pretrained(folder / "scheduler")
    settings = StableDiffusionConfig(
        model_name_or_path=str(folder), train_text_encoder=True, prediction_type=prediction_type
    )
    model = StableDiffusion().build(settings, SimpleNamespace(resolution=128, buckets="off"), seed=0)
    return SimpleNamespace(vae=vae, unet=unet, text_encoder=text_encoder, scheduler=scheduler), model


def make_batch() -> dict:
    rng = np.random.default_rng(2)
    return {
        "pixel_values": rng.integers(0, 256, (3, 3, 128, 128), dtype=np.uint8),
        "input_ids": rng.integers(0, CLIP["vocab_size"], (3, 77)),
        "timesteps": np.array([3, 500, 998]),
        "noise": rng.standard_normal((3, 4, 16, 16), dtype=np.float32),
        "posterior_noise": rng.standard_normal((3, 4, 16, 16), dtype=np.float32),
    }


def loss_of_diffusers(theirs, batch: dict):
    """As diffusers' own training scripts have it, with the draws of the batch."""
    given = {name: torch.tensor(value) for name, value in batch.items()}
    with torch.no_grad():
        posterior = theirs.vae.encode(given["pixel_values"].float() / 127.5 - 1).latent_dist
        latents = (posterior.mean + posterior.std * given["posterior_noise"]) * theirs.vae.config.scaling_factor
    noisy = theirs.scheduler.add_noise(latents, given["noise"], given["timesteps"])
    hidden = theirs.text_encoder(given["input_ids"])[0]
    predicted = theirs.unet(noisy, given["timesteps"], hidden).sample
    target = given["noise"]
    if theirs.scheduler.config.prediction_type == "v_prediction":
        target = theirs.scheduler.get_velocity(latents, target, given["timesteps"])
    return torch.nn.functional.mse_loss(predicted.float(), target.float())


def test_loss_and_gradients(pair):
    theirs, model = pair
    batch = make_batch()
    expected = loss_of_diffusers(theirs, batch)
    expected.backward()
    model.train()
    loss = model(**{name: paddle.to_tensor(value) for name, value in batch.items()}).value
    loss.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=BAR)
    gradients = {name: parameter.grad.numpy() for name, parameter in model.trained_parameters().items()}
    known = {f"{part}.{name}": parameter.grad for part in ("text_encoder", "unet")
             for name, parameter in getattr(theirs, part).named_parameters()}  # fmt: skip
    assert gradients.keys() == known.keys()
    largest = max(float(value.abs().max()) for value in known.values())
    for name, gradient in turn_linear(gradients).items():
        assert np.abs(gradient - known[name].numpy()).max() <= BAR * largest, name
    for part in ("text_encoder", "unet"):
        assert max(np.abs(value).max() for name, value in gradients.items() if name.startswith(part)) > BAR * largest


@torch.no_grad()
@paddle.no_grad()
def test_an_export_is_a_pipeline_of_diffusers(pair, tmp_path):
    _, model = pair
    model.eval()
    write_weights(weights_of(model), "diffusers", tmp_path / "export")
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(str(tmp_path / "export"))
    assert pipeline.scheduler.config.prediction_type == model.process.prediction_type
    ids = pipeline.tokenizer(["red 12"], padding="max_length", max_length=77, return_tensors="np").input_ids
    assert (ids == model.tokenizer.encode(["red 12"])).all()
    hidden = model.encode_text(paddle.to_tensor(ids))
    expected = pipeline.text_encoder(torch.tensor(ids))[0]
    assert np.abs(hidden.numpy() - expected.numpy()).max() <= BAR
    latents = np.random.default_rng(3).standard_normal((1, 4, 16, 16), dtype=np.float32)
    ours = model.predict(paddle.to_tensor(latents), paddle.to_tensor([500]), paddle.to_tensor(ids))
    assert np.abs(ours.numpy() - pipeline.unet(torch.tensor(latents), 500, expected).sample.numpy()).max() <= BAR
    decoded = model.vae.decode(paddle.to_tensor(latents)).sample.numpy()
    assert np.abs(decoded - pipeline.vae.decode(torch.tensor(latents)).sample.numpy()).max() <= BAR
