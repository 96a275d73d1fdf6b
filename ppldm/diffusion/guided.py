"""Guided sampling: a function of (weights, tokens, noise), with no random state of its own."""

import zlib
from collections.abc import Callable, Iterator

import numpy as np
import paddle

from ..utils.errors import ModelError
from ..utils.rng import Stream, make_rng
from .samplers import Sampler, choose_sampler

_SHOWN = 60  # letters of a prompt in a message


def noises(
    seed: int, prompt: str, index: int, shape: tuple[int, int, int], stream: Stream = Stream.SAMPLE
) -> Iterator[np.ndarray]:
    """The noises [C, h, w] float32 of picture `index` of `prompt`: the one it starts from, then one for each step.

    A function of (seed, prompt, index) alone: not of batch, guidance scale or process. The prompt enters by its CRC-32.
    """
    rng = make_rng(seed, stream, epoch=zlib.crc32(prompt.encode()), row=index)
    while True:
        yield rng.standard_normal(shape, dtype=np.float32)


def initial_noise(seed: int, prompt: str, index: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The noise [C, h, w] float32 that picture `index` of `prompt` starts from: the first of `noises`."""
    return next(noises(seed, prompt, index, shape))


@paddle.no_grad()
def sample_latents(
    model,
    input_ids,
    empty_ids,
    noise,
    guidance_scale: float,
    num_inference_steps: int,
    on_step: Callable | None = None,
    sampler: str | None = None,
    next_noise: Callable | None = None,
    control: dict | None = None,
):
    """Latents [B, C, h, w] from `noise`; by deterministic DDIM (eta 0), of flow by Euler's method, unless
    `sampler` names another.

    `input_ids` [B, L] int64 are the prompts' tokens, `empty_ids` [1, L] or [B, L] those of the empty caption, or of
    what the pictures should not show. Guidance is that of Ho and Salimans 2022 (arXiv:2207.12598): uncond +
    guidance_scale (cond - uncond); 1 costs a single pass. `next_noise()` gives the noise [B, C, h, w] of each step to a
    stochastic sampler. `control`: what leads a model that takes it (`networks.denoising`, `lead`).
    """
    run = Sampler(choose_sampler(sampler, model.process), model.process, num_inference_steps, model.sampling)
    condition = model.condition(input_ids)
    guided = guidance_scale != 1.0
    if guided:
        condition = _beside(model.condition(empty_ids), condition)
    # Both branches are told the same sizes: what guidance strengthens is the caption.
    condition |= model.size_condition(model.drawn_sizes(paddle.concat([noise] * 2) if guided else noise))
    condition |= {
        name: paddle.concat([model.without_lead(value), value]) if guided and paddle.is_tensor(value) else value
        for name, value in (control or {}).items()
    }
    latents = noise * run.initial_scale
    for timestep in run.timesteps:
        latents_input = run.scale_input(latents, timestep)
        latents_input = paddle.concat([latents_input] * 2) if guided else latents_input
        latents_input = latents_input.astype(model.denoiser.dtype)
        predicted = model.denoise(latents_input, timestep, **condition).astype("float32")
        if guided:
            without, with_prompt = predicted.chunk(2)
            predicted = without + guidance_scale * (with_prompt - without)
        latents = run.step(predicted, timestep, latents, next_noise() if run.is_stochastic else None)
        if on_step:
            on_step()
    return latents


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
def draw(
    model,
    tokenizer,
    prompts: list[str],
    indices: list[int],
    shape: tuple[int, int, int],
    seed: int | list[int],
    guidance_scale: float,
    num_inference_steps: int,
    on_step: Callable | None = None,
    sampler: str | None = None,
    negative_prompts: list[str] | None = None,
    check: bool = True,
    control: dict | None = None,
    stream: Stream = Stream.SAMPLE,
) -> np.ndarray:
    """Pictures [B, H, W, 3] uint8: one for each pair of `prompts` and `indices`. The model must be in eval mode.

    `seed`: one for all, or one for each. `negative_prompts`: what each should not show, "" by default. `check`: raise
    ModelError where the sampler ends in values that are not finite; else those pictures are black. `control`: as
    `sample_latents` takes it, of as many pictures. `stream`: of the noise.
    """
    latents = draw_latents(model, tokenizer, prompts, indices, shape, seed, guidance_scale, num_inference_steps,
                           on_step, sampler, negative_prompts, check, control, stream)  # fmt: skip
    pixels = model.decode(latents)
    if check:
        _require_finite(pixels, prompts, _how(model, sampler, num_inference_steps, guidance_scale))
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
    guidance_scale: float,
    num_inference_steps: int,
    on_step: Callable | None = None,
    sampler: str | None = None,
    negative_prompts: list[str] | None = None,
    check: bool = True,
    control: dict | None = None,
    stream: Stream = Stream.SAMPLE,
):
    """The latents [B, C, h, w] that `draw` decodes, of the same arguments."""
    seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
    streams = [noises(*key, shape, stream) for key in zip(seeds, prompts, indices, strict=True)]

    def next_noise():
        return paddle.to_tensor(np.stack([next(stream) for stream in streams]))

    latents = sample_latents(
        model,
        paddle.to_tensor(tokenizer.encode(prompts)),
        paddle.to_tensor(tokenizer.encode(negative_prompts or [""])),
        next_noise(),
        guidance_scale,
        num_inference_steps,
        on_step,
        sampler,
        next_noise,
        control,
    )
    if check:
        _require_finite(latents, prompts, _how(model, sampler, num_inference_steps, guidance_scale))
    return latents


def _how(model, sampler: str | None, num_inference_steps: int, guidance_scale: float) -> str:
    return f"{num_inference_steps} steps of {choose_sampler(sampler, model.process)} at guidance {guidance_scale:g}"


def _require_finite(values, prompts: list[str], how: str) -> None:
    """Raises ModelError where a picture's values are not all finite; rounded, they would be black."""
    finite = paddle.isfinite(values.astype("float32")).reshape([len(prompts), -1]).all(axis=1).numpy()
    if not finite.all():
        prompt = prompts[int(np.argmin(finite))]
        raise ModelError(
            f"{how} ended in values that are not finite for the prompt {prompt[:_SHOWN]!r}; "
            "lower the guidance scale, change the sampler or its steps, or check the weights"
        )
