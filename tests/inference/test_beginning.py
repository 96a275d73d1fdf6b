"""Drawing over a picture, as a whole or where a mask is light: as diffusers' pipelines do from equal noise."""

import needs
import numpy as np
import paddle
import pytest
from noise import initial_noise
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.beginning import read_image, read_mask
from ppldm.inference.serving.paint import Painter
from ppldm.inference.serving.parameters import make_parameters, read_request
from ppldm.utils.errors import ConfigError
from ppldm.weights.write import write_weights

SIDE = 64
RNG = np.random.default_rng(5)
PICTURE = RNG.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
MASK = np.zeros((SIDE, SIDE), np.uint8)
MASK[:, 24:] = 255
ROUND = np.where(np.hypot(*(np.mgrid[:SIDE, :SIDE] - 30)) < 20.5, 255, 0).astype(np.uint8)  # within cells of latents
PROMPT = "a red heart"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain model, and one that is made for inpainting."""
    folder = tmp_path_factory.mktemp("models")
    for name, unet in (("plain", {}), ("inpainting", {"in_channels": 9, "out_channels": 4})):
        weights = small_weights(4, unet)
        weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart", "two blue boats"]), 77)
        write_weights(weights, "diffusers", folder / name)
    return folder


@pytest.fixture(scope="module")
def models(folders):
    return {name: ppldm.load(folders / name) for name in ("plain", "inpainting")}


@pytest.fixture(scope="module")
def model(models):
    return models["plain"]


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


@pytest.mark.parametrize("kind", ["plain", "inpainting"])
@pytest.mark.parametrize("sampler, name, settings", CASES)
def test_as_diffusers_pipelines_from_equal_noise(models, folders, kind, sampler, name, settings, monkeypatch):
    needs.need("parity")
    import diffusers
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    model, folder = models[kind], folders / kind
    # Both begin from the mean of the picture's posterior.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mean)
    noise = torch.tensor(initial_noise(3, PROMPT, 0, (4, 8, 8))[None])
    for name_of_file in ("stable_diffusion_img2img", "stable_diffusion_inpaint"):
        where = f"diffusers.pipelines.stable_diffusion.pipeline_{name_of_file}.randn_tensor"
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
    whole = ((None, 0.35), (None, 0.8)) if kind == "plain" else ((ROUND, 0.35), (ROUND, 1.0))
    for mask, strength in (*whole, (MASK, 0.6), (MASK, 1.0)):
        few = {"strength": strength, "num_inference_steps": 5, "guidance_scale": 3.0}
        pipeline = "StableDiffusionImg2ImgPipeline" if mask is None else "StableDiffusionInpaintPipeline"
        pipeline = getattr(diffusers, pipeline)(**parts, **dict.fromkeys(others), requires_safety_checker=False)
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
        ({"dreams": 3}, "generate has no setting dreams; known: prompt, negative_prompt"),
        ({"num_inference_step": 3}, "generate has no setting num_inference_step; did you mean num_inference_steps?"),
        ({"negative_prompts": "x"}, "generate has no setting negative_prompts; did you mean negative_prompt?"),
        ({"seeds": [1]}, "generate has no setting seeds; did you mean seed?"),
        ({"num_images_per_prompt": 2}, "generate has no setting num_images_per_prompt; did you mean num_samples?"),
        ({"mask_image": MASK}, "generate has no setting mask_image; did you mean mask?"),
        ({"prompt_syntax": "heavy"}, "--prompt-syntax heavy is not one of plain, weighted"),
        ({"wildcards": tmp_path / "none"}, "--wildcards .*none: there is no such folder"),
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


def test_a_model_for_inpainting_sees_the_mask(models):
    """What is masked of the picture changes nothing, the rest does; without picture or mask nothing is drawn."""
    model, few = models["inpainting"], {"num_inference_steps": 2, "guidance_scale": 3.0, "output": "latents"}
    latents = model.generate(PROMPT, image=PICTURE, mask=ROUND, **few)[0, 0]
    inside, outside = (np.where((ROUND > 0)[..., None] == there, 255 - PICTURE, PICTURE) for there in (True, False))
    assert (model.generate(PROMPT, image=inside, mask=ROUND, **few)[0, 0] == latents).all()
    assert np.abs(model.generate(PROMPT, image=outside, mask=ROUND, **few)[0, 0] - latents).max() > 0.01
    assert np.abs(model.generate(PROMPT, image=PICTURE, mask=MASK, **few)[0, 0] - latents).max() > 0.01
    alone = model.generate(PROMPT, image=PICTURE, mask=ROUND, num_samples=2, batch_size=2, **few)[0, 0]
    assert np.abs(alone - latents).max() < 1e-4
    for settings in ({}, {"image": PICTURE}, {"image": PICTURE, "strength": 0.5}):
        with pytest.raises(ConfigError, match="this model is made for inpainting.*; give --image and --mask"):
            model.generate(PROMPT, num_inference_steps=2, **settings)


def test_a_model_for_inpainting_on_the_command_line_and_the_page(models, folders, tmp_path, capfd):
    Image.fromarray(PICTURE).save(tmp_path / "p.png")
    Image.fromarray(ROUND).save(tmp_path / "m.png")
    call = ["generate", "--model", str(folders / "inpainting"), "--prompt", PROMPT, "--num-samples", "1", "--seed", "5",
            "--num-inference-steps", "2", "--out", str(tmp_path / "out")]  # fmt: skip
    over = ["--image", str(tmp_path / "p.png"), "--mask", str(tmp_path / "m.png"), "--strength", "0.5"]
    run([*call, *over])
    drawn = np.asarray(Image.open(tmp_path / "out" / "000-00.png"))
    few = {"num_inference_steps": 2, "seed": 5, "strength": 0.5}
    assert (models["inpainting"].generate(PROMPT, image=PICTURE, mask=ROUND, **few)[0, 0] == drawn).all()
    with pytest.raises(SystemExit):
        run(call)
    (line,) = [one for one in capfd.readouterr().err.splitlines() if one.startswith("error: ")]
    assert line.startswith("error: this model is made for inpainting") and line.endswith("give --image and --mask")
    asked = read_request({"prompt": PROMPT}, make_parameters(("m",)))
    with pytest.raises(ConfigError, match="^this model is made for inpainting.*; give image and mask$"):
        Painter({"m": models["inpainting"]}).prepare(asked)
