"""Drawing over a picture, as a whole or where a mask is light: as diffusers' pipelines do from equal noise."""

import needs
import numpy as np
import paddle
import pytest
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.diffusion.guided import initial_noise
from ppldm.inference.beginning import read_image, read_mask
from ppldm.utils.errors import ConfigError
from ppldm.weights.write import write_weights

SIDE = 64
RNG = np.random.default_rng(5)
PICTURE = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[:, 24:] = 255
PROMPT = "a red heart"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart", "two blue boats"]), 77)
    folder = tmp_path_factory.mktemp("model")
    write_weights(weights, "diffusers", folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return ppldm.load(folder)


def test_strength_is_how_much_of_the_picture_is_lost(model):
    def drawn(**settings):
        return model.generate(PROMPT, image=PICTURE, num_inference_steps=10, output="latents", **settings)[0, 0]

    there = model.encode(PICTURE[None])[0]
    gaps = [np.abs(drawn(strength=strength) - there).mean() for strength in (0.1, 0.4, 0.8)]
    assert gaps == sorted(gaps) and gaps[0] < gaps[-1] / 2
    assert (drawn() == drawn(strength=0.8)).all()
    seen = []
    drawn(strength=0.5, callback=lambda step, count, latents: seen.append((step, count, list(latents.shape))))
    assert seen == [(step, 5, [1, 4, 8, 8]) for step in range(1, 6)]


def test_what_is_not_masked_is_kept_to_the_bit(model):
    there = model.encode(PICTURE[None])[0]
    for settings in ({}, {"sampler": "heun"}, {"sampler": "euler-a", "strength": 0.5}, {"sampler": "unipc"}):
        few = {"num_inference_steps": 4, "output": "latents", "num_samples": 2}
        latents = model.generate(PROMPT, image=PICTURE, mask=MASK, **few, **settings)[0]
        assert (latents[..., :3] == there[..., :3]).all()
        assert np.abs(latents[..., 3:] - there[..., 3:]).min(axis=(1, 2, 3)).max() > 0
        assert np.abs(latents[0] - latents[1]).max() > 0.1


CASES = [
    ("ddim", "DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    ("euler", "EulerDiscreteScheduler", {}),
    ("heun", "HeunDiscreteScheduler", {}),
    ("dpm-solver++", "DPMSolverMultistepScheduler", {}),
    ("unipc", "UniPCMultistepScheduler", {}),
    ("pndm", "PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}),
]


@pytest.mark.parametrize("sampler, name, settings", CASES)
def test_as_diffusers_pipelines_from_equal_noise(model, folder, sampler, name, settings, monkeypatch):
    needs.need("parity")
    import diffusers
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    # Both begin from the mean of the picture's posterior.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mean)
    noise = torch.tensor(initial_noise(3, PROMPT, 0, (4, 8, 8))[None])
    for kind in ("stable_diffusion_img2img", "stable_diffusion_inpaint"):
        where = f"diffusers.pipelines.stable_diffusion.pipeline_{kind}.randn_tensor"
        monkeypatch.setattr(where, lambda *_, **__: noise)
    said, unsaid = (
        torch.tensor(model.model.condition(paddle.to_tensor(model.tokenizer.encode([text])))["encoder_hidden_states"]
                     .numpy())
        for text in (PROMPT, "")
    )  # fmt: skip
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    parts = {
        "vae": diffusers.AutoencoderKL.from_pretrained(folder / "vqvae"),
        "unet": diffusers.UNet2DConditionModel.from_pretrained(folder / "unet"),
        "scheduler": getattr(diffusers, name)(**schedule, **settings),
    }
    others = ("text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    for mask, strength in ((None, 0.35), (None, 0.8), (MASK, 0.6), (MASK, 1.0)):
        few = {"strength": strength, "num_inference_steps": 5, "guidance_scale": 3.0}
        kind = "StableDiffusionImg2ImgPipeline" if mask is None else "StableDiffusionInpaintPipeline"
        pipeline = getattr(diffusers, kind)(**parts, **dict.fromkeys(others), requires_safety_checker=False)
        pipeline.set_progress_bar_config(disable=True)
        more = {} if mask is None else {"mask_image": Image.fromarray(mask), "height": SIDE, "width": SIDE}
        theirs = pipeline(
            prompt_embeds=said, negative_prompt_embeds=unsaid, image=Image.fromarray(PICTURE), **few, **more
        ).images[0]
        ours = model.generate(PROMPT, seed=3, sampler=sampler, image=PICTURE, mask=mask, **few)[0, 0]
        assert np.abs(np.asarray(theirs).astype(int) - ours).max() <= 2, (mask is None, strength)


def test_pictures_come_as_files_arrays_and_pil(tmp_path):
    Image.fromarray(PICTURE).save(tmp_path / "p.png")
    Image.fromarray(MASK).save(tmp_path / "m.png")
    for image in (tmp_path / "p.png", Image.fromarray(PICTURE), PICTURE):
        assert (read_image(image, (SIDE, SIDE)) == np.moveaxis(PICTURE, -1, 0)).all()
    for mask in (tmp_path / "m.png", Image.fromarray(MASK), MASK, MASK > 0):
        assert (read_mask(mask, (SIDE, SIDE)) == (MASK > 0)).all()
    assert read_image(PICTURE, (32, 48)).shape == (3, 32, 48)


def test_words_for_what_cannot_be_drawn_over(model, tmp_path):
    (tmp_path / "x.png").write_bytes(b"no picture")
    for settings, message in (
        ({"mask": MASK}, "--mask says what of a picture is drawn anew; give the picture too"),
        ({"strength": 0.5}, "--strength 0.5 is for a picture that is drawn over; give --image too"),
        ({"image": tmp_path / "x.png"}, "--image .*x.png cannot be read as a picture"),
        ({"image": tmp_path / "none.png"}, "--image .*none.png cannot be read as a picture"),
        ({"image": np.zeros((4, 4, 3))}, r"--image is \[4, 4, 3\] of float64; \[H, W, 3\] of uint8 is due"),
        ({"image": PICTURE, "mask": MASK * 0}, "--mask is dark everywhere"),
        ({"image": PICTURE, "strength": 0}, "--strength 0 of 2 steps leaves none"),
        ({"image": PICTURE, "strength": 0.4}, "--strength 0.4 of 2 steps leaves none"),
        ({"image": PICTURE, "strength": 1.5}, "--strength 1.5 must be from 0 to 1"),
        ({"dreams": 3}, "generate has no setting dreams; known of drawing: num_inference_steps"),
        ({"output": "jpeg"}, "output 'jpeg' is not one of numpy, pil, latents"),
        ({"seed": [1, 2], "num_samples": 3}, "2 seeds for 3 pictures of a prompt"),
        ({"latents": np.zeros((4, 8, 9))}, r"latents are \[4, 8, 9\] of float64; \[1, 1, 4, 8, 8\] or \[4, 8, 8\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            model.generate("x", num_inference_steps=2, **settings)


def test_what_generate_takes_and_gives(model):
    few = {"num_inference_steps": 2, "guidance_scale": 3.0}
    pictures = model.generate(PROMPT, seed=[7, 8], **few)
    for number, seed in enumerate((7, 8)):
        assert np.abs(pictures[0, number].astype(int) - model.generate(PROMPT, seed=seed, **few)[0, 0]).max() <= 1
    ((one, other),) = model.generate(PROMPT, seed=[7, 8], output="pil", **few)
    assert (np.asarray(one) == pictures[0, 0]).all() and (np.asarray(other) == pictures[0, 1]).all()
    latents = model.generate(PROMPT, seed=[7, 8], output="latents", **few)
    assert latents.shape == (1, 2, 4, 8, 8) and latents.dtype == np.float32
    assert (model.decode(latents[0]) == pictures[0]).all()
    noise = initial_noise(7, PROMPT, 0, (4, 8, 8))
    assert (model.generate(PROMPT, latents=noise, seed=9, **few)[0, 0] == model.generate(PROMPT, seed=7, **few)).all()
    assert model.generate(PROMPT, size=(48, 32), **few).shape == (1, 1, 32, 48, 3)
    assert model.generate([], output="latents", **few).shape == (0, 1, 4, 8, 8)
