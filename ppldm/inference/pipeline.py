"""A trained model behind three methods: prompts to pictures, pictures to latents and back.

    import ppldm

    model = ppldm.load("output/pipeline")
    pictures = model.generate(["a red heart", "a blue boat"], num_samples=2)
    pictures.shape                                    # (2, 2, 256, 256, 3), uint8, RGB

All pictures are arrays of uint8 in 0 .. 255, RGB, [..., H, W, 3]; latents are float32, [B, C, H / f, W / f] for a VAE
that scales down by f, of about unit variance.
"""

import inspect
import math
import numbers
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import ParamSpec, TypeVar

import numpy as np
import paddle
from PIL import Image

from ..data.text.tokenizer import CaptionTokenizer
from ..diffusion.drawing import Drawing, usual_strength
from ..diffusion.guided import Beginning, Callback, decode, draw_latents, to_pictures
from ..networks.configs import latent_shape
from ..networks.latent_diffusion import LatentDiffusionModel
from ..networks.model import to_unit_range
from ..utils.checksums import checksum_arrays
from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.rng import MAX_SEED
from ..utils.text import did_you_mean
from .beginning import Picture, check_sides, read_beginning, read_control
from .prompt_weights import batches_alike, check_syntax, chunks_of, describe_prompts, parse_weights, tokens_of, words_of
from .prompts import MOST_SAMPLES, Wildcards, check_prompt

_SHOWN = 60  # letters of a value in a message
OUTPUTS = ("numpy", "pil", "latents")
# What diffusers' pipelines call them.
_OF_DIFFUSERS = {"num_images_per_prompt": "num_samples", "mask_image": "mask", "output_type": "output",
                 "generator": "seed", "scheduler": "sampler", "callback_on_step_end": "callback"}  # fmt: skip
_KEPT = 64  # texts: those of Stable Diffusion 1 take 0.24 MB each

# Their mean says nothing of hidden states where it is less than this share of their root mean square: those of a text
# encoder that ends in a norm without a bias have the mean zero but for rounding.
_NO_MEAN = 0.01
_P = ParamSpec("_P")
_R = TypeVar("_R")


def check_keywords(others: Mapping[str, str] = MappingProxyType({})) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A ConfigError for an unknown keyword, with the one meant. others: what other libraries call ours."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @wraps(function)
        def checked(*args: _P.args, **settings: _P.kwargs) -> _R:
            for name in settings:
                if name not in known:
                    meant = f"did you mean {others[name]}?" if name in others else did_you_mean(name, known)
                    raise ConfigError(f"{function.__name__} has no setting {name}; {meant}")
            return function(*args, **settings)

        return checked

    return decorate


class TextToImage:
    """A model in evaluation mode with its tokenizer. `resolution`: the side of its training pictures. `lora`: what was
    merged into it. `computed`: the engine or dtype, if not the usual; `autocast` makes its context."""

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
        self.textual_inversion: list[str] = []  # files whose vectors tokens of its prompts stand for
        self.example_prompt = ""  # one that its training has shown, where that is known
        self._states, self._drawn_with = TextStates(model, tokenizer), (model,)
        self.guide: TextToImage | None = None

    def guide_by(self, guide: "TextToImage", path) -> None:
        """Be guided by another pipeline, that of `path`: `methods.autoguidance`. Raises ConfigError."""
        from ..methods.autoguidance import check_fit

        check_fit(self, guide, path)
        self.guide, self._drawn_with = guide, (*self._drawn_with, guide.model)

    @check_keywords(_OF_DIFFUSERS)
    def generate(
        self, prompt: str | list[str], *, negative_prompt: str | list[str] | None = None, num_samples: int = 1,
        size: tuple[int, int] | None = None, height: int | None = None, width: int | None = None,
        seed: int | Sequence[int] = 23, sampler: str | None = None, num_inference_steps: int | None = None,
        guidance_scale: float | None = None, guidance_rescale: float = 0.0, eta: float = 0.0,
        timestep_spacing: str | None = None, sigma_schedule: str | None = None,
        guidance_interval: Sequence[float] | None = None, cfg_zero: bool = False, prompt_syntax: str = "plain",
        wildcards: str | Path | None = None, image: Picture | None = None, mask: Picture | None = None,
        strength: float | None = None, control: str | Path | None = None, control_filter: str | None = None,
        control_scale: float = 1.0, latents: np.ndarray | None = None, batch_size: int = 8,
        callback: Callback | None = None, output: str = "numpy",
    ):  # fmt: skip
        """Pictures [prompts, num_samples, H, W, 3] uint8; as `output` "pil" lists of PIL pictures, as "latents" float32
        [prompts, num_samples, C, h, w], from which `decode` makes pictures. Picture i of a prompt is a function of
        (weights, prompt, negative prompt, settings, seed, i), whatever else is drawn with it and in which batches.

        negative_prompt: what the pictures should not show; one for all, or one for each prompt.
        size: (width, height), or `height` and `width`: pixels, multiples of the VAE's downscaling factor, by default
        those trained at.
        seed: from 0 to 2**64 - 1; several: one for each picture of a prompt, which is then the first of its seed.
        sampler, num_inference_steps, guidance_scale, guidance_rescale, eta, timestep_spacing, sigma_schedule,
        guidance_interval, cfg_zero: as of `diffusion.drawing.Drawing`; the first three are the model's own where they
        are not given.
        prompt_syntax: "plain", or "weighted": (word:1.2), (word), [word] and BREAK (`prompt_weights`).
        wildcards: a folder of lists: {a|b} in a prompt is one of both, __name__ a line of name.txt there.
        image: a file, PIL picture or [H, W, 3] uint8 to draw over, its centre. mask: the same, or [H, W] bool: light
        where it is drawn anew; the rest is kept. A model that is made for inpainting needs both. strength: above 0 ..
        1, the share of the steps that are taken over the image: 0.8 by default, with a mask 1.
        control: with a ControlNet, the file of a picture that leads all of them, or to which `control_filter` is
        applied first; None: drawn as by the base. control_scale: how much of what the ControlNet adds.
        latents: the noise to start from, float32 [prompts, num_samples, C, h, w], or [C, h, w] for all.
        callback: `callback(step, num_steps, latents)` after each pass through the network, for each batch of at most
        `batch_size` pictures. Raises ConfigError.
        """
        prompts, negative = _texts(prompt, negative_prompt)
        places = _places(seed, num_samples, batch_size, output)
        if size is not None and not (isinstance(size, Sequence) and len(size) == 2):
            raise ConfigError(f"size {str(size)[:_SHOWN]!r} is not (width, height)")
        width, height = (self.resolution if side is None else side for side in size or (width, height))
        own = self.latent_shape(height, width)
        _check_kinds(control, control_filter, control_scale, wildcards, callback)
        given: dict = {**read_beginning(image, mask, (height, width))}
        if control is not None:
            made = self.read_control(control, (height, width), control_filter, places[0][0])
            given |= {"control": made, "control_scale": control_scale}
        strength = usual_strength(image, mask) if strength is None else strength
        given["drawing"] = Drawing(num_inference_steps, guidance_scale, sampler, guidance_rescale, eta,
                                   timestep_spacing, sigma_schedule, strength, guidance_interval, cfg_zero)  # fmt: skip
        noise = _noise(latents, (len(prompts), len(places), *own))
        given |= {"size": (height, width), "weighted": check_syntax(prompt_syntax) == "weighted", "callback": callback}
        jobs = _jobs(zip(prompts, negative, strict=True), places, wildcards)
        if said := describe_prompts(self, (text for job in jobs for text in job[:2]), given["weighted"]):
            get_logger().warning("%s", said)
        found = self._draw_all(jobs, batch_size, noise, as_latents=output == "latents", **given)
        found = found.reshape(len(prompts), len(places), *found.shape[1:])
        return [[*map(Image.fromarray, row)] for row in found] if output == "pil" else found

    def _draw_all(self, jobs: list[tuple], batch_size: int, noise, *, size, weighted: bool, as_latents: bool, **given):
        """All pictures of `_jobs`, by `draw`."""
        if not jobs:
            shape, dtype = (self.latent_shape(*size), np.float32) if as_latents else ((*size, 3), np.uint8)
            return np.zeros((0, *shape), dtype)
        given |= {"size": size, "weighted": weighted, "as_latents": as_latents}
        drawn = []
        for batch in batches_alike(range(len(jobs)), lambda number: chunks_of(jobs[number][:2], weighted), batch_size):
            prompts, negative, seeds, indices = map(list, zip(*(jobs[number] for number in batch), strict=True))
            own = None if noise is None else noise[batch]
            drawn.append(self.draw(prompts, indices, seeds, negative_prompts=negative, noise=own, **given))
        return np.concatenate(drawn)

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
        """One batch of pictures [B, H, W, 3] uint8; `size` is (height, width). control, image, mask: as they are read.
        weighted: the prompts' syntax; all are drawn of as many chunks. noise: what each starts from, [B, C, h, w]
        float32. as_latents: these. Raises ConfigError."""
        drawing = drawing.fit(self.model.process, self.model.usual)
        num_chunks, guide = chunks_of((*prompts, *negative_prompts), weighted), None
        encode = self._states.encoder(weighted, num_chunks)
        if self.guide:
            from ..methods.autoguidance import check_asked

            check_asked(drawing, negative_prompts)
            guide = (self.guide.model, self.guide._states.encoder(weighted, num_chunks))
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
                                   named_by=named_by, control=led, beginning=beginning, noise=noise,
                                   guide=guide)  # fmt: skip
        return latents.numpy() if as_latents else self._to_pictures(latents, prompts, indices, seeds)

    def _begin(self, image: np.ndarray, mask: np.ndarray | None, count: int) -> Beginning:
        """The posterior's mean of uint8 [3, H, W], and what is kept: latents whose first pixel is not masked."""
        pixels = to_unit_range(paddle.to_tensor(image)[None])
        latents = self._encode(pixels).expand([count, -1, -1, -1])
        if mask is None:
            return Beginning(latents)
        step = image.shape[1] // latents.shape[2]
        kept = paddle.to_tensor(~mask[None, None])
        known = kept[:, :, ::step, ::step]
        if not self.model.takes_mask:
            return Beginning(latents, known)
        masked = self._encode(pixels * kept.astype("float32"))
        seen = paddle.concat([1.0 - known.astype("float32"), masked], axis=1)
        return Beginning(latents, known, seen.expand([count, -1, -1, -1]))

    def _to_pictures(self, latents, prompts: list[str], indices: list[int], seeds: list[int]) -> np.ndarray:
        """Pictures [B, H, W, 3] uint8 of latents that were drawn of these."""
        return decode(self.model, latents, prompts)

    def read_control(self, path, size: tuple[int, int], made_by: str | None = None, seed: int = 0) -> np.ndarray:
        """The control image that the model takes, uint8 [K, H, W], from a picture's file. Raises ConfigError."""
        if not hasattr(self.model, "controlnet"):
            raise ConfigError("--control is for models with a ControlNet, and this one has none; omit it")
        num_channels = self.model.controlnet.config.conditioning_channels
        return read_control(path, num_channels, self._control_size(*size), made_by, seed)

    def _control_size(self, height: int, width: int) -> tuple[int, int]:
        """Of the control image of such pictures. Raises ConfigError."""
        self.latent_shape(height, width)
        return height, width

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures [B, H, W, 3] uint8 to the model's latents [B, C, H/f, W/f] float32, means. Raises ConfigError."""
        pictures = np.asarray(pictures)
        if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] != 3:
            raise ConfigError(f"pictures are {_kind(pictures)}; [B, H, W, 3] of uint8 is due")
        self.latent_shape(*pictures.shape[1:3])
        pixels = paddle.to_tensor(np.ascontiguousarray(np.moveaxis(pictures, -1, 1)))
        return self._encode(to_unit_range(pixels)).numpy()

    @paddle.no_grad()
    def _encode(self, pixels) -> paddle.Tensor:
        """Of pixels [B, 3, H, W] in -1 .. 1."""
        return self.model.latent_map.to_model(self.model.vae.encode(pixels).latent_dist.mean)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Latents [B, C, h, w] float32 to pictures [B, f h, f w, 3] uint8. Raises ConfigError."""
        latents = np.asarray(latents)
        channels = self.model.vae.config.latent_channels
        if latents.dtype.kind != "f" or latents.ndim != 4 or latents.shape[1] != channels:
            raise ConfigError(f"latents are {_kind(latents)}; [B, {channels}, h, w] of float32 is due")
        return to_pictures(self.model.decode(paddle.to_tensor(latents.astype(np.float32, copy=False))))

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the latents of such pictures. Raises ConfigError where the sides do not divide."""
        check_sides(height=height, width=width)
        return latent_shape(self.model.vae.config, height, width)

    @cached_property
    def fingerprint(self) -> str:
        """CRC-32 of all weights and the vocabulary, 8 hexadecimal digits: tells models apart in records."""
        arrays = ((name, value.numpy()) for one in self._drawn_with for name, value in one.state_dict().items())
        return checksum_arrays(arrays, zlib.crc32("\n".join(self.tokenizer.vocab).encode()))


class TextStates:
    """What a model in evaluation mode is told of texts: each is encoded once, by itself, whatever it is drawn with."""

    def __init__(self, model, tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._plain, self._weighted = (lru_cache(_KEPT)(one) for one in (self._encode, self._encode_weighted))

    def encoder(self, weighted: bool = False, num_chunks: int = 1) -> Callable[[list[str]], dict]:
        """What `model.condition` gives of B texts; where they are `weighted`, each of `num_chunks`, the lacking ones
        empty as in webui. Raises ConfigError where the model cannot draw by such texts."""
        if weighted:
            if self._model.words is None:
                raise ConfigError(
                    "--prompt-syntax weighted is for models that look at the state of each word, and this one is also "
                    "told one of the whole prompt; omit it"
                )
            if num_chunks > 1 and not self._model.joins_words:
                raise ConfigError(
                    f"BREAK makes {num_chunks} chunks of a prompt, and this model has places for the words of one; "
                    "omit BREAK"
                )
            return lambda texts: _stack([self._weighted(one, num_chunks) for one in texts])
        return lambda texts: _stack([self._plain(one) for one in texts])

    @paddle.no_grad()
    def _encode(self, text: str) -> dict:
        return self._model.condition(paddle.to_tensor(self._tokenizer.encode([text])))

    @paddle.no_grad()
    def _encode_weighted(self, text: str, num_chunks: int) -> dict:
        chunks = parse_weights(text)
        chunks += [[("", 1.0)]] * (num_chunks - len(chunks))
        parts, words = [], self._model.words
        for ids, weights in (tokens_of(one, self._tokenizer) for one in chunks):
            part = self._model.condition(paddle.to_tensor(ids[None]))
            parts.append(part | {words: emphasise(part[words], weights)})
        return {name: None if one is None else paddle.concat([part[name] for part in parts], axis=1)
                for name, one in parts[0].items()}  # fmt: skip


def emphasise(hidden, weights: np.ndarray):
    """Hidden states [1, L, D] of a chunk, where each token counts by its weight [L]; the same where all are 1."""
    if (weights == 1).all():
        return hidden
    weighted = hidden * paddle.to_tensor(weights).astype(hidden.dtype).reshape([1, -1, 1])
    before, after = (float(one.astype("float32").mean()) for one in (hidden, weighted))
    least = _NO_MEAN * float(hidden.astype("float32").square().mean()) ** 0.5
    return weighted * (before / after) if abs(before) > least and abs(after) > least else weighted


def _stack(conditions: list[dict]) -> dict:
    return {name: None if one is None else paddle.concat([condition[name] for condition in conditions])
            for name, one in conditions[0].items()}  # fmt: skip


def _texts(prompt, negative_prompt) -> tuple[list[str], list[str]]:
    """A negative prompt for each prompt. Raises ConfigError."""
    negative = (
        "" if negative_prompt is None or isinstance(negative_prompt, list) and not negative_prompt else negative_prompt
    )
    for name, text in (("prompt", prompt), ("negative_prompt", negative)):
        if isinstance(text, (bytes, Mapping)) or not isinstance(text, (str, Iterable)):
            raise ConfigError(f"{name} {str(text)[:_SHOWN]!r} is neither a text nor a list of texts")
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    negative = [negative] * len(prompts) if isinstance(negative, str) else list(negative)
    if len(negative) != len(prompts):
        raise ConfigError(f"{len(negative)} negative prompts for {len(prompts)} prompts; give one, or one for each")
    for text in (*prompts, *negative):
        check_prompt(text, "the prompt")
    return prompts, negative


def _check_kinds(control, control_filter, control_scale, wildcards, callback) -> None:
    """Raises ConfigError for what is of another kind than `generate` takes."""
    for name, value, kinds in (
        ("control", control, (str, Path)),
        ("control_filter", control_filter, (str,)),
        ("control_scale", control_scale, (numbers.Real,)),
        ("wildcards", wildcards, (str, Path)),
        ("callback", callback, (Callable,)),
    ):
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ConfigError(f"{name} {str(value)[:_SHOWN]!r} is of the wrong kind; see help(model.generate)")
    if control_scale is None or not math.isfinite(control_scale):
        raise ConfigError(f"control_scale {control_scale} is not a number; 1 is usual")


def _jobs(prompts, places: list[tuple[int, int]], folder) -> list[tuple[str, str, int, int]]:
    """(prompt, negative prompt, seed, index) of each picture, with choices from wildcards. Raises ConfigError."""
    pairs = list(prompts)
    if folder is None:
        return [(*pair, *place) for pair in pairs for place in places]
    lists = Wildcards(folder, (text for pair in pairs for text in pair))
    return [(*(lists.resolve(text, *place) for text in pair), *place) for pair in pairs for place in places]


def _places(seed, num_samples, batch_size, output) -> list[tuple[int, int]]:
    """(seed, index) of each picture of a prompt. Raises ConfigError."""
    if not isinstance(output, str) or output not in OUTPUTS:
        raise ConfigError(f"output {output!r} is not one of {', '.join(OUTPUTS)}")
    for name, value in (("num_samples", num_samples), ("batch_size", batch_size)):
        if not isinstance(value, numbers.Integral) or not 1 <= value <= MOST_SAMPLES:
            raise ConfigError(f"{name} {str(value)[:_SHOWN]!r} must be a whole number from 1 to {MOST_SAMPLES}")
    if not isinstance(seed, (list, tuple, range, np.ndarray)):
        return [(seed, index) for index in range(num_samples)]
    if not len(seed) or num_samples not in (1, len(seed)):
        raise ConfigError(f"{len(seed)} seeds for {num_samples} pictures of a prompt; give as many, or one seed")
    return [(one, 0) for one in seed]


def _noise(latents, shape: tuple[int, ...]) -> np.ndarray | None:
    """The noise of all pictures, [prompts · num_samples, C, h, w] of such a `shape`. Raises ConfigError."""
    if latents is None:
        return None
    latents = np.asarray(latents)
    if latents.dtype.kind != "f" or latents.shape not in (shape, shape[2:]):
        raise ConfigError(f"latents are {_kind(latents)}; {list(shape)} or {list(shape[2:])} of float32 is due")
    return np.broadcast_to(latents.astype(np.float32), shape).reshape(-1, *shape[2:])


def _kind(array: np.ndarray) -> str:
    return f"{list(array.shape)} of {array.dtype}"
