"""A trained model behind three methods: prompts to pictures, pictures to latents and back.

    import ppldm

    model = ppldm.load("output/pipeline")
    pictures = model.generate(["a red heart", "a blue boat"], num_samples=2)
    pictures.shape                                    # (2, 2, 256, 256, 3), uint8, RGB

All pictures are arrays of uint8 in 0 .. 255, RGB, [..., H, W, 3]; latents are float32, [B, C, H / f, W / f] for a VAE
that scales down by f, of about unit variance.
"""

import math
import numbers
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import paddle

from ..data.text.tokenizer import CaptionTokenizer
from ..diffusion.guided import draw, to_pictures
from ..diffusion.samplers import choose_sampler
from ..networks.autoencoder import to_unit_range
from ..networks.configs import latent_shape
from ..networks.latent_diffusion import LatentDiffusionModel
from ..utils.checksums import checksum_arrays
from ..utils.errors import ConfigError
from ..utils.rng import MAX_SEED
from .control import read_control
from .prompts import check_prompt


class TextToImage:
    """A model in evaluation mode with its tokenizer. `resolution`: the side of its training pictures, pixels. `lora`:
    what was merged into it."""

    def __init__(
        self, model: LatentDiffusionModel, tokenizer: CaptionTokenizer, resolution: int, lora: Sequence[str] = ()
    ):
        self.model, self.tokenizer, self.resolution, self.lora = model, tokenizer, resolution, list(lora)

    def generate(
        self,
        prompts: str | list[str],
        *,
        negative_prompts: str | list[str] = "",
        num_samples: int = 1,
        guidance_scale: float = 7.5,
        num_inference_steps: int = 50,
        sampler: str | None = None,
        height: int | None = None,
        width: int | None = None,
        seed: int = 23,
        batch_size: int = 8,
        control=None,
        control_filter: str | None = None,
        control_scale: float = 1.0,
    ) -> np.ndarray:
        """Pictures [prompts, num_samples, H, W, 3] uint8.

        Picture i of a prompt is a function of (weights, prompt, negative prompt, settings, seed, i), whatever else is
        drawn with it and in which batches. `height`, `width`: pixels, multiples of the VAE's downscaling factor, by
        default those trained at. `guidance_scale`: how strongly to follow the prompt; 1 is no guidance. `sampler`: by
        default ddim, of models of flow flow-euler. `seed`: from 0 to 2**64 - 1. `control`: with a ControlNet, the file
        of a picture that leads all of them, or to which `control_filter` is applied first; None: drawn as by the base.
        Raises ConfigError.
        """
        for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
            if not isinstance(value, numbers.Integral) or value < 1:
                raise ConfigError(f"{name} {value!r} must be a whole number from 1")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        negative = [negative_prompts] * len(prompts) if isinstance(negative_prompts, str) else list(negative_prompts)
        if len(negative) != len(prompts):
            raise ConfigError(f"{len(negative)} negative prompts for {len(prompts)} prompts; give one, or one for each")
        for text in (*prompts, *negative):
            check_prompt(text, "the prompt")
        height, width = (self.resolution if side is None else side for side in (height, width))
        led = {}
        if control is not None:
            led = {"control": self.read_control(control, (height, width), control_filter, seed)}
            led["control_scale"] = control_scale
        jobs = [(number, index) for number in range(len(prompts)) for index in range(num_samples)]
        drawn = [
            self.draw(
                [prompts[number] for number, _ in batch],
                [index for _, index in batch],
                [seed] * len(batch),
                negative_prompts=[negative[number] for number, _ in batch],
                guidance_scale=guidance_scale,
                num_inference_steps=num_inference_steps,
                sampler=sampler,
                size=(height, width),
                **led,
            )
            for batch in (jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size))
        ]
        flat = np.concatenate(drawn) if drawn else np.zeros((0, height, width, 3), dtype=np.uint8)
        return flat.reshape(len(prompts), num_samples, height, width, 3)

    def draw(
        self,
        prompts: list[str],
        indices: list[int],
        seeds: list[int],
        *,
        negative_prompts: list[str],
        guidance_scale: float,
        num_inference_steps: int,
        sampler: str | None,
        size: tuple[int, int],
        on_step: Callable | None = None,
        control: np.ndarray | None = None,
        control_scale: float = 1.0,
    ) -> np.ndarray:
        """One batch of pictures [B, H, W, 3] uint8; `size` is (height, width). control: as `read_control` gives it.
        Raises ConfigError."""
        sampler = choose_sampler(sampler, self.model.process)
        if not math.isfinite(guidance_scale):
            raise ConfigError(f"the guidance scale {guidance_scale} is not a number")
        for seed in seeds:
            if not isinstance(seed, numbers.Integral) or not 0 <= seed <= MAX_SEED:
                raise ConfigError(f"the seed {seed!r} must be a whole number from 0 to {MAX_SEED}")
        led = None
        if control is not None:
            led = {"control": paddle.to_tensor(np.stack([control] * len(prompts))), "control_scale": control_scale}
        return self._draw(prompts, indices, self.latent_shape(*size), seeds, guidance_scale, num_inference_steps,
                          on_step, sampler, negative_prompts, control=led)  # fmt: skip

    def _draw(self, *args, **settings) -> np.ndarray:
        """As `diffusion.guided.draw`, after the model and its tokenizer."""
        return draw(self.model, self.tokenizer, *args, **settings)

    def read_control(self, path, size: tuple[int, int], made_by: str | None = None, seed: int = 0) -> np.ndarray:
        """The control image that the model takes, uint8 [K, H, W] of `size`, from a picture's file. Raises
        ConfigError."""
        if not hasattr(self.model, "controlnet"):
            raise ConfigError("--control is for models with a ControlNet, and this one has none; omit it")
        self.latent_shape(*size)
        return read_control(path, self.model.controlnet.config.conditioning_channels, size, made_by, seed)

    @paddle.no_grad()
    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures [B, H, W, 3] uint8 to latents [B, C, H/f, W/f] float32: the posterior's mean, scaled. Raises
        ConfigError."""
        pictures = np.asarray(pictures)
        if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] != 3:
            raise ConfigError(f"pictures are {_kind(pictures)}; [B, H, W, 3] of uint8 is due")
        self.latent_shape(*pictures.shape[1:3])
        pixels = paddle.to_tensor(np.ascontiguousarray(np.moveaxis(pictures, -1, 1)))
        return (self.model.vae.encode(to_unit_range(pixels)).latent_dist.mean * self.model.scaling_factor).numpy()

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Latents [B, C, h, w] float32 to pictures [B, f h, f w, 3] uint8. Raises ConfigError."""
        latents = np.asarray(latents)
        channels = self.model.vae.config.latent_channels
        if latents.dtype.kind != "f" or latents.ndim != 4 or latents.shape[1] != channels:
            raise ConfigError(f"latents are {_kind(latents)}; [B, {channels}, h, w] of float32 is due")
        return to_pictures(self.model.decode(paddle.to_tensor(latents.astype(np.float32, copy=False))))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the latents of such pictures. Raises ConfigError where the sides do not divide."""
        return latent_shape(self.model.vae.config, height=height, width=width)

    @cached_property
    def fingerprint(self) -> str:
        """CRC-32 of all weights and the vocabulary, 8 hexadecimal digits: tells models apart in records."""
        arrays = ((name, value.numpy()) for name, value in self.model.state_dict().items())
        return checksum_arrays(arrays, zlib.crc32("\n".join(self.tokenizer.vocab).encode()))


def _kind(array: np.ndarray) -> str:
    return f"{list(array.shape)} of {array.dtype}"
