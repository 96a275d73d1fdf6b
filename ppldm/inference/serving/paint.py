"""A request becomes a drawing: checked by its model, drawn while its progress is told, and kept with its settings.

A preview shows latents without decoding them: the mean colours of the four quarters of what a decoder makes of a place
are nearly a linear function of the 3 x 3 places around, which is fitted by least squares to what the decoder makes of
random latents, coarse and fine. docs/drawing.md says how near it comes.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np

from ...diffusion.drawing import KEPT, Drawing, samplers_of, usual_strength
from ...diffusion.guided import NEEDS_MASK
from ...utils.errors import ConfigError
from ...utils.pictures import as_png
from ...utils.rng import Stream, make_rng
from ..beginning import read_beginning
from ..pictures.draw import batches_of, draw_batches
from ..pictures.plan import SCALE, Plan
from ..prompt_weights import describe_prompts
from ..prompts import Request
from .jobs import Job

_SIDE, _PROBES = 16, 8  # of the latents that are decoded; their number
_PATCHES = (2, 4, 8)  # they are a sum of patches of one value, of these sides: surfaces, edges, details
BATCH_SIZE = 8  # pictures at a time
_PREVIEW_SECONDS = 0.25  # from one to the next


class Preview:
    """The map of one decoder. decode: latents [B, C, h, w] float32 to pictures [B, f h, f w, 3] uint8."""

    def __init__(self, decode: Callable[[np.ndarray], np.ndarray], channels: int):
        rng = make_rng(0, Stream.SAMPLE)
        latents = np.zeros((_PROBES, channels, _SIDE, _SIDE), np.float32)
        for side in _PATCHES:
            shape = (_PROBES, channels, _SIDE // side, _SIDE // side)
            latents += rng.standard_normal(shape, dtype=np.float32).repeat(side, axis=2).repeat(side, axis=3)
        latents /= np.float32(len(_PATCHES) ** 0.5)
        pictures = decode(latents)
        factor = pictures.shape[1] // _SIDE
        self.fine = 2 if factor % 2 == 0 else 1  # pixels of a preview along a side of a place
        cells = pictures.reshape(_PROBES, _SIDE, self.fine, factor // self.fine, _SIDE, self.fine, -1, 3)
        colours = cells.mean(axis=(3, 6), dtype=np.float32).transpose(0, 1, 3, 2, 4, 5)
        self.matrix = np.linalg.lstsq(_surroundings(latents), colours.reshape(-1, 3 * self.fine**2), rcond=None)[0]

    def __call__(self, latents: np.ndarray) -> np.ndarray:
        """Latents [B, C, h, w], of any scale, side by side as one small picture uint8 [k h, B k w, 3]; noisy ones are
        brought to the variance of the last ones, 1."""
        latents = np.asarray(latents, np.float32)
        latents = latents / np.maximum(latents.std(axis=(1, 2, 3), keepdims=True), 1e-6)
        (count, _, height, width), fine = latents.shape, self.fine
        colours = _surroundings(latents) @ self.matrix
        shown = np.clip(np.rint(np.nan_to_num(colours)), 0, 255).astype(np.uint8)
        cells = shown.reshape(count, height, width, fine, fine, 3).transpose(1, 3, 0, 2, 4, 5)
        return np.ascontiguousarray(cells).reshape(fine * height, count * fine * width, 3)


def _surroundings(latents: np.ndarray) -> np.ndarray:
    """[B h w, 9 C + 1]: the values of each place and of its neighbours, the border repeated, and 1."""
    height, width = latents.shape[2:]
    padded = np.pad(latents, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    around = [padded[:, :, top : top + height, left : left + width] for top in range(3) for left in range(3)]
    places = np.moveaxis(np.concatenate(around, axis=1), 1, -1).reshape(-1, 9 * latents.shape[1])
    return np.concatenate([places, np.ones((len(places), 1), np.float32)], axis=1)


class Painter:
    """Models by name, and drawings by them. sources: what pictures say of where a model came from."""

    def __init__(self, models: dict, sources: dict | None = None):
        self.models = models
        self.sources = {name: {"model": name, **(sources or {}).get(name, {})} for name in models}
        # Of latents that a VAE decodes; those of other models have no picture before they are done.
        self.previews = {
            name: Preview(one.decode, one.model.vae.config.latent_channels) if hasattr(one.model, "vae") else None
            for name, one in models.items()
        }

    def limit(self, most_steps: int) -> None:
        """By default no model is drawn in more steps."""
        for one in self.models.values():
            steps = min(one.model.usual.num_inference_steps, most_steps)
            one.model.usual = replace(one.model.usual, num_inference_steps=steps)

    def describe(self) -> list[dict]:
        """What can be known of the models, JSON-ready."""
        return [
            {
                "name": name,
                "resolution": one.resolution,
                "lora": one.lora,
                "samplers": samplers_of(one.model.process, one.model.usual.sampler),
                "guidance_scale": one.model.usual.guidance_scale,
                "num_inference_steps": one.model.usual.num_inference_steps,
                "example_prompt": one.example_prompt,
            }  # fmt: skip
            for name, one in self.models.items()
        ]

    def prepare(self, values: dict) -> tuple[dict, int, str, Plan]:
        """(a job's settings, its steps, notes for its sender, what is drawn) of a request. Raises ConfigError."""
        model = self.models[values["model"]]
        size = height, width = tuple(values[side] or model.resolution for side in ("height", "width"))
        image, mask, strength = (values[name] for name in ("image", "mask", "strength"))
        try:
            if model.model.takes_mask and (image is None or mask is None):
                raise ConfigError(NEEDS_MASK)
            if image is None and (mask is not None or strength is not None):
                raise ConfigError("mask and strength are for a picture that is drawn over; send an image too")
            values = {**values, "strength": usual_strength(image, mask) if strength is None else strength}
            drawing = Drawing(**{one.name: values[one.name] for one in fields(Drawing)})
            drawing = drawing.fit(model.model.process, model.model.usual)
            model.latent_shape(height, width)
            if model.guide:
                from ...methods.autoguidance import check_asked

                check_asked(drawing, [values["negative_prompt"]])
            given = read_beginning(image, mask, size)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--", "")) from error
        plain = {name: value for name, value in values.items() if name not in ("image", "mask")}
        settings = plain | {"height": height, "width": width} | {name: getattr(drawing, name) for name in KEPT}
        requests, axes = [Request(values["prompt"], values["negative_prompt"])], {SCALE: [drawing.guidance_scale]}
        plan = Plan(requests, values["num_samples"], axes, drawing, values["seed"], height, width, exact=False,
                    source=self.sources[values["model"]], **given)  # fmt: skip
        batches = math.ceil(values["num_samples"] / BATCH_SIZE)
        warning = describe_prompts(model, [values["prompt"], values["negative_prompt"]], has_syntaxes=False)
        return settings, batches * drawing.num_passes(), warning, plan

    def draw(self, job: Job, tell: Callable) -> Iterator[bytes]:
        """The job's pictures as PNG, a batch at a time. Raises PpldmError."""
        plan, model = job.plan, self.models[job.settings["model"]]
        records = plan.records(model)
        batches = list(batches_of(plan, records, BATCH_SIZE))
        preview, shown, done = self.previews[job.settings["model"]], 0.0, 0

        def follow(count: int, step: int, num_steps: int, latents) -> None:
            nonlocal shown
            job.num_steps, small = len(batches) * num_steps, None
            if preview and time.monotonic() - shown >= _PREVIEW_SECONDS:
                small, shown = preview(latents.astype("float32").numpy()), time.monotonic()
            tell(done * num_steps + step, small)

        for number, (_, picture, texts) in enumerate(draw_batches(model, plan, records, batches, follow), 1):
            yield as_png(picture, texts)
            done = number // BATCH_SIZE
