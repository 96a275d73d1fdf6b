"""Guidance in an interval, CFG-Zero* and guidance by a worse model: their formulas, and where they change nothing."""

import numpy as np
import paddle
import pytest
from noise import initial_noise
from tiny_model import make_lively_model

from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.diffusion.drawing import SAMPLERS, Drawing
from ppldm.diffusion.guided import Beginning, draw, guided_passes, sample_latents
from ppldm.diffusion.process import Process
from ppldm.diffusion.samplers import make_sampler
from ppldm.methods.cfg_zero import scale_without

SHAPE = (4, 4, 4)
PROMPTS = ["picture 1", "picture 2"]
RUNS = [("epsilon", "ddim"), ("epsilon", "heun"), ("v_prediction", "dpm-solver++"), ("flow", "flow-euler")]


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(tiny.tokenizer, 12)


@pytest.fixture(scope="module")
def models(tiny, tokenizer):
    """By what they predict, a model and a worse one."""
    kinds = ("epsilon", "v_prediction", "flow")
    return {kind: [make_lively_model(tiny, tokenizer, kind, seed) for seed in (0, 1)] for kind in kinds}


class Drawn:
    """Latents of both prompts by a model, and the batch of each pass through its UNet."""

    def __init__(self, tokenizer, model, drawing, guide=None, **more):
        def told(one, texts):
            return one.condition(paddle.to_tensor(tokenizer.encode(texts)))

        noise = paddle.to_tensor(np.stack([initial_noise(1, prompt, 0, SHAPE) for prompt in PROMPTS]))
        guide = guide and (guide, told(guide, PROMPTS))
        self.passes, self.after = [], []
        hook = model.unet.register_forward_pre_hook(lambda _, inputs: self.passes.append(inputs[0].shape[0]))
        more |= {"guide": guide, "callback": lambda *one: self.after.append(one[2].numpy())}
        self.latents = sample_latents(model, told(model, PROMPTS), told(model, [""]), noise, drawing, **more).numpy()
        hook.remove()
        self.noise = noise.numpy()


def by_hand(tokenizer, model, drawing, predict) -> np.ndarray:
    """The sampler's steps along predictions of `predict(ask, number)`; ask: the network's of (model, texts)."""
    run = make_sampler(model.process, drawing, model.sampling)
    latents = paddle.to_tensor(np.stack([initial_noise(1, prompt, 0, SHAPE) for prompt in PROMPTS])) * run.initial_scale

    def ask(one, texts):
        with paddle.no_grad():
            condition = one.condition(paddle.to_tensor(tokenizer.encode(texts)))
            shown = run.scale_input(latents)
            timestep = paddle.to_tensor(np.array(run.timesteps[number]))
            return one.denoise(shown, timestep, **condition).numpy().astype(np.float64)

    for number in range(len(run.timesteps)):
        latents = run.step(paddle.to_tensor(predict(ask, number).astype(np.float32)), latents)
    return latents.numpy()


def test_the_optimised_scale_is_the_projection_of_each_picture():
    rng = np.random.default_rng(0)
    without, said = rng.standard_normal((2, 3, 4, 5, 6), dtype=np.float32)
    found = scale_without(paddle.to_tensor(without), paddle.to_tensor(said)).numpy()
    for one, u, v in zip(found, without.astype(np.float64), said.astype(np.float64), strict=True):
        np.testing.assert_allclose(one, (v * u).sum() / (u * u).sum() * u, rtol=1e-5, atol=1e-6)
        assert abs(((v - one) * u).sum()) < 1e-4  # what is left of v has nothing along u
    assert (scale_without(paddle.zeros([1, 4, 2, 2]), paddle.ones([1, 4, 2, 2])).numpy() == 0).all()


@pytest.mark.parametrize("low, high", [(0.0, 0.3), (0.2, 0.75), (0.5, 1.0)])
@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_passes_are_guided_where_sigma_is_within_the_papers_interval(sampler, strength, low, high):
    """sigma = s / a of each pass, by the timesteps that the network is told, in float64."""
    process = Process(prediction_type="flow" if sampler == "flow-euler" else "epsilon")
    drawing = Drawing(10, 3.0, sampler, strength=strength, guidance_interval=(low, high))
    run = make_sampler(process, drawing)
    told = np.array([float(one) for one in run.timesteps])
    if process.is_flow:
        levels = told / 1000 / np.maximum(1 - told / 1000, 1e-9)
    else:
        alpha_bar = process.schedule.alphas_cumprod().astype(np.float64)
        levels = np.interp(told, np.arange(1000), ((1 - alpha_bar) / alpha_bar) ** 0.5)
    ends = [share / max(1 - share, 1e-12) for share in (low, high)]
    expected = [bool(ends[0] < one <= ends[1]) for one in levels]
    assert guided_passes(drawing, run) == expected
    assert len(set(expected)) == 2 or strength < 1


@pytest.mark.parametrize("kind, sampler", RUNS)
def test_an_interval_of_all_noise_is_plain_guidance_and_an_empty_one_none(tokenizer, models, kind, sampler):
    model, plain = models[kind][0], Drawn(tokenizer, models[kind][0], Drawing(4, 5.0, sampler))
    whole = Drawn(tokenizer, model, Drawing(4, 5.0, sampler, guidance_interval=(0, 1)))
    assert (whole.latents == plain.latents).all() and whole.passes == plain.passes == [4] * len(plain.passes)
    alone = Drawn(tokenizer, model, Drawing(4, 1.0, sampler))
    for interval in ((0, 0), (0.5, 0.5), (1, 1)):
        empty = Drawn(tokenizer, model, Drawing(4, 5.0, sampler, guidance_interval=interval))
        assert (empty.latents == alone.latents).all() and empty.passes == alone.passes == [2] * len(plain.passes)
    assert np.abs(plain.latents - alone.latents).max() > 1e-3


@pytest.mark.parametrize("kind, sampler", RUNS)
def test_guidance_is_within_its_interval_and_nothing_is_computed_beside_it(tokenizer, models, kind, sampler):
    model = models[kind][0]
    drawing = Drawing(5, 5.0, sampler, guidance_interval=(0.3, 0.8))
    inside = guided_passes(drawing, make_sampler(model.process, drawing, model.sampling))
    assert set(inside) == {False, True}

    def predict(ask, number):
        said = ask(model, PROMPTS)
        if not inside[number]:
            return said
        without = ask(model, ["", ""])
        return without + 5.0 * (said - without)

    found = Drawn(tokenizer, model, drawing)
    assert found.passes == [4 if one else 2 for one in inside]
    np.testing.assert_allclose(found.latents, by_hand(tokenizer, model, drawing, predict), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, sampler", RUNS)
def test_a_guide_is_followed_by_its_formula(tokenizer, models, kind, sampler):
    good, bad = models[kind]
    for scale in (2.5, 0.5):
        drawing = Drawing(3, scale, sampler)

        def predict(ask, number, scale=scale):
            return ask(bad, PROMPTS) + scale * (ask(good, PROMPTS) - ask(bad, PROMPTS))

        found = Drawn(tokenizer, good, drawing, bad)
        assert set(found.passes) == {2}
        np.testing.assert_allclose(found.latents, by_hand(tokenizer, good, drawing, predict), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, sampler", RUNS)
def test_a_guide_changes_nothing_where_it_says_nothing_else(tokenizer, models, kind, sampler):
    """At scale 1 it is not asked; a model is no guide to itself; at scale 0 there is the guide alone."""
    good, bad = models[kind]
    alone = Drawn(tokenizer, good, Drawing(3, 1.0, sampler))
    asked = Drawn(tokenizer, good, Drawing(3, 1.0, sampler), bad)
    assert (asked.latents == alone.latents).all() and asked.passes == alone.passes
    itself = Drawn(tokenizer, good, Drawing(3, 4.0, sampler), good)
    assert (itself.latents == alone.latents).all() and len(itself.passes) == 2 * len(alone.passes)
    guide = Drawn(tokenizer, bad, Drawing(3, 1.0, sampler))
    assert (Drawn(tokenizer, good, Drawing(3, 0.0, sampler), bad).latents == guide.latents).all()
    outside = Drawn(tokenizer, good, Drawing(3, 4.0, sampler, guidance_interval=(0, 0)), bad)
    assert (outside.latents == alone.latents).all()
    assert np.abs(Drawn(tokenizer, good, Drawing(3, 4.0, sampler), bad).latents - alone.latents).max() > 1e-3


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_cfg_zero_leaves_the_first_step_out_and_scales_in_the_others(tokenizer, models, share):
    model, drawing = models["flow"][0], Drawing(4, 5.0, "flow-euler", share, cfg_zero=True)

    def predict(ask, number):
        said, without = ask(model, PROMPTS), ask(model, ["", ""])
        if number == 0:
            return 0.0 * said
        rest = {"axis": (1, 2, 3), "keepdims": True}
        without = (said * without).sum(**rest) / (without * without).sum(**rest) * without
        guided = without + 5.0 * (said - without)
        return share * guided * said.std(**rest) / guided.std(**rest) + (1 - share) * guided

    found = Drawn(tokenizer, model, drawing)
    assert found.passes == [4, 4, 4] and len(found.after) == 4 and (found.after[0] == found.noise).all()
    np.testing.assert_allclose(found.latents, by_hand(tokenizer, model, drawing, predict), atol=2e-4, rtol=1e-4)


def test_cfg_zero_is_a_kind_of_guidance(tokenizer, models):
    """Where there is none, also by an interval, it changes nothing; over a picture the first step is not left out."""
    model = models["flow"][0]
    alone = Drawn(tokenizer, model, Drawing(4, 1.0, "flow-euler"))
    for drawing in (
        Drawing(4, 1.0, "flow-euler", cfg_zero=True),
        Drawing(4, 5.0, "flow-euler", cfg_zero=True, guidance_interval=(0, 0)),
    ):
        assert (Drawn(tokenizer, model, drawing).latents == alone.latents).all()
    limited = Drawn(tokenizer, model, Drawing(4, 5.0, "flow-euler", cfg_zero=True, guidance_interval=(0, 0.7)))
    assert limited.passes[0] == 2 and len(limited.passes) == 4
    over = Beginning(paddle.zeros([2, *SHAPE]))
    drawing = Drawing(4, 5.0, "flow-euler", cfg_zero=True, strength=0.5)
    assert Drawn(tokenizer, model, drawing, beginning=over).passes == [4, 4]


@pytest.mark.parametrize("more", [{"guidance_interval": (0.2, 0.7)}, {"cfg_zero": True}, {}])
def test_batches_do_not_change_pictures(tokenizer, models, more):
    good, bad = models["flow"]
    prompts, indices = ["picture 1", "picture 2", "picture 1"], [0, 0, 1]
    guide = None if more else (bad, lambda texts: bad.condition(paddle.to_tensor(tokenizer.encode(texts))))

    def drawn(*places):
        told = [prompts[place] for place in places], [indices[place] for place in places]
        return draw(good, tokenizer, *told, SHAPE, 9, Drawing(3, 4.0, **more), guide=guide).astype(int)

    together = drawn(0, 1, 2)
    assert np.abs(np.concatenate([drawn(0), drawn(1), drawn(2)]) - together).max() <= 1
    assert np.abs(together[0] - together[2]).max() > 1
