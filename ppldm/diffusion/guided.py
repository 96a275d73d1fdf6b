"""Guided sampling: a function of (weights, tokens, noise), with no random state of its own."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import paddle

from ..utils.errors import ConfigError, ModelError
from ..utils.rng import Stream, make_rng, pyramid
from .drawing import Drawing
from .process import add_noise
from .samplers import make_sampler

Callback = Callable[[int, int, paddle.Tensor], None]
NEEDS_MASK = "this model is made for inpainting: it draws what is masked of a picture; give --image and --mask"
_SHOWN = 60  # letters of a prompt in a message


def noises(
    seed: int,
    prompt: str,
    index: int,
    shape: tuple[int, int, int],
    stream: Stream = Stream.SAMPLE,
    coarse: bool = False,
) -> Iterator[np.ndarray]:
    """The noises [C, h, w] float32 of picture `index` of `prompt`, which enters by its CRC-32: the one it starts from,
    then one for each step; whatever batch, guidance scale or process. coarse: of the kind of `pyramid`."""
    rng = make_rng(seed, stream, epoch=zlib.crc32(prompt.encode()), row=index)
    while True:
        normals = rng.standard_normal(shape, dtype=np.float32)
        yield pyramid(normals, rng) if coarse else normals


@dataclass(frozen=True)
class Beginning:
    """A picture that is drawn over, as `Drawing.strength` says: its latents [B, C, h, w] float32, scaled; known [B, 1,
    h, w] bool: what of it is kept; None: nothing. seen [B, 1 + C, h, w] float32: what a model that `takes_mask` sees of
    it beside noisy latents: 1 where it is drawn anew, and the latents of the picture with grey in that place. Of other
    models what is kept is put back after each step with the noise that is due there (Lugmayr et al. 2022,
    arXiv:2201.09865, without resampling; diffusers' inpainting with such models)."""

    latents: paddle.Tensor
    known: paddle.Tensor | None = None
    seen: paddle.Tensor | None = None


@paddle.no_grad()
def sample_latents(
    model,
    condition: dict,
    without: dict | None,
    noise,
    drawing: Drawing,
    callback: Callback | None = None,
    next_noise: Callable | None = None,
    control: dict | None = None,
    beginning: Beginning | None = None,
    guide: tuple | None = None,
):
    """Latents [B, C, h, w] float32 from `noise`, of the same shape, standard normal.

    `condition`: what the model makes of the prompts, `model.condition(input_ids)`; `without`: the same of the empty
    caption, or of what the pictures should not show, of one or of B, for guidance (Ho and Salimans 2022,
    arXiv:2207.12598): uncond + guidance_scale (cond - uncond); 1 costs a single pass. `callback`: after each pass
    through the network, with its number from 1, how many there are, and the latents so far. `next_noise()` gives the
    noise of each step to a stochastic sampler. `control`: what leads a model that takes it (`networks.denoising`,
    `lead`). `beginning`: what is drawn over; the same `noise` is added to it. `guide`: instead of `without` a
    model, and what it makes of the prompts (`methods.autoguidance`). Raises ConfigError."""
    seen = beginning and beginning.seen
    if model.takes_mask and seen is None:
        raise ConfigError(NEEDS_MASK)
    run = make_sampler(model.process, drawing, model.sampling)
    predict = _predictor(model, condition, without, noise, drawing, guided_passes(drawing, run), control or {}, guide)
    known = beginning and beginning.known
    latents = noise * run.initial_scale
    if beginning and (known is None or drawing.strength < 1):
        latents = add_noise(beginning.latents, noise, run.scales_at(0))
    for number, timestep in enumerate(run.timesteps, 1):
        timestep = timestep if paddle.is_tensor(timestep) else paddle.to_tensor(timestep)
        shown = run.scale_input(latents)
        shown = shown if seen is None else paddle.concat([shown, seen], axis=1)
        predicted = predict(shown, timestep, number - 1)
        latents = run.step(predicted, latents, next_noise() if run.is_stochastic else None)
        if beginning and known is not None and seen is None:
            there = beginning.latents
            if number < len(run.timesteps):
                there = add_noise(there, noise, run.scales_at(number))
            latents = paddle.where(known, there, latents)
        if callback:
            callback(number, len(run.timesteps), latents)
    return latents


def guided_passes(drawing: Drawing, run) -> list[bool]:
    """Whether each pass of a sampler's run is guided."""
    interval, passes = drawing.guidance_interval, range(len(run.timesteps))
    if drawing.guidance_scale == 1.0 or interval is None:
        return [drawing.guidance_scale != 1.0 for _ in passes]
    from ..methods.guidance_interval import is_within

    return [is_within(run.scales_at(number), interval) for number in passes]


def _predictor(
    model, condition, without, noise, drawing: Drawing, guided: list[bool], control: dict, guide
) -> Callable:
    """A function of what the network is shown, [B, K, h, w], the timestep and the pass, from 0, that gives the
    prediction [B, C, h, w] float32; the other arguments as of `sample_latents`, and `guided_passes`."""
    zero_steps, alone = 0, condition | model.drawn_sizes(noise) | control
    if any(guided) and guide is None:
        # Both branches are told the same sizes: what guidance strengthens is the caption.
        both = _beside(without, condition) | model.drawn_sizes(paddle.concat([noise] * 2))
        both |= {
            name: paddle.concat([model.without_lead(value), value]) if paddle.is_tensor(value) else value
            for name, value in control.items()
        }
    if drawing.cfg_zero:
        from ..methods.cfg_zero import ZERO_STEPS

        zero_steps = ZERO_STEPS - drawing.skipped_steps()

    def ask(asked, shown, timestep, told: dict):
        output = asked.denoise(shown.astype(asked.denoiser.dtype), timestep, **told).astype("float32")
        return asked.process.prediction(output, shown, timestep / asked.process.num_levels)

    def predict(shown, timestep, number: int):
        if not guided[number]:
            return ask(model, shown, timestep, alone)
        if number < zero_steps:
            return paddle.zeros_like(noise)
        if guide is None:
            unsaid, said = ask(model, paddle.concat([shown] * 2), timestep, both).chunk(2)
        else:
            other, told = guide
            unsaid = ask(other, shown, timestep, told | other.drawn_sizes(noise) | control)
            said = ask(model, shown, timestep, alone)
        return _guide(unsaid, said, drawing)

    return predict


def _guide(without, with_prompt, drawing: Drawing):
    """The prediction [B, C, h, w] of guidance from those of both branches; with a part of it, `guidance_rescale`, of
    the deviation that the prompt's own has."""
    if drawing.cfg_zero:
        from ..methods.cfg_zero import scale_without

        without = scale_without(without, with_prompt)
    guided = without + drawing.guidance_scale * (with_prompt - without)
    if not drawing.guidance_rescale:
        return guided
    rest = [1, 2, 3]
    alike = guided * (with_prompt.std(rest, keepdim=True) / guided.std(rest, keepdim=True))
    return drawing.guidance_rescale * alike + (1.0 - drawing.guidance_rescale) * guided


def _beside(without: dict, condition: dict) -> dict:
    """Both conditions of guidance in one batch, [2 B, …]; one that is the same for all pictures is repeated."""
    both = {}
    for name, values in condition.items():
        other = without[name]
        if values is not None and other.shape[0] != values.shape[0]:
            other = other.expand([values.shape[0], *[-1] * (other.ndim - 1)])
        both[name] = None if values is None else paddle.concat([other, values])
    return both


def to_pictures(pixels) -> np.ndarray:
    """[B, 3, H, W] float in -1 .. 1 to [B, H, W, 3] uint8."""
    values = pixels.astype("float32").transpose([0, 2, 3, 1]).numpy()
    return np.clip(np.rint((values + 1.0) * 127.5), 0, 255).astype(np.uint8)


@paddle.no_grad()
def draw(model, tokenizer, prompts: list[str], *args, check: bool = True, **settings) -> np.ndarray:
    """Pictures [B, H, W, 3] uint8 of the arguments of `draw_latents`. The model must be in eval mode. `check`: raise
    ModelError where the sampler ends in values that are not finite; else those pictures are black."""
    return decode(model, draw_latents(model, tokenizer, prompts, *args, check=check, **settings), prompts, check)


@paddle.no_grad()
def decode(model, latents, prompts: list[str], check: bool = True) -> np.ndarray:
    """Latents [B, C, h, w] of as many prompts to pictures [B, H, W, 3] uint8. check: as of `draw`."""
    pixels = model.decode(latents)
    if check:
        _require_finite(pixels, prompts, "decoding")
    pixels = paddle.where(paddle.isfinite(pixels), pixels, paddle.full_like(pixels, -1.0))
    return to_pictures(pixels)


@paddle.no_grad()
def draw_latents(
    model,
    tokenizer,
    prompts: list[str],
    indices: list[int],
    shape: tuple[int, int, int],
    seed: int | list[int],
    drawing: Drawing,
    *,
    negative_prompts: list[str] | None = None,
    encode: Callable[[list[str]], dict] | None = None,
    named_by: list[str] | None = None,
    callback: Callback | None = None,
    check: bool = True,
    control: dict | None = None,
    beginning: Beginning | None = None,
    noise: np.ndarray | None = None,
    stream: Stream = Stream.SAMPLE,
    guide: tuple | None = None,
):
    """Latents [B, C, h, w] float32: one for each pair of `prompts` and `indices`, of `shape` (C, h, w).

    `seed`: one for all, or one for each. `negative_prompts`: what each should not show, "" by default. `encode`: what
    the network takes of texts, where that is not `model.condition` of what the tokenizer makes of them. `check`: raise
    ModelError for latents that are not finite. `noise`: to start from instead of the first of `noises`. `named_by`:
    texts that the noise is drawn by, instead of the prompts. `guide`: a model, and its own `encode`. Further:
    `sample_latents`."""
    seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
    keys = zip(seeds, named_by or prompts, indices, strict=True)
    streams = [noises(*key, shape, stream, model.coarse_noise) for key in keys]
    drawing = drawing.fit(model.process, model.usual)

    def next_noise():
        return paddle.to_tensor(np.stack([next(stream) for stream in streams]))

    def condition(texts: list[str]) -> dict:
        return encode(texts) if encode else model.condition(paddle.to_tensor(tokenizer.encode(texts)))

    guided = drawing.guidance_scale != 1.0
    without = condition(negative_prompts or [""]) if guided and guide is None else None
    guide = (guide[0], guide[1](prompts)) if guided and guide else None
    first = next_noise()
    first = first if noise is None else paddle.to_tensor(noise)
    latents = sample_latents(model, condition(prompts), without, first, drawing, callback, next_noise, control,
                             beginning, guide)  # fmt: skip
    if check:
        _require_finite(latents, prompts, str(drawing))
    return latents


def _require_finite(values, prompts: list[str], how: str) -> None:
    """Raises ModelError where a picture's values are not all finite; rounded, they would be black."""
    finite = paddle.isfinite(values.astype("float32")).reshape([len(prompts), -1]).all(axis=1).numpy()
    if not finite.all():
        prompt = prompts[int(np.argmin(finite))]
        raise ModelError(
            f"{how} ended in values that are not finite for the prompt {prompt[:_SHOWN]!r}; "
            "lower the guidance scale, change the sampler or its steps, or check the weights"
        )
