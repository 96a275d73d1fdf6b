"""Sampling is a function of (weights, prompt, seed, index)."""

import numpy as np
import paddle
import pytest
from noise import initial_noise
from tiny_model import load_pipeline, make_lively_model

from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.diffusion.drawing import Drawing
from ppldm.diffusion.guided import draw, sample_latents, to_pictures
from ppldm.families.ldm_build import weights_of
from ppldm.weights.write import write_weights

SHAPE = (4, 4, 4)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(tiny.tokenizer, 12)


@pytest.fixture(scope="module", params=["epsilon", "v_prediction"])
def model(request, tiny, tokenizer):
    return make_lively_model(tiny, tokenizer, request.param)


def test_noise_depends_on_seed_prompt_and_index_alone():
    base = initial_noise(1, "a", 0, SHAPE)
    assert base.dtype == np.float32 and base.shape == SHAPE
    assert (initial_noise(1, "a", 0, SHAPE) == base).all()
    for other in (initial_noise(2, "a", 0, SHAPE), initial_noise(1, "b", 0, SHAPE), initial_noise(1, "a", 1, SHAPE)):
        assert (other != base).any()


@pytest.mark.parametrize("guidance_scale", [0.5, 1.0, 4.0])
def test_batches_do_not_change_pictures(model, tokenizer, guidance_scale):
    prompts, indices = ["picture 1", "picture 2", "picture 1"], [0, 0, 1]

    def drawn(sizes):
        pieces, start = [], 0
        for size in sizes:
            pieces.append(draw(model, tokenizer, prompts[start : start + size], indices[start : start + size], SHAPE, 9,
                               Drawing(3, guidance_scale)))  # fmt: skip
            start += size
        return np.concatenate(pieces).astype(int)

    together = drawn([3])
    assert together.shape == (3, 32, 32, 3)
    assert np.abs(drawn([1, 1, 1]) - together).max() <= 1
    assert np.abs(drawn([2, 1]) - together).max() <= 1
    assert np.abs(together[0] - together[2]).max() > 1


def test_guidance_follows_its_formula(model, tokenizer):
    said, empty = (model.condition(paddle.to_tensor(tokenizer.encode([text]))) for text in ("picture 3", ""))
    noise = paddle.to_tensor(initial_noise(1, "picture 3", 0, SHAPE)[None])
    conditional = sample_latents(model, said, None, noise, Drawing(1, 1.0)).numpy()
    unconditional = sample_latents(model, empty, None, noise, Drawing(1, 1.0)).numpy()
    assert np.abs(conditional - unconditional).max() > 1e-3
    # One DDIM step is affine in the prediction, so guidance extrapolates its result.
    for scale in (0.0, 0.5, 5.0):
        guided = sample_latents(model, said, empty, noise, Drawing(1, scale)).numpy()
        np.testing.assert_allclose(guided, unconditional + scale * (conditional - unconditional), atol=2e-4)


@pytest.mark.parametrize("sampling", [{}, {"timestep_spacing": "trailing"}, {"steps_offset": 0, "clip_sample": True}])
def test_plain_ppdiffusers_pipeline_draws_the_same(model, tokenizer, tmp_path, sampling, monkeypatch):
    from ppdiffusers import LDMTextToImagePipeline

    monkeypatch.setattr(model, "sampling", sampling)
    metadata = {"prediction_type": model.process.prediction_type, "resolution": 32, "model_max_length": 12}
    weights = weights_of(model)
    weights.tokenizer, weights.metadata = tokenizer, metadata
    write_weights(weights, "ppdiffusers", tmp_path / "pipeline")
    pipeline = LDMTextToImagePipeline.from_pretrained(str(tmp_path / "pipeline"))
    noise = initial_noise(9, "picture 1", 0, SHAPE)
    theirs = pipeline(
        ["picture 1"],
        height=32,
        width=32,
        num_inference_steps=3,
        guidance_scale=4.0,
        latents=paddle.to_tensor(noise[None]),
    ).images[0]
    loaded = load_pipeline(tmp_path / "pipeline")
    assert loaded.sampling.items() >= sampling.items()
    ours = draw(loaded, tokenizer, ["picture 1"], [0], SHAPE, 9, Drawing(3, 4.0))[0]
    assert np.abs(np.asarray(theirs).astype(int) - ours).mean() < 1
    assert sorted(p.name for p in (tmp_path / "pipeline").iterdir()) == [
        *(
            "README.md",
            "bert",
            "model.json",
            "model_index.json",
            "ppldm.json",
            "scheduler",
            "tokenizer",
            "unet",
            "vqvae",
        )
    ]


def test_pixels_are_rounded_not_cut():
    pixels = paddle.to_tensor(np.linspace(-1.2, 1.2, 12, dtype=np.float32).reshape(1, 3, 2, 2))
    pictures = to_pictures(pixels)
    assert pictures.dtype == np.uint8 and pictures.min() == 0 and pictures.max() == 255
    assert to_pictures(paddle.to_tensor(np.full((1, 3, 1, 1), 0.9999, dtype=np.float32))).max() == 255
