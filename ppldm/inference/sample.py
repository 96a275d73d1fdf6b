"""Guided sampling with DDIM: a function of (weights, tokens, initial noise), with no random state of its own."""

import zlib

import numpy as np
import paddle
from ppdiffusers import DDIMScheduler

from ..models.diffusion import NoiseSchedule
from ..models.ldm import LatentDiffusionModel
from ..utils.rng import Stream, make_rng


def sampling_scheduler(noise_schedule: NoiseSchedule, prediction_type: str) -> DDIMScheduler:
    """The DDIM scheduler of the published LDM: no clipping of x_0, last step to abar_0, one step of offset.

    A schedule that ends in noise alone is sampled from its very last timestep: arXiv:2305.08891, section 3.3.
    """
    return DDIMScheduler(
        **noise_schedule.scheduler_config(),
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        timestep_spacing="trailing" if noise_schedule.rescale_betas_zero_snr else "leading",
        prediction_type=prediction_type,
    )


def initial_noise(seed: int, prompt: str, index: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The noise [C, h, w] float32 that picture `index` of `prompt` starts from.

    A function of (seed, prompt, index) alone: not of batch, guidance scale or process. The prompt enters by its CRC-32.
    """
    rng = make_rng(seed, Stream.SAMPLE, epoch=zlib.crc32(prompt.encode()), row=index)
    return rng.standard_normal(shape, dtype=np.float32)


@paddle.no_grad()
def sample_latents(
    model: LatentDiffusionModel,
    input_ids,
    empty_ids,
    noise,
    guidance_scale: float,
    num_inference_steps: int,
    on_step=None,
):
    """Latents [B, C, h, w] from `noise` by deterministic DDIM (eta 0).

    `input_ids` [B, L] int64 are the prompts' tokens, `empty_ids` [1, L] those of the empty caption. Guidance is that
    of Ho and Salimans 2022 (arXiv:2207.12598): uncond + guidance_scale (cond - uncond); 1 costs a single pass.
    """
    scheduler = sampling_scheduler(model.noise_schedule, model.prediction_type)
    scheduler.set_timesteps(num_inference_steps)
    context = model.encode_text(input_ids)
    guided = guidance_scale != 1.0
    if guided:
        uncond = model.encode_text(empty_ids).expand([context.shape[0], -1, -1])
        context = paddle.concat([uncond, context])
    latents = noise
    for timestep in scheduler.timesteps:
        latents_input = paddle.concat([latents] * 2) if guided else latents
        predicted = model.unet(latents_input, timestep, encoder_hidden_states=context).sample.astype("float32")
        if guided:
            without, with_prompt = predicted.chunk(2)
            predicted = without + guidance_scale * (with_prompt - without)
        latents = scheduler.step(predicted, timestep, latents, eta=0.0).prev_sample
        if on_step:
            on_step()
    return latents


def to_pictures(pixels) -> np.ndarray:
    """[B, 3, H, W] float in -1 .. 1 to [B, H, W, 3] uint8."""
    values = pixels.astype("float32").transpose([0, 2, 3, 1]).numpy()
    return np.clip(np.rint((values + 1.0) * 127.5), 0, 255).astype(np.uint8)


@paddle.no_grad()
def draw(
    model: LatentDiffusionModel,
    tokenizer,
    prompts: list[str],
    indices: list[int],
    shape: tuple[int, int, int],
    seed: int,
    guidance_scale: float,
    num_inference_steps: int,
    on_step=None,
) -> np.ndarray:
    """Pictures [B, H, W, 3] uint8: one for each pair of `prompts` and `indices`. The model must be in eval mode."""
    noise = np.stack(
        [initial_noise(seed, prompt, index, shape) for prompt, index in zip(prompts, indices, strict=True)]
    )
    latents = sample_latents(
        model,
        paddle.to_tensor(tokenizer.encode(prompts)),
        paddle.to_tensor(tokenizer.encode([""])),
        paddle.to_tensor(noise),
        guidance_scale,
        num_inference_steps,
        on_step,
    )
    return to_pictures(model.decode(latents))
