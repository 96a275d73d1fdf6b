"""A trained model behind three methods: prompts to pictures, pictures to latents and back.

    import ppldm

    model = ppldm.load("output/pipeline")
    pictures = model.generate(["a red heart", "a blue boat"], num_samples=2)
    pictures.shape                                    # (2, 2, 256, 256, 3), uint8, RGB

All pictures are arrays of uint8 in 0 .. 255, RGB, [..., H, W, 3]; latents are float32, [B, C, H / f, W / f] for a VAE
that scales down by f, of about unit variance.
"""

import numbers
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cached_property
from types import MappingProxyType

import numpy as np
import paddle
from PIL import Image

from ..data.text.tokenizer import CaptionTokenizer
from ..diffusion.drawing import USUAL_STRENGTH, Drawing
from ..diffusion.guided import Beginning, Callback, decode, draw_latents, to_pictures
from ..networks.autoencoder import to_unit_range
from ..networks.configs import latent_shape
from ..networks.latent_diffusion import LatentDiffusionModel
from ..utils.checksums import checksum_arrays
from ..utils.errors import ConfigError
from ..utils.rng import MAX_SEED
from .beginning import read_image, read_mask
from .control import read_control
from .prompt_weights import chunks_of, words_of
from .prompts import check_prompt
from .text_states import TextStates

OUTPUTS = ("numpy", "pil", "latents")


class TextToImage:
    """A model in evaluation mode with its tokenizer. `resolution`: the side of its training pictures, pixels. `lora`:
    what was merged into it. `computed`: the engine or the dtype where it is not Paddle in float32, by name; `autocast`
    makes the context of that."""

    def __init__(
        self,
        model: LatentDiffusionModel,
        tokenizer: CaptionTokenizer,
        resolution: int,
        lora: Sequence[str] = (),
        computed: Mapping[str, str] = MappingProxyType({}),
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.model, self.tokenizer, self.resolution, self.lora = model, tokenizer, resolution, list(lora)
        self.computed, self._autocast = computed, autocast
        self._states = TextStates(model, tokenizer)

    def generate(
        self,
        prompts: str | list[str],
        *,
        negative_prompts: str | list[str] = "",
        num_samples: int = 1,
        size: tuple[int, int] | None = None,
        height: int | None = None,
        width: int | None = None,
        seed: int | Sequence[int] = 23,
        batch_size: int = 8,
        image=None,
        mask=None,
        latents: np.ndarray | None = None,
        control=None,
        control_filter: str | None = None,
        control_scale: float = 1.0,
        callback: Callback | None = None,
        output: str = "numpy",
        **how,
    ):
        """Pictures [prompts, num_samples, H, W, 3] uint8; as `output` "pil" lists of PIL pictures, as "latents" float32
        [prompts, num_samples, C, h, w], from which `decode` makes pictures.

        Picture i of a prompt is a function of (weights, prompt, negative prompt, settings, seed, i), whatever else is
        drawn with it and in which batches. `size`: (width, height), or `height` and `width`: pixels, multiples of the
        VAE's downscaling factor, by default those trained at. `seed`: from 0 to 2**64 - 1; several: one for each
        picture of a prompt, which is then the first of its seed. `image`: a file, PIL picture or [H, W, 3] uint8 to
        draw over, its centre, by `strength`; `mask`: the same, light where it is drawn anew; the rest is kept.
        `latents`: the noise to start from, float32 [prompts, num_samples, C, h, w], or [C, h, w] for all. `control`:
        with a ControlNet, the file of a picture that leads all of them, or to which `control_filter` is applied first;
        None: drawn as by the base. `callback(step, num_steps, latents)`: after each pass through the network, for each
        batch. `how`: the fields of `diffusion.drawing.Drawing`, as `sampler="euler"`. Raises ConfigError.
        """
        prompts, negative = _texts(prompts, negative_prompts)
        seeds, indices = _numbers(seed, num_samples, batch_size, output)
        width, height = (self.resolution if side is None else side for side in size or (width, height))
        given = _given(image, mask, (height, width))
        if control is not None:
            given["control"] = self.read_control(control, (height, width), control_filter, seeds[0])
            given["control_scale"] = control_scale
        noise = _noise(latents, (len(prompts), len(seeds), *self.latent_shape(height, width)))
        drawn = [
            self.draw(
                [prompts[number] for number in rows],
                [indices[number] for number in columns],
                [seeds[number] for number in columns],
                negative_prompts=[negative[number] for number in rows],
                drawing=_drawing(how, image, mask),
                size=(height, width),
                callback=callback,
                noise=None if noise is None else noise[rows, columns],
                as_latents=output == "latents",
                **given,
            )
            for rows, columns in _batches(len(prompts), len(seeds), batch_size)
        ]
        found = np.concatenate(drawn) if drawn else self._none(output, height, width)
        return _shaped(found.reshape(len(prompts), len(seeds), *found.shape[1:]), output)

    def _none(self, output: str, height: int, width: int) -> np.ndarray:
        """No pictures."""
        if output == "latents":
            return np.zeros((0, *self.latent_shape(height, width)), np.float32)
        return np.zeros((0, height, width, 3), np.uint8)

    def draw(
        self,
        prompts: list[str],
        indices: list[int],
        seeds: list[int],
        *,
        negative_prompts: list[str],
        drawing: Drawing,
        size: tuple[int, int],
        callback: Callback | None = None,
        control: np.ndarray | None = None,
        control_scale: float = 1.0,
        weighted: bool = False,
        image: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        noise: np.ndarray | None = None,
        as_latents: bool = False,
    ) -> np.ndarray:
        """One batch of pictures [B, H, W, 3] uint8; `size` is (height, width). control: as `read_control` gives it.
        weighted: the prompts' syntax (`prompt_weights`); all are drawn of as many chunks. image, mask: as `beginning`
        reads them. noise: what each starts from, [B, C, h, w] float32. as_latents: these, [B, C, h, w] float32. Raises
        ConfigError."""
        drawing = drawing.fit(self.model.process)
        encode = self._states.encoder(weighted, chunks_of((*prompts, *negative_prompts), weighted))
        named_by = [words_of(one) for one in prompts] if weighted else None
        for seed in seeds:
            if not isinstance(seed, numbers.Integral) or not 0 <= seed <= MAX_SEED:
                raise ConfigError(f"the seed {seed!r} must be a whole number from 0 to {MAX_SEED}")
        led = None
        if control is not None:
            led = {"control": paddle.to_tensor(np.stack([control] * len(prompts))), "control_scale": control_scale}
        if image is None and drawing.strength < 1:
            raise ConfigError(f"--strength {drawing.strength:g} is for a picture that is drawn over; give --image too")
        beginning = None if image is None else self._begin(image, mask, len(prompts))
        with self._autocast():
            latents = draw_latents(self.model, self.tokenizer, prompts, indices, self.latent_shape(*size), seeds,
                                   drawing, negative_prompts=negative_prompts, encode=encode, callback=callback,
                                   named_by=named_by, control=led, beginning=beginning, noise=noise)  # fmt: skip
        return latents.numpy() if as_latents else self._to_pictures(latents, prompts, indices, seeds)

    def _begin(self, image: np.ndarray, mask: np.ndarray | None, count: int) -> Beginning:
        """The mean of the picture's posterior, and what of it is kept: a latent whose first pixel is not masked."""
        latents = paddle.to_tensor(self.encode(np.moveaxis(image, 0, -1)[None])).expand([count, -1, -1, -1])
        if mask is None:
            return Beginning(latents)
        step = image.shape[1] // latents.shape[2]
        return Beginning(latents, paddle.to_tensor(~mask[::step, ::step])[None, None])

    def _to_pictures(self, latents, prompts: list[str], indices: list[int], seeds: list[int]) -> np.ndarray:
        """Pictures [B, H, W, 3] uint8 of latents that were drawn of these."""
        return decode(self.model, latents, prompts)

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


def _texts(prompts, negative_prompts) -> tuple[list[str], list[str]]:
    """A negative prompt for each prompt. Raises ConfigError."""
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    negative = [negative_prompts] * len(prompts) if isinstance(negative_prompts, str) else list(negative_prompts)
    if len(negative) != len(prompts):
        raise ConfigError(f"{len(negative)} negative prompts for {len(prompts)} prompts; give one, or one for each")
    for text in (*prompts, *negative):
        check_prompt(text, "the prompt")
    return prompts, negative


def _numbers(seed, num_samples, batch_size, output) -> tuple[list[int], list[int]]:
    """(seed, index) of each picture of a prompt. Raises ConfigError."""
    if output not in OUTPUTS:
        raise ConfigError(f"output {output!r} is not one of {', '.join(OUTPUTS)}")
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ConfigError(f"{name} {value!r} must be a whole number from 1")
    if not isinstance(seed, (list, tuple, range, np.ndarray)):
        return [seed] * num_samples, list(range(num_samples))
    if not len(seed) or num_samples not in (1, len(seed)):
        raise ConfigError(f"{len(seed)} seeds for {num_samples} pictures of a prompt; give as many, or one seed")
    return list(seed), [0] * len(seed)


def _drawing(how: dict, image, mask) -> Drawing:
    """Raises ConfigError for a setting that is not there."""
    known = [one.name for one in fields(Drawing)]
    if unknown := [name for name in how if name not in known]:
        raise ConfigError(f"generate has no setting {unknown[0]}; known of drawing: {', '.join(known)}")
    usual = {"strength": USUAL_STRENGTH} if image is not None and mask is None else {}
    return Drawing(**{**usual, **how})


def _shaped(found: np.ndarray, output: str):
    return [[*map(Image.fromarray, row)] for row in found] if output == "pil" else found


def _given(image, mask, size: tuple[int, int]) -> dict:
    """The arguments of `draw` that say what is drawn over. Raises ConfigError."""
    if mask is not None and image is None:
        raise ConfigError("--mask says what of a picture is drawn anew; give the picture too: --image")
    given = {} if image is None else {"image": read_image(image, size)}
    return given if mask is None else given | {"mask": read_mask(mask, size)}


def _batches(num_prompts: int, num_samples: int, batch_size: int) -> list[tuple[list[int], list[int]]]:
    """(numbers of prompts, numbers of their pictures) of each batch."""
    jobs = [(row, column) for row in range(num_prompts) for column in range(num_samples)]
    batches = (jobs[start : start + batch_size] for start in range(0, len(jobs), batch_size))
    return [([row for row, _ in batch], [column for _, column in batch]) for batch in batches]


def _noise(latents, shape: tuple[int, ...]) -> np.ndarray | None:
    if latents is None:
        return None
    latents = np.asarray(latents)
    if latents.dtype.kind != "f" or latents.shape not in (shape, shape[2:]):
        raise ConfigError(f"latents are {_kind(latents)}; {list(shape)} or {list(shape[2:])} of float32 is due")
    return np.broadcast_to(latents.astype(np.float32), shape)


def _kind(array: np.ndarray) -> str:
    return f"{list(array.shape)} of {array.dtype}"
